"""Pools in which sequences outgrow what there is: who starts over without end is found, and nobody who would get on.

KVPLAN_SCENARIOS sets the number of random runs, for each of the draws; 20,000 are for a longer session.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from group_scenarios import GroupPools, draw_grouped, draw_nested
from option_scenarios import FAMILIES, draw, play
from random_scenarios import compare_engines, draw_aborts
from random_scenarios import draw as draw_one

from kvplan.core.engine import GroupSpec, SchedulerConfig
from kvplan.core.engines.vllm_plain import VllmPlain
from kvplan.core.request import Request, Segment

SCENARIOS = int(os.environ.get("KVPLAN_SCENARIOS", "2000"))
#: Turns for which a run that is called stuck is taken on.
BEYOND = 200

DRAWS = {"one": draw_one, "grouped": draw_grouped, "nested": draw_nested}


def tighten(
    rng: Random, config: SchedulerConfig, requests: list[Request]
) -> tuple[SchedulerConfig, list[Request]]:
    """The same in a pool that may be too small for the longest, mostly without the check that would turn it away."""
    longest = max(min(r.input_tokens + r.output_tokens, config.max_model_len) for r in requests)
    most = sum(
        3 if spec.kind == "state" else -(-longest // config.block_size_of(spec)) for spec in config.groups
    )
    config = replace(
        config,
        num_gpu_blocks=1 + rng.randint(1, max(2, most)),
        scheduler_reserve_full_isl=rng.random() < 0.15,
    )
    if rng.random() < 0.5:
        budget = rng.choice([1, 2, 3, 4, 6, 8, 12])
        if config.speculative:
            budget += 1 + config.speculative.num_drafts
        config = replace(
            config,
            max_num_batched_tokens=budget,
            enable_chunked_prefill=True,
            max_num_seqs=min(config.max_num_seqs, budget),
            max_num_active_seqs=None,
        )
    if rng.random() < 0.5:
        requests = requests[: rng.randint(1, 4)]
    return config, requests


@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_that_is_called_stuck_never_gets_on_and_every_other_ends(family: str) -> None:
    seen: Counter[str] = Counter()
    for seed in range(SCENARIOS // len(FAMILIES)):
        rng = Random(seed)
        config, requests = tighten(rng, *draw(rng, family))
        engine = VllmPlain(config)
        outcome, _, _ = play(config, requests, engine)  # which fails where a run does not end
        if outcome.status != "stuck":
            continue
        seen["circles" if engine.is_livelocked else "dead"] += 1
        for _ in range(BEYOND):
            turn = engine.turn()
            assert not turn.sampled, seed
            assert not turn.finished, seed
    assert seen["circles"] >= 5
    assert seen["dead"] >= 5


@pytest.mark.parametrize("drawn", DRAWS)
def test_both_engines_find_it_in_the_same_turn(drawn: str) -> None:
    for seed in range(SCENARIOS // 2):
        rng = Random(seed)
        config, requests = tighten(rng, *DRAWS[drawn](rng))
        config = replace(config, async_scheduling=rng.random() < 0.5)
        if rng.random() < 0.3:
            requests = draw_aborts(rng, requests)
        compare_engines(
            config,
            requests,
            publish_at_once=rng.random() < 0.3,
            skip=rng.random() < 0.5,
            pools=None if drawn == "one" else GroupPools(config, requests),
        )


def test_a_token_that_comes_in_in_a_run_of_decodes_counts_too() -> None:
    """The first 12 tokens fill the pool, and what is behind the windows is still in flight: it starts over.

    Then it finds them in the cache, and the token of its last chunk comes in in the first step of a run.
    """
    windows = [GroupSpec("sliding", 4, 3)] * 2
    config = SchedulerConfig(
        num_gpu_blocks=10,
        block_size=4,
        max_num_batched_tokens=12,
        max_num_seqs=1,
        max_model_len=64,
        scheduler_reserve_full_isl=False,
        groups=(*windows, GroupSpec("full", 4)),
        async_scheduling=True,
    )
    requests = [Request("a", 0, 14, 2, 0, (Segment("s", 0, 14),))]
    seen = compare_engines(
        config, requests, publish_at_once=False, skip=True, pools=GroupPools(config, requests)
    )
    assert seen["preemptions"] == 1
