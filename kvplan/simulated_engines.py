"""The engines that can be simulated: which there are, their settings from options, and one that is ready to run.

An engine beside vLLM is imported when it is chosen.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, TypeAlias, cast

from kvplan.cache_groups import ONE_FULL_GROUP, CacheGroups
from kvplan.core.drafts import METHODS, Drafting
from kvplan.core.engine import Policy, SchedulerConfig
from kvplan.core.engines.vllm import Vllm
from kvplan.core.engines.vllm_plain import VllmPlain
from kvplan.core.request import Request
from kvplan.core.simulate import Engine as TurningEngine
from kvplan.core.vllm_rules import vllm_rules
from kvplan.errors import InputError
from kvplan.options import (
    CONTIGUOUS_ENGINES,
    Engine,
    Resolver,
    SimulateOptions,
    flag,
    parse_engine,
    size_in_bytes,
)

if TYPE_CHECKING:
    from kvplan.core.engines.contiguous import ContiguousConfig
    from kvplan.core.engines.paged import PagedConfig, PagedPolicy, PreemptionMode, Victim

#: Methods that draft from the model's hidden states, and look one token past a block
#: (vLLM 0.33, config/speculative.py ``use_eagle``).
_HIDDEN_STATE_METHODS = ("eagle", "eagle3", "mtp", "dflash", "dspark")

#: What the CPU pool of engine paged may take on each GPU: the default of vLLM 0.1 (``--swap-space 4``).
DEFAULT_SWAP_SPACE = 4 * 2**30

EnginePath = Literal["fast", "plain"]
#: Settings of an engine that can be simulated.
EngineConfig: TypeAlias = "SchedulerConfig | PagedConfig | ContiguousConfig"


class Simulated(NamedTuple):
    """An engine that can be simulated.

    ``version`` says whose rules it follows, ``verified`` how these are known: from recorded runs (golden), rule by
    rule from a text (read), or from a description (approximated). ``lacks`` names options that it does not have, each
    with the value that says what it does anyway (None: no value does). ``has_samples``: it takes requests with several
    samples as they are; ``has_aborts``: their clients may go away.
    """

    version: str
    verified: Literal["golden", "read", "approximated"]
    lacks: Mapping[str, object]
    has_samples: bool = False
    has_aborts: bool = False


_OF_PAGED = dict.fromkeys(("swap_space", "num_cpu_blocks_override", "quantum", "victim"))
#: What only vLLM has; a model's own layers that draft count as memory anyway.
_OF_VLLM: dict[str, object] = {
    "async_scheduling": False,
    "pipeline_parallel_size": 1,
    "num_speculative_tokens": None,
    "acceptance_rate": None,
}
_UNSPLIT: dict[str, object] = {"enable_chunked_prefill": False, "long_prefill_token_threshold": 0}
_CONTIGUOUS: dict[str, object] = {
    **_OF_PAGED,
    **_OF_VLLM,
    **_UNSPLIT,
    "preemption_mode": None,
    "enable_prefix_caching": False,
    "scheduling_policy": "fcfs",
}

SIMULATED = {
    "vllm": Simulated("0.33.0", "golden", _OF_PAGED, has_aborts=True),
    "paged": Simulated("Kwon et al. 2023", "read", {**_UNSPLIT, **_OF_VLLM}, has_samples=True),
    **dict.fromkeys(CONTIGUOUS_ENGINES, Simulated("Kwon et al. 2023", "approximated", _CONTIGUOUS)),
}


def check_engine_options(options: SimulateOptions) -> None:
    """Refuse an engine that cannot be simulated, and options that it does not have. Raises `InputError`."""
    engine = parse_engine(options.engine)
    if engine.name not in SIMULATED:
        *names, last = SIMULATED
        raise InputError(
            f"not yet supported: simulation of engine {engine.name}",
            where="--engine",
            hint=f"use {', '.join(names)} or {last}",
        )
    for name, does in SIMULATED[engine.name].lacks.items():
        if getattr(options, name) not in (None, does):
            others = [other for other in SIMULATED if name not in SIMULATED[other].lacks]
            raise InputError(
                f"{flag(name)} is no setting of engine {engine.name}",
                where=flag(name),
                hint=f"leave it out, or use engine {' or '.join(others)}",
            )


@dataclass(frozen=True, slots=True)
class Pool:
    """Blocks, and the limits of the engine over them. ``bytes_per_block`` is unknown without a machine."""

    num_gpu_blocks: int
    block_size: int
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    bytes_per_block: int | None = None
    groups: CacheGroups = ONE_FULL_GROUP


def longest_sequence(engine: Engine, num_gpu_blocks: int, block_size: int) -> tuple[int, str]:
    """Tokens of the longest sequence that a pool can hold, and which part of it that is."""
    if engine.name in CONTIGUOUS_ENGINES:
        from kvplan.core.engines.contiguous import largest_place, reservation_of

        slots = num_gpu_blocks * block_size
        return largest_place(reservation_of(engine.name), slots), "the largest piece of the pool"
    null_blocks = 1 if engine.name == "vllm" else 0
    return max(1, (num_gpu_blocks - null_blocks) * block_size), "the whole pool"


def engine_config(
    engine: Engine,
    resolver: Resolver[SimulateOptions],
    pool: Pool,
    scenario: SchedulerConfig | None,
    warnings: list[str],
) -> EngineConfig:
    """The settings of an engine: as given, else those of a scenario, else its defaults.

    Notes in ``resolver`` where each came from, and adds to ``warnings``. Raises `InputError` for settings that exclude
    each other.
    """
    for name, does in SIMULATED[engine.name].lacks.items():
        if does is not None:
            resolver.note(name, does, f"as engine {engine.name} does")
    if engine.name == "paged":
        return _paged_config(resolver, pool)
    if engine.name in CONTIGUOUS_ENGINES:
        return _contiguous_config(engine, resolver, pool, warnings)
    config = _scheduler_config(resolver, pool, scenario)
    config.check_together()
    return config


class RunningEngine(TurningEngine, Protocol):
    """An engine that can tell what it was at when it was interrupted."""

    def live(self) -> Iterator[tuple[str, int, int]]:
        """Of every live request: id, tokens so far, prompt included, and the most of them that ever had KV."""


def has_fast_path(config: EngineConfig) -> bool:
    """Whether these settings can be run without visiting everything in each step.

    Of vLLM's: groups with full attention and sliding windows on one stage, synchronous or asynchronous, without drafts.
    """
    if not isinstance(config, SchedulerConfig):
        return True
    kinds = {group.kind for group in config.groups}
    return kinds <= {"full", "sliding"} and config.pipeline_parallel_size == 1 and config.speculative is None


def make_engine(config: EngineConfig, path: EnginePath) -> RunningEngine:
    """The engine of these settings; the plain path visits everything in each step."""
    watched = path == "plain"
    if isinstance(config, SchedulerConfig):
        return VllmPlain(config) if watched else Vllm(config)
    from kvplan.core.engines.paged import Paged, PagedConfig

    if isinstance(config, PagedConfig):
        return Paged(config, watched=watched)
    from kvplan.core.engines.contiguous import Contiguous

    return Contiguous(config, watched=watched)


_SAMPLE_ID = re.compile(r"#[0-9]+\Z")


def without_aborts(requests: Iterable[Request], engine: str) -> Iterator[Request]:
    """For engines whose requests end by themselves. Raises `InputError` for one whose client goes away."""
    for request in requests:
        if request.abort is not None:
            raise InputError(
                f"not yet supported: engine {engine} with requests that are aborted",
                where=f'id "{request.id[:60]}"',
                hint="leave abort_s out, or use engine vllm",
            )
        yield request


def one_request_a_sample(requests: Iterable[Request]) -> Iterator[Request]:
    """For engines that know no parallel samples: each is a request, ``ID#0`` and so on, with the prompt in common.

    Raises `InputError` if such names could be taken.
    """
    looks_alike = has_samples = False
    for request in requests:
        if "#" in request.id and _SAMPLE_ID.search(request.id):
            looks_alike = True
        if request.samples > 1:
            has_samples = True
        if looks_alike and has_samples:
            raise InputError(
                "the trace has parallel samples, and an id that ends in # and a number",
                where=f'id "{request.id[:60]}"',
                hint="give the requests other ids, or use engine paged",
            )
        if request.samples == 1:
            yield request
            continue
        content = request.prompt_content()
        for number in range(request.samples):
            yield request._replace(id=f"{request.id}#{number}", content=content, samples=1)


def _scheduler_config(
    resolver: Resolver[SimulateOptions], pool: Pool, scenario: SchedulerConfig | None
) -> SchedulerConfig:
    """The engine's settings; those without a flag come from a scenario, else they are the defaults."""
    own_groups = scenario is None or pool.bytes_per_block is not None
    default = f"default of vllm {parse_engine(resolver.options.engine).version}"
    caching = resolver.choose("enable_prefix_caching", True, default)
    chunked = resolver.choose("enable_chunked_prefill", True, default)
    threshold = resolver.choose("long_prefill_token_threshold", 0, default)
    policy = resolver.choose("scheduling_policy", "fcfs", default)
    stages = resolver.choose("pipeline_parallel_size", 1, default)
    drafting = _drafting(resolver, scenario)
    config = SchedulerConfig(
        num_gpu_blocks=pool.num_gpu_blocks,
        block_size=pool.block_size,
        max_num_batched_tokens=pool.max_num_batched_tokens,
        max_num_seqs=pool.max_num_seqs,
        max_model_len=pool.max_model_len,
        enable_prefix_caching=caching,
        enable_chunked_prefill=chunked,
        long_prefill_token_threshold=threshold,
        policy=cast("Policy", policy),
        groups=pool.groups.specs if scenario is None or own_groups else scenario.groups,
        slots_a_block=pool.groups.slots_a_block if own_groups else None,
        async_scheduling=resolver.choose(
            "async_scheduling", _is_async_by_default(resolver, stages, drafting), default
        ),
        pipeline_parallel_size=stages,
        speculative=drafting,
    )
    without_flag = (
        "watermark",
        "scheduler_reserve_full_isl",
        "max_num_active_seqs",
        "long_prefill_token_threshold_adaptive",
    )
    if scenario is not None:
        config = replace(config, **{name: getattr(scenario, name) for name in without_flag})
    for name in without_flag:
        resolver.note(name, getattr(config, name), "trace" if scenario else default)
    return config


