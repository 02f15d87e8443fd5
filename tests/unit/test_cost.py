"""The roofline in whole picoseconds, by hand."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvplan.core.cost import Flops, Roofline, constant, constant_decode
from kvplan.core.engine import StepWork
from kvplan.core.gpu import Gpu

#: 1 weight read = 1000, a token of context 10, a token 100, its logits 50, a pair 1, fixed 7.
TOY = Roofline(weights_ps=1000, kv_token_ps=10, token_ps=100, logits_ps=50, attention_ps=1, overhead_ps=7)

counts = st.integers(0, 10**6)
works = st.builds(
    lambda contexts, chunks: StepWork(len(contexts), sum(contexts), chunks),
    st.lists(st.integers(1, 10**5), max_size=5),
    st.lists(st.tuples(st.integers(0, 10**5), st.integers(1, 10**4)), max_size=4),
)
rooflines = st.builds(Roofline, counts, counts, counts, counts, counts, counts)


def test_coefficients_are_rounded_down_to_whole_picoseconds_once() -> None:
    found = Roofline.from_rates(
        weight_bytes=16 * 10**9,
        kv_bytes_per_token=131072,
        flops=Flops(per_token=16 * 10**9, per_logits=10**9, per_pair=524288),
        num_layers=32,
        bandwidth_bytes_per_s=3350 * 10**9,
        flops_per_s=989 * 10**12,
    )
    # 80 % of 3350 GB/s = 2680 GB/s: 16e9 B / 2680e9 B/s = 5.970149253731 ms; 131072 B: 48907.46 ps.
    # 65 % of 989 TFLOP/s = 642.85 TFLOP/s: 16e9 / 642.85e12 s = 24.889 us; 524288 / 642.85e12 s = 815.57 ps.
    # Logits: 1e9 / 642.85e12 s = 1.5556 us. 32 layers x 20 us = 640 us.
    assert found == Roofline(
        weights_ps=5_970_149_253,
        kv_token_ps=48_907,
        token_ps=24_889_165,
        logits_ps=1_555_572,
        attention_ps=815,
        overhead_ps=640_000_000,
    )


def test_a_decode_step_is_bound_by_memory() -> None:
    # Two sequences that attend to 30 and 50 tokens: 1000 + 10 x 80 = 1800 > 100 x 2 + 1 x 80 = 280; + 7.
    assert TOY.step_ps(StepWork(decodes=2, decode_context=80)) == 1807


def test_a_long_chunk_is_bound_by_compute() -> None:
    # 40 tokens after 60: reads 100, pairs 40 x 60 + 40 x 41 / 2 = 3220.
    # Memory 1000 + 10 x 100 = 2000 < compute 100 x 40 + 3220 = 7220; + 7.
    assert TOY.step_ps(StepWork(chunks=[(60, 40)])) == 7227


def test_logits_are_computed_for_those_who_sample_alone() -> None:
    # As above, and 50 for the one sequence whose prompt is done.
    assert TOY.step_ps(StepWork(chunks=[(60, 40)], sampled=1)) == 7277


def test_decodes_and_chunks_add_up_before_the_maximum_is_taken() -> None:
    # Read 80 + 3 = 83: 1830. Tokens 2 + 3 = 5, pairs 80 + 0 + 6 = 86: 586. The larger + 7.
    assert TOY.step_ps(StepWork(decodes=2, decode_context=80, chunks=[(0, 3)])) == 1837


def test_a_step_that_computes_nothing_costs_the_overhead_alone() -> None:
    assert TOY.step_ps(StepWork()) == 7


def test_a_constant_price_is_the_same_for_every_step() -> None:
    price = constant(42)
    assert price(StepWork()) == price(StepWork(decodes=9, decode_context=99)) == 42


@given(rooflines, works)
def test_times_are_whole_numbers_and_never_below_the_overhead(roofline: Roofline, work: StepWork) -> None:
    found = roofline.step_ps(work)
    assert type(found) is int
    assert found >= roofline.overhead_ps


@given(rooflines, works, st.tuples(st.integers(0, 10**4), st.integers(1, 10**3)), st.integers(1, 10**5))
def test_more_work_never_takes_less_time(
    roofline: Roofline, work: StepWork, chunk: tuple[int, int], context: int
) -> None:
    now = roofline.step_ps(work)
    one_more = StepWork(work.decodes + 1, work.decode_context + context, work.chunks)
    assert roofline.step_ps(one_more) >= now
    assert roofline.step_ps(StepWork(work.decodes, work.decode_context, [*work.chunks, chunk])) >= now


@given(rooflines, st.integers(0, 10**4), st.integers(2, 10**3), st.data())
def test_a_chunk_cut_in_two_steps_never_takes_less_time(
    roofline: Roofline, before: int, count: int, data: st.DataObject
) -> None:
    """The weights are read twice, the earlier tokens again; the pairs are the same."""
    first = data.draw(st.integers(1, count - 1))
    whole = roofline.step_ps(StepWork(chunks=[(before, count)]))
    parts = [(before, first), (before + first, count - first)]
    assert sum(roofline.step_ps(StepWork(chunks=[part])) for part in parts) >= whole


# Steps in which the same sequences decode, priced at once


@given(rooflines, st.lists(st.integers(1, 10**5), min_size=1, max_size=5))
def test_a_run_of_decode_steps_is_priced_as_its_steps_one_by_one(
    roofline: Roofline, contexts: list[int]
) -> None:
    sequences, context = len(contexts), sum(contexts)
    first, growth, valid = roofline.decode(sequences, context)
    assert valid >= 1
    for step in {0, 1, 2, valid // 2, valid - 1}:
        if step < valid:
            # Each step adds a token to every context.
            work = StepWork(sequences, context + step * sequences, sampled=sequences)
            assert first + growth * step == roofline.step_ps(work)


def test_a_run_of_decode_steps_ends_where_the_other_side_takes_over() -> None:
    # Memory 1000 + 1 x n, compute 0 + 3 x n for one sequence that attends to n tokens. At n = 100 memory leads by
    # 1100 - 300 = 800 and compute gains 2 a step: equal after 400 steps, so 401 steps are on memory's side.
    roofline = Roofline(
        weights_ps=1000, kv_token_ps=1, token_ps=0, logits_ps=0, attention_ps=3, overhead_ps=7
    )
    assert roofline.decode(1, 100) == (1107, 1, 401)
    assert roofline.step_ps(StepWork(1, 500)) == 1507
    assert roofline.step_ps(StepWork(1, 501)) == 1510


def test_a_run_of_decode_steps_bound_by_compute_may_turn_to_memory() -> None:
    # Memory 0 + 3 x n, compute 1000 + 1 x n: compute leads by 1100 - 300 = 800 and loses 2 a step.
    roofline = Roofline(
        weights_ps=0, kv_token_ps=3, token_ps=1000, logits_ps=0, attention_ps=1, overhead_ps=7
    )
    assert roofline.decode(1, 100) == (1107, 1, 401)
    # Where the side that leads grows faster, it leads for ever.
    assert roofline.decode(1, 600)[2] > 10**15


def test_a_constant_price_of_decode_steps_does_not_grow() -> None:
    first, growth, valid = constant_decode(42)(9, 99)
    assert (first, growth) == (42, 0)
    assert valid > 10**15


def test_a_step_waits_for_its_copies_and_swaps() -> None:
    cost = Roofline(1000, 10, 100, 50, 1, 7, copy_block_ps=3, swap_block_ps=20)
    # As above 1807, and 2 copies, 4 blocks out and 1 in.
    work = StepWork(2, 80, copied_blocks=2, swapped_out_blocks=4, swapped_in_blocks=1)
    assert cost.step_ps(work) == 1807 + 2 * 3 + 5 * 20
    assert cost.step_ps(StepWork(swapped_out_blocks=4)) == 7 + 80


def test_the_link_to_the_host_is_that_of_the_architecture() -> None:
    def gpu(architecture: str) -> Gpu:
        return Gpu("x", "NVIDIA", architecture, *[None] * 10, "nowhere")

    # PCIe with 16 lanes, one way: 16 GB/s for 3.0, 32 for 4.0, 64 for 5.0.
    found = [
        gpu(name).host_bytes_per_s // 10**9 for name in ("Turing", "Ampere", "Ada", "Hopper", "Blackwell")
    ]
    assert found == [16, 32, 32, 64, 64]
