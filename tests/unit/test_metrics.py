"""Figures by hand: small runs whose every tick can be counted, with the sums in comments."""

from __future__ import annotations

from fractions import Fraction
from itertools import count
from typing import Any

import pytest

from kvplan.core.cost import constant
from kvplan.core.engine import GroupSpec, SchedulerConfig
from kvplan.core.engines.vllm_plain import VllmPlain
from kvplan.core.metrics import (
    BatchFigures,
    Distribution,
    Goodput,
    Metrics,
    PreemptionFigures,
    RequestCounts,
    RequestRecord,
    Slo,
    Throughput,
    Utilization,
    tpot_ticks,
)
from kvplan.core.request import Request, Segment
from kvplan.core.simulate import StepRecord, run
from kvplan.core.tally import Summary

#: A step takes 10 ticks, a tick is 0.1 s: a step is a second.
TICK = Fraction(1, 10)


def figures(
    *requests: Request,
    warmup: int = 0,
    seconds_per_tick: Fraction | None = TICK,
    step_ticks: int = 10,
    slo: Slo | None = None,
    **changes: object,
) -> Metrics:
    """The figures of a run on 5 usable blocks of 2, with room for two sequences of 10 tokens."""
    settings: dict[str, object] = {
        "num_gpu_blocks": 6,
        "block_size": 2,
        "max_num_batched_tokens": 8,
        "max_num_seqs": 2,
        "max_model_len": 10,
    }
    config = SchedulerConfig(**(settings | changes))  # type: ignore[arg-type]
    metrics = Metrics(
        num_gpu_blocks=config.num_gpu_blocks,
        block_size=config.block_size,
        prefix_caching=config.enable_prefix_caching,
        seconds_per_tick=seconds_per_tick,
        warmup=warmup,
        slo=slo,
    )
    steps = count()

    def observe(_record: StepRecord) -> None:
        assert next(steps) < 500, "the run never ends"

    run(requests, VllmPlain(config), constant(step_ticks), metrics, observe=observe)
    return metrics


# The toy run. b arrives in mid-step, c after a gap.
#
# ticks    step  computed   blocks     empty slots            running  waiting            output
#  0..10   0     a 3        a 2        a 1, to be filled      1        b from 4 on: 6     a's 1st at 10
# 10..20   1     a 4, b 2   a 2, b 1   0                      2                           a's 2nd, b's 1st at 20
# 20..30   2     a 5, b 3   a 3, b 2   a 1, b 1, never filled 2                           a's 3rd, b's 2nd at 30
# 30..55   idle
# 55..65   3     c 1        c 1        c 1, never filled      1                           c's 1st at 65
TOY = (Request("a", 0, 3, 3), Request("b", 4, 2, 2), Request("c", 55, 1, 1))


def test_utilization_is_weighted_by_time_and_idle_gaps_count() -> None:
    kv = figures(*TOY).kv_figures()
    # 2 x 10 + 3 x 10 + 5 x 10 + 0 x 25 + 1 x 10 = 110 block ticks of 5 x 65.
    # Time by level: 0: 25, 1: 10, 2: 10, 3: 10, 5: 10. Half of 65 is 32.5: reached at 1. 95 % is 61.75: at 5.
    assert kv.utilization == Utilization(mean=110 / 325, p50=1 / 5, p95=5 / 5, max=5 / 5)
    assert kv.peak_blocks == 5


def test_a_level_that_is_reached_exactly_counts_as_reached() -> None:
    # One block for 10 ticks, none for 10, one for 10.
    kv = figures(Request("a", 0, 1, 1), Request("b", 20, 1, 1)).kv_figures()
    # Levels over 30 ticks: 0: 10, 1: 20. p50 is 1 block.
    assert kv.utilization.p50 == 1 / 5
    kv = figures(Request("a", 0, 1, 1), Request("b", 20, 1, 1), Request("c", 50, 1, 1)).kv_figures()
    # Over 60 ticks: 0: 30, 1: 30. Half of the time it is at 0: exactly half is enough.
    assert kv.utilization.p50 == 0


