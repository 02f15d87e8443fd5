"""What one layer keeps for a sequence, by kind of attention: bytes of a block and how many blocks.

One class for each kind; each owns its byte formula. A layer may have several caches (a latent and its
indexer, attention and a state side by side) or none. Sources are files of vLLM 0.33.0 unless said:
page formulas ``v1/kv_cache_interface.py``, state shapes ``model_executor/layers/mamba/mamba_utils.py``.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from kvplan.core.weights import DTYPE_BYTES, ceil_div
from kvplan.errors import InputError

#: Forms of the KV cache and what one element of a plain form takes. Per-tensor fp8 scales live with the
#: weights; the other forms without a width pack their scales beside each head or latent.
KV_DTYPE_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "fp8_inc": 1,
}
#: Plain forms of every engine; int8 with one scale for the tensor is TensorRT-LLM's.
_ELEMENT_BYTES = {**KV_DTYPE_BYTES, "int8": 1}
_PER_TOKEN_HEAD = {"int8_per_token_head": 1.0, "fp8_per_token_head": 1.0, "int4_per_token_head": 0.5}
_LATENT_PACKED = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}
#: Every form of the cache whose bytes are known.
KV_CACHE_DTYPES = (*KV_DTYPE_BYTES, *_PER_TOKEN_HEAD, "nvfp4", *_LATENT_PACKED)

#: ggml's types for keys and values in llama.cpp: ``(elements of a block, its bytes)`` (ggml/src/ggml-common.h).
#: ``q8_0`` is both keys' and values', ``q8_0/q4_0`` the keys' and the values'.
GGML_TYPES = {
    "f32": (1, 4),
    "f16": (1, 2),
    "bf16": (1, 2),
    "q8_0": (32, 34),
    "q5_1": (32, 24),
    "q5_0": (32, 22),
    "q4_1": (32, 20),
    "q4_0": (32, 18),
    "iq4_nl": (32, 18),
    "q1_0": (128, 18),
}
#: SGLang's 4 bits with one byte of scale for 16 elements (MHATokenToKVPoolFP4, MLATokenToKVPoolFP4).
_FP4_BLOCK = "fp4_mx_block16"
#: SGLang's 8 bits with one byte of scale for 32 elements (pool_configurator.py).
_MXFP8 = "mxfp8"

#: Two fp32 scales beside the key and value of each head (``TritonAttentionBackend.customize_spec``).
_SCALES_PER_HEAD = 8
#: Bytes of a token's latent in a DeepSeek-V4 cache: 448 fp8, 128 of bf16 rotary, 8 of scales
#: (models/deepseek_v4/attention.py), and what its pages are rounded up to.
_V4_LATENT_BYTES = 584
_V4_ALIGNMENT = {True: 576, False: 512}


class CacheFormat(NamedTuple):
    """How caches are stored on one rank. Dtypes are resolved, never "auto"."""

    dtype: str
    kv_cache_dtype: str
    tensor_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    #: Tokens that a draft may propose: the convolution of a state keeps so many more columns.
    num_speculative_tokens: int = 0
    #: What a state's convolution is kept in; None: the model's dtype.
    mamba_cache_dtype: str | None = None
    #: What the recurrent part is kept in; None: what the kind asks for.
    mamba_ssm_cache_dtype: str | None = None
    #: Elements of a latent row are rounded up to a multiple of this (V0 of vLLM 0.7: 128 of 2 bytes).
    latent_row_multiple: int = 1
    #: Tokens of the encoder's input that cross attention reserves for (vLLM: max_num_batched_tokens).
    encoder_tokens: int = 0

    @property
    def element_bytes(self) -> int:
        """Bytes of one element of a plain KV cache."""
        return _ELEMENT_BYTES[self.kv_cache_dtype]

    @property
    def is_ggml(self) -> bool:
        """Whether keys and values have types of ggml."""
        return self.kv_cache_dtype.partition("/")[0] in GGML_TYPES


class Reservation(NamedTuple):
    """What decides how many blocks a sequence is given: lengths in tokens."""

    length: int
    #: Scheduled but not settled tokens: the engine frees behind a window only what has been computed.
    in_flight: int
    #: Tokens kept below the window for drafts of several modules.
    extra: int = 0
    #: Blocks of a state, drafts included.
    state_blocks: int = 1
    #: Kinds of state that keep one block more, for a checkpoint within a prefill.
    checkpointed: tuple[str, ...] = ()


class Cache(Protocol):
    """A cache of one layer."""

    @property
    def kind(self) -> str:
        """The name of the kind, as in JSON."""

    def page_bytes(self, block_size: int, form: CacheFormat) -> int:
        """Bytes of one block of one layer on one rank."""

    def blocks(self, block_size: int, need: Reservation, form: CacheFormat) -> int:
        """Blocks that one sequence is given at most."""

    def payload_bytes(self, length: int, form: CacheFormat) -> int:
        """Bytes that a sequence of ``length`` tokens really fills, without any rounding to blocks."""

    def _asdict(self) -> dict[str, object]: ...


# Attention that keeps keys and values


class FullAttention(NamedTuple):
    """Keys and values of every token: multi-head, grouped-query or multi-query attention.

    ``window`` is set where a layer attends to fewer tokens but still keeps all of them.
    """

    num_kv_heads: int
    head_dim: int
    #: Size of a value where it differs from that of a key (MiMo-V2); None: the same.
    value_head_dim: int | None = None
    window: int | None = None

    @property
    def kind(self) -> str:
        """The name of this kind."""
        return "full"

    @property
    def value_size(self) -> int:
        """Elements of one head's value."""
        return self.head_dim if self.value_head_dim is None else self.value_head_dim

    def page_bytes(self, block_size: int, form: CacheFormat) -> int:
        """Heads of the rank x tokens x bytes of a key and a value."""
        return block_size * _heads_bytes(self.num_kv_heads, self.head_dim, self.value_size, form)

    def blocks(self, block_size: int, need: Reservation, form: CacheFormat) -> int:
        """Blocks for all tokens; decode context parallelism shares them out."""
        return _full_blocks(block_size, need, form)

    def payload_bytes(self, length: int, form: CacheFormat) -> int:
        """All tokens."""
        return _shared(length, form) * _heads_bytes(self.num_kv_heads, self.head_dim, self.value_size, form)


