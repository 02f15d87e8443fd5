"""The decoder architectures that kvplan knows: their field names, defaults and parameter layout.

Everything here is a fact about a class of Hugging Face transformers. Field names are the ones that
Llama's config uses (``hidden_size``, ``num_hidden_layers``, ...); ``Architecture.names`` says what an
older config calls them. Source of layouts, field names and defaults: transformers 5.24.0,
``models/*/modeling_*.py`` and ``models/*/configuration_*.py``, unless a comment says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

#: Config fields under their common names.
Config = Mapping[str, object]

#: On, off, or decided by a config field that has this value when it is absent.
Flag = bool | tuple[str, bool]

#: A count that follows from the config.
CountRule = Callable[[Config], int]

#: Layers that follow from the config, by their index.
LayerRule = Callable[[Config], Iterable[int]]


class Experts(NamedTuple):
    """The routed experts of a mixture-of-experts model, each a gated MLP.

    Fields read: ``num_experts``, ``num_experts_per_tok``, ``moe_intermediate_size``.
    """

    #: Which layers have experts; the others have the dense MLP.
    layers: LayerRule
    #: Width of all shared experts of one layer together.
    shared_width: CountRule | None = None
    #: A gate of one output before the shared expert (Qwen2-MoE).
    shared_gate: bool = False
    #: One correction per expert and layer, in float32: a parameter in transformers (Ernie 4.5) or a buffer.
    correction: Literal["parameter", "buffer"] | None = None
    #: Biases in the experts and in the router (gpt-oss).
    biases: bool = False


class Layout(NamedTuple):
    """Which parameters a decoder has. The defaults are Llama's."""

    norm: Literal["weight", "weight+bias", "none"] = "weight"
    norms_per_layer: int | CountRule = 2
    final_norm: bool | Callable[[Config], bool] = True
    embedding_norm: bool = False
    qkv_bias: Flag = False
    output_bias: Flag = False
    #: Norms of queries and keys: one head wide, or as wide as all heads.
    qk_norm: Literal["none", "head", "head+bias", "all_heads"] = "none"
    qk_norm_if: Flag = True
    #: One learned logit per attention head (gpt-oss).
    attention_sinks: bool = False
    gated_mlp: bool = True
    #: ``intermediate_size`` is this many times the width of one half of a gated MLP (Qwen: 2).
    mlp_width_divisor: int = 1
    mlp_bias: Flag = False
    experts: Experts | None = None
    #: Learned positions, with this many rows beyond the longest sequence; None: no table.
    position_offset: int | None = None
    #: ``tie_word_embeddings`` where the config does not say.
    tied: bool = False
    head_bias: Flag = False
    #: vLLM builds the vocabulary's table on every stage of a pipeline, not only where it is used.
    every_stage_embeds: bool = False


class Architecture(NamedTuple):
    """What must be known of an architecture to read its config."""

    family: str
    #: None where kvplan cannot count the parameters.
    layout: Layout | None = None
    #: Common field name -> the name in this architecture's config.
    names: Mapping[str, str] = MappingProxyType({})
    #: Class defaults of fields that a config may leave out; a field that is null is not left out.
    defaults: Config = MappingProxyType({})
    #: Number of key/value heads where ``num_key_value_heads`` is not given; None: as many as query heads.
    kv_heads: CountRule | None = None
    #: ``head_dim`` where it is absent is this many times the hidden size by heads (Zamba2).
    head_dim_factor: int = 1
    #: ``intermediate_size`` where it is absent, in multiples of ``hidden_size``; None: it is required.
    mlp_ratio: int | None = None
    #: Where only ``sliding_window`` is given: each n-th layer is full, the others slide; None: all slide.
    full_every: int | None = None
    #: What every layer keeps, whatever the config says, by keys of `kvplan.core.attention`: () for encoders. None:
    #: the config tells.
    every_layer: tuple[str, ...] | None = None
    #: The kind of those layers that keep a state; None: the class has none.
    state: str | None = None
    #: Each layer has a window of its own or none. Otherwise one window holds for the model, and only where no
    #: layer is full (vLLM engine/arg_utils.py).
    mixes_windows: bool = False
    #: Tokens that a sliding layer keeps beyond ``sliding_window`` (vLLM 0.33 commandr.py: the token itself).
    window_extra: int = 0
    #: Latents are only a way to compute keys and values, which are kept whole (vLLM minicpm3.py).
    expands_latents: bool = False
    #: Latents of several tokens are kept as one, beside a window (DeepSeek-V4).
    compresses: bool = False
    #: What a layer for multi-token prediction keeps; None: vLLM has no such layers for the class.
    draft_layer: tuple[str, ...] | None = None
    #: How many of them vLLM builds at most; None: as many as the config says.
    draft_limit: int | None = None


def number(config: Config, name: str, default: int = 0) -> int:
    """A whole-number field, ``default`` where it is absent or null."""
    value = config.get(name)
    return value if isinstance(value, int) else default


def is_on(config: Config, flag: Flag) -> bool:
    """Whether a part of the layout is there."""
    if isinstance(flag, bool):
        return flag
    name, default = flag
    value = config.get(name)
    return default if value is None else bool(value)


def _all_layers(config: Config) -> range:
    return range(number(config, "num_hidden_layers"))


def _after_first_dense(config: Config) -> range:
    return range(number(config, "first_k_dense_replace"), number(config, "num_hidden_layers"))


def _qwen_sparse_layers(config: Config) -> list[int]:
    """Every ``decoder_sparse_step``-th layer that is not in ``mlp_only_layers``."""
    step = number(config, "decoder_sparse_step", 1)
    dense = config.get("mlp_only_layers")
    only_mlp = set(dense) if isinstance(dense, list) else set()
    return [i for i in _all_layers(config) if i not in only_mlp and (i + 1) % step == 0]


def _ernie_sparse_layers(config: Config) -> list[int]:
    """Each ``moe_layer_interval``-th layer from the start index to the end index, -1 being the last."""
    first, last = number(config, "moe_layer_start_index", 1), number(config, "moe_layer_end_index", -1)
    interval = number(config, "moe_layer_interval", 1)
    layers = _all_layers(config)
    last = len(layers) - 1 if last == -1 else last
    return [i for i in layers if first <= i <= last and (i + 1) % interval == 0]


def _moe_frequency_layers(config: Config) -> list[int]:
    """The layers after the first dense ones, each ``moe_layer_freq``-th, or those that a list of it marks."""
    frequency = config.get("moe_layer_freq")
    if isinstance(frequency, list):
        return [i for i, mark in enumerate(frequency) if mark]
    every = frequency if isinstance(frequency, int) and frequency > 0 else 1
    return [i for i in _after_first_dense(config) if i % every == 0]


def _interleaved_layers(config: Config) -> list[int]:
    """Llama-4: the last layer of each ``interleave_moe_layer_step``, or those that ``moe_layers`` lists."""
    listed = config.get("moe_layers")
    if isinstance(listed, list):
        return [i for i in listed if isinstance(i, int)]
    step = number(config, "interleave_moe_layer_step", 1) or 1
    return [*_all_layers(config)][step - 1 :: step]


