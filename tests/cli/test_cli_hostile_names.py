"""Names that try to be more than names: shown as they are written, nowhere obeyed."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from command_line import Cli, Outcome

#: A colour, a cursor move, a title, a new line with a workflow command, rich's markup, XML, a link, a
#: right-to-left override, a line separator, a lone bell and characters that XML 1.0 does not have.
EVIL = (
    "\x1b[31mred\x1b[2J\x1b]0;title\x07\r\n::error file=x::injected\n::add-mask::1 "
    "[red]markup[/red] [link=x]y[/link] :smile: <b>&amp;]]>\"' \u202eevil\u2028 \x00\x0b\ufffe \x9b31m %0A"
)
SEEN = (
    "\\x1b[31mred\\x1b[2J\\x1b]0;title\\x07\\r\\n::error file=x::injected\\n::add-mask::1 "
    "[red]markup[/red] [link=x]y[/link] :smile: <b>&amp;]]>\"' \\u202eevil\\u2028 \\x00\\x0b\\ufffe \\x9b31m %0A"
)
#: The same as far as a shell can pass it, and without what means something to an option that takes a name.
NAME = "".join(c for c in EVIL if c not in "\x00,='\"")
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "vocab_size": 100,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}


def yaml(value: object) -> str:
    """A value as YAML: JSON is, and escapes what YAML cannot hold."""
    return json.dumps(value)


def is_tame(outcome: Outcome) -> bool:
    """Whether nothing was printed that a terminal obeys; new lines are the output's own."""
    return all(c.isprintable() or c == "\n" for c in outcome.out + outcome.err)


def squeezed(text: str) -> str:
    """Without blanks and line ends: tables fold names wherever they must."""
    return "".join(text.split())


@pytest.fixture
def catalogue(tmp_path: Path) -> str:
    (tmp_path / "evil.yaml").write_text(yaml({EVIL: LLAMA | {"aliases": [EVIL + "2"], "source": EVIL}}))
    return "evil.yaml"


@pytest.fixture
def trace(tmp_path: Path) -> str:
    row = {"id": EVIL, "arrival_s": 0, "input_tokens": 100, "output_tokens": 5}
    (tmp_path / "evil.jsonl").write_text(json.dumps(row) + "\n")
    return "evil.jsonl --num-gpu-blocks-override 100"


@pytest.fixture
def checks(tmp_path: Path) -> str:
    check = {"name": EVIL, "model": "llama-2-13b", "gpu": "l4"}
    check["expect"] = {"fits": True, "capacity.reason": EVIL}  # type: ignore[assignment]
    document = {"version": 1, "engine": "vllm@0.33", "checks": [check]}
    (tmp_path / "evil.yaml").write_text(yaml(document))
    return "check evil.yaml"


def test_a_model_name_is_shown_literally_in_every_table(cli: Cli, catalogue: str) -> None:
    for command in (
        f"size {catalogue}",
        f"size {catalogue} --gpu l4 --explain",
        f"size {catalogue} --gpu l4,t4",
        f"models --models {catalogue}",
        f"simulate chat --limit 2 --model {catalogue} --gpu l4",
    ):
        outcome = cli(command)
        assert outcome.code == 0, command
        assert is_tame(outcome), command
        if command.startswith("size"):
            assert squeezed(SEEN) in squeezed(outcome.out), command


def test_every_text_of_a_catalogue_entry_is_shown_literally(cli: Cli, catalogue: str) -> None:
    outcome = cli(f"models --models {catalogue}", EVIL)
    assert outcome.code == 0
    assert is_tame(outcome)
    assert squeezed(outcome.out).count(squeezed(SEEN)) == 3


def test_an_unknown_name_is_quoted_literally(cli: Cli, catalogue: str) -> None:
    for command in (
        ["size"],
        ["size --gpu l4 --models", catalogue],
        ["size llama-2-13b --gpu"],
        ["size llama-2-13b --dtype"],
        ["size llama-2-13b --engine"],
        ["size llama-2-13b --gpu-memory"],
        ["size llama-2-13b --set"],
        ["size --vllm-command"],
        ["models"],
        ["gpus"],
        ["simulate chat --format"],
        ["simulate chat --scheduling-policy"],
        ["check x.yaml --output-format"],
        [""],
    ):
        outcome = cli(*command, NAME)
        assert outcome.code == 2, command
        assert outcome.out == "", command
        assert is_tame(outcome), command
        assert outcome.err.count("\n") == 2, command
        assert "\\x1b[31mred" in outcome.err, command


def test_a_near_match_is_quoted_literally_too(cli: Cli, catalogue: str) -> None:
    outcome = cli(f"size --models {catalogue}", NAME)
    assert outcome.code == 2
    assert "did you mean" in outcome.err
    assert is_tame(outcome)


