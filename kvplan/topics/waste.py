"""`kvplan explain waste`: a reservation of the longest length against blocks on demand."""

from __future__ import annotations

from kvplan.core.request import Request
from kvplan.errors import InputError
from kvplan.topics.example import Example, try_out
from kvplan.topics.parts import Column, Explanation, Figure, Figures, Prose, Table, Value
from kvplan.units import counted, format_share


def explain(example: Example) -> Explanation:
    """What sequences of a few lengths leave unused, both ways."""
    example.check_runnable()
    reserved = example.seq()
    lengths = example.tokens("used_tokens", "50,200,1000")
    if max(lengths) >= reserved:
        raise InputError(
            f"{max(lengths):,} tokens do not go into a sequence of {reserved:,}, whose last is never computed",
            where="--used-tokens",
            hint="give a longer --seq",
        )
    size, reservation, seats = example.block_size, example.payload_bytes(reserved), len(lengths)
    # So many tokens of a prompt, and one that ends it: the engines say what is held for them.
    requests = [Request(f"{i}", 0, tokens, 1) for i, tokens in enumerate(lengths)]
    places = try_out(requests, example.static(reserved, seats=seats)).fullest
    pool = try_out(requests, example.vllm(seats * -(-reserved // size), seats=seats)).fullest
    rows: list[tuple[Value, ...]] = []
    for place, resident in zip(places.requests, pool.requests, strict=True):
        used, held = example.payload_bytes(place.tokens), resident.cells * example.block_bytes
        share = place.tokens / place.cells
        rows.append((place.tokens, used, share, reservation - used, resident.cells, used / held, held - used))
    blocks = sum(resident.cells for resident in pool.requests)
    used = sum(example.payload_bytes(tokens) for tokens in lengths)
    whole, paged = seats * reservation, blocks * example.block_bytes
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
                    Figure("reserved_bytes", counted(seats, "reservation"), whole, "exact_bytes"),
                    Figure("reserved_used_share", "of them used", used / whole, "share"),
                    Figure("paged_bytes", counted(blocks, "block"), paged, "exact_bytes"),
                    Figure("paged_used_share", "of them used", used / paged, "share"),
                    Figure("sequences_ratio", "sequences in the same memory", whole / paged, "times"),
                )
            ),
        ],
        [
            "The waste of 60 to 80 % that texts about vLLM state is that of whole workloads; of these "
            f"{counted(seats, 'sequence')} it is {format_share(1 - used / whole)}, in blocks "
            f"{format_share(1 - used / paged)}."
        ],
    )
