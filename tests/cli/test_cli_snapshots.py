"""What people see at 80 columns, word for word.

``KVPLAN_UPDATE_SNAPSHOTS=1`` rewrites the files; read the difference before it is kept.
"""

from __future__ import annotations

import re
import shutil
from collections import Counter
from importlib.metadata import version
from pathlib import Path

import pytest
from command_line import GOLDENS, SNAPSHOTS, UPDATE, Cli, same_as_snapshot
from rich.cells import cell_len

import kvplan
from kvplan.jobs.explain import TOPICS

COMMANDS = {
    "size": "size llama-2-13b --seq 4096",
    "size-explain": "size llama-2-13b --seq 4096 --concurrency 10 --gpu a100-80gb --explain",
    "size-tensor-parallel": "size llama-3.1-70b --seq 8192 --gpu 4xh100-80gb --kv-cache-dtype fp8",
    "size-two-models": "size llama-2-13b llama-3.1-8b --seq 4096 --gpu a100-80gb",
    "size-engines": "size llama-2-13b --gpu a100-80gb --engine vllm@0.33,vllm@0.24,sglang",
    "size-gpu-ranking": "size llama-3.1-8b --gpu l4,h100-80gb",
    "size-does-not-fit": "size llama-2-13b --seq 4096 --gpu l4",
    "simulate-scenario": "simulate 05_preempt_single.scenario.json",
    "simulate-scenario-timed": "simulate 05_preempt_single.scenario.json --step-time 0.02 --slo-ttft 0.1",
    "simulate-stuck": "simulate 23_never_fits.scenario.json",
    "simulate-bursts": "simulate bursts --num-gpu-blocks-override 2000",
    "simulate-paged": "simulate bursts --engine paged --num-gpu-blocks-override 1000 --n 2",
    "simulate-estimated-times": "simulate chat --limit 20",
    "simulate-map": "simulate 05_preempt_single.scenario.json --map --map-request b --at-step 8",
    "simulate-map-orca": "simulate chat --limit 30 --engine orca-oracle --num-gpu-blocks-override 512 "
    "--map --at-step 1200",
    "explain": "explain",
    **{f"explain-{topic}": f"explain {topic}" for topic in TOPICS},
    "simulate-orca": "simulate bursts --limit 60 --engine orca-pow2 --num-gpu-blocks-override 2000",
    "compare-engines": "compare bursts --engines vllm,static,orca-max,orca-pow2,orca-oracle "
    "--num-gpu-blocks-override 4000 --max-model-len 12000 --limit 120 --jobs 1",
    "compare-block-sizes": "compare chat --vary block-size=4,8,16,32,64 --num-gpu-blocks-override 1000 --limit 200 "
    "--jobs 1",
    "compare-cases": "compare chat --engines vllm,orca-max --case 'max-num-seqs=8 block-size=32' "
    "--num-gpu-blocks-override 2000 --max-model-len 8192 --limit 50 --jobs 1",
    "check": "check capacity.yaml",
    "gpu": "gpus h100-80gb",
    "model": "models llama-2-13b",
}
CODES = {"size-does-not-fit": 1, "simulate-stuck": 1, "check": 1}
HELP = (
    "",
    "size",
    "simulate",
    "compare",
    "check",
    "audit",
    "calibrate",
    "explain",
    "kernel-bench",
    "models",
    "gpus",
)

#: Typer lays out the help texts; another version may do it otherwise.
TYPER_OF_HELP = "0.29"