def test_names_in_json_are_the_names_themselves(cli: Cli, catalogue: str) -> None:
    outcome = cli(f"size {catalogue} --json")
    assert outcome.document["model"]["name"] == EVIL
    assert is_tame(outcome)
    error = cli("size --json", "\x1b[31m").document["error"]
    assert error["message"] == 'unknown model "\x1b[31m"'


def test_a_trace_id_is_shown_literally(cli: Cli, tmp_path: Path, trace: str) -> None:
    assert is_tame(cli(f"simulate {trace}"))
    path = tmp_path / "evil.jsonl"
    path.write_text(path.read_text() * 2)
    outcome = cli(f"simulate {trace}")
    assert outcome.code == 2
    assert is_tame(outcome)
    assert outcome.err.count("\n") == 2


def test_a_trace_id_comes_back_unchanged_in_the_files(cli: Cli, tmp_path: Path, trace: str) -> None:
    assert cli(f"simulate {trace} --requests r.csv --events e.jsonl").code == 0
    with (tmp_path / "r.csv").open(newline="") as file:
        assert [row["id"] for row in csv.DictReader(file)] == [EVIL]
    lines = [json.loads(line) for line in (tmp_path / "e.jsonl").read_text().split("\n")[:-1]]
    assert lines[0]["arrived"] == [EVIL]
    assert [name for line in lines for name in line.get("finished", [])] == [EVIL]


@pytest.mark.parametrize("name", ["=1+1", "+1", "-1", "@sum", "\t=1", "\r=1"])
def test_a_trace_id_is_no_formula_in_a_spreadsheet(cli: Cli, tmp_path: Path, name: str) -> None:
    row = {"id": name, "arrival_s": 0, "input_tokens": 10, "output_tokens": 5}
    (tmp_path / "t.jsonl").write_text(json.dumps(row))
    cli("simulate t.jsonl --num-gpu-blocks-override 100 --requests r.csv")
    with (tmp_path / "r.csv").open(newline="") as file:
        assert [row["id"] for row in csv.DictReader(file)] == [f"'{name}"]


def test_a_file_name_is_shown_literally(cli: Cli, tmp_path: Path) -> None:
    name = "\x1b[31m\n[red]x.jsonl"
    (tmp_path / name).write_text('{"id": "a", "arrival_s": 0, "input_tokens": 10, "output_tokens": 5}\n')
    outcome = cli("simulate --num-gpu-blocks-override 100", name)
    assert outcome.code == 0
    assert is_tame(outcome)
    assert outcome.out.startswith("\\x1b[31m\\n[red]x.jsonl: 1 request,")
    (tmp_path / name).write_text("nonsense")
    assert is_tame(cli("simulate", name))


def test_a_check_name_is_shown_literally_in_the_table(cli: Cli, checks: str) -> None:
    outcome = cli(checks)
    assert outcome.code == 1
    assert is_tame(outcome)
    assert "[red]" in outcome.out
    assert "\\x1b[31mred" in outcome.out


def test_a_junit_report_parses_and_shows_the_name_literally(cli: Cli, tmp_path: Path, checks: str) -> None:
    assert cli(f"{checks} --junit j.xml").code == 1
    (case,) = ET.parse(tmp_path / "j.xml").iter("testcase")
    assert case.get("name") == SEEN
    (failure,) = case.iter("failure")
    assert SEEN in (failure.get("message") or "")
    assert SEEN in (failure.text or "")


def test_no_name_injects_a_line_into_the_annotations(cli: Cli, checks: str) -> None:
    outcome = cli(f"{checks} --output-format github")
    assert outcome.code == 1
    assert is_tame(outcome)
    lines = outcome.out.splitlines()
    assert [line.split()[0].split("::")[1] for line in lines] == ["error", "error", "notice"]
    assert all(line.startswith(("::error file=evil.yaml,line=", "::notice::")) for line in lines)
    assert "%250A" in lines[0]


def test_a_file_name_injects_nothing_into_the_annotations(cli: Cli, tmp_path: Path) -> None:
    name = "a,line=9::b\n::error::x.yaml"
    (tmp_path / name).write_text(
        "version: 1\nengine: vllm@0.33\nchecks: [{model: llama-2-13b, gpu: l4, expect: {fits: true}}]"
    )
    error, _notice = cli("check --output-format github", name).out.splitlines()
    properties = error.removeprefix("::error ").partition("::")[0].split(",")
    assert [item.partition("=")[0] for item in properties] == ["file", "line", "col", "title"]
    assert "line=3" in properties
