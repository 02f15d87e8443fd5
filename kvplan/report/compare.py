"""What `compare` prints: the runs of one trace below each other."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from rich.text import Text

from kvplan.jobs import compare as columns
from kvplan.report.tables import Screen, new_table, trace_line, value_of
from kvplan.text import literal
from kvplan.units import format_count, format_seconds, format_share

if TYPE_CHECKING:
    from kvplan.jobs.compare import Column, ComparedRun, CompareResult
    from kvplan.jobs.simulate import SimulateResult


#: Characters of a run's name beside which its figures have room.
_WIDEST_LABEL = 12


def print_comparison(screen: Screen, result: CompareResult) -> None:
    """A row for each run: what it held, then how fast it was and why it differs; * marks a column's best."""
    first = next((run.result for run in result.runs if run.result is not None), None)
    if first is not None:
        screen.say(_compare_headline(first, result.varied))
    labels = list(map(literal, result.labels))
    names = " ".join(map(columns.written, result.varied))
    if len(names) > _WIDEST_LABEL:  # the tables have no room for it
        screen.say(f"by {names}")
        names = ""
    if max(map(len, labels), default=0) > _WIDEST_LABEL:
        for number, label in enumerate(labels, 1):
            screen.say(f"{number}: {label}")
        labels = [str(number) for number in range(1, len(labels) + 1)]
    held = new_table(
        names, "tokens", "to fill", "waste", "holes", "used", "preempt.", "run", "wait", keep_first=True
    )
    speed = new_table(names, "hit", "tokens/s", "TTFT", "TPOT", "E2E", "why", keep_first=True)
    speed.columns[-1].justify = "left"
    for label, run in zip(labels, result.runs, strict=True):
        if run.result is None:
            speed.add_row(label, *"-----", run.differs_by)
            continue
        kv = run.result.kv
        held.add_row(
            label,
            _led(run, columns.TOKEN_SHARE, format_share),
            format_share(kv.reserved_share),
            format_share(kv.internal_fragmentation),
            _led(run, columns.HOLES, format_share),
            format_share(kv.utilization.mean),
            _led(run, columns.PREEMPTIONS, format_count),
            _led(run, columns.RUNNING, _one_digit),
            _led(run, columns.WAITING, _one_digit),
        )
        speed.add_row(
            label,
            _led(run, columns.HIT_RATE, format_share),
            _led(run, columns.THROUGHPUT, _one_digit),
            *(_led(run, column, format_seconds) for column in (columns.TTFT, columns.TPOT, columns.E2E)),
            run.differs_by,
        )
    if first is not None:
        screen.console.print(held)
    screen.console.print(speed)
    screen.say("* leads its column. Shares are of the memory held, over time; figures are means.")
    for label, run in zip(labels, result.runs, strict=True):
        if run.error is not None:
            screen.say(f"{label}: {literal(str(run.error))}; {literal(run.error.hint or '')}".rstrip("; "))
    if result.is_partial:
        screen.say("Interrupted: runs that were not finished are left out.")


def _compare_headline(result: SimulateResult, varied: Collection[str]) -> str:
    settings = result.config
    what = trace_line(result.trace)
    named = [name for name in ("model", "gpu", "engine") if name in settings and name not in varied]
    return ", ".join([what, *(value_of(settings, name) for name in named)])


def _led(run: ComparedRun, column: Column, written: Callable[[float | None], str]) -> Text:
    """The figure of a run in a column, marked where it leads."""
    assert run.result is not None, "a run without figures has a row of its own"
    text = written(column.of(run.result))
    return Text(f"{text}*", style="bold green") if column.path in run.best else Text(text)


def _one_digit(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"
