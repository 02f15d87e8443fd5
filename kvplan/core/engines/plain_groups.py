"""Groups of layers that share a block table, rule by rule: full attention, sliding windows, chunked-local attention.

A group says which blocks are out of reach, how many are needed, what is hit, taken and cached. All draw from one pool.
Rules: vllm/v1/core/single_type_kv_cache_manager.py and kv_cache_coordinator.py of vLLM 0.33.0.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from kvplan.core.content import BlockHash
from kvplan.core.engine import GroupSpec, SchedulerConfig
from kvplan.core.engine import Sequence as EngineSequence
from kvplan.core.engines.plain_pool import NULL_BLOCK, BlockPool
from kvplan.core.request import Request


class Table:
    """A sequence's blocks in one group, `NULL_BLOCK` where there is none; ``cached`` of them were offered to the cache.

    The rest is used by state groups alone: the first ``retired`` entries hold no running state any more;
    ``is_allocated`` after the first blocks; ``checkpoint`` is ``(tokens, index)`` of a state stored inside the step.
    """

    __slots__ = ("blocks", "cached", "checkpoint", "is_allocated", "retired")

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.clear()

    def clear(self) -> None:
        """Forget all, as after its blocks were freed."""
        self.blocks = []
        self.cached = self.retired = 0
        self.is_allocated = False
        self.checkpoint: tuple[int, int] | None = None


class PlainSequence(EngineSequence):
    """A sequence with its block tables, one a group, and what asynchronous scheduling adds.

    ``hashes`` has one hash for each full stretch of its tokens; ``later_hashes`` gives those to come. ``junction`` is
    the longest prefix that some group could have hit when the hit was shorter, in tokens, else 0.

    ``placeholders``: tokens that batches in flight will sample, and drafts they verify. ``in_flight``: tokens of
    planned batches that are not processed. ``stale``: tokens that were in flight when it was preempted. ``drafts``:
    draft tokens to verify next. ``eligible``: number of the first schedule that may plan it. ``is_partial``: whether
    its last planned chunk ended before its last known token. ``is_gone``: finished or aborted.
    """

    __slots__ = (
        "drafts",
        "eligible",
        "hashes",
        "in_flight",
        "is_gone",
        "is_partial",
        "junction",
        "later_hashes",
        "placeholders",
        "stale",
        "tables",
    )

    def __init__(
        self, request: Request, queue_key: tuple[int, int], max_model_len: int, num_groups: int = 1
    ) -> None:
        super().__init__(request, queue_key, max_model_len)
        self.tables = [Table() for _ in range(num_groups)]
        self.hashes: list[BlockHash] = []
        self.later_hashes: Iterator[BlockHash] = iter(())
        self.junction = 0
        self.placeholders = self.in_flight = self.stale = self.drafts = self.eligible = 0
        self.is_partial = self.is_gone = False

    @property
    def blocks(self) -> list[int]:
        """The table of the first group."""
        return self.tables[0].blocks


class Geometry(NamedTuple):
    """What all groups of an engine have in common.

    Hits end at multiples of ``alignment`` tokens, and there is a hash for every ``hash_size``.
    """

    alignment: int
    hash_size: int
    num_groups: int


class Span(NamedTuple):
    """Tokens that are allocated: ``start .. end-1``, with slots for the first ``slots`` of the sequence."""

    start: int
    end: int
    slots: int


#: A cached block in each group of a kind.
Row = Sequence[int]


class FullGroup:
    """Full attention: a block for every ``block_size`` tokens, all kept. The other kinds differ in few rules."""

    #: Whether blocks may be given back before the sequence ends.
    drops = False

    def __init__(
        self, number: int, spec: GroupSpec, config: SchedulerConfig, pool: BlockPool, geometry: Geometry
    ) -> None:
        self.spec = spec
        self.config = config
        self.block_size = config.block_size_of(spec)
        self.pool = pool
        self.geometry = geometry
        # Hashes are kept apart by group.
        self._label = number.to_bytes(2, "big") if geometry.num_groups > 1 else b""
        #: Blocks in use, those that several sequences use once.
        self.in_use = 0
        self.payload = config.block_slots if spec.payload is None else spec.payload
        self._hashes_a_block = self.block_size // geometry.hash_size

    def key(self, sequence: PlainSequence, index: int) -> BlockHash:
        """What the prefix that ends with the block at an index is found by in this group."""
        return self._label + sequence.hashes[(index + 1) * self._hashes_a_block - 1]

    # What is out of reach

    def out_of_reach(self, computed: int) -> int:
        """Leading tokens that nothing attends to any more once ``computed`` tokens are there."""
        return 0

    def skip(self, computed: int) -> int:
        """Leading blocks that are out of reach as a whole."""
        return self.out_of_reach(computed) // self.block_size

    def drop(self, table: Table, computed: int) -> bool:
        """Free the blocks that are out of reach, from the last to the first; whether there were any."""
        out = min(self.skip(computed), len(table.blocks))
        first = out
        while first > 0 and table.blocks[first - 1] != NULL_BLOCK:
            first -= 1
        if first == out:
            return False
        self.in_use -= self.pool.release(table.blocks[first:out])
        table.blocks[first:out] = [NULL_BLOCK] * (out - first)
        return True

    # What is needed

    def need(self, sequence: PlainSequence, table: Table, hit: Sequence[int], span: Span) -> int:
        """Blocks for a span that are to come from the free queue, the hit's idle ones among them."""
        return self._lacking(-(-span.slots // self.block_size), table, hit, span.start)

    def need_for_all(self, sequence: PlainSequence, table: Table, hit: Sequence[int], start: int) -> int:
        """As `need`, for all tokens that a sequence has, at admission."""
        required = -(-min(sequence.num_tokens, self.config.max_model_len) // self.block_size)
        return self._lacking(required, table, hit, start)

    def _lacking(self, required: int, table: Table, hit: Sequence[int], start: int) -> int:
        lacking = max(0, required - len(table.blocks) - len(hit))
        return lacking + self.idle(hit, start) if hit else lacking

    def idle(self, hit: Sequence[int], start: int) -> int:
        """Hit blocks that lie in the free queue: adopting them takes them out of it."""
        references = self.pool.references
        return sum(1 for block in hit if references[block] == 0)

    def may_adopt(self, hit: Sequence[int]) -> bool:
        """Whether what was hit can be used in this step."""
        return True

    # What is taken

    def adopt(self, table: Table, hit: Sequence[int], start: int) -> None:
        """Begin a table with the hit; what is out of reach is left where it lies."""
        out = min(self.skip(start), len(hit))
        table.blocks = [NULL_BLOCK] * out + list(hit[out:])
        table.cached = len(hit)
        self.in_use += self.pool.hold([block for block in hit[out:] if block != NULL_BLOCK])

    def take(self, table: Table, span: Span, evicted: list[int]) -> list[int]:
        """Add the blocks that a span lacks to the table; returns them."""
        lacking = -(-span.slots // self.block_size) - len(table.blocks)
        if lacking <= 0:
            return []
        taken = self.pool.take(lacking, evicted)
        self.in_use += lacking
        table.blocks += taken
        return taken

    def release(self, table: Table) -> None:
        """Free a whole table, last block first."""
        self.in_use -= self.pool.release([block for block in table.blocks if block != NULL_BLOCK])

    # What of it holds tokens

    def unfilled(self, sequence: PlainSequence, table: Table) -> tuple[int, int]:
        """Slots of a table behind the last token with KV, and those of them that its tokens will fill."""
        slots = self.payload // self.block_size
        end = len(table.blocks) * self.block_size
        reserved = max(0, min(end, sequence.final_tokens) - sequence.computed)
        return (end - sequence.computed) * slots, reserved * slots

    def behind(self, sequences: Iterable[PlainSequence], number: int) -> int:
        """Slots in the tables of all who run whose tokens none of their users attends to any more."""
        return 0

    # What is cached

    def offer(self, sequence: PlainSequence, table: Table, tokens: int) -> None:
        """Enter the full blocks of the first ``tokens`` in the cache, as far as that was not done."""
        end = min(tokens, len(sequence.hashes) * self.geometry.hash_size) // self.block_size
        if end <= table.cached:
            return
        for index in self.worth_caching(sequence, table.cached, end):
            if table.blocks[index] != NULL_BLOCK:
                self._enter(sequence, table, index)
        table.cached = end

    def _enter(self, sequence: PlainSequence, table: Table, index: int) -> None:
        self.pool.enter(table.blocks[index], self.key(sequence, index))

    def worth_caching(self, sequence: PlainSequence, first: int, end: int) -> Iterator[int]:
        """Which of the blocks ``first .. end-1`` are entered."""
        return iter(range(first, end))

    # What is hit

    def find(self, cached: Callable[[int], Row | None], limit: int) -> list[Row | None]:
        """The cached blocks of a prefix of at most ``limit`` tokens; None stands where none is needed."""
        rows: list[Row | None] = []
        for block in range(limit // self.block_size):
            row = cached(block)
            if row is None:
                break
            rows.append(row)
        return self._aligned(rows)

    def find_run(self, sequence: PlainSequence, limit: int) -> list[int]:
        """As `find` for a single group, without a call for each block: heads of queues are looked up every step."""
        hit: list[int] = []
        index = self.pool.index
        for block_hash in sequence.hashes[: limit // self.block_size]:
            blocks = index.get(block_hash)
            if blocks is None:
                break
            hit.append(blocks[0])
        return hit

    def _aligned(self, rows: list[Row | None]) -> list[Row | None]:
        while len(rows) * self.block_size % self.geometry.alignment:
            rows.pop()
        return rows


class LocalGroup(FullGroup, ABC):
    """What windows and chunks have in common: tokens get out of reach."""

    drops = True

    def need_for_all(self, sequence: PlainSequence, table: Table, hit: Sequence[int], start: int) -> int:
        """As for full attention, but no more than a sequence can have at once."""
        required = -(-min(sequence.num_tokens, self.config.max_model_len) // self.block_size)
        return self._lacking(min(required, self.most_at_once()), table, hit, start)

    @abstractmethod
    def most_at_once(self) -> int:
        """Blocks that a sequence can have at most, as the full-sequence check counts."""

    def _lacking(self, required: int, table: Table, hit: Sequence[int], start: int) -> int:
        covered = max(self.skip(start), len(hit)) if hit else 0
        return max(0, required - len(table.blocks) - covered) + self.idle(hit, start)

    def idle(self, hit: Sequence[int], start: int) -> int:
        """Those of them that are in reach."""
        return super().idle([block for block in hit[self.skip(start) :] if block != NULL_BLOCK], start)

    def behind(self, sequences: Iterable[PlainSequence], number: int) -> int:
        """Slots of blocks that are partly out of reach, or wholly and not yet freed.

        Tokens in flight still attend to theirs. Of a shared block counts what is out of reach for each of its users.
        """
        size, references = self.block_size, self.pool.references
        total = 0
        shared: dict[int, list[int]] = {}
        for sequence in sequences:
            blocks = sequence.tables[number].blocks
            reach = self.out_of_reach(sequence.computed - sequence.in_flight)
            index = min(-(-reach // size), len(blocks)) - 1
            while index >= 0 and blocks[index] != NULL_BLOCK:
                out = min(reach - index * size, size)
                if references[blocks[index]] == 1:
                    total += out
                else:
                    shared.setdefault(blocks[index], []).append(out)
                index -= 1
        total += sum(min(outs) for block, outs in shared.items() if len(outs) == references[block])
        return total * (self.payload // size)


class SlidingGroup(LocalGroup):
    """Sliding-window attention: a token attends to the ``window`` tokens up to itself."""

    @property
    def _run(self) -> int:
        """Neighbouring blocks that hold all that the next token attends to."""
        return -(-(self.spec.window - 1) // self.block_size)

    def out_of_reach(self, computed: int) -> int:
        """Tokens before the window of the next token."""
        return max(0, computed - self.spec.window + 1)

    def most_at_once(self) -> int:
        """Those of a window and of all tokens that may be in flight, which lie anywhere in their blocks."""
        config = self.config
        tokens = self.spec.window - 1 + config.queue_size * config.max_num_batched_tokens
        return -(-min(tokens, config.max_model_len) // self.block_size) + 1

    def worth_caching(self, sequence: PlainSequence, first: int, end: int) -> Iterator[int]:
        """Those that a hit at the end of the prompt or at the junction needs."""
        alignment = self.geometry.alignment
        wanted: set[int] = set()
        for tokens in (sequence.request.input_tokens - 1, sequence.junction):
            last = tokens // alignment * alignment // self.block_size
            wanted.update(range(max(first, last - self._run), min(end, last)))
        return iter(sorted(wanted))

    def find(self, cached: Callable[[int], Row | None], limit: int) -> list[Row | None]:
        """From the right, the first run of blocks that fills the window; else the run from the start."""
        length = limit // self.block_size
        rows: list[Row | None] = [None] * length
        run = 0
        for block in reversed(range(length)):
            row = cached(block)
            if row is None:
                run = 0
                continue
            if run == 0 and (block + 1) * self.block_size % self.geometry.alignment:
                continue
            rows[block] = row
            run += 1
            if run == self._run:
                del rows[block + run :]
                rows[:block] = [None] * block
                return rows
        return self._aligned(rows[:run])


class ChunkedGroup(LocalGroup):
    """Chunked-local attention: a token attends to the tokens of its own chunk of ``chunk`` tokens."""

    def out_of_reach(self, computed: int) -> int:
        """Tokens before the chunk of the next token."""
        return computed // self.spec.chunk * self.spec.chunk

    def most_at_once(self) -> int:
        """Those of a chunk and of all tokens that may be in flight."""
        config = self.config
        tokens = self.spec.chunk + config.queue_size * config.max_num_batched_tokens
        return -(-min(tokens, config.max_model_len) // self.block_size)

    def find(self, cached: Callable[[int], Row | None], limit: int) -> list[Row | None]:
        """Earlier chunks count as hit without being looked up."""
        rows: list[Row | None] = [None] * self.skip(limit)
        for block in range(len(rows), limit // self.block_size):
            row = cached(block)
            if row is None:
                break
            rows.append(row)
        return rows


class Kind:
    """Groups that always need the same tokens: a block is cached only if it is in every one of them."""

    def __init__(self, members: Sequence[tuple[int, FullGroup]]) -> None:
        self.numbers = [number for number, _ in members]
        self._groups = [group for _, group in members]
        self.block_size = self._groups[0].block_size
        self.is_full = type(self._groups[0]) is FullGroup

    def find(self, sequence: PlainSequence, limit: int) -> list[Row | None]:
        """What of the first ``limit`` tokens is hit."""

        def cached(index: int) -> Row | None:
            row = []
            for group in self._groups:
                block = group.pool.find(group.key(sequence, index))
                if block is None:
                    return None
                row.append(block)
            return row

        return self._groups[0].find(cached, limit)

    def find_alone(self, sequence: PlainSequence, limit: int) -> list[int]:
        """The blocks that `find` gives of a single group."""
        if self.is_full:
            return self._groups[0].find_run(sequence, limit)
        return [row[0] if row else NULL_BLOCK for row in self.find(sequence, limit)]


class PrefixHit(NamedTuple):
    """A prefix found in the cache: its tokens, and its blocks in each group.

    ``junction`` is the longest prefix that some kind had, if that is longer, else 0.
    """

    tokens: int
    blocks: Sequence[list[int]]
    junction: int = 0


def kinds_of(groups: Sequence[FullGroup]) -> list[Kind]:
    """The kinds among groups, full ones first, else in the order of the groups."""
    members: dict[tuple[GroupSpec, int], list[tuple[int, FullGroup]]] = {}
    for number, group in enumerate(groups):
        spec = group.spec._replace(payload=None)  # padding makes no difference
        members.setdefault((spec, group.block_size), []).append((number, group))
    return sorted(map(Kind, members.values()), key=lambda kind: not kind.is_full)


def find_prefix(kinds: Sequence[Kind], num_groups: int, sequence: PlainSequence) -> PrefixHit:
    """The longest prefix that all groups have; at least one token stays to be computed.

    One group is asked once. Several are asked in rounds, each for at most what the one before it had, until a round
    changes nothing; what a full kind had in the first round holds. Of two kinds, the first of them full, one round is
    enough.
    """
    goal = sequence.num_tokens - 1
    if num_groups == 1:
        hit = kinds[0].find_alone(sequence, goal)
        return PrefixHit(len(hit) * kinds[0].block_size, [hit])
    found: dict[Kind, list[Row | None]] = {}
    longest = 0
    while True:
        current = goal
        for kind in kinds:
            if not (kind.is_full and kind in found):
                found[kind] = kind.find(sequence, current)
                longest = max(longest, len(found[kind]) * kind.block_size)
            current = min(current, len(found[kind]) * kind.block_size)
        is_settled = current == goal
        goal = current
        if is_settled or (len(kinds) == 2 and kinds[0].is_full):
            break
    blocks: list[list[int]] = [[]] * num_groups
    for kind, whole in found.items():
        kept = whole[: -(-goal // kind.block_size)]
        for place, number in enumerate(kind.numbers):
            blocks[number] = [NULL_BLOCK if row is None else row[place] for row in kept]
    return PrefixHit(goal, blocks, longest if longest > goal else 0)
