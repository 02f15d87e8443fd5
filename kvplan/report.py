"""Results as people read them: rich tables on stdout. The only user of rich; no figure is computed here.

Names from traces and configs are printed as literal text, never as markup or control codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvplan.text import literal
from kvplan.units import format_bytes, format_count, format_seconds, format_share

if TYPE_CHECKING:
    from kvplan.core.gpu import Gpu
    from kvplan.core.metrics import Distribution
    from kvplan.core.model import ModelSpec
    from kvplan.jobs.audit import AuditLine, AuditResult
    from kvplan.jobs.check import CheckReport
    from kvplan.jobs.simulate import SimulateResult
    from kvplan.jobs.size import SizeResult
    from kvplan.options import Settings


_NARROWEST = 20
#: Columns beside each other that leave room for bytes as whole numbers.
_MOST_EXACT_COLUMNS = 2


class Report:
    """Prints to stdout. Tables fit 80 columns."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False, markup=False, emoji=False)
        if self.console.width < _NARROWEST:  # some containers say COLUMNS=0
            self.console.width = 80

    # size

    def size(self, results: Sequence[SizeResult], *, explain: bool) -> None:
        """One or several models or engines beside each other."""
        for line in dict.fromkeys(_assumptions(r.config) for r in results):
            self._say(line)
        names = _column_names(results)
        table = _table("", *names)
        one_size = len({r.kv.block_size for r in results}) == 1
        exact = len(results) <= _MOST_EXACT_COLUMNS
        columns = [dict(_size_rows(r, with_block_size=one_size, exact=exact)) for r in results]
        for label in _merged([list(cells) for cells in columns]):
            table.add_row(label, *(cells.get(label, "-") for cells in columns))
        self.console.print(table)
        for name, result in zip(names, results, strict=True):
            if result.capacity is not None:
                verdict = "fits" if result.capacity.fits else "does not fit"
                self._say(f"{name} {verdict}: {result.capacity.reason}")
            elif explain and len(results) > 1:
                self._say(f"{name}:")
            if explain:
                for line in result.explanation:
                    self._say(f"  {line}")

    def gpu_ranking(self, results: Sequence[SizeResult]) -> None:
        """One model on several GPUs, best first."""
        first = results[0]
        self._say(f"{literal(first.model.name)}: {_assumptions(first.config)}")
        table = _table("GPU", "memory", "fits", "KV tokens", f"of {first.seq:,}", "headroom")
        for result in results:
            capacity, gpu = result.capacity, result.gpu
            assert capacity is not None, "ranked results have a budget"
            assert gpu is not None, "ranked results name a GPU"
            table.add_row(
                f"{gpu.count} x {gpu.name}",
                format_bytes(gpu.memory_bytes),
                f"{'yes' if capacity.fits else 'no'}, {capacity.fits_confidence}",
                format_count(capacity.kv_cache_tokens),
                format_count(capacity.concurrent_sequences),
                format_share(capacity.headroom_share),
            )
        self.console.print(table)

    # simulate

    def simulate(self, result: SimulateResult, *, profile: bool) -> None:
        """What the trace did: one table by subject, one of latencies."""
        self._say(_simulate_headline(result))
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
        self.console.print(table)
        latency = result.latency
        if result.seconds_per_tick is None:
            self._say("latency: unknown, arrivals are step-numbered (give --step-time)")
            return
        times = _table("latency", "count", "mean", "p50", "p90", "p95", "p99", "max")
        for label, d in (
            ("queue", latency.queue_s),
            ("TTFT", latency.ttft_s),
            ("TPOT", latency.tpot_s),
            ("ITL", latency.itl_s),
            ("E2E", latency.e2e_s),
        ):
            times.add_row(label, *_distribution(d))
        self.console.print(times)
        if latency.model["calibration"]:
            self._say(
                f"Times are estimates of a {latency.model['name']} ({latency.model['calibration']}); "
                "their error is not known."
            )

    # check

    def checks(self, report: CheckReport) -> None:
        """Verdicts, a row for each expectation."""
        table = _table("check", "expected", "is", "verdict")
        for check in report.checks:
            name = literal(check.name)
            for verdict in check.verdicts:
                table.add_row(
                    name,
                    literal(f"{verdict.figure} {verdict.expected}"),
                    literal(verdict.actual_text),
                    Text("pass", style="green") if verdict.passed else Text("FAIL", style="bold red"),
                )
                name = ""
        self.console.print(table)
        self._say(f"{report.passed} of {len(report.checks)} checks pass")

    # audit

    def audit(self, result: AuditResult) -> None:
        """Their figures beside ours, and below the table why they differ."""
        log = result.log
        model = "model not known" if log.model is None else literal(log.model)
        ours = f", sized as {literal(result.sized.model.name)}" if result.sized else ""
        self._say(f"{log.engine} {literal(log.version or '(version not known)')}: {model}{ours}")
        settings = ", ".join(f"{name} {literal(found.value)}" for name, found in sorted(log.settings.items()))
        if settings:
            self._say(f"from the log: {settings}")
        table = _table("term", "theirs", "ours", "difference", "line")
        for line in result.lines:
            table.add_row(
                line.term,
                _audit_figure(line.unit, line.theirs),
                _audit_figure(line.unit, line.ours),
                Text(_audit_difference(line), style="" if line.agrees is not False else "bold red"),
                str(line.line),
            )
        self.console.print(table)
        if log.refusal is not None:
            self._say(f"the engine gave up (line {log.refusal.line}): {literal(log.refusal.value)}")
        for line in result.lines:
            if line.likely_cause is not None and line.difference:
                self._say(f"{line.term} (line {line.line}): {literal(line.likely_cause)}")
        estimates = [line.term for line in result.lines if line.agrees is None and line.ours is not None]
        if estimates:
            self._say(f"ours are estimates, judged in their sum: {', '.join(estimates)}")
        compared = sum(line.agrees is not None for line in result.lines)
        if compared:
            self._say(f"{compared - result.differing} of {compared} terms agree")
        else:
            self._say("no term can be compared")

    # catalogues

    def models(self, models: Sequence[ModelSpec]) -> None:
        """The catalogue of models."""
        table = _table("model", "10^9 par.", "layers", "KV heads", "max tokens", "attention", keep_first=True)
        for m in models:
            parameters = m.weights.parameters
            kinds = [(cache.kind, count) for cache, count in m.attention]
            table.add_row(
                literal(m.name),
                "unknown" if parameters is None else f"{parameters / 1e9:,.2f}",
                str(m.num_layers),
                f"{m.num_kv_heads} x {m.head_dim}",
                format_count(m.max_position_embeddings),
                ", ".join(kind if len(kinds) == 1 else f"{count} {kind}" for kind, count in kinds),
            )
        self.console.print(table)

    def gpus(self, gpus: Sequence[Gpu]) -> None:
        """The catalogue of GPUs."""
        table = _table("GPU", "memory, GiB", "GB/s", "fp16 TFLOPS", "fp8 TFLOPS", "link GB/s")
        for g in gpus:
            table.add_row(
                g.name,
                _in_units(g.memory_bytes, 1 << 30, 2),
                _in_units(g.bandwidth_bytes_per_s, 10**9),
                _in_units(g.flops_fp16, 10**12),
                _in_units(g.flops_fp8, 10**12),
                _in_units(g.interconnect_bytes_per_s, 10**9),
            )
        self.console.print(table)
        self._say("Dense tensor-core rates; the link counts both directions; ? is unknown.")

    def record(self, fields: dict[str, object]) -> None:
        """One catalogue entry, a line a field."""
        table = Table(show_header=False, box=None, pad_edge=False)
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in fields.items():
            if name.endswith("_bytes") and isinstance(value, int):
                text = f"{value:,} ({format_bytes(value)})"
            elif isinstance(value, int) and not isinstance(value, bool):
                text = f"{value:,}"
            elif isinstance(value, list):
                text = ", ".join(_flat(item) for item in value) or "-"
            else:
                text = "unknown" if value is None else str(value)
            table.add_row(name, literal(text))
        self.console.print(table)

    def _say(self, text: str) -> None:
        self.console.print(Text(text))


