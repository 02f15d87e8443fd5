"""vLLM's pool by version: groups, the check at the start and the start-up line, by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvplan.config import load_model
from kvplan.core.deployment import Deployment
from kvplan.core.kv_cache import (
    Cache,
    CacheFormat,
    ChunkedLocal,
    CompressedLatent,
    CompressorState,
    FullAttention,
    GatedDeltaNet,
    LatentAttention,
    LatentWindow,
    LayerCache,
    LinearAttention,
    Mamba2State,
    SlidingWindow,
    SparseIndexer,
)
from kvplan.core.kv_groups import GroupRules, bytes_per_block, form_groups, make_pages
from kvplan.core.kv_pool import VllmPool
from kvplan.errors import InputError

BF16 = CacheFormat("bfloat16", "bfloat16")


def pool_of(*caches: Cache, version: str = "0.33", form: CacheFormat = BF16, **changes: Any) -> VllmPool:
    layers = tuple(LayerCache(i, cache) for i, cache in enumerate(caches))
    spec = replace(load_model("llama-3.1-8b"), num_layers=len(caches), layers=layers)
    settings = {"seq": 4096, "max_model_len": 4096, "cache": form, "version": version}
    return VllmPool(spec, Deployment(**(settings | changes)))


def shape(pool: VllmPool, length: int = 4096) -> list[tuple[str, int, int, int | None]]:
    return [
        (group.kinds[0], group.layers, group.block_size, group.page_bytes) for group in pool.groups(length)
    ]


# What a version does with pages that differ


def test_pages_that_differ_are_refused_grown_or_padded_by_version() -> None:
    # 4 heads x 256 x 2 x 2 x 16 = 65,536; half of it grows to 32 tokens; 3 heads of 49,152 only pad.
    half, odd = SlidingWindow(2, 256, 128), SlidingWindow(3, 256, 128)
    full = FullAttention(4, 256)
    with pytest.raises(InputError, match="cannot make pages of 32,768, 65,536 bytes equal"):
        pool_of(full, half, version="0.11")
    assert shape(pool_of(full, half, version="0.19"))[1] == ("sliding_window", 1, 32, 65_536)
    with pytest.raises(InputError, match="cannot make pages of 49,152, 65,536 bytes equal") as error:
        pool_of(full, odd, version="0.21")
    assert error.value.hint is not None
    assert shape(pool_of(full, odd, version="0.24"))[1] == ("sliding_window", 1, 16, 65_536)


def test_a_latent_that_does_not_divide_is_padded_and_later_makes_all_keep_all_tokens() -> None:
    # 16 x 576 x 2 = 18,432 beside 4 x 128 x 2 x 2 x 16 = 32,768.
    caches = LatentAttention(512, 64), SlidingWindow(4, 128, 128)
    assert shape(pool_of(*caches, version="0.26")) == [
        ("mla", 1, 16, 32_768),
        ("sliding_window", 1, 16, 32_768),
    ]
    (group,) = shape(pool_of(*caches))
    assert group == ("mla", 2, 16, None)
    # A chunk has no way out: no table for both.
    with pytest.raises(InputError, match="cannot make pages"):
        pool_of(LatentAttention(512, 64), ChunkedLocal(4, 128, 1024))


def test_states_beside_a_drafts_larger_pages_are_padded_since_0_26() -> None:
    # Attention 2 x 128 x 2 x 2 = 1,024 a token; the state 8 x 128 x 128 x 2 = 262,144: 256 tokens. The draft's 8 heads
    # make 1,048,576 of them.
    draft = (LayerCache(2, FullAttention(8, 128)),)
    caches = LinearAttention(8, 128), FullAttention(2, 128)
    with pytest.raises(InputError, match="cannot make pages of 262,144, 1,048,576 bytes equal"):
        pool_of(*caches, version="0.24", drafts=draft, enable_prefix_caching=False)
    padded = pool_of(*caches, version="0.26", drafts=draft, enable_prefix_caching=False)
    assert shape(padded) == [
        ("linear_attention", 1, 4096, 1_048_576),
        ("full", 1, 1024, 1_048_576),
        ("full", 1, 256, 1_048_576),
    ]


def test_a_view_of_the_whole_model_is_not_refused_where_a_rank_is_not() -> None:
    # 12 and 8 heads on 24 ranks: one of each. Of the whole model 12 does not grow to any multiple of 8.
    form = BF16._replace(tensor_parallel_size=24)
    caches = FullAttention(12, 128), SlidingWindow(8, 128, 128)
    pool = pool_of(*caches, version="0.19", form=form)
    assert [page for *_, page in shape(pool)] == [8192, 8192]
    spec = replace(load_model("llama-3.1-8b"), num_layers=2, layers=tuple(map(LayerCache, range(2), caches)))
    deployment = Deployment(seq=1, max_model_len=4096, cache=form, version="0.19")
    whole = VllmPool(spec, deployment, form._replace(tensor_parallel_size=1))
    assert [page for *_, page in shape(whole)] == [98_304, 98_304]


def test_the_block_of_the_whole_models_states_is_its_own() -> None:
    # 8 heads of 128 on 8 ranks: 512 bytes a token on each, a state of 4 x 128 x 128 x 2 = 131,072: 256 tokens. The
    # whole: 4,096 a token, 1,048,576: 256 too. A latent stays as it is: 1,152 a token, 912 tokens for the whole state.
    state, form = LinearAttention(32, 128), BF16._replace(tensor_parallel_size=8)
    settings: dict[str, Any] = {"version": "0.26", "enable_prefix_caching": False}
    assert pool_of(state, FullAttention(8, 128), form=form, **settings).block_size == 256
    assert pool_of(state, LatentAttention(512, 64), form=form, **settings).block_size == 128
    assert pool_of(state, LatentAttention(512, 64), **settings).block_size == 912


def test_values_were_as_wide_as_keys() -> None:
    # 4 heads x (192 + 128) x 2 x 16 = 40,960; as wide: 49,152.
    full, window = FullAttention(4, 192, 128), SlidingWindow(4, 192, 128, 128)
    assert [page for *_, page in shape(pool_of(full, window, version="0.21"))] == [40_960, 40_960]
    assert shape(pool_of(window, version="0.19"))[0][3] == 49_152
    assert shape(pool_of(full, version="0.19"))[0][3] == 40_960
    assert shape(pool_of(full, version="0.11"))[0][3] == 49_152


def test_heads_of_the_rank_make_a_type_not_heads_of_the_model() -> None:
    # 4 and 8 KV heads on 8 ranks are one each: a draft of the same shape joins the model's layers.
    window = SlidingWindow(4, 128, 128)
    pool = pool_of(
        FullAttention(4, 128),
        window,
        FullAttention(4, 128),
        window,
        form=BF16._replace(tensor_parallel_size=8),
        drafts=(LayerCache(4, FullAttention(8, 128)),),
    )
    assert [(kind, layers) for kind, layers, *_ in shape(pool)] == [
        ("full", 2),
        ("full", 1),
        ("sliding_window", 2),
    ]


# Chunks


@pytest.mark.parametrize(("version", "groups"), [("0.11", 1), ("0.19", 2), ("0.33", 2)])
def test_chunks_have_groups_of_their_own_since_0_19(version: str, groups: int) -> None:
    caches = FullAttention(8, 128), ChunkedLocal(8, 128, 1024)
    assert len(shape(pool_of(*caches, version=version))) == groups
    drafted = pool_of(*caches, version=version, drafts=(LayerCache(2, FullAttention(8, 128)),))
    assert len(shape(drafted)) == 1


# Without the hybrid manager


def test_without_the_manager_what_cannot_share_a_table_is_refused() -> None:
    off: dict[str, Any] = {"hybrid_kv_cache_manager": False}
    for caches in (
        (SlidingWindow(8, 128, 128), SlidingWindow(8, 128, 256)),
        (FullAttention(8, 128), SlidingWindow(8, 128, 128), SlidingWindow(8, 128, 256)),
        (FullAttention(8, 128), ChunkedLocal(8, 128, 128), ChunkedLocal(8, 128, 256)),
        (FullAttention(8, 128), GatedDeltaNet(16, 128, 32, 128, 4)),
    ):
        with pytest.raises(InputError, match="layers of these kinds cannot share one block table") as error:
            pool_of(*caches, **off)
        assert error.value.where == "--disable-hybrid-kv-cache-manager"
    assert shape(pool_of(FullAttention(8, 128), SlidingWindow(8, 128, 128), **off)) == [
        ("full", 2, 16, 65_536)
    ]
    # Latents are merged as one type before windows are looked at.
    latent = LatentAttention(512, 64), SlidingWindow(8, 128, 128), SlidingWindow(8, 128, 256)
    assert len(shape(pool_of(*latent, **off))) == 1


# States


def test_states_of_two_sizes_shared_a_group_until_0_33() -> None:
    states = LinearAttention(8, 128), LinearAttention(16, 128)
    off: dict[str, Any] = {"enable_prefix_caching": False}
    assert shape(pool_of(*states, version="0.26", **off)) == [("linear_attention", 2, 4096, None)]
    assert [page for *_, page in shape(pool_of(*states, **off))] == [524_288, 524_288]


@pytest.mark.parametrize(
    ("version", "caching", "blocks", "tokens"),
    [
        ("0.33", False, 1 + 3, 4096),
        ("0.33", True, 2 + 3 + 1, 48),
        ("0.26", True, -(-4096 // 48) + 3, 48),
        ("0.19", True, -(-4096 // 48), 48),
        ("0.11", False, 1, 4096),
    ],
)
def test_blocks_of_a_state_for_one_sequence(version: str, caching: bool, blocks: int, tokens: int) -> None:
    # 8 heads x 64 x 16 x 2 = 16,384 of the state, (512 + 2 x 16) x (3 + 3) x 2 = 6,528 of the convolution; 512 bytes a
    # token of attention: 45 tokens, 48 in multiples of 16, 256 with chunks.
    form = BF16._replace(num_speculative_tokens=3)
    pool = pool_of(
        Mamba2State(8, 64, 16, 1, 4),
        FullAttention(1, 128),
        version=version,
        form=form,
        enable_prefix_caching=caching,
        speculative_method="ngram",
    )
    state = pool.groups(4096)[0]
    if version in ("0.26", "0.19"):
        # The chunk of a Mamba kernel that the config does not name: 2048 tokens.
        assert (pool.state_mode, state.block_size) == ("all", 2048)
        assert state.blocks_per_sequence == 2 + (3 if version == "0.26" else 0)
    else:
        assert (state.block_size, state.blocks_per_sequence) == (tokens, blocks)


def test_tokens_kept_for_several_drafting_layers() -> None:
    drafts = tuple(LayerCache(1 + i, SlidingWindow(8, 128, 100)) for i in range(3))
    settings: dict[str, Any] = {"drafts": drafts, "speculative_method": "mtp"}
    form = BF16._replace(num_speculative_tokens=3)
    assert pool_of(SlidingWindow(8, 128, 100), form=form, **settings).extra_tokens == 2
    assert pool_of(SlidingWindow(8, 128, 100), form=form, version="0.26", **settings).extra_tokens == 0
    assert (
        pool_of(
            SlidingWindow(8, 128, 100), form=form, **settings | {"speculative_method": "eagle3"}
        ).extra_tokens
        == 0
    )
    one = pool_of(SlidingWindow(8, 128, 100), form=form, drafts=drafts[:1], speculative_method="mtp")
    assert one.extra_tokens == 0
    # 99 + 2 + 2 x 2048 tokens in flight: 263 blocks, and one for the window's start.
    assert pool_of(SlidingWindow(8, 128, 100), form=form, **settings).tokens_in_flight == 4096
    assert pool_of(SlidingWindow(8, 128, 100), form=form, **settings).blocks(1_000_000) == 264


# DeepSeek-V4


def v4(layers: int) -> list[Cache]:
    """As many layers with latents of 4 tokens, each with a window and the compressor's state."""
    return [
        cache
        for _ in range(layers)
        for cache in (CompressedLatent(512, 4), LatentWindow(512, 128), CompressorState(512, 4))
    ]


