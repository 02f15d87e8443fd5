"""Ranges of latencies from the error of step times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvplan import simulate
from kvplan.calibration import Calibration, StepTimes, save_calibration
from kvplan.core.step_constants import MeasuredError, StepConstants
from kvplan.errors import InputError

SETTINGS: dict[str, Any] = {"model": "llama-2-7b", "gpu": "h100-80gb", "limit": 60}


def calibration(folder: Path, low: float | None, high: float | None) -> str:
    path = folder / "c.yaml"
    constants = {"weights_bandwidth_share": 0.8, "kv_bandwidth_share": 0.8}
    steps = StepTimes("s.csv", "table of step times", constants, (), 50, 0.02, 0.1, low, high)
    with path.open("w") as file:
        save_calibration(file, Calibration("vllm", "0.33", "llama-2-7b", "s.csv", step_times=steps))
    return str(path)


def test_each_figure_has_a_low_and_a_high_around_it(tmp_path: Path) -> None:
    result = simulate("chat", uncertainty=True, calibration=calibration(tmp_path, 0.9, 1.2), **SETTINGS)
    latency: Any = result.to_dict()["latency"]
    assert latency["model"]["slowdowns"] == {"low": 0.9, "high": 1.2}
    for name in ("ttft_s", "tpot_s", "itl_s", "e2e_s", "queue_s"):
        figure = latency[name]
        for key in ("mean", "p50", "p90", "p95", "p99", "max"):
            assert figure["low"][key] <= figure[key] <= figure["high"][key]
        assert "count" not in figure["low"]
    # A token takes its step's time; beyond that fewer, or more, run at once.
    tpot = latency["tpot_s"]
    assert tpot["low"]["mean"] == pytest.approx(0.9 * tpot["mean"], rel=0.1)
    assert tpot["high"]["mean"] == pytest.approx(1.2 * tpot["mean"], rel=0.1)


def test_without_it_there_is_no_range(tmp_path: Path) -> None:
    result = simulate("chat", calibration=calibration(tmp_path, 0.9, 1.2), **SETTINGS)
    latency: Any = result.to_dict()["latency"]
    assert "low" not in latency["ttft_s"]
    assert "slowdowns" not in latency["model"]


def test_a_run_whose_error_is_not_known_has_no_range() -> None:
    with pytest.raises(InputError) as caught:
        simulate("chat", uncertainty=True, step_time=0.02, limit=3)
    assert str(caught.value) == "the error of a constant step time is not known (--uncertainty)"


def test_a_percentile_of_errors_bounds_the_times() -> None:
    # An estimate off by up to 25 %: the measured time is 1/1.25 to 1/0.75 of it.
    assert MeasuredError(0.1, 0.25, 40, "x").slowdowns == pytest.approx((0.8, 4 / 3))
    assert MeasuredError(0.1, 0.25, 40, "x", 0.9, 1.1).slowdowns == (0.9, 1.1)
    assert MeasuredError(0.5, 3.0, 40, "x").slowdowns == (0.25, 20.0)


def test_slowed_constants_take_each_part_longer() -> None:
    constants = StepConstants(weights_bandwidth_share=0.8, step_s=1e-3, api_s=5e-3)
    slowed = constants.slowed(1.25)
    assert slowed.weights_bandwidth_share == pytest.approx(0.64)
    assert slowed.step_s == pytest.approx(1.25e-3)
    assert slowed.api_s == 5e-3
