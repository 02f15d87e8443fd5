"""The job of `kvplan audit`: an engine's own figures beside ours, term by term, with the likely cause of a difference.

What the engine derives from the memory that it gave its KV cache (blocks, tokens, concurrency) is compared at that
printed memory, so that no estimate is in it; the budget that led there is compared with our estimate. A cause is named
only where its figures agree: each is tried and computed.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Literal, NamedTuple, cast

from kvplan.calibration import Calibration
from kvplan.catalogue import entry_names, read_catalogue
from kvplan.config import load_model, resource
from kvplan.core.kv_cache import KV_DTYPE_BYTES
from kvplan.core.deployment import Margin
from kvplan.core.sizing import Capacity
from kvplan.errors import InputError
from kvplan.jobs.size import SizeResult, size_with
from kvplan.options import SizeOptions, check_options, parse_engine
from kvplan.startup_log import Figure, StartupLog, read_log_file

Unit = Literal["bytes", "tokens", "blocks", "times"]


@dataclass(frozen=True, slots=True)
class AuditLine:
    """One term: what the engine printed, what we compute, and the likely cause if they differ.

    ``low`` to ``high`` is what the printed text allows. ``difference`` is theirs less ours, ``difference_bytes`` the
    same in bytes on one GPU; None where one of them is not known. ``agrees`` says whether ours lies in what their text
    and, for estimates, our own range allow.
    """

    term: str
    unit: Unit
    theirs: int | float | None
    low: int | float | None
    high: int | float | None
    ours: int | float | None
    difference: int | float | None
    difference_bytes: int | None
    agrees: bool | None
    likely_cause: str | None
    line: int | None
    worker: str | None


@dataclass(frozen=True, slots=True)
class AuditResult:
    """A start-up log beside our figures. ``sized`` is our plan with the log's settings; None without a model."""

    log: StartupLog
    sized: SizeResult | None
    lines: tuple[AuditLine, ...]
    calibration: Calibration | None
    notes: tuple[str, ...]

    @property
    def differing(self) -> int:
        """How many terms differ by more than rounding and our own range allow."""
        return sum(line.agrees is False for line in self.lines)

    def to_dict(self) -> dict[str, object]:
        """The JSON document, without the version keys that stand on top."""
        return {
            "log": self.log.to_dict(),
            "model": self.sized.model.to_dict() if self.sized else None,
            "lines": [asdict(line) for line in self.lines],
            "differing": self.differing,
            "calibration": self.calibration._asdict() if self.calibration else None,
            "notes": list(self.notes),
        }


def audit(log: str | os.PathLike[str], *, model: str | None = None, **options: object) -> AuditResult:
    """Read an engine's start-up log and lay our figures beside its own.

    ``log`` is a file, or ``-`` for standard input. ``model`` and ``options``, the fields of `SizeOptions`, go before
    what the log says. Raises `InputError` for a log that is not recognised and for wrong input.
    """
    return audit_with(read_log_file(os.fspath(log)), SizeOptions.of(options), model)


def audit_with(log: StartupLog, options: SizeOptions, model: str | None = None) -> AuditResult:
    """`audit` of a log that is read already, with its options in one object."""
    check_options(options)
    notes = list(log.notes)
    given = _with_settings_of(log, options, notes)
    name = model if model is not None else _model_named_in(log, options, notes)
    sized: SizeResult | None = None
    lines: list[AuditLine] = []
    if name is not None:
        load_model(
            name, catalogue=_path(options.models), overrides=options.set
        )  # a wrong name is the user's mistake
        try:
            sized = size_with(name, _without_budget(given) if _memory(given) is None else given)
        except InputError as error:
            notes.append(f"ours is not known: {error}")
    if sized is not None:
        assert name is not None, "a size has a model"
        lines = list(_compare(_Case(log, name, given, sized)))
    places, terms = {line.line for line in lines}, {line.term for line in lines}
    alone = (_theirs_alone(figure) for figure in _headline_figures(log) if figure.line not in places)
    lines += [line for line in alone if line.term not in terms]
    calibration = _calibration(log, name or log.model, given, sized)
    return AuditResult(log, sized, tuple(lines), calibration, tuple(notes))


