"""What `check` prints: a verdict on each expectation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from kvplan.report.tables import Screen, new_table
from kvplan.text import literal

if TYPE_CHECKING:
    from kvplan.jobs.check import CheckReport


def print_checks(screen: Screen, report: CheckReport) -> None:
    """Verdicts, a row for each expectation."""
    table = new_table("check", "expected", "is", "verdict")
    for check in report.checks:
        name = literal(check.name)
        for verdict in check.verdicts:
            table.add_row(
                name,
                literal(f"{verdict.figure} {verdict.expected}"),
                literal(verdict.actual_text),
                Text("pass", style="green") if verdict.passed else Text("FAIL", style="bold red"),
            )
            name = ""
    screen.show(table)
    for check in report.checks:
        # Of a check about a deployment, what is to be mended stands in another file.
        places = {v.deployment: v for v in check.verdicts if v.deployment and not v.passed}
        for (file, line, _), verdict in places.items():
            screen.say(
                f"{literal(check.name)}: see {literal(file)}:{line} ({literal(report.path)}:{verdict.line})"
            )
    screen.say(
        f"{report.passed} of {len(report.checks)} {'check passes' if len(report.checks) == 1 else 'checks pass'}"
    )