class SlidingWindow(NamedTuple):
    """Keys and values of the last ``window`` tokens."""

    num_kv_heads: int
    head_dim: int
    window: int
    value_head_dim: int | None = None

    @property
    def kind(self) -> str:
        """The name of this kind."""
        return "sliding_window"

    @property
    def value_size(self) -> int:
        """Elements of one head's value."""
        return self.head_dim if self.value_head_dim is None else self.value_head_dim

    def page_bytes(self, block_size: int, form: CacheFormat) -> int:
        """As full attention."""
        return block_size * _heads_bytes(self.num_kv_heads, self.head_dim, self.value_size, form)

    def blocks(self, block_size: int, need: Reservation, form: CacheFormat) -> int:
        """The window and the tokens in flight, and a block more since a window may start within one."""
        return _window_blocks(self.window, block_size, need)

    def payload_bytes(self, length: int, form: CacheFormat) -> int:
        """At most a window."""
        heads = _heads_bytes(self.num_kv_heads, self.head_dim, self.value_size, form)
        return min(length, self.window) * heads


class ChunkedLocal(NamedTuple):
    """Keys and values of the tokens since the last multiple of ``chunk`` (Llama-4)."""

    num_kv_heads: int
    head_dim: int
    chunk: int

    @property
    def kind(self) -> str:
        """The name of this kind."""
        return "chunked_local"

    @property
    def value_size(self) -> int:
        """Elements of one head's value."""
        return self.head_dim

    def page_bytes(self, block_size: int, form: CacheFormat) -> int:
        """As full attention."""
        return block_size * _heads_bytes(self.num_kv_heads, self.head_dim, self.head_dim, form)

    def blocks(self, block_size: int, need: Reservation, form: CacheFormat) -> int:
        """A chunk and the tokens in flight; chunks start at block boundaries."""
        return ceil_div(min(self.chunk + need.in_flight, need.length), block_size)

    def payload_bytes(self, length: int, form: CacheFormat) -> int:
        """At most a chunk."""
        return min(length, self.chunk) * _heads_bytes(self.num_kv_heads, self.head_dim, self.head_dim, form)


