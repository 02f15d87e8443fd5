"""What each command loads: a command that needs little must start fast."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import kvplan

ROOT = Path(kvplan.__file__).resolve().parents[1]
HEAVY = ("numpy", "cupy", "matplotlib", "huggingface_hub", "scipy", "pandas")
SIMULATION = (
    "kvplan.trace",
    "kvplan.core.engines",
    "kvplan.core.engine",
    "kvplan.core.simulate",
    "kvplan.core.metrics",
    "kvplan.core.content",
    "kvplan.jobs.simulate",
    "kvplan.jobs.check",
    "kvplan.output",
    "kvplan.junit",
    "kvplan.plots",
)
OTHER_ENGINES = ("kvplan.core.engines.contiguous", "kvplan.core.engines.paged")
MODEL_FILES = ("kvplan.gguf", "kvplan.gguf_config", "kvplan.hub", "kvplan.safetensors")
SIZING = ("kvplan.config", "kvplan.hf_config", *MODEL_FILES, "kvplan.jobs", "yaml")

RUN = """
import sys
try:
    from kvplan.cli import main
    main(sys.argv[1:])
except SystemExit as ended:
    assert ended.code == 0, ended.code
sys.stdout.flush()
print("", *sys.modules, sep="\\n", file=sys.stderr)
"""


def loaded(program: str, folder: Path, *arguments: str) -> set[str]:
    """The modules that are loaded when a program ends."""
    child = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "80"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return set(child.stderr.split())


def among(modules: set[str], names: tuple[str, ...]) -> list[str]:
    """Those of the modules that have one of these names or lie in a package of such a name."""
    return sorted(m for m in modules if any(m == name or m.startswith(f"{name}.") for name in names))


@pytest.mark.parametrize(
    ("command", "absent"),
    [
        ("--help", (*HEAVY, *SIMULATION, *SIZING, "rich")),
        ("--version", (*HEAVY, *SIMULATION, *SIZING, "rich")),
        ("size --help", (*HEAVY, *SIMULATION, *SIZING, "rich")),
        ("simulate --help", (*HEAVY, *SIMULATION, *SIZING, "rich")),
        ("size llama-2-13b --json", (*HEAVY, *SIMULATION, *MODEL_FILES, "rich")),
        ("models --json", (*HEAVY, *SIMULATION, "kvplan.jobs", "kvplan.report", "rich")),
        ("models llama-2-13b --json", (*HEAVY, *SIMULATION, "kvplan.jobs", "kvplan.report", "rich")),
        ("gpus --json", (*HEAVY, *SIMULATION, "kvplan.jobs", "kvplan.report", "rich")),
        ("size llama-2-13b", (*HEAVY, *SIMULATION, "rich.progress")),
        ("explain --json", (*HEAVY, "kvplan.core.engines", "kvplan.jobs.simulate", *SIZING[:-2], "rich")),
        ("explain prefix --json", (*HEAVY, "rich", "kvplan.drawing")),
        ("kernel-bench --help", (*HEAVY, *SIMULATION, *SIZING, "kvplan.kernels", "rich")),
        (
            "simulate chat --limit 2 --json",
            (*HEAVY, *OTHER_ENGINES, "rich", "kvplan.jobs.check", "kvplan.junit", "kvplan.plots"),
        ),
        (
            "simulate chat --limit 2 --num-gpu-blocks-override 200",
            (*HEAVY, "rich.progress", "kvplan.jobs.check", "kvplan.plots", "kvplan.cli.progress"),
        ),
    ],
)
def test_a_command_loads_only_what_it_needs(tmp_path: Path, command: str, absent: tuple[str, ...]) -> None:
    modules = loaded(RUN, tmp_path, *command.split())
    assert "kvplan.cli" in modules
    assert among(modules, absent) == []


def test_importing_kvplan_loads_no_other_module_of_it(tmp_path: Path) -> None:
    program = 'import sys, kvplan\nprint("", *sys.modules, sep="\\n", file=sys.stderr)'
    modules = loaded(program, tmp_path)
    assert [name for name in modules if name.partition(".")[0] == "kvplan"] == ["kvplan"]
    assert among(modules, (*HEAVY, "rich", "typer", "yaml", "json", "dataclasses", "inspect")) == []


@pytest.mark.parametrize(
    ("use", "absent"),
    [
        ("kvplan.InputError", (*SIMULATION, *SIZING, "typer", "rich")),
        ("kvplan.size('llama-2-13b')", (*HEAVY, *SIMULATION, "typer", "rich")),
        ("kvplan.load_gpu('l4')", (*HEAVY, *SIMULATION, "kvplan.jobs", "typer", "rich")),
        ("kvplan.simulate('chat', limit=2)", (*HEAVY, "typer", "rich", "kvplan.jobs.check")),
        ("kvplan.read_trace('chat', limit=2)", (*HEAVY, "typer", "rich", "yaml", "kvplan.jobs")),
    ],
)
def test_a_public_name_loads_only_what_it_needs(tmp_path: Path, use: str, absent: tuple[str, ...]) -> None:
    program = f'import sys, kvplan\n{use}\nprint("", *sys.modules, sep="\\n", file=sys.stderr)'
    assert among(loaded(program, tmp_path), absent) == []


def test_no_command_writes_into_the_folder_it_runs_in(tmp_path: Path) -> None:
    for command in ("size llama-2-13b", "simulate chat --limit 2"):
        loaded(RUN, tmp_path, *command.split())
    assert list(tmp_path.iterdir()) == []


def test_running_as_a_module_is_the_command_line(tmp_path: Path) -> None:
    child = subprocess.run(
        [sys.executable, "-m", "kvplan", "gpus", "l4", "--json"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert json.loads(child.stdout)["gpu"]["name"] == "l4"
