"""Wrong input: one clear error, exit code 2, no traceback, nothing written.

``errors.txt`` holds commands and, word for word, what each prints. ``KVPLAN_UPDATE_SNAPSHOTS=1`` rewrites the
texts; a new command is added as a line ``$ kvplan ...``.
"""

from __future__ import annotations

import io
import json
import os
import shlex
import sys
from pathlib import Path

import pytest
from command_line import UPDATE, Cli, listing

TRANSCRIPT = Path(__file__).parent / "errors.txt"
LINE = '{"id": "%s", "arrival_s": %s, "input_tokens": %s, "output_tokens": %s}\n'
GOOD = LINE % ("a", "0", "10", "5")
GOOD_SCENARIO = {
    "config": {
        "num_gpu_blocks": 14,
        "block_size": 4,
        "max_num_batched_tokens": 8,
        "max_num_seqs": 4,
        "max_model_len": 32,
        "async_scheduling": True,
    },
    "requests": [{"id": "a", "arrival_step": 0, "prompt_tokens": 4, "output_tokens": 2}],
}
CHECKS = "version: 1\nengine: vllm@0.33\n"
MODEL = "hidden_size: 64, intermediate_size: 128, vocab_size: 100, num_hidden_layers: 2"

#: Files that the commands name; all are wrong but the good ones.
FILES: dict[str, str | bytes] = {
    "good.jsonl": GOOD,
    "good.scenario.json": json.dumps(GOOD_SCENARIO),
    "empty.jsonl": "",
    "blank.jsonl": "\n\n",
    "nan.jsonl": GOOD + LINE % ("b", "NaN", "10", "5"),
    "infinite.jsonl": GOOD + LINE % ("b", "1e999", "10", "5"),
    "negative-time.jsonl": GOOD + LINE % ("b", "-1", "10", "5"),
    "negative.jsonl": GOOD + LINE % ("b", "1", "-10", "5"),
    "zero.jsonl": GOOD + LINE % ("b", "1", "10", "0"),
    "huge.jsonl": GOOD + LINE % ("b", "1", "99999999999999999999", "5"),
    "text.jsonl": GOOD + LINE % ("b", "1", '"ten"', "5"),
    "fraction.jsonl": GOOD + LINE % ("b", "1", "1.5", "5"),
    "missing.jsonl": GOOD + '{"id": "b", "arrival_s": 1, "input_tokens": 10}\n',
    "misspelt.jsonl": GOOD + '{"id": "b", "arival_s": 1, "input_tokens": 10, "output_tokens": 5}\n',
    "twice.jsonl": GOOD + GOOD,
    "array.jsonl": GOOD + "[1, 2]\n",
    "deep.jsonl": GOOD + "[" * 100_000 + "\n",
    "two-bad.jsonl": GOOD + "{\n" + GOOD.replace('"a"', '"c"') + "nonsense\n{\n",
    "prose.txt": "Call me Ishmael.\n",
    "latin1.jsonl": GOOD.encode() + '{"id": "é"'.encode("latin-1") + b"\n",
    "binary.jsonl": b"\x89PNG\r\n\x1a\n",
    "cut.jsonl": GOOD + GOOD[:30],
    "cut.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,374,44\n2023-11-16 18:1",
    "azure.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,374,44\n",
    "cut.scenario.json": '{"config": {"num_gpu_blocks": 14,\n "requests": [',
    "groups.scenario.json": '{"config": {"groups": [{"kind": "sliding"}]}, "requests": []}',
    "setting.scenario.json": '{"config": {"max_num_seq": 4}, "requests": []}',
    "object.yaml": f"m: {{hidden_size: !!python/object/apply:os.system ['touch made'], {MODEL[17:]}}}\n",
    "checks-object.yaml": CHECKS + "checks: [{model: !!python/name:os.system , expect: {fits: true}}]\n",
    "no-heads.yaml": f"m: {{architectures: [LlamaForCausalLM], {MODEL}}}\n",
    "heads.yaml": f"m: {{architectures: [LlamaForCausalLM], num_attention_heads: 3, {MODEL}}}\n",
    "several.yaml": "a: {}\nb: {}\n",
    "tab.yaml": "a:\n\t- b\n",
    "compose.yaml": (
        "services:\n"
        "  chat:\n"
        "    image: vllm/vllm-openai\n"
        "    command: --model llama-2-13b --cpu-offload-gb 4\n"
        "  code: {image: vllm/vllm-openai, command: --model llama-2-7b}\n"
        "  proxy: {image: nginx}\n"
    ),
    "serve.sh": "vllm serve $MODEL \\\n  --max-model-len 4096 $EXTRA\n",
    "config-list.yaml": "model: [a]\nblock-size: many\n",
    "from.yaml": CHECKS + "checks: [{gpu: l4, from: compose.yaml#chat, expect: {fits: true}}]\n",
    "from-stdin.yaml": CHECKS + "checks: [{gpu: l4, from: '-', expect: {fits: true}}]\n",
    "from-both.yaml": CHECKS
    + "checks: [{from: serve.sh, vllm_command: vllm serve a, expect: {fits: true}}]\n",
    "list.json": "[]",
    "config/config.json": '{"architectures": ["LlamaForCausalLM"], "hidden_size": 64,',
}


