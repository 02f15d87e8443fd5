"""The plain engine over every option together: its invariants hold in each call, and each run comes to its end.

KVPLAN_SCENARIOS sets the number of random runs of each family; 20,000 in all are for a longer session.
"""

from __future__ import annotations

import os
from collections import Counter
from random import Random

import pytest
from option_scenarios import FAMILIES, Watched, busy_price, draw, play

from kvplan.core.simulate import StepRecord

SCENARIOS = int(os.environ.get("KVPLAN_SCENARIOS", "2000")) // len(FAMILIES)
BATCH = 50


@pytest.mark.parametrize("first", range(0, SCENARIOS, BATCH))
@pytest.mark.parametrize("family", FAMILIES)
def test_invariants_hold_and_every_run_ends(family: str, first: int) -> None:
    for seed in range(first, min(first + BATCH, SCENARIOS)):
        config, requests = draw(Random(seed), family)
        engine = Watched(config)
        price = [None, busy_price, (busy_price,) * config.pipeline_parallel_size][seed % 3]
        outcome, metrics, ended = play(config, requests, engine, price=price)
        counts = metrics.request_counts()
        live = {name for name, _, _ in engine.live()}
        assert counts.unfinished == len(live)
        assert len(ended) + len(live) == len(requests)
        if outcome.status == "done":
            assert not live
            assert engine.pool.num_free == config.usable_blocks
        for record in ended:
            if record.finished is not None:
                request = record.request
                outputs = min(request.output_tokens, config.max_model_len - request.input_tokens)
                assert engine.put_out[request.id] == outputs == record.output_tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_the_scenarios_reach_what_they_are_for(family: str) -> None:
    seen: Counter[str] = Counter()

    def observe(record: StepRecord) -> None:
        turn = record.turn
        seen["aborted"] += len(record.aborted)
        if turn is None:
            return
        seen["preempted"] += len(turn.preempted)
        seen["hit"] += sum(tokens > 0 for _, tokens in turn.prefix_hits)
        seen["evicted"] += turn.evicted
        seen["accepted"] += turn.accepted_drafts
        seen["rejected"] += turn.rejected_drafts
        seen["waited"] += not turn.processed
        seen["nulls"] += sum(0 in table for tables in turn.new_tables.values() for table in tables)

    for seed in range(60):
        config, requests = draw(Random(seed), family)
        play(config, requests, observe=observe)
    wanted = {"preempted", "hit", "evicted"}
    wanted |= {
        "aborts": {"aborted"},
        "drafts": {"accepted", "rejected"},
        "windows": {"nulls"},
        "unequal": {"nulls"},
        "states": {"nulls"},
        "chunked": {"nulls"},
        "mixture": {"aborted", "accepted", "rejected", "nulls", "waited"},
    }.get(family, {"waited"})
    assert {name for name in wanted if seen[name] < 10} == set()
