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
        ("--device-memory-utilization 0.8", {"gpu_memory_utilization": 0.8}),
        ("-pp 2 -dp=4 -dcp 2 -ep", {"pipeline_parallel_size": 2, "data_parallel_size": 4,
                                    "decode_context_parallel_size": 2, "enable_expert_parallel": True}),
        ("-q awq", {"quantization": "awq"}),
        ("--mamba-cache-dtype float32 --mamba-ssm-cache-dtype float32",
         {"mamba_cache_dtype": "float32", "mamba_ssm_cache_dtype": "float32"}),
        ("--disable-hybrid-kv-cache-manager", {"disable_hybrid_kv_cache_manager": True}),
        ("--no-disable-hybrid-kv-cache-manager", {"disable_hybrid_kv_cache_manager": False}),
        ("--enable-hybrid-kv-cache-manager", {"disable_hybrid_kv_cache_manager": False}),
        ("--disable-prefix-caching", {"enable_prefix_caching": False}),
        ("--no-async-scheduling", {"async_scheduling": False}),
        ("--enable-lora --max-loras 4 --max-lora-rank 64",
         {"enable_lora": True, "max_loras": 4, "max_lora_rank": 64}),
        ("""--speculative-config '{"method": "mtp", "num_speculative_tokens": 2, "prompt_lookup_max": 4}'""",
         {"speculative_method": "mtp", "num_speculative_tokens": 2}),
        ("""-sc='{"model": "a/b", "num_speculative_tokens": 3}'""",
         {"speculative_model": "a/b", "num_speculative_tokens": 3}),
        ("--speculative-config.method ngram --speculative_config.num_speculative_tokens=4",
         {"speculative_method": "ngram", "num_speculative_tokens": 4}),
        ("--spec-method eagle3 --spec-model a/b --spec-tokens 3",
         {"speculative_method": "eagle3", "speculative_model": "a/b", "num_speculative_tokens": 3}),
        ("""--compilation-config '{"cudagraph_mode": "NONE", "custom_ops": ["none"]}'""", {"enforce_eager": True}),
        ("-cc.cudagraph_mode=none", {"enforce_eager": True}),
        ("-O0", {"enforce_eager": True}),
        ("-O3", {}),
        ("-O 2", {}),
        ("--optimization-level=0", {"enforce_eager": True}),
        ("-O '{\"level\": 3}'", {}),
        ("--rope-scaling '{\"rope_type\": \"yarn\"}'", {"set": ('rope_scaling={"rope_type": "yarn"}',)}),
        ("--hf-overrides.sliding_window 1k --hf-overrides.text_config '{\"num_hidden_layers\": 4}'",
         {"set": ("sliding_window=1000", "num_hidden_layers=4")}),
        ("--max-model-len AUTO", {"max_model_len": "auto"}),
        ("--quantization None", {"quantization": None}),
        ("-- --block-size 8", {"block_size": 8}),
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
        "python vllm/entrypoints/openai/api_server.py --model llama-2-13b -tp 2",
        "exec vllm serve llama-2-13b -tp 2",
        "sudo -E env A=b /opt/bin/vllm serve llama-2-13b -tp 2",
        "nohup numactl --membind 0 timeout -k 5 1h vllm serve llama-2-13b -tp 2 > log 2>&1 &",
        "uv run --with vllm vllm serve llama-2-13b -tp 2",
        "uvx --from vllm vllm serve llama-2-13b -tp 2",
        "srun --gres gpu:2 bash -lc 'vllm serve llama-2-13b -tp 2'",
        "bash -euo pipefail -c 'cd /srv && exec vllm serve llama-2-13b -tp 2 | tee log'",
        "docker run --rm -it --gpus all -p8000:8000 -v a:b -e HF_TOKEN --ipc=host vllm/vllm-openai:v0.33.0 "
        "--model llama-2-13b -tp 2",
        "docker run registry:5000/team/vllm@sha256:0 --model=llama-2-13b -tp 2",
        "podman run --entrypoint vllm quay.io/x/server serve llama-2-13b -tp 2",
        "docker run --entrypoint='' my/image bash -c 'vllm serve llama-2-13b -tp 2'",
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


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        ("--cpu-offload-gb 4", "--cpu-offload-gb is not handled and may change memory"),
        ("--kv-transfer-config '{}'", "--kv-transfer-config is not handled"),
        ("--limit-mm-per-prompt.image 2", "--limit-mm-per-prompt is not handled"),
        ("--enable-eplb", "--enable-eplb is not handled and may change memory"),
        ("--no-swa-bounded-replay", "--no-swa-bounded-replay is not handled and may change memory"),
        ("-pcp 2", "-pcp is not handled and may change memory"),
        ("--attention-backend FLASHINFER", "--attention-backend is not handled and may change memory"),
        ("--speculative-config.quantization fp8", "--speculative-config.quantization is not handled"),
        ("-cc.pass_config '{}'", "--compilation-config.pass_config is not handled and may change memory"),
        (
            "-cc.cudagraph_mode PIECEWISE",
            "--compilation-config.cudagraph_mode is not handled and may change memory",
        ),
        ("-O1", "--optimization-level 1 is not handled and may change memory"),
        ("--hf-overrides.architectures '[]'", "--hf-overrides.architectures is not handled"),
        ("--tensor-parallel 2", "--tensor-parallel is not handled and may change memory"),
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
        ("-cc.pass_config '{}' --block-size 32", "compilation-config"),
        ("--limit-mm-per-prompt.image 2 --block-size 32", "limit-mm-per-prompt"),
        ("--made-up 3 --block-size 32", "made-up"),
        ("--logits-processors a b --block-size 32", "logits-processors"),
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


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("VLLM_PP_LAYER_PARTITION=1,2 vllm serve a", "VLLM_PP_LAYER_PARTITION"),
        ("VLLM_USE_V1=0 vllm serve a", "VLLM_USE_V1"),
        ("env VLLM_ATTENTION_BACKEND=FLASHINFER vllm serve a", "VLLM_ATTENTION_BACKEND"),
        ("export VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0; vllm serve a",
         "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS"),
        ("docker run -e VLLM_MLA_DISABLE=1 vllm/vllm-openai --model a", "VLLM_MLA_DISABLE"),
    ],
)  # fmt: skip
def test_a_variable_that_changes_memory_is_refused_unless_ignored(text: str, named: str) -> None:
    with pytest.raises(InputError) as caught:
        read_command(text)
    assert caught.value.what == f"the variable {named} is not handled and may change memory"
    assert caught.value.hint == f"pass --ignore-flag {named} if it does not matter here"
    assert read_command(text, ignored_flags=[named]).ignored == (named,)