class CrossAttention(NamedTuple):
    """Keys and values of the encoder's output: as many as the input has tokens, whatever is generated."""

    num_kv_heads: int
    head_dim: int
    #: The encoder's own maximum, where the model states one (Whisper: 1,500).
    encoder_length: int | None = None

    @property
    def kind(self) -> str:
        """The name of this kind."""
        return "cross"

    @property
    def value_size(self) -> int:
        """Elements of one head's value."""
        return self.head_dim

    def page_bytes(self, block_size: int, form: CacheFormat) -> int:
        """As full attention."""
        return block_size * _heads_bytes(self.num_kv_heads, self.head_dim, self.head_dim, form)

    def blocks(self, block_size: int, need: Reservation, form: CacheFormat) -> int:
        """Blocks for the encoder tokens that the scheduler allows, not for the model's own length."""
        return ceil_div(form.encoder_tokens, block_size)

    def payload_bytes(self, length: int, form: CacheFormat) -> int:
        """The encoder's output, at its longest."""
        tokens = form.encoder_tokens if self.encoder_length is None else self.encoder_length
        return tokens * _heads_bytes(self.num_kv_heads, self.head_dim, self.head_dim, form)


# Latent attention


class LatentAttention(NamedTuple):
    """Multi-head latent attention: one compressed vector a token, the same on every rank."""

    kv_lora_rank: int
    qk_rope_head_dim: int

    @property
    def kind(self) -> str:
        """The name of this kind."""
        return "mla"

    @property
    def elements(self) -> int:
        """Numbers of one token: latent and rotary part."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def page_bytes(self, block_size: int, form: CacheFormat) -> int:
        """Tokens x (latent + rotary part), or the packed row of a ``ds_mla`` form."""
        return block_size * self.row_bytes(form)

    def row_bytes(self, form: CacheFormat) -> int:
        """Bytes of one token."""
        packed = _LATENT_PACKED.get(form.kv_cache_dtype)
        if packed is not None:
            return packed
        elements = self.elements
        if form.is_ggml:
            # A latent is a key alone: the value is a part of it (llama-kv-cache.cpp, no V for MLA).
            return _ggml_bytes(elements, _ggml_types(form)[0])
        if form.kv_cache_dtype == _FP4_BLOCK:
            return elements // 2 + elements // 16
        if form.kv_cache_dtype not in _ELEMENT_BYTES:
            raise _no_form(form.kv_cache_dtype, "latent attention")
        return ceil_div(elements, form.latent_row_multiple) * form.latent_row_multiple * form.element_bytes

    def blocks(self, block_size: int, need: Reservation, form: CacheFormat) -> int:
        """As full attention."""
        return _full_blocks(block_size, need, form)

    def payload_bytes(self, length: int, form: CacheFormat) -> int:
        """All tokens."""
        return _shared(length, form) * self.row_bytes(form)


class SparseIndexer(NamedTuple):
    """The keys by which sparse latent attention picks tokens (DeepSeek-V3.2, GLM-5), fp8 with fp32 scales.

    model_executor/models/deepseek_v2.py ``DeepseekV32IndexerCache``: a row has one scale for each 128 elements.
    ``topk`` is how many tokens it picks for each query; None: not known.
    """

    index_head_dim: int
    topk: int | None = None

    @property
    def kind(self) -> str:
        """The name of this kind."""
        return "indexer"

    def page_bytes(self, block_size: int, form: CacheFormat) -> int:
        """Tokens x (key bytes + scales), whatever the cache's dtype; in llama.cpp a key of its type."""
        return block_size * self.row_bytes(form)

    def row_bytes(self, form: CacheFormat) -> int:
        """Bytes of one token."""
        if form.is_ggml:
            return _ggml_bytes(self.index_head_dim, _ggml_types(form)[0])
        return _indexer_row_bytes(self.index_head_dim)

    def blocks(self, block_size: int, need: Reservation, form: CacheFormat) -> int:
        """As full attention."""
        return _full_blocks(block_size, need, form)

    def payload_bytes(self, length: int, form: CacheFormat) -> int:
        """All tokens."""
        return _shared(length, form) * self.row_bytes(form)


# DeepSeek-V4: latents of several tokens in one state, beside a window of plain ones


class CompressedLatent(NamedTuple):
    """One latent for every ``tokens_per_state`` tokens (models/deepseek_v4/attention.py)."""

    head_dim: int
    tokens_per_state: int

    @property
    def kind(self) -> str:
        """The name of this kind."""
        return "compressed_latent"

    def page_bytes(self, block_size: int, form: CacheFormat) -> int:
        """States of a block x their bytes, rounded up to what the kernel reads."""
        states = block_size // self.tokens_per_state
        return _round_up(states * _v4_row_bytes(self.head_dim, form), _v4_alignment(form))

    def blocks(self, block_size: int, need: Reservation, form: CacheFormat) -> int:
        """As full attention."""
        return _full_blocks(block_size, need, form)

    def payload_bytes(self, length: int, form: CacheFormat) -> int:
        """Whole groups of tokens."""
        return length // self.tokens_per_state * _v4_row_bytes(self.head_dim, form)


