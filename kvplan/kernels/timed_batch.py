"""A decode batch to time: one pool of blocks, and block tables that take turns, so that no launch finds its keys."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvplan.errors import KvplanError
from kvplan.kernels import reference
from kvplan.kernels.cases import Verdict, variant_weights, verdict
from kvplan.kernels.launch import Attention, Cache, DeviceArray
from kvplan.kernels.number_formats import number_format
from kvplan.kernels.shape import Shape
from kvplan.kernels.variants import Variant
from kvplan.units import format_bytes

#: The blocks of all tables together take so many L2 caches, if not more tables than the most are needed for it.
_L2_CACHES, _MOST_TABLES = 4, 64
#: Percent of the free memory that the pool may take.
_POOL_PERCENT = 90
#: Products of a query head with a key that are checked in float64: a second or two on a CPU.
_CHECKED_PAIRS = 1 << 20
_CHECKED_REQUESTS = 3
#: Numbers that are drawn for a pool, which repeats them. A prime, so that no two blocks of a pool are the same.
_DRAWN = 2_097_169


class NoRoom(KvplanError):
    """The batch does not fit the free memory of the GPU."""


@dataclass(frozen=True)
class TimedBatch:
    """Arrays on the GPU. ``tables`` are ``[batch, blocks]`` each and have no block in common."""

    shape: Shape
    window: int
    query: DeviceArray
    keys: DeviceArray
    values: DeviceArray
    context_lens: DeviceArray
    output: DeviceArray
    tables: tuple[DeviceArray, ...]
    host_query: NDArray[Any] = field(repr=False)
    host_tables: NDArray[np.int32] = field(repr=False)

    def attention(self, variant: Variant, *, chunk_tokens: int | None = None) -> list[Attention]:
        """A launch for each table, ready to run. Raises ``InputError`` where the variant is not for this GPU."""
        return [
            Attention(
                variant,
                self.query,
                Cache(self.keys, self.values),
                table,
                self.context_lens,
                np.full(self.shape.batch, self.shape.seq),
                self.output,
                self.shape.head_dim**-0.5,
                window=self.window,
                chunk_tokens=chunk_tokens,
            )
            for table in self.tables
        ]

    def check(
        self, variant: Variant, attention: Attention, table: int = 0, *, pairs: int = _CHECKED_PAIRS
    ) -> tuple[Verdict, str | None]:
        """Compare heads of some requests with float64, and two runs with each other; what is wrong beside numbers.

        About ``pairs`` products of a query head with a key are compared.
        """
        first, second = (self._run(attention) for _ in range(2))
        error = None
        if np.isnan(number_format(self.shape.dtype).decoded(first)).any():
            error = "a number of the output is missing"
        elif first.tobytes() != second.tobytes():
            error = "two runs differ"
        return self._compared(variant, first, table, pairs), error

    def _run(self, attention: Attention) -> NDArray[Any]:
        self.output.fill(_nan(self.shape.dtype))
        attention.run()
        found: NDArray[Any] = self.output.get()
        return found

    def _compared(self, variant: Variant, output: NDArray[Any], table: int, pairs: int) -> Verdict:
        shape, queries = self.shape, number_format(self.shape.dtype)
        scores = reference.Scores(float(np.float32(shape.head_dim**-0.5)), window=self.window)
        expected, found = [], []
        for request in _spread(shape.batch, _CHECKED_REQUESTS):
            for head in _spread(shape.heads, pairs // (_CHECKED_REQUESTS * shape.seq)):
                query = queries.decoded(self.host_query[request, head])[None]
                keys, values = self._rows(request, head // shape.group, table)
                expected.append(reference.contiguous_attention(query, keys, values, scores))
                found.append(queries.decoded(output[request, head])[None])
        names = vars(expected[0])
        all_expected = reference.Expected(
            **{name: np.stack([getattr(e, name) for e in expected]) for name in names}
        )
        allowed = reference.tolerance(
            all_expected,
            head_dim=shape.head_dim,
            dtype=shape.dtype,
            weights=variant_weights(variant),
            tokens=shape.seq,
        )
        return verdict(all_expected, allowed, np.stack(found))

    def _rows(self, request: int, kv_head: int, table: int) -> list[NDArray[np.float64]]:
        """Keys and values of a request's tokens for one head, copied back: ``[tokens, 1, head_dim]``."""
        ids, stored = self.tables[table][request], number_format(self.shape.kv_cache_dtype)
        return [
            stored.decoded(cache[:, :, kv_head][ids].get()).reshape(-1, 1, self.shape.head_dim)[
                : self.shape.seq
            ]
            for cache in (self.keys, self.values)
        ]


