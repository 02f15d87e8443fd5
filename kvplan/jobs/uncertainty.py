"""The job behind ``--uncertainty``: what latency a run may have, given how far its step times were off."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace

from kvplan.core.metrics import Distribution, LatencyFigures
from kvplan.errors import InputError
from kvplan.jobs.simulate import LatencyRange, Simulation, Watch, replay
from kvplan.options import SimulateOptions


def check_source(source: str) -> None:
    """Refuse standard input, which cannot be read several times. Raises `InputError`."""
    if source == "-":
        raise InputError(
            "the trace is read several times", where="--uncertainty", hint="give a file, not standard input"
        )


def known_slowdowns(simulation: Simulation) -> tuple[float, float]:
    """What each step's time may be multiplied with, at least and at most.

    Raises `InputError` where it is not known; the simulation's trace is closed then.
    """
    if simulation.slowdowns is None:
        simulation.trace.close()
        what, hint = (
            "the step times",
            "give --calibration FILE, written by kvplan calibrate from measured steps",
        )
        if simulation.options.step_time is not None:
            what, hint = "a constant step time", "leave out --step-time"
        elif simulation.calibration_warnings:
            hint = f"give one that holds here: {'; '.join(simulation.calibration_warnings)}"
        raise InputError(f"the error of {what} is not known", where="--uncertainty", hint=hint)
    return simulation.slowdowns


def latency_range(
    slowdowns: tuple[float, float],
    estimated: LatencyFigures,
    source: str,
    options: SimulateOptions,
    origins: Mapping[str, str] | None = None,
    *,
    watch: Watch | None = None,
) -> LatencyRange:
    """The latencies of a run whose every step takes as short, and as long, as the measured error of its model allows.

    Queues do not grow in proportion, so the trace is replayed with all steps slowed by the same factor: that between
    which nine measured steps of ten lie. Since a run with other times also meets its arrivals at other moments, a
    figure of a quicker one may come out a little higher: the range is from the least to the most of all three.
    ``estimated`` are the figures without. Raises `KeyboardInterrupt` when one of the runs is interrupted.
    """
    low, high = slowdowns
    quick, slow = (
        replay(Simulation(source, options, origins, slowdown=slowdown), watch).latency
        for slowdown in (low, high)
    )
    runs = (estimated, quick, slow)
    return LatencyRange(low, high, _each(min, runs), _each(max, runs))


def _each(pick: Callable[[list[float]], float], runs: Sequence[LatencyFigures]) -> LatencyFigures:
    """The figures of the first run, with each value picked from all."""
    return replace(
        runs[0],
        ttft_s=_pick(pick, [run.ttft_s for run in runs]),
        tpot_s=_pick(pick, [run.tpot_s for run in runs]),
        itl_s=_pick(pick, [run.itl_s for run in runs]),
        e2e_s=_pick(pick, [run.e2e_s for run in runs]),
        queue_s=_pick(pick, [run.queue_s for run in runs]),
    )


def _pick(pick: Callable[[list[float]], float], figures: Sequence[Distribution]) -> Distribution:
    picked: dict[str, float] = {}
    for item in fields(Distribution):
        known = [value for one in figures if (value := getattr(one, item.name)) is not None]
        if item.name != "count" and known:
            picked[item.name] = pick(known)
    return Distribution(figures[0].count, **picked)
