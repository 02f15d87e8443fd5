"""What an explanation is made of. Values stay numbers; how they are written is the report's business."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, NamedTuple

from kvplan.core.pool_map import PoolMap
from kvplan.options import Settings, settings_dict

#: How a value is written. ``exact_bytes`` has the number of bytes too; ``times`` is a ratio.
Unit = Literal["count", "bytes", "exact_bytes", "share", "times", "flops", "text"]
Value = int | float | str | bool | None


class Prose(NamedTuple):
    """A paragraph."""

    text: str


class Formula(NamedTuple):
    """A line of arithmetic with its numbers: it is not wrapped among other lines."""

    text: str


class Figure(NamedTuple):
    """One number with its name; ``how`` is where it comes from, in words."""

    key: str
    label: str
    value: Value
    unit: Unit = "count"
    how: str = ""


class Figures(NamedTuple):
    """Numbers below each other."""

    rows: tuple[Figure, ...]


class Column(NamedTuple):
    """A column of a table."""

    key: str
    label: str
    unit: Unit = "count"


class Table(NamedTuple):
    """Rows of values, one for each column."""

    key: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Value, ...], ...]
    title: str = ""


class Stretch(NamedTuple):
    """A place does one thing, drawn as ``mark``, in steps ``first .. first+steps-1``."""

    first: int
    steps: int
    mark: str


class Lane(NamedTuple):
    """A row of a timeline."""

    name: str
    stretches: tuple[Stretch, ...]


class Timeline(NamedTuple):
    """What places do over ``steps`` steps. ``ruler`` steps fill the width, so that timelines can be compared.

    Where several steps are one character, the marks in ``loud`` are shown before others, the first of them first.
    """

    key: str
    title: str
    steps: int
    lanes: tuple[Lane, ...]
    ruler: int
    loud: str = ""


class Grid(NamedTuple):
    """A pool, cell by cell."""

    key: str
    title: str
    pool: PoolMap


Part = Prose | Formula | Figures | Table | Timeline | Grid


@dataclass(frozen=True, slots=True)
class Explanation:
    """A topic worked through. ``notes`` say where well-known texts round, or are wrong.

    ``shown`` names the settings that its numbers depend on.
    """

    topic: str
    question: str
    config: Settings
    shown: tuple[str, ...]
    parts: tuple[Part, ...]
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def figure(self, key: str) -> Value:
        """A number by its name; raises `KeyError`."""
        return self._figures()[key]

    def table(self, key: str) -> list[dict[str, Value]]:
        """The rows of a table by its name; raises `KeyError`."""
        return self._tables()[key]

    def to_dict(self) -> dict[str, object]:
        """The JSON document without its version keys: the same numbers as the parts, by name."""
        return {
            "topic": self.topic,
            "question": self.question,
            "config": settings_dict(self.config),
            "text": [part.text for part in self.parts if isinstance(part, (Prose, Formula))],
            "figures": self._figures(),
            "tables": self._tables(),
            "timelines": {
                part.key: {
                    "steps": part.steps,
                    "lanes": [
                        {"name": lane.name, "stretches": [one._asdict() for one in lane.stretches]}
                        for lane in part.lanes
                    ],
                }
                for part in self.parts
                if isinstance(part, Timeline)
            },
            "maps": {part.key: part.pool.to_dict() for part in self.parts if isinstance(part, Grid)},
            "notes": list(self.notes),
            "warnings": list(self.warnings),
        }

    def _figures(self) -> dict[str, Value]:
        figures = [row for part in self.parts if isinstance(part, Figures) for row in part.rows]
        return {row.key: row.value for row in figures}

    def _tables(self) -> dict[str, list[dict[str, Value]]]:
        return {part.key: _records(part) for part in self.parts if isinstance(part, Table)}


def _records(table: Table) -> list[dict[str, Value]]:
    keys = [column.key for column in table.columns]
    return [dict(zip(keys, row, strict=True)) for row in table.rows]


def stretches(marks: Sequence[str]) -> tuple[Stretch, ...]:
    """One mark a step as stretches, those of idleness (``.``) left out."""
    found: list[Stretch] = []
    first = 0
    for mark, same in groupby(marks):
        steps = len(list(same))
        if mark != ".":
            found.append(Stretch(first, steps, mark))
        first += steps
    return tuple(found)
