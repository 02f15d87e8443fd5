"""A line of a trace as a request: kvplan JSONL, Azure CSV, Mooncake JSONL; and the fields of JSON that it is made of.

A row of a format takes a line and its number, and raises `BadLine` where it cannot be used.
"""

from __future__ import annotations

import difflib
import json
import re
import sys
from datetime import UTC, datetime
from decimal import Decimal
from functools import lru_cache

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


def kvplan_row(text: str, number: int) -> Request:
    """A line of kvplan JSONL; its number is the id of one that names none."""
    row = json_object(text)
    if not row.keys() <= KVPLAN_KEYS:
        key = min(row.keys() - KVPLAN_KEYS)
        near = difflib.get_close_matches(key, KVPLAN_KEYS, n=1)
        known = f"did you mean {near[0]}?" if near else f"known: {', '.join(sorted(KVPLAN_KEYS))}"
        raise BadLine(f"unknown key {quoted(key)}", known)
    request = Request(
        request_id(row.get("id", number)),
        _ticks(row.get("arrival_s"), "arrival_s", PICOSECONDS),
        token_count(row.get("input_tokens"), "input_tokens"),
        token_count(row.get("output_tokens"), "output_tokens"),
        whole_number(row["priority"], "priority") if "priority" in row else 0,
        (),
        _samples(row["n"]) if "n" in row else 1,
    )
    if "abort_s" in row:
        abort = _ticks(row["abort_s"], "abort_s", PICOSECONDS)
        if abort < request.arrival:
            raise BadLine(f"abort_s is {row['abort_s']}", "write a time from arrival_s on")
        request = request._replace(abort=abort)
    if "content" in row and "hash_ids" in row:
        raise BadLine("content and hash_ids both say what the prompt holds", "give one of them")
    if "content" in row:
        return request._replace(content=content_of(row["content"], request.input_tokens))
    if "hash_ids" in row:
        if "hash_block_size" not in row:
            raise BadLine("hash_ids without hash_block_size", "say how many tokens an id stands for")
        size = token_count(row["hash_block_size"], "hash_block_size")
        return _with_hash_ids(request, row["hash_ids"], size)
    return request


def mooncake_row(text: str, number: int) -> Request:
    """A line of Mooncake's JSONL; its number is its id."""
    row = json_object(text)
    request = Request(
        str(number),
        _ticks(row.get("timestamp"), "timestamp", PICOSECONDS // 1000),
        token_count(row.get("input_length"), "input_length"),
        token_count(row.get("output_length"), "output_length"),
    )
    return _with_hash_ids(request, row.get("hash_ids", []), _MOONCAKE_BLOCK_SIZE)


def columns(text: str) -> tuple[str, ...]:
    """The cells of a line of CSV, without blanks around them."""
    return tuple(map(str.strip, text.split(",")))


def azure_row(text: str, number: int) -> Request:
    """A line of Azure's CSV below its header, its arrival counted from 1970; its number is its id."""
    cells = columns(text)
    if len(cells) != len(AZURE_COLUMNS):
        raise BadLine(f"{len(cells)} columns instead of {len(AZURE_COLUMNS)}: the line may be cut")
    time, context, generated = cells
    return Request(
        str(number),
        _wall_clock(time),
        token_count(_digits(context, "ContextTokens"), "ContextTokens"),
        token_count(_digits(generated, "GeneratedTokens"), "GeneratedTokens"),
    )


#: Seconds since 1970 with any number of fractional digits, with or without a zone (2023: seven digits and
#: none, 2024: a variable number and +00:00).
_TIME = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,12}))?(?:Z|\+00:00)?\Z")


def _wall_clock(text: str) -> int:
    match = _TIME.match(text)
    if not match:
        raise BadLine(f"TIMESTAMP is {quoted(text)}, not a time such as 2023-11-16 18:17:03.9799600")
    second, fraction = match.groups("")
    try:
        since_1970 = _since_1970(second)
    except ValueError as error:
        raise BadLine(f"TIMESTAMP is {quoted(text)}: {error}") from error
    return since_1970 * PICOSECONDS + int(fraction.ljust(12, "0"))


@lru_cache(64)  # neighbours share it
def _since_1970(second: str) -> int:
    return int(datetime.fromisoformat(second).replace(tzinfo=UTC).timestamp())


# Fields


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


def _ticks(value: object, field: str, ticks_per_unit: int) -> int:
    """A time as ticks, exact in the decimal digits that were written."""
    if value is None:
        raise BadLine(f"{field} is missing")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadLine(f"{field} is {shown(value)}, not a number")
    if not 0 <= value <= _MAX_ARRIVAL_S * PICOSECONDS // ticks_per_unit:  # false for NaN too
        raise BadLine(f"{field} is {value}, not a time from 0 on")
    if isinstance(value, int):
        return value * ticks_per_unit
    # If it is a number of millionths of up to 15 digits, it was written as one: no other decimal of so few digits
    # is the same float.
    millionths = round(value * 10**6)
    if millionths < 10**15 and millionths / 10**6 == value and ticks_per_unit % 10**6 == 0:
        return millionths * (ticks_per_unit // 10**6)
    return int(Decimal(repr(value)) * ticks_per_unit)


def content_of(value: object, input_tokens: int) -> tuple[Segment, ...]:
    """What a prompt of so many tokens holds, from a list of ``[stream, start, length]``."""
    if not isinstance(value, list):
        raise BadLine(f"content is {shown(value)}, not a list of [stream, start, length]")
    segments = []
    for item in value:
        if not (isinstance(item, list) and len(item) == 3 and isinstance(item[0], str) and _is_name(item[0])):
            raise BadLine(f"content holds {shown(item)}, not [stream, start, length]")
        start, length = whole_number(item[1], "content start"), whole_number(item[2], "content length")
        if start < 0 or length < 0:
            raise BadLine(f"content holds {shown(item)}: start and length are from 0 on")
        segments.append(Segment(sys.intern(item[0]), start, length))
    total = sum(segment.length for segment in segments)
    if total != input_tokens:
        raise BadLine(f"content has {total:,} tokens, the prompt {input_tokens:,}", "make them equal")
    return tuple(segments)


def _with_hash_ids(request: Request, ids: object, block_size: int) -> Request:
    """Content of a prompt whose whole blocks have ids; what is left over shares nothing."""
    if not isinstance(ids, list) or not all(_is_name(i) for i in ids):
        raise BadLine(f"hash_ids is {shown(ids)}, not a list of ids")
    if not ids:
        return request
    whole, left = divmod(request.input_tokens, block_size)
    if len(ids) not in {whole, whole + (left > 0)}:
        raise BadLine(
            f"{len(ids)} hash_ids for {request.input_tokens:,} tokens in blocks of {block_size}",
            f"give {whole} ids, or {whole + (left > 0)} with one for the partial last block",
        )
    content = [Segment(f"h:{i}", 0, block_size) for i in ids[:whole]]
    if left:
        content.append(Segment(f"p:{request.id}", 0, left))
    return request._replace(content=tuple(content))


def shown(value: object) -> str:
    """A wrong value as an error quotes it."""
    return (
        "missing"
        if value is None
        else quoted(json.dumps(value))
        if not isinstance(value, str)
        else quoted(value)
    )
