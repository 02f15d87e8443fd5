"""Calibrations in place of the estimate: where they hold, what is carried over, and what is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvplan import size
from kvplan.calibration import Calibration, save_calibration
from kvplan.core.overhead import Overhead
from kvplan.jobs.size import SizeResult

GIB = 1 << 30
#: Llama-3.1-8B: 8,030,261,248 parameters and a table of positions of 131,072 x 128, 2 bytes each.
LOADED = 16_060_522_496 + 33_554_432

KEPT = Calibration(
    engine="vllm",
    version="0.19.1",
    model="llama-3.1-8b",
    source="a.log:3",
    num_layers=32,
    hidden_size=4096,
    vocab_size=128256,
    gpu="h100-80gb",
    gpu_memory_bytes=85_029_158_912,
    tensor_parallel_size=1,
    pipeline_parallel_size=1,
    data_parallel_size=1,
    enable_expert_parallel=False,
    dtype="bfloat16",
    max_num_seqs=256,
    max_num_batched_tokens=8192,
    enforce_eager=False,
    weights_bytes=LOADED + 7_000_000,
    activations_bytes=GIB,
    cuda_graphs_bytes=GIB // 2,
    runtime_bytes=GIB // 4,
    overhead_bytes=2 * GIB,
    rounding_bytes=10_000_000,
)
SETTINGS: dict[str, Any] = {"gpu": "h100-80gb", "engine": "vllm@0.19", "max_num_seqs": 256}


def sized(folder: Path, kept: Calibration, model: str = "llama-3.1-8b", **changes: Any) -> SizeResult:
    path = folder / "c.yaml"
    with path.open("w") as file:
        save_calibration(file, kept)
    return size(model, calibration=str(path), **{**SETTINGS, **changes})


def overhead_of(result: SizeResult) -> Overhead:
    assert result.capacity is not None
    assert result.capacity.overhead_bytes is not None
    return result.capacity.overhead_bytes


def source_of(result: SizeResult) -> str | None:
    assert result.capacity is not None
    return result.capacity.overhead_source


def test_the_measured_sum_replaces_the_estimate(tmp_path: Path) -> None:
    result = sized(tmp_path, KEPT)
    overhead = overhead_of(result)
    # What the engine counts as weights beyond ours is overhead; 0.19 takes no graphs from the budget.
    total = 2 * GIB + 7_000_000
    assert (overhead.activations, overhead.cuda_graphs, overhead.runtime) == (GIB, 0, total - GIB)
    assert (overhead.low, overhead.high) == (total - 10_000_000, total + 10_000_000)
    assert (source_of(result), overhead.uncounted_graphs) == ("measured", GIB // 2)
    assert result.warnings == ()
    assert result.config["overhead"] == ("measured", "a.log:3", False)
    assert result.capacity is not None
    assert result.capacity.fits_confidence == "likely"
    assert result.gpu is not None
    requested = result.gpu.memory_bytes * 9 // 10
    assert result.capacity.available_kv_bytes == pytest.approx(requested - LOADED - total, abs=1)


def test_lengths_and_utilization_do_not_matter(tmp_path: Path) -> None:
    assert overhead_of(sized(tmp_path, KEPT)) == overhead_of(
        sized(tmp_path, KEPT, max_model_len=4096, gpu_memory_utilization=0.5, kv_cache_dtype="fp8")
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"engine": "vllm@0.21"}, "version 0.19 there, 0.21 here"),
        ({"gpu": "h200-141gb"}, "GPU h100-80gb of 85,029,158,912 bytes there"),
        ({"gpu": None, "gpu_memory": "40GiB"}, "GPU h100-80gb of 85,029,158,912 bytes there, gpu of 42,949,672,960"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size 1 there, 2 here"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size 1 there, 2 here"),
        ({"dtype": "float32"}, "dtype bfloat16 there, float32 here"),
        ({"model": "qwen3-8b"}, "a model of 32 layers of 4096, vocabulary 128256 there"),
    ],
)  # fmt: skip
def test_another_start_is_not_used_and_a_warning_says_why(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    model = changes.get("model", "llama-3.1-8b")
    options = {name: value for name, value in changes.items() if name != "model"}
    result = sized(tmp_path, KEPT, model, **options)
    assert source_of(result) == "estimated"
    assert overhead_of(result) == overhead_of(size(model, **{**SETTINGS, **options}))
    (warning,) = result.warnings
    assert warning.startswith("calibration of a.log:3: not used: ")
    assert reason in warning
    assert result.config["overhead"].value == "estimated"


def test_a_card_without_a_name_is_known_by_its_memory(tmp_path: Path) -> None:
    assert source_of(sized(tmp_path, KEPT, gpu=None, gpu_memory=85_029_158_912 - GIB // 100)) == "measured"
    nameless = KEPT._replace(gpu=None)
    assert source_of(sized(tmp_path, nameless)) == "measured"


def test_other_batch_limits_shift_it_by_the_difference_of_the_estimates(tmp_path: Path) -> None:
    result = sized(tmp_path, KEPT, max_num_batched_tokens=16384)
    before, after = (
        overhead_of(size("llama-3.1-8b", **SETTINGS, max_num_batched_tokens=tokens))
        for tokens in (8192, 16384)
    )
    overhead = overhead_of(result)
    grown = after.activations - before.activations
    assert grown > 0
    assert overhead.activations == GIB + grown
    assert overhead.total("mid") == 2 * GIB + 7_000_000 + grown
    assert overhead.high - overhead.low > 20_000_000  # less is known than of the start itself
    assert source_of(result) == "scaled"
    assert result.warnings == (
        "calibration of a.log:3: scaled by our estimate: max_num_batched_tokens 8192 there, 16384 here",
    )


def test_weights_of_another_format_are_not_taken_for_ours(tmp_path: Path) -> None:
    result = sized(tmp_path, KEPT._replace(quantization="awq", weights_bytes=6 * GIB))
    assert overhead_of(result).total("mid") == 2 * GIB
    (warning,) = result.warnings
    assert warning == (
        f"calibration of a.log:3: its weights of 6,442,450,944 bytes are not used: {LOADED:,} are counted here"
    )


def test_parts_alone_are_added_up(tmp_path: Path) -> None:
    kept = KEPT._replace(overhead_bytes=None, weights_bytes=None)
    overhead = overhead_of(sized(tmp_path, kept))
    assert overhead.total("mid") == GIB + GIB // 4
    kept = kept._replace(runtime_bytes=None)
    estimate = overhead_of(size("llama-3.1-8b", **SETTINGS))
    overhead = overhead_of(sized(tmp_path, kept))
    assert overhead.total("mid") == GIB + estimate.runtime
    assert overhead.low <= overhead.total("mid") <= overhead.high


def test_graphs_are_taken_off_where_the_version_does(tmp_path: Path) -> None:
    kept = KEPT._replace(version="0.33.2")
    overhead = overhead_of(sized(tmp_path, kept, engine="vllm@0.33"))
    assert (overhead.activations, overhead.cuda_graphs) == (GIB, GIB // 2)
    assert overhead.total("mid") == 2 * GIB + 7_000_000


def test_a_newer_engine_goes_by_the_newest_rules(tmp_path: Path) -> None:
    kept = KEPT._replace(version="0.40.0")
    assert source_of(sized(tmp_path, kept, engine="vllm@0.33")) == "measured"


def test_where_it_has_no_effect_a_warning_says_so(tmp_path: Path) -> None:
    result = sized(tmp_path, KEPT, kv_cache_memory_bytes="10GiB")
    assert result.warnings == ("the calibration has no effect: the pool is given",)
    result = sized(tmp_path, KEPT, gpu=None)
    assert result.warnings == ("the calibration has no effect: the memory of a GPU is not known",)
    assert result.capacity is None
