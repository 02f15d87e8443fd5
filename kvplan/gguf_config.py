"""From the metadata of a GGUF file to the config.json that the model had before it was converted.

The converter of llama.cpp (convert_hf_to_gguf.py) renames fields by tables; here the tables are read the other way,
so that `kvplan.hf_config` reads both. Key names: gguf 0.19.0, gguf/constants.py; what a key means where architectures
differ: ``set_gguf_parameters`` of the converter's class and ``llama_model::load_hparams``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from kvplan.core.architectures import ARCHITECTURES
from kvplan.errors import InputError, unknown_name
from kvplan.gguf import GgufModel, LongArray
from kvplan.safetensors import StoredWeights

#: Class of the config by ``general.architecture``.
_CLASSES = {
    "afmoe": "AfmoeForCausalLM",
    "apertus": "ApertusForCausalLM",
    "arcee": "ArceeForCausalLM",
    "arctic": "ArcticForCausalLM",
    "baichuan": "BaichuanForCausalLM",
    "bailingmoe": "BailingMoeForCausalLM",
    "bailingmoe2": "BailingMoeV2ForCausalLM",
    "bitnet": "BitnetForCausalLM",
    "bloom": "BloomForCausalLM",
    "chameleon": "ChameleonForConditionalGeneration",
    "chatglm": "ChatGLMForConditionalGeneration",
    "codeshell": "CodeShellForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "command-r": "CohereForCausalLM",
    "dbrx": "DbrxForCausalLM",
    "deci": "DeciLMForCausalLM",
    "deepseek": "DeepseekForCausalLM",
    "deepseek2": "DeepseekV2ForCausalLM",
    "dots1": "Dots1ForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
    "ernie4_5-moe": "Ernie4_5_MoeForCausalLM",
    "exaone": "ExaoneForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "exaone-moe": "ExaoneMoEForCausalLM",
    "falcon": "FalconForCausalLM",
    "falcon-h1": "FalconH1ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "gemma3n": "Gemma3nForConditionalGeneration",
    "gemma4": "Gemma4ForConditionalGeneration",
    "glm-dsa": "GlmMoeDsaForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "glm4moe": "Glm4MoeForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "gptj": "GPTJForCausalLM",
    "gptneox": "GPTNeoXForCausalLM",
    "granite": "GraniteForCausalLM",
    "granitehybrid": "GraniteMoeHybridForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    "grok": "Grok1ForCausalLM",
    "hunyuan-dense": "HunYuanDenseV1ForCausalLM",
    "hunyuan-moe": "HunYuanMoEV1ForCausalLM",
    "internlm2": "InternLM2ForCausalLM",
    "jais": "JAISLMHeadModel",
    "jamba": "JambaForCausalLM",
    "kimi-linear": "KimiLinearForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "lfm2moe": "Lfm2MoeForCausalLM",
    "llama": "LlamaForCausalLM",
    "llama4": "Llama4ForConditionalGeneration",
    "mamba": "MambaForCausalLM",
    "mamba2": "Mamba2ForCausalLM",
    "mimo2": "MiMoV2FlashForCausalLM",
    "minicpm": "MiniCPMForCausalLM",
    "minicpm3": "MiniCPM3ForCausalLM",
    "minimax-m2": "MiniMaxM2ForCausalLM",
    "mistral3": "MistralForCausalLM",
    "mpt": "MptForCausalLM",
    "nemotron": "NemotronForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "nemotron_h_moe": "NemotronHForCausalLM",
    "olmo": "OlmoForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "openelm": "OpenELMForCausalLM",
    "orion": "OrionForCausalLM",
    "phi2": "PhiForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "phimoe": "PhimoeForCausalLM",
    "plamo": "PlamoForCausalLM",
    "qwen": "QWenLMHeadModel",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2moe": "Qwen2MoeForCausalLM",
    "qwen2vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3": "Qwen3ForCausalLM",
    "qwen35": "Qwen3_5ForConditionalGeneration",
    "qwen35moe": "Qwen3_5MoeForConditionalGeneration",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "qwen3next": "Qwen3NextForCausalLM",
    "qwen3vl": "Qwen3VLForConditionalGeneration",
    "qwen3vlmoe": "Qwen3VLMoeForConditionalGeneration",
    "refact": "GPTRefactForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
    "smallthinker": "SmallThinkerForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "stablelm": "StableLmForCausalLM",
    "starcoder": "GPTBigCodeForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
    "step35": "Step3p5ForCausalLM",
    "xverse": "XverseForCausalLM",
}

#: Config field by the key after the architecture's name. Llama's names, which every reader of configs takes.
_FIELDS = {
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.indexer.head_count": "index_n_heads",
    "attention.indexer.key_length": "index_head_dim",
    "attention.indexer.top_k": "index_topk",
    "attention.key_length": "head_dim",
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.q_lora_rank": "q_lora_rank",
    "attention.shared_kv_layers": "num_kv_shared_layers",
    "attention.sliding_window": "sliding_window",
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "expert_count": "num_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "expert_used_count": "num_experts_per_tok",
    "feed_forward_length": "intermediate_size",
    "full_attention_interval": "full_attention_interval",
    "leading_dense_block_count": "first_k_dense_replace",
    "nextn_predict_layers": "num_nextn_predict_layers",
    "vocab_size": "vocab_size",
}

#: Fields that may be 0.
_ZEROS = {
    "first_k_dense_replace",
    "n_shared_experts",
    "num_kv_shared_layers",
    "num_nextn_predict_layers",
    "shared_expert_intermediate_size",
}


class _Heads(NamedTuple):
    """Fields for the heads of full and of sliding layers where they differ."""

    full_heads: str
    full_size: str
    sliding_heads: str
    sliding_size: str
    sliding_value_size: str


#: Those of Gemma-4, and others.
_HEADS = _Heads(
    "num_global_key_value_heads", "global_head_dim", "num_key_value_heads", "head_dim", "v_head_dim"
)
_OWN_HEADS = {
    "mimo2": _Heads(
        "num_key_value_heads", "head_dim", "swa_num_key_value_heads", "swa_head_dim", "swa_v_head_dim"
    )
}

#: Tensors that a converter computes; they are stored but are no parameters.
_COMPUTED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")

_Fields = dict[str, object]
#: The keys of one architecture without its name, and what of the file they cannot tell.
_Keys = Mapping[str, object]


def config_of(model: GgufModel, *, where: str) -> dict[str, object]:
    """The fields of the config.json that a GGUF model was made from, as far as its header tells them.

    Raises `InputError` for an architecture that is not known; ``where`` names the file.
    """
    name = model.metadata.get("general.architecture")
    if not isinstance(name, str):
        raise InputError(
            "general.architecture is missing",
            where=where,
            hint="give a file with a language model, not one of its other parts",
        )
    if name not in _CLASSES:
        raise unknown_name("GGUF architecture", name, _CLASSES, where=where, listing="kvplan/gguf_config.py")
    prefix = f"{name}."
    keys: dict[str, object] = {
        key.removeprefix(prefix): value for key, value in model.metadata.items() if key.startswith(prefix)
    }
    _check_lists(keys, where)
    fields: _Fields = {"architectures": [_CLASSES[name]], "model_type": name}
    for key, field in _FIELDS.items():
        if key in keys:
            # Converters write 0 where a config leaves a field out.
            fields[field] = None if keys[key] == 0 and field not in _ZEROS else keys[key]
    _complete(fields, keys, model)
    if name in _STATES:
        if not {"ssm.conv_kernel", "shortconv.l_cache"} & keys.keys():
            raise InputError(
                f"{name}.ssm.conv_kernel is missing, though {name} has layers that keep a state",
                where=where,
                hint="give the config.json of the model that the file was made from",
            )
        fields |= _STATES[name](keys, fields)
    if name in _RULES:
        fields |= _RULES[name](keys, fields)
    _read_layers(fields, keys, _OWN_HEADS.get(name, _HEADS))
    if _CLASSES[name] not in ARCHITECTURES and ("attention" in fields or _is_plain(fields)):
        # The file tells all that is asked for, so the layout need not be known.
        fields.setdefault("attention", [{"kind": "full", "layers": fields.get("num_hidden_layers")}])
        fields["parameters"] = stored_weights(model, fields).parameters
    return fields


def stored_weights(model: GgufModel, config: Mapping[str, object]) -> StoredWeights:
    """What the engine loads of a GGUF file, and apart from it the layers that only draft tokens.

    llama.cpp leaves the ``nextn_predict_layers`` after the last layer unloaded.
    """
    layers = config.get("num_hidden_layers")
    drafts = config.get("num_nextn_predict_layers")
    parameters = stored_bytes = draft_bytes = 0
    floats = 0
    for tensor in model.tensors:
        block = tensor.name.split(".")[1] if tensor.name.startswith("blk.") else ""
        if drafts and isinstance(layers, int) and block.isdecimal() and int(block) >= layers:
            draft_bytes += tensor.stored_bytes
            continue
        stored_bytes += tensor.stored_bytes
        parameters += 0 if tensor.name in _COMPUTED else tensor.elements
        floats += tensor.elements if tensor.type == "BF16" else 0
    return StoredWeights(
        parameters=parameters,
        stored_bytes=stored_bytes,
        dtype="bfloat16" if 2 * floats > parameters else "float16",
        draft_bytes=draft_bytes,
        source="gguf",
    )


def _check_lists(keys: _Keys, where: str) -> None:
    """A list has one value for each layer (``llama_model_loader::get_key_or_arr``)."""
    for key in (*_FIELDS, "attention.sliding_window_pattern"):
        values = keys.get(key)
        if isinstance(values, list) and len(values) != keys.get("block_count"):
            raise InputError(
                f"{key} has {len(values)} values, block_count is {keys.get('block_count')}",
                where=where,
                hint="the two must agree: download the file again, or give the model's config.json",
            )


def _complete(fields: _Fields, keys: _Keys, model: GgufModel) -> None:
    """Fields that are told by other means than one key."""
    names = {tensor.name for tensor in model.tensors}
    if "vocab_size" not in fields:
        tokens = model.metadata.get("tokenizer.ggml.tokens")
        if isinstance(tokens, LongArray):
            fields["vocab_size"] = tokens.length
    # Defaults of llama_model::load_hparams, not those of the class of the config.
    fields.setdefault("num_key_value_heads", fields.get("num_attention_heads"))
    fields.setdefault("head_dim", None)
    value_length = keys.get("attention.value_length")
    if value_length is not None and value_length != keys.get("attention.key_length"):
        fields["v_head_dim"] = value_length
    if fields.get("num_experts") and "moe_intermediate_size" not in fields:
        experts = [
            t.shape[1] for t in model.tensors if t.name.endswith(".ffn_up_exps.weight") and t.shape[1:]
        ]
        if experts:
            fields["moe_intermediate_size"] = experts[0]
    drafts, blocks = fields.get("num_nextn_predict_layers"), fields.get("num_hidden_layers")
    if isinstance(drafts, int) and isinstance(blocks, int):
        fields["num_hidden_layers"] = blocks - drafts
    fields["tie_word_embeddings"] = "output.weight" not in names
    fields["attention_bias"] = bool(names & {"blk.0.attn_q.bias", "blk.0.attn_qkv.bias"})
    fields["mlp_bias"] = "blk.0.ffn_up.bias" in names
    fields["use_qk_norm"] = "blk.0.attn_q_norm.weight" in names
    fields["dtype"] = stored_weights(model, fields).dtype
    fields["quantization_config"] = {"quant_method": "gguf", "type": model.quantization}
    scaling = keys.get("rope.scaling.type")
    if isinstance(scaling, str) and scaling != "none":
        fields["rope_scaling"] = {"rope_type": scaling, "factor": keys.get("rope.scaling.factor")}
    elif "rope_freqs.weight" in names:
        fields["rope_scaling"] = {"rope_type": "llama3"}
    elif "rope_factors_long.weight" in names:
        fields["rope_scaling"] = {"rope_type": "longrope"}


def _read_layers(fields: _Fields, keys: _Keys, names: _Heads) -> None:
    """Turns lists with one value for each layer into the fields that a config has for them."""
    layers = fields.get("num_hidden_layers")
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        values = fields.get(name)
        if isinstance(values, list) and isinstance(layers, int):
            fields[name] = values[:layers]
    kv_heads, pattern = fields.get("num_key_value_heads"), keys.get("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        slides = pattern[:layers] if isinstance(layers, int) else pattern
        fields["layer_types"] = ["sliding_attention" if one else "full_attention" for one in slides]
        _split_heads(fields, keys, slides, names)
    elif isinstance(pattern, int):
        fields["sliding_window_pattern"] = pattern
    elif isinstance(kv_heads, list):
        _attend_by_heads(fields, kv_heads)
    for name in ("num_attention_heads", "num_key_value_heads"):
        values = fields.get(name)
        if isinstance(values, list):
            fields[name] = max((one for one in values if isinstance(one, int)), default=0)
        if not fields.get(name):  # a model of states alone has no heads
            fields.pop(name, None)
    widths = fields.get("intermediate_size")
    if isinstance(widths, list) and len(used := set(widths) - {0}) == 1:
        fields["intermediate_size"] = used.pop()
    if fields.get("num_experts"):
        fields.setdefault("moe_intermediate_size", fields.get("intermediate_size"))


def _split_heads(fields: _Fields, keys: _Keys, slides: list[object], names: _Heads) -> None:
    """Gemma-4 and MiMo-V2: full layers have other heads than sliding ones."""
    kv_heads = fields.get("num_key_value_heads")
    if isinstance(kv_heads, list) and len(kv_heads) == len(slides):
        full = [heads for heads, slide in zip(kv_heads, slides, strict=True) if not slide]
        sliding = [heads for heads, slide in zip(kv_heads, slides, strict=True) if slide]
        if len(set(full)) == len(set(sliding)) == 1:
            fields |= {names.full_heads: full[0], names.sliding_heads: sliding[0]}
    size = keys.get("attention.key_length_swa")
    if size is not None:
        fields |= {names.full_size: keys.get("attention.key_length"), names.sliding_size: size}
        value_size = keys.get("attention.value_length_swa")
        if value_size is not None and value_size != size:
            fields[names.sliding_value_size] = value_size


def _attend_by_heads(fields: _Fields, kv_heads: list[object]) -> None:
    """Layers without KV heads keep none of their own; others may differ in how many they have."""
    groups: dict[object, int] = {}
    for heads in kv_heads:
        groups[heads] = groups.get(heads, 0) + 1
    if not {"layer_types", "hybrid_override_pattern", "linear_attn_config"} & fields.keys() and (
        len(groups) > 1 and all(isinstance(heads, int) for heads in groups)
    ):
        fields["attention"] = [
            {"kind": "full", "layers": layers, "num_kv_heads": heads}
            for heads, layers in groups.items()
            if heads
        ]


def _is_plain(fields: _Fields) -> bool:
    """Whether every layer has full attention."""
    others = ("kv_lora_rank", "layer_types", "hybrid_override_pattern", "linear_attn_config", "state_size")
    return not fields.get("sliding_window") and not any(fields.get(name) for name in others)


def _words(fields: _Fields, state: str) -> list[str] | None:
    """A word for each layer: those without KV heads keep a state."""
    kv_heads = fields.get("num_key_value_heads")
    if not isinstance(kv_heads, list):
        return None
    return ["full_attention" if heads else state for heads in kv_heads]


def _quotient(keys: _Keys, dividend: str, divisor: str) -> object:
    """The quotient of two keys' numbers; None where there is no whole one."""
    whole, part = keys.get(dividend), keys.get(divisor)
    if isinstance(whole, int) and isinstance(part, int) and part > 0 and whole % part == 0:
        return whole // part
    return None


