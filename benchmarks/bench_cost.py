"""What pricing a turn costs: microseconds of CPU for runs of decodes and for steps with prompts.

Usage: python benchmarks/bench_cost.py [--json]

Batches and contexts are drawn as turns of a simulation are: a few hundred different batch sizes, every context new. The
least of five rounds counts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from random import Random
from time import process_time

from step_rows import served_model

from kvplan.core.engine import StepWork
from kvplan.step_time import latency_model

CALLS = 100_000
CASES = (
    ("llama-3.1-8b", {}),
    ("mixtral-8x7b", {"tensor_parallel_size": 2}),
    ("gemma-3-27b", {"tensor_parallel_size": 2}),
    ("deepseek-v3", {"tensor_parallel_size": 8}),
    ("llama-3.1-8b", {"pipeline_parallel_size": 4}),
)


def main() -> None:
    """Print microseconds a call for each model."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    as_json = parser.parse_args().json
    rng = Random(1)
    batches = [rng.randint(1, 256) for _ in range(CALLS)]
    contexts = [batch * rng.randint(100, 8000) for batch in batches]
    shapes = list(zip(batches, contexts, strict=True))
    works = [
        StepWork(batch, context, [(rng.randint(0, 4000), rng.randint(1, 2048))], batch)
        for batch, context in shapes
    ]
    found = []
    for name, options in CASES:
        model, _ = latency_model(served_model(name, "h100-80gb", **options))

        runs = least(lambda price=model.decode: [price(*pair) for pair in shapes])
        steps = least(lambda price=model.step_ps: [price(work) for work in works])
        title = " ".join([name, *(f"{key}={value}" for key, value in options.items())])
        found.append({"model": title, "decode_us": runs, "mixed_us": steps})
    if as_json:
        print(json.dumps(found))
        return
    for row in found:
        print(
            f"{row['model']:45} decode run {row['decode_us']:5.2f} us, mixed step {row['mixed_us']:5.2f} us"
        )


def least(run: Callable[[], object]) -> float:
    """Microseconds of CPU a call, in the best of five rounds."""
    rounds = []
    for _ in range(5):
        start = process_time()
        run()
        rounds.append(process_time() - start)
    return min(rounds) / CALLS * 1e6


if __name__ == "__main__":
    main()