@pytest.mark.parametrize(
    ("flags", "ignored"),
    [
        ("--cpu-offload-gb 0.0", "--cpu-offload-gb 0.0"),
        ("--attention-backend flash_attn", None),
        ("--attention-backend FLASH_ATTN", "--attention-backend FLASH_ATTN"),
        ("-pcp 1", "-pcp 1"),
        ("--no-enable-dbo", "--no-enable-dbo"),
        ("--disable-dbo", "--disable-dbo"),
        ("--hf-token", "--hf-token"),
        ("--hf-token x", "--hf-token"),
        ("--served-model-name a b c", "--served-model-name"),
        ("--override-generation-config.temperature 0.5", "--override-generation-config"),
    ],
)
def test_a_flag_that_changes_nothing_by_its_value_is_listed(flags: str, ignored: str | None) -> None:
    if ignored is None:
        with pytest.raises(InputError):
            values(flags)
        return
    assert read_command(f"vllm serve llama-2-13b {flags}").ignored == (ignored,)


def test_a_value_that_cannot_be_told_is_an_error_unless_it_is_given() -> None:
    command = read_command("vllm serve llama-2-13b --block-size $SIZE --port $PORT")
    with pytest.raises(InputError) as caught:
        command.fill(SizeOptions())
    assert caught.value.what == "$SIZE is not set in the script, or not to one value"
    assert caught.value.hint == "give --block-size to kvplan"
    assert command.fill(SizeOptions(block_size=8)) == {}


def test_flags_of_scheduling_matter_to_a_simulation_only() -> None:
    command = read_command("vllm serve llama-2-13b --max-num-partial-prefills 2 --watermark 0")
    assert command.ignored == ("--max-num-partial-prefills", "--watermark")
    assert command.fill(SizeOptions()) == {}
    with pytest.raises(
        InputError, match="--max-num-partial-prefills is not handled and changes a simulation"
    ):
        command.fill(SimulateOptions())


def test_changes_of_the_command_come_before_the_users_own() -> None:
    command = read_command("""vllm serve llama-2-13b --hf-overrides '{"num_hidden_layers": 8}'""")
    options = SizeOptions(set=("num_hidden_layers=4",))
    command.fill(options)
    assert options.set == ("num_hidden_layers=8", "num_hidden_layers=4")


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
