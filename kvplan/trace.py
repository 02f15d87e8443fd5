"""Reading request traces: kvplan JSONL, Azure 2023 CSV, Mooncake JSONL and scenario files.

The format is told from the content, never from the file's name. Formats are described in docs/traces.md.
"""

from __future__ import annotations

import difflib
import json
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from io import BufferedReader
from operator import attrgetter, length_hint
from pathlib import Path

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
    Batch,
    columns,
    id_stands_twice,
    json_object,
    read_azure,
    read_kvplan,
    read_mooncake,
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
    still is an error. `to_dict` counts what was handed out so far; ``skipped_lines`` are of what was read so far.
    Iterating raises `InputError` with file:line of the first line that is wrong, and how many more are.
    """

    def __init__(
        self,
        path: str,
        format: str,
        lines: Lines,
        batches: Iterable[Batch],
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
        self._lines = lines
        self._batches = batches
        self._limit = limit
        self._rate_scale = rate_scale
        self._skip_bad_lines = skip_bad_lines
        self._reorder = reorder
        self._samples = samples
        self._num_read = 0  # good rows, those that are held included
        #: The first of the bad lines, if they are errors, and how many there are.
        self._error: InputError | None = None
        self._num_bad = 0
        #: Requests that are being handed out, what is left of them, and how many of them the sums know.
        self._ready: list[Request] = []
        self._left = iter(self._ready)
        self._num_summed = 0
        self._count = 0
        self._input_tokens = 0
        self._output_tokens = 0
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
        """The ``trace`` block of the JSON contract, of what was handed out so far."""
        self._sum_up()
        span = self._last - (self._first or 0)
        return {
            "path": self.path,
            "format": self.format,
            "requests": self._count,
            "input_tokens": self._input_tokens,
            "output_tokens": self._output_tokens,
            "duration_s": None if self.step_numbered else span / PICOSECONDS,
            "skipped_lines": self.skipped_lines,
        }

    def __iter__(self) -> Iterator[Request]:
        if self._first is not None:
            raise RuntimeError("a trace is read once")
        top, bottom = self._rate_scale.numerator, self._rate_scale.denominator
        origin: int | None = None if self.format == "azure" else 0
        for ready in self._in_order(self._good_rows()):
            if origin is None:
                origin = ready[0].arrival  # wall-clock times: the trace's zero is its first request
            if origin or top != bottom:
                ready[:] = [r.sent_at((r.arrival - origin) * bottom // top) for r in ready]
            if self._samples is not None:
                ready[:] = [r._replace(samples=self._samples) for r in ready]
            if self._first is None:
                self._first = ready[0].arrival
            self._ready, self._left, self._num_summed = ready, iter(ready), 0
            yield from self._left
            self._sum_up()
            ready.clear()  # they need not be held while the next are read
        if self._first is None:
            raise InputError(
                "the trace holds no request", where=self.path, hint="give a trace with at least one line"
            )

    def _sum_up(self) -> None:
        """Take what was handed out since the last time into the sums."""
        new = self._ready[self._num_summed : len(self._ready) - length_hint(self._left)]
        if new:
            prompts, answers = sum(r.input_tokens for r in new), sum(r.output_tokens * r.samples for r in new)
            self._num_summed += len(new)
            self._count += len(new)
            self._input_tokens += prompts
            self._output_tokens += answers
            self._last = new[-1].arrival

    def _in_order(self, lists: Iterator[list[Request]]) -> Iterator[list[Request]]:
        """Requests by arrival, ties as in the file: of twice as many as are held, the earlier half goes on.

        O(n) where they are in order already.
        """
        held: list[Request] = []
        latest: int | None = None
        for batch in _of_size(lists, self._reorder):
            held += batch
            held.sort(key=_ARRIVAL)
            if latest is not None and held[0].arrival < latest:
                raise InputError(
                    f"request {quoted(held[0].id)} arrives before others that stand more than "
                    f"{self._reorder:,} lines earlier",
                    where=self.path,
                    hint="sort the trace by arrival",
                )
            ready = held[: -self._reorder] if self._reorder else []
            if ready:
                latest = ready[-1].arrival
                del held[: len(ready)]
                yield ready
        if held:
            yield held

    def _good_rows(self) -> Iterator[list[Request]]:
        """Good rows as they are read; the first bad one is an error that counts the rest, unless they are skipped."""
        ids = _Ids()
        for batch in self._batches:
            yield self._all_rows(batch, ids) or self._rows_one_by_one(batch, ids)
            if self._num_read == self._limit:
                break
        if self._error is not None:
            error, more = self._error, self._num_bad - 1
            what = error.what + (f"; {more} more bad line{'s' if more > 1 else ''}" if more else "")
            raise InputError(what, where=error.where, hint=error.hint)
        if ids.some_twice():
            raise InputError("an id stands twice", where=self.path, hint="give each request an id of its own")

    def _all_rows(self, batch: Batch, ids: _Ids) -> list[Request]:
        """The rows of a batch if nothing is wrong with any and the limit lets all of them in; else none."""
        over = self._limit is not None and self._num_read + len(batch.items) > self._limit
        if over or batch.are_lines or self._error:
            return []
        request_of = batch.request
        try:
            rows = [request_of(item, number) for number, item in enumerate(batch.items, batch.first)]
        except BadLine:
            return []
        if not ids.add_all([row.id for row in rows]):
            return []
        self._num_read += len(rows)
        return rows

    def _rows_one_by_one(self, batch: Batch, ids: _Ids) -> list[Request]:
        """A batch's good rows up to the limit, or up to the first bad line if that is an error; notes the bad ones."""
        rows: list[Request] = []
        for number, item in enumerate(batch.items, batch.first):
            try:
                row = batch.request(item, number)
                ids.add(row.id)
            except BadLine as bad:
                if not (batch.are_lines and item.isspace()):
                    self._note_bad(bad, number)
                continue
            if self._error is None:
                rows.append(row)
            self._num_read += 1
            if self._num_read == self._limit:
                break
        return rows

    def _note_bad(self, bad: BadLine, number: int) -> None:
        if self._skip_bad_lines:
            self.skipped_lines += 1
            return
        self._num_bad += 1
        if self._error is None:
            self._error = InputError(str(bad), where=f"{self.path}:{number}", hint=bad.hint)


