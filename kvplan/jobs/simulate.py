"""The job of `kvplan simulate`: a trace through the engine, and what it did to the KV cache."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from fractions import Fraction
from functools import partial
from typing import Any, NamedTuple

from kvplan.cache_groups import ONE_FULL_GROUP, cache_groups
from kvplan.config import load_model
from kvplan.core import metrics as figures
from kvplan.core.cost import constant, constant_decode
from kvplan.core.engine import SchedulerConfig
from kvplan.core.engine_sizing import engine_sizing
from kvplan.core.pool_map import FullestStep, Pictured, PoolMap, pool_map
from kvplan.core.preemptions import PreemptionCauses
from kvplan.core.request import PICOSECONDS, seconds
from kvplan.core.simulate import Price, StepRecord, run
from kvplan.core.step_constants import ChosenConstants
from kvplan.core.vllm_rules import vllm_rules
from kvplan.errors import DoesNotFit, InputError, KvplanError, unknown_name
from kvplan.options import (
    Engine,
    Resolver,
    Settings,
    SimulateOptions,
    check_options,
    flag,
    is_of_this_run,
    settings_dict,
)
from kvplan.request_rate import offered
from kvplan.serving import Served, check_settings, choose_batch_limits, find_gpu, serve
from kvplan.simulated_engines import (
    SIMULATED,
    EngineConfig,
    EnginePath,
    Pool,
    RunningEngine,
    check_engine_options,
    engine_config,
    has_fast_path,
    longest_sequence,
    make_engine,
    one_request_a_sample,
    without_aborts,
)
from kvplan.step_time import latency_model
from kvplan.trace import TraceStream, open_trace
from kvplan.units import counted

DEFAULT_MODEL = "llama-3.1-8b"
DEFAULT_GPU = "h100-80gb"
DEFAULT_BLOCK_SIZE = 16
#: What an engine whose costs do not depend on its pool takes for endless.
_ENDLESS = 10**8
#: So many objects more are made than freed between two looks for garbage in cycles.
_OBJECTS_A_COLLECTION = 70_000
#: Seconds of a step where neither model nor GPU is named.
DEFAULT_STEP_TIME = 0.02

Observer = Callable[[StepRecord], None]
Watch = Callable[["Simulation"], AbstractContextManager[Observer]]


class MapWish(NamedTuple):
    """A map of the pool in the first of its fullest steps, or in step ``at_step``; with a request's block table."""

    at_step: int | None = None
    request: str | None = None


@dataclass(frozen=True, slots=True)
class Profile:
    """What a run itself cost on this machine."""

    wall_s: float
    cpu_s: float
    requests_per_s: float | None
    peak_rss_bytes: int | None


@dataclass(frozen=True, slots=True)
class LatencyRange:
    """The least and the most of each latency figure among three runs.

    Of these one has every step as estimated, one ``low_slowdown`` times as long, one ``high_slowdown`` times.
    """

    low_slowdown: float
    high_slowdown: float
    low: figures.LatencyFigures
    high: figures.LatencyFigures

    def add_to(self, latency: dict[str, Any]) -> None:
        """Give each figure of a ``latency`` block its low and its high."""
        for name, figure in latency.items():
            if name.endswith("_s"):
                for end, value in (("low", getattr(self.low, name)), ("high", getattr(self.high, name))):
                    figure[end] = {key: item for key, item in asdict(value).items() if key != "count"}
        latency["model"] = {
            **latency["model"],
            "slowdowns": {"low": self.low_slowdown, "high": self.high_slowdown},
        }


