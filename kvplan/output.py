"""Files that a run writes: each appears whole or not at all."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any, TextIO

from kvplan.core.engine import DecodeRun
from kvplan.core.metrics import RequestRecord, e2e_ticks, queue_ticks, tpot_ticks, ttft_ticks
from kvplan.core.request import seconds
from kvplan.core.simulate import StepRecord
from kvplan.errors import InputError
from kvplan.plots import Point, draw_timeline, require_matplotlib


def check_output_paths(paths: Mapping[str, str | None], *, sources: Sequence[str] = ()) -> None:
    """Refuse early what could not be written at the end: ``paths`` by option. Raises `InputError`.

    ``sources`` are files that the run reads, which it must not overwrite.
    """
    taken = {_resolved(source): f"the input {source}" for source in sources if source != "-"}
    for option, path in paths.items():
        if path is None:
            continue
        target = Path(path)
        try:
            is_folder, has_folder = target.is_dir(), target.parent.is_dir()
        except OSError as error:
            raise InputError(
                f'"{path[:60]}..." is no path: {error.strerror}', where=option, hint="give a shorter one"
            ) from error
        if is_folder:
            raise InputError(f'"{path}" is a folder', where=option, hint="name a file in it")
        if not has_folder:
            raise InputError(
                f'the folder of "{path}" does not exist', where=option, hint=f'make "{target.parent}" first'
            )
        if not os.access(target.parent, os.W_OK):
            raise InputError(
                f'"{target.parent}" cannot be written to', where=option, hint="choose another folder"
            )
        if target.exists() and not os.access(target, os.W_OK):
            raise InputError(f'"{path}" cannot be written to', where=option, hint="choose another name")
        owner = taken.setdefault(_resolved(path), option)
        if owner != option:
            raise InputError(
                f'"{path}" is {owner} too', where=option, hint="give each output a file of its own"
            )


def _resolved(path: str) -> str:
    return os.path.realpath(path)


@contextmanager
def whole_file(path: str) -> Iterator[TextIO]:
    """A text file that takes its place only when the block ends without an error."""
    with _whole(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        yield file


@contextmanager
def _whole(path: str) -> Iterator[Path]:
    """A temporary file that takes its place only when the block ends without an error.

    What is no regular file, such as ``/dev/null`` or a pipe, is given as it is.
    """
    target = Path(path)
    if target.exists() and not target.is_file():  # a device or a pipe is written to, never replaced
        yield target
        return
    target = Path(os.path.realpath(path))  # through a link to what it names
    temporary = target.with_name(f".{target.name[:64]}.{os.urandom(8).hex()}{target.suffix[:16]}")
    try:  # an interrupt may come at any time, also right after the file is there
        temporary.touch(mode=0o600, exist_ok=False)
        yield temporary
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


class RequestWriter:
    """Writes one CSV row a request when it ends: what it asked, what became of it, its times in seconds."""

    def __init__(self, file: TextIO, scale: Fraction | None) -> None:
        self._scale = scale
        self._writer = csv.writer(
            file, lineterminator="\n", quoting=csv.QUOTE_NONNUMERIC
        )  # ids hold anything
        self._writer.writerow(
            [
                "id",
                "status",
                "arrival_s",
                "input_tokens",
                "output_tokens",
                "generated_tokens",
                "hit_tokens",
                "resumed_hit_tokens",
                "preemptions",
                "peak_blocks",
                "queue_s",
                "ttft_s",
                "tpot_s",
                "e2e_s",
            ]
        )

    def __call__(self, r: RequestRecord) -> None:
        """Write one request."""
        status = r.rejected_for or ("finished" if r.finished is not None else "unfinished")
        self._writer.writerow(
            [
                _cell(r.request.id),
                status,
                self._time(r.request.arrival),
                r.request.input_tokens,
                r.request.output_tokens,
                r.output_tokens,
                r.hit_tokens,
                r.resumed_hit_tokens,
                r.preemptions,
                r.peak_blocks,
                self._time(queue_ticks(r)),
                self._time(ttft_ticks(r)),
                self._time(tpot_ticks(r)),
                self._time(e2e_ticks(r)),
            ]
        )

    def _time(self, ticks: float | None) -> float | str:
        return "" if ticks is None or self._scale is None else seconds(ticks, self._scale)


def _cell(text: str) -> str:
    """A name that no spreadsheet takes for a formula."""
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text


class EventWriter:
    """Writes one JSON object a step; empty lists are left out. ``detail`` adds block ids."""

    def __init__(self, file: TextIO, scale: Fraction | None, *, detail: bool) -> None:
        self._file = file
        self._scale = scale
        self._detail = detail

    def __call__(self, record: StepRecord) -> None:
        """Write one step."""
        line: dict[str, object] = {"step": record.step}
        scale = self._scale
        line["time_s"] = None if scale is None else seconds(record.start, scale)
        lists: list[tuple[str, list[object]]] = [
            ("arrived", [r.id for r in record.arrived]),
            ("rejected", [r.id for r in record.rejected]),
        ]
        turn = record.turn
        assert not isinstance(turn, DecodeRun), "steps are observed one by one"
        if turn is not None:
            lists += [
                ("scheduled", [[s.id, tokens] for s, tokens in turn.scheduled]),
                ("admitted", [s.id for s in turn.admitted]),
                ("resumed", [s.id for s in turn.resumed]),
                ("preempted", [s.id for s in turn.preempted]),
                ("preemptions", [p._asdict() for p in turn.preemptions]),
                ("finished", [s.id for s in turn.finished]),
                ("prefix_hits", [[s.id, tokens] for s, tokens in turn.prefix_hits]),
            ]
        line.update((name, value) for name, value in lists if value)
        if turn is not None:
            line["free_blocks"] = turn.free_blocks
            line["free_blocks_end"] = turn.free_blocks_end
            line["running"] = turn.running
            line["waiting"] = turn.waiting
            if self._detail:
                if turn.new_blocks:
                    line["blocks"] = {s.id: blocks for s, blocks in turn.new_blocks.items()}
                if turn.evicted_blocks:
                    line["evicted_blocks"] = turn.evicted_blocks
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")


#: Points of a picture: more than it has columns only cost time and file size.
_MOST_POINTS = 4_096


class Timeline:
    """The KV pool and the queues after each step's scheduling: a row of a CSV file each, or a picture."""

    def __init__(self, path: str, usable_blocks: int, scale: Fraction | None) -> None:
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
                writer.writerow(["step", "time_s", "used_blocks", "utilization", *Point._fields[3:]])
                self._draw = lambda point: writer.writerow(self._row(point))
                yield self
            return
        yield self
        with _whole(self._path) as temporary:
            draw_timeline(temporary, [*self._points, *self._pending], self._usable, self._scale)

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
            )
        )

    def _note_run(self, record: StepRecord, run: DecodeRun[Any]) -> None:
        free, cached, start = run.free_blocks, run.cached_blocks, record.start
        for i in range(run.steps):
            if i:
                free -= run.takes[i]
                cached = min(cached, free)  # blocks without content are taken first
                start += record.first + record.growth * (i - 1)
            used, tokens = self._usable - free, run.decoders
            self._draw(
                Point(
                    record.step + i, start, used, cached, run.running, run.waiting, tokens, 0, self._hit_rate
                )
            )

    @property
    def _hit_rate(self) -> float | None:
        return self._hit / self._queried if self._queried else None

    def _row(self, point: Point) -> list[object]:
        time_s = "" if self._scale is None else seconds(point.start, self._scale)
        used = point.used_blocks
        hit_rate = "" if point.hit_rate is None else point.hit_rate
        return [point.step, time_s, used, used / self._usable, *point[3:-1], hit_rate]

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
