"""Throughput lines of logs: old and new wordings, clocks, replicas."""

from __future__ import annotations

import pytest

from kvplan.errors import InputError
from kvplan.throughput_log import read_throughput

#: vLLM 0.19 (v1/metrics/loggers.py), with the prefixes of a server.
NEW = (
    "(APIServer pid=9) INFO 12-31 23:59:50 [loggers.py:259] Engine 000: Avg prompt throughput: 512.5 tokens/s, "
    "Avg generation throughput: 1024.0 tokens/s, Running: 32 reqs, Waiting: 4 reqs, GPU KV cache usage: 12.5%, "
    "Prefix cache hit rate: 25.0%, External prefix cache hit rate: 99.0%\n"
)
#: vLLM 0.8.5 and before.
OLD = (
    "INFO 05-01 10:00:00 metrics.py:455] Avg prompt throughput: 0.0 tokens/s, "
    "Avg generation throughput: 80.1 tokens/s, "
    "Running: 3 reqs, Swapped: 0 reqs, Pending: 1 reqs, GPU KV cache usage: 0.4%, CPU KV cache usage: 0.0%.\n"
)


def test_a_new_line_is_read_whole() -> None:
    (line,) = read_throughput(["start\n", NEW], "a.log")
    assert line.line == 2
    assert (line.prompt_tokens_per_s, line.generation_tokens_per_s) == (512.5, 1024.0)
    assert (line.running, line.waiting) == (32, 4)
    assert (line.kv_usage, line.hit_rate, line.preemptions) == (0.125, 0.25, None)


def test_an_old_line_is_read_too() -> None:
    (line,) = read_throughput([OLD], "a.log")
    assert (line.running, line.waiting, line.kv_usage, line.hit_rate) == (3, 1, 0.004, None)


def test_preemptions_are_told_by_the_newest() -> None:
    text = NEW.replace("GPU KV cache", "Preemptions: 7, GPU KV cache")
    (line,) = read_throughput([text], "a.log")
    assert (line.preemptions, line.kv_usage) == (7, 0.125)


def test_times_are_those_of_the_logger_over_the_turn_of_the_year() -> None:
    second = NEW.replace("12-31 23:59:50", "01-01 00:00:02")
    lines = read_throughput([NEW, second], "a.log")
    assert [line.time_s for line in lines] == [0.0, 12.0]
    assert [line.interval_s for line in lines] == [10.0, 12.0]


def test_without_a_clock_lines_are_ten_seconds_apart() -> None:
    bare = NEW.partition("] ")[2]
    assert [line.time_s for line in read_throughput([bare, bare], "a.log")] == [0.0, 10.0]


def test_of_several_replicas_the_first_is_read() -> None:
    other = NEW.replace("Engine 000", "Engine 001").replace("Running: 32", "Running: 5")
    assert [line.running for line in read_throughput([NEW, other, NEW], "a.log")] == [32, 32]


def test_a_log_without_such_lines_is_refused() -> None:
    with pytest.raises(InputError) as caught:
        read_throughput(["INFO: throughput is what you make of it\n"], "a.log")
    assert str(caught.value) == "the log has no throughput lines (a.log)"
