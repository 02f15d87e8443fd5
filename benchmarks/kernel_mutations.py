"""Seeded bugs in the kernels' source, one at a time: which of the emulated cases notices each.

A bug is a change of the text. The kernels that it is in are built anew and run on the cases until one fails: a number
beyond its tolerance, a launch that was ended, a byte that is wrong. What is not noticed is named, with the reason where
one is known; the exit code is 1 where none is.

Usage: python benchmarks/kernel_mutations.py [--only PART_OF_NAME] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass

from kvplan.errors import KvplanError
from kvplan.kernels.validate import Emulator, validate
from kvplan.kernels.variants import Variant, attention_variant, kernel_source

NAIVE = attention_variant("naive", head_dim=64, group=1, dtype="float32", alibi=True, soft_cap=True)
SPLIT = attention_variant("split", head_dim=64, group=4, dtype="float16", alibi=True, soft_cap=True)
MMA = attention_variant("mma", head_dim=128, group=8, dtype="bfloat16")
MMA_16 = attention_variant("mma", head_dim=64, group=16, dtype="float16", alibi=True)
MMA_FP8 = attention_variant("mma", head_dim=64, group=8, dtype="bfloat16", kv_cache_dtype="fp8")
RESHAPE = Variant("reshape_and_cache", 64, "float16", "float16")
RESHAPE_FP8 = Variant("reshape_and_cache", 64, "float16", "fp8_e4m3")
COPY = Variant("copy_blocks")


@dataclass(frozen=True)
class Mutation:
    """A bug: ``old`` stands ``times`` in the source and becomes ``new``; ``variants`` have it.

    ``known`` says why it cannot be noticed, where it cannot.
    """

    name: str
    old: str
    new: str
    variants: tuple[Variant, ...]
    times: int = 1
    known: str = ""


MUTATIONS = (
    Mutation(
        "mma: tokens past the end take part",
        "if (token >= end) scores[eight / 2][eight % 2][tile][next] = minus_infinity();",
        "",
        (MMA,),
    ),
    Mutation(
        "split: tokens past the end take part",
        "scores[u][h] = valid[u] ? scoring(",
        "scores[u][h] = true ? scoring(",
        (SPLIT,),
    ),
    Mutation(
        "mma: tokens past the end are read",
        "return t < last_token ? t : last_token;",
        "return t;",
        (MMA,),
    ),
    Mutation(
        "split: tokens past the end are read",
        "valid[u] ? token : end - 1",
        "token",
        (SPLIT,),
    ),
    Mutation(
        "an id that is no block's is followed",
        "return !__any_sync(ALL_LANES, !exist);",
        "return true;",
        (MMA, SPLIT, NAIVE),
    ),
    Mutation(
        "an id that is no block's is known to one lane only",
        "return !__any_sync(ALL_LANES, !exist);",
        "return exist;",
        (MMA, SPLIT, NAIVE),
    ),
    Mutation(
        "split: a row's offset in 32 bits",
        "(token >> p.block_size_log2)), token) * p.cache_stride_row;",
        "(token >> p.block_size_log2)), token) * (unsigned)p.cache_stride_row;",
        (SPLIT,),
    ),
    Mutation(
        "mma: a row's offset in 32 bits",
        "(unsigned long long)__shfl_sync(ALL_LANES, rows[j / 32], j % 32) * row_bytes",
        "__shfl_sync(ALL_LANES, rows[j / 32], j % 32) * row_bytes",
        (MMA,),
    ),
    Mutation(
        "rows of a block are taken for its tokens",
        "(unsigned)block_id * (unsigned)p.cache_rows_per_block +",
        "((unsigned)block_id << p.block_size_log2) +",
        (MMA, SPLIT),
    ),
    Mutation(
        "query heads look at the wrong KV head",
        "item.first_head / (p.num_heads / p.num_kv_heads)",
        "item.first_head % p.num_kv_heads",
        (MMA, SPLIT),
    ),
    Mutation(
        "warps are put together without a barrier",
        "    __syncthreads();\n    const WorkItem item = work_item_of(p);",
        "    const WorkItem item = work_item_of(p);",
        (MMA, SPLIT),
    ),
    Mutation(
        "mma: half of the output is not scaled when the maximum rises",
        "output[piece][j][tile][i + 2] *= factor;",
        "",
        (MMA, MMA_16),
    ),
    Mutation(
        "mma: the sum is not scaled when the maximum rises",
        "sum[tile] *= shrink;",
        "",
        (MMA, MMA_16),
    ),
    Mutation(
        "split: the sum is not scaled when the maximum rises",
        "sum[h] *= shrink;",
        "",
        (SPLIT,),
    ),
    Mutation(
        "mma: two tokens' values are paired wrongly",
        "__byte_perm(v8, v9, 0x7632u)",
        "__byte_perm(v8, v9, 0x7610u)",
        (MMA,),
    ),
    Mutation(
        "mma: values of an fp8 cache are paired wrongly",
        "SECOND = KV_E4M3_CVT ? 0x7362u : 0x7632u",
        "SECOND = 0x7362u",
        (MMA_FP8,),
    ),
    Mutation(
        "partial results: a logarithm of the wrong base",
        "natural_lse(maximum, sum) * LOG2_E",
        "natural_lse(maximum, sum)",
        (MMA, SPLIT),
    ),
    Mutation(
        "merge: chunks weigh the same",
        "const float weight = fast_exp2(ldg(p.partial_lse + row) - maximum);",
        "const float weight = 1.0f;",
        (MMA,),
    ),
    Mutation(
        "the query's stride is taken for its size",
        "item.request * p.query_stride_request",
        "item.request * (long long)p.num_heads * HEAD_DIM",
        (MMA, SPLIT),
        times=2,
    ),
    Mutation(
        "ALiBi: distances one too small",
        "distance[u] = token + 1 - context;",
        "distance[u] = token - context;",
        (SPLIT,),
    ),
    Mutation(
        "naive: the window is one too long",
        "p.window > 0 && context > p.window ? context - p.window : 0",
        "p.window > 0 && context > p.window ? context - p.window - 1 : 0",
        (NAIVE,),
    ),
    Mutation(
        "reshape_and_cache: a slot beyond the cache is written",
        "slot < 0 || slot >= p.num_slots",
        "slot < 0",
        (RESHAPE,),
    ),
    Mutation(
        "reshape_and_cache: fp8 does not saturate",
        "if (magnitude >= 0x43e00000u) return (unsigned char)(sign | 0x7eu);",
        "if (magnitude >= 0x43e00000u) return (unsigned char)(sign | 0x7fu);",
        (RESHAPE_FP8,),
    ),
    Mutation(
        "copy_blocks: the last 16 bytes stay behind",
        "i < p.block_bytes; i +=",
        "i + 16 < p.block_bytes; i +=",
        (COPY,),
    ),
    Mutation(
        "mma: the reference follows the maximum much later",
        "constexpr float LAZY_LOG2 = 8.0f;",
        "constexpr float LAZY_LOG2 = 12.0f;",
        (MMA,),
        known="bfloat16 has float32's exponents, so weights up to 2^12 are as exact as up to 2^8",
    ),
)


def mutated(mutation: Mutation, source: str) -> str:
    """The source with the bug. Raises ``ValueError`` where the text is not there as often as expected."""
    if source.count(mutation.old) != mutation.times:
        raise ValueError(
            f"{mutation.name}: {source.count(mutation.old)} times in the source: {mutation.old!r}"
        )
    return source.replace(mutation.old, mutation.new)


def noticed_by(mutation: Mutation) -> str | None:
    """The first thing that goes wrong, or nothing."""
    emulator = Emulator(mutated(mutation, kernel_source()))
    for variant in mutation.variants:
        for row in validate([variant], solver=emulator):
            if not row.valid:
                share = row.tolerance.get("used")
                said = row.error or f"error of {share:.3g} times the tolerance"
                return f"{row.variant.removeprefix('kvplan_')}, {row.case}: {said}"
    return None


def main() -> int:
    """Try each bug and print what noticed it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    start, rows = time.process_time(), []
    for mutation in MUTATIONS:
        if arguments.only not in mutation.name:
            continue
        found = noticed_by(mutation)
        rows.append({"bug": mutation.name, "noticed": found, "known": mutation.known or None})
        if not arguments.json:
            print(
                f"{'noticed' if found else 'MISSED ':8} {mutation.name}\n         {found or mutation.known}"
            )
    missed = [row["bug"] for row in rows if not row["noticed"]]
    if arguments.json:
        print(json.dumps({"bugs": rows, "noticed": len(rows) - len(missed), "missed": missed}))
    else:
        print(
            f"{len(rows) - len(missed)} of {len(rows)} noticed; {time.process_time() - start:.0f} s of Python"
        )
    return int(any(not row["noticed"] and not row["known"] for row in rows))


if __name__ == "__main__":
    try:
        with tempfile.TemporaryDirectory() as builds:  # nobody wants them again
            os.environ["XDG_CACHE_HOME"] = builds
            sys.exit(main())
    except KvplanError as error:
        sys.exit(f"{error}\n{error.hint or ''}")
