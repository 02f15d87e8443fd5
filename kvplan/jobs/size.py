"""The job of `kvplan size`: model, GPU and settings in, bytes and what fits out."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from kvplan.config import list_gpus, load_model
from kvplan.core.explain import explain
from kvplan.core.model import ModelSpec
from kvplan.core.sizing import Capacity, GpuBudget, KvSizes, WeightSizes
from kvplan.errors import DoesNotFit, InputError
from kvplan.options import (
    Resolver,
    Settings,
    SizeOptions,
    check_options,
    parse_engine,
    settings_dict,
)
from kvplan.serving import find_gpu, serve


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


def size_with(model: str, options: SizeOptions, origins: Mapping[str, str] | None = None) -> SizeResult:
    """`size` with its options in one object."""
    check_options(options)
    spec = load_model(
        model, catalogue=Path(options.models) if options.models else None, overrides=options.set
    )
    gpu, gpu_count = find_gpu(options.gpu)
    resolver = Resolver(options, origins)
    resolver.note("model", spec.name, "MODEL", given=True)
    if options.gpu is not None:
        resolver.choose("gpu", options.gpu, "default")
    served = serve(
        spec,
        resolver,
        gpu=gpu,
        gpu_count=gpu_count,
        seq=options.seq,
        concurrency=resolver.choose("concurrency", 1, "default"),
    )
    deployment, capacity = served.deployment, served.capacity
    if options.max_model_len == "auto":
        if capacity is None:
            raise InputError("auto needs a memory budget", where="--max-model-len", hint="give --gpu")
        if capacity.max_model_len_that_fits == 0:
            raise DoesNotFit(
                f"no length fits: {capacity.reason}", where="--max-model-len", hint="use a larger GPU"
            )
    longest, seq = deployment.max_model_len, resolver.choose("seq", deployment.seq, "max_model_len")
    warnings = list(served.warnings)
    maximum = spec.max_position_embeddings
    if maximum is not None and seq > maximum:
        warnings.append(f"seq {seq:,} is beyond the model's maximum of {maximum:,} tokens")
    elif seq > longest:
        warnings.append(f"seq {seq:,} is beyond max_model_len {longest:,}: the engine would cut it off")
    if served.weights.total_bytes is None:
        warnings.append(f"the size of the weights is not known: {served.spec.weights.why_unknown}")
    resolver.note_rest()
    return SizeResult(
        model=served.spec,
        config=dict(resolver.settings),
        kv=served.kv,
        weights=served.weights,
        gpu=served.budget,
        capacity=capacity,
        seq=seq,
        concurrency=deployment.concurrency,
        warnings=tuple(warnings),
        explanation=tuple(explain(served.plan, served.kv, served.weights, capacity)),
    )


def gpu_names(text: str) -> list[str]:
    """The single GPUs that ``--gpu`` names: a list with commas, or ``all`` with known memory."""
    if text.strip().lower() == "all":
        return [gpu.name for gpu in list_gpus() if gpu.memory_bytes is not None]
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise InputError(f'"{text}" holds an empty name', where="--gpu", hint="write NAME or NAME,NAME")
    return names


def engine_names(text: str) -> list[str]:
    """The engines that ``--engine`` names, separated by commas: each once, checked, in the order given."""
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise InputError(f'"{text}" holds an empty name', where="--engine", hint="write NAME or NAME,NAME")
    for name in names:
        parse_engine(name)
    return list(dict.fromkeys(names))


def rank_by_gpu(results: Iterable[SizeResult]) -> list[SizeResult]:
    """Results for several GPUs, best first: those that fit, then by how many sequences they hold."""

    def key(result: SizeResult) -> tuple[bool, int]:
        assert result.capacity is not None, "ranked results have a budget"
        return (not result.capacity.fits, -result.capacity.concurrent_sequences)

    return sorted(results, key=key)
