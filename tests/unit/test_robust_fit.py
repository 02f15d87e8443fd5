"""Non-negative least squares with a robust loss."""

from __future__ import annotations

from random import Random

import pytest

from kvplan.core.robust_fit import fit_nonnegative


def test_unknowns_come_back_from_exact_rows() -> None:
    rows = [[1.0, size, 3.0 * size * size] for size in (1, 2, 3, 5, 8)]
    values = [2.0 + 0.5 * row[1] + 0.25 * row[2] for row in rows]
    assert fit_nonnegative(rows, values, [1.0] * 3, [1e-6] * 3) == pytest.approx([2.0, 0.5, 0.25], rel=1e-4)


def test_an_unknown_that_would_be_negative_is_zero() -> None:
    # Values fall with the second column: the best line has a slope below 0, the best allowed one is flat.
    rows = [[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]]
    fitted = fit_nonnegative(rows, [3.0, 2.9, 2.8], [1.0] * 2, [1e-4] * 2)
    assert fitted[1] == pytest.approx(0, abs=1e-6)
    assert fitted[0] == pytest.approx(2.9, rel=0.02)


def test_a_tenth_of_wild_rows_hardly_moves_the_rest() -> None:
    draw = Random(1)
    rows = [[1.0, draw.uniform(1, 100)] for _ in range(200)]
    values = [10 + 0.2 * row[1] for row in rows]
    wild = [value * (4 if number % 10 == 0 else 1) for number, value in enumerate(values)]
    assert fit_nonnegative(rows, wild, [1.0] * 2, [1e-4] * 2) == pytest.approx([10, 0.2], rel=0.01)


def test_what_the_rows_do_not_tell_stays_at_the_prior() -> None:
    # The third column is 0 everywhere; the first two are only known in their sum, 12, of which the prior gives 2 : 1.
    rows = [[1.0, 1.0, 0.0]] * 4
    fitted = fit_nonnegative(rows, [12.0] * 4, [6.0, 3.0, 7.0], [0.01] * 3)
    assert fitted[2] == pytest.approx(7.0)
    assert fitted[0] + fitted[1] == pytest.approx(12.0, rel=1e-3)
    assert fitted[0] > fitted[1]