def _flat(item: object) -> str:
    return " ".join(f"{k} {v}" for k, v in item.items()) if isinstance(item, dict) else str(item)


def _in_units(value: int | None, unit: int, digits: int = 0) -> str:
    return "?" if value is None else f"{value / unit:,.{digits}f}"


def _table(*columns: str, keep_first: bool = False) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1), collapse_padding=True)
    for i, name in enumerate(columns):
        table.add_column(
            Text(name), justify="left" if i == 0 else "right", overflow="fold", no_wrap=i == 0 and keep_first
        )
    return table


def _audit_figure(unit: str, value: float | None) -> str:
    if value is None:
        return "-"
    if unit == "bytes":
        return format_bytes(int(value))
    return f"{value:,.2f}x" if unit == "times" else f"{value:,}"


def _audit_difference(line: AuditLine) -> str:
    """Theirs less ours; ``=`` where the printed text allows ours."""
    if line.difference is None or line.ours is None:
        return "-"
    if line.low is not None and line.high is not None and line.low <= line.ours <= line.high:
        return "="
    sign = "+" if line.difference > 0 else ""
    return f"{sign}{_audit_figure(line.unit, line.difference)}"


def _assumptions(settings: Settings) -> str:
    """The engine and the settings that decide bytes; those that nobody gave are said to be assumed."""
    names = (
        "engine",
        "dtype",
        "kv_cache_dtype",
        "block_size",
        "tensor_parallel_size",
        "gpu_memory_utilization",
    )
    given = [f"{n} {literal(settings[n].value)}" for n in names if settings[n].given]
    assumed = [f"{n} {literal(settings[n].value)}" for n in names if not settings[n].given]
    return "; ".join([*given, f"assumed: {', '.join(assumed)}"] if assumed else given)


