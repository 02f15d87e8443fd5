"""Reading traces: four formats told from their content, and what is said about lines that are wrong."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplan.core.engine import SchedulerConfig
from kvplan.core.request import PICOSECONDS, Request, Segment
from kvplan.errors import InputError
from kvplan.trace import Trace, open_trace, read_trace, to_json_line, workload_names

Write = Callable[[str | bytes], str]

GOOD = '{"arrival_s":1.5,"input_tokens":4,"output_tokens":2}'
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"
MOONCAKE = '{"timestamp":27,"input_length":1100,"output_length":5,"hash_ids":[7,8,9]}'
CONFIG = {
    "num_gpu_blocks": 9,
    "block_size": 4,
    "max_num_batched_tokens": 16,
    "max_num_seqs": 4,
    "max_model_len": 32,
}
SCENARIO_ROW = {"id": "a", "arrival_step": 3, "prompt_tokens": 5, "output_tokens": 2}


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a file whose name says nothing and returns its path."""

    def write_file(content: str | bytes) -> str:
        path = tmp_path / "trace"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)

    return write_file


def row(**changes: object) -> str:
    """A good kvplan line with other values; None leaves a key out."""
    fields: dict[str, object] = {"arrival_s": 0.0, "input_tokens": 4, "output_tokens": 2}
    return json.dumps({key: value for key, value in (fields | changes).items() if value is not None})


def refused(path: str, **options: object) -> InputError:
    with pytest.raises(InputError) as error:
        read_trace(path, **options)  # type: ignore[arg-type]
    assert error.value.hint, "every refusal says what would mend it"
    return error.value


def scenario(rows: object = None, **changes: object) -> str:
    settings = {key: value for key, value in (CONFIG | changes).items() if value != "left out"}
    return json.dumps({"config": settings, "requests": [SCENARIO_ROW] if rows is None else rows}, indent=1)


# Formats


@pytest.mark.parametrize(
    ("content", "format"),
    [
        (GOOD, "kvplan"),
        ('{"input_tokens":4,"output_tokens":2,"arrival_s":0}\n', "kvplan"),
        (f"{AZURE}\r\n2023-11-16 18:15:46.6805900,374,44\r\n", "azure"),
        (f"{AZURE}\n2023-11-16 18:15:46.6805900,374,44", "azure"),
        (MOONCAKE, "mooncake"),
        (scenario(), "scenario"),
        (json.dumps(json.loads(scenario())), "scenario"),  # all on one line
    ],
)
def test_the_format_is_told_from_the_content(write: Write, content: str, format: str) -> None:
    trace = read_trace(write(content))
    assert (trace.format, len(trace.requests), trace.skipped_lines) == (format, 1, 0)


