"""The job of `kvplan audit LOG --trace TRACE`: what an engine logged while it served, beside a simulated run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Literal, NamedTuple

from kvplan.core.course import Course, Moment
from kvplan.core.request import PICOSECONDS
from kvplan.errors import InputError
from kvplan.jobs.audit import model_named_in, with_settings_of
from kvplan.jobs.calibrate import start_of
from kvplan.jobs.simulate import SimulateResult, Simulation
from kvplan.measurements import read_measurements
from kvplan.options import SimulateOptions
from kvplan.startup_log import StartupLog
from kvplan.throughput_log import ThroughputLine

#: The trace may begin at any moment of the first interval: so many are tried.
_TRIED_OFFSETS = 40

Unit = Literal["share", "count", "tokens/s"]


class LoggedMoment(NamedTuple):
    """One line of the log and the simulated run at the same moment; rates are means since the line before."""

    time_s: float
    running: tuple[float, float]
    waiting: tuple[float, float]
    kv_usage: tuple[float | None, float]
    generation_tokens_per_s: tuple[float, float]
    prompt_tokens_per_s: tuple[float, float]


@dataclass(frozen=True, slots=True)
class RunTerm:
    """A figure over the whole log: as logged, as simulated, and how far they are apart at a line, on the mean."""

    term: str
    unit: Unit
    theirs: float | None
    ours: float | None
    mean_difference: float | None


@dataclass(frozen=True, slots=True)
class RunAudit:
    """A log of traffic beside a simulated run. The trace begins ``offset_s`` before the first line."""

    log: str
    result: SimulateResult
    offset_s: float
    terms: tuple[RunTerm, ...]
    moments: tuple[LoggedMoment, ...]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, object]:
        """The JSON document without its version keys."""
        names = LoggedMoment._fields[1:]
        return {
            "log": self.log,
            "offset_s": self.offset_s,
            "terms": [asdict(term) for term in self.terms],
            "moments": [
                {
                    "time_s": moment.time_s,
                    **{
                        name: {"theirs": theirs, "ours": ours}
                        for name, (theirs, ours) in zip(names, moment[1:], strict=True)
                    },
                }
                for moment in self.moments
            ],
            "simulation": self.result.to_dict(),
            "notes": list(self.notes),
        }


def run_audit(log: str, trace: str, options: SimulateOptions) -> RunAudit:
    """Replay the trace with the log's settings, and lay its throughput lines beside the run.

    Options that are given go before what the log says. Raises `InputError` for a log without throughput lines, and for
    wrong input.
    """
    measured = read_measurements(Path(log))
    if not measured.lines:
        raise InputError(
            "the log has no throughput lines",
            where=measured.name,
            hint="vLLM prints them every 10 s (Avg prompt throughput: ...) unless --disable-log-stats is set",
        )
    notes: list[str] = []
    start = start_of(measured)
    if start is not None:
        options = with_settings_of(start, options, notes)
        if options.model is None:
            options.model = model_named_in(start, options, notes)
        options = _with_pool_of(start, options)
    simulation = Simulation(trace, options)
    if simulation.seconds_per_tick is None:
        raise InputError("step-numbered arrivals have no seconds", where="--trace", hint="give another trace")
    course = Course(simulation.usable_blocks)
    result = simulation.run(turns=[course])
    offset = _best_offset(measured.lines, course, simulation.usable_blocks)
    moments = tuple(_moments(measured.lines, course, offset, simulation.usable_blocks))
    return RunAudit(
        log=measured.name,
        result=result,
        offset_s=offset,
        terms=tuple(_terms(measured.lines, moments, result)),
        moments=moments,
        notes=(*notes, *result.warnings),
    )


def _with_pool_of(log: StartupLog, options: SimulateOptions) -> SimulateOptions:
    """The options with the number of blocks that the log prints, if it prints one and none is given."""
    blocks = log.least("num_gpu_blocks")
    if blocks is None or options.num_gpu_blocks_override is not None:
        return options
    return replace(options, num_gpu_blocks_override=int(blocks.value))


def _best_offset(lines: Sequence[ThroughputLine], course: Course, usable_blocks: int) -> float:
    """Seconds from the trace's first arrival to the first line, with which queues and percents of the pool agree best.

    A log does not say when the first request of its first interval came.
    """
    longest = max(lines[0].interval_s, 1.0)

    def apart(offset: float) -> float:
        total = 0.0
        for line in lines:
            state = _at(course, offset + line.time_s)
            total += abs(line.running - state.running) + abs(line.waiting - state.waiting)
            if line.kv_usage is not None:
                total += 100 * abs(line.kv_usage - state.used_blocks / usable_blocks)
        return total

    return min((longest * step / _TRIED_OFFSETS for step in range(_TRIED_OFFSETS + 1)), key=apart)


def _at(course: Course, time_s: float) -> Moment:
    return course.at(round(time_s * PICOSECONDS))


def _moments(
    lines: Sequence[ThroughputLine], course: Course, offset: float, usable_blocks: int
) -> list[LoggedMoment]:
    moments = []
    for line in lines:
        now = offset + line.time_s
        state, before = _at(course, now), _at(course, now - line.interval_s)
        moments.append(
            LoggedMoment(
                time_s=now,
                running=(line.running, state.running),
                waiting=(line.waiting, state.waiting),
                kv_usage=(line.kv_usage, state.used_blocks / usable_blocks),
                generation_tokens_per_s=(
                    line.generation_tokens_per_s,
                    (state.generated - before.generated) / line.interval_s,
                ),
                prompt_tokens_per_s=(
                    line.prompt_tokens_per_s,
                    (state.computed - before.computed) / line.interval_s,
                ),
            )
        )
    return moments


def _terms(
    lines: Sequence[ThroughputLine], moments: Sequence[LoggedMoment], result: SimulateResult
) -> list[RunTerm]:
    terms: list[RunTerm] = []
    figures: tuple[tuple[str, Unit, str], ...] = (
        ("running", "count", "running"),
        ("waiting", "count", "waiting"),
        ("KV cache usage", "share", "kv_usage"),
        ("generated tokens", "tokens/s", "generation_tokens_per_s"),
        ("prompt tokens", "tokens/s", "prompt_tokens_per_s"),
    )
    for name, unit, field in figures:
        pairs = [pair for moment in moments if (pair := getattr(moment, field))[0] is not None]
        for label, pick in (("mean", fmean), ("most", max)):
            terms.append(_term(f"{name}, {label}", unit, pairs, pick))
    hit_rates = [line.hit_rate for line in lines if line.hit_rate is not None]
    if hit_rates:
        terms.append(
            RunTerm("prefix cache hit rate", "share", hit_rates[-1], result.prefix_cache.hit_rate, None)
        )
    told = [line.preemptions for line in lines if line.preemptions is not None]
    theirs = float(told[-1]) if told else None
    terms.append(RunTerm("preemptions", "count", theirs, float(result.preemptions.events), None))
    return terms


def _term(
    name: str, unit: Unit, pairs: Sequence[tuple[float, float]], pick: Callable[[Sequence[float]], float]
) -> RunTerm:
    if not pairs:
        return RunTerm(name, unit, None, None, None)
    apart = fmean([abs(theirs - ours) for theirs, ours in pairs])
    return RunTerm(
        name, unit, pick([theirs for theirs, _ in pairs]), pick([ours for _, ours in pairs]), apart
    )
