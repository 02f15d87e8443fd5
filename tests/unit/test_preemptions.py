"""Causes of preemptions: what the log folds as it goes, against each case followed on its own."""

from __future__ import annotations

from contextlib import suppress
from random import Random
from typing import NamedTuple

import pytest

from kvplan.core.cost import constant
from kvplan.core.engine import Preemption, SchedulerConfig
from kvplan.core.engines.plain_groups import PlainSequence
from kvplan.core.engines.vllm_plain import VllmPlain
from kvplan.core.metrics import Metrics
from kvplan.core.preemptions import PreemptionCauses
from kvplan.core.request import Request, Segment
from kvplan.core.simulate import StepRecord, run


class Seen(NamedTuple):
    """A step as it was, with what its sequences had computed when it ended."""

    start: int
    end: int
    running: int
    preemptions: list[Preemption]
    hits: dict[str, int]
    computed: dict[str, int]


def play(seed: int) -> tuple[PreemptionCauses, list[Seen]]:
    """Thirty short requests in a pool far too small for them, sometimes cut off before the end."""
    rng = Random(seed)
    caching, policy = rng.random() < 0.7, rng.choice(["fcfs", "priority"])
    requests = []
    arrival = 0
    for i in range(30):
        arrival += rng.choice([0, 0, 3, 10])
        common, own = rng.choice([0, 4, 14]), rng.randint(1, 8)
        content = (Segment("s", 0, common), Segment(f"p:{i}", 0, own))
        requests.append(
            Request(f"r{i}", arrival, common + own, rng.randint(1, 14), rng.randint(0, 2), content)
        )
    config = SchedulerConfig(
        num_gpu_blocks=rng.choice([19, 20, 24]),
        block_size=2,
        max_num_batched_tokens=rng.choice([6, 8, 16]),
        max_num_seqs=6,
        max_model_len=36,
        enable_prefix_caching=caching,
        policy=policy,
    )
    metrics = Metrics(
        num_gpu_blocks=config.num_gpu_blocks, block_size=2, prefix_caching=caching, seconds_per_tick=None
    )
    seen: list[Seen] = []
    most = rng.choice([rng.randint(10, 70), 10**6])

    def observe(record: StepRecord) -> None:
        turn = record.turn
        assert turn is not None
        scheduled: list[tuple[PlainSequence, int]] = turn.scheduled
        computed = {sequence.id: sequence.computed for sequence, _ in scheduled}
        hits = {sequence.id: tokens for sequence, tokens in turn.prefix_hits}
        seen.append(Seen(record.start, record.end, turn.running, turn.preemptions, hits, computed))
        if len(seen) == most:
            raise KeyboardInterrupt

    with suppress(KeyboardInterrupt):
        run(requests, VllmPlain(config), constant(rng.choice([1, 3])), metrics, observe=observe)
    return metrics.preemption_causes(), seen


class Followed(NamedTuple):
    """A preemption and what became of it; ``closed`` orders the ends."""

    step: int
    preemption: Preemption
    running: int
    found: int
    lost_ticks: int | None
    closed: tuple[int, int, int]


def follow(seen: list[Seen]) -> list[Followed]:
    return [
        Followed(i, preemption, step.running, *fate(preemption, step.start, seen, i + 1))
        for i, step in enumerate(seen)
        for preemption in step.preemptions
    ]


def fate(
    preemption: Preemption, since: int, seen: list[Seen], first: int
) -> tuple[int, int | None, tuple[int, int, int]]:
    """Tokens found again, ticks until all was there again or it was preempted anew, and when that was."""
    name, lost, found = preemption.victim, preemption.lost_tokens, 0
    for j in range(first, len(seen)):
        step = seen[j]
        victims = [other.victim for other in step.preemptions]
        if name in victims:
            return found, step.start - since, (j, 1, victims.index(name))
        found = min(step.hits.get(name, found), lost)
        if step.computed.get(name, -1) >= lost:
            return found, step.end - since, (j, 0, list(step.computed).index(name))
    return found, None, (len(seen), 0, 0)


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_causes_are_the_sums_of_all_cases_and_the_worst_are_the_costliest(first: int) -> None:
    many = twice = unfinished = 0
    for seed in range(first, first + 50):
        causes, seen = play(seed)
        cases = follow(seen)
        if not cases:
            assert causes.sentence == "no sequence was preempted"
            continue
        closed = [case for case in cases if case.lost_ticks is not None]
        open_ = [case for case in cases if case.lost_ticks is None]
        assert causes.by_decodes == sum(case.preemption.is_decode for case in cases)
        assert causes.by_prompts == len(cases) - causes.by_decodes
        assert causes.of_themselves == sum(c.preemption.victim == c.preemption.trigger for c in cases)
        assert causes.lost_tokens == sum(case.preemption.lost_tokens for case in cases)
        assert causes.found_tokens == sum(case.found for case in cases)
        assert causes.mean_running == sum(case.running for case in cases) / len(cases)
        assert causes.lost_ticks == sum(case.lost_ticks or 0 for case in closed)
        costliest = sorted(closed, key=lambda case: (-(case.lost_ticks or 0), case.closed))
        worst = [
            (case.step, case.preemption, case.running, case.found, case.lost_ticks)
            for case in [*open_, *costliest][:10]
        ]
        assert worst == [
            (case.step, case.preemption, case.running, case.found_tokens, case.lost_ticks)
            for case in causes.worst
        ], seed
        many += len(closed) > 10
        twice += any(case.closed[1] for case in closed)
        unfinished += bool(open_)
    assert min(many, twice, unfinished) > 0


def test_a_victim_that_finishes_while_it_waits_is_followed_no_more() -> None:
    """In call 4 "urgent" takes the place of "done", whose last token is in flight."""
    requests = [
        Request("done", 0, 2, 4, 2),
        Request("urgent", 1, 2, 6),
        Request("other", 1, 1, 6, 1),
    ]
    config = SchedulerConfig(
        num_gpu_blocks=8,
        block_size=2,
        max_num_batched_tokens=20,
        max_num_seqs=8,
        max_model_len=14,
        policy="priority",
        async_scheduling=True,
    )
    metrics = Metrics(num_gpu_blocks=8, block_size=2, prefix_caching=True, seconds_per_tick=None)
    open_cases: list[int] = []

    def observe(_record: StepRecord) -> None:
        open_cases.append(len(metrics._preemptions.open))

    run(requests, VllmPlain(config), constant(1), metrics, step_numbered=True, observe=observe)
    causes = metrics.preemption_causes()
    assert set(open_cases) == {0}
    assert [(case.step, case.preemption.victim, case.lost_ticks) for case in causes.worst] == [
        (4, "done", None)
    ]
    assert causes.lost_ticks == 0
