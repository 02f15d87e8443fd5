"""From a Hugging Face config to a model: field names, checks, derived sizes.

A catalogue entry is such a config with a few more fields, so one reader serves both. It works in
this order: the fields of a nested ``text_config``, or whatever the part of the language model is called, are
brought up; names of older architectures become the common ones; overrides and class defaults are put
in; every field that is read is checked, and all faults are told at once; then sizes that follow from
others are filled in.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from kvplan.core.architectures import (
    ARCHITECTURES,
    AROUND_ANY,
    BY_MODEL_TYPE,
    REFUSED,
    Architecture,
    number,
)
from kvplan.core.attention import draft_caches, layer_caches
from kvplan.core.families import is_plain, weight_groups
from kvplan.core.kv_cache import KINDS, Cache, LayerCache
from kvplan.core.layouts import mlp_of
from kvplan.core.model import ModelSpec
from kvplan.core.rotary import position_scalings, rotary_elements
from kvplan.core.weights import WeightGroup, Weights, parameters_of
from kvplan.errors import InputError, quoted, unknown_name

if TYPE_CHECKING:
    from kvplan.core.quantization import Quantization
    from kvplan.safetensors import StoredWeights

#: What vLLM serves a model as whose config says float32 or nothing: 16 bits. Releases before
#: ``_resolve_auto_dtype`` and GPUs below compute capability 8.0 take float16, others bfloat16
#: (config/model.py, platforms/cuda.py); both have 2 bytes, and Llama-2 was published as float16.
SERVED_FOR_FLOAT32 = "float16"
_DTYPES = ("float32", "float16", "bfloat16")

#: Beyond these a number is a mistake, and arithmetic on it would waste memory.
_MAX_LAYERS = 10_000
_MAX_COUNT = 10**7
_MAX_LENGTH = 10**9
_MAX_PARAMETERS = 10**15

_LENGTHS = {
    "attention_chunk_size",
    "max_position_embeddings",
    "original_max_position_embeddings",
    "sliding_window",
    "vocab_size",
}
#: What a model with a tower calls the config of its language model; omni models nest twice.
_NESTED = ("thinker_config", "text_config", "llm_config", "language_config")
_COUNTS = {
    "attn_layer_period",
    "chunk_size",
    "conv_L_cache",
    "conv_dim",
    "conv_kernel",
    "decoder_sparse_step",
    "expansion_ratio",
    "full_attention_interval",
    "global_head_dim",
    "head_dim",
    "hidden_size",
    "index_head_dim",
    "index_topk_freq",
    "kv_lora_rank",
    "layer_group_size",
    "linear_conv_kernel_dim",
    "linear_head_dim",
    "linear_key_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_value_head_dim",
    "mamba_chunk_size",
    "mamba_d_ssm",
    "mamba_d_state",
    "mamba_expand",
    "mamba_head_dim",
    "mamba_num_heads",
    "mamba_step",
    "max_source_positions",
    "moe_intermediate_size",
    "moe_layer_interval",
    "multi_query_group_num",
    "n_groups",
    "no_rope_layer_interval",
    "num_attention_heads",
    "num_global_key_value_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "num_kv_heads",
    "num_ln_in_parallel_attn",
    "qk_nope_head_dim",
    "short_conv_kernel_size",
    "ssm_state_size",
    "swa_head_dim",
    "swa_num_key_value_heads",
    "swa_v_head_dim",
    "v_head_dim",
    "word_embed_proj_dim",
}
#: Counts that may be 0.
_COUNTS_FROM_ZERO = {
    "altup_num_inputs",
    "attn_layer_offset",
    "encoder_ffn_dim",
    "encoder_layers",
    "expert_layer_offset",
    "expert_layer_period",
    "first_k_dense_replace",
    "hidden_size_per_layer_input",
    "index_n_heads",
    "index_skip_topk_offset",
    "index_topk",
    "interleave_moe_layer_step",
    "intermediate_size_mlp",
    "laurel_rank",
    "max_window_layers",
    "moe_latent_size",
    "moe_layer_start_index",
    "moe_num_shared_experts",
    "moe_shared_expert_intermediate_size",
    "mtp_num_hidden_layers",
    "n_shared_experts",
    "num_dense_layers",
    "num_experts",
    "num_experts_per_tok",
    "num_kv_shared_layers",
    "num_mel_bins",
    "num_mtp_modules",
    "num_nextn_predict_layers",
    "q_lora_rank",
    "qk_rope_head_dim",
    "shared_expert_intermediate_size",
    "shared_intermediate_size",
    "swa_num_attention_heads",
    "top_k_experts",
    "vocab_size_per_layer_input",
}
#: A window of 0 is none (vLLM config/model.py); DeepSeek-VL2 writes head_dim 0 for none.
_FROM_ZERO = _COUNTS_FROM_ZERO | {"head_dim", "sliding_window"}
_FLAGS = {
    "add_full_attention_sink_bias",
    "add_swa_attention_sink_bias",
    "attention_bias",
    "attention_k_eq_v",
    "attn_output_gate",
    "bias",
    "do_layer_norm_before",
    "enable_bias",
    "enable_moe_block",
    "is_causal",
    "is_encoder_decoder",
    "layer_norm_elementwise_affine",
    "lm_head_bias",
    "mlp_bias",
    "multi_query",
    "multi_query_attention",
    "new_decoder_architecture",
    "parallel_attn",
    "qk_layernorm",
    "qkv_bias",
    "tie_word_embeddings",
    "use_bias",
    "use_cla",
    "use_double_wide_mlp",
    "use_parallel_residual",
    "use_qk_norm",
    "use_qkv_bias",
    "use_sliding_window",
}
_LISTS = {
    "aliases",
    "architectures",
    "attention",
    "attn_layer_indices",
    "attn_type_list",
    "block_configs",
    "compress_ratios",
    "cross_attention_layers",
    "decoder_attention_types",
    "full_attn_idxs",
    "hybrid_layer_pattern",
    "layer_types",
    "layers_block_type",
    "mlp_only_layers",
    "mtp_layer_types",
    "mtp_layers_block_type",
    "no_rope_layers",
}
#: Lists of mappings; the others hold words or numbers.
_LISTS_OF_MAPPINGS = {"attention", "block_configs"}
_MAPPINGS = {
    "attn_config",
    "audio_config",
    "linear_attn_config",
    "quantization_config",
    "rope_parameters",
    "rope_scaling",
    "vision_config",
}
_TEXTS = {
    "dtype",
    "family",
    "hf_id",
    "hybrid_override_pattern",
    "mamba_ssm_cache_dtype",
    "mamba_ssm_dtype",
    "model_type",
    "mtp_hybrid_override_pattern",
    "source",
}
#: Fields of other types that are read: intermediate_size may be a list where it is not used (Gemma-3n),
#: a window pattern may be a word, the size of a state's heads "auto", the last layer with experts -1.
_PATTERNS = {"sliding_window_pattern", "_sliding_window_pattern"}
_WORDS_TOO = _PATTERNS | {"index_topk_pattern", "mamba_head_dim"}
_OTHERS = _PATTERNS | {
    "index_topk_pattern",
    "intermediate_size",
    "moe_layer_end_index",
    "moe_layer_freq",
    "parameters",
    "use_bidirectional_attention",
}
#: Counts that a config may give for each layer, all alike (Hunyuan).
_PER_LAYER = ("moe_intermediate_size", "num_experts", "num_experts_per_tok")
#: Every field that is read, under its common name.
FIELDS = frozenset(_LENGTHS | _COUNTS | _COUNTS_FROM_ZERO | _FLAGS | _LISTS | _MAPPINGS | _TEXTS | _OTHERS)
#: Fields that only the count of parameters reads (kvplan/core/families.py), which checks them itself.
_WEIGHTS_ONLY = {
    "add_qkv_bias",
    "encoder_attention_heads",
    "expert_dtype",
    "hc_mult",
    "num_hash_layers",
    "num_shared_experts",
    "o_groups",
    "o_lora_rank",
}
#: Every field that a catalogue entry may have: architectures' own names are as good as common ones.
CATALOGUE_FIELDS = (
    FIELDS | _WEIGHTS_ONLY | {"torch_dtype"} | {n for a in ARCHITECTURES.values() for n in a.names.values()}
)

#: Names that `ModelSpec` has for config fields, so that ``--set`` takes both.
_SPEC_NAMES = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
}
#: Overrides that leave a total known from files or the catalogue true.
_WEIGHT_NEUTRAL = (
    {"dtype", "max_position_embeddings", "parameters", "quantization_config", "family", "hf_id", "source"}
    | {"original_max_position_embeddings"}
    | _LISTS
    | {"sliding_window", "use_sliding_window", "max_window_layers", "rope_scaling", "attention_chunk_size"}
    | {"use_cla", "mamba_ssm_dtype", "mamba_ssm_cache_dtype", "index_topk_freq", "index_skip_topk_offset"}
    | {"num_nextn_predict_layers", "index_topk_pattern"}
)
#: What nearly all names of classes end in says nothing about their likeness.
_SUFFIX = r"(ForCausalLM|ForConditionalGeneration|LMHeadModel|Model)$"
#: Names of fields that may change what is kept, and of some that do not: those of an unknown class are told.
_TELLING = r"attn|attention|compress|conv|head|index|kv|latent|layer_types|mamba|rank|ssm|state|window"
_TELLING_NOTHING = r"_dropout|_bias|^output_|rotary|rope|vision|audio|image|video|^pretraining"

_REQUIRED = ("num_hidden_layers", "hidden_size", "vocab_size")
_REQUIRED_BY_EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")


class Origin(NamedTuple):
    """Where the fields of a model were written, for error messages."""

    file: str
    model: str
    lines: Mapping[str, int] = MappingProxyType({})

    def of(self, name: str | None = None) -> str:
        """The place of a field, or of the model as a whole: ``models.yaml:41, model "x"``."""
        line = self.lines.get(name or "")
        return f'{self.file}{f":{line}" if line else ""}, model "{self.model}"'


class _Fault(NamedTuple):
    name: str
    what: str
    hint: str


def spec_from_config(
    config: Mapping[str, object],
    *,
    origin: Origin,
    source: str,
    stored: StoredWeights | None = None,
    overrides: Mapping[str, object] | None = None,
) -> ModelSpec:
    """The model that a config describes.

    ``config`` is a parsed config.json or catalogue entry. ``stored`` is what the weight files beside
    it hold. ``overrides`` replace fields, by their common name, the architecture's or `ModelSpec`'s.
    Raises one `InputError` for all faults of the config.
    """
    flat = _flatten(config)
    name, architecture = _architecture(config, flat, (overrides or {}).get("architectures"), origin)
    changes = {_common_name(key, architecture): value for key, value in (overrides or {}).items()}
    if "architectures" in changes:
        changes["architectures"] = [name]
    fields = read_fields(flat, architecture, changes, origin)
    layers, drafts = _layers(fields, architecture, origin)
    if not set(changes) <= _WEIGHT_NEUTRAL:
        # A total that was counted for another shape says nothing about this one.
        stored = None
        fields.pop("parameters", None)
    aliases = fields.get("aliases")
    hf_id = fields.get("hf_id")
    weights = _weights(name, fields, stored)
    return ModelSpec(
        name=origin.model,
        family=str(fields.get("family") or architecture.family),
        architecture=name,
        num_layers=number(fields, "num_hidden_layers"),
        hidden_size=number(fields, "hidden_size"),
        num_heads=number(fields, "num_attention_heads"),
        num_kv_heads=number(fields, "num_key_value_heads"),
        head_dim=number(fields, "head_dim"),
        vocab_size=number(fields, "vocab_size"),
        max_position_embeddings=number(fields, "max_position_embeddings") or None,
        dtype=_served_dtype(fields, stored),
        layers=layers,
        weights=weights._replace(rotary_elements=rotary_elements(architecture.family, fields)),
        source=source,
        hf_id=hf_id if isinstance(hf_id, str) else None,
        aliases=tuple(str(alias) for alias in aliases) if isinstance(aliases, list) else (),
        draft_layers=drafts,
        mlp=mlp_of(architecture.layout, fields, has_experts=weights.has_experts),
        kv_cache_dtype=_stored_kv_dtype(fields),
        mamba_chunk_size=number(fields, "mamba_chunk_size") or number(fields, "chunk_size", 2048),
        position_scalings=position_scalings(fields),
        original_max_position_embeddings=number(fields, "original_max_position_embeddings") or None,
    )


def read_fields(
    flat: Mapping[str, object],
    architecture: Architecture,
    overrides: Mapping[str, object],
    origin: Origin,
) -> dict[str, object]:
    """The fields of a config under their common names, checked and completed.

    Raises one `InputError` for all faults.
    """
    fields = dict(flat)
    for common, own in _own_names(architecture).items():
        if fields.get(common) is None and fields.get(own) is not None:
            fields[common] = fields[own]
        elif common not in fields and own in fields:
            fields[common] = None
    fields.update(overrides)
    for name, value in architecture.defaults.items():
        fields.setdefault(name, value)
    for name in _PER_LAYER:
        value = fields.get(name)
        if isinstance(value, list) and value and value.count(value[0]) == len(value):
            fields[name] = value[0]
    faults = [fault for name in sorted(FIELDS & fields.keys()) if (fault := _type_fault(name, fields[name]))]
    if not faults:
        _complete(fields, architecture)
        faults = _shape_faults(fields, architecture)
    if faults:
        raise _as_error(faults, origin, architecture, overrides)
    return fields


def draft_layers(config: Mapping[str, object]) -> range:
    """The numbers that a checkpoint gives to layers for multi-token prediction, after those of the model.

    vLLM 0.33 leaves them out of the model (model_executor/models/utils.py ``get_spec_layer_idx_from_weight_name``,
    and minimax_m2.py, whose config calls them modules). Empty where the config has none or is wrong.
    """
    flat = _flatten(config)
    layers = number(flat, "num_hidden_layers")
    return range(layers, layers + number(flat, "num_nextn_predict_layers", number(flat, "num_mtp_modules")))


def _flatten(config: Mapping[str, object]) -> dict[str, object]:
    """The fields of the language model: those of its own part count more than the outer ones."""
    flat = {key: value for key, value in config.items() if key not in _NESTED}
    inner = _nested(config)
    if inner is None:
        return flat
    for key, value in _flatten(inner).items():
        # A part that leaves a field null does not unset what the model as a whole says.
        if key not in ("architectures", "model_type") and (value is not None or key not in flat):
            flat[key] = value
    return flat


def _nested(config: Mapping[str, object]) -> Mapping[str, object] | None:
    """The config of the language model within a model with a tower, if there is one."""
    for name in _NESTED:
        inner = config.get(name)
        if isinstance(inner, Mapping):
            return inner
    return None


def _architecture(
    config: Mapping[str, object], flat: Mapping[str, object], override: object, origin: Origin
) -> tuple[str, Architecture]:
    """The class of a model: the first of its names that is known. ``override`` is given by ``--set``."""
    names = flat.get("architectures")
    where = origin.of("architectures")
    if override is not None:
        names = [override] if isinstance(override, str) else override
        where = "--set architectures=..."
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        what = "is missing" if names is None else f"is {quoted(names)}, not a list of names"
        raise InputError(
            f"architectures {what}",
            where=where,
            hint="add a line such as architectures: [LlamaForCausalLM]",
        )
    for name in names:
        if name in ARCHITECTURES:
            return name, ARCHITECTURES[name]
        if name in AROUND_ANY:
            return name, _within(config, where)._replace(layout=None)
    if flat.get("attention") is not None and flat.get("parameters") is not None:
        family = flat.get("family") or flat.get("model_type") or names[0]
        return names[0], Architecture(family=str(family))
    if names[0] in REFUSED:
        raise InputError(
            f"{names[0]}: {REFUSED[names[0]]}",
            where=where,
            hint="a catalogue entry may give attention and parameters itself",
        )
    raise _unknown_architecture(names[0], flat, where)


def _within(config: Mapping[str, object], where: str) -> Architecture:
    """The class of the language model that a class around it leaves to the nested config."""
    inner = _nested(config) or {}
    names = inner.get("architectures")
    for name in names if isinstance(names, list) else ():
        if isinstance(name, str) and name in ARCHITECTURES:
            return ARCHITECTURES[name]
    kind = inner.get("model_type")
    if isinstance(kind, str) and kind in BY_MODEL_TYPE:
        return ARCHITECTURES[BY_MODEL_TYPE[kind]]
    raise InputError(
        f"the language model within is of an unknown kind: model_type is {quoted(kind)}",
        where=where,
        hint="say which class it is: --set architectures=LlamaForCausalLM",
    )


def _unknown_architecture(name: str, flat: Mapping[str, object], where: str) -> InputError:
    """Names the fields that nobody read, and the class that is nearest in name or in fields."""
    unread = sorted(
        key[:40]
        for key in flat.keys() - CATALOGUE_FIELDS
        if re.search(_TELLING, key) and not re.search(_TELLING_NOTHING, key)
    )
    stems = {re.sub(_SUFFIX, "", known): known for known in ARCHITECTURES}
    near = difflib.get_close_matches(re.sub(_SUFFIX, "", name), stems, n=1, cutoff=0.75)
    nearest = stems[near[0]] if near else _nearest_by_fields(flat)
    told = f"; nothing here reads {', '.join(unread[:8])}" if unread else ""
    more = f" and {len(unread) - 8} more" if len(unread) > 8 else ""
    return InputError(
        f"unknown architecture {quoted(name)}{told}{more}",
        where=where,
        hint=f"nearest is {nearest}: if its layers keep the same, add --set architectures={nearest}; "
        "a catalogue entry may give attention and parameters itself",
    )


def _nearest_by_fields(flat: Mapping[str, object]) -> str:
    kind = flat.get("model_type")
    if isinstance(kind, str) and kind in BY_MODEL_TYPE:
        return BY_MODEL_TYPE[kind]
    marks = {
        "compress_ratios": "DeepseekV4ForCausalLM",
        "index_head_dim": "DeepseekV32ForCausalLM",
        "kv_lora_rank": "DeepseekV3ForCausalLM",
        "linear_attn_config": "KimiLinearForCausalLM",
        "linear_num_value_heads": "Qwen3NextForCausalLM",
        "hybrid_override_pattern": "NemotronHForCausalLM",
        "mamba_n_heads": "BambaForCausalLM",
        "mamba_d_state": "JambaForCausalLM",
        "conv_L_cache": "Lfm2ForCausalLM",
        "attention_chunk_size": "Llama4ForCausalLM",
        "sliding_window_pattern": "Gemma3ForCausalLM",
    }
    return next((near for field, near in marks.items() if flat.get(field) is not None), "LlamaForCausalLM")


def _own_names(architecture: Architecture) -> dict[str, str]:
    """Common field name -> the older name that a config may have instead."""
    return {"dtype": "torch_dtype", **architecture.names}


def _common_name(key: str, architecture: Architecture) -> str:
    own_names = {own: common for common, own in _own_names(architecture).items()}
    common = own_names.get(key) or _SPEC_NAMES.get(key, key)
    if common not in FIELDS:
        raise unknown_name(
            "field",
            key,
            FIELDS | set(_SPEC_NAMES) | set(own_names),
            where=f"--set {key}=...",
            listing="the header of models.yaml",
        )
    return common


def _type_fault(name: str, value: object) -> _Fault | None:
    """What is wrong with the value of one field, taken alone; null means absent."""
    if value is None:
        return None
    if name in ("dtype", "mamba_ssm_cache_dtype", "mamba_ssm_dtype"):
        return _dtype_fault(name, value)
    if name in _FLAGS:
        fits, wanted, hint = isinstance(value, bool), "true or false", "write true or false"
    elif name in _LISTS:
        items = value if isinstance(value, list) else [None]
        mappings = name in _LISTS_OF_MAPPINGS
        fits = all(isinstance(item, Mapping if mappings else int | str) for item in items)
        wanted = "a list of mappings" if mappings else "a list of words or numbers"
        hint = "write it as [a, b]"
    elif name in _MAPPINGS:
        fits, wanted, hint = isinstance(value, Mapping), "a mapping", "write it as {key: value}"
    elif name in _TEXTS:
        fits, wanted, hint = isinstance(value, str), "text", "put it in quotes"
    elif (
        (name in _WORDS_TOO and isinstance(value, str))
        or (name in ("intermediate_size", "index_topk_pattern", "moe_layer_freq") and isinstance(value, list))
        or name == "use_bidirectional_attention"
    ):
        return None
    else:
        return _number_fault(name, value)
    return None if fits else _Fault(name, f"{name} is {quoted(value)}, not {wanted}", hint)


def _number_fault(name: str, value: object) -> _Fault | None:
    if isinstance(value, bool) or not isinstance(value, int):
        return _Fault(name, f"{name} is {quoted(value)}, not a whole number", "write a number, such as 8")
    lowest = -1 if name == "moe_layer_end_index" else 0 if name in _FROM_ZERO else 1
    if value < lowest:
        return _Fault(name, f"{name} is {value}, below {lowest}", f"write a number of at least {lowest}")
    highest = {
        "num_hidden_layers": _MAX_LAYERS,
        "num_nextn_predict_layers": _MAX_LAYERS,
        "parameters": _MAX_PARAMETERS,
    }.get(name, _MAX_LENGTH if name in _LENGTHS else _MAX_COUNT)
    if value > highest:
        return _Fault(name, f"{name} is {value}, above {highest:,}", "no known model is that large")
    return None


def _dtype_fault(name: str, value: object) -> _Fault | None:
    if isinstance(value, str) and value.removeprefix("torch.") in _DTYPES:
        return None
    near = difflib.get_close_matches(value[:60], _DTYPES, n=2) if isinstance(value, str) else []
    hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(_DTYPES)}"
    return _Fault(name, f"unknown {name} {quoted(value)}", hint)


def _complete(fields: dict[str, object], architecture: Architecture) -> None:
    """Fills in the sizes that follow from others."""
    heads, hidden = number(fields, "num_attention_heads"), number(fields, "hidden_size")
    for name in ("head_dim", "sliding_window"):
        if fields.get(name) == 0:
            fields[name] = None
    if fields.get("kv_lora_rank") is not None:
        if architecture.state is not None and heads:
            # Beside latents, head_dim is that of the layers with a state (vLLM bailing_moe_linear.py).
            fields.setdefault("linear_head_dim", number(fields, "head_dim") or hidden // heads)
        # Latent attention: a head of queries and keys has a part with and one without positions.
        fields["head_dim"] = number(fields, "qk_nope_head_dim") + number(fields, "qk_rope_head_dim") or None
    if fields.get("head_dim") is None and heads and hidden % heads == 0:
        fields["head_dim"] = architecture.head_dim_factor * hidden // heads
    if fields.get("num_key_value_heads") is None and heads:
        fields["num_key_value_heads"] = architecture.kv_heads(fields) if architecture.kv_heads else heads
    if fields.get("intermediate_size") is None and architecture.mlp_ratio is not None:
        ratio = number(fields, "expansion_ratio", architecture.mlp_ratio)
        fields["intermediate_size"] = ratio * hidden


def _shape_faults(fields: Mapping[str, object], architecture: Architecture) -> list[_Fault]:
    """What is missing, and what does not go together."""
    # A total that is written need not be counted; what is no plain decoder tells what it lacks itself.
    counts = is_plain(architecture.family) and fields.get("parameters") is None
    layout = architecture.layout if counts else None
    experts = layout.experts if layout and fields.get("num_experts") != 0 else None
    required = list(_REQUIRED)
    if not _is_attention_free(architecture):
        required.append("num_attention_heads")
    if layout and layout.position_offset is not None:
        required.append("max_position_embeddings")
    if experts:
        required.extend(_REQUIRED_BY_EXPERTS)
    if layout and not (experts and len([*experts.layers(fields)]) >= number(fields, "num_hidden_layers")):
        required.append("intermediate_size")
    faults = [
        _Fault(name, f"{name} is missing", "add it as the model's config.json has it")
        for name in required
        if fields.get(name) is None
    ]
    if faults:
        return faults
    heads, kv_heads = number(fields, "num_attention_heads"), number(fields, "num_key_value_heads")
    if _is_attention_free(architecture):
        return faults
    if fields.get("head_dim") is None:
        hidden = number(fields, "hidden_size")
        faults.append(
            _Fault("hidden_size", f"hidden_size {hidden} is no multiple of {heads} heads", "give head_dim")
        )
    if kv_heads < 1:
        faults.append(_Fault("attn_config", f"there are {kv_heads} key/value heads", "use at least 1"))
    elif heads % kv_heads:
        what = f"num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}"
        faults.append(_Fault("num_key_value_heads", what, f"use a divisor of {heads}"))
    if layout and isinstance(fields.get("intermediate_size"), list):
        faults.append(_Fault("intermediate_size", "intermediate_size is a list, not one number", "write one"))
    if experts and number(fields, "num_experts_per_tok") > number(fields, "num_experts"):
        used, total = fields["num_experts_per_tok"], fields["num_experts"]
        what = f"num_experts_per_tok {used} is above num_experts {total}"
        faults.append(_Fault("num_experts_per_tok", what, f"use at most {total}"))
    if number(fields, "first_k_dense_replace") > number(fields, "num_hidden_layers"):
        what = f"first_k_dense_replace {fields['first_k_dense_replace']} is above num_hidden_layers"
        faults.append(_Fault("first_k_dense_replace", what, "it counts the first layers without experts"))
    return faults


def _is_attention_free(architecture: Architecture) -> bool:
    return architecture.every_layer == ("state",)


def _as_error(
    faults: Sequence[_Fault], origin: Origin, architecture: Architecture, overrides: Mapping[str, object]
) -> InputError:
    """One error for all faults; each names its line where there are several."""
    set_here = [f"--set {f.name}={overrides[f.name]}" for f in faults if f.name in overrides]
    if len(set_here) == len(faults):
        what = "; ".join(fault.what for fault in faults)
        return InputError(what, where=", ".join(set_here), hint=faults[0].hint)
    own_names = _own_names(architecture)
    lines = {
        fault.name: origin.lines.get(fault.name) or origin.lines.get(own_names.get(fault.name, fault.name))
        for fault in faults
    }
    if len(faults) == 1:
        line = lines[faults[0].name]
        place = origin._replace(lines={"": line} if line else {})
        return InputError(faults[0].what, where=place.of(), hint=faults[0].hint)
    what = "; ".join(f"{f.what} (line {lines[f.name]})" if lines[f.name] else f.what for f in faults)
    hints = dict.fromkeys(fault.hint for fault in faults)
    return InputError(what, where=origin.of(), hint="; ".join(hints))


def _layers(
    fields: Mapping[str, object], architecture: Architecture, origin: Origin
) -> tuple[tuple[LayerCache, ...], tuple[LayerCache, ...]]:
    """The caches of the layers, and of those for multi-token prediction."""
    written = fields.get("attention")
    if isinstance(written, list):
        return _written_layers(written, fields, origin), ()
    try:
        return layer_caches(fields, architecture), draft_caches(fields, architecture)
    except InputError as error:
        # The rules of attention do not know where the config was written.
        raise InputError(error.what, where=origin.of(), hint=error.hint) from None


def _written_layers(
    entries: Sequence[object], fields: Mapping[str, object], origin: Origin
) -> tuple[LayerCache, ...]:
    """A catalogue's ``attention``: entries such as {kind: full, layers: 8}, one kind after the other."""
    found: list[LayerCache] = []
    for entry in entries:
        cache, count = _written_cache(entry, fields, origin)
        if len(found) + count > 2 * number(fields, "num_hidden_layers"):
            raise InputError(
                f"attention has more layers than num_hidden_layers, which is {fields['num_hidden_layers']}",
                where=origin.of("attention"),
                hint="give each kind as many layers as have it",
            )
        found += [LayerCache(len(found) + i, cache) for i in range(count)]
    layers = number(fields, "num_hidden_layers")
    return tuple(LayerCache(min(item.layer, layers - 1), item.cache) for item in found)


