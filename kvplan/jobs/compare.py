"""The job of `kvplan compare`: one trace through several engines or settings, side by side."""

from __future__ import annotations

import multiprocessing
import os
import shlex
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import closing, contextmanager
from dataclasses import dataclass, fields
from itertools import product
from math import prod
from typing import NamedTuple

from kvplan.errors import DoesNotFit, InputError, unknown_name
from kvplan.jobs.simulate import SimulateResult, Simulation
from kvplan.options import FOR_ALL_CASES, SimulateOptions, flag, json_value, read_option

Changes = Mapping[str, object]

_OPTIONS = tuple(item.name for item in fields(SimulateOptions))
#: More rows than a reader wants, and a slip of the hand is soon there.
_MOST_RUNS = 1000
#: Times that differ by less are as good as equal.
_ALIKE = 0.01
#: Figures that differ by less lead their column together.
_TIED = 0.001
#: Memory of which so much is taken is full.
_FULL = 0.9


class Column(NamedTuple):
    """A figure in which runs are compared: its path in the JSON document, and whether more of it is better."""

    path: str
    more_is_better: bool

    def of(self, result: SimulateResult) -> float | None:
        """The figure of a run; None: unknown."""
        value: object = result
        for part in self.path.split("."):
            value = getattr(value, part)
        assert value is None or isinstance(value, int | float), "a column is a number"
        return value


TOKEN_SHARE = Column("kv.token_share", more_is_better=True)
HOLES = Column("kv.external_fragmentation", more_is_better=False)
PREEMPTIONS = Column("preemptions.events", more_is_better=False)
RUNNING = Column("batch.running_mean", more_is_better=True)
WAITING = Column("batch.waiting_mean", more_is_better=False)
THROUGHPUT = Column("throughput.output_tokens_per_s", more_is_better=True)
TTFT = Column("latency.ttft_s.mean", more_is_better=False)
TPOT = Column("latency.tpot_s.mean", more_is_better=False)
E2E = Column("latency.e2e_s.mean", more_is_better=False)
HIT_RATE = Column("prefix_cache.hit_rate", more_is_better=True)
COLUMNS = (TOKEN_SHARE, HOLES, PREEMPTIONS, RUNNING, WAITING, THROUGHPUT, TTFT, TPOT, E2E, HIT_RATE)


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """A run: what was set for it alone, and what came of it.

    ``result`` is None where the engine would not start, for the reason in ``error``. ``differs_by`` says in a word why
    it is not the best, ``best`` which columns it leads.
    """

    changes: Changes
    result: SimulateResult | None
    error: DoesNotFit | None = None
    differs_by: str = ""
    best: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, object]:
        """An entry of ``runs``: the document of `simulate`, or the reason why there is none."""
        entry: dict[str, object] = {
            "changes": {name: json_value(value) for name, value in self.changes.items()},
            "differs_by": self.differs_by,
        }
        if self.result is None:
            return {**entry, "error": self.error.to_dict() if self.error else None}
        return {**entry, "best": list(self.best), **self.result.to_dict()}


@dataclass(frozen=True, slots=True)
class CompareResult:
    """Runs in the order asked for; those that were not finished when an interrupt came are left out."""

    trace: str
    varied: tuple[str, ...]
    runs: tuple[ComparedRun, ...]
    is_partial: bool = False

    @property
    def labels(self) -> list[str]:
        """What each run is called: its values if all set the same options, else these with the names of flags."""
        alike = all(tuple(run.changes) == self.varied for run in self.runs)
        return [
            " ".join(shown(v) if alike else f"{written(name)}={shown(v)}" for name, v in run.changes.items())
            for run in self.runs
        ]

    @property
    def is_done(self) -> bool:
        """Whether every engine started and none got stuck."""
        return all(run.result is not None and run.result.simulation["status"] != "stuck" for run in self.runs)

    def to_dict(self) -> dict[str, object]:
        """The JSON document without its version keys."""
        return {
            "trace": self.trace,
            "varied": list(self.varied),
            "status": "interrupted" if self.is_partial else "done",
            "runs": [run.to_dict() for run in self.runs],
        }


