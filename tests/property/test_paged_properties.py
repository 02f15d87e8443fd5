"""The paper's engine on any trace: all finish or are refused, nothing leaks, and many steps at once change nothing."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy_costs import toy_cost

from kvplan.core.engine import DecodeRun
from kvplan.core.engines.paged import Paged, PagedConfig
from kvplan.core.metrics import Metrics, RequestRecord
from kvplan.core.request import Request, Segment
from kvplan.core.simulate import StepRecord, run

#: A clock on which the number of tokens, their context, copies and swaps all tell.
COST = toy_cost(1000, 10, 7, token=100, head=50, pair=1, block=8)


@st.composite
def settings(draw: st.DrawFn) -> PagedConfig:
    seqs = draw(st.integers(1, 8))
    block_size = draw(st.sampled_from([1, 2, 3, 4, 16]))
    blocks = draw(st.integers(3, 40))
    return PagedConfig(
        num_gpu_blocks=blocks,
        block_size=block_size,
        max_num_batched_tokens=seqs + draw(st.integers(0, 30)),
        max_num_seqs=seqs,
        max_model_len=draw(st.integers(4, blocks * block_size + 10)),
        enable_prefix_caching=draw(st.booleans()),
        policy=draw(st.sampled_from(["fcfs", "priority", "round-robin"])),
        preemption_mode=draw(st.sampled_from(["swap", "recompute"])),
        num_cpu_blocks=draw(st.sampled_from([0, 4, 100])),
        victim=draw(st.sampled_from(["most-generated", "last-come"])),
        quantum=draw(st.integers(1, 9)),
    )


@st.composite
def traces(draw: st.DrawFn) -> list[Request]:
    """Prompts that begin alike, or with another's answer; samples; bursts and gaps."""
    requests: list[Request] = []
    now = 0
    for number in range(draw(st.integers(1, 14))):
        now += draw(st.sampled_from([0, 0, 0, 2500, 20_000]))
        tokens = draw(st.integers(1, 20))
        shared = draw(st.integers(0, tokens))
        stream = draw(st.sampled_from(["s", "s", *(f"o:{one.id}" for one in requests[-3:])]))
        rest = draw(st.sampled_from(["t", f"p:{number}"]))
        content = tuple(
            s for s in (Segment(stream, 0, shared), Segment(rest, 0, tokens - shared)) if s.length
        )
        requests.append(
            Request(
                str(number),
                now,
                tokens,
                draw(st.integers(1, 24)),
                draw(st.integers(0, 2)),
                content if draw(st.booleans()) else (),
                draw(st.sampled_from([1, 1, 1, 2, 3])),
            )
        )
    return requests


class Run:
    def __init__(self, config: PagedConfig, requests: list[Request], *, watched: bool) -> None:
        self.engine = Paged(config, watched=watched)
        self.records: dict[str, RequestRecord] = {}
        self.metrics = Metrics(
            num_gpu_blocks=config.num_gpu_blocks,
            usable_blocks=config.usable_blocks,
            block_size=config.block_size,
            prefix_caching=config.enable_prefix_caching,
            seconds_per_tick=Fraction(1, 1000),
            on_request=self.note,
        )
        self.order: list[tuple[int, str]] = []
        outcome = run(
            requests, self.engine, COST.step_ps, self.metrics, decode_price=COST.decode, observe=self.observe
        )
        assert outcome.status == "done"

    def note(self, record: RequestRecord) -> None:
        self.records[record.request.id] = record

    def observe(self, record: StepRecord) -> None:
        turn = record.turn
        if turn is None:
            return
        last = record.step + (turn.steps - 1 if isinstance(turn, DecodeRun) else 0)
        self.order += [(last, group.id) for group in turn.finished]
        gpu = self.engine.memory.gpu
        assert 0 <= self.engine.memory.free <= gpu.num_blocks
        assert 0 <= turn.reserved_slots <= turn.empty_slots
        used = gpu.num_blocks - turn.free_blocks
        assert turn.empty_slots <= used * self.engine.config.block_size
        if not isinstance(turn, DecodeRun):
            tokens = sum(count for _, count in turn.scheduled) + turn.decoders
            assert tokens == turn.scheduled_tokens <= self.engine.config.max_num_batched_tokens
            assert not turn.is_dead

    @property
    def figures(self) -> dict[str, object]:
        metrics = self.metrics
        return {
            "requests": metrics.request_counts(),
            "kv": metrics.kv_figures(),
            "batch": metrics.batch_figures(),
            "prefix_cache": metrics.prefix_cache_figures(),
            "preemptions": metrics.preemption_figures(),
            "latency": metrics.latency({}),
            "steps": metrics.steps,
            "scheduled": metrics.scheduled_tokens,
            "order": self.order,
        }


