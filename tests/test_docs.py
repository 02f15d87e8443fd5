"""The examples of README.md and docs/ run and print what stands below them; links lead somewhere.

In a block that starts with ```` ```console ````, lines that start with ``$ kvplan`` are run in one folder for each
document, in order, with the files of the checkout at hand; ``\\`` continues a line. What stands below is compared,
blanks at ends of lines and empty lines at its ends apart; a line ``...`` stands for any lines. ``$ echo $?`` shows the
exit code. After a ``|`` nothing is compared.
"""

from __future__ import annotations

import contextlib
import difflib
import doctest
import importlib
import io
import json
import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import kvplan
from kvplan.cli import main

ROOT = Path(kvplan.__file__).resolve().parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
OTHERS = [path for path in (ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md") if path.exists()]
FENCE = re.compile(
    r"^(?P<indent> *)```(?P<kind>[^\n`]*)\n(?P<body>.*?)^(?P=indent)```", re.MULTILINE | re.DOTALL
)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)")


@dataclass(frozen=True)
class Example:
    """A command of a document and what it is said to print."""

    line: int
    command: str
    expected: list[str]


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(path: Path, kind: str) -> Iterator[tuple[int, str]]:
    """Line and text of each fenced block of a kind."""
    text = path.read_text(encoding="utf-8")
    for match in FENCE.finditer(text):
        if match["kind"].split()[:1] == [kind]:
            yield text.count("\n", 0, match.start()) + 2, match["body"]


def examples(path: Path) -> list[Example]:
    found: list[Example] = []
    for first, body in blocks(path, "console"):
        lines = iter(enumerate(body.splitlines(), first))
        for number, line in lines:
            if line.startswith("$ "):
                command = line.removeprefix("$ ")
                while command.endswith("\\"):
                    command = command.removesuffix("\\") + next(lines)[1].strip()
                found.append(Example(number, command, []))
            elif found:
                found[-1].expected.append(line)
    return found


def run(arguments: list[str]) -> tuple[str, int]:
    """What a command prints, as on a terminal: standard output and standard error in one."""
    shown = io.StringIO()
    with (
        contextlib.redirect_stdout(shown),
        contextlib.redirect_stderr(shown),
        pytest.raises(SystemExit) as ended,
    ):
        main(arguments)
    code = ended.value.code
    assert isinstance(code, int)
    return shown.getvalue(), code


def trimmed(lines: list[str]) -> list[str]:
    return "\n".join(line.rstrip() for line in lines).strip("\n").split("\n")


def agrees(expected: list[str], seen: list[str]) -> bool:
    """Whether the lines are the same, ``...`` standing for any number of them."""
    pattern = "".join(r"(?:.*\n)*" if line.strip() == "..." else re.escape(line) + r"\n" for line in expected)
    return re.fullmatch(pattern, "".join(f"{line}\n" for line in seen)) is not None


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what documents name: the workloads, the catalogue, logs, the documents themselves."""
    for name in ("workloads", "docs", "tests/logs"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "models.yaml", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    return tmp_path


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if examples(path)], ids=named)
@pytest.mark.usefixtures("checkout")
def test_every_example_prints_what_stands_below_it(path: Path) -> None:
    code = 0
    differences: list[str] = []
    for example in examples(path):
        where = f"{named(path)}:{example.line}: $ {example.command}"
        if example.command == "echo $?":
            assert trimmed(example.expected) == [str(code)], where
            continue
        words = shlex.split(example.command.partition("|")[0])
        assert words[0] == "kvplan", f"{where}: only kvplan is run"
        shown, code = run(words[1:])
        assert "Traceback" not in shown, where
        if "|" in example.command:
            continue
        expected, seen = trimmed(example.expected), trimmed(shown.splitlines())
        if not agrees(expected, seen):
            difference = "\n".join(difflib.unified_diff(expected, seen, "document", "seen", lineterm=""))
            differences.append(f"{where}\n{difference}")
    assert not differences, "\n\n".join(differences)


@pytest.mark.parametrize("path", [*DOCUMENTS, *OTHERS], ids=named)
def test_every_relative_link_leads_to_a_file(path: Path) -> None:
    prose = FENCE.sub("", path.read_text(encoding="utf-8"))
    broken = []
    for target in LINK.findall(prose):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, heading = target.partition("#")
        linked = (path.parent / file).resolve() if file else path
        if not linked.exists() or (heading and heading not in headings(linked)):
            broken.append(target)
    assert broken == []


def headings(path: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    text = FENCE.sub("", path.read_text(encoding="utf-8"))
    return {
        re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-")
        for title in re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    }


@pytest.mark.parametrize("path", DOCUMENTS, ids=named)
@pytest.mark.usefixtures("checkout")
def test_every_python_example_runs(path: Path) -> None:
    for line, body in blocks(path, "python"):
        exec(compile(body, f"{named(path)}:{line}", "exec"), {})


@pytest.mark.parametrize("path", DOCUMENTS, ids=named)
def test_every_json_example_is_json(path: Path) -> None:
    for _, body in blocks(path, "json"):
        for text in body.splitlines():
            json.loads(text)


@pytest.mark.usefixtures("checkout")
def test_the_check_file_of_the_documentation_can_be_read() -> None:
    from kvplan.jobs.check import read_checks

    bodies = [body for _, body in blocks(ROOT / "docs" / "checks.md", "yaml") if body.startswith("version:")]
    assert bodies
    for number, body in enumerate(bodies):
        file = Path("workloads") / f"example-{number}.yaml"
        file.write_text(body, encoding="utf-8")
        assert read_checks(str(file))


def test_the_documentation_names_every_short_name_of_a_check() -> None:
    from kvplan.jobs.check import SHORT_NAMES

    text = (ROOT / "docs" / "checks.md").read_text(encoding="utf-8")
    like = re.compile(r"(tpot|itl|e2e|queue)_(mean|p50|p90|p95|p99)_s")
    assert [name for name in SHORT_NAMES if f"`{name}`" not in text and not like.fullmatch(name)] == []


def test_every_option_that_the_documents_name_exists() -> None:
    from typing import Any

    from typer.main import get_command

    from kvplan.cli import app
    from kvplan.vllm_flags import look_up

    group: Any = get_command(app)
    known = {
        option
        for command in group.commands.values()
        for parameter in command.params
        for option in (*parameter.opts, *parameter.secondary_opts)
    }
    unknown = []
    for path in DOCUMENTS:
        for span in re.findall(r"`([^`\n]+)`", FENCE.sub("", path.read_text(encoding="utf-8"))):
            if span.startswith("--"):
                option = re.split(r"[ =]", span)[0]
                if option not in known and look_up(option) is None:
                    unknown.append(f"{named(path)}: {option}")
    assert unknown == []


@pytest.mark.parametrize(
    "module", ["kvplan.units", "kvplan.core.tally", "kvplan.jobs.size", "kvplan.jobs.simulate"]
)
def test_the_examples_of_docstrings_run(module: str) -> None:
    failed, tried = doctest.testmod(importlib.import_module(module))
    assert tried > 0
    assert failed == 0


def test_no_document_names_a_path_of_one_machine() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in [*DOCUMENTS, *OTHERS])
    assert not re.search(r"(?<![\w.])/(work|tmp|root|home|Users)\b", text)


def test_dots_stand_for_any_lines() -> None:
    assert agrees(["a", "...", "d"], ["a", "b", "c", "d"])
    assert agrees(["a", "...", "d"], ["a", "d"])
    assert agrees(["..."], [""])
    assert not agrees(["a", "...", "d"], ["a", "b"])
    assert not agrees(["a"], ["a", "b"])
    assert not agrees(["a.c"], ["abc"])
