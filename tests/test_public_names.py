"""The package's face: its names, its functions' results, its version."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import kvplan
from kvplan.cli import main

ROOT = Path(kvplan.__file__).resolve().parents[1]
NAMES = [
    "InputError",
    "KvplanError",
    "__version__",
    "audit",
    "calibrate",
    "check",
    "compare",
    "explain",
    "kernel_bench",
    "list_gpus",
    "list_models",
    "load_gpu",
    "load_model",
    "read_trace",
    "simulate",
    "size",
]
FUNCTIONS = [name for name in NAMES if name[0].islower()]
CHECKS = """\
version: 1
engine: vllm@0.33
checks:
  - {model: llama-2-13b, gpu: l4, expect: {fits: true, kv.bytes_per_token: 819200}}
"""


def test_all_is_exactly_what_is_public() -> None:
    assert kvplan.__all__ == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_name_resolves(name: str) -> None:
    assert getattr(kvplan, name) is getattr(kvplan, name)


def test_every_name_is_typed_where_it_is_found() -> None:
    """The imports for type checkers and the table for the interpreter name the same homes."""
    text = Path(kvplan.__file__).read_text()
    typed = {
        name.strip(): module
        for module, names in re.findall(r"^    from (kvplan\S+) import (.+)$", text, re.MULTILINE)
        for name in names.split(",")
    }
    assert typed == kvplan._HOMES
    assert sorted([*typed, "__version__"]) == kvplan.__all__


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'kvplan' has no attribute 'sizes'"):
        kvplan.sizes  # noqa: B018
    assert not hasattr(kvplan, "core_of_all")


def test_a_star_import_gives_all_names() -> None:
    program = "from kvplan import *\nprint(size, simulate, check, InputError)"
    child = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, timeout=60, check=False
    )
    assert child.returncode == 0, child.stderr


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_is_documented_and_typed(name: str) -> None:
    function: Callable[..., object] = getattr(kvplan, name)
    assert (inspect.getdoc(function) or "").splitlines()[0].endswith(".")
    signature = inspect.signature(function)
    assert signature.return_annotation is not signature.empty
    for parameter in signature.parameters.values():
        assert parameter.annotation is not parameter.empty


def test_errors_are_kvplans_own() -> None:
    assert issubclass(kvplan.InputError, kvplan.KvplanError)
    with pytest.raises(kvplan.InputError) as caught:
        kvplan.size("nothing-like-it")
    assert caught.value.where == "MODEL"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sequence": 4096}, 'unknown option "sequence"'),
        ({"seq": "4096"}, 'seq is "4096", not a whole number (--seq)'),
        ({"seq": True}, 'seq is "True", not a whole number (--seq)'),
        ({"seq": 4096.0}, 'seq is "4096.0", not a whole number (--seq)'),
        ({"seq": 0}, "0 is out of range (--seq)"),
        ({"gpu": 1}, 'gpu is "1", not a text (--gpu)'),
        ({"set": [1]}, 'set is "[1]", not a list of texts (--set)'),
    ],
)
def test_a_wrong_option_is_an_input_error(options: dict[str, Any], message: str) -> None:
    with pytest.raises(kvplan.InputError) as caught:
        kvplan.size("llama-2-13b", **options)
    assert str(caught.value) == message


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """The JSON document of a command without its version keys."""
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main([*arguments, "--json"])
    document = json.loads(capsys.readouterr().out)
    assert isinstance(document, dict)
    assert (document.pop("schema_version"), document.pop("kvplan_version")) == (1, kvplan.__version__)
    return document


def as_json(document: Mapping[str, object]) -> object:
    """A document as JSON gives it back: tuples are lists."""
    return json.loads(json.dumps(document))


def test_size_gives_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    command = "size llama-2-13b --seq 4096 --concurrency 10 --gpu a100-80gb --gpu-memory-utilization 0.9"
    result = kvplan.size("llama-2-13b", seq=4096, concurrency=10, gpu="a100-80gb", gpu_memory_utilization=0.9)
    assert dataclasses.is_dataclass(result)
    assert as_json(result.to_dict()) == printed(capsys, *command.split())
    assert as_json(result.to_dict(explain=True)) == printed(capsys, *command.split(), "--explain")


def test_simulate_gives_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    result = kvplan.simulate("chat", limit=50, gpu="l40s", enable_prefix_caching=False)
    assert dataclasses.is_dataclass(result)
    command = "simulate chat --limit 50 --gpu l40s --no-enable-prefix-caching"
    assert as_json(result.to_dict()) == printed(capsys, *command.split())
    assert set(result.to_dict(profile=True)) - set(result.to_dict()) == {"profile"}
    assert len(result.records) == 50


def test_explain_gives_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    found = kvplan.explain("waste", model="llama-3.1-8b", seq=8192, used_tokens="10,20")
    assert dataclasses.is_dataclass(found)
    command = "explain waste --model llama-3.1-8b --seq 8192 --used-tokens 10,20"
    assert as_json(found.to_dict()) == printed(capsys, *command.split())


def test_check_gives_what_the_command_prints(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text(CHECKS)
    report = kvplan.check("c.yaml")
    assert dataclasses.is_dataclass(report)
    assert not report.all_passed
    assert as_json(report.to_dict()) == printed(capsys, "check", "c.yaml")


def test_catalogues_give_what_the_commands_print(capsys: pytest.CaptureFixture[str]) -> None:
    assert as_json(kvplan.load_gpu("l4").to_dict()) == printed(capsys, "gpus", "l4")["gpu"]
    model = as_json(kvplan.load_model("llama-2-13b").to_dict())
    shown = printed(capsys, "models", "llama-2-13b")["model"]
    assert isinstance(model, dict)
    assert {key: shown[key] for key in model} == model


def test_options_of_python_are_the_flags_of_the_command_line() -> None:
    from kvplan.options import SimulateOptions, SizeOptions

    for command, options in (("size", SizeOptions), ("simulate", SimulateOptions)):
        from typer.main import get_command

        from kvplan.cli import app

        group: Any = get_command(app)
        parameters = {parameter.name for parameter in group.commands[command].params}
        fields = {item.name for item in dataclasses.fields(options)}
        assert fields <= parameters


def test_every_option_of_the_contract_keeps_vllms_name() -> None:
    from typer.main import get_command

    from kvplan.cli import app

    group: Any = get_command(app)
    for command in ("size", "simulate", "explain"):
        for parameter in group.commands[command].params:
            long = [option for option in parameter.opts if option.startswith("--")]
            if long and parameter.name != "help":
                assert long == [f"--{parameter.name.rstrip('_').replace('_', '-')}"]
                assert parameter.help, f"{long[0]} has no help"


def test_the_version_is_that_of_the_changelog() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## \[?([0-9][^\] ]*)", text, re.MULTILINE)
    assert newest is not None
    assert newest.group(1) == kvplan.__version__


def test_the_package_says_that_it_is_typed() -> None:
    assert (Path(kvplan.__file__).parent / "py.typed").exists()
