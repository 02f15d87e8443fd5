"""What was measured of an engine: kept in a small YAML file, and used in place of the estimate.

The memory that it printed when it started, the constants that its step times were fitted to, or both.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO, get_args, get_type_hints

from kvplan.core.deployment import Deployment
from kvplan.core.model import ModelSpec
from kvplan.core.overhead import Overhead
from kvplan.core.sizing import GpuBudget, OverheadSource
from kvplan.core.step_constants import ChosenConstants, MeasuredError, StepConstants
from kvplan.core.vllm_rules import nearest_rules
from kvplan.errors import InputError, quoted, unknown_name
from kvplan.safe_yaml import Node, read_yaml

#: The form of the file; another one is refused.
_VERSION = 1
_VERSION_KEY = "kvplan_calibration"
_MAX_NUMBER = 1 << 60


class StepTimes(NamedTuple):
    """The constants of the step-time model that measured steps were fitted to, and what is left of their error.

    ``source`` and ``form`` say what was measured. ``constants`` are those of `StepConstants` by name, ``fitted``
    names those that the measurements decided; the others are what was shipped. Over ``num_steps`` steps the error is a
    share of the measured time: ``median`` and ``p95``; measured over estimated time lies between ``low`` and ``high``
    for nine steps of ten. None: there was no step to compare with.
    """

    source: str
    form: str
    constants: Mapping[str, float]
    fitted: tuple[str, ...]
    num_steps: int
    median: float | None = None
    p95: float | None = None
    low: float | None = None
    high: float | None = None

    def chosen(self) -> ChosenConstants:
        """The constants with their name and error, as the latency model takes them."""
        error = None
        if self.median is not None and self.p95 is not None:
            error = MeasuredError(self.median, self.p95, self.num_steps, self.source, self.low, self.high)
        return ChosenConstants(StepConstants(**self.constants), f"calibrated: {self.source}", error)


class Calibration(NamedTuple):
    """Memory that one start of an engine measured, in bytes on one GPU, and the settings that it holds for.

    None is unknown; ``step_times`` are what its steps took. ``overhead_bytes`` is what of the budget (memory x
    utilization) was neither weights nor KV: the sum that decides how much is left, even where its parts are not
    printed. It is that of the rank with the least memory for KV; the log's rounding allows ``rounding_bytes`` more or
    less. ``source`` is file and line of the log. ``num_layers``, ``hidden_size`` and ``vocab_size`` tell models apart,
    whatever they are called.
    """

    engine: str
    version: str | None
    model: str
    source: str
    num_layers: int | None = None
    hidden_size: int | None = None
    vocab_size: int | None = None
    gpu: str | None = None
    gpu_memory_bytes: int | None = None
    gpu_memory_utilization: float | None = None
    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    data_parallel_size: int | None = None
    enable_expert_parallel: bool | None = None
    dtype: str | None = None
    quantization: str | None = None
    kv_cache_dtype: str | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    enforce_eager: bool | None = None
    weights_bytes: int | None = None
    activations_bytes: int | None = None
    cuda_graphs_bytes: int | None = None
    runtime_bytes: int | None = None
    overhead_bytes: int | None = None
    rounding_bytes: int | None = None
    kv_memory_bytes: int | None = None
    step_times: StepTimes | None = None

    @property
    def has_memory(self) -> bool:
        """Whether it says anything about memory beside weights and KV."""
        parts = (self.overhead_bytes, self.activations_bytes, self.cuda_graphs_bytes, self.runtime_bytes)
        return any(part is not None for part in parts)


def save_calibration(file: TextIO, calibration: Calibration) -> None:
    """Write a calibration as YAML, a line each field that is known."""
    file.write(f"{_VERSION_KEY}: {_VERSION}\n")
    _write_fields(file, calibration._asdict(), "")


def _write_fields(file: TextIO, values: Mapping[str, object], indent: str) -> None:
    for name, value in values.items():
        if isinstance(value, StepTimes | Mapping):
            file.write(f"{indent}{name}:\n")
            _write_fields(file, value._asdict() if isinstance(value, StepTimes) else value, f"{indent}  ")
        elif isinstance(value, float):
            # YAML wants a point in every number with an exponent, which JSON leaves out.
            mantissa, e, exponent = f"{value:.6g}".partition("e")
            file.write(f"{indent}{name}: {mantissa if '.' in mantissa else f'{mantissa}.0'}{e}{exponent}\n")
        elif value is not None:
            file.write(f"{indent}{name}: {json.dumps(value, allow_nan=False)}\n")


def load_calibration(path: Path) -> Calibration:
    """The calibration of a file that `save_calibration` wrote. Raises `InputError` at the first wrong field."""
    fields = read_yaml(path).mapping("the calibration")
    version_node = fields.pop(_VERSION_KEY, None)
    version = None if version_node is None else version_node.value()
    if version != _VERSION or isinstance(version, bool):
        raise InputError(
            "the file is no calibration"
            if version_node is None
            else f"unknown form of calibration: {version}",
            where=str(path) if version_node is None else str(version_node.key_place),
            hint="give a file that kvplan calibrate DATA -o FILE or kvplan audit LOG --save-calibration FILE wrote",
        )
    steps = fields.pop("step_times", None)
    values = _values(fields, Calibration, "calibration", str(path), ("engine", "model", "source"))
    return Calibration(
        **{"version": None, **values}, step_times=None if steps is None else _step_times(steps)
    )


def _values(
    fields: Mapping[str, Node], kind: type, what: str, where: str, needed: Sequence[str]
) -> dict[str, Any]:
    """The plain fields of a mapping, each of the kind that the class says. Raises `InputError` at the first wrong."""
    hints = get_type_hints(kind)
    values: dict[str, Any] = {}
    for name, node in fields.items():
        place = str(node.key_place)
        if name not in hints:
            raise unknown_name(f"field of a {what}", name, hints, where=place)
        kinds = get_args(hints[name]) or (hints[name],)
        written = node.value()
        value = float(written) if float in kinds and type(written) is int else written
        values[name] = value
        if type(value) not in kinds or (isinstance(value, int | float) and not 0 <= value <= _MAX_NUMBER):
            raise InputError(
                f"{name} is {quoted(value)}, not {_WANTED[kinds[0]]}",
                where=place,
                hint="leave out what is unknown",
            )
    for name in needed:
        if not values.get(name):
            raise InputError(f"{name} is missing", where=where, hint=f"add a line {name}: ...")
    return values


_WANTED = {str: "a text", int: "a whole number from 0 on", float: "a number from 0 on", bool: "true or false"}


def _step_times(node: Node) -> StepTimes:
    """The part of a calibration that is about time."""
    fields = node.mapping("step_times")
    where = str(node.place)
    constants, fitted = fields.pop("constants", None), fields.pop("fitted", None)
    if constants is None or fitted is None:
        lacks = "constants" if constants is None else "fitted"
        raise InputError(
            f"{lacks} is missing", where=where, hint="write the file with kvplan calibrate DATA -o FILE"
        )
    numbers = _values(constants.mapping("constants"), StepConstants, "step-time model", where, ())
    for name, value in numbers.items():
        if name.endswith("_share") and not _LEAST_SHARE <= value <= _MOST_SHARE:
            raise InputError(
                f"{name} is {value}, not a share from {_LEAST_SHARE} to {_MOST_SHARE}",
                where=str(constants.key_place),
                hint="write the file with kvplan calibrate DATA -o FILE",
            )
    names = [item.value() for item in fitted.sequence("fitted")]
    values = _values(fields, StepTimes, "calibration of step times", where, ("source", "form"))
    return StepTimes(constants=numbers, fitted=tuple(map(str, names)), **{"num_steps": 0, **values})


#: No part of a machine is slower, or faster, than so much of its datasheet.
_LEAST_SHARE, _MOST_SHARE = 0.001, 10.0


# In place of the estimate

#: Weights that differ by more than one part in this many are not the same: of one format, and of two.
_SAME_WEIGHTS = {True: 4, False: 20}
#: Memory of GPUs that differs by more than one part in this many is that of another kind.
_SAME_MEMORY = 100


class Measured(NamedTuple):
    """An overhead in place of the estimate, or None where the calibration does not hold; where it is from, and why.

    ``reasons`` say what differs, each in a few words with what was made of it.
    """

    overhead: Overhead | None
    source: OverheadSource
    reasons: tuple[str, ...]


def measured_overhead(
    kept: Calibration,
    spec: ModelSpec,
    deployment: Deployment,
    gpu: GpuBudget,
    loaded: Sequence[int | None],
    estimate: Callable[[Deployment], Overhead],
) -> Measured:
    """What the calibration says of this deployment.

    ``loaded`` are the bytes of weights, tables and slots on a rank of each stage as we count them; what the engine
    counted beyond them is taken as overhead. It holds for the same engine, version, model, GPU, parallelism and dtype:
    another one's activations, graphs and buffers are not known from it. Other batch limits and graphs on or off
    shift it by the difference of our estimates, in which what is not known cancels out. Lengths, utilization and the
    form of the KV cache do not matter: the engine profiles a batch, whatever they are.
    """
    refused = _differing(_identity(kept, spec, deployment))
    if kept.gpu_memory_bytes is not None and (kept.gpu is None or kept.gpu != gpu.name):
        names_differ = kept.gpu is not None and gpu.name != _UNNAMED
        apart = abs(kept.gpu_memory_bytes - gpu.memory_bytes)
        if names_differ or apart * _SAME_MEMORY > gpu.memory_bytes:
            refused.append(
                f"GPU {kept.gpu or 'unnamed'} of {kept.gpu_memory_bytes:,} bytes there, {gpu.name} of "
                f"{gpu.memory_bytes:,} here"
            )
    if refused:
        return Measured(None, "estimated", (f"not used: {'; '.join(refused)}",))
    ours = estimate(deployment)
    reasons: list[str] = []
    total, slack = _sum(kept, ours)
    alike = kept.quantization == spec.weights.quantization
    beyond = _beyond_weights(kept, loaded, reasons, same_format=alike)
    measured = _overhead(kept, ours, total + beyond, slack)
    return _shifted(kept, deployment, measured, estimate, reasons)


class MeasuredSteps(NamedTuple):
    """The constants of a calibration, or None where it does not hold; ``reasons`` say why, and what else differs."""

    chosen: ChosenConstants | None
    reasons: tuple[str, ...]


def measured_steps(
    kept: Calibration, spec: ModelSpec, gpu: str | None, deployment: Deployment
) -> MeasuredSteps:
    """What the calibration says of the times of steps.

    It holds for the same engine and GPU: the constants are those of the machine, and of the program on it. Another
    model, version or parallelism is told, since it may use parts of the machine that were not measured.
    """
    steps = kept.step_times
    if steps is None:
        return MeasuredSteps(None, ())
    refused = _differing((("engine", kept.engine, deployment.engine), ("GPU", kept.gpu, gpu)))
    if refused:
        return MeasuredSteps(None, (f"its step times are not used: {'; '.join(refused)}",))
    apart = _differing(
        (
            ("version", kept.version, deployment.version),
            ("model", kept.model, spec.name),
            ("tensor_parallel_size", kept.tensor_parallel_size, deployment.tensor_parallel_size),
        )
    )
    told = (f"its step times are carried over: {'; '.join(apart)}",) if apart else ()
    return MeasuredSteps(steps.chosen(), told)


#: The GPU of a budget that only says how much memory there is.
_UNNAMED = "gpu"


#: What is compared: a name, theirs (None: not known) and ours.
_Pair = tuple[str, object, object]


def _differing(pairs: Iterable[_Pair]) -> list[str]:
    """What is known to differ, in words."""
    return [
        f"{what} {theirs} there, {ours} here"
        for what, theirs, ours in pairs
        if theirs is not None and theirs != ours
    ]


def _identity(kept: Calibration, spec: ModelSpec, deployment: Deployment) -> tuple[_Pair, ...]:
    """What must agree for an overhead to hold."""
    version = None
    if kept.engine == "vllm" and kept.version is not None:
        version = nearest_rules(kept.version).version
    shape = (kept.num_layers, kept.hidden_size, kept.vocab_size)
    known = None if None in shape else "{} layers of {}, vocabulary {}".format(*shape)
    mine = f"{spec.num_layers} layers of {spec.hidden_size}, vocabulary {spec.vocab_size}"
    return (
        ("engine", kept.engine, deployment.engine),
        ("version", version, deployment.version),
        ("a model of", known, mine),
        ("tensor_parallel_size", kept.tensor_parallel_size, deployment.tensor_parallel_size),
        ("pipeline_parallel_size", kept.pipeline_parallel_size, deployment.pipeline_parallel_size),
        ("data_parallel_size", kept.data_parallel_size, deployment.data_parallel_size),
        ("enable_expert_parallel", kept.enable_expert_parallel, deployment.enable_expert_parallel),
        ("dtype", kept.dtype, deployment.dtype),
    )


def _sum(kept: Calibration, ours: Overhead) -> tuple[int, int | None]:
    """Bytes beside weights and KV, and how far they may be off; None: as far as the estimate.

    The measured sum, else that of the parts, with our estimate for those that were not printed.
    """
    if kept.overhead_bytes is not None:
        return kept.overhead_bytes, kept.rounding_bytes or 0
    parts = (kept.activations_bytes, kept.cuda_graphs_bytes, kept.runtime_bytes)
    estimated = (ours.activations, ours.cuda_graphs, ours.runtime)
    found = [mine if theirs is None else theirs for theirs, mine in zip(parts, estimated, strict=True)]
    if not ours.cuda_graphs:  # this version does not take them off
        found[1] = 0
    return sum(found), None


def _beyond_weights(
    kept: Calibration, loaded: Sequence[int | None], reasons: list[str], *, same_format: bool
) -> int:
    """What the engine counted as weights beyond ours: buffers, and what rounding does."""
    known = [size for size in loaded if size is not None]
    if kept.weights_bytes is None or not known:
        return 0
    theirs = kept.weights_bytes
    nearest = min(known, key=lambda size: abs(size - theirs))
    beyond = theirs - nearest
    if abs(beyond) * _SAME_WEIGHTS[same_format] > nearest:
        reasons.append(f"its weights of {theirs:,} bytes are not used: {nearest:,} are counted here")
        return 0
    return beyond


def _overhead(kept: Calibration, ours: Overhead, total: int, slack: int | None) -> Overhead:
    """The sum in parts: graphs and activations as printed, the rest is the runtime's."""
    total = max(0, total)
    graphs = 0
    if ours.cuda_graphs:
        graphs = min(total, ours.cuda_graphs if kept.cuda_graphs_bytes is None else kept.cuda_graphs_bytes)
    activations = ours.activations if kept.activations_bytes is None else kept.activations_bytes
    activations = min(activations, total - graphs)
    return Overhead(
        activations=activations,
        cuda_graphs=graphs,
        runtime=total - graphs - activations,
        low=min(ours.low, total) if slack is None else max(0, total - slack),
        high=max(ours.high, total) if slack is None else total + slack,
        uncounted_graphs=0 if graphs else kept.cuda_graphs_bytes or ours.uncounted_graphs,
    )