def _written_cache(entry: object, fields: Mapping[str, object], origin: Origin) -> tuple[Cache, int]:
    """One entry: its kind with the fields of that kind's class, and how many layers have it."""
    where = origin.of("attention")
    if not isinstance(entry, Mapping) or not {"kind", "layers"} <= entry.keys():
        raise InputError(
            f"{quoted(entry)} is no entry of attention",
            where=where,
            hint="write it as {kind: full, layers: 8}",
        )
    kind = entry["kind"]
    if kind not in KINDS:
        raise unknown_name("attention kind", str(kind), KINDS, where=where, listing=", ".join(KINDS))
    wanted = KINDS[kind]._fields
    values = {name: value for name, value in entry.items() if name not in ("kind", "layers")}
    unknown = sorted(str(name) for name in values if name not in wanted)
    if unknown:
        raise unknown_name(f"field of {kind}", unknown[0], wanted, where=where)
    for name, value in {**values, "layers": entry["layers"]}.items():
        fault = None if name == "ssm_dtype" and value in _DTYPES else _number_fault(name, value)
        if fault:
            raise InputError(fault.what, where=where, hint=fault.hint)
    for name, common in (("num_kv_heads", "num_key_value_heads"), ("head_dim", "head_dim")):
        if kind in ("full", "sliding_window", "chunked_local", "cross"):
            values.setdefault(name, fields[common])
    lacks = [name for name in wanted if name not in values and name not in KINDS[kind]._field_defaults]
    if lacks:
        raise InputError(
            f"{kind} attention lacks {', '.join(lacks)}", where=where, hint="add it to the entry"
        )
    return KINDS[kind](**values), number(entry, "layers")


