"""Blocks of several groups in one pool, as runs: the pool of the fast engine for windows beside full attention.

As in `extents`, blocks without content are a number. Cached content is kept in *spans*: physical copies of neighbouring
blocks of one group with the same users. What a window has is not closed under prefixes: a chain may have gaps, and
stands alone, under a digest of all that comes before it.

Invariants, between calls: (1) ``free`` = ``blank`` + sizes of idle spans; (2) a span's ``users`` counts the tables that
cover it; (3) it is in the idle list if and only if it has no users; (4) spans of a chain are sorted and apart, or, with
``overlap``, of two that overlap the earlier listed was entered earlier; (5) a chain is indexed if and only if it has
spans; (6) of a full group, what is present is closed under prefixes; (7) ``used`` of a shelf counts the blocks of its
group that have users, ``shared`` those with several.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from itertools import islice

from kvplan.core.content import content_runs
from kvplan.core.request import Segment


class KeyedRun:
    """Blocks ``first .. end-1`` of a content, as `content.Run`; ``key`` covers them and all before them.

    It goes on in ``stream``. Equal prefixes have equal keys.
    """

    __slots__ = ("end", "first", "key", "stream")

    def __init__(self, key: bytes, stream: str, first: int, end: int) -> None:
        self.key = key
        self.stream = stream
        self.first = first
        self.end = end


def keyed_runs(segments: Iterable[Segment], block_size: int) -> list[KeyedRun]:
    """The full blocks of a content as runs with keys that stand alone. O(segments)."""
    runs: list[KeyedRun] = []
    key = b""
    for pieces, stream, first, end in content_runs(segments, block_size):
        key = blake2b(key + repr((first, pieces)).encode(), digest_size=16).digest()
        runs.append(KeyedRun(key, stream, first, end))
    return runs


class Chain:
    """Content of one run, as far as a group has blocks of it in ``spans``."""

    __slots__ = ("key", "overlap", "shelf", "spans")

    def __init__(self, shelf: Shelf, key: bytes) -> None:
        self.shelf = shelf
        self.key = key
        self.spans: list[Span] = []
        self.overlap = False

    def add(self, span: Span) -> None:
        """List a span that was entered now."""
        spans = self.spans
        if not self.overlap:
            place = bisect_left(spans, span.low, key=_low)
            if (not place or spans[place - 1].high <= span.low) and (
                place == len(spans) or spans[place].low >= span.high
            ):
                spans.insert(place, span)
                return
            self.overlap = True
        spans.append(span)

    def remove(self, span: Span) -> None:
        """Strike off a span that lost its content."""
        self.spans.remove(span)
        if len(self.spans) < 2:
            self.overlap = False
            if not self.spans:
                del self.shelf.chains[self.key]

    @property
    def high(self) -> int:
        """The end of what is present."""
        return max(span.high for span in self.spans) if self.overlap else self.spans[-1].high

    def present(self) -> list[tuple[int, int]]:
        """What is present, as ranges in descending order, apart from each other or end to end."""
        ranges = [(span.low, span.high) for span in self.spans]
        if not self.overlap:
            return ranges[::-1]
        ranges.sort()
        merged = [ranges[0]]
        for low, high in ranges[1:]:
            if low <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
            else:
                merged.append((low, high))
        return merged[::-1]

    def covering(self, low: int, high: int) -> list[tuple[Span, int, int]]:
        """The spans that hold blocks ``low .. high-1``, each with its share; of copies the earlier entered."""
        found: list[tuple[Span, int, int]] = []
        if not self.overlap:
            start = bisect_right(self.spans, low, key=_low) - 1
            for span in islice(self.spans, start, None):
                if span.low >= high:
                    break
                found.append((span, max(low, span.low), min(high, span.high)))
            return found
        gaps = [(low, high)]
        for span in self.spans:
            still: list[tuple[int, int]] = []
            for start, end in gaps:
                first, last = max(start, span.low), min(end, span.high)
                if first >= last:
                    still.append((start, end))
                    continue
                found.append((span, first, last))
                still += [gap for gap in ((start, first), (last, end)) if gap[0] < gap[1]]
            gaps = still
            if not gaps:
                break
        return sorted(found, key=lambda share: share[1])


class Shelf:
    """The findable content of one group, and how many of its blocks have users, or several of them."""

    __slots__ = ("chains", "shared", "used")

    def __init__(self) -> None:
        self.chains: dict[bytes, Chain] = {}
        self.used = 0
        self.shared = 0

    def prefix(self, run: KeyedRun) -> int:
        """The end of what a full group has of a run whose predecessors it has; the run's beginning if nothing."""
        chain = self.chains.get(run.key)
        return run.first if chain is None else min(run.end, chain.high)


