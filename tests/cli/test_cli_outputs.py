"""The files that a run writes: their columns and figures, and that each appears whole or not at all."""

from __future__ import annotations

import csv
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from command_line import GOLDENS, Cli, listing, raise_in_turn

from kvplan.plots import Point

SCENARIOS = [
    "05_preempt_single",
    "06_preempt_cascade",
    "11_priority_preempt",
    "14_prefix_partial_block",
    "17_lru_eviction",
    "22_too_long",
    "23_never_fits",
]
ORDER = (
    "step time_s arrived rejected scheduled admitted resumed preempted preemptions recovered finished "
    "prefix_hits free_blocks free_blocks_end running waiting"
)
CONTRACT = ORDER.split()
#: A key of the goldens and the contract's name for it.
NAMES = {
    "step": "step",
    "arrived": "arrived",
    "rejected": "rejected",
    "sched": "scheduled",
    "new": "admitted",
    "resumed": "resumed",
    "preempted": "preempted",
    "finished": "finished",
    "cached": "prefix_hits",
    "free": "free_blocks",
    "free_end": "free_blocks_end",
    "running": "running",
    "waiting": "waiting",
    "blocks": "blocks",
    "evicted_blocks": "evicted_blocks",
}
DETAIL = {"blocks", "evicted_blocks"}


def golden(name: str, *, detail: bool) -> list[dict[str, Any]]:
    """The steps of a golden in the contract's words."""
    lines = (GOLDENS / f"{name}.golden.jsonl").read_text().splitlines()
    steps = []
    for row in (json.loads(line) for line in lines):
        if row["type"] != "step":
            continue
        step = {ours: row[theirs] for theirs, ours in NAMES.items() if theirs in row}
        if "prefix_hits" in step:
            step["prefix_hits"] = [[name, tokens] for name, tokens in step["prefix_hits"].items()]
        if not step.get("scheduled", True):
            del step["scheduled"]  # an empty list is left out
        if not detail:
            step = {key: value for key, value in step.items() if key not in DETAIL}
        steps.append(step)
    return steps


