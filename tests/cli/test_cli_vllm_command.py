"""`--vllm-command`: a command line of vLLM read, not run."""

from __future__ import annotations

from typing import Any

import pytest
from command_line import Cli

from kvplan.errors import InputError
from kvplan.options import SimulateOptions, SizeOptions
from kvplan.vllm_command import VllmCommand, read_command


def values(flags: str) -> dict[str, object]:
    command = read_command(f"vllm serve llama-2-13b {flags}")
    assert command.model == "llama-2-13b"
    return dict(command.values)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", {}),
        ("--tensor-parallel-size 2", {"tensor_parallel_size": 2}),
        ("--tensor-parallel-size=2", {"tensor_parallel_size": 2}),
        ("--tensor_parallel_size 2", {"tensor_parallel_size": 2}),
        ("-tp 2", {"tensor_parallel_size": 2}),
        ("-tp=2", {"tensor_parallel_size": 2}),
        ("--dtype bfloat16 --kv-cache-dtype fp8", {"dtype": "bfloat16", "kv_cache_dtype": "fp8"}),
        ("--block-size 32", {"block_size": 32}),
        ("--gpu-memory-utilization 0.85", {"gpu_memory_utilization": 0.85}),
        ("--gpu-memory-utilization .85", {"gpu_memory_utilization": 0.85}),
        ("--max-model-len 4096", {"max_model_len": 4096}),
        ("--max-model-len 32k", {"max_model_len": 32_000}),
        ("--max-model-len 32K", {"max_model_len": 32_768}),
        ("--max-model-len 1m", {"max_model_len": 1_000_000}),
        ("--max-model-len 1M", {"max_model_len": 1 << 20}),
        ("--max-model-len 2.5k", {"max_model_len": 2500}),
        ("--max-model-len auto", {"max_model_len": "auto"}),
        ("--max-model-len -1", {"max_model_len": "auto"}),
        ("--max-model-len=-1", {"max_model_len": "auto"}),
        ("--max-num-seqs 64 --max-num-batched-tokens 8k", {"max_num_seqs": 64, "max_num_batched_tokens": 8000}),
        ("--num-gpu-blocks-override 4000", {"num_gpu_blocks_override": 4000}),
        ("--kv-cache-memory-bytes 4G", {"kv_cache_memory_bytes": 4 << 30}),
        ("--kv-cache-memory-bytes 4g", {"kv_cache_memory_bytes": 4 * 10**9}),
        ("--enforce-eager", {"enforce_eager": True}),
        ("--no-enforce-eager", {"enforce_eager": False}),
        ("--enable-prefix-caching", {"enable_prefix_caching": True}),
        ("--no-enable-prefix-caching", {"enable_prefix_caching": False}),
        ("--no-enable-chunked-prefill", {"enable_chunked_prefill": False}),
        ("--scheduling-policy priority", {"scheduling_policy": "priority"}),
        ("--long-prefill-token-threshold 512", {"long_prefill_token_threshold": 512}),
        ("--block-size 16 --block-size 32", {"block_size": 32}),
    ],
)  # fmt: skip
def test_a_flag_becomes_an_option(flags: str, expected: dict[str, object]) -> None:
    assert values(flags) == expected


@pytest.mark.parametrize(
    "text",
    [
        "vllm serve llama-2-13b -tp 2",
        "  vllm   serve  llama-2-13b\t-tp  2 ",
        "vllm serve -tp 2 llama-2-13b",
        "vllm serve --model llama-2-13b -tp 2",
        "vllm serve 'llama-2-13b' -tp \"2\"",
        "vllm serve llama-2-13b \\\n  -tp 2",
        "vllm serve \\\n  llama-2-13b \\\n  --tensor-parallel-size=2 \\\n",
        "vllm serve llama-2-13b -tp 2  # two cards",
        "CUDA_VISIBLE_DEVICES=0,1 VLLM_USE_V1=1 vllm serve llama-2-13b -tp 2",
        "A='b c' vllm serve llama-2-13b -tp 2",
        "python -m vllm.entrypoints.openai.api_server --model llama-2-13b -tp 2",
        "python3 -m vllm.entrypoints.openai.api_server --model=llama-2-13b --tensor-parallel-size 2",
    ],
)
def test_a_command_can_be_written_in_many_ways(text: str) -> None:
    command = read_command(text)
    assert (command.model, dict(command.values), command.ignored) == (
        "llama-2-13b",
        {"tensor_parallel_size": 2},
        (),
    )


def test_harmless_flags_are_listed_as_ignored() -> None:
    command = read_command(
        "vllm serve llama-2-13b --host 0.0.0.0 --port=8000 --trust-remote-code --served-model-name chat "
        "--disable-log-requests --seed 0 --tool-call-parser hermes --enable-auto-tool-choice"
    )
    assert dict(command.values) == {}
    assert command.ignored == (
        "--host",
        "--port",
        "--trust-remote-code",
        "--served-model-name",
        "--disable-log-requests",
        "--seed",
        "--tool-call-parser",
        "--enable-auto-tool-choice",
    )


