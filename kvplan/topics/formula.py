"""`kvplan explain formula`: bytes of a token, from the model's shape."""

from __future__ import annotations

from kvplan.core.kv_cache import (
    KV_DTYPE_BYTES,
    STATES,
    Cache,
    CacheFormat,
    ChunkedLocal,
    CrossAttention,
    FullAttention,
    LatentAttention,
    SlidingWindow,
)
from kvplan.topics.example import Example
from kvplan.topics.parts import Column, Explanation, Figure, Figures, Formula, Part, Prose, Table, Value
from kvplan.units import format_bytes

#: Kinds that keep a key and a value for each KV head.
_OF_HEADS = (FullAttention, SlidingWindow, ChunkedLocal, CrossAttention)


def explain(example: Example) -> Explanation:
    """The formula for each kind of layer, and what lengths make of it."""
    served = example.served
    kv, spec = served.kv, served.spec
    seq = example.seq()
    form = served.deployment.cache
    element = KV_DTYPE_BYTES.get(form.kv_cache_dtype)
    parts: list[Part] = []
    if any(isinstance(cache, _OF_HEADS) for cache, _ in spec.attention):
        who = (
            "Each layer of attention"
            if any(isinstance(cache, STATES) for cache, _ in spec.attention)
            else "Each layer"
        )
        parts.append(Prose(f"{who} keeps a key and a value of every token, for each of its KV heads."))
    if any(isinstance(cache, LatentAttention) for cache, _ in spec.attention):
        parts.append(
            Prose(
                "Latent attention (mla) keeps one vector of every token in a layer, from which the keys and values of "
                "all heads are made, and a rotary part that they share."
            )
        )
    for cache, layers in spec.attention:
        if isinstance(cache, (FullAttention, SlidingWindow)) and element is not None:
            window = isinstance(cache, SlidingWindow)
            parts.append(
                Formula(
                    f"{layers} layers x {cache.num_kv_heads} KV heads x (key {cache.head_dim} + value "
                    f"{cache.value_size}) x {element} B = {cache.page_bytes(1, form) * layers:,} B"
                    + (" in the window" if window else "")
                )
            )
        elif isinstance(cache, LatentAttention) and cache.row_bytes(form) == cache.elements * (element or 0):
            parts.append(
                Formula(
                    f"{layers} layers x (latent {cache.kv_lora_rank} + rotary {cache.qk_rope_head_dim}) x {element} B "
                    f"= {cache.row_bytes(form) * layers:,} B"
                )
            )
        elif isinstance(cache, STATES):
            state = cache.payload_bytes(1, form) * layers
            parts.append(Formula(f"{layers} layers of {cache.kind}: {state:,} B a sequence, however long"))
        else:
            parts.append(Formula(f"{layers} layers of {cache.kind}: {_growth(cache, layers, form)}"))
    more = " more, once windows are full" if kv.fixed_bytes_per_sequence else ""
    figures = [
        Figure("bytes_per_token", f"a token{more}", kv.bytes_per_token, "exact_bytes"),
        Figure("bytes_per_block", f"a block of {kv.block_size} tokens", kv.bytes_per_block, "exact_bytes"),
    ]
    if kv.fixed_bytes_per_sequence:
        figures.append(
            Figure(
                "fixed_bytes_per_sequence", "fixed, a sequence", kv.fixed_bytes_per_sequence, "exact_bytes"
            )
        )
    spread = spec.num_heads // spec.num_kv_heads if spec.num_kv_heads else 1
    if spread > 1 and all(isinstance(cache, FullAttention) for cache, _ in spec.attention):
        figures.append(
            Figure(
                "bytes_per_token_of_all_heads",
                f"with K/V for all {spec.num_heads} heads",
                kv.bytes_per_token * spread,
                "exact_bytes",
            )
        )
    parts.append(Figures(tuple(figures)))
    counts = sorted({1, kv.block_size, 1000, seq})
    rows: list[tuple[Value, ...]] = []
    for tokens in counts:
        size = example.payload_bytes(tokens)
        rows.append((tokens, size, size / (1 << 30), size / 10**9))
    parts.append(
        Table(
            "lengths",
            (
                Column("tokens", "tokens"),
                Column("bytes", "K/V", "exact_bytes"),
                Column("gib", "GiB (2^30)"),
                Column("gb", "GB (10^9)"),
            ),
            tuple(rows),
        )
    )
    size = example.payload_bytes(1000)
    return example.explanation(
        parts,
        [
            f"1,000 tokens are {size:,} B: {size / (1 << 30):.3f} GiB or {size / 10**9:.3f} GB "
            f"({format_bytes(size)}). A text with another figure, such as {_mixed(size)}, has divided "
            "by 1,024 and by 1,000 in turn."
        ],
    )


def _growth(cache: Cache, layers: int, form: CacheFormat) -> str:
    """What a long sequence takes: bytes of one more token, or, of what keeps no more than a window, all of them."""
    long = 1 << 20
    size = cache.payload_bytes(long, form) * layers
    more = (cache.payload_bytes(2 * long, form) * layers - size) / long
    return f"{more:,.0f} B a token" if more else f"{size:,} B a sequence, once windows are full"


def _mixed(size: int) -> str:
    """Neither GiB nor GB, but MiB over 1,000; with as many digits as tell it from both."""
    wrong, *right = (size / unit for unit in (1000 << 20, 1 << 30, 10**9))
    digits = 2
    while size and f"{wrong:.{digits}f}" in [f"{amount:.{digits}f}" for amount in right]:
        digits += 1
    return f"{wrong:.{digits}f}"
