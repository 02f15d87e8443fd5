"""Lines of a trace as requests: kvplan JSONL, Azure CSV, Mooncake JSONL; and the fields of JSON they are made of.

Lines are taken apart many at once where all of them are written as usual. Where one is not, each is taken by itself,
which takes all that is allowed and tells what is wrong.
"""

from __future__ import annotations

import difflib
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from functools import lru_cache
from io import BytesIO
from typing import Any, NamedTuple

from kvplan.core.engine import quoted
from kvplan.core.request import MAX_SAMPLES, PICOSECONDS, Request, Segment

#: Beyond these a number is a mistake, not a workload.
MAX_TOKENS = 10**9
_MAX_ARRIVAL_S = 10**10

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
KVPLAN_KEYS = frozenset(
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
#: Mooncake's hash ids stand for blocks of this many tokens (FAST25-release/traces of kvcache-ai/Mooncake).
_MOONCAKE_BLOCK_SIZE = 512


class BadLine(Exception):
    """A line that cannot be used: what is wrong with it and what would mend it."""

    def __init__(self, what: str, hint: str = "mend the line, or pass --skip-bad-lines") -> None:
        super().__init__(what)
        self.hint = hint


def id_stands_twice(request_id: str) -> BadLine:
    """What is wrong with a request whose id another one has."""
    return BadLine(f"id {quoted(request_id)} stands twice", "give each request an id of its own")


class Batch(NamedTuple):
    """Lines that were read at once: what each holds, from line ``first`` on.

    ``request`` makes a request of that and the line's number, or raises `BadLine`. Items that ``are_lines`` as they are
    in the file may be blank, which is no fault.
    """

    first: int
    items: Sequence[Any]
    request: Callable[[Any, int], Request]
    are_lines: bool = False


#: Batches of whole lines, each with the number of its first line.
NumberedLines = Iterable[tuple[int, bytes]]


def _batches(
    lines: NumberedLines,
    usual: Callable[[bytes], Sequence[Any] | None],
    of_row: Callable[[Any, int], Request],
    of_line: Callable[[bytes, int], Request],
) -> Iterator[Batch]:
    """What ``usual`` makes of whole batches, for ``of_row``; the lines of others, for ``of_line``."""
    for first, batch in lines:
        rows = usual(batch) if batch.endswith(b"\n") else None
        if rows is not None:
            yield Batch(first, rows, of_row)
        else:
            yield Batch(first, BytesIO(batch).readlines(), of_line, are_lines=True)


def _text(line: bytes) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise BadLine(f"not UTF-8: byte 0x{line[error.start]:02x} at offset {error.start}") from error


# JSONL


def read_kvplan(lines: NumberedLines) -> Iterator[Batch]:
    """Lines of kvplan JSONL; the number of one that names no id is its id."""
    return _read_json(lines, _kvplan_row)


def read_mooncake(lines: NumberedLines) -> Iterator[Batch]:
    """Lines of Mooncake's JSONL; their numbers are their ids."""
    return _read_json(lines, _mooncake_row)


def _read_json(lines: NumberedLines, of_row: Callable[[dict[str, Any], int], Request]) -> Iterator[Batch]:
    return _batches(lines, _objects, of_row, lambda line, number: of_row(json_object(_text(line)), number))


#: All bytes but braces and ends of lines.
_NO_BRACES = bytes(set(range(256)) - set(b"{}\n"))


def _objects(batch: bytes) -> list[dict[str, Any]] | None:
    """The objects of lines that hold one each and no other in it; None where that is not sure.

    If each line has one pair of braces, and all of them with commas in between are a list of as many objects as there
    are lines, then every pair is one of these objects, and each stands on a line of its own.
    """
    braces = batch.translate(None, _NO_BRACES)
    count = len(braces) // 3
    if braces != b"{}\n" * count:
        return None
    try:
        rows = json.loads("[" + batch[:-1].decode().replace("\n", ",") + "]")
    except (ValueError, RecursionError):
        return None
    return rows if len(rows) == count and set(map(type, rows)) == {dict} else None


def _kvplan_row(row: dict[str, Any], number: int) -> Request:
    if "id" not in row:
        row["id"] = str(number)
    name, arrival_s = row["id"], row.get("arrival_s")
    prompt, answer = row.get("input_tokens"), row.get("output_tokens")
    if (
        type(name) is str
        and name.isascii()
        and type(arrival_s) is float
        and 0 <= arrival_s < 10**9
        and type(prompt) is int
        and 0 < prompt <= MAX_TOKENS
        and type(answer) is int
        and 0 < answer <= MAX_TOKENS
    ):
        # A number of millionths of up to 15 digits was written as one: no other decimal of so few digits is this float.
        millionths = round(arrival_s * 10**6)
        arrival = millionths * 10**6 if millionths / 10**6 == arrival_s else _ticks(arrival_s, "arrival_s")
        if len(row) == 4:
            return _new(Request, (name, arrival, prompt, answer, 0, (), 1, None, False))
        _check_keys(row)
    else:
        _check_keys(row)
        name = request_id(name)
        arrival = _ticks(arrival_s, "arrival_s")
        prompt = token_count(prompt, "input_tokens")
        answer = token_count(answer, "output_tokens")
    priority = whole_number(row["priority"], "priority") if "priority" in row else 0
    samples = _samples(row["n"]) if "n" in row else 1
    abort = _ticks(row["abort_s"], "abort_s") if "abort_s" in row else None
    if abort is not None and abort < arrival:
        raise BadLine(f"abort_s is {row['abort_s']}", "write a time from arrival_s on")
    content: tuple[Segment, ...] = ()
    if "content" in row:
        if "hash_ids" in row:
            raise BadLine("content and hash_ids both say what the prompt holds", "give one of them")
        content = content_of(row["content"], prompt)
    elif "hash_ids" in row:
        if "hash_block_size" not in row:
            raise BadLine("hash_ids without hash_block_size", "say how many tokens an id stands for")
        block_size = token_count(row["hash_block_size"], "hash_block_size")
        content = _hashed_content(row["hash_ids"], block_size, name, prompt)
    return _new(Request, (name, arrival, prompt, answer, priority, content, samples, abort, False))


def _check_keys(row: dict[str, Any]) -> None:
    if not KVPLAN_KEYS.issuperset(row):
        key = min(row.keys() - KVPLAN_KEYS)
        near = difflib.get_close_matches(key, KVPLAN_KEYS, n=1)
        known = f"did you mean {near[0]}?" if near else f"known: {', '.join(sorted(KVPLAN_KEYS))}"
        raise BadLine(f"unknown key {quoted(key)}", known)


def _mooncake_row(row: dict[str, Any], number: int) -> Request:
    name = str(number)
    arrival = _ticks(row.get("timestamp"), "timestamp", 1000)
    prompt = token_count(row.get("input_length"), "input_length")
    answer = token_count(row.get("output_length"), "output_length")
    content = _hashed_content(row.get("hash_ids", []), _MOONCAKE_BLOCK_SIZE, name, prompt)
    return _new(Request, (name, arrival, prompt, answer, 0, content, 1, None, False))


# Azure's CSV


def read_azure(lines: NumberedLines) -> Iterator[Batch]:
    """Lines of Azure's CSV below its header; their numbers are their ids, and arrivals count from 1970."""
    return _batches(lines, _azure_rows, _azure_row, _azure_line)


def columns(text: str) -> tuple[str, ...]:
    """The cells of a line of CSV, without blanks around them."""
    return tuple(map(str.strip, text.split(",")))


def _azure_line(line: bytes, number: int) -> Request:
    cells = columns(_text(line))
    if len(cells) != len(AZURE_COLUMNS):
        raise BadLine(f"{len(cells)} columns instead of {len(AZURE_COLUMNS)}: the line may be cut")
    time, context, generated = cells
    match = _TIME.fullmatch(time)
    if not match:
        raise BadLine(f"TIMESTAMP is {quoted(time)}, not a time such as 2023-11-16 18:17:03.9799600")
    return Request(
        str(number),
        _wall_clock(time, *match.groups("")),
        token_count(_digits(context, "ContextTokens"), "ContextTokens"),
        token_count(_digits(generated, "GeneratedTokens"), "GeneratedTokens"),
    )


#: A second of the calendar and any number of fractional digits, with or without a zone (2023: seven digits and none,
#: 2024: a variable number and +00:00).
_TIME = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,12}))?(?:Z|\+00:00)?")
_USUAL_LINE = re.compile(
    rf"^({_TIME.pattern}),([1-9]\d{{0,8}}),([1-9]\d{{0,8}})\r?\n", re.ASCII | re.MULTILINE
)


