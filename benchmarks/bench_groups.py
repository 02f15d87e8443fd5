"""CPU seconds of simulations with several cache groups, on one core: engine, clock and metrics, and reading the trace.

Models with their real groups (gpt-oss-20b: full attention and one window) on a trace. Says which engine ran.

Usage: python benchmarks/bench_groups.py [--trace FILE] [--limit N] [--repeat N] [--json]
"""

from __future__ import annotations

import argparse
import json
import platform
import time

from kvplan.errors import KvplanError
from kvplan.jobs.simulate import Simulation
from kvplan.options import SimulateOptions

#: Each on as many H100s as hold it. The last keeps all tokens: what one group costs.
MODELS: list[tuple[str, dict[str, object]]] = [
    ("gpt-oss-20b", {}),
    ("gemma-3-4b", {}),
    ("gemma-4-31b", {"tensor_parallel_size": 2}),
    ("qwen3-next-80b-a3b", {"tensor_parallel_size": 4}),
    ("llama-4-scout-17b-16e", {"tensor_parallel_size": 8}),
    ("llama-3.1-8b", {}),
]
COMMON: dict[str, object] = {"gpu": "h100-80gb", "max_model_len": 16_384}
#: How each is run: by default, synchronous, without prefix cache, and with a price of 20 ms a step.
WAYS: list[tuple[str, dict[str, object]]] = [
    ("asynchronous", {"async_scheduling": True}),
    ("synchronous", {"async_scheduling": False}),
    ("no prefix cache", {"async_scheduling": True, "enable_prefix_caching": False}),
    ("20 ms a step", {"async_scheduling": True, "step_time": 0.02}),
]


def measure(source: str, options: dict[str, object], repeat: int) -> dict[str, object]:
    """Run a trace, ``repeat`` times, and give the quickest."""
    quickest: float | None = None
    for _ in range(repeat):
        simulation = Simulation(source, SimulateOptions.of(options))
        start = time.process_time()
        result = simulation.run()
        cpu_s = time.process_time() - start
        quickest = cpu_s if quickest is None else min(quickest, cpu_s)
    assert quickest is not None
    return {
        "engine_path": result.simulation["engine_path"],
        "groups": len(simulation.engine_config.groups),
        "cpu_s": quickest,
        "requests_per_s": result.requests.total / quickest,
        "steps": result.steps,
        "preemptions": result.preemptions.events,
        "utilization": result.kv.utilization.mean,
    }


def main() -> None:
    """Run everything and print a line each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", default="chat", metavar="FILE", help="a trace or a shipped workload")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first requests")
    parser.add_argument("--repeat", type=int, default=1, help="runs of each, of which the quickest counts")
    parser.add_argument("--model", action="append", default=[], help="only these")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = []
    if not arguments.json:
        print(f"Python {platform.python_version()}, {arguments.trace}")
    for model, machine in MODELS:
        if arguments.model and model not in arguments.model:
            continue
        for way, settings in WAYS:
            options = {**COMMON, **machine, **settings, "model": model, "limit": arguments.limit}
            try:
                row = measure(arguments.trace, options, arguments.repeat)
            except KvplanError as error:
                print(f"{model:24} {way:16} {error}", flush=True)
                continue
            rows.append({"model": model, "way": way, **row})
            if not arguments.json:
                print(
                    f"{model:24} {way:16} {row['groups']} groups, {row['engine_path']:5} {row['cpu_s']:7.2f} s"
                    f" {row['requests_per_s']:8,.0f} requests/s {row['steps']:9,} steps"
                    f" {row['preemptions']:6,} preempted",
                    flush=True,
                )
    if arguments.json:
        print(json.dumps({"python": platform.python_version(), "trace": arguments.trace, "rows": rows}))


if __name__ == "__main__":
    main()
