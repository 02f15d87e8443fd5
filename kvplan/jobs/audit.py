"""The job of `kvplan audit`: an engine's own figures beside ours, term by term, with the likely cause of a difference.

What the engine derives from the memory that it gave its KV cache (blocks, tokens, concurrency) is compared at that
printed memory, so that no estimate is in it; the budget that led there is compared with our estimate. A cause is named
only where its figures agree: each is tried and computed.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from typing import TypeVar

from kvplan.calibration import Calibration
from kvplan.catalogue import entry_names, read_catalogue
from kvplan.config import load_model
from kvplan.core.kept_layers import row_bytes
from kvplan.core.kv_cache import STATES, SlidingWindow
from kvplan.core.vllm_rules import NEWEST, nearest_rules
from kvplan.data import resource
from kvplan.errors import InputError
from kvplan.jobs.size import SizeResult, size_with
from kvplan.likely_causes import (
    DERIVED,
    Case,
    Derived,
    largest_part,
    nearest,
    needed_bytes,
    needed_cause,
    pool_cause,
    weights_agree,
    weights_cause,
)
from kvplan.log_budget import GRAPHS, calibration_of, own_sum, pool_memory
from kvplan.log_lines import Unit
from kvplan.options import (
    CalibrateOptions,
    Options,
    ServingOptions,
    SimulateOptions,
    SizeOptions,
    check_options,
    flag,
    size_in_bytes,
)
from kvplan.serving import find_gpu
from kvplan.startup_log import Figure, StartupLog, read_log_file

#: Options that name a model.
NamingOptions = TypeVar("NamingOptions", CalibrateOptions, SimulateOptions)


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
    case = sized = None
    lines: list[AuditLine] = []
    if name is not None:
        spec = load_model(name, catalogue=options.catalogue, overrides=options.set)
        longest, served_length = spec.max_position_embeddings, given.max_model_len
        if longest is not None and isinstance(served_length, int) and served_length > longest:
            notes.append(
                f"max_model_len {served_length:,} of the log is beyond the model's {longest:,} tokens"
            )
            given.set = (*given.set, f"max_position_embeddings={served_length}")
        if given.quantization == "compressed-tensors" and "fp8" in (log.model or "").lower():
            given.quantization = _NAMED_FP8
        case = _case(log, name, given, notes)
        if case is not None:
            sized = size_with(name, case.options)
            lines = list(_compare(case))
    places, terms = {line.line for line in lines}, {line.term for line in lines}
    alone = (_theirs_alone(figure) for figure in _headline_figures(log) if figure.line not in places)
    lines += [line for line in alone if line.term not in terms]
    calibration = calibration_of(log, case.served if case else None, _gpu_memory(given, case))
    if calibration is not None and calibration.model == log.model and name is not None:
        calibration = calibration._replace(model=name)
    return AuditResult(log, sized, tuple(lines), calibration, tuple(notes))


def _gpu_memory(options: SizeOptions, case: Case | None) -> int | None:
    if case is not None and case.served.budget is not None:
        return case.served.budget.memory_bytes
    return size_in_bytes(options.gpu_memory, "gpu_memory")


def as_logged(log: StartupLog, options: NamingOptions, notes: list[str]) -> NamingOptions:
    """The options, filled up with what the log says of memory, engine and model; what is odd is added to ``notes``."""
    filled = _with_settings_of(log, options, notes)
    if filled.model is None:
        filled.model = _model_named_in(log, filled, notes)
    return filled


def _with_settings_of(log: StartupLog, options: Options, notes: list[str]) -> Options:
    """The options, filled up with what the log says of memory and engine; what is odd is added to ``notes``."""
    filled = replace(options)
    for name, found in log.settings.items():
        if getattr(filled, name) is None and name not in _NOT_OPTIONS:
            filled.set_option(name, found.value)
    total = log.least("gpu_total")
    if filled.gpu_memory is None and total is not None and total.value > 0:
        filled.gpu_memory = int(total.value)
    if filled.engine is None:
        filled.engine = _engine_of(log, notes)
    types = [str(log.own_settings[name].value) for name in ("type_k", "type_v") if name in log.own_settings]
    if log.engine == "llama.cpp" and filled.kv_cache_dtype is None and len(types) == 2:
        filled.kv_cache_dtype = "/".join(types)
    if log.engine == "vllm" and _is_first_engine(log) and filled.max_num_batched_tokens is None:
        filled.max_num_batched_tokens = _first_engines_batch(log)
    return filled


#: What a checkpoint of compressed tensors with fp8 in its name amounts to: a scale for each row of a matrix.
_NAMED_FP8 = "ptpc_fp8"
#: What a log says of settings that a pool is planned without: it is compared at the printed memory.
_NOT_OPTIONS = frozenset({"kv_cache_memory_bytes", "num_gpu_blocks_override"})


def _engine_of(log: StartupLog, notes: list[str]) -> str:
    """The rules to compare with: those of the log's engine and version, else the nearest that are held."""
    if log.engine != "vllm" or not log.version:
        return log.engine
    rules = nearest_rules(log.version)
    release = re.match(r"v?(\d{1,6})\.(\d{1,6})", log.version)
    if release is None or (int(release[1]), int(release[2])) != rules.number:
        newer = "newest" if rules.number == NEWEST else "oldest"
        notes.append(
            f"the rules of vLLM {log.version} are not known: ours follow those of {rules.version}, the {newer} held"
        )
    return f"vllm@{rules.version}"


