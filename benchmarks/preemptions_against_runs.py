"""Preemptions of simulated runs against those that vLLM counted.

Usage: python benchmarks/preemptions_against_runs.py preemption_runs.csv [--seeds N]

Each row is a closed loop of clients with prompts and answers of drawn lengths, in a pool of known size, with a share of
the pool that admissions leave free (the watermark). Who is preempted does not depend on how long steps take there:
clients wait for answers, not for a clock. Lengths are drawn anew for each seed, as ``vllm bench serve`` does with
``--random-range-ratio``: evenly from (1 - r) to (1 + r) times the nominal length.
"""

from __future__ import annotations

import argparse
import csv
import re
from collections.abc import Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from random import Random
from statistics import fmean
from typing import NamedTuple

from kvplan.core.cost import constant, constant_decode
from kvplan.core.engine import SchedulerConfig
from kvplan.core.engines.vllm import Vllm
from kvplan.core.metrics import Metrics
from kvplan.core.request import Request
from kvplan.core.simulate import run

BLOCK_SIZE = 16
#: What vLLM 0.19 schedules in a step on GPUs as large as these (server defaults).
BATCHED_TOKENS = 8192
WORKLOAD = re.compile(
    r"input ~(?P<input>\d+), output ~(?P<output>\d+), range ratio (?P<ratio>[\d.]+), .*?(?P<prompts>\d+) prompts, "
    r"closed loop (?P<clients>\d+)"
)


class Counted(NamedTuple):
    """Preemptions of a run, and the share of the tokens computed that had been computed before."""

    preemptions: int
    recomputed_share: float


def main() -> None:
    """Print counted and simulated preemptions of each row."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    arguments = parser.parse_args()
    print("| run | watermark | counted | simulated: mean, least to most | tokens computed again |")
    print("|---|---|---|---|---|")
    with arguments.file.open(newline="") as file:
        for row in csv.DictReader(file):
            found = [simulated(row, seed) for seed in range(arguments.seeds)]
            counts = [one.preemptions for one in found]
            share = fmean(one.recomputed_share for one in found)
            print(
                f"| {row['run_id']} | {row['kv_watermark']} | {int(row['preemptions']):,} | {fmean(counts):,.0f}, "
                f"{min(counts):,} to {max(counts):,} | {100 * share:.1f} % |"
            )


def simulated(row: Mapping[str, str], seed: int) -> Counted:
    """One run of a row, with lengths of a seed."""
    workload = WORKLOAD.search(row["workload"])
    assert workload is not None, row["workload"]
    config = SchedulerConfig(
        num_gpu_blocks=int(row["kv_tokens"]) // BLOCK_SIZE + 1,
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=BATCHED_TOKENS,
        max_num_seqs=int(row["max_num_seqs"]),
        max_model_len=int(row["max_model_len"]),
        enable_prefix_caching=row["prefix_caching"] == "on",
        watermark=0.0 if row["kv_watermark"] == "off" else float(row["kv_watermark"]),
        async_scheduling=True,
    )
    metrics = Metrics(
        num_gpu_blocks=config.num_gpu_blocks,
        block_size=BLOCK_SIZE,
        prefix_caching=config.enable_prefix_caching,
        seconds_per_tick=Fraction(1),
    )
    outcome = run(
        requests_of(workload, Random(seed)),
        Vllm(config),
        constant(1),
        metrics,
        decode_price=constant_decode(1),
        num_clients=int(workload["clients"]),
    )
    assert outcome.status == "done", outcome.reason
    return Counted(metrics.preemption_events, metrics.recomputed_tokens / metrics.scheduled_tokens)


def requests_of(workload: re.Match[str], draw: Random) -> Iterator[Request]:
    """Requests of drawn lengths."""
    ratio = float(workload["ratio"])

    def drawn(nominal: str) -> int:
        return draw.randint(round(int(nominal) * (1 - ratio)), round(int(nominal) * (1 + ratio)))

    for number in range(int(workload["prompts"])):
        yield Request(str(number), 0, drawn(workload["input"]), drawn(workload["output"]))


if __name__ == "__main__":
    main()
