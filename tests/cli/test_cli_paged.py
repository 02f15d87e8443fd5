"""`kvplan simulate --engine paged`: its settings, samples, swaps in simulated time, and what it does not have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import Cli

MACHINE_FREE = "--engine paged --block-size 4 --num-gpu-blocks-override"


def trace(path: Path, *rows: dict[str, Any]) -> Path:
    """A trace of these rows; what is left out is 8 tokens in, 9 out, from the beginning."""
    usual = {"arrival_s": 0, "input_tokens": 8, "output_tokens": 9}
    path.write_text("".join(json.dumps({"id": str(n), **usual, **row}) + "\n" for n, row in enumerate(rows)))
    return path


def test_settings_are_named_with_their_origin(cli: Cli, tmp_path: Path) -> None:
    file = trace(tmp_path / "t.jsonl", {})
    document = cli(
        "simulate", str(file), "--engine", "paged", "--json", "--model", "llama-2-13b", "--gpu", "a100-40gb",
        "--scheduling-policy", "round-robin", "--victim", "last-come", "--swap-space", "8GiB",
    ).document  # fmt: skip
    config = {name: setting["value"] for name, setting in document["config"].items()}
    assert config["engine"] == "paged"
    assert config["scheduling_policy"] == "round-robin"
    assert config["quantum"] == 64
    assert config["preemption_mode"] == "swap"
    # 16 tokens of 819,200 bytes are 12.5 MiB: 8 GiB hold 655 of them.
    assert config["num_cpu_blocks"] == 8 * 1024 // 12.5
    assert document["config"]["victim"]["source"] == "--victim"
    assert document["config"]["quantum"]["source"] == "default of engine paged"
    simulation = document["simulation"]
    assert (simulation["engine"], simulation["verified"]) == ("paged", "read")
    assert simulation["status"] == "done"


def test_the_default_swap_space_is_4_gib(cli: Cli, tmp_path: Path) -> None:
    file = trace(tmp_path / "t.jsonl", {})
    out = cli(
        "simulate",
        str(file),
        *["--engine", "paged", "--json", "--model", "llama-2-13b", "--gpu", "a100-40gb"],
    )
    assert out.document["config"]["num_cpu_blocks"]["value"] == 4 * 1024 // 12.5


def test_without_a_machine_the_cpu_pool_is_as_large_as_the_gpus(cli: Cli, tmp_path: Path) -> None:
    file = trace(tmp_path / "t.jsonl", {})
    config = cli("simulate", str(file), *f"{MACHINE_FREE} 7 --json".split()).document["config"]
    assert config["num_cpu_blocks"]["value"] == 7
    assert config["max_model_len"]["value"] == 28, "there is no null block"


def test_swaps_are_counted_and_written_as_events(cli: Cli, tmp_path: Path) -> None:
    file = trace(tmp_path / "t.jsonl", {}, {"arrival_s": 0.02})
    events = tmp_path / "e.jsonl"
    arguments = f"{MACHINE_FREE} 6 --json --events {events}"
    document = cli("simulate", str(file), *arguments.split()).document
    assert document["preemptions"]["swapped_out_blocks"] == 3
    assert document["preemptions"]["swapped_in_blocks"] == 3
    assert document["preemptions"]["recomputed_tokens"] == 0
    assert document["requests"]["finished"] == 2
    lines = [json.loads(line) for line in events.read_text().splitlines()]
    assert [line["step"] for line in lines if line.get("swapped_out_blocks")] == [5]
    assert [line["step"] for line in lines if line.get("swapped_in_blocks")] == [10]
    none = cli(
        "simulate", str(file), *f"{MACHINE_FREE} 6 --json --num-cpu-blocks-override 0".split()
    ).document
    assert none["preemptions"]["swapped_out_blocks"] == 0
    assert none["preemptions"]["events"] == 1


def test_watched_and_unwatched_runs_give_the_same_document(cli: Cli, tmp_path: Path) -> None:
    command = "simulate bursts --limit 300 --engine paged --num-gpu-blocks-override 400 --n 2 --json"
    quick = cli(command).document
    watched = cli(f"{command} --events {tmp_path / 'e.jsonl'}").document
    assert (quick["simulation"].pop("engine_path"), watched["simulation"].pop("engine_path")) == (
        "fast",
        "plain",
    )
    assert quick["preemptions"]["swapped_out_blocks"] > 0
    assert quick == watched


def test_samples_come_from_the_trace_and_the_flag_wins(cli: Cli, tmp_path: Path) -> None:
    file = trace(tmp_path / "t.jsonl", {"input_tokens": 6, "output_tokens": 3, "n": 3})
    own = cli("simulate", str(file), *f"{MACHINE_FREE} 50 --json".split()).document
    # A whole block and a partly filled one, which two of three copy.
    assert own["prefix_cache"]["copied_blocks"] == 2
    assert own["kv"]["peak_blocks"] == 1 + 3
    assert own["trace"]["output_tokens"] == 9
    two = cli("simulate", str(file), *f"{MACHINE_FREE} 50 --n 2 --json".split()).document
    assert two["prefix_cache"]["copied_blocks"] == 1
    assert two["config"]["n"]["value"] == 2


def test_vllm_runs_each_sample_as_a_request_with_the_prompt_in_common(cli: Cli, tmp_path: Path) -> None:
    file = trace(tmp_path / "t.jsonl", {"input_tokens": 9, "output_tokens": 3, "n": 3})
    arguments = "--block-size 4 --num-gpu-blocks-override 50 --json"
    document = cli("simulate", str(file), *arguments.split()).document
    assert document["requests"]["finished"] == 3
    assert document["prefix_cache"]["hit_tokens"] == 2 * 8
    assert document["prefix_cache"]["copied_blocks"] == 0


def test_ids_that_look_like_samples_do_not_mix_with_samples(cli: Cli, tmp_path: Path) -> None:
    file = trace(tmp_path / "t.jsonl", {"id": "a", "n": 2}, {"id": "a#1"})
    arguments = "--block-size 4 --num-gpu-blocks-override 50"
    outcome = cli("simulate", str(file), *arguments.split())
    assert outcome.code == 2
    assert "an id that ends in # and a number" in outcome.err
    assert cli("simulate", str(file), *f"{arguments} --engine paged".split()).code == 0


@pytest.mark.parametrize("n", [0, 1025, -1, 1.5, "two"])
def test_a_wrong_number_of_samples_is_an_error_of_the_line(cli: Cli, tmp_path: Path, n: object) -> None:
    file = trace(tmp_path / "t.jsonl", {"n": n})
    outcome = cli("simulate", str(file), *f"{MACHINE_FREE} 50".split())
    assert outcome.code == 2
    assert "kvplan: error: n is" in outcome.err
    assert "t.jsonl:1" in outcome.err


def test_what_outgrows_the_pool_is_rejected_and_said(cli: Cli, tmp_path: Path) -> None:
    file = trace(tmp_path / "t.jsonl", {}, {"input_tokens": 12, "output_tokens": 20}, {"n": 300})
    arguments = f"{MACHINE_FREE} 7 --max-model-len 1000 --json"
    outcome = cli("simulate", str(file), *arguments.split())
    assert outcome.code == 0
    assert outcome.document["requests"]["reject_reasons"] == {
        "more_samples_than_max_num_seqs": 1,
        "needs_more_blocks_than_the_pool": 1,
    }
    assert "1 request turned away: even alone too large for the 7 blocks" in outcome.err
    assert "1 request turned away: more samples than max_num_seqs 256" in outcome.err


def test_swapping_takes_the_time_of_the_link(cli: Cli, tmp_path: Path) -> None:
    """The same decisions with a free and with a priced swap differ by blocks x their bytes over the link's rate."""
    rows = [{"input_tokens": 100, "output_tokens": 60}] * 2
    file = trace(tmp_path / "t.jsonl", *rows)
    arguments = "--engine paged --model llama-2-13b --gpu a100-40gb --num-gpu-blocks-override 18 --json"
    document = cli("simulate", str(file), *arguments.split()).document
    moved = document["preemptions"]["swapped_out_blocks"] + document["preemptions"]["swapped_in_blocks"]
    assert moved > 0
    # The longest gap between two tokens of the victim holds both ways: 12.5 MiB a block at 80 % of 32 GB/s.
    assert document["latency"]["itl_s"]["max"] > moved * 13_107_200 / 25.6e9
