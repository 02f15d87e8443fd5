"""What `size` says first, and the questions beyond one length: changes, distributions, prefixes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from command_line import Cli

FITS = "size llama-2-13b --seq 4096 --concurrency 10 --gpu a100-80gb"
UNFIT = "size llama-2-13b --seq 4096 --gpu l4"


def paragraphs(text: str) -> list[str]:
    """The text in paragraphs, each on one line."""
    return [" ".join(part.split()) for part in text.split("\n\n")]


def test_the_first_line_says_what_was_assumed_the_next_whether_it_fits(cli: Cli) -> None:
    assumed, answer, *_ = paragraphs(cli(FITS).out)
    assert assumed.startswith("assumed: engine vllm@")
    assert answer.startswith(
        "llama-2-13b fits on 1 x a100-80gb, likely At once: 15 sequences of 4,096 tokens"
    )
    assert "Asked for: 10 sequences" in answer
    assert "Limit: " in answer
    assert "--suggest" in answer


def test_where_it_does_not_fit_the_changes_stand_below_the_answer(cli: Cli) -> None:
    outcome = cli(UNFIT)
    assert outcome.code == 1
    answer = paragraphs(outcome.out)[1]
    assert answer.startswith(
        "llama-2-13b does not fit on 1 x l4, likely At once: no sequence of 4,096 tokens"
    )
    assert "leave nothing for KV" in answer
    document = cli(f"{UNFIT} --json").document
    shown = " ".join(outcome.out.split())
    assert document["capacity"]["suggestions"]
    for suggestion in document["capacity"]["suggestions"]:
        assert f"{suggestion['change']} {suggestion['effect']}" in shown
        again = cli(f"{UNFIT} --json {suggestion['change']}")  # of two --gpu the last counts
        assert again.code == 0
        assert again.document["capacity"]["concurrent_sequences"] == suggestion["concurrent_sequences"]


def test_without_a_budget_it_says_how_to_ask(cli: Cli) -> None:
    answer = paragraphs(cli("size llama-2-13b --seq 4096").out)[1]
    assert answer.startswith(
        "llama-2-13b: 1 sequence of 4,096 tokens takes 3.125 GiB of KV Weights: 24.244 GiB"
    )
    assert "--gpu" in answer


def test_the_memory_shown_adds_up(cli: Cli) -> None:
    lines = cli(FITS).out.splitlines()
    first = next(i for i, line in enumerate(lines) if "memory of each GPU" in line)
    last = next(i for i, line in enumerate(lines) if line.startswith(" in all"))
    figures = {}
    for line in lines[first + 2 : last + 1]:
        words = [
            word for word in line.split() if word.replace(".", "").replace(",", "").isdigit() and "." in word
        ]
        figures[" ".join(line.split()[:2])] = float(words[0])
    whole = figures.pop("in all")
    # What is free is counted in whole blocks, one of which is the null block: less than 2 x 12.5 MiB is missing.
    assert 0 <= whole - sum(figures.values()) < 0.06


def test_ranks_and_groups_are_shown_where_there_are_several(cli: Cli) -> None:
    out = cli("size llama-3.1-70b --gpu 8xh100-80gb -tp 4 -pp 2 --seq 8192").out
    assert "GPUs of stage" in out
    assert "(limits)" in out
    assert "GPUs of stage" not in cli(FITS).out
    assert "4 x sliding_window" in cli("size gemma-3-27b --gpu a100-80gb").out


def test_replicated_heads_are_named(cli: Cli) -> None:
    command = "size llama-3.1-8b --gpu 16xh100-80gb --seq 8192"
    assert "of it replicated" in cli(command).out
    (rank,) = cli(f"{command} --json").document["capacity"]["ranks"]
    # 8 KV heads on 16 ranks: each holds one, half of which is another's.
    assert rank["replicated_bytes_per_token"] * 2 == rank["bytes_per_token"] == 131072 // 8


def test_lengths_give_a_distribution(cli: Cli) -> None:
    command = "size llama-3.1-8b --gpu h100-80gb --lengths 2000,6000 --shared-prefix 512"
    found = cli(f"{command} --json").document["capacity"]["distribution"]
    assert found["method"] == "log-normal"
    assert (found["mean_tokens"], found["p95_tokens"], found["shared_blocks"]) == (2000, 6000, 32)
    assert 0 < found["concurrent_p95"] < found["concurrent_mean"]
    text = cli(command).out
    assert f"{found['concurrent_mean']:,} sequences of the lengths given on average" in " ".join(text.split())
    explained = cli(f"{command} --explain --json").document["explanation"]
    assert any("1.645 x sqrt(n)" in line for line in explained)
    assert explained[-1].startswith("fits: ")


def test_a_prefix_alone_is_shared_by_sequences_of_one_length(cli: Cli) -> None:
    document = cli("size llama-3.1-8b --gpu h100-80gb --seq 4096 --shared-prefix 1000 --json").document
    capacity = document["capacity"]
    # 1,000 tokens are 62 full blocks; a sequence has 256.
    expected = (capacity["usable_blocks"] - 62) // (256 - 62)
    assert (
        capacity["distribution"]["concurrent_mean"] == capacity["distribution"]["concurrent_p95"] == expected
    )


def test_a_trace_is_counted_with_its_prefixes(cli: Cli, tmp_path: Path) -> None:
    rows = [
        {
            "id": str(i),
            "arrival_s": i,
            "input_tokens": 1600,
            "output_tokens": 160,
            "content": [["system", 0, 800], [f"u{i}", 0, 800]],
        }
        for i in range(2000)
    ]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    capacity = cli("size llama-3.1-8b --gpu h100-80gb --trace t.jsonl --json").document["capacity"]
    found = capacity["distribution"]
    # 110 blocks each, 50 of them the same.
    assert found["method"] == "trace"
    assert found["concurrent_mean"] == (capacity["usable_blocks"] - 50) // 60
    alone = cli(
        "size llama-3.1-8b --gpu h100-80gb --trace t.jsonl --no-enable-prefix-caching --json"
    ).document
    assert alone["capacity"]["distribution"]["concurrent_mean"] == capacity["usable_blocks"] // 110


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--gpu h100 --lengths 2000", '"2000" is not two numbers (--lengths)'),
        ("--gpu h100 --lengths 2000,x", '"x" is not a whole number (--lengths)'),
        ("--gpu h100 --lengths 0,10", '"0,10" is out of range (--lengths)'),
        ("--gpu h100 --lengths 100,50", "no log-normal distribution has mean 100"),
        ("--gpu h100 --lengths 100,500", "no log-normal distribution has mean 100"),
        ("--lengths 100,200", "--lengths needs a memory budget"),
        ("--gpu h100 --trace chat --lengths 100,200", "--trace and --lengths both say"),
        ("--gpu h100 --trace chat --shared-prefix 16", "--trace and --shared-prefix both say"),
        ("--gpu h100 --shared-prefix 999999", "a prefix of 999,999 tokens is beyond max_model_len"),
        ("--gpu h100 --trace nowhere.jsonl", "cannot read the trace"),
    ],
)
def test_wrong_lengths_are_refused(cli: Cli, flags: str, message: str) -> None:
    outcome = cli(f"size llama-3.1-8b {flags}")
    assert (outcome.code, outcome.out) == (2, "")
    assert message in outcome.err
    assert len(outcome.err.splitlines()) == 2


def test_what_is_assumed_of_lengths_is_a_warning(cli: Cli) -> None:
    assert "cut off" in cli("size llama-2-13b --gpu h100-80gb --lengths 2000,6000").err
    off = cli("size llama-3.1-8b --gpu h100-80gb --shared-prefix 512 --no-enable-prefix-caching")
    assert "prefix caching is off" in off.err
    assert "more of the same" in cli("size llama-3.1-8b --gpu 8xh100-80gb --trace chat").err


def test_a_check_may_ask_for_a_distribution(cli: Cli) -> None:
    Path("c.yaml").write_text(
        "version: 1\nengine: vllm@0.33\ndefaults: {gpu: h100-80gb, model: llama-3.1-8b}\nchecks:\n"
        '  - {trace: chat, expect: {capacity.distribution.concurrent_p95: ">= 100"}}\n'
        '  - {lengths: "2000,6000", shared_prefix: 512, expect: {capacity.distribution.concurrent_mean: ">= 100"}}\n'
    )
    assert cli("check c.yaml").code == 0


def test_all_gpus_are_ranked_within_80_columns(cli: Cli) -> None:
    outcome = cli("size llama-3.1-8b --gpu all --seq 8192")
    assert outcome.code == 0
    assert "left out, since their memory is not known" in outcome.err
    assert max(len(line) for line in outcome.out.splitlines()) <= 80
    assert "How many GPUs llama-3.1-8b needs for 1 sequence of 8,192 tokens" in outcome.out


def test_counts_of_several_replicas_are_said_to_be_of_each(cli: Cli) -> None:
    answer = paragraphs(cli("size llama-2-13b --seq 4096 --gpu 2xa100-80gb -dp 2").out)[1]
    assert "At once: 15 sequences of 4,096 tokens, in each of 2 replicas Asked for" in answer
    assert "usable blocks, in each of 2 replicas" in answer
    assert "replica" not in cli(FITS).out


def test_where_nothing_lets_more_in_it_says_so_to_who_asks(cli: Cli) -> None:
    command = "size llama-3.1-8b --gpu h100-80gb --num-gpu-blocks-override 9000"
    assert "More: --suggest shows" in cli(command).out
    outcome = cli(f"{command} --suggest")
    assert "No change of one setting lets more in" in outcome.out
    assert "--suggest shows" not in outcome.out


def test_one_is_no_plural(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "one.jsonl").write_text(
        '{"id": "a", "arrival_s": 0, "input_tokens": 1, "output_tokens": 1}\n'
    )
    texts = {
        command: " ".join(cli(command).out.split())
        for command in (
            "size llama-3.1-8b --seq 1",
            "size llama-3.1-8b --seq 1 --gpu h100-80gb",
            "simulate one.jsonl --no-async-scheduling",
            "compare one.jsonl --vary block-size=16,32 --jobs 1",
            "explain prefix --requests 1",
            "explain waste --used-tokens 1",
        )
    }
    sized, fitted, simulated, compared, *_ = texts.values()
    assert "1 sequence of 1 token takes" in sized
    assert "1 sequence of 1 token needs 1 of" in fitted
    assert simulated.startswith("one.jsonl: 1 request on")
    assert "done, 1 step, 1 token scheduled" in simulated
    assert compared.startswith("one.jsonl: 1 request, ")
    for command, text in texts.items():
        assert re.findall(r"(?<![\d.,])1 [a-z]+s\b", text) == [], command


def test_what_makes_an_answer_uncertain_is_a_sentence(cli: Cli) -> None:
    answer = paragraphs(cli("size llama-3.1-8b --gpu l4 --max-model-len auto").out)[1]
    assert "Uncertain: the overhead is 0.79 to 2.13 GiB, and at one end it does not fit" in answer


def test_stages_that_hold_nothing_are_named_in_a_sentence(cli: Cli) -> None:
    answer = paragraphs(cli("size llama-3.1-70b --gpu l4 -pp 2").out)[1]
    assert "on each GPU of stage 0 (the one with the fewest blocks) leave nothing for KV" in answer


def test_memory_that_is_lacking_is_said_in_gib(cli: Cli) -> None:
    assert "need 1,013.96 GiB on each GPU, which has 79.19 GiB" in " ".join(
        cli("size llama-3.1-8b --gpu h100 --kv-cache-memory-bytes 999GiB").out.split()
    )
    refused = cli("size llama-3.1-70b --gpu l4 --max-model-len auto")
    assert refused.code == 1
    assert "need 113.08 GiB more on a GPU" in refused.err


def test_a_ranking_says_which_length_the_engine_is_started_with(cli: Cli) -> None:
    ranked = "size llama-3.1-8b --seq 8192 --gpu l4,h100"
    assert "1 sequence of 8,192 tokens, started with max_model_len 131,072" in " ".join(
        cli(ranked).out.split()
    )
    assert "started with" not in cli(f"{ranked} --max-model-len 8192").out
