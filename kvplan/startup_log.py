"""Reading an engine's start-up log: engine, version, model, settings, and every memory figure that it printed.

The log is read once, line by line, in bounded memory. `kvplan.log_lines` holds what the lines look like; here is
decided which lines belong together. Prefixes of docker, kubectl, journald, Ray and loggers need no list: what stands
before a message is its prefix as long as it is short and quotes nothing: a prompt in a request log is no figure.
"""

from __future__ import annotations

import json
import re
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from io import BufferedReader, RawIOBase, TextIOWrapper
from typing import BinaryIO, NamedTuple, TextIO, cast

from kvplan.errors import InputError, unreadable
from kvplan.inputs import open_input
from kvplan.log_lines import CONFIG_NAMES, LOADER, RULES, Engine, Rule, Unit, bracket
from kvplan.options import ServingOptions
from kvplan.python_repr import read_fields

#: The longest line that is read in full: a printed configuration has some 20,000 characters.
_MAX_LINE = 1 << 18
#: The longest message without a configuration, with its prefix.
_MAX_MESSAGE = 4096
#: The longest prefix of a message; a progress bar on the same line counts as one.
_MAX_PREFIX = 600
#: Figures kept of one start: 256 ranks with some thirty each are 8,000.
_MAX_FIGURES = 20_000
_MAX_TEXT = 400

#: Figures without which no start has come to its KV cache.
_POOL = frozenset({"kv_memory", "kv_cache_tokens", "num_gpu_blocks", "kv_buffer"})


#: Figures that are printed before the line that says that a model is loaded.
_BEFORE_LOADING = frozenset({"gpu_free", "kv_estimate", "weights_estimate", "compute_estimate"})


class Found(NamedTuple):
    """A value and the line that it was read from."""

    value: object
    line: int


class Figure(NamedTuple):
    """A printed figure, in the unit that ``unit`` names: whole bytes, tokens, blocks or counts, or a float.

    ``low`` to ``high`` is what the printed text allows for the value that was rounded. ``worker`` is the process,
    rank or device that the line names, None if it names none.
    """

    name: str
    value: int | float
    low: int | float
    high: int | float
    unit: Unit
    line: int
    worker: str | None
    text: str

    def allows(self, value: float) -> bool:
        """Whether this value would have been printed so."""
        return self.low <= value <= self.high

    def to_dict(self) -> dict[str, object]:
        """The JSON form."""
        return self._asdict()


@dataclass(slots=True)
class StartupLog:
    """One start of an engine as its log tells it.

    ``settings`` have the names of `kvplan.options.ServingOptions`, ``own_settings`` those of the engine; ``shape``
    is what llama.cpp prints of the model's parameters. ``refusal`` is the line in which the engine gave up.
    """

    name: str
    engine: Engine
    line: int
    version: str | None = None
    model: str | None = None
    settings: dict[str, Found] = field(default_factory=dict)
    own_settings: dict[str, Found] = field(default_factory=dict)
    shape: dict[str, Found] = field(default_factory=dict)
    figures: list[Figure] = field(default_factory=list)
    refusal: Found | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """Whether the engine came to its KV cache, or to its refusal."""
        return self.refusal is not None or any(figure.name in _POOL for figure in self.figures)

    def all(self, name: str) -> list[Figure]:
        """The figures of a name in the log's order; those of other ranks and devices too."""
        return [figure for figure in self.figures if figure.name == name]

    def last(self, name: str) -> Figure | None:
        """The figure of a name that was printed last."""
        found = self.all(name)
        return found[-1] if found else None

    def least(self, name: str) -> Figure | None:
        """The smallest of each worker's last figures: the rank that limits all."""
        return min(self.by_worker(name).values(), key=lambda figure: figure.value, default=None)

    def most(self, name: str) -> Figure | None:
        """The largest of each worker's last figures: the rank that has least left."""
        return max(self.by_worker(name).values(), key=lambda figure: figure.value, default=None)

    def by_worker(self, name: str) -> dict[str | None, Figure]:
        """Each worker's last figure of a name."""
        return {figure.worker: figure for figure in self.all(name)}

    def to_dict(self) -> dict[str, object]:
        """The JSON form."""
        return {
            "name": self.name,
            "engine": self.engine,
            "version": self.version,
            "model": self.model,
            "settings": {name: found._asdict() for name, found in sorted(self.settings.items())},
            "own_settings": {name: found._asdict() for name, found in sorted(self.own_settings.items())},
            "shape": {name: found._asdict() for name, found in sorted(self.shape.items())},
            "figures": [figure.to_dict() for figure in self.figures],
            "refusal": self.refusal._asdict() if self.refusal else None,
            "notes": list(self.notes),
        }


