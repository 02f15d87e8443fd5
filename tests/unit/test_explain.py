"""Explanations: every figure is one of the document, and the last line is its verdict or its total."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from kvplan.jobs.size import size

CASES: list[dict[str, Any]] = [
    {"model": "llama-2-13b", "seq": 4096, "concurrency": 10},
    {"model": "llama-3.1-8b", "gpu": "2xh100-80gb", "seq": 8192},
    {"model": "llama-3.1-8b", "gpu": "l4", "engine": "vllm@0.19"},
    {"model": "llama-3.1-8b", "kv_cache_memory_bytes": "8GiB", "pipeline_parallel_size": 2},
    {"model": "gemma-3-27b", "gpu": "a100-80gb", "concurrency": 6},
    {"model": "gpt-oss-20b", "gpu": "h100-80gb"},
    {"model": "qwen3-next-80b", "num_gpu_blocks_override": 5000, "max_model_len": 32768, "seq": 1000},
    {"model": "deepseek-v3", "kv_cache_memory_bytes": "40GiB", "tensor_parallel_size": 8},
    {"model": "deepseek-v4-flash", "kv_cache_memory_bytes": "40GiB", "max_model_len": 65536},
    {"model": "whisper-large-v3", "kv_cache_memory_bytes": "1GiB"},
]


def documents(case: dict[str, Any]) -> tuple[list[str], dict[str, Any]]:
    options = dict(case)
    found = size(options.pop("model"), **options)
    document = json.loads(json.dumps(found.to_dict(explain=True)))
    return document["explanation"], document


def figures_of(value: object) -> set[str]:
    """All numbers of a document, as an explanation writes them."""
    if isinstance(value, dict):
        return set().union(*(figures_of(item) for item in value.values())) if value else set()
    if isinstance(value, list):
        return set().union(*(figures_of(item) for item in value)) if value else set()
    if isinstance(value, bool) or not isinstance(value, int | float):
        return set()
    return {f"{value:,}", f"{value:,.2f}"} if isinstance(value, float) else {f"{value:,}"}


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(str(value) for value in case.values()))
def test_the_last_line_is_the_verdict_or_the_total(case: dict[str, Any]) -> None:
    lines, document = documents(case)
    capacity = document.get("capacity")
    if capacity is None:
        assert lines[-1].endswith(f"= {document['kv']['total_bytes']:,}")
    else:
        assert lines[-1] == f"fits: {'yes' if capacity['fits'] else 'no'}: {capacity['reason']}"


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(str(value) for value in case.values()))
def test_every_large_figure_is_in_the_document(case: dict[str, Any]) -> None:
    lines, document = documents(case)
    known = figures_of(document)
    groups = document["kv"]["groups"]
    derived = {
        # Sums and single caches, which the document gives by their parts.
        f"{sum(group['blocks_per_sequence'] for group in groups):,}",
    }
    # The last line of a budget repeats the document's reason, which multiplies blocks by sequences.
    for line in lines[:-1] if "capacity" in document else lines:
        text = re.sub(r"\[.*\]", "", line)
        if " bytes per token in each layer" in text or " bytes of state in each layer" in text:
            continue
        for figure in re.findall(r"(?<![\w.])-?\d{1,3}(?:,\d{3})+(?![\w.])", text):
            assert figure in known | derived, (figure, line)


def test_a_layers_bytes_are_worked_out_with_its_own_numbers() -> None:
    lines, _ = documents(CASES[0])
    assert "40 x full (num_kv_heads 40, head_dim 128)" in lines[1]
    assert "= 40 x (128 + 128) x 2 = 20,480 bytes per token in each layer" in lines[1]
    assert lines[-1] == ("total = payload of a sequence x concurrency = 3,355,443,200 x 10 = 33,554,432,000")


def test_each_rule_names_its_source_and_the_first_line_its_version() -> None:
    lines, _ = documents(CASES[2])
    assert lines[0] == "by the rules of vllm 0.19"
    assert sum(line.endswith("]") for line in lines) >= 3


def test_a_draft_a_pipeline_and_the_null_block_have_their_lines() -> None:
    lines, _ = documents(
        {
            "model": "llama-3.1-8b",
            "kv_cache_memory_bytes": "8GiB",
            "pipeline_parallel_size": 2,
            "num_speculative_tokens": 3,
            "speculative_model": "llama-3.2-1b",
        }
    )
    assert "the draft adds 16 caches of its own" in lines
    assert any(line.startswith("stage 1 of 2 has the fewest") for line in lines)
    assert any("one of them the null block" in line for line in lines)
    assert any(line.startswith("per GPU: ") for line in lines)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"lengths": "1000,2000"},
            ["log-normal: a sequence takes", "resident at once on average", "with 95 % confidence"],
        ),
        (
            {"lengths": "1000,2000", "shared_prefix": 160},
            ["of them are shared", "resident at once on average = (4,999 - 10) //"],
        ),
    ],
)
def test_sequences_of_a_distribution_are_counted_line_by_line(
    options: dict[str, Any], expected: list[str]
) -> None:
    case = {"model": "llama-3.1-8b", "num_gpu_blocks_override": 5000} | options
    lines, document = documents(case)
    for text in expected:
        assert any(text in line for line in lines), (text, lines)
    found = document["capacity"]["distribution"]
    assert any(line.endswith(f"= {found['concurrent_mean']:,}") for line in lines)
    assert lines[-1].startswith("fits: ")


def test_a_trace_is_counted_as_it_is() -> None:
    lines, document = documents(
        {"model": "llama-3.1-8b", "num_gpu_blocks_override": 5000, "trace": "multi-turn"}
    )
    found = document["capacity"]["distribution"]
    named = [line for line in lines if line.startswith(found["method"])]
    assert len(named) == 1
