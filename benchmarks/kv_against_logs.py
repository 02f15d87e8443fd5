"""Tokens, blocks and needs of the KV cache as kvplan computes them, against what vLLM printed.

Usage: python benchmarks/kv_against_logs.py FILE.csv [FILE.csv ...] [--rows] [--all]

Reads files of three forms, told apart by their columns: logs collected from issues (``record_id``), measured pools
(``kv_available_gib``) and parsed start-ups (``available_kv_gib``). A row gives its own memory for KV and its own
settings; from these every other figure of the row is predicted. Printed sizes are rounded to 0.01 GiB, so a figure is
right if it lies between the predictions of both ends. A row that prints no memory is held against itself: its
tokens or blocks must give its concurrency. Rows that do not tell their version are tried with the rules of several,
and hybrid models with prefix caching on and off.

Counted are rows marked consistent whose model is stated; ``--all`` adds those whose model was named by the context
or fitted to the figures. Every row that is not right is listed with the reason that is known.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from log_figures import Check, number, whole

from kvplan import size
from kvplan.config import load_gpu
from kvplan.errors import KvplanError
from kvplan.jobs.size import SizeResult

GIB = 1 << 30
HALF = GIB // 200  # of the last digit of 0.01 GiB

#: Models of the logs by what their name holds; the first match counts.
NAMES = (
    (r"llama-?3\.2-1b", "llama-3.2-1b"),
    (r"llama-?3\.2-3b", "llama-3.2-3b"),
    (r"llama-3\.[13]-70b", "llama-3.1-70b"),
    (r"llama-3\.1-8b", "llama-3.1-8b"),
    (r"llama-2-7b|alpaca", "llama-2-7b"),
    (r"llama-2-70b", "llama-2-70b"),
    (r"llama-4-scout", "llama-4-scout"),
    (r"codellama-7b", "llama-2-7b"),
    (r"codellama-34b", "codellama-34b"),
    (r"yi-34b", "yi-34b"),
    (r"mixtral-8x7b", "mixtral-8x7b"),
    (r"mistral-nemo", "mistral-nemo"),
    (r"mistral-small", "mistral-small-24b"),
    (r"qwen3\.[568x][-0-9b]*27b|qwen3\.8-27b", "qwen3.5-27b"),
    (r"qwen3\.[56]-35b-a3b", "qwen3.5-35b-a3b"),
    (r"qwen3\.5-9b", "qwen3.5-9b"),
    (r"qwen3\.5-122b", "qwen3.5-122b-a10b"),
    (r"qwen3-235b", "qwen3-235b-a22b"),
    (r"qwen3-30b-a3b", "qwen3-30b-a3b"),
    (r"qwen3-0\.6b", "qwen3-0.6b"),
    (r"qwen3-4b", "qwen3-4b"),
    (r"qwen3-8b", "qwen3-8b"),
    (r"qwen3-14b", "qwen3-14b"),
    (r"qwen3-32b", "qwen3-32b"),
    (r"qwen2\.5-0\.5b", "qwen2.5-0.5b"),
    (r"qwen2\.5-1\.5b", "qwen2.5-1.5b"),
    (r"qwen2\.5-7b", "qwen2.5-7b"),
    (r"qwen2\.5-vl-32b|qwen-32b|32b awq", "qwen2.5-32b"),
    (r"kimi-dev-72b", "qwen2.5-72b"),
    (r"deepseek-v2-lite", "deepseek-v2-lite"),
    (r"deepseek-(v3|r1$|r1 )|deepseek-r1(?!-)", "deepseek-v3"),
    (r"glm-4-9b", "glm-4-9b"),
    (r"gemma-4-31b", "gemma-4-31b"),
    (r"gemma-4-26b", "gemma-4-26b-a4b"),
    (r"gemma-3-27b", "gemma-3-27b"),
    (r"gemma-3-4b", "gemma-3-4b"),
    (r"gemma-2-2b", "gemma-2-2b"),
    (r"gemma-2-9b", "gemma-2-9b"),
    (r"gemma-7b", "gemma-7b"),
    (r"gpt-oss-120b", "gpt-oss-120b"),
    (r"gpt-oss-20b", "gpt-oss-20b"),
    (r"granite-(3\.1-2b|vision-3\.3-2b)", "granite-3.1-2b"),
    (r"granite-3\.1-8b", "granite-3.1-8b"),
    (r"phi-2$", "phi-2"),
    (r"phi-4(?!-mini)", "phi-4"),
    (r"opt-125m", "opt-125m"),
)

#: Why a row is known not to come out, by its name.
REASONS: dict[str, str] = {
    "kv0014": "a draft model of its own (DFlash2) shares the pool; its shape is not posted",
    "kv0055": "the model's shape is not known; with 36 state layers of 64 value heads and one draft token it comes out",
    "kv0098": "the memory line is another rank's than the one with the fewest blocks (1 % apart), as its note says",
    "kv0104": "max_num_batched_tokens is not posted; 8,226 to 8,241 tokens in flight would give the printed figure",
    "kv0113": "vLLM for CPUs, whose blocks are rounded in other ways",
}


class Row(NamedTuple):
    """What a log printed; sizes in GiB, None where it did not."""

    name: str
    basis: str
    family: str
    engine: str
    version: str
    model: str
    settings: dict[str, object]
    max_model_len: int | None
    kv_gib: float | None
    tokens: int | None
    blocks: int | None
    concurrency: float | None
    needed_gib: float | None
    estimated_len: int | None


def main() -> None:
    """Print a table by family, and every row that does not come out."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--rows", action="store_true", help="print every row")
    parser.add_argument("--all", action="store_true", help="also rows whose model is not stated")
    arguments = parser.parse_args()
    right: dict[str, int] = defaultdict(int)
    counted: dict[str, int] = defaultdict(int)
    checked = 0
    wrong: list[str] = []
    skipped: list[str] = []
    for row in itertools.chain.from_iterable(read(path) for path in arguments.files):
        if row.basis != "stated" and not arguments.all:
            continue
        outcome = judge(row)
        if isinstance(outcome, str):
            skipped.append(f"{row.name} ({row.model}): {outcome}")
            continue
        counted[row.family] += 1
        checked += len(outcome)
        bad = [check for check in outcome if not check.is_right]
        right[row.family] += not bad
        if bad:
            wrong.append(
                f"{row.name} ({row.model}): {describe(bad)}; {REASONS.get(row.name, 'NOT EXPLAINED')}"
            )
        if arguments.rows:
            print(f"{row.name:60.60} {row.model:42.42} {'right' if not bad else 'WRONG'} {describe(outcome)}")
    print(f"{'family':22} {'rows':>5} {'right':>6}")
    for family in sorted(counted):
        print(f"{family:22} {counted[family]:5} {right[family]:6}")
    rows, good = sum(counted.values()), sum(right.values())
    print(f"{'all':22} {rows:5} {good:6}  {good / rows:.1%} of the rows, {checked} figures")
    for title, lines in (("not right", wrong), ("without a figure that could be predicted", skipped)):
        print(f"\n{title}: {len(lines)}")
        for line in lines:
            print(f"  {line}")


