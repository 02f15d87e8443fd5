"""Which slots hold no KV that is still read, summed over all who decode: tails of blocks, and tokens behind a window.

A decoder's tail shrinks by a token a step and its window moves on by one, so both are sums that a step changes by the
number of decoders and of blocks taken and given back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from heapq import heappop, heappush
from itertools import accumulate, chain, cycle, islice
from operator import add, sub

from kvplan.core.cohort import Member
from kvplan.core.engine import Level, Levels, SchedulerConfig
from kvplan.core.engines.block_side import NEVER
from kvplan.core.engines.group_kinds import Kind
from kvplan.core.window_blocks import WindowPool

#: Decoders by block size and by the step of its period in which they take a block.
Takers = Mapping[int, Sequence[Mapping[Member, None]]]


class Tails:
    """The last blocks of decoders in groups with one block size, before step ``step``.

    ``empty`` slots of them have no KV, of which ``waste`` will never have any.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.empty = 0
        self.waste = 0
        # Decoders whose last block is their last for good, with what of it stays empty; and when others take theirs.
        self._wasting: dict[Member, int] = {}
        self.begins: list[tuple[int, int, Member]] = []

    def join(self, member: Member) -> None:
        """Add a sequence that decodes from the next step on."""
        size, final = self.block_size, member.final_tokens
        self.empty += -member.computed % size
        waste = -final % size
        if not waste:
            return
        last_block = final // size * size
        if member.computed > last_block:
            self._begin(member, waste)
        else:
            heappush(self.begins, (last_block - member.base, member.serial, member))

    def leave(self, member: Member) -> None:
        """Take out a sequence that decodes no more."""
        self.empty -= -member.computed % self.block_size
        self.waste -= self._wasting.pop(member, 0)

    def advance(self, step: int, decoders: int, taken: int) -> None:
        """Let all decode in a step, in which so many take a block."""
        self.empty += self.block_size * taken - decoders
        begins = self.begins
        while begins and begins[0][0] <= step:
            due, serial, member = heappop(begins)
            # Else it left before, and may have come back.
            if due == step and member.decoding and member.serial == serial and member not in self._wasting:
                self._begin(member, -member.final_tokens % self.block_size)

    def _begin(self, member: Member, waste: int) -> None:
        self._wasting[member] = waste
        self.waste += waste


class Behind:
    """Tokens behind the window of decoders in one kind of group, as of the step before ``step``.

    Whoever has tokens there drops a block each time that they fill one: who does so in which step of the period is
    counted. All blocks are taken to have one user.
    """

    def __init__(self, window: int, block_size: int, lag: int) -> None:
        self.window = window
        self.block_size = block_size
        self.tokens = 0
        self._lag = lag
        self._step = 0
        self._number = 0
        self._drops_at = [0] * block_size
        self._begun: set[Member] = set()
        self.begins: list[tuple[int, int, Member]] = []

    def join(self, member: Member) -> None:
        """Add a sequence that decodes from the next step on, which is the cohort's."""
        first = member.computed - member.base + self._lag
        begin = max(first, self.window - 1 - member.base + self._lag)
        heappush(self.begins, (begin, member.serial, member))

    def leave(self, member: Member) -> None:
        """Take out a sequence that decodes no more."""
        if member in self._begun:
            self._begun.remove(member)
            self._number -= 1
            self._drops_at[self._first_drop(member)] -= 1
            self.tokens -= (self._step - 1 - self._first_drop(member)) % self.block_size

    def advance(self, step: int) -> None:
        """Count what is behind in a step, once all have dropped their blocks."""
        self._step = step + 1
        size = self.block_size
        self.tokens += self._number - size * self._drops_at[step % size]
        begins = self.begins
        while begins and begins[0][0] <= step:
            due, serial, member = heappop(begins)
            if due == step and member.decoding and member.serial == serial and member not in self._begun:
                self._begun.add(member)
                self._number += 1
                self._drops_at[self._first_drop(member)] += 1
                self.tokens += (step - self._first_drop(member)) % size

    def stretch(self, step: int, steps: int) -> list[int]:
        """The same for several steps in which nobody begins."""
        size, number = self.block_size, self._number
        drops = islice(cycle(self._drops_at), step % size, step % size + steps)
        column = list(accumulate((number - size * count for count in drops), initial=self.tokens))[1:]
        self.tokens = column[-1]
        self._step = step + steps
        return column

    def _first_drop(self, member: Member) -> int:
        return (self.window - 1 + self._lag - member.base) % self.block_size


