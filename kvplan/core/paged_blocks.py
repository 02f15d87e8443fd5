"""Blocks of the vLLM paper (Kwon et al. 2023, sections 4.2 to 4.5), each with an identity.

`BlockAllocator` hands out equal blocks and counts their users, `BlockTable` says where a sequence's tokens lie,
`PrefixCache` finds stored beginnings of a content, and `PagedMemory` brings them together: allocation that evicts
cached blocks, copy-on-write, a pool on the CPU to which whole groups move.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator
from hashlib import blake2b
from typing import NamedTuple

from kvplan.core.content import Run, content_runs, cut
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
    """``num_blocks`` equal blocks with counts of users. O(1) a block; memory grows with the blocks ever used.

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

    def allocate(self, count: int = 1) -> list[int]:
        """So many blocks with one user each; those freed last go first. Raises `OutOfBlocks`."""
        if count > self.free:
            raise OutOfBlocks(count, self.free)
        again = min(count, len(self._returned))
        taken = self._returned[len(self._returned) - again :]
        del self._returned[len(self._returned) - again :]
        taken.reverse()
        for block in taken:
            self._users[block] = 1
        new = count - again
        if new:
            first = len(self._users)
            self._users.extend([1] * new)
            taken.extend(range(first, first + new))
        return taken

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

    def release(self, blocks: Iterable[int], keep: Container[int] = ()) -> list[int]:
        """Take a user from each block; without any it is free, or kept if it is in ``keep``. Returns those kept.

        Raises `BlockError` for a block that nobody holds, after releasing those before it.
        """
        users, returned = self._users, self._returned
        kept: list[int] = []
        for block in blocks:
            if not 0 <= block < len(users) or users[block] <= 0:
                self._state(block)
                raise BlockError(f"block {block} is freed twice")
            left = users[block] - 1
            users[block] = left
            if left == 1:
                self.shared -= 1
            elif left == 0:
                if block in keep:
                    users[block] = _KEPT
                    kept.append(block)
                else:
                    returned.append(block)
        self.kept += len(kept)
        return kept

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


#: A full block, or the beginning of one, and all before it: equal names mean equal prefixes.
Name = int

#: Names of a run's blocks are consecutive; no run has more.
_RUN_BITS = 48


class Names:
    """The names of a content's blocks. O(segments) digests and O(1) a block.

    Blocks that go on in one stream are a run: its first block and all before it are digested (128 bits: two of 10^9
    different ones collide with a chance below 10^-20), the others count on from there.
    """

    def __init__(self, content: tuple[Segment, ...], block_size: int) -> None:
        self.content = content
        self.block_size = block_size
        self._full: list[Name] = []
        self._runs: Iterator[Run] | None = None  # made when needed: many wait long before

    def full(self, start: int, end: int) -> list[Name]:
        """Of the full blocks ``start .. end-1``, which the content must have."""
        names = self._full
        if self._runs is None:
            self._runs = iter(content_runs(self.content, self.block_size))
        while end > len(names):
            run = next(self._runs)
            before = names[-1] if names else 0
            first = _digest(before, run.key) << _RUN_BITS
            names.extend(range(first, first + run.end - run.first))
        return names[start:end]

    def before(self, block: int) -> Name:
        """Of what lies before a block; 0 for the first."""
        return self.full(block - 1, block)[0] if block else 0

    def parts(self, block: int, lengths: Iterable[int]) -> Iterator[Name]:
        """Of the beginnings of a block of these lengths, each less than a block. O(segments) and O(1) a length."""
        start = block * self.block_size
        pieces = cut(self.content, start, start + self.block_size)
        for tokens in lengths:
            yield _digest(self.before(block), cut(pieces, 0, tokens))


def _digest(before: Name, pieces: Iterable[tuple[str, int, int]]) -> int:
    # Lengths first and an end to each number: no name can imitate another, or several pieces.
    text = "".join(f"{len(stream)}:{stream}@{start}+{length};" for stream, start, length in pieces)
    return int.from_bytes(blake2b(f"{before};{text}".encode(), digest_size=16).digest(), "big")


class _Part(NamedTuple):
    """``name`` is of the first ``tokens`` tokens of a block and all before it, ``before`` of the latter alone."""

    name: Name
    before: Name
    tokens: int


