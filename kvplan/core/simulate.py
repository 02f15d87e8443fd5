"""The loop: arrivals, aborts, clock, turns. One path for clocks in picoseconds and in engine steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any, Literal, Protocol, runtime_checkable

from kvplan.core.arrivals import ClosedLoop, OpenLoop, clients_of
from kvplan.core.engine import DecodeRun, Live, RunTimes, StepWork, Turn
from kvplan.core.metrics import Metrics
from kvplan.core.request import Request

#: Steps of one turn: enough that turns cost nothing beside them, few enough that memory and an interrupt's wait
#: stay small.
_LONGEST_TURN = 1 << 16

Price = Callable[[StepWork], int]


class Engine(Protocol):
    """What the loop needs of an engine."""

    @property
    def is_idle(self) -> bool:
        """Whether no turn is due: no request is live, and no batch is left to be processed."""

    @property
    def is_livelocked(self) -> bool:
        """Whether what is live runs again and again without ever finishing."""

    def why_stuck(self) -> str:
        """Who cannot go on, what it needs and what there is."""

    def decode_shape(self) -> tuple[int, int] | None:
        """(sequences, context tokens) of the next step if it can only decode and may be one of several."""

    def refusal(self, request: Request) -> str | None:
        """Why a request is turned away at once, or None."""

    def add(self, request: Request) -> None:
        """Queue a request."""

    def turn(self, max_steps: int = 1) -> Turn[Any] | DecodeRun[Any]:
        """Take one step or, where that is exact, up to ``max_steps`` decode steps."""


@runtime_checkable
class Aborting(Protocol):
    """What the loop needs of an engine beside that, where requests are aborted."""

    @property
    def free_blocks(self) -> int:
        """Free blocks of the pool, now."""

    def abort(self, request_id: str) -> Live:
        """Let go of a live request at once; returns how far it got."""

    def turn(
        self, max_steps: int = 1, wait: Callable[[Turn[Any]], None] | None = None
    ) -> Turn[Any] | DecodeRun[Any]:
        """As `Engine.turn`. With ``wait``, a `Turn` of one step.

        If it processes a batch, ``wait`` is called before that, and requests may be aborted in it.
        """


@dataclass(slots=True)
class StepRecord:
    """One turn as observers see it: its place in time, who came and went, what the engine did.

    ``turn`` is None where only refused or aborted requests came and no step ran; ``free_blocks`` is then what there was
    after an abort. ``start`` and ``end`` are ticks. A run of several steps counts from ``step`` and has its ``times``.
    ``out`` is the step that planned the batch processed in this
    one, None if none was; after it ``depth`` batches are left to be processed. ``aborted`` have their client gone
    before or during the step, also where the engine learns of it later.
    """

    step: int
    start: int
    end: int
    turn: Turn[Any] | DecodeRun[Any] | None
    arrived: list[Request] = field(default_factory=list)
    rejected: list[Request] = field(default_factory=list)
    times: RunTimes | None = None
    aborted: list[str] = field(default_factory=list)
    out: int | None = None
    depth: int = 0
    free_blocks: int | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended. ``stuck``: requests are left that nothing can move any more."""

    status: Literal["done", "stuck"]
    reason: str | None = None


class _Device:
    """When batches run: each stage runs its batches in turn, each batch passes the stages in turn.

    Holds the batches that are planned and not processed, as the step that planned each and the tick when it ends.
    """

    def __init__(self, prices: Sequence[Price]) -> None:
        self._prices = prices
        self._ends = [0] * len(prices)
        self._batches: deque[tuple[int, int]] = deque()
        #: When the batch ends that was planned last.
        self.last_end = 0

    @property
    def depth(self) -> int:
        """Batches that are not processed."""
        return len(self._batches)

    @property
    def next_end(self) -> int:
        """When the batch ends that is processed next."""
        return self._batches[0][1]

    def run(self, turn: Turn[Any], step: int, now: int) -> None:
        """Take on the batch planned in ``turn``; one that computes and moves nothing takes no time."""
        work = turn.work
        takes_time = turn.scheduled or turn.decoders or work.moves_blocks
        ends = self._ends
        for stage, price in enumerate(self._prices):
            now = max(now, ends[stage])
            if takes_time:
                now += price(work)
            ends[stage] = now
        self._batches.append((step, now))
        self.last_end = now

    def put(self, step: int, end: int) -> None:
        """Take on the last batch of a run, which ends at ``end``."""
        self._ends[-1] = self.last_end = end
        self._batches.append((step, end))

    def hand_out(self) -> tuple[int, int]:
        """The batch that is processed: the step that planned it and when it ends."""
        return self._batches.popleft()


