"""Small random runs over every option of vLLM's scheduler together, by families, and what must hold in each of them.

``draw(rng, family)`` gives a configuration and its requests; `Watched` is the plain engine with its invariants checked
after every planning, processing and abort; ``play`` runs one. Other engines can be compared with it: `FAMILIES` names
the families, of which ``mixture`` has everything that may stand together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from random import Random
from typing import Any

from random_scenarios import draw as draw_plain

from kvplan.core.drafts import Drafting
from kvplan.core.engine import GroupSpec, Live, SchedulerConfig, StepWork
from kvplan.core.engine import Turn as AnyTurn
from kvplan.core.engines.plain_groups import ChunkedGroup, FullGroup, PlainSequence, SlidingGroup
from kvplan.core.engines.plain_pool import NULL_BLOCK
from kvplan.core.engines.plain_states import StateGroup
from kvplan.core.engines.vllm_plain import VllmPlain
from kvplan.core.metrics import Metrics, RequestRecord
from kvplan.core.request import Request
from kvplan.core.simulate import Outcome, StepRecord, run

FAMILIES = (
    "asynchronous",
    "pipeline",
    "aborts",
    "windows",
    "unequal",
    "states",
    "chunked",
    "drafts",
    "mixture",
)
#: Far more calls than any scenario here needs: a run that takes more never ends.
LONGEST_RUN = 5000

Turn = AnyTurn[PlainSequence]


# Drawing


def draw(rng: Random, family: str) -> tuple[SchedulerConfig, list[Request]]:
    """A configuration of a family and its requests, in order of arrival."""
    config, requests = draw_plain(rng)
    mixed = family == "mixture"

    def has(what: str, share: float) -> bool:
        return family == what or rng.random() < (0.5 if mixed else share)

    groups = draw_groups(rng, config, rng.choice(("full", *FAMILIES[3:7])) if mixed else family)
    config = replace(config, groups=groups)
    if any(spec.kind == "state" for spec in groups):
        config = replace(config, enable_prefix_caching=groups[-1].mode == "align")
    if len(groups) > 1 and rng.random() < 0.3:
        config = with_padding(rng, config)
    if has("asynchronous", 0.4):
        config = replace(config, async_scheduling=True)
    if has("drafts", 0):
        count = rng.choice([1, 1, 2, 3, 5])
        rate = rng.choice([None, None, 0.0, 0.5, 0.9, 1.0])
        method = rng.choice(["ngram", "eagle", "draft_model"])
        config = replace(config, speculative=Drafting(method, count, rate, rng.randrange(5)))
        if config.long_prefill_token_threshold <= count:
            config = replace(config, long_prefill_token_threshold=0)
    can_stage = config.speculative is None or config.async_scheduling
    if can_stage and has("pipeline", 0):
        config = replace(config, pipeline_parallel_size=rng.choice([2, 2, 3, 4]))
    if has("aborts", 0):
        requests = [draw_abort(rng, request) for request in requests]
    return fit_pool(rng, config, requests), requests


def draw_groups(rng: Random, config: SchedulerConfig, family: str) -> tuple[GroupSpec, ...]:
    """Groups as a family has them."""
    size = config.block_size
    if family == "windows":
        windows = [
            GroupSpec("sliding", window=rng.choice([2, 3, size + 1, 2 * size, 9, 30]))
            for _ in range(rng.choice([1, 1, 2]))
        ]
        return shuffled(rng, [*windows, *[GroupSpec()] * rng.choice([0, 1, 1, 1, 2])])
    if family == "unequal":
        sizes = rng.choice([[1, 2], [2, 1], [1, 3], [3, 1], [1, 2, 4], [2, 3]])
        groups = [GroupSpec(block_size=size * sizes[0])]
        for factor in sizes[1:]:
            window = rng.choice([2, 3, 5, 9, 20])
            groups.append(GroupSpec("sliding", size * factor, window))
            if rng.random() < 0.3:
                groups.append(groups[-1])
        return shuffled(rng, groups)
    if family == "chunked":
        chunk = rng.choice([size, 2 * size, 3 * size, size + 1, 6])
        chunks = [GroupSpec("chunked", chunk=chunk)] * rng.choice([1, 1, 2])
        return shuffled(rng, [*chunks, *[GroupSpec()] * rng.choice([0, 1, 1])])
    if family == "states":
        full = [GroupSpec()] * rng.choice([0, 1, 1, 1])
        if rng.random() < 0.25:
            return (GroupSpec(), *[GroupSpec("state", config.max_model_len)] * rng.choice([1, 2]))
        kernel = rng.choice([None, None, 1, size])
        return (*full, *[GroupSpec("state", mode="align", checkpoint=kernel)] * rng.choice([1, 1, 2, 3]))
    return (GroupSpec(),)


def with_padding(rng: Random, config: SchedulerConfig) -> SchedulerConfig:
    """The same with memory counted in a finer unit, and a part of some groups' blocks padding."""
    slots = 12 * config.block_slots
    groups = tuple(
        spec._replace(
            payload=slots // 12 * rng.choice([9, 12]) if spec.kind == "state" else part(rng, slots, size)
        )
        for spec in config.groups
        for size in [config.block_size_of(spec)]
    )
    return replace(config, groups=groups, slots_a_block=slots)


