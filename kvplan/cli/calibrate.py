"""`kvplan calibrate`."""

from __future__ import annotations

from typing import Annotated

import typer

from kvplan.cli import options as shared


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command(
        "calibrate",
        cls=shared.LightCommand,
        epilog="Example: kvplan calibrate steps.csv --model qwen3-14b --gpu h100-80gb -o h100.yaml",
    )(calibrate)


def calibrate(
    ctx: typer.Context,
    data: Annotated[
        str,
        typer.Argument(
            metavar="DATA",
            help="A table of step times, a vLLM log, a benchmark's JSON or that of kvplan kernel-bench.",
        ),
    ],
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="MODEL", help="The model that was measured, if DATA does not say."),
    ] = None,
    gpu: shared.Gpu = None,
    tensor_parallel_size: shared.TensorParallelSize = None,
    pipeline_parallel_size: shared.PipelineParallelSize = None,
    data_parallel_size: shared.DataParallelSize = None,
    enable_expert_parallel: shared.EnableExpertParallel = None,
    dtype: shared.Dtype = None,
    quantization: shared.Quantization = None,
    kv_cache_dtype: shared.KvCacheDtype = None,
    enforce_eager: shared.EnforceEager = None,
    block_size: shared.BlockSize = None,
    num_gpu_blocks_override: shared.NumGpuBlocksOverride = None,
    engine: shared.Engine = None,
    output: Annotated[
        str | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write the calibration, for --calibration."),
    ] = None,
    calibration: Annotated[
        str | None,
        typer.Option("--calibration", metavar="FILE", help="Keep what this one says of memory."),
    ] = None,
    set: shared.Set = None,
    models: shared.Models = None,
    json: shared.Json = False,
) -> None:
    """Fit the step-time model to steps that were measured, and say how far off it then is."""
    from kvplan.jobs.calibrate import calibrate_with
    from kvplan.options import CalibrateOptions

    options = shared.from_params(CalibrateOptions, ctx.params)
    if output is not None:
        from kvplan.output import check_output_paths

        sources = [path for path in (data, calibration, models) if path is not None]
        check_output_paths({"--output": output}, sources=sources)
    result = calibrate_with(data, options)
    for note in result.notes:
        shared.warn(note)
    if json:
        shared.print_json(result.to_dict())
    else:
        from kvplan.report.calibrate import print_calibration
        from kvplan.report.tables import Screen

        print_calibration(Screen(), result)
    if output is not None:
        from kvplan.calibration import save_calibration
        from kvplan.output import whole_file

        with whole_file(output) as file:
            save_calibration(file, result.calibration)