class CompressedIndexer(NamedTuple):
    """The indexer's key for every ``tokens_per_state`` tokens."""

    index_head_dim: int
    tokens_per_state: int

    @property
    def kind(self) -> str:
        """The name of this kind."""
        return "compressed_indexer"

    def page_bytes(self, block_size: int, form: CacheFormat) -> int:
        """States of a block x (key bytes + scales), rounded up to what the kernel reads."""
        states = block_size // self.tokens_per_state
        return _round_up(states * _indexer_row_bytes(self.index_head_dim), _v4_alignment(form))

    def blocks(self, block_size: int, need: Reservation, form: CacheFormat) -> int:
        """As full attention."""
        return _full_blocks(block_size, need, form)

    def payload_bytes(self, length: int, form: CacheFormat) -> int:
        """Whole groups of tokens."""
        return length // self.tokens_per_state * _indexer_row_bytes(self.index_head_dim)


class LatentWindow(NamedTuple):
    """Latents of the last ``window`` tokens, in blocks of 64 of its own (v1/attention/backends/mla/sparse_swa.py)."""

    head_dim: int
    window: int

    @property
    def kind(self) -> str:
        """The name of this kind."""
        return "latent_window"

    @property
    def own_block_size(self) -> int:
        """Tokens in a block, whatever the flag says."""
        return 64

    def page_bytes(self, block_size: int, form: CacheFormat) -> int:
        """Tokens x their bytes, rounded up to what the kernel reads."""
        return _round_up(block_size * _v4_row_bytes(self.head_dim, form), _v4_alignment(form))

    def blocks(self, block_size: int, need: Reservation, form: CacheFormat) -> int:
        """As a sliding window."""
        return _window_blocks(self.window, block_size, need)

    def payload_bytes(self, length: int, form: CacheFormat) -> int:
        """At most a window."""
        return min(length, self.window) * _v4_row_bytes(self.head_dim, form)


class CompressorState(NamedTuple):
    """Tokens that still wait to be compressed, as fp32 sums and scores (models/deepseek_v4/compressor.py)."""

    head_dim: int
    tokens_per_state: int

    @property
    def kind(self) -> str:
        """The name of this kind."""
        return "compressor_state"

    @property
    def own_block_size(self) -> int:
        """Tokens in a block: chosen so that pages match those of the latents."""
        return 4 if self.tokens_per_state == 4 else 8

    @property
    def window(self) -> int:
        """Tokens kept: overlapping groups of 4 need two, those of 128 one."""
        return 2 * self.tokens_per_state if self.tokens_per_state == 4 else self.tokens_per_state

    def page_bytes(self, block_size: int, form: CacheFormat) -> int:
        """Tokens x (sums and scores of one or two groups), rounded up to what the kernel reads."""
        return _round_up(block_size * self._row_bytes, _v4_alignment(form))

    @property
    def _row_bytes(self) -> int:
        groups = 2 if self.tokens_per_state == 4 else 1
        return 2 * groups * self.head_dim * DTYPE_BYTES["float32"]

    def blocks(self, block_size: int, need: Reservation, form: CacheFormat) -> int:
        """As a sliding window."""
        return _window_blocks(self.window, block_size, need)

    def payload_bytes(self, length: int, form: CacheFormat) -> int:
        """At most a window."""
        return min(length, self.window) * self._row_bytes


# States: of fixed size, whatever the length


class Mamba1State(NamedTuple):
    """The convolution and the state of a Mamba-1 layer."""

    intermediate_size: int
    state_size: int
    conv_kernel: int

    @property
    def kind(self) -> str:
        """The name of this kind."""
        return "mamba1"

    def page_bytes(self, block_size: int, form: CacheFormat) -> int:
        """Inner / ranks x (kernel - 1) of the convolution, inner / ranks x state size of the state."""
        inner = _divided(self.intermediate_size, form, "Mamba channels")
        conv = inner * (self.conv_kernel - 1)
        return conv * _conv_bytes(form) + inner * self.state_size * _state_bytes(form, None)

    def blocks(self, block_size: int, need: Reservation, form: CacheFormat) -> int:
        """As many states as the engine keeps of a sequence."""
        return need.state_blocks + (self.kind in need.checkpointed)

    def payload_bytes(self, length: int, form: CacheFormat) -> int:
        """One state."""
        return self.page_bytes(1, form)


