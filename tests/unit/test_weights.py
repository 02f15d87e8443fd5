"""Parameters counted from a config: sums by hand, and a table counted by transformers."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from kvplan.config import list_models, load_model
from kvplan.core.families import weight_groups
from kvplan.core.model import ModelSpec
from kvplan.core.weights import Ranks, Stage, WeightGroup, Weights, parameters_of

COUNTS = Path(__file__).resolve().parents[1] / "data" / "parameter_counts.csv"


def counted() -> list[tuple[str, int]]:
    lines = [line for line in COUNTS.read_text().splitlines() if not line.startswith("#")]
    return [(row["hf_id"], int(row["total_params"])) for row in csv.DictReader(lines)]


def elements(model: ModelSpec, *ends: str) -> int:
    """Elements of the weights whose module's name ends so."""
    return sum(group.elements for group in model.weights.groups if group.name.endswith(ends))


def norms_and_biases(model: ModelSpec) -> int:
    return sum(group.elements for group in model.weights.groups if group.kind == "vector")


@pytest.mark.parametrize(("hf_id", "total"), counted())
def test_a_catalogue_model_has_as_many_parameters_as_transformers_counts(hf_id: str, total: int) -> None:
    weights = load_model(hf_id).weights
    assert weights.parameters == parameters_of(weights.groups) == total


def test_the_table_covers_every_model_that_is_counted_and_has_a_reference() -> None:
    # The classes of four are not in transformers; the shapes of most others are believed, not seen.
    without_reference = {
        "01-ai/Yi-6B",
        "ByteDance-Seed/Seed-OSS-36B-Instruct",
        "CohereLabs/c4ai-command-r7b-12-2024",
        "MiniMaxAI/MiniMax-Text-01",
        "Qwen/Qwen-72B",
        "Qwen/Qwen3.5-9B",
        "XiaomiMiMo/MiMo-7B-Base",
        "deepseek-ai/DeepSeek-V4-Flash",
        "google/gemma-4-31B-it",
        "ibm-granite/granite-4.0-h-small",
        "internlm/internlm-20b",
        "internlm/internlm2-20b",
        "meta-llama/Llama-3.2-11B-Vision-Instruct",
        "mistralai/Mistral-Small-24B-Instruct-2501",
        "mistralai/Mamba-Codestral-7B-v0.1",
        "moonshotai/Kimi-Linear-48B-A3B-Instruct",
        "nvidia/Nemotron-H-8B-Base-8K",
        "openai/whisper-large-v3",
        "tiiuae/Falcon-H1-34B-Instruct",
        "zai-org/GLM-4.5",
        "zai-org/GLM-5.2",
        "zai-org/glm-4-9b-chat",
    }
    in_catalogue = {m.hf_id for m in list_models() if m.weights.source == "config" and m.weights.parameters}
    assert in_catalogue - {hf_id for hf_id, _ in counted()} == without_reference


def test_llama_2_13b_by_hand() -> None:
    model = load_model("llama-2-13b")
    h, layers, mlp, vocab = 5120, 40, 13824, 32000
    assert elements(model, "embed_tokens") == elements(model, "lm_head") == vocab * h == 163_840_000
    assert elements(model, "q_proj", "o_proj") == layers * 2 * h * h == 2_097_152_000
    assert elements(model, "k_proj", "v_proj") == layers * 2 * h * h
    assert elements(model, "gate_proj", "up_proj", "down_proj") == layers * 3 * h * mlp == 8_493_465_600
    assert norms_and_biases(model) == (2 * layers + 1) * h == 414_720
    total = 2 * 163_840_000 + 2 * 2_097_152_000 + 8_493_465_600 + 414_720
    assert total == 13_015_864_320 == model.weights.parameters


def test_llama_3_1_8b_by_hand() -> None:
    # Grouped-query attention: 8 KV heads of 128 for 32 query heads.
    model = load_model("llama-3.1-8b")
    h, layers, mlp, vocab, kv = 4096, 32, 14336, 128256, 8 * 128
    assert elements(model, "q_proj", "o_proj") == layers * 2 * h * h == 1_073_741_824
    assert elements(model, "k_proj", "v_proj") == layers * 2 * h * kv == 268_435_456
    assert elements(model, "gate_proj", "up_proj", "down_proj") == layers * 3 * h * mlp == 5_637_144_576
    assert elements(model, "embed_tokens") == vocab * h == 525_336_576
    assert norms_and_biases(model) == 65 * h == 266_240
    total = 1_073_741_824 + 268_435_456 + 5_637_144_576 + 2 * 525_336_576 + 266_240
    assert total == 8_030_261_248 == model.weights.parameters


