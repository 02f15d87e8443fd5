"""The loop: arrivals, aborts, clock, turns. One path for clocks in picoseconds and in engine steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any, Literal, Protocol, runtime_checkable

from kvplan.core.arrivals import ClosedLoop, OpenLoop, clients_of
from kvplan.core.engine import DecodeRun, Live, RunTimes, StepWork, Turn, quoted
from kvplan.core.metrics import Metrics
from kvplan.core.request import Request
from kvplan.errors import InputError

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
    ``out`` is the step that planned the batch processed in this one (in a run: in its first), None if none was; after
    it ``depth`` batches are left to be processed. A single step's own batch is computed at ``planned_end``.
    ``aborted`` have their client gone before or during the step, also where the engine learns of it later.
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
    planned_end: int = 0
    free_blocks: int | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended. ``stuck``: requests are left that nothing can move any more."""

    status: Literal["done", "stuck"]
    reason: str | None = None


class _Device:
    """When batches run: each stage runs its batches in turn, each batch passes the stages in turn.

    ``batches`` are those that are planned and not processed: the step that planned each and the tick when it ends.
    """

    def __init__(self, prices: Sequence[Price]) -> None:
        self._prices = prices
        self._ends = [0] * len(prices)
        #: Those that are not processed.
        self.batches: deque[tuple[int, int]] = deque()
        #: When the batch ends that was planned last.
        self.last_end = 0

    @property
    def next_end(self) -> int:
        """When the batch ends that is processed next."""
        return self.batches[0][1]

    def run(self, turn: Turn[Any], now: int) -> int:
        """When the batch ends that is planned in ``turn``; one that computes and moves nothing takes no time."""
        work = turn.work
        takes_time = turn.decoders or turn.scheduled or work.moves_blocks
        ends = self._ends
        for stage, price in enumerate(self._prices):
            if ends[stage] > now:
                now = ends[stage]
            if takes_time:
                now += price(work)
            ends[stage] = now
        self.last_end = now
        return now

    def put(self, step: int, end: int) -> None:
        """Hold a batch until it is processed."""
        self._ends[-1] = self.last_end = end
        self.batches.append((step, end))

    def hand_out(self) -> tuple[int, int]:
        """The batch that is processed: the step that planned it and when it ends."""
        return self.batches.popleft()