def _with_settings_of(log: StartupLog, options: SizeOptions, notes: list[str]) -> SizeOptions:
    """The options, filled up with what the log says."""
    filled = replace(options)
    for name, found in log.settings.items():
        if getattr(filled, name) is None and name not in _NOT_OPTIONS:
            filled.set_option(name, found.value)
    total = log.least("gpu_total")
    if filled.gpu_memory is None and total is not None and total.value > 0:
        filled.gpu_memory = int(total.value)
    if filled.engine is None:
        filled.engine = _engine_of(log, notes)
    return filled


#: What a log says of settings that a pool is planned without: it is compared at the printed memory.
_NOT_OPTIONS = frozenset({"kv_cache_memory_bytes", "num_gpu_blocks_override"})


def _engine_of(log: StartupLog, notes: list[str]) -> str | None:
    """The rules to compare with: those of the log's engine and version, else the newest held."""
    name: str = log.engine
    if log.engine == "vllm" and log.version:
        release = re.match(r"(\d+)\.(\d+)", log.version)
        name = f"vllm@{release[1]}.{release[2]}" if release else name
    try:
        parse_engine(name)
    except InputError as error:
        notes.append(f"{error.what}: ours follow the rules of {(error.hint or '').removeprefix('use ')}")
        return None
    return name


def _model_named_in(log: StartupLog, options: SizeOptions, notes: list[str]) -> str | None:
    """The model that the log names, as far as we can load it: by its name, its repository, or its folder's name."""
    served = log.own_settings.get("served_model_name")
    file = log.own_settings.get("file")
    names = [
        str(text)
        for text in (log.model, served.value if served else None, file.value if file else None)
        if text
    ]
    known = {
        _slug(one.rpartition("/")[2]): one
        for one in entry_names(read_catalogue(_path(options.models) or resource("models.yaml")))
    }
    for text in names:
        cached = re.search(r"models--([^/\\]+?)--([^/\\]+)", text)  # a folder of the Hugging Face cache
        name = f"{cached[1]}/{cached[2]}" if cached else text.rstrip("/\\")
        base = re.sub(r"\.gguf\Z", "", re.split(r"[/\\]", name)[-1])
        quantized = re.sub(r"[-_.](?:q\d\w*|iq\d\w*|f16|bf16)\Z", "", base, flags=re.IGNORECASE)
        for candidate in (name, *(known.get(_slug(one)) for one in (base, quantized))):
            if candidate is None or candidate.lower().endswith(".gguf"):
                continue
            try:
                load_model(candidate, catalogue=_path(options.models), overrides=options.set)
            except InputError:
                continue  # the next spelling may be known
            return candidate
    what = f'the model "{names[0]}" of the log is not known' if names else "the log names no model"
    notes.append(f"{what}: give --model for figures of ours")
    return None


def _slug(name: str) -> str:
    return re.sub(r"[\s_]+", "-", name.casefold()).removeprefix("meta-")


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)


def _memory(options: SizeOptions) -> object:
    return options.gpu_memory if options.gpu_memory is not None else options.gpu


def _without_budget(options: SizeOptions) -> SizeOptions:
    return replace(options, gpu=None, gpu_memory=None)


class _Case(NamedTuple):
    """A log, the model, the options that it amounts to, and our plan with them."""

    log: StartupLog
    model: str
    options: SizeOptions
    sized: SizeResult

    def at(self, kv_bytes: int, **changes: object) -> Capacity | None:
        """Our plan with this memory for the KV cache; None where it cannot be computed."""
        options = _without_budget(self.options)
        for name, value in {"kv_cache_memory_bytes": max(1, kv_bytes), **changes}.items():
            options.set_option(name, value)
        try:
            return size_with(self.model, options).capacity
        except InputError:
            return None  # such a change is none that this engine has


def _compare(case: _Case) -> Iterator[AuditLine]:
    if case.log.engine == "vllm":
        yield from _compare_vllm_pool(case)
        yield from _compare_budget(case)
    elif case.log.engine == "llama.cpp":
        yield from _compare_caches(case)
    else:
        yield from _compare_token_pool(case)
    weights = _most(case.log, "weights")
    if case.log.engine in ("sglang", "tensorrt-llm") and weights is not None:
        yield _weights_line(case, weights)


# What vLLM makes of the memory for its KV cache