@dataclass(frozen=True, slots=True)
class SimulateResult:
    """What a trace did to the KV cache and the scheduler.

    ``finished_share`` counts each sample, so that engines which take samples together and those which take them as
    requests can be compared. ``records`` has each request's own times in ticks of ``seconds_per_tick`` seconds (None:
    steps), in order of arrival; empty unless they were asked for.
    """

    config: Settings
    simulation: dict[str, object]
    trace: dict[str, object]
    requests: figures.RequestCounts
    finished_share: float
    steps: int
    scheduled_tokens: int
    duration_s: float | None
    throughput: figures.Throughput
    kv: figures.KvFigures
    batch: figures.BatchFigures
    prefix_cache: figures.PrefixCacheFigures
    preemptions: figures.PreemptionFigures
    causes: PreemptionCauses
    latency: figures.LatencyFigures
    goodput: figures.Goodput | None
    drafts: figures.DraftFigures | None
    warnings: tuple[str, ...]
    profile: Profile
    seconds_per_tick: Fraction | None
    map: PoolMap | None = None
    range: LatencyRange | None = None
    records: tuple[figures.RequestRecord, ...] = field(default=(), repr=False)

    def to_dict(self, *, profile: bool = False) -> dict[str, object]:
        """The JSON document without its version keys; what this machine took only with ``profile``."""
        latency = asdict(self.latency)
        if self.range is not None:
            self.range.add_to(latency)
        document: dict[str, object] = {
            "config": settings_dict(self.config),
            "simulation": self.simulation,
            "trace": self.trace,
            "requests": asdict(self.requests),
            "steps": self.steps,
            "scheduled_tokens": self.scheduled_tokens,
            "duration_s": self.duration_s,
            "throughput": asdict(self.throughput),
            "kv": asdict(self.kv),
            "batch": asdict(self.batch),
            "prefix_cache": asdict(self.prefix_cache),
            "preemptions": {**asdict(self.preemptions), **self._causes()},
            "drafts": asdict(self.drafts) if self.drafts else None,
            "latency": latency,
            "goodput": asdict(self.goodput) if self.goodput else None,
            "warnings": list(self.warnings),
        }
        if self.map is not None:
            document["map"] = self.map.to_dict()
        if profile:
            document["profile"] = asdict(self.profile)
        return document

    def _causes(self) -> dict[str, object]:
        """Why sequences were preempted, with times in seconds."""
        causes = self.causes
        return {
            "by_decodes": causes.by_decodes,
            "by_prompts": causes.by_prompts,
            "of_themselves": causes.of_themselves,
            "lost_tokens": causes.lost_tokens,
            "found_tokens": causes.found_tokens,
            "lost_s": self.seconds(causes.lost_ticks),
            "mean_running": causes.mean_running,
            "cause": causes.sentence,
            "worst": [
                {
                    "step": case.step,
                    "time_s": self.seconds(case.tick),
                    **case.preemption._asdict(),
                    "running": case.running,
                    "found_tokens": case.found_tokens,
                    "lost_s": None if case.lost_ticks is None else self.seconds(case.lost_ticks),
                }
                for case in causes.worst
            ],
        }

    def seconds(self, ticks: int) -> float | None:
        """Ticks of the run's clock in seconds; None where arrivals are step-numbered without a step time."""
        return None if self.seconds_per_tick is None else seconds(ticks, self.seconds_per_tick)


def simulate(
    trace: str | os.PathLike[str],
    *,
    map: MapWish | None = None,
    uncertainty: bool = False,
    **options: object,
) -> SimulateResult:
    """Replay a trace file, a shipped workload or ``-`` through an engine's scheduler and its KV pool.

    ``options`` are the fields of `SimulateOptions`; ``map`` asks for a map of the pool, ``uncertainty`` for how far off
    the latencies may be. Raises `InputError` for wrong input and `DoesNotFit` if the engine would not start.

    >>> simulate("chat").requests.unfinished
    0
    """
    records: list[figures.RequestRecord] = []
    source, settings = os.fspath(trace), SimulateOptions.of(options)
    simulation = Simulation(source, settings)
    if uncertainty:
        # Only such runs are run again.
        from kvplan.jobs.uncertainty import check_source, known_slowdowns, latency_range

        check_source(source)
        slowdowns = known_slowdowns(simulation)
    result = simulation.run(on_request=records.append, map=map)
    if uncertainty:
        result = replace(result, range=latency_range(slowdowns, result.latency, source, settings))
    return replace(result, records=tuple(sorted(records, key=lambda record: record.number)))


