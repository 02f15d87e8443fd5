"""The parts of its budget that an engine printed when it started: their sum, and what is kept of them.

budget = memory x utilization = weights + overhead + memory for KV, for each process of the engine.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from kvplan.calibration import Calibration
from kvplan.serving import Served
from kvplan.startup_log import Figure, StartupLog

_PARTS = (
    *("requested", "weights", "consumed", "non_torch", "activations", "cuda_graphs", "cuda_graphs_estimate"),
    "kv_memory",
)
#: With which figure of the CUDA graphs a sum comes out, and what that means.
GRAPHS = {
    "": "CUDA graphs are not taken from the budget",
    "cuda_graphs_estimate": "CUDA graphs are taken from the budget, as it estimated them",
    "cuda_graphs": "CUDA graphs are taken from the budget, as it measured them",
}


def pool_memory(log: StartupLog) -> Figure | None:
    """The memory of the pool: as printed, of the rank that has least; or keys and values together."""
    memory = log.least("kv_memory")
    keys, values = log.last("kv_k"), log.last("kv_v")
    if memory is not None or keys is None or values is None:
        return memory
    return keys._replace(
        name="kv_memory",
        value=keys.value + values.value,
        low=keys.low + values.low,
        high=keys.high + values.high,
    )


def parts_of_one_worker(log: StartupLog) -> dict[str, Figure]:
    """The parts of its budget that one process printed: of the one that printed most, or has least memory for KV."""
    by_name = {name: log.by_worker(name) for name in _PARTS}
    candidates = [
        {name: found[worker] for name, found in by_name.items() if worker in found}
        for worker in dict.fromkeys(worker for found in by_name.values() for worker in found)
    ]

    def rank(parts: dict[str, Figure]) -> tuple[int, float]:
        return len(parts), -(parts["kv_memory"].value if "kv_memory" in parts else 0)

    return max(candidates, key=rank, default={})


class OwnSum(NamedTuple):
    """Budget less the parts that one process printed, beside the memory that it printed for KV.

    ``graphs`` is the key of `GRAPHS` with which the sum comes out; None: with none.
    """

    memory: Figure
    total: int | float
    graphs: str | None


def own_sum(log: StartupLog) -> OwnSum | None:
    """The engine's own sum; None if no process printed all its terms."""
    parts = parts_of_one_worker(log)
    memory, budget, activations = (parts.get(name) for name in ("kv_memory", "requested", "activations"))
    consumed = [parts["consumed"]] if "consumed" in parts else [parts.get("weights"), parts.get("non_torch")]
    taken = [part for part in (*consumed, activations) if part is not None]
    if memory is None or budget is None or len(taken) <= len(consumed):
        return None
    for name in GRAPHS:
        terms = [*taken, *([parts[name]] if name in parts else [])]
        low = budget.low - sum(part.high for part in terms)
        high = budget.high - sum(part.low for part in terms)
        if low <= memory.high and memory.low <= high:
            return OwnSum(memory, budget.value - sum(part.value for part in terms), name)
    return OwnSum(memory, budget.value - sum(part.value for part in taken), None)


def calibration_of(log: StartupLog, served: Served | None, gpu_memory: int | None) -> Calibration | None:
    """What this start measured; None if the log names no model or no part of its memory.

    ``served`` is our plan with the log's settings, whose defaults stand for what the log does not show. Of several
    ranks it is the overhead of the one with the least memory for KV, whose budget and weights are taken for alike.
    """
    parts = parts_of_one_worker(log)
    memory = pool_memory(log)
    model = served.spec.name if served is not None else log.model
    if model is None or not (parts or memory):
        return None
    weights, consumed, runtime = (_whole(parts.get(name)) for name in ("weights", "consumed", "non_torch"))
    if runtime is None and consumed is not None and weights is not None:
        runtime = max(0, consumed - weights)
    graphs = _whole(parts.get("cuda_graphs_estimate"))
    overhead, rounding = _overhead(log, parts, memory, served, gpu_memory)
    first = min((figure.line for figure in (*parts.values(), memory) if figure is not None), default=log.line)
    settings: dict[str, Any] = {} if served is None else _settings(served)
    return Calibration(
        engine=log.engine,
        version=log.version,
        model=model,
        source=f"{log.name}:{first}",
        gpu_memory_bytes=gpu_memory,
        weights_bytes=weights,
        activations_bytes=_whole(parts.get("activations")),
        cuda_graphs_bytes=_whole(parts.get("cuda_graphs")) if graphs is None else graphs,
        runtime_bytes=runtime,
        overhead_bytes=overhead,
        rounding_bytes=rounding,
        kv_memory_bytes=_whole(memory),
        **settings,
    )


def _overhead(
    log: StartupLog,
    parts: dict[str, Figure],
    memory: Figure | None,
    served: Served | None,
    gpu_memory: int | None,
) -> tuple[int | None, int | None]:
    """What of the budget is neither weights nor KV, and how far rounding lets it be off; None where a term lacks.

    The budget is memory x utilization by the engine's own rule, where that would be printed as it was: so a plan with
    the same memory gives the same memory for KV.
    """
    weights, printed = parts.get("weights"), parts.get("requested")
    if weights is None or memory is None or memory.value < 0:
        return None, None
    if log.engine != "vllm" or "kv_cache_memory_bytes" in log.settings:
        return None, None  # other engines take a share of what is free; a given memory is no budget
    budget, slack = (None, 0) if printed is None else (int(printed.value), _half(printed))
    if served is not None and gpu_memory is not None:
        ruled = math.ceil(gpu_memory * served.deployment.gpu_memory_utilization)
        if printed is None or abs(ruled - printed.value) <= 3 * _half(printed):
            budget = ruled
    if budget is None:
        return None, None
    return max(0, budget - int(weights.value) - int(memory.value)), slack + _half(memory)


def _settings(served: Served) -> dict[str, object]:
    """What the calibration holds for."""
    spec, settings = served.spec, served.deployment
    names = (
        *("gpu_memory_utilization", "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"),
        *("enable_expert_parallel", "dtype", "max_model_len", "max_num_seqs", "max_num_batched_tokens"),
        "enforce_eager",
    )
    return {
        **{name: getattr(settings, name) for name in names},
        "kv_cache_dtype": settings.cache.kv_cache_dtype,
        "quantization": spec.weights.quantization,
        "gpu": served.gpu.name if served.gpu else None,
        "num_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "vocab_size": spec.vocab_size,
    }


def _whole(figure: Figure | None) -> int | None:
    """The bytes of a part; None if it was not printed, or as less than nothing."""
    return None if figure is None or figure.value < 0 else int(figure.value)


def _half(figure: Figure) -> int:
    """Half of what the printed text allows."""
    return math.ceil((figure.high - figure.low) / 2)
