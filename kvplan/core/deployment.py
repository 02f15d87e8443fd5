"""How a model is served, and how its layers are shared out among the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from kvplan.core.kv_cache import CacheFormat, LayerCache
from kvplan.core.lora import LoraSlots
from kvplan.core.weights import Stage
from kvplan.errors import InputError

#: Which end of the estimated overhead decides.
Margin = Literal["low", "mid", "high"]
MARGINS: tuple[Margin, ...] = ("low", "mid", "high")


class Deployment(NamedTuple):
    """Settings of an engine, all resolved: nothing is "auto" here. Lengths and batches are in tokens.

    ``cache`` says how caches are stored on one rank. ``drafts`` are the caches of a draft's layers, numbered on
    from those of the model. ``block_size`` is what was asked for or what the backend wants; a model with states
    may need larger blocks.
    """

    seq: int
    max_model_len: int
    cache: CacheFormat
    engine: str = "vllm"
    version: str = ""
    concurrency: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    enable_expert_parallel: bool = False
    block_size: int = 16
    gpu_memory_utilization: float = 0.92
    max_num_seqs: int = 256
    #: Some engines do other things with a limit that was asked for than with their own.
    is_max_num_seqs_given: bool = False
    max_num_batched_tokens: int = 2048
    enforce_eager: bool = False
    enable_prefix_caching: bool = True
    async_scheduling: bool = True
    hybrid_kv_cache_manager: bool = True
    speculative_method: str | None = None
    drafts: tuple[LayerCache, ...] = ()
    draft_weights_bytes: int = 0
    lora: LoraSlots | None = None
    compute_capability: str | None = None
    margin: Margin = "mid"
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None

    @property
    def dtype(self) -> str:
        """Of weights and activations."""
        return self.cache.dtype

    @property
    def tensor_parallel_size(self) -> int:
        """Ranks that share each layer."""
        return self.cache.tensor_parallel_size

    @property
    def pool_is_given(self) -> bool:
        """Whether the size of the pool is given, so that no estimate decides."""
        return self.kv_cache_memory_bytes is not None or self.num_gpu_blocks_override is not None

    @property
    def gpus(self) -> int:
        """GPUs of the whole deployment."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size


def pipeline_stages(num_layers: int, stages: int) -> tuple[Stage, ...]:
    """Layers shared out evenly; the rest goes one each to stages from the last but one backwards.

    vLLM distributed/utils.py ``get_pp_indices``, the same from 0.8.5 to 0.33. Raises `InputError` where a stage
    would have no layer.
    """
    return even_stages(num_layers, stages, longer=range(stages - 2, -1, -1))


def even_stages(num_layers: int, stages: int, *, longer: Sequence[int]) -> tuple[Stage, ...]:
    """Layers shared out evenly; those that are left over go one each to the first stages of ``longer``.

    Raises `InputError` where a stage would have no layer.
    """
    check_stages(num_layers, stages)
    each, rest = divmod(num_layers, stages)
    sizes = [each] * stages
    for stage in longer[:rest]:
        sizes[stage] += 1
    return stages_of(sizes)


def check_stages(num_layers: int, stages: int, *, called: str = "stages") -> None:
    """Refuse more stages than layers; raises `InputError`, in which they are ``called`` so."""
    if stages > num_layers:
        raise InputError(
            f"{num_layers} layers cannot be shared out among {stages} {called}",
            where="--pipeline-parallel-size",
            hint=f"use at most {num_layers}",
        )


def stages_of(sizes: Sequence[int]) -> tuple[Stage, ...]:
    """Stages with these numbers of layers."""
    found = []
    first = 0
    for i, size in enumerate(sizes):
        found.append(Stage(first, first + size, i == 0, i == len(sizes) - 1))
        first += size
    return tuple(found)