def _is_async_by_default(resolver: Resolver[SimulateOptions], stages: int, drafting: Drafting | None) -> bool:
    """Whether this version of vLLM plans ahead unless told not to; stages need the second model runner for it.

    That runner is every model's from 0.28 on as far as is known (vllm/config/vllm.py of 0.19 and 0.33).
    """
    rules = vllm_rules(parse_engine(resolver.options.engine).version)
    method = None if drafting is None else drafting.method
    return rules.async_scheduling(method) and (stages == 1 or rules.number >= (0, 28))


def _drafting(resolver: Resolver[SimulateOptions], scenario: SchedulerConfig | None) -> Drafting | None:
    """Speculative decoding: as given, else as in a scenario."""
    options = resolver.options
    tokens = options.num_speculative_tokens
    if tokens is None:
        for name in ("speculative_method", "acceptance_rate"):
            if getattr(options, name) is not None:
                raise InputError(
                    f"{flag(name)} has no effect without drafts",
                    where=flag(name),
                    hint="add --num-speculative-tokens",
                )
        return scenario.speculative if scenario is not None else None
    chosen = resolver.settings.get("speculative_method")
    name = options.speculative_method or (str(chosen.value) if chosen and chosen.value else "")
    method = "draft_model" if not name and options.speculative_model else name
    drafts = "eagle" if method in _HIDDEN_STATE_METHODS or method.endswith("_mtp") else method
    if drafts not in METHODS:
        raise InputError(
            f"not yet supported: simulation of drafts by {method or 'no named method'}",
            where="--speculative-method",
            hint=f"use {', '.join(METHODS)} or mtp",
        )
    if options.acceptance_rate is None:
        raise InputError(
            "how many drafts are right is not known",
            where="--num-speculative-tokens",
            hint="give --acceptance-rate, such as 0.7",
        )
    resolver.choose("num_speculative_tokens", tokens, "")
    resolver.note("speculative_method", method, resolver.source_of("speculative_method"), given=True)
    rate = resolver.choose("acceptance_rate", options.acceptance_rate, "")
    return Drafting(drafts, tokens, rate, resolver.choose("seed", 0, "default"))


