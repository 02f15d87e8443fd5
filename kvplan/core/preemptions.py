"""Why sequences were preempted, and what it cost each of them."""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappush, heappushpop
from typing import Any

from kvplan.core.engine import Preemption, Turn

#: Cases that are kept, those that cost the most time.
_WORST = 10


@dataclass(slots=True)
class Case:
    """One preemption: in which step and at which tick, why, and how its victim fared.

    ``found_tokens`` of what was thrown away were still in the prefix cache when it came back. ``lost_ticks`` is the
    time until all of it was there again; None: it never was.
    """

    step: int
    tick: int
    preemption: Preemption
    running: int
    found_tokens: int = 0
    lost_ticks: int | None = None
    computed_again: int = 0


@dataclass(frozen=True, slots=True)
class PreemptionCauses:
    """Sums over all preemptions, the costliest of them, and the cause in a sentence."""

    by_decodes: int
    by_prompts: int
    of_themselves: int
    lost_tokens: int
    found_tokens: int
    mean_running: float | None
    lost_ticks: int
    worst: tuple[Case, ...]
    sentence: str


class PreemptionLog:
    """Follows preempted sequences until they have again what they lost. O(preempted + their chunks) a turn."""

    def __init__(self) -> None:
        #: Of victims that have not got back what they lost.
        self.open: dict[str, Case] = {}
        # The first whose victims ended before that.
        self._given_up: list[Case] = []
        self._worst: list[tuple[int, int, Case]] = []
        self._events = 0
        self._by_decodes = 0
        self._of_themselves = 0
        self._running = 0
        self._lost_tokens = 0
        self._found_tokens = 0
        self._lost_ticks = 0
        self._closed = 0

    def fold(self, turn: Turn[Any], step: int, start: int, end: int) -> list[Case]:
        """Note a step that was scheduled at ``start`` and ends at ``end``; returns the cases that it closes.

        A case is closed when its victim has again all that it lost, or loses its place once more.
        """
        closed: list[Case] = []
        if not (self.open or turn.preemptions):
            return closed
        for sequence, hit_tokens in turn.prefix_hits:
            case = self.open.get(sequence.id)
            if case is not None:
                case.found_tokens = min(hit_tokens, case.preemption.lost_tokens)
                case.computed_again = hit_tokens
        if self.open:
            for sequence, tokens in turn.scheduled:
                case = self.open.get(sequence.id)
                if case is not None:
                    case.computed_again += tokens
                    if case.computed_again >= case.preemption.lost_tokens:
                        self._close(self.open.pop(sequence.id), end)
                        closed.append(case)
        for preemption in turn.preemptions:
            earlier = self.open.pop(preemption.victim, None)
            if earlier is not None:
                self._close(earlier, start)
                closed.append(earlier)
            self._events += 1
            self._by_decodes += preemption.is_decode
            self._of_themselves += preemption.victim == preemption.trigger
            self._running += turn.running
            self._lost_tokens += preemption.lost_tokens
            self.open[preemption.victim] = Case(step, start, preemption, turn.running)
        return closed

    def end(self, victim: str) -> None:
        """Note that a request ended: what it has not got back it never will."""
        case = self.open.pop(victim, None)
        if case is not None:
            self._found_tokens += case.found_tokens
            if len(self._given_up) < _WORST:
                self._given_up.append(case)

    def causes(self, usable_blocks: int) -> PreemptionCauses:
        """What all came to; where a victim never got back what it lost, the time that it cost is not known."""
        closed = [case for _, _, case in sorted(self._worst, key=lambda entry: entry[:2], reverse=True)]
        cases = [*self._given_up, *self.open.values(), *closed][:_WORST]
        mean = self._running / self._events if self._events else None
        return PreemptionCauses(
            by_decodes=self._by_decodes,
            by_prompts=self._events - self._by_decodes,
            of_themselves=self._of_themselves,
            lost_tokens=self._lost_tokens,
            found_tokens=self._found_tokens + sum(case.found_tokens for case in self.open.values()),
            mean_running=mean,
            lost_ticks=self._lost_ticks,
            worst=tuple(cases),
            sentence=self._sentence(mean, usable_blocks),
        )

    def _close(self, case: Case, tick: int) -> None:
        case.lost_ticks = tick - case.tick
        self._lost_ticks += case.lost_ticks
        self._found_tokens += case.found_tokens
        self._closed += 1
        entry = (case.lost_ticks, -self._closed, case)  # of equal ones the first that closed
        if len(self._worst) < _WORST:
            heappush(self._worst, entry)
        else:
            heappushpop(self._worst, entry)

    def _sentence(self, mean_running: float | None, usable_blocks: int) -> str:
        if mean_running is None:
            return "no sequence was preempted"
        decodes = self._by_decodes / self._events
        who = (
            "sequences that decode and needed their next block"
            if decodes >= 0.5
            else "prompts whose next chunk needed blocks"
        )
        share = max(decodes, 1 - decodes)
        return (
            f"{100 * share:.1f} % were caused by {who}; the {usable_blocks:,} usable blocks then served "
            f"{mean_running:,.1f} sequences on average"
        )
