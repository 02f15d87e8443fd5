"""How layers share a pool, worked by hand from the rules of vLLM 0.33 (v1/core/kv_cache_planning.py)."""

from __future__ import annotations

import pytest

from kvplan.config import load_model
from kvplan.core.kv_cache import (
    Cache,
    CacheFormat,
    ChunkedLocal,
    CrossAttention,
    FullAttention,
    LatentAttention,
    LayerCache,
    LinearAttention,
    Mamba2State,
    Reservation,
    SlidingWindow,
    SparseIndexer,
)
from kvplan.core.kv_groups import (
    GroupRules,
    PageGroup,
    blocks_per_sequence,
    bytes_per_block,
    form_groups,
    hybrid_block_size,
    make_pages,
)
from kvplan.errors import InputError

BF16 = CacheFormat("bfloat16", "bfloat16")


def groups_of(
    layers: list[LayerCache] | tuple[LayerCache, ...],
    form: CacheFormat = BF16,
    block_size: int = 16,
    rules: GroupRules | None = None,
) -> tuple[PageGroup, ...]:
    size = hybrid_block_size(layers, form, block_size, multiple=16)
    return form_groups(make_pages(layers, form, size), form, rules or GroupRules())


def numbered(*caches: Cache) -> list[LayerCache]:
    return [LayerCache(i, cache) for i, cache in enumerate(caches)]


def shape(groups: tuple[PageGroup, ...]) -> list[tuple[str, int, int, int | None]]:
    return [("+".join(g.kinds), len(g.pages), g.block_size, g.page_bytes) for g in groups]


def test_layers_alike_are_one_group() -> None:
    groups = groups_of(numbered(*[FullAttention(8, 128)] * 4))
    assert shape(groups) == [("full", 4, 16, 65_536)]
    assert bytes_per_block(groups, GroupRules()) == 262_144
    assert blocks_per_sequence(groups, Reservation(100, 8192), BF16) == 7
    assert groups_of([]) == ()
    assert bytes_per_block((), GroupRules()) == 0


def test_whole_caches_of_several_widths_are_one_group_whose_block_is_their_sum() -> None:
    layers = [
        LayerCache(i, cache) for i in range(61) for cache in (LatentAttention(512, 64), SparseIndexer(128))
    ]
    groups = groups_of(layers, CacheFormat("bfloat16", "fp8_ds_mla"), 64)
    assert shape(groups) == [("mla+indexer", 122, 64, None)]
    # 61 x 64 x (656 + 132)
    assert bytes_per_block(groups, GroupRules()) == 3_076_352


def test_gemma_4_on_one_h200_as_a_report_posted_it() -> None:
    # configiq#112, vLLM 0.24: 10 full layers of 4 x 512 and 50 sliding of 16 x 256, window 1,024. Pages of
    # 131,072 and 262,144 bytes: full blocks are doubled to 32, six groups of ten.
    model = load_model("gemma-4-31b")
    groups = groups_of(model.layers)
    assert shape(groups) == [("sliding_window", 10, 16, 262_144)] * 5 + [("full", 10, 32, 262_144)]
    assert bytes_per_block(groups, GroupRules()) == 2_621_440
    per_sequence = blocks_per_sequence(groups, Reservation(262_144, 8192), BF16)
    # 8,192 + 5 x (cdiv(1023 + 8192, 16) + 1)
    assert per_sequence == 8192 + 5 * 577 == 11_077
    num_blocks = int(64.68 * 2**30) // 2_621_440
    assert int(num_blocks / per_sequence * 262_144) == 626_949


def test_layers_are_dealt_in_turn_and_short_groups_are_padded() -> None:
    model = load_model("gemma-3-27b")
    groups = groups_of(model.layers)
    # 52 sliding layers in groups of 10: 9, 9, 9, 9, 8, 8
    assert [len(g.pages) for g in groups] == [9, 9, 9, 9, 8, 8, 10]
    assert {g.padded_layers for g in groups} == {10}
    sliding = [item.layer for item in model.layers if item.cache.kind == "sliding_window"]
    assert [page.layer for page in groups[1].pages] == sliding[1::6]


