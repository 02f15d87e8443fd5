"""Maps of a pool: by hand, and against what the engines count."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplan.core.cost import constant
from kvplan.core.engine import Holding, PoolPicture, SchedulerConfig, Turn
from kvplan.core.engines.contiguous import RESERVATIONS, Contiguous, ContiguousConfig
from kvplan.core.engines.paged import Paged, PagedConfig
from kvplan.core.engines.vllm_plain import VllmPlain
from kvplan.core.metrics import Metrics
from kvplan.core.pool_map import Extent, FullestStep, PoolMap, Resident, TableRun, pool_map
from kvplan.core.request import Request, Segment
from kvplan.core.simulate import StepRecord, run
from kvplan.drawing import Row, draw_lane, draw_pool
from kvplan.topics.parts import Stretch, stretches

#: Blocks 1 to 9 of 4 slots: a holds 1, 2 and 5 with 9 tokens, b 1, 2 and 7 with 8; 4 and 9 could be reused.
PICTURE = PoolPicture(
    cell_tokens=4,
    first=1,
    num_cells=9,
    holdings=[Holding("a", (1, 2, 5), 9), Holding("b", (1, 2, 7), 8)],
    contents=[None, "x", "y", None, "z", None, None, None, None, "w"],
)


def test_cells_have_the_state_that_their_users_and_content_give_them() -> None:
    found = pool_map(PICTURE, step=3)
    assert found.extents == (
        Extent(1, 2, "shared", None),
        Extent(3, 1, "free", None),
        Extent(4, 1, "cached", None),
        Extent(5, 1, "held", "a"),
        Extent(6, 1, "free", None),
        Extent(7, 1, "reserved", "b"),
        Extent(8, 1, "free", None),
        Extent(9, 1, "cached", None),
    )
    assert found.cells == {"held": 1, "reserved": 1, "shared": 2, "cached": 2, "free": 3}
    assert found.requests == (Resident("a", 3, 2, 9), Resident("b", 3, 2, 8))


def test_a_table_is_told_in_runs_that_end_where_blocks_jump_or_users_change() -> None:
    assert pool_map(PICTURE, step=3, table_of="a").table == (TableRun(0, 1, 2, 8, 2), TableRun(2, 5, 1, 1, 1))
    assert pool_map(PICTURE, step=3, table_of="b").table[1] == TableRun(2, 7, 1, 0, 1)


def test_the_json_says_what_the_map_says() -> None:
    document = pool_map(PICTURE, step=3, time_s=0.5, table_of="a").to_dict()
    assert (document["step"], document["time_s"], document["num_cells"]) == (3, 0.5, 9)
    assert document["block_table"] == {
        "request": "a",
        "runs": [
            {"logical": 0, "physical": 1, "cells": 2, "tokens": 8, "users": 2},
            {"logical": 2, "physical": 5, "cells": 1, "tokens": 1, "users": 1},
        ],
    }


def test_a_picture_of_a_pool_is_a_character_a_cell() -> None:
    drawing = draw_pool(pool_map(PICTURE, step=3), columns=5, most_rows=4)
    assert (drawing.per_mark, drawing.letters) == (1, {"a": "A", "b": "B"})
    assert drawing.rows == (Row(1, "##.~A", 0), Row(6, ".b.~", 0))


def test_a_large_pool_is_drawn_with_several_cells_a_character_and_equal_rows_once() -> None:
    picture = PoolPicture(1, 0, 1000, [Holding("a", range(30), 30)])
    drawing = draw_pool(pool_map(picture, step=0), columns=10, most_rows=10)
    assert drawing.per_mark == 10
    assert drawing.rows == (Row(0, "AAA.......", 0), Row(100, "..........", 8))


def test_a_character_shows_what_most_of_its_cells_are() -> None:
    picture = PoolPicture(1, 0, 4, [Holding("a", (0,), 1), Holding("b", (1, 2), 2)])
    assert draw_pool(pool_map(picture, step=0), columns=1, most_rows=1).rows[0].marks == "B"


def test_whoever_has_no_letter_is_drawn_all_the_same() -> None:
    picture = PoolPicture(1, 0, 56, [Holding(str(i), (2 * i, 2 * i + 1), 1) for i in range(28)])
    marks = draw_pool(pool_map(picture, step=0), columns=56, most_rows=1).rows[0].marks
    assert marks.startswith("AaBbCc")
    assert marks.endswith("Zz+-+-")


def test_a_lane_shows_loud_marks_and_else_the_middle_of_its_steps() -> None:
    lane = (Stretch(0, 1, "p"), Stretch(1, 8, "="))
    assert draw_lane(lane, 10, 1) == "p========."
    assert draw_lane(lane, 10, 5) == "=="
    assert draw_lane(lane, 10, 5, loud="p") == "p="


def test_steps_become_stretches() -> None:
    assert stretches("pp..=") == (Stretch(0, 2, "p"), Stretch(4, 1, "="))
    assert stretches("") == ()


# Engines

REQUESTS = st.lists(
    st.builds(
        lambda arrival, shared, own, output, samples: (arrival, shared, own, output, samples),
        st.integers(0, 12),
        st.integers(0, 9),
        st.integers(1, 9),
        st.integers(1, 9),
        st.integers(1, 2),
    ),
    min_size=1,
    max_size=8,
)


def make(rows: list[tuple[int, int, int, int, int]], *, samples: bool) -> list[Request]:
    return [
        Request(
            f"r{i}",
            arrival,
            shared + own,
            output,
            content=(Segment("s", 0, shared), Segment(f"p:r{i}", 0, own)),
            samples=count if samples else 1,
        )
        for i, (arrival, shared, own, output, count) in enumerate(sorted(rows))
    ]


def settle(engine: Any, requests: list[Request]) -> list[tuple[Turn[Any], PoolMap]]:
    """Every step's turn, with the map of the pool in it."""
    seen: list[tuple[Turn[Any], PoolMap]] = []

    def observe(record: StepRecord) -> None:
        if isinstance(record.turn, Turn):
            picture = engine.picture(record.turn)
            seen.append((record.turn, pool_map(picture, step=record.step)))

    config = engine.config
    metrics = Metrics(
        num_gpu_blocks=config.num_gpu_blocks,
        usable_blocks=config.usable_blocks,
        block_size=config.block_size,
        prefix_caching=False,
        seconds_per_tick=None,
    )
    run(requests, engine, constant(1), metrics, step_numbered=True, observe=observe)
    return seen


