"""`kvplan explain waste`: a reservation of the longest length against blocks on demand."""

from __future__ import annotations

from kvplan.core.request import Request
from kvplan.errors import InputError
from kvplan.topics.example import Example, try_out
from kvplan.topics.parts import Column, Explanation, Figure, Figures, Prose, Table, Value
from kvplan.units import format_share


def explain(example: Example) -> Explanation:
    """What sequences of a few lengths leave unused, both ways."""
    example.keeps_all_tokens()
    reserved = example.seq()
    lengths = example.tokens("used_tokens", "50,200,1000")
    if max(lengths) > reserved:
        raise InputError(
            f"{max(lengths):,} tokens are more than the {reserved:,} that are reserved",
            where="--used-tokens",
            hint="give --seq too",
        )
    size, reservation = example.block_size, example.payload_bytes(reserved)
    rows: list[tuple[Value, ...]] = []
    blocks = 0
    for tokens in lengths:
        # The engine is asked for the blocks: so many tokens of a prompt, and the one that ends it.
        needed = try_out([Request("one", 0, tokens, 1)], example.config(-(-tokens // size) + 1)).peak_blocks
        used, held = example.payload_bytes(tokens), needed * example.block_bytes
        blocks += needed
        rows.append((tokens, used, used / reservation, reservation - used, needed, used / held, held - used))
    used = sum(example.payload_bytes(tokens) for tokens in lengths)
    whole, paged = len(lengths) * reservation, blocks * example.block_bytes
    return example.explanation(
        [
            Prose(
                f"Who cannot know how long an answer gets, and needs its K/V in one piece, reserves the longest "
                f"sequence: {reserved:,} tokens. Blocks of {size} tokens are taken when they are needed, so that "
                f"only the last one has empty slots: {size - 1} at most."
            ),
            Table(
                "sequences",
                (
                    Column("tokens", "tokens used"),
                    Column("used_bytes", "K/V", "bytes"),
                    Column("reserved_share", "of it used", "share"),
                    Column("reserved_waste_bytes", "wasted", "bytes"),
                    Column("blocks", "blocks"),
                    Column("paged_share", "of them used", "share"),
                    Column("paged_waste_bytes", "wasted", "bytes"),
                ),
                tuple(rows),
                f"A reservation of {reserved:,} tokens, and blocks of {size}",
            ),
            Figures(
                (
                    Figure("reservation_bytes", "a reservation", reservation, "exact_bytes"),
                    Figure("reserved_bytes", f"{len(lengths)} reservations", whole, "exact_bytes"),
                    Figure("reserved_used_share", "of them used", used / whole, "share"),
                    Figure("paged_bytes", f"{blocks} blocks", paged, "exact_bytes"),
                    Figure("paged_used_share", "of them used", used / paged, "share"),
                    Figure("sequences_ratio", "sequences in the same memory", whole / paged, "times"),
                )
            ),
        ],
        [
            "The waste of 60 to 80 % that texts about vLLM state is that of whole workloads; of these "
            f"{len(lengths)} sequences it is {format_share(1 - used / whole)}, in blocks "
            f"{format_share(1 - used / paged)}."
        ],
    )
