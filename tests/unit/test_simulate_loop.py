"""The loop over an engine that plays a script: when requests enter, what the clock does, how it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from random import Random

import pytest

from kvplan.core.cost import constant
from kvplan.core.engine import RunTimes, Sequence, StepWork
from kvplan.core.engine import Turn as AnyTurn
from kvplan.core.metrics import Metrics
from kvplan.core.request import Request
from kvplan.core.simulate import Outcome, StepRecord, run
from kvplan.errors import InputError

Turn = AnyTurn[Sequence]


@dataclass
class Scripted:
    """An engine that serves one request after the other, each in as many steps as it has output tokens.

    A request with 99 input tokens is refused; one with priority 1 cannot be moved; one with priority 2 runs
    and runs and never ends.
    """

    added: list[str] = field(default_factory=list)
    queue: list[Sequence] = field(default_factory=list)

    @property
    def is_idle(self) -> bool:
        return not self.queue

    @property
    def is_livelocked(self) -> bool:
        return bool(self.queue) and all(s.request.priority == 2 for s in self.queue)

    def why_stuck(self) -> str:
        return f"{self.queue[0].id} is stuck"

    def decode_shape(self) -> tuple[int, int] | None:
        return None

    def refusal(self, request: Request) -> str | None:
        return "too_long" if request.input_tokens == 99 else None

    def add(self, request: Request) -> None:
        self.added.append(request.id)
        self.queue.append(Sequence(request, (0, len(self.added)), 1000))

    def turn(self, max_steps: int = 1) -> Turn:
        turn = Turn()
        movable = [s for s in self.queue if s.request.priority != 1]
        if not movable:
            return turn
        sequence = movable[0]
        turn.scheduled = [(sequence, 1)]
        turn.work = StepWork(decodes=1, decode_context=len(self.queue))
        if sequence.request.priority == 2:
            return turn
        sequence.num_tokens += 1
        turn.sampled = [sequence]
        if sequence.num_tokens == sequence.max_tokens:
            self.queue.remove(sequence)
            turn.finished = [sequence]
        return turn


def play(
    requests: list[Request], price: Callable[[StepWork], int] | None = None, *, step_numbered: bool = False
) -> tuple[Outcome, list[StepRecord]]:
    records: list[StepRecord] = []
    metrics = Metrics(num_gpu_blocks=5, block_size=1, prefix_caching=True, seconds_per_tick=Fraction(1))
    outcome = run(
        requests,
        Scripted(),
        price or constant(1),
        metrics,
        step_numbered=step_numbered,
        observe=records.append,
    )
    return outcome, records


def times(records: list[StepRecord]) -> list[tuple[int, int, int]]:
    return [(record.step, record.start, record.end) for record in records]


def arrivals(records: list[StepRecord]) -> list[list[str]]:
    return [[r.id for r in record.arrived] for record in records]


def test_no_requests_are_done_at_once() -> None:
    assert play([]) == (Outcome("done"), [])


def test_steps_follow_each_other_and_last_as_long_as_they_cost() -> None:
    _, records = play([Request("a", 0, 1, 3)], constant(7))
    assert times(records) == [(0, 0, 7), (1, 7, 14), (2, 14, 21)]


def test_the_price_is_asked_of_each_steps_work() -> None:
    # Two in the queue cost 20, then one costs 10.
    _, records = play([Request("a", 0, 1, 1), Request("b", 0, 1, 1)], lambda work: 10 * work.decode_context)
    assert times(records) == [(0, 0, 20), (1, 20, 30)]


def test_a_request_that_arrives_in_mid_step_enters_before_the_next_one() -> None:
    _, records = play([Request("a", 0, 1, 2), Request("b", 1, 1, 1)], constant(10))
    assert arrivals(records) == [["a"], ["b"], []]


def test_a_request_that_arrives_as_a_step_ends_enters_before_the_next_one() -> None:
    _, records = play([Request("a", 0, 1, 2), Request("b", 10, 1, 1), Request("c", 11, 1, 1)], constant(10))
    assert arrivals(records) == [["a"], ["b"], ["c"], []]


def test_requests_of_one_tick_enter_together_in_order() -> None:
    _, records = play([Request(name, 5, 1, 1) for name in "cab"])
    assert arrivals(records) == [["c", "a", "b"], [], []]


def test_an_id_that_a_live_request_has_is_refused_and_one_that_is_done_lets_go_of_it() -> None:
    """Of a very long trace, the reader tells equal ids only at its end."""
    with pytest.raises(InputError, match='id "a" stands twice'):
        play([Request("a", 0, 1, 2), Request("a", 1, 1, 1)])
    _, records = play([Request("a", 0, 1, 1), Request("a", 1, 1, 1)])
    assert arrivals(records) == [["a"], ["a"]]


def test_an_idle_gap_jumps_to_the_next_arrival() -> None:
    _, records = play([Request("a", 3, 1, 1), Request("b", 50, 1, 1)], constant(10))
    assert times(records) == [(0, 3, 13), (1, 50, 60)]


def test_with_numbered_steps_a_step_has_the_number_of_its_tick() -> None:
    requests = [Request("a", 2, 1, 1), Request("b", 9, 1, 2)]
    _, records = play(requests, step_numbered=True)
    assert times(records) == [(2, 2, 3), (9, 9, 10), (10, 10, 11)]


def test_a_refused_request_that_comes_alone_is_seen_without_a_step() -> None:
    outcome, records = play([Request("a", 4, 99, 1)])
    assert outcome == Outcome("done")
    assert [(r.turn, r.start, r.end, [q.id for q in r.rejected]) for r in records] == [(None, 4, 4, ["a"])]


def test_a_refused_request_that_comes_with_others_is_seen_in_their_step() -> None:
    _, records = play([Request("a", 0, 99, 1), Request("b", 0, 1, 1)])
    assert [([q.id for q in r.rejected], [q.id for q in r.arrived]) for r in records] == [(["a"], ["b"])]


def test_a_step_that_moves_nothing_takes_no_time_and_ends_the_run_as_stuck() -> None:
    outcome, records = play([Request("a", 0, 1, 1), Request("b", 0, 1, 1, priority=1)], constant(10))
    assert outcome.status == "stuck"
    assert outcome.reason == "b is stuck"
    assert times(records) == [(0, 0, 10), (1, 10, 10)]


def test_a_step_that_moves_nothing_waits_for_the_next_arrival() -> None:
    requests = [Request("a", 0, 1, 1, priority=1), Request("b", 30, 1, 1)]
    outcome, records = play(requests, constant(10))
    assert times(records) == [(0, 0, 30), (1, 30, 40), (2, 40, 40)]
    assert outcome.status == "stuck"


def test_a_sequence_that_runs_without_end_is_stuck_once_nothing_more_arrives() -> None:
    requests = [Request("a", 0, 1, 1, priority=2), Request("b", 25, 1, 1, priority=2)]
    outcome, records = play(requests, constant(10))
    assert outcome == Outcome("stuck", "a is stuck")
    assert times(records) == [(0, 0, 10), (1, 10, 20), (2, 20, 30), (3, 30, 40)]


def test_the_requests_may_come_from_an_iterator_that_is_read_as_needed() -> None:
    seen: list[str] = []

    def stream() -> Iterator[Request]:
        for name, arrival in (("a", 0), ("b", 100)):
            seen.append(name)
            yield Request(name, arrival, 1, 3)

    metrics = Metrics(num_gpu_blocks=5, block_size=1, prefix_caching=True, seconds_per_tick=None)
    seen_at_steps: list[int] = []
    outcome = run(
        stream(),
        Scripted(),
        constant(1),
        metrics,
        observe=lambda _record: seen_at_steps.append(len(seen)),
    )
    assert outcome.status == "done"
    assert seen_at_steps == [2] * 6  # one request is read ahead


def test_a_run_needs_no_observer() -> None:
    metrics = Metrics(num_gpu_blocks=5, block_size=1, prefix_caching=True, seconds_per_tick=None)
    assert run([Request("a", 0, 1, 1)], Scripted(), constant(1), metrics).status == "done"
    assert metrics.steps == 1


@pytest.mark.parametrize("arrival", [0, 5])
def test_the_same_steps_run_wherever_time_begins(arrival: int) -> None:
    requests = [Request("a", arrival, 1, 2), Request("b", arrival + 7, 1, 1)]
    _, records = play(requests, constant(10))
    assert [(start - arrival, end - arrival) for _, start, end in times(records)] == [
        (0, 10),
        (10, 20),
        (20, 30),
    ]


def test_times_of_a_run_are_those_of_its_steps_one_by_one() -> None:
    rng = Random(1)
    for _ in range(2000):
        first, second, growth = rng.randint(1, 60), rng.randint(1, 60), rng.choice([0, 0, 1, 7])
        times = RunTimes(first, rng.choice([second, first + growth]), growth)
        steps, most, gap = rng.randint(1, 12), rng.randint(1, 12), rng.randint(-5, 900)
        one_by_one = [first, *(times.second + i * growth for i in range(20))]
        assert list(times.ticks(steps)) == one_by_one[:steps]
        assert times.total(steps) == sum(one_by_one[:steps])
        fewest = next(k for k in range(1, most + 1) if k == most or sum(one_by_one[:k]) >= gap)
        assert times.steps_until(gap, most) == fewest