@pytest.mark.parametrize("name", ["trace.csv", "trace.json", "trace.txt"])
def test_the_name_of_a_file_says_nothing(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text(GOOD)
    assert read_trace(str(path)).format == "kvplan"


def test_a_byte_order_mark_does_not_matter(write: Write) -> None:
    for content in (GOOD, f"{AZURE}\n2023-11-16 18:15:46,374,44\n", MOONCAKE, scenario()):
        assert len(read_trace(write(b"\xef\xbb\xbf" + content.encode())).requests) == 1


def test_a_file_that_is_none_of_them_is_quoted(write: Write) -> None:
    error = refused(write("\nhello world\n"))
    assert error.what == 'no trace format that kvplan knows: the first line is "hello world"'
    assert error.where is not None
    assert error.where.endswith("trace:2")
    assert error.hint is not None
    assert "kvplan, azure, mooncake, scenario" in error.hint


@pytest.mark.parametrize("content", ["[1,2]", '{"prompt":"x"}', '"text"', "0.0,374,44", "TIMESTAMP,A,B"])
def test_what_looks_like_a_trace_but_is_none_is_refused(write: Write, content: str) -> None:
    assert "no trace format that kvplan knows" in refused(write(content)).what


def test_an_unknown_format_is_refused_with_those_that_are_known(write: Write) -> None:
    error = refused(write(GOOD), format="csv")
    assert (error.what, error.where) == ('unknown trace format "csv"', "--format")
    assert error.hint == "known: auto, azure, kvplan, mooncake, scenario"


def test_a_format_that_is_named_is_taken_at_its_word(write: Write) -> None:
    # Without its header a CSV is not recognised.
    path = write("2023-11-16 18:15:46,374,44\n2023-11-16 18:15:47,5,6\n")
    assert "no trace format" in refused(path).what
    trace = read_trace(path, format="azure")
    assert [r.arrival for r in trace.requests] == [0, PICOSECONDS]
    assert 'unknown key "timestamp"' in refused(write('{"timestamp":1}'), format="kvplan").what


# kvplan


def test_a_kvplan_line_has_a_number_for_its_id_unless_it_names_one(write: Write) -> None:
    trace = read_trace(write(f"\n{GOOD}\n{row(id='x')}\n{row(id=77, arrival_s=9)}\n"))
    # In order of arrival: x at 0, line 2 at 1.5 s, 77 at 9 s.
    assert [(r.id, r.arrival) for r in trace.requests] == [
        ("x", 0),
        ("2", 3 * PICOSECONDS // 2),
        ("77", 9 * PICOSECONDS),
    ]


def test_times_are_exact_in_the_digits_that_are_written(write: Write) -> None:
    trace = read_trace(write("\n".join(row(arrival_s=t) for t in (0.1, 0.3, 123456.789012))))
    assert [r.arrival for r in trace.requests] == [10**11, 3 * 10**11, 123_456_789_012_000_000]


def test_ties_keep_the_order_of_the_file(write: Write) -> None:
    trace = read_trace(write("\n".join(row(id=name, arrival_s=2) for name in "cab")))
    assert [r.id for r in trace.requests] == ["c", "a", "b"]


def test_content_and_priority_are_read(write: Write) -> None:
    content = [["s", 0, 3], ["o:x", 2, 1]]
    (request,) = read_trace(write(row(id="a", priority=-2, content=content))).requests
    assert request == Request("a", 0, 4, 2, -2, (Segment("s", 0, 3), Segment("o:x", 2, 1)))


def test_hash_ids_stand_for_whole_blocks_and_the_rest_shares_nothing(write: Write) -> None:
    (request,) = read_trace(
        write(row(id="a", input_tokens=40, hash_ids=[3, "k"], hash_block_size=16))
    ).requests
    assert request.content == (Segment("h:3", 0, 16), Segment("h:k", 0, 16), Segment("p:a", 0, 8))


def test_an_id_for_the_partial_last_block_is_not_shared_either(write: Write) -> None:
    (request,) = read_trace(
        write(row(id="a", input_tokens=40, hash_ids=[3, 4, 5], hash_block_size=16))
    ).requests
    assert request.content == (Segment("h:3", 0, 16), Segment("h:4", 0, 16), Segment("p:a", 0, 8))


def test_no_hash_ids_are_no_content(write: Write) -> None:
    (request,) = read_trace(write(row(hash_ids=[], hash_block_size=16))).requests
    assert request.content == ()


# Azure


def test_azure_times_have_seven_digits_and_start_at_the_first_request(write: Write) -> None:
    # CR LF, and no newline at the end.
    trace = read_trace(
        write(
            f"{AZURE}\r\n2023-11-16 18:17:03.9799600,4808,10\r\n2023-11-16 18:17:04.0319600,3180,8\r\n"
            "2023-11-16 18:17:04.0319601,110,27"
        )
    )
    # 0.0520000 s and 100 ns later.
    assert [r.arrival for r in trace.requests] == [0, 52 * 10**9, 52 * 10**9 + 10**5]
    assert [(r.id, r.input_tokens, r.output_tokens) for r in trace.requests] == [
        ("2", 4808, 10),
        ("3", 3180, 8),
        ("4", 110, 27),
    ]


def test_azure_2024_times_have_a_zone_and_as_many_digits_as_they_need(write: Write) -> None:
    trace = read_trace(
        write(
            f"{AZURE}\n2024-05-12 00:00:00+00:00,1,2\n2024-05-12 00:00:00.001163+00:00,3,4\n"
            "2024-05-12T00:00:01Z,5,6\n"
        )
    )
    assert [r.arrival for r in trace.requests] == [0, 1_163_000_000, PICOSECONDS]


def test_azure_rows_out_of_order_are_sorted_and_count_from_the_earliest(write: Write) -> None:
    trace = read_trace(write(f"{AZURE}\n2023-11-16 18:00:05,1,1\n2023-11-16 18:00:02,2,2\n"))
    assert [(r.id, r.arrival) for r in trace.requests] == [("3", 0), ("2", 3 * PICOSECONDS)]


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("2023-11-16 18:17:04.0,3180", "2 columns instead of 3: the line may be cut"),
        ("2023-11-16 18:17:04.0,3180,8,9", "4 columns instead of 3"),
        ("yesterday,3180,8", 'TIMESTAMP is "yesterday", not a time'),
        ("2023-13-16 18:17:04,3180,8", "month must be in 1..12"),
        ("2023-11-16 18:17:04+02:00,3180,8", "not a time"),
        ("2023-11-16 18:17:04,x,8", 'ContextTokens is "x", not a whole number'),
        ("2023-11-16 18:17:04,5.5,8", "ContextTokens"),
        ("2023-11-16 18:17:04,0,8", "ContextTokens is 0, not a number from 1 to 1,000,000,000"),
        ("2023-11-16 18:17:04,-3,8", "ContextTokens is -3"),
        ("2023-11-16 18:17:04,7,0", "GeneratedTokens is 0"),
        ("2023-11-16 18:17:04,7,", 'GeneratedTokens is ""'),
        ("2023-11-16 18:17:04," + "9" * 5000 + ",8", "ContextTokens"),
        ("2023-11-16 18:17:04,1_000,8", 'ContextTokens is "1_000", not a whole number'),
        ("2023-11-16 18:17:04,٣,8", "ContextTokens"),
        ("2023-11-16 18:17:04,1٣,8", 'ContextTokens is "1'),
        ("x2023-11-16 18:17:04,1,8", 'TIMESTAMP is "x2023-11-16 18:17:04", not a time'),
        ("2023-11-16 18:17:04,1000000001,8", "ContextTokens is 1000000001, not a number from 1 to"),
    ],
)
def test_a_bad_azure_line_is_told_with_its_place(write: Write, line: str, what: str) -> None:
    error = refused(write(f"{AZURE}\r\n2023-11-16 18:17:03,1,1\r\n{line}\r\n"))
    assert what in error.what
    assert error.where is not None
    assert error.where.endswith("trace:3")


