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

from kvplan.core.gpu import generation
from kvplan.core.kv_cache import (
    HEADS,
    KV_CACHE_DTYPES,
    STATES,
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
#: The first version of each set of rules below, newest first.
RULE_CHANGES = ("0.33", "0.26", "0.24", "0.21", "0.19", "0.11", "0.8", "0.7")

#: How a version of vLLM counts the tokens of its start-up line: blocks of one group, blocks shared out among the
#: groups, or the concurrency it prints times the longest length.
TokenLine = Literal["blocks", "groups", "concurrency"]
#: Whether states keep one block, one and what prefix caching needs, or one for every block of tokens.
StateMode = Literal["none", "align", "all"]

#: Kinds of rotary embedding whose config states the length that they stretch to.
_LENGTH_HOLDS = frozenset({"longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling"})
_GIB = 1 << 30
#: Ways to draft that allow asynchronous scheduling, beside multi-token prediction (config/speculative.py).
_ASYNC_DRAFTS = ("eagle", "eagle3", "dflash", "ngram_gpu", "extract_hidden_states")
#: Models that the second runner is first the default for, in 0.24; ways to draft that it knows in 0.26, those that
#: it does not know in 0.33, and the models with experts that it is the default for in 0.26 (config/vllm.py).
_V2_FIRST = (
    "Qwen3ForCausalLM",
    "DeepseekV2ForCausalLM",
    "Qwen2MoeForCausalLM",
    "GraniteMoeForCausalLM",
    "LlamaForCausalLM",
    "MistralForCausalLM",
)
_V2_DRAFTS = ("eagle", "eagle3", "mtp", "dflash", "dspark")
_FIRST_RUNNER_ONLY = ("suffix", "custom_class")
_V2_EXPERTS = (
    "DeepseekV2ForCausalLM",
    "GraniteMoeForCausalLM",
    "InklingForCausalLM",
    "InklingForConditionalGeneration",
    "LongcatFlashNgramForCausalLM",
    "Qwen2MoeForCausalLM",
)
#: The first version read that takes a form of the cache (config/cache.py ``CacheDType``); the rest all take.
_KV_DTYPES_SINCE = {
    "bfloat16": (0, 11),
    "fp8_inc": (0, 11),
    "float16": (0, 19),
    "fp8_ds_mla": (0, 19),
    "int8_per_token_head": (0, 21),
    "fp8_per_token_head": (0, 21),
    "nvfp4": (0, 21),
    "int4_per_token_head": (0, 26),
    "nvfp4_ds_mla": (0, 33),
}
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
        """Switches that a version has not yet: asynchronous scheduling came with 0.10.0 (engine/arg_utils.py)."""
        return frozenset() if self.number >= (0, 10) else frozenset({"async_scheduling"})

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
    def reserves_null_block(self) -> bool:
        """Whether the fit check leaves out the null block (v1/core/kv_cache_planning.py)."""
        return self.number >= (0, 33)

    @property
    def token_line(self) -> TokenLine:
        """What the line "GPU KV cache size" says."""
        if self.number >= (0, 21):
            return "concurrency"
        return "groups" if self.number >= (0, 11) else "blocks"

    def async_scheduling(self, method: str | None) -> bool:
        """The default of ``--async-scheduling`` (config/vllm.py), with a way to draft or without (None)."""
        if self.number < (0, 19) or method is None:
            return self.number >= (0, 19)
        if self.number >= (0, 33):
            return method not in _FIRST_RUNNER_ONLY
        return (
            method in _ASYNC_DRAFTS
            or method.endswith("mtp")
            or (method == "dspark" and self.number >= (0, 26))
        )

    def runner_v2(
        self, architecture: str, method: str | None, *, has_states: bool, has_experts: bool
    ) -> bool:
        """Whether the second model runner is the default (config/vllm.py ``use_v2_model_runner``).

        A list of architectures in 0.24 (0.23 fits a log), dense models without states and a few others in 0.26, all
        in 0.33; the releases between were not seen, 0.25 and 0.28 are assumed. ``method`` is a way to draft.
        """
        if self.number >= (0, 28):
            return method not in _FIRST_RUNNER_ONLY
        if self.number < (0, 25):
            return self.number >= (0, 23) and architecture in _V2_FIRST
        drafts = method is None or method in _V2_DRAFTS
        return drafts and not has_states and (not has_experts or architecture in _V2_EXPERTS)

    @property
    def latent_row_multiple(self) -> int:
        """Elements that a latent's row is padded to a multiple of: 256 bytes of 2 in 0.7 (seen in its logs)."""
        return 128 if self.number == (0, 7) else 1

    def lengths(self, spec: ModelSpec) -> tuple[int, int] | None:
        """``max_model_len`` where none is given, and the longest that may be; None: the model states none.

        config/model.py ``_get_and_verify_max_len``: positions times the factor of their scaling, but for kinds whose
        config has the product already: LongRoPE and Llama-3's, YaRN since 0.33 (until then it is the original length
        that is multiplied), and Gemma-3. LongRoPE starts at the original length (read in 0.19, not yet in 0.11).
        """
        longest = spec.max_position_embeddings
        if longest is None:
            return None
        factor = 1.0
        if "gemma3" not in spec.family:
            stretched = _LENGTH_HOLDS if self.number >= (0, 33) else _LENGTH_HOLDS - {"yarn"}
            for scaling in spec.position_scalings:
                if scaling.kind not in stretched:
                    factor = scaling.factor
                    if scaling.kind == "yarn":
                        longest = scaling.original or longest
        longest = int(longest * factor)
        original = spec.original_max_position_embeddings
        starts_short = self.number >= (0, 19) and any(s.kind == "longrope" for s in spec.position_scalings)
        return (original or longest if starts_short else longest), longest

    def group_rules(self, *, hybrid_manager: bool) -> GroupRules:
        """How layers are grouped (v1/core/kv_cache_utils.py; kv_cache_planning.py in 0.33).

        Before 0.11 there is one block table for all; until 0.18 pages must be equal; until 0.23 they only grow by
        whole blocks. Latents were padded too until 0.33, which then lets windows beside them keep all tokens;
        states are since 0.26.
        """
        padded: tuple[type, ...] = ()
        if self.number >= (0, 24):
            padded = (*HEADS, LatentAttention) if self.number < (0, 33) else HEADS
        if self.number >= (0, 26):
            padded = (*padded, *STATES)
        return GroupRules(
            uneven=Fraction(3, 2) if self.number >= (0, 19) else None,
            hybrid_manager=hybrid_manager and self.number >= (0, 11),
            scales_blocks=self.number >= (0, 19),
            padded_kinds=padded,
            falls_back=self.number >= (0, 33),
            mixed_states=self.number < (0, 33),
            divides_widths=not (0, 11) <= self.number < (0, 19),
            packing="widest" if self.number >= (0, 33) else "slots" if self.number >= (0, 24) else "tuples",
        )

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
        if asked != "auto" and not self.takes_kv_dtype(asked):
            raise InputError(
                f"vllm {self.version} has no KV cache of the form {asked}",
                where="--kv-cache-dtype",
                hint="use auto, fp8 or a newer version (--engine)",
            )
        caches = [item.cache for item in spec.layers]
        chosen, why = asked, ""
        if asked == "auto" and spec.kv_cache_dtype is not None:
            chosen, why = spec.kv_cache_dtype, "as the checkpoint says"
        if any(isinstance(cache, CompressedLatent) for cache in caches):
            if asked == "auto" or asked.startswith("fp8"):
                chosen, why = "fp8_ds_mla", "the form of compressed latents"
        elif any(isinstance(cache, SparseIndexer) for cache in caches):
            packed = self.sparse_latent_dtype(chosen, compute_capability, spec.architecture)
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

    def state_block_multiple(
        self, mode: StateMode, block_size: int, *, has_latent: bool, chunk_size: int, checkpoint_tokens: int
    ) -> int:
        """What the block size of a model with states is a multiple of.

        platforms/interface.py ``_align_hybrid_block_size`` since 0.21: of the kernel's smallest block, or of
        ``block_size`` where that is larger; model_executor/models/config.py before: of 16, or 64 for latents. Also
        of what a state's kernel works on at once (mode "all") and of the tokens between checkpoints.
        """
        kernel = 16
        if has_latent and self.number >= (0, 33):
            kernel = 128
        elif has_latent and (0, 19) <= self.number < (0, 21):
            kernel = 64
        multiple = max(kernel, block_size) if self.number >= (0, 21) else kernel
        return math.lcm(multiple, chunk_size if mode == "all" else 1, checkpoint_tokens)

    def checkpoints(
        self, mode: StateMode, kinds: Collection[str], compute_capability: str | None
    ) -> tuple[tuple[str, ...], int]:
        """``(kinds of state, tokens)``: states that keep a checkpoint within a prefill, and what blocks align to.

        Only 0.33 does: Mamba-2 always (mamba_mixer2.py), a gated delta net where FlashInfer's kernel runs, on
        GPUs of the generations 9, 10 and 12 (qwen_gdn_linear_attn.py); and only if every state of the model can.
        """
        if self.number < (0, 33) or mode != "align":
            return (), 1
        fast = generation(compute_capability) in (9, 10, 12)
        able = {"mamba2": 1, "gated_delta_net": _DELTA_CHECKPOINT if fast else 0}
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
        gpu = generation(compute_capability)
        if gpu == 9:
            return 64 if self.number < (0, 19) or fp8 else 16
        if gpu == 10:
            return 32 if self.number >= (0, 19) else 128 if self.number >= (0, 11) else 16
        return 16

    def sparse_latent_dtype(
        self, kv_cache_dtype: str, compute_capability: str | None, architecture: str
    ) -> str:
        """The form of the cache that sparse latent attention makes of a dtype.

        model_executor/layers/attention/mla_attention.py: on Hopper the kernel for fp8 packs it; on the generation
        12 (read from 0.24 on) packed is the only form; elsewhere it stays plain. In 0.11 all but bfloat16 was packed
        (model_executor/models/config.py); in 0.33 GLM-5 is fp8 on the generation 10.
        """
        gpu = generation(compute_capability)
        fp8 = kv_cache_dtype in ("fp8", "fp8_e4m3")
        if self.number < (0, 19) and (kv_cache_dtype == "auto" or kv_cache_dtype.startswith("fp8")):
            return "fp8_ds_mla"
        if gpu == 9 and fp8:
            return "fp8_ds_mla"
        if gpu == 12 and self.number >= (0, 24) and (fp8 or kv_cache_dtype == "auto"):
            return "fp8_ds_mla"
        glm = architecture.startswith("GlmMoeDsa") and self.number >= (0, 33)
        return "fp8_e4m3" if glm and gpu == 10 and kv_cache_dtype == "auto" else kv_cache_dtype

    def takes_kv_dtype(self, kv_cache_dtype: str) -> bool:
        """Whether ``--kv-cache-dtype`` may be this."""
        return self.number >= _KV_DTYPES_SINCE.get(kv_cache_dtype, _OLDEST)

    def encoder_tokens(self, max_num_batched_tokens: int, encoder_length: int | None) -> int:
        """Tokens that cross attention reserves for: the batch's, and once the model's own (config/__init__.py)."""
        if self.number >= (0, 19) or encoder_length is None:
            return max_num_batched_tokens
        return encoder_length

    def fitted_batch(self, batch: int, seqs: int, max_model_len: int, *, chunked_prefill: bool) -> int:
        """Tokens of a batch where only defaults count, fitted to the longest sequence.

        engine/arg_utils.py ``_set_default_max_num_seqs_and_batched_tokens_args``: without chunked prefill a step must
        take the longest prompt; since 0.19 no step needs more tokens than all sequences can have.
        """
        if self.number < (0, 19):
            return batch if chunked_prefill else max_model_len
        if not chunked_prefill:
            batch = max(batch, max_model_len)
        return min(batch, seqs * max_model_len)


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


def nearest_rules(version: str) -> VllmRules:
    """The rules for a version as an engine prints its own: of one that is older or newer than all known, the nearest.

    A build without a release in its name, such as ``0.1.dev11+gabc`` or ``dev``, is taken for the newest.
    """
    match = re.match(r"v?([0-9]{1,3})\.([0-9]{1,4})(?![0-9])", version)
    if match is None:
        return VllmRules(NEWEST)
    number = (int(match.group(1)), int(match.group(2)))
    if number < _OLDEST and ".dev" in version:
        return VllmRules(NEWEST)
    return VllmRules(min(max(number, _OLDEST), NEWEST))
