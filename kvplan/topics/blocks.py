"""`kvplan explain blocks`: the analogy with an operating system, and a block table from a run."""

from __future__ import annotations

from kvplan.core.request import Request
from kvplan.topics.example import TABLE_ENTRY_BYTES, Example, try_out
from kvplan.topics.parts import Column, Explanation, Figure, Figures, Formula, Grid, Prose, Table, Value
from kvplan.units import format_bytes

#: The requests of the example in blocks: of the prompt, and of the answer.
_REQUESTS = {"A": (2.5, 3), "B": (1.5, 2), "C": (1, 3)}
_POOL_BLOCKS = 20


def explain(example: Example) -> Explanation:
    """Terms beside each other, and a small pool in its fullest step."""
    example.check_runnable()
    size, kv, deployment = example.block_size, example.served.kv, example.served.deployment
    longest = deployment.max_model_len
    table_blocks = -(-longest // size)
    capacity = example.served.capacity
    memory: tuple[Value, ...] = (
        "physical memory",
        "the pool",
        f"--gpu says how many blocks of {size} tokens",
    )
    if capacity is not None:
        memory = (
            "physical memory",
            "the pool",
            f"{capacity.num_gpu_blocks:,} blocks, {format_bytes(capacity.num_gpu_blocks * kv.bytes_per_block)}",
        )
    requests = [
        Request(name, 0, int(prompt * size), answer * size) for name, (prompt, answer) in _REQUESTS.items()
    ]
    trial = try_out(requests, example.vllm(_POOL_BLOCKS), table_of="A")
    pool = trial.fullest
    run = pool.table[-1]
    logical, physical = run.logical + run.cells - 1, run.physical + run.cells - 1
    token = next(one.tokens for one in pool.requests if one.id == "A") - 1
    rows: tuple[tuple[Value, ...], ...] = (
        ("byte", "token", f"{format_bytes(kv.bytes_per_token)} of K/V"),
        ("page", "block", f"{size} tokens, {format_bytes(kv.bytes_per_block)}"),
        memory,
        ("process", "sequence", f"up to {longest:,} tokens, {table_blocks:,} blocks"),
        (
            "page table",
            "block table",
            f"{table_blocks:,} entries, {format_bytes(table_blocks * TABLE_ENTRY_BYTES)}",
        ),
        ("page fault", "the last block is full", f"every {size} tokens a block from the free list"),
        ("shared page", "shared prefix", "one block, several tables, a count of users"),
        (
            "copy on write",
            "a shared block is written to",
            f"{format_bytes(kv.bytes_per_block)} are copied first",
        ),
        ("swapping", "preemption", "blocks are given up, and computed again or fetched back"),
    )
    return example.explanation(
        [
            Prose(
                "A sequence sees one stretch of memory; its table says which block each part of it lies in."
            ),
            Table(
                "analogy",
                (
                    Column("operating_system", "operating system", "text"),
                    Column("serving", "serving", "text"),
                    Column("here", f"{example.served.spec.name}", "text"),
                ),
                rows,
            ),
            Grid("pool", "Three requests that decode side by side take blocks in turn", pool),
            Formula(
                f"where is token {token} of A? logical block {token} // {size} = {token // size}, slot {token} % "
                f"{size} = {token % size}; the table says block {physical}"
            ),
            Figures(
                (
                    Figure("bytes_per_token", "a token", kv.bytes_per_token, "exact_bytes"),
                    Figure("bytes_per_block", "a block", kv.bytes_per_block, "exact_bytes"),
                    Figure("table_entries", f"blocks of {longest:,} tokens", table_blocks),
                    Figure("table_bytes", "their table", table_blocks * TABLE_ENTRY_BYTES, "exact_bytes"),
                    Figure("token", "a token of A", token),
                    Figure("logical_block", "its logical block", logical),
                    Figure("physical_block", "its physical block", physical),
                    Figure("slot", "its slot", token % size),
                )
            ),
        ]
    )
