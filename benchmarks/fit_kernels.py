"""Fit the ``kernels`` of gpus.yaml: what kernels reach of a GPU's datasheet.

Usage: python benchmarks/fit_kernels.py MEASURED/kernels

Constants are fitted to the third of the rows that `kernel_rows.is_fitted` picks, by the least sum of the logarithms'
errors, squared while they are small (soft L1). Matrix products give the share of the bandwidth, that of the FLOP/s and
the time of a kernel beside them; attention while decoding the share of the bandwidth, of prompts that of the FLOP/s,
all-reduces that of the link. In the last three the time beside them is fitted too and not kept: launches are timed with
them there. `cost_against_kernels.py` judges the result by the other rows.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from math import log, sqrt
from pathlib import Path

from kernel_rows import FILES, KernelRow, read_rows

from kvplan.core.step_constants import ConstantName, StepConstants

#: Errors of so much and less count as squares.
SOFT = 0.1
#: Shares of those rows that attention's bandwidth and the link are read from: large enough to tell.
LARGE = {"attention_decode": 32e6, "attention_prefill": 1e10, "all_reduce": 1e6}
#: Tokens of products that are bound by FLOPs: where 8-bit ones were measured too, the share is of both.
LARGE_PRODUCT = 1024

Fitted = dict[ConstantName, float]


def main() -> None:
    """Print the constants of each GPU."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    rows = [row for file in FILES for row in read_rows(folder, file) if row.is_fitted]
    for gpu in sorted({row.gpu for row in rows}):
        print(f"{gpu}:")
        for name, value in fit_gpu([row for row in rows if row.gpu == gpu]).items():
            print(f"    {name}: {value:.3g}")


def fit_gpu(rows: Sequence[KernelRow]) -> Fitted:
    """What the rows of one GPU give."""
    found: Fitted = {}
    for file, names, kept in (
        ("linear_ops", ("weights_bandwidth_share", "gemm_flops_share", "kernel_s"), 3),
        ("attention_decode", ("kv_bandwidth_share", "kernel_s"), 1),
        ("attention_prefill", ("attention_flops_share", "kernel_s"), 1),
        ("all_reduce", ("link_bandwidth_share", "all_reduce_s"), 1),
    ):
        chosen = [row for row in rows if row.file == file and row.size >= LARGE.get(file, 0)]
        # No rank of this one uses NVLink; and kernels that nobody names are not needed where vLLM's are there.
        chosen = [row for row in chosen if "a100_dgx" not in row.kind]
        named = [row for row in chosen if "not stated" not in row.kind]
        chosen = named or chosen
        if len(chosen) > len(names):
            best = fit(chosen, {**dict.fromkeys(names, 0.6), names[-1]: 5e-6}, found)
            found.update({name: best[name] for name in names[:kept]})
    products = [row for row in rows if row.file in ("linear_ops", "gemm_h100") and row.size >= LARGE_PRODUCT]
    if any(row.file == "gemm_h100" for row in products):
        found.update(fit(products, {"gemm_flops_share": 0.7}, found))
    return found


def fit(rows: Sequence[KernelRow], start: Mapping[ConstantName, float], fixed: Fitted) -> Fitted:
    """The constants in the place of ``start`` with the least error; the others are ``fixed`` or the datasheet's."""

    def loss(values: Mapping[ConstantName, float]) -> float:
        constants = StepConstants(**{**fixed, **values})
        return sum(soft(log(row.predict(constants) / row.seconds)) for row in rows)

    return descend(loss, start)


def soft(error: float) -> float:
    """The square of a small error, the size of a large one."""
    return sqrt(1 + (error / SOFT) ** 2) - 1


def descend(
    loss: Callable[[Mapping[ConstantName, float]], float], start: Mapping[ConstantName, float]
) -> Fitted:
    """The least loss from ``start``, by a pattern search on logarithms (Hooke and Jeeves 1961).

    One constant after another is tried a step up and down; what all of them gained together is tried once more, so
    that a valley that runs askew is followed. Where nothing helps the step is halved.
    """
    best, least, step = dict(start), loss(start), 0.3
    while step > 1e-4:
        found, value = _sweep(loss, best, least, step)
        if value >= least:
            step /= 2
        while value < least:
            ahead = {name: found[name] ** 2 / best[name] for name in best}
            best, least = found, value
            found, value = _sweep(loss, ahead, loss(ahead), step)
    return best


def _sweep(
    loss: Callable[[Mapping[ConstantName, float]], float],
    start: Mapping[ConstantName, float],
    least: float,
    step: float,
) -> tuple[Fitted, float]:
    """The best after each constant was tried a step up and down, and its loss."""
    best = dict(start)
    for name in start:
        for factor in (1 + step, 1 / (1 + step)):
            tried = {**best, name: best[name] * factor}
            value = loss(tried)
            if value < least:
                best, least = tried, value
    return best, least


if __name__ == "__main__":
    main()
