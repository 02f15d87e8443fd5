"""The loop: arrivals, clock, turns. One path for clocks in picoseconds and in engine steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import sqrt
from typing import Any, Literal, Protocol

from kvplan.core.engine import DecodeRun, StepWork, Turn
from kvplan.core.metrics import Metrics
from kvplan.core.request import Request

#: Steps of one turn: enough that turns cost nothing beside them, few enough that memory and an interrupt's wait
#: stay small.
_LONGEST_TURN = 1 << 16


class Engine(Protocol):
    """What the loop needs of an engine."""

    @property
    def is_idle(self) -> bool:
        """Whether no request is live."""

    @property
    def is_livelocked(self) -> bool:
        """Whether what is live runs again and again without ever finishing."""

    def why_stuck(self) -> str:
        """Who cannot go on, what it needs and what there is."""

    def decode_shape(self) -> tuple[int, int] | None:
        """(sequences, context tokens) of the next step if it can only decode and may be one of several."""

    def refusal(self, request: Request) -> str | None:
        """Why a request is turned away at once, or None."""

    def add(self, request: Request) -> None:
        """Queue a request."""

    def turn(self, max_steps: int = 1) -> Turn[Any] | DecodeRun[Any]:
        """Take one step or, where that is exact, up to ``max_steps`` decode steps."""


@dataclass(slots=True)
class StepRecord:
    """One turn as observers see it: its place in time, who came, what the engine did.

    ``turn`` is None where only refused requests came and no step ran. ``start`` and ``end`` are ticks. A run of
    several steps counts from ``step``: the first takes ``first`` ticks, each following one ``growth`` more.
    """

    step: int
    start: int
    end: int
    turn: Turn[Any] | DecodeRun[Any] | None
    arrived: list[Request] = field(default_factory=list)
    rejected: list[Request] = field(default_factory=list)
    first: int = 0
    growth: int = 0


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
    decode_price: Callable[[int, int], tuple[int, int, int]] | None = None,
    step_numbered: bool = False,
    observe: Callable[[StepRecord], None] | None = None,
) -> Outcome:
    """Replay ``requests``, in order of arrival, through ``engine`` to the end.

    ``price`` gives the ticks that a step takes; ``decode_price``, of sequences and context, what a run of decode
    steps takes: ``(first, growth, valid)``, exactly as ``price`` would have it.

    Requests that arrive while a step runs are added before the next one is scheduled, all at the same tick in
    order. With ``step_numbered`` a tick is a step index: idle gaps jump it to the next arrival. A dead step (nothing
    planned, nobody preempted) takes no time and is followed by the next arrival; if none is left, the run is
    stuck. O(turns + requests).
    """
    queue = iter(requests)
    upcoming = next(queue, None)
    now = steps = first = growth = 0
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
        shape = None if decode_price is None else engine.decode_shape()
        most = 1
        if shape is not None and decode_price is not None:
            first, growth, valid = decode_price(*shape)
            most = min(valid, _LONGEST_TURN)
            if upcoming is not None:
                most = _steps_until(upcoming.arrival - now, first, growth, most)
        turn = engine.turn(most)
        if isinstance(turn, DecodeRun):
            taken, is_dead = turn.steps, False
            if shape is None:
                first, growth = price(turn.first_work), 0
            end = now + taken * first + growth * (taken * (taken - 1) // 2)
            metrics.fold_run(turn, now, end, first, growth)
        else:
            taken, is_dead = 1, turn.is_dead
            end = now if is_dead else now + price(turn.work)
            if is_dead and upcoming is not None:
                end = upcoming.arrival
            metrics.fold(turn, now, end)
        if observe is not None:
            number = now if step_numbered else steps
            observe(StepRecord(number, now, end, turn, arrived, rejected, first, growth))
        steps += taken
        now = end
        if upcoming is None and (is_dead or engine.is_livelocked):
            return Outcome("stuck", engine.why_stuck())


def _steps_until(gap: int, first: int, growth: int, most: int) -> int:
    """The fewest steps that take at least ``gap`` ticks, if step j takes ``first + growth * j``; at most ``most``."""
    # The root of growth/2 k^2 + (first - growth/2) k = gap, then at most a few steps of correction.
    if not growth:
        return min(most, -(-gap // first))
    linear = first - growth / 2
    root = 2 * gap / (linear + sqrt(linear * linear + 2 * growth * gap))
    steps = min(most, int(root) + 1)
    ticks = steps * first + growth * (steps * (steps - 1) // 2)
    while ticks < gap and steps < most:
        ticks += first + growth * steps
        steps += 1
    while steps > 1:
        ticks -= first + growth * (steps - 1)
        if ticks < gap:
            break
        steps -= 1
    return steps