# Mooncake


def test_mooncake_ids_stand_for_512_tokens_and_the_partial_last_block_is_not_shared(write: Write) -> None:
    (request,) = read_trace(write(MOONCAKE)).requests
    # 27 ms. 1100 = 2 x 512 + 76.
    assert request == Request(
        "1", 27 * 10**9, 1100, 5, 0, (Segment("h:7", 0, 512), Segment("h:8", 0, 512), Segment("p:1", 0, 76))
    )


def test_a_mooncake_prompt_of_whole_blocks_is_shared_whole(write: Write) -> None:
    line = '{"timestamp":0,"input_length":1024,"output_length":5,"hash_ids":[7,8]}'
    (request,) = read_trace(write(line)).requests
    assert request.content == (Segment("h:7", 0, 512), Segment("h:8", 0, 512))


def test_mooncake_lines_may_have_no_ids_and_other_keys(write: Write) -> None:
    line = '{"timestamp":0.5,"input_length":9,"output_length":5,"session_id":"x"}'
    (request,) = read_trace(write(line)).requests
    assert (request.arrival, request.content) == (5 * 10**8, ())


@pytest.mark.parametrize("ids", [[7], [7, 8, 9, 10], [7, 8, 9, 10, 11]])
def test_mooncake_ids_that_do_not_cover_the_prompt_are_refused(write: Write, ids: list[int]) -> None:
    error = refused(
        write(json.dumps({"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": ids}))
    )
    assert error.what == f"{len(ids)} hash_ids for 1,100 tokens in blocks of 512"
    assert error.hint == "give 2 ids, or 3 with one for the partial last block"


# Wrong kvplan lines


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ('{"arrival_s":NaN,"input_tokens":4,"output_tokens":2}', "arrival_s is nan, not a time"),
        ('{"arrival_s":Infinity,"input_tokens":4,"output_tokens":2}', "arrival_s is inf"),
        ('{"arrival_s":1e999,"input_tokens":4,"output_tokens":2}', "arrival_s is inf"),
        (row(arrival_s=-1), "arrival_s is -1, not a time from 0 on"),
        (row(arrival_s=-0.5), "arrival_s is -0.5"),
        (row(arrival_s=True), 'arrival_s is "true", not a number'),
        (row(arrival_s="0"), 'arrival_s is "0", not a number'),
        (row(arrival_s=None), "arrival_s is missing"),
        (row(arrival_s=10**11), "arrival_s is 100000000000"),
        (row(arrival_s=10**400), "arrival_s"),
        (row(input_tokens=0), "input_tokens is 0, not a number from 1 to 1,000,000,000"),
        (row(input_tokens=-4), "input_tokens is -4"),
        (row(input_tokens=True), 'input_tokens is "true", not a whole number'),
        (row(input_tokens=4.0), 'input_tokens is "4.0", not a whole number'),
        (row(input_tokens="4"), 'input_tokens is "4", not a whole number'),
        (row(input_tokens=None), "input_tokens is missing"),
        (row(input_tokens=10**9 + 1), "input_tokens is 1000000001"),
        (row(input_tokens=10**400), "input_tokens is 1000"),
        (row(output_tokens=0), "output_tokens is 0"),
        (row(output_tokens=None), "output_tokens is missing"),
        (row(priority=1.5), 'priority is "1.5", not a whole number'),
        (row(priority=False), 'priority is "false"'),
        (row(id=True), 'id is "true", not a text or whole number'),
        (row(id=1.5), 'id is "1.5"'),
        (row(input_token=4), 'unknown key "input_token"'),
        (row(x=1), 'unknown key "x"'),
        (row(content=[["s", 0, 3]]), "content has 3 tokens, the prompt 4"),
        (row(content=[]), "content has 0 tokens, the prompt 4"),
        (row(content="s"), 'content is "s", not a list'),
        (row(content=[["s", 0]]), "content holds"),
        (row(content=[[1, 0, 4]]), "content holds"),
        (row(content=[["s", -1, 4]]), "start and length are from 0 on"),
        (row(content=[["s", 0, -4], ["s", 0, 8]]), "start and length are from 0 on"),
        (row(content=[["s", 0, True]]), 'content length is "true"'),
        (row(content=[["s", 0.0, 4]]), 'content start is "0.0"'),
        (row(content=[["s", 0, 4]], hash_ids=[1], hash_block_size=4), "content and hash_ids both"),
        (row(hash_ids=[1]), "hash_ids without hash_block_size"),
        (row(hash_ids=[1], hash_block_size=0), "hash_block_size is 0"),
        (row(hash_ids=[1.5], hash_block_size=4), "hash_ids is"),
        (row(hash_ids=[True], hash_block_size=4), "hash_ids is"),
        (row(hash_ids={"a": 1}, hash_block_size=4), "hash_ids is"),
        (row(hash_ids=[1, 2], hash_block_size=4), "2 hash_ids for 4 tokens in blocks of 4"),
        ("[1, 2]", '"[1, 2]" instead of a JSON object'),
        ("null", "instead of a JSON object"),
        ('{"arrival_s":0,"input_tokens":4,"output_to', "the line may be cut"),
        ('{"arrival_s":0,"input_tokens":4,"output_tokens":2', "the line may be cut"),
        ('{"arrival_s":0 "input_tokens":4}', "not JSON: Expecting ',' delimiter"),
        ('{"input_tokens":' + "9" * 5000 + "}", "not JSON"),
        ('{"input_tokens":' + "[" * 100_000 + "]" * 100_000 + "}", "not JSON"),
        ('{"arrival_s":0,"input_tokens":' + "[" * 900 + "]" * 900 + "}", "input_tokens is"),
        (row(id="\ud800"), "id"),
        (row(content=[["\udfff", 0, 4]]), "content"),
    ],
)
def test_a_bad_line_is_told_with_its_place_and_can_be_skipped(write: Write, line: str, what: str) -> None:
    path = write(f"{GOOD}\n\n{line}\n")
    error = refused(path)
    assert what in error.what
    assert error.where == f"{path}:3"
    skipped = read_trace(path, skip_bad_lines=True)
    assert (len(skipped.requests), skipped.skipped_lines) == (1, 1)


