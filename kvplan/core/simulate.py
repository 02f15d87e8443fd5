"""The loop: arrivals, clock, turns. One path for clocks in picoseconds and in engine steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal, Protocol

from kvplan.core.engine import StepWork, Turn
from kvplan.core.metrics import Metrics
from kvplan.core.request import Request

#: Ticks of a second where the clock counts picoseconds.
PICOSECONDS = 10**12


class Engine(Protocol):
    """What the loop needs of an engine."""

    @property
    def is_idle(self) -> bool:
        """Whether no request is live."""

    @property
    def is_livelocked(self) -> bool:
        """Whether what is live runs again and again without ever finishing."""

    def refusal(self, request: Request) -> str | None:
        """Why a request is turned away at once, or None."""

    def add(self, request: Request) -> None:
        """Queue a request."""

    def turn(self, max_steps: int = 1) -> Turn:
        """Take one step or, where that is exact, up to ``max_steps`` like ones."""


@dataclass(slots=True)
class StepRecord:
    """One step as observers see it: its place in time, who came, what the engine did.

    ``turn`` is None where only refused requests came and no step ran. ``start`` and ``end`` are ticks.
    """

    step: int
    start: int
    end: int
    turn: Turn | None
    arrived: list[Request] = field(default_factory=list)
    rejected: list[Request] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended. ``stuck``: requests are left that nothing can move any more."""

    status: Literal["done", "stuck"]
    reason: str | None = None


def run(
    requests: Iterable[Request],
    engine: Engine,
    price: Callable[[StepWork], int],
    metrics: Metrics,
    *,
    step_numbered: bool = False,
    observe: Callable[[StepRecord], None] | None = None,
) -> Outcome:
    """Replay ``requests``, in order of arrival, through ``engine`` to the end.

    ``price`` gives the ticks that a step takes. Requests that arrive while a step runs are added before
    the next one is scheduled, all at the same tick in order. With ``step_numbered`` a tick is a step index:
    idle gaps jump it to the next arrival. A dead step (nothing planned, nobody preempted) takes no time and is
    followed by the next arrival; if none is left, the run is stuck. O(steps + requests) turns.
    """
    queue = iter(requests)
    upcoming = next(queue, None)
    now = 0
    steps = 0
    while True:
        arrived: list[Request] = []
        rejected: list[Request] = []
        while upcoming is not None and upcoming.arrival <= now:
            reason = engine.refusal(upcoming)
            metrics.arrive(upcoming, now, rejected_for=reason)
            if reason is None:
                engine.add(upcoming)
                arrived.append(upcoming)
            else:
                rejected.append(upcoming)
            upcoming = next(queue, None)
        if engine.is_idle:
            if rejected and observe is not None:
                observe(StepRecord(now if step_numbered else steps, now, now, None, arrived, rejected))
            if upcoming is None:
                return Outcome("done")
            metrics.idle(now, upcoming.arrival)
            now = upcoming.arrival
            continue
        turn = engine.turn()
        end = now if turn.is_dead else now + price(turn.work)
        if turn.is_dead and upcoming is not None:
            end = upcoming.arrival
        metrics.fold(turn, now, end)
        if observe is not None:
            observe(StepRecord(now if step_numbered else steps, now, end, turn, arrived, rejected))
        steps += 1
        now = end
        if upcoming is None and turn.is_dead:
            return Outcome("stuck", "the head of the queue needs more blocks than can ever be free")
        if upcoming is None and engine.is_livelocked:
            return Outcome("stuck", "a sequence outgrows the pool, is preempted and starts over without end")
