"""Latencies of whole runs as kvplan simulates them, against what clients and engines measured.

Usage: python benchmarks/latency_against_runs.py FOLDER [--traces FOLDER] [--jobs N] [--picture OUT.png]

FOLDER holds ``serving_runs.csv``, ``replay/*.csv.gz`` (requests as a client saw them) and ``vllm_runs`` (as the engine
logged them); ``--traces`` holds ``sharegpt-llama-3.1-8b-300-sps10.blocks16.jsonl``, the prompts of the latter. Each run
is simulated with its own settings: model, parallelism, GPU, lengths, limits and, where they are printed, blocks.
Constants are those that are shipped; nothing is fitted here. A run that the client made in stages is simulated whole
and compared stage by stage, since caches stay warm and queues full between them.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from log_figures import number, whole
from measured_names import gpu_name, model_name

from kvplan.core.course import Course
from kvplan.core.metrics import RequestRecord, e2e_ticks, tpot_ticks, ttft_ticks
from kvplan.core.request import PICOSECONDS
from kvplan.jobs.simulate import SimulateResult, Simulation
from kvplan.options import SimulateOptions

#: The client sends its prompts in turn and begins anew after so many (the default of inference-perf's shared prefixes:
#: 10 groups of 10): input lengths of every replay repeat with this period.
CYCLE, GROUP = 100, 10
#: vLLM's version is not printed by the replays, which are of February 2026; the nearest whose rules are held.
VERSION_OF_REPLAYS = "vllm@0.19"
PROMPTS = "sharegpt-llama-3.1-8b-300-sps10.blocks16.jsonl"


class Stage(NamedTuple):
    """Requests ``first`` up to ``last`` of a run and the means that were measured, in seconds."""

    name: str
    first: int
    last: int
    e2e_s: float
    tpot_s: float
    ttft_s: float


class Run(NamedTuple):
    """A run: lines of its trace, the options that it amounts to, its stages, and what the engine logged each second.

    ``in_engine`` times begin when the engine has the request, not when the client sends it.
    """

    name: str
    trace: tuple[str, ...]
    options: dict[str, object]
    stages: tuple[Stage, ...]
    in_engine: bool = False
    seconds: tuple[dict[str, str], ...] = ()


class Simulated(NamedTuple):
    """Means of each stage in seconds: E2E, TPOT, TTFT; preemptions; and one row a second where the log has them."""

    stages: tuple[tuple[float, float, float], ...]
    preemptions: int
    recomputed_share: float
    seconds: tuple[tuple[float, float, float], ...]


def replays(folder: Path) -> Iterator[Run]:
    """Runs that a client recorded."""
    with (folder / "serving_runs.csv").open(newline="") as file:
        table = [row for row in csv.DictReader(file) if row["run_id"].startswith("blis-train/")]
    for path in sorted((folder / "replay").glob("*.csv.gz")):
        name = path.name.removesuffix(".csv.gz")
        rows = [row for row in table if row["group"].endswith(f"-{name}")]
        with gzip.open(path, "rt", newline="") as file:
            requests = list(csv.DictReader(file))
        first = rows[0]
        prefix = int(first["shared_prefix_len"])
        yield Run(
            name,
            tuple(replay_line(place, row, prefix) for place, row in enumerate(requests)),
            options_of(first, VERSION_OF_REPLAYS),
            tuple(stages_of(name, rows, requests)),
        )


def replay_line(place: int, row: dict[str, str], prefix: int) -> str:
    """A request whose prompt is the ``place``-th of the cycle, behind the prefix of its group."""
    tokens, prompt = int(row["input_tokens"]), place % CYCLE
    content = [[f"group-{prompt // GROUP}", 0, prefix], [f"prompt-{prompt}", 0, tokens - prefix]]
    return json.dumps(
        {
            "id": str(place),
            "arrival_s": float(row["arrival_s"]),
            "input_tokens": tokens,
            "output_tokens": int(row["output_tokens"]),
            "content": content,
        }
    )


def stages_of(
    name: str, rows: Sequence[dict[str, str]], requests: Sequence[dict[str, str]]
) -> Iterator[Stage]:
    """The stages of a run, which follow each other in its requests."""
    first = 0
    for row in rows:
        last = first + int(row["num_requests"])
        part = requests[first:last]
        ttft = [float(one["ttft_ms"]) / 1e3 for one in part]
        e2e = [float(one["e2e_ms"]) / 1e3 for one in part]
        tpot = [
            (whole_time - begin) / (int(one["output_tokens"]) - 1)
            for one, begin, whole_time in zip(part, ttft, e2e, strict=True)
        ]
        yield Stage(f"{name}/{row['rate_rps']} rps", first, last, fmean(e2e), fmean(tpot), fmean(ttft))
        first = last


def options_of(row: dict[str, str], engine: str) -> dict[str, object]:
    """The settings of a row of ``serving_runs.csv``."""
    options: dict[str, object] = {
        "model": model_name(row["model"]),
        "gpu": f"{int(row['tp'] or 1)}x{gpu_name(row['gpu'])}",
        "tensor_parallel_size": int(row["tp"] or 1),
        "engine": engine,
        "async_scheduling": True,  # the default of vLLM since 0.14
        "max_model_len": whole(row["max_model_len"]),
        "max_num_seqs": whole(row["max_num_seqs"]),
        "max_num_batched_tokens": whole(row["max_num_batched_tokens"]),
        "num_gpu_blocks_override": whole(row["kv_blocks_gpu"]),
        "block_size": whole(row["block_size"]),
        "gpu_memory_utilization": number(row["gpu_mem_util"]),
    }
    if row["prefix_caching"]:
        options["enable_prefix_caching"] = row["prefix_caching"] == "on"
    return {name: value for name, value in options.items() if value is not None}


def logged_runs(folder: Path, traces: Path) -> Iterator[Run]:
    """Runs that the engine logged, with the prompts that they were sent."""
    known = read_prompts(traces / PROMPTS)
    with (folder / "serving_runs.csv").open(newline="") as file:
        rows = {row["run_id"]: row for row in csv.DictReader(file)}
    for path in sorted((folder / "vllm_runs").glob("*.requests.csv")):
        name = path.name.removesuffix(".requests.csv")
        row = rows[f"lss/{name.replace('_', '/', 1)}"]
        with path.open(newline="") as file:
            requests = list(csv.DictReader(file))
        with path.with_name(f"{name}.timeseries.csv").open(newline="") as file:
            seconds = tuple(csv.DictReader(file))
        zero = min(float(one["queued_ts"]) for one in requests)
        ttft = [float(one["first_token_ts"]) - float(one["queued_ts"]) for one in requests]
        e2e = [float(one["last_token_ts"]) - float(one["queued_ts"]) for one in requests]
        tpot = [
            (whole_time - begin) / (int(one["output_toks"]) - 1)
            for one, begin, whole_time in zip(requests, ttft, e2e, strict=True)
        ]
        lengths = [int(one["input_toks"]) for one in requests]
        is_known = lengths == [prompt["input_length"] for prompt in known]
        lines = [
            (float(one["queued_ts"]) - zero, logged_line(place, one, known if is_known else [], zero))
            for place, one in enumerate(requests)
        ]
        stage = Stage(f"vllm log/{name}", 0, len(requests), fmean(e2e), fmean(tpot), fmean(ttft))
        version = f"vllm@{row['engine_version']}"
        trace = tuple(line for _, line in sorted(lines))
        yield Run(name, trace, options_of(row, version), (stage,), in_engine=True, seconds=seconds)


def read_prompts(path: Path) -> list[dict[str, Any]]:
    """The prompts of the logged runs, as ids of blocks; none where the file is not there."""
    if not path.exists():
        return []
    with path.open() as file:
        return [json.loads(line) for line in file]


def logged_line(place: int, row: dict[str, str], prompts: Sequence[dict[str, Any]], zero: float) -> str:
    """A request of a log; where its prompt is not known by the ids of its blocks it shares nothing."""
    line: dict[str, Any] = {
        "id": str(place),
        "arrival_s": round(float(row["queued_ts"]) - zero, 9),
        "input_tokens": int(row["input_toks"]),
        "output_tokens": int(row["output_toks"]),
    }
    if prompts:
        line.update(hash_ids=prompts[place]["hash_ids"], hash_block_size=16)
    return json.dumps(line)


def simulated(run: Run) -> Simulated:
    """The run as it is simulated."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.jsonl")
        path.write_text("\n".join(run.trace) + "\n")
        simulation = Simulation(str(path), SimulateOptions.of(run.options))
        course = Course(simulation.usable_blocks)
        records: list[RequestRecord] = []
        result = simulation.run(turns=[course], on_request=records.append)
    records.sort(key=lambda record: int(record.request.id))
    front_end = front_end_s(result) if run.in_engine else 0.0
    stages = []
    for stage in run.stages:
        part = records[stage.first : stage.last]
        e2e, tpot, ttft = (
            fmean(value / PICOSECONDS for record in part if (value := times(record)) is not None)
            for times in (e2e_ticks, tpot_ticks, ttft_ticks)
        )
        stages.append((e2e - front_end, tpot, ttft - front_end))
    moments = [course.at(round((float(row["t"]) + front_end) * PICOSECONDS)) for row in run.seconds]
    return Simulated(
        tuple(stages),
        result.preemptions.events,
        result.preemptions.recomputed_tokens / result.scheduled_tokens,
        tuple((m.running, m.waiting, 100 * m.used_blocks / simulation.usable_blocks) for m in moments),
    )