class _Derived(NamedTuple):
    """A figure that the engine derives from the memory: its name in the log, ours in a plan, and its unit."""

    name: str
    term: str
    unit: Unit
    ours: Callable[[Capacity], int | float]


_DERIVED = (
    _Derived("num_gpu_blocks", "blocks", "blocks", lambda plan: plan.num_gpu_blocks),
    _Derived("kv_cache_tokens", "KV cache tokens", "tokens", lambda plan: plan.kv_cache_tokens),
    _Derived("max_concurrency", "concurrency", "times", lambda plan: plan.max_concurrency),
    _Derived("estimated_max_len", "longest that fits", "tokens", lambda plan: plan.max_model_len_that_fits),
)


def _compare_vllm_pool(case: _Case) -> Iterator[AuditLine]:
    log = case.log
    memory = log.least("kv_memory")
    needed = log.last("kv_needed")
    if needed is not None:
        one = replace(case.options, seq=None, concurrency=None)
        ours = size_with(case.model, _without_budget(one)).kv.per_gpu.allocated_bytes_per_sequence
        yield _line("KV of one longest sequence", needed, ours, cause=_needed_cause(case, needed, ours))
    for derived in _DERIVED:
        figure = log.last(derived.name)
        if figure is None:
            continue
        plan = case.at(int(memory.value)) if memory is not None and memory.value > 0 else None
        if memory is None or plan is None:
            yield _theirs_alone(figure)
            continue
        value = derived.ours(plan)
        agrees = _reaches(case, memory, derived, figure)
        if not agrees:
            cause = _pool_cause(case, memory, derived, figure, plan)
        else:
            cause = (
                None if figure.allows(value) else f"rounding: KV is printed to 0.01 GiB (line {memory.line})"
            )
        yield _derived_line(case, derived, figure, value, agrees=agrees, cause=cause)


def _reaches(case: _Case, memory: Figure, derived: _Derived, figure: Figure, **changes: object) -> bool:
    """Whether some memory that would be printed so gives the figure: it grows with the memory."""
    least, most = case.at(int(memory.low), **changes), case.at(int(memory.high), **changes)
    if least is None or most is None:
        return False
    return derived.ours(least) <= figure.high and figure.low <= derived.ours(most)


def _derived_line(
    case: _Case, derived: _Derived, figure: Figure, ours: int | float, *, agrees: bool, cause: str | None
) -> AuditLine:
    group = case.sized.kv
    per_unit = {
        "blocks": Fraction(group.per_gpu.bytes_per_block),
        "tokens": Fraction(group.per_gpu.bytes_per_token),
        "times": Fraction(group.per_gpu.allocated_bytes_per_sequence),
    }[derived.unit]
    return _line(
        derived.term,
        figure,
        ours,
        unit=derived.unit,
        difference_bytes=round(Fraction(figure.value - ours) * per_unit),
        agrees=agrees,
        cause=cause,
    )


#: Settings that a log may not show and that change what a pool gives: tried one by one.
_TRIES: tuple[tuple[str, object, str], ...] = (
    ("disable_hybrid_kv_cache_manager", True, "the hybrid KV cache manager is off"),
    ("async_scheduling", True, "asynchronous scheduling: more tokens in flight hold blocks of the windows"),
    (
        "async_scheduling",
        False,
        "no asynchronous scheduling: fewer tokens in flight hold blocks of the windows",
    ),
    ("enable_prefix_caching", False, "prefix caching is off"),
    ("enable_prefix_caching", True, "prefix caching is on"),
    ("kv_cache_dtype", "fp8", "the KV cache is in fp8"),
    *(("block_size", size, f"a block size of {size}") for size in (32, 64, 128)),
)


