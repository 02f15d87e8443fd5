"""Reading request traces: kvplan JSONL, Azure 2023 CSV, Mooncake JSONL and scenario files.

The format is told from the content, never from the file's name. Formats are described in docs/traces.md.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import stat
import sys
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache, partial
from itertools import islice, pairwise
from pathlib import Path
from typing import BinaryIO, cast

from kvplan.core.drafts import METHODS, Drafting
from kvplan.core.engine import GroupKind, GroupSpec, SchedulerConfig, StateMode, quoted
from kvplan.core.request import MAX_SAMPLES, PICOSECONDS, Request, Segment
from kvplan.data import resource
from kvplan.errors import InputError, unknown_name, unreadable
from kvplan.inputs import open_input

FORMATS = ("kvplan", "azure", "mooncake", "scenario")

#: Beyond these a number is a mistake, not a workload.
_MAX_TOKENS = 10**9
_MAX_BLOCKS = 10**8
_MAX_ARRIVAL_S = 10**10
_MAX_GROUPS = 1024
_MAX_DRAFTS = 10**4
_MAX_STAGES = 10**4

_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_KVPLAN_KEYS = frozenset(
    {
        "id",
        "arrival_s",
        "abort_s",
        "input_tokens",
        "output_tokens",
        "priority",
        "n",
        "content",
        "hash_ids",
        "hash_block_size",
    }
)
#: Requests that may be out of order by so many places; as many again are held while they are sorted.
_REORDER = 1 << 16
#: What is longer is no trace, and is not read into memory.
_LONGEST_LINE = 1 << 25
_LARGEST_SCENARIO = 1 << 28
#: Ids that are kept as they are to tell doubles at once.
_EXACT_IDS = 1 << 17
#: Mooncake's hash ids stand for blocks of this many tokens (FAST25-release/traces of kvcache-ai/Mooncake).
_MOONCAKE_BLOCK_SIZE = 512


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
        rows: Iterator[Request | _BadLine],
        lines: _Lines,
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
            problem = row if isinstance(row, _BadLine) else _twice(row.id)
            if not self._skip_bad_lines:
                raise self._bad_line(problem, ids, self._limit and self._limit - self._num_read)
            self.skipped_lines += 1
        if ids.some_twice():
            raise InputError("an id stands twice", where=self.path, hint="give each request an id of its own")

    def _bad_line(self, problem: _BadLine, ids: _Ids, left: int | None) -> InputError:
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


class _BadLine(Exception):
    """A line that cannot be used: what is wrong with it and what would mend it."""

    def __init__(self, what: str, hint: str = "mend the line, or pass --skip-bad-lines") -> None:
        super().__init__(what)
        self.hint = hint


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
    lines = _Lines(source, _open(source))
    scenario: SchedulerConfig | None = None
    rows: Iterator[Request | _BadLine]
    try:
        first = lines.peek()
        if format == "auto":
            format = _recognise(first, lines)
        if format == "scenario":
            whole = _read_scenario(lines)
            scenario, rows = whole.scenario, iter(whole.requests)
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


# Lines


class _Lines:
    """The lines of a source with their numbers, from 1; blank ones are left out."""

    def __init__(self, source: str, file: BinaryIO) -> None:
        self.name = source
        self.number = 0
        self._file = file
        self._first: bytes | None = None
        self._size = _regular_size(file)
        self._read = 0

    @property
    def share_read(self) -> float | None:
        """Bytes read over the file's size; None for what is no regular file."""
        return min(1.0, self._read / self._size) if self._size else None

    def _raw_lines(self) -> Iterator[bytes]:
        """Lines as they are in the file; one without an end is not read to memory's end."""
        for raw in iter(partial(self._file.readline, _LONGEST_LINE + 1), b""):
            if len(raw) > _LONGEST_LINE:
                raise InputError(
                    f"a line is longer than {_LONGEST_LINE >> 20} MiB",
                    where=f"{self.name}:{self.number + 1}",
                    hint="give a trace with one request a line",
                )
            yield raw

    def peek(self) -> str:
        """The first line that is not blank, without consuming it."""
        if self._first is None:
            for raw in self._raw_lines():
                self._read += len(raw)
                if raw.strip():
                    self._first = raw.removeprefix(b"\xef\xbb\xbf")
                    break
                self.number += 1
            else:
                raise InputError(
                    "the trace is empty", where=self.name, hint="give a trace with at least one line"
                )
        return _decode(self._first, f"{self.name}:{self.number + 1}")

    def skip(self) -> None:
        """Leave out the line that was peeked at."""
        self.number += 1
        self._first = None

    def __iter__(self) -> Iterator[bytes]:
        try:
            if self._first is not None:
                self.number += 1
                yield self._first
            for raw in self._raw_lines():
                self.number += 1
                self._read += len(raw)
                if raw.strip():
                    yield raw
        finally:
            self.close()

    def close(self) -> None:
        """Let go of the file; standard input stays open."""
        if sys.stdin is None or self._file is not sys.stdin.buffer:
            self._file.close()

    def text(self) -> str:
        """All that is left, as one text."""
        raw = (self._first or b"") + self._file.read(_LARGEST_SCENARIO)
        self.close()
        if len(raw) >= _LARGEST_SCENARIO:
            raise InputError(
                f"a scenario of more than {_LARGEST_SCENARIO >> 20} MiB",
                where=self.name,
                hint="give a trace with one request a line",
            )
        return _decode(raw, self.name)


