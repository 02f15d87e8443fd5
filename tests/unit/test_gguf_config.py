"""GGUF files as models: what their keys mean, held against the config.json that they were converted from."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from model_files import ARRAY, BOOL, I32, Tensor, write_gguf

from kvplan.config import load_model
from kvplan.core.kv_cache import FullAttention, GatedDeltaNet, Mamba1State, Mamba2State, ShortConv
from kvplan.core.model import ModelSpec
from kvplan.errors import InputError
from kvplan.gguf import read_gguf
from kvplan.gguf_config import config_of, stored_weights

Config = Mapping[str, Any]

#: Keys that the converter of llama.cpp writes for every model, by the config's field.
COMMON = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "context_length": "max_position_embeddings",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "vocab_size": "vocab_size",
}

ONE: list[Tensor] = [("token_embd.weight", "F16", [64, 100]), ("output.weight", "F16", [64, 100])]


def keys_of(arch: str, config: Config, **more: object) -> dict[str, object]:
    """The metadata of a file of an architecture, converted from a config."""
    keys = {key: config[field] for key, field in COMMON.items() if config.get(field) is not None}
    keys |= {key.replace("__", "."): value for key, value in more.items()}
    return {"general.architecture": arch} | {f"{arch}.{key}": v for key, v in keys.items() if v is not None}


def mixtral(c: Config) -> dict[str, object]:
    return {"expert_count": c["num_local_experts"], "expert_used_count": c["num_experts_per_tok"]}


def qwen3_moe(c: Config) -> dict[str, object]:
    return {
        "expert_count": c["num_experts"],
        "expert_used_count": c["num_experts_per_tok"],
        "expert_feed_forward_length": c["moe_intermediate_size"],
    }


def gpt_oss(c: Config) -> dict[str, object]:
    return {
        **mixtral(c),
        "expert_feed_forward_length": c["intermediate_size"],
        "attention__sliding_window": c["sliding_window"],
        "rope__scaling__type": "yarn",
        "rope__scaling__factor": 32.0,
    }


def deepseek(c: Config) -> dict[str, object]:
    latent, rotary = c["kv_lora_rank"], c["qk_rope_head_dim"]
    return {
        "attention__kv_lora_rank": latent,
        "attention__q_lora_rank": c["q_lora_rank"],
        "attention__head_count_kv": 1,
        "attention__key_length": latent + rotary,
        "attention__value_length": latent,
        "attention__key_length_mla": c["qk_nope_head_dim"] + rotary,
        "attention__value_length_mla": c["v_head_dim"],
        "rope__dimension_count": rotary,
        "leading_dense_block_count": c["first_k_dense_replace"],
        "expert_count": c["n_routed_experts"],
        "expert_used_count": c["num_experts_per_tok"],
        "expert_shared_count": c["n_shared_experts"],
        "expert_feed_forward_length": c["moe_intermediate_size"],
        "expert_gating_func": 2 if c["scoring_func"] == "sigmoid" else 1,
        "rope__scaling__type": "yarn",
    }


def old_deepseek(c: Config) -> dict[str, object]:
    """Files of before latent attention was cached as such."""
    length = c["qk_nope_head_dim"] + c["qk_rope_head_dim"]
    more = {"attention__key_length": length, "attention__value_length": c["v_head_dim"]}
    heads = {"attention__head_count_kv": c["num_key_value_heads"]}
    gone = {"attention__key_length_mla": None, "attention__value_length_mla": None}
    return deepseek(c) | more | heads | gone


def nemotron_h(c: Config) -> dict[str, object]:
    letters = c["hybrid_override_pattern"]
    width = c.get("moe_intermediate_size") or c["intermediate_size"]
    return {
        "attention__head_count_kv": [c["num_key_value_heads"] if one == "*" else 0 for one in letters],
        "feed_forward_length": [width if one in "-E" else 0 for one in letters],
        "attention__key_length": c.get("head_dim") or c["attention_head_dim"],
        "attention__value_length": c.get("head_dim") or c["attention_head_dim"],
        "ssm__conv_kernel": c["conv_kernel"],
        "ssm__state_size": c["ssm_state_size"],
        "ssm__inner_size": c["mamba_num_heads"] * c["mamba_head_dim"],
        "ssm__time_step_rank": c["mamba_num_heads"],
        "ssm__group_count": c["n_groups"],
        "expert_count": c.get("n_routed_experts", 0),
    }


def delta_net(c: Config) -> dict[str, object]:
    return {
        "full_attention_interval": c["full_attention_interval"],
        "ssm__conv_kernel": c["linear_conv_kernel_dim"],
        "ssm__state_size": c["linear_key_head_dim"],
        "ssm__group_count": c["linear_num_key_heads"],
        "ssm__time_step_rank": c["linear_num_value_heads"],
        "ssm__inner_size": c["linear_num_value_heads"] * c["linear_value_head_dim"],
    }


def gemma4(c: Config) -> dict[str, object]:
    slides = [word == "sliding_attention" for word in c["layer_types"]]
    few, many = c["num_global_key_value_heads"], c["num_key_value_heads"]
    return {
        "attention__sliding_window": c["sliding_window"],
        "attention__sliding_window_pattern": (ARRAY, BOOL, slides),
        "attention__head_count_kv": (ARRAY, I32, [many if slide else few for slide in slides]),
        "attention__key_length": c["global_head_dim"],
        "attention__value_length": c["global_head_dim"],
        "attention__key_length_swa": c["head_dim"],
        "attention__value_length_swa": c["head_dim"],
        "attention__shared_kv_layers": c.get("num_kv_shared_layers", 0),
    }


def mimo2(c: Config) -> dict[str, object]:
    slides = [one == 1 for one in c["hybrid_layer_pattern"]]
    full, sliding = c["num_key_value_heads"], c["swa_num_key_value_heads"]
    return {
        "attention__sliding_window": c["sliding_window"],
        "attention__sliding_window_pattern": (ARRAY, BOOL, slides),
        "attention__head_count_kv": (ARRAY, I32, [sliding if slide else full for slide in slides]),
        "attention__value_length": c["v_head_dim"],
        "attention__key_length_swa": c["swa_head_dim"],
        "attention__value_length_swa": c["swa_v_head_dim"],
    }


def nothing(c: Config) -> dict[str, object]:
    return {}


CASES: list[tuple[str, str, Callable[[Config], dict[str, object]]]] = [
    ("meta-llama__Meta-Llama-3.1-8B", "llama", nothing),
    ("meta-llama__Llama-2-7b-hf", "llama", nothing),
    ("mistralai__Mixtral-8x7B-v0.1", "llama", mixtral),
    ("Qwen__Qwen2.5-7B-Instruct", "qwen2", nothing),
    ("Qwen__Qwen3-8B", "qwen3", nothing),
    ("Qwen__Qwen3-30B-A3B", "qwen3moe", qwen3_moe),
    ("openai__gpt-oss-20b", "gpt-oss", gpt_oss),
    ("deepseek-ai__DeepSeek-V3", "deepseek2", deepseek),
    ("deepseek-ai__DeepSeek-V3", "deepseek2", old_deepseek),
    ("deepseek-ai__DeepSeek-V2-Lite", "deepseek2", deepseek),
    ("nvidia__Nemotron-H-56B-Base-8K", "nemotron_h", nemotron_h),
    ("nvidia__NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "nemotron_h_moe", nemotron_h),
    ("Qwen__Qwen3.5-27B", "qwen35", delta_net),
    ("google__gemma-4-26B-A4B", "gemma4", gemma4),
    ("XiaomiMiMo__MiMo-V2-Flash", "mimo2", mimo2),
]


@pytest.mark.parametrize(("name", "arch", "more"), CASES)
def test_a_converted_model_is_the_model_of_its_config(
    shared: Path, tmp_path: Path, name: str, arch: str, more: Callable[[Config], dict[str, object]]
) -> None:
    source = shared / "sizing" / "configs" / f"{name}.json"
    config = json.loads(source.read_text(encoding="utf-8"))
    config |= config.get("text_config", {})
    metadata = keys_of(arch, config, **more(config))
    converted = load_model(str(write_gguf(tmp_path / "m.gguf", metadata, ONE)))
    original = load_model(str(source))

    def shape(spec: ModelSpec) -> list[object]:
        return [
            # A file does not say what the recurrent part of a state is kept in.
            [
                (item.layer, item.cache.kind, item.cache._asdict() | {"ssm_dtype": None})
                for item in spec.layers
            ],
            spec.num_layers,
            spec.hidden_size,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            spec.vocab_size,
            spec.max_position_embeddings,
            spec.architecture,
        ]

    assert shape(converted) == shape(original)


SMALL = {
    "num_hidden_layers": 4,
    "hidden_size": 1024,
    "max_position_embeddings": 4096,
    "intermediate_size": 2048,
    "num_attention_heads": 16,
    "vocab_size": 100,
}
MAMBA2 = {"ssm__conv_kernel": 4, "ssm__inner_size": 2048, "ssm__state_size": 128, "ssm__time_step_rank": 32}
STATE2 = Mamba2State(num_heads=32, head_dim=64, state_size=128, num_groups=8, conv_kernel=4)
EIGHT = FullAttention(num_kv_heads=8, head_dim=64)


@pytest.mark.parametrize(
    ("arch", "keys", "caches"),
    [
        (
            "jamba",
            {
                "attention__head_count_kv": [0, 0, 8, 0],
                **{"ssm__conv_kernel": 4, "ssm__inner_size": 2048, "ssm__state_size": 16},
                "ssm__time_step_rank": 64,
            },
            [(Mamba1State(intermediate_size=2048, state_size=16, conv_kernel=4), 3), (EIGHT, 1)],
        ),
        (
            "granitehybrid",
            {"attention__head_count_kv": [0, 8, 0, 0], **MAMBA2, "ssm__group_count": 8},
            [(STATE2, 3), (EIGHT, 1)],
        ),
        (
            "falcon-h1",
            {"attention__head_count_kv": 8, **MAMBA2, "ssm__group_count": 8},
            [(EIGHT, 4), (STATE2, 4)],
        ),
        (
            "nemotron_h",
            {
                "attention__head_count_kv": [0, 0, 8, 0],
                "feed_forward_length": [0, 2048, 0, 0],
                **MAMBA2,
                "ssm__group_count": 8,
            },
            [(STATE2._replace(ssm_dtype="float32"), 2), (EIGHT, 1)],
        ),
        (
            "mamba",
            {
                **{"attention__head_count": 0, "feed_forward_length": 0, "ssm__conv_kernel": 4},
                **{"ssm__inner_size": 2048, "ssm__state_size": 16, "ssm__time_step_rank": 64},
            },
            [(Mamba1State(intermediate_size=2048, state_size=16, conv_kernel=4), 4)],
        ),
        (
            "mamba2",
            {"attention__head_count": 0, "feed_forward_length": 0, **MAMBA2, "ssm__group_count": 8},
            [(STATE2, 4)],
        ),
        (
            "lfm2",
            {"attention__head_count_kv": [0, 8, 0, 8], "shortconv__l_cache": 3},
            [(ShortConv(1024, 3), 2), (EIGHT, 2)],
        ),
        (
            "qwen3next",
            {"attention__head_count_kv": 8, "ssm__group_count": 16, **MAMBA2},
            [
                (
                    GatedDeltaNet(
                        num_key_heads=16,
                        key_head_dim=128,
                        num_value_heads=32,
                        value_head_dim=64,
                        conv_kernel=4,
                    ),
                    3,
                ),
                (EIGHT, 1),
            ],
        ),
    ],
)
def test_layers_with_states_are_told_from_the_keys(
    tmp_path: Path, arch: str, keys: dict[str, object], caches: list[object]
) -> None:
    path = write_gguf(tmp_path / "m.gguf", keys_of(arch, SMALL, **keys), ONE)
    assert load_model(str(path)).attention == tuple(caches)


def llama_tensors(config: Config, kind: str) -> list[Tensor]:
    """All tensors of a Llama of which the matrices are of one type, as a converter names them."""
    hidden, width = config["hidden_size"], config["intermediate_size"]
    kv = config["num_key_value_heads"] * hidden // config["num_attention_heads"]
    tensors: list[Tensor] = [
        ("token_embd.weight", kind, [hidden, config["vocab_size"]]),
        ("output.weight", "Q6_K", [hidden, config["vocab_size"]]),
        ("output_norm.weight", "F32", [hidden]),
        ("rope_freqs.weight", "F32", [64]),
    ]
    for layer in range(config["num_hidden_layers"]):
        shapes = {"attn_q": [hidden, hidden], "attn_k": [hidden, kv], "attn_v": [hidden, kv]}
        shapes |= {"attn_output": [hidden, hidden], "ffn_down": [width, hidden]}
        shapes |= {"ffn_gate": [hidden, width], "ffn_up": [hidden, width]}
        tensors += [(f"blk.{layer}.{name}.weight", kind, shape) for name, shape in shapes.items()]
        tensors += [(f"blk.{layer}.{name}_norm.weight", "F32", [hidden]) for name in ("attn", "ffn")]
    return tensors


LLAMA_8B = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "max_position_embeddings": 131072,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}


def test_parameters_and_bytes_of_llama_3_1_8b(tmp_path: Path) -> None:
    metadata = keys_of("llama", LLAMA_8B) | {"general.file_type": 2}
    path = write_gguf(tmp_path / "llama.gguf", metadata, llama_tensors(LLAMA_8B, "Q4_0"))
    model = load_model(str(path))
    assert model.attention == ((FullAttention(num_kv_heads=8, head_dim=128), 32),)
    # As Hugging Face counts the model; the frequencies of the rotary embedding are no parameters.
    assert model.weights.parameters == 8_030_261_248
    table = 4096 * 128256
    layer = 4096 * (4096 + 1024 + 1024 + 4096) + 3 * 4096 * 14336
    norms = 65 * 4096 + 64
    stored = (table + 32 * layer) // 32 * 18 + table // 256 * 210 + norms * 4
    assert model.weights.stored_bytes == stored == 4_653_375_744
    assert (model.weights.source, model.weights.quantization) == ("gguf", "gguf")
    assert [scaling.kind for scaling in model.position_scalings] == ["llama3"]


def test_the_vocabulary_is_counted_from_the_tokens(tmp_path: Path) -> None:
    config = {key: value for key, value in LLAMA_8B.items() if key != "vocab_size"}
    metadata = keys_of("llama", config) | {"tokenizer.ggml.tokens": [f"t{i}" for i in range(321)]}
    assert load_model(str(write_gguf(tmp_path / "m.gguf", metadata, ONE))).vocab_size == 321


def test_heads_by_layer_are_counted_apart(tmp_path: Path) -> None:
    metadata = keys_of("deci", LLAMA_8B | {"num_hidden_layers": 5}, attention__head_count_kv=[8, 4, 0, 8, 8])
    model = load_model(str(write_gguf(tmp_path / "m.gguf", metadata, ONE)))
    assert model.attention == ((FullAttention(8, 128), 3), (FullAttention(4, 128), 1))
    assert model.num_kv_heads == 8


def test_layers_that_only_draft_are_told_apart(tmp_path: Path) -> None:
    metadata = keys_of("glm4moe", LLAMA_8B | {"num_hidden_layers": 3}, nextn_predict_layers=1)
    tensors = [*ONE, *((f"blk.{layer}.ffn_up.weight", "F32", [10]) for layer in range(3))]
    model = read_gguf(write_gguf(tmp_path / "m.gguf", metadata, tensors))
    config = config_of(model, where="m.gguf")
    assert config["num_hidden_layers"] == 2
    stored = stored_weights(model, config)
    assert (stored.stored_bytes, stored.draft_bytes) == (2 * 64 * 100 * 2 + 2 * 40, 40)


@pytest.mark.parametrize(
    ("metadata", "what", "hint"),
    [
        ({"general.architecture": "lama"}, 'unknown GGUF architecture "lama"', "did you mean llama"),
        ({"general.architecture": "clip"}, 'unknown GGUF architecture "clip"', "lists all"),
        ({"general.architecture": 7}, "general.architecture is missing", "language model"),
        ({}, "general.architecture is missing", "language model"),
        ({"general.architecture": "llama"}, "num_hidden_layers is missing", "config.json"),
        (keys_of("llama", LLAMA_8B, block_count=2**31), "num_hidden_layers is 2147483648, above 10,000", ""),
        (keys_of("llama", LLAMA_8B, embedding_length="x"), 'hidden_size is "x", not a whole number', ""),
        (keys_of("llama", LLAMA_8B, attention__head_count=(I32, -3)), "num_attention_heads is -3", ""),
        (
            keys_of("llama", LLAMA_8B, attention__head_count_kv=[8, 3]),
            "attention.head_count_kv has 2 values, block_count is 32",
            "",
        ),
        (
            keys_of("llama", LLAMA_8B, expert_count=8, expert_used_count=9),
            "num_experts_per_tok 9 is above",
            "",
        ),
        (
            keys_of("nemotron_h", LLAMA_8B, attention__head_count_kv=[0] * 32),
            "nemotron_h.ssm.conv_kernel is missing",
            "",
        ),
        (
            keys_of("nemotron_h", LLAMA_8B, ssm__conv_kernel=4, ssm__state_size=128),
            "ssm_state_size says that layers keep a state, but no field says which layers",
            "",
        ),
        (
            keys_of("gemma3", LLAMA_8B, attention__sliding_window=5, attention__sliding_window_pattern=[1]),
            "attention.sliding_window_pattern has 1 values, block_count is 32",
            "",
        ),
    ],
)
def test_what_cannot_be_a_model_is_refused(
    tmp_path: Path, metadata: dict[str, object], what: str, hint: str
) -> None:
    path = write_gguf(tmp_path / "m.gguf", metadata, ONE)
    with pytest.raises(InputError) as caught:
        load_model(str(path))
    assert what in caught.value.what
    assert hint in (caught.value.hint or "")
    assert str(path) in (caught.value.where or "")


def test_set_replaces_a_field(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", keys_of("llama", LLAMA_8B), ONE)
    model = load_model(str(path), overrides=["num_hidden_layers=2"])
    assert model.num_layers == 2
    assert model.weights.source == "config"
