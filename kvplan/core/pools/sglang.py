"""SGLang's pool of tokens, as 0.5.23 sizes it.

Read in srt/model_executor/pool_configurator.py (bytes of a token, sizes of the pools), srt/mem_cache/
kv_cache_configurator.py (budget, states, limit of requests), srt/mem_cache/memory_pool.py (buffers and the log line)
and srt/arg_groups (defaults). docs/engines.md tells what is left out.

The unit is a token: a row in every layer that keeps all tokens. Layers with windows have a second pool with
``swa_full_tokens_ratio`` as many rows, in the architectures that SGLang knows so; states have slots of their own, for
which ``mamba_full_memory_ratio`` of the memory is set aside first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from kvplan.core.deployment import Deployment, even_stages
from kvplan.core.engine_rules import CommonRules
from kvplan.core.gpu import generation
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

_MIB = 1 << 20
_GIB = 1 << 30

#: Rows of the pool of windows for each of the whole layers' (fields/schedule.py ``swa_full_tokens_ratio``).
_WINDOW_RATIO = Fraction(4, 5)
#: Memory for states for each byte of KV (``mamba_full_memory_ratio``).
_STATE_RATIO = Fraction(9, 10)
#: Requests at once where none are asked for: at least so many (``resolve_max_num_reqs``).
_RUNNING = 2048
#: Slots for states that one request needs with the radix cache, and two more where steps overlap (extra buffer).
_STATE_SLOTS, _OVERLAP_SLOTS = 3, 2

#: Architectures whose windows have a pool of their own (configs/model_config.py ``is_hybrid_swa_model``).
WINDOW_ARCHITECTURES = frozenset(
    {
        "Llama4ForConditionalGeneration",
        "GptOssForCausalLM",
        "GraniteSWAForCausalLM",
        "GraniteMoeSWAForCausalLM",
        "IQuestQ1ForCausalLM",
        "MiMoV2ForCausalLM",
        "MiMoV2FlashForCausalLM",
        "Step3p5ForCausalLM",
        "Step3p7ForConditionalGeneration",
        "Gemma4ForCausalLM",
        "Gemma4ForConditionalGeneration",
        "Gemma4UnifiedForConditionalGeneration",
        "LagunaForCausalLM",
        "MellumForCausalLM",
        "MuseGlimmerForCausalLM",
        "MuseGlimmerForConditionalGeneration",
    }
)

#: What the engine calls a form, and its name here.
_FORMS = {
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp8": "fp8_e4m3",
    "fp8_e4m3": "fp8_e4m3",
    "fp8_e5m2": "fp8_e5m2",
    "mxfp8": "mxfp8",
    "nvfp4": "nvfp4",
    "fp4_mx_block16": "fp4_mx_block16",
}


class SglangRules(CommonRules):
    """Defaults of SGLang 0.5.23."""

    name = "sglang"
    missing_settings = CommonRules.missing_settings | {
        "num_gpu_blocks_override",
    }

    def batch_limits(self, memory_bytes: int | None, gpu_name: str) -> tuple[int, int]:
        """``(chunked_prefill_size, max_running_requests)`` (arg_groups/memory_hook.py), by the GPU's memory."""
        if memory_bytes is None:
            return 4096, _RUNNING
        chunk = 2048
        for least, size in ((20, 4096), (60, 8192), (160, 16384)):
            if memory_bytes >= least * _GIB:
                chunk = size
        return chunk, _RUNNING

    def async_scheduling(self, method: str | None) -> bool:
        """Steps overlap unless that is switched off."""
        return True

    def memory_share(
        self,
        *,
        memory_bytes: int | None,
        ranks: int,
        max_num_batched_tokens: int,
        enforce_eager: bool,
        caches: Sequence[Cache],
    ) -> float:
        """``mem_fraction_static``: what is left after reserves for activations and graphs (memory_hook.py).

        ``ranks`` are those of tensor parallelism x pipeline stages.
        """
        if memory_bytes is None:
            return 0.95
        memory_mib = max(1, memory_bytes // _MIB)
        reserved = 512 + 1.5 * max(max_num_batched_tokens, 2048) + ranks / 8 * 1024
        if not enforce_eager:
            reserved += 2 * _largest_decode_graph(memory_mib, ranks)
            if any(isinstance(cache, LatentAttention) for cache in caches):
                reserved += 1.5 * 1024
            else:
                reserved += 8 * num_prefill_graphs(max_num_batched_tokens)
        if memory_mib > 60 * 1024:
            reserved = max(reserved, 10 * 1024)
        return max(0.0, round((memory_mib - reserved) / memory_mib, 3))

    def prefix_caching(self, *, has_states: bool, has_attention: bool) -> bool:
        """The radix cache is on."""
        return True

    def state_dtypes(self, caches: Sequence[Cache]) -> tuple[str | None, str | None]:
        """bfloat16 for convolutions, and float32 for states unless the model says (configs/mamba_utils.py)."""
        says = any(getattr(cache, "ssm_dtype", None) is not None for cache in caches)
        return "bfloat16", None if says else "float32"

    def kv_form(
        self,
        asked: str,
        *,
        spec: ModelSpec,
        dtype: str,
        compute_capability: str | None,
    ) -> tuple[str, str]:
        """``(form, why)`` (mem_cache/kv_cache_dtype.py; sparse latents ``calculate_mla_kv_cache_dim``)."""
        caches = [item.cache for item in spec.layers]
        latent = any(isinstance(cache, LatentAttention) for cache in caches)
        sparse = any(isinstance(cache, SparseIndexer) for cache in caches)
        blackwell = generation(compute_capability) >= 10
        if asked == "auto":
            form, why = dtype, "as dtype"
            if sparse:
                form, why = ("fp8_e4m3" if blackwell else "bfloat16"), "sparse latents on this GPU"
            elif (spec.kv_cache_dtype or "").startswith("fp8"):
                form, why = "fp8_e4m3", "as the checkpoint says"
        elif asked in _FORMS:
            form, why = _FORMS[asked], "" if _FORMS[asked] == asked else "as SGLang stores it"
        else:
            raise unknown_name("KV-cache dtype", asked, [*_FORMS, "auto"], where="--kv-cache-dtype")
        if sparse and form not in ("bfloat16", "fp8_e4m3"):
            raise InputError(
                f"sparse latent attention has no KV cache of the form {asked}",
                where="--kv-cache-dtype",
                hint="use bfloat16 or fp8_e4m3",
            )
        if sparse and form == "fp8_e4m3" and not blackwell:
            return "fp8_ds_mla", "fp8 latents with scales and a 16-bit rotary part"
        if latent and form == "nvfp4":
            return "fp4_mx_block16", "latents in 4 bits are stored so"
        return form, why

    def default_block_size(
        self, caches: Sequence[Cache], kv_form: str, compute_capability: str | None
    ) -> tuple[int, str]:
        """``page_size``: 1, or 64 where the kernels want pages (sparse latents, TensorRT-LLM's on Blackwell)."""
        if any(isinstance(cache, SparseIndexer) for cache in caches):
            return 64, "sparse latents"
        return (64, "this GPU") if generation(compute_capability) == 10 else (1, "")


def num_prefill_graphs(largest: int) -> int:
    """How many lengths of a prefill are captured (arg_groups/cuda_graph_hook.py).

    >>> num_prefill_graphs(8192)
    58
    """
    sizes = [
        *range(4, 33, 4),
        *range(48, 257, 16),
        *range(288, 513, 32),
        *range(576, 1025, 64),
        *range(1280, 4097, 256),
        *range(4608, largest + 1, 512),
    ]
    return sum(size <= largest for size in sizes)


def _largest_decode_graph(memory_mib: int, ranks: int) -> int:
    """The largest batch whose graph is captured (memory_hook.py)."""
    for below_gib, few, many in ((20, 8, 8), (35, 48, 160), (60, 32, 160), (160, 256, 512)):
        if memory_mib < below_gib * 1024:
            return few if ranks < 4 else many
    return 512


class SglangPool(CommonPool):
    """Rows for tokens, in pages of ``page_size``.

    A sequence that is longer than all pages is refused when it comes, not at the start. `token_line` has the
    ``#tokens`` of the line "KV Cache is allocated".
    """

    formulas = Formulas(
        budget="memory x {utilization} - weights {weights} - rotary tables {extras} - overhead {overhead}",
        block="page size x (rows of the whole layers + swa_full_tokens_ratio x rows of the windows)",
        blocks="tokens // page size, tokens = (available {available} - states) // bytes of a token",
        pages_source="srt/model_executor/pool_configurator.py",
        states_source="srt/configs/mamba_utils.py",
        groups_source="srt/model_executor/pool_configurator.py",
        budget_source="srt/mem_cache/kv_cache_configurator.py",
        overhead_source="from a few start-up logs, docs/engines.md",
    )

    def __init__(self, spec: ModelSpec, deployment: Deployment, form: CacheFormat | None = None) -> None:
        super().__init__(deployment, form)
        apart = spec.architecture in WINDOW_ARCHITECTURES and deployment.hybrid_kv_cache_manager
        windows = (SlidingWindow, ChunkedLocal)
        self._layers = keep_layers(
            "sglang",
            [*spec.layers, *deployment.drafts],
            whole=(FullAttention, LatentAttention, SparseIndexer, *(() if apart else windows)),
            windows=windows if apart else (),
        )
        self._num_layers = spec.num_layers
        self._window = self._layers.window
        # Where there are only windows, their rows are the unit.
        self._window_ratio = _WINDOW_RATIO if self._layers.whole else Fraction(1)

    def _token_bytes(self, stage: Stage | None) -> Fraction:
        whole = row_bytes(self._layers.whole, self._form, stage)
        return whole + self._window_ratio * row_bytes(self._layers.windows, self._form, stage)

    def bytes_per_block(self, stage: Stage | None = None) -> int:
        """Bytes that a page adds to both pools, rounded up."""
        return math.ceil(self.block_size * self._token_bytes(stage))

    def blocks(self, length: int) -> int:
        """Pages of the pool of whole layers that a sequence keeps others from using.

        In the pool of windows a sequence holds a window and a page (``validate_swa_pool_size``); where that pool is
        the scarcer one, its pages count for more.
        """
        if not (self._layers.whole or self._layers.windows):
            return 0
        pages = self._pages(length)
        if not self._layers.windows:
            return pages
        of_windows = math.ceil(self._window_pages(length) / self._window_ratio)
        return max(pages, of_windows) if self._layers.whole else of_windows

    def _pages(self, length: int) -> int:
        return -(-length // self.block_size)

    def _window_pages(self, length: int) -> int:
        return self._pages(min(length, self._window + self.block_size))

    def allocated_bytes(self, length: int, stage: Stage | None = None) -> int:
        """Pages of both pools and a state."""
        page, layers = self.block_size, self._layers
        return (
            self._pages(length) * page * row_bytes(layers.whole, self._form, stage)
            + self._window_pages(length) * page * row_bytes(layers.windows, self._form, stage)
            + row_bytes(layers.states, self._form, stage)
        )

    def kv_memory(self, memory_bytes: int, used_bytes: int) -> int:
        """Free memory less the part that is not static: memory x fraction - used (``_profile_available_bytes``).

        Memory is what is free before weights are loaded; what is taken before is the larger part of the overhead.
        """
        return int(memory_bytes * self._deployment.gpu_memory_utilization) - used_bytes

    def share(self, available_bytes: int, stage: Stage) -> Share:
        """States first, then rows; each pool has a page more, for writes that go nowhere.

        ``_handle_max_mamba_cache``, ``calculate_pool_sizes``, and memory_pool.py for the page more.
        """
        slots, state_bytes = self._state_slots(available_bytes)
        sequences = slots // self._slots_per_request() if self._layers.states else None
        row = self._token_bytes(stage)
        if not row:
            return Share(self._pages(self._deployment.max_model_len), state_bytes, sequences)
        tokens = max(0, int((available_bytes - state_bytes) // row))
        pages = tokens // self.block_size
        if self._layers.windows and int(self._window_ratio * pages) * self.block_size <= (
            self._window + self.block_size
        ):
            pages = 0  # the engine refuses a pool of windows that holds none
        rows = math.ceil((pages + 1) * self.block_size * row)
        return Share(pages, state_bytes + rows if pages else state_bytes, sequences)

    def _state_slots(self, available_bytes: int) -> tuple[int, int]:
        """Slots for states and the bytes of all of them and of the one for padding."""
        if not self._layers.states:
            return 0, 0
        deployment = self._deployment
        stages = sglang_stages(self._num_layers, deployment.pipeline_parallel_size)
        one = max(row_bytes(self._layers.states, self._form, part) for part in stages)
        if not deployment.enable_prefix_caching and deployment.is_max_num_seqs_given:
            slots = deployment.max_num_seqs
        else:
            budget = available_bytes * _STATE_RATIO / (1 + _STATE_RATIO)
            slots = max(0, int((budget - one) // one))
        return slots, (slots + 1) * one

    def _slots_per_request(self) -> int:
        """``_calculate_mamba_ratio``."""
        if not self._deployment.enable_prefix_caching:
            return 1
        return _STATE_SLOTS + (_OVERLAP_SLOTS if self._deployment.async_scheduling else 0)

    def groups(self, length: int) -> tuple[GroupSize, ...]:
        """The two pools and the states."""
        layers, form = self._layers, self._form
        return (
            *as_group(layers.whole, form, self.block_size, self._pages(length)),
            *as_group(layers.windows, form, self.block_size, self._window_pages(length)),
            *as_group(layers.states, form, self.block_size, 1),
        )


def sglang_stages(num_layers: int, stages: int) -> tuple[Stage, ...]:
    """Layers shared out evenly; the last stages have one more (srt/distributed/utils.py ``get_pp_indices``)."""
    return even_stages(num_layers, stages, longer=range(stages - 1, -1, -1))


def sglang_overhead(spec: ModelSpec, deployment: Deployment) -> Overhead:
    """Memory of the static share that is neither weights nor KV: the driver's and NCCL's, and loading's leftovers.

    Activations and graphs come out of the other share. From logs: free memory before loading is 0.6 GiB below the
    total on RTX 3090 (2 ranks), 2.3 on H200 (8 ranks); weights and KV of Qwen3-235B-A22B on 4 H100 leave 1.7.
    """
    communication = 0 if deployment.tensor_parallel_size == 1 else 12 * _GIB // 10
    runtime = 6 * _GIB // 10 + communication
    return Overhead(
        activations=0,
        cuda_graphs=0,
        runtime=runtime,
        low=3 * _GIB // 10,
        high=2 * runtime + _GIB,
        communication=communication,
    )
