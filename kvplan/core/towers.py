"""Encoders of images and sound, which stand beside a decoder: their weights, listed from ``vision_config``.

Fields that a config leaves out have the defaults of transformers 5.24.0, models/*/configuration_*.py, which is
also the source of what there is. vLLM 0.33 shards the matrices of an encoder over the ranks of tensor parallelism
(``--mm-encoder-tp-mode weights``, its default) and, with several stages, holds it on the first
(``SupportsMultiModal._mark_tower_model`` in model_executor/models/interfaces.py, model runner V2).
"""

from __future__ import annotations

from kvplan.core.layouts import Sheet, nested


def qwen2_vision(sheet: Sheet) -> None:
    """Qwen2-VL: norms with biases, a plain MLP of four times the width."""
    if (vision := _vision(sheet)) is None:
        return
    width = vision.size("embed_dim", 1280)
    _qwen2_ends(vision, width, out=vision.size("hidden_size", 3584), norm=2 * width)
    block = vision.tower("visual.blocks.{}.", range(vision.size("depth", 32)))
    _encoder_block(block, width, mlp=width * vision.size("mlp_ratio", 4))


def qwen2_5_vision(sheet: Sheet) -> None:
    """Qwen2.5-VL: norms without biases, a gated MLP."""
    if (vision := _vision(sheet)) is None:
        return
    width = vision.size("hidden_size", 3584)
    _qwen2_ends(vision, width, out=vision.size("out_hidden_size", 3584), norm=width)
    block = vision.tower("visual.blocks.{}.", range(vision.size("depth", 32)))
    _encoder_block(block, width, mlp=vision.size("intermediate_size", 3420), gated=True, norm=width)


def _qwen2_ends(vision: Sheet, width: int, *, out: int, norm: int) -> None:
    """The patches at the start and the merger of neighbours at the end."""
    here = vision.tower("visual.")
    patch = (
        vision.size("in_chans", 3)
        * vision.size("temporal_patch_size", 2)
        * vision.size("patch_size", 14) ** 2
    )
    here.matrix("patch_embed.proj", width, patch, "replicated")
    merged = width * vision.size("spatial_merge_size", 2) ** 2
    here.vector("merger.ln_q", norm)
    here.matrix("merger.mlp.0", merged, merged, bias=True)
    here.matrix("merger.mlp.2", out, merged, "columns", bias=True)


def qwen3_vision(sheet: Sheet) -> None:
    """Qwen3-VL and Qwen3.5: learned positions, and mergers after some layers (deepstack)."""
    if (vision := _vision(sheet)) is None:
        return
    width = vision.size("hidden_size", 1152)
    here = vision.tower("visual.")
    patch = (
        vision.size("in_channels", 3)
        * vision.size("temporal_patch_size", 2)
        * vision.size("patch_size", 16) ** 2
    )
    here.matrix("patch_embed.proj", width, patch, "replicated", bias=True)
    here.matrix("pos_embed", vision.size("num_position_embeddings", 2304), width, "replicated")
    block = vision.tower("visual.blocks.{}.", range(vision.size("depth", 27)))
    _encoder_block(block, width, mlp=vision.size("intermediate_size", 4304))
    merged = width * vision.size("spatial_merge_size", 2) ** 2
    tapped = vision.config.get("deepstack_visual_indexes", (8, 16, 24))
    mergers = len(tapped) if isinstance(tapped, list | tuple) else 0
    for name, norm, layers in (("merger", width, 1), ("deepstack_merger_list.{}", merged, mergers)):
        if layers:
            one = vision.tower(f"visual.{name}.", range(layers))
            one.vector("norm", 2 * norm)
            one.matrix("linear_fc1", merged, merged, bias=True)
            one.matrix("linear_fc2", vision.size("out_hidden_size", 3584), merged, "columns", bias=True)


