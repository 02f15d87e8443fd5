"""Blocks of one full-attention group as runs, not as objects: the pool of the fast engine.

Which block a sequence takes cannot be observed, only when content is lost. So blocks without content are a
number, and cached content is kept in *extents*: physical copies of neighbouring blocks with the same users.

Invariants, between calls: (1) ``free`` = ``blank`` + sizes of idle extents; (2) an extent's ``users`` counts the
sequences that hold it; (3) it is in the idle list if and only if it has no users; (4) where parts of a node overlap
(``copies``), the earlier listed was entered earlier; without overlap they lie end to end; (5) a node is indexed if and
only if it has parts; (6) what is present is closed under prefixes: of one prefix the deepest free block is evicted
first; (7) an extent that is present is a part of its ``node`` or has an ``owner``, never both; (8) one with an owner
stands in the index by the owner's key, has nothing behind it, and is all that is left of what its owner has entered.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from hashlib import blake2b
from itertools import islice

from kvplan.core.content import Piece, Run, content_runs
from kvplan.core.request import Request


class Node:
    """Content of a run behind a given prefix, as far as it is present; ``parts`` are its extents.

    ``high`` is the end of what is present, ``copies`` how many blocks are there beyond one of each.
    """

    __slots__ = ("copies", "high", "key", "parts")

    def __init__(self, key: NodeKey, first: int) -> None:
        self.key = key
        self.parts: list[Extent] = []
        self.high = first
        self.copies = 0

    def place(self, extent: Extent) -> int:
        """Where an extent stands in ``parts``. O(log parts) without copies."""
        if self.copies:
            return self.parts.index(extent)
        return bisect_left(self.parts, extent.low, key=_low)

    def join(self, lower: Extent, upper: Extent) -> bool:
        """Make ``lower`` hold the blocks of ``upper`` too, unless that would change which copy of a block is first."""
        here, there = self.place(lower), self.place(upper)
        if self.copies:
            moved = upper if here < there else lower
            between = self.parts[min(here, there) + 1 : max(here, there)]
            if any(part.low < moved.high and part.high > moved.low for part in between):
                return False
        self.parts[min(here, there)] = lower
        del self.parts[max(here, there)]
        lower.high = upper.high
        return True

    def gain(self, low: int, high: int) -> None:
        """Note that blocks ``low .. high-1`` were entered."""
        if low >= self.high:
            self.high = high
            return
        self.copies += min(self.high, high) - low
        self.high = max(self.high, high)

    def lose(self, end: int, count: int) -> None:
        """Note that ``count`` blocks below ``end``, already taken off the parts, lost their content."""
        if not self.copies:
            self.high = end - count
            return
        if end == self.high and not any(part.high == end for part in self.parts):
            self.high = max(part.high for part in self.parts)
            count -= end - self.high
        self.copies -= count
        if not self.copies:
            self.parts.sort(key=_low)


#: A node's prefix, its place and its first block; of content that begins as a stream does, that stream's name.
NodeKey = tuple[Node | None, int, tuple[Piece, ...]] | str


def _key(parent: Node | None, run: Run) -> NodeKey:
    if parent is None and len(run.key) == 1:
        stream, start, _ = run.key[0]
        if start == 0:
            return stream
    return parent, run.first, run.key


class Extent:
    """Copies of positions ``low .. high-1`` of a node with the same ``users``.

    One with an ``owner`` has all that this sequence has entered, over all its runs, until somebody else comes upon it:
    then it gets a node. Cut in two while held, an extent keeps its lower part, and ``rest`` leads holders of the whole
    on to the upper. Only in the idle list it has neighbours, so that one that is let go keeps nothing alive.
    """

    __slots__ = ("after", "before", "high", "low", "node", "owner", "rest", "users")
    before: Extent
    after: Extent

    def __init__(
        self, node: Node | None, low: int, high: int, users: int, owner: Holding | None = None
    ) -> None:
        self.node = node
        self.owner = owner
        self.low = low
        self.high = high
        self.users = users
        self.rest: Extent | None = None


class Holding:
    """What one sequence holds: ``blocks`` in all, the first ``cached`` of them findable content.

    A prompt without content is a stream of its own, for which hardly ever anybody else asks: ``own_key`` stands for it
    in the index, None for other prompts and for those that fill no block. While nobody asks, all that is findable is in
    the extent ``whole``, else in those of ``table``.
    """

    __slots__ = ("_block_size", "_runs", "blocks", "cached", "nodes", "own_key", "request", "table", "whole")

    def __init__(self, request: Request, block_size: int) -> None:
        self.request = request
        has_own = not request.content and request.input_tokens >= block_size
        self.own_key = f"p:{request.id}" if has_own else None
        self.blocks = 0
        self.cached = 0
        self.whole: Extent | None = None
        #: Nodes of the runs that have begun.
        self.nodes: list[Node] = []
        #: Extents in order, each with the end up to which it and its ``rest`` are held.
        self.table: list[tuple[Extent, int]] = []
        self._block_size = block_size
        self._runs: list[Run] | None = None

    @property
    def runs(self) -> list[Run]:
        """Its content, prompt and answer."""
        if self._runs is None:
            self._runs = content_runs(self.request.full_content(), self._block_size)
        return self._runs


Hit = list[tuple[Node, int, int]]


class ExtentPool:
    """Free blocks, cached content and who uses it."""

    def __init__(self, usable_blocks: int) -> None:
        #: Blocks that can be taken, and those of them without content.
        self.free = self.blank = usable_blocks
        #: Blocks with more than one user.
        self.shared = 0
        #: Nodes, and extents that have an owner.
        self.index: dict[NodeKey, Node | Extent] = {}
        # Both ends of the idle list: the first to be evicted comes after it.
        self._ends = Extent(None, 0, 0, 0)
        self._ends.before = self._ends.after = self._ends

    @property
    def idle(self) -> int:
        """Blocks with content that nobody uses."""
        return self.free - self.blank

    def take(self, count: int) -> int:
        """Take blocks, those without content first, then the oldest content; returns how many lost content.

        ``count`` must not exceed ``free``. O(extents evicted).
        """
        self.free -= count
        evict = count - self.blank
        if evict <= 0:
            self.blank -= count
            return 0
        self.blank = 0
        left = evict
        while left:
            oldest = self._ends.after
            node, owner, end = oldest.node, oldest.owner, oldest.high
            size = end - oldest.low
            if size > left:
                oldest.high = end - left
                if node is not None:
                    node.lose(end, left)
                break
            left -= size
            self._unlink(oldest)
            if node is None:
                assert owner is not None, "only the list's end has neither"
                assert owner.own_key is not None, "it stands for the owner's content"
                del self.index[owner.own_key]
            elif len(node.parts) == 1:
                del self.index[node.key]
                node.parts.clear()
            else:
                del node.parts[node.place(oldest)]
                node.lose(end, size)
        return evict

    def find(self, holding: Holding, limit: int, before: Callable[[Run], None]) -> Hit:
        """The longest present prefix of a content, at most ``limit`` blocks. ``before`` is told of each run."""
        hit: Hit = []
        parent: Node | None = None
        if holding.own_key is not None and holding.own_key not in self.index:
            return hit
        for run in holding.runs:
            if run.first >= limit:
                break
            before(run)
            node = self._node(_key(parent, run))
            if node is None:
                break
            high = min(run.end, node.high, limit)
            hit.append((node, run.first, high))
            if high < run.end:
                break
            parent = node
        return hit

    def count_idle(self, hit: Hit) -> int:
        """Blocks of a hit that nobody uses: adopting them takes them out of the free ones."""
        return sum(
            high - low
            for node, first, end in hit
            for part, low, high in _covering(node, first, end)
            if not part.users
        )

    def adopt(self, holding: Holding, hit: Hit) -> None:
        """Make a hit the beginning of what a sequence holds."""
        for node, first, end in hit:
            holding.nodes.append(node)
            for part, low, high in _covering(node, first, end):
                extent = self._cut(part, low) if low > part.low else part
                if high < extent.high:
                    self._cut(extent, high)
                if not extent.users:
                    self._unlink(extent)
                    self.free -= high - low
                elif extent.users == 1:
                    self.shared += high - low
                extent.users += 1
                holding.table.append((extent, high))
        holding.blocks = holding.cached = hit[-1][2] if hit else 0

    def publish(self, holding: Holding, end: int, before: Callable[[Run], None] | None = None) -> None:
        """Make the first ``end`` blocks of a sequence findable; ``before`` is told of each run that gets more.

        It may be left out for what a decoder filled: nobody else grows its runs.
        """
        nodes, cached = holding.nodes, holding.cached
        if cached >= end or (
            holding.own_key is not None and self._publish_whole(holding, holding.own_key, end)
        ):
            return
        while cached < end:
            run = holding.runs[len(nodes) - 1] if nodes else None
            begins = run is None or cached == run.end
            if run is None or begins:
                run = holding.runs[len(nodes)]
            if before is not None:
                before(run)
            if begins:
                key = _key(nodes[-1] if nodes else None, run)
                found = self._node(key)
                if found is None:
                    found = self.index[key] = Node(key, run.first)
                nodes.append(found)
            node = nodes[-1]
            high = run.end if run.end < end else end
            self._enter(holding, node, high)
            holding.cached = cached = high

    def _publish_whole(self, holding: Holding, key: str, end: int) -> bool:
        """`publish` for a stream of its own that nobody else came upon, as one extent; False if somebody did."""
        if holding.whole is not None:
            holding.whole.high = holding.cached = end
            return True
        if key in self.index:
            return False
        holding.whole = self.index[key] = Extent(None, 0, end, 1, holding)
        holding.cached = end
        return True

    def _node(self, key: NodeKey) -> Node | None:
        """The node with a key, for one who may be anybody; None if nothing of it is present."""
        found = self.index.get(key)
        if isinstance(found, Extent):
            assert found.owner is not None, "the others have nodes"
            return self._take_apart(key, found, found.owner)
        return found

    def _take_apart(self, key: NodeKey, extent: Extent, owner: Holding) -> Node:
        """Give an extent a node for the first run, and what its owner has entered behind that one of its own."""
        first = owner.runs[0]
        node = self.index[key] = extent.node = Node(key, 0)
        extent.owner = None
        node.parts.append(extent)
        node.high = extent.high
        nodes = [node]
        if extent.high > first.end:
            following = Node((node, first.end, owner.runs[1].key), first.end)
            self.index[following.key] = following
            self._cut(extent, first.end).node = following
            following.parts.append(node.parts.pop())
            following.high, node.high = node.high, first.end
            nodes.append(following)
        if owner.whole is extent:
            owner.whole = None
            owner.nodes = nodes
            owner.table.append((extent, owner.cached))
        return node

    def release(self, holding: Holding) -> None:
        """Take a user from all that a sequence holds, last block first."""
        if holding.whole is not None:
            holding.whole.users = 0
            self._push(holding.whole)
            holding.whole = None
        for first, end in reversed(holding.table):
            if first.high == end and first.users == 1:
                first.users = 0
                self._push(first)
                continue
            for extent in reversed(_pieces(first, end)):
                extent.users -= 1
                if not extent.users:
                    self._push(extent)
                elif extent.users == 1:
                    self.shared -= extent.high - extent.low
        uncached = holding.blocks - holding.cached
        self.blank += uncached
        self.free += uncached
        holding.blocks = holding.cached = 0
        holding.table.clear()
        holding.nodes.clear()

    def idle_extents(self) -> Iterator[Extent]:
        """Cached content that nobody uses, in the order in which it would be evicted."""
        extent = self._ends.after
        while extent is not self._ends:
            yield extent
            extent = extent.after

    def contents(self) -> Iterator[tuple[bytes, int, int]]:
        """Run and place of each idle block, first to be evicted first; and how many copies were entered before it.

        As anybody who asks, it comes upon what has an owner.
        """
        for extent in list(self.idle_extents()):
            if extent.owner is not None:
                assert extent.owner.own_key is not None, "it stands for the owner's content"
                self._take_apart(extent.owner.own_key, extent, extent.owner)
        names: dict[Node, bytes] = {}
        for extent in self.idle_extents():
            node = extent.node
            assert node is not None, "nobody has an owner any more"
            name = _name(node, names)
            earlier = node.parts[: node.place(extent)] if node.copies else []
            for block in reversed(range(extent.low, extent.high)):
                yield name, block, sum(copy.low <= block < copy.high for copy in earlier)

    def _enter(self, holding: Holding, node: Node, high: int) -> None:
        """Add the sequence's blocks up to ``high`` to a node."""
        low = holding.cached
        if holding.table and node.parts:
            entry, end = holding.table[-1]
            last = entry if entry.high == end else _pieces(entry, end)[-1]
            # In place only if nobody else has it and nothing was entered in this node since.
            if last is node.parts[-1] and last.users == 1 and end == low:
                last.high = high
                holding.table[-1] = (entry, high)
                node.gain(low, high)
                return
        node.gain(low, high)
        extent = Extent(node, low, high, 1)
        node.parts.append(extent)
        holding.table.append((extent, high))

    def _cut(self, extent: Extent, at: int) -> Extent:
        """Cut an extent in two; returns the upper part."""
        node = extent.node
        assert node is not None
        place = node.place(extent)
        upper = Extent(node, at, extent.high, extent.users)
        extent.high = at
        node.parts.insert(place + 1, upper)
        if extent.users:
            upper.rest = extent.rest
            extent.rest = upper
        else:
            # Of one prefix the deeper part is evicted first.
            before = extent.before
            upper.before, upper.after = before, extent
            before.after = extent.before = upper
        return upper

    def _push(self, extent: Extent) -> None:
        """Put an extent that lost its last user at the end of the idle list, joined to its upper neighbour."""
        self.free += extent.high - extent.low
        extent.rest = None
        node, ends = extent.node, self._ends
        last = ends.before
        if node is not None and last.node is node and last.low == extent.high and node.join(extent, last):
            self._unlink(last)
            last = ends.before
        extent.before, extent.after = last, ends
        last.after = ends.before = extent

    def _unlink(self, extent: Extent) -> None:
        before, after = extent.before, extent.after
        before.after, after.before = after, before
        del extent.before, extent.after
        extent.rest = None  # of an idle extent it leads nowhere


