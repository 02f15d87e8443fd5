"""The lines of a trace with their numbers, from a file or standard input."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from io import BufferedReader

from kvplan.errors import InputError

#: What is longer is no trace, and is not read into memory.
_LONGEST_LINE = 1 << 25
_LARGEST_SCENARIO = 1 << 28
#: Bytes that are read at once, at most.
_PIECE = 1 << 16


class Lines:
    """The lines of a source in batches, with their numbers from 1."""

    def __init__(self, source: str, file: BufferedReader) -> None:
        self.name = source
        #: How many lines were handed out or left out.
        self.number = 0
        self._file = file
        self._first: bytes | None = None
        self._size = _regular_size(file)
        self._read = 0

    @property
    def share_read(self) -> float | None:
        """Bytes of the lines so far over the file's size; None for what is no regular file."""
        return min(1.0, self._read / self._size) if self._size else None

    def peek(self) -> str:
        """The first line that is not blank, without consuming it."""
        while self._first is None:
            line = self._file.readline(_LONGEST_LINE + 1)
            self._check_length(len(line))
            if not line:
                raise InputError(
                    "the trace is empty", where=self.name, hint="give a trace with at least one line"
                )
            self._read += len(line)
            line = line.removeprefix(b"\xef\xbb\xbf")
            if line.strip():
                self._first = line
            else:
                self.number += 1
        return _decode(self._first, f"{self.name}:{self.number + 1}")

    def skip(self) -> None:
        """Leave out the line that was peeked at."""
        self.number += 1
        self._first = None

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        """Batches of whole lines as they are in the file, each with the number of its first line.

        A batch is what could be read without waiting for more, so that the lines of a pipe are there as soon as they
        are written. The beginning of a line is kept until its end has come.
        """
        try:
            if self._first is not None:
                yield self._numbered(self._first)
            begun = bytearray()
            while piece := self._file.read1(_PIECE):
                self._check_length(len(begun) + (piece.find(b"\n") + 1 or len(piece)))
                ended, newline, rest = piece.rpartition(b"\n")
                if newline:
                    batch = bytes(begun) + ended + newline
                    begun.clear()
                    self._read += len(batch)
                    yield self._numbered(batch)
                begun += rest
            if begun:
                self._read += len(begun)
                yield self._numbered(bytes(begun))
        finally:
            self.close()

    def _numbered(self, batch: bytes) -> tuple[int, bytes]:
        first = self.number + 1
        self.number += batch.count(b"\n") + (not batch.endswith(b"\n"))
        return first, batch

    def _check_length(self, length: int) -> None:
        """Whether the next line, of at least so many bytes, may be as long as that."""
        if length > _LONGEST_LINE:
            raise InputError(
                f"a line is longer than {_LONGEST_LINE >> 20} MiB",
                where=f"{self.name}:{self.number + 1}",
                hint="give a trace with one request a line",
            )

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


def _regular_size(file: BufferedReader) -> int | None:
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
