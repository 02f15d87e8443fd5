"""Reading what steps took on a real machine: a table, a log, a benchmark's result or that of `kvplan kernel-bench`.

The form is told from the content, never from the file's name; docs/calibrate.md describes each.
"""

from __future__ import annotations

import csv
import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from io import StringIO
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from kvplan.core.engine import StepWork
from kvplan.errors import InputError, quoted, unreadable
from kvplan.inputs import open_input
from kvplan.throughput_log import ThroughputLine, read_throughput

_LARGEST_FILE = 1 << 26
_MOST_TOKENS = 10**10
_MOST_STEP_S = 1e4
#: Seconds, bytes and bytes a second lie far below.
_MOST_MEASURED = 1e18


class StepSample(NamedTuple):
    """A step that somebody measured: what it computed, how long it took, and in which line of the file it stands.

    ``deployment`` has what its row says of model, GPU and tensor parallelism, under the names of the options.
    """

    work: StepWork
    seconds: float
    line: int
    deployment: Mapping[str, str | int]


class KernelRates(NamedTuple):
    """What `kvplan kernel-bench` measured: bytes per second of paged attention and of a plain copy; None: not there."""

    device: str | None
    attention_bytes_per_s: float | None
    copy_bytes_per_s: float | None


class Measurements(NamedTuple):
    """What a file holds. ``samples`` are steps; ``lines`` those of a log; ``rates`` those of a kernel benchmark.

    ``form`` says in words what it is. ``text`` is a log's, for what else it tells. ``left_out`` counts measurements
    that are of no use, by reason.
    """

    form: str
    name: str
    samples: tuple[StepSample, ...] = ()
    lines: tuple[ThroughputLine, ...] = ()
    rates: KernelRates | None = None
    text: str = ""
    left_out: Mapping[str, int] = {}


def read_measurements(source: str) -> Measurements:
    """What a file of measured times holds, or standard input for ``-``.

    Raises `InputError` for one that is none of the known forms.
    """
    name = "standard input" if source == "-" else source
    text = _read(source, name)
    head = text.lstrip()[:1]
    if head in ("{", "["):
        return _of_json(text, name)
    first = text.partition("\n")[0]
    if "step_ms" in first and "," in first:
        return _of_table(text, name)
    if "throughput" in text:
        return Measurements(
            "throughput lines of a log", name, lines=read_throughput(text.splitlines(), name), text=text
        )
    raise InputError(
        "the file holds no times that are known",
        where=name,
        hint="give a table with batch_size,context_mean,step_ms, a vLLM log with throughput lines, or the JSON of "
        "vllm bench serve --save-detailed or kvplan kernel-bench",
    )


def _read(source: str, name: str) -> str:
    try:
        with open_input(source) as file:
            raw = file.read(_LARGEST_FILE + 1)
    except OSError as error:
        raise unreadable(
            error,
            what="the measurements",
            where=name[:200],
            hint="give a file that exists and can be read, or - for standard input",
        ) from error
    if len(raw) > _LARGEST_FILE:
        raise InputError(
            f"the file is larger than {_LARGEST_FILE >> 20} MiB", where=name, hint="give a part of it"
        )
    return raw.decode("utf-8-sig", "replace")


# A table

_NEEDED = ("batch_size", "context_mean", "step_ms")
#: Columns that say what a row was measured on, and the option that each gives.
_OF_DEPLOYMENT = {
    "model": "model",
    "gpu": "gpu",
    "tp": "tensor_parallel_size",
    "tensor_parallel_size": "tensor_parallel_size",
}


def _of_table(text: str, name: str) -> Measurements:
    """Rows of steps: sequences that decode, mean tokens of context of each, milliseconds.

    ``prompt_tokens``, where there is such a column, are computed in the step beside the decodes, as one chunk from the
    start of a prompt. Other columns are not read.
    """
    reader = csv.DictReader(StringIO(text, newline=""))
    try:
        _refuse_columns(list(reader.fieldnames or ()), f"{name}:1")
        samples = tuple(_rows(reader, name))
    except csv.Error as error:
        raise InputError(
            f"the line is no row of a table: {error}", where=f"{name}:{reader.line_num}", hint="mend it"
        ) from None
    if not samples:
        raise InputError("the table has no rows", where=name, hint="add the steps that were measured")
    return Measurements("table of step times", name, samples)


def _refuse_columns(columns: list[str], place: str) -> None:
    """Refuse a header that lacks a column, or names one that is read twice."""
    for column in _NEEDED:
        if column not in columns:
            raise InputError(
                f"the table lacks the column {column}",
                where=place,
                hint=f"its first line names the columns: {', '.join(_NEEDED)}",
            )
    for column in (*_NEEDED, "prompt_tokens", *_OF_DEPLOYMENT):
        if columns.count(column) > 1:
            raise InputError(
                f"the table has several columns {column}",
                where=place,
                hint="leave one of them, rename the others",
            )