def compare(
    trace: str | os.PathLike[str],
    *,
    engines: Iterable[str] = (),
    vary: Mapping[str, Iterable[object]] | None = None,
    cases: Iterable[Changes] = (),
    jobs: int | None = None,
    **options: object,
) -> CompareResult:
    """Replay one trace for each engine and each combination of the varied settings, and for each case.

    ``jobs`` runs go on at once (the number of CPUs), each in a process of its own. ``options`` are the fields of
    `SimulateOptions` that all runs share. Raises `InputError` as `simulate` does; an engine that would not start is an
    entry with its reason.
    """
    named: list[object] = list(engines)
    varied = {"engine": named} if named else {}
    varied |= {name: list(values) for name, values in (vary or {}).items()}
    return compare_with(os.fspath(trace), SimulateOptions.of(options), combinations(varied, cases), jobs=jobs)


def compare_with(
    source: str,
    options: SimulateOptions,
    changes: Sequence[Changes],
    *,
    jobs: int | None = None,
    on_done: Callable[[int, int], None] | None = None,
) -> CompareResult:
    """Run ``options`` once with each of the ``changes``; ``on_done`` is told how many runs are done, of how many.

    An interrupt gives the runs that were finished. Raises `InputError` as `compare` does.
    """
    if source == "-":
        raise InputError(
            "standard input cannot be read several times", where="TRACE", hint="save the trace to a file"
        )
    if jobs is not None and not 0 < jobs <= _MOST_RUNS:
        raise InputError(
            f"{jobs} is out of range", where="--jobs", hint=f"write a number from 1 to {_MOST_RUNS:,}"
        )
    planned: list[_Planned] = [_planned(source, options, change) for change in changes]
    results = _run_all([item for item in planned if item.error is None], jobs or os.cpu_count() or 1, on_done)
    runs = [
        ComparedRun(item.changes, results.get(id(item)), item.error)
        for item in planned
        if item.error is not None or id(item) in results
    ]
    varied = tuple(dict.fromkeys(name for change in changes for name in change))
    return CompareResult(source, varied, _judged(runs), is_partial=len(runs) < len(planned))


# What to run


def combinations(vary: Mapping[str, Sequence[object]], cases: Iterable[Changes]) -> list[Changes]:
    """Every combination of the varied values, then the cases. Raises `InputError` where there is nothing to compare."""
    for name in (*vary, *(name for case in cases for name in case)):
        if name not in _OPTIONS:
            raise unknown_name("option", name, _OPTIONS)
    if prod(len(values) for values in vary.values()) > _MOST_RUNS:
        raise InputError(f"these are more than {_MOST_RUNS:,} runs", where="--vary", hint="vary less at once")
    found: list[Changes] = []
    if vary:
        found += [dict(zip(vary, values, strict=True)) for values in product(*vary.values())]
    found += cases
    if not found:
        raise InputError(
            "nothing to compare",
            where="kvplan compare",
            hint="give --engines vllm,orca-max, --vary block-size=8,16,32 or --case",
        )
    return found


def parse_vary(text: str) -> tuple[str, list[object]]:
    """``FLAG=v1,v2``: an option and its values. Raises `InputError`."""
    name, values = _assignment(text, "--vary")
    return name, [_value(name, value) for value in listed(values, "--vary")]


def listed(text: str, where: str) -> list[str]:
    """The parts of a list with commas; raises `InputError` if one is empty."""
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise InputError(f'"{text}" holds an empty value', where=where, hint="write VALUE or VALUE,VALUE")
    return parts


