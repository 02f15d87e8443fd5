"""What compiled kernels say without a GPU: registers, and whether issue slots and bytes under way can keep memory busy.

Usage: python benchmarks/kernel_static.py [--variants default|all|options] [--architectures 80,90] [--json]

Needs CuPy with NVRTC (pip install 'kvplan[cuda13]') and nvidia-cuda-nvdisasm. For each variant and architecture:

* registers, spilled bytes, blocks of threads on a multiprocessor (by registers, threads and shared memory);
* instructions of the main loop for each KiB of keys and values, the usual way and with the blocks beside it (masking
  the last tokens, a new maximum); a warp that shares its tokens with another counts for half;
* the share of a GPU's issue slots (4 a multiprocessor and clock) that this takes at the full bandwidth;
* KiB that a multiprocessor has asked for and not used: blocks x 4 warps x what a warp has under way at most, to be held
  against bandwidth x latency (Little's law), here with 650 ns, which is an assumption.

This is a model. It can show that a kernel cannot reach the bandwidth, not that it does.

``--variants all`` compiles every variant (``options``: with every option too, some hundreds more) for every
architecture, at a quarter of a CPU second each, on all cores, and prints registers and spills only; ``default`` does so
for those that common models use. Ends with 1 if a variant passes its budget, a default one spills, or an mma variant
takes more than 35 % of an H200's issue slots. One is known to, by a point: fp8 at head size 256 with more than 8 query
heads for a KV head, where two warps convert the same keys and values.
"""

from __future__ import annotations

import argparse
import json
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import product

from kvplan.kernels.number_formats import number_format
from kvplan.kernels.nvrtc import Compiled, architectures, compile_variant, compiler_version
from kvplan.kernels.sass import main_loop
from kvplan.kernels.variants import Variant, all_variants, default_variants

LATENCY_S = 650e-9
KIB = 1024
WARPS_A_BLOCK = 4
MOST_SHARE = 0.35
KNOWN_TO_TAKE_MORE = {"mma_d256_bfloat16_fp8_e4m3_h16": 0.37}


@dataclass(frozen=True)
class Gpu:
    """Datasheet figures; the clock is the boost clock that is held under load. Shared memory of a multiprocessor."""

    name: str
    architecture: int
    bandwidth: float
    sms: int
    clock_hz: float
    shared_bytes: int
    threads: int


GPUS = (
    Gpu("A100-80GB", 80, 2.039e12, 108, 1.41e9, 164 * KIB, 2048),
    Gpu("H100-SXM", 90, 3.35e12, 132, 1.83e9, 228 * KIB, 2048),
    Gpu("H200", 90, 4.8e12, 132, 1.83e9, 228 * KIB, 2048),
)


@dataclass(frozen=True)
class Row:
    """A variant on a GPU."""

    variant: str
    gpu: str
    registers: int
    spill_bytes: int
    blocks: int
    instructions_per_kib: float
    with_rare_per_kib: float
    issue_share: float
    kib_under_way: float
    kib_needed: float


def useful_share(variant: Variant) -> float:
    """Of the bytes that a warp's wide loads could carry: lanes of split beyond the end of a row load nothing."""
    if variant.kernel != "split":
        return 1.0
    vectors = variant.head_dim * number_format(variant.kv_cache_dtype).bytes // 16
    lanes = next(n for n in (1, 2, 4, 8, 16, 32, 64) if n >= vectors)
    return vectors / lanes


def readers(variant: Variant) -> int:
    """Warps of a block that read the same tokens."""
    return 2 if variant.kernel == "mma" and variant.head_tile == 16 and variant.head_dim > 128 else 1