class _Aborts:
    """Whose client goes away when. Requests that end first are forgotten."""

    def __init__(self) -> None:
        #: Requests that are live and will be aborted.
        self._live: set[str] = set()
        self._num_added = 0
        # By tick, then by order of addition: tick, place, id, whether in the middle of a step.
        self._coming: list[tuple[int, int, str, bool]] = []
        self._unheard: list[str] = []

    def __bool__(self) -> bool:
        return bool(self._live)

    def expect(self, request: Request) -> None:
        """Note an added request that will be aborted."""
        assert request.abort is not None, "the caller asks"
        self._live.add(request.id)
        heappush(self._coming, (request.abort, self._num_added, request.id, request.abort_mid))
        self._num_added += 1

    def forget(self, request_id: str) -> None:
        """A request has ended."""
        self._live.discard(request_id)

    @property
    def next_tick(self) -> int | None:
        """When the next client goes away; None if none will."""
        while self._coming and self._coming[0][2] not in self._live:
            heappop(self._coming)
        return self._coming[0][0] if self._coming else None

    @property
    def has_unheard(self) -> bool:
        """Whether there is somebody of whom the engine learns only when it waits."""
        return bool(self._unheard)

    def before_turn(self, now: int) -> tuple[list[str], list[str]]:
        """Those who go by the turn at ``now``, and those among them of whom the engine knows at once."""
        going = self._pop(now)
        known = [name for name, in_mid_step in going if not in_mid_step]
        self._unheard += [name for name, in_mid_step in going if in_mid_step]
        return [name for name, _ in going], known

    def while_waiting(self, end: int) -> tuple[list[str], list[str]]:
        """Those who go while the engine waits until ``end``, and all of whom it learns then."""
        going = [name for name, _ in self._pop(end - 1)]
        known = [*(name for name in self._unheard if name in self._live), *going]
        self._unheard.clear()
        return going, known

    def _pop(self, now: int) -> list[tuple[str, bool]]:
        due = []
        while self._coming and self._coming[0][0] <= now:
            _, _, name, in_mid_step = heappop(self._coming)
            if name in self._live:
                due.append((name, in_mid_step))
        return due


def run(
    requests: Iterable[Request],
    engine: Engine,
    price: Price | Sequence[Price],
    metrics: Metrics,
    *,
    decode_price: Callable[[int, int], tuple[int, int, int]] | None = None,
    num_clients: int | None = None,
    front_end: int = 0,
    step_numbered: bool = False,
    observe: Callable[[StepRecord], None] | None = None,
) -> Outcome:
    """Replay ``requests``, in order of arrival, through ``engine`` to the end.

    With ``num_clients`` each of so many clients waits for its answer before it sends the next request. A request
    reaches the engine ``front_end`` ticks after its arrival.

    ``price`` gives the ticks that a batch takes, or one for each stage of a pipeline what it takes there;
    ``decode_price``, of sequences and context, what a run of decode steps takes: ``(first, growth, valid)``, exactly as
    ``price`` would have it.

    A turn that processes a batch lasts until that batch ends on the device, where each stage runs its batches in
    turn; one that processes none takes no time. Requests that reach the engine, and clients that go away between
    turns, are seen before the next turn, all at the same tick in order; who goes away while the engine waits for a
    batch is let go before that batch is processed. With ``step_numbered`` a tick is a step index, each turn takes
    one, and idle gaps jump it to the next arrival. A dead step (nothing planned, nobody preempted; with a batch
    queue several in a row) takes no time and is followed by the next arrival or abort; if none is left, the run is
    stuck. O(turns + requests).
    """
    clients = clients_of(requests, num_clients, front_end)
    return _Loop(clients, engine, price, metrics, decode_price, step_numbered, observe).play()


