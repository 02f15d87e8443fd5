"""What the tests of the command line share: running it and holding its text against files."""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest

import kvplan.core.engines

GOLDENS = Path(__file__).resolve().parents[1] / "golden" / "data"
SNAPSHOTS = Path(__file__).parent / "snapshots"

#: With this variable set, tests write what they see into the snapshots instead of comparing.
UPDATE = bool(os.environ.get("KVPLAN_UPDATE_SNAPSHOTS"))


@dataclass(frozen=True)
class Outcome:
    """What a command gave: exit code, standard output, standard error."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """Standard output as the one JSON document that it must be; NaN and infinity are none."""
        found = json.loads(self.out, parse_constant=_refuse)
        assert isinstance(found, dict)
        return found


#: Runs a command line, written as in a shell after ``kvplan``; further arguments are taken as they are.
Cli = Callable[..., Outcome]


def _refuse(text: str) -> object:
    raise AssertionError(f"{text} is no JSON")


def listing(folder: Path) -> dict[str, bytes | None]:
    """All that lies in a folder: the bytes of files, None for folders."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def same_as_snapshot(name: str, text: str) -> None:
    """Compare with ``snapshots/NAME.txt``; blanks at the ends of lines do not count."""
    seen = "\n".join(line.rstrip() for line in text.splitlines()) + "\n"
    path = SNAPSHOTS / f"{name}.txt"
    if UPDATE:
        path.write_text(seen, encoding="utf-8")
    assert path.exists(), f"run with KVPLAN_UPDATE_SNAPSHOTS=1 to make {path.name}"
    assert seen == path.read_text(encoding="utf-8")


def raise_in_turn(monkeypatch: pytest.MonkeyPatch, number: int, error: type[BaseException]) -> None:
    """Have an error come in the n-th turn that any engine takes from now on."""
    turns = count(1)

    def failing(turn: Callable[..., object]) -> Callable[..., object]:
        def instead(*arguments: object, **options: object) -> object:
            if next(turns) == number:
                raise error
            return turn(*arguments, **options)

        return instead

    for module in pkgutil.iter_modules(kvplan.core.engines.__path__, "kvplan.core.engines."):
        for engine in vars(importlib.import_module(module.name)).values():
            if isinstance(engine, type) and engine.__module__ == module.name and "turn" in vars(engine):
                monkeypatch.setattr(engine, "turn", failing(vars(engine)["turn"]))