def _is_first_engine(log: StartupLog) -> bool:
    """Whether vLLM's first engine runs, V0: the only one before 0.6.4, and named in the log after."""
    generation = log.own_settings.get("engine_generation")
    return generation is not None and generation.value == "V0"


def _first_engines_batch(log: StartupLog) -> int | None:
    """Tokens that V0 profiles: the longest prompt at once, unless it cuts prompts up (0.8.5 engine/arg_utils.py)."""
    length, chunked = log.settings.get("max_model_len"), log.own_settings.get("enable_chunked_prefill")
    if length is None or not isinstance(length.value, int):
        return None
    if chunked is not None and chunked.value is True:
        return 2048
    return max(2048, length.value)


def _case(log: StartupLog, name: str, options: SizeOptions, notes: list[str]) -> Case | None:
    """Our plan with the log's settings; None where we have none. Settings that we cannot follow are left out."""
    gpu, count = find_gpu(options.gpu)
    spec = load_model(name, catalogue=options.catalogue, overrides=options.set)
    while True:
        try:
            return Case(log, spec, options, gpu, count)
        except InputError as error:
            where = error.where or ""
            left_out = [
                one
                for one in log.settings
                if one not in _ESSENTIAL and getattr(options, one) is not None and flag(one) in where.split()
            ]
            if not left_out and (options.gpu is not None or options.gpu_memory is not None):
                notes.append(f"our budget is not known: {error}")
                options, gpu, count = options.but({"gpu": None, "gpu_memory": None}), None, None
                continue
            if not left_out:
                notes.append(f"ours is not known: {error}")
                return None
            notes.append(f"{left_out[0]} of the log is left out: {error.what}")
            options = options.but({left_out[0]: None})


#: Settings without which a comparison says nothing.
_ESSENTIAL = frozenset({"tensor_parallel_size", "pipeline_parallel_size", "dtype", "max_model_len"})