def test_the_four_shares_are_ratios_of_slots_over_time_and_sum_to_one() -> None:
    kv = figures(*TOY).kv_figures()
    # 110 block ticks are 220 slot ticks. Empty: 1 x 10 to be filled, 2 x 10 + 1 x 10 never filled.
    assert kv.reserved_share == 10 / 220
    assert kv.internal_fragmentation == 30 / 220
    assert kv.token_share == 180 / 220
    assert kv.external_fragmentation == 0


def test_queue_lengths_are_means_over_time_and_an_arrival_waits_from_its_own_time_on() -> None:
    # Running 1 x 10 + 2 x 20 + 1 x 10 = 60 of 65; b waits from 4 to 10. After scheduling nobody ever waits.
    assert figures(*TOY).batch_figures() == BatchFigures(60 / 65, 2, 6 / 65, 0)


def test_who_waits_for_a_place_is_counted_after_scheduling() -> None:
    # Two run for one step each, the third waits 10 ticks for a place.
    batch = figures(*[Request(name, 0, 1, 1) for name in "abc"]).batch_figures()
    assert batch == BatchFigures(running_mean=30 / 20, running_max=2, waiting_mean=10 / 20, waiting_max=1)


def test_latencies_of_the_toy_run() -> None:
    latency = figures(*TOY).latency({"name": "toy"})
    # First tokens at 10, 20, 65: 10, 16 and 10 ticks after arrival. p90 lies at place 1.8: 10 + 0.8 x 6 = 14.8.
    # p95 at 1.9, p99 at 1.98: 15.4 and 15.88.
    ttft = latency.ttft_s
    assert (ttft.count, ttft.mean, ttft.p50, ttft.max) == (3, 1.2, 1.0, 1.6)
    assert (ttft.p90, ttft.p95, ttft.p99) == pytest.approx((1.48, 1.54, 1.588))
    # Last tokens at 30, 30, 65: 30, 26 and 10.
    assert (latency.e2e_s.count, latency.e2e_s.mean, latency.e2e_s.p50) == (3, 2.2, 2.6)
    # a: (30 - 10) / 2, b: (30 - 20) / 1; c has one token and is not counted.
    assert (latency.tpot_s.count, latency.tpot_s.mean, latency.tpot_s.max) == (2, 1.0, 1.0)
    # Gaps: a two of 10, b one of 10.
    assert (latency.itl_s.count, latency.itl_s.p99) == (3, 1.0)
    # Only b waited.
    assert (latency.queue_s.count, latency.queue_s.max, latency.queue_s.p50) == (3, 0.6, 0.0)
    assert latency.percentile_method == "linear interpolation between order statistics, exact"
    assert latency.model == {"name": "toy"}


def test_rates_are_per_second_of_the_window() -> None:
    # 3 requests, 3 + 2 + 1 prompt tokens, 3 + 2 + 1 outputs in 6.5 s.
    metrics = figures(*TOY)
    assert metrics.throughput() == Throughput(3 / 6.5, 6 / 6.5, 6 / 6.5)
    assert (metrics.window_ticks, metrics.duration_s, metrics.steps) == (65, 6.5, 4)


def test_scheduled_tokens_are_those_computed() -> None:
    # 3 + (1 + 2) + (1 + 1) + 1: the last token of each is never computed.
    assert figures(*TOY).scheduled_tokens == 9


@pytest.mark.parametrize(
    ("slo", "good"),
    [
        (Slo(ttft_s=1.0), 2),  # a and c; b has 1.6
        (Slo(ttft_s=1.6), 3),  # exactly met is met
        (Slo(tpot_s=0.9), 1),  # c has one token, which meets any goal
        (Slo(e2e_s=2.6), 2),  # b and c
        (Slo(ttft_s=1.0, e2e_s=2.6), 1),  # all goals at once: c
        (Slo(ttft_s=0.5), 0),
    ],
)
def test_goodput_counts_requests_that_meet_every_stated_goal(slo: Slo, good: int) -> None:
    assert figures(*TOY, slo=slo).goodput() == Goodput(good / 6.5, good / 3, slo)


def test_without_a_goal_there_is_no_goodput() -> None:
    assert figures(*TOY, slo=Slo()).goodput() is None


