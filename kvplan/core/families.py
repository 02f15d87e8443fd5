"""Decoders that are more than a `Layout`: what each adds to, or has in place of, the parts of a plain decoder.

`weight_groups` is the way in: the weights of a model, listed from its config. A family's function is found by
the name that `kvplan.core.architectures` gives it. Sources: transformers 5.24.0, models/*/modeling_*.py, for what
there is; vLLM 0.33, model_executor/models and model_executor/layers/mamba, for how ranks share it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from kvplan.core import towers
from kvplan.core.architectures import ARCHITECTURES, Config, Layout, is_on, number
from kvplan.core.attention import has_indexer
from kvplan.core.layouts import (
    Mixer,
    Sheet,
    attention,
    decoder,
    embeddings,
    layer_norms,
    mlp,
    moe,
    nested,
    norm,
    routed_experts,
    self_attention,
)
from kvplan.core.weights import WeightGroup, ceil_div

_FLOAT32 = 4

#: What a family has beside its decoder: towers, or a decoder of its own.
Family = Callable[[Sheet, Layout], None]


def weight_groups(architecture: str, config: Config) -> tuple[WeightGroup, ...]:
    """The weights of a model; empty where kvplan does not know the architecture's.

    ``config`` has the fields of a Hugging Face config under Llama's names, with ``head_dim``,
    ``num_key_value_heads`` and ``intermediate_size`` filled in, as `kvplan.hf_config.read_fields` returns it.
    Raises one `InputError` that names every field that is missing or cannot be a size.
    """
    known = ARCHITECTURES.get(architecture)
    if known is None or known.layout is None:
        return ()
    sheet = Sheet(config)
    _FAMILIES.get(known.family, decoder)(sheet, known.layout)
    return sheet.groups()


def is_plain(family: str) -> bool:
    """Whether the weights of a family follow from its layout alone."""
    return family not in _FAMILIES


# Latent attention: DeepSeek and those after it.


def _deepseek(sheet: Sheet, layout: Layout) -> None:
    decoder(sheet, layout, mixer=latent_attention)
    _next_token_layers(sheet, layout, latent_attention)


def _kimi_k25(sheet: Sheet, layout: Layout) -> None:
    _deepseek(sheet, layout)
    towers.kimi_vision(sheet)


def latent_attention(sheet: Sheet, layout: Layout) -> None:
    """Attention over a compressed latent, with a sparse indexer where one is configured.

    vLLM model_executor/models/deepseek_v2.py: the projections down to the latents and the indexer are on every
    rank, those up to the heads are sharded.
    """
    config = sheet.config
    hidden, heads = sheet.size("hidden_size"), sheet.size("num_attention_heads")
    rank, rotary = sheet.size("kv_lora_rank"), sheet.size("qk_rope_head_dim")
    plain, value = sheet.size("qk_nope_head_dim"), sheet.size("v_head_dim")
    bias = is_on(config, layout.qkv_bias)
    queries = heads * (plain + rotary)
    compressed = number(config, "q_lora_rank")
    if compressed:
        sheet.matrix("self_attn.q_a_proj", compressed, hidden, "replicated", bias=bias)
        sheet.vector("self_attn.q_a_layernorm", compressed)
        sheet.matrix("self_attn.q_b_proj", queries, compressed)
    else:
        sheet.matrix("self_attn.q_proj", queries, hidden)
    sheet.matrix("self_attn.kv_a_proj_with_mqa", rank + rotary, hidden, "replicated", bias=bias)
    sheet.vector("self_attn.kv_a_layernorm", rank)
    sheet.matrix("self_attn.kv_b_proj", heads * (plain + value), rank)
    sheet.matrix("self_attn.o_proj", hidden, heads * value, "columns", bias=bias)
    if config.get("index_head_dim") is not None:
        _indexer(sheet.where(lambda layer: has_indexer(config, layer)), hidden, compressed or hidden)


def _indexer(sheet: Sheet, hidden: int, queries_from: int) -> None:
    heads, head_dim = sheet.size("index_n_heads"), sheet.size("index_head_dim")
    sheet.matrix("self_attn.indexer.wq_b", heads * head_dim, queries_from, "replicated")
    sheet.matrix("self_attn.indexer.wk", head_dim, hidden, "replicated", kind="plain")
    sheet.matrix("self_attn.indexer.weights_proj", heads, hidden, "replicated", kind="plain")
    sheet.vector("self_attn.indexer.k_norm", 2 * head_dim, element_bytes=_FLOAT32)


def _next_token_layers(sheet: Sheet, layout: Layout, mixer: Mixer) -> None:
    """The layers for multi-token prediction: a layer of the decoder after two norms and a projection.

    vLLM model_executor/models/deepseek_mtp.py; the table and the head are those of the decoder.
    """
    layers, hidden = number(sheet.config, "num_hidden_layers"), sheet.size("hidden_size")
    drafts = number(sheet.config, "num_nextn_predict_layers")
    if not drafts:
        return
    here = sheet.place("draft", "model.layers.{}.", range(layers, layers + drafts))
    for name in ("enorm", "hnorm", "shared_head.norm"):
        norm(here, layout, name, hidden)
    here.matrix("eh_proj", hidden, 2 * hidden, "replicated", kind="plain")
    _draft_layer(here, layout, mixer)


def _draft_layer(sheet: Sheet, layout: Layout, mixer: Mixer) -> None:
    """A layer as the decoder's last ones are."""
    mixer(sheet, layout)
    layer_norms(sheet, layout)
    if layout.experts:
        moe(sheet, layout)
    else:
        mlp(sheet, layout, width=sheet.size("intermediate_size"))


