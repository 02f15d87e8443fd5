"""Audits of start-up logs: ours beside theirs, the causes of differences, and what is kept for later."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import pytest

from kvplan import audit, size
from kvplan.calibration import Calibration, load_calibration, save_calibration
from kvplan.errors import InputError
from kvplan.jobs.audit import AuditLine, AuditResult, audit_with
from kvplan.options import SizeOptions
from kvplan.startup_log import read_log

LOGS = Path(__file__).resolve().parents[1] / "logs"
GIB = 1 << 30

#: Llama-3.1-8B: 32 layers x 8 heads x (128 + 128) x 2 bytes = 131,072 bytes a token, 2 MiB a block.
CONFIG = (
    "Initializing a V1 LLM engine (v0.33.0) with config: model='meta-llama/Llama-3.1-8B-Instruct', "
    "dtype=torch.bfloat16, max_seq_len=32768, tensor_parallel_size=1, kv_cache_dtype=auto, enforce_eager=False"
)


def lines_of(result: AuditResult) -> dict[str, AuditLine]:
    terms = {line.term: line for line in result.lines}
    assert len(terms) == len(result.lines)
    return terms


def audited(*lines: str, config: str = CONFIG, **options: object) -> dict[str, AuditLine]:
    return lines_of(audit_with(read_log([config, *lines], "a.log"), SizeOptions.of(options)))


def of(name: str) -> AuditResult:
    return audit(LOGS / f"{name}.log")


def test_a_log_of_vllm_agrees_term_by_term() -> None:
    result = of("vllm-0.19.0")
    terms = lines_of(result)
    assert [line.term for line in result.lines if line.agrees is False] == ["memory for KV"]
    # 50.92 GiB hold 26,071 blocks of 2 MiB: 417,136 tokens, 12.73 times 32,768.
    blocks = terms["blocks"]
    assert (blocks.theirs, blocks.ours, blocks.difference, blocks.line) == (26_071, 26_071, 0, 21)
    assert (terms["KV cache tokens"].ours, terms["KV cache tokens"].agrees) == (417_136, True)
    assert terms["concurrency"].ours == pytest.approx(417_136 / 32_768)
    # 8,030,261,248 parameters of 2 bytes and a table of 131,072 x 128 x 2; the engine says 14.99 GiB.
    assert terms["weights"].ours == 16_060_522_496 + 33_554_432
    assert terms["weights"].likely_cause is None
    assert terms["weights"].agrees
    assert terms["activations"].agrees is None
    # 67.31 - 14.99 - 0.19 - 1.21 = 50.92
    own = terms["memory for KV, from their parts"]
    assert (own.agrees, own.likely_cause) == (True, "CUDA graphs are not taken from the budget")
    assert terms["memory x utilization"].agrees


def test_the_smallest_rank_decides_and_graphs_are_found_in_the_sum() -> None:
    result = of("vllm-0.33.0-tp2")
    terms = lines_of(result)
    assert result.differing == 0
    assert result.notes == ()
    # 57.5 GiB of the second rank, 80 layers x 4 heads x 256 x 1 byte x 16 tokens = 1.25 MiB a block: 47,104.
    assert (terms["blocks"].ours, terms["KV cache tokens"].ours) == (47_104, 753_664)
    assert terms["memory for KV"].worker == "Worker_TP1"
    # The first rank: 128.63 - 67.28 - 2.32 - 1.02 = 58.01, with the estimate of the graphs.
    own = terms["memory for KV, from their parts"]
    assert (own.worker, own.likely_cause) == (
        "Worker_TP0",
        "CUDA graphs are taken from the budget, as it estimated them",
    )


def test_another_ranks_memory_is_the_cause() -> None:
    terms = audited(
        "(Worker_TP0 pid=1) Available KV cache memory: 20.00 GiB",
        "(Worker_TP1 pid=2) Available KV cache memory: 10.00 GiB",
        "GPU KV cache size: 163,840 tokens",
    )
    line = terms["KV cache tokens"]  # 20 GiB hold 163,840; 10 GiB half of them
    assert (line.ours, line.difference, line.difference_bytes) == (81_920, 81_920, 10 * GIB)
    assert line.likely_cause == "another rank's memory: Worker_TP0 printed 21,474,836,480 bytes (line 2)"


@pytest.mark.parametrize(
    ("lines", "term", "cause"),
    [
        (["# GPU blocks: 5120"], "blocks", None),
        (["GPU KV cache size: 163,840 tokens"], "KV cache tokens",
         "the KV cache is in fp8, though the log does not say so"),
        (["GPU KV cache size: 99,999 tokens"], "KV cache tokens", None),
        (["Overriding num_gpu_blocks=5120 with num_gpu_blocks_override=700", "# GPU blocks: 700"], "blocks",
         "num_gpu_blocks_override (line 3)"),
    ],
)  # fmt: skip
def test_causes_are_named_where_their_figures_agree(lines: list[str], term: str, cause: str | None) -> None:
    config = CONFIG.replace("kv_cache_dtype=auto, ", "")
    line = audited("Available KV cache memory: 10.00 GiB", *lines, config=config)[term]
    assert line.likely_cause == cause
    assert line.agrees is (line.theirs == 5120)


def test_the_null_block_is_named() -> None:
    # Blocks of 128 tokens have 16 MiB, more than what rounding hides: 10.01 GiB hold 640.
    line = audited("Available KV cache memory: 10.01 GiB", "# GPU blocks: 639", block_size=128)["blocks"]
    assert (line.ours, line.likely_cause) == (640, "one block: the null block is counted on one side only")


def test_a_figure_within_the_rounding_of_the_memory_agrees() -> None:
    line = audited("Available KV cache memory: 10.00 GiB", "# GPU blocks: 5122")["blocks"]
    assert (line.ours, line.agrees) == (5120, True)
    assert line.likely_cause == "rounding: KV is printed to 0.01 GiB (line 2)"


def test_a_refusal_is_compared() -> None:
    terms = audited(
        "ValueError: To serve at least one request with the model's max seq len (32768), (4.0 GiB KV cache is needed, "
        "which is larger than the available KV cache memory (3.0 GiB). Based on the available memory, the estimated "
        "maximum model length is 24560. Try increasing"
    )
    assert terms["KV of one longest sequence"].ours == 32_768 * 131_072
    assert terms["KV of one longest sequence"].agrees
    assert terms["longest that fits"].ours == 24_560  # 1,536 blocks less the null block


def test_the_weights_of_the_nearest_stage_are_compared() -> None:
    line = lines_of(of("vllm-0.11-ray-refused"))["weights"]
    # A half of 36 layers, one end of the vocabulary's two matrices, and a table of positions.
    assert line.agrees
    assert line.ours == pytest.approx(7.6271 * GIB, rel=0.002)


def test_the_largest_part_of_a_budgets_difference_is_named() -> None:
    line = lines_of(of("vllm-0.8.5-v0"))["memory for KV"]
    assert line.agrees is False
    assert line.likely_cause is not None
    assert line.likely_cause.startswith("mostly activations: theirs is ")


def test_weights_in_another_form_are_named() -> None:
    # 7.5 GiB is what Llama-3.1-8B takes with its layers in fp8: 6,979,321,856 bytes, 2 x 525,336,576 at the ends.
    line = audited("Model loading took 8.49 GiB and 3.1 seconds", config=CONFIG)["weights"]
    assert line.likely_cause == "the engine holds them in fp8"
    line = audited("Model loading took 14.99 GiB and 3.1 seconds", config=CONFIG + ", quantization=fp8")[
        "weights"
    ]
    assert line.likely_cause == "they are held in bfloat16, not in fp8"
    assert audited("Model loading took 11.1 GiB and 3.1 seconds")["weights"].likely_cause is None


def test_the_pool_of_sglang() -> None:
    result = of("sglang-tp2")
    terms = lines_of(result)
    # 451,904 tokens x 80 layers x 2 heads x 256 x 2 bytes; K and V of 17.24 GiB each.
    assert terms["KV memory of these tokens"].ours == 451_904 * 81_920
    assert terms["KV memory of these tokens"].agrees


def test_the_pool_of_tensorrt_llm() -> None:
    terms = lines_of(of("tensorrt-llm-1.2"))
    assert (terms["KV per token"].theirs, terms["KV per token"].ours) == (131_072, 131_072)
    assert (terms["KV cache tokens"].theirs, terms["KV cache tokens"].ours) == (437_152, 13_661 * 32)
    assert terms["KV memory of these tokens"].agrees
    alone = lines_of(of("tensorrt-llm-0.13"))
    assert alone["memory for KV"].ours is None


@pytest.mark.parametrize("name", ["llama-server", "llama-cpp-python-0.3.9", "llama-2023", "ollama"])
def test_the_cache_of_llama_cpp(name: str) -> None:
    line = lines_of(of(name))["KV memory"]
    assert line.theirs == line.ours
    assert line.agrees


def test_a_quantized_cache_of_llama_cpp() -> None:
    # q8_0: 34 bytes for 32 elements. 8,192 cells x 32 layers x 1,024 elements x 34/32 = 272 MiB for each of K and V.
    terms = lines_of(
        audit_with(
            read_log(
                ["llama_model_loader: loaded meta data with 33 key-value pairs and 292 tensors from "
                 "llama-3.1-8b.gguf (version GGUF V3)",
                 "llama_kv_cache: size =  544.00 MiB (  8192 cells,  32 layers,  1/1 seqs), K (q8_0):  272.00 MiB, "
                 "V (q8_0):  272.00 MiB"],
                "a.log",
            ),
            SizeOptions(),
        )
    )  # fmt: skip
    assert terms["KV memory"].ours == 544 << 20


def test_models_are_found_by_the_names_that_logs_have() -> None:
    for name in (
        "/models/Llama-3.1-8B-Instruct/",
        "/models/hub/models--meta-llama--Llama-3.1-8B-Instruct/snapshots/0e9e39f2",
        "Meta Llama 3.1 8B Instruct",
    ):
        log = read_log(
            [f"non-default args: {{'model': '{name}'}}", "Available KV cache memory: 10.00 GiB"], "a.log"
        )
        log.model = name
        result = audit_with(log, SizeOptions())
        assert result.sized is not None, name
        assert result.sized.model.name == "llama-3.1-8b"


def test_an_unknown_model_leaves_their_figures() -> None:
    log = read_log(
        [CONFIG.replace("meta-llama/Llama-3.1-8B-Instruct", "/opt/secret"), "# GPU blocks: 5119"], "a.log"
    )
    result = audit_with(log, SizeOptions())
    assert [(line.term, line.theirs, line.ours) for line in result.lines] == [("blocks", 5119, None)]
    assert 'the model "/opt/secret" of the log is not known: give --model for figures of ours' in result.notes
    with pytest.raises(InputError, match='unknown model "nothing"'):
        audit_with(log, SizeOptions(), "nothing")
    assert audit_with(log, SizeOptions(), "llama-3.1-8b").sized is not None


def test_what_is_given_goes_before_what_the_log_says() -> None:
    terms = audited("Available KV cache memory: 10.00 GiB", "# GPU blocks: 10240", kv_cache_dtype="fp8")
    assert terms["blocks"].ours == 10_240


def test_versions_with_drafts_are_tried_where_the_log_tells_neither() -> None:
    # A start of July 2026 with three drafted tokens; 0.26 to 0.32 give 289,661 for 5.23 GiB.
    result = audit_with(
        read_log(
            ["non-default args: {'model': '~/.cache/huggingface/qwen3.6-27b-fp8', 'max_model_len': 262144, "
             "'quantization': 'fp8', 'tensor_parallel_size': 2, 'kv_cache_dtype': 'int8_per_token_head', "
             "'enable_prefix_caching': True}",
             "Available KV cache memory: 5.23 GiB",
             "GPU KV cache size: 289,661 tokens",
             "Maximum concurrency for 262,144 tokens per request: 1.10x"],
            "a.log",
        ),
        SizeOptions(),
    )  # fmt: skip
    line = lines_of(result)["KV cache tokens"]
    assert line.likely_cause == "the rules of vLLM 0.26 to 0.32, with drafts of 3 tokens"


def test_another_version_is_named_where_its_rules_give_every_figure() -> None:
    config = (
        "Initializing a V1 LLM engine (v0.33.0) with config: model='google/gemma-3-27b-it', dtype=torch.bfloat16, "
        "max_seq_len=32768, tensor_parallel_size=1, kv_cache_dtype=auto"
    )
    shown = [
        "Chunked prefill is enabled with max_num_batched_tokens=2048.",
        "Asynchronous scheduling is disabled.",
        "Available KV cache memory: 4.60 GiB",
    ]
    # Blocks of 10 pages of 131,072 bytes: 3,768; shared out among 7 groups up to 0.20: 538 x 16 tokens.
    line = audited(*shown, "GPU KV cache size: 8,608 tokens", config=config)["KV cache tokens"]
    assert line.agrees is False
    assert line.likely_cause == "the rules of vLLM 0.19 to 0.20"


def test_blocks_of_a_model_with_states_are_compared() -> None:
    config = (
        "Initializing a V1 LLM engine (v0.24.0) with config: model='Qwen/Qwen3.5-27B', dtype=torch.bfloat16, "
        "max_seq_len=32768, tensor_parallel_size=1, kv_cache_dtype=auto, enable_prefix_caching=True"
    )
    terms = audited(
        "Setting attention block size to 784 tokens to ensure that attention page size is >= mamba page size.",
        "Padding mamba page size by 0.13% to ensure that mamba page size and attention page size are exactly equal.",
        config=config,
    )
    # A state of 3,207,168 bytes in a page of 784 tokens of 4,096 bytes.
    assert (terms["block size"].ours, terms["block size"].agrees) == (784, True)
    padding = terms["padding of states"]
    assert padding.ours == pytest.approx(100 * (784 * 4096 - 3_207_168) / 3_207_168)
    assert padding.agrees


def test_newer_and_older_engines_go_by_the_nearest_rules() -> None:
    for version, rules in (
        ("0.40.1", "0.33, the newest"),
        ("0.5.4", "0.6, the oldest"),
        ("0.1.dev1+gab", "0.33, the newest"),
    ):
        log = read_log([CONFIG.replace("0.33.0", version), "Available KV cache memory: 10.00 GiB"], "a.log")
        result = audit_with(log, SizeOptions())
        assert result.notes == (
            f"the rules of vLLM {version} are not known: ours follow those of {rules} held",
        )
        assert result.sized is not None


def test_a_setting_that_we_cannot_follow_is_left_out_with_a_note() -> None:
    config = (
        CONFIG
        + ", speculative_config=SpeculativeConfig(method='dflash', model='/x/dflash', num_spec_tokens=5)"
    )
    log = read_log([config, "Available KV cache memory: 10.00 GiB", "# GPU blocks: 5120"], "a.log")
    result = audit_with(log, SizeOptions())
    assert [note.partition(" of the log")[0] for note in result.notes] == [
        "speculative_model",
        "speculative_method",
        "num_speculative_tokens",
    ]
    assert lines_of(result)["blocks"].agrees


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("RedHatAI/Llama-3.3-70B-Instruct-quantized.w8a8", "llama-3.1-70b"),
        ("redhatai/Llama-3.3-70B-Instruct-FP8-dynamic", "llama-3.1-70b"),
        ("/models/qwen3.6-27b-autoround-int4", "qwen3.5-27b"),
        ("cyankiwi/Kimi-Linear-48B-A3B-Instruct-AWQ-4bit", "kimi-linear-48b"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3-30b-a3b"),
    ],
)
def test_copies_of_a_model_are_known_by_their_names(name: str, known: str) -> None:
    log = read_log([CONFIG.replace("meta-llama/Llama-3.1-8B-Instruct", name), "# GPU blocks: 5119"], "a.log")
    result = audit_with(log, SizeOptions())
    assert result.sized is not None
    assert result.sized.model.name == known


def test_a_calibration_keeps_what_one_process_measured(tmp_path: Path) -> None:
    kept = of("vllm-0.33.0-tp2").calibration
    assert kept is not None
    # 67.28 - 65.74 GiB beside the weights; 139.81 x 0.92 - 65.74 - 57.5 in all, of the rank that has least.
    assert kept.runtime_bytes == round(67.28 * GIB) - round(65.74 * GIB)
    assert kept.overhead_bytes == pytest.approx((139.81 * 0.92 - 65.74 - 57.5) * GIB, abs=3)
    assert kept.rounding_bytes == pytest.approx(0.01 * GIB, abs=3)
    assert (kept.tensor_parallel_size, kept.kv_cache_dtype, kept.version) == (2, "fp8", "0.33.0")
    path = tmp_path / "c.yaml"
    with path.open("w") as file:
        save_calibration(file, kept)
    assert load_calibration(path) == kept


#: What the options of a start were, for each log that tells its budget or is of a known GPU.
STARTS: dict[str, dict[str, Any]] = {
    "vllm-0.8.5-v0": {},
    "vllm-0.11-ray-refused": {"gpu": "2xl4"},
    "vllm-0.19.0": {},
    "vllm-0.33.0-tp2": {},
}


@pytest.mark.parametrize("name", STARTS)
def test_a_start_sized_again_has_the_memory_that_it_printed(tmp_path: Path, name: str) -> None:
    result = audit(LOGS / f"{name}.log", **STARTS[name])
    kept, sized = result.calibration, result.sized
    assert kept is not None
    assert sized is not None
    path = tmp_path / "c.yaml"
    with path.open("w") as file:
        save_calibration(file, kept)
    names = (
        *("gpu_memory_utilization", "tensor_parallel_size", "pipeline_parallel_size", "max_model_len"),
        *("max_num_seqs", "max_num_batched_tokens", "dtype"),
    )
    options = {one: getattr(kept, one) for one in names} | STARTS[name]
    if not STARTS[name]:
        options["gpu_memory"] = kept.gpu_memory_bytes
    again = size(sized.model.name, engine=sized.config["engine"].value, calibration=str(path), **options)
    assert again.warnings == ()
    assert again.capacity is not None
    memory = result.log.least("kv_memory")
    assert memory is not None
    # A pipeline's stages load other weights; the one that the log tells of is among them.
    assert any(memory.allows(rank.available_kv_bytes) for rank in again.capacity.ranks)
    overhead = again.capacity.overhead_bytes
    assert overhead is not None
    assert (again.capacity.overhead_source, again.config["overhead"].value) == ("measured", "measured")
    assert overhead.high - overhead.low <= GIB // 25
    assert overhead.low <= overhead.total("mid") <= overhead.high


def test_without_a_model_there_is_no_calibration() -> None:
    assert of("tensorrt-llm-0.13").calibration is None


GOOD = 'kvplan_calibration: 1\nengine: vllm\nmodel: "m"\nsource: "a.log:3"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("engine: vllm\n", "the file is no calibration"),
        ("kvplan_calibration: 2\n", "unknown form of calibration: 2"),
        ("kvplan_calibration: true\n", "unknown form of calibration: True"),
        (GOOD.replace("engine", "engines"), 'unknown field of a calibration "engines"'),
        (GOOD.replace('model: "m"\n', ""), "model is missing"),
        (GOOD + "weights_bytes: -1\n", 'weights_bytes is "-1", not a whole number from 0 on'),
        (GOOD + "weights_bytes: 1.5\n", 'weights_bytes is "1.5", not a whole number from 0 on'),
        (
            GOOD + "weights_bytes: 99999999999999999999\n",
            'weights_bytes is "99999999999999999999", not a whole number',
        ),
        (GOOD + "enforce_eager: 1\n", 'enforce_eager is "1", not true or false'),
        (GOOD + "gpu_memory_utilization: x\n", 'gpu_memory_utilization is "x", not a number from 0 on'),
        ("- 1\n", "the calibration is no mapping"),
    ],
)
def test_a_wrong_calibration_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        load_calibration(path)
    assert str(caught.value).startswith(message)
    assert "c.yaml" in str(caught.value)


def test_hostile_texts_survive_the_file(tmp_path: Path) -> None:
    kept = Calibration(engine="vllm", version=None, model='x"\n: !!python/object \x1b[31m', source="é:1")
    buffer = io.StringIO()
    save_calibration(buffer, kept)
    path = tmp_path / "c.yaml"
    path.write_text(buffer.getvalue())
    assert load_calibration(path) == kept


#: Rows of real logs that the plain formula holds for, and why others are left out.
_FAMILIES = ("gqa-dense", "mha", "moe-gqa")


def test_rows_of_real_logs_agree(shared: Path) -> None:
    """Each row's own figures, printed as vLLM prints them, give its tokens, blocks or concurrency."""
    with (shared / "truth" / "kv_logs.csv").open() as file:
        rows: list[dict[str, Any]] = list(csv.DictReader(file))
    agreed, differing = [], []
    for row in rows:
        if row["engine"] != "vllm" or row["family"] not in _FAMILIES or row["consistent"] != "yes":
            continue
        if row["model_basis"] != "stated" or not row["kv_gib"] or row["pp"] not in ("", "1"):
            continue
        log = read_log(_as_log(row), row["record_id"])
        result = audit_with(
            log, SizeOptions(block_size=int(row["block_size"]) if row["block_size"] else None)
        )
        if result.sized is None:
            continue
        derived = [line for line in result.lines if line.unit != "bytes" and line.ours is not None]
        (agreed if all(line.agrees for line in derived) else differing).append(row["record_id"])
    assert len(agreed) >= 6
    # Its note says that the line of the memory is another rank's.
    assert differing == ["kv0098"]


def _as_log(row: dict[str, Any]) -> list[str]:
    lines = [
        f"Initializing a V1 LLM engine (v0.11.0) with config: model={row['model']!r}, "
        f"max_seq_len={row['max_model_len'] or None}, tensor_parallel_size={row['tp'] or 1}, "
        f"kv_cache_dtype={row['kv_cache_dtype'] or 'auto'}",
        f"Available KV cache memory: {row['kv_gib']} GiB",
    ]
    if row["kv_tokens"]:
        lines.append(f"GPU KV cache size: {int(row['kv_tokens']):,} tokens")
    if row["gpu_blocks"]:
        lines.append(f"# GPU blocks: {row['gpu_blocks']}, # CPU blocks: 0")
    if row["max_concurrency"] and row["max_model_len"]:
        lines.append(
            f"Maximum concurrency for {int(row['max_model_len']):,} tokens per request: {row['max_concurrency']}x"
        )
    return lines
