"""Buddy allocator and contiguous engines under random use: no slot in two places, all free at the end."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvplan.core.buddy import BuddyAllocator, piece_size
from kvplan.core.cost import constant, constant_decode
from kvplan.core.engines.contiguous import RESERVATIONS, Contiguous, ContiguousConfig
from kvplan.core.metrics import Metrics
from kvplan.core.request import Request
from kvplan.core.simulate import StepRecord, run


class BuddyMachine(RuleBasedStateMachine):
    """Held and free pieces tile the pool; what is freed merges."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 0
        self.memory = BuddyAllocator(0)
        self.asked: dict[int, int] = {}

    @precondition(lambda self: not self.asked)
    @rule(size=st.integers(0, 70))
    def begin_anew(self, size: int) -> None:
        self.size, self.memory = size, BuddyAllocator(size)

    @rule(slots=st.integers(1, 40))
    def allocate(self, slots: int) -> None:
        before = self.memory.free_pieces()
        start = self.memory.allocate(slots)
        if start is None:
            assert self.memory.free_pieces() == before
            assert self.memory.largest_free < slots
        else:
            assert self.memory.held(start) == piece_size(slots)
            self.asked[start] = slots

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        start = data.draw(st.sampled_from(sorted(self.asked)))
        del self.asked[start]
        self.memory.release(start)
        with pytest.raises(ValueError, match="no piece is allocated"):
            self.memory.release(start)

    @rule(start=st.integers(-5, 80))
    def release_a_foreign_piece(self, start: int) -> None:
        if start not in self.asked:
            with pytest.raises(ValueError, match="no piece is allocated"):
                self.memory.release(start)

    @invariant()
    def pieces_tile_the_pool(self) -> None:
        held, free = self.memory.held_pieces(), self.memory.free_pieces()
        assert [start for start, _ in held] == sorted(self.asked)
        end = 0
        for start, slots in sorted(held + free):
            assert start == end
            assert start % slots == 0
            end = start + slots
        assert end == self.size
        assert self.memory.free_slots == sum(slots for _, slots in free)
        assert self.memory.largest_free == max((slots for _, slots in free), default=0)

    @invariant()
    def no_two_free_halves_of_a_piece_stand_beside_each_other(self) -> None:
        free = set(self.memory.free_pieces())
        for start, slots in free:
            assert start & slots or (start + slots, slots) not in free

    @invariant()
    def without_users_the_pool_is_as_new(self) -> None:
        if not self.asked:
            assert self.memory.free_pieces() == BuddyAllocator(self.size).free_pieces()


TestBuddyMachine = BuddyMachine.TestCase


@st.composite
def scenarios(draw: st.DrawFn) -> tuple[ContiguousConfig, list[Request]]:
    longest = draw(st.integers(2, 20))
    settings = ContiguousConfig(
        reservation=draw(st.sampled_from(RESERVATIONS)),
        num_gpu_blocks=draw(st.integers(longest, 90)),
        max_num_batched_tokens=draw(st.integers(longest, 40)),
        max_num_seqs=draw(st.integers(1, 6)),
        max_model_len=longest,
    )
    requests = []
    now = 0
    for i in range(draw(st.integers(1, 14))):
        now += draw(st.integers(0, 4))
        requests.append(Request(f"r{i}", now, draw(st.integers(0, longest)), draw(st.integers(1, longest))))
    return settings, requests


def metrics_of(settings: ContiguousConfig) -> Metrics:
    return Metrics(
        num_gpu_blocks=settings.num_gpu_blocks,
        block_size=1,
        prefix_caching=False,
        seconds_per_tick=Fraction(1),
        usable_blocks=settings.usable_blocks,
    )


@pytest.mark.parametrize("watched", [False, True])
@given(scenarios())
def test_every_request_ends_nothing_overlaps_and_all_is_free_at_the_end(
    watched: bool, scenario: tuple[ContiguousConfig, list[Request]]
) -> None:
    settings, requests = scenario
    metrics = metrics_of(settings)
    engine = Contiguous(settings, watched=watched)

    def look(record: StepRecord) -> None:
        turn = record.turn
        if turn is None:
            return
        assert turn.running <= settings.max_num_seqs
        assert 0 <= turn.reserved_slots <= turn.empty_slots
        assert turn.empty_slots <= settings.num_gpu_blocks - turn.free_blocks
        assert turn.hole_slots in (0, turn.free_blocks)
        if isinstance(engine.memory, BuddyAllocator):
            assert turn.free_blocks_end == engine.memory.free_slots
            assert len(engine.memory.held_pieces()) == len(engine.running)

    outcome = run(requests, engine, constant(1), metrics, decode_price=constant_decode(1), observe=look)
    counts = metrics.request_counts()
    assert outcome.status == "done"
    assert counts.unfinished == 0
    assert counts.finished + counts.rejected == len(requests)
    assert sum(counts.reject_reasons.values()) == counts.rejected
    assert engine.memory.free_slots == settings.num_gpu_blocks
    if isinstance(engine.memory, BuddyAllocator):
        assert engine.memory.free_pieces() == BuddyAllocator(settings.num_gpu_blocks).free_pieces()
    kv = metrics.kv_figures()
    shares = (kv.token_share, kv.reserved_share, kv.internal_fragmentation, kv.external_fragmentation)
    if counts.finished:
        assert None not in shares
        assert all(share is not None and 0 <= share <= 1 for share in shares)
        assert sum(share or 0 for share in shares) == pytest.approx(1, abs=1e-12)


@given(scenarios())
def test_a_watched_run_decides_the_same(
    scenario: tuple[ContiguousConfig, list[Request]],
) -> None:
    settings, requests = scenario
    found = []
    for watched in (False, True):
        metrics = metrics_of(settings)
        engine = Contiguous(settings, watched=watched)
        run(requests, engine, constant(1), metrics, decode_price=constant_decode(1))
        found.append(
            (
                metrics.kv_figures(),
                metrics.batch_figures(),
                metrics.latency({}),
                metrics.throughput(),
                metrics.scheduled_tokens,
                metrics.steps,
            )
        )
    assert found[0] == found[1]