def _mamba(keys: _Keys, fields: _Fields) -> _Fields:
    return {
        "state_size": keys.get("ssm.state_size"),
        "conv_kernel": keys.get("ssm.conv_kernel"),
        "intermediate_size": keys.get("ssm.inner_size"),
        "time_step_rank": keys.get("ssm.time_step_rank"),
    }


def _mamba2(keys: _Keys, fields: _Fields) -> _Fields:
    return {
        "state_size": keys.get("ssm.state_size"),
        "conv_kernel": keys.get("ssm.conv_kernel"),
        "intermediate_size": keys.get("ssm.inner_size"),
        "num_heads": keys.get("ssm.time_step_rank"),
        "head_dim": _quotient(keys, "ssm.inner_size", "ssm.time_step_rank"),
        "n_groups": keys.get("ssm.group_count"),
    }


def _jamba(keys: _Keys, fields: _Fields) -> _Fields:
    return {
        "layer_types": _words(fields, "mamba"),
        "mamba_d_state": keys.get("ssm.state_size"),
        "mamba_d_conv": keys.get("ssm.conv_kernel"),
        "mamba_dt_rank": keys.get("ssm.time_step_rank"),
        "mamba_expand": _quotient(keys, "ssm.inner_size", "embedding_length"),
    }


def _heads_of_mamba2(keys: _Keys, fields: _Fields) -> _Fields:
    """Granite and Falcon-H1."""
    return {
        "mamba_d_state": keys.get("ssm.state_size"),
        "mamba_d_conv": keys.get("ssm.conv_kernel"),
        "mamba_d_ssm": keys.get("ssm.inner_size"),
        "mamba_expand": _quotient(keys, "ssm.inner_size", "embedding_length"),
        "mamba_n_heads": keys.get("ssm.time_step_rank"),
        "mamba_d_head": _quotient(keys, "ssm.inner_size", "ssm.time_step_rank"),
        "mamba_n_groups": keys.get("ssm.group_count"),
    }


