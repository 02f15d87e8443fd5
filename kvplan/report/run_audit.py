"""What `audit --trace` prints: a log of traffic beside a simulated run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvplan.report.tables import Screen, new_table
from kvplan.text import literal
from kvplan.units import format_count, format_seconds, format_share

if TYPE_CHECKING:
    from kvplan.jobs.run_audit import RunAudit

#: Lines of the log that are shown one by one; the rest lie between them.
_SHOWN = 12


def print_run_audit(screen: Screen, audit: RunAudit) -> None:
    """Figures over the whole log, then moments spread over it: theirs / ours."""
    lines = len(audit.moments)
    screen.say(
        f"{literal(audit.log)}: {lines:,} throughput lines; the trace begins "
        f"{format_seconds(audit.offset_s)} before the first"
    )
    table = new_table("term", "theirs", "ours", "apart at a line, mean")
    for term in audit.terms:
        values = (term.theirs, term.ours, term.mean_difference)
        table.add_row(
            term.term if term.unit != "tokens/s" else f"{term.term} a second",
            *map(format_share if term.unit == "share" else format_count, values),
        )
    screen.show(table)
    moments = new_table("time", "running", "waiting", "KV cache", "generated/s", "prompt/s")
    for moment in audit.moments[:: max(1, lines // _SHOWN)]:
        usage, ours = moment.kv_usage
        moments.add_row(
            format_seconds(moment.time_s),
            _pair(*moment.running),
            _pair(*moment.waiting),
            f"{'-' if usage is None else f'{100 * usage:.0f}'} / {100 * ours:.0f} %",
            _pair(*moment.generation_tokens_per_s),
            _pair(*moment.prompt_tokens_per_s),
        )
    screen.show(moments)
    screen.say("theirs / ours; tokens a second since the line before")


def _pair(theirs: float, ours: float) -> str:
    return f"{theirs:,.0f} / {ours:,.0f}"
