"""Which caches each layer of a model has, told from the fields of its config.

The rules are those by which vLLM 0.33.0 builds the layers of a class (model_executor/models, vllm/models;
get_kv_cache_spec of each layer), with what transformers 5.24.0 puts in where a config leaves a field out. A model must
never pass for plain full attention because its config says otherwise in a field that nobody read: what
cannot be told is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kvplan.core.architectures import Architecture, Config, number
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
from kvplan.errors import InputError

#: What one layer keeps, by keys of `_CACHES`: several where it has several caches, none for a layer that is
#: only an MLP or reads the cache of another.
LayerKinds = tuple[str, ...]

_FULL: LayerKinds = ("full",)
_SLIDING: LayerKinds = ("sliding_window",)
_CHUNKED: LayerKinds = ("chunked_local",)
#: A state of the kind that `Architecture.state` names.
_STATE: LayerKinds = ("state",)

#: Words of ``layer_types`` and ``layers_block_type`` (transformers 5.24.0, configuration_utils.py
#: ALLOWED_LAYER_TYPES and the older words it still reads).
LAYER_WORDS: Mapping[object, LayerKinds] = {
    "full_attention": _FULL,
    "attention": _FULL,
    "indexed_attention": _FULL,
    "deepseek_sparse_attention": _FULL,
    "sliding_attention": _SLIDING,
    "chunked_attention": _CHUNKED,
    "compressed_sparse_attention": ("compressed_4",),
    "heavily_compressed_attention": ("compressed_128",),
    "linear_attention": _STATE,
    "mamba": _STATE,
    "conv": _STATE,
    "hybrid": ("full", "state"),
    "moe": (),
    "mlp": (),
}

#: Letters of ``hybrid_override_pattern`` (NVIDIA Nemotron-H configuration_nemotron_h.py).
PATTERN_LETTERS: Mapping[object, LayerKinds] = {"M": _STATE, "*": _FULL, "-": (), "E": ()}

#: Numbers of ``compress_ratios`` (transformers 5.24.0, configuration_deepseek_v4.py): 0 is a window alone.
_COMPRESS_RATIOS: Mapping[object, LayerKinds] = {
    0: _SLIDING,
    1: _SLIDING,
    4: ("compressed_4",),
    128: ("compressed_128",),
}

#: What the layers for multi-token prediction are, where the config writes it out. Nemotron-H takes a short stack of
#: layers for one step (vLLM nemotron_h_mtp.py, which allows one step).
_DRAFT_LISTS: Mapping[str, Mapping[object, LayerKinds]] = {
    "mtp_hybrid_override_pattern": PATTERN_LETTERS,
    "mtp_layer_types": LAYER_WORDS,
    "mtp_layers_block_type": LAYER_WORDS,
}
_MAX_DRAFT_LAYERS = 1000

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
    "time_mix_extra_dim",
)


def layer_caches(config: Config, architecture: Architecture) -> tuple[LayerCache, ...]:
    """What each layer of a model keeps, by layer.

    ``config`` has the fields of a Hugging Face config under their common names. Raises `InputError` for a
    layer pattern that cannot be read.
    """
    return _caches(config, architecture, layer_kinds(config, architecture), first_layer=0)


def draft_caches(config: Config, architecture: Architecture) -> tuple[LayerCache, ...]:
    """What the model's own layers for multi-token prediction keep, numbered on from the last layer.

    As many as vLLM builds: none where it has no such module for the class. Raises `InputError` as `layer_caches`.
    """
    layers = number(config, "num_hidden_layers")
    return _caches(config, architecture, draft_kinds(config, architecture), first_layer=layers)


def layer_kinds(config: Config, architecture: Architecture) -> tuple[LayerKinds, ...]:
    """What each layer keeps, first layer first."""
    layers = number(config, "num_hidden_layers")
    if architecture.every_layer is not None:
        return (architecture.every_layer,) * layers
    if _is_encoder(config):
        return ((),) * layers
    if config.get("use_cla") is True:
        raise InputError(
            "use_cla says that layers share keys and values in a way that vLLM does not serve",
            hint="vLLM 0.33 has no such layers; with --set use_cla=false each layer keeps its own",
        )
    kinds = list(_written_pattern(config, layers) or _implied_pattern(config, architecture, layers))
    kinds = _windows_as_served(kinds, config, architecture)
    shared = number(config, "num_kv_shared_layers")
    if shared:
        # Gemma-3n and Gemma-4 E: the last layers read the cache of an earlier one.
        kinds[max(0, layers - shared) :] = [()] * min(shared, layers)
    cross = config.get("cross_attention_layers")
    if isinstance(cross, Sequence) and not isinstance(cross, str):
        kinds = [("cross",) if i in cross else kind for i, kind in enumerate(kinds)]
    if config.get("is_encoder_decoder") is True:
        kinds = [(*kind, "cross") for kind in kinds]
    return tuple(kinds)


def draft_kinds(config: Config, architecture: Architecture) -> tuple[LayerKinds, ...]:
    """What each layer for multi-token prediction keeps.

    Sources: vLLM 0.33.0 config/speculative.py ``hf_config_override`` (which classes have such a module and
    how many layers it takes), model_executor/models/*_mtp.py and vllm/models/*/mtp.py (what they hold).
    """
    count = number(config, "num_nextn_predict_layers")
    if not count or architecture.draft_layer is None:
        return ()
    if architecture.draft_limit is not None:
        count = min(count, architecture.draft_limit)
    for name, meaning in _DRAFT_LISTS.items():
        words = config.get(name)
        if isinstance(words, (str, list)):
            if len(words) > _MAX_DRAFT_LAYERS:
                raise InputError(f"{name} names {len(words):,} layers", hint="no known model has so many")
            return _translate(name, list(words), meaning, len(words))
    words = config.get("layer_types")
    layers = number(config, "num_hidden_layers")
    if isinstance(words, list) and len(words) == layers + number(config, "num_nextn_predict_layers"):
        # Step-3.5 goes on in the list of the model's own layers.
        return _translate("layer_types", words, LAYER_WORDS, len(words))[layers : layers + count]
    return (architecture.draft_layer,) * count


def _caches(
    config: Config, architecture: Architecture, kinds: Sequence[LayerKinds], *, first_layer: int
) -> tuple[LayerCache, ...]:
    """The caches of consecutive layers of these kinds."""
    made: dict[tuple[str, int], tuple[Cache, ...]] = {}
    found = []
    for layer, keys in enumerate(kinds, start=first_layer):
        heads = _heads_of_layer(config, layer)
        for key in keys:
            kind = _resolved(key, config, architecture)
            if (kind, heads) not in made:
                made[kind, heads] = _CACHES[kind]({**config, "num_key_value_heads": heads}, architecture)
            found += [LayerCache(layer, cache) for cache in made[kind, heads]]
        if "full" in keys and _is_latent(config, architecture) and has_indexer(config, layer):
            topk = number(config, "index_topk") or None
            found.append(LayerCache(layer, SparseIndexer(_required(config, "index_head_dim"), topk)))
    return tuple(found)


def _resolved(key: str, config: Config, architecture: Architecture) -> str:
    """A key as this model means it: full attention may be latent, a state is of one kind in each class."""
    if key == "full" and _is_latent(config, architecture):
        return "mla"
    if key == "sliding_window" and architecture.compresses:
        return "compressed_1"
    if key != "state":
        return key
    if architecture.state is None:
        raise InputError(
            f"layers of {architecture.family} are said to keep a state, and which is not known",
            hint="say with architectures which class it is, such as Mamba2ForCausalLM",
        )
    return architecture.state


def _is_latent(config: Config, architecture: Architecture) -> bool:
    return config.get("kv_lora_rank") is not None and not architecture.expands_latents


def has_indexer(config: Config, layer: int) -> bool:
    """Whether a layer of sparse latent attention has an indexer of its own or uses an earlier layer's choice.

    vLLM 0.33.0 models/deepseek_v32/attention.py: all have by default; a pattern marks those without by "S"; else
    one in ``index_topk_freq`` has, and so has every layer for multi-token prediction.
    """
    if config.get("index_head_dim") is None:
        return False
    if layer >= number(config, "num_hidden_layers"):
        return True
    pattern = config.get("index_topk_pattern")
    if isinstance(pattern, str | list):
        return layer >= len(pattern) or pattern[layer] != "S"
    since = max(layer - number(config, "index_skip_topk_offset", 2) + 1, 0)
    return since % number(config, "index_topk_freq", 1) == 0


def _is_encoder(config: Config) -> bool:
    """Whether every token sees every other, so that nothing is kept (EmbeddingGemma, bidirectional variants)."""
    return config.get("is_causal") is False or config.get("use_bidirectional_attention") in (True, "all")


def _heads_of_layer(config: Config, layer: int) -> int:
    """Key/value heads of one layer: DeciLM gives each layer a number of its own."""
    blocks = config.get("block_configs")
    if not isinstance(blocks, list) or layer >= len(blocks):
        return number(config, "num_key_value_heads")
    attention = _attention_block(blocks[layer], layer)
    if attention.get("no_op") is True:
        return 0
    group, heads = attention.get("n_heads_in_group"), number(config, "num_attention_heads")
    if isinstance(group, bool) or not isinstance(group, int) or group < 1 or heads % group:
        raise InputError(
            f'block_configs[{layer}].attention.n_heads_in_group is "{group}", no divisor of {heads} heads',
            hint="the model's config.json has it",
        )
    return heads // group


def _attention_block(block: object, layer: int) -> Mapping[str, object]:
    attention = block.get("attention") if isinstance(block, Mapping) else None
    if not isinstance(attention, Mapping):
        raise InputError(
            f"block_configs[{layer}] has no attention", hint="write it as {attention: {n_heads_in_group: 8}}"
        )
    return attention


# Which layers


def _written_pattern(config: Config, layers: int) -> list[LayerKinds] | None:
    """The kinds that the config writes out layer by layer, if it does."""
    for name in ("layer_types", "layers_block_type"):
        words = config.get(name)
        if isinstance(words, list):
            extra = number(config, "num_nextn_predict_layers")
            if extra and len(words) == layers + extra:
                words = words[:layers]
            return list(_translate(name, words, LAYER_WORDS, layers))
    pattern = config.get("hybrid_override_pattern")
    if isinstance(pattern, str):
        return list(_translate("hybrid_override_pattern", list(pattern), PATTERN_LETTERS, layers))
    switches = config.get("hybrid_layer_pattern")
    if isinstance(switches, list):
        # MiMo-V2: 1 marks a sliding layer (vLLM model_executor/models/mimo_v2.py).
        return list(_translate("hybrid_layer_pattern", switches, {0: _FULL, 1: _SLIDING}, layers))
    switches = config.get("attn_type_list") or config.get("decoder_attention_types")
    if isinstance(switches, list):
        # MiniMax-Text-01: 1 marks full attention, 0 a layer with a state.
        return list(_translate("attn_type_list", switches, {0: _STATE, 1: _FULL}, layers))
    ratios = config.get("compress_ratios")
    if isinstance(ratios, list):
        # DeepSeek-V4 lists its layers for multi-token prediction too.
        return list(_translate("compress_ratios", ratios[:layers], _COMPRESS_RATIOS, layers))
    blocks = config.get("block_configs")
    if isinstance(blocks, list):
        # DeciLM (Nemotron-NAS): attention may be left out of a layer.
        switches = [_attention_block(block, i).get("no_op") is True for i, block in enumerate(blocks)]
        return list(_translate("block_configs", [int(off) for off in switches], {0: _FULL, 1: ()}, layers))
    return _listed_layers(config, layers)


def _listed_layers(config: Config, layers: int) -> list[LayerKinds] | None:
    """The kinds where a field lists the layers of one kind by number."""
    linear = config.get("linear_attn_config")
    if isinstance(linear, Mapping):
        # Kimi-Linear counts layers from 1 (vLLM transformers_utils/configs/kimi_linear.py).
        numbers = _layer_numbers("linear_attn_config.kda_layers", linear.get("kda_layers"))
        return [_STATE if i + 1 in numbers else _FULL for i in range(layers)]
    for name in ("full_attn_idxs", "attn_layer_indices"):
        # LFM2; Bamba.
        if config.get(name) is not None:
            numbers = _layer_numbers(name, config[name])
            return [_FULL if i in numbers else _STATE for i in range(layers)]
    return None


def _layer_numbers(name: str, value: object) -> frozenset[int]:
    if isinstance(value, list) and all(type(item) is int for item in value):
        return frozenset(value)
    raise InputError(f"{name} is no list of layer numbers", hint="write it as [0, 1]")


def _translate(
    name: str, words: Sequence[object], meaning: Mapping[object, LayerKinds], layers: int
) -> tuple[LayerKinds, ...]:
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
    return tuple(meaning[word] for word in words)


def _implied_pattern(config: Config, architecture: Architecture, layers: int) -> list[LayerKinds]:
    """The kinds that follow from a rule in the config or of the architecture."""
    if architecture.compresses:
        # DeepSeek-V4's own default: two layers of 128, then by turns.
        return [("compressed_4",) if i >= 2 and i % 2 else ("compressed_128",) for i in range(layers)]
    period = number(config, "attn_layer_period")
    if period:
        # Jamba: one attention layer in each period.
        offset = number(config, "attn_layer_offset")
        return [_FULL if i % period == offset else _STATE for i in range(layers)]
    interval = number(config, "full_attention_interval") or number(config, "layer_group_size")
    if interval:
        # Qwen3-Next, Ling: the last layer of each group is full. Ling-3 has full layers after the last group too.
        rest = layers // interval * interval if architecture.state == "kda" else layers
        return [_FULL if (i + 1) % interval == 0 or i >= rest else _STATE for i in range(layers)]
    step = number(config, "mamba_step")
    if step:
        # Plamo-2: the middle layer of each step, or the last layer of a model that is no longer than half a step.
        if layers <= step // 2:
            return [_STATE] * (layers - 1) + [_FULL]
        return [_FULL if i % step == step // 2 else _STATE for i in range(layers)]
    for name in _STATE_FIELDS:
        if config.get(name) is not None:
            raise InputError(
                f"{name} says that layers keep a state, but no field says which layers",
                hint="add layer_types with one word a layer: full_attention or linear_attention",
            )
    if "attention_chunk_size" in architecture.defaults and config.get("attention_chunk_size") is not None:
        # Other classes may have the field (MiMo-V2) and do not look at it.
        return _chunked_pattern(config, layers)
    return _sliding_pattern(config, architecture, layers)


def _chunked_pattern(config: Config, layers: int) -> list[LayerKinds]:
    """Llama-4: layers with rotary positions are local to a chunk, those without are full."""
    rotary = config.get("no_rope_layers")
    if isinstance(rotary, list) and rotary:
        # 1 means that the layer does use rotary positions, in spite of the field's name.
        return list(_translate("no_rope_layers", rotary, {0: _FULL, 1: _CHUNKED}, layers))
    interval = number(config, "no_rope_layer_interval", 4)
    return [_FULL if (i + 1) % interval == 0 else _CHUNKED for i in range(layers)]


def _sliding_pattern(config: Config, architecture: Architecture, layers: int) -> list[LayerKinds]:
    """Which layers slide where only a window is given."""
    if _window(config, architecture) is None:
        return [_FULL] * layers
    if architecture.full_every:
        pattern = config.get("sliding_window_pattern", config.get("_sliding_window_pattern"))
        if isinstance(pattern, str) and pattern and not pattern.strip("LG"):
            # EXAONE-4 writes local and global layers as LLLG.
            return [_FULL if pattern[i % len(pattern)] == "G" else _SLIDING for i in range(layers)]
        every = pattern if type(pattern) is int and pattern > 0 else architecture.full_every
        return [_FULL if (i + 1) % every == 0 else _SLIDING for i in range(layers)]
    if config.get("max_window_layers") is not None and "max_window_layers" in architecture.defaults:
        # Qwen: the first max_window_layers stay full.
        first = number(config, "max_window_layers")
        return [_FULL if i < first else _SLIDING for i in range(layers)]
    return [_SLIDING] * layers


def _windows_as_served(
    kinds: list[LayerKinds], config: Config, architecture: Architecture
) -> list[LayerKinds]:
    """Windows as vLLM allocates them.

    engine/arg_utils.py ``create_engine_config`` and layers/attention/attention.py: a class either gives each layer its
    window, or one window holds for the model, and only if no layer is full. In such a class a mixture keeps all
    tokens in every layer. A sliding layer without a window keeps all tokens as well.
    """
    if architecture.compresses or _SLIDING not in kinds:
        return kinds
    mixed = any(kind != _SLIDING for kind in kinds)
    if _window(config, architecture) is None or (mixed and not architecture.mixes_windows):
        return [_FULL if kind == _SLIDING else kind for kind in kinds]
    return kinds


def _window(config: Config, architecture: Architecture) -> int | None:
    """Tokens that a sliding layer sees; None: there is no window. 0 turns it off (config/model.py)."""
    if "use_sliding_window" in architecture.defaults and config.get("use_sliding_window") is not True:
        # Classes with this switch drop the window; others never look at it.
        return None
    return number(config, "sliding_window") or None


# What they keep


def _full_attention(config: Config, architecture: Architecture) -> tuple[Cache, ...]:
    """Full layers; Gemma-4 gives them other heads than the sliding ones."""
    heads = number(config, "num_key_value_heads")
    if config.get("attention_k_eq_v") is not False:
        # Gemma-4's class reads the count for full layers only with this flag (configuration_gemma4.py).
        heads = number(config, "num_global_key_value_heads") or heads
    head_dim = number(config, "global_head_dim") or number(config, "head_dim")
    return (FullAttention(heads, head_dim, _other_value_size(config, "v_head_dim", head_dim)),)


def _expanded_attention(config: Config, architecture: Architecture) -> tuple[Cache, ...]:
    """MiniCPM3: latents are expanded, values padded to the size of keys (minicpm3.py)."""
    return (FullAttention(number(config, "num_attention_heads"), number(config, "head_dim")),)


def _sliding_window(config: Config, architecture: Architecture) -> tuple[Cache, ...]:
    """Sliding layers; MiMo-V2 gives them heads of their own."""
    head_dim = number(config, "swa_head_dim") or number(config, "head_dim")
    return (
        SlidingWindow(
            num_kv_heads=number(config, "swa_num_key_value_heads") or number(config, "num_key_value_heads"),
            head_dim=head_dim,
            window=_required(config, "sliding_window") + architecture.window_extra,
            value_head_dim=_other_value_size(config, "swa_v_head_dim", head_dim)
            or _other_value_size(config, "v_head_dim", head_dim),
        ),
    )


def _chunked_local(config: Config, architecture: Architecture) -> tuple[Cache, ...]:
    heads, head_dim = number(config, "num_key_value_heads"), number(config, "head_dim")
    return (ChunkedLocal(heads, head_dim, _required(config, "attention_chunk_size")),)


def _cross_attention(config: Config, architecture: Architecture) -> tuple[Cache, ...]:
    heads, head_dim = number(config, "num_key_value_heads"), number(config, "head_dim")
    return (CrossAttention(heads, head_dim, number(config, "max_source_positions") or None),)


def _latent(config: Config, architecture: Architecture) -> tuple[Cache, ...]:
    # A model without positions in its latents says 0.
    if config.get("qk_rope_head_dim") is None:
        _required(config, "qk_rope_head_dim")
    return (LatentAttention(_required(config, "kv_lora_rank"), number(config, "qk_rope_head_dim")),)


def _compressed(config: Config, tokens_per_state: int) -> tuple[Cache, ...]:
    """A DeepSeek-V4 layer, its caches in the order in which vLLM makes them (models/deepseek_v4/attention.py)."""
    head_dim = _required(config, "head_dim")
    window: Cache = LatentWindow(head_dim, _required(config, "sliding_window"))
    if tokens_per_state == 1:
        return (window,)
    latent: Cache = CompressedLatent(head_dim, tokens_per_state)
    own = (window, latent, CompressorState(head_dim, tokens_per_state))
    if tokens_per_state != 4:
        return own
    index = _required(config, "index_head_dim")
    return (CompressedIndexer(index, tokens_per_state), CompressorState(index, tokens_per_state), *own)


def _mamba1(config: Config, architecture: Architecture) -> tuple[Cache, ...]:
    """Channels are always ``expand`` times the hidden size, whatever ``intermediate_size`` says."""
    return (
        Mamba1State(
            intermediate_size=number(config, "mamba_expand", 2) * number(config, "hidden_size"),
            state_size=_required(config, "ssm_state_size"),
            conv_kernel=_required(config, "conv_kernel"),
        ),
    )


def _mamba2(config: Config, architecture: Architecture) -> tuple[Cache, ...]:
    heads = _required(config, "mamba_num_heads")
    channels = number(config, "mamba_d_ssm") or number(config, "mamba_expand", 2) * number(
        config, "hidden_size"
    )
    # "auto", or derived as in Zamba2.
    head_dim = number(config, "mamba_head_dim") or channels // heads
    dtype = config.get("mamba_ssm_cache_dtype")
    return (
        Mamba2State(
            num_heads=heads,
            head_dim=head_dim,
            state_size=_required(config, "ssm_state_size"),
            num_groups=number(config, "n_groups"),
            conv_kernel=_required(config, "conv_kernel"),
            ssm_dtype=dtype if isinstance(dtype, str) else None,
        ),
    )


def _gated_delta_net(config: Config, architecture: Architecture) -> tuple[Cache, ...]:
    dtype = config.get("mamba_ssm_dtype")
    return (
        GatedDeltaNet(
            num_key_heads=_required(config, "linear_num_key_heads"),
            key_head_dim=_required(config, "linear_key_head_dim"),
            num_value_heads=_required(config, "linear_num_value_heads"),
            value_head_dim=_required(config, "linear_value_head_dim"),
            conv_kernel=_required(config, "linear_conv_kernel_dim"),
            ssm_dtype=dtype if isinstance(dtype, str) else None,
        ),
    )


def _kimi_delta(config: Config, architecture: Architecture) -> tuple[Cache, ...]:
    """Kimi-Linear has the sizes in a block of its own, Ling-3 uses those of its attention."""
    block = config.get("linear_attn_config")
    if isinstance(block, Mapping):
        heads, head_dim, kernel = (
            _required(block, name) for name in ("num_heads", "head_dim", "short_conv_kernel_size")
        )
    else:
        heads = number(config, "num_attention_heads")
        head_dim = _required(config, "linear_head_dim")
        kernel = _required(config, "short_conv_kernel_size")
    return (KimiDelta(heads, head_dim, heads, head_dim, kernel),)


def _linear_attention(config: Config, architecture: Architecture) -> tuple[Cache, ...]:
    head_dim = number(config, "linear_head_dim") or number(config, "head_dim")
    return (LinearAttention(number(config, "num_attention_heads"), head_dim),)


def _short_conv(config: Config, architecture: Architecture) -> tuple[Cache, ...]:
    channels = number(config, "conv_dim") or number(config, "hidden_size")
    return (ShortConv(channels, _required(config, "conv_L_cache")),)


_CACHES: Mapping[str, Callable[[Config, Architecture], tuple[Cache, ...]]] = {
    "full": _full_attention,
    "expanded": _expanded_attention,
    "sliding_window": _sliding_window,
    "chunked_local": _chunked_local,
    "cross": _cross_attention,
    "mla": _latent,
    "compressed_1": lambda config, _: _compressed(config, 1),
    "compressed_4": lambda config, _: _compressed(config, 4),
    "compressed_128": lambda config, _: _compressed(config, 128),
    "mamba1": _mamba1,
    "mamba2": _mamba2,
    "gated_delta_net": _gated_delta_net,
    "kda": _kimi_delta,
    "linear_attention": _linear_attention,
    "short_conv": _short_conv,
}


def _other_value_size(config: Config, name: str, key_size: int) -> int | None:
    size = number(config, name)
    return size if size and size != key_size else None


def _required(config: Config, name: str) -> int:
    value = config.get(name)
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    raise InputError(
        f"{name} is missing: what its layers keep cannot be told",
        hint="add it as the model's config.json has it, or with --set",
    )
