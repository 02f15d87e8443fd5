"""The model of step times against measured decode steps.

Usage: python benchmarks/cost_against_steps.py MEASURED/decode_step_latency.csv [--rows] [--datasheet]

Errors are |predicted / measured - 1|, as median and 95th percentile, over all rows and over those that no constant was
fitted to; by how a step was measured, model, GPU and ranks. ``--datasheet`` leaves the shipped constants out.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from step_rows import StepRow, read_steps

from kvplan.core.step_constants import StepConstants


def main() -> None:
    """Print one line for each group of rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--rows", action="store_true", help="print every row")
    parser.add_argument("--datasheet", action="store_true", help="without shipped constants")
    arguments = parser.parse_args()
    rows = read_steps(arguments.file)
    constants = StepConstants() if arguments.datasheet else None
    errors = {id(row): row.predict(constants) / row.seconds - 1 for row in rows}
    print(f"{'':75} rows  median    p95  signed | not fitted: rows  median    p95")
    groups: dict[tuple[str, ...], list[StepRow]] = {}
    for row in rows:
        name = row.model.rpartition("/")[2]
        groups.setdefault((row.kind, name, row.gpu.name, f"tp{row.tp}"), []).append(row)
        groups.setdefault((row.kind, "~ all of these", "", ""), []).append(row)
    for kind, members in sorted(groups.items()):
        others = [errors[id(row)] for row in members if not row.is_fitted]
        found = [errors[id(row)] for row in members]
        title = f"{kind[0]:29} {kind[1]:27} {kind[2]:13} {kind[3]}"
        print(f"{title:75} {line(found)} {100 * median(found):+6.1f}% | {line(others)}")
        for row in members if arguments.rows else ():
            print(
                f"    batch {row.batch:6.2f} x {row.context:7.1f} tokens: {1e3 * row.seconds:8.3f} ms measured, "
                f"{100 * errors[id(row)]:+6.1f} %{' (fitted)' if row.is_fitted else ''}"
            )
    by_constants(rows, errors)


def by_constants(rows: Sequence[StepRow], errors: Mapping[int, float]) -> None:
    """Print the errors of each set of shipped constants, as `kvplan.core.step_constants.MEASURED_ERRORS` has them."""
    sets: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        if not row.is_fitted:
            sets.setdefault((row.gpu.name, row.generation.name), []).append(errors[id(row)])
    for (gpu, name), found in sorted(sets.items()):
        print(f"not fitted, {gpu}, {name}: {line(found)}")


def line(errors: Sequence[float]) -> str:
    """How many, their median and 95th percentile."""
    sizes = sorted(abs(error) for error in errors)
    if not sizes:
        return f"{0:4}"
    worst = sizes[min(len(sizes) - 1, int(0.95 * len(sizes)))]
    return f"{len(sizes):4} {100 * median(sizes):6.1f}% {100 * worst:5.1f}%"


if __name__ == "__main__":
    main()
