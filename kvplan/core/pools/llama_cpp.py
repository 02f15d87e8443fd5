"""llama.cpp's caches: cells for the context that is asked for, types of ggml for keys and values.

Read in the sources of late 2025 and 2026: src/llama-context.cpp (padding, streams), src/llama-kv-cache.cpp (sizes, no
values for latents), src/llama-kv-cache-iswa.cpp (windows), src/llama-kv-cache-dsa.cpp (indexers), src/llama-memory-
recurrent.cpp and src/llama-hparams.cpp (states), tools/server (slots). Sizes were held against start-up logs.

llama.cpp makes no pool of what is free: it allocates the context that ``-c`` asks for. The figures here are those of
the largest context that the memory holds; a block is 256 cells, the padding of the context. ``--max-num-seqs`` is
``--parallel``: left out, four slots share one context; given, each slot has an equal part of its own.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from kvplan.core.deployment import Deployment, check_stages, stages_of
from kvplan.core.engine_rules import CommonRules
from kvplan.core.kept_layers import as_group, keep_layers, row_bytes
from kvplan.core.kv_cache import (
    GGML_TYPES,
    Cache,
    CacheFormat,
    ChunkedLocal,
    FullAttention,
    LatentAttention,
    SlidingWindow,
    SparseIndexer,
)
from kvplan.core.kv_pool import CommonPool, Formulas, GroupSize, Share
from kvplan.core.model import ModelSpec
from kvplan.core.overhead import Overhead
from kvplan.core.weights import Stage
from kvplan.errors import unknown_name

_MIB = 1 << 20
_GIB = 1 << 30
#: Cells that a context and a cache of windows are padded to.
_PADDING = 256
#: More blocks than any context has.
_MOST_BLOCKS = 1 << 40
#: A context may be longer than the model was trained on.
_ANY_LENGTH = 1 << 40


class LlamaCppRules(CommonRules):
    """Defaults of llama-server."""

    name = "llama.cpp"
    gpu_memory_utilization = 1.0
    #: ``--split-mode layer``: GPUs share out the layers.
    spreads_layers = True
    missing_settings = CommonRules.missing_settings | {
        "tensor_parallel_size",
        "data_parallel_size",
        "enable_expert_parallel",
        "mamba_ssm_cache_dtype",
        "enable_prefix_caching",
        "async_scheduling",
        "block_size",
        "gpu_memory_utilization",
        "num_gpu_blocks_override",
        "enforce_eager",
    }

    def lengths(self, spec: ModelSpec) -> tuple[int, int] | None:
        """What the model was trained on; more is let through (llama-context.cpp warns)."""
        longest = spec.max_position_embeddings
        return None if longest is None else (longest, _ANY_LENGTH)

    def batch_limits(self, memory_bytes: int | None, gpu_name: str) -> tuple[int, int]:
        """``(--ubatch-size, --parallel)``."""
        return 512, 4

    def prefix_caching(self, *, has_states: bool, has_attention: bool) -> bool:
        """A slot keeps its last prompt, but no memory is made for it."""
        return False

    def state_dtypes(self, caches: Sequence[Cache]) -> tuple[str | None, str | None]:
        """States are float32 (llama-model.cpp ``create_memory``)."""
        return "float32", "float32"

    def kv_form(
        self,
        asked: str,
        *,
        spec: ModelSpec,
        dtype: str,
        compute_capability: str | None,
    ) -> tuple[str, str]:
        """``(--cache-type-k/--cache-type-v, why)``: f16 whatever the model's dtype; one name is for both."""
        if asked == "auto":
            return "f16", "default of llama.cpp"
        for name in asked.split("/", 1):
            if name not in GGML_TYPES:
                raise unknown_name("KV-cache type", name, [*GGML_TYPES, "auto"], where="--kv-cache-dtype")
        return asked, ""

    def default_block_size(
        self, caches: Sequence[Cache], kv_form: str, compute_capability: str | None
    ) -> tuple[int, str]:
        """The padding of a context."""
        return _PADDING, ""


