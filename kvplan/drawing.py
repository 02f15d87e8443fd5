"""Pictures as rows of characters: the cells of a pool, and what places do over time.

Every state has a character of its own, so that nothing is lost without colour.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from string import ascii_uppercase
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # whoever draws nothing loads none of it
    from kvplan.core.pool_map import PoolMap, State
    from kvplan.topics.parts import Stretch

#: Characters of what no single request has to itself.
SHARED, CACHED, FREE = "#", "~", "."
#: Of requests that have no letter of their own: their cells, and those of them without a token yet.
OTHERS, OTHERS_RESERVED = "+", "-"

#: So many rows that look the same are folded into one.
_FOLDED = 3

#: A cell of a picture stands for 1, 2, 5, 10, ... cells of a pool.
_ROUND = (1, 2, 5)


class Row(NamedTuple):
    """Cells from ``first`` on, a character each; ``alike`` more rows look the same and are left out."""

    first: int
    marks: str
    alike: int


@dataclass(frozen=True, slots=True)
class PoolDrawing:
    """A pool in rows. ``per_mark`` cells are one character: the state that most of them are in."""

    per_mark: int
    rows: tuple[Row, ...]
    letters: dict[str, str]


def draw_pool(pool: PoolMap, columns: int, most_rows: int) -> PoolDrawing:
    """A grid of at most ``columns`` x ``most_rows`` characters. Letters go to those who hold most."""
    largest = sorted(pool.requests, key=lambda one: -one.cells)[: len(ascii_uppercase)]
    lettered = {one.id for one in largest}
    order = [one.id for one in pool.requests if one.id in lettered]
    letters = dict(zip(order, ascii_uppercase, strict=False))
    per_mark = _round_up(-(-pool.num_cells // (columns * most_rows)))
    marks = _marks(pool, per_mark, letters)
    first = pool.extents[0].first if pool.extents else 0
    lines = [(first + i * per_mark, "".join(marks[i : i + columns])) for i in range(0, len(marks), columns)]
    rows: list[Row] = []
    for _, same in groupby(lines, key=lambda line: line[1]):
        alike = [Row(*line, 0) for line in same]
        rows += alike if len(alike) < _FOLDED else [alike[0]._replace(alike=len(alike) - 1)]
    return PoolDrawing(per_mark, tuple(rows), letters)


def _round_up(number: int) -> int:
    """The next of 1, 2, 5, 10, 20, 50, ..."""
    scale = 1
    while True:
        for step in _ROUND:
            if step * scale >= number:
                return step * scale
        scale *= 10


def _marks(pool: PoolMap, per_mark: int, letters: dict[str, str]) -> list[str]:
    """A character for each ``per_mark`` cells: what most of them are, of equals what comes first."""
    marks: list[str] = []
    counts: Counter[str] = Counter()
    room = per_mark
    for _, count, state, request in pool.extents:
        mark, left = _mark(state, request, letters), count
        while left >= room:
            counts[mark] += room
            left -= room
            marks.append(counts.most_common(1)[0][0])
            counts.clear()
            room = per_mark
        counts[mark] += left
        room -= left
    if room < per_mark:
        marks.append(counts.most_common(1)[0][0])
    return marks


def _mark(state: State, request: str | None, letters: dict[str, str]) -> str:
    if state == "shared":
        return SHARED
    if state == "cached":
        return CACHED
    if state == "free" or request is None:
        return FREE
    letter = letters.get(request)
    if state == "held":
        return letter or OTHERS
    return letter.lower() if letter else OTHERS_RESERVED


def draw_lane(stretches: Sequence[Stretch], steps: int, per_mark: int, *, loud: str = "") -> str:
    """``steps`` steps, ``per_mark`` of them a character: a mark in ``loud`` among them, else that of the middle one."""
    marks = [FREE] * steps
    for first, count, mark in stretches:
        marks[first : first + count] = mark * count
    drawn = []
    for begin in range(0, steps, per_mark):
        some = marks[begin : begin + per_mark]
        drawn.append(next((mark for mark in loud if mark in some), some[(len(some) - 1) // 2]))
    return "".join(drawn)
