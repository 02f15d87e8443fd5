"""`kvplan compare`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvplan.cli import options as shared
from kvplan.cli.simulate import simulate
from kvplan.errors import InputError
from kvplan.options import flag
from kvplan.units import parse_count

if TYPE_CHECKING:
    from kvplan.jobs.compare import CompareResult
    from kvplan.plots import Bar

#: Options of `simulate` that are about one run alone.
_OF_ONE_RUN = (
    *("requests", "timeline", "events", "events_detail", "min_blocks", "profile"),
    *("map", "at_step", "map_request", "uncertainty"),
)


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command(
        "compare",
        cls=shared.LightCommand,
        epilog="Example: kvplan compare chat --engines vllm,orca-max --max-model-len 8192",
    )(_with_options_of_simulate(compare))


def _with_options_of_simulate(command: Callable[..., None]) -> Callable[..., None]:
    """The command, with every option of `simulate` that all runs can share."""
    own = [
        p
        for p in inspect.signature(command, eval_str=True).parameters.values()
        if p.kind is not p.VAR_KEYWORD
    ]
    names = {parameter.name for parameter in own}
    more = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in inspect.signature(simulate, eval_str=True).parameters.values()
        if parameter.name not in names and parameter.name not in _OF_ONE_RUN
    ]
    place = next(i for i, parameter in enumerate(own) if parameter.name == "json")
    own = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own]
    parameters = [*own[:place], *more, own[place]]
    vars(command)["__signature__"] = inspect.Signature(parameters)
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


def compare(
    ctx: typer.Context,
    trace: Annotated[
        str, typer.Argument(metavar="TRACE", help="A trace file, or a shipped workload (chat).")
    ],
    engines: Annotated[
        str | None, typer.Option("--engines", metavar="A,B,...", help="Run each of these engines.")
    ] = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(
            "--vary",
            metavar="FLAG=V1,V2,...",
            help="Run each of these values; repeatable, for every combination.",
        ),
    ] = None,
    case: Annotated[
        list[str] | None,
        typer.Option("--case", metavar='"FLAG=V FLAG=V"', help="One more run, with these set; repeatable."),
    ] = None,
    jobs: Annotated[
        str | None, typer.Option("--jobs", metavar="N", help="Runs at once (one for each CPU).")
    ] = None,
    picture: Annotated[
        str | None,
        typer.Option(
            "--picture", metavar="OUT.(png|svg)", help="Draw what was held, throughput and latency."
        ),
    ] = None,
    json: shared.Json = False,
    **options: Any,
) -> None:
    """One trace through several engines or settings, side by side. Flags of simulate hold for all runs."""
    from kvplan.jobs.compare import combinations, compare_with, listed, parse_case, parse_vary
    from kvplan.options import SimulateOptions
    from kvplan.output import check_output_paths

    if picture is not None:
        from kvplan.plots import check_picture

        check_picture(picture, "--picture")
        check_output_paths({"--picture": picture}, sources=[trace])
    varied: dict[str, list[object]] = {}
    if engines is not None:
        varied["engine"] = [*listed(engines, "--engines")]
    for text in vary or ():
        name, values = parse_vary(text)
        if name in varied:
            raise InputError(
                f"{flag(name)} is varied twice", where="--vary", hint="name all its values at once"
            )
        varied[name] = values
    result = compare_with(
        trace,
        shared.from_params(SimulateOptions, ctx.params),
        combinations(varied, [parse_case(text) for text in case or ()]),
        jobs=None if jobs is None else parse_count(jobs, where="--jobs"),
        on_done=_show if sys.stderr.isatty() else None,
    )
    for warning in dict.fromkeys(w for run in result.runs if run.result for w in run.result.warnings):
        shared.warn(warning)
    if json:
        shared.print_json(result.to_dict())
    else:
        from kvplan.report.compare import print_comparison
        from kvplan.report.tables import Screen

        print_comparison(Screen(), result)
    if result.is_partial:
        raise typer.Exit(130)
    if picture is not None:
        _draw(picture, result)
    if not result.is_done:
        raise typer.Exit(1)


def _show(done: int, of: int) -> None:
    """How far it is, on a terminal."""
    sys.stderr.write(f"\r{done} of {of} runs" if done < of else "\r" + " " * 40 + "\r")
    sys.stderr.flush()


def _draw(path: str, result: CompareResult) -> None:
    """The picture of the runs side by side, in a PNG or SVG file."""
    from kvplan.jobs.compare import written
    from kvplan.output import whole_path
    from kvplan.plots import draw_comparison

    with whole_path(path) as temporary:
        draw_comparison(temporary, _bars(result), ", ".join(map(written, result.varied)))


def _bars(result: CompareResult) -> list[Bar]:
    from kvplan.jobs.compare import E2E, THROUGHPUT, TTFT
    from kvplan.plots import Bar

    bars = []
    for label, run in zip(result.labels, result.runs, strict=True):
        if run.result is None:
            continue
        kv = run.result.kv
        bars.append(
            Bar(
                label,
                (
                    kv.token_share or 0.0,
                    kv.reserved_share or 0.0,
                    kv.internal_fragmentation or 0.0,
                    kv.external_fragmentation or 0.0,
                ),
                THROUGHPUT.of(run.result),
                TTFT.of(run.result),
                E2E.of(run.result),
            )
        )
    return bars
