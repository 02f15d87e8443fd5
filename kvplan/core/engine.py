"""What every engine takes and gives: settings in, turns out.

An engine has ``add(request)``, ``turn(max_steps)`` and ``is_idle``. It decides; it knows neither models nor
time, which ``simulate`` brings.

A turn is one call of the engine: it plans a batch and processes what the oldest planned one put out. Without a batch
queue these are the same. With one (asynchronous scheduling, pipeline stages) the queue is the engine's own: a turn
may plan and not process (``processed`` is False), process and not plan, and what it plans (``scheduled``, ``work``,
``admitted``, ``preempted``) is of a later batch than what it puts out (``sampled``, ``finished``, drafts). Batches
are processed in the order in which they were planned, so the loop, which knows when each ends, needs no numbers.

An engine whose requests can be aborted also has ``abort(id)`` and ``turn(max_steps, wait)``: it calls ``wait(turn)``
when it waits for the batch that it is about to process, after planning. It may be told of aborts between turns and in
there.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Reversible
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import accumulate, chain
from json import dumps
from math import lcm, sqrt
from operator import sub
from typing import Generic, Literal, NamedTuple, TypeVar

from kvplan.core.drafts import Drafting
from kvplan.core.request import Request
from kvplan.errors import DoesNotFit, InputError

Policy = Literal["fcfs", "priority"]
GroupKind = Literal["full", "sliding", "chunked", "state"]
#: What a state group keeps: the running state only, or also states at block ends, which can be hit.
StateMode = Literal["none", "align"]

#: Names are quoted up to this length.
_LONGEST_NAME = 60


class GroupSpec(NamedTuple):
    """A group of layers that share a block table.

    ``payload`` is how many of a block's slots are not padding (None: all); only the shares of memory depend on it.
    ``block_size`` is the group's own, None: as the engine's. ``window`` of a sliding group and ``chunk`` of a
    chunked-local one are tokens. Of a state group (Mamba, linear attention) ``mode`` says what is kept; ``checkpoint``
    is the alignment, in tokens, of a kernel that can store a state inside a step, None where it cannot.
    """

    kind: GroupKind = "full"
    block_size: int | None = None
    window: int = 0
    chunk: int = 0
    mode: StateMode = "none"
    checkpoint: int | None = None
    payload: int | None = None


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Settings of the scheduler and block pool, by vLLM's names.

    ``num_gpu_blocks`` counts the null block, which never holds tokens. Lengths and budgets are in tokens.
    Defaults are vLLM 0.33's, but for ``async_scheduling``. All ``groups`` share the one pool. ``slots_a_block`` is in
    what slots are counted where groups have unequal blocks or padding: any unit of memory in which all of them are
    whole numbers; None: the least that does.
    """

    num_gpu_blocks: int
    block_size: int
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    long_prefill_token_threshold_adaptive: bool = False
    policy: Policy = "fcfs"
    watermark: float = 0.0
    scheduler_reserve_full_isl: bool = True
    max_num_active_seqs: int | None = None
    groups: tuple[GroupSpec, ...] = (GroupSpec(),)
    async_scheduling: bool = False
    pipeline_parallel_size: int = 1
    speculative: Drafting | None = None
    slots_a_block: int | None = None

    @property
    def is_one_full_group(self) -> bool:
        """Whether there is one block table, with a block for every ``block_size`` tokens and no padding."""
        spec, size = self.groups[0], self.block_size
        if len(self.groups) > 1 or spec.kind != "full" or self.block_size_of(spec) != size:
            return False
        return self.block_slots == size and spec.payload in (None, size)

    @property
    def block_slots(self) -> int:
        """Slots of a block, as they are counted."""
        if self.slots_a_block is not None:
            return self.slots_a_block
        return lcm(*(self.block_size_of(group) for group in self.groups if group.kind != "state"))

    @property
    def queue_size(self) -> int:
        """Batches that may be planned and not processed; 1 is no queue (v1/engine/core.py, ``batch_queue_size``)."""
        stages = self.pipeline_parallel_size
        return stages + 1 if self.async_scheduling else stages

    def block_size_of(self, group: GroupSpec) -> int:
        """Tokens in a block of a group."""
        return group.block_size or self.block_size

    @property
    def usable_blocks(self) -> int:
        """Blocks that can hold tokens: all but the null block."""
        return self.num_gpu_blocks - 1

    def most_blocks(self, group: GroupSpec, tokens: int) -> int:
        """Blocks of a group that a sequence of so many tokens has at most.

        Behind a window or chunk, tokens in flight keep theirs (v1/kv_cache_interface.py ``max_memory_usage_bytes``).
        """
        size = self.block_size_of(group)
        blocks = -(-tokens // size)
        drafts = self.speculative.num_drafts if self.speculative else 0
        in_flight = self.queue_size * self.max_num_batched_tokens
        if group.kind == "sliding":
            reach = min(group.window - 1 + in_flight, self.max_model_len)
            return min(blocks, -(-reach // size) + 1)
        if group.kind == "chunked":
            return min(blocks, -(-min(group.chunk + in_flight, self.max_model_len) // size))
        if group.kind == "state":
            return (min(blocks, 2) if group.mode == "align" else 1) + drafts
        return blocks

    def blocks_for(self, tokens: int) -> int:
        """Blocks that a sequence of so many tokens has at most, in all groups."""
        return sum(self.most_blocks(group, tokens) for group in self.groups)

    @property
    def least_pool(self) -> int:
        """Blocks with which the engine starts: those of the longest sequence, and the null block."""
        return 1 + self.blocks_for(self.max_model_len)

    def check_together(self) -> None:
        """Refuse what vLLM does not do together, or is not simulated together. Raises `InputError`."""
        drafts, states = self.speculative, [g for g in self.groups if g.kind == "state"]
        threshold = self.long_prefill_token_threshold
        if drafts and self.pipeline_parallel_size > 1 and not self.async_scheduling:
            raise InputError(
                "not yet supported: drafts with pipeline stages and synchronous scheduling",
                where="--num-speculative-tokens",
                hint="add --async-scheduling, or leave one of them out",
            )
        if drafts and 0 < threshold <= drafts.num_drafts:
            raise InputError(
                f"the engine would stop: long_prefill_token_threshold {threshold} is not above the "
                f"{drafts.num_drafts} tokens that a draft proposes",
                where="--long-prefill-token-threshold",
                hint="raise it",
            )
        mode = "align" if self.enable_prefix_caching else "none"
        if any(group.mode != mode for group in states):
            raise InputError(
                f"state groups are in mode {mode} where prefix caching is {'on' if mode == 'align' else 'off'}",
                where="config.groups",
                hint="change the mode or enable_prefix_caching",
            )
        sizes = {
            self.block_size_of(group)
            for group in self.groups
            if (group.kind, group.mode) != ("state", "none")
        }
        if len(sizes) > 1 and any(group.kind in {"chunked", "state"} for group in self.groups):
            raise InputError(
                "groups with chunked-local attention or states need equal blocks",
                where="config.groups",
                hint="leave block_size out",
            )

    def check(self) -> None:
        """Refuse what the engine refuses when it starts (vLLM 0.33, config/scheduler.py).

        Raises `InputError` for settings that contradict each other and `DoesNotFit` for a pool that
        cannot hold one sequence of ``max_model_len``.
        """
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise InputError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} is below max_num_seqs {self.max_num_seqs}",
                where="--max-num-batched-tokens",
                hint="raise it, or lower --max-num-seqs",
            )
        if self.max_num_active_seqs is not None and self.max_num_active_seqs > self.max_num_seqs:
            raise InputError(
                f"max_num_active_seqs {self.max_num_active_seqs} is above max_num_seqs {self.max_num_seqs}",
                where="max_num_active_seqs",
                hint="lower it, or raise --max-num-seqs",
            )
        if self.long_prefill_token_threshold > self.max_model_len:
            raise InputError(
                f"long_prefill_token_threshold {self.long_prefill_token_threshold} is above "
                f"max_model_len {self.max_model_len}",
                where="--long-prefill-token-threshold",
                hint="lower it",
            )
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise InputError(
                f"without chunked prefill max_num_batched_tokens {self.max_num_batched_tokens} must reach "
                f"max_model_len {self.max_model_len}",
                where="--no-enable-chunked-prefill",
                hint="raise --max-num-batched-tokens or lower --max-model-len",
            )
        needed = self.blocks_for(self.max_model_len)
        if needed > self.usable_blocks:
            lengths = range(self.max_model_len + 1)
            longest = bisect_right(lengths, self.usable_blocks, key=self.blocks_for) - 1
            raise DoesNotFit(
                f"the engine would not start: one sequence of max_model_len {self.max_model_len:,} needs "
                f"{needed:,} blocks, the pool has {max(self.usable_blocks, 0):,} usable",
                where="--max-model-len",
                hint=f"at most --max-model-len {longest} fits"
                if longest > 0
                else "give the pool at least two blocks: the null block holds nothing",
            )


class Sequence:
    """A request's life in an engine. Token counts; ``num_tokens`` is prompt plus tokens sampled so far.

    ``computed`` tokens have KV now, ``high_water`` is the most that ever had; of ``max_tokens`` in all, the last is
    sampled but never computed, so ``final_tokens`` will be.
    """

    __slots__ = (
        "computed",
        "final_tokens",
        "high_water",
        "id",
        "max_tokens",
        "num_preemptions",
        "num_tokens",
        "queue_key",
        "request",
    )

    def __init__(self, request: Request, queue_key: tuple[int, int], max_model_len: int) -> None:
        self.request = request
        self.id = request.id
        self.queue_key = queue_key
        self.num_tokens = request.input_tokens
        self.max_tokens = min(request.input_tokens + request.output_tokens, max_model_len)
        self.final_tokens = self.max_tokens - 1
        self.computed = 0
        self.high_water = 0
        self.num_preemptions = 0


def why_stuck(
    config: SchedulerConfig,
    running: Iterable[Sequence],
    waiting: Iterable[Sequence],
    outgrown: Reversible[Sequence],
) -> str:
    """Which request blocks a run that is stuck, what it needs and what there is.

    It is the last of ``outgrown``, which were preempted while they were alone, else the head of the queue.
    """
    last = next(reversed(outgrown), None)
    culprit = next(chain(running, waiting)) if last is None else last
    name, usable = quoted(culprit.id), config.usable_blocks
    if last is not None:
        tokens = culprit.final_tokens
        needed = config.blocks_for(tokens)
        if needed <= usable:  # drafts need more, or a long chunk that begins before its window is full
            return (
                f"request {name} can never finish: alone it outgrew the pool's {usable:,} usable blocks, and had to "
                "start over"
            )
        return (
            f"request {name} can never finish: it needs {needed:,} blocks for {tokens:,} tokens, the pool has "
            f"{usable:,} usable; it outgrew them while alone and had to start over"
        )
    tokens = culprit.num_tokens
    needed = config.blocks_for(tokens)
    if needed > usable:
        return (
            f"request {name} can never be admitted: it needs {needed:,} blocks for {tokens:,} tokens, the pool has "
            f"{usable:,} usable"
        )
    budget = config.max_num_batched_tokens
    if not config.enable_chunked_prefill and tokens > budget:
        return (
            f"request {name} can never be admitted: without chunked prefill its {tokens:,} tokens need one step, "
            f"which has {budget:,}"
        )
    return (  # drafts need slots and input of their own, states whole blocks
        f"request {name} can never be admitted: its first step does not fit into {usable:,} usable blocks and "
        f"{budget:,} tokens"
    )


def quoted(text: str) -> str:
    """A name from a file as a message shows it: short, and with control characters and non-ASCII ones escaped."""
    return dumps(text if len(text) <= _LONGEST_NAME else text[: _LONGEST_NAME - 3] + "...")


@dataclass(slots=True)
class StepWork:
    """What one step computes, as far as its time depends on it.

    ``sampled`` sequences need logits. ``decode_context`` is the sum over decoding sequences of the tokens each
    attends to (itself included); ``chunks`` lists ``(tokens computed before, tokens computed now)`` of each prompt
    chunk. ``copied_blocks`` are copied within the GPU's memory before the step, ``swapped_out_blocks`` and
    ``swapped_in_blocks`` to and from the CPU's.
    """

    decodes: int = 0
    decode_context: int = 0
    chunks: list[tuple[int, int]] = field(default_factory=list)
    sampled: int = 0
    copied_blocks: int = 0
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0

    @property
    def moves_blocks(self) -> bool:
        """Whether blocks are copied or swapped."""
        return bool(self.copied_blocks or self.swapped_out_blocks or self.swapped_in_blocks)


S = TypeVar("S", bound=Sequence)

#: Of a live request: id, tokens so far, prompt included, and the most of them that ever had KV.
Live = tuple[str, int, int]


class Preemption(NamedTuple):
    """Why a sequence lost its place: ``trigger`` needed more blocks than were free; it may be the victim itself.

    ``lost_tokens`` had been computed and are thrown away; ``is_decode`` says whether the trigger decodes or
    computes its prompt.
    """

    victim: str
    trigger: str
    is_decode: bool
    needed_blocks: int
    free_blocks: int
    lost_tokens: int


class Turn(Generic[S]):
    """What an engine did in one step.

    ``preemptions`` tells of each of ``preempted`` why.

    Counts taken after scheduling: ``free_blocks``, ``cached_blocks`` (those of them that hold reusable content),
    ``running``, ``waiting``, ``shared_blocks`` (used by more than one sequence), ``empty_slots`` (slots of referenced
    blocks without KV), ``reserved_slots`` (those of them that their owner will fill) and ``hole_slots`` (free slots,
    while the head of the queue needs no more than these but no hole holds it). ``free_blocks_end`` is taken after the
    finished were freed. With several groups ``group_blocks`` has the blocks in use by each; ``behind_slots``, which are
    among the empty ones, have KV that no token to come attends to.

    ``new_blocks`` has, for each sequence whose block table changed, the blocks that it gained. With several groups
    ``new_tables`` has all its tables instead.

    An engine that does not visit those who decode counts them in ``decoders``; they are then neither in
    ``scheduled`` nor in ``sampled``. Of the processed batch ``started_decoding`` says who joins them. Who
    loses that place before it is done is in ``interrupted`` if the processed batch has no token for it, else in
    ``stopped_decoding``.

    ``planned`` and ``processed`` say which halves of a call took place; all counts are as they would be if nothing had
    been planned where it was not. ``keeps_going``: something else happened (an abort), or so few calls in a row did
    nothing that the next may. Of ``sampled``, ``extra_tokens`` has those that put out more than one token and how many
    more; ``drafts`` are the draft tokens among those scheduled, ``accepted_drafts`` and ``rejected_drafts`` what became
    of those of the processed batch.
    """

    __slots__ = (
        "accepted_drafts",
        "admitted",
        "behind_slots",
        "cached_blocks",
        "decoders",
        "drafts",
        "empty_slots",
        "evicted",
        "evicted_blocks",
        "extra_tokens",
        "finished",
        "free_blocks",
        "free_blocks_end",
        "group_blocks",
        "hole_slots",
        "interrupted",
        "keeps_going",
        "new_blocks",
        "new_tables",
        "planned",
        "preempted",
        "preemptions",
        "prefix_hits",
        "processed",
        "recomputed_tokens",
        "rejected_drafts",
        "reserved_slots",
        "resumed",
        "running",
        "sampled",
        "scheduled",
        "scheduled_tokens",
        "shared_blocks",
        "started_decoding",
        "stopped_decoding",
        "waiting",
        "work",
    )

    def __init__(self) -> None:
        self.planned = self.processed = True
        self.keeps_going = False
        self.scheduled: list[tuple[S, int]] = []
        self.admitted: list[S] = []
        self.resumed: list[S] = []
        self.preempted: list[S] = []
        self.preemptions: list[Preemption] = []
        self.prefix_hits: list[tuple[S, int]] = []
        self.sampled: list[S] = []
        self.finished: list[S] = []
        self.drafts: dict[S, int] = {}
        self.extra_tokens: dict[S, int] = {}
        self.accepted_drafts = self.rejected_drafts = 0
        self.decoders = 0
        self.started_decoding: list[S] = []
        self.stopped_decoding: list[S] = []
        self.interrupted: list[S] = []
        self.evicted = 0
        self.evicted_blocks: list[int] = []
        self.new_blocks: dict[S, list[int]] = {}
        self.new_tables: dict[S, list[list[int]]] = {}
        self.work = StepWork()
        self.scheduled_tokens = 0
        self.recomputed_tokens = 0
        self.free_blocks = 0
        self.cached_blocks = 0
        self.free_blocks_end = 0
        self.running = 0
        self.waiting = 0
        self.shared_blocks = 0
        self.empty_slots = 0
        self.reserved_slots = 0
        self.behind_slots = 0
        self.group_blocks: Seq[int] = ()
        self.hole_slots = 0

    @property
    def is_dead(self) -> bool:
        """Whether nothing was planned and nobody was preempted: nothing can move."""
        return not self.scheduled and not self.decoders and not self.preempted and not self.keeps_going


class Level(NamedTuple):
    """Slots after the scheduling of a step, as in a `Turn`; the blocks in use by each group if there are several."""

    empty_slots: int
    reserved_slots: int
    behind_slots: int
    group_blocks: Seq[int]


class Levels(NamedTuple):
    """The same after each of several steps, by column; ``group_blocks`` has one for each group if there are several.

    ``shared_blocks`` are used by more than one sequence, as in a `Turn`.
    """

    empty_slots: list[int]
    reserved_slots: list[int]
    behind_slots: list[int]
    group_blocks: list[list[int]]
    shared_blocks: list[int]


@dataclass(slots=True)
class DecodeRun(Generic[S]):
    """What an engine did in ``steps`` steps in each of which the same ``decoders`` took a token, and nobody another.

    ``takes`` has the blocks taken in each step. Counts are as in a `Turn`, taken after scheduling the first step.
    ``waste_begun`` has pairs of a step's place in the run and slots that from then on are known to stay empty.
    Sequences that finish do so in the last step. With a batch queue the batch processed in the first step may be of
    another kind: of it are ``sampled`` and ``started_decoding``, as in a `Turn`. With windows slots change in ways of
    their own: ``levels`` has them after each step, in place of all that, and ``cached_levels`` the cached blocks.
    """

    steps: int
    decoders: int
    context: int
    takes: list[int]
    evicted: int
    free_blocks: int
    cached_blocks: int
    shared_blocks: int
    empty_slots: int
    reserved_slots: int
    waste_begun: Seq[tuple[int, int]] = ()
    running: int = 0
    waiting: int = 0
    finished: Seq[S] = ()
    free_blocks_end: int = 0
    hole_slots: int = 0
    levels: Levels | None = None
    sampled: Seq[S] = ()
    started_decoding: Seq[S] = ()
    cached_levels: Seq[int] = ()

    @property
    def is_dead(self) -> bool:
        """False: somebody decodes."""
        return False

    def pool_after(self) -> Iterator[tuple[int, int]]:
        """Free blocks after each step, and those of them that hold reusable content."""
        free = accumulate(self.takes[1:], sub, initial=self.free_blocks)
        if self.cached_levels:
            return zip(free, self.cached_levels, strict=True)
        return ((left, min(self.cached_blocks, left)) for left in free)  # what has no content is taken first

    @property
    def first_work(self) -> StepWork:
        """What the first step computes."""
        return StepWork(decodes=self.decoders, decode_context=self.context, sampled=self.decoders)


class RunTimes(NamedTuple):
    """Ticks of the steps of a `DecodeRun`: of the first, of the second, and how many more each following one takes.

    With a batch queue a step lasts as long as the batch that is processed in it, so the first may be of another kind.
    """

    first: int
    second: int
    growth: int

    def ticks(self, steps: int) -> Seq[int]:
        """Of each of so many steps."""
        first, second, growth = self
        if growth and second == first + growth:
            return range(first, first + steps * growth, growth)
        return [
            first,
            *(range(second, second + (steps - 1) * growth, growth) if growth else [second] * (steps - 1)),
        ]

    def total(self, steps: int) -> int:
        """Of so many steps together."""
        more = steps - 1
        return self.first + more * self.second + self.growth * (more * (more - 1) // 2)

    def steps_until(self, gap: int, most: int) -> int:
        """The fewest steps that take at least ``gap`` ticks; at most ``most``."""
        first, second, growth = self
        gap -= first
        most -= 1
        if gap <= 0 or not most:
            return 1
        if not growth:
            return 1 + min(most, -(-gap // second))
        # The root of growth/2 k^2 + (second - growth/2) k = gap, then at most a few steps of correction.
        linear = second - growth / 2
        root = 2 * gap / (linear + sqrt(linear * linear + 2 * growth * gap))
        steps = min(most, int(root) + 1)
        ticks = steps * second + growth * (steps * (steps - 1) // 2)
        while ticks < gap and steps < most:
            ticks += second + growth * steps
            steps += 1
        while steps > 1:
            ticks -= second + growth * (steps - 1)
            if ticks < gap:
                break
            steps -= 1
        return 1 + steps


class Holding(NamedTuple):
    """What one request holds: cells in the order of its tokens, and how many of their slots have KV."""

    id: str
    cells: Seq[int]
    tokens: int


class PoolPicture(NamedTuple):
    """A pool after a step's scheduling, as it is, cheap to take; for maps of it.

    A cell is the least that an engine hands out: a block, or one slot where stretches of any length are reserved.
    Cells are ``first .. first+num_cells-1``, of ``cell_tokens`` slots each. ``contents[cell]`` is None where a free
    cell holds nothing that another request could reuse; an engine without a prefix cache leaves ``contents`` empty.
    """

    cell_tokens: int
    first: int
    num_cells: int
    holdings: Seq[Holding]
    contents: Seq[object] = ()
