"""The lines in which vLLM says, every few seconds, what it is doing: throughput, queues, KV cache, prefix hits.

Sources: vllm/v1/metrics/loggers.py (LoggingStatLogger.log) of 0.8.5 to 0.33. Throughputs are means since the line
before, the rest is how things stood when the line was written. Nothing is logged while the engine is idle.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta
from typing import NamedTuple

from kvplan.errors import InputError

#: Seconds between two lines unless VLLM_LOG_STATS_INTERVAL says otherwise (vllm/envs.py).
INTERVAL_S = 10.0

_LINE = re.compile(
    r"Avg prompt throughput: (?P<prompt>[0-9]{1,12}(?:\.[0-9]{1,6})?) tokens/s, "
    r"Avg generation throughput: (?P<generation>[0-9]{1,12}(?:\.[0-9]{1,6})?) tokens/s, "
    r"Running: (?P<running>[0-9]{1,9}) reqs, "
    r"(?:Swapped: [0-9]{1,9} reqs, )?"
    r"(?:Waiting|Pending): (?P<waiting>[0-9]{1,9}) reqs, "
    r"(?P<rest>.{0,400})"
)
_USAGE = re.compile(r"KV cache usage: ([0-9]{1,3}(?:\.[0-9]{1,3})?)%")
_HITS = re.compile(r"(?<!External )[Pp]refix cache hit rate: ([0-9]{1,3}(?:\.[0-9]{1,3})?)%")
_PREEMPTIONS = re.compile(r"Preemptions: ([0-9]{1,12})")
_ENGINE = re.compile(r"Engine ([0-9]{1,4}):")
#: ``INFO 12-01 00:15:30 [loggers.py:123]``; some loggers write the year and the milliseconds too.
_TIME = re.compile(
    r"(?:([0-9]{4})-)?([0-9]{2})-([0-9]{2})[ T]([0-9]{2}):([0-9]{2}):([0-9]{2})(?:[.,]([0-9]{1,6}))?"
)
#: A year in which every day of every year exists.
_ANY_YEAR = 2000


class ThroughputLine(NamedTuple):
    """What one line says. ``time_s`` counts from the first line of the run, ``interval_s`` since the line before.

    ``kv_usage`` and ``hit_rate`` are shares; None where the line has none. ``prompt_tokens_per_s`` counts computed
    tokens from 0.19 on, all of the prompt before.
    """

    line: int
    time_s: float
    interval_s: float
    prompt_tokens_per_s: float
    generation_tokens_per_s: float
    running: int
    waiting: int
    kv_usage: float | None
    hit_rate: float | None
    preemptions: int | None


def read_throughput(lines: Iterable[str], name: str) -> tuple[ThroughputLine, ...]:
    """The throughput lines of the first engine that a log names, in order; ``name`` names the log in errors.

    Times are those that the logger wrote; without them the lines are `INTERVAL_S` apart. Raises `InputError` if there
    are none.
    """
    found = tuple(_throughput_lines(lines))
    if not found:
        raise no_throughput(name)
    return found


def no_throughput(name: str) -> InputError:
    """The error for a log without such lines."""
    return InputError(
        "the log has no throughput lines",
        where=name,
        hint="vLLM prints them every 10 s (Avg prompt throughput: ...) unless --disable-log-stats is set",
    )


def _throughput_lines(lines: Iterable[str]) -> Iterator[ThroughputLine]:
    engine: str | None = None
    first: datetime | None = None
    before = -INTERVAL_S
    for number, text in enumerate(lines, start=1):
        if "throughput" not in text or (match := _LINE.search(text)) is None:
            continue
        named = _ENGINE.search(text[: match.start()])
        engine = engine or (named[1] if named else "")
        if engine != (named[1] if named else ""):
            continue  # another data-parallel replica
        clock = _clock(text[: match.start()])
        if clock is None:
            time_s = before + INTERVAL_S
        else:
            first = first or clock
            if clock < first:
                clock += timedelta(days=366)  # the year is not written: it has turned
            time_s = (clock - first).total_seconds()
        rest = match["rest"]
        yield ThroughputLine(
            line=number,
            time_s=time_s,
            interval_s=time_s - before,
            prompt_tokens_per_s=float(match["prompt"]),
            generation_tokens_per_s=float(match["generation"]),
            running=int(match["running"]),
            waiting=int(match["waiting"]),
            kv_usage=_share(_USAGE, rest),
            hit_rate=_share(_HITS, rest),
            preemptions=int(told[1]) if (told := _PREEMPTIONS.search(rest)) else None,
        )
        before = time_s


def _share(pattern: re.Pattern[str], text: str) -> float | None:
    match = pattern.search(text)
    return float(match[1]) / 100 if match else None


def _clock(prefix: str) -> datetime | None:
    """When the logger says that it wrote the line."""
    match = _TIME.search(prefix)
    if match is None:
        return None
    year, *parts, fraction = match.groups()
    month, day, hour, minute, second = map(int, parts)
    microsecond = int((fraction or "0").ljust(6, "0"))
    try:
        return datetime(int(year or _ANY_YEAR), month, day, hour, minute, second, microsecond)
    except ValueError:
        return None  # digits that are no date
