"""`kernel-bench` on a GPU, with the emulator in its place: what is validated, what is timed, what is left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from emulated_cupy import BYTES_PER_S, TICK_S, CUDARuntimeError, Gpu, emulated_gpu

from kvplan.errors import InputError
from kvplan.jobs.kernel_bench import KernelBenchOptions, KernelBenchResult, shapes_of
from kvplan.kernels.cases import CASES
from kvplan.kernels.gpu_bench import bench_on_gpu, spread_of
from kvplan.kernels.shape import Shape
from kvplan.kernels.timed_batch import timed_batch
from kvplan.kernels.timing import REPEATS, WARMUPS

pytestmark = pytest.mark.usefixtures("compiler")

FEW = tuple(case for case in CASES if case.name in {"one token", "many splits"})
SMALL: dict[str, Any] = {"batch": (3,), "seq": (40,), "heads": (8,), "kv_heads": (2,), "head_dim": (64,)}
BYTES = 2 * 3 * 40 * 2 * 64 * 2 + 2 * 3 * 8 * 64 * 2 + 4 * 3 * 3  # keys and values; query and output; table


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    with emulated_gpu() as found:
        yield found


def bench(cases: Any = FEW, progress: Any = None, **options: Any) -> KernelBenchResult:
    chosen = KernelBenchOptions(**SMALL | options)
    return bench_on_gpu(chosen, shapes_of(chosen), progress, cases=cases)


def test_every_kernel_is_right_on_every_case_launched_as_on_a_gpu(gpu: Gpu) -> None:
    result = bench(CASES, validate_only=True)
    assert [(row.variant, row.case, row.error) for row in result.results if not row.valid] == []
    assert {row.kernel for row in result.results} == {
        "naive",
        "split",
        "mma",
        "reshape_and_cache",
        "copy_blocks",
    }
    assert {row.case for row in result.results} >= {"as asked", *(case.name for case in CASES)}
    assert result.validation == ()
    assert result.is_good
    assert all(row.time_s is None for row in result.results)


def test_times_come_with_the_bytes_that_were_moved_and_both_bandwidths(gpu: Gpu) -> None:
    result = bench()
    assert [row.kernel for row in result.results] == ["naive", "split", "mma"]
    for row in result.results:
        assert row.valid
        assert row.time_s == (TICK_S, TICK_S, TICK_S)
        assert row.bytes_moved == BYTES
        assert row.achieved_bytes_per_s == BYTES / TICK_S
        assert row.copy_bytes_per_s == pytest.approx(BYTES_PER_S)
        assert row.bandwidth_share == BYTES / TICK_S / 4.8e12  # the datasheet of an H200
        assert row.copy_share == pytest.approx(BYTES / TICK_S / BYTES_PER_S)
    assert {row.case for row in result.validation} > {"one token", "many splits"}
    device = result.to_dict()["device"]
    assert isinstance(device, dict)
    assert (device["gpu"], device["bandwidth_source"]) == ("h200", "datasheet of h200")


def test_all_cases_come_before_the_first_time(gpu: Gpu) -> None:
    bench(kernel=("split",))
    name = "kvplan_split_d64_bfloat16_h4"
    timed = [name] * (WARMUPS + REPEATS)
    assert gpu.launches[-len(timed) :] == timed
    assert gpu.launches[-len(timed) - 2 : -len(timed)] == [name, name]  # the shape itself, twice
    assert {"kvplan_copy_blocks", "kvplan_merge_d64_bfloat16"} <= set(gpu.launches[: -len(timed) - 2])


def test_percentiles_are_those_of_the_repeats() -> None:
    assert spread_of([float(number) for number in range(101)]) == (10, 50, 90)


def test_a_kernel_that_is_wrong_on_a_case_is_not_timed(gpu: Gpu) -> None:
    def spoil(name: str, memory: dict[str, np.ndarray]) -> None:
        if "mma" in name:
            memory["output"][1] ^= 0x40

    gpu.spoil = spoil
    result = bench()
    naive, split, mma = result.results
    assert naive.valid
    assert split.valid
    assert (mma.valid, mma.time_s, mma.error) == (False, None, "not run: wrong on one token")
    assert not result.is_good
    wrong = [row for row in result.validation if not row.valid]
    assert {row.kernel for row in wrong} == {"mma"}
    assert all(row.tolerance is not None for row in wrong)


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (lambda memory, run: memory["output"].__setitem__(-1, run), "two runs differ"),
        (lambda memory, run: memory["output"].fill(0xFF), "a number of the output is missing"),
        (lambda memory, run: memory["output"].view(np.uint16).fill(0x3F80), None),
    ],
    ids=["unlike itself", "unwritten", "wrong"],
)
def test_a_kernel_that_is_wrong_on_the_shape_is_not_timed(
    gpu: Gpu, fault: Callable[[Any, int], None], error: str | None
) -> None:
    def spoil(name: str, memory: dict[str, np.ndarray]) -> None:
        if "split" in name:
            fault(memory, len(gpu.launches) % 256)

    gpu.spoil = spoil
    (row,) = bench((), kernel=("split",)).results
    assert (row.valid, row.time_s, row.error) == (False, None, error)
    if error is None:
        assert row.max_abs_error is not None
        assert row.max_abs_error > 0.5


def test_two_runs_of_a_case_must_be_equal_to_the_bit(gpu: Gpu) -> None:
    def spoil(name: str, memory: dict[str, np.ndarray]) -> None:
        if "naive" in name:
            memory["output"][0] ^= len(gpu.launches) & 1

    gpu.spoil = spoil
    result = bench(kernel=("naive",))
    assert "two runs differ in output" in {row.error for row in result.validation}


def test_what_ends_a_launch_is_said_of_its_case(gpu: Gpu) -> None:
    def spoil(name: str, memory: dict[str, np.ndarray]) -> None:
        if "copy_blocks" in name:
            raise CUDARuntimeError("cudaErrorIllegalAddress: an illegal memory access was encountered")

    gpu.spoil = spoil
    result = bench(kernel=("naive",))
    errors = {row.kernel: row.error for row in result.validation if not row.valid}
    assert errors == {"copy_blocks": "cudaErrorIllegalAddress: an illegal memory access was encountered"}


def test_what_ends_a_launch_on_the_shape_is_said_in_its_row(gpu: Gpu) -> None:
    def spoil(name: str, memory: dict[str, np.ndarray]) -> None:
        if "naive" in name:
            raise CUDARuntimeError("cudaErrorIllegalAddress")

    gpu.spoil = spoil
    naive, split = bench((), kernel=("naive", "split")).results
    assert (naive.valid, naive.error, naive.time_s) == (False, "cudaErrorIllegalAddress", None)
    assert split.valid


def test_naive_is_left_out_where_its_scores_do_not_fit(compiler: None) -> None:
    with emulated_gpu(sharedMemPerBlockOptin=16000):
        result = bench(batch=(1,), seq=(4096,), kernel=("naive", "mma"))
    assert [row.kernel for row in result.results] == ["mma"]
    (skipped,) = result.skipped
    assert skipped.what.startswith("naive, 1 x 4096")
    assert "needs 16896 bytes of shared memory" in skipped.reason


def test_a_shape_that_does_not_fit_is_left_out_and_the_others_are_timed(compiler: None) -> None:
    with emulated_gpu(memory_bytes=10 << 20):
        result = bench(batch=(3, 3000), kernel=("naive",))
    assert [row.batch for row in result.results] == [3]
    (skipped,) = result.skipped
    assert skipped.what.startswith("3000 x 40")
    assert skipped.reason.startswith("its cache takes 70.312 MiB, ")


def test_an_fp8_cache_and_half_a_block_are_valid(gpu: Gpu) -> None:
    (row,) = bench(kernel=("mma",), kv_cache_dtype=("fp8",), seq=(37,)).results
    assert row.valid
    assert row.kv_cache_dtype == "fp8_e4m3"


def test_tables_take_turns_over_blocks_of_their_own(gpu: Gpu) -> None:
    shape = Shape(2, 40, 4, 2, 64, 16, "bfloat16", "bfloat16")
    batch = timed_batch(shape, l2_cache_bytes=100_000)
    assert len(batch.tables) == 10  # 400,000 bytes, each table's tokens have 40,960
    blocks = batch.host_tables.ravel()
    assert sorted(blocks) == list(range(2 * 3 * 10))
    assert list(blocks) != sorted(blocks)
    keys = batch.keys.get().reshape(len(blocks), -1)
    assert len(np.unique(keys, axis=0)) == len(blocks)
    nan = np.isnan((keys.astype(np.uint32) << 16).view(np.float32)).reshape(-1, 16, 2 * 64)
    last = batch.host_tables[:, :, -1].ravel()
    assert nan[last][:, 8:].all()
    assert nan.sum() == len(last) * 8 * 2 * 64


def test_fewer_tables_are_made_where_memory_is_short(compiler: None) -> None:
    shape = Shape(2, 40, 4, 2, 64, 16, "bfloat16", "bfloat16")
    with emulated_gpu(memory_bytes=6 << 20):  # the drawn numbers take 4 MiB
        batch = timed_batch(shape, l2_cache_bytes=1 << 20, share=0.05)
    assert len(batch.tables) == 5


@pytest.mark.parametrize("at", ["kvplan_naive_d64_bfloat16", "3 x 40"])
def test_an_interrupt_gives_what_was_finished(gpu: Gpu, at: str) -> None:
    seen = 0

    def progress(done: int, total: int, what: str) -> None:
        nonlocal seen
        seen += what.startswith(at)
        if seen == (2 if at.startswith("kvplan") else 1):
            raise KeyboardInterrupt

    result = bench(kernel=("naive",), progress=progress)
    assert result.is_partial
    assert result.results == ()
    assert len(result.validation) == (1 if at.startswith("kvplan") else 9)
    assert result.to_dict()["status"] == "interrupted"


MODEL = """\
small:
  architectures: [Gemma2ForCausalLM]
  hidden_size: 128
  intermediate_size: 128
  vocab_size: 100
  num_hidden_layers: 4
  num_attention_heads: 4
  num_key_value_heads: 2
  head_dim: 64
  sliding_window: 16
  max_position_embeddings: 128
