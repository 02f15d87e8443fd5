"""Which caches the layers of each family have: the fields of a config against what vLLM 0.33 builds."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from toy_models import CONFIG_SIZES

from kvplan.core.kv_cache import (
    Cache,
    ChunkedLocal,
    CompressedIndexer,
    CompressedLatent,
    CompressorState,
    CrossAttention,
    FullAttention,
    GatedDeltaNet,
    KimiDelta,
    LatentAttention,
    LatentWindow,
    LayerCache,
    LinearAttention,
    Mamba1State,
    Mamba2State,
    ShortConv,
    SlidingWindow,
    SparseIndexer,
)
from kvplan.core.model import ModelSpec
from kvplan.errors import InputError
from kvplan.hf_config import Origin, spec_from_config

FULL = FullAttention(2, 16)
#: What the layer of a class with experts needs to be counted.
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8, "num_local_experts": 2}
LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
MLA = LatentAttention(512, 64)


def model_of(architecture: str, **fields: object) -> ModelSpec:
    config = {**CONFIG_SIZES, "architectures": [architecture], **fields}
    return spec_from_config({k: v for k, v in config.items() if v != "absent"}, origin=ORIGIN, source="test")


ORIGIN = Origin("config.json", "test")


def caches(layers: tuple[LayerCache, ...]) -> list[tuple[Cache, ...]]:
    """The caches of each layer that has any, by layer."""
    by_layer: dict[int, list[Cache]] = {}
    for item in layers:
        by_layer.setdefault(item.layer, []).append(item.cache)
    return [tuple(found) for _, found in sorted(by_layer.items())]


def error_of(architecture: str, **fields: object) -> str:
    with pytest.raises(InputError) as caught:
        model_of(architecture, **fields)
    assert caught.value.where
    assert caught.value.hint
    return caught.value.what


# Windows


def sliding(window: int) -> SlidingWindow:
    return SlidingWindow(2, 16, window)


@pytest.mark.parametrize(
    ("architecture", "fields", "expected"),
    [
        # One window for the model: CacheConfig.sliding_window, unless layer_types has a full layer.
        ("MistralForCausalLM", {"sliding_window": 128}, "SSSS"),
        ("MistralForCausalLM", {"sliding_window": None}, "FFFF"),
        ("MistralForCausalLM", {"sliding_window": 0}, "FFFF"),
        ("MistralForCausalLM", {}, "SSSS"),
        ("Ministral3ForCausalLM", {"sliding_window": None}, "FFFF"),
        ("MixtralForCausalLM", {"sliding_window": 128, **EXPERTS}, "SSSS"),
        ("Phi3ForCausalLM", {"sliding_window": 128}, "SSSS"),
        ("PhiMoEForCausalLM", {"sliding_window": 128, **EXPERTS}, "SSSS"),
        ("Starcoder2ForCausalLM", {"sliding_window": 128}, "SSSS"),
        ("LlamaForCausalLM", {"sliding_window": 128}, "SSSS"),
        # The switch is read by the classes that have it, and by no other.
        ("LlamaForCausalLM", {"sliding_window": 128, "use_sliding_window": False}, "SSSS"),
        ("Qwen2ForCausalLM", {"sliding_window": 128}, "FFFF"),
        ("Qwen2ForCausalLM", {"sliding_window": 128, "use_sliding_window": False}, "FFFF"),
        ("Qwen3MoeForCausalLM", {"sliding_window": 128, "use_sliding_window": True, **EXPERTS}, "SSSS"),
        ("SmolLM3ForCausalLM", {"sliding_window": 128}, "FFFF"),
        # A mixture in a class whose layers take no window of their own keeps all tokens everywhere.
        ("Qwen2ForCausalLM", {"sliding_window": 128, "use_sliding_window": True, "max_window_layers": 2}, "FFFF"),
        ("Qwen2ForCausalLM", {"sliding_window": 128, "use_sliding_window": True, "max_window_layers": 0}, "SSSS"),
        ("Qwen2MoeForCausalLM", {"sliding_window": 128, "use_sliding_window": True, **EXPERTS}, "FFFF"),
        ("MixtralForCausalLM", {"sliding_window": 128, "layer_types": "SFSF", **EXPERTS}, "FFFF"),
        ("MixtralForCausalLM", {"sliding_window": 128, "layer_types": "SSSS", **EXPERTS}, "SSSS"),
        # layer_types of a class that reads them, and what it says without them.
        ("LlamaForCausalLM", {"sliding_window": 128, "layer_types": "SFSF"}, "SFSF"),
        ("LlamaForCausalLM", {"sliding_window": 128, "layer_types": "FFFF"}, "FFFF"),
        ("LlamaForCausalLM", {"sliding_window": None, "layer_types": "SFSF"}, "FFFF"),
        ("LlamaForCausalLM", {"sliding_window": 128, "sliding_window_pattern": 2}, "SSSS"),
        ("Gemma2ForCausalLM", {"sliding_window": 128, "head_dim": 16}, "SFSF"),
        ("Gemma3ForCausalLM", {"sliding_window": 128, "head_dim": 16, "sliding_window_pattern": 3}, "SSFS"),
        ("Gemma3ForCausalLM", {"sliding_window": 128, "head_dim": 16}, "SSSS"),
        ("Olmo3ForCausalLM", {"sliding_window": 128}, "SSSF"),
        ("Exaone4ForCausalLM", {"sliding_window": 128, "sliding_window_pattern": "LLLG"}, "SSSF"),
        ("Exaone4ForCausalLM", {"sliding_window": 128, "sliding_window_pattern": "LG"}, "SFSF"),
        ("Exaone4ForCausalLM", {"sliding_window": None, "layer_types": "FFFF"}, "FFFF"),
        ("GptOssForCausalLM", {"sliding_window": 128, "head_dim": 16, **EXPERTS}, "SFSF"),
        ("AfmoeForCausalLM", {"sliding_window": 128, "global_attn_every_n_layers": 2}, "SFSF"),
        ("ApertusForCausalLM", {"sliding_window": 128, "layer_types": "SSFF"}, "SSFF"),
        ("Step3p5ForCausalLM", {"sliding_window": 128, "layer_types": "FSSS", "num_attention_groups": 2}, "FSSS"),
    ],
)  # fmt: skip
def test_windows_are_those_that_vllm_allocates(
    architecture: str, fields: dict[str, Any], expected: str
) -> None:
    if isinstance(fields.get("layer_types"), str):
        words = {"S": "sliding_attention", "F": "full_attention"}
        fields = fields | {"layer_types": [words[letter] for letter in fields["layer_types"]]}
    model = model_of(architecture, **fields)
    window = 4096 if fields == {} else 128
    assert caches(model.layers) == [(FULL,) if letter == "F" else (sliding(window),) for letter in expected]


def test_cohere_sees_a_token_beyond_its_window() -> None:
    # commandr.py passes sliding_window + 1, "the same +1 propagates into the KV-cache eviction".
    model = model_of("Cohere2ForCausalLM", sliding_window=128)
    assert caches(model.layers) == [(sliding(129),)] * 3 + [(FULL,)]
    model = model_of("Cohere2VisionForConditionalGeneration", text_config={"sliding_window": 128})
    assert model.layers[0].cache == sliding(129)


def test_layers_that_read_anothers_cache_have_none() -> None:
    fields = {"sliding_window": 128, "head_dim": 16, "layer_types": "absent", "num_hidden_layers": 10}
    model = model_of("Gemma3nForCausalLM", **fields, num_kv_shared_layers=4, intermediate_size=[128] * 10)
    assert caches(model.layers) == [(sliding(128),)] * 4 + [(FULL,), (sliding(128),)]


def test_mimo_has_heads_of_its_own_in_sliding_layers() -> None:
    fields = {"head_dim": 24, "v_head_dim": 16, "sliding_window_size": 128, "attention_chunk_size": 128}
    fields |= {"swa_num_key_value_heads": 4, "swa_head_dim": 24, "swa_v_head_dim": 16, "sliding_window": 128}
    model = model_of("MiMoV2FlashForCausalLM", **fields, hybrid_layer_pattern=[0, 1, 1, 0])
    full, window = FullAttention(2, 24, 16), SlidingWindow(4, 24, 128, 16)
    assert caches(model.layers) == [(full,), (window,), (window,), (full,)]
    assert caches(model.draft_layers) == [(window,)]


def test_llama_4_is_local_where_it_has_rotary_positions() -> None:
    chunked = ChunkedLocal(2, 16, 64)
    fields = {"attention_chunk_size": 64, "head_dim": 16}
    model = model_of("Llama4ForConditionalGeneration", text_config=fields)
    assert caches(model.layers) == [(chunked,)] * 3 + [(FULL,)]
    model = model_of("Llama4ForConditionalGeneration", **fields, no_rope_layers=[1, 0, 1, 0])
    assert caches(model.layers) == [(chunked,), (FULL,), (chunked,), (FULL,)]
    model = model_of("Llama4ForConditionalGeneration", **fields | {"attention_chunk_size": None})
    assert caches(model.layers) == [(FULL,)] * 4
    # Other classes do not look at the field.
    assert caches(model_of("LlamaForCausalLM", **fields).layers) == [(FULL,)] * 4


# Latents


def test_latents_are_kept_as_they_are_or_expanded() -> None:
    assert caches(model_of("DeepseekV2ForCausalLM", **LATENT).layers) == [(MLA,)] * 4
    # DeepSeek-V2 without a rank has plain heads; MiniCPM3 expands its latents into heads of 96.
    assert caches(model_of("DeepseekV2ForCausalLM", kv_lora_rank=None).layers) == [(FULL,)] * 4
    small = {"kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64}
    model = model_of("MiniCPM3ForCausalLM", **small, num_key_value_heads=4)
    assert caches(model.layers) == [(FullAttention(4, 96),)] * 4
    # Two attentions in each layer of LongCat-Flash.
    model = model_of("LongcatFlashForCausalLM", **LATENT, num_layers=4, num_hidden_layers="absent")
    assert caches(model.layers) == [(MLA, MLA)] * 4
    assert caches(model.draft_layers) == [(MLA,)]
    for name in ("DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM", "MistralLarge3ForCausalLM"):
        assert caches(model_of(name, **LATENT).layers) == [(MLA,)] * 4
    model = model_of("KimiK25ForConditionalGeneration", text_config={**LATENT, "num_hidden_layers": 3})
    assert caches(model.layers) == [(MLA,)] * 3


def test_indexers_are_in_every_layer_or_shared_among_several() -> None:
    fields = {**LATENT, "index_head_dim": 128, "num_hidden_layers": 78, "num_nextn_predict_layers": 1}
    both = (MLA, SparseIndexer(128))
    model = model_of("GlmMoeDsaForCausalLM", **fields)
    assert caches(model.layers) == [both] * 78
    # GLM-5.2: one layer in four from the third on. 0, 1, 2, 6, ..., 74 are 21; with the one for drafts 79 latents
    # and 22 indexers, as a start-up log has it (54,728 bytes a token as 79 x 656 + 22 x 132).
    model = model_of("GlmMoeDsaForCausalLM", **fields, index_topk_freq=4, index_skip_topk_offset=3)
    expected = [i for i in range(78) if i < 3 or (i - 2) % 4 == 0]
    assert len(expected) == 21
    assert [both if i in expected else (MLA,) for i in range(78)] == caches(model.layers)
    assert caches(model.draft_layers) == [both]
    pattern = "".join("F" if i in expected else "S" for i in range(78))
    for written in (pattern, list(pattern)):
        assert model_of("GlmMoeDsaForCausalLM", **fields, index_topk_pattern=written).layers == model.layers


def test_deepseek_v4_keeps_a_window_and_compressed_states() -> None:
    fields = {"compress_ratios": [0, 4, 128, 4, 0], "num_nextn_predict_layers": 1, "num_key_value_heads": 1}
    fields |= {"head_dim": 512, "index_head_dim": 128, "sliding_window": 128}
    model = model_of("DeepseekV4ForCausalLM", **fields)
    window = LatentWindow(512, 128)
    index = (CompressedIndexer(128, 4), CompressorState(128, 4))
    four = (*index, window, CompressedLatent(512, 4), CompressorState(512, 4))
    many = (window, CompressedLatent(512, 128), CompressorState(512, 128))
    assert caches(model.layers) == [(window,), four, many, four]
    assert caches(model.draft_layers) == [(window,)]
    words = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
    fields |= {"compress_ratios": "absent", "layer_types": [words[0], words[1], words[2], words[1]]}
    assert model_of("DeepseekV4ForCausalLM", **fields).layers == model.layers
    default = model_of("DeepseekV4ForCausalLM", **fields | {"layer_types": "absent"})
    assert caches(default.layers) == [many, many, many, four]


# States


def test_mamba_layers_of_the_first_kind() -> None:
    # Channels are expand x hidden_size, whatever intermediate_size says (configuration_mamba.py).
    fields = {"num_attention_heads": "absent", "num_key_value_heads": "absent", "state_size": 16}
    state = Mamba1State(128, 16, 4)
    for name in ("MambaForCausalLM", "FalconMambaForCausalLM"):
        model = model_of(name, **fields, expand=2, conv_kernel=4)
        assert caches(model.layers) == [(state,)] * 4
        assert (model.num_heads, model.num_kv_heads) == (0, 0)
    fields = {"mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2}
    model = model_of("JambaForCausalLM", **fields, attn_layer_period=4, attn_layer_offset=2)
    assert caches(model.layers) == [(state,), (state,), (FULL,), (state,)]


GRANITE = {"mamba_n_heads": 8, "mamba_d_state": 32, "mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_expand": 2}


@pytest.mark.parametrize(
    ("architecture", "fields", "expected"),
    [
        ("NemotronHForCausalLM",
         {"hybrid_override_pattern": "M-*E", "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 32,
          "n_groups": 2, "conv_kernel": 4, "head_dim": 16},
         [(Mamba2State(8, 16, 32, 2, 4, "float32"),), (FULL,)]),
        ("NemotronHForCausalLM",
         {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"], "mamba_num_heads": 8,
          "mamba_head_dim": 16, "ssm_state_size": 32, "n_groups": 2, "conv_kernel": 4, "head_dim": 16,
          "mamba_ssm_cache_dtype": "bfloat16"},
         [(Mamba2State(8, 16, 32, 2, 4, "bfloat16"),), (FULL,)]),
        ("Mamba2ForCausalLM",
         {"num_heads": 8, "head_dim": 16, "state_size": 32, "n_groups": 2, "conv_kernel": 4, "expand": 2,
          "num_attention_heads": "absent"},
         [(Mamba2State(8, 16, 32, 2, 4),)] * 4),
        ("BambaForCausalLM", {**GRANITE, "attn_layer_indices": [2], "mamba_d_head": "auto"},
         [(Mamba2State(8, 16, 32, 1, 4),)] * 2 + [(FULL,), (Mamba2State(8, 16, 32, 1, 4),)]),
        ("GraniteMoeHybridForCausalLM", {**GRANITE, "layer_types": ["mamba", "attention", "mamba", "mamba"]},
         [(Mamba2State(8, 16, 32, 1, 4),), (FULL,)] + [(Mamba2State(8, 16, 32, 1, 4),)] * 2),
        ("FalconH1ForCausalLM", {**GRANITE, "mamba_d_ssm": 64, "mamba_d_head": "auto"},
         [(FULL, Mamba2State(8, 8, 32, 1, 4))] * 4),
        # Attention in Zamba2 works on twice the hidden size: 2 x 64 / 4 heads.
        ("Zamba2ForCausalLM",
         {"layers_block_type": ["mamba", "hybrid", "mamba", "mamba"], "n_mamba_heads": 8, "mamba_d_state": 32,
          "mamba_ngroups": 1, "mamba_d_conv": 4, "mamba_expand": 2, "num_key_value_heads": 4},
         [(Mamba2State(8, 16, 32, 1, 4),), (FullAttention(4, 32), Mamba2State(8, 16, 32, 1, 4))]
         + [(Mamba2State(8, 16, 32, 1, 4),)] * 2),
        # Plamo-2 has no groups, and attention in the middle of each step.
        ("Plamo2ForCausalLM",
         {"mamba_step": 2, "mamba_num_heads": 8, "hidden_size_per_head": 16, "mamba_d_state": 32, "mamba_d_conv": 4},
         [(Mamba2State(8, 16, 32, 0, 4),), (FULL,)] * 2),
    ],
)  # fmt: skip
def test_mamba_layers_of_the_second_kind(
    architecture: str, fields: dict[str, Any], expected: list[tuple[Cache, ...]]
) -> None:
    assert caches(model_of(architecture, **fields).layers) == expected


def test_gated_delta_nets() -> None:
    sizes = {"linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_num_value_heads": 4}
    sizes |= {"linear_value_head_dim": 8, "linear_conv_kernel_dim": 4, "head_dim": 16}
    net = GatedDeltaNet(2, 8, 4, 8, 4)
    model = model_of(
        "Qwen3NextForCausalLM", **sizes, full_attention_interval=2, num_nextn_predict_layers="absent"
    )
    assert caches(model.layers) == [(net,), (FULL,)] * 2
    # vLLM builds one layer for drafts if the config does not say how many.
    assert caches(model.draft_layers) == [(FULL,)]
    words = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
    text = {**sizes, "layer_types": words, "mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1}
    for name in ("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"):
        model = model_of(name, text_config=text, vision_config={"num_heads": 3})
        assert caches(model.layers) == [(net._replace(ssm_dtype="float32"),)] * 3 + [(FULL,)]
        assert [(item.layer, item.cache) for item in model.draft_layers] == [(4, FULL)]
    assert caches(model_of("OlmoHybridForCausalLM", **sizes, layer_types=words).layers) == [(net,)] * 3 + [
        (FULL,)
    ]


def test_other_states() -> None:
    model = model_of("MiniMaxText01ForCausalLM", attn_type_list=[0, 0, 0, 1])
    assert caches(model.layers) == [(LinearAttention(4, 16),)] * 3 + [(FULL,)]
    model = model_of("Lfm2ForCausalLM", layer_types=["conv", "full_attention", "conv", "conv"], conv_dim=32)
    assert caches(model.layers) == [(ShortConv(32, 3),), (FULL,), (ShortConv(32, 3),), (ShortConv(32, 3),)]
    model = model_of("Lfm2MoeForCausalLM", full_attn_idxs=[1, 3], conv_L_cache=4)
    assert caches(model.layers) == [(ShortConv(64, 4),), (FULL,)] * 2
    # Kimi-Linear counts its layers from 1.
    block = {"kda_layers": [1, 2, 3], "full_attn_layers": [4], "num_heads": 4, "head_dim": 16}
    block["short_conv_kernel_size"] = 4
    model = model_of("KimiLinearForCausalLM", **LATENT, linear_attn_config=block, head_dim=72)
    kda = KimiDelta(4, 16, 4, 16, 4)
    assert caches(model.layers) == [(kda,)] * 3 + [(MLA,)]
    # Ling: the last layer of each group is full; its states have the head size that the config gives.
    fields = {**LATENT, "layer_group_size": 3, "head_dim": 32, "num_nextn_predict_layers": 1}
    model = model_of("BailingMoeV2_5ForCausalLM", **fields)
    assert caches(model.layers) == [(LinearAttention(4, 32),)] * 2 + [(MLA,), (LinearAttention(4, 32),)]
    assert caches(model.draft_layers) == [(MLA,)]
    # Ling-3 is full after the last group too.
    model = model_of("BailingMoeV3ForCausalLM", **fields)
    assert caches(model.layers) == [(KimiDelta(4, 32, 4, 32, 4),)] * 2 + [(MLA,), (MLA,)]


# Others


def test_cross_attention_beside_self_attention() -> None:
    whisper = {"d_model": 64, "decoder_layers": 2, "decoder_attention_heads": 4, "max_source_positions": 1500}
    config = {"architectures": ["WhisperForConditionalGeneration"], "vocab_size": 100, **whisper}
    model = spec_from_config(config, origin=ORIGIN, source="test")
    assert caches(model.layers) == [(FullAttention(4, 16), CrossAttention(4, 16, 1500))] * 2
    model = model_of("MllamaForConditionalGeneration", text_config={"cross_attention_layers": [1, 3]})
    assert caches(model.layers) == [(FULL,), (CrossAttention(2, 16),)] * 2


def test_encoders_keep_nothing() -> None:
    for name in ("BertModel", "RobertaForMaskedLM", "ModernBertForSequenceClassification"):
        assert model_of(name).layers == ()
    assert model_of("Gemma3ForCausalLM", head_dim=16, use_bidirectional_attention=True).layers == ()
    assert model_of("LlamaForCausalLM", is_causal=False).layers == ()
    assert model_of("Gemma4ForCausalLM", use_bidirectional_attention="vision").layers != ()


def test_older_names_of_fields() -> None:
    glm = {
        "num_layers": 4,
        "kv_channels": 16,
        "padded_vocab_size": 100,
        "seq_length": 8192,
        "ffn_hidden_size": 128,
    }
    glm |= {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "multi_query_attention": True,
        "multi_query_group_num": 2,
    }
    model = spec_from_config({"architectures": ["ChatGLMModel"], **glm}, origin=ORIGIN, source="test")
    assert caches(model.layers) == [(FULL,)] * 4
    assert (model.vocab_size, model.max_position_embeddings) == (100, 8192)
    dbrx = {"d_model": 64, "n_heads": 4, "n_layers": 4, "max_seq_len": 8, "attn_config": {"kv_n_heads": 2}}
    config = {"architectures": ["DbrxForCausalLM"], "vocab_size": 100, **dbrx}
    assert caches(spec_from_config(config, origin=ORIGIN, source="test").layers) == [(FULL,)] * 4
    model = model_of("BaichuanForCausalLM", num_key_value_heads="absent", model_max_length=4096)
    assert (caches(model.layers), model.max_position_embeddings) == ([(FullAttention(4, 16),)] * 4, 4096)
    assert (
        caches(model_of("Step3TextForCausalLM", num_key_value_heads="absent", head_dim=16).layers)
        == [(FullAttention(1, 16),)] * 4
    )


def test_each_layer_of_nemotron_nas_has_heads_of_its_own() -> None:
    blocks = [
        {"attention": {"n_heads_in_group": 2}},
        {"attention": {"no_op": True, "n_heads_in_group": None}},
    ]
    blocks += [{"attention": {"n_heads_in_group": 4}}, {"attention": {"n_heads_in_group": 2}}]
    model = model_of("DeciLMForCausalLM", block_configs=blocks, num_key_value_heads=None)
    assert [(item.layer, item.cache) for item in model.layers] == [
        (0, FULL),
        (2, FullAttention(1, 16)),
        (3, FULL),
    ]
    blocks[0] = {"attention": {"n_heads_in_group": 3}}
    assert "no divisor of 4 heads" in error_of("DeciLMForCausalLM", block_configs=blocks)


@pytest.mark.parametrize(
    ("architecture", "fields", "family", "expected"),
    [
        ("InternVLChatModel", {"llm_config": {"architectures": ["Qwen2ForCausalLM"]}}, "qwen2", FULL),
        ("LlavaForConditionalGeneration", {"text_config": {"model_type": "llama"}}, "llama", FULL),
        ("Mistral3ForConditionalGeneration",
         {"text_config": {"model_type": "mistral", "sliding_window": None}}, "mistral3", FULL),
        ("PaliGemmaForConditionalGeneration",
         {"text_config": {"model_type": "gemma2", "head_dim": 16, "sliding_window": 8}}, "gemma2", sliding(8)),
        ("DeepseekVLV2ForCausalLM", {"language_config": LATENT}, "deepseek_v2", MLA),
        ("DeepseekVLV2ForCausalLM", {"language_config": {"kv_lora_rank": None, "head_dim": 0}}, "deepseek_v2", FULL),
        ("Qwen3OmniMoeForConditionalGeneration",
         {"thinker_config": {"text_config": {"head_dim": 16}}}, "qwen3_moe", FULL),
        ("Qwen2AudioForConditionalGeneration", {}, "qwen2", FULL),
    ],
)  # fmt: skip
def test_a_tower_keeps_nothing_and_the_language_model_within_what_its_class_keeps(
    architecture: str, fields: dict[str, Any], family: str, expected: Cache
) -> None:
    model = model_of(architecture, **fields)
    assert (model.layers[0].cache, model.family) == (expected, family)


def test_a_language_model_that_nobody_names_is_refused() -> None:
    assert "model_type is" in error_of("LlavaForConditionalGeneration", text_config={"model_type": "novel"})
    assert "model_type is" in error_of("InternVLChatModel")


# Layers for multi-token prediction


@pytest.mark.parametrize(
    ("architecture", "fields", "expected"),
    [
        ("DeepseekV3ForCausalLM", {**LATENT, "num_nextn_predict_layers": 1}, [(MLA,)]),
        ("DeepseekV3ForCausalLM", {**LATENT, "num_nextn_predict_layers": 0}, []),
        ("DeepseekV2ForCausalLM", {**LATENT, "num_nextn_predict_layers": 1}, []),
        ("DeepseekV32ForCausalLM", {**LATENT, "index_head_dim": 128, "num_nextn_predict_layers": 1},
         [(MLA, SparseIndexer(128))]),
        ("Glm4MoeForCausalLM", {"n_routed_experts": 2, **EXPERTS, "num_nextn_predict_layers": 2}, [(FULL,)] * 2),
        ("MiMoForCausalLM", {"num_nextn_predict_layers": 1}, [(FULL,)]),
        ("LlamaForCausalLM", {"num_nextn_predict_layers": 1}, []),
        # Nemotron-H: one step is a stack of layers, of which attention keeps something.
        ("NemotronHForCausalLM",
         {"hybrid_override_pattern": "----", "mtp_hybrid_override_pattern": "*E", "num_nextn_predict_layers": 1,
          "head_dim": 16}, [(FULL,)]),
        # Step-3.5 goes on in the list of its layers; only the first MiMo-V2 layer is built.
        ("Step3p5ForCausalLM",
         {"layer_types": ["full_attention"] * 4 + ["sliding_attention", "full_attention"], "sliding_window": 8,
          "num_nextn_predict_layers": 2}, [(sliding(8),), (FULL,)]),
        ("Step3p5ForCausalLM",
         {"layer_types": ["full_attention"] * 4, "mtp_layer_types": ["sliding_attention"], "sliding_window": 8,
          "num_nextn_predict_layers": 1}, [(sliding(8),)]),
        ("MiMoV2ForCausalLM", {"sliding_window_size": 8, "num_nextn_predict_layers": 3}, [(sliding(8),)]),
    ],
)  # fmt: skip
def test_layers_for_drafts_are_those_that_vllm_builds(
    architecture: str, fields: dict[str, Any], expected: list[tuple[Cache, ...]]
) -> None:
    model = model_of(architecture, **fields)
    assert caches(model.draft_layers) == expected
    assert all(item.layer >= model.num_layers for item in model.draft_layers)


# What cannot be read


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        (
            {"mamba_d_state": 16},
            "mamba_d_state says that layers keep a state, but no field says which layers",
        ),
        ({"linear_num_value_heads": 32}, "linear_num_value_heads says that layers keep a state"),
        ({"lru_width": 64}, "lru_width says that layers keep a state"),
        (
            {"layer_types": ["mamba", "attention", "mamba", "mamba"]},
            "layers of llama are said to keep a state",
        ),
        ({"layer_types": ["full_attention"]}, "layer_types names 1 layers, num_hidden_layers is 4"),
        ({"layer_types": ["magic"] * 4}, 'layer_types[0] is "magic", no known layer type'),
        ({"hybrid_override_pattern": "MX**"}, 'hybrid_override_pattern[1] is "X"'),
        ({"kv_lora_rank": 512, "qk_nope_head_dim": 128}, "qk_rope_head_dim is missing"),
        ({"compress_ratios": [0, 0, 2, 0]}, 'compress_ratios[2] is "2"'),
        ({"num_nextn_predict_layers": 10**6}, "num_nextn_predict_layers is 1000000, above 10,000"),
    ],
)
def test_what_cannot_be_told_is_refused(fields: dict[str, Any], what: str) -> None:
    assert what in error_of("LlamaForCausalLM", **fields)


def test_no_list_of_layers_for_drafts_is_endless() -> None:
    fields = {"hybrid_override_pattern": "----", "num_nextn_predict_layers": 1, "head_dim": 16}
    what = error_of("NemotronHForCausalLM", **fields, mtp_hybrid_override_pattern="*" * 2000)
    assert what == "mtp_hybrid_override_pattern names 2,000 layers"


def test_a_state_whose_sizes_are_missing_is_refused() -> None:
    assert error_of("NemotronHForCausalLM", hybrid_override_pattern="MMMM", head_dim=16) == (
        "mamba_num_heads is missing: what its layers keep cannot be told"
    )
    block = {"kda_layers": [1], "num_heads": True, "head_dim": 16, "short_conv_kernel_size": 4}
    assert "num_heads is missing" in error_of("KimiLinearForCausalLM", **LATENT, linear_attn_config=block)


def test_every_known_class_reads_a_plain_config() -> None:
    """No entry of the table names a field or kind that does not exist: each class gives caches or a clear error."""
    from kvplan.core.architectures import ARCHITECTURES

    outcomes: Counter[str] = Counter()
    for name in ARCHITECTURES:
        try:
            outcomes[
                "read" if model_of(name, **EXPERTS, **LATENT | {"kv_lora_rank": None}).layers else "none"
            ] += 1
        except InputError:
            outcomes["refused"] += 1
    assert outcomes["read"] > 150
