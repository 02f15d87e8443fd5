"""The engine of the paper by hand, step by step: blocks on demand, copies, swaps, turns in round-robin."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from kvplan.core.communication import Link
from kvplan.core.cost import LatencyModel, Settings, constant, constant_decode
from kvplan.core.engine import DecodeRun, Turn
from kvplan.core.engines.paged import Group, Paged, PagedConfig
from kvplan.core.metrics import Metrics
from kvplan.core.request import Request, Segment
from kvplan.core.simulate import StepRecord, run
from kvplan.core.step_constants import StepConstants
from kvplan.core.step_shape import GpuRates, StageShape
from kvplan.errors import InputError

ROOMY = PagedConfig(
    num_gpu_blocks=1000,
    block_size=4,
    max_num_batched_tokens=1000,
    max_num_seqs=100,
    max_model_len=1000,
    num_cpu_blocks=1000,
)


def request(
    name: str,
    tokens: int = 8,
    output: int = 4,
    *,
    at: int = 0,
    priority: int = 0,
    samples: int = 1,
    content: tuple[tuple[str, int, int], ...] = (),
) -> Request:
    segments = tuple(Segment(*segment) for segment in content)
    tokens = sum(segment.length for segment in segments) or tokens
    return Request(name, at, tokens, output, priority, segments, samples)


class Play:
    """Requests, which arrive at steps, through an engine that is watched: its turns, and figures in steps."""

    def __init__(self, *requests: Request, **changes: Any) -> None:
        self.config = replace(ROOMY, **changes)
        self.engine = Paged(self.config, watched=True)
        self.turns: list[Turn[Group]] = []
        self.records: dict[str, Any] = {}
        self.metrics = Metrics(
            num_gpu_blocks=self.config.num_gpu_blocks,
            usable_blocks=self.config.usable_blocks,
            block_size=self.config.block_size,
            prefix_caching=self.config.enable_prefix_caching,
            seconds_per_tick=Fraction(1),
            on_request=lambda record: self.records.update({record.request.id: record}),
        )

        def observe(record: StepRecord) -> None:
            if record.turn is not None:
                assert isinstance(record.turn, Turn)
                self.turns.append(record.turn)

        self.outcome = run(
            requests, self.engine, constant(1), self.metrics, step_numbered=True, observe=observe
        )
        assert self.outcome.status == "done"
        assert self.engine.memory.free == self.config.num_gpu_blocks
        assert self.engine.memory.cpu.free == self.config.num_cpu_blocks

    @property
    def scheduled(self) -> list[dict[str, int]]:
        """Tokens of each request, step by step."""
        return [{group.id: tokens for group, tokens in turn.scheduled} for turn in self.turns]

    @property
    def used(self) -> list[int]:
        """Blocks in use after each step's scheduling."""
        return [self.config.num_gpu_blocks - turn.free_blocks for turn in self.turns]

    def ids(self, what: str) -> list[list[str]]:
        """Who stands in a list of each step's turn."""
        return [[group.id for group in getattr(turn, what)] for turn in self.turns]


def start(*requests: Request, **changes: Any) -> Paged:
    """An engine with requests in its queue."""
    engine = Paged(replace(ROOMY, **changes))
    for one in requests:
        engine.add(one)
    return engine


# Blocks on demand