def _deepseek_v4(sheet: Sheet, layout: Layout) -> None:
    """DeepSeek-V4: attention over compressed keys, hyper-connections between layers, routing by hash in the first.

    vLLM 0.33 models/deepseek_v4: attention.py, compressor.py, nvidia/model.py.
    """
    config = sheet.config
    hidden, layers = sheet.size("hidden_size"), range(sheet.size("num_hidden_layers"))
    streams = sheet.size("hc_mult")
    decoder(sheet, layout, mixer=_compressed_attention)
    here = sheet.layers(layers)
    mixed = streams * (streams + 2)
    for part in ("attn", "ffn"):
        here.matrix(
            f"hc_{part}_fn", mixed, streams * hidden, "replicated", kind="plain", element_bytes=_FLOAT32
        )
        here.vector(f"hc_{part}_base", mixed, element_bytes=_FLOAT32)
        here.vector(f"hc_{part}_scale", 3, element_bytes=_FLOAT32)
    last = sheet.place("last")
    last.matrix("hc_head_fn", streams, streams * hidden, "replicated", kind="plain", element_bytes=_FLOAT32)
    last.vector("hc_head_base", streams, element_bytes=_FLOAT32)
    last.vector("hc_head_scale", 1, element_bytes=_FLOAT32)
    kinds = _list(config, "mlp_layer_types")
    hashed = [i for i in layers if i < number(config, "num_hash_layers") or "hash_moe" in kinds[i : i + 1]]
    # The experts of each word, by its number.
    used = sheet.size("num_experts_per_tok")
    sheet.layers(hashed).uncounted().matrix(
        "mlp.gate.tid2eid", sheet.size("vocab_size"), used, "replicated", kind="table", element_bytes=4
    )


