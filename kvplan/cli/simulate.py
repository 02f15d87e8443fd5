"""`kvplan simulate`."""

from __future__ import annotations

import sys
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from kvplan.cli import options as shared
from kvplan.errors import InputError

if TYPE_CHECKING:
    from kvplan.cli.progress import Progress
    from kvplan.jobs.simulate import MapWish, Observer, SimulateResult, Simulation


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command(
        "simulate",
        cls=shared.LightCommand,
        epilog="Example: kvplan simulate chat --model llama-3.1-8b --gpu l40s",
    )(simulate)


def simulate(
    ctx: typer.Context,
    trace: Annotated[
        str,
        typer.Argument(
            metavar="TRACE", help="A trace file, - for standard input, or a shipped workload (chat)."
        ),
    ],
    model: Annotated[str | None, typer.Option("--model", help="The model served (llama-3.1-8b).")] = None,
    gpu: shared.Gpu = None,
    gpu_memory: shared.GpuMemory = None,
    kv_cache_memory_bytes: shared.KvCacheMemoryBytes = None,
    num_gpu_blocks_override: shared.NumGpuBlocksOverride = None,
    block_size: shared.BlockSize = None,
    tensor_parallel_size: shared.TensorParallelSize = None,
    pipeline_parallel_size: shared.PipelineParallelSize = None,
    data_parallel_size: shared.DataParallelSize = None,
    decode_context_parallel_size: shared.DecodeContextParallelSize = None,
    enable_expert_parallel: shared.EnableExpertParallel = None,
    dtype: shared.Dtype = None,
    quantization: shared.Quantization = None,
    kv_cache_dtype: shared.KvCacheDtype = None,
    mamba_cache_dtype: shared.MambaCacheDtype = None,
    mamba_ssm_cache_dtype: shared.MambaSsmCacheDtype = None,
    gpu_memory_utilization: shared.GpuMemoryUtilization = None,
    max_model_len: shared.MaxModelLen = None,
    max_num_seqs: shared.MaxNumSeqs = None,
    max_num_batched_tokens: shared.MaxNumBatchedTokens = None,
    enforce_eager: shared.EnforceEager = None,
    disable_hybrid_kv_cache_manager: shared.DisableHybridKvCacheManager = None,
    async_scheduling: shared.AsyncScheduling = None,
    num_speculative_tokens: shared.NumSpeculativeTokens = None,
    speculative_method: shared.SpeculativeMethod = None,
    speculative_model: shared.SpeculativeModel = None,
    enable_lora: shared.EnableLora = None,
    max_loras: shared.MaxLoras = None,
    max_lora_rank: shared.MaxLoraRank = None,
    engine: shared.Engine = None,
    margin: shared.Margin = None,
    calibration: shared.Calibration = None,
    enable_prefix_caching: shared.EnablePrefixCaching = None,
    enable_chunked_prefill: Annotated[
        bool | None,
        typer.Option("--enable-chunked-prefill/--no-enable-chunked-prefill", help="Split long prompts (on)."),
    ] = None,
    long_prefill_token_threshold: Annotated[
        str | None,
        typer.Option(
            "--long-prefill-token-threshold",
            metavar="N",
            help="Longest prompt chunk in a step (0: no limit).",
        ),
    ] = None,
    scheduling_policy: Annotated[
        str | None,
        typer.Option(
            "--scheduling-policy", metavar="fcfs|priority|round-robin", help="Who goes first (fcfs)."
        ),
    ] = None,
    preemption_mode: Annotated[
        str | None,
        typer.Option(
            "--preemption-mode", metavar="recompute|swap", help="What becomes of a victim (the engine's)."
        ),
    ] = None,
    victim: Annotated[
        str | None,
        typer.Option(
            "--victim", metavar="most-generated|last-come", help="Of engine paged (most-generated)."
        ),
    ] = None,
    swap_space: Annotated[
        str | None,
        typer.Option("--swap-space", metavar="SIZE", help="CPU memory for each GPU, engine paged (4GiB)."),
    ] = None,
    num_cpu_blocks_override: Annotated[
        str | None,
        typer.Option("--num-cpu-blocks-override", metavar="N", help="Blocks on the CPU, instead of a size."),
    ] = None,
    quantum: Annotated[
        str | None,
        typer.Option("--quantum", metavar="TOKENS", help="A turn's length in round-robin (64)."),
    ] = None,
    n: Annotated[
        str | None, typer.Option("--n", metavar="N", help="Samples of each request (as the trace says).")
    ] = None,
    step_time: Annotated[
        str | None,
        typer.Option("--step-time", metavar="SECONDS", help="A constant instead of the latency model."),
    ] = None,
    format: Annotated[
        str, typer.Option("--format", help="Of the trace: auto, kvplan, azure, mooncake or scenario.")
    ] = "auto",
    limit: Annotated[
        str | None, typer.Option("--limit", metavar="N", help="Only the first requests of the trace.")
    ] = None,
    rate_scale: Annotated[
        str | None, typer.Option("--rate-scale", metavar="X", help="2 makes requests arrive twice as fast.")
    ] = None,
    request_rate: Annotated[
        str | None,
        typer.Option(
            "--request-rate", metavar="R", help="Requests a second, drawn, in place of the trace's arrivals."
        ),
    ] = None,
    burstiness: Annotated[
        str | None,
        typer.Option(
            "--burstiness", metavar="B", help="Of --request-rate: below 1 in bursts, inf evenly (1: Poisson)."
        ),
    ] = None,
    concurrency: Annotated[
        str | None,
        typer.Option("--concurrency", metavar="N", help="Closed loop: N clients, each waits for its answer."),
    ] = None,
    acceptance_rate: Annotated[
        str | None,
        typer.Option("--acceptance-rate", metavar="X", help="Chance that a draft token is right."),
    ] = None,
    seed: Annotated[str | None, typer.Option("--seed", metavar="N", help="Of what is drawn (0).")] = None,
    warmup: Annotated[
        str | None,
        typer.Option("--warmup", metavar="SECONDS", help="Left out of the figures at the start."),
    ] = None,
    slo_ttft: Annotated[
        str | None, typer.Option("--slo-ttft", metavar="SECONDS", help="Goal for goodput.")
    ] = None,
    slo_tpot: Annotated[
        str | None, typer.Option("--slo-tpot", metavar="SECONDS", help="Goal for goodput.")
    ] = None,
    slo_e2e: Annotated[
        str | None, typer.Option("--slo-e2e", metavar="SECONDS", help="Goal for goodput.")
    ] = None,
    skip_bad_lines: Annotated[
        bool, typer.Option("--skip-bad-lines", help="Leave out lines that are wrong.")
    ] = False,
    requests: Annotated[
        str | None, typer.Option("--requests", metavar="OUT.csv", help="Write what became of each request.")
    ] = None,
    timeline: Annotated[
        str | None,
        typer.Option(
            "--timeline", metavar="OUT.(csv|png|svg)", help="Write the KV pool and queues over time."
        ),
    ] = None,
    events: Annotated[
        str | None, typer.Option("--events", metavar="OUT.jsonl", help="Write each step's decisions.")
    ] = None,
    events_detail: Annotated[
        bool, typer.Option("--events-detail", help="With --events: block ids too.")
    ] = False,
    map: Annotated[
        bool, typer.Option("--map", help="Draw who holds which block, in the fullest step.")
    ] = False,
    at_step: Annotated[
        str | None, typer.Option("--at-step", metavar="N", help="With --map: in this step.")
    ] = None,
    map_request: Annotated[
        str | None,
        typer.Option("--map-request", metavar="ID", help="With --map: the block table of this request too."),
    ] = None,
    min_blocks: Annotated[
        str | None,
        typer.Option(
            "--min-blocks",
            metavar="0|N%|hit-rate=N%",
            help="Also find a small pool with no preemption, with N % of the requests preempted or such a hit rate.",
        ),
    ] = None,
    uncertainty: Annotated[
        bool,
        typer.Option("--uncertainty", help="How far off latencies may be, by the error of the step times."),
    ] = False,
    set: shared.Set = None,
    models: shared.Models = None,
    profile: Annotated[bool, typer.Option("--profile", help="Add what this run itself took.")] = False,
    json: shared.Json = False,
) -> None:
    """Replay a trace through an engine's scheduler, block pool and prefix cache (vLLM's)."""
    from kvplan.jobs.min_blocks import find_min_blocks, parse_goal
    from kvplan.jobs.simulate import Simulation
    from kvplan.jobs.uncertainty import check_source, known_slowdowns, latency_range
    from kvplan.options import SimulateOptions
    from kvplan.output import check_output_paths

    outputs = {"--requests": requests, "--timeline": timeline, "--events": events}
    check_output_paths(
        outputs, sources=[path for path in (trace, model, models, calibration) if path is not None]
    )
    if events_detail:
        _check_detail(events, engine)
    goal = None if min_blocks is None else parse_goal(min_blocks, trace, engine)
    wish = _map_wish(at_step, map_request) if map else None
    for given, name in ((at_step, "--at-step"), (map_request, "--map-request")):
        if given is not None and not map:
            raise InputError(f"{name} has no map to add to", where=name, hint="give --map")
    settings = shared.from_params(SimulateOptions, ctx.params)
    if uncertainty:
        check_source(trace)
    simulation = Simulation(trace, settings)
    slowdowns = known_slowdowns(simulation) if uncertainty else None
    result = _run(simulation, requests, timeline, events, events_detail, wish)
    least, interrupted = None, result.simulation["status"] == "interrupted"
    if not interrupted:
        try:
            if slowdowns is not None:
                extent = latency_range(slowdowns, result.latency, trace, settings, watch=_progress())
                result = replace(result, range=extent)
            if goal is not None:
                least = find_min_blocks(trace, settings, goal, watch=_progress())
        except KeyboardInterrupt:  # the trace was replayed: that is given
            interrupted = True
    for warning in result.warnings:
        shared.warn(warning)
    if json:
        document = result.to_dict(profile=profile)
        if goal is not None:
            document["min_blocks"] = None if least is None else least.to_dict()
        shared.print_json(document)
    else:
        from kvplan.report.simulate import print_min_blocks, print_simulation
        from kvplan.report.tables import Screen

        screen = Screen()
        print_simulation(screen, result, profile=profile)
        if result.map is not None:
            from kvplan.report.pool_map import print_map

            print_map(screen, result.map)
        if least is not None:
            print_min_blocks(screen, least)
    if interrupted:
        raise typer.Exit(130)
    if result.simulation["status"] == "stuck":
        raise typer.Exit(1)


