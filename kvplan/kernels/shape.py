"""What a kernel is timed on: one layer's decode attention of a batch of equal sequences."""

from __future__ import annotations

from typing import NamedTuple

_ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8_e4m3": 1}


class Shape(NamedTuple):
    """``batch`` sequences of ``seq`` tokens each; heads of ``head_dim`` elements."""

    batch: int
    seq: int
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    kv_cache_dtype: str

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.heads // self.kv_heads

    @property
    def blocks(self) -> int:
        """Blocks of a sequence."""
        return -(-self.seq // self.block_size)

    @property
    def kv_bytes(self) -> int:
        """Keys and values of all live tokens."""
        return 2 * self.batch * self.seq * self.kv_heads * self.head_dim * _ELEMENT_BYTES[self.kv_cache_dtype]

    @property
    def pool_bytes(self) -> int:
        """Keys and values of whole blocks."""
        return self.kv_bytes // self.seq * self.blocks * self.block_size

    @property
    def bytes_moved(self) -> int:
        """What the kernel has to read and write at least: keys, values, query, output and block table, once each."""
        rows = 2 * self.batch * self.heads * self.head_dim * _ELEMENT_BYTES[self.dtype]
        return self.kv_bytes + rows + 4 * self.batch * self.blocks

    def __str__(self) -> str:
        """As in ``32 x 4096, 32/8 heads x 128 bfloat16``."""
        stored = (
            self.dtype if self.kv_cache_dtype == self.dtype else f"{self.dtype} with {self.kv_cache_dtype}"
        )
        return (
            f"{self.batch} x {self.seq}, {self.heads}/{self.kv_heads} heads x {self.head_dim} {stored}, "
            f"blocks of {self.block_size}"
        )
