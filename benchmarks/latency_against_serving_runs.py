"""Latencies of short synthetic runs against the means that others published for theirs.

Usage: python benchmarks/latency_against_serving_runs.py serving_runs.csv [--jobs N] [--limit N] [--worst N]

Each row is a run that is known by its settings and mean lengths only. It is simulated with requests of just these
lengths: at a Poisson rate, with so many clients that each wait for an answer, or all at once. Of data-parallel replicas
one is simulated, with its share of the clients. Each client's first request, which meets all others' at the start, is
left out, as benchmarks do that warm up. Constants are those that are shipped; nothing is fitted to these rows.

SGLang and TensorRT-LLM are simulated by vLLM's scheduler, since theirs are not held. Left out, and counted: other
engines, disaggregated servers, rows without lengths or load, models and GPUs that are not known, and models that the
fast engine does not reach, since thousands of rows are to take minutes.
"""

from __future__ import annotations

import argparse
import csv
import json
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import NamedTuple

from log_figures import number, whole
from measured_names import gpu_name, model_name, overrides_of

from kvplan.core.metrics import RequestRecord, e2e_ticks, tpot_ticks, ttft_ticks
from kvplan.core.request import PICOSECONDS
from kvplan.errors import KvplanError
from kvplan.jobs.simulate import Simulation
from kvplan.options import SimulateOptions
from kvplan.simulated_engines import has_fast_path

#: Requests of a run: enough for steady queues, few enough that thousands of runs take minutes.
REQUESTS_A_CLIENT, FEWEST, MOST = 4, 64, 2000
#: Requests of a replay's cycle of prompts, and of a group with a common prefix.
CYCLE, GROUP = 100, 10
#: vLLM of the rows that do not tell their version, by source.
VERSIONS = {"lib": "vllm@0.6", "residency": "vllm@0.23", "blis-train": "vllm@0.19", "lss": "vllm@0.19"}
#: Requests that the client of one source lets be under way at once.
MOST_CLIENTS = 256
#: vLLM 0.14 plans ahead unless it is told not to.
FIRST_ASYNCHRONOUS = 14
#: Seed of drawn arrivals.
SEED = 7
FIGURES = ("E2E", "TPOT", "TTFT")


class Row(NamedTuple):
    """A run: where it is from, its settings, its requests' lengths and load, and what was measured, in seconds."""

    run_id: str
    source: str
    engine: str
    gpu: str
    model: str
    options: dict[str, object]
    input_tokens: int
    output_tokens: int
    num_requests: int
    num_left_out: int
    rate: float | None
    shared_prefix: int
    measured: tuple[float | None, float | None, float | None]


class Outcome(NamedTuple):
    """Estimated over measured less one for E2E, TPOT and TTFT, None where it was not measured; or why there is none."""

    row: Row
    errors: tuple[float | None, ...]
    left_out: str | None