def _model_named_in(log: StartupLog, options: ServingOptions, notes: list[str]) -> str | None:
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
        for one in entry_names(read_catalogue(options.catalogue or resource("models.yaml")))
    }
    for text in names:
        cached = re.search(r"models--([^/\\]+?)--([^/\\]+)", text)  # a folder of the Hugging Face cache
        name = f"{cached[1]}/{cached[2]}" if cached else text.rstrip("/\\")
        base = re.split(r"[/\\]", name)[-1]
        for candidate in (name, *(known.get(one) for one in _spellings(base))):
            if candidate is None or candidate.lower().endswith(".gguf"):
                continue
            try:
                load_model(candidate, catalogue=options.catalogue, overrides=options.set)
            except InputError:
                continue  # the next spelling may be known
            return candidate
    what = f'the model "{names[0]}" of the log is not known' if names else "the log names no model"
    notes.append(f"{what}: give --model for figures of ours")
    return None


#: What stands at the end of the name of a copy of a model that has its shape: formats, kinds of tuning, dates.
_ENDINGS = re.compile(
    r"[-_.](?:gguf|i?q\d(?:[-_]\w{1,3}){0,3}|f16|bf16|fp16|hf|\d{4}|instruct|chat|it|base|pt"
    r"|(?:fp8|nvfp4|mxfp4|awq|gptq|autoround|auto[-_]round|bnb|int4|int8|4bit|8bit|marlin|dynamic|block|w\d+a\d+|quantized"
    r"|g\d+|mtp)(?:[-_.]\w+)?)\Z"
)


def _spellings(base: str) -> Iterator[str]:
    """A model's name as slug, and without one ending after the other."""
    slug = _slug(base)
    yield slug
    while (shorter := _ENDINGS.sub("", slug)) != slug:
        slug = shorter
        yield slug


def _slug(name: str) -> str:
    return re.sub(r"[\s_]+", "-", name[:_LONGEST_NAME].casefold()).removeprefix("meta-")


#: Characters of a model's name that matter.
_LONGEST_NAME = 200


def _compare(case: Case) -> Iterator[AuditLine]:
    if case.log.engine == "vllm":
        yield from _compare_vllm_pool(case)
        yield from _compare_budget(case)
    elif case.log.engine == "llama.cpp":
        yield from _compare_caches(case)
    else:
        yield from _compare_token_pool(case)
    weights = case.log.most("weights")
    if case.log.engine in ("sglang", "tensorrt-llm") and weights is not None:
        yield _weights_line(case, weights)


# What vLLM makes of the memory for its KV cache


def _compare_vllm_pool(case: Case) -> Iterator[AuditLine]:
    log = case.log
    yield from _compare_groups(case)
    needed = log.last("kv_needed")
    if needed is not None:
        ours = needed_bytes(case.served)
        yield _line("KV of one longest sequence", needed, ours, cause=needed_cause(case, needed, ours))
    memory = _memory_of_pool(log)
    for derived in DERIVED:
        figure = log.last(derived.name)
        if figure is None:
            continue
        plan = case.at(memory.value) if memory is not None and memory.value > 0 else None
        if memory is None or plan is None:
            yield _theirs_alone(figure)
            continue
        value = derived.ours(plan)
        agrees = case.reaches(memory, derived, figure)
        if not agrees:
            cause = pool_cause(case, memory, derived, figure, plan)
        else:
            cause = (
                None if figure.allows(value) else f"rounding: KV is printed to 0.01 GiB (line {memory.line})"
            )
        yield _derived_line(case, derived, figure, value, agrees=agrees, cause=cause)


def _memory_of_pool(log: StartupLog) -> Figure | None:
    """The memory for KV: as it was given, to the byte, else as the rank with the least printed it."""
    memory, given = log.least("kv_memory"), log.settings.get("kv_cache_memory_bytes")
    if given is None or not isinstance(given.value, int) or (memory and not memory.allows(given.value)):
        return memory
    return Figure("kv_memory", given.value, given.value, given.value, "bytes", given.line, None, "")


