"""Engines side by side: columns, documents, exit codes, and what each engine's own defaults make of a model."""

from __future__ import annotations

import re

import pytest
from command_line import Cli

ENGINES = ("vllm@0.33", "vllm@0.24", "paged", "sglang", "tensorrt-llm", "llama.cpp")
SIZE = "size llama-2-13b --seq 4096 --kv-cache-memory-bytes 4GiB"


def test_several_engines_are_columns_of_one_table(cli: Cli) -> None:
    lines = cli(f"{SIZE} --engine vllm@0.33,sglang,llama.cpp").out.splitlines()
    (head,) = [line.split() for line in lines if line.split()[:1] == ["vllm@0.33"] and "fits" not in line]
    assert head == ["vllm@0.33", "sglang", "llama.cpp"]
    (sizes,) = [line.split() for line in lines if line.strip().startswith("tokens in a block")]
    assert sizes[-3:] == ["16", "1", "256"]


def test_models_and_engines_are_named_where_both_differ(cli: Cli) -> None:
    found = cli(f"{SIZE} llama-3.2-1b --max-model-len 4096 --engine paged,llama.cpp")
    for model in ("llama-2-13b", "llama-3.2-1b"):
        for engine in ("paged", "llama.cpp"):
            assert f" {model} {engine} " in found.out


def test_json_has_a_result_for_each_engine_in_the_order_given(cli: Cli) -> None:
    found = cli(f"{SIZE} --json --engine", ",".join(ENGINES))
    results = found.document["results"]
    assert [result["config"]["engine"]["value"] for result in results] == list(ENGINES)
    # The whole model's bytes of a token are every engine's: 40 layers x 40 heads x 256 x 2.
    assert {result["kv"]["bytes_per_token"] for result in results} == {819_200}
    assert [result["kv"]["block_size"] for result in results] == [16, 16, 16, 1, 32, 256]
    # 4 GiB / 819,200 = 5,242.88 tokens: whole blocks, TensorRT-LLM's rounded up.
    tokens = [result["capacity"]["kv_cache_tokens"] for result in results]
    assert tokens == [5232, 5232, 5232, 5242, 5248, 5120]


def test_one_engine_is_one_document_and_named_once_where_named_twice(cli: Cli) -> None:
    assert "results" not in cli(f"{SIZE} --json --engine sglang").document
    assert "results" not in cli(f"{SIZE} --json --engine sglang,sglang").document


def test_the_answer_is_no_if_it_does_not_fit_by_the_rules_of_one(cli: Cli) -> None:
    # 2.503 GiB are 3,281 tokens. 205 blocks of 16 less the null block hold 3,264, 103 of 32 rounded up 3,296.
    command = "size llama-2-13b --max-model-len 3281 --kv-cache-memory-bytes 2688000000 --engine"
    assert cli(command, "sglang").code == 0
    assert cli(command, "tensorrt-llm").code == 0
    assert cli(command, "vllm").code == 1
    assert cli(command, "sglang,vllm,tensorrt-llm").code == 1


def test_several_gpus_are_ranked_for_each_engine(cli: Cli) -> None:
    found = cli("size llama-2-13b --gpu l4,a100-80gb --engine vllm,sglang")
    assert found.code == 0
    assert [line.split(";")[0] for line in found.out.splitlines() if "engine" in line] == [
        "engine vllm@0.33",
        "engine sglang",
    ]


@pytest.mark.parametrize("engine", ["sglang", "tensorrt-llm", "llama.cpp"])
def test_a_yes_on_a_guessed_overhead_is_uncertain_and_on_given_memory_exact(cli: Cli, engine: str) -> None:
    guessed = cli(f"size llama-2-13b --gpu a100-80gb --json --engine {engine}").document["capacity"]
    assert (guessed["fits"], guessed["fits_confidence"]) == (True, "uncertain")
    given = cli(f"{SIZE} --json --engine {engine}").document["capacity"]
    assert (given["fits"], given["fits_confidence"], given["overhead_bytes"]) == (True, "exact", None)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_last_line_of_an_explanation_is_the_verdict(cli: Cli, engine: str) -> None:
    found = cli(f"{SIZE} --explain --json --engine {engine}").document
    assert found["explanation"][0] == f"by the rules of {engine.replace('@', ' ')}"
    assert found["explanation"][-1] == f"fits: yes: {found['capacity']['reason']}"
    (blocks,) = [line for line in found["explanation"] if line.startswith("blocks = ")]
    assert f" = {found['capacity']['num_gpu_blocks']:,}" in blocks


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_splits_a_model_among_gpus(cli: Cli, engine: str) -> None:
    found = cli(f"size llama-2-13b --gpu 2xa100-80gb --json --engine {engine}").document
    spread = "pipeline_parallel_size" if engine == "llama.cpp" else "tensor_parallel_size"
    assert found["config"][spread] == {"value": 2, "source": "--gpu"}
    # llama.cpp counts the output as a layer: 21 layers here, 19 and the output there.
    per_gpu = 21 * 20_480 if engine == "llama.cpp" else 409_600
    assert found["kv"]["per_gpu"]["bytes_per_token"] == per_gpu
    assert found["gpu"]["count"] == 2


