"""What `audit` prints: an engine's figures beside ours."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from kvplan.report.tables import Screen, new_table
from kvplan.text import literal
from kvplan.units import format_bytes

if TYPE_CHECKING:
    from kvplan.jobs.audit import AuditLine, AuditResult


def print_audit(screen: Screen, result: AuditResult) -> None:
    """Their figures beside ours, and below the table why they differ."""
    log = result.log
    model = "model not known" if log.model is None else literal(log.model)
    ours = f", sized as {literal(result.sized.model.name)}" if result.sized else ""
    screen.say(f"{log.engine} {literal(log.version or '(version not known)')}: {model}{ours}")
    settings = ", ".join(f"{name} {literal(found.value)}" for name, found in sorted(log.settings.items()))
    if settings:
        screen.say(f"from the log: {settings}")
    table = new_table("term", "theirs", "ours", "difference", "line")
    for line in result.lines:
        table.add_row(
            line.term,
            _audit_figure(line.unit, line.theirs),
            _audit_figure(line.unit, line.ours),
            Text(_audit_difference(line), style="" if line.agrees is not False else "bold red"),
            str(line.line),
        )
    screen.show(table)
    if log.refusal is not None:
        screen.say(f"the engine gave up (line {log.refusal.line}): {literal(log.refusal.value)}")
    for line in result.lines:
        if line.likely_cause is not None and line.difference:
            screen.say(f"{line.term} (line {line.line}): {literal(line.likely_cause)}")
    estimates = [line.term for line in result.lines if line.agrees is None and line.ours is not None]
    if estimates:
        screen.say(f"ours are estimates, judged in their sum: {', '.join(estimates)}")
    compared = sum(line.agrees is not None for line in result.lines)
    if compared:
        agree = "terms agree" if compared > 1 else "term agrees"
        screen.say(f"{compared - result.differing} of {compared} {agree}")
    else:
        screen.say("no term can be compared")


def _audit_figure(unit: str, value: float | None) -> str:
    if value is None:
        return "-"
    if unit == "bytes":
        return format_bytes(int(value))
    if unit in ("times", "percent"):
        return f"{value:,.2f}{'x' if unit == 'times' else '%'}"
    return f"{value:,}"


def _audit_difference(line: AuditLine) -> str:
    """Theirs less ours; ``=`` where the printed text allows ours."""
    if line.difference is None or line.ours is None:
        return "-"
    if line.low is not None and line.high is not None and line.low <= line.ours <= line.high:
        return "="
    sign = "+" if line.difference > 0 else ""
    return f"{sign}{_audit_figure(line.unit, line.difference)}"
