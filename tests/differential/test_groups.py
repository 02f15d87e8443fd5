"""The fast engine with several groups decides exactly what the plain one decides.

KVPLAN_SCENARIOS sets the number of random runs; 20,000 are for a longer session.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from random import Random

import pytest
from group_scenarios import GroupPools, draw_grouped, draw_nested
from random_scenarios import compare_engines
from test_whole_runs import compare_whole

from kvplan.core.engine import GroupSpec, SchedulerConfig
from kvplan.core.request import Request, Segment
from kvplan.simulated_engines import has_fast_path
from kvplan.trace import open_trace

SCENARIOS = int(os.environ.get("KVPLAN_SCENARIOS", "2000"))
BATCH = 100


def compare(seed: int, *, publish_at_once: bool, skip: bool) -> Counter[str]:
    draw = draw_nested if seed % 4 > 1 else draw_grouped
    config, requests = draw(Random(seed))
    pools = GroupPools(config, requests)
    return compare_engines(config, requests, publish_at_once=publish_at_once, skip=skip, pools=pools)


@pytest.mark.parametrize("first", range(0, SCENARIOS, BATCH))
def test_random_scenarios_agree(first: int) -> None:
    """In turn step by step with all made findable at once, and skipping with nothing forced."""
    seen: Counter[str] = Counter()
    for seed in range(first, min(first + BATCH, SCENARIOS)):
        seen += compare(seed, publish_at_once=seed % 2 == 0, skip=seed % 2 > 0)
    assert min(seen["preemptions"], seen["skipped"], seen["aborted"]) > 20


@pytest.mark.parametrize("first", range(0, SCENARIOS // 4, BATCH))
def test_every_figure_is_equal(first: int) -> None:
    for seed in range(first, min(first + BATCH, SCENARIOS // 4)):
        rng = Random(-seed - 1)
        config, requests = draw_grouped(rng)
        requests = [request._replace(abort=None, abort_mid=False) for request in requests]
        compare_whole(rng, config, requests, aborts=seed % 3 == 0)


def test_who_ends_sees_no_more_of_an_answer_than_is_known() -> None:
    """A prompt that holds an answer ends in the step in which that answer, resumed, fills blocks of the full group.

    What it publishes then meets the decoder that grows the answer, which has not taken its turn in the next step.
    """
    config = SchedulerConfig(
        num_gpu_blocks=59,
        block_size=1,
        max_num_batched_tokens=64,
        max_num_seqs=4,
        max_model_len=64,
        enable_chunked_prefill=False,
        policy="priority",
        groups=(GroupSpec("full", 1), GroupSpec("sliding", 4, 2)),
        async_scheduling=True,
    )
    requests = [
        ask("r0", 1, 30, 2, ("s1", 0, 3), ("p:r0", 0, 11)),
        ask("r1", 2, 30, 0, ("o:r4", 0, 3), ("s1", 0, 1)),
        ask("r2", 7, 2, 2, ("o:r1", 0, 5), ("o:r0", 0, 6)),
        ask("r3", 7, 5, 0, ("o:r3", 0, 10), ("o:r0", 0, 8), ("o:r4", 0, 8)),
        ask("r4", 7, 3, 0, ("s1", 0, 2), ("o:r1", 0, 5), ("o:r0", 0, 6)),
        ask("r5", 9, 1, 1, ("p:r5", 0, 3)),
    ]
    for publish_at_once in (False, True):
        pools = GroupPools(config, requests)
        compare_engines(config, requests, publish_at_once=publish_at_once, skip=False, pools=pools)


def ask(name: str, arrival: int, output: int, priority: int, *content: tuple[str, int, int]) -> Request:
    segments = tuple(Segment(*piece) for piece in content)
    return Request(name, arrival, sum(s.length for s in segments), output, priority, segments)


GOLDENS = Path(__file__).parents[1] / "golden/data"


def test_recorded_runs_agree() -> None:
    seen: Counter[str] = Counter()
    for path in sorted(GOLDENS.glob("*.scenario.json")):
        trace = open_trace(str(path))
        config = trace.scenario
        if config is None or config.is_one_full_group or not has_fast_path(config):
            continue
        requests = list(trace)
        for skip in (False, True):
            pools = GroupPools(config, requests)
            seen += compare_engines(config, requests, publish_at_once=not skip, skip=skip, pools=pools)
        seen["asynchronous" if config.async_scheduling else "synchronous"] += 1
    assert (seen["synchronous"], seen["asynchronous"]) == (8, 3)