def replay(simulation: Simulation, watch: Watch | None) -> SimulateResult:
    """Run a simulation, with an observer that ``watch`` makes. Raises `KeyboardInterrupt` if it is interrupted."""
    if watch is None:
        result = simulation.run()
    else:
        with watch(simulation) as observer:
            result = simulation.run(turns=[observer])
    if result.simulation["status"] == "interrupted":
        raise KeyboardInterrupt
    return result


class Simulation:
    """A run that is resolved: what can be wrong with its settings is found before it starts. It runs once.

    The trace is read while it is replayed; what is wrong with its lines is found then.

    ``origins`` names the origin of options that no flag gave. Raises `InputError` and `DoesNotFit`.
    """

    def __init__(
        self,
        source: str,
        options: SimulateOptions,
        origins: Mapping[str, str] | None = None,
        *,
        num_gpu_blocks: int | None = None,
        slowdown: float | None = None,
    ) -> None:
        """``num_gpu_blocks`` replaces the size of the pool, all else being equal; steps take ``slowdown`` as long."""
        check_options(options)
        self.options = options
        self.trace = open_trace(
            source,
            format=options.format,
            limit=options.limit,
            rate_scale=_exact(options.rate_scale) if options.rate_scale else Fraction(1),
            skip_bad_lines=options.skip_bad_lines,
            samples=options.n,
        )
        try:
            if (
                self.trace.scenario
                and options.skip_bad_lines
                and is_of_this_run("skip_bad_lines", origins or {})
            ):
                raise InputError(
                    "a scenario is one document: it has no lines to leave out",
                    where="--skip-bad-lines",
                    hint="leave it out",
                )
            self._plan = _plan(self.trace, options, origins, slowdown)
            if num_gpu_blocks is not None:
                self._plan.config = replace(self._plan.config, num_gpu_blocks=num_gpu_blocks)
            if self.trace.scenario is None:
                self._plan.config.check()
            self._warmup = _warmup_ticks(options, origins or {}, self._plan.clock.seconds_per_tick)
            self._requests = offered(self.trace, options, self._plan.clock.seconds_per_tick)
        except KvplanError:
            self.trace.close()
            raise

    @property
    def seconds_per_tick(self) -> Fraction | None:
        """Seconds of a tick of the clock; None where arrivals are step-numbered without a step time."""
        return self._plan.clock.seconds_per_tick

    @property
    def slowdowns(self) -> tuple[float, float] | None:
        """What each step's time may be multiplied with, at least and at most; None where its error is not known."""
        return self._plan.clock.slowdowns

    @property
    def is_calibrated(self) -> bool:
        """Whether step times are those of a calibration."""
        return self._plan.clock.is_calibrated

    @property
    def calibration_warnings(self) -> tuple[str, ...]:
        """Why the calibration's step times are not used, or only carried over."""
        return self._plan.clock.calibration_warnings

    @property
    def engine_config(self) -> EngineConfig:
        """The settings of the engine."""
        return self._plan.config

    @property
    def has_queue(self) -> bool:
        """Whether batches are planned before the output of the one before is processed."""
        scheduler = self._plan.scheduler
        return scheduler is not None and scheduler.queue_size > 1

    @property
    def has_drafts(self) -> bool:
        """Whether tokens are drafted, so that a step may put out several."""
        scheduler = self._plan.scheduler
        return scheduler is not None and scheduler.speculative is not None

    @property
    def usable_blocks(self) -> int:
        """Blocks of the pool that can hold tokens."""
        return self._plan.config.usable_blocks

    @property
    def least_pool(self) -> int:
        """Blocks with which the engine starts; a scenario starts with any, so two."""
        return 2 if self.trace.scenario is not None else self._plan.config.least_pool

    @property
    def group_kinds(self) -> tuple[str, ...]:
        """The kinds of the cache groups; none where one full group, or another engine, keeps all tokens."""
        scheduler = self._plan.scheduler
        if scheduler is None or [group.kind for group in scheduler.groups] == ["full"]:
            return ()
        return tuple(group.kind for group in scheduler.groups)

    @property
    def block_slots(self) -> int:
        """Slots of a block, as they are counted."""
        scheduler = self._plan.scheduler
        return self._plan.config.block_size if scheduler is None else scheduler.block_slots

    @property
    def endless_pool(self) -> int:
        """A number of blocks that no run fills: with it nobody is preempted.

        The plain engine keeps numbers for each block, so there it is twice what as many of the longest sequences as run
        at once can hold, which leaves room for content that nobody uses.
        """
        config = self._plan.config
        if has_fast_path(config):
            return _ENDLESS
        return min(_ENDLESS, max(1 << 20, 2 * config.max_num_seqs * config.least_pool))

    @property
    def given_slots(self) -> int | None:
        """Tokens for which the pool has places, if its number of blocks was given and does not follow from memory."""
        if self._plan.settings["num_gpu_blocks"].source != "num_gpu_blocks_override":
            return None
        return self._plan.config.num_gpu_blocks * self._plan.config.block_size

    def run(
        self,
        observers: Sequence[Observer] = (),
        *,
        turns: Sequence[Observer] = (),
        on_request: Callable[[figures.RequestRecord], None] | None = None,
        path: EnginePath | None = None,
        map: MapWish | None = None,
    ) -> SimulateResult:
        """Replay the trace. An interrupt ends it with what ran so far.

        ``observers`` see every step with all who decode, for which the plain engine serves; ``turns`` see turns as
        they come, and ``on_request`` what became of each request when it ends. ``path`` is ``fast`` or ``plain``;
        both decide the same. Raises `InputError` for wrong lines of the trace, and where a ``map`` asks for a step or a
        request that is not to be seen.
        """
        plan, trace = self._plan, self.trace
        watched = bool(observers) or map is not None
        path = path or ("plain" if watched or not has_fast_path(plan.config) else "fast")
        engine = make_engine(plan.config, path)
        rules = SIMULATED[plan.engine.name]
        fullest = None if map is None else _fullest_step(plan.scheduler, engine, map)
        if fullest is not None:
            turns = [*turns, fullest]
        metrics = figures.Metrics(
            num_gpu_blocks=plan.config.num_gpu_blocks,
            usable_blocks=plan.config.usable_blocks,
            block_size=plan.config.block_size,
            cache=plan.scheduler,
            prefix_caching=plan.config.enable_prefix_caching,
            seconds_per_tick=plan.clock.seconds_per_tick,
            warmup=self._warmup,
            slo=figures.Slo(self.options.slo_ttft, self.options.slo_tpot, self.options.slo_e2e),
            on_request=on_request,
        )
        requests = self._requests if rules.has_aborts else without_aborts(self._requests, plan.engine.name)
        wall, cpu = time.perf_counter(), time.process_time()
        status, reason = "interrupted", None
        try:
            with _rare_collections():
                outcome = run(
                    requests if rules.has_samples else one_request_a_sample(requests),
                    engine,
                    plan.clock.price,
                    metrics,
                    decode_price=plan.clock.decode_price,
                    num_clients=self.options.concurrency,
                    front_end=plan.clock.front_end,
                    step_numbered=trace.step_numbered,
                    observe=_together([*observers, *turns]),
                )
            status, reason = outcome.status, outcome.reason
        except KeyboardInterrupt:
            reason = "figures are of the part that ran"
        metrics.note_live(engine.live())
        profile = _profile(wall, cpu, metrics.request_counts().total)
        result = _result(trace, plan, metrics, profile, path, status, reason)
        if map is None or fullest is None or (status == "interrupted" and fullest.picture is None):
            return result
        return replace(result, map=self._map(fullest, map))

    def _map(self, fullest: FullestStep, wish: MapWish) -> PoolMap:
        """The map that was asked for; raises `InputError` where that step or request is not to be seen."""
        picture, at_step, name = fullest.picture, wish.at_step, wish.request
        if picture is None:
            steps = f"those of this run lie between {fullest.first_step} and {fullest.last_step}"
            raise InputError(
                "there is no step to draw" if at_step is None else f"no step {at_step} was taken",
                where="--map" if at_step is None else "--at-step",
                hint="the trace has no request that runs" if fullest.last_step is None else steps,
            )
        names = [holding.id for holding in picture.holdings]
        if name is not None and name not in names:
            raise unknown_name(
                f"request among those that hold blocks in step {fullest.step}",
                name,
                names,
                where="--map-request",
                listing="the legend of --map",
            )
        scale = self.seconds_per_tick
        time_s = None if scale is None else seconds(fullest.start, scale)
        return pool_map(picture, step=fullest.step, time_s=time_s, table_of=name)


