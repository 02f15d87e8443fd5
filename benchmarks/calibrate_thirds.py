"""`kvplan calibrate` on every third step of a set, and how far off the other two thirds are.

Usage: python benchmarks/calibrate_thirds.py decode_step_latency.csv [--engine vllm@0.19]

A set is what one group of rows measured: a model on a GPU. Its first, fourth, ... row is written to a table,
`calibrate` fits it, and the constants estimate the rest; beside it stands the error of the shipped constants for the
same rows.
"""

from __future__ import annotations

import argparse
import csv
import tempfile
from collections import defaultdict
from pathlib import Path

from measured_names import gpu_name, model_name

from kvplan.errors import KvplanError
from kvplan.jobs.calibrate import calibrate, steps_against

COLUMNS = ("batch_size", "context_mean", "step_ms", "model", "gpu", "tp")
#: A set with fewer rows leaves too few for either part.
FEWEST = 9


def main() -> None:
    """Print a row for each set, and one for sets that were measured on one kind of GPU by one engine."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--engine", help="in place of the one that each set names")
    arguments = parser.parse_args()
    sets: defaultdict[str, list[dict[str, str]]] = defaultdict(list)
    with arguments.file.open(newline="") as file:
        for row in csv.DictReader(file):
            sets[row["group"]].append(row)
            sets[f"all {row['kind']} | {row['gpu']} | {row['engine']}"].append(row)
    print("| set | rows | shipped: median, p95 | calibrated: median, p95 |")
    print("|---|---|---|---|")
    for name, rows in sorted(sets.items()):
        groups = {row["group"] for row in rows}
        if len(rows) < FEWEST or (name.startswith("all ") and len(groups) == 1):
            continue
        engine = arguments.engine or engine_of(rows[0]["engine"])
        try:
            print(compare(name.replace("|", "/"), rows, engine), flush=True)
        except KvplanError as error:
            print(f"| {name.replace('|', '/')} | {len(rows)} | {error} | |")


def compare(name: str, rows: list[dict[str, str]], engine: str) -> str:
    """A row of the table: the error of the two thirds that were not fitted."""
    with tempfile.TemporaryDirectory() as folder:
        third, rest = Path(folder, "third.csv"), Path(folder, "rest.csv")
        write(third, rows[::3])
        write(rest, [row for number, row in enumerate(rows) if number % 3])
        fitted = calibrate(third, engine=engine)
        assert fitted.calibration.step_times is not None
        before = steps_against(rest, engine=engine)
        after = steps_against(rest, engine=engine, constants=fitted.calibration.step_times.chosen().constants)
    return (
        f"| {name} | {len(rows)} | {100 * before.median:.1f} %, {100 * before.p95:.1f} % | "
        f"{100 * after.median:.1f} %, {100 * after.p95:.1f} % |"
    )


def write(path: Path, rows: list[dict[str, str]]) -> None:
    """The rows as a table that `calibrate` reads."""
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(COLUMNS)
        for row in rows:
            values = [row[column] for column in COLUMNS]
            values[3:5] = [model_name(row["model"]), gpu_name(row["gpu"])]
            table.writerow(values)


def engine_of(text: str) -> str:
    """The engine and version that a row names, as ``--engine`` takes it; the oldest vLLM where it is of 2023-24."""
    if "2023" in text:
        return "vllm@0.6"
    version = text.rpartition(" ")[2]
    return f"vllm@{version}" if version[:1].isdigit() else "vllm"


if __name__ == "__main__":
    main()