@pytest.mark.parametrize(
    ("version", "block"),
    [
        # Pages of 64 x 584 and of 4 x 8192, each up to a multiple of 576: 37,440 and 32,832, before 0.33 padded.
        ("0.21", 2 * 37_440),
        ("0.24", 2 * 37_440),
        ("0.33", 2 * 37_440),
    ],
)
def test_deepseek_v4_by_version(version: str, block: int) -> None:
    form = CacheFormat("bfloat16", "fp8_ds_mla")
    pool = pool_of(
        *v4(2),
        version=version,
        form=form,
        block_size=256,
        async_scheduling=False,
        max_num_batched_tokens=8192,
    )
    assert pool.bytes_per_block() == block
    kinds = [group.kinds[0] for group in pool.groups(4096)]
    assert set(kinds) == {"compressed_latent", "latent_window", "compressor_state"}
    # 4096 tokens: 16 blocks of 256, 64 + 1 of 64, 1024 + 1 of 4.
    blocks = 16 + 65 + 1025
    assert pool.blocks(4096) == blocks
    tokens, concurrency = pool.token_line(blocks * 2, 4096)
    assert concurrency == 2.0
    assert tokens == 8192


def test_a_window_wider_than_every_latent_is_refused_before_0_33() -> None:
    form = CacheFormat("bfloat16", "fp8_ds_mla")
    caches = CompressedLatent(512, 128), LatentWindow(512, 128)
    with pytest.raises(InputError, match="a window's page of 37,440 bytes is larger than any of the latents"):
        pool_of(*caches, version="0.24", form=form, block_size=256)
    assert len(shape(pool_of(*caches, form=form, block_size=256))) == 2


