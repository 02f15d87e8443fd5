"""The shipped kernels in emulation: right on every case, silent under sanitizers, no more traffic than needed."""

from __future__ import annotations

import runpy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvplan.kernels.cache_cases import copy_problem, reshape_problem
from kvplan.kernels.cases import CASES, Case, Problem, problem
from kvplan.kernels.emulation.build import Sanitizer, Source, executable
from kvplan.kernels.emulation.emulate import Order, Outcome, Traffic, run
from kvplan.kernels.validate import CaseResult, Emulator, validate
from kvplan.kernels.variants import Variant, attention_variant, default_variants, kernel_source

pytestmark = pytest.mark.usefixtures("compiler")

BY_NAME = {case.name: case for case in CASES}
OPTIONS = [
    attention_variant("naive", head_dim=64, group=1, dtype="float32", alibi=True, soft_cap=True),
    attention_variant("split", head_dim=64, group=2, dtype="float16", alibi=True, soft_cap=True),
    attention_variant("split", head_dim=256, group=1, dtype="float32"),
    attention_variant("mma", head_dim=64, group=8, dtype="float16", alibi=True),
    attention_variant("mma", head_dim=128, group=16, dtype="bfloat16", kv_cache_dtype="fp8", soft_cap=True),
    attention_variant("mma", head_dim=192, group=4, dtype="float16"),
    attention_variant("mma", head_dim=192, group=16, dtype="float16", kv_cache_dtype="fp8", alibi=True),
]
VARIANTS = [one for one in dict.fromkeys([*default_variants(), *OPTIONS]) if one.kernel != "merge"]
#: One of each kernel, for what is slow or looks at each line of the source once.
MMA = attention_variant("mma", head_dim=128, group=8, dtype="bfloat16")
MMA_FP8 = attention_variant("mma", head_dim=64, group=8, dtype="float16", kv_cache_dtype="fp8")
#: Two warps share the heads, by dimensions.
MMA_SHARED = attention_variant("mma", head_dim=192, group=16, dtype="float16", kv_cache_dtype="fp8")
SPLIT = attention_variant("split", head_dim=80, group=4, dtype="float16")
NAIVE = attention_variant("naive", head_dim=64, group=1, dtype="float32")
WRITERS = (
    Variant("reshape_and_cache", 64, "float16", "float16"),
    Variant("reshape_and_cache", 64, "float16", "fp8_e4m3"),
    Variant("copy_blocks"),
)


def faults(rows: Sequence[CaseResult]) -> list[str]:
    return [f"{row.variant}, {row.case}: {row.error or row.tolerance}" for row in rows if not row.valid]


@pytest.mark.parametrize("kernel", ["naive", "split", "mma"])
def test_every_variant_is_right_on_every_case(kernel: str) -> None:
    """The default variants and one with each option; `benchmarks/kernel_emulation.py` takes all there are."""
    rows = list(validate([one for one in VARIANTS if one.kernel == kernel]))
    assert faults(rows) == []
    assert {row.case for row in rows} == set(BY_NAME)


def test_kernels_that_write_the_cache_are_right_to_the_byte() -> None:
    rows = list(
        validate([one for one in [*VARIANTS, *WRITERS] if one.kernel not in {"naive", "split", "mma"}])
    )
    assert faults(rows) == []
    assert {row.kernel for row in rows} == {"reshape_and_cache", "copy_blocks"}


def test_fp8_as_newer_gpus_decode_it_is_right_too() -> None:
    """From sm_89 on an instruction decodes e4m3 in another order than shifts do, and to other units."""
    fp8 = [replace(one, kv_cache_dtype="fp8_e4m3") for one in (SPLIT, NAIVE)]
    emulator = Emulator(defines=(("KV_E4M3_CVT", "1"),))
    names = ("partial last block", "scales for heads", "many splits", "groups of 16", "sharp softmax")
    rows = list(validate([MMA_FP8, MMA_SHARED, *fp8], [BY_NAME[name] for name in names], solver=emulator))
    assert faults(rows) == []


@pytest.mark.parametrize("order", list(Order))
@pytest.mark.parametrize("variant", [MMA, MMA_SHARED, SPLIT], ids=lambda one: one.name)
def test_the_order_of_threads_changes_no_bit(variant: Variant, order: Order) -> None:
    emulator, posed = Emulator(), problem(variant, BY_NAME["many splits"])
    program = emulator.build([variant])
    forward, other = (emulator.attend(program, posed, order=one).outputs for one in (Order.FORWARD, order))
    assert {name: array.tobytes() for name, array in forward.items()} == {
        name: array.tobytes() for name, array in other.items()
    }


