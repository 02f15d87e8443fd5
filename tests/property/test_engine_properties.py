"""Random small scenarios: what holds after every step of the plain engine, and every figure by brute force."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from kvplan.core.cost import constant
from kvplan.core.engine import SchedulerConfig, StepWork
from kvplan.core.engine import Turn as AnyTurn
from kvplan.core.engines.plain_groups import PlainSequence as Sequence
from kvplan.core.engines.vllm_plain import VllmPlain
from kvplan.core.metrics import Distribution, Metrics, Slo
from kvplan.core.request import Request, Segment
from kvplan.core.simulate import Outcome, StepRecord, run

#: A power of two, so that seconds are exact in floats and figures can be compared with ``==``.
SECONDS_PER_TICK = Fraction(1, 8)
#: Far more steps than any scenario here needs: a run that takes more never ends.
STEP_LIMIT = 2000

Token = tuple[str, int]
Turn = AnyTurn[Sequence]


@dataclass(frozen=True)
class Scenario:
    config: SchedulerConfig
    requests: list[Request]


# Scenarios


@st.composite
def configs(draw: st.DrawFn, *, may_be_too_small: bool, crowded: bool) -> SchedulerConfig:
    block_size = draw(st.integers(1, 4))
    max_model_len = draw(st.integers(10, 24) if crowded else st.integers(3, 12))
    max_num_seqs = draw(st.sampled_from([3, 4, 6] if crowded else [1, 2, 3]))
    chunked = draw(st.booleans())
    if chunked:
        budget = draw(st.integers(max_num_seqs, max_num_seqs + 24))
    else:
        budget = max(max_num_seqs, max_model_len + draw(st.integers(0, 8)))
    longest = -(-max_model_len // block_size)
    too_small = may_be_too_small and draw(st.booleans())
    spare = draw(st.sampled_from([0, 1, 2] if crowded else [0, 0, 0, 1, 2, 5]))
    usable = draw(st.integers(1, longest)) if too_small else longest + spare
    return SchedulerConfig(
        num_gpu_blocks=usable + 1,
        block_size=block_size,
        max_num_batched_tokens=budget,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        enable_prefix_caching=draw(st.sampled_from([True, True, True, False])),
        enable_chunked_prefill=chunked,
        long_prefill_token_threshold=draw(st.sampled_from([0, 0, 1, 2, 3])),
        long_prefill_token_threshold_adaptive=draw(st.booleans()),
        policy=draw(st.sampled_from(["fcfs", "priority"])),
        watermark=draw(st.sampled_from([0.0, 0.0, 0.1, 0.3])),
        scheduler_reserve_full_isl=too_small or draw(st.booleans()),
        max_num_active_seqs=draw(st.none() | st.integers(1, max_num_seqs)),
    )


def cut(segments: tuple[Segment, ...], length: int) -> list[Segment]:
    """The first ``length`` tokens, or all if there are fewer."""
    kept = []
    for segment in segments:
        part = segment._replace(length=min(segment.length, length))
        kept.append(part)
        length -= part.length
    return kept


@st.composite
def scenarios(
    draw: st.DrawFn, *, may_be_too_small: bool = False, share_content: bool = True, ticks_per_gap: int = 1
) -> Scenario:
    """A few requests in bursts; their prompts begin like each other's, or go on after an answer."""
    crowded = draw(st.booleans())
    config = draw(configs(may_be_too_small=may_be_too_small, crowded=crowded))
    block, longest = config.block_size, config.max_model_len
    near_edges = st.builds(
        lambda blocks, off: min(max(0, blocks * block + off), longest + 1),
        st.integers(1, 2) if crowded else st.integers(0, longest // block),
        st.sampled_from([-1, 0, 0, 1]),
    )
    outputs = st.integers(8, 20) if crowded else st.integers(1, 6)
    gaps = st.sampled_from([0, 0, 1, 2] if crowded else [0, 0, 0, 1, 1, 2, 7, 40])
    requests: list[Request] = []
    arrival = draw(st.integers(0, 3))
    for i in range(draw(st.integers(4, 8) if crowded else st.integers(1, 6))):
        arrival += draw(gaps) * ticks_per_gap
        prompt, name = draw(near_edges), f"r{i}"
        content: tuple[Segment, ...] = ()
        kind = draw(st.sampled_from(["fresh", "stream", "stream", "after"])) if share_content else "fresh"
        if kind != "fresh":
            whole: tuple[Segment, ...] = (Segment(draw(st.sampled_from("ab")), 0, longest),)
            if kind == "after" and requests:
                whole = draw(st.sampled_from(requests)).full_content()
            start = cut(whole, min(draw(near_edges), prompt))
            own = prompt - sum(s.length for s in start)
            content = (*start, Segment(f"p:{name}", 0, own))
        priority = draw(st.integers(-1, 2))
        requests.append(Request(name, arrival, prompt, draw(outputs), priority, content))
    return Scenario(config, requests)


def busy_price(work: StepWork) -> int:
    """A step takes longer the more it computes, so that arrivals fall into the middle of steps."""
    return 1 + 2 * work.decodes + work.decode_context // 8 + sum(count for _, count in work.chunks)


# The engine, watched


def tokens_of(request: Request) -> list[Token]:
    return [(s.stream, s.start + i) for s in request.full_content() for i in range(s.length)]


@dataclass
class Watched(VllmPlain):
    """The engine with every invariant checked after scheduling and after each output."""

    config: SchedulerConfig
    turns: int = 0
    #: Content of the whole prefix that ends with a block, as of when its owner last filled it.
    prefix_in: dict[int, tuple[Token, ...]] = field(default_factory=dict)
    #: What each block of a request's table has to hold.
    prefixes: dict[str, list[tuple[Token, ...]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__(self.config)

    def schedule(self, turn: Turn) -> None:
        self.turns += 1
        assert self.turns < STEP_LIMIT, "the run never ends"
        before, queued = list(self.running), len(self.running) + len(self.waiting)
        computed = {s: s.computed for s in before}
        super().schedule(turn)
        self.check_limits(turn)
        self.check_victims(turn, before)
        self.check_budget(turn, computed, queued)
        self.check_head(turn, queued)
        self.check_tables(turn)
        self.check_slots(turn)

    def settle(self, turn: Turn) -> None:
        due = [s for s, _ in turn.scheduled if s.computed >= s.num_tokens]
        before = {s: s.num_tokens for s in due}
        super().settle(turn)
        assert turn.sampled == due
        assert all(s.num_tokens == before[s] + 1 for s in due)
        assert turn.finished == [s for s in due if s.num_tokens == s.max_tokens]
        assert not set(turn.finished) & {*self.running, *self.waiting}
        assert turn.free_blocks_end == self.pool.num_free
        self.check_pool()

    def check_limits(self, turn: Turn) -> None:
        config = self.config
        counts = [tokens for _, tokens in turn.scheduled]
        assert all(count > 0 for count in counts)
        assert sum(counts) == turn.scheduled_tokens <= config.max_num_batched_tokens
        limit = config.max_num_active_seqs or config.max_num_seqs
        assert len(self.running) <= limit
        assert (turn.running, turn.waiting) == (len(self.running), len(self.waiting))
        if turn.preempted:
            assert not turn.admitted
            assert not turn.resumed
        scheduled = {s for s, _ in turn.scheduled}
        assert len(scheduled) == len(turn.scheduled)
        assert scheduled <= set(self.running)
        assert {*turn.admitted, *turn.resumed} <= scheduled
        assert not set(turn.preempted) & set(self.running)
        assert all(s.computed == 0 and not s.blocks for s in self.waiting)
        if config.policy == "priority":
            keys = [s.queue_key for s in self.waiting]
            assert keys == sorted(keys)
        if not config.enable_chunked_prefill and not config.long_prefill_token_threshold:
            assert all(s.computed == s.num_tokens for s in (*turn.admitted, *turn.resumed))

    def check_victims(self, turn: Turn, before: list[Sequence]) -> None:
        """Who came last goes first, or who is least urgent; the others keep their order."""
        if not turn.preempted:
            assert self.running == [*before, *[s for s, _ in turn.prefix_hits]]
            return
        assert self.running == [s for s in before if s not in turn.preempted]
        if self.config.policy == "fcfs":
            assert before == [*self.running, *reversed(turn.preempted)]
            assert list(self.waiting)[: len(turn.preempted)] == turn.preempted[::-1]
        else:
            victims = [s.queue_key for s in turn.preempted]
            assert all(s.queue_key < min(victims) for s in self.running)
            assert victims == sorted(victims, reverse=True)

    def cap(self, queued: int) -> int:
        """The longest chunk of a step; a lone request is not capped."""
        cap = self.config.long_prefill_token_threshold
        if cap and self.config.long_prefill_token_threshold_adaptive:
            cap = max(cap, self.config.max_num_batched_tokens // queued)
        return cap if queued > 1 and cap else self.config.max_model_len

    def check_budget(self, turn: Turn, computed: dict[Sequence, int], queued: int) -> None:
        """Nobody who runs goes without while there is budget, and each gets all it can."""
        left = self.config.max_num_batched_tokens
        hits = dict(turn.prefix_hits)
        for sequence, tokens in turn.scheduled:
            wanted = sequence.num_tokens - hits.get(sequence, computed.get(sequence, 0))
            wanted = min(wanted, self.cap(queued))
            # A victim's tokens come back too late for those before the one that needed its blocks.
            assert tokens == min(wanted, left) or (turn.preempted and tokens <= wanted)
            left -= tokens
        if left:
            assert {s for s, _ in turn.scheduled} == set(self.running)

    def check_head(self, turn: Turn, queued: int) -> None:
        """The watermark holds for all but the first to run; who still heads the queue does not fit."""
        config, pool = self.config, self.pool
        low = int(config.watermark * config.num_gpu_blocks)
        if turn.prefix_hits and len(self.running) > 1:
            assert pool.num_free >= low
        left = config.max_num_batched_tokens - turn.scheduled_tokens
        limit = config.max_num_active_seqs or config.max_num_seqs
        if turn.preempted or not self.waiting or not left or len(self.running) == limit:
            return
        head, hit = self.waiting[0], []
        for block_hash in head.hashes[: (head.num_tokens - 1) // config.block_size]:
            block = pool.find(block_hash)
            if block is None:
                break
            hit.append(block)
        reach = head.num_tokens
        wanted = reach - len(hit) * config.block_size
        wanted = min(wanted, self.cap(queued))
        if not config.enable_chunked_prefill and wanted > left:
            return
        if not config.scheduler_reserve_full_isl:
            reach = len(hit) * config.block_size + min(wanted, left)
        needed = -(-reach // config.block_size) - sum(1 for b in hit if pool.references[b])
        assert needed + (low if self.running else 0) > pool.num_free, "it would fit"

    def check_tables(self, turn: Turn) -> None:
        block_size = self.config.block_size
        newcomers = {*turn.admitted, *turn.resumed}
        hits = dict(turn.prefix_hits)
        assert set(hits) == newcomers
        holders: dict[int, tuple[Token, ...]] = {}
        #: Blocks whose content changes hands in this step.
        refilled = {
            b for s, blocks in turn.new_blocks.items() for b in blocks[hits.get(s, 0) // block_size :]
        }
        for sequence in self.running:
            assert len(sequence.blocks) == -(-sequence.computed // block_size)
            assert len(set(sequence.blocks)) == len(sequence.blocks)
            full = sequence.computed // block_size if self.config.enable_prefix_caching else 0
            cached = [self.pool.hashes[block] is not None for block in sequence.blocks]
            assert cached == [True] * full + [False] * (len(cached) - full)
            for i, (block, prefix) in enumerate(
                zip(sequence.blocks, self.prefixes_of(sequence), strict=False)
            ):
                is_hit = sequence in newcomers and i < hits[sequence] // block_size
                if is_hit and block not in refilled and block in self.prefix_in:
                    assert self.prefix_in[block] == prefix, "a hit is another prompt's content"
                if block in holders:
                    assert self.pool.hashes[block] is not None, "only cached blocks are shared"
                    assert holders[block] == prefix, "a shared block has one content"
                holders[block] = prefix
        self.prefix_in.update(holders)
        for sequence, hit in hits.items():
            assert hit % block_size == 0
            assert hit < sequence.num_tokens
            if not self.config.enable_prefix_caching:
                assert hit == 0
        self.check_pool()
        assert turn.free_blocks == self.pool.num_free
        users = Counter(b for s in self.running for b in s.blocks)
        assert turn.shared_blocks == sum(1 for count in users.values() if count > 1)

    def prefixes_of(self, sequence: Sequence) -> list[tuple[Token, ...]]:
        request, block_size = sequence.request, self.config.block_size
        if request.id not in self.prefixes:
            content = tuple(tokens_of(request))
            ends = range(block_size, len(content) + block_size, block_size)
            self.prefixes[request.id] = [content[:end] for end in ends]
        return self.prefixes[request.id]

    def check_pool(self) -> None:
        users = Counter(b for s in self.running for b in s.blocks)
        assert 0 not in users
        assert self.pool.num_free + len(users) == self.config.usable_blocks
        assert self.pool.references == [users[b] for b in range(self.config.num_gpu_blocks)]
        assert not set(self.pool.free_queue()) & set(users)

    def check_slots(self, turn: Turn) -> None:
        empty = reserved = 0
        for sequence in self.running:
            request = sequence.request
            slots = range(sequence.computed, len(sequence.blocks) * self.config.block_size)
            # The last token is sampled but never computed.
            last = min(request.input_tokens + request.output_tokens, self.config.max_model_len) - 1
            empty += len(slots)
            reserved += sum(1 for slot in slots if slot < last)
        assert (turn.empty_slots, turn.reserved_slots) == (empty, reserved)


@dataclass
class Played:
    scenario: Scenario
    outcome: Outcome
    records: list[StepRecord]
    metrics: Metrics
    engine: Watched


def play(
    scenario: Scenario,
    price: Callable[[StepWork], int] | None = None,
    *,
    warmup: int = 0,
    slo: Slo | None = None,
    seconds_per_tick: Fraction | None = SECONDS_PER_TICK,
) -> Played:
    """Run a scenario: step-numbered without a price, else by a clock in ticks."""
    config = scenario.config
    engine = Watched(config)
    metrics = Metrics(
        num_gpu_blocks=config.num_gpu_blocks,
        block_size=config.block_size,
        prefix_caching=config.enable_prefix_caching,
        seconds_per_tick=seconds_per_tick,
        warmup=warmup,
        slo=slo,
    )
    records: list[StepRecord] = []
    outcome = run(
        scenario.requests,
        engine,
        price or constant(1),
        metrics,
        step_numbered=price is None,
        observe=records.append,
    )
    return Played(scenario, outcome, records, metrics, engine)


def turns(records: list[StepRecord]) -> Iterator[tuple[StepRecord, Turn]]:
    for record in records:
        if record.turn is not None:
            yield record, record.turn


# What holds of a whole run


@given(scenarios(may_be_too_small=True))
def test_every_request_ends_finished_or_turned_away_or_the_run_is_stuck(scenario: Scenario) -> None:
    played = play(scenario)
    config = scenario.config
    event(played.outcome.status)
    generated = Counter(s.id for _, turn in turns(played.records) for s in turn.sampled)
    finished = {s.id for _, turn in turns(played.records) for s in turn.finished}
    rejected = {r.id for record in played.records for r in record.rejected}
    arrived = {r.id for record in played.records for r in record.arrived}
    assert arrived | rejected == {r.id for r in scenario.requests}
    assert finished <= arrived
    for request in scenario.requests:
        may_start = 0 < request.input_tokens < config.max_model_len
        assert (request.id in rejected) == (not may_start)
        if request.id in finished:
            room = config.max_model_len - request.input_tokens
            assert generated[request.id] == min(request.output_tokens, room)
    left = {s.id for s in (*played.engine.running, *played.engine.waiting)}
    assert left == arrived - finished
    assert (played.outcome.status == "done") == (not left)
    if config.max_model_len <= config.usable_blocks * config.block_size:
        assert played.outcome.status == "done"
    if not left:
        assert played.engine.pool.num_free == config.usable_blocks


@given(scenarios())
def test_scheduled_tokens_are_conserved(scenario: Scenario) -> None:
    """Each position of a finished sequence was computed first once, or jumped over by a hit.

    A life of a sequence goes from a hit h to the position c at which it is preempted or ends. With high
    the largest c of its lives before, it computes c - h tokens, of which those below high again, and jumps
    over h - high positions that it never computed itself, if that is positive. So
    scheduled = sum of final positions + recomputed - jumped.
    """
    played = play(scenario)
    position: Counter[Sequence] = Counter()
    high: Counter[Sequence] = Counter()
    final = jumped = recomputed = 0
    for _, turn in turns(played.records):
        for sequence in turn.preempted:
            high[sequence] = max(high[sequence], position[sequence])
            position[sequence] = 0
        for sequence, hit in turn.prefix_hits:
            position[sequence] = hit
            jumped += max(0, hit - high[sequence])
        for sequence, tokens in turn.scheduled:
            before = position[sequence]
            position[sequence] += tokens
            recomputed += len(range(before, min(position[sequence], high[sequence])))
        for sequence in turn.finished:
            assert position[sequence] == sequence.num_tokens - 1
            final += position[sequence]
    metrics = played.metrics
    assert metrics.recomputed_tokens == recomputed
    assert metrics.scheduled_tokens == final + recomputed - jumped
    event(f"preemptions: {min(metrics.preemption_events, 3)}")


@given(scenarios(share_content=False))
def test_without_shared_content_only_preemption_adds_tokens(scenario: Scenario) -> None:
    """No first admission finds anything, and a resumed one finds only what it computed itself."""
    played = play(scenario)
    final = sum(s.num_tokens - 1 for _, turn in turns(played.records) for s in turn.finished)
    metrics = played.metrics
    assert metrics.prefix_cache_figures().hit_tokens == 0
    assert metrics.scheduled_tokens == final + metrics.recomputed_tokens


@given(scenarios(may_be_too_small=True))
def test_the_same_scenario_twice_gives_the_same_run(scenario: Scenario) -> None:
    def trail(played: Played) -> list[object]:
        return [
            (
                record.step,
                [(s.id, tokens) for s, tokens in turn.scheduled],
                {s.id: blocks for s, blocks in turn.new_blocks.items()},
                [s.id for s in turn.preempted],
                turn.evicted_blocks,
                turn.free_blocks,
            )
            for record, turn in turns(played.records)
        ]

    first, second = play(scenario), play(scenario)
    assert trail(first) == trail(second)
    assert first.outcome == second.outcome
    assert first.metrics.kv_figures() == second.metrics.kv_figures()
    assert first.metrics.latency({}) == second.metrics.latency({})


@given(scenarios())
def test_a_run_in_ticks_of_one_step_is_the_step_numbered_run(scenario: Scenario) -> None:
    by_step, by_tick = play(scenario), play(scenario, constant(1))
    assert by_step.metrics.kv_figures() == by_tick.metrics.kv_figures()
    assert by_step.metrics.batch_figures() == by_tick.metrics.batch_figures()
    assert by_step.metrics.latency({}) == by_tick.metrics.latency({})


@given(scenarios(share_content=False))
def test_caching_changes_nothing_where_nothing_is_shared_or_preempted(scenario: Scenario) -> None:
    with_cache = play(Scenario(replace(scenario.config, enable_prefix_caching=True), scenario.requests))
    without = play(Scenario(replace(scenario.config, enable_prefix_caching=False), scenario.requests))
    if not without.metrics.preemption_events:
        assert with_cache.metrics.preemption_events == 0
        assert with_cache.metrics.kv_figures() == without.metrics.kv_figures()
        assert with_cache.metrics.batch_figures() == without.metrics.batch_figures()
        assert with_cache.metrics.scheduled_tokens == without.metrics.scheduled_tokens


@given(scenarios(may_be_too_small=True))
def test_a_run_ends_even_when_the_full_prompt_is_not_reserved(scenario: Scenario) -> None:
    """A sequence that outgrows the pool is admitted again and again: such a run is stuck, not endless."""
    config = replace(scenario.config, scheduler_reserve_full_isl=False)
    played = play(Scenario(config, scenario.requests))
    left = [*played.engine.running, *played.engine.waiting]
    assert (played.outcome.status == "stuck") == bool(left)


# Figures by brute force


@dataclass
class Instant:
    """The state at one tick."""

    used: int = 0
    running: int = 0
    waiting: int = 0
    empty: int = 0
    reserved: int = 0
    shared: int = 0


def window_of(played: Played) -> range:
    """The ticks of W: from the first arrival plus warm-up to the last finish."""
    ends = [record.end for record, turn in turns(played.records) if turn.finished]
    start = min(r.arrival for r in played.scenario.requests) + played.metrics.warmup
    return range(start, max(ends, default=start))


def instants(played: Played) -> list[Instant]:
    """The state at each tick of W, found anew for each."""
    usable = played.scenario.config.usable_blocks
    entered = {r.id: record.start for record in played.records for r in record.arrived}
    at: dict[int, tuple[StepRecord, Turn]] = {}
    for record, turn in turns(played.records):
        at.update(dict.fromkeys(range(record.start, record.end), (record, turn)))
    found = []
    for tick in window_of(played):
        now = Instant()
        if tick in at:
            _, turn = at[tick]
            now = Instant(
                usable - turn.free_blocks,
                turn.running,
                turn.waiting,
                turn.empty_slots,
                turn.reserved_slots,
                turn.shared_blocks,
            )
        for request in played.scenario.requests:
            if request.id in entered and request.arrival <= tick < entered[request.id]:
                now.waiting += 1  # it came while a step ran
        found.append(now)
    return found


def ratio(part: int, whole: int) -> float | None:
    return float(Fraction(part, whole)) if whole else None


def level(values: list[int], percent: int) -> int:
    return min(u for u in values if 100 * sum(1 for v in values if v <= u) >= percent * len(values))


def check_distribution(found: Distribution, ticks: list[Fraction]) -> None:
    assert found.count == len(ticks)
    if not ticks:
        assert found == Distribution(0)
        return
    seconds = [float(t * SECONDS_PER_TICK) for t in ticks]
    assert found.mean == pytest.approx(float(sum(ticks) / len(ticks) * SECONDS_PER_TICK), rel=1e-12)
    assert found.max == max(seconds)
    for name, percent in (("p50", 50), ("p90", 90), ("p95", 95), ("p99", 99)):
        assert getattr(found, name) == pytest.approx(float(np.percentile(seconds, percent)), rel=1e-12), name


def check_time_figures(played: Played) -> None:
    """Utilization, shares, queue lengths: sums over every tick of W."""
    config, metrics = played.scenario.config, played.metrics
    states = instants(played)
    ticks = len(states)
    assert metrics.window_ticks == ticks
    used = [s.used for s in states]
    kv = metrics.kv_figures()
    of_the_run = [config.usable_blocks - turn.free_blocks for _, turn in turns(played.records)]
    assert kv.peak_blocks == max(used if ticks else of_the_run, default=0)
    if ticks:
        assert kv.utilization.mean == ratio(sum(used), ticks * config.usable_blocks)
        assert kv.utilization.p50 == ratio(level(used, 50), config.usable_blocks)
        assert kv.utilization.p95 == ratio(level(used, 95), config.usable_blocks)
        assert kv.utilization.max == ratio(max(used), config.usable_blocks)
    else:
        utilization = kv.utilization
        assert {utilization.mean, utilization.p50, utilization.p95, utilization.max} == {None}
    slots = sum(used) * config.block_size
    empty, reserved = sum(s.empty for s in states), sum(s.reserved for s in states)
    assert kv.token_share == ratio(slots - empty, slots)
    assert kv.reserved_share == ratio(reserved, slots)
    assert kv.internal_fragmentation == ratio(empty - reserved, slots)
    shares = (kv.token_share, kv.reserved_share, kv.internal_fragmentation, kv.external_fragmentation)
    if slots:
        assert kv.external_fragmentation == 0
        assert sum(share for share in shares if share is not None) == pytest.approx(1, rel=1e-12)
        assert all(share is not None and 0 <= share <= 1 for share in shares)
    else:
        assert set(shares) == {None}
    batch = metrics.batch_figures()
    assert batch.running_mean == ratio(sum(s.running for s in states), ticks)
    assert batch.waiting_mean == ratio(sum(s.waiting for s in states), ticks)
    assert batch.running_max == max((s.running for s in states), default=None)
    assert metrics.prefix_cache_figures().peak_shared_blocks == max((s.shared for s in states), default=0)
    counted = [
        turn.waiting
        for record, turn in turns(played.records)
        if set(range(record.start, record.end)) & set(window_of(played))
    ]
    assert batch.waiting_max == (max(counted, default=0) if ticks else None)


def check_request_figures(played: Played, slo: Slo) -> None:
    """Latencies, counts, hits and goodput: from the events of each request."""
    metrics, requests = played.metrics, played.scenario.requests
    window = window_of(played)
    admitted: dict[str, int] = {}
    hit_tokens: dict[str, int] = {}
    sampled: dict[str, list[int]] = {r.id: [] for r in requests}
    finished: dict[str, int] = {}
    resumed_hits: Counter[str] = Counter()
    for record, turn in turns(played.records):
        for sequence, hit in turn.prefix_hits:
            if sequence.id in admitted:
                resumed_hits[sequence.id] += hit
            else:
                admitted[sequence.id] = record.start
                hit_tokens[sequence.id] = hit
        for sequence in turn.sampled:
            sampled[sequence.id].append(record.end)
        finished.update({s.id: record.end for s in turn.finished})
    measured = [r for r in requests if r.arrival >= window.start]
    ttft = {r.id: Fraction(sampled[r.id][0] - r.arrival) for r in measured if sampled[r.id]}
    e2e = {r.id: Fraction(finished[r.id] - r.arrival) for r in measured if r.id in finished}
    tpot = {
        name: (e2e[name] - ttft[name]) / (len(sampled[name]) - 1) for name in e2e if len(sampled[name]) > 1
    }
    itl = [Fraction(b - a) for r in measured for a, b in zip(sampled[r.id], sampled[r.id][1:], strict=False)]
    latency = metrics.latency({})
    check_distribution(latency.ttft_s, list(ttft.values()))
    check_distribution(latency.e2e_s, list(e2e.values()))
    check_distribution(latency.tpot_s, list(tpot.values()))
    check_distribution(latency.itl_s, itl)
    check_distribution(
        latency.queue_s, [Fraction(admitted[r.id] - r.arrival) for r in measured if r.id in admitted]
    )
    cache = metrics.prefix_cache_figures()
    seen = [r for r in measured if r.id in admitted]
    assert cache.hit_tokens == sum(hit_tokens[r.id] for r in seen)
    assert cache.resumed_hit_tokens == sum(resumed_hits[r.id] for r in seen)
    if played.scenario.config.enable_prefix_caching:
        assert cache.queried_tokens == sum(r.input_tokens for r in seen)
        assert cache.hit_rate == ratio(cache.hit_tokens, cache.queried_tokens)
    counts = metrics.request_counts()
    assert counts.total == len(requests)
    assert counts.finished == len(finished)
    assert counts.rejected == sum(len(record.rejected) for record in played.records)
    assert counts.unfinished == counts.total - counts.finished - counts.rejected
    assert counts.truncated == sum(
        r.id in finished and len(sampled[r.id]) < r.output_tokens for r in requests
    )
    # Rates over W
    window_s = len(window) * SECONDS_PER_TICK
    ended = [r for r in requests if r.id in finished and finished[r.id] >= window.start]
    throughput = metrics.throughput()
    if window_s:
        assert throughput.requests_per_s == float(len(ended) / window_s)
        assert throughput.input_tokens_per_s == float(sum(r.input_tokens for r in ended) / window_s)
        assert throughput.output_tokens_per_s == float(sum(len(sampled[r.id]) for r in ended) / window_s)
    else:
        assert throughput.requests_per_s is None

    def is_good(name: str) -> bool:
        times = ((ttft, slo.ttft_s), (tpot, slo.tpot_s), (e2e, slo.e2e_s))
        return name in e2e and all(
            goal is None or name not in ticks or ticks[name] * SECONDS_PER_TICK <= Fraction(goal)
            for ticks, goal in times
        )

    goodput = metrics.goodput()
    if not slo.is_stated:
        assert goodput is None
        return
    assert goodput is not None
    good = sum(1 for r in measured if is_good(r.id))
    arrived = [r for r in measured if not finished or r.arrival <= max(finished.values())]
    assert goodput.share == ratio(good, len(arrived))
    assert goodput.requests_per_s == (float(good / window_s) if window_s else None)


goals = st.none() | st.integers(1, 300).map(lambda eighths: eighths / 8)
slos = st.builds(Slo, goals, goals, goals)
warmups = st.sampled_from([0, 0, 1, 5, 20, 70])


@given(scenarios(may_be_too_small=True), warmups, slos)
def test_every_figure_of_a_step_numbered_run_by_brute_force(
    scenario: Scenario, warmup: int, slo: Slo
) -> None:
    played = play(scenario, warmup=warmup, slo=slo)
    check_time_figures(played)
    check_request_figures(played, slo)


@given(scenarios(may_be_too_small=True, ticks_per_gap=3), warmups, slos)
def test_every_figure_of_a_run_with_steps_of_uneven_length_by_brute_force(
    scenario: Scenario, warmup: int, slo: Slo
) -> None:
    played = play(scenario, busy_price, warmup=warmup, slo=slo)
    check_time_figures(played)
    check_request_figures(played, slo)


@given(scenarios(may_be_too_small=True))
def test_without_seconds_every_time_is_unknown_and_every_ratio_the_same(scenario: Scenario) -> None:
    known, unknown = play(scenario), play(scenario, seconds_per_tick=None)
    latency = unknown.metrics.latency({})
    for name in ("ttft_s", "tpot_s", "itl_s", "e2e_s", "queue_s"):
        count = getattr(known.metrics.latency({}), name).count
        assert getattr(latency, name) == Distribution(count)
    assert unknown.metrics.duration_s is None
    assert unknown.metrics.throughput().requests_per_s is None
    assert unknown.metrics.kv_figures() == known.metrics.kv_figures()
    assert unknown.metrics.batch_figures() == known.metrics.batch_figures()
