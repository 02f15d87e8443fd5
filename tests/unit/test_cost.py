"""The time of a step in whole picoseconds, by hand."""

from __future__ import annotations

from math import isclose

import pytest
from toy_costs import UNIT_RATES, toy_cost

from kvplan.core.communication import Link, all_reduce
from kvplan.core.cost import LatencyModel, Settings, constant, constant_decode
from kvplan.core.engine import StepWork
from kvplan.core.gpu import Gpu
from kvplan.core.step_constants import StepConstants
from kvplan.core.step_shape import Attention, Experts, GpuRates, Matrices, Reductions, StageShape

#: 1000 to read the weights, 10 for a token of context (read or written), 7 for a step.
TOY = toy_cost(1000, 10, 7)


def test_a_decode_step_reads_weights_and_context_and_writes_a_token_each() -> None:
    # Two sequences that attend to 30 and 50 tokens: 1000 + 10 x 80 + 10 x 2 + 7.
    assert TOY.step_ps(StepWork(decodes=2, decode_context=80)) == 1827


def test_matrix_products_take_the_root_of_the_squares_of_reading_and_computing() -> None:
    # 300 to read; 4 tokens of 100 FLOPs: sqrt(300^2 + 400^2) = 500.
    model = LatencyModel([StageShape(1, dense=Matrices(300, 100))], UNIT_RATES, StepConstants())
    assert model.step_ps(StepWork(decodes=4, decode_context=4)) == 500


def test_8_bit_operands_have_their_own_rate_and_bytes_their_own_share() -> None:
    rates = UNIT_RATES._replace(flops_8bit=2 * 10**12)
    half = StepConstants(weights_bandwidth_share=0.5, gemm_flops_share=0.25)
    # 150 bytes at half a byte a picosecond: 300. 200 FLOPs at 2 x 0.25 a picosecond: 400.
    model = LatencyModel([StageShape(1, dense=Matrices(150, 0, 200))], rates, half)
    assert model.step_ps(StepWork(decodes=1, decode_context=1)) == 500


def test_logits_are_computed_for_those_who_sample_alone() -> None:
    cost = toy_cost(1000, 10, 7, head=50)
    # 40 tokens after 60: reads 100 tokens and writes 40: 1000 + 1000 + 400 + 7.
    assert cost.step_ps(StepWork(chunks=[(60, 40)])) == 2407
    assert cost.step_ps(StepWork(chunks=[(60, 40)], sampled=1)) == 2457


def test_attention_to_a_chunk_is_bound_by_the_slower_of_reading_and_computing() -> None:
    # 40 tokens after 60: pairs 40 x 60 + 40 x 41 / 2 = 3220 > 10 x 100. Written 400.
    assert toy_cost(0, 10, 0, pair=1).step_ps(StepWork(chunks=[(60, 40)])) == 3220 + 400
    # Of a decode each token of context takes the larger of 10 and 1.
    assert toy_cost(0, 10, 0, pair=1).step_ps(StepWork(2, 80)) == 800 + 20


def test_a_chunks_own_tokens_are_moved_twice_beside_their_flops() -> None:
    # 40 tokens x 2 x 3; read 10 x 100, written 400.
    assert toy_cost(0, 10, 0, own=3).step_ps(StepWork(chunks=[(60, 40)])) == 1000 + 240 + 400


def test_a_window_is_read_up_to_its_size_and_its_pairs_end_with_it() -> None:
    shape = StageShape(1, attention=(Attention(10, 1, 1, window=50),))
    model = LatencyModel([shape], UNIT_RATES, StepConstants())
    # A chunk of 40 after 30: min(30, 50) + 40 = 70 read. Pairs: 20 tokens while it fills attend to 31..50, 20 to 50.
    # 20 x 30 + 210 + 20 x 50 = 1810 > 700. Written 400.
    assert model.step_ps(StepWork(chunks=[(30, 40)])) == 1810 + 400
    # Decodes of 30 and 40 tokens: 70 of at most 2 x 50. Of 80 and 40: 100.
    assert model.step_ps(StepWork(2, 70)) == 700 + 20
    assert model.step_ps(StepWork(2, 120)) == 1000 + 20


def test_the_pairs_of_a_window_are_those_of_its_tokens_one_by_one() -> None:
    for window in (1, 3, 8):
        shape = StageShape(1, attention=(Attention(0, 0, 1, window=window),))
        model = LatencyModel([shape], UNIT_RATES, StepConstants())
        for before in range(12):
            for count in range(1, 12):
                pairs = sum(min(before + i + 1, window) for i in range(count))
                assert model.step_ps(StepWork(chunks=[(before, count)])) == pairs


