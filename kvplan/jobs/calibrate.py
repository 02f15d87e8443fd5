"""The job of `kvplan calibrate`: measured steps in, the constants of the step-time model and their error out."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

from kvplan.calibration import Calibration, StepTimes, load_calibration
from kvplan.config import load_model
from kvplan.core.cost import LatencyModel
from kvplan.core.robust_fit import fit_nonnegative
from kvplan.core.step_constants import CONSTANT_NAMES, ConstantName, StepConstants
from kvplan.core.tally import Values
from kvplan.errors import InputError
from kvplan.jobs.audit import model_named_in, with_settings_of
from kvplan.measurements import (
    KernelRates,
    Measurements,
    StepSample,
    log_samples,
    read_measurements,
)
from kvplan.options import CalibrateOptions, Resolver, check_options
from kvplan.serving import Served, find_gpu, serve
from kvplan.startup_log import StartupLog, read_log
from kvplan.step_time import latency_model
from kvplan.units import counted

_FEWEST_STEPS = 4
#: A constant whose part of every step is smaller than this is not fitted: noise would decide it.
_LEAST_PART = 0.01
#: How much error a constant may cost to stay at the shipped one: half a percent if it would move by its own size.
#: Overheads differ more between programs than rates do between runs, so they give way first. Steps of one model
#: cannot tell its weights from what a layer takes beside them; this decides.
_RATE_STRENGTH, _OVERHEAD_STRENGTH = 0.005, 0.0005
#: What overheads are that some engines do not have: of the order of those that do.
_USUAL: dict[ConstantName, float] = {"step_s": 1e-3, "sequence_s": 1e-5}
#: What a constant at its end is held to: a microsecond, or a rate a millionth below its bound.
_LEAST_PRIOR = 1e-6
#: No bandwidth is above the datasheet's; a clock may be, when the chip is cool.
_MOST_BANDWIDTH, _MOST_FLOPS = 1.0, 1.25
_MOST_ROUNDS = 12


@dataclass(frozen=True, slots=True)
class FittedConstant:
    """A constant before and after, in its own unit, and the largest part of any step that it is answerable for."""

    name: ConstantName
    before: float
    after: float
    part: float
    fitted: bool


@dataclass(frozen=True, slots=True)
class StepError:
    """Error of estimated steps as a share of the measured time, and quantiles of measured over estimated time."""

    count: int
    median: float
    p95: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class CalibrateResult:
    """What was fitted. ``before`` and ``after`` are the errors with the constants that were shipped and with the new.

    ``left_out`` counts measurements that were not used, by reason.
    """

    form: str
    engine: str
    models: tuple[str, ...]
    gpu: str
    started_from: str
    constants: tuple[FittedConstant, ...]
    before: StepError | None
    after: StepError | None
    left_out: Mapping[str, int]
    notes: tuple[str, ...]
    calibration: Calibration

    def to_dict(self) -> dict[str, object]:
        """The JSON document without its version keys."""
        return {
            "form": self.form,
            "engine": self.engine,
            "models": list(self.models),
            "gpu": self.gpu,
            "started_from": self.started_from,
            "constants": [asdict(one) for one in self.constants],
            "before": asdict(self.before) if self.before else None,
            "after": asdict(self.after) if self.after else None,
            "left_out": dict(self.left_out),
            "notes": list(self.notes),
        }


def calibrate(data: str | os.PathLike[str], **options: object) -> CalibrateResult:
    """Fit the constants of the step-time model to measured steps.

    ``data`` is a file as docs/calibrate.md describes, ``options`` are the fields of `CalibrateOptions`. Raises
    `InputError` for wrong input and where nothing can be fitted.
    """
    return calibrate_with(os.fspath(data), CalibrateOptions.of(options))


def calibrate_with(data: str, options: CalibrateOptions) -> CalibrateResult:
    """`calibrate` with its options in one object."""
    check_options(options)
    measured = read_measurements(Path(data))
    notes: list[str] = []
    if measured.lines:
        measured, options = _of_log(measured, options, notes)
    kept = None if options.calibration is None else load_calibration(Path(options.calibration))
    options = replace(options, calibration=None)
    if measured.rates is not None:
        return _from_rates(measured, measured.rates, _case({}, options), kept, notes)
    cases, left_out = _by_case(measured.samples, options)
    if not cases:
        raise InputError(
            "no row of the file is of this model and GPU",
            where=measured.name,
            hint="leave out the flags that name another one",
        )
    used = sum(len(case.samples) for case in cases)
    if used < _FEWEST_STEPS:
        raise InputError(
            f"the file has {counted(used, 'step')} of use, which {'is' if used == 1 else 'are'} too few to fit to",
            where=measured.name,
            hint=f"measure at least {_FEWEST_STEPS}, better fifty: several batch sizes and contexts",
        )
    first = cases[0].served
    start = cases[0].model.constants
    for case in cases[1:]:
        if (case.served.gpu, case.served.engine) != (first.gpu, first.engine):
            raise InputError(
                "the rows are of several GPUs, whose constants differ",
                where=measured.name,
                hint="say which with --gpu",
            )
    constants, parts, fitted = _fit(cases, start)
    notes += _several_notes(cases, fitted)
    return _result(measured, cases, constants, parts, fitted, {**measured.left_out, **left_out}, kept, notes)


def steps_against(
    data: str | os.PathLike[str], *, constants: StepConstants | None = None, **options: object
) -> StepError:
    """How far the steps of a table are from the estimate, with the shipped constants or with others."""
    measured = read_measurements(Path(data))
    cases, _ = _by_case(measured.samples, CalibrateOptions.of(options))
    return _error(cases, constants or cases[0].model.constants)


# A log


def _of_log(
    measured: Measurements, options: CalibrateOptions, notes: list[str]
) -> tuple[Measurements, CalibrateOptions]:
    """The decode steps between a log's lines, and the options with what the log says of its start."""
    log = start_of(measured)
    if log is not None:
        options = with_settings_of(log, options, notes)
        if options.model is None:
            options.model = model_named_in(log, options, notes)
    served = _case({}, options).served
    block_size = served.plan.pool.block_size
    samples, left_out = log_samples(measured.lines, _pool_tokens(log, served, notes), block_size)
    if not samples:
        raise InputError(
            "no interval of the log shows decode steps alone",
            where=measured.name,
            hint="an interval counts if no prompt was computed in it and the batch hardly changed; of "
            f"{len(measured.lines)} lines: "
            + ", ".join(f"{count} {reason}" for reason, count in left_out.items()),
        )
    return measured._replace(samples=tuple(samples), left_out=left_out), options