def test_a_case_that_goes_wrong_is_said_to() -> None:
    source = kernel_source()
    wrong = source.replace("natural_lse(maximum, sum) * LOG2_E", "natural_lse(maximum, sum)")
    assert wrong != source
    emulator = Emulator(wrong)
    rows = list(validate([SPLIT], [BY_NAME["many splits"], BY_NAME["one token"]], solver=emulator))
    assert [row.valid for row in rows] == [False, True]
    assert rows[0].tolerance["used"] > 1 >= rows[1].tolerance["used"]


def test_progress_tells_what_is_next() -> None:
    told: list[tuple[int, int, str]] = []
    list(validate([SPLIT], CASES[:2], lambda *one: told.append(one)))
    assert told == [(0, 2, SPLIT.name), (1, 2, SPLIT.name), (2, 2, "")]


@pytest.fixture(scope="module")
def watched(sanitizer: Sanitizer) -> tuple[Emulator, Path]:
    emulator = Emulator(sanitizer=sanitizer)
    return emulator, emulator.build([MMA, MMA_FP8, MMA_SHARED, SPLIT, NAIVE, *WRITERS])


@pytest.mark.parametrize("variant", [MMA, MMA_FP8, MMA_SHARED, SPLIT, NAIVE], ids=lambda one: one.name)
def test_no_sanitizer_reports_anything(watched: tuple[Emulator, Path], variant: Variant) -> None:
    """Requests that share blocks, in more chunks than one: so ``merge`` is watched too."""
    emulator, program = watched
    posed = problem(
        variant, Case("watched", (70, 37, 0), group=3, num_kv_heads=1, chunk_tokens=33, shared_blocks=2)
    )
    outcome = emulator.attend(program, posed)
    assert (outcome.error, outcome.reports) == (None, ())
    assert posed.judge(outcome.outputs).valid


def test_no_sanitizer_reports_anything_of_what_writes_the_cache(watched: tuple[Emulator, Path]) -> None:
    emulator, program = watched
    for posed in (*map(reshape_problem, WRITERS[:2]), copy_problem(WRITERS[2])):
        outcome = emulator.write(program, posed)
        assert (outcome.error, outcome.reports) == (None, ())
        assert posed.wrong_bytes(outcome.outputs) == 0


def traffic(variant: Variant, case: Case) -> tuple[Traffic, int]:
    """Of keys and values; and the bytes that have to be read at least."""
    emulator, posed = Emulator(), problem(variant, case)
    outcome = emulator.attend(emulator.build([variant]), posed, traffic=True)
    assert outcome.traffic is not None
    return outcome.traffic, posed.live_bytes


KV = ("key_cache", "value_cache")


@pytest.mark.parametrize("case", ["ragged batch", "many splits", "window and splits", "blocks of 1"])
@pytest.mark.parametrize("variant", [MMA, MMA_FP8, MMA_SHARED, SPLIT], ids=lambda one: one.name)
def test_mma_and_split_read_whole_sectors_and_nothing_but_what_is_attended(
    variant: Variant, case: str
) -> None:
    log, least = traffic(variant, BY_NAME[case])
    assert log.sector_efficiency(KV) == 1.0
    assert log.distinct(KV) == least


def test_mma_and_split_ask_for_little_twice() -> None:
    """What is asked for again are the rows of last tokens, which stand in for those past the end."""
    case = Case("long", (1024,), group=8, num_kv_heads=1)
    for variant in (MMA, MMA_SHARED, attention_variant("split", head_dim=128, group=8, dtype="bfloat16")):
        log, least = traffic(variant, case)
        assert log.requested_bytes(KV) == least


def test_naive_asks_for_a_multiple() -> None:
    log, least = traffic(NAIVE, Case("long", (256,), group=4, num_kv_heads=1))
    assert log.distinct(KV) == least
    assert log.sector_efficiency(["key_cache"]) == 4 / 32  # a float of each row's sector
    assert log.requested_bytes(KV) > 4 * 4 * least


RACY = (Path(__file__).parents[1] / "data" / "naive_racy.cu").read_text(encoding="utf-8")


def racy(
    case: Case, sanitizer: Sanitizer = Sanitizer.NONE, *, masked: bool = True
) -> tuple[Outcome, Problem]:
    """The first kernel of the project on a case; ``masked`` mends its other fault, so that the race is alone."""
    posed = problem(NAIVE, replace(case, lse=False))
    defines = (("RACY_HEAD_DIM", f"{NAIVE.head_dim}"), ("RACY_MASKED", f"{int(masked)}"))
    program = executable(
        [
            Source(
                "naive_racy.cu",
                f'{kernel_source()}\n#line 1 "naive_racy.cu"\n{RACY}',
                ("naive_racy",),
                defines,
            )
        ],
        sanitizer,
    )
    return run(program, [replace(posed.launches[0], kernel="naive_racy")], posed.arrays, ["output"]), posed


