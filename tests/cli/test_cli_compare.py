"""`kvplan compare` and the engines with contiguous memory on the command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_line import Cli, listing, raise_in_turn

from kvplan.core.simulate import StepRecord
from kvplan.jobs.simulate import Simulation
from kvplan.options import SimulateOptions

SMALL = "--num-gpu-blocks-override 500 --max-model-len 4000 --limit 60 --jobs 1"


def test_json_is_a_list_of_the_documents_of_simulate(cli: Cli) -> None:
    document = cli("compare chat --vary block-size=8,16 --gpu l40s --limit 30 --jobs 1 --json").document
    assert (document["schema_version"], document["trace"], document["varied"]) == (1, "chat", ["block_size"])
    assert [run["changes"] for run in document["runs"]] == [{"block_size": 8}, {"block_size": 16}]
    alone = cli("simulate chat --block-size 16 --gpu l40s --limit 30 --json").document
    run = document["runs"][1]
    assert {name: run[name] for name in alone if name not in ("schema_version", "kvplan_version")} == {
        name: value for name, value in alone.items() if name not in ("schema_version", "kvplan_version")
    }


def test_the_same_input_gives_the_same_bytes_however_many_jobs(cli: Cli) -> None:
    command = (
        "compare bursts --engines vllm,orca-pow2 --num-gpu-blocks-override 2000 --limit 80 --json --jobs"
    )
    assert cli(f"{command} 1").out == cli(f"{command} 2").out


def test_flags_hold_for_all_runs_and_cases_come_last(cli: Cli) -> None:
    found = cli(
        f"compare chat {SMALL} --vary max-num-seqs=2,8 --case 'block-size=32 max-num-seqs=4' --step-time 0.01 --json"
    ).document["runs"]
    assert [run["config"]["max_num_seqs"]["value"] for run in found] == [2, 8, 4]
    assert [run["kv"]["num_gpu_blocks"] for run in found] == [500, 500, 250]
    assert found[2]["config"]["num_gpu_blocks_override"]["source"] == "as many blocks as 8,000 tokens fill"
    assert {run["latency"]["itl_s"]["p50"] for run in found} == {0.01}


@pytest.mark.parametrize("name", ["out.png", "out.svg"])
def test_a_picture_is_drawn(cli: Cli, tmp_path: Path, name: str) -> None:
    pytest.importorskip("matplotlib", reason="pictures need kvplan[plots]")
    outcome = cli(f"compare chat {SMALL} --engines vllm,orca-max --picture {name}")
    assert outcome.code == 0
    assert list(listing(tmp_path)) == [name]
    head = (tmp_path / name).read_bytes()[:400]
    assert head.startswith(b"\x89PNG") or b"<svg" in head


def test_a_run_that_would_not_start_is_a_row_and_exit_code_1(cli: Cli) -> None:
    outcome = cli(
        "compare chat --vary max-model-len=1000,9000 --num-gpu-blocks-override 500 --limit 5 --jobs 1"
    )
    assert outcome.code == 1
    assert "does not start" in outcome.out
    assert "9000: the engine would not start" in " ".join(outcome.out.split())


def test_an_interrupt_leaves_out_what_was_not_finished(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    options = SimulateOptions(num_gpu_blocks_override=500, max_model_len=4000, limit=60, max_num_seqs=200)
    turns: list[StepRecord] = []
    Simulation("chat", options).run(turns=[turns.append])
    raise_in_turn(monkeypatch, len(turns) + 1, KeyboardInterrupt())
    outcome = cli(f"compare chat {SMALL} --vary max-num-seqs=200,256 --json")
    assert outcome.code == 130
    assert outcome.document["status"] == "interrupted"
    assert [run["changes"] for run in outcome.document["runs"]] == [{"max_num_seqs": 200}]


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_an_interrupt_ends_the_processes_too(tmp_path: Path) -> None:
    line = '{"id": "%d", "arrival_s": %f, "input_tokens": 900, "output_tokens": 900}\n'
    (tmp_path / "long.jsonl").write_text("".join(line % (i, i / 20) for i in range(60_000)))
    command = [sys.executable, "-m", "kvplan", "compare", "long.jsonl", "--vary", "max-num-seqs=200,201"]
    child = subprocess.Popen(
        [*command, "--num-gpu-blocks-override", "9000", "--jobs", "2", "--json"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    time.sleep(2.5)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=20)
    assert child.returncode == 130, err
    assert json.loads(out)["runs"] == []


@pytest.mark.parametrize("engine", ["static", "orca-max", "orca-pow2", "orca-oracle"])
def test_contiguous_engines_simulate_and_are_said_to_be_approximated(cli: Cli, engine: str) -> None:
    document = cli(
        f"simulate chat --limit 40 --engine {engine} --model opt-13b --gpu a100-40gb --json"
    ).document
    assert document["simulation"]["engine"] == engine
    assert document["simulation"]["verified"] == "approximated"
    assert document["simulation"]["scheduler_version"] == "Kwon et al. 2023"
    assert document["prefix_cache"]["enabled"] is False
    kv = document["kv"]
    assert kv["block_size"] == 1
    shares = ("token_share", "reserved_share", "internal_fragmentation", "external_fragmentation")
    assert sum(kv[name] for name in shares) == pytest.approx(1, abs=1e-12)


def test_events_name_every_sequence_of_a_contiguous_engine(cli: Cli, tmp_path: Path) -> None:
    common = "simulate chat --limit 20 --engine orca-pow2 --model opt-13b --gpu a100-40gb --json"
    fast = cli(common).document
    watched = cli(f"{common} --events e.jsonl").document
    steps = [json.loads(line) for line in (tmp_path / "e.jsonl").read_text().splitlines()]
    assert len(steps) == watched["steps"]
    assert sum(tokens for step in steps for _, tokens in step["scheduled"]) == watched["scheduled_tokens"]
    fast["simulation"].pop("engine_path")
    watched["simulation"].pop("engine_path")
    assert fast == watched


def test_a_pool_without_a_piece_for_the_longest_sequence_does_not_start(cli: Cli) -> None:
    outcome = cli("simulate chat --engine orca-max --num-gpu-blocks-override 100 --max-model-len 1100")
    assert outcome.code == 1
    assert "largest in a pool of 1,600 slots is 1,024" in outcome.err


def test_sizing_counts_reservations(cli: Cli) -> None:
    # 40 layers x 2 x 5,120 x 2 bytes = 819,200 a token; 12 GiB hold 15,728 tokens in blocks of 16.
    common = "size opt-13b --seq 500 --kv-cache-memory-bytes 12GiB --json --engine"
    found = {
        engine: cli(f"{common} {engine}").document["capacity"]["concurrent_sequences"]
        for engine in ("paged", "orca-oracle", "orca-max", "static")
    }
    assert found == {"paged": 30, "orca-oracle": 30, "orca-max": 7, "static": 7}


def test_an_infinite_value_is_text_in_the_document(cli: Cli) -> None:
    document = cli("compare chat --limit 3 --request-rate 4 --vary burstiness=1,inf --json").document
    assert [run["changes"]["burstiness"] for run in document["runs"]] == [1.0, "inf"]