class SlotSums:
    """Slots of all blocks in use. A slot of a group counts as many units as its share of a block's memory."""

    def __init__(self, config: SchedulerConfig, kinds: Sequence[Kind], pool: WindowPool) -> None:
        self._pool = pool
        self._lag = int(config.async_scheduling)
        self._kinds = kinds
        block_slots = config.block_slots
        payloads = [block_slots if g.payload is None else g.payload for g in config.groups]
        #: Units of a block of each group that nothing fills, and of a slot in it.
        self._padding = [block_slots - payload for payload in payloads]
        self._unit = [
            payload // config.block_size_of(group)
            for payload, group in zip(payloads, config.groups, strict=True)
        ]
        sizes = dict.fromkeys(kind.block_size for kind in kinds)
        self._tails = [Tails(size) for size in sizes]
        self._tail_units = [
            sum(self._unit[group] for kind in kinds if kind.block_size == size for group in kind.groups)
            for size in sizes
        ]
        self._behind = {
            kind.number: Behind(kind.window, kind.block_size, self._lag) for kind in kinds if kind.window
        }
        self._kind_of = {group: kind for kind in kinds for group in kind.groups}
        self._window_groups = [group for kind in kinds if kind.window for group in kind.groups]
        #: The step up to which all is counted, and who decodes in it for the first time.
        self._step = 0
        self._fresh: list[Member] = []

    def join(self, member: Member) -> None:
        """Add a sequence that decodes from the next step on."""
        for tails in self._tails:
            tails.join(member)
        for behind in self._behind.values():
            behind.join(member)
        if self._lag:
            self._fresh.append(member)

    def leave(self, member: Member) -> None:
        """Take out a sequence that decodes no more."""
        for tails in self._tails:
            tails.leave(member)
        for behind in self._behind.values():
            behind.leave(member)

    def advance(self, step: int, decoders: int, takers: Takers) -> None:
        """Let all decode in a step, unless that was counted."""
        if step < self._step:
            return
        for tails in self._tails:
            size = tails.block_size
            tails.advance(step, decoders, len(takers[size][step % size]))
        for behind in self._behind.values():
            behind.advance(step)
        self._step = step + 1

    @property
    def next_change(self) -> int:
        """The next step in which a decoder comes to be counted otherwise."""
        begins = [sums.begins for sums in self._tails] + [sums.begins for sums in self._behind.values()]
        return min((heap[0][0] for heap in begins if heap), default=NEVER)

    @property
    def is_plain(self) -> bool:
        """Whether all is a matter of counts: nobody decodes for the first time, and no window's block is shared."""
        return not self._fresh and not any(self._pool.shelves[group].shared for group in self._window_groups)

    def stretch(
        self, decoders: int, takes: Mapping[int, Sequence[int]], drops: Mapping[int, Sequence[int]]
    ) -> Levels:
        """The slots after each of several steps in which nothing changes but by counts.

        Of each block size how many decoders take a block in each step, and of each kind how many drop one.
        """
        steps = len(next(iter(takes.values())))
        empty = [0] * steps
        reserved = empty
        for tails, unit in zip(self._tails, self._tail_units, strict=True):
            size = tails.block_size
            column = list(
                accumulate((size * taken - decoders for taken in takes[size]), initial=tails.empty)
            )[1:]
            tails.empty, waste = column[-1], tails.waste
            empty = [sum_ + unit * slots for sum_, slots in zip(empty, column, strict=True)]
            reserved = [sum_ + unit * (slots - waste) for sum_, slots in zip(reserved, column, strict=True)]
        behind = [0] * steps
        for number, sums in self._behind.items():
            unit = sum(self._unit[group] for group in self._kinds[number].groups)
            column = sums.stretch(self._step, steps)
            behind = [sum_ + unit * tokens for sum_, tokens in zip(behind, column, strict=True)]
        self._step += steps
        used: list[list[int]] = []
        for group, shelf in enumerate(self._pool.shelves):
            kind = self._kind_of[group]
            changes: Iterable[int] = takes[kind.block_size]
            if kind.window:
                changes = map(sub, takes[kind.block_size], drops[kind.number])
            used.append(list(accumulate(changes, initial=shelf.used))[1:])
            shelf.used = used[-1][-1]
        empty = list(map(add, empty, behind))
        for column, padding in zip(used, self._padding, strict=True):
            if padding:
                empty = [sum_ + padding * blocks for sum_, blocks in zip(empty, column, strict=True)]
        return Levels(empty, reserved, behind, used if len(used) > 1 else [], [])

    def level(self, takers: Takers, prefilling: Sequence[Member], ending: Sequence[Member]) -> Level:
        """The slots after the step that was counted last, of decoders and of these sequences."""
        empty = reserved = 0
        for tails, unit in zip(self._tails, self._tail_units, strict=True):
            size = tails.block_size
            tail, to_fill = tails.empty, tails.empty - tails.waste
            for member in prefilling:
                own, lacking = -member.computed % size, member.final_tokens - member.computed
                tail += own
                to_fill += own if own < lacking else lacking
            for member in ending:
                tail += -member.computed % size
            empty += tail * unit
            reserved += to_fill * unit
        behind = self._behind_slots(takers, prefilling, ending) if self._behind else 0
        used = [shelf.used for shelf in self._pool.shelves]
        empty += behind
        for count, padding in zip(used, self._padding, strict=True):
            empty += count * padding
        return Level(empty, reserved, behind, used if len(used) > 1 else ())

    def _behind_slots(self, takers: Takers, prefilling: Sequence[Member], ending: Sequence[Member]) -> int:
        step = self._step - 1
        fresh = self._fresh
        if fresh:
            fresh = self._fresh = [m for m in fresh if m.decoding and m.holding.start >= step]
        apart = [(m, m.holding.known) for m in prefilling]
        apart += [(m, m.computed - self._lag * m.holding.last_chunk) for m in ending]
        apart += [(m, m.base + step - m.holding.last_chunk) for m in fresh if m.holding.start == step]
        slots = 0
        for number, behind in self._behind.items():
            kind = self._kinds[number]
            tokens = behind.tokens
            for member, known in apart:
                reach = known - kind.window + 1
                if reach > 0:
                    tokens += reach - member.holding.dropped[number] * kind.block_size
            for group in kind.groups:
                out = tokens
                if tokens and self._pool.shelves[group].shared:
                    out -= self._twice(group, kind, chain(apart, self._steady(takers, kind, step)))
                slots += out * self._unit[group]
        return slots

    def _steady(self, takers: Takers, kind: Kind, step: int) -> Iterator[tuple[Member, int]]:
        """Decoders but for fresh ones, with how many tokens of each were processed when the step was planned."""
        for members in takers[kind.block_size]:
            for member in members:
                if step >= member.holding.start + self._lag:
                    yield member, member.base + step - self._lag

    def _twice(self, group: int, kind: Kind, members: Iterator[tuple[Member, int]]) -> int:
        """Tokens that are behind the window of one of several users of a block, but not of all; or of all, but once."""
        size = kind.block_size
        outs: dict[tuple[int, int], list[int]] = {}
        users: dict[tuple[int, int], int] = {}
        for member, known in members:
            reach = known - kind.window + 1
            for entry, end in member.holding.spans[group]:
                span = entry
                while span.low * size < reach:
                    if span.users > 1:
                        for block in range(span.low, min(span.high, -(-reach // size))):
                            outs.setdefault((id(span), block), []).append(min(reach - block * size, size))
                            users[id(span), block] = span.users
                    if span.high >= end:
                        break
                    assert span.rest is not None
                    span = span.rest
                if span.low * size >= reach:
                    break
        return sum(
            sum(found) - (min(found) if len(found) == users[place] else 0) for place, found in outs.items()
        )
