"""Engines whose memory can be sized: the defaults of each, its pool, its stages and its overhead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from kvplan.core.deployment import Deployment, Stage, pipeline_stages
from kvplan.core.gpu import Gpu
from kvplan.core.kv_cache import Cache, CacheFormat
from kvplan.core.kv_pool import Pool, VllmPool
from kvplan.core.model import ModelSpec
from kvplan.core.overhead import Overhead, estimate_overhead
from kvplan.core.vllm_rules import vllm_rules


class EngineRules(Protocol):
    """The defaults of an engine, under vLLM's names, and what it does not have."""

    @property
    def name(self) -> str:
        """Of the engine."""

    @property
    def version(self) -> str:
        """Of its rules; empty where there is one set."""

    @property
    def missing_settings(self) -> frozenset[str]:
        """Options that the engine does not have, or whose effect in it is not known."""

    @property
    def batch_holds_sequences(self) -> bool:
        """Whether a step must have room for a token of every sequence."""

    @property
    def spreads_layers(self) -> bool:
        """Whether a number of GPUs alone means stages; else it means tensor parallel ranks."""

    @property
    def latent_row_multiple(self) -> int:
        """Elements that a latent's row is padded to a multiple of."""

    def batch_limits(self, memory_bytes: int | None, gpu_name: str) -> tuple[int, int]:
        """``(max_num_batched_tokens, max_num_seqs)`` on this GPU."""

    def fitted_batch(self, batch: int, seqs: int, max_model_len: int, *, chunked_prefill: bool) -> int:
        """The default batch in tokens, fitted to the sequences where the engine does so."""

    def async_scheduling(self, method: str | None) -> bool:
        """Whether steps overlap, with a way to draft or without (None)."""

    def encoder_tokens(self, max_num_batched_tokens: int, encoder_length: int | None) -> int:
        """Tokens that cross attention reserves for."""

    def memory_share(
        self,
        *,
        memory_bytes: int | None,
        ranks: int,
        max_num_batched_tokens: int,
        enforce_eager: bool,
        caches: Sequence[Cache],
    ) -> float:
        """``gpu_memory_utilization``, or what the engine has in its place."""

    def prefix_caching(self, *, has_states: bool, has_attention: bool) -> bool:
        """Whether equal prefixes are kept."""

    def state_dtypes(self, caches: Sequence[Cache]) -> tuple[str | None, str | None]:
        """What convolutions and recurrent states are kept in; None: the model's own wish, or its dtype."""

    def kv_form(
        self,
        asked: str,
        *,
        spec: ModelSpec,
        dtype: str,
        compute_capability: str | None,
    ) -> tuple[str, str]:
        """``(form of the KV cache, why)``; ``why`` is empty where the form is what was asked for.

        Raises `InputError` for a form that the engine has not.
        """

    def default_block_size(
        self, caches: Sequence[Cache], kv_form: str, compute_capability: str | None
    ) -> tuple[int, str]:
        """``(tokens of a block, of what if of something special)``."""


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
    if name == "paged":
        from kvplan.core.pools import paged

        return EngineSizing(
            paged.PagedRules(),
            paged.PagedPool,
            pipeline_stages,
            lambda spec, deployment, gpu: paged.paged_overhead(spec, deployment, _capability(gpu)),
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
    if name in ("static", "orca-max", "orca-pow2", "orca-oracle"):
        from kvplan.core.pools import paged

        return EngineSizing(
            paged.ContiguousRules(name),
            paged.ContiguousPool,
            pipeline_stages,
            lambda spec, deployment, gpu: paged.paged_overhead(spec, deployment, _capability(gpu)),
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
        compute_capability=_capability(gpu),
        num_sms=gpu.num_sms if gpu else None,
    )


def _capability(gpu: Gpu | None) -> str | None:
    return gpu.compute_capability if gpu else None
