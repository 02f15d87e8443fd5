"""Sets of values for percentiles: exact up to ten million, then by buckets with a known error.

A whole number beyond 64 bits (of picoseconds: 107 days) makes buckets of its set too.

Memory: 8 bytes for each value that came alone, 16 for each different one that came with a count, and a few
thousand buckets beyond the limit.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence as Seq
from itertools import accumulate
from typing import Literal

#: Values that are kept exactly (METRICS: percentiles).
EXACT_VALUES = 10_000_000
#: A bucket ends so much above where it begins; its middle is off by half of that at most.
_BUCKET_GROWTH = 1.001
_LOG_GROWTH = math.log(_BUCKET_GROWTH)
#: How far a percentile taken from buckets may be from the exact one, as a share of it.
SKETCH_ERROR = 0.0005
#: The largest counted value that is kept exactly: there is a range up to it and an array of it.
_LARGEST = (1 << 63) - 2
#: Counted values that are held before they are packed; so few are sorted within a processor's cache.
_LOOSE = 1 << 15
#: Counts below this power of two stand in the low bits of a whole number, the value above them.
_COUNT_BITS = 20
_COUNT_MASK = (1 << _COUNT_BITS) - 1


Part = tuple[Seq[float], Seq[int]]


class Summary:
    """A finished set: its size, sum, maximum, and percentiles by linear interpolation.

    It is the union of ``parts``, each with values in order and, for each, how many there are up to it. Values of
    several parts are whole numbers.
    """

    def __init__(self, parts: list[Part], total: float, largest: float, *, exact: bool) -> None:
        self._parts = parts
        self.count = sum(ends[-1] for _, ends in parts)
        self.total = total
        self.largest = largest
        self.exact = exact

    def percentile(self, percent: int) -> float:
        """As NumPy's default: linear interpolation between order statistics. O(parts log^2 n).

        >>> Summary([([10, 20], [1, 4])], 70, 20, exact=True).percentile(25)  # of 10, 20, 20, 20
        17.5
        """
        place, rest = divmod(percent * (self.count - 1), 100)
        low = self._at(place)
        return low + (self._at(place + 1) - low) * rest / 100 if rest else low

    def _at(self, place: int) -> float:
        """The value at a place, from 0, of all in order."""
        if len(self._parts) == 1:
            ordered, ends = self._parts[0]
            return ordered[bisect_right(ends, place)]
        return bisect_right(range(int(self.largest) + 1), place, key=self._count_up_to)

    def _count_up_to(self, value: int) -> int:
        count = 0
        for ordered, ends in self._parts:
            index = bisect_right(ordered, value)
            count += ends[index - 1] if index else 0
        return count


class _Buckets:
    """Counts of values by the power of `_BUCKET_GROWTH` below them; values are 0 or more."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._edges: dict[int, int] = {}
        self._zeros = 0
        self._total: float = 0
        self._largest: float = 0

    def add(self, value: float, count: int) -> None:
        """Take in a value that came ``count`` times."""
        self._total += value * count
        self._largest = max(self._largest, value)
        if value <= 0:
            self._zeros += count
            return
        bucket = _bucket(value)
        self._counts[bucket] = self._counts.get(bucket, 0) + count

    def add_all(self, values: range, count: int) -> None:
        """Take in whole numbers above 0, in order, each of which came ``count`` times. O(buckets they fall in)."""
        self._total += sum(values) * count
        self._largest = max(self._largest, values[-1])
        counts = self._counts
        while values:
            bucket = _bucket(values[0])
            edge = self._edges.get(bucket) or self._edge_above(bucket)
            inside = len(values) if values[-1] < edge else bisect_left(values, edge)
            counts[bucket] = counts.get(bucket, 0) + count * inside
            values = values[inside:]

    def _edge_above(self, bucket: int) -> int:
        """The least whole number above a bucket."""
        edge = max(1, int(math.exp((bucket + 1) * _LOG_GROWTH)))
        while _bucket(edge) <= bucket:
            edge += 1
        while edge > 1 and _bucket(edge - 1) > bucket:
            edge -= 1
        self._edges[bucket] = edge
        return edge

    def summary(self) -> Summary:
        """The set, each value at its bucket's middle."""
        buckets = sorted(self._counts)
        middles = [math.exp((bucket + 0.5) * _LOG_GROWTH) for bucket in buckets]
        counts = [self._counts[bucket] for bucket in buckets]
        if self._zeros:
            middles, counts = [0.0, *middles], [self._zeros, *counts]
        return Summary([(middles, list(accumulate(counts)))], self._total, self._largest, exact=False)


