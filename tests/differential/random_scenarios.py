"""Small random runs that reach every rule, and the comparison of two engines in lockstep.

What makes them bite: few streams cut at, beside and across block edges; prompts that contain another request's
answer, also one still being generated or not yet arrived; several arrivals in one step; pools just large enough.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any, Protocol

from kvplan.core.content import Piece, block_hashes
from kvplan.core.engine import DecodeRun, Level, SchedulerConfig, Turn
from kvplan.core.engines.vllm import Vllm
from kvplan.core.engines.vllm_plain import VllmPlain
from kvplan.core.extents import Extent, ExtentPool, Holding, Node, _pieces
from kvplan.core.request import Request, Segment

LONGEST_RUN = 3000


def draw(rng: Random) -> tuple[SchedulerConfig, list[Request]]:
    """A configuration and its requests, in order of arrival."""
    block_size = rng.choice([1, 2, 3, 4, 4, 5, 8])
    max_model_len = rng.choice([12, 20, 40, 64])
    requests = draw_requests(rng, block_size)
    longest = max(min(r.input_tokens + r.output_tokens, max_model_len) for r in requests)
    most = -(-longest // block_size)
    pool = rng.choice([most, most, most + 1, most + 2, most * 2, most * 3])
    if rng.random() < 0.05:
        pool = max(1, most - 1)
    budget = rng.choice([4, 8, 16, 32, 64])
    chunked = rng.random() < 0.85
    if not chunked:
        budget = max(budget, max_model_len)
    max_num_seqs = min(rng.choice([1, 2, 4, 8, budget]), budget)
    return (
        SchedulerConfig(
            num_gpu_blocks=1 + pool,
            block_size=block_size,
            max_num_batched_tokens=budget,
            max_num_seqs=max_num_seqs if rng.random() < 0.9 else 2 * budget,
            max_model_len=max_model_len,
            enable_prefix_caching=rng.random() < 0.8,
            enable_chunked_prefill=chunked,
            long_prefill_token_threshold=rng.choice([0, 0, 0, 2, 5, 9]),
            long_prefill_token_threshold_adaptive=rng.random() < 0.3,
            policy=rng.choice(["fcfs", "fcfs", "priority"]),
            watermark=rng.choice([0, 0, 0, 0.1, 0.25]),
            scheduler_reserve_full_isl=rng.random() < 0.7,
            max_num_active_seqs=rng.choice([None, None, max(1, max_num_seqs - 1)]),
        ),
        requests,
    )


def draw_requests(rng: Random, block_size: int) -> list[Request]:
    streams = [f"s{i}" for i in range(rng.randint(1, 3))]
    count = rng.randint(3, 24)
    requests: list[Request] = []
    arrival = 0
    for i in range(count):
        if rng.random() < 0.5:
            arrival += rng.choice([0, 0, 1, 1, 2, 5, 15])
        content: list[Segment] = []
        for _ in range(rng.randint(1, 3)):
            kind = rng.random()
            if kind < 0.5:
                start = 0 if rng.random() < 0.8 else rng.randint(0, 6)
                edges = [block_size, 2 * block_size, 3 * block_size, block_size + 1, 2 * block_size - 1]
                content.append(
                    Segment(rng.choice(streams), start, max(1, rng.choice([*edges, rng.randint(1, 12)])))
                )
            elif kind < 0.75:
                content.append(Segment(f"o:r{rng.randrange(count)}", 0, rng.randint(1, 10)))
            elif kind < 0.85 and requests:
                content += rng.choice(requests).prompt_content()
            elif kind < 0.9:
                content.append(Segment(f"p:r{rng.randrange(count)}", 0, rng.randint(1, 14)))
            else:
                content.append(Segment(f"p:r{i}", 0, rng.randint(1, 14)))
        if requests and rng.random() < 0.2:
            earlier = rng.choice(requests)
            answer = Segment(f"o:{earlier.id}", 0, rng.randint(1, earlier.output_tokens))
            content = [*earlier.prompt_content(), answer]
        requests.append(
            Request(
                f"r{i}",
                arrival,
                sum(segment.length for segment in content),
                rng.choice([1, 1, 2, 3, 5, 8, 13, 30]),
                rng.choice([0, 0, 1, 2]),
                tuple(content) if rng.random() < 0.7 else (),
            )
        )
    return requests


def draw_aborts(rng: Random, requests: list[Request]) -> list[Request]:
    """The same requests, of some of which the client goes away, before a step or in the middle of one."""
    share = rng.choice([0, 0.1, 0.3, 0.8])
    return [
        request._replace(
            abort=request.arrival + rng.choice([0, 0, 1, 1, 2, 3, 5, 8, 20]), abort_mid=rng.random() < 0.5
        )
        if rng.random() < share
        else request
        for request in requests
    ]


def compare(seed: int, *, publish_at_once: bool, skip: bool) -> Counter[str]:
    """As `compare_engines` for a random scenario."""
    config, requests = draw(Random(seed))
    return compare_engines(config, requests, publish_at_once=publish_at_once, skip=skip)


def compare_asynchronous(seed: int, *, publish_at_once: bool, skip: bool) -> Counter[str]:
    """As `compare`, with asynchronous scheduling."""
    rng = Random(seed)
    config, requests = draw(rng)
    config = replace(config, async_scheduling=True)
    return compare_engines(config, draw_aborts(rng, requests), publish_at_once=publish_at_once, skip=skip)


def compare_with_aborts(seed: int, *, publish_at_once: bool, skip: bool) -> Counter[str]:
    """As `compare`, with clients that go away."""
    rng = Random(seed)
    config, requests = draw(rng)
    return compare_engines(config, draw_aborts(rng, requests), publish_at_once=publish_at_once, skip=skip)


class Pools(Protocol):
    """How to hold the pool of the fast engine against the plain one's."""

    def compare(self, plain: VllmPlain, fast: Vllm, *, publish_at_once: bool) -> None:
        """The free queue in order by content; with ``publish_at_once`` the index with its copies too."""


