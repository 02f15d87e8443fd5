"""Rows of measured kernels as the model of step times sees them: one kernel alone in a step."""

from __future__ import annotations

import csv
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kvplan.config import load_gpu
from kvplan.core.communication import Link
from kvplan.core.cost import LatencyModel
from kvplan.core.engine import StepWork
from kvplan.core.step_constants import StepConstants
from kvplan.core.step_shape import Attention, GpuRates, Matrices, Reductions, StageShape
from kvplan.step_time import gpu_rates

GPUS = {
    "A100-SXM4-80GB": "a100-80gb",
    "A100-80GB": "a100-80gb",
    "A40-48GB": "a40",
    "B200-SXM": "b200",
    "H100-80GB": "h100-80gb",
    "H100-SXM-80GB": "h100-80gb",
    "H200-SXM-141GB": "h200",
    "L40S-48GB": "l40s",
    "RTX 4090 24GB": "rtx-4090",
    "RTX PRO 6000 96GB": "rtx-pro-6000",
    "RTX PRO 6000 Server": "rtx-pro-6000",
}
FILES = ("linear_ops", "gemm_h100", "attention_decode", "attention_prefill", "all_reduce")


class KernelRow(NamedTuple):
    """One measured kernel: what it is, how large, and in how many seconds it ran. ``is_fitted`` rows fit constants."""

    file: str
    gpu: str
    kind: str
    size: float
    shape: StageShape
    rates: GpuRates
    work: StepWork
    seconds: float
    is_fitted: bool

    def predict(self, constants: StepConstants) -> float:
        """Seconds by the model."""
        return LatencyModel([self.shape], self.rates, constants).step_ps(self.work) * 1e-12


def read_rows(folder: Path, file: str) -> Iterator[KernelRow]:
    """The rows of one file of ``kernels/``."""
    reader = {
        "linear_ops": _linear,
        "gemm_h100": _gemm,
        "attention_decode": _decode,
        "attention_prefill": _prefill,
        "all_reduce": _all_reduce,
    }[file]
    with (folder / f"{file}.csv").open(encoding="utf-8", newline="") as lines:
        for row in csv.DictReader(lines):
            yield from reader(row)


def is_fitted(*key: object) -> bool:
    """Whether a row is of the third that constants are fitted to: by a checksum of what it is."""
    return zlib.crc32("/".join(map(str, key)).encode()) % 3 == 0


def size_class(row: KernelRow) -> str:
    """Large, medium or small: by the tokens of matrix products, bytes of caches and messages, FLOPs of prompts."""
    small, large = {
        "linear_ops": (64, 1024),
        "gemm_h100": (64, 1024),
        "attention_decode": (32e6, 256e6),
        "attention_prefill": (1e10, 1e11),
        "all_reduce": (1e6, 16e6),
    }[row.file]
    return "large" if row.size >= large else "medium" if row.size > small else "small"


def _linear(row: dict[str, str]) -> Iterator[KernelRow]:
    """The four products of a layer in bf16, each a row of its own."""
    tokens, tp = int(row["num_tokens"]), int(row["tp"])
    hidden, width = int(row["n_embd"]), int(row["n_ffn"])
    kv_width = hidden // int(row["n_head"]) * int(row["n_kv_head"])
    products = {
        "attn_pre_proj_us": hidden * (hidden + 2 * kv_width) // tp,
        "attn_post_proj_us": hidden * hidden // tp,
        "mlp_up_proj_us": 2 * hidden * width // tp,
        "mlp_down_proj_us": hidden * width // tp,
    }
    gpu = GPUS[row["gpu"]]
    for column, weights in products.items():
        if row[column]:
            yield KernelRow(
                "linear_ops",
                gpu,
                "bf16",
                tokens,
                StageShape(1, dense=Matrices(2 * weights, 2 * weights)),
                gpu_rates(load_gpu(gpu)),
                StepWork(tokens, tokens),
                float(row[column]) * 1e-6,
                is_fitted(row["run_id"], tokens, column),
            )


def _gemm(row: dict[str, str]) -> Iterator[KernelRow]:
    """Products that the file calls bf16 but are DeepGEMM's with fp8 operands.

    In bf16 they would reach 1.25 times the datasheet's FLOP/s and 1.1 times its bandwidth; the source's benchmark
    calls DeepGEMM.
    """
    tokens, weights = int(row["m"]), int(row["k"]) * int(row["n"])
    yield KernelRow(
        "gemm_h100",
        "h100-80gb",
        "fp8",
        tokens,
        StageShape(1, dense=Matrices(weights, 0, 2 * weights)),
        gpu_rates(load_gpu("h100-80gb")),
        StepWork(tokens, tokens),
        float(row["latency_us"]) * 1e-6,
        is_fitted(row["k"], row["n"], tokens),
    )


def _decode(row: dict[str, str]) -> Iterator[KernelRow]:
    batch, length = int(row["batch"]), int(row["kv_len"])
    context, read = batch * length, int(row["kv_bytes"])
    pair = 4 * int(row["n_q_heads"]) * int(row["head_dim"])
    gpu = GPUS[row["gpu"]]
    yield KernelRow(
        "attention_decode",
        gpu,
        row["kernel"] or row["engine"],
        read,
        StageShape(2, attention=(Attention(read // context, pair, pair),)),
        gpu_rates(load_gpu(gpu)),
        StepWork(batch, context),
        float(row["latency_us"]) * 1e-6,
        is_fitted(row["run_id"], batch, length),
    )


def _prefill(row: dict[str, str]) -> Iterator[KernelRow]:
    batch, length = int(row["batch"]), int(row["seq_len"])
    heads, kv_heads, head_dim = int(row["n_q_heads"]), int(row["n_kv_heads"]), int(row["head_dim"])
    pair = 4 * heads * head_dim
    gpu = GPUS[row["gpu"]]
    # The kernel does not write the cache, which the model counts for each token: so of no context bytes.
    yield KernelRow(
        "attention_prefill",
        gpu,
        row["kernel"] or row["engine"] or "kernel not stated",
        pair * batch * length * length / 2,
        StageShape(2, attention=(Attention(0, pair, pair, 4 * (heads + kv_heads) * head_dim),)),
        gpu_rates(load_gpu(gpu)),
        StepWork(chunks=[(0, length)] * batch),
        float(row["latency_us"]) * 1e-6,
        is_fitted(row["run_id"], batch, length),
    )


def _all_reduce(row: dict[str, str]) -> Iterator[KernelRow]:
    """Sizes are taken as bytes: as elements of 2 bytes they would pass the link's rate on the H100."""
    size, ranks = int(row["size_field"]), int(row["n_gpus"])
    gpu = "h100-80gb" if row["system"].startswith("h100") else "a100-80gb"
    rates = gpu_rates(load_gpu(gpu))
    if row["system"] == "h100_pairwise_nvlink":
        # Two cards under a bridge of 600 GB/s, both ways together.
        rates = rates._replace(link=Link(300 * 10**9, is_switched=True))
    if row["system"] == "a100_dgx":
        # 12 to 22 GB/s: no NVLink was used, at 16 GPUs two machines.
        rates = rates._replace(link=Link(rates.host_bytes_per_s, is_switched=False))
    yield KernelRow(
        "all_reduce",
        gpu,
        f"{row['system']}, {ranks} GPUs",
        size,
        StageShape(0, reductions=(Reductions(1, ranks, 1),)),
        rates,
        StepWork(size, size),
        float(row["latency_us"]) * 1e-6,
        is_fitted(row["run_id"], size),
    )
