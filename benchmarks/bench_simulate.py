"""CPU seconds and peak memory of whole simulations on one core: reading, engine, clock and metrics; start-up apart.

The traces are drawn here, always the same. Each is run synchronously and asynchronously, each time in a process of its
own; the asynchronous row says how many times longer it took.

Usage: python benchmarks/bench_simulate.py [--json] [--engine fast|plain] [--repeat N] [--long] [--trace FILE ...]
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any

from kvplan.core.engines.vllm import Vllm
from kvplan.core.engines.vllm_plain import VllmPlain
from kvplan.jobs.simulate import Simulation
from kvplan.options import SimulateOptions
from kvplan.trace import workload_names

Lines = Iterator[str]


def drawn() -> Lines:
    """Requests of about 510 prompt and 198 output tokens, 25 a second: about 100 run at 20 ms a step."""
    rng = Random(7)
    now = 0.0
    number = 0
    while True:
        now += rng.expovariate(25)
        row = {
            "id": f"r{number}",
            "arrival_s": round(now, 6),
            "input_tokens": rng.randint(20, 1000),
            "output_tokens": rng.randint(10, 386),
        }
        yield json.dumps(row)
        number += 1


def azure_like() -> Lines:
    """Lengths and rate as in Azure's conversation trace of 2023: 5.5 a second, about 1,150 in and 210 out."""
    rng = Random(11)
    now = 0.0
    yield "TIMESTAMP,ContextTokens,GeneratedTokens"
    while True:
        now += rng.expovariate(5.53)
        clock = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(1_700_000_000 + int(now)))
        prompt = min(14_000, max(1, int(rng.lognormvariate(6.7, 0.85))))
        answer = min(1_000, max(7, int(rng.lognormvariate(5.0, 0.85))))
        yield f"{clock}.{int(now % 1 * 10**7):07},{prompt},{answer}"