def main() -> None:
    """Print the median errors by source, engine, GPU and model, what was left out, and the worst rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--limit", type=int, help="of each source only so many rows")
    parser.add_argument("--worst", type=int, default=10)
    arguments = parser.parse_args()
    left_out: Counter[str] = Counter()
    rows: list[Row] = []
    seen: Counter[str] = Counter()
    with arguments.file.open(newline="") as file:
        for fields in csv.DictReader(file):
            reason = unsuited(fields)
            if reason is not None:
                left_out[reason] += 1
                continue
            row = read(fields)
            seen[row.source] += 1
            if arguments.limit is None or seen[row.source] <= arguments.limit:
                rows.append(row)
    with ProcessPoolExecutor(arguments.jobs) as pool:
        outcomes = list(pool.map(compare, rows, chunksize=16))
    left_out.update(one.left_out for one in outcomes if one.left_out is not None)
    done = [one for one in outcomes if one.left_out is None]
    print_table(done)
    print(f"\n{len(done):,} rows compared. Left out:")
    for reason, count in left_out.most_common():
        print(f"- {count:,}: {reason}")
    print_worst(done, arguments.worst)


def unsuited(fields: Mapping[str, str]) -> str | None:
    """Why a row is not simulated; None: it is."""
    if fields["mode"] != "agg":
        return "disaggregated prefill and decode"
    if fields["engine"].lower() not in ("vllm", "trtllm", "tensorrt-llm", "sglang"):
        return f"engine {fields['engine']}"
    if not fields["isl_mean"] or not fields["osl_mean"]:
        return f"{source_of(fields)}: no lengths"
    if not any(fields[name] for name in ("rate_rps", "concurrency", "batch_size")):
        return f"{source_of(fields)}: no load"
    return None


def source_of(fields: Mapping[str, str]) -> str:
    """The prefix that says who measured."""
    return fields["run_id"].partition("/")[0]


def read(fields: Mapping[str, str]) -> Row:
    """A row as a run."""
    is_closed = fields["kind"] == "online_closed_loop"
    # Where both are told, the batch is the concurrency of one replica.
    clients = whole(fields["batch_size"] or fields["concurrency"]) if is_closed else None
    batch = whole(fields["batch_size"]) if fields["kind"] == "offline_static_batch" else None
    if (whole(fields["max_running"]) or 0) >= MOST_CLIENTS:
        clients = MOST_CLIENTS  # what the client let be under way at once, whatever its rate
    input_tokens, output_tokens = round(float(fields["isl_mean"])), max(1, round(float(fields["osl_mean"])))
    replicas = max(1, whole(fields["dp"]) or 1)
    options = options_of(fields, input_tokens + output_tokens, replicas)
    if clients is not None:
        options["concurrency"] = clients
        requests = clients + min(MOST, max(FEWEST, REQUESTS_A_CLIENT * clients))
    else:
        requests = batch or min(MOST, whole(fields["num_requests"]) or MOST)
    measured = [number(fields[f"{name}_mean_ms"]) for name in ("e2e", "tpot", "ttft")]
    e2e, tpot, ttft = (None if value is None else value / 1e3 for value in measured)
    return Row(
        run_id=fields["run_id"],
        source=source_of(fields),
        engine=fields["engine"],
        gpu=fields["gpu"],
        model=fields["model"],
        options=options,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        num_requests=requests,
        num_left_out=clients or 0,
        rate=rate_of(fields) if clients is None and batch is None else None,
        shared_prefix=whole(fields["shared_prefix_len"]) or 0,
        measured=(e2e, tpot, ttft),
    )


def rate_of(fields: Mapping[str, str]) -> float | None:
    """Requests a second; of one source as they came, since its table may name twice the rate."""
    requests, duration = number(fields["num_requests"]), number(fields["duration_s"])
    if source_of(fields) == "residency" and requests and duration:
        return requests / duration
    return number(fields["rate_rps"])


def options_of(fields: Mapping[str, str], length: int, replicas: int) -> dict[str, object]:
    """The settings of a row: what it says, else the engine's defaults with room for its longest request."""
    gpus = whole(fields["n_gpus"]) or 1
    tp = whole(fields["tp"]) or gpus
    if tp * replicas > gpus >= replicas:  # replicas of attention within the group
        tp = gpus // replicas
    version = fields["engine_version"]
    engine = "vllm"
    if fields["engine"].lower() == "vllm":
        engine = f"vllm@{version}" if version[:1].isdigit() else VERSIONS.get(source_of(fields), engine)
    sets = [*overrides_of(fields["model"])]
    options: dict[str, object] = {
        "model": model_name(fields["model"]),
        "gpu": f"{tp * replicas}x{gpu_name(fields['gpu'])}",
        "tensor_parallel_size": tp,
        "data_parallel_size": replicas,
        "enable_expert_parallel": (whole(fields["ep"]) or 1) > 1,
        "engine": engine,
        "async_scheduling": is_asynchronous(engine),
        "max_model_len": whole(fields["max_model_len"]) or length,
        "max_num_seqs": whole(fields["max_num_seqs"]),
        "max_num_batched_tokens": whole(fields["max_num_batched_tokens"]),
        "num_gpu_blocks_override": whole(fields["kv_blocks_gpu"]),
        "gpu_memory_utilization": number(fields["gpu_mem_util"]),
    }
    precision = fields["precision"].lower()
    stored = ("deepseek", "gpt-oss", "minimax", "kimi", "glm-5")  # in few bits as they are published
    is_stored = any(name in fields["model"].lower() for name in stored)
    if precision == "fp8" and not is_stored:
        options["quantization"] = "fp8"
    elif precision == "fp4" and "gpt-oss" not in fields["model"] and "Kimi" not in fields["model"]:
        sets.append('quantization_config={"quant_method": "modelopt", "quant_algo": "NVFP4"}')
    if sets:
        options["set"] = tuple(sets)
    return {name: value for name, value in options.items() if value is not None}