def compare_engines(
    config: SchedulerConfig,
    requests: list[Request],
    *,
    publish_at_once: bool,
    skip: bool,
    pools: Pools | None = None,
) -> Counter[str]:
    """Run both engines side by side, in steps; returns how often what happened.

    ``publish_at_once`` forces the fast engine's late publishing in every turn (it must be invisible) and compares
    the index with its copies too. ``skip`` lets it take many steps in a turn. ``pools`` is for several groups.
    """
    pair = Pair(VllmPlain(config), Vllm(config))
    plain, fast = pair.plain, pair.fast
    pools = pools or OnePool(config.block_size)
    queue = list(reversed(requests))
    now = 0
    seen: Counter[str] = Counter()
    while seen["steps"] < LONGEST_RUN:
        while queue and queue[-1].arrival <= now:
            pair.add(queue.pop())
        pair.abort_before(now)
        assert plain.is_idle == fast.is_idle
        events = [*pair.aborts(), *(queue[-1:] and [queue[-1].arrival])]
        if plain.is_idle:
            if not queue:
                break
            now = queue[-1].arrival
            continue
        most = (max(1, min(events) - now) if events else LONGEST_RUN) if skip else 1
        turn, step = pair.turn(most)
        assert plain.is_livelocked == fast.is_livelocked
        assert [s.id for s in plain._outgrown] == [m.id for m in fast._outgrown]
        assert list(plain.live()) == list(fast.live())
        if not events and (plain.is_livelocked or step.is_dead):
            assert plain.why_stuck() == fast.why_stuck()
        pools.compare(plain, fast, publish_at_once=publish_at_once)
        if publish_at_once and not fast.running:
            pair.compare_contents()
        taken = turn.steps if isinstance(turn, DecodeRun) else 1
        now += taken
        seen.update(steps=taken, preemptions=len(step.preempted), skipped=taken - 1)
        seen["finished while waiting"] += len(set(step.preempted) & set(step.finished))
        if step.is_dead or plain.is_livelocked:
            if not events:
                break
            if step.is_dead:
                now = min(events)
    seen["aborted"] = pair.aborted
    return seen


