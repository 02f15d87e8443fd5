"""Progress of a long run, on a terminal's stderr."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING

from kvplan.core.simulate import StepRecord

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

_FIRST_S = 1.0
_STEPS_BETWEEN_LOOKS = 256


class Progress:
    """Shows finished requests, rate and time left once a run takes over a second."""

    def __init__(self, total: int) -> None:
        self._total = total
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
        if seconds < _FIRST_S:
            return
        if self._bar is None:
            self._bar = _new_bar(self._total)
        self._bar.update(self._bar.task_ids[0], completed=self._done, rate=self._done / seconds)

    def __enter__(self) -> Progress:
        """Nothing is shown yet."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()


def _new_bar(total: int) -> Bar:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    bar = Bar(
        TextColumn("simulating"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]:,.0f} requests/s, left"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    bar.add_task("", total=total, rate=0.0)
    bar.start()
    return bar
