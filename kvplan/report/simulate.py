"""What `simulate` prints: what the trace did, latencies, preemptions and the smallest pool."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from kvplan.report.tables import Screen, new_table, trace_line, value_of
from kvplan.text import literal
from kvplan.units import counted, format_bytes, format_count, format_seconds, format_share

if TYPE_CHECKING:
    from kvplan.core.metrics import Distribution, GroupBlocks
    from kvplan.jobs.min_blocks import MinBlocks
    from kvplan.jobs.simulate import SimulateResult


def print_simulation(screen: Screen, result: SimulateResult, *, profile: bool) -> None:
    """What the trace did: one table by subject, one of latencies."""
    screen.say(_simulate_headline(result))
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for label, text in _simulate_rows(result):
        table.add_row(label, text)
    if profile:
        p = result.profile
        table.add_row(
            "this run",
            f"{p.wall_s:.2f} s wall, {p.cpu_s:.2f} s CPU, peak {format_bytes(p.peak_rss_bytes)}",
        )
    screen.show(table)
    if result.preemptions.events:
        _preemptions(screen, result)
    latency = result.latency
    if result.seconds_per_tick is None:
        screen.say("latency: unknown, arrivals are step-numbered (give --step-time)")
        return
    times = new_table("latency", "count", "mean", "p50", "p90", "p95", "p99", "max")
    for label, name in (
        ("queue", "queue_s"),
        ("TTFT", "ttft_s"),
        ("TPOT", "tpot_s"),
        ("ITL", "itl_s"),
        ("E2E", "e2e_s"),
    ):
        times.add_row(label, *_distribution(getattr(latency, name)))
        if result.range is not None:
            for end, figures in (("  low", result.range.low), ("  high", result.range.high)):
                times.add_row(end, "", *_distribution(getattr(figures, name))[1:])
    screen.show(times)
    if latency.model["calibration"]:
        screen.say(
            f"Times are estimates of a {latency.model['name']} ({literal(str(latency.model['calibration']))}); "
            f"{_error(latency.model['measured_error'])}."
        )
    if result.range is not None:
        low, high = result.range.low_slowdown, result.range.high_slowdown
        screen.say(f"low and high: every step {low:.3f} and {high:.3f} times as long, by that error")


def _error(measured: object) -> str:
    """How far off step times were, in words."""
    if not isinstance(measured, dict):
        return "their error is not known"
    return (
        f"steps were off by {format_share(measured['median'])} (median) and {format_share(measured['p95'])} "
        f"(95th percentile) in {literal(measured['data'])}"
    )


def _preemptions(screen: Screen, result: SimulateResult) -> None:
    """Why sequences were preempted, and the costliest cases."""
    causes = result.causes
    screen.say(f"Of the preemptions {causes.sentence}.")
    table = new_table("worst", "in step", "needed by", "blocks", "lost", "found", "time lost")
    for case in causes.worst[:5]:
        why = case.preemption
        by = "itself" if why.trigger == why.victim else literal(why.trigger)
        lost = result.seconds(case.lost_ticks) if case.lost_ticks is not None else None
        table.add_row(
            literal(why.victim),
            f"{case.step:,}",
            f"{by}{' (decoding)' if why.is_decode else ' (prompt)'}",
            f"{why.needed_blocks:,}, {why.free_blocks:,} free",
            format_count(why.lost_tokens),
            format_count(case.found_tokens),
            "never" if case.lost_ticks is None else "?" if lost is None else format_seconds(lost),
        )
    screen.show(table)


def print_min_blocks(screen: Screen, least: MinBlocks) -> None:
    """The smallest pool that was found to meet a goal."""
    if least.num_gpu_blocks is None:
        screen.say(f"No pool meets --min-blocks {literal(least.goal)}: {least.proof}.")
        return
    screen.say(
        f"--min-blocks {literal(least.goal)}: {counted(least.num_gpu_blocks, 'block')} ({least.proof}; "
        f"{counted(least.runs, 'run')})."
    )


def _simulate_headline(result: SimulateResult) -> str:
    settings = result.config
    what = trace_line(result.trace)
    if "model" in settings:
        what += f" on {' / '.join(value_of(settings, n) for n in ('model', 'gpu') if n in settings)}"
    return (
        f"{what}, {_scheduler(result)} scheduler, "
        f"{'asynchronous' if result.simulation['async_scheduling'] else 'synchronous'}"
    )


def _scheduler(result: SimulateResult) -> str:
    engine, version = result.simulation["engine"], result.simulation["scheduler_version"]
    return f"vLLM {version}" if engine == "vllm" else f"{engine} ({version})"


def _cache_rows(result: SimulateResult) -> list[tuple[str, str]]:
    """Blocks by cache group, where there are several; what is behind windows; drafts."""
    kv, drafts = result.kv, result.drafts
    rows = []
    kinds: dict[tuple[str, int], list[GroupBlocks]] = {}
    for group in kv.groups if len(kv.groups) > 1 else ():
        kinds.setdefault((group.kind, group.block_size), []).append(group)
    for (kind, size), groups in kinds.items():
        several = f", {len(groups)} groups of about" if len(groups) > 1 else ":"
        mean, most = groups[0].blocks_mean, groups[0].blocks_max
        rows.append(
            (
                "",
                f"{kind} (blocks of {size:,}){several} mean {format_count(mean)}, max {format_count(most)} in use",
            )
        )
    if kv.behind_window_share:
        rows.append(("behind windows", f"{format_share(kv.behind_window_share)} of what is held"))
    if drafts is not None:
        rows.append(
            (
                "drafts",
                f"{drafts.accepted:,} accepted, {drafts.rejected:,} rejected "
                f"({format_share(drafts.acceptance_rate)} accepted)",
            )
        )
    return rows


def _simulate_rows(result: SimulateResult) -> list[tuple[str, str]]:
    kv, batch, cache, pre, counts = (
        result.kv,
        result.batch,
        result.prefix_cache,
        result.preemptions,
        result.requests,
    )
    settings = result.config
    rows = [
        (
            "requests",
            f"{counts.finished:,} finished, {counts.rejected:,} rejected, {counts.unfinished:,} unfinished"
            + (f", {counts.aborted:,} aborted" if counts.aborted else "")
            + (f", {counts.truncated:,} cut short" if counts.truncated else ""),
        ),
        (
            "run",
            f"{result.simulation['status']}, {counted(result.steps, 'step')}, "
            f"{counted(result.scheduled_tokens, 'token')} scheduled"
            + (f", {format_seconds(result.duration_s)}" if result.duration_s is not None else ""),
        ),
    ]
    if result.simulation["reason"]:
        rows.append(("", literal(result.simulation["reason"])))
    rate = result.throughput
    if rate.requests_per_s is not None:
        rows.append(
            (
                "throughput",
                f"{rate.requests_per_s:,.2f} requests/s, {format_count(rate.input_tokens_per_s)} in and "
                f"{format_count(rate.output_tokens_per_s)} out tokens/s",
            )
        )
    u = kv.utilization
    rows += [
        (
            "KV pool",
            (
                f"{counted(kv.num_gpu_blocks, 'block')} of {kv.block_size} tokens"
                if kv.block_size > 1
                else f"{counted(kv.num_gpu_blocks, 'slot')} of a token"
            )
            + f"; at most {kv.peak_blocks:,} in use",
        ),
        (
            "utilization",
            f"mean {format_share(u.mean)}, p50 {format_share(u.p50)}, p95 {format_share(u.p95)}, "
            f"max {format_share(u.max)}",
        ),
        (
            "of what is held",
            f"{format_share(kv.token_share)} tokens, {format_share(kv.reserved_share)} to be filled, "
            f"{format_share(kv.internal_fragmentation)} waste, {format_share(kv.external_fragmentation)} holes",
        ),
        (
            "batch",
            f"running mean {format_count(batch.running_mean)}, max {format_count(batch.running_max)} "
            f"(limit {settings['max_num_seqs'].value:,}); waiting mean {format_count(batch.waiting_mean)}, "
            f"max {format_count(batch.waiting_max)}",
        ),
        (
            "prefix cache",
            f"{format_share(cache.hit_rate)} of {counted(cache.queried_tokens, 'prompt token')} hit; "
            f"{counted(cache.evicted_blocks, 'block')} evicted, at most {cache.peak_shared_blocks:,} shared"
            if cache.enabled
            else "off",
        ),
    ]
    rows += _cache_rows(result)
    if cache.copied_blocks:
        rows.append(("copy-on-write", f"{counted(cache.copied_blocks, 'block')} copied"))
    rows.append(
        (
            "preemptions",
            f"{pre.events:,} of {counted(pre.requests, 'request')}; "
            f"{counted(pre.recomputed_tokens, 'token')} computed again",
        )
    )
    if pre.swapped_out_blocks:
        rows.append(
            (
                "swapped",
                f"{counted(pre.swapped_out_blocks, 'block')} to the CPU, {pre.swapped_in_blocks:,} back",
            )
        )
    if result.goodput is not None:
        slo = result.goodput.slo
        goals = [
            f"{name} <= {format_seconds(goal)}"
            for name, goal in (("TTFT", slo.ttft_s), ("TPOT", slo.tpot_s), ("E2E", slo.e2e_s))
            if goal is not None
        ]
        rows.append(
            (
                "goodput",
                f"{format_share(result.goodput.share)} of requests, {format_count(result.goodput.requests_per_s)}/s "
                f"({', '.join(goals)})",
            )
        )
    return rows


def _distribution(d: Distribution) -> list[str]:
    return [format_count(d.count), *(format_seconds(v) for v in (d.mean, d.p50, d.p90, d.p95, d.p99, d.max))]
