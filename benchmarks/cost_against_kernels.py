"""The model of step times against measured kernels.

Usage: python benchmarks/cost_against_kernels.py MEASURED/kernels

Errors are |predicted / measured - 1| with the constants that are shipped for the GPU, as median and 95th percentile of
the rows that no constant was fitted to; by file, size, GPU and kernel. Sizes are small, medium and large: up to 64, to
1,024 and from 1,024 tokens in matrix products; 32 and 256 MB of cache read; 10^10 and 10^11 FLOPs of attention to
prompts; 1 and 16 MB of an all-reduce.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median

from cost_against_steps import line
from kernel_rows import FILES, KernelRow, read_rows, size_class

from kvplan.config import load_gpu
from kvplan.core.step_constants import vllm_generation
from kvplan.step_time import choose_constants


def main() -> None:
    """Print one line for each file and size, and one for each GPU and kernel of it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    for file in FILES:
        rows = [row for row in read_rows(folder, file) if not row.is_fitted]
        for size in ("large", "medium", "small"):
            chosen = [row for row in rows if size_class(row) == size]
            show(f"{file}, {size}", chosen)
            for gpu, kind in sorted({(row.gpu, row.kind) for row in chosen}):
                show(f"    {gpu}, {kind}", [row for row in chosen if (row.gpu, row.kind) == (gpu, kind)])


def show(title: str, rows: list[KernelRow]) -> None:
    """One line: how many rows, their errors, and to which side."""
    errors = []
    for row in rows:
        # A kernel alone has no host to wait for.
        constants = choose_constants(load_gpu(row.gpu), vllm_generation((0, 19))).constants
        model = row.predict(
            constants.with_coefficients({"step_s": 0.0, "sequence_s": 0.0, "launch_kernel_s": 0.0})
        )
        errors.append(model / row.seconds - 1)
    signed = f"{100 * median(errors):+6.1f}%" if errors else ""
    print(f"{title:70} {line(errors)} {signed}")


if __name__ == "__main__":
    main()
