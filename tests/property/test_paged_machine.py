"""The paper's memory under any order of calls: allocator, tables, prefix cache and CPU pool against plain sets.

After every call: no block is leaked, none is in two states, each has as many users as tables name it, what is found is
what was stored; in the end all are free.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvplan.core.paged_blocks import BlockError, BlockTable, Names, OutOfBlocks, PagedMemory
from kvplan.core.request import Segment

SIZE = 3


class Owner:
    """A sequence: its content, and where its first ``tokens`` tokens lie."""

    def __init__(self, content: tuple[Segment, ...], table: BlockTable, tokens: int) -> None:
        self.content = content
        self.names = Names(content, SIZE)
        self.table = table
        self.tokens = tokens

    def text(self, start: int, end: int) -> tuple[tuple[str, int], ...]:
        """Its tokens, one by one."""
        tokens = ((s.stream, s.start + i) for s in self.content for i in range(s.length))
        return tuple(tokens)[start:end]


def contents() -> st.SearchStrategy[tuple[Segment, ...]]:
    """Few streams, cut at, beside and across the edges of blocks, so that beginnings coincide."""
    pieces = st.tuples(st.sampled_from("ab"), st.integers(0, 3), st.integers(1, 7))
    return st.lists(pieces, min_size=1, max_size=3).map(lambda items: tuple(Segment(*item) for item in items))


class PagedMachine(RuleBasedStateMachine):
    @initialize(blocks=st.integers(1, 14), cpu_blocks=st.integers(0, 8))
    def start(self, blocks: int, cpu_blocks: int) -> None:
        self.memory = PagedMemory(blocks, cpu_blocks, SIZE)
        self.groups: list[list[Owner]] = []
        self.swapped: list[list[Owner]] = []
        #: What lies in each block that has content: the token of each slot, and all before the block.
        self.written: dict[int, tuple[object, ...]] = {}

    def group(self, data: st.DataObject, groups: list[list[Owner]]) -> list[Owner]:
        return groups[data.draw(st.integers(0, len(groups) - 1), label="group")]

    def write(self, owner: Owner, start: int, end: int) -> None:
        """Put tokens into their slots: into blocks of one's own, behind what lies there."""
        for token in range(start, end):
            block = owner.table.block(token)
            first = token // SIZE * SIZE
            assert self.memory.gpu.users(block) == 1, "a shared block is never written"
            self.written[block] = (owner.text(0, first), *owner.text(first, token + 1))

    @rule(content=contents(), leave=st.integers(0, 2))
    def begin(self, content: tuple[Segment, ...], leave: int) -> None:
        """Take a stored beginning, and blocks for the rest."""
        length = sum(segment.length for segment in content)
        length = max(1, length - leave)
        owner = Owner(content, BlockTable(SIZE), length)
        hit = self.memory.cache.find(owner.names, length, length - 1)
        for number, block in enumerate(hit.blocks):
            whole = (owner.text(0, number * SIZE), *owner.text(number * SIZE, (number + 1) * SIZE))
            assert self.written[block] == whole
        found = len(hit.blocks) * SIZE
        if hit.tail is not None:
            assert 0 < hit.tail_tokens < SIZE
            there = (owner.text(0, found), *owner.text(found, found + hit.tail_tokens))
            assert self.written[hit.tail][: len(there)] == there
        assert hit.tokens(SIZE) < length
        owner.table = self.memory.share(hit.blocks)
        try:
            if hit.tail is not None:
                self.memory.take_tail(owner.table, hit.tail)
                found += hit.tail_tokens
                self.written[owner.table.blocks[-1]] = (
                    owner.text(0, found // SIZE * SIZE),
                    *owner.text(found // SIZE * SIZE, found),
                )
            self.memory.grow(owner.table, -(-length // SIZE) - len(owner.table))
        except OutOfBlocks:
            self.memory.release(owner.table)
            return
        self.write(owner, found, length)
        self.groups.append([owner])

    @precondition(lambda self: self.groups)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        """One more sample of a group."""
        group = self.group(data, self.groups)
        first = group[0]
        table = self.memory.share(first.table.blocks)
        group.append(Owner(first.content, table, first.tokens))

    @precondition(lambda self: self.groups)
    @rule(data=st.data(), stream=st.sampled_from("cd"))
    def decode(self, data: st.DataObject, stream: str) -> None:
        """Write one more token, into a block of one's own."""
        owner = data.draw(st.sampled_from(self.group(data, self.groups)), label="sample")
        if owner.tokens < sum(segment.length for segment in owner.content):
            content = owner.content
        else:
            content = (*owner.content, Segment(stream, 0, 1))
        try:
            if owner.tokens % SIZE == 0:
                self.memory.grow(owner.table, 1)
            else:
                last = owner.table.blocks[-1]
                if self.memory.copy_on_write(owner.table):
                    first = owner.tokens // SIZE * SIZE
                    self.written[owner.table.blocks[-1]] = (
                        owner.text(0, first),
                        *owner.text(first, owner.tokens),
                    )
                    assert self.memory.gpu.users(last) >= 1
        except OutOfBlocks:
            return
        owner.content, owner.names = content, Names(content, SIZE)
        owner.tokens += 1
        self.write(owner, owner.tokens - 1, owner.tokens)

    @precondition(lambda self: self.groups)
    @rule(data=st.data())
    def store(self, data: st.DataObject) -> None:
        """Make what a sequence has findable."""
        owner = data.draw(st.sampled_from(self.group(data, self.groups)), label="sample")
        self.memory.store(owner.table, owner.names, 0, owner.tokens // SIZE)
        self.memory.store_tail(owner.table, owner.names, owner.tokens)

    @precondition(lambda self: self.groups)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        group = self.group(data, self.groups)
        self.groups.remove(group)
        for owner in group:
            self.memory.release(owner.table)
            assert not owner.table.blocks

    @precondition(lambda self: self.groups)
    @rule(data=st.data())
    def swap_out(self, data: st.DataObject) -> None:
        group = self.group(data, self.groups)
        distinct = {block for owner in group for block in owner.table.blocks}
        room = self.memory.cpu.free
        moved = self.memory.swap_out([owner.table for owner in group])
        assert moved == (len(distinct) if len(distinct) <= room else None)
        if moved is not None:
            self.groups.remove(group)
            self.swapped.append(group)

    @precondition(lambda self: self.swapped)
    @rule(data=st.data())
    def swap_in(self, data: st.DataObject) -> None:
        group = self.group(data, self.swapped)
        distinct = {block for owner in group for block in owner.table.blocks}
        tables = [owner.table for owner in group]
        if len(distinct) > self.memory.free:
            with pytest.raises(OutOfBlocks):
                self.memory.swap_in(tables)
            return
        assert self.memory.swap_in(tables) == len(distinct)
        self.swapped.remove(group)
        self.groups.append(group)
        for owner in group:
            for number, block in enumerate(owner.table.blocks):
                start = number * SIZE
                end = min(owner.tokens, start + SIZE)
                self.written[block] = (owner.text(0, start), *owner.text(start, end))

    @rule(count=st.integers(1, 4))
    def ask_for_too_many(self, count: int) -> None:
        before = (self.memory.free, self.memory.cached, list(self.memory.cache.idle))
        with pytest.raises(OutOfBlocks):
            self.memory.grow(BlockTable(SIZE), self.memory.free + count)
        assert (self.memory.free, self.memory.cached, list(self.memory.cache.idle)) == before

    @rule(data=st.data())
    def free_what_is_not_held(self, data: st.DataObject) -> None:
        gpu = self.memory.gpu
        block = data.draw(st.integers(-1, gpu.num_blocks), label="block")
        if not 0 <= block < gpu.num_blocks or not gpu.users(block):
            with pytest.raises(BlockError):
                gpu.release([block])

    @invariant()
    def each_block_is_in_one_state_with_as_many_users_as_tables_name_it(self) -> None:
        for pool, groups in ((self.memory.gpu, self.groups), (self.memory.cpu, self.swapped)):
            users = Counter(block for group in groups for owner in group for block in owner.table.blocks)
            assert {
                block: pool.users(block) for block in range(pool.num_blocks) if pool.users(block)
            } == users
            kept = {block for block in range(pool.num_blocks) if pool.is_kept(block)}
            assert not kept & users.keys()
            assert pool.kept == len(kept)
            assert pool.held == len(users)
            assert pool.free == pool.num_blocks - len(users) - len(kept)
            assert pool.shared == sum(count > 1 for count in users.values())

    @invariant()
    def the_cache_lists_exactly_what_is_kept(self) -> None:
        idle = list(self.memory.cache.idle)
        assert len(idle) == len(set(idle)) == self.memory.gpu.kept
        assert all(self.memory.gpu.is_kept(block) and block in self.memory.cache for block in idle)
        assert self.memory.free == self.memory.gpu.free + len(idle)

    @invariant()
    def tables_are_as_long_as_their_tokens(self) -> None:
        for group in (*self.groups, *self.swapped):
            for owner in group:
                assert len(owner.table) == -(-owner.tokens // SIZE)

    def teardown(self) -> None:
        if not hasattr(self, "memory"):
            return
        memory = self.memory
        for group in self.swapped:
            for owner in group:
                memory.cpu.release(owner.table.blocks)
        for group in self.groups:
            for owner in group:
                memory.release(owner.table)
        assert memory.free == memory.gpu.num_blocks
        assert memory.cpu.free == memory.cpu.num_blocks
        memory.grow(BlockTable(SIZE), memory.free)  # each can be had
        assert len(memory.cache) == 0


TestPagedMachine = PagedMachine.TestCase
