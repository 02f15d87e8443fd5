"""What a model is, as far as memory and time depend on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvplan.core.kv_cache import Cache, LayerCache, describe
from kvplan.core.weights import Weights


class Mlp(NamedTuple):
    """The feed-forward part of a layer. ``width`` is that of one half of a gated MLP, shared experts included.

    ``expert_width`` is that of one routed expert, of which a token uses ``experts_per_token``; 0 and 0 without.
    """

    width: int
    gated: bool = True
    expert_width: int = 0
    experts_per_token: int = 0


#: Kinds of rotary embedding that stretch the context (transformers 5.24.0, modeling_rope_utils.py; vLLM's names).
STRETCHING = frozenset(
    {"linear", "dynamic", "yarn", "longrope", "llama3", "deepseek_yarn", "deepseek_llama_scaling"}
)


class PositionScaling(NamedTuple):
    """How rotary positions are stretched; ``original`` is the length before, where it is stated."""

    kind: str
    factor: float = 1.0
    original: int | None = None


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model: its shape, what its layers keep, and its weights. Lengths are in tokens.

    ``layers`` has an entry for every cache of every layer, by layer; layers without a cache (an MLP alone, or
    one that reads another's) have none.
    """

    name: str
    family: str
    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int | None
    dtype: str
    layers: tuple[LayerCache, ...]
    weights: Weights
    source: str
    hf_id: str | None = None
    aliases: tuple[str, ...] = ()
    #: Caches of the model's own layers for multi-token prediction, which only drafts use.
    draft_layers: tuple[LayerCache, ...] = ()
    #: None where the config does not say.
    mlp: Mlp | None = None
    #: What the checkpoint says its KV cache is to be stored in, such as fp8; None: nothing.
    kv_cache_dtype: str | None = None
    #: Tokens that a Mamba kernel works on at once.
    mamba_chunk_size: int = 2048
    position_scalings: tuple[PositionScaling, ...] = ()
    #: The length before positions were stretched, where the config itself states it.
    original_max_position_embeddings: int | None = None

    @property
    def has_experts(self) -> bool:
        """Whether layers route tokens to experts, as far as the config says."""
        return (self.mlp is not None and self.mlp.expert_width > 0) or self.weights.has_experts

    @property
    def attention(self) -> tuple[tuple[Cache, int], ...]:
        """The caches of the layers and how many layers have each, in the order of the first layer of each."""
        counts: dict[tuple[str, Cache], int] = {}
        for item in self.layers:
            key = (item.cache.kind, item.cache)
            counts[key] = counts.get(key, 0) + 1
        return tuple((cache, count) for (_, cache), count in counts.items())

    def to_dict(self) -> dict[str, object]:
        """The ``model`` block of the JSON contract."""
        return {
            "name": self.name,
            "family": self.family,
            "num_layers": self.num_layers,
            "hidden_size": self.hidden_size,
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.max_position_embeddings,
            "parameters": self.weights.parameters,
            "attention": [{**describe(cache), "layers": count} for cache, count in self.attention],
        }
