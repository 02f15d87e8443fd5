"""Models of step times whose coefficients are small whole numbers: a byte takes a picosecond, and so does a FLOP."""

from __future__ import annotations

from kvplan.core.communication import Link
from kvplan.core.cost import LatencyModel, Settings
from kvplan.core.step_constants import StepConstants
from kvplan.core.step_shape import Attention, GpuRates, Matrices, StageShape

#: A byte a picosecond, a FLOP a picosecond, everywhere.
UNIT_RATES = GpuRates(10**12, 10**12, 10**12, Link(10**12, is_switched=True), 10**12)


def toy_cost(
    weights: int = 1000,
    context: int = 10,
    overhead: int = 7,
    *,
    token: int = 0,
    head: int = 0,
    pair: int = 0,
    own: int = 0,
    sequence: int = 0,
    windows: tuple[tuple[int, int], ...] = (),
    launch: int = 0,
    graph_tokens: int = 0,
    host: int = 0,
    overlaps_host: bool = False,
    block: int = 0,
    stages: int = 1,
) -> LatencyModel:
    """Picoseconds of the weights, a token of context, a step, a token, a sampled one, a pair, a chunk's own token
    (moved twice), a sequence's state.

    ``windows`` are pairs of a window and what a token in it takes; ``launch`` is the least that a stage takes without
    a graph, which steps of up to ``graph_tokens`` tokens have; ``host`` is what the engine spends on a sequence.
    """
    kinds = [Attention(context, pair, pair, own), Attention(sequence_bytes=sequence)]
    kinds += [Attention(each, window=window) for window, each in windows]
    shape = StageShape(
        1,
        dense=Matrices(weights),
        head=Matrices(0, head),
        attention=tuple(kinds),
        activation_bytes=token,
    )
    constants = StepConstants(
        step_s=overhead * 1e-12, sequence_s=host * 1e-12, launch_kernel_s=launch * 1e-12
    )
    settings = Settings(graph_tokens, overlaps_host, block)
    return LatencyModel([shape] * stages, UNIT_RATES, constants, settings)