def test_a_bad_first_line_is_told_with_its_place(write: Write) -> None:
    path = write(f"{row(input_tokens=0)}\n{GOOD}\n")
    error = refused(path)
    assert (error.what, error.where) == (
        "input_tokens is 0, not a number from 1 to 1,000,000,000",
        f"{path}:1",
    )


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("input_token", "did you mean input_tokens?"),
        ("arival_s", "did you mean arrival_s?"),
        (
            "zzz",
            "known: abort_s, arrival_s, content, hash_block_size, hash_ids, id, input_tokens, n, output_tokens, "
            "priority",
        ),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_one(write: Write, key: str, hint: str) -> None:
    assert refused(write(f"{GOOD}\n{row(**{key: 4})}")).hint == hint


def test_the_first_bad_line_is_told_and_the_others_are_counted(write: Write) -> None:
    path = write("\n".join([GOOD, row(input_tokens=0), GOOD, row(output_tokens=0), "nonsense"]))
    error = refused(path)
    assert error.what == "input_tokens is 0, not a number from 1 to 1,000,000,000; 2 more bad lines"
    assert error.where == f"{path}:2"
    skipped = read_trace(path, skip_bad_lines=True)
    assert (len(skipped.requests), skipped.skipped_lines) == (2, 3)


def test_one_more_bad_line_is_one_line(write: Write) -> None:
    error = refused(write("\n".join([GOOD, row(input_tokens=0), row(output_tokens=0)])))
    assert error.what.endswith("; 1 more bad line")


def test_an_id_that_stands_twice_is_refused_and_the_first_is_kept(write: Write) -> None:
    path = write("\n".join([row(id="a", arrival_s=1), row(id="b"), row(id="a", arrival_s=2)]))
    error = refused(path)
    assert (error.what, error.where) == ('id "a" stands twice', f"{path}:3")
    skipped = read_trace(path, skip_bad_lines=True)
    assert [(r.id, r.arrival) for r in skipped.requests] == [("b", 0), ("a", PICOSECONDS)]
    assert skipped.skipped_lines == 1


@pytest.mark.parametrize("names", ["xaa", "xax", "xxa"])
def test_an_id_that_stands_twice_is_found_however_far_apart(write: Write, names: str) -> None:
    path = write("".join(row(id=name) + "\n" for name in names))
    assert "stands twice" in refused(path).what
    assert read_trace(path, skip_bad_lines=True).skipped_lines == 1


def test_a_written_id_may_not_be_the_number_of_another_line(write: Write) -> None:
    assert 'id "2" stands twice' in refused(write(f"{row(id=2)}\n{row()}")).what


def test_a_last_line_that_is_cut_is_told_as_such(write: Write) -> None:
    path = write(f'{GOOD}\n{{"arrival_s":2,"input_to')
    error = refused(path)
    assert "the line may be cut" in error.what
    assert error.where == f"{path}:2"


def test_bytes_that_are_no_text_are_told_with_their_place(write: Write) -> None:
    path = write(b"\xff\xfe{}\n" + GOOD.encode())
    error = refused(path)
    assert (error.what, error.where) == ("not UTF-8: byte 0xff at offset 0", f"{path}:1")
    path = write(GOOD.encode() + b'\n{"id":"\xe9"}\n')
    error = refused(path)
    assert (error.what, error.where) == ("not UTF-8: byte 0xe9 at offset 7", f"{path}:2")
    assert read_trace(path, skip_bad_lines=True).skipped_lines == 1


