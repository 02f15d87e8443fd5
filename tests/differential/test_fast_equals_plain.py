"""The fast engine decides exactly what the plain one decides.

KVPLAN_SCENARIOS sets the number of random runs; 20,000 are for a longer session.
"""

from __future__ import annotations

import os

import pytest
from random_scenarios import compare

from kvplan.core.metrics import RequestRecord
from kvplan.jobs.simulate import Simulation
from kvplan.options import SimulateOptions

SCENARIOS = int(os.environ.get("KVPLAN_SCENARIOS", "2000"))
BATCH = 100


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("first", range(0, SCENARIOS, BATCH))
def test_random_scenarios_agree(first: int, skip: bool) -> None:
    for seed in range(first, min(first + BATCH, SCENARIOS)):
        compare(seed, publish_at_once=False, skip=skip)
        compare(seed, publish_at_once=True, skip=skip)


def test_the_scenarios_reach_preemption() -> None:
    assert sum(compare(seed, publish_at_once=False, skip=True)[1] for seed in range(100)) > 50


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
    plain, fast = (
        [
            (r.admitted, r.first_token, r.finished, r.output_tokens, r.preemptions, r.peak_blocks)
            for r in records
        ]
        for records in ended
    )
    assert plain == fast