def test_quantized_caches_of_llama_cpp(cli: Cli) -> None:
    document = cli(f"{SIZE} --json --engine llama.cpp --kv-cache-dtype q8_0/q4_0").document
    # 40 layers x 5,120 elements: 160 blocks of 34 bytes for a key and of 18 for a value.
    assert document["kv"]["bytes_per_token"] == 40 * 160 * (34 + 18)
    assert document["kv"]["dtype"] == "q8_0/q4_0"


def test_defaults_are_said_to_be_the_engines(cli: Cli) -> None:
    config = cli("size llama-2-13b --gpu a100-80gb --json --engine sglang").document["config"]
    assert config["block_size"] == {"value": 1, "source": "default of sglang"}
    assert config["max_num_batched_tokens"]["source"] == "default of sglang on a100-80gb"
    assert re.fullmatch(r"0\.8[23][0-9]?", str(config["gpu_memory_utilization"]["value"]))


@pytest.mark.parametrize("gpu", ["mi210", "mi300x", "gaudi-2 --gpu-memory 90GiB"])
def test_gpus_without_a_compute_capability_in_numbers_are_sized_by_every_engine(cli: Cli, gpu: str) -> None:
    for engine in ENGINES:
        found = cli(f"size llama-3.1-8b --seq 4096 --max-model-len 4096 --gpu {gpu} --engine {engine} --json")
        assert found.code == 0
        assert found.document["capacity"]["concurrent_sequences"] > 1


def test_other_vendors_gpus_may_be_suggested_for_sglang(cli: Cli) -> None:
    found = cli("size opt-66b --seq 16 --gpu rtx-a5000 --engine sglang --json")
    assert found.code == 1
    assert found.document["capacity"]["suggestions"]


@pytest.mark.parametrize("model", ["gemma-4-26b-a4b", "nemotron-3-nano-30b", "nemotron-3-super-120b"])
def test_experts_of_families_that_list_their_own_weights_are_shared_out(cli: Cli, model: str) -> None:
    whole = cli(f"size {model} --seq 4096 --json").document["weights"]
    found = cli(f"size {model} --seq 4096 -tp 2 --enable-expert-parallel --json")
    assert found.code == 0
    assert (
        whole["per_gpu_bytes"] * 0.5
        < found.document["weights"]["per_gpu_bytes"]
        < whole["per_gpu_bytes"] * 0.6
    )


def test_experts_are_not_denied_where_the_weights_are_not_listed(cli: Cli) -> None:
    assert cli("size deepseek-v4-pro --seq 4096 -tp 2 --enable-expert-parallel").code == 0
    refused = cli("size llama-3.1-8b --seq 4096 -tp 2 --enable-expert-parallel")
    assert refused.code == 2
    assert "has no experts" in refused.err


@pytest.mark.parametrize("form", ["int4_per_token_head", "nvfp4", "nvfp4_ds_mla"])
def test_compressed_latents_refuse_forms_that_they_do_not_have(cli: Cli, form: str) -> None:
    refused = cli(f"size deepseek-v4-flash --seq 4096 --kv-cache-dtype {form}")
    assert refused.code == 2
    assert f"has no KV cache of the form {form} (--kv-cache-dtype)" in refused.err


def test_fp8_of_compressed_latents_is_their_own_form(cli: Cli) -> None:
    # vLLM 0.33 models/deepseek_v4/attention.py: whatever starts with fp8 is fp8_ds_mla.
    found = [
        cli(f"size deepseek-v4-flash --seq 4096 --json --kv-cache-dtype {form}").document["kv"]
        for form in ("auto", "fp8", "fp8_e5m2")
    ]
    assert found[0] == found[1] == found[2]
    assert found[0]["dtype"] == "fp8_ds_mla"


def test_nothing_is_left_to_others_where_the_weights_take_more_than_there_is(cli: Cli) -> None:
    found = cli("size command-r --gpu p100-16gb -pp 2 --engine tensorrt-llm --json").document
    assert found["capacity"]["unused_bytes"] == 0