"""


def test_a_step_runs_all_layers_each_with_its_own_cache(gpu: Gpu, tmp_path: Path) -> None:
    (tmp_path / "models.yaml").write_text(MODEL)
    step = {"heads": (), "kv_heads": (), "head_dim": (), "kernel": ("mma",)}
    result = bench(model="small", models=str(tmp_path / "models.yaml"), step=True, **step)
    assert result.is_good
    found = result.step
    assert found is not None
    assert (found.num_layers, found.kernel, found.batch, found.seq) == (4, "mma", 3, 40)
    assert found.time_s.p50 == 4 * TICK_S
    token = 3 * 2 * 2 * 64 * 2
    rest = 2 * 3 * 4 * 64 * 2 + 4 * 3 * 3
    assert found.bytes_moved == 2 * (40 * token + rest) + 2 * (16 * token + rest)
    assert found.predicted_s is not None
    # Two layers read all tokens, two the window; the new token is written in all four; 0.83 is measured on an H200.
    assert found.predicted_s == pytest.approx(token * (2 * 40 + 2 * 16 + 4) / (4.8e12 * 0.83), rel=1e-6)


def test_a_step_needs_a_model_and_one_shape(gpu: Gpu) -> None:
    from kvplan.jobs.kernel_bench import kernel_bench

    with pytest.raises(InputError, match="--step times a step of a model"):
        kernel_bench(step=True)
    with pytest.raises(InputError, match="a step has one shape"):
        kernel_bench(step=True, model="llama-2-13b", batch=[1, 2])
    with pytest.raises(InputError, match="no effect on a step"):
        kernel_bench(step=True, model="llama-2-13b", heads=8)
