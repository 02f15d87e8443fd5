"""What the scripts that compare with logs share: fields of a table that may be empty, and printed figures."""

from __future__ import annotations

from typing import NamedTuple


class Check(NamedTuple):
    """One figure: what was printed and what is predicted for the two ends of the figures it follows from."""

    figure: str
    printed: float
    low: float
    high: float

    @property
    def is_right(self) -> bool:
        """Whether the printed figure lies between the predictions."""
        return self.low <= self.printed <= self.high


def number(text: str | None) -> float | None:
    """A number, None where the field is empty."""
    return float(text) if text else None


def whole(text: str | None) -> int | None:
    """A whole number, None where the field is empty."""
    return int(float(text)) if text else None
