"""Lines as requests: a line means the same among others as alone, however many are taken apart at once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from decimal import Decimal

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvplan.core.request import PICOSECONDS, Request
from kvplan.trace_rows import BadLine, Batch, read_azure, read_kvplan, read_mooncake

Reader = Callable[[Iterable[tuple[int, bytes]]], Iterator[Batch]]

KVPLAN = [
    b'{"id":"a","arrival_s":0.5,"input_tokens":4,"output_tokens":2}',
    b'{"output_tokens": 2, "input_tokens": 4, "arrival_s": 7, "id": 9}',
    b'{"arrival_s":1e-7,"input_tokens":4,"output_tokens":2,"priority":-1,"n":2,"abort_s":1}',
    b'{"id":"b","arrival_s":0.5,"input_tokens":4,"output_tokens":2,"content":[["s",0,3],["\xc3\xa9",1,1]]}',
    b'{"id":"c","arrival_s":0.5,"input_tokens":4,"output_tokens":2,"hash_ids":["x"],"hash_block_size":4}',
]
MOONCAKE = [
    b'{"timestamp":27,"input_length":1100,"output_length":5,"hash_ids":[7,"k",9]}',
    b'{"timestamp":0.1,"input_length":9,"output_length":5,"more":{"a":{}}}',
    b'{"timestamp":true,"input_length":9,"output_length":5}',
]
AZURE = [
    b"2023-11-16 18:17:03.9799600,4808,10",
    b"2024-05-12T00:00:00Z, 1 ,2",
    b"2023-11-16 18:17:03.1+00:00,1000000000,10",
    b"2023-13-16 18:17:03,4808,10",
    b"2023-11-16 18:17:03,0,10",
    b"x2023-11-16 18:17:03,1,10",
    "2023-11-16 18:17:03,٣,8".encode(),
]
#: What goes wrong between lines, at their ends and in strings.
ODD = [
    b"",
    b" \t",
    b"null",
    b"nonsense",
    b'{"id":"a","arrival_s":0.5',
    b'"input_tokens":4,"output_tokens":2}',
    b'{"id":"a}',
    b'{b","arrival_s":0.5,"input_tokens":4,"output_tokens":2}',
    b'{"arrival_s":0.5,"input_tokens":4,"output_tokens":2},{"arrival_s":0.5,"input_tokens":4,"output_tokens":2}',
    b'{"arrival_s":0.5,"input_tokens":4,"output_tokens":2},[]',
    b'{"arrival_s":0.5,"input_tokens":4,"output_tokens":2},',
    b'{"id":"}{","arrival_s":0.5,"input_tokens":4,"output_tokens":2}',
    b'{"arrival_s":0.5,"input_tokens":{},"output_tokens":2}',
    b'{"arrival_s":NaN,"input_tokens":4,"output_tokens":2}',
    b'{"arrival_s":0.5,"input_tokens":4,"output_tokens":2,"x":' + b"9" * 5000 + b"}",
    b'{"id":"\xff","arrival_s":0.5,"input_tokens":4,"output_tokens":2}',
    b'\xef\xbb\xbf{"arrival_s":0.5,"input_tokens":4,"output_tokens":2}',
    b"{}",
    b"{",
    b"}",
    b"[" * 2000,
]


def outcomes(read: Reader, *batches: bytes) -> list[Request | tuple[str, str]]:
    """What each line gives: a request, or what is wrong with it and what mends it."""
    found: list[Request | tuple[str, str]] = []
    for batch in read((1 + b"".join(batches[:i]).count(b"\n"), one) for i, one in enumerate(batches)):
        for number, item in enumerate(batch.items, batch.first):
            try:
                found.append(batch.request(item, number))
            except BadLine as bad:
                found.append((str(bad), bad.hint))
    return found


@pytest.mark.parametrize(
    ("read", "usual"), [(read_kvplan, KVPLAN), (read_mooncake, MOONCAKE), (read_azure, AZURE)]
)
def test_a_line_means_the_same_among_others_as_alone(read: Reader, usual: list[bytes]) -> None:
    ends = st.sampled_from([b"\n", b"\r\n", b" \n"])
    lines = st.lists(st.tuples(st.sampled_from([*usual, *usual, *ODD]), ends), min_size=1, max_size=6)

    @given(lines | st.lists(st.tuples(st.sampled_from(usual), ends), min_size=1, max_size=6), st.booleans())
    @example(
        [(b'{"id":"a}', b"\n"), (b'{b","arrival_s":0.5,"input_tokens":4,"output_tokens":2}', b"\n")], True
    )
    # As many objects as lines, but not one on each; and a list of as many values as lines.
    @example([(ODD[i], b"\n") for i in (8, 4, 5)], True)
    @example([(ODD[i], b"\n") for i in (9, 6, 7)], True)
    def check(drawn: list[tuple[bytes, bytes]], ended: bool) -> None:
        written = [line + end for line, end in drawn]
        if not ended:
            written[-1] = drawn[-1][0] or b"x"
        assert outcomes(read, b"".join(written)) == outcomes(read, *written)

    check()


def test_lines_as_they_are_usually_written_are_taken_apart_together() -> None:
    (json_batch,) = read_kvplan([(1, b"\r\n".join(KVPLAN) + b"\n")])
    assert [type(item) for item in json_batch.items] == [dict] * len(KVPLAN)
    (csv_batch,) = read_azure([(2, AZURE[0] + b"\r\n" + AZURE[0] + b"\n")])
    assert [type(item) for item in csv_batch.items] == [tuple, tuple]
    # A line that is no object has all lines of its batch taken apart by themselves.
    (odd_batch,) = read_kvplan([(1, KVPLAN[0] + b"\n\n" + KVPLAN[1] + b"\n")])
    assert list(odd_batch.items) == [KVPLAN[0] + b"\n", b"\n", KVPLAN[1] + b"\n"]


@given(
    st.floats(0, 10**10)
    | st.builds(lambda digits, places: digits / 10**places, st.integers(0, 10**17), st.integers(8, 17))
)
@example(999_999_999.999_999_9)
@example(-0.0)
def test_a_time_is_what_its_digits_say(time_s: float) -> None:
    line = json.dumps({"id": "a", "arrival_s": time_s, "input_tokens": 4, "output_tokens": 2})
    (found,) = outcomes(read_kvplan, line.encode() + b"\n")
    assert found == Request("a", int(Decimal(repr(time_s)) * PICOSECONDS), 4, 2)
    (found,) = outcomes(read_mooncake, b'{"timestamp":%r,"input_length":4,"output_length":2}\n' % time_s)
    assert found == Request("1", int(Decimal(repr(time_s)) * PICOSECONDS) // 1000, 4, 2)
