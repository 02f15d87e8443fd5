"""The table of vLLM's flags, held against vLLM's own sources where they are at hand.

``KVPLAN_VLLM_SOURCES`` names folders of vLLM's package, separated as in PATH; without it an installed vLLM is used.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvplan.options import SimulateOptions
from kvplan.vllm_flags import FLAGS, MEMORY_VARIABLES, canonical, look_up

FORMS = {"switch", "value", "optional", "many", "json"}


def sources() -> list[Path]:
    """Folders of the package ``vllm``."""
    named = os.environ.get("KVPLAN_VLLM_SOURCES")
    if named:
        return [Path(folder) for folder in named.split(os.pathsep)]
    found = importlib.util.find_spec("vllm")
    return [Path(folder) for folder in (found.submodule_search_locations if found else None) or ()]


@pytest.fixture(params=sources() or [None], ids=str)
def vllm(request: pytest.FixtureRequest) -> Path:
    if request.param is None:
        pytest.skip("no sources of vLLM: set KVPLAN_VLLM_SOURCES")
    assert isinstance(request.param, Path)
    return request.param


def flags_of(package: Path) -> Iterator[str]:
    """Every name that the server's parser is given: ``add_argument`` and the fields of its dataclasses."""
    files = [package / "engine/arg_utils.py", *package.glob("entrypoints/*/cli_args.py")]
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                if node.func.attr == "add_argument":
                    yield from (
                        argument.value
                        for argument in node.args
                        if isinstance(argument, ast.Constant) and str(argument.value).startswith("-")
                    )
            elif isinstance(node, ast.ClassDef) and node.name.endswith("FrontendArgs"):
                for field in node.body:
                    if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                        yield f"--{field.target.id.replace('_', '-')}"


def test_every_flag_of_vllm_has_its_place_in_the_table(vllm: Path) -> None:
    names = set(flags_of(vllm))
    assert len(names) > 100
    assert sorted(name for name in names if look_up(name) is None) == []


def test_switches_of_vllm_are_switches_in_the_table(vllm: Path) -> None:
    text = (vllm / "engine/arg_utils.py").read_text(encoding="utf-8")
    stored = re.findall(r'add_argument\(\s*"(--[\w-]+)"(?:,\s*"-\w+")?,\s*action="store_true"', text)
    assert [name for name in stored if FLAGS[canonical(name)].form != "switch"] == []


def test_every_variable_in_the_table_is_one_of_vllm() -> None:
    folders = sources()
    if not folders:
        pytest.skip("no sources of vLLM: set KVPLAN_VLLM_SOURCES")
    texts = "".join((folder / "envs.py").read_text(encoding="utf-8") for folder in folders)
    if len(folders) > 1:  # no single version has all
        assert [name for name in MEMORY_VARIABLES if f'"{name}"' not in texts] == []


def test_the_table_is_in_order() -> None:
    options = set(SimulateOptions.__dataclass_fields__)
    for name, flag in FLAGS.items():
        assert name == canonical(name)
        assert flag.form in FORMS
        assert (flag.effect == "option") == bool(flag.target)
        assert not flag.target or flag.target in options
        assert not flag.neutral or flag.effect in ("memory", "scheduling")
        assert flag.form != "switch" or flag.neutral <= {"on"}


@pytest.mark.parametrize(
    ("written", "name", "on"),
    [
        ("-tp", "--tensor-parallel-size", True),
        ("--tensor_parallel_size", "--tensor-parallel-size", True),
        ("--no-enable-prefix-caching", "--enable-prefix-caching", False),
        ("--disable-prefix-caching", "--enable-prefix-caching", False),
        ("--enable-log-requests", "--enable-log-requests", True),
        ("--disable-log-requests", "--disable-log-requests", True),
        ("--no-disable-log-requests", "--disable-log-requests", False),
        ("--enable-custom-all-reduce", "--disable-custom-all-reduce", False),
    ],
)
def test_a_flag_is_found_in_each_of_its_forms(written: str, name: str, on: bool) -> None:
    meaning = look_up(written)
    assert meaning is not None
    assert (meaning.flag.name, meaning.on) == (name, on)


@pytest.mark.parametrize("written", ["--tensor-parallel", "--no-block-size", "--no-x", "-x", "--"])
def test_abbreviations_and_opposites_of_values_are_unknown(written: str) -> None:
    assert look_up(written) is None