def test_rejected_and_unfinished_requests_count_against_goodput() -> None:
    # x reaches max_model_len 10 and is turned away; y never fits: 5 usable blocks, length limit 20.
    turned_away = figures(*TOY, Request("x", 56, 10, 1), slo=Slo(ttft_s=9.0)).goodput()
    assert turned_away is not None
    assert turned_away.share == 3 / 4
    left = figures(
        Request("a", 0, 1, 1), Request("y", 5, 11, 1), max_model_len=20, slo=Slo(ttft_s=9.0)
    ).goodput()
    assert left is not None
    assert left.share == 1 / 2


# Warm-up


def test_after_the_warm_up_only_its_own_arrivals_have_latencies_but_all_is_seen_in_the_pool() -> None:
    # W = [4, 65): b arrives exactly as it begins and counts, a does not. Length 61.
    metrics = figures(*TOY, warmup=4, slo=Slo(ttft_s=1.0))
    # 2 x 6 + 30 + 50 + 0 + 10 = 102.
    assert metrics.kv_figures().utilization.mean == 102 / (5 * 61)
    # Running 6 + 20 + 20 + 10; b waits from 4 to 10.
    assert metrics.batch_figures() == BatchFigures(56 / 61, 2, 6 / 61, 0)
    latency = metrics.latency({})
    assert (latency.ttft_s.count, latency.ttft_s.mean, latency.itl_s.count) == (2, 1.3, 1)
    # All three finish in W.
    assert metrics.throughput() == Throughput(3 / 6.1, 6 / 6.1, 6 / 6.1)
    goodput = metrics.goodput()
    assert goodput is not None
    assert goodput.share == 1 / 2
    assert metrics.prefix_cache_figures().queried_tokens == 2 + 1
    assert metrics.duration_s == 6.5  # warm-up included


def test_one_tick_later_the_second_arrival_is_warm_up_too() -> None:
    metrics = figures(*TOY, warmup=5)
    assert metrics.latency({}).ttft_s.count == 1
    assert metrics.batch_figures().waiting_mean == 5 / 60  # it still waits in W, from 5 to 10


def test_peaks_of_the_warm_up_are_not_those_of_the_window() -> None:
    # W = [30, 65) has only c.
    metrics = figures(*TOY, warmup=30)
    assert metrics.kv_figures().peak_blocks == 1
    assert metrics.batch_figures().running_max == 1
    # a and b finish as the window opens.
    assert metrics.throughput().requests_per_s == 3 / 3.5


def test_the_warm_up_counts_from_the_first_arrival_not_from_zero() -> None:
    later = tuple(r._replace(arrival=r.arrival + 1000) for r in TOY)
    assert figures(*later, warmup=4).kv_figures() == figures(*TOY, warmup=4).kv_figures()


def test_a_warm_up_longer_than_the_run_leaves_every_figure_unknown() -> None:
    metrics = figures(*TOY, warmup=100, slo=Slo(ttft_s=1.0))
    kv = metrics.kv_figures()
    assert kv.utilization == Utilization(None, None, None, None)
    assert (kv.token_share, kv.reserved_share, kv.internal_fragmentation) == (None, None, None)
    assert metrics.batch_figures() == BatchFigures(None, None, None, None)
    assert metrics.throughput() == Throughput(None, None, None)
    assert metrics.latency({}).ttft_s == Distribution(0)
    assert metrics.goodput() == Goodput(None, None, Slo(ttft_s=1.0))
    assert metrics.request_counts().finished == 3


# How requests end


def test_rejected_requests_are_counted_by_reason() -> None:
    metrics = figures(
        Request("x", 0, 10, 1), Request("y", 0, 0, 1), Request("z", 0, 11, 1), Request("a", 5, 1, 1)
    )
    reasons = {"empty_prompt": 1, "prompt_reaches_max_model_len": 2}
    assert metrics.request_counts() == RequestCounts(4, 1, 3, 0, 0, reasons)
    # W begins with the first arrival, though it is rejected: 0..15.
    assert metrics.window_ticks == 15
    assert metrics.latency({}).ttft_s.count == 1
    assert metrics.batch_figures().waiting_mean == 0


