"""What the launch decides before a GPU is asked, and what it does with one: the emulator stands in for it."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import numpy as np
import pytest
from emulated_cupy import emulated_gpu
from hypothesis import given
from hypothesis import strategies as st

from kvplan.errors import InputError
from kvplan.kernels.launch import (
    Cache,
    checked_pairs,
    copy_blocks,
    reshape_and_cache,
    runs_of_blocks,
    swap_in,
    swap_out,
)
from kvplan.kernels.variants import Variant

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


@pytest.fixture
def cupy(compiler: None) -> Iterator[Any]:
    with emulated_gpu():
        yield import_module("cupy")


def test_tokens_are_written_to_their_slots_and_nothing_else(cupy: Any) -> None:
    shape = (5, 16, 2, 64)
    cache = Cache(*(cupy.full(shape, 7.0, dtype=np.float32) for _ in range(2)))
    rows = np.random.default_rng(0).standard_normal((2, 3, 2, 64)).astype(np.float32)
    slots = [33, -1, 4]
    variant = Variant("reshape_and_cache", 64, "float32", "float32")
    reshape_and_cache(variant, cupy.asarray(rows[0]), cupy.asarray(rows[1]), cache, cupy.asarray(slots))
    for written, new in zip((cache.keys, cache.values), rows, strict=True):
        expected = np.full((80, 2, 64), 7.0, dtype=np.float32)
        expected[[33, 4]] = new[[0, 2]]
        np.testing.assert_array_equal(written.get().reshape(80, 2, 64), expected)


def test_blocks_are_copied_in_all_layers(cupy: Any) -> None:
    numbers = np.random.default_rng(0).standard_normal((2, 2, 6, 16, 1, 64)).astype(np.float32)
    caches = [Cache(cupy.asarray(keys), cupy.asarray(values)) for keys, values in numbers]
    copy_blocks(caches, [(0, 3), (0, 5), (4, 1)])
    expected = numbers.copy()
    expected[:, :, [3, 5, 1]] = numbers[:, :, [0, 0, 4]]
    for cache, (keys, values) in zip(caches, expected, strict=True):
        np.testing.assert_array_equal(cache.keys.get(), keys)
        np.testing.assert_array_equal(cache.values.get(), values)


def test_blocks_go_to_the_host_and_come_back_to_others(cupy: Any) -> None:
    numbers = np.random.default_rng(0).standard_normal((6, 16, 1, 64)).astype(np.float32)
    device, host = cupy.asarray(numbers), np.zeros((4, 16, 1, 64), dtype=np.float32)
    swap_out(device, host, [(2, 0), (3, 1), (5, 3)])
    np.testing.assert_array_equal(host, np.stack([numbers[2], numbers[3], np.zeros((16, 1, 64)), numbers[5]]))
    swap_in(device, host, [(0, 1), (4, 3)])
    expected = numbers.copy()
    expected[[0, 4]] = numbers[[3, 5]]
    np.testing.assert_array_equal(device.get(), expected)
    with pytest.raises(InputError, match="the destination of two copies"):
        swap_in(device, host, [(0, 1), (0, 3)])
