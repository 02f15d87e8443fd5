"""The vLLM 0.33.0 V1 scheduler and block pool, rule by rule, one step at a time.

One full-attention group, synchronous. Written to be laid beside the rules, not to be fast: it is the judge of
any faster engine. A step costs O(running + blocks touched). Rules: vllm/v1/core/sched/scheduler.py,
kv_cache_manager.py and block_pool.py of vLLM 0.33.0; section names below follow docs/scheduler.md.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterator

from kvplan.core.content import BlockHash, block_hashes
from kvplan.core.engine import (
    RESTARTS_TO_GIVE_UP,
    Holding,
    PoolPicture,
    Preemption,
    SchedulerConfig,
    Sequence,
    Turn,
    why_stuck,
)
from kvplan.core.request import Request


class BlockPool:
    """Blocks ``0 .. num_blocks-1`` with reference counts, one free queue and one hash index.

    Invariants, between calls: (1) every block but the null block 0 is either in the free queue or
    referenced, never both; (2) ``references[b]`` counts the tables that hold b; (3) the free queue holds
    first the blocks without content, last freed first, then cached blocks, first freed first;
    (4) ``index`` lists exactly the blocks that have a hash, for each hash in order of entry; (5) ``shared`` counts
    the blocks with more than one user, ``idle`` the free ones with content; (6) a failed request for blocks changes
    nothing.
    """

    def __init__(self, num_blocks: int) -> None:
        self.references = [0] * num_blocks
        self.hashes: list[BlockHash | None] = [None] * num_blocks
        self.index: dict[BlockHash, list[int]] = {}
        self.shared = 0
        self.idle = 0
        # The free queue is linked through two lists of block ids; entry num_blocks is both ends.
        self._end = num_blocks
        self._next = [*range(1, num_blocks + 1), 0]
        self._previous = [num_blocks, *range(num_blocks)]
        self.num_free = num_blocks
        if num_blocks:
            self._unlink(0)  # the null block is taken out for good

    def free_queue(self) -> Iterator[int]:
        """Block ids in the order in which they would be taken."""
        block = self._next[self._end]
        while block != self._end:
            yield block
            block = self._next[block]

    def take(self, count: int, evicted: list[int]) -> list[int]:
        """Take ``count`` blocks from the head of the queue; a block with content loses it.

        Ids of such blocks are appended to ``evicted``. ``count`` must not exceed ``num_free``.
        """
        assert count <= self.num_free, "the caller checks that the blocks are there"
        taken = []
        for _ in range(count):
            block = self._next[self._end]
            self._unlink(block)
            if self.hashes[block] is not None:
                self._forget(block)
                evicted.append(block)
                self.idle -= 1
            self.references[block] = 1
            taken.append(block)
        return taken

    def hold(self, blocks: list[int]) -> None:
        """Add a user to cached blocks; idle ones leave the free queue, wherever they lie in it."""
        for block in blocks:
            users = self.references[block]
            if users == 0:
                self._unlink(block)
                self.idle -= 1
            elif users == 1:
                self.shared += 1
            self.references[block] = users + 1

    def release(self, table: list[int]) -> None:
        """Take a user from each block of a table, last block first.

        Blocks without users go to the head of the queue if they hold nothing reusable, else to its
        tail, each group in the order met.
        """
        blank = []
        for block in reversed(table):
            users = self.references[block] - 1
            assert users >= 0, "a block was freed twice"
            self.references[block] = users
            if users == 0:
                if self.hashes[block] is None:
                    blank.append(block)
                else:
                    self._link(block, before=self._end)
                    self.idle += 1
            elif users == 1:
                self.shared -= 1
        for block in reversed(blank):
            self._link(block, before=self._next[self._end])

    def enter(self, block: int, block_hash: BlockHash) -> None:
        """Make a full block findable. Another block with the same hash stays findable too."""
        assert self.hashes[block] is None, "a block is entered once"
        self.hashes[block] = block_hash
        self.index.setdefault(block_hash, []).append(block)

    def find(self, block_hash: BlockHash) -> int | None:
        """The block entered first among those with this hash, or None."""
        blocks = self.index.get(block_hash)
        return blocks[0] if blocks else None

    def _forget(self, block: int) -> None:
        block_hash = self.hashes[block]
        assert block_hash is not None
        self.hashes[block] = None
        blocks = self.index[block_hash]
        blocks.remove(block)
        if not blocks:
            del self.index[block_hash]

    def _unlink(self, block: int) -> None:
        before, after = self._previous[block], self._next[block]
        self._next[before] = after
        self._previous[after] = before
        self.num_free -= 1

    def _link(self, block: int, *, before: int) -> None:
        after, ahead = before, self._previous[before]
        self._next[ahead] = self._previous[after] = block
        self._previous[block] = ahead
        self._next[block] = after
        self.num_free += 1


class PlainSequence(Sequence):
    """A sequence with its block table; the first ``cached`` of its ``blocks`` were offered to the cache.

    ``block_hashes`` has one hash for each full block of its tokens; ``later_hashes`` gives those to come.
    """

    __slots__ = ("block_hashes", "blocks", "cached", "later_hashes")

    def __init__(self, request: Request, queue_key: tuple[int, int], max_model_len: int) -> None:
        super().__init__(request, queue_key, max_model_len)
        self.blocks: list[int] = []
        self.cached = 0
        self.block_hashes: list[BlockHash] = []
        self.later_hashes: Iterator[BlockHash] = iter(())


class VllmPlain:
    """The scheduler over its pool: ``add`` requests, then ``turn`` until ``is_idle``."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.pool = BlockPool(config.num_gpu_blocks)
        self.running: list[PlainSequence] = []
        self.waiting: deque[PlainSequence] = deque()
        self._num_added = 0
        self._outgrown: set[PlainSequence] = set()
        #: How often a sequence outgrew the pool, alone, since anybody sampled a token.
        self._restarts = 0

    @property
    def is_idle(self) -> bool:
        """Whether no request is live."""
        return not self.running and not self.waiting

    @property
    def is_livelocked(self) -> bool:
        """Whether nothing but sequences that need more blocks than the pool has runs, again and again.

        With ``scheduler_reserve_full_isl`` off, such a sequence is admitted by its first chunk,
        outgrows the pool, preempts itself and starts over without end. Others may wait behind it for ever.
        """
        live = len(self.running) + len(self.waiting)
        return (bool(self.running) and live == len(self._outgrown)) or self._restarts >= RESTARTS_TO_GIVE_UP

    def why_stuck(self) -> str:
        """Who cannot go on, what it needs and what there is; for a run in which nothing can move any more."""
        return why_stuck(self.config, self.running, self.waiting, self._outgrown)

    def decode_shape(self) -> tuple[int, int] | None:
        """None: this engine takes one step a turn and needs no forecast of its time."""
        return None

    def live(self) -> Iterator[tuple[str, int, int]]:
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

    # Arrival

    def refusal(self, request: Request) -> str | None:
        """Why the front end turns a request away before it reaches the scheduler, or None."""
        return request.refusal(self.config.max_model_len)

    def add(self, request: Request) -> None:
        """Queue a request; `refusal` must be None. Hashes the full blocks of its prompt."""
        priority = request.priority if self.config.policy == "priority" else 0
        sequence = PlainSequence(request, (priority, self._num_added), self.config.max_model_len)
        self._num_added += 1
        if self.config.enable_prefix_caching:
            hashes = block_hashes(request.full_content(), self.config.block_size)
            sequence.later_hashes = hashes
            for _ in range(request.input_tokens // self.config.block_size):
                sequence.block_hashes.append(next(hashes))
        if self.config.policy == "fcfs":
            self.waiting.append(sequence)
        else:
            insort(self.waiting, sequence, key=_queue_key)

    # One step

    def turn(self, max_steps: int = 1) -> Turn[PlainSequence]:
        """Schedule one step and process its output. ``max_steps`` allows more; this engine takes one."""
        assert max_steps >= 1
        turn: Turn[PlainSequence] = Turn()
        self.schedule(turn)
        self.settle(turn)
        return turn

    def schedule(self, turn: Turn[PlainSequence]) -> None:
        """Hand out this step's tokens: running sequences first, then waiting ones."""
        budget = self.config.max_num_batched_tokens
        cap = self._prefill_cap()
        scheduled: dict[PlainSequence, int] = {}
        budget = self._schedule_running(turn, scheduled, budget, cap)
        if not turn.preempted:
            self._schedule_waiting(turn, scheduled, budget, cap)
        turn.scheduled = list(scheduled.items())
        self._compute(turn)
        self._count_slots(turn)
        turn.evicted = len(turn.evicted_blocks)
        turn.free_blocks, turn.cached_blocks = self.pool.num_free, self.pool.idle
        turn.shared_blocks = self.pool.shared
        turn.running = len(self.running)
        turn.waiting = len(self.waiting)

    def settle(self, turn: Turn[PlainSequence]) -> None:
        """Append the sampled tokens, in scheduling order, and free the sequences that stop."""
        caching = self.config.enable_prefix_caching
        for sequence, _ in turn.scheduled:
            if sequence.computed < sequence.num_tokens:
                continue
            sequence.num_tokens += 1
            turn.sampled.append(sequence)
            if sequence.num_tokens >= sequence.max_tokens:
                turn.finished.append(sequence)
            elif caching and sequence.num_tokens % self.config.block_size == 0:
                sequence.block_hashes.append(next(sequence.later_hashes))
        if turn.sampled:
            self._restarts = 0
        if turn.finished:
            done = set(turn.finished)
            self.running = [s for s in self.running if s not in done]
            for sequence in turn.finished:
                self.pool.release(sequence.blocks)  # they stay listed in it, for `picture`
        turn.free_blocks_end = self.pool.num_free

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
        """Walk the running list in order of admission; returns the budget that is left."""
        index = 0
        while index < len(self.running) and budget > 0:
            sequence = self.running[index]
            tokens = sequence.num_tokens - sequence.computed
            if 0 < cap < tokens:
                tokens = cap
            tokens = min(tokens, budget, self.config.max_model_len - sequence.computed - 1)
            if tokens == 0:
                index += 1
                continue
            fits = True
            while fits and not self._grow(turn, sequence, tokens):
                victim = self._remove_victim()
                if victim in scheduled:  # by priority only: its part of this step is undone
                    budget += scheduled.pop(victim)
                    index -= 1
                self._note_preemption(turn, victim, sequence, tokens)
                self._preempt(turn, victim)
                fits = victim is not sequence
            if fits:
                scheduled[sequence] = tokens
                budget -= tokens
                index += 1
            elif self.config.policy == "fcfs":
                break
        return budget

    def _remove_victim(self) -> PlainSequence:
        """FCFS: the last in the list. Priority: the greatest (priority, arrival)."""
        if self.config.policy == "fcfs":
            return self.running.pop()
        victim = max(self.running, key=_queue_key)
        self.running.remove(victim)
        return victim

    def _note_preemption(
        self, turn: Turn[PlainSequence], victim: PlainSequence, trigger: PlainSequence, tokens: int
    ) -> None:
        """Tell who needed how many blocks, and what is thrown away for it."""
        needed = self._blocks_for(trigger.computed + tokens) - len(trigger.blocks)
        turn.preemptions.append(
            Preemption(
                victim=victim.id,
                trigger=trigger.id,
                is_decode=trigger.computed + 1 == trigger.num_tokens,
                needed_blocks=needed,
                free_blocks=self.pool.num_free,
                lost_tokens=victim.computed,
            )
        )

    def _preempt(self, turn: Turn[PlainSequence], victim: PlainSequence) -> None:
        """Free a sequence's blocks and queue it to be computed anew: FCFS at the front."""
        if not self.running:  # it was alone: no pool state could ever let it go on
            self._outgrown.add(victim)
            self._restarts += 1
        turn.preempted.append(victim)
        turn.new_blocks.pop(victim, None)
        self.pool.release(victim.blocks)
        victim.blocks = []
        victim.computed = 0
        victim.num_preemptions += 1
        if self.config.policy == "fcfs":
            self.waiting.appendleft(victim)
        else:
            insort(self.waiting, victim, key=_queue_key)

    # The waiting loop

    def _schedule_waiting(
        self, turn: Turn[PlainSequence], scheduled: dict[PlainSequence, int], budget: int, cap: int
    ) -> None:
        """Admit from the head of the queue until one does not fit; nobody behind it is tried."""
        config = self.config
        limit = config.max_num_seqs if config.max_num_active_seqs is None else config.max_num_active_seqs
        while budget > 0 and self.waiting and len(self.running) < limit:
            sequence = self.waiting[0]
            hit = self._find_prefix(sequence)
            hit_tokens = len(hit) * config.block_size
            tokens = sequence.num_tokens - hit_tokens
            if 0 < cap < tokens:
                tokens = cap
            if not config.enable_chunked_prefill and tokens > budget:
                break
            tokens = min(tokens, budget)
            if not self._admit(turn, sequence, hit, tokens):
                break
            self.waiting.popleft()
            self.running.append(sequence)
            sequence.computed = hit_tokens
            (turn.resumed if sequence.num_preemptions else turn.admitted).append(sequence)
            turn.prefix_hits.append((sequence, hit_tokens))
            scheduled[sequence] = tokens
            budget -= tokens

    def _find_prefix(self, sequence: PlainSequence) -> list[int]:
        """The longest run of cached blocks from the start; at least one token stays to be computed."""
        hit: list[int] = []
        if not self.config.enable_prefix_caching:
            return hit
        for block_hash in sequence.block_hashes[: (sequence.num_tokens - 1) // self.config.block_size]:
            block = self.pool.find(block_hash)
            if block is None:
                break
            hit.append(block)
        return hit

    # Allocation

    def _grow(self, turn: Turn[PlainSequence], sequence: PlainSequence, tokens: int) -> bool:
        """Give a running sequence the blocks for ``tokens`` more; False, and no change, if they lack."""
        end = sequence.computed + tokens
        need = self._blocks_for(end) - len(sequence.blocks)
        if need > self.pool.num_free:
            return False
        if need > 0:
            taken = self.pool.take(need, turn.evicted_blocks)
            sequence.blocks += taken
            turn.new_blocks[sequence] = taken
        self._publish(sequence, end)
        return True

    def _admit(self, turn: Turn[PlainSequence], sequence: PlainSequence, hit: list[int], tokens: int) -> bool:
        """Give a waiting sequence its hit and the blocks of its first chunk; False, and no change, if not.

        Idle hit blocks count as needed: adopting them takes them out of the free queue. The
        watermark is kept free only while others run.
        """
        config, pool = self.config, self.pool
        idle = sum(1 for block in hit if pool.references[block] == 0)
        kept_free = int(config.watermark * config.num_gpu_blocks) if self.running else 0
        if config.scheduler_reserve_full_isl:
            need_all = max(0, self._blocks_for(sequence.num_tokens) - len(hit))
            if need_all + idle + kept_free > pool.num_free:
                return False
        end = len(hit) * config.block_size + tokens
        need = max(0, self._blocks_for(end) - len(hit))
        if need + idle + kept_free > pool.num_free:
            return False
        pool.hold(hit)
        sequence.blocks = hit + pool.take(need, turn.evicted_blocks)
        sequence.cached = len(hit)
        turn.new_blocks[sequence] = list(sequence.blocks)
        self._publish(sequence, end)
        return True

    def _blocks_for(self, tokens: int) -> int:
        return -(-min(tokens, self.config.max_model_len) // self.config.block_size)

    def _publish(self, sequence: PlainSequence, tokens: int) -> None:
        """Enter the full blocks of the first ``tokens`` in the cache: when allocated, not when computed."""
        block_size = self.config.block_size
        if not self.config.enable_prefix_caching or tokens < (sequence.cached + 1) * block_size:
            return
        end = min(min(tokens, sequence.num_tokens) // block_size, len(sequence.block_hashes))
        for i in range(sequence.cached, end):
            self.pool.enter(sequence.blocks[i], sequence.block_hashes[i])
        sequence.cached = max(sequence.cached, end)

    # What the step amounts to

    def _compute(self, turn: Turn[PlainSequence]) -> None:
        """Advance the scheduled sequences and sum up the step's work."""
        work = turn.work
        for sequence, tokens in turn.scheduled:
            before = sequence.computed
            sequence.computed = after = before + tokens
            turn.scheduled_tokens += tokens
            work.sampled += after >= sequence.num_tokens
            if before >= sequence.request.input_tokens and tokens == 1:
                work.decodes += 1
                work.decode_context += after
            else:
                work.chunks.append((before, tokens))
            if before < sequence.high_water:
                turn.recomputed_tokens += min(after, sequence.high_water) - before
            sequence.high_water = max(sequence.high_water, after)

    def _count_slots(self, turn: Turn[PlainSequence]) -> None:
        """Count slots without KV, all in the last block of each table, and those to be filled yet."""
        block_size = self.config.block_size
        for sequence in self.running:
            empty = -sequence.computed % block_size
            if empty:
                turn.empty_slots += empty
                turn.reserved_slots += min(empty, sequence.final_tokens - sequence.computed)


def _queue_key(sequence: PlainSequence) -> tuple[int, int]:
    return sequence.queue_key