def _fullest_step(scheduler: SchedulerConfig | None, engine: RunningEngine, wish: MapWish) -> FullestStep:
    """What watches a run for the step to draw. Raises `InputError` for a pool that cannot be drawn."""
    if scheduler is not None and scheduler.groups != ONE_FULL_GROUP.specs:
        raise InputError(
            "not yet supported: a map of a pool that several kinds of layers share",
            where="--map",
            hint="models whose layers keep all tokens can be drawn",
        )
    assert isinstance(engine, Pictured), "watched engines can be drawn"
    return FullestStep(engine, wish.at_step)


def _result(
    trace: TraceStream,
    plan: _Plan,
    metrics: figures.Metrics,
    profile: Profile,
    path: EnginePath,
    status: str,
    reason: str | None,
) -> SimulateResult:
    counts, rules, scheduler = metrics.request_counts(), SIMULATED[plan.engine.name], plan.scheduler
    return SimulateResult(
        config=plan.settings,
        simulation={
            "engine": plan.engine.name,
            "engine_version": plan.engine.version,
            "scheduler_version": rules.version,
            "engine_path": path,
            "async_scheduling": scheduler is not None and scheduler.async_scheduling,
            "verified": rules.verified,
            "status": status,
            "reason": reason,
        },
        trace=trace.to_dict(),
        requests=counts,
        finished_share=metrics.finished_share,
        steps=metrics.steps,
        scheduled_tokens=metrics.scheduled_tokens,
        duration_s=metrics.duration_s,
        throughput=metrics.throughput(),
        kv=metrics.kv_figures(),
        batch=metrics.batch_figures(),
        prefix_cache=metrics.prefix_cache_figures(),
        preemptions=metrics.preemption_figures(),
        causes=metrics.preemption_causes(),
        latency=metrics.latency(plan.clock.model),
        goodput=metrics.goodput(),
        drafts=metrics.draft_figures() if scheduler is not None and scheduler.speculative else None,
        warnings=(
            *plan.warnings,
            *_request_warnings(counts, trace, plan.config),
            *(["all lies within the warm-up: there is nothing to measure"] if metrics.is_all_warmup else []),
        ),
        profile=profile,
        seconds_per_tick=plan.clock.seconds_per_tick,
    )


