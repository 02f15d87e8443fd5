"""Exit codes: 0 yes, 1 no, 2 wrong input, 130 interrupted; and what is on stdout with each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import GOLDENS, Cli, listing, raise_in_turn

CHECK = """\
version: 1
engine: vllm@0.33
checks:
  - name: a card for one
    model: llama-3.1-8b
    gpu: {gpu}
    seq: 8192
    expect: {{fits: true}}
"""


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("--version", 0),
        ("--help", 0),
        ("size -h", 0),
        ("size llama-2-13b", 0),
        ("size llama-2-13b --gpu a100-80gb --seq 4096 --concurrency 15", 0),
        ("size llama-2-13b --gpu a100-80gb --seq 4096 --concurrency 16", 1),
        ("size llama-2-13b --gpu l4", 1),
        ("size llama-2-13b llama-3.1-8b --gpu l4", 1),
        ("size llama-2-13b --gpu l4,a100-80gb", 0),
        ("size llama-2-13b --gpu 1xl4,1xt4", 1),
        ("size llama-2-13b --gpu l4 --max-model-len auto", 1),
        ("size llama-2-13b --num-gpu-blocks-override 257", 0),
        ("size llama-2-13b --num-gpu-blocks-override 256", 1),
        ("simulate chat --limit 5", 0),
        ("simulate chat --limit 5 --model llama-2-13b --gpu l4", 1),
        ("simulate chat --limit 5 --num-gpu-blocks-override 100 --max-model-len 1584", 0),
        ("simulate chat --limit 5 --num-gpu-blocks-override 100 --max-model-len 1585", 1),
        (f"simulate {GOLDENS / '23_never_fits.scenario.json'}", 1),
        (f"simulate {GOLDENS / '24_grows_too_big.scenario.json'}", 1),
        (f"simulate {GOLDENS / '05_preempt_single.scenario.json'}", 0),
        ("check good.yaml", 0),
        ("check good.yaml --output-format json", 0),
        ("check good.yaml --output-format github", 0),
        ("check bad.yaml", 1),
        ("check bad.yaml --output-format github", 1),
        ("models", 0),
        ("gpus", 0),
        ("size nothing-like-it", 2),
        ("nothing-like-it", 2),
        ("--nothing-like-it", 2),
    ],
)
@pytest.mark.parametrize("json", ["", " --json"])
def test_the_exit_code_is_the_answer(cli: Cli, tmp_path: Path, command: str, code: int, json: str) -> None:
    if json and command.startswith("-"):
        pytest.skip("belongs to a command")
    (tmp_path / "good.yaml").write_text(CHECK.format(gpu="h100-80gb"))
    (tmp_path / "bad.yaml").write_text(CHECK.format(gpu="t4"))
    outcome = cli(command + json)
    assert outcome.code == code
    if json and "-h" not in command:
        assert outcome.document


def test_the_version_is_kvplans(cli: Cli) -> None:
    from kvplan import __version__

    assert cli("--version").out == f"kvplan {__version__}\n"


def test_a_model_that_does_not_fit_still_gets_all_its_figures(cli: Cli) -> None:
    document = cli("size llama-2-13b --gpu l4 --json").document
    assert document["capacity"]["fits"] is False
    assert document["capacity"]["reason"]
    assert document["kv"]["bytes_per_token"] == 819_200


def test_an_engine_that_would_not_start_says_why_on_stderr(cli: Cli) -> None:
    outcome = cli("simulate chat --num-gpu-blocks-override 100 --max-model-len 1585")
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.err == (
        "kvplan: error: the engine would not start: one sequence of max_model_len 1,585 needs 100 blocks, "
        "the pool has 99 usable (--max-model-len)\nat most --max-model-len 1584 fits\n"
    )


def test_a_stuck_run_gives_its_figures_and_says_that_it_is_stuck(cli: Cli) -> None:
    document = cli(f"simulate {GOLDENS / '23_never_fits.scenario.json'} --json").document
    assert document["simulation"]["status"] == "stuck"
    assert document["simulation"]["reason"]
    assert document["requests"]["unfinished"] == 2


# Interrupts


@pytest.fixture
def interrupt(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Has Ctrl-C come in the n-th turn of a run."""
    return lambda number: raise_in_turn(monkeypatch, number, KeyboardInterrupt)


def test_an_interrupted_run_gives_what_it_has_as_partial(cli: Cli, interrupt: Callable[[int], None]) -> None:
    whole = cli("simulate chat --limit 20 --json").document
    interrupt(25)
    outcome = cli("simulate chat --limit 20 --json")
    assert outcome.code == 130
    document = outcome.document
    assert document["simulation"]["status"] == "interrupted"
    assert 24 <= document["steps"] < whole["steps"]
    counts = document["requests"]
    assert counts["unfinished"] > 0
    assert counts["finished"] + counts["rejected"] + counts["unfinished"] == counts["total"]


def test_an_interrupted_run_says_so_in_its_table(cli: Cli, interrupt: Callable[[int], None]) -> None:
    interrupt(25)
    outcome = cli("simulate chat --limit 20")
    assert outcome.code == 130
    assert "interrupted" in outcome.out


def test_an_interrupt_in_the_first_step_breaks_nothing(cli: Cli, interrupt: Callable[[int], None]) -> None:
    interrupt(1)
    outcome = cli("simulate chat --limit 20")
    assert outcome.code == 130
    interrupt(1)
    assert cli("simulate chat --limit 20 --slo-ttft 1 --profile --json").document["steps"] == 0


def test_an_interrupted_run_leaves_no_file_that_looks_whole(
    cli: Cli, tmp_path: Path, interrupt: Callable[[int], None]
) -> None:
    interrupt(25)
    outcome = cli("simulate chat --limit 20 --events e.jsonl --requests r.csv --timeline t.csv")
    assert outcome.code == 130
    assert listing(tmp_path) == {}


def test_an_interrupt_while_a_pool_is_searched_keeps_the_run_itself(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = cli("simulate chat --limit 5 --json").document

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvplan.jobs.min_blocks._is_met", interrupted)
    outcome = cli("simulate chat --limit 5 --min-blocks 0 --requests r.csv --json")
    assert outcome.code == 130
    assert outcome.document == {**alone, "min_blocks": None}
    assert set(listing(tmp_path)) == {"r.csv"}


def test_an_interrupted_check_has_no_verdict(
    cli: Cli, tmp_path: Path, interrupt: Callable[[int], None]
) -> None:
    (tmp_path / "check.yaml").write_text(
        "version: 1\nengine: vllm@0.33\nchecks:\n"
        "  - {trace: chat, limit: 20, expect: {preemption_events: 0}}\n"
    )
    interrupt(25)
    outcome = cli("check check.yaml --junit j.xml")
    assert outcome.code == 130
    assert "pass" not in outcome.out
    assert not (tmp_path / "j.xml").exists()


def test_an_interrupt_before_the_run_is_130_without_a_traceback(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvplan.jobs.simulate.open_trace", interrupted)
    outcome = cli("simulate chat")
    assert (outcome.code, outcome.out, outcome.err) == (130, "", "kvplan: interrupted\n")
