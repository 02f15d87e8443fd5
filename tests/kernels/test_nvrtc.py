"""Variants compiled for every architecture, without a GPU: registers, spills, and what the machine code is made of.

All default variants for all architectures that NVRTC knows; the machine code's loop is read on three of them. The
whole matrix, options included, is `benchmarks/kernel_static.py --variants options`. Skipped without CuPy or NVRTC.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvplan.errors import InputError
from kvplan.kernels import nvrtc
from kvplan.kernels.nvrtc import CompilationFailed, CudaMissing, compile_variant
from kvplan.kernels.sass import MainLoop, NoDisassembler, find_nvdisasm, main_loop
from kvplan.kernels.variants import Variant, attention_variant, default_variants

MMA = Variant("mma", 128, "bfloat16", "bfloat16", 8)
MERGE = Variant("merge", 128, "bfloat16")


@pytest.fixture(scope="module")
def architectures() -> tuple[int, ...]:
    try:
        return nvrtc.architectures()
    except CudaMissing as error:
        pytest.skip(f"{error}; {error.hint}")


@pytest.fixture(scope="module")
def disassembler() -> None:
    try:
        find_nvdisasm()
    except NoDisassembler as error:
        pytest.skip(f"{error}; {error.hint}")


@pytest.mark.parametrize("variant", default_variants(), ids=lambda variant: variant.name)
def test_a_default_variant_keeps_its_budget_and_spills_nothing(
    variant: Variant, architectures: tuple[int, ...]
) -> None:
    assert set(architectures) >= {75, 80, 86, 89, 90, 100, 120}
    for architecture in architectures:
        if not variant.runs_on(architecture):
            continue
        made = compile_variant(variant, architecture)
        assert made.registers <= variant.register_budget, architecture
        assert (made.spill_bytes, made.stack_bytes, made.static_shared_bytes) == (0, 0, 0), architecture
        assert made.cubin.startswith(b"\x7fELF")


def loop(variant: Variant, architecture: int) -> MainLoop:
    found = main_loop(compile_variant(variant, architecture))
    assert found.local_accesses == 0
    return found


@pytest.mark.usefixtures("architectures", "disassembler")
@pytest.mark.parametrize("architecture", [80, 90, 120])
@pytest.mark.parametrize("group", [8, 16])
def test_mma_multiplies_on_tensor_cores_and_keeps_loads_under_way(group: int, architecture: int) -> None:
    variant = attention_variant("mma", head_dim=128, group=group, dtype="bfloat16")
    found = loop(variant, architecture)
    assert found.loads_128 == 32  # 32 tokens, a key and a value of 256 bytes each, by 32 lanes
    assert found.mma == (48 if group == 8 else 64)
    assert found.bytes_under_way >= 16 * 16  # K of a turn, or V
    assert found.instructions <= 22 * 16  # for each KiB that a warp reads


@pytest.mark.usefixtures("architectures", "disassembler")
@pytest.mark.parametrize("architecture", [90, 100])
def test_e4m3_is_converted_by_the_instruction_for_it(architecture: int) -> None:
    found = loop(Variant("mma", 128, "bfloat16", "fp8_e4m3", 8), architecture)
    assert found.mma == 72
    assert found.instructions <= 50 * found.loaded_bytes * 32 // 1024


@pytest.mark.usefixtures("architectures", "disassembler")
@pytest.mark.parametrize("architecture", [75, 90])
def test_split_has_the_loads_of_four_tokens_a_lane_under_way(architecture: int) -> None:
    found = loop(Variant("split", 128, "bfloat16", "bfloat16", 1), architecture)
    assert (found.loads_128, found.mma) == (8, 0)
    assert found.bytes_under_way >= 8 * 16


@pytest.mark.usefixtures("architectures")
def test_what_was_compiled_is_kept_and_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = compile_variant(MERGE, 90)
    (kept,) = (tmp_path / "kvplan" / "kernels").iterdir()
    assert MERGE.name in kept.name

    def fails(*_: object) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(nvrtc, "_compiled", fails)
    assert compile_variant(MERGE, 90) == first


@pytest.mark.usefixtures("architectures")
def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kvplan").write_text("a file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(InputError, match="cannot keep a compiled kernel"):
        compile_variant(MERGE, 90)


@pytest.mark.usefixtures("architectures")
def test_a_source_that_does_not_compile_is_said() -> None:
    with pytest.raises(
        CompilationFailed, match=r"kvplan_split_d128_float12_h1 does not compile: paged_attention\.cu"
    ):
        compile_variant(Variant("split", 128, "float12", "float12"), 90)


def test_a_kernel_is_not_compiled_for_what_it_is_not_made_for() -> None:
    with pytest.raises(InputError, match="not made for sm_75"):
        compile_variant(MMA, 75)


def test_without_cupy_that_is_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(CudaMissing) as caught:
        nvrtc.load_nvrtc()
    assert (caught.value.lack, caught.value.exit_code) == ("cupy", 3)
