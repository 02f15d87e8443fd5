"""The job of `kvplan check`: figures of `size` and `simulate` held against a file of expectations."""

from __future__ import annotations

import difflib
import operator
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard

from kvplan.errors import DoesNotFit, InputError, KvplanError, unknown_name
from kvplan.jobs.simulate import Simulation
from kvplan.jobs.size import size_with
from kvplan.options import (
    DEFAULT_OF_CHECK,
    DEFAULTS_OF_FILE,
    ServingOptions,
    SimulateOptions,
    SizeOptions,
    parse_engine,
)
from kvplan.safe_yaml import Node, Place, read_yaml
from kvplan.units import parse_size

if TYPE_CHECKING:
    from kvplan.vllm_command import VllmCommand

SHORT_NAMES = {
    "fits": "capacity.fits",
    "headroom": "capacity.headroom_share",
    "max_concurrency": "capacity.max_concurrency",
    "concurrent_sequences": "capacity.concurrent_sequences",
    "kv_cache_tokens": "capacity.kv_cache_tokens",
    "preemption_events": "preemptions.events",
    "preempted_requests": "preemptions.requests",
    "kv_utilization_mean": "kv.utilization.mean",
    "kv_utilization_p95": "kv.utilization.p95",
    "kv_utilization_max": "kv.utilization.max",
    "prefix_hit_rate": "prefix_cache.hit_rate",
    "token_share": "kv.token_share",
    "rejected_requests": "requests.rejected",
    "throughput_requests_per_s": "throughput.requests_per_s",
    **{
        f"{latency}_{figure}_s": f"latency.{latency}_s.{figure}"
        for latency in ("ttft", "tpot", "itl", "e2e", "queue")
        for figure in ("mean", "p50", "p90", "p95", "p99")
    },
}

#: Figures that depend on the estimated time of a step.
_TIME_FIGURES = ("latency.", "throughput.", "goodput.", "duration_s")

