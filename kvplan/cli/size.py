"""`kvplan size`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Annotated

import typer

from kvplan.cli import options as shared
from kvplan.errors import InputError

if TYPE_CHECKING:
    from kvplan.jobs.size import SizeResult
    from kvplan.vllm_command import VllmCommand


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
    lengths: Annotated[
        str | None,
        typer.Option(
            "--lengths",
            metavar="MEAN,P95",
            help="Tokens of whole sequences: mean and 95th percentile; how many at once.",
        ),
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option("--trace", metavar="TRACE", help="The same for the sequences of a trace."),
    ] = None,
    shared_prefix: Annotated[
        str | None,
        typer.Option("--shared-prefix", metavar="N", help="Tokens that all sequences begin with."),
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
    calibration: shared.Calibration = None,
    vllm_command: shared.VllmCommand = None,
    from_: shared.From = None,
    ignore_flag: shared.IgnoreFlag = None,
    set: shared.Set = None,
    models: shared.Models = None,
    suggest: Annotated[
        bool, typer.Option("--suggest", help="Show what would let more in; done anyway if it does not fit.")
    ] = False,
    explain: Annotated[bool, typer.Option("--explain", help="Show each formula with its numbers.")] = False,
    json: shared.Json = False,
) -> None:
    """KV-cache bytes, blocks and weights of a model, and what fits on a GPU."""
    from kvplan.jobs.size import engine_names, names_several_gpus, size_on, size_with
    from kvplan.options import SizeOptions

    options = shared.from_params(SizeOptions, ctx.params)
    names = list(model or [])
    origins: dict[str, str] = {}
    ignored: tuple[str, ...] = ()
    command = _command(vllm_command, from_, ignore_flag or (), names)
    if command is not None:
        names = names or [command.model]
        origins = command.fill(options)
        ignored = (
            *(f"ignored in {command.source}: {text}" for text in command.ignored),
            *command.warnings(options),
        )
    if not names:
        raise InputError(
            "no model is named", where="kvplan size", hint="give a MODEL; kvplan models lists them"
        )
    engines = engine_names(options.engine) if options.engine is not None else [None]
    columns: list[list[SizeResult]] = []
    for name, engine_name in product(names, engines):
        chosen = replace(options, engine=engine_name)
        try:
            if options.gpu is not None and names_several_gpus(options.gpu):
                results = size_on(name, options.gpu, chosen, origins, seq_sets_length=command is None)
            else:
                results = [size_with(name, chosen, origins, seq_sets_length=command is None)]
        except InputError as error:
            raise _placed(error, origins) from error
        columns.append([replace(r, warnings=(*ignored, *r.warnings)) for r in results])
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


def _placed(error: InputError, origins: Mapping[str, str]) -> InputError:
    """An error about an option, with the place of the flag in the command that gave it."""
    from kvplan.options import flag

    for name, origin in origins.items():
        if error.where == flag(name):
            return InputError(error.what, where=f"{origin}, {error.where}", hint=error.hint)
    return error


def _command(
    text: str | None, source: str | None, ignored_flags: Sequence[str], models: Sequence[str]
) -> VllmCommand | None:
    """The vLLM command that is given as text or in a file."""
    if text is not None and source is not None:
        raise InputError(
            "--vllm-command and --from both give a command", where="kvplan size", hint="give one of them"
        )
    if text is not None:
        from kvplan.vllm_command import read_command

        if models:
            raise InputError(
                "MODEL and --vllm-command both name a model", where="kvplan size", hint="give one of them"
            )
        return read_command(text, ignored_flags=ignored_flags)
    if source is not None:
        from kvplan.deployments import read_deployment

        if len(models) > 1:
            raise InputError("several models for one --from", where="kvplan size", hint="name one at most")
        command = read_deployment(source, ignored_flags=ignored_flags)
        if "model" in command.unread and not models:
            raise command.unread["model"]
        return command
    return None


def _print(columns: list[list[SizeResult]], *, explain: bool) -> None:
    """A model by an engine is a column, or on several GPUs a table of its own."""
    from kvplan.report.size import print_gpu_ranking, print_size
    from kvplan.report.tables import Screen

    screen = Screen()
    if len(columns[0]) > 1:
        for results in columns:
            print_gpu_ranking(screen, results)
    else:
        print_size(screen, [results[0] for results in columns], explain=explain)