class LlamaCppPool(CommonPool):
    """Cells of layers that keep all tokens, cells of windows beside them, and a state for each slot."""

    formulas = Formulas(
        budget="memory - weights {weights} - rotary tables {extras} - overhead {overhead}",
        block="256 cells of the layers that keep all tokens",
        blocks="the most whose cells, windows and states take no more than {available}",
        pages_source="src/llama-kv-cache.cpp",
        states_source="src/llama-memory-recurrent.cpp",
        groups_source="src/llama-context.cpp, src/llama-kv-cache-iswa.cpp",
        budget_source="what is free; llama.cpp allocates the context that is asked for",
        overhead_source="from a few start-up logs, docs/engines.md",
    )

    def __init__(self, spec: ModelSpec, deployment: Deployment, form: CacheFormat | None = None) -> None:
        super().__init__(deployment, form)
        self.block_size = _PADDING
        all_cells = () if deployment.hybrid_kv_cache_manager else (SlidingWindow, ChunkedLocal)
        self._layers = keep_layers(
            "llama.cpp",
            [*spec.layers, *deployment.drafts],
            whole=(FullAttention, LatentAttention, SparseIndexer, *all_cells),
            windows=(SlidingWindow, ChunkedLocal),
        )
        self._window = self._layers.window
        #: Contexts of their own: one for all slots, or one for each.
        self._streams = deployment.max_num_seqs if deployment.is_max_num_seqs_given else 1

    def bytes_per_block(self, stage: Stage | None = None) -> int:
        """256 cells of the layers that keep all tokens."""
        return _PADDING * row_bytes(self._layers.whole, self._form, stage)

    def cache_bytes(self, cells: int, stage: Stage | None = None) -> int:
        """Bytes of all caches for a context of so many cells, which are shared out among the streams.

        The lines "KV buffer size" and "RS buffer size" of a start-up log add up to it.
        """
        each = _pad(-(-cells // self._streams))
        slots = self._deployment.max_num_seqs if self._streams == 1 else 1
        layers, form = self._layers, self._form
        return (
            each * self._streams * row_bytes(layers.whole, form, stage)
            + self._window_cells(each, slots) * self._streams * row_bytes(layers.windows, form, stage)
            + self._deployment.max_num_seqs * row_bytes(layers.states, form, stage)
        )

    def _window_cells(self, cells: int, slots: int = 1) -> int:
        """Cells of a stream's windows: a window for each slot in it and a batch (llama-kv-cache-iswa.cpp)."""
        return _pad(min(cells, self._window * slots + self._deployment.max_num_batched_tokens))

    def blocks(self, length: int) -> int:
        """Blocks of cells for all tokens."""
        if not (self._layers.whole or self._layers.windows):
            return 0
        return -(-length // _PADDING)

    def allocated_bytes(self, length: int, stage: Stage | None = None) -> int:
        """Whole blocks, the windows of a context of this length, and a state."""
        cells, layers, form = _pad(length), self._layers, self._form
        return (
            cells * row_bytes(layers.whole, form, stage)
            + self._window_cells(cells) * row_bytes(layers.windows, form, stage)
            + row_bytes(layers.states, form, stage)
        )

    def kv_memory(self, memory_bytes: int, used_bytes: int) -> int:
        """All that is left."""
        return memory_bytes - used_bytes

    def share(self, available_bytes: int, stage: Stage) -> Share:
        """The largest context whose caches fit, the same for every stream."""
        streams, seqs = self._streams, self._deployment.max_num_seqs

        def taken(each: int) -> int:
            return self.cache_bytes(each * _PADDING * streams, stage)

        if row_bytes(self._layers.whole, self._form, stage):
            # Beyond so many blocks the whole layers alone take more than there is.
            most = max(0, available_bytes) // (self.bytes_per_block(stage) * streams) + 1
        else:
            most = -(-self._deployment.max_model_len // _PADDING)
        each = bisect_right(range(1, min(most, _MOST_BLOCKS) + 1), available_bytes, key=taken)
        return Share(each * streams, taken(each) if each else 0, seqs if each else 0)

    def groups(self, length: int) -> tuple[GroupSize, ...]:
        """Layers with all cells, windows and states."""
        layers, form = self._layers, self._form
        return (
            *as_group(layers.whole, form, _PADDING, -(-length // _PADDING)),
            *as_group(layers.windows, form, _PADDING, self._window_cells(length) // _PADDING),
            *as_group(layers.states, form, _PADDING, 1),
        )

    def start_check_blocks(self, num_blocks: int) -> int:
        """Blocks of one stream: a sequence cannot have more."""
        return num_blocks // self._streams


def _pad(cells: int) -> int:
    return -(-cells // _PADDING) * _PADDING


def llama_cpp_stages(num_layers: int, stages: int) -> tuple[Stage, ...]:
    """Layers and the output shared out by equal GPUs (llama-model.cpp ``get_layer_buft_list``)."""
    check_stages(num_layers, stages, called="GPUs")
    places = [layer * stages // (num_layers + 1) for layer in range(num_layers)]
    return stages_of([places.count(i) for i in range(stages)])


def llama_cpp_overhead(spec: ModelSpec, deployment: Deployment) -> Overhead:
    """The compute buffer and the CUDA context of each GPU: a guess with a wide range.

    The buffer is at least the logits of a batch in float32. Seen: 1.7 times that (Qwen3.5-9B, 262,144 cells, 0.8 GiB);
    a context of 0.3 GiB (A40).
    """
    logits = deployment.max_num_batched_tokens * spec.vocab_size * 4
    compute = logits * 17 // 10 + 64 * _MIB
    runtime = 3 * _GIB // 10
    return Overhead(
        activations=compute,
        cuda_graphs=0,
        runtime=runtime,
        low=min(logits, compute) + _GIB // 5,
        high=2 * compute + 2 * _GIB,
    )