def test_few_more_layers_of_one_type_set_the_size() -> None:
    # 30 sliding, 20 full: 30 is not below 1.5 x 20. 29 are.
    full, window = FullAttention(4, 256), SlidingWindow(4, 256, 512)
    assert [len(g.pages) for g in groups_of(numbered(*[full] * 20, *[window] * 30))] == [20, 15, 15]
    assert [len(g.pages) for g in groups_of(numbered(*[full] * 20, *[window] * 29))] == [20, 29]


def test_stages_keep_their_layers_of_every_group() -> None:
    model = load_model("gemma-3-27b")
    groups = groups_of(model.layers)
    stages = [range(0, 15), range(15, 31), range(31, 47), range(47, 62)]
    # No stage has more than 3 layers of a group.
    assert [bytes_per_block(groups, GroupRules(), stage) for stage in stages] == [3 * 131_072] * 4
    assert sum(group.bytes_per_block(stage) for group in groups for stage in stages) == 62 * 131_072


def test_a_draft_of_another_shape_pulls_the_groups_down_to_its_count() -> None:
    model = load_model("qwen3.5-27b")
    alike = groups_of((*model.layers, *model.draft_layers))
    # 48 states and 16 + 1 full layers
    assert sorted(len(g.pages) for g in alike) == [16, 16, 16, 17]
    other = groups_of((*model.layers, LayerCache(64, FullAttention(8, 128))))
    assert {len(g.pages) for g in other} == {1}
    assert len(other) == 65


def test_hybrids_with_states_share_one_page() -> None:
    model = load_model("qwen3.5-27b")
    groups = groups_of(model.layers)
    # 784 tokens x 4 heads x 512 x 2 bytes, which the states of 3,207,168 are padded to
    assert shape(groups) == [("gated_delta_net", 16, 784, 3_211_264)] * 3 + [("full", 16, 784, 3_211_264)]
    # vllm#40691: 1,487 blocks; 42 for 32,768 tokens and one for each group of states
    per_sequence = blocks_per_sequence(groups, Reservation(32_768, 8192), BF16)
    assert per_sequence == 42 + 3
    assert round(1487 / per_sequence, 2) == 33.04


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("falcon-h1-34b", [("full", 72), ("mamba2", 72)]),
        ("granite-4.0-h-small", [("mamba2", 4)] * 9 + [("full", 4)]),
        ("minimax-text-01", [("linear_attention", 10)] * 7 + [("full", 10)]),
        ("kimi-linear-48b", [("kda", 7), ("kda", 7), ("kda", 6), ("mla", 7)]),
        ("jamba-v0.1", [("mamba1", 4)] * 7 + [("full", 4)]),
        ("mamba-codestral-7b", [("mamba2", 64)]),
    ],
)
def test_families_with_states(name: str, expected: list[tuple[str, int]]) -> None:
    groups = groups_of(load_model(name).layers)
    assert [("+".join(g.kinds), len(g.pages)) for g in groups] == expected
    assert len({g.page_bytes for g in groups}) == 1


def test_encoder_and_decoder_of_whisper() -> None:
    groups = groups_of(load_model("whisper-large-v3").layers, CacheFormat("float16", "float16"))
    assert [(g.kinds, len(g.pages)) for g in groups] == [(("full",), 32), (("cross",), 32)]


