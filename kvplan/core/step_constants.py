"""How near a GPU and an engine come to what a datasheet promises, and what an engine adds to every step.

A share is that of a datasheet's rate, seconds are what is spent beside it. Each constant multiplies one physical
quantity (`kvplan.core.cost.Terms`), so that all of them can be fitted together by linear least squares.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple, get_args

#: The constants that step times can be fitted to, by name.
ConstantName = Literal[
    "weights_bandwidth_share",
    "kv_bandwidth_share",
    "gemm_flops_share",
    "attention_flops_share",
    "link_bandwidth_share",
    "all_reduce_s",
    "kernel_s",
    "launch_kernel_s",
    "step_s",
    "sequence_s",
]
CONSTANT_NAMES: tuple[ConstantName, ...] = get_args(ConstantName)


@dataclass(frozen=True, slots=True)
class StepConstants:
    """The constants of the step-time model; the defaults are the datasheet's promise: no loss and no overhead.

    Shares are from above 0 to 1 (measured ones may exceed it a little); the rest are seconds.

    ``weights_bandwidth_share``: of the GPU's bandwidth, when matrix products read weights; ``kv_bandwidth_share``: when
    attention reads the KV cache. ``gemm_flops_share``, ``attention_flops_share``: of the dense FLOP/s, in matrix
    products and in attention to a prompt. ``link_bandwidth_share``: of the link between GPUs, one way, in large
    all-reduces; ``all_reduce_s``: a round of an all-reduce of hardly any bytes. ``kernel_s``: each kernel beside its
    bytes and FLOPs. ``launch_kernel_s``: what the CPU needs to launch a kernel where no CUDA graph does; the GPU waits
    where it is faster. ``step_s``: of each step, between the end of one and the start of the next;
    ``sequence_s``: of each sequence in it. ``api_s``: of each request, before it is queued and after its tokens are
    there; it is part of no step.
    """

    weights_bandwidth_share: float = 1.0
    kv_bandwidth_share: float = 1.0
    gemm_flops_share: float = 1.0
    attention_flops_share: float = 1.0
    link_bandwidth_share: float = 1.0
    all_reduce_s: float = 0.0
    kernel_s: float = 0.0
    launch_kernel_s: float = 0.0
    step_s: float = 0.0
    sequence_s: float = 0.0
    api_s: float = 0.0

    def coefficients(self) -> dict[ConstantName, float]:
        """What each physical quantity is multiplied with: the seconds, and the inverse of a share."""
        return {name: _inverse(name, getattr(self, name)) for name in CONSTANT_NAMES}

    def with_coefficients(self, coefficients: dict[ConstantName, float]) -> StepConstants:
        """These constants with others in the place of some. Coefficients of shares must be above 0."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        values.update({name: _inverse(name, value) for name, value in coefficients.items()})
        return StepConstants(**values)

    def slowed(self, factor: float) -> StepConstants:
        """These constants with every part of a step so many times as long; a request's own time stays."""
        coefficients = self.coefficients()
        return self.with_coefficients({name: factor * coefficients[name] for name in CONSTANT_NAMES})


def _inverse(name: str, value: float) -> float:
    return 1 / value if name.endswith("_share") else value


class MeasuredError(NamedTuple):
    """How far off a set of constants was: shares of the measured time, over so many rows of some data.

    Of ten rows nine have a measured time from ``low`` to ``high`` times the estimate, where that is known.
    """

    median: float
    p95: float
    rows: int
    data: str
    low: float | None = None
    high: float | None = None

    @property
    def slowdowns(self) -> tuple[float, float]:
        """What an estimated time may be multiplied with: ``low`` and ``high``, else what the 95th percentile allows."""
        least = 1 / (1 + self.p95) if self.low is None else self.low
        return least, 1 / max(1 - self.p95, _LEAST_LEFT) if self.high is None else self.high


#: An estimate that is longer than the measured time by nearly all of it says no more than that.
_LEAST_LEFT = 0.05


class ChosenConstants(NamedTuple):
    """A set of constants, what it is called in the output and how far off it was; None: not measured."""

    constants: StepConstants
    name: str
    measured_error: MeasuredError | None = None


class EngineCosts(NamedTuple):
    """What a generation of an engine spends beside its kernels, on the hosts that its GPUs came with.

    ``since`` is the first version of it.
    """

    name: str
    since: tuple[int, int]
    launch_kernel_s: float
    step_s: float
    sequence_s: float
    api_s: float
    #: Whether a step is prepared while the GPUs run the one before (asynchronous scheduling).
    overlaps_host: bool = False
    #: Whether steps of few tokens are replayed from CUDA graphs unless ``--enforce-eager`` is given.
    has_graphs: bool = True


