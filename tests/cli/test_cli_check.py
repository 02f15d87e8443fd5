"""`kvplan check`: what can be expected of a figure, where settings come from, and what CI reads."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from command_line import GOLDENS, Cli, Outcome, listing

HEAD = "version: 1\nengine: vllm@0.33\n"

Check = Callable[..., Outcome]

LOGS = Path(__file__).resolve().parents[1] / "logs"


@pytest.fixture
def check(cli: Cli, tmp_path: Path) -> Check:
    """Runs a check file of this text."""

    def run(text: str, flags: str = "") -> Outcome:
        (tmp_path / "c.yaml").write_text(text)
        return cli(f"check c.yaml {flags}")

    return run


def one(expect: str, *, subject: str = "model: llama-2-13b, gpu: a100-80gb, seq: 4096, margin: mid") -> str:
    return f"{HEAD}checks:\n  - {{{subject}, expect: {{{expect}}}}}\n"


def verdicts(outcome: Outcome) -> list[dict[str, Any]]:
    return [verdict for check in outcome.document["checks"] for verdict in check["verdicts"]]


# Comparisons. llama-2-13b in 16-bit: 819,200 bytes a token; a100-80gb holds 15 sequences of 4,096 tokens.


@pytest.mark.parametrize(
    ("expect", "holds"),
    [
        ("fits: true", True),
        ("fits: false", False),
        ("fits: yes", True),
        ('fits: "true"', True),
        ('fits: "== true"', True),
        ('fits: "!= true"', False),
        ('fits: "== false"', False),
        ('fits: "!= false"', True),
        ("kv.bytes_per_token: 819200", True),
        ("kv.bytes_per_token: 819201", False),
        ('kv.bytes_per_token: "819,200"', True),
        ('kv.bytes_per_token: "819_200"', True),
        ('kv.bytes_per_token: "== 819200"', True),
        ('kv.bytes_per_token: "!= 819200"', False),
        ('kv.bytes_per_token: "<= 819200"', True),
        ('kv.bytes_per_token: "< 819200"', False),
        ('kv.bytes_per_token: ">= 819200"', True),
        ('kv.bytes_per_token: "> 819200"', False),
        ('kv.bytes_per_token: ">819199"', True),
        ('kv.bytes_per_token: "  <  819201  "', True),
        ('kv.bytes_per_token: "8.192e5"', True),
        ('kv.bytes_per_token: "800KiB"', True),
        ('kv.bytes_per_token: "== 800 KiB"', True),
        ('kv.bytes_per_token: "== 819.2KB"', True),
        ('kv.bytes_per_token: "> 1MB"', False),
        ('kv.bytes_per_sequence: "== 3.125GiB"', True),
        ('headroom: ">= 90%"', True),
        ('headroom: ">= 95 %"', False),
        ('headroom: ">= 0.9"', True),
        ('headroom: "> -5%"', True),
        ("concurrent_sequences: 15", True),
        ('concurrent_sequences: "< 15.5"', True),
        ('max_concurrency: "> 15"', True),
        ("kv_cache_tokens: 62192", True),
        ("kv.dtype: float16", True),
        ('kv.dtype: "== float16"', True),
        ('kv.dtype: "!= float16"', False),
        ("kv.dtype: bfloat16", False),
        ("kv.groups.0.layers: 40", True),
        ("capacity.ranks.0.num_blocks: 3887", True),
        ("config.block_size.value: 16", True),
        ('model.family: "llama"', True),
        ("fits: 1", False),
        ("kv.bytes_per_token: true", False),
        ("kv.dtype: 16", False),
    ],
)
def test_a_figure_is_held_against_its_expectation(check: Check, expect: str, holds: bool) -> None:
    outcome = check(one(expect), "--json")
    assert outcome.code == (0 if holds else 1)
    assert [verdict["passed"] for verdict in verdicts(outcome)] == [holds]


SHORT_NAMES = {
    "fits": "capacity.fits",
    "headroom": "capacity.headroom_share",
    "max_concurrency": "capacity.max_concurrency",
    "concurrent_sequences": "capacity.concurrent_sequences",
    "kv_cache_tokens": "capacity.kv_cache_tokens",
}
SHORT_NAMES_OF_RUNS = {
    "preemption_events": "preemptions.events",
    "preempted_requests": "preemptions.requests",
    "kv_utilization_mean": "kv.utilization.mean",
    "kv_utilization_p95": "kv.utilization.p95",
    "kv_utilization_max": "kv.utilization.max",
    "prefix_hit_rate": "prefix_cache.hit_rate",
    "token_share": "kv.token_share",
    "rejected_requests": "requests.rejected",
    "throughput_requests_per_s": "throughput.requests_per_s",
    **{
        f"{name}_{figure}_s": f"latency.{name}_s.{figure}"
        for name in ("ttft", "tpot", "itl", "e2e", "queue")
        for figure in ("mean", "p50", "p90", "p95", "p99")
    },
}


@pytest.mark.parametrize(
    ("subject", "command", "names"),
    [
        (
            "model: llama-2-13b, gpu: a100-80gb, seq: 4096",
            "size llama-2-13b --gpu a100-80gb --seq 4096 --margin high --json",
            SHORT_NAMES,
        ),
        (
            "trace: chat, limit: 30, num_gpu_blocks_override: 300, allow_uncalibrated: true",
            "simulate chat --limit 30 --num-gpu-blocks-override 300 --json",
            SHORT_NAMES_OF_RUNS,
        ),
    ],
)
def test_short_names_are_figures_of_the_documents(
    cli: Cli, check: Check, subject: str, command: str, names: dict[str, str]
) -> None:
    document = cli(command).document
    expect = ", ".join(f"{name}: '>= 0', {path}: '>= 0'" for name, path in names.items())
    seen = {
        verdict["figure"]: verdict["actual"]
        for verdict in verdicts(check(one(expect, subject=subject), "--json"))
    }
    for name, path in names.items():
        value: Any = document
        for key in path.split("."):
            value = value[key]
        assert seen[name] == seen[path] == value, name


def place(text: str) -> str:
    """File, line and column of the mark in a text."""
    before = text.partition("¦")[0].split("\n")
    return f"c.yaml:{len(before)}:{len(before[-1]) + 1}"


# Where settings come from


@pytest.mark.parametrize(
    ("lines", "block_size", "source"),
    [
        ("", 16, "default of vllm 0.33"),
        ("defaults: {block_size: 32}", 32, "check file, defaults"),
        ("defaults: {block_size: 32}\ncommand", 64, "vllm command"),
        ("defaults: {block_size: 32}\ncommand\nown", 128, "check file"),
        ("command", 64, "vllm command"),
        ("own", 128, "check file"),
        ("command\nown", 128, "check file"),
        ("defaults: {block_size: 32}\nown", 128, "check file"),
    ],
)
def test_own_keys_win_over_the_command_and_that_over_defaults(
    check: Check, lines: str, block_size: int, source: str
) -> None:
    given = lines.splitlines()
    defaults = next((line for line in given if line.startswith("defaults")), "")
    subject = (
        "vllm_command: vllm serve llama-2-13b --block-size 64" if "command" in given else "model: llama-2-13b"
    )
    own = ", block_size: 128" if "own" in given else ""
    outcome = check(
        f"{HEAD}{defaults}\nchecks:\n  - {{{subject}{own}, gpu: a100-80gb, "
        "expect: {config.block_size.value: -1, config.block_size.source: x}}\n",
        "--json",
    )
    assert [verdict["actual"] for verdict in verdicts(outcome)] == [block_size, source]


@pytest.mark.parametrize("place", ["defaults", "own"])
def test_the_cautious_margin_decides_unless_another_is_given(cli: Cli, check: Check, place: str) -> None:
    subject = "model: llama-2-13b, gpu: a100-80gb, seq: 4096"
    wanted = {
        margin: cli(f"size llama-2-13b --gpu a100-80gb --seq 4096 --margin {margin} --json").document[
            "capacity"
        ]["num_gpu_blocks"]
        for margin in ("low", "mid", "high")
    }
    assert wanted["low"] > wanted["mid"] > wanted["high"]
    expect = "capacity.num_gpu_blocks: -1"
    assert verdicts(check(one(expect, subject=subject), "--json"))[0]["actual"] == wanted["high"]
    if place == "own":
        text = one(expect, subject=f"{subject}, margin: low")
    else:
        text = one(expect, subject=subject).replace("checks:", "defaults: {margin: low}\nchecks:")
    assert verdicts(check(text, "--json"))[0]["actual"] == wanted["low"]


def test_defaults_that_another_kind_of_check_has_are_passed_over(check: Check) -> None:
    outcome = check(
        f"{HEAD}defaults: {{gpu: a100-80gb, seq: 2048, limit: 5}}\nchecks:\n"
        "  - {model: llama-2-13b, expect: {config.seq.value: 2048}}\n"
        "  - {trace: chat, expect: {requests.total: 5}}\n"
    )
    assert outcome.code == 0


def test_concurrency_is_a_closed_loop_only_where_a_check_of_a_trace_says_so(check: Check) -> None:
    run = "num_gpu_blocks_override: 400, trace: bursts, limit: 60, expect: {batch.running_max: '<= 2'}"
    lines = f"{HEAD}defaults: {{concurrency: 2}}\nchecks:\n  - {{{run}}}\n"
    assert check(lines).code == 1
    assert check(lines.replace("{num_gpu", "{concurrency: 2, num_gpu")).code == 0


def test_a_command_gives_model_and_settings(check: Check) -> None:
    command = "vllm serve llama-3.1-70b -tp 4 --max-model-len 32K --host 0.0.0.0 --kv-cache-dtype=fp8"
    outcome = check(
        one(
            "model.name: llama-3.1-70b, config.tensor_parallel_size.value: 4, kv.dtype: fp8, "
            "config.max_model_len.value: 32768, gpu.count: 4, fits: true",
            subject=f"vllm_command: {command}, gpu: h100-80gb",
        )
    )
    assert outcome.code == 0, outcome.out


def test_a_flag_of_the_command_can_be_ignored_on_purpose(check: Check) -> None:
    subject = "vllm_command: vllm serve llama-2-13b --cpu-offload-gb 4, gpu: a100-80gb"
    outcome = check(one("fits: true", subject=subject))
    assert outcome.code == 2
    assert outcome.err == (
        "kvplan: error: --cpu-offload-gb is not handled and may change memory (c.yaml:4:20, --vllm-command)\n"
        "pass --ignore-flag cpu-offload-gb if it does not matter here\n"
    )
    ignoring = one("fits: true", subject=f"{subject}, ignore_flags: [cpu-offload-gb]")
    assert check(ignoring).code == 0


def test_paths_are_beside_the_check_file(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "deploy").mkdir()
    shutil.copy(GOLDENS / "05_preempt_single.scenario.json", tmp_path / "deploy" / "t.json")
    (tmp_path / "deploy" / "c.yaml").write_text(
        f"{HEAD}checks: [{{trace: t.json, expect: {{steps: 14, preemption_events: 1}}}}]"
    )
    assert cli("check deploy/c.yaml").code == 0


def test_a_name_is_no_path_where_no_such_file_is(cli: Cli, check: Check, tmp_path: Path) -> None:
    assert check(one("requests.total: 3", subject="trace: chat, limit: 3")).code == 0


# Refusals. Each names line and column; in the texts ¦ stands where.


@pytest.mark.parametrize(
    ("text", "error", "hint"),
    [
        ("¦checks: []", "version is not 1 ({})", "write version: 1 on top"),
        ("version: ¦2", "version is not 1 ({})", "write version: 1 on top"),
        ("version: ¦true", "version is not 1 ({})", "write version: 1 on top"),
        (
            "¦version: 1\nchecks: []",
            "engine is missing: a newer kvplan must not change a verdict ({})",
            "write engine: vllm@0.33",
        ),
        ("version: 1\nengine: ¦vllm", 'engine is "vllm", without a version ({})', "write vllm@0.33"),
        (
            "version: 1\nengine: ¦vllm@0.5",
            "the rules of vLLM 0.5 are not known ({}, --engine)",
            "use a version from 0.6 to 0.33",
        ),
        (
            "version: 1\nengine: ¦sglang@0.5",
            "engine sglang has one set of rules, no version 0.5 ({}, --engine)",
            "write sglang",
        ),
        (f"{HEAD}checks: ¦[]", "there is no check ({})", "write a list under checks:"),
        (f"¦{HEAD}", "there is no check ({})", "write a list under checks:"),
        (f"{HEAD}¦chekcs: []", 'unknown key "chekcs" ({})', "did you mean checks?"),
        (f"{HEAD}checks: ¦5", "checks is no list ({})", "write its items as - lines"),
        (f"{HEAD}checks:\n  - ¦hello", "check 1 is no mapping ({})", "write it as key: value lines"),
        (f"{HEAD}checks:\n  - {{name: a, ¦name: b}}", 'duplicate key "name" ({})', "keep one of the two"),
        (
            f"{HEAD}defaults: {{¦gpux: l4}}\nchecks: [a]",
            'unknown key "gpux" ({})',
            "did you mean gpu?",
        ),
        (
            f"{HEAD}checks:\n  - {{model: llama-2-13b, ¦gpux: l4, expect: {{fits: true}}}}",
            'unknown key "gpux" ({})',
            "did you mean gpu?",
        ),
        (
            f"{HEAD}checks:\n  - ¦{{name: a, model: llama-2-13b}}",
            'check "a" expects nothing ({})',
            "write expect: {fits: true}",
        ),
        (
            f"{HEAD}checks:\n  - {{name: a, model: llama-2-13b, expect: ¦{{}}}}",
            'check "a" expects nothing ({})',
            "name a figure",
        ),
        (
            f"{HEAD}checks:\n  - ¦{{gpu: l4, expect: {{fits: true}}}}",
            "no model is named ({})",
            "write model: NAME, vllm_command: or from:",
        ),
        (
            f"{HEAD}checks:\n  - {{model: ¦a, vllm_command: vllm serve b, expect: {{fits: true}}}}",
            "model and vllm_command both name a model ({})",
            "keep one of them",
        ),
        (
            f"{HEAD}checks:\n  - ¦{{model: llama-2-13bb, gpu: l4, expect: {{fits: true}}}}",
            'unknown model "llama-2-13bb" ({}, MODEL)',
            "did you mean llama-2-13b or llama-3.2-3b or llama-3.2-1b? kvplan models lists all",
        ),
        (
            f"{HEAD}checks:\n  - {{model: llama-2-13b, seq: ¦four, expect: {{fits: true}}}}",
            'seq is "four", not a whole number ({}, --seq)',
            "write a whole number",
        ),
        (
            f"{HEAD}checks:\n  - {{trace: chat, ¦seq: 4, expect: {{preemption_events: 0}}}}",
            'unknown key "seq" ({})',
            "did you mean set or seed?",
        ),
        (one('fits: ¦[1]'), "fits is held against no single value ({})", 'write ">= 5%" or true'),
        (one('headroom: ¦">= five"'), '"five" is no number ({})', 'write ">= 5%", "<= 0.9" or "< 20GiB"'),
        (
            one('kv.total_bytes: ¦"<= 26G"'),
            '"26G" is ambiguous ({})',
            "write 26GiB (2^30 bytes each) or 26GB (10^9 bytes each)",
        ),
    ],
)  # fmt: skip
def test_a_wrong_file_is_refused_with_line_and_column(
    check: Check, tmp_path: Path, text: str, error: str, hint: str
) -> None:
    outcome = check(text.replace("¦", ""), "--junit j.xml")
    assert outcome.err == f"kvplan: error: {error.format(place(text))}\n{hint}\n"
    assert (outcome.code, outcome.out) == (2, "")
    assert set(listing(tmp_path)) == {"c.yaml"}


@pytest.mark.parametrize(
    ("figure", "near"),
    [
        ("fitz", "fits"),
        ("kv_cache_token", "kv_cache_tokens"),
        ("kv.bytes_per_tokens", "kv.bytes_per_token"),
        ("capacity.headroom", "capacity.headroom_share"),
    ],
)
def test_an_unknown_figure_is_refused_with_near_ones(check: Check, figure: str, near: str) -> None:
    outcome = check(one(f"{figure}: 1"))
    assert outcome.code == 2
    error, hint = outcome.err.splitlines()
    assert error == f'kvplan: error: this check has no figure "{figure}" ({place(one("¦"))})'
    assert hint.startswith("did you mean ")
    assert re.search(rf"(mean|or) {re.escape(near)}(\?| or)", hint)


def test_a_whole_block_is_no_figure(check: Check) -> None:
    assert 'this check has no figure "kv"' in check(one("kv: 1")).err


def test_a_figure_of_a_budget_without_one_names_what_is_missing(check: Check) -> None:
    outcome = check(one("fits: true", subject="model: llama-2-13b"))
    assert outcome.code == 2
    assert outcome.err.splitlines()[1].startswith("write gpu: ")


@pytest.mark.parametrize(
    "figure",
    [
        "ttft_p95_s",
        "e2e_mean_s",
        "throughput_requests_per_s",
        "latency.tpot_s.max",
        "duration_s",
        "goodput.share",
    ],
)
def test_figures_of_time_need_leave_while_step_times_are_estimates(check: Check, figure: str) -> None:
    subject = "trace: chat, limit: 5, slo_ttft: 1"
    outcome = check(one(f"{figure}: '>= 0'", subject=subject))
    assert outcome.code == 2
    where = place(one("¦", subject=subject))
    assert outcome.err == (
        f"kvplan: error: {figure} depends on step times, which are not calibrated ({where})\n"
        "add allow_uncalibrated: true to the check to use it all the same\n"
    )
    allowed = one(f"{figure}: '>= 0'", subject=f"{subject}, allow_uncalibrated: true")
    assert check(allowed).code == 0
    by_default = one(f"{figure}: '>= 0'", subject=subject).replace(
        "checks:", "defaults: {allow_uncalibrated: true}\nchecks:"
    )
    assert check(by_default).code == 0
    refused = one(f"{figure}: '>= 0'", subject=f"{subject}, allow_uncalibrated: false")
    assert check(refused).code == 2


def test_all_checks_are_read_before_the_first_runs(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: object, **__: object) -> None:
        pytest.fail("a check ran")

    monkeypatch.setattr("kvplan.jobs.check.PlannedCheck.run", run)
    text = one("fits: true") + "  - {model: llama-2-13b, gp: l4, expect: {fits: true}}\n"
    assert check(text).code == 2


# Answers


def test_an_engine_that_would_not_start_fails_every_expectation(check: Check) -> None:
    subject = "trace: chat, model: llama-2-13b, gpu: l4"
    outcome = check(one("preemption_events: 0, steps: '> 0'", subject=subject), "--json")
    assert outcome.code == 1
    for verdict in verdicts(outcome):
        assert (verdict["passed"], verdict["actual"]) == (False, None)
        assert "would not start" in verdict["reason"]


def test_a_run_that_gets_stuck_fails_every_expectation(check: Check) -> None:
    stuck = GOLDENS / "23_never_fits.scenario.json"
    outcome = check(one("preemption_events: 0", subject=f"trace: {stuck}"), "--json")
    assert outcome.code == 1
    (verdict,) = verdicts(outcome)
    assert "stuck" in str(verdict["reason"])


def test_a_margin_by_default_needs_no_effect_but_one_of_a_check_does(check: Check) -> None:
    """A check errs on the safe side, and a file may say otherwise for all; a pool that is given has no margin."""
    pool = "model: llama-2-13b, seq: 4096, num_gpu_blocks_override: 1000"
    run = "trace: chat, limit: 2, num_gpu_blocks_override: 1000"
    for subject in (pool, f"{pool}, gpu: a100-80gb", run):
        expect = "preemption_events: 0" if subject is run else "fits: true"
        assert check(one(expect, subject=subject)).code == 0
        in_defaults = one(expect, subject=subject).replace("checks:", "defaults: {margin: low}\nchecks:")
        assert check(in_defaults).code == 0
        outcome = check(one(expect, subject=f"{subject}, margin: low"))
        assert outcome.code == 2
        assert "--margin has no effect" in outcome.err


def test_a_seed_by_default_is_for_those_checks_that_draw(check: Check) -> None:
    run = "trace: chat, limit: 2, num_gpu_blocks_override: 1000"
    expect = "preemption_events: 0"
    assert check(one(expect, subject=run).replace("checks:", "defaults: {seed: 7}\nchecks:")).code == 0
    outcome = check(one(expect, subject=f"{run}, seed: 7"))
    assert outcome.code == 2
    assert "--seed has no effect" in outcome.err


def test_goals_and_skipping_by_default_are_for_those_checks_that_have_seconds_and_lines(check: Check) -> None:
    scenario = f"trace: {GOLDENS / '01_no_pressure.scenario.json'}"
    defaults = "defaults: {slo_ttft: 2, skip_bad_lines: true}\nchecks:"
    expect = "preemption_events: 0"
    assert check(one(expect, subject=scenario).replace("checks:", defaults)).code == 0
    for asked in ("slo_ttft: 2", "skip_bad_lines: true"):
        assert check(one(expect, subject=f"{scenario}, {asked}")).code == 2


TWO = (
    f"{HEAD}checks:\n"
    "  - name: holds\n    model: llama-2-13b\n    gpu: a100-80gb\n    expect:\n      fits: true\n"
    "  - name: does not hold\n    model: llama-2-13b\n    gpu: a100-80gb\n    seq: 4096\n    expect:\n"
    "      fits: true\n      headroom: '>= 99%'\n      concurrent_sequences: '>= 100'\n"
)


def test_the_table_has_a_row_for_each_expectation(check: Check) -> None:
    outcome = check(TWO)
    assert outcome.code == 1
    rows = [line.split() for line in outcome.out.splitlines() if line.rstrip().endswith((" pass", "FAIL"))]
    assert [row[-1] for row in rows] == ["pass", "pass", "FAIL", "FAIL", "pass"]
    assert rows[-1] == ["1", "of", "2", "checks", "pass"]


def test_json_has_every_verdict_with_its_place(check: Check) -> None:
    outcome = check(TWO, "--json")
    document = outcome.document
    assert (document["file"], document["passed"], document["failed"]) == ("c.yaml", 1, 1)
    assert [(c["name"], c["line"], c["passed"]) for c in document["checks"]] == [
        ("holds", 4, True),
        ("does not hold", 9, False),
    ]
    failed = document["checks"][1]["verdicts"][2]
    assert failed == {
        "figure": "concurrent_sequences",
        "expected": ">= 100",
        "actual": 14,
        "passed": False,
        "line": 16,
        "column": 7,
        "reason": None,
        "deployment": None,
    }
    assert check(TWO, "--output-format json").out == outcome.out


def test_annotations_point_at_the_lines_that_fail(check: Check) -> None:
    outcome = check(TWO, "--output-format github")
    assert outcome.code == 1
    first, second, summary = outcome.out.splitlines()
    assert first.startswith("::error file=c.yaml,line=15,col=7,title=does not hold::headroom is 0.9")
    assert second == (
        "::error file=c.yaml,line=16,col=7,title=does not hold::concurrent_sequences is 14, expected >= 100"
    )
    assert summary == "::notice::1 of 2 capacity checks pass"


def test_junit_has_a_case_a_check_and_a_failure_with_all_that_fails(check: Check, tmp_path: Path) -> None:
    assert check(TWO, "--junit j.xml").code == 1
    root = ET.parse(tmp_path / "j.xml").getroot()
    assert root.tag == "testsuites"
    (suite,) = root
    assert {name: suite.get(name) for name in ("tests", "failures", "errors", "skipped")} == {
        "tests": "2",
        "failures": "1",
        "errors": "0",
        "skipped": "0",
    }
    holds, fails = suite
    assert (holds.get("name"), list(holds)) == ("holds", [])
    (failure,) = fails
    assert failure.tag == "failure"
    assert "headroom is" in (failure.get("message") or "")
    assert (failure.text or "").splitlines()[1].startswith("c.yaml:16:7: concurrent_sequences is 14")
    assert set(listing(tmp_path)) == {"c.yaml", "j.xml"}


def test_junit_is_written_when_all_is_well_too(check: Check, tmp_path: Path) -> None:
    assert check(one("fits: true"), "--junit j.xml --json").code == 0
    (suite,) = ET.parse(tmp_path / "j.xml").getroot()
    assert suite.get("failures") == "0"
    assert "failure" not in (tmp_path / "j.xml").read_text().replace('failures="0"', "")


def test_a_check_without_a_name_is_called_by_its_number(check: Check) -> None:
    assert check(one("fits: true"), "--json").document["checks"][0]["name"] == "check 1"


def test_the_example_of_the_contract_runs(check: Check, tmp_path: Path) -> None:
    outcome = check(
        """\