def _compare_groups(case: Case) -> Iterator[AuditLine]:
    """Blocks of a model with states, and what its pages and groups are padded with (v1/core/kv_cache_utils.py)."""
    log, kv = case.log, case.served.kv
    block = log.last("attention_block_size")
    if block is not None:
        yield _line("block size", block, kv.block_size, unit="tokens")
    padding = log.last("mamba_padding")
    plan = case.served.plan
    states = [item.cache for item in plan.layers if isinstance(item.cache, STATES)]
    page = max((group.page_bytes or 0 for group in kv.per_gpu.groups), default=0)
    if padding is not None and states and page:
        state = max(cache.page_bytes(1, plan.deployment.cache) for cache in states)
        yield _line("padding of states", padding, 100 * (page - state) / state, unit="percent")
    layers = log.last("padding_layers")
    if layers is not None:
        padded: dict[str, int] = {}
        for group in kv.per_gpu.groups:
            padded[group.kind] = padded.get(group.kind, 0) + group.padded_layers - group.layers
        ours = nearest(list(padded.values()), layers.value)
        yield _line("layers of padding", layers, ours, unit="count")


def _derived_line(
    case: Case, derived: Derived, figure: Figure, ours: int | float, *, agrees: bool, cause: str | None
) -> AuditLine:
    per_gpu = case.served.kv.per_gpu
    per_unit = {
        "blocks": Fraction(per_gpu.bytes_per_block),
        "tokens": Fraction(per_gpu.bytes_per_token),
        "times": Fraction(per_gpu.allocated_bytes_per_sequence),
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


# The budget that led to that memory


def _compare_budget(case: Case) -> Iterator[AuditLine]:
    log, served = case.log, case.served
    requested, memory = log.last("requested"), log.least("kv_memory")
    if requested is not None and served.budget is not None:
        share = served.deployment.gpu_memory_utilization
        total = log.least("gpu_total")
        inside = None
        if total is not None:
            inside = share * total.low <= requested.high and requested.low <= share * total.high + 1
        budget = math.ceil(served.budget.memory_bytes * share)
        yield _line("memory x utilization", requested, budget, agrees=inside)
    weights = log.most("weights")
    if weights is not None:
        yield _weights_line(case, weights)
    plan = served.capacity
    overhead = plan.overhead_bytes if plan is not None else None
    loaded = None if weights is None else nearest(case.loaded(), weights.value)
    graphs = overhead.cuda_graphs + overhead.uncounted_graphs if overhead else None
    for name, term, ours in (
        ("activations", "activations", overhead.activations if overhead else None),
        ("non_torch", "runtime", overhead.runtime if overhead else None),
        (
            "consumed",
            "weights and runtime",
            loaded + overhead.runtime if overhead and loaded is not None else None,
        ),
        ("cuda_graphs_estimate", "CUDA graphs (estimated)", graphs),
        ("cuda_graphs", "CUDA graphs (measured)", graphs),
    ):
        figure = log.most(name)
        if figure is not None:
            # One part of an estimate is neither right nor wrong: the range is that of the sum.
            yield replace(_line(term, figure, ours), agrees=None)
    is_given = "kv_cache_memory_bytes" in log.settings
    if memory is not None and overhead is not None and plan is not None and not is_given:
        available, chosen = plan.available_kv_bytes, overhead.total(served.deployment.margin)
        low, high = available + chosen - overhead.high, available + chosen - overhead.low
        inside = low <= memory.high and memory.low <= high
        cause = "an estimate: theirs is in our range" if inside else largest_part(case, memory)
        yield _line("memory for KV", memory, available, agrees=inside, cause=cause)
    identity = own_sum(log)
    if identity is not None:
        agrees = identity.graphs is not None
        cause = GRAPHS[identity.graphs] if identity.graphs is not None else None
        term = "memory for KV, from their parts"
        yield _line(term, identity.memory, identity.total, agrees=agrees, cause=cause)


def _weights_line(case: Case, weights: Figure) -> AuditLine:
    """Ours are those of the stage that comes nearest, with what is loaded beside them."""
    ours = nearest(case.loaded(), weights.value)
    if ours is None:
        return _line("weights", weights, None)
    agrees = weights_agree(weights, ours)
    return _line("weights", weights, ours, agrees=agrees, cause=weights_cause(case, weights, ours))


# SGLang and TensorRT-LLM: a pool of tokens


def _compare_token_pool(case: Case) -> Iterator[AuditLine]:
    log, plan = case.log, case.served.plan
    pool, stage = plan.pool, plan.stages[0]
    page = pool.bytes_per_block(stage)
    tokens, per_token = log.last("kv_cache_tokens"), log.last("kv_bytes_per_token")
    blocks, memory = log.last("num_gpu_blocks"), pool_memory(log)
    if per_token is not None:
        yield _line("KV per token", per_token, round(Fraction(page, pool.block_size)))
    planned, free = log.last("kv_planned"), log.last("free_before_kv")
    given = planned or free
    if blocks is not None and given is not None:
        sizes = [int(size) for size in (given.value, given.low, given.high)]
        if planned is None:
            sizes = [pool.kv_memory(size, 0) for size in sizes]
        ours, least, most_blocks = (pool.share(size, stage).num_blocks for size in sizes)
        yield _line("blocks", blocks, ours, unit="blocks", agrees=least <= blocks.value <= most_blocks)
    if blocks is not None and tokens is not None:
        counted, _ = pool.token_line(int(blocks.value), case.served.deployment.max_model_len)
        yield _line("KV cache tokens", tokens, counted, unit="tokens")
    if tokens is None or memory is None or _has_two_pools(case):
        return
    held = round(Fraction(int(tokens.value) * page, pool.block_size))
    cause = None
    if not memory.allows(held):
        if memory.allows(held + page):
            cause = "the pool has one page more than its tokens"
        elif memory.allows(held / 2) or memory.allows(held * 2):
            cause = "an element of the cache has another size: see kv_cache_dtype"
    agrees = memory.allows(held) or memory.allows(held + page)
    yield _line("KV memory of these tokens", memory, held, agrees=agrees, cause=cause)


def _has_two_pools(case: Case) -> bool:
    """Whether windows have a pool of their own, so that no one line tells the memory of all tokens."""
    states = {item.cache.kind for item in case.served.plan.layers if isinstance(item.cache, STATES)}
    return sum(not states.issuperset(group.kind.split("+")) for group in case.served.kv.groups) > 1


# llama.cpp: cells


def _compare_caches(case: Case) -> Iterator[AuditLine]:
    """Each cache: cells x streams x what its layers keep of a token (src/llama-kv-cache.cpp)."""
    log, plan = case.log, case.served.plan
    caches = [item for item in plan.layers if not isinstance(item.cache, STATES)]
    for worker, memory in log.by_worker("kv_memory").items():
        held = caches
        if worker in ("SWA", "non-SWA"):
            held = [item for item in caches if isinstance(item.cache, SlidingWindow) is (worker == "SWA")]
        cells = _count(log, "kv_cells", worker, "n_ctx")
        layers = _count(log, "kv_layers", worker, "n_layer")
        if cells is None or layers is None or not held:
            yield _theirs_alone(memory)
            continue
        streams = _count(log, "kv_streams", worker, "") or 1
        row = row_bytes(held, plan.deployment.cache, None)
        ours = round(Fraction(cells * streams * row * layers, len(held)))  # some layers may read another's
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


def _theirs_alone(figure: Figure) -> AuditLine:
    """A figure that we have nothing beside."""
    term = _TERMS.get(figure.name, figure.name.replace("_", " "))
    return _line(term, figure, None, unit=figure.unit)


#: Figures that are shown though we have none beside them, and what they are called.
_TERMS = {
    "kv_memory": "memory for KV",
    "kv_needed": "KV of one longest sequence",
    "num_gpu_blocks": "blocks",
    "kv_cache_tokens": "KV cache tokens",
    "max_concurrency": "concurrency",
    "estimated_max_len": "longest that fits",
    "attention_block_size": "block size",
    "mamba_padding": "padding of states",
    "padding_layers": "layers of padding",
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