def start_of(measured: Measurements) -> StartupLog | None:
    """What a log says of the engine's start; None where it begins later."""
    try:
        return read_log(measured.text.splitlines(keepends=True), measured.name)
    except InputError:
        return None  # only its traffic is there


def _pool_tokens(log: StartupLog | None, served: Served, notes: list[str]) -> int:
    """Tokens of the KV cache: as the log prints them, else as we size it."""
    if log is not None:
        tokens, blocks = log.least("kv_cache_tokens"), log.least("num_gpu_blocks")
        if tokens is not None:
            return int(tokens.value)
        if blocks is not None:
            return int(blocks.value) * served.plan.pool.block_size
    capacity = served.capacity
    if capacity is None or not capacity.usable_blocks:
        raise InputError(
            "the log does not say how large its KV cache is",
            where="--num-gpu-blocks-override",
            hint="give the log from its start on, or the number of blocks",
        )
    if served.deployment.num_gpu_blocks_override is None:
        notes.append(
            f"the log does not say how large its KV cache is: {capacity.usable_blocks:,} blocks, as sized here"
        )
    return capacity.usable_blocks * served.plan.pool.block_size


# Which deployment each step was measured on


class _Case(NamedTuple):
    """A deployment, the model of its step times with the constants that are shipped, and steps measured on it."""

    served: Served
    model: LatencyModel
    started_from: str
    samples: list[StepSample]


def _by_case(samples: Sequence[StepSample], options: CalibrateOptions) -> tuple[list[_Case], dict[str, int]]:
    """The samples by deployment; those that the options exclude are counted."""
    cases: dict[tuple[tuple[str, str | int], ...], _Case] = {}
    others = 0
    excluded: dict[tuple[tuple[str, str | int], ...], bool] = {}
    for sample in samples:
        key = tuple(sorted(sample.deployment.items()))
        if key not in excluded:
            excluded[key] = _is_excluded(sample.deployment, options)
        if excluded[key]:
            others += 1
            continue
        if key not in cases:
            cases[key] = _case(sample.deployment, options)
        cases[key].samples.append(sample)
    return list(cases.values()), {"rows of another model, GPU or parallelism": others} if others else {}


