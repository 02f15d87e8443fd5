"""`kvplan explain paged-attention`: attention over K/V in one piece, and over blocks gathered by a table.

The only topic that needs NumPy. The block table comes from a run of the engine beside neighbours, so its blocks are
scattered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvplan.core.kv_cache import FullAttention
from kvplan.core.request import Request
from kvplan.errors import InputError
from kvplan.topics.example import Example, try_out
from kvplan.topics.parts import Column, Explanation, Figure, Figures, Formula, Prose, Table, Value

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: Tokens of the sequence unless others are asked for, and the most: it is one layer, in float32.
_LENGTH = 1000
_LONGEST = 1 << 14
_SEED = 20230912  # of the numbers that stand for keys and values: any will do
_SHOWN = 8


def explain(example: Example) -> Explanation:
    """Both results of one layer, compared bit by bit."""
    example.check_runnable()
    length = example.seq(most=_LENGTH)
    if length > _LONGEST:
        raise InputError(
            f"{length:,} is too much for an example", where="--seq", hint=f"write at most {_LONGEST:,}"
        )
    spec = example.served.spec
    cache = spec.layers[0].cache
    if not isinstance(cache, FullAttention):
        raise InputError(
            f"layers of {cache.kind} keep no keys and values of heads",
            where="--model",
            hint="choose a model with full attention, such as llama-2-13b",
        )
    table = _block_table(example, length)
    size, heads, kv_heads, dim = example.block_size, spec.num_heads, cache.num_kv_heads, cache.head_dim
    rng = np.random.default_rng(_SEED)
    query = rng.standard_normal((heads, dim), dtype=np.float32)
    keys = rng.standard_normal((length, kv_heads, dim), dtype=np.float32)
    values = rng.standard_normal((length, kv_heads, cache.value_size), dtype=np.float32)

    key_pool = _scattered(keys, table, size, rng)
    value_pool = _scattered(values, table, size, rng)
    in_one_piece = _attention(query, keys, values)
    from_blocks = _attention(query, _gathered(key_pool, table, length), _gathered(value_pool, table, length))
    wrong = [*table]
    wrong[0] = max(table) + 1  # a block of somebody else's
    mistaken = _attention(query, _gathered(key_pool, wrong, length), _gathered(value_pool, wrong, length))
    equal = bool(np.array_equal(in_one_piece.view(np.uint32), from_blocks.view(np.uint32)))
    noticed = not np.array_equal(in_one_piece, mistaken)
    rows: tuple[tuple[Value, ...], ...] = (
        ("in one piece", "contiguous", None, None),
        ("gathered by the table", f"{len(table):,} blocks", equal, int((in_one_piece != from_blocks).sum())),
        (
            "with one wrong entry",
            f"{len(table):,} blocks",
            not noticed,
            int((in_one_piece != mistaken).sum()),
        ),
    )
    entries = ", ".join(f"{block}" for block in table[:_SHOWN])
    more = ", ..." if len(table) > _SHOWN else ""
    return example.explanation(
        [
            Prose(
                f"One layer of {spec.name} in float32: a query of {heads} heads of {dim} attends to {length:,} tokens. "
                f"Their K/V lie in one piece, and again in blocks of {size} that the engine gave to a sequence "
                "beside two neighbours. A block table changes where K/V are read, not what is computed."
            ),
            Formula(f"block table: {entries}{more}"),
            Formula(f"token t lies in block table[t // {size}], slot t % {size}"),
            Table(
                "results",
                (
                    Column("keys_and_values", "K/V", "text"),
                    Column("lie", "lie in", "text"),
                    Column("equal", "equal bit by bit", "text"),
                    Column("numbers_that_differ", "differ"),
                ),
                rows,
                f"Results of {in_one_piece.size:,} numbers",
            ),
            Figures(
                (
                    Figure("bitwise_equal", "equal to the last bit", equal, "text"),
                    Figure("blocks", "blocks gathered", len(table)),
                    Figure(
                        "bytes_read", "K/V read in a layer", keys.nbytes + values.nbytes, "bytes", "float32"
                    ),
                )
            ),
        ],
        [
            "A GPU kernel sums up in another order than NumPy, and in parts, so it differs in the last bits from a "
            "kernel over contiguous K/V: that is its order of summing, not its blocks."
        ],
    )


def _block_table(example: Example, length: int) -> list[int]:
    """The physical blocks of a sequence that grew by turns with others, one of which left its blocks behind."""
    size = example.block_size
    requests = [
        Request("brief", 0, 1, length // 3 + 1),
        Request("one", 0, 1, length),
        Request("long", 0, 1, length),
    ]
    pool = 3 * (-(-length // size) + 2)
    trial = try_out(requests, example.vllm(pool), table_of="one")
    return [run.physical + i for run in trial.fullest.table for i in range(run.cells)]


def _scattered(
    rows: NDArray[np.float32], table: list[int], size: int, rng: np.random.Generator
) -> NDArray[np.float32]:
    """A pool ``[blocks, size, heads, dim]`` with rows of ``[tokens, heads, dim]`` where the table says.

    All other slots hold something else, as if they were others'.
    """
    pool = rng.standard_normal((max(table) + 2, size, *rows.shape[1:]), dtype=np.float32)
    for logical, block in enumerate(table):
        part = rows[logical * size : (logical + 1) * size]
        pool[block, : len(part)] = part
    return pool


def _gathered(pool: NDArray[np.float32], table: list[int], length: int) -> NDArray[np.float32]:
    """Rows ``[tokens, heads, dim]`` in order, from a pool."""
    return np.ascontiguousarray(pool[table].reshape(-1, *pool.shape[2:])[:length])


def _attention(
    query: NDArray[np.float32], keys: NDArray[np.float32], values: NDArray[np.float32]
) -> NDArray[np.float32]:
    """softmax(q K^T / sqrt(dim)) V for each head: ``[heads, dim]`` of ``[heads, dim]`` and ``[tokens, kv heads, dim]``.

    Query heads share KV heads in groups.
    """
    kv_heads, dim = keys.shape[1:]
    grouped = query.reshape(kv_heads, -1, dim)
    scores = np.einsum("hgd,thd->hgt", grouped, keys) / np.float32(np.sqrt(dim))
    scores -= scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores)
    weights /= weights.sum(axis=-1, keepdims=True)
    result: NDArray[np.float32] = np.einsum("hgt,thd->hgd", weights, values).reshape(len(query), -1)
    return result
