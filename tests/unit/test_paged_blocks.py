"""The paper's blocks by hand: counts of users, tables, stored prefixes, copies, the pool on the CPU."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplan.core.content import block_hashes, cut
from kvplan.core.paged_blocks import (
    BlockAllocator,
    BlockError,
    BlockTable,
    Hit,
    Names,
    OutOfBlocks,
    PagedMemory,
)
from kvplan.core.request import Segment


def names(*segments: tuple[str, int, int], block_size: int = 4) -> Names:
    """Of the blocks of a content."""
    return Names(tuple(Segment(*segment) for segment in segments), block_size)


def memory(num_blocks: int = 10, num_cpu_blocks: int = 10, block_size: int = 4) -> PagedMemory:
    return PagedMemory(num_blocks, num_cpu_blocks, block_size)


def table_of(pool: PagedMemory, count: int) -> BlockTable:
    """A table of so many new blocks."""
    table = BlockTable(pool.block_size)
    pool.grow(table, count)
    return table


def stored(pool: PagedMemory, content: Names, tokens: int) -> list[int]:
    """Blocks in which a content of so many tokens lies, whose owner has left."""
    table = table_of(pool, -(-tokens // pool.block_size))
    blocks = list(table.blocks)
    pool.store(table, content, 0, tokens // pool.block_size)
    pool.store_tail(table, content, tokens)
    pool.release(table)
    return blocks


# The allocator


def test_blocks_count_up_and_the_one_freed_last_goes_first() -> None:
    pool = BlockAllocator(5)
    assert pool.allocate(3) == [0, 1, 2]
    pool.release([0])
    pool.release([2])
    assert pool.allocate(3) == [2, 0, 3]


def test_utilization_is_what_is_held_over_all() -> None:
    pool = BlockAllocator(8)
    pool.allocate(2)
    assert (pool.free, pool.held, pool.utilization) == (6, 2, 0.25)
    assert BlockAllocator(0).utilization == 0


def test_more_blocks_than_there_are_is_an_error_and_changes_nothing() -> None:
    pool = BlockAllocator(3)
    pool.allocate(2)
    with pytest.raises(OutOfBlocks, match="2 blocks needed, 1 free") as error:
        pool.allocate(2)
    assert (error.value.needed, error.value.free) == (2, 1)
    assert (pool.free, pool.held) == (1, 2)


def test_a_double_free_is_an_error() -> None:
    pool = BlockAllocator(3)
    pool.allocate()
    pool.release([0])
    with pytest.raises(BlockError, match="block 0 is freed twice"):
        pool.release([0])
    assert pool.free == 3


@pytest.mark.parametrize("block", [-1, 3, 10**9])
def test_a_foreign_block_is_an_error(block: int) -> None:
    pool = BlockAllocator(3)
    pool.allocate(3)
    for use in (pool.hold, pool.users, pool.reclaim, lambda b: pool.release([b])):
        with pytest.raises(BlockError, match=f"block {block} is none of 3"):
            use(block)


def test_a_block_that_was_never_handed_out_cannot_be_freed_or_held() -> None:
    pool = BlockAllocator(3)
    with pytest.raises(BlockError, match="block 1 is freed twice"):
        pool.release([1])
    with pytest.raises(BlockError, match="block 1 is free"):
        pool.hold(1)
    with pytest.raises(BlockError, match="block 1 is not kept"):
        pool.reclaim(1)


def test_a_kept_block_is_neither_held_nor_free_until_it_is_reclaimed() -> None:
    pool = BlockAllocator(2)
    (block,) = pool.allocate()
    assert pool.release([block], keep={block}) == [block]
    assert (pool.free, pool.held, pool.kept) == (1, 0, 1)
    pool.reclaim(block)
    assert (pool.free, pool.kept) == (2, 0)


def test_blocks_with_several_users_are_counted() -> None:
    pool = BlockAllocator(4)
    pool.allocate(2)
    pool.hold(0)
    pool.hold(0)
    pool.hold(1)
    assert ([pool.users(b) for b in range(3)], pool.shared) == ([3, 2, 0], 2)
    pool.release([1, 0])
    assert ([pool.users(b) for b in range(3)], pool.shared) == ([2, 1, 0], 1)


def test_a_pool_costs_nothing_for_blocks_that_nobody_used() -> None:
    assert BlockAllocator(10**15).allocate(2) == [0, 1]


# Tables


def test_a_table_says_where_a_token_lies() -> None:
    table = BlockTable(4, [7, 2])
    table.append(5)
    assert len(table) == 3
    assert [table.block(token) for token in (0, 3, 4, 11)] == [7, 7, 2, 5]
    assert [table.slot(token) for token in (0, 3, 4, 11)] == [28, 31, 8, 23]
    for token in (-1, 12):
        with pytest.raises(IndexError):
            table.slot(token)


# Copy-on-write


def test_three_shared_blocks_of_which_one_is_copied_have_2_2_1_1_users() -> None:
    pool = memory()
    first = table_of(pool, 3)
    second = pool.share(first.blocks)
    assert [pool.gpu.users(block) for block in range(4)] == [2, 2, 2, 0]
    assert pool.copy_on_write(second)
    assert (first.blocks, second.blocks) == ([0, 1, 2], [0, 1, 3])
    assert [pool.gpu.users(block) for block in range(4)] == [2, 2, 1, 1]
    assert not pool.copy_on_write(first), "the last user writes in place"
    assert not pool.copy_on_write(second)


def test_a_copy_without_room_is_an_error_and_changes_nothing() -> None:
    pool = memory(num_blocks=3)
    first = table_of(pool, 3)
    second = pool.share(first.blocks)
    with pytest.raises(OutOfBlocks):
        pool.copy_on_write(second)
    assert second.blocks == [0, 1, 2]
    assert [pool.gpu.users(block) for block in range(3)] == [2, 2, 2]


# Names of blocks


def test_names_are_equal_as_far_as_contents_are() -> None:
    one = names(("s", 0, 10), ("a", 0, 10)).full(0, 5)
    two = names(("s", 0, 4), ("s", 4, 6), ("b", 0, 10)).full(0, 5)
    assert [a == b for a, b in zip(one, two, strict=True)] == [True, True, False, False, False]


def test_equal_blocks_after_different_ones_have_different_names() -> None:
    one, two = names(("a", 0, 4), ("s", 0, 8)).full(0, 3), names(("b", 0, 4), ("s", 0, 8)).full(0, 3)
    assert not {*one} & {*two}


def test_a_stream_that_jumps_is_not_one_that_goes_on() -> None:
    assert names(("s", 0, 4), ("s", 8, 4)).full(0, 2) != names(("s", 0, 4), ("s", 4, 4)).full(0, 2)


def test_names_of_parts_depend_on_the_tokens_alone() -> None:
    one, two = names(("s", 0, 6), ("a", 0, 2)), names(("s", 0, 5), ("s", 5, 1), ("b", 0, 2))
    assert list(one.parts(1, [3, 2, 1]))[1:] == list(two.parts(1, [3, 2, 1]))[1:]
    assert list(one.parts(1, [3])) != list(two.parts(1, [3]))


# Names that hold the marks which a careless encoding would use between its parts.
hostile = st.builds(
    Segment, st.sampled_from(["a", "a:1", "1:a@0+1;", "", ";", "é"]), st.integers(0, 3), st.integers(0, 5)
)


@given(st.lists(st.lists(hostile, max_size=5), min_size=2, max_size=2))
def test_names_tell_contents_apart_as_hashes_of_every_block_do(contents: list[list[Segment]]) -> None:
    (one, other), size = contents, 2
    hashes = [list(block_hashes(content, size)) for content in (one, other)]
    found = [
        Names(tuple(content), size).full(0, len(h)) for content, h in zip((one, other), hashes, strict=True)
    ]
    for first, second in pairwise(found):
        for i, name in enumerate(first):
            for j, another in enumerate(second):
                assert (name == another) == (hashes[0][i] == hashes[1][j])
        assert len(set(first)) == len(first)


def test_a_content_is_cut_by_tokens() -> None:
    content = [Segment("a", 5, 3), Segment("a", 8, 2), Segment("b", 0, 4)]
    assert cut(content, 2, 7) == [Segment("a", 7, 3), Segment("b", 0, 2)]
    assert cut(content, 9, 20) == []


# Stored prefixes


def test_the_longest_stored_prefix_includes_a_partly_filled_block() -> None:
    pool = memory()
    blocks = stored(pool, names(("s", 0, 10)), 10)  # 4 + 4 + 2 tokens
    found = pool.cache.find(names(("s", 0, 10), ("a", 0, 10)), 20, 19)
    assert found == Hit(blocks[:2], blocks[2], 2)
    assert found.tokens(4) == 10
    other = pool.cache.find(names(("s", 0, 9), ("a", 0, 10)), 19, 18)
    assert other == Hit(blocks[:2], None, 0), "its first two tokens together are stored, not the first alone"


def test_a_prompt_that_is_stored_whole_has_one_token_left_to_compute() -> None:
    pool = memory()
    blocks = stored(pool, names(("s", 0, 8)), 8)
    assert pool.cache.find(names(("s", 0, 8)), 8, 7) == Hit(blocks[:1], blocks[1], 3)
    tail = stored(pool, names(("t", 0, 6)), 6)
    assert pool.cache.find(names(("t", 0, 6)), 6, 5) == Hit(tail[:1], tail[1], 1)
    assert pool.cache.find(names(("t", 0, 5)), 5, 4) == Hit(tail[:1], None, 0)


def test_the_longest_of_several_stored_ends_is_found() -> None:
    pool = memory()
    first = stored(pool, names(("s", 0, 5)), 5)
    second = stored(pool, names(("s", 0, 7)), 7)
    # The second's first block is the same as the first's, which was stored first.
    assert pool.cache.find(names(("s", 0, 20)), 20, 19) == Hit(first[:1], second[1], 3)
    assert pool.cache.find(names(("s", 0, 6), ("x", 0, 9)), 15, 14) == Hit(first[:1], first[1], 1)


def test_a_hit_adds_a_user_and_takes_the_block_off_the_list_of_idle_ones() -> None:
    pool = memory()
    blocks = stored(pool, names(("s", 0, 8)), 8)
    assert list(pool.cache.idle) == [1, 0], "the end of a prefix goes before its beginning"
    table = pool.share(blocks)
    assert list(pool.cache.idle) == []
    assert [pool.gpu.users(block) for block in blocks] == [1, 1]
    pool.release(table)
    assert (pool.free, pool.cached) == (10, 2)


def test_the_block_whose_last_user_left_first_is_evicted_first() -> None:
    pool = memory(num_blocks=4)
    stored(pool, names(("a", 0, 4)), 4)
    pool.release(table_of(pool, 3))
    assert stored(pool, names(("b", 0, 4)), 4) == [1]
    again = pool.share([0])
    pool.release(again)  # a was used after b
    table_of(pool, 3)
    assert pool.evicted == [1]
    assert pool.cache.find(names(("a", 0, 5)), 5, 4).blocks == [0]
    assert pool.cache.find(names(("b", 0, 5)), 5, 4).blocks == []


def test_an_evicted_block_is_forgotten_with_all_its_beginnings() -> None:
    pool = memory(num_blocks=2)
    content = names(("s", 0, 9))
    table = table_of(pool, 1)
    pool.store_tail(table, content, 2)
    pool.store_tail(table, content, 3)
    pool.store(table, content, 0, 1)
    pool.release(table)
    assert len(pool.cache) == 1
    table_of(pool, 2)
    assert len(pool.cache) == 0
    for length in (3, 4, 9):
        assert pool.cache.find(content, length, length - 1) == Hit([], None, 0)


def test_a_tail_is_copied_even_if_its_own_block_is_the_next_to_go() -> None:
    pool = memory(num_blocks=2)
    blocks = stored(pool, names(("s", 0, 2)), 2)
    table = BlockTable(4)
    pool.take_tail(table, blocks[0])
    assert table.blocks != blocks
    assert pool.cached == 1
    with pytest.raises(OutOfBlocks, match="2 blocks needed, 1 free"):
        pool.take_tail(BlockTable(4), blocks[0])
    assert (pool.free, pool.cached) == (1, 1)


def test_blocks_set_aside_are_no_longer_free_and_cached_ones_are_emptied_for_them() -> None:
    pool = memory(num_blocks=4)
    stored(pool, names(("s", 0, 8)), 8)
    pool.pledge(3)
    assert (pool.free, pool.cached, pool.evicted) == (1, 1, [1])
    with pytest.raises(OutOfBlocks):
        pool.pledge(2)
    table = BlockTable(4)
    pool.redeem(table, 3)
    assert (len(table), pool.pledged, pool.free) == (3, 0, 1)


# The CPU pool


def test_a_group_goes_to_the_cpu_and_comes_back_with_no_block_lost() -> None:
    pool = memory(num_blocks=6, num_cpu_blocks=4)
    first = table_of(pool, 3)
    second = pool.share(first.blocks)
    pool.copy_on_write(second)  # two shared blocks and one of each
    tables = [first, second]
    assert pool.swap_out(tables) == 4, "what is shared moves once"
    assert (pool.free, pool.cpu.free) == (6, 0)
    assert [pool.cpu.users(block) for block in range(4)] == [2, 2, 1, 1]
    assert pool.swap_in(tables) == 4
    assert (pool.free, pool.cpu.free) == (2, 4)
    assert first.blocks[:2] == second.blocks[:2]
    assert first.blocks[2] != second.blocks[2]
    for table in tables:
        pool.release(table)
    assert (pool.free, pool.gpu.held, pool.gpu.shared) == (6, 0, 0)


def test_a_cpu_pool_without_room_takes_nothing() -> None:
    pool = memory(num_cpu_blocks=2)
    table = table_of(pool, 3)
    assert pool.swap_out([table]) is None
    assert (table.blocks, pool.free, pool.cpu.free) == ([0, 1, 2], 7, 2)


def test_a_gpu_pool_without_room_takes_nothing_back() -> None:
    pool = memory(num_blocks=3)
    table = table_of(pool, 3)
    pool.swap_out([table])
    there = list(table.blocks)
    other = table_of(pool, 1)
    with pytest.raises(OutOfBlocks):
        pool.swap_in([table])
    assert (table.blocks, pool.free, len(other)) == (there, 2, 1)


def test_blocks_that_another_group_uses_stay_for_it_when_one_goes_to_the_cpu() -> None:
    pool = memory()
    first = table_of(pool, 2)
    other = pool.share(first.blocks)
    pool.swap_out([first])
    assert [pool.gpu.users(block) for block in other.blocks] == [1, 1]
    assert pool.free == 8


def test_what_the_cache_knows_of_a_swapped_group_can_still_be_hit() -> None:
    pool = memory()
    content = names(("s", 0, 8))
    table = table_of(pool, 2)
    pool.store(table, content, 0, 2)
    pool.swap_out([table])
    assert pool.cache.find(names(("s", 0, 9)), 9, 8).blocks == [0, 1]
    assert pool.free == 10