def _check_detail(events: str | None, engine: str | None) -> None:
    """Refuse ``--events-detail`` where there are no events, or no blocks in them."""
    from kvplan.options import CONTIGUOUS_ENGINES, parse_engine

    if events is None:
        raise InputError(
            "--events-detail has nothing to add to", where="--events-detail", hint="give --events OUT.jsonl"
        )
    name = parse_engine(engine).name
    if name in CONTIGUOUS_ENGINES:
        raise InputError(
            f"engine {name} has no blocks to tell of", where="--events-detail", hint="leave it out"
        )


def _map_wish(at_step: str | None, request: str | None) -> MapWish:
    """What ``--map`` asks for."""
    from kvplan.jobs.simulate import MapWish
    from kvplan.units import parse_count

    step = None if at_step is None else parse_count(at_step, where="--at-step")
    if step is not None and step < 0:
        raise InputError(
            f"{step} is out of range", where="--at-step", hint="write the number of a step, from 0 on"
        )
    return MapWish(step, request)


def _progress() -> type[Progress] | None:
    """What shows how far a run is, on a terminal."""
    if not sys.stderr.isatty():
        return None
    from kvplan.cli.progress import Progress

    return Progress


class _Partial(Exception):
    """The run was interrupted: what it was writing is dropped."""