def test_a_run_of_rejected_requests_alone_has_no_window() -> None:
    metrics = figures(Request("x", 0, 10, 1), Request("y", 7, 10, 1))
    assert metrics.request_counts() == RequestCounts(2, 0, 2, 0, 0, {"prompt_reaches_max_model_len": 2})
    assert (metrics.window_ticks, metrics.duration_s) == (0, None)
    assert metrics.kv_figures().utilization.mean is None


def test_no_requests_at_all_give_figures_too() -> None:
    metrics = figures()
    assert metrics.request_counts() == RequestCounts(0, 0, 0, 0, 0, {})
    assert (metrics.window_ticks, metrics.duration_s, metrics.kv_figures().peak_blocks) == (0, None, 0)
    assert metrics.prefix_cache_figures().hit_rate is None


def test_a_request_that_stops_at_the_longest_length_is_truncated() -> None:
    # Length limit 10: a prompt of 8 has room for 2 of its 5 outputs.
    metrics = figures(Request("a", 0, 8, 5), Request("b", 0, 1, 1))
    assert metrics.request_counts() == RequestCounts(2, 2, 0, 0, 1, {})
    # What it did output counts: 2 tokens in 2 steps, then b has room: 1 token in 1 step.
    assert metrics.throughput().output_tokens_per_s == 3 / 3
    # Its tail is measured against where it really stops: 8 of 8 slots, then 9 of 10 and no more to come.
    assert metrics.kv_figures().reserved_share == 0


def test_a_warm_up_that_outlasts_the_run_is_known() -> None:
    for warmup, expected in ((0, False), (29, False), (30, True), (10**30, True)):
        metrics = Metrics(
            num_gpu_blocks=9, block_size=2, prefix_caching=True, seconds_per_tick=None, warmup=warmup
        )
        assert not metrics.is_all_warmup
        run([Request("a", 5, 1, 3)], VllmPlain(SchedulerConfig(9, 2, 8, 8, 16)), constant(10), metrics)
        assert metrics.is_all_warmup == expected


@pytest.mark.parametrize(("arrival", "share"), [(30, 1 / 2), (31, 1)])
def test_what_arrives_with_the_last_finish_counts_as_asked(arrival: int, share: float) -> None:
    """Three steps of 10 end at 30; what comes then is turned away."""
    metrics = Metrics(
        num_gpu_blocks=9, block_size=2, prefix_caching=True, seconds_per_tick=Fraction(1), slo=Slo(e2e_s=99)
    )
    requests = [Request("a", 0, 1, 3), Request("b", arrival, 16, 1)]
    run(requests, VllmPlain(SchedulerConfig(9, 2, 8, 8, 16)), constant(10), metrics)
    goodput = metrics.goodput()
    assert goodput is not None
    assert goodput.share == share


def test_a_stuck_run_has_the_figures_of_what_finished() -> None:
    # y's 11 tokens need 6 of 5 blocks. a runs 0..10; y arrives at 15, after the last finish.
    metrics = figures(Request("a", 0, 1, 1), Request("y", 15, 11, 1), max_model_len=20)
    assert metrics.request_counts() == RequestCounts(2, 1, 0, 1, 0, {})
    assert metrics.window_ticks == 10
    assert metrics.kv_figures().utilization.mean == 1 / 5
    assert metrics.batch_figures() == BatchFigures(1.0, 1, 0.0, 0)
    assert metrics.latency({}).queue_s.count == 1


def test_who_arrives_before_the_last_finish_and_never_starts_waited_in_the_window() -> None:
    # W = [0, 10): y arrives at 4 in mid-step and waits 6 ticks of W, then forever.
    metrics = figures(Request("a", 0, 1, 1), Request("y", 4, 11, 1), max_model_len=20)
    assert metrics.batch_figures() == BatchFigures(1.0, 1, 6 / 10, 0)


def test_what_happens_after_the_last_finish_is_not_in_the_window() -> None:
    # a ends at 10. y (4 blocks at first, then a fifth) outgrows 5 blocks and preempts itself after that.
    metrics = figures(Request("a", 0, 1, 1), Request("y", 10, 8, 9), max_model_len=20)
    assert metrics.request_counts().unfinished == 1
    assert metrics.window_ticks == 10
    assert metrics.kv_figures().peak_blocks == 1
    assert metrics.preemption_figures() == PreemptionFigures(1, 1, 0, 0, 0)
    # Its first tokens came, so they have a latency.
    assert metrics.latency({}).ttft_s.count == 2
    assert metrics.latency({}).e2e_s.count == 1


