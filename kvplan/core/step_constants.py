"""How near a GPU and an engine come to what a datasheet promises, and what an engine adds to every step.

A share is that of a datasheet's rate, seconds are what is spent beside it. Each constant multiplies one physical
quantity (`kvplan.core.cost.Term`), so that all of them can be fitted together by linear least squares.
"""

from __future__ import annotations

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
    "layer_s",
    "launch_layer_s",
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
    all-reduces; ``all_reduce_s``: a round of an all-reduce of hardly any bytes. ``layer_s``: a layer's kernels beside
    their bytes and FLOPs. ``launch_layer_s``: what the CPU needs to launch a layer where no CUDA graph does; the GPU
    waits where it is faster. ``step_s``: of each step, between the end of one and the start of the next;
    ``sequence_s``: of each sequence in it. ``api_s``: of each request, before it is queued and after its tokens are
    there; it is part of no step.
    """

    weights_bandwidth_share: float = 1.0
    kv_bandwidth_share: float = 1.0
    gemm_flops_share: float = 1.0
    attention_flops_share: float = 1.0
    link_bandwidth_share: float = 1.0
    all_reduce_s: float = 0.0
    layer_s: float = 0.0
    launch_layer_s: float = 0.0
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


def _inverse(name: str, value: float) -> float:
    return 1 / value if name.endswith("_share") else value


#: What the datasheets promise: the first rung of the ladder.
DATASHEET = StepConstants()


class MeasuredError(NamedTuple):
    """How far off a set of constants was: shares of the measured time, over so many rows of some data."""

    median: float
    p95: float
    rows: int
    data: str


class ChosenConstants(NamedTuple):
    """A set of constants, what it is called in the output and how far off it was; None: not measured."""

    constants: StepConstants
    name: str
    measured_error: MeasuredError | None = None


#: What is shipped where nothing was measured on a GPU: the rest of the ladder's second rung.
_GENERIC = StepConstants(
    weights_bandwidth_share=0.85,
    kv_bandwidth_share=0.75,
    gemm_flops_share=0.7,
    attention_flops_share=0.5,
    link_bandwidth_share=0.7,
    all_reduce_s=8e-6,
    layer_s=15e-6,
    launch_layer_s=80e-6,
    step_s=1e-3,
    sequence_s=10e-6,
    api_s=5e-3,
)


def shipped_constants(gpu: object, engine: str, version: str) -> ChosenConstants:
    """The constants for a GPU and an engine's version, and how far off they were."""
    return ChosenConstants(_GENERIC, "shipped constants")