def _regular_size(file: BinaryIO) -> int | None:
    try:
        status = os.fstat(file.fileno())
    except (OSError, ValueError):  # no file behind it
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


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


def _decode(raw: bytes, where: str) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise InputError(
            f"not UTF-8: byte 0x{raw[error.start]:02x} at offset {error.start}",
            where=where,
            hint="give a text file in UTF-8",
        ) from error


def _recognise(first: str, lines: _Lines) -> str:
    if _columns(first) == _AZURE_COLUMNS:
        return "azure"
    if first.lstrip().startswith("{"):
        try:
            row = _parse_json(first)
        except _BadLine:
            # An object that goes on over several lines is a scenario file, or a line that is cut.
            return "scenario" if '"config"' in first or not first.rstrip().endswith("}") else "kvplan"
        if {"timestamp", "input_length"} <= row.keys():
            return "mooncake"
        if {"config", "requests"} <= row.keys():
            return "scenario"
        if row.keys() & _KVPLAN_KEYS:
            return "kvplan"
    raise InputError(
        f"no trace format that kvplan knows: the first line is {quoted(first.strip())}",
        where=f"{lines.name}:{lines.number + 1}",
        hint=f"known formats are {', '.join(FORMATS)}; --format names one",
    )


def _twice(request_id: str) -> _BadLine:
    return _BadLine(f"id {quoted(request_id)} stands twice", "give each request an id of its own")


def _each_line(lines: _Lines, parse: Callable[[str, int], Request]) -> Iterator[Request | _BadLine]:
    for raw in lines:
        try:
            text = raw.decode()
        except UnicodeDecodeError as error:
            yield _BadLine(f"not UTF-8: byte 0x{raw[error.start]:02x} at offset {error.start}")
            continue
        try:
            yield parse(text, lines.number)
        except _BadLine as bad:
            yield bad


# Formats


def _read_kvplan(lines: _Lines) -> Iterator[Request | _BadLine]:
    return _each_line(lines, _kvplan_row)


def _kvplan_row(text: str, number: int) -> Request:
    row = _parse_json(text)
    if not row.keys() <= _KVPLAN_KEYS:
        key = min(row.keys() - _KVPLAN_KEYS)
        near = difflib.get_close_matches(key, _KVPLAN_KEYS, n=1)
        known = f"did you mean {near[0]}?" if near else f"known: {', '.join(sorted(_KVPLAN_KEYS))}"
        raise _BadLine(f"unknown key {quoted(key)}", known)
    request = Request(
        _request_id(row.get("id", number)),
        _ticks(row.get("arrival_s"), "arrival_s", PICOSECONDS),
        _tokens(row.get("input_tokens"), "input_tokens"),
        _tokens(row.get("output_tokens"), "output_tokens"),
        _whole(row["priority"], "priority") if "priority" in row else 0,
        (),
        _samples(row["n"]) if "n" in row else 1,
    )
    if "abort_s" in row:
        abort = _ticks(row["abort_s"], "abort_s", PICOSECONDS)
        if abort < request.arrival:
            raise _BadLine(f"abort_s is {row['abort_s']}", "write a time from arrival_s on")
        request = request._replace(abort=abort)
    if "content" in row and "hash_ids" in row:
        raise _BadLine("content and hash_ids both say what the prompt holds", "give one of them")
    if "content" in row:
        return request._replace(content=_segments(row["content"], request.input_tokens))
    if "hash_ids" in row:
        if "hash_block_size" not in row:
            raise _BadLine("hash_ids without hash_block_size", "say how many tokens an id stands for")
        size = _tokens(row["hash_block_size"], "hash_block_size")
        return _with_hash_ids(request, row["hash_ids"], size)
    return request