class PrefixCache:
    """Which blocks hold the beginnings of contents: full ones, and last ones that are filled in part.

    Of blocks with equal content one is stored. Those that nobody uses are listed, the one whose last user left first
    going first.
    """

    def __init__(self) -> None:
        self._blocks: dict[Name, int] = {}
        #: By block: its name if it is full, and its beginnings that were stored.
        self._full: dict[int, Name] = {}
        self._parts: dict[int, list[_Part]] = {}
        #: How many beginnings of each length are stored that follow what a name stands for.
        self._lengths: dict[Name, dict[int, int]] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: object) -> bool:
        return block in self._full or block in self._parts

    def __len__(self) -> int:
        return len(self._full.keys() | self._parts.keys())

    @property
    def idle(self) -> Iterator[int]:
        """Blocks without users, the next to be evicted first."""
        return iter(self._idle)

    def find(self, names: Names, length: int, most: int) -> Hit:
        """The longest stored beginning of the first ``length`` tokens of a content, cut at ``most``.

        O(blocks of the content + lengths stored for the block after those found), at most a block's.
        """
        size = names.block_size
        blocks: list[int] = []
        for name in names.full(0, length // size):
            block = self._blocks.get(name)
            if block is None:
                break
            blocks.append(block)
        found = len(blocks) * size
        if found > most:
            usable, tokens = divmod(most, size)
            return Hit(blocks[:usable], blocks[usable] if tokens else None, tokens)
        stored = self._lengths.get(names.before(len(blocks)))
        room = min(length, most) - found
        if not stored or not room:
            return Hit(blocks, None, 0)
        # One that is longer than what may be used will do as well.
        lengths = sorted((tokens for tokens in stored if tokens <= length - found), reverse=True)
        for tokens, name in zip(lengths, names.parts(len(blocks), lengths), strict=True):
            block = self._blocks.get(name)
            if block is not None:
                return Hit(blocks, block, min(tokens, room))
        return Hit(blocks, None, 0)

    def enter(self, blocks: Iterable[int], names: Iterable[Name]) -> None:
        """Store full blocks by their names; nothing, where another block holds the same."""
        known, full = self._blocks, self._full
        for block, name in zip(blocks, names, strict=True):
            if name not in known:
                known[name] = block
                full[block] = name

    def enter_part(self, block: int, name: Name, before: Name, tokens: int) -> None:
        """Store what a block's first ``tokens`` tokens are; nothing, where another block holds the same."""
        if name in self._blocks:
            return
        self._blocks[name] = block
        self._parts.setdefault(block, []).append(_Part(name, before, tokens))
        lengths = self._lengths.setdefault(before, {})
        lengths[tokens] = lengths.get(tokens, 0) + 1

    def lay_by(self, blocks: Iterable[int]) -> None:
        """List blocks as used by nobody, the last of them as the last to be evicted."""
        for block in blocks:
            self._idle[block] = None

    def take_up(self, block: int) -> None:
        """A block has a user again."""
        self._idle.pop(block, None)

    def evict(self) -> int:
        """Drop all that is stored about the block whose last user left first; returns it. One must be listed."""
        block, _ = self._idle.popitem(last=False)
        name = self._full.pop(block, None)
        if name is not None:
            del self._blocks[name]
        for part in self._parts.pop(block, ()):
            del self._blocks[part.name]
            lengths = self._lengths[part.before]
            lengths[part.tokens] -= 1
            if not lengths[part.tokens]:
                del lengths[part.tokens]
            if not lengths:
                del self._lengths[part.before]
        return block


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
        for _ in range(self.pledged - self.gpu.free):
            block = self.cache.evict()
            self.gpu.reclaim(block)
            self.evicted.append(block)

    def redeem(self, table: BlockTable, count: int) -> None:
        """Append to a table blocks that were set aside."""
        assert count <= self.pledged, "so many were set aside"
        self.pledged -= count
        table.blocks += self.gpu.allocate(count)

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
        self._release([tail])

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
        self._release([table.blocks[-1]])
        table.blocks[-1] = copy
        return True

    def release(self, table: BlockTable) -> None:
        """Give up all blocks of a table, the last first, so that beginnings stay cached the longest."""
        self._release(reversed(table.blocks))
        table.blocks = []

    # Prefixes

    def store(self, table: BlockTable, names: Names, start: int, end: int) -> None:
        """Make the full blocks ``start .. end-1`` of a table findable."""
        self.cache.enter(table.blocks[start:end], names.full(start, end))

    def store_tail(self, table: BlockTable, names: Names, tokens: int) -> None:
        """Make the last, partly filled block of a table of so many tokens findable; nothing where none is."""
        block, part = divmod(tokens, self.block_size)
        if part:
            (name,) = names.parts(block, [part])
            self.cache.enter_part(table.blocks[block], name, names.before(block), part)

    # The CPU pool

    def swap_out(self, tables: list[BlockTable]) -> int | None:
        """Move the blocks of a group to the CPU, shared ones once; None, and no change, if it has no room.

        Returns how many blocks moved. The tables then name CPU blocks; what the cache knows stays on the GPU until
        it is evicted.
        """
        distinct = dict.fromkeys(block for table in tables for block in table.blocks)
        if len(distinct) > self.cpu.free:
            return None
        moved = dict(zip(distinct, self.cpu.allocate(len(distinct)), strict=True))
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
            self.cpu.release(table.blocks)
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

    def _release(self, blocks: Iterable[int]) -> None:
        self.cache.lay_by(self.gpu.release(blocks, keep=self.cache))
