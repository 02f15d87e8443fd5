"""Progress of a long run, on a terminal's stderr."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING

from kvplan.core.simulate import StepRecord
from kvplan.units import format_seconds

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

    from kvplan.jobs.simulate import Simulation

_FIRST_S = 1.0
_STEPS_BETWEEN_LOOKS = 256


class Progress:
    """Shows finished requests, simulated time, rate, KV in use and time left once a run takes over a second.

    How many requests there are is known once the trace is read; till then it is estimated from the bytes read.
    """

    def __init__(self, simulation: Simulation) -> None:
        self._trace = simulation.trace
        self._usable = simulation.usable_blocks
        self._seconds_per_tick = simulation.seconds_per_tick
        self._done = 0
        self._steps = 0
        self._started = time.monotonic()
        self._bar: Bar | None = None

    def __call__(self, record: StepRecord) -> None:
        """Count a step."""
        self._done += len(record.rejected) + (len(record.turn.finished) if record.turn else 0)
        self._steps += 1
        if self._steps % _STEPS_BETWEEN_LOOKS:
            return
        seconds = time.monotonic() - self._started
        if seconds >= _FIRST_S:
            self._show(record, seconds)

    def _show(self, record: StepRecord, seconds: float) -> None:
        if self._bar is None:
            self._bar = _new_bar()
        clock = (
            ""
            if self._seconds_per_tick is None
            else format_seconds(float(record.end * self._seconds_per_tick))
        )
        used = self._usable - record.turn.free_blocks if record.turn else 0
        self._bar.update(
            self._bar.task_ids[0],
            total=self._trace.expected,
            completed=self._done,
            clock=clock or f"step {record.step:,}",
            rate=self._done / seconds,
            used=100 * used / self._usable,
        )

    def __enter__(self) -> Progress:
        """Nothing is shown yet."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()


def _new_bar() -> Bar:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    bar = Bar(
        TextColumn("{task.fields[clock]} simulated"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]:,.0f} requests/s, KV {task.fields[used]:.0f} %, left"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    bar.add_task("", total=None, clock="", rate=0.0, used=0.0)
    bar.start()
    return bar