def _read_mooncake(lines: _Lines) -> Iterator[Request | _BadLine]:
    return _each_line(lines, _mooncake_row)


def _mooncake_row(text: str, number: int) -> Request:
    row = _parse_json(text)
    request = Request(
        str(number),
        _ticks(row.get("timestamp"), "timestamp", PICOSECONDS // 1000),
        _tokens(row.get("input_length"), "input_length"),
        _tokens(row.get("output_length"), "output_length"),
    )
    return _with_hash_ids(request, row.get("hash_ids", []), _MOONCAKE_BLOCK_SIZE)


def _read_azure(lines: _Lines) -> Iterator[Request | _BadLine]:
    if _columns(lines.peek()) == _AZURE_COLUMNS:
        lines.skip()
    return _each_line(lines, _azure_row)


def _columns(text: str) -> tuple[str, ...]:
    return tuple(map(str.strip, text.split(",")))


def _azure_row(text: str, number: int) -> Request:
    cells = _columns(text)
    if len(cells) != len(_AZURE_COLUMNS):
        raise _BadLine(f"{len(cells)} columns instead of {len(_AZURE_COLUMNS)}: the line may be cut")
    time, context, generated = cells
    return Request(
        str(number),
        _wall_clock(time),
        _tokens(_digits(context, "ContextTokens"), "ContextTokens"),
        _tokens(_digits(generated, "GeneratedTokens"), "GeneratedTokens"),
    )


#: Seconds since 1970 with any number of fractional digits, with or without a zone (2023: seven digits and
#: none, 2024: a variable number and +00:00).
_TIME = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,12}))?(?:Z|\+00:00)?\Z")


def _wall_clock(text: str) -> int:
    match = _TIME.match(text)
    if not match:
        raise _BadLine(f"TIMESTAMP is {quoted(text)}, not a time such as 2023-11-16 18:17:03.9799600")
    second, fraction = match.groups("")
    try:
        since_1970 = _since_1970(second)
    except ValueError as error:
        raise _BadLine(f"TIMESTAMP is {quoted(text)}: {error}") from error
    return since_1970 * PICOSECONDS + int(fraction.ljust(12, "0"))


@lru_cache(64)  # neighbours share it
def _since_1970(second: str) -> int:
    return int(datetime.fromisoformat(second).replace(tzinfo=UTC).timestamp())


_READERS: Mapping[str, Callable[[_Lines], Iterator[Request | _BadLine]]] = {
    "kvplan": _read_kvplan,
    "azure": _read_azure,
    "mooncake": _read_mooncake,
}


def _read_scenario(lines: _Lines) -> Trace:
    """A scenario: settings and step-numbered requests in one JSON object."""
    try:
        document = _parse_json(lines.text())
        config = _scenario_config(document.get("config"))
    except _BadLine as bad:
        raise InputError(str(bad), where=lines.name, hint=bad.hint) from bad
    rows = document.get("requests")
    if not isinstance(rows, list):
        raise InputError("requests is missing or no list", where=lines.name, hint="give a list of requests")
    requests = []
    ids: set[str] = set()
    for place, row in enumerate(rows):
        try:
            request = _scenario_request(row)
        except _BadLine as bad:
            raise InputError(str(bad), where=f"{lines.name}, requests[{place}]", hint=bad.hint) from bad
        if request.id in ids:
            twice = _twice(request.id)
            raise InputError(str(twice), where=f"{lines.name}, requests[{place}]", hint=twice.hint)
        ids.add(request.id)
        requests.append(request)
    return Trace(lines.name, "scenario", requests, step_numbered=True, scenario=config)


_SCENARIO_IGNORED = frozenset({"model_runner"})  # V1 and V2 plan the same where both can


