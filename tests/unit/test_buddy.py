"""The buddy allocator by hand: splits, merges, holes, and what is refused."""

from __future__ import annotations

import pytest

from kvplan.core.buddy import BuddyAllocator, piece_size


def allocated(memory: BuddyAllocator, slots: int) -> int:
    start = memory.allocate(slots)
    assert start is not None
    return start


@pytest.mark.parametrize(
    ("slots", "piece"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (2047, 2048), (2048, 2048)]
)
def test_a_piece_is_the_next_power_of_two(slots: int, piece: int) -> None:
    assert piece_size(slots) == piece


def test_a_piece_is_split_in_halves_until_it_just_holds_what_is_asked_for() -> None:
    memory = BuddyAllocator(16)
    assert memory.free_pieces() == [(0, 16)]
    assert allocated(memory, 3) == 0  # 16 -> 8 + 8 -> 4 + 4
    assert memory.held_pieces() == [(0, 4)]
    assert memory.free_pieces() == [(4, 4), (8, 8)]
    assert allocated(memory, 4) == 4  # the free 4, not a half of the 8
    assert memory.free_pieces() == [(8, 8)]
    assert allocated(memory, 1) == 8
    assert memory.free_pieces() == [(9, 1), (10, 2), (12, 4)]
    assert (memory.free_slots, memory.largest_free) == (7, 4)


def test_free_halves_merge_up_to_the_whole() -> None:
    memory = BuddyAllocator(16)
    starts = [allocated(memory, 4) for _ in range(4)]
    assert starts == [0, 4, 8, 12]
    memory.release(4)
    memory.release(8)  # neighbours, but no halves of one piece
    assert memory.free_pieces() == [(4, 4), (8, 4)]
    memory.release(0)
    assert memory.free_pieces() == [(0, 8), (8, 4)]
    memory.release(12)
    assert memory.free_pieces() == [(0, 16)]


def test_a_pool_that_is_no_power_of_two_is_one_piece_for_each_binary_digit() -> None:
    memory = BuddyAllocator(13)
    assert memory.free_pieces() == [(0, 8), (8, 4), (12, 1)]
    held = [allocated(memory, slots) for slots in (8, 4, 1)]
    assert (memory.free_slots, memory.largest_free, memory.external_fragmentation) == (0, 0, 0)
    for start in reversed(held):
        memory.release(start)
    assert memory.free_pieces() == [(0, 8), (8, 4), (12, 1)]


def test_what_no_piece_holds_changes_nothing() -> None:
    memory = BuddyAllocator(12)
    assert memory.allocate(9) is None
    assert memory.free_pieces() == [(0, 8), (8, 4)]
    allocated(memory, 8)
    assert memory.allocate(5) is None
    assert memory.free_pieces() == [(8, 4)]


def test_free_slots_that_no_piece_unites_are_lost_to_holes() -> None:
    memory = BuddyAllocator(16)
    for _ in range(4):
        allocated(memory, 4)
    memory.release(0)
    memory.release(8)
    assert (memory.free_slots, memory.largest_free) == (8, 4)
    assert memory.external_fragmentation == 0.5
    assert memory.lost_to_holes(5) == 8  # 8 are free, but in no piece
    assert memory.lost_to_holes(8) == 8
    assert memory.lost_to_holes(4) == 0  # a piece holds them
    assert memory.lost_to_holes(9) == 0  # more than is free: full, not in holes


def test_freeing_twice_or_what_is_no_piece_is_an_error_that_changes_nothing() -> None:
    memory = BuddyAllocator(8)
    start = allocated(memory, 4)
    memory.release(start)
    for wrong in (start, 4, 99, -1):
        with pytest.raises(ValueError, match=f"no piece is allocated at slot {wrong}"):
            memory.release(wrong)
    assert memory.free_pieces() == [(0, 8)]


def test_an_empty_pool_gives_nothing() -> None:
    memory = BuddyAllocator(0)
    assert memory.allocate(1) is None
    assert (memory.largest_free, memory.external_fragmentation) == (0, 0)
