"""`kvplan explain prefix`: requests that begin alike, with and without a prefix cache."""

from __future__ import annotations

from kvplan.core.request import Request, Segment
from kvplan.topics.example import Example, try_out
from kvplan.topics.parts import Column, Explanation, Figure, Figures, Formula, Prose, Table, Value
from kvplan.units import counted, format_bytes, format_share


def explain(example: Example) -> Explanation:
    """Blocks in use and tokens computed, both ways."""
    example.check_runnable()
    count = example.choose("requests", 10)
    shared = example.choose("shared_prefix", 2000)
    own = example.choose("own_tokens", 100)
    answer = example.choose("output_tokens", 50)
    example.check_small(count * (shared + own + answer))
    size, block = example.block_size, example.block_bytes
    requests = [
        Request(
            f"{i}", 0, shared + own, answer, 0, (Segment("prefix", 0, shared), Segment(f"own:{i}", 0, own))
        )
        for i in range(count)
    ]
    pool = count * -(-(shared + own + answer) // size)
    # All come in one step: vLLM can find the blocks of a prompt as soon as they are given out.
    runs = {
        "each its own": try_out(requests, example.vllm(pool, seats=count)),
        "shared": try_out(requests, example.vllm(pool, seats=count, caching=True)),
    }
    rows: tuple[tuple[Value, ...], ...] = tuple(
        (
            name,
            trial.peak_blocks,
            trial.peak_blocks * block,
            trial.fullest.cells["shared"],
            trial.scheduled_tokens,
            trial.metrics.prefix_cache_figures().hit_rate,
        )
        for name, trial in runs.items()
    )
    alone, together = runs["each its own"], runs["shared"]
    whole, tail = shared // size, shared % size
    prefix = whole * block
    saved_blocks = alone.peak_blocks - together.peak_blocks
    saved_of_prefix = saved_blocks / (count * whole) if whole else 0.0
    notes = []
    if whole:
        notes.append(
            f"The prefix alone is saved to 1 - 1/{count} = {format_share(saved_of_prefix)}; with the tails, which "
            f"nobody shares, the requests save {format_share(saved_blocks / alone.peak_blocks)}."
        )
    if tail:
        notes.append(
            f"{counted(shared, 'token')}: {counted(whole, 'block')} and {counted(tail, 'token')}. Only whole blocks "
            "are shared: each request computes that rest itself."
        )
    return example.explanation(
        [
            Prose(
                f"In front of {counted(count, 'request')} is the same prefix of {counted(shared, 'token')}; each has "
                f"{own:,} of its own behind it. Equal blocks have equal hashes: whoever comes later takes the block "
                "that is there, and its count of users goes up."
            ),
            Formula(
                f"{shared:,} // {size} = {counted(whole, 'block')} of prefix = {prefix:,} B = {format_bytes(prefix)}"
            ),
            Formula(f"{counted(count, 'time')}: {count * prefix:,} B; once: {prefix:,} B"),
            Table(
                "runs",
                (
                    Column("prefix", "prefix", "text"),
                    Column("peak_blocks", "blocks"),
                    Column("peak_bytes", "memory", "bytes"),
                    Column("shared_blocks", "shared"),
                    Column("computed_tokens", "computed"),
                    Column("hit_rate", "hits", "share"),
                ),
                rows,
                "Most blocks in use at once, those of them shared; tokens computed, prompts found",
            ),
            Figures(
                (
                    Figure("prefix_bytes", "the prefix, once", prefix, "exact_bytes"),
                    Figure("prefix_bytes_of_all", counted(count, "time"), count * prefix, "exact_bytes"),
                    Figure("prefix_saved_share", "saved of it", saved_of_prefix, "share"),
                    Figure(
                        "saved_bytes",
                        "saved of all",
                        saved_blocks * block,
                        "exact_bytes",
                    ),
                    Figure(
                        "saved_share",
                        "which is",
                        saved_blocks / alone.peak_blocks,
                        "share",
                    ),
                    Figure(
                        "computed_share",
                        "of the tokens still computed",
                        together.scheduled_tokens / alone.scheduled_tokens,
                        "share",
                    ),
                )
            ),
        ],
        notes,
    )
