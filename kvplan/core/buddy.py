"""The buddy allocator: contiguous pieces of 2^k slots, split in halves and merged again.

Knowlton 1965; Knuth, The Art of Computer Programming 1, section 2.5. The paper of vLLM (Kwon et al. 2023, section
6.1) gives it to its Orca baselines.
"""

from __future__ import annotations


def piece_size(slots: int) -> int:
    """Slots of the smallest piece that holds ``slots``: the next power of two.

    >>> piece_size(1), piece_size(5), piece_size(8)
    (1, 8, 8)
    """
    return 1 << (slots - 1).bit_length()


class BuddyAllocator:
    """Slots ``0 .. size-1``, in pieces of powers of two that start at multiples of their size.

    A ``size`` that is no power of two begins as one piece for each of its binary digits, the largest first.
    `allocate` and `release` are O(log size).
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.free_slots = 0
        #: By order k: starts of the free pieces of 2^k slots, the last freed at the end; and which orders have any.
        self._free: list[dict[int, None]] = [{} for _ in range(size.bit_length())]
        self._orders = 0
        self._held: dict[int, int] = {}
        start = 0
        for order in reversed(range(size.bit_length())):
            if size >> order & 1:
                self._put(start, order)
                start += 1 << order

    @property
    def largest_free(self) -> int:
        """Slots of the largest free piece; 0 if there is none."""
        return 1 << self._orders.bit_length() >> 1

    @property
    def external_fragmentation(self) -> float:
        """Share of the free slots that lies outside the largest free piece; 0 where nothing is free."""
        return 1 - self.largest_free / self.free_slots if self.free_slots else 0.0

    def lost_to_holes(self, slots: int) -> int:
        """All free slots, if ``slots`` are no more than these and yet no piece holds them; else 0."""
        return self.free_slots if self.largest_free < slots <= self.free_slots else 0

    def allocate(self, slots: int) -> int | None:
        """Take the smallest piece for ``slots`` and return its start; None, and no change, if none is free."""
        order = (slots - 1).bit_length()
        fitting = self._orders >> order
        if not fitting:
            return None
        found = order + (fitting & -fitting).bit_length() - 1
        start = self._take_any(found)
        while found > order:  # split: the upper half stays free
            found -= 1
            self._put(start + (1 << found), found)
        self._held[start] = order
        return start

    def held(self, start: int) -> int:
        """Slots of the piece that was allocated at ``start``."""
        return 1 << self._held[start]

    def release(self, start: int) -> None:
        """Free the piece at ``start``; two free halves of a piece become one again.

        Raises `ValueError`, and changes nothing, for what is not allocated.
        """
        if start not in self._held:
            raise ValueError(f"no piece is allocated at slot {start}")
        order = self._held.pop(start)
        while order + 1 < len(self._free) and start ^ (1 << order) in self._free[order]:
            buddy = start ^ (1 << order)
            self._take(buddy, order)
            start = min(start, buddy)
            order += 1
        self._put(start, order)

    def free_pieces(self) -> list[tuple[int, int]]:
        """``(start, slots)`` of every free piece, by start."""
        return sorted((start, 1 << order) for order, starts in enumerate(self._free) for start in starts)

    def held_pieces(self) -> list[tuple[int, int]]:
        """``(start, slots)`` of every allocated piece, by start."""
        return sorted((start, 1 << order) for start, order in self._held.items())

    def _put(self, start: int, order: int) -> None:
        self._free[order][start] = None
        self._orders |= 1 << order
        self.free_slots += 1 << order

    def _take(self, start: int, order: int) -> None:
        del self._free[order][start]
        self._note_taken(order)

    def _take_any(self, order: int) -> int:
        start, _ = self._free[order].popitem()
        self._note_taken(order)
        return start

    def _note_taken(self, order: int) -> None:
        self.free_slots -= 1 << order
        if not self._free[order]:
            self._orders ^= 1 << order
