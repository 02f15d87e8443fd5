"""kvplan: memory planner and simulator for LLM serving.

`size` computes KV-cache bytes and blocks, `simulate` replays a trace through vLLM's scheduler and block
pool, `compare` through several engines or settings, `check` holds figures against a file of expectations, `audit`
against an engine's start-up log, `calibrate` fits times to what was measured, `explain` works an idea through,
`kernel_bench` tries the attention kernels on a GPU. Nothing is loaded before it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"

__all__ = [
    "InputError",
    "KvplanError",
    "__version__",
    "audit",
    "calibrate",
    "check",
    "compare",
    "explain",
    "kernel_bench",
    "list_gpus",
    "list_models",
    "load_gpu",
    "load_model",
    "read_trace",
    "simulate",
    "size",
]

if TYPE_CHECKING:
    from kvplan.config import list_gpus, list_models, load_gpu, load_model
    from kvplan.errors import InputError, KvplanError
    from kvplan.jobs.audit import audit
    from kvplan.jobs.calibrate import calibrate
    from kvplan.jobs.check import check
    from kvplan.jobs.compare import compare
    from kvplan.jobs.explain import explain
    from kvplan.jobs.kernel_bench import kernel_bench
    from kvplan.jobs.simulate import simulate
    from kvplan.jobs.size import size
    from kvplan.trace import read_trace

_HOMES = {
    "InputError": "kvplan.errors",
    "KvplanError": "kvplan.errors",
    "audit": "kvplan.jobs.audit",
    "calibrate": "kvplan.jobs.calibrate",
    "check": "kvplan.jobs.check",
    "compare": "kvplan.jobs.compare",
    "explain": "kvplan.jobs.explain",
    "kernel_bench": "kvplan.jobs.kernel_bench",
    "list_gpus": "kvplan.config",
    "list_models": "kvplan.config",
    "load_gpu": "kvplan.config",
    "load_model": "kvplan.config",
    "read_trace": "kvplan.trace",
    "simulate": "kvplan.jobs.simulate",
    "size": "kvplan.jobs.size",
}


def __getattr__(name: str) -> object:
    """Import a public name when it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module 'kvplan' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