def test_buckets_that_repeat_no_pattern_are_not_split() -> None:
    # Two widths of state, one twice: windows of one kind with pages of two sizes cannot be dealt out evenly.
    form = CacheFormat("bfloat16", "fp8_ds_mla")
    states = CompressorState(512, 4), CompressorState(512, 4), CompressorState(128, 4)
    with pytest.raises(InputError, match="not as many pages of each size"):
        pool_of(CompressedLatent(512, 4), LatentWindow(512, 128), *states, form=form, block_size=256)


def test_blocks_before_0_33_have_a_slot_for_each_page_of_any_group() -> None:
    # One group with two pages of 8 and one of 4, one with three of 4: 2 x 8 + 3 x 4, tuples 3 x (8 + 4).
    layers = [LayerCache(i, FullAttention(2 if i < 2 else 1, 1)) for i in range(6)]
    pages = make_pages(layers, CacheFormat("bfloat16", "fp8"), 2)
    (whole,) = form_groups(pages, BF16, GroupRules())
    first = type(whole).of(whole.pages[:3], 3)
    groups = first, type(whole).of(whole.pages[3:], 3)
    assert bytes_per_block(groups, GroupRules()) == 20
    assert bytes_per_block(groups, GroupRules(packing="slots")) == 28
    assert bytes_per_block(groups, GroupRules(packing="tuples")) == 36
    # A stage with only the last group's layers: no page of 8 but in the first group's form.
    assert bytes_per_block(groups, GroupRules(packing="slots"), {3, 4, 5}) == 12


