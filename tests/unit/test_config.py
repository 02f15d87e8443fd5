"""Finding models and GPUs, reading their fields, and what is said about wrong ones."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml

import kvplan.safe_yaml
from kvplan.config import list_gpus, list_models, load_gpu, load_model
from kvplan.core.kv_cache import (
    STATES,
    CacheFormat,
    FullAttention,
    LinearAttention,
    SlidingWindow,
)
from kvplan.core.model import ModelSpec, PositionScaling
from kvplan.core.weights import Ranks
from kvplan.data import resource
from kvplan.errors import InputError
from kvplan.hf_config import draft_layers

LLAMA: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 100,
    "max_position_embeddings": 256,
    "torch_dtype": "bfloat16",
}
ENTRY = "{architectures: [LlamaForCausalLM], hidden_size: 64, intermediate_size: 128, vocab_size: 100"
ENTRY += ", num_attention_heads: 4, num_hidden_layers: 2}"


def config_file(folder: Path, *, without: tuple[str, ...] = (), **changes: object) -> str:
    """The path of a small Llama config with some fields changed."""
    config = {key: value for key, value in (LLAMA | changes).items() if key not in without}
    path = folder / "config.json"
    path.write_text(json.dumps(config, indent=1))
    return str(path)


def yaml_file(folder: Path, text: str) -> str:
    path = folder / "m.yaml"
    path.write_text(text)
    return str(path)


def kinds(model: ModelSpec) -> dict[str, int]:
    """How many layers have a cache of each kind."""
    return dict(Counter(item.cache.kind for item in model.layers))


def error_of(name: str, *overrides: str) -> InputError:
    with pytest.raises(InputError) as caught:
        load_model(name, overrides=overrides)
    return caught.value


# Names


@pytest.mark.parametrize(
    "name",
    ["llama-3.1-8b", "LLAMA-3.1-8B", "meta-llama/Meta-Llama-3.1-8B", "meta-llama/llama-3.1-8b-INSTRUCT"],
)
def test_a_name_an_alias_and_a_hub_id_mean_the_same_model(name: str) -> None:
    assert load_model(name).name == "llama-3.1-8b"


def test_llama_2_13b_as_the_first_readme_line_sizes_it() -> None:
    model = load_model("llama-2-13b")
    assert model.attention == ((FullAttention(num_kv_heads=40, head_dim=128), 40),)
    form = CacheFormat("float16", "float16")
    assert sum(item.cache.page_bytes(1, form) for item in model.layers) == 40 * 40 * 2 * 128 * 2 == 819_200
    assert (model.dtype, model.max_position_embeddings, model.weights.source) == ("float16", 4096, "config")


def test_an_unknown_name_is_met_with_near_ones() -> None:
    error = error_of("lama-2-13b")
    assert error.what == 'unknown model "lama-2-13b"'
    assert "llama-2-13b" in (error.hint or "")


def test_a_gguf_file_that_is_missing_is_named() -> None:
    assert error_of("models/x.GGUF").what == 'no such file: "models/x.GGUF"'


def test_the_catalogue_can_be_replaced(tmp_path: Path) -> None:
    path = yaml_file(tmp_path, f"mine: {ENTRY}\nother: {ENTRY}\n")
    assert [model.name for model in list_models(Path(path))] == ["mine", "other"]
    assert load_model("OTHER", catalogue=Path(path)).num_layers == 2
    with pytest.raises(InputError, match='unknown model "llama-2-13b"'):
        load_model("llama-2-13b", catalogue=Path(path))


def test_a_folder_in_the_way_does_not_shadow_the_catalogue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("llama-2-13b").mkdir()
    config_file(Path("llama-2-13b"))
    assert load_model("llama-2-13b").num_layers == 40
    assert load_model("./llama-2-13b").num_layers == 2


# Files


def test_a_config_and_its_folder_are_the_same_model(tmp_path: Path) -> None:
    path = config_file(tmp_path)
    model = load_model(path)
    assert model == load_model(str(tmp_path))
    assert (model.name, model.source) == (tmp_path.name, path)
    assert (model.num_kv_heads, model.head_dim, model.dtype) == (4, 16, "bfloat16")


def test_a_yaml_file_with_one_model_needs_no_name(tmp_path: Path) -> None:
    path = yaml_file(tmp_path, f"mine: {ENTRY}\n")
    assert load_model(path) == load_model(f"{path}#mine") == load_model(f"{path}#MINE")


def test_a_yaml_file_with_several_models_needs_a_name(tmp_path: Path) -> None:
    path = yaml_file(tmp_path, f"one: {ENTRY}\ntwo: {ENTRY}\n")
    error = error_of(path)
    assert error.what == "m.yaml holds 2 models"
    assert error.hint == f"say which: {path}#name, with one, two"
    assert error_of(f"{path}#tow").what == 'unknown model "tow"'
    assert load_model(f"{path}#two").name == "two"


def test_a_yaml_file_without_models_is_refused(tmp_path: Path) -> None:
    assert error_of(yaml_file(tmp_path, "{}\n")).what == "m.yaml holds 0 models"


def test_missing_files_are_named(tmp_path: Path) -> None:
    assert error_of(str(tmp_path / "none.json")).what.startswith("no such file")
    assert error_of(str(tmp_path / "none.yaml")).what.startswith("cannot read")
    assert "has no config.json" in error_of(str(tmp_path)).what
    assert error_of("/" + "x" * 5000).what.startswith("cannot look for")


@pytest.mark.parametrize(
    ("text", "what", "line"),
    [
        ("a: [1\n", "not YAML", 2),
        ("a: 1\n", 'entry "a" is no mapping of fields', 1),
        ("- a\n", "the catalogue is no mapping", None),
        ("", "the file is empty", None),
        ("a: {x: 1}\n---\nb: 1\n", "not YAML: but found another document", 2),
        (f"a: {ENTRY}\nA: {ENTRY}\n", 'duplicate entry "A"', 2),
        ("a:\n  hidden_size: 1\n  hidden_size: 2\n", 'duplicate key "hidden_size"', 3),
        ("a:\n  x: !!python/object/apply:os.system [echo]\n", 'the tag "python/object/apply:os.system"', 2),
        ("a:\n  x: !mine 3\n", 'the tag "!mine" is not allowed', 2),
        ("a: !!python/dict\n  x: 1\n", 'the tag "python/dict"', 1),
        ("a:\n  aliases: &b [*b]\n", "an alias contains itself", 2),
        ("a: &b\n  x: *b\n", "an alias contains itself", 1),
        ("a:\n  hidden_size: 0x40\n", '"0x40" is no plain decimal number', 2),
        ("a:\n  hidden_size: 1:30\n", '"1:30" is no plain decimal number', 2),
        ("a:\n  <<: {x: 1}\n", 'unknown field "<<"', 2),
        ("a:\n  ? [1]\n  : 2\n", "a key is no plain word", 2),
        ("a:\n  hiden_size: 64\n", 'unknown field "hiden_size"', 2),
    ],
)
def test_a_broken_yaml_file_is_refused_by_line(
    tmp_path: Path, text: str, what: str, line: int | None
) -> None:
    error = error_of(yaml_file(tmp_path, text))
    assert what in error.what
    if line is not None:
        assert (error.where or "").startswith(f"m.yaml:{line}")


def test_near_names_are_offered_for_an_unknown_field(tmp_path: Path) -> None:
    error = error_of(yaml_file(tmp_path, "a:\n  hiden_size: 64\n"))
    assert "hidden_size" in (error.hint or "")


def test_aliases_of_aliases_are_not_followed_forever(tmp_path: Path) -> None:
    lines = ["a:", "  l0: &l0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"  l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 10)}]" for i in range(1, 9)]
    assert "more than 100,000 values" in error_of(yaml_file(tmp_path, "\n".join(lines))).what


def test_deep_nesting_is_refused(tmp_path: Path) -> None:
    error = error_of(yaml_file(tmp_path, "a: " + "[" * 20_000))
    assert "nested" in error.what or "not YAML" in error.what


def test_bytes_that_are_no_text_are_refused_by_line(tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    path.write_bytes(b"a:\n  source: \xff\n")
    assert error_of(str(path)).where == "m.yaml:2"
    path = tmp_path / "config.json"
    path.write_bytes(b'{"a": "\xff"}')
    assert "no UTF-8" in error_of(str(path)).what


@pytest.mark.parametrize(
    ("text", "what", "where"),
    [
        ("{\n \n", "the file is no JSON", ":3"),
        ("[]", "the file holds no JSON object", ""),
        ('{"a": 1, "a": 2}', 'duplicate key "a"', ""),
        ("[" * 100_000, "the file cannot be read", ""),
        ('{"a": ' + "1" * 5000 + "}", "the file cannot be read", ""),
    ],
)
def test_a_broken_json_file_is_refused(tmp_path: Path, text: str, what: str, where: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    error = error_of(str(path))
    assert what in error.what
    assert error.where == f"{path}{where}"


def test_a_file_that_is_a_folder_or_too_large_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "m.yaml").mkdir()
    assert error_of(str(tmp_path / "m.yaml")).what.startswith("cannot read")
    monkeypatch.setattr(kvplan.safe_yaml, "_MAX_BYTES", 10)
    (tmp_path / "big.yaml").write_text(f"a: {ENTRY}")
    assert "larger than" in error_of(str(tmp_path / "big.yaml")).what


def test_the_pure_python_parser_reads_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = load_model("gemma-4-31b")
    monkeypatch.setattr(kvplan.safe_yaml, "_Loader", yaml.SafeLoader)
    assert load_model("gemma-4-31b") == fast


# Fields


@pytest.mark.parametrize(
    ("field", "value", "what"),
    [
        ("num_key_value_heads", "eight", 'num_key_value_heads is "eight", not a whole number'),
        ("num_key_value_heads", True, 'num_key_value_heads is "True", not a whole number'),
        ("num_key_value_heads", 2.5, 'num_key_value_heads is "2.5", not a whole number'),
        ("num_key_value_heads", 0, "num_key_value_heads is 0, below 1"),
        ("num_key_value_heads", 3, "num_attention_heads 4 is no multiple of num_key_value_heads 3"),
        ("hidden_size", -64, "hidden_size is -64, below 1"),
        ("hidden_size", 65, "hidden_size 65 is no multiple of 4 heads"),
        ("hidden_size", 10**8, "hidden_size is 100000000, above 10,000,000"),
        ("num_hidden_layers", 10**5, "num_hidden_layers is 100000, above 10,000"),
        ("vocab_size", 10**10, "vocab_size is 10000000000, above 1,000,000,000"),
        ("tie_word_embeddings", "yes", 'tie_word_embeddings is "yes", not true or false'),
        ("torch_dtype", "float8", 'unknown dtype "float8"'),
        ("mamba_ssm_dtype", "float8", 'unknown mamba_ssm_dtype "float8"'),
        ("sliding_window", -1, "sliding_window is -1, below 0"),
        ("linear_attn_config", 3, 'linear_attn_config is "3", not a mapping'),
        (
            "linear_attn_config",
            {"kda_layers": [[1]]},
            "linear_attn_config.kda_layers is no list of layer numbers",
        ),
        ("block_configs", [3], 'block_configs is "[3]", not a list of mappings'),
        ("block_configs", [{}, {}], "block_configs[0] has no attention"),
        ("full_attn_idxs", ["x"], "full_attn_idxs is no list of layer numbers"),
        ("use_cla", True, "use_cla says that layers share keys and values"),
        ("rope_scaling", "yarn", 'rope_scaling is "yarn", not a mapping'),
        ("layer_types", "full_attention", 'layer_types is "full_attention", not a list'),
        ("layer_types", [["full_attention"]], "not a list of words or numbers"),
        ("layer_types", ["full_attention"], "layer_types names 1 layers, num_hidden_layers is 2"),
        ("layer_types", ["full_attention", "magic"], 'layer_types[1] is "magic", no known layer type'),
        ("model_type", 3, 'model_type is "3", not text'),
        ("architectures", "LlamaForCausalLM", 'architectures is "LlamaForCausalLM", not a list of names'),
    ],
)
def test_a_wrong_field_is_quoted_and_named(tmp_path: Path, field: str, value: object, what: str) -> None:
    error = error_of(config_file(tmp_path, **{field: value}))
    assert what in error.what
    assert (error.where or "").startswith(str(tmp_path / "config.json"))
    assert error.hint


def test_a_wrong_field_is_named_by_line(tmp_path: Path) -> None:
    block = "a:\n  " + ENTRY[1:-1].replace(", ", "\n  ").replace("vocab_size: 100", "vocab_size: x")
    error = error_of(yaml_file(tmp_path, block))
    assert error.where == 'm.yaml:5, model "a"'
    error = error_of(config_file(tmp_path, torch_dtype="bf16"))
    assert error.where == f'{tmp_path / "config.json"}:11, model "{tmp_path.name}"'
    assert error.hint == "did you mean bfloat16?"


def test_all_faults_are_told_at_once(tmp_path: Path) -> None:
    error = error_of(config_file(tmp_path, hidden_size="x", vocab_size=-5))
    assert error.what == 'hidden_size is "x", not a whole number (line 5); vocab_size is -5, below 1 (line 9)'
    missing = ("vocab_size", "intermediate_size")
    error = error_of(config_file(tmp_path, without=missing))
    assert error.what == "vocab_size is missing; intermediate_size is missing"


def test_a_long_wrong_value_is_cut(tmp_path: Path) -> None:
    assert len(error_of(config_file(tmp_path, hidden_size=["x" * 50] * 50)).what) < 120


def test_an_architecture_that_is_not_known_is_refused_with_near_ones(tmp_path: Path) -> None:
    error = error_of(config_file(tmp_path, architectures=["LlamaForCausalML"]))
    assert error.what == 'unknown architecture "LlamaForCausalML"'
    assert (error.hint or "").startswith("nearest is LlamaForCausalLM: ")
    assert error_of(config_file(tmp_path, without=("architectures",))).what == "architectures is missing"


def test_an_unknown_architecture_is_not_guessed_from_plain_fields(tmp_path: Path) -> None:
    fields = {
        "architectures": ["NovelForCausalLM"],
        "kv_lora_rank": 512,
        "fold_window": 64,
        "use_cache": True,
    }
    path = config_file(tmp_path, **fields, head_fold=2, rms_norm_eps=1e-6)
    error = error_of(path)
    # What may change the cache is named; what is read or harmless is not.
    assert error.what == 'unknown architecture "NovelForCausalLM"; nothing here reads fold_window, head_fold'
    assert (error.hint or "").startswith("nearest is DeepseekV3ForCausalLM: ")


def test_an_unknown_architecture_can_be_said_to_be_a_known_one(tmp_path: Path) -> None:
    path = config_file(tmp_path, architectures=["NovelForCausalLM"])
    model = load_model(path, overrides=["architectures=LlamaForCausalLM"])
    assert (model.architecture, kinds(model)) == ("LlamaForCausalLM", {"full": 2})
    error = error_of(path, "architectures=LamaForCausalLM")
    assert error.what == 'unknown architecture "LamaForCausalLM"'
    assert error.where == "--set architectures=..."


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("RwkvForCausalLM", "vLLM does not serve it: it has no cache for its recurrent state"),
        ("RecurrentGemmaForCausalLM", "vLLM does not serve it: it has no cache for its recurrent state"),
        ("MiniMaxM3SparseForCausalLM", "not yet supported: the keys of its indexer"),
    ],
)
def test_what_cannot_be_sized_is_refused_with_its_reason(tmp_path: Path, name: str, why: str) -> None:
    assert error_of(config_file(tmp_path, architectures=[name])).what.startswith(f"{name}: {why}")


def test_an_odd_model_can_be_given_whole(tmp_path: Path) -> None:
    fields = "{architectures: [OddForCausalLM], hidden_size: 64, num_attention_heads: 4, vocab_size: 100, "
    fields += "num_hidden_layers: 6, num_key_value_heads: 2, parameters: 1234, "
    attention = "attention: [{kind: full, layers: 2}, {kind: full, layers: 1, num_kv_heads: 1, head_dim: 8}, "
    attention += "{kind: linear_attention, layers: 3, num_heads: 4, head_dim: 16}]"
    model = load_model(yaml_file(tmp_path, f"odd: {fields}{attention}}}\n"))
    assert model.attention == (
        (FullAttention(2, 16), 2),
        (FullAttention(1, 8), 1),
        (LinearAttention(4, 16), 3),
    )
    assert (model.weights.parameters, model.weights.source) == (1234, "catalogue")


@pytest.mark.parametrize(
    ("attention", "what"),
    [
        ("[full]", "attention is"),
        ("[{kind: full}]", "is no entry of attention"),
        ("[{kind: full, layers: 2, windows: 3}]", 'unknown field of full "windows"'),
        ("[{kind: mla, layers: 2, kv_lora_rank: 8}]", "mla attention lacks qk_rope_head_dim"),
        ("[{kind: mla, layers: 2, kv_lora_rank: x, qk_rope_head_dim: 8}]", 'kv_lora_rank is "x"'),
        ("[{kind: fully, layers: 2}]", 'unknown attention kind "fully"'),
        ("[{kind: full, layers: none}]", 'layers is "none", not a whole number'),
        ("[{kind: full, layers: 5}]", "attention has more layers than num_hidden_layers, which is 2"),
    ],
)
def test_a_wrong_attention_entry_is_refused(tmp_path: Path, attention: str, what: str) -> None:
    assert what in error_of(yaml_file(tmp_path, f"a: {ENTRY[:-1]}, attention: {attention}}}\n")).what


@pytest.mark.parametrize(
    ("written", "served"),
    [
        ("float32", "float16"),
        (None, "float16"),
        ("float16", "float16"),
        ("torch.bfloat16", "bfloat16"),
    ],
)
def test_the_dtype_is_the_one_that_is_served(tmp_path: Path, written: str | None, served: str) -> None:
    assert load_model(config_file(tmp_path, torch_dtype=written)).dtype == served


@pytest.mark.parametrize(
    ("scaling", "scaled"),
    [
        (None, ()),
        ({"rope_type": "llama3", "factor": 8.0}, (PositionScaling("llama3", 8.0),)),
        (
            {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096},
            (PositionScaling("yarn", 4.0, 4096),),
        ),
        ({"type": "su", "short_factor": [1.0]}, (PositionScaling("longrope"),)),
        ({"type": "mrope", "mrope_section": [16, 24, 24]}, (PositionScaling("mrope"),)),
        (
            {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "default"}},
            (PositionScaling("default"),),
        ),
        ({"full_attention": {"rope_type": "linear", "factor": 8.0}}, (PositionScaling("linear", 8.0),)),
        ({"rope_type": "linear", "factor": None}, (PositionScaling("linear"),)),
    ],
)
def test_how_positions_are_stretched_is_read(tmp_path: Path, scaling: object, scaled: object) -> None:
    assert load_model(config_file(tmp_path, rope_scaling=scaling)).position_scalings == scaled


def test_a_null_count_is_not_a_missing_one(tmp_path: Path) -> None:
    # Mistral's class has 8 KV heads; a config that says null means as many as query heads.
    mistral = {"architectures": ["MistralForCausalLM"], "num_attention_heads": 16, "sliding_window": None}
    assert load_model(config_file(tmp_path, **mistral)).num_kv_heads == 8
    assert load_model(config_file(tmp_path, **mistral, num_key_value_heads=None)).num_kv_heads == 16


def test_the_language_model_of_a_nested_config_is_read(tmp_path: Path) -> None:
    inner = {key: value for key, value in LLAMA.items() if key != "architectures"}
    outer = {"architectures": ["Qwen3VLForConditionalGeneration"], "hidden_size": 999, "vision_config": {}}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(outer | {"text_config": inner | {"num_key_value_heads": 2, "head_dim": 32}}))
    model = load_model(str(path))
    assert (model.hidden_size, model.num_kv_heads, model.head_dim) == (64, 2, 32)
    assert model.weights.parameters is not None


@pytest.mark.parametrize(
    ("fields", "heads"),
    [
        ({"architectures": ["FalconForCausalLM"]}, 1),
        ({"architectures": ["FalconForCausalLM"], "multi_query": False}, 4),
        ({"architectures": ["FalconForCausalLM"], "new_decoder_architecture": True, "num_kv_heads": 2}, 2),
        ({"architectures": ["RWForCausalLM"], "n_head": 8, "n_layer": 3, "num_attention_heads": None}, 1),
        ({"architectures": ["GPTBigCodeForCausalLM"], "n_positions": 64}, 1),
        ({"architectures": ["GPTBigCodeForCausalLM"], "n_positions": 64, "multi_query": False}, 4),
        ({"architectures": ["MPTForCausalLM"], "attn_config": {"kv_n_heads": 2}}, 2),
        ({"architectures": ["MPTForCausalLM"], "attn_config": {"attn_type": "multiquery_attention"}}, 1),
        ({"architectures": ["MPTForCausalLM"]}, 4),
    ],
)
def test_key_value_heads_of_older_architectures(
    tmp_path: Path, fields: dict[str, object], heads: int
) -> None:
    assert load_model(config_file(tmp_path, **fields)).num_kv_heads == heads


def test_no_key_value_heads_are_refused(tmp_path: Path) -> None:
    path = config_file(tmp_path, architectures=["MPTForCausalLM"], attn_config={"kv_n_heads": 0})
    assert error_of(path).what == "there are 0 key/value heads"


def test_more_experts_than_there_are_cannot_be_used(tmp_path: Path) -> None:
    experts = {"num_local_experts": 2, "num_experts_per_tok": 4, "num_key_value_heads": 4}
    path = config_file(tmp_path, architectures=["MixtralForCausalLM"], **experts)
    assert error_of(path).what == "num_experts_per_tok 4 is above num_experts 2"
    dense = {"architectures": ["Glm4MoeForCausalLM"], "n_routed_experts": 4, "num_key_value_heads": 4}
    path = config_file(
        tmp_path, **dense, num_experts_per_tok=2, moe_intermediate_size=8, first_k_dense_replace=3
    )
    assert error_of(path).what == "first_k_dense_replace 3 is above num_hidden_layers"


# Sizes of caches


def test_full_layers_with_their_own_heads(tmp_path: Path) -> None:
    fields = {
        "num_key_value_heads": 4,
        "global_head_dim": 32,
        "num_global_key_value_heads": 2,
        "sliding_window": 8,
    }
    fields |= {"architectures": ["Gemma4ForCausalLM"], "head_dim": 16, "sliding_window_pattern": 2}
    model = load_model(config_file(tmp_path, **fields, attention_k_eq_v=True))
    assert model.attention == ((SlidingWindow(4, 16, 8), 1), (FullAttention(2, 32), 1))
    # Without the flag the class does not read the count of heads.
    model = load_model(config_file(tmp_path, **fields, attention_k_eq_v=False))
    assert model.attention == ((SlidingWindow(4, 16, 8), 1), (FullAttention(4, 32), 1))


def test_keys_and_values_of_different_size(tmp_path: Path) -> None:
    model = load_model(config_file(tmp_path, head_dim=24, v_head_dim=16))
    # 2 layers x 4 heads x (24 + 16) x 2 bytes
    assert sum(item.cache.page_bytes(1, CacheFormat("bfloat16", "bfloat16")) for item in model.layers) == 640


# Overrides


def test_overrides_take_every_name_of_a_field() -> None:
    assert load_model("llama-3.1-8b", overrides=["num_hidden_layers=16"]).num_layers == 16
    assert load_model("llama-3.1-8b", overrides=["num_layers=16"]).num_layers == 16
    assert load_model("gpt2", overrides=["n_layer=3"]).num_layers == 3
    assert load_model("falcon-7b", overrides=["num_kv_heads=71"]).num_kv_heads == 71
    assert load_model("llama-3.1-8b", overrides=["torch_dtype=float16"]).dtype == "float16"
    assert kinds(load_model("mistral-7b-v0.1", overrides=["sliding_window=null"])) == {"full": 32}


def test_an_override_changes_the_count() -> None:
    model = load_model("llama-2-13b", overrides=["num_hidden_layers=20"])
    # Half of the layers: 20 x (4 x 5120^2 + 3 x 5120 x 13824 + 2 x 5120), and what is outside them.
    assert model.weights.parameters == 20 * 317_204_480 + 2 * 32000 * 5120 + 5120


def test_a_total_that_was_given_is_dropped_with_the_shape(tmp_path: Path) -> None:
    # A latent model whose experts the entry does not tell: its total is the entry's.
    path = tmp_path / "models.yaml"
    fields = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 100}
    latent = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    entry = {"architectures": ["DeepseekV3ForCausalLM"], "parameters": 123456, **fields, **latent}
    path.write_text(json.dumps({"some": entry}))
    kept = load_model("some", catalogue=path, overrides=["max_position_embeddings=4096"]).weights
    assert (kept.source, kept.parameters) == ("catalogue", 123456)
    dropped = load_model("some", catalogue=path, overrides=["vocab_size=1000"]).weights
    assert dropped.parameters is None
    assert dropped.why_unknown is not None
    assert dropped.why_unknown.startswith("num_experts is missing")


def test_wrong_overrides_are_refused() -> None:
    error = error_of("llama-2-13b", "num_hidden_layer=3")
    assert error.what == 'unknown field "num_hidden_layer"'
    assert "num_hidden_layers" in (error.hint or "")
    assert error.where == "--set num_hidden_layer=..."
    assert error_of("llama-2-13b", "num_hidden_layers").what == '"num_hidden_layers" is no key=value'
    assert error_of("llama-2-13b", "=3").what == '"=3" is no key=value'
    assert error_of("llama-2-13b", "head_dim=[1, 2]").what == 'head_dim is "[1, 2]", not a whole number'
    assert error_of("llama-2-13b", "head_dim=[").what == '"[" is no value'
    error = error_of("llama-2-13b", "head_dim=x")
    assert (error.what, error.where) == ('head_dim is "x", not a whole number', "--set head_dim=x")


# Weights from files


def safetensors(path: Path, elements: int, dtype: str) -> None:
    size = elements * {"F32": 4, "BF16": 2, "F8_E4M3": 1}[dtype]
    header = json.dumps({"w": {"dtype": dtype, "shape": [elements], "data_offsets": [0, size]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(size))


def test_files_beside_the_config_give_the_weights(tmp_path: Path) -> None:
    path = config_file(tmp_path)
    safetensors(tmp_path / "model.safetensors", 1000, "BF16")
    weights = load_model(path).weights
    assert (weights.source, weights.parameters, weights.stored_bytes) == ("safetensors", 1000, 2000)
    assert weights.total_bytes("bfloat16") == 2000
    assert weights.rank_bytes("bfloat16", Ranks(3, num_kv_heads=4)) == 667


def test_a_float32_checkpoint_is_held_in_16_bits(tmp_path: Path) -> None:
    path = config_file(tmp_path, torch_dtype="float32")
    safetensors(tmp_path / "model.safetensors", 1000, "F32")
    model = load_model(path)
    assert (model.weights.stored_bytes, model.weights.total_bytes(model.dtype)) == (4000, 2000)


def test_files_tell_the_dtype_that_the_config_does_not(tmp_path: Path) -> None:
    path = config_file(tmp_path, without=("torch_dtype",))
    safetensors(tmp_path / "model.safetensors", 10, "BF16")
    assert load_model(path).dtype == "bfloat16"


def test_weights_of_an_unknown_format_are_known_from_files_only(tmp_path: Path) -> None:
    path = config_file(tmp_path, quantization_config={"quant_method": "magic"})
    weights = load_model(path).weights
    assert (weights.quantization, weights.total_bytes("bfloat16")) == ("magic", None)
    assert weights.why_unknown == 'quantization method "magic" is not known'
    assert weights.rank_bytes("bfloat16", Ranks(2, num_kv_heads=4)) is None
    safetensors(tmp_path / "model.safetensors", 1000, "F8_E4M3")
    weights = load_model(path).weights
    assert weights.total_bytes("bfloat16") == 1000
    # The files' elements may be packed and have scales among them: the config counts parameters.
    assert weights.parameters == sum(group.elements for group in weights.groups)


def test_a_broken_weight_file_is_an_error_of_the_model(tmp_path: Path) -> None:
    path = config_file(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"x")
    assert error_of(path).where == str(tmp_path / "model.safetensors")


# The shipped catalogues


def test_every_shipped_model_loads_and_says_where_it_is_from() -> None:
    models = list_models()
    assert len(models) >= 115
    for model in models:
        assert model.source, model.name
        assert model.hf_id, model.name
        assert kinds(model), model.name
    # Where parameters are neither counted nor seen the weights are unknown, not made up.
    assert sum(model.weights.parameters is None for model in models) <= 3


def test_no_two_shipped_entries_share_a_name() -> None:
    for catalogue in ("models.yaml", "gpus.yaml"):
        names = [
            name.casefold()
            for name in kvplan.catalogue.entry_names(kvplan.catalogue.read_catalogue(resource(catalogue)))
        ]
        assert len(names) == len(set(names))


def test_shipped_models_have_the_layers_that_the_facts_say(shared: Path) -> None:
    facts = read_facts(shared)
    # The hub's files are believed to have a window that the class defaults of the facts do not have.
    windowed = {"microsoft/Phi-3-mini-4k-instruct", "bigcode/starcoder2-3b"}
    seen = 0
    for model in list_models():
        row = facts.get(model.hf_id or "")
        if row is None or model.hf_id in windowed:
            continue
        seen += 1
        shared_layers = int(row["n_kv_shared_layers"])
        if shared_layers:
            # The facts count layers that read another's cache among their kind as well.
            assert len(model.layers) + shared_layers == model.num_layers, model.name
        else:
            assert_as_facts(model, row)
    assert seen >= 95


def test_real_configs_have_the_shape_that_the_facts_say(shared: Path) -> None:
    rows = [row for row in read_facts(shared).values() if row["config_file"]]
    assert len(rows) == 40
    for row in rows:
        model = load_model(str(shared / "sizing" / row["config_file"]))
        assert model.num_layers == int(row["num_hidden_layers"]), row["hf_id"]
        assert model.hidden_size == int(row["hidden_size"]), row["hf_id"]
        assert model.num_heads == int(row["num_attention_heads"]), row["hf_id"]
        assert model.num_kv_heads == int(row["num_key_value_heads"]), row["hf_id"]
        assert model.vocab_size == int(row["vocab_size"]), row["hf_id"]
        if row["max_position_embeddings"]:
            assert model.max_position_embeddings == int(row["max_position_embeddings"]), row["hf_id"]
        if row["head_dim"] and "MLA" not in row["attn_kind"]:
            assert model.head_dim == int(row["head_dim"]), row["hf_id"]
        assert_as_facts(model, row)


def test_shipped_models_keep_what_their_real_configs_say(shared: Path) -> None:
    shipped = {model.hf_id: model for model in list_models()}
    seen = 0
    for row in read_facts(shared).values():
        if row["config_file"] and row["hf_id"] in shipped:
            seen += 1
            real = load_model(str(shared / "sizing" / row["config_file"]))
            assert shipped[row["hf_id"]].layers == real.layers, row["hf_id"]
            assert shipped[row["hf_id"]].draft_layers == real.draft_layers, row["hf_id"]
    assert seen == 40


def read_facts(shared: Path) -> dict[str, dict[str, str]]:
    with (shared / "sizing" / "model_facts.csv").open() as file:
        return {row["hf_id"]: row for row in csv.DictReader(file)}


def assert_as_facts(model: ModelSpec, row: dict[str, str]) -> None:
    """The layers by kind are those of a row of facts."""
    found = kinds(model)
    if "MLA" in row["attn_kind"]:
        sparse = {"indexer": model.num_layers} if "DSA" in row["attn_kind"] else {}
        assert found == {"mla": model.num_layers, **sparse}, model.name
        return
    states = sum(isinstance(item.cache, STATES) for item in model.layers)
    columns = {"full": "n_full_attn", "sliding_window": "n_sliding", "chunked_local": "n_chunked"}
    columns["cross"] = "n_cross_attn"
    assert {kind: found.get(kind, 0) for kind in columns} == {k: int(row[c]) for k, c in columns.items()}, (
        model.name
    )
    assert states == int(row["n_state_layers"]), model.name


# GPUs


def test_a_bare_family_name_means_the_sxm_part() -> None:
    assert load_gpu("h100") == load_gpu("H100-SXM") == load_gpu("h100-80gb")
    assert load_gpu("a100").name == "a100-80gb"
    assert load_gpu("h100-pcie").name == "h100-pcie-80gb"


def test_gpu_memory_is_what_the_driver_reports() -> None:
    assert load_gpu("a100-40gb").memory_bytes == 42_405_855_232
    assert load_gpu("h100").memory_bytes == 81_089 << 20
    assert load_gpu("a30").memory_source == "nvidia-smi total 24576 MiB (CUDA reports less)"
    assert load_gpu("l20").memory_bytes is None


def test_every_gpu_has_a_source_and_plausible_figures() -> None:
    gpus = list_gpus()
    assert len(gpus) >= 40
    for gpu in gpus:
        assert gpu.source, gpu.name
        if gpu.memory_bytes:
            assert gpu.memory_source, gpu.name
            assert gpu.marketed_gb
            # A card reports some less than 2^30 bytes for each GB on the box, and never more.
            assert 0.85 < gpu.memory_bytes / (gpu.marketed_gb << 30) <= 1.02, gpu.name
        assert set(gpu.unverified) <= gpu.to_dict().keys()


def test_an_unknown_gpu_is_met_with_near_ones() -> None:
    with pytest.raises(InputError, match='unknown GPU "h10"') as caught:
        load_gpu("h10")
    assert "h100" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ("vendor: X, architecture: Y", "source is missing"),
        ("vendor: X, architecture: Y, source: Z, tdp_w: -3", 'tdp_w is "-3", not a whole number above 0'),
        ("vendor: X, architecture: Y, source: Z, tdp_w: true", 'tdp_w is "True"'),
        ("vendor: 3, architecture: Y, source: Z", 'vendor is "3", not text in quotes'),
        ("vendor: X, architecture: Y, source: Z, aliases: [3]", "not a list of texts"),
        ("vendor: X, architecture: Y, source: Z, watts: 3", 'unknown field "watts"'),
        ("vendor: X, architecture: Y, source: Z, kernels: 3", "kernels is no mapping with a source"),
        ("vendor: X, architecture: Y, source: Z, kernels: {kernel_s: 1.0e-6}", "kernels is no mapping"),
        (
            "vendor: X, architecture: Y, source: Z, kernels: {source: S, speed: 1.0}",
            'unknown field of kernels "speed"',
        ),
        ("vendor: X, architecture: Y, source: Z, kernels: {source: S, kernel_s: 0}", 'kernel_s is "0"'),
    ],
)
def test_a_wrong_gpu_entry_is_refused(tmp_path: Path, fields: str, what: str) -> None:
    entry = kvplan.catalogue.read_catalogue(Path(yaml_file(tmp_path, f"g: {{{fields}}}\n")))[0]
    with pytest.raises(InputError) as caught:
        kvplan.catalogue.gpu_from_entry(entry)
    assert what in caught.value.what
    assert (caught.value.where or "").startswith("m.yaml:1")


def test_rates_may_be_written_as_powers_of_ten(tmp_path: Path) -> None:
    text = "g: {vendor: X, architecture: Y, source: Z, flops_fp16: 1.5e+12, compute_capability: '9.0'}\n"
    entry = kvplan.catalogue.read_catalogue(Path(yaml_file(tmp_path, text)))[0]
    gpu = kvplan.catalogue.gpu_from_entry(entry)
    assert (gpu.flops_fp16, gpu.compute_capability) == (1_500_000_000_000, "9.0")


# Weight of the import


def test_finding_a_model_loads_nothing_heavy() -> None:
    code = "import sys, kvplan.config as c; c.load_model('llama-2-13b'); print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"numpy", "rich", "typer", "cupy"} & set(run.stdout.split())


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        ({"num_hidden_layers": 61, "num_nextn_predict_layers": 1}, [61]),
        ({"text_config": {"num_hidden_layers": 62, "num_mtp_modules": 3}}, [62, 63, 64]),
        ({"num_hidden_layers": 61, "num_nextn_predict_layers": 0}, []),
        ({"num_hidden_layers": 61}, []),
        ({"num_hidden_layers": "x", "num_nextn_predict_layers": [1]}, []),
    ],
)
def test_layers_that_only_draft_come_after_the_models(config: dict[str, object], layers: list[int]) -> None:
    assert list(draft_layers(config)) == layers


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [
        ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}, "fp8"),
        ({"quant_method": "modelopt_fp4", "kv_cache_quant_algo": "NVFP4"}, "nvfp4"),
        ({"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}, "fp8"),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}, "fp8"),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "int"}}, None),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": None}, None),
        ({"quant_method": "fp8", "kv_cache_quant_algo": "FP8"}, None),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": 8}, None),
    ],
)
def test_a_checkpoint_says_what_its_kv_cache_is_stored_in(
    tmp_path: Path, settings: dict[str, object], dtype: str | None
) -> None:
    assert load_model(config_file(tmp_path, quantization_config=settings)).kv_cache_dtype == dtype