@pytest.mark.parametrize("content", ["", "\n", "  \n\t\r\n\n"])
def test_a_trace_without_a_line_is_refused(write: Write, content: str) -> None:
    path = write(content)
    error = refused(path)
    assert (error.what, error.where) == ("the trace is empty", path)


@pytest.mark.parametrize("content", [f"{AZURE}\r\n", f"{GOOD[:-1]}\n", f"{AZURE}\nx,y,z\n"])
def test_a_trace_without_a_good_line_is_refused_even_if_bad_ones_are_skipped(
    write: Write, content: str
) -> None:
    assert refused(write(content), format="auto", skip_bad_lines=True).what


def test_a_file_that_is_not_there_is_refused_with_what_could_be_meant(tmp_path: Path) -> None:
    error = refused(str(tmp_path / "none.jsonl"))
    assert error.what == "cannot read the trace: No such file or directory"
    assert error.hint is not None
    assert "chat" in error.hint
    assert "cannot read the trace" in refused(str(tmp_path)).what  # a folder
    assert "cannot read the trace" in refused("no-such-workload").what


# Limits and rates


def test_a_limit_keeps_the_first_lines_of_the_file_and_reads_no_further(write: Write) -> None:
    path = write("\n".join([row(id="a", arrival_s=9), row(id="b", arrival_s=3), row(id="c"), "nonsense"]))
    assert [r.id for r in read_trace(path, limit=2).requests] == ["b", "a"]
    assert [r.id for r in read_trace(path, limit=3).requests] == ["c", "b", "a"]
    assert "not JSON" in refused(path, limit=4).what


def test_skipped_lines_do_not_count_for_the_limit(write: Write) -> None:
    path = write("\n".join([row(id="a"), "nonsense", row(id="b"), row(id="c")]))
    trace = read_trace(path, limit=2, skip_bad_lines=True)
    assert ([r.id for r in trace.requests], trace.skipped_lines) == (["a", "b"], 1)


def test_a_limit_holds_for_scenarios_too(write: Write) -> None:
    rows = [
        SCENARIO_ROW | {"id": name, "arrival_step": step} for name, step in (("a", 9), ("b", 3), ("c", 0))
    ]
    assert [r.id for r in read_trace(write(scenario(rows)), limit=2).requests] == ["b", "a"]


@pytest.mark.parametrize(
    ("scale", "arrivals"),
    [(Fraction(2), [0, 5 * 10**11, 10**12]), (Fraction(1, 3), [0, 3 * 10**12, 6 * 10**12])],
)
def test_a_rate_scale_divides_the_times(write: Write, scale: Fraction, arrivals: list[int]) -> None:
    path = write("\n".join(row(arrival_s=t) for t in (0, 1, 2)))
    assert [r.arrival for r in read_trace(path, rate_scale=scale).requests] == arrivals


def test_scaled_azure_times_start_at_zero(write: Write) -> None:
    path = write(f"{AZURE}\n2023-11-16 18:00:05,1,1\n2023-11-16 18:00:15,2,2\n")
    assert [r.arrival for r in read_trace(path, rate_scale=Fraction(10)).requests] == [0, PICOSECONDS]


def test_numbered_steps_have_no_rate(write: Write) -> None:
    assert refused(write(scenario()), rate_scale=Fraction(2)).where == "--rate-scale"


# Scenarios


def test_a_scenario_brings_settings_and_numbered_steps(write: Write) -> None:
    rows = [
        SCENARIO_ROW | {"content": [["s", 0, 5]], "priority": 2},
        SCENARIO_ROW | {"id": "b", "arrival_step": 0, "prompt_tokens": 0},
    ]
    trace = read_trace(write(scenario(rows, watermark=0.1, max_num_active_seqs=None, policy="priority")))
    assert trace.step_numbered
    assert trace.scenario == SchedulerConfig(9, 4, 16, 4, 32, watermark=0.1, policy="priority")
    assert trace.requests == [
        Request("b", 0, 0, 2),  # the front end turns it away later
        Request("a", 3, 5, 2, 2, (Segment("s", 0, 5),)),
    ]
    assert trace.to_dict()["duration_s"] is None


