"""`kvplan explain block-size`: empty slots against long tables, on the shipped chat workload."""

from __future__ import annotations

from kvplan.jobs.simulate import simulate
from kvplan.topics.example import TABLE_ENTRY_BYTES, Example
from kvplan.topics.parts import Column, Explanation, Prose, Table, Value
from kvplan.units import counted, format_share

_WORKLOAD = "chat"
#: Slots of the pool, whatever its blocks: enough that nothing is evicted and nobody preempted.
_POOL_TOKENS = 1 << 20
#: Longer than any request of the workload.
_LONGEST = 1 << 17


def explain(example: Example) -> Explanation:
    """Waste, hits and tables of each block size, from a run each over equal memory."""
    example.check_runnable()
    length = example.seq()
    sizes = example.tokens("block_sizes", "4,16,64")
    rows: list[tuple[Value, ...]] = []
    wastes: dict[int, float] = {}
    for size in sizes:
        blocks = max(2, _POOL_TOKENS // size + 1)
        found = simulate(_WORKLOAD, num_gpu_blocks_override=blocks, block_size=size, max_model_len=_LONGEST)
        shares = found.kv
        empty = (shares.internal_fragmentation or 0.0) + (shares.reserved_share or 0.0)
        wastes[size] = empty
        entries = -(-length // size)
        rows.append(
            (
                size,
                size * example.token_bytes,
                (size - 1) / 2,
                empty,
                shares.internal_fragmentation,
                found.prefix_cache.hit_rate,
                entries,
                entries * TABLE_ENTRY_BYTES,
            )
        )
    worst, best = max(wastes, key=lambda size: wastes[size]), min(wastes, key=lambda size: wastes[size])
    return example.explanation(
        [
            Prose(
                "On average half of a sequence's last block is empty, so small blocks waste less, and find more of "
                "a shared prefix. Large blocks mean short tables, and longer stretches for a kernel to read."
            ),
            Table(
                "block_sizes",
                (
                    Column("block_size", "block"),
                    Column("block_bytes", "its K/V", "bytes"),
                    Column("mean_empty_slots", "empty slots"),
                    Column("empty_share", "empty", "share"),
                    Column("internal_fragmentation", "for good", "share"),
                    Column("hit_rate", "hits", "share"),
                    Column("table_entries", "entries"),
                    Column("table_bytes", "table", "bytes"),
                ),
                tuple(rows),
                f"Mean empty slots of a sequence; empty slots and hits of the workload {_WORKLOAD} over time; table "
                f"of {counted(length, 'token')}",
            ),
            Prose(
                f"Blocks of {worst} leave {format_share(wastes[worst])} of what is held empty, blocks of {best} "
                f"{format_share(wastes[best])}."
            ),
        ],
        [
            "Empty slots include those that their owner fills later; what is empty for good is the smaller share."
        ],
    )
