"""The fast engine decides exactly what the plain one decides.

KVPLAN_SCENARIOS sets the number of random runs; 20,000 are for a longer session.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest
from random_scenarios import compare, compare_asynchronous, compare_engines, compare_with_aborts

from kvplan.core.metrics import RequestRecord
from kvplan.jobs.simulate import Simulation
from kvplan.options import SimulateOptions
from kvplan.simulated_engines import has_fast_path
from kvplan.trace import open_trace

SCENARIOS = int(os.environ.get("KVPLAN_SCENARIOS", "2000"))
BATCH = 100


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("first", range(0, SCENARIOS, BATCH))
def test_random_scenarios_agree(first: int, skip: bool) -> None:
    for seed in range(first, min(first + BATCH, SCENARIOS)):
        compare(seed, publish_at_once=False, skip=skip)
        compare(seed, publish_at_once=True, skip=skip)


@pytest.mark.parametrize("first", range(0, SCENARIOS // 2, BATCH))
def test_random_scenarios_agree_asynchronously(first: int) -> None:
    """Each of four ways to run a scenario in turn."""
    for seed in range(first, min(first + BATCH, SCENARIOS // 2)):
        compare_asynchronous(seed, publish_at_once=seed % 2 == 0, skip=seed % 4 < 2)


@pytest.mark.parametrize("first", range(0, SCENARIOS // 4, BATCH))
def test_random_scenarios_with_aborts_agree(first: int) -> None:
    for seed in range(first, min(first + BATCH, SCENARIOS // 4)):
        compare_with_aborts(seed, publish_at_once=seed % 2 == 0, skip=seed % 4 < 2)


GOLDENS = Path(__file__).parents[1] / "golden/data"
RECORDED = [p.name.removesuffix(".golden.jsonl") for p in sorted(GOLDENS.glob("*.golden.jsonl"))]


def test_recorded_runs_of_one_group_agree_wherever_the_fast_engine_can_take_them() -> None:
    seen: Counter[str] = Counter()
    for name in [*RECORDED, "69_rand_async"]:
        trace = open_trace(str(GOLDENS / f"{name}.scenario.json"))
        config = trace.scenario
        if config is not None and config.is_one_full_group and has_fast_path(config):
            requests = list(trace)
            seen += compare_engines(config, requests, publish_at_once=True, skip=False)
            seen += compare_engines(config, requests, publish_at_once=False, skip=True)
            seen["asynchronous" if config.async_scheduling else "synchronous"] += 1
    assert (seen["synchronous"], seen["asynchronous"]) == (39, 10)
    assert seen["aborted"] > 10


def test_the_scenarios_reach_what_is_rare() -> None:
    seen: Counter[str] = Counter()
    for seed in range(100):
        seen += compare_asynchronous(seed, publish_at_once=False, skip=True)
    assert seen["preemptions"] > 50
    assert seen["finished while waiting"] > 5
    assert seen["aborted"] > 100
    assert seen["skipped"] > 1000


@pytest.mark.parametrize(
    ("workload", "options"),
    [
        ("chat", {}),
        ("multi-turn", {"gpu": "l4", "max_model_len": 20000}),
        ("bursts", {"num_gpu_blocks_override": 700, "max_model_len": 8000, "warmup": 20.0}),
        ("long-documents", {"gpu": "l4", "max_model_len": 20000}),
        (
            "bursts",
            {
                "num_gpu_blocks_override": 700,
                "max_model_len": 8000,
                "scheduling_policy": "priority",
                "long_prefill_token_threshold": 100,
                "max_num_batched_tokens": 300,
                "max_num_seqs": 300,
                "warmup": 3.0,
            },
        ),
        ("chat", {"num_gpu_blocks_override": 900, "max_model_len": 8000, "enable_prefix_caching": False}),
    ],
)
def test_whole_results_are_equal_to_the_last_digit(workload: str, options: dict[str, object]) -> None:
    ended: tuple[list[RequestRecord], list[RequestRecord]] = ([], [])
    results = [
        Simulation(workload, SimulateOptions.of(options)).run(path=path, on_request=records.append)
        for path, records in zip(("plain", "fast"), ended, strict=True)
    ]
    documents = [result.to_dict() for result in results]
    assert [document["simulation"].pop("engine_path") for document in documents] == ["plain", "fast"]
    assert documents[0] == documents[1]
    plain, fast = ended
    assert plain == fast
