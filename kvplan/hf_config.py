"""From a Hugging Face config to a model: field names, checks, derived sizes.

A catalogue entry is such a config with a few more fields, so one reader serves both. It works in
this order: the fields of a nested ``text_config`` are brought up; names of older architectures become
the common ones; overrides and class defaults are put in; every field that is read is checked, and all
faults are told at once; then sizes that follow from others are filled in.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from kvplan.core.architectures import ARCHITECTURES, Architecture, number
from kvplan.core.attention import layer_caches
from kvplan.core.families import is_plain, weight_groups
from kvplan.core.kv_cache import KINDS, Cache, LayerCache
from kvplan.core.layouts import mlp_of
from kvplan.core.model import ModelSpec
from kvplan.core.rotary import rotary_elements
from kvplan.core.weights import WeightGroup, Weights, parameters_of
from kvplan.errors import InputError, unknown_name

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

_LENGTHS = {"vocab_size", "max_position_embeddings", "sliding_window", "attention_chunk_size"}
_COUNTS = {
    "attn_layer_period",
    "chunk_size",
    "conv_L_cache",
    "conv_dim",
    "conv_kernel",
    "decoder_sparse_step",
    "expand",
    "expansion_ratio",
    "full_attention_interval",
    "global_head_dim",
    "head_dim",
    "hidden_size",
    "index_head_dim",
    "kv_lora_rank",
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_value_head_dim",
    "mamba_chunk_size",
    "mamba_d_conv",
    "mamba_d_head",
    "mamba_d_state",
    "mamba_expand",
    "mamba_head_dim",
    "mamba_n_groups",
    "mamba_n_heads",
    "mamba_num_heads",
    "max_source_positions",
    "moe_intermediate_size",
    "n_groups",
    "moe_layer_interval",
    "no_rope_layer_interval",
    "num_attention_heads",
    "num_global_key_value_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "num_kv_heads",
    "num_ln_in_parallel_attn",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "ssm_state_size",
    "state_size",
    "swa_head_dim",
    "swa_num_key_value_heads",
    "swa_v_head_dim",
    "v_head_dim",
    "word_embed_proj_dim",
}
#: Counts that may be 0.
_COUNTS_FROM_ZERO = {
    "altup_num_inputs",
    "encoder_ffn_dim",
    "encoder_layers",
    "expert_layer_offset",
    "expert_layer_period",
    "hidden_size_per_layer_input",
    "index_n_heads",
    "index_topk",
    "interleave_moe_layer_step",
    "intermediate_size_mlp",
    "laurel_rank",
    "moe_latent_size",
    "moe_shared_expert_intermediate_size",
    "mtp_num_hidden_layers",
    "num_dense_layers",
    "num_mel_bins",
    "num_mtp_modules",
    "num_nextn_predict_layers",
    "q_lora_rank",
    "shared_intermediate_size",
    "swa_num_attention_heads",
    "top_k_experts",
    "vocab_size_per_layer_input",
    "attn_layer_offset",
    "first_k_dense_replace",
    "max_window_layers",
    "moe_layer_start_index",
    "moe_num_shared_experts",
    "n_shared_experts",
    "num_experts",
    "num_experts_per_tok",
    "num_kv_shared_layers",
    "shared_expert_intermediate_size",
}
_FLAGS = {
    "add_full_attention_sink_bias",
    "add_swa_attention_sink_bias",
    "attention_k_eq_v",
    "attn_output_gate",
    "enable_moe_block",
    "use_double_wide_mlp",
    "attention_bias",
    "bias",
    "do_layer_norm_before",
    "enable_bias",
    "is_encoder_decoder",
    "layer_norm_elementwise_affine",
    "lm_head_bias",
    "mlp_bias",
    "multi_query",
    "new_decoder_architecture",
    "parallel_attn",
    "qk_layernorm",
    "qkv_bias",
    "tie_word_embeddings",
    "use_bias",
    "use_parallel_residual",
    "use_qk_norm",
    "use_qkv_bias",
    "use_sliding_window",
}
_LISTS = {
    "architectures",
    "aliases",
    "attention",
    "attn_type_list",
    "block_types",
    "cross_attention_layers",
    "hybrid_layer_pattern",
    "layer_types",
    "layers_block_type",
    "mlp_only_layers",
    "no_rope_layers",
}
_MAPPINGS = {
    "attn_config",
    "audio_config",
    "linear_attn_config",
    "quantization_config",
    "rope_parameters",
} | {
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
} | {
    "model_type",
    "source",
}
#: Fields of other types that are read: intermediate_size may be a list where it is not used (Gemma-3n),
#: a window pattern may be a word, the last layer with experts may be -1.
_PATTERNS = {"sliding_window_pattern", "_sliding_window_pattern"}
_OTHERS = {"intermediate_size", "moe_layer_end_index", "moe_layer_freq", "parameters"} | _PATTERNS
#: Every field that is read, under its common name.
FIELDS = frozenset(_LENGTHS | _COUNTS | _COUNTS_FROM_ZERO | _FLAGS | _LISTS | _MAPPINGS | _TEXTS | _OTHERS)
#: Every field that a catalogue entry may have: architectures' own names are as good as common ones.
CATALOGUE_FIELDS = FIELDS | {"torch_dtype"} | {n for a in ARCHITECTURES.values() for n in a.names.values()}

#: Names that `ModelSpec` has for config fields, so that ``--set`` takes both.
_SPEC_NAMES = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
}
#: Overrides that leave a total known from files or the catalogue true.
_WEIGHT_NEUTRAL = (
    {"dtype", "max_position_embeddings", "parameters", "quantization_config", "family", "hf_id", "source"}
    | _LISTS
    | {"sliding_window", "use_sliding_window", "max_window_layers", "rope_scaling", "attention_chunk_size"}
)

_REQUIRED = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
_REQUIRED_BY_EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
#: Kinds of rotary embedding that do not stretch the context (transformers 5.24.0,
#: modeling_rope_utils.py; "mrope" only splits positions into three).
_ROPE_NOT_SCALED = {"default", "mrope", "proportional"}


_BRIEF = reprlib.Repr()
_BRIEF.maxlevel, _BRIEF.maxlist, _BRIEF.maxdict = 3, 30, 10


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
    name, architecture = _architecture(flat, origin)
    changes = {_common_name(key, architecture): value for key, value in (overrides or {}).items()}
    fields = read_fields(flat, architecture, changes, origin)
    layers = _layers(fields, architecture, origin)
    if not set(changes) <= _WEIGHT_NEUTRAL:
        # A total that was counted for another shape says nothing about this one.
        stored = None
        fields.pop("parameters", None)
    aliases = fields.get("aliases")
    hf_id = fields.get("hf_id")
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
        rope_scaled=_is_rope_scaled(fields),
        dtype=_served_dtype(fields, stored),
        layers=layers,
        weights=_weights(name, fields, stored)._replace(
            rotary_elements=rotary_elements(architecture.family, fields)
        ),
        source=source,
        hf_id=hf_id if isinstance(hf_id, str) else None,
        aliases=tuple(str(alias) for alias in aliases) if isinstance(aliases, list) else (),
        mlp=mlp_of(architecture.layout, fields),
        mamba_chunk_size=number(fields, "mamba_chunk_size") or number(fields, "chunk_size", 2048),
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
    for name in _COUNTS | _COUNTS_FROM_ZERO:
        # One number for each layer, all alike (Hunyuan).
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
    """The fields of the language model: those of ``text_config`` count more than the outer ones."""
    text = config.get("text_config")
    outer = {key: value for key, value in config.items() if key != "text_config"}
    if not isinstance(text, Mapping):
        return outer
    inner = {key: value for key, value in text.items() if key not in ("architectures", "model_type")}
    # A text_config that leaves a field null does not unset what the model as a whole says.
    return outer | {key: value for key, value in inner.items() if value is not None or key not in outer}


def _architecture(flat: Mapping[str, object], origin: Origin) -> tuple[str, Architecture]:
    names = flat.get("architectures")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        what = "is missing" if names is None else f"is {_quoted(names)}, not a list of names"
        raise InputError(
            f"architectures {what}",
            where=origin.of("architectures"),
            hint="add a line such as architectures: [LlamaForCausalLM]",
        )
    for name in names:
        if name in ARCHITECTURES:
            return name, ARCHITECTURES[name]
    if flat.get("attention") is not None and flat.get("parameters") is not None:
        family = flat.get("family") or flat.get("model_type") or names[0]
        return names[0], Architecture(family=str(family))
    error = unknown_name(
        "architecture",
        names[0],
        ARCHITECTURES,
        where=origin.of("architectures"),
        listing="kvplan/core/architectures.py",
    )
    error.hint = f"{error.hint}; a catalogue entry may give attention and parameters itself"
    raise error


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
    if name == "dtype":
        return _dtype_fault(value)
    if name in _FLAGS:
        fits, wanted, hint = isinstance(value, bool), "true or false", "write true or false"
    elif name in _LISTS:
        items = value if isinstance(value, list) else [None]
        kinds = Mapping if name == "attention" else int | str
        fits = all(isinstance(item, kinds) for item in items)
        wanted = "a list of mappings" if name == "attention" else "a list of words or numbers"
        hint = "write it as [a, b]"
    elif name in _MAPPINGS:
        fits, wanted, hint = isinstance(value, Mapping), "a mapping", "write it as {key: value}"
    elif name in _TEXTS:
        fits, wanted, hint = isinstance(value, str), "text", "put it in quotes"
    elif (name in _PATTERNS and isinstance(value, str)) or (
        name in ("intermediate_size", "moe_layer_freq") and isinstance(value, list)
    ):
        return None
    else:
        return _number_fault(name, value)
    return None if fits else _Fault(name, f"{name} is {_quoted(value)}, not {wanted}", hint)


def _number_fault(name: str, value: object) -> _Fault | None:
    if isinstance(value, bool) or not isinstance(value, int):
        return _Fault(name, f"{name} is {_quoted(value)}, not a whole number", "write a number, such as 8")
    lowest = -1 if name == "moe_layer_end_index" else 0 if name in _COUNTS_FROM_ZERO else 1
    if value < lowest:
        return _Fault(name, f"{name} is {value}, below {lowest}", f"write a number of at least {lowest}")
    highest = {"num_hidden_layers": _MAX_LAYERS, "parameters": _MAX_PARAMETERS}.get(
        name, _MAX_LENGTH if name in _LENGTHS else _MAX_COUNT
    )
    if value > highest:
        return _Fault(name, f"{name} is {value}, above {highest:,}", "no known model is that large")
    return None


def _dtype_fault(value: object) -> _Fault | None:
    if isinstance(value, str) and value.removeprefix("torch.") in _DTYPES:
        return None
    near = difflib.get_close_matches(value[:60], _DTYPES, n=2) if isinstance(value, str) else []
    hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(_DTYPES)}"
    return _Fault("dtype", f"unknown dtype {_quoted(value)}", hint)


def _quoted(value: object) -> str:
    """A wrong value for a message, cut where it is long; what is nested deeply in it is left out."""
    text = _BRIEF.repr(value) if isinstance(value, list | Mapping) else str(value)
    return f'"{text[:60]}..."' if len(text) > 60 else f'"{text}"'


def _complete(fields: dict[str, object], architecture: Architecture) -> None:
    """Fills in the sizes that follow from others."""
    heads, hidden = number(fields, "num_attention_heads"), number(fields, "hidden_size")
    if fields.get("kv_lora_rank") is not None:
        # Latent attention: a head of queries and keys has a part with and one without positions.
        fields["head_dim"] = number(fields, "qk_nope_head_dim") + number(fields, "qk_rope_head_dim") or None
    if fields.get("head_dim") is None and heads and hidden % heads == 0:
        fields["head_dim"] = hidden // heads
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
) -> tuple[LayerCache, ...]:
    written = fields.get("attention")
    if isinstance(written, list):
        return _written_layers(written, fields, origin)
    try:
        return layer_caches(fields, architecture)
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
            f"{_quoted(entry)} is no entry of attention",
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


def _is_rope_scaled(fields: Mapping[str, object]) -> bool:
    """Whether rotary positions are stretched beyond what the model was trained on."""
    for name in ("rope_scaling", "rope_parameters"):
        settings = fields.get(name)
        if not isinstance(settings, Mapping):
            continue
        # Gemma nests one setting for each kind of layer.
        nested = [value for value in settings.values() if isinstance(value, Mapping)]
        for one in (settings, *nested):
            kind = one.get("rope_type", one.get("type"))
            if isinstance(kind, str) and kind not in _ROPE_NOT_SCALED:
                return True
    return False


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

    return from_config(settings)
