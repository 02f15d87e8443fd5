"""Non-negative least squares with a robust loss, for a handful of unknowns."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

Row = Sequence[float]
Matrix = list[list[float]]

#: Huber's constant: 95 % as good as least squares where errors are normal (Huber, Robust Statistics, 1981).
_HUBER = 1.345
#: Standard deviation of a normal distribution over its median absolute deviation.
_NORMAL = 1.4826
_MOST_ROUNDS = 50
#: A gradient so small, as a share of the largest, is none; so is an unknown.
_NEGLIGIBLE = 1e-10


def fit_nonnegative(rows: Sequence[Row], values: Sequence[float], prior: Row, strengths: Row) -> list[float]:
    """Unknowns ``x >= 0`` with ``rows . x`` near ``values``, relative to each value, by iterated weights.

    Rows whose error is large beside the others' count less (Huber's loss), so that a few bad measurements do not move
    the rest. Each unknown is held to its ``prior`` by a term ``strength * (x / prior - 1)`` for each row there is,
    which decides where the rows do not: unknowns that no row depends on stay there. Values and priors are above 0.
    O(rounds * (rows * n^2 + n^4)) for n unknowns.
    """
    scaled = [
        [item * start / value for item, start in zip(row, prior, strict=True)]
        for row, value in zip(rows, values, strict=True)
    ]
    ridge = [strength * strength * len(rows) for strength in strengths]
    weights = [1.0] * len(scaled)
    share = [1.0] * len(prior)
    for _ in range(_MOST_ROUNDS):
        before = share
        share = _least_squares(*_normal_equations(scaled, weights, ridge))
        errors = [abs(_dot(row, share) - 1) for row in scaled]
        edge = _HUBER * _NORMAL * median(errors)
        weights = [1.0 if error <= edge else edge / error for error in errors]
        if max(abs(new - old) for new, old in zip(share, before, strict=True)) < 1e-6:
            break
    return [factor * start for factor, start in zip(share, prior, strict=True)]


def _normal_equations(rows: Sequence[Row], weights: Row, ridge: Row) -> tuple[Matrix, list[float]]:
    """Left and right side of the weighted least-squares problem whose values, and whose priors, are all 1."""
    size = len(ridge)
    left = [[ridge[i] if i == j else 0.0 for j in range(size)] for i in range(size)]
    right = list(ridge)
    for row, weight in zip(rows, weights, strict=True):
        for i, item in enumerate(row):
            right[i] += weight * item
            for j in range(i + 1):
                left[i][j] += weight * item * row[j]
    for i in range(size):
        for j in range(i):
            left[j][i] = left[i][j]
    return left, right


def _least_squares(left: Matrix, right: list[float]) -> list[float]:
    """The ``x >= 0`` that minimises ``x . left x / 2 - right . x`` (Lawson and Hanson, 1974, algorithm NNLS)."""
    size = len(right)
    free: set[int] = set()
    x = [0.0] * size
    largest = max(map(abs, right), default=0.0)
    for _ in range(3 * size):
        gradient = [right[i] - _dot(left[i], x) for i in range(size)]
        held = [i for i in range(size) if i not in free]
        best = max(held, key=gradient.__getitem__, default=None)
        if best is None or gradient[best] <= _NEGLIGIBLE * largest:
            break
        free.add(best)
        while free:
            trial = _solve_for(left, right, sorted(free))
            if all(trial[i] > 0 for i in free):
                x = trial
                break
            # As far towards it as all stay above 0; those that reach 0 are held there.
            step = min(x[i] / (x[i] - trial[i]) for i in free if trial[i] <= 0)
            x = [old + step * (new - old) for old, new in zip(x, trial, strict=True)]
            free = {i for i in free if x[i] > _NEGLIGIBLE}
            x = [value if i in free else 0.0 for i, value in enumerate(x)]
    return x


def _solve_for(left: Matrix, right: list[float], free: list[int]) -> list[float]:
    """The solution of the equations of the ``free`` unknowns, the others being 0: Gauss, with pivots."""
    rows = [[left[i][j] for j in free] + [right[i]] for i in free]
    size = len(free)
    for column in range(size):
        pivot = max(range(column, size), key=lambda i: abs(rows[i][column]))
        rows[column], rows[pivot] = rows[pivot], rows[column]
        head = rows[column]
        for row in rows[column + 1 :]:
            factor = row[column] / head[column]
            for j in range(column, size + 1):
                row[j] -= factor * head[j]
    x = [0.0] * len(right)
    for column in reversed(range(size)):
        row = rows[column]
        known = sum(row[j] * x[free[j]] for j in range(column + 1, size))
        x[free[column]] = (row[size] - known) / row[column]
    return x


def _dot(row: Row, x: Row) -> float:
    return sum(a * b for a, b in zip(row, x, strict=True))