def siglip(sheet: Sheet) -> None:
    """Gemma-3's SigLIP and its projection, without the pooling head unless ``vision_use_head`` says so."""
    if (vision := _vision(sheet)) is None:
        return
    width, mlp = vision.size("hidden_size", 768), vision.size("intermediate_size", 3072)
    patch = vision.size("patch_size", 16)
    here = vision.tower("vision_tower.vision_model.")
    here.matrix(
        "embeddings.patch_embedding",
        width,
        vision.size("num_channels", 3) * patch**2,
        "replicated",
        bias=True,
    )
    positions = (vision.size("image_size", 224) // patch) ** 2 if patch else 0
    here.matrix("embeddings.position_embedding", positions, width, "replicated")
    layers = range(vision.size("num_hidden_layers", 12))
    _encoder_block(vision.tower("vision_tower.vision_model.encoder.layers.{}.", layers), width, mlp=mlp)
    here.vector("post_layernorm", 2 * width)
    if vision.config.get("vision_use_head") is True:
        here.vector("head.probe", width)
        _encoder_block(vision.tower("vision_tower.vision_model.head."), width, mlp=mlp, norms=1)
    here.vector("mm_soft_emb_norm", width)
    here.matrix("mm_input_projection_weight", sheet.size("hidden_size"), width, "replicated")


def llama4_vision(sheet: Sheet) -> None:
    """Llama-4: learned positions with a class token, and an adapter that shuffles pixels."""
    if (vision := _vision(sheet, always=True)) is None:
        return
    width, patch = vision.size("hidden_size", 768), vision.size("patch_size", 14)
    here = vision.tower("vision_model.")
    here.matrix("patch_embedding.linear", width, vision.size("num_channels", 3) * patch**2)
    positions = (vision.size("image_size", 448) // patch) ** 2 + 1 if patch else 0
    here.matrix("positional_embedding_vlm", positions, width, "replicated")
    here.vector("class_embedding", width)
    here.vector("layernorm_pre", 2 * width)
    here.vector("layernorm_post", 2 * width)
    mlp = vision.size("intermediate_size", 5632)
    layers = range(vision.size("num_hidden_layers", 34))
    _encoder_block(vision.tower("vision_model.model.layers.{}.", layers), width, mlp=mlp)
    middle, out = vision.size("projector_input_dim", 4096), vision.size("projector_output_dim", 4096)
    here.matrix("vision_adapter.mlp.fc1", middle, mlp)
    here.matrix("vision_adapter.mlp.fc2", out, middle, "columns")
    projector = vision.tower("multi_modal_projector.")
    projector.matrix("linear_1", sheet.size("hidden_size"), vision.size("vision_output_dim", 7680))


def kimi_vision(sheet: Sheet) -> None:
    """Kimi-K2.5's MoonViT and its projector."""
    if (vision := _vision(sheet)) is None:
        return
    width = vision.size("vt_hidden_size", vision.size("hidden_size", 1152))
    mlp = vision.size("vt_intermediate_size", vision.size("intermediate_size", 4304))
    depth = vision.size("vt_num_hidden_layers", vision.size("num_hidden_layers", 27))
    here = vision.tower("vision_tower.")
    here.matrix("patch_embed.proj", width, 3 * vision.size("patch_size", 14) ** 2, "replicated", bias=True)
    positions = vision.size("init_pos_emb_height", vision.size("pos_emb_height", 64))
    positions *= vision.size("init_pos_emb_width", vision.size("pos_emb_width", 64))
    here.matrix("patch_embed.pos_emb", positions, width, "replicated")
    _encoder_block(vision.tower("vision_tower.layers.{}.", range(depth)), width, mlp=mlp)
    here.vector("final_layernorm", 2 * width)
    kernel = vision.config.get("merge_kernel_size")
    sides = [side for side in kernel if isinstance(side, int)] if isinstance(kernel, list | tuple) else [2, 2]
    merged = width
    for side in sides:
        merged *= side
    projector = vision.tower("mm_projector.")
    projector.vector("pre_norm", 2 * width)
    projector.matrix("in_proj", merged, merged, bias=True)
    projector.matrix("out_proj", sheet.size("hidden_size"), merged, "columns", bias=True)


def pixtral(sheet: Sheet) -> None:
    """Mistral-3's Pixtral: no biases, a gated MLP, and a projector that merges patches."""
    if (vision := _vision(sheet)) is None:
        return
    width = vision.size("hidden_size", 1024)
    here = vision.tower("vision_tower.")
    here.matrix(
        "patch_conv", width, vision.size("num_channels", 3) * vision.size("patch_size", 16) ** 2, "replicated"
    )
    here.vector("ln_pre", width)
    block = vision.tower("vision_tower.transformer.layers.{}.", range(vision.size("num_hidden_layers", 24)))
    mlp = vision.size("intermediate_size", 4096)
    _encoder_block(block, width, mlp=mlp, gated=True, norm=width, bias=False, attention_bias=False)
    hidden = sheet.size("hidden_size")
    bias = sheet.config.get("multimodal_projector_bias") is True
    projector = vision.tower("multi_modal_projector.")
    projector.vector("norm", width)
    merged = width * sheet.size("spatial_merge_size", 2) ** 2
    projector.matrix("patch_merger.merging_layer", width, merged, "replicated")
    projector.matrix("linear_1", hidden, width, bias=bias)
    projector.matrix("linear_2", hidden, hidden, "columns", bias=bias)


def gemma4_vision(sheet: Sheet) -> None:
    """Gemma-4's image encoder: four norms a layer, a table of positions for each axis."""
    if (vision := _vision(sheet)) is None:
        return
    width, head_dim = vision.size("hidden_size", 768), vision.size("head_dim", 64)
    heads, kv_heads = vision.size("num_attention_heads", 12), vision.size("num_key_value_heads", 12)
    here = vision.tower("vision_tower.")
    here.matrix("patch_embedder.input_proj", width, 3 * vision.size("patch_size", 16) ** 2, "replicated")
    positions = vision.size("position_embedding_size", 10240)
    here.matrix("patch_embedder.position_embedding_table", 2 * positions, width, "replicated")
    block = vision.tower("vision_tower.encoder.layers.{}.", range(vision.size("num_hidden_layers", 16)))
    block.matrix("self_attn.q_proj", heads * head_dim, width)
    block.matrix("self_attn.k_proj", kv_heads * head_dim, width, "kv_heads", heads=kv_heads)
    block.matrix("self_attn.v_proj", kv_heads * head_dim, width, "kv_heads", heads=kv_heads)
    block.matrix("self_attn.o_proj", width, heads * head_dim, "columns")
    block.vector("self_attn.q_norm", head_dim)
    block.vector("self_attn.k_norm", head_dim)
    mlp = vision.size("intermediate_size", 3072)
    block.matrix("mlp.gate_proj", mlp, width)
    block.matrix("mlp.up_proj", mlp, width)
    block.matrix("mlp.down_proj", width, mlp, "columns")
    block.vector("norms", 4 * width)
    vision.tower("embed_vision.").matrix(
        "embedding_projection", sheet.size("hidden_size"), width, "replicated"
    )


def gemma4_audio(sheet: Sheet) -> None:
    """Gemma-4's conformer, where it hears."""
    settings = nested(sheet.config, "audio_config")
    if settings is None:
        return
    audio = sheet.of(settings)
    width, out = audio.size("hidden_size", 1024), audio.size("output_proj_dims", 1536)
    channels = _pair(settings.get("subsampling_conv_channels"), (128, 32))
    here = audio.tower("audio_tower.")
    _conv_subsampling(here, channels, frequencies=channels[0] // 4, width=width)
    block = audio.tower("audio_tower.layers.{}.", range(audio.size("num_hidden_layers", 12)))
    heads = audio.size("num_attention_heads", 8)
    _conformer_block(block, width, heads=heads, kernel=audio.size("conv_kernel_size", 5))
    here.matrix("output_proj", out, width, "replicated", bias=True)
    audio.tower("embed_audio.").matrix("embedding_projection", sheet.size("hidden_size"), out, "replicated")


#: Parameters of Gemma-3n's MobileNet-V5, which has no sizes in a config: those of ``mobilenetv5_300m_enc`` of timm
#: 1.0, on the meta device.
_MOBILENET_V5 = 294_126_912


def gemma3n_vision(sheet: Sheet) -> None:
    """Gemma-3n's MobileNet-V5 and the tokens of images."""
    settings = nested(sheet.config, "vision_config") or {}
    vision = sheet.of(settings)
    vision.tower("vision_tower.").matrix("timm_model", _MOBILENET_V5, 1, "replicated")
    _gemma3n_embedder(sheet, vision, "embed_vision.", vision.size("hidden_size", 2048))


def gemma3n_audio(sheet: Sheet) -> None:
    """Gemma-3n's conformer and the tokens of sound."""
    settings = nested(sheet.config, "audio_config") or {}
    audio = sheet.of(settings)
    width = audio.size("hidden_size", 1536)
    channels = _pair(settings.get("sscp_conv_channel_size"), (128, 32))
    # Sound has 128 frequencies, which two strides leave 32 of.
    _conv_subsampling(audio.tower("audio_tower."), channels, frequencies=32, width=width)
    block = audio.tower("audio_tower.conformer.{}.", range(audio.size("conf_num_hidden_layers", 12)))
    heads = audio.size("conf_num_attention_heads", 8)
    _conformer_block(block, width, heads=heads, kernel=audio.size("conf_conv_kernel_size", 5))
    _gemma3n_embedder(sheet, audio, "embed_audio.", width)


def _gemma3n_embedder(sheet: Sheet, settings: Sheet, prefix: str, width: int) -> None:
    here = settings.tower(prefix)
    here.matrix("embedding", settings.size("vocab_size", 128), width, "replicated")
    here.vector("norms", 2 * width)
    here.matrix("embedding_projection", sheet.size("hidden_size"), width, "replicated")


def mllama_vision(sheet: Sheet) -> None:
    """Llama-3.2-Vision: tiles with positions of their own, local layers and gated global ones."""
    if (vision := _vision(sheet)) is None:
        return
    width, patch = vision.size("hidden_size", 1280), vision.size("patch_size", 14)
    mlp, tiles = vision.size("intermediate_size", 5120), vision.size("max_num_tiles", 4)
    positions = (vision.size("image_size", 448) // patch) ** 2 + 1 if patch else 0
    ratios = vision.config.get("supported_aspect_ratios")
    kinds = len(ratios) + 1 if isinstance(ratios, list) else 9
    here = vision.tower("vision_model.")
    here.vector("class_embedding", width)
    here.matrix("patch_embedding", width, vision.size("num_channels", 3) * patch**2, "replicated")
    here.matrix("gated_positional_embedding", positions, width, "replicated")
    here.matrix("gated_positional_embedding.tile_embedding", kinds, tiles * positions * width, "replicated")
    here.matrix("tile_positional_embeddings", 2 * kinds, tiles * width, "replicated")
    here.vector("gates", 3)
    here.vector("layernorms", 4 * width)
    for part, count, default, gates in (
        ("transformer", "num_hidden_layers", 32, 0),
        ("global_transformer", "num_global_layers", 8, 2),
    ):
        block = vision.tower(f"vision_model.{part}.layers.{{}}.", range(vision.size(count, default)))
        _encoder_block(block, width, mlp=mlp, attention_bias=False)
        block.vector("gates", gates)
    out = vision.size("vision_output_dim", 7680)
    vision.tower("").matrix("multi_modal_projector", sheet.size("hidden_size"), out, bias=True)


def _vision(sheet: Sheet, *, always: bool = False) -> Sheet | None:
    """The sheet with ``vision_config`` for its config; None where the model has none."""
    settings = nested(sheet.config, "vision_config")
    return sheet.of(settings or {}) if settings is not None or always else None


def _encoder_block(
    sheet: Sheet,
    width: int,
    *,
    mlp: int,
    gated: bool = False,
    norm: int | None = None,
    norms: int = 2,
    bias: bool = True,
    attention_bias: bool = True,
) -> None:
    """A layer of a vision transformer. ``norm`` is the size of one norm, twice the width unless said."""
    for name in ("q_proj", "k_proj", "v_proj"):
        sheet.matrix(f"attn.{name}", width, width, bias=attention_bias)
    sheet.matrix("attn.proj", width, width, "columns", bias=attention_bias)
    if gated:
        sheet.matrix("mlp.gate_proj", mlp, width, bias=bias)
    sheet.matrix("mlp.fc1", mlp, width, bias=bias)
    sheet.matrix("mlp.fc2", width, mlp, "columns", bias=bias)
    sheet.vector("norms", norms * (2 * width if norm is None else norm))


def _conv_subsampling(sheet: Sheet, channels: tuple[int, int], *, frequencies: int, width: int) -> None:
    """Two convolutions of 3 x 3 that halve time and frequency, and a projection."""
    first, second = channels
    sheet.matrix("subsample_conv_projection.conv_0", first, 9, "replicated")
    sheet.matrix("subsample_conv_projection.conv_1", second, 9 * first, "replicated")
    sheet.vector("subsample_conv_projection.norms", first + second)
    sheet.matrix("subsample_conv_projection.input_proj_linear", width, frequencies * second, "replicated")


def _conformer_block(sheet: Sheet, width: int, *, heads: int, kernel: int) -> None:
    """Two feed-forward parts around attention and a light convolution; replicated, as vLLM builds it of nn.Linear."""
    for part in ("start", "end"):
        sheet.matrix(f"ffw_layer_{part}.ffw_layer_1", 4 * width, width, "replicated")
        sheet.matrix(f"ffw_layer_{part}.ffw_layer_2", width, 4 * width, "replicated")
    for name in ("q_proj", "k_proj", "v_proj", "relative_k_proj", "post"):
        sheet.matrix(f"attention.{name}", width, width, "replicated")
    sheet.vector("attention.per_dim_scale", width // heads if heads else 0)
    sheet.matrix("lconv1d.linear_start", 2 * width, width, "replicated")
    sheet.matrix("lconv1d.depthwise_conv1d", width, kernel, "replicated")
    sheet.matrix("lconv1d.linear_end", width, width, "replicated")
    sheet.vector("norms", 9 * width)


def _pair(value: object, default: tuple[int, int]) -> tuple[int, int]:
    if isinstance(value, list | tuple) and len(value) == 2 and all(isinstance(one, int) for one in value):
        return int(value[0]), int(value[1])
    return default