def is_asynchronous(engine: str) -> bool:
    """Whether this vLLM, which stands for other engines too, plans its steps ahead by default: since 0.14."""
    _, _, version = engine.partition("@")
    return not version or int(version.split(".")[1]) >= FIRST_ASYNCHRONOUS


def compare(row: Row) -> Outcome:
    """Simulate a row and hold it against what was measured."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.jsonl")
        path.write_text("".join(f"{line}\n" for line in lines_of(row)))
        records: list[RequestRecord] = []
        try:
            simulation = Simulation(str(path), SimulateOptions.of(row.options))
            if not has_fast_path(simulation.engine_config):
                simulation.trace.close()
                return Outcome(row, (), f"{row.source}: served by the plain engine alone, step by step")
            simulation.run(on_request=records.append)
        except KvplanError as error:
            return Outcome(row, (), f"{row.source}: {brief(str(error))}")
    records = [record for record in records if record.number >= row.num_left_out]
    errors: list[float | None] = []
    for times, measured in zip((e2e_ticks, tpot_ticks, ttft_ticks), row.measured, strict=True):
        found = [value for record in records if (value := times(record)) is not None]
        ours = fmean(found) / PICOSECONDS if found else None
        errors.append(ours / measured - 1 if ours is not None and measured else None)
    if all(error is None for error in errors):
        return Outcome(row, (), f"{row.source}: no request finished")
    return Outcome(row, tuple(errors), None)


def brief(text: str) -> str:
    """A reason without what differs from row to row."""
    for word in ("the engine would not start", "not yet supported: simulation of layers of several kinds"):
        if word in text:
            return word
    return text[:120]


def lines_of(row: Row) -> Iterator[str]:
    """The requests of a row; those of a shared prefix repeat a hundred prompts, as its client did."""
    draw = Random(SEED)
    now = 0.0
    for place in range(row.num_requests):
        if row.rate is not None:
            now += draw.expovariate(row.rate)
        line: dict[str, object] = {
            "arrival_s": round(now, 6),
            "input_tokens": row.input_tokens,
            "output_tokens": row.output_tokens,
        }
        if row.shared_prefix:
            prompt = place % CYCLE
            line["content"] = [
                [f"group-{prompt // GROUP}", 0, row.shared_prefix],
                [f"prompt-{prompt}", 0, row.input_tokens - row.shared_prefix],
            ]
        yield json.dumps(line)


def print_table(done: Sequence[Outcome]) -> None:
    """Median absolute error, and median error with its sign, of each figure by source, engine, GPU and model."""
    groups: defaultdict[tuple[str, ...], list[Outcome]] = defaultdict(list)
    for one in done:
        row = one.row
        groups[row.source, row.engine, row.gpu, row.model].append(one)
        groups[row.source, row.engine, "all", "all"].append(one)
    print("| source | engine | GPU | model | rows | " + " | ".join(FIGURES) + " |")
    print("|---|---|---|---|---|" + "---|" * len(FIGURES))
    for key, members in sorted(groups.items(), key=lambda item: (item[0][:2], item[0][2] != "all", item[0])):
        cells = []
        for place in range(len(FIGURES)):
            known = [error for one in members if (error := one.errors[place]) is not None]
            cells.append(
                f"{100 * median(map(abs, known)):.0f} % ({100 * median(known):+.0f})" if known else "-"
            )
        print(f"| {' | '.join(key)} | {len(members)} | {' | '.join(cells)} |")


def print_worst(done: Sequence[Outcome], count: int) -> None:
    """The rows whose largest error is largest, in terms of factors."""

    def factor(one: Outcome) -> float:
        return max(max(1 + error, 1 / max(1 + error, 1e-9)) for error in one.errors if error is not None)

    print(f"\nThe worst {count} rows:\n")
    print("| run | requests | " + " | ".join(FIGURES) + " |")
    print("|---|---|" + "---|" * len(FIGURES))
    for one in sorted(done, key=factor, reverse=True)[:count]:
        row = one.row
        load = row.options.get(
            "concurrency", f"{row.rate} a second" if row.rate else f"{row.num_requests} at once"
        )
        cells = ["-" if error is None else f"{100 * error:+,.0f} %" for error in one.errors]
        print(
            f"| {row.run_id} | {row.input_tokens} in, {row.output_tokens} out, {load} | {' | '.join(cells)} |"
        )


if __name__ == "__main__":
    main()
