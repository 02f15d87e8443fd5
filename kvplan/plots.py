"""Pictures of a run. The only user of matplotlib, which the extra ``plots`` brings."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path

from kvplan.core.request import seconds
from kvplan.errors import InputError

#: More points than a picture has columns only cost time and file size.
_MAX_POINTS = 20_000


def require_matplotlib(path: str) -> None:
    """Raise `InputError` where pictures cannot be drawn."""
    if find_spec("matplotlib") is None:
        raise InputError(
            "pictures need matplotlib", where=path, hint='install it with: pip install "kvplan[plots]"'
        )


def draw_timeline(
    path: Path,
    rows: Sequence[tuple[int, int, int, int, int, int, int]],
    usable_blocks: int,
    scale: Fraction | None,
) -> None:
    """Draw pool utilization, queue lengths and preemptions over time into a PNG or SVG file.

    ``rows`` are ``(step, start tick, used blocks, running, waiting, tokens, preempted)``.
    """
    from matplotlib.figure import Figure

    every = -(-len(rows) // _MAX_POINTS) or 1
    # Of steps that fall on one point the fullest is shown, so that no peak is lost.
    shown = [max(rows[i : i + every], key=_used) for i in range(0, len(rows), every)]
    times = [seconds(start, scale) if scale else step for step, start, *_ in shown]
    figure = Figure(figsize=(10, 6), layout="constrained")
    pool, queues = figure.subplots(2, 1, sharex=True)
    pool.fill_between(times, [100 * row[2] / usable_blocks for row in shown], step="post", alpha=0.5)
    preempted = [seconds(start, scale) if scale else step for step, start, *rest in rows if rest[4]]
    if preempted:
        pool.plot(preempted, [101] * len(preempted), "|", color="tab:red", label="preemption")
        pool.legend(loc="lower right")
    pool.set_ylabel("blocks in use, %")
    pool.set_ylim(0, 105)
    queues.step(times, [row[3] for row in shown], where="post", label="running")
    queues.step(times, [row[4] for row in shown], where="post", label="waiting")
    queues.set_ylabel("sequences")
    queues.set_xlabel("seconds" if scale else "step")
    queues.legend(loc="upper right")
    figure.savefig(path)


def _used(row: tuple[int, int, int, int, int, int, int]) -> int:
    return row[2]