#: Settings that a measured overhead is carried over to by the difference of our estimates.
_SCALED = ("max_num_batched_tokens", "max_num_seqs", "enforce_eager")


def _shifted(
    kept: Calibration,
    deployment: Deployment,
    measured: Overhead,
    estimate: Callable[[Deployment], Overhead],
    reasons: list[str],
) -> Measured:
    """The overhead carried over to other batch limits, and to graphs on or off."""
    there = {
        name: getattr(kept, name)
        for name in _SCALED
        if getattr(kept, name) not in (None, getattr(deployment, name))
    }
    if not there:
        return Measured(measured, "measured", tuple(reasons))
    reasons += [
        f"scaled by our estimate: {name} {value} there, {getattr(deployment, name)} here"
        for name, value in there.items()
    ]
    before, after = estimate(deployment._replace(**there)), estimate(deployment)
    activations = max(0, measured.activations + after.activations - before.activations)
    graphs = max(0, measured.cuda_graphs + after.cuda_graphs - before.cuda_graphs)
    total = activations + graphs + measured.runtime
    # Each end moves as the same end of the estimate: what is known worse widens the range.
    ends = (measured.low + after.low - before.low, measured.high + after.high - before.high)
    return Measured(
        Overhead(
            activations=activations,
            cuda_graphs=graphs,
            runtime=measured.runtime,
            low=max(0, min(*ends, total)),
            high=max(*ends, total),
            uncounted_graphs=max(
                0, measured.uncounted_graphs + after.uncounted_graphs - before.uncounted_graphs
            ),
        ),
        "scaled",
        tuple(reasons),
    )