def test_states_are_read_and_written_for_each_sequence() -> None:
    cost = toy_cost(0, 0, 0, sequence=9)
    assert cost.step_ps(StepWork(3, 500)) == 3 * 18
    assert cost.step_ps(StepWork(3, 500, [(0, 7)])) == 4 * 18


def test_experts_are_read_as_far_as_tokens_are_expected_to_pick_them() -> None:
    experts = Experts(total=4, local=4, used=1, read_bytes=1000)
    assert experts.distinct(1) == pytest.approx(1)
    # Two tokens pick the same one with probability 1/4: 2 - 1/4.
    assert experts.distinct(2) == pytest.approx(1.75)
    model = LatencyModel([StageShape(1, experts=(experts,))], UNIT_RATES, StepConstants())
    assert model.step_ps(StepWork(decodes=2, decode_context=2)) == 1750


def test_a_rank_with_some_of_the_experts_reads_and_computes_its_share() -> None:
    # Two of four experts here; 2 replicas of 3 tokens that use 2 each: 12 uses, 6 of them here, 60 FLOPs each.
    experts = Experts(total=4, local=2, used=2, read_bytes=0, flops=60, replicas=2)
    assert experts.distinct(3) == pytest.approx(2 * (1 - 0.5**6))
    model = LatencyModel([StageShape(1, experts=(experts,))], UNIT_RATES, StepConstants())
    assert model.step_ps(StepWork(decodes=3, decode_context=3)) == 360


def test_ranks_add_up_in_one_round_or_in_two() -> None:
    link = Link(10**9, is_switched=True)
    # 8 ranks. 1,000 bytes: one round and 7,000 bytes, 8 us, not two rounds and 1,750 bytes: 1 + 7 = 8 < 2 + 1.75?
    small = all_reduce(100, 8, link, 1e-6, 1.0)
    assert (small.rounds, small.sent_bytes) == (1, 700)
    large = all_reduce(1000, 8, link, 1e-6, 1.0)
    assert (large.rounds, large.sent_bytes) == (2, 1750)
    assert large.seconds(link, 1e-6, 0.5) == pytest.approx(2e-6 + 3.5e-6)


def test_ranks_on_a_bus_pass_parts_around() -> None:
    ring = all_reduce(1000, 4, Link(10**9, is_switched=False), 1e-6, 1.0)
    assert (ring.rounds, ring.sent_bytes) == (6, 1500)
    assert all_reduce(1000, 1, Link(10**9, is_switched=False), 1e-6, 1.0).seconds(Link(1, False), 1, 1) == 0


def test_all_reduces_and_what_goes_to_the_next_stage_take_time() -> None:
    shape = StageShape(1, reductions=(Reductions(3, 2, 10),), sent_bytes=5)
    model = LatencyModel([shape, StageShape(1)], UNIT_RATES, StepConstants(all_reduce_s=100e-12))
    # Of 4 tokens: 3 x (100 + 40) between two ranks, 100 + 20 to the next stage.
    work = StepWork(decodes=4, decode_context=4)
    assert model.stage_ps(work, 0) == 3 * 140 + 120
    assert model.stage_ps(work, 1) == 0
    assert model.step_ps(work) == 540


def test_a_step_that_computes_nothing_costs_the_overhead_alone() -> None:
    assert TOY.step_ps(StepWork()) == 7


def test_kernels_and_sequences_take_time_of_their_own() -> None:
    constants = StepConstants(kernel_s=3e-12, sequence_s=5e-12, step_s=7e-12)
    model = LatencyModel([StageShape(4)], UNIT_RATES, constants)
    assert model.step_ps(StepWork(decodes=2, decode_context=9, chunks=[(0, 8)])) == 4 * 3 + 3 * 5 + 7


def test_without_a_graph_the_gpu_waits_for_the_launches() -> None:
    cost = toy_cost(1000, 10, 7, launch=1500, graph_tokens=2)
    assert cost.step_ps(StepWork(2, 40)) == 1000 + 400 + 20 + 7
    assert cost.step_ps(StepWork(3, 40)) == 1500 + 7
    assert cost.step_ps(StepWork(1, 40, [(0, 1)])) == 1500 + 7
    assert cost.step_ps(StepWork(3, 48)) == 1000 + 480 + 30 + 7


