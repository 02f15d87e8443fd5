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


@pytest.mark.parametrize("first", range(0, SCENARIOS // 2, BATCH))
def test_every_figure_is_equal(first: int) -> None:
    for seed in range(first, min(first + BATCH, SCENARIOS // 2)):
        rng = Random(-seed - 1)
        config, requests = draw_grouped(rng)
        requests = [request._replace(abort=None, abort_mid=False) for request in requests]
        compare_whole(rng, config, requests, aborts=seed % 3 == 0)


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
