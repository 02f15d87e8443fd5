"""Launches on the CPU: a program of launches over named arrays goes to a process, outputs and findings come back.

The process ends with the program, so a kernel that goes astray takes nothing with it. Messages name kernel, block,
thread and line. The bytes in between are what `runtime.cpp` reads and writes: little-endian 64-bit numbers, texts and
blobs with their length before them.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import struct
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvplan.kernels.emulation.build import BuildFailed

Array = NDArray[Any]
_SECTOR_BYTES = 32  # what a GPU's memory is read in
_SANITIZER_EXIT = 66  # what runtime.cpp tells the sanitizers to exit with
_ROW = np.dtype(
    [("launch", "<u4"), ("buffer", "<u4"), ("line", "<i4"), ("store", "<u4")]
    + [(name, "<u8") for name in ("requests", "lane_bytes", "useful_bytes", "sectors")]
)
_DISTINCT = np.dtype(
    [("launch", "<u4"), ("buffer", "<u4"), ("store", "<u4"), ("unused", "<u4"), ("sectors", "<u8")]
)


class Order(IntEnum):
    """Which of the threads that can run goes first, and which block."""

    FORWARD = 0
    REVERSE = 1
    SHUFFLED = 2


@dataclass(frozen=True)
class Launch:
    """A kernel over a grid.

    ``pointers`` says which array each pointer of the arguments gets; others stay null. ``before`` moves a pointer back
    by so many bytes (forward, if negative): a cache of which only the far end is there tests that offsets are computed
    in 64 bits.
    """

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    arguments: ctypes.Structure
    pointers: Mapping[str, str]
    before: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Requests:
    """What the warps asked of one array at one line of the source in one launch.

    A request is what the lanes of a warp ask for at once. ``useful_bytes`` counts a byte once a request, however many
    lanes want it; ``sectors`` are the 32-byte sectors that the requests touch.
    """

    launch: int
    array: str
    line: int
    store: bool
    requests: int
    lane_bytes: int
    useful_bytes: int
    sectors: int


@dataclass(frozen=True)
class Traffic:
    """The log of a run. ``distinct_bytes[launch, array, store]``: sectors touched at all, times 32."""

    rows: tuple[Requests, ...]
    distinct_bytes: Mapping[tuple[int, str, bool], int]

    def requested_bytes(self, arrays: Sequence[str], *, store: bool = False) -> int:
        """Bytes of all sectors of all requests to the arrays: what has to come from L1, L2 or memory."""
        return sum(r.sectors for r in self._of(arrays, store=store)) * _SECTOR_BYTES

    def sector_efficiency(self, arrays: Sequence[str]) -> float:
        """The share of the bytes of sectors that loads touched which they wanted; 1.0 is fully coalesced."""
        return sum(r.useful_bytes for r in self._of(arrays, store=False)) / self.requested_bytes(arrays)

    def distinct(self, arrays: Sequence[str], *, store: bool = False) -> int:
        """Bytes of the sectors of the arrays that were touched at all, by any launch: what memory has to give."""
        return sum(
            n for (_, array, stored), n in self.distinct_bytes.items() if array in arrays and stored == store
        )

    def _of(self, arrays: Sequence[str], *, store: bool) -> list[Requests]:
        return [row for row in self.rows if row.array in arrays and row.store == store]


@dataclass(frozen=True)
class Report:
    """What a sanitizer said: which one, of what, the lines of the source in it, first that of the fault, and all of it.

    A race has the lines of both accesses.
    """

    tool: str
    kind: str
    lines: tuple[int, ...]
    text: str


@dataclass(frozen=True)
class Outcome:
    """What a program gave. Where ``error`` is not ``None`` it was ended, and there are no outputs."""

    outputs: Mapping[str, Array] = field(default_factory=dict)
    error: str | None = None
    reports: tuple[Report, ...] = ()
    traffic: Traffic | None = None


def run(
    executable: Path,
    launches: Sequence[Launch],
    arrays: Mapping[str, Array],
    outputs: Sequence[str],
    *,
    addresses: Mapping[str, Sequence[str]] | None = None,
    order: Order = Order.FORWARD,
    seed: int = 0,
    traffic: bool = False,
    limit_s: int = 120,
) -> Outcome:
    """Run the launches in turn over the arrays; those named in ``outputs`` may be written and come back.

    Arrays are copied, each to an address that is a multiple of 256, as a GPU's allocator gives, with guards around it.
    ``addresses`` names arrays of 64-bit words that get the addresses of other arrays. The limit is on the process's CPU
    seconds.
    """
    settings = _numbers(limit_s, order, seed, int(traffic))
    program = settings + _packed(launches, arrays, outputs, addresses or {})
    answer = _process([str(executable)], program)
    if b"unexpected memory mapping" in answer.stderr and shutil.which("setarch"):
        # Older ThreadSanitizers refuse some of the places that a kernel with much randomness gives memory.
        answer = _process(["setarch", "--addr-no-randomize", str(executable)], program)
    text = answer.stderr.decode(errors="replace")
    reports = tuple(_reports(text))
    data = answer.stdout
    if len(data) < 8:
        ended = reports[0].kind if reports else f"the process ended with {answer.returncode}: {text[-400:]}"
        return Outcome(error=ended, reports=reports)
    reader = _Reader(data)
    if reader.number() != 0:
        return Outcome(error=reader.blob(reader.number()).decode(errors="replace"), reports=reports)
    if answer.returncode not in {0, _SANITIZER_EXIT}:
        return Outcome(error=f"the process ended with {answer.returncode}: {text[-400:]}", reports=reports)
    given = {
        name: np.frombuffer(reader.blob(array.nbytes), dtype=array.dtype).reshape(array.shape).copy()
        for name, array in arrays.items()
        if name in outputs
    }
    return Outcome(given, None, reports, _traffic(reader, list(arrays)) if traffic else None)


def _process(command: Sequence[str], program: bytes) -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run(command, input=program, capture_output=True, check=False)
    except OSError as error:
        raise BuildFailed(
            f"cannot start what was built: {error.strerror or error}",
            where=command[-1],
            hint="name a folder that programs may be started from in XDG_CACHE_HOME",
        ) from error


def _packed(
    launches: Sequence[Launch],
    arrays: Mapping[str, Array],
    outputs: Sequence[str],
    addresses: Mapping[str, Sequence[str]],
) -> bytes:
    parts: list[bytes] = [_numbers(len(arrays))]
    for name, array in arrays.items():
        parts += [_text(name), _numbers(int(name in outputs), array.nbytes), array.tobytes()]
    numbers = {name: number for number, name in enumerate(arrays)}
    entries = [
        (numbers[table], 8 * place, numbers[target])
        for table, targets in addresses.items()
        for place, target in enumerate(targets)
    ]
    parts += [_numbers(len(entries)), *(_numbers(*entry) for entry in entries)]
    parts.append(_numbers(len(launches)))
    for launch in launches:
        arguments = bytes(launch.arguments)
        parts += [_text(launch.kernel), _numbers(*launch.grid, *launch.block, launch.shared_bytes)]
        parts += [_numbers(len(arguments)), arguments, _numbers(len(launch.pointers))]
        for pointer, array_name in launch.pointers.items():
            offset = getattr(type(launch.arguments), pointer).offset
            parts.append(_numbers(offset, numbers[array_name], launch.before.get(pointer, 0) % (1 << 64)))
    return b"".join(parts)


def _numbers(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}Q", *numbers)


def _text(text: str) -> bytes:
    data = text.encode()
    return _numbers(len(data)) + data


class _Reader:
    """Takes numbers and blobs off the front of an answer."""

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)

    def number(self) -> int:
        return int.from_bytes(self.blob(8), "little")

    def blob(self, size: int) -> bytes:
        taken, self._data = self._data[:size], self._data[size:]
        return bytes(taken)

    def rows(self, dtype: np.dtype[Any]) -> Array:
        return np.frombuffer(self.blob(self.number() * dtype.itemsize), dtype=dtype)


def _traffic(reader: _Reader, names: Sequence[str]) -> Traffic:
    rows = tuple(
        Requests(launch, names[buffer], line, bool(store), *counts)
        for launch, buffer, line, store, *counts in reader.rows(_ROW).tolist()
    )
    distinct = {
        (launch, names[buffer], bool(store)): sectors * _SECTOR_BYTES
        for launch, buffer, store, _, sectors in reader.rows(_DISTINCT).tolist()
    }
    return Traffic(rows, distinct)


_HEADS = re.compile(
    r"^(?:==\d+==ERROR: (?P<address>AddressSanitizer): (?P<overrun>\S+)[^\n]*"
    r"|WARNING: (?P<thread>ThreadSanitizer): (?P<race>[^\n]*?) \(pid=\d+\)"
    r"|[^\n]*?:(?P<line>\d+):\d+: runtime error: (?P<undefined>[^\n]*))$",
    re.MULTILINE,
)
_FRAME = re.compile(r"^ +#\d+ .*?\.cu:(\d+)", re.MULTILINE)


def _reports(text: str) -> list[Report]:
    heads = list(_HEADS.finditer(text))
    found = []
    for number, head in enumerate(heads, 1):
        body = text[head.start() : heads[number].start() if number < len(heads) else len(text)]
        lines = dict.fromkeys(int(number) for number in [head["line"], *_FRAME.findall(body)] if number)
        tool = head["address"] or head["thread"] or "UndefinedBehaviorSanitizer"
        kind = head["overrun"] or head["race"] or head["undefined"]
        found.append(Report(tool, kind, tuple(lines), body))
    return found
