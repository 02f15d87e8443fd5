"""What a user can set for `size` and `simulate`, under vLLM's own names, and how it becomes settings.

A field of None was not given. The same names serve flags (with dashes), keys of a check and arguments
of the Python functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from math import inf
from pathlib import Path
from types import NoneType, UnionType
from typing import Generic, NamedTuple, Self, TypeVar, cast, get_args, get_origin, get_type_hints

from kvplan.core.request import MAX_SAMPLES
from kvplan.core.vllm_rules import vllm_rules
from kvplan.errors import InputError, unknown_name
from kvplan.units import parse_count, parse_size

#: Engines that reserve contiguous memory.
CONTIGUOUS_ENGINES = ("static", "orca-max", "orca-pow2", "orca-oracle")
#: Engines whose pools can be sized.
ENGINES = ("vllm", "paged", "sglang", "tensorrt-llm", "llama.cpp", *CONTIGUOUS_ENGINES)


@dataclass(slots=True, kw_only=True)
class ServingOptions:
    """How a model is served: what `size` and `simulate` share. Sizes are texts such as ``80GiB`` or bytes."""

    engine: str | None = None
    gpu: str | None = None
    gpu_memory: str | int | None = None
    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    data_parallel_size: int | None = None
    decode_context_parallel_size: int | None = None
    enable_expert_parallel: bool | None = None
    dtype: str | None = None
    quantization: str | None = None
    kv_cache_dtype: str | None = None
    mamba_cache_dtype: str | None = None
    mamba_ssm_cache_dtype: str | None = None
    enable_prefix_caching: bool | None = None
    disable_hybrid_kv_cache_manager: bool | None = None
    async_scheduling: bool | None = None
    num_speculative_tokens: int | None = None
    speculative_method: str | None = None
    speculative_model: str | None = None
    enable_lora: bool | None = None
    max_loras: int | None = None
    max_lora_rank: int | None = None
    block_size: int | None = None
    gpu_memory_utilization: float | None = None
    kv_cache_memory_bytes: str | int | None = None
    num_gpu_blocks_override: int | None = None
    max_model_len: int | str | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    enforce_eager: bool | None = None
    margin: str | None = None
    calibration: str | None = None
    set: tuple[str, ...] = ()
    models: str | None = None

    @property
    def has_degrees(self) -> bool:
        """Whether any degree of parallelism is given."""
        degrees = (self.tensor_parallel_size, self.pipeline_parallel_size, self.data_parallel_size)
        return any(degree is not None for degree in degrees)

    @property
    def catalogue(self) -> Path | None:
        """The file that ``models`` names; None: the shipped one."""
        return Path(self.models) if self.models else None

    @classmethod
    def of(cls, values: Mapping[str, object]) -> Self:
        """Options of these names and values; raises `InputError` for an unknown name or a wrong kind."""
        options = cls()
        for name, value in values.items():
            options.set_option(name, value)
        return options

    def but(self, changes: Mapping[str, object]) -> Self:
        """A copy with some fields replaced; the caller vouches for their names and kinds."""
        copy = replace(self)
        for name, value in changes.items():
            setattr(copy, name, value)
        return copy

    @classmethod
    def kinds(cls, name: str) -> frozenset[type]:
        """The types that a field takes, None apart."""
        hint = get_type_hints(cls)[name]
        members = get_args(hint) if get_origin(hint) is UnionType else (hint,)
        return frozenset(get_origin(member) or member for member in members) - {NoneType}

    def set_option(self, name: str, value: object) -> None:
        """Set one field, None being "not given"; raises `InputError` as `of` does."""
        known = [item.name for item in fields(self)]
        if name not in known:
            raise unknown_name("option", name, known)
        if value is None:
            return
        kinds = self.kinds(name)
        if isinstance(value, list) and tuple in kinds and all(isinstance(item, str) for item in value):
            value = tuple(value)
        if float in kinds and type(value) is int:
            value = float(value)
        if type(value) not in kinds:
            wanted = " or ".join(sorted(_KIND_NAMES[kind] for kind in kinds))
            raise InputError(f'{name} is "{value}", not {wanted}', where=flag(name), hint=f"write {wanted}")
        setattr(self, name, value)


@dataclass(slots=True, kw_only=True)
class SizeOptions(ServingOptions):
    """Options of `size`. ``seq`` is the length of one sequence in tokens, ``lengths`` a text "mean,p95" of tokens.

    ``trace`` is a file or a workload's name, ``shared_prefix`` the tokens that all sequences begin with.
    """

    seq: int | None = None
    concurrency: int | None = None
    lengths: str | None = None
    trace: str | None = None
    shared_prefix: int | None = None
    suggest: bool = False


@dataclass(slots=True, kw_only=True)
class SimulateOptions(ServingOptions):
    """Options of `simulate`.

    Times are seconds, ``request_rate`` requests a second, ``quantum`` tokens, ``n`` the samples of each request, and
    ``concurrency`` the clients that each wait for their answer.
    """

    model: str | None = None
    enable_chunked_prefill: bool | None = None
    long_prefill_token_threshold: int | None = None
    scheduling_policy: str | None = None
    preemption_mode: str | None = None
    victim: str | None = None
    swap_space: str | int | None = None
    num_cpu_blocks_override: int | None = None
    quantum: int | None = None
    n: int | None = None
    step_time: float | None = None
    format: str = "auto"
    limit: int | None = None
    rate_scale: float | None = None
    request_rate: float | None = None
    burstiness: float | None = None
    concurrency: int | None = None
    seed: int | None = None
    acceptance_rate: float | None = None
    warmup: float | None = None
    slo_ttft: float | None = None
    slo_tpot: float | None = None
    slo_e2e: float | None = None
    skip_bad_lines: bool = False


@dataclass(slots=True, kw_only=True)
class CalibrateOptions(ServingOptions):
    """Options of `calibrate`: what the steps were measured on. ``calibration`` is one whose memory terms are kept."""

    model: str | None = None


@dataclass(slots=True, kw_only=True)
class ExplainOptions(ServingOptions):
    """Options of `explain`; a topic takes those that its example depends on. Lists are texts such as ``50,200``.

    ``seq`` tokens are a sequence, of which ``used_tokens`` may be filled. ``requests`` requests have ``input_tokens``
    in and ``output_tokens`` out, ``shared_prefix`` tokens in common and ``own_tokens`` besides. ``outputs`` are the
    lengths of one batch's answers, of which ``rounds`` come.
    """

    model: str | None = None
    seq: int | None = None
    used_tokens: str | None = None
    block_sizes: str | None = None
    requests: int | None = None
    shared_prefix: int | None = None
    own_tokens: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    outputs: str | None = None
    rounds: int | None = None


_KIND_NAMES = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "true or false",
    tuple: "a list of texts",
}


class Setting(NamedTuple):
    """A resolved value, where it came from, and whether somebody gave it or it was assumed."""

    value: object
    source: str
    given: bool


Settings = dict[str, Setting]
Value = TypeVar("Value")
Options = TypeVar("Options", bound=ServingOptions)


def settings_dict(settings: Settings) -> dict[str, object]:
    """The ``config`` block of the JSON contract."""
    return {name: {"value": json_value(s.value), "source": s.source} for name, s in sorted(settings.items())}


def json_value(value: object) -> object:
    """The value of an option in a document: infinity, for which JSON has no number, is text as in a flag."""
    return "inf" if value == inf else value


_POSITIVE = (
    "seq",
    "concurrency",
    "shared_prefix",
    "requests",
    "own_tokens",
    "input_tokens",
    "output_tokens",
    "rounds",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "decode_context_parallel_size",
    "num_speculative_tokens",
    "max_loras",
    "max_lora_rank",
    "block_size",
    "num_gpu_blocks_override",
    "quantum",
    "n",
    "max_num_seqs",
    "max_num_batched_tokens",
    "limit",
)
#: The plain engine keeps several numbers for each block.
_MAX_BLOCKS = 10**8
_POSITIVE_TIMES = ("step_time", "rate_scale", "request_rate", "slo_ttft", "slo_tpot", "slo_e2e")
#: More than any model has layers; each stage is a batch in flight.
_MAX_STAGES = 1024
#: Wider than any pool or context there is; what lies above is a mistake.
_MAX_COUNT = 10**10


_MOST = {"num_gpu_blocks_override": _MAX_BLOCKS, "n": MAX_SAMPLES, "pipeline_parallel_size": _MAX_STAGES}
#: Numbers with ranges of their own, which infinity and NaN are outside of too.
_RANGES: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    (
        "burstiness",
        lambda shape: 1e-3 <= shape <= 1e6 or shape == inf,  # what lies between is drawn without an end
        "write a number such as 1 (Poisson), 0.5 (bursts) or inf (even)",
    ),
    ("acceptance_rate", lambda share: 0 <= share <= 1, "write a share from 0 to 1"),
    ("seed", lambda seed: 0 <= seed < 2**64, "write a whole number from 0 on"),
    ("warmup", lambda seconds: 0 <= seconds <= 1e9, "write seconds from 0 on"),
    ("long_prefill_token_threshold", lambda tokens: 0 <= tokens <= _MAX_COUNT, "write a number from 0 on"),
    ("gpu_memory_utilization", lambda share: 0 < share <= 1, "write a share above 0 and up to 1"),
    (
        "num_cpu_blocks_override",
        lambda blocks: 0 <= blocks <= _MAX_BLOCKS,
        f"write a number from 0 to {_MAX_BLOCKS:,}",
    ),
)


def flag(name: str) -> str:
    """The flag of an option: ``block_size`` is ``--block-size``."""
    return "--" + name.replace("_", "-")


def check_options(options: ServingOptions) -> None:
    """Refuse values that are no sensible number; raises `InputError` naming the flag."""
    for item in fields(options):
        value = getattr(options, item.name)
        if value is None:
            continue
        if item.name in _POSITIVE or (item.name == "max_model_len" and value != "auto"):
            if isinstance(value, bool) or not isinstance(value, int):
                raise InputError(
                    f'"{value}" is not a whole number',
                    where=flag(item.name),
                    hint="write a number such as 4096",
                )
            most = _MOST.get(item.name, _MAX_COUNT)
            if not 0 < value <= most:
                raise InputError(
                    f"{value} is out of range",
                    where=flag(item.name),
                    hint=f"write a number from 1 to {most:,}",
                )
        elif item.name in _POSITIVE_TIMES and not 1e-9 <= value <= 1e9:
            raise InputError(
                f"{value} is out of range", where=flag(item.name), hint="write a number from 1e-9 to 1e9"
            )
    for name, is_sensible, hint in _RANGES:
        value = getattr(options, name, None)
        if value is not None and not is_sensible(value):
            raise InputError(f"{value} is out of range", where=flag(name), hint=hint)
    engine = parse_engine(options.engine)
    of_paged = engine.name == "paged"
    for name, what, known in (
        ("margin", "margin", ("low", "mid", "high")),
        (
            "scheduling_policy",
            f"scheduling policy of engine {engine.name}",
            ("fcfs", "priority", "round-robin") if of_paged else ("fcfs", "priority"),
        ),
        (
            "preemption_mode",
            f"preemption mode of engine {engine.name}",
            ("recompute", "swap") if of_paged else ("recompute",),
        ),
        ("victim", "rule for victims", ("most-generated", "last-come")),
    ):
        value = getattr(options, name, None)
        if value is not None and value not in known:
            choices = " or ".join(filter(None, [", ".join(known[:-1]), known[-1]]))
            raise InputError(f'"{value}" is no {what}', where=flag(name), hint=f"choose {choices}")


class Engine(NamedTuple):
    """An engine and the version of its rules; ``version`` is empty where an engine has only one set of rules."""

    name: str
    version: str

    @property
    def label(self) -> str:
        """As ``--engine`` takes it."""
        return f"{self.name}@{self.version}" if self.version else self.name


def parse_engine(text: str | None) -> Engine:
    """The engine that ``--engine`` names; None: vLLM by the newest rules. Raises `InputError` for any other."""
    name, _, version = (text or "vllm").strip().partition("@")
    if name not in ENGINES:
        raise unknown_name("engine", name, ENGINES, where="--engine")
    if name == "vllm":
        return Engine(name, vllm_rules(version).version)
    if version:
        raise InputError(
            f"engine {name} has one set of rules, no version {version}",
            where="--engine",
            hint=f"write {name}",
        )
    return Engine(name, "")


def read_option(kind: type[ServingOptions], name: str, text: str) -> object:
    """The value of an option that is written as a text; raises `InputError` for a text that is none.

    Numbers may be written as vLLM reads them (``32k``), switches as ``true`` or ``false``.
    """
    kinds, where = kind.kinds(name), flag(name)
    if int in kinds and name not in ("gpu_memory", "kv_cache_memory_bytes", "swap_space") and text != "auto":
        return parse_count(text, where=where)
    if float in kinds:
        try:
            return float(text)
        except ValueError as error:
            raise InputError(
                f'"{text}" is not a number', where=where, hint="write a number such as 0.9"
            ) from error
    if bool in kinds:
        if text not in ("true", "false"):
            raise InputError(f'"{text}" is neither true nor false', where=where, hint="write true or false")
        return text == "true"
    return (text,) if tuple in kinds else text


def size_in_bytes(value: str | int | None, name: str) -> int | None:
    """Bytes of a size option."""
    if value is None or (isinstance(value, int) and value > 0):
        return value
    return parse_size(str(value), where=flag(name))


#: Origins of options that nobody asked of a run, but that a check file says for all of its checks, or every check has.
DEFAULTS_OF_FILE, DEFAULT_OF_CHECK = "check file, defaults", "default of a check"
#: Of flags that were given for several runs at once.
FOR_ALL_CASES = "given for all cases"


def is_of_this_run(name: str, origins: Mapping[str, str]) -> bool:
    """Whether an option was given for one run alone, so that it must have an effect in it."""
    return origins.get(name) not in (DEFAULTS_OF_FILE, DEFAULT_OF_CHECK, FOR_ALL_CASES)


class Resolver(Generic[Options]):
    """Picks given values over defaults and remembers where each came from.

    ``origins`` names the origin of options that were given by something else than a flag, such as a check file.
    """

    def __init__(
        self, options: Options, origins: Mapping[str, str] | None = None, *, seq_sets_length: bool = True
    ) -> None:
        self.options = options
        self.seq_sets_length = seq_sets_length
        self.settings: Settings = {}
        self._origins = origins or {}

    def choose(self, name: str, default: Value, source: str) -> Value:
        """The given value of an option, else ``default``, which comes from ``source``."""
        value = getattr(self.options, name)
        if value is None:
            self.settings[name] = Setting(default, source, given=False)
            return default
        self.settings[name] = Setting(value, self.source_of(name), given=True)
        return cast("Value", value)  # set_option keeps each field to its own type

    def is_asked(self, name: str) -> bool:
        """Whether an option was given for this very run, so that it must have an effect."""
        return bool(getattr(self.options, name)) and is_of_this_run(name, self._origins)

    def source_of(self, name: str) -> str:
        """Where the value of a given option came from."""
        origin = self._origins.get(name, FOR_ALL_CASES)
        return flag(name) if origin == FOR_ALL_CASES else origin

    def note(self, name: str, value: object, source: str, *, given: bool = False) -> None:
        """Record a setting that is not chosen but follows from others."""
        self.settings[name] = Setting(value, source, given)

    def spell_out(self, name: str, value: object, why: str) -> None:
        """Record what a chosen word such as ``auto`` stands for."""
        chosen = self.settings[name]
        self.settings[name] = Setting(value, f"{why} ({chosen.source})", chosen.given)

    def note_rest(self) -> None:
        """Record what was given but is no setting of the engine, such as ``limit`` or ``set``."""
        for item in fields(self.options):
            value = getattr(self.options, item.name)
            if item.name not in self.settings and value != item.default:
                shown = list(value) if isinstance(value, tuple) else value
                self.note(item.name, shown, self.source_of(item.name), given=True)

    def note_engine(self) -> Engine:
        """Whose rules are followed: the ones asked for, or the newest of vLLM that are held."""
        engine = parse_engine(self.options.engine)
        self.choose("engine", engine.label, "default: the newest rules held")
        self.settings["engine"] = self.settings["engine"]._replace(value=engine.label)
        return engine
