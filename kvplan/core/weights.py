"""How many parameters a decoder has, counted from its config.

The layout of each architecture is data in `kvplan.core.architectures`; this module only multiplies.
Groups follow how vLLM 0.33 divides weights under tensor parallelism (model_executor/layers/linear.py,
vocab_parallel_embedding.py, fused_moe): column- and row-parallel matrices are sharded, K and V
projections follow the KV heads, vocabulary tables are padded and sharded, and norms, routers, learned
positions and the biases after row-parallel matrices are on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvplan.core.architectures import ARCHITECTURES, Experts, Layout, is_on, number
from kvplan.core.model import Split, WeightGroup


def weight_groups(architecture: str, config: Mapping[str, object]) -> tuple[WeightGroup, ...]:
    """The parameter groups of a decoder-only model; empty where kvplan cannot count the architecture.

    ``config`` has the fields of a Hugging Face config under Llama's names, with ``head_dim``,
    ``num_key_value_heads`` and ``intermediate_size`` filled in, as `kvplan.hf_config.read_fields`
    returns it. Layers for multi-token prediction and vision towers are not counted.
    """
    known = ARCHITECTURES.get(architecture)
    if known is None or known.layout is None:
        return ()
    count = _Count()
    _add_embeddings(count, known.layout, config)
    _add_attention(count, known.layout, config)
    experts = known.layout.experts
    layers = number(config, "num_hidden_layers")
    sparse_layers = experts.layers(config) if experts else 0
    if layers > sparse_layers:
        width = number(config, "intermediate_size") // known.layout.mlp_width_divisor
        _add_mlp(count, "mlp", known.layout, config, width=width, layers=layers - sparse_layers)
    if experts and sparse_layers:
        _add_experts(count, experts, known.layout, config, sparse_layers)
    return count.groups()


class _Count:
    """Elements so far, by the name and split of their group, in the order of first mention."""

    __slots__ = ("_totals",)

    def __init__(self) -> None:
        self._totals: dict[tuple[str, Split, int], tuple[int, int]] = {}

    def add(
        self, name: str, split: Split, elements: int, *, active: int | None = None, rows: int = 0
    ) -> None:
        """Counts ``elements``, of which one token uses ``active`` (all unless said)."""
        if elements:
            held, used = self._totals.get((name, split, rows), (0, 0))
            self._totals[name, split, rows] = (
                held + elements,
                used + (elements if active is None else active),
            )

    def groups(self) -> tuple[WeightGroup, ...]:
        return tuple(
            WeightGroup(name=name, elements=held, split=split, active_elements=used, rows=rows)
            for (name, split, rows), (held, used) in self._totals.items()
        )


def _add_embeddings(count: _Count, layout: Layout, config: Mapping[str, object]) -> None:
    hidden, rows = number(config, "hidden_size"), number(config, "vocab_size")
    # OPT-350m embeds in fewer dimensions than its layers have and projects in and out.
    width = number(config, "word_embed_proj_dim", hidden)
    tied = is_on(config, ("tie_word_embeddings", layout.tied))
    head_bias = rows if is_on(config, layout.head_bias) else 0
    if tied:
        # As the head the table is used whole, whatever its use as a table.
        count.add("embedding", "vocab", rows * width, rows=rows)
        count.add("lm_head bias", "sharded", head_bias)
    else:
        count.add("embedding", "vocab", rows * width, active=width, rows=rows)
        count.add("lm_head", "vocab", rows * width + head_bias, rows=rows)
    if width != hidden:
        count.add("embedding projections", "replicated", 2 * width * hidden)
    if layout.position_offset is not None:
        positions = number(config, "max_position_embeddings") + layout.position_offset
        count.add("positions", "replicated", positions * hidden, active=hidden)
    final_norm = layout.final_norm if isinstance(layout.final_norm, bool) else layout.final_norm(config)
    norm = _norm_size(layout, config, hidden)
    count.add("norms and biases", "replicated", norm * (int(final_norm) + int(layout.embedding_norm)))


def _add_attention(count: _Count, layout: Layout, config: Mapping[str, object]) -> None:
    layers, hidden = number(config, "num_hidden_layers"), number(config, "hidden_size")
    head_dim = number(config, "head_dim")
    query = number(config, "num_attention_heads") * head_dim
    key = number(config, "num_key_value_heads") * head_dim
    value = number(config, "num_key_value_heads") * number(config, "v_head_dim", head_dim)
    output_in = number(config, "num_attention_heads") * number(config, "v_head_dim", head_dim)
    count.add("attention", "sharded", layers * (hidden * query + output_in * hidden))
    count.add("attention kv", "kv_heads", layers * hidden * (key + value))
    if is_on(config, layout.qkv_bias):
        count.add("attention", "sharded", layers * query)
        count.add("attention kv", "kv_heads", layers * (key + value))
    if is_on(config, layout.output_bias):
        count.add("norms and biases", "replicated", layers * hidden)
    if layout.qk_norm != "none" and is_on(config, layout.qk_norm_if):
        sizes = {"head": 2 * head_dim, "head+bias": 4 * head_dim, "all_heads": query + key}
        count.add("norms and biases", "replicated", layers * sizes[layout.qk_norm])
    if layout.attention_sinks:
        count.add("attention", "sharded", layers * number(config, "num_attention_heads"))
    per_layer = (
        layout.norms_per_layer if isinstance(layout.norms_per_layer, int) else layout.norms_per_layer(config)
    )
    count.add("norms and biases", "replicated", layers * per_layer * _norm_size(layout, config, hidden))


def _add_mlp(
    count: _Count, name: str, layout: Layout, config: Mapping[str, object], *, width: int, layers: int
) -> None:
    """A dense MLP: up (and gate) of ``width`` columns, then down."""
    hidden = number(config, "hidden_size")
    columns = 2 * width if layout.gated_mlp else width
    count.add(name, "sharded", layers * hidden * (columns + width))
    if is_on(config, layout.mlp_bias):
        count.add(name, "sharded", layers * columns)
        count.add("norms and biases", "replicated", layers * hidden)


def _add_experts(
    count: _Count, experts: Experts, layout: Layout, config: Mapping[str, object], layers: int
) -> None:
    hidden, width = number(config, "hidden_size"), number(config, "moe_intermediate_size")
    total, used = number(config, "num_experts"), number(config, "num_experts_per_tok")
    expert = 3 * hidden * width
    if experts.biases:
        expert += 2 * width + hidden
    count.add("experts", "sharded", layers * total * expert, active=layers * used * expert)
    router = total * hidden + (total if experts.biases or experts.correction else 0)
    count.add("router", "replicated", layers * router)
    if experts.shared_width is not None:
        width = experts.shared_width(config)
        _add_mlp(count, "shared experts", layout, config, width=width, layers=layers)
        if experts.shared_gate:
            count.add("router", "replicated", layers * hidden)


def _norm_size(layout: Layout, config: Mapping[str, object], width: int) -> int:
    """Elements of one norm over ``width`` features."""
    if layout.norm == "none" or not is_on(config, ("layer_norm_elementwise_affine", True)):
        return 0
    return 2 * width if layout.norm == "weight+bias" else width
