"""Who works on what: the chunks of a ragged batch, as a flat list with one row for each block of threads.

A work item is a chunk of a request's tokens for some query heads of one KV head. A request in one chunk is
written to the output at once; of a request in several, each chunk gives partial results, which ``merge`` puts together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvplan.errors import InputError
from kvplan.kernels.params import WORK_ITEM_FIELDS

Int32s = NDArray[np.int32]

#: Chunks are cut at multiples of this many tokens, so that warps have whole turns.
CHUNK_STEP = 64
_MOST_SPLITS = 256


@dataclass(frozen=True)
class SplitCost:
    """What choosing the number of splits weighs, in the time that a block of threads takes for one token.

    ``item`` is what each work item costs beside its tokens (c0), ``split`` what each split costs in the merge (c1). The
    defaults are guesses from launch and memory latencies; fit them on a device by sweeping chunks.
    """

    item: float = 64.0
    split: float = 4.0


@dataclass(frozen=True)
class WorkPlan:
    """``work_items`` is ``[items, 6]``, ``merge_items`` ``[split requests, 3]``: columns as in ``params``.

    ``num_partials`` rows of partial results are needed.
    """

    work_items: Int32s
    merge_items: Int32s
    num_partials: int
    chunk_tokens: int


def plan(
    context_lens: NDArray[Any],
    *,
    num_heads: int,
    num_kv_heads: int,
    head_tile: int,
    concurrent_blocks: int,
    window: int = 0,
    chunk_tokens: int | None = None,
    cost: SplitCost | None = None,
) -> WorkPlan:
    """The work of a batch.

    ``head_tile`` is how many query heads a block of threads takes, ``concurrent_blocks`` how many blocks run at once
    (multiprocessors x blocks on each). The longest chunk is chosen by ``best_chunk``, or is ``chunk_tokens``: then a
    request's result depends on nothing but the request, whatever else is in the batch. Longest items come first; those
    of the same tokens are neighbours, so that they find them in the L2 cache. Raises ``InputError``.
    """
    contexts = np.asarray(context_lens, dtype=np.int64)
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise InputError(f"{num_heads} query heads cannot share {num_kv_heads} KV heads evenly")
    if contexts.ndim != 1 or np.any(contexts < 0):
        raise InputError("context_lens must be a list of token counts")
    if chunk_tokens is not None and chunk_tokens < 1:
        raise InputError(f"a chunk of {chunk_tokens} tokens is none", hint="give 1 or more")
    group = num_heads // num_kv_heads
    tiles = [(first, min(head_tile, group - first)) for first in range(0, group, head_tile)]
    begins = np.maximum(contexts - window, 0) if window else np.zeros_like(contexts)
    lengths = contexts - begins
    chunk = chunk_tokens or best_chunk(
        lengths, blocks_a_chunk=num_kv_heads * len(tiles), concurrent_blocks=concurrent_blocks, cost=cost
    )
    splits = np.maximum(-(-lengths // chunk), 1)
    # Equal chunks of a request where their size is free.
    sizes = np.full_like(lengths, chunk) if chunk_tokens else _rounded_up(-(-lengths // splits))
    splits = np.maximum(-(-lengths // np.maximum(sizes, 1)), 1)
    partial_rows = np.where(splits > 1, splits * num_heads, 0)
    first_rows = np.concatenate([[0], np.cumsum(partial_rows)])
    _check_int32(int(first_rows[-1]))

    requests = np.repeat(np.arange(len(contexts)), splits)
    number = np.arange(len(requests)) - np.repeat(np.cumsum(splits) - splits, splits)
    begin = begins[requests] + number * sizes[requests]
    end = np.minimum(begin + sizes[requests], contexts[requests])
    order = np.argsort(begin - end, kind="stable")
    requests, number, begin, end = requests[order], number[order], begin[order], end[order]

    heads = np.array(
        [(kv_head * group + first, count) for kv_head in range(num_kv_heads) for first, count in tiles]
    )
    row = np.where(splits[requests] > 1, first_rows[requests] + number * num_heads, -1)
    items = _work_items(requests, begin, end, row, heads)
    split = np.flatnonzero(splits > 1)
    merge = np.stack([split, first_rows[split], splits[split]], axis=1)
    return WorkPlan(items, merge.astype(np.int32), int(first_rows[-1]), int(chunk))


def _work_items(
    requests: NDArray[np.int64],
    begin: NDArray[np.int64],
    end: NDArray[np.int64],
    row: NDArray[np.int64],
    heads: NDArray[np.int64],
) -> Int32s:
    """Each chunk for each tile of ``heads`` (first, number).

    Of each chunk its request, where it begins and ends, and its first row of partial results, below 0 for none.
    """
    items = np.empty((len(requests), len(heads), len(WORK_ITEM_FIELDS)), dtype=np.int32)
    items[:, :, 0] = requests[:, None]
    items[:, :, 1:3] = heads
    items[:, :, 3] = begin[:, None]
    items[:, :, 4] = end[:, None]
    items[:, :, 5] = np.where(row[:, None] < 0, -1, row[:, None] + heads[:, 0])
    return items.reshape(-1, len(WORK_ITEM_FIELDS))


def best_chunk(
    lengths: NDArray[np.int64],
    *,
    blocks_a_chunk: int,
    concurrent_blocks: int,
    cost: SplitCost | None = None,
) -> int:
    """The longest chunk, in tokens, for which the batch is expected to be done first.

    For 1 to 256 splits of the longest request: ceil(items / concurrent_blocks) x (chunk + c0) + c1 x splits,
    where items are the chunks of all requests times ``blocks_a_chunk``; the fewest splits win among equals. The last of
    those waves is not full, which is what splitting trades against the merge.
    """
    cost = cost or SplitCost()
    longest = int(lengths.max(initial=1))
    chunks = np.unique(_rounded_up(-(-longest // np.arange(1, _MOST_SPLITS + 1))))[::-1]
    items = np.array([np.maximum(-(-lengths // chunk), 1).sum() for chunk in chunks]) * blocks_a_chunk
    waves = -(-items // concurrent_blocks)
    splits = -(-longest // chunks)
    seconds = waves * (np.minimum(chunks, longest) + cost.item) + cost.split * splits
    return int(chunks[int(np.argmin(seconds))])


def _rounded_up(tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.maximum(-(-tokens // CHUNK_STEP) * CHUNK_STEP, CHUNK_STEP)


def _check_int32(rows: int) -> None:
    if rows > np.iinfo(np.int32).max:
        raise InputError(f"{rows} partial results are too many to number", hint="use longer chunks")