class _Aborts:
    """Whose client goes away when. Requests that end first are forgotten."""

    def __init__(self) -> None:
        #: Requests that are live and will be aborted.
        self.live: set[str] = set()
        self._num_added = 0
        # By tick, then by order of addition: tick, place, id, whether in the middle of a step.
        self._coming: list[tuple[int, int, str, bool]] = []
        self._unheard: list[str] = []

    def expect(self, request: Request) -> None:
        """Note an added request that will be aborted."""
        assert request.abort is not None, "the caller asks"
        self.live.add(request.id)
        heappush(self._coming, (request.abort, self._num_added, request.id, request.abort_mid))
        self._num_added += 1

    def forget(self, request_id: str) -> None:
        """A request has ended."""
        self.live.discard(request_id)

    @property
    def next_tick(self) -> int | None:
        """When the next client goes away; None if none will."""
        while self._coming and self._coming[0][2] not in self.live:
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
        known = [*(name for name in self._unheard if name in self.live), *going]
        self._unheard.clear()
        return going, known

    def _pop(self, now: int) -> list[tuple[str, bool]]:
        due = []
        while self._coming and self._coming[0][0] <= now:
            _, _, name, in_mid_step = heappop(self._coming)
            if name in self.live:
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
    stuck. Raises `InputError` for a request whose id a live one has. O(turns + requests).
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
        #: Whether the device has the batch of the turn that is being taken.
        self._is_on_device = False
        self._now = 0
        self._steps = 0

    def play(self) -> Outcome:
        """Turn after turn, to the end."""
        engine, clients, aborts, observe = self._engine, self._clients, self._aborts, self._observe
        while True:
            now = self._now
            arrived: list[Request] = []
            rejected: list[Request] = []
            if clients.upcoming is not None and clients.due <= now:
                self._take_arrivals(arrived, rejected)
            aborted = self._let_go(now) if aborts.live else []
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
                self._metrics.idle(now, clients.due)
                self._now = clients.due
                continue
            turn, times, out = self._take_turn(number, aborted)
            if observe is not None:
                device, end = self._device, self._now
                planned_end = end if self._step_numbered else device.last_end
                observe(
                    StepRecord(
                        *(number, now, end, turn, arrived, rejected, times, aborted, out),
                        depth=len(device.batches),
                        planned_end=planned_end,
                    )
                )
            if (
                clients.upcoming is None
                and (turn.is_dead or engine.is_livelocked)
                and self._next_event() is None
            ):
                return Outcome("stuck", engine.why_stuck())

    def _take_arrivals(self, arrived: list[Request], rejected: list[Request]) -> None:
        """Add those who have arrived; notes them and those who were turned away."""
        clients, live = self._clients, self._metrics.records
        while (request := clients.upcoming) is not None and clients.due <= self._now:
            if request.id in live:
                raise InputError(
                    f"id {quoted(request.id)} stands twice, in requests that are live at once",
                    hint="give each request an id of its own",
                )
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

    def _let_go(self, now: int) -> list[str]:
        """Have the engine let go of those whose clients went away since the last turn; returns whose clients did."""
        going, known = self._aborts.before_turn(now)
        for row in self._abort(known, now):
            self._metrics.abort(row, now)
        return going

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
        if self._aborts.live and (tick := self._aborts.next_tick) is not None:
            ticks.append(tick)
        return min(ticks, default=None)

    def _take_turn(
        self, number: int, aborted: list[str]
    ) -> tuple[Turn[Any] | DecodeRun[Any], RunTimes | None, int | None]:
        """Have the engine take a turn, from step ``number`` on, and note it; adds to ``aborted``.

        Returns it, the times of a run, and the step that planned the batch processed first.
        """
        engine, aborts = self._engine, self._aborts
        times: RunTimes | None = None
        most = 0
        shape = None if self._decode_price is None else engine.decode_shape()
        if shape is not None:
            times, most = self._forecast(*shape)
        if most:
            turn = engine.turn(most)
        elif aborts.live:
            turn = self._turn_with_aborts(number, aborted)
        else:
            turn = engine.turn()
        if isinstance(turn, DecodeRun):
            times = times or self._run_times(self._price(turn.first_work), 0)
            out: int | None = self._note_run(turn, times, number)
        else:
            times = None
            out = self._note_turn(turn, number)
        if turn.finished:
            if self._clients.wait:
                self._clients.ended(len(turn.finished), self._now)
            if aborts.live:
                for sequence in turn.finished:
                    aborts.forget(sequence.id)
        return turn, times, out

    def _forecast(self, sequences: int, context: int) -> tuple[RunTimes, int]:
        """The times of a run of decodes, and how many of its steps may be one turn.

        Until somebody arrives, or as long as nobody goes away: 0 if somebody does in the first.
        """
        assert self._decode_price is not None, "the caller asks"
        first, growth, most = self._decode_price(sequences, context)
        times = self._run_times(first, growth)
        if most > _LONGEST_TURN:
            most = _LONGEST_TURN
        if self._clients.upcoming is not None:
            most = times.steps_until(self._clients.due - self._now, most)
        if self._aborts.live:
            if self._aborts.has_unheard:
                return times, 0
            tick = self._aborts.next_tick
            assert tick is not None, "somebody will go away"
            # The step that ends as the client goes away is the last.
            most = times.steps_until(tick - self._now + 1, most + 1) - 1
        return times, most

    def _run_times(self, first: int, growth: int) -> RunTimes:
        """How long the steps of a run of decodes last, whose batches take ``first`` and each ``growth`` more.

        With a batch queue the first lasts until the batch in flight ends, the second as long as the run's first batch.
        """
        if not self._device.batches:
            return RunTimes(first, first + growth, growth)
        return RunTimes(1 if self._step_numbered else self._device.next_end - self._now, first, growth)

    def _turn_with_aborts(self, number: int, aborted: list[str]) -> Turn[Any] | DecodeRun[Any]:
        """A turn of one step in which clients may go away while the engine waits."""

        def wait(turn: Turn[Any]) -> None:
            if turn.planned:
                self._device.put(number, self._device.run(turn, self._now))
            self._is_on_device = True
            end = self._now + 1 if self._step_numbered else max(self._now, self._device.next_end)
            going, known = self._aborts.while_waiting(end)
            aborted.extend(going)
            self._gone = self._abort(known, end)

        assert isinstance(self._engine, Aborting), "requests are aborted only where the engine can"
        return self._engine.turn(1, wait)

    def _note_turn(self, turn: Turn[Any], number: int) -> int | None:
        """Note one call of the engine; returns which step planned the batch that it processed."""
        device, now = self._device, self._now
        out, end = None, now
        is_new = turn.planned and not self._is_on_device
        self._is_on_device = False
        if is_new and turn.processed and not device.batches:  # as always without a batch queue
            out, end = number, device.run(turn, now)
        else:
            if is_new:
                device.put(number, device.run(turn, now))
            if turn.processed:
                out, end = device.hand_out()
                end = max(now, end)
        if turn.is_dead:
            event = self._next_event()
            end = now if event is None else event
        elif self._step_numbered:
            end = now + 1
        gone, self._gone = self._gone, []
        for row in gone:
            self._metrics.interrupt(row, now)
        self._metrics.fold(turn, now, end, end if self._step_numbered else device.last_end)
        for row in gone:
            self._metrics.abort(row, end)
        self._steps += 1
        self._now = end
        return out

    def _note_run(self, run: DecodeRun[Any], times: RunTimes, number: int) -> int:
        """Note several steps of decodes; returns which step planned what the first of them processed."""
        out, steps = number, run.steps
        end = self._now + times.total(steps)
        self._metrics.fold_run(run, self._now, end, times)
        if self._device.batches:
            out, _ = self._device.hand_out()
            self._device.put(number + steps - 1, self._now + times.total(steps + 1))
        self._steps += steps
        self._now = end
        return out
