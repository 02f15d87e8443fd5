"""What a model is, as far as memory and time depend on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from kvplan.core.kv_cache import DTYPE_BYTES, Cache, LayerCache, describe, kv_heads_per_rank

#: How a group of weights is divided among the ranks of tensor parallelism.
Split = Literal["sharded", "kv_heads", "vocab", "replicated"]

#: vLLM pads the vocabulary to a multiple of this before it divides it among ranks
#: (model_executor/layers/vocab_parallel_embedding.py, DEFAULT_VOCAB_PADDING_SIZE).
VOCAB_PADDING = 64


class WeightGroup(NamedTuple):
    """Weights that are divided among ranks in one way.

    ``elements`` counts the whole model once. ``active_elements`` are those that one token uses: fewer
    than ``elements`` for routed experts, and one row for an embedding table.
    """

    name: str
    elements: int
    split: Split
    active_elements: int
    #: For ``vocab``: rows of the table, which are padded before they are divided.
    rows: int = 0

    def elements_per_rank(self, tensor_parallel_size: int, num_kv_heads: int) -> int:
        """Elements on one rank, with the rows and heads that the engine pads or repeats."""
        tp = tensor_parallel_size
        if self.split == "replicated":
            return self.elements
        if self.split == "kv_heads":
            return self.elements // num_kv_heads * kv_heads_per_rank(num_kv_heads, tp)
        if self.split == "vocab":
            width = self.elements // self.rows
            padded = -(-self.rows // VOCAB_PADDING) * VOCAB_PADDING
            return -(-padded // tp) * width
        return -(-self.elements // tp)


class Weights(NamedTuple):
    """What the weights of a model amount to and how that is known.

    ``groups`` is empty where only a total is known. ``stored_bytes`` is what the files hold, where
    files were read. ``quantization`` names the method of weights that are not held in the model's
    dtype, such as ``fp8``: their bytes are known from files only.
    """

    parameters: int | None
    source: Literal["config", "safetensors", "catalogue"]
    groups: tuple[WeightGroup, ...] = ()
    stored_bytes: int | None = None
    quantization: str | None = None

    @property
    def active_parameters(self) -> int | None:
        """Parameters that one token is multiplied with: routed experts counted as far as used."""
        return sum(g.active_elements for g in self.groups) if self.groups else self.parameters

    @property
    def head_parameters(self) -> int:
        """Parameters that only a sampled token is multiplied with: the vocabulary's head, its own or tied."""
        return sum(g.elements for g in self.groups if g.split == "vocab" and g.active_elements == g.elements)

    def total_bytes(self, dtype: str) -> int | None:
        """Bytes of all weights once, as they are held on the GPU; None if unknown.

        Quantized weights are held as the files store them. Others are held in ``dtype``, whatever the
        files hold: vLLM loads a float32 checkpoint in 16 bits.
        """
        if self.quantization is not None:
            return self.stored_bytes
        return None if self.parameters is None else self.parameters * DTYPE_BYTES[dtype]

    def per_gpu_bytes(self, dtype: str, tensor_parallel_size: int, num_kv_heads: int) -> int | None:
        """Bytes on one rank; None if unknown.

        Exact in how each group is divided where the groups account for every parameter. Otherwise the
        total is divided evenly, rounded up.
        """
        total = self.total_bytes(dtype)
        if total is None or tensor_parallel_size == 1:
            return total
        if self.quantization is not None or sum(g.elements for g in self.groups) != self.parameters:
            return -(-total // tensor_parallel_size)
        return DTYPE_BYTES[dtype] * sum(
            g.elements_per_rank(tensor_parallel_size, num_kv_heads) for g in self.groups
        )

    def bytes_read_per_step(self, dtype: str, tensor_parallel_size: int, num_kv_heads: int) -> int | None:
        """Bytes of weights that one rank reads in a step: all but tables of which a token takes one row.

        Every expert counts as read. None if unknown.
        """
        held = self.per_gpu_bytes(dtype, tensor_parallel_size, num_kv_heads)
        if held is None or self.quantization is not None:
            return held
        tables = (g for g in self.groups if g.split == "vocab" and g.active_elements < g.elements)
        skipped = sum(g.elements_per_rank(tensor_parallel_size, num_kv_heads) for g in tables)
        return held - skipped * DTYPE_BYTES[dtype]


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
    rope_scaled: bool
    dtype: str
    layers: tuple[LayerCache, ...]
    weights: Weights
    source: str
    hf_id: str | None = None
    aliases: tuple[str, ...] = ()
    #: Caches of the model's own layers for multi-token prediction, which only drafts use.
    draft_layers: tuple[LayerCache, ...] = ()

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
