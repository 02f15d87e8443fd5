"""Blocks of the vLLM paper (Kwon et al. 2023, sections 4.2 to 4.5), each with an identity.

`BlockAllocator` hands out equal blocks and counts their users, `BlockTable` says where a sequence's tokens lie,
`PrefixCache` finds stored beginnings of a content, and `PagedMemory` brings them together: allocation that evicts
cached blocks, copy-on-write, a pool on the CPU to which whole groups move.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from kvplan.core.content import BlockHash, block_hashes, cut, hash_block
from kvplan.core.request import Segment

#: Marks a block that nobody uses but whose content is kept.
_KEPT = -1


class OutOfBlocks(Exception):
    """More blocks were asked for than there are; nothing was changed."""

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(f"{needed} blocks needed, {free} free")
        self.needed = needed
        self.free = free


class BlockError(Exception):
    """A block was used against the rules: freed twice, or not of this pool."""


class BlockAllocator:
    """``num_blocks`` equal blocks with counts of users. Each call is O(1); memory grows with the blocks ever used.

    A block is free, held by 1 or more users, or kept: nobody uses it, and it is not free until `reclaim`.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        #: Blocks with more than one user.
        self.shared = 0
        self.kept = 0
        self._users: list[int] = []  # of the blocks handed out so far
        self._returned: list[int] = []

    @property
    def free(self) -> int:
        """Blocks that can be handed out."""
        return self.num_blocks - len(self._users) + len(self._returned)

    @property
    def held(self) -> int:
        """Blocks with users."""
        return self.num_blocks - self.free - self.kept

    @property
    def utilization(self) -> float:
        """Blocks with users over all blocks; 0 of a pool without blocks."""
        return self.held / self.num_blocks if self.num_blocks else 0.0

    def users(self, block: int) -> int:
        """How many users a block has."""
        return max(0, self._state(block))

    def is_kept(self, block: int) -> bool:
        """Whether a block is without users, but not free."""
        return self._state(block) == _KEPT

    def allocate(self) -> int:
        """A block with one user; the one freed last goes first. Raises `OutOfBlocks`."""
        if self._returned:
            block = self._returned.pop()
            self._users[block] = 1
            return block
        block = len(self._users)
        if block >= self.num_blocks:
            raise OutOfBlocks(1, 0)
        self._users.append(1)
        return block

    def hold(self, block: int) -> None:
        """Add a user to a block that is held or kept. Raises `BlockError` for a free one."""
        users = self._state(block)
        if users == 0:
            raise BlockError(f"block {block} is free")
        if users == _KEPT:
            users = 0
            self.kept -= 1
        self.shared += users == 1
        self._users[block] = users + 1

    def release(self, block: int, *, keep: bool = False) -> int:
        """Take a user from a block and give how many are left; without any it is free, or kept.

        Raises `BlockError` for a block that nobody holds.
        """
        users = self._state(block) - 1
        if users < 0:
            raise BlockError(f"block {block} is freed twice")
        self._users[block] = users
        if users == 1:
            self.shared -= 1
        elif users == 0 and keep:
            self._users[block] = _KEPT
            self.kept += 1
        elif users == 0:
            self._returned.append(block)
        return users

    def reclaim(self, block: int) -> None:
        """Make a kept block free. Raises `BlockError` for any other."""
        if self._state(block) != _KEPT:
            raise BlockError(f"block {block} is not kept")
        self._users[block] = 0
        self.kept -= 1
        self._returned.append(block)

    def _state(self, block: int) -> int:
        if not 0 <= block < self.num_blocks:
            raise BlockError(f"block {block} is none of {self.num_blocks}")
        return self._users[block] if block < len(self._users) else 0


