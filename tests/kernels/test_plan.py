"""The work plan: every token of every head in exactly one item, partial results in exactly one place."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplan.errors import InputError
from kvplan.kernels.plan import SplitCost, WorkPlan, best_chunk, plan

SHAPES = st.fixed_dictionaries(
    {
        "num_kv_heads": st.integers(1, 4),
        "head_tile": st.sampled_from([1, 2, 4, 8, 16]),
        "concurrent_blocks": st.integers(1, 500),
        "window": st.sampled_from([0, 1, 50, 1000]),
        "chunk_tokens": st.sampled_from([None, None, 1, 7, 64, 512]),
    }
)


def planned(contexts: list[int], group: int = 1, **shape: int) -> WorkPlan:
    settings = {"num_kv_heads": 1, "head_tile": 8, "concurrent_blocks": 264} | shape
    return plan(np.array(contexts), num_heads=group * settings["num_kv_heads"], **settings)


@given(st.lists(st.integers(0, 1500), min_size=1, max_size=6), st.integers(1, 20), SHAPES)
def test_every_token_of_every_head_is_in_one_item(
    contexts: list[int], group: int, shape: dict[str, int]
) -> None:
    heads = group * shape["num_kv_heads"]
    work = plan(np.array(contexts), num_heads=heads, **shape)
    done = [np.zeros((heads, context), dtype=int) for context in contexts]
    rows: dict[int, tuple[int, int]] = {}
    items = work.work_items.tolist()
    for request, first_head, num_heads, begin, end, partial in items:
        assert 1 <= num_heads <= shape["head_tile"]
        assert first_head // group == (first_head + num_heads - 1) // group
        assert 0 <= begin <= end <= contexts[request]
        done[request][first_head : first_head + num_heads, begin:end] += 1
        for head in range(num_heads) if partial >= 0 else ():
            assert partial + head not in rows
            rows[partial + head] = (request, first_head + head)
    for context, counts in zip(contexts, done, strict=True):
        begin = max(context - shape["window"], 0) if shape["window"] else 0
        assert np.all(counts[:, begin:] == 1)
        assert not counts[:, :begin].any()
    assert {request for request, *_ in items} == set(range(len(contexts)))
    assert sorted(rows) == list(range(work.num_partials))
    merged = {}
    for request, first_partial, num_splits in work.merge_items.tolist():
        assert num_splits > 1
        for split in range(num_splits):
            merged |= {first_partial + split * heads + head: (request, head) for head in range(heads)}
    assert merged == rows


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=5), st.integers(1, 3000))
def test_with_fixed_chunks_a_request_does_not_depend_on_its_batch(others: list[int], context: int) -> None:
    def chunks(work: WorkPlan, request: int) -> list[tuple[int, int]]:
        items = work.work_items
        return sorted(map(tuple, items[items[:, 0] == request][:, 3:5].tolist()))

    alone = planned([context], chunk_tokens=256)
    crowd = planned([*others, context], chunk_tokens=256, concurrent_blocks=7)
    assert chunks(alone, 0) == chunks(crowd, len(others))


def test_one_long_request_is_split_and_a_full_batch_is_not() -> None:
    alone = planned([16384], group=4, num_kv_heads=8)
    assert len(alone.work_items) >= 200  # of 264 that run at once
    assert alone.merge_items.tolist() == [[0, 0, len(alone.work_items) // 8]]
    full = planned([4096] * 33, num_kv_heads=8)
    assert full.num_partials == 0
    assert len(full.work_items) == 264


def test_chunks_of_a_request_are_equal_but_for_the_last() -> None:
    work = planned([1000, 9000, 10], num_kv_heads=1)
    for request in range(3):
        items = work.work_items[work.work_items[:, 0] == request]
        sizes = np.sort(items[:, 4] - items[:, 3])[::-1]
        assert len(set(sizes[:-1].tolist())) <= 1
        assert not sizes[0] % 64 or len(sizes) == 1
        assert sizes[-1] > 0


def test_longest_items_come_first_and_neighbours_share_tokens() -> None:
    work = planned([100, 500, 300], group=20, chunk_tokens=512)
    sizes = work.work_items[:, 4] - work.work_items[:, 3]
    assert np.all(np.diff(sizes) <= 0)
    assert work.work_items[:3, 0].tolist() == [1, 1, 1]  # 20 heads by 8


def test_the_cost_of_the_merge_keeps_chunks_long() -> None:
    lengths = np.array([8192])
    free = best_chunk(lengths, blocks_a_chunk=8, concurrent_blocks=1000, cost=SplitCost(item=0, split=0))
    dear = best_chunk(lengths, blocks_a_chunk=8, concurrent_blocks=1000, cost=SplitCost(item=64, split=200))
    assert free < 200 < dear
    assert best_chunk(np.array([0, 0]), blocks_a_chunk=1, concurrent_blocks=8) == 64


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_kv_heads": 3, "num_heads": 8}, "8 query heads cannot share 3 KV heads"),
        ({"chunk_tokens": 0}, "a chunk of 0 tokens"),
        ({"context_lens": np.array([-1])}, "must be a list of token counts"),
        ({"context_lens": np.full(40000, 60000), "chunk_tokens": 1}, "too many to number"),
    ],
)
def test_what_cannot_be_planned_is_refused(change: dict[str, int], said: str) -> None:
    usual = {
        "context_lens": np.array([5]),
        "num_heads": 8,
        "num_kv_heads": 8,
        "head_tile": 8,
        "concurrent_blocks": 8,
    }
    with pytest.raises(InputError, match=said):
        plan(**(usual | change))
