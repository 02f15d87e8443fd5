"""The memory left for the KV cache as estimated, against what vLLM printed when it started.

Usage: python benchmarks/budget_against_logs.py FILE.csv [FILE.csv ...] [--rows]

Reads files of three forms, told apart by their columns: start-up logs such as ``startup_logs.csv`` beside this script,
logs collected from issues (``record_id``), and measured pools (``kv_available_gib``). A row counts if it names an
engine version, a model that kvplan knows, a GPU or its memory, the utilization, and the memory that was left,
printed or in tokens. Left out are rows marked inconsistent and weights kept in the CPU's memory. Batch
limits that a row does not tell are the version's defaults, which a user may have changed. Equal start-ups count once.
Weights are those printed where the row has them (``printed``: the error of the overhead alone), and those that
kvplan counts where the row names the model and no quantization (``own``: the error of the whole budget).
"""

from __future__ import annotations

import argparse
import csv
import math
import re
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from log_figures import number, whole

from kvplan.config import list_gpus, load_gpu, load_model
from kvplan.core.gpu import Gpu
from kvplan.core.model import ModelSpec
from kvplan.core.overhead import Overhead, estimate_overhead
from kvplan.core.vllm_rules import vllm_rules
from kvplan.core.weights import Ranks
from kvplan.errors import InputError
from kvplan.jobs.size import size

GIB = 1 << 30


class Log(NamedTuple):
    """What one start-up printed; sizes in GiB, None where it did not."""

    name: str
    version: str
    spec: ModelSpec
    gpu: Gpu | None
    total_gib: float
    utilization: float
    tp: int
    pp: int
    batched_tokens: int | None
    sequences: int | None
    eager: bool
    own_weights: bool
    weights_gib: float | None
    kv_gib: float


class Compared(NamedTuple):
    """A log and what is estimated for it, in GiB."""

    log: Log
    overhead: Overhead
    printed_weights: float | None
    own_weights: float | None

    def left(self, weights: float, overhead: int) -> float:
        """Memory for the KV cache."""
        log = self.log
        return math.ceil(log.total_gib * GIB * log.utilization) / GIB - weights - overhead / GIB

    def error(self, weights: float) -> float:
        """Of the memory for the KV cache, as a share of what was printed."""
        return self.left(weights, self.overhead.total("mid")) / self.log.kv_gib - 1

    def is_covered(self, weights: float) -> bool:
        """Whether what was printed lies in the range, up to its rounding."""
        low = self.left(weights, self.overhead.high) - 0.01
        return low <= self.log.kv_gib <= self.left(weights, self.overhead.low) + 0.01