def _name(node: Node, names: dict[Node, bytes]) -> bytes:
    """A digest of a run and of all before it; ``names`` has those that are known, and gets it."""
    unnamed = []
    above: Node | None = node
    while above is not None and above not in names:
        unnamed.append(above)
        above = None if isinstance(above.key, str) else above.key[0]
    name = b"" if above is None else names[above]
    for above in reversed(unnamed):
        own = above.key if isinstance(above.key, str) else above.key[1:]
        name = names[above] = blake2b(name + repr(own).encode(), digest_size=16).digest()
    return name


def _pieces(first: Extent, end: int) -> list[Extent]:
    """An extent and its ``rest`` up to ``end``."""
    pieces = [first]
    while pieces[-1].high < end:
        following = pieces[-1].rest
        assert following is not None
        pieces.append(following)
    return pieces


def _covering(node: Node, low: int, high: int) -> list[tuple[Extent, int, int]]:
    """The parts that hold positions ``low .. high-1``, each with its share; of copies the earlier entered."""
    if not node.copies:
        shares = []
        start = bisect_right(node.parts, low, key=_low) - 1
        for part in islice(node.parts, start, None):
            if part.low >= high:
                break
            shares.append((part, max(low, part.low), min(high, part.high)))
        return shares
    found: list[tuple[Extent, int, int]] = []
    open_ranges = [(low, high)]
    for part in node.parts:
        still_open: list[tuple[int, int]] = []
        for start, end in open_ranges:
            first, last = max(start, part.low), min(end, part.high)
            if first >= last:
                still_open.append((start, end))
                continue
            found.append((part, first, last))
            still_open += [gap for gap in ((start, first), (last, end)) if gap[0] < gap[1]]
        open_ranges = still_open
        if not open_ranges:
            break
    return sorted(found, key=lambda share: share[1])


def _low(extent: Extent) -> int:
    return extent.low
