"""`kvplan audit`."""

from __future__ import annotations

from typing import Annotated

import typer

from kvplan.cli import options as shared
from kvplan.errors import InputError


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command(
        "audit", cls=shared.LightCommand, epilog="Example: kvplan audit vllm.log --save-calibration h100.yaml"
    )(audit)


def audit(
    ctx: typer.Context,
    log: Annotated[str, typer.Argument(metavar="LOG", help="An engine's start-up log; - is standard input.")],
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="MODEL", help="The model, if the log's name is not known."),
    ] = None,
    gpu: shared.Gpu = None,
    gpu_memory: shared.GpuMemory = None,
    engine: shared.Engine = None,
    set: shared.Set = None,
    models: shared.Models = None,
    save_calibration: Annotated[
        str | None,
        typer.Option(
            "--save-calibration", metavar="FILE", help="Keep what the engine measured, for later estimates."
        ),
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option(
            "--trace",
            metavar="TRACE",
            help="The requests that it served: its throughput lines beside a simulated run.",
        ),
    ] = None,
    calibration: shared.Calibration = None,
    json: shared.Json = False,
) -> None:
    """An engine's log beside our figures, term by term: its start-up with likely causes, or with --trace its run."""
    if trace is not None:
        if save_calibration is not None:
            raise InputError(
                "--save-calibration keeps what a start-up measured",
                where="--save-calibration",
                hint="leave out --trace, or use kvplan calibrate for step times",
            )
        _audit_run(ctx, log, trace, json=json)
        return
    if calibration is not None:
        raise InputError("--calibration has no run to time", where="--calibration", hint="give --trace too")
    from kvplan.jobs.audit import audit_with
    from kvplan.options import SizeOptions
    from kvplan.startup_log import read_log_file

    options = shared.from_params(SizeOptions, ctx.params)
    if save_calibration is not None:
        from kvplan.output import check_output_paths

        check_output_paths({"--save-calibration": save_calibration}, sources=(log,))
    result = audit_with(read_log_file(log), options, model)
    for note in result.notes:
        shared.warn(note)
    if json:
        shared.print_json(result.to_dict())
    else:
        from kvplan.report.audit import print_audit
        from kvplan.report.tables import Screen

        print_audit(Screen(), result)
    if save_calibration is not None:
        from kvplan.calibration import save_calibration as save
        from kvplan.output import whole_file

        if result.calibration is None:
            raise InputError(
                "the log has nothing to keep: no model or no measured memory",
                where="--save-calibration",
                hint="give --model, and a log at level INFO up to where the engine serves",
            )
        with whole_file(save_calibration) as file:
            save(file, result.calibration)


def _audit_run(ctx: typer.Context, log: str, trace: str, *, json: bool) -> None:
    """Lay the throughput lines of a log beside the simulated run of its requests."""
    from kvplan.jobs.run_audit import run_audit
    from kvplan.options import SimulateOptions

    result = run_audit(log, trace, shared.from_params(SimulateOptions, ctx.params))
    for note in result.notes:
        shared.warn(note)
    if json:
        shared.print_json(result.to_dict())
    else:
        from kvplan.report.run_audit import print_run_audit
        from kvplan.report.tables import Screen

        print_run_audit(Screen(), result)