_COMPARISONS: Mapping[str, Callable[[float, float], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}
_EXPECTATION = re.compile(r"\s*(==|!=|<=|>=|<|>)?\s*(.+?)\s*\Z")
_TOP_KEYS = ("version", "engine", "defaults", "checks")
_OWN_KEYS = frozenset(
    {"name", "expect", "model", "trace", "vllm_command", "from", "ignore_flags", "allow_uncalibrated"}
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """One expectation and what the figure is. ``line`` and ``column`` are its place in the file, from 1.

    ``deployment`` is the place of the vLLM command that the check is about, if it is read from a file.
    """

    figure: str
    expected: str
    actual: object
    passed: bool
    line: int
    column: int
    reason: str | None = None
    deployment: Place | None = None

    @property
    def actual_text(self) -> str:
        """The figure as a reader wants it."""
        if self.reason is not None:
            return self.reason
        if isinstance(self.actual, float):
            return f"{self.actual:.6g}"
        return "unknown" if self.actual is None else _text(self.actual)


@dataclass(frozen=True, slots=True)
class CheckResult:
    """A check with the verdicts on all it expects, and what its figures are said with."""

    name: str
    line: int
    verdicts: tuple[Verdict, ...]
    warnings: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether every expectation holds."""
        return all(verdict.passed for verdict in self.verdicts)


@dataclass(frozen=True, slots=True)
class CheckReport:
    """All checks of a file, in its order."""

    path: str
    checks: tuple[CheckResult, ...]

    @property
    def passed(self) -> int:
        """How many checks pass."""
        return sum(1 for check in self.checks if check.passed)

    @property
    def all_passed(self) -> bool:
        """Whether none fails."""
        return self.passed == len(self.checks)

    def to_dict(self) -> dict[str, object]:
        """The JSON document without its version keys."""
        return {
            "file": self.path,
            "passed": self.passed,
            "failed": len(self.checks) - self.passed,
            "checks": [
                {
                    "name": check.name,
                    "line": check.line,
                    "passed": check.passed,
                    "warnings": list(check.warnings),
                    "verdicts": [
                        {
                            "figure": v.figure,
                            "expected": v.expected,
                            "actual": v.actual,
                            "passed": v.passed,
                            "line": v.line,
                            "column": v.column,
                            "reason": v.reason,
                            "deployment": v.deployment and v.deployment._asdict(),
                        }
                        for v in check.verdicts
                    ],
                }
                for check in self.checks
            ],
        }


def check(path: str) -> CheckReport:
    """Run every check of a file. Raises `InputError` with line and column where the file is wrong.

    The whole file is read and checked for what it alone can tell before the first check runs.
    """
    return CheckReport(path, tuple(planned.run() for planned in read_checks(path)))


def read_checks(path: str) -> list[PlannedCheck]:
    """The checks of a file, each ready to run; models and traces are looked up when it does."""
    root = read_yaml(Path(path))
    document = root.mapping("the check file")
    for key, node in document.items():
        if key not in _TOP_KEYS:
            raise _unknown_key(key, _TOP_KEYS, node)
    version = document.get("version")
    if version is None or type(version.value()) is not int or version.value() != 1:
        place = (version or root).place
        raise InputError("version is not 1", where=str(place), hint="write version: 1 on top")
    engine = document.get("engine")
    if engine is None:
        raise InputError(
            "engine is missing: a newer kvplan must not change a verdict",
            where=str(root.place),
            hint="write engine: vllm@0.33",
        )
    # Of other engines there is one set of rules, so their name says all.
    if not isinstance(engine.value(), str) or str(engine.value()).strip() in ("", "vllm"):
        raise InputError(
            f'engine is "{engine.value()}", without a version',
            where=str(engine.place),
            hint="write vllm@0.33",
        )
    with _at(engine.place):
        parse_engine(str(engine.value()))
    defaults = document["defaults"].mapping("defaults") if "defaults" in document else {}
    known = _option_names(SizeOptions) | _option_names(SimulateOptions)
    for key, node in defaults.items():
        if key not in known | {"allow_uncalibrated"}:
            raise _unknown_key(key, known, node)
    checks = document.get("checks")
    entries = checks.sequence("checks") if checks is not None else []
    if not entries:
        raise InputError(
            "there is no check", where=str((checks or root).place), hint="write a list under checks:"
        )
    return [_plan(entry, i, defaults, str(engine.value()), Path(path)) for i, entry in enumerate(entries, 1)]


@contextmanager
def _at(place: Place) -> Iterator[None]:
    """Move errors to a place in the check file."""
    try:
        yield
    except KvplanError as error:
        inner = f", {error.where}" if error.where else ""
        raise type(error)(error.what, where=f"{place}{inner}", hint=error.hint) from error


@dataclass(frozen=True, slots=True)
class _Expectation:
    figure: str
    path: str
    text: str
    holds: Callable[[object], bool]
    place: Place
    is_text: bool


@dataclass(frozen=True, slots=True)
class PlannedCheck:
    """A check that was read: what to compute and what to expect of it."""

    name: str
    place: Place
    subject: str
    options: SizeOptions | SimulateOptions
    origins: Mapping[str, str]
    expectations: tuple[_Expectation, ...]
    allow_uncalibrated: bool = False
    command: VllmCommand | None = None
    deployment_file: str | None = None

    def run(self) -> CheckResult:
        """Compute the figures and judge them.

        An engine that would not start, or a run that got stuck, fails every expectation but ``fits: false``.
        """
        warnings: tuple[str, ...] = ()
        try:
            with _at(self.place):
                document, warnings = self._document()
        except DoesNotFit as answer:
            verdicts = tuple(self._judge_refusal(e, answer.what) for e in self.expectations)
        else:
            verdicts = tuple(self._judge(e, document) for e in self.expectations)
        return CheckResult(self.name, self.place.line, verdicts, warnings)

    def _document(self) -> tuple[Mapping[str, object], tuple[str, ...]]:
        """The figures, and the warnings that came with them."""
        if isinstance(self.options, SimulateOptions):
            simulation = Simulation(self.subject, self.options, self.origins)
            self._refuse_uncalibrated(simulation)
            result = simulation.run()
            if result.simulation["status"] == "interrupted":
                raise KeyboardInterrupt  # figures of a part are no ground for a verdict
            if result.simulation["status"] == "stuck":
                raise DoesNotFit(f"the run got stuck: {result.simulation['reason']}")
            return result.to_dict(), result.warnings
        sized = size_with(self.subject, self.options, self.origins, seq_sets_length=self.command is None)
        return sized.to_dict(), sized.warnings

    def _refuse_uncalibrated(self, simulation: Simulation) -> None:
        """Refuse figures of time where the calibration does not hold, which only its deployment tells."""
        if self.allow_uncalibrated or simulation.is_calibrated:
            return
        for expectation in self.expectations:
            if expectation.path.startswith(_TIME_FIGURES):
                simulation.trace.close()
                raise InputError(
                    f"{expectation.figure} depends on step times, which are not calibrated here: "
                    + "; ".join(simulation.calibration_warnings),
                    hint="give another calibration, or add allow_uncalibrated: true to the check",
                )

    def _judge(self, expectation: _Expectation, document: Mapping[str, object]) -> Verdict:
        value = _find(document, expectation)
        if expectation.is_text and isinstance(value, bool | int | float):
            raise InputError(
                f'{expectation.figure} is {_text(value)}, which cannot be compared with "{expectation.text}"',
                where=str(expectation.place),
                hint='write a comparison such as ">= 5%", or true',
            )
        return Verdict(
            expectation.figure,
            expectation.text,
            value,
            value is not None and expectation.holds(value),
            expectation.place.line,
            expectation.place.column,
            deployment=self._deployment,
        )

    @property
    def _deployment(self) -> Place | None:
        return self.command.place if self.command is not None else None

    def _judge_refusal(self, expectation: _Expectation, reason: str) -> Verdict:
        return Verdict(
            expectation.figure,
            expectation.text,
            None,
            expectation.path == "capacity.fits" and expectation.holds(False),
            expectation.place.line,
            expectation.place.column,
            reason,
            self._deployment,
        )


def _plan(entry: Node, number: int, defaults: Mapping[str, Node], engine: str, path: Path) -> PlannedCheck:
    """A check that was written as the ``number``-th of the file, its options and command put together."""
    given = entry.mapping(f"check {number}")
    name = str(given["name"].value()) if "name" in given else f"check {number}"
    simulates = "trace" in given and not _expects_distribution(given)
    kind: type[SizeOptions | SimulateOptions] = SimulateOptions if simulates else SizeOptions
    known = _option_names(kind) | _OWN_KEYS
    for key, node in given.items():
        if key not in known:
            raise _unknown_key(key, known, node)
    options = kind(engine=engine)
    origins = {"engine": "check file"}
    command = _command(given, path)
    subject = _subject(given, defaults, command, entry, path)
    if isinstance(options, SimulateOptions):
        options.model, subject = subject, _beside(path, str(given["trace"].value()))
    own = {key: node for key, node in given.items() if key not in _OWN_KEYS}
    _fill(options, own, origins, "check file")
    if command is not None:
        with _at(given["from" if "from" in given else "vllm_command"].place):
            command.fill(options, origins)
    # As a default, concurrency is of sizing: it would make every trace a closed loop.
    not_asked = {*origins, *_OWN_KEYS, *(["concurrency"] if simulates else [])}
    _fill(
        options,
        {k: n for k, n in defaults.items() if k not in not_asked},
        origins,
        DEFAULTS_OF_FILE,
    )
    if isinstance(options, SizeOptions) and "trace" in given:
        options.trace = _beside(path, str(given["trace"].value()))
        origins["trace"] = "check file"
    if options.calibration is not None:
        options.calibration = _beside(path, options.calibration)
    if options.margin is None:
        options.margin = "high"  # a check errs on the safe side
        origins["margin"] = DEFAULT_OF_CHECK
    asked = given.get("allow_uncalibrated", defaults.get("allow_uncalibrated"))
    allow_uncalibrated = asked is not None and asked.value() is True
    expectations = _expectations(
        given,
        name,
        entry.place,
        allow_time=allow_uncalibrated,
        calibration=options.calibration,
    )
    return PlannedCheck(
        name,
        entry.place,
        subject or "",
        options,
        origins,
        expectations,
        allow_uncalibrated,
        command,
        _deployment_file(given, path),
    )


def _command(given: Mapping[str, Node], path: Path) -> VllmCommand | None:
    """The vLLM command that a check names, as text or in a file."""
    if "vllm_command" in given and "from" in given:
        raise InputError(
            "vllm_command and from both give a command",
            where=str(given["from"].key_place),
            hint="keep one of them",
        )
    ignored = (
        [str(n.value()) for n in given["ignore_flags"].sequence("ignore_flags")]
        if "ignore_flags" in given
        else []
    )
    if "vllm_command" in given:
        from kvplan.vllm_command import read_command

        node = given["vllm_command"]
        with _at(node.place):
            return read_command(str(node.value()), ignored_flags=ignored)
    file = _deployment_file(given, path)
    if file is None:
        return None
    from kvplan.deployments import read_deployment

    node = given["from"]
    fragment = str(node.value()).partition("#")[2]
    with _at(node.place):
        if file == "-":
            raise InputError("a check reads no standard input", hint="write from: FILE")
        return read_deployment(f"{file}#{fragment}" if fragment else file, ignored_flags=ignored)


def _deployment_file(given: Mapping[str, Node], path: Path) -> str | None:
    """The file that ``from`` names, as seen from the working folder."""
    if "from" not in given:
        return None
    name = str(given["from"].value()).partition("#")[0]
    return name if name == "-" else os.path.normpath(path.parent / name)


def _expects_distribution(given: Mapping[str, Node]) -> bool:
    """Whether a check of a trace asks how many of its sequences are resident: that is sized, not simulated."""
    expected = given["expect"].mapping("expect") if "expect" in given else {}
    return any(figure.startswith("capacity.distribution.") for figure in expected)


def _subject(
    given: Mapping[str, Node],
    defaults: Mapping[str, Node],
    command: VllmCommand | None,
    entry: Node,
    path: Path,
) -> str | None:
    """The model that a check is about; None for a simulation that names none."""
    if "model" in given:
        if "vllm_command" in given:
            raise InputError(
                "model and vllm_command both name a model",
                where=str(given["model"].place),
                hint="keep one of them",
            )
        return _beside(path, str(given["model"].value()))
    if command is not None:
        if "model" in command.unread:
            with _at(given["from"].place):
                raise command.unread["model"]
        return command.model
    if "model" in defaults:
        return _beside(path, str(defaults["model"].value()))
    if "trace" not in given:
        raise InputError(
            "no model is named", where=str(entry.place), hint="write model: NAME, vllm_command: or from:"
        )
    return None


def _beside(check_file: Path, name: str) -> str:
    """A path relative to the check file if there is one, else the name as it is."""
    candidate = check_file.parent / name
    return str(candidate) if not Path(name).is_absolute() and candidate.exists() else name


def _fill(options: ServingOptions, given: Mapping[str, Node], origins: dict[str, str], origin: str) -> None:
    known = _option_names(type(options))
    for key, node in given.items():
        if key in known:
            value = node.value()
            with _at(node.place):
                options.set_option(key, value)
            origins[key] = origin


def _option_names(kind: type[ServingOptions]) -> frozenset[str]:
    return frozenset(item.name for item in fields(kind)) - {"engine"}


def _unknown_key(key: str, known: frozenset[str] | tuple[str, ...], node: Node) -> InputError:
    return unknown_name("key", key, known, where=str(node.key_place))


# Expectations


def _expectations(
    given: Mapping[str, Node], name: str, place: Place, *, allow_time: bool, calibration: str | None
) -> tuple[_Expectation, ...]:
    """What the check ``name`` at ``place`` expects; raises `InputError` if that is nothing."""
    if "expect" not in given:
        raise InputError(
            f'check "{name}" expects nothing', where=str(place), hint="write expect: {fits: true}"
        )
    expectations = tuple(
        _expectation(figure, node, allow_time=allow_time, calibration=calibration)
        for figure, node in given["expect"].mapping("expect").items()
    )
    if not expectations:
        raise InputError(
            f'check "{name}" expects nothing', where=str(given["expect"].place), hint="name a figure"
        )
    return expectations


def _expectation(figure: str, node: Node, *, allow_time: bool, calibration: str | None) -> _Expectation:
    path = SHORT_NAMES.get(figure, figure)
    if path.startswith(_TIME_FIGURES) and not allow_time and not _has_step_times(calibration):
        raise InputError(
            f"{figure} depends on step times, which are not calibrated",
            where=str(node.key_place),
            hint="add allow_uncalibrated: true to the check to use it all the same"
            + (" (its calibration holds memory, no step times)" if calibration is not None else ""),
        )
    value = node.value()
    if not isinstance(value, bool | int | float | str):
        raise InputError(
            f"{figure} is held against no single value", where=str(node.place), hint='write ">= 5%" or true'
        )
    holds, is_text = _test(value, node.place)
    return _Expectation(figure, path, _text(value), holds, node.key_place, is_text)


def _has_step_times(calibration: str | None) -> bool:
    """Whether the file of a calibration holds what steps took."""
    if calibration is None:
        return False
    from kvplan.calibration import load_calibration  # only such checks need it

    return load_calibration(Path(calibration)).step_times is not None


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _test(value: bool | float | str, place: Place) -> tuple[Callable[[object], bool], bool]:
    """The test that a value or a text such as ``>= 5%`` stands for, and whether it is one of plain text."""
    if isinstance(value, bool):
        return (lambda actual: actual is value), False
    if isinstance(value, int | float):
        return (lambda actual: _is_number(actual) and actual == value), False
    match = _EXPECTATION.match(value)
    sign, operand = (match.group(1), match.group(2)) if match else (None, value)
    if operand in ("true", "false") and sign in ("==", "!=", None):
        wanted = (operand == "true") is (sign != "!=")
        return (lambda actual: actual is wanted), False
    number = _number(operand, place, required=sign not in (None, "==", "!="))
    if number is None:
        return (lambda actual: (actual == operand) is (sign != "!=") and isinstance(actual, str)), True
    compare = _COMPARISONS[sign or "=="]
    return (lambda actual: _is_number(actual) and compare(actual, number)), False


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(text: str, place: Place, *, required: bool) -> float | None:
    """A number, a percentage or a size; None for other text."""
    if match := re.fullmatch(r"([-+]?[0-9][0-9_,]*(?:\.[0-9]+)?(?:[eE][-+]?[0-9]{1,3})?)\s*(%?)", text):
        value = Decimal(match.group(1).replace(",", "").replace("_", ""))
        if match.group(2):
            value /= 100
        return int(value) if value == value.to_integral_value() and abs(value) < 10**18 else float(value)
    if re.fullmatch(r"[0-9.]+\s*[A-Za-z]+", text):
        return parse_size(text, where=str(place))
    if required:
        raise InputError(
            f'"{text}" is no number', where=str(place), hint='write ">= 5%", "<= 0.9" or "< 20GiB"'
        )
    return None


def _find(document: Mapping[str, object], expectation: _Expectation) -> object:
    """The figure at a dotted path; raises `InputError` with near ones if there is none."""
    value: object = document
    for key in expectation.path.split("."):
        if isinstance(value, Mapping) and key in value:
            value = value[key]
        elif isinstance(value, list | tuple) and key.isdigit() and int(key) < len(value):
            value = value[int(key)]
        else:
            raise _unknown_figure(document, expectation)
    if isinstance(value, Mapping | list | tuple):
        raise _unknown_figure(document, expectation)
    return value


def _unknown_figure(document: Mapping[str, object], expectation: _Expectation) -> InputError:
    if expectation.path.startswith("capacity.") and "capacity" not in document and "weights" in document:
        return InputError(
            f"{expectation.figure} needs a memory budget",
            where=str(expectation.place),
            hint="write gpu: NAME",
        )
    paths = _paths(document, "")
    near = difflib.get_close_matches(expectation.figure, [*SHORT_NAMES, *paths], n=3, cutoff=0.4)
    return InputError(
        f'this check has no figure "{expectation.figure}"',
        where=str(expectation.place),
        hint=f"did you mean {' or '.join(near)}?" if near else "use a dotted path of the JSON document",
    )


def _paths(value: object, prefix: str) -> Iterator[str]:
    """The dotted paths of a document's figures; lists have too many to name."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _paths(inner, f"{prefix}{key}.")
    elif not isinstance(value, list | tuple):
        yield prefix.removesuffix(".")