class BlockTable:
    """Where the tokens of a sequence lie: its logical blocks, in order, as physical ones."""

    __slots__ = ("block_size", "blocks")

    def __init__(self, block_size: int, blocks: Iterable[int] = ()) -> None:
        self.block_size = block_size
        self.blocks = list(blocks)

    def __len__(self) -> int:
        return len(self.blocks)

    def append(self, block: int) -> None:
        """Let the next ``block_size`` tokens lie in a block."""
        self.blocks.append(block)

    def block(self, token: int) -> int:
        """The physical block of a token, counted from 0. Raises `IndexError` beyond the table."""
        if token < 0:
            raise IndexError(f"token {token}")
        return self.blocks[token // self.block_size]

    def slot(self, token: int) -> int:
        """The slot of a token among all slots of the pool. Raises `IndexError` beyond the table."""
        return self.block(token) * self.block_size + token % self.block_size


class Hit(NamedTuple):
    """A stored beginning: whole blocks that can be shared, and of ``tail`` the first ``tail_tokens`` tokens.

    The tail goes on otherwise, or must be written again: whoever takes it copies it.
    """

    blocks: list[int]
    tail: int | None
    tail_tokens: int

    def tokens(self, block_size: int) -> int:
        """Tokens found."""
        return len(self.blocks) * block_size + self.tail_tokens


NO_HIT = Hit([], None, 0)


class _Entry(NamedTuple):
    """``key`` names the first ``tokens`` tokens of a block and all before it; ``parent`` what is before it."""

    key: BlockHash
    parent: BlockHash
    tokens: int


class Keys:
    """The names of a content's blocks, made as they are asked for, once each: linear in the content.

    A name covers a block and all before it, so equal names mean equal prefixes.
    """

    def __init__(self, content: tuple[Segment, ...], block_size: int) -> None:
        self.content = content
        self.block_size = block_size
        self._full: list[BlockHash] = []
        self._later = block_hashes(content, block_size)

    def full(self, block: int) -> BlockHash:
        """The name of a full block, which the content must have."""
        while block >= len(self._full):
            self._full.append(next(self._later))
        return self._full[block]

    def parent(self, block: int) -> BlockHash:
        """The name of what lies before a block."""
        return self.full(block - 1) if block else b""

    def part(self, block: int, tokens: int) -> BlockHash:
        """The name of the first ``tokens`` tokens of a block, with all before."""
        return next(self.parts(block, [tokens]))

    def parts(self, block: int, lengths: Iterable[int]) -> Iterator[BlockHash]:
        """`part` for several lengths; the content is gone through once."""
        start = block * self.block_size
        pieces = cut(self.content, start, start + self.block_size)
        for tokens in lengths:
            yield hash_block(self.parent(block), cut(pieces, 0, tokens))


class PrefixCache:
    """Which blocks hold the beginnings of contents, whole blocks and a last one that is filled in part.

    A block has one entry for each length at which it was stored. Of blocks with equal content one is kept. Those that
    nobody uses are listed, the one whose last user left first going first.
    """

    def __init__(self) -> None:
        self._blocks: dict[BlockHash, int] = {}
        self._entries: dict[int, list[_Entry]] = {}
        #: Under a parent, how many entries of each length less than a block there are.
        self._parts: dict[BlockHash, dict[int, int]] = {}
        self._idle: dict[int, None] = {}

    def __contains__(self, block: int) -> bool:
        return block in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def idle(self) -> Iterator[int]:
        """Blocks without users, the next to be evicted first."""
        return iter(self._idle)

    def find(self, keys: Keys, length: int, most: int) -> Hit:
        """The longest stored beginning of the first ``length`` tokens of a content, cut at ``most``.

        O(blocks found + block size): one name a block, and one for each stored length of the last.
        """
        size = keys.block_size
        blocks: list[int] = []
        while (len(blocks) + 1) * size <= length:
            block = self._blocks.get(keys.full(len(blocks)))
            if block is None:
                break
            blocks.append(block)
        found = len(blocks) * size
        if found > most:
            usable = most // size
            tail = blocks[usable] if most % size else None
            return Hit(blocks[:usable], tail, most % size)
        stored = self._parts.get(keys.parent(len(blocks)))
        room = min(length, most) - found
        if not stored or not room:
            return Hit(blocks, None, 0)
        # One that is longer than what may be used will do as well.
        lengths = sorted((tokens for tokens in stored if tokens <= length - found), reverse=True)
        for tokens, key in zip(lengths, keys.parts(len(blocks), lengths), strict=True):
            block = self._blocks.get(key)
            if block is not None:
                return Hit(blocks, block, min(tokens, room))
        return Hit(blocks, None, 0)

    def enter(self, block: int, key: BlockHash, parent: BlockHash, tokens: int, *, is_full: bool) -> None:
        """Store what a block's first ``tokens`` tokens are; nothing, if another block holds the same."""
        if key in self._blocks:
            return
        self._blocks[key] = block
        self._entries.setdefault(block, []).append(_Entry(key, parent, 0 if is_full else tokens))
        if not is_full:
            lengths = self._parts.setdefault(parent, {})
            lengths[tokens] = lengths.get(tokens, 0) + 1

    def forget(self, block: int) -> None:
        """Drop all that is stored about a block."""
        for entry in self._entries.pop(block):
            del self._blocks[entry.key]
            if entry.tokens:
                lengths = self._parts[entry.parent]
                lengths[entry.tokens] -= 1
                if not lengths[entry.tokens]:
                    del lengths[entry.tokens]
                if not lengths:
                    del self._parts[entry.parent]
        self._idle.pop(block, None)

    def lay_by(self, block: int) -> None:
        """List a block as used by nobody, as the last to be evicted."""
        self._idle.pop(block, None)
        self._idle[block] = None

    def take_up(self, block: int) -> None:
        """A block has a user again."""
        self._idle.pop(block, None)

    def oldest(self) -> int:
        """The block to be evicted next."""
        return next(iter(self._idle))


class PagedMemory:
    """GPU blocks with a prefix cache, and CPU blocks to which sequences move.

    Invariants: a GPU block is free, held by as many tables as it has users, or kept by the cache; a CPU block is
    free or held; ``pledged`` of the free blocks belong to sequences that have not asked which ones they are. A call
    that raises `OutOfBlocks` changes nothing.
    """

    def __init__(self, num_blocks: int, num_cpu_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.gpu = BlockAllocator(num_blocks)
        self.cpu = BlockAllocator(num_cpu_blocks)
        self.cache = PrefixCache()
        self.pledged = 0
        #: Cached blocks that lost their content, in order; whoever reads it clears it.
        self.evicted: list[int] = []

    @property
    def free(self) -> int:
        """Blocks that can be had: free ones, and cached ones that nobody uses."""
        return self.gpu.free + self.gpu.kept - self.pledged

    @property
    def cached(self) -> int:
        """Of the free blocks those with reusable content."""
        return self.gpu.kept

    # Blocks

    def pledge(self, count: int) -> None:
        """Set free blocks aside without saying which; cached ones lose their content for it, the oldest first.

        Raises `OutOfBlocks`.
        """
        if count > self.free:
            raise OutOfBlocks(count, self.free)
        self.pledged += count
        while self.pledged > self.gpu.free:
            block = self.cache.oldest()
            self.cache.forget(block)
            self.gpu.reclaim(block)
            self.evicted.append(block)

    def redeem(self, table: BlockTable, count: int) -> None:
        """Append to a table blocks that were set aside."""
        assert count <= self.pledged, "so many were set aside"
        self.pledged -= count
        for _ in range(count):
            table.append(self.gpu.allocate())

    def grow(self, table: BlockTable, count: int) -> None:
        """Append so many new blocks to a table. Raises `OutOfBlocks`."""
        self.pledge(count)
        self.redeem(table, count)

    def take_tail(self, table: BlockTable, tail: int) -> None:
        """Append to a table a copy of a cached block. Raises `OutOfBlocks`."""
        needed = 1 + self.gpu.is_kept(tail)
        if needed > self.free:
            raise OutOfBlocks(needed, self.free)
        self._hold(tail)  # so that it is not the one evicted for its copy
        self.grow(table, 1)
        self._release(tail)

    def share(self, blocks: Iterable[int]) -> BlockTable:
        """A table of blocks that others use, or that the cache keeps."""
        table = BlockTable(self.block_size, blocks)
        for block in table.blocks:
            self._hold(block)
        return table

    def idle_blocks(self, hit: Hit) -> int:
        """How many of the blocks that a hit shares count as free as long as nobody takes them."""
        return sum(map(self.gpu.is_kept, hit.blocks))

    def is_shared(self, table: BlockTable) -> bool:
        """Whether somebody else uses the last block of a table too."""
        return self.gpu.users(table.blocks[-1]) > 1

    def copy_on_write(self, table: BlockTable) -> bool:
        """Before a token is written into the last block: copy it if others use it. Says whether it was copied.

        Raises `OutOfBlocks`.
        """
        if not self.is_shared(table):
            return False
        self.grow(table, 1)
        copy = table.blocks.pop()
        self._release(table.blocks[-1])
        table.blocks[-1] = copy
        return True

    def release(self, table: BlockTable) -> None:
        """Give up all blocks of a table, the last first, so that beginnings stay cached the longest."""
        while table.blocks:
            self._release(table.blocks.pop())

    # Prefixes

    def store(self, table: BlockTable, keys: Keys, start: int, end: int) -> None:
        """Make the full blocks ``start .. end-1`` of a table findable."""
        for i in range(start, end):
            self.cache.enter(table.blocks[i], keys.full(i), keys.parent(i), self.block_size, is_full=True)

    def store_tail(self, table: BlockTable, keys: Keys, tokens: int) -> None:
        """Make the last, partly filled block of a table of so many tokens findable; nothing where none is."""
        block, part = divmod(tokens, self.block_size)
        if part:
            self.cache.enter(
                table.blocks[block], keys.part(block, part), keys.parent(block), part, is_full=False
            )

    # The CPU pool

    def swap_out(self, tables: list[BlockTable]) -> int | None:
        """Move the blocks of a group to the CPU, shared ones once; None, and no change, if it has no room.

        Returns how many blocks moved. The tables then name CPU blocks; what the cache knows stays on the GPU until
        it is evicted.
        """
        distinct = dict.fromkeys(block for table in tables for block in table.blocks)
        if len(distinct) > self.cpu.free:
            return None
        moved = {block: self.cpu.allocate() for block in distinct}
        for table in tables:
            there = [moved[block] for block in table.blocks]
            self.release(table)
            table.blocks = there
        self._count_users(self.cpu, tables)
        return len(moved)

    def swap_in(self, tables: list[BlockTable]) -> int:
        """Move a group back into free GPU blocks; returns how many blocks moved. Raises `OutOfBlocks`."""
        distinct = dict.fromkeys(block for table in tables for block in table.blocks)
        fresh = BlockTable(self.block_size)
        self.grow(fresh, len(distinct))
        moved = dict(zip(distinct, fresh.blocks, strict=True))
        for table in tables:
            for block in table.blocks:
                self.cpu.release(block)
            table.blocks = [moved[block] for block in table.blocks]
        self._count_users(self.gpu, tables)
        return len(moved)

    @staticmethod
    def _count_users(pool: BlockAllocator, tables: list[BlockTable]) -> None:
        """Let each block, which has one user, have as many as tables that name it."""
        seen: set[int] = set()
        for table in tables:
            for block in table.blocks:
                if block in seen:
                    pool.hold(block)
                seen.add(block)

    def _hold(self, block: int) -> None:
        self.gpu.hold(block)
        self.cache.take_up(block)

    def _release(self, block: int) -> None:
        known = block in self.cache
        if not self.gpu.release(block, keep=known) and known:
            self.cache.lay_by(block)