def _azure_rows(batch: bytes) -> list[tuple[str, ...]] | None:
    """Time, its second and fraction, and both lengths of each line; None where one is not as usual."""
    try:
        rows = _USUAL_LINE.findall(batch.decode())
    except UnicodeDecodeError:
        return None
    return rows if len(rows) == batch.count(b"\n") else None


def _azure_row(row: tuple[str, ...], number: int) -> Request:
    time, second, fraction, context, generated = row
    arrival = _wall_clock(time, second, fraction)
    return _new(Request, (str(number), arrival, int(context), int(generated), 0, (), 1, None, False))


def _wall_clock(time: str, second: str, fraction: str) -> int:
    try:
        since_1970 = _since_1970(second)
    except ValueError as error:
        raise BadLine(f"TIMESTAMP is {quoted(time)}: {error}") from error
    return since_1970 * PICOSECONDS + int(fraction.ljust(12, "0"))


@lru_cache(64)  # neighbours share it
def _since_1970(second: str) -> int:
    return int(datetime.fromisoformat(second).replace(tzinfo=UTC).timestamp())


# Fields


#: Makes a named tuple of all its values, which its own class takes twice as long for.
_new = tuple.__new__


#: What `json.loads` calls, without what it does around it for texts of other kinds.
_first_value = json.JSONDecoder().raw_decode