def test_the_groups_of_deepseek_v4_flash() -> None:
    # 43 windows; 21 layers with latents of 4 tokens and an indexer, 20 with latents of 128. Layers that always need
    # the same tokens: the windows (43 pages of 37,440), the compressed ones (21 x (37,440 + 8,640) and 20 x 1,728,
    # not alike in number, so whole), their states in blocks of 4 (21 x (32,832 + 8,640)) and of 8 (20 x 32,832).
    # Groups of 22 repeats pad 43, 21 and 20 by 1 + 1 + 2, the least: the windows become two groups.
    model = load_model("deepseek-v4-flash")
    form = CacheFormat("bfloat16", "fp8_ds_mla")
    groups = groups_of(model.layers, form, 256)
    assert [(len(g.pages), g.block_size) for g in groups] == [(22, 64), (21, 64), (62, 256), (42, 4), (20, 8)]
    assert [g.bytes_per_block() for g in groups] == [
        22 * 37_440,
        21 * 37_440,
        21 * (37_440 + 8640) + 20 * 1728,
        21 * (32_832 + 8640),
        20 * 32_832,
    ]
    assert bytes_per_block(groups, GroupRules()) == 1_002_240
    # cdiv(131072, 256); twice cdiv(127 + 8192, 64) + 1; cdiv(7 + 8192, 4) + 1; cdiv(127 + 8192, 8) + 1
    per_sequence = blocks_per_sequence(groups, Reservation(131_072, 8192), form)
    assert per_sequence == 512 + 2 * 131 + 2051 + 1041


def test_without_the_hybrid_manager_all_layers_keep_all_tokens() -> None:
    rules = GroupRules(hybrid_manager=False)
    mixed = numbered(FullAttention(4, 64), SlidingWindow(4, 64, 128), ChunkedLocal(4, 64, 256))
    groups = groups_of(mixed, rules=rules)
    assert shape(groups) == [("full", 3, 16, 16_384)]
    assert blocks_per_sequence(groups, Reservation(4096, 8192), BF16) == 256
    # Windows alone stay windows.
    windows = groups_of(numbered(*[SlidingWindow(4, 64, 128)] * 2), rules=rules)
    assert windows[0].kinds == ("sliding_window",)
    with pytest.raises(InputError, match="cannot share one block table"):
        groups_of(numbered(FullAttention(4, 64), LinearAttention(4, 64)), rules=rules)
    with pytest.raises(InputError, match="cannot share one block table"):
        groups_of(numbered(FullAttention(4, 64), CrossAttention(4, 64)), rules=rules)


def test_a_latent_beside_windows_of_another_width_makes_all_layers_whole() -> None:
    # 16 x 576 x 2 bytes of a latent do not divide 16 x 4 x 512 x 2: all are kept whole in one group.
    mixed = numbered(LatentAttention(512, 64), SlidingWindow(4, 256, 128), LatentAttention(512, 64))
    groups = groups_of(mixed)
    assert shape(groups) == [("mla+full", 3, 16, None)]
    assert bytes_per_block(groups, GroupRules()) == 2 * 18_432 + 65_536


def test_smaller_pages_get_larger_blocks_or_padding() -> None:
    # 16 x 2 x 128 x 2 bytes go twice into 16 x 4 x 128 x 2; 3 heads do not, and are padded.
    halves = groups_of(numbered(FullAttention(2, 64), SlidingWindow(4, 64, 128)))
    assert shape(halves) == [("full", 1, 32, 16_384), ("sliding_window", 1, 16, 16_384)]
    padded = groups_of(numbered(FullAttention(3, 64), SlidingWindow(4, 64, 128)))
    assert shape(padded) == [("full", 1, 16, 16_384), ("sliding_window", 1, 16, 16_384)]


def test_windows_of_two_sizes_are_two_types() -> None:
    groups = groups_of(numbered(SlidingWindow(4, 64, 128), SlidingWindow(4, 64, 256)))
    assert len(groups) == 2
    # Full allocation of a windowed layer is one type with plain full attention.
    whole = groups_of(numbered(FullAttention(4, 64, window=128), FullAttention(4, 64)))
    assert len(whole) == 1


def test_a_state_larger_than_a_block_sets_the_block_and_checkpoints_align_it() -> None:
    state = Mamba2State(128, 64, 128, 8, 4, "float32")
    layers = numbered(state, FullAttention(8, 128))
    # 4,255,744 / (16 x 4,096) = 64.9
    assert hybrid_block_size(layers, BF16, 16, multiple=16) == 1040
    # aligned to 128: 4,255,744 / (128 x 4,096) = 8.1
    assert hybrid_block_size(layers, BF16, 16, multiple=128) == 1152
    assert hybrid_block_size(layers, BF16, 2048) == 2048
    assert hybrid_block_size(numbered(state), BF16, 16) == 16
