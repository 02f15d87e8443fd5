"""Sets of values for percentiles: exact up to ten million, then by buckets with a known error.

A whole number beyond 64 bits (of picoseconds: 107 days) makes buckets of its set too.

Memory: 8 bytes for each value that came alone, 16 for each different one that came with a count, 40 for each row of
numbers equally far apart, and a few thousand buckets beyond the limit.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from functools import cached_property
from itertools import accumulate, chain
from operator import add, mul
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
#: So many numbers are held before they are packed.
_LOOSE = 1 << 15
#: A row of fewer numbers is taken apart.
_SHORT_ROW = 4
#: So many different values are put in order at once.
_SORTED_AT_ONCE = 1 << 9

#: First and last number, what each is above the one before, how many they are, and how often each of them came.
_Row = tuple[int, int, int, int, int]
#: Numbers in order, and how often each of them came.
_Part = tuple[Seq[int], Seq[int]]


class Summary:
    """A finished set: its size, sum, maximum, and percentiles by linear interpolation.

    ``at`` gives the value at a place, from 0, of all in order.
    """

    def __init__(
        self, at: Callable[[int], float], count: int, total: float, largest: float, *, exact: bool
    ) -> None:
        self._at = at
        self.count = count
        self.total = total
        self.largest = largest
        self.exact = exact

    def percentile(self, percent: int) -> float:
        """As NumPy's default: linear interpolation between order statistics.

        >>> Summary([10, 20, 20, 20].__getitem__, 4, 70, 20, exact=True).percentile(25)
        17.5
        """
        place, rest = divmod(percent * (self.count - 1), 100)
        low = self._at(place)
        return low + (self._at(place + 1) - low) * rest / 100 if rest else low


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
        self._total += (values[0] + values[-1]) * len(values) // 2 * count
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
        ends = list(accumulate(counts))
        return Summary(
            lambda place: middles[bisect_right(ends, place)],
            ends[-1],
            self._total,
            self._largest,
            exact=False,
        )


def _bucket(value: float) -> int:
    return math.floor(math.log(value) / _LOG_GROWTH)


class Values:
    """Values that come one at a time: whole numbers (``q``) or floats (``d``).

    ``add`` takes in a value, which takes several times as much memory until `pack` is called.
    """

    def __init__(self, kind: Literal["q", "d"], *, limit: int = EXACT_VALUES) -> None:
        self._loose: list[float] = []
        self.add = self._loose.append
        self._packed: array[float] = array(kind)
        self._limit = limit
        self._buckets: _Buckets | None = None

    def pack(self) -> None:
        """Pack what came since the last time."""
        loose, packed = self._loose, self._packed
        if self._buckets is None:
            try:
                packed.fromlist(loose)
            except OverflowError:
                self._to_buckets()
            else:
                loose.clear()
                if len(packed) > self._limit:
                    self._to_buckets()
        if self._buckets is not None:
            for value in loose:
                self._buckets.add(value, 1)
            loose.clear()

    def _to_buckets(self) -> None:
        self._buckets = _Buckets()
        for value in self._packed:
            self._buckets.add(value, 1)
        self._packed = array(self._packed.typecode)

    def summary(self) -> Summary:
        """The set as it is now. O(n log n)."""
        self.pack()
        if self._buckets is not None:
            return self._buckets.summary()
        ordered = array(self._packed.typecode, sorted(self._packed))  # a list holds on to four times as much
        largest = ordered[-1] if ordered else 0
        return Summary(ordered.__getitem__, len(ordered), sum(ordered), largest, exact=True)


class Counts:
    """Whole numbers from 0 on that come with counts."""

    def __init__(self, *, limit: int = EXACT_VALUES) -> None:
        self._limit = limit
        self._loose: defaultdict[int, int] = defaultdict(int)
        self._loose_rows: list[int] = []  # rows one after the other
        self._parts: list[_Part] = []
        self._rows = array("q")
        # Of what is packed.
        self._count = self._total = 0
        self._buckets: _Buckets | None = None

    def add(self, value: int, count: int = 1) -> None:
        """Take in a value that came ``count`` times."""
        if self._buckets is not None:
            self._buckets.add(value, count)
            return
        loose = self._loose
        loose[value] += count
        if len(loose) > _LOOSE:
            self._pack()

    def add_row(self, first: int, growth: int, number: int, count: int) -> None:
        """Take in so many values above 0, each ``growth`` above the one before, which came ``count`` times each."""
        if not growth:
            self.add(first, number * count)
            return
        last = first + growth * (number - 1)
        if self._buckets is not None:
            self._buckets.add_all(range(first, last + 1, growth), count)
        elif number < _SHORT_ROW:
            loose = self._loose
            for value in range(first, last + 1, growth):
                loose[value] += count
            if len(loose) > _LOOSE:
                self._pack()
        else:
            rows = self._loose_rows
            rows += (first, last, growth, number, count)
            if len(rows) > _LOOSE:
                self._pack()

    def summary(self) -> Summary:
        """The set as it is now."""
        if self._buckets is None:
            self._pack()
        if self._buckets is not None:
            return self._buckets.summary()
        largest = max(chain(self._rows[1::5], (values[-1] for values, _ in self._parts)), default=0)
        order = _PartlyOrdered(list(_rows_of(self._rows)), self._parts)
        return Summary(order.at, self._count, self._total, largest, exact=True)

    def _pack(self) -> None:
        """Pack what is loose; beyond the limits turn all there is into buckets."""
        values, rows = sorted(self._loose), self._loose_rows
        counts = [self._loose[value] for value in values]
        firsts, lasts, numbers, of_each = rows[::5], rows[1::5], rows[3::5], rows[4::5]
        in_rows = list(map(mul, numbers, of_each))
        self._count += sum(counts) + sum(in_rows)
        self._total += sum(map(mul, values, counts)) + sum(map(mul, map(add, firsts, lasts), in_rows)) // 2
        if self._count > self._limit or max(values[-1] if values else 0, max(lasts, default=0)) > _LARGEST:
            self._to_buckets()
        else:
            if values:
                self._parts.append((array("q", values), array("q", counts)))
            self._rows.extend(rows)
        self._loose.clear()
        rows.clear()

    def _to_buckets(self) -> None:
        self._buckets = buckets = _Buckets()
        for values, counts in (*self._parts, (self._loose, self._loose.values())):
            for value, count in zip(values, counts, strict=True):
                buckets.add(value, count)
        for first, last, growth, _, count in _rows_of(chain(self._rows, self._loose_rows)):
            buckets.add_all(range(first, last + 1, growth), count)
        self._parts.clear()
        self._rows = array("q")


def _rows_of(numbers: Iterable[int]) -> Iterator[_Row]:
    """The rows that lie one after the other."""
    each = iter(numbers)
    return zip(each, each, each, each, each, strict=True)


class _PartlyOrdered:
    """Rows and parts as one set, put in order only around the places that are looked at, as quickselect does.

    It lies in sections, each with the place of its first value: all values of one are below all of the next.
    """

    def __init__(self, rows: list[_Row], parts: list[_Part]) -> None:
        self._starts = [0]
        self._sections = [_Section(rows, parts)]

    def at(self, place: int) -> int:
        """The value at a place, from 0, of all in order."""
        while True:
            index = bisect_right(self._starts, place) - 1
            start, section = self._starts[index], self._sections[index]
            halves = section.halves()
            if halves is None:
                values, ends = section.ordered
                return values[bisect_right(ends, place - start)]
            self._sections[index : index + 1] = halves
            self._starts.insert(index + 1, start + halves[0].count)


class _Section:
    """Some values of a set, as rows and parts."""

    def __init__(self, rows: list[_Row], parts: list[_Part]) -> None:
        self._rows = rows
        self._parts = parts

    @property
    def count(self) -> int:
        """How many values there are."""
        in_rows = sum(number * of_each for _, _, _, number, of_each in self._rows)
        return in_rows + sum(sum(counts) for _, counts in self._parts)

    @cached_property
    def ordered(self) -> _Part:
        """The different values in order and, for each, how many there are up to it."""
        counts: defaultdict[int, int] = defaultdict(int)
        for first, last, growth, _, count in self._rows:
            for value in range(first, last + 1, growth):
                counts[value] += count
        for values, of_each in self._parts:
            for value, count in zip(values, of_each, strict=True):
                counts[value] += count
        ordered = sorted(counts)
        return ordered, list(accumulate(map(counts.__getitem__, ordered)))

    def halves(self) -> tuple[_Section, _Section] | None:
        """Two sections, cut about the middle; None if there is one value only, or few enough to put in order."""
        rows, parts = self._rows, self._parts
        numbers = chain((len(values) for values, _ in parts), (row[3] for row in rows[:_SORTED_AT_ONCE]))
        if sum(numbers) <= _SORTED_AT_ONCE:
            return None
        middles = [(first + last) // 2 for first, last, *_ in rows[:: 1 + len(rows) // 100]]
        middles += [values[len(values) // 2] for values, _ in parts]
        middle = sorted(middles)[len(middles) // 2]
        for edge in (middle, middle + 1):  # nothing may be below the first
            low, high = self._cut(edge)
            if low._rows or low._parts:
                return (low, high) if high._rows or high._parts else None
        return None

    def _cut(self, edge: int) -> tuple[_Section, _Section]:
        """What is below an edge, and what is not."""
        low_rows: list[_Row] = []
        high_rows: list[_Row] = []
        for row in self._rows:
            first, last, growth, number, count = row
            if last < edge:
                low_rows.append(row)
            elif first >= edge:
                high_rows.append(row)
            else:
                below = -((first - edge) // growth)
                low_rows.append((first, first + growth * (below - 1), growth, below, count))
                high_rows.append((first + growth * below, last, growth, number - below, count))
        low_parts: list[_Part] = []
        high_parts: list[_Part] = []
        for values, counts in self._parts:
            below = bisect_left(values, edge)
            if below:
                low_parts.append((values[:below], counts[:below]))
            if below < len(values):
                high_parts.append((values[below:], counts[below:]))
        return _Section(low_rows, low_parts), _Section(high_rows, high_parts)