def part(rng: Random, slots: int, block_size: int) -> int:
    return slots // block_size // 2 * block_size if rng.random() < 0.5 else slots


def shuffled(rng: Random, groups: list[GroupSpec]) -> tuple[GroupSpec, ...]:
    rng.shuffle(groups)
    return tuple(groups)


def draw_abort(rng: Random, request: Request) -> Request:
    if rng.random() < 0.6:
        return request
    when = request.arrival + rng.choice([0, 0, 1, 2, 3, 5, 9])
    return request._replace(abort=when, abort_mid=rng.random() < 0.4)


def fit_pool(rng: Random, config: SchedulerConfig, requests: list[Request]) -> SchedulerConfig:
    """The same with a pool that is about as large as the largest request needs."""
    longest = max(min(r.input_tokens + r.output_tokens, config.max_model_len) for r in requests)
    drafts = config.speculative.num_drafts if config.speculative else 0
    most = config.blocks_for(min(longest + 2 * drafts, config.max_model_len)) + len(config.groups)
    pool = rng.choice([most, most + 1, most + 2, most * 2, most * 3])
    if rng.random() < 0.05:
        pool = max(1, most // 2)
    return replace(config, num_gpu_blocks=1 + pool)


# Playing


class Watched(VllmPlain):
    """The plain engine with its invariants checked all the time."""

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self.calls = 0
        self.put_out: Counter[str] = Counter()

    def turn(self, max_steps: int = 1, wait: Callable[[Turn], None] | None = None) -> Turn:
        self.calls += 1
        turn = super().turn(max_steps, wait)
        assert len(self._batches) < max(2, self.config.queue_size + 1)
        assert turn.planned or turn.processed
        assert turn.free_blocks_end == self.pool.num_free
        return turn

    def schedule(self, turn: Turn) -> None:
        queued = len(self.running) + len(self.waiting)
        order = list(self.waiting)
        super().schedule(turn)
        self.check_plan(turn, queued)
        self.check_queue(turn, order)
        self.check_pool()
        self.check_sequences()
        self.check_slots(turn)

    def settle(self, turn: Turn) -> None:
        super().settle(turn)
        for sequence in turn.sampled:
            self.put_out[sequence.id] += 1 + turn.extra_tokens.get(sequence, 0)
            outputs = sequence.num_tokens - sequence.request.input_tokens
            assert self.put_out[sequence.id] == outputs
        for sequence in turn.finished:
            assert sequence.num_tokens == sequence.max_tokens
            assert sequence not in self.running
            assert sequence not in self.waiting
        self.check_pool()
        self.check_sequences()

    def abort(self, request_id: str) -> Live:
        row = super().abort(request_id)
        self.check_pool()
        return row

    def check_plan(self, turn: Turn, queued: int) -> None:
        config = self.config
        extra = config.speculative.extra_input if config.speculative else 0
        scheduled = dict(turn.scheduled)
        assert len(scheduled) == len(turn.scheduled)
        assert all(tokens > 0 for tokens in scheduled.values())
        assert sum(scheduled.values()) == turn.scheduled_tokens
        assert sum(tokens + extra for tokens in scheduled.values()) <= config.max_num_batched_tokens
        assert scheduled.keys() <= set(self.running)
        assert len(self.running) <= max(config.max_num_active_seqs or config.max_num_seqs, 1)
        if turn.preempted:
            assert not turn.prefix_hits
        for sequence, drafts in turn.drafts.items():
            assert 0 < drafts < scheduled[sequence] + 1
            assert config.speculative is not None
            assert drafts <= config.speculative.num_drafts
        for sequence, hit in turn.prefix_hits:
            assert hit < sequence.num_tokens
            assert hit % self._alignment == 0 or len(self.groups) == 1
            assert sequence.stale == 0
        threshold = config.long_prefill_token_threshold
        if threshold and not config.long_prefill_token_threshold_adaptive and queued > 1:
            assert all(tokens <= threshold for tokens in scheduled.values())

    def check_queue(self, turn: Turn, order: list[PlainSequence]) -> None:
        """Nobody is passed over but those whose tokens are still in flight."""
        if self.config.policy == "priority":
            keys = [s.queue_key for s in self.waiting]
            assert keys == sorted(keys)
        else:
            left = [s for s in order if s not in self.running]
            assert list(self.waiting) == [*reversed(turn.preempted), *left]
        passed = [
            s
            for s in self.waiting
            if turn.prefix_hits and order.index(s) < order.index(turn.prefix_hits[-1][0])
        ]
        assert all(s.stale > 0 for s in passed)

    def check_pool(self) -> None:
        """Blocks are used by the tables of those who run, and by nobody else; the index has exactly what has a hash."""
        pool = self.pool
        users = Counter(
            block for s in self.running for table in s.tables for block in table.blocks if block != NULL_BLOCK
        )
        assert pool.references == [users[block] for block in range(self.config.num_gpu_blocks)]
        queue = list(pool.free_queue())
        assert len(queue) == len(set(queue)) == pool.num_free == self.config.usable_blocks - len(users)
        assert not set(queue) & {*users, NULL_BLOCK}
        assert pool.idle == sum(pool.hashes[block] is not None for block in queue)
        assert pool.shared == sum(count > 1 for count in users.values())
        blank = [pool.hashes[block] is None for block in queue]
        assert blank == sorted(blank, reverse=True)
        indexed = {block: key for key, blocks in pool.index.items() for block in blocks}
        assert indexed == {block: key for block, key in enumerate(pool.hashes) if key is not None}
        if not self.config.enable_prefix_caching:
            assert not indexed

    def check_sequences(self) -> None:
        """What is in flight, and that tables hold what the next token attends to, each block the right content."""
        in_flight: Counter[PlainSequence] = Counter()
        expected: Counter[PlainSequence] = Counter()
        for batch in self._batches:
            for sequence, tokens, drafts, samples in batch:
                in_flight[sequence] += tokens
                expected[sequence] += samples * (1 + drafts)
        for sequence in (*self.running, *self.waiting):
            assert sequence.in_flight == in_flight[sequence]
            assert sequence.num_tokens < sequence.max_tokens
            assert 0 <= sequence.computed < self.config.max_model_len
        for sequence in self.waiting:
            assert 0 <= sequence.stale <= sequence.in_flight
            assert not sequence.computed
            assert not any(table.blocks for table in sequence.tables)
        for sequence in self.running:
            assert sequence.stale == 0
            assert sequence.computed >= sequence.in_flight
            if self.config.async_scheduling:
                assert sequence.placeholders == expected[sequence]
            else:
                assert sequence.placeholders == 0
            for group, table in zip(self.groups, sequence.tables, strict=True):
                self.check_table(sequence, group, table.blocks)

    def check_slots(self, turn: Turn) -> None:
        """Each slot of each block in use by itself: whether it has KV that some user attends to, or will have."""
        tokens = reserved = behind = 0
        for number, group in enumerate(self.groups):
            users: dict[tuple[int, int], list[PlainSequence]] = {}
            for sequence in self.running:
                for index, block in enumerate(sequence.tables[number].blocks):
                    if block != NULL_BLOCK:
                        users.setdefault((block, index), []).append(sequence)
            assert len({block for block, _ in users}) == group.in_use
            assert not turn.group_blocks or turn.group_blocks[number] == group.in_use
            size = group.block_size
            for (_, index), sequences in users.items():
                places = range(index * size, (index + 1) * size)
                if group.spec.kind == "state":
                    is_there = any(index * size < s.computed for s in sequences)
                    will_be = any(index * size < s.final_tokens for s in sequences)
                    tokens += is_there * group.payload
                    reserved += (will_be and not is_there) * group.payload
                    continue
                slot = group.payload // size
                for place in places:
                    has_kv = any(place < s.computed for s in sequences)
                    in_reach = any(
                        group.out_of_reach(s.computed - s.in_flight) <= place < s.computed for s in sequences
                    )
                    tokens += in_reach * slot
                    behind += (has_kv and not in_reach) * slot
                    will_be = any(s.computed <= place < s.final_tokens for s in sequences)
                    reserved += (will_be and not has_kv) * slot
        used = self.config.usable_blocks - turn.free_blocks
        found = (used * self.config.block_slots - turn.empty_slots, turn.reserved_slots, turn.behind_slots)
        assert found == (tokens, reserved, behind)

    def check_table(self, sequence: PlainSequence, group: FullGroup, blocks: list[int]) -> None:
        held = [block for block in blocks if block != NULL_BLOCK]
        assert len(set(held)) == len(held)
        size = group.block_size
        for index, block in enumerate(blocks):
            known = self.pool.hashes[block] if block != NULL_BLOCK else None
            if known is not None:
                assert known == group.key(sequence, index), "a block holds another prefix"
        if isinstance(group, StateGroup):
            assert blocks[-1 - group._num_drafts] != NULL_BLOCK
            return
        if group.spec.kind == "state":
            drafts = self.config.speculative.num_drafts if self.config.speculative else 0
            assert len(held) == len(blocks) == 1 + drafts
            return
        assert len(blocks) >= -(-sequence.computed // size)
        ahead = 2 * self.config.speculative.num_drafts + 1 if self.config.speculative else 0
        assert len(blocks) <= -(-min(sequence.computed + 2 * ahead, self.config.max_model_len) // size)
        done = sequence.computed - sequence.in_flight
        # Chunks that share blocks count as hit without being looked up, so a block in reach may never have been.
        if not (isinstance(group, ChunkedGroup) and group.spec.chunk % size):
            assert NULL_BLOCK not in blocks[group.skip(done) :], "a block within reach is gone"
        if type(group) is FullGroup:
            assert NULL_BLOCK not in blocks
        elif isinstance(group, SlidingGroup | ChunkedGroup) and NULL_BLOCK in blocks:
            first = next(i for i, block in enumerate(blocks) if block != NULL_BLOCK)
            assert NULL_BLOCK not in blocks[first:]


def busy_price(work: StepWork) -> int:
    """A batch takes longer the more it computes, so that arrivals and aborts fall into the middle of batches."""
    return 1 + 2 * work.decodes + work.decode_context // 8 + sum(count for _, count in work.chunks)


def play(
    config: SchedulerConfig,
    requests: list[Request],
    engine: Any = None,
    *,
    price: Any = None,
    observe: Callable[[StepRecord], None] | None = None,
) -> tuple[Outcome, Metrics, list[RequestRecord]]:
    """Run a scenario through an engine, the watched plain one if none is given; step-numbered without a price."""
    engine = engine or Watched(config)
    ended: list[RequestRecord] = []
    metrics = Metrics(
        num_gpu_blocks=config.num_gpu_blocks,
        block_size=config.block_size,
        cache=config,
        prefix_caching=config.enable_prefix_caching,
        seconds_per_tick=Fraction(1, 8),
        on_request=ended.append,
    )
    if price is not None:
        requests = [
            r._replace(
                arrival=r.arrival * 5, abort=None if r.abort is None else r.abort * 5 + 2, abort_mid=False
            )
            for r in requests
        ]
    count = 0

    def watch(record: StepRecord) -> None:
        nonlocal count
        count += 1
        assert count < LONGEST_RUN, "the run never ends"
        if observe is not None:
            observe(record)

    outcome = run(
        requests,
        engine,
        price or (lambda _work: 1),
        metrics,
        step_numbered=price is None,
        observe=watch,
    )
    return outcome, metrics, ended
