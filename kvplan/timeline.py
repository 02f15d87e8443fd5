"""`--timeline`: the KV pool and the queues over time."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from itertools import accumulate
from typing import Any

from kvplan.core.engine import DecodeRun
from kvplan.core.request import seconds
from kvplan.core.simulate import StepRecord
from kvplan.errors import InputError
from kvplan.output import whole_file, whole_path
from kvplan.plots import Point, draw_timeline, require_matplotlib

#: Points of a picture: more than it has columns only cost time and file size.
_MOST_POINTS = 4_096


class Timeline:
    """The KV pool and the queues after each step's scheduling: a row of a CSV file each, or a picture.

    ``group_kinds`` are the kinds of the cache groups where there is more than one full group; a block has
    ``block_slots`` slots.
    """

    def __init__(
        self,
        path: str,
        usable_blocks: int,
        scale: Fraction | None,
        *,
        group_kinds: Sequence[str] = (),
        block_slots: int = 1,
    ) -> None:
        """Takes ``.csv``, ``.png`` and ``.svg``; raises `InputError` for any other ending."""
        if path.endswith((".png", ".svg")):
            require_matplotlib(path)
        elif not path.endswith(".csv"):
            raise InputError(
                f'"{path}" ends in no known way', where="--timeline", hint="name it .csv, .png or .svg"
            )
        self._path = path
        self._usable = usable_blocks
        self._scale = scale
        self._group_kinds = group_kinds
        self._block_slots = block_slots
        self._queried = self._hit = 0
        self._draw: Callable[[Point], None] = self._keep
        self._points: list[Point] = []
        self._per_point = 1
        self._pending: list[Point] = []

    @contextmanager
    def writing(self) -> Iterator[Timeline]:
        """Write the file while the block runs; it appears when the block ends without an error."""
        if self._path.endswith(".csv"):
            with whole_file(self._path) as file:
                writer = csv.writer(file, lineterminator="\n")
                writer.writerow(self._header())
                self._draw = lambda point: writer.writerow(self._row(point))
                yield self
            return
        yield self
        with whole_path(self._path) as temporary:
            points = [*self._points, *self._pending]
            draw_timeline(temporary, points, self._usable, self._scale, self._group_kinds)

    def __call__(self, record: StepRecord) -> None:
        """Note the steps of a turn."""
        turn = record.turn
        if turn is None:
            return
        if isinstance(turn, DecodeRun):
            self._note_run(record, turn)
            return
        for sequence, tokens in turn.prefix_hits:
            if not sequence.num_preemptions:
                self._queried += sequence.request.input_tokens
                self._hit += tokens
        self._draw(
            Point(
                record.step,
                record.start,
                self._usable - turn.free_blocks,
                turn.cached_blocks,
                turn.running,
                turn.waiting,
                turn.scheduled_tokens,
                len(turn.preempted),
                self._hit_rate,
                turn.behind_slots,
                turn.group_blocks,
            )
        )

    def _note_run(self, record: StepRecord, run: DecodeRun[Any]) -> None:
        assert record.times is not None, "a run has them"
        starts = accumulate(record.times.ticks(run.steps), initial=record.start)
        levels, hit_rate = run.levels, self._hit_rate
        for i, (start, (free, cached)) in enumerate(zip(starts, run.pool_after(), strict=False)):
            used, tokens = self._usable - free, run.decoders
            point = Point(record.step + i, start, used, cached, run.running, run.waiting, tokens, 0, hit_rate)
            if levels is not None:
                blocks = tuple(column[i] for column in levels.group_blocks)
                point = point._replace(behind_slots=levels.behind_slots[i], group_blocks=blocks)
            self._draw(point)

    @property
    def _hit_rate(self) -> float | None:
        return self._hit / self._queried if self._queried else None

    def _header(self) -> list[str]:
        names = ["step", "time_s", "used_blocks", "utilization", *Point._fields[3:9]]
        if self._group_kinds:
            names.append("behind_window_share")
            names += [f"group_{number}_{kind}_blocks" for number, kind in enumerate(self._group_kinds)]
        return names

    def _row(self, point: Point) -> list[object]:
        time_s = "" if self._scale is None else seconds(point.start, self._scale)
        used = point.used_blocks
        hit_rate = "" if point.hit_rate is None else point.hit_rate
        row: list[object] = [point.step, time_s, used, used / self._usable, *point[3:8], hit_rate]
        if self._group_kinds:
            row.append(point.behind_slots / (used * self._block_slots) if used else 0.0)
            row += point.group_blocks or [used]
        return row

    def _keep(self, point: Point) -> None:
        """Keep what a picture can show: of the steps that fall on one point the fullest, and all preemptions."""
        self._pending.append(point)
        if len(self._pending) < self._per_point:
            return
        self._points.append(_fullest(self._pending))
        self._pending = []
        if len(self._points) >= 2 * _MOST_POINTS:
            pairs = zip(self._points[::2], self._points[1::2], strict=True)
            self._points = [_fullest(pair) for pair in pairs]
            self._per_point *= 2


def _fullest(points: Sequence[Point]) -> Point:
    fullest = max(points, key=lambda point: point.used_blocks)
    return fullest._replace(preempted=sum(point.preempted for point in points))