def events(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("detail", [False, True])
@pytest.mark.parametrize("name", SCENARIOS)
def test_events_are_what_the_real_scheduler_did(cli: Cli, tmp_path: Path, name: str, detail: bool) -> None:
    flag = " --events-detail" if detail else ""
    cli(f"simulate {GOLDENS / name}.scenario.json --events e.jsonl{flag}")
    steps = events(tmp_path / "e.jsonl")
    assert all(step.pop("time_s") is None for step in steps)
    for step in steps:  # why somebody was preempted is ours to tell
        assert [case["victim"] for case in step.pop("preemptions", [])] == step.get("preempted", [])
        step.pop("recovered", None)
    assert steps == golden(name, detail=detail)


@pytest.mark.parametrize("engine", ["vllm", "paged"])
def test_events_tell_what_each_preemption_cost(cli: Cli, tmp_path: Path, engine: str) -> None:
    """Their sums and the worst of them are those of the document."""
    command = (
        f"simulate bursts --limit 100 --num-gpu-blocks-override 300 --engine {engine} --max-model-len 4000"
    )
    figures = json.loads(cli(f"{command} --events e.jsonl --json").out)["preemptions"]
    steps = events(tmp_path / "e.jsonl")
    began = {
        (case["victim"], step["step"]): (step, case) for step in steps for case in step.get("preemptions", [])
    }
    ended = [(step, cost) for step in steps for cost in step.get("recovered", [])]
    assert len(began) == len(ended) == figures["events"] > 10
    for step, cost in ended:
        then, case = began.pop((cost["request"], cost["preempted_step"]))
        assert cost["lost_tokens"] == case["lost_tokens"] >= cost["found_tokens"]
        assert step["step"] > then["step"]
        assert cost["lost_s"] > 0
    for total in ("lost_tokens", "found_tokens"):
        assert sum(cost[total] for _, cost in ended) == figures[total]
    assert sum(cost["lost_s"] for _, cost in ended) == pytest.approx(figures["lost_s"])
    costliest = sorted((cost["lost_s"] for _, cost in ended), reverse=True)
    assert costliest[:10] == [case["lost_s"] for case in figures["worst"]]


def test_a_timeline_shows_each_cache_group_as_both_engines_have_it(cli: Cli, tmp_path: Path) -> None:
    command = "simulate chat --limit 12 --model gemma-3-27b --gpu h100 --max-model-len 16384"
    assert cli(f"{command} --timeline fast.csv").code == 0
    assert cli(f"{command} --timeline plain.csv --events e.jsonl").code == 0
    assert (tmp_path / "fast.csv").read_text() == (tmp_path / "plain.csv").read_text()
    with (tmp_path / "fast.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    names = [name for name in rows[0] if name.startswith("group_")]
    assert names == [f"group_{number}_sliding_blocks" for number in range(6)] + ["group_6_full_blocks"]
    for row in rows:
        assert sum(int(row[name]) for name in names) == int(row["used_blocks"])
        assert 0 <= float(row["behind_window_share"]) < 1
    assert any(float(row["behind_window_share"]) for row in rows)


def test_a_victim_that_comes_back_tells_what_it_found(cli: Cli, tmp_path: Path) -> None:
    """Two steps later a block of its 22 tokens is found, and the rest computed with its next: steps 7 to 9."""
    cli(f"simulate {GOLDENS / '05_preempt_single.scenario.json'} --step-time 0.02 --events e.jsonl")
    steps = events(tmp_path / "e.jsonl")
    (back,) = [step for step in steps if "recovered" in step]
    assert (back["step"], back["scheduled"], back["prefix_hits"]) == (9, [["b", 1], ["c", 7]], [["c", 16]])
    cost = {"request": "c", "preempted_step": 7, "lost_tokens": 22, "found_tokens": 16, "lost_s": 0.06}
    assert back["recovered"] == [cost]


def test_events_have_the_keys_of_the_contract_in_its_order(cli: Cli, tmp_path: Path) -> None:
    seen: set[str] = set()
    for name in SCENARIOS:
        cli(f"simulate {GOLDENS / name}.scenario.json --events e.jsonl")
        for step in events(tmp_path / "e.jsonl"):
            assert list(step) == [key for key in CONTRACT if key in step]
            assert not [key for key, value in step.items() if value == []]
            seen |= set(step)
    assert seen == set(CONTRACT)


def test_events_have_times_where_steps_have_a_length(cli: Cli, tmp_path: Path) -> None:
    cli(f"simulate {GOLDENS / '05_preempt_single.scenario.json'} --step-time 0.02 --events e.jsonl")
    assert [step["time_s"] for step in events(tmp_path / "e.jsonl")] == [step * 2 / 100 for step in range(14)]


def test_requests_have_their_columns_and_values(cli: Cli, tmp_path: Path) -> None:
    cli(f"simulate {GOLDENS / '05_preempt_single.scenario.json'} --step-time 0.02 --requests r.csv")
    rows = table(tmp_path / "r.csv")
    assert " ".join(rows[0]) == (
        "id status arrival_s input_tokens output_tokens generated_tokens hit_tokens resumed_hit_tokens "
        "preemptions peak_blocks queue_s ttft_s tpot_s e2e_s"
    )
    # c arrives with step 1, is preempted in step 7, comes back in step 9 and ends with step 10.
    assert rows[1] == {
        "id": "c",
        "status": "finished",
        "arrival_s": "0.02",
        "input_tokens": "17",
        "output_tokens": "8",
        "generated_tokens": "8",
        "hit_tokens": "0",
        "resumed_hit_tokens": "16",
        "preemptions": "1",
        "peak_blocks": "6",
        "queue_s": "0.0",
        "ttft_s": "0.02",
        "tpot_s": str((0.2 - 0.02) / 7),
        "e2e_s": "0.2",
    }
    assert [row["id"] for row in rows] == ["a", "c", "b"]  # as they end


def test_requests_agree_with_the_document(cli: Cli, tmp_path: Path) -> None:
    document = cli("simulate chat --limit 200 --requests r.csv --json").document
    rows = table(tmp_path / "r.csv")
    assert len(rows) == document["requests"]["total"] == 200
    assert sum(int(r["input_tokens"]) for r in rows) == document["trace"]["input_tokens"]
    assert sum(int(r["hit_tokens"]) for r in rows) == document["prefix_cache"]["hit_tokens"]
    longest = max(float(r["e2e_s"]) for r in rows)
    assert longest == document["latency"]["e2e_s"]["max"]


def test_requests_that_never_ran_have_no_times(cli: Cli, tmp_path: Path) -> None:
    cli(f"simulate {GOLDENS / '22_too_long.scenario.json'} --step-time 0.02 --requests r.csv")
    rows = table(tmp_path / "r.csv")
    assert len({row["status"] for row in rows}) > 1
    for row in rows:
        assert (row["ttft_s"] == "") == (row["generated_tokens"] == "0")
    cli(f"simulate {GOLDENS / '23_never_fits.scenario.json'} --step-time 0.02 --requests r.csv")
    assert [row["status"] for row in table(tmp_path / "r.csv")].count("unfinished") == 2


def test_without_seconds_the_times_of_requests_are_empty(cli: Cli, tmp_path: Path) -> None:
    cli(f"simulate {GOLDENS / '05_preempt_single.scenario.json'} --requests r.csv")
    for row in table(tmp_path / "r.csv"):
        assert [row[name] for name in row if name.endswith("_s")] == [""] * 5


@pytest.mark.parametrize("name", SCENARIOS)
def test_peak_blocks_are_the_longest_table_of_each_request(cli: Cli, tmp_path: Path, name: str) -> None:
    """The rows come from the fast engine, the tables from the plain one."""
    command = f"simulate {GOLDENS / name}.scenario.json"
    cli(f"{command} --requests r.csv")
    cli(f"{command} --events e.jsonl --events-detail --requests plain.csv")
    lengths: dict[str, int] = {}
    peaks: dict[str, int] = {}
    for step in events(tmp_path / "e.jsonl"):
        for victim in step.get("preempted", []):
            lengths[victim] = 0
        for request, blocks in step.get("blocks", {}).items():
            lengths[request] = lengths.get(request, 0) + len(blocks)
            peaks[request] = max(peaks.get(request, 0), lengths[request])
    rows = table(tmp_path / "r.csv")
    assert {row["id"]: int(row["peak_blocks"]) for row in rows} == {
        row["id"]: peaks.get(row["id"], 0) for row in rows
    }
    assert rows == table(tmp_path / "plain.csv")


#: Prompt tokens of the requests of 05_preempt_single.
ASKED = {"a": 6, "b": 9, "c": 17}


def test_a_timeline_has_a_row_for_each_step(cli: Cli, tmp_path: Path) -> None:
    cli(
        f"simulate {GOLDENS / '05_preempt_single.scenario.json'} --step-time 0.02 --timeline t.csv "
        "--events e.jsonl"
    )
    rows, steps = table(tmp_path / "t.csv"), events(tmp_path / "e.jsonl")
    assert " ".join(rows[0]) == (
        "step time_s used_blocks utilization cached_blocks running waiting scheduled_tokens preempted hit_rate"
    )
    queried = hit = 0
    for row, step in zip(rows, steps, strict=True):
        used = 13 - step["free_blocks"]
        hit += sum(tokens for name, tokens in step.get("prefix_hits", []) if name in step.get("admitted", []))
        queried += sum(ASKED[name] for name in step.get("admitted", []))
        assert int(row.pop("cached_blocks")) <= step["free_blocks"]
        assert float(row.pop("hit_rate")) == hit / queried
        assert row == {
            "step": str(step["step"]),
            "time_s": str(step["time_s"]),
            "used_blocks": str(used),
            "utilization": str(used / 13),
            "running": str(step["running"]),
            "waiting": str(step["waiting"]),
            "scheduled_tokens": str(sum(tokens for _, tokens in step["scheduled"])),
            "preempted": str(len(step.get("preempted", []))),
        }


def test_a_timeline_agrees_with_the_document(cli: Cli, tmp_path: Path) -> None:
    command = "simulate bursts --limit 100 --num-gpu-blocks-override 600 --timeline t.csv --json"
    document = cli(command).document
    rows = table(tmp_path / "t.csv")
    assert len(rows) == document["steps"]
    assert max(int(row["used_blocks"]) for row in rows) == document["kv"]["peak_blocks"]
    assert max(float(row["utilization"]) for row in rows) == document["kv"]["utilization"]["max"]
    assert sum(int(row["preempted"]) for row in rows) == document["preemptions"]["events"] > 0


@pytest.mark.parametrize(
    "command",
    [
        "simulate chat --limit 60",
        "simulate bursts --limit 100 --num-gpu-blocks-override 600",
        "simulate multi-turn --limit 150 --gpu l4 --max-model-len 20000",
        f"simulate {GOLDENS / '06_preempt_cascade'}.scenario.json --step-time 0.02",
    ],
)
def test_runs_of_steps_are_the_same_rows_as_single_steps(cli: Cli, tmp_path: Path, command: str) -> None:
    cli(f"{command} --timeline fast.csv")
    cli(f"{command} --timeline plain.csv --events e.jsonl")  # whose every step is watched
    assert (tmp_path / "fast.csv").read_text() == (tmp_path / "plain.csv").read_text()


def test_a_picture_of_many_steps_has_few_points_but_all_preemptions_and_the_peak(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    drawn: list[Sequence[Point]] = []

    def draw(path: Path, points: Sequence[Point], *_: object) -> None:
        drawn.append(points)

    monkeypatch.setattr("kvplan.timeline.draw_timeline", draw)
    monkeypatch.setattr("kvplan.timeline._MOST_POINTS", 64)
    command = "simulate bursts --limit 100 --num-gpu-blocks-override 600 --timeline t.png --json"
    document = cli(command).document
    (points,) = drawn
    assert 64 < len(points) <= 64 * 3 < document["steps"]
    assert sum(point.preempted for point in points) == document["preemptions"]["events"] > 0
    assert max(point.used_blocks for point in points) == document["kv"]["peak_blocks"]
    assert [point.step for point in points] == sorted({point.step for point in points})


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_timeline_can_be_a_picture(cli: Cli, tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    assert cli(f"simulate chat --model gpt-oss-20b --limit 5 --timeline t.{suffix}").code == 0
    assert set(listing(tmp_path)) == {f"t.{suffix}"}


def test_a_picture_without_matplotlib_is_refused_before_the_run(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*_: object, **__: object) -> None:
        pytest.fail("the run started")

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setattr("kvplan.jobs.simulate.Simulation.run", run)
    outcome = cli("simulate chat --limit 5 --timeline t.png")
    assert outcome.code == 2
    assert outcome.err.splitlines()[1] == 'install it with: pip install "kvplan[plots]"'
    assert listing(tmp_path) == {}


def test_a_timeline_of_another_kind_is_refused(cli: Cli, tmp_path: Path) -> None:
    outcome = cli("simulate chat --limit 5 --timeline t.pdf")
    assert outcome.code == 2
    assert "(--timeline)" in outcome.err
    assert listing(tmp_path) == {}


ALL_OUTPUTS = "--events e.jsonl --requests r.csv --timeline t.csv"


def test_outputs_replace_older_files_and_leave_nothing_beside_them(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "e.jsonl").write_text("old")
    assert cli(f"simulate chat --limit 5 {ALL_OUTPUTS}").code == 0
    assert set(listing(tmp_path)) == {"e.jsonl", "r.csv", "t.csv"}
    assert events(tmp_path / "e.jsonl")


@pytest.mark.skipif(os.name == "nt", reason="modes are of Unix")
def test_outputs_are_as_readable_as_other_new_files(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "other").write_text("")
    cli(f"simulate chat --limit 5 {ALL_OUTPUTS}")
    assert {path.stat().st_mode for path in tmp_path.iterdir()} == {(tmp_path / "other").stat().st_mode}


def test_outputs_are_the_same_bytes_in_a_second_run(cli: Cli, tmp_path: Path) -> None:
    cli(f"simulate chat --limit 50 {ALL_OUTPUTS}")
    first = listing(tmp_path)
    cli(f"simulate chat --limit 50 {ALL_OUTPUTS}")
    assert listing(tmp_path) == first


def test_observing_a_run_changes_no_figure(cli: Cli) -> None:
    alone = cli("simulate chat --limit 50 --json").document
    observed = cli(f"simulate chat --limit 50 {ALL_OUTPUTS} --json").document
    for document in (alone, observed):
        document["simulation"].pop("engine_path")  # steps that are written are taken one by one
    assert observed == alone


@pytest.mark.parametrize("failure", [RuntimeError, MemoryError])
def test_a_run_that_fails_leaves_no_file(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: type[Exception]
) -> None:
    raise_in_turn(monkeypatch, 25, failure)
    (tmp_path / "r.csv").write_text("old")
    with pytest.raises(failure):
        cli(f"simulate chat --limit 20 {ALL_OUTPUTS}")
    assert listing(tmp_path) == {"r.csv": b"old"}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("--events same --requests same", "same"),
        ("--requests same --timeline ./same", "same"),
        ("--events t.jsonl", "t.jsonl"),
    ],
)
def test_no_output_overwrites_another_or_the_trace(
    cli: Cli, tmp_path: Path, options: str, named: str
) -> None:
    (tmp_path / "t.jsonl").write_text('{"id": "a", "arrival_s": 0, "input_tokens": 10, "output_tokens": 5}\n')
    before = listing(tmp_path)
    outcome = cli(f"simulate t.jsonl --num-gpu-blocks-override 100 {options}")
    assert outcome.code == 2
    assert named in outcome.err
    assert listing(tmp_path) == before


def test_an_output_in_another_folder_is_written_there(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert cli("simulate chat --limit 5 --events out/e.jsonl").code == 0
    assert {os.path.normpath(name) for name in listing(tmp_path)} == {"out", os.path.join("out", "e.jsonl")}


def test_step_numbers_jump_over_idle_gaps_of_a_scenario(cli: Cli, tmp_path: Path) -> None:
    scenario = json.loads((GOLDENS / "05_preempt_single.scenario.json").read_text())
    for request in scenario["requests"]:
        request["arrival_step"] *= 100
    (tmp_path / "gap.scenario.json").write_text(json.dumps(scenario))
    cli("simulate gap.scenario.json --events e.jsonl")
    steps = [step["step"] for step in events(tmp_path / "e.jsonl")]
    assert 100 in steps
    assert not [step for step in steps if 14 < step < 100]


def test_the_file_of_events_is_plain_lines(cli: Cli, tmp_path: Path) -> None:
    cli("simulate chat --limit 5 --events e.jsonl")
    raw = (tmp_path / "e.jsonl").read_bytes()
    assert raw.endswith(b"}\n")
    assert b"\r" not in raw
    assert not re.search(rb"[:,] ", raw)


def test_what_is_no_regular_file_is_written_to_and_stays(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "real.csv").write_text("old")
    (tmp_path / "link.csv").symlink_to("real.csv")
    outcome = cli("simulate chat --limit 2 --requests link.csv --events /dev/null")
    assert outcome.code == 0
    assert (tmp_path / "link.csv").is_symlink()
    assert (tmp_path / "real.csv").read_text().startswith('"id"')
    assert Path("/dev/null").is_char_device()


def test_a_model_catalogue_is_not_overwritten(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "cat.yaml").write_text("a: {}")
    outcome = cli("simulate chat --models cat.yaml --events cat.yaml")
    assert outcome.code == 2
    assert (tmp_path / "cat.yaml").read_text() == "a: {}"