class _Loop:
    """One run; see `run`."""

    def __init__(
        self,
        clients: OpenLoop | ClosedLoop,
        engine: Engine,
        price: Price | Sequence[Price],
        metrics: Metrics,
        decode_price: Callable[[int, int], tuple[int, int, int]] | None,
        step_numbered: bool,
        observe: Callable[[StepRecord], None] | None,
    ) -> None:
        self._clients = clients
        self._engine = engine
        self._price = price[0] if isinstance(price, Sequence) else price
        self._device = _Device(price if isinstance(price, Sequence) else (price,))
        self._metrics = metrics
        self._decode_price = decode_price
        self._step_numbered = step_numbered
        self._observe = observe
        self._aborts = _Aborts()
        #: Who was let go while the engine waited; what the turn planned may be about them.
        self._gone: list[Live] = []
        self._now = 0
        self._steps = 0

    def play(self) -> Outcome:
        """Turn after turn, to the end."""
        engine, metrics, observe, clients = self._engine, self._metrics, self._observe, self._clients
        while True:
            now = self._now
            arrived: list[Request] = []
            rejected: list[Request] = []
            aborted: list[str] = []
            if clients.upcoming is not None and clients.due <= now:
                self._take_arrivals(arrived, rejected)
            if self._aborts:
                aborted, known = self._aborts.before_turn(now)
                for row in self._abort(known, now):
                    metrics.abort(row, now)
            number = now if self._step_numbered else self._steps
            if engine.is_idle:
                if (rejected or aborted) and observe is not None:
                    free = engine.free_blocks if aborted and isinstance(engine, Aborting) else None
                    observe(
                        StepRecord(
                            number, now, now, None, arrived, rejected, aborted=aborted, free_blocks=free
                        )
                    )
                if clients.upcoming is None:
                    return Outcome("done")
                metrics.idle(now, clients.due)
                self._now = clients.due
                continue
            record = StepRecord(number, now, now, None, arrived, rejected, aborted=aborted)
            is_dead = self._take_turn(record)
            if observe is not None:
                observe(record)
            if clients.upcoming is None and (is_dead or engine.is_livelocked) and self._next_event() is None:
                return Outcome("stuck", engine.why_stuck())

    def _take_arrivals(self, arrived: list[Request], rejected: list[Request]) -> None:
        """Add those who have arrived; notes them and those who were turned away."""
        clients = self._clients
        while (request := clients.upcoming) is not None and clients.due <= self._now:
            reason = self._engine.refusal(request)
            self._metrics.arrive(request, self._now, rejected_for=reason)
            clients.advance()
            if reason is None:
                self._engine.add(request)
                arrived.append(request)
                if request.abort is not None:
                    self._aborts.expect(request)
            else:
                rejected.append(request)
                clients.ended(1, self._now)

    def _abort(self, names: list[str], tick: int) -> list[Live]:
        """Have the engine let go of requests whose clients are gone; returns how far each got."""
        rows = []
        for name in names:
            assert isinstance(self._engine, Aborting), "requests are aborted only where the engine can"
            rows.append(self._engine.abort(name))
            self._aborts.forget(name)
        self._clients.ended(len(rows), tick)
        return rows

    def _next_event(self) -> int | None:
        """The tick of the next arrival or abort, None if there is none."""
        ticks = [] if self._clients.upcoming is None else [self._clients.due]
        if self._aborts and (tick := self._aborts.next_tick) is not None:
            ticks.append(tick)
        return min(ticks, default=None)

    def _take_turn(self, record: StepRecord) -> bool:
        """Have the engine take a turn, and note it; returns whether it was dead."""
        engine, aborts = self._engine, self._aborts
        shape = None if self._decode_price is None else engine.decode_shape()
        most = 0 if shape is None else self._most_steps(record, shape)
        if most:
            turn = engine.turn(most)
        elif aborts:
            turn = self._turn_with_aborts(record)
        else:
            turn = engine.turn()
        if isinstance(turn, DecodeRun):
            self._note_run(turn, record)
        else:
            if record.turn is None and turn.planned:
                self._device.run(turn, record.step, self._now)
            self._note_turn(turn, record)
        if turn.finished:
            self._clients.ended(len(turn.finished), self._now)
            if aborts:
                for sequence in turn.finished:
                    aborts.forget(sequence.id)
        return not isinstance(turn, DecodeRun) and turn.is_dead

    def _most_steps(self, record: StepRecord, shape: tuple[int, int]) -> int:
        """How many steps of a run of decodes may be one turn: until somebody arrives, or as long as nobody goes away.

        0: somebody goes away in the first.
        """
        assert self._decode_price is not None, "the caller asks"
        first, growth, valid = self._decode_price(*shape)
        record.times = self._run_times(first, growth)
        most = min(valid, _LONGEST_TURN)
        if self._clients.upcoming is not None:
            most = record.times.steps_until(self._clients.due - self._now, most)
        if not self._aborts:
            return most
        if self._aborts.has_unheard:
            return 0
        tick = self._aborts.next_tick
        assert tick is not None, "somebody will go away"
        # The step that ends as the client goes away is the last.
        return record.times.steps_until(tick - self._now + 1, most + 1) - 1

    def _run_times(self, first: int, growth: int) -> RunTimes:
        """How long the steps of a run of decodes last, whose batches take ``first`` and each ``growth`` more.

        With a batch queue the first lasts until the batch in flight ends, the second as long as the run's first batch.
        """
        if not self._device.depth:
            return RunTimes(first, first + growth, growth)
        return RunTimes(1 if self._step_numbered else self._device.next_end - self._now, first, growth)

    def _turn_with_aborts(self, record: StepRecord) -> Turn[Any] | DecodeRun[Any]:
        """A turn of one step in which clients may go away while the engine waits."""

        def wait(turn: Turn[Any]) -> None:
            record.turn = turn
            if turn.planned:
                self._device.run(turn, record.step, self._now)
            end = self._now + 1 if self._step_numbered else max(self._now, self._device.next_end)
            going, known = self._aborts.while_waiting(end)
            record.aborted += going
            self._gone = self._abort(known, end)

        assert isinstance(self._engine, Aborting), "requests are aborted only where the engine can"
        return self._engine.turn(1, wait)

    def _note_turn(self, turn: Turn[Any], record: StepRecord) -> None:
        """Note one call of the engine, whose batch the device has."""
        device, now = self._device, self._now
        end = now
        if turn.processed:
            record.out, end = device.hand_out()
            end = max(now, end)
        if turn.is_dead:
            event = self._next_event()
            end = now if event is None else event
        elif self._step_numbered:
            end = now + 1
        record.turn, record.end, record.depth = turn, end, device.depth
        for row in self._gone:
            self._metrics.interrupt(row, now)
        self._metrics.fold(turn, now, end, end if self._step_numbered else device.last_end)
        for row in self._gone:
            self._metrics.abort(row, end)
        self._gone = []
        self._steps += 1
        self._now = end

    def _note_run(self, run: DecodeRun[Any], record: StepRecord) -> None:
        """Note several steps of decodes."""
        if record.times is None:
            record.times = self._run_times(self._price(run.first_work), 0)
        end = self._now + record.times.total(run.steps)
        self._metrics.fold_run(run, self._now, end, record.times)
        record.turn, record.end, record.out = run, end, record.step
        if self._device.depth:
            record.out, _ = self._device.hand_out()
            self._device.put(record.step + run.steps - 1, self._now + record.times.total(run.steps + 1))
        self._steps += run.steps
        self._now = end
