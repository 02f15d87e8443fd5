"""Results as people read them: rich tables on stdout. The only user of rich; no figure is computed here.

Names from traces and configs are printed as literal text, never as markup or control codes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from kvplan.drawing import CACHED, FREE, SHARED, PoolDrawing, draw_lane, draw_pool
from kvplan.text import literal
from kvplan.units import format_bytes, format_count, format_seconds, format_share

if TYPE_CHECKING:
    from kvplan.core.gpu import Gpu
    from kvplan.core.metrics import Distribution
    from kvplan.core.model import ModelSpec
    from kvplan.core.pool_map import PoolMap
    from kvplan.core.sizing import Capacity, Rank
    from kvplan.jobs.audit import AuditLine, AuditResult
    from kvplan.jobs.check import CheckReport
    from kvplan.jobs.compare import Column, ComparedRun, CompareResult
    from kvplan.jobs.min_blocks import MinBlocks
    from kvplan.jobs.simulate import SimulateResult
    from kvplan.jobs.size import SizeResult
    from kvplan.options import Settings
    from kvplan.topics.parts import Explanation, Figures, Part, Timeline, Unit, Value
    from kvplan.topics.parts import Table as Values


_NARROWEST = 20
#: Results that have room as columns beside each other; more are rows.
_MOST_BESIDE = 3
#: Characters of the longest bar, and of the narrowest terminal that has room for it.
_BAR = 24
_NARROWEST_BAR = 72
#: Longer words, such as paths, may be cut.
_LONGEST_WORD = 32
#: Rows of a map, requests in its legend and stretches of a block table.
_MAP_ROWS = 20
_MAP_REQUESTS = 12
_TABLE_RUNS = 30
#: Columns of a timeline.
_TIMELINE = 60
#: Characters of a run's name beside which its figures have room.
_WIDEST_LABEL = 12


class Report:
    """Prints to stdout. Tables fit 80 columns."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False, markup=False, emoji=False)
        if self.console.width < _NARROWEST:  # some containers say COLUMNS=0
            self.console.width = 80

    # size

    def size(self, results: Sequence[SizeResult], *, explain: bool) -> None:
        """The answer first, then where the memory goes; one result in detail, or several beside each other."""
        for line in dict.fromkeys(_assumptions(result.config) for result in results):
            self._say(line, style="dim")
        if len(results) > _MOST_BESIDE:
            self._compared(results)
        else:
            for result in results:
                self._answer(result, results)
            if len(results) == 1 and results[0].capacity is not None:
                self._memory(results[0])
            self._facts(results)
        for result in results if len(results) <= _MOST_BESIDE or explain else ():
            self._ranks(result)
            self._groups(result)
            if explain:
                self.console.print()
                for line in result.explanation:
                    self._say(f"  {line}")

    def gpu_ranking(self, results: Sequence[SizeResult]) -> None:
        """One model on several GPUs: on as many of each as it needs, the fewest first."""
        first = results[0]
        self._say(_assumptions(first.config, but=("tensor_parallel_size",)), style="dim")
        self.console.print()
        what = _sequences(first.concurrency, first.seq)
        started = first.config["max_model_len"].value
        if isinstance(started, int) and started > first.seq:  # what a small GPU may fail at
            what += f", started with max_model_len {started:,}"
        fitting = [result for result in results if result.capacity is not None and result.capacity.fits]
        self._say(f"How many GPUs {literal(first.model.name)} needs for {what}", style="bold")
        if not fitting:
            self._say("None of these fits.")
        table = _table("GPUs", "in all", "fits", "KV tokens", "sequences", "headroom")
        for result in results:
            capacity, gpu = result.capacity, result.gpu
            assert capacity is not None, "ranked results have a budget"
            assert gpu is not None, "ranked results name a GPU"
            table.add_row(
                f"{gpu.count} x {gpu.name}{_degrees(result)}",
                format_bytes(gpu.count * gpu.memory_bytes),
                f"{'yes' if capacity.fits else 'no'}, {capacity.fits_confidence}",
                format_count(capacity.kv_cache_tokens),
                format_count(capacity.concurrent_sequences),
                format_share(capacity.headroom_share),
            )
        self._show(table)
        for result in results:
            self._changes(result, f"{result.gpu.count} x {result.gpu.name}" if result.gpu else "")

    def _answer(self, result: SizeResult, results: Sequence[SizeResult]) -> None:
        """Does it fit, how many at once, what limits it, what would change it."""
        self.console.print()
        capacity, kv, name = result.capacity, result.kv, literal(result.model.name)
        if _has_several_engines(results):
            name += f" by {literal(result.config['engine'].value)}"
        if capacity is None:
            weights = result.weights.total_bytes
            takes = "takes" if result.concurrency == 1 else "take"
            self._say(
                f"{name}: {_sequences(result.concurrency, result.seq)} {takes} {format_bytes(kv.total_bytes)} of KV",
                style="bold",
            )
            self._say(f"Weights: {format_bytes(weights)}")
            self._say("Whether it fits: --gpu NAME, or --gpu all to compare (kvplan gpus lists them)")
            return
        gpu = result.gpu
        where = f" on {gpu.count} x {gpu.name}" if gpu is not None else ""
        verdict, sure = "fits" if capacity.fits else "does not fit", capacity.fits_confidence
        self._say(
            f"{name} {verdict}{where}{'' if sure == 'exact' else f', {sure}'}",
            style="bold green" if capacity.fits else "bold red",
        )
        if sure == "uncertain" and capacity.overhead_bytes is not None:
            low, high = capacity.overhead_bytes.low, capacity.overhead_bytes.high
            why = f"at one end it {'does not fit' if capacity.fits else 'fits'}"
            if capacity.overhead_is_guess:
                why = "that is a guess; --kv-cache-memory-bytes from the engine's log makes it exact"
            self._say(f"Uncertain: the overhead is {_gib(low)} to {_gib(high)} GiB, and {why}")
        self._say(f"At once: {_at_once(result)}")
        if capacity.fits:
            self._say(f"Asked for: {capacity.reason}{_of_replica(result)}")
        self._say(f"Limit: {_limit(result)}")
        if capacity.suggestions:
            self._changes(result, "")
        elif capacity.fits:
            self._say("More: --suggest shows what each change would bring")
        else:
            self._say("No change of one or two settings makes it fit")

    def _changes(self, result: SizeResult, where: str) -> None:
        if result.capacity is None or not result.capacity.suggestions:
            return
        table = _table("what would make it fit" if not result.capacity.fits else "what would let more in", "")
        table.columns[1].justify = "left"
        for suggestion in result.capacity.suggestions:
            table.add_row(literal(suggestion.change), literal(suggestion.effect))
        if where:
            self._say(where)
        self._show(table)

    def _memory(self, result: SizeResult) -> None:
        """Where the memory of the limiting GPU goes."""
        capacity, gpu = result.capacity, result.gpu
        if capacity is None or gpu is None or capacity.overhead_bytes is None:
            return
        overhead = capacity.overhead_bytes
        rank = capacity.ranks[capacity.limiting_rank]
        free = capacity.headroom_bytes
        if capacity.available_kv_bytes < 0:  # what is there is less than nothing
            free = capacity.available_kv_bytes - capacity.taken_kv_bytes
        parts = [
            ("weights", rank.weights_bytes or 0, ""),
            (
                f"overhead, {capacity.overhead_source}",
                rank.overhead_bytes or 0,
                f"{_gib(overhead.low)} to {_gib(overhead.high)}",
            ),
            (
                f"KV of {result.concurrency:,} sequence{'s' if result.concurrency > 1 else ''}",
                capacity.taken_kv_bytes,
                "",
            ),
            ("KV, free" if free >= 0 else "KV, lacking", free, ""),
            ("left to others", capacity.unused_bytes or 0, ""),
        ]
        table = _table("memory of each GPU", "GiB", "", "from - to")
        table.columns[2].justify = "left"
        table.columns[2].no_wrap = True
        table.columns[3].justify = "left"
        mark = "█" if self.console.encoding.startswith("utf") else "#"
        if rank.extra_bytes > 5 << 20:  # less would show as 0.00
            parts.insert(1, ("rotary tables, LoRA", rank.extra_bytes, ""))
        whole = max(gpu.memory_bytes, sum(size for _, size, _ in parts if size > 0))
        for label, size, note in (*parts, ("in all", gpu.memory_bytes, "")):
            bar = mark * (max(0, round(size / whole * _BAR)) if self.console.width >= _NARROWEST_BAR else 0)
            table.add_row(label, _gib(size), Text(bar, style="cyan"), note)
        self._show(table)

    def _facts(self, results: Sequence[SizeResult]) -> None:
        """Figures of each result in a column; what only some have is a dash in the others."""
        columns = [dict(_size_rows(result, alone=len(results) == 1)) for result in results]
        labels = list(dict.fromkeys(label for column in columns for label in column))
        table = _table("", *(literal(_title(result, results)) for result in results))
        for label in labels:
            table.add_row(label, *(column.get(label, "-") for column in columns))
        self._show(table)

    def _compared(self, results: Sequence[SizeResult]) -> None:
        """A row for each result, and below the table why some do not fit."""
        first = results[0]
        self.console.print()
        self._say(f"{_sequences(first.concurrency, first.seq)}, in GiB; KV of a token in KiB", style="bold")
        has_budget = any(result.capacity is not None for result in results)
        budget = ("for KV", "tokens", "at once", "fits") if has_budget else ()
        table = _table("", "KV a token", "KV", "weights", *budget, keep_first=True)
        table.columns[-1].no_wrap = True
        for result in results:
            kv = result.kv
            table.add_row(
                literal(_title(result, results)),
                f"{kv.bytes_per_token / 1024:,.2f}",
                _gib(kv.total_bytes),
                _gib(result.weights.total_bytes),
                *(_capacity_cells(result.capacity) if has_budget else ()),
            )
        self._show(table)
        for result in results:
            if result.capacity is not None and not result.capacity.fits:
                self._say(f"{literal(_title(result, results))} does not fit: {_limit(result)}")

    def _ranks(self, result: SizeResult) -> None:
        """The stages of a pipeline, and what ranks hold that others hold too."""
        capacity = result.capacity
        if capacity is None:
            return
        replicated = any(_is_replicated(rank) for rank in capacity.ranks)
        if len(capacity.ranks) == 1 and not replicated:
            return
        table = _table("GPUs of stage", "layers", "weights, GiB", "KV B/token", "block, B", "blocks")
        for rank in capacity.ranks:
            limits = " (limits)" if rank.stage == capacity.limiting_rank and len(capacity.ranks) > 1 else ""
            table.add_row(
                f"{rank.stage}{limits}",
                str(rank.layers),
                _gib(rank.weights_bytes),
                f"{rank.bytes_per_token:,}",
                f"{rank.bytes_per_block:,}",
                f"{rank.num_blocks:,}",
            )
            if replicated:
                table.add_row(
                    "  of it replicated",
                    "",
                    _gib(rank.replicated_weights_bytes),
                    f"{rank.replicated_bytes_per_token:,}",
                )
        self._show(table)

    def _groups(self, result: SizeResult) -> None:
        """Groups of layers with block tables of their own, where there are several."""
        groups = result.kv.groups
        if len(groups) < 2 and all(group.padded_layers == group.layers for group in groups):
            return
        table = _table("KV cache groups", "layers", "padding", "block", "page, B", "blocks")
        for group, count in Counter(groups).items():
            table.add_row(
                f"{count} x {literal(group.kind)}" if count > 1 else literal(group.kind),
                str(group.layers),
                str(group.padded_layers - group.layers),
                f"{group.block_size:,}",
                "several" if group.page_bytes is None else f"{group.page_bytes:,}",
                f"{group.blocks_per_sequence:,}",
            )
        self._show(table)

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
        self._show(table)
        if result.preemptions.events:
            self._preemptions(result)
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
        self._show(times)
        if latency.model["calibration"]:
            self._say(
                f"Times are estimates of a {latency.model['name']} ({latency.model['calibration']}); "
                "their error is not known."
            )

    def _preemptions(self, result: SimulateResult) -> None:
        """Why sequences were preempted, and the costliest cases."""
        causes = result.causes
        self._say(f"Of the preemptions {causes.sentence}.")
        table = _table("worst", "in step", "needed by", "blocks", "lost", "found", "time lost")
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
        self._show(table)

    def min_blocks(self, least: MinBlocks) -> None:
        """The smallest pool that was found to meet a goal."""
        if least.num_gpu_blocks is None:
            self._say(f"No pool meets --min-blocks {literal(least.goal)}: {least.proof}.")
            return
        self._say(
            f"--min-blocks {literal(least.goal)}: {least.num_gpu_blocks:,} blocks ({least.proof}; {least.runs} runs)."
        )

    # compare

    def compare(self, result: CompareResult) -> None:
        """A row for each run: what it held, then how fast it was and why it differs; * marks a column's best."""
        from kvplan.jobs import compare as columns  # only this command has them

        first = next((run.result for run in result.runs if run.result is not None), None)
        if first is not None:
            self._say(_compare_headline(first, result.varied))
        labels = list(map(literal, result.labels))
        names = " ".join(map(columns.written, result.varied))
        if len(names) > _WIDEST_LABEL:  # the tables have no room for it
            self._say(f"by {names}")
            names = ""
        if max(map(len, labels), default=0) > _WIDEST_LABEL:
            for number, label in enumerate(labels, 1):
                self._say(f"{number}: {label}")
            labels = [str(number) for number in range(1, len(labels) + 1)]
        held = _table(
            names, "tokens", "to fill", "waste", "holes", "used", "preempt.", "run", "wait", keep_first=True
        )
        speed = _table(names, "hit", "tokens/s", "TTFT", "TPOT", "E2E", "why", keep_first=True)
        speed.columns[-1].justify = "left"
        for label, run in zip(labels, result.runs, strict=True):
            if run.result is None:
                speed.add_row(label, *"-----", run.differs_by)
                continue
            kv = run.result.kv
            held.add_row(
                label,
                _led(run, columns.TOKEN_SHARE, format_share),
                format_share(kv.reserved_share),
                format_share(kv.internal_fragmentation),
                _led(run, columns.HOLES, format_share),
                format_share(kv.utilization.mean),
                _led(run, columns.PREEMPTIONS, format_count),
                _led(run, columns.RUNNING, _one_digit),
                _led(run, columns.WAITING, _one_digit),
            )
            speed.add_row(
                label,
                _led(run, columns.HIT_RATE, format_share),
                _led(run, columns.THROUGHPUT, _one_digit),
                *(_led(run, column, format_seconds) for column in (columns.TTFT, columns.TPOT, columns.E2E)),
                run.differs_by,
            )
        if first is not None:
            self.console.print(held)
        self.console.print(speed)
        self._say("* leads its column. Shares are of the memory held, over time; figures are means.")
        for label, run in zip(labels, result.runs, strict=True):
            if run.error is not None:
                self._say(f"{label}: {literal(str(run.error))}; {literal(run.error.hint or '')}".rstrip("; "))
        if result.is_partial:
            self._say("Interrupted: runs that were not finished are left out.")

    def map(self, pool: PoolMap) -> None:
        """Who holds which cell of the pool in one step."""
        when = "" if pool.time_s is None else f", {format_seconds(pool.time_s)}"
        self.console.print()
        self._say(f"The pool in step {pool.step:,}{when}", style="bold")
        self._grid(pool)

    def _grid(self, pool: PoolMap) -> None:
        """The cells, what the characters mean, and the block table where one was asked for."""
        unit = "block" if pool.cell_tokens > 1 else "slot"
        label = len(f"{pool.num_cells:,}")
        drawing = draw_pool(pool, max(8, min(64, self.console.width - label - 3)), _MAP_ROWS)
        each = f"{drawing.per_mark} {unit}s" if drawing.per_mark > 1 else f"a {unit}"
        size = f" of {pool.cell_tokens} tokens" if pool.cell_tokens > 1 else ""
        self._say(f"{pool.num_cells:,} {unit}s{size}, a character is {each}", style="dim")
        for row in drawing.rows:
            line = Text(f" {row.first:>{label},} ", style="dim")
            for mark, marks in groupby(row.marks):
                line.append("".join(marks), style=_mark_style(mark))
            self.console.print(line)
            if row.alike:
                self._say(f" {'':>{label}} {row.alike:,} more rows of the same", style="dim")
        self._map_legend(pool, drawing, unit)
        if pool.table_of is not None:
            self._block_table(pool, unit)

    def _map_legend(self, pool: PoolMap, drawing: PoolDrawing, unit: str) -> None:
        table = _table("", f"{unit}s", "shared", "tokens", "")
        table.columns[-1].justify = "left"
        shown = [one for one in pool.requests if one.id in drawing.letters]
        listed = sorted(shown, key=lambda one: -one.cells)[:_MAP_REQUESTS]
        for one in shown:
            if one in listed:
                mark = drawing.letters[one.id]
                name = Text(mark, style=_mark_style(mark))
                if one.id != mark:
                    name.append(f" {literal(one.id)}", style="default")
                shared = f"{one.shared_cells:,}"
                table.add_row(name, f"{one.cells:,}", shared, f"{one.tokens:,}", "")
        rest = len(pool.requests) - len(listed)
        if rest:
            held = sum(one.cells for one in pool.requests) - sum(one.cells for one in listed)
            tokens = sum(one.tokens for one in pool.requests) - sum(one.tokens for one in listed)
            table.add_row(f"{rest:,} more requests", f"{held:,}", "", f"{tokens:,}", "other letters, +")
        reserved = "lower case, -: no token in them yet"
        for mark, state, what in (
            (" ", "held", "upper case, +: one request has them"),
            (" ", "reserved", reserved),
            (SHARED, "shared", "used by several requests"),
            (CACHED, "cached", "free, and reusable"),
            (FREE, "free", "free, and empty"),
        ):
            count = next(n for name, n in pool.cells.items() if name == state)
            if count:
                table.add_row(Text(f"{mark} {state}", style="dim"), f"{count:,}", "", "", what)
        self.console.print(table)

    def _block_table(self, pool: PoolMap, unit: str) -> None:
        self._say(f"{'The block table' if unit == 'block' else 'The place'} of {literal(pool.table_of)}")
        table = _table("logical", "physical", f"{unit}s", "tokens", "users")
        for run in pool.table[:_TABLE_RUNS]:
            table.add_row(
                _span(run.logical, run.cells),
                _span(run.physical, run.cells),
                f"{run.cells:,}",
                f"{run.tokens:,}",
                f"{run.users:,}",
            )
        self.console.print(table)
        if len(pool.table) > _TABLE_RUNS:
            self._say(f"and {len(pool.table) - _TABLE_RUNS:,} more stretches (--json has all)")

    # explain

    def topics(self, questions: Mapping[str, str]) -> None:
        """The topics and the question that each answers."""
        table = _table("topic", "", keep_first=True)
        table.columns[1].justify = "left"
        for name, question in questions.items():
            table.add_row(name, question)
        self.console.print(table)
        self._say("kvplan explain TOPIC works one through; --model NAME with another model")

    def explanation(self, found: Explanation) -> None:
        """A topic: its question, its parts in order, and where texts differ."""
        self._say(f"{found.topic}: {found.question}", style="bold")
        self._say(_settings_line(found.config, found.shown), style="dim")
        for part in found.parts:
            self._part(part)
        for note in found.notes:
            self.console.print()
            self._say(f"Note: {note}", style="italic")

    def _part(self, part: Part) -> None:
        from kvplan.topics import parts as kinds  # only this command draws them

        self.console.print()
        if isinstance(part, kinds.Prose):
            self._say(part.text)
        elif isinstance(part, kinds.Formula):
            self.console.print(Text(part.text, style="cyan"))
        elif isinstance(part, kinds.Figures):
            self._figures(part)
        elif isinstance(part, kinds.Table):
            self._values(part)
        elif isinstance(part, kinds.Timeline):
            self._timeline(part)
        else:
            self._say(part.title, style="bold")
            self._grid(part.pool)

    def _figures(self, part: Figures) -> None:
        table = Table(show_header=False, box=None, pad_edge=False)
        table.add_column(style="bold")
        table.add_column()
        for row in part.rows:
            how = f"  ({row.how})" if row.how else ""
            table.add_row(literal(row.label), f"{_value(row.value, row.unit)}{how}")
        self.console.print(table)

    def _values(self, part: Values) -> None:
        if part.title:
            self._say(part.title, style="bold")
        table = _table(*(column.label for column in part.columns))
        for column, shown in zip(part.columns, table.columns, strict=True):
            shown.justify = "left" if column.unit == "text" else "right"
        for row in part.rows:
            cells = zip(row, part.columns, strict=True)
            table.add_row(*(literal(_value(value, column.unit)) for value, column in cells))
        self.console.print(table)

    def _timeline(self, part: Timeline) -> None:
        label = max(len(lane.name) for lane in part.lanes)
        columns = max(8, min(_TIMELINE, self.console.width - label - 3))
        per_mark = max(1, -(-part.ruler // columns))
        each = f"{per_mark} steps" if per_mark > 1 else "a step"
        self._say(f"{part.title}: {part.steps:,} steps, a character is {each}", style="bold")
        for lane in part.lanes:
            line = Text(f" {lane.name:<{label}} ", style="dim")
            for mark, marks in groupby(draw_lane(lane.stretches, part.steps, per_mark, loud=part.loud)):
                line.append("".join(marks), style=_mark_style(mark))
            self.console.print(line)

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
        self._show(table)
        for check in report.checks:
            # Of a check about a deployment, what is to be mended stands in another file.
            places = {v.deployment: v for v in check.verdicts if v.deployment and not v.passed}
            for (file, line, _), verdict in places.items():
                self._say(
                    f"{literal(check.name)}: see {literal(file)}:{line} ({literal(report.path)}:{verdict.line})"
                )
        self._say(
            f"{report.passed} of {len(report.checks)} {'check passes' if len(report.checks) == 1 else 'checks pass'}"
        )

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
        self._show(table)
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
            agree = "terms agree" if compared > 1 else "term agrees"
            self._say(f"{compared - result.differing} of {compared} {agree}")
        else:
            self._say("no term can be compared")

    # catalogues

    def models(self, models: Sequence[ModelSpec]) -> None:
        """The catalogue of models."""
        table = _table(
            "model", "10^9 params", "layers", "KV heads", "max tokens", "attention", keep_first=True
        )
        table.columns[-1].justify = "left"
        for m in models:
            parameters = m.weights.parameters
            kinds: Counter[str] = Counter()
            for cache, count in m.attention:
                kinds[cache.kind.replace("_", " ")] += count
            table.add_row(
                literal(m.name),
                "unknown" if parameters is None else f"{parameters / 1e9:,.2f}",
                str(m.num_layers),
                f"{m.num_kv_heads} x {m.head_dim}",
                format_count(m.max_position_embeddings),
                ", ".join(kind if len(kinds) == 1 else f"{count} {kind}" for kind, count in kinds.items()),
            )
        self._show(table)

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
        self._show(table)
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
        self._show(table)

    def _show(self, table: Table) -> None:
        """Print a table; where its words do not fit beside each other, row by row below each other.

        Rich shrinks the widest column first, into the middle of words. Here each column gets its longest word, and
        what is left is shared out evenly, the least lacking first.
        """
        columns = [[_plain(column.header), *map(_plain, column.cells)] for column in table.columns]
        lines = [max(map(cell_len, column)) for column in columns]
        least = [
            line if column.no_wrap else _longest_word(texts)
            for line, column, texts in zip(lines, table.columns, columns, strict=True)
        ]
        whole = Measurement.get(self.console, self.console.options.update_width(10_000), table).maximum
        spare = self.console.width - (whole - sum(lines)) - sum(least)
        if spare < 0:
            self._show_rows(columns)
            return
        by_lack = sorted(range(len(columns)), key=lambda i: lines[i] - least[i])
        for done, i in enumerate(by_lack):
            more = min(lines[i] - least[i], spare // (len(columns) - done))
            table.columns[i].width, spare = least[i] + more, spare - more
        self.console.print(table)

    def _show_rows(self, columns: Sequence[Sequence[str]]) -> None:
        """A table of texts, row by row: the first cell, and below it each other one with the name of its column."""
        names = [column[0] for column in columns]
        self.console.print()
        if names[0]:
            self._say(names[0], style="bold")
        for first, *cells in zip(*(column[1:] for column in columns), strict=True):
            self._say(first)
            for name, cell in zip(names[1:], cells, strict=True):
                if cell.strip():
                    self._say(f"  {name}: {cell}" if name and len(cells) > 1 else f"  {cell}")

    def _say(self, text: str, *, style: str = "") -> None:
        self.console.print(Text(text, style=style))


def _plain(cell: object) -> str:
    return cell.plain if isinstance(cell, Text) else str(cell)


def _longest_word(texts: Sequence[str]) -> int:
    return min(max((cell_len(word) for text in texts for word in text.split()), default=0), _LONGEST_WORD)


#: Colours of letters, one after the other; what they say is said by the letters too.
_LETTER_STYLES = ("cyan", "green", "yellow", "magenta", "blue", "red")


def _mark_style(mark: str) -> str:
    """The colour of a character of a map."""
    if mark.isalpha():
        style = _LETTER_STYLES[(ord(mark.upper()) - ord("A")) % len(_LETTER_STYLES)]
        return style if mark.isupper() else f"dim {style}"
    return {SHARED: "bold white", CACHED: "bright_black", FREE: "bright_black"}.get(mark, "default")


def _settings_line(settings: Settings, names: Sequence[str]) -> str:
    """The settings that numbers depend on; those that nobody gave are said to be assumed."""
    given = [f"{name} {literal(settings[name].value)}" for name in names if settings[name].given]
    assumed = [f"{name} {literal(settings[name].value)}" for name in names if not settings[name].given]
    return "; ".join([*given, f"assumed: {', '.join(assumed)}"] if assumed else [", ".join(given)])


_FLOP_UNITS = ((10**18, "EFLOP"), (10**15, "PFLOP"), (10**12, "TFLOP"), (10**9, "GFLOP"), (10**6, "MFLOP"))


def _value(value: Value, unit: Unit) -> str:
    """A value of an explanation as text."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    if unit in ("bytes", "exact_bytes"):
        return format_bytes(int(value)) if unit == "bytes" else _exact_bytes(int(value))
    if unit == "share":
        return format_share(value)
    if unit == "times":
        return f"{value:,.2f}" if value < 100 else f"{value:,.1f}"
    if unit == "flops":
        return next(
            (f"{value / size:.3g} {name}" for size, name in _FLOP_UNITS if value >= size), f"{value:,} FLOP"
        )
    if isinstance(value, int):
        return format_count(value)
    return f"{value:,.3f}".rstrip("0").rstrip(".") if value >= 1 else f"{value:.3g}"


def _span(first: int, count: int) -> str:
    return f"{first:,}" if count == 1 else f"{first:,} - {first + count - 1:,}"


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
    if unit in ("times", "percent"):
        return f"{value:,.2f}{'x' if unit == 'times' else '%'}"
    return f"{value:,}"


def _audit_difference(line: AuditLine) -> str:
    """Theirs less ours; ``=`` where the printed text allows ours."""
    if line.difference is None or line.ours is None:
        return "-"
    if line.low is not None and line.high is not None and line.low <= line.ours <= line.high:
        return "="
    sign = "+" if line.difference > 0 else ""
    return f"{sign}{_audit_figure(line.unit, line.difference)}"


def _assumptions(settings: Settings, *, but: Collection[str] = ()) -> str:
    """The engine and the settings that decide bytes; those that nobody gave are said to be assumed."""
    names = [
        "engine",
        "dtype",
        "kv_cache_dtype",
        "block_size",
        "tensor_parallel_size",
        "gpu_memory_utilization",
    ]
    if settings["tensor_parallel_size"].value == 1:
        names.remove("tensor_parallel_size")  # the answer says how many GPUs there are
    if "gpu" not in settings:
        names.remove("gpu_memory_utilization")
    names = [name for name in names if name not in but]
    given = [f"{n} {literal(settings[n].value)}" for n in names if settings[n].given]
    assumed = [f"{n} {literal(settings[n].value)}" for n in names if not settings[n].given]
    if "overhead" in settings:
        given.append(
            f"overhead {literal(settings['overhead'].value)} ({literal(settings['overhead'].source)})"
        )
    return "; ".join([*given, f"assumed: {', '.join(assumed)}"] if assumed else given)


def _sequences(count: int, tokens: int) -> str:
    return f"{count:,} {'sequence' if count == 1 else 'sequences'} of {tokens:,} tokens"


def _has_several_engines(results: Sequence[SizeResult]) -> bool:
    return len({result.config["engine"].value for result in results}) > 1


def _title(result: SizeResult, results: Sequence[SizeResult]) -> str:
    """What tells a result from those beside it: the model, the engine or both."""
    engine = str(result.config["engine"].value)
    if not _has_several_engines(results):
        return result.model.name
    several_models = len({r.model.name for r in results}) > 1
    return f"{result.model.name} {engine}" if several_models else engine


def _degrees(result: SizeResult) -> str:
    names = {"tensor_parallel_size": "TP", "pipeline_parallel_size": "PP", "data_parallel_size": "DP"}
    sizes = {short: result.config[name].value for name, short in names.items()}
    several = [f"{short} {size}" for short, size in sizes.items() if size != 1]
    return f" ({', '.join(several)})" if several else ""


def _at_once(result: SizeResult) -> str:
    """How many sequences are resident, of the length asked for and of a distribution."""
    capacity = result.capacity
    assert capacity is not None, "asked of results with a budget"
    found, count = capacity.distribution, capacity.concurrent_sequences
    text = _sequences(count, result.seq) if count else f"no sequence of {result.seq:,} tokens"
    text += _of_replica(result)
    if found is None:
        return text
    return (
        f"{found.concurrent_mean:,} sequences of the lengths given on average, {found.concurrent_p95:,} with 95 % "
        f"confidence; {text}"
    )


def _of_replica(result: SizeResult) -> str:
    """Counts are those of one replica, where there are several."""
    replicas = result.config["data_parallel_size"].value
    return f", in each of {replicas:,} replicas" if isinstance(replicas, int) and replicas > 1 else ""


def _limit(result: SizeResult) -> str:
    """What stands in the way, or what runs out first."""
    capacity = result.capacity
    assert capacity is not None, "asked of results with a budget"
    rank = capacity.ranks[capacity.limiting_rank]
    stage = (
        f" of stage {capacity.limiting_rank} (the one with the fewest blocks)"
        if len(capacity.ranks) > 1
        else ""
    )
    if capacity.overhead_bytes is not None and capacity.available_kv_bytes < 0:
        return (
            f"weights of {format_bytes(rank.weights_bytes)} and overhead of about "
            f"{format_bytes(rank.overhead_bytes)} on each GPU{stage} leave nothing for KV"
        )
    if not capacity.fits:
        return capacity.reason + stage
    seqs = result.config["max_num_seqs"].value
    if isinstance(seqs, int) and seqs < capacity.concurrent_sequences:
        return f"max_num_seqs {seqs:,}: the KV memory would hold more"
    return (
        f"{format_bytes(capacity.available_kv_bytes)} for KV on each GPU{stage}, "
        f"{capacity.kv_cache_tokens:,} tokens as the engine counts"
    )


def _is_replicated(rank: Rank) -> bool:
    """Whether other ranks hold KV of this one too, or weights worth a word: norms always are."""
    weights = rank.weights_bytes or 0
    return rank.replicated_bytes_per_token > 0 or (rank.replicated_weights_bytes or 0) * 100 > weights


def _capacity_cells(capacity: Capacity | None) -> tuple[str, str, str, str]:
    """Memory for KV, its tokens, sequences at once and the verdict."""
    if capacity is None:
        return "-", "-", "-", "-"
    return (
        _gib(capacity.available_kv_bytes),
        format_count(capacity.kv_cache_tokens),
        format_count(capacity.concurrent_sequences),
        f"{'yes' if capacity.fits else 'no'}, {capacity.fits_confidence}",
    )


def _gib(size: int | None) -> str:
    return "unknown" if size is None else f"{size / (1 << 30):,.2f}"


def _size_rows(result: SizeResult, *, alone: bool) -> list[tuple[str, str]]:
    kv, weights, capacity, gpu = result.kv, result.weights, result.capacity, result.gpu
    rows = [
        ("KV per token", _exact_bytes(kv.bytes_per_token)),
        ("KV per block", _exact_bytes(kv.bytes_per_block)),
        ("tokens in a block", f"{kv.block_size:,}"),
    ]
    if kv.fixed_bytes_per_sequence:
        rows.append(("fixed KV of a sequence", _exact_bytes(kv.fixed_bytes_per_sequence)))
    rows += [
        (f"KV of {result.seq:,} tokens", _exact_bytes(kv.bytes_per_sequence)),
    ]
    if kv.allocated_bytes_per_sequence != kv.bytes_per_sequence:
        rows.append(("  in whole blocks", _exact_bytes(kv.allocated_bytes_per_sequence)))
    if result.concurrency > 1:
        rows.append((f"KV of {result.concurrency:,} sequences", _exact_bytes(kv.total_bytes)))
    rows += [
        ("parameters", "unknown" if weights.parameters is None else format_count(weights.parameters)),
        ("weights", _exact_bytes(weights.total_bytes) if alone else format_bytes(weights.total_bytes)),
    ]
    if kv.per_gpu.bytes_per_token != kv.bytes_per_token or kv.cluster_bytes_per_token != kv.bytes_per_token:
        rows += [
            ("per GPU: KV per block", _exact_bytes(kv.per_gpu.bytes_per_block)),
            ("per GPU: weights", _exact_bytes(weights.per_gpu_bytes)),
        ]
    if capacity is None:
        return rows
    if gpu is not None and not alone:
        rows.append(("GPU", f"{gpu.count} x {gpu.name}, {format_bytes(gpu.memory_bytes)}"))
    if capacity.overhead_bytes is not None and not alone:
        low, high = capacity.overhead_bytes.low, capacity.overhead_bytes.high
        source = str(capacity.overhead_source).replace("estimated", "est.")
        rows.append((f"overhead, {source}", f"{format_bytes(low)} to {format_bytes(high)}"))
    share = [] if capacity.headroom_share is None else [format_share(capacity.headroom_share)]
    rows.append(("memory for KV", format_bytes(capacity.available_kv_bytes)))
    if capacity.num_gpu_blocks:
        rows += [
            ("blocks", f"{capacity.num_gpu_blocks:,}, {capacity.usable_blocks:,} usable"),
            ("the engine prints", f"{capacity.kv_cache_tokens:,} tokens, {capacity.max_concurrency:.2f}x"),
            ("  at max_model_len", f"{capacity.max_model_len:,}"),
            ("sequences at once", format_count(capacity.concurrent_sequences)),
            ("headroom", ", ".join([format_bytes(capacity.headroom_bytes), *share])),
            ("longest that fits", f"{capacity.max_model_len_that_fits:,} tokens"),
        ]
    found = capacity.distribution
    if found is not None:
        rows += [
            (
                f"lengths, {found.method}",
                f"mean {found.mean_tokens:,.0f}, p95 {found.p95_tokens:,.0f} tokens",
            ),
            ("  blocks of a sequence", f"{found.blocks_mean:,.1f}, {found.shared_blocks:,.1f} shared"),
            (
                "  at once",
                f"{found.concurrent_mean:,} on average, {found.concurrent_p95:,} with 95 % conf.",
            ),
        ]
    return rows


def _exact_bytes(size: int | None) -> str:
    return "unknown" if size is None else f"{size:,} B = {format_bytes(size)}"


def _simulate_headline(result: SimulateResult) -> str:
    settings = result.config
    what = f"{literal(result.trace['path'])}: {result.trace['requests']:,} requests"
    if "model" in settings:
        marks = [f"{settings[n].value}{_mark(settings, n)}" for n in ("model", "gpu") if n in settings]
        what += f" on {literal(' / '.join(marks))}"
    return (
        f"{what}, {_scheduler(result)} scheduler, "
        f"{'asynchronous' if result.simulation['async_scheduling'] else 'synchronous'}"
    )


def _scheduler(result: SimulateResult) -> str:
    engine, version = result.simulation["engine"], result.simulation["scheduler_version"]
    return f"vLLM {version}" if engine == "vllm" else f"{engine} ({version})"


def _compare_headline(result: SimulateResult, varied: Collection[str]) -> str:
    settings = result.config
    what = f"{literal(result.trace['path'])}: {result.trace['requests']:,} requests"
    named = [name for name in ("model", "gpu", "engine") if name in settings and name not in varied]
    return ", ".join([what, *(f"{literal(settings[n].value)}{_mark(settings, n)}" for n in named)])


def _led(run: ComparedRun, column: Column, written: Callable[[float | None], str]) -> Text:
    """The figure of a run in a column, marked where it leads."""
    assert run.result is not None, "a run without figures has a row of its own"
    text = written(column.of(run.result))
    return Text(f"{text}*", style="bold green") if column.path in run.best else Text(text)


def _one_digit(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


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
            f"{kv.num_gpu_blocks:,} "
            + (f"blocks of {kv.block_size} tokens" if kv.block_size > 1 else "slots of a token")
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
            f"{format_share(cache.hit_rate)} of {cache.queried_tokens:,} prompt tokens hit; "
            f"{cache.evicted_blocks:,} blocks evicted, at most {cache.peak_shared_blocks:,} shared"
            if cache.enabled
            else "off",
        ),
    ]
    if cache.copied_blocks:
        rows.append(("copy-on-write", f"{cache.copied_blocks:,} blocks copied"))
    rows.append(
        (
            "preemptions",
            f"{pre.events:,} of {pre.requests:,} requests; {pre.recomputed_tokens:,} tokens computed again",
        )
    )
    if pre.swapped_out_blocks:
        rows.append(
            ("swapped", f"{pre.swapped_out_blocks:,} blocks to the CPU, {pre.swapped_in_blocks:,} back")
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