def _periodic_layers(config: Config) -> list[int]:
    """Jamba: one layer with experts in each ``expert_layer_period``."""
    period, offset = number(config, "expert_layer_period", 2), number(config, "expert_layer_offset", 1)
    return [i for i in _all_layers(config) if period and i % period == offset]


def _step3_sparse_layers(config: Config) -> list[int]:
    """Those of ``moe_layers_enum``, a text such as "4,5,6"; all but the first where there is none."""
    listed = config.get("moe_layers_enum")
    if isinstance(listed, str):
        return [int(one) for one in listed.split(",") if one.strip().isdecimal()]
    return list(_all_layers(config))[1:]


def _hunyuan_shared_width(config: Config) -> int:
    shared = config.get("num_shared_expert")
    shared = shared[0] if isinstance(shared, list) and shared else shared
    return (shared if isinstance(shared, int) else 1) * number(config, "intermediate_size")


def _after_first(field: str) -> LayerRule:
    """The layers after as many dense ones as a field says."""
    return lambda config: range(number(config, field), number(config, "num_hidden_layers"))


def _width(field: str) -> CountRule:
    return lambda config: number(config, field)


def _shared_by_count(count_field: str, default: int) -> CountRule:
    return lambda config: number(config, count_field, default) * number(config, "moe_intermediate_size")


def _falcon_norms(config: Config) -> int:
    """Parallel attention needs one norm, but two in the new decoder architecture."""
    if not is_on(config, ("parallel_attn", True)):
        return 2
    return number(
        config, "num_ln_in_parallel_attn", 2 if is_on(config, ("new_decoder_architecture", False)) else 1
    )


def _falcon_kv_heads(config: Config) -> int:
    """One head, as in vLLM ``ModelConfig.get_total_num_kv_heads``, unless the new decoder says how many."""
    heads = number(config, "num_attention_heads")
    if is_on(config, ("new_decoder_architecture", False)):
        return number(config, "num_kv_heads", heads)
    return 1 if is_on(config, ("multi_query", True)) else heads


def _chatglm_kv_heads(config: Config) -> int:
    heads = number(config, "num_attention_heads")
    return (
        number(config, "multi_query_group_num", heads)
        if is_on(config, ("multi_query_attention", False))
        else heads
    )


def _bigcode_kv_heads(config: Config) -> int:
    return 1 if is_on(config, ("multi_query", True)) else number(config, "num_attention_heads")


def _mpt_kv_heads(config: Config) -> int:
    """The rule of vLLM ``ModelConfig.get_total_num_kv_heads``: ``kv_n_heads`` of ``attn_config``."""
    attention = config.get("attn_config")
    heads = number(config, "num_attention_heads")
    if not isinstance(attention, Mapping):
        return heads
    return number(
        attention, "kv_n_heads", 1 if attention.get("attn_type") == "multiquery_attention" else heads
    )


_ATTENTION_BIAS = ("attention_bias", False)
_USE_BIAS = ("use_bias", False)

_LLAMA = Layout(qkv_bias=_ATTENTION_BIAS, output_bias=_ATTENTION_BIAS, mlp_bias=("mlp_bias", False))
_QWEN2 = Layout(qkv_bias=True)
_QWEN3 = Layout(qkv_bias=_ATTENTION_BIAS, output_bias=_ATTENTION_BIAS, qk_norm="head")
_GEMMA = Layout(every_stage_embeds=True, qkv_bias=_ATTENTION_BIAS, output_bias=_ATTENTION_BIAS, tied=True)
_GEMMA2 = Layout(
    every_stage_embeds=True,
    qkv_bias=_ATTENTION_BIAS,
    output_bias=_ATTENTION_BIAS,
    norms_per_layer=4,
    tied=True,
)
_GEMMA3 = Layout(
    qkv_bias=_ATTENTION_BIAS,
    output_bias=_ATTENTION_BIAS,
    norms_per_layer=4,
    qk_norm="head",
    tied=True,
    every_stage_embeds=True,
)
_OLMO2 = Layout(qkv_bias=_ATTENTION_BIAS, output_bias=_ATTENTION_BIAS, qk_norm="all_heads")
_GPT2 = Layout(
    every_stage_embeds=True,
    norm="weight+bias",
    qkv_bias=True,
    output_bias=True,
    gated_mlp=False,
    mlp_bias=True,
    position_offset=0,
    tied=True,
)

_DEEPSEEK = Layout(
    qkv_bias=_ATTENTION_BIAS,
    experts=Experts(
        layers=_moe_frequency_layers,
        shared_width=_shared_by_count("n_shared_experts", 0),
        correction="buffer",
    ),
)
_DEEPSEEK_V2_EXPERTS = Experts(
    layers=_moe_frequency_layers, shared_width=_shared_by_count("n_shared_experts", 0)
)
_MINIMAX = Layout(experts=Experts(layers=_all_layers))
_QWEN3_MOE = Layout(
    qkv_bias=_ATTENTION_BIAS,
    output_bias=_ATTENTION_BIAS,
    qk_norm="head",
    experts=Experts(layers=_qwen_sparse_layers),
    every_stage_embeds=True,
)
_QWEN3_NEXT = Layout(
    qkv_bias=_ATTENTION_BIAS,
    output_bias=_ATTENTION_BIAS,
    experts=Experts(
        layers=_qwen_sparse_layers, shared_width=_width("shared_expert_intermediate_size"), shared_gate=True
    ),
    every_stage_embeds=True,
)
_BART = Layout(
    norm="weight+bias",
    final_norm=False,
    embedding_norm=True,
    position_offset=2,
    tied=True,
    every_stage_embeds=True,
)

_GPT2_NAMES = {
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "max_position_embeddings": "n_positions",
    "intermediate_size": "n_inner",
}
_MPT_NAMES = {
    "hidden_size": "d_model",
    "num_attention_heads": "n_heads",
    "num_hidden_layers": "n_layers",
    "max_position_embeddings": "max_seq_len",
}
_BART_NAMES = {
    "hidden_size": "d_model",
    "num_hidden_layers": "decoder_layers",
    "num_attention_heads": "decoder_attention_heads",
    "intermediate_size": "decoder_ffn_dim",
}
_LOCAL_EXPERTS = {"num_experts": "num_local_experts", "moe_intermediate_size": "intermediate_size"}
_ROUTED_EXPERTS = {"num_experts": "n_routed_experts"}
_SLIDING_BY_FLAG = {"use_sliding_window": False, "sliding_window": 4096}

#: Mamba layers as Jamba, Granite, Bamba and Falcon-H1 spell them.
_MAMBA_NAMES = {
    "mamba_num_heads": "mamba_n_heads",
    "mamba_head_dim": "mamba_d_head",
    "ssm_state_size": "mamba_d_state",
    "n_groups": "mamba_n_groups",
    "conv_kernel": "mamba_d_conv",
}
_MAMBA2 = {"mamba_num_heads": 128, "ssm_state_size": 256, "n_groups": 1, "conv_kernel": 4, "mamba_expand": 2}
_GATED_DELTA_NET = {
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "num_nextn_predict_layers": 1,
}
_STEP_NAMES = {"num_key_value_heads": "num_attention_groups"}