def _granite_hybrid(keys: _Keys, fields: _Fields) -> _Fields:
    return {"layer_types": _words(fields, "mamba"), **_heads_of_mamba2(keys, fields)}


def _nemotron_h(keys: _Keys, fields: _Fields) -> _Fields:
    """A layer is attention (KV heads), an MLP (a width) or a state (neither)."""
    kv_heads, widths = fields.get("num_key_value_heads"), fields.get("intermediate_size")
    pattern = None
    if isinstance(kv_heads, list) and isinstance(widths, list) and len(kv_heads) == len(widths):
        mlp = "E" if fields.get("num_experts") else "-"
        pattern = "".join(
            "*" if heads else mlp if width else "M" for heads, width in zip(kv_heads, widths, strict=True)
        )
    return {
        "hybrid_override_pattern": pattern,
        "ssm_state_size": keys.get("ssm.state_size"),
        "conv_kernel": keys.get("ssm.conv_kernel"),
        "mamba_num_heads": keys.get("ssm.time_step_rank"),
        "mamba_head_dim": _quotient(keys, "ssm.inner_size", "ssm.time_step_rank"),
        "n_groups": keys.get("ssm.group_count"),
    }


def _gated_delta_net(keys: _Keys, fields: _Fields) -> _Fields:
    """Qwen3-Next and Qwen3.5."""
    return {
        "linear_conv_kernel_dim": keys.get("ssm.conv_kernel"),
        "linear_key_head_dim": keys.get("ssm.state_size"),
        "linear_num_key_heads": keys.get("ssm.group_count"),
        "linear_num_value_heads": keys.get("ssm.time_step_rank"),
        "linear_value_head_dim": _quotient(keys, "ssm.inner_size", "ssm.time_step_rank"),
    }