def test_a_degree_of_parallelism_of_one_does_nothing() -> None:
    command = read_command("vllm serve llama-2-13b -pp 1 --data-parallel-size=1")
    assert dict(command.values) == {}
    assert command.ignored == ("-pp 1", "--data-parallel-size 1")


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        ("--cpu-offload-gb 4", "--cpu-offload-gb is not handled and may change memory"),
        ("--speculative-config '{\"num_speculative_tokens\": 3}'", "--speculative-config is not handled"),
        ("--enable-lora --max-loras 4", "--enable-lora is not handled and may change memory"),
        ("--enable-lora", "--enable-lora is not handled and may change memory"),
        ("--quantization awq", "--quantization is not handled and may change memory"),
        ("-pp 2", "-pp is not handled and may change memory"),
        ("--data-parallel-size 2", "--data-parallel-size is not handled and may change memory"),
        ("--no-trust-me", "--no-trust-me is not handled and may change memory"),
    ],
)
def test_a_flag_that_may_change_memory_is_refused(flags: str, what: str) -> None:
    with pytest.raises(InputError) as caught:
        values(flags)
    assert caught.value.what.startswith(what)
    assert "--ignore-flag " in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("flags", "ignored"),
    [
        ("--cpu-offload-gb 4 --block-size 32", "cpu-offload-gb"),
        ("--cpu-offload-gb=4 --block-size 32", "--cpu-offload-gb"),
        ("--cpu_offload_gb 4 --block-size 32", "cpu-offload-gb"),
        ("--enable-lora --block-size 32", "enable-lora"),
        ("--block-size 32 --enable-lora", "enable_lora"),
        ("--tensor-parallel-size 4 --block-size 32", "tensor-parallel-size"),
        ("-tp 4 --block-size 32", "tensor-parallel-size"),
        ("--enforce-eager --block-size 32", "enforce-eager"),
        ("-pp 2 --block-size 32", "pipeline-parallel-size"),
    ],
)
def test_a_flag_can_be_ignored_on_purpose(flags: str, ignored: str) -> None:
    command = read_command(f"vllm serve llama-2-13b {flags}", ignored_flags=[ignored])
    assert command.model == "llama-2-13b"
    assert dict(command.values) == {"block_size": 32}
    assert len(command.ignored) == 1


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "no vllm command"),
        ("vllm bench latency --model llama-2-13b", "no vllm command"),
        ("python train.py", "no vllm command"),
        ("vllm serve a b", '"b" is a second model'),
        ("vllm serve a --model b", "second model"),
        ("vllm serve --model a b", "second model"),
        ("vllm serve a --enforce-eager=false", "--enforce-eager"),
        ("vllm serve a --no-enable-prefix-caching=1", "--no-enable-prefix-caching"),
        ("vllm serve a --block-size 16.5", "16.5"),
        ("vllm serve a --block-size ''", "--block-size"),
        ("vllm serve a --block-size=", "--block-size"),
        ("vllm serve a --gpu-memory-utilization most", "most"),
        ("vllm serve a --max-model-len", "--max-model-len has no value"),
        ("vllm serve a --max-model-len 2.0001k", "2.0001k"),
    ],
)
def test_a_command_that_vllm_would_not_take_is_refused(text: str, what: str) -> None:
    with pytest.raises(InputError) as caught:
        read_command(text)
    assert what in str(caught.value)


def test_nothing_of_a_command_is_executed(tmp_path: Any) -> None:
    made = tmp_path / "made"
    for text in (f"vllm serve $(touch {made})", f"vllm serve `touch {made}`", f"vllm serve a; touch {made}"):
        with pytest.raises(InputError):
            read_command(text)
    assert not made.exists()


def test_given_options_win_over_those_of_the_command() -> None:
    command = read_command("vllm serve llama-2-13b --block-size 32 --max-num-seqs 64")
    options = SizeOptions(block_size=8)
    origins = command.fill(options)
    assert (options.block_size, options.max_num_seqs) == (8, 64)
    assert origins == {"max_num_seqs": "vllm command"}


def test_flags_of_the_other_job_are_passed_over() -> None:
    command = VllmCommand("m", {"scheduling_policy": "priority"}, ())
    assert command.fill(SizeOptions()) == {}
    options = SimulateOptions()
    assert command.fill(options) == {"scheduling_policy": "vllm command"}
    assert options.scheduling_policy == "priority"


def test_size_takes_model_and_flags_from_a_command(cli: Cli) -> None:
    command = "vllm serve meta-llama/Llama-2-13b-hf -tp 2 --max-model-len 2K --port 8000 --trust-remote-code"
    outcome = cli("size --gpu a100-80gb --json --vllm-command", command)
    assert outcome.code == 0
    document = outcome.document
    assert document["model"]["name"] == "llama-2-13b"
    assert document["gpu"]["count"] == 2
    assert document["config"]["tensor_parallel_size"] == {"value": 2, "source": "vllm command"}
    assert document["config"]["max_model_len"] == {"value": 2048, "source": "vllm command"}
    assert outcome.err == (
        "kvplan: warning: ignored in --vllm-command: --port\n"
        "kvplan: warning: ignored in --vllm-command: --trust-remote-code\n"
    )


def test_flags_of_kvplan_win_over_the_command(cli: Cli) -> None:
    document = cli(
        "size --block-size 32 --json --vllm-command", "vllm serve llama-2-13b --block-size 64"
    ).document
    assert document["config"]["block_size"] == {"value": 32, "source": "--block-size"}


def test_seq_does_not_set_the_length_of_the_command(cli: Cli) -> None:
    command = "vllm serve llama-2-13b --max-model-len 2048"
    document = cli("size --seq 1024 --gpu a100-80gb --json --vllm-command", command).document
    assert document["capacity"]["max_model_len"] == 2048
    assert document["config"]["seq"]["value"] == 1024
