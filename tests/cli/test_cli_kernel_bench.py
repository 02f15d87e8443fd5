"""`kernel-bench` on the command line: without a GPU, with the emulator in place of one, by NVRTC where there is one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import Cli
from emulated_cupy import BYTES_PER_S, Gpu, emulated_gpu, hide_cupy

from kvplan.kernels.emulation.build import NoCompiler, find_compiler
from kvplan.kernels.nvrtc import CudaMissing, load_nvrtc
from kvplan.measurements import read_measurements

SHAPE = "--batch 2 --seq 20 --heads 2 --kv-heads 1 --head-dim 64 --kernel naive"
RESULT = {
    *("kernel", "variant", "case", "batch", "seq", "heads", "kv_heads", "head_dim", "block_size", "dtype"),
    *(
        "kv_cache_dtype",
        "max_abs_error",
        "max_rel_error",
        "tolerance",
        "valid",
        "error",
        "time_s",
        "bytes_moved",
    ),
    *("achieved_bytes_per_s", "copy_bytes_per_s", "bandwidth_share", "copy_share"),
}


@pytest.fixture
def compiler(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Skips without a C++ compiler; what is built is kept for the session, outside of the user's cache."""
    try:
        find_compiler()
    except NoCompiler as error:
        pytest.skip(str(error))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "builds"))


@pytest.fixture
def gpu(compiler: None) -> Iterator[Gpu]:
    with emulated_gpu() as found:
        yield found


@pytest.mark.parametrize(
    "command", ["kernel-bench", "kernel-bench --validate-only", "kernel-bench --compile-only"]
)
def test_without_cupy_the_exit_code_is_3_and_the_remedy_is_named(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    hide_cupy(monkeypatch)
    outcome = cli(command)
    assert (outcome.code, outcome.out) == (3, "")
    assert outcome.err == (
        "kvplan: error: CuPy is not installed\n"
        "pip install 'kvplan[cuda13]' (or cuda12, for drivers older than 580)\n"
    )
    outcome = cli(f"{command} --json")
    assert (outcome.code, outcome.err) == (3, "")
    assert outcome.document["error"]["message"] == "CuPy is not installed"


def test_emulation_needs_no_gpu_and_gives_no_time(cli: Cli, compiler: None) -> None:
    outcome = cli(f"kernel-bench --emulate {SHAPE}")
    assert (outcome.code, outcome.err) == (0, "")
    assert "emulated on the CPU: the same source, right or wrong, but no times" in outcome.out
    assert "1 of 1 result valid, against float64" in outcome.out
    document = cli(f"kernel-bench --emulate {SHAPE} --json").document
    (row,) = document["results"]
    assert set(row) == RESULT
    assert (row["kernel"], row["valid"], row["time_s"], row["case"]) == ("naive", True, None, "as asked")
    assert (document["mode"], document["status"], document["device"]) == ("emulate", "done", None)
    assert document["config"]["heads"] == {"value": [2], "source": "--heads"}
    assert document["config"]["block_size"] == {"value": [16], "source": "default"}


def test_too_much_to_emulate_is_refused(cli: Cli) -> None:
    outcome = cli("kernel-bench --emulate --batch 64 --seq 4096")
    assert outcome.code == 2
    assert "take too long on a CPU (--emulate)" in outcome.err


def test_a_gpu_is_timed_and_drawn(cli: Cli, gpu: Gpu, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    outcome = cli(f"kernel-bench {SHAPE} --picture out.svg")
    assert (outcome.code, outcome.err) == (0, "")
    assert "NVIDIA H200: sm_90, 4 multiprocessors" in outcome.out
    assert "2 x 20, 2/1 heads x 64 bfloat16, blocks of 16; at least" in outcome.out
    assert "a plain copy in this GPU's memory: 1 GB/s" in outcome.out
    assert "wrong" not in outcome.out
    assert (tmp_path / "out.svg").read_text().startswith("<?xml")


def test_the_document_of_a_gpu_has_the_keys_of_the_contract(cli: Cli, gpu: Gpu, tmp_path: Path) -> None:
    outcome = cli(f"kernel-bench {SHAPE} --json")
    (tmp_path / "bench.json").write_text(outcome.out)
    rates = read_measurements(tmp_path / "bench.json").rates
    assert rates is not None
    assert (rates.device, rates.copy_bytes_per_s) == ("NVIDIA H200", pytest.approx(BYTES_PER_S))
    document = outcome.document
    (row,) = document["results"]
    assert set(row) == RESULT
    assert set(row["time_s"]) == {"p10", "p50", "p90"}
    assert row["achieved_bytes_per_s"] == row["bytes_moved"] / row["time_s"]["p50"]
    assert {one["case"] for one in document["validation"]} > {"one token", "unknown block"}
    assert document["device"]["arch"] == 90


def test_a_mismatch_is_exit_code_1(cli: Cli, gpu: Gpu) -> None:
    def spoil(name: str, memory: dict[str, Any]) -> None:
        if "naive" in name:
            memory["output"][1] ^= 0x40

    gpu.spoil = spoil
    outcome = cli(f"kernel-bench {SHAPE}")
    assert outcome.code == 1
    assert "kvplan_naive_d64_bfloat16 is wrong on as asked: not run: wrong on one token" in outcome.out
    assert cli(f"kernel-bench {SHAPE} --json").code == 1


def test_an_interrupt_gives_what_was_finished_and_130(cli: Cli, gpu: Gpu) -> None:
    def interrupt(name: str, memory: dict[str, Any]) -> None:
        if len(gpu.launches) == 5:
            raise KeyboardInterrupt

    gpu.spoil = interrupt
    outcome = cli(f"kernel-bench {SHAPE}")
    assert (outcome.code, outcome.err) == (130, "kvplan: interrupted\n")
    assert "interrupted: this is what was finished" in outcome.out
    assert "2 of 2 results valid" in outcome.out


def test_compiling_needs_no_gpu(cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    try:
        load_nvrtc()
    except CudaMissing as error:
        pytest.skip(f"{error}; {error.hint}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    outcome = cli("kernel-bench --compile-only --arch 90 --kernel mma")
    assert (outcome.code, outcome.err) == (0, "")
    assert "mma_d128_bfloat16_h8" in outcome.out
    assert "4 of 4 within their registers, without spills (NVRTC" in outcome.out
    outcome = cli("kernel-bench --compile-only --arch 61")
    assert outcome.code == 2
    assert "sm_61 is none that these kernels and this NVRTC know (--arch)" in outcome.err
