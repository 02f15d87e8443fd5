"""The lines of a source, wherever one piece that is read ends and the next begins."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplan.errors import InputError
from kvplan.trace import open_trace, read_trace
from kvplan.trace_lines import Lines

GOOD = b'{"id":"%s","arrival_s":%d,"input_tokens":4,"output_tokens":2}'
#: Good lines and bad ones with all kinds of ends, blank lines, letters of several bytes, an id that stands twice.
MIXED = b"\r\n".join(
    [
        GOOD % (b"a", 3),
        b"",
        GOOD % ("ä€𝄞".encode(), 1),
        b'{"id":"cut',
        GOOD % (b"b", 2) + b"\n  \n" + GOOD % (b"c", 2) + b"\n\n",
        GOOD % (b"a", 9),
        b'{"id":"\xff"}',
        GOOD % (b"d", 0),
    ]
)


class Pieces(io.RawIOBase):
    """A source that gives one piece at a time and does not like to be asked for more than there is."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        piece = next(self._pieces, None)
        assert piece is not None, "nothing more was written, and nobody has to wait for it"
        buffer[: len(piece)] = piece
        return len(piece)


@pytest.fixture
def piped(monkeypatch: pytest.MonkeyPatch) -> Callable[[Iterator[bytes]], None]:
    """Has standard input give these pieces."""

    def pipe(pieces: Iterator[bytes]) -> None:
        monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BufferedReader(Pieces(pieces))))

    return pipe


@pytest.mark.parametrize("piece", [*range(1, 20), 100, len(MIXED)])
@pytest.mark.parametrize("end", [b"", b"\n", b"\n\n"])
def test_where_pieces_end_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int, end: bytes
) -> None:
    path = tmp_path / "trace"
    path.write_bytes(MIXED + end)
    monkeypatch.setattr("kvplan.trace_lines._PIECE", piece)
    trace = read_trace(str(path), skip_bad_lines=True)
    assert [request.id for request in trace.requests] == ["d", "ä€𝄞", "b", "c", "a"]
    assert trace.skipped_lines == 3
    with pytest.raises(InputError) as caught:
        read_trace(str(path))
    assert (
        caught.value.what == "not JSON: Invalid control character at: the line may be cut; 2 more bad lines"
    )
    assert caught.value.where == f"{path}:4"


@given(st.lists(st.binary(max_size=9), max_size=9), st.integers(1, 12))
def test_all_lines_come_whole_and_with_their_numbers(lines: list[bytes], piece: int) -> None:
    source = b"\n".join(lines)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("kvplan.trace_lines._PIECE", piece)
        batches = list(Lines("x", io.BufferedReader(io.BytesIO(source))))
    assert b"".join(batch for _, batch in batches) == source
    for (first, batch), (following, _) in pairwise(batches):
        assert batch.endswith(b"\n")
        assert following == first + batch.count(b"\n")
    assert not batches or batches[0][0] == 1


def test_lines_of_a_pipe_are_there_before_what_follows_is_written(
    piped: Callable[[Iterator[bytes]], None],
) -> None:
    a, b = GOOD % (b"a", 0) + b"\n", GOOD % (b"b", 1) + b"\n"
    piped(iter([a[:9], a[9:] + b[:5], b[5:] + b'{"id":"c","arri']))
    assert [request.id for request in open_trace("-", limit=2)] == ["a", "b"]


def test_an_endless_line_is_refused_before_its_end(
    piped: Callable[[Iterator[bytes]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvplan.trace_lines._LONGEST_LINE", 1 << 20)

    def endless() -> Iterator[bytes]:
        yield GOOD % (b"a", 0) + b"\n" + GOOD % (b"b", 0) + b"\n"
        for _ in range((1 << 20) // 4000 + 1):
            yield b"x" * 4000

    piped(endless())
    with pytest.raises(InputError, match="a line is longer than 1 MiB") as caught:
        read_trace("-")
    assert caught.value.where == "-:3"


@pytest.mark.parametrize("length", [99, 100, 101])
def test_the_longest_line_is_as_long_with_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    monkeypatch.setattr("kvplan.trace_lines._LONGEST_LINE", 100)
    monkeypatch.setattr("kvplan.trace_lines._PIECE", 64)
    path = tmp_path / "trace"
    line = GOOD % (b"a", 0)
    path.write_bytes(
        GOOD % (b"b", 0) + b"\n" + line + b" " * (length - len(line) - 1) + b"\n" + GOOD % (b"c", 0)
    )
    if length <= 100:
        assert len(read_trace(str(path)).requests) == 3
    else:
        with pytest.raises(InputError, match="a line is longer than 0 MiB") as caught:
            read_trace(str(path))
        assert caught.value.where == f"{path}:2"


def test_a_byte_order_mark_alone_on_the_first_line_is_a_blank_line(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(b"\xef\xbb\xbf\r\n" + GOOD % (b"a", 0) + b"\n{}")
    assert [request.id for request in read_trace(str(path), limit=1).requests] == ["a"]
    with pytest.raises(InputError) as caught:
        read_trace(str(path))
    assert caught.value.where == f"{path}:3"
    path.write_bytes(b"\xef\xbb\xbf")
    with pytest.raises(InputError, match="the trace is empty"):
        read_trace(str(path))


@pytest.mark.parametrize("end", [b"\n", b"\nnonsense\n"])
def test_a_file_that_is_read_to_its_end_is_closed(tmp_path: Path, end: bytes) -> None:
    path = tmp_path / "trace"
    path.write_bytes(GOOD % (b"a", 0) + end)
    with path.open("rb") as file:
        for _ in Lines(str(path), file):
            assert not file.closed
        assert file.closed