def test_0_11_counts_all_stages_layers_where_widths_differ() -> None:
    caches = LatentAttention(512, 64), SparseIndexer(128), LatentAttention(512, 64), SparseIndexer(128)
    for version, sizes in (("0.11", [2568 * 16, 2568 * 16]), ("0.19", [1284 * 16, 1284 * 16])):
        pool = pool_of(*caches, version=version, pipeline_parallel_size=2)
        assert [pool.bytes_per_block(stage) for stage in pool._stages] == sizes


# The start-up line


@pytest.mark.parametrize(
    ("version", "tokens", "concurrency"),
    [
        # A window of 100 and 2048 tokens in flight: 99 + 2048 are 135 blocks of 16, and one more, beside 256.
        ("0.8", 1000 * 16, 1000 * 16 / 4096),  # one table for all
        ("0.11", 500 * 16, 1000 / 392),
        ("0.19", 500 * 16, 1000 / 392),
        ("0.21", int(1000 / 392 * 4096), 1000 / 392),
        ("0.33", int(1000 / 513 * 4096), 1000 / 513),  # twice the tokens in flight: all 256, and one more
    ],
)
def test_the_start_up_line_by_version(version: str, tokens: int, concurrency: float) -> None:
    pool = pool_of(FullAttention(8, 128), SlidingWindow(8, 128, 100), version=version)
    assert pool.token_line(1000, 4096) == (tokens, concurrency)


def test_a_model_of_states_alone_counts_its_longest_sequence_as_a_block_in_0_19() -> None:
    pool = pool_of(LinearAttention(8, 128), version="0.19", enable_prefix_caching=False)
    assert pool.token_line(10, 4096) == (10 * 4096, 10.0)