def sections() -> dict[str, str]:
    """Commands of the transcript and what stands below each."""
    found: dict[str, str] = {}
    command = ""
    for line in TRANSCRIPT.read_text(encoding="utf-8").splitlines():
        if line.startswith("$ kvplan"):
            command = line.removeprefix("$ kvplan").strip()
            assert command not in found, f"{command} stands twice"
            found[command] = ""
        elif command and line:
            found[command] += line + "\n"
    return found


def rewrite(command: str, text: str) -> None:
    head = TRANSCRIPT.read_text(encoding="utf-8").partition("$ kvplan")[0]
    new = sections() | {command: text}
    body = "\n".join(f"$ kvplan {name}\n{shown}" for name, shown in new.items())
    TRANSCRIPT.write_text(head + body, encoding="utf-8")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of the run, with wrong files in it."""
    for name, content in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    (tmp_path / "folder").mkdir()
    return tmp_path


@pytest.mark.parametrize("command", sections())
def test_wrong_input_gives_its_error_and_writes_nothing(cli: Cli, folder: Path, command: str) -> None:
    before = listing(folder)
    outcome = cli(command)
    if UPDATE:
        rewrite(command, outcome.err)
    assert outcome.err == sections()[command]
    assert outcome.out == ""
    assert outcome.code == 2
    assert listing(folder) == before


@pytest.mark.parametrize("command", sections())
def test_with_json_the_same_error_is_a_document(cli: Cli, folder: Path, command: str) -> None:
    before = listing(folder)
    name, *rest = shlex.split(command)
    outcome = cli("", name, "--json", *rest)
    error = outcome.document["error"]
    assert set(error) == {"message", "where", "hint"}
    where = f" ({error['where']})" if error["where"] else ""
    assert f"kvplan: error: {error['message']}{where}\n{error['hint']}\n" == sections()[command]
    assert outcome.err == ""
    assert outcome.code == 2
    assert listing(folder) == before


@pytest.mark.parametrize("command", sections())
def test_an_error_is_two_lines_that_say_what_where_and_how_to_mend_it(command: str) -> None:
    error, hint = sections()[command].splitlines()
    assert error.startswith("kvplan: error: ")
    assert error.endswith(")")
    assert not hint.endswith(".")
    assert max(len(error), len(hint)) <= 200


# Where the message is partly the parser's own, its words may change with Typer's version


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("size llama-2-13b --swap-space 4GiB", "--swap-space"),
        ("size llama-2-13b --sequence 4096", "--sequence"),
        ("simulate chat extra", "extra"),
        ("size llama-2-13b --seq", "--seq"),
        ("simulate", "TRACE"),
        ("check", "FILE.yaml"),
        ("siz llama-2-13b", "siz"),
    ],
)
def test_wrong_usage_names_what_is_wrong_and_where_help_is(
    cli: Cli, folder: Path, command: str, named: str
) -> None:
    before = listing(folder)
    outcome = cli(command)
    error, hint = outcome.err.splitlines()
    assert error.startswith("kvplan: error: ")
    assert named in error
    assert "--help" in hint
    assert (outcome.code, outcome.out) == (2, "")
    assert listing(folder) == before


def test_wrong_usage_names_the_command_that_was_used_wrongly(cli: Cli) -> None:
    assert cli("size llama-2-13b --seq").err.splitlines()[1] == "kvplan size --help shows the usage"


@pytest.mark.parametrize(
    ("command", "value", "option"),
    [
        ("size llama-2-13b --seq four", '"four"', "--seq"),
        ("size llama-2-13b --seq 4096.5", '"4096.5"', "--seq"),
        ("size llama-2-13b --seq ''", '""', "--seq"),
        ("size llama-2-13b --gpu-memory-utilization most", '"most"', "--gpu-memory-utilization"),
        ("simulate chat --step-time fast", '"fast"', "--step-time"),
        ("simulate chat --limit 1e3", '"1e3"', "--limit"),
    ],
)
def test_a_number_that_is_none_is_quoted_with_its_option(
    cli: Cli, command: str, value: str, option: str
) -> None:
    outcome = cli(command)
    assert outcome.code == 2
    error, _hint = outcome.err.splitlines()
    assert value in error
    assert option in error
    assert "Input should be" not in error


@pytest.mark.parametrize("option", ["--seq", "--concurrency", "--block-size", "--max-model-len"])
def test_a_number_that_is_too_large_is_told_the_largest(cli: Cli, option: str) -> None:
    outcome = cli(f"size llama-2-13b {option} 99999999999999999999")
    assert outcome.code == 2
    error, hint = outcome.err.splitlines()
    assert "99999999999999999999" in error
    assert option in error
    assert "10,000,000,000" in hint


def test_no_command_at_all_shows_the_help_as_it_is(cli: Cli) -> None:
    outcome = cli("")
    assert outcome == cli("--help")
    assert outcome.code == 0
    assert "Usage: kvplan [OPTIONS] COMMAND [ARGS]..." in outcome.out.splitlines()


@pytest.mark.parametrize(
    "command",
    ["simulate {}", "size {}", "check {}", "size llama-2-13b --models {}", "simulate good.jsonl --events {}",
     "simulate good.jsonl --requests {}", "simulate good.jsonl --timeline {}", "check c.yaml --junit {}"],
)  # fmt: skip
def test_a_name_longer_than_a_file_name_can_be_is_refused(cli: Cli, folder: Path, command: str) -> None:
    (folder / "c.yaml").write_text(CHECKS + "checks: [{model: llama-2-13b, gpu: l4, expect: {fits: false}}]")
    outcome = cli(command.format("n" * 300))
    assert outcome.code == 2
    assert outcome.err.startswith("kvplan: error: ")


@pytest.mark.parametrize(
    ("command", "tag"),
    [
        ("check mapping.yaml", "python/object:os.system"),
        ("check list.yaml", "python/tuple"),
        ("size model.yaml", "python/object:os.system"),
    ],
)
def test_a_tag_is_refused_as_a_tag_wherever_it_stands(
    cli: Cli, tmp_path: Path, command: str, tag: str
) -> None:
    (tmp_path / "mapping.yaml").write_text(CHECKS + "checks: [!!python/object:os.system {model: a}]\n")
    (tmp_path / "list.yaml").write_text(CHECKS + "checks: !!python/tuple [{model: a}]\n")
    (tmp_path / "model.yaml").write_text("m: !!python/object:os.system {hidden_size: 1}\n")
    outcome = cli(command)
    assert outcome.code == 2
    assert outcome.err.startswith(f'kvplan: error: the tag "{tag}" is not allowed here ')


@pytest.mark.parametrize(
    ("command", "message", "hint"),
    [
        ("simulate deep.jsonl", "nested too deeply (deep.jsonl:2)", "--skip-bad-lines"),
        ("simulate missing.jsonl", "output_tokens is missing (missing.jsonl:2)", "--skip-bad-lines"),
        ("simulate good.jsonl --format mooncake", "timestamp is missing (good.jsonl:1)", "--skip-bad-lines"),
        ("simulate chatt", "(chatt)", "did you mean chat?"),
        ("size llama-2-13b --margin most", '"most" is no margin (--margin)', "low, mid or high"),
        ("size llama-2-13b --gpu-memory 99999999999TiB", '"99999999999TiB"', "at most"),
        ("size config", "(config/config.json:1)", "JSON"),
        ("size list.json", "(list.json)", "JSON"),
        ('size --vllm-command "vllm serve llama-2-13b --foo"', "--foo is not handled", "--ignore-flag foo"),
        ("simulate good.jsonl --events-detail", "--events-detail", "--events OUT.jsonl"),
    ],
)
def test_an_error_says_no_more_and_no_less_than_is_true(
    cli: Cli, folder: Path, command: str, message: str, hint: str
) -> None:
    outcome = cli(command)
    assert (outcome.code, outcome.out) == (2, "")
    error, mending = outcome.err.splitlines()
    assert error.startswith("kvplan: error: ")
    assert message in error
    assert hint in mending


def test_a_pool_of_only_the_null_block_gets_a_hint_that_can_be_followed(cli: Cli) -> None:
    outcome = cli("simulate chat --num-gpu-blocks-override 1")
    assert outcome.err.startswith("kvplan: error: ")
    assert "--max-model-len 0" not in outcome.err


@pytest.mark.parametrize("line", [2, 3])
def test_a_bad_line_can_be_skipped_and_is_counted(cli: Cli, tmp_path: Path, line: int) -> None:
    lines = [GOOD, GOOD.replace('"a"', '"b"')]
    lines.insert(line - 1, "nonsense\n")
    (tmp_path / "trace.jsonl").write_text("".join(lines))
    command = "simulate trace.jsonl --num-gpu-blocks-override 100"
    assert f"(trace.jsonl:{line})" in cli(command).err
    outcome = cli(f"{command} --skip-bad-lines --json")
    assert outcome.code == 0
    assert outcome.document["trace"]["skipped_lines"] == 1
    assert outcome.document["requests"]["finished"] == 2
    assert outcome.err == "kvplan: warning: 1 bad line skipped\n"


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
@pytest.mark.parametrize("command", ["simulate good.jsonl", "check good.jsonl", "size object.yaml"])
def test_a_file_that_may_not_be_read_is_an_error(cli: Cli, folder: Path, command: str) -> None:
    path = folder / command.split()[1]
    path.chmod(0)
    outcome = cli(command)
    path.chmod(0o600)
    assert outcome.code == 2
    assert "Permission denied" in outcome.err


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_is_found_before_the_run(cli: Cli, folder: Path) -> None:
    (folder / "folder").chmod(0o500)
    outcome = cli("simulate good.jsonl --events folder/e.jsonl")
    (folder / "folder").chmod(0o700)
    assert outcome.code == 2
    assert outcome.err.startswith('kvplan: error: "folder" cannot be written to (--events)\n')


def test_an_error_of_kvplan_itself_is_no_user_error(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("kvplan.jobs.size.serve", broken)
    with pytest.raises(ZeroDivisionError):
        cli("size llama-2-13b --gpu l4")


def test_json_errors_stand_alone_on_one_line(cli: Cli) -> None:
    outcome = cli("size llama-2-13bb --json")
    assert json.loads(outcome.out)["error"] == {
        "message": 'unknown model "llama-2-13bb"',
        "where": "MODEL",
        "hint": "did you mean llama-2-13b or llama-3.2-3b or llama-3.2-1b? kvplan models lists all",
    }
    assert outcome.out.count("\n") == 1


@pytest.mark.parametrize(
    "command",
    ["simulate -", "audit -", "size --from - --gpu l4", "calibrate - --model llama-3.1-8b --gpu l4"],
)
def test_a_closed_standard_input_is_an_error(cli: Cli, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    outcome = cli(command)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err == (
        "kvplan: error: standard input is closed (-)\ngive a file, or open standard input\n"
    )


def test_standard_input_is_read_once(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    log = (
        b"INFO 12-01 10:00:00 [loggers.py:259] Engine 000: Avg prompt throughput: 1.0 tokens/s, Avg generation "
        b"throughput: 1.0 tokens/s, Running: 1 reqs, Waiting: 0 reqs, GPU KV cache usage: 1.0%\n"
    )
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(log)))
    outcome = cli("audit - --trace -")
    assert (outcome.code, outcome.err) == (
        2,
        "kvplan: error: standard input was read already (-)\ngive one of the two as a file\n",
    )