@given(settings(), traces())
def test_every_request_finishes_or_is_refused_and_nothing_is_left(
    config: PagedConfig, requests: list[Request]
) -> None:
    done = Run(config, requests, watched=False)
    assert done.records.keys() == {request.id for request in requests}
    for record in done.records.values():
        request = record.request
        if record.rejected_for is not None:
            continue
        assert record.finished is not None
        most = min(request.output_tokens, config.max_model_len - request.input_tokens)
        assert record.output_tokens == most
    engine = done.engine
    assert (engine.memory.free, engine.memory.pledged) == (config.num_gpu_blocks, 0)
    assert (engine.memory.gpu.held, engine.memory.cpu.free) == (0, config.num_cpu_blocks)
    assert not engine.running
    assert not engine.paused
    assert not engine.stepping
    assert not engine.prefilling
    figures = done.metrics.preemption_figures()
    assert figures.swapped_in_blocks == figures.swapped_out_blocks


@given(settings(), traces())
def test_many_steps_at_once_give_what_single_steps_give(config: PagedConfig, requests: list[Request]) -> None:
    assert Run(config, requests, watched=False).figures == Run(config, requests, watched=True).figures


@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(1, 30)), min_size=1, max_size=9),
    st.integers(1, 6),
    st.integers(1, 5),
    st.integers(11, 40),
    st.sampled_from([0, 5, 100]),
)
def test_in_round_robin_nobody_waits_longer_than_all_live_take_turns(
    lengths: list[tuple[int, int]], quantum: int, places: int, blocks: int, cpu_blocks: int
) -> None:
    """Prompts take one step, so a turn is a quantum; blocks may be short."""
    config = PagedConfig(
        num_gpu_blocks=blocks,
        block_size=4,
        max_num_batched_tokens=1000,
        max_num_seqs=places,
        max_model_len=100,
        policy="round-robin",
        num_cpu_blocks=cpu_blocks,
        quantum=quantum,
    )
    engine = Paged(config, watched=True)
    for number, (tokens, output) in enumerate(lengths):
        engine.add(Request(str(number), 0, tokens, output))
    last = {str(number): -1 for number in range(len(lengths))}
    step = 0
    while not engine.is_idle:
        turn = engine.turn()
        assert not isinstance(turn, DecodeRun)
        for group in turn.sampled:
            assert step - last[group.id] - 1 <= len(lengths) * quantum
            last[group.id] = step
        step += 1


@given(settings(), traces())
def test_the_four_shares_sum_to_one(config: PagedConfig, requests: list[Request]) -> None:
    kv = Run(config, requests, watched=False).metrics.kv_figures()
    shares = (kv.token_share, kv.internal_fragmentation, kv.reserved_share, kv.external_fragmentation)
    if kv.token_share is None:
        assert shares == (None,) * 4
        return
    known = [share for share in shares if share is not None]
    assert sum(known) == pytest.approx(1)
    assert all(0 <= share <= 1 for share in known)
    assert kv.external_fragmentation == 0