def _column_names(results: Sequence[SizeResult]) -> list[str]:
    """What tells the columns apart: the model, the engine or both."""
    models = [literal(r.model.name) for r in results]
    engines = [literal(r.config["engine"].value) for r in results]
    if len(set(engines)) == 1:
        return models
    if len(set(models)) == 1:
        return engines
    return [f"{model} {engine}" for model, engine in zip(models, engines, strict=True)]


def _merged(columns: Sequence[Sequence[str]]) -> list[str]:
    """All labels, in an order that keeps that of each column."""
    labels: list[str] = []
    for column in columns:
        place = 0
        for label in column:
            if label in labels:
                place = labels.index(label) + 1
            else:
                labels.insert(place, label)
                place += 1
    return labels


def _size_rows(result: SizeResult, *, with_block_size: bool, exact: bool) -> list[tuple[str, str]]:
    """Labels and texts.

    ``with_block_size``: the block size is in a label, else it is a row of its own. ``exact``: bytes are shown whole.
    """
    size = _exact_bytes if exact else format_bytes
    kv, weights, capacity, gpu = result.kv, result.weights, result.capacity, result.gpu
    block = (
        [(f"KV per block of {kv.block_size} tokens", size(kv.bytes_per_block))]
        if with_block_size
        else [
            ("tokens in a block", format_count(kv.block_size)),
            ("KV per block", size(kv.bytes_per_block)),
        ]
    )
    rows = [
        ("KV per token", size(kv.bytes_per_token)),
        *block,
        ("sequence length", f"{result.seq:,} tokens"),
        ("KV per sequence", size(kv.bytes_per_sequence)),
        ("concurrency", format_count(result.concurrency)),
        ("KV in total", size(kv.total_bytes)),
        ("parameters", format_count(weights.parameters)),
        ("weights", size(weights.total_bytes)),
    ]
    if kv.per_gpu.bytes_per_token != kv.bytes_per_token or kv.cluster_bytes_per_token != kv.bytes_per_token:
        rows += [
            ("per GPU: KV per block", size(kv.per_gpu.bytes_per_block)),
            ("per GPU: KV in total", size(kv.per_gpu.total_bytes)),
            ("per GPU: weights", size(weights.per_gpu_bytes)),
        ]
    if capacity is None:
        return rows
    overhead = capacity.overhead_bytes
    if gpu is not None:
        rows += [
            ("GPU", f"{gpu.count} x {gpu.name}, {format_bytes(gpu.memory_bytes)}"),
            ("  taken by weights", format_share(capacity.weights_share_of_memory)),
            ("  taken by KV in total", format_share(capacity.sequences_share_of_memory)),
        ]
    if overhead is not None:
        rows.append(("  overhead, rough", f"{format_bytes(overhead.low)} to {format_bytes(overhead.high)}"))
    return [
        *rows,
        ("memory for KV", format_bytes(capacity.available_kv_bytes)),
        ("blocks", f"{capacity.num_gpu_blocks:,}, {capacity.usable_blocks:,} usable"),
        ("KV cache tokens", format_count(capacity.kv_cache_tokens)),
        ("max model len", f"{capacity.max_model_len:,} tokens"),
        ("max concurrency of those", f"{capacity.max_concurrency:.2f}x"),
        ("sequences at once", format_count(capacity.concurrent_sequences)),
        ("headroom", f"{format_bytes(capacity.headroom_bytes)}, {format_share(capacity.headroom_share)}"),
        ("longest that fits", f"{capacity.max_model_len_that_fits:,} tokens"),
        ("fits", f"{'yes' if capacity.fits else 'no'}, {capacity.fits_confidence}"),
    ]


def _exact_bytes(size: int | None) -> str:
    return "unknown" if size is None else f"{size:,} B = {format_bytes(size)}"


def _simulate_headline(result: SimulateResult) -> str:
    settings = result.config
    what = f"{literal(result.trace['path'])}: {result.trace['requests']:,} requests"
    if "model" in settings:
        marks = [f"{settings[n].value}{_mark(settings, n)}" for n in ("model", "gpu") if n in settings]
        what += f" on {literal(' / '.join(marks))}"
    return (
        f"{what}, vLLM {result.simulation['scheduler_version']} scheduler, "
        f"{'asynchronous' if result.simulation['async_scheduling'] else 'synchronous'}"
    )


def _mark(settings: Settings, name: str) -> str:
    return "" if settings[name].given else " (assumed)"


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
            + (f", {counts.truncated:,} cut short" if counts.truncated else ""),
        ),
        (
            "run",
            f"{result.simulation['status']}, {result.steps:,} steps, {result.scheduled_tokens:,} tokens scheduled"
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
            f"{kv.num_gpu_blocks:,} blocks of {kv.block_size} tokens; at most {kv.peak_blocks:,} in use",
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
            f"{format_share(cache.hit_rate)} of {cache.queried_tokens:,} prompt tokens hit; "
            f"{cache.evicted_blocks:,} blocks evicted, at most {cache.peak_shared_blocks:,} shared"
            if cache.enabled
            else "off",
        ),
        (
            "preemptions",
            f"{pre.events:,} of {pre.requests:,} requests; {pre.recomputed_tokens:,} tokens computed again",
        ),
    ]
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
