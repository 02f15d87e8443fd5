"""The clock with batches in flight, by hand: when tokens come, when clients are let go, what is told of it."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from fractions import Fraction

import pytest

from kvplan.core.cost import constant
from kvplan.core.drafts import Drafting
from kvplan.core.engine import GroupSpec, SchedulerConfig
from kvplan.core.engines.vllm_plain import VllmPlain
from kvplan.core.metrics import GroupBlocks, Metrics, RequestRecord
from kvplan.core.request import Request
from kvplan.core.simulate import Outcome, Price, StepRecord, run
from kvplan.output import EventWriter

CONFIG = SchedulerConfig(33, 4, 16, 4, 64)


def play(
    config: SchedulerConfig,
    requests: list[Request],
    price: Price | tuple[Price, ...],
    *,
    numbered: bool = False,
) -> tuple[Outcome, list[StepRecord], dict[str, RequestRecord], Metrics]:
    records: list[StepRecord] = []
    ended: list[RequestRecord] = []
    metrics = Metrics(
        num_gpu_blocks=config.num_gpu_blocks,
        block_size=config.block_size,
        cache=config,
        prefix_caching=config.enable_prefix_caching,
        seconds_per_tick=Fraction(1),
        on_request=ended.append,
    )
    outcome = run(requests, VllmPlain(config), price, metrics, step_numbered=numbered, observe=records.append)
    return outcome, records, {record.request.id: record for record in ended}, metrics


def spans(records: list[StepRecord]) -> list[tuple[int, int, int | None]]:
    """Start and end of each call, and the call that planned the batch processed in it."""
    return [(record.start, record.end, record.out) for record in records]


def test_asynchronous_planning_overlaps_with_the_batch_before() -> None:
    config = replace(CONFIG, async_scheduling=True)
    _, records, ended, _ = play(config, [Request("a", 0, 4, 3)], constant(10))
    # Planned in calls 0, 1 and 2; the last token is in flight in call 3; 4 tells of the end, 5 empties the queue.
    assert spans(records) == [(0, 0, None), (0, 10, 0), (10, 20, 1), (20, 30, 2), (30, 30, 3), (30, 30, 4)]
    assert [record.depth for record in records] == [1, 1, 1, 1, 1, 0]
    assert (ended["a"].first_token, ended["a"].finished) == (10, 30)


def test_a_batch_starts_when_the_one_before_has_ended() -> None:
    config = replace(CONFIG, async_scheduling=True)
    requests = [Request("a", 0, 4, 3), Request("b", 5, 8, 1)]
    _, _, ended, _ = play(config, requests, lambda work: 10 + sum(count for _, count in work.chunks))
    # The prompt of a takes 14 ticks; b came while it ran, after the next batch was planned: its prompt is in the
    # batch that is planned at 14, starts at 24 and takes 18.
    assert ended["a"].first_token == 14
    assert ended["b"].admitted == 14
    assert ended["b"].first_token == 42


def test_stages_work_on_different_batches_at_once() -> None:
    config = replace(CONFIG, pipeline_parallel_size=2, max_num_batched_tokens=4)
    requests = [Request("a", 0, 4, 2), Request("b", 0, 4, 1)]
    _, records, ended, _ = play(config, requests, (constant(10), constant(10)))
    # a: stages at 0 and 10; b: at 10 and 20; the second token of a: at 20 (planned when the first is out) and 30.
    assert ended["a"].first_token == 20
    assert ended["b"].finished == 30
    assert ended["a"].finished == 40
    assert spans(records)[:2] == [(0, 0, None), (0, 20, 0)]


def test_a_slow_stage_sets_the_pace() -> None:
    config = replace(CONFIG, pipeline_parallel_size=2, max_num_batched_tokens=4)
    requests = [Request(name, 0, 4, 1) for name in "abc"]
    _, _, ended, _ = play(config, requests, (constant(3), constant(10)))
    assert [ended[name].finished for name in "abc"] == [13, 23, 33]


@pytest.mark.parametrize(("queue", "token"), [(False, None), (True, None)])
def test_a_client_that_goes_while_the_engine_waits_gets_no_token(queue: bool, token: int | None) -> None:
    config = replace(CONFIG, async_scheduling=queue)
    _, records, ended, metrics = play(config, [Request("a", 0, 4, 3, abort=5)], constant(10))
    assert ended["a"].first_token is token
    assert (ended["a"].aborted, ended["a"].finished) == (10, None)
    assert [record.aborted for record in records if record.aborted] == [["a"]]
    counts = metrics.request_counts()
    assert (counts.aborted, counts.unfinished, counts.finished) == (1, 0, 0)


def test_a_client_that_goes_as_a_step_ends_has_its_token() -> None:
    _, records, ended, _ = play(CONFIG, [Request("a", 0, 4, 3, abort=10)], constant(10))
    assert (ended["a"].first_token, ended["a"].aborted, ended["a"].output_tokens) == (10, 10, 1)
    # No step ran for it.
    assert [(r.turn is None, r.aborted, r.free_blocks) for r in records[1:]] == [(True, ["a"], 32)]


def test_a_client_that_goes_after_the_end_changes_nothing() -> None:
    outcome, _, ended, metrics = play(CONFIG, [Request("a", 0, 4, 1, abort=99)], constant(10))
    assert outcome.status == "done"
    assert (ended["a"].finished, ended["a"].aborted, metrics.request_counts().aborted) == (10, None, 0)


def test_with_nothing_that_can_move_the_clock_waits_for_an_abort() -> None:
    # Eight blocks hold 32 tokens, so a prompt of 40 waits for ever, and the one behind it too, until it is aborted.
    config = replace(CONFIG, num_gpu_blocks=9, async_scheduling=True)
    requests = [Request("a", 0, 40, 3, abort=70), Request("b", 1, 4, 1)]
    outcome, records, ended, _ = play(config, requests, constant(10))
    assert outcome.status == "done"
    assert (ended["a"].aborted, ended["b"].admitted, ended["b"].finished) == (70, 70, 80)
    assert max(record.end - record.start for record in records) <= 70


def test_tokens_of_one_step_come_at_once() -> None:
    config = replace(CONFIG, speculative=Drafting("ngram", 2, 1.0))
    _, _, ended, metrics = play(config, [Request("a", 0, 4, 5)], constant(10))
    # One from the prompt, then three a step, of which the last step needs one.
    assert (ended["a"].first_token, ended["a"].finished, ended["a"].output_tokens) == (10, 30, 5)
    figures = metrics.draft_figures()
    assert (figures.accepted, figures.rejected) == (4, 0)
    gaps = metrics.latency({}).itl_s
    assert (gaps.count, gaps.mean, gaps.max) == (4, 5.0, 10.0)


def test_blocks_of_groups_and_tokens_behind_the_window() -> None:
    groups = (GroupSpec("sliding", window=4), GroupSpec())
    config = replace(CONFIG, groups=groups, enable_prefix_caching=False)
    _, _, _, metrics = play(config, [Request("a", 0, 8, 3)], constant(10))
    figures = metrics.kv_figures()
    # Steps compute 8, 1 and 1 tokens. Of the window's group: blocks 0 and 1; then from 5 on, so block 0 is freed and
    # 2 is taken; the third step reads from 6 on, so of block 1 the first token, then the first two are behind it.
    assert figures.groups == (
        GroupBlocks("sliding", 4, 2.0, 2),
        GroupBlocks("full", 4, (2 + 3 + 3) / 3, 3),
    )
    held = 4 * (4 + 5 + 5)
    assert figures.behind_window_share == (0 + 1 + 2) / held
    assert figures.token_share == (16 + (4 - 1 + 1 + 9) + (4 - 2 + 2 + 10)) / held


def test_events_of_calls_say_what_was_planned_and_what_came_out() -> None:
    config = replace(CONFIG, async_scheduling=True)
    _, records, _, _ = play(config, [Request("a", 0, 4, 2)], constant(1), numbered=True)
    file = io.StringIO()
    writer = EventWriter(file, None, detail=True, has_queue=True)
    for record in records:
        writer(record)
    lines = [json.loads(line) for line in file.getvalue().splitlines()]
    assert lines[1] == {
        "step": 1,
        "time_s": None,
        "scheduled": [["a", 1]],
        "emitted": [["a", 1]],
        "free_blocks": 30,
        "free_blocks_end": 30,
        "running": 1,
        "waiting": 0,
        "blocks": {"a": [2]},
        "out": 0,
        "depth": 1,
    }
    assert lines[-1] == {"step": 4, "time_s": None, "free_blocks_end": 32, "out": 3, "depth": 0}


class TestDrafting:
    def test_each_draft_is_right_with_the_chance_that_all_before_it_are(self) -> None:
        drafting = Drafting("eagle", 3, 0.5, seed=1)
        found = [drafting.accepted("a", outputs, 3) for outputs in range(4000)]
        shares = [sum(count >= least for count in found) / len(found) for least in (1, 2, 3)]
        assert shares == pytest.approx([0.5, 0.25, 0.125], abs=0.03)

    @pytest.mark.parametrize(("rate", "expected"), [(0.0, 0), (1.0, 3)])
    def test_none_or_all(self, rate: float, expected: int) -> None:
        drafting = Drafting("eagle", 3, rate)
        assert {drafting.accepted("a", outputs, 3) for outputs in range(50)} == {expected}

    def test_another_seed_draws_others(self) -> None:
        found = [[Drafting("eagle", 4, 0.6, seed).accepted("a", i, 4) for i in range(50)] for seed in (0, 1)]
        assert found[0] != found[1]

    def test_a_drafter_with_a_rate_always_proposes_all(self) -> None:
        assert {Drafting("ngram", 4, 0.6).proposed("a", i) for i in range(50)} == {4}
        assert {Drafting("ngram", 4).proposed("a", i) for i in range(50)} == set(range(5))