def _scenario_config(config: object) -> SchedulerConfig:
    if not isinstance(config, dict):
        raise _BadLine("config is missing or no object", "give the settings of the engine")
    settings = dict(config)
    for key in _SCENARIO_IGNORED:
        settings.pop(key, None)
    known = set(SchedulerConfig.__dataclass_fields__)
    for key in settings.keys() - known:
        near = difflib.get_close_matches(key, known, n=1)
        raise _BadLine(
            f"unknown setting {quoted(key)}", f"did you mean {near[0]}?" if near else "leave it out"
        )
    for key, kind in _SCENARIO_TYPES.items():
        if key in settings and (
            not isinstance(settings[key], kind) or (isinstance(settings[key], bool) and kind is not bool)
        ):
            raise _BadLine(f"config.{key} is {_shown(settings[key])}", "write a value of the right kind")
    if "groups" in settings:
        settings["groups"] = _scenario_groups(settings["groups"])
    if "speculative" in settings:
        settings["speculative"] = _scenario_drafting(settings["speculative"])
    try:
        parsed = SchedulerConfig(**settings)
    except TypeError as error:
        missing = ", ".join(re.findall(r"'(\w+)'", str(error)))
        raise _BadLine(f"config lacks {missing}", "give every setting of the engine") from error
    for key in ("num_gpu_blocks", "block_size", "max_num_batched_tokens", "max_num_seqs", "max_model_len"):
        if not 0 < getattr(parsed, key) <= (_MAX_BLOCKS if key == "num_gpu_blocks" else _MAX_TOKENS):
            raise _BadLine(f"config.{key} is {getattr(parsed, key)}", "write a number above 0")
    if parsed.num_gpu_blocks < 2:
        raise _BadLine(
            "config.num_gpu_blocks is 1", "write 2 or more: block 0 is the null block and never used"
        )
    if not 0 <= parsed.watermark < 1:
        raise _BadLine(f"config.watermark is {parsed.watermark}", "write a share from 0 to below 1")
    if parsed.long_prefill_token_threshold < 0:
        raise _BadLine(
            f"config.long_prefill_token_threshold is {parsed.long_prefill_token_threshold}", "write 0 or more"
        )
    if parsed.max_num_active_seqs is not None and parsed.max_num_active_seqs < 1:
        raise _BadLine(
            f"config.max_num_active_seqs is {parsed.max_num_active_seqs}", "write null or 1 and more"
        )
    if not 0 < parsed.pipeline_parallel_size <= _MAX_STAGES:
        raise _BadLine(
            f"config.pipeline_parallel_size is {parsed.pipeline_parallel_size}",
            f"write a number from 1 to {_MAX_STAGES:,}",
        )
    if parsed.policy not in ("fcfs", "priority"):
        raise _BadLine(f"config.policy is {quoted(str(parsed.policy))}", "use fcfs or priority")
    return parsed


_SCENARIO_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "num_gpu_blocks": int,
    "block_size": int,
    "max_num_batched_tokens": int,
    "max_num_seqs": int,
    "max_model_len": int,
    "enable_prefix_caching": bool,
    "enable_chunked_prefill": bool,
    "long_prefill_token_threshold": int,
    "long_prefill_token_threshold_adaptive": bool,
    "policy": str,
    "watermark": (int, float),
    "scheduler_reserve_full_isl": bool,
    "max_num_active_seqs": (int, type(None)),
    "groups": list,
    "async_scheduling": bool,
    "pipeline_parallel_size": int,
    "speculative": (dict, type(None)),
}


def _scenario_groups(rows: list[object]) -> tuple[GroupSpec, ...]:
    """The groups of a scenario: each a kind with what that kind has."""
    if not 0 < len(rows) <= _MAX_GROUPS:
        raise _BadLine(f"config.groups has {len(rows)} entries", f"give 1 to {_MAX_GROUPS}")
    return tuple(map(_scenario_group, rows))


def _scenario_group(row: object) -> GroupSpec:
    kind = row.get("kind") if isinstance(row, dict) else None
    if not isinstance(row, dict) or not isinstance(kind, str) or kind not in _GROUP_KEYS:
        raise _BadLine(f"config.groups holds {_shown(row)}", f"kinds are {', '.join(_GROUP_KEYS)}")
    required, optional = _GROUP_KEYS[kind]
    if not required <= row.keys() <= {"kind", *required, *optional}:
        takes = ", ".join(sorted({*required, *optional}))
        raise _BadLine(f"config.groups holds {_shown(row)}", f"{kind} takes {takes}")

    def number(key: str) -> int | None:
        value = row.get(key)
        if value is not None and not 0 < _whole(value, key) <= _MAX_TOKENS:
            raise _BadLine(f"config.groups: {key} is {value}", "write a number above 0")
        return value

    block_size, window, chunk = number("block_size"), number("window") or 0, number("chunk") or 0
    if window == 1:
        raise _BadLine("config.groups: window is 1", "a window has 2 tokens or more")
    if kind != "mamba":
        return GroupSpec(cast("GroupKind", kind), block_size, window, chunk)
    mode = row["mode"]
    if mode not in ("none", "align"):
        raise _BadLine(f"config.groups: mode is {_shown(mode)}", "use none or align")
    return GroupSpec("state", block_size, mode=cast("StateMode", mode), checkpoint=number("checkpoint"))


