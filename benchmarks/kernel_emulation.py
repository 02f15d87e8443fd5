"""The kernels in emulation: every variant on every case, sanitizers, traffic and the emulator's speed. No GPU is used.

Usage: python benchmarks/kernel_emulation.py [--variants default|all|options] [--sanitizer none|address|thread] [--json]
                                             [--traffic] [--speed]
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import sys
from collections import defaultdict
from dataclasses import replace

from kvplan.errors import KvplanError
from kvplan.kernels.cases import CASES, Case, problem
from kvplan.kernels.emulation.build import Sanitizer
from kvplan.kernels.validate import CaseResult, Emulator, validate
from kvplan.kernels.variants import Variant, all_variants, attention_variant, default_variants

ATTENTION = ("naive", "split", "mma")
KV = ("key_cache", "value_cache")
#: ThreadSanitizer takes a second for each: of these the last is a merge.
FOR_THREADS = ("uneven groups of 3", "shared blocks", "uneven splits")


def cpu_s() -> float:
    """CPU seconds of this process and of those that it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def chosen(which: str) -> list[Variant]:
    """The default variants, all without options, or those of attention with each option and with both."""
    if which != "options":
        return [*(default_variants() if which == "default" else all_variants())]
    return [
        replace(one, alibi=alibi, soft_cap=soft_cap)
        for alibi, soft_cap in ((True, False), (False, True), (True, True))
        for one in all_variants()
        if one.kernel in ATTENTION and one.head_dim in {64, 80, 256}
    ]


def validated(which: str, sanitizer: Sanitizer) -> list[CaseResult]:
    """The rows of all cases, with progress on standard error."""
    cases = [one for one in CASES if sanitizer is not Sanitizer.THREAD or one.name in FOR_THREADS]

    def tell(done: int, total: int, name: str) -> None:
        if done % 100 == 0 or done == total:
            print(f"\r{done} of {total} {name:60.60}", end="", file=sys.stderr, flush=True)

    rows = list(validate(chosen(which), cases, tell, solver=Emulator(sanitizer=sanitizer)))
    print(file=sys.stderr)
    return rows


def print_summary(rows: list[CaseResult]) -> None:
    """One line a kernel and formats, then what is wrong."""
    groups: dict[tuple[str, str, str], list[CaseResult]] = defaultdict(list)
    for row in rows:
        groups[row.kernel, row.dtype, row.kv_cache_dtype].append(row)
    print(
        f"{'kernel':18} {'dtype':9} {'cache':9} {'variants':>8} {'cases':>6} {'rel. error':>10} {'of tolerance':>12}"
    )
    for (kernel, dtype, stored), found in sorted(groups.items()):
        relative = max(row.max_rel_error for row in found)
        used = max(row.tolerance.get("used", 0.0) for row in found)
        names = {row.variant for row in found}
        print(f"{kernel:18} {dtype:9} {stored:9} {len(names):8} {len(found):6} {relative:10.1e} {used:12.2f}")
    wrong = [row for row in rows if not row.valid]
    for row in wrong[:20]:
        print(f"WRONG {row.variant}, {row.case}: {row.error or row.tolerance}")
    print(f"{len(rows) - len(wrong)} of {len(rows)} valid")


def traffic() -> list[dict[str, object]]:
    """What each kernel asks of K and V for requests of 1,000 and 24 tokens and 2 KV heads."""
    rows = []
    for kernel, dtype, stored, head_dim, group in (
        ("naive", "bfloat16", "auto", 128, 4),
        ("naive", "float32", "auto", 128, 4),
        ("naive", "float32", "auto", 128, 1),
        ("split", "bfloat16", "auto", 128, 4),
        ("split", "bfloat16", "auto", 80, 4),
        ("split", "float32", "auto", 128, 1),
        ("mma", "bfloat16", "auto", 128, 4),
        ("mma", "bfloat16", "fp8", 128, 8),
        ("mma", "float16", "auto", 64, 16),
        ("mma", "bfloat16", "auto", 256, 16),
    ):
        variant = attention_variant(
            kernel, head_dim=head_dim, group=group, dtype=dtype, kv_cache_dtype=stored
        )
        emulator, posed = Emulator(), problem(variant, Case("traffic", (1000, 24), group=group))
        log = emulator.attend(emulator.build([variant]), posed, traffic=True).traffic
        if log is None:
            raise RuntimeError(f"{variant.name} gave no traffic")
        rows.append(
            {
                "variant": variant.name,
                "group": group,
                "kv_bytes": posed.live_bytes,
                "sector_efficiency": log.sector_efficiency(KV),
                "distinct_over_minimum": log.distinct(KV) / posed.live_bytes,
                "requested_over_minimum": log.requested_bytes(KV) / posed.live_bytes,
            }
        )
    return rows


def speed(repeats: int = 3) -> list[dict[str, object]]:
    """Keys times query heads that the emulator gets through in a CPU second, for 2 requests of 1,024 tokens."""
    rows = []
    for kernel, dtype, group in (
        ("naive", "float32", 4),
        ("split", "float32", 4),
        ("split", "bfloat16", 8),
        ("mma", "bfloat16", 8),
        ("mma", "bfloat16", 16),
    ):
        variant = attention_variant(kernel, head_dim=128, group=group, dtype=dtype)
        emulator, posed = Emulator(), problem(variant, Case("speed", (1024, 1024), group=group))
        program, least = emulator.build([variant]), math.inf
        for _ in range(repeats):
            start = cpu_s()
            emulator.attend(program, posed)
            least = min(least, cpu_s() - start)
        work = 2 * 1024 * 2 * group
        rows.append({"variant": variant.name, "key_heads_per_cpu_s": work / least})
    return rows


def as_table(rows: list[dict[str, object]]) -> str:
    """The rows under their keys."""
    lines = [
        [*rows[0]],
        *([f"{v:,.4g}" if isinstance(v, float) else f"{v}" for v in row.values()] for row in rows),
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(f"{text:{width}}" for text, width in zip(line, widths, strict=True)) for line in lines
    )


def main() -> int:
    """Do what is asked and print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variants", choices=["default", "all", "options"], default="default")
    parser.add_argument("--sanitizer", choices=[one.value for one in Sanitizer], default="none")
    parser.add_argument("--traffic", action="store_true")
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.traffic or arguments.speed:
        found = traffic() if arguments.traffic else speed()
        print(json.dumps(found) if arguments.json else as_table(found))
        return 0
    start = cpu_s()
    rows = validated(arguments.variants, Sanitizer(arguments.sanitizer))
    if arguments.json:
        print(json.dumps([row.to_dict() for row in rows]))
    else:
        print_summary(rows)
        print(f"{cpu_s() - start:.0f} CPU seconds, building included")
    return int(not all(row.valid for row in rows))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KvplanError as error:
        sys.exit(f"{error}\n{error.hint or ''}")