def agree(seen: list[tuple[Turn[Any], PoolMap]], usable: int) -> None:
    for turn, found in seen:
        cells = found.cells
        assert sum(cells.values()) == found.num_cells == usable
        assert cells["free"] + cells["cached"] == turn.free_blocks
        assert cells["shared"] == turn.shared_blocks
        assert cells["cached"] == turn.cached_blocks


@settings(max_examples=60, deadline=None)
@given(REQUESTS, st.integers(8, 20), st.booleans())
def test_the_map_of_vllm_counts_as_its_turns_do(
    rows: list[tuple[int, int, int, int, int]], usable: int, caching: bool
) -> None:
    config = SchedulerConfig(usable + 1, 4, 32, 8, 30, enable_prefix_caching=caching)
    agree(settle(VllmPlain(config), make(rows, samples=False)), usable)


@settings(max_examples=60, deadline=None)
@given(REQUESTS, st.integers(14, 24), st.booleans(), st.sampled_from([0, 100]))
def test_the_map_of_the_papers_engine_counts_as_its_turns_do(
    rows: list[tuple[int, int, int, int, int]], usable: int, caching: bool, cpu_blocks: int
) -> None:
    config = PagedConfig(usable, 4, 32, 8, 30, enable_prefix_caching=caching, num_cpu_blocks=cpu_blocks)
    agree(settle(Paged(config, watched=True), make(rows, samples=True)), usable)


@settings(max_examples=30, deadline=None)
@given(REQUESTS, st.sampled_from(RESERVATIONS))
def test_the_map_of_reservations_counts_as_turns_do(
    rows: list[tuple[int, int, int, int, int]], reservation: Any
) -> None:
    config = ContiguousConfig(reservation, 128, 64, 8, 32)
    seen = settle(Contiguous(config, watched=True), make(rows, samples=False))
    agree(seen, 128)
    for turn, found in seen:
        assert not found.cells["shared"]
        if reservation == "static":  # what the finished leave behind lies there, but is no longer needed
            assert found.cells["reserved"] <= turn.empty_slots
        else:
            assert found.cells["reserved"] == turn.empty_slots


@pytest.mark.parametrize(("at_step", "expected"), [(None, 4), (2, 2)])
def test_the_fullest_step_is_the_first_of_the_fullest_or_the_one_asked_for(
    at_step: int | None, expected: int
) -> None:
    # A prompt of 4 fills block 1 in step 0; tokens 5 to 8 lie in block 2 (steps 1 to 4). Another comes in step 4.
    engine = VllmPlain(SchedulerConfig(10, 4, 32, 8, 30))
    fullest = FullestStep(engine, at_step)
    metrics = Metrics(num_gpu_blocks=10, block_size=4, prefix_caching=True, seconds_per_tick=None)
    requests = [Request("a", 0, 4, 5), Request("b", 4, 4, 1)]
    run(requests, engine, constant(1), metrics, step_numbered=True, observe=fullest)
    assert fullest.step == expected
    assert (fullest.first_step, fullest.last_step) == (0, 4)
    assert fullest.picture is not None
    held = {holding.id: list(holding.cells) for holding in fullest.picture.holdings}
    assert held == ({"a": [1, 2], "b": [3]} if at_step is None else {"a": [1, 2]})
