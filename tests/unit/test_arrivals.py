"""Clients: who sends the next request when."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from math import inf
from statistics import fmean, pstdev

import pytest

from kvplan.core.arrivals import ClosedLoop, OpenLoop
from kvplan.core.cost import constant
from kvplan.core.engine import SchedulerConfig
from kvplan.core.engines.vllm import Vllm
from kvplan.core.engines.vllm_plain import VllmPlain
from kvplan.core.metrics import Metrics, RequestRecord
from kvplan.core.request import Request
from kvplan.core.simulate import run
from kvplan.request_rate import at_rate


def requests(*arrivals: int, output_tokens: int = 3) -> list[Request]:
    return [Request(f"r{i}", arrival, 5, output_tokens) for i, arrival in enumerate(arrivals)]


def replay(
    trace: list[Request],
    engine: type[Vllm] | type[VllmPlain] = Vllm,
    *,
    num_clients: int | None = None,
    front_end: int = 0,
) -> tuple[list[RequestRecord], Metrics]:
    config = SchedulerConfig(100, 4, 64, 16, 40)
    records: list[RequestRecord] = []
    metrics = Metrics(
        num_gpu_blocks=100,
        usable_blocks=99,
        block_size=4,
        prefix_caching=True,
        seconds_per_tick=Fraction(1),
        on_request=records.append,
    )
    outcome = run(trace, engine(config), constant(10), metrics, num_clients=num_clients, front_end=front_end)
    assert outcome.status == "done"
    return sorted(records, key=lambda record: record.number), metrics


def test_an_open_loop_sends_at_each_arrival() -> None:
    clients = OpenLoop(requests(0, 7), front_end=2)
    assert clients.upcoming is not None
    assert (clients.upcoming.id, clients.due) == ("r0", 2)
    clients.advance()
    clients.ended(1, 3)
    assert (clients.upcoming.id, clients.upcoming.arrival, clients.due) == ("r1", 7, 9)
    clients.advance()
    assert clients.upcoming is None


def test_a_closed_loop_sends_when_a_client_is_free() -> None:
    clients = ClosedLoop(requests(0, 0, 0, 50), 2)
    clients.advance()
    clients.advance()
    assert clients.upcoming is None, "both wait"
    clients.ended(2, 30)
    assert clients.upcoming is not None
    assert (clients.upcoming.id, clients.due) == ("r2", 30)
    clients.advance()
    assert (clients.upcoming.id, clients.due) == ("r3", 50), "not before its own arrival"
    clients.advance()
    clients.ended(2, 80)
    assert clients.upcoming is None


def test_many_clients_take_no_room() -> None:
    assert ClosedLoop(requests(0), 10**10).due == 0


@pytest.mark.parametrize("engine", [Vllm, VllmPlain])
def test_as_many_run_as_there_are_clients(engine: type[Vllm] | type[VllmPlain]) -> None:
    records, metrics = replay(requests(*[0] * 9), engine, num_clients=3)
    # Each takes three steps of ten ticks, and the next comes in at once.
    assert [record.request.arrival for record in records] == [0] * 3 + [30] * 3 + [60] * 3
    assert [record.finished for record in records] == [30] * 3 + [60] * 3 + [90] * 3
    assert metrics.batch_figures().running_max == 3


def test_a_refused_request_frees_its_client() -> None:
    trace = requests(*[0] * 4)
    trace[0] = trace[0]._replace(input_tokens=99)
    records, _ = replay(trace, num_clients=1)
    assert [record.request.arrival for record in records] == [0, 0, 30, 60]


def test_the_front_end_adds_to_every_time() -> None:
    (slow, late), metrics = replay(requests(100, 500), front_end=4)
    assert (slow.admitted, slow.first_token, slow.finished) == (104, 114, 134)
    assert late.first_token == 514
    used = metrics.kv_figures().utilization.mean
    # Two blocks for three steps each, of a window from the first arrival to the last finish.
    assert used == pytest.approx((2 * 60) / 99 / (534 - 100))


def test_drawn_arrivals_have_the_rate_and_the_spread() -> None:
    def gaps(burstiness: float, seed: int = 0) -> list[int]:
        drawn = at_rate(requests(*[0] * 4000), Fraction(10**6), burstiness, seed)
        return [b - a for a, b in pairwise(request.arrival for request in drawn)]

    for burstiness, variation in ((0.25, 2.0), (1.0, 1.0), (4.0, 0.5)):
        drawn = gaps(burstiness)
        assert fmean(drawn) == pytest.approx(10**6, rel=0.1)
        assert pstdev(drawn) / fmean(drawn) == pytest.approx(variation, rel=0.15)
    assert set(gaps(inf)) == {10**6}
    assert gaps(1.0) == gaps(1.0)
    assert gaps(1.0) != gaps(1.0, seed=1)
