"""What must hold of caches, their groups and the reading of configs for any shape."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from toy_models import CONFIG_SIZES

from kvplan.core.architectures import ARCHITECTURES
from kvplan.core.kv_cache import (
    STATES,
    Cache,
    CacheFormat,
    ChunkedLocal,
    CrossAttention,
    FullAttention,
    GatedDeltaNet,
    KimiDelta,
    LatentAttention,
    LayerCache,
    LinearAttention,
    Mamba1State,
    Mamba2State,
    Reservation,
    ShortConv,
    SlidingWindow,
    SparseIndexer,
)
from kvplan.core.kv_groups import (
    GroupRules,
    blocks_per_sequence,
    bytes_per_block,
    form_groups,
    hybrid_block_size,
    make_pages,
)
from kvplan.core.model import ModelSpec
from kvplan.errors import InputError
from kvplan.hf_config import FIELDS, Origin, spec_from_config

HEADS = st.integers(1, 64)
SIZES = st.sampled_from([64, 96, 128, 192, 256, 512])
WINDOWS = st.sampled_from([1, 128, 1000, 4096])
RANKS = st.sampled_from([1, 2, 3, 4, 6, 8, 16])
BLOCK_SIZES = st.sampled_from([1, 8, 16, 32, 64, 128, 784])
HEAD_FORMS = st.sampled_from(
    ["bfloat16", "float32", "fp8", "int8_per_token_head", "int4_per_token_head", "nvfp4"]
)
BF16 = CacheFormat("bfloat16", "bfloat16")

HEAD_CACHES: st.SearchStrategy[Cache] = st.one_of(
    st.builds(FullAttention, HEADS, SIZES, st.none() | SIZES, st.none()),
    st.builds(SlidingWindow, HEADS, SIZES, WINDOWS, st.none() | SIZES),
    st.builds(ChunkedLocal, HEADS, SIZES, WINDOWS),
    st.builds(CrossAttention, HEADS, SIZES, st.none() | WINDOWS),
)
LATENT_CACHES: st.SearchStrategy[Cache] = st.one_of(
    st.builds(LatentAttention, st.sampled_from([256, 512]), st.sampled_from([0, 32, 64])),
    st.builds(SparseIndexer, st.sampled_from([128, 256])),
)
COUNTS = st.sampled_from([1, 2, 4, 8, 16, 24, 48])
KERNELS = st.integers(2, 5)
STATE_CACHES: st.SearchStrategy[Cache] = st.one_of(
    st.builds(Mamba1State, st.sampled_from([48, 4096, 8192]), COUNTS, KERNELS),
    st.builds(Mamba2State, COUNTS, SIZES, COUNTS, COUNTS, KERNELS, st.none() | st.just("float32")),
    st.builds(GatedDeltaNet, COUNTS, SIZES, COUNTS, SIZES, KERNELS, st.none() | st.just("float32")),
    st.builds(lambda n, d, k: KimiDelta(n, d, n, d, k), COUNTS, SIZES, KERNELS),
    st.builds(LinearAttention, COUNTS, SIZES),
    st.builds(ShortConv, SIZES, KERNELS),
)


@given(HEAD_CACHES | LATENT_CACHES, BLOCK_SIZES, st.integers(1, 40))
def test_pages_of_tokens_grow_in_proportion_to_the_block(cache: Cache, block_size: int, times: int) -> None:
    assert cache.page_bytes(times * block_size, BF16) == times * cache.page_bytes(block_size, BF16)


@given(STATE_CACHES, BLOCK_SIZES, BLOCK_SIZES)
def test_a_state_has_one_size(state: Cache, one: int, other: int) -> None:
    assert state.page_bytes(one, BF16) == state.page_bytes(other, BF16) > 0


@given(HEAD_CACHES, RANKS, HEAD_FORMS, BLOCK_SIZES)
def test_ranks_together_hold_all_heads_and_no_more_unless_they_repeat(
    cache: Cache, ranks: int, dtype: str, block_size: int
) -> None:
    assert isinstance(cache, (FullAttention, SlidingWindow, ChunkedLocal, CrossAttention))
    heads = cache.num_kv_heads
    assume(heads % ranks == 0 or ranks % heads == 0)
    whole = cache.page_bytes(block_size, CacheFormat("bfloat16", dtype))
    rank = cache.page_bytes(block_size, CacheFormat("bfloat16", dtype, ranks))
    assert ranks * rank >= whole
    assert (ranks * rank == whole) == (heads % ranks == 0)


@given(LATENT_CACHES, RANKS, BLOCK_SIZES)
def test_every_rank_holds_whole_latents(cache: Cache, ranks: int, block_size: int) -> None:
    form = CacheFormat("bfloat16", "bfloat16", ranks)
    assert cache.page_bytes(block_size, form) == cache.page_bytes(block_size, BF16)


@given(STATE_CACHES, RANKS)
def test_ranks_together_hold_a_state(state: Cache, ranks: int) -> None:
    # vLLM's mixer takes groups that ranks do not divide only where there is one.
    assume(not isinstance(state, Mamba2State) or state.num_groups in (0, 1) or state.num_groups % ranks == 0)
    form = CacheFormat("bfloat16", "bfloat16", ranks)
    try:
        rank = state.page_bytes(16, form)
    except InputError:
        assert ranks > 1
        return
    whole = state.page_bytes(16, BF16)
    assert ranks * rank >= whole
    repeats = isinstance(state, Mamba2State) and state.num_groups % ranks != 0
    assert (ranks * rank == whole) == (not repeats)


@given(
    HEAD_CACHES | LATENT_CACHES | STATE_CACHES,
    st.sampled_from([1, 16, 64]),
    st.integers(1, 20_000),
    st.integers(1, 20_000),
    st.integers(1, 9000),
)
def test_a_longer_sequence_never_needs_fewer_blocks(
    cache: Cache, block_size: int, short: int, more: int, in_flight: int
) -> None:
    def blocks(length: int) -> int:
        return cache.blocks(block_size, Reservation(length, in_flight), BF16._replace(encoder_tokens=2000))

    assert 1 <= blocks(short) <= blocks(short + more)
    assert cache.payload_bytes(short, BF16) <= cache.payload_bytes(short + more, BF16)
    if not isinstance(cache, (CrossAttention, *STATES)):
        assert cache.payload_bytes(short, BF16) <= blocks(short) * cache.page_bytes(block_size, BF16)


@st.composite
def models(draw: st.DrawFn) -> tuple[LayerCache, ...]:
    """A model of a few kinds of layers, in any order."""
    kinds = draw(st.lists(HEAD_CACHES | LATENT_CACHES | STATE_CACHES, min_size=1, max_size=4))
    drawn = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=40))
    return tuple(LayerCache(i, cache) for i, cache in enumerate(drawn))


@given(models(), st.booleans(), st.lists(st.integers(1, 39), max_size=3, unique=True))
def test_groups_part_the_layers_and_stages_part_the_groups(
    layers: tuple[LayerCache, ...], hybrid_manager: bool, cuts: list[int]
) -> None:
    block_size = hybrid_block_size(layers, BF16, 16)
    pages = make_pages(layers, BF16, block_size)
    try:
        groups = form_groups(pages, BF16, GroupRules(hybrid_manager=hybrid_manager))
    except InputError:
        # Latents, or layers without a common table, beside others.
        kinds = {item.cache.kind for item in layers}
        assert not hybrid_manager or "mla" in kinds or "indexer" in kinds
        return
    assert Counter(p.layer for g in groups for p in g.pages) == Counter(item.layer for item in layers)
    for group in groups:
        assert 1 <= len(group.pages) <= group.padded_layers
        assert len({page.block_size for page in group.pages}) == 1
        for page in group.pages:
            assert page.page_bytes >= page.cache.page_bytes(page.block_size, BF16)
    whole = bytes_per_block(groups, GroupRules())
    assert whole == max(group.bytes_per_block() for group in groups)
    # Stages of a pipeline part each group's bytes; no stage needs a wider block than the whole.
    edges = [0, *sorted(cuts), 40]
    stages = [range(start, end) for start, end in pairwise(edges)]
    for group in groups:
        assert sum(group.bytes_per_block(stage) for stage in stages) == group.bytes_per_block()
    assert max(bytes_per_block(groups, GroupRules(), stage) for stage in stages) <= whole
    assert sum(bytes_per_block(groups, GroupRules(), stage) for stage in stages) >= whole


@given(models(), st.integers(1, 20_000), st.integers(1, 20_000))
def test_a_longer_sequence_never_needs_less_of_a_pool(
    layers: tuple[LayerCache, ...], short: int, more: int
) -> None:
    with suppress(InputError):
        groups = form_groups(make_pages(layers, BF16, 16), BF16, GroupRules())
        needs = [
            blocks_per_sequence(groups, Reservation(length, 8192), BF16) for length in (short, short + more)
        ]
        assert needs[0] <= needs[1]


@given(models(), BLOCK_SIZES, st.sampled_from([1, 64, 128]))
def test_a_hybrid_block_holds_the_largest_state(
    layers: tuple[LayerCache, ...], block_size: int, multiple: int
) -> None:
    chosen = hybrid_block_size(layers, BF16, block_size, multiple=multiple)
    assert chosen >= block_size
    attention = [i.cache for i in layers if i.cache.kind in ("full", "mla")]
    states = [i.cache for i in layers if isinstance(i.cache, STATES)]
    if attention and states:
        assert attention[0].page_bytes(chosen, BF16) >= max(s.page_bytes(1, BF16) for s in states)


PLAIN = CONFIG_SIZES | {"max_position_embeddings": 256}
WORDS = st.sampled_from(
    ["full_attention", "sliding_attention", "mamba", "M*M*", "FSSF", "auto", "float32", "x"]
)
SCALARS = st.none() | st.booleans() | st.integers(-2, 300) | st.sampled_from([10**6, 10**30]) | WORDS
VALUES = st.one_of(
    SCALARS,
    st.floats(),
    st.lists(SCALARS, max_size=5),
    st.lists(WORDS, min_size=4, max_size=4),
    st.lists(st.integers(0, 4), min_size=4, max_size=4),
    st.dictionaries(
        st.sampled_from(["kda_layers", "num_heads", "attention", "kv_n_heads"]), SCALARS, max_size=3
    ),
    st.lists(st.dictionaries(st.sampled_from(["attention", "no_op"]), SCALARS, max_size=2), max_size=4),
)


@settings(max_examples=300)
@given(
    st.sampled_from(sorted(ARCHITECTURES)),
    st.dictionaries(st.sampled_from(sorted(FIELDS)), VALUES, max_size=6),
    st.booleans(),
)
def test_a_config_is_read_or_refused_with_a_reason(
    architecture: str, junk: dict[str, object], nested: bool
) -> None:
    config = {**PLAIN, **({"text_config": junk} if nested else junk), "architectures": [architecture]}
    # Nothing but an error for people may come of it.
    with suppress(InputError):
        check_model(spec_from_config(config, origin=Origin("config.json", "m"), source="test"))


def check_model(model: ModelSpec) -> None:
    assert all(0 <= item.layer < max(model.num_layers, 1) for item in model.layers)
    assert all(item.layer >= model.num_layers for item in model.draft_layers)
    for item in (*model.layers, *model.draft_layers):
        with suppress(InputError):
            assert item.cache.page_bytes(256, BF16) >= 0


@pytest.mark.parametrize("name", ["linear_attn_config", "block_configs", "layer_types", "index_topk_pattern"])
def test_deep_nesting_does_no_harm(name: str) -> None:
    deep: object = 1
    for _ in range(5000):
        deep = [deep]
    with suppress(InputError):
        spec_from_config(
            {**PLAIN, "architectures": ["LlamaForCausalLM"], name: deep},
            origin=Origin("config.json", "m"),
            source="test",
        )