def test_blocks_are_taken_as_tokens_arrive_and_never_for_what_may_come() -> None:
    play = Play(request("a", 6, 400), request("b", 4, 6))
    # a has 6, 7, 8, 9 ... tokens with KV after each step: 2 blocks, then 3 from its fourth step on; b 4, 5, ... 9.
    assert play.used[:6] == [2 + 1, 2 + 2, 2 + 2, 3 + 2, 3 + 2, 3 + 3]
    assert max(play.used) == -(-405 // 4), "the last token is never computed"


def test_a_long_prompt_is_computed_in_chunks_beside_those_who_decode() -> None:
    play = Play(request("a", 4, 9), request("b", 20, 2, at=1), max_num_batched_tokens=9, max_num_seqs=9)
    assert play.scheduled[:5] == [
        {"a": 4},
        {"a": 1, "b": 8},
        {"a": 1, "b": 8},
        {"a": 1, "b": 4},
        {"a": 1, "b": 1},
    ]
    assert play.used[1] == 2 + 5, "a prompt has its blocks from the beginning"


def test_a_request_that_alone_outgrows_the_pool_is_refused_with_the_reason() -> None:
    engine = start(num_gpu_blocks=3, max_model_len=20, max_num_seqs=2)
    assert engine.refusal(request("a", 8, 5)) is None  # 12 tokens with KV: 3 blocks
    assert engine.refusal(request("a", 8, 6)) == "needs_more_blocks_than_the_pool"
    assert engine.refusal(request("a", 0, 1)) == "empty_prompt"
    assert engine.refusal(request("a", 20, 1)) == "prompt_reaches_max_model_len"
    # Two samples of a prompt of 6: one block in common, and two of each.
    assert engine.refusal(request("a", 6, 2, samples=2)) is None
    assert engine.refusal(request("a", 6, 4, samples=2)) == "needs_more_blocks_than_the_pool"
    assert engine.refusal(request("a", 6, 1, samples=3)) == "more_samples_than_max_num_seqs"


def test_a_step_must_hold_a_token_of_each_sequence() -> None:
    with pytest.raises(InputError, match="max_num_batched_tokens 99 is below max_num_seqs 100"):
        replace(ROOMY, max_num_batched_tokens=99).check()
    ROOMY.check()


# Prefixes


def test_ten_requests_that_share_2000_tokens_hold_them_once() -> None:
    """Llama 2 13B: 819,200 bytes a token, blocks of 16. 2,000 tokens are 125 blocks, 50 more 4 blocks of each."""
    prompts = [request(str(i), output=1, content=(("system", 0, 2000), (f"p:{i}", 0, 50))) for i in range(10)]
    shared = {
        "block_size": 16,
        "max_model_len": 4096,
        "num_gpu_blocks": 2000,
        "max_num_batched_tokens": 30000,
    }
    once, ten_times = Play(*prompts, **shared), Play(*prompts, enable_prefix_caching=False, **shared)
    assert (once.used[0], ten_times.used[0]) == (125 + 10 * 4, 10 * 129)
    token_bytes = 819_200
    assert 125 * 16 * token_bytes == 1_638_400_000
    saved = (ten_times.used[0] - once.used[0]) * 16 * token_bytes
    assert saved == 9 * 1_638_400_000  # 90 % of ten times the shared prompt
    assert once.turns[0].shared_blocks == 125
    assert once.metrics.prefix_cache_figures().hit_tokens == 9 * 2000
    assert once.turns[0].scheduled_tokens == 2050 + 9 * 50


def test_a_partly_filled_block_is_hit_and_copied() -> None:
    first = request("a", output=1, content=(("s", 0, 10),))
    second = request("b", output=1, content=(("s", 0, 10), ("b", 0, 5)), at=1)
    play = Play(first, second)
    assert play.ids("admitted") == [["a"], ["b"]]
    assert [tokens for _, tokens in play.turns[1].prefix_hits] == [10]
    assert play.scheduled[1] == {"b": 5}
    assert play.metrics.copied_blocks == 1


def test_without_room_for_a_tail_and_its_copy_the_tail_is_computed() -> None:
    first = request("a", output=1, content=(("s", 0, 6),))
    second = request("b", output=1, content=(("s", 0, 6), ("b", 0, 6)), at=1)
    play = Play(first, second, num_gpu_blocks=3)
    # Three blocks hold the second; a fourth would be the cached one beside its copy.
    assert [tokens for _, tokens in play.turns[1].prefix_hits] == [4]
    assert [tokens for _, tokens in Play(first, second, num_gpu_blocks=4).turns[1].prefix_hits] == [6]


def test_a_block_that_is_computed_in_this_step_can_be_shared_but_not_copied() -> None:
    prompts = [request(name, output=1, content=(("s", 0, 8),)) for name in ("a", "b")]
    play = Play(*prompts)
    assert play.scheduled == [{"a": 8, "b": 4}]  # not 7 of 8 in a copy
    assert play.metrics.copied_blocks == 0


def test_an_answer_is_found_once_its_request_has_ended() -> None:
    first = request("a", 8, 7)  # 14 tokens with KV in the end: 3 blocks and 2 tokens
    second = request("b", output=1, content=(("p:a", 0, 8), ("o:a", 0, 7), ("b", 0, 4)), at=20)
    assert [tokens for _, tokens in Play(first, second).turns[-1].prefix_hits] == [14]


# Parallel samples


def test_samples_share_their_prompt_and_copy_its_last_block_but_one() -> None:
    play = Play(request("a", 10, 3, samples=3))
    # 10 tokens: 2 whole blocks and one of 2 tokens. The first answer tokens are written in the second step: two
    # samples copy that block, the third keeps it. Then 3 x 2 shared uses of the whole blocks.
    assert play.scheduled == [{"a": 10}, {"a": 3}, {"a": 3}]
    assert play.used == [3, 2 + 3, 2 + 3]
    assert [turn.work.copied_blocks for turn in play.turns] == [0, 2, 0]
    assert [turn.shared_blocks for turn in play.turns] == [0, 2, 2]
    # Of the first step 2 slots of 12 have no KV; of the second 3 x 1 of 20; of the third none.
    assert [turn.empty_slots for turn in play.turns] == [2, 3, 0]
    assert [turn.reserved_slots for turn in play.turns] == [2, 3, 0]
    assert play.metrics.throughput().output_tokens_per_s == 3 * 3 / 3


def test_samples_of_a_prompt_of_whole_blocks_copy_nothing() -> None:
    play = Play(request("a", 8, 2, samples=4))
    assert play.used == [2, 2 + 4]
    assert play.metrics.copied_blocks == 0


def test_six_samples_save_their_prompt_five_times() -> None:
    one, six = Play(request("a", 16, 5)), Play(request("a", 16, 5, samples=6))
    assert (max(one.used), max(six.used)) == (5, 4 + 6)
    assert 6 * max(one.used) - max(six.used) == 5 * 4


# Preemption


def contest(**changes: Any) -> Play:
    """Two requests of 8 tokens with 8 to come in a pool of 6 blocks: at 12 tokens each they want a seventh."""
    return Play(request("a", 8, 9), request("b", 8, 9, at=1), num_gpu_blocks=6, max_num_seqs=4, **changes)


def test_the_one_with_the_most_generated_tokens_is_swapped_out_and_comes_back() -> None:
    play = contest()
    # a computes 8 in step 0, and 12 has it after step 4; step 5 wants its fourth block: b holds 3, a 3, none is free.
    assert play.ids("preempted")[5] == ["a"]
    assert play.turns[5].work.swapped_out_blocks == 3
    (cause,) = play.turns[5].preemptions
    assert (cause.trigger, cause.is_decode, cause.needed_blocks, cause.free_blocks) == ("a", True, 1, 0)
    assert cause.lost_tokens == 0
    # b goes on alone and ends with 16 tokens in step 9; a needs 3 blocks and one to write in.
    assert play.ids("finished")[9] == ["b"]
    assert play.ids("resumed")[10] == ["a"]
    assert play.turns[10].work.swapped_in_blocks == 3
    assert play.scheduled[10] == {"a": 1}
    figures = play.metrics.preemption_figures()
    assert (figures.events, figures.swapped_out_blocks, figures.swapped_in_blocks) == (1, 3, 3)
    assert figures.recomputed_tokens == 0


def test_all_that_a_swapped_request_computed_is_found_after_it_has_ended() -> None:
    """Its first blocks were stored before it left, and emptied when it came back: it is stored anew from there."""
    again = request("c", output=1, content=(("p:a", 0, 8), ("o:a", 0, 9)), at=40)
    play = Play(request("a", 8, 9), request("b", 8, 9, at=1), again, num_gpu_blocks=6, max_num_seqs=4)
    assert play.ids("preempted")[5] == ["a"]
    assert play.turns[-1].prefix_hits[0][1] == 16


def test_the_last_to_come_goes_first_with_that_rule() -> None:
    play = contest(victim="last-come")
    assert play.ids("preempted")[5] == ["b"]


def test_with_a_full_cpu_pool_a_victim_is_computed_again() -> None:
    play = contest(num_cpu_blocks=2, enable_prefix_caching=False)
    assert play.ids("preempted")[5] == ["a"]
    assert play.turns[5].work.swapped_out_blocks == 0
    assert play.turns[5].preemptions[0].lost_tokens == 12
    # It has sampled its fifth token: 13 are computed, of which 12 had been.
    assert play.scheduled[10] == {"a": 13}
    assert play.metrics.preemption_figures().recomputed_tokens == 12


def test_by_recompute_nothing_goes_to_the_cpu_and_the_cache_may_still_know_it() -> None:
    play = contest(preemption_mode="recompute", num_cpu_blocks=0)
    assert play.metrics.preemption_figures().swapped_out_blocks == 0
    # b's fourth block evicts the end of what a had: its third block.
    assert play.turns[10].prefix_hits[0][1] == 8
    assert play.scheduled[10] == {"a": 5}


def test_nobody_is_admitted_while_one_who_came_before_is_swapped_out() -> None:
    play = Play(
        request("a", 8, 9),
        request("b", 8, 9, at=1),
        request("c", 1, 1, at=6),
        num_gpu_blocks=6,
        max_num_seqs=4,
    )
    assert play.ids("preempted")[5] == ["a"]
    assert play.turns[6].free_blocks == 2
    assert play.ids("admitted")[10] == ["c"], "in the step in which a is back"


@pytest.mark.parametrize("at", [5, 6])
def test_by_priority_the_least_important_is_the_victim_and_waits_behind_others(at: int) -> None:
    play = Play(
        request("a", 8, 9, priority=1),
        request("b", 8, 9, at=1, priority=2),
        request("c", 4, 1, at=at),
        policy="priority",
        num_gpu_blocks=6,
        max_num_seqs=4,
    )
    assert play.ids("preempted")[5] == ["b"]
    # It is more important than b, which waits; but in a step that preempts nobody is admitted.
    assert play.ids("admitted")[6] == ["c"]


def test_a_group_is_swapped_as_a_whole() -> None:
    play = Play(request("a", 8, 9, samples=2), request("b", 8, 9, at=1), num_gpu_blocks=8, max_num_seqs=4)
    moved = [turn.work.swapped_out_blocks for turn in play.turns if turn.work.swapped_out_blocks]
    # Two blocks of the prompt, which they share, and one of each sample: step 5 wants two more of the 8 - 4 - 3.
    assert moved == [4]
    assert play.ids("preempted")[5] == ["a"]


def test_a_group_that_is_computed_again_computes_its_prompt_once() -> None:
    play = Play(
        request("a", 8, 9, samples=2),
        request("b", 8, 9, at=1),
        num_gpu_blocks=8,
        max_num_seqs=4,
        num_cpu_blocks=0,
        enable_prefix_caching=False,
    )
    again = next(turn for turn in play.turns if turn.resumed)
    # 5 answer tokens of each sample were sampled, 4 of them had KV.
    assert again.scheduled == [(again.resumed[0], 8 + 2 * 5)]
    assert again.work.chunks == [(0, 8), (8, 5), (8, 5)]
    assert again.work.sampled == 2
    assert again.recomputed_tokens == 8 + 2 * 4


def test_swaps_and_copies_take_time() -> None:
    rates = GpuRates(2 * 10**12, 1, 1, Link(1, is_switched=False), 32 * 10**9)
    constants = StepConstants(kv_bandwidth_share=0.8)
    cost = LatencyModel([StageShape(0)], rates, constants, Settings(block_bytes=13_107_200))
    # 16 tokens of Llama 2 13B: 12.5 MiB. 25.6 GB/s over PCIe 4.0: 0.512 ms; read and written at 1.6 TB/s: 16.4 us.
    assert cost.swap_block_ps == 512_000_000
    assert cost.copy_block_ps == 16_384_000
    turn: Turn[Group] = Turn()
    turn.work.swapped_out_blocks, turn.work.swapped_in_blocks, turn.work.copied_blocks = 2, 1, 1
    assert cost.step_ps(turn.work) == 3 * 512_000_000 + 16_384_000


# Round-robin


def test_places_go_round_by_the_quantum() -> None:
    play = Play(*(request(name, 4, 8) for name in "abc"), policy="round-robin", quantum=3, max_num_seqs=2)
    # a and b take three tokens each (the first with their prompt); c was ahead of both, then a goes on. b waited
    # longest, and c comes before a, for it got its place before. In the end a and b lack two tokens, then c.
    ran = ["".join(sorted(step)) for step in play.scheduled]
    assert ran == ["ab"] * 3 + ["ac"] * 3 + ["bc"] * 3 + ["ab"] * 2 + ["c"] * 2
    assert play.metrics.preemption_figures().events == 0, "their blocks stayed"


def test_nobody_yields_where_nobody_waits() -> None:
    play = Play(request("a", 4, 9), request("b", 4, 9), policy="round-robin", quantum=2, max_num_seqs=2)
    assert play.scheduled == [{"a": 4, "b": 4}, *[{"a": 1, "b": 1}] * 8]


def waits(play: Play) -> dict[str, int]:
    """The most steps that each request waited for a token: until its first, or between two."""
    longest: dict[str, int] = {}
    last: dict[str, int] = {}
    for number, step in enumerate(play.scheduled):
        for name in step:
            longest[name] = max(longest.get(name, 0), number - last.get(name, -1) - 1)
            last[name] = number
    return longest


@pytest.mark.parametrize("places", [1, 2, 3, 5])
@pytest.mark.parametrize("quantum", [1, 4, 7])
def test_waiting_is_bounded_by_the_rounds_of_those_ahead(places: int, quantum: int) -> None:
    """With blocks for all, and prompts of one step: of L none waits longer than ceil(L / places) x quantum steps."""
    count = 11
    requests = [request(str(i), 4, 20 + i) for i in range(count)]
    play = Play(*requests, policy="round-robin", quantum=quantum, max_num_seqs=places)
    assert max(waits(play).values()) <= -(-count // places) * quantum
    first_come = Play(*requests, max_num_seqs=places)
    if places == 1:
        assert max(waits(first_come).values()) > count * quantum


@pytest.mark.parametrize("num_cpu_blocks", [0, 1000])
def test_waiting_is_bounded_also_where_blocks_are_short(num_cpu_blocks: int) -> None:
    """In the worst case one at a time has blocks: of L sequences none waits longer than L x quantum."""
    count, quantum = 7, 5
    requests = [request(str(i), 8, 30) for i in range(count)]
    play = Play(
        *requests,
        policy="round-robin",
        quantum=quantum,
        max_num_seqs=4,
        num_gpu_blocks=20,
        num_cpu_blocks=num_cpu_blocks,
    )
    assert play.metrics.preemption_events > 0
    assert max(waits(play).values()) <= count * quantum


# Many steps at once


def test_steps_in_which_nothing_happens_are_one_turn() -> None:
    engine = start(request("a", 8, 50), request("b", 8, 30))
    assert isinstance(engine.turn(100), Turn)
    steps = engine.turn(100)
    assert isinstance(steps, DecodeRun)
    assert (steps.steps, steps.decoders, [group.id for group in steps.finished]) == (29, 2, ["b"])


def test_a_run_of_steps_ends_where_somebody_must_yield() -> None:
    engine = start(request("a", 8, 50), request("b", 8, 30), policy="round-robin", quantum=10, max_num_seqs=1)
    engine.turn(100)
    engine.turn(100)  # tries b, in vain
    steps = engine.turn(100)
    assert isinstance(steps, DecodeRun)
    assert steps.steps == 8
    turn = engine.turn(100)
    assert isinstance(turn, Turn)
    assert [group.id for group in turn.admitted] == ["b"]


def test_what_is_live_is_told_with_its_tokens() -> None:
    engine = start(request("a", 8, 50), request("b", 8, 30), max_num_seqs=1)
    for _ in range(3):
        engine.turn(1)
    assert list(engine.live()) == [("a", 11, 10), ("b", 8, 0)]


def test_a_clock_that_jumps_gives_the_times_of_one_that_steps() -> None:
    requests = [request(str(i), 5 + i, 9 + i, at=7 * i, samples=1 + i % 3) for i in range(9)]

    def figures(*, watched: bool) -> object:
        config = replace(ROOMY, num_gpu_blocks=20, max_num_seqs=6)
        metrics = Metrics(
            num_gpu_blocks=20,
            usable_blocks=20,
            block_size=4,
            prefix_caching=True,
            seconds_per_tick=Fraction(1),
        )
        run(requests, Paged(config, watched=watched), constant(3), metrics, decode_price=constant_decode(3))
        return metrics.steps, metrics.kv_figures(), metrics.latency({}), metrics.preemption_figures()

    assert figures(watched=True) == figures(watched=False)
