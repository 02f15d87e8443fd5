"""Problems for the kernels that write the cache: what has to be in it afterwards, byte for byte.

Caches start as a pattern that no kernel writes, so that a byte that was to be left alone is known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kvplan.kernels.emulation.emulate import Launch
from kvplan.kernels.number_formats import number_format
from kvplan.kernels.params import CopyBlocksParams, ReshapeAndCacheParams
from kvplan.kernels.variants import THREADS, Variant

Array = NDArray[Any]
_UNTOUCHED = 0x5A


@dataclass(frozen=True)
class CacheProblem:
    """``expected`` has the arrays that the launch writes, as they have to be; ``addresses`` is for `emulate.run`."""

    variant: Variant
    arrays: Mapping[str, Array]
    launch: Launch
    expected: Mapping[str, Array] = field(repr=False)
    addresses: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def wrong_bytes(self, outputs: Mapping[str, Array]) -> int:
        """How many bytes of the caches are not what they have to be."""
        return sum(
            int((outputs[name].view(np.uint8) != array.view(np.uint8)).sum())
            for name, array in self.expected.items()
        )


def reshape_problem(
    variant: Variant,
    *,
    layout: Literal["NHD", "HND"] = "NHD",
    block_size: int = 16,
    num_kv_heads: int = 3,
    scales: Literal["none", "tensor", "head"] = "none",
) -> CacheProblem:
    """Keys and values of some tokens for slots in no order; some tokens have none (-1), one is beyond the cache.

    For an fp8 cache there are numbers on both sides of the largest, 448.
    """
    rng = np.random.default_rng(0)
    queries, stored = number_format(variant.dtype), number_format(variant.kv_cache_dtype)
    head_dim, num_slots = variant.head_dim, block_size * (-(-40 // block_size) + 1)
    num_tokens = num_slots * 2 // 3
    slots = rng.permutation(num_slots)[:num_tokens].astype(np.int64)
    slots[[1, num_tokens // 2]] = -1
    slots[num_tokens - 1] = num_slots
    wide = 250.0 if variant.kv_cache_dtype == "fp8_e4m3" else 1.0
    # Keys and values side by side, as a projection leaves them.
    shape = (num_tokens, 2 * num_kv_heads, head_dim)
    packed = queries.rounded(rng.standard_normal(shape) * wide)
    rows = {"key": packed[:, :num_kv_heads], "value": packed[:, num_kv_heads:]}
    count = {"none": 0, "tensor": 1, "head": num_kv_heads}[scales]
    arrays: dict[str, Array] = {"key": queries.encoded(packed), "slot_mapping": slots}
    arrays["value"] = arrays["key"][:, num_kv_heads:].copy()
    expected = {}
    written = (slots >= 0) & (slots < num_slots)
    for name, row in rows.items():
        scale = np.ones(1, dtype=np.float32)
        if count:
            scale = arrays[f"{name}_scale"] = rng.uniform(0.5, 4.0, count).astype(np.float32)
        untouched = np.full((num_slots, num_kv_heads, head_dim * stored.bytes), _UNTOUCHED, dtype=np.uint8)
        after = untouched.view(stored.storage).copy()
        # Divided in float32, as the kernel does, and rounded once more.
        after[slots[written]] = stored.encoded((row.astype(np.float32) / scale[:, None])[written])
        arrays[f"{name}_cache"] = _in_blocks(untouched.view(stored.storage), block_size, layout)
        expected[f"{name}_cache"] = _in_blocks(after, block_size, layout)
    by_token = layout == "NHD"
    arguments = ReshapeAndCacheParams(
        key_stride_token=2 * num_kv_heads * head_dim,
        value_stride_token=num_kv_heads * head_dim,
        cache_stride_row=num_kv_heads * head_dim if by_token else head_dim,
        cache_stride_head=head_dim if by_token else block_size * head_dim,
        cache_rows_per_block=block_size * (1 if by_token else num_kv_heads),
        num_slots=num_slots,
        num_kv_heads=num_kv_heads,
        block_size_log2=block_size.bit_length() - 1,
        scale_stride=int(scales == "head"),
    )
    pointers = {name: name for name in arrays}
    launch = Launch(variant.name, (num_tokens, 1, 1), (THREADS, 1, 1), 0, arguments, pointers)
    return CacheProblem(variant, arrays, launch, expected)


def copy_problem(variant: Variant, *, block_bytes: int = 2064, num_layers: int = 3) -> CacheProblem:
    """Copies of some blocks to others in all layers, keys and values; ``block_bytes`` is a multiple of 16."""
    rng = np.random.default_rng(0)
    num_blocks, num_pairs = 9, 3
    ids = rng.permutation(num_blocks)
    pairs = np.stack([ids[:num_pairs], ids[num_pairs : 2 * num_pairs]], axis=1).astype(np.int64)
    pairs[1, 0] = pairs[0, 0]  # one block copied twice
    keys = [f"keys of layer {layer}" for layer in range(num_layers)]
    values = [f"values of layer {layer}" for layer in range(num_layers)]
    arrays: dict[str, Array] = {
        name: rng.integers(0, 256, (num_blocks, block_bytes), dtype=np.uint8) for name in [*keys, *values]
    }
    expected = {}
    for name in [*keys, *values]:
        expected[name] = arrays[name].copy()
        expected[name][pairs[:, 1]] = arrays[name][pairs[:, 0]]
    arrays["block_pairs"] = pairs
    addresses = {"key_caches": keys, "value_caches": values}
    arrays |= {name: np.zeros(num_layers, dtype=np.uint64) for name in addresses}
    pointers = {name: name for name in ("key_caches", "value_caches", "block_pairs")}
    arguments = CopyBlocksParams(block_bytes=block_bytes)
    launch = Launch(variant.name, (num_pairs, num_layers, 1), (THREADS, 1, 1), 0, arguments, pointers)
    return CacheProblem(variant, arrays, launch, expected, addresses)


def _in_blocks(slots: Array, block_size: int, layout: str) -> Array:
    blocks = slots.reshape(-1, block_size, *slots.shape[1:])
    return np.ascontiguousarray(blocks if layout == "NHD" else blocks.transpose(0, 2, 1, 3))
