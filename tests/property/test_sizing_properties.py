"""What holds of every model and deployment, whatever its numbers."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from rich.console import Console

from kvplan.config import load_model
from kvplan.core.deployment import Deployment
from kvplan.core.kv_cache import (
    WHOLE,
    Cache,
    CacheFormat,
    ChunkedLocal,
    FullAttention,
    GatedDeltaNet,
    LatentAttention,
    LayerCache,
    SlidingWindow,
    SparseIndexer,
)
from kvplan.core.kv_pool import VllmPool
from kvplan.core.model import ModelSpec
from kvplan.core.overhead import Overhead
from kvplan.core.sizing import Budget, Capacity, GpuBudget, KvSizes, Plan, fits, plan_capacity
from kvplan.errors import InputError
from kvplan.jobs.size import size
from kvplan.report.size import print_size
from kvplan.report.tables import Screen

BASE = load_model("llama-3.1-8b")
HEADS = st.sampled_from([1, 2, 4, 8, 16])
WIDTHS = st.sampled_from([64, 96, 128, 256])
#: Fields by position: `builds` would draw those with a default too.
KINDS: list[st.SearchStrategy[Cache]] = [
    st.tuples(HEADS, WIDTHS).map(lambda drawn: FullAttention(*drawn)),
    st.tuples(HEADS, WIDTHS, st.sampled_from([128, 1024])).map(lambda drawn: SlidingWindow(*drawn)),
    st.tuples(HEADS, WIDTHS, st.sampled_from([1024, 8192])).map(lambda drawn: ChunkedLocal(*drawn)),
    st.just(LatentAttention(512, 64)),
    st.just(GatedDeltaNet(16, 128, 32, 128, 4)),
]
VERSIONS = st.sampled_from(["0.8", "0.11", "0.19", "0.21", "0.24", "0.26", "0.33"])


@st.composite
def models(draw: st.DrawFn, most_kinds: int = 2) -> ModelSpec:
    """A repeated pattern of one or two kinds of layer."""
    palette = [draw(draw(st.sampled_from(KINDS))) for _ in range(draw(st.integers(1, most_kinds)))]
    layers, period = draw(st.integers(1, 16)), draw(st.integers(1, 5))
    caches = [palette[0] if i % period == 0 else palette[-1] for i in range(layers)]
    if draw(st.booleans()) and LatentAttention(512, 64) in caches and len(set(caches)) == 1:
        caches = [cache for _ in range(layers) for cache in (LatentAttention(512, 64), SparseIndexer(128))]
        items = tuple(LayerCache(i // 2, cache) for i, cache in enumerate(caches))
    else:
        items = tuple(LayerCache(i, cache) for i, cache in enumerate(caches))
    return replace(
        BASE,
        num_layers=layers,
        num_heads=1024,
        max_position_embeddings=draw(st.none() | st.integers(1, 1 << 20)),
        layers=items,
    )


@st.composite
def deployments(draw: st.DrawFn) -> Deployment:
    return Deployment(
        seq=draw(st.integers(1, 1 << 20)),
        max_model_len=draw(st.integers(1, 1 << 20)),
        cache=CacheFormat(
            "bfloat16", draw(st.sampled_from(["fp8", "bfloat16"])), draw(st.sampled_from([1, 2, 4, 8]))
        ),
        version=draw(VERSIONS),
        concurrency=draw(st.integers(1, 2000)),
        block_size=draw(st.sampled_from([16, 32, 64, 128])),
        max_num_seqs=draw(st.integers(1, 1024)),
        max_num_batched_tokens=draw(st.sampled_from([512, 2048, 8192])),
        enable_prefix_caching=draw(st.booleans()),
        margin=draw(st.sampled_from(["low", "mid", "high"])),
    )


def plan_of(spec: ModelSpec, deployed: Deployment) -> Plan:
    """The plan; what the engine refuses is no example."""
    try:
        return Plan(spec, deployed, VllmPool)
    except InputError:
        assume(False)
        raise


def sizes_of(spec: ModelSpec, deployed: Deployment) -> KvSizes:
    plan = plan_of(spec, deployed)
    return plan.kv_sizes(plan.stages[0])


def with_blocks(spec: ModelSpec, deployed: Deployment, blocks: int) -> Capacity:
    return plan_capacity(plan_of(spec, deployed._replace(num_gpu_blocks_override=blocks)), Budget(None, ()))


def with_cache(deployed: Deployment, **changes: int) -> Deployment:
    return deployed._replace(cache=deployed.cache._replace(**changes))


@given(models(), deployments(), st.integers(1, 10_000))
def test_bytes_and_blocks_never_shrink_with_the_sequence(
    spec: ModelSpec, deployed: Deployment, more: int
) -> None:
    short, long = sizes_of(spec, deployed), sizes_of(spec, deployed._replace(seq=deployed.seq + more))
    assert long.bytes_per_sequence >= short.bytes_per_sequence
    assert long.allocated_bytes_per_sequence >= short.allocated_bytes_per_sequence
    for before, after in zip(short.groups, long.groups, strict=True):
        assert after.blocks_per_sequence >= before.blocks_per_sequence
    # Past every window, each token adds the growth per token.
    if deployed.seq >= 8192:
        assert long.bytes_per_sequence - short.bytes_per_sequence == more * short.bytes_per_token
    assert short.bytes_per_sequence <= deployed.seq * short.bytes_per_token + short.fixed_bytes_per_sequence
    assert long.total_bytes == long.bytes_per_sequence * deployed.concurrency


@given(models(most_kinds=1), deployments())
def test_what_is_allocated_of_layers_alike_is_whole_blocks_and_less_than_one_too_much(
    spec: ModelSpec, deployed: Deployment
) -> None:
    assume(all(isinstance(item.cache, WHOLE) for item in spec.layers))
    sizes = sizes_of(spec, deployed)
    over = sizes.allocated_bytes_per_sequence - sizes.bytes_per_sequence
    assert sizes.allocated_bytes_per_sequence % sizes.bytes_per_block == 0
    assert 0 <= over < sizes.bytes_per_block
    assert sizes.bytes_per_block == sizes.bytes_per_token * deployed.block_size


@given(models(), deployments())
def test_groups_have_every_layer_once_and_no_block_is_smaller_than_a_group(
    spec: ModelSpec, deployed: Deployment
) -> None:
    plan = plan_of(spec, deployed)
    sizes = plan.kv_sizes(plan.stages[0])
    assert sum(group.layers for group in sizes.per_gpu.groups) == len(spec.layers)
    blocks = sum(group.blocks_per_sequence for group in sizes.per_gpu.groups)
    assert blocks == plan.pool.blocks(deployed.seq)
    assert sizes.per_gpu.allocated_bytes_per_sequence == blocks * sizes.per_gpu.bytes_per_block
    for group in sizes.per_gpu.groups:
        assert group.padded_layers >= group.layers
        if group.page_bytes is not None:
            assert group.padded_layers * group.page_bytes <= sizes.per_gpu.bytes_per_block
            assert group.page_bytes % 2 == 0


@given(models(), deployments())
def test_the_ranks_together_hold_the_model_at_least_once(spec: ModelSpec, deployed: Deployment) -> None:
    tp = deployed.tensor_parallel_size
    sizes = sizes_of(spec, deployed)
    growing = [item.cache for item in spec.layers if isinstance(item.cache, WHOLE)]
    divided = all(isinstance(cache, FullAttention) and cache.num_kv_heads % tp == 0 for cache in growing)
    cluster = sizes.per_gpu.bytes_per_token * tp
    assert cluster == sizes.cluster_bytes_per_token
    assert cluster >= sizes.bytes_per_token
    # Equal exactly where all heads divide among the ranks (or nothing grows).
    assert (cluster == sizes.bytes_per_token) == (divided or tp == 1)
    assert sizes.per_gpu.bytes_per_sequence * tp >= sizes.bytes_per_sequence


@given(models(), deployments(), st.integers(1, 8))
def test_the_stages_together_are_the_model_once(spec: ModelSpec, deployed: Deployment, stages: int) -> None:
    assume(stages <= spec.num_layers)
    alone = plan_of(spec, deployed)
    parts = plan_of(spec, deployed._replace(pipeline_parallel_size=stages))
    assert sum(stage.end - stage.first for stage in parts.stages) == spec.num_layers
    assert sum(parts.bytes_per_token(stage) for stage in parts.stages) == alone.bytes_per_token(
        alone.stages[0]
    )
    per_stage = [parts.kv_sizes(stage).per_gpu for stage in parts.stages if holds_any(spec, parts, stage)]
    whole = alone.kv_sizes(alone.stages[0]).per_gpu
    assert sum(one.bytes_per_sequence for one in per_stage) == whole.bytes_per_sequence
    assert sum(one.fixed_bytes_per_sequence for one in per_stage) == whole.fixed_bytes_per_sequence
    # The engine's groups are those of the whole model, so no stage's block is larger than the model's.
    assert all(one.bytes_per_block <= whole.bytes_per_block for one in per_stage)


def holds_any(spec: ModelSpec, plan: Plan, stage: Any) -> bool:
    """Whether a stage has a cache; the engine refuses one that has none."""
    found = any(stage.holds(item.layer) for item in spec.layers)
    if not found:
        with pytest.raises(InputError, match="has no layer with a cache"):
            plan.pool.bytes_per_block(stage)
    return found


@given(models(), deployments(), st.integers(1 << 34, 1 << 42), st.integers(0, 1 << 38))
def test_more_memory_never_fits_less(spec: ModelSpec, deployed: Deployment, memory: int, more: int) -> None:
    plan = plan_of(spec, deployed)
    overhead = Overhead(activations=1 << 30, cuda_graphs=0, runtime=0, low=1 << 29, high=1 << 31)
    small, large = (
        plan_capacity(plan, Budget(GpuBudget("any", 1, budget, "generated"), (overhead,)))
        for budget in (memory, memory + more)
    )
    assert large.num_gpu_blocks >= small.num_gpu_blocks >= 0
    assert large.fits or not small.fits
    assert large.max_model_len_that_fits >= small.max_model_len_that_fits
    block = plan.pool.bytes_per_block()
    assert small.num_gpu_blocks * block <= max(0, small.available_kv_bytes)
    if small.available_kv_bytes > 0:
        assert small.available_kv_bytes < (small.num_gpu_blocks + 1) * block
        assert (small.available_kv_bytes + small.next_block_bytes) % block == 0
    # Memory is what it is: utilization, weights, overhead and the rest account for all of it.
    rank = small.ranks[0]
    assert rank.weights_bytes is not None
    assert rank.overhead_bytes is not None
    assert small.unused_bytes is not None
    parts = small.unused_bytes + rank.weights_bytes + rank.extra_bytes + rank.overhead_bytes
    assert parts + small.available_kv_bytes == memory
    # What is said to fit is what the blocks say.
    needed = deployed.concurrency * plan.pool.blocks(deployed.seq)
    starts = plan.pool.blocks(deployed.max_model_len) <= plan.pool.start_check_blocks(small.num_gpu_blocks)
    runs = deployed.concurrency <= deployed.max_num_seqs
    assert small.fits == (small.usable_blocks > 0 and starts and runs and needed <= small.usable_blocks)
    assert small.fits == fits(plan, Budget(GpuBudget("any", 1, memory, "generated"), (overhead,)))
    assert small.headroom_bytes == (small.usable_blocks - needed) * block


@given(models(), deployments())
def test_the_verdict_turns_at_exactly_one_number_of_blocks(spec: ModelSpec, deployed: Deployment) -> None:
    plan = plan_of(spec, deployed)
    sequences = deployed.concurrency * plan.pool.blocks(deployed.seq)
    enough = max(1 + sequences, plan.pool.blocks(deployed.max_model_len), 2)
    while plan.pool.start_check_blocks(enough) < plan.pool.blocks(deployed.max_model_len):
        enough += 1
    assert with_blocks(spec, deployed, enough).fits == (deployed.concurrency <= deployed.max_num_seqs)
    assert not with_blocks(spec, deployed, enough - 1).fits


@given(models(), deployments(), st.integers(2, 1 << 20))
def test_the_longest_length_fits_and_one_token_more_does_not(
    spec: ModelSpec, deployed: Deployment, blocks: int
) -> None:
    found = with_blocks(spec, deployed, blocks)
    pool = plan_of(spec, deployed).pool
    longest, room = found.max_model_len_that_fits, pool.start_check_blocks(blocks)
    assert longest == 0 or pool.blocks(longest) <= room
    together = pool.block_size * deployed.cache.decode_context_parallel_size
    limit = max(spec.max_position_embeddings or room * together, deployed.max_model_len)
    assert longest == limit or pool.blocks(longest + 1) > room


@given(models(), deployments(), st.integers(1, 1 << 20))
def test_the_token_line_is_what_its_version_computes(
    spec: ModelSpec, deployed: Deployment, blocks: int
) -> None:
    pool = plan_of(spec, deployed).pool
    tokens, concurrency = pool.token_line(blocks, deployed.max_model_len)
    if deployed.version in ("0.21", "0.24", "0.26", "0.33"):
        assert tokens == int(concurrency * deployed.max_model_len)
    assert tokens >= 0
    more, larger = pool.token_line(blocks * 2, deployed.max_model_len)
    assert more >= tokens
    assert larger >= concurrency


@given(models(), deployments())
def test_every_byte_figure_is_a_whole_number(spec: ModelSpec, deployed: Deployment) -> None:
    found = plan_capacity(plan_of(spec, deployed._replace(kv_cache_memory_bytes=1 << 37)), Budget(None, ()))
    kv = sizes_of(spec, deployed)
    for name in ("bytes_per_token", "fixed_bytes_per_sequence", "bytes_per_block", "bytes_per_sequence"):
        assert type(getattr(kv, name)) is type(getattr(kv.per_gpu, name)) is int
    for name in (
        "available_kv_bytes",
        "headroom_bytes",
        "next_block_bytes",
        "kv_cache_tokens",
        "num_gpu_blocks",
    ):
        assert type(getattr(found, name)) is int


# What people see


MODELS = [
    "llama-2-13b",
    "llama-3.1-8b",
    "gemma-3-27b",
    "gpt-oss-20b",
    "qwen3.5-27b",
    "deepseek-v2-lite",
    "kimi-linear-48b",
]


@given(
    st.sampled_from(MODELS),
    st.integers(1, 4096),
    st.integers(1, 300),
    st.sampled_from([None, {"gpu": "h100-80gb"}, {"gpu": "l4"}, {"kv_cache_memory_bytes": "9GiB"}]),
    st.sampled_from(["vllm@0.19", "vllm@0.24", "vllm@0.33"]),
)
def test_table_explanation_and_document_agree(
    model: str, seq: int, concurrency: int, budget: dict[str, Any] | None, engine: str
) -> None:
    try:
        found = size(model, seq=seq, concurrency=concurrency, engine=engine, **(budget or {}))
    except InputError:
        assume(False)
        raise
    document = json.loads(json.dumps(found.to_dict(explain=True)))
    kv, capacity = document["kv"], document.get("capacity")
    last = document["explanation"][-1]
    if capacity is None:
        assert last.endswith(f"= {kv['total_bytes']:,}")
    else:
        assert last == f"fits: {'yes' if capacity['fits'] else 'no'}: {capacity['reason']}"
    text = io.StringIO()
    print_size(Screen(Console(file=text, width=200, color_system=None)), [found], explain=False)
    table = text.getvalue()
    known = set(map(str, figures(document)))
    shown = {figure.replace(",", "") for figure in re.findall(r"(-?[\d,]*\d) B(?![\w])", table)}
    assert shown
    assert shown <= known, shown - known
    if capacity is not None:
        assert capacity["reason"] in table or f"{capacity['num_gpu_blocks']:,}" in table


def figures(value: object) -> list[int]:
    """All whole numbers of a document."""
    if isinstance(value, dict):
        return [figure for item in value.values() for figure in figures(item)]
    if isinstance(value, list):
        return [figure for item in value for figure in figures(item)]
    return [value] if isinstance(value, int) and not isinstance(value, bool) else []
