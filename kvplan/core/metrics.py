"""Folds turns into the figures of docs/metrics.md, exactly, in whole ticks and blocks."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from typing import Any

from kvplan.core.engine import Turn
from kvplan.core.request import Request, seconds


@dataclass(slots=True)
class RequestRecord:
    """What happened to one request. Times are ticks, None until they come."""

    request: Request
    measured: bool = True
    rejected_for: str | None = None
    admitted: int | None = None
    first_token: int | None = None
    last_token: int | None = None
    finished: int | None = None
    output_tokens: int = 0
    hit_tokens: int = 0
    resumed_hit_tokens: int = 0
    preemptions: int = 0


@dataclass(frozen=True, slots=True)
class Distribution:
    """A set of values: how many, mean and percentiles (linear interpolation between order statistics)."""

    count: int
    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    max: float | None = None


@dataclass(frozen=True, slots=True)
class RequestCounts:
    """How the requests ended. ``truncated`` ones finished at max_model_len, short of what they asked."""

    total: int
    finished: int
    rejected: int
    unfinished: int
    truncated: int
    reject_reasons: dict[str, int]


@dataclass(frozen=True, slots=True)
class Utilization:
    """Referenced over usable blocks, over time."""

    mean: float | None
    p50: float | None
    p95: float | None
    max: float | None


@dataclass(frozen=True, slots=True)
class KvFigures:
    """The KV pool over time; the four shares sum to 1. Without a window, ``peak_blocks`` is of all that ran."""

    num_gpu_blocks: int
    block_size: int
    utilization: Utilization
    token_share: float | None
    internal_fragmentation: float | None
    reserved_share: float | None
    external_fragmentation: float | None
    peak_blocks: int


@dataclass(frozen=True, slots=True)
class BatchFigures:
    """Queue lengths after scheduling; means over time."""

    running_mean: float | None
    running_max: int | None
    waiting_mean: float | None
    waiting_max: int | None


@dataclass(frozen=True, slots=True)
class PrefixCacheFigures:
    """Prompt tokens found in the cache at first admissions, and what the cache went through."""

    enabled: bool
    queried_tokens: int
    hit_tokens: int
    hit_rate: float | None
    resumed_hit_tokens: int
    evicted_blocks: int
    peak_shared_blocks: int
    copied_blocks: int


@dataclass(frozen=True, slots=True)
class PreemptionFigures:
    """Preemptions: events, requests that had one, tokens computed again, blocks swapped."""

    events: int
    requests: int
    recomputed_tokens: int
    swapped_out_blocks: int
    swapped_in_blocks: int


@dataclass(frozen=True, slots=True)
class Throughput:
    """Finished requests and their tokens over the length of the window."""

    requests_per_s: float | None
    input_tokens_per_s: float | None
    output_tokens_per_s: float | None


@dataclass(frozen=True, slots=True)
class LatencyFigures:
    """Times of requests, in seconds."""

    percentile_method: str
    ttft_s: Distribution
    tpot_s: Distribution
    itl_s: Distribution
    e2e_s: Distribution
    queue_s: Distribution
    model: dict[str, object]


@dataclass(frozen=True, slots=True)
class Slo:
    """Latency goals in seconds; None is no goal."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    @property
    def is_stated(self) -> bool:
        """Whether any goal is set."""
        return (self.ttft_s, self.tpot_s, self.e2e_s) != (None, None, None)


@dataclass(frozen=True, slots=True)
class Goodput:
    """Requests that met every stated goal: per second, and as a share of all that arrived."""

    requests_per_s: float | None
    share: float | None
    slo: Slo


@dataclass(slots=True)
class _Sums:
    """Integrals over ticks of queue lengths and slots, and maxima."""

    running: int = 0
    waiting: int = 0
    empty: int = 0
    reserved: int = 0
    running_max: int = 0
    waiting_max: int = 0
    shared_max: int = 0

    def add(self, other: _Sums) -> None:
        """Take in what came after."""
        self.running += other.running
        self.waiting += other.waiting
        self.empty += other.empty
        self.reserved += other.reserved
        self.running_max = max(self.running_max, other.running_max)
        self.waiting_max = max(self.waiting_max, other.waiting_max)
        self.shared_max = max(self.shared_max, other.shared_max)