def main() -> None:
    """Print a table by version and, with ``--rows``, every row."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--rows", action="store_true", help="print every row")
    arguments = parser.parse_args()
    compared = list(compare(arguments.files))
    if arguments.rows:
        for row in compared:
            print(described(row))
    print(f"{'version':12} {'rows':>4}  {'printed weights':>34}  {'own weights':>34}")
    print(f"{'':12} {'':>4}  {'n   median      90th  in range':>34}  {'n   median      90th  in range':>34}")
    releases = sorted({release(row.log.version) for row in compared})
    for key in [*releases, None]:
        some = [row for row in compared if key is None or release(row.log.version) == key]
        name = "all" if key is None else f"{key[0]}.{key[1]}"
        printed = summary([(r, r.printed_weights) for r in some if r.printed_weights is not None])
        own = summary([(r, r.own_weights) for r in some if r.own_weights is not None])
        print(f"{name:12} {len(some):4}  {printed:>34}  {own:>34}")


def summary(rows: Sequence[tuple[Compared, float]]) -> str:
    """Count, median and 90th percentile of the absolute error, share in the range."""
    if not rows:
        return "-"
    errors = sorted(abs(row.error(weights)) for row, weights in rows)
    covered = sum(row.is_covered(weights) for row, weights in rows) / len(rows)
    ninetieth = errors[math.ceil(0.9 * len(errors)) - 1]
    return f"{len(rows):2}  {statistics.median(errors):7.2%}  {ninetieth:8.2%}  {covered:8.0%}"


def described(row: Compared) -> str:
    """One line about a row."""
    log, overhead = row.log, row.overhead
    weights = row.printed_weights if row.printed_weights is not None else row.own_weights
    assert weights is not None
    seen = math.ceil(log.total_gib * GIB * log.utilization) / GIB - weights - log.kv_gib
    return (
        f"{log.version:9} {log.name[:56]:56} tp {log.tp} KV {log.kv_gib:7.2f} GiB {row.error(weights):+7.2%}  overhead "
        f"{seen:6.2f}, estimated {overhead.total('mid') / GIB:5.2f} ({overhead.low / GIB:.2f} to "
        f"{overhead.high / GIB:.2f}){'' if row.is_covered(weights) else '  OUT OF RANGE'}"
    )


def compare(files: Sequence[Path]) -> Iterator[Compared]:
    """Every distinct start-up of the files that can be compared."""
    seen = set()
    for path in files:
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                log = read(row)
                if log is None:
                    continue
                key = (log.version, log.spec.name, log.own_weights, log.tp, log.kv_gib, log.utilization)
                compared = estimated(log)
                if key not in seen and compared is not None:
                    seen.add(key)
                    yield compared


def estimated(log: Log) -> Compared | None:
    """The log beside its estimate; None if nothing says how large the weights are."""
    rules = vllm_rules(log.version)
    tokens, sequences = rules.batch_limits(int(log.total_gib * GIB), log.gpu.name if log.gpu else "")
    overhead = estimate_overhead(
        log.spec,
        version=log.version,
        max_num_batched_tokens=log.batched_tokens or tokens,
        max_num_seqs=log.sequences or sequences,
        tensor_parallel_size=log.tp,
        pipeline_parallel_size=log.pp,
        enforce_eager=log.eager,
        compute_capability=log.gpu.compute_capability if log.gpu else None,
        num_sms=log.gpu.num_sms if log.gpu else None,
    )
    own = None
    if log.own_weights:
        weights = log.spec.weights
        own = weights.rank_bytes(log.spec.dtype, Ranks(log.tp, num_kv_heads=log.spec.num_kv_heads))
        own = own and own + weights.rotary_bytes(log.spec.dtype)
    if log.weights_gib is None and own is None:
        return None
    return Compared(log, overhead, log.weights_gib, None if own is None else own / GIB)


def read(row: dict[str, str]) -> Log | None:
    """A row of any of the files; None where a figure is missing or the model is not known."""
    if "record_id" in row:
        return _collected(row)
    if "kv_available_gib" in row:
        return _measured(row)
    if row.get("status", "ok") != "ok" or not (row.get("engine_version") or "").startswith("0."):
        return None
    spec, gpu = _model(row["model"]), _gpu(row["gpu"])
    if spec is None or gpu is None or gpu.memory_bytes is None:
        return None
    tp = int(row["tp"] or 1)
    version = row["engine_version"]
    kv = number(row["available_kv_gib"])
    if kv is None and row["kv_cache_tokens"]:
        try:
            per_token = size(spec.name, tensor_parallel_size=tp, engine=f"vllm@{version}").kv.bytes_per_token
            kv = per_token * int(row["kv_cache_tokens"]) / GIB
        except InputError:
            return None
    if kv is None or kv <= 0:
        return None
    utilization = number(row["gpu_memory_utilization"]) or vllm_rules(version).gpu_memory_utilization
    return Log(
        name=row["model"],
        version=version,
        spec=spec,
        gpu=gpu,
        total_gib=number(row["gpu_total_gib"]) or gpu.memory_bytes / GIB,
        utilization=utilization,
        tp=tp,
        pp=int(row.get("pp") or 1),
        batched_tokens=whole(row["max_num_batched_tokens"]),
        sequences=whole(row["max_num_seqs"]),
        eager=row.get("enforce_eager") == "True",
        own_weights=not row["quantization"],
        weights_gib=number(row["weights_gib"]),
        kv_gib=kv,
    )


def _collected(row: dict[str, str]) -> Log | None:
    versions = [v for v in row["engine_version"].replace("~", "").split() if v.startswith("0.")]
    spec, gpu = _model(row["model"]), _gpu(row["gpu"])
    total = number(row["gpu_total_gib"]) or (gpu.memory_bytes / GIB if gpu and gpu.memory_bytes else None)
    kv, utilization = number(row["kv_gib"]), number(row["memory_fraction"])
    if row["engine"] != "vllm" or not versions or spec is None or total is None or utilization is None:
        return None
    if kv is None or kv <= 0 or not row["tp"] or row["consistent"] == "no" or "offload" in row["note"]:
        return None
    version = versions[0].rstrip("+").replace(".x", ".0")
    tokens, sequences = whole(row["max_num_batched_tokens"]), whole(row["max_num_seqs"])
    if "V0" in row["engine_version"] or release(version) < (0, 8):
        # The first engine took a prompt at once unless that was very long, and had one default for all GPUs.
        longest = int(row["max_model_len"] or 2048)
        tokens = tokens or (2048 if longest > 32768 and row["family"] != "mla" else max(2048, longest))
        sequences = sequences or 256
    return Log(
        name=f"{row['record_id']} {row['model']}",
        version=version,
        spec=spec,
        gpu=gpu,
        total_gib=total,
        utilization=utilization,
        tp=int(row["tp"]),
        pp=int(row["pp"] or 1),
        batched_tokens=tokens,
        sequences=sequences,
        eager="eager" in row["note"],
        own_weights=not row["weight_quant"] and row["model_basis"] == "stated",
        weights_gib=number(row["weights_gib"]),
        kv_gib=kv,
    )


def _measured(row: dict[str, str]) -> Log | None:
    spec, gpu = _model(row["model"]), _gpu(row["gpu"].split()[0] if row["gpu"] else "")
    kv, utilization = number(row["kv_available_gib"]), number(row["gpu_util"])
    match = re.search(r"vLLM (0\.[0-9]+\.[0-9]+)", row["engine"])
    # "V1" without a number is of the time when 0.10 and 0.11 were current.
    version = match[1] if match else "0.11" if "V1" in row["engine"] else None
    if spec is None or gpu is None or gpu.memory_bytes is None or kv is None or version is None:
        return None
    if "cannot be right" in row["note"]:
        return None
    return Log(
        name=row["model"],
        version=version,
        spec=spec,
        gpu=gpu,
        total_gib=gpu.memory_bytes / GIB,
        utilization=utilization or vllm_rules(version).gpu_memory_utilization,
        tp=int(row["tp"]),
        pp=1,
        batched_tokens=None,
        sequences=None,
        eager=False,
        own_weights=not re.search("(?i)fp8|nvfp4|gpt-oss", row["model"]),
        weights_gib=number(row["weights_gib"]),
        kv_gib=kv,
    )


def release(version: str) -> tuple[int, int]:
    """``0.19.1`` as (0, 19)."""
    first, second = version.split(".")[:2]
    return int(first), int("".join(c for c in second if c.isdigit()))


def _model(name: str) -> ModelSpec | None:
    """The model of that name; of a quantized copy, the model itself, whose activations are the same."""
    name = name.removesuffix(" class").removesuffix(" (as named in the text)")
    base = re.sub(
        r"(?i)[-.](fp8-dynamic|fp8|quantized\.w8a8|nvfp4|awq|gptq-int4)$", "", name.rpartition("/")[2]
    )
    for candidate in (name, name.rpartition("/")[2], base, base.removeprefix("Meta-")):
        try:
            return load_model(candidate)
        except InputError:
            continue
    return None


def _gpu(name: str) -> Gpu | None:
    if not name:
        return None
    try:
        return load_gpu(name.lower().replace(" ", "-"))
    except InputError:
        words = [word for word in re.split("[- ]", name.lower()) if word not in ("sxm", "3e")]
        words = [word for word in words if not re.fullmatch("[0-9]+gb", word) or word == "80gb"]
        fitting = [gpu for gpu in list_gpus() if set(words) <= set(gpu.name.split("-"))]
        return fitting[0] if fitting else None


if __name__ == "__main__":
    main()