#: What kernels reach where nothing was measured on a GPU or one like it: the middle of those that were.
UNMEASURED: dict[ConstantName, float] = {
    "weights_bandwidth_share": 0.8,
    "kv_bandwidth_share": 0.8,
    "gemm_flops_share": 0.7,
    "attention_flops_share": 0.65,
    "link_bandwidth_share": 0.7,
    "all_reduce_s": 3.6e-6,
    "kernel_s": 5e-6,
}

#: Generations of vLLM, newest first. Those of 2023-24 are fitted to decode steps of Llama-2-70B and BLOOM-176B
#: (github Mutinifni/splitwise-sim; benchmarks/fit_steps.py). The host's time of the others is rounded from what
#: throughput leaves over: of V0 from Llama-2-7B on one H100 (github argonne-lcf/LLM-Inference-Bench), since then from
#: Llama-3.1-70B in fp8 on H200s before scheduling was asynchronous (aiconfigurator-core 0.12.0, runs of 2025). What
#: launches take in them is that of PyTorch, a few microseconds; ``api_s`` is what the first token of cached prompts
#: takes beyond its steps (github inference-sim/training).
VLLM_GENERATIONS = (
    EngineCosts("vLLM with asynchronous scheduling", (0, 19), 6e-6, 0.5e-3, 15e-6, 8e-3, overlaps_host=True),
    EngineCosts("vLLM V1 without asynchronous scheduling", (0, 8), 6e-6, 0.5e-3, 15e-6, 8e-3),
    EngineCosts("vLLM V0", (0, 5), 6e-6, 1.1e-3, 61e-6, 8e-3),
    EngineCosts("vLLM of 2023-24", (0, 0), 23.9e-6, 9.2e-3, 264e-6, 8e-3, has_graphs=False),
)
_OVERLAPPING, _WAITING, _, _OLDEST = VLLM_GENERATIONS
#: The oldest again, on the hosts of A100s.
_OLDEST_ON_AMPERE = _OLDEST._replace(launch_kernel_s=30.1e-6, step_s=16.5e-3, sequence_s=340e-6)


def launched_eagerly(costs: EngineCosts) -> EngineCosts:
    """The same engine with ``--enforce-eager``: launches cost what they did where they were measured, in 2023-24."""
    if not costs.has_graphs:
        return costs
    return costs._replace(has_graphs=False, launch_kernel_s=_OLDEST.launch_kernel_s)


def vllm_generation(
    number: tuple[int, int], *, async_scheduling: bool = True, architecture: str = ""
) -> EngineCosts:
    """The generation of a version of vLLM, as ``(major, minor)``, on a GPU of this architecture.

    Scheduling may be switched either way in newer ones.
    """
    found = next(one for one in VLLM_GENERATIONS if number >= one.since)
    if found in (_OVERLAPPING, _WAITING):
        return _OVERLAPPING if async_scheduling else _WAITING
    return _OLDEST_ON_AMPERE if found is _OLDEST and architecture == "Ampere" else found


#: How far off the shipped constants were on decode steps that none was fitted to, by GPU and generation
#: (benchmarks/cost_against_steps.py).
MEASURED_ERRORS = {
    ("h100-80gb", _OVERLAPPING.name): MeasuredError(0.007, 0.023, 36, "decode steps of five models in 2026"),
    ("rtx-4090", _OVERLAPPING.name): MeasuredError(
        0.105, 0.201, 12, "decode steps of Llama-3.1-8B, seconds of a log"
    ),
    ("h100-80gb", _OLDEST.name): MeasuredError(
        0.027, 0.1, 62, "decode steps of Llama-2-70B and BLOOM in 2023-24"
    ),
    ("a100-80gb", _OLDEST.name): MeasuredError(0.034, 0.088, 29, "decode steps of Llama-2-70B in 2023-24"),
}


def shipped_constants(kernels: Mapping[ConstantName, float], costs: EngineCosts) -> StepConstants:
    """What kernels were measured to reach, and what the engine costs."""
    values = {**UNMEASURED, **kernels}
    return StepConstants(
        **values,
        launch_kernel_s=costs.launch_kernel_s,
        step_s=costs.step_s,
        sequence_s=costs.sequence_s,
        api_s=costs.api_s,
    )