class Pair:
    """Both engines, told the same."""

    def __init__(self, plain: VllmPlain, fast: Vllm) -> None:
        self.plain = plain
        self.fast = fast
        self.aborted = 0
        self._names: dict[bytes, tuple[object, ...]] = {}
        self._leaving: dict[str, Request] = {}
        self._unheard: list[str] = []

    def add(self, request: Request) -> None:
        assert self.plain.refusal(request) == self.fast.refusal(request)
        if self.plain.refusal(request) is None:
            self.plain.add(request)
            self.fast.add(request)
            if request.abort is not None:
                self._leaving[request.id] = request

    def aborts(self) -> list[int]:
        """When clients will go away whose requests are live."""
        live = {name for name, _, _ in self.plain.live()}
        return [r.abort for r in self._leaving.values() if r.abort is not None and r.id in live]

    def abort_before(self, now: int) -> None:
        """Let go of those whose clients are gone before step ``now``; of some the engines learn when they wait."""
        due = [r for r in self._leaving.values() if r.abort is not None and r.abort <= now]
        for request in sorted(due, key=lambda r: r.abort or 0):
            del self._leaving[request.id]
            if request.abort_mid:
                self._unheard.append(request.id)
            elif request.id in {name for name, _, _ in self.plain.live()}:
                assert self.plain.abort(request.id) == self.fast.abort(request.id)
                self.aborted += 1

    def compare_contents(self) -> None:
        """By what a state is told, when nobody runs: the same contents and copies, each with one name in all states."""
        pool = self.plain.pool
        theirs = [
            (content, pool.index[content].index(block))
            for block in pool.free_queue()
            if (content := pool.hashes[block]) is not None
        ]
        for (content, copies), (*name, ours) in zip(theirs, self.fast.pool.contents(), strict=True):
            assert copies == ours
            assert self._names.setdefault(content, tuple(name)) == tuple(name)
        assert len(set(self._names.values())) == len(self._names)

    def turn(self, most: int) -> tuple[Turn[Any] | DecodeRun[Any], Turn[Any]]:
        """Take the same steps in both, holding each figure against it; returns the fast turn and the last step."""
        if not self._unheard:
            turn = self.fast.turn(most)
            return turn, compare_turn(self.plain, turn)
        rows: list[list[object]] = []

        def waiting(engine: VllmPlain | Vllm) -> Callable[[Turn[Any]], None]:
            def wait(_turn: Turn[Any]) -> None:
                live = {name for name, _, _ in engine.live()}
                rows.append([engine.abort(name) for name in self._unheard if name in live])

            return wait

        turn = self.fast.turn(1, waiting(self.fast))
        step = compare_turn(self.plain, turn, waiting(self.plain))
        assert rows[:1] == rows[1:]
        if rows:
            self.aborted += len(rows[0])
            self._unheard.clear()
        return turn, step


def compare_turn(
    plain: VllmPlain, turn: Turn[Any] | DecodeRun[Any], wait: Callable[[Turn[Any]], None] | None = None
) -> Turn[Any]:
    """Let the plain engine take the same steps and hold each figure against it; returns its last step."""
    if isinstance(turn, DecodeRun):
        return compare_run(plain, turn)
    step = plain.turn(1, wait)
    assert (step.planned, step.processed, step.is_dead) == (turn.planned, turn.processed, turn.is_dead)
    for name in ("admitted", "resumed", "preempted", "finished"):
        assert [s.id for s in getattr(step, name)] == [s.id for s in getattr(turn, name)], name
    assert [(s.id, n) for s, n in step.prefix_hits] == [(s.id, n) for s, n in turn.prefix_hits]
    assert step.preemptions == turn.preemptions
    ours = {s.id: n for s, n in turn.scheduled}
    assert {s.id: n for s, n in step.scheduled if s.id in ours} == ours
    assert len(step.scheduled) == len(turn.scheduled) + turn.decoders
    sampled = {s.id for s in turn.sampled}
    assert [s.id for s in step.sampled if s.id in sampled] == [s.id for s in turn.sampled]
    for name in (*COUNTS, "evicted", "scheduled_tokens", "recomputed_tokens", "free_blocks_end"):
        assert getattr(step, name) == getattr(turn, name), name
    assert (step.behind_slots, list(step.group_blocks)) == (turn.behind_slots, list(turn.group_blocks))
    assert step.work.decodes == turn.work.decodes
    assert step.work.decode_context == turn.work.decode_context
    assert sorted(step.work.chunks) == sorted(turn.work.chunks)
    return step


