"""Which attention each layer of a model has, told from the fields of its config.

A model must never pass for plain full attention because its config says otherwise in a field that
nobody read. So the fields are looked at whatever the architecture is, and a config that hints at
states without saying in which layers is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kvplan.core.architectures import Architecture, number
from kvplan.core.kv_cache import (
    Cache,
    ChunkedLocal,
    CrossAttention,
    FullAttention,
    GatedDeltaNet,
    LatentAttention,
    LayerCache,
    LinearAttention,
    Mamba1State,
    Mamba2State,
    ShortConv,
    SlidingWindow,
    SparseIndexer,
)
from kvplan.errors import InputError

#: What one layer keeps, by keys of `_CACHES`: several where it has several caches, none for a layer that is
#: only an MLP or reads the cache of another.
LayerKinds = tuple[str, ...]

_FULL: LayerKinds = ("full",)
_SLIDING: LayerKinds = ("sliding_window",)
_CHUNKED: LayerKinds = ("chunked_local",)
_STATE: LayerKinds = ("state",)
_CROSS: LayerKinds = ("cross",)
_LATENT: LayerKinds = ("mla",)
_SPARSE: LayerKinds = ("mla", "indexer")

#: Words of ``layer_types`` (transformers 5.24.0, configuration_utils.py ALLOWED_LAYER_TYPES) and of the
#: older lists ``layers_block_type`` (Jamba, Zamba, Bamba) and ``block_types`` (RecurrentGemma).
LAYER_WORDS: Mapping[object, LayerKinds] = {
    "full_attention": _FULL,
    "attention": _FULL,
    "sliding_attention": _SLIDING,
    "chunked_attention": _CHUNKED,
    "linear_attention": _STATE,
    "mamba": _STATE,
    "conv": _STATE,
    "recurrent": _STATE,
    "hybrid": ("full", "state"),
    "moe": (),
    "mlp": (),
}

#: Letters of ``hybrid_override_pattern`` (NVIDIA Nemotron-H configuration_nemotron_h.py).
PATTERN_LETTERS: Mapping[object, LayerKinds] = {"M": _STATE, "*": _FULL, "-": (), "E": ()}

#: Fields that only models with states have: a hint that full attention is not the whole story.
_STATE_FIELDS = (
    "linear_attn_config",
    "linear_conv_kernel_dim",
    "linear_num_value_heads",
    "mamba_d_state",
    "mamba_num_heads",
    "ssm_state_size",
    "ssm_cfg",
    "lru_width",
    "conv_L_cache",
    "full_attn_idxs",
    "attn_layer_indices",
    "time_mix_extra_dim",
)


def layer_caches(config: Mapping[str, object], architecture: Architecture) -> tuple[LayerCache, ...]:
    """What each layer of a model keeps, by layer.

    ``config`` has the fields of a Hugging Face config under Llama's names. Raises `InputError` for a
    layer pattern that cannot be read.
    """
    made: dict[str, Cache] = {}
    found = []
    for layer, kinds in enumerate(layer_kinds(config, architecture)):
        for kind in kinds:
            if kind not in made:
                made[kind] = _CACHES[kind](config)
            found.append(LayerCache(layer, made[kind]))
    return tuple(found)


def layer_kinds(config: Mapping[str, object], architecture: Architecture) -> tuple[LayerKinds, ...]:
    """What each layer keeps, first layer first."""
    layers = number(config, "num_hidden_layers")
    if config.get("kv_lora_rank") is not None and config.get("linear_attn_config") is None:
        return (_LATENT if config.get("index_head_dim") is None else _SPARSE,) * layers
    kinds = list(_written_pattern(config, layers) or _implied_pattern(config, architecture, layers))
    shared = number(config, "num_kv_shared_layers")
    if shared:
        # Gemma-3n and Gemma-4 E: the last layers read the cache of an earlier one.
        kinds[max(0, layers - shared) :] = [()] * min(shared, layers)
    cross = config.get("cross_attention_layers")
    if isinstance(cross, Sequence) and not isinstance(cross, str):
        kinds = [_CROSS if i in cross else kind for i, kind in enumerate(kinds)]
    if config.get("is_encoder_decoder") is True:
        kinds = [(*kind, "cross") for kind in kinds]
    return tuple(kinds)


def _written_pattern(config: Mapping[str, object], layers: int) -> list[LayerKinds] | None:
    """The kinds that the config writes out layer by layer, if it does."""
    for name in ("layer_types", "layers_block_type", "block_types"):
        words = config.get(name)
        if isinstance(words, list):
            if name == "block_types" and words:
                # RecurrentGemma repeats a short pattern.
                words = [words[i % len(words)] for i in range(layers)]
            return _translate(name, words, LAYER_WORDS, layers)
    pattern = config.get("hybrid_override_pattern")
    if isinstance(pattern, str):
        return _translate("hybrid_override_pattern", list(pattern), PATTERN_LETTERS, layers)
    switches = config.get("hybrid_layer_pattern")
    if isinstance(switches, list):
        # MiMo-V2: 1 marks a sliding layer (vLLM model_executor/models/mimo_v2_flash.py).
        return _translate("hybrid_layer_pattern", switches, {0: _FULL, 1: _SLIDING}, layers)
    switches = config.get("attn_type_list")
    if isinstance(switches, list):
        # MiniMax-Text-01: 1 marks full attention, 0 a layer with a state.
        return _translate("attn_type_list", switches, {0: _STATE, 1: _FULL}, layers)
    return None


def _translate(
    name: str, words: Sequence[object], meaning: Mapping[object, LayerKinds], layers: int
) -> list[LayerKinds]:
    """The kinds that the words of a field stand for, one word a layer."""
    if len(words) != layers:
        raise InputError(
            f"{name} names {len(words)} layers, num_hidden_layers is {layers}",
            hint="the two must agree",
        )
    for i, word in enumerate(words):
        # True is no 1 here, and a list cannot be looked up.
        if isinstance(word, bool | dict | list) or word not in meaning:
            known = ", ".join(str(key) for key in meaning)
            raise InputError(f'{name}[{i}] is "{word}", no known layer type', hint=f"known are {known}")
    return [meaning[word] for word in words]


def _implied_pattern(
    config: Mapping[str, object], architecture: Architecture, layers: int
) -> list[LayerKinds]:
    """The kinds that follow from a rule in the config or of the architecture."""
    if architecture.every_layer:
        return [architecture.every_layer] * layers
    period = number(config, "attn_layer_period")
    if period:
        # Jamba: one attention layer in each period.
        offset = number(config, "attn_layer_offset")
        return [_FULL if i % period == offset else _STATE for i in range(layers)]
    interval = number(config, "full_attention_interval")
    if interval:
        return [_FULL if (i + 1) % interval == 0 else _STATE for i in range(layers)]
    for name in _STATE_FIELDS:
        if config.get(name) is not None:
            raise InputError(
                f"{name} says that layers keep a state, but no field says which layers",
                hint="add layer_types with one word a layer: full_attention or linear_attention",
            )
    if config.get("attention_chunk_size") is not None:
        return _chunked_pattern(config, layers)
    return _sliding_pattern(config, architecture, layers)


def _chunked_pattern(config: Mapping[str, object], layers: int) -> list[LayerKinds]:
    """Llama-4: layers with rotary positions are local to a chunk, those without are full."""
    rotary = config.get("no_rope_layers")
    if isinstance(rotary, list) and rotary:
        # 1 means that the layer does use rotary positions, in spite of the field's name.
        return _translate("no_rope_layers", rotary, {0: _FULL, 1: _CHUNKED}, layers)
    interval = number(config, "no_rope_layer_interval", 4)
    return [_FULL if (i + 1) % interval == 0 else _CHUNKED for i in range(layers)]


def _sliding_pattern(
    config: Mapping[str, object], architecture: Architecture, layers: int
) -> list[LayerKinds]:
    if config.get("sliding_window") is None or config.get("use_sliding_window") is False:
        return [_FULL] * layers
    full_every = (
        number(config, "sliding_window_pattern")
        or number(config, "_sliding_window_pattern")
        or architecture.full_every
    )
    if full_every:
        return [_FULL if (i + 1) % full_every == 0 else _SLIDING for i in range(layers)]
    # Qwen: the first max_window_layers stay full, if the window is on at all.
    first = number(config, "max_window_layers") if config.get("use_sliding_window") is True else 0
    return [_FULL if i < first else _SLIDING for i in range(layers)]


def _full_attention(config: Mapping[str, object]) -> Cache:
    """Full layers; Gemma-4 gives them other heads than the sliding ones."""
    return FullAttention(
        num_kv_heads=number(config, "num_global_key_value_heads") or number(config, "num_key_value_heads"),
        head_dim=number(config, "global_head_dim") or number(config, "head_dim"),
        value_head_dim=_other_value_size(config, "v_head_dim", "head_dim"),
    )


def _sliding_window(config: Mapping[str, object]) -> Cache:
    """Sliding layers; MiMo-V2 gives them heads of their own."""
    return SlidingWindow(
        num_kv_heads=number(config, "swa_num_key_value_heads") or number(config, "num_key_value_heads"),
        head_dim=number(config, "swa_head_dim") or number(config, "head_dim"),
        window=_required(config, "sliding_window"),
        value_head_dim=_other_value_size(config, "swa_v_head_dim", "swa_head_dim")
        or _other_value_size(config, "v_head_dim", "head_dim"),
    )


def _chunked_local(config: Mapping[str, object]) -> Cache:
    return ChunkedLocal(
        number(config, "num_key_value_heads"),
        number(config, "head_dim"),
        _required(config, "attention_chunk_size"),
    )


def _cross_attention(config: Mapping[str, object]) -> Cache:
    return CrossAttention(
        number(config, "num_key_value_heads"),
        number(config, "head_dim"),
        number(config, "max_source_positions") or None,
    )


def _latent(config: Mapping[str, object]) -> Cache:
    return LatentAttention(_required(config, "kv_lora_rank"), _required(config, "qk_rope_head_dim"))


def _indexer(config: Mapping[str, object]) -> Cache:
    return SparseIndexer(_required(config, "index_head_dim"))


def _state(config: Mapping[str, object]) -> Cache:
    """The state of a layer, told by the fields that only its kind has."""
    if config.get("linear_num_value_heads") is not None:
        dtype = config.get("mamba_ssm_dtype")
        return GatedDeltaNet(
            num_key_heads=_required(config, "linear_num_key_heads"),
            key_head_dim=_required(config, "linear_key_head_dim"),
            num_value_heads=_required(config, "linear_num_value_heads"),
            value_head_dim=_required(config, "linear_value_head_dim"),
            conv_kernel=_required(config, "linear_conv_kernel_dim"),
            ssm_dtype=dtype if isinstance(dtype, str) else None,
        )
    if config.get("conv_L_cache") is not None:
        return ShortConv(
            number(config, "conv_dim") or number(config, "hidden_size"), _required(config, "conv_L_cache")
        )
    if config.get("attn_type_list") is not None:
        return LinearAttention(number(config, "num_attention_heads"), number(config, "head_dim"))
    heads = number(config, "mamba_num_heads") or number(config, "mamba_n_heads")
    if heads:
        return _mamba2(config, heads)
    expand = number(config, "mamba_expand") or number(config, "expand", 2)
    return Mamba1State(
        intermediate_size=expand * number(config, "hidden_size"),
        state_size=_required(config, "mamba_d_state", "ssm_state_size", "state_size"),
        conv_kernel=_required(config, "mamba_d_conv", "conv_kernel"),
    )


def _mamba2(config: Mapping[str, object], heads: int) -> Cache:
    dtype = config.get("mamba_ssm_cache_dtype")
    return Mamba2State(
        num_heads=heads,
        head_dim=_required(config, "mamba_head_dim", "mamba_d_head"),
        state_size=_required(config, "ssm_state_size", "mamba_d_state"),
        num_groups=_required(config, "n_groups", "mamba_n_groups"),
        conv_kernel=_required(config, "conv_kernel", "mamba_d_conv"),
        ssm_dtype=dtype if isinstance(dtype, str) else None,
    )


_CACHES: Mapping[str, Callable[[Mapping[str, object]], Cache]] = {
    "full": _full_attention,
    "sliding_window": _sliding_window,
    "chunked_local": _chunked_local,
    "cross": _cross_attention,
    "mla": _latent,
    "indexer": _indexer,
    "state": _state,
}


def _other_value_size(config: Mapping[str, object], value: str, key: str) -> int | None:
    size = number(config, value)
    return size if size and size != number(config, key) else None


def _required(config: Mapping[str, object], *names: str) -> int:
    """The first of these fields that is there."""
    for name in names:
        value = number(config, name)
        if value:
            return value
    raise InputError(
        f"{' or '.join(names)} is missing: what its layers keep cannot be told",
        hint="add it as the model's config.json has it, or with --set",
    )
