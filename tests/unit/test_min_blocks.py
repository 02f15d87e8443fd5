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


@pytest.mark.parametrize("goal", ["0", "25%"])
def test_with_caching_it_is_searched_and_said_so(trace: str, goal: str) -> None:
    given = {"enable_prefix_caching": True, "max_model_len": 128}
    found = find_min_blocks(trace, options(40, **given), parse_goal(goal, trace))
    assert found.num_gpu_blocks is not None
    assert "bisection" in found.proof
    met = parse_goal(goal, trace).met
    assert met(simulate(trace, found.num_gpu_blocks, **given))
    assert (found.num_gpu_blocks - 1, False) in found.tried


def test_for_a_hit_rate_the_least_that_starts_may_be_enough(trace: str) -> None:
    given = {"enable_prefix_caching": True, "max_model_len": 128}
    goal = parse_goal("hit-rate=45%", trace)  # 11 of 12 find half of their prompt
    found = find_min_blocks(trace, options(40, **given), goal)
    assert found.num_gpu_blocks == 9
    assert "the engine starts" in found.proof
    assert goal.met(simulate(trace, 9, **given))


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


def test_no_pool_is_tried_with_which_the_engine_would_not_start(trace: str) -> None:
    found = find_min_blocks(trace, options(4000), parse_goal("0", trace))
    assert found.num_gpu_blocks == 4000  # --max-model-len is what 4,000 blocks hold
    assert "the engine starts" in found.proof
    assert [blocks for blocks, _ in found.tried if blocks < 4000] == []
    shorter = find_min_blocks(trace, options(4000, max_model_len=128), parse_goal("0", trace))
    assert shorter.num_gpu_blocks is not None
    assert shorter.num_gpu_blocks < 100


def scenario(path: Path, **config: object) -> str:
    settings = {
        "num_gpu_blocks": 60,
        "block_size": 4,
        "max_num_batched_tokens": 8,
        "max_num_seqs": 4,
        "max_model_len": 64,
    }
    request = {"id": "a", "arrival_step": 0, "prompt_tokens": 10, "output_tokens": 4}
    path.write_text(json.dumps({"config": settings | config, "requests": [request]}))
    return str(path)


def test_a_run_that_no_pool_can_end_meets_no_goal(tmp_path: Path) -> None:
    """A prompt of 10 that must be computed in a step of 8."""
    stuck = scenario(tmp_path / "a.scenario.json", enable_chunked_prefill=False)
    assert find_min_blocks(stuck, SimulateOptions(), parse_goal("0", stuck)).num_gpu_blocks is None


@pytest.mark.parametrize("goal", ["0", "50%", "hit-rate=0%"])
def test_of_a_scenario_each_pool_can_be_tried(tmp_path: Path, goal: str) -> None:
    """10 + 4 tokens of which the last has no KV: 13 in blocks of 4, and the null block; with less it is stuck."""
    path = scenario(tmp_path / "a.scenario.json")
    found = find_min_blocks(path, SimulateOptions(), parse_goal(goal, path))
    assert found.num_gpu_blocks == 5
    assert (4, False) in found.tried


def test_the_share_is_of_requests_that_were_preempted_however_often(trace: str) -> None:
    given = {"enable_prefix_caching": True, "max_model_len": 128}
    goal = parse_goal("67%", trace)
    found = find_min_blocks(trace, options(40, **given), goal)
    assert found.num_gpu_blocks is not None
    for blocks, met in found.tried[1:]:
        result = simulate(trace, blocks, **given)
        assert met == (result.preemptions.requests <= 0.67 * result.requests.total)
    often = [simulate(trace, blocks, **given).preemptions for blocks, met in found.tried[1:] if met]
    assert any(figures.events > 8 for figures in often)


def test_for_a_hit_rate_more_may_be_needed_than_is_ever_in_use(tmp_path: Path) -> None:
    """One after the other; the third finds the first's prompt unless the second had to evict it."""
    path = tmp_path / "trace.jsonl"
    prompts = [("a", 4), ("b", 8), ("a", 4)]
    lines = [
        {
            "arrival_s": 10.0 * i,
            "input_tokens": 16 * blocks,
            "output_tokens": 2,
            "content": [[name, 0, 16 * blocks]],
        }
        for i, (name, blocks) in enumerate(prompts)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    goal = parse_goal("hit-rate=15%", str(path))
    found = find_min_blocks(str(path), options(40, max_model_len=140), goal)
    # 9 in use at most. Three of the first's four prompt blocks must stay, for a token is always computed.
    assert found.num_gpu_blocks == 13
    assert (10, False) in found.tried
    assert (12, False) in found.tried