def test_a_host_that_works_ahead_counts_only_where_it_is_slower() -> None:
    cost = toy_cost(1000, 10, 7, host=600, overlaps_host=True)
    # 2 sequences: 7 + 2 x 600 on the host, 1000 + 10 x 18 + 20 on the GPU.
    assert cost.step_ps(StepWork(2, 18)) == 1207
    assert cost.decode(2, 18) == (1207, 0, 1)
    assert cost.decode(2, 20) == (1220, 20, 1 << 62)
    assert sum(cost.terms(StepWork(2, 18)).values()) == pytest.approx(1207e-12)
    assert sum(cost.terms(StepWork(2, 20)).values()) == pytest.approx(1220e-12)


def test_a_step_waits_for_its_copies_and_swaps() -> None:
    cost = toy_cost(1000, 10, 7, block=8)
    # A copy reads and writes 8 bytes; the link to the host reaches 80 % of a byte a picosecond.
    work = StepWork(2, 80, copied_blocks=2, swapped_out_blocks=4, swapped_in_blocks=1)
    assert cost.step_ps(work) == 1827 + 2 * 16 + 5 * 10
    assert cost.step_ps(StepWork(swapped_out_blocks=4)) == 7 + 40


# Steps in which the same sequences decode, priced at once


def test_a_run_of_decode_steps_grows_by_the_tokens_that_each_adds() -> None:
    first, growth, valid = TOY.decode(2, 80)
    assert (first, growth) == (1827, 20)
    assert valid > 10**15


def test_a_run_of_decode_steps_ends_where_a_window_is_full() -> None:
    cost = toy_cost(0, 1, 0, windows=((50, 10),))
    # 2 sequences, 70 tokens: 70 + 2 + 700 + 20, growing by 2 + 20 until 100 tokens after 15 steps, which is the 16th.
    assert cost.decode(2, 70) == (792, 22, 16)
    assert cost.decode(2, 100) == (100 + 2 + 1000 + 20, 2, 1 << 62)


def test_a_run_of_decode_steps_ends_where_the_gpu_takes_longer_than_the_launches() -> None:
    cost = toy_cost(1000, 10, 7, launch=1500)
    # 1000 + 10 x 42 + 10 = 1430, growing by 10: 1500 after 7 steps; the eighth takes as long as its launches.
    assert cost.decode(1, 42) == (1507, 0, 8)
    assert cost.step_ps(StepWork(1, 49)) == 1507
    assert cost.step_ps(StepWork(1, 50)) == 1517


def test_a_constant_price_is_the_same_for_every_step() -> None:
    price = constant(42)
    assert price(StepWork()) == price(StepWork(decodes=9, decode_context=99)) == 42
    first, growth, valid = constant_decode(42)(9, 99)
    assert (first, growth) == (42, 0)
    assert valid > 10**15


# What the time is owed to


def test_terms_sum_to_the_time_and_scale_with_their_coefficients() -> None:
    shape = StageShape(
        40,
        Matrices(10**9, 10**9),
        Matrices(10**7, 10**7),
        (Experts(8, 8, 2, 10**8, 10**8),),
        (Attention(10**5, 10**5, 10**5), Attention(10**4, 10, 10, window=64, sequence_bytes=5)),
        1000,
        (Reductions(80, 4, 10**4),),
    )
    rates = GpuRates(2 * 10**12, 10**15, 2 * 10**15, Link(10**11, is_switched=True))
    constants = StepConstants(0.8, 0.7, 0.6, 0.5, 0.9, 1e-5, 1e-6, 2e-6, 1e-3, 1e-5)
    model = LatencyModel([shape], rates, constants)
    for work in (StepWork(8, 4000, sampled=8), StepWork(3, 900, [(0, 700), (50, 60)], sampled=4)):
        terms, whole = model.terms(work), model.step_ps(work) * 1e-12
        assert isclose(sum(terms.values()), whole, rel_tol=1e-6)
        for name, value in terms.items():
            coefficient = constants.coefficients()[name]
            changed = constants.with_coefficients({name: coefficient * 1.01})
            slope = LatencyModel([shape], rates, changed).step_ps(work) * 1e-12 - whole
            assert isclose(value, slope * 100, rel_tol=2e-2, abs_tol=1e-7), name


def test_the_link_to_the_host_is_that_of_the_architecture() -> None:
    def gpu(architecture: str) -> Gpu:
        return Gpu("x", "NVIDIA", architecture, *[None] * 10, "nowhere")

    # PCIe with 16 lanes, one way: 16 GB/s for 3.0, 32 for 4.0, 64 for 5.0.
    found = [
        gpu(name).host_bytes_per_s // 10**9 for name in ("Turing", "Ampere", "Ada", "Hopper", "Blackwell")
    ]
    assert found == [16, 32, 32, 64, 64]


def test_settings_default_to_the_graphs_of_vllm() -> None:
    assert Settings().graph_tokens == 512