class Span:
    """Copies of blocks ``low .. high-1`` of a chain with the same ``users``.

    Cut in two while held, it keeps its lower part, and ``rest`` leads holders of the whole on to the upper. Only in
    the idle list it has neighbours.
    """

    __slots__ = ("after", "before", "chain", "high", "low", "rest", "users")
    before: Span
    after: Span

    def __init__(self, chain: Chain | None, low: int, high: int, users: int) -> None:
        self.chain = chain
        self.low = low
        self.high = high
        self.users = users
        self.rest: Span | None = None


#: The findable blocks in one group's table of a sequence: spans in order, each with the end up to which it and its
#: ``rest`` are held. All other blocks of the table are without content.
Table = deque[tuple[Span, int]]

#: Part of a hit: blocks of one group in a span.
Share = tuple[int, Span, int, int]


class WindowPool:
    """Free blocks, the content of all groups, and who uses it."""

    def __init__(self, usable_blocks: int, num_groups: int) -> None:
        #: Blocks that can be taken, and those of them without content.
        self.free = self.blank = usable_blocks
        self.shelves = [Shelf() for _ in range(num_groups)]
        # Both ends of the idle list: the first to be evicted comes after it.
        self._ends = Span(None, 0, 0, 0)
        self._ends.before = self._ends.after = self._ends

    @property
    def idle(self) -> int:
        """Blocks with content that nobody uses."""
        return self.free - self.blank

    @property
    def shared(self) -> int:
        """Blocks with more than one user."""
        return sum(shelf.shared for shelf in self.shelves)

    def take(self, count: int) -> int:
        """Take blocks, those without content first, then the oldest content; returns how many lost content.

        Whose they are, the caller adds to ``used`` of the shelves. ``count`` must not exceed ``free``. O(spans
        evicted).
        """
        evicted = max(0, count - self.blank)
        self.evict(evicted)
        self.free -= count
        self.blank -= count
        return evicted

    def evict(self, count: int) -> None:
        """Let the oldest ``count`` idle blocks lose their content."""
        self.blank += count
        while count:
            oldest = self._ends.after
            assert oldest.chain is not None, "only the list's end has no chain"
            size = oldest.high - oldest.low
            if size > count:
                oldest.high -= count
                break
            count -= size
            self._unlink(oldest)
            oldest.chain.remove(oldest)

    def put_back(self, group: int, count: int) -> None:
        """Free blocks of a group without content."""
        self.shelves[group].used -= count
        self.free += count
        self.blank += count

    def shares(self, group: int, runs: list[KeyedRun], low: int, high: int) -> list[Share]:
        """The spans of a group that hold blocks ``low .. high-1`` of a content; they must be there."""
        chains = self.shelves[group].chains
        return [
            (group, *share)
            for run in runs
            if run.first < high and run.end > low
            for share in chains[run.key].covering(max(low, run.first), min(high, run.end))
        ]

    def hold(self, tables: list[Table], shares: list[Share]) -> None:
        """Make shares of a hit the beginning of what a sequence holds."""
        for group, span, low, high in reversed(shares):  # of one span the upper share is cut off first
            held = self._cut(span, low) if low > span.low else span
            if high < held.high:
                self._cut(held, high)
            if not held.users:
                self._unlink(held)
                self.free -= high - low
                self.shelves[group].used += high - low
            elif held.users == 1:
                self.shelves[group].shared += high - low
            held.users += 1
            tables[group].appendleft((held, high))

    def enter(self, group: int, table: Table, runs: list[KeyedRun], low: int, high: int) -> None:
        """Make a sequence's blocks ``low .. high-1`` findable; until now they were without content."""
        shelf = self.shelves[group]
        for run in runs if runs[0].end > low else runs[_run_at(runs, low) :]:
            if run.first >= high:
                break
            first, end = max(low, run.first), min(high, run.end)
            chain = shelf.chains.get(run.key)
            if chain is None:
                chain = shelf.chains[run.key] = Chain(shelf, run.key)
            elif table and self._grow(table, chain, first, end):
                continue
            span = Span(chain, first, end, 1)
            chain.add(span)
            table.append((span, end))

    def _grow(self, table: Table, chain: Chain, low: int, high: int) -> bool:
        """Add blocks to the last span of a table in place, if nobody else has it and no copy comes in between."""
        span, end = table[-1]
        if span.chain is not chain or span.high != low or end != low or span.users != 1:
            return False
        if chain.spans[-1] is not span:
            return False
        span.high = high
        table[-1] = (span, high)
        return True

    def drop(self, group: int, table: Table, first: int, end: int) -> int:
        """Free blocks ``first .. end-1``, the first of a table, last first; returns how many had no content."""
        blank = end - first
        if table and table[0][0].low < end:
            pieces: list[Span] = []
            while table and table[0][0].low < end:
                span, last = table[0]
                if span.high > end:
                    self._cut(span, end)
                pieces.append(span)
                blank -= span.high - span.low
                if span.high == last:
                    table.popleft()
                else:
                    assert span.rest is not None
                    table[0] = (span.rest, last)
            for span in reversed(pieces):
                self._let_go(span)
        self.put_back(group, blank)
        return blank

    def release(self, group: int, table: Table, first: int, length: int) -> None:
        """Free what a sequence has in one group, blocks ``first .. length-1``, last block first."""
        blank = length - first
        while table:
            span, end = table.pop()
            pieces = [span]
            while pieces[-1].high < end:
                rest = pieces[-1].rest
                assert rest is not None
                pieces.append(rest)
            for piece in reversed(pieces):
                blank -= piece.high - piece.low
                self._let_go(piece)
        self.put_back(group, blank)

    def idle_spans(self) -> Iterator[Span]:
        """Cached content that nobody uses, in the order in which it would be evicted."""
        span = self._ends.after
        while span is not self._ends:
            yield span
            span = span.after

    def contents(self) -> Iterator[tuple[int, bytes, int, int]]:
        """Group, chain and place of each idle block, first to be evicted first; and how many copies are before it."""
        for span in self.idle_spans():
            chain = span.chain
            assert chain is not None
            group = self.shelves.index(chain.shelf)
            earlier = chain.spans[: chain.spans.index(span)] if chain.overlap else []
            for block in reversed(range(span.low, span.high)):
                yield group, chain.key, block, sum(copy.low <= block < copy.high for copy in earlier)

    def _let_go(self, span: Span) -> None:
        assert span.chain is not None
        shelf, size = span.chain.shelf, span.high - span.low
        span.users -= 1
        if not span.users:
            self.free += size
            shelf.used -= size
            span.rest = None
            self._link(span, after=self._ends.before)
        elif span.users == 1:
            shelf.shared -= size

    def _cut(self, span: Span, at: int) -> Span:
        """Cut a span in two; returns the upper part."""
        chain = span.chain
        assert chain is not None
        upper = Span(chain, at, span.high, span.users)
        span.high = at
        chain.spans.insert(chain.spans.index(span) + 1, upper)
        if span.users:
            upper.rest = span.rest
            span.rest = upper
        else:
            self._link(upper, after=span.before)  # the deeper part is evicted first
        return upper

    def _link(self, span: Span, *, after: Span) -> None:
        follower = after.after
        span.before, span.after = after, follower
        follower.before = after.after = span

    def _unlink(self, span: Span) -> None:
        before, after = span.before, span.after
        before.after, after.before = after, before
        del span.before, span.after
        span.rest = None  # of an idle span it leads nowhere


