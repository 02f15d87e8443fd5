"""Pictures of a run. The only user of matplotlib, which the extra ``plots`` brings."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from kvplan.core.request import seconds
from kvplan.errors import InputError


class Point(NamedTuple):
    """The pool and the queues after a step's scheduling; ``start`` is its tick."""

    step: int
    start: int
    used_blocks: int
    cached_blocks: int
    running: int
    waiting: int
    scheduled_tokens: int
    preempted: int
    hit_rate: float | None


def require_matplotlib(path: str) -> None:
    """Raise `InputError` where pictures cannot be drawn."""
    if find_spec("matplotlib") is None:
        raise InputError(
            "pictures need matplotlib", where=path, hint='install it with: pip install "kvplan[plots]"'
        )


def draw_timeline(path: Path, points: Sequence[Point], usable_blocks: int, scale: Fraction | None) -> None:
    """Draw blocks by kind, queue lengths, hit rate and preemptions over time into a PNG or SVG file."""
    from matplotlib.figure import Figure

    times = [seconds(point.start, scale) if scale else point.step for point in points]
    used = [100 * point.used_blocks / usable_blocks for point in points]
    kept = [100 * (point.used_blocks + point.cached_blocks) / usable_blocks for point in points]
    figure = Figure(figsize=(10, 7), layout="constrained")
    pool, queues = figure.subplots(2, 1, sharex=True)
    pool.fill_between(times, used, step="post", alpha=0.6, label="in use")
    pool.fill_between(times, used, kept, step="post", alpha=0.25, label="cached, free")
    rates = [float("nan") if p.hit_rate is None else 100 * p.hit_rate for p in points]
    pool.plot(times, rates, color="tab:green", linewidth=1, label="prefix hit rate so far")
    preempted = [time for time, point in zip(times, points, strict=True) if point.preempted]
    if preempted:
        pool.plot(preempted, [101] * len(preempted), "|", color="tab:red", label="preemption")
    pool.legend(loc="lower right")
    pool.set_ylabel("blocks, %")
    pool.set_ylim(0, 105)
    queues.step(times, [point.running for point in points], where="post", label="running")
    queues.step(times, [point.waiting for point in points], where="post", label="waiting")
    queues.set_ylabel("sequences")
    queues.set_xlabel("seconds" if scale else "step")
    lines = queues.get_lines()
    if preempted:
        events = queues.twinx()
        so_far = list(accumulate(point.preempted for point in points))
        lines += events.step(
            times, so_far, where="post", color="tab:red", linewidth=1, label="preemptions so far"
        )
        events.set_ylabel("preemptions")
        events.set_ylim(bottom=0)
    queues.legend(handles=lines, loc="upper left")
    figure.savefig(path)
