"""What the launch decides before a GPU is asked: which copies may run at once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplan.errors import InputError
from kvplan.kernels.launch import checked_pairs, runs_of_blocks

PAIRS = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 40)), unique_by=lambda pair: pair[1], max_size=30
)


@pytest.mark.parametrize(
    ("pairs", "said"),
    [
        ([(0, 1), (2, 1)], "the destination of two copies"),
        ([(0, 1), (1, 2)], "copied and written at once"),
        ([(0, 0)], "copied and written at once"),
        ([(0, 10)], "does not exist"),
        ([(-1, 3)], "does not exist"),
    ],
)
def test_copies_that_depend_on_their_order_are_refused(pairs: list[tuple[int, int]], said: str) -> None:
    with pytest.raises(InputError, match=said):
        checked_pairs(pairs, 10)


def test_one_block_may_be_copied_to_several() -> None:
    assert checked_pairs([(3, 4), (3, 5)], 10).tolist() == [[3, 4], [3, 5]]
    assert checked_pairs([], 10).shape == (0, 2)


@given(PAIRS)
def test_runs_copy_what_the_pairs_say(pairs: list[tuple[int, int]]) -> None:
    runs = runs_of_blocks(np.array(pairs, dtype=np.int64).reshape(-1, 2))
    copied = [(source + i, target + i) for source, target, blocks in runs for i in range(blocks)]
    assert sorted(copied) == sorted(pairs)


def test_adjacent_blocks_are_one_run() -> None:
    pairs = np.array([[7, 1], [5, 9], [6, 0], [8, 2], [20, 3]])
    assert runs_of_blocks(pairs) == [(5, 9, 1), (6, 0, 3), (20, 3, 1)]
