"""Paged attention in float64: what the kernels are judged by, and how far from it they may be.

Inputs are numbers that the kernel's formats hold exactly (``number_formats``), so that all that differs is arithmetic.
Shapes: queries ``[requests, heads, head_dim]``; caches ``[blocks, block_size, kv_heads, head_dim]``, whatever the
layout in memory; block tables ``[requests, blocks of a request]``; ``context_lens`` counts each request's tokens, the
new one, whose query it is, included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvplan.errors import InputError
from kvplan.kernels.number_formats import Floats, NumberFormat, number_format

Ints = NDArray[np.integer[Any]]

#: How many standard deviations of rounding errors are let pass (Higham and Mary 2019: for n independent errors, a bound
#: of lambda sqrt(n) u holds but for a probability of 2 exp(-lambda^2 / 2), here 3e-8 an element).
_LAMBDA = 6.0
#: Of ``ex2.approx.ftz.f32`` (PTX manual).
_EXP2_ERROR = 2.0**-22
#: Of 1 - 2 / (1 + e^2x) for tanh(x): half of that of ``ex2.approx``, a rounding, and twice that of ``rcp.approx``, a
#: unit in the last place (PTX manual).
_TANH_ERROR = 2.0**-21


@dataclass(frozen=True)
class Scores:
    """How a score is made of the product of a query head and a key; what is left out does nothing.

    In this order: the product times ``scale`` times the key's scale; ``soft_cap x tanh(score / soft_cap)``; plus
    ``alibi_slopes[head] x (token + 1 - context)``. Only the last ``window`` tokens are attended, the new one included;
    0 is all. Scales of keys and values are one number or one for each KV head.
    """

    scale: float
    window: int = 0
    soft_cap: float = 0.0
    alibi_slopes: Floats | None = None
    key_scale: float | Floats = 1.0
    value_scale: float | Floats = 1.0


@dataclass(frozen=True)
class Expected:
    """The result, and the sizes that bound what rounding may do to it.

    ``output`` is ``[requests, heads, head_dim]``, ``lse`` ``[requests, heads]``: the natural logarithm of the sum of
    exp(score), minus infinity for an empty request. With p the softmax: ``spread`` is the root of the sum of (p v)^2,
    ``magnitude`` the sum of p |v|, ``value_sums`` the sum of |v|; ``products`` the largest sum of |q k| times scale,
    ``largest_score`` the largest |score|, both ``[requests, heads]``.
    """

    output: Floats
    lse: Floats
    spread: Floats = field(repr=False)
    magnitude: Floats = field(repr=False)
    value_sums: Floats = field(repr=False)
    products: Floats = field(repr=False)
    largest_score: Floats = field(repr=False)


def gather(cache: NDArray[Any], block_ids: Ints, context: int) -> NDArray[Any]:
    """The rows of a request's tokens, ``[context, kv_heads, head_dim]``, block after block by its table.

    Raises ``InputError`` where an entry that is needed is no block's id.
    """
    num_blocks, block_size = cache.shape[:2]
    needed = np.asarray(block_ids[: -(-context // block_size)], dtype=np.int64)
    if needed.size * block_size < context or np.any((needed < 0) | (needed >= num_blocks)):
        raise InputError(
            f"the block table does not lead to {context} tokens", hint=f"ids are 0 to {num_blocks - 1}"
        )
    return cache[needed].reshape(-1, *cache.shape[2:])[:context]


def contiguous_attention(query: Floats, keys: Floats, values: Floats, scores: Scores) -> Expected:
    """Attention of one request: query ``[heads, head_dim]``, keys and values ``[tokens, kv_heads, head_dim]``.

    What is returned has no dimension of requests.
    """
    heads, kv_heads, context = query.shape[0], keys.shape[1], keys.shape[0]
    first = max(context - scores.window, 0) if scores.window else 0
    group = heads // kv_heads

    def by_head(rows: Floats, scale: float | Floats) -> Floats:
        scaled = rows[first:] * np.broadcast_to(np.asarray(scale, dtype=np.float64), kv_heads)[:, None]
        return np.repeat(scaled, group, axis=1)

    keys, values = by_head(keys, scores.key_scale), by_head(values, scores.value_scale)
    score = np.einsum("hd,thd->ht", query, keys) * scores.scale
    products = np.einsum("hd,thd->ht", np.abs(query), np.abs(keys)) * abs(scores.scale)
    if scores.soft_cap:
        score = scores.soft_cap * np.tanh(score / scores.soft_cap)
    if scores.alibi_slopes is not None:
        score = score + scores.alibi_slopes[:, None] * (np.arange(first, context) + 1 - context)
    highest = np.max(score, axis=1, initial=-np.inf, keepdims=True)
    weights = np.exp(score - highest)
    total = weights.sum(axis=1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (np.where(total > 0, highest, 0) + np.log(total))[:, 0]
    share = weights / np.where(total == 0, 1.0, total)
    return Expected(
        output=np.einsum("ht,thd->hd", share, values),
        lse=lse,
        spread=np.sqrt(np.einsum("ht,thd->hd", share**2, values**2)),
        magnitude=np.einsum("ht,thd->hd", share, np.abs(values)),
        value_sums=np.abs(values).sum(axis=0),
        products=np.max(products, axis=1, initial=0.0),
        largest_score=np.max(np.abs(score), axis=1, initial=0.0),
    )


def paged_attention(
    query: Floats,
    key_cache: Floats,
    value_cache: Floats,
    block_table: Ints,
    context_lens: Ints,
    scores: Scores,
) -> Expected:
    """Attention of each request over its blocks. Raises ``InputError`` for a table that leads nowhere."""
    parts = [
        contiguous_attention(
            query[request],
            gather(key_cache, block_table[request], int(context)),
            gather(value_cache, block_table[request], int(context)),
            scores,
        )
        for request, context in enumerate(context_lens)
    ]
    return stacked(parts)


def stacked(parts: Sequence[Expected]) -> Expected:
    """Results of single requests, or of parts of them, with a dimension of requests before the others."""
    return Expected(**{name: np.stack([getattr(part, name) for part in parts]) for name in vars(parts[0])})


@dataclass(frozen=True)
class Tolerance:
    """A kernel's result is valid where |error| <= ``absolute`` + ``relative`` x |reference|, everywhere."""

    relative: float
    absolute: Floats  # [requests, heads, head_dim]
    lse: Floats  # [requests, heads], absolute

    def excess(self, expected: Expected, output: NDArray[Any], lse: NDArray[Any] | None = None) -> float:
        """The largest error in units of what is allowed: valid up to 1. Infinite where a number is missing (NaN)."""
        with np.errstate(invalid="ignore"):
            allowed = self.absolute + self.relative * np.abs(expected.output)
            parts = [np.abs(output - expected.output) / allowed]
            if lse is not None:
                gap = np.where(lse == expected.lse, 0.0, np.abs(lse - expected.lse))
                parts.append(gap / self.lse)
        worst = float(np.max([np.max(part, initial=0.0) for part in parts]))  # NaN wins
        return np.inf if np.isnan(worst) else worst


