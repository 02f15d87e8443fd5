"""The block pool by hand: what is taken first, what is evicted, what a misuse does."""

from __future__ import annotations

import pytest

from kvplan.core.engines.plain_pool import BlockPool


def pool_with_tables(*tables: list[int], num_blocks: int = 9) -> BlockPool:
    """A pool whose blocks were handed out in these tables; ids must count up from 1."""
    pool = BlockPool(num_blocks)
    for table in tables:
        assert pool.take(len(table), []) == table
    return pool


def test_block_0_is_the_null_block_and_never_handed_out() -> None:
    pool = BlockPool(4)
    assert pool.num_free == 3
    assert pool.take(3, []) == [1, 2, 3]
    assert pool.num_free == 0


@pytest.mark.parametrize(("num_blocks", "free"), [(0, 0), (1, 0), (2, 1)])
def test_the_smallest_pools_have_no_block_or_one(num_blocks: int, free: int) -> None:
    pool = BlockPool(num_blocks)
    assert pool.num_free == free
    assert list(pool.free_queue()) == list(range(1, free + 1))


def test_a_table_is_freed_from_its_last_block_to_its_first() -> None:
    pool = pool_with_tables([1, 2, 3])
    pool.enter(1, b"x")
    pool.enter(2, b"y")
    pool.release([1, 2, 3])
    # 3 is blank and goes to the head; of 2 and 1, which are cached, the tail of the prefix goes first.
    assert list(pool.free_queue()) == [3, 4, 5, 6, 7, 8, 2, 1]


def test_blank_blocks_are_taken_last_in_first_out() -> None:
    pool = pool_with_tables([1, 2], [3, 4])
    pool.release([1, 2])
    pool.release([3, 4])
    assert list(pool.free_queue()) == [4, 3, 2, 1, 5, 6, 7, 8]


def test_cached_blocks_are_evicted_from_the_least_recently_freed_on() -> None:
    pool = pool_with_tables([1], [2], [3, 4, 5, 6, 7, 8])
    pool.enter(1, b"x")
    pool.enter(2, b"y")
    pool.release([2])
    pool.release([1])
    evicted: list[int] = []
    assert pool.take(1, evicted) == [2]
    assert evicted == [2]
    assert (pool.find(b"y"), pool.find(b"x")) == (None, 1)
    assert pool.hashes[2] is None


def test_taking_blank_blocks_evicts_nothing() -> None:
    pool = pool_with_tables([1])
    evicted: list[int] = []
    pool.take(5, evicted)
    assert evicted == []


def test_an_idle_block_that_is_held_leaves_the_middle_of_the_queue() -> None:
    pool = pool_with_tables([1], [2], [3], num_blocks=4)
    for block, block_hash in ((1, b"x"), (2, b"y"), (3, b"z")):
        pool.enter(block, block_hash)
        pool.release([block])
    pool.hold([2])
    assert list(pool.free_queue()) == [1, 3]
    assert (pool.num_free, pool.references[2], pool.shared) == (2, 1, 0)


def test_a_block_with_two_users_is_shared_until_one_lets_go() -> None:
    pool = pool_with_tables([1, 2])
    pool.enter(1, b"x")
    pool.hold([1])
    assert (pool.references[1], pool.shared, pool.num_free) == (2, 1, 6)
    pool.hold([1])
    assert (pool.references[1], pool.shared) == (3, 1)
    pool.release([1])
    assert (pool.references[1], pool.shared) == (2, 1)
    pool.release([1])
    assert (pool.references[1], pool.shared, pool.num_free) == (1, 0, 6)
    pool.release([1, 2])
    assert pool.num_free == 8


def test_of_equal_blocks_the_one_entered_first_is_found() -> None:
    pool = pool_with_tables([1, 2, 3])
    for block in (3, 1, 2):
        pool.enter(block, b"x")
    assert pool.find(b"x") == 3
    assert pool.index == {b"x": [3, 1, 2]}


def test_when_the_first_of_equal_blocks_is_evicted_the_next_is_found() -> None:
    pool = pool_with_tables([1], [2], num_blocks=3)
    pool.enter(1, b"x")
    pool.enter(2, b"x")
    pool.release([1])
    evicted: list[int] = []
    pool.take(1, evicted)
    assert evicted == [1]
    assert pool.find(b"x") == 2


def test_an_unknown_hash_is_not_found() -> None:
    assert BlockPool(3).find(b"x") is None


def test_taking_more_than_is_free_is_a_bug_and_changes_nothing() -> None:
    pool = pool_with_tables([1, 2], num_blocks=4)
    with pytest.raises(AssertionError, match="the caller checks"):
        pool.take(2, [])
    assert list(pool.free_queue()) == [3]
    assert pool.references == [0, 1, 1, 0]


def test_freeing_a_block_twice_is_a_bug() -> None:
    pool = pool_with_tables([1])
    pool.release([1])
    with pytest.raises(AssertionError, match="freed twice"):
        pool.release([1])


def test_entering_a_block_twice_is_a_bug() -> None:
    pool = pool_with_tables([1])
    pool.enter(1, b"x")
    with pytest.raises(AssertionError, match="entered once"):
        pool.enter(1, b"y")