class Mamba2State(NamedTuple):
    """The convolution and the state of a Mamba-2 layer. ``ssm_dtype``: the model's own wish (Nemotron-H: float32)."""

    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int
    conv_kernel: int
    ssm_dtype: str | None = None

    @property
    def kind(self) -> str:
        """The name of this kind."""
        return "mamba2"

    def page_bytes(self, block_size: int, form: CacheFormat) -> int:
        """Channels and groups / ranks x (kernel - 1 + drafts); heads / ranks x head size x state size.

        A single group is repeated on each rank; others the ranks must divide (mamba_mixer2.py).
        """
        ranks = form.tensor_parallel_size
        groups = ranks if self.num_groups == 1 else _divided(self.num_groups, form, "Mamba groups") * ranks
        channels = self.num_heads * self.head_dim + 2 * groups * self.state_size
        conv = _divided(channels, form, "Mamba channels") * _conv_columns(self.conv_kernel, form)
        state = _divided(self.num_heads, form, "Mamba heads") * self.head_dim * self.state_size
        return conv * _conv_bytes(form) + state * _state_bytes(form, self.ssm_dtype)

    def blocks(self, block_size: int, need: Reservation, form: CacheFormat) -> int:
        """As many states as the engine keeps of a sequence."""
        return need.state_blocks + (self.kind in need.checkpointed)

    def payload_bytes(self, length: int, form: CacheFormat) -> int:
        """One state."""
        return self.page_bytes(1, form)


class GatedDeltaNet(NamedTuple):
    """The convolution and the state of a gated delta net layer (Qwen3-Next, Qwen3.5)."""

    num_key_heads: int
    key_head_dim: int
    num_value_heads: int
    value_head_dim: int
    conv_kernel: int
    ssm_dtype: str | None = None

    @property
    def kind(self) -> str:
        """The name of this kind."""
        return "gated_delta_net"

    def page_bytes(self, block_size: int, form: CacheFormat) -> int:
        """(2 keys + values) / ranks x (kernel - 1 + drafts); value heads / ranks x value size x key size."""
        channels = 2 * self.num_key_heads * self.key_head_dim + self.num_value_heads * self.value_head_dim
        conv = _divided(channels, form, "delta net channels") * _conv_columns(self.conv_kernel, form)
        state = _divided(self.num_value_heads, form, "delta net value heads")
        state *= self.value_head_dim * self.key_head_dim
        return conv * _conv_bytes(form) + state * _state_bytes(form, self.ssm_dtype)

    def blocks(self, block_size: int, need: Reservation, form: CacheFormat) -> int:
        """As many states as the engine keeps of a sequence."""
        return need.state_blocks + (self.kind in need.checkpointed)

    def payload_bytes(self, length: int, form: CacheFormat) -> int:
        """One state."""
        return self.page_bytes(1, form)


class KimiDelta(NamedTuple):
    """The convolution and the state of a Kimi delta attention layer; the state is float32 unless set."""

    num_heads: int
    head_dim: int
    num_key_heads: int
    key_head_dim: int
    conv_kernel: int

    @property
    def kind(self) -> str:
        """The name of this kind."""
        return "kda"

    def page_bytes(self, block_size: int, form: CacheFormat) -> int:
        """(values + 2 keys) / ranks x (kernel - 1 + drafts); heads / ranks x head size squared."""
        channels = self.num_heads * self.head_dim + 2 * self.num_key_heads * self.key_head_dim
        conv = _divided(channels, form, "delta attention channels") * _conv_columns(self.conv_kernel, form)
        state = _divided(self.num_heads, form, "delta attention heads") * self.head_dim**2
        dtype = form.mamba_ssm_cache_dtype or "float32"
        if dtype == "float16":
            raise InputError(
                "Kimi delta attention keeps its state in float32 or bfloat16",
                where="--mamba-ssm-cache-dtype",
                hint="use one of them, or auto",
            )
        return conv * _conv_bytes(form) + state * DTYPE_BYTES[dtype]

    def blocks(self, block_size: int, need: Reservation, form: CacheFormat) -> int:
        """As many states as the engine keeps of a sequence."""
        return need.state_blocks + (self.kind in need.checkpointed)

    def payload_bytes(self, length: int, form: CacheFormat) -> int:
        """One state."""
        return self.page_bytes(1, form)


