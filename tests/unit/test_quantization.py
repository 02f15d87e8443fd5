"""Bytes of quantized weights: each format by hand, and which modules a checkpoint leaves alone."""

from __future__ import annotations

import time
from typing import Any

import pytest

from kvplan.config import load_model
from kvplan.core.name_patterns import Patterns, plain_path
from kvplan.core.quantization import Quantization, Scheme, from_config, from_name
from kvplan.core.weights import Ranks, Weights
from kvplan.errors import InputError

#: A matrix of 512 outputs and 1024 inputs, of a model in 16 bits.
ROWS, COLUMNS = 512, 1024
WEIGHTS = ROWS * COLUMNS


def linear(settings: dict[str, Any]) -> Scheme:
    found = from_config(settings)
    assert found.unknown is None
    assert found.linear is not None
    return found.linear


def compressed(weights: dict[str, Any], inputs: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, **more}


_FP8 = {"num_bits": 8, "type": "float", "strategy": "channel"}
_W4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
_FP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}

FORMATS: dict[str, tuple[dict[str, Any], int]] = {
    "fp8, one scale": ({"quant_method": "fp8"}, WEIGHTS + 4),
    "fp8, calibrated": ({"quant_method": "fp8", "activation_scheme": "static"}, WEIGHTS + 4 + 4),
    "fp8, blocks": (
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        WEIGHTS + 4 * (512 // 128) * (1024 // 128),
    ),
    "fbgemm": ({"quant_method": "fbgemm_fp8"}, WEIGHTS + 4 * ROWS),
    # Scales in the model's 16 bits, zero points in 4 bits, for each 128 inputs of each output.
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True},
        WEIGHTS // 2 + 2 * ROWS * 8 + ROWS * 8 // 2,
    ),
    # Marlin drops the zero points of a symmetric format.
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True},
        WEIGHTS // 2 + 2 * ROWS * 8,
    ),
    "gptq, 8 bits": ({"quant_method": "gptq", "bits": 8, "group_size": -1}, WEIGHTS + 2 * ROWS),
    "gptq, ordered": (
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True},
        WEIGHTS // 2 + 2 * ROWS * 8 + 8 * COLUMNS,
    ),
    "auto-round": ({"quant_method": "auto-round", "bits": 4, "group_size": 64}, WEIGHTS // 2 + 2 * ROWS * 16),
    "w8a8 of fp8": (compressed(_FP8, {"num_bits": 8, "dynamic": True}), WEIGHTS + 4 * ROWS),
    "w8a8 of int8": (
        compressed({**_FP8, "type": "int"}, {"num_bits": 8, "dynamic": True}),
        WEIGHTS + 4 * ROWS,
    ),
    "w4a16": (compressed(_W4), WEIGHTS // 2 + 2 * ROWS * 8),
    "w4a16, asymmetric": (
        compressed({**_W4, "symmetric": False}),
        WEIGHTS // 2 + 2 * ROWS * 8 + ROWS * 8 // 2,
    ),
    # An E4M3 scale for each 16 inputs, and two float32 of the whole.
    "nvfp4": (compressed(_FP4, {"num_bits": 4}), WEIGHTS // 2 + ROWS * 64 + 8),
    "nvfp4, weights alone": (compressed(_FP4), WEIGHTS // 2 + ROWS * 64 + 4),
    "modelopt fp8": ({"quant_method": "modelopt", "quant_algo": "FP8"}, WEIGHTS + 4 + 4),
    "modelopt nvfp4": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, WEIGHTS // 2 + ROWS * 64 + 8),
    "modelopt's own file": ({"quantization": {"quant_algo": "NVFP4"}}, WEIGHTS // 2 + ROWS * 64 + 8),
    # A float32 maximum for each 64 weights.
    "bitsandbytes, 4 bits": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        WEIGHTS // 2 + WEIGHTS // 16,
    ),
    "bitsandbytes, 8 bits": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, WEIGHTS + 4 * ROWS),
    "mxfp8": ({"quant_method": "mxfp8"}, WEIGHTS + ROWS * 32),
}


@pytest.mark.parametrize("name", FORMATS)
def test_bytes_of_a_matrix(name: str) -> None:
    settings, expected = FORMATS[name]
    assert linear(settings).bytes_of(ROWS, COLUMNS, 2) == expected


def test_scales_of_tensor_cores_come_in_tiles() -> None:
    # 100 rows of 2 scales are held as 128 rows of 4.
    scheme = linear({"quant_method": "modelopt", "quant_algo": "NVFP4"})
    assert scheme.bytes_of(100, 32, 2) == 100 * 32 // 2 + 128 * 4 + 8


def test_mxfp4_is_for_experts_whose_sizes_are_padded() -> None:
    found = from_config({"quant_method": "mxfp4"})
    assert found.linear is None
    # gpt-oss: 2880 inputs are padded to 3072, 2880 outputs to 2944, with a scale for each 32 inputs.
    up = found.expert_scheme("model.layers.0.mlp.experts.up_proj", is_down=False)
    assert up is not None
    assert up.bytes_of(2880, 2880, 2) == 2944 * 3072 // 2 + 2944 * 96
    down = found.expert_scheme("model.layers.0.mlp.experts.down_proj", is_down=True)
    assert down is not None
    assert down.bytes_of(2880, 2880, 2) == 3072 * 2944 // 2 + 3072 * 92


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"quant_method": "quark"}, 'quantization method "quark" is not known'),
        ({"quant_method": "gptq"}, "bits is missing"),
        ({"quant_method": "gptq", "bits": 10**9}, 'bits is "1000000000", no number of bits'),
        ({"quant_method": "awq", "bits": 4, "group_size": 0}, 'group_size is "0", no number of weights'),
        (
            {"quant_method": "fp8", "weight_block_size": [0, 128]},
            'weight_block_size is "[0, 128]", no rows and',
        ),
        ({"quant_method": "compressed-tensors"}, "compressed-tensors without config_groups"),
        ({"quant_method": "modelopt", "quant_algo": "W3"}, 'quant_algo "W3" is not known'),
        ({"quant_method": "fp8", "ignore": ["re:(a+)+$"]}, 'the pattern "(a+)+$" repeats a group'),
    ],
)
def test_a_format_that_cannot_be_read_says_why(settings: dict[str, Any], reason: str) -> None:
    found = from_config(settings)
    assert found.unknown is not None
    assert found.unknown.startswith(reason)


