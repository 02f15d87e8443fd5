"""The rough overhead estimate against start-up logs of vLLM.

Usage: python benchmarks/overhead_against_logs.py kv_capacity.csv

The CSV has one row a start-up with the columns model, tp, max_model_len, gpu_memory_utilization (H100 80 GB),
torch_peak_increase_gib, non_torch_increase_gib, cuda_graph_est_gib and available_kv_gib. Rows whose model is
not in the catalogue or cannot be sized are passed over. The logs did not subtract graphs from the KV memory yet.
"""

from __future__ import annotations

import csv
import statistics
import sys

from kvplan.errors import InputError
from kvplan.jobs.size import size

GIB = 1 << 30


def main(path: str) -> None:
    """Print a line for each distinct row, then how many lie in the range and the median error."""
    rows = {}
    with open(path, newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["torch_peak_increase_gib"] and row["non_torch_increase_gib"]:
                rows[row["model"], row["tp"], row["torch_peak_increase_gib"]] = row
    errors, covered = [], 0
    for row in rows.values():
        try:
            result = size(
                row["model"],
                gpu="h100-80gb",
                tensor_parallel_size=int(row["tp"]),
                gpu_memory_utilization=float(row["gpu_memory_utilization"]),
                max_model_len=int(row["max_model_len"]),
            )
        except InputError:
            continue
        capacity = result.capacity
        assert capacity is not None
        overhead = capacity.overhead_bytes
        assert overhead is not None
        logged = float(row["torch_peak_increase_gib"]) + float(row["non_torch_increase_gib"])
        logged += float(row["cuda_graph_est_gib"] or 0)
        ours = overhead.total("mid") / GIB
        covered += overhead.low / GIB <= logged <= overhead.high / GIB
        errors.append(abs(ours - logged) / logged)
        print(
            f"{row['model']:40} tp {row['tp']}  logged {logged:5.2f} GiB  estimated {ours:5.2f} "
            f"({overhead.low / GIB:.2f} to {overhead.high / GIB:.2f})"
        )
    print(
        f"{covered} of {len(errors)} in the range; median error of the middle {statistics.median(errors):.1%}"
    )


if __name__ == "__main__":
    main(sys.argv[1])
