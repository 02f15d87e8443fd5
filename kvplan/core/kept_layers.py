"""The caches of a model as engines without vLLM's groups of layers see them.

Such an engine has one row of memory for each token in all layers that keep every token, perhaps another for the
layers with windows, and states beside both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvplan.core.kv_cache import STATES, Cache, CacheFormat, ChunkedLocal, LayerCache, SlidingWindow
from kvplan.core.kv_pool import GroupSize
from kvplan.core.weights import Stage
from kvplan.errors import InputError


class KeptLayers(NamedTuple):
    """Caches by how long they are kept: of every token, of a window, of fixed size."""

    whole: tuple[LayerCache, ...]
    windows: tuple[LayerCache, ...]
    states: tuple[LayerCache, ...]

    @property
    def window(self) -> int:
        """Tokens of the longest window or chunk; 0 where there is none."""
        lengths = [
            cache.chunk if isinstance(cache, ChunkedLocal) else cache.window
            for _, cache in self.windows
            if isinstance(cache, (ChunkedLocal, SlidingWindow))
        ]
        return max(lengths, default=0)


def keep_layers(
    engine: str, layers: Iterable[LayerCache], *, whole: Sequence[type], windows: Sequence[type] = ()
) -> KeptLayers:
    """The layers, sorted. ``whole`` and ``windows`` are the classes that the engine keeps so, whatever they are.

    Raises `InputError` for a kind whose memory in this engine is not known.
    """
    kept: tuple[list[LayerCache], ...] = ([], [], [])
    for item in layers:
        if isinstance(item.cache, tuple(whole)):
            kept[0].append(item)
        elif isinstance(item.cache, tuple(windows)):
            kept[1].append(item)
        elif isinstance(item.cache, STATES):
            kept[2].append(item)
        else:
            raise InputError(
                f"how {engine} keeps layers of the kind {item.cache.kind} is not known",
                where="--engine",
                hint="use vllm",
            )
    return KeptLayers(*map(tuple, kept))


def row_bytes(layers: Iterable[LayerCache], form: CacheFormat, stage: Stage | None) -> int:
    """Bytes of one token, or of one state, in those of the layers that a stage holds; None: in all."""
    return sum(item.cache.page_bytes(1, form) for item in layers if stage is None or stage.holds(item.layer))


def as_group(
    layers: Sequence[LayerCache], form: CacheFormat, block_size: int, blocks: int
) -> tuple[GroupSize, ...]:
    """The layers as one group of a report; none where there are no layers. A state's block is one state."""
    if not layers:
        return ()
    # Caches of different kinds are equal as tuples where their fields are.
    caches: list[Cache] = list({(item.cache.kind, item.cache): item.cache for item in layers}.values())
    pages = {cache.page_bytes(1, form) * (1 if isinstance(cache, STATES) else block_size) for cache in caches}
    return (
        GroupSize(
            kinds=tuple(dict.fromkeys(cache.kind for cache in caches)),
            layers=len(layers),
            padded_layers=len(layers),
            block_size=block_size,
            page_bytes=pages.pop() if len(pages) == 1 else None,
            blocks_per_sequence=blocks,
        ),
    )
