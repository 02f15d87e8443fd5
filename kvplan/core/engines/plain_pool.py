"""The block pool of vLLM 0.33.0: reference counts, one free queue, one index of cached content.

Rules: vllm/v1/core/block_pool.py of vLLM 0.33.0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvplan.core.content import BlockHash

#: Stands in a block table where there is no block.
NULL_BLOCK = 0


class BlockPool:
    """Blocks ``0 .. num_blocks-1`` with reference counts, one free queue and one hash index.

    Invariants, between calls: (1) every block but the null block 0 is either in the free queue or
    referenced, never both; (2) ``references[b]`` counts the tables that hold b; (3) the free queue holds
    first the blocks without content, last freed first, then cached blocks, first freed first;
    (4) ``index`` lists exactly the blocks that have a hash, for each hash in order of entry; (5) ``shared`` counts
    the blocks with more than one user, ``idle`` the free ones with content; (6) a failed request for blocks changes
    nothing.
    """

    def __init__(self, num_blocks: int) -> None:
        self.references = [0] * num_blocks
        self.hashes: list[BlockHash | None] = [None] * num_blocks
        self.index: dict[BlockHash, list[int]] = {}
        self.shared = 0
        self.idle = 0
        # The free queue is linked through two lists of block ids; entry num_blocks is both ends.
        self._end = num_blocks
        self._next = [*range(1, num_blocks + 1), 0]
        self._previous = [num_blocks, *range(num_blocks)]
        self.num_free = num_blocks
        if num_blocks:
            self._unlink(0)  # the null block is taken out for good

    def free_queue(self) -> Iterator[int]:
        """Block ids in the order in which they would be taken."""
        block = self._next[self._end]
        while block != self._end:
            yield block
            block = self._next[block]

    def take(self, count: int, evicted: list[int]) -> list[int]:
        """Take ``count`` blocks from the head of the queue; a block with content loses it.

        Ids of such blocks are appended to ``evicted``. ``count`` must not exceed ``num_free``.
        """
        assert count <= self.num_free, "the caller checks that the blocks are there"
        taken = []
        for _ in range(count):
            block = self._next[self._end]
            self._unlink(block)
            if self.hashes[block] is not None:
                self._forget(block)
                evicted.append(block)
                self.idle -= 1
            self.references[block] = 1
            taken.append(block)
        return taken

    def hold(self, blocks: Sequence[int]) -> int:
        """Add a user to cached blocks; idle ones leave the free queue, wherever they lie in it. Returns how many do."""
        idle = self.idle
        for block in blocks:
            users = self.references[block]
            if users == 0:
                self._unlink(block)
                self.idle -= 1
            elif users == 1:
                self.shared += 1
            self.references[block] = users + 1
        return idle - self.idle

    def release(self, table: Sequence[int]) -> int:
        """Take a user from each block of a table, last block first; returns how many have none left.

        Blocks without users go to the head of the queue if they hold nothing reusable, else to its
        tail, each group in the order met.
        """
        blank = []
        free = self.num_free
        for block in reversed(table):
            users = self.references[block] - 1
            assert users >= 0, "a block was freed twice"
            self.references[block] = users
            if users == 0:
                if self.hashes[block] is None:
                    blank.append(block)
                else:
                    self._link(block, before=self._end)
                    self.idle += 1
            elif users == 1:
                self.shared -= 1
        for block in reversed(blank):
            self._link(block, before=self._next[self._end])
        return self.num_free - free

    def enter(self, block: int, block_hash: BlockHash) -> None:
        """Make a full block findable. Another block with the same hash stays findable too."""
        assert self.hashes[block] is None, "a block is entered once"
        self.hashes[block] = block_hash
        self.index.setdefault(block_hash, []).append(block)

    def find(self, block_hash: BlockHash) -> int | None:
        """The block entered first among those with this hash, or None."""
        blocks = self.index.get(block_hash)
        return blocks[0] if blocks else None

    def forget(self, block: int) -> None:
        """Let a block that is in use be found no more, if it could be."""
        assert self.references[block] > 0, "what is free is forgotten when it is taken"
        if self.hashes[block] is not None:
            self._forget(block)

    def _forget(self, block: int) -> None:
        block_hash = self.hashes[block]
        assert block_hash is not None
        self.hashes[block] = None
        blocks = self.index[block_hash]
        blocks.remove(block)
        if not blocks:
            del self.index[block_hash]

    def _unlink(self, block: int) -> None:
        before, after = self._previous[block], self._next[block]
        self._next[before] = after
        self._previous[after] = before
        self.num_free -= 1

    def _link(self, block: int, *, before: int) -> None:
        after, ahead = before, self._previous[before]
        self._next[ahead] = self._previous[after] = block
        self._previous[block] = ahead
        self._next[block] = after
        self.num_free += 1
