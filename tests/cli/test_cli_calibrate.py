"""`kvplan calibrate`, `simulate --uncertainty` and `audit --trace` on the command line."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
from command_line import Cli, listing

from kvplan.calibration import load_calibration

HEAD = "batch_size,context_mean,step_ms\n"
#: Steps of Qwen3-14B on an H100: 12 ms, and what 16 sequences of some length add.
STEPS = HEAD + "".join(
    f"{batch},{context},{12 + 1e-4 * batch * context:.4f}\n"
    for batch in (1, 4, 16)
    for context in (200, 1000, 3000)
)
FLAGS = "--model qwen3-14b --gpu h100-80gb"
LINE = (
    "INFO 12-01 10:00:{:02} [loggers.py:259] Engine 000: Avg prompt throughput: {} tokens/s, Avg generation "
    "throughput: 100.0 tokens/s, Running: 2 reqs, Waiting: 0 reqs, GPU KV cache usage: 1.0%\n"
)


@pytest.fixture(autouse=True)
def files(tmp_path: Path) -> None:
    (tmp_path / "steps.csv").write_text(STEPS)
    (tmp_path / "vllm.log").write_text("".join(LINE.format(10 * n, 0.0 if n else 9.0) for n in range(6)))
    request = {"input_tokens": 300, "output_tokens": 400}
    lines = [json.dumps({"arrival_s": second, **request}) for second in range(0, 50, 4)]
    (tmp_path / "trace.jsonl").write_text("\n".join(lines) + "\n")


def test_what_people_see(cli: Cli) -> None:
    outcome = cli(f"calibrate steps.csv {FLAGS}")
    assert outcome.code == 0
    assert outcome.out.startswith("table of step times: qwen3-14b on h100-80gb, vllm@")
    rows = [" ".join(line.split()) for line in outcome.out.splitlines()]
    (weights,) = [row for row in rows if row.startswith("weights bandwidth share")]
    (prompts,) = [row for row in rows if row.startswith("attention flops share")]
    assert weights.endswith("fitted")
    assert prompts.endswith("0.0 % held")
    assert any(row.startswith("after: median error 0.") for row in rows)
    assert "kvplan: warning: steps of one deployment cannot tell" in outcome.err


def test_the_json_says_all_that_the_table_does(cli: Cli) -> None:
    document = cli(f"calibrate steps.csv {FLAGS} --json").document
    assert document["schema_version"] == 1
    assert (document["models"], document["gpu"]) == (["qwen3-14b"], "h100-80gb")
    assert document["after"]["count"] == 9
    assert document["after"]["median"] < 0.01
    constants = {one["name"]: one for one in document["constants"]}
    assert constants["weights_bandwidth_share"]["fitted"]
    assert not constants["attention_flops_share"]["fitted"]


def test_a_calibration_is_written_and_used(cli: Cli, tmp_path: Path) -> None:
    assert cli(f"calibrate steps.csv {FLAGS} -o c.yaml").code == 0
    assert load_calibration(tmp_path / "c.yaml").step_times is not None
    run = f"simulate trace.jsonl {FLAGS} --calibration c.yaml --uncertainty"
    latency = cli(f"{run} --json").document["latency"]
    assert latency["model"]["calibration"] == "calibrated: steps.csv"
    assert latency["tpot_s"]["mean"] == pytest.approx(0.0125, rel=0.05)
    assert latency["tpot_s"]["low"]["mean"] <= latency["tpot_s"]["mean"] <= latency["tpot_s"]["high"]["mean"]
    text = cli(run).out
    assert "low and high: every step" in text
    assert "(median)" in text
    compared = cli(
        f"compare trace.jsonl {FLAGS} --calibration c.yaml --vary max-num-seqs=4,8 --json"
    ).document
    names = {one["latency"]["model"]["calibration"] for one in compared["runs"]}
    assert names == {"calibrated: steps.csv"}


def test_nothing_is_written_where_nothing_can_be_fitted(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "few.csv").write_text(HEAD + "1,100,12\n")
    before = listing(tmp_path)
    outcome = cli(f"calibrate few.csv {FLAGS} -o c.yaml")
    assert (outcome.code, outcome.out) == (2, "")
    assert "the file has 1 step of use, which is too few to fit to (few.csv)" in outcome.err
    assert cli(f"calibrate steps.csv {FLAGS} -o steps.csv").code == 2
    assert listing(tmp_path) == before


def test_a_kernel_benchmark_sets_two_shares(cli: Cli, tmp_path: Path) -> None:
    results = [
        {"valid": True, "bytes_moved": 1 << 29, "achieved_bytes_per_s": 2.68e12, "copy_bytes_per_s": 3.015e12}
    ]
    (tmp_path / "bench.json").write_text(json.dumps({"device": {"name": "NVIDIA H100"}, "results": results}))
    document = cli(f"calibrate bench.json {FLAGS} -o c.yaml --json").document
    after = {one["name"]: one["after"] for one in document["constants"] if one["fitted"]}
    assert after == {"kv_bandwidth_share": pytest.approx(0.8), "weights_bandwidth_share": pytest.approx(0.9)}
    assert document["after"] is None
    assert cli(f"simulate trace.jsonl {FLAGS} --calibration c.yaml").code == 0
    outcome = cli(f"simulate trace.jsonl {FLAGS} --calibration c.yaml --uncertainty")
    assert (outcome.code, "the error of the step times is not known" in outcome.err) == (2, True)
    outcome = cli("calibrate bench.json --model qwen3-14b --gpu l4")
    assert (outcome.code, "is --gpu l4 the GPU that was measured (NVIDIA H100)?" in outcome.err) == (2, True)


def test_a_log_is_fitted_where_its_pool_is_known(cli: Cli) -> None:
    outcome = cli(f"calibrate vllm.log {FLAGS} --num-gpu-blocks-override 10000 --json")
    document = outcome.document
    # Two sequences at 100 tokens a second: 20 ms a step, five times.
    assert (document["form"], document["after"]["count"]) == ("throughput lines of a log", 5)
    assert document["after"]["median"] < 0.02
    assert "the log does not say how large" in cli(f"calibrate vllm.log {FLAGS}").err


def test_a_run_beside_its_log(cli: Cli) -> None:
    outcome = cli(f"audit vllm.log --trace trace.jsonl {FLAGS}")
    assert outcome.code == 0
    assert "6 throughput lines" in outcome.out
    assert "running, mean" in outcome.out
    document = cli(f"audit vllm.log --trace trace.jsonl {FLAGS} --json").document
    assert {"terms", "moments", "simulation", "offset_s"} <= document.keys()
    for flags in ("--save-calibration c.yaml --trace trace.jsonl", "--calibration c.yaml"):
        assert cli(f"audit vllm.log {flags}").code == 2


def test_an_uncertain_run_reads_its_trace_again(cli: Cli) -> None:
    outcome = cli("simulate - --uncertainty")
    assert outcome.code == 2


def test_standard_input(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(STEPS.encode())))
    piped = cli(f"calibrate - {FLAGS} --json").document
    assert piped == cli(f"calibrate steps.csv {FLAGS} --json").document


def test_a_calibration_that_does_not_hold_is_named_where_its_error_is_needed(cli: Cli) -> None:
    assert cli(f"calibrate steps.csv {FLAGS} -o c.yaml").code == 0
    simulate = "simulate trace.jsonl --model qwen3-14b --max-model-len 2000 --calibration c.yaml"
    outcome = cli(f"{simulate} --gpu l40s --uncertainty")
    assert outcome.code == 2
    assert "its step times are not used: GPU h100-80gb there, l40s here" in outcome.err
    outcome = cli(f"{simulate} --gpu h100-80gb --step-time 0.01 --uncertainty")
    assert (outcome.code, outcome.err) == (
        2,
        "kvplan: error: the error of a constant step time is not known (--uncertainty)\nleave out --step-time\n",
    )
    outcome = cli(f"{simulate} --gpu h100-80gb --step-time 0.01")
    assert outcome.code == 0
    assert "its step times are not used: --step-time is given" in outcome.err
