"""The lines of a trace with their numbers, from a file or standard input."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from functools import partial
from typing import BinaryIO

from kvplan.errors import InputError

#: What is longer is no trace, and is not read into memory.
_LONGEST_LINE = 1 << 25
_LARGEST_SCENARIO = 1 << 28


class Lines:
    """The lines of a source with their numbers, from 1; blank ones are left out."""

    def __init__(self, source: str, file: BinaryIO) -> None:
        self.name = source
        self.number = 0
        self._file = file
        self._first: bytes | None = None
        self._size = _regular_size(file)
        self._read = 0

    @property
    def share_read(self) -> float | None:
        """Bytes read over the file's size; None for what is no regular file."""
        return min(1.0, self._read / self._size) if self._size else None

    def _raw_lines(self) -> Iterator[bytes]:
        """Lines as they are in the file; one without an end is not read to memory's end."""
        for raw in iter(partial(self._file.readline, _LONGEST_LINE + 1), b""):
            if len(raw) > _LONGEST_LINE:
                raise InputError(
                    f"a line is longer than {_LONGEST_LINE >> 20} MiB",
                    where=f"{self.name}:{self.number + 1}",
                    hint="give a trace with one request a line",
                )
            yield raw

    def peek(self) -> str:
        """The first line that is not blank, without consuming it."""
        if self._first is None:
            for raw in self._raw_lines():
                self._read += len(raw)
                if raw.strip():
                    self._first = raw.removeprefix(b"\xef\xbb\xbf")
                    break
                self.number += 1
            else:
                raise InputError(
                    "the trace is empty", where=self.name, hint="give a trace with at least one line"
                )
        return _decode(self._first, f"{self.name}:{self.number + 1}")

    def skip(self) -> None:
        """Leave out the line that was peeked at."""
        self.number += 1
        self._first = None

    def __iter__(self) -> Iterator[bytes]:
        try:
            if self._first is not None:
                self.number += 1
                yield self._first
            for raw in self._raw_lines():
                self.number += 1
                self._read += len(raw)
                if raw.strip():
                    yield raw
        finally:
            self.close()

    def close(self) -> None:
        """Let go of the file; standard input stays open."""
        if sys.stdin is None or self._file is not sys.stdin.buffer:
            self._file.close()

    def text(self) -> str:
        """All that is left, as one text."""
        raw = (self._first or b"") + self._file.read(_LARGEST_SCENARIO)
        self.close()
        if len(raw) >= _LARGEST_SCENARIO:
            raise InputError(
                f"a scenario of more than {_LARGEST_SCENARIO >> 20} MiB",
                where=self.name,
                hint="give a trace with one request a line",
            )
        return _decode(raw, self.name)


def _regular_size(file: BinaryIO) -> int | None:
    try:
        status = os.fstat(file.fileno())
    except (OSError, ValueError):  # no file behind it
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def _decode(raw: bytes, where: str) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise InputError(
            f"not UTF-8: byte 0x{raw[error.start]:02x} at offset {error.start}",
            where=where,
            hint="give a text file in UTF-8",
        ) from error
