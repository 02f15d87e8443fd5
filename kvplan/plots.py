"""Pictures of a run. The only user of matplotlib, which the extra ``plots`` brings."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from importlib.util import find_spec
from itertools import accumulate, cycle
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kvplan.core.request import seconds
from kvplan.errors import InputError

if TYPE_CHECKING:
    from kvplan.jobs.kernel_bench import KernelResult


class Point(NamedTuple):
    """The pool and the queues after a step's scheduling; ``start`` is its tick.

    With several cache groups ``group_blocks`` has the blocks in use by each; ``behind_slots`` hold tokens that no
    window reaches any more.
    """

    step: int
    start: int
    used_blocks: int
    cached_blocks: int
    running: int
    waiting: int
    scheduled_tokens: int
    preempted: int
    hit_rate: float | None
    behind_slots: int = 0
    group_blocks: Sequence[int] = ()


class Bar(NamedTuple):
    """A run beside others: the four shares of what it held, output tokens per second, mean seconds of a request."""

    label: str
    shares: tuple[float, float, float, float]
    output_tokens_per_s: float | None
    ttft_s: float | None
    e2e_s: float | None


def require_matplotlib(path: str) -> None:
    """Raise `InputError` where pictures cannot be drawn."""
    if find_spec("matplotlib") is None:
        raise InputError(
            "pictures need matplotlib", where=path, hint='install it with: pip install "kvplan[plots]"'
        )


def check_picture(path: str, option: str) -> None:
    """Refuse early what is no picture that can be drawn; raises `InputError`."""
    if not path.endswith((".png", ".svg")):
        raise InputError(f'"{path}" ends in no known way', where=option, hint="name it .png or .svg")
    require_matplotlib(path)


def draw_timeline(
    path: Path,
    points: Sequence[Point],
    usable_blocks: int,
    scale: Fraction | None,
    group_kinds: Sequence[str] = (),
) -> None:
    """Draw blocks by kind, queue lengths, hit rate and preemptions over time into a PNG or SVG file.

    With several cache groups, whose kinds are given, the blocks of each kind too.
    """
    from matplotlib.figure import Figure

    times = [seconds(point.start, scale) if scale else point.step for point in points]
    used = [100 * point.used_blocks / usable_blocks for point in points]
    kept = [100 * (point.used_blocks + point.cached_blocks) / usable_blocks for point in points]
    figure = Figure(figsize=(10, 7), layout="constrained")
    pool, queues = figure.subplots(2, 1, sharex=True)
    pool.fill_between(times, used, step="post", alpha=0.6, label="in use")
    pool.fill_between(times, used, kept, step="post", alpha=0.25, label="cached, free")
    for kind in dict.fromkeys(group_kinds if len(group_kinds) > 1 else ()):
        own = [number for number, other in enumerate(group_kinds) if other == kind]
        share = [100 * sum(point.group_blocks[number] for number in own) / usable_blocks for point in points]
        pool.step(times, share, where="post", linewidth=1, label=f"in use, {kind} groups")
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


#: The four shares, in the order of `Bar`: name, colour and hatching, so that they differ without colour too.
_SHARES = (
    ("tokens", "tab:blue", ""),
    ("to be filled", "tab:green", "//"),
    ("waste", "tab:orange", "xx"),
    ("holes", "tab:red", ".."),
)


def draw_comparison(path: Path, bars: Sequence[Bar], axis: str) -> None:
    """Draw bars of the four shares and, where times are known, throughput and latency of each run."""
    from matplotlib.figure import Figure

    is_timed = any(bar.output_tokens_per_s is not None for bar in bars)
    rows = 3 if is_timed else 1
    figure = Figure(figsize=(max(6.0, 1.2 * len(bars)), 1 + 3 * rows), layout="constrained")
    panels = figure.subplots(rows, 1, squeeze=False)[:, 0]
    places = range(len(bars))
    below = [0.0] * len(bars)
    for number, (name, colour, hatch) in enumerate(_SHARES):
        heights = [100 * bar.shares[number] for bar in bars]
        panels[0].bar(
            places, heights, bottom=below, color=colour, hatch=hatch, edgecolor="white", width=0.6, label=name
        )
        below = [base + height for base, height in zip(below, heights, strict=True)]
    panels[0].set_ylabel("of the memory held, %")
    panels[0].set_ylim(0, 100)
    panels[0].legend(loc="upper center", bbox_to_anchor=(0.5, 1.15), ncols=len(_SHARES), frameon=False)
    if is_timed:
        panels[1].plot(places, [_known(bar.output_tokens_per_s) for bar in bars], "o-")
        panels[1].set_ylabel("output tokens / s")
        panels[2].plot(places, [_known(bar.e2e_s) for bar in bars], "o-", label="whole request")
        panels[2].plot(places, [_known(bar.ttft_s) for bar in bars], "s--", label="first token")
        panels[2].set_ylabel("mean latency, s")
        panels[2].legend()
        for panel in panels[1:]:
            panel.set_ylim(0, 1.08 * panel.get_ylim()[1])
    for panel in panels:
        panel.set_xticks(places, [bar.label for bar in bars])
        panel.set_xlim(-0.6, len(bars) - 0.4)
    panels[-1].set_xlabel(axis)
    figure.savefig(path)


def draw_bandwidths(path: Path, results: Sequence[KernelResult]) -> None:
    """Draw how near each timed kernel comes to the datasheet's bandwidth, over the bytes that it has to move.

    Where no datasheet is known, to the rate of a plain copy.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    panel = figure.subplots()
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in results:
        share = row.bandwidth_share if row.bandwidth_share is not None else row.copy_share
        if share is not None and row.bytes_moved is not None:
            lines.setdefault(f"{row.kernel}, {row.kv_cache_dtype}", []).append((row.bytes_moved, 100 * share))
    if not lines:
        raise InputError(
            "nothing was timed", where=str(path), hint="a picture needs a GPU, and no --validate-only"
        )
    for (label, points), mark in zip(sorted(lines.items()), cycle("osD^v"), strict=False):
        across, up = zip(*sorted(points), strict=True)
        panel.plot(across, up, f"{mark}-", label=label)
    panel.set_xscale("log", base=2)
    panel.set_xlabel("bytes moved by a launch")
    panel.set_ylabel("share of the memory's bandwidth, %")
    panel.set_ylim(0, 105)
    panel.axhline(100, color="grey", linewidth=0.8)
    panel.grid(visible=True, alpha=0.3)
    panel.legend(frameon=False)
    figure.savefig(path)


def _known(value: float | None) -> float:
    return float("nan") if value is None else value
