"""Memory for KV as `kvplan size --calibration` gives it, against the start-up that was kept.

Usage: python benchmarks/calibration_round_trip.py kv_capacity.csv [--rows]

Each row that prints memory, budget, weights and KV memory is written as its engine logs it, read by `kvplan audit`,
kept as a calibration, and sized again with the same settings: the memory for KV must be the row's within its rounding.
Then each calibration is used for the other rows of the same model, GPU, version and parallelism, whose batch limits
may differ, and the error is laid beside that of the estimate.
"""

from __future__ import annotations

import argparse
import csv
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import NamedTuple

from kvplan import size
from kvplan.calibration import load_calibration, save_calibration
from kvplan.errors import KvplanError
from kvplan.jobs.audit import audit_with
from kvplan.options import SizeOptions
from kvplan.startup_log import read_log

GIB = 1 << 30
PARTS = ("gpu_total_gib", "requested_gib", "weights_gib", "available_kv_gib")


class Kept(NamedTuple):
    """A row, the options that it amounts to, and its calibration."""

    name: str
    group: tuple[str, ...]
    model: str
    options: dict[str, object]
    kv_bytes: int
    path: Path


def main() -> None:
    """Print how many rows come out, and the errors of calibrations carried over to other rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--rows", action="store_true", help="print every row")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        kept = list(keep(arguments.file, Path(folder)))
        exact = 0
        for one in kept:
            apart = available(one, one) - one.kv_bytes
            exact += abs(apart) <= GIB // 100
            if arguments.rows:
                print(f"{one.name:80.80} {apart / GIB:+.4f} GiB")
        print(f"round trip: {exact} of {len(kept)} rows within 0.01 GiB")
        carried, estimated = [], []
        for one in kept:
            for other in kept:
                if one.group == other.group and one.name != other.name:
                    carried.append(abs(available(other, one) - other.kv_bytes) / GIB)
                    estimated.append(abs(available(other, None) - other.kv_bytes) / GIB)
        if carried:
            print(
                f"carried over to other start-ups ({len(carried)} pairs): median error {median(carried):.2f} GiB, "
                f"largest {max(carried):.2f}; of the estimate {median(estimated):.2f}, {max(estimated):.2f}"
            )


def keep(path: Path, folder: Path) -> Iterator[Kept]:
    """The rows that print all parts, each as a calibration in a file of its own."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for i, row in enumerate(rows):
        if row["status"] != "ok" or not all(row[name] for name in PARTS) or not row["engine_version"]:
            continue
        result = audit_with(read_log(as_log(row), row["run_id"]), SizeOptions())
        sized = result.sized
        if result.calibration is None or sized is None or sized.weights.per_gpu_bytes is None:
            print(f"left out: {row['run_id']}: {'; '.join(result.notes)}")
            continue
        target = folder / f"{i}.yaml"
        with target.open("w", encoding="utf-8") as out:
            save_calibration(out, result.calibration)
        kept = load_calibration(target)
        names = ("max_num_seqs", "max_num_batched_tokens", "tensor_parallel_size", "dtype", "kv_cache_dtype")
        options: dict[str, object] = {name: getattr(kept, name) for name in names}
        options |= {
            "engine": sized.config["engine"].value,
            "gpu_memory": kept.gpu_memory_bytes,
            "gpu_memory_utilization": float(row["gpu_memory_utilization"]),
            "max_model_len": int(row["max_model_len"]),
            "quantization": sized.config["quantization"].value if "quantization" in sized.config else None,
        }
        group = tuple(row[name] for name in ("model", "gpu", "engine_version", "tp", "quantization"))
        kv = round(float(row["available_kv_gib"]) * GIB)
        yield Kept(row["run_id"], group, sized.model.name, options, kv, target)


def available(row: Kept, calibration: Kept | None) -> int:
    """Memory for KV of a row by our plan."""
    found = size(
        row.model, calibration=None if calibration is None else str(calibration.path), **row.options
    ).capacity
    assert found is not None, "a GPU's memory is given"
    return found.available_kv_bytes


def as_log(row: dict[str, str]) -> list[str]:
    """The row as the engine would have logged it."""
    config = {
        "model": repr(row["model"]),
        "dtype": f"torch.{row['dtype']}" if row["dtype"] not in ("", "auto") else "auto",
        "max_seq_len": row["max_model_len"],
        "tensor_parallel_size": row["tp"],
        "quantization": row["quantization"] or "None",
        "kv_cache_dtype": row["kv_cache_dtype"] or "auto",
        "enable_prefix_caching": row["enable_prefix_caching"] or "None",
    }
    limits = "".join(
        f", '{name}': {row[name]}" for name in ("max_num_seqs", "max_num_batched_tokens") if row[name]
    )
    return [
        f"vLLM API server version {row['engine_version']}",
        f"non-default args: {{'model': {row['model']!r}{limits}}}",
        f"Initializing a V1 LLM engine (v{row['engine_version']}) with config: "
        + ", ".join(f"{name}={value}" for name, value in config.items()),
        f"Model loading took {row['weights_gib']} GiB and 1.0 seconds",
        f"Available KV cache memory: {row['available_kv_gib']} GiB",
        f"Free memory on device (1.0/{row['gpu_total_gib']} GiB) on startup. Desired GPU memory utilization is "
        f"({row['gpu_memory_utilization']}, {row['requested_gib']} GiB). Actual usage is {row['weights_gib']} GiB for "
        f"weight, {row['torch_peak_increase_gib'] or 0} GiB for peak activation, {row['non_torch_increase_gib'] or 0} "
        f"GiB for non-torch memory, and {row['cuda_graph_gib'] or 0} GiB for CUDAGraph memory.",
    ]


if __name__ == "__main__":
    try:
        main()
    except KvplanError as error:
        raise SystemExit(str(error)) from error