def front_end_s(result: SimulateResult) -> float:
    """What the result says that a request takes before it reaches the engine."""
    value = result.latency.model["front_end_s"]
    assert isinstance(value, float)
    return value


def main() -> None:
    """Print a row for each stage, the medians, and the course of the runs that were logged by the second."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--traces", type=Path, help="the folder with the logged runs' prompts")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--picture", type=Path, help="draw the fullest logged run, as PNG or SVG")
    arguments = parser.parse_args()
    traces = arguments.traces or arguments.folder.parent / "traces" / "llmservingsim"
    runs = [*replays(arguments.folder), *logged_runs(arguments.folder, traces)]
    with ProcessPoolExecutor(arguments.jobs) as pool:
        found = list(pool.map(simulated, runs))
    print_stages(runs, found)
    for run, ours in zip(runs, found, strict=True):
        if run.seconds:
            print_course(run, ours)
    if arguments.picture is not None:
        run, ours = max(
            ((run, ours) for run, ours in zip(runs, found, strict=True) if run.seconds),
            key=lambda pair: max(usage for _, _, usage in pair[1].seconds),
        )
        draw_course(arguments.picture, run, ours)


def print_stages(runs: Sequence[Run], found: Sequence[Simulated]) -> None:
    """Simulated over measured, and the error, of each stage; the median of each column over all."""
    print("| run | E2E, ms | error | TPOT, ms | error | TTFT, ms | error |")
    print("|---|---|---|---|---|---|---|")
    errors: list[tuple[float, ...]] = []
    for run, ours in zip(runs, found, strict=True):
        for stage, means in zip(run.stages, ours.stages, strict=True):
            theirs = stage[3:]
            errors.append(tuple(mine / measured - 1 for mine, measured in zip(means, theirs, strict=True)))
            cells = [
                f"{1e3 * mine:,.{digits}f} / {1e3 * measured:,.{digits}f} | {100 * error:+.1f} %"
                for mine, measured, error, digits in zip(means, theirs, errors[-1], (0, 2, 1), strict=True)
            ]
            print(f"| {stage.name} | {' | '.join(cells)} |")
    middles = [f"| {100 * median(map(abs, column)):.1f} %" for column in zip(*errors, strict=True)]
    print(f"| **median of absolute errors** | {' | '.join(middles)} |")


def print_course(run: Run, ours: Simulated) -> None:
    """Queues and KV usage at ten moments, simulated over logged, and how far they are apart on the mean."""
    print(
        f"\n{run.name}: {ours.preemptions} preemptions, {100 * ours.recomputed_share:.1f} % of the tokens computed"
    )
    print("were computed before\n")
    print("| second | running | waiting | KV usage, % |")
    print("|---|---|---|---|")
    pairs = [logged_and_simulated(row, mine) for row, mine in zip(run.seconds, ours.seconds, strict=True)]
    for place in range(0, len(pairs), max(1, len(pairs) // 10)):
        cells = [
            f"{mine:.0f} / {theirs:.0f}" if theirs is not None else f"{mine:.0f} / -"
            for theirs, mine in pairs[place]
        ]
        print(f"| {run.seconds[place]['t']} | {' | '.join(cells)} |")
    apart = []
    for column in zip(*pairs, strict=True):
        known = [abs(mine - theirs) for theirs, mine in column if theirs is not None]
        apart.append(f"{fmean(known):.1f}" if known else "-")
    print(f"| mean difference | {' | '.join(apart)} |")


def logged_and_simulated(
    row: dict[str, str], mine: tuple[float, float, float]
) -> tuple[tuple[float | None, float], ...]:
    """Running, waiting and KV usage; a usage of 0 while requests run was not sampled."""
    running, waiting, usage = float(row["running"]), float(row["waiting"]), number(row["kv_cache_pct"])
    is_sampled = usage is not None and (usage > 0 or running == 0)
    return ((running, mine[0]), (waiting, mine[1]), (usage if is_sampled else None, mine[2]))


def draw_course(path: Path, run: Run, ours: Simulated) -> None:
    """Draw queues and KV usage over time, simulated over logged."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 7), layout="constrained")
    times = [float(row["t"]) for row in run.seconds]
    names = (("running", "running"), ("waiting", "waiting"), ("kv_cache_pct", "KV cache usage, %"))
    for place, (panel, (key, label)) in enumerate(
        zip(figure.subplots(3, 1, sharex=True), names, strict=True)
    ):
        panel.plot(times, [float(row[key]) for row in run.seconds], color="tab:gray", label="logged")
        panel.plot(
            times, [row[place] for row in ours.seconds], color="tab:blue", linewidth=1, label="simulated"
        )
        panel.set_ylabel(label)
        panel.set_ylim(bottom=0)
    figure.axes[0].legend()
    figure.axes[-1].set_xlabel("seconds")
    figure.suptitle(run.name)
    figure.savefig(path)


if __name__ == "__main__":
    main()
