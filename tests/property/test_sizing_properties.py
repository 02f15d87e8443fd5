"""What holds of every model and deployment, whatever its numbers."""

from __future__ import annotations

from hypothesis import assume, given
from hypothesis import strategies as st

from kvplan.core.model import FullAttention, ModelSpec, Weights
from kvplan.core.sizing import (
    Deployment,
    GpuBudget,
    blocks_for,
    kv_sizes,
    plan_capacity,
    weight_sizes,
)


@st.composite
def models(draw: st.DrawFn) -> ModelSpec:
    layers, kv_heads, head_dim = draw(st.integers(1, 90)), draw(st.integers(1, 64)), draw(st.integers(1, 256))
    value_size = draw(st.none() | st.integers(1, 256))
    return ModelSpec(
        name="any",
        family="llama",
        architecture="LlamaForCausalLM",
        num_layers=layers,
        hidden_size=draw(st.integers(1, 16384)),
        num_heads=kv_heads * draw(st.integers(1, 16)),
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=draw(st.integers(1, 300_000)),
        max_position_embeddings=draw(st.none() | st.integers(1, 1 << 20)),
        rope_scaled=False,
        dtype="bfloat16",
        attention=(FullAttention(layers, kv_heads, head_dim, value_size),),
        weights=Weights(draw(st.integers(1, 10**12)), "config"),
        source="generated",
    )


def deploy(**settings: object) -> Deployment:
    """Fields that are not named keep their defaults; `builds` would draw those of a named tuple too."""
    return Deployment(**settings)  # type: ignore[arg-type]


deployments = st.builds(
    deploy,
    seq=st.integers(1, 1 << 20),
    max_model_len=st.integers(1, 1 << 20),
    dtype=st.sampled_from(["float16", "bfloat16", "float32"]),
    kv_cache_dtype=st.sampled_from(["fp8", "bfloat16", "float32"]),
    concurrency=st.integers(1, 5000),
    block_size=st.sampled_from([1, 8, 16, 32, 128]),
    max_num_seqs=st.integers(1, 1024),
    margin=st.sampled_from(["low", "mid", "high"]),
)


def blocks_given(spec: ModelSpec, deployed: Deployment, blocks: int) -> bool:
    deployed = deployed._replace(num_gpu_blocks_override=blocks)
    kv, weights = kv_sizes(spec, deployed), weight_sizes(spec, deployed)
    return plan_capacity(spec, deployed, kv, weights, gpu=None, max_num_batched_tokens=2048).fits


@given(models(), deployments, st.integers(1, 10_000))
def test_bytes_grow_with_the_sequence_by_the_same_for_each_token(
    spec: ModelSpec, deployed: Deployment, more: int
) -> None:
    short, long = kv_sizes(spec, deployed), kv_sizes(spec, deployed._replace(seq=deployed.seq + more))
    assert long.bytes_per_sequence - short.bytes_per_sequence == more * short.bytes_per_token
    assert long.allocated_bytes_per_sequence >= short.allocated_bytes_per_sequence
    assert long.total_bytes == long.bytes_per_sequence * deployed.concurrency


@given(models(), deployments)
def test_what_is_allocated_is_whole_blocks_and_less_than_one_too_much(
    spec: ModelSpec, deployed: Deployment
) -> None:
    sizes = kv_sizes(spec, deployed)
    over = sizes.allocated_bytes_per_sequence - sizes.bytes_per_sequence
    assert sizes.allocated_bytes_per_sequence % sizes.bytes_per_block == 0
    assert 0 <= over < sizes.bytes_per_block
    assert sizes.bytes_per_block == sizes.bytes_per_token * deployed.block_size
    assert sum(g.page_bytes * g.layers for g in sizes.groups) == sizes.bytes_per_block


@given(models(), deployments, st.integers(1, 128))
def test_the_ranks_together_hold_the_model_at_least_once(
    spec: ModelSpec, deployed: Deployment, tp: int
) -> None:
    heads = spec.num_kv_heads
    assume(heads % tp == 0 or tp % heads == 0)
    sizes = kv_sizes(spec, deployed._replace(tensor_parallel_size=tp))
    cluster = sizes.per_gpu.bytes_per_token * tp
    assert cluster == sizes.cluster_bytes_per_token
    assert cluster >= sizes.bytes_per_token
    # Equal exactly where the heads divide among the ranks; else every head stands tp // heads times.
    assert (cluster == sizes.bytes_per_token) == (heads % tp == 0)
    assert cluster == sizes.bytes_per_token * max(1, tp // heads)


@given(models(), deployments, st.integers(1, 1 << 42), st.integers(0, 1 << 38), st.integers(0, 20))
def test_more_memory_never_fits_less(
    spec: ModelSpec, deployed: Deployment, memory: int, more: int, more_sequences: int
) -> None:
    kv, weights = kv_sizes(spec, deployed), weight_sizes(spec, deployed)
    small, large = (
        plan_capacity(
            spec,
            deployed,
            kv,
            weights,
            gpu=GpuBudget("any", 1, size, "generated"),
            max_num_batched_tokens=2048,
        )
        for size in (memory, memory + more)
    )
    assert large.num_gpu_blocks >= small.num_gpu_blocks >= 0
    assert large.fits or not small.fits
    assert large.max_model_len_that_fits >= small.max_model_len_that_fits
    assert small.usable_blocks * kv.per_gpu.bytes_per_block <= max(0, small.available_kv_bytes)
    # What is said to fit is what the concurrency says.
    per_sequence = blocks_for(deployed.seq, deployed.block_size)
    starts = blocks_for(deployed.max_model_len, deployed.block_size) <= small.usable_blocks
    runs = deployed.concurrency <= deployed.max_num_seqs
    assert small.fits == (starts and runs and small.concurrent_sequences >= deployed.concurrency)
    assert small.headroom_bytes // kv.per_gpu.bytes_per_block == (
        small.usable_blocks - deployed.concurrency * per_sequence
    )


@given(models(), deployments)
def test_the_verdict_turns_at_exactly_one_number_of_blocks(spec: ModelSpec, deployed: Deployment) -> None:
    sequences = deployed.concurrency * blocks_for(deployed.seq, deployed.block_size)
    enough = 1 + max(sequences, blocks_for(deployed.max_model_len, deployed.block_size))
    assert blocks_given(spec, deployed, enough) == (deployed.concurrency <= deployed.max_num_seqs)
    assert not blocks_given(spec, deployed, enough - 1)


@given(models(), deployments)
def test_every_byte_figure_is_a_whole_number(spec: ModelSpec, deployed: Deployment) -> None:
    kv, weights = kv_sizes(spec, deployed), weight_sizes(spec, deployed)
    found = plan_capacity(
        spec,
        deployed,
        kv,
        weights,
        gpu=GpuBudget("any", 1, 1 << 37, "generated"),
        max_num_batched_tokens=2048,
    )
    overhead = found.overhead_bytes
    assert overhead is not None
    assert overhead.low <= overhead.total("mid") <= overhead.high
    figures = (
        kv.bytes_per_token,
        kv.bytes_per_block,
        kv.bytes_per_sequence,
        kv.total_bytes,
        kv.per_gpu.total_bytes,
        weights.total_bytes,
        weights.per_gpu_bytes,
        found.available_kv_bytes,
        found.headroom_bytes,
        overhead.low,
        overhead.high,
        found.kv_cache_tokens,
    )
    assert {type(figure) for figure in figures} == {int}
