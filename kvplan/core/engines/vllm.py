"""The vLLM 0.33.0 V1 scheduler, as `vllm_plain` has it, but touching only what changes.

Decoding sequences are sums in a cohort, blocks are numbers and runs of content, kept by a block side of its own
for one full group and for several groups. While only decodes run and nothing can be admitted, many steps are one
turn. The literal walk over the running list is reached only when blocks run short. Decides exactly what the plain
engine decides; block ids it does not know.

For one stage, without drafts. Asynchronously a call plans a batch and processes the one before: who is done keeps
seat and blocks until then, neither in the cohort nor among the prompts, and what a decoder fills is known a token
later. A victim's token in flight comes in in the call in which it lost its place.

Costs: a turn O(chunks + finished + admitted), a walk O(running); blocks cost O(runs of content), not O(blocks).
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kvplan.core.cohort import Cohort, Member
from kvplan.core.engine import DecodeRun, Live, Preemption, SchedulerConfig, Turn, why_stuck
from kvplan.core.engines.block_side import NEVER, BlockSide
from kvplan.core.engines.full_blocks import FullBlocks
from kvplan.core.engines.group_blocks import GroupBlocks
from kvplan.core.livelock import Livelock
from kvplan.core.request import Request

#: What the engine calls while it waits for the output of a batch; requests may be aborted in it.
Wait = Callable[[Turn[Member]], None]


class _Batch:
    """What was planned in one step, as far as its output matters: whom it gives a token that changes what they are.

    It gives ``outputs`` sequences a token. Of these ``sampled`` compute the last chunk of what they have, and of them
    ``started`` decode from the next step on; ``done`` are all who finish with it, in order of admission.
    """

    __slots__ = ("done", "outputs", "sampled", "started")

    def __init__(
        self, outputs: int, sampled: list[Member], started: list[Member], done: list[Member]
    ) -> None:
        self.outputs = outputs
        self.sampled = sampled
        self.started = started
        self.done = done

    def forget(self, member: Member) -> None:
        """Have no output for a sequence that gets a token."""
        self.outputs -= 1
        for role in (self.sampled, self.started, self.done):
            if member in role:
                role.remove(member)


class Vllm:
    """``add`` requests, then ``turn`` until ``is_idle``. Agrees with `VllmPlain` in every step."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.cohort = Cohort(config.block_size)
        #: All who are running or waiting, by id.
        self._live: dict[str, Member] = {}
        make_blocks = FullBlocks if config.is_one_full_group else GroupBlocks
        self.blocks: BlockSide[Any] = make_blocks(config, self.cohort, self._live)
        self.pool = self.blocks.pool
        #: In order of admission, which is the order of ``serial``.
        self.running: dict[Member, None] = {}
        self.prefilling: dict[Member, None] = {}
        self.waiting: deque[Member] = deque()
        #: Free blocks that an admission must leave while others run.
        self._watermark_blocks = int(config.watermark * config.num_gpu_blocks)
        self._num_added = 0
        self._num_admitted = 0
        #: Who was preempted alone and sampled nothing since, the latest last. While it is empty, no state is noted.
        self._outgrown: dict[Member, None] = {}
        self._livelock = Livelock()
        #: Whether the head of the queue was tried in vain and nothing has changed since that could help it.
        self._head_is_blocked = False
        #: With fewer free blocks than these it cannot get in.
        self._room_for_head = NEVER
        #: Batches that were planned and whose output was not processed, and how many there may be.
        self._in_flight: deque[_Batch] = deque()
        self._queue_size = config.queue_size
        #: How many tokens of a decoder are not known yet when its next one is planned.
        self._lag = int(config.async_scheduling)
        #: Who was preempted in this call with a token in flight.
        self._stale: set[Member] = set()
        #: Calls in a row in which nothing happened, and whether somebody was aborted since the last one.
        self._idle_calls = 0
        self._has_aborted = False
        #: Whether somebody finished or was aborted since a batch was planned: one more is planned, perhaps empty.
        self._owes_plan = False

    @property
    def is_idle(self) -> bool:
        """Whether no request is live and no batch in flight."""
        return not (self.running or self.waiting or self._in_flight or self._owes_plan)

    @property
    def _has_work(self) -> bool:
        return bool(self.running or self.waiting or self._owes_plan)

    @property
    def is_livelocked(self) -> bool:
        """As `VllmPlain.is_livelocked`."""
        return self._livelock.is_certain

    def why_stuck(self) -> str:
        """As `VllmPlain.why_stuck`."""
        return why_stuck(self.config, self.running, self.waiting, self._outgrown)

    def live(self) -> Iterator[Live]:
        """As `VllmPlain.live`."""
        return (self._row(member) for member in (*self.running, *self.waiting))

    def _row(self, member: Member) -> Live:
        tokens = self._num_tokens(member) - len(self._batches_of(member))
        return member.id, tokens, max(member.high_water, self._computed(member))

    def _batches_of(self, member: Member) -> list[_Batch]:
        """The batches in flight in which a sequence gets a token."""
        if member not in self.running:
            return [self._in_flight[0]] if member in self._stale else []
        batches: list[_Batch] = []
        if member not in self.prefilling:
            for batch in self._in_flight:
                if member in batch.sampled:
                    batches.clear()
                batches.append(batch)
                if member in batch.done:
                    break
        return batches

    @property
    def free_blocks(self) -> int:
        """Free blocks of the pool, now."""
        return self.pool.free

    # Arrival

    def refusal(self, request: Request) -> str | None:
        """Why the front end turns a request away before it reaches the scheduler, or None."""
        return request.refusal(self.config.max_model_len)

    def add(self, request: Request) -> None:
        """Queue a request; `refusal` must be None."""
        priority = request.priority if self.config.policy == "priority" else 0
        member = Member(request, (priority, self._num_added), self.config.max_model_len)
        self._num_added += 1
        if self._outgrown:
            self._livelock.clear()
        self.blocks.add(member)
        self._live[member.id] = member
        if self.config.policy == "fcfs":
            self.waiting.append(member)
        else:
            insort(self.waiting, member, key=_queue_key)
        self._head_is_blocked = False

    def abort(self, request_id: str) -> Live:
        """Let go of a live request whose client went away, with all it holds; returns its row of `live`."""
        member = self._live.pop(request_id)
        row = self._row(member)
        for batch in self._batches_of(member):  # its output there is ignored
            batch.forget(member)
        if member not in self.running:
            self.waiting.remove(member)
        else:
            del self.running[member]
            self.prefilling.pop(member, None)
            if member.decoding:
                self._leave(member)
            self.blocks.release(member)
        self._outgrown.pop(member, None)
        self._livelock.clear()
        self._owes_plan = self._queue_size > 1
        self._head_is_blocked = False
        self._has_aborted = True
        return row

    # A turn

    def decode_shape(self) -> tuple[int, int] | None:
        """(sequences, context tokens) of the next step if nothing but decodes can be in it, else None."""
        if not self._only_decodes():
            return None
        cohort = self.cohort
        return cohort.size, cohort.context

    def _only_decodes(self) -> bool:
        return not self.prefilling and (not self.waiting or self._head_is_blocked) and self.cohort.size > 0

    def turn(self, max_steps: int = 1, wait: Wait | None = None) -> Turn[Member] | DecodeRun[Member]:
        """Take one step or, while only decodes run and nobody can be admitted, up to ``max_steps``."""
        if wait is None and self._only_decodes():
            # Until somebody finishes or blocks run short.
            cohort = self.cohort
            steps = cohort.first_finish - cohort.step + 1
            if steps > max_steps:
                steps = max_steps
            if self._in_flight and self._in_flight[0].done:
                steps = 1  # who finishes does so in the last
            if run := self._decode(steps):
                return run
        turn: Turn[Member] = Turn()
        if self._queue_size == 1:
            self._step(turn, wait)
        else:
            self._call(turn, wait)
        if self._outgrown and turn.preempted and not self.running:
            # The queue is in its order, and what was in flight is in.
            self._livelock.note(self.pool.contents())
        return turn

    def _decode(self, steps: int) -> DecodeRun[Member] | None:
        """Steps in which nothing happens but that each of the cohort takes a token, and finishers leave at the end.

        None if the next must be taken by the rules.
        """
        room = self._room_for_head if self.waiting else None
        run = self.blocks.decode(steps, room, self._ending() if self._in_flight else ())
        if run is None:
            return None
        run.running, run.waiting = len(self.running), len(self.waiting)
        run.finished = self._stop_decoding()
        if self._queue_size > 1:
            self._put_in_flight(run)
        for member in run.finished:
            self._finish(member)
        run.free_blocks_end = self.pool.free
        self._has_aborted = False
        return run

    def _put_in_flight(self, run: DecodeRun[Member]) -> None:
        """Process the batch in flight in the first step of a run, whose last batch is in flight in its place."""
        before = self._in_flight.popleft()
        self._in_flight.append(_Batch(run.decoders, [], [], list(run.finished)))
        run.sampled, run.started_decoding, run.finished = before.sampled, before.started, before.done
        if self._outgrown:
            self._livelock.clear()
            for member in before.sampled:
                self._outgrown.pop(member, None)
        self._idle_calls = 0
        self._owes_plan = False

    def _step(self, turn: Turn[Member], wait: Wait | None) -> None:
        """Without a queue: plan a batch and process its output."""
        batch = self._plan(turn)
        if wait is not None:
            self._in_flight.append(batch)
            wait(turn)
            self._in_flight.clear()
        self._settle(turn, batch)
        if self._has_aborted:
            turn.keeps_going = True
            self._has_aborted = False

    def _call(self, turn: Turn[Member], wait: Wait | None) -> None:
        """With a queue: plan a batch if there is work, then process the oldest unless there is room for another."""
        in_flight = self._in_flight
        if self._has_work:
            in_flight.append(self._plan(turn))
            has_room = len(in_flight) < self._queue_size
            turn.processed = not (has_room and (turn.scheduled_tokens or self.running or self.waiting))
        else:
            turn.planned = False
            self._count(turn)
        outputs = 0
        if turn.processed:
            if wait is not None:
                wait(turn)
            batch = in_flight.popleft()
            outputs = batch.outputs
            self._settle(turn, batch)
        turn.free_blocks_end = self.pool.free
        happened = outputs or self._has_aborted or not turn.is_dead
        self._idle_calls = 0 if happened else self._idle_calls + 1
        self._has_aborted = False
        # The next may do something unless many have done nothing, and if nobody is left there is none.
        turn.keeps_going = self._idle_calls < 2 * (self._queue_size + 1) or not (self.running or self.waiting)

    def _plan(self, turn: Turn[Member]) -> _Batch:
        """One step's batch by the rules: running sequences first, then waiting ones."""
        config, cohort = self.config, self.cohort
        self._owes_plan = False
        cap = self._prefill_cap() if config.long_prefill_token_threshold > 0 else 0
        scheduled = self._chunks(cap) if self.prefilling else {}
        evicted = self.blocks.run_step(scheduled)
        if evicted is None:
            scheduled = self._walk(turn, cap)
            self.blocks.end_walk()
        else:
            turn.evicted = evicted
        if not turn.preempted and self.waiting:
            budget = config.max_num_batched_tokens - cohort.size - sum(scheduled.values())
            self._admit_waiting(turn, scheduled, budget, cap)
            if scheduled:  # with decodes alone, nothing but a release can let the head in later
                self._head_is_blocked = False
        return self._batch(turn, self._compute(turn, scheduled))

    def _chunks(self, cap: int) -> dict[Member, int]:
        """Prompt chunks of this step. Each running sequence gets at least a token, and only the last may be cut.

        For it got one when it was admitted last, and since then nobody before it has come to want more: a chunk grows
        only with an adaptive cap, which is a share of the budget for each.
        """
        chunks: dict[Member, int] = {}
        left = self.config.max_num_batched_tokens - self.cohort.size
        for member in self.prefilling:
            tokens = member.num_tokens - member.computed
            if 0 < cap < tokens:
                tokens = cap
            chunks[member] = tokens = min(tokens, left)
            left -= tokens
        return chunks

    def _walk(self, turn: Turn[Member], cap: int) -> dict[Member, int]:
        """The running loop, literally, where blocks run short; returns the chunks that were scheduled."""
        budget = self.config.max_num_batched_tokens
        order = list(self.running)
        scheduled: dict[Member, int] = {}
        decoders: set[Member] = set()
        index = 0
        while index < len(order) and budget > 0:
            member = order[index]
            self.blocks.seen_serial = member.serial
            tokens = 1
            if not member.decoding:
                if member not in self.prefilling:  # it is done, but for the output in flight
                    index += 1
                    continue
                tokens = member.num_tokens - member.computed
                if 0 < cap < tokens:
                    tokens = cap
                tokens = min(tokens, budget)
            need = self.blocks.needed(member, tokens)
            fits = True
            while fits and need > self.pool.free:
                place = len(order) - 1
                if self.config.policy != "fcfs":
                    place = order.index(max(order, key=_queue_key))
                victim = order.pop(place)
                index -= place < index
                if victim in scheduled or victim in decoders:  # its part of this step is undone
                    budget += scheduled.pop(victim, 1)
                turn.preemptions.append(self._cause(victim, member, need))
                self._preempt(turn, victim, took_turn=victim in decoders)
                decoders.discard(victim)
                fits = victim is not member
            if not fits:
                if self.config.policy == "fcfs":
                    break
                continue
            turn.evicted += self.pool.take(need)
            if member.decoding:
                decoders.add(member)
            else:
                scheduled[member] = tokens
            self.blocks.place(member, tokens)
            budget -= tokens
            index += 1
        assert len(decoders) == self.cohort.size, "whoever runs gets a token (see _chunks)"
        return scheduled

    def _cause(self, victim: Member, trigger: Member, needed: int) -> Preemption:
        return Preemption(
            victim=victim.id,
            trigger=trigger.id,
            is_decode=self._computed(trigger) + 1 == self._num_tokens(trigger),
            needed_blocks=needed,
            free_blocks=self.pool.free,
            lost_tokens=self._computed(victim),
        )

    def _computed(self, member: Member) -> int:
        return member.base + self.cohort.step if member.decoding else member.computed

    def _num_tokens(self, member: Member) -> int:
        return member.base + self.cohort.step + 1 if member.decoding else member.num_tokens

    def _preempt(self, turn: Turn[Member], victim: Member, *, took_turn: bool) -> None:
        """Free a sequence's blocks and queue it to be computed anew: FCFS at the front."""
        del self.running[victim]
        if not self.running:
            self._outgrown.pop(victim, None)
            self._outgrown[victim] = None
        if self._lag and victim not in self.prefilling:
            self._stale.add(victim)
        if victim.decoding:
            self._leave(victim, took_turn=took_turn)
            (turn.stopped_decoding if self._lag else turn.interrupted).append(victim)
        else:
            self.prefilling.pop(victim, None)  # else it is done, and finishes while it waits
        self.blocks.release(victim)
        victim.high_water = max(victim.high_water, victim.computed)
        victim.computed = 0
        victim.num_preemptions += 1
        turn.preempted.append(victim)
        self._head_is_blocked = False
        if self.config.policy == "fcfs":
            self.waiting.appendleft(victim)
        else:
            insort(self.waiting, victim, key=_queue_key)

    # The waiting loop

    def _admit_waiting(self, turn: Turn[Member], scheduled: dict[Member, int], budget: int, cap: int) -> None:
        """Admit from the head of the queue until one does not fit; nobody behind it is tried.

        Nobody need be set aside for tokens in flight: a victim's are in when somebody is admitted again.
        """
        config = self.config
        limit = config.max_num_seqs if config.max_num_active_seqs is None else config.max_num_active_seqs
        blocks, pool = self.blocks, self.pool
        waiting, running, prefilling = self.waiting, self.running, self.prefilling
        self._head_is_blocked, self._room_for_head = True, NEVER
        blocks.met_grower = False
        while budget > 0 and waiting and len(running) < limit:
            member = waiting[0]
            hit = blocks.find(member)
            hit_tokens: int = hit.tokens
            tokens = member.num_tokens - hit_tokens
            if 0 < cap < tokens:
                tokens = cap
            if not config.enable_chunked_prefill and tokens > budget:
                break
            if tokens > budget:
                tokens = budget
            room = blocks.shortage(member, hit, tokens)
            if running:
                room += self._watermark_blocks
            if room > pool.free:
                self._room_for_head = room
                break
            member.computed = hit_tokens
            turn.evicted += blocks.admit(member, hit, tokens)
            waiting.popleft()
            member.serial = self._num_admitted
            self._num_admitted += 1
            running[member] = prefilling[member] = None
            (turn.resumed if member.num_preemptions else turn.admitted).append(member)
            turn.prefix_hits.append((member, hit_tokens))
            scheduled[member] = tokens
            budget -= tokens

        if blocks.met_grower:
            self._head_is_blocked = False

    # After scheduling

    def _compute(self, turn: Turn[Member], scheduled: dict[Member, int]) -> list[Member]:
        """Advance what was scheduled and sum up the step; returns who, beside the cohort, gets a token."""
        cohort, work = self.cohort, turn.work
        total = turn.decoders = work.decodes = cohort.size
        work.decode_context = cohort.context
        sampled: list[Member] = []
        for member, tokens in scheduled.items():
            before = member.computed
            member.computed = after = before + tokens
            total += tokens
            if after >= member.num_tokens:
                sampled.append(member)
            if tokens == 1 and before >= member.request.input_tokens:
                work.decodes += 1
                work.decode_context += after
            else:
                work.chunks.append((before, tokens))
            if before < member.high_water:
                turn.recomputed_tokens += min(after, member.high_water) - before
        turn.scheduled = list(scheduled.items())
        turn.scheduled_tokens = total
        work.sampled = turn.decoders + len(sampled)
        cohort.advance(1, cohort.crossings)
        self._count(turn)
        return sampled

    def _count(self, turn: Turn[Member]) -> None:
        """Note how the pool and the queues stand after scheduling."""
        ending = self._ending() if self._in_flight else ()
        self.blocks.count(turn, self.prefilling, ending)
        turn.free_blocks, turn.cached_blocks = self.pool.free, self.pool.idle
        turn.shared_blocks = self.pool.shared
        turn.running, turn.waiting = len(self.running), len(self.waiting)

    def _ending(self) -> Sequence[Member]:
        """Those who are done, but for the output in flight."""
        return [member for batch in self._in_flight for member in batch.done if member in self.running]

    def _batch(self, turn: Turn[Member], sampled: list[Member]) -> _Batch:
        """The batch that was planned; who goes on decodes from the next step on, who has all its tokens stops."""
        done = self._stop_decoding() if turn.decoders else []
        started: list[Member] = []
        for member in sampled:
            member.num_tokens += 1
            del self.prefilling[member]
            if member.num_tokens >= member.max_tokens:
                done.append(member)
            else:
                self.cohort.join(member)
                started.append(member)
                self.blocks.join(member)
        if len(done) > 1:
            done.sort(key=_serial)
        return _Batch(turn.decoders + len(sampled), sampled, started, done)

    def _stop_decoding(self) -> list[Member]:
        """Take those out of the cohort whose last token was planned."""
        stopped = self.cohort.finished()
        if stopped:
            for member in stopped:
                self._leave(member)
            self._head_is_blocked = False  # for there is more of the budget left
        return stopped

    def _leave(self, member: Member, *, took_turn: bool = False) -> None:
        """Take a decoder out of the cohort; ``took_turn``: after its token of this step was planned."""
        self.cohort.leave(member)
        self.blocks.leave(member, took_turn=took_turn)

    def _settle(self, turn: Turn[Member], batch: _Batch) -> None:
        """Process the output of a batch: who is done is freed, in order of admission."""
        turn.sampled = batch.sampled
        turn.started_decoding = batch.started
        for member in batch.done:
            self._finish(member)
        turn.finished = batch.done
        if self._outgrown and batch.outputs:  # some got a token after all
            self._livelock.clear()
            for member in self._stale.union(batch.sampled):
                self._outgrown.pop(member, None)
        self._stale.clear()
        turn.free_blocks_end = self.pool.free

    def _finish(self, member: Member) -> None:
        """Free a sequence that is done."""
        del self._live[member.id]
        self._owes_plan = self._queue_size > 1
        self._head_is_blocked = False
        if member not in self.running:  # it lost its blocks while its last token was in flight
            self.waiting.remove(member)
        else:
            del self.running[member]
            if self._lag:
                self.blocks.settle(member)
            self.blocks.release(member)

    def _prefill_cap(self) -> int:
        """The longest prompt chunk of this step, where there is a threshold; 0 is no cap, as for a lone request."""
        config = self.config
        cap = config.long_prefill_token_threshold
        queued = len(self.running) + len(self.waiting)
        if queued <= 1:
            return 0
        if config.long_prefill_token_threshold_adaptive:
            cap = max(cap, config.max_num_batched_tokens // queued)
        return cap


def _queue_key(member: Member) -> tuple[int, int]:
    return member.queue_key


def _serial(member: Member) -> int:
    return member.serial
