"""The parts that decoders are made of, and the sheet on which their weights are written.

Most decoders are a `Layout` of flags, which is data in `kvplan.core.architectures`; the functions here write one
part of a layer each. They take a `Sheet` and write for the layers that it stands for.

Which ranks hold what follows vLLM 0.33 (model_executor/models): column- and row-parallel matrices are
sharded, K and V projections follow the KV heads, vocabulary tables are padded and sharded, and norms, routers,
learned positions and the biases after row-parallel matrices are on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy

from kvplan.core.architectures import Config, Layout, is_on, number
from kvplan.core.model import Mlp
from kvplan.core.weights import Kind, Place, Split, WeightGroup
from kvplan.errors import InputError

#: Beyond this a size is a mistake, and no product of sizes is meaningful.
_MAX_SIZE = 10**9


def mlp_of(layout: Layout | None, config: Config, *, has_experts: bool) -> Mlp | None:
    """The feed-forward part of the layers; None where the config has no width. ``config`` as for `weight_groups`.

    Without a layout, what the config's own fields say of it. ``has_experts`` says whether the list of weights has
    some: families that write the list themselves do not tell in their layout.
    """
    experts = layout.experts if layout else None
    used = number(config, "num_experts_per_tok") or number(config, "top_k_experts")
    layers = number(config, "num_hidden_layers")
    routed = layers if has_experts or (used and not layout) else 0
    sparse = len([*experts.layers(config)]) if experts else routed
    width = config.get("intermediate_size")
    dense = width // (layout.mlp_width_divisor if layout else 1) if isinstance(width, int) else 0
    if not sparse and not dense:
        return None
    if experts and sparse == layers:
        dense = 0
    shared = number(config, "moe_shared_expert_intermediate_size") if sparse and not experts else 0
    if experts and experts.shared_width and sparse:
        shared = experts.shared_width(config)
    return Mlp(
        width=max(dense, shared),
        gated=layout is None or layout.gated_mlp,
        expert_width=number(config, "moe_intermediate_size") if sparse else 0,
        experts_per_token=used if sparse else 0,
    )


class Sheet:
    """The list of a model's weights while it is written, seen from one place of the model.

    `layers` and `place` give the same list from another place: what is written there belongs to those layers,
    or to that end of the model.
    """

    __slots__ = ("_counted", "_faults", "_groups", "_layers", "_place", "_prefix", "_tower", "config")

    def __init__(self, config: Config) -> None:
        self.config = config
        self._groups: list[WeightGroup] = []
        self._faults: dict[str, str] = {}
        self._prefix = "model."
        self._place: Place = "first"
        self._layers: tuple[int, ...] = ()
        self._tower = False
        self._counted = True

    def layers(self, indexes: Sequence[int], prefix: str = "model.layers.{}.") -> Sheet:
        """The same list, at these layers of the decoder; nothing is written where there are none."""
        return self._seen_from("layers", tuple(indexes), prefix)

    def where(self, keep: Callable[[int], bool]) -> Sheet:
        """The same list and place, at those of its layers."""
        there = copy(self)
        there._layers = tuple(i for i in self._layers if keep(i))
        if not there._layers:
            there._place = "layers"  # where nothing is written without layers
        return there

    def place(self, place: Place, prefix: str = "model.", layers: Sequence[int] = ()) -> Sheet:
        """The same list, at an end of the model or in layers that are not the decoder's."""
        return self._seen_from(place, tuple(layers), prefix)

    def tower(self, prefix: str, layers: Sequence[int] = ()) -> Sheet:
        """The same list, at an encoder of images or sound, which the first stage runs."""
        there = self._seen_from("first", tuple(layers), prefix)
        there._tower = True
        return there

    def of(self, config: Config) -> Sheet:
        """The same list and place, with the sizes of another config, such as an encoder's."""
        there = copy(self)
        there.config = config
        return there

    def uncounted(self) -> Sheet:
        """The same list and place, for what is held but is no parameter of the model."""
        there = copy(self)
        there._counted = False
        return there

    def size(self, name: str, default: int | None = None) -> int:
        """A size that the config must have, unless there is a default; faults are kept for `groups`."""
        value = self.config.get(name)
        if isinstance(value, list) and value and value.count(value[0]) == len(value):
            value = value[0]  # one number for each layer, all alike (Gemma-3n, Hunyuan)
        if value is None and default is not None:
            return default
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_SIZE:
            return value
        self._faults[name] = (
            f"{name} is missing" if value is None else f'{name} is "{str(value)[:60]}", no size'
        )
        return 1

    def matrix(
        self,
        name: str,
        rows: int,
        columns: int,
        split: Split = "rows",
        *,
        bias: bool = False,
        kind: Kind = "linear",
        copies: int = 1,
        used: int = 1,
        heads: int = 0,
        element_bytes: int | None = None,
    ) -> None:
        """A matrix of ``rows`` outputs and ``columns`` inputs, and its bias, which is divided as the outputs are."""
        if rows * columns * copies and (self._place != "layers" or self._layers):
            self._groups.append(
                WeightGroup(
                    self._prefix + name,
                    rows,
                    columns,
                    split,
                    "tower" if self._tower and kind != "table" else kind,
                    self._place,
                    self._layers,
                    copies,
                    used,
                    heads,
                    element_bytes,
                    self._counted,
                )
            )
        if bias:
            along = "replicated" if split == "columns" else split
            self.vector(
                f"{name}.bias",
                rows,
                along,
                copies=copies,
                used=used,
                heads=heads,
                element_bytes=element_bytes,
            )

    def vector(
        self,
        name: str,
        size: int,
        split: Split = "replicated",
        *,
        kind: Kind = "vector",
        copies: int = 1,
        used: int = 1,
        heads: int = 0,
        element_bytes: int | None = None,
    ) -> None:
        """A norm, a bias or another parameter that is not multiplied as a matrix."""
        self.matrix(
            name,
            size,
            1,
            split,
            kind=kind,
            copies=copies,
            used=used,
            heads=heads,
            element_bytes=element_bytes,
        )

    def groups(self) -> tuple[WeightGroup, ...]:
        """What was written. Raises `InputError` if a size was not there."""
        if self._faults:
            raise InputError(
                "; ".join(self._faults.values()),
                hint="the parameters cannot be counted without it; add it as the model's config.json has it",
            )
        return tuple(self._groups)

    def _seen_from(self, place: Place, layers: tuple[int, ...], prefix: str) -> Sheet:
        there = copy(self)  # which writes on the same list
        there._place, there._layers, there._prefix, there._tower = place, layers, prefix, False
        there._counted = self._counted and place != "draft"
        return there


