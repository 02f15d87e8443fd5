"""What sequences hold in each of several groups, and when: the block side of the fast engine for windows.

Who decodes takes a block of a group once in so many steps, and drops one behind a window as often: members are kept by
the step of their period in which they do, so that a step is a few sums. A member whose next drops have content, or
lie off its period, is visited in the step of its next drop. Only where free blocks without content run short does the
order within a step count; then those who take or drop in it are put in order, and nobody else is touched.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from heapq import heappop, heappush
from itertools import accumulate, cycle, islice
from math import lcm
from operator import mul
from typing import NamedTuple

from kvplan.core.cohort import Cohort, Member
from kvplan.core.engine import DecodeRun, Levels, SchedulerConfig, Turn
from kvplan.core.engines.block_side import EVERYBODY, NEVER, grower_of
from kvplan.core.engines.group_kinds import Kind, Tables, kinds_of
from kvplan.core.engines.group_slots import SlotSums
from kvplan.core.window_blocks import Share, WindowPool, keyed_runs, window_hit


class Hit(NamedTuple):
    """A prefix found in the cache: its tokens, and the spans that hold what is still in reach."""

    tokens: int
    shares: list[Share]


class GroupBlocks:
    """The blocks of all sequences, as `BlockSide` says."""

    def __init__(self, config: SchedulerConfig, cohort: Cohort, live: Mapping[str, Member]) -> None:
        self.config = config
        self.cohort = cohort
        self._live = live
        self.lag = int(config.async_scheduling)
        self.kinds = kinds_of(config)
        self.alignment = lcm(*(kind.block_size for kind in self.kinds))
        self.pool = WindowPool(config.usable_blocks, len(config.groups))
        self._slots = SlotSums(config, self.kinds, self.pool)
        #: Of each group its kind's number, block size and window.
        self._kind_of = [0] * len(config.groups)
        for kind in self.kinds:
            for group in kind.groups:
                self._kind_of[group] = kind.number
        self._windows = [kind for kind in self.kinds if kind.window]
        self._window_groups = [g for g, number in enumerate(self._kind_of) if self.kinds[number].window]
        self._groups_of = {
            size: tuple(g for kind in self.kinds if kind.block_size == size for g in kind.groups)
            for size in dict.fromkeys(kind.block_size for kind in self.kinds)
        }
        #: How many groups have blocks of a size.
        self._sizes = {size: len(groups) for size, groups in self._groups_of.items()}
        #: Decoders by the step of their period in which they take a block of a size, or drop one of a kind.
        self._takers: dict[int, list[dict[Member, None]]] = {
            size: [{} for _ in range(size)] for size in self._sizes
        }
        self._droppers: list[list[dict[Member, None]]] = [
            [{} for _ in range(kind.block_size if kind.window else 0)] for kind in self.kinds
        ]
        #: Decoders by the step in which they are visited, and in which the end of their prompt becomes findable.
        self._visits: dict[int, list[Member]] = {}
        self._tails: dict[int, list[Member]] = {}
        self._due_steps: list[int] = []
        self.seen_serial = EVERYBODY
        #: The step whose running loop was begun last.
        self._begun = -1
        #: Whether a decoder has grown what was looked at.
        self.met_grower = False

    def add(self, member: Member) -> None:
        """Note a new sequence, which holds nothing."""
        member.holding = Tables(len(self.kinds), len(self.config.groups))

    # Needs

    def blocks_for(self, tokens: int) -> int:
        """Blocks of all groups that have slots for so many tokens."""
        return sum(count * -(-tokens // size) for size, count in self._sizes.items())

    def taken_next(self) -> int:
        """Blocks that decoders take in the next step."""
        step = self.cohort.step
        return sum(count * len(self._takers[size][step % size]) for size, count in self._sizes.items())

    def needed(self, member: Member, tokens: int) -> int:
        """Blocks that a running sequence lacks for its next tokens, once those behind its windows are given back."""
        tables: Tables = member.holding
        step = self.cohort.step
        if not member.decoding:
            tables.known = member.computed - self.lag * tables.last_chunk
            self._drop(tables, tables.known)
            return self.blocks_for(member.computed + tokens) - self.blocks_for(tables.slots)
        for kind in self._windows:
            if tables.on_period[kind.number] and tables.walked != step:
                bucket = self._droppers[kind.number][step % kind.block_size]
                if member in bucket:
                    for group in kind.groups:
                        self.pool.put_back(group, 1)
        if tables.next_visit == step:
            self._visit(member, tables, step)
        tables.walked = step
        return sum(count for size, count in self._sizes.items() if (member.base + step) % size == 0)

    # The running loop

    def run_step(self, chunks: dict[Member, int]) -> int | None:
        """Drop and take all blocks of a step's running loop; returns how many lost their content.

        None, and nothing is done, if free blocks might run short.
        """
        self._begun = self.cohort.step
        wanted = self.taken_next()
        needs: dict[Member, int] = {}
        for member, tokens in chunks.items():
            slots = member.holding.slots
            needs[member] = need = self.blocks_for(member.computed + tokens) - self.blocks_for(slots)
            wanted += need
        if wanted > self.pool.free:
            return None
        evicted = self._move(wanted, needs)
        placing = [*chunks, *self._due_tails()]
        if len(placing) > 1:
            placing.sort(key=_serial)
        for member in placing:
            self.seen_serial = member.serial
            self.place(member, chunks.get(member, 1))
        self.seen_serial = EVERYBODY
        return evicted

    def end_walk(self) -> None:
        """Note that a step's running loop was taken literally."""
        self._visits.pop(self.cohort.step, None)
        self._tails.pop(self.cohort.step, None)
        self.seen_serial = EVERYBODY

    def _move(self, wanted: int, needs: dict[Member, int]) -> int:
        """Drop and take blocks for a step, ``wanted`` in all, which are surely free; returns how many were evicted."""
        pool, step = self.pool, self.cohort.step
        blank = pool.blank
        order_counts = wanted > blank
        deltas: list[tuple[int, int]] = []
        for kind in self._windows:
            bucket = self._droppers[kind.number][step % kind.block_size]
            if bucket:
                count = len(kind.groups)
                for group in kind.groups:
                    pool.put_back(group, len(bucket))
                if order_counts:
                    deltas += [(2 * member.serial, -count) for member in bucket]
        visits = self._visits.pop(step, None)  # whoever is visited may drop on its period from the next on
        if visits or needs:
            due = [m for m in visits if m.decoding] if visits else []
            due += needs
            if len(due) > 1:
                due.sort(key=_serial)
            for member in due:
                tables: Tables = member.holding
                if member.decoding:
                    dropped = self._visit(member, tables, step) if tables.next_visit == step else 0
                else:
                    tables.known = member.computed - self.lag * tables.last_chunk
                    dropped = self._drop(tables, tables.known)
                if order_counts and dropped:
                    deltas.append((2 * member.serial, -dropped))
        for size, groups in self._groups_of.items():
            taken = len(self._takers[size][step % size])
            if taken:
                for group in groups:
                    pool.shelves[group].used += taken
        if not order_counts:
            return pool.take(wanted)
        for size, count in self._sizes.items():
            deltas += [(2 * member.serial + 1, count) for member in self._takers[size][step % size]]
        deltas += [(2 * member.serial + 1, need) for member, need in needs.items()]
        deltas.sort()
        peak = max(accumulate(delta for _, delta in deltas))
        evicted = max(0, peak - blank)
        pool.evict(evicted)
        taken_blank = pool.take(wanted)
        assert not taken_blank
        return evicted

    def _drop(self, tables: Tables, known: int) -> int:
        """Give back what lies behind the windows of ``known`` tokens, but for what is dropped on its period.

        Returns how many blocks had no content.
        """
        dropped, behind = tables.dropped, {}
        for kind in self._windows:
            end = kind.skip(known)
            if end > dropped[kind.number] and not tables.on_period[kind.number]:
                behind[kind.number] = end
        blank = 0
        if behind:
            for group in self._window_groups:
                number = self._kind_of[group]
                if number in behind:
                    blank += self.pool.drop(group, tables.spans[group], dropped[number], behind[number])
            for number, end in behind.items():
                dropped[number] = end
        return blank

    # Decoding

    def join(self, member: Member) -> None:
        """Note a sequence that has just joined the cohort."""
        tables: Tables = member.holding
        step = self.cohort.step
        for size in self._sizes:
            self._takers[size][-member.base % size][member] = None
        tables.start = step
        self._slots.join(member)
        self._expect(member, tables, step)
        if self.config.enable_prefix_caching:
            self._expect_tail(member, tables)

    def leave(self, member: Member, *, took_turn: bool = False) -> None:
        """Note a sequence that has just left the cohort; ``took_turn``: after its token of this step was planned."""
        tables: Tables = member.holding
        step = self.cohort.step
        last = step if tables.walked == step else step - 1
        for size in self._sizes:
            del self._takers[size][-member.base % size][member]
        for kind in self._windows:
            if tables.on_period[kind.number]:
                del self._droppers[kind.number][self._residue(member, kind)][member]
                tables.on_period[kind.number] = False
                tables.dropped[kind.number] = kind.skip(member.base + last - self.lag)
        tables.next_visit = tables.tail_step = NEVER
        tables.slots = tokens = member.computed + took_turn
        tables.last_chunk = 1
        self._slots.leave(member)
        self.publish(member, tokens - self.lag)

    def _residue(self, member: Member, kind: Kind) -> int:
        return (kind.window - 1 + self.lag - member.base) % kind.block_size

    def _known(self, member: Member, tables: Tables, step: int) -> int:
        """Tokens of a decoder that are processed when a step is planned."""
        lag = tables.last_chunk if self.lag and step == tables.start else self.lag
        return member.base + step - lag

    def _visit(self, member: Member, tables: Tables, step: int) -> int:
        """Drop what a decoder drops in a step off its period; returns how many blocks had no content."""
        blank = self._drop(tables, self._known(member, tables, step))
        for kind in self._windows:
            known = member.base + step - self.lag
            number = kind.number
            if (
                not tables.on_period[number]
                and known >= kind.window - 1
                and tables.dropped[number] == kind.skip(known)
                and not any(tables.spans[group] for group in kind.groups)
            ):
                tables.on_period[number] = True
                self._droppers[number][self._residue(member, kind)][member] = None
        self._expect(member, tables, step + 1)
        return blank

    def _expect(self, member: Member, tables: Tables, step: int) -> None:
        """Find the step, from ``step`` on, in which a decoder drops blocks next, but for those on its period."""
        visit = NEVER
        for kind in self._windows:
            number = kind.number
            if tables.on_period[number]:
                continue
            dropped = tables.dropped[number]
            if step == tables.start and kind.skip(self._known(member, tables, step)) > dropped:
                visit = step
                break
            due = kind.window - 1 + (dropped + 1) * kind.block_size - member.base + self.lag
            visit = min(visit, max(due, step + (self.lag if step == tables.start else 0)))
        tables.next_visit = visit
        if visit != NEVER:
            if visit not in self._visits:
                heappush(self._due_steps, visit)
            self._visits.setdefault(visit, []).append(member)

    def _expect_tail(self, member: Member, tables: Tables) -> None:
        """Where whole blocks of a prompt are offered later, as hits end further apart, note when.

        They are of content that others may have too. Of what comes behind them only an output stream knows.
        """
        end = member.computed
        offered = end - end % self.alignment
        if all(kind.window or offered + kind.block_size > end for kind in self.kinds):
            return
        tables.tail_step = offered + self.alignment - member.base - 1 + self.lag
        if tables.tail_step not in self._tails:
            heappush(self._due_steps, tables.tail_step)
        self._tails.setdefault(tables.tail_step, []).append(member)

    def _due_tails(self) -> list[Member]:
        """Decoders whose prompts' last blocks become findable in this step, in order."""
        tails = self._tails.pop(self.cohort.step, None)
        return sorted((member for member in tails if member.decoding), key=_serial) if tails else []

    def decode(
        self, steps: int, room_for_head: int | None, ending: Iterable[Member]
    ) -> DecodeRun[Member] | None:
        """Let the cohort decode, until blocks run short, or enough for the head of the queue might come to be free."""
        pool, cohort, slots = self.pool, self.cohort, self._slots
        context = cohort.context
        ending = tuple(ending)
        taken: list[int] = []
        cached: list[int] = []
        levels = Levels([], [], [], [[] for _ in pool.shelves] if len(pool.shelves) > 1 else [], [])
        evicted = free = shared = 0
        while len(taken) < steps:
            alike = 0
            if not ending and slots.is_plain:
                alike = min(steps - len(taken), self._next_change() - cohort.step)
            first = not taken
            if alike > 0:
                found = self._decode_alike(1 if first else alike, room_for_head, taken, cached, levels)
            else:
                found = self._decode_one(room_for_head, taken, cached, levels, ending)
            if found is None:
                break
            evicted += found
            if first:
                free, shared = pool.free, pool.shared
        if not taken:
            return None
        return DecodeRun(
            len(taken),
            cohort.size,
            context,
            taken,
            evicted,
            free,
            cached[0],
            shared,
            levels.empty_slots[0],
            levels.reserved_slots[0],
            levels=levels,
            cached_levels=cached,
        )

    def _next_change(self) -> int:
        """The next step in which more happens than that decoders take blocks, and drop blocks on their periods."""
        step, due = self.cohort.step, self._due_steps
        while due and due[0] < step:
            heappop(due)
        return min(due[0] if due else NEVER, self._slots.next_change)

    def _decode_one(
        self,
        room_for_head: int | None,
        taken: list[int],
        cached: list[int],
        levels: Levels,
        ending: tuple[Member, ...],
    ) -> int | None:
        """One step of `decode`; returns how many blocks lost their content, None if it must not be taken."""
        pool, cohort = self.pool, self.cohort
        before, wanted = pool.free, self.taken_next()
        if wanted > before:
            return None
        if room_for_head is not None and (
            cohort.step in self._tails
            or (room_for_head < NEVER and wanted > pool.blank)
            or before - wanted + self._dropped_next() >= room_for_head
        ):
            return None  # for what the head finds may change, or blocks come to be free
        evicted = self._move(wanted, {})
        self._begun = cohort.step
        for member in self._due_tails():
            self.seen_serial = member.serial
            self.place(member, 1)
        self._slots.advance(cohort.step, cohort.size, self._takers)
        cohort.step += 1
        level = self._slots.level(self._takers, (), ending)
        for column, value in zip(levels[:3], level[:3], strict=True):
            column.append(value)
        for column, value in zip(levels.group_blocks, level.group_blocks, strict=True):
            column.append(value)
        levels.shared_blocks.append(pool.shared)
        taken.append(before - pool.free)
        cached.append(pool.idle)
        return evicted

    def _decode_alike(
        self, steps: int, room_for_head: int | None, taken: list[int], cached: list[int], levels: Levels
    ) -> int | None:
        """Steps of `decode` in which decoders only take blocks, and drop blocks on their periods; as `_decode_one`.

        Whose blocks are taken does not matter, but where those without content run short, the order in a step does.
        """
        pool, step = self.pool, self.cohort.step
        takes = {size: _lengths(buckets, step, steps) for size, buckets in self._takers.items()}
        drops = {kind.number: _lengths(self._droppers[kind.number], step, steps) for kind in self._windows}
        wanted_at = _weighted([(takes[size], count) for size, count in self._sizes.items()])
        dropped_at = (
            _weighted([(drops[kind.number], len(kind.groups)) for kind in self._windows]) or [0] * steps
        )
        free, blank, evicted, done = pool.free, pool.blank, 0, 0
        for wanted, dropped in zip(wanted_at, dropped_at, strict=True):
            if wanted > free:
                break
            if room_for_head is not None and (
                (room_for_head < NEVER and wanted > blank) or free - wanted + dropped >= room_for_head
            ):
                break
            if wanted > blank:
                peak = self._most_taken(step + done) if dropped else wanted
                lost = max(0, peak - blank)
                evicted += lost
                blank += lost
            blank += dropped - wanted
            free += dropped - wanted
            taken.append(wanted - dropped)
            cached.append(free - blank)
            done += 1
        if not done:
            return None
        if done < steps:
            takes = {size: counts[:done] for size, counts in takes.items()}
            drops = {number: counts[:done] for number, counts in drops.items()}
        pool.evict(evicted)
        pool.free, pool.blank = free, blank
        more = self._slots.stretch(self.cohort.size, takes, drops)
        levels.empty_slots.extend(more.empty_slots)
        levels.reserved_slots.extend(more.reserved_slots)
        levels.behind_slots.extend(more.behind_slots)
        for column, blocks in zip(levels.group_blocks, more.group_blocks, strict=True):
            column.extend(blocks)
        levels.shared_blocks.extend([pool.shared] * done)
        self.cohort.step = step + done
        return evicted

    def _most_taken(self, step: int) -> int:
        """The most blocks without content that decoders have taken at any point of a step, less those dropped."""
        deltas = [
            (2 * member.serial, -len(kind.groups))
            for kind in self._windows
            for member in self._droppers[kind.number][step % kind.block_size]
        ]
        deltas += [
            (2 * member.serial + 1, count)
            for size, count in self._sizes.items()
            for member in self._takers[size][step % size]
        ]
        deltas.sort()
        return max(accumulate(delta for _, delta in deltas))

    def _dropped_next(self) -> int:
        """Blocks that decoders drop in the next step, at most."""
        step = self.cohort.step
        count = 0
        for kind in self._windows:
            count += len(kind.groups) * len(self._droppers[kind.number][step % kind.block_size])
            for member in self._visits.get(step, ()):
                if member.decoding:
                    tables: Tables = member.holding
                    known = self._known(member, tables, step)
                    count += len(kind.groups) * max(0, kind.skip(known) - tables.dropped[kind.number])
        return count

    # Admission

    def find(self, member: Member) -> Hit:
        """The longest prefix that all groups have; at least one token stays to be computed.

        One group is asked once. Several are asked in rounds, each for at most what the one before it had, until
        a round changes nothing; what a full kind had in the first round holds. Of two kinds, the first of them
        full, one round is enough.
        """
        tables: Tables = member.holding
        if not self.config.enable_prefix_caching:
            return Hit(0, [])
        if not tables.runs:
            content = member.request.full_content()
            tables.runs = {size: keyed_runs(content, size) for size in self._sizes}
        kinds = self.kinds
        goal = member.num_tokens - 1
        longest = 0
        full: dict[int, int] = {}
        while True:
            current = goal
            for kind in kinds:
                if kind.window:
                    current = self._window_hit(kind, tables, current)
                elif kind.number in full:
                    current = min(current, full[kind.number])
                    continue
                else:
                    full[kind.number] = current = self._full_hit(kind, member, current)
                longest = max(longest, current)
            is_settled = current == goal
            goal = current
            if is_settled or len(self._kind_of) == 1 or (len(kinds) == 2 and not kinds[0].window):
                break
        tables.junction = longest if longest > goal and len(self._kind_of) > 1 else 0
        if not goal:
            return Hit(0, [])
        shares: list[Share] = []
        for group, number in enumerate(self._kind_of):
            kind = kinds[number]
            first, end = kind.first_reached(goal), goal // kind.block_size
            shares += self.pool.shares(group, tables.runs[kind.block_size], first, end)
        return Hit(goal, shares)

    def _full_hit(self, kind: Kind, member: Member, limit: int) -> int:
        blocks = limit // kind.block_size
        end = 0
        for run in member.holding.runs[kind.block_size]:
            if run.first >= blocks:
                break
            self._publish_grower(run.stream, member)
            end = min(blocks, *(self.pool.shelves[group].prefix(run) for group in kind.groups))
            if end < run.end:
                break
        return end // kind.unit * kind.unit * kind.block_size

    def _window_hit(self, kind: Kind, tables: Tables, limit: int) -> int:
        shelves = [self.pool.shelves[group] for group in kind.groups]
        runs = tables.runs[kind.block_size]
        return window_hit(shelves, runs, limit // kind.block_size, kind.run, kind.unit) * kind.block_size

    def shortage(self, member: Member, hit: Hit, tokens: int) -> int:
        """How many blocks must be free to admit a sequence with so many tokens of its first chunk."""
        idle = sum(high - low for _, span, low, high in hit.shares if not span.users)
        need = self.blocks_for(hit.tokens + tokens) - self.blocks_for(hit.tokens)
        if self.config.scheduler_reserve_full_isl:
            need_all = 0
            for kind in self.kinds:
                required = min(-(-member.num_tokens // kind.block_size), kind.most)
                need_all += len(kind.groups) * max(0, required - hit.tokens // kind.block_size)
            need = max(need, need_all)
        return need + idle

    def admit(self, member: Member, hit: Hit, tokens: int) -> int:
        """Adopt the hit, take the blocks of the first chunk and `place` them; returns how many lost their content."""
        tables: Tables = member.holding
        self.pool.hold(tables.spans, hit.shares)
        tables.dropped = [kind.first_reached(hit.tokens) for kind in self.kinds]
        tables.slots = tables.offered = tables.known = hit.tokens
        tables.last_chunk = 0
        evicted = self.pool.take(self.blocks_for(hit.tokens + tokens) - self.blocks_for(hit.tokens))
        self.place(member, tokens)
        return evicted

    def _note_taken(self, before: int, after: int) -> None:
        """Note the blocks that slots for more tokens are in."""
        for size, groups in self._groups_of.items():
            taken = -(-after // size) + -before // size
            if taken:
                for group in groups:
                    self.pool.shelves[group].used += taken

    # Content

    def place(self, member: Member, tokens: int) -> None:
        """Record the blocks of a chunk, which were taken, and make the full ones findable.

        Of a decoder, only the blocks at the end of its prompt, when it is time.
        """
        tables: Tables = member.holding
        step = self.cohort.step
        if member.decoding:
            if tables.walked == step:
                self._note_taken(member.base + step, member.base + step + 1)
            if tables.tail_step == step:
                tables.tail_step = NEVER
                self.publish(member, member.base + step + 1 - self.lag)
            return
        end = member.computed + tokens
        self._note_taken(tables.slots, end)
        tables.slots = end
        tables.last_chunk = tokens
        self.publish(member, min(end, member.num_tokens))

    def publish(self, member: Member, tokens: int, *, is_alone: bool = False) -> None:
        """Make findable what a sequence has of its first tokens, as far as it is worth it.

        ``is_alone``: nobody else has the content.
        """
        tables: Tables = member.holding
        tokens -= tokens % self.alignment
        if tokens <= tables.offered or not self.config.enable_prefix_caching:
            return
        for group, number in enumerate(self._kind_of):
            kind = self.kinds[number]
            size, spans, runs = kind.block_size, tables.spans[group], tables.runs[kind.block_size]
            first, end = tables.offered // size, tokens // size
            if not kind.window:
                if not is_alone:
                    for run in runs:
                        if run.first < end and run.end > first:
                            self._publish_grower(run.stream, member)
                self.pool.enter(group, spans, runs, first, end)
                continue
            for from_block, to_block in self._worth_keeping(member, tables, kind):
                low, high = max(from_block, first, tables.dropped[number]), min(to_block, end)
                if low < high:
                    self.pool.enter(group, spans, runs, low, high)
        tables.offered = tokens

    def _worth_keeping(self, member: Member, tables: Tables, kind: Kind) -> list[tuple[int, int]]:
        """The blocks that a hit at the end of the prompt or at the junction needs, as ranges apart in order."""
        ends = sorted(
            tokens // self.alignment * self.alignment // kind.block_size
            for tokens in (member.request.input_tokens - 1, tables.junction)
        )
        first, second = ((end - kind.run, end) for end in ends)
        return [(first[0], min(first[1], second[0])), second] if first[1] > second[0] else [first, second]

    def _publish_grower(self, stream: str, looker: Member) -> None:
        """Before somebody else looks at or adds to a run: enter what the decoder that grows it has filled."""
        grower = grower_of(stream, self._live)
        if grower is None or grower is looker:
            return
        # Whoever stands before the looker took its turn in this step, if it has begun.
        seen = self._begun == self.cohort.step and grower.serial < self.seen_serial
        self.publish(grower, grower.base + self.cohort.step - self.lag + seen, is_alone=True)
        self.met_grower = True

    # The end

    def settle(self, member: Member) -> None:
        """Make findable what a sequence that is done has filled with the output that was in flight."""
        self.publish(member, member.computed)

    def release(self, member: Member) -> None:
        """Free all that a sequence holds, group after group, last block first."""
        tables: Tables = member.holding
        for group, number in enumerate(self._kind_of):
            length = -(-tables.slots // self.kinds[number].block_size)
            self.pool.release(group, tables.spans[group], tables.dropped[number], length)
        tables.dropped = [0] * len(self.kinds)
        tables.slots = tables.offered = tables.last_chunk = 0

    # Slots

    def count(self, turn: Turn[Member], prefilling: Iterable[Member], ending: Iterable[Member]) -> None:
        """Note slots without KV that is still read, and what of them is behind a window."""
        cohort = self.cohort
        self._slots.advance(cohort.step - 1, cohort.size, self._takers)
        level = self._slots.level(self._takers, tuple(prefilling), tuple(ending))
        turn.empty_slots, turn.reserved_slots, turn.behind_slots, turn.group_blocks = level


def _lengths(buckets: Sequence[Mapping[Member, None]], step: int, steps: int) -> list[int]:
    """How many are in the buckets of so many steps, each of which comes once in a period."""
    start = step % len(buckets)
    if start + steps <= len(buckets):
        return [len(bucket) for bucket in buckets[start : start + steps]]
    return list(islice(cycle(map(len, buckets)), start, start + steps))


def _weighted(columns: Sequence[tuple[Sequence[int], int]]) -> list[int]:
    """Sums of columns, each times a weight."""
    if len(columns) == 1:
        ((column, weight),) = columns
        return [count * weight for count in column]
    return [
        sum(map(mul, row, (weight for _, weight in columns)))
        for row in zip(*(column for column, _ in columns), strict=True)
    ]


def _serial(member: Member) -> int:
    return member.serial