class LinearAttention(NamedTuple):
    """The state of a linear attention layer (MiniMax-Text-01)."""

    num_heads: int
    head_dim: int

    @property
    def kind(self) -> str:
        """The name of this kind."""
        return "linear_attention"

    def page_bytes(self, block_size: int, form: CacheFormat) -> int:
        """Heads / ranks x head size squared, in one dtype."""
        return _divided(self.num_heads, form, "linear attention heads") * self.head_dim**2 * _conv_bytes(form)

    def blocks(self, block_size: int, need: Reservation, form: CacheFormat) -> int:
        """As many states as the engine keeps of a sequence."""
        return need.state_blocks + (self.kind in need.checkpointed)

    def payload_bytes(self, length: int, form: CacheFormat) -> int:
        """One state."""
        return self.page_bytes(1, form)


class ShortConv(NamedTuple):
    """The last inputs of a short convolution (LFM2)."""

    channels: int
    conv_kernel: int

    @property
    def kind(self) -> str:
        """The name of this kind."""
        return "short_conv"

    def page_bytes(self, block_size: int, form: CacheFormat) -> int:
        """Channels / ranks x (kernel - 1); drafts add nothing (model_executor/models/lfm2.py)."""
        columns = self.conv_kernel - 1
        return _divided(self.channels, form, "convolution channels") * columns * _conv_bytes(form)

    def blocks(self, block_size: int, need: Reservation, form: CacheFormat) -> int:
        """As many states as the engine keeps of a sequence."""
        return need.state_blocks + (self.kind in need.checkpointed)

    def payload_bytes(self, length: int, form: CacheFormat) -> int:
        """One state."""
        return self.page_bytes(1, form)


class LayerCache(NamedTuple):
    """One cache of one layer. Layers of a draft model are numbered on from those of the model."""

    layer: int
    cache: Cache


#: Kinds that keep all tokens and so can share a block table whatever their widths.
WHOLE = (FullAttention, LatentAttention, SparseIndexer, CompressedLatent, CompressedIndexer)
#: Kinds that keep the last tokens only, in blocks that are freed behind them.
WINDOWS = (SlidingWindow, LatentWindow, CompressorState)
#: Kinds of fixed size.
STATES = (Mamba1State, Mamba2State, GatedDeltaNet, KimiDelta, LinearAttention, ShortConv)
#: Kinds with keys and values of heads, which can be padded to any page.
HEADS = (FullAttention, SlidingWindow, ChunkedLocal, CrossAttention)
#: Every kind by its name, for catalogues.
KINDS: dict[str, Any] = {
    "full": FullAttention,
    "sliding_window": SlidingWindow,
    "chunked_local": ChunkedLocal,
    "cross": CrossAttention,
    "mla": LatentAttention,
    "indexer": SparseIndexer,
    "compressed_latent": CompressedLatent,
    "compressed_indexer": CompressedIndexer,
    "latent_window": LatentWindow,
    "compressor_state": CompressorState,
    "mamba1": Mamba1State,
    "mamba2": Mamba2State,
    "gated_delta_net": GatedDeltaNet,
    "kda": KimiDelta,
    "linear_attention": LinearAttention,
    "short_conv": ShortConv,
}


def describe(cache: Cache) -> dict[str, object]:
    """The JSON form of a cache: its kind and what it has of fields."""
    return {
        "kind": cache.kind,
        **{name: value for name, value in cache._asdict().items() if value is not None},
    }


