"""What holds of the pool of every engine, whatever the model."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from toy_models import toy_spec

from kvplan.core.deployment import Deployment
from kvplan.core.engine_sizing import engine_sizing
from kvplan.core.kv_cache import (
    Cache,
    CacheFormat,
    FullAttention,
    LatentAttention,
    ShortConv,
    SlidingWindow,
)
from kvplan.core.kv_pool import Pool
from kvplan.core.model import ModelSpec
from kvplan.core.weights import WHOLE_MODEL, Weights

ALL = WHOLE_MODEL
FORMS = {
    "vllm": "bfloat16",
    "paged": "bfloat16",
    "sglang": "bfloat16",
    "tensorrt-llm": "fp8",
    "llama.cpp": "q8_0",
    "static": "bfloat16",
    "orca-max": "bfloat16",
    "orca-oracle": "bfloat16",
}

heads = st.sampled_from([1, 2, 8])
# Written out, as Hypothesis would fill optional fields too.
whole = st.one_of(
    st.tuples(heads, st.sampled_from([32, 128])).map(lambda sizes: FullAttention(*sizes)),
    st.just(LatentAttention(512, 64)),
)
windows = st.tuples(heads, st.integers(1, 5000)).map(lambda sizes: SlidingWindow(sizes[0], 64, sizes[1]))
states = st.integers(1, 4096).map(lambda channels: ShortConv(channels, 4))


@st.composite
def pools(draw: st.DrawFn) -> tuple[Pool, ModelSpec, CacheFormat, str]:
    """A pool of some engine for a model of some layers, the first of which keeps all tokens."""
    engine = draw(st.sampled_from(sorted(FORMS)))
    kinds: list[st.SearchStrategy[Any]] = [whole]
    if engine != "vllm":  # whose pages of unlike layers are another matter
        kinds.append(windows)
    if engine not in ("vllm", "tensorrt-llm"):
        kinds.append(states)
    caches: list[Cache] = [draw(whole)]
    if engine != "vllm":
        caches += draw(st.lists(st.one_of(kinds), max_size=6))
    form = CacheFormat("bfloat16", FORMS[engine])
    spec = toy_spec(
        *caches,
        architecture=draw(st.sampled_from(["LlamaForCausalLM", "GptOssForCausalLM"])),
        num_kv_heads=8,
        head_dim=32,
        weights=Weights(None, "config"),
    )
    deployment = Deployment(
        seq=1,
        max_model_len=4096,
        cache=form,
        engine=engine,
        block_size=draw(st.sampled_from([2, 16, 64])),
        max_num_seqs=draw(st.integers(1, 9)),
        is_max_num_seqs_given=draw(st.booleans()),
    )
    return engine_sizing(engine).make_pool(spec, deployment, None), spec, form, engine


@given(pools(), st.integers(1, 50_000), st.integers(1, 50_000))
def test_a_longer_sequence_takes_no_fewer_blocks_and_bytes(
    made: tuple[Pool, ModelSpec, CacheFormat, str], one: int, other: int
) -> None:
    pool = made[0]
    short, long = sorted((one, other))
    assert pool.blocks(short) <= pool.blocks(long)
    assert pool.allocated_bytes(short) <= pool.allocated_bytes(long)


@given(pools(), st.integers(1, 50_000))
def test_what_a_sequence_is_given_holds_what_it_keeps(
    made: tuple[Pool, ModelSpec, CacheFormat, str], length: int
) -> None:
    pool, spec, form, _ = made
    payload = sum(item.cache.payload_bytes(length, form) for item in spec.layers)
    assert pool.allocated_bytes(length) >= payload


@given(pools(), st.integers(-(10**9), 10**12))
def test_a_pool_takes_no_more_than_there_is_but_for_its_padding(
    made: tuple[Pool, ModelSpec, CacheFormat, str], available: int
) -> None:
    pool, _, _, engine = made
    share = pool.share(available, ALL)
    if engine in ("sglang", "tensorrt-llm"):
        # A page for writes that go nowhere; a last block that is rounded up.
        available += pool.bytes_per_block()
    if available > 0 and share.num_blocks > 0:
        assert share.pool_bytes <= available
    if available <= 0:
        assert share.num_blocks <= 0


@given(pools(), st.integers(10**6, 10**12))
def test_every_token_of_the_line_has_a_place(
    made: tuple[Pool, ModelSpec, CacheFormat, str], available: int
) -> None:
    pool = made[0]
    blocks = pool.share(available, ALL).num_blocks
    tokens, concurrency = pool.token_line(blocks, 4096)
    assert tokens <= max(0, blocks) * max(pool.block_size, 4096)
    assert concurrency >= 0