def test_settings_for_what_is_not_used_may_stand_in_a_scenario(write: Write) -> None:
    unused = {"groups": [{"kind": "full"}], "async_scheduling": False, "pipeline_parallel_size": 1}
    trace = read_trace(write(scenario(None, **unused, speculative=None, model_runner="v2")))
    assert trace.scenario == SchedulerConfig(9, 4, 16, 4, 32)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"async_scheduling": 1}, 'config.async_scheduling is "1"'),
        ({"groups": [{"kind": "sliding"}]}, 'config.groups holds "{\\"kind\\": \\"sliding\\"}"'),
        ({"groups": [{"kind": "full", "window": 4}]}, "config.groups holds"),
        ({"groups": [{"kind": "wide"}]}, "config.groups holds"),
        ({"groups": [{"kind": []}]}, "config.groups holds"),
        ({"groups": [[]]}, "config.groups holds"),
        ({"groups": [{"kind": "sliding", "window": 1}]}, "config.groups: window is 1"),
        ({"groups": [{"kind": "sliding", "window": 4.5}]}, 'window is "4.5", not a whole number'),
        ({"groups": [{"kind": "full", "block_size": -4}]}, "config.groups: block_size is -4"),
        ({"groups": [{"kind": "mamba", "mode": "all"}]}, 'config.groups: mode is "all"'),
        ({"speculative": {"method": "medusa", "k": 3}}, "config.speculative is"),
        ({"speculative": {"method": [], "k": 3}}, "config.speculative is"),
        ({"groups": []}, "config.groups has 0 entries"),
        ({"pipeline_parallel_size": 0}, "config.pipeline_parallel_size is 0"),
        ({"speculative": {"method": "eagle", "k": 0}}, "config.speculative.k is 0"),
        ({"block_sise": 4}, 'unknown setting "block_sise"'),
        ({"block_size": "4"}, 'config.block_size is "4"'),
        ({"block_size": True}, 'config.block_size is "true"'),
        ({"block_size": 4.0}, 'config.block_size is "4.0"'),
        ({"block_size": 0}, "config.block_size is 0"),
        ({"num_gpu_blocks": -1}, "config.num_gpu_blocks is -1"),
        ({"num_gpu_blocks": 10**10}, "config.num_gpu_blocks is 10000000000"),
        ({"enable_prefix_caching": 1}, 'config.enable_prefix_caching is "1"'),
        ({"policy": "lifo"}, 'config.policy is "lifo"'),
        ({"max_num_seqs": "left out"}, "config lacks max_num_seqs"),
        ({"watermark": float("nan")}, "config.watermark"),
        ({"watermark": float("inf")}, "config.watermark"),
        ({"watermark": -0.1}, "config.watermark"),
        ({"long_prefill_token_threshold": -1}, "config.long_prefill_token_threshold is -1"),
    ],
)
def test_a_setting_that_cannot_be_used_is_refused(
    write: Write, changes: dict[str, object], what: str
) -> None:
    path = write(scenario(None, **changes))
    error = refused(path)
    assert what in error.what
    assert error.where == path


def test_a_setting_with_a_near_match_is_told_it(write: Write) -> None:
    assert refused(write(scenario(None, block_sise=4))).hint == "did you mean block_size?"
    assert refused(write(scenario(None, zzz=4))).hint == "leave it out"


@pytest.mark.parametrize(
    ("rows", "what", "place"),
    [
        ([SCENARIO_ROW, 5], 'a request is "5", not an object', ", requests[1]"),
        ([SCENARIO_ROW, SCENARIO_ROW], 'id "a" stands twice', ", requests[1]"),
        ([SCENARIO_ROW | {"prompt_tokens": -1}], "prompt_tokens is -1", ", requests[0]"),
        ([SCENARIO_ROW | {"prompt_tokens": True}], 'prompt_tokens is "true"', ", requests[0]"),
        ([SCENARIO_ROW | {"arrival_step": -1}], "arrival_step is -1", ", requests[0]"),
        ([SCENARIO_ROW | {"arrival_step": 1.5}], 'arrival_step is "1.5"', ", requests[0]"),
        ([SCENARIO_ROW | {"output_tokens": 0}], "output_tokens is 0", ", requests[0]"),
        ([SCENARIO_ROW | {"arrival_step": 3, "abort_step": 2}], "abort_step is 2", ", requests[0]"),
        ([SCENARIO_ROW | {"abort_mid": True}], "abort_mid without abort_step", ", requests[0]"),
        (
            [SCENARIO_ROW | {"abort_step": 4, "abort_mid": 1}],
            'abort_mid is "1", not true or false',
            ", requests[0]",
        ),
        ([SCENARIO_ROW | {"content": [["s", 0, 4]]}], "content has 4 tokens, the prompt 5", ", requests[0]"),
        ([SCENARIO_ROW | {"id": None}], "id is missing", ", requests[0]"),
        ([SCENARIO_ROW | {"id": True}], 'id is "true"', ", requests[0]"),
        ({"a": 1}, "requests is missing or no list", ""),
        ([], "the trace holds no request", ""),
    ],
)
def test_a_bad_request_of_a_scenario_is_told_by_its_place(
    write: Write, rows: object, what: str, place: str
) -> None:
    path = write(scenario(rows))
    error = refused(path)
    assert what in error.what
    assert error.where == f"{path}{place}"


def test_a_scenario_that_is_no_json_or_lacks_its_settings_is_refused(write: Write) -> None:
    path = write(scenario()[:-3])
    error = refused(path)
    assert "not JSON" in error.what
    assert error.where == path
    assert "config is missing" in refused(write('{"requests": [], "config": 5}')).what
    assert "not UTF-8" in refused(write(b'{"config":\n\xff')).what


# Writing