def parse_case(text: str) -> dict[str, object]:
    """``FLAG=v FLAG=v``: what is set for one run. Raises `InputError`."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise InputError(
            f'"{text}" cannot be read: {error}', where="--case", hint="close the quotes"
        ) from error
    pairs = [_assignment(word, "--case") for word in words]
    if not pairs:
        raise InputError("the case is empty", where="--case", hint='write "block-size=32 max-num-seqs=64"')
    return {name: _value(name, value) for name, value in pairs}


def _assignment(text: str, where: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    name = name.strip().removeprefix("--").replace("-", "_")
    if not equals or not value:
        raise InputError(
            f'"{text}" names no values', where=where, hint="write FLAG=VALUE, such as block-size=16"
        )
    if name not in _OPTIONS:
        raise unknown_name("flag", flag(name), map(flag, _OPTIONS), where=where)
    return name, value


def _value(name: str, text: str) -> object:
    return read_option(SimulateOptions, name, text.strip())


def written(name: str) -> str:
    """An option as `--vary` and `--case` name it: its flag without the dashes."""
    return flag(name).removeprefix("--")


def shown(value: object) -> str:
    """A value as it is written on the command line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


@dataclass(frozen=True, slots=True)
class _Planned:
    """A run whose settings are resolved; ``error``: the engine would not start."""

    source: str
    options: SimulateOptions
    origins: dict[str, str]
    changes: Changes
    error: DoesNotFit | None = None


