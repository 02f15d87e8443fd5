"""The judge of the kernels, judged: by a loop, by contiguous attention, by what must not matter."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from kvplan.errors import InputError
from kvplan.kernels.number_formats import number_format
from kvplan.kernels.reference import (
    Expected,
    Scores,
    contiguous_attention,
    gather,
    paged_attention,
    tolerance,
)

RNG = np.random.default_rng(11)
HEADS, KV_HEADS, HEAD_DIM, BLOCK = 6, 2, 16, 4
PLAIN = Scores(scale=HEAD_DIM**-0.5)
SLOPES = RNG.uniform(0.1, 1, HEADS)


def one_by_one(
    query: np.ndarray, keys: np.ndarray, values: np.ndarray, scores: Scores
) -> tuple[np.ndarray, float]:
    """One head in plain loops; key and value rows of its KV head, head number 3."""
    weights = []
    for token, key in enumerate(keys):
        score = scores.scale * sum(float(q) * float(k) for q, k in zip(query, key, strict=True))
        if scores.soft_cap:
            score = scores.soft_cap * math.tanh(score / scores.soft_cap)
        if scores.alibi_slopes is not None:
            score += float(scores.alibi_slopes[3]) * (token + 1 - len(keys))
        outside = scores.window and token < len(keys) - scores.window
        weights.append(0.0 if outside else math.exp(score))
    total = sum(weights)
    output = sum(w / total * row for w, row in zip(weights, values, strict=True))
    return np.asarray(output), math.log(total)


@pytest.mark.parametrize(
    "scores",
    [
        PLAIN,
        replace(PLAIN, window=5),
        replace(PLAIN, soft_cap=1.5),
        replace(PLAIN, alibi_slopes=SLOPES),
        replace(PLAIN, window=7, soft_cap=2.0, alibi_slopes=SLOPES),
    ],
    ids=["plain", "window", "soft cap", "alibi", "all"],
)
def test_contiguous_attention_is_the_definition(scores: Scores) -> None:
    query = RNG.standard_normal((HEADS, HEAD_DIM))
    keys, values = RNG.standard_normal((2, 13, KV_HEADS, HEAD_DIM))
    found = contiguous_attention(query, keys, values, scores)
    output, lse = one_by_one(query[3], keys[:, 1], values[:, 1], scores)
    assert np.allclose(found.output[3], output, rtol=1e-12, atol=1e-13)
    assert found.lse[3] == pytest.approx(lse, rel=1e-12)


def paged(contexts: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Query, caches and a table of scattered blocks; slots without a token are NaN."""
    blocks = [-(-context // BLOCK) for context in contexts]
    ids = iter(RNG.permutation(sum(blocks) + 3))
    table = np.full((len(contexts), max(blocks) + 1), -1)
    keys, values = np.full((2, sum(blocks) + 3, BLOCK, KV_HEADS, HEAD_DIM), np.nan)
    for request, context in enumerate(contexts):
        for token in range(context):
            if token % BLOCK == 0:
                table[request, token // BLOCK] = next(ids)
            for cache in (keys, values):
                cache[table[request, token // BLOCK], token % BLOCK] = RNG.standard_normal(
                    (KV_HEADS, HEAD_DIM)
                )
    return RNG.standard_normal((len(contexts), HEADS, HEAD_DIM)), keys, values, table


def test_paged_is_contiguous_over_gathered_rows() -> None:
    contexts = [1, 4, 9, 0, 17]
    query, keys, values, table = paged(contexts)
    found = paged_attention(query, keys, values, table, np.array(contexts), PLAIN)
    for request, context in enumerate(contexts):
        rows = [gather(cache, table[request], context) for cache in (keys, values)]
        assert rows[0].shape == (context, KV_HEADS, HEAD_DIM)
        alone = contiguous_attention(query[request], rows[0], rows[1], PLAIN)
        assert np.array_equal(found.output[request], alone.output)
        assert np.isfinite(found.output[request]).all()


def test_an_empty_request_gives_zeros() -> None:
    query, keys, values, table = paged([0, 3])
    found = paged_attention(query, keys, values, table, np.array([0, 3]), PLAIN)
    assert not found.output[0].any()
    assert np.all(found.lse[0] == -np.inf)


def test_scales_are_part_of_keys_and_values() -> None:
    query, keys, values, table = paged([7])
    key_scale, value_scale = np.array([0.5, 2.0]), np.array([3.0, 0.25])
    scaled = replace(PLAIN, key_scale=key_scale, value_scale=value_scale)
    found = paged_attention(query, keys, values, table, np.array([7]), scaled)
    by_hand = paged_attention(
        query, keys * key_scale[:, None], values * value_scale[:, None], table, np.array([7]), PLAIN
    )
    assert np.allclose(found.output, by_hand.output, rtol=1e-13)


def test_a_table_that_leads_nowhere_is_refused() -> None:
    query, keys, values, table = paged([9])
    for wrong in (-1, len(keys)):
        broken = table.copy()
        broken[0, 1] = wrong
        with pytest.raises(InputError, match="does not lead to 9 tokens"):
            paged_attention(query, keys, values, broken, np.array([9]), PLAIN)
    with pytest.raises(InputError, match="does not lead to 99 tokens"):
        gather(keys, table[0], 99)


def judged() -> tuple[Expected, float]:
    contexts = [40, 25]
    query, keys, values, table = paged(contexts)
    expected = paged_attention(query, keys, values, table, np.array(contexts), PLAIN)
    return expected, float(np.abs(expected.output).mean())


def test_rounding_the_output_is_allowed_and_little_more() -> None:
    expected, size = judged()
    for dtype in ("float32", "float16", "bfloat16"):
        allowed = tolerance(expected, head_dim=HEAD_DIM, dtype=dtype, weights="float32", tokens=40)
        rounded = number_format(dtype).rounded(expected.output)
        assert allowed.excess(expected, rounded, expected.lse) <= 1
        off = 4 * number_format(dtype).unit_roundoff * np.abs(expected.output).max() + 1e-4 * size
        assert allowed.excess(expected, expected.output + off, expected.lse) > 1


def test_weights_of_few_bits_are_allowed_more() -> None:
    expected, _ = judged()
    sizes = [
        tolerance(expected, head_dim=HEAD_DIM, dtype="bfloat16", weights=weights, tokens=40).absolute.mean()
        for weights in ("float32", "float16", "bfloat16")
    ]
    assert sizes == sorted(sizes)
    assert sizes[2] > 10 * sizes[0]


def test_a_token_too_many_or_too_few_is_not_allowed() -> None:
    contexts = [40]
    query, keys, values, table = paged([41])
    expected = paged_attention(query, keys, values, table, np.array(contexts), PLAIN)
    allowed = tolerance(expected, head_dim=HEAD_DIM, dtype="bfloat16", weights="bfloat16", tokens=40)
    for wrong in (39, 41):
        other = paged_attention(query, keys, values, table, np.array([wrong]), PLAIN)
        assert allowed.excess(expected, other.output, other.lse) > 3


def test_a_soft_cap_is_allowed_the_error_of_its_tanh() -> None:
    expected, _ = judged()
    x = np.linspace(-12, 12, 200_001, dtype=np.float32)
    fast = np.float32(1) - np.float32(2) / (np.float32(1) + np.exp2(x * np.float32(2 / np.log(2))))
    plain, capped = (
        tolerance(expected, head_dim=HEAD_DIM, dtype="float32", weights="float32", tokens=40, soft_cap=cap)
        for cap in (0.0, 50.0)
    )
    allowed = float(np.min(capped.lse - plain.lse)) / 2 / 50
    assert allowed / 8 < np.abs(fast - np.tanh(x.astype(np.float64))).max() < allowed


def test_a_missing_number_is_never_valid() -> None:
    expected, _ = judged()
    allowed = tolerance(expected, head_dim=HEAD_DIM, dtype="float16", weights="float16", tokens=40)
    output = expected.output.copy()
    output[1, 2, 3] = np.nan
    assert allowed.excess(expected, output) == np.inf
    assert allowed.excess(expected, expected.output, expected.lse * np.nan) == np.inf
