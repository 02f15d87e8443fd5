"""The vLLM 0.33.0 V1 scheduler, rule by rule, one call at a time.

Synchronous or asynchronous, with pipeline stages, aborts, several cache groups and drafts. Written to be laid beside
the rules, not to be fast: it is the judge of any faster engine. A call costs O(running + blocks touched). Rules:
vllm/v1/core/sched/scheduler.py and async_scheduler.py, v1/core/kv_cache_manager.py and v1/engine/core.py of vLLM
0.33.0; names of rules below follow docs/scheduler.md.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator
from math import gcd, lcm

from kvplan.core.content import block_hashes
from kvplan.core.engine import (
    Holding,
    Live,
    PoolPicture,
    Preemption,
    SchedulerConfig,
    Turn,
    why_stuck,
)
from kvplan.core.engines.plain_groups import (
    ChunkedGroup,
    FullGroup,
    Geometry,
    PlainSequence,
    PrefixHit,
    SlidingGroup,
    Span,
    find_prefix,
    kinds_of,
)
from kvplan.core.engines.plain_pool import BlockPool
from kvplan.core.engines.plain_states import RunningStateGroup, StateGroup, chunk_end
from kvplan.core.livelock import Livelock
from kvplan.core.request import Request

#: A sequence's part of a batch: its tokens, how many of them are drafts, and whether it samples.
Share = tuple[PlainSequence, int, int, bool]


class VllmPlain:
    """The scheduler over its pool: ``add`` requests, then ``turn`` until ``is_idle``."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.pool = BlockPool(config.num_gpu_blocks)
        self.running: list[PlainSequence] = []
        self.waiting: deque[PlainSequence] = deque()
        self.groups = make_groups(config, self.pool)
        self._kinds = kinds_of(self.groups)
        self._states = [group for group in self.groups if isinstance(group, StateGroup)]
        self._caches = config.enable_prefix_caching
        self._drafts = config.speculative is not None
        self._max_model_len = config.max_model_len
        self._queue_size = config.queue_size
        self._drops = any(group.drops for group in self.groups)
        self._alignment = self.groups[0].geometry.alignment
        self._hash_size = self.groups[0].geometry.hash_size
        self._lookahead = config.speculative.lookahead if config.speculative else 0
        #: Whether a sequence's blocks change only when it fills one: an allocation inside a block changes nothing.
        self._fills_blocks = (
            [type(group) for group in self.groups] == [FullGroup]
            and self._queue_size == 1
            and config.speculative is None
        )
        self._extra_input = config.speculative.extra_input if config.speculative else 0
        self._hashed_after = config.speculative.hashed_after if config.speculative else 0
        #: Planned batches whose output was not processed, oldest first.
        self._batches: deque[list[Share]] = deque()
        #: Whether somebody finished or was aborted since the last `schedule`: with a batch queue that is work.
        self._has_notice = False
        self._was_aborted = False
        self._num_schedules = 0
        self._quiet_calls = 0
        self._num_added = 0
        #: Who was preempted alone and sampled nothing since, the latest last. While it is empty, no state is noted.
        self._outgrown: dict[PlainSequence, None] = {}
        self._livelock = Livelock()

    @property
    def is_idle(self) -> bool:
        """Whether no call is due: no request is live, and no batch is left to be processed."""
        return not self._has_work and not self._batches

    @property
    def _has_work(self) -> bool:
        return bool(self.running or self.waiting or self._has_notice)

    @property
    def is_livelocked(self) -> bool:
        """Whether those who outgrow the pool alone start over without end, and nobody ever samples (see `Livelock`)."""
        return self._livelock.is_certain

    def why_stuck(self) -> str:
        """Who cannot go on, what it needs and what there is; for a run in which nothing can move any more."""
        return why_stuck(self.config, self.running, self.waiting, self._outgrown)

    def decode_shape(self) -> tuple[int, int] | None:
        """None: this engine takes one step a turn and needs no forecast of its time."""
        return None

    @property
    def free_blocks(self) -> int:
        """Free blocks of the pool, now."""
        return self.pool.num_free

    def live(self) -> Iterator[Live]:
        """Of every live request: id, tokens so far, prompt included, and the most of them that ever had KV."""
        return ((s.id, s.num_tokens, s.high_water) for s in (*self.running, *self.waiting))

    def picture(self, turn: Turn[PlainSequence]) -> PoolPicture:
        """The pool after the scheduling of ``turn``, which is the turn taken last."""
        return PoolPicture(
            cell_tokens=self.config.block_size,
            first=1,
            num_cells=self.config.usable_blocks,
            holdings=[
                Holding(sequence.id, tuple(sequence.blocks), sequence.computed)
                for sequence in (*turn.finished, *self.running)
            ],
            contents=tuple(self.pool.hashes),
        )

    # Arrival and abort

    def refusal(self, request: Request) -> str | None:
        """Why the front end turns a request away before it reaches the scheduler, or None."""
        return request.refusal(self.config.max_model_len)

    def add(self, request: Request) -> None:
        """Queue a request; `refusal` must be None. Hashes the full blocks of its prompt."""
        priority = request.priority if self.config.policy == "priority" else 0
        key = (priority, self._num_added)
        sequence = PlainSequence(request, key, self.config.max_model_len, len(self.groups))
        self._num_added += 1
        self._livelock.clear()
        if self.config.enable_prefix_caching:
            content = request.full_content()
            sequence.later_hashes = block_hashes(content, self._hash_size, self._hashed_after)
            self._hash_full_blocks(sequence)
        if self.config.policy == "fcfs":
            self.waiting.append(sequence)
        else:
            insort(self.waiting, sequence, key=_queue_key)

    def abort(self, request_id: str) -> Live:
        """Let go of a live request at once: its blocks are free, and its output in flight will be ignored."""
        sequence = next(s for s in (*self.running, *self.waiting) if s.id == request_id)
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)
        self._outgrown.pop(sequence, None)
        self._livelock.clear()
        self._was_aborted = True
        self._free(sequence)
        return sequence.id, sequence.num_tokens, sequence.high_water

    def _free(self, sequence: PlainSequence) -> None:
        """Free the blocks of a sequence that is gone, group by group; they stay listed in it, for `picture`."""
        sequence.is_gone = True
        self._has_notice = self._queue_size > 1
        for group, table in zip(self.groups, sequence.tables, strict=True):
            group.release(table)

    def _hash_full_blocks(self, sequence: PlainSequence) -> None:
        """Hash what of its tokens has become a full block."""
        full = (sequence.num_tokens - self._hashed_after) // self._hash_size
        while len(sequence.hashes) < full:
            sequence.hashes.append(next(sequence.later_hashes))

    # One call of the engine

    def turn(
        self, max_steps: int = 1, wait: Callable[[Turn[PlainSequence]], None] | None = None
    ) -> Turn[PlainSequence]:
        """Plan a batch if there is work; process the oldest one unless the queue has room for another.

        ``wait`` is called while the engine waits for the output of the batch that it processes. ``max_steps`` allows
        more; this engine takes one.
        """
        assert max_steps >= 1
        turn: Turn[PlainSequence] = Turn()
        turn.planned = self._has_work
        if turn.planned:
            self.schedule(turn)
        else:
            self._count(turn)
        has_room = turn.planned and len(self._batches) < self._queue_size
        if has_room and (turn.scheduled or self._has_work):
            turn.processed = False
            turn.free_blocks_end = self.pool.num_free
        else:
            if wait is not None:
                wait(turn)
            self.settle(turn)
        self._note_quiet(turn)
        if self._outgrown and turn.preempted and not self.running:
            self._livelock.note(self._state())
        return turn

    def _state(self) -> Iterator[object]:
        """All that decides what follows, while nobody runs and tokens are what they were."""
        yield [sequence.id for sequence in self.waiting]
        pool = self.pool
        for block in pool.free_queue():
            if (content := pool.hashes[block]) is not None:
                yield content, pool.index[content].index(block)
        for batch in self._batches:
            yield [(sequence.id, *share) for sequence, *share in batch if not sequence.is_gone]

    def _note_quiet(self, turn: Turn[PlainSequence]) -> None:
        """Without a batch queue one call in which nothing happens is the last; with one, several in a row."""
        if self._queue_size == 1:
            turn.keeps_going = self._was_aborted
        else:
            happened = turn.scheduled or turn.preempted or turn.sampled or turn.finished or self._was_aborted
            self._quiet_calls = 0 if happened else self._quiet_calls + 1
            patience = 2 * (self._queue_size + 1)
            is_live = bool(self.running or self.waiting)
            turn.keeps_going = not is_live or self._quiet_calls < patience
        self._was_aborted = False

    def schedule(self, turn: Turn[PlainSequence]) -> None:
        """Plan a batch: running sequences first, then waiting ones."""
        self._has_notice = False
        for group in self._states:
            group.begin_schedule()
        budget = self.config.max_num_batched_tokens - self._extra_input
        cap = self._prefill_cap()
        scheduled: dict[PlainSequence, int] = {}
        budget = self._schedule_running(turn, scheduled, budget, cap)
        if not turn.preempted:
            self._schedule_waiting(turn, scheduled, budget, cap)
        turn.scheduled = list(scheduled.items())
        self._batches.append(self._advance(turn))
        self._num_schedules += 1
        self._count(turn)

    def _prefill_cap(self) -> int:
        """The longest prompt chunk of this step; 0 is no cap. A lone request is never capped."""
        config = self.config
        queued = len(self.running) + len(self.waiting)
        cap = config.long_prefill_token_threshold if queued > 1 else 0
        if cap > 0 and config.long_prefill_token_threshold_adaptive:
            cap = max(cap, config.max_num_batched_tokens // queued)
        return cap

    # The running loop

    def _schedule_running(
        self, turn: Turn[PlainSequence], scheduled: dict[PlainSequence, int], budget: int, cap: int
    ) -> int:
        """Walk the running list in order of admission; returns the budget that is left.

        The budget is for tokens and for the slots of the input that each request takes beside them.
        """
        running, block_size, fills_blocks = self.running, self.config.block_size, self._fills_blocks
        index = 0
        while index < len(running) and budget > 0:
            sequence = running[index]
            tokens = self._tokens_to_run(sequence, cap, budget)
            if tokens == 0:
                index += 1
                continue
            fits = True
            # Inside a block nothing changes, which is so for most who decode.
            if not fills_blocks or sequence.computed + tokens >= len(sequence.tables[0].blocks) * block_size:
                while fits and (needed := self._grow(turn, sequence, tokens)):
                    place = self._place_of_victim()
                    victim = running.pop(place)
                    index -= place < index  # by priority only, as what follows
                    if victim in scheduled:  # its part of this step is undone
                        budget += scheduled.pop(victim) + self._extra_input
                        turn.drafts.pop(victim, None)
                    self._note_preemption(turn, victim, sequence, needed)
                    self._preempt(turn, victim)
                    fits = victim is not sequence
            if fits:
                if sequence.drafts:
                    self._note_drafts(turn, sequence, tokens)
                scheduled[sequence] = tokens
                budget -= tokens + self._extra_input
                index += 1
            elif self.config.policy == "fcfs":
                break
        return budget

    def _tokens_to_run(self, sequence: PlainSequence, cap: int, most: int) -> int:
        """Tokens that a running sequence gets: those it lacks, its placeholders and drafts among them; 0 skips it."""
        computed, placeholders = sequence.computed, sequence.placeholders
        if self._num_schedules < sequence.eligible:
            return 0
        if placeholders > 0 and computed + 2 - placeholders >= sequence.max_tokens:
            return 0  # some token in flight is sure to be its last
        tokens = sequence.num_tokens + sequence.drafts + placeholders - computed
        if 0 < cap < tokens:
            tokens = cap
        if tokens > most:
            tokens = most
        if tokens > self._max_model_len - computed - 1:
            tokens = self._max_model_len - computed - 1
        return self._whole_states(sequence, computed, tokens) if self._states else tokens

    def _whole_states(self, sequence: PlainSequence, start: int, tokens: int) -> int:
        """With state groups, what is left of a chunk that must end where a state can be kept."""
        return max(0, chunk_end(self._states, self.config, sequence, start, start + tokens) - start)

    def _note_drafts(self, turn: Turn[PlainSequence], sequence: PlainSequence, tokens: int) -> None:
        """How many of the scheduled tokens are drafts: those beyond the tokens known and in flight."""
        beyond = tokens + sequence.computed - sequence.num_tokens - sequence.placeholders
        if beyond > 0:
            turn.drafts[sequence] = min(sequence.drafts, beyond)

    def _place_of_victim(self) -> int:
        """FCFS: the last in the list. Priority: the greatest (priority, arrival)."""
        if self.config.policy == "fcfs":
            return len(self.running) - 1
        return self.running.index(max(self.running, key=_queue_key))

    def _note_preemption(
        self, turn: Turn[PlainSequence], victim: PlainSequence, trigger: PlainSequence, needed: int
    ) -> None:
        """Tell who needed how many blocks, and what is thrown away for it."""
        turn.preemptions.append(
            Preemption(
                victim=victim.id,
                trigger=trigger.id,
                is_decode=trigger.computed + 1 == trigger.num_tokens + trigger.placeholders,
                needed_blocks=needed,
                free_blocks=self.pool.num_free,
                lost_tokens=victim.computed,
            )
        )

    def _preempt(self, turn: Turn[PlainSequence], victim: PlainSequence) -> None:
        """Free a sequence's blocks and queue it to be computed anew: FCFS at the front.

        What it has in flight is not lost, but it is not admitted again before that is in.
        """
        if not self.running:
            self._outgrown.pop(victim, None)
            self._outgrown[victim] = None
        turn.preempted.append(victim)
        turn.new_blocks.pop(victim, None)
        turn.new_tables.pop(victim, None)
        for group, table in zip(self.groups, victim.tables, strict=True):
            group.release(table)
            table.clear()
        victim.computed = victim.placeholders = victim.drafts = 0
        victim.stale = victim.in_flight
        victim.num_preemptions += 1
        if self.config.policy == "fcfs":
            self.waiting.appendleft(victim)
        else:
            insort(self.waiting, victim, key=_queue_key)

    # The waiting loop

    def _schedule_waiting(
        self, turn: Turn[PlainSequence], scheduled: dict[PlainSequence, int], budget: int, cap: int
    ) -> None:
        """Admit from the head of the queue until one does not fit; nobody behind it is tried.

        Only those whose tokens are still in flight since they were preempted are set aside, and put back in the end.
        """
        config = self.config
        limit = config.max_num_seqs if config.max_num_active_seqs is None else config.max_num_active_seqs
        may_pad = self._drafts and not any(sequence.is_partial for sequence in scheduled)
        others_run = bool(scheduled)
        set_aside: list[PlainSequence] = []
        while budget > 0 and self.waiting and len(self.running) < limit:
            sequence = self.waiting[0]
            if sequence.stale > 0:
                set_aside.append(self.waiting.popleft())
                continue
            hit = self._find_prefix(sequence)
            padding = self._padding(sequence, hit.tokens, others_run=others_run) if may_pad else 0
            tokens, drafts = self._tokens_to_admit(sequence, hit.tokens, padding, cap, budget)
            if tokens == 0 or not self._admit(turn, sequence, hit, tokens):
                break
            self.waiting.popleft()
            self.running.append(sequence)
            sequence.computed = hit.tokens
            (turn.resumed if sequence.num_preemptions else turn.admitted).append(sequence)
            turn.prefix_hits.append((sequence, hit.tokens))
            if drafts:
                turn.drafts[sequence] = drafts
            scheduled[sequence] = tokens
            budget -= tokens + self._extra_input
        if set_aside:
            self._put_back(set_aside)

    def _put_back(self, set_aside: list[PlainSequence]) -> None:
        if self.config.policy == "fcfs":
            self.waiting.extendleft(reversed(set_aside))
        else:
            for sequence in set_aside:
                insort(self.waiting, sequence, key=_queue_key)

    def _padding(self, sequence: PlainSequence, hit_tokens: int, *, others_run: bool) -> int:
        """Placeholder drafts for a sequence that lacks a single token, so that it runs like those who decode.

        Only while nobody whom this step runs was in the middle of a prompt before it.
        """
        drafting = self.config.speculative
        assert drafting is not None, "the caller asks"
        if sequence.num_tokens - hit_tokens != 1 or not (others_run or hit_tokens > 0):
            return 0
        fits = hit_tokens + 2 + drafting.num_drafts <= self.config.max_model_len
        return drafting.num_drafts if fits else 0

    def _tokens_to_admit(
        self, sequence: PlainSequence, hit_tokens: int, padding: int, cap: int, most: int
    ) -> tuple[int, int]:
        """Tokens of a first chunk, and drafts among them; 0 tokens end the waiting loop."""
        tokens = sequence.num_tokens - hit_tokens + padding
        if 0 < cap < tokens:
            tokens = cap
        if tokens > most and (padding or not self.config.enable_chunked_prefill):
            return 0, 0
        tokens = min(tokens, most)
        whole = self._whole_states(sequence, hit_tokens, tokens) if self._states else tokens
        if padding and whole != tokens:
            return min(whole, 1), 0
        return whole, padding

    def _find_prefix(self, sequence: PlainSequence) -> PrefixHit:
        """The longest prefix in the cache; sets the sequence's junction anew."""
        if not self.config.enable_prefix_caching:
            return PrefixHit(0, [[] for _ in self.groups])
        hit = find_prefix(self._kinds, len(self.groups), sequence)
        sequence.junction = hit.junction
        return hit

    # Allocation

    def _span(self, start: int, tokens: int) -> Span:
        """The tokens of an allocation; slots are needed for those that drafts will take too."""
        end = start + tokens
        return Span(start, end, min(end + self._lookahead, self.config.max_model_len))

    def _grow(self, turn: Turn[PlainSequence], sequence: PlainSequence, tokens: int) -> int:
        """Give a running sequence the blocks for ``tokens`` more; 0, or how many it needs if they are not there.

        What is out of reach of all tokens that are not processed is freed first, and stays so.
        """
        span = self._span(sequence.computed, tokens)
        pairs = list(zip(self.groups, sequence.tables, strict=True))
        if self._drops:
            done = sequence.computed - sequence.in_flight
            for group, table in pairs:
                if group.drop(table, done):
                    self._note_change(turn, sequence, [])
        need = 0
        for group, table in pairs:
            need += group.need(sequence, table, (), span)
        if need > self.pool.num_free:
            return need
        for group, table in pairs:
            taken = group.take(table, span, turn.evicted_blocks)
            if taken:
                self._note_change(turn, sequence, taken)
        self._offer(sequence, span.end)
        return 0

    def _admit(self, turn: Turn[PlainSequence], sequence: PlainSequence, hit: PrefixHit, tokens: int) -> bool:
        """Give a waiting sequence its hit and the blocks of its first chunk; False, and no change, if not.

        Idle hit blocks count as needed: adopting them takes them out of the free queue. The
        watermark is kept free only while others run.
        """
        config = self.config
        kept_free = int(config.watermark * config.num_gpu_blocks) if self.running else 0
        parts = list(zip(self.groups, sequence.tables, hit.blocks, strict=True))
        room = self.pool.num_free - kept_free
        if config.scheduler_reserve_full_isl:
            need = 0
            for group, table, blocks in parts:
                need += group.need_for_all(sequence, table, blocks, hit.tokens)
            if need > room:
                return False
        span = self._span(hit.tokens, tokens)
        need = 0
        for group, table, blocks in parts:
            need += group.need(sequence, table, blocks, span)
        if need > room or not all(group.may_adopt(blocks) for group, _, blocks in parts):
            return False
        for group, table, blocks in parts:
            group.adopt(table, blocks, hit.tokens)
        for group, table, _ in parts:
            group.take(table, span, turn.evicted_blocks)
        self._note_change(turn, sequence, sequence.blocks)
        self._offer(sequence, span.end)
        return True

    def _note_change(self, turn: Turn[PlainSequence], sequence: PlainSequence, gained: list[int]) -> None:
        """Note that block tables changed: of one group what was gained, of several all of them."""
        if len(self.groups) == 1:
            turn.new_blocks[sequence] = [*turn.new_blocks.get(sequence, ()), *gained]
        else:
            turn.new_tables[sequence] = [table.blocks for table in sequence.tables]

    def _offer(self, sequence: PlainSequence, tokens: int) -> None:
        """Enter the full blocks of the first ``tokens`` in the cache: when allocated, not when computed.

        With several groups no further than where all of them have a block end.
        """
        if not self._caches:
            return
        tokens = min(tokens, sequence.num_tokens)
        if len(self.groups) > 1:
            tokens -= tokens % self._alignment
        for group, table in zip(self.groups, sequence.tables, strict=True):
            group.offer(sequence, table, tokens)

    # What the batch amounts to

    def _advance(self, turn: Turn[PlainSequence]) -> list[Share]:
        """Count what was scheduled as computed, and what it will sample as known; sum up the batch's work."""
        work, is_async, planned_drafts = turn.work, self.config.async_scheduling, turn.drafts
        batch: list[Share] = []
        total = drafts = 0
        for sequence, tokens in turn.scheduled:
            if planned_drafts:
                drafts = planned_drafts.get(sequence, 0)
            before = sequence.computed
            sequence.computed = after = before + tokens
            sequence.in_flight += tokens
            samples = after >= sequence.num_tokens + sequence.placeholders
            sequence.is_partial = not samples
            sequence.drafts = 0
            if samples:
                work.sampled += 1 + drafts
                if is_async:
                    self._expect_output(sequence, drafts)
            total += tokens
            if tokens == 1 and before >= sequence.request.input_tokens:
                work.decodes += 1
                work.decode_context += after
            else:
                work.chunks.append((before, tokens))
            high_water, known = sequence.high_water, after - drafts
            if before < high_water:
                turn.recomputed_tokens += min(known, high_water) - before
            if known > high_water:
                sequence.high_water = known
            batch.append((sequence, tokens, drafts, samples))
        turn.scheduled_tokens = total
        return batch

    def _expect_output(self, sequence: PlainSequence, drafts: int) -> None:
        """Asynchronous: go on as if the tokens that it samples were known, with as many drafts again."""
        sequence.placeholders += 1 + drafts
        sequence.drafts = self.config.speculative.num_drafts if self.config.speculative else 0
        sequence.eligible = self._num_schedules + self.config.pipeline_parallel_size

    def _count(self, turn: Turn[PlainSequence]) -> None:
        """Take the counts that hold after scheduling."""
        pool = self.pool
        turn.evicted = len(turn.evicted_blocks)
        if turn.new_tables:
            turn.new_tables = {
                s: [list(blocks) for blocks in tables] for s, tables in turn.new_tables.items()
            }
        turn.free_blocks, turn.cached_blocks, turn.shared_blocks = pool.num_free, pool.idle, pool.shared
        turn.running = len(self.running)
        turn.waiting = len(self.waiting)
        self._count_slots(turn)

    def _count_slots(self, turn: Turn[PlainSequence]) -> None:
        """Count slots without KV that anybody will read, and those to be filled yet.

        Those are in the last blocks of each table and, behind a window, in its first; the rest is padding.
        """
        if self._fills_blocks:
            block_size = self.config.block_size
            all_empty = reserved = 0
            for sequence in self.running:
                empty = -sequence.computed % block_size
                left = sequence.final_tokens - sequence.computed
                all_empty += empty
                reserved += empty if empty < left else left
            turn.empty_slots, turn.reserved_slots = all_empty, reserved
            return
        for sequence in self.running:
            for group, table in zip(self.groups, sequence.tables, strict=True):
                empty, reserved = group.unfilled(sequence, table)
                turn.empty_slots += empty
                turn.reserved_slots += reserved
        for number, group in enumerate(self.groups):
            behind = group.behind(self.running, number)
            turn.behind_slots += behind
            turn.empty_slots += behind + group.in_use * (self.config.block_slots - group.payload)
        if len(self.groups) > 1:
            turn.group_blocks = [group.in_use for group in self.groups]

    # Processing a batch

    def settle(self, turn: Turn[PlainSequence]) -> None:
        """Process the oldest batch: append what it sampled, in its order, and free the sequences that stop.

        A sequence that was preempted since (stale) gets its tokens too, but nothing that depends on its blocks changes.
        """
        sampled, caches, after, size = turn.sampled, self._caches, self._hashed_after, self._hash_size
        proposes = self._drafts and not self.config.async_scheduling
        for sequence, tokens, drafts, samples in self._batches.popleft():
            if sequence.is_gone:
                continue
            sequence.in_flight -= tokens
            is_stale = sequence.stale > 0
            if is_stale:
                sequence.stale -= tokens
            if samples:
                count = 1 + self._verify(turn, sequence, drafts, is_stale=is_stale) if drafts else 1
                left = sequence.max_tokens - sequence.num_tokens
                used = count if count <= left else left
                sequence.num_tokens += used
                if caches and (sequence.num_tokens - after) % size < used:
                    self._hash_full_blocks(sequence)
                sampled.append(sequence)
                if used > 1:
                    turn.extra_tokens[sequence] = used - 1
                if not is_stale and (sequence.placeholders > 0 or self._drafts):
                    self._catch_up(sequence, count, used)
                if used == left:
                    self._stop(turn, sequence, is_stale=is_stale)
            if proposes:
                self._propose(sequence)
        if self._outgrown and sampled:  # some got a token after all
            self._livelock.clear()
            for sequence in sampled:
                self._outgrown.pop(sequence, None)
        if turn.finished:
            self.running = [s for s in self.running if not s.is_gone]
        turn.free_blocks_end = self.pool.num_free

    def _verify(
        self, turn: Turn[PlainSequence], sequence: PlainSequence, drafts: int, *, is_stale: bool
    ) -> int:
        """How many drafts were accepted; those that were not are computed no more."""
        assert self.config.speculative is not None, "there are drafts"
        outputs = sequence.num_tokens - sequence.request.input_tokens
        accepted = self.config.speculative.accepted(sequence.id, outputs, drafts)
        rejected = drafts - accepted
        turn.accepted_drafts += accepted
        turn.rejected_drafts += rejected
        if not is_stale:
            if sequence.computed > 0:
                sequence.computed -= rejected
            if sequence.placeholders > 0:
                sequence.placeholders -= rejected
        return accepted

    def _propose(self, sequence: PlainSequence) -> None:
        """Synchronous: the drafter proposes once the output is known, but not in the middle of a prompt."""
        assert self.config.speculative is not None, "there is a drafter"
        outputs = sequence.num_tokens - sequence.request.input_tokens
        proposed = self.config.speculative.proposed(sequence.id, outputs)
        sequence.drafts = 0 if sequence.is_partial else proposed

    def _catch_up(self, sequence: PlainSequence, count: int, used: int) -> None:
        """Tokens that were counted on are known now, ``used`` of ``count``; blocks that they fill enter the cache."""
        sequence.computed -= count - used
        if sequence.placeholders > 0:
            sequence.placeholders -= count
        known = sequence.computed - sequence.in_flight
        sequence.high_water = max(sequence.high_water, known)
        self._offer(sequence, known)

    def _stop(self, turn: Turn[PlainSequence], sequence: PlainSequence, *, is_stale: bool) -> None:
        """A sequence has all its tokens: its blocks are free at once."""
        turn.finished.append(sequence)
        self._free(sequence)
        if is_stale:
            self.waiting.remove(sequence)


def make_groups(config: SchedulerConfig, pool: BlockPool) -> list[FullGroup]:
    """The groups of these settings."""
    kinds = {"full": FullGroup, "sliding": SlidingGroup, "chunked": ChunkedGroup}
    sizes = [
        config.block_size_of(spec) for spec in config.groups if (spec.kind, spec.mode) != ("state", "none")
    ]
    geometry = Geometry(lcm(*sizes), gcd(*sizes) or 1, len(config.groups))
    groups = []
    for number, spec in enumerate(config.groups):
        if spec.kind == "state":
            kind: type[FullGroup] = StateGroup if spec.mode == "align" else RunningStateGroup
        else:
            kind = kinds[spec.kind]
        groups.append(kind(number, spec, config, pool, geometry))
    return groups


def _queue_key(sequence: PlainSequence) -> tuple[int, int]:
    return sequence.queue_key
