"""What sequences hold in one full-attention group: the block side of the fast engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvplan.core.cohort import Cohort, Member
from kvplan.core.content import Run
from kvplan.core.engine import DecodeRun, SchedulerConfig, Turn
from kvplan.core.engines.block_side import EVERYBODY, grower_of
from kvplan.core.extents import ExtentPool, Holding
from kvplan.core.extents import Hit as Found


class Hit:
    """A prefix found in the cache, in tokens and as extents."""

    __slots__ = ("found", "tokens")

    def __init__(self, tokens: int, found: Found) -> None:
        self.tokens = tokens
        self.found = found


_MISS = Hit(0, [])


class FullBlocks:
    """The blocks of all sequences, as `BlockSide` says."""

    def __init__(self, config: SchedulerConfig, cohort: Cohort, live: Mapping[str, Member]) -> None:
        self.config = config
        self.cohort = cohort
        self._live = live
        self.pool = ExtentPool(config.usable_blocks)
        self.met_grower = False
        self.seen_serial = EVERYBODY
        self._block_size = config.block_size
        self._is_caching = config.enable_prefix_caching
        self._reserves_prompt = config.scheduler_reserve_full_isl
        self._lag = int(config.async_scheduling)

    def add(self, member: Member) -> None:
        """Note a new sequence, which holds nothing."""
        member.holding = Holding(member.request, self._block_size)

    # The running loop

    def run_step(self, chunks: dict[Member, int]) -> int | None:
        """Take all blocks of a step's running loop."""
        pool, need, block_size = self.pool, self.cohort.crossings, self._block_size
        for member, tokens in chunks.items():
            need += -(-(member.computed + tokens) // block_size) - member.holding.blocks
        if need > pool.free:
            return None
        evicted = pool.take(need) if need else 0
        for member, tokens in chunks.items():
            self.seen_serial = member.serial
            self.place(member, tokens)
        self.seen_serial = EVERYBODY
        return evicted

    def needed(self, member: Member, tokens: int) -> int:
        """Blocks that a running sequence lacks for its next tokens."""
        if member.decoding:
            return int((member.base + self.cohort.step) % self._block_size == 0)
        held: int = member.holding.blocks
        return -(-(member.computed + tokens) // self._block_size) - held

    def end_walk(self) -> None:
        """The running loop was taken literally."""
        self.seen_serial = EVERYBODY

    # Decoding

    def decode(
        self, steps: int, room_for_head: int | None, ending: Iterable[Member]
    ) -> DecodeRun[Member] | None:
        """Let the cohort decode until blocks run short; none comes to be free in between."""
        cohort, pool = self.cohort, self.pool
        steps = cohort.steps_within(pool.free, steps)
        if not steps:
            return None
        size, context, waste = cohort.size, cohort.context, cohort.waste
        takes = cohort.takes(steps)
        first, taken = takes[0], sum(takes)
        block_size = cohort.block_size
        empty = cohort.empty + block_size * first - size
        waste_begun = cohort.advance(steps, taken)
        for offset, slots in waste_begun:
            if not offset:
                waste += slots
        reserved = empty - waste
        for member in ending:
            empty += -member.computed % block_size
        free, cached, shared = pool.free - first, pool.free - pool.blank, pool.shared
        if cached > free:  # blocks without content are taken first
            cached = free
        evicted = pool.take(taken) if taken else 0
        # By place: keywords would cost as much as a sequence that finishes.
        return DecodeRun(
            steps, size, context, takes, evicted, free, cached, shared, empty, reserved, waste_begun
        )

    def join(self, member: Member) -> None:
        """Nothing is to be noted: what a decoder takes is a sum in the cohort, what it fills is known by its offset."""

    def leave(self, member: Member, *, took_turn: bool = False) -> None:
        """Note a sequence that has just left the cohort."""
        holding, block_size = member.holding, self._block_size
        tokens = member.computed + took_turn
        holding.blocks = -(-tokens // block_size)
        if self._is_caching:
            self.pool.publish(holding, (tokens - self._lag) // block_size)

    # Admission

    def find(self, member: Member) -> Hit:
        """The longest cached prefix; at least one token stays to be computed."""
        if not self._is_caching:
            return _MISS
        block_size = self._block_size
        limit = (member.num_tokens - 1) // block_size
        found = self.pool.find(member.holding, limit, self._publish_grower)
        return Hit(found[-1][2] * block_size, found) if found else _MISS

    def shortage(self, member: Member, hit: Hit, tokens: int) -> int:
        """How many blocks must be free to admit a sequence with so many tokens of its first chunk."""
        end = hit.tokens + tokens
        if self._reserves_prompt and end < member.num_tokens:
            end = member.num_tokens
        idle = self.pool.count_idle(hit.found) if hit.found else 0
        return -(-end // self._block_size) - hit.tokens // self._block_size + idle

    def admit(self, member: Member, hit: Hit, tokens: int) -> int:
        """Adopt the hit, take the blocks of the first chunk and place them."""
        pool, holding, block_size = self.pool, member.holding, self._block_size
        if hit.found:
            pool.adopt(holding, hit.found)
        end = hit.tokens + tokens
        blocks = -(-end // block_size)
        evicted = pool.take(blocks - hit.tokens // block_size)
        holding.blocks = blocks
        if self._is_caching:
            pool.publish(holding, end // block_size, self._publish_grower)
        return evicted

    # Content

    def place(self, member: Member, tokens: int) -> None:
        """Record the blocks of a chunk, which were taken, and make the full ones findable."""
        if member.decoding:
            return  # what it fills is entered when somebody could see it
        holding = member.holding
        end = member.computed + tokens
        block_size = self._block_size
        holding.blocks = -(-end // block_size)
        if self._is_caching:
            self.pool.publish(holding, end // block_size, self._publish_grower)

    def _publish_grower(self, run: Run) -> None:
        """Before somebody looks at or adds to a run: enter what the decoder that grows it has filled."""
        grower = grower_of(run.stream, self._live)
        if grower is None:
            return
        # Whoever stands before the looker took its turn in this step.
        tokens = grower.base + self.cohort.step - self._lag + (grower.serial < self.seen_serial)
        self.pool.publish(grower.holding, tokens // self._block_size)
        self.met_grower = True

    # The end

    def settle(self, member: Member) -> None:
        """Make findable what a sequence that is done has filled with the output that was in flight."""
        if self._lag and self._is_caching:
            self.pool.publish(member.holding, member.computed // self._block_size)

    def release(self, member: Member) -> None:
        """Free all that a sequence holds."""
        self.pool.release(member.holding)

    # Slots

    def count(self, turn: Turn[Member], prefilling: Iterable[Member], ending: Iterable[Member]) -> None:
        """Note slots of held blocks without KV, and those of them that will be filled."""
        block_size, cohort = self._block_size, self.cohort
        empty, reserved = cohort.empty, cohort.empty - cohort.waste
        for member in prefilling:
            tail, lacking = -member.computed % block_size, member.final_tokens - member.computed
            empty += tail
            reserved += tail if tail < lacking else lacking
        for member in ending:
            empty += -member.computed % block_size
        turn.empty_slots, turn.reserved_slots = empty, reserved
