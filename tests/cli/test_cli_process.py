"""kvplan as its own process, from an empty folder: what only a process can show."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import Cli, listing

import kvplan

ROOT = Path(kvplan.__file__).resolve().parents[1]


def spawn(
    folder: Path, *arguments: str, stdin: bytes = b"", **variables: str
) -> subprocess.CompletedProcess[bytes]:
    environment = {
        name: value for name, value in os.environ.items() if name not in ("COLUMNS", "FORCE_COLOR", "TERM")
    }
    environment |= {"PYTHONPATH": str(ROOT), "COLUMNS": "80", "NO_COLOR": "1", **variables}
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "kvplan", *arguments],
        cwd=folder,
        env=environment,
        input=stdin,
        capture_output=True,
        timeout=60,
        check=False,
    )


def test_a_process_prints_what_the_function_prints(cli: Cli, tmp_path: Path) -> None:
    for command in (
        "size llama-2-13b --seq 4096 --json",
        "size llama-2-13b --gpu l4",
        "size nothing-like-it",
    ):
        ours = cli(command)
        child = spawn(tmp_path, *command.split())
        assert (child.returncode, child.stdout.decode(), child.stderr.decode()) == (
            ours.code,
            ours.out,
            ours.err,
        )
    assert listing(tmp_path) == {}


def test_it_says_its_version(tmp_path: Path) -> None:
    child = spawn(tmp_path, "--version")
    assert child.stdout.decode().split() == ["kvplan", kvplan.__version__]
    assert child.returncode == 0


def test_usage_says_kvplan_however_it_was_started(tmp_path: Path) -> None:
    assert spawn(tmp_path, "--help").stdout.startswith(b"Usage: kvplan [OPTIONS]")


def test_a_trace_can_come_from_standard_input(tmp_path: Path) -> None:
    line = b'{"id": "a", "arrival_s": 0, "input_tokens": 10, "output_tokens": 5}\n'
    child = spawn(tmp_path, "simulate", "-", "--num-gpu-blocks-override", "100", "--json", stdin=line)
    assert child.returncode == 0
    document = json.loads(child.stdout)
    assert document["trace"]["path"] == "-"
    assert document["requests"]["finished"] == 1


def test_an_empty_standard_input_is_an_error(tmp_path: Path) -> None:
    child = spawn(tmp_path, "simulate", "-")
    assert child.returncode == 2
    assert child.stderr.startswith(b"kvplan: error: the trace is empty (-)\n")


def test_there_is_no_progress_without_a_terminal(tmp_path: Path) -> None:
    child = spawn(tmp_path, "simulate", "bursts", "--num-gpu-blocks-override", "2000", "--limit", "300")
    assert (child.returncode, child.stderr) == (0, b"")


@pytest.mark.skipif(os.name == "nt", reason="pipes close otherwise there")
@pytest.mark.parametrize("arguments", [["models"], ["models", "--json"], ["size", "llama-2-13b"]])
def test_a_reader_that_leaves_early_gets_no_verdict_and_no_traceback(
    tmp_path: Path, arguments: list[str]
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    child = subprocess.run(
        [sys.executable, "-m", "kvplan", *arguments],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=writing,
        stderr=subprocess.PIPE,
        timeout=60,
        check=False,
    )
    os.close(writing)
    assert (child.returncode, child.stderr) == (141, b"")  # no verdict was delivered


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_tables_print_in_every_encoding(tmp_path: Path, encoding: str) -> None:
    for command in ("size llama-2-13b --gpu a100-80gb", "simulate chat --limit 3"):
        child = spawn(tmp_path, *command.split(), PYTHONIOENCODING=encoding)
        assert (child.returncode, child.stderr) == (0, b"")
        assert child.stdout.decode(encoding)


def test_errors_print_in_every_encoding(tmp_path: Path) -> None:
    child = spawn(tmp_path, "size", "modèle-日本", PYTHONIOENCODING="ascii")
    assert child.returncode == 2
    assert child.stderr.startswith(b"kvplan: error: unknown model ")
    assert b"Traceback" not in child.stderr


def test_shell_completion_is_there(tmp_path: Path) -> None:
    # The shell that is asked for, not that which runs the tests: there may be none.
    child = spawn(tmp_path, "--show-completion", "bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert child.returncode == 0
    assert b"kvplan" in child.stdout


@pytest.mark.skipif(not Path("/dev/stdout").exists(), reason="needs /dev/stdout")
def test_an_output_can_be_a_pipe(tmp_path: Path) -> None:
    child = spawn(
        tmp_path, *["simulate", "chat", "--limit", "2", "--events", "/dev/stdout", "--requests", "r.csv"]
    )
    assert (child.returncode, child.stderr) == (0, b"")
    assert child.stdout.startswith(b'{"step":0,')


def test_a_termination_takes_unfinished_files_back(tmp_path: Path) -> None:
    lines = [f'{{"arrival_s": {i / 50}, "input_tokens": 900, "output_tokens": 400}}\n' for i in range(4000)]
    (tmp_path / "t.jsonl").write_text("".join(lines))
    child = subprocess.Popen(
        [sys.executable, "-m", "kvplan", "simulate", "t.jsonl", "--events", "e.jsonl"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while not any(path.name.startswith(".e.jsonl") for path in tmp_path.iterdir()):
        assert child.poll() is None, "the run ended before its output began"
    child.terminate()
    assert child.wait(timeout=60) == 143
    assert [path.name for path in tmp_path.iterdir()] == ["t.jsonl"]