def test_a_livelocked_run_counts_what_is_computed_again() -> None:
    # 2 usable blocks, a prompt of 5, 2 tokens a step, nothing cached or reserved: computes 2, 2, then the 5th
    # token has no block.
    metrics = figures(
        Request("a", 0, 5, 1),
        num_gpu_blocks=3,
        max_num_batched_tokens=2,
        scheduler_reserve_full_isl=False,
        enable_prefix_caching=False,
    )
    assert metrics.request_counts() == RequestCounts(1, 0, 0, 1, 0, {})
    # That it has no end is seen when it starts over, or when it has done so once more.
    assert 1 <= metrics.preemption_events <= 2
    assert metrics.recomputed_tokens == metrics.scheduled_tokens - 4
    assert metrics.window_ticks == 0


# Preemption and the prefix cache

PREEMPTED: dict[str, Any] = {"num_gpu_blocks": 4, "max_model_len": 6}


def test_recomputed_tokens_are_those_that_had_been_computed_before() -> None:
    # 3 usable blocks. Step 0: a 2, b 2 tokens. Step 1: a grows, b is preempted with 2 computed and 1 output.
    # Steps 2 and 3: a takes b's cached block as well (evicted) and ends at 6 tokens. Step 4: b finds nothing and
    # computes 3, of which 2 again; it takes a's blank block and one of its cached ones. Step 5: b's last.
    metrics = figures(Request("a", 0, 2, 4), Request("b", 0, 2, 3), **PREEMPTED)
    assert metrics.preemption_figures() == PreemptionFigures(1, 1, 2, 0, 0)
    # a 2 + 1 + 1 + 1, b 2 + 3 + 1.
    assert metrics.scheduled_tokens == 11
    cache = metrics.prefix_cache_figures()
    assert (cache.hit_tokens, cache.resumed_hit_tokens, cache.evicted_blocks) == (0, 0, 2)
    # b's tokens come at 10, 50, 60: preemption stands in its gaps. a's at 10, 20, 30, 40.
    assert metrics.latency({}).itl_s == Distribution(5, 1.6, 1.0, 2.8, 3.4, 3.88, 4.0)


def test_what_a_resumed_request_finds_is_told_apart_from_first_hits() -> None:
    # As before, but a ends a step earlier, so b's block is still there: 2 tokens are found, 1 is computed.
    metrics = figures(Request("a", 0, 2, 3), Request("b", 0, 2, 3), **PREEMPTED)
    cache = metrics.prefix_cache_figures()
    assert (cache.queried_tokens, cache.hit_tokens, cache.resumed_hit_tokens) == (4, 0, 2)
    assert metrics.preemption_figures() == PreemptionFigures(1, 1, 0, 0, 0)


def test_two_victims_of_one_step_are_two_events() -> None:
    metrics = figures(
        Request("a", 0, 2, 4),
        Request("b", 0, 2, 3),
        Request("c", 0, 2, 3),
        num_gpu_blocks=4,
        max_model_len=6,
        max_num_seqs=3,
        enable_prefix_caching=False,
    )
    # Step 0: a, b, c have a block each. Step 1: a needs a second: c goes; b needs one: b goes. Steps 2, 3: a ends.
    # Step 4: b takes 2 blocks for its 3 tokens, c's 3 tokens need 2 and 1 is left. Step 5: b ends. 6, 7: c.
    found = metrics.preemption_figures()
    assert (found.events, found.requests, found.recomputed_tokens) == (2, 2, 4)


