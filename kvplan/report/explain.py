"""What `explain` prints: a topic worked through, part by part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from kvplan.drawing import draw_lane
from kvplan.report.pool_map import mark_style, print_grid
from kvplan.report.tables import Screen, exact_bytes, new_table
from kvplan.text import literal
from kvplan.topics import parts as kinds
from kvplan.units import counted, format_bytes, format_count, format_share

if TYPE_CHECKING:
    from kvplan.options import Settings
    from kvplan.topics.parts import Explanation, Figures, Part, Timeline, Unit, Value


#: Columns of a timeline.
_TIMELINE = 60

_FLOP_UNITS = ((10**18, "EFLOP"), (10**15, "PFLOP"), (10**12, "TFLOP"), (10**9, "GFLOP"), (10**6, "MFLOP"))


def print_topics(screen: Screen, questions: Mapping[str, str]) -> None:
    """The topics and the question that each answers."""
    table = new_table("topic", "", keep_first=True)
    table.columns[1].justify = "left"
    for name, question in questions.items():
        table.add_row(name, question)
    screen.console.print(table)
    screen.say("kvplan explain TOPIC works one through; --model NAME with another model")


def print_explanation(screen: Screen, found: Explanation) -> None:
    """A topic: its question, its parts in order, and where texts differ."""
    screen.say(f"{found.topic}: {found.question}", style="bold")
    screen.say(_settings_line(found.config, found.shown), style="dim")
    for part in found.parts:
        _part(screen, part)
    for note in found.notes:
        screen.console.print()
        screen.say(f"Note: {note}", style="italic")


def _part(screen: Screen, part: Part) -> None:
    screen.console.print()
    if isinstance(part, kinds.Prose):
        screen.say(part.text)
    elif isinstance(part, kinds.Formula):
        screen.console.print(Text(part.text, style="cyan"))
    elif isinstance(part, kinds.Figures):
        _figures(screen, part)
    elif isinstance(part, kinds.Table):
        _values(screen, part)
    elif isinstance(part, kinds.Timeline):
        _timeline(screen, part)
    else:
        screen.say(part.title, style="bold")
        print_grid(screen, part.pool)


def _figures(screen: Screen, part: Figures) -> None:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    for row in part.rows:
        how = f"  ({row.how})" if row.how else ""
        table.add_row(literal(row.label), f"{_value(row.value, row.unit)}{how}")
    screen.console.print(table)


def _values(screen: Screen, part: kinds.Table) -> None:
    if part.title:
        screen.say(part.title, style="bold")
    table = new_table(*(column.label for column in part.columns))
    for column, shown in zip(part.columns, table.columns, strict=True):
        shown.justify = "left" if column.unit == "text" else "right"
    for row in part.rows:
        cells = zip(row, part.columns, strict=True)
        table.add_row(*(literal(_value(value, column.unit)) for value, column in cells))
    screen.console.print(table)


def _timeline(screen: Screen, part: Timeline) -> None:
    label = max(len(lane.name) for lane in part.lanes)
    columns = max(8, min(_TIMELINE, screen.console.width - label - 3))
    per_mark = max(1, -(-part.ruler // columns))
    each = f"{per_mark} steps" if per_mark > 1 else "a step"
    screen.say(f"{part.title}: {counted(part.steps, 'step')}, a character is {each}", style="bold")
    for lane in part.lanes:
        line = Text(f" {lane.name:<{label}} ", style="dim")
        for mark, marks in groupby(draw_lane(lane.stretches, part.steps, per_mark, loud=part.loud)):
            line.append("".join(marks), style=mark_style(mark))
        screen.console.print(line)


def _settings_line(settings: Settings, names: Sequence[str]) -> str:
    """The settings that numbers depend on; those that nobody gave are said to be assumed."""
    given = [f"{name} {literal(settings[name].value)}" for name in names if settings[name].given]
    assumed = [f"{name} {literal(settings[name].value)}" for name in names if not settings[name].given]
    return "; ".join([*given, f"assumed: {', '.join(assumed)}"] if assumed else [", ".join(given)])


def _value(value: Value, unit: Unit) -> str:
    """A value of an explanation as text."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    if unit in ("bytes", "exact_bytes"):
        return format_bytes(int(value)) if unit == "bytes" else exact_bytes(int(value))
    if unit == "share":
        return format_share(value)
    if unit == "times":
        return f"{value:,.2f}" if value < 100 else f"{value:,.1f}"
    if unit == "flops":
        return next(
            (f"{value / size:.3g} {name}" for size, name in _FLOP_UNITS if value >= size), f"{value:,} FLOP"
        )
    if isinstance(value, int):
        return format_count(value)
    return f"{value:,.3f}".rstrip("0").rstrip(".") if value >= 1 else f"{value:.3g}"