def mooncake_like() -> Lines:
    """Conversations as in Mooncake's trace: ten requests every three seconds, about 12,000 prompt tokens each.

    A third goes on with an earlier prompt, whose whole blocks of 512 tokens it repeats.
    """
    rng = Random(13)
    earlier: list[list[int]] = []
    next_id = number = 0
    while True:
        ids: list[int] = []
        if earlier and rng.random() < 0.45:
            ids = list(earlier[max(0, len(earlier) - 1 - int(rng.expovariate(1 / 300)))])
        new = min(110_000 - 512 * len(ids), max(100, int(rng.lognormvariate(8.2, 1.2))))
        new = max(1, new)
        length = 512 * len(ids) + new
        more = -(-new // 512)
        ids += range(next_id, next_id + more)
        next_id += more
        earlier.append(ids[: length // 512])
        row = {
            "timestamp": 3_000 * (number // 10),
            "input_length": length,
            "output_length": min(2_000, max(1, int(rng.lognormvariate(5.5, 0.8)))),
            "hash_ids": ids,
        }
        yield json.dumps(row)
        number += 1


TIGHT = {"num_gpu_blocks_override": 4_096, "max_model_len": 4_096}
ROOMY = {"num_gpu_blocks_override": 20_000, "max_model_len": 4_096}
#: About as many steps as the rivals' runs of Azure's trace had.
SHORT_STEPS = {"num_gpu_blocks_override": 20_000, "max_model_len": 16_384, "step_time": 0.014}
LARGE = {"model": "llama-3.1-8b", "gpu": "h100-80gb", "num_gpu_blocks_override": 100_000}
#: Name, trace, its lines, options. Those without a pool run on the default model and GPU, with estimated times.
RUNS: list[tuple[str, Callable[[], Lines], int, dict[str, object]]] = [
    ("10,000 drawn, caching off", drawn, 10_000, {**ROOMY, "enable_prefix_caching": False}),
    ("10,000 drawn", drawn, 10_000, ROOMY),
    ("10,000 drawn, 4,096 blocks, caching off", drawn, 10_000, {**TIGHT, "enable_prefix_caching": False}),
    ("10,000 drawn, 4,096 blocks", drawn, 10_000, TIGHT),
    ("10,000 drawn, step model", drawn, 10_000, {}),
    ("20,000 Azure-like", azure_like, 20_001, SHORT_STEPS),
    ("20,000 Azure-like, step model", azure_like, 20_001, {}),
    ("12,000 Mooncake-like, 100,000 blocks, step model", mooncake_like, 12_000, LARGE),
]
LONG: list[tuple[str, Callable[[], Lines], int, dict[str, object]]] = [
    ("1,000,000 drawn, caching off", drawn, 1_000_000, {**ROOMY, "enable_prefix_caching": False}),
    ("1,000,000 drawn", drawn, 1_000_000, ROOMY),
    ("1,000,000 drawn, step model, caching off", drawn, 1_000_000, {"enable_prefix_caching": False}),
    ("1,000,000 drawn, step model", drawn, 1_000_000, {}),
]


#: Name, trace, options, engine path and number of runs.
Job = tuple[str, str, dict[str, object], str, int]


def measure(job: Job) -> dict[str, object]:
    """Run a trace, ``repeat`` times, and give the quickest."""
    name, source, options, path, repeat = job
    turns = _count_turns()
    quickest: float | None = None
    for _ in range(repeat):
        turns[0] = 0
        simulation = Simulation(source, SimulateOptions.of(options))
        start = time.process_time()
        result = simulation.run(path=path)
        cpu_s = time.process_time() - start
        quickest = cpu_s if quickest is None else min(quickest, cpu_s)
    assert quickest is not None
    unit = 1 if sys.platform == "darwin" else 1024
    return {
        "run": name,
        "async_scheduling": result.simulation["async_scheduling"],
        "cpu_s": quickest,
        "requests_per_s": result.requests.total / quickest,
        "turns_per_request": turns[0] / result.requests.total,
        "steps": result.steps,
        "preemptions": result.preemptions.events,
        "hit_rate": result.prefix_cache.hit_rate,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit,
    }


def measure_apart(job: Job, asynchronous: bool) -> dict[str, Any]:
    """As `measure`, in a process of its own."""
    name, source, options, path, repeat = job
    job = (name, source, {**options, "async_scheduling": asynchronous}, path, repeat)
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(measure, (job,))


def line(row: dict[str, Any]) -> str:
    """A row as it is printed."""
    name = row["run"][-48:]
    if row["async_scheduling"]:
        name = f"  asynchronously: {row['times_synchronous']:.2f} times as long"
    return (
        f"{name:48} {row['cpu_s']:6.2f} s {row['requests_per_s']:8,.0f} requests/s"
        f" {row['turns_per_request']:6.2f} turns/request {row['steps']:10,} steps"
        f" {row['preemptions']:6,} preempted, hit {row['hit_rate'] or 0:4.0%},"
        f" {row['peak_rss_bytes'] / 2**20:4.0f} MiB"
    )


def _count_turns() -> list[int]:
    """A counter of the turns that engines of this process take, one at a time."""
    turns = [0]
    for engine in (Vllm, VllmPlain):
        _count(engine, turns)
    return turns


def _count(engine: type, turns: list[int]) -> None:
    take = engine.turn

    def turn(self: object, *arguments: object) -> object:
        turns[0] += 1
        return take(self, *arguments)

    engine.turn = turn


def main() -> None:
    """Run everything and print a line each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--engine", choices=["fast", "plain"], default="fast")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each, of which the quickest counts")
    parser.add_argument("--long", action="store_true", help="a million requests too: about six minutes")
    parser.add_argument("--trace", action="append", default=[], metavar="FILE")
    arguments = parser.parse_args()
    path, repeat = arguments.engine, arguments.repeat
    rows = []
    if not arguments.json:
        print(f"Python {platform.python_version()}, {path} engine")
    with tempfile.TemporaryDirectory() as folder:
        jobs: list[Job] = [(name, name, {}, path, repeat) for name in [*workload_names(), *arguments.trace]]
        for name, lines, count, options in [*RUNS, *(LONG if arguments.long else [])]:
            source = Path(folder, f"{lines.__name__}-{count}")
            if not source.exists():
                with source.open("w") as file:
                    file.writelines(f"{line}\n" for line in islice(lines(), count))
            jobs.append((name, str(source), options, path, 1 if count >= 1_000_000 else repeat))
        for job in jobs:
            synchronous, asynchronous = (measure_apart(job, asynchronous) for asynchronous in (False, True))
            asynchronous["times_synchronous"] = asynchronous["cpu_s"] / synchronous["cpu_s"]
            rows += [synchronous, asynchronous]
            if not arguments.json:
                print(line(synchronous))
                print(line(asynchronous), flush=True)
    if arguments.json:
        print(json.dumps({"python": platform.python_version(), "rows": rows}))


if __name__ == "__main__":
    main()