#: By kind of group: the keys that it must have, and those it may have.
_GROUP_KEYS: Mapping[str, tuple[frozenset[str], frozenset[str]]] = {
    "full": (frozenset(), frozenset({"block_size"})),
    "sliding": (frozenset({"window"}), frozenset({"block_size"})),
    "chunked": (frozenset({"chunk"}), frozenset({"block_size"})),
    "mamba": (frozenset({"mode"}), frozenset({"block_size", "checkpoint"})),
}


def _scenario_drafting(row: dict[str, object] | None) -> Drafting | None:
    if row is None:
        return None
    method, count = row.get("method"), _whole(row.get("k"), "config.speculative.k")
    if not isinstance(method, str) or method not in METHODS or row.keys() != {"method", "k"}:
        raise _BadLine(f"config.speculative is {_shown(row)}", f"give k and a method: {', '.join(METHODS)}")
    if not 0 < count <= _MAX_DRAFTS:
        raise _BadLine(f"config.speculative.k is {count}", f"write a number from 1 to {_MAX_DRAFTS:,}")
    return Drafting(method, count)


_SCENARIO_REQUEST_KEYS = frozenset(
    {"id", "arrival_step", "prompt_tokens", "output_tokens", "priority", "content", "abort_step", "abort_mid"}
)


def _scenario_request(row: object) -> Request:
    if not isinstance(row, dict):
        raise _BadLine(f"a request is {_shown(row)}, not an object")
    for key in row.keys() - _SCENARIO_REQUEST_KEYS:
        raise _BadLine(f"not yet supported: {key}", f"known: {', '.join(sorted(_SCENARIO_REQUEST_KEYS))}")
    prompt = _whole(row.get("prompt_tokens"), "prompt_tokens")
    if not 0 <= prompt <= _MAX_TOKENS:
        raise _BadLine(f"prompt_tokens is {prompt}")
    arrival = _whole(row.get("arrival_step"), "arrival_step")
    if not 0 <= arrival <= _MAX_TOKENS:
        raise _BadLine(f"arrival_step is {arrival}")
    request = Request(
        _request_id(row.get("id")),
        arrival,
        prompt,
        _tokens(row.get("output_tokens"), "output_tokens"),
        _whole(row.get("priority", 0), "priority"),
    )
    if "abort_step" in row:
        abort = _whole(row["abort_step"], "abort_step")
        if not arrival <= abort <= _MAX_TOKENS:
            raise _BadLine(f"abort_step is {abort}", "write a step from arrival_step on")
        request = request._replace(abort=abort, abort_mid=_flag(row.get("abort_mid", False), "abort_mid"))
    elif "abort_mid" in row:
        raise _BadLine("abort_mid without abort_step", "say in which step")
    if "content" in row:
        return request._replace(content=_segments(row["content"], prompt))
    return request


# Fields


def _flag(value: object, field: str) -> bool:
    if not isinstance(value, bool):
        raise _BadLine(f"{field} is {_shown(value)}, not true or false")
    return value


#: What `json.loads` calls, without what it does around it for texts of other kinds.
_first_value = json.JSONDecoder().raw_decode


def _parse_json(text: str) -> dict[str, object]:
    try:
        row, end = _first_value(text) if text.startswith("{") else (None, 0)
        if text[end:] not in ("", "\n", "\r\n"):
            row = json.loads(text)
    except (ValueError, RecursionError) as error:
        if isinstance(error, RecursionError):
            raise _BadLine("not JSON: nested too deeply") from error
        cut = "" if text.rstrip().endswith("}") else ": the line may be cut"
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "a number is too long"
        raise _BadLine(f"not JSON: {reason}{cut}") from error
    if not isinstance(row, dict):
        raise _BadLine(f"{_shown(row)} instead of a JSON object")
    return row


def _request_id(value: object) -> str:
    if value is None:
        raise _BadLine("id is missing")
    if not _is_name(value):
        raise _BadLine(f"id is {_shown(value)}, not a text or whole number")
    return str(value)


