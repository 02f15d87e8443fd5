"""CPU seconds of whole simulations: reading, engine, clock and metrics; start-up apart.

Usage: python benchmarks/bench_simulate.py [--json] [--engine fast|plain] [--requests N] [--trace FILE ...]
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from random import Random

from kvplan.core.cost import constant, constant_decode
from kvplan.core.engine import SchedulerConfig
from kvplan.core.engines.vllm import Vllm
from kvplan.core.engines.vllm_plain import VllmPlain
from kvplan.core.metrics import Metrics
from kvplan.core.request import Request
from kvplan.core.simulate import run
from kvplan.jobs.simulate import Simulation
from kvplan.options import SimulateOptions
from kvplan.trace import workload_names


def drawn(count: int, *, path: str, num_gpu_blocks: int, caching: bool) -> dict[str, object]:
    """``count`` requests of about 510 prompt and 198 output tokens through a pool, arriving every step or so."""
    rng = Random(7)
    now = 0
    requests = []
    for i in range(count):
        now += rng.randint(0, 4)
        requests.append(Request(str(i), now, rng.randint(20, 1000), rng.randint(10, 386)))
    config = SchedulerConfig(num_gpu_blocks, 16, 8192, 256, 4096, enable_prefix_caching=caching)
    engine = Vllm(config) if path == "fast" else VllmPlain(config)
    metrics = Metrics(
        num_gpu_blocks=num_gpu_blocks, block_size=16, prefix_caching=caching, seconds_per_tick=None
    )
    start = time.process_time()
    run(requests, engine, constant(1), metrics, decode_price=constant_decode(1), step_numbered=True)
    cpu_s = time.process_time() - start
    return {
        "run": f"{count} drawn, {num_gpu_blocks} blocks, caching {'on' if caching else 'off'}",
        "cpu_s": cpu_s,
        "requests_per_s": count / cpu_s,
        "steps": metrics.steps,
        "preemptions": metrics.preemption_events,
    }


def traced(trace: str, path: str) -> dict[str, object]:
    """A trace on the default model and GPU, reading included."""
    start = time.process_time()
    result = Simulation(trace, SimulateOptions()).run(path=path)
    cpu_s = time.process_time() - start
    return {
        "run": trace,
        "cpu_s": cpu_s,
        "requests_per_s": result.requests.total / cpu_s,
        "steps": result.steps,
        "preemptions": result.preemptions.events,
    }


def main() -> None:
    """Run everything and print a line each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--engine", choices=["fast", "plain"], default="fast")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--trace", action="append", default=[], metavar="FILE")
    arguments = parser.parse_args()
    count, path = arguments.requests, arguments.engine
    rows = [
        drawn(count, path=path, num_gpu_blocks=20_000, caching=False),
        drawn(count, path=path, num_gpu_blocks=20_000, caching=True),
        drawn(count, path=path, num_gpu_blocks=4_096, caching=True),
        *[traced(name, path) for name in [*workload_names(), *arguments.trace]],
    ]
    if arguments.json:
        print(json.dumps({"python": platform.python_version(), "rows": rows}))
        return
    print(f"Python {platform.python_version()}, {path} engine")
    for row in rows:
        print(
            f"{str(row['run'])[-52:]:52} {row['cpu_s']:7.2f} s  {row['requests_per_s']:9,.0f} requests/s  "
            f"{row['steps']:8,} steps  {row['preemptions']:6,} preemptions"
        )


if __name__ == "__main__":
    main()