def _kimi_linear(keys: _Keys, fields: _Fields) -> _Fields:
    kv_heads = fields.get("num_key_value_heads")
    counted = list(enumerate(kv_heads, start=1)) if isinstance(kv_heads, list) else []
    return {
        **_latent(keys, fields),
        "linear_attn_config": {
            "full_attn_layers": [layer for layer, heads in counted if heads],
            "kda_layers": [layer for layer, heads in counted if not heads],
            "head_dim": keys.get("kda.head_dim"),
            "num_heads": keys.get("attention.head_count"),
            "short_conv_kernel_size": keys.get("ssm.conv_kernel"),
        },
    }


def _short_conv(keys: _Keys, fields: _Fields) -> _Fields:
    return {"layer_types": _words(fields, "conv"), "conv_L_cache": keys.get("shortconv.l_cache")}


#: Fields of layers that keep a state, by architecture.
_STATES: Mapping[str, Callable[[_Keys, _Fields], _Fields]] = {
    "falcon-h1": _heads_of_mamba2,
    "granitehybrid": _granite_hybrid,
    "jamba": _jamba,
    "kimi-linear": _kimi_linear,
    "lfm2": _short_conv,
    "lfm2moe": _short_conv,
    "mamba": _mamba,
    "mamba2": _mamba2,
    "nemotron_h": _nemotron_h,
    "nemotron_h_moe": _nemotron_h,
    "qwen35": _gated_delta_net,
    "qwen35moe": _gated_delta_net,
    "qwen3next": _gated_delta_net,
}


