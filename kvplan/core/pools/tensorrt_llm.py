"""TensorRT-LLM's pool of blocks.

The rule is that of the C++ runtime since 0.5 (batch_manager/kvCacheManager.cpp ``calculateMaxNumBlocks``) and of the
PyTorch backend after it (_torch/pyexecutor/resource_manager.py): a share of the memory that is free once the engine is
loaded, in tokens, rounded up to whole blocks. Start-up logs agree with it (benchmarks/other_engines_against_logs.py).

Layers with windows keep all tokens unless ``max_attention_window`` is set, which is not a setting here. How states
of recurrent layers are kept is not known.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvplan.core.deployment import Deployment, even_stages
from kvplan.core.engine_rules import CommonRules
from kvplan.core.kept_layers import as_group, keep_layers, row_bytes
from kvplan.core.kv_cache import (
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
from kvplan.errors import InputError, unknown_name

_GIB = 1 << 30
_FORMS = ("fp8", "nvfp4", "int8", "float16", "bfloat16", "float32")


class TensorrtLlmRules(CommonRules):
    """Defaults of the LLM API (llmapi/llm_args.py ``KvCacheConfig``, ``BaseLlmArgs``)."""

    name = "tensorrt-llm"
    #: ``free_gpu_memory_fraction``: of what is free once weights are loaded.
    gpu_memory_utilization = 0.9
    missing_settings = CommonRules.missing_settings | {
        "mamba_ssm_cache_dtype",
        "disable_hybrid_kv_cache_manager",
        "async_scheduling",
        "num_gpu_blocks_override",
    }

    def batch_limits(self, memory_bytes: int | None, gpu_name: str) -> tuple[int, int]:
        """``(max_num_tokens, max_batch_size)``."""
        return 8192, 2048

    def prefix_caching(self, *, has_states: bool, has_attention: bool) -> bool:
        """``enable_block_reuse`` is on."""
        return True

    def kv_form(
        self,
        asked: str,
        *,
        spec: ModelSpec,
        dtype: str,
        compute_capability: str | None,
    ) -> tuple[str, str]:
        """``(form, why)``: given, the checkpoint's own, or the model's dtype."""
        if asked == "auto":
            checkpoint = spec.kv_cache_dtype
            if checkpoint is not None and checkpoint in _FORMS:
                return checkpoint, "as the checkpoint says"
            return dtype, "as dtype"
        if asked not in _FORMS:
            raise unknown_name("KV-cache dtype", asked, [*_FORMS, "auto"], where="--kv-cache-dtype")
        return asked, ""

    def default_block_size(
        self, caches: Sequence[Cache], kv_form: str, compute_capability: str | None
    ) -> tuple[int, str]:
        """``tokens_per_block``: 32 in the LLM API; engines of before 0.18 were built with 64."""
        return 32, ""


class TensorrtLlmPool(CommonPool):
    """Blocks of ``tokens_per_block`` tokens in all layers.

    Where they are too few for the longest sequence, the engine starts with a lower limit. `token_line` has its
    ``max tokens in paged KV cache``.
    """

    formulas = Formulas(
        budget="(memory - weights {weights} - rotary tables {extras} - overhead {overhead}) x {utilization}",
        block="tokens of a block x bytes of a token in all layers",
        blocks="ceil((available {available} // bytes of a token) / {tokens})",
        pages_source="batch_manager/kvCacheManager.h, calculateCacheSizePerToken",
        states_source="not known",
        groups_source="batch_manager/kvCacheManager.cpp, calculateMaxNumBlocks",
        budget_source="batch_manager/kvCacheManager.cpp, calculateMaxNumBlocks",
        overhead_source="from one start-up log, docs/engines.md",
    )

    def __init__(self, spec: ModelSpec, deployment: Deployment, form: CacheFormat | None = None) -> None:
        super().__init__(deployment, form)
        kinds = (FullAttention, LatentAttention, SparseIndexer, SlidingWindow, ChunkedLocal)
        layers = keep_layers("tensorrt-llm", [*spec.layers, *deployment.drafts], whole=kinds)
        if layers.states:
            raise InputError(
                f"how tensorrt-llm keeps states such as {layers.states[0].cache.kind} is not known",
                where="--engine",
                hint="use vllm or sglang",
            )
        self._layers = layers.whole
        if self.block_size < 2 or self.block_size & (self.block_size - 1):
            raise InputError(
                f"tensorrt-llm has no blocks of {self.block_size} tokens",
                where="--block-size",
                hint="use a power of two from 2 on, such as 32",
            )

    def bytes_per_block(self, stage: Stage | None = None) -> int:
        """Tokens of a block x bytes of a token."""
        return self.block_size * row_bytes(self._layers, self._form, stage)

    def blocks(self, length: int) -> int:
        """Blocks for all tokens."""
        return -(-length // self.block_size)

    def kv_memory(self, memory_bytes: int, used_bytes: int) -> int:
        """The fraction of what is free."""
        return int((memory_bytes - used_bytes) * self._deployment.gpu_memory_utilization)

    def share(self, available_bytes: int, stage: Stage) -> Share:
        """Whole tokens, rounded up to whole blocks: the pool may be up to a block larger than the memory."""
        row = row_bytes(self._layers, self._form, stage)
        if not row:
            return Share(1, 0)
        blocks = self.blocks(max(0, available_bytes // row))
        return Share(blocks, blocks * self.block_size * row)

    def groups(self, length: int) -> tuple[GroupSize, ...]:
        """All layers in one group."""
        return as_group(self._layers, self._form, self.block_size, self.blocks(length))


def tensorrt_llm_stages(num_layers: int, stages: int) -> tuple[Stage, ...]:
    """Layers shared out evenly; the first stages have one more (mapping.py ``pp_layers``)."""
    return even_stages(num_layers, stages, longer=range(stages))


def tensorrt_llm_overhead(spec: ModelSpec, deployment: Deployment) -> Overhead:
    """Memory beside weights that is gone before the pool is made: context, activations, decoder.

    A guess with a wide range: one log alone tells all terms (Qwen1.5-7B on 40 GB: 3.1 GiB).
    """
    communication = 0 if deployment.tensor_parallel_size == 1 else _GIB
    return Overhead(
        activations=2 * _GIB,
        cuda_graphs=0,
        runtime=_GIB + communication,
        low=_GIB,
        high=8 * _GIB + 2 * communication,
        communication=communication,
    )