def describe(checks: Sequence[Check]) -> str:
    """The figures of a row, a few words each."""
    return ", ".join(f"{c.figure} {c.printed:,g} (predicted {c.low:,g} to {c.high:,g})" for c in checks)


def judge(row: Row) -> list[Check] | str:
    """The figures of a row against what is predicted; a text says why there is none."""
    own = internal(row)
    model = known_model(row.model)
    if model is None or (row.kv_gib is None and row.needed_gib is None):
        return own or (
            "the model is not known" if model is None else "no memory and no concurrency is printed"
        )
    best: list[Check] | None = None
    fault = "no figure beside the memory"
    for version, caching, drafts in candidates(row, model):
        try:
            found = predictions(row, model, version, caching, drafts)
        except KvplanError as error:
            fault = str(error)
            continue
        if best is None or sum(c.is_right for c in found) > sum(c.is_right for c in best):
            best = found
    return best or own or fault


def internal(row: Row) -> list[Check]:
    """The concurrency that a row's own tokens or blocks give, where one group keeps all tokens."""
    if row.concurrency is None or not row.max_model_len:
        return []
    size_of_block = row.settings.get("block_size", 16)
    tokens = row.tokens
    if tokens is None and row.blocks is not None and isinstance(size_of_block, int):
        tokens = row.blocks * size_of_block
    if tokens is None:
        return []
    # Newer lines print tokens cut off from concurrency x length; the printed concurrency has two digits.
    digits = 0.0055
    return [
        Check(
            "concurrency",
            row.concurrency,
            tokens / row.max_model_len - digits,
            (tokens + 1) / row.max_model_len + digits,
        )
    ]


