"""Files that a run writes: each appears whole or not at all."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any, TextIO

from kvplan.core.engine import DecodeRun, Turn
from kvplan.core.metrics import RequestRecord, e2e_ticks, queue_ticks, tpot_ticks, ttft_ticks
from kvplan.core.preemptions import Case, PreemptionLog
from kvplan.core.request import seconds
from kvplan.core.simulate import StepRecord
from kvplan.errors import InputError


def check_output_paths(paths: Mapping[str, str | None], *, sources: Sequence[str] = ()) -> None:
    """Refuse early what could not be written at the end: ``paths`` by option. Raises `InputError`.

    ``sources`` are files that the run reads, which it must not overwrite.
    """
    taken = {_resolved(source): f"the input {source}" for source in sources if source != "-"}
    for option, path in paths.items():
        if path is None:
            continue
        target = Path(path)
        try:
            is_folder, has_folder = target.is_dir(), target.parent.is_dir()
        except OSError as error:
            raise InputError(
                f'"{path[:60]}..." is no path: {error.strerror}', where=option, hint="give a shorter one"
            ) from error
        if is_folder:
            raise InputError(f'"{path}" is a folder', where=option, hint="name a file in it")
        if not has_folder:
            raise InputError(
                f'the folder of "{path}" does not exist', where=option, hint=f'make "{target.parent}" first'
            )
        if not os.access(target.parent, os.W_OK):
            raise InputError(
                f'"{target.parent}" cannot be written to', where=option, hint="choose another folder"
            )
        if target.exists() and not os.access(target, os.W_OK):
            raise InputError(f'"{path}" cannot be written to', where=option, hint="choose another name")
        owner = taken.setdefault(_resolved(path), option)
        if owner != option:
            raise InputError(
                f'"{path}" is {owner} too', where=option, hint="give each output a file of its own"
            )


def _resolved(path: str) -> str:
    return os.path.realpath(path)


@contextmanager
def whole_file(path: str) -> Iterator[TextIO]:
    """A text file that takes its place only when the block ends without an error."""
    with whole_path(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        yield file


@contextmanager
def whole_path(path: str) -> Iterator[Path]:
    """A temporary file that takes its place only when the block ends without an error.

    What is no regular file, such as ``/dev/null`` or a pipe, is given as it is.
    """
    target = Path(path)
    if target.exists() and not target.is_file():  # a device or a pipe is written to, never replaced
        yield target
        return
    target = Path(os.path.realpath(path))  # through a link to what it names
    temporary = target.with_name(f".{target.name[:64]}.{os.urandom(8).hex()}{target.suffix[:16]}")
    try:  # an interrupt may come at any time, also right after the file is there
        temporary.touch(mode=0o600, exist_ok=False)
        yield temporary
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


class RequestWriter:
    """Writes one CSV row a request when it ends: what it asked, what became of it, its times in seconds."""

    def __init__(self, file: TextIO, scale: Fraction | None) -> None:
        self._scale = scale
        self._writer = csv.writer(
            file, lineterminator="\n", quoting=csv.QUOTE_NONNUMERIC
        )  # ids hold anything
        self._writer.writerow(
            [
                "id",
                "status",
                "arrival_s",
                "input_tokens",
                "output_tokens",
                "generated_tokens",
                "hit_tokens",
                "resumed_hit_tokens",
                "preemptions",
                "peak_blocks",
                "queue_s",
                "ttft_s",
                "tpot_s",
                "e2e_s",
            ]
        )

    def __call__(self, r: RequestRecord) -> None:
        """Write one request."""
        ended = "finished" if r.finished is not None else "aborted" if r.aborted is not None else "unfinished"
        status = r.rejected_for or ended
        self._writer.writerow(
            [
                _cell(r.request.id),
                status,
                self._time(r.request.arrival),
                r.request.input_tokens,
                r.request.output_tokens,
                r.output_tokens,
                r.hit_tokens,
                r.resumed_hit_tokens,
                r.preemptions,
                r.peak_blocks,
                self._time(queue_ticks(r)),
                self._time(ttft_ticks(r)),
                self._time(tpot_ticks(r)),
                self._time(e2e_ticks(r)),
            ]
        )

    def _time(self, ticks: float | None) -> float | str:
        return "" if ticks is None or self._scale is None else seconds(ticks, self._scale)


def _cell(text: str) -> str:
    """A name that no spreadsheet takes for a formula."""
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text


class EventWriter:
    """Writes one JSON object a step; empty lists are left out. ``detail`` adds block ids.

    What a preemption cost is known later than why it happened: it stands in the line of the step that ends it.

    With a batch queue (``has_queue``) a step is a call of the engine: ``out``, ``emitted`` and ``finished`` are of the
    batch that it processed, all else of the one that it planned. With drafts a step may put out several tokens.
    """

    def __init__(
        self,
        file: TextIO,
        scale: Fraction | None,
        *,
        detail: bool,
        has_queue: bool = False,
        has_drafts: bool = False,
    ) -> None:
        self._file = file
        self._scale = scale
        self._detail = detail
        self._preemptions = PreemptionLog()
        self._has_queue = has_queue
        self._emits = has_queue or has_drafts

    def __call__(self, record: StepRecord) -> None:
        """Write one step."""
        line: dict[str, object] = {"step": record.step}
        scale = self._scale
        line["time_s"] = None if scale is None else seconds(record.start, scale)
        turn = record.turn
        assert not isinstance(turn, DecodeRun), "steps are observed one by one"
        lists: list[tuple[str, list[object] | dict[str, int]]] = [
            ("arrived", [r.id for r in record.arrived]),
            ("rejected", [r.id for r in record.rejected]),
            ("aborted", list(record.aborted)),
        ]
        if turn is not None:
            closed = self._preemptions.fold(turn, record.step, record.start, record.planned_end)
            lists += [
                ("scheduled", [[s.id, tokens] for s, tokens in turn.scheduled]),
                ("drafts", {s.id: tokens for s, tokens in turn.drafts.items()}),
                ("admitted", [s.id for s in turn.admitted]),
                ("resumed", [s.id for s in turn.resumed]),
                ("preempted", [s.id for s in turn.preempted]),
                ("preemptions", [p._asdict() for p in turn.preemptions]),
                ("recovered", [self._cost(case) for case in closed]),
                ("finished", [s.id for s in turn.finished]),
                ("prefix_hits", [[s.id, tokens] for s, tokens in turn.prefix_hits]),
            ]
            if self._emits:
                lists.append(("emitted", [[s.id, 1 + turn.extra_tokens.get(s, 0)] for s in turn.sampled]))
        line.update((name, value) for name, value in lists if value)
        if turn is not None:
            self._add_counts(line, turn)
            if self._has_queue:
                line.update({"out": record.out} if record.out is not None else {}, depth=record.depth)
        elif record.free_blocks is not None:
            line["free_blocks_end"] = record.free_blocks
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")

    def _add_counts(self, line: dict[str, object], turn: Turn[Any]) -> None:
        """Add what is counted after scheduling, if there was any, and at the end."""
        if turn.planned:
            line["free_blocks"] = turn.free_blocks
        line["free_blocks_end"] = turn.free_blocks_end
        if turn.planned:
            line["running"] = turn.running
            line["waiting"] = turn.waiting
        moved = (
            ("copied_blocks", turn.work.copied_blocks),
            ("swapped_out_blocks", turn.work.swapped_out_blocks),
            ("swapped_in_blocks", turn.work.swapped_in_blocks),
        )
        line.update((name, blocks) for name, blocks in moved if blocks)
        if self._detail:
            changed = {**turn.new_blocks, **turn.new_tables}
            if changed:
                line["blocks"] = {s.id: blocks for s, blocks in changed.items()}
            if turn.evicted_blocks:
                line["evicted_blocks"] = turn.evicted_blocks

    def _cost(self, case: Case) -> dict[str, object]:
        """What a preemption cost its victim."""
        assert case.lost_ticks is not None, "only then it is closed"
        return {
            "request": case.preemption.victim,
            "preempted_step": case.step,
            "lost_tokens": case.preemption.lost_tokens,
            "found_tokens": case.found_tokens,
            "lost_s": None if self._scale is None else seconds(case.lost_ticks, self._scale),
        }
