"""Reading request traces: kvplan JSONL, Azure 2023 CSV, Mooncake JSONL and scenario files.

The format is told from the content, never from the file's name. Formats are described in docs/traces.md.
"""

from __future__ import annotations

import difflib
import json
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice, pairwise
from pathlib import Path
from typing import BinaryIO

from kvplan.core.engine import SchedulerConfig, quoted
from kvplan.core.request import PICOSECONDS, Request
from kvplan.data import resource
from kvplan.errors import InputError, unknown_name, unreadable
from kvplan.inputs import open_input
from kvplan.scenario import read_scenario
from kvplan.trace_lines import Lines
from kvplan.trace_rows import (
    AZURE_COLUMNS,
    KVPLAN_KEYS,
    BadLine,
    azure_row,
    columns,
    id_stands_twice,
    json_object,
    kvplan_row,
    mooncake_row,
)

FORMATS = ("kvplan", "azure", "mooncake", "scenario")

#: Requests that may be out of order by so many places; as many again are held while they are sorted.
_REORDER = 1 << 16
#: Ids that are kept as they are to tell doubles at once.
_EXACT_IDS = 1 << 17


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace in order of arrival. ``scenario`` holds the settings that a scenario file brings.

    Arrivals are picoseconds from the trace's own zero, or step indices with ``step_numbered``.
    """

    path: str
    format: str
    requests: list[Request]
    skipped_lines: int = 0
    step_numbered: bool = False
    scenario: SchedulerConfig | None = None

    def to_dict(self) -> dict[str, object]:
        """The ``trace`` block of the JSON contract."""
        span = self.requests[-1].arrival - self.requests[0].arrival if self.requests else 0
        return {
            "path": self.path,
            "format": self.format,
            "requests": len(self.requests),
            "input_tokens": sum(r.input_tokens for r in self.requests),
            "output_tokens": sum(r.output_tokens for r in self.requests),
            "duration_s": None if self.step_numbered else span / PICOSECONDS,
            "skipped_lines": self.skipped_lines,
        }


class TraceStream:
    """A trace that is read while it is replayed: iterate once, in order of arrival.

    Up to `_REORDER` requests are held, so that those which arrive out of order find their place; one that comes later
    still is an error. The counts, ``skipped_lines`` among them, are of what was read so far. Iterating raises
    `InputError` with file:line of the first line that is wrong, and how many more are.
    """

    def __init__(
        self,
        path: str,
        format: str,
        rows: Iterator[Request | BadLine],
        lines: Lines,
        *,
        limit: int | None,
        rate_scale: Fraction,
        skip_bad_lines: bool,
        reorder: int | None,
        samples: int | None = None,
        step_numbered: bool = False,
        scenario: SchedulerConfig | None = None,
    ) -> None:
        self.path = path
        self.format = format
        self.step_numbered = step_numbered
        self.scenario = scenario
        self.skipped_lines = 0
        self.count = 0
        self.input_tokens = 0
        self.output_tokens = 0
        self._rows = rows
        self._lines = lines
        self._limit = limit
        self._rate_scale = rate_scale
        self._skip_bad_lines = skip_bad_lines
        self._reorder = reorder
        self._samples = samples
        self._num_read = 0  # good rows, those that are held included
        self._first: int | None = None
        self._last = 0

    @property
    def expected(self) -> int | None:
        """How many requests there will be, going by the bytes read so far; None where a file's size is not known."""
        share = self._lines.share_read
        if not share:
            return None
        expected = round(self._num_read / share)
        return expected if self._limit is None else min(expected, self._limit)

    def close(self) -> None:
        """Let go of the file before the end."""
        self._lines.close()

    def to_dict(self) -> dict[str, object]:
        """The ``trace`` block of the JSON contract, of what was read so far."""
        span = self._last - (self._first or 0)
        return {
            "path": self.path,
            "format": self.format,
            "requests": self.count,
            "input_tokens": self.input_tokens,
            "output_tokens": self.output_tokens,
            "duration_s": None if self.step_numbered else span / PICOSECONDS,
            "skipped_lines": self.skipped_lines,
        }

    def __iter__(self) -> Iterator[Request]:
        if self._first is not None:
            raise RuntimeError("a trace is read once")
        top, bottom = self._rate_scale.numerator, self._rate_scale.denominator
        origin: int | None = None if self.format == "azure" else 0
        for request in self._in_order(self._good_rows()):
            if origin is None:
                origin = request.arrival  # wall-clock times: the trace's zero is its first request
            moved = request
            if origin or top != bottom:
                moved = request.sent_at((request.arrival - origin) * bottom // top)
            if self._samples is not None:
                moved = moved._replace(samples=self._samples)
            if self._first is None:
                self._first = moved.arrival
            self._last = moved.arrival
            self.count += 1
            self.input_tokens += moved.input_tokens
            self.output_tokens += moved.output_tokens * moved.samples
            yield moved
        if self._first is None:
            raise InputError(
                "the trace holds no request", where=self.path, hint="give a trace with at least one line"
            )

    def _in_order(self, requests: Iterator[Request]) -> Iterator[Request]:
        """Requests by arrival, ties as in the file: of twice as many as are held, the earlier half goes on.

        O(n) where they are in order already.
        """
        held: list[Request] = []
        latest = 0
        for batch in _batches(requests, self._reorder):
            held += batch
            held.sort(key=_arrival)
            if held[0].arrival < latest:
                raise InputError(
                    f"request {quoted(held[0].id)} arrives before others that stand more than "
                    f"{self._reorder:,} lines earlier",
                    where=self.path,
                    hint="sort the trace by arrival",
                )
            ready = held[: -self._reorder] if self._reorder else []
            if ready:
                yield from ready
                latest = ready[-1].arrival
                del held[: len(ready)]
        yield from held

    def _good_rows(self) -> Iterator[Request]:
        """Good rows; the first bad one is an error that counts the rest, unless bad ones are skipped."""
        ids = _Ids()
        for row in self._rows:
            if isinstance(row, Request) and ids.add(row.id):
                self._num_read += 1
                yield row
                if self._num_read == self._limit:
                    break
                continue
            problem = row if isinstance(row, BadLine) else id_stands_twice(row.id)
            if not self._skip_bad_lines:
                raise self._bad_line(problem, ids, self._limit and self._limit - self._num_read)
            self.skipped_lines += 1
        if ids.some_twice():
            raise InputError("an id stands twice", where=self.path, hint="give each request an id of its own")

    def _bad_line(self, problem: BadLine, ids: _Ids, left: int | None) -> InputError:
        """The error for a bad line, which says how many more there are before the limit."""
        where = f"{self.path}:{self._lines.number}"
        more = 0
        for row in self._rows:
            if isinstance(row, Request) and ids.add(row.id):
                if left is not None:
                    left -= 1
                    if left <= 0:
                        break
            else:
                more += 1
        what = str(problem)
        if more:
            what += f"; {more} more bad line{'s' if more > 1 else ''}"
        return InputError(what, where=where, hint=problem.hint)


class _Ids:
    """The ids so far: exact up to `_EXACT_IDS`, then 8 bytes each, looked at when all are there."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._hashes = array("q")

    def add(self, name: str) -> bool:
        """Take in an id; False if it is known to have come before."""
        if self._hashes:
            self._hashes.append(hash(name))
            return True
        if name in self._names:
            return False
        self._names.add(name)
        if len(self._names) > _EXACT_IDS:
            self._hashes.extend(map(hash, self._names))
            self._names.clear()
        return True

    def some_twice(self) -> bool:
        """Whether two of many ids are equal (by 64 bits: of a million different ones, with a chance of 3e-8)."""
        ordered = sorted(self._hashes)
        return any(one == other for one, other in pairwise(ordered))


def _arrival(request: Request) -> int:
    return request.arrival


def _batches(requests: Iterator[Request], size: int | None) -> Iterator[list[Request]]:
    """Lists of ``size`` requests each, the last shorter; one of all without a size."""
    while batch := list(islice(requests, size)):
        yield batch


def read_trace(
    source: str,
    *,
    format: str = "auto",
    limit: int | None = None,
    rate_scale: Fraction = Fraction(1),
    skip_bad_lines: bool = False,
) -> Trace:
    """Read a whole trace, however its requests are ordered; arguments as for `open_trace`."""
    stream = open_trace(
        source,
        format=format,
        limit=limit,
        rate_scale=rate_scale,
        skip_bad_lines=skip_bad_lines,
        reorder=None,
    )
    requests = list(stream)
    return Trace(
        stream.path, stream.format, requests, stream.skipped_lines, stream.step_numbered, stream.scenario
    )


def open_trace(
    source: str,
    *,
    format: str = "auto",
    limit: int | None = None,
    rate_scale: Fraction = Fraction(1),
    skip_bad_lines: bool = False,
    reorder: int | None = _REORDER,
    samples: int | None = None,
) -> TraceStream:
    """Open a trace: a file, a shipped workload's name or ``-`` (standard input).

    ``limit`` keeps the first requests of the file, ``rate_scale`` 2 makes them arrive twice as fast, ``samples``
    gives each request so many answers, whatever the file says. Raises `InputError` for what the beginning of the
    file tells.
    """
    if format not in ("auto", *FORMATS):
        raise unknown_name("trace format", format, ("auto", *FORMATS), where="--format")
    lines = Lines(source, _open(source))
    scenario: SchedulerConfig | None = None
    rows: Iterator[Request | BadLine]
    try:
        first = lines.peek()
        if format == "auto":
            format = _recognise(first, lines)
        if format == "scenario":
            scenario, requests = read_scenario(lines.text(), lines.name)
            rows = iter(requests)
        else:
            rows = _READERS[format](lines)
    except InputError:
        lines.close()
        raise
    if format == "scenario" and rate_scale != 1:
        raise InputError(
            "step-numbered arrivals have no rate to scale", where="--rate-scale", hint="leave it out"
        )
    return TraceStream(
        lines.name,
        format,
        rows,
        lines,
        limit=limit,
        rate_scale=rate_scale,
        skip_bad_lines=skip_bad_lines,
        reorder=reorder,
        samples=samples,
        step_numbered=format == "scenario",
        scenario=scenario,
    )


def to_json_line(request: Request) -> str:
    """A request as one line of kvplan JSONL. Arrivals must be picoseconds."""
    row: dict[str, object] = {
        "id": request.id,
        "arrival_s": request.arrival / PICOSECONDS,
        "input_tokens": request.input_tokens,
        "output_tokens": request.output_tokens,
    }
    if request.priority:
        row["priority"] = request.priority
    if request.samples > 1:
        row["n"] = request.samples
    if request.abort is not None:
        row["abort_s"] = request.abort / PICOSECONDS
    if request.content:
        row["content"] = [list(segment) for segment in request.content]
    return json.dumps(row, separators=(",", ":"))


def _open(source: str) -> BinaryIO:
    try:
        if source in workload_names() and not Path(source).exists():
            return (resource("workloads") / f"{source}.jsonl").open("rb")
        return open_input(source)
    except OSError as error:
        near = difflib.get_close_matches(source, workload_names(), n=1)
        names = ", ".join(workload_names())
        raise unreadable(
            error,
            what="the trace",
            where=source if len(source) <= 200 else f"{source[:200]}...",
            hint=(f"did you mean {near[0]}? " if near else "")
            + f"give a file, - for standard input, or a shipped workload ({names})",
        ) from error


def workload_names() -> list[str]:
    """Names of the workloads that ship with kvplan."""
    return sorted(path.stem for path in resource("workloads").glob("*.jsonl"))


def _recognise(first: str, lines: Lines) -> str:
    if columns(first) == AZURE_COLUMNS:
        return "azure"
    if first.lstrip().startswith("{"):
        try:
            row = json_object(first)
        except BadLine:
            # An object that goes on over several lines is a scenario file, or a line that is cut.
            return "scenario" if '"config"' in first or not first.rstrip().endswith("}") else "kvplan"
        if {"timestamp", "input_length"} <= row.keys():
            return "mooncake"
        if {"config", "requests"} <= row.keys():
            return "scenario"
        if row.keys() & KVPLAN_KEYS:
            return "kvplan"
    raise InputError(
        f"no trace format that kvplan knows: the first line is {quoted(first.strip())}",
        where=f"{lines.name}:{lines.number + 1}",
        hint=f"known formats are {', '.join(FORMATS)}; --format names one",
    )


def _each_line(lines: Lines, parse: Callable[[str, int], Request]) -> Iterator[Request | BadLine]:
    for raw in lines:
        try:
            text = raw.decode()
        except UnicodeDecodeError as error:
            yield BadLine(f"not UTF-8: byte 0x{raw[error.start]:02x} at offset {error.start}")
            continue
        try:
            yield parse(text, lines.number)
        except BadLine as bad:
            yield bad


def _read_kvplan(lines: Lines) -> Iterator[Request | BadLine]:
    return _each_line(lines, kvplan_row)


def _read_mooncake(lines: Lines) -> Iterator[Request | BadLine]:
    return _each_line(lines, mooncake_row)


def _read_azure(lines: Lines) -> Iterator[Request | BadLine]:
    if columns(lines.peek()) == AZURE_COLUMNS:
        lines.skip()
    return _each_line(lines, azure_row)


_READERS: Mapping[str, Callable[[Lines], Iterator[Request | BadLine]]] = {
    "kvplan": _read_kvplan,
    "azure": _read_azure,
    "mooncake": _read_mooncake,
}