def _stored_kv_dtype(fields: Mapping[str, object]) -> str | None:
    """What the checkpoint says its KV cache is to be stored in, where vLLM follows it.

    utils/torch_utils.py ``get_kv_cache_quant_algo_string`` for ModelOpt, layers/attention/attention.py for
    ``kv_cache_scheme`` of compressed-tensors.
    """
    settings = fields.get("quantization_config")
    if not isinstance(settings, Mapping):
        return None
    inner = settings.get("quantization")
    inner = inner if isinstance(inner, Mapping) else settings
    method = str(settings.get("quant_method") or inner.get("quant_method") or "modelopt")
    scheme = inner.get("kv_cache_scheme") or settings.get("kv_cache_scheme")
    if isinstance(scheme, Mapping):
        bits, is_float = scheme.get("num_bits"), scheme.get("type") == "float"
        if is_float and bits == 8:
            return "fp8"
        return "nvfp4" if is_float and bits == 4 and method.startswith("modelopt") else None
    if not method.startswith("modelopt"):
        return None
    algo = inner.get("kv_cache_quant_algo") or settings.get("kv_cache_quant_algo")
    return {"fp8": "fp8", "nvfp4": "nvfp4"}.get(algo.lower()) if isinstance(algo, str) else None


def _served_dtype(fields: Mapping[str, object], stored: StoredWeights | None) -> str:
    """The dtype that vLLM serves: the config's, else the files', and 16 bits for float32."""
    written = fields.get("dtype")
    if isinstance(written, str):
        dtype = written.removeprefix("torch.")
    else:
        dtype = (stored.dtype if stored else None) or "float32"
    return SERVED_FOR_FLOAT32 if dtype == "float32" else dtype