def _latent(keys: _Keys, fields: _Fields) -> _Fields:
    """Latent attention: newer files give the cached latent as the key's length, and the heads' apart."""
    rotary = keys.get("rope.dimension_count")
    head = keys.get("attention.key_length_mla", keys.get("attention.key_length"))
    plain = head - rotary if isinstance(head, int) and isinstance(rotary, int) else None
    return {
        "qk_rope_head_dim": rotary,
        "qk_nope_head_dim": plain,
        "v_head_dim": keys.get("attention.value_length_mla", keys.get("attention.value_length")),
        "num_key_value_heads": keys.get("attention.head_count"),
        "head_dim": None,
    }


def _deepseek2(keys: _Keys, fields: _Fields) -> _Fields:
    # DeepSeek-V3 and Kimi-K2 weigh experts by a sigmoid (gguf/constants.py ExpertGatingFuncType), V2 does not.
    version = "DeepseekV3ForCausalLM" if keys.get("expert_gating_func") == 2 else "DeepseekV2ForCausalLM"
    return {"architectures": [version], **_latent(keys, fields)}


def _llama(keys: _Keys, fields: _Fields) -> _Fields:
    """Mixtral is a Llama with experts."""
    return {"architectures": ["MixtralForCausalLM"]} if keys.get("expert_count") else {}


def _olmo2(keys: _Keys, fields: _Fields) -> _Fields:
    return {"architectures": ["Olmo3ForCausalLM"]} if keys.get("attention.sliding_window") else {}


def _mistral(keys: _Keys, fields: _Fields) -> _Fields:
    return {"sliding_window": keys.get("attention.sliding_window")}


def _llama4(keys: _Keys, fields: _Fields) -> _Fields:
    # Layers are local to chunks of 8192 tokens (llama_model::load_hparams), which is no sliding window.
    return {"sliding_window": None, "attention_chunk_size": 8192}


def _falcon(keys: _Keys, fields: _Fields) -> _Fields:
    """The new decoder has several KV heads, the older one alone."""
    heads = fields.get("num_key_value_heads")
    return {"new_decoder_architecture": isinstance(heads, int) and heads > 1, "bias": False}


#: What an architecture's keys mean beyond the common table.
_RULES: Mapping[str, Callable[[_Keys, _Fields], _Fields]] = {
    "deepseek2": _deepseek2,
    "falcon": _falcon,
    "glm-dsa": _latent,
    "llama": _llama,
    "llama4": _llama4,
    "minicpm3": _latent,
    "mistral3": _mistral,
    "olmo2": _olmo2,
}
