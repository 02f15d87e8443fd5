"""Sets of values for percentiles: exact up to ten million, then by buckets with a known error.

Memory: 8 bytes for each value that came alone, 16 for each different one that came with a count, and a few
thousand buckets beyond the limit.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from heapq import merge
from itertools import accumulate
from typing import Literal

#: Values that are kept exactly (METRICS: percentiles).
EXACT_VALUES = 10_000_000
#: A bucket ends so much above where it begins; its middle is off by half of that at most.
_BUCKET_GROWTH = 1.001
_LOG_GROWTH = math.log(_BUCKET_GROWTH)
#: How far a percentile taken from buckets may be from the exact one, as a share of it.
SKETCH_ERROR = 0.0005
#: Different counted values that a dictionary holds before they are packed.
_LOOSE = 1 << 17


class Summary:
    """A finished set: its size, sum, maximum, and percentiles by linear interpolation."""

    def __init__(
        self, ordered: Seq[float], ends: Seq[int], total: float, largest: float, *, exact: bool
    ) -> None:
        """The i-th of ``ordered`` stands at places ``ends[i-1] .. ends[i]-1`` of the sorted values."""
        self._ordered = ordered
        self._ends = ends
        self.total = total
        self.largest = largest
        self.exact = exact

    @property
    def count(self) -> int:
        """Values in all."""
        return self._ends[-1] if self._ends else 0

    def percentile(self, percent: int) -> float:
        """As NumPy's default: linear interpolation between order statistics. O(log n)."""
        return percentile(self._ordered, self._ends, percent)


def percentile(ordered: Seq[float], ends: Seq[int], percent: int) -> float:
    """The percentile by linear interpolation between order statistics, as NumPy's default.

    ``ordered[i]`` stands at places ``ends[i-1] .. ends[i]-1`` of the sorted values. O(log n).

    >>> percentile([10, 20], [1, 4], 25)  # of 10, 20, 20, 20
    17.5
    """
    place, part = divmod(percent * (ends[-1] - 1), 100)
    low = ordered[bisect_right(ends, place)]
    if not part:
        return low
    high = ordered[bisect_right(ends, place + 1)]
    return low + (high - low) * part / 100


class _Buckets:
    """Counts of values by the power of `_BUCKET_GROWTH` below them; values are 0 or more."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
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
        bucket = math.floor(math.log(value) / _LOG_GROWTH)
        self._counts[bucket] = self._counts.get(bucket, 0) + count

    def summary(self) -> Summary:
        """The set, each value at its bucket's middle."""
        buckets = sorted(self._counts)
        middles = [math.exp((bucket + 0.5) * _LOG_GROWTH) for bucket in buckets]
        counts = [self._counts[bucket] for bucket in buckets]
        if self._zeros:
            middles, counts = [0.0, *middles], [self._zeros, *counts]
        return Summary(middles, list(accumulate(counts)), self._total, self._largest, exact=False)


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
        self._values.append(value)
        if len(self._values) > self._limit:
            self._buckets = _Buckets()
            for one in self._values:
                self._buckets.add(one, 1)
            self._values = array(self._values.typecode)

    def summary(self) -> Summary:
        """The set as it is now. O(n log n)."""
        if self._buckets is not None:
            return self._buckets.summary()
        ordered = sorted(self._values)
        largest = ordered[-1] if ordered else 0
        return Summary(ordered, range(1, len(ordered) + 1), sum(ordered), largest, exact=True)


class Counts:
    """Whole numbers that come with counts. ``loose`` may be added to from outside, then `settle` looks at it."""

    def __init__(self, *, limit: int = EXACT_VALUES) -> None:
        self.loose: dict[int, int] = {}
        self._limit = limit
        self._packed_values = array("q")
        self._packed_counts = array("q")
        self._packed = 0
        self._buckets: _Buckets | None = None

    def add(self, value: int, count: int = 1) -> None:
        """Take in a value that came ``count`` times."""
        self.loose[value] = self.loose.get(value, 0) + count

    def settle(self) -> None:
        """Pack what has come if it is much. Call it now and then: O(1) unless it packs."""
        if len(self.loose) > max(_LOOSE, len(self._packed_values) // 2):
            self._pack()

    def summary(self) -> Summary:
        """The set as it is now."""
        self._pack()
        if self._buckets is not None:
            return self._buckets.summary()
        values, counts = self._packed_values, self._packed_counts
        total = sum(value * count for value, count in zip(values, counts, strict=True))
        return Summary(values, list(accumulate(counts)), total, values[-1] if values else 0, exact=True)

    def _pack(self) -> None:
        self._packed += sum(self.loose.values())
        if self._buckets is None and self._packed > self._limit:
            self._buckets = _Buckets()
            for value, count in zip(self._packed_values, self._packed_counts, strict=True):
                self._buckets.add(value, count)
            self._packed_values, self._packed_counts = array("q"), array("q")
        if self._buckets is not None:
            for value, count in self.loose.items():
                self._buckets.add(value, count)
        else:
            self._merge(sorted(self.loose.items()))
        self.loose.clear()

    def _merge(self, new: Iterable[tuple[int, int]]) -> None:
        """Merge sorted pairs into the packed ones. O(both)."""
        values, counts = array("q"), array("q")
        for value, count in merge(zip(self._packed_values, self._packed_counts, strict=True), new):
            if values and values[-1] == value:
                counts[-1] += count
            else:
                values.append(value)
                counts.append(count)
        self._packed_values, self._packed_counts = values, counts
