"""`kvplan explain` and `kvplan simulate --map` on the command line: tables and JSON say the same."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from command_line import GOLDENS, Cli

import kvplan
from kvplan.jobs.explain import TOPICS
from kvplan.report.explain import _value
from kvplan.topics.parts import Figures, Grid, Table, Timeline

PREEMPT = "05_preempt_single.scenario.json"


@pytest.fixture
def scenario(tmp_path: Path) -> None:
    shutil.copy(GOLDENS / PREEMPT, tmp_path)


@pytest.mark.parametrize("topic", TOPICS)
def test_every_number_of_the_json_stands_in_the_table(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, topic: str
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    text = cli(f"explain {topic}").out
    document = cli(f"explain {topic} --json").document
    words = " ".join(text.split())
    for part in kvplan.explain(topic).parts:
        if isinstance(part, Figures):
            for figure in part.rows:
                assert document["figures"][figure.key] == figure.value
                assert f"{figure.label} {_value(figure.value, figure.unit)}" in words
        elif isinstance(part, Table):
            for row, record in zip(part.rows, document["tables"][part.key], strict=True):
                assert list(record.values()) == list(row)
                cells = [_value(value, column.unit) for value, column in zip(row, part.columns, strict=True)]
                assert " ".join(" ".join(cells).split()) in words
        elif isinstance(part, Timeline):
            assert f"{part.steps:,} steps" in words
            assert [lane["name"] for lane in document["timelines"][part.key]["lanes"]] == [
                lane.name for lane in part.lanes
            ]
        elif isinstance(part, Grid):
            assert document["maps"][part.key]["num_cells"] == part.pool.num_cells


@pytest.mark.parametrize("topic", TOPICS)
def test_a_topic_fits_80_columns_for_another_model(cli: Cli, topic: str) -> None:
    from rich.cells import cell_len

    outcome = cli(f"explain {topic} --model qwen3-235b-a22b --kv-cache-dtype fp8")
    assert (outcome.code, outcome.err) == (0, "")
    assert max(cell_len(line) for line in outcome.out.splitlines()) <= 80


def test_without_a_topic_all_are_listed_with_their_questions(cli: Cli) -> None:
    listed = cli("explain --json").document["topics"]
    assert [one["topic"] for one in listed] == list(TOPICS)
    text = " ".join(cli("explain").out.split())
    assert all(f"{one['topic']} {one['question']}" in text for one in listed)


def test_settings_that_were_given_are_told_from_those_assumed(cli: Cli) -> None:
    lines = cli("explain formula --kv-cache-dtype fp8").out.splitlines()
    assert lines[1].startswith("kv_cache_dtype fp8; assumed: model llama-2-13b")


def test_an_explanation_warns_as_size_does(cli: Cli, tmp_path: Path) -> None:
    stretched = {
        "architectures": ["Phi3ForCausalLM"],
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 32064,
        "torch_dtype": "bfloat16",
        "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]},
    }
    (tmp_path / "c.json").write_text(json.dumps(stretched))
    warned = cli("explain formula --model c.json").err
    assert warned.startswith("kvplan: warning: the engine starts at the 4,096 tokens before LongRoPE")
    assert warned == cli("size c.json").err


# Maps


@pytest.mark.usefixtures("scenario")
def test_a_map_is_of_the_fullest_step_unless_one_is_asked_for(cli: Cli) -> None:
    fullest = cli(f"simulate {PREEMPT} --map --json").document["map"]
    assert (fullest["step"], fullest["cells"]["free"] + fullest["cells"]["cached"]) == (5, 0)
    asked = cli(f"simulate {PREEMPT} --map --at-step 8 --map-request b --json").document["map"]
    assert asked["step"] == 8
    assert asked["block_table"]["request"] == "b"
    assert "block_table" not in fullest


@pytest.mark.usefixtures("scenario")
def test_a_map_changes_nothing_else(cli: Cli) -> None:
    plain: dict[str, Any] = cli(f"simulate {PREEMPT} --json").document
    drawn: dict[str, Any] = cli(f"simulate {PREEMPT} --map --json").document
    del drawn["map"]
    plain["simulation"].pop("engine_path"), drawn["simulation"].pop("engine_path")
    assert drawn == plain


@pytest.mark.usefixtures("scenario")
def test_a_map_of_events_is_of_the_step_that_the_events_name(cli: Cli, tmp_path: Path) -> None:
    found = cli(f"simulate {PREEMPT} --map --at-step 8 --events e.jsonl --json").document["map"]
    lines = [json.loads(line) for line in (tmp_path / "e.jsonl").read_text().splitlines()]
    (line,) = [one for one in lines if one["step"] == 8]
    assert found["cells"]["free"] + found["cells"]["cached"] == line["free_blocks"]
    assert len(found["requests"]) == line["running"]


@pytest.mark.parametrize("engine", ["vllm", "paged", "static", "orca-max", "orca-pow2", "orca-oracle"])
def test_every_engine_can_be_drawn(cli: Cli, engine: str) -> None:
    command = f"simulate chat --limit 20 --num-gpu-blocks-override 600 --engine {engine} --map"
    found = cli(f"{command} --json").document
    assert sum(found["map"]["cells"].values()) == found["map"]["num_cells"]
    used = found["map"]["num_cells"] - found["map"]["cells"]["free"] - found["map"]["cells"]["cached"]
    assert used == found["kv"]["peak_blocks"]
    outcome = cli(command)
    assert outcome.code == 0
    assert "The pool in step" in outcome.out


def test_without_a_request_that_runs_there_is_nothing_to_draw(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(
        '{"id": "a", "arrival_s": 0, "input_tokens": 9999, "output_tokens": 1}\n'
    )
    outcome = cli("simulate t.jsonl --num-gpu-blocks-override 10 --map")
    assert (outcome.code, outcome.err.splitlines()[-2]) == (
        2,
        "kvplan: error: there is no step to draw (--map)",
    )


def test_names_from_a_trace_stay_text(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(
        '{"id": "[red]\\u001b[2J", "arrival_s": 0, "input_tokens": 20, "output_tokens": 9}\n'
    )
    outcome = cli("simulate t.jsonl --num-gpu-blocks-override 10 --map --map-request", "[red]\x1b[2J")
    assert outcome.code == 0
    assert "\x1b" not in outcome.out
    assert "A [red]\\x1b[2J" in outcome.out
