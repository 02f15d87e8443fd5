"""The command line in this process, in a folder of its own."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from command_line import Cli, Outcome
from typer.main import get_command

from kvplan.cli import app, main

#: Typer builds its commands anew for each run, which takes as long as many a command itself. The tests that start a
#: process run the application as it is.
COMMAND = get_command(app)


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cli:
    """Runs kvplan in an empty folder, at 80 columns and without colour."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    for name in ("FORCE_COLOR", "PY_COLORS", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "TERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("kvplan.cli._application", lambda _: COMMAND)

    def run(command: str, *more: str) -> Outcome:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([*shlex.split(command), *more])
        out, err = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return Outcome(ended.value.code, out, err)

    return run