def test_a_request_is_written_as_one_line() -> None:
    request = Request("a", 3 * PICOSECONDS // 2, 4, 2, 1, (Segment("s", 0, 4),))
    assert to_json_line(request) == (
        '{"id":"a","arrival_s":1.5,"input_tokens":4,"output_tokens":2,"priority":1,"content":[["s",0,4]]}'
    )
    plain = '{"id":"a","arrival_s":0.0,"input_tokens":4,"output_tokens":2}'
    assert to_json_line(Request("a", 0, 4, 2)) == plain


@st.composite
def requests(draw: st.DrawFn) -> Request:
    streams = st.text(st.characters(exclude_categories=["Cs"]), max_size=4)
    content = draw(st.lists(st.builds(Segment, streams, st.integers(0, 99), st.integers(1, 99)), max_size=3))
    return Request(
        draw(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=5)),
        # Microseconds of a month: their digits survive the way through a float.
        draw(st.integers(0, 30 * 86_400 * 10**6)) * 10**6,
        sum(s.length for s in content) or draw(st.integers(1, 10**9)),
        draw(st.integers(1, 10**9)),
        draw(st.integers(-9, 9)),
        tuple(content),
    )


@given(st.lists(requests(), min_size=1, max_size=5, unique_by=lambda r: r.id))
def test_what_is_written_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, written: list[Request]
) -> None:
    path = tmp_path_factory.mktemp("round") / "trip.jsonl"
    path.write_text("".join(to_json_line(r) + "\n" for r in written))
    assert read_trace(str(path)).requests == sorted(written, key=lambda r: r.arrival)


# Sources


def test_a_trace_may_come_from_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    class Input:
        buffer = io.BytesIO(f"{GOOD}\n{row(input_tokens=0)}\n".encode())

    monkeypatch.setattr(sys, "stdin", Input)
    assert refused("-").where == "-:2"


def test_every_shipped_workload_is_read_completely() -> None:
    assert workload_names() == ["bursts", "chat", "long-documents", "multi-turn"]
    for name in workload_names():
        trace = read_trace(name)
        assert trace.format == "kvplan"
        assert len(trace.requests) >= 10
        assert trace.skipped_lines == 0


def test_a_file_of_the_name_of_a_workload_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "chat").write_text(GOOD)
    monkeypatch.chdir(tmp_path)
    assert len(read_trace("chat").requests) == 1


def test_the_block_of_the_json_contract_sums_the_trace(write: Write) -> None:
    path = write("\n".join([row(arrival_s=2), row(arrival_s=5.5, input_tokens=6), "nonsense"]))
    assert read_trace(path, skip_bad_lines=True).to_dict() == {
        "path": path,
        "format": "kvplan",
        "requests": 2,
        "input_tokens": 10,
        "output_tokens": 4,
        "duration_s": 3.5,
        "skipped_lines": 1,
    }
    assert Trace("x", "kvplan", []).to_dict()["duration_s"] == 0


@pytest.mark.parametrize(
    ("name", "format", "count"),
    [
        ("azure2023/AzureLLMInferenceTrace_conv.first12000.csv", "azure", 12_000),
        ("azure2023/AzureLLMInferenceTrace_code.first6000.csv", "azure", 6_000),
        ("mooncake/conversation_trace.first6000.jsonl", "mooncake", 6_000),
        ("mooncake/synthetic_trace.first2000.jsonl", "mooncake", 2_000),
    ],
)
def test_real_slices_are_read_completely(shared: Path, name: str, format: str, count: int) -> None:
    path = shared / "traces" / name
    if not path.exists():
        pytest.skip(f"no {name} beside the checkout")
    trace = read_trace(str(path))
    assert (trace.format, len(trace.requests), trace.skipped_lines) == (format, count, 0)
    assert trace.requests[0].arrival == 0
    assert [r.arrival for r in trace.requests] == sorted(r.arrival for r in trace.requests)
    if format == "mooncake":
        assert all(sum(s.length for s in r.content) == r.input_tokens for r in trace.requests)


def test_the_azure_conversation_slice_spans_the_time_of_its_rows(shared: Path) -> None:
    path = shared / "traces" / "azure2023" / "AzureLLMInferenceTrace_conv.first12000.csv"
    if not path.exists():
        pytest.skip("no Azure trace beside the checkout")
    trace = read_trace(str(path), limit=3)
    # 18:15:46.6805900, 18:15:50.9951690, 18:15:51.2224670.
    assert [r.arrival for r in trace.requests] == [0, 4_314_579 * 10**6, 4_541_877 * 10**6]
    assert trace.to_dict()["input_tokens"] == 374 + 396 + 879


# Streaming


def test_a_long_trace_is_put_in_order_within_its_reach(write: Callable[..., str]) -> None:
    rows = [row(id=str(i), arrival_s=float(i)) for i in (3, 1, 2, 0, 5, 4)]
    stream = open_trace(write("\n".join(rows)), reorder=3)
    assert [r.id for r in stream] == ["0", "1", "2", "3", "4", "5"]
    assert stream.to_dict()["requests"] == 6
    assert stream.expected == 6