def window_hit(shelves: list[Shelf], runs: list[KeyedRun], limit: int, need: int, unit: int) -> int:
    """The end of the last ``need`` neighbouring blocks that all of these groups have, at most ``limit``.

    It is a multiple of ``unit`` blocks. If nowhere so many are neighbours: the end of those from block 0 on.
    """
    end = low = -1
    for first, last in _present(shelves, runs, limit):
        if last == low and end >= 0:
            low = first
        else:
            end, low = last // unit * unit, first
            if end <= low:
                end = -1
                continue
        if end - low >= need:
            return end
    return end if low == 0 and end > 0 else 0


def _present(shelves: list[Shelf], runs: list[KeyedRun], limit: int) -> Iterator[tuple[int, int]]:
    """What all of these groups have of the first ``limit`` blocks, as ranges in descending order."""
    for run in reversed(runs):
        if run.first >= limit:
            continue
        ranges: list[tuple[int, int]] = []
        for number, shelf in enumerate(shelves):
            chain = shelf.chains.get(run.key)
            if chain is None:
                ranges = []
                break
            ranges = _in_both(ranges, chain.present()) if number else chain.present()
        for first, high in ranges:
            end = min(high, run.end, limit)
            if first < end:
                yield first, end


def _in_both(ours: list[tuple[int, int]], theirs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The common part of two lists of ranges in descending order."""
    common: list[tuple[int, int]] = []
    i = j = 0
    while i < len(ours) and j < len(theirs):
        low, high = max(ours[i][0], theirs[j][0]), min(ours[i][1], theirs[j][1])
        if low < high:
            common.append((low, high))
        if ours[i][0] > theirs[j][0]:
            i += 1
        else:
            j += 1
    return common


def _run_at(runs: list[KeyedRun], block: int) -> int:
    return bisect_right(runs, block, key=_first) - 1


def _low(span: Span) -> int:
    return span.low


def _first(run: KeyedRun) -> int:
    return run.first
