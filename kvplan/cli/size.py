"""`kvplan size`."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Annotated

import typer

from kvplan.cli import options as shared
from kvplan.errors import InputError

if TYPE_CHECKING:
    from kvplan.jobs.size import SizeResult


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command(
        "size",
        cls=shared.LightCommand,
        epilog="Example: kvplan size llama-2-13b --seq 4096 --concurrency 10 --gpu a100-80gb",
    )(size)


def size(
    ctx: typer.Context,
    model: Annotated[
        list[str] | None,
        typer.Argument(metavar="MODEL...", help="Catalogue names, config.json files or model folders."),
    ] = None,
    seq: Annotated[str | None, typer.Option("--seq", metavar="N", help="Tokens of one sequence.")] = None,
    concurrency: Annotated[
        str | None, typer.Option("--concurrency", metavar="N", help="Sequences at once (1).")
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            "--gpu", metavar="NAME[,NAME]|all", help="GPUs of the catalogue; 8xNAME is eight of one."
        ),
    ] = None,
    gpu_memory: shared.GpuMemory = None,
    kv_cache_memory_bytes: shared.KvCacheMemoryBytes = None,
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
    block_size: shared.BlockSize = None,
    gpu_memory_utilization: shared.GpuMemoryUtilization = None,
    max_model_len: shared.MaxModelLen = None,
    max_num_seqs: shared.MaxNumSeqs = None,
    max_num_batched_tokens: shared.MaxNumBatchedTokens = None,
    num_gpu_blocks_override: shared.NumGpuBlocksOverride = None,
    enforce_eager: shared.EnforceEager = None,
    disable_hybrid_kv_cache_manager: shared.DisableHybridKvCacheManager = None,
    async_scheduling: shared.AsyncScheduling = None,
    num_speculative_tokens: shared.NumSpeculativeTokens = None,
    speculative_method: shared.SpeculativeMethod = None,
    speculative_model: shared.SpeculativeModel = None,
    enable_lora: shared.EnableLora = None,
    max_loras: shared.MaxLoras = None,
    max_lora_rank: shared.MaxLoraRank = None,
    enable_prefix_caching: shared.EnablePrefixCaching = None,
    engine: Annotated[
        str | None,
        typer.Option(
            "--engine",
            metavar="NAME[@VERSION][,...]",
            help="Whose rules, such as vllm@0.24 (the newest vllm); several are shown side by side.",
        ),
    ] = None,
    margin: shared.Margin = None,
    vllm_command: shared.VllmCommand = None,
    ignore_flag: shared.IgnoreFlag = None,
    set: shared.Set = None,
    models: shared.Models = None,
    explain: Annotated[bool, typer.Option("--explain", help="Show each formula with its numbers.")] = False,
    json: shared.Json = False,
) -> None:
    """KV-cache bytes, blocks and weights of a model, and what fits on a GPU."""
    from kvplan.jobs.size import engine_names, gpu_names, rank_by_gpu, size_with
    from kvplan.options import SizeOptions

    options = shared.from_params(SizeOptions, ctx.params)
    names = list(model or [])
    origins: dict[str, str] = {}
    ignored: tuple[str, ...] = ()
    if vllm_command is not None:
        from kvplan.vllm_command import read_command

        command = read_command(vllm_command, ignored_flags=ignore_flag or ())
        if names:
            raise InputError(
                "MODEL and --vllm-command both name a model", where="kvplan size", hint="give one of them"
            )
        names = [command.model]
        origins = command.fill(options)
        ignored = tuple(f"ignored in --vllm-command: {text}" for text in command.ignored)
    if not names:
        raise InputError(
            "no model is named", where="kvplan size", hint="give a MODEL; kvplan models lists them"
        )
    gpus = gpu_names(options.gpu) if options.gpu is not None else [None]
    engines = engine_names(options.engine) if options.engine is not None else [None]
    columns: list[list[SizeResult]] = []
    for name, engine_name in product(names, engines):
        results = [size_with(name, replace(options, gpu=one, engine=engine_name), origins) for one in gpus]
        columns.append(rank_by_gpu(results) if len(gpus) > 1 else results)
        columns[-1] = [replace(r, warnings=(*ignored, *r.warnings)) for r in columns[-1]]
    everything = [result for results in columns for result in results]
    for warning in dict.fromkeys(w for result in everything for w in result.warnings):
        shared.warn(warning)
    if json:
        documents = [r.to_dict(explain=explain) for r in everything]
        shared.print_json(documents[0] if len(documents) == 1 else {"results": documents})
    else:
        _print(columns, explain=explain)
    if not all(any(r.capacity is None or r.capacity.fits for r in results) for results in columns):
        raise typer.Exit(1)


def _print(columns: list[list[SizeResult]], *, explain: bool) -> None:
    """A model with an engine is a column, or on several GPUs a table of its own."""
    from kvplan.report import Report

    report = Report()
    if len(columns[0]) > 1:
        for results in columns:
            report.gpu_ranking(results)
    else:
        report.size([results[0] for results in columns], explain=explain)