def _run(
    simulation: Simulation,
    requests: str | None,
    timeline: str | None,
    events: str | None,
    events_detail: bool,
    map: MapWish | None,
) -> SimulateResult:
    """Run with the observers that the outputs need; files appear when all is done."""
    from kvplan.output import EventWriter, RequestWriter, whole_file

    scale = simulation.seconds_per_tick
    observers: list[Observer] = []
    turns: list[Observer] = []
    with suppress(_Partial), ExitStack() as outputs:
        outputs.callback(simulation.trace.close)
        if events is not None:
            file = outputs.enter_context(whole_file(events))
            writer = EventWriter(
                file,
                scale,
                detail=events_detail,
                has_queue=simulation.has_queue,
                has_drafts=simulation.has_drafts,
            )
            observers.append(writer)
        if timeline is not None:
            from kvplan.timeline import Timeline  # only such runs draw

            columns = Timeline(
                timeline,
                simulation.usable_blocks,
                scale,
                group_kinds=simulation.group_kinds,
                block_slots=simulation.block_slots,
            )
            turns.append(outputs.enter_context(columns.writing()))
        progress = _progress()
        if progress is not None:
            turns.append(outputs.enter_context(progress(simulation)))
        on_request = None
        if requests is not None:
            on_request = RequestWriter(outputs.enter_context(whole_file(requests)), scale)
        result = simulation.run(observers, turns=turns, on_request=on_request, map=map)
        if result.simulation["status"] == "interrupted":
            raise _Partial  # no file may pass for a whole one
    return result