def blocks_on(gpu: Gpu, made: Compiled) -> int:
    """Blocks of threads that fit on a multiprocessor; registers are given out in units of 8 a thread."""
    registers = -(-made.registers // 8) * 8
    shared = made.variant.shared_bytes() + KIB  # the runtime takes a KiB of each block
    return min(65536 // (registers * 32 * WARPS_A_BLOCK), gpu.threads // 128, gpu.shared_bytes // shared)


def row(variant: Variant, gpu: Gpu) -> Row:
    """The figures of a variant on a GPU."""
    made = compile_variant(variant, gpu.architecture)
    loop = main_loop(made)
    kib = loop.loaded_bytes * 32 * useful_share(variant) / KIB / readers(variant)
    usual = loop.instructions / kib
    blocks = blocks_on(gpu, made)
    under_way = blocks * WARPS_A_BLOCK * 32 * loop.bytes_under_way * useful_share(variant) / readers(variant)
    return Row(
        variant=variant.name.removeprefix("kvplan_"),
        gpu=gpu.name,
        registers=made.registers,
        spill_bytes=made.spill_bytes,
        blocks=blocks,
        instructions_per_kib=usual,
        with_rare_per_kib=(loop.instructions + loop.rare) / kib,
        issue_share=usual * gpu.bandwidth / KIB / (gpu.sms * 4 * gpu.clock_hz),
        kib_under_way=under_way / KIB,
        kib_needed=gpu.bandwidth * LATENCY_S / gpu.sms / KIB,
    )


def with_options(variants: tuple[Variant, ...]) -> list[Variant]:
    """Each variant of attention with each option."""
    attention = [one for one in variants if one.kernel in {"naive", "split", "mma"}]
    plain = [one for one in variants if one not in attention]
    made = [
        replace(one, alibi=a, soft_cap=c) for one, a, c in product(attention, (False, True), (False, True))
    ]
    return made + plain


def keep(pair: tuple[Variant, int]) -> None:
    """Compile a variant for an architecture, so that it is kept on disk."""
    compile_variant(*pair)


def print_matrix(variants: list[Variant], targets: list[int]) -> bool:
    """Registers and spilled bytes of every variant; whether all keep their budget and default ones spill nothing."""
    pairs = [(variant, one) for variant in variants for one in targets if variant.runs_on(one)]
    with ProcessPoolExecutor() as pool:
        list(pool.map(keep, pairs, chunksize=4))
    good = True
    print(f"registers/spilled bytes{'':45s}" + "".join(f"sm_{one:<9d}" for one in targets))
    for variant in variants:
        made = [compile_variant(variant, one) if variant.runs_on(one) else None for one in targets]
        cells = ["-" if one is None else f"{one.registers}/{one.spill_bytes}" for one in made]
        print(f"{variant.name.removeprefix('kvplan_'):68s}" + "".join(f"{cell:12s}" for cell in cells))
        is_default = variant in default_variants()
        for one in made:
            if one is not None:
                good = good and one.registers <= variant.register_budget
                good = good and not (is_default and (one.spill_bytes or one.stack_bytes))
    return good


def print_rows(rows: list[Row]) -> None:
    """The table."""
    print(
        f"{'variant':36s}{'GPU':11s}regs spill blocks  instr/KiB (with rare)  issue slots  KiB under way / needed"
    )
    for one in rows:
        print(
            f"{one.variant:36s}{one.gpu:11s}{one.registers:4d} {one.spill_bytes:5d} {one.blocks:6d}"
            f"{one.instructions_per_kib:11.1f} ({one.with_rare_per_kib:5.1f}){one.issue_share:16.0%}"
            f"{one.kib_under_way:12.0f} / {one.kib_needed:.0f}"
        )


def main() -> int:
    """Print what was asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--variants", choices=("default", "all", "options"))
    parser.add_argument("--architectures", type=lambda text: [int(one) for one in text.split(",")])
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    if chosen.variants or chosen.architectures:
        variants = list(default_variants() if chosen.variants in {None, "default"} else all_variants())
        if chosen.variants == "options":
            variants = with_options(tuple(variants))
        return 0 if print_matrix(variants, chosen.architectures or list(architectures())) else 1
    attention = [one for one in default_variants() if one.kernel in {"split", "mma"}]
    rows = [row(variant, gpu) for variant in attention for gpu in GPUS]
    if chosen.json:
        print(json.dumps({"nvrtc": compiler_version(), "rows": [asdict(one) for one in rows]}, indent=1))
    else:
        print_rows(rows)
    mma = [one for one in rows if one.gpu == "H200" and one.variant.startswith("mma")]
    return int(any(one.issue_share > KNOWN_TO_TAKE_MORE.get(one.variant, MOST_SHARE) for one in mma))


if __name__ == "__main__":
    sys.exit(main())
