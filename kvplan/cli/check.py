"""`kvplan check`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from kvplan.cli import options as shared
from kvplan.errors import InputError
from kvplan.text import literal

if TYPE_CHECKING:
    from kvplan.jobs.check import CheckReport, Verdict

_FORMATS = ("table", "json", "github")


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("check", epilog="Example: kvplan check capacity.yaml --junit report.xml")(check)


def check(
    file: Annotated[str, typer.Argument(metavar="FILE.yaml", help="The checks to run.")],
    junit: Annotated[
        str | None, typer.Option("--junit", metavar="OUT.xml", help="Write a JUnit report.")
    ] = None,
    output_format: Annotated[
        str, typer.Option("--output-format", metavar="table|json|github", help="What to print.")
    ] = "table",
    json: shared.Json = False,
) -> None:
    """Hold figures of size and simulate against a file of expectations, for CI."""
    from kvplan.jobs.check import CheckReport, read_checks
    from kvplan.output import check_output_paths, whole_file

    if output_format not in _FORMATS:
        raise InputError(
            f'"{output_format}" is no output format',
            where="--output-format",
            hint=f"use {', '.join(_FORMATS)}",
        )
    check_output_paths({"--junit": junit}, sources=[file])
    planned = read_checks(file)
    read = [
        path
        for one in planned
        for path in (one.subject, one.options.models, one.options.calibration, one.deployment_file)
        if path is not None
    ]
    check_output_paths({"--junit": junit}, sources=[file, *read])
    results = []
    for number, one in enumerate(planned, 1):
        if sys.stderr.isatty():
            sys.stderr.write(f"check {number} of {len(planned)}\n")
        results.append(one.run())
        for warning in results[-1].warnings:
            shared.warn(f'check "{one.name}": {warning}')
    report = CheckReport(file, tuple(results))
    if junit is not None:
        from kvplan.junit import junit_xml

        with whole_file(junit) as out:
            out.write(junit_xml(report))
    if json or output_format == "json":
        shared.print_json(report.to_dict())
    elif output_format == "github":
        sys.stdout.write(_annotations(report))
    else:
        from kvplan.report.check import print_checks
        from kvplan.report.tables import Screen

        print_checks(Screen(), report)
    if not report.all_passed:
        raise typer.Exit(1)


def _annotations(report: CheckReport) -> str:
    """Workflow commands of GitHub Actions: an error for each expectation that fails."""
    lines = [
        f"::error {_place(report, v)},title={_property(c.name)}::"
        f"{_data(f'{v.figure} is {v.actual_text}, expected {v.expected}{_expected_at(report, v)}')}"
        for c in report.checks
        for v in c.verdicts
        if not v.passed
    ]
    lines.append(f"::notice::{report.passed} of {len(report.checks)} capacity checks pass")
    return "".join(line + "\n" for line in lines)


def _place(report: CheckReport, verdict: Verdict) -> str:
    """Where an annotation points: the command in the deployment's file, else the expectation."""
    if verdict.deployment is not None:
        file, line, column = verdict.deployment
        return f"file={_property(file)},line={line},col={column}"
    return f"file={_property(report.path)},line={verdict.line},col={verdict.column}"


def _expected_at(report: CheckReport, verdict: Verdict) -> str:
    return f" ({report.path}:{verdict.line})" if verdict.deployment is not None else ""


def _data(text: str) -> str:
    return literal(text).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
