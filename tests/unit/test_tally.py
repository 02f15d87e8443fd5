"""Sets of values: exact up to a limit, then buckets within the stated error."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplan.core.tally import _LOOSE, SKETCH_ERROR, Counts, Values

WHOLE = st.integers(0, 10**15)


def by_hand(values: list[int], percent: int) -> float:
    """Linear interpolation between order statistics, as NumPy's default."""
    ordered = sorted(values)
    place, part = divmod(percent * (len(ordered) - 1), 100)
    high = ordered[min(place + 1, len(ordered) - 1)]
    return ordered[place] + (high - ordered[place]) * part / 100


@given(st.lists(WHOLE, min_size=1), st.integers(0, 100))
def test_values_are_exact(values: list[int], percent: int) -> None:
    kept = Values("q")
    for value in values:
        kept.add(value)
    found = kept.summary()
    assert (found.count, found.total, found.largest, found.exact) == (
        len(values),
        sum(values),
        max(values),
        True,
    )
    assert found.percentile(percent) == by_hand(values, percent)


@given(st.lists(st.tuples(WHOLE, st.integers(1, 5)), min_size=1), st.integers(0, 100))
def test_counts_are_the_values_they_stand_for(pairs: list[tuple[int, int]], percent: int) -> None:
    kept = Counts()
    for value, count in pairs:
        kept.add(value, count)
    spread = [value for value, count in pairs for _ in range(count)]
    found = kept.summary()
    assert (found.count, found.total, found.largest) == (len(spread), sum(spread), max(spread))
    assert found.percentile(percent) == by_hand(spread, percent)
    again = kept.summary()  # looking changes nothing
    assert (again.count, again.total, again.percentile(percent)) == (
        found.count,
        found.total,
        found.percentile(percent),
    )


@given(st.lists(WHOLE, min_size=20, max_size=60), st.sampled_from([0, 10, 50, 90, 99, 100]))
def test_beyond_the_limit_percentiles_are_within_the_stated_error(values: list[int], percent: int) -> None:
    kept, counted = Values("q", limit=10), Counts(limit=10)
    for value in values:
        kept.add(value)
        counted.add(value)
    for found in (kept.summary(), counted.summary()):
        assert not found.exact
        assert (found.count, found.largest) == (len(values), max(values))
        assert found.total == pytest.approx(sum(values))
        # Between two order statistics each end may be off by its own share.
        place = percent * (len(values) - 1) // 100
        ordered = sorted(values)
        low, high = ordered[place], ordered[min(place + 1, len(values) - 1)]
        assert low * (1 - SKETCH_ERROR) - 1 <= found.percentile(percent) <= high * (1 + SKETCH_ERROR) + 1


def test_much_that_was_counted_is_packed_and_stays_exact() -> None:
    kept = Counts()
    for value in range(2 * _LOOSE + 2):
        kept.add(value % (_LOOSE + 1), 2)
        kept.settle()
    assert len(kept.loose) <= _LOOSE
    found = kept.summary()
    assert (found.count, found.largest, found.percentile(50)) == (4 * _LOOSE + 4, _LOOSE, _LOOSE / 2)


def test_of_nothing_there_is_no_value() -> None:
    assert (Values("d").summary().count, Counts().summary().count) == (0, 0)
