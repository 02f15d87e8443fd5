"""Groups, blocks, lengths and start-up lines against what vLLM's own planning code made of the same layers.

The cases are random mixes of layers and settings; benchmarks/check_against_vllm.py recorded them by running the
planning modules of six versions.
"""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from kvplan.core.kv_pool import VllmPool

_SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "check_against_vllm.py"))
model_of, kvplan_figures = _SCRIPT["model_of"], _SCRIPT["kvplan_figures"]
FILES = sorted((Path(__file__).parent / "data").glob("plans-*.json"))


def test_six_versions_are_recorded() -> None:
    assert [path.stem.removeprefix("plans-") for path in FILES] == [
        "0.11", "0.19", "0.21", "0.24", "0.26", "0.33",
    ]  # fmt: skip


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_figure_equals_vllms(path: Path) -> None:
    cases: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    assert len(cases) == 60
    for case in cases:
        model, deployment = model_of(case)
        ours = kvplan_figures(model, deployment, VllmPool(model, deployment))
        expected = case["expected"]
        assert {name: ours[name] for name in expected} == expected, case["family"]
