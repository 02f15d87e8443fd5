"""How a run went, to be asked afterwards: queues, pool and tokens at any moment."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from typing import NamedTuple

from kvplan.core.engine import DecodeRun
from kvplan.core.simulate import StepRecord


class Moment(NamedTuple):
    """How things stand: queues after the last scheduling, blocks in use, and what was done so far.

    ``generated`` tokens were sampled, ``computed`` are prompt tokens, each counted once, ``preempted`` sequences
    lost their blocks, ``hit`` of ``queried`` prompt tokens were found in the prefix cache at first admissions.
    """

    running: int = 0
    waiting: int = 0
    used_blocks: int = 0
    generated: float = 0
    computed: float = 0
    preempted: int = 0
    queried: int = 0
    hit: int = 0


class Course:
    """Observes a run; `at` tells how it stood at a tick.

    Keeps a moment for each turn, so memory grows with the turns. Within a run of decode steps all steps count as
    equally long.
    """

    def __init__(self, usable_blocks: int) -> None:
        self._usable = usable_blocks
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._moments: list[Moment] = []
        #: Of a run of steps: sequences that decode, and blocks taken up to each step.
        self._runs: dict[int, tuple[int, list[int]]] = {}

    @property
    def end(self) -> int:
        """When the last step ended."""
        return self._ends[-1] if self._ends else 0

    def __call__(self, record: StepRecord) -> None:
        """Note a turn."""
        turn = record.turn
        if turn is None:
            return
        before = self._moments[-1] if self._moments else Moment()
        if isinstance(turn, DecodeRun):
            taken = list(accumulate(turn.takes))
            self._runs[len(self._moments)] = (turn.decoders, taken)
            moment = before._replace(generated=before.generated + turn.decoders * turn.steps)
        else:
            first_hits = [one for one in turn.prefix_hits if not one[0].num_preemptions]
            moment = before._replace(
                generated=before.generated + turn.decoders + len(turn.sampled),
                computed=before.computed
                + sum(count for _, count in turn.work.chunks)
                - turn.recomputed_tokens,
                preempted=before.preempted + len(turn.preempted),
                queried=before.queried + sum(one.request.input_tokens for one, _ in first_hits),
                hit=before.hit + sum(tokens for _, tokens in first_hits),
            )
        self._starts.append(record.start)
        self._ends.append(record.end)
        self._moments.append(
            moment._replace(
                running=turn.running, waiting=turn.waiting, used_blocks=self._usable - turn.free_blocks
            )
        )

    def at(self, tick: int) -> Moment:
        """How things stood at a tick; tokens of a step that is under way count in proportion."""
        place = bisect_right(self._starts, tick) - 1
        if place < 0:
            return Moment()
        moment = self._moments[place]
        start, end = self._starts[place], self._ends[place]
        before = self._moments[place - 1] if place else Moment()
        if tick >= end:
            is_last = place + 1 == len(self._moments)
            idle = is_last or self._starts[place + 1] > end
            return moment._replace(running=0, waiting=0, used_blocks=0) if idle else moment
        done = (tick - start) / (end - start)
        used = moment.used_blocks
        if place in self._runs:
            _, taken = self._runs[place]
            used += taken[int(done * len(taken))] - taken[0]
        return moment._replace(
            used_blocks=used,
            generated=before.generated + done * (moment.generated - before.generated),
            computed=before.computed + done * (moment.computed - before.computed),
        )