def candidates(row: Row, model: str) -> Iterator[tuple[str, bool | None, int | None]]:
    """Versions, prefix caching and drafts to try: what the row says, else what it may have been.

    How many tokens a draft proposes is tried for hybrids whose model is not stated either.
    """
    written = re.search(r"0\.(\d+)", row.version)
    versions = ["0.19", "0.24", "0.33", "0.11", "0.8"]
    if written and "V0" not in row.version:
        versions = [f"0.{min(33, max(6, int(written.group(1))))}"]
        if row.version.rstrip().endswith("+"):
            versions += ["0.24", "0.33"]
    elif "V0" in row.version or "2025-01" in row.version:
        versions = ["0.7"] if "0.7" in row.version else ["0.8"]
    stated = row.settings.get("enable_prefix_caching")
    cachings = [stated] if isinstance(stated, bool) else [None, True, False]
    drafts = [None, 1, 2, 3] if row.family == "linear-hybrid" and row.basis != "stated" else [None]
    yield from itertools.product(versions, cachings, drafts)


def predictions(row: Row, model: str, version: str, caching: bool | None, drafts: int | None) -> list[Check]:
    """Every printed figure of a row beside its prediction; raises `KvplanError` where kvplan refuses."""
    options = {**row.settings, "engine": f"vllm@{version}"}
    if caching is not None:
        options["enable_prefix_caching"] = caching
    if drafts is not None:
        options["num_speculative_tokens"] = drafts
    if row.max_model_len is not None:
        # Fine-tunes and flags go beyond the catalogue's maximum.
        options |= {
            "max_model_len": row.max_model_len,
            "set": [f"max_position_embeddings={row.max_model_len}"],
        }
    kv = row.kv_gib if row.kv_gib is not None else row.needed_gib
    assert kv is not None
    low, high = (plan(model, options, round(kv * GIB) + way * HALF) for way in (-1, 1))
    found: list[Check] = []
    if row.kv_gib is not None:
        a, b = low.capacity, high.capacity
        assert a is not None
        assert b is not None
        pairs = (
            ("tokens", row.tokens, a.kv_cache_tokens, b.kv_cache_tokens),
            ("blocks", row.blocks, a.num_gpu_blocks, b.num_gpu_blocks),
            ("concurrency", row.concurrency, a.max_concurrency - 0.0051, b.max_concurrency + 0.0051),
            ("longest", row.estimated_len, a.max_model_len_that_fits, b.max_model_len_that_fits),
        )
        found += [Check(name, printed, x, y) for name, printed, x, y in pairs if printed is not None]
    if row.needed_gib is not None and row.max_model_len is not None:
        needed = low.kv.per_gpu.allocated_bytes_per_sequence / GIB
        found.append(Check("needed GiB", row.needed_gib, needed - 0.0051, needed + 0.0051))
    return found


def plan(model: str, options: dict[str, object], kv_bytes: int) -> SizeResult:
    """The figures of kvplan for a memory."""
    return size(model, kv_cache_memory_bytes=kv_bytes, **options)


def known_model(name: str) -> str | None:
    """The catalogue's name of a model; None if it has none of that shape."""
    for pattern, model in NAMES:
        if re.search(pattern, name.lower()):
            return model
    return None


def read(path: Path) -> Iterator[Row]:
    """The rows of vLLM in a file that are not marked inconsistent."""
    with path.open(newline="", encoding="utf-8") as file:
        for line in csv.DictReader(file):
            if "record_id" in line:
                if line["engine"].startswith("vllm") and line["consistent"] == "yes":
                    yield collected(line)
            elif "kv_available_gib" in line:
                yield measured(line)
            elif line.get("available_kv_gib") and line["engine"] == "vLLM":
                yield parsed(line)


