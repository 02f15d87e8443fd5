"""What sequences hold in one full-attention group: the block side of the fast engine."""

from __future__ import annotations

from collections.abc import Iterable

from kvplan.core.cohort import Cohort, Member
from kvplan.core.content import Run
from kvplan.core.engine import SchedulerConfig, Turn
from kvplan.core.engines.block_side import EVERYBODY, Moves, output_stream
from kvplan.core.extents import ExtentPool, Holding
from kvplan.core.extents import Hit as Found


class Hit:
    """A prefix found in the cache, in tokens and as extents."""

    __slots__ = ("found", "tokens")

    def __init__(self, tokens: int, found: Found) -> None:
        self.tokens = tokens
        self.found = found


class FullBlocks:
    """The blocks of all sequences, as `BlockSide` says."""

    def __init__(self, config: SchedulerConfig, cohort: Cohort) -> None:
        self.config = config
        self.cohort = cohort
        self.pool = ExtentPool(config.usable_blocks)
        self.met_grower = False
        self.seen_serial = EVERYBODY
        self._holdings: dict[Member, Holding] = {}
        self._lag = int(config.async_scheduling)
        # Late publishing: blocks that decoding fills are entered when somebody could see them. These are the
        # decoders by their output stream.
        self._growing: dict[str, Member] = {}

    def add(self, member: Member) -> None:
        """Note a new sequence, which holds nothing."""
        self._holdings[member] = Holding(member.request, self.config.block_size)

    # The running loop

    def run_step(self, chunks: dict[Member, int]) -> int | None:
        """Take all blocks of a step's running loop."""
        pool, need = self.pool, self.cohort.crossings
        for member, tokens in chunks.items():
            need += self._blocks_for(member.computed + tokens) - self._holdings[member].blocks
        if need > pool.free:
            return None
        evicted = pool.take(need)
        for member, tokens in chunks.items():
            self.seen_serial = member.serial
            self.place(member, tokens)
        self.seen_serial = EVERYBODY
        return evicted

    def needed(self, member: Member, tokens: int) -> int:
        """Blocks that a running sequence lacks for its next tokens."""
        if member.decoding:
            return int((member.base + self.cohort.step) % self.config.block_size == 0)
        return self._blocks_for(member.computed + tokens) - self._holdings[member].blocks

    def end_walk(self) -> None:
        """The running loop was taken literally."""
        self.seen_serial = EVERYBODY

    # Decoding

    def decode(self, steps: int, room_for_head: int | None, ending: Iterable[Member]) -> Moves | None:
        """Let the cohort decode until blocks run short; none comes to be free in between."""
        cohort, pool = self.cohort, self.pool
        steps = cohort.steps_within(pool.free, steps)
        if not steps:
            return None
        waste = cohort.waste
        taken = cohort.takes(steps)
        total = sum(taken)
        block_size = self.config.block_size
        empty = cohort.empty + block_size * taken[0] - cohort.size
        waste_begun = cohort.advance(steps, total)
        if waste_begun:
            waste += sum(slots for offset, slots in waste_begun if not offset)
        free = pool.free - taken[0]
        cached = min(pool.idle, free)  # blocks without content are taken first
        shared = pool.shared
        reserved = empty - waste
        for member in ending:
            empty += -member.computed % block_size
        evicted = pool.take(total) if total else 0
        return Moves(taken, evicted, free, cached, shared, empty, reserved, waste_begun)

    def join(self, member: Member) -> None:
        """Note a sequence that has just joined the cohort."""
        if self.config.enable_prefix_caching:
            self._growing[output_stream(member)] = member

    def leave(self, member: Member, *, took_turn: bool = False) -> None:
        """Note a sequence that has just left the cohort."""
        self._growing.pop(output_stream(member), None)
        holding = self._holdings[member]
        tokens = member.computed + took_turn
        holding.blocks = self._blocks_for(tokens)
        if self.config.enable_prefix_caching:
            self.pool.publish(holding, (tokens - self._lag) // self.config.block_size)

    # Admission

    def find(self, member: Member) -> Hit:
        """The longest cached prefix; at least one token stays to be computed."""
        if not self.config.enable_prefix_caching:
            return Hit(0, [])
        block_size = self.config.block_size
        limit = (member.num_tokens - 1) // block_size
        found = self.pool.find(self._holdings[member], limit, self._publish_grower)
        return Hit(found[-1][2] * block_size if found else 0, found)

    def shortage(self, member: Member, hit: Hit, tokens: int) -> int:
        """How many blocks must be free to admit a sequence with so many tokens of its first chunk."""
        end = hit.tokens + tokens
        if self.config.scheduler_reserve_full_isl and end < member.num_tokens:
            end = member.num_tokens
        idle = self.pool.count_idle(hit.found) if hit.found else 0
        return self._blocks_for(end) - hit.tokens // self.config.block_size + idle

    def admit(self, member: Member, hit: Hit, tokens: int) -> int:
        """Adopt the hit and take the blocks of the first chunk."""
        if hit.found:
            self.pool.adopt(self._holdings[member], hit.found)
        return self.pool.take(self._blocks_for(hit.tokens + tokens) - hit.tokens // self.config.block_size)

    # Content

    def place(self, member: Member, tokens: int) -> None:
        """Record the blocks of a chunk, which were taken, and make the full ones findable."""
        if member.decoding:
            return  # what it fills is entered when somebody could see it
        holding = self._holdings[member]
        end = member.computed + tokens
        holding.blocks = self._blocks_for(end)
        if self.config.enable_prefix_caching:
            full = min(end, member.num_tokens) // self.config.block_size
            self.pool.publish(holding, full, self._publish_grower)

    def _publish_grower(self, run: Run) -> None:
        """Before somebody looks at or adds to a run: enter what the decoder that grows it has filled."""
        grower = self._growing.get(run.stream)
        if grower is None:
            return
        # Whoever stands before the looker took its turn in this step.
        tokens = grower.base + self.cohort.step - self._lag + (grower.serial < self.seen_serial)
        self.pool.publish(self._holdings[grower], tokens // self.config.block_size)
        self.met_grower = True

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.config.block_size)  # no sequence outgrows max_model_len

    # The end

    def settle(self, member: Member) -> None:
        """Make findable what a sequence that is done has filled with the output that was in flight."""
        if self._lag and self.config.enable_prefix_caching:
            self.pool.publish(self._holdings[member], member.computed // self.config.block_size)

    def release(self, member: Member) -> None:
        """Free all that a sequence holds."""
        self.pool.release(self._holdings[member])

    def forget(self, member: Member) -> None:
        """A sequence has ended."""
        del self._holdings[member]

    # Slots

    def count(self, turn: Turn[Member], prefilling: Iterable[Member], ending: Iterable[Member]) -> None:
        """Note slots of held blocks without KV, and those of them that will be filled."""
        block_size, cohort = self.config.block_size, self.cohort
        empty, reserved = cohort.empty, cohort.empty - cohort.waste
        for member in prefilling:
            tail, lacking = -member.computed % block_size, member.final_tokens - member.computed
            empty += tail
            reserved += tail if tail < lacking else lacking
        for member in ending:
            empty += -member.computed % block_size
        turn.empty_slots, turn.reserved_slots = empty, reserved
