"""The scheduler's rules one by one, each on a case small enough to follow by hand.

Block size is 2 unless said: a request with a prompt of n tokens has its blocks' tokens 0-1, 2-3 and so on.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count

import pytest

from kvplan.core.cost import constant
from kvplan.core.drafts import Drafting
from kvplan.core.engine import GroupSpec, SchedulerConfig, Sequence
from kvplan.core.engine import Turn as AnyTurn
from kvplan.core.engines.plain_groups import PlainSequence
from kvplan.core.engines.vllm_plain import VllmPlain
from kvplan.core.metrics import Metrics
from kvplan.core.request import Request, Segment
from kvplan.core.simulate import Outcome, StepRecord, run
from kvplan.errors import DoesNotFit, InputError

Turn = AnyTurn[PlainSequence]


def config(**changes: object) -> SchedulerConfig:
    """Room for everything: 20 usable blocks of 2, 40 tokens a step, 8 sequences of at most 30 tokens."""
    settings: dict[str, object] = {
        "num_gpu_blocks": 21,
        "block_size": 2,
        "max_num_batched_tokens": 40,
        "max_num_seqs": 8,
        "max_model_len": 30,
    }
    return SchedulerConfig(**(settings | changes))  # type: ignore[arg-type]


def engine(*requests: Request, **changes: object) -> VllmPlain:
    made = VllmPlain(config(**changes))
    for request in requests:
        made.add(request)
    return made


def ask(
    name: str,
    prompt: int,
    output: int = 9,
    *,
    priority: int = 0,
    content: tuple[tuple[str, int, int], ...] = (),
) -> Request:
    return Request(name, 0, prompt, output, priority, tuple(Segment(*s) for s in content))


def shares(name: str, prompt: int, output: int = 9, *, common: int) -> Request:
    """A prompt whose first tokens are those of every other prompt made here."""
    return ask(name, prompt, output, content=(("s", 0, common), (f"p:{name}", 0, prompt - common)))


def scheduled(turn: Turn) -> list[tuple[str, int]]:
    return [(s.id, tokens) for s, tokens in turn.scheduled]


def ids(sequences: Iterable[Sequence]) -> list[str]:
    return [s.id for s in sequences]


def hits(turn: Turn) -> dict[str, int]:
    return {s.id: tokens for s, tokens in turn.prefix_hits}


def blocks(turn: Turn) -> dict[str, list[int]]:
    return {s.id: new for s, new in turn.new_blocks.items()}


# Budget and order


def test_a_prompt_is_computed_then_one_token_a_step_until_it_has_its_output() -> None:
    made = engine(ask("a", 5, 3))
    turns = [made.turn(), made.turn(), made.turn()]
    assert [scheduled(t) for t in turns] == [[("a", 5)], [("a", 1)], [("a", 1)]]
    assert [ids(t.sampled) for t in turns] == [["a"]] * 3
    assert [ids(t.finished) for t in turns] == [[], [], ["a"]]
    assert made.is_idle


def test_a_request_for_one_token_ends_in_the_step_of_its_prompt() -> None:
    turn = engine(ask("a", 5, 1)).turn()
    assert (ids(turn.admitted), ids(turn.finished)) == (["a"], ["a"])


def test_what_the_budget_does_not_reach_goes_on_in_the_next_step() -> None:
    made = engine(ask("a", 6), ask("b", 6), max_num_batched_tokens=8)
    first, second = made.turn(), made.turn()
    assert scheduled(first) == [("a", 6), ("b", 2)]
    assert ids(first.sampled) == ["a"]  # b's prompt is not done
    # a decodes first, then b has the rest of its prompt.
    assert scheduled(second) == [("a", 1), ("b", 4)]


def test_running_sequences_beyond_the_budget_stay_in_place_without_tokens() -> None:
    made = engine(ask("a", 4), ask("b", 2), max_num_batched_tokens=6, max_num_seqs=2)
    made.turn()
    made.add(ask("c", 9))
    made.config = config(max_num_batched_tokens=1, max_num_seqs=2)
    turn = made.turn()
    assert scheduled(turn) == [("a", 1)]
    assert (turn.running, turn.waiting) == (2, 1)


def test_a_turn_may_not_be_asked_for_no_step() -> None:
    with pytest.raises(AssertionError):
        engine(ask("a", 4)).turn(0)


# Prefill caps


def test_a_long_prompt_beside_others_is_capped_and_a_decode_is_not() -> None:
    made = engine(ask("a", 1), ask("b", 9), long_prefill_token_threshold=3)
    assert [scheduled(made.turn()) for _ in range(3)] == [
        [("a", 1), ("b", 3)],
        [("a", 1), ("b", 3)],
        [("a", 1), ("b", 3)],
    ]


def test_a_lone_request_is_never_capped() -> None:
    assert scheduled(engine(ask("a", 9), long_prefill_token_threshold=3).turn()) == [("a", 9)]


def test_a_request_left_alone_is_no_longer_capped() -> None:
    made = engine(ask("a", 1, 1), ask("b", 9), long_prefill_token_threshold=3)
    # In step 0 there are two, so b is capped; a ends in it.
    assert [scheduled(made.turn()), scheduled(made.turn())] == [[("a", 1), ("b", 3)], [("b", 6)]]


def test_a_prompt_as_long_as_the_cap_is_not_cut() -> None:
    made = engine(ask("a", 3), ask("b", 3), long_prefill_token_threshold=3)
    assert scheduled(made.turn()) == [("a", 3), ("b", 3)]


def test_an_adaptive_cap_grows_to_an_even_share_of_the_budget() -> None:
    # 40 tokens // 2 requests = 20 > 3.
    adaptive = {"long_prefill_token_threshold": 3, "long_prefill_token_threshold_adaptive": True}
    made = engine(ask("a", 25), ask("b", 25), num_gpu_blocks=41, **adaptive)
    assert scheduled(made.turn()) == [("a", 20), ("b", 20)]
    # 8 // 4 = 2 < 3: the threshold stays.
    four = [ask(name, 9) for name in "abcd"]
    turn = engine(*four, max_num_batched_tokens=8, max_num_seqs=4, **adaptive).turn()
    assert scheduled(turn) == [("a", 3), ("b", 3), ("c", 2)]


# Admission


def test_without_chunking_a_prompt_beyond_the_budget_stops_the_queue() -> None:
    made = engine(ask("a", 20), ask("b", 15), ask("c", 1), max_num_batched_tokens=30)
    made.config = config(max_num_batched_tokens=30, enable_chunked_prefill=False)
    # b needs 15 of the 10 left; c would fit but is behind it.
    assert scheduled(made.turn()) == [("a", 20)]
    assert scheduled(made.turn()) == [("a", 1), ("b", 15), ("c", 1)]


def test_without_chunking_a_capped_prompt_still_runs_in_chunks() -> None:
    made = engine(
        ask("a", 20),
        ask("b", 20),
        max_num_batched_tokens=30,
        enable_chunked_prefill=False,
        long_prefill_token_threshold=12,
    )
    assert scheduled(made.turn()) == [("a", 12), ("b", 12)]
    assert scheduled(made.turn()) == [("a", 8), ("b", 8)]


def test_no_more_sequences_run_than_may() -> None:
    made = engine(*[ask(name, 1, 2) for name in "abc"], max_num_seqs=2)
    assert ids(made.turn().admitted) == ["a", "b"]
    assert ids(made.turn().admitted) == []
    assert ids(made.turn().admitted) == ["c"]


def test_the_limit_of_active_sequences_holds_where_it_is_set() -> None:
    made = engine(*[ask(name, 1) for name in "abc"], max_num_active_seqs=1)
    assert ids(made.turn().admitted) == ["a"]


def test_the_queue_is_not_searched_for_a_smaller_request() -> None:
    # 5 usable blocks: a takes 3, b needs 3 of the 2 left, c would need 1.
    made = engine(ask("a", 6), ask("b", 6), ask("c", 2), num_gpu_blocks=6, max_model_len=10)
    turn = made.turn()
    assert scheduled(turn) == [("a", 6)]
    assert turn.waiting == 2


def test_a_prompt_that_does_not_fit_whole_is_not_begun() -> None:
    # 3 blocks are left beside a. b's prompt of 8 needs 4, its first chunk of 4 only 2.
    settings: dict[str, object] = {"num_gpu_blocks": 6, "max_num_batched_tokens": 8, "max_model_len": 10}
    careful = engine(ask("a", 4), ask("b", 8), **settings)
    assert scheduled(careful.turn()) == [("a", 4)]
    careless = engine(ask("a", 4), ask("b", 8), scheduler_reserve_full_isl=False, **settings)
    assert scheduled(careless.turn()) == [("a", 4), ("b", 4)]


def test_the_first_chunk_must_fit_even_if_the_full_prompt_is_not_reserved() -> None:
    made = engine(ask("a", 8), ask("b", 8), scheduler_reserve_full_isl=False, num_gpu_blocks=6)
    assert scheduled(made.turn()) == [("a", 8)]


def test_the_full_check_reserves_nothing_so_two_long_prompts_can_pass_it() -> None:
    # 6 usable blocks; each prompt of 8 needs 4 in all, its first chunk of 4 or 3 needs 2.
    made = engine(ask("a", 8), ask("b", 8), num_gpu_blocks=7, max_num_batched_tokens=8, max_model_len=12)
    made.config = config(
        num_gpu_blocks=7, max_num_batched_tokens=8, max_model_len=12, long_prefill_token_threshold=4
    )
    assert scheduled(made.turn()) == [("a", 4), ("b", 4)]
    second = made.turn()
    assert scheduled(second) == [("a", 4)]
    assert ids(second.preempted) == ["b"]


def test_the_watermark_is_kept_free_while_others_run() -> None:
    # int(0.2 x 11) = 2 of 10 usable blocks. a takes 4 of 10; b needs 5: 5 + 2 > 6, without watermark 5 <= 6.
    settings: dict[str, object] = {"num_gpu_blocks": 11, "max_model_len": 20}
    assert scheduled(engine(ask("a", 8), ask("b", 10), watermark=0.2, **settings).turn()) == [("a", 8)]
    assert len(engine(ask("a", 8), ask("b", 10), **settings).turn().scheduled) == 2


def test_the_watermark_does_not_hold_for_the_first_to_run() -> None:
    # All 10 blocks, though 2 should stay free.
    made = engine(ask("a", 20), watermark=0.2, num_gpu_blocks=11, max_model_len=21)
    assert scheduled(made.turn()) == [("a", 20)]


def test_the_watermark_does_not_hold_for_those_that_run_already() -> None:
    made = engine(ask("a", 2), watermark=0.9, num_gpu_blocks=3, max_model_len=4)
    made.turn()
    turn = made.turn()  # takes the last block
    assert (scheduled(turn), turn.free_blocks) == ([("a", 1)], 0)


def test_the_watermark_counts_for_the_first_chunk_too() -> None:
    # int(0.5 x 7) = 3; a takes 2 of 6, b's chunk needs 2: 2 + 3 > 4.
    settings: dict[str, object] = {"num_gpu_blocks": 7, "max_model_len": 12}
    made = engine(ask("a", 4), ask("b", 4), watermark=0.5, scheduler_reserve_full_isl=False, **settings)
    assert scheduled(made.turn()) == [("a", 4)]


# Preemption


def test_the_last_that_came_is_preempted_and_nobody_is_admitted_in_that_step() -> None:
    # 3 usable blocks. Step 0: a and b take one each, c waits for the place of a third sequence.
    made = engine(ask("a", 2), ask("b", 2), ask("c", 1), num_gpu_blocks=4, max_num_seqs=2, max_model_len=6)
    assert scheduled(made.turn()) == [("a", 2), ("b", 2)]
    # a's third token takes the last block; b finds none and preempts itself. One block is free again, c would
    # fit and a place is free, but in a step with a preemption nobody is admitted.
    turn = made.turn()
    assert (scheduled(turn), ids(turn.preempted), ids(turn.admitted)) == ([("a", 1)], ["b"], [])
    assert (turn.free_blocks, turn.running, turn.waiting) == (1, 1, 2)
    assert ids(made.waiting) == ["b", "c"]  # at the front


def test_several_victims_come_back_in_the_order_in_which_they_ran() -> None:
    # 4 usable blocks, one each after step 0.
    settings: dict[str, object] = {
        "num_gpu_blocks": 5,
        "max_model_len": 8,
        "max_num_batched_tokens": 8,
        "scheduler_reserve_full_isl": False,
    }
    made = engine(ask("a", 6), *[ask(name, 2) for name in "bcd"], long_prefill_token_threshold=2, **settings)
    assert scheduled(made.turn()) == [("a", 2), ("b", 2), ("c", 2), ("d", 2)]
    # Without the cap a's other 4 tokens need 2 blocks: d and c go. Then b's third token needs one: b goes.
    made.config = config(**settings)
    turn = made.turn()
    assert (scheduled(turn), ids(turn.preempted)) == ([("a", 4)], ["d", "c", "b"])
    assert ids(made.waiting) == ["b", "c", "d"]
    assert (turn.running, turn.free_blocks) == (1, 1)


def test_a_resumed_sequence_computes_its_outputs_again_too() -> None:
    # 3 usable blocks. a: prompt 2, 3 outputs; b: prompt 2. No caching, so nothing is found.
    made = engine(
        ask("a", 2, 3), ask("b", 2, 3), num_gpu_blocks=4, max_model_len=6, enable_prefix_caching=False
    )
    turns = [made.turn() for _ in range(4)]
    # Step 1: a grows to 2 blocks, b (prompt and one output) finds none. Step 2: b needs 2, 1 is free; a ends.
    assert [ids(t.preempted) for t in turns] == [[], ["b"], [], []]
    assert (ids(turns[3].resumed), scheduled(turns[3])) == (["b"], [("b", 3)])
    # Its two prompt tokens were computed before, the output never was.
    assert turns[3].recomputed_tokens == 2


def test_a_resumed_sequence_finds_its_own_blocks() -> None:
    made = engine(ask("a", 2, 3), ask("b", 2, 3), num_gpu_blocks=4, max_model_len=6)
    turns = [made.turn() for _ in range(4)]
    assert (hits(turns[3]), scheduled(turns[3])) == ({"b": 2}, [("b", 1)])
    assert turns[3].recomputed_tokens == 0


def test_by_priority_the_least_urgent_is_preempted_wherever_it_stands() -> None:
    # 3 blocks; lower goes first. low is admitted first (alone), then high beside it.
    made = engine(ask("low", 2, priority=5), num_gpu_blocks=4, max_model_len=6, policy="priority")
    made.turn()
    made.add(ask("high", 2, priority=1))
    made.add(ask("late", 1, priority=3))
    second = made.turn()
    # low takes its second block, high the third; late has no room.
    assert scheduled(second) == [("low", 1), ("high", 2)]
    third = made.turn()
    # low was scheduled in this step (its 4th token fits its 2 blocks), then high needs a block: low goes, and its
    # token goes back. Nobody is admitted, though there is room.
    assert (scheduled(third), ids(third.preempted)) == ([("high", 1)], ["low"])
    assert (third.scheduled_tokens, third.running, third.waiting) == (1, 1, 2)
    assert ids(made.waiting) == ["late", "low"]


def test_a_victim_that_was_scheduled_gives_its_tokens_back() -> None:
    # 5 usable blocks. After two steps low has 2 blocks with 3 tokens, high 1 with 2 and mid 2 with 3 of its 8.
    settings: dict[str, object] = {
        "num_gpu_blocks": 6,
        "max_model_len": 10,
        "policy": "priority",
        "scheduler_reserve_full_isl": False,
    }
    made = engine(ask("low", 2, priority=5), long_prefill_token_threshold=3, **settings)
    made.turn()
    made.add(ask("high", 2, priority=1))
    made.add(ask("mid", 8, priority=2))
    assert scheduled(made.turn()) == [("low", 1), ("high", 2), ("mid", 3)]
    made.config = config(max_num_batched_tokens=3, max_num_seqs=3, **settings)
    turn = made.turn()
    # Of 3 tokens low gets 1, high's needs a block: low is undone, 3 are left. high 1, mid 2.
    assert ids(turn.preempted) == ["low"]
    assert scheduled(turn) == [("high", 1), ("mid", 2)]
    assert "low" not in blocks(turn)


def test_by_priority_those_behind_one_that_preempts_itself_go_on() -> None:
    # 4 usable blocks: low has 2 with 4 tokens, high 1 with 2, mid 1 with 1.
    made = engine(ask("low", 3, priority=9), num_gpu_blocks=5, max_model_len=8, policy="priority")
    made.turn()
    made.add(ask("high", 2, priority=0))
    made.add(ask("mid", 1, priority=1))
    assert scheduled(made.turn()) == [("low", 1), ("high", 2), ("mid", 1)]
    turn = made.turn()
    # low's 5th token has no block and low is the least urgent. high then takes a block, mid has room.
    assert (ids(turn.preempted), scheduled(turn)) == (["low"], [("high", 1), ("mid", 1)])


def test_of_equal_priorities_the_one_that_came_last_is_preempted() -> None:
    made = engine(ask("a", 2), ask("b", 2), num_gpu_blocks=4, max_model_len=6, policy="priority")
    made.turn()
    turn = made.turn()
    assert (scheduled(turn), ids(turn.preempted)) == ([("a", 1)], ["b"])


def test_the_step_in_which_the_last_sequence_preempts_itself_plans_nothing_but_is_not_dead() -> None:
    # 2 usable blocks: the 5th token has no room, and never will.
    made = engine(ask("a", 4), num_gpu_blocks=3)
    made.turn()
    second, third = made.turn(), made.turn()
    assert (scheduled(second), ids(second.preempted), second.is_dead) == ([], ["a"], False)
    assert (third.is_dead, third.waiting) == (True, 1)


# Queues


def test_by_priority_the_most_urgent_is_admitted_first_and_ties_by_arrival() -> None:
    requests = [
        ask("a", 1, priority=2),
        ask("b", 1, priority=1),
        ask("c", 1, priority=2),
        ask("d", 1, priority=1),
    ]
    assert ids(engine(*requests, policy="priority").turn().admitted) == ["b", "d", "a", "c"]


def test_first_come_first_served_ignores_the_priority() -> None:
    requests = [ask("a", 1, priority=2), ask("b", 1, priority=1)]
    assert ids(engine(*requests).turn().admitted) == ["a", "b"]


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        (0, "empty_prompt"),
        (1, None),
        (29, None),
        (30, "prompt_reaches_max_model_len"),
        (31, "prompt_reaches_max_model_len"),
    ],
)
def test_a_prompt_that_is_empty_or_reaches_the_longest_length_is_turned_away(
    prompt: int, reason: str | None
) -> None:
    assert engine().refusal(ask("a", prompt)) == reason


def test_a_sequence_stops_at_the_longest_length_short_of_its_output() -> None:
    made = engine(ask("a", 27, 9))
    turns = [made.turn() for _ in range(3)]
    # 27 + 3 sampled = 30.
    assert [ids(t.finished) for t in turns] == [[], [], ["a"]]
    assert made.is_idle


# Blocks and the prefix cache


def test_blocks_come_as_tokens_need_them() -> None:
    made = engine(ask("a", 3, 4))
    # 3 tokens: blocks 1, 2; the 4th fits; the 5th takes block 3; the 6th fits.
    assert [blocks(made.turn()) for _ in range(4)] == [{"a": [1, 2]}, {}, {"a": [3]}, {}]


def test_a_hit_never_covers_the_whole_prompt() -> None:
    # Prompts of 4 are two full blocks; (4 - 1) // 2 = 1 of them may be hit. One of 5: both.
    made = engine(shares("a", 4, common=4))
    made.turn()
    made.add(shares("b", 4, common=4))
    made.add(shares("c", 5, common=4))
    turn = made.turn()
    assert hits(turn) == {"b": 2, "c": 4}
    assert scheduled(turn)[1:] == [("b", 2), ("c", 1)]
    assert blocks(turn)["c"][:2] == [1, 2]


def test_only_whole_blocks_are_hit() -> None:
    made = engine(shares("a", 8, common=5), shares("b", 8, common=5))
    assert hits(made.turn()) == {"a": 0, "b": 4}


def test_a_block_is_found_in_the_very_step_that_gives_it_out() -> None:
    turn = engine(shares("a", 7, common=6), shares("b", 7, common=6)).turn()
    assert hits(turn) == {"a": 0, "b": 6}
    assert turn.shared_blocks == 3
    assert scheduled(turn) == [("a", 7), ("b", 1)]


def test_only_what_the_first_chunk_has_reached_is_found() -> None:
    made = engine(shares("a", 8, common=8), shares("b", 9, common=8), long_prefill_token_threshold=5)
    # a computes 5 of 8: two full blocks of 2.
    assert hits(made.turn()) == {"a": 0, "b": 4}


def test_a_block_that_outputs_fill_is_found_once_its_last_token_is_computed() -> None:
    # a: prompt 3, outputs o0, o1, o2. Its second block holds prompt token 2 and o0.
    made = engine(ask("a", 3, 6))
    follow_up = (("p:a", 0, 3), ("o:a", 0, 3), ("p:b", 0, 1))
    made.turn()  # computes the prompt, samples o0, which fills the block but is not computed
    assert made.pool.index.keys() == {made.pool.hashes[1]}
    made.add(ask("b", 7, content=follow_up))
    turn = made.turn()  # a computes o0 before b is looked at
    assert hits(turn) == {"b": 4}


def test_the_block_that_the_last_token_fills_is_not_cached() -> None:
    made = engine(ask("a", 3, 1))
    made.turn()  # 3 computed, the 4th sampled
    assert [made.pool.hashes[1] is None, made.pool.hashes[2] is None] == [False, True]


def test_a_finished_sequence_leaves_blank_blocks_at_the_head_and_cached_ones_at_the_tail() -> None:
    made = engine(ask("a", 5, 1), num_gpu_blocks=6, max_model_len=8)
    turn = made.turn()
    assert (turn.free_blocks, turn.free_blocks_end) == (2, 5)
    # Blocks 1, 2, 3: 3 is half full; of the cached ones the end of the prefix goes first.
    assert list(made.pool.free_queue()) == [3, 4, 5, 2, 1]


def test_those_that_finish_together_are_freed_in_the_order_in_which_they_were_scheduled() -> None:
    made = engine(ask("a", 2, 1), ask("b", 2, 1), num_gpu_blocks=4, max_model_len=6)
    made.turn()
    assert list(made.pool.free_queue()) == [3, 1, 2]


def test_without_caching_every_block_is_blank_and_nothing_is_found() -> None:
    made = engine(shares("a", 4, 1, common=4), num_gpu_blocks=6, max_model_len=8, enable_prefix_caching=False)
    made.turn()
    assert list(made.pool.free_queue()) == [2, 1, 3, 4, 5]
    made.add(shares("b", 5, common=4))
    assert hits(made.turn()) == {"b": 0}


def test_idle_hit_blocks_count_as_needed() -> None:
    # 4 usable blocks. a leaves 2 cached ones. c takes the 2 blank ones and stays. b shares a's 4 tokens and has 5:
    # 1 new block and 2 idle ones, 3 in all; but only those 2 are free.
    made = engine(shares("a", 5, 1, common=4), num_gpu_blocks=5, max_model_len=8)
    made.turn()
    made.add(ask("c", 3))
    assert blocks(made.turn()) == {"c": [3, 4]}
    made.add(shares("b", 5, common=4))
    turn = made.turn()
    assert (turn.admitted, turn.waiting, turn.free_blocks) == ([], 1, 2)
    assert list(made.pool.free_queue()) == [2, 1]  # untouched


def test_idle_hit_blocks_count_in_the_first_chunk_too() -> None:
    made = engine(
        shares("a", 5, 1, common=4), num_gpu_blocks=5, max_model_len=8, scheduler_reserve_full_isl=False
    )
    made.turn()
    made.add(ask("c", 3))
    made.turn()
    made.add(shares("b", 5, common=4))
    assert made.turn().admitted == []


def test_hit_blocks_in_use_cost_nothing() -> None:
    # 4 usable blocks: a uses 3. b shares the first two and needs one: exactly what is left.
    made = engine(shares("a", 5, common=4), shares("b", 5, common=4), num_gpu_blocks=5, max_model_len=8)
    turn = made.turn()
    assert (hits(turn), turn.free_blocks, turn.shared_blocks) == ({"a": 0, "b": 4}, 0, 2)


def test_a_hit_takes_idle_blocks_out_of_the_queue_before_new_ones_are_taken() -> None:
    # 3 usable blocks: a leaves [3, 2, 1] with 2 and 1 cached. b takes over both and then block 3: no eviction.
    made = engine(shares("a", 5, 1, common=4), num_gpu_blocks=4, max_model_len=6)
    made.turn()
    made.add(shares("b", 5, common=4))
    turn = made.turn()
    assert (blocks(turn), turn.evicted_blocks) == ({"b": [1, 2, 3]}, [])


def test_equal_blocks_are_both_kept_and_the_older_is_found() -> None:
    # b computes its last block although a has an equal one: nothing is merged.
    made = engine(shares("a", 4, common=4), shares("b", 4, common=4), shares("c", 5, common=4))
    turn = made.turn()
    assert blocks(turn) == {"a": [1, 2], "b": [1, 3], "c": [1, 2, 4]}
    assert sorted(len(b) for b in made.pool.index.values()) == [1, 2]


def test_evicted_content_is_not_found_and_evictions_are_told() -> None:
    made = engine(shares("a", 5, 1, common=4), num_gpu_blocks=4, max_model_len=6)
    made.turn()
    made.add(ask("b", 3, 1))  # takes 3, then 2, which is cached
    assert made.turn().evicted_blocks == [2]
    made.add(shares("c", 5, 1, common=4))
    assert hits(made.turn()) == {"c": 2}


def test_slots_without_kv_are_counted_and_those_to_be_filled_apart() -> None:
    # Block size 4. a: prompt 5 + 2 outputs: 6 tokens of KV in the end. 8 slots, 3 empty, 1 of them to be filled.
    made = engine(ask("a", 5, 2), ask("b", 1, 9), block_size=4)
    turn = made.turn()
    # b: 1 of 4 slots, all 3 others to be filled (9 tokens of KV in the end).
    assert (turn.empty_slots, turn.reserved_slots) == (3 + 3, 1 + 3)


def test_the_work_of_a_step_parts_decodes_from_chunks() -> None:
    made = engine(ask("a", 4), ask("b", 9), max_num_batched_tokens=10)
    first, second = made.turn(), made.turn()
    assert (first.work.decodes, first.work.chunks) == (0, [(0, 4), (0, 6)])
    # a's 5th token attends to 5; b's rest of 3 comes after 6.
    assert (second.work.decodes, second.work.decode_context, second.work.chunks) == (1, 5, [(6, 3)])


def test_the_last_token_of_a_prompt_alone_is_a_chunk_and_no_decode() -> None:
    made = engine(ask("a", 4), max_num_batched_tokens=3, max_num_seqs=3)
    made.turn()
    assert made.turn().work.chunks == [(3, 1)]


# Runs that never end


def outcome_of(*requests: Request, limit: int = 500, **changes: object) -> tuple[Outcome, Metrics]:
    """A run that is cut off with an error if it takes far more steps than it can need."""
    settings = config(**changes)
    metrics = Metrics(
        num_gpu_blocks=settings.num_gpu_blocks,
        block_size=settings.block_size,
        prefix_caching=settings.enable_prefix_caching,
        seconds_per_tick=None,
    )
    steps = count()

    def observe(_record: StepRecord) -> None:
        assert next(steps) < limit, "the run never ends"

    return run(
        requests, VllmPlain(settings), constant(1), metrics, step_numbered=True, observe=observe
    ), metrics


def test_a_prompt_that_can_never_fit_is_stuck_and_so_is_everybody_behind_it() -> None:
    outcome, metrics = outcome_of(ask("a\n", 5), ask("b", 1, 1), num_gpu_blocks=3)
    assert outcome.status == "stuck"
    assert outcome.reason == (
        r'request "a\n" can never be admitted: it needs 3 blocks for 5 tokens, the pool has 2 usable'
    )
    assert metrics.request_counts().unfinished == 2


def test_a_sequence_that_outgrows_the_pool_is_stuck() -> None:
    outcome, metrics = outcome_of(ask("a", 4), num_gpu_blocks=3)
    assert outcome.status == "stuck"
    # 4 + 9 tokens, of which the last is never computed: 12 in blocks of 2.
    assert outcome.reason == (
        'request "a" can never finish: it needs 6 blocks for 12 tokens, the pool has 2 usable; it outgrew them '
        "while alone and had to start over"
    )
    assert metrics.preemption_events == 1


def test_a_sequence_that_starts_over_again_and_again_is_stuck() -> None:
    # 2 usable blocks, a prompt of 5, two tokens a step: it is admitted, grows, preempts itself, starts over.
    outcome, metrics = outcome_of(
        ask("a", 5),
        num_gpu_blocks=3,
        max_num_batched_tokens=2,
        max_num_seqs=2,
        scheduler_reserve_full_isl=False,
        enable_prefix_caching=False,
    )
    assert outcome.status == "stuck"
    assert outcome.reason is not None
    assert outcome.reason.startswith('request "a" can never finish: it needs 7 blocks for 13 tokens')
    assert metrics.preemption_events >= 1


def test_without_chunks_a_prompt_longer_than_a_step_is_stuck() -> None:
    outcome, _ = outcome_of(
        ask("a", 9), enable_chunked_prefill=False, max_num_batched_tokens=8, max_num_seqs=8
    )
    assert outcome.reason == (
        'request "a" can never be admitted: without chunked prefill its 9 tokens need one step, which has 8'
    )


def test_a_long_name_is_cut_in_the_reason() -> None:
    outcome, _ = outcome_of(ask("a" * 1000, 5), num_gpu_blocks=3)
    assert outcome.reason is not None
    assert outcome.reason.startswith(f'request "{"a" * 57}..." can never')


def test_with_caching_one_that_starts_over_stops_at_its_own_idle_blocks() -> None:
    # It finds its first 4 tokens in both blocks; they are idle and count as needed, with one more: 3 > 2.
    outcome, metrics = outcome_of(
        ask("a", 5),
        num_gpu_blocks=3,
        max_num_batched_tokens=2,
        max_num_seqs=2,
        scheduler_reserve_full_isl=False,
    )
    assert (outcome.status, metrics.preemption_events) == ("stuck", 1)


def test_one_that_starts_over_while_another_never_gets_its_turn_is_stuck_too() -> None:
    """The first uses the whole budget of each step, so the second is never admitted."""
    outcome, metrics = outcome_of(
        ask("a", 5),
        ask("b", 1, 1),
        num_gpu_blocks=3,
        max_num_batched_tokens=2,
        max_num_seqs=2,
        scheduler_reserve_full_isl=False,
        enable_prefix_caching=False,
    )
    assert outcome.status == "stuck"
    assert metrics.request_counts().unfinished == 2


def test_one_that_starts_over_and_throws_another_out_each_time_is_stuck_too() -> None:
    """4 usable blocks. Both grow by a block a step; in step 2 the second goes, in step 4 the first gives up."""
    outcome, metrics = outcome_of(
        ask("a", 9),
        ask("b", 6, 1),
        num_gpu_blocks=5,
        max_num_batched_tokens=8,
        max_num_seqs=2,
        long_prefill_token_threshold=2,
        scheduler_reserve_full_isl=False,
        enable_prefix_caching=False,
    )
    assert outcome.status == "stuck"
    assert metrics.request_counts().unfinished == 2


def test_beside_one_that_starts_over_another_may_still_finish() -> None:
    """The second lacks a block at first, but runs while the first starts over."""
    outcome, metrics = outcome_of(
        ask("a", 9),
        ask("b", 1, 1),
        num_gpu_blocks=4,
        max_num_batched_tokens=3,
        max_num_seqs=2,
        long_prefill_token_threshold=2,
        scheduler_reserve_full_isl=False,
        enable_prefix_caching=False,
    )
    assert outcome.status == "stuck"
    assert (metrics.request_counts().finished, metrics.request_counts().unfinished) == (1, 1)


def test_one_that_outgrew_the_pool_alone_may_get_on_when_it_starts_over() -> None:
    """2 usable blocks of 4, a window of 5, 8 tokens a step.

    In the first step "b" gets what "a" leaves it, 4 tokens. Its next 8 need 2 blocks more while the first is still in
    reach: it starts over, alone with the budget. After 8 tokens the first block is out of reach and the last 4 fit.
    """
    outcome, metrics = outcome_of(
        ask("a", 4, 1),
        ask("b", 12, 3),
        num_gpu_blocks=3,
        block_size=4,
        max_num_batched_tokens=8,
        scheduler_reserve_full_isl=False,
        enable_prefix_caching=False,
        groups=(GroupSpec("sliding", window=5),),
    )
    assert outcome.status == "done"
    assert metrics.preemption_events == 1


def test_one_that_arrives_beside_one_that_starts_over_is_waited_for() -> None:
    """By then "a" has started over often; "b", which is better, has 3 steps to go."""
    late = Request("b", 40, 6, 1, -1)
    changes: dict[str, object] = {
        "num_gpu_blocks": 4,
        "max_num_batched_tokens": 2,
        "max_num_seqs": 2,
        "policy": "priority",
        "scheduler_reserve_full_isl": False,
        "enable_prefix_caching": False,
    }
    outcome, metrics = outcome_of(ask("a", 9), late, **changes)
    assert outcome.status == "stuck"
    assert metrics.request_counts().finished == 1
    assert metrics.preemption_events > 4


def test_drafts_for_which_there_is_never_room_are_named_as_such() -> None:
    """3 usable blocks hold 5 tokens, but its first step wants slots for 3 more."""
    outcome, _ = outcome_of(
        ask("a", 5, 1), num_gpu_blocks=4, speculative=Drafting("eagle", 3, acceptance_rate=1.0)
    )
    assert outcome.reason == (
        'request "a" can never be admitted: its first step does not fit into 3 usable blocks and 40 tokens'
    )


def test_one_that_outgrows_a_pool_that_could_hold_its_tokens_is_said_to_do_so() -> None:
    """3 usable blocks hold its 6 tokens, but not 3 drafts to be verified and slots for 3 more."""
    outcome, _ = outcome_of(
        ask("a", 2, 5), num_gpu_blocks=4, speculative=Drafting("eagle", 3, acceptance_rate=0.0)
    )
    assert outcome.reason == (
        'request "a" can never finish: alone it outgrew the pool\'s 3 usable blocks, and had to start over'
    )


# What the engine refuses to start with


def test_settings_that_agree_pass_the_check() -> None:
    config().check()
    config(max_num_batched_tokens=30, enable_chunked_prefill=False, max_num_active_seqs=8).check()


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"max_num_batched_tokens": 7}, "--max-num-batched-tokens"),
        ({"max_num_active_seqs": 9}, "max_num_active_seqs"),
        ({"long_prefill_token_threshold": 31}, "--long-prefill-token-threshold"),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 29}, "--no-enable-chunked-prefill"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(changes: dict[str, object], where: str) -> None:
    with pytest.raises(InputError) as error:
        config(**changes).check()
    assert error.value.where == where
    assert error.value.hint


def test_the_pool_must_hold_one_longest_sequence_beside_the_null_block() -> None:
    # 30 tokens in blocks of 2 are 15, and the null block: 16 start, 15 do not.
    config(num_gpu_blocks=16).check()
    with pytest.raises(DoesNotFit, match="15 blocks, the pool has 14 usable") as error:
        config(num_gpu_blocks=15).check()
    assert error.value.hint == "at most --max-model-len 28 fits"
