"""The job of `kvplan size`: model, GPU and settings in, bytes and what fits out."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace

from kvplan.config import list_gpus, load_model
from kvplan.core.engine_sizing import engine_sizing
from kvplan.core.explain import explain
from kvplan.core.gpu import Gpu
from kvplan.core.model import ModelSpec
from kvplan.core.sizing import Capacity, GpuBudget, KvSizes, WeightSizes
from kvplan.errors import DoesNotFit, InputError
from kvplan.options import (
    Resolver,
    Settings,
    SizeOptions,
    check_options,
    flag,
    parse_engine,
    settings_dict,
)
from kvplan.serving import Served, find_gpu, serve, would_fit


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
    gpu, gpu_count = find_gpu(options.gpu)
    return _size(
        load_model(model, catalogue=options.catalogue, overrides=options.set),
        options,
        origins or {},
        gpu,
        gpu_count,
        seq_sets_length=seq_sets_length,
    )


def _size(
    spec: ModelSpec,
    options: SizeOptions,
    origins: Mapping[str, str],
    gpu: Gpu | None,
    gpu_count: int | None,
    *,
    seq_sets_length: bool,
    suggests: bool = True,
) -> SizeResult:
    """``suggests``: whether changes are looked for where it does not fit; with ``--suggest`` they always are."""
    resolver = Resolver(options, origins, seq_sets_length=seq_sets_length)
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
    if options.suggest and capacity is None:
        raise InputError("--suggest needs a memory budget", where="--suggest", hint="give --gpu")
    seq = resolver.choose("seq", deployment.seq, "max_model_len")
    warnings = [*served.warnings, *_warnings(served, seq)]
    for name in ("lengths", "trace", "shared_prefix"):
        if getattr(options, name) is not None:
            if capacity is None:
                raise InputError(f"{flag(name)} needs a memory budget", where=flag(name), hint="give --gpu")
            from kvplan.lengths import residents  # only such runs need it

            found = residents(options, served.plan, capacity.usable_blocks, warnings)
            capacity = replace(capacity, distribution=found)
            break
    if capacity is not None and (options.suggest or (suggests and not capacity.fits)):
        from kvplan.suggest import suggest  # only such runs need it

        capacity = replace(capacity, suggestions=suggest(spec, options, served, gpu_count, list_gpus))
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


def _warnings(served: Served, seq: int) -> Iterator[str]:
    """What a result of sequences of ``seq`` tokens is said with."""
    maximum, longest = served.spec.max_position_embeddings, served.deployment.max_model_len
    if maximum is not None and seq > maximum:
        yield f"seq {seq:,} is beyond the model's maximum of {maximum:,} tokens"
    elif seq > longest:
        yield f"seq {seq:,} is beyond max_model_len {longest:,}: the engine would cut it off"
    if served.weights.total_bytes is None:
        yield f"the size of the weights is not known: {served.spec.weights.why_unknown}"


def size_on(
    model: str,
    gpus: str,
    options: SizeOptions,
    origins: Mapping[str, str] | None = None,
    *,
    seq_sets_length: bool = True,
) -> list[SizeResult]:
    """`size` on each GPU of a list with commas, or on ``all``: on as many as the model needs, the fewest first.

    That is the least number at which it fits: tensor parallel sizes that the engine accepts, up to the 8 GPUs of a
    machine, then stages of a pipeline over the largest of them. ``8xNAME`` and a degree of parallelism that is
    given fix the number. GPUs of equal number stand by total memory; those on which it never fits come last, with the
    most that were tried. GPUs of unknown memory are left out, as a warning says. Raises `InputError`.
    """
    check_options(options)
    spec = load_model(model, catalogue=options.catalogue, overrides=options.set)
    found, unknown = [], []
    for text, gpu, given_count in _listed_gpus(gpus):
        if gpu.memory_bytes is None and options.gpu_memory is None:
            unknown.append(gpu.name)
            continue
        chosen, origin = options.but({"gpu": text}), dict(origins or {})
        count = given_count
        if given_count is None and not options.has_degrees:
            count, sizes = _gpus_needed(spec, chosen, origin, gpu)
            chosen = chosen.but({"gpu": f"{count}x{gpu.name}", **sizes})
            origin |= dict.fromkeys(sizes, "--gpu: the fewest that fit")
        found.append(_size(spec, chosen, origin, gpu, count, seq_sets_length=seq_sets_length, suggests=False))
    if not found:
        raise InputError(
            f"the memory of {', '.join(unknown)} is not known", where="--gpu", hint="give --gpu-memory"
        )
    found.sort(key=_by_need)
    if unknown:
        note = f"left out, since their memory is not known: {', '.join(unknown)}"
        found[0] = replace(found[0], warnings=(*found[0].warnings, note))
    return found


#: GPUs of one machine, and the most stages over such machines.
_GPUS_OF_MACHINE = 8
_MOST_STAGES = 8


def _gpus_needed(
    spec: ModelSpec, options: SizeOptions, origins: Mapping[str, str], gpu: Gpu
) -> tuple[int, dict[str, int]]:
    """The least number of GPUs at which it fits and their degrees of parallelism; else the most that were tried."""
    sizes: dict[str, int] = {}
    refusal: InputError | None = None
    engine = parse_engine(options.engine)
    spreads = engine_sizing(engine.name, engine.version).rules.spreads_layers
    for tensor in range(1, _GPUS_OF_MACHINE + 1):
        degrees = {"pipeline_parallel_size" if spreads else "tensor_parallel_size": tensor}
        try:
            if _fits(spec, options, origins, gpu, degrees):
                return tensor, degrees
        except InputError as error:
            refusal = refusal or error  # not a size for this model
            continue
        sizes = degrees
    if not sizes:
        assert refusal is not None, "each size was refused"
        raise refusal
    if spreads:
        return sizes["pipeline_parallel_size"], sizes
    tensor = sizes["tensor_parallel_size"]
    for stages in range(2, min(spec.num_layers, _MOST_STAGES) + 1):
        degrees = {**sizes, "pipeline_parallel_size": stages}
        try:
            if _fits(spec, options, origins, gpu, degrees):
                return tensor * stages, degrees
        except InputError:
            break  # a model that cannot be cut into stages
        sizes = degrees
    return tensor * sizes.get("pipeline_parallel_size", 1), sizes


def _fits(
    spec: ModelSpec, options: SizeOptions, origins: Mapping[str, str], gpu: Gpu, degrees: Mapping[str, int]
) -> bool:
    """Whether it fits with these degrees; ``auto`` takes any length that the engine starts with."""
    tried = options.but(degrees)
    if tried.max_model_len == "auto":
        return _longest(spec, tried, origins, gpu) > 0
    return would_fit(
        spec,
        Resolver(tried, origins),
        gpu=gpu,
        gpu_count=None,
        seq=options.seq,
        concurrency=options.concurrency or 1,
    )


def _longest(spec: ModelSpec, options: SizeOptions, origins: Mapping[str, str], gpu: Gpu) -> int:
    served = serve(spec, Resolver(options, origins), gpu=gpu, gpu_count=None, seq=options.seq)
    return served.capacity.max_model_len_that_fits if served.capacity else 0


def _by_need(result: SizeResult) -> tuple[bool, int, int]:
    assert result.capacity is not None, "each has a budget"
    assert result.gpu is not None, "each names a GPU"
    return (not result.capacity.fits, result.gpu.count, result.gpu.count * result.gpu.memory_bytes)


def _listed_gpus(text: str) -> list[tuple[str, Gpu, int | None]]:
    """The GPUs that ``--gpu`` names, each with its text and with the number where the text says one."""
    if text.strip().lower() == "all":
        return [(gpu.name, gpu, None) for gpu in list_gpus()]
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise InputError(f'"{text}" holds an empty name', where="--gpu", hint="write NAME or NAME,NAME")
    listed = []
    for name in names:
        gpu, count = find_gpu(name)
        assert gpu is not None, "a name was given"
        listed.append((name, gpu, count))
    return listed


def engine_names(text: str) -> list[str]:
    """The engines that ``--engine`` names, separated by commas: each once, checked, in the order given."""
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise InputError(f'"{text}" holds an empty name', where="--engine", hint="write NAME or NAME,NAME")
    for name in names:
        parse_engine(name)
    return list(dict.fromkeys(names))


def names_several_gpus(text: str | None) -> bool:
    """Whether ``--gpu`` asks for a ranking."""
    return text is not None and ("," in text or text.strip().lower() in ("", "all"))
