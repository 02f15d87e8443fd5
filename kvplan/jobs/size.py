"""The job of `kvplan size`: model, GPU and settings in, bytes and what fits out."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from kvplan.config import list_gpus, load_gpu, load_model
from kvplan.core.gpu import Gpu
from kvplan.core.model import ModelSpec
from kvplan.core.sizing import (
    Capacity,
    GpuBudget,
    KvSizes,
    WeightSizes,
    explain,
    kv_sizes,
    plan_capacity,
    weight_sizes,
)
from kvplan.errors import DoesNotFit, InputError
from kvplan.options import (
    Resolver,
    Serving,
    ServingOptions,
    Settings,
    SizeOptions,
    check_options,
    resolve_serving,
    settings_dict,
    size_in_bytes,
)


@dataclass(frozen=True, slots=True)
class SizeResult:
    """What a model needs and, with a memory budget, what fits."""

    model: ModelSpec
    config: Settings
    kv: KvSizes
    weights: WeightSizes
    gpu: GpuBudget | None
    capacity: Capacity | None
    seq: int
    concurrency: int
    warnings: tuple[str, ...]
    explanation: tuple[str, ...]

    def to_dict(self, *, explain: bool = False) -> dict[str, object]:
        """The JSON document, without the version keys that stand on top."""
        document: dict[str, object] = {
            "config": settings_dict(self.config),
            "model": self.model.to_dict(),
            "kv": asdict(self.kv),
            "weights": asdict(self.weights),
        }
        if self.capacity is not None:
            document["gpu"] = asdict(self.gpu) if self.gpu else None
            document["capacity"] = asdict(self.capacity)
        document["warnings"] = list(self.warnings)
        if explain:
            document["explanation"] = list(self.explanation)
        return document


def size(
    model: str | os.PathLike[str], *, origins: Mapping[str, str] | None = None, **options: object
) -> SizeResult:
    """KV bytes, blocks and what fits, for one model on at most one kind of GPU.

    ``options`` are the fields of `SizeOptions`. Raises `InputError` for wrong input.

    >>> size("llama-2-13b", seq=4096).kv.bytes_per_token
    819200
    """
    return size_with(os.fspath(model), SizeOptions.of(options), origins)


def size_with(
    model: str,
    options: SizeOptions,
    origins: Mapping[str, str] | None = None,
    *,
    seq_sets_length: bool = True,
) -> SizeResult:
    """`size` with its options in one object.

    ``seq_sets_length`` says whether ``seq`` stands in for a maximum that the model does not state: beside a vLLM
    command it does not, since vLLM would not know it.
    """
    check_options(options)
    spec = load_model(model, catalogue=_path(options.models), overrides=options.set)
    gpu, gpu_count = find_gpu(options.gpu)
    resolver = Resolver(options, origins, seq_sets_length=seq_sets_length)
    resolver.note("model", spec.name, "MODEL", given=True)
    if options.gpu is not None:
        resolver.choose("gpu", options.gpu, "default")
    serving = resolve_serving(spec, resolver, gpu=gpu, gpu_count=gpu_count)
    budget = gpu_budget(gpu, options, serving)
    result = _size(spec, resolver, serving, budget)
    if options.max_model_len == "auto":
        if result.capacity is None:
            raise InputError("auto needs a memory budget", where="--max-model-len", hint="give --gpu")
        longest = result.capacity.max_model_len_that_fits
        if longest == 0:
            raise DoesNotFit(
                f"no length fits: {result.capacity.reason}", where="--max-model-len", hint="use a larger GPU"
            )
        resolver.note("max_model_len", longest, "--max-model-len auto: the longest that fits")
        deployment = serving.deployment._replace(max_model_len=longest)
        serving = serving._replace(deployment=deployment)
        result = _size(spec, resolver, serving, budget)
    return result


def _size(
    spec: ModelSpec, resolver: Resolver[SizeOptions], serving: Serving, budget: GpuBudget | None
) -> SizeResult:
    longest = serving.deployment.max_model_len
    seq = resolver.choose("seq", longest, "max_model_len")
    concurrency = resolver.choose("concurrency", 1, "default")
    deployment = serving.deployment._replace(seq=seq, concurrency=concurrency)
    warnings = list(serving.warnings)
    maximum = spec.max_position_embeddings
    if maximum is not None and seq > maximum:
        warnings.append(f"seq {seq:,} is beyond the model's maximum of {maximum:,} tokens")
    elif seq > longest:
        warnings.append(f"seq {seq:,} is beyond max_model_len {longest:,}: the engine would cut it off")
    resolver.note_rest()
    kv = kv_sizes(spec, deployment)
    weights = weight_sizes(spec, deployment)
    if weights.total_bytes is None:
        warnings.append("the size of the weights is not known")
    capacity = None
    has_budget = deployment.kv_cache_memory_bytes or deployment.num_gpu_blocks_override
    if budget is not None or has_budget:
        capacity = plan_capacity(
            spec,
            deployment,
            kv,
            weights,
            gpu=budget,
            max_num_batched_tokens=serving.max_num_batched_tokens,
        )
    return SizeResult(
        model=spec,
        config=dict(resolver.settings),
        kv=kv,
        weights=weights,
        gpu=budget,
        capacity=capacity,
        seq=seq,
        concurrency=concurrency,
        warnings=tuple(warnings),
        explanation=tuple(explain(spec, deployment, kv, weights, capacity)),
    )


def gpu_names(text: str) -> list[str]:
    """The single GPUs that ``--gpu`` names: a list with commas, or ``all`` with known memory."""
    if text.strip().lower() == "all":
        return [gpu.name for gpu in list_gpus() if gpu.memory_bytes is not None]
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise InputError(f'"{text}" holds an empty name', where="--gpu", hint="write NAME or NAME,NAME")
    return names


def rank_by_gpu(results: Iterable[SizeResult]) -> list[SizeResult]:
    """Results for several GPUs, best first: those that fit, then by how many sequences they hold."""

    def key(result: SizeResult) -> tuple[bool, int]:
        assert result.capacity is not None, "ranked results have a budget"
        return (not result.capacity.fits, -result.capacity.concurrent_sequences)

    return sorted(results, key=key)


def find_gpu(text: str | None) -> tuple[Gpu | None, int | None]:
    """The one GPU that ``--gpu`` names and, where it says so (``8xh100``), how many."""
    if text is None:
        return None, None
    if "," in text or text.lower() == "all":
        raise InputError(f'"{text}" names several GPUs', where="--gpu", hint="name one here")
    match = re.fullmatch(r"([0-9]{1,6})x(.+)", text)
    if not match:
        return load_gpu(text), None
    count = int(match.group(1))
    if count == 0:
        raise InputError(f'"{text}" names no GPU', where="--gpu", hint="write 1x or more")
    return load_gpu(match.group(2)), count


def gpu_budget(gpu: Gpu | None, options: ServingOptions, serving: Serving) -> GpuBudget | None:
    """The memory to plan with: ``--gpu-memory``, else what the catalogue says; None without either."""
    given = size_in_bytes(options.gpu_memory, "gpu_memory")
    count = serving.deployment.tensor_parallel_size
    if given is not None:
        return GpuBudget(gpu.name if gpu else "gpu", count, given, "--gpu-memory")
    if gpu is None:
        return None
    if gpu.memory_bytes is None:
        raise InputError(
            f"the memory of {gpu.name} is not known", where="--gpu", hint="give --gpu-memory, such as 80GiB"
        )
    return GpuBudget(gpu.name, count, gpu.memory_bytes, gpu.memory_source or "catalogue")


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)