def _request_warnings(counts: figures.RequestCounts, trace: TraceStream, config: EngineConfig) -> list[str]:
    warnings = []
    if trace.skipped_lines:
        warnings.append(f"{counted(trace.skipped_lines, 'bad line')} skipped")
    rejected = counts.rejected
    for reason, why in (
        ("needs_more_blocks_than_the_pool", f"even alone too large for the {config.usable_blocks:,} blocks"),
        ("more_samples_than_max_num_seqs", f"more samples than max_num_seqs {config.max_num_seqs:,}"),
        ("reservation_exceeds_pool", f"no piece of the {config.usable_blocks:,} slots holds the reservation"),
        (
            "prompt_exceeds_max_num_batched_tokens",
            f"prompt exceeds max_num_batched_tokens {config.max_num_batched_tokens:,}",
        ),
    ):
        number = counts.reject_reasons.get(reason, 0)
        rejected -= number
        if number:
            warnings.append(f"{counted(number, 'request')} turned away: {why}")
    if rejected:
        warnings.append(
            f"{counted(rejected, 'request')} turned away: prompt is empty or reaches max_model_len "
            f"{config.max_model_len:,}"
        )
    if counts.truncated:
        warnings.append(
            f"{counted(counts.truncated, 'request')} stopped at max_model_len {config.max_model_len:,}, "
            "short of the output"
        )
    return warnings


# What to run