def _is_excluded(row: Mapping[str, str | int], options: CalibrateOptions) -> bool:
    """Whether a flag names another model, GPU or degree of parallelism than the row, by whatever names."""

    def model(name: str) -> str:
        return load_model(name, catalogue=options.catalogue, overrides=options.set).name

    def gpu(name: str) -> str | None:
        found, _ = find_gpu(name)
        return found.name if found else None

    if options.tensor_parallel_size not in (
        None,
        row.get("tensor_parallel_size", options.tensor_parallel_size),
    ):
        return True
    return any(
        given is not None and name in row and read(given) != read(str(row[name]))
        for name, given, read in (("model", options.model, model), ("gpu", options.gpu, gpu))
    )


def _case(row: Mapping[str, str | int], options: CalibrateOptions) -> _Case:
    """The deployment that a row and the options name. Raises `InputError` where one of them is missing."""
    options = options.but(row)
    for name in ("model", "gpu"):
        if getattr(options, name) is None:
            raise InputError(
                f"the measurements do not say their {name}", where=f"--{name}", hint=f"give --{name}"
            )
    assert options.model is not None, "checked above"
    spec = load_model(options.model, catalogue=options.catalogue, overrides=options.set, where="--model")
    gpu, count = find_gpu(options.gpu)
    served = serve(spec, Resolver(options), gpu=gpu, gpu_count=count)
    model, chosen = latency_model(served)
    return _Case(served, model, chosen.name, [])


def _several_notes(cases: Sequence[_Case], fitted: Sequence[ConstantName]) -> list[str]:
    """What one deployment alone cannot tell."""
    together = [
        name for name in ("weights_bandwidth_share", "kernel_s", "step_s", "all_reduce_s") if name in fitted
    ]
    if len(cases) == 1 and len(together) > 1:
        return [
            f"steps of one deployment cannot tell {', '.join(together)} apart: their sum is measured, the shares of it "
            "lean on the shipped constants"
        ]
    return []


# The fit


def _fit(
    cases: Sequence[_Case], start: StepConstants
) -> tuple[StepConstants, dict[ConstantName, float], tuple[ConstantName, ...]]:
    """The constants with the least error, the largest part of a step that each is answerable for, and which are fitted.

    A step's time is a sum of coefficient times quantity as long as no maximum changes sides (`LatencyModel.terms`), so
    each round is linear least squares; it is repeated with the quantities at the new constants until they settle.
    """
    parts: dict[ConstantName, float] = dict.fromkeys(CONSTANT_NAMES, 0.0)
    # An overhead that is shipped as none has a quantity all the same, which only another value shows.
    at_least = {name: max(value, _USUAL.get(name, 0.0)) for name, value in start.coefficients().items()}
    for case in cases:
        model = case.model.with_constants(start.with_coefficients(at_least))
        for sample in case.samples:
            for name, seconds in model.terms(sample.work).items():
                parts[name] = max(parts[name], seconds / sample.seconds)
    free = tuple(name for name in CONSTANT_NAMES if parts[name] >= _LEAST_PART)
    constants, best, least = start, start, _error(cases, start).median
    for _ in range(_MOST_ROUNDS):
        before = constants
        constants = _round(cases, constants, free)
        error = _error(cases, constants).median
        if error < least:
            best, least = constants, error
        if constants == before:
            break
    return best, parts, free


def _round(cases: Sequence[_Case], at: StepConstants, free: Sequence[ConstantName]) -> StepConstants:
    """One round of least squares with the quantities that the constants ``at`` lead to, and held to these."""
    here = {name: value or _LEAST_PRIOR for name, value in at.coefficients().items()}
    floors = [_least_coefficient(name) for name in free]
    rows, values = [], []
    for case in cases:
        model = case.model.with_constants(at.with_coefficients(here))
        for sample in case.samples:
            terms = model.terms(sample.work)
            row = [terms[name] / here[name] for name in free]
            held = sum(seconds for name, seconds in terms.items() if name not in free)
            held += sum(item * floor for item, floor in zip(row, floors, strict=True))
            rows.append(row)
            # What is held may be more than all there is: then the rest counts as next to nothing.
            values.append(max(sample.seconds - held, 1e-3 * sample.seconds))
    above = [max(here[name] - floor, _LEAST_PRIOR) for name, floor in zip(free, floors, strict=True)]
    strengths = [_RATE_STRENGTH if name.endswith("_share") else _OVERHEAD_STRENGTH for name in free]
    found = fit_nonnegative(rows, values, above, strengths)
    return at.with_coefficients(
        {name: floor + value for name, floor, value in zip(free, floors, found, strict=True)}
    )


def _least_coefficient(name: ConstantName) -> float:
    if name.endswith("_flops_share"):
        return 1 / _MOST_FLOPS
    return 1 / _MOST_BANDWIDTH if name.endswith("_share") else 0.0


