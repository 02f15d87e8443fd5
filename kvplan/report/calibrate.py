"""What `calibrate` prints: constants before and after, and the error that is left."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvplan.report.tables import Screen, new_table
from kvplan.text import literal
from kvplan.units import counted, format_seconds, format_share

if TYPE_CHECKING:
    from kvplan.jobs.calibrate import CalibrateResult, StepError


def print_calibration(screen: Screen, result: CalibrateResult) -> None:
    """The constants, which of them the measurements decided, and errors over the same steps."""
    models = ", ".join(map(literal, result.models))
    screen.say(f"{result.form}: {models} on {literal(result.gpu)}, {literal(result.engine)}")
    table = new_table("constant", "before", "after", "largest part of a step", "")
    for one in result.constants:
        table.add_row(
            one.name.replace("_", " ").removesuffix(" s"),
            _constant(one.name, one.before),
            _constant(one.name, one.after),
            format_share(one.part) if result.after else "-",
            "fitted" if one.fitted else "held",
        )
    screen.show(table)
    for reason, count in result.left_out.items():
        screen.say(f"not used: {count:,} {reason}")
    if result.before is not None and result.after is not None:
        screen.say(f"before ({literal(result.started_from)}): {_error(result.before)}")
        screen.say(f"after: {_error(result.after)}")
        screen.say(
            f"nine steps of ten take {result.after.low:.3f} to {result.after.high:.3f} times the estimate"
        )


def _constant(name: str, value: float) -> str:
    return format_share(value) if name.endswith("_share") else format_seconds(value)


def _error(error: StepError) -> str:
    return (
        f"median error {format_share(error.median)}, 95th percentile {format_share(error.p95)} "
        f"over {counted(error.count, 'step')}"
    )