@dataclass(slots=True)
class _Plan:
    """A run, resolved: the engine's settings, the price of a step, and where all came from."""

    config: EngineConfig
    clock: _Clock
    settings: Settings
    warnings: list[str]
    engine: Engine

    @property
    def scheduler(self) -> SchedulerConfig | None:
        """The engine's settings where they are vLLM's; the others have no batch queue, drafts or cache groups."""
        return self.config if isinstance(self.config, SchedulerConfig) else None


def _plan(
    trace: TraceStream, options: SimulateOptions, origins: Mapping[str, str] | None, slowdown: float | None
) -> _Plan:
    """Settings from flags, else from the trace, else the default model on the default GPU."""
    check_engine_options(options)
    sources = dict(origins or {})
    scenario = trace.scenario
    names_machine = bool(options.model or options.gpu or options.gpu_memory or options.kv_cache_memory_bytes)
    if scenario is not None:
        options = _fill_from_scenario(options, scenario, sources, own_pool=names_machine)
    resolver = Resolver(options, sources)
    if resolver.is_asked("seed") and options.request_rate is None and options.acceptance_rate is None:
        raise InputError(
            "--seed has no effect: nothing is drawn",
            where="--seed",
            hint="leave it out, or draw with --request-rate or --acceptance-rate",
        )
    engine = resolver.note_engine()
    warnings: list[str] = []
    machine: _Machine | None = None
    if names_machine or options.num_gpu_blocks_override is None:
        machine = _machine(resolver, warnings)
        pool = machine.pool
    else:
        _refuse_machine_options(resolver)
        pool = _free_pool(resolver, engine)
    config = engine_config(engine, resolver, pool, scenario, warnings)
    resolver.note("num_gpu_blocks", config.num_gpu_blocks, _pool_source(options, machine))
    clock = _clock(trace, resolver, machine, slowdown)
    warnings += clock.calibration_warnings
    resolver.note_rest()
    return _Plan(config, clock, resolver.settings, warnings, engine)


def _fill_from_scenario(
    options: SimulateOptions, scenario: SchedulerConfig, sources: dict[str, str], *, own_pool: bool
) -> SimulateOptions:
    """The options with what the scenario says for each that was not given; ``own_pool`` keeps its pool out."""
    options = replace(options)
    known = {item.name for item in fields(options)}
    for item in fields(scenario):
        name = _FLAG_OF_SETTING.get(item.name, item.name)
        if name == "num_gpu_blocks_override" and own_pool:
            continue
        if name in known and getattr(options, name) is None:
            options.set_option(name, getattr(scenario, item.name))
            sources[name] = "trace"
    return options


#: Settings of the scheduler whose flag has another name.
_FLAG_OF_SETTING = {"policy": "scheduling_policy", "num_gpu_blocks": "num_gpu_blocks_override"}


#: Options that only a model or a GPU gives a meaning.
_MACHINE_OPTIONS = (
    "dtype",
    "kv_cache_dtype",
    "tensor_parallel_size",
    "data_parallel_size",
    "decode_context_parallel_size",
    "enable_expert_parallel",
    "quantization",
    "mamba_cache_dtype",
    "mamba_ssm_cache_dtype",
    "disable_hybrid_kv_cache_manager",
    "speculative_model",
    "enable_lora",
    "max_loras",
    "max_lora_rank",
    "gpu_memory_utilization",
    "enforce_eager",
    "margin",
    "calibration",
    "swap_space",
    "set",
    "models",
)


def _refuse_machine_options(resolver: Resolver[SimulateOptions]) -> None:
    for name in _MACHINE_OPTIONS:
        if resolver.is_asked(name):
            raise InputError(
                f"{flag(name)} has no effect on a run without a machine",
                where=flag(name),
                hint="leave it out, or name --model or --gpu",
            )


@dataclass(frozen=True, slots=True)
class _Machine:
    """A model on a GPU."""

    served: Served
    pool: Pool