def _bucket(value: float) -> int:
    return math.floor(math.log(value) / _LOG_GROWTH)


class Values:
    """Values that come one at a time: whole numbers (``q``) or floats (``d``)."""

    def __init__(self, kind: Literal["q", "d"], *, limit: int = EXACT_VALUES) -> None:
        self._values: array[float] = array(kind)
        self._limit = limit
        self._buckets: _Buckets | None = None

    def add(self, value: float) -> None:
        """Take in a value."""
        if self._buckets is not None:
            self._buckets.add(value, 1)
            return
        try:
            self._values.append(value)
        except OverflowError:
            self._to_buckets().add(value, 1)
        if len(self._values) > self._limit:
            self._to_buckets()

    def _to_buckets(self) -> _Buckets:
        self._buckets = buckets = _Buckets()
        for value in self._values:
            buckets.add(value, 1)
        self._values = array(self._values.typecode)
        return buckets

    def summary(self) -> Summary:
        """The set as it is now. O(n log n)."""
        if self._buckets is not None:
            return self._buckets.summary()
        if not self._values:
            return Summary([], 0, 0, exact=True)
        ordered = array(self._values.typecode, sorted(self._values))
        parts: list[Part] = [(ordered, range(1, len(ordered) + 1))]
        return Summary(parts, sum(ordered), ordered[-1], exact=True)


class Counts:
    """Whole numbers from 0 on that come with counts."""

    def __init__(self, *, limit: int = EXACT_VALUES) -> None:
        self._limit = limit
        self._loose: dict[int, int] = {}
        self._ranges: list[int] = []  # of `add_all`: each value with its count in the low bits
        self._packed: list[tuple[array[int], array[int]]] = []  # values in order, and their counts
        self._num_packed = 0
        self._total = 0
        self._buckets: _Buckets | None = None

    def add(self, value: int, count: int = 1) -> None:
        """Take in a value that came ``count`` times."""
        if self._buckets is not None:
            self._buckets.add(value, count)
            return
        self._total += value * count
        loose = self._loose
        loose[value] = loose.get(value, 0) + count
        if len(loose) > _LOOSE:
            self._pack_loose()

    def add_all(self, values: range, count: int) -> None:
        """Take in growing values above 0, each of which came ``count`` times. O(values), at C speed."""
        if self._buckets is not None:
            self._buckets.add_all(values, count)
        elif count > _COUNT_MASK:
            for value in values:
                self.add(value, count)
        else:
            bits = _COUNT_BITS
            self._total += len(values) * (values[0] + values[-1]) // 2 * count
            self._ranges += range(values.start << bits | count, values.stop << bits, values.step << bits)
            if len(self._ranges) > _LOOSE:
                self._pack_ranges()

    def summary(self) -> Summary:
        """The set as it is now."""
        self._pack_loose()
        self._pack_ranges()
        if self._buckets is not None:
            return self._buckets.summary()
        largest = max((values[-1] for values, _ in self._packed), default=0)
        parts: list[Part] = [(values, list(accumulate(counts))) for values, counts in self._packed]
        return Summary(parts, self._total, largest, exact=True)

    def _pack_loose(self) -> None:
        values = sorted(self._loose)
        counts = array("q", map(self._loose.__getitem__, values))
        self._loose.clear()
        self._pack(values, counts)

    def _pack_ranges(self) -> None:
        ordered = sorted(self._ranges)
        self._ranges.clear()
        values = [both >> _COUNT_BITS for both in ordered]
        self._pack(values, array("q", [both & _COUNT_MASK for both in ordered]))

    def _pack(self, values: list[int], counts: array[int]) -> None:
        """Add values in order with their counts; beyond the limits turn all there is into buckets."""
        if not values:
            return
        self._num_packed += sum(counts)
        if self._buckets is None and self._num_packed <= self._limit and values[-1] <= _LARGEST:
            self._packed.append((array("q", values), counts))
            return
        packed, self._packed = self._packed, []
        if self._buckets is None:
            self._buckets = _Buckets()
        for some, of_each in (*packed, (values, counts)):
            for value, count in zip(some, of_each, strict=True):
                self._buckets.add(value, count)
