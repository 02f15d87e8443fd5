"""Small random runs with full and sliding-window groups, of equal and unequal blocks, and the pools of both engines.

As in `random_scenarios`; windows of a few blocks and less than one, groups in any order, pools in which windows decide
whether all fits.
"""

from __future__ import annotations

from collections import Counter
from math import gcd
from random import Random

from random_scenarios import draw_aborts, draw_requests

from kvplan.core.content import block_hashes
from kvplan.core.engine import GroupSpec, SchedulerConfig
from kvplan.core.engines.group_blocks import GroupBlocks
from kvplan.core.engines.vllm import Vllm
from kvplan.core.engines.vllm_plain import VllmPlain
from kvplan.core.request import Request, Segment
from kvplan.core.window_blocks import Span, WindowPool, keyed_runs


def draw_grouped(rng: Random) -> tuple[SchedulerConfig, list[Request]]:
    """A configuration and its requests, in order of arrival, some of which are aborted."""
    groups = draw_specs(rng)
    sizes = [group.block_size or 1 for group in groups]
    max_model_len = rng.choice([12, 20, 40, 64])
    requests = draw_requests(rng, rng.choice(sizes))
    longest = max(min(r.input_tokens + r.output_tokens, max_model_len) for r in requests)
    budget = rng.choice([4, 8, 16, 32, 64])
    chunked = rng.random() < 0.85
    if not chunked:
        budget = max(budget, max_model_len)
    max_num_seqs = min(rng.choice([1, 2, 4, 8, budget]), budget)
    whole = sum(-(-longest // size) for size in sizes)
    within = sum(
        -(-min(longest, group.window + 8 if group.window else longest) // size)
        for group, size in zip(groups, sizes, strict=True)
    )
    config = SchedulerConfig(
        num_gpu_blocks=1
        + rng.choice([whole, whole + 3, 2 * whole, 3 * whole, within, within + 2, 2 * within]),
        block_size=min(sizes),
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
        groups=groups,
        async_scheduling=rng.random() < 0.5,
    )
    return config, draw_aborts(rng, requests) if rng.random() < 0.3 else requests


def draw_specs(rng: Random) -> tuple[GroupSpec, ...]:
    """Full and sliding groups in any order, with at least one window, or full groups of unequal blocks."""
    smallest = rng.choice([1, 2, 2, 3, 4])
    unequal = rng.random() < 0.5
    specs: list[GroupSpec] = []
    for number in range(rng.choice([1, 2, 2, 2, 3])):
        size = smallest * rng.choice([1, 1, 1, 2, 2, 3, 4]) if unequal else smallest
        window = rng.choice([2, 3, 4, 5, 6, 7, 9, 12, 17])
        is_full = rng.random() < (0.8 if number == 0 else 0.1)
        spec = GroupSpec("full", size) if is_full else GroupSpec("sliding", size, window)
        copies = [spec] * rng.choice([1, 1, 1, 2, 3])
        if rng.random() < 0.2:  # a group that has fewer layers than the others is padded
            copies[-1] = spec._replace(payload=size)
        specs += copies
    if len(specs) == 1:
        specs.append(GroupSpec("sliding", smallest, rng.choice([2, 5, 9])))
    rng.shuffle(specs)
    return tuple(specs)


def draw_nested(rng: Random) -> tuple[SchedulerConfig, list[Request]]:
    """Prompts that begin alike and end anywhere, some with an answer that is still being generated; two windows.

    What windows of unequal width still have of a prefix then differs, so that a hit takes several rounds to find. Some
    requests are aborted.
    """
    smallest = rng.choice([1, 1, 2, 4])
    unequal = smallest < 4 and rng.random() < 0.5
    groups = [
        GroupSpec("full", smallest),
        GroupSpec("sliding", smallest * (4 if unequal else 1), rng.choice([2, 3, 5])),
        GroupSpec("sliding", smallest, rng.choice([4, 7, 12])),
    ]
    rng.shuffle(groups)
    requests: list[Request] = []
    arrival = 0
    for number in range(rng.randint(8, 24)):
        arrival += rng.choice([0, 1, 1, 3, 9])
        content = (Segment("s", 0, rng.randint(2, 30)),)
        if requests and rng.random() < 0.4:
            earlier = rng.choice(requests)
            answer = Segment(f"o:{earlier.id}", 0, rng.randint(1, earlier.output_tokens))
            content = (*earlier.content[:2], answer)
        length = sum(segment.length for segment in content)
        requests.append(Request(f"r{number}", arrival, length, rng.choice([1, 2, 5, 12]), 0, content))
    budget = rng.choice([8, 16, 64])
    config = SchedulerConfig(
        num_gpu_blocks=1 + rng.choice([40, 60, 90, 140]) // smallest + 24,
        block_size=smallest,
        max_num_batched_tokens=budget,
        max_num_seqs=rng.choice([1, 2, 4, 8]),
        max_model_len=64,
        groups=tuple(groups),
        async_scheduling=rng.random() < 0.4,
    )
    return config, draw_aborts(rng, requests) if rng.random() < 0.3 else requests


class GroupPools:
    """The pools of both engines, told apart by content."""

    def __init__(self, config: SchedulerConfig, requests: list[Request]) -> None:
        self._hashes: dict[tuple[int, bytes, int], bytes] = {}
        sizes = [config.block_size_of(group) for group in config.groups]
        unit = gcd(*sizes)
        for request in requests if config.enable_prefix_caching else ():
            content = request.full_content()
            hashes = list(block_hashes(content, unit))
            for group, size in enumerate(sizes):
                label = group.to_bytes(2, "big") if len(sizes) > 1 else b""
                for run in keyed_runs(content, size):
                    for block in range(run.first, run.end):
                        of_block = label + hashes[(block + 1) * size // unit - 1]
                        assert self._hashes.setdefault((group, run.key, block), of_block) == of_block

    def compare(self, plain: VllmPlain, fast: Vllm, *, publish_at_once: bool) -> None:
        """The free queue in order by content; with ``publish_at_once`` the index with its copies too."""
        blocks, pool = fast.blocks, fast.pool
        assert isinstance(blocks, GroupBlocks)
        assert isinstance(pool, WindowPool)
        if publish_at_once:
            for member in fast.running:
                if member.decoding:
                    known = member.base + fast.cohort.step - blocks.lag
                    blocks.publish(member, known, is_alone=True)
        queue = [plain.pool.hashes[block] for block in plain.pool.free_queue()]
        assert sum(content is None for content in queue) == pool.blank
        ours = [found for span in pool.idle_spans() for found in reversed(self._names(pool, span))]
        assert [content for content in queue if content is not None] == ours
        check_tables(fast, blocks, pool)
        if publish_at_once:
            copies: dict[bytes, list[int]] = {}
            for span in spans_of(pool):
                for name in self._names(pool, span):
                    copies.setdefault(name, []).append(span.users)
            index = {h: [plain.pool.references[b] for b in found] for h, found in plain.pool.index.items()}
            assert copies == index

    def _names(self, pool: WindowPool, span: Span) -> list[bytes]:
        assert span.chain is not None
        group = pool.shelves.index(span.chain.shelf)
        return [self._hashes[group, span.chain.key, block] for block in range(span.low, span.high)]


def spans_of(pool: WindowPool) -> list[Span]:
    return [span for shelf in pool.shelves for chain in shelf.chains.values() for span in chain.spans]


def check_tables(fast: Vllm, blocks: GroupBlocks, pool: WindowPool) -> None:
    """The invariants of `WindowPool`, and that tables and sums say what is so."""
    users: Counter[Span] = Counter()
    used = [0] * len(pool.shelves)
    for member in (*fast.running, *fast.waiting):
        tables = member.holding
        tokens = member.base + fast.cohort.step if member.decoding else tables.slots
        for kind in blocks.kinds:
            dropped = tables.dropped[kind.number]
            if member.decoding and tables.on_period[kind.number]:
                dropped = kind.skip(member.base + fast.cohort.step - 1 - blocks.lag)
            for group in kind.groups:
                used[group] += -(-tokens // kind.block_size) - dropped
                place = dropped
                for entry, end in tables.spans[group]:
                    assert entry.low >= place
                    for span in pieces(entry, end):
                        assert span.low < span.high
                        assert span.chain is not None
                        assert span.chain.shelf is pool.shelves[group]
                        users[span] += 1
                        place = span.high
                    assert place == end
    idle = list(pool.idle_spans())
    spans = spans_of(pool)
    assert {span for span in spans if not span.users} == set(idle)
    assert {span: span.users for span in spans if span.users} == users
    assert pool.idle == sum(span.high - span.low for span in idle)
    for span, count in users.items():
        assert span.chain is not None
        used[pool.shelves.index(span.chain.shelf)] -= (count - 1) * (span.high - span.low)
    assert used == [shelf.used for shelf in pool.shelves]
    assert pool.free + sum(used) == fast.config.usable_blocks
    assert pool.shared == sum(span.high - span.low for span, count in users.items() if count > 1)
    for shelf in pool.shelves:
        for key, chain in shelf.chains.items():
            assert chain.key == key
            assert chain.spans
            if not chain.overlap:
                assert all(a.high <= b.low for a, b in zip(chain.spans, chain.spans[1:], strict=False))


def pieces(span: Span, end: int) -> list[Span]:
    found = [span]
    while found[-1].high < end:
        rest = found[-1].rest
        assert rest is not None
        assert rest.low == found[-1].high
        found.append(rest)
    return found