def _planned(source: str, options: SimulateOptions, changes: Changes) -> _Planned:
    """The run with its own settings; a number of blocks follows the block size, so that the bytes stay."""
    origins = {name: FOR_ALL_CASES for name in _OPTIONS if getattr(options, name) is not None}
    merged = options.but({})
    try:
        for name, value in changes.items():
            merged.set_option(name, value)
            origins.pop(name, None)
        if "block_size" in changes and "num_gpu_blocks_override" not in changes:
            base = options.but({name: value for name, value in changes.items() if name != "block_size"})
            slots = _checked(source, base, origins).given_slots
            if slots is not None and merged.block_size:
                merged.num_gpu_blocks_override = max(1, slots // merged.block_size)
                origins["num_gpu_blocks_override"] = f"as many blocks as {slots:,} tokens fill"
        _checked(source, merged, origins)
    except DoesNotFit as error:
        return _Planned(source, merged, origins, changes, error)
    return _Planned(source, merged, origins, changes)


def _checked(source: str, options: SimulateOptions, origins: Mapping[str, str]) -> Simulation:
    """The run, for its settings only."""
    simulation = Simulation(source, options, origins)
    simulation.trace.close()
    return simulation


# Running


def _run_all(
    planned: Sequence[_Planned], jobs: int, on_done: Callable[[int, int], None] | None
) -> dict[int, SimulateResult]:
    """Results by the identity of what was planned; fewer than all after an interrupt."""
    results: dict[int, SimulateResult] = {}
    try:
        for item, result in _results(planned, min(jobs, len(planned))):
            if result.simulation["status"] == "interrupted":
                break
            results[id(item)] = result
            if on_done is not None:
                on_done(len(results), len(planned))
    except KeyboardInterrupt:
        pass  # what was finished is given; that it is not all is said
    return results


def _results(planned: Sequence[_Planned], jobs: int) -> Iterator[tuple[_Planned, SimulateResult]]:
    if jobs <= 1:
        for item in planned:
            yield item, _run(item)
        return
    with _processes(jobs) as pool:
        running: dict[Future[SimulateResult], _Planned] = {pool.submit(_run, item): item for item in planned}
        while running:
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                yield running.pop(future), future.result()


def _run(planned: _Planned) -> SimulateResult:
    simulation = Simulation(planned.source, planned.options, planned.origins)
    with closing(simulation.trace):  # an interrupt leaves it open
        return simulation.run()


@contextmanager
def _processes(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """Worker processes, which end with the block: at once if it is left early."""
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(jobs, initializer=_leave_signals_to_the_parent)
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in multiprocessing.active_children():
            if child not in others:
                child.terminate()
        raise
    pool.shutdown()


def _leave_signals_to_the_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


# Judging


def _judged(runs: Sequence[ComparedRun]) -> tuple[ComparedRun, ...]:
    """The runs, each with the columns that it leads and with why it differs from the fastest."""
    results = [run.result for run in runs if run.result is not None]
    leaders = {column.path: list(map(id, _leaders(column, results))) for column in COLUMNS}
    fastest = _fastest(results)
    judged = []
    for run in runs:
        if run.result is None or fastest is None:
            judged.append(ComparedRun(run.changes, None, run.error, "does not start"))
            continue
        best = tuple(path for path, leading in leaders.items() if id(run.result) in leading)
        judged.append(ComparedRun(run.changes, run.result, None, why(run.result, fastest), best))
    return tuple(judged)


def _leaders(column: Column, results: Sequence[SimulateResult]) -> list[SimulateResult]:
    """The runs with the best value of a column, or one as good; nobody where all are."""
    known = [(value, result) for result in results if (value := column.of(result)) is not None]
    if not known:
        return []
    values = [value for value, _ in known]
    best = max(values) if column.more_is_better else min(values)
    leaders = [result for value, result in known if abs(value - best) <= _TIED * abs(best)]
    return leaders if len(leaders) < len(known) else []


def _fastest(results: Sequence[SimulateResult]) -> SimulateResult | None:
    """The run that finished the largest share; of these the one with the shortest time, or the fewest waiting."""

    def rank(result: SimulateResult) -> tuple[float, ...]:
        known = [column.of(result) for column in (E2E, WAITING, PREEMPTIONS)]
        return (-result.finished_share, *(float("inf") if value is None else value for value in known))

    return min(results, key=rank, default=None)


def why(result: SimulateResult, fastest: SimulateResult) -> str:
    """In a word, what makes a run differ from the fastest.

    The longer time of a request is divided into waiting for admission, making good what preemptions threw away, and
    the steps themselves; the largest part names the cause.
    """
    if result is fastest:
        return "fastest"
    if result.simulation["status"] == "stuck":
        return "stuck"
    lacking = fastest.finished_share - result.finished_share
    if lacking > 0:
        return f"{max(1, round(lacking * result.requests.total)):,} fewer finished"
    slower, waiting, lost = _parts(result, fastest)
    if slower is None:
        return _why_without_a_clock(result, fastest)
    base = E2E.of(fastest) or 0
    if slower <= _ALIKE * base:
        return "as fast"
    steps = slower - waiting - lost
    if lost >= max(waiting, steps):
        return f"preempts: {result.preemptions.events:,}"
    if waiting >= steps:
        return f"waits: {_what_is_short(result)}"
    return "slower steps"


def _parts(result: SimulateResult, fastest: SimulateResult) -> tuple[float | None, float, float]:
    """How much longer a request takes on average, and what of it is waiting and what preemptions."""
    one, other = E2E.of(result), E2E.of(fastest)
    if one is None or other is None:
        return None, 0.0, 0.0
    waiting = (result.latency.queue_s.mean or 0) - (fastest.latency.queue_s.mean or 0)
    lost = _lost_s(result) - _lost_s(fastest)
    return one - other, waiting, lost


def _lost_s(result: SimulateResult) -> float:
    lost = result.seconds(result.causes.lost_ticks)
    return (lost or 0) / max(1, result.requests.finished)


def _what_is_short(result: SimulateResult) -> str:
    """What keeps others out: places in the batch, memory without tokens, memory full of them, or tokens of a step."""
    kv, seats = result.kv, result.config["max_num_seqs"].value
    assert isinstance(seats, int), "a number of sequences"
    if (result.batch.running_max or 0) >= seats and (kv.utilization.p95 or 0) < _FULL:
        return "seats"
    parts = {
        "reserved": kv.reserved_share or 0,
        "waste": kv.internal_fragmentation or 0,
        "holes": kv.external_fragmentation or 0,
    }
    name = max(parts, key=lambda part: parts[part])
    is_full = (kv.utilization.max or 0) >= _FULL
    if parts[name] >= 1 - _FULL and (is_full or name != "reserved"):
        return f"{100 * parts[name]:.0f} % {name}"
    return "full" if is_full else "prompts"


def _why_without_a_clock(result: SimulateResult, fastest: SimulateResult) -> str:
    more = (WAITING.of(result) or 0) - (WAITING.of(fastest) or 0)
    events = result.preemptions.events
    if events > fastest.preemptions.events:
        return f"preempts: {events:,}"
    if more > _ALIKE * max(1.0, WAITING.of(fastest) or 0):
        return f"waits: {_what_is_short(result)}"
    return "as fast"
