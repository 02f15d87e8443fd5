"""Who holds which part of a pool at one moment: the map that is made of what an engine shows of it.

An engine that can be drawn has ``picture(turn) -> PoolPicture``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from kvplan.core.engine import DecodeRun, Holding, PoolPicture, Turn
from kvplan.core.simulate import StepRecord


@runtime_checkable
class Pictured(Protocol):
    """An engine whose pool can be drawn."""

    def picture(self, turn: Turn[Any]) -> PoolPicture:
        """The pool after the scheduling of ``turn``, which is the turn taken last."""


#: ``held`` cells have tokens of one request, ``reserved`` ones are its own and have none yet, ``shared`` ones have
#: several users; ``cached`` ones are free but reusable, ``free`` ones empty.
State = Literal["held", "reserved", "shared", "cached", "free"]
STATES: tuple[State, ...] = ("held", "reserved", "shared", "cached", "free")


class Extent(NamedTuple):
    """Neighbouring cells in the same state; ``request`` is the one that has them to itself, else None."""

    first: int
    cells: int
    state: State
    request: str | None


class Resident(NamedTuple):
    """A request with a place in the pool, and how many cells it has; ``tokens`` have KV."""

    id: str
    cells: int
    shared_cells: int
    tokens: int


class TableRun(NamedTuple):
    """Entries of a block table that follow each other: logical ``logical ..`` lie in physical ``physical ..``.

    ``tokens`` of their slots have KV; ``users`` hold each of the cells.
    """

    logical: int
    physical: int
    cells: int
    tokens: int
    users: int


@dataclass(frozen=True, slots=True)
class PoolMap:
    """A pool at one step, after its scheduling. ``requests`` are in the engine's order, ``extents`` cover all cells.

    ``table`` is the block table of ``table_of``, empty where none was asked for.
    """

    step: int
    time_s: float | None
    cell_tokens: int
    num_cells: int
    cells: dict[State, int]
    requests: tuple[Resident, ...]
    extents: tuple[Extent, ...]
    table_of: str | None = None
    table: tuple[TableRun, ...] = ()

    def to_dict(self) -> dict[str, object]:
        """The ``map`` block of the JSON."""
        document: dict[str, object] = {
            "step": self.step,
            "time_s": self.time_s,
            "cell_tokens": self.cell_tokens,
            "num_cells": self.num_cells,
            "cells": self.cells,
            "requests": [one._asdict() for one in self.requests],
            "extents": [one._asdict() for one in self.extents],
        }
        if self.table_of is not None:
            document["block_table"] = {
                "request": self.table_of,
                "runs": [one._asdict() for one in self.table],
            }
        return document


def pool_map(
    picture: PoolPicture, *, step: int, time_s: float | None = None, table_of: str | None = None
) -> PoolMap:
    """The map of a picture. ``table_of`` must hold something, if it is given. O(cells)."""
    first, count, size = picture.first, picture.num_cells, picture.cell_tokens
    users = [0] * (first + count)
    owner = [-1] * (first + count)
    empty = bytearray(first + count)
    for number, (_, cells, tokens) in enumerate(picture.holdings):
        filled = -(-tokens // size)
        for logical, cell in enumerate(cells):
            users[cell] += 1
            owner[cell] = number
            empty[cell] = logical >= filled
    names = [holding.id for holding in picture.holdings]

    def state(cell: int) -> tuple[State, str | None]:
        if users[cell] > 1:
            return "shared", None
        if users[cell]:
            return "reserved" if empty[cell] else "held", names[owner[cell]]
        cached = cell < len(picture.contents) and picture.contents[cell] is not None
        return "cached" if cached else "free", None

    extents = tuple(_extents(map(state, range(first, first + count)), first))
    totals: dict[State, int] = dict.fromkeys(STATES, 0)
    for extent in extents:
        totals[extent.state] += extent.cells
    table: tuple[TableRun, ...] = ()
    if table_of is not None:
        (holding,) = [one for one in picture.holdings if one.id == table_of]
        table = tuple(_table(holding, users, size))
    return PoolMap(
        step=step,
        time_s=time_s,
        cell_tokens=size,
        num_cells=count,
        cells=totals,
        requests=tuple(
            Resident(name, len(cells), sum(users[cell] > 1 for cell in cells), tokens)
            for name, cells, tokens in picture.holdings
        ),
        extents=extents,
        table_of=table_of,
        table=table,
    )


def _extents(states: Iterable[tuple[State, str | None]], first: int) -> Iterator[Extent]:
    for (state, request), same in groupby(states):
        cells = len(list(same))
        yield Extent(first, cells, state, request)
        first += cells


def _table(holding: Holding, users: Sequence[int], size: int) -> Iterator[TableRun]:
    cells = holding.cells
    begin = 0
    for i in range(1, len(cells) + 1):
        if i < len(cells) and cells[i] == cells[i - 1] + 1 and users[cells[i]] == users[cells[begin]]:
            continue
        slots = min(max(0, holding.tokens - begin * size), (i - begin) * size)
        yield TableRun(begin, cells[begin], i - begin, slots, users[cells[begin]])
        begin = i


class FullestStep:
    """Keeps the picture of the step with the most cells in use: the first of them; or of the step ``at_step``.

    A turn that is a run of steps is not seen: the engine must be one that takes steps one by one.
    """

    def __init__(self, engine: Pictured, at_step: int | None = None) -> None:
        self._engine = engine
        self._at_step = at_step
        self._fewest_free: int | None = None
        self.picture: PoolPicture | None = None
        self.step = self.start = 0
        #: The first and the last step that were seen, None before any.
        self.first_step: int | None = None
        self.last_step: int | None = None

    def __call__(self, record: StepRecord) -> None:
        """Look at a step that was just taken."""
        turn, step = record.turn, record.step
        if turn is None:
            return
        assert not isinstance(turn, DecodeRun), "steps are observed one by one"
        self.last_step = step
        if self.first_step is None:
            self.first_step = step
        if self._at_step is None:
            wanted = self._fewest_free is None or turn.free_blocks < self._fewest_free
        else:
            wanted = step == self._at_step
        if wanted:
            self._fewest_free = turn.free_blocks
            self.step, self.start, self.picture = step, record.start, self._engine.picture(turn)
