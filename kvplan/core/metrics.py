"""Folds turns into the figures of docs/metrics.md, exactly, in whole ticks and blocks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import accumulate, chain
from operator import mul
from typing import Any

from kvplan.core.engine import DecodeRun, Levels, Live, RunTimes, SchedulerConfig, Sequence, Turn
from kvplan.core.preemptions import PreemptionCauses, PreemptionLog
from kvplan.core.request import Request, seconds
from kvplan.core.tally import SKETCH_ERROR, Counts, Summary, Values

#: So many numbers are noted before they are summed up.
_SUMMED_AT_ONCE = 1 << 15
#: After so many arrivals the times of requests are packed.
_PACKED_AT_ONCE = 1 << 12


@dataclass(slots=True)
class RequestRecord:
    """What happened to one request, the ``number``-th to arrive. Times are ticks, None until they come.

    When it ends, ``peak_blocks`` is the most that it ever held, shared ones included. ``output_tokens`` are those of
    each of its samples.
    """

    request: Request
    number: int = 0
    measured: bool = True
    rejected_for: str | None = None
    admitted: int | None = None
    first_token: int | None = None
    last_token: int | None = None
    finished: int | None = None
    aborted: int | None = None
    output_tokens: int = 0
    hit_tokens: int = 0
    resumed_hit_tokens: int = 0
    preemptions: int = 0
    peak_blocks: int = 0
    decodes: bool = False


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
    """How the requests ended. ``truncated`` ones finished at max_model_len, short of what they asked.

    Of ``aborted`` ones the client went away.
    """

    total: int
    finished: int
    rejected: int
    unfinished: int
    truncated: int
    reject_reasons: dict[str, int]
    aborted: int = 0


@dataclass(frozen=True, slots=True)
class Utilization:
    """Referenced over usable blocks, over time."""

    mean: float | None
    p50: float | None
    p95: float | None
    max: float | None


@dataclass(frozen=True, slots=True)
class GroupBlocks:
    """Blocks in use by one cache group over time; its own block size."""

    kind: str
    block_size: int
    blocks_mean: float | None
    blocks_max: int | None


@dataclass(frozen=True, slots=True)
class KvFigures:
    """The KV pool over time; the four shares sum to 1. Without a window, ``peak_blocks`` is of all that ran.

    ``behind_window_share`` is the part of the internal one that has KV which no token to come attends to.
    """

    num_gpu_blocks: int
    block_size: int
    utilization: Utilization
    token_share: float | None
    internal_fragmentation: float | None
    reserved_share: float | None
    external_fragmentation: float | None
    peak_blocks: int
    behind_window_share: float | None
    groups: tuple[GroupBlocks, ...]


@dataclass(frozen=True, slots=True)
class DraftFigures:
    """Draft tokens that were verified, over the whole run."""

    accepted: int
    rejected: int
    acceptance_rate: float | None


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


class _OverTime:
    """What held for how many ticks within the window, which opens at tick ``opening``.

    What came after the last finish is kept apart: only the next finish tells that it lies in the window. All is
    noted in lists and summed up when they are long, by column. The sums are right after `sum_up`.
    """

    __slots__ = (
        "_block_slots",
        "_changes",
        "_first_level",
        "_in_holes",
        "_last_level",
        "_lengths",
        "_notes",
        "_of_groups",
        "_sure",
        "_waited",
        "behind",
        "group_blocks",
        "group_maxima",
        "holes",
        "opening",
        "running",
        "running_max",
        "shared_max",
        "ticks_at",
        "tokens",
        "waiting",
        "waiting_max",
        "waste",
    )

    def __init__(self, block_slots: int) -> None:
        self.opening = 0
        self._block_slots = block_slots
        #: Ticks at each number of used blocks; integrals over ticks; maxima.
        self.ticks_at = [0]
        self.running = self.waiting = self.tokens = self.waste = self.holes = 0
        self.running_max = self.waiting_max = self.shared_max = 0
        #: One note after the other: its ticks, and how many of them used as many blocks as its first step; used
        #: blocks, running, waiting, shared blocks, empty and reserved slots in that; what later steps add to tokens
        #: times ticks and to waste times ticks.
        self._notes: list[int] = []
        #: Of steps of a note that use different numbers of blocks: how many more than the one before, and their ticks.
        self._changes: list[int] = []
        self._lengths: list[Seq[int]] = []
        #: How many blocks came before the first change, and after the last.
        self._first_level = self._last_level = 0
        self._waited = self._in_holes = 0
        #: With several groups or windows: slots behind a window times ticks; blocks of each group times ticks. Both
        #: for each note too, with the most blocks in it.
        self.behind = 0
        self.group_blocks: list[int] = []
        self.group_maxima: list[int] = []
        self._of_groups: list[tuple[int, Seq[int], Seq[int]]] = []
        # So many of the lists came up to the last finish.
        self._sure = (0, 0, 0)

    def expect(self, blocks: int) -> None:
        """Make room for steps that use so many blocks."""
        self.ticks_at += [0] * (blocks + 1 - len(self.ticks_at))

    def note_wait(self, start: int, end: int, last_finish: int | None) -> None:
        """Add a request that waited from its arrival until a step was scheduled."""
        if start < self.opening:
            start = self.opening
        if last_finish is not None and start < last_finish:
            middle = last_finish if last_finish < end else end
            if start < middle:
                self.waiting += middle - start
                start = middle
        if start < end:
            self._waited += end - start

    def note_idle(self, start: int, end: int) -> None:
        """Add a gap in which nothing is live."""
        ticks = end - max(start, self.opening)
        if ticks > 0:
            self._notes += (ticks, ticks, 0, 0, 0, 0, 0, 0, 0, 0)

    def note(self, state: Turn[Any] | DecodeRun[Any], start: int, end: int, used: int) -> int:
        """Add a step that uses so many blocks; returns how many ticks of it lie in the window."""
        ticks = end - (start if start > self.opening else self.opening)
        if ticks <= 0:
            return 0
        self._notes += (
            ticks,
            ticks,
            used,
            state.running,
            state.waiting,
            state.shared_blocks,
            state.empty_slots,
            state.reserved_slots,
            0,
            0,
        )
        if state.hole_slots:
            self._in_holes += state.hole_slots * ticks
        return ticks

    def note_groups(self, ticks: int, behind_slots: int, group_blocks: Seq[int]) -> None:
        """Add to a step so many ticks long what there is with several groups or windows."""
        self._of_groups.append(
            (behind_slots * ticks, [count * ticks for count in group_blocks], group_blocks)
        )

    def note_run(
        self, run: DecodeRun[Any], start: int, end: int, times: RunTimes, used: int, last: int
    ) -> None:
        """Add steps of which the first and the last use so many blocks; each adds a token for each decoder."""
        if start < self.opening:
            levels = list(accumulate(run.takes[1:], initial=used))
            self.note_levels(run, self._slots_of(run, levels), start, times.ticks(run.steps), levels)
            return
        total, steps = end - start, run.steps
        # From the second on, each is longer than the one before by the same number of ticks.
        _, second, growth = times
        pairs = steps * (steps - 1) // 2
        tokens = run.decoders * (pairs * second + pairs * 2 * (steps - 2) // 3 * growth)
        waste = 0
        if run.waste_begun:
            ticks = times.ticks(steps)
            waste = sum(slots * sum(ticks[offset:]) for offset, slots in run.waste_begun if offset)
        self._notes += (
            total,
            total if last == used else 0,
            used,
            run.running,
            run.waiting,
            run.shared_blocks,
            run.empty_slots,
            run.reserved_slots,
            tokens,
            waste,
        )
        if last != used:
            self._note_changes(used, run.takes, last, times.ticks(steps))
        if run.hole_slots:
            self._in_holes += run.hole_slots * total

    def _slots_of(self, run: DecodeRun[Any], used: list[int]) -> Levels:
        """The slots after each step, by the blocks used in it."""
        size, steps = self._block_slots, range(run.steps)
        begun = run.empty_slots - size * used[0]
        empty = [begun + size * blocks - step * run.decoders for step, blocks in enumerate(used)]
        waste = run.empty_slots - run.reserved_slots
        reserved = [
            slots - waste - sum(more for offset, more in run.waste_begun if 0 < offset <= step)
            for step, slots in enumerate(empty)
        ]
        return Levels(empty, reserved, [0 for _ in steps], [], [run.shared_blocks for _ in steps])

    def note_levels(
        self, run: DecodeRun[Any], levels: Levels, start: int, ticks: Seq[int], used: list[int]
    ) -> None:
        """Add steps so many ``ticks`` long, each with its own slots and used blocks."""
        if start < self.opening:
            ends = accumulate(ticks, initial=start)
            next(ends)
            ticks = [max(0, min(length, end - self.opening)) for length, end in zip(ticks, ends, strict=True)]
        total = sum(ticks)
        if not total:
            return
        inside = next(place for place, length in enumerate(ticks) if length)
        empty = sum(map(mul, levels.empty_slots, ticks))
        tokens = self._block_slots * sum(map(mul, used, ticks)) - empty
        waste = empty - sum(map(mul, levels.reserved_slots, ticks))
        shared = max(levels.shared_blocks[inside:])
        self._notes += (total, 0, 0, run.running, run.waiting, shared, 0, 0, tokens, waste)
        self._in_holes += run.hole_slots * total
        self._note_changes(used[inside], run.takes[inside:], used[-1], ticks[inside:])
        self._of_groups.append(
            (
                sum(map(mul, levels.behind_slots, ticks)),
                [sum(map(mul, blocks, ticks)) for blocks in levels.group_blocks],
                [max(blocks[inside:]) for blocks in levels.group_blocks],
            )
        )

    def _note_changes(self, first: int, takes: list[int], last: int, ticks: Seq[int]) -> None:
        """Add the blocks used in steps: in the ``first``, taken in each later one, and used in the ``last``."""
        changes = self._changes
        at = len(changes)
        changes += takes
        changes[at] = first - self._last_level
        self._last_level = last
        self._lengths.append(ticks)

    def note_finish(self) -> None:
        """All so far lies in the window."""
        if self._waited:
            self.waiting += self._waited
            self._waited = 0
        if self._in_holes:
            self.holes += self._in_holes
            self._in_holes = 0
        if self._of_groups:
            for behind, blocks, most in self._of_groups:
                self.behind += behind
                self._note_groups(blocks, most)
            self._of_groups.clear()
        self._sure = notes, changes, _ = len(self._notes), len(self._changes), len(self._lengths)
        if notes + changes > _SUMMED_AT_ONCE:
            self.sum_up()

    def _note_groups(self, blocks: Seq[int], most: Seq[int]) -> None:
        missing = len(blocks) - len(self.group_blocks)
        self.group_blocks += [0] * missing
        self.group_maxima += [0] * missing
        for number, block_ticks in enumerate(blocks):
            self.group_blocks[number] += block_ticks
            if most[number] > self.group_maxima[number]:
                self.group_maxima[number] = most[number]

    def sum_up(self) -> None:
        """Sum up what lies in the window for sure."""
        notes, changes, lengths = self._sure
        if not notes:
            return
        columns = [self._notes[column:notes:10] for column in range(10)]
        ticks, at_used, used, running, waiting, shared, empty, reserved, tokens, waste = columns
        ticks_at = self.ticks_at
        levels = chain(used, accumulate(self._changes[:changes], initial=self._first_level))
        each = chain(at_used, (0,), chain.from_iterable(self._lengths[:lengths]))
        for blocks, length in zip(levels, each, strict=True):
            ticks_at[blocks] += length
        self._first_level = blocks
        self.running += sum(map(mul, running, ticks))
        self.waiting += sum(map(mul, waiting, ticks))
        empty_ticks = sum(map(mul, empty, ticks))
        self.tokens += self._block_slots * sum(map(mul, used, ticks)) - empty_ticks + sum(tokens)
        self.waste += empty_ticks - sum(map(mul, reserved, ticks)) + sum(waste)
        self.running_max = max(self.running_max, *running)
        self.waiting_max = max(self.waiting_max, *waiting)
        self.shared_max = max(self.shared_max, *shared)
        del self._notes[:notes], self._changes[:changes], self._lengths[:lengths]
        self._sure = (0, 0, 0)


@dataclass(slots=True)
class _Totals:
    """Counts of requests and their tokens, kept as they come so that no request need be."""

    arrived: int = 0
    arrived_samples: int = 0
    finished: int = 0
    finished_samples: int = 0
    truncated: int = 0
    aborted: int = 0
    unfinished: int = 0
    preempted: int = 0
    queried_tokens: int = 0
    hit_tokens: int = 0
    resumed_hit_tokens: int = 0
    reject_reasons: dict[str, int] = field(default_factory=dict)
    # Of those that finished in the window.
    finished_inside: int = 0
    input_inside: int = 0
    output_inside: int = 0
    # Measured ones: that arrived up to the last finish, after it so far, and that met every goal.
    asked: int = 0
    asked_since: int = 0
    good: int = 0


class Metrics:
    """Figures of one run. Times come in ticks; ``seconds_per_tick`` None leaves every ``_s`` unknown.

    Only live requests are held: what became of one is folded into sums when it ends, and told to ``on_request``.
    The window W runs from the first arrival plus ``warmup`` ticks to the last finish. What happens after
    a finish is held back until the next one, since only then it is known to lie in W. ``usable_blocks`` is all but
    one block unless it is given. An engine with cache groups says in ``cache`` which they are.
    """

    # More attributes than an object without slots has quick access to.
    __slots__ = (
        "_block_slots",
        "_cache",
        "_decoding",
        "_e2e",
        "_gaps",
        "_grouped",
        "_groups",
        "_has_goals",
        "_on_request",
        "_over_time",
        "_preemptions",
        "_queue",
        "_totals",
        "_tpot",
        "_ttft",
        "accepted_drafts",
        "block_size",
        "copied_blocks",
        "evicted_blocks",
        "num_gpu_blocks",
        "peak_blocks",
        "preemption_events",
        "prefix_caching",
        "recomputed_tokens",
        "records",
        "rejected_drafts",
        "scheduled_tokens",
        "seconds_per_tick",
        "slo",
        "steps",
        "swapped_in_blocks",
        "swapped_out_blocks",
        "usable_blocks",
        "warmup",
        "window_end",
        "window_start",
    )

    def __init__(
        self,
        *,
        num_gpu_blocks: int,
        block_size: int,
        cache: SchedulerConfig | None = None,
        prefix_caching: bool,
        usable_blocks: int | None = None,
        seconds_per_tick: Fraction | None,
        warmup: int = 0,
        slo: Slo | None = None,
        on_request: Callable[[RequestRecord], None] | None = None,
    ) -> None:
        self.num_gpu_blocks = num_gpu_blocks
        self.usable_blocks = num_gpu_blocks - 1 if usable_blocks is None else usable_blocks
        self.block_size = block_size
        self._groups = () if cache is None else cache.groups
        self._cache = cache
        #: The cache groups where a sequence's blocks do not simply follow from its length.
        self._grouped = None if cache is None or cache.is_one_full_group else cache
        self._block_slots = block_size if cache is None else cache.block_slots
        self.prefix_caching = prefix_caching
        self.seconds_per_tick = seconds_per_tick
        self.warmup = warmup
        self.slo = slo or Slo()
        self._has_goals = self.slo.is_stated
        self.records: dict[str, RequestRecord] = {}
        self.window_start: int | None = None
        self.window_end: int | None = None
        self.steps = 0
        self.scheduled_tokens = 0
        self.recomputed_tokens = 0
        self.preemption_events = 0
        self.evicted_blocks = 0
        self.copied_blocks = 0
        self.swapped_out_blocks = 0
        self.swapped_in_blocks = 0
        self.accepted_drafts = 0
        self.rejected_drafts = 0
        self.peak_blocks = 0
        self._on_request = on_request
        self._preemptions = PreemptionLog()
        self._totals = _Totals()
        self._gaps = Counts()
        self._ttft, self._queue, self._e2e, self._tpot = Values("q"), Values("q"), Values("q"), Values("d")
        # Measured sequences that decode without being visited.
        self._decoding = 0
        self._over_time = _OverTime(self._block_slots)

    # Folding

    def arrive(self, request: Request, now: int, *, rejected_for: str | None) -> None:
        """Note an arrival; it has waited from its arrival until ``now``, when the next step is scheduled."""
        if self.window_start is None:
            self.window_start = self._over_time.opening = request.arrival + self.warmup
            self._over_time.note_idle(request.arrival, now)
        totals = self._totals
        number, arrival, window_end = totals.arrived, request.arrival, self.window_end
        measured = arrival >= self.window_start
        record = RequestRecord(request, number, measured, rejected_for)
        totals.arrived = number + 1
        totals.arrived_samples += request.samples
        if number % _PACKED_AT_ONCE == 0:
            for values in (self._ttft, self._queue, self._e2e, self._tpot):
                values.pack()
        if measured and self._has_goals:
            if window_end is not None and arrival <= window_end:
                totals.asked += 1
            else:
                totals.asked_since += 1
        if rejected_for is None:
            self.records[request.id] = record
            if arrival < now:
                self._over_time.note_wait(arrival, now, window_end)
        else:
            totals.reject_reasons[rejected_for] = totals.reject_reasons.get(rejected_for, 0) + 1
            self._tell(record)

    def idle(self, start: int, end: int) -> None:
        """Note a gap in which nothing is live."""
        if self.window_start is None:
            return  # before the first arrival
        self._over_time.note_idle(start, end)

    def abort(self, row: Live, tick: int) -> None:
        """Note that the client of a live request went away."""
        self.interrupt(row, tick)
        record = self._end_early(row)
        self._preemptions.end(row[0])
        record.aborted = tick
        self._totals.aborted += 1
        self._tell(record)

    def interrupt(self, row: Live, start: int) -> None:
        """Note that a live request gets nothing of the turn at ``start``, for its client goes away in it."""
        self._stop_decoding(self.records[row[0]], start)

    def fold(self, turn: Turn[Any], start: int, end: int, planned_end: int | None = None) -> None:
        """Note a step scheduled at ``start`` whose output is there at ``end``.

        With a batch queue that output is of an earlier step; what was scheduled is computed at ``planned_end``.
        """
        self.steps += 1
        self.scheduled_tokens += turn.scheduled_tokens
        if turn.recomputed_tokens:
            self.recomputed_tokens += turn.recomputed_tokens
        if turn.evicted:
            self.evicted_blocks += turn.evicted
        work = turn.work
        if work.copied_blocks or work.swapped_out_blocks or work.swapped_in_blocks:
            self.copied_blocks += work.copied_blocks
            self.swapped_out_blocks += work.swapped_out_blocks
            self.swapped_in_blocks += work.swapped_in_blocks
        used = self.usable_blocks - turn.free_blocks
        if used > self.peak_blocks:
            self._note_peak(used)
        ticks = self._over_time.note(turn, start, end, used)
        if ticks and (turn.group_blocks or turn.behind_slots):
            self._over_time.note_groups(ticks, turn.behind_slots, turn.group_blocks)
        records = self.records
        if turn.preempted:
            self.preemption_events += len(turn.preempted)
            for sequence in turn.preempted:
                record = records[sequence.id]
                self._totals.preempted += not record.preemptions
                record.preemptions += 1
        if turn.prefix_hits:
            self._fold_admitted(turn.prefix_hits, start)
        if turn.preemptions or self._preemptions.open:
            self._preemptions.fold(turn, self.steps - 1, start, end if planned_end is None else planned_end)
        if turn.interrupted:
            for sequence in turn.interrupted:
                self._stop_decoding(records[sequence.id], start)
        if self._decoding:
            self._gaps.add(end - start, self._decoding)
        if turn.sampled:
            self._fold_samples(turn.sampled, end)
        if turn.extra_tokens:
            self._fold_extra_tokens(turn.extra_tokens)
        if turn.accepted_drafts or turn.rejected_drafts:
            self.accepted_drafts += turn.accepted_drafts
            self.rejected_drafts += turn.rejected_drafts
        if turn.started_decoding:
            self._start_decoding(turn.started_decoding)
        if turn.stopped_decoding:
            for sequence in turn.stopped_decoding:
                self._stop_decoding(records[sequence.id], end)
        if turn.finished:
            self._fold_finished(turn.finished, end)

    def fold_run(self, run: DecodeRun[Any], start: int, end: int, times: RunTimes) -> None:
        """Note a run of steps from ``start`` to ``end``. O(steps), at C speed."""
        steps, takes, over_time = run.steps, run.takes, self._over_time
        self.steps += steps
        self.scheduled_tokens += steps * run.decoders
        if run.evicted:
            self.evicted_blocks += run.evicted
        used = most = self.usable_blocks - run.free_blocks
        if run.levels:
            levels = list(accumulate(takes[1:], initial=used))
            most = max(levels)
            over_time.note_levels(run, run.levels, start, times.ticks(steps), levels)
        elif steps == 1:
            over_time.note(run, start, end, used)
        else:
            most += sum(takes) - takes[0]
            over_time.note_run(run, start, end, times, used, most)
        if most > self.peak_blocks:
            self._note_peak(most)
        first, second, growth = times
        if steps > 1 and second == first + growth and not run.sampled:
            if self._decoding:
                self._gaps.add_row(first, growth, steps, self._decoding)
        else:
            if self._decoding:
                self._gaps.add(first, self._decoding)
            if run.sampled:
                self._fold_samples(run.sampled, start + first)
                self._start_decoding(run.started_decoding)
            if steps > 1 and self._decoding:
                self._gaps.add_row(second, growth, steps - 1, self._decoding)
        if run.finished:
            self._fold_finished(run.finished, end)

    def _note_peak(self, blocks: int) -> None:
        self.peak_blocks = blocks
        self._over_time.expect(blocks)

    def note_live(self, live: Iterable[Live]) -> None:
        """End the account with the requests that never finished.

        Of each: how many tokens it has, prompt included, and the most of them that ever had KV.
        """
        for row in live:
            record = self._end_early(row)
            self._totals.unfinished += 1
            self._tell(record)

    def _end_early(self, row: Live) -> RequestRecord:
        request_id, tokens, most_computed = row
        record = self.records.pop(request_id)
        record.output_tokens = tokens - record.request.input_tokens
        record.peak_blocks = self._blocks_for(most_computed)
        return record

    def _start_decoding(self, sequences: Iterable[Sequence]) -> None:
        """Note who decodes from now on without being visited."""
        for sequence in sequences:
            record = self.records[sequence.id]
            record.decodes = True
            if record.measured:
                self._decoding += 1

    def _stop_decoding(self, record: RequestRecord, last_token: int) -> None:
        """Note that a request no longer decodes without being visited."""
        if record.decodes:
            record.decodes = False
            record.last_token = last_token
            self._decoding -= record.measured

    def _tell(self, record: RequestRecord) -> None:
        if self._on_request is not None:
            self._on_request(record)

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size) if self._grouped is None else self._grouped.blocks_for(tokens)

    def _fold_admitted(self, prefix_hits: Iterable[tuple[Sequence, int]], start: int) -> None:
        totals, records = self._totals, self.records
        for sequence, hit_tokens in prefix_hits:
            record = records[sequence.id]
            if record.admitted is not None:
                record.resumed_hit_tokens += hit_tokens
                totals.resumed_hit_tokens += hit_tokens * record.measured
                continue
            record.admitted = start
            record.hit_tokens = hit_tokens
            if record.measured:
                request = record.request
                totals.queried_tokens += request.input_tokens
                totals.hit_tokens += hit_tokens
                self._queue.add(start - request.arrival)

    def _fold_samples(self, sampled: Iterable[Sequence], end: int) -> None:
        records = self.records
        for sequence in sampled:
            record = records[sequence.id]
            if record.last_token is None:
                record.first_token = end
                if record.measured:
                    self._ttft.add(end - record.request.arrival)
            elif record.measured:
                self._gaps.add(end - record.last_token)
            record.last_token = end

    def _fold_extra_tokens(self, extra_tokens: dict[Sequence, int]) -> None:
        """Tokens that came in the same step as one before them."""
        measured = sum(count for s, count in extra_tokens.items() if self.records[s.id].measured)
        if measured:
            self._gaps.add(0, measured)

    def _fold_finished(self, finished: Seq[Sequence], end: int) -> None:
        totals, records = self._totals, self.records
        is_inside = self.window_start is not None and end >= self.window_start
        totals.finished += len(finished)
        if is_inside:
            totals.finished_inside += len(finished)
        for sequence in finished:
            record = records.pop(sequence.id)
            request, tokens = record.request, sequence.num_tokens
            output, samples = tokens - request.input_tokens, request.samples
            record.finished = end
            record.output_tokens = output
            totals.finished_samples += samples
            if output < request.output_tokens:
                totals.truncated += 1
            if is_inside:
                totals.input_inside += request.input_tokens
                totals.output_inside += output * samples
            if record.decodes and record.measured:
                self._decoding -= 1
            if record.preemptions:
                self._preemptions.end(sequence.id)
            if record.measured:
                self._e2e.add(end - request.arrival)
                if output > 1 and record.first_token is not None:
                    self._tpot.add((end - record.first_token) / (output - 1))
                if self._has_goals:
                    totals.good += self._meets(record, self.slo)
            if self._on_request is not None:
                record.decodes = False
                record.last_token = end
                record.peak_blocks = self._blocks_for(tokens - 1)  # the last token never has KV
                self._on_request(record)
        self.window_end = end
        if totals.asked_since:
            totals.asked += totals.asked_since
            totals.asked_since = 0
        self._over_time.note_finish()

    # Figures

    @property
    def window_ticks(self) -> int:
        """Length of the window; 0 if nothing finished in it."""
        if self.window_start is None or self.window_end is None:
            return 0
        return max(0, self.window_end - self.window_start)

    @property
    def is_all_warmup(self) -> bool:
        """Whether requests finished, but all before the window opens."""
        return self.warmup > 0 and self.window_end is not None and not self.window_ticks

    @property
    def duration_s(self) -> float | None:
        """Seconds from the first arrival, warm-up included, to the last finish."""
        if self.window_start is None or self.window_end is None:
            return None
        return self._seconds(self.window_end - self.window_start + self.warmup)

    @property
    def finished_share(self) -> float:
        """Sequences that finished, of all that arrived; alike whether samples come as one request or as many."""
        totals = self._totals
        return totals.finished_samples / totals.arrived_samples if totals.arrived_samples else 1.0

    def request_counts(self) -> RequestCounts:
        """How the requests ended."""
        totals = self._totals
        reasons = dict(sorted(totals.reject_reasons.items()))
        rejected = sum(reasons.values())
        aborted = totals.aborted
        unfinished = totals.arrived - totals.finished - rejected - aborted
        return RequestCounts(
            totals.arrived, totals.finished, rejected, unfinished, totals.truncated, reasons, aborted
        )

    def kv_figures(self) -> KvFigures:
        """The pool over time."""
        window, over_time = self.window_ticks, self._over_time
        over_time.sum_up()
        ticks_at = over_time.ticks_at
        up_to = list(accumulate(ticks_at))
        block_ticks = sum(map(mul, range(len(ticks_at)), ticks_at))
        held = block_ticks * self._block_slots
        tokens, waste, holes = over_time.tokens, over_time.waste, over_time.holes

        def share(part: int) -> float | None:
            return part / (held + holes) if held + holes else None

        def level(percent: int) -> float | None:
            """The smallest utilization such that the time at or below it reaches the percentage of W."""
            return bisect_left(up_to, -(-percent * window // 100)) / self.usable_blocks if window else None

        peak = bisect_left(up_to, up_to[-1])
        return KvFigures(
            num_gpu_blocks=self.num_gpu_blocks,
            block_size=self.block_size,
            utilization=Utilization(
                mean=block_ticks / (self.usable_blocks * window) if window else None,
                p50=level(50),
                p95=level(95),
                max=peak / self.usable_blocks if window else None,
            ),
            token_share=share(tokens),
            internal_fragmentation=share(waste),
            reserved_share=share(held - tokens - waste),
            external_fragmentation=share(holes),  # 0 in a pool of equal blocks
            peak_blocks=peak if window else self.peak_blocks,
            behind_window_share=share(over_time.behind),
            groups=self._group_figures(block_ticks, peak),
        )

    def _group_figures(self, block_ticks: int, peak: int) -> tuple[GroupBlocks, ...]:
        """Blocks by group; a single one has all of them."""
        if self._cache is None:
            return ()
        over_time, window = self._over_time, self.window_ticks
        sums, maxima = [block_ticks], [peak]
        if len(self._groups) > 1:
            sums = over_time.group_blocks or [0] * len(self._groups)
            maxima = over_time.group_maxima or [0] * len(self._groups)
        return tuple(
            GroupBlocks(
                kind=spec.kind,
                block_size=self._cache.block_size_of(spec),
                blocks_mean=total / window if window else None,
                blocks_max=most if window else None,
            )
            for spec, total, most in zip(self._groups, sums, maxima, strict=True)
        )

    def draft_figures(self) -> DraftFigures:
        """Draft tokens over the whole run."""
        verified = self.accepted_drafts + self.rejected_drafts
        rate = self.accepted_drafts / verified if verified else None
        return DraftFigures(self.accepted_drafts, self.rejected_drafts, rate)

    def batch_figures(self) -> BatchFigures:
        """Queue lengths over time."""
        window, over_time = self.window_ticks, self._over_time
        over_time.sum_up()
        return BatchFigures(
            running_mean=over_time.running / window if window else None,
            running_max=over_time.running_max if window else None,
            waiting_mean=over_time.waiting / window if window else None,
            waiting_max=over_time.waiting_max if window else None,
        )

    def prefix_cache_figures(self) -> PrefixCacheFigures:
        """Hits at first admissions of measured requests."""
        totals = self._totals
        queried = totals.queried_tokens if self.prefix_caching else 0
        self._over_time.sum_up()
        return PrefixCacheFigures(
            enabled=self.prefix_caching,
            queried_tokens=queried,
            hit_tokens=totals.hit_tokens,
            hit_rate=totals.hit_tokens / queried if queried else None,
            resumed_hit_tokens=totals.resumed_hit_tokens,
            evicted_blocks=self.evicted_blocks,
            peak_shared_blocks=self._over_time.shared_max,
            copied_blocks=self.copied_blocks,
        )

    def preemption_figures(self) -> PreemptionFigures:
        """Preemptions over the whole run."""
        return PreemptionFigures(
            events=self.preemption_events,
            requests=self._totals.preempted,
            recomputed_tokens=self.recomputed_tokens,
            swapped_out_blocks=self.swapped_out_blocks,
            swapped_in_blocks=self.swapped_in_blocks,
        )

    def preemption_causes(self) -> PreemptionCauses:
        """Why sequences were preempted, over the whole run."""
        return self._preemptions.causes(self.usable_blocks)

    def throughput(self) -> Throughput:
        """Rates of what finished in the window."""
        totals = self._totals
        return Throughput(
            requests_per_s=self._rate(totals.finished_inside),
            input_tokens_per_s=self._rate(totals.input_inside),
            output_tokens_per_s=self._rate(totals.output_inside),
        )

    def latency(self, model: dict[str, object]) -> LatencyFigures:
        """Latencies of measured requests, as far as each got."""
        sets = {
            "ttft": self._ttft.summary(),
            "tpot": self._tpot.summary(),
            "itl": self._gaps.summary(),
            "e2e": self._e2e.summary(),
            "queue": self._queue.summary(),
        }
        method = "linear interpolation between order statistics"
        sketched = [name for name, values in sets.items() if not values.exact]
        if sketched:
            method += f"; {', '.join(sketched)} from buckets, within {100 * SKETCH_ERROR:.2f} %"
        else:
            method += ", exact"
        return LatencyFigures(
            percentile_method=method,
            ttft_s=self._distribution(sets["ttft"]),
            tpot_s=self._distribution(sets["tpot"]),
            itl_s=self._distribution(sets["itl"]),
            e2e_s=self._distribution(sets["e2e"]),
            queue_s=self._distribution(sets["queue"]),
            model=model,
        )

    def goodput(self) -> Goodput | None:
        """Requests that met every goal; None if no goal is stated, unknown figures without a clock."""
        if not self.slo.is_stated:
            return None
        if self.seconds_per_tick is None:
            return Goodput(None, None, self.slo)
        totals = self._totals
        # Without any finish the window has no end, and all that arrived count.
        asked = totals.asked if self.window_end is not None else totals.asked_since
        return Goodput(self._rate(totals.good), totals.good / asked if asked else None, self.slo)

    def _meets(self, record: RequestRecord, slo: Slo) -> bool:
        if record.finished is None:
            return False
        times = (ttft_ticks(record), tpot_ticks(record), e2e_ticks(record))
        for ticks, goal in zip(times, (slo.ttft_s, slo.tpot_s, slo.e2e_s), strict=True):
            seconds = None if ticks is None else self._seconds(ticks)
            if goal is not None and seconds is not None and seconds > goal:
                return False
        return True

    def _seconds(self, ticks: float) -> float | None:
        return None if self.seconds_per_tick is None else seconds(ticks, self.seconds_per_tick)

    def _rate(self, count: int) -> float | None:
        window_s = self._seconds(self.window_ticks)
        return count / window_s if window_s else None

    def _distribution(self, values: Summary) -> Distribution:
        count = values.count
        if not count or self.seconds_per_tick is None:
            return Distribution(count)
        p50, p90, p95, p99 = (self._seconds(values.percentile(p)) for p in (50, 90, 95, 99))
        return Distribution(
            count, self._seconds(values.total / count), p50, p90, p95, p99, self._seconds(values.largest)
        )


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
