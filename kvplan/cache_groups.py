"""A model's cache groups, as sizing forms them, in the form that the simulated scheduler takes."""

from __future__ import annotations

from typing import NamedTuple

from kvplan.core.engine import GroupSpec
from kvplan.core.kv_cache import (
    STATES,
    ChunkedLocal,
    CompressedIndexer,
    CompressedLatent,
    FullAttention,
    LatentAttention,
    SlidingWindow,
    SparseIndexer,
)
from kvplan.core.kv_groups import Page, PageGroup
from kvplan.core.kv_pool import VllmPool
from kvplan.core.weights import Stage
from kvplan.errors import InputError
from kvplan.serving import Served

_WHOLE = (FullAttention, LatentAttention, SparseIndexer, CompressedLatent, CompressedIndexer)


class CacheGroups(NamedTuple):
    """Groups, and in how many slots the memory of a block is counted; None: by its tokens."""

    specs: tuple[GroupSpec, ...]
    slots_a_block: int | None


#: Of a model whose layers keep all tokens.
ONE_FULL_GROUP = CacheGroups((GroupSpec(),), None)


def cache_groups(served: Served) -> CacheGroups:
    """The groups of a deployment's first stage, with the bytes of a block that are not padding.

    Raises `InputError` for kinds of caches that the scheduler is not simulated with, and for engines other than vLLM
    where there is more than one group of layers that keep all tokens.
    """
    pool, where = served.plan.pool, f"model {served.spec.name}"
    if isinstance(pool, VllmPool):
        groups = pool.page_groups
        if pool.state_mode == "all":
            raise InputError(
                "not yet supported: simulation with a state kept for every block",
                where=where,
                hint="use --engine vllm, whose newest version keeps fewer, or --no-enable-prefix-caching",
            )
        stage = served.plan.stages[0]
        specs = tuple(_spec(group, pool, stage, served) for group in groups)
        if len(specs) == 1 and specs[0].kind == "full":
            return ONE_FULL_GROUP
        return CacheGroups(specs, pool.bytes_per_block(stage))
    if len(pool.groups(1)) != 1 or not all(isinstance(item.cache, _WHOLE) for item in served.plan.layers):
        raise InputError(
            f"not yet supported: engine {served.engine.name} with layers of several kinds ({_kinds(served)})",
            where=where,
            hint="use --engine vllm, or a model whose layers keep all tokens",
        )
    return ONE_FULL_GROUP


def _spec(group: PageGroup, pool: VllmPool, stage: Stage, served: Served) -> GroupSpec:
    """What layers that share a block table ask of the scheduler; they must ask the same."""
    found = {_spec_of_page(page, pool, served) for page in group.pages}
    if len(found) != 1:
        raise _unsupported(served)
    payload = sum(_payload_bytes(page, served) for page in group.pages if stage.holds(page.layer))
    return found.pop()._replace(payload=payload)


def _spec_of_page(page: Page, pool: VllmPool, served: Served) -> GroupSpec:
    cache, size = page.cache, page.block_size
    if isinstance(cache, _WHOLE):
        return GroupSpec("full", size)
    if isinstance(cache, SlidingWindow):
        return GroupSpec("sliding", size, window=cache.window)
    if isinstance(cache, ChunkedLocal):
        return GroupSpec("chunked", size, chunk=cache.chunk)
    if isinstance(cache, STATES):
        if pool.state_mode == "none":
            return GroupSpec("state", size)
        kernel = 1 if cache.kind == "mamba2" else size
        return GroupSpec(
            "state", size, mode="align", checkpoint=kernel if cache.kind in pool.checkpointed else None
        )
    raise _unsupported(served)


def _payload_bytes(page: Page, served: Served) -> int:
    """Bytes of a layer's share of a block without padding: of a state, or of as many tokens."""
    tokens = 1 if isinstance(page.cache, STATES) else page.block_size
    return page.cache.page_bytes(tokens, served.deployment.cache)


def _unsupported(served: Served) -> InputError:
    return InputError(
        f"not yet supported: simulation of layers of these kinds ({_kinds(served)})",
        where=f"model {served.spec.name}",
        hint="kvplan size plans its memory",
    )


def _kinds(served: Served) -> str:
    return ", ".join(dict.fromkeys(cache.kind for cache, _ in served.spec.attention))
