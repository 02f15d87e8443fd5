"""The seeded problems themselves: what lies where, how little has to be read, what a verdict minds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvplan.kernels.cache_cases import copy_problem, reshape_problem
from kvplan.kernels.cases import CASES, Case, Problem, problem
from kvplan.kernels.number_formats import number_format
from kvplan.kernels.variants import Variant, attention_variant

SPLIT = attention_variant("split", head_dim=64, group=4, dtype="bfloat16")
NAIVE = attention_variant("naive", head_dim=64, group=1, dtype="float32")
BY_NAME = {case.name: case for case in CASES}
#: What one token of one KV head takes: keys and values of 64 numbers of 2 bytes.
TOKEN = 2 * 64 * 2


def solved(posed: Problem) -> dict[str, np.ndarray]:
    """The answer, as a kernel that makes no error but that of the output's format would write it."""
    stored = number_format(posed.variant.dtype)
    output = np.where(posed.unknown[:, None, None], np.nan, posed.expected.output)
    lse = np.where(posed.unknown[:, None], np.nan, posed.expected.lse)
    return {"output": stored.encoded(output), "lse": lse.astype(np.float32)}


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("partial last block", 2 * (17 + 31 + 5)),
        ("only empty requests", 0),
        ("blocks of 128", 128 + 200 + 3),
        ("shared blocks", 2 * (3 * 16 + (70 - 48) + (90 - 48) + (64 - 48))),  # 3 blocks of 16 are everybody's
        ("window", 2 * (50 + 30 + 50)),
        ("keys and values in one cache", 2 * (50 + 20)),
        ("beyond 32 bits", 2 * (50 + 20)),
    ],
)
def test_the_least_that_has_to_be_read(name: str, rows: int) -> None:
    assert problem(SPLIT, BY_NAME[name]).live_bytes == rows * TOKEN


def test_equal_arguments_make_equal_problems_and_others_do_not() -> None:
    case = BY_NAME["ragged batch"]
    one, same, other = (problem(SPLIT, case, seed=seed).arrays for seed in (1, 1, 2))
    assert {name: array.tobytes() for name, array in one.items()} == {
        name: array.tobytes() for name, array in same.items()
    }
    assert one["query"].tobytes() != other["query"].tobytes()


def test_slots_without_a_token_are_nan_and_entries_beyond_are_no_ids() -> None:
    posed = problem(NAIVE, Case("20 tokens", (20,), group=1, num_kv_heads=1))
    keys, table = posed.arrays["key_cache"], posed.arrays["block_table"]
    assert (table[0, 2:] < 0).all()
    assert np.isfinite(keys[table[0, 0]]).all()
    assert np.isfinite(keys[table[0, 1], :4]).all()
    assert np.isnan(keys[table[0, 1], 4:]).all()
    others = [block for block in range(len(keys)) if block not in table[0, :2]]
    assert others
    assert np.isnan(keys[others]).all()


def test_tokens_before_a_window_are_nan() -> None:
    posed = problem(NAIVE, Case("window", (40,), group=1, num_kv_heads=1, window=8))
    assert np.isfinite(posed.arrays["key_cache"]).any(axis=(2, 3)).sum() == 8


def test_what_a_cache_has_is_what_the_reference_saw() -> None:
    """The answer comes from rounded numbers, whatever the layout."""
    for layout in ("NHD", "HND"):
        case = replace(BY_NAME["partial last block"], layout=layout, name="partial last block")
        posed = problem(SPLIT, case)
        assert posed.judge(solved(posed)).valid
    answers = [problem(SPLIT, replace(case, layout=layout)).expected.output for layout in ("NHD", "HND")]
    assert np.array_equal(*answers)


@pytest.mark.parametrize("case", CASES, ids=lambda one: one.name)
def test_the_answer_is_valid(case: Case) -> None:
    for variant in (SPLIT, NAIVE):
        posed = problem(variant, case)
        verdict = posed.judge(solved(posed))
        assert verdict.valid
        assert verdict.tolerance["used"] <= 1


def test_a_verdict_minds_every_number() -> None:
    posed = problem(SPLIT, BY_NAME["scales for heads"])
    right = solved(posed)
    for spoilt in (np.nan, 100.0):
        wrong = {name: array.copy() for name, array in right.items()}
        wrong["output"][1, 2, 3] = number_format("bfloat16").encoded(np.array(spoilt))
        assert not posed.judge(wrong).valid
        lse = {**right, "lse": right["lse"].copy()}
        lse["lse"][0, 1] += spoilt
        assert not posed.judge(lse).valid
    verdict = posed.judge({**right, "output": right["output"] ^ 0x8000})  # every sign turned
    assert verdict.max_rel_error == pytest.approx(2, rel=0.01)
    assert not verdict.valid


def test_a_number_where_nan_is_due_is_wrong() -> None:
    posed = problem(SPLIT, BY_NAME["unknown block"])
    right = solved(posed)
    assert posed.judge(right).valid
    output = number_format("bfloat16").encoded(posed.expected.output)
    assert posed.judge({**right, "output": output}).tolerance["used"] == np.inf


def test_a_cache_is_held_to_every_byte() -> None:
    posed = reshape_problem(Variant("reshape_and_cache", 64, "float16", "fp8_e4m3"), scales="head")
    outputs = {name: array.copy() for name, array in posed.expected.items()}
    assert posed.wrong_bytes(outputs) == 0
    outputs["value_cache"].reshape(-1)[5] ^= 1
    assert posed.wrong_bytes(outputs) == 1
    assert posed.wrong_bytes(posed.arrays) > 1000


def test_fp8_numbers_beyond_the_largest_saturate() -> None:
    posed = reshape_problem(Variant("reshape_and_cache", 64, "float16", "fp8_e4m3"))
    codes = np.unique(posed.expected["key_cache"])
    assert {0x7E, 0xFE} <= set(codes.tolist())  # 448 and -448
    assert not {0x7F, 0xFF} & set(codes.tolist())  # no NaN


def test_copied_blocks_are_in_all_layers() -> None:
    posed = copy_problem(Variant("copy_blocks"), num_layers=2, block_bytes=32)
    pairs = posed.arrays["block_pairs"]
    assert len(posed.expected) == 4
    for name, array in posed.expected.items():
        assert (array[pairs[:, 1]] == posed.arrays[name][pairs[:, 0]]).all()
        assert (array != posed.arrays[name]).any(axis=1).sum() == len(pairs)
