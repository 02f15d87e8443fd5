"""Bytes and blocks of each kind of cache, worked by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvplan.config import load_model
from kvplan.core.kv_cache import (
    KINDS,
    KV_CACHE_DTYPES,
    STATES,
    Cache,
    CacheFormat,
    ChunkedLocal,
    CompressedIndexer,
    CompressedLatent,
    CompressorState,
    CrossAttention,
    FullAttention,
    GatedDeltaNet,
    KimiDelta,
    LatentAttention,
    LatentWindow,
    LinearAttention,
    Mamba1State,
    Mamba2State,
    Reservation,
    ShortConv,
    SlidingWindow,
    SparseIndexer,
    describe,
    kv_heads_per_rank,
)
from kvplan.core.kv_groups import hybrid_block_size
from kvplan.core.model import ModelSpec
from kvplan.errors import InputError

BF16 = CacheFormat("bfloat16", "bfloat16")


def form(kv_cache_dtype: str = "bfloat16", tensor_parallel_size: int = 1, **more: int) -> CacheFormat:
    return CacheFormat("bfloat16", kv_cache_dtype, tensor_parallel_size, **more)


def need(length: int, in_flight: int = 8192) -> Reservation:
    return Reservation(length, in_flight)


def bytes_per_token(model: ModelSpec, cache_form: CacheFormat, kinds: tuple[str, ...]) -> int:
    return sum(i.cache.page_bytes(1, cache_form) for i in model.layers if i.cache.kind in kinds)


# Keys and values of heads


def test_full_attention_keeps_keys_and_values() -> None:
    heads = FullAttention(8, 128)
    # 16 tokens x 8 heads x (128 + 128) x 2 bytes
    assert heads.page_bytes(16, BF16) == 65_536
    # 1 byte an element; scales lie with the weights
    assert heads.page_bytes(16, form("fp8")) == 32_768
    assert heads.page_bytes(16, form("float32")) == 131_072
    # keys of 192 beside values of 128: 16 x 4 x 320 x 2
    assert FullAttention(4, 192, 128).page_bytes(16, BF16) == 40_960
    # cdiv(4097, 16), and all tokens without rounding
    assert heads.blocks(16, need(4097), BF16) == 257
    assert heads.payload_bytes(4097, BF16) == 4097 * 4096


@pytest.mark.parametrize(
    ("dtype", "content"),
    [
        # (128 + 128) bytes and two scales of 4 bytes beside each head
        ("int8_per_token_head", 264),
        ("fp8_per_token_head", 264),
        # 128/2 + 128/2 and the two scales
        ("int4_per_token_head", 136),
        # for keys and for values 128/2 packed and 128/16 scales of a byte
        ("nvfp4", 144),
    ],
)
def test_packed_forms_carry_their_scales(dtype: str, content: int) -> None:
    assert FullAttention(8, 128).page_bytes(16, form(dtype)) == 16 * 8 * content
    assert SlidingWindow(8, 128, 64).page_bytes(16, form(dtype)) == 16 * 8 * content


@pytest.mark.parametrize(
    ("ranks", "heads"),
    [(1, 8), (2, 4), (4, 2), (8, 1), (16, 1), (32, 1)],
)
def test_heads_are_divided_and_then_repeated(ranks: int, heads: int) -> None:
    assert kv_heads_per_rank(8, ranks) == heads
    # 16 tokens x heads x 256 x 2 bytes, so 16 ranks hold twice what one would
    assert FullAttention(8, 128).page_bytes(16, form(tensor_parallel_size=ranks)) == heads * 8192


@pytest.mark.parametrize("ranks", [3, 5, 6, 7, 12])
def test_ranks_that_neither_divide_nor_are_divided_are_refused(ranks: int) -> None:
    with pytest.raises(InputError, match="neither divides the other"):
        FullAttention(8, 128).page_bytes(16, form(tensor_parallel_size=ranks))


def test_a_window_needs_its_tokens_those_in_flight_and_a_block() -> None:
    window = SlidingWindow(8, 64, 128)
    assert window.page_bytes(16, BF16) == 16 * 8 * 128 * 2
    # cdiv(min(128 - 1 + 8192, 131072), 16) + 1 = 520 + 1
    assert window.blocks(16, need(131_072), BF16) == 521
    # cdiv(min(8319, 1000), 16) + 1 = 63 + 1: one more than full attention
    assert window.blocks(16, need(1000), BF16) == 64
    # drafts of several modules keep 3 tokens more: 8,322 / 16 is 520.1
    assert window.blocks(16, Reservation(131_072, 8192, extra=3), BF16) == 522
    assert window.payload_bytes(1000, BF16) == 128 * 8 * 128 * 2


def test_a_chunk_needs_no_block_more() -> None:
    chunk = ChunkedLocal(8, 128, 8192)
    assert chunk.page_bytes(16, BF16) == 65_536
    # cdiv(min(8192 + 8192, 32768), 16)
    assert chunk.blocks(16, need(32_768), BF16) == 1024
    assert chunk.payload_bytes(10_000, BF16) == 8192 * 4096


def test_cross_attention_is_reserved_for_the_encoder_budget() -> None:
    cross = CrossAttention(20, 64, 1500)
    # 16 x 20 x 128 x 2
    assert cross.page_bytes(16, BF16) == 81_920
    # the scheduler's tokens, not the model's 1,500; what is filled is the model's
    assert cross.blocks(16, need(448), form(encoder_tokens=8192)) == 512
    assert cross.payload_bytes(448, form(encoder_tokens=8192)) == 1500 * 5120


def test_decode_context_parallelism_shares_out_whole_caches_only() -> None:
    shared = form(decode_context_parallel_size=4)
    # cdiv(cdiv(1001, 4), 16) = cdiv(251, 16)
    assert FullAttention(8, 128).blocks(16, need(1001), shared) == 16
    assert LatentAttention(512, 64).blocks(16, need(1001), shared) == 16
    assert SlidingWindow(8, 128, 64).blocks(16, need(1001), shared) == 64


# Latents


def test_a_latent_is_the_same_on_every_rank() -> None:
    latent = LatentAttention(512, 64)
    # 16 x (512 + 64) x 2
    for ranks in (1, 3, 8, 16):
        assert latent.page_bytes(16, form(tensor_parallel_size=ranks)) == 18_432
    assert latent.page_bytes(16, form("fp8")) == 9216
    # 512 fp8 + 16 of scales + 128 of bf16 rotary; 256 fp4 + 64 fp8 rotary + 32 of scales
    assert latent.page_bytes(64, form("fp8_ds_mla")) == 64 * 656
    assert latent.page_bytes(64, form("nvfp4_ds_mla")) == 64 * 352
    # old engines round a row of 576 up to a multiple of 128 elements
    assert latent.page_bytes(16, form(latent_row_multiple=128)) == 16 * 640 * 2


def test_an_indexer_keeps_bytes_and_a_scale_for_128_whatever_the_form() -> None:
    # 64 x (128 + 128/128 x 4)
    for dtype in ("bfloat16", "fp8", "fp8_ds_mla"):
        assert SparseIndexer(128).page_bytes(64, form(dtype)) == 8448
    assert SparseIndexer(128).payload_bytes(1000, BF16) == 132_000


def test_a_form_that_a_kind_does_not_have_is_refused() -> None:
    with pytest.raises(InputError, match="has no KV cache of the form fp8_ds_mla"):
        FullAttention(8, 128).page_bytes(16, form("fp8_ds_mla"))
    with pytest.raises(InputError, match="has no KV cache of the form nvfp4"):
        LatentAttention(512, 64).page_bytes(16, form("nvfp4"))


def test_pages_of_deepseek_v4() -> None:
    # vLLM 0.33 models/deepseek_v4: 448 fp8 + 128 rotary + 8 of scales a latent, pages in multiples of 576
    packed = form("fp8_ds_mla")
    # 256 tokens are 64 states: 64 x 584 = 37,376, which is 64.9 x 576
    assert CompressedLatent(512, 4).page_bytes(256, packed) == 65 * 576 == 37_440
    # and 2 states: 1,168 = 2.03 x 576
    assert CompressedLatent(512, 128).page_bytes(256, packed) == 3 * 576
    # 64 x 132 = 8,448 = 14.7 x 576
    assert CompressedIndexer(128, 4).page_bytes(256, packed) == 15 * 576 == 8640
    window = LatentWindow(512, 128)
    assert (window.own_block_size, window.page_bytes(64, packed)) == (64, 37_440)
    # 4 tokens x sums and scores of two groups of 512 in fp32: 4 x 2 x 2 x 512 x 4 = 32,768 = 56.9 x 576
    state = CompressorState(512, 4)
    assert (state.own_block_size, state.window, state.page_bytes(4, packed)) == (4, 8, 57 * 576)
    # the indexer's: 4 x 2 x 2 x 128 x 4 = 8,192 = 14.2 x 576
    assert CompressorState(128, 4).page_bytes(4, packed) == 15 * 576
    # 8 tokens x 2 x 512 x 4 = 32,768
    state = CompressorState(512, 128)
    assert (state.own_block_size, state.window, state.page_bytes(8, packed)) == (8, 128, 57 * 576)
    # bfloat16: 64 x 512 x 2 bytes are a multiple of 512 as they are
    assert CompressedLatent(512, 4).page_bytes(256, BF16) == 65_536
    assert CompressedLatent(512, 128).page_bytes(256, BF16) == 2048
    assert CompressedIndexer(128, 4).page_bytes(256, BF16) == 17 * 512


def test_blocks_of_deepseek_v4_as_a_report_posted_them() -> None:
    # vllm#51041: 16,384 tokens in flight give 4,099 blocks of 4 and 2,065 of 8.
    long = need(1_048_576, 16_384)
    assert CompressorState(512, 4).blocks(4, long, BF16) == 4099
    assert CompressorState(512, 128).blocks(8, long, BF16) == 2065
    # cdiv(127 + 16384, 64) + 1
    assert LatentWindow(512, 128).blocks(64, long, BF16) == 259
    # all tokens: 1,048,576 / 256
    assert CompressedLatent(512, 4).blocks(256, long, BF16) == 4096


# States


def test_the_state_of_mamba_1() -> None:
    state = Mamba1State(8192, 16, 4)
    # 8192 x (4 - 1) x 2 + 8192 x 16 x 2
    assert state.page_bytes(16, BF16) == 49_152 + 262_144 == 311_296
    assert state.page_bytes(16, form(tensor_parallel_size=4)) == 311_296 // 4
    wide = CacheFormat("bfloat16", "bfloat16", mamba_ssm_cache_dtype="float32")
    assert state.page_bytes(16, wide) == 49_152 + 524_288
    both = CacheFormat("bfloat16", "bfloat16", mamba_cache_dtype="float32")
    assert state.page_bytes(16, both) == 2 * 311_296


def test_the_state_of_mamba_2() -> None:
    state = Mamba2State(128, 64, 128, 8, 4, "float32")
    # (128 x 64 + 2 x 8 x 128) x (4 - 1) x 2 + 128 x 64 x 128 x 4
    assert state.page_bytes(16, BF16) == 10_240 * 3 * 2 + 4_194_304 == 4_255_744
    # 2 draft tokens are 2 columns more
    assert state.page_bytes(16, form(num_speculative_tokens=2)) == 10_240 * 5 * 2 + 4_194_304
    assert state.blocks(16, need(10**6), BF16) == 1
    assert state.blocks(16, Reservation(10**6, 8192, state_blocks=2), BF16) == 2
    assert state.blocks(16, Reservation(10**6, 8192, state_blocks=2, checkpointed=("mamba2",)), BF16) == 3
    assert state.page_bytes(16, form(tensor_parallel_size=8)) == 4_255_744 // 8
    # one group for 8 ranks is repeated up to 8: (8192 + 2 x 8 x 128) / 8 x 3 x 2 + 128/8 x 64 x 128 x 4
    one = state._replace(num_groups=1)
    assert one.page_bytes(16, form(tensor_parallel_size=8)) == 1280 * 6 + 524_288
    # the length does not matter
    assert state.payload_bytes(1, BF16) == state.payload_bytes(10**6, BF16) == 4_255_744


def test_the_state_of_a_gated_delta_net() -> None:
    net = GatedDeltaNet(16, 128, 48, 128, 4, "float32")
    # (2 x 16 x 128 + 48 x 128) x 3 x 2 + 48 x 128 x 128 x 4
    assert net.page_bytes(16, BF16) == 10_240 * 6 + 3_145_728 == 3_207_168
    assert net.page_bytes(16, form(tensor_parallel_size=2)) == 3_207_168 // 2
    assert net.page_bytes(16, form("fp8")) == 3_207_168
    assert net._replace(ssm_dtype=None).page_bytes(16, BF16) == 10_240 * 6 + 1_572_864


def test_other_states() -> None:
    # (32 x 128 + 2 x 32 x 128) x 3 x 2 + 32 x 128 x 128 x 4, the state float32 unless set
    kda = KimiDelta(32, 128, 32, 128, 4)
    assert kda.page_bytes(16, BF16) == 12_288 * 6 + 2_097_152 == 2_170_880
    # 64 x 128 x 128 x 2; drafts need no columns
    linear = LinearAttention(64, 128)
    assert linear.page_bytes(16, form(num_speculative_tokens=3)) == 2_097_152
    # 2048 x (3 - 1) x 2
    assert ShortConv(2048, 3).page_bytes(16, BF16) == 8192


@pytest.mark.parametrize(
    "state",
    [
        Mamba1State(8192, 16, 4),
        Mamba2State(128, 64, 128, 8, 4),
        GatedDeltaNet(16, 128, 48, 128, 4),
        KimiDelta(32, 128, 32, 128, 4),
        LinearAttention(64, 128),
        ShortConv(2048, 3),
    ],
)
def test_a_state_that_ranks_do_not_divide_is_refused(state: Cache) -> None:
    with pytest.raises(InputError, match="cannot be divided among 5 ranks"):
        state.page_bytes(16, form(tensor_parallel_size=5))


# Models


def test_bytes_of_a_token_by_model() -> None:
    # 40 layers x 40 heads x 256 x 2; 32 x 8 x 256 x 2; 61 x 576 x 2
    assert bytes_per_token(load_model("llama-2-13b"), BF16, ("full",)) == 819_200
    assert bytes_per_token(load_model("llama-3.1-8b"), BF16, ("full",)) == 131_072
    assert bytes_per_token(load_model("deepseek-v3"), BF16, ("mla",)) == 70_272
    # 61 x (656 + 132)
    sparse = load_model("deepseek-v3.2")
    assert bytes_per_token(sparse, form("fp8_ds_mla"), ("mla", "indexer")) == 48_068
    # 12 full layers x 8 heads x 128 x 2; 16 x 4 x 512 x 2
    assert bytes_per_token(load_model("gpt-oss-20b"), BF16, ("full",)) == 24_576
    assert bytes_per_token(load_model("qwen3.5-27b"), BF16, ("full",)) == 65_536
    # with its layer for drafts GLM-5.2 has 79 latents and 22 indexers: 79 x 656 + 22 x 132
    model = load_model("glm-5.2")
    caches = [*model.layers, *model.draft_layers]
    assert sum(item.cache.page_bytes(1, form("fp8_ds_mla")) for item in caches) == 54_728


@pytest.mark.parametrize(
    ("name", "cache_form", "block_size"),
    [
        # 3,207,168 / (16 x 4,096) = 48.9, so 49 x 16
        ("qwen3.5-27b", form(), 784),
        # keys and values of half the size: 3,207,168 / (16 x 2,048) = 97.9
        ("qwen3.5-27b", form("fp8"), 1568),
        # a draft token is a column more: (5,120 x 4 x 2 + 1,572,864) / (16 x 2,048) = 49.2 with two ranks
        ("qwen3.5-27b", form(tensor_parallel_size=2, num_speculative_tokens=1), 800),
        # 1,073,152 / (16 x 2,048) = 32.75
        ("qwen3.5-9b", form(tensor_parallel_size=2), 528),
        ("qwen3.5-35b-a3b", form("fp8"), 2096),
        # 2,170,880 / (16 x 1,152) = 117.8
        ("kimi-linear-48b", form(), 1888),
        # no states, no change
        ("llama-3.1-8b", form(), 16),
        ("mamba-codestral-7b", form(), 16),
    ],
)
def test_blocks_of_hybrids_hold_a_state(name: str, cache_form: CacheFormat, block_size: int) -> None:
    assert hybrid_block_size(load_model(name).layers, cache_form, 16, multiple=16) == block_size


def test_blocks_of_hybrids_are_multiples_of_what_the_engine_asks_for() -> None:
    layers = load_model("kimi-linear-48b").layers
    # kernels for latents start at 128: 2,170,880 / (128 x 1,152) = 14.7
    assert hybrid_block_size(layers, BF16, 16, multiple=128) == 15 * 128
    # and checkpoints at 48 more: lcm(128, 48) is 384, 2,170,880 / (384 x 1,152) = 4.9
    assert hybrid_block_size(layers, BF16, 16, multiple=384) == 5 * 384


def test_real_configs_give_the_pages_worked_by_hand(shared: Path) -> None:
    def pages(config: str, cache_form: CacheFormat = BF16) -> dict[str, tuple[int, int]]:
        """Layers and bytes of a block of 16 tokens by kind."""
        model = load_model(str(shared / "sizing" / "configs" / config))
        return {cache.kind: (count, cache.page_bytes(16, cache_form)) for cache, count in model.attention}

    assert pages("meta-llama__Meta-Llama-3.1-405B.json") == {"full": (126, 16 * 8 * 256 * 2)}
    assert pages("deepseek-ai__DeepSeek-V3.2.json", form("fp8_ds_mla")) == {
        "mla": (61, 16 * 656),
        "indexer": (61, 16 * 132),
    }
    assert pages("openai__gpt-oss-120b.json") == {
        "sliding_window": (18, 16 * 8 * 128 * 2),
        "full": (18, 16 * 8 * 128 * 2),
    }
    assert pages("meta-llama__Llama-4-Scout-17B-16E-Instruct.json", form(tensor_parallel_size=8)) == {
        "chunked_local": (36, 16 * 1 * 256 * 2),
        "full": (12, 16 * 1 * 256 * 2),
    }
    assert pages("XiaomiMiMo__MiMo-V2-Flash.json", form("fp8")) == {
        "full": (9, 16 * 4 * (192 + 128)),
        "sliding_window": (39, 16 * 8 * (192 + 128)),
    }
    assert pages("google__gemma-4-26B-A4B.json") == {
        "sliding_window": (25, 16 * 8 * 512 * 2),
        "full": (5, 16 * 2 * 1024 * 2),
    }
    # (64 x 64 + 2 x 8 x 128) x 3 x 2 + 64 x 64 x 128 x 4
    assert pages("nvidia__NVIDIA-Nemotron-3-Nano-30B-A3B-BF16.json") == {
        "mamba2": (23, 6144 * 6 + 2_097_152),
        "full": (6, 16 * 2 * 256 * 2),
    }
    # (2 x 16 x 128 + 64 x 128) x 3 x 2 + 64 x 128 x 128 x 4
    assert pages("Qwen__Qwen3.5-397B-A17B.json") == {
        "gated_delta_net": (45, 12_288 * 6 + 4_194_304),
        "full": (15, 16 * 2 * 512 * 2),
    }
    # 4 heads and 8 ranks: each holds one, repeated
    assert pages("Qwen__Qwen3-235B-A22B.json", form(tensor_parallel_size=8)) == {"full": (94, 16 * 256 * 2)}


# The kinds themselves


def test_every_kind_has_its_name_and_is_written_with_its_fields() -> None:
    for name, kind in KINDS.items():
        required = [field for field in kind._fields if field not in kind._field_defaults]
        cache = kind(**dict.fromkeys(required, 4))
        assert cache.kind == name
        assert describe(cache) == {"kind": name, **dict.fromkeys(required, 4)}
    assert {kind for kind in KINDS.values() if kind in STATES} == set(STATES)


def test_no_two_kinds_are_equal_though_their_fields_are() -> None:
    # Tuples of equal fields are equal in Python: what compares caches must look at the kind as well.
    assert FullAttention(2, 4).kind != ChunkedLocal(2, 4, 8).kind
    assert len(KV_CACHE_DTYPES) == len(set(KV_CACHE_DTYPES))