CHECK_FILE = """\
version: 1
engine: vllm@0.33
defaults: {gpu: h100-80gb}
checks:
  - name: chat-13b fits 10 users at 4k
    model: llama-2-13b
    seq: 4096
    concurrency: 10
    expect: {fits: true, headroom: ">= 5%", kv.total_bytes: "<= 32GiB"}
  - name: a day of chat does not preempt, and shares its prompts
    trace: chat
    limit: 100
    expect: {preemption_events: "== 0", prefix_hit_rate: ">= 90%"}
  - name: the small card
    vllm_command: vllm serve llama-2-13b --max-model-len 4096
    gpu: l4
    expect: {fits: true}
"""


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_prints_its_snapshot(cli: Cli, tmp_path: Path, name: str) -> None:
    for scenario in ("05_preempt_single", "23_never_fits"):
        shutil.copy(GOLDENS / f"{scenario}.scenario.json", tmp_path)
    (tmp_path / "capacity.yaml").write_text(CHECK_FILE)
    outcome = cli(COMMANDS[name])
    assert outcome.code == CODES.get(name, 0)
    same_as_snapshot(name, outcome.out)
    assert outcome.err == ""


@pytest.mark.skipif(
    not version("typer").startswith(f"{TYPER_OF_HELP}."),
    reason=f"the snapshots of the help were made with Typer {TYPER_OF_HELP}",
)
@pytest.mark.parametrize("command", HELP)
def test_help_prints_its_snapshot(cli: Cli, command: str) -> None:
    outcome = cli(f"{command} --help")
    assert (outcome.code, outcome.err) == (0, "")
    same_as_snapshot(f"help-{command}" if command else "help", outcome.out)


def test_each_snapshot_is_80_columns_wide_at_most() -> None:
    too_wide = [
        f"{path.name}:{number}: {cell_len(line)} columns"
        for path in SNAPSHOTS.glob("*.txt")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if cell_len(line) > 80
    ]
    assert not too_wide


@pytest.mark.skipif(UPDATE, reason="files are being written")
def test_each_snapshot_belongs_to_a_test() -> None:
    expected = {*COMMANDS, *(f"help-{c}" if c else "help" for c in HELP)}
    # Those of audit name the log that they are of: test_cli_audit.py.
    assert {p.stem for p in SNAPSHOTS.glob("*.txt") if not p.stem.startswith("audit-")} == expected


@pytest.mark.parametrize("columns", ["40", "60", "200"])
@pytest.mark.parametrize("name", ["size-explain", "size-gpu-ranking", "simulate-estimated-times", "check"])
def test_other_widths_lose_no_figure(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, columns: str
) -> None:
    (tmp_path / "capacity.yaml").write_text(CHECK_FILE)
    usual = cli(COMMANDS[name])
    monkeypatch.setenv("COLUMNS", columns)
    outcome = cli(COMMANDS[name])
    assert outcome.code == usual.code
    assert not digits(usual.out) - digits(outcome.out)


def digits(text: str) -> Counter[str]:
    """How often a text has each digit: lines break elsewhere at another width, cells side by side included.

    Where rows stand below each other, the names of columns are said again for each.
    """
    return Counter(character for character in text if character.isdigit())


@pytest.mark.parametrize("columns", ["20", "40", "60", "80"])
@pytest.mark.parametrize(
    "command",
    ["size llama-3.1-8b --seq 4096 --gpu a100-80gb", "size llama-2-13b --gpu l4,h200", "models", "gpus"],
)
def test_no_word_of_a_table_is_cut_where_it_fits_in_a_line(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, command: str, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    words = {word for word in cli(command).out.split() if len(word) <= min(int(columns) - 2, 32)}
    monkeypatch.setenv("COLUMNS", columns)
    outcome = cli(command)
    seen = set(re.split(r"[\s:]+", outcome.out))
    assert not {word for word in words if word.strip("─█:") and word.rstrip(":") not in seen}
    assert max(map(len, outcome.out.splitlines())) <= int(columns)


def test_no_colour_and_no_control_code_without_a_terminal(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR")
    assert "\x1b" not in cli("size llama-2-13b --gpu a100-80gb").out


@pytest.mark.parametrize("command", ["gpus", "models"])
def test_catalogues_show_every_name_unbroken_within_80_columns(cli: Cli, command: str) -> None:
    known = kvplan.list_gpus() if command == "gpus" else kvplan.list_models()
    text = cli(command).out
    assert not [item.name for item in known if item.name not in text]
    assert max(cell_len(line) for line in text.splitlines()) <= 80