def test_mixtral_by_hand_and_what_one_token_uses() -> None:
    # 8 experts of which 2 are used, in all 32 layers.
    model = load_model("mixtral-8x7b")
    h, layers, expert_width, vocab = 4096, 32, 14336, 32000
    expert = 3 * h * expert_width
    experts = [group for group in model.weights.groups if group.kind == "experts"]
    assert sum(group.elements for group in experts) == layers * 8 * expert == 45_097_156_608
    assert sum(group.active_elements for group in experts) == layers * 2 * expert == 11_274_289_152
    assert elements(model, "mlp.gate") == layers * 8 * h == 1_048_576
    attention = layers * (2 * h * h + 2 * h * 1024)
    rest = 2 * vocab * h + attention + 65 * h
    assert model.weights.parameters == 45_097_156_608 + 1_048_576 + rest == 46_702_792_704
    # One row of the embedding table, all of the head.
    active = 11_274_289_152 + 1_048_576 + (h + vocab * h) + attention + 65 * h
    assert model.weights.active_parameters == active == 12_748_857_344


def test_opt_13b_by_hand() -> None:
    # Biases everywhere, norms with biases, learned positions with 2 unused rows, a tied head.
    model = load_model("opt-13b")
    h, layers, mlp, vocab = 5120, 40, 20480, 50272
    assert elements(model, "embed_tokens") == vocab * h
    assert elements(model, "embed_positions") == (2048 + 2) * h
    assert elements(model, "q_proj", "o_proj", "k_proj", "v_proj") == layers * 4 * h * h
    assert elements(model, "up_proj", "down_proj") == layers * 2 * h * mlp
    # Two norms, four biases of attention and two of the MLP in a layer, one final norm.
    assert norms_and_biases(model) == layers * (2 * 2 * h + 4 * h + mlp + h) + 2 * h
    assert model.weights.parameters == 12_853_473_280


def test_gpt2_by_hand() -> None:
    h, layers = 768, 12
    table, positions = 50257 * h, 1024 * h
    layer = (h * 3 * h + 3 * h) + (h * h + h) + (h * 4 * h + 4 * h) + (4 * h * h + h) + 2 * 2 * h
    assert table + positions + layers * layer + 2 * h == 124_439_808
    assert load_model("gpt2").weights.parameters == 124_439_808


def test_a_tied_table_is_used_whole_as_the_head() -> None:
    weights = load_model("qwen3-0.6b").weights
    assert not [group for group in weights.groups if group.name == "lm_head"]
    assert weights.head_parameters == 151936 * 1024
    assert weights.active_parameters == weights.parameters


def test_an_unknown_architecture_has_no_groups() -> None:
    assert weight_groups("NoSuchForCausalLM", {}) == ()


def test_splits_follow_tensor_parallelism() -> None:
    splits = {
        group.name.rpartition(".")[2]: group.split for group in load_model("qwen3-30b-a3b").weights.groups
    }
    assert splits == {
        "embed_tokens": "vocab",
        "lm_head": "vocab",
        "norm": "replicated",
        "q_proj": "rows",
        "k_proj": "kv_heads",
        "v_proj": "kv_heads",
        "o_proj": "columns",
        "q_norm": "replicated",
        "k_norm": "replicated",
        "input_layernorm": "replicated",
        "post_attention_layernorm": "replicated",
        "gate_proj": "rows",
        "up_proj": "rows",
        "down_proj": "columns",
        "gate": "replicated",
    }


def test_bytes_of_one_rank_by_hand() -> None:
    # Llama-3.1-8B on 2 ranks: tables, matrices and KV projections halve, norms do not.
    model = load_model("llama-3.1-8b")
    halved = (8_030_261_248 - 266_240) // 2
    assert model.weights.rank_bytes("bfloat16", Ranks(2, num_kv_heads=8)) == 2 * (halved + 266_240)
    # On 16 ranks each of the 8 KV heads is held twice, so a rank has 1 / 8 of the KV projections.
    rest = 8_030_261_248 - 266_240 - 268_435_456
    assert model.weights.rank_bytes("bfloat16", Ranks(16, num_kv_heads=8)) == 2 * (
        rest // 16 + 268_435_456 // 8 + 266_240
    )


