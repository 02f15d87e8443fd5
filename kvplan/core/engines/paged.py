"""The engine of the vLLM paper (Kwon et al. 2023, sections 4.3 to 4.5).

Sequences of one request (parallel samples) are a group: they share the blocks of their prompt, copy a shared block
before they write into it, and run, wait and move to the CPU together. Rules and what is assumed where the paper is
silent: docs/paged.md.

Who decodes is a cohort, so a step in which nothing else happens costs nothing; which blocks decoders took is settled
when they leave it. Watched, the engine visits each sequence in each step instead, and decides the same.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from kvplan.core.cohort import Cohort, Member
from kvplan.core.engine import DecodeRun, Holding, Live, PoolPicture, Preemption, Sequence, Turn
from kvplan.core.paged_blocks import NO_HIT, BlockTable, Hit, Names, PagedMemory
from kvplan.core.request import Request
from kvplan.errors import InputError

PagedPolicy = Literal["fcfs", "priority", "round-robin"]
PreemptionMode = Literal["recompute", "swap"]
Victim = Literal["most-generated", "last-come"]

#: Tokens after which a sequence lets others go on, in round-robin.
DEFAULT_QUANTUM = 64

#: Where the KV of a group is.
Place = Literal["nowhere", "gpu", "cpu"]


@dataclass(frozen=True, slots=True)
class PagedConfig:
    """Settings of the paper's engine. Lengths, budgets and the ``quantum`` are in tokens; no block is a null block."""

    num_gpu_blocks: int
    block_size: int
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    enable_prefix_caching: bool = True
    policy: PagedPolicy = "fcfs"
    preemption_mode: PreemptionMode = "swap"
    num_cpu_blocks: int = 0
    victim: Victim = "most-generated"
    quantum: int = DEFAULT_QUANTUM

    @property
    def usable_blocks(self) -> int:
        """Blocks that can hold tokens: all."""
        return self.num_gpu_blocks

    @property
    def least_pool(self) -> int:
        """Blocks with which the engine starts: any, for a request that does not fit is turned away."""
        return 1

    def check(self) -> None:
        """Refuse settings that contradict each other: raises `InputError`."""
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise InputError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} is below max_num_seqs {self.max_num_seqs}",
                where="--max-num-batched-tokens",
                hint="raise it, or lower --max-num-seqs",
            )


class Sample(Member):
    """One of a group's sequences while it decodes."""

    __slots__ = ("group",)

    def __init__(self, group: Group, max_model_len: int) -> None:
        super().__init__(group.request, group.queue_key, max_model_len)
        self.group = group


class Group(Sequence):
    """The sequences of one request, which run in step: ``num_tokens`` and ``computed`` are those of each.

    While its prompt is computed, ``computed`` and ``target`` count the prompt once and what each sequence had
    generated before (after a preemption) for each. ``is_split`` says whether its sequences have last blocks of
    their own; ``stored`` full blocks of the first were offered to the cache. ``placed_at`` is ``num_tokens`` when it
    got its place, as the ``serial``-th to get one.
    """

    __slots__ = (
        "is_split",
        "names",
        "place",
        "placed_at",
        "samples",
        "serial",
        "size",
        "stored",
        "tables",
        "target",
    )

    def __init__(self, request: Request, queue_key: tuple[int, int], config: PagedConfig) -> None:
        super().__init__(request, queue_key, config.max_model_len)
        self.size = request.samples
        self.names = Names(request.full_content(), config.block_size)
        self.tables: list[BlockTable] = []
        self.samples: list[Sample] = []
        self.place: Place = "nowhere"
        self.is_split = self.size == 1
        self.target = self.num_tokens
        self.stored = 0
        self.placed_at = 0
        self.serial = 0

    @property
    def decoding(self) -> bool:
        """Whether it is in the cohort."""
        return bool(self.samples) and self.samples[0].decoding

    def work(self, tokens: int) -> int:
        """Tokens to be computed until each of its sequences has so many."""
        prompt = self.request.input_tokens
        return tokens if tokens <= prompt else prompt + self.size * (tokens - prompt)


