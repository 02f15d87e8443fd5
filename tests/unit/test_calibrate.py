"""Calibration of step times: constants come back from steps made with them, and what is written is read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from kvplan import simulate
from kvplan.calibration import Calibration, StepTimes, load_calibration, save_calibration
from kvplan.config import load_model
from kvplan.core.cost import LatencyModel
from kvplan.core.engine import StepWork
from kvplan.core.step_constants import StepConstants
from kvplan.errors import InputError
from kvplan.jobs.calibrate import calibrate, steps_against
from kvplan.options import Resolver, SizeOptions
from kvplan.serving import find_gpu, serve
from kvplan.step_time import latency_model

MODELS = (("llama-2-7b", 1), ("codellama-34b", 2), ("llama-2-70b", 4))
#: A machine that is unlike the shipped one in every constant that decode steps depend on.
TRUTH = {
    "weights_bandwidth_share": 0.71,
    "kv_bandwidth_share": 0.62,
    "all_reduce_s": 9e-6,
    "kernel_s": 7e-6,
    "step_s": 3e-3,
}


def model_of(name: str, tp: int) -> LatencyModel:
    gpu, count = find_gpu("h100-80gb")
    options = SizeOptions(gpu="h100-80gb", tensor_parallel_size=tp, max_model_len=4096)
    served = serve(load_model(name), Resolver(options), gpu=gpu, gpu_count=count)
    return latency_model(served)[0]


def rows(noise: float = 0.0) -> Iterator[str]:
    """Steps of three models on the machine that `TRUTH` describes."""
    draw = Random(3)
    yield "batch_size,context_mean,step_ms,model,gpu,tp"
    for name, tp in MODELS:
        model = model_of(name, tp)
        truth = model.with_constants(replace(model.constants, **TRUTH))
        for batch in (1, 2, 4, 8, 16, 32, 64):
            for context in (128, 512, 2048):
                work = StepWork(batch, batch * context, [], batch)
                step = truth.step_ps(work) / 1e9 * (1 + noise * draw.uniform(-1, 1))
                yield f"{batch},{context},{step},{name},h100-80gb,{tp}"


def table(folder: Path, *, noise: float = 0.0, wild: int = 0) -> Path:
    lines = list(rows(noise))
    for number in range(wild):
        cells = lines[1 + 7 * number].split(",")
        lines[1 + 7 * number] = ",".join([*cells[:2], str(3 * float(cells[2])), *cells[3:]])
    path = folder / "steps.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def constants_of(steps: StepTimes | None) -> StepConstants:
    assert steps is not None
    return StepConstants(**steps.constants)


def test_the_constants_that_made_the_steps_come_back(tmp_path: Path) -> None:
    result = calibrate(table(tmp_path))
    assert result.models == tuple(name for name, _ in MODELS)
    assert result.before is not None
    assert result.after is not None
    assert result.before.median > 0.1
    assert result.after.median < 0.002
    found = constants_of(result.calibration.step_times)
    assert found.weights_bandwidth_share == pytest.approx(0.71, rel=0.03)
    assert found.kv_bandwidth_share == pytest.approx(0.62, rel=0.03)
    # What a step, its kernels and its all-reduces take is told apart as far as other models need it.
    model, work = model_of("llama-2-13b", 1), StepWork(10, 10_000, [], 10)
    truth = model.with_constants(replace(model.constants, **TRUTH)).step_ps(work)
    assert model.with_constants(found).step_ps(work) == pytest.approx(truth, rel=0.02)


def test_a_few_wild_steps_move_nothing(tmp_path: Path) -> None:
    result = calibrate(table(tmp_path, noise=0.01, wild=6))
    assert result.after is not None
    assert result.after.median < 0.01
    assert result.after.p95 > 0.5  # the wild ones are told
    found = constants_of(result.calibration.step_times)
    assert found.weights_bandwidth_share == pytest.approx(0.71, rel=0.05)


def test_what_steps_do_not_depend_on_stays_as_it_was(tmp_path: Path) -> None:
    result = calibrate(table(tmp_path))
    held = {one.name: one for one in result.constants if not one.fitted}
    assert {"attention_flops_share", "launch_kernel_s"} <= held.keys()
    assert all(one.before == one.after for one in held.values())
    fitted = constants_of(result.calibration.step_times)
    assert fitted.api_s == model_of(*MODELS[0]).constants.api_s


def test_rows_of_others_are_left_out_and_counted(tmp_path: Path) -> None:
    result = calibrate(table(tmp_path), model="llama-2-70b")
    assert result.models == ("llama-2-70b",)
    assert result.left_out == {"rows of another model, GPU or parallelism": 42}
    assert result.after is not None
    assert result.after.count == 21
    assert any("cannot tell" in note for note in result.notes)


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("batch_size,context_mean,step_ms\n1,2,3\n", {}, "the measurements do not say their model"),
        (
            "batch_size,context_mean,step_ms\n" + "1,2,3\n" * 9,
            {"model": "llama-2-7b"},
            "the measurements do not say their gpu",
        ),
        (
            "batch_size,context_mean,step_ms,model,gpu\n" + "1,2,3,llama-2-7b,h100\n" * 3,
            {},
            "3 steps of use, which are too few",
        ),
        (
            "batch_size,context_mean,step_ms,model,gpu\n"
            + "1,2,3,llama-2-7b,h100-80gb\n" * 4
            + "1,2,3,llama-2-7b,l4\n" * 4,
            {},
            "several GPUs",
        ),
        (
            "batch_size,context_mean,step_ms,model,gpu\n1,2,3,llama-2-7b,h100\n",
            {"model": "llama-2-13b"},
            "no row of the file is of this model",
        ),
    ],
)
def test_what_cannot_be_fitted_is_refused(
    tmp_path: Path, text: str, options: dict[str, str], message: str
) -> None:
    path = tmp_path / "steps.csv"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        calibrate(path, **options)


def test_constants_are_read_as_they_were_written_and_used(tmp_path: Path) -> None:
    result = calibrate(table(tmp_path))
    path = tmp_path / "c.yaml"
    with path.open("w") as file:
        save_calibration(file, result.calibration)
    kept = load_calibration(path)
    assert kept.step_times is not None
    found, written = constants_of(kept.step_times), constants_of(result.calibration.step_times)
    assert found.coefficients() == pytest.approx(written.coefficients(), rel=1e-5)
    assert not kept.has_memory
    settings = {"model": "llama-2-7b", "gpu": "h100-80gb", "limit": 30}
    run = simulate("chat", calibration=str(path), **settings)
    assert run.latency.model["calibration"] == f"calibrated: {tmp_path / 'steps.csv'}"
    error = run.latency.model["measured_error"]
    assert isinstance(error, dict)
    assert error["rows"] == 63
    # 3 ms more a step and slower memory.
    slower, shipped = run.latency.tpot_s.mean, simulate("chat", **settings).latency.tpot_s.mean
    assert slower is not None
    assert shipped is not None
    assert slower > shipped + 0.003


def test_memory_terms_stay_beside_step_times(tmp_path: Path) -> None:
    memory = Calibration("vllm", "0.33", "llama-2-7b", "a.log:3", overhead_bytes=2 << 30)
    old = tmp_path / "memory.yaml"
    with old.open("w") as file:
        save_calibration(file, memory)
    both = calibrate(table(tmp_path), calibration=str(old)).calibration
    assert both.overhead_bytes == 2 << 30
    assert both.source == "a.log:3"
    assert both.step_times is not None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"gpu": "l4"}, "its step times are not used: GPU h100-80gb there, l4 here"),
        (
            {"model": "llama-2-13b", "gpu": "h100-80gb"},
            "carried over: model llama-2-7b there, llama-2-13b here",
        ),
    ],
)
def test_where_step_times_do_not_hold_is_said(tmp_path: Path, changes: dict[str, str], reason: str) -> None:
    path = tmp_path / "c.yaml"
    steps = StepTimes(
        "s.csv", "table of step times", {"weights_bandwidth_share": 0.5}, (), 9, 0.01, 0.02, 0.9, 1.1
    )
    kept = Calibration("vllm", "0.33", "llama-2-7b", "s.csv", gpu="h100-80gb", step_times=steps)
    with path.open("w") as file:
        save_calibration(file, kept)
    settings = {"model": "llama-2-7b", "max_model_len": 1024, **changes}
    run = simulate("chat", calibration=str(path), limit=3, **settings)
    assert any(reason in warning for warning in run.warnings)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("weights_bandwidth_share: 0.5", "weights_bandwidth_share: 0.0", "not a share from 0.001"),
        ("weights_bandwidth_share: 0.5", "wieghts_bandwidth_share: 0.5", "field of a step-time model"),
        ("weights_bandwidth_share: 0.5", "weights_bandwidth_share: much", 'is "much", not a number'),
        ('source: "s.csv"\n  form', "form", "source is missing"),
        ("fitted: []", "fitte: []", "fitted is missing"),
        ("median: 0.01", "median: -1", "median is"),
    ],
)
def test_a_wrong_file_is_one_clear_error(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "c.yaml"
    steps = StepTimes("s.csv", "table", {"weights_bandwidth_share": 0.5}, (), 9, 0.01, 0.02, 0.9, 1.1)
    with path.open("w") as file:
        save_calibration(file, Calibration("vllm", "0.33", "m", "s.csv", step_times=steps))
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(InputError, match=message) as caught:
        load_calibration(path)
    assert str(path) in str(caught.value.where)


def test_the_error_against_other_constants(tmp_path: Path) -> None:
    path = table(tmp_path)
    shipped = steps_against(path)
    constants = constants_of(calibrate(path).calibration.step_times)
    assert steps_against(path, constants=constants).median < shipped.median / 10
