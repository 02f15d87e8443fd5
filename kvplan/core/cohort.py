"""Who decodes: sequences that take one token a step, known by an offset instead of being visited.

A member's computed tokens before step s are ``base + s``; ``finish`` is the step that samples its last token. All
that a run of decode steps needs is kept as sums, so joining and leaving cost O(log members) and a step nothing.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from heapq import heappop, heappush
from itertools import accumulate, cycle, islice
from typing import Any

from kvplan.core.engine import Sequence
from kvplan.core.request import Request


class Member(Sequence):
    """A sequence that can be in a cohort; ``num_tokens`` and ``computed`` are its own only while it is not."""

    __slots__ = ("base", "decoding", "finish", "holding", "serial", "tail_step", "tail_waste")

    def __init__(self, request: Request, queue_key: tuple[int, int], max_model_len: int) -> None:
        super().__init__(request, queue_key, max_model_len)
        self.serial = -1
        #: What it holds, as the block side that keeps its blocks writes it down.
        self.holding: Any = None
        self.decoding = False
        self.base = 0
        self.finish = 0
        #: Slots of its last block that it will never fill, and the step in which it takes that block.
        self.tail_waste = 0
        self.tail_step = 0


class Cohort:
    """The decoding sequences before step ``step``.

    ``empty`` and ``waste`` are sums over members of the slots of their last blocks without KV, and of those that
    will stay so.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.step = 0
        self.size = 0
        self.empty = 0
        self.waste = 0
        self._base_sum = 0
        self._crossings = [0] * block_size
        self._finishes: list[tuple[int, int, Member]] = []
        self._tails: list[tuple[int, int, Member]] = []

    @property
    def context(self) -> int:
        """Sum over members of the tokens they attend to in the next step, the new one included."""
        return self._base_sum + self.size * (self.step + 1)

    @property
    def first_finish(self) -> int:
        """The next step that samples somebody's last token. There must be members."""
        finishes = self._finishes
        while True:
            step, _, member = finishes[0]
            if member.decoding and member.finish == step:
                return step
            heappop(finishes)  # it left before

    @property
    def crossings(self) -> int:
        """Members that take a block in the next step."""
        return self._crossings[self.step % self.block_size]

    def takes(self, steps: int) -> list[int]:
        """Blocks taken in each of the next ``steps`` steps. O(steps), at C speed."""
        start = self.step % self.block_size
        end = start + steps
        if end <= self.block_size:
            return self._crossings[start:end]
        around = self._crossings[start:] + self._crossings[:start]
        return list(islice(cycle(around), steps))

    def steps_within(self, free: int, steps: int) -> int:
        """How many of the next ``steps`` steps ``free`` blocks last for."""
        a_round = self.size  # each member crosses once in block_size steps
        if a_round == 0:
            return steps
        rounds = free // a_round
        if rounds * self.block_size >= steps:
            return steps
        left = free - rounds * a_round
        more = 0
        for total in accumulate(self.takes(self.block_size)):
            if total > left:
                break
            more += 1
        return min(steps, rounds * self.block_size + more)

    def join(self, member: Member) -> None:
        """Add a sequence that has just sampled: it decodes from the next step on."""
        computed, final, block_size = member.computed, member.final_tokens, self.block_size
        member.decoding = True
        member.base = base = computed - self.step
        member.finish = finish = final - base - 1
        self.size += 1
        self._base_sum += base
        self._crossings[-base % block_size] += 1
        self.empty += -computed % block_size
        heappush(self._finishes, (finish, member.serial, member))
        member.tail_waste = 0
        used = final % block_size
        if used:  # slots of its last block
            last_block = final - used
            if computed > last_block:
                member.tail_waste = block_size - used
                self.waste += block_size - used
            else:
                member.tail_step = last_block - base
                heappush(self._tails, (member.tail_step, member.serial, member))

    def leave(self, member: Member) -> None:
        """Take a member out; its ``computed`` and ``num_tokens`` become its own again."""
        member.computed = member.base + self.step
        member.num_tokens = member.computed + 1
        member.decoding = False
        self.size -= 1
        self._base_sum -= member.base
        self._crossings[-member.base % self.block_size] -= 1
        self.empty -= -member.computed % self.block_size
        self.waste -= member.tail_waste

    def advance(self, steps: int, taken: int) -> Seq[tuple[int, int]]:
        """Let all members decode ``steps`` steps, in which they take so many blocks.

        Returns (offset of a step, slots) of waste that begins in them.
        """
        end, tails = self.step + steps, self._tails
        begun = self._begin_waste(end) if tails and tails[0][0] < end else ()
        self.empty += self.block_size * taken - self.size * steps
        self.step = end
        return begun

    def _begin_waste(self, end: int) -> list[tuple[int, int]]:
        begun: list[tuple[int, int]] = []
        tails = self._tails
        while tails and tails[0][0] < end:
            step, _, member = heappop(tails)
            if member.decoding and member.tail_step == step and not member.tail_waste:
                member.tail_waste = -member.final_tokens % self.block_size
                begun.append((step - self.step, member.tail_waste))
                self.waste += member.tail_waste
        return begun

    def finished(self) -> list[Member]:
        """Members whose last token was sampled in the step before, by serial; they stay until they leave."""
        done: list[Member] = []
        finishes, now = self._finishes, self.step
        while finishes and finishes[0][0] < now:
            step, _, member = heappop(finishes)
            if member.decoding and member.finish == step:
                done.append(member)
        return done
