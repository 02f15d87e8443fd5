"""Groups of state layers (Mamba, linear attention): a state stands for all tokens before it.

Rules: ``MambaManager`` in vllm/v1/core/single_type_kv_cache_manager.py and ``_mamba_block_aligned_split`` in
v1/core/sched/scheduler.py of vLLM 0.33.0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kvplan.core.content import BlockHash
from kvplan.core.engine import GroupSpec, SchedulerConfig
from kvplan.core.engines.plain_groups import FullGroup, Geometry, PlainSequence, Row, Span, Table
from kvplan.core.engines.plain_pool import NULL_BLOCK, BlockPool


class AnyStateGroup(FullGroup):
    """What all states have in common: a block is filled by one of them."""

    def idle(self, hit: Sequence[int], start: int) -> int:
        """Only the last block of a hit is one."""
        return super().idle([block for block in hit if block != NULL_BLOCK], start)

    def unfilled(self, sequence: PlainSequence, table: Table) -> tuple[int, int]:
        """Slots of blocks whose state is not there yet, and those of them that will be there without drafts."""
        filled = -(-sequence.computed // self.block_size)
        ahead = sum(block != NULL_BLOCK for block in table.blocks[filled:])
        end = -(-sequence.final_tokens // self.block_size)
        reserved = sum(block != NULL_BLOCK for block in table.blocks[filled:end])
        return ahead * self.payload, reserved * self.payload


class RunningStateGroup(AnyStateGroup):
    """Mode ``none``: one block a sequence, and one more for each draft, from admission to the end."""

    def __init__(
        self, number: int, spec: GroupSpec, config: SchedulerConfig, pool: BlockPool, geometry: Geometry
    ) -> None:
        super().__init__(number, spec, config, pool, geometry)
        self._blocks = 1 + (config.speculative.num_drafts if config.speculative else 0)

    def need(self, sequence: PlainSequence, table: Table, hit: Sequence[int], span: Span) -> int:
        """All at admission, none later."""
        return self._blocks - len(table.blocks)

    def need_for_all(self, sequence: PlainSequence, table: Table, hit: Sequence[int], start: int) -> int:
        """As many, however long the sequence."""
        return self._blocks

    def take(self, table: Table, span: Span, evicted: list[int]) -> list[int]:
        """Take what `need` says."""
        taken = self.pool.take(self._blocks - len(table.blocks), evicted)
        self.in_use += len(taken)
        table.blocks += taken
        return taken


class StateGroup(AnyStateGroup):
    """Mode ``align``: states at block ends are kept, so that a prefix that ends there can be hit.

    The block at index i of a table holds the state after ``(i + 1) * block_size`` tokens, if it was left there; most
    entries are null. A sequence has the running state, the one before until it is retired, a block for each draft, and
    perhaps a checkpoint: a state that the kernel stores inside a step.
    """

    drops = True

    def __init__(
        self, number: int, spec: GroupSpec, config: SchedulerConfig, pool: BlockPool, geometry: Geometry
    ) -> None:
        super().__init__(number, spec, config, pool, geometry)
        self._num_drafts = config.speculative.num_drafts if config.speculative else 0
        #: What was entered in the cache since `schedule` began: such states are not there yet.
        self._entered: set[BlockHash] = set()

    def begin_schedule(self) -> None:
        """From now on what was entered before is there."""
        self._entered.clear()

    def stores_inside(self, start: int, end: int, position: int) -> bool:
        """Whether a step that computes ``start .. end-1`` can store the state after ``position`` tokens."""
        size, alignment = self.block_size, self.spec.checkpoint
        return (
            alignment is not None
            and start % size == 0
            and -(-end // size) - 2 > (start - 1) // size
            and start + size <= position < end
            and (position - start) % alignment == 0
        )

    def drop(self, table: Table, computed: int) -> bool:
        """Retire the states before the running one."""
        if computed <= 1:
            return False
        end = min((computed - 1) // self.block_size, len(table.blocks))
        old = [block for block in table.blocks[table.retired : end] if block != NULL_BLOCK]
        self.in_use -= self.pool.release(old)
        table.blocks[table.retired : end] = [NULL_BLOCK] * max(0, end - table.retired)
        table.retired = max(table.retired, end)
        return bool(old)

    # What is needed

    def need(self, sequence: PlainSequence, table: Table, hit: Sequence[int], span: Span) -> int:
        """The running state's block, those for drafts and that of a checkpoint, which is decided here."""
        table.checkpoint = self._checkpoint(sequence, table, span.start, span.end)
        lacking = self._lacking_states(table, hit, span.end, with_checkpoint=table.checkpoint is not None)
        return lacking + self.idle(hit, span.start)

    def need_for_all(self, sequence: PlainSequence, table: Table, hit: Sequence[int], start: int) -> int:
        """As `need`, as if all tokens were computed at once; decides nothing."""
        end = sequence.num_tokens
        checkpoint = self._checkpoint(sequence, table, start, end)
        lacking = self._lacking_states(table, hit, end, with_checkpoint=checkpoint is not None)
        return lacking + self.idle(hit, start)

    def _lacking_states(self, table: Table, hit: Sequence[int], end: int, *, with_checkpoint: bool) -> int:
        """May be below 0, after rejected drafts."""
        drafts = self._num_drafts
        lacking = -(-end // self.block_size) + drafts - len(hit) - len(table.blocks)
        if lacking > 0:
            lacking = min(lacking, 1 + with_checkpoint + (0 if table.is_allocated else drafts))
        return lacking

    def _checkpoint(
        self, sequence: PlainSequence, table: Table, start: int, end: int
    ) -> tuple[int, int] | None:
        """The state to be stored inside a step: after how many tokens, and at which index of the table."""
        position = (end - 1) // self.block_size * self.block_size
        index = -(-end // self.block_size) - 2
        if end < prefill_end(sequence) or index < 0 or not self.stores_inside(start, end, position):
            return None
        blocks = table.blocks
        is_free = (
            index >= len(blocks)
            or blocks[index] == NULL_BLOCK
            or (table.is_allocated and index >= len(blocks) - self._num_drafts)
        )
        return (position, index) if is_free else None

    def may_adopt(self, hit: Sequence[int]) -> bool:
        """Not a state that this step is still to compute: told by its hash, in whatever block it is."""
        return not hit or self.pool.hashes[hit[-1]] not in self._entered

    # What is taken

    def take(self, table: Table, span: Span, evicted: list[int]) -> list[int]:
        """Nulls up to the running state, the blocks for drafts moved behind it, then new blocks."""
        drafts, blocks = self._num_drafts, table.blocks
        want = -(-span.end // self.block_size) + drafts
        had, was_allocated = len(blocks), table.is_allocated
        table.is_allocated = True
        if want <= had and table.checkpoint is None:
            return []
        # The running state's index, or the checkpoint's before it.
        first = want - drafts - 1 - (table.checkpoint is not None)
        if had < want - drafts - 1:
            blocks += [NULL_BLOCK] * (first - had)
        if was_allocated:
            for index in range(had - drafts, min(had, first)):
                blocks.append(blocks[index])
                blocks[index] = NULL_BLOCK
        taken = self.pool.take(max(0, want - len(blocks)), evicted)
        self.in_use += len(taken)
        blocks += taken
        return taken

    # What is cached

    def offer(self, sequence: PlainSequence, table: Table, tokens: int) -> None:
        """Enter the states worth it: left at a block end, stored as a checkpoint, or at the prompt's last block end."""
        super().offer(sequence, table, tokens)
        last = (sequence.request.input_tokens - 1) // self.block_size * self.block_size
        if table.checkpoint is not None:
            position, index = table.checkpoint
            if table.blocks[index] == NULL_BLOCK:
                return
            if position in (last, sequence.junction):
                self._enter_state(sequence, table, index)
            else:
                self.pool.forget(table.blocks[index])
        elif tokens == last > 0:
            index = tokens // self.block_size - 1
            if index < len(table.blocks) and table.blocks[index] != NULL_BLOCK:
                self._enter_state(sequence, table, index)

    def worth_caching(self, sequence: PlainSequence, first: int, end: int) -> Iterator[int]:
        """The states at the last block end of the prompt and at the junction."""
        ends = (sequence.request.input_tokens - 1, sequence.junction)
        wanted = sorted({tokens // self.block_size - 1 for tokens in ends})
        return (block for block in wanted if first <= block < end)

    def _enter(self, sequence: PlainSequence, table: Table, index: int) -> None:
        super()._enter(sequence, table, index)
        self._entered.add(self.key(sequence, index))

    def _enter_state(self, sequence: PlainSequence, table: Table, index: int) -> None:
        """Enter a block as the state that belongs at its index, unless it is entered as that."""
        block = table.blocks[index]
        if self.pool.hashes[block] != self.key(sequence, index):
            self.pool.forget(block)
            self._enter(sequence, table, index)

    # What is hit

    def find(self, cached: Callable[[int], Row | None], limit: int) -> list[Row | None]:
        """The last state; all before it is in it."""
        for block in reversed(range(limit // self.block_size)):
            row = cached(block)
            if row is not None:
                return [*[None] * block, row]
        return []


def prefill_end(sequence: PlainSequence) -> int:
    """Tokens that are computed in chunks; behind them a sequence decodes."""
    return max(sequence.request.input_tokens, sequence.num_tokens - 1)


def chunk_end(
    groups: Sequence[StateGroup], config: SchedulerConfig, sequence: PlainSequence, start: int, end: int
) -> int:
    """Where a chunk from ``start`` that could reach ``end`` ends, so that states come to lie at block ends.

    Not past ``end``; ``start`` or less where nothing can be scheduled.
    """
    size, last = groups[0].block_size, prefill_end(sequence)
    if start >= last:
        return end
    position = (last - 1) // size * size
    stores = end >= last and all(group.stores_inside(start, end, position) for group in groups)
    if end < last:
        block_end = end // size * size
        threshold = config.long_prefill_token_threshold
        most = min(config.max_num_batched_tokens, threshold or config.max_num_batched_tokens)
        if block_end > start or size <= most:
            end = block_end
    stops = []
    if not stores:
        stops.append((sequence.num_tokens - 1) // size * size)
        if start % size:
            stops.append(-(-start // size) * size)
    if start < sequence.junction < end:
        stops.append(start + (sequence.junction - start) // size * size)
    return min((stop for stop in stops if start < stop < end), default=end)
