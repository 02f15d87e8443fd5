"""The JSON documents: their keys, kinds of numbers, sameness from run to run and with the tables."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from command_line import GOLDENS, Cli, Outcome

import kvplan
from kvplan.units import format_bytes

SIZE = "size llama-2-13b --seq 4096 --concurrency 10 --gpu a100-80gb"
SCENARIO = f"simulate {GOLDENS / '05_preempt_single.scenario.json'} --step-time 0.02"
SIMULATE = "simulate chat --limit 60"
DOCUMENTS = [
    "size llama-2-13b --seq 4096",
    SIZE,
    "size llama-3.1-70b --gpu 4xh100-80gb",
    "size llama-2-13b llama-3.1-8b",
    "size llama-3.1-8b --gpu l4,h100-80gb",
    SCENARIO,
    SIMULATE,
    f"{SIMULATE} --slo-ttft 0.05 --slo-tpot 0.02",
    "simulate chat --limit 60 --num-gpu-blocks-override 2000",
    "simulate chat --limit 5 --num-gpu-blocks-override 2000 --request-rate 4 --burstiness inf",
    "simulate chat --limit 5 --num-gpu-blocks-override 2000 --step-time 1e9",
    "models",
    "models llama-2-13b",
    "gpus",
    "gpus h100-80gb",
]


def keys(text: str) -> dict[str, Any]:
    """These keys, with nothing nested in them."""
    return dict.fromkeys(text.split())


#: Keys that the contract names: a dictionary where they are nested, else None.
SIZE_KEYS: dict[str, Any] = {
    "model": keys(
        "name family num_layers hidden_size num_heads num_kv_heads head_dim max_position_embeddings "
        "parameters attention"
    ),
    "kv": keys(
        "dtype block_size bytes_per_token fixed_bytes_per_sequence bytes_per_block bytes_per_sequence "
        "allocated_bytes_per_sequence total_bytes groups cluster_bytes_per_token"
    )
    | {
        "per_gpu": keys(
            "bytes_per_token fixed_bytes_per_sequence bytes_per_block bytes_per_sequence "
            "allocated_bytes_per_sequence total_bytes"
        )
    },
    "weights": dict.fromkeys(["parameters", "total_bytes", "per_gpu_bytes", "dtype", "source"]),
}
CAPACITY_KEYS: dict[str, Any] = {
    "gpu": dict.fromkeys(["name", "count", "memory_bytes", "memory_source"]),
    "capacity": keys(
        "fits fits_confidence reason max_model_len available_kv_bytes num_gpu_blocks usable_blocks "
        "kv_cache_tokens max_concurrency concurrent_sequences max_model_len_that_fits headroom_bytes "
        "headroom_share ranks limiting_rank exact estimated"
    )
    | {"overhead_bytes": dict.fromkeys(["activations", "cuda_graphs", "runtime", "low", "high"])},
}
DISTRIBUTION = dict.fromkeys(["count", "mean", "p50", "p90", "p95", "p99", "max"])
SIMULATE_KEYS: dict[str, Any] = {
    "config": None,
    "simulation": dict.fromkeys(["engine", "scheduler_version", "async_scheduling", "verified"]),
    "trace": keys("path format requests input_tokens output_tokens duration_s skipped_lines"),
    "requests": dict.fromkeys(["total", "finished", "rejected", "unfinished", "reject_reasons"]),
    "steps": None,
    "scheduled_tokens": None,
    "duration_s": None,
    "throughput": dict.fromkeys(["requests_per_s", "input_tokens_per_s", "output_tokens_per_s"]),
    "kv": keys(
        "num_gpu_blocks block_size token_share internal_fragmentation reserved_share "
        "external_fragmentation peak_blocks"
    )
    | {"utilization": dict.fromkeys(["mean", "p50", "p95", "max"])},
    "batch": dict.fromkeys(["running_mean", "running_max", "waiting_mean", "waiting_max"]),
    "prefix_cache": keys(
        "enabled queried_tokens hit_tokens hit_rate resumed_hit_tokens evicted_blocks "
        "peak_shared_blocks copied_blocks"
    ),
    "preemptions": keys("events requests recomputed_tokens swapped_out_blocks swapped_in_blocks"),
    "latency": {
        "percentile_method": None,
        "ttft_s": DISTRIBUTION,
        "tpot_s": DISTRIBUTION,
        "itl_s": DISTRIBUTION,
        "e2e_s": DISTRIBUTION,
        "queue_s": DISTRIBUTION,
        "model": dict.fromkeys(["name", "calibration", "measured_error"]),
    },
    "goodput": None,
}
SHARES = re.compile(r".*(_share|_rate|_fragmentation)\Z")


def missing(expected: dict[str, Any], found: object, place: str = "") -> list[str]:
    if not isinstance(found, dict):
        return [f"{place} is no object"]
    absent = [f"{place}{key}" for key in expected if key not in found]
    for key, inner in expected.items():
        if inner is not None and key in found:
            absent += missing(inner, found[key], f"{place}{key}.")
    return absent


def leaves(value: object, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], object]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, (*path, key))
    elif isinstance(value, list):
        for inner in value:
            yield from leaves(inner, path)
    else:
        yield path, value


@pytest.fixture(scope="module")
def seen() -> dict[str, Outcome]:
    """Outcomes of the documents, each made once."""
    return {}


@pytest.fixture(params=DOCUMENTS)
def outcome(request: pytest.FixtureRequest, cli: Cli, seen: dict[str, Outcome]) -> Outcome:
    command = f"{request.param} --json"
    if command not in seen:
        seen[command] = cli(command)
        assert cli(command) == seen[command], "a second run gives other bytes"
    return seen[command]


def test_stdout_is_one_document_with_its_versions_on_top_the_same_in_every_run(outcome: Outcome) -> None:
    assert outcome.code == 0
    assert list(outcome.document)[:2] == ["schema_version", "kvplan_version"]
    assert outcome.document["schema_version"] == 1
    assert outcome.document["kvplan_version"] == kvplan.__version__
    assert outcome.out.endswith("}\n")


def test_bytes_are_whole_and_seconds_are_not(outcome: Outcome) -> None:
    for path, value in leaves(outcome.document):
        if value is None or path[0] == "config":
            continue
        name = path[-1]
        if name.endswith("_bytes") or name.startswith("bytes_per_") or "overhead_bytes" in path:
            assert type(value) is int, path
        if path[0] == "latency" and name in ("mean", "p50", "p90", "p95", "p99", "max"):
            assert type(value) is float, path
        if name == "duration_s" or path[0] == "throughput":
            assert type(value) is float, path
        if name in ("count", "requests", "parameters", "layers", "steps", "scheduled_tokens") or (
            name.endswith(("_tokens", "_blocks", "_layers"))
        ):
            assert type(value) is int, path
        if SHARES.match(name) and name != "headroom_share":
            assert isinstance(value, int | float), path
            assert 0 <= value <= 1, path


def test_keys_are_snake_case(outcome: Outcome) -> None:
    names = {key for path, _ in leaves(outcome.document) for key in path}
    assert not [name for name in names if not re.fullmatch(r"[a-z][a-z0-9_]*", name)]


def test_size_without_a_budget_has_the_keys_of_the_contract(cli: Cli) -> None:
    document = cli("size llama-2-13b --seq 4096 --json").document
    assert missing(SIZE_KEYS, document) == []
    assert "gpu" not in document
    assert "capacity" not in document


def test_size_with_a_budget_has_the_keys_of_the_contract(cli: Cli) -> None:
    document = cli(f"{SIZE} --json").document
    assert missing(SIZE_KEYS | CAPACITY_KEYS, document) == []
    (group,) = document["kv"]["groups"]
    assert (
        missing(
            keys("kind layers padded_layers block_size page_bytes blocks_per_sequence"),
            group,
        )
        == []
    )
    (rank,) = document["capacity"]["ranks"]
    assert missing(keys("stage layers weights_bytes bytes_per_block num_blocks"), rank) == []


def test_the_limiting_rank_has_groups_like_the_whole_model(cli: Cli) -> None:
    kv = cli("size llama-3.1-70b --gpu 4xh100-80gb --json").document["kv"]
    (group,) = kv["per_gpu"]["groups"]
    assert group.keys() == kv["groups"][0].keys()
    assert 4 * group["page_bytes"] == kv["groups"][0]["page_bytes"]


def test_capacity_has_suggestions_an_empty_list_if_there_is_none(cli: Cli) -> None:
    assert cli(f"{SIZE} --json").document["capacity"]["suggestions"] == []


def test_size_gives_the_figures_of_the_founding_example(cli: Cli) -> None:
    kv = cli(f"{SIZE} --json").document["kv"]
    assert kv["bytes_per_token"] == 2 * 40 * 40 * 128 * 2
    assert kv["bytes_per_block"] == 16 * kv["bytes_per_token"]
    assert kv["bytes_per_sequence"] == 4096 * kv["bytes_per_token"]
    assert kv["total_bytes"] == 10 * kv["bytes_per_sequence"]


def test_overhead_lies_between_its_ends(cli: Cli) -> None:
    overhead = cli(f"{SIZE} --json").document["capacity"]["overhead_bytes"]
    parts = overhead["activations"] + overhead["cuda_graphs"] + overhead["runtime"]
    assert 0 < overhead["low"] <= parts <= overhead["high"]


def test_explain_adds_the_formulas(cli: Cli) -> None:
    plain, explained = cli(f"{SIZE} --json").document, cli(f"{SIZE} --json --explain").document
    assert any("819,200" in line for line in explained.pop("explanation"))
    assert explained == plain


@pytest.mark.parametrize("command", [SCENARIO, SIMULATE])
def test_simulate_has_the_keys_of_the_contract(cli: Cli, command: str) -> None:
    document = cli(f"{command} --json").document
    assert missing(SIMULATE_KEYS, document) == []
    assert "profile" not in document
    assert document["goodput"] is None


def test_goodput_names_its_goals(cli: Cli) -> None:
    goodput = cli(f"{SIMULATE} --slo-ttft 0.05 --json").document["goodput"]
    assert missing(dict.fromkeys(["requests_per_s", "share", "slo"]), goodput) == []
    assert 0 < goodput["share"] <= 1


def test_only_profile_adds_what_this_machine_took(cli: Cli) -> None:
    plain, profiled = cli(f"{SIMULATE} --json").document, cli(f"{SIMULATE} --json --profile").document
    profile = profiled.pop("profile")
    assert set(profile) == {"wall_s", "cpu_s", "requests_per_s", "peak_rss_bytes"}
    assert profile["wall_s"] > 0
    assert profiled == plain


def test_every_setting_says_where_it_came_from(cli: Cli) -> None:
    for command in (SIZE, SIMULATE, SCENARIO):
        config = cli(f"{command} --json").document["config"]
        assert config
        for name, setting in config.items():
            assert set(setting) == {"value", "source"}, name
            assert setting["source"], name
    config = cli(f"{SIZE} --block-size 32 --json").document["config"]
    assert config["block_size"] == {"value": 32, "source": "--block-size"}
    assert config["seq"] == {"value": 4096, "source": "--seq"}
    assert "default" in config["gpu_memory_utilization"]["source"]


def test_a_scenario_says_that_its_settings_are_its_own(cli: Cli) -> None:
    config = cli(f"{SCENARIO} --json").document["config"]
    assert config["max_num_seqs"]["value"] == 4
    assert "trace" in config["max_num_seqs"]["source"]
    config = cli(f"{SCENARIO} --max-num-seqs 2 --json").document["config"]
    assert config["max_num_seqs"] == {"value": 2, "source": "--max-num-seqs"}


def test_the_machine_of_a_run_is_said_to_be_assumed(cli: Cli) -> None:
    config = cli(f"{SIMULATE} --json").document["config"]
    assert config["model"] == {"value": "llama-3.1-8b", "source": "default"}
    assert config["gpu"] == {"value": "h100-80gb", "source": "default"}


def test_several_models_give_a_list_of_results(cli: Cli) -> None:
    both = cli("size llama-2-13b llama-3.1-8b --seq 4096 --json").document
    assert set(both) == {"schema_version", "kvplan_version", "results"}
    for result, name in zip(both["results"], ("llama-2-13b", "llama-3.1-8b"), strict=True):
        alone = cli(f"size {name} --seq 4096 --json").document
        assert {k: v for k, v in alone.items() if k not in ("schema_version", "kvplan_version")} == result


def test_several_gpus_give_a_list_of_results_with_the_number_needed_the_fewest_first(cli: Cli) -> None:
    results = cli("size llama-3.1-8b --gpu l4,h200,h100-80gb,1xt4 --json").document["results"]
    assert [(r["gpu"]["count"], r["gpu"]["name"]) for r in results] == [
        (1, "h100-80gb"),
        (1, "h200"),
        (2, "l4"),
        (1, "t4"),
    ]
    assert [r["capacity"]["fits"] for r in results] == [True, True, True, False]


def test_the_size_table_shows_the_figures_of_the_document(cli: Cli) -> None:
    table, document = " ".join(cli(SIZE).out.split()), cli(f"{SIZE} --json").document
    capacity = document["capacity"]
    for number in (
        document["kv"]["bytes_per_token"],
        document["kv"]["bytes_per_block"],
        document["kv"]["bytes_per_sequence"],
        document["kv"]["total_bytes"],
        document["weights"]["parameters"],
        document["weights"]["total_bytes"],
        capacity["num_gpu_blocks"],
        capacity["usable_blocks"],
        capacity["kv_cache_tokens"],
        capacity["concurrent_sequences"],
        capacity["max_model_len_that_fits"],
    ):
        assert f"{number:,}" in table
    for size in ("available_kv_bytes", "headroom_bytes"):
        assert format_bytes(capacity[size]) in table
    assert f"{100 * capacity['headroom_share']:.1f} %" in table
    assert f"{capacity['max_concurrency']:.2f}x" in table
    assert capacity["reason"] in table


@pytest.mark.parametrize(
    "command", [SIMULATE, SCENARIO, "simulate bursts --num-gpu-blocks-override 2000 --limit 300"]
)
def test_the_simulate_table_shows_the_figures_of_the_document(cli: Cli, command: str) -> None:
    table, document = " ".join(cli(command).out.split()), cli(f"{command} --json").document
    kv, cache, preemptions = document["kv"], document["prefix_cache"], document["preemptions"]
    for number in (
        document["requests"]["finished"],
        document["steps"],
        document["scheduled_tokens"],
        kv["num_gpu_blocks"],
        kv["peak_blocks"],
        document["batch"]["running_max"],
        document["batch"]["waiting_max"],
        cache["queried_tokens"],
        cache["evicted_blocks"],
        preemptions["events"],
        preemptions["requests"],
        preemptions["recomputed_tokens"],
        document["latency"]["itl_s"]["count"],
    ):
        assert f"{number:,}" in table
    for share in (*kv["utilization"].values(), kv["token_share"], kv["reserved_share"], cache["hit_rate"]):
        assert f"{100 * share:.1f} %" in table


def test_a_run_of_one_of_several_replicas_says_so(cli: Cli) -> None:
    document = cli(f"{SIMULATE} --data-parallel-size 2 --json").document
    assert document["warnings"] == ["of 2 replicas one is simulated, with all of the requests"]


def test_warnings_stay_off_stdout(cli: Cli) -> None:
    outcome = cli("size llama-2-13b --seq 5000 --json")
    assert outcome.code == 0
    assert "beyond" in outcome.err
    assert outcome.document["warnings"] == [outcome.err.removeprefix("kvplan: warning: ").removesuffix("\n")]


def test_step_numbered_arrivals_have_no_seconds(cli: Cli) -> None:
    document = cli(f"simulate {GOLDENS / '05_preempt_single.scenario.json'} --json").document
    assert document["duration_s"] is None
    assert document["trace"]["duration_s"] is None
    assert set(document["throughput"].values()) == {None}
    assert document["latency"]["ttft_s"]["p50"] is None


def test_documents_of_the_catalogues_have_all_entries(cli: Cli) -> None:
    models, gpus = cli("models --json").document["models"], cli("gpus --json").document["gpus"]
    assert [m["name"] for m in models] == [m.name for m in kvplan.list_models()]
    assert [g["name"] for g in gpus] == [g.name for g in kvplan.list_gpus()]
    for name in ("llama-2-13b", "mistral-7b-v0.1"):
        (listed,) = (m for m in models if m["name"] == name)
        alone = cli(f"models {name} --json").document["model"]
        assert {key: alone[key] for key in listed} == listed


def test_non_ascii_text_survives_json(cli: Cli) -> None:
    outcome = cli("size --json", "modèle")
    assert "modèle" in json.loads(outcome.out)["error"]["message"]