def _compressed_attention(sheet: Sheet, layout: Layout) -> None:
    hidden, heads, head_dim = (sheet.size(n) for n in ("hidden_size", "num_attention_heads", "head_dim"))
    rank, groups, out = (sheet.size(name) for name in ("q_lora_rank", "o_groups", "o_lora_rank"))
    sheet.matrix("self_attn.q_a_proj", rank, hidden, "replicated")
    sheet.vector("self_attn.q_a_norm", rank)
    sheet.matrix("self_attn.q_b_proj", heads * head_dim, rank)
    sheet.matrix("self_attn.kv_proj", head_dim, hidden, "replicated")
    sheet.vector("self_attn.kv_norm", head_dim)
    sheet.matrix("self_attn.o_a_proj", groups * out, heads * head_dim // (groups or 1))
    sheet.matrix("self_attn.o_b_proj", hidden, groups * out, "columns")
    sheet.vector("self_attn.sinks", heads, "rows", element_bytes=_FLOAT32)
    rates = _compress_rates(sheet.config)
    for rate in sorted(set(rates) - {0}):
        here = sheet.layers([i for i, one in enumerate(rates) if one == rate])
        # Windows of 4 tokens overlap, so keys are made twice as wide.
        _compressor(here, "self_attn.compressor", head_dim, rate)
        if rate == 4:
            size, index_heads = here.size("index_head_dim"), here.size("index_n_heads")
            _compressor(here, "self_attn.indexer.compressor", size, rate)
            here.matrix("self_attn.indexer.wq_b", index_heads * size, rank, "replicated")
            here.matrix("self_attn.indexer.weights_proj", index_heads, hidden, "replicated", kind="plain")


def _compressor(sheet: Sheet, name: str, head_dim: int, rate: int) -> None:
    width, hidden = head_dim * (2 if rate == 4 else 1), sheet.size("hidden_size")
    for part in ("wkv", "wgate"):
        sheet.matrix(f"{name}.{part}", width, hidden, "replicated", kind="plain")
    sheet.vector(f"{name}.ape", rate * width, element_bytes=_FLOAT32)
    sheet.vector(f"{name}.norm", head_dim)


def _compress_rates(config: Config) -> list[int]:
    """How many tokens each layer makes one key of; 0: its keys are of a window alone."""
    layers = number(config, "num_hidden_layers")
    ratios = _list(config, "compress_ratios")[:layers]
    if ratios:
        return [one if isinstance(one, int) and one > 1 else 0 for one in ratios]
    rates = nested(config, "compress_rates") or {}
    return [number(rates, word) for word in layer_words(config)]


def _glm4_moe(sheet: Sheet, layout: Layout) -> None:
    decoder(sheet, layout)
    _next_token_layers(sheet, layout, attention)


# Gated delta nets: Qwen3-Next, Qwen3.5, Kimi-Linear.


def _qwen3_next(sheet: Sheet, layout: Layout) -> None:
    decoder(sheet, layout, mixer=_gated_mixer)
    drafts = number(sheet.config, "mtp_num_hidden_layers", number(sheet.config, "num_nextn_predict_layers"))
    if not drafts:
        return
    # vLLM model_executor/models/qwen3_next_mtp.py and qwen3_5_mtp.py: layers with full attention.
    hidden = sheet.size("hidden_size")
    once = sheet.place("draft", "mtp.")
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        norm(once, layout, name, hidden)
    once.matrix("fc", hidden, 2 * hidden, kind="plain")
    _draft_layer(sheet.place("draft", "mtp.layers.{}.", range(drafts)), layout, _gated_attention)


def _qwen3_5(sheet: Sheet, layout: Layout) -> None:
    _qwen3_next(sheet, layout)
    towers.qwen3_vision(sheet.uncounted())


def _gated_mixer(sheet: Sheet, layout: Layout) -> None:
    interval = number(sheet.config, "full_attention_interval")
    full, rest = _attending(sheet, lambda layer: interval > 0 and (layer + 1) % interval == 0)
    _gated_attention(full, layout)
    gated_delta_net(rest)


def _gated_attention(sheet: Sheet, layout: Layout) -> None:
    """Grouped-query attention whose query's matrix makes a gate of the output too."""
    head_dim = sheet.size("head_dim")
    self_attention(
        sheet,
        heads=sheet.size("num_attention_heads"),
        kv_heads=sheet.size("num_key_value_heads"),
        head_dim=head_dim,
        qkv_bias=is_on(sheet.config, layout.qkv_bias),
        output_bias=is_on(sheet.config, layout.output_bias),
        queries=2 if is_on(sheet.config, ("attn_output_gate", True)) else 1,
    )
    sheet.vector("self_attn.q_norm", head_dim)
    sheet.vector("self_attn.k_norm", head_dim)


def gated_delta_net(sheet: Sheet) -> None:
    """A gated delta net (Qwen3-Next): vLLM model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py."""
    hidden, values = sheet.size("hidden_size"), sheet.size("linear_num_value_heads")
    value_head = sheet.size("linear_value_head_dim")
    key = sheet.size("linear_num_key_heads") * sheet.size("linear_key_head_dim")
    value = values * value_head
    sheet.matrix("linear_attn.in_proj_qkvz", 2 * key + 2 * value, hidden)
    sheet.matrix("linear_attn.in_proj_ba", 2 * values, hidden, kind="plain")
    sheet.matrix("linear_attn.conv1d", 2 * key + value, sheet.size("linear_conv_kernel_dim"), kind="plain")
    sheet.vector("linear_attn.dt_bias", values, "rows")
    sheet.vector("linear_attn.A_log", values, "rows", element_bytes=_FLOAT32)
    sheet.vector("linear_attn.norm", value_head)
    sheet.matrix("linear_attn.out_proj", hidden, value, "columns")


def _kimi_linear(sheet: Sheet, layout: Layout) -> None:
    decoder(sheet, layout, mixer=_kimi_mixer)


def _kimi_mixer(sheet: Sheet, layout: Layout) -> None:
    """Latent attention in some layers, Kimi delta attention in the others; layers count from 1."""
    settings = nested(sheet.config, "linear_attn_config") or {}
    listed = settings.get("kda_layers")
    total = number(sheet.config, "num_hidden_layers")
    delta = [i for i in range(total) if isinstance(listed, list) and i + 1 in listed]
    latent_attention(sheet.layers([i for i in range(total) if i not in set(delta)]), layout)
    here = sheet.layers(delta)
    own = here.of(settings)
    hidden, heads, head_dim = sheet.size("hidden_size"), own.size("num_heads"), own.size("head_dim")
    width = heads * head_dim
    for name in ("q_proj", "k_proj", "v_proj"):
        here.matrix(f"self_attn.{name}", width, hidden)
    here.matrix("self_attn.conv1d", 3 * width, own.size("short_conv_kernel_size"), kind="plain")
    for gate in ("f", "g"):
        here.matrix(f"self_attn.{gate}_a_proj", head_dim, hidden, "replicated")
        here.matrix(f"self_attn.{gate}_b_proj", width, head_dim)
    here.matrix("self_attn.b_proj", heads, hidden)
    here.vector("self_attn.dt_bias", width, "rows", element_bytes=_FLOAT32)
    here.vector("self_attn.A_log", heads, "rows", element_bytes=_FLOAT32)
    here.vector("self_attn.o_norm", head_dim)
    here.matrix("self_attn.o_proj", hidden, width, "columns")


# State space models and their hybrids.


def mamba2(
    sheet: Sheet,
    name: str,
    *,
    inner: int,
    gated_norm: bool = True,
    bias: bool = False,
    output_bias: bool = False,
    conv_bias: bool = True,
) -> None:
    """A Mamba-2 mixer: vLLM model_executor/layers/mamba/mamba_mixer2.py.

    Where there are fewer groups than ranks, each rank holds one, as with key/value heads.
    """
    hidden, heads, groups = (sheet.size(field) for field in ("hidden_size", "mamba_num_heads", "n_groups"))
    kernel, grouped = sheet.size("conv_kernel"), 2 * groups * sheet.size("ssm_state_size")
    sheet.matrix(f"{name}.in_proj", 2 * inner + heads, hidden, bias=bias)
    sheet.matrix(f"{name}.in_proj", grouped, hidden, "kv_heads", bias=bias, heads=groups)
    sheet.matrix(f"{name}.conv1d", inner, kernel, kind="plain", bias=conv_bias)
    sheet.matrix(f"{name}.conv1d", grouped, kernel, "kv_heads", kind="plain", bias=conv_bias, heads=groups)
    sheet.vector(f"{name}.dt_bias", heads, "rows")
    sheet.vector(f"{name}.A_log", heads, "rows", element_bytes=_FLOAT32)
    sheet.vector(f"{name}.D", heads, "rows")
    if gated_norm:
        sheet.vector(f"{name}.norm", inner, "rows")
    sheet.matrix(f"{name}.out_proj", hidden, inner, "columns", bias=output_bias)


def mamba1(sheet: Sheet, name: str, *, inner: int, step: int, norms: bool) -> None:
    """A Mamba-1 mixer, ``step`` being the rank of its time step: vLLM layers/mamba/mamba_mixer.py."""
    config = sheet.config
    hidden, state, kernel = (sheet.size(field) for field in ("hidden_size", "ssm_state_size", "conv_kernel"))
    bias = is_on(config, ("mamba_proj_bias", is_on(config, ("use_bias", False))))
    conv_bias = is_on(config, ("mamba_conv_bias", is_on(config, ("use_conv_bias", True))))
    sheet.matrix(f"{name}.in_proj", 2 * inner, hidden, bias=bias)
    sheet.matrix(f"{name}.conv1d", inner, kernel, kind="plain", bias=conv_bias)
    sheet.matrix(f"{name}.x_proj", step + 2 * state, inner, "columns")
    sheet.matrix(f"{name}.dt_proj", inner, step, bias=True)
    sheet.matrix(f"{name}.A_log", inner, state, kind="vector", element_bytes=_FLOAT32)
    sheet.vector(f"{name}.D", inner, "rows")
    if norms:
        for part, size in (("dt", step), ("b", state), ("c", state)):
            sheet.vector(f"{name}.{part}_layernorm", size)
    sheet.matrix(f"{name}.out_proj", hidden, inner, "columns", bias=bias)


def _jamba(sheet: Sheet, layout: Layout) -> None:
    decoder(sheet, layout, mixer=_jamba_mixer)


def _jamba_mixer(sheet: Sheet, layout: Layout) -> None:
    config = sheet.config
    period, offset = sheet.size("attn_layer_period"), number(config, "attn_layer_offset")
    hidden = sheet.size("hidden_size")
    full, rest = _attending(sheet, lambda layer: period > 0 and layer % period == offset)
    attention(full, layout)
    mamba1(
        rest,
        "mamba",
        inner=sheet.size("mamba_expand") * hidden,
        step=number(config, "mamba_dt_rank") or ceil_div(hidden, 16),
        norms=True,
    )


def _mamba(sheet: Sheet, layout: Layout) -> None:
    """Mamba-1 in every layer, and no MLP."""
    config, hidden = sheet.config, sheet.size("hidden_size")
    embeddings(sheet, layout)
    here = sheet.layers(range(sheet.size("num_hidden_layers")), "backbone.layers.{}.")
    layer_norms(here, layout)
    mamba1(
        here,
        "mixer",
        inner=number(config, "intermediate_size") or sheet.size("mamba_expand") * hidden,
        step=number(config, "time_step_rank") or ceil_div(hidden, 16),
        norms=False,
    )


def _mamba2(sheet: Sheet, layout: Layout) -> None:
    """Mamba-2 in every layer, and no MLP."""
    config = sheet.config
    embeddings(sheet, layout)
    here = sheet.layers(range(sheet.size("num_hidden_layers")), "backbone.layers.{}.")
    layer_norms(here, layout)
    mamba2(
        here,
        "mixer",
        inner=sheet.size("mamba_expand") * sheet.size("hidden_size"),
        bias=is_on(config, ("use_bias", False)),
        output_bias=is_on(config, ("use_bias", False)),
        conv_bias=is_on(config, ("use_conv_bias", True)),
    )


def _nemotron_h(sheet: Sheet, layout: Layout) -> None:
    """One mixer a layer: Mamba-2, attention, an MLP or experts, each after one norm."""
    config = sheet.config
    words = layer_words(config)
    embeddings(sheet, layout)
    layer_norms(sheet.layers(range(len(words))), layout)
    for word in dict.fromkeys(words):
        here = sheet.layers([i for i, one in enumerate(words) if one == word], "backbone.layers.{}.")
        _nemotron_mixer(here, layout, word)
    drafts = number(config, "num_nextn_predict_layers")
    if drafts:
        # vLLM model_executor/models/nemotron_h_mtp.py: the pattern once for each prediction.
        hidden = sheet.size("hidden_size")
        pattern = layer_words(config, "mtp_") or ["*", "E"]
        for word in pattern:
            here = sheet.place("draft", "mtp.layers.{}.", range(drafts))
            norm(here, layout, "norm", hidden)
            _nemotron_mixer(here, layout, word)
        once = sheet.place("draft", "mtp.layers.{}.", range(drafts))
        for name in ("enorm", "hnorm", "final_layernorm"):
            norm(once, layout, name, hidden)
        once.matrix("eh_proj", hidden, 2 * hidden, kind="plain")


def _nemotron_mixer(sheet: Sheet, layout: Layout, word: str) -> None:
    config = sheet.config
    hidden, bias = sheet.size("hidden_size"), is_on(config, layout.mlp_bias)
    if word in _ATTENTION:
        attention(sheet, layout)
    elif word in _STATES:
        mamba2(
            sheet,
            "mixer",
            inner=sheet.size("mamba_num_heads") * sheet.size("mamba_head_dim"),
            bias=is_on(config, ("use_bias", False)),
            output_bias=is_on(config, ("use_bias", False)),
            conv_bias=is_on(config, ("use_conv_bias", True)),
        )
    elif word in ("-", "mlp"):
        mlp(sheet, layout, width=sheet.size("intermediate_size"), name="mixer")
    else:
        # Nemotron-3-Super routes to experts that work on a narrower latent.
        latent = number(config, "moe_latent_size")
        total = sheet.size("n_routed_experts")
        routed_experts(
            sheet,
            total=total,
            used=sheet.size("num_experts_per_tok"),
            width=sheet.size("moe_intermediate_size"),
            hidden=latent,
            gated=False,
            name="mixer",
            router_bytes=_FLOAT32,
        )
        sheet.uncounted().vector("mixer.gate.e_score_correction_bias", total, element_bytes=_FLOAT32)
        shared = number(config, "n_shared_experts", 1) * sheet.size("moe_shared_expert_intermediate_size")
        mlp(sheet, layout, width=shared, name="mixer.shared_experts")
        if latent:
            sheet.matrix("mixer.fc1_latent_proj", latent, hidden, "replicated", bias=bias)
            sheet.matrix("mixer.fc2_latent_proj", hidden, latent, "replicated", bias=bias)


def _hybrid_mamba2(sheet: Sheet, inner: int) -> None:
    """The Mamba-2 mixer of Falcon-H1, Bamba and Granite, whose fields share names."""
    config = sheet.config
    mamba2(
        sheet,
        "mamba",
        inner=inner,
        gated_norm=is_on(config, ("mamba_rms_norm", True)),
        bias=is_on(config, ("mamba_proj_bias", False)),
        output_bias=is_on(config, ("projectors_bias", is_on(config, ("mamba_proj_bias", False)))),
        conv_bias=is_on(config, ("mamba_conv_bias", True)),
    )


def _falcon_h1(sheet: Sheet, layout: Layout) -> None:
    """Attention and Mamba-2 side by side in every layer."""

    def both(here: Sheet, layout: Layout) -> None:
        attention(here, layout)
        inner = number(here.config, "mamba_d_ssm") or here.size("mamba_expand") * here.size("hidden_size")
        _hybrid_mamba2(here, inner)

    decoder(sheet, layout, mixer=both)


def _bamba(sheet: Sheet, layout: Layout) -> None:
    decoder(sheet, layout, mixer=_attention_or_mamba2)


def _attention_or_mamba2(sheet: Sheet, layout: Layout) -> None:
    listed = _list(sheet.config, "attn_layer_indices")
    full, rest = _attending(sheet, lambda layer: layer in listed)
    attention(full, layout)
    _hybrid_mamba2(rest, rest.size("mamba_expand") * rest.size("hidden_size"))


def _granite_hybrid(sheet: Sheet, layout: Layout) -> None:
    """Bamba's layers with a shared MLP, and routed experts beside it where there are any."""
    if not number(sheet.config, "num_experts"):
        layout = layout._replace(experts=None)
        dense = {**sheet.config, "intermediate_size": sheet.size("shared_intermediate_size")}
        sheet = sheet.of(dense)
    decoder(sheet, layout, mixer=_attention_or_mamba2)


def _lfm2(sheet: Sheet, layout: Layout) -> None:
    """Short convolutions in most layers, attention in the others."""
    config = sheet.config
    width = sheet.size("intermediate_size")
    if layout.experts is None and is_on(config, ("block_auto_adjust_ff_dim", True)):
        width = int(2 * width / 3)
        multiplier = config.get("block_ffn_dim_multiplier", 1.0)
        if isinstance(multiplier, int | float):
            multiple = sheet.size("block_multiple_of", 256) or 1
            width = multiple * ceil_div(int(multiplier * width), multiple)
    sheet = sheet.of({**config, "intermediate_size": width})
    decoder(sheet, layout, mixer=_lfm2_mixer)


def _lfm2_mixer(sheet: Sheet, layout: Layout) -> None:
    hidden, bias = sheet.size("hidden_size"), is_on(sheet.config, ("conv_bias", False))
    listed = sheet.config.get("full_attn_idxs")
    full, here = _attending(sheet, lambda layer: not isinstance(listed, list) or layer in listed)
    attention(full, layout)
    # vLLM model_executor/layers/mamba/short_conv.py
    here.matrix("conv.in_proj", 3 * hidden, hidden, bias=bias)
    here.matrix("conv.conv", hidden, here.size("conv_L_cache"), kind="plain", bias=bias)
    here.matrix("conv.out_proj", hidden, hidden, "columns", bias=bias)


def _minimax(sheet: Sheet, layout: Layout) -> None:
    decoder(sheet, layout, mixer=_minimax_mixer)


def _minimax_mixer(sheet: Sheet, layout: Layout) -> None:
    """Lightning attention in most layers: vLLM layers/mamba/linear/minimax_linear_attn.py."""
    hidden, marks = sheet.size("hidden_size"), _list(sheet.config, "attn_type_list")
    full, here = _attending(sheet, lambda layer: marks[layer : layer + 1] == [1])
    attention(full, layout)
    width = sheet.size("num_attention_heads") * sheet.size("head_dim")
    here.matrix("self_attn.qkv_proj", 3 * width, hidden)
    here.matrix("self_attn.output_gate", width, hidden)
    here.matrix("self_attn.out_proj", hidden, width, "columns")
    here.vector("self_attn.norm", width, "rows")


def _zamba2(sheet: Sheet, layout: Layout) -> None:
    """Mamba-2 in every layer, and a few attention blocks that many layers share, each with an adapter of its own."""
    config, hidden = sheet.config, sheet.size("hidden_size")
    width, rank = sheet.size("intermediate_size"), sheet.size("adapter_rank")
    wide, head_dim = sheet.size("attention_hidden_size"), sheet.size("attention_head_dim")
    heads, inner = sheet.size("num_attention_heads"), sheet.size("mamba_expand") * hidden
    layers = range(sheet.size("num_hidden_layers"))
    embeddings(sheet, layout)
    here = sheet.layers(layers)
    norm(here, layout, "input_layernorm", hidden)
    mamba2(
        here,
        "mamba",
        inner=inner,
        bias=is_on(config, ("add_bias_linear", False)),
        output_bias=is_on(config, ("add_bias_linear", False)),
        conv_bias=is_on(config, ("use_conv_bias", True)),
    )
    words = layer_words(config)
    hybrid = [i for i in layers if i in _list(config, "hybrid_layer_ids") or "hybrid" in words[i : i + 1]]
    blocks = sheet.place("all", "model.shared_transformer.{}.", range(sheet.size("num_mem_blocks", 1)))
    for part in ("q_proj", "k_proj", "v_proj"):
        blocks.matrix(f"self_attn.{part}", heads * head_dim, wide)
    blocks.matrix("self_attn.o_proj", hidden, heads * head_dim, "columns")
    norm(blocks, layout, "input_layernorm", wide)
    norm(blocks, layout, "pre_ff_layernorm", hidden)
    mlp(blocks, layout, width=width)
    each = sheet.layers(hybrid)
    each.matrix("linear", hidden, hidden, "replicated")
    each.matrix("gate_up_proj_adapter.0", rank, hidden)
    each.matrix("gate_up_proj_adapter.1", 2 * width, rank)
    if is_on(config, ("use_shared_attention_adapter", False)):
        for part in ("q", "k", "v"):
            each.matrix(f"linear_{part}_adapter.0", rank, wide)
            each.matrix(f"linear_{part}_adapter.1", heads * head_dim, rank)


# Layers with several kinds of attention.


def _step3(sheet: Sheet, layout: Layout) -> None:
    """Step-3: queries are shared, then brought up to the heads; one key and value head on every rank.

    vLLM 0.33, model_executor/models/step3_text.py.
    """
    decoder(sheet, layout, mixer=_factored_attention)


def _factored_attention(sheet: Sheet, layout: Layout) -> None:
    hidden, head_dim = sheet.size("hidden_size"), sheet.size("head_dim")
    heads, shared = sheet.size("num_attention_heads"), sheet.size("share_q_dim")
    sheet.matrix("self_attn.qkv_proj", shared + 2 * head_dim, hidden, "replicated")
    sheet.vector("self_attn.inter_norm", shared)
    sheet.matrix("self_attn.wq", heads * head_dim, shared)
    sheet.matrix("self_attn.o_proj", hidden, heads * head_dim, "columns")


def _llama4(sheet: Sheet, layout: Layout) -> None:
    """Experts in each n-th layer, a wider MLP in the others."""
    decoder(sheet.of({**sheet.config, "intermediate_size": sheet.size("intermediate_size_mlp")}), layout)
    towers.llama4_vision(sheet.uncounted())


def _gemma3(sheet: Sheet, layout: Layout) -> None:
    decoder(sheet, layout)
    towers.siglip(sheet)


def _gemma3n(sheet: Sheet, layout: Layout) -> None:
    """Gemma-3n: alternating updates, a learned augmented residual, and an input to each layer of its own.

    transformers models/gemma3n; in vLLM (gemma3n.py) the alternating updates and the residual's matrices are on
    every rank.
    """
    config = sheet.config
    hidden, layers = sheet.size("hidden_size"), sheet.size("num_hidden_layers")
    own, streams = sheet.size("hidden_size_per_layer_input", 256), sheet.size("altup_num_inputs", 4)
    laurel = sheet.size("laurel_rank", 64)
    shared = number(config, "num_kv_shared_layers")
    decoder(sheet, layout, mixer=lambda here, layout: _reusing_attention(here, layout, layers - shared))
    here = sheet.layers(range(layers))
    here.vector("altup.correct_output_scale", hidden)
    here.matrix("altup.correction_coefs", streams, streams, "replicated", kind="plain")
    here.matrix("altup.prediction_coefs", streams * streams, streams, "replicated", kind="plain")
    here.matrix("altup.modality_router", streams, hidden, "replicated", kind="plain")
    here.vector("altup.router_norm", hidden)
    here.matrix("laurel.linear_left", laurel, hidden, "replicated")
    here.matrix("laurel.linear_right", hidden, laurel, "replicated")
    here.vector("laurel.post_laurel_norm", hidden)
    _per_layer_inputs(sheet, here, own, number(config, "vocab_size_per_layer_input", 262144))
    both = sheet.place("all")
    for part in ("altup_projections", "altup_unembed_projections"):
        for i in range(streams - 1):
            both.matrix(f"{part}.{i}", hidden, hidden, "rows")
    towers.gemma3n_vision(sheet.uncounted())
    towers.gemma3n_audio(sheet.uncounted())


def _reusing_attention(sheet: Sheet, layout: Layout, own: int) -> None:
    """Attention of which only the first ``own`` layers make keys and values."""
    layers = sheet.size("num_hidden_layers")
    heads, head_dim = sheet.size("num_attention_heads"), sheet.size("head_dim")
    attention(sheet.layers(range(own)), layout)
    here, hidden = sheet.layers(range(own, layers)), sheet.size("hidden_size")
    here.matrix("self_attn.q_proj", heads * head_dim, hidden)
    here.matrix("self_attn.o_proj", hidden, heads * head_dim, "columns")
    here.vector("self_attn.q_norm", head_dim)


def _per_layer_inputs(sheet: Sheet, here: Sheet, own: int, vocabulary: int) -> None:
    """The table from which each layer gets an input of its own, and the matrices that bring it in."""
    hidden, layers = sheet.size("hidden_size"), sheet.size("num_hidden_layers")
    here.matrix("per_layer_input_gate", own, hidden, "replicated")
    here.matrix("per_layer_projection", hidden, own, "replicated")
    here.vector("post_per_layer_input_norm", hidden)
    first = sheet.place("all")
    first.matrix("embed_tokens_per_layer", vocabulary, layers * own, "vocab", kind="table")
    first.matrix("per_layer_model_projection", layers * own, hidden, "rows")
    first.vector("per_layer_projection_norm", own)


def _gemma4(sheet: Sheet, layout: Layout) -> None:
    """Gemma-4: full layers with heads of their own, layers that share KV, experts beside the MLP."""
    config = sheet.config
    own = number(config, "hidden_size_per_layer_input")
    layers = range(sheet.size("num_hidden_layers"))
    shared = number(config, "num_kv_shared_layers")
    reused = set(layers[len(layers) - shared :]) if shared else set()
    embeddings(sheet, layout)
    everywhere = sheet.layers(layers)
    layer_norms(everywhere, layout)
    words = layer_words(config)
    every = number(config, "sliding_window_pattern", 6)
    full = {i for i in layers if (words[i] in _ATTENTION if words else (i + 1) % every == 0)}
    for is_full in (True, False):
        for is_reused in (True, False):
            indexes = [i for i in layers if (i in full) == is_full and (i in reused) == is_reused]
            _gemma4_attention(sheet.layers(indexes), is_full=is_full, is_reused=is_reused)
    width = sheet.size("intermediate_size")
    mlp(sheet.layers([i for i in layers if i not in reused]), layout, width=width)
    double = 2 if is_on(config, ("use_double_wide_mlp", False)) else 1
    mlp(sheet.layers(sorted(reused)), layout, width=double * width)
    if own:
        _per_layer_inputs(sheet, everywhere, own, number(config, "vocab_size_per_layer_input", 262144))
    if is_on(config, ("enable_moe_block", False)):
        total, hidden = sheet.size("num_experts"), sheet.size("hidden_size")
        routed_experts(
            everywhere,
            total=total,
            used=sheet.size("top_k_experts"),
            width=sheet.size("moe_intermediate_size"),
            name="moe",
        )
        everywhere.vector("router.scale", hidden)
        everywhere.vector("router.per_expert_scale", total)
        for name in (
            "post_feedforward_layernorm_1",
            "post_feedforward_layernorm_2",
            "pre_feedforward_layernorm_2",
        ):
            norm(everywhere, layout, name, hidden)
    towers.gemma4_vision(sheet)
    towers.gemma4_audio(sheet)


def _gemma4_attention(sheet: Sheet, *, is_full: bool, is_reused: bool) -> None:
    config, hidden = sheet.config, sheet.size("hidden_size")
    heads, kv_heads = sheet.size("num_attention_heads"), sheet.size("num_key_value_heads")
    head_dim = sheet.size("head_dim")
    same = is_full and is_on(config, ("attention_k_eq_v", False))
    if is_full:
        head_dim = number(config, "global_head_dim", head_dim)
    if same:
        kv_heads = number(config, "num_global_key_value_heads", kv_heads)
    sheet.vector("self_attn.q_norm", head_dim)
    if is_reused:
        sheet.matrix("self_attn.q_proj", heads * head_dim, hidden)
        sheet.matrix("self_attn.o_proj", hidden, heads * head_dim, "columns")
    else:
        sheet.vector("self_attn.k_norm", head_dim)
        self_attention(sheet, heads=heads, kv_heads=kv_heads, head_dim=head_dim, value_is_key=same)


def _mimo_v2(sheet: Sheet, layout: Layout) -> None:
    """MiMo-V2: sliding layers have key/value heads of their own, and sinks."""
    decoder(sheet, layout, mixer=_mimo_v2_mixer)


def _mimo_v2_mixer(sheet: Sheet, layout: Layout) -> None:
    marks = _list(sheet.config, "hybrid_layer_pattern")
    for sliding, prefix, sinks in (
        (0, "", ("add_full_attention_sink_bias", False)),
        (1, "swa_", ("add_swa_attention_sink_bias", True)),
    ):
        here = sheet.layers([i for i, mark in enumerate(marks) if mark == sliding])
        heads = here.size(f"{prefix}num_attention_heads")
        self_attention(
            here,
            heads=heads,
            kv_heads=here.size(f"{prefix}num_key_value_heads"),
            head_dim=here.size(f"{prefix}head_dim"),
            value_dim=here.size(f"{prefix}v_head_dim"),
            qkv_bias=is_on(sheet.config, layout.qkv_bias),
        )
        if is_on(sheet.config, sinks):
            here.vector("self_attn.sinks", heads, "rows")


def _mllama(sheet: Sheet, layout: Layout) -> None:
    """Llama-3.2-Vision: in some layers attention to the image takes the place of self-attention."""
    config = sheet.config
    crossing = {i for i in _list(config, "cross_attention_layers") if isinstance(i, int)}
    total = sheet.size("num_hidden_layers")

    def mixer(here: Sheet, layout: Layout) -> None:
        attention(here.layers([i for i in range(total) if i not in crossing]), layout)
        across, head_dim = here.layers(sorted(crossing)), here.size("head_dim")
        attention(across, layout)
        across.vector("cross_attn.q_norm", head_dim)
        across.vector("cross_attn.k_norm", head_dim)
        across.vector("cross_attn_attn_gate", 1)
        across.vector("cross_attn_mlp_gate", 1)

    decoder(sheet, layout, mixer=mixer)
    # The table has 8 rows more than the head, for image tokens.
    sheet.place("first").matrix(
        "embed_tokens.extra", 8, sheet.size("hidden_size"), "replicated", kind="table"
    )
    towers.mllama_vision(sheet)


# Encoders with decoders.


def _encoder_decoder(sheet: Sheet, layout: Layout) -> None:
    """BART and Whisper: an encoder, and a decoder that attends to it."""
    config = sheet.config
    hidden = sheet.size("hidden_size")
    is_whisper = config.get("num_mel_bins") is not None
    embeddings(sheet, layout)
    first = sheet.place("first", "model.encoder.")
    if is_whisper:
        bins = sheet.size("num_mel_bins")
        first.matrix("conv1", hidden, 3 * bins, "replicated", bias=True, kind="plain")
        first.matrix("conv2", hidden, 3 * hidden, "replicated", bias=True, kind="plain")
        positions = sheet.size("max_source_positions")
    else:
        positions = sheet.size("max_position_embeddings") + (layout.position_offset or 0)
        norm(first, layout, "layernorm_embedding", hidden)
    first.matrix("embed_positions", positions, hidden, "replicated", kind="table")
    if is_whisper:
        norm(first, layout, "layer_norm", hidden)
    encoder = sheet.place("first", "model.encoder.layers.{}.", range(sheet.size("encoder_layers")))
    _bart_block(encoder, layout, "encoder", crosses=False, key_bias=not is_whisper)
    here = sheet.layers(range(sheet.size("num_hidden_layers")), "model.decoder.layers.{}.")
    _bart_block(here, layout, "decoder", crosses=True, key_bias=not is_whisper)


def _bart_block(sheet: Sheet, layout: Layout, side: str, *, crosses: bool, key_bias: bool) -> None:
    hidden, width = sheet.size("hidden_size"), sheet.size(f"{side}_ffn_dim")
    for name in ("self_attn", "encoder_attn") if crosses else ("self_attn",):
        for part in ("q_proj", "k_proj", "v_proj"):
            sheet.matrix(f"{name}.{part}", hidden, hidden, bias=key_bias or part != "k_proj")
        sheet.matrix(f"{name}.out_proj", hidden, hidden, "columns", bias=True)
        norm(sheet, layout, f"{name}_layer_norm", hidden)
    sheet.matrix("fc1", width, hidden, bias=True)
    sheet.matrix("fc2", hidden, width, "columns", bias=True)
    norm(sheet, layout, "final_layer_norm", hidden)


def _t5(sheet: Sheet, layout: Layout) -> None:
    """T5: no biases, relative positions in the first layer of each side, a head that may be tied."""
    hidden, heads = sheet.size("hidden_size"), sheet.size("num_attention_heads")
    width, inner = sheet.size("intermediate_size"), heads * sheet.size("head_dim")
    gated = "gated" in str(sheet.config.get("feed_forward_proj", "relu"))
    decoders = sheet.size("num_hidden_layers")
    embeddings(sheet, layout)
    sides = (
        (
            sheet.place("first", "encoder.block.{}.", range(sheet.size("num_layers", decoders))),
            ("SelfAttention",),
        ),
        (sheet.layers(range(decoders), "decoder.block.{}."), ("SelfAttention", "EncDecAttention")),
    )
    for here, attentions in sides:
        for name in attentions:
            for part in ("q", "k", "v"):
                here.matrix(f"{name}.{part}", inner, hidden)
            here.matrix(f"{name}.o", hidden, inner, "columns")
            norm(here, layout, f"{name}.layer_norm", hidden)
        for part in ("wi_0", "wi_1") if gated else ("wi",):
            here.matrix(f"DenseReluDense.{part}", width, hidden)
        here.matrix("DenseReluDense.wo", hidden, width, "columns")
        norm(here, layout, "layer_norm", hidden)
    buckets = sheet.size("relative_attention_num_buckets", 32)
    first = sheet.place("first", "encoder.")
    for side in ("encoder", "decoder"):
        first.matrix(f"{side}_relative_attention_bias", buckets, heads, "replicated", kind="table")
    norm(first, layout, "final_layer_norm", hidden)


def _with(tower: Callable[[Sheet], None]) -> Family:
    """A plain decoder with an encoder of other inputs."""

    def family(sheet: Sheet, layout: Layout) -> None:
        decoder(sheet, layout)
        tower(sheet)

    return family


_ATTENTION: Collection[str] = ("full_attention", "attention", "*")
_STATES: Collection[str] = ("linear_attention", "mamba", "M")


def layer_words(config: Config, prefix: str = "") -> list[str]:
    """The word or letter that a config gives each layer; empty where it writes none."""
    for name in ("layer_types", "layers_block_type"):
        words = config.get(prefix + name)
        if isinstance(words, list):
            return [str(word) for word in words]
    pattern = config.get(f"{prefix}hybrid_override_pattern")
    return list(pattern) if isinstance(pattern, str) else []


def _attending(sheet: Sheet, otherwise: Callable[[int], bool]) -> tuple[Sheet, Sheet]:
    """The layers with attention and the others, by the words of the config, or ``otherwise`` where it has none."""
    layers = range(number(sheet.config, "num_hidden_layers"))
    words = layer_words(sheet.config)
    written = (i for i, word in enumerate(words) if word in _ATTENTION)
    full = dict.fromkeys(written if words else filter(otherwise, layers))
    return sheet.layers([*full]), sheet.layers([i for i in layers if i not in full])


def _list(config: Config, name: str) -> list[object]:
    value = config.get(name)
    return value if isinstance(value, list) else []


_FAMILIES: Mapping[str, Family] = {
    "bamba": _bamba,
    "bart": _encoder_decoder,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "deepseek_v32": _deepseek,
    "deepseek_v4": _deepseek_v4,
    "falcon_h1": _falcon_h1,
    "falcon_mamba": _mamba,
    "gemma3": _gemma3,
    "gemma3n": _gemma3n,
    "gemma4": _gemma4,
    "glm4_moe": _glm4_moe,
    "glm4_moe_lite": _deepseek,
    "glm_moe_dsa": _deepseek,
    "granite_moe_hybrid": _granite_hybrid,
    "jamba": _jamba,
    "kimi_k25": _kimi_k25,
    "kimi_linear": _kimi_linear,
    "lfm2": _lfm2,
    "llama4": _llama4,
    "mamba": _mamba,
    "mamba2": _mamba2,
    "mimo_v2": _mimo_v2,
    "minicpm3": _deepseek,
    "minimax": _minimax,
    "mistral3": _with(towers.pixtral),
    "mllama": _mllama,
    "nemotron_h": _nemotron_h,
    "qwen2_5_vl": _with(towers.qwen2_5_vision),
    "qwen2_vl": _with(towers.qwen2_vision),
    "qwen3_5": _qwen3_5,
    "qwen3_5_moe": _qwen3_5,
    "qwen3_next": _qwen3_next,
    "qwen3_vl": _with(towers.qwen3_vision),
    "qwen3_vl_moe": _with(towers.qwen3_vision),
    "step3": _step3,
    "t5": _t5,
    "whisper": _encoder_decoder,
    "zamba2": _zamba2,
}