def _error(cases: Sequence[_Case], constants: StepConstants) -> StepError:
    """How far the estimates are off with these constants."""
    errors, ratios = Values("d"), Values("d")
    for case in cases:
        model = case.model.with_constants(constants)
        for sample in case.samples:
            ratio = sample.seconds / sum(model.terms(sample.work).values())
            ratios.add(ratio)
            errors.add(abs(1 / ratio - 1))
    off, spread = errors.summary(), ratios.summary()
    return StepError(
        off.count, off.percentile(50), off.percentile(95), spread.percentile(5), spread.percentile(95)
    )


# What comes out


def _result(
    measured: Measurements,
    cases: Sequence[_Case],
    constants: StepConstants,
    parts: Mapping[ConstantName, float],
    fitted: tuple[ConstantName, ...],
    left_out: Mapping[str, int],
    kept: Calibration | None,
    notes: Sequence[str],
) -> CalibrateResult:
    start = cases[0].model.constants
    after = _error(cases, constants)
    steps = StepTimes(
        source=measured.name,
        form=measured.form,
        constants=asdict(constants),
        fitted=fitted,
        num_steps=after.count,
        median=after.median,
        p95=after.p95,
        low=after.low,
        high=after.high,
    )
    served = cases[0].served
    assert served.gpu is not None, "its rates are known"
    return CalibrateResult(
        form=measured.form,
        engine=served.engine.label,
        models=tuple(dict.fromkeys(case.served.spec.name for case in cases)),
        gpu=served.gpu.name,
        started_from=cases[0].started_from,
        constants=_constants(start, constants, parts, fitted),
        before=_error(cases, start),
        after=after,
        left_out=left_out,
        notes=tuple(notes),
        calibration=_calibration(served, steps, kept),
    )


def _constants(
    start: StepConstants,
    constants: StepConstants,
    parts: Mapping[ConstantName, float],
    fitted: Sequence[ConstantName],
) -> tuple[FittedConstant, ...]:
    return tuple(
        FittedConstant(name, getattr(start, name), getattr(constants, name), parts[name], name in fitted)
        for name in CONSTANT_NAMES
    )


def _calibration(served: Served, steps: StepTimes, kept: Calibration | None) -> Calibration:
    """A calibration of these step times; what ``kept`` says of memory stays in it."""
    if kept is not None:
        return kept._replace(step_times=steps)
    gpu = served.gpu
    assert gpu is not None, "its rates are known"
    return Calibration(
        engine=served.engine.name,
        version=served.engine.version or None,
        model=served.spec.name,
        source=steps.source,
        gpu=gpu.name,
        tensor_parallel_size=served.deployment.tensor_parallel_size,
        dtype=served.deployment.dtype,
        quantization=served.spec.weights.quantization,
        kv_cache_dtype=served.deployment.cache.kv_cache_dtype,
        step_times=steps,
    )


def _from_rates(
    measured: Measurements, rates: KernelRates, case: _Case, kept: Calibration | None, notes: list[str]
) -> CalibrateResult:
    """The shares of the bandwidth that a kernel and a copy reached; no step is there to compare with."""
    gpu = case.served.gpu
    assert gpu is not None, "its rates are known"
    assert gpu.bandwidth_bytes_per_s is not None, "its rates are known"
    found: dict[ConstantName, float] = {}
    if rates.attention_bytes_per_s is not None:
        found["kv_bandwidth_share"] = rates.attention_bytes_per_s / gpu.bandwidth_bytes_per_s
    if rates.copy_bytes_per_s is not None:
        found["weights_bandwidth_share"] = rates.copy_bytes_per_s / gpu.bandwidth_bytes_per_s
    for name, share in found.items():
        if not 0.01 <= share <= _MOST_BANDWIDTH:
            raise InputError(
                f"{name} would be {share:.3f}",
                where=measured.name,
                hint=f"is --gpu {gpu.name} the GPU that was measured ({rates.device or 'not named'})?",
            )
    constants = replace(case.model.constants, **found)
    notes.append("a kernel is no step: how far steps are off with these constants is not known")
    fitted = tuple(found)
    steps = StepTimes(measured.name, measured.form, asdict(constants), fitted, 0)
    return CalibrateResult(
        form=measured.form,
        engine=case.served.engine.label,
        models=(case.served.spec.name,),
        gpu=gpu.name,
        started_from=case.started_from,
        constants=_constants(case.model.constants, constants, dict.fromkeys(CONSTANT_NAMES, 0.0), fitted),
        before=None,
        after=None,
        left_out=measured.left_out,
        notes=tuple(notes),
        calibration=_calibration(case.served, steps, kept),
    )
