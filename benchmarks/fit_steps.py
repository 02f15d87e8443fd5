"""Fit what kernels alone do not tell to decode steps: small all-reduces, and what an engine costs beside its kernels.

Usage: python benchmarks/fit_steps.py MEASURED/decode_step_latency.csv

Only the third of the rows that `step_rows.read_steps` picks is used. The all-reduce of the H100 is fitted to steps of
vLLM in 2026 with all else as it is shipped (`fit_kernels.py` makes the rest of kernels), the costs of vLLM in 2023-24
to its steps on the A100 and on the H100: those are of the hosts too. `cost_against_steps.py` judges the result.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import log
from pathlib import Path

from fit_kernels import Fitted, descend, soft
from step_rows import StepRow, read_steps

from kvplan.core.step_constants import ConstantName
from kvplan.step_time import choose_constants


def main() -> None:
    """Print the fitted constants."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    rows = [row for row in read_steps(parser.parse_args().file) if row.is_fitted]
    old = [row for row in rows if row.kind == "offline_static_batch"]
    new = [row for row in rows if row.tp > 1 and row.kind == "online_mixed_mean"]
    print("vLLM of 2026, h100-80gb:", text(fit(new, {"all_reduce_s": 5e-6})))
    for gpu in ("a100-80gb", "h100-80gb"):
        start: Fitted = {"launch_kernel_s": 20e-6, "step_s": 10e-3, "sequence_s": 300e-6}
        print(f"vLLM of 2023-24, {gpu}:", text(fit([row for row in old if row.gpu.name == gpu], start)))


def fit(rows: Sequence[StepRow], start: Mapping[ConstantName, float]) -> Fitted:
    """The constants in the place of ``start`` with the least error, all else as shipped."""

    def loss(values: Mapping[ConstantName, float]) -> float:
        total = 0.0
        for row in rows:
            shipped = choose_constants(row.gpu, row.generation).constants
            total += soft(log(row.predict(replace(shipped, **values)) / row.seconds))
        return total

    return descend(loss, start)


def text(found: Fitted) -> str:
    """The constants in a line."""
    return ", ".join(f"{name} {value:.3g}" for name, value in found.items())


if __name__ == "__main__":
    main()