def _paged_config(resolver: Resolver[SimulateOptions], pool: Pool) -> PagedConfig:
    """The settings of the paper's engine."""
    from kvplan.core.engines.paged import DEFAULT_QUANTUM, PagedConfig

    options, default = resolver.options, "default of engine paged"
    mode = resolver.choose("preemption_mode", "swap", default)
    policy = resolver.choose("scheduling_policy", "fcfs", default)
    if policy != "round-robin" and options.quantum is not None:
        raise InputError(
            f"--quantum has no effect with --scheduling-policy {policy}",
            where="--quantum",
            hint="leave it out, or choose --scheduling-policy round-robin",
        )
    return PagedConfig(
        num_gpu_blocks=pool.num_gpu_blocks,
        block_size=pool.block_size,
        max_num_batched_tokens=pool.max_num_batched_tokens,
        max_num_seqs=pool.max_num_seqs,
        max_model_len=pool.max_model_len,
        enable_prefix_caching=resolver.choose("enable_prefix_caching", True, default),
        policy=cast("PagedPolicy", policy),
        preemption_mode=cast("PreemptionMode", mode),
        num_cpu_blocks=_cpu_blocks(resolver, pool, mode, default),
        victim=cast("Victim", resolver.choose("victim", "most-generated", default)),
        quantum=resolver.choose("quantum", DEFAULT_QUANTUM, default)
        if policy == "round-robin"
        else DEFAULT_QUANTUM,
    )