#: What writes the part of all layers that mixes tokens, such as `attention`.
Mixer = Callable[[Sheet, Layout], None]


def decoder(sheet: Sheet, layout: Layout, mixer: Mixer | None = None) -> None:
    """A decoder whose layers have attention, or what ``mixer`` writes, and an MLP or experts."""
    layers = range(sheet.size("num_hidden_layers"))
    experts = layout.experts
    sparse = set(experts.layers(sheet.config)) if experts else set()
    embeddings(sheet, layout)
    here = sheet.layers(layers)
    (mixer or attention)(here, layout)
    layer_norms(here, layout)
    dense = sheet.layers([i for i in layers if i not in sparse])
    if len(sparse) < len(layers):
        width = sheet.size("intermediate_size") // layout.mlp_width_divisor
        mlp(dense, layout, width=width)
    if experts:
        moe(sheet.layers(sorted(sparse)), layout)


def embeddings(sheet: Sheet, layout: Layout) -> None:
    """The vocabulary's table and head, learned positions, and the norms outside the layers."""
    config = sheet.config
    hidden, vocabulary = sheet.size("hidden_size"), sheet.size("vocab_size")
    # OPT-350m embeds in fewer dimensions than its layers have and projects in and out.
    width = sheet.size("word_embed_proj_dim", hidden)
    tied = is_on(config, ("tie_word_embeddings", layout.tied))
    first, last = sheet.place("first"), sheet.place("last")
    tables = sheet.place("all") if layout.every_stage_embeds else first
    head_bias = vocabulary if is_on(config, layout.head_bias) else 0
    if tied:
        # As the head the table is used whole, whatever its use as a table.
        both = sheet.place("all" if layout.every_stage_embeds else "ends")
        both.matrix("embed_tokens", vocabulary, width, "vocab", kind="head")
    else:
        tables.matrix("embed_tokens", vocabulary, width, "vocab", kind="table")
        sheet.place("last", "").matrix("lm_head", vocabulary, width, "vocab", kind="head")
    sheet.place("last", "").vector("lm_head.bias", head_bias, "vocab")
    if width != hidden:
        first.matrix("project_in", hidden, width, "replicated")
        last.matrix("project_out", width, hidden, "replicated")
    if layout.position_offset is not None:
        positions = sheet.size("max_position_embeddings") + layout.position_offset
        tables.matrix("embed_positions", positions, hidden, "replicated", kind="table")
    if layout.embedding_norm:
        norm(first, layout, "embed_norm", hidden)
    if layout.final_norm if isinstance(layout.final_norm, bool) else layout.final_norm(config):
        norm(last, layout, "norm", hidden)


def attention(sheet: Sheet, layout: Layout) -> None:
    """Multi-head, grouped-query or multi-query attention, its norms of queries and keys, and its sinks."""
    config = sheet.config
    heads, kv_heads = sheet.size("num_attention_heads"), sheet.size("num_key_value_heads")
    head_dim = sheet.size("head_dim")
    self_attention(
        sheet,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=number(config, "v_head_dim", head_dim),
        qkv_bias=is_on(config, layout.qkv_bias),
        output_bias=is_on(config, layout.output_bias),
    )
    if layout.qk_norm != "none" and is_on(config, layout.qk_norm_if):
        each = {"head": head_dim, "head+bias": 2 * head_dim, "all_heads": 0}[layout.qk_norm]
        sheet.vector("self_attn.q_norm", each or heads * head_dim)
        sheet.vector("self_attn.k_norm", each or kv_heads * head_dim)
    if layout.attention_sinks:
        sheet.vector("self_attn.sinks", heads, "rows")