def kv_heads_per_rank(num_kv_heads: int, tensor_parallel_size: int) -> int:
    """KV heads that one rank holds; heads are repeated when there are more ranks than heads.

    vLLM ``ModelConfig.get_num_kv_heads``: max(1, heads // ranks), where one must divide the other.
    Raises `InputError` where neither does.
    """
    if num_kv_heads % tensor_parallel_size and tensor_parallel_size % num_kv_heads:
        raise InputError(
            f"{num_kv_heads} KV heads and tensor parallel size {tensor_parallel_size}: "
            "neither divides the other",
            where="--tensor-parallel-size",
            hint=f"use a size that divides {num_kv_heads} or is a multiple of it",
        )
    return max(1, num_kv_heads // tensor_parallel_size)


def _heads_bytes(num_kv_heads: int, key: int, value: int, form: CacheFormat) -> int:
    """Bytes of one token's keys and values on one rank."""
    heads = kv_heads_per_rank(num_kv_heads, form.tensor_parallel_size)
    dtype = form.kv_cache_dtype
    if dtype in _PER_TOKEN_HEAD:
        packed = key // 2 + value // 2 if dtype.startswith("int4") else key + value
        return heads * (packed + _SCALES_PER_HEAD)
    if form.is_ggml:
        of_keys, of_values = _ggml_types(form)
        return _ggml_bytes(heads * key, of_keys) + _ggml_bytes(heads * value, of_values)
    if dtype in (_FP4_BLOCK, _MXFP8):
        elements = heads * (key + value)
        return elements // 2 + elements // 16 if dtype == _FP4_BLOCK else elements + elements // 32
    if dtype == "nvfp4":
        # Packed halves and one fp8 scale for 16 elements, keys and values in slots of their own.
        return heads * (key // 2 + key // 16 + value // 2 + value // 16)
    if dtype not in _ELEMENT_BYTES:
        raise _no_form(dtype, "attention with keys and values")
    return heads * (key + value) * form.element_bytes


def _ggml_types(form: CacheFormat) -> tuple[str, str]:
    """The types of keys and of values."""
    keys, _, values = form.kv_cache_dtype.partition("/")
    return keys, values or keys


def _ggml_bytes(elements: int, ggml_type: str) -> int:
    """Bytes of a row: whole blocks of its type (ggml.c ``ggml_row_size``)."""
    size, block_bytes = GGML_TYPES[ggml_type]
    if elements % size:
        raise InputError(
            f"rows of {elements:,} elements are no whole blocks of {size} of {ggml_type}",
            where="--kv-cache-dtype",
            hint="use f16",
        )
    return elements // size * block_bytes


def _no_form(dtype: str, kind: str) -> InputError:
    return InputError(
        f"{kind} has no KV cache of the form {dtype}", where="--kv-cache-dtype", hint="use auto or fp8"
    )


def _indexer_row_bytes(head_dim: int) -> int:
    """One token's key in fp8, with a scale in fp32 for each 128 elements."""
    return head_dim + head_dim // 128 * 4


def _full_blocks(block_size: int, need: Reservation, form: CacheFormat) -> int:
    return ceil_div(_shared(need.length, form), block_size)


def _shared(length: int, form: CacheFormat) -> int:
    """Tokens of a sequence that one rank of decode context parallelism keeps."""
    return ceil_div(length, form.decode_context_parallel_size)


def _window_blocks(window: int, block_size: int, need: Reservation) -> int:
    return ceil_div(min(window - 1 + need.extra + need.in_flight, need.length), block_size) + 1


def _conv_columns(kernel: int, form: CacheFormat) -> int:
    return kernel - 1 + form.num_speculative_tokens


def _conv_bytes(form: CacheFormat) -> int:
    return DTYPE_BYTES[form.mamba_cache_dtype or form.dtype]


def _state_bytes(form: CacheFormat, own: str | None) -> int:
    dtype = form.mamba_ssm_cache_dtype or own or form.mamba_cache_dtype or form.dtype
    return DTYPE_BYTES[dtype]


def _divided(count: int, form: CacheFormat, what: str) -> int:
    ranks = form.tensor_parallel_size
    if count % ranks:
        raise InputError(
            f"{count:,} {what} cannot be divided among {ranks} ranks",
            where="--tensor-parallel-size",
            hint=f"use a size that divides {count:,}",
        )
    return count // ranks


def _v4_row_bytes(head_dim: int, form: CacheFormat) -> int:
    if not _is_packed(form) and form.kv_cache_dtype not in _ELEMENT_BYTES:
        raise _no_form(form.kv_cache_dtype, "compressed latent attention")
    return _V4_LATENT_BYTES if _is_packed(form) else head_dim * form.element_bytes


def _v4_alignment(form: CacheFormat) -> int:
    return _V4_ALIGNMENT[_is_packed(form)]


def _is_packed(form: CacheFormat) -> bool:
    """Whether compressed latents are in their own form (models/deepseek_v4/attention.py)."""
    return form.kv_cache_dtype == "fp8_ds_mla"


def _round_up(size: int, multiple: int) -> int:
    return ceil_div(size, multiple) * multiple
