"""Start-up logs of each engine, in old and new wordings; the figures in tests/logs are made to fit each other."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from kvplan.errors import InputError
from kvplan.startup_log import StartupLog, read_log, read_log_file

LOGS = Path(__file__).resolve().parents[1] / "logs"
GIB, MIB = 1 << 30, 1 << 20


def read(name: str) -> StartupLog:
    return read_log_file(str(LOGS / f"{name}.log"))


def values(log: StartupLog, name: str) -> list[tuple[float, str | None]]:
    """Value and worker of each figure of a name."""
    return [(figure.value, figure.worker) for figure in log.all(name)]


def gib(text: str) -> int:
    """Bytes of a number of GiB with two decimals, rounded to the nearest."""
    return round(int(text.replace(".", "")) * GIB / 100)


def settings(log: StartupLog) -> dict[str, object]:
    return {name: found.value for name, found in log.settings.items()}


def test_vllm_0_19() -> None:
    log = read("vllm-0.19.0")
    assert (log.engine, log.version, log.model) == ("vllm", "0.19.0", "meta-llama/Llama-3.1-8B-Instruct")
    assert settings(log) == {
        "async_scheduling": True,
        "data_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "dtype": "bfloat16",
        "enable_prefix_caching": True,
        "enforce_eager": False,
        "gpu_memory_utilization": 0.85,
        "kv_cache_dtype": "auto",
        "max_model_len": 32768,
        "max_num_batched_tokens": 8192,
        "max_num_seqs": 256,
        "pipeline_parallel_size": 1,
        "tensor_parallel_size": 1,
    }
    assert log.settings["max_num_batched_tokens"].line == 6
    assert log.own_settings["architecture"].value == "LlamaForCausalLM"
    for name, value in {
        "weights": gib("14.99"),
        "activations": gib("1.21"),
        "non_torch": gib("0.19"),
        "cuda_graphs_estimate": gib("0.58"),
        "cuda_graphs": gib("0.55"),
        "gpu_total": gib("79.19"),
        "gpu_free": gib("78.67"),
        "requested": gib("67.31"),
        "kv_memory": gib("50.92"),
        "kv_cache_tokens": 417_136,
        "max_concurrency": 12.73,
        "num_gpu_blocks": 26_071,
    }.items():
        figures = log.all(name)
        assert [figure.value for figure in figures] == [value], name
        assert figures[0].worker == ("APIServer" if name == "num_gpu_blocks" else "EngineCore")
    assert log.notes == []
    assert log.refusal is None


def test_vllm_0_33_prints_tokens_and_concurrency_in_one_line() -> None:
    log = read("vllm-0.33.0-tp2")
    assert values(log, "kv_memory") == [(gib("58.01"), "Worker_TP0"), (gib("57.50"), "Worker_TP1")]
    least = log.least("kv_memory")
    assert least is not None
    assert (least.worker, least.low, least.high) == ("Worker_TP1", 61_734_786_171, 61_745_523_589)
    assert values(log, "kv_cache_tokens") == [(753_664, "EngineCore")]
    assert values(log, "max_concurrency") == [(46.0, "EngineCore")]
    assert values(log, "consumed") == [(gib("67.28"), "Worker_TP0")]
    assert log.settings["kv_cache_dtype"].value == "fp8"
    assert log.settings["gpu_memory_utilization"].value == 0.92
    assert log.own_settings["served_model_name"].value == "llama-3.1-70b"


def test_vllm_v0_of_0_8() -> None:
    log = read("vllm-0.8.5-v0")
    other = "VllmWorkerProcess pid=477"
    assert (log.version, log.own_settings["engine_generation"].value) == ("0.8.5", "V0")
    assert values(log, "kv_memory") == [(gib("22.05"), other), (gib("22.00"), None)]
    assert values(log, "num_gpu_blocks") == [(3604, None)]
    assert values(log, "num_cpu_blocks") == [(655, None)]
    assert values(log, "gpu_total") == [(gib("39.39"), other), (gib("39.39"), None)]
    loaded = log.all("weights")[0]
    assert loaded.text == "Model loading took 12.1312 GiB and 9.118230 seconds"
    assert (loaded.low, loaded.high) == (13_025_723_129, 13_025_830_502)  # four decimals
    assert log.settings["dtype"].value == "float16"
    assert log.settings["tensor_parallel_size"].value == 2


def test_a_refusal_of_vllm_under_ray() -> None:
    log = read("vllm-0.11-ray-refused")
    assert log.refusal is not None
    assert log.refusal.line == 11
    assert str(log.refusal.value).startswith("To serve at least one request")
    assert log.is_complete
    assert values(log, "kv_needed") == [(gib("2.81"), "EngineCore_DP0")]
    assert values(log, "estimated_max_len") == [(33_632, "EngineCore_DP0")]
    assert [worker for _, worker in values(log, "weights")] == [
        "RayWorkerWrapper pid=512",
        "RayWorkerWrapper pid=88, ip=10.0.0.9",
    ]


@pytest.mark.parametrize(
    ("lines", "figures"),
    [
        # 0.2 to 0.5
        (["# GPU blocks: 7191, # CPU blocks: 512"], {"num_gpu_blocks": 7191, "num_cpu_blocks": 512}),
        (["Loading model weights took 12.5523 GB"], {"weights": round(125523 * GIB / 10**4)}),
        # 0.6.4 to 0.6.6
        (
            ["Memory profiling results: total_gpu_memory=23.69GiB initial_memory_usage=15.27GiB peak_torch_memory="
             "16.23GiB memory_usage_post_profile=15.49GiB non_torch_memory=0.31GiB kv_cache_size=4.78GiB "
             "gpu_memory_utilization=0.90"],
            {"gpu_total": gib("23.69"), "non_torch": gib("0.31"), "kv_memory": gib("4.78")},
        ),
        # 0.7, V1
        (["# GPU blocks: 1381", "Maximum concurrency for 2048 tokens per request: 10.79x"],
         {"num_gpu_blocks": 1381, "max_concurrency": 10.79}),
        # 0.11
        (["Available KV cache memory: 112.61 GiB", "GPU KV cache size: 922,496 tokens"],
         {"kv_memory": gib("112.61"), "kv_cache_tokens": 922_496}),
        (["Available KV cache memory: -0.45 GiB"], {"kv_memory": -gib("0.45")}),
        # states
        (["Setting attention block size to 784 tokens to ensure that attention page size is >= mamba page size.",
          "Padding mamba page size by 0.13% to ensure that mamba page size and attention page size are exactly equal.",
          "Add 3 padding layers, may waste at most 6.25% KV cache memory"],
         {"attention_block_size": 784, "mamba_padding": 0.13, "padding_layers": 3}),
        (["Initial free memory 78.1 GiB, reserved 20.0 GiB memory for KV Cache as specified by kv_cache_memory_bytes "
          "config and skipped memory profiling."], {"gpu_free": gib("78.10"), "kv_memory": 20 * GIB}),
        (["Overriding num_gpu_blocks=100 with num_gpu_blocks_override=50"], {"profiled_gpu_blocks": 100}),
        (["ValueError: Free memory on device cuda:0 (59.32/79.15 GiB) on startup is less than desired GPU memory "
          "utilization (0.9, 71.24 GiB). Decrease GPU memory utilization"],
         {"gpu_free": gib("59.32"), "gpu_total": gib("79.15"), "requested": gib("71.24")}),
        (["ValueError: The model's max seq len (8192) is larger than the maximum number of tokens that can be stored "
          "in KV cache (2400). Try increasing"], {"kv_cache_tokens": 2400}),
    ],
    ids=range(11),
)  # fmt: skip
def test_wordings_of_vllm(lines: list[str], figures: dict[str, float]) -> None:
    log = read_log(
        [
            f"INFO 09-03 16:28:08 [worker.py:1] {line}\n"
            for line in ["Graph capturing finished in 2 secs, took 0.50 GiB", *lines]
        ],
        "log",
    )
    found = {figure.name: figure.value for figure in log.figures if figure.name != "cuda_graphs"}
    assert found == figures


def test_sglang() -> None:
    log = read("sglang-tp2")
    assert (log.engine, log.model) == ("sglang", "meta-llama/Llama-3.1-70B-Instruct")
    assert settings(log) == {
        "block_size": 1,
        "data_parallel_size": 1,
        "dtype": "bfloat16",
        "enforce_eager": False,
        "gpu_memory_utilization": 0.87,
        "kv_cache_dtype": "auto",
        "max_model_len": 131072,
        "max_num_batched_tokens": 8192,
        "max_num_seqs": 4096,
        "pipeline_parallel_size": 1,
        "tensor_parallel_size": 4,
    }
    assert log.settings["gpu_memory_utilization"].value == 0.87
    assert values(log, "weights") == [(gib("32.87"), "TP0"), (gib("32.87"), "TP1")]
    assert values(log, "kv_k") == [(gib("17.24"), "TP0"), (gib("17.24"), "TP1")]
    # The line of TP0 follows a progress bar, and TP1 prints the two the other way round.
    assert values(log, "cuda_graphs") == [(gib("1.72"), "TP0"), (gib("1.72"), "TP1")]
    assert values(log, "free_after_graphs") == [(gib("7.10"), "TP0"), (gib("7.48"), "TP1")]
    assert values(log, "free_at_end") == [(gib("7.10"), "TP0")]


def test_sglang_0_5_23_allocates_after_its_graphs() -> None:
    log = read("sglang-0.5.23-mla")
    assert values(log, "kv_memory") == [(gib("35.79"), None)]  # and not the upper bound of addresses
    assert values(log, "kv_cache_tokens") == [(1_235_648, None)]
    assert log.settings["block_size"].value == 64


def test_sglang_states() -> None:
    line = (
        "[2026-01-01 00:00:00 TP1] Mamba Cache is allocated. max_mamba_cache_size: 97, conv_state size: 0.10GB, "
        "ssm_state size: 5.17GB intermediate_ssm_state_cache size: 1.00GB "
        "intermediate_conv_window_cache size: 0.02GB"
    )
    log = read_log([line], "log")
    assert [(f.name, f.value) for f in log.figures] == [
        ("state_conv", gib("0.10")),
        ("state_ssm", gib("5.17")),
        ("state_slots", 97),
        ("state_ssm_drafts", gib("1.00")),
        ("state_conv_drafts", gib("0.02")),
    ]


def test_tensorrt_llm_of_pytorch() -> None:
    log = read("tensorrt-llm-1.2")
    assert (log.version, log.model) == ("1.2.0", "meta-llama/Llama-3.1-8B-Instruct")
    assert log.notes == []  # the second version line is a worker's
    last = log.last("kv_memory")
    assert last is not None
    assert (last.value, last.line) == (gib("53.36"), 18)  # the first allocation is for profiling
    assert [value for value, _ in values(log, "kv_cache_tokens")] == [16_448, 437_152]
    assert values(log, "kv_bytes_per_token") == [(131_072, "RANK 0")]
    assert values(log, "weights") == [(gib("14.99"), "RANK 0")]
    assert settings(log) == {
        "block_size": 32,
        "gpu_memory_utilization": 0.8999999761581421,
        "max_model_len": 32768,
        "max_num_batched_tokens": 8192,
        "max_num_seqs": 2048,
    }


def test_tensorrt_llm_of_engines() -> None:
    log = read("tensorrt-llm-0.13")
    assert values(log, "num_gpu_blocks") == [(631, None)]
    assert values(log, "free_before_kv") == [(gib("21.89"), None)]
    weights = log.last("weights")
    assert weights is not None
    assert (weights.low, weights.high) == (14755 * MIB, 14756 * MIB - 1)  # whole MiB, rounded down
    old = read_log(
        ["[TensorRT-LLM][INFO] Allocate 69524783104 bytes for k/v cache. \n",
         "[TensorRT-LLM][INFO] Using 132608 tokens in paged KV cache.\n"],
        "log",
    )  # fmt: skip
    assert [(f.name, f.value, f.low, f.high) for f in old.figures] == [
        ("kv_memory", 69524783104, 69524783104, 69524783104),
        ("kv_cache_tokens", 132608, 132608, 132608),
    ]


def test_llama_server() -> None:
    log = read("llama-server")
    assert (log.engine, log.version, log.model) == ("llama.cpp", "6730", "Meta Llama 3.1 8B Instruct")
    assert settings(log) == {"max_model_len": 8192, "max_num_batched_tokens": 512, "max_num_seqs": 4}
    assert {
        name: log.shape[name].value
        for name in ("n_layer", "n_head_kv", "n_embd_k_gqa", "n_swa", "n_ctx_train")
    } == {
        "n_layer": 32,
        "n_head_kv": 8,
        "n_embd_k_gqa": 1024,
        "n_swa": 0,
        "n_ctx_train": 131072,
    }
    assert values(log, "kv_memory") == [(4096 * MIB, None)]
    assert values(log, "kv_cells") == [(8192, None)]
    assert values(log, "kv_streams") == [(4, None)]
    assert values(log, "kv_buffer") == [(4096 * MIB, "CUDA0")]
    assert [worker for _, worker in values(log, "compute_buffer")] == ["CUDA0", "CUDA_Host"]
    assert values(log, "context_total") == [(4096 * MIB, "CUDA0")]
    assert log.own_settings["type_k"].value == "f16"
    assert log.notes == []


def test_llama_cpp_with_windows_and_older_ones() -> None:
    windows = read("llama-swa")
    assert values(windows, "kv_memory") == [(320 * MIB, "non-SWA"), (174 * MIB, "SWA")]
    assert windows.version == "b8123-0a1b2c3d4"
    python = read("llama-cpp-python-0.3.9")
    assert values(python, "kv_memory") == [(224 * MIB, None)]
    assert values(python, "kv_cells") == [(4096, None)]
    assert python.shape["n_head_kv"].value == 4  # printed as [4, 4, 4, 4]
    first = read("llama-2023")
    assert values(first, "kv_memory") == [(2048 * MIB, None)]
    assert (first.version, first.shape["n_ctx"].value) == ("1407", 4096)


def test_llama_cpp_with_states() -> None:
    log = read_log(
        ["llama_memory_recurrent:        CPU RS buffer size =    77.06 MiB\n",
         "llama_memory_recurrent: size =   77.06 MiB (     4 cells,  24 layers,  4 seqs), R (f32):    5.06 MiB, "
         "S (f32):   72.00 MiB\n"],
        "log",
    )  # fmt: skip
    assert [(f.name, f.worker) for f in log.figures] == [
        ("state_buffer", "CPU"),
        ("state_memory", None),
        ("state_cells", None),
        ("state_layers", None),
    ]


def test_ollama() -> None:
    log = read("ollama")
    assert log.own_settings["ollama_version"].value == "0.6.7"
    estimate = log.last("kv_estimate")
    assert estimate is not None
    assert (estimate.value, estimate.low, estimate.high) == (GIB, 1_020_054_733, 1_127_428_915)  # one decimal
    assert values(log, "kv_memory") == [(1024 * MIB, None)]


def test_a_draft_model_is_left_out() -> None:
    lines = (LOGS / "llama-server.log").read_text().splitlines(keepends=True)
    draft = ["srv    load_model: loading draft model '/models/small.gguf'\n", *lines[5:40]]
    log = read_log([*lines[:40], *(line.replace("4096.00", "512.00") for line in draft)], "log")
    assert values(log, "kv_memory") == [(4096 * MIB, None)]
    assert log.notes == []


def started(name: str) -> list[str]:
    return (LOGS / f"{name}.log").read_text().splitlines(keepends=True)


def test_of_several_starts_the_last_complete_one_is_read() -> None:
    first, second = started("vllm-0.8.5-v0"), started("vllm-0.19.0")
    log = read_log([*first, *second], "log")
    assert (log.version, log.line) == ("0.19.0", len(first) + 2)
    assert log.notes == [f"2 starts in the log: the last is read, from line {len(first) + 2} on"]
    cut = read_log([*first, *second[:12]], "log")
    assert (cut.version, cut.line) == ("0.8.5", 1)
    assert cut.notes == ["2 starts in the log: the last that came to its KV cache is read, from line 1 on"]
    assert read_log([*first, *first], "log").line == len(first) + 1
    assert read_log([*started("sglang-tp2"), *second], "log").engine == "vllm"


def test_engines_of_data_parallel_ranks_are_one_start() -> None:
    lines = []
    for rank in (0, 1):
        lines += [
            line.replace("EngineCore pid=271", f"EngineCore_DP{rank} pid={271 + rank}")
            for line in started("vllm-0.19.0")[7:19]
        ]
    log = read_log(lines, "log")
    assert log.notes == []
    assert [worker for _, worker in values(log, "kv_memory")] == ["EngineCore_DP0", "EngineCore_DP1"]


def test_a_log_that_ends_early_says_so() -> None:
    log = read_log(started("vllm-0.19.0")[:10], "log")
    assert not log.is_complete
    assert log.notes == ["the log ends before the engine says how large its KV cache is"]


@pytest.mark.parametrize(
    "prefix",
    [
        "",
        "vllm-1  | ",
        "[pod/llm-7d9f/server] ",
        "2025-10-14T08:00:01.123456789Z stderr F ",
        "Oct 14 08:00:01 host vllm[4711]: ",
        "\x1b[1;36m(EngineCore_DP0 pid=140)\x1b[0;0m \x1b[32mINFO\x1b[0m 10-14 08:00:31 [core.py:77] ",
        "│ INFO 03-21 20:15:44 [worker.py:267] ",
        "\r  0%|          | 0/5 [00:00<?, ?it/s]\rINFO ",
    ],
)
def test_prefixes_do_not_matter(prefix: str) -> None:
    log = read_log([f"{prefix}Available KV cache memory: 4.5 GiB \n"], "log")
    assert [(f.name, f.value) for f in log.figures] == [("kv_memory", round(4.5 * GIB))]


def test_lines_of_json_are_read() -> None:
    text = "(Worker_TP1 pid=5) INFO 10-02 11:04:21 [gpu_worker.py:772] Available KV cache memory: 57.5 GiB\n"
    for name in ("log", "message", "MESSAGE"):
        log = read_log([json.dumps({"stream": "stderr", name: text}) + "\n"], "log")
        assert values(log, "kv_memory") == [(gib("57.50"), "Worker_TP1")]


def test_what_a_prompt_or_source_code_quotes_is_no_figure() -> None:
    for line in (
        "INFO Received request x: prompt: 'Available KV cache memory: 1.00 GiB', params: SamplingParams(n=1)",
        '    raise ValueError("No available memory for the cache blocks. "',
        "x" * 700 + " Available KV cache memory: 1.00 GiB",
    ):
        log = read_log(["Available KV cache memory: 2.00 GiB\n", line + "\n"], "log")
        assert values(log, "kv_memory") == [(2 * GIB, None)]
        assert log.refusal is None


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "the log is empty (a.log)"),
        (["Call me Ishmael.\n"], "no engine is recognised in this log (a.log)"),
        (["vLLM API server version 0.19.0\n"], "the log of vllm holds no memory figure (a.log:1)"),
    ],
)
def test_what_is_no_startup_log_is_refused(lines: Iterable[str], message: str) -> None:
    with pytest.raises(InputError) as caught:
        read_log(lines, "a.log")
    assert str(caught.value) == message
    assert caught.value.hint


def test_a_setting_of_a_wrong_kind_is_passed_over_with_a_note() -> None:
    log = read_log(["non-default args: {'model': 'm', 'max_num_seqs': 'many', 'max_model_len': -1}\n",
                    "Initializing a V1 LLM engine (v0.11.0) with config: model='m', max_num_seqs='many'\n",
                    "Available KV cache memory: 2.00 GiB\n"], "log")  # fmt: skip
    assert settings(log) == {}
    assert log.notes == [
        f'line {line}: max_num_seqs is "many", which is no value for it: passed over' for line in (1, 2)
    ]


def test_files_of_other_encodings_and_missing_ones(tmp_path: Path) -> None:
    path = tmp_path / "utf16.log"
    path.write_text("Available KV cache memory: 2.00 GiB\r\n", encoding="utf-16")
    assert read_log_file(str(path)).figures[0].value == 2 * GIB
    path.write_bytes(b"\xff\x00\xfe\nAvailable KV cache memory: 2.00 GiB\n")
    assert read_log_file(str(path)).figures[0].line == 2
    with pytest.raises(InputError, match="cannot read the log: No such file"):
        read_log_file(str(tmp_path / "none.log"))


def test_hostile_lines_cost_little() -> None:
    long = [
        "Load weight end." * 16_000,
        "(" * 250_000 + "Available KV cache memory: 1 GiB",
        "x" * 5_000_000,
        "{" * 250_000 + "Available KV cache memory: }",
        "\x1b[" * 100_000,
        " " * 250_000 + " KV buffer size =",
        "1,111," * 40_000 + " tokens in paged KV cache",
        "server_args=" * 20_000,
        "model=a tokenizer=" + "(" * 200_000,
        "Available KV cache memory: " + "9" * 200_000 + " GiB",
    ]
    begin = time.process_time()
    with pytest.raises(InputError):
        read_log((line + "\n" for line in long), "log")
    assert time.process_time() - begin < 3


def test_traffic_after_the_start_is_passed_over_quickly() -> None:
    line = "INFO 04-10 09:13:10 [loggers.py:257] Engine 000: Running: 12 reqs, GPU KV cache usage: 12.2%\n"

    def lines() -> Iterable[str]:
        yield from started("vllm-0.19.0")
        for _ in range(100_000):
            yield line

    begin = time.process_time()
    assert read_log(lines(), "log").version == "0.19.0"
    assert time.process_time() - begin < 3


def test_figures_of_one_start_are_bounded() -> None:
    lines = (f"(RayWorkerWrapper pid={i}) Available KV cache memory: 2.00 GiB\n" for i in range(25_000))
    log = read_log(lines, "log")
    assert len(log.figures) == 20_000
    assert log.notes == ["20,000 figures are read; those after line 20000 are left out"]


def test_parts_of_a_log_may_stand_in_another_order() -> None:
    log = read_log(
        ["(Worker_TP0 pid=13) INFO 07-06 12:23:48 [gpu_worker.py:508] Available KV cache memory: 5.23 GiB",
         "(EngineCore pid=12) INFO 07-06 12:23:48 [kv_cache_utils.py:2146] GPU KV cache size: 289,661 tokens",
         "**Engine config:**",
         "(APIServer pid=1) INFO 07-06 12:22:15 [api_utils.py:273] vLLM API server version 0.26.0",
         "(APIServer pid=1) INFO 07-06 12:22:15 [api_utils.py:273] non-default args: {'model': 'Qwen/Qwen3.6-27B', "
         "'max_model_len': 262144, 'tensor_parallel_size': 2}"],
        "log",
    )  # fmt: skip
    assert (log.version, log.model) == ("0.26.0", "Qwen/Qwen3.6-27B")
    assert settings(log) == {"max_model_len": 262_144, "tensor_parallel_size": 2}
    assert [figure.name for figure in log.figures] == ["kv_memory", "kv_cache_tokens"]
    assert log.notes == ["the settings from line 4 on are taken for those of the figures above"]


def test_arguments_alone_tell_settings() -> None:
    log = read_log(
        ["(APIServer pid=1) INFO 07-06 12:22:15 [api_utils.py:273] non-default args: {'model': '~/models/q-fp8', "
         "'quantization': 'fp8', 'served_model_name': ['q', 'r'], 'kv_cache_dtype': 'int8_per_token_head', "
         "'speculative_config': {'method': 'mtp', 'num_speculative_tokens': 3}}",
         "(Worker pid=5) [Stage-1] INFO 02-23 03:40:38 [base.py:81] Available KV cache memory: 37.18 GiB "
         "(process-scoped)"],
        "log",
    )  # fmt: skip
    assert log.model == "~/models/q-fp8"
    assert settings(log) == {
        "kv_cache_dtype": "int8_per_token_head",
        "num_speculative_tokens": 3,
        "quantization": "fp8",
        "speculative_method": "mtp",
    }
    assert values(log, "kv_memory") == [(gib("37.18"), "Worker")]


def test_a_log_within_a_frame_is_read() -> None:
    log = read_log(
        ["│ INFO 03-21 20:15:45 [worker.py:267] model weights take 12.55GiB; non_torch_memory takes 0.16GiB; PyTorch "
         "activation peak memory takes 2.38GiB; the rest of the memory reserved for KV Cache is 56.18GiB.      │",
         "│ INFO 03-21 20:15:46 [executor_base.py:111] # cuda blocks: 7191, # CPU blocks: 512               │"],
        "log",
    )  # fmt: skip
    assert values(log, "num_gpu_blocks") == [(7191, None)]
    assert values(log, "kv_memory") == [(gib("56.18"), None)]