def test_names_of_the_command_line() -> None:
    assert from_name("fp8").linear == Scheme(8, block_rows=0, operand_bits=8)
    assert from_name("experts_int8").linear is None
    unknown = from_name("gptq").unknown
    assert unknown == 'how "gptq" holds a model that is not stored so is not known'


@pytest.mark.parametrize(
    ("pattern", "named", "not_named"),
    [
        ("lm_head", "lm_head", "model.layers.0.mlp.gate"),
        ("model.layers.0", "model.layers.0.mlp.up_proj", "model.layers.10.mlp.up_proj"),
        ("self_attn", "model.layers.3.self_attn.q_proj", "model.layers.3.mlp.up_proj"),
        (
            "model.layers.1.self_attn.qkv_proj",
            "model.layers.1.self_attn.k_proj",
            "model.layers.1.self_attn.o_proj",
        ),
        ("language_model.model.layers.2.mlp.down_proj", "model.layers.2.mlp.down_proj", "model.layers.2.mlp"),
        (
            "model.layers.0.mlp.experts.7.up_proj",
            "model.layers.0.mlp.experts.up_proj",
            "model.layers.0.mlp.up_proj",
        ),
        ("re:.*lm_head", "lm_head", "model.embed_tokens"),
        (
            r"re:.*mlp\.experts\.\d+\.(gate|up|down)_proj$",
            "model.layers.3.mlp.experts.up_proj",
            "model.layers.3.mlp.up_proj",
        ),
        (
            "model.layers.0.block_sparse_moe.experts.3.w1",
            "model.layers.0.mlp.experts.gate_proj",
            "model.layers.0.mlp.experts.down_proj",
        ),
        (
            "re:.*feed_forward.shared_expert",
            "model.layers.0.mlp.shared_experts.up_proj",
            "model.layers.0.mlp.up_proj",
        ),
        (r"re:.*\.mlp\.gate$", "model.layers.4.mlp.gate", "model.layers.4.mlp.gate_proj"),
        (r"re:model\.layers\.(0|1|2)\..*", "model.layers.1.mlp.up_proj", "model.layers.3.mlp.up_proj"),
        (
            r"re:.*layers\.\d+\.self_attn\.(q|k)_proj",
            "model.layers.12.self_attn.k_proj",
            "model.layers.1.self_attn.o_proj",
        ),
        ("re:.*(visual|vision).*", "visual.blocks.3.attn.proj", "model.layers.1.self_attn.o_proj"),
        ("re:model.layers.[0-3].mlp", "model.layers.3.mlp.up_proj", "model.layers.4.mlp.up_proj"),
        ("model.layers.*.self_attn*", "model.layers.9.self_attn.q_proj", "model.layers.9.mlp.up_proj"),
        ("*.mlp.gate", "model.layers.9.mlp.gate", "model.layers.9.mlp.gate_proj"),
    ],
)
def test_patterns_name_modules(pattern: str, named: str, not_named: str) -> None:
    patterns = Patterns.of([pattern])
    assert patterns.match(plain_path(named))
    assert not patterns.match(plain_path(not_named))