def _cpu_blocks(resolver: Resolver[SimulateOptions], pool: Pool, mode: str, default: str) -> int:
    """Blocks of the CPU pool: as given, or what the swap space holds; without a machine as many as on the GPU."""
    options = resolver.options
    if mode == "recompute":
        for name in ("swap_space", "num_cpu_blocks_override"):
            if getattr(options, name) is not None:
                raise InputError(
                    f"{flag(name)} has no effect with --preemption-mode recompute",
                    where=flag(name),
                    hint="leave it out, or choose --preemption-mode swap",
                )
        return 0
    count = options.num_cpu_blocks_override
    if count is not None:
        if options.swap_space is not None:
            raise InputError(
                "--swap-space and --num-cpu-blocks-override both say how large the CPU pool is",
                where="--swap-space",
                hint="give one of them",
            )
        resolver.note("num_cpu_blocks", count, "--num-cpu-blocks-override", given=True)
        return count
    if pool.bytes_per_block is None:
        resolver.note(
            "num_cpu_blocks", pool.num_gpu_blocks, "default without a machine: as many as on the GPU"
        )
        return pool.num_gpu_blocks
    space = size_in_bytes(resolver.choose("swap_space", DEFAULT_SWAP_SPACE, default), "swap_space")
    assert space is not None, "there is a default"
    count = space // pool.bytes_per_block
    resolver.note("num_cpu_blocks", count, "swap_space over the bytes of a block")
    return count


def _contiguous_config(
    engine: Engine, resolver: Resolver[SimulateOptions], pool: Pool, warnings: list[str]
) -> ContiguousConfig:
    """Settings of an engine with contiguous reservations; its blocks are slots."""
    from kvplan.core.engines.contiguous import ContiguousConfig, reservation_of

    if engine.name in ("static", "orca-max") and not resolver.settings["max_model_len"].given:
        warnings.append(
            f"{engine.name} reserves max_model_len {pool.max_model_len:,} tokens for each sequence, which nobody gave: "
            "--max-model-len"
        )
    return ContiguousConfig(
        reservation=reservation_of(engine.name),
        num_gpu_blocks=pool.num_gpu_blocks * pool.block_size,
        max_num_batched_tokens=pool.max_num_batched_tokens,
        max_num_seqs=pool.max_num_seqs,
        max_model_len=pool.max_model_len,
    )