@pytest.mark.parametrize(("limit", "low", "high"), [(None, 97, 103), (7, 7, 7)])
def test_how_many_requests_there_will_be_is_told_from_the_bytes(
    write: Callable[..., str], limit: int | None, low: int, high: int
) -> None:
    path = write("\n".join(row(id=str(i), arrival_s=float(i)) for i in range(100, 200)))
    stream = open_trace(path, limit=limit, reorder=20)
    requests = iter(stream)
    next(requests)  # by then 40 are read, or as many as the limit lets in
    assert stream.expected is not None
    assert low <= stream.expected <= high
    assert len(list(requests)) == (limit or 100) - 1
    assert stream.expected == (limit or 100)


def test_what_was_handed_out_is_told_at_any_moment(write: Callable[..., str]) -> None:
    lines = [row(id=str(i), arrival_s=float(i), input_tokens=i + 1) for i in range(9)]
    stream = open_trace(write("\n".join([*lines, "nonsense"])), reorder=2, skip_bad_lines=True, samples=3)
    assert stream.to_dict()["requests"] == 0
    for number, request in enumerate(stream):
        assert request.id == str(number)
        told = stream.to_dict()
        assert told == stream.to_dict()
        counts = {key: told[key] for key in ("requests", "input_tokens", "output_tokens", "duration_s")}
        assert counts == {
            "requests": number + 1,
            "input_tokens": (number + 1) * (number + 2) // 2,
            "output_tokens": 3 * 2 * (number + 1),
            "duration_s": float(number),
        }
    assert stream.to_dict()["requests"] == 9


def test_requests_before_a_bad_line_go_on_as_far_as_they_are_in_order(write: Callable[..., str]) -> None:
    lines = [row(id=str(i), arrival_s=float(i)) for i in range(9)]
    requests = iter(open_trace(write("\n".join([*lines[:5], "nonsense", *lines])), reorder=2))
    seen = [next(requests).id, next(requests).id]
    with pytest.raises(InputError, match=r"not JSON.*; 5 more bad lines"):  # ids that stand twice
        next(requests)
    assert seen == ["0", "1"]  # of twice two that were read, the earlier half


def test_times_before_1970_are_in_order_too(write: Callable[..., str]) -> None:
    path = write(f"{AZURE}\n1969-12-31 23:59:58,1,1\n1969-12-31 23:59:57,2,2\n1970-01-01 00:00:01,3,3\n")
    for reorder in (None, 2):
        assert [r.arrival for r in open_trace(path, reorder=reorder)] == [0, PICOSECONDS, 4 * PICOSECONDS]


def test_a_request_that_comes_too_late_is_refused(write: Callable[..., str]) -> None:
    rows = [row(id=str(i), arrival_s=float(i)) for i in (5, 6, 7, 8, 0)]
    with pytest.raises(
        InputError, match="arrives before others that stand more than 2 lines earlier"
    ) as caught:
        list(open_trace(write("\n".join(rows)), reorder=2))
    assert caught.value.hint == "sort the trace by arrival"


def test_a_trace_is_read_once(write: Callable[..., str]) -> None:
    stream = open_trace(write(row(id="a")))
    assert len(list(stream)) == 1
    with pytest.raises(RuntimeError, match="once"):
        list(stream)


@pytest.mark.parametrize("piece", [1, 100, 1 << 16])
def test_doubles_among_very_many_ids_are_found_at_the_end(
    write: Callable[..., str], monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    monkeypatch.setattr("kvplan.trace._EXACT_IDS", 2)
    monkeypatch.setattr("kvplan.trace_lines._PIECE", piece)
    for names in ("abcda", "abcdd", "abcdefghh"):
        with pytest.raises(InputError, match="an id stands twice"):
            list(open_trace(write("\n".join(row(id=name) for name in names))))
    for names in ("aa", "aba", "abb"):
        with pytest.raises(InputError, match=f'id "{names[-1]}" stands twice') as caught:
            list(open_trace(write("\n".join(row(id=name) for name in names))))
        assert caught.value.where is not None
        assert caught.value.where.endswith(f":{len(names)}")
    assert len(list(open_trace(write("\n".join(row(id=name) for name in "abcdefgh"))))) == 8


# Sources without end, and none


def test_a_line_without_end_is_refused_before_it_fills_the_memory(
    write: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvplan.trace_lines._LONGEST_LINE", 1 << 20)
    first = refused(write("x" * (1 << 20) + "\n"))
    assert (first.what, first.where and first.where[-2:]) == ("a line is longer than 1 MiB", ":1")
    path = write(row(id="a") + "\n" + row(id="b" * (1 << 20)))
    later = refused(path, skip_bad_lines=True)
    assert (later.what, later.where) == ("a line is longer than 1 MiB", f"{path}:2")


def test_a_scenario_without_end_is_refused(
    write: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvplan.trace_lines._LARGEST_SCENARIO", 1 << 20)
    assert refused(write('{"config":\n' * 200_000)).what == "a scenario of more than 1 MiB"


def test_a_closed_standard_input_is_no_trace_and_hinders_no_other(
    write: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", None)
    assert refused("-").what == "standard input is closed"
    assert len(read_trace(write(row(id="a"))).requests) == 1