def test_a_vocabulary_is_padded_before_it_is_divided() -> None:
    # 50257 rows are padded to 50304 = 64 x 786; on 4 ranks 12576 rows each.
    table = WeightGroup("embed_tokens", 50257, 768, "vocab", "head", "ends")
    assert table.on_rank(Ranks(4)) == (1, 12576, 768)


def test_a_group_of_kv_heads_divides_by_them() -> None:
    for model in list_models():
        for group in model.weights.groups:
            if group.split == "kv_heads":
                assert group.rows % (group.heads or model.num_kv_heads) == 0, model.name
            assert 0 < group.active_elements <= group.elements, model.name


def experts(weights: Weights) -> int:
    return sum(group.elements for group in weights.groups if group.kind == "experts")


def test_experts_are_divided_among_tensor_and_data_parallel_ranks() -> None:
    # Qwen3-30B-A3B on 2 x 4 ranks: 8 ranks share the experts, 2 the rest.
    weights = load_model("qwen3-30b-a3b").weights
    routed = 48 * 128 * 3 * 2048 * 768
    assert experts(weights) == routed
    shared = weights.rank_bytes("bfloat16", Ranks(2, num_kv_heads=4))
    assert shared is not None
    for expert_parallel in (False, True):
        held = weights.rank_bytes(
            "bfloat16", Ranks(2, 4, enable_expert_parallel=expert_parallel, num_kv_heads=4)
        )
        # Without data parallelism a rank has half of the experts.
        assert held == shared - 2 * (routed // 2 - routed // 8)


def test_the_rank_with_most_experts_counts() -> None:
    # 128 experts on 3 ranks: 43, 43 and 42 whole ones.
    weights = load_model("qwen3-30b-a3b").weights
    one, three = (
        weights.rank_bytes("bfloat16", Ranks(1, size, enable_expert_parallel=True, num_kv_heads=4))
        for size in (1, 3)
    )
    assert one is not None
    assert three == one - 2 * 48 * (128 - 43) * 3 * 2048 * 768


def stages(model: ModelSpec, *layers: int) -> list[int]:
    """Bytes of each stage of a pipeline whose stages have so many layers."""
    sizes, first = [], 0
    for i, number in enumerate(layers):
        size = model.weights.rank_bytes(
            "bfloat16",
            Ranks(1, num_kv_heads=model.num_kv_heads),
            Stage(first, first + number, is_first=i == 0, is_last=i == len(layers) - 1),
        )
        assert size is not None
        sizes.append(size)
        first += number
    assert first == model.num_layers
    return sizes


def test_stages_of_a_pipeline_by_hand() -> None:
    # Llama-3.1-8B as 16 + 16 layers: the table is on the first stage, the head and the norm on the last.
    h, table = 4096, 128256 * 4096
    layer = 2 * h * h + 2 * h * 1024 + 3 * h * 14336 + 2 * h
    assert stages(load_model("llama-3.1-8b"), 16, 16) == [
        2 * (table + 16 * layer),
        2 * (table + 16 * layer + h),
    ]


def test_a_tied_table_is_on_both_ends_of_a_pipeline() -> None:
    model = load_model("qwen3-0.6b")
    first, middle, last = stages(model, 9, 10, 9)
    whole = model.weights.total_bytes("bfloat16")
    table = 2 * 151936 * 1024
    assert whole is not None
    assert first + middle + last == whole + table
    assert middle == 10 * (whole - table - 2 * 1024) // 28


def test_some_models_hold_their_table_on_every_stage() -> None:
    # vLLM's classes of Mixtral, Gemma and others build embed_tokens without asking for the stage.
    model = load_model("mixtral-8x7b")
    whole = model.weights.total_bytes("bfloat16")
    assert whole is not None
    assert sum(stages(model, 8, 8, 8, 8)) == whole + 3 * 2 * 32000 * 4096


def test_real_configs_count_like_transformers(shared: Path) -> None:
    sizing = shared / "sizing"
    with (sizing / "model_facts.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["config_file"]]
    assert len(rows) == 40
    for row in rows:
        weights = load_model(str(sizing / row["config_file"])).weights
        assert weights.parameters == int(row["total_params"]), row["hf_id"]
