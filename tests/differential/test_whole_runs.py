"""Random scenarios through the whole loop: every figure of the fast engine equals the plain one's.

With constant prices, in steps and in ticks, and with random models of step times whose windows fill within a run and
whose launches take over, with and without warm-up; synchronous, and asynchronous with clients that go away.
KVPLAN_SCENARIOS sets the number of runs.
"""

from __future__ import annotations

import os
from dataclasses import replace
from fractions import Fraction
from random import Random

import pytest
from random_scenarios import draw
from toy_costs import toy_cost

from kvplan.core.cost import LatencyModel, constant, constant_decode
from kvplan.core.engine import SchedulerConfig
from kvplan.core.engines.vllm import Vllm
from kvplan.core.engines.vllm_plain import VllmPlain
from kvplan.core.metrics import Metrics, RequestRecord, Slo
from kvplan.core.request import Request
from kvplan.core.simulate import run

RUNS = int(os.environ.get("KVPLAN_SCENARIOS", "2000"))
BATCH = 100


@pytest.mark.parametrize("first", range(0, RUNS, BATCH))
def test_every_figure_is_equal(first: int) -> None:
    for seed in range(first, min(first + BATCH, RUNS)):
        compare_figures(seed, asynchronous=False, aborts=False)


@pytest.mark.parametrize("first", range(0, RUNS // 2, BATCH))
def test_every_figure_is_equal_asynchronously_and_with_aborts(first: int) -> None:
    for seed in range(first, min(first + BATCH, RUNS // 2)):
        compare_figures(seed, asynchronous=seed % 4 > 0, aborts=seed % 3 < 2)


def compare_figures(seed: int, *, asynchronous: bool, aborts: bool) -> None:
    rng = Random(seed)
    config, requests = draw(rng)
    compare_whole(rng, replace(config, async_scheduling=asynchronous), requests, aborts=aborts)


def compare_whole(rng: Random, config: SchedulerConfig, requests: list[Request], *, aborts: bool) -> None:
    """Both engines with a drawn clock, warm-up and aborts: all figures."""
    step_numbered = rng.random() < 0.4
    if step_numbered or rng.random() < 0.2:
        ticks = 1 if step_numbered else 7
        price, decode_price, scale = constant(ticks), constant_decode(ticks), ticks
    else:
        cost = draw_cost(rng)
        price, decode_price, scale = cost.step_ps, cost.decode, rng.choice([1, 10, 60])
    requests = [r._replace(arrival=r.arrival * scale) for r in requests]
    if aborts:
        requests = [with_abort(rng, r, scale, step_numbered=step_numbered) for r in requests]
    warmup = rng.choice([0, 0, 3, 20, 200])
    plain, fast = (
        figures(kind(config), config, requests, warmup, price, decode_price, step_numbered)
        for kind in (VllmPlain, Vllm)
    )
    assert plain == fast


def with_abort(rng: Random, request: Request, scale: int, *, step_numbered: bool) -> Request:
    """The same request, of which the client may go away some time after it came."""
    if rng.random() < 0.6:
        return request
    after = rng.choice([0, 1, scale, rng.randint(0, 20 * scale), rng.randint(0, 200)])
    return request._replace(abort=request.arrival + after, abort_mid=step_numbered and rng.random() < 0.5)


def draw_cost(rng: Random) -> LatencyModel:
    """A random model of step times: every kind of term, small enough that all of them tell."""
    return toy_cost(
        rng.randint(0, 50),
        rng.randint(0, 5),
        rng.randint(1, 9),
        token=rng.randint(0, 20),
        head=rng.randint(0, 9),
        pair=rng.randint(0, 8),
        own=rng.randint(0, 3),
        sequence=rng.randint(0, 3),
        windows=tuple((rng.randint(1, 40), rng.randint(1, 5)) for _ in range(rng.randint(0, 2))),
        launch=rng.choice([0, rng.randint(0, 500)]),
        graph_tokens=rng.choice([0, 3, 1000]),
        host=rng.choice([0, rng.randint(0, 100)]),
        overlaps_host=rng.random() < 0.5,
        stages=rng.choice([1, 1, 2]),
    )


def figures(
    engine: VllmPlain | Vllm,
    config: SchedulerConfig,
    requests: list[Request],
    warmup: int,
    price: object,
    decode_price: object,
    step_numbered: bool,
) -> list[object]:
    """All that a run comes to."""
    ended: list[RequestRecord] = []
    metrics = Metrics(
        num_gpu_blocks=config.num_gpu_blocks,
        block_size=config.block_size,
        cache=config,
        prefix_caching=config.enable_prefix_caching,
        seconds_per_tick=Fraction(1, 1000),
        warmup=warmup,
        slo=Slo(0.05, 0.01, 0.3),
        on_request=ended.append,
    )
    outcome = run(
        requests,
        engine,
        price,  # type: ignore[arg-type]
        metrics,
        decode_price=decode_price,  # type: ignore[arg-type]
        step_numbered=step_numbered,
    )
    metrics.note_live(engine.live())
    records = [
        (
            r.admitted,
            r.first_token,
            r.finished,
            r.aborted,
            r.output_tokens,
            r.hit_tokens,
            r.resumed_hit_tokens,
            r.preemptions,
            r.peak_blocks,
        )
        for r in sorted(ended, key=lambda r: r.number)
    ]
    return [
        outcome,
        metrics.request_counts(),
        metrics.kv_figures(),
        metrics.batch_figures(),
        metrics.prefix_cache_figures(),
        metrics.preemption_figures(),
        metrics.preemption_causes(),
        metrics.throughput(),
        metrics.latency({}),
        metrics.goodput(),
        metrics.steps,
        metrics.scheduled_tokens,
        metrics.duration_s,
        records,
    ]
