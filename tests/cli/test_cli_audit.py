"""`kvplan audit` on the command line."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from command_line import Cli, listing, same_as_snapshot

from kvplan.calibration import load_calibration

LOGS = Path(__file__).resolve().parents[1] / "logs"


@pytest.mark.parametrize("name", ["vllm-0.33.0-tp2", "vllm-0.11-ray-refused", "llama-server"])
def test_what_people_see(cli: Cli, name: str) -> None:
    outcome = cli(f"audit {LOGS / f'{name}.log'}")
    assert outcome.code == 0
    same_as_snapshot(f"audit-{name}", outcome.out)


def test_every_log_has_one_json_document(cli: Cli) -> None:
    for path in sorted(LOGS.glob("*.log")):
        document = cli(f"audit {path} --json").document
        assert {"log", "lines", "differing", "calibration", "notes", "model"} <= document.keys()
        assert document["log"]["name"] == str(path)
        assert document["lines"]


def test_the_json_is_what_the_table_shows(cli: Cli) -> None:
    document = cli(f"audit {LOGS / 'vllm-0.33.0-tp2.log'} --json").document
    (tokens,) = [line for line in document["lines"] if line["term"] == "KV cache tokens"]
    assert tokens == {
        "term": "KV cache tokens",
        "unit": "tokens",
        "theirs": 753664,
        "low": 753664,
        "high": 753664,
        "ours": 753664,
        "difference": 0,
        "difference_bytes": 0,
        "agrees": True,
        "likely_cause": None,
        "line": 11,
        "worker": "EngineCore",
    }


def test_standard_input(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = (LOGS / "sglang-tp2.log").read_bytes()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw)))
    document = cli("audit - --json").document
    assert (document["log"]["name"], document["log"]["engine"]) == ("standard input", "sglang")


def test_a_calibration_is_saved_whole_or_not_at_all(cli: Cli, tmp_path: Path) -> None:
    assert cli(f"audit {LOGS / 'vllm-0.19.0.log'} --save-calibration c.yaml").code == 0
    kept = load_calibration(tmp_path / "c.yaml")
    assert (kept.engine, kept.version, kept.gpu_memory_utilization) == ("vllm", "0.19.0", 0.85)
    before = listing(tmp_path)
    outcome = cli(f"audit {LOGS / 'tensorrt-llm-0.13.log'} --save-calibration d.yaml")
    assert outcome.code == 2
    assert "kvplan: error: the log has nothing to keep" in outcome.err
    assert listing(tmp_path) == before
    assert cli("audit c.yaml --save-calibration c.yaml").code == 2
    assert listing(tmp_path) == before


def test_the_model_can_be_given(cli: Cli) -> None:
    outcome = cli(f"audit {LOGS / 'tensorrt-llm-0.13.log'} --model llama-2-7b --json")
    terms = {line["term"]: line for line in outcome.document["lines"]}
    # 40,384 tokens x 32 layers x 32 heads x 256 x 2 bytes, printed as 19.72 GiB.
    assert terms["KV memory of these tokens"]["ours"] == 40_384 * 524_288
    assert terms["KV memory of these tokens"]["agrees"]


def test_wrong_input_is_one_clear_error(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "prose.txt").write_text("Call me Ishmael.\n")
    outcome = cli("audit prose.txt")
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith("kvplan: error: no engine is recognised in this log (prose.txt)\n")
    assert cli("audit none.log --json").document["error"]["message"].startswith("cannot read the log")
    outcome = cli(f"audit {LOGS / 'vllm-0.19.0.log'} --model lama-3.1-8b")
    assert outcome.code == 2
    assert "llama-3.1-8b" in outcome.err


def test_names_in_a_log_drive_no_terminal(cli: Cli, tmp_path: Path) -> None:
    name = r"\x1b[31mred\x07"
    config = f"Initializing a V1 LLM engine (v0.11\x07) with config: model='{name}'\n"
    (tmp_path / "a.log").write_text(f"{config}Available KV cache memory: 1.0 GiB\n")
    outcome = cli("audit a.log")
    assert outcome.code == 0
    assert "\x1b" not in outcome.out + outcome.err
    assert "\x07" not in outcome.out + outcome.err


def test_a_kept_start_is_sized_again(cli: Cli) -> None:
    assert cli(f"audit {LOGS / 'vllm-0.19.0.log'} --save-calibration c.yaml").code == 0
    settings = "--gpu-memory 85029649940 --engine vllm@0.19 --gpu-memory-utilization 0.85 --max-num-seqs 256"
    document = cli(f"size llama-3.1-8b {settings} --max-model-len 32768 --calibration c.yaml --json").document
    capacity = document["capacity"]
    assert abs(capacity["available_kv_bytes"] - 50.92 * 2**30) <= 0.005 * 2**30
    assert (capacity["num_gpu_blocks"], capacity["kv_cache_tokens"]) == (26_071, 417_136)
    assert (capacity["overhead_source"], capacity["fits_confidence"]) == ("measured", "likely")
    assert document["config"]["overhead"]["source"].endswith("vllm-0.19.0.log:10")
    table = cli(f"size llama-3.1-8b {settings} --max-model-len 32768 --calibration c.yaml").out
    assert "overhead, measured" in table
    assert cli(f"size llama-3.1-8b {settings} --calibration none.yaml").code == 2
    run = cli(f"simulate chat --limit 5 {settings} --step-time 0.1 --calibration c.yaml --json").document
    assert run["config"]["num_gpu_blocks"] == {
        "value": 26_071,
        "source": "sized from model and GPU (measured)",
    }