COUNTS = (
    "free_blocks",
    "cached_blocks",
    "running",
    "waiting",
    "shared_blocks",
    "empty_slots",
    "reserved_slots",
)


def compare_run(plain: VllmPlain, run: DecodeRun[Any]) -> Turn[Any]:
    """As `compare_turn` for steps in which the same sequences decode."""
    evicted = 0
    for i, pool in enumerate(run.pool_after()):
        step = plain.turn()
        evicted += step.evicted
        assert [tokens for _, tokens in step.scheduled] == [1] * run.decoders
        assert not step.admitted + step.resumed + step.preempted
        if i == 0:
            assert [getattr(step, name) for name in COUNTS] == [getattr(run, name) for name in COUNTS]
            assert step.work == run.first_work
            sampled = {s.id for s in run.sampled}
            assert [s.id for s in step.sampled if s.id in sampled] == [s.id for s in run.sampled]
        assert (step.free_blocks, step.cached_blocks) == pool
        if run.levels:
            *slots, groups, shared = run.levels
            level = Level(*(column[i] for column in slots), [column[i] for column in groups])
            assert (level_of(step), step.shared_blocks) == (level, shared[i])
        assert not step.finished or i == run.steps - 1
    assert [s.id for s in step.finished] == [s.id for s in run.finished]
    assert (evicted, step.free_blocks_end) == (run.evicted, run.free_blocks_end)
    assert (step.running, step.waiting) == (run.running, run.waiting)
    return step


def level_of(step: Turn[Any]) -> Level:
    return Level(step.empty_slots, step.reserved_slots, step.behind_slots, list(step.group_blocks))


class OnePool:
    """`Pools` of one full group."""

    def __init__(self, block_size: int) -> None:
        self._hashes = Hashes(block_size)

    def compare(self, plain: VllmPlain, fast: Vllm, *, publish_at_once: bool) -> None:
        compare_pools(plain, fast, self._hashes, publish_at_once=publish_at_once)


def compare_pools(plain: VllmPlain, fast: Vllm, hashes: Hashes, *, publish_at_once: bool) -> None:
    """The free queue in order by content, and the index with its copies."""
    assert plain.pool.num_free == fast.pool.free
    if not plain.config.enable_prefix_caching:
        return
    if publish_at_once:
        publish_decoded(fast)
    queue = [plain.pool.hashes[block] for block in plain.pool.free_queue()]
    assert sum(content is None for content in queue) == fast.pool.blank
    ours = [
        hashes.at(extent, position)
        for extent in fast.pool.idle_extents()
        for position in reversed(range(extent.low, extent.high))
    ]
    assert [content for content in queue if content is not None] == ours
    check_pool(fast)
    if publish_at_once:
        copies: dict[bytes, list[int]] = {}
        for part in parts_of(fast.pool):
            for position in range(part.low, part.high):
                copies.setdefault(hashes.at(part, position), []).append(part.users)
        index = {h: [plain.pool.references[b] for b in blocks] for h, blocks in plain.pool.index.items()}
        assert copies == index
        assert plain.pool.shared == fast.pool.shared


def parts_of(pool: ExtentPool) -> list[Extent]:
    """All extents that are present."""
    return [
        part
        for found in pool.index.values()
        for part in ([found] if isinstance(found, Extent) else found.parts)
    ]