def _pool_cause(case: _Case, memory: Figure, derived: _Derived, figure: Figure, plan: Capacity) -> str | None:
    """Why a figure is not what the printed memory gives; None if nothing that is tried gives it."""
    for other in case.log.by_worker("kv_memory").values():
        if other is not memory and _reaches(case, other, derived, figure):
            return f"another rank's memory: {_who(other)} printed {other.value:,} bytes (line {other.line})"
    override = case.log.settings.get("num_gpu_blocks_override")
    if override is not None and derived.name == "num_gpu_blocks" and figure.value == override.value:
        return f"num_gpu_blocks_override (line {override.line})"
    groups = {(group.kind, group.block_size) for group in case.sized.kv.per_gpu.groups}
    block_size = min((size for _, size in groups), default=case.sized.kv.block_size)
    if derived.name == "kv_cache_tokens":
        old = plan.num_gpu_blocks // len(groups) * block_size
        if figure.value == old:
            return (
                f"the token line of vLLM up to 0.20: {plan.num_gpu_blocks:,} blocks // {len(groups)} groups x "
                f"{block_size}"
            )
        new = int(plan.max_concurrency * plan.max_model_len)
        if figure.value == new:
            return f"the token line of vLLM from 0.21 on: {plan.max_concurrency:.2f} x {plan.max_model_len:,}"
    if derived.unit in ("blocks", "tokens") and case.log.engine == "vllm":
        step = 1 if derived.unit == "blocks" else block_size
        if abs(figure.value - derived.ours(plan)) == step:
            return "one block: the null block is counted on one side only"
    for name, value, cause in _TRIES:
        if getattr(case.options, name) is None and _reaches(case, memory, derived, figure, **{name: value}):
            return f"{cause}, though the log does not say so"
    return None


