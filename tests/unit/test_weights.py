"""Parameters counted from a config: sums by hand, and a table counted by transformers."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from kvplan.config import list_models, load_model
from kvplan.core.model import ModelSpec, WeightGroup
from kvplan.core.weights import weight_groups

COUNTS = Path(__file__).resolve().parents[1] / "data" / "parameter_counts.csv"


def counted() -> list[tuple[str, int]]:
    lines = [line for line in COUNTS.read_text().splitlines() if not line.startswith("#")]
    return [(row["hf_id"], int(row["total_params"])) for row in csv.DictReader(lines)]


def groups_of(model: ModelSpec) -> dict[str, WeightGroup]:
    return {group.name: group for group in model.weights.groups}


@pytest.mark.parametrize(("hf_id", "total"), counted())
def test_a_catalogue_model_has_as_many_parameters_as_transformers_counts(hf_id: str, total: int) -> None:
    weights = load_model(hf_id).weights
    assert weights.parameters == sum(group.elements for group in weights.groups) == total


def test_the_table_covers_every_model_that_is_counted_and_has_a_reference() -> None:
    # The classes of four are not in transformers; the shapes of three are from memory.
    without_reference = {
        "Qwen/Qwen-72B",
        "internlm/internlm-20b",
        "internlm/internlm2-20b",
        "XiaomiMiMo/MiMo-7B-Base",
        "01-ai/Yi-6B",
        "CohereLabs/c4ai-command-r7b-12-2024",
        "zai-org/GLM-4.5",
    }
    in_catalogue = {m.hf_id for m in list_models() if m.weights.source == "config" and m.weights.parameters}
    assert in_catalogue - {hf_id for hf_id, _ in counted()} == without_reference


def test_llama_2_13b_by_hand() -> None:
    groups = groups_of(load_model("llama-2-13b"))
    h, layers, mlp, vocab = 5120, 40, 13824, 32000
    assert groups["embedding"].elements == vocab * h == 163_840_000
    assert groups["lm_head"].elements == vocab * h
    assert groups["attention"].elements == layers * 2 * h * h == 2_097_152_000
    assert groups["attention kv"].elements == layers * 2 * h * h
    assert groups["mlp"].elements == layers * 3 * h * mlp == 8_493_465_600
    assert groups["norms and biases"].elements == (2 * layers + 1) * h == 414_720
    total = 2 * 163_840_000 + 2 * 2_097_152_000 + 8_493_465_600 + 414_720
    assert total == 13_015_864_320 == load_model("llama-2-13b").weights.parameters


def test_llama_3_1_8b_by_hand() -> None:
    # Grouped-query attention: 8 KV heads of 128 for 32 query heads.
    groups = groups_of(load_model("llama-3.1-8b"))
    h, layers, mlp, vocab, kv = 4096, 32, 14336, 128256, 8 * 128
    assert groups["attention"].elements == layers * 2 * h * h == 1_073_741_824
    assert groups["attention kv"].elements == layers * 2 * h * kv == 268_435_456
    assert groups["mlp"].elements == layers * 3 * h * mlp == 5_637_144_576
    assert groups["embedding"].elements == vocab * h == 525_336_576
    assert groups["norms and biases"].elements == 65 * h == 266_240
    total = 1_073_741_824 + 268_435_456 + 5_637_144_576 + 2 * 525_336_576 + 266_240
    assert total == 8_030_261_248 == load_model("llama-3.1-8b").weights.parameters


def test_mixtral_by_hand_and_what_one_token_uses() -> None:
    # 8 experts of which 2 are used, in all 32 layers.
    model = load_model("mixtral-8x7b")
    groups = groups_of(model)
    h, layers, expert_width, vocab = 4096, 32, 14336, 32000
    expert = 3 * h * expert_width
    assert groups["experts"].elements == layers * 8 * expert == 45_097_156_608
    assert groups["experts"].active_elements == layers * 2 * expert == 11_274_289_152
    assert groups["router"].elements == layers * 8 * h == 1_048_576
    attention = layers * (2 * h * h + 2 * h * 1024)
    rest = 2 * vocab * h + attention + 65 * h
    assert model.weights.parameters == 45_097_156_608 + 1_048_576 + rest == 46_702_792_704
    # One row of the embedding table, all of the head.
    active = 11_274_289_152 + 1_048_576 + (h + vocab * h) + attention + 65 * h
    assert model.weights.active_parameters == active == 12_748_857_344


def test_opt_13b_by_hand() -> None:
    # Biases everywhere, norms with biases, learned positions with 2 unused rows, a tied head.
    groups = groups_of(load_model("opt-13b"))
    h, layers, mlp, vocab = 5120, 40, 20480, 50272
    assert groups["embedding"].elements == vocab * h
    assert groups["positions"].elements == (2048 + 2) * h
    assert groups["positions"].active_elements == h
    assert groups["attention"].elements == layers * (2 * h * h + h)
    assert groups["attention kv"].elements == layers * 2 * (h * h + h)
    assert groups["mlp"].elements == layers * (2 * h * mlp + mlp)
    # Two norms and two row-parallel biases a layer, one final norm.
    assert groups["norms and biases"].elements == layers * (2 * 2 * h + 2 * h) + 2 * h
    assert sum(group.elements for group in groups.values()) == 12_853_473_280


def test_gpt2_by_hand() -> None:
    h, layers = 768, 12
    table, positions = 50257 * h, 1024 * h
    layer = (h * 3 * h + 3 * h) + (h * h + h) + (h * 4 * h + 4 * h) + (4 * h * h + h) + 2 * 2 * h
    assert table + positions + layers * layer + 2 * h == 124_439_808
    assert load_model("gpt2").weights.parameters == 124_439_808


def test_a_tied_table_is_used_whole_as_the_head() -> None:
    groups = groups_of(load_model("qwen3-0.6b"))
    assert "lm_head" not in groups
    assert groups["embedding"].active_elements == groups["embedding"].elements == 151936 * 1024


def test_an_architecture_without_a_layout_has_no_groups() -> None:
    assert weight_groups("DeepseekV3ForCausalLM", {"num_hidden_layers": 61}) == ()
    assert weight_groups("NoSuchForCausalLM", {}) == ()


def test_splits_follow_tensor_parallelism() -> None:
    splits = {name: group.split for name, group in groups_of(load_model("qwen3-30b-a3b")).items()}
    assert splits == {
        "embedding": "vocab",
        "lm_head": "vocab",
        "norms and biases": "replicated",
        "attention": "sharded",
        "attention kv": "kv_heads",
        "experts": "sharded",
        "router": "replicated",
    }


def test_bytes_of_one_rank_by_hand() -> None:
    # Llama-3.1-8B on 2 ranks: tables, matrices and KV projections halve, norms do not.
    model = load_model("llama-3.1-8b")
    halved = (8_030_261_248 - 266_240) // 2
    assert model.weights.per_gpu_bytes("bfloat16", 2, 8) == 2 * (halved + 266_240)
    # On 16 ranks each of the 8 KV heads is held twice, so a rank has 1 / 8 of the KV projections.
    rest = 8_030_261_248 - 266_240 - 268_435_456
    assert model.weights.per_gpu_bytes("bfloat16", 16, 8) == 2 * (rest // 16 + 268_435_456 // 8 + 266_240)


def test_a_vocabulary_is_padded_before_it_is_divided() -> None:
    # 50257 rows are padded to 50304 = 64 x 786; on 4 ranks 12576 rows each.
    table = groups_of(load_model("gpt2"))["embedding"]
    assert table.elements_per_rank(4, 12) == 12576 * 768


def test_a_group_of_kv_heads_divides_by_them() -> None:
    for model in list_models():
        for group in model.weights.groups:
            if group.split == "kv_heads":
                assert group.elements % model.num_kv_heads == 0, model.name
            assert 0 < group.active_elements <= group.elements, model.name


def test_real_configs_count_like_transformers(shared: Path) -> None:
    sizing = shared / "sizing"
    with (sizing / "model_facts.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["config_file"]]
    seen = 0
    for row in rows:
        weights = load_model(str(sizing / row["config_file"])).weights
        if weights.parameters is not None:
            seen += 1
            assert weights.parameters == int(row["total_params"]), row["hf_id"]
    assert seen >= 24