version: 1
engine: vllm@0.33            # required: a kvplan upgrade must not change a verdict
defaults: {gpu: h100-80gb, gpu_memory_utilization: 0.9}
checks:
  - name: chat-13b fits 32 users at 4k
    model: llama-2-13b
    tensor_parallel_size: 2
    seq: 4096
    concurrency: 32
    expect: {fits: true, headroom: ">= 5%"}
  - name: tonight's trace does not preempt
    model: llama-3.1-8b
    trace: chat
    limit: 100
    expect: {preemption_events: "== 0", kv_utilization_p95: "<= 0.9", prefix_hit_rate: ">= 30%"}
"""
    )
    assert outcome.code == 0, outcome.out


def test_results_from_python_are_those_of_the_command(check: Check, tmp_path: Path) -> None:
    import kvplan

    document = check(TWO, "--json").document
    report = kvplan.check("c.yaml")
    assert not report.all_passed
    expected = {"schema_version": 1, "kvplan_version": kvplan.__version__, **report.to_dict()}
    assert document == json.loads(json.dumps(expected))


def test_a_calibration_decides_the_memory_of_a_check(cli: Cli, tmp_path: Path) -> None:
    """What the engine measured is found beside the check file, and used with no end of a range."""
    assert cli(f"audit {LOGS / 'vllm-0.19.0.log'} --save-calibration kept.yaml").code == 0
    settings = (
        "gpu_memory: 85029649940, gpu_memory_utilization: 0.85, max_num_seqs: 256, max_model_len: 32768"
    )
    check = "{name: a, model: llama-3.1-8b, calibration: kept.yaml, expect: {num_blocks: 1}}"
    (tmp_path / "c.yaml").write_text(
        f"version: 1\nengine: vllm@0.19\ndefaults: {{{settings}}}\nchecks:\n  - "
        + check.replace("num_blocks: 1", "capacity.overhead_source: measured, kv_cache_tokens: '>= 416000'")
        + "\n"
    )
    outcome = cli("check c.yaml --json")
    assert outcome.code == 0
    assert outcome.document["checks"][0]["warnings"] == []
    assert outcome.err == ""


def test_a_calibration_that_does_not_hold_is_warned_of(cli: Cli, tmp_path: Path) -> None:
    assert cli(f"audit {LOGS / 'vllm-0.19.0.log'} --save-calibration kept.yaml").code == 0
    (tmp_path / "c.yaml").write_text(
        "version: 1\nengine: vllm@0.33\ndefaults: {calibration: kept.yaml, gpu: h100-80gb}\nchecks:\n"
        "  - {name: a, model: llama-3.1-8b, expect: {capacity.overhead_source: estimated}}\n"
    )
    outcome = cli("check c.yaml --json")
    assert outcome.code == 0
    (warning,) = outcome.document["checks"][0]["warnings"]
    assert "not used: version 0.19 there, 0.33 here" in warning
    assert 'kvplan: warning: check "a": calibration of ' in outcome.err


MEMORY = 'kvplan_calibration: 1\nengine: "vllm"\nmodel: "llama-3.1-8b"\nsource: "a.log:1"\ngpu: "h100-80gb"\n'
STEPS = """step_times:
  source: "steps.csv"
  form: "table of step times"
  constants:
    weights_bandwidth_share: 0.8
  fitted: []
  num_steps: 9