#: Classes that differ from others in little.
_QWEN2_5_VL = Architecture(
    family="qwen2_5_vl",
    layout=_QWEN2,
    defaults=_SLIDING_BY_FLAG | {"max_window_layers": 80, "num_key_value_heads": 8},
)
_QWEN3_5_MOE = Architecture(
    family="qwen3_5_moe",
    layout=_QWEN3_NEXT,
    names={"num_nextn_predict_layers": "mtp_num_hidden_layers"},
    defaults=_GATED_DELTA_NET,
    draft_layer=("full",),
    state="gated_delta_net",
)
_GEMMA3_MODEL = Architecture(
    family="gemma3",
    layout=_GEMMA3,
    defaults={
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    full_every=6,
    mixes_windows=True,
)

_BY_CLASS: dict[str, Architecture] = {
    # Multi-head, grouped-query and multi-query attention in every layer.
    "LlamaForCausalLM": Architecture(family="llama", layout=_LLAMA, mixes_windows=True),
    "MistralForCausalLM": Architecture(
        family="mistral",
        layout=Layout(),
        defaults={"sliding_window": 4096, "num_key_value_heads": 8},
        mixes_windows=True,
    ),
    "MixtralForCausalLM": Architecture(
        family="mixtral",
        layout=Layout(experts=Experts(layers=_all_layers), every_stage_embeds=True),
        names=_LOCAL_EXPERTS,
        defaults={"num_key_value_heads": 8},
    ),
    "Qwen2ForCausalLM": Architecture(
        family="qwen2",
        layout=_QWEN2,
        defaults=_SLIDING_BY_FLAG | {"max_window_layers": 28, "num_key_value_heads": 32},
    ),
    "Qwen2MoeForCausalLM": Architecture(
        family="qwen2_moe",
        layout=Layout(
            every_stage_embeds=True,
            qkv_bias=("qkv_bias", True),
            experts=Experts(
                layers=_qwen_sparse_layers,
                shared_width=lambda config: number(config, "shared_expert_intermediate_size", 5632),
                shared_gate=True,
            ),
        ),
        defaults=_SLIDING_BY_FLAG | {"max_window_layers": 28, "num_key_value_heads": 16},
        full_every=2,
    ),
    "Qwen3ForCausalLM": Architecture(
        family="qwen3",
        layout=_QWEN3,
        defaults=_SLIDING_BY_FLAG | {"head_dim": 128, "max_window_layers": 28, "num_key_value_heads": 32},
    ),
    "Qwen3MoeForCausalLM": Architecture(
        family="qwen3_moe",
        layout=_QWEN3_MOE,
        defaults=_SLIDING_BY_FLAG | {"num_key_value_heads": 4},
    ),
    # The first multi-token-prediction layer that the hub's config adds is not counted.
    # Source: XiaomiMiMo/MiMo-7B-Base modeling_mimo.py, a subclass of Qwen2.
    "MiMoForCausalLM": Architecture(
        family="mimo",
        layout=_QWEN2,
        defaults=_SLIDING_BY_FLAG | {"max_window_layers": 28, "num_key_value_heads": 32},
        draft_layer=("full",),
    ),
    "Phi3ForCausalLM": Architecture(family="phi3", layout=Layout(), mixes_windows=True),
    "PhimoeForCausalLM": Architecture(
        family="phimoe",
        layout=Layout(
            every_stage_embeds=True,
            norm="weight+bias",
            qkv_bias=_ATTENTION_BIAS,
            output_bias=_ATTENTION_BIAS,
            head_bias=("lm_head_bias", False),
            experts=Experts(layers=_all_layers),
        ),
        names=_LOCAL_EXPERTS,
        defaults={"num_key_value_heads": 8},
    ),
    "PhiForCausalLM": Architecture(
        family="phi",
        layout=Layout(
            norm="weight+bias",
            norms_per_layer=1,
            qkv_bias=True,
            output_bias=True,
            qk_norm="head+bias",
            qk_norm_if=("qk_layernorm", False),
            gated_mlp=False,
            mlp_bias=True,
            head_bias=True,
        ),
        mixes_windows=True,
    ),
    "GemmaForCausalLM": Architecture(
        family="gemma", layout=_GEMMA, defaults={"head_dim": 256, "num_key_value_heads": 16}
    ),
    "Glm4MoeForCausalLM": Architecture(
        family="glm4_moe",
        layout=Layout(
            qkv_bias=_ATTENTION_BIAS,
            qk_norm="head",
            qk_norm_if=("use_qk_norm", False),
            experts=Experts(
                layers=_after_first_dense,
                shared_width=_shared_by_count("n_shared_experts", 1),
                correction="buffer",
            ),
        ),
        names=_ROUTED_EXPERTS,
        defaults={"first_k_dense_replace": 1, "num_key_value_heads": 8},
        draft_layer=("full",),
    ),
    "MiniMaxM2ForCausalLM": Architecture(
        family="minimax_m2",
        layout=Layout(qk_norm="all_heads", experts=Experts(layers=_all_layers, correction="buffer")),
        names=_LOCAL_EXPERTS,
        defaults={"num_key_value_heads": 8},
    ),
    "Ernie4_5ForCausalLM": Architecture(
        family="ernie4_5",
        layout=Layout(qkv_bias=_USE_BIAS, output_bias=_USE_BIAS, mlp_bias=_USE_BIAS, tied=True),
        defaults={"head_dim": 128, "num_key_value_heads": 2},
    ),
    "Ernie4_5_MoeForCausalLM": Architecture(
        family="ernie4_5_moe",
        layout=Layout(
            qkv_bias=_USE_BIAS,
            output_bias=_USE_BIAS,
            mlp_bias=_USE_BIAS,
            head_bias=_USE_BIAS,
            tied=True,
            experts=Experts(
                layers=_ernie_sparse_layers,
                shared_width=_shared_by_count("moe_num_shared_experts", 2),
                correction="parameter",
            ),
        ),
        names={"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
        defaults={"num_key_value_heads": 4},
        draft_layer=("full",),
    ),
    "SmolLM3ForCausalLM": Architecture(
        family="smollm3",
        layout=Layout(
            qkv_bias=_ATTENTION_BIAS, output_bias=_ATTENTION_BIAS, mlp_bias=("mlp_bias", False), tied=True
        ),
        defaults={"use_sliding_window": False, "num_key_value_heads": 4},
        mixes_windows=True,
    ),
    "StableLmForCausalLM": Architecture(
        family="stablelm",
        layout=Layout(
            every_stage_embeds=True,
            norm="weight+bias",
            norms_per_layer=lambda config: 1 if is_on(config, ("use_parallel_residual", False)) else 2,
            qkv_bias=("use_qkv_bias", False),
            # One bias-free norm per head, so as wide as all heads together.
            qk_norm="all_heads",
            qk_norm_if=("qk_layernorm", False),
        ),
        defaults={"num_key_value_heads": 32},
    ),
    "CohereForCausalLM": Architecture(
        family="cohere",
        layout=Layout(
            every_stage_embeds=True,
            norms_per_layer=1,
            qkv_bias=_ATTENTION_BIAS,
            output_bias=_ATTENTION_BIAS,
            qk_norm="all_heads",
            qk_norm_if=("use_qk_norm", False),
            tied=True,
        ),
    ),
    "Starcoder2ForCausalLM": Architecture(
        family="starcoder2",
        layout=Layout(
            norm="weight+bias",
            qkv_bias=("use_bias", True),
            output_bias=("use_bias", True),
            gated_mlp=False,
            mlp_bias=("use_bias", True),
            tied=True,
        ),
        defaults={"num_key_value_heads": 2},
        mixes_windows=True,
    ),
    "FalconForCausalLM": Architecture(
        family="falcon",
        layout=Layout(
            every_stage_embeds=True,
            norm="weight+bias",
            norms_per_layer=_falcon_norms,
            qkv_bias=("bias", False),
            output_bias=("bias", False),
            gated_mlp=False,
            mlp_bias=("bias", False),
            tied=True,
        ),
        names={"intermediate_size": "ffn_hidden_size", "hidden_size": "n_embed"}
        | {"num_attention_heads": "n_head", "num_hidden_layers": "n_layer"},
        defaults={"max_position_embeddings": 2048},
        kv_heads=_falcon_kv_heads,
        mlp_ratio=4,
    ),
    "MptForCausalLM": Architecture(
        family="mpt",
        layout=Layout(gated_mlp=False, tied=True),
        names=_MPT_NAMES,
        kv_heads=_mpt_kv_heads,
        mlp_ratio=4,
    ),
    "BloomForCausalLM": Architecture(
        family="bloom",
        layout=Layout(
            every_stage_embeds=True,
            norm="weight+bias",
            embedding_norm=True,
            qkv_bias=True,
            output_bias=True,
            gated_mlp=False,
            mlp_bias=True,
            tied=True,
        ),
        names={"hidden_size": "n_embed", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer"},
        mlp_ratio=4,
    ),
    "OPTForCausalLM": Architecture(
        family="opt",
        layout=Layout(
            every_stage_embeds=True,
            norm="weight+bias",
            # opt-350m norms after attention and has no final norm.
            final_norm=lambda config: is_on(config, ("do_layer_norm_before", True)),
            qkv_bias=("enable_bias", True),
            output_bias=("enable_bias", True),
            gated_mlp=False,
            mlp_bias=("enable_bias", True),
            # The table starts with two rows that no position uses (OPTLearnedPositionalEmbedding).
            position_offset=2,
            tied=True,
        ),
        names={"intermediate_size": "ffn_dim"},
    ),
    "GPT2LMHeadModel": Architecture(family="gpt2", layout=_GPT2, names=_GPT2_NAMES, mlp_ratio=4),
    "GPTBigCodeForCausalLM": Architecture(
        family="gpt_bigcode",
        layout=_GPT2,
        names=_GPT2_NAMES,
        kv_heads=_bigcode_kv_heads,
        mlp_ratio=4,
        mixes_windows=True,
    ),
    "GPTJForCausalLM": Architecture(
        family="gptj",
        layout=Layout(
            every_stage_embeds=True,
            norm="weight+bias",
            norms_per_layer=1,
            gated_mlp=False,
            mlp_bias=True,
            head_bias=True,
        ),
        names=_GPT2_NAMES,
        mlp_ratio=4,
    ),
    "GPTNeoXForCausalLM": Architecture(
        family="gpt_neox",
        layout=Layout(
            norm="weight+bias",
            qkv_bias=("attention_bias", True),
            output_bias=("attention_bias", True),
            gated_mlp=False,
            mlp_bias=True,
        ),
        mixes_windows=True,
    ),
    "GraniteForCausalLM": Architecture(family="granite", layout=_LLAMA, mixes_windows=True),
    "OlmoForCausalLM": Architecture(
        family="olmo",
        layout=Layout(norm="none", qkv_bias=_ATTENTION_BIAS, output_bias=_ATTENTION_BIAS),
        mixes_windows=True,
    ),
    "Olmo2ForCausalLM": Architecture(family="olmo2", layout=_OLMO2, mixes_windows=True),
    # internlm/internlm-20b modeling_internlm.py: Llama with a flag that biases all four projections.
    "InternLMForCausalLM": Architecture(
        family="internlm", layout=Layout(qkv_bias=("bias", True), output_bias=("bias", True))
    ),
    # internlm/internlm2-20b modeling_internlm2.py: wqkv and wo share one flag.
    "InternLM2ForCausalLM": Architecture(
        family="internlm2",
        layout=Layout(every_stage_embeds=True, qkv_bias=("bias", True), output_bias=("bias", True)),
    ),
    # Qwen/Qwen-72B modeling_qwen.py: c_attn has a bias, w1 and w2 are intermediate_size / 2 wide.
    "QWenLMHeadModel": Architecture(
        family="qwen",
        layout=Layout(qkv_bias=True, mlp_width_divisor=2),
        names={"max_position_embeddings": "seq_length"},
    ),
    "OlmoeForCausalLM": Architecture(
        family="olmoe",
        layout=Layout(
            qkv_bias=_ATTENTION_BIAS,
            output_bias=_ATTENTION_BIAS,
            qk_norm="all_heads",
            experts=Experts(layers=_all_layers),
            every_stage_embeds=True,
        ),
        names={"moe_intermediate_size": "intermediate_size"},
    ),
    # LGAI-EXAONE/EXAONE-3.5 modeling_exaone.py: Llama under other names.
    "ExaoneForCausalLM": Architecture(
        family="exaone", layout=Layout(), names={"num_hidden_layers": "num_layers"}
    ),
    "Exaone4ForCausalLM": Architecture(
        family="exaone4",
        layout=Layout(qk_norm="head"),
        defaults={"sliding_window": 4096},
        full_every=4,
        mixes_windows=True,
    ),
    "SeedOssForCausalLM": Architecture(
        family="seed_oss",
        layout=Layout(
            qkv_bias=("attention_bias", True),
            output_bias=("attention_out_bias", False),
            mlp_bias=("mlp_bias", False),
        ),
        defaults={"head_dim": 128, "num_key_value_heads": 8},
        mixes_windows=True,
    ),
    "GraniteMoeForCausalLM": Architecture(
        family="granite_moe",
        layout=Layout(
            qkv_bias=_ATTENTION_BIAS,
            output_bias=_ATTENTION_BIAS,
            experts=Experts(layers=_all_layers),
            every_stage_embeds=True,
        ),
        names=_LOCAL_EXPERTS,
    ),
    "GraniteMoeSharedForCausalLM": Architecture(
        family="granite_moe_shared",
        layout=Layout(
            qkv_bias=_ATTENTION_BIAS,
            output_bias=_ATTENTION_BIAS,
            experts=Experts(layers=_all_layers, shared_width=_width("shared_intermediate_size")),
            every_stage_embeds=True,
        ),
        names=_LOCAL_EXPERTS,
    ),
    "Dots1ForCausalLM": Architecture(
        family="dots1",
        layout=Layout(
            qkv_bias=_ATTENTION_BIAS,
            output_bias=_ATTENTION_BIAS,
            qk_norm="head",
            experts=Experts(
                layers=_after_first_dense,
                shared_width=_shared_by_count("n_shared_experts", 0),
                correction="buffer",
            ),
        ),
        names=_ROUTED_EXPERTS,
        mixes_windows=True,
        defaults=_SLIDING_BY_FLAG | {"max_window_layers": 62},
    ),
    "GlmForCausalLM": Architecture(
        family="glm",
        layout=Layout(qkv_bias=("attention_bias", True)),
        defaults={"head_dim": 128, "num_key_value_heads": 2},
        mixes_windows=True,
    ),
    "Glm4ForCausalLM": Architecture(
        family="glm4",
        layout=Layout(qkv_bias=("attention_bias", True), norms_per_layer=4),
        defaults={"head_dim": 128, "num_key_value_heads": 2},
    ),
    # zai-org/glm-4-9b-chat modeling_chatglm.py; vLLM model_executor/models/chatglm.py.
    "ChatGLMModel": Architecture(
        family="chatglm",
        layout=Layout(
            qkv_bias=("add_qkv_bias", False),
            output_bias=("add_bias_linear", False),
            mlp_bias=("add_bias_linear", False),
            every_stage_embeds=True,
        ),
        names={
            "num_hidden_layers": "num_layers",
            "vocab_size": "padded_vocab_size",
            "intermediate_size": "ffn_hidden_size",
            "head_dim": "kv_channels",
            "max_position_embeddings": "seq_length",
        },
        kv_heads=_chatglm_kv_heads,
    ),
    # baichuan-inc/Baichuan2-7B-Chat modeling_baichuan.py: W_pack is the three projections as one.
    "BaichuanForCausalLM": Architecture(
        family="baichuan", layout=Layout(), names={"max_position_embeddings": "model_max_length"}
    ),
    # openbmb/MiniCPM-2B-sft-bf16 modeling_minicpm.py: Llama with scaled residuals.
    "MiniCPMForCausalLM": Architecture(family="minicpm", layout=Layout(tied=True, every_stage_embeds=True)),
    # internlm/internlm3-8b-instruct modeling_internlm3.py
    "InternLM3ForCausalLM": Architecture(
        family="internlm3",
        layout=Layout(qkv_bias=("qkv_bias", False), output_bias=("bias", False), mlp_bias=("bias", False)),
        mixes_windows=True,
    ),
    "HunYuanDenseV1ForCausalLM": Architecture(
        family="hunyuan_dense",
        layout=Layout(qkv_bias=_ATTENTION_BIAS, output_bias=_ATTENTION_BIAS, qk_norm="head"),
        mixes_windows=True,
    ),
    # tencent/Hunyuan-A13B-Instruct: experts and a shared MLP in all layers.
    "HunYuanMoEV1ForCausalLM": Architecture(
        family="hunyuan_moe",
        layout=Layout(
            qkv_bias=_ATTENTION_BIAS,
            output_bias=_ATTENTION_BIAS,
            qk_norm="head",
            experts=Experts(layers=_all_layers, shared_width=_hunyuan_shared_width),
        ),
        names={"num_experts_per_tok": "moe_topk", "moe_intermediate_size": "intermediate_size"},
        mixes_windows=True,
    ),
    "Step3TextForCausalLM": Architecture(
        family="step3",
        kv_heads=lambda config: 1,
        layout=Layout(experts=Experts(layers=_step3_sparse_layers, shared_width=_width("share_expert_dim"))),
        names={
            "num_experts": "moe_num_experts",
            "num_experts_per_tok": "moe_top_k",
            "num_key_value_heads": "num_attention_groups",
            "max_position_embeddings": "max_position_embedding",
        },
        defaults={"num_key_value_heads": 1},
    ),
    "NemotronForCausalLM": Architecture(
        family="nemotron",
        layout=Layout(
            norm="weight+bias",
            qkv_bias=_ATTENTION_BIAS,
            output_bias=_ATTENTION_BIAS,
            gated_mlp=False,
            mlp_bias=("mlp_bias", False),
        ),
    ),
    # Text decoders with a vision tower.
    "Qwen2VLForConditionalGeneration": _QWEN2_5_VL._replace(family="qwen2_vl"),
    "Qwen2_5_VLForConditionalGeneration": _QWEN2_5_VL,
    "Qwen3VLForConditionalGeneration": Architecture(
        family="qwen3_vl", layout=_QWEN3, defaults={"head_dim": 128, "num_key_value_heads": 32}
    ),
    "Qwen3VLMoeForConditionalGeneration": Architecture(
        family="qwen3_vl_moe", layout=_QWEN3_MOE, defaults={"head_dim": 128, "num_key_value_heads": 16}
    ),
    "Mistral3ForConditionalGeneration": Architecture(
        family="mistral3", layout=Layout(), defaults={"num_key_value_heads": 8}, mixes_windows=True
    ),
    # Sliding windows in some or all layers.
    "Gemma2ForCausalLM": Architecture(
        family="gemma2",
        layout=_GEMMA2,
        defaults={"head_dim": 256, "sliding_window": 4096, "num_key_value_heads": 4},
        full_every=2,
        mixes_windows=True,
    ),
    "Gemma3ForCausalLM": _GEMMA3_MODEL,
    "Gemma3ForConditionalGeneration": _GEMMA3_MODEL,
    "Gemma3nForConditionalGeneration": Architecture(
        family="gemma3n",
        layout=_GEMMA3,
        defaults={"sliding_window": 512, "num_kv_shared_layers": 15, "head_dim": 256},
        full_every=5,
        mixes_windows=True,
    ),
    "Gemma4ForConditionalGeneration": Architecture(
        family="gemma4",
        layout=_GEMMA3,
        defaults={"sliding_window": 512, "head_dim": 256, "global_head_dim": 512},
        full_every=6,
        mixes_windows=True,
    ),
    "Cohere2ForCausalLM": Architecture(
        family="cohere2",
        layout=Layout(
            every_stage_embeds=True,
            norms_per_layer=1,
            qkv_bias=_ATTENTION_BIAS,
            output_bias=_ATTENTION_BIAS,
            tied=True,
        ),
        defaults={"sliding_window": 4096},
        full_every=4,
        mixes_windows=True,
        window_extra=1,
    ),
    "Olmo3ForCausalLM": Architecture(
        family="olmo3", layout=_OLMO2, defaults={"sliding_window": 4096}, full_every=4, mixes_windows=True
    ),
    "GptOssForCausalLM": Architecture(
        family="gpt_oss",
        layout=Layout(
            every_stage_embeds=True,
            qkv_bias=("attention_bias", True),
            output_bias=("attention_bias", True),
            attention_sinks=True,
            experts=Experts(layers=_all_layers, biases=True),
        ),
        names=_LOCAL_EXPERTS,
        defaults={"sliding_window": 128, "head_dim": 64, "num_key_value_heads": 8},
        full_every=2,
        mixes_windows=True,
    ),
    "MiMoV2FlashForCausalLM": Architecture(
        family="mimo_v2",
        layout=Layout(
            qkv_bias=_ATTENTION_BIAS,
            experts=Experts(layers=_moe_frequency_layers, correction="buffer"),
        ),
        names=_ROUTED_EXPERTS | {"sliding_window": "sliding_window_size"},
        mixes_windows=True,
        draft_layer=("sliding_window",),
        draft_limit=1,
        defaults={"num_nextn_predict_layers": 1},
    ),
    "Llama4ForConditionalGeneration": Architecture(
        family="llama4",
        layout=Layout(
            qkv_bias=_ATTENTION_BIAS,
            output_bias=_ATTENTION_BIAS,
            experts=Experts(layers=_interleaved_layers, shared_width=_width("moe_intermediate_size")),
        ),
        names=_LOCAL_EXPERTS,
        defaults={"attention_chunk_size": 8192, "head_dim": 128, "num_key_value_heads": 8},
        mixes_windows=True,
    ),
    # Latent attention, sparse where an indexer is configured.
    "DeepseekV2ForCausalLM": Architecture(
        family="deepseek_v2",
        layout=_DEEPSEEK._replace(experts=_DEEPSEEK_V2_EXPERTS),
        names=_ROUTED_EXPERTS,
    ),
    **{
        name: Architecture(family=family, layout=_DEEPSEEK, names=_ROUTED_EXPERTS, draft_layer=("full",))
        for name, family in {
            "DeepseekV3ForCausalLM": "deepseek_v3",
            "DeepseekV32ForCausalLM": "deepseek_v32",
            "GlmMoeDsaForCausalLM": "glm_moe_dsa",
            "Glm4MoeLiteForCausalLM": "glm4_moe_lite",
            "KimiK25ForConditionalGeneration": "kimi_k25",
        }.items()
    },
    "MiniCPM3ForCausalLM": Architecture(
        family="minicpm3",
        layout=Layout(qkv_bias=_ATTENTION_BIAS, tied=True, every_stage_embeds=True),
        expands_latents=True,
        every_layer=("expanded",),
    ),
    # States in some or all layers.
    "KimiLinearForCausalLM": Architecture(
        family="kimi_linear",
        layout=_DEEPSEEK._replace(
            experts=Experts(
                layers=_moe_frequency_layers,
                shared_width=_shared_by_count("num_shared_experts", 1),
                correction="buffer",
            )
        ),
        names={"num_experts_per_tok": "num_experts_per_token"}
        | {"max_position_embeddings": "model_max_length"},
        draft_layer=("full",),
        state="kda",
    ),
    "NemotronHForCausalLM": Architecture(
        family="nemotron_h",
        layout=Layout(
            norms_per_layer=1,
            gated_mlp=False,
            mlp_bias=("mlp_bias", False),
            every_stage_embeds=True,
        ),
        names={"head_dim": "attention_head_dim"}
        | {"n_groups": "mamba_n_groups", "conv_kernel": "mamba_d_conv"},
        defaults={"num_key_value_heads": 8} | {"mamba_ssm_cache_dtype": "float32"},
        draft_layer=("full",),
        state="mamba2",
        draft_limit=1,
    ),
    "Qwen3NextForCausalLM": Architecture(
        family="qwen3_next",
        layout=_QWEN3_NEXT,
        defaults=_GATED_DELTA_NET | {"num_key_value_heads": 2},
        draft_layer=("full",),
        state="gated_delta_net",
    ),
    "Qwen3_5ForConditionalGeneration": _QWEN3_5_MOE._replace(
        family="qwen3_5", layout=_QWEN3_NEXT._replace(experts=None)
    ),
    "Qwen3_5MoeForConditionalGeneration": _QWEN3_5_MOE,
    "JambaForCausalLM": Architecture(
        family="jamba",
        layout=Layout(experts=Experts(layers=_periodic_layers), every_stage_embeds=True),
        names={"moe_intermediate_size": "intermediate_size"} | _MAMBA_NAMES,
        defaults={"attn_layer_period": 8, "attn_layer_offset": 4, "num_key_value_heads": 8}
        | {"ssm_state_size": 16, "conv_kernel": 4, "mamba_expand": 2},
        state="mamba1",
    ),
    "FalconH1ForCausalLM": Architecture(
        family="falcon_h1",
        layout=Layout(qkv_bias=_ATTENTION_BIAS, output_bias=_ATTENTION_BIAS, mlp_bias=("mlp_bias", False)),
        every_layer=("full", "state"),
        defaults={"num_key_value_heads": 8} | _MAMBA2 | {"mamba_d_ssm": 1024},
        names=_MAMBA_NAMES,
        state="mamba2",
    ),
    "BambaForCausalLM": Architecture(
        family="bamba",
        layout=Layout(
            qkv_bias=_ATTENTION_BIAS,
            output_bias=_ATTENTION_BIAS,
            mlp_bias=("mlp_bias", False),
            every_stage_embeds=True,
        ),
        defaults={"num_key_value_heads": 8} | _MAMBA2 | {"attn_layer_indices": []},
        names=_MAMBA_NAMES,
        state="mamba2",
    ),
    "GraniteMoeHybridForCausalLM": Architecture(
        family="granite_moe_hybrid",
        layout=Layout(
            qkv_bias=_ATTENTION_BIAS,
            output_bias=_ATTENTION_BIAS,
            experts=Experts(layers=_all_layers, shared_width=_width("shared_intermediate_size")),
            every_stage_embeds=True,
        ),
        names=_LOCAL_EXPERTS | _MAMBA_NAMES,
        defaults=_MAMBA2,
        state="mamba2",
    ),
    "Lfm2ForCausalLM": Architecture(
        family="lfm2",
        layout=Layout(qk_norm="head", tied=True, every_stage_embeds=True),
        names={"intermediate_size": "block_ff_dim"},
        defaults={"num_key_value_heads": 8, "conv_L_cache": 3},
        state="short_conv",
    ),
    "Lfm2MoeForCausalLM": Architecture(
        family="lfm2",
        layout=Layout(
            qk_norm="head",
            tied=True,
            every_stage_embeds=True,
            experts=Experts(layers=_after_first("num_dense_layers"), correction="buffer"),
        ),
        defaults={"num_key_value_heads": 8, "conv_L_cache": 3},
        state="short_conv",
    ),
    "MiniMaxText01ForCausalLM": Architecture(
        family="minimax",
        layout=_MINIMAX,
        names=_LOCAL_EXPERTS,
        defaults={"num_key_value_heads": 8},
        state="linear_attention",
    ),
    "MambaForCausalLM": Architecture(
        family="mamba",
        layout=Layout(norms_per_layer=1, tied=True, every_stage_embeds=True),
        names={"ssm_state_size": "state_size"} | {"mamba_expand": "expand"},
        defaults={"ssm_state_size": 16, "conv_kernel": 4, "mamba_expand": 2},
        every_layer=("state",),
        state="mamba1",
    ),
    "Mamba2ForCausalLM": Architecture(
        family="mamba2",
        layout=Layout(norms_per_layer=1, every_stage_embeds=True),
        names={
            "num_attention_heads": "num_heads",
            "mamba_num_heads": "num_heads",
            "mamba_head_dim": "head_dim",
            "ssm_state_size": "state_size",
            "mamba_expand": "expand",
        },
        every_layer=("state",),
        defaults={"mamba_num_heads": 128, "mamba_head_dim": 64, "ssm_state_size": 128}
        | {"n_groups": 8, "conv_kernel": 4, "mamba_expand": 2},
        state="mamba2",
    ),
    # Cross-attention to an encoder.
    "MllamaForConditionalGeneration": Architecture(
        family="mllama", layout=Layout(), defaults={"num_key_value_heads": 8}
    ),
    "WhisperForConditionalGeneration": Architecture(
        family="whisper",
        layout=Layout(norm="weight+bias", position_offset=0, tied=True, every_stage_embeds=True),
        names=_BART_NAMES | {"max_position_embeddings": "max_target_positions"},
        defaults={"is_encoder_decoder": True},
    ),
    "BartForConditionalGeneration": Architecture(
        family="bart",
        layout=_BART,
        names=_BART_NAMES,
        defaults={"is_encoder_decoder": True},
    ),
    "T5ForConditionalGeneration": Architecture(
        family="t5",
        layout=Layout(tied=True, every_stage_embeds=True),
        names={
            "hidden_size": "d_model",
            "num_hidden_layers": "num_decoder_layers",
            "num_attention_heads": "num_heads",
            "head_dim": "d_kv",
            "intermediate_size": "d_ff",
        },
        defaults={"is_encoder_decoder": True},
    ),
}

_GEMMA3N = _BY_CLASS["Gemma3nForConditionalGeneration"]
_GEMMA4 = _BY_CLASS["Gemma4ForConditionalGeneration"]
_EXAONE4 = _BY_CLASS["Exaone4ForCausalLM"]
_BAILING_MLA = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}

#: Classes whose parameters are not counted, by what is known of their caches. Source: vLLM 0.33.0
#: model_executor/models and vllm/models; older releases where 0.33 has dropped a class (registry.py
#: _PREVIOUSLY_SUPPORTED_MODELS); names and defaults as everywhere.
_CACHES_ONLY: dict[str, Architecture] = {
    # Full attention in every layer, or one window for all.
    **{
        name: Architecture(family=family)
        for name, family in {
            "BailingMoeForCausalLM": "bailing_moe",
            "BailingMoeV2ForCausalLM": "bailing_moe",
            "DeepseekForCausalLM": "deepseek",
            "Grok1ForCausalLM": "grok1",
            "HYV3ForCausalLM": "hy_v3",
            "OrionForCausalLM": "orion",
            "SolarForCausalLM": "solar",
            "TeleChat2ForCausalLM": "telechat2",
        }.items()
    },
    **{
        name: Architecture(family=family, mixes_windows=True)
        for name, family in {
            "ApertusForCausalLM": "apertus",
            "ArceeForCausalLM": "arcee",
            "Ministral3ForCausalLM": "ministral3",
            "TeleChat3ForCausalLM": "telechat3",
        }.items()
    },
    "DbrxForCausalLM": Architecture(
        family="dbrx",
        names=_MPT_NAMES,
        kv_heads=_mpt_kv_heads,
    ),
    # Nemotron-NAS: heads by layer, and layers without attention.
    "DeciLMForCausalLM": Architecture(family="nemotron_nas"),
    # Windows in some layers.
    "AfmoeForCausalLM": Architecture(
        family="afmoe",
        names={"sliding_window_pattern": "global_attn_every_n_layers"},
        defaults={"sliding_window": 1024},
        mixes_windows=True,
        full_every=4,
    ),
    "Cohere2MoeForCausalLM": Architecture(family="cohere2_moe", mixes_windows=True, window_extra=1),
    "ExaoneMoeForCausalLM": _EXAONE4._replace(family="exaone_moe", draft_layer=("sliding_window",)),
    "Gemma3nForCausalLM": _GEMMA3N,
    "Gemma4ForCausalLM": _GEMMA4,
    "Gemma4UnifiedForConditionalGeneration": _GEMMA4,
    "Llama4ForCausalLM": _BY_CLASS["Llama4ForConditionalGeneration"],
    "MiMoV2ForCausalLM": _BY_CLASS["MiMoV2FlashForCausalLM"],
    "Step3p5ForCausalLM": Architecture(
        family="step3p5", names=_STEP_NAMES, mixes_windows=True, draft_layer=("sliding_window",)
    ),
    # Latent attention.
    "DeepseekV4ForCausalLM": Architecture(
        family="deepseek_v4",
        layout=Layout(
            experts=Experts(
                layers=_all_layers,
                shared_width=_shared_by_count("n_shared_experts", 1),
                correction="buffer",
            )
        ),
        names=_ROUTED_EXPERTS,
        defaults={"head_dim": 512, "index_head_dim": 128, "sliding_window": 128, "num_key_value_heads": 1},
        compresses=True,
        draft_layer=("compressed_1",),
    ),
    # Two attentions a layer (longcat_flash.py).
    "LongcatFlashForCausalLM": Architecture(
        family="longcat_flash",
        names={"num_hidden_layers": "num_layers"},
        every_layer=("full", "full"),
        defaults={"num_nextn_predict_layers": 1},
        draft_layer=("full",),
        draft_limit=1,
    ),
    "MistralLarge3ForCausalLM": Architecture(family="mistral_large3"),
    # States in some or all layers.
    "BailingMoeV2_5ForCausalLM": Architecture(
        family="bailing_hybrid", defaults=_BAILING_MLA, state="linear_attention", draft_layer=("full",)
    ),
    "BailingMoeV3ForCausalLM": Architecture(
        family="bailing_hybrid_v3",
        defaults=_BAILING_MLA | {"short_conv_kernel_size": 4},
        state="kda",
        draft_layer=("full",),
    ),
    "MiniMaxM1ForCausalLM": _BY_CLASS["MiniMaxText01ForCausalLM"],
    "OlmoHybridForCausalLM": Architecture(family="olmo_hybrid", state="gated_delta_net"),
    "Plamo2ForCausalLM": Architecture(
        family="plamo2",
        names={
            "ssm_state_size": "mamba_d_state",
            "conv_kernel": "mamba_d_conv",
            "head_dim": "hidden_size_per_head",
            "mamba_head_dim": "hidden_size_per_head",
        },
        state="mamba2",
    ),
    "Qwen3_5ForCausalLM": _BY_CLASS["Qwen3_5ForConditionalGeneration"]._replace(layout=None),
    "Qwen3_5MoeForCausalLM": _BY_CLASS["Qwen3_5MoeForConditionalGeneration"]._replace(layout=None),
    # Attention in hybrid layers works on twice the hidden size (configuration_zamba2.py, zamba2.py).
    "Zamba2ForCausalLM": Architecture(
        family="zamba2",
        layout=Layout(tied=True, mlp_bias=("add_bias_linear", False), every_stage_embeds=True),
        names={
            "head_dim": "attention_head_dim",
            "mamba_num_heads": "n_mamba_heads",
            "mamba_head_dim": "mamba_headdim",
            "ssm_state_size": "mamba_d_state",
            "n_groups": "mamba_ngroups",
            "conv_kernel": "mamba_d_conv",
        },
        defaults={
            "mamba_num_heads": 8,
            "ssm_state_size": 64,
            "n_groups": 1,
            "conv_kernel": 4,
            "mamba_expand": 2,
        },
        head_dim_factor=2,
        state="mamba2",
    ),
    # Encoders see all tokens at once and keep nothing.
    **{
        f"{name}{head}": Architecture(family=name.lower(), every_layer=())
        for name in ("Bert", "Roberta", "XLMRoberta", "ModernBert", "NomicBert", "Gte", "GteNew")
        for head in ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")
    },
}

#: Classes that put a vision or audio tower before a language model: towers keep nothing, so what is kept follows from
#: the class within. None: the nested config names that class or its ``model_type``.
_AROUND: Mapping[str, str | None] = {
    "AriaForConditionalGeneration": "LlamaForCausalLM",
    "AudioFlamingo3ForConditionalGeneration": "Qwen2ForCausalLM",
    "BailingMoeV3VLForConditionalGeneration": "BailingMoeV3ForCausalLM",
    "Cohere2VisionForConditionalGeneration": "Cohere2ForCausalLM",
    "DeepseekOCRForCausalLM": "DeepseekV2ForCausalLM",
    "DeepseekVLV2ForCausalLM": "DeepseekV2ForCausalLM",
    "DotsOCRForCausalLM": "Qwen2ForCausalLM",
    "Eagle2_5_VLForConditionalGeneration": None,
    "Ernie4_5_VLMoeForConditionalGeneration": "Ernie4_5_MoeForCausalLM",
    "Exaone4_5_ForConditionalGeneration": "Exaone4ForCausalLM",
    "GLM4VForCausalLM": "ChatGLMModel",
    "Glm4vForConditionalGeneration": "Glm4ForCausalLM",
    "Glm4vMoeForConditionalGeneration": "Glm4MoeForCausalLM",
    "GraniteSpeechForConditionalGeneration": "GraniteForCausalLM",
    "H2OVLChatModel": None,
    "Idefics3ForConditionalGeneration": None,
    "InternS1ForConditionalGeneration": None,
    "InternVLChatModel": None,
    "InternVLForConditionalGeneration": None,
    "IsaacForConditionalGeneration": "Qwen3ForCausalLM",
    "KeyeForConditionalGeneration": "Qwen3ForCausalLM",
    "KimiK3ForConditionalGeneration": "KimiLinearForCausalLM",
    "KimiVLForConditionalGeneration": "DeepseekV3ForCausalLM",
    "Lfm2VlForConditionalGeneration": "Lfm2ForCausalLM",
    "Llama_Nemotron_Nano_VL": "LlamaForCausalLM",
    "LlavaForConditionalGeneration": None,
    "LlavaNextForConditionalGeneration": None,
    "LlavaNextVideoForConditionalGeneration": None,
    "LlavaOnevisionForConditionalGeneration": None,
    "MiMoV2OmniForCausalLM": "MiMoV2FlashForCausalLM",
    "MiniCPMO": "Qwen2ForCausalLM",
    "MiniCPMV": "Qwen2ForCausalLM",
    "NVLM_D": "Qwen2ForCausalLM",
    "NemotronH_Nano_VL_V2": "NemotronHForCausalLM",
    "Ovis2_5": None,
    "PaddleOCRVLForConditionalGeneration": "Ernie4_5ForCausalLM",
    "PaliGemmaForConditionalGeneration": None,
    "Phi3VForCausalLM": "Phi3ForCausalLM",
    "Phi4MMForCausalLM": "Phi3ForCausalLM",
    "PixtralForConditionalGeneration": "MistralForCausalLM",
    "Qwen2AudioForConditionalGeneration": "Qwen2ForCausalLM",
    "Qwen2_5OmniForConditionalGeneration": "Qwen2ForCausalLM",
    "Qwen2_5OmniModel": "Qwen2ForCausalLM",
    "Qwen3ASRForConditionalGeneration": "Qwen3ForCausalLM",
    "Qwen3OmniMoeForConditionalGeneration": "Qwen3MoeForCausalLM",
    "SkyworkR1VChatModel": None,
    "SmolVLMForConditionalGeneration": None,
    "Step3VLForConditionalGeneration": "Step3TextForCausalLM",
    "Step3p7ForConditionalGeneration": "Step3p5ForCausalLM",
    "UltravoxModel": None,
    "VoxtralForConditionalGeneration": "MistralForCausalLM",
}

_NO_STATE_CACHE = "vLLM does not serve it: it has no cache for its recurrent state"
_OTHER_POOLS = "not yet supported: its indexer pools keys and keeps the open pool in a ring of its own"
_OTHER_KEYS = "not yet supported: the keys of its indexer are kept in a form of their own"
#: Why a class that people ask for is refused.
REFUSED: Mapping[str, str] = {
    "RwkvForCausalLM": _NO_STATE_CACHE,
    "Rwkv5ForCausalLM": _NO_STATE_CACHE,
    "Rwkv6ForCausalLM": _NO_STATE_CACHE,
    "RWKV7ForCausalLM": _NO_STATE_CACHE,
    "RecurrentGemmaForCausalLM": _NO_STATE_CACHE,
    "Glm5NextForCausalLM": _OTHER_POOLS,
    "Glm5NextForConditionalGeneration": _OTHER_POOLS,
    "MiniMaxM3SparseForCausalLM": _OTHER_KEYS,
    "MiniMaxM3SparseForConditionalGeneration": _OTHER_KEYS,
    "DeepseekV41ForCausalLM": "not yet supported: its compressed caches differ from those of DeepSeek-V4",
    "VoxtralRealtimeGeneration": "not yet supported: its audio encoder keeps a pooled cache",
}

#: Other class names that published configs carry for the same architecture (vLLM 0.33,
#: model_executor/models/registry.py).
_SAME_AS = {
    "AquilaForCausalLM": "LlamaForCausalLM",
    "AquilaModel": "LlamaForCausalLM",
    "BaiChuanForCausalLM": "BaichuanForCausalLM",
    "ChatGLMForConditionalGeneration": "ChatGLMModel",
    "ExaoneMoEForCausalLM": "ExaoneMoeForCausalLM",
    "FalconMambaForCausalLM": "MambaForCausalLM",
    "HunYuanMoEForCausalLM": "HunYuanMoEV1ForCausalLM",
    "HunYuanV1DenseForCausalLM": "HunYuanDenseV1ForCausalLM",
    "MiniMaxForCausalLM": "MiniMaxText01ForCausalLM",
    "IQuestCoderForCausalLM": "LlamaForCausalLM",
    "LLaMAForCausalLM": "LlamaForCausalLM",
    "MPTForCausalLM": "MptForCausalLM",
    "PhiMoEForCausalLM": "PhimoeForCausalLM",
    "RWForCausalLM": "FalconForCausalLM",
    "StableLMEpochForCausalLM": "StableLmForCausalLM",
}

_KNOWN = _CACHES_ONLY | _BY_CLASS
_KNOWN |= {name: _KNOWN[known] for name, known in _SAME_AS.items()}

#: By the class name in ``architectures`` of a config.json.
ARCHITECTURES: Mapping[str, Architecture] = _KNOWN | {
    name: _KNOWN[within]._replace(layout=None) for name, within in _AROUND.items() if within
}

#: Classes around a language model that only the config names.
AROUND_ANY = frozenset(name for name, within in _AROUND.items() if within is None)

#: The class that a nested config means which names no class, by its ``model_type``: the first of the family that
#: generates text.
BY_MODEL_TYPE: Mapping[str, str] = {
    "granitemoe": "GraniteMoeForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM",
    "lfm2_moe": "Lfm2MoeForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    **{known.family: name for name, known in list(_KNOWN.items())[::-1] if name.endswith("ForCausalLM")},
}