def _machine(resolver: Resolver[SimulateOptions], warnings: list[str]) -> _Machine:
    options = resolver.options
    model = resolver.choose("model", DEFAULT_MODEL, "default")
    gpu_text = options.gpu
    if gpu_text is None and options.gpu_memory is None and options.kv_cache_memory_bytes is None:
        gpu_text = resolver.choose("gpu", DEFAULT_GPU, "default")
    elif gpu_text is not None:
        resolver.choose("gpu", gpu_text, "default")
    spec = load_model(
        model,
        catalogue=options.catalogue,
        overrides=options.set,
        where="--model",
    )
    gpu, count = find_gpu(gpu_text)
    served = serve(spec, resolver, gpu=gpu, gpu_count=count)
    warnings += served.warnings
    capacity, deployment = served.capacity, served.deployment
    if deployment.data_parallel_size > 1:
        warnings.append(
            f"of {deployment.data_parallel_size:,} replicas one is simulated, with all of the requests"
        )
    assert capacity is not None, "there is a GPU, its memory or a pool"
    groups = cache_groups(served)
    _refuse_context_parallelism(served)
    length = deployment.max_model_len
    if options.max_model_len == "auto":
        length = min(length, capacity.max_model_len_that_fits)
    if capacity.usable_blocks == 0 or length == 0:
        raise DoesNotFit(
            f"the engine would not start: {capacity.reason}",
            where=f"{spec.name} on {gpu.name if gpu else 'this memory'}",
            hint="use a larger GPU or more of them (--tensor-parallel-size)",
        )
    pool = Pool(
        capacity.num_gpu_blocks,
        served.plan.pool.block_size,
        deployment.max_num_batched_tokens,
        deployment.max_num_seqs,
        length,
        served.plan.pool.bytes_per_block(served.plan.stages[0]),
        groups,
    )
    return _Machine(served, pool)


def _refuse_context_parallelism(served: Served) -> None:
    size = served.deployment.cache.decode_context_parallel_size
    if size > 1:
        raise InputError(
            f"not yet supported: simulation with --decode-context-parallel-size {size}",
            where="--decode-context-parallel-size",
            hint="leave it out",
        )


def _free_pool(resolver: Resolver[SimulateOptions], engine: Engine) -> Pool:
    """A number of blocks without model or GPU."""
    options = resolver.options
    count = options.num_gpu_blocks_override
    assert count is not None, "the caller checks"
    block_size = resolver.choose("block_size", DEFAULT_BLOCK_SIZE, "default without a machine")
    whole_pool, what = longest_sequence(engine, count, block_size)
    length: int | str = resolver.choose("max_model_len", whole_pool, what)
    if not isinstance(length, int):
        length = whole_pool
        resolver.note("max_model_len", length, f"--max-model-len auto: {what}")
    rules = engine_sizing(engine.name, engine.version).rules
    check_settings(options, rules)
    batch, seqs = choose_batch_limits(
        resolver, rules, vllm_rules("").batch_limits(None, ""), length, "default without a machine"
    )
    return Pool(count, block_size, batch, seqs, length)


def _pool_source(options: SimulateOptions, machine: _Machine | None) -> str:
    if options.num_gpu_blocks_override is not None:
        return "num_gpu_blocks_override"
    if options.kv_cache_memory_bytes is not None:
        return "kv_cache_memory_bytes"
    assert machine is not None, "otherwise the number of blocks was given"
    capacity = machine.served.capacity
    assert capacity is not None, "there is a GPU or its memory"
    return f"sized from model and GPU ({capacity.overhead_source})"


# Time


class _Clock(NamedTuple):
    """Prices in ticks, seconds of a tick, the model behind them, and what its error allows to multiply them with.

    A request reaches the engine ``front_end`` ticks after its arrival.
    """

    price: Price | tuple[Price, ...]
    decode_price: Callable[[int, int], tuple[int, int, int]]
    seconds_per_tick: Fraction | None
    model: dict[str, object]
    slowdowns: tuple[float, float] | None = None
    front_end: int = 0
    calibration_warnings: tuple[str, ...] = ()
    is_calibrated: bool = False