"""


def test_a_calibration_of_step_times_lets_a_check_judge_times(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "kept.yaml").write_text(MEMORY + STEPS)
    (tmp_path / "c.yaml").write_text(
        "version: 1\nengine: vllm@0.33\nchecks:\n"
        "  - {name: a, trace: chat, limit: 5, calibration: kept.yaml, expect: {ttft_p95_s: '<= 1'}}\n"
    )
    assert cli("check c.yaml").code == 0


def test_a_calibration_of_memory_is_none_of_step_times(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "kept.yaml").write_text(MEMORY)
    (tmp_path / "c.yaml").write_text(
        "version: 1\nengine: vllm@0.33\nchecks:\n"
        "  - {name: a, trace: chat, limit: 5, calibration: kept.yaml, expect: {ttft_p95_s: '<= 1'}}\n"
    )
    outcome = cli("check c.yaml")
    assert outcome.code == 2
    assert outcome.err.endswith(
        "add allow_uncalibrated: true to the check to use it all the same (its calibration holds memory, no step "
        "times)\n"
    )
    assert cli("check c.yaml --json").document["error"]["where"] == "c.yaml:4:71"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("gpu: l40s, max_model_len: 4096", "GPU h100-80gb there, l40s here"),
        ("step_time: 0.01", "--step-time is given"),
    ],
)
def test_a_calibration_that_is_not_used_is_no_ground_for_times(
    cli: Cli, tmp_path: Path, options: str, reason: str
) -> None:
    (tmp_path / "kept.yaml").write_text(MEMORY + STEPS)
    check = (
        f"name: a, trace: chat, limit: 5, calibration: kept.yaml, {options}, expect: {{ttft_p95_s: '<= 1'}}"
    )
    head = "version: 1\nengine: vllm@0.33\nchecks:\n"
    (tmp_path / "c.yaml").write_text(f"{head}  - {{{check}}}\n")
    outcome = cli("check c.yaml")
    assert outcome.code == 2
    assert (
        f"which are not calibrated here: calibration of a.log:1: its step times are not used: {reason}"
        in (outcome.err.replace("steps.csv", "a.log:1"))
    )
    (tmp_path / "c.yaml").write_text(f"{head}  - {{{check}, allow_uncalibrated: true}}\n")
    assert cli("check c.yaml").code == 0