class Paged:
    """``add`` requests, then ``turn`` until ``is_idle``. Every request that is not refused finishes.

    A step costs O(who does not merely decode + preempted x running), a block O(1).
    """

    def __init__(self, config: PagedConfig, *, watched: bool = False) -> None:
        self.config = config
        self.memory = PagedMemory(config.num_gpu_blocks, config.num_cpu_blocks, config.block_size)
        self.cohort = Cohort(config.block_size)
        #: In order of admission. Each is in the cohort, computes its prompt, or takes its next token by the rules.
        self.running: dict[Group, None] = {}
        self.prefilling: dict[Group, None] = {}
        self.stepping: dict[Group, None] = {}
        self.waiting: deque[Group] = deque()
        #: Those who wait with their blocks in the pool, in the order of the queue (round-robin).
        self.paused: dict[Group, None] = {}
        self._is_watched = watched
        self._num_added = 0
        self._num_placed = 0
        self._num_joined = 0
        self._seats = 0  # sequences that run
        self._head_is_blocked = False
        #: Blocks whose content is computed in this step: they can be shared, but not copied yet.
        self._fresh: set[int] = set()
        #: For `picture`, watched only: what those held who finished in this step, and whose samples began to share
        #: their prompt after its scheduling.
        self._left: list[Holding] = []
        self._just_shared: set[Group] = set()

    @property
    def is_idle(self) -> bool:
        """Whether no request is live."""
        return not self.running and not self.waiting

    @property
    def is_livelocked(self) -> bool:
        """Never: in every step somebody gets on, and what outgrows the pool is refused."""
        return False

    def why_stuck(self) -> str:
        """Nothing can be: see `refusal`."""
        return "the head of the queue fits into the pool alone, and what needs more is turned away"

    def live(self) -> Iterator[Live]:
        """Of every live request: id, tokens so far, prompt included, and the most of a sample that ever had KV."""
        for group in (*self.running, *self.waiting):
            tokens = self._num_tokens(group)
            yield group.id, tokens, max(group.high_water, tokens - 1 if group.decoding else group.computed)

    def picture(self, turn: Turn[Group]) -> PoolPicture:
        """The pool after the scheduling of ``turn``, which is the turn taken last; watched engines only.

        Of several samples each is named ``ID#0`` and so on.
        """
        assert self._is_watched, "who merely decodes has not asked for its blocks"
        contents: list[object] = [None] * self.config.num_gpu_blocks
        for block in self.memory.cache.idle:
            contents[block] = block
        placed = [holding for group in (*self.running, *self.paused) for holding in self._holdings(group)]
        return PoolPicture(
            self.config.block_size, 0, self.config.num_gpu_blocks, [*self._left, *placed], contents
        )

    def _holdings(self, group: Group) -> Iterator[Holding]:
        """What each sequence of a group holds in the pool; one table, until their prompt is whole."""
        tables = group.tables[:1] if group in self._just_shared else group.tables
        tokens = group.computed
        if len(tables) < group.size:
            tokens = min(tokens, group.request.input_tokens)
        for number, table in enumerate(tables):
            name = group.id if group.size == 1 else f"{group.id}#{number}"
            yield Holding(name, tuple(table.blocks), tokens)

    # Arrival

    def refusal(self, request: Request) -> str | None:
        """Why a request is turned away at once, or None: alone in the pool it could not finish."""
        config = self.config
        if reason := request.refusal(config.max_model_len):
            return reason
        if request.samples > config.max_num_seqs:
            return "more_samples_than_max_num_seqs"
        computed = min(request.input_tokens + request.output_tokens, config.max_model_len) - 1
        split = request.samples > 1 and computed > request.input_tokens
        if self._blocks_of_group(request, computed, split) > config.num_gpu_blocks:
            return "needs_more_blocks_than_the_pool"
        return None

    def add(self, request: Request) -> None:
        """Queue a request; `refusal` must be None."""
        priority = request.priority if self.config.policy == "priority" else 0
        self._enqueue(Group(request, (priority, self._num_added), self.config))
        self._num_added += 1

    def _enqueue(self, group: Group) -> None:
        """By priority, then by arrival; round-robin: behind all others."""
        self._head_is_blocked = False
        if self.config.policy == "round-robin":
            self.waiting.append(group)
        else:
            insort(self.waiting, group, key=_queue_key)

    # A turn

    def decode_shape(self) -> tuple[int, int] | None:
        """(sequences, context tokens) of the next step if nothing but decodes can be in it, else None."""
        if self.prefilling or self.stepping or not self.cohort.size:
            return None
        if self.waiting and not self._head_is_blocked:
            return None
        return self.cohort.size, self.cohort.context

    def turn(self, max_steps: int = 1) -> Turn[Group] | DecodeRun[Group]:
        """Take one step or, while only decodes run and nobody can be admitted, up to ``max_steps``."""
        if self.decode_shape() is not None:
            steps = self._steps_alike(max_steps)
            if steps:
                return self._decode(steps)
        return self._step()

    def _steps_alike(self, max_steps: int) -> int:
        """Steps until somebody finishes, must yield, or blocks run short."""
        cohort = self.cohort
        steps = min(max_steps, cohort.first_finish - cohort.step + 1)
        if self.waiting and self.config.policy == "round-robin":
            steps = min(steps, *(max(0, self._quantum_left(group)) for group in self.running))
        return cohort.steps_within(self.memory.free, steps)

    def _decode(self, steps: int) -> DecodeRun[Group]:
        """Steps in which nothing happens but that each of the cohort takes a token, and finishers leave at the end."""
        cohort, memory = self.cohort, self.memory
        context, waste = cohort.context, cohort.waste
        takes = cohort.takes(steps)
        taken = sum(takes)
        waiting_empty, waiting_waste = self._count_slots(self.paused)
        empty = cohort.empty + self.config.block_size * takes[0] - cohort.size + waiting_empty
        waste_begun = cohort.advance(steps, taken)
        if waste_begun:
            waste += sum(slots for offset, slots in waste_begun if not offset)
        free = memory.free - takes[0]
        cached = min(memory.cached, free)
        shared = memory.gpu.shared
        memory.pledge(taken)
        run: DecodeRun[Group] = DecodeRun(
            steps=steps,
            decoders=cohort.size,
            context=context,
            takes=takes,
            evicted=len(memory.evicted),
            free_blocks=free,
            cached_blocks=cached,
            running=len(self.running),
            waiting=len(self.waiting),
            shared_blocks=shared,
            empty_slots=empty,
            reserved_slots=empty - waste - waiting_waste,
            waste_begun=waste_begun,
            finished=self._cohort_finished(),
            free_blocks_end=0,
        )
        memory.evicted.clear()
        for group in run.finished:
            self._finish(group)
        run.free_blocks_end = memory.free
        return run

    def _step(self) -> Turn[Group]:
        """One step: make room, those who run, then those who wait."""
        config, cohort = self.config, self.cohort
        turn: Turn[Group] = Turn()
        self._fresh.clear()
        self._left = []
        self._just_shared.clear()
        if config.policy == "round-robin" and self.waiting:
            self._rotate(turn)
        self._make_room(turn)
        self.memory.pledge(cohort.crossings)
        budget = config.max_num_batched_tokens - cohort.size
        scheduled: dict[Group, int] = {}
        for group in self.stepping:
            self._give_slots(turn, group)
            scheduled[group] = group.size
            budget -= group.size
        for group in self.prefilling:
            tokens = min(group.target - group.computed, budget)
            if tokens:
                self._store_chunk(group, tokens)
                scheduled[group] = tokens
                budget -= tokens
        if not turn.preempted:
            self._admit_waiting(turn, scheduled, budget)
            if scheduled:
                self._head_is_blocked = False
        self._compute(turn, scheduled)
        self._settle(turn, scheduled)
        return turn

    # Those who run

    def _rotate(self, turn: Turn[Group]) -> None:
        """Round-robin: who has used up its quantum goes behind those who wait; its blocks stay as long as they can."""
        for group in [g for g in self.running if g not in self.prefilling and self._quantum_left(g) <= 0]:
            self._stop(turn, group)
            self._enqueue(group)
            self.paused[group] = None

    def _quantum_left(self, group: Group) -> int:
        if group in self.prefilling:
            return self.config.quantum
        return self.config.quantum - (self._num_tokens(group) - group.placed_at)

    def _make_room(self, turn: Turn[Group]) -> None:
        """Preempt until the blocks that this step takes are there."""
        memory = self.memory
        need = self.cohort.crossings + sum(map(self._blocks_needed, self.stepping))
        while need > memory.free:
            trigger, needed, left = self._first_that_lacks()
            paused = self._last_paused()
            if paused is None:
                victim = max(self.running, key=self._victim_key)
                need -= self._blocks_needed(victim)
                self._stop(turn, victim)
                self._preempt(turn, victim, trigger, needed, left)
                self._enqueue(victim)
            else:
                self._preempt(turn, paused, trigger, needed, left)

    def _victim_key(self, group: Group) -> tuple[int, int, int]:
        """The greatest goes first: by priority, then by tokens generated or not, then by arrival."""
        priority, number = group.queue_key
        generated = self._num_tokens(group) - group.request.input_tokens
        return priority, generated if self.config.victim == "most-generated" else 0, number

    def _first_that_lacks(self) -> tuple[Group, int, int]:
        """Who, in order of admission, cannot have its blocks; how many those are, and how many are left."""
        left = self.memory.free
        for group in self.running:
            need = self._blocks_needed(group)
            if need > left:
                return group, need, left
            left -= need
        raise AssertionError("blocks run short, so somebody lacks them")

    def _blocks_needed(self, group: Group) -> int:
        """Blocks that its next token takes, copies included; a prompt has all of its own from the beginning."""
        if group in self.prefilling:
            return 0
        computed = group.samples[0].base + self.cohort.step if group.decoding else group.computed
        if computed % self.config.block_size == 0:
            return group.size
        return 0 if group.is_split else group.size - 1

    def _give_slots(self, turn: Turn[Group], group: Group) -> None:
        """Make sure that each sequence of a group can write its next token; the blocks are there."""
        memory = self.memory
        new: list[int] = []
        for table in group.tables:
            if group.computed % self.config.block_size == 0:
                memory.grow(table, 1)
                new.append(table.blocks[-1])
            elif not group.is_split and memory.copy_on_write(table):
                turn.work.copied_blocks += 1
                new.append(table.blocks[-1])
        group.is_split = True
        if new and self._is_watched:
            turn.new_blocks.setdefault(group, []).extend(new)

    def _stop(self, turn: Turn[Group], group: Group) -> None:
        """Take its place from a group; one of the cohort gets its tokens and blocks back."""
        if group.decoding:
            turn.interrupted.append(group)
        self._unseat(group)

    def _unseat(self, group: Group) -> None:
        if group.decoding:
            self._leave(group)
        self.stepping.pop(group, None)
        del self.running[group]
        self._seats -= group.size

    # Preemption

    def _last_paused(self, but: Group | None = None) -> Group | None:
        """Of those who wait with their blocks in the pool the one whose turn comes last."""
        return next((group for group in reversed(self.paused) if group is not but), None)

    def _preempt(self, turn: Turn[Group], victim: Group, trigger: Group, needed: int, free: int) -> None:
        """Free the blocks of a group that has no place: to the CPU if they are to go there and it has room."""
        memory = self.memory
        was_prefilling = victim in self.prefilling
        self.prefilling.pop(victim, None)
        self.paused.pop(victim, None)
        self._store_all(victim, prompt_is_whole=not was_prefilling)
        moved = None
        if self.config.preemption_mode == "swap" and not was_prefilling:
            moved = memory.swap_out(victim.tables)
        lost = 0
        if moved is None:
            lost = victim.computed if was_prefilling else victim.work(victim.computed)
            victim.high_water = max(victim.high_water, lost)
            self._release(victim)
            victim.computed = 0
            victim.place = "nowhere"
        else:
            turn.work.swapped_out_blocks += moved
            victim.place = "cpu"
        victim.num_preemptions += 1
        turn.preempted.append(victim)
        turn.preemptions.append(
            Preemption(
                victim=victim.id,
                trigger=trigger.id,
                is_decode=trigger in self.running or trigger is victim,
                needed_blocks=needed,
                free_blocks=free,
                lost_tokens=lost,
            )
        )

    # Those who wait

    def _admit_waiting(self, turn: Turn[Group], scheduled: dict[Group, int], budget: int) -> None:
        """Give places from the head of the queue until one does not fit; nobody behind it is tried."""
        self._head_is_blocked = bool(self.waiting)
        while self.waiting and budget > 0:
            group = self.waiting[0]
            if self._seats + group.size > self.config.max_num_seqs:
                break
            if group.place != "nowhere" and group.size > budget:
                break
            if not self._bring_in(turn, group):
                break
            self.waiting.popleft()
            self.paused.pop(group, None)
            self._seats += group.size
            group.serial = self._num_placed
            self._num_placed += 1
            self.running[group] = None
            group.placed_at = group.num_tokens
            if group in self.prefilling:
                tokens = min(group.target - group.computed, budget)
                self._store_chunk(group, tokens)
            else:
                self.stepping[group] = None
                self._give_slots(turn, group)
                tokens = group.size
            scheduled[group] = tokens
            budget -= tokens

    def _bring_in(self, turn: Turn[Group], group: Group) -> bool:
        """Bring a group's KV into the pool, or start its prompt; False, and it stays where it is, without room."""
        memory = self.memory
        if group.place == "nowhere":
            return self._start_prompt(turn, group)
        need = self._blocks_needed(group)
        if group.place == "cpu":
            need += len({block for table in group.tables for block in table.blocks})
        if not self._clear(turn, group, lambda: need):
            return False
        if group.place == "cpu":
            turn.work.swapped_in_blocks += memory.swap_in(group.tables)
            group.stored = 0
            group.place = "gpu"
            turn.resumed.append(group)
            if self._is_watched:
                turn.new_blocks[group] = [block for table in group.tables for block in table.blocks]
        return True

    def _start_prompt(self, turn: Turn[Group], group: Group) -> bool:
        """Take the blocks of a prompt, and of what was generated before, less those found in the cache."""
        memory, prompt = self.memory, group.request.input_tokens
        is_split = group.size == 1 or group.num_tokens > prompt
        blocks = self._blocks_of_group(group.request, group.num_tokens, is_split)
        if not self._clear(turn, group, lambda: self._needed(self._find(group), blocks)):
            return False
        hit = self._find(group)
        if hit.tail is not None and self._needed(hit, blocks) + memory.gpu.is_kept(hit.tail) > memory.free:
            hit = Hit(hit.blocks, None, 0)  # no room for the cached block beside its copy
        first = memory.share(hit.blocks)
        if hit.tail is not None:
            memory.take_tail(first, hit.tail)
            turn.work.copied_blocks += 1
        memory.grow(first, self._blocks_for(group.num_tokens) - len(first))
        group.tables = [first]
        group.is_split = is_split
        if is_split and group.size > 1:
            whole, part = divmod(prompt, self.config.block_size)
            for _ in range(group.size - 1):
                table = memory.share(first.blocks[:whole])
                memory.grow(table, len(first) - whole)
                group.tables.append(table)
            if part:
                turn.work.copied_blocks += group.size - 1
        group.stored = len(hit.blocks)
        group.place = "gpu"
        group.computed = hit.tokens(self.config.block_size)
        group.target = group.work(group.num_tokens)
        self.prefilling[group] = None
        (turn.resumed if group.num_preemptions else turn.admitted).append(group)
        turn.prefix_hits.append((group, group.computed))
        if self._is_watched:
            turn.new_blocks[group] = [block for table in group.tables for block in table.blocks]
        return True

    def _find(self, group: Group) -> Hit:
        """What is stored of a group's beginning; at least one token stays to be computed."""
        if not self.config.enable_prefix_caching:
            return NO_HIT
        length = group.num_tokens if group.size == 1 else group.request.input_tokens
        hit = self.memory.cache.find(group.names, length, length - 1)
        return Hit(hit.blocks, None, 0) if hit.tail in self._fresh else hit

    def _needed(self, hit: Hit, blocks: int) -> int:
        """Free blocks that a hit and the rest of so many blocks take."""
        return blocks - len(hit.blocks) + self.memory.idle_blocks(hit)

    def _clear(self, turn: Turn[Group], group: Group, need: Callable[[], int]) -> bool:
        """Whether ``need`` blocks are free, after those that paused groups hold were freed for it."""
        while need() > self.memory.free:
            paused = self._last_paused(but=group)
            if paused is None:
                return False
            self._preempt(turn, paused, group, need(), self.memory.free)
        return True

    # Blocks

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.config.block_size)

    def _blocks_of_group(self, request: Request, tokens: int, is_split: bool) -> int:
        """Blocks of a group whose sequences have so many tokens each: whole blocks of the prompt once."""
        if not is_split or request.samples == 1:
            return self._blocks_for(tokens)
        whole = request.input_tokens // self.config.block_size
        return whole + request.samples * (self._blocks_for(tokens) - whole)

    def _store_chunk(self, group: Group, tokens: int) -> None:
        """Make the full blocks of a chunk findable for whoever comes in the same step."""
        if not self.config.enable_prefix_caching:
            return
        end = group.computed + tokens
        if group.size > 1:
            end = min(end, group.request.input_tokens)
        full = end // self.config.block_size
        if full > group.stored:
            self.memory.store(group.tables[0], group.names, group.stored, full)
            self._fresh.update(group.tables[0].blocks[group.stored : full])
            group.stored = full

    def _store_all(self, group: Group, *, prompt_is_whole: bool) -> None:
        """Make all that the first sequence of a group has computed findable, its last block included."""
        if not self.config.enable_prefix_caching:
            return
        tokens = group.computed
        if not prompt_is_whole and group.size > 1:
            tokens = min(tokens, group.request.input_tokens)
        self.memory.store(group.tables[0], group.names, group.stored, tokens // self.config.block_size)
        self.memory.store_tail(group.tables[0], group.names, tokens)
        group.stored = max(group.stored, tokens // self.config.block_size)

    def _release(self, group: Group) -> None:
        for table in reversed(group.tables):
            self.memory.release(table)
        group.tables = []
        group.stored = 0

    # The cohort

    def _num_tokens(self, group: Group) -> int:
        return group.samples[0].base + self.cohort.step + 1 if group.decoding else group.num_tokens

    def _join(self, turn: Turn[Group], group: Group) -> None:
        """From the next step on a group decodes without being visited."""
        if not group.samples:
            group.samples = [Sample(group, self.config.max_model_len) for _ in range(group.size)]
        for sample in group.samples:
            sample.computed, sample.num_tokens = group.computed, group.num_tokens
            sample.serial = self._num_joined
            self._num_joined += 1
            self.cohort.join(sample)
        turn.started_decoding.append(group)

    def _leave(self, group: Group) -> None:
        """Take a group out of the cohort: its tokens and blocks are its own again."""
        for sample, table in zip(group.samples, group.tables, strict=True):
            self.cohort.leave(sample)
            self.memory.redeem(table, self._blocks_for(sample.computed) - len(table))
        group.computed, group.num_tokens = group.samples[0].computed, group.samples[0].num_tokens

    def _cohort_finished(self) -> list[Group]:
        """Groups of the cohort whose last token was sampled in the step before."""
        done = dict.fromkeys(sample.group for sample in self.cohort.finished() if isinstance(sample, Sample))
        return sorted(done, key=_serial)

    # After scheduling

    def _compute(self, turn: Turn[Group], scheduled: dict[Group, int]) -> None:
        """Advance what was scheduled and sum up the step."""
        cohort, memory, work = self.cohort, self.memory, turn.work
        turn.decoders = work.decodes = work.sampled = turn.scheduled_tokens = cohort.size
        work.decode_context = cohort.context
        for group, tokens in scheduled.items():
            turn.scheduled_tokens += tokens
            if group in self.stepping:
                group.computed += 1
                work.decodes += tokens
                work.decode_context += tokens * group.computed
                work.sampled += tokens
                continue
            before = group.computed
            group.computed = after = before + tokens
            work.chunks += _chunks(group, before, after)
            if after == group.target:
                work.sampled += group.size if group.num_tokens > group.request.input_tokens else 1
            if before < group.high_water:
                turn.recomputed_tokens += min(after, group.high_water) - before
        turn.scheduled = list(scheduled.items())
        cohort.advance(1, cohort.crossings)
        empty, waste = cohort.empty, cohort.waste
        for groups in (self.stepping, self.prefilling, self.paused):
            more_empty, more_waste = self._count_slots(groups)
            empty, waste = empty + more_empty, waste + more_waste
        turn.empty_slots, turn.reserved_slots = empty, empty - waste
        turn.free_blocks, turn.cached_blocks = memory.free, memory.cached
        turn.shared_blocks = memory.gpu.shared
        turn.running, turn.waiting = len(self.running), len(self.waiting)
        turn.evicted, turn.evicted_blocks = len(memory.evicted), memory.evicted.copy()
        memory.evicted.clear()

    def _count_slots(self, groups: Iterable[Group]) -> tuple[int, int]:
        """Slots of groups in the pool, but not in the cohort, without KV; those of them that stay so."""
        empty = waste = 0
        for group in groups:
            slots = len(group.tables[0]) * self.config.block_size
            tails = group.size if group.is_split else 1
            waste += tails * max(0, slots - group.final_tokens)
            if group not in self.prefilling or tails == 1:
                empty += tails * (slots - group.computed)
                continue
            prompt, filled = group.request.input_tokens, group.computed
            whole = prompt // self.config.block_size * self.config.block_size
            if filled >= prompt:
                filled += (tails - 1) * (prompt - whole)  # copies of the prompt's last block
            empty += whole + tails * (slots - whole) - filled
        return empty, waste

    def _settle(self, turn: Turn[Group], scheduled: dict[Group, int]) -> None:
        """Sampled tokens; who goes on decodes, who stops is freed."""
        done = self._cohort_finished()
        for group in scheduled:
            if group in self.prefilling:
                if group.computed < group.target:
                    continue
                self._end_prompt(group)
            group.num_tokens += 1
            turn.sampled.append(group)
            if group.num_tokens >= group.max_tokens:
                done.append(group)
            elif group.is_split and not self._is_watched:
                self.stepping.pop(group, None)
                self._join(turn, group)
            else:
                self.stepping[group] = None
        done.sort(key=_serial)
        for group in done:
            self._finish(group)
        turn.finished = done
        turn.free_blocks_end = self.memory.free

    def _end_prompt(self, group: Group) -> None:
        """A prompt is whole: its last block can be found, and samples begin to share it."""
        del self.prefilling[group]
        group.computed = group.num_tokens
        if self.config.enable_prefix_caching and group.num_tokens == group.request.input_tokens:
            self.memory.store_tail(group.tables[0], group.names, group.num_tokens)
        if self._is_watched and len(group.tables) < group.size:
            self._just_shared.add(group)
        while len(group.tables) < group.size:
            group.tables.append(self.memory.share(group.tables[0].blocks))

    def _finish(self, group: Group) -> None:
        """Free a group that is done."""
        if group.decoding:
            self._leave(group)
        self.stepping.pop(group, None)
        del self.running[group]
        self._seats -= group.size
        if self._is_watched:
            self._left += self._holdings(group)
        self._store_all(group, prompt_is_whole=True)
        self._release(group)
        group.place = "nowhere"
        self._head_is_blocked = False


def _chunks(group: Group, before: int, after: int) -> Iterator[tuple[int, int]]:
    """Tokens ``before .. after-1`` of a group's work as (context, tokens): the prompt, then what each sequence had."""
    prompt = group.request.input_tokens
    if group.size == 1 or after <= prompt:
        yield before, after - before
        return
    if before < prompt:
        yield before, prompt - before
        before = prompt
    each = group.num_tokens - prompt
    while before < after:
        offset = (before - prompt) % each
        tokens = min(each - offset, after - before)
        yield prompt + offset, tokens
        before += tokens


def _queue_key(group: Group) -> tuple[int, int]:
    return group.queue_key


def _serial(group: Group) -> int:
    return group.serial