def _weights(architecture: str, fields: Mapping[str, object], stored: StoredWeights | None) -> Weights:
    quantization = _quantization(fields)
    groups, unknown = _counted_groups(architecture, fields)
    counted = parameters_of(groups) if groups else None
    if stored:
        # Quantized safetensors pack several weights into one element and add scales: their count says little.
        packed = quantization is not None and stored.source == "safetensors"
        parameters = counted if packed else stored.parameters
        return Weights(parameters, stored.source, groups, stored.stored_bytes, quantization)
    given = fields.get("parameters")
    if isinstance(given, int) and given != counted:
        return Weights(given, "catalogue", (), None, quantization)
    return Weights(counted, "config", groups, None, quantization, unknown)


def _counted_groups(
    architecture: str, fields: Mapping[str, object]
) -> tuple[tuple[WeightGroup, ...], str | None]:
    """The weights, listed, or none and why: a config that lacks a size of theirs can still be sized for KV."""
    try:
        return weight_groups(architecture, fields), None
    except InputError as error:
        return (), error.what


def _quantization(fields: Mapping[str, object]) -> Quantization | None:
    """What ``quantization_config`` says, if there is one."""
    settings = fields.get("quantization_config")
    if not isinstance(settings, Mapping):
        return None
    from kvplan.core.quantization import from_config  # most models need it not

    if fields.get("compress_ratios") is not None and settings.get("quant_method") == "fp8":
        # DeepSeek-V4 says what its experts are in outside of the settings.
        expert_dtype = fields.get("expert_dtype")
        settings = {**settings, "quant_method": "deepseek_v4_fp8", "expert_dtype": expert_dtype}
    return from_config(settings)