def timed_batch(
    shape: Shape,
    *,
    l2_cache_bytes: int,
    tables: int | None = None,
    window: int = 0,
    share: float = 1.0,
    seed: int = 0,
) -> TimedBatch:
    """A batch with random queries, keys and values, and slots beyond the tokens that hold NaN.

    With ``tables`` as many block tables, else as many as four L2 caches take; fewer where they do not fit its ``share``
    of the free memory. Raises ``NoRoom`` where not even one does.
    """
    import cupy

    wanted = tables or min(_MOST_TABLES, max(2, -(-_L2_CACHES * l2_cache_bytes // shape.kv_bytes)))
    free, _ = cupy.cuda.runtime.memGetInfo()
    free += cupy.get_default_memory_pool().free_bytes()
    room = int(free * share) * _POOL_PERCENT // 100 // shape.pool_bytes
    if room == 0:
        raise NoRoom(f"its cache takes {format_bytes(shape.pool_bytes)}, {format_bytes(free)} are free")
    count = min(wanted, room)
    rng = np.random.default_rng(seed)
    num_blocks = count * shape.batch * shape.blocks
    ids = rng.permutation(num_blocks).astype(np.int32).reshape(count, shape.batch, shape.blocks)
    queries = number_format(shape.dtype)
    query = queries.encoded(rng.standard_normal((shape.batch, shape.heads, shape.head_dim)))
    keys, values = (_pool(shape, num_blocks, start) for start in (0, _DRAWN // 2))
    used = shape.seq % shape.block_size
    if used:
        last = cupy.asarray(ids[:, :, -1].ravel())
        for pool in (keys, values):
            pool[last, used:] = _nan(shape.kv_cache_dtype)
    return TimedBatch(
        shape,
        window,
        cupy.asarray(query),
        keys,
        values,
        cupy.full(shape.batch, shape.seq, dtype=cupy.int32),
        cupy.empty(query.shape, dtype=query.dtype),
        tuple(cupy.asarray(table) for table in ids),
        query,
        ids,
    )


def _pool(shape: Shape, num_blocks: int, start: int) -> DeviceArray:
    """Drawn numbers again and again, from the place ``start`` of them on."""
    import cupy

    size = (num_blocks, shape.block_size, shape.kv_heads, shape.head_dim)
    drawn = cupy.asarray(np.roll(_drawn(shape.kv_cache_dtype), -start))
    pool = cupy.empty(size, dtype=drawn.dtype)
    flat = pool.ravel()
    for at in range(0, flat.size, drawn.size):
        flat[at : at + drawn.size] = drawn[: flat.size - at]
    return pool


@cache
def _drawn(kv_cache_dtype: str) -> NDArray[Any]:
    return number_format(kv_cache_dtype).encoded(np.random.default_rng(0).standard_normal(_DRAWN))


def _nan(dtype: str) -> Any:
    return number_format(dtype).encoded(np.full(1, np.nan))[0]


def _spread(count: int, wanted: int) -> list[int]:
    """Up to so many of ``range(count)``, at least one, from the first to the last."""
    kept = max(1, min(count, wanted))
    return sorted({round(at) for at in np.linspace(0, count - 1, kept)})