def _needed_cause(case: _Case, needed: Figure, ours: int) -> str | None:
    block = case.sized.kv.per_gpu.bytes_per_block
    if needed.allows(ours):
        return None
    if needed.allows(ours + block) or needed.allows(ours - block):
        return "one block: the null block is counted on one side only"
    stages = case.options.pipeline_parallel_size or 1
    if stages > 1 and needed.allows(ours // stages):
        return f"a rank holds one of {stages} pipeline stages"
    return None


# The budget that led to that memory


def _compare_budget(case: _Case) -> Iterator[AuditLine]:
    log, sized = case.log, case.sized
    requested, memory = log.last("requested"), log.least("kv_memory")
    if requested is not None and sized.gpu is not None:
        share = cast("float", sized.config["gpu_memory_utilization"].value)  # the option takes no other
        total = log.least("gpu_total")
        inside = None
        if total is not None:
            inside = share * total.low <= requested.high and requested.low <= share * total.high + 1
        yield _line(
            "memory x utilization", requested, math.ceil(sized.gpu.memory_bytes * share), agrees=inside
        )
    weights = _most(log, "weights")
    if weights is not None:
        yield _weights_line(case, weights)
    overhead = sized.capacity.overhead_bytes if sized.capacity is not None else None
    for name, term, ours in (
        ("activations", "activations", overhead.activations if overhead else None),
        ("non_torch", "runtime", overhead.runtime if overhead else None),
        ("cuda_graphs_estimate", "CUDA graphs (estimated)", overhead.cuda_graphs if overhead else None),
        ("cuda_graphs", "CUDA graphs (measured)", overhead.cuda_graphs if overhead else None),
    ):
        figure = _most(log, name)
        if figure is not None:
            # One part of an estimate is neither right nor wrong: the range is that of the sum.
            yield replace(_line(term, figure, ours), agrees=None)
    if memory is not None and overhead is not None and sized.capacity is not None:
        ours = sized.capacity.available_kv_bytes
        chosen = overhead.total(_margin(case))
        low, high = ours + chosen - overhead.high, ours + chosen - overhead.low
        inside = low <= memory.high and memory.low <= high
        cause = "an estimate: theirs is in our range" if inside else _largest_part(case, memory)
        yield _line("memory for KV", memory, ours, agrees=inside, cause=cause)
    identity = _own_sum(case.log)
    if identity is not None:
        agrees = identity.graphs is not None
        cause = _GRAPHS[identity.graphs] if identity.graphs is not None else None
        term = "memory for KV, from their parts"
        yield _line(term, identity.memory, identity.total, agrees=agrees, cause=cause)


def _margin(case: _Case) -> Margin:
    return cast("Margin", case.options.margin or "mid")  # check_options knows no other


def _weights_line(case: _Case, weights: Figure) -> AuditLine:
    """Weights agree within a hundredth: engines count buffers and the allocator's rounding in."""
    ours = case.sized.weights.per_gpu_bytes
    if ours is None:
        return _line("weights", weights, None)
    near = abs(weights.value - ours) * 100 <= ours
    return _line("weights", weights, ours, agrees=near, cause=_weights_cause(case, weights, ours, near=near))


def _weights_cause(case: _Case, weights: Figure, ours: int, *, near: bool) -> str | None:
    if weights.allows(ours):
        return None
    if near:
        return "less than 1 %: buffers and the allocator's rounding"
    stages = case.options.pipeline_parallel_size or 1
    if stages > 1 and abs(weights.value * stages - ours) * 10 <= ours:
        return f"a rank holds one of {stages} pipeline stages"
    if case.options.quantization is not None and case.sized.model.weights.quantization is None:
        return f"the engine quantizes the weights ({case.options.quantization}); ours are in {case.sized.weights.dtype}"
    if case.options.num_speculative_tokens is not None and weights.value > ours:
        return "the draft model's weights are counted in"
    return None


def _largest_part(case: _Case, memory: Figure) -> str | None:
    """Which part's difference explains most of that of the memory for KV, if at least half."""
    plan, log = case.sized.capacity, case.log
    overhead = plan.overhead_bytes if plan is not None else None
    if plan is None or overhead is None:
        return None
    parts = [
        ("weights", "weights", case.sized.weights.per_gpu_bytes),
        ("activations", "activations", overhead.activations),
    ]
    parts.append(("non_torch", "runtime", overhead.runtime))
    identity = _own_sum(log)
    causes: list[tuple[float, str]] = []
    if identity is not None and identity.graphs == "":
        causes.append(
            (-overhead.cuda_graphs, "graph memory: this version does not take it from the budget, ours does")
        )
    else:
        parts.append(("cuda_graphs", "CUDA graphs", overhead.cuda_graphs))
    for name, term, ours in parts:
        theirs = _most(log, name)
        if theirs is not None and ours is not None:
            apart = theirs.value - ours
            more = "more" if apart > 0 else "less"
            causes.append(
                (apart, f"mostly {term}: theirs is {abs(apart):,} bytes {more} (line {theirs.line})")
            )
    missing = plan.available_kv_bytes - memory.value  # where theirs takes more, less is left
    explaining = [cause for cause in causes if cause[0] * missing > 0 and abs(cause[0]) * 2 >= abs(missing)]
    return max(explaining, key=lambda cause: abs(cause[0]))[1] if explaining else None


class _OwnSum(NamedTuple):
    """Budget less the parts that one process printed, beside the memory that it printed for KV.

    ``graphs`` names the figure of the CUDA graphs with which the sum comes out: "" none, None: with no figure.
    """

    memory: Figure
    total: int | float
    graphs: str | None


_GRAPHS = {
    "": "CUDA graphs are not taken from the budget",
    "cuda_graphs_estimate": "CUDA graphs are taken from the budget, as it estimated them",
    "cuda_graphs": "CUDA graphs are taken from the budget, as it measured them",
}


def _own_sum(log: StartupLog) -> _OwnSum | None:
    """The engine's own sum; None if no process printed all its terms."""
    parts = _parts_of_one_worker(log)
    memory, budget, activations = (parts.get(name) for name in ("kv_memory", "requested", "activations"))
    consumed = [parts["consumed"]] if "consumed" in parts else [parts.get("weights"), parts.get("non_torch")]
    taken = [part for part in (*consumed, activations) if part is not None]
    if memory is None or budget is None or len(taken) <= len(consumed):
        return None
    for name in _GRAPHS:
        terms = [*taken, *([parts[name]] if name in parts else [])]
        low = budget.low - sum(part.high for part in terms)
        high = budget.high - sum(part.low for part in terms)
        if low <= memory.high and memory.low <= high:
            return _OwnSum(memory, budget.value - sum(part.value for part in terms), name)
    return _OwnSum(memory, budget.value - sum(part.value for part in taken), None)


# SGLang and TensorRT-LLM: a pool of tokens


def _compare_token_pool(case: _Case) -> Iterator[AuditLine]:
    log = case.log
    per_token = case.sized.kv.per_gpu.bytes_per_token
    tokens, printed = log.last("kv_cache_tokens"), log.last("kv_bytes_per_token")
    blocks, memory = log.last("num_gpu_blocks"), _pool_memory(log)
    if printed is not None:
        yield _line("KV per token", printed, per_token)
    if blocks is not None and tokens is not None:
        block_size = log.settings.get("block_size")
        if block_size is not None and isinstance(block_size.value, int):
            yield _line("KV cache tokens", tokens, int(blocks.value) * block_size.value, unit="tokens")
    if tokens is None or memory is None:
        return
    ours = int(tokens.value) * per_token
    page = case.options.block_size or 1
    cause = None
    if not memory.allows(ours):
        if memory.allows(ours + page * per_token):
            cause = "the pool has one page more than its tokens"
        elif memory.allows(ours // 2) or memory.allows(ours * 2):
            cause = "an element of the cache has another size: see kv_cache_dtype"
    yield _line(
        "KV memory of these tokens",
        memory,
        ours,
        agrees=memory.allows(ours) or memory.allows(ours + page * per_token),
        cause=cause,
    )


def _pool_memory(log: StartupLog) -> Figure | None:
    """The memory of the pool: as printed, or keys and values together."""
    memory = log.last("kv_memory")
    keys, values = log.last("kv_k"), log.last("kv_v")
    if memory is not None or keys is None or values is None:
        return memory
    return keys._replace(
        name="kv_memory",
        value=keys.value + values.value,
        low=keys.low + values.low,
        high=keys.high + values.high,
    )


# llama.cpp: cells

#: Bytes of one element in the cache: of a block of 32 in the quantized types (ggml-common.h).
_GGML_BYTES = {
    "f32": Fraction(4),
    "f16": Fraction(2),
    "bf16": Fraction(2),
    "q8_0": Fraction(34, 32),
    "q5_1": Fraction(24, 32),
    "q5_0": Fraction(22, 32),
    "q4_1": Fraction(20, 32),
    "q4_0": Fraction(18, 32),
    "iq4_nl": Fraction(18, 32),
}


def _compare_caches(case: _Case) -> Iterator[AuditLine]:
    """Each cache: cells x streams x what its layers keep of a token, in its own types (llama-kv-cache.cpp)."""
    log = case.log
    layers_of_model = case.sized.model.num_layers
    keys, values = (
        _GGML_BYTES.get(str(log.own_settings[name].value)) if name in log.own_settings else Fraction(2)
        for name in ("type_k", "type_v")
    )
    per_token = Fraction(case.sized.kv.bytes_per_token, KV_DTYPE_BYTES[case.sized.kv.dtype])
    for worker, memory in log.by_worker("kv_memory").items():
        cells = _count(log, "kv_cells", worker, "n_ctx")
        layers = _count(log, "kv_layers", worker, "n_layer")
        if cells is None or layers is None or keys is None or values is None:
            yield _theirs_alone(memory)
            continue
        streams = _count(log, "kv_streams", worker, "") or 1
        ours = round(cells * streams * per_token * Fraction(layers, layers_of_model) * (keys + values) / 2)
        term = "KV memory" if worker is None else f"KV memory, {worker} cache"
        yield _line(term, memory, ours)


def _count(log: StartupLog, name: str, worker: str | None, in_shape: str) -> int | None:
    """A count that the cache's line gives, else one of the lines about model and context."""
    figure = log.by_worker(name).get(worker)
    if figure is not None:
        return int(figure.value)
    found = log.shape.get(in_shape)
    return found.value if found is not None and isinstance(found.value, int) else None


# Lines


def _line(
    term: str,
    figure: Figure,
    ours: int | float | None,
    *,
    unit: Unit = "bytes",
    difference_bytes: int | None = None,
    agrees: bool | None = None,
    cause: str | None = None,
) -> AuditLine:
    """A line of the comparison; unless said, ours agrees where the printed text allows it."""
    difference = None if ours is None else figure.value - ours
    if unit == "bytes" and difference is not None:
        difference_bytes = int(difference)
    return AuditLine(
        term=term,
        unit=unit,
        theirs=figure.value,
        low=figure.low,
        high=figure.high,
        ours=ours,
        difference=difference,
        difference_bytes=difference_bytes,
        agrees=figure.allows(ours) if agrees is None and ours is not None else agrees,
        likely_cause=cause,
        line=figure.line,
        worker=figure.worker,
    )


_UNITS: dict[str, Unit] = {"bytes": "bytes", "tokens": "tokens", "blocks": "blocks", "times": "times"}


def _theirs_alone(figure: Figure) -> AuditLine:
    """A figure that we have nothing beside."""
    term = _TERMS.get(figure.name, figure.name.replace("_", " "))
    return _line(term, figure, None, unit=_UNITS.get(figure.unit, "bytes"))


#: Figures that are shown though we have none beside them, and what they are called.
_TERMS = {
    "kv_memory": "memory for KV",
    "kv_needed": "KV of one longest sequence",
    "num_gpu_blocks": "blocks",
    "kv_cache_tokens": "KV cache tokens",
    "max_concurrency": "concurrency",
    "estimated_max_len": "longest that fits",
    "weights": "weights",
    "activations": "activations",
    "non_torch": "runtime",
    "consumed": "weights and runtime",
    "cuda_graphs": "CUDA graphs (measured)",
    "state_memory": "states",
    "state_conv": "states, convolution",
    "state_ssm": "states, recurrent",
    "compute_buffer": "compute buffer",
}


def _headline_figures(log: StartupLog) -> list[Figure]:
    """Of each of these terms the figure that was printed last."""
    return [figure for figure in map(log.last, _TERMS) if figure is not None]


def _most(log: StartupLog, name: str) -> Figure | None:
    """The largest of each worker's last figures: the rank that has least left."""
    return max(log.by_worker(name).values(), key=lambda figure: figure.value, default=None)


def _parts_of_one_worker(log: StartupLog) -> dict[str, Figure]:
    """The parts of its budget that one process printed: of the one that printed most, or has least memory for KV."""
    by_name = {name: log.by_worker(name) for name in _BUDGET}
    candidates = [
        {name: found[worker] for name, found in by_name.items() if worker in found}
        for worker in dict.fromkeys(worker for found in by_name.values() for worker in found)
    ]

    def rank(parts: dict[str, Figure]) -> tuple[int, float]:
        return len(parts), -(parts["kv_memory"].value if "kv_memory" in parts else 0)

    return max(candidates, key=rank, default={})


_BUDGET = (
    *("requested", "weights", "consumed", "non_torch", "activations", "cuda_graphs", "cuda_graphs_estimate"),
    "kv_memory",
)


def _who(figure: Figure) -> str:
    return figure.worker or "a process without a name"


# What it measured


def _calibration(
    log: StartupLog, model: str | None, options: SizeOptions, sized: SizeResult | None
) -> Calibration | None:
    """What one process of this start measured; None if the log names no model or no part of its memory."""
    parts = _parts_of_one_worker(log)
    pool = _pool_memory(log)
    if pool is not None:
        parts.setdefault("kv_memory", pool)
    if model is None or not parts:
        return None
    weights, consumed, runtime = (_whole(parts, name) for name in ("weights", "consumed", "non_torch"))
    budget, memory = _whole(parts, "requested"), _whole(parts, "kv_memory")
    if runtime is None and consumed is not None and weights is not None:
        runtime = max(0, consumed - weights)
    total = log.least("gpu_total")
    overhead = None
    if budget is not None and weights is not None and memory is not None:
        overhead = max(0, budget - weights - memory)
    graphs = _whole(parts, "cuda_graphs")
    return Calibration(
        engine=log.engine,
        version=log.version,
        model=model,
        source=f"{log.name}:{next(iter(parts.values())).line}",
        gpu=options.gpu,
        gpu_memory_bytes=int(total.value)
        if total
        else (sized.gpu.memory_bytes if sized and sized.gpu else None),
        weights_bytes=weights,
        activations_bytes=_whole(parts, "activations"),
        cuda_graphs_bytes=_whole(parts, "cuda_graphs_estimate") if graphs is None else graphs,
        runtime_bytes=runtime,
        overhead_bytes=overhead,
        kv_memory_bytes=memory,
        **{name: getattr(options, name) for name in _KEPT_SETTINGS},
    )


#: Settings that a calibration holds for.
_KEPT_SETTINGS = (
    "gpu_memory_utilization",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "enforce_eager",
)


def _whole(parts: dict[str, Figure], name: str) -> int | None:
    """The bytes of a part; None if it was not printed, or as less than nothing."""
    figure = parts.get(name)
    return None if figure is None or figure.value < 0 else int(figure.value)