def read_log(lines: Iterable[str], name: str) -> StartupLog:
    """The last start in a log that came to its KV cache, or to a refusal; else the last one with any figure.

    ``name`` names the log in errors and notes. Raises `InputError` if the lines are no start-up log that is known.
    """
    reader = _Reader(name)
    number = 0
    for number, line in enumerate(lines, start=1):
        reader.read(number, line)
    if number == 0:
        raise InputError("the log is empty", where=name, hint="give the engine's output from its start on")
    return reader.result()


def read_log_file(source: str) -> StartupLog:
    """`read_log` of a file, or of standard input for ``-``. Bytes that are no UTF-8 do not matter.

    Raises `InputError` as `read_log` does, and where the file cannot be read.
    """
    name = "standard input" if source == "-" else source
    try:
        with (
            open_input(source) as file,
            _text(file) as text,
        ):
            return read_log(_bounded_lines(text), name)
    except OSError as error:
        raise unreadable(
            error,
            what="the log",
            where=name[:200],
            hint="give a file that exists and can be read, or - for standard input",
        ) from error


def _text(file: BinaryIO) -> TextIO:
    """UTF-8, or UTF-16 where the file says so: some shells write that."""
    buffer = file if isinstance(file, BufferedReader) else BufferedReader(cast("RawIOBase", file))
    marks = (BOM_UTF16_LE, BOM_UTF16_BE)
    # Only "\n" ends a line, so that numbers are those of an editor where progress bars return the carriage.
    return TextIOWrapper(
        buffer, "utf-16" if buffer.peek(2)[:2] in marks else "utf-8", "replace", newline="\n"
    )


def _bounded_lines(file: TextIO) -> Iterator[str]:
    """The lines of a file, each up to a length that no log statement has; the rest of a longer one is passed over."""
    while line := file.readline(_MAX_LINE):
        yield line
        while line and not line.endswith("\n"):
            line = file.readline(_MAX_LINE)


def _by_key(rules: Iterable[Rule]) -> list[tuple[str, list[Rule]]]:
    table: dict[str, list[Rule]] = {}
    for rule in rules:
        table.setdefault(rule.key, []).append(rule)
    return list(table.items())


_ALL = _by_key(RULES)
_STARTS = _by_key(rule for rule in RULES if rule.role in ("start", "engine"))
#: For each engine its own rules, and how others start.
_OF_ENGINE = {
    engine: _by_key(rule for rule in RULES if rule.engine == engine or rule.role == "start")
    for engine in CONFIG_NAMES
}
_ESCAPES = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\^_])")


