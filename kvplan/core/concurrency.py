"""How many sequences of different lengths are resident at once, with the prefixes that they have in common.

Lengths are tokens of whole sequences, prompt and output; each sequence counts with the blocks of its full length, so
the figures hold when all are about to finish.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

from kvplan.core.kv_cache import KINDS, WHOLE
from kvplan.core.kv_pool import Pool
from kvplan.errors import InputError

#: The 95th percentile of the standard normal distribution.
Z95 = 1.6448536269514722
#: Blocks up to which each is a cell of its own, and the share by which cells grow from there on.
_SINGLE_BLOCKS = 250
_CELL_GROWTH = 0.005
#: Cells that are less likely than this are left out.
_NEGLIGIBLE = 1e-13
#: A quotient may miss a whole number by rounding.
_ROUNDING = 1e-9
_KINDS_OF_ALL_TOKENS = frozenset(name for name, kind in KINDS.items() if kind in WHOLE)


@dataclass(frozen=True, slots=True)
class Residents:
    """The ``distribution`` block: how many sequences of these lengths are resident at once.

    ``concurrent_mean`` are on average, ``concurrent_p95`` with 95 % confidence. ``blocks_mean`` is what a sequence
    takes alone; ``shared_blocks`` of them, on average, another resident sequence holds already.
    """

    method: Literal["log-normal", "trace", "trace, extended", "equal lengths"]
    mean_tokens: float
    p95_tokens: float
    blocks_mean: float
    blocks_stddev: float
    concurrent_mean: int
    concurrent_p95: int
    shared_blocks: float


class LogNormal(NamedTuple):
    """Lengths whose logarithm is normal, with mean ``mu`` and standard deviation ``sigma`` above 0."""

    mu: float
    sigma: float

    def at_most(self, tokens: int) -> float:
        """The share of sequences with so many tokens or fewer."""
        if tokens <= 0:
            return 0.0
        return 0.5 * math.erfc((self.mu - math.log(tokens)) / self.sigma / math.sqrt(2))


def log_normal(mean: float, p95: float) -> LogNormal:
    """The log-normal distribution with this mean and this 95th percentile; raises `InputError` where there is none.

    mean = exp(mu + sigma^2 / 2) and p95 = exp(mu + z sigma) with z = 1.645 (Johnson, Kotz and Balakrishnan,
    Continuous Univariate Distributions 1, chapter 14), so sigma^2 / 2 - z sigma + ln(p95 / mean) = 0; the smaller
    root. There is a root as long as p95 / mean is at most exp(z^2 / 2) = 3.87.
    """
    ratio = math.log(p95 / mean)
    root = Z95**2 - 2 * ratio
    if ratio <= 0 or root < 0:
        raise InputError(
            f"no log-normal distribution has mean {mean:,.10g} and 95th percentile {p95:,.10g}",
            where="--lengths",
            hint=f"give a percentile above the mean and at most {math.exp(Z95**2 / 2):.2f} times it, or --trace",
        )
    sigma = Z95 - math.sqrt(root)
    return LogNormal(math.log(mean) - sigma**2 / 2, sigma)


class Sharing(NamedTuple):
    """What sequences with equal prefixes hold together: ``blocks`` for every ``unit`` tokens of the prefix."""

    unit: int
    blocks: int


def prefix_sharing(pool: Pool, decode_context_parallel_size: int = 1) -> Sharing:
    """How prefixes are shared by a pool whose prefix cache is on.

    A hit is a multiple of every group's block (vLLM v1/core/kv_cache_coordinator.py); only layers that keep all
    tokens still hold the prefix when a sequence is long, windows and states are each sequence's own.
    """
    groups = pool.groups(1)
    unit = math.lcm(*(group.block_size for group in groups))
    whole = [group for group in groups if _KINDS_OF_ALL_TOKENS.issuperset(group.kinds)]
    return Sharing(
        unit=unit * decode_context_parallel_size, blocks=sum(unit // group.block_size for group in whole)
    )


def residents_of_equal(pool: Pool, usable_blocks: int, tokens: int, shared_blocks: int = 0) -> Residents:
    """Sequences of one length, ``shared_blocks`` of which they all hold together."""
    blocks = pool.blocks(tokens)
    own = blocks - shared_blocks
    count = max(0, usable_blocks - shared_blocks) // own if own else 0
    return Residents("equal lengths", tokens, tokens, blocks, 0.0, count, count, shared_blocks)


def residents_of_log_normal(
    pool: Pool,
    usable_blocks: int,
    mean: float,
    p95: float,
    *,
    longest: int,
    shortest: int = 1,
    shared_blocks: int = 0,
) -> Residents:
    """Sequences of log-normal length, cut to ``shortest .. longest``, that hold ``shared_blocks`` together.

    The blocks of n sequences are taken as normal: n times the mean, and the root of n times the standard deviation.
    Raises `InputError` as `log_normal` does.
    """
    blocks, stddev = _block_moments(pool, log_normal(mean, p95), shortest, longest)
    free = usable_blocks - shared_blocks
    own = blocks - shared_blocks
    return Residents(
        method="log-normal",
        mean_tokens=mean,
        p95_tokens=p95,
        blocks_mean=blocks,
        blocks_stddev=stddev,
        concurrent_mean=_most(free, own, stddev, 0.0),
        concurrent_p95=_most(free, own, stddev, Z95),
        shared_blocks=shared_blocks,
    )


class SequenceBlocks(NamedTuple):
    """A sequence of a trace: its tokens, blocks that are its own, and ``(node, units)`` of what can be shared.

    Nodes are the runs of equal content of a prefix tree; a sequence holds the first ``units`` of each of its nodes.
    """

    tokens: int
    own_blocks: int
    parts: tuple[tuple[int, int], ...]


def residents_of_trace(
    sequences: Sequence[SequenceBlocks], usable_blocks: int, blocks_per_unit: int
) -> Residents:
    """Neighbours of a trace that are resident at once, counted: from each sequence on, as many as the pool takes.

    The mean of these counts, and the count that 95 % of them reach. Where the pool takes the whole trace there is
    nothing to count, and more of the same is reckoned as in `residents_of_log_normal`, with what the trace shares.
    O(sequences and parts).
    """
    window = _Window(sequences, blocks_per_unit)
    counts: list[int] = []
    saved = 0.0
    last = -1
    for first in range(len(sequences)):
        while window.blocks <= usable_blocks and last + 1 < len(sequences):
            last += 1
            window.add(last)
        if window.blocks <= usable_blocks:
            break
        counts.append(last - first)
        saved += (window.unshared_blocks - window.blocks) / (last - first + 1)
        window.remove(first)
    alone = [item.own_blocks + blocks_per_unit * sum(units for _, units in item.parts) for item in sequences]
    mean = sum(alone) / len(alone)
    stddev = math.sqrt(sum((blocks - mean) ** 2 for blocks in alone) / len(alone))
    lengths = sorted(item.tokens for item in sequences)
    if counts:
        shared = saved / len(counts)
        on_average = int(sum(counts) / len(counts) + _ROUNDING)
        confident = sorted(counts)[_rank(len(counts), 0.05)]
    else:
        shared = mean - window.blocks / len(sequences)
        on_average = _most(usable_blocks, mean - shared, stddev, 0.0)
        confident = _most(usable_blocks, mean - shared, stddev, Z95)
    return Residents(
        method="trace" if counts else "trace, extended",
        mean_tokens=sum(lengths) / len(lengths),
        p95_tokens=lengths[_rank(len(lengths), 0.95)],
        blocks_mean=mean,
        blocks_stddev=stddev,
        concurrent_mean=on_average,
        concurrent_p95=confident,
        shared_blocks=shared,
    )


def _rank(count: int, share: float) -> int:
    """Where the nearest-rank percentile stands among ``count`` sorted values."""
    return max(0, math.ceil(share * count - _ROUNDING) - 1)


def _most(free: float, mean: float, stddev: float, z: float) -> int:
    """The most sequences n with n x mean + z x stddev x sqrt(n) <= free."""
    if free <= 0 or mean <= 0:
        return 0
    spread = z * stddev
    root = (math.sqrt(spread**2 + 4 * mean * free) - spread) / (2 * mean)
    return int(root**2 * (1 + _ROUNDING) + _ROUNDING)


def _block_moments(pool: Pool, law: LogNormal, shortest: int, longest: int) -> tuple[float, float]:
    """Mean and standard deviation of the blocks of a sequence.

    Lengths are cut into cells that end where a block does. Within a block the count is constant, so cells of one
    block are exact; longer ones, of 0.5 % of the length, take the mean of their ends.
    """
    step = math.gcd(*(group.block_size for group in pool.groups(longest))) or 1
    last = pool.blocks(longest)
    cut_off = 1.0 - law.at_most(longest)
    mean, square = cut_off * last, cut_off * last**2
    for low, high in pairwise(_edges(step, shortest, longest)):
        share = law.at_most(high) - (0.0 if low < shortest else law.at_most(low))
        if share < _NEGLIGIBLE:
            continue
        blocks: float = pool.blocks(high)
        if high - low > step:
            blocks = (pool.blocks(low + 1) + blocks) / 2
        mean += share * blocks
        square += share * blocks**2
    return mean, math.sqrt(max(0.0, square - mean**2))


def _edges(step: int, shortest: int, longest: int) -> Iterator[int]:
    """Lengths at which cells end, from below the shortest to the longest."""
    yield shortest - 1
    block = (shortest - 1) // step
    while True:
        block += max(1, int(block * _CELL_GROWTH)) if block >= _SINGLE_BLOCKS else 1
        if block * step >= longest:
            break
        yield block * step
    yield longest


class _Window:
    """Neighbours of a trace: their blocks, each counted once.

    Sequences come and go in order, so the most units that a node has are the head of a queue in which a later entry
    pushes out the smaller ones before it.
    """

    def __init__(self, sequences: Sequence[SequenceBlocks], blocks_per_unit: int) -> None:
        self._sequences = sequences
        self._blocks_per_unit = blocks_per_unit
        self._nodes: dict[int, deque[tuple[int, int]]] = {}
        self._own = 0
        self._units = 0
        self._unshared_units = 0

    @property
    def blocks(self) -> int:
        """Blocks that the sequences hold."""
        return self._own + self._units * self._blocks_per_unit

    @property
    def unshared_blocks(self) -> int:
        """Blocks that they would hold if they shared nothing."""
        return self._own + self._unshared_units * self._blocks_per_unit

    def add(self, index: int) -> None:
        """Let the next sequence in."""
        sequence = self._sequences[index]
        self._own += sequence.own_blocks
        for node, units in sequence.parts:
            queue = self._nodes.setdefault(node, deque())
            before = queue[0][1] if queue else 0
            while queue and queue[-1][1] <= units:
                queue.pop()
            queue.append((index, units))
            self._units += queue[0][1] - before
            self._unshared_units += units

    def remove(self, index: int) -> None:
        """Let the oldest sequence go."""
        sequence = self._sequences[index]
        self._own -= sequence.own_blocks
        for node, units in sequence.parts:
            self._unshared_units -= units
            queue = self._nodes[node]
            if queue[0][0] == index:
                self._units -= queue.popleft()[1]
                self._units += queue[0][1] if queue else 0
            if not queue:
                del self._nodes[node]