@pytest.mark.parametrize(
    "pattern",
    ["re:" + "(a*)*" * 5 + "b", "re:" + "(a|b)" * 12, "re:" + "a" * 501, "re:(?=x)", "re:(a", "re:[a"],
)
def test_an_expression_that_would_take_long_is_refused(pattern: str) -> None:
    with pytest.raises(InputError):
        Patterns.of([pattern])


def test_an_expression_takes_time_of_its_length_only() -> None:
    started = time.perf_counter()
    assert not Patterns.of(["re:" + ".*a" * 100 + "$"]).match("a" * 99 + "b")
    assert time.perf_counter() - started < 1


def test_expressions_read_only_so_much() -> None:
    patterns = Patterns.of([f"re:.*{i}.*" for i in range(60)])
    paths = (f"layers.{chr(200 + i)}.self_attn.q_proj" for i in range(10_000))
    with pytest.raises(InputError, match="60 patterns name modules of too many layers"):
        any(patterns.match(path) for path in paths)


def held(model: str, form: Quantization | None, **settings: Any) -> int:
    weights = load_model(model).weights._replace(format=form)
    size = weights.rank_bytes("bfloat16", Ranks(**{"num_kv_heads": 8, **settings}))
    assert size is not None
    return size


def test_what_is_not_linear_keeps_its_dtype() -> None:
    # Llama-3.1-8B in fp8 with a scale for each output: tables, norms and head stay in 16 bits.
    h, layers, mlp, vocab = 4096, 32, 14336, 128256
    matrices = layers * (2 * h * h + 2 * h * 1024 + 3 * h * mlp)
    outputs = layers * (h + 2 * 1024 + h + 2 * mlp + h)
    rest = 2 * vocab * h + 65 * h
    assert held("llama-3.1-8b", from_config(compressed(_FP8))) == matrices + 4 * outputs + 2 * rest


def test_modules_that_are_ignored_keep_their_dtype() -> None:
    h = 4096
    every = from_config({"quant_method": "fp8"})
    but_one = from_config({"quant_method": "fp8", "modules_to_not_convert": ["model.layers.0.mlp.up_proj"]})
    difference = held("llama-3.1-8b", but_one) - held("llama-3.1-8b", every)
    assert difference == h * 14336 - 4


def test_a_head_is_quantized_only_where_it_is_named() -> None:
    head = 128256 * 4096
    named = compressed(_FP8)
    named["config_groups"]["group_0"]["targets"] = ["Linear", "lm_head"]
    difference = held("llama-3.1-8b", from_config(compressed(_FP8))) - held(
        "llama-3.1-8b", from_config(named)
    )
    assert difference == head - 4 * 128256


def test_scales_are_divided_with_their_matrices() -> None:
    # On 4 ranks q_proj has 1024 x 4096 and o_proj 4096 x 1024: 8 x 32 and 32 x 8 blocks.
    form = from_config({"quant_method": "fp8", "weight_block_size": [128, 128]})
    weights = load_model("llama-3.1-8b").weights._replace(format=form)
    q = next(g for g in weights.groups if g.name.endswith("q_proj"))
    only = Weights(q.elements, "config", (q,), None, form)
    rank = only.rank_bytes("bfloat16", Ranks(4, num_kv_heads=8))
    assert rank == 32 * (1024 * 4096 + 4 * 8 * 32)


