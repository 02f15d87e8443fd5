"""`kvplan explain kv-cache`: the same tokens with and without a cache, by an engine whose clock counts FLOPs.

Without a cache every next token is a request of its own whose prompt is all tokens so far: that is how the same
engine, told to keep nothing, is made to serve it.
"""

from __future__ import annotations

from itertools import accumulate

from kvplan.core.request import Request
from kvplan.core.step_shape import Flops
from kvplan.step_time import step_flops
from kvplan.topics.example import Example, Trial, try_out
from kvplan.topics.parts import Column, Explanation, Figure, Figures, Formula, Prose, Table, Value

#: Longest sequence that is run unless another is asked for.
_LENGTH = 4096


def explain(example: Example) -> Explanation:
    """K/V computations and FLOPs of each length, both ways."""
    example.check_runnable()
    length = example.seq(most=_LENGTH)
    flops = step_flops(example.served)
    price = (flops or Flops(0, 0, 0)).of
    blocks = -(-(length + 1) // example.block_size)
    cached = try_out([Request("kept", 0, 1, length)], example.vllm(blocks, seats=1), price=price)
    anew = [Request(f"{tokens}", 0, tokens, 1) for tokens in range(1, length + 1)]
    naive = try_out(anew, example.vllm(blocks, seats=1), price=price)
    computed_naive, computed_cached = _sums(naive), _sums(cached)
    lengths = sorted({n for n in (1, 2, 3, 10, 100, 1000) if n < length} | {length})
    rows: list[tuple[Value, ...]] = []
    for n in lengths:
        naive_flops = naive.moments[n - 1].clock if flops else None
        cached_flops = cached.moments[n - 1].clock if flops else None
        rows.append(
            (
                n,
                computed_naive[n - 1],
                computed_cached[n - 1],
                naive_flops,
                cached_flops,
                naive_flops / cached_flops if naive_flops and cached_flops else None,
            )
        )
    total, kept = computed_naive[-1], computed_cached[-1]
    ends = naive.moments[-1].clock, cached.moments[-1].clock
    return example.explanation(
        [
            Prose(
                "A token attends to the keys and values (K/V) of all tokens before it, and they never change. "
                "Without a cache each step computes them all again; with one, only the new token's."
            ),
            Table(
                "lengths",
                (
                    Column("tokens", "tokens"),
                    Column("computed_without", "without"),
                    Column("computed_with", "with"),
                    Column("flops_without", "without", "flops"),
                    Column("flops_with", "with", "flops"),
                    Column("flops_ratio", "times", "times"),
                ),
                tuple(rows),
                "K/V computed up to a token and FLOPs of that, without and with a cache",
            ),
            Formula("in step t: t K/V without a cache, 1 with it"),
            Formula(
                f"without: 1 + 2 + ... + n = n (n + 1) / 2 = {length:,} x {length + 1:,} / 2 = {total:,}"
            ),
            Formula(f"with:    1 + 1 + ... + 1 = n = {kept:,}"),
            Figures(
                (
                    Figure("computed_without", "K/V computed without a cache", total),
                    Figure("computed_with", "with a cache", kept),
                    Figure("computed_ratio", "as often", total / kept, "times"),
                    Figure("flops_ratio", "as many FLOPs", ends[0] / ends[1] if flops else None, "times"),
                    Figure("cache_bytes", "memory that it costs", kept * example.token_bytes, "exact_bytes"),
                )
            ),
        ],
        [
            f"K/V are computed {_times((length + 1) / 2)} times as often, (n + 1) / 2; pairs of tokens in attention "
            f"{_times((length + 2) / 3)} times, (n + 2) / 3; logits of the vocabulary as often. FLOPs follow the mix. "
            "Time follows FLOPs only where arithmetic is the bound: a step with a cache mostly reads weights and K/V."
        ],
    )


def _times(ratio: float) -> str:
    return f"{ratio:,.1f}".removesuffix(".0")


def _sums(trial: Trial) -> list[int]:
    """Tokens computed up to each step."""
    return list(accumulate(sum(moment.scheduled.values()) for moment in trial.moments))