def test_the_race_of_the_first_kernel_is_reported_with_its_lines() -> None:
    outcome, _ = racy(Case("short", (20,), group=1, num_kv_heads=1), Sanitizer.THREAD)
    assert {one.kind for one in outcome.reports} == {"data race"}
    reported = {line for one in outcome.reports for line in one.lines}
    assert reported & {number for number, line in enumerate(RACY.splitlines(), 1) if "// race" in line}


def test_the_race_of_the_first_kernel_shows_in_its_result() -> None:
    outcome, posed = racy(Case("long", (200,), group=4))
    verdict = posed.judge(outcome.outputs)
    assert not verdict.valid
    assert verdict.max_rel_error > 0.1


def test_slots_without_a_token_show_in_the_first_kernel() -> None:
    case = Case("partial", (20,), group=1, num_kv_heads=1)
    outcome, _ = racy(case, masked=False)
    assert np.isnan(outcome.outputs["output"]).all()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("            sync_sharers();\n", ""),
        ("        sync_sharers();  // The last scores have been read.\n", ""),
        ("        place ^= 1;\n", ""),
    ],
    ids=["scores are read at once", "results are written at once", "one place for the scores of all turns"],
)
def test_warps_that_share_heads_race_without_their_barriers(old: str, new: str) -> None:
    source = kernel_source()
    assert source.count(old) == 1
    emulator = Emulator(source.replace(old, new), Sanitizer.THREAD)
    posed = problem(MMA_SHARED, Case("turns", (200,), group=16, num_kv_heads=1, chunk_tokens=256))
    outcome = emulator.attend(emulator.build([MMA_SHARED]), posed)
    assert {one.kind for one in outcome.reports} == {"data race"}


def test_a_removed_guard_is_reported_by_the_address_sanitizer() -> None:
    guard = "slot < 0 || slot >= p.num_slots"
    source = kernel_source()
    assert source.count(guard) == 1
    emulator = Emulator(source.replace(guard, "slot < 0"), Sanitizer.ADDRESS)
    posed = reshape_problem(WRITERS[0])
    outcome = emulator.write(emulator.build([WRITERS[0]]), posed)
    assert [one.kind for one in outcome.reports] == ["heap-buffer-overflow"]
    assert "stg128(" in source.splitlines()[outcome.reports[0].lines[0] - 1]


def test_a_removed_guard_ends_the_launch() -> None:
    emulator = Emulator(kernel_source().replace("slot < 0 || slot >= p.num_slots", "slot < 0"))
    error = emulator.write(emulator.build([WRITERS[0]]), reshape_problem(WRITERS[0])).error
    assert error is not None
    assert "out of bounds: a store of 16 bytes" in error


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "    __syncthreads();\n    const WorkItem",
            "    if (threadIdx.x < 64) __syncthreads();\n    const WorkItem",
            "divergent barrier",
        ),
        (
            "total += __shfl_xor_sync(ALL_LANES, total, 1);",
            "if (g() > 0) total += __shfl_xor_sync(ALL_LANES, total, 1);",
            "lanes of one mask wait at different places",
        ),
    ],
)
def test_threads_that_part_in_a_shipped_kernel_end_the_launch(old: str, new: str, said: str) -> None:
    assert kernel_source().count(old) == 1
    emulator = Emulator(kernel_source().replace(old, new))
    error = emulator.attend(emulator.build([MMA]), problem(MMA, BY_NAME["one token"])).error
    assert error is not None
    assert said in error


def test_every_seeded_bug_stands_in_the_source() -> None:
    """`benchmarks/kernel_mutations.py` builds and runs them, which takes a minute."""
    script = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "kernel_mutations.py"))
    for mutation in script["MUTATIONS"]:
        assert script["mutated"](mutation, kernel_source()) != kernel_source()
    assert sum(not mutation.known for mutation in script["MUTATIONS"]) >= 14


@pytest.mark.parametrize("part", ["mma: tokens past the end are read", "merge: chunks weigh the same"])
def test_a_seeded_bug_is_noticed(part: str) -> None:
    script = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "kernel_mutations.py"))
    (mutation,) = (one for one in script["MUTATIONS"] if one.name == part)
    assert script["noticed_by"](mutation) is not None