class _Reader:
    """Walks a log; keeps the start that is being read and the last complete one."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._table = _ALL
        self._current: StartupLog | None = None
        self._complete: StartupLog | None = None
        self._num_starts = 0
        self._latest: dict[tuple[str, str | None], float] = {}
        self._engine_workers: set[str | None] = set()
        self._cache: str | None = None
        self._draft = False

    def read(self, number: int, line: str) -> None:
        """Take one line."""
        text: str | None = None
        raw = _ESCAPES.sub("", line) if "\x1b" in line else line
        for key, rules in self._table:
            if key not in raw:
                continue
            text = _message(raw) if text is None else text
            for rule in rules:
                match = rule.pattern.search(text, 0, _MAX_LINE if rule.has_config else _MAX_MESSAGE)
                if match and _is_prefix(text[: match.start()]):
                    self._apply(rule, match, number, text)

    def result(self) -> StartupLog:
        """What was read."""
        self._join_excerpts()
        last = self._current
        log = self._complete if last is None or (self._complete and not last.is_complete) else last
        if log is None:
            raise InputError(
                "no engine is recognised in this log",
                where=self._name,
                hint="give what vLLM, SGLang, TensorRT-LLM or llama.cpp print from their first line on, "
                "at log level INFO",
            )
        if not log.figures and log.refusal is None:
            raise InputError(
                f"the log of {log.engine} holds no memory figure",
                where=f"{self._name}:{log.line}",
                hint="give the lines up to where it serves or gives up, at log level INFO",
            )
        if self._num_starts > 1:
            which = "the last" if log is last else "the last that came to its KV cache"
            log.notes.insert(
                0, f"{self._num_starts} starts in the log: {which} is read, from line {log.line} on"
            )
        if not log.is_complete:
            log.notes.append("the log ends before the engine says how large its KV cache is")
        return log

    def _join_excerpts(self) -> None:
        """Take over the settings that stand below the figures of a start, as where someone posts parts of a log."""
        first, last = self._complete, self._current
        if first is None or last is None or last.figures or last.refusal is not None:
            return
        if first.engine != last.engine or first.version is not None or self._num_starts != 2:
            return
        first.version, first.model = last.version, last.model or first.model
        first.settings = {**first.settings, **last.settings}
        first.own_settings = {**first.own_settings, **last.own_settings}
        first.notes += [
            *last.notes,
            f"the settings from line {last.line} on are taken for those of the figures above",
        ]
        self._current, self._complete, self._num_starts = first, None, 1

    def _apply(self, rule: Rule, match: re.Match[str], number: int, text: str) -> None:
        worker = _worker(text[: match.start()])
        if rule.role in ("start", "engine") and self._is_new_start(rule, worker):
            self._begin(rule.engine, number)
        if self._current is None and any(
            _is_figure(item.target) or item.target == "config" for item in rule.fields
        ):
            self._begin(rule.engine, number)  # the log was cut at its head
        log = self._current
        if log is None or log.engine != rule.engine:
            return
        place = _Place(number, worker, text[match.start() :].strip()[:_MAX_TEXT])
        if rule.role == "engine":
            self._engine_workers.add(worker)
        elif rule.role == "ready":
            self._table = _STARTS
        elif rule.role == "draft":
            self._draft = True
        elif rule.role == "pool":
            self._cache = rule.cache
        elif rule.role == "refusal" and log.refusal is None:
            log.refusal = Found(place.text, number)
        if self._draft:
            return
        values = {item.target: match[item.group] for item in rule.fields}
        if "shape" in values:
            _keep_shape(log, values["shape_name"], values["shape"], number)
            return
        place = place._replace(worker=values.get("label", self._cache or worker))
        for item in rule.fields:
            if item.target != "label":
                self._keep(log, item.target, values[item.target], item.kind, place)

    def _is_new_start(self, rule: Rule, worker: str | None) -> bool:
        """Whether a start line begins another start: not if its engine has loaded nothing yet.

        Of an engine with several engine processes each has its own line.
        """
        log = self._current
        if log is None or log.engine != rule.engine:
            return True
        if log.refusal is None and all(figure.name in _BEFORE_LOADING for figure in log.figures):
            return False
        if rule.engine == "llama.cpp" and self._draft:
            return rule.key != LOADER
        return rule.role == "start" or worker is None or worker in self._engine_workers

    def _begin(self, engine: Engine, number: int) -> None:
        previous = self._current
        if previous is not None and previous.is_complete:
            self._complete = previous
        self._current = StartupLog(self._name, engine, number)
        if previous is not None and previous.engine == engine:
            self._current.version = previous.version  # a server that loads several models says it once
            self._current.own_settings = {
                name: found for name, found in previous.own_settings.items() if name == "ollama_version"
            }
        self._num_starts += 1
        self._table = _OF_ENGINE[engine]
        self._latest.clear()
        self._engine_workers.clear()
        self._cache = None
        self._draft = False

    def _keep(self, log: StartupLog, target: str, text: str, kind: str, place: _Place) -> None:
        group, _, name = target.rpartition(".")
        if target == "config":
            _keep_config(log, read_fields(text), place.line)
        elif target == "version":
            log.version = text.rstrip(".")
        elif group == "set":
            _set(log, name, _plain(text, kind), place.line)
        elif group == "own":
            log.own_settings[name] = Found(_plain(text, kind), place.line)
        else:
            figure = bracket(text, kind)
            if figure is not None and len(log.figures) < _MAX_FIGURES:
                self._add(log, Figure(target, *figure, *place))

    def _add(self, log: StartupLog, figure: Figure) -> None:
        """Keep a figure, unless this worker has just said the same."""
        key = figure.name, figure.worker
        if self._latest.get(key) == figure.value:
            return
        self._latest[key] = figure.value
        log.figures.append(figure)
        if len(log.figures) == _MAX_FIGURES:
            log.notes.append(
                f"{_MAX_FIGURES:,} figures are read; those after line {figure.line} are left out"
            )


class _Place(NamedTuple):
    """Where a figure stands: the last fields of `Figure`."""

    line: int
    worker: str | None
    text: str


def _message(line: str) -> str:
    """The text of a line without what ends it; of a JSON line, its message."""
    text = line.rstrip()
    start = text.lstrip()
    if start.startswith("{") and text.endswith("}"):
        try:
            record = json.loads(start)
        except (ValueError, RecursionError):
            return text  # a printed dict
        if isinstance(record, Mapping):
            for name in ("log", "message", "msg", "MESSAGE"):
                if isinstance(record.get(name), str):
                    return _ESCAPES.sub("", str(record[name])).rstrip()
    return text.rpartition("\r")[2]  # what a progress bar left on the screen


def _is_prefix(text: str) -> bool:
    """Whether this may stand before a message: a prompt or a line of source code quotes."""
    return len(text) <= _MAX_PREFIX and not ("'" in text or '"' in text)


#: ``(Worker_TP0 pid=101)``, ``(VllmWorker rank=1 pid=9)``, ``(RayWorkerWrapper pid=7, ip=10.0.0.2)``.
_PROCESS = re.compile(r"\(([A-Za-z]\w*(?: (?:rank=|[A-Z_]+)\d+)*) pid=(\d+)(?:, ip=([\w.:]+))?\)")
#: ``[2026-06-08 07:20:53 DP0 TP1]`` of SGLang, ``[RANK 3]`` and ``[1,3]<stdout>`` of TensorRT-LLM under MPI.
_RANK = re.compile(
    r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:[.,]\d+)? ([A-Z_]+\d+(?: [A-Z_]+\d+)*)\]|\[(RANK \d+)\]|\[1,(\d+)\]<std"
)


def _worker(prefix: str) -> str | None:
    """The process or rank that a prefix names; the process number only where nothing else tells ranks apart."""
    processes = _PROCESS.findall(prefix)
    if processes:
        name, pid, address = processes[-1]  # Ray's driver stands before its worker
        if not name.endswith(("Wrapper", "Process")):
            return str(name)
        return f"{name} pid={pid}" + (f", ip={address}" if address else "")
    match = _RANK.search(prefix)
    if match is None:
        return None
    return f"RANK {match[3]}" if match[3] else f"{match[1] or match[2]}"


def _is_figure(target: str) -> bool:
    return "." not in target and target not in ("config", "version", "label", "shape", "shape_name")


def _plain(text: str, kind: str) -> object:
    if kind == "whole":
        return int(text.replace(",", ""))
    if kind == "number":
        return float(text)
    if kind == "switch":
        return text in ("enabled", "True")
    return text.rstrip(".")


def _keep_config(log: StartupLog, fields: Mapping[str, object], line: int) -> None:
    """Take over what a printed configuration sets."""
    names = CONFIG_NAMES[log.engine]
    for printed, name in names.items():
        value: object = fields
        for part in printed.split("."):
            if isinstance(value, str):  # JSON in a text, as the command line has it
                value = read_fields(value)
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is not None:
            _set(log, name, value, line)


def _set(log: StartupLog, name: str, value: object, line: int) -> None:
    """Keep a setting; ``auto`` says nothing where what it became is printed later."""
    if name.startswith("own."):
        log.own_settings[name.removeprefix("own.")] = Found(value, line)
        return
    if isinstance(value, str):
        value = value.removeprefix("torch.").strip()
        if value == "" or (value == "auto" and name != "kv_cache_dtype"):
            return
    if name == "max_model_len" and isinstance(value, int) and value < 0:
        return  # -1: to be found out
    if name == "model":
        log.model = str(value)
        return
    kinds = ServingOptions.kinds(name)
    if float in kinds and type(value) is int:
        value = float(value)
    if type(value) not in kinds:
        log.notes.append(f'line {line}: {name} is "{str(value)[:60]}", which is no value for it: passed over')
        return
    log.settings[name] = Found(value, line)


def _keep_shape(log: StartupLog, name: str, text: str, line: int) -> None:
    """Keep what llama.cpp prints of a model or a context, such as ``n_head_kv = 8`` or ``[8, 8, 4]``."""
    numbers = re.fullmatch(r"\[?(-?\d{1,18}(?:, -?\d{1,18})*)\]?", text.strip())
    value: object = text.strip()[:_MAX_TEXT]
    if numbers:
        values = [int(number) for number in numbers[1].split(", ")]
        value = values[0] if len(set(values)) == 1 else values
    log.shape[name] = Found(value, line)
    setting = CONFIG_NAMES["llama.cpp"].get(name)
    if setting is not None:
        _set(log, setting, value, line)
