"""Sizes of SGLang, TensorRT-LLM and llama.cpp as kvplan computes them, against what these engines printed.

Usage: python benchmarks/other_engines_against_logs.py kv_logs.csv [--all]

The file is that of collected start-up logs (columns ``record_id``, ``engine``, ``kv_gib`` and so on). Each figure of
a row that follows from others is predicted: tokens from memory, memory from cells, blocks from free memory, states
from slots. Printed sizes are rounded, so a figure is right if it lies between the predictions for both ends of what
was printed. Counted are rows marked consistent; ``--all`` adds the others. Rows that say too little are listed with
what they lack, rows that do not come out with the reason that is known.

`check_row` serves other scripts: it takes a row of the file as a dict.
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from log_figures import Check, number, whole

from kvplan.core.deployment import Deployment
from kvplan.core.kv_cache import (
    Cache,
    CacheFormat,
    FullAttention,
    GatedDeltaNet,
    LatentAttention,
    LayerCache,
    Mamba2State,
    SlidingWindow,
    SparseIndexer,
)
from kvplan.core.model import ModelSpec
from kvplan.core.pools.llama_cpp import LlamaCppPool
from kvplan.core.pools.sglang import SglangPool, SglangRules
from kvplan.core.pools.tensorrt_llm import TensorrtLlmPool
from kvplan.core.weights import WHOLE_MODEL, Weights

GIB = 1 << 30
MIB = 1 << 20
#: Engines whose rows are read here, and by whose rules.
ENGINES = {
    "sglang": "sglang",
    "tensorrt-llm": "tensorrt-llm",
    "llama.cpp": "llama.cpp",
    "llama-cpp-python": "llama.cpp",
    "ik_llama.cpp": "llama.cpp",
    "ollama": "llama.cpp",
}

Shape = tuple[tuple[int, Cache], ...]


def heads(layers: int, kv_heads: int, head_dim: int) -> Shape:
    """Layers that all keep keys and values of the same heads."""
    return ((layers, FullAttention(kv_heads, head_dim)),)


_LATENT = LatentAttention(512, 64)
#: What the layers of a model keep, by what its name holds; the first match counts.
SHAPES: tuple[tuple[str, Shape], ...] = (
    (r"qwen3-0\.6b", heads(28, 8, 128)),
    (r"qwen3-235b", heads(94, 4, 128)),
    (r"qwen3-30b", heads(48, 4, 128)),
    (r"qwen3-8b|ui-venus-1\.5-8b", heads(36, 8, 128)),
    (r"qwen2\.5-0\.5b", heads(24, 2, 64)),
    (r"qwen2\.5-7b|n_embd_k_gqa 512", heads(28, 4, 128)),
    (r"qwen1\.5-7b", heads(32, 32, 128)),
    (r"llama-2-7b", heads(32, 32, 128)),
    (r"llama-30b", heads(60, 52, 128)),
    (r"llama-3\.1-8b|meta-llama 8b", heads(32, 8, 128)),
    (r"llama-3\.2-1b", heads(16, 8, 64)),
    (r"tinyllama", heads(22, 4, 64)),
    (r"mistral-small", heads(40, 8, 128)),
    (r"phi-3-mini", heads(32, 32, 96)),
    # The file of this row keeps heads, not latents: key 128 + 64, value 128.
    (r"deepseek-coder-v2-16b", ((27, FullAttention(16, 192, 128)),)),
    (r"deepseek-v3\.2", ((61, _LATENT), (61, SparseIndexer(128)))),
    (r"deepseek-(v3|r1)", ((61, _LATENT),)),
    (
        r"qwen3\.5-9b",
        ((8, FullAttention(4, 256)), (24, GatedDeltaNet(16, 128, 32, 128, 4, "float32"))),
    ),
    (
        r"qwen3\.6-27b",
        ((16, FullAttention(4, 256)), (48, GatedDeltaNet(16, 128, 48, 128, 4, "float32"))),
    ),
    (
        r"nemotron-3-nano",
        ((6, FullAttention(2, 128)), (23, Mamba2State(64, 64, 128, 8, 4, "float32"))),
    ),
    (r"gpt-oss-20b", ((12, FullAttention(8, 64)), (12, SlidingWindow(8, 64, 128)))),
    (r"gemma-4 e4b", ((4, FullAttention(2, 512)), (20, SlidingWindow(2, 256, 512)))),
    (r"gemma-3-270m", ((3, FullAttention(1, 256)), (15, SlidingWindow(1, 256, 512)))),
)

#: Rows of models that are not named, whose bytes of a token are told all the same.
TOLD: Mapping[str, Shape] = {
    "kv0005": heads(28, 16, 128),  # 229,376 bytes, as its note says
}

#: What a row does not print but its note or its neighbours tell.
CELLS = {"kv0133": 6656, "kv0202": 6656, "kv0245": 6656, "kv0143": 2560, "kv0158": 2560, "kv0148": 2048}
FRACTIONS = {"kv0005": 0.99}
FORMS = {
    "kv0085": ("f32", "this build kept f32"),
    "kv0155": ("fp8", "fits only with bytes, as its own remark says"),
}

#: Why a row is known not to come out, by its name.
REASONS: dict[str, str] = {}


class Outcome(NamedTuple):
    """What became of a row: its checks, or why there are none."""

    name: str
    engine: str
    model: str
    consistent: str
    checks: tuple[Check, ...]
    lacks: str = ""

    @property
    def is_right(self) -> bool:
        """Whether there are checks and all are right."""
        return bool(self.checks) and all(check.is_right for check in self.checks)


def check_row(row: Mapping[str, str]) -> Outcome | None:
    """The checks of one row; None for an engine that is none of these."""
    engine = ENGINES.get(row["engine"])
    if engine is None:
        return None
    found = Outcome(row["record_id"], row["engine"], row["model"], row["consistent"], ())
    shape = TOLD.get(found.name) or _shape(row["model"])
    if shape is None:
        return found._replace(lacks="the model is not named")
    make = {"sglang": _sglang_checks, "tensorrt-llm": _tensorrt_llm_checks, "llama.cpp": _llama_cpp_checks}
    checks = make[engine](row, shape)
    return found._replace(checks=tuple(checks), lacks="" if checks else "no figure follows from another")


def _sglang_checks(row: Mapping[str, str], shape: Shape) -> list[Check]:
    """Tokens from the memory printed, states from their slots, and both from the memory that both take."""
    tokens, kv = whole(row["kv_tokens"]), number(row["kv_gib"])
    if tokens is None or kv is None:
        return []
    if row["record_id"] == "kv0075":
        # Before its repair SGLang left the indexer out of the line.
        shape = tuple(part for part in shape if not isinstance(part[1], SparseIndexer))
    sparse = any(isinstance(cache, (SparseIndexer, LatentAttention)) for _, cache in shape)
    form = {"": "bfloat16", "bf16": "bfloat16", "fp8": "fp8_e4m3"}.get(
        row["kv_cache_dtype"], row["kv_cache_dtype"]
    )
    if form == "fp8_e4m3" and "v3.2" in row["model"].lower():
        form = "fp8_ds_mla"  # the layout of 2025 on every GPU
    page = 64 if sparse and tokens % 64 == 0 else 1
    tp = (whole(row["tp"]) or 1) // (whole(row["dp"]) or 1)
    attention = tuple(part for part in shape if not isinstance(part[1], (GatedDeltaNet, Mamba2State)))
    deployment = _deployment("sglang", form, tp=tp, block_size=page)
    pool = SglangPool(_spec(attention), deployment)
    # K and V are rounded each on its own; the buffers have one page more than the line says.
    error = GIB // 100 if number(row["kv_k_gib"]) is not None else GIB // 200
    padding = pool.bytes_per_block()
    low, high = (
        pool.share(int(kv * GIB) + sign * error - padding, STAGE).num_blocks * page for sign in (-1, 1)
    )
    checks = [Check("tokens", tokens, low, high)]
    state, slots = number(row["state_gib"]), _slots(row)
    if state is not None and slots is not None and len(attention) < len(shape):
        limited = whole(row["max_num_seqs"]) == slots
        conv, recurrent = SglangRules().state_dtypes([cache for _, cache in shape])
        deployment = _deployment("sglang", form, tp=tp)
        deployment = deployment._replace(
            cache=deployment.cache._replace(mamba_cache_dtype=conv, mamba_ssm_cache_dtype=recurrent),
            enable_prefix_caching=not limited,
            max_num_seqs=slots,
            is_max_num_seqs_given=True,
        )
        both = SglangPool(_spec(shape), deployment)
        one = both.allocated_bytes(0)
        # The memory that the printed slots and tokens take must give them back: slots by the engine's own ratio.
        taken = (slots + 1) * one + tokens * pool.bytes_per_block() // page
        share = both.share(taken, STAGE)
        checks.append(Check("tokens beside states", tokens, share.num_blocks, share.num_blocks))
        size = (slots + 1) * one / GIB
        checks.append(Check("state GiB of slots", state, size - 0.01, size + 0.01))
    return checks


def _tensorrt_llm_checks(row: Mapping[str, str], shape: Shape) -> list[Check]:
    """Blocks from free memory, and tokens from the memory taken."""
    name = row["record_id"]
    form = FORMS[name][0] if name in FORMS else {"fp8": "fp8"}.get(row["kv_cache_dtype"], "float16")
    tokens_per_block = whole(row["block_size"]) or 64
    fraction = FRACTIONS.get(name) or number(row["memory_fraction"]) or 0.9
    deployment = _deployment("tensorrt-llm", form, block_size=tokens_per_block)
    pool = TensorrtLlmPool(_spec(shape), deployment._replace(gpu_memory_utilization=fraction))
    blocks, tokens = whole(row["gpu_blocks"]), whole(row["kv_tokens"])
    free, kv = number(row["kv_free_gib"]), number(row["kv_gib"])
    checks = []
    if blocks is not None and free is not None:
        ends = [
            pool.share(pool.kv_memory(int(free * GIB) + sign * GIB // 200, 0), STAGE).num_blocks
            for sign in (-1, 1)
        ]
        checks.append(Check("blocks of free memory", blocks, *ends))
    if tokens is not None and blocks is not None:
        line = pool.token_line(blocks, tokens)[0]
        checks.append(Check("tokens of blocks", tokens, line, line))
    if tokens is not None and kv is not None:
        size = tokens // tokens_per_block * pool.bytes_per_block() / GIB
        checks.append(Check("GiB of tokens", kv, size - 0.005, size + 0.005))
    return checks


def _llama_cpp_checks(row: Mapping[str, str], shape: Shape) -> list[Check]:
    """Memory from cells."""
    name = row["record_id"]
    cells = CELLS.get(name) or whole(row["kv_cells"])
    size, error = number(row["kv_mib"]), 0.005
    if row["kv_gib"] and cells is None:
        # A planner's line: memory for the context that was asked for.
        cells, size, error = whole(row["max_model_len"]), float(row["kv_gib"]) * 1024, 51.2
    layers = whole(row["kv_layers"])
    parts = shape
    if layers is not None and layers != sum(count for count, _ in shape):
        # The line of one of the two caches.
        parts = next(((part,) for part in shape if part[0] == layers), ())
    if cells is None or size is None or not parts:
        return []
    form = FORMS[name][0] if name in FORMS else row["kv_cache_dtype"] or "f16"
    slots = whole(row["max_num_seqs"]) or 1
    deployment = _deployment("llama.cpp", form, block_size=256, batch=512)
    pool = LlamaCppPool(_spec(parts), deployment._replace(max_num_seqs=slots, is_max_num_seqs_given=True))
    if all(isinstance(cache, SlidingWindow) for _, cache in parts):
        # The cells of windows follow from the context; they are printed too.
        context = whole(row["max_model_len"]) or cells
        predicted = pool.cache_bytes(context) / MIB
    else:
        predicted = pool.cache_bytes(cells) / MIB
    return [Check("MiB of cells", size, predicted - error, predicted + error)]


#: The one stage of a model on one GPU.
STAGE = WHOLE_MODEL


def _deployment(engine: str, form: str, *, tp: int = 1, block_size: int = 1, batch: int = 8192) -> Deployment:
    return Deployment(
        seq=1,
        max_model_len=1,
        cache=CacheFormat("bfloat16", form, tensor_parallel_size=tp),
        engine=engine,
        block_size=block_size,
        max_num_batched_tokens=batch,
    )


def _spec(shape: Shape) -> ModelSpec:
    """A model of these layers, as far as its caches go."""
    layers = []
    first = 0
    for count, cache in shape:
        # An indexer stands beside the latents of the same layers.
        if isinstance(cache, SparseIndexer):
            first -= count
        layers += [LayerCache(first + i, cache) for i in range(count)]
        first += count
    return ModelSpec(
        name="a model of a log",
        family="",
        architecture="",
        num_layers=first,
        hidden_size=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=1,
        vocab_size=1,
        max_position_embeddings=None,
        dtype="bfloat16",
        layers=tuple(layers),
        weights=Weights(None, "config"),
        source="a log",
    )


def _shape(model: str) -> Shape | None:
    name = model.lower()
    return next((shape for pattern, shape in SHAPES if name and re.search(pattern, name)), None)


def _slots(row: Mapping[str, str]) -> int | None:
    match = re.search(r"([0-9]+) mamba slots", row["note"])
    return int(match.group(1)) if match else None


def main() -> int:
    """Print a line for each figure; 1 if a counted row does not come out and no reason is known."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--all", action="store_true", help="rows that are not marked consistent too")
    options = parser.parse_args()
    with options.file.open(encoding="utf-8", newline="") as lines:
        outcomes = [found for row in csv.DictReader(lines) if (found := check_row(row))]
    counted = [found for found in outcomes if options.all or found.consistent == "yes"]
    for found in counted:
        head = f"{found.name} {found.engine:16} {found.model[:38]:38}"
        for check in found.checks:
            mark = "right" if check.is_right else "WRONG"
            print(
                f"{head} {check.figure:22} {check.printed:>12,.10g}  "
                f"{check.low:,.10g} to {check.high:,.10g}  {mark}"
            )
        if not found.checks:
            print(f"{head} {found.lacks}")
    wrong = [found for found in counted if found.checks and not found.is_right]
    checked = [found for found in counted if found.checks]
    for found in wrong:
        print(f"{found.name} does not come out: {REASONS.get(found.name, 'the reason is not known')}")
    for engine in sorted(set(ENGINES.values())):
        rows = [found for found in checked if ENGINES[found.engine] == engine]
        print(f"{engine}: {sum(found.is_right for found in rows)} of {len(rows)} rows right")
    print(
        f"{len(checked) - len(wrong)} of {len(checked)} rows right; {len(counted) - len(checked)} say too little"
    )
    return int(any(found.name not in REASONS for found in wrong))


if __name__ == "__main__":
    sys.exit(main())