def test_deepseek_v3_by_hand() -> None:
    # Blocks of 128 x 128, and kv_b_proj once more in 16 bits for the absorbed products.
    form = from_config({"quant_method": "fp8", "weight_block_size": [128, 128]})
    h, layers = 7168, 61
    shapes = [(1536, h), (24576, 1536), (576, h), (32768, 512), (h, 16384)]
    per_layer = sum(rows * columns + 4 * -(-rows // 128) * (columns // 128) for rows, columns in shapes)
    per_layer += 2 * 32768 * 512
    dense = 3 * (h * 18432 + 4 * (h // 128) * (18432 // 128))
    expert = 3 * (h * 2048 + 4 * (h // 128) * (2048 // 128))
    router = 2 * 256 * h + 4 * 256
    rest = 2 * (2 * 129280 * h + layers * (2 * h + 1536 + 512) + h)
    total = layers * per_layer + 3 * dense + 58 * (257 * expert + router) + rest
    assert held("deepseek-v3", form, num_kv_heads=128) == total


def test_files_tell_the_total_and_the_format_how_it_is_divided() -> None:
    form = from_config({"quant_method": "fp8"})
    weights = load_model("llama-3.1-8b").weights._replace(format=form, stored_bytes=9_000_000_000)
    assert weights.total_bytes("bfloat16") == 9_000_000_000
    half = weights.rank_bytes("bfloat16", Ranks(2, num_kv_heads=8))
    assert half is not None
    assert 4_500_000_000 < half < 4_501_000_000


def test_the_command_line_quantizes_what_is_not_stored_so() -> None:
    weights = load_model("llama-3.1-8b").weights
    h, layers, mlp = 4096, 32, 14336
    matrices = layers * (2 * h * h + 2 * h * 1024 + 3 * h * mlp)
    plain, fp8 = weights.total_bytes("bfloat16"), weights.quantized_by("fp8").total_bytes("bfloat16")
    assert plain is not None
    # A byte less for each element, a float32 more for each of seven matrices in a layer.
    assert fp8 == plain - matrices + layers * 7 * 4
    stored = weights._replace(format=from_config({"quant_method": "fp8"}))
    assert stored.quantized_by("fp8") is stored
    assert weights.quantized_by("gptq").total_bytes("bfloat16") is None


def test_an_unknown_format_is_known_from_files_only() -> None:
    form = from_config({"quant_method": "quark"})
    weights = load_model("llama-3.1-8b").weights._replace(format=form)
    assert weights.total_bytes("bfloat16") is None
    assert weights.why_unknown == 'quantization method "quark" is not known'
    stored = weights._replace(stored_bytes=1001)
    assert stored.total_bytes("bfloat16") == 1001
    assert stored.rank_bytes("bfloat16", Ranks(2, num_kv_heads=8)) == 501


@pytest.mark.parametrize(
    ("model", "form", "ranks", "printed_gib"),
    [
        # What vLLM printed as taken by loading (0.19 on H100, and older): weights and rotary tables.
        ("llama-3.1-8b", None, 1, 14.9888),
        ("qwen3-14b", None, 1, 27.5185),
        ("qwen3-30b-a3b", None, 1, 56.88),
        ("llama-3.1-70b", compressed(_FP8), 2, 33.88),
        ("llama-3.1-70b", compressed(_FP8), 4, 16.96),
        ("llama-3.1-70b", compressed(_FP8), 1, 67.7229),
    ],
)
def test_what_the_engine_printed(
    model: str, form: dict[str, Any] | None, ranks: int, printed_gib: float
) -> None:
    spec = load_model(model)
    weights = spec.weights._replace(format=from_config(form) if form else None)
    size = weights.rank_bytes("bfloat16", Ranks(ranks, num_kv_heads=spec.num_kv_heads))
    assert size is not None
    # Printed with two digits by newer releases.
    assert abs((size + weights.rotary_bytes("bfloat16")) / (1 << 30) - printed_gib) < 0.006
