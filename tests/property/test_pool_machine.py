"""The block pool against a model of dicts and lists, after every call.

Numbers in brackets are the invariants that `BlockPool` states.
"""

from __future__ import annotations

from collections import Counter

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvplan.core.content import BlockHash
from kvplan.core.engines.plain_pool import BlockPool

HASHES: tuple[BlockHash, ...] = (b"a", b"b", b"c", b"d")


class ModelPool:
    """What a pool should do, in the plainest containers: two lists are the free queue."""

    def __init__(self, num_blocks: int) -> None:
        self.usable = num_blocks - 1
        self.blank = list(range(1, num_blocks))  # head of the queue: last freed first
        self.cached: list[int] = []  # tail of the queue: first freed first
        self.hash_of: dict[int, BlockHash] = {}
        self.entered: list[int] = []  # blocks with a hash, in order of entry
        self.tables: list[list[int]] = []

    def users(self) -> Counter[int]:
        return Counter(block for table in self.tables for block in table)

    def queue(self) -> list[int]:
        return self.blank + self.cached

    def take(self, count: int) -> tuple[list[int], list[int]]:
        taken = self.queue()[:count]
        evicted = [block for block in taken if block in self.hash_of]
        for block in taken:
            (self.cached if block in self.hash_of else self.blank).remove(block)
            if block in self.hash_of:
                del self.hash_of[block]
                self.entered.remove(block)
        return taken, evicted

    def find(self, block_hash: BlockHash) -> int | None:
        return next((block for block in self.entered if self.hash_of[block] == block_hash), None)

    def release(self, table: list[int]) -> None:
        self.tables.remove(table)
        still_used = self.users()
        freed = [block for block in reversed(table) if not still_used[block]]
        self.blank = [block for block in freed if block not in self.hash_of] + self.blank
        self.cached += [block for block in freed if block in self.hash_of]


class PoolMachine(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(1, 14))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.model = ModelPool(num_blocks)

    def take(self, count: int) -> list[int]:
        evicted: list[int] = []
        taken = self.pool.take(count, evicted)
        assert (taken, evicted) == self.model.take(count)
        return taken

    def drawn_table(self, data: st.DataObject) -> list[int]:
        return self.model.tables[data.draw(st.integers(0, len(self.model.tables) - 1), label="table")]

    @rule(data=st.data())
    def give_blocks_to_a_new_table(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, min(4, self.pool.num_free)), label="count")
        self.model.tables.append(self.take(count))

    @precondition(lambda self: bool(self.model.tables))
    @rule(data=st.data())
    def lengthen_a_table(self, data: st.DataObject) -> None:
        table = self.drawn_table(data)
        count = data.draw(st.integers(0, min(2, self.pool.num_free)), label="count")
        table += self.take(count)

    @precondition(lambda self: bool(self.model.tables))
    @rule(data=st.data())
    def release_a_table(self, data: st.DataObject) -> None:
        table = self.drawn_table(data)
        self.pool.release(list(table))
        self.model.release(table)

    @precondition(lambda self: bool(set(self.model.users()) - set(self.model.hash_of)))
    @rule(data=st.data(), block_hash=st.sampled_from(HASHES))
    def enter_a_used_block(self, data: st.DataObject, block_hash: BlockHash) -> None:
        blocks = sorted(set(self.model.users()) - set(self.model.hash_of))
        block = data.draw(st.sampled_from(blocks), label="block")
        self.pool.enter(block, block_hash)
        self.model.hash_of[block] = block_hash
        self.model.entered.append(block)

    @precondition(lambda self: bool(self.model.entered))
    @rule(data=st.data())
    def adopt_found_blocks(self, data: st.DataObject) -> None:
        """Hold what is found, idle or in use, then take more: an admission with a prefix hit."""
        present = sorted(set(self.model.hash_of.values()))
        wanted = data.draw(st.lists(st.sampled_from(present), min_size=1, unique=True), label="hashes")
        hit = []
        for block_hash in wanted:
            block = self.pool.find(block_hash)
            assert block is not None
            hit.append(block)
        self.pool.hold(hit)
        self.model.cached = [block for block in self.model.cached if block not in hit]
        more = data.draw(st.integers(0, min(2, self.pool.num_free)), label="more")
        self.model.tables.append(hit + self.take(more))

    @invariant()
    def blocks_are_free_or_used_and_never_both(self) -> None:  # (1), (3)
        free = list(self.pool.free_queue())
        used = {block for block, count in enumerate(self.pool.references) if count}
        assert len(free) == len(set(free)) == self.pool.num_free
        assert self.pool.num_free + len(used) == self.model.usable
        assert not used & set(free)
        assert used | set(free) == set(range(1, self.model.usable + 1))

    @invariant()
    def references_count_the_users(self) -> None:  # (2), (5)
        users = self.model.users()
        assert self.pool.references == [users[block] for block in range(self.model.usable + 1)]
        assert self.pool.shared == sum(1 for count in users.values() if count > 1)

    @invariant()
    def the_free_queue_has_the_order_of_the_model(self) -> None:  # (3)
        assert list(self.pool.free_queue()) == self.model.queue()

    @invariant()
    def the_index_lists_the_blocks_with_a_hash_in_order_of_entry(self) -> None:  # (4)
        expected: dict[BlockHash, list[int]] = {}
        for block in self.model.entered:
            expected.setdefault(self.model.hash_of[block], []).append(block)
        assert self.pool.index == expected
        assert self.pool.hashes == [self.model.hash_of.get(block) for block in range(self.model.usable + 1)]
        for block_hash in HASHES:
            assert self.pool.find(block_hash) == self.model.find(block_hash)

    def teardown(self) -> None:
        """With everything freed the pool has its whole size again, and all of it can be taken."""
        if not hasattr(self, "pool"):
            return
        for table in list(self.model.tables):
            self.pool.release(list(table))
            self.model.release(table)
        assert self.pool.num_free == self.model.usable
        assert not any(self.pool.references)
        assert self.pool.shared == 0
        assert sorted(self.take(self.model.usable)) == list(range(1, self.model.usable + 1))
        assert self.pool.index == {}
        assert self.pool.num_free == 0


TestPoolMachine = PoolMachine.TestCase
