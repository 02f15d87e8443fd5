"""Which blocks hold equal tokens, told from symbolic content without any token list."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from hashlib import blake2b
from typing import NamedTuple

from kvplan.core.request import Segment

BlockHash = bytes


def join_segments(segments: Iterable[Segment]) -> Iterator[Segment]:
    """The same tokens in the fewest segments: neighbours that continue each other become one.

    The result depends on the tokens alone, so equal contents give equal segments.
    """
    current: Segment | None = None
    for segment in segments:
        if segment.length == 0:
            continue
        if (
            current is not None
            and segment.stream == current.stream
            and segment.start == current.start + current.length
        ):
            current = Segment(current.stream, current.start, current.length + segment.length)
            continue
        if current is not None:
            yield current
        current = segment
    if current is not None:
        yield current


def block_hashes(segments: Iterable[Segment], block_size: int, after: int = 0) -> Iterator[BlockHash]:
    """The hash of each full block in turn, lazily; a tail that fills no block has none.

    With ``after``, a hash also covers so many tokens behind its block, and there is one only if there are these.

    A hash covers the block and all before it, so equal hashes mean equal whole prefixes (vLLM 0.33,
    v1/core/kv_cache_utils.py ``hash_block_tokens``; here over segments, not token ids). 128 bits: two
    of 10^9 different prefixes collide with a chance below 10^-20. O(1) for each block and segment.
    """
    parent = b""
    pieces: list[str] = []
    room = block_size + after
    for segment in join_segments(segments):
        # Lengths first and an end to each number: no name can imitate another, or several segments.
        label = f"{len(segment.stream)}:{segment.stream}@"
        start, left = segment.start, segment.length
        while left >= room:
            pieces.append(f"{label}{start}+{room};")
            parent = blake2b(parent + "".join(pieces).encode(), digest_size=16).digest()
            yield parent
            pieces.clear()
            start += room
            left -= room
            room = block_size
        if left:
            pieces.append(f"{label}{start}+{left};")
            room -= left


def cut(segments: Iterable[Segment], start: int, end: int) -> list[Segment]:
    """The tokens ``start .. end-1`` of a content, in the fewest segments. O(segments)."""
    pieces: list[Segment] = []
    place = 0
    for segment in join_segments(segments):
        first, last = max(start, place), min(end, place + segment.length)
        if first < last:
            pieces.append(Segment(segment.stream, segment.start + first - place, last - first))
        place += segment.length
        if place >= end:
            break
    return pieces


#: (stream, start, length), as a `Segment` but made faster.
Piece = tuple[str, int, int]


class Run(NamedTuple):
    """Blocks ``first .. end-1`` of a content: one block, and all that go on in its last stream.

    ``key`` is the first block's own segments. Equal prefixes have equal runs, but for where the last one ends.
    """

    key: tuple[Piece, ...]
    stream: str
    first: int
    end: int


def content_runs(segments: Iterable[Segment], block_size: int) -> list[Run]:
    """The full blocks of a content as runs. O(segments), however long they are."""
    runs: list[Run] = []
    pieces: tuple[Piece, ...] = ()
    room = block_size
    block = 0
    for stream, start, length in join_segments(segments):
        if length < room:
            pieces += ((stream, start, length),)
            room -= length
            continue
        whole, left = divmod(length - room, block_size)
        end = block + 1 + whole
        runs.append(Run((*pieces, (stream, start, room)), stream, block, end))
        block = end
        pieces = ((stream, start + length - left, left),) if left else ()
        room = block_size - left
    return runs