def _is_name(value: object) -> bool:
    """Whether a value can name a request or a stream: a whole number, or text that UTF-8 can hold."""
    if isinstance(value, str):
        return value.isascii() or not any("\ud800" <= character <= "\udfff" for character in value)
    return isinstance(value, int) and not isinstance(value, bool)


def _whole(value: object, field: str) -> int:
    if value is None:
        raise _BadLine(f"{field} is missing")
    if isinstance(value, bool) or not isinstance(value, int):
        raise _BadLine(f"{field} is {_shown(value)}, not a whole number")
    return value


def _digits(text: str, field: str) -> int:
    if len(text) <= 20 and text.isascii() and text.isdecimal():
        return int(text)
    if not re.fullmatch(r"-?[0-9]{1,20}", text):
        raise _BadLine(f"{field} is {quoted(text)}, not a whole number")
    return int(text)


def _tokens(value: object, field: str) -> int:
    number = value if type(value) is int else _whole(value, field)
    if not 0 < number <= _MAX_TOKENS:
        raise _BadLine(f"{field} is {number}, not a number from 1 to {_MAX_TOKENS:,}")
    return number


def _samples(value: object) -> int:
    number = _whole(value, "n")
    if not 0 < number <= MAX_SAMPLES:
        raise _BadLine(f"n is {number}, not a number from 1 to {MAX_SAMPLES:,}")
    return number


def _ticks(value: object, field: str, ticks_per_unit: int) -> int:
    """A time as ticks, exact in the decimal digits that were written."""
    if value is None:
        raise _BadLine(f"{field} is missing")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _BadLine(f"{field} is {_shown(value)}, not a number")
    if not 0 <= value <= _MAX_ARRIVAL_S * PICOSECONDS // ticks_per_unit:  # false for NaN too
        raise _BadLine(f"{field} is {value}, not a time from 0 on")
    if isinstance(value, int):
        return value * ticks_per_unit
    # If it is a number of millionths of up to 15 digits, it was written as one: no other decimal of so few digits
    # is the same float.
    millionths = round(value * 10**6)
    if millionths < 10**15 and millionths / 10**6 == value and ticks_per_unit % 10**6 == 0:
        return millionths * (ticks_per_unit // 10**6)
    return int(Decimal(repr(value)) * ticks_per_unit)


def _segments(value: object, input_tokens: int) -> tuple[Segment, ...]:
    if not isinstance(value, list):
        raise _BadLine(f"content is {_shown(value)}, not a list of [stream, start, length]")
    segments = []
    for item in value:
        if not (isinstance(item, list) and len(item) == 3 and isinstance(item[0], str) and _is_name(item[0])):
            raise _BadLine(f"content holds {_shown(item)}, not [stream, start, length]")
        start, length = _whole(item[1], "content start"), _whole(item[2], "content length")
        if start < 0 or length < 0:
            raise _BadLine(f"content holds {_shown(item)}: start and length are from 0 on")
        segments.append(Segment(sys.intern(item[0]), start, length))
    total = sum(segment.length for segment in segments)
    if total != input_tokens:
        raise _BadLine(f"content has {total:,} tokens, the prompt {input_tokens:,}", "make them equal")
    return tuple(segments)


def _with_hash_ids(request: Request, ids: object, block_size: int) -> Request:
    """Content of a prompt whose whole blocks have ids; what is left over shares nothing."""
    if not isinstance(ids, list) or not all(_is_name(i) for i in ids):
        raise _BadLine(f"hash_ids is {_shown(ids)}, not a list of ids")
    if not ids:
        return request
    whole, left = divmod(request.input_tokens, block_size)
    if len(ids) not in {whole, whole + (left > 0)}:
        raise _BadLine(
            f"{len(ids)} hash_ids for {request.input_tokens:,} tokens in blocks of {block_size}",
            f"give {whole} ids, or {whole + (left > 0)} with one for the partial last block",
        )
    content = [Segment(f"h:{i}", 0, block_size) for i in ids[:whole]]
    if left:
        content.append(Segment(f"p:{request.id}", 0, left))
    return request._replace(content=tuple(content))


def _shown(value: object) -> str:
    """A wrong value as an error quotes it."""
    return (
        "missing"
        if value is None
        else quoted(json.dumps(value))
        if not isinstance(value, str)
        else quoted(value)
    )
