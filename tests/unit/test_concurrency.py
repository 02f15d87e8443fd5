"""Sequences of many lengths at once: distributions against sums, windows of a trace against counted blocks."""

from __future__ import annotations

import math
from itertools import pairwise
from statistics import NormalDist

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplan.core.concurrency import (
    LogNormal,
    Sharing,
    log_normal,
    prefix_sharing,
    residents_of_equal,
    residents_of_log_normal,
    residents_of_trace,
)
from kvplan.core.content import block_hashes
from kvplan.core.kv_pool import GroupSize
from kvplan.core.request import Request, Segment
from kvplan.errors import InputError
from kvplan.lengths import sequences_of

Z95 = 1.6448536269514722


class PoolOf:
    """A pool of groups, each a kind, its block size and the most tokens that it keeps (0: all)."""

    null_blocks = 1

    def __init__(self, *groups: tuple[str, int, int]) -> None:
        self._groups = groups
        self.block_size = groups[0][1]

    def bytes_per_block(self, stage: object = None) -> int:
        return 1

    def blocks(self, length: int) -> int:
        return sum(group.blocks_per_sequence for group in self.groups(length))

    def groups(self, length: int) -> tuple[GroupSize, ...]:
        return tuple(
            GroupSize((kind,), 1, 1, size, 1, -(-min(length, most or length) // size))
            for kind, size, most in self._groups
        )

    def start_check_blocks(self, num_blocks: int) -> int:
        return num_blocks - 1

    def token_line(self, num_blocks: int, max_model_len: int) -> tuple[int, float]:
        return 0, 0.0


FULL = PoolOf(("full", 16, 0))
HYBRID = PoolOf(("full", 32, 0), ("sliding_window", 16, 100), ("mla", 64, 0))


@pytest.mark.parametrize(("mean", "p95"), [(2000, 6000), (100, 101), (500, 1900)])
def test_a_log_normal_has_the_mean_and_the_percentile_that_were_asked_for(mean: int, p95: int) -> None:
    law = log_normal(mean, p95)
    assert math.exp(law.mu + law.sigma**2 / 2) == pytest.approx(mean)
    assert math.exp(law.mu + Z95 * law.sigma) == pytest.approx(p95)
    assert law.at_most(p95) == pytest.approx(0.95)
    assert law.at_most(0) == 0


def test_its_shares_are_those_of_the_normal_distribution() -> None:
    law = LogNormal(6.0, 0.7)
    for tokens in (1, 100, 403, 5000):
        assert law.at_most(tokens) == pytest.approx(NormalDist(6.0, 0.7).cdf(math.log(tokens)))


@pytest.mark.parametrize(("mean", "p95"), [(100, 100), (100, 90), (100, 388)])
def test_where_no_log_normal_fits_the_error_says_what_would(mean: int, p95: int) -> None:
    with pytest.raises(InputError, match="no log-normal distribution") as error:
        log_normal(mean, p95)
    assert "3.87 times" in str(error.value.hint)


@pytest.mark.parametrize("pool", [FULL, HYBRID], ids=["full", "hybrid"])
@pytest.mark.parametrize(("mean", "p95"), [(60, 150), (900, 2400), (6000, 20000)])
def test_mean_and_spread_of_blocks_equal_the_sum_over_all_lengths(pool: PoolOf, mean: int, p95: int) -> None:
    law, longest = log_normal(mean, p95), 40_000
    first = second = 0.0
    for low, high in pairwise(range(longest + 1)):
        share = (1.0 if high == longest else law.at_most(high)) - law.at_most(low)
        blocks = pool.blocks(high)
        first += share * blocks
        second += share * blocks**2
    found = residents_of_log_normal(pool, 10_000, mean, p95, longest=longest)
    assert found.blocks_mean == pytest.approx(first, rel=5e-5)
    assert found.blocks_stddev == pytest.approx(math.sqrt(second - first**2), rel=1e-4)


def test_residents_of_a_log_normal_are_the_most_whose_blocks_fit() -> None:
    found = residents_of_log_normal(FULL, 5000, 1000, 2500, longest=8192, shortest=320, shared_blocks=20)
    own, free = found.blocks_mean - 20, 5000 - 20

    def needed(count: int, z: float) -> float:
        return count * own + z * math.sqrt(count) * found.blocks_stddev

    assert needed(found.concurrent_mean, 0) <= free < needed(found.concurrent_mean + 1, 0)
    assert needed(found.concurrent_p95, Z95) <= free < needed(found.concurrent_p95 + 1, Z95)
    assert found.concurrent_p95 < found.concurrent_mean


def test_equal_lengths_are_counted_exactly_with_their_prefix_once() -> None:
    # 1,000 tokens are 63 blocks; 10 of them are held once: (1,000 - 10) // 53 = 18.
    found = residents_of_equal(FULL, 1000, 1000, 10)
    assert (found.concurrent_mean, found.concurrent_p95, found.blocks_mean) == (18, 18, 63)
    assert residents_of_equal(FULL, 1000, 1000).concurrent_mean == 1000 // 63
    assert residents_of_equal(FULL, 5, 1000, 10).concurrent_mean == 0


def test_only_layers_that_keep_all_tokens_share_prefixes_in_units_that_suit_every_group() -> None:
    assert prefix_sharing(FULL) == Sharing(16, 1)
    assert prefix_sharing(FULL, 4) == Sharing(64, 1)
    # 64 tokens are 2 blocks of the first group and 1 of the last; the window's are each sequence's own.
    assert prefix_sharing(HYBRID) == Sharing(64, 3)
    assert prefix_sharing(PoolOf(("sliding_window", 16, 100))) == Sharing(16, 0)


STREAMS = st.sampled_from(["a", "b", "c"])
REQUESTS = st.lists(
    st.tuples(st.lists(st.tuples(STREAMS, st.integers(0, 3), st.integers(1, 40)), min_size=1, max_size=3)),
    min_size=1,
    max_size=12,
)


def requests(drawn: list[tuple[list[tuple[str, int, int]]]]) -> list[Request]:
    found = []
    for i, (segments,) in enumerate(drawn):
        content = tuple(Segment(stream, start, length) for stream, start, length in segments)
        found.append(Request(f"r{i}", i, sum(s.length for s in content), 3, content=content))
    return found


@given(drawn=REQUESTS, usable=st.integers(0, 60))
def test_neighbours_of_a_trace_hold_each_block_once(
    drawn: list[tuple[list[tuple[str, int, int]]]], usable: int
) -> None:
    pool = PoolOf(("full", 8, 0))
    trace = requests(drawn)
    sequences, _ = sequences_of(trace, pool.blocks, 10**6, Sharing(8, 1))
    found = residents_of_trace(sequences, usable, 1)

    def held(window: list[Request]) -> int:
        full = {digest for one in window for digest in block_hashes(one.full_content(), 8)}
        tails = sum((one.input_tokens + one.output_tokens) % 8 > 0 for one in window)
        return len(full) + tails

    counts = []
    for first in range(len(trace)):
        last = first
        while last < len(trace) and held(trace[first : last + 1]) <= usable:
            last += 1
        if last == len(trace):
            break
        counts.append(last - first)
    if counts:
        assert found.method == "trace"
        assert found.concurrent_mean == math.floor(sum(counts) / len(counts) + 1e-9)
        assert found.concurrent_p95 == sorted(counts)[max(0, math.ceil(0.05 * len(counts) - 1e-9) - 1)]
    else:
        assert found.method == "trace, extended"
        assert found.blocks_mean - found.shared_blocks == pytest.approx(held(trace) / len(trace))


def test_without_prefix_caching_a_trace_shares_nothing() -> None:
    same = (Segment("a", 0, 64),)
    trace = [Request(f"r{i}", i, 64, 0, content=same) for i in range(10)]
    shared, _ = sequences_of(trace, FULL.blocks, 10**6, Sharing(16, 1))
    alone, _ = sequences_of(trace, FULL.blocks, 10**6, Sharing(16, 0))
    assert residents_of_trace(shared, 4, 1).shared_blocks == pytest.approx(3.6)  # 4 blocks for ten of 4
    assert residents_of_trace(alone, 9, 0).concurrent_mean == 2


def test_sequences_of_a_trace_end_at_the_longest_that_is_served() -> None:
    trace = [Request("a", 0, 100, 100), Request("b", 1, 30, 10)]
    sequences, cut = sequences_of(trace, FULL.blocks, 64, Sharing(16, 1))
    assert [item.tokens for item in sequences] == [64, 40]
    assert [item.own_blocks + sum(units for _, units in item.parts) for item in sequences] == [4, 3]
    assert cut == 1
