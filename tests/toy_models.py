"""Models of no real size: configs as they lie beside weights, and models made of the caches of their layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvplan.core.kv_cache import Cache, LayerCache
from kvplan.core.model import ModelSpec
from kvplan.core.weights import Weights

#: Sizes that a decoder of any class has.
CONFIG_SIZES: dict[str, object] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "vocab_size": 100,
}
LLAMA_CONFIG: dict[str, object] = {
    **CONFIG_SIZES,
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "max_position_embeddings": 2048,
}


def toy_spec(*caches: Cache, **changes: Any) -> ModelSpec:
    """A model with one layer for each of these caches."""
    made = ModelSpec(
        name="toy",
        family="toy",
        architecture="LlamaForCausalLM",
        num_layers=len(caches),
        hidden_size=64,
        num_heads=8,
        num_kv_heads=4,
        head_dim=8,
        vocab_size=100,
        max_position_embeddings=4096,
        dtype="bfloat16",
        layers=tuple(LayerCache(i, cache) for i, cache in enumerate(caches)),
        weights=Weights(1000, "config"),
        source="a test",
    )
    return replace(made, **changes)
