"""Sets of values: exact up to a limit, then buckets within the stated error."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplan.core.tally import _LOOSE, SKETCH_ERROR, Counts, Values

WHOLE = st.integers(0, 10**15)
COUNTS = st.integers(1, 9) | st.integers(2**20 - 2, 2**20 + 2)


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
    assert len(kept._loose) <= _LOOSE
    for first in range(1, _LOOSE + 1, 4):
        kept.add_row(first, 1, 4, 4)
    assert len(kept._loose_rows) <= _LOOSE
    found = kept.summary()
    assert (found.count, found.largest, found.percentile(50)) == (8 * _LOOSE + 4, _LOOSE, _LOOSE / 2)


@given(
    st.lists(
        st.tuples(st.integers(1, 10**13), st.integers(0, 10**10), st.integers(1, 40), COUNTS),
        min_size=1,
        max_size=8,
    ),
    st.sampled_from([20, 10**7]),
    st.integers(0, 100),
)
def test_values_that_come_in_a_row_are_those_that_come_alone(
    runs: list[tuple[int, int, int, int]], limit: int, percent: int
) -> None:
    alone, together = Counts(limit=limit), Counts(limit=limit)
    for first, growth, steps, count in runs:
        together.add_row(first, growth, steps, count)
        for step in range(steps):
            alone.add(first + growth * step, count)
    one, other = alone.summary(), together.summary()
    assert (one.count, one.total, one.largest, one.exact) == (
        other.count,
        other.total,
        other.largest,
        other.exact,
    )
    assert one.percentile(percent) == other.percentile(percent)


SMALL = st.integers(1, 60)


@given(st.lists(st.tuples(SMALL, st.integers(0, 9), st.integers(1, 12), st.integers(1, 3)), min_size=1))
def test_percentiles_are_found_with_only_their_surroundings_in_order(
    rows: list[tuple[int, int, int, int]],
) -> None:
    """Rows that lie across each other and alone, packed often and cut until a handful of values is left."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvplan.core.tally._LOOSE", 10)
        patch.setattr("kvplan.core.tally._SORTED_AT_ONCE", 3)
        kept = Counts()
        spread = []
        for first, growth, number, count in rows:
            kept.add_row(first, growth, number, count)
            kept.add(first + number)
            spread += [first + growth * step for step in range(number) for _ in range(count)]
            spread.append(first + number)
        found = kept.summary()
        assert (found.count, found.total, found.largest) == (len(spread), sum(spread), max(spread))
        for percent in (50, 99, 0, 100, 90, 7, 93):
            assert found.percentile(percent) == by_hand(spread, percent)


def test_of_nothing_there_is_no_value() -> None:
    assert (Values("d").summary().count, Counts().summary().count) == (0, 0)


@pytest.mark.parametrize(("first", "growth"), [(1, 1), (990, 1), (10**6, 37), (10**12, 10**7)])
def test_rows_beyond_the_limit_fall_into_the_buckets_of_their_values(first: int, growth: int) -> None:
    alone, together = Counts(limit=2), Counts(limit=2)
    for kept in (alone, together):
        for value in (1, 2, 3):
            kept.add(value)
        assert not kept.summary().exact  # from here on there are buckets only
    for start in range(0, 3000, 700):
        together.add_row(first + start * growth, growth, 650, 3)
        for step in range(start, start + 650):
            alone.add(first + step * growth, 3)
    one, other = alone.summary(), together.summary()
    assert (one.count, one.total, one.largest) == (other.count, other.total, other.largest)
    for percent in range(101):
        assert one.percentile(percent) == other.percentile(percent)


def test_as_many_values_as_the_limit_are_exact() -> None:
    kept = Values("q", limit=3)
    for value in (1, 2, 3):
        kept.add(value)
    assert kept.summary().exact
    kept.add(4)
    assert not kept.summary().exact


@pytest.mark.parametrize("largest", [2**63 - 2, 2**63, 10**30])
def test_numbers_beyond_64_bits_are_kept_in_buckets(largest: int) -> None:
    kept, counted, rows = Values("q"), Counts(), Counts()
    for value in (1000, largest, 2000):
        kept.add(value)
        counted.add(value)
    rows.add_row(1000, 1000, 2, 1)
    rows.add_row(largest, 0, 1, 1)
    for found in (kept.summary(), counted.summary(), rows.summary()):
        assert (found.count, found.total, found.largest) == (3, largest + 3000, largest)
        assert found.exact == (largest < 2**63)
        assert found.percentile(50) == pytest.approx(2000, rel=SKETCH_ERROR)


@pytest.mark.parametrize("largest", [2**63 - 2, 2**63])
def test_a_row_that_ends_beyond_64_bits_makes_buckets(largest: int) -> None:
    rows = Counts()
    rows.add_row(largest - 4 * 10**17, 10**17, 5, 2)
    found = rows.summary()
    assert (found.count, found.largest, found.exact) == (10, largest, largest < 2**63)
    assert found.percentile(100) == pytest.approx(largest, rel=SKETCH_ERROR)