def tolerance(
    expected: Expected, *, head_dim: int, dtype: str, weights: str, tokens: int, soft_cap: float = 0.0
) -> Tolerance:
    """How far a kernel may be from ``expected``, from the formats alone.

    ``dtype`` is the output's format, ``weights`` the one in which the softmax's weights multiply the values (float32 on
    CUDA cores; the cache's own, or float16 for an fp8 cache, on tensor cores), ``tokens`` the longest context;
    ``soft_cap`` as in ``Scores``.

    With u = 2^-precision of a format, u32 = 2^-24 and lambda = 6:

    * the output is rounded once: ``relative`` = u(output), and half a quantum of its subnormal numbers;
    * each weight is rounded on its own: lambda u(weights) sqrt(sum (p v)^2), and below the normal numbers (float16,
      where the largest weight is at least 1) by half a quantum, all to one side: 2^-25 sum |v|;
    * the product of query and key is a sum of head_dim terms in float32, and the score is scaled, shifted and
      subtracted, which moves a score by at most ``s`` = u32 (lambda sqrt(head_dim) sum|q k| scale + 4 |score|),
      and with a soft cap by 2^-21 of the cap more; a weight and their sum by 2 s + 2 x 2^-22, that of ``ex2.approx``
      twice; times sum p |v|;
    * sums over tokens in float32: lambda sqrt(tokens) u32, twice (values and weights); times sum p |v|.

    A logarithm of a sum of weights moves by the same, without the values, and is itself rounded. Rounding errors are
    taken as independent (Higham and Mary 2019, A new approach to probabilistic rounding error analysis).
    """
    out, weight = number_format(dtype), number_format(weights)
    u32 = number_format("float32").unit_roundoff
    moved = (
        u32 * (_LAMBDA * np.sqrt(head_dim) * expected.products + 4 * expected.largest_score)
        + _TANH_ERROR * soft_cap
    )
    shared = 2 * moved + 2 * _EXP2_ERROR + 2 * _LAMBDA * np.sqrt(max(tokens, 1)) * u32
    finite_lse = np.where(np.isfinite(expected.lse), np.abs(expected.lse), 0.0)
    return Tolerance(
        relative=out.unit_roundoff,
        absolute=_smallest(out) / 2
        + _LAMBDA * weight.unit_roundoff * expected.spread
        + _smallest(weight) / 2 * expected.value_sums
        + shared[..., None] * expected.magnitude,
        lse=shared + 4 * u32 * (1 + finite_lse),
    )


def _smallest(form: NumberFormat) -> float:
    return float(2.0 ** (form.min_exponent - form.precision + 1))
