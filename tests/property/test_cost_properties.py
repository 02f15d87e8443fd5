"""What any model of step times must hold to, whatever its constants: all kinds of attention, experts, ranks, stages."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvplan.core.communication import Link
from kvplan.core.cost import LatencyModel, Settings
from kvplan.core.engine import StepWork
from kvplan.core.step_constants import CONSTANT_NAMES, ConstantName, StepConstants
from kvplan.core.step_shape import Attention, Experts, GpuRates, Matrices, Reductions, StageShape
from kvplan.options import Resolver, SizeOptions
from kvplan.serving import Served, find_gpu, load_model, serve
from kvplan.step_time import gpu_rates, latency_model, stage_shapes

sizes = st.integers(0, 10**9)
matrices = st.builds(Matrices, sizes, sizes, sizes)
attention = st.builds(
    Attention,
    st.integers(0, 10**6),
    st.integers(0, 10**7),
    st.integers(0, 10**7),
    st.integers(0, 10**5),
    st.none() | st.integers(1, 5000),
    st.integers(0, 10**6),
)


@st.composite
def experts(draw: st.DrawFn) -> Experts:
    total = draw(st.integers(1, 64))
    used = draw(st.integers(1, total))
    return Experts(
        total,
        draw(st.integers(1, total)),
        used,
        draw(sizes),
        draw(sizes),
        draw(sizes),
        draw(st.integers(1, 4)),
    )


shapes = st.builds(
    StageShape,
    st.integers(0, 900),
    matrices,
    matrices,
    st.lists(experts(), max_size=2).map(tuple),
    st.lists(attention, max_size=3).map(tuple),
    st.integers(0, 10**6),
    st.lists(
        st.builds(Reductions, st.integers(1, 200), st.integers(2, 16), st.integers(1, 10**5)), max_size=2
    ).map(tuple),
    st.integers(0, 10**5),
)
links = st.builds(Link, st.integers(10**9, 10**12), st.booleans())
rates = st.builds(
    GpuRates,
    st.integers(10**11, 10**13),
    st.integers(10**13, 10**16),
    st.integers(10**13, 10**16),
    links,
    st.integers(10**9, 10**11),
)
shares = st.floats(0.05, 1)
seconds = st.floats(0, 1e-3)
constants = st.builds(
    StepConstants, shares, shares, shares, shares, shares, seconds, seconds, seconds, seconds, seconds
)
settings = st.builds(Settings, st.sampled_from([0, 2, 512]), st.booleans(), st.integers(0, 10**7))
models = st.builds(LatencyModel, st.lists(shapes, min_size=1, max_size=2), rates, constants, settings)
chunks = st.tuples(st.integers(0, 10**5), st.integers(1, 10**4))
works = st.builds(
    lambda contexts, prompts: StepWork(len(contexts), sum(contexts), prompts, len(contexts)),
    st.lists(st.integers(1, 10**5), max_size=5),
    st.lists(chunks, max_size=4),
)


@given(models, st.lists(st.integers(1, 10**4), min_size=1, max_size=5))
def test_a_run_of_decode_steps_is_priced_as_its_steps_one_by_one(
    model: LatencyModel, contexts: list[int]
) -> None:
    sequences, context = len(contexts), sum(contexts)
    first, growth, valid = model.decode(sequences, context)
    assert valid >= 1
    for step in {0, 1, 2, valid // 2, valid - 1}:
        if step < valid:
            # Each step adds a token to every context.
            work = StepWork(sequences, context + step * sequences, sampled=sequences)
            assert first + growth * step == model.step_ps(work)


@given(models, works)
def test_times_are_whole_and_sum_to_their_terms(model: LatencyModel, work: StepWork) -> None:
    found = model.step_ps(work)
    assert type(found) is int
    # Coefficients are rounded to whole picoseconds: at most one for each of what is counted here.
    counted = 30 + 8 * (work.decode_context + sum(b + 2 * n + n * (b + n) for b, n in work.chunks))
    assert sum(model.terms(work).values()) * 1e12 == pytest.approx(found, rel=1e-9, abs=counted)


@given(models, works, chunks, st.integers(1, 10**5))
def test_more_work_never_takes_less_time(
    model: LatencyModel, work: StepWork, chunk: tuple[int, int], context: int
) -> None:
    now = model.step_ps(work)
    one_more = StepWork(work.decodes + 1, work.decode_context + context, work.chunks, work.sampled + 1)
    assert model.step_ps(one_more) >= now
    assert model.step_ps(replace(work, chunks=[*work.chunks, chunk])) >= now
    if work.decodes:
        assert model.step_ps(replace(work, decode_context=work.decode_context + context)) >= now
    if work.chunks:
        (before, count), *rest = work.chunks
        assert model.step_ps(replace(work, chunks=[(before, count + 1), *rest])) >= now
        assert model.step_ps(replace(work, chunks=[(before + 1, count), *rest])) >= now


@given(models, st.integers(0, 10**4), st.integers(2, 10**3), st.data())
def test_a_chunk_cut_in_two_steps_never_takes_less_time(
    model: LatencyModel, before: int, count: int, data: st.DataObject
) -> None:
    """The weights are read twice, the earlier tokens again; the pairs are the same."""
    first = data.draw(st.integers(1, count - 1))
    whole = model.step_ps(StepWork(chunks=[(before, count)]))
    parts = [(before, first), (before + first, count - first)]
    # What each half is rounded by may be a picosecond.
    assert sum(model.step_ps(StepWork(chunks=[part])) for part in parts) >= whole - 8


@given(shapes, rates, constants, settings, works, st.sampled_from(["memory", "flops", "link"]))
def test_faster_parts_never_hurt(
    shape: StageShape,
    slow: GpuRates,
    reached: StepConstants,
    options: Settings,
    work: StepWork,
    part: str,
) -> None:
    fast = {
        "memory": slow._replace(bandwidth_bytes_per_s=2 * slow.bandwidth_bytes_per_s),
        "flops": slow._replace(flops_16bit=2 * slow.flops_16bit, flops_8bit=3 * slow.flops_8bit),
        "link": slow._replace(link=slow.link._replace(bytes_per_s=2 * slow.link.bytes_per_s)),
    }[part]
    before = LatencyModel([shape], slow, reached, options).step_ps(work)
    assert LatencyModel([shape], fast, reached, options).step_ps(work) <= before


@given(shapes, rates, constants, works, st.sampled_from(CONSTANT_NAMES), st.floats(1, 3))
def test_a_larger_coefficient_never_saves_time(
    shape: StageShape,
    gpu: GpuRates,
    reached: StepConstants,
    work: StepWork,
    name: ConstantName,
    factor: float,
) -> None:
    worse = reached.with_coefficients({name: reached.coefficients()[name] * factor})
    before = LatencyModel([shape], gpu, reached).step_ps(work)
    assert LatencyModel([shape], gpu, worse).step_ps(work) >= before


# Real models

MODELS = ("llama-3.1-8b", "mixtral-8x7b", "deepseek-v3", "gemma-3-27b", "gpt-oss-120b", "qwen3-next-80b-a3b")


@cache
def served(model: str, **options: int | str | bool) -> Served:
    """A model on H100s, however little memory they have."""
    gpu, count = find_gpu("h100-80gb")
    values = {"gpu": "h100-80gb", "gpu_memory": "4000GiB", "max_model_len": 4096, **options}
    return serve(load_model(model), Resolver(SizeOptions.of(values)), gpu=gpu, gpu_count=count)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_never_beat_perfect_scaling(model: str, ranks: int) -> None:
    one, _ = latency_model(served(model))
    many, _ = latency_model(served(model, tensor_parallel_size=ranks))
    for work in (StepWork(1, 10, sampled=1), StepWork(64, 200_000, sampled=64), StepWork(chunks=[(0, 4000)])):
        assert many.step_ps(work) * ranks >= one.step_ps(work) * 0.9999


@pytest.mark.parametrize("model", MODELS)
def test_one_sequences_decode_tends_to_its_bytes_over_the_bandwidth(model: str) -> None:
    case = served(model)
    rate = gpu_rates(case.gpu)
    found, chosen = latency_model(case)
    context = 10**9
    whole = [kind for shape in stage_shapes(case) for kind in shape.attention if kind.window is None]
    share = chosen.constants.kv_bandwidth_share
    seconds = sum(
        max(
            kind.context_bytes / (rate.bandwidth_bytes_per_s * share),
            kind.pair_flops / (rate.flops_16bit * chosen.constants.attention_flops_share),
        )
        for kind in whole
    )
    assert found.decode(1, context)[0] == pytest.approx(context * seconds * 1e12, rel=1e-2)


@pytest.mark.parametrize("model", MODELS)
def test_stages_share_out_what_a_rank_does(model: str) -> None:
    whole = stage_shapes(served(model))
    parts = stage_shapes(served(model, pipeline_parallel_size=2))
    assert len(whole) == 1
    assert len(parts) == 2
    assert sum(shape.kernels for shape in parts) == whole[0].kernels
    assert sum(shape.dense.flops for shape in parts) == whole[0].dense.flops
    assert [bool(shape.head.flops) for shape in parts] == [False, True]
    assert [bool(shape.sent_bytes) for shape in parts] == [True, False]
    for name in ("context_bytes", "pair_flops", "sequence_bytes"):
        kinds = [getattr(kind, name) for shape in parts for kind in shape.attention]
        assert sum(kinds) == sum(getattr(kind, name) for kind in whole[0].attention)


@given(st.integers(1, 3), st.integers(1, 200))
def test_what_stages_take_sums_to_a_step(decodes: int, context: int) -> None:
    assume(context >= decodes)
    model, _ = latency_model(served("llama-3.1-8b", pipeline_parallel_size=2))
    work = StepWork(decodes, context, sampled=decodes)
    busy = sum(model.stage_ps(work, stage) for stage in range(2))
    assert model.step_ps(work) == max(busy, model.host_ps(work))