class _Ids:
    """The ids so far: exact up to `_EXACT_IDS`, then 8 bytes each, looked at when all are there."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._hashes = array("q")

    def add(self, name: str) -> None:
        """Take in an id; raises `BadLine` if it is known to have come before."""
        if self._hashes:
            self._hashes.append(hash(name))
            return
        names = self._names
        if name in names:
            raise id_stands_twice(name)
        names.add(name)
        if len(names) > _EXACT_IDS:
            self._hashes.extend(map(hash, names))
            names.clear()

    def add_all(self, names: list[str]) -> bool:
        """Take in many ids, or none of them (False) if each is to be added by itself."""
        if self._hashes:
            self._hashes.extend(map(hash, names))
            return True
        new = set(names)
        if (
            len(new) < len(names)
            or len(self._names) + len(new) > _EXACT_IDS
            or not self._names.isdisjoint(new)
        ):
            return False
        self._names |= new
        return True

    def some_twice(self) -> bool:
        """Whether two of many ids are equal (by 64 bits: of a million different ones, with a chance of 3e-8)."""
        parts = [array("q") for _ in range(64)]  # so that no set is large
        for hashed in self._hashes:
            parts[hashed & 63].append(hashed)
        return any(len(set(part)) < len(part) for part in parts)


_ARRIVAL = attrgetter("arrival")


def _of_size(lists: Iterator[list[Request]], size: int | None) -> Iterator[list[Request]]:
    """The same requests in lists of ``size``, the last shorter; in one without a size."""
    waiting: list[Request] = []
    for some in lists:
        waiting += some
        while size is not None and len(waiting) >= size:
            yield waiting[:size]
            del waiting[:size]
    if waiting:
        yield waiting


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
    batches: Iterable[Batch]
    try:
        first = lines.peek()
        if format == "auto":
            format = _recognise(first, lines)
        if format == "scenario":
            scenario, requests = read_scenario(lines.text(), lines.name)
            batches = [Batch(1, requests, lambda request, _: request)]
        else:
            if format == "azure" and columns(first) == AZURE_COLUMNS:
                lines.skip()
            batches = _READERS[format](lines)
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
        lines,
        batches,
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


def _open(source: str) -> BufferedReader:
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


_READERS = {"kvplan": read_kvplan, "azure": read_azure, "mooncake": read_mooncake}
