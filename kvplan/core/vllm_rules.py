"""What differs between versions of vLLM in how they size the KV cache.

Read in the sources of 0.8.5, 0.11.0, 0.19.0, 0.21.0, 0.24.0, 0.26.0 and 0.33.0; a version between two of these
follows the older one, so "from 0.21" means "0.20 and older were not seen to do it". File names are given where a
rule lives in one place; docs/memory.md lists all.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from fractions import Fraction
from typing import Literal, NamedTuple

from kvplan.core.kv_cache import (
    KV_CACHE_DTYPES,
    Cache,
    CompressedLatent,
    LatentAttention,
    SparseIndexer,
)
from kvplan.core.kv_groups import GroupRules
from kvplan.core.model import ModelSpec
from kvplan.errors import InputError, unknown_name

NEWEST = (0, 33)
_OLDEST = (0, 6)

#: How a version of vLLM counts the tokens of its start-up line: blocks of one group, blocks shared out among the
#: groups, or the concurrency it prints times the longest length.
TokenLine = Literal["blocks", "groups", "concurrency"]
#: Whether states keep one block, one and what prefix caching needs, or one for every block of tokens.
StateMode = Literal["none", "align", "all"]

_GIB = 1 << 30
#: Tokens that a checkpoint of FlashInfer's delta net kernel is a multiple of (v1/attention/backends/gdn_attn.py).
_DELTA_CHECKPOINT = 64
_DEFAULT_BLOCK_SIZE = 16
#: The default block of latents of several tokens (DeepSeek-V4, v1/attention/backends/mla/sparse_swa.py).
_COMPRESSED_BLOCK_SIZE = 256


class VllmRules(NamedTuple):
    """The rules of one version; ``number`` is its major and minor number."""

    number: tuple[int, int]

    @property
    def name(self) -> str:
        """Of the engine."""
        return "vllm"

    @property
    def missing_settings(self) -> frozenset[str]:
        """Options that the engine has not: none, they are its own."""
        return frozenset()

    @property
    def batch_holds_sequences(self) -> bool:
        """Whether a step must have room for a token of every sequence."""
        return True

    @property
    def spreads_layers(self) -> bool:
        """Whether a number of GPUs alone means stages; else it means tensor parallel ranks."""
        return False

    @property
    def version(self) -> str:
        """As vLLM writes it, such as 0.33."""
        return f"{self.number[0]}.{self.number[1]}"

    @property
    def gpu_memory_utilization(self) -> float:
        """The default (config/cache.py); it rose when graph memory began to be subtracted."""
        return 0.92 if self.number >= (0, 21) else 0.9

    def memory_share(
        self,
        *,
        memory_bytes: int | None,
        ranks: int,
        max_num_batched_tokens: int,
        enforce_eager: bool,
        caches: Sequence[Cache],
    ) -> float:
        """The default of ``--gpu-memory-utilization``, which depends on nothing else."""
        return self.gpu_memory_utilization

    @property
    def subtracts_cuda_graphs(self) -> bool:
        """Whether the memory of CUDA graphs comes out of the KV cache (envs.py, estimate on by default)."""
        return self.number >= (0, 21)

    @property
    def reserves_null_block(self) -> bool:
        """Whether the fit check leaves out the null block (v1/core/kv_cache_planning.py)."""
        return self.number >= (0, 33)

    @property
    def override_is_memory(self) -> bool:
        """Whether ``num_gpu_blocks_override`` counts before the fit check and for the automatic length."""
        return self.number >= (0, 21)

    @property
    def token_line(self) -> TokenLine:
        """What the line "GPU KV cache size" says."""
        if self.number >= (0, 21):
            return "concurrency"
        return "groups" if self.number >= (0, 11) else "blocks"

    @property
    def async_scheduling(self) -> bool:
        """The default of ``--async-scheduling``."""
        return self.number >= (0, 19)

    @property
    def latent_row_multiple(self) -> int:
        """Elements that a latent's row is padded to a multiple of: 256 bytes of 2 in 0.7 (seen in its logs)."""
        return 128 if self.number == (0, 7) else 1

    @property
    def scales_yarn(self) -> bool:
        """Whether yarn multiplies the longest length; later the config's own maximum holds (config/model.py)."""
        return self.number < (0, 33)

    def group_rules(self, *, hybrid_manager: bool) -> GroupRules:
        """How layers are grouped. Before 0.11 there is one block table for all."""
        return GroupRules(
            uneven=Fraction(3, 2) if self.number >= (0, 19) else None,
            hybrid_manager=hybrid_manager and self.number >= (0, 11),
            pads_pages=self.number >= (0, 24),
        )

    @property
    def pads_packed_groups(self) -> bool:
        """Whether groups of DeepSeek-V4 get room for each size of page as often as any group has one.

        v1/core/kv_cache_utils.py of 0.21 to 0.26; 0.33 takes the widest group.
        """
        return self.number < (0, 33)

    def chunked_keep_all_tokens(self, *, drafts: bool) -> bool:
        """Whether layers local to a chunk keep all tokens: before 0.19, later beside drafts (config/vllm.py)."""
        return self.number < (0, 19) or drafts

    def tokens_in_flight(
        self,
        max_num_batched_tokens: int,
        *,
        pipeline_parallel_size: int,
        async_scheduling: bool,
        runner_v2: bool,
    ) -> int:
        """Tokens scheduled and not yet settled, behind which no window is freed (config/vllm.py).

        From 0.26 on they are those of every batch that may be under way.
        """
        if self.number < (0, 26):
            return max_num_batched_tokens
        batches = pipeline_parallel_size
        if async_scheduling:
            batches = pipeline_parallel_size + 1 if runner_v2 else max(2, pipeline_parallel_size)
        return batches * max_num_batched_tokens

    def batch_limits(self, memory_bytes: int | None, gpu_name: str) -> tuple[int, int]:
        """``(max_num_batched_tokens, max_num_seqs)`` that a server starts from on this GPU.

        engine/arg_utils.py ``get_batch_defaults``: from 70 GiB on, but not on an A100 (0.8: there too), 8192 and
        1024; in 0.33 from 160 GiB on 16384 and 1024; else, and without a known GPU, 2048 and 256.
        """
        memory, name = memory_bytes or 0, gpu_name.lower()
        if self.number >= (0, 33) and memory >= 160 * _GIB:
            return 16384, 1024
        large = memory >= 70 * _GIB and ("a100" not in name or self.number < (0, 11))
        if large and not (self.number >= (0, 33) and "gb10" in name):
            return 8192, 1024
        return 2048, 256

    def prefix_caching(self, *, has_states: bool, has_attention: bool) -> bool:
        """The default of ``--enable-prefix-caching`` (config/model.py)."""
        if not has_states:
            return True
        return has_attention and self.number >= (0, 26)

    def state_dtypes(self, caches: Sequence[Cache]) -> tuple[str | None, str | None]:
        """What convolutions and recurrent states are kept in by default: the model's own wish, or its dtype."""
        return None, None

    def kv_form(
        self,
        asked: str,
        *,
        spec: ModelSpec,
        dtype: str,
        compute_capability: str | None,
    ) -> tuple[str, str]:
        """``(form of the KV cache, why)``: given, the checkpoint's own, or the dtype; sparse latents pack theirs.

        ``why`` is empty where the form is what was asked for. Raises `InputError` for a form that there is not.
        """
        if asked != "auto" and asked not in KV_CACHE_DTYPES:
            raise unknown_name("KV-cache dtype", asked, [*KV_CACHE_DTYPES, "auto"], where="--kv-cache-dtype")
        caches = [item.cache for item in spec.layers]
        chosen, why = asked, ""
        if asked == "auto" and spec.kv_cache_dtype is not None:
            chosen, why = spec.kv_cache_dtype, "as the checkpoint says"
        elif asked == "auto" and self.latent_is_fp8(spec.architecture, compute_capability):
            chosen, why = "fp8_e4m3", "the default of this model on this GPU"
        if any(isinstance(cache, CompressedLatent) for cache in caches):
            if asked in ("auto", "fp8", "fp8_e4m3"):
                chosen, why = "fp8_ds_mla", "the form of compressed latents"
        elif any(isinstance(cache, SparseIndexer) for cache in caches):
            packed = self.sparse_latent_dtype(chosen, compute_capability)
            if packed != chosen:
                chosen, why = packed, "the form of sparse latents"
        return (dtype, "as dtype") if chosen == "auto" else (chosen, why)

    def default_block_size(
        self, caches: Sequence[Cache], kv_form: str, compute_capability: str | None
    ) -> tuple[int, str]:
        """``(tokens of a block, of what if of something special)``."""
        if any(isinstance(cache, CompressedLatent) for cache in caches):
            return _COMPRESSED_BLOCK_SIZE, "compressed latents"
        if any(isinstance(cache, LatentAttention) for cache in caches):
            sparse = any(isinstance(cache, SparseIndexer) for cache in caches)
            fp8 = kv_form.startswith("fp8")
            return self.latent_block_size(compute_capability, sparse=sparse, fp8=fp8), "latent attention"
        return _DEFAULT_BLOCK_SIZE, ""

    def state_mode(self, *, prefix_caching: bool, all_mamba: bool, drafts: bool) -> StateMode:
        """How many states a sequence keeps (model_executor/models/config.py).

        ``all_mamba``: the states are those of Mamba-1 or Mamba-2, for which 0.19 to 0.32 cached every block's.
        """
        if not prefix_caching or self.number < (0, 19):
            return "none"
        if self.number >= (0, 33) or not all_mamba:
            return "align"
        return "align" if drafts and self.number in ((0, 21), (0, 22), (0, 23)) else "all"

    def state_blocks(self, mode: StateMode, num_speculative_tokens: int) -> int:
        """Blocks of one state for one sequence; in mode "all" those that come on top of one for every block."""
        if self.number < (0, 19):
            return 1
        if mode == "all":
            return num_speculative_tokens if self.number >= (0, 24) else 0
        return (2 if mode == "align" else 1) + num_speculative_tokens

    def state_block_multiple(self, mode: StateMode, *, has_latent: bool, chunk_size: int) -> int:
        """What the block size of a model with states is a multiple of, beside its own (platforms/interface.py)."""
        if mode == "all":
            return chunk_size
        if not has_latent or self.number < (0, 19):
            return 16
        if self.number < (0, 21):
            return 64
        return 128 if self.number >= (0, 33) else 16

    def checkpoints(
        self, mode: StateMode, kinds: Collection[str], compute_capability: str | None
    ) -> tuple[tuple[str, ...], int]:
        """``(kinds of state, tokens)``: states that keep a checkpoint within a prefill, and what blocks align to.

        Only 0.33 does: Mamba-2 always (mamba_mixer2.py), a gated delta net where FlashInfer's kernel runs, on
        GPUs of the generations 9, 10 and 12 (qwen_gdn_linear_attn.py); and only if every state of the model can.
        """
        if self.number < (0, 33) or mode != "align":
            return (), 1
        generation = (compute_capability or "9.0").split(".", 1)[0]
        able = {"mamba2": 1, "gated_delta_net": _DELTA_CHECKPOINT if generation in ("9", "10", "12") else 0}
        tokens = [able.get(kind, 0) for kind in kinds]
        if "mamba2" in kinds and not all(tokens):
            return ("mamba2",), 1
        return (tuple(kinds), math.lcm(*tokens)) if tokens and all(tokens) else ((), 1)

    def latent_block_size(self, compute_capability: str | None, *, sparse: bool, fp8: bool) -> int:
        """The default block size of latent attention: what the kernel for this GPU takes (platforms/cuda.py).

        Without a known GPU, as on one of the Hopper generation.
        """
        if sparse:
            return 64
        generation = (compute_capability or "9.0").split(".", 1)[0]
        if generation == "9":
            return 64 if self.number < (0, 19) or fp8 else 16
        if generation == "10":
            return 32 if self.number >= (0, 19) else 128 if self.number >= (0, 11) else 16
        return 16

    def latent_is_fp8(self, architecture: str, compute_capability: str | None) -> bool:
        """Whether a model's latents are fp8 by default: GLM-5 on Blackwell of the datacentre (models/config.py)."""
        return (
            architecture == "GlmMoeDsaForCausalLM"
            and self.number >= (0, 33)
            and (compute_capability or "").startswith("10.")
        )

    def sparse_latent_dtype(self, kv_cache_dtype: str, compute_capability: str | None) -> str:
        """The form of the cache that sparse latent attention makes of a dtype (model_executor/layers/attention)."""
        hopper = (compute_capability or "9.0").startswith("9")
        if self.number < (0, 19) and kv_cache_dtype in ("auto", "fp8", "fp8_e4m3"):
            return "fp8_ds_mla"
        if hopper and kv_cache_dtype in ("fp8", "fp8_e4m3"):
            return "fp8_ds_mla"
        return kv_cache_dtype


def vllm_rules(version: str) -> VllmRules:
    """The rules of a version such as ``0.33``, ``0.24.0`` or ``v0.19.1rc1``; empty: the newest that are held.

    Raises `InputError` for a version that is older or newer than the rules known.
    """
    if not version:
        return VllmRules(NEWEST)
    match = re.fullmatch(r"v?([0-9]{1,3})\.([0-9]{1,3})(?:[.+a-z][0-9a-z.+]*)?", version)
    newest = ".".join(map(str, NEWEST))
    if not match:
        raise InputError(f'"{version}" is no version of vLLM', where="--engine", hint=f"write vllm@{newest}")
    number = (int(match.group(1)), int(match.group(2)))
    if not _OLDEST <= number <= NEWEST:
        raise InputError(
            f"the rules of vLLM {version} are not known",
            where="--engine",
            hint=f"use a version from {'.'.join(map(str, _OLDEST))} to {newest}",
        )
    return VllmRules(number)