def collected(line: dict[str, str]) -> Row:
    """A log that somebody posted."""
    settings = given(line, tp="tensor_parallel_size", pp="pipeline_parallel_size")
    settings |= given(line, max_num_batched_tokens="max_num_batched_tokens") | known_gpu(line["gpu"])
    if line["block_size"] and line["family"] not in ("linear-hybrid", "mamba-hybrid"):
        settings["block_size"] = int(line["block_size"])
    if line["kv_cache_dtype"]:
        settings["kv_cache_dtype"] = line["kv_cache_dtype"]
    drafts = re.search(r"MTP ?(\d)", f"{line['model']} {line['note']}")
    if drafts:
        settings["num_speculative_tokens"] = int(drafts.group(1))
    return Row(
        name=line["record_id"],
        basis=line["model_basis"],
        family=line["family"],
        engine=line["engine"],
        version=line["engine_version"],
        model=line["model"],
        settings=settings,
        max_model_len=whole(line["max_model_len"]),
        kv_gib=number(line["kv_gib"]),
        tokens=whole(line["kv_tokens"]),
        blocks=whole(line["gpu_blocks"]),
        concurrency=number(line["max_concurrency"]),
        needed_gib=number(line["kv_needed_gib"]),
        estimated_len=whole(line["estimated_max_len"]),
    )


def measured(line: dict[str, str]) -> Row:
    """A pool that somebody measured and described."""
    settings = given(line, tp="tensor_parallel_size")
    settings |= known_gpu(line["gpu"])
    block = re.match(r"\d+", line["block_size"])
    if block:
        settings["block_size"] = int(block.group())
    length = re.match(r"\d+", line["max_model_len"])
    return Row(
        name=f"{line['source']} {line['model']}",
        basis="stated",
        family="measured",
        engine="vllm",
        version=line["engine"],
        model=line["model"],
        settings=settings,
        max_model_len=int(length.group()) if length else None,
        kv_gib=number(line["kv_available_gib"]),
        tokens=whole(line["reported_kv_tokens"]),
        blocks=None,
        concurrency=None,
        needed_gib=None,
        estimated_len=None,
    )


def parsed(line: dict[str, str]) -> Row:
    """A start-up log that a program read."""
    settings = given(line, tp="tensor_parallel_size", pp="pipeline_parallel_size")
    settings |= given(line, max_num_batched_tokens="max_num_batched_tokens", max_num_seqs="max_num_seqs")
    if line["enable_prefix_caching"]:
        settings["enable_prefix_caching"] = line["enable_prefix_caching"] == "True"
    if line["kv_cache_dtype"] not in ("", "auto"):
        settings["kv_cache_dtype"] = line["kv_cache_dtype"]
    settings |= known_gpu(line["gpu"])
    return Row(
        name=line["run_id"],
        basis="stated",
        family=f"start-ups {line['engine_version']}",
        engine="vllm",
        version=line["engine_version"],
        model=line["model"],
        settings=settings,
        max_model_len=whole(line["max_model_len"]),
        kv_gib=number(line["available_kv_gib"]),
        tokens=whole(line["kv_cache_tokens"]),
        blocks=None,
        concurrency=number(line["max_concurrency_x"]),
        needed_gib=None,
        estimated_len=None,
    )


def known_gpu(text: str) -> dict[str, object]:
    """The option for a GPU whose kind decides defaults; empty where the catalogue does not have it."""
    name = {"h100-sxm-80gb": "h100-80gb"}.get(
        text.lower(), re.sub(r"[ -]+", "-", text.lower().split(" 79.18")[0])
    )
    try:
        return {"gpu": load_gpu(re.sub(r"-24gb$", "", name)).name}
    except KvplanError:
        return {}


def given(line: dict[str, str], **names: str) -> dict[str, object]:
    """Options for the columns that are filled in."""
    return {option: int(line[column]) for column, option in names.items() if line[column]}


if __name__ == "__main__":
    main()