class Metrics:
    """Figures of one run. Times come in ticks; ``seconds_per_tick`` None leaves every ``_s`` unknown.

    The window W runs from the first arrival plus ``warmup`` ticks to the last finish. What happens after
    a finish is held back until the next one, since only then it is known to lie in W.
    """

    def __init__(
        self,
        *,
        num_gpu_blocks: int,
        block_size: int,
        prefix_caching: bool,
        seconds_per_tick: Fraction | None,
        warmup: int = 0,
    ) -> None:
        self.num_gpu_blocks = num_gpu_blocks
        self.usable_blocks = num_gpu_blocks - 1
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.seconds_per_tick = seconds_per_tick
        self.warmup = warmup
        self.records: dict[str, RequestRecord] = {}
        self.window_start: int | None = None
        self.window_end: int | None = None
        self.steps = 0
        self.scheduled_tokens = 0
        self.recomputed_tokens = 0
        self.preemption_events = 0
        self.evicted_blocks = 0
        self.peak_blocks = 0
        self._gaps: dict[int, int] = {}
        # Measured sequences that decode without being visited, and when those of them sampled last whose turn
        # did not come.
        self._decoding = 0
        self._late: dict[str, int] = {}
        # Since the last finish: (used blocks, ticks) of each step, and sums.
        self._held_levels: list[tuple[int, int]] = []
        self._held = _Sums()
        # Of the window so far.
        self._ticks_at: dict[int, int] = {}
        self._sums = _Sums()

    # Folding

    def arrive(self, request: Request, now: int, *, rejected_for: str | None) -> None:
        """Note an arrival; it has waited from its arrival until ``now``, when the next step is scheduled."""
        if self.window_start is None:
            self.window_start = request.arrival + self.warmup
        record = RequestRecord(request, request.arrival >= self.window_start, rejected_for)
        self.records[request.id] = record
        if rejected_for is None:
            since = max(request.arrival, self.window_start)
            # What lies before the last finish so far is in the window for sure.
            middle = min(max(since, self.window_end or since), now)
            self._sums.waiting += max(0, middle - since)
            self._held.waiting += max(0, now - max(since, middle))

    def idle(self, start: int, end: int) -> None:
        """Note a gap in which nothing is live."""
        if self.window_start is None:
            return  # before the first arrival
        ticks = end - start - min(self._ticks_before_window(start), end - start)
        if ticks:
            self._held_levels.append((0, ticks))

    def fold(self, turn: Turn[Any], start: int, end: int, growth: int = 0) -> None:
        """Note a step scheduled at ``start`` whose output is there at ``end``.

        Of a turn of several steps that is the first; each following one takes ``growth`` ticks more than the
        one before.
        """
        self.steps += turn.steps
        self._hold_turn(turn, start, end, growth)
        self.scheduled_tokens += turn.scheduled_tokens
        self.recomputed_tokens += turn.recomputed_tokens
        self.preemption_events += len(turn.preempted)
        self.evicted_blocks += turn.evicted
        records = self.records
        for sequence in turn.preempted:
            records[sequence.id].preemptions += 1
        for sequence, hit_tokens in turn.prefix_hits:
            record = records[sequence.id]
            if record.admitted is None:
                record.admitted = start
                record.hit_tokens = hit_tokens
            else:
                record.resumed_hit_tokens += hit_tokens
        last_end = end + (turn.steps - 1) * (end - start) + growth * (turn.steps * (turn.steps - 1) // 2)
        self._fold_decoders(turn, start, end, growth)
        self._fold_samples(turn, last_end)
        for sequence in turn.finished:
            record = records[sequence.id]
            record.finished = last_end
            record.output_tokens = sequence.num_tokens - record.request.input_tokens
        if turn.finished:
            self.window_end = last_end
            self._release_held()

    def note_live(self, live: Iterable[tuple[str, int]]) -> None:
        """Note how many tokens, prompt included, the requests have that never finished."""
        for request_id, tokens in live:
            record = self.records[request_id]
            record.output_tokens = tokens - record.request.input_tokens

    def _hold_turn(self, turn: Turn[Any], start: int, end: int, growth: int) -> None:
        """Hold the state after each step's scheduling. O(steps)."""
        used = self.usable_blocks - turn.free_blocks
        empty, reserved = turn.empty_slots, turn.reserved_slots
        begun: dict[int, int] = {}
        for offset, slots in turn.waste_begun:
            begun[offset] = begun.get(offset, 0) + slots
        levels = self._held_levels
        self.peak_blocks = max(self.peak_blocks, used + sum(turn.takes[1:]))
        before_window = self._ticks_before_window(start)
        ticks = end - start
        total = empty_ticks = reserved_ticks = 0
        for step in range(turn.steps):
            if step:
                taken = turn.takes[step]
                used += taken
                change = self.block_size * taken - turn.decoders
                empty += change
                reserved += change
                if begun:
                    reserved -= begun.get(step, 0)
                ticks += growth
            inside = ticks
            if before_window:
                cut = min(before_window, ticks)
                before_window -= cut
                inside -= cut
            if inside:
                levels.append((used, inside))
                total += inside
                empty_ticks += empty * inside
                reserved_ticks += reserved * inside
        if total:
            held = self._held
            held.running += turn.running * total
            held.waiting += turn.waiting * total
            held.empty += empty_ticks
            held.reserved += reserved_ticks
            held.running_max = max(held.running_max, turn.running)
            held.waiting_max = max(held.waiting_max, turn.waiting)
            held.shared_max = max(held.shared_max, turn.shared_blocks)

    def _fold_decoders(self, turn: Turn[Any], start: int, end: int, growth: int) -> None:
        """Count the gaps of sequences that decode without being visited.

        Each sampled its last token when this turn started, but for those whose turn did not come before.
        """
        gaps, late, records = self._gaps, self._late, self.records
        for sequence in turn.stopped_decoding:
            if sequence.num_tokens < sequence.max_tokens:  # preempted, in the first and only step
                records[sequence.id].last_token = late.pop(sequence.id, start)
                self._decoding -= records[sequence.id].measured
        if turn.decoders:
            regular = self._decoding
            for sequence in turn.starved:
                regular -= records[sequence.id].measured
            starved = {sequence.id for sequence in turn.starved}
            for request_id in [one for one in late if one not in starved]:
                gap = end - late.pop(request_id)
                if records[request_id].measured:
                    regular -= 1
                    gaps[gap] = gaps.get(gap, 0) + 1
            for step in range(turn.steps):
                if regular:
                    gap = end - start + growth * step
                    gaps[gap] = gaps.get(gap, 0) + regular
                regular = self._decoding
        for sequence in turn.starved:
            late.setdefault(sequence.id, start)
        for sequence in turn.stopped_decoding:
            if sequence.num_tokens >= sequence.max_tokens:
                self._decoding -= records[sequence.id].measured
        for sequence in turn.started_decoding:
            self._decoding += records[sequence.id].measured

    def _fold_samples(self, turn: Turn[Any], end: int) -> None:
        gaps = self._gaps
        for sequence in turn.sampled:
            record = self.records[sequence.id]
            if record.last_token is None:
                record.first_token = end
            elif record.measured:
                gap = end - record.last_token
                gaps[gap] = gaps.get(gap, 0) + 1
            record.last_token = end

    def _ticks_before_window(self, start: int) -> int:
        assert self.window_start is not None, "time begins with an arrival"
        return max(0, self.window_start - start)

    def _release_held(self) -> None:
        """Count what was held back: it turned out to lie in the window."""
        ticks_at = self._ticks_at
        for used, ticks in self._held_levels:
            ticks_at[used] = ticks_at.get(used, 0) + ticks
        self._held_levels.clear()
        self._sums.add(self._held)
        self._held = _Sums()

    # Figures

    @property
    def window_ticks(self) -> int:
        """Length of the window; 0 if nothing finished in it."""
        if self.window_start is None or self.window_end is None:
            return 0
        return max(0, self.window_end - self.window_start)

    @property
    def duration_s(self) -> float | None:
        """Seconds from the first arrival, warm-up included, to the last finish."""
        if self.window_start is None or self.window_end is None:
            return None
        return self._seconds(self.window_end - self.window_start + self.warmup)

    def request_counts(self) -> RequestCounts:
        """How the requests ended."""
        reasons: dict[str, int] = {}
        finished = truncated = 0
        for record in self.records.values():
            if record.rejected_for:
                reasons[record.rejected_for] = reasons.get(record.rejected_for, 0) + 1
            elif record.finished is not None:
                finished += 1
                truncated += record.output_tokens < record.request.output_tokens
        rejected = sum(reasons.values())
        total = len(self.records)
        return RequestCounts(
            total, finished, rejected, total - finished - rejected, truncated, dict(sorted(reasons.items()))
        )

    def kv_figures(self) -> KvFigures:
        """The pool over time."""
        window = self.window_ticks
        levels = sorted(self._ticks_at)
        block_ticks = sum(used * self._ticks_at[used] for used in levels)
        slot_ticks = block_ticks * self.block_size
        empty, reserved = self._sums.empty, self._sums.reserved

        def share(part: int) -> float | None:
            return part / slot_ticks if slot_ticks else None

        def level(percent: int) -> float | None:
            """The smallest utilization such that the time at or below it reaches the percentage of W."""
            sums = accumulate(self._ticks_at[used] for used in levels)
            reached = (u for u, ticks in zip(levels, sums, strict=True) if 100 * ticks >= percent * window)
            return next(reached) / self.usable_blocks if window else None

        peak = levels[-1] if levels else 0
        return KvFigures(
            num_gpu_blocks=self.num_gpu_blocks,
            block_size=self.block_size,
            utilization=Utilization(
                mean=block_ticks / (self.usable_blocks * window) if window else None,
                p50=level(50),
                p95=level(95),
                max=peak / self.usable_blocks if window else None,
            ),
            token_share=share(slot_ticks - empty),
            internal_fragmentation=share(empty - reserved),
            reserved_share=share(reserved),
            external_fragmentation=share(0),  # a pool of equal blocks has no holes too small
            peak_blocks=peak if window else self.peak_blocks,
        )

    def batch_figures(self) -> BatchFigures:
        """Queue lengths over time."""
        window = self.window_ticks
        return BatchFigures(
            running_mean=self._sums.running / window if window else None,
            running_max=self._sums.running_max if window else None,
            waiting_mean=self._sums.waiting / window if window else None,
            waiting_max=self._sums.waiting_max if window else None,
        )

    def prefix_cache_figures(self) -> PrefixCacheFigures:
        """Hits at first admissions of measured requests."""
        seen = [r for r in self.records.values() if r.measured and r.admitted is not None]
        queried = sum(r.request.input_tokens for r in seen) if self.prefix_caching else 0
        hit = sum(r.hit_tokens for r in seen)
        return PrefixCacheFigures(
            enabled=self.prefix_caching,
            queried_tokens=queried,
            hit_tokens=hit,
            hit_rate=hit / queried if queried else None,
            resumed_hit_tokens=sum(r.resumed_hit_tokens for r in seen),
            evicted_blocks=self.evicted_blocks,
            peak_shared_blocks=self._sums.shared_max,
            copied_blocks=0,  # vLLM never copies a block: only full ones are shared
        )

    def preemption_figures(self) -> PreemptionFigures:
        """Preemptions over the whole run."""
        return PreemptionFigures(
            events=self.preemption_events,
            requests=sum(1 for r in self.records.values() if r.preemptions),
            recomputed_tokens=self.recomputed_tokens,
            swapped_out_blocks=0,  # the V1 engine preempts by recomputing only
            swapped_in_blocks=0,
        )

    def throughput(self) -> Throughput:
        """Rates of what finished in the window."""
        finished = self._finished_in_window()
        return Throughput(
            requests_per_s=self._rate(len(finished)),
            input_tokens_per_s=self._rate(sum(r.request.input_tokens for r in finished)),
            output_tokens_per_s=self._rate(sum(r.output_tokens for r in finished)),
        )

    def latency(self, model: dict[str, object]) -> LatencyFigures:
        """Latencies of measured requests, as far as each got."""
        seen = [r for r in self.records.values() if r.measured]
        return LatencyFigures(
            percentile_method="linear interpolation between order statistics, exact",
            ttft_s=self._distribution(map(ttft_ticks, seen)),
            tpot_s=self._distribution(map(tpot_ticks, seen)),
            itl_s=self._gap_distribution(),
            e2e_s=self._distribution(map(e2e_ticks, seen)),
            queue_s=self._distribution(map(queue_ticks, seen)),
            model=model,
        )

    def goodput(self, slo: Slo) -> Goodput | None:
        """Requests that met every goal; None if no goal is stated, unknown figures without a clock."""
        if not slo.is_stated:
            return None
        if self.seconds_per_tick is None:
            return Goodput(None, None, slo)
        end = self.window_end
        arrived = [
            r for r in self.records.values() if r.measured and (end is None or r.request.arrival <= end)
        ]
        good = sum(1 for r in arrived if self._meets(r, slo))
        return Goodput(self._rate(good), good / len(arrived) if arrived else None, slo)

    def _meets(self, record: RequestRecord, slo: Slo) -> bool:
        if record.finished is None:
            return False
        times = (ttft_ticks(record), tpot_ticks(record), e2e_ticks(record))
        for ticks, goal in zip(times, (slo.ttft_s, slo.tpot_s, slo.e2e_s), strict=True):
            seconds = None if ticks is None else self._seconds(ticks)
            if goal is not None and seconds is not None and seconds > goal:
                return False
        return True

    def _finished_in_window(self) -> list[RequestRecord]:
        start = self.window_start
        return [
            r
            for r in self.records.values()
            if r.finished is not None and start is not None and r.finished >= start
        ]

    def _seconds(self, ticks: float) -> float | None:
        return None if self.seconds_per_tick is None else seconds(ticks, self.seconds_per_tick)

    def _rate(self, count: int) -> float | None:
        window_s = self._seconds(self.window_ticks)
        return count / window_s if window_s else None

    def _distribution(self, ticks: Iterable[float | None]) -> Distribution:
        ordered = sorted(t for t in ticks if t is not None)
        return self._summary(ordered, range(1, len(ordered) + 1), sum(ordered))

    def _gap_distribution(self) -> Distribution:
        ordered = sorted(self._gaps)
        ends = list(accumulate(self._gaps[gap] for gap in ordered))
        return self._summary(ordered, ends, sum(gap * count for gap, count in self._gaps.items()))

    def _summary(self, ordered: Seq[float], ends: Seq[int], total: float) -> Distribution:
        """The distribution of sorted values of which the i-th stands at places ``ends[i-1] .. ends[i]-1``."""
        count = ends[-1] if ends else 0
        if not count or self.seconds_per_tick is None:
            return Distribution(count)
        p50, p90, p95, p99 = (self._seconds(percentile(ordered, ends, p)) for p in (50, 90, 95, 99))
        return Distribution(
            count, self._seconds(total / count), p50, p90, p95, p99, self._seconds(ordered[-1])
        )


def percentile(ordered: Seq[float], ends: Seq[int], percent: int) -> float:
    """The percentile by linear interpolation between order statistics, as NumPy's default.

    ``ordered[i]`` stands at places ``ends[i-1] .. ends[i]-1`` of the sorted values. O(log n).

    >>> percentile([10, 20], [1, 4], 25)  # of 10, 20, 20, 20
    17.5
    """
    place, part = divmod(percent * (ends[-1] - 1), 100)
    low = ordered[bisect_right(ends, place)]
    if not part:
        return low
    high = ordered[bisect_right(ends, place + 1)]
    return low + (high - low) * part / 100


def ttft_ticks(record: RequestRecord) -> int | None:
    """Arrival to the end of the step that samples the first token."""
    return None if record.first_token is None else record.first_token - record.request.arrival


def e2e_ticks(record: RequestRecord) -> int | None:
    """Arrival to the end of the step that samples the last token."""
    return None if record.finished is None else record.finished - record.request.arrival


def queue_ticks(record: RequestRecord) -> int | None:
    """Arrival to first admission."""
    return None if record.admitted is None else record.admitted - record.request.arrival


def tpot_ticks(record: RequestRecord) -> float | None:
    """(e2e - ttft) / (output - 1); None with one output token or while unfinished."""
    if record.finished is None or record.first_token is None or record.output_tokens < 2:
        return None
    return (record.finished - record.first_token) / (record.output_tokens - 1)