def _clock(
    trace: TraceStream,
    resolver: Resolver[SimulateOptions],
    machine: _Machine | None,
    slowdown: float | None,
) -> _Clock:
    """Prices in ticks, seconds of a tick, and the name of the model behind them."""
    options = resolver.options
    step_time = options.step_time
    if step_time is None and machine is None and not trace.step_numbered:
        step_time = DEFAULT_STEP_TIME
    if step_time is not None:
        step_s = _exact(resolver.choose("step_time", step_time, "default without a machine"))
        ticks = 1 if trace.step_numbered else max(1, round(step_s * PICOSECONDS))
        model: dict[str, object] = {"name": "constant step time", "calibration": None, "measured_error": None}
        per_tick = step_s if trace.step_numbered else Fraction(1, PICOSECONDS)
        kept = machine.served.calibration if machine else None
        unused: tuple[str, ...] = ()
        if kept is not None and kept.step_times is not None:
            unused = (f"calibration of {kept.source}: its step times are not used: --step-time is given",)
        return _Clock(constant(ticks), constant_decode(ticks), per_tick, model, calibration_warnings=unused)
    if trace.step_numbered:
        unknown: dict[str, object] = {"name": None, "calibration": None, "measured_error": None}
        return _Clock(constant(1), constant_decode(1), None, unknown)
    assert machine is not None, "without a machine there is a step time"
    calibrated, calibration_warnings = _calibrated(machine.served)
    cost, chosen = latency_model(
        machine.served, block_bytes=machine.pool.bytes_per_block or 0, chosen=calibrated
    )
    if slowdown is not None:
        cost = cost.with_constants(cost.constants.slowed(slowdown))
    price: Price | tuple[Price, ...] = cost.step_ps
    if len(cost.stages) > 1:
        price = tuple(partial(cost.stage_ps, stage=stage) for stage in range(len(cost.stages)))
    error = chosen.measured_error
    model = {
        "name": "step-time model",
        "calibration": chosen.name,
        "measured_error": None if error is None else error._asdict(),
        "front_end_s": chosen.constants.api_s,
    }
    slowdowns = None if error is None else error.slowdowns
    front_end = round(chosen.constants.api_s * PICOSECONDS)
    return _Clock(
        price,
        cost.decode,
        Fraction(1, PICOSECONDS),
        model,
        slowdowns,
        front_end,
        calibration_warnings,
        is_calibrated=calibrated is not None,
    )


def _calibrated(served: Served) -> tuple[ChosenConstants | None, tuple[str, ...]]:
    """The constants of the calibration, where there is one that holds, and what is to be told of it."""
    kept = served.calibration
    if kept is None:
        return None, ()
    from kvplan.calibration import measured_steps  # only such runs need it

    gpu = served.gpu.name if served.gpu else None
    steps = measured_steps(kept, served.spec, gpu, served.deployment)
    return steps.chosen, tuple(f"calibration of {kept.source}: {reason}" for reason in steps.reasons)


def _warmup_ticks(
    options: SimulateOptions, origins: Mapping[str, str], seconds_per_tick: Fraction | None
) -> int:
    """The warm-up; refuses it, and goals in seconds, where arrivals have none."""
    if seconds_per_tick is not None:
        return int(_exact(options.warmup or 0.0) / seconds_per_tick)
    for name in ("warmup", "slo_ttft", "slo_tpot", "slo_e2e"):
        if getattr(options, name) and is_of_this_run(name, origins):
            raise InputError(
                "step-numbered arrivals have no seconds", where=flag(name), hint="give --step-time too"
            )
    return 0


def _exact(value: float) -> Fraction:
    """A number as it was written: 0.02 is 1/50."""
    return Fraction(repr(value))


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Have garbage in cycles looked for a hundred times less often: a run makes hardly any, and all is visited."""
    before = gc.get_threshold()
    if before[0]:  # else somebody has switched it off
        gc.set_threshold(max(before[0], _OBJECTS_A_COLLECTION), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _together(observers: Sequence[Observer]) -> Observer | None:
    if len(observers) < 2:
        return observers[0] if observers else None

    def observe(record: StepRecord) -> None:
        for observer in observers:
            observer(record)

    return observe


def _profile(wall: float, cpu: float, num_requests: int) -> Profile:
    wall_s = time.perf_counter() - wall
    peak: int | None = None
    try:
        import resource  # not on every system
    except ImportError:
        pass
    else:
        unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere (getrusage(2))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return Profile(wall_s, time.process_time() - cpu, num_requests / wall_s if wall_s else None, peak)