def check_pool(fast: Vllm) -> None:
    """The invariants of `ExtentPool`, and that each node, extent with an owner and holding says what is so."""
    pool = fast.pool
    idle = list(pool.idle_extents())
    assert pool.idle == sum(extent.high - extent.low for extent in idle)
    users: Counter[Extent] = Counter()
    uncached = 0
    for member in (*fast.running, *fast.waiting):
        holding = member.holding
        position = 0
        if holding.whole is not None:
            assert not holding.table
            assert holding.whole.low == 0
            position = holding.whole.high
            users[holding.whole] += 1
        for entry, end in holding.table:
            for extent in _pieces(entry, end):
                assert extent.low == position < extent.high
                position = extent.high
                users[extent] += 1
            assert position == end
        assert position == holding.cached
        uncached += -(-fast._computed(member) // fast.config.block_size) - position
    parts = parts_of(pool)
    assert {part for part in parts if not part.users} == set(idle)
    assert {part: part.users for part in parts if part.users} == users
    cached = sum(part.high - part.low for part in users)
    assert pool.free + cached + uncached == fast.config.usable_blocks
    for key, node in pool.index.items():
        if isinstance(node, Extent):
            assert node.owner is not None
            assert node.node is None
            assert node.low == 0
            assert key == node.owner.own_key
            assert node.owner.whole is (node if node.users else None)
            assert not node.owner.nodes
            assert not node.owner.table
            continue
        assert key == node.key
        assert node.parts
        positions = [p for part in node.parts for p in range(part.low, part.high)]
        parent, first, _ = spelled(node, fast.config.block_size)
        assert set(positions) == set(range(first, node.high))
        assert node.copies == len(positions) - (node.high - first)
        if not node.copies:
            assert positions == sorted(positions)
        assert parent is None or pool.index[parent.key] is parent
        assert all(part.node is node and part.owner is None for part in node.parts)


def publish_decoded(fast: Vllm) -> None:
    """Enter all that decoders have filled, which is otherwise done when it can be seen."""
    for member in fast.running:
        if member.decoding:
            holding = member.holding
            filled = (member.base + fast.cohort.step - fast._lag) // fast.config.block_size
            fast.pool.publish(holding, filled, lambda _run: None)


class Hashes:
    """The hashes of blocks by node and position, each prefix hashed once."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._of: dict[Node | Holding, list[bytes]] = {}

    def at(self, extent: Extent, position: int) -> bytes:
        of = extent.node or extent.owner
        assert of is not None
        known = self._of.get(of, [])
        if position >= len(known):
            end = position + 8
            content = (
                prefix(of, end, self.block_size)
                if isinstance(of, Node)
                else content_of(of, end, self.block_size)
            )
            known = self._of[of] = list(block_hashes(content, self.block_size))
        return known[position]


def prefix(node: Node, end: int, block_size: int) -> list[Segment]:
    """The content of the first ``end`` blocks of a node's prefix."""
    parent, first, key = spelled(node, block_size)
    before = prefix(parent, first, block_size) if parent is not None else []
    return [*before, *stretched(key, end - first, block_size)]


def spelled(node: Node, block_size: int) -> tuple[Node | None, int, tuple[Piece, ...]]:
    """A node's prefix, its place and its first block."""
    return (None, 0, ((node.key, 0, block_size),)) if isinstance(node.key, str) else node.key


def content_of(owner: Holding, end: int, block_size: int) -> list[Segment]:
    """The first ``end`` blocks of all that a sequence will have."""
    content = []
    for run in owner.runs:
        if run.first < end:
            last = end if run is owner.runs[-1] else run.end
            content += stretched(run.key, last - run.first, block_size)
    return content


def stretched(key: tuple[Piece, ...], blocks: int, block_size: int) -> list[Segment]:
    """A first block, and so many in all that go on in its last stream."""
    stream, start, length = key[-1]
    return [*(Segment(*piece) for piece in key), Segment(stream, start + length, (blocks - 1) * block_size)]