def json_object(text: str) -> dict[str, object]:
    """A text that is one JSON object."""
    try:
        row, end = _first_value(text) if text.startswith("{") else (None, 0)
        if text[end:] not in ("", "\n", "\r\n"):
            row = json.loads(text)
    except (ValueError, RecursionError) as error:
        if isinstance(error, RecursionError):
            raise BadLine("not JSON: nested too deeply") from error
        cut = "" if text.rstrip().endswith("}") else ": the line may be cut"
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "a number is too long"
        raise BadLine(f"not JSON: {reason}{cut}") from error
    if not isinstance(row, dict):
        raise BadLine(f"{shown(row)} instead of a JSON object")
    return row


def request_id(value: object) -> str:
    """The id that a value is."""
    if value is None:
        raise BadLine("id is missing")
    if not _is_name(value):
        raise BadLine(f"id is {shown(value)}, not a text or whole number")
    return str(value)


def _is_name(value: object) -> bool:
    """Whether a value can name a request or a stream: a whole number, or text that UTF-8 can hold."""
    if isinstance(value, str):
        return value.isascii() or not any("\ud800" <= character <= "\udfff" for character in value)
    return isinstance(value, int) and not isinstance(value, bool)


def whole_number(value: object, field: str) -> int:
    """The value of a field that takes any whole number."""
    if value is None:
        raise BadLine(f"{field} is missing")
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadLine(f"{field} is {shown(value)}, not a whole number")
    return value


def _digits(text: str, field: str) -> int:
    if len(text) <= 20 and text.isascii() and text.isdecimal():
        return int(text)
    if not re.fullmatch(r"-?[0-9]{1,20}", text):
        raise BadLine(f"{field} is {quoted(text)}, not a whole number")
    return int(text)


def token_count(value: object, field: str) -> int:
    """The value of a field that takes 1 to `MAX_TOKENS` tokens."""
    number = value if type(value) is int else whole_number(value, field)
    if not 0 < number <= MAX_TOKENS:
        raise BadLine(f"{field} is {number}, not a number from 1 to {MAX_TOKENS:,}")
    return number


def _samples(value: object) -> int:
    number = whole_number(value, "n")
    if not 0 < number <= MAX_SAMPLES:
        raise BadLine(f"n is {number}, not a number from 1 to {MAX_SAMPLES:,}")
    return number


def _ticks(value: object, field: str, per_second: int = 1) -> int:
    """A time in units of which a second has so many, as picoseconds, exact in the decimal digits that were written."""
    if value is None:
        raise BadLine(f"{field} is missing")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadLine(f"{field} is {shown(value)}, not a number")
    if not 0 <= value <= _MAX_ARRIVAL_S * per_second:  # false for NaN too
        raise BadLine(f"{field} is {value}, not a time from 0 on")
    ticks = PICOSECONDS // per_second
    return value * ticks if isinstance(value, int) else int(Decimal(repr(value)) * ticks)


def content_of(value: object, input_tokens: int) -> tuple[Segment, ...]:
    """What a prompt of so many tokens holds, from a list of ``[stream, start, length]``."""
    if not isinstance(value, list):
        raise BadLine(f"content is {shown(value)}, not a list of [stream, start, length]")
    segments = []
    total = 0
    for item in value:
        if not isinstance(item, list) or len(item) != 3:
            raise _no_segment(item)
        stream, start, length = item
        if not isinstance(stream, str) or not (stream.isascii() or _is_name(stream)):
            raise _no_segment(item)
        if type(start) is not int or type(length) is not int:
            whole_number(start, "content start")
            whole_number(length, "content length")
        if start < 0 or length < 0:
            raise BadLine(f"content holds {shown(item)}: start and length are from 0 on")
        total += length
        segments.append(_new(Segment, (sys.intern(stream), start, length)))
    if total != input_tokens:
        raise BadLine(f"content has {total:,} tokens, the prompt {input_tokens:,}", "make them equal")
    return tuple(segments)


def _no_segment(item: object) -> BadLine:
    return BadLine(f"content holds {shown(item)}, not [stream, start, length]")


def _hashed_content(ids: object, block_size: int, name: str, input_tokens: int) -> tuple[Segment, ...]:
    """Content of a prompt whose whole blocks have ids; what is left over shares nothing."""
    if not isinstance(ids, list) or not (set(map(type, ids)) <= {int} or all(map(_is_name, ids))):
        raise BadLine(f"hash_ids is {shown(ids)}, not a list of ids")
    if not ids:
        return ()
    whole, left = divmod(input_tokens, block_size)
    if len(ids) not in {whole, whole + (left > 0)}:
        raise BadLine(
            f"{len(ids)} hash_ids for {input_tokens:,} tokens in blocks of {block_size}",
            f"give {whole} ids, or {whole + (left > 0)} with one for the partial last block",
        )
    content = [_new(Segment, (f"h:{i}", 0, block_size)) for i in ids[:whole]]
    if left:
        content.append(Segment(f"p:{name}", 0, left))
    return tuple(content)


def shown(value: object) -> str:
    """A wrong value as an error quotes it."""
    return (
        "missing"
        if value is None
        else quoted(json.dumps(value))
        if not isinstance(value, str)
        else quoted(value)
    )