def _rows(reader: csv.DictReader[str], name: str) -> Iterator[StepSample]:
    for row in reader:
        place = f"{name}:{reader.line_num}"
        batch = round(_number(row, "batch_size", place, 1, 10**6))
        context = round(batch * _number(row, "context_mean", place, 0, _MOST_TOKENS))
        prompt = round(_number(row, "prompt_tokens", place, 0, 10**7)) if row.get("prompt_tokens") else 0
        seconds = _number(row, "step_ms", place, 1e-6, 1e3 * _MOST_STEP_S) / 1e3
        chunks = [(0, prompt)] if prompt else []
        work = StepWork(batch, context, chunks, batch + len(chunks))
        yield StepSample(work, seconds, reader.line_num, _deployment(row, place))


def _deployment(row: Mapping[str, str | None], place: str) -> dict[str, str | int]:
    found: dict[str, str | int] = {}
    for column, option in _OF_DEPLOYMENT.items():
        text = row.get(column)
        if text:
            is_count = option == "tensor_parallel_size"
            found[option] = round(_number(row, column, place, 1, 1024)) if is_count else text.strip()
    return found


def _number(row: Mapping[str, str | None], column: str, place: str, least: float, most: float) -> float:
    text = row.get(column) or ""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not least <= value <= most:
        raise InputError(
            f"{column} is {quoted(text)}, not a number from {least:g} to {most:g}",
            where=place,
            hint="mend it, or leave the row out",
        )
    return value


# JSON


def _of_json(text: str, name: str) -> Measurements:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        line = f":{error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise InputError(
            f"the file is no JSON: {str(error)[:200]}",
            where=f"{name}{line}",
            hint="give it as it was written",
        ) from None
    if isinstance(document, dict):
        results = document.get("results")
        if isinstance(results, list) and any(
            isinstance(one, dict) and "bytes_moved" in one for one in results
        ):
            return _of_kernel_bench(document, results, name)
        if "ttfts" in document or "mean_tpot_ms" in document:
            return _of_benchmark(document, name)
    raise InputError(
        "the JSON is the result of no benchmark that is known",
        where=name,
        hint="give what vllm bench serve --save-result --save-detailed or kvplan kernel-bench --json wrote",
    )


#: Kernels that move fewer bytes are held up by their launch.
_LARGE_BYTES = 1 << 28


def _of_kernel_bench(document: Mapping[str, object], results: list[object], name: str) -> Measurements:
    """The best valid kernel at each size that is large enough, and the copy that was timed beside."""
    best: dict[tuple[object, ...], float] = {}
    copies: list[float] = []
    small = 0
    for one in results:
        if not isinstance(one, dict) or one.get("valid") is not True:
            continue
        moved, rate, copy = (
            _positive(one.get(key)) for key in ("bytes_moved", "achieved_bytes_per_s", "copy_bytes_per_s")
        )
        if moved is None or rate is None:
            continue
        if copy is not None:
            copies.append(copy)
        if moved < _LARGE_BYTES:
            small += 1
            continue
        shape = tuple(
            str(one.get(key)) for key in ("batch", "seq", "heads", "kv_heads", "head_dim", "kv_cache_dtype")
        )
        best[shape] = max(rate, best.get(shape, 0.0))
    if not best and not copies:
        raise InputError(
            "the benchmark has no valid kernel with its time",
            where=name,
            hint="run kvplan kernel-bench --json on the GPU, without --compile-only and --emulate",
        )
    device = document.get("device")
    label = device.get("name") if isinstance(device, dict) else None
    rates = KernelRates(
        label if isinstance(label, str) else None,
        median(best.values()) if best else None,
        median(copies) if copies else None,
    )
    left_out = {f"kernels that move less than {_LARGE_BYTES >> 20} MiB": small} if small else {}
    return Measurements("kernel benchmark", name, rates=rates, left_out=left_out)


def _positive(value: object) -> float | None:
    """A number above 0, None for anything else."""
    number = _finite(value)
    return number if number is not None and number > 0 else None


def _finite(value: object) -> float | None:
    """A number that is no larger than any that is measured; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < _MOST_MEASURED else None


def _of_benchmark(document: Mapping[str, object], name: str) -> Measurements:
    """Gaps between tokens of ``vllm bench serve --save-detailed`` while no prompt was computed.

    Without the times of each token there is only a mean, in which prompts and decodes are mixed: it is refused.
    """
    keys = ("start_times", "ttfts", "itls", "input_lens")
    lists = [value for key in keys if isinstance(value := document.get(key), list)]
    if len(lists) < len(keys):
        raise InputError(
            "the result has no times of each token",
            where=name,
            hint="run vllm bench serve with --save-result --save-detailed (vLLM 0.19 or newer)",
        )
    requests = [request for row in zip(*lists, strict=False) if (request := _request(row)) is not None]
    samples = tuple(_gaps(requests))
    if not samples:
        raise InputError(
            "no two tokens of the result come without a prompt computed between them",
            where=name,
            hint="measure at a lower --request-rate or with longer --random-output-len",
        )
    return Measurements("benchmark result", name, samples)


class _Streamed(NamedTuple):
    """A request as its client saw it: when it was sent, its prompt's tokens, and when each token came."""

    sent: float
    prompt: int
    tokens: tuple[float, ...]