def test_hits_are_counted_at_first_admission_and_shared_blocks_while_they_are() -> None:
    # b and c begin with the 4 tokens that a leaves in two blocks, and run together.
    def like_a(name: str, arrival: int) -> Request:
        return Request(name, arrival, 5, 2, content=(Segment("s", 0, 4), Segment(f"p:{name}", 0, 1)))

    metrics = figures(like_a("a", 0), like_a("b", 30), like_a("c", 30))
    cache = metrics.prefix_cache_figures()
    assert (cache.enabled, cache.queried_tokens, cache.hit_tokens, cache.hit_rate) == (True, 15, 8, 8 / 15)
    assert (cache.peak_shared_blocks, cache.copied_blocks, cache.evicted_blocks) == (2, 0, 0)
    # 5 + 1 of a, 1 + 1 of b and c.
    assert metrics.scheduled_tokens == 10
    # A shared block counts once: 2 + 1 + 1 blocks for b and c. Over 50 ticks: 3 x 20 + 0 x 10 + 4 x 20.
    kv = metrics.kv_figures()
    assert kv.utilization.mean == 140 / (5 * 50)
    # Empty: a 1 then 0; b and c 1 each then 0; the first are to be filled.
    assert kv.reserved_share == (1 * 10 + 2 * 10) / 280
    assert kv.internal_fragmentation == 0


def test_without_caching_nothing_is_queried() -> None:
    cache = figures(*TOY, enable_prefix_caching=False).prefix_cache_figures()
    assert (cache.enabled, cache.queried_tokens, cache.hit_tokens, cache.hit_rate) == (False, 0, 0, None)


# Without seconds


def test_without_seconds_times_are_unknown_and_counts_are_not() -> None:
    metrics = figures(*TOY, seconds_per_tick=None, slo=Slo(ttft_s=1.0))
    latency = metrics.latency({})
    assert latency.ttft_s == Distribution(3)
    assert latency.itl_s == Distribution(3)
    assert metrics.duration_s is None
    assert metrics.throughput() == Throughput(None, None, None)
    assert metrics.goodput() == Goodput(None, None, Slo(ttft_s=1.0))
    assert metrics.kv_figures().utilization.mean == 110 / 325


# Percentiles


def summary(*values: float) -> Summary:
    return Summary(values.__getitem__, len(values), sum(values), values[-1], exact=True)


@pytest.mark.parametrize(
    ("percent", "value"),
    [(0, 10), (25, 15), (50, 20), (75, 25), (90, 28), (95, 29), (99, pytest.approx(29.8)), (100, 30)],
)
def test_percentiles_lie_between_order_statistics(percent: int, value: float) -> None:
    # Places 0, 1, 2 hold 10, 20, 30; p percent lies at place 2 p / 100.
    assert summary(10, 20, 30).percentile(percent) == value


def test_repeated_values_take_a_place_each() -> None:
    # 10, 20, 20, 20: p25 at place 0.75: 17.5; p50 at 1.5: between two of 20.
    assert summary(10, 20, 20, 20).percentile(25) == 17.5
    assert summary(10, 20, 20, 20).percentile(50) == 20


def test_the_percentile_of_one_value_is_that_value() -> None:
    assert summary(7).percentile(99) == 7


@pytest.mark.parametrize(("tokens", "value"), [(1, None), (2, 30), (4, 10)])
def test_time_per_output_token_needs_two_tokens(tokens: int, value: float | None) -> None:
    record = RequestRecord(
        Request("a", 0, 1, tokens), first_token=10, last_token=40, finished=40, output_tokens=tokens
    )
    assert tpot_ticks(record) == value


@pytest.mark.parametrize(
    ("group", "most"),
    [
        (GroupSpec("sliding", 16, window=32), 7),  # 31 before, 64 in flight: 6 blocks, begun anywhere
        (GroupSpec("state", 16), 1),
        (GroupSpec("full", 16), 63),  # 999 tokens
    ],
)
def test_a_request_holds_no_more_blocks_than_its_only_group_can(group: GroupSpec, most: int) -> None:
    config = SchedulerConfig(
        400, 16, 64, 4, 2048, enable_prefix_caching=group.kind != "state", groups=(group,)
    )
    records: list[RequestRecord] = []
    metrics = Metrics(
        num_gpu_blocks=400,
        block_size=16,
        cache=config,
        prefix_caching=config.enable_prefix_caching,
        seconds_per_tick=None,
        on_request=records.append,
    )
    run([Request("r", 0, 800, 200)], VllmPlain(config), constant(1), metrics)
    assert records[0].peak_blocks == most
    assert metrics.kv_figures().peak_blocks <= most
