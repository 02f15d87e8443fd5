"""Engines whose memory can be sized: the defaults of each, its pool, its stages and its overhead."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kvplan.core.deployment import Deployment, pipeline_stages
from kvplan.core.engine_rules import EngineRules
from kvplan.core.gpu import Gpu
from kvplan.core.kv_cache import CacheFormat
from kvplan.core.kv_pool import Pool, VllmPool
from kvplan.core.model import ModelSpec
from kvplan.core.overhead import Overhead, estimate_overhead
from kvplan.core.vllm_rules import vllm_rules
from kvplan.core.weights import Stage


class EngineSizing(NamedTuple):
    """What sizing needs of an engine.

    ``overhead_is_guess``: its range was held against too few logs to trust a yes on which both ends agree.
    """

    rules: EngineRules
    make_pool: Callable[[ModelSpec, Deployment, CacheFormat | None], Pool]
    stages: Callable[[int, int], tuple[Stage, ...]]
    overhead: Callable[[ModelSpec, Deployment, Gpu | None], Overhead]
    overhead_is_guess: bool = False


def engine_sizing(name: str, version: str = "") -> EngineSizing:
    """The parts of an engine; only those of the one named are loaded. Raises `InputError` for an unknown version."""
    if name in ("paged", "static", "orca-max", "orca-pow2", "orca-oracle"):
        from kvplan.core.pools import paged

        return EngineSizing(
            paged.PagedRules() if name == "paged" else paged.ContiguousRules(name),
            paged.PagedPool if name == "paged" else paged.ContiguousPool,
            pipeline_stages,
            lambda spec, deployment, gpu: _vllm_overhead(
                spec, deployment._replace(version=paged.OVERHEAD_VERSION), gpu
            ),
        )
    if name == "sglang":
        from kvplan.core.pools import sglang

        return EngineSizing(
            sglang.SglangRules(),
            sglang.SglangPool,
            sglang.sglang_stages,
            lambda spec, deployment, gpu: sglang.sglang_overhead(spec, deployment),
            overhead_is_guess=True,
        )
    if name == "tensorrt-llm":
        from kvplan.core.pools import tensorrt_llm

        return EngineSizing(
            tensorrt_llm.TensorrtLlmRules(),
            tensorrt_llm.TensorrtLlmPool,
            tensorrt_llm.tensorrt_llm_stages,
            lambda spec, deployment, gpu: tensorrt_llm.tensorrt_llm_overhead(spec, deployment),
            overhead_is_guess=True,
        )
    if name == "llama.cpp":
        from kvplan.core.pools import llama_cpp

        return EngineSizing(
            llama_cpp.LlamaCppRules(),
            llama_cpp.LlamaCppPool,
            llama_cpp.llama_cpp_stages,
            lambda spec, deployment, gpu: llama_cpp.llama_cpp_overhead(spec, deployment),
            overhead_is_guess=True,
        )
    assert name == "vllm", "options name no other engine"
    return EngineSizing(vllm_rules(version), VllmPool, pipeline_stages, _vllm_overhead)


def _vllm_overhead(spec: ModelSpec, deployment: Deployment, gpu: Gpu | None) -> Overhead:
    return estimate_overhead(
        spec,
        version=deployment.version,
        max_num_batched_tokens=deployment.max_num_batched_tokens,
        max_num_seqs=deployment.max_num_seqs,
        dtype=deployment.dtype,
        tensor_parallel_size=deployment.tensor_parallel_size,
        pipeline_parallel_size=deployment.pipeline_parallel_size,
        enforce_eager=deployment.enforce_eager,
        compute_capability=gpu.compute_capability if gpu else None,
        num_sms=gpu.num_sms if gpu else None,
    )