def _request(row: tuple[object, ...]) -> _Streamed | None:
    """None for a request that failed, or whose numbers are none."""
    sent, first, gaps, prompt = _finite(row[0]), _positive(row[1]), row[2], row[3]
    if sent is None or first is None or not isinstance(gaps, list):
        return None
    if not isinstance(prompt, int) or not 0 < prompt <= _MOST_TOKENS:
        return None
    tokens = [sent + first]
    for item in gaps:
        gap = _finite(item)
        if gap is None or gap < 0:
            return None
        tokens.append(tokens[-1] + gap)
    return _Streamed(sent, prompt, tuple(tokens))


#: Gaps of one batch size whose contexts differ by less than this share are one sample: their median.
_CONTEXT_BUCKET = 0.05


def _gaps(requests: list[_Streamed]) -> Iterator[StepSample]:
    """Samples of steps in which the same requests decode, no prompt being computed or waiting.

    A sweep over all events: a request holds the others up from when it was sent to its first token. A gap counts if
    nobody was sent, and nobody began or ended, between its two tokens.
    """
    changes = sorted(
        [(one.sent, 1, 0, 0) for one in requests]
        + [(one.tokens[0], -1, 1, one.prompt) for one in requests]
        + [(one.tokens[-1], 0, -1, -one.prompt - len(one.tokens)) for one in requests]
    )
    tokens = sorted((end, start) for one in requests for start, end in pairwise(one.tokens))
    found: defaultdict[tuple[int, int], list[tuple[float, int]]] = defaultdict(list)
    computing = batch = prompts = next_change = 0
    calm_since = -math.inf
    # Tokens that the requests which decode have put out so far.
    put_out = 0
    for end, start in tokens:
        while next_change < len(changes) and changes[next_change][0] < end:
            when, waits, decodes, held = changes[next_change]
            computing += waits
            batch += decodes
            prompts += held
            put_out += decodes > 0
            calm_since = when
            next_change += 1
        if not computing and batch and start >= calm_since and end > start:
            context = prompts + put_out
            found[batch, round(math.log(context + 1) / _CONTEXT_BUCKET)].append((end - start, context))
        put_out += 1
    for (batch, _), gaps in sorted(found.items()):
        seconds = median(gap for gap, _ in gaps)
        context = round(median(held for _, held in gaps))
        if 0 < seconds <= _MOST_STEP_S:
            yield StepSample(StepWork(batch, context, [], batch), seconds, 0, {})


# A log

#: The number of running sequences may change by this share within an interval whose mean is used.
_STEADY = 0.1


def log_samples(
    lines: tuple[ThroughputLine, ...], pool_tokens: int, block_size: int
) -> tuple[list[StepSample], dict[str, int]]:
    """Decode steps from throughput lines, and how many lines are of no use, by reason.

    In an interval without prompt tokens every running sequence gets a token a step, so a step takes the mean number of
    running sequences over the tokens generated a second. The KV cache's usage tells how many tokens they attend to:
    half of each sequence's last block is empty. ``pool_tokens`` are those of the whole pool.
    """
    samples: list[StepSample] = []
    left_out: defaultdict[str, int] = defaultdict(int)
    for before, line in pairwise(lines):
        batch = (before.running + line.running) / 2
        if line.prompt_tokens_per_s:
            left_out["lines with prompt tokens"] += 1
        elif line.kv_usage is None or before.kv_usage is None or not line.kv_usage:
            left_out["lines without the KV cache's usage"] += 1
        elif not line.generation_tokens_per_s or min(before.running, line.running) < 1:
            left_out["idle lines"] += 1
        elif line.preemptions != before.preemptions:
            left_out["lines with preemptions, whose tokens were computed again"] += 1
        elif abs(line.running - before.running) > max(1, _STEADY * batch):
            left_out["lines in which the batch changed"] += 1
        else:
            held = (before.kv_usage + line.kv_usage) / 2 * pool_tokens
            context = max(round(batch), round(held - batch * block_size / 2))
            work = StepWork(round(batch), context, [], round(batch))
            samples.append(StepSample(work, batch / line.generation_tokens_per_s, line.line, {}))
    return samples, dict(left_out)
