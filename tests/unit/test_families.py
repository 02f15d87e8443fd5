"""Weights of every family: sums by hand, and small models counted by transformers.

tests/data/family_counts.jsonl has small configs with the parameters that transformers 5.24.0 counts for them on the
meta device (benchmarks/count_parameters.py).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvplan.config import load_model
from kvplan.core.architectures import ARCHITECTURES
from kvplan.core.families import weight_groups
from kvplan.core.model import ModelSpec
from kvplan.core.weights import Ranks, Stage, WeightGroup, Weights, parameters_of
from kvplan.errors import InputError
from kvplan.hf_config import Origin, read_fields

COUNTS = Path(__file__).resolve().parents[1] / "data" / "family_counts.jsonl"
CASES = [json.loads(line) for line in COUNTS.read_text(encoding="utf-8").splitlines()]


def groups_of(case: dict[str, Any]) -> tuple[WeightGroup, ...]:
    name = case["architectures"][0]
    config = case["config"]
    flat = {**config, **config.get("text_config", {})}
    flat["tie_word_embeddings"] = config["tie_word_embeddings"]
    return weight_groups(name, read_fields(flat, ARCHITECTURES[name], {}, Origin("a test", name)))


def elements(model: ModelSpec, *ends: str, place: str = "layers") -> int:
    """Elements of the decoder's weights whose module's name ends so."""
    return sum(g.elements for g in model.weights.groups if g.place == place and g.name.endswith(ends))


@pytest.mark.parametrize("case", CASES, ids=[f"{case['architectures'][0]}" for case in CASES])
def test_a_family_has_as_many_parameters_as_transformers_counts(case: dict[str, Any]) -> None:
    assert parameters_of(groups_of(case)) == case["parameters"]


@pytest.mark.parametrize("case", CASES, ids=[f"{case['architectures'][0]}" for case in CASES])
def test_ranks_and_stages_add_up(case: dict[str, Any]) -> None:
    groups = groups_of(case)
    weights = Weights(parameters_of(groups), "config", groups)
    layers = max(i for g in groups if g.place == "layers" for i in g.layers) + 1
    whole = weights.total_bytes("bfloat16")
    assert whole is not None
    parts = []
    for i in range(layers):
        part = weights.rank_bytes(
            "bfloat16", Ranks(1, num_kv_heads=1), Stage(i, i + 1, is_first=i == 0, is_last=i == layers - 1)
        )
        assert part is not None
        parts.append(part)
    ends = sum(2 * g.elements for g in groups if g.place == "ends") if layers > 1 else 0
    every = (layers - 1) * sum(g.elements * (g.element_bytes or 2) for g in groups if g.place == "all")
    assert sum(parts) == whole + ends + every
    for size in (2, 4):
        rank = weights.rank_bytes("bfloat16", Ranks(size, num_kv_heads=2))
        assert rank is not None
        assert whole <= rank * size
        assert rank < whole


def test_deepseek_v3_by_hand() -> None:
    model = load_model("deepseek-v3")
    h, layers, heads, vocab = 7168, 61, 128, 129280
    q_a, q_b = 1536 * h, heads * (128 + 64) * 1536
    kv_a, kv_b = (512 + 64) * h, heads * (128 + 128) * 512
    out = h * heads * 128
    assert elements(model, "q_a_proj", "q_b_proj") == layers * (q_a + q_b)
    assert elements(model, "kv_a_proj_with_mqa", "kv_b_proj") == layers * (kv_a + kv_b)
    norms = 1536 + 512 + 2 * h
    latent = layers * (q_a + q_b + kv_a + kv_b + out + norms)
    dense = 3 * 3 * h * 18432
    # 58 layers with 256 experts of 2048, one shared expert and a router.
    sparse = 58 * ((256 + 1) * 3 * h * 2048 + 256 * h)
    total = 2 * vocab * h + latent + dense + sparse + h
    assert total == 671_026_404_352 == model.weights.parameters
    # Eight of the experts are used: 36.6 billion parameters, with one row of the table.
    unused = 58 * (256 - 8) * 3 * h * 2048 + (vocab - 1) * h
    assert model.weights.active_parameters == total - unused == 36_625_610_752


def test_the_layer_for_multi_token_prediction_is_loaded_only_to_draft() -> None:
    # DeepSeek-V3's layer 61: two norms of inputs, a projection of both, a norm, and a layer with experts.
    model = load_model("deepseek-v3")
    h = 7168
    attention = 1536 * h + 24576 * 1536 + 576 * h + 32768 * 512 + h * 16384 + 1536 + 512 + 2 * h
    experts = 257 * 3 * h * 2048 + 256 * h
    draft = 3 * h + 2 * h * h + attention + experts
    bias = 4 * 256
    groups = [g for g in model.weights.groups if g.place == "draft"]
    assert sum(g.elements for g in groups) == draft + 256
    plain = model.weights._replace(format=None)
    with_drafts, without = plain.total_bytes("bfloat16", drafts=True), plain.total_bytes("bfloat16")
    assert with_drafts is not None
    assert without is not None
    assert with_drafts - without == 2 * draft + bias


def test_deepseek_v3_2_has_an_indexer_on_every_rank() -> None:
    h, layers, heads, size = 7168, 61, 64, 128
    model = load_model("deepseek-v3.2")
    indexer = layers * (heads * size * 1536 + size * h + heads * h + 2 * size)
    assert load_model("deepseek-v3").weights.parameters == 671_026_404_352
    assert model.weights.parameters == 671_026_404_352 + indexer == 671_877_929_216
    assert {g.split for g in model.weights.groups if ".indexer." in g.name} == {"replicated"}


def test_qwen3_next_by_hand() -> None:
    # 36 gated delta nets and 12 attention layers with a gate, experts in all.
    model = load_model("qwen3-next-80b")
    h, key, value = 2048, 16 * 128, 32 * 128
    net = (2 * key + 2 * value) * h + 2 * 32 * h + 4 * (2 * key + value) + 2 * 32 + 128 + h * value
    assert elements(model, "linear_attn.in_proj_qkvz") == 36 * (2 * key + 2 * value) * h
    full = 2 * 16 * 256 * h + 2 * 2 * 256 * h + h * 16 * 256 + 2 * 256
    sparse = 512 * 3 * h * 512 + 512 * h + 3 * h * 512 + h
    total = 2 * 151936 * h + 36 * net + 12 * full + 48 * (sparse + 2 * h) + h
    assert total == 79_674_391_296 == model.weights.parameters


def test_nemotron_h_56b_by_hand() -> None:
    model = load_model("nemotron-h-56b")
    h, inner, groups, state, heads = 8192, 256 * 64, 8, 256, 256
    mamba = (2 * inner + 2 * groups * state + heads) * h + h * inner + inner + 3 * heads
    mamba += (4 + 1) * (inner + 2 * groups * state)
    mlp = 2 * h * 32768
    attention = 2 * h * h + 2 * 8 * 128 * h
    pattern = "M-M-M-M*-" + 9 * "M-M-M-M-M*-" + "M-M-M-M-M-"
    assert len(pattern) == 118
    total = 2 * 131072 * h + h + 118 * h
    total += pattern.count("M") * mamba + pattern.count("-") * mlp + pattern.count("*") * attention
    assert total == 56_324_350_464 == model.weights.parameters


def test_groups_of_a_state_are_repeated_like_key_value_heads() -> None:
    # Nemotron-H has 8 groups; on 16 ranks each holds one, twice over all.
    model = load_model("nemotron-h-56b")
    grouped = [g for g in model.weights.groups if g.name.endswith("mixer.in_proj") and g.split == "kv_heads"]
    assert [(g.rows, g.heads) for g in grouped] == [(2 * 8 * 256, 8)]


def test_gemma_4_26b_by_hand() -> None:
    # 25 sliding layers with 8 heads of 256, 5 full ones with 2 heads of 512 whose values are their keys.
    model = load_model("gemma-4-26b-a4b")
    h, heads = 2816, 16
    sliding = 2 * heads * 256 * h + 2 * 8 * 256 * h + 2 * 256
    full = 2 * heads * 512 * h + 2 * 512 * h + 2 * 512
    dense = 3 * h * 2112 + 4 * h
    sparse = 128 * 3 * h * 704 + 128 * h + h + 128 + 3 * h
    text = 262144 * h + h + 25 * sliding + 5 * full + 30 * (dense + sparse)
    v = 1152
    tower = 768 * v + 2 * 10240 * v + 27 * (4 * v * v + 2 * 72 + 3 * v * 4304 + 4 * v) + h * v
    assert text + tower == 25_805_933_872 == model.weights.parameters


def test_llama_4_loads_its_encoder_too() -> None:
    # transformers has a class for the text alone, whose parameters these are.
    model = load_model("llama-4-scout")
    tower = sum(g.elements for g in model.weights.groups if g.kind == "tower")
    assert tower == 455_178_240
    held = model.weights.total_bytes("bfloat16")
    assert model.weights.parameters is not None
    assert held == 2 * (model.weights.parameters + tower)


def test_an_encoder_is_on_the_first_stage_and_idle_for_text() -> None:
    model = load_model("qwen3-vl-8b")
    towers = [g for g in model.weights.groups if g.kind == "tower"]
    assert {g.place for g in towers} == {"first"}
    held = model.weights.total_bytes("bfloat16")
    table = 2 * 151936 * 4096
    assert held is not None
    parts = model.weights.rank_parts("bfloat16", Ranks(num_kv_heads=8))
    read = sum(part.bytes for part in parts if part.group.kind not in ("table", "tower"))
    assert read == held - table - 2 * sum(g.elements for g in towers)


def test_what_a_config_lacks_is_named_once() -> None:
    fields = {"num_hidden_layers": 2, "hidden_size": 8, "vocab_size": 10, "num_attention_heads": 2}
    with pytest.raises(InputError) as error:
        weight_groups("DeepseekV3ForCausalLM", fields)
    assert error.value.what.startswith("kv_lora_rank is missing; qk_rope_head_dim is missing")
    with pytest.raises(InputError, match='hidden_size is "wide", no size'):
        weight_groups("LlamaForCausalLM", {**fields, "hidden_size": "wide"})


def test_layers_that_follow_an_indexer_have_none() -> None:
    # GLM-5.2 looks for keys in layers 0 to 2 and in each fourth after; the layer that drafts always does.
    model = load_model("glm-5.2")
    indexers = [g for g in model.weights.groups if g.name.endswith("indexer.wq_b")]
    assert {g.place: len(g.layers) for g in indexers} == {"layers": 21, "draft": 1}
    assert indexers[0].layers[:5] == (0, 1, 2, 6, 10)


def test_deepseek_v4_has_experts_of_four_bits() -> None:
    # 43 layers of 256 experts of 2048: half a byte each and a scale of a byte for 32.
    model = load_model("deepseek-v4-flash")
    experts = [g for g in model.weights.groups if g.kind == "experts" and g.place == "layers"]
    elements = 43 * 256 * 3 * 4096 * 2048
    assert sum(g.elements for g in experts) == elements
    only = Weights(elements, "config", tuple(experts), None, model.weights.format)
    assert only.total_bytes("bfloat16") == elements // 2 + elements // 32


@pytest.mark.parametrize("field", ["mamba_d_state", "ssm_state_size"])
def test_a_changed_state_changes_weights_under_both_its_names(field: str) -> None:
    changed = load_model("granite-4.0-h-small", overrides=[f"{field}=64"])
    # in_proj and conv1d (weight and bias) of 36 layers make 2 x 1 group of states, which had 128 each.
    fewer = 36 * 2 * (128 - 64) * (4096 + 4 + 1)
    assert changed.weights.parameters == load_model("granite-4.0-h-small").weights.parameters - fewer
