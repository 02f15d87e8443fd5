"""`kvplan simulate --min-blocks`: the pool that is named meets the goal, and so it says how far it is the least."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import kvplan
from kvplan.errors import InputError
from kvplan.jobs.min_blocks import find_min_blocks, parse_goal
from kvplan.options import SimulateOptions


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """Twelve at once, each of 64 + 64 tokens, half of the prompt shared."""
    path = tmp_path / "trace.jsonl"
    lines = [
        {
            "id": f"r{i}",
            "arrival_s": 0.0,
            "input_tokens": 64,
            "output_tokens": 64,
            "hash_ids": [0, 1, 2 * i + 2, 2 * i + 3],
            "hash_block_size": 16,
        }
        for i in range(12)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def options(blocks: int, **given: object) -> SimulateOptions:
    return SimulateOptions.of({"num_gpu_blocks_override": blocks, "block_size": 16, **given})


def simulate(trace: str, blocks: int, **given: object) -> kvplan.jobs.simulate.SimulateResult:
    return kvplan.simulate(trace, num_gpu_blocks_override=blocks, block_size=16, **given)


def test_without_caching_one_more_than_an_endless_pool_uses_is_enough(trace: str) -> None:
    off = {"enable_prefix_caching": False, "max_model_len": 128}
    found = find_min_blocks(trace, options(40, **off), parse_goal("0", trace))
    assert simulate(trace, 40, **off).preemptions.events > 0
    assert found.num_gpu_blocks == simulate(trace, 10_000, **off).kv.peak_blocks + 1
    assert simulate(trace, found.num_gpu_blocks, **off).preemptions.events == 0
    assert "sufficient" in found.proof


@pytest.mark.parametrize("goal", ["0", "25%", "hit-rate=40%"])
def test_with_caching_it_is_searched_and_said_so(trace: str, goal: str) -> None:
    given = {"enable_prefix_caching": True, "max_model_len": 128}
    found = find_min_blocks(trace, options(40, **given), parse_goal(goal, trace))
    assert found.num_gpu_blocks is not None
    assert "bisection" in found.proof
    met = parse_goal(goal, trace).met
    assert met(simulate(trace, found.num_gpu_blocks, **given))
    assert (found.num_gpu_blocks - 1, False) in found.tried


def test_a_goal_that_no_pool_meets(trace: str) -> None:
    found = find_min_blocks(trace, options(40, enable_prefix_caching=True), parse_goal("hit-rate=99%", trace))
    assert found.num_gpu_blocks is None


@pytest.mark.parametrize("text", ["", "5", "-1%", "101%", "hit-rate=3", "hit=3%", "1e3%"])
def test_what_is_no_goal_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="is no goal"):
        parse_goal(text, "trace.jsonl")


def test_standard_input_is_refused() -> None:
    with pytest.raises(InputError, match="several times"):
        parse_goal("0", "-")
