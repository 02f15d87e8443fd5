"""The errors that are shipped with the constants are those of the measured steps."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import pytest

import kvplan
from kvplan.core.step_constants import MEASURED_ERRORS, StepConstants


@pytest.fixture
def rows(shared: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Measured decode steps."""
    monkeypatch.syspath_prepend(Path(kvplan.__file__).resolve().parents[1] / "benchmarks")
    file = shared / "measured" / "decode_step_latency.csv"
    if not file.is_file():
        pytest.skip(f"no file {file}")
    found: list[Any] = import_module("step_rows").read_steps(file)
    return found


def test_the_shipped_errors_are_those_of_the_rows_that_nothing_was_fitted_to(rows: list[Any]) -> None:
    sets: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        if not row.is_fitted:
            error = abs(row.predict() / row.seconds - 1)
            sets.setdefault((row.gpu.name, row.generation.name), []).append(error)
    assert sets.keys() == MEASURED_ERRORS.keys()
    for key, errors in sets.items():
        stated = MEASURED_ERRORS[key]
        assert len(errors) == stated.rows
        assert median(errors) == pytest.approx(stated.median, abs=6e-4)
        assert sorted(errors)[int(0.95 * len(errors))] == pytest.approx(stated.p95, abs=6e-4)


def test_constants_bring_clean_steps_from_a_quarter_off_to_a_hundredth(rows: list[Any]) -> None:
    clean = [row for row in rows if row.kind == "online_token_gap_no_prefill"]
    assert median(abs(row.predict(StepConstants()) / row.seconds - 1) for row in clean) > 0.2
    assert max(abs(row.predict() / row.seconds - 1) for row in clean) < 0.03