def self_attention(
    sheet: Sheet,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    value_dim: int = 0,
    qkv_bias: bool = False,
    output_bias: bool = False,
    value_is_key: bool = False,
    queries: int = 1,
) -> None:
    """The four projections of attention.

    ``value_dim`` is the size of one head's value, 0 meaning ``head_dim``. ``value_is_key`` leaves out the
    value's matrix. ``queries`` is 2 where a query's matrix makes a gate of equal size too (Qwen3-Next).
    """
    hidden, value_dim = sheet.size("hidden_size"), value_dim or head_dim
    sheet.matrix("self_attn.q_proj", queries * heads * head_dim, hidden, bias=qkv_bias)
    sheet.matrix("self_attn.k_proj", kv_heads * head_dim, hidden, "kv_heads", bias=qkv_bias, heads=kv_heads)
    if not value_is_key:
        sheet.matrix(
            "self_attn.v_proj", kv_heads * value_dim, hidden, "kv_heads", bias=qkv_bias, heads=kv_heads
        )
    sheet.matrix("self_attn.o_proj", hidden, heads * value_dim, "columns", bias=output_bias)


def layer_norms(sheet: Sheet, layout: Layout) -> None:
    """The norms of a layer, each as wide as the hidden states."""
    count = layout.norms_per_layer
    count = count if isinstance(count, int) else count(sheet.config)
    for i in range(count):
        norm(sheet, layout, _NORMS[i], sheet.size("hidden_size"))


#: Names of a layer's norms, in the order in which a family has them.
_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


def mlp(sheet: Sheet, layout: Layout, *, width: int, name: str = "mlp") -> None:
    """A dense MLP: up (and gate) of ``width`` outputs, then down."""
    hidden, bias = sheet.size("hidden_size"), is_on(sheet.config, layout.mlp_bias)
    if layout.gated_mlp:
        sheet.matrix(f"{name}.gate_proj", width, hidden, bias=bias)
    sheet.matrix(f"{name}.up_proj", width, hidden, bias=bias)
    sheet.matrix(f"{name}.down_proj", hidden, width, "columns", bias=bias)


def moe(sheet: Sheet, layout: Layout) -> None:
    """The experts of a layer, routed and shared, and their router."""
    experts = layout.experts
    assert experts is not None, "a layout without experts has no layers with them"
    total = sheet.size("num_experts")
    routed_experts(
        sheet,
        total=total,
        used=sheet.size("num_experts_per_tok"),
        width=sheet.size("moe_intermediate_size"),
        bias=experts.biases,
    )
    if experts.correction:
        here = sheet if experts.correction == "parameter" else sheet.uncounted()
        here.vector("mlp.gate.e_score_correction_bias", total, element_bytes=4)
    if experts.shared_width is not None:
        mlp(sheet, layout, width=experts.shared_width(sheet.config), name="mlp.shared_experts")
        if experts.shared_gate:
            sheet.matrix("mlp.shared_expert_gate", 1, sheet.size("hidden_size"), "replicated", kind="plain")


def routed_experts(
    sheet: Sheet,
    *,
    total: int,
    used: int,
    width: int,
    bias: bool = False,
    hidden: int = 0,
    gated: bool = True,
    name: str = "mlp",
    router_bytes: int | None = None,
) -> None:
    """``total`` experts, each an MLP of ``width``, and the router that chooses ``used`` of them.

    ``hidden`` is what an expert takes and gives, 0 meaning the hidden states.
    """
    model = sheet.size("hidden_size")
    hidden = hidden or model
    for part in ("gate_proj", "up_proj") if gated else ("up_proj",):
        sheet.matrix(f"{name}.experts.{part}", width, hidden, kind="experts", copies=total, used=used)
    sheet.matrix(
        f"{name}.experts.down_proj", hidden, width, "columns", kind="experts", copies=total, used=used
    )
    if bias:
        ups = 2 * width if gated else width
        sheet.vector(f"{name}.experts.up_bias", ups, "rows", kind="experts", copies=total, used=used)
        sheet.vector(f"{name}.experts.down_bias", hidden, kind="experts", copies=total, used=used)
    sheet.matrix(
        f"{name}.gate", total, model, "replicated", kind="plain", bias=bias, element_bytes=router_bytes
    )


def norm(sheet: Sheet, layout: Layout, name: str, width: int) -> None:
    """One norm over ``width`` features."""
    if layout.norm != "none" and is_on(sheet.config, ("layer_norm_elementwise_affine", True)):
        sheet.vector(name, 2 * width if layout.norm == "weight+bias" else width)


def nested(config: Config, name: str) -> Config | None:
    """A config inside the config, such as ``vision_config``; None where there is none."""
    inner = config.get(name)
    return inner if isinstance(inner, Mapping) else None
