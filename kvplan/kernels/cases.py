"""Seeded problems with known answers, on which every variant of the kernels is judged before anything is timed.

A case says what a batch looks like; with a variant it becomes a problem: arrays, launches, the answer in float64 and
how far from it is right. Slots that hold no token are NaN, outputs start as NaN, entries of block tables beyond a
request are nonsense, and what may be shared or permuted is.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kvplan.kernels import reference
from kvplan.kernels.emulation.emulate import Launch
from kvplan.kernels.number_formats import Floats, NumberFormat, number_format
from kvplan.kernels.params import PagedAttentionParams
from kvplan.kernels.plan import plan
from kvplan.kernels.variants import THREADS, Variant, merge_variant

Array = NDArray[Any]
OUTPUTS = ("output", "lse", "partial_output", "partial_lse")

#: The first row of a cache of which only the far end is there: beyond what an int can say of rows or elements.
_FAR_ROWS = 1 << 31
_NONSENSE_ID = -7
_SOFT_CAP = 20.0


@dataclass(frozen=True)
class Case:
    """A batch of one layer.

    ``group`` is query heads for each KV head. ``chunk_tokens`` cuts requests into chunks, ``None`` leaves it to the
    plan. The first ``shared_blocks`` blocks of all requests are the same. ``scales``: none, one for the tensor, or one
    for each KV head. ``loudness`` multiplies the queries: large, and few tokens have all the weight. ``packed``: the
    query is a part of a wider row, as a projection to queries, keys and values leaves it. ``interleaved``: a block's
    keys lie before its values, in one cache. ``far``: blocks lie where 32-bit offsets do not reach. ``unknown_block``:
    an entry in use is no block's id, which has to show as NaN.
    """

    name: str
    context_lens: tuple[int, ...]
    group: int = 4
    num_kv_heads: int = 2
    block_size: int = 16
    layout: Literal["NHD", "HND"] = "NHD"
    window: int = 0
    chunk_tokens: int | None = None
    shared_blocks: int = 0
    scales: Literal["none", "tensor", "head"] = "none"
    loudness: float = 1.0
    packed: bool = False
    lse: bool = True
    interleaved: bool = False
    far: bool = False
    unknown_block: bool = False


#: What every variant is tried on; a second or so for each on a CPU.
CASES = (
    Case("one token", (1,), group=1, num_kv_heads=1),
    Case("partial last block", (17, 31, 5), group=4),
    Case("empty requests", (0, 19, 0), group=8, layout="HND"),
    Case("only empty requests", (0, 0), group=1),
    Case("edges of blocks", (15, 16, 17, 32, 33), group=1, num_kv_heads=3),
    Case("edges of warps' turns", (63, 64, 65, 127, 128, 129, 257), group=2, num_kv_heads=1),
    Case("blocks of 1", (37, 70), group=4, block_size=1, layout="HND"),
    Case("blocks of 128", (128, 200, 3), group=8, num_kv_heads=1, block_size=128),
    Case("blocks of 256", (300,), group=1, num_kv_heads=1, block_size=256, layout="HND"),
    Case("groups of 16", (90, 33), group=16),
    Case("groups of 24", (40, 7), group=24, num_kv_heads=1),
    Case("uneven groups of 3", (50, 20), group=3),
    Case("group of 8", (75,), group=8),
    Case("shared blocks", (70, 90, 64), shared_blocks=3, group=4),
    Case("ragged batch", (1, 400, 3, 64, 130, 16, 250), group=2, num_kv_heads=1),
    Case("many splits", (333, 64, 1, 200), group=4, chunk_tokens=32),
    Case("uneven splits", (100, 37), group=8, chunk_tokens=7, num_kv_heads=1, layout="HND"),
    Case("window", (200, 30, 100), window=50, group=4),
    Case("window and splits", (300, 10), window=70, chunk_tokens=16, group=8, num_kv_heads=1),
    Case("window of one", (40, 1), window=1, group=1),
    Case("a scale for the tensor", (60, 20), scales="tensor", group=4),
    Case("scales for heads", (60, 130), scales="head", group=2, num_kv_heads=3, layout="HND"),
    Case("sharp softmax", (150, 40), loudness=40.0, group=4),
    Case("maximum rises late", (700, 900), loudness=30.0, group=8, num_kv_heads=1, chunk_tokens=1024),
    Case("query in a packed row", (33, 18), packed=True, group=4),
    Case("no logarithm of sums", (45,), lse=False, group=2),
    Case("no logarithm of sums, split", (145,), lse=False, group=2, chunk_tokens=64),
    Case("keys and values in one cache", (50, 20), interleaved=True, group=4),
    Case("keys and values in one cache, heads first", (90, 20), interleaved=True, group=2, layout="HND"),
    Case("beyond 32 bits", (50, 20), far=True, group=4),
    Case("beyond 32 bits, heads first", (50, 20), far=True, group=1, layout="HND", chunk_tokens=16),
    Case("unknown block", (70, 40), unknown_block=True, group=4),
)


@dataclass(frozen=True)
class Verdict:
    """Whether a result is right, and by how much.

    ``max_rel_error`` is the largest error of a head's output over the largest number of that head. ``tolerance`` is
    {rtol, atol, used}: |error| <= atol + rtol x |reference| everywhere, where ``atol`` differs from number to number
    (its largest is given) and ``used`` is the largest share of what is allowed that an error takes, 1 being all.
    """

    max_abs_error: float
    max_rel_error: float
    tolerance: Mapping[str, float]
    valid: bool


def verdict(
    expected: reference.Expected,
    allowed: reference.Tolerance,
    output: Floats,
    lse: NDArray[Any] | None = None,
) -> Verdict:
    """Compare an output ``[requests, heads, head_dim]``, and an lse where there is one, with the answer."""
    used = allowed.excess(expected, output, lse)
    errors = np.abs(output - expected.output)
    largest = np.abs(expected.output).max(axis=-1, initial=0.0)
    relative = errors.max(axis=-1, initial=0.0) / np.where(largest == 0, 1.0, largest)
    return Verdict(
        max_abs_error=float(errors.max(initial=0.0)),
        max_rel_error=float(relative.max(initial=0.0)),
        tolerance={
            "rtol": allowed.relative,
            "atol": float(allowed.absolute.max(initial=0.0)),
            "used": used,
        },
        valid=used <= 1,
    )


@dataclass(frozen=True)
class Problem:
    """A case for a variant: ``arrays`` by the names of the arguments' pointers, and the launches that solve it."""

    case: Case
    variant: Variant
    arrays: Mapping[str, Array]
    launches: tuple[Launch, ...]
    expected: reference.Expected = field(repr=False)
    tolerance: reference.Tolerance = field(repr=False)
    unknown: NDArray[np.bool_] = field(repr=False)  # requests whose result has to be NaN

    @property
    def live_bytes(self) -> int:
        """Bytes of keys and values of the tokens that are attended, each once: the least that has to be read.

        Blocks that requests share are counted once, as memory holds them.
        """
        case, stored = self.case, number_format(self.variant.kv_cache_dtype)
        rows = {
            (int(self.arrays["block_table"][request, token // case.block_size]), token % case.block_size)
            for request, context in enumerate(case.context_lens)
            for token in range(max(context - case.window, 0) if case.window else 0, context)
        }
        return 2 * len(rows) * case.num_kv_heads * self.variant.head_dim * stored.bytes

    def judge(self, outputs: Mapping[str, Array]) -> Verdict:
        """Compare with the answer, lse included; a NaN where a number is due is infinitely wrong, and the reverse."""
        output = number_format(self.variant.dtype).decoded(outputs["output"])
        lse = np.asarray(outputs["lse"], dtype=np.float64) if self.case.lse else None
        known = ~self.unknown
        marked = bool(np.isnan(output[self.unknown]).all()) and (
            lse is None or bool(np.isnan(lse[self.unknown]).all())
        )
        kept = reference.Expected(**{name: value[known] for name, value in vars(self.expected).items()})
        allowed = replace(
            self.tolerance, absolute=self.tolerance.absolute[known], lse=self.tolerance.lse[known]
        )
        found = verdict(kept, allowed, output[known], None if lse is None else lse[known])
        if marked:
            return found
        return replace(found, valid=False, tolerance={**found.tolerance, "used": np.inf})


def problem(variant: Variant, case: Case, *, seed: int = 0) -> Problem:
    """The case with the variant's formats, head size and options; equal for equal arguments."""
    rng = np.random.default_rng([seed, zlib.crc32(case.name.encode())])
    stored, queries = number_format(variant.kv_cache_dtype), number_format(variant.dtype)
    table, num_blocks, unknown = _block_table(case, rng)
    heads, contexts = case.num_kv_heads * case.group, np.array(case.context_lens, dtype=np.int32)
    query = queries.rounded(rng.standard_normal((len(contexts), heads, variant.head_dim)) * case.loudness)
    shape = (num_blocks, case.block_size, case.num_kv_heads, variant.head_dim)
    keys, values = (stored.rounded(rng.standard_normal(shape)) for _ in range(2))
    slopes = rng.uniform(0.01, 0.5, heads).astype(np.float32) if variant.alibi else None
    scales = {"none": 0, "tensor": 1, "head": case.num_kv_heads}[case.scales]
    key_scale, value_scale = (rng.uniform(0.2, 2.0, scales).astype(np.float32) for _ in range(2))

    scores = reference.Scores(
        scale=float(np.float32(variant.head_dim**-0.5)),
        window=case.window,
        soft_cap=_SOFT_CAP if variant.soft_cap else 0.0,
        alibi_slopes=None if slopes is None else slopes.astype(np.float64),
        key_scale=key_scale.astype(np.float64) if scales else 1.0,
        value_scale=value_scale.astype(np.float64) if scales else 1.0,
    )
    readable = np.where((table < 0) | (table >= num_blocks), 0, table)
    expected = reference.paged_attention(query, keys, values, readable, contexts, scores)
    tolerance = reference.tolerance(
        expected,
        head_dim=variant.head_dim,
        dtype=variant.dtype,
        weights=variant_weights(variant),
        tokens=max(case.context_lens),
        soft_cap=scores.soft_cap,
    )
    live = _live_slots(case, readable, num_blocks)
    arrays: dict[str, Array] = {
        "query": _packed(query, case, queries),
        **_caches(np.where(live, keys, np.nan), np.where(live, values, np.nan), case, stored),
        "block_table": table,
        "context_lens": contexts,
        "output": queries.encoded(np.full((len(contexts), heads, variant.head_dim), np.nan)),
    }
    if case.lse:
        arrays["lse"] = np.full((len(contexts), heads), np.nan, dtype=np.float32)
    if slopes is not None:
        arrays["alibi_slopes"] = slopes
    if scales:
        arrays |= {"key_scale": key_scale, "value_scale": value_scale}
    launches = _launches(variant, case, arrays, num_blocks)
    return Problem(case, variant, arrays, launches, expected, tolerance, unknown)


def variant_weights(variant: Variant) -> str:
    """The format in which a variant multiplies the softmax's weights with values."""
    if variant.kernel != "mma":
        return "float32"
    return "float16" if variant.kv_cache_dtype == "fp8_e4m3" else variant.kv_cache_dtype


def _block_table(case: Case, rng: np.random.Generator) -> tuple[NDArray[np.int32], int, NDArray[np.bool_]]:
    """Scattered ids for each request, nonsense beyond; blocks that nobody has; the requests with an unknown block."""
    counts = [-(-context // case.block_size) for context in case.context_lens]
    width = max(counts) + 2
    shared = min([case.shared_blocks, *counts])
    num_blocks = shared + sum(count - shared for count in counts) + 2
    ids = rng.permutation(num_blocks)
    table = np.full((len(counts), width), _NONSENSE_ID, dtype=np.int32)
    at = shared
    for request, count in enumerate(counts):
        table[request, :shared] = ids[:shared]
        table[request, shared:count] = ids[at : at + count - shared]
        at += count - shared
    unknown = np.zeros(len(counts), dtype=np.bool_)
    if case.unknown_block:
        unknown[0] = True
        table[0, counts[0] // 2] = num_blocks
    return table, num_blocks, unknown


def _live_slots(case: Case, table: NDArray[np.int32], num_blocks: int) -> NDArray[np.bool_]:
    live = np.zeros((num_blocks, case.block_size, 1, 1), dtype=np.bool_)
    for request, context in enumerate(case.context_lens):
        tokens = np.arange(max(context - case.window, 0) if case.window else 0, context)
        live[table[request, tokens // case.block_size], tokens % case.block_size] = True
    return live


def _packed(query: Floats, case: Case, queries: NumberFormat) -> Array:
    """The query alone, or with rows of NaN where keys and values would be."""
    if not case.packed:
        return queries.encoded(query)
    requests, _, head_dim = query.shape
    others = np.full((requests, 2 * case.num_kv_heads, head_dim), np.nan)
    return queries.encoded(np.concatenate([query, others], axis=1))


def _caches(keys: Floats, values: Floats, case: Case, stored: NumberFormat) -> dict[str, Array]:
    """Keys and values in the layout's order, apart or block by block in one array."""
    order = (0, 1, 2, 3) if case.layout == "NHD" else (0, 2, 1, 3)
    caches = [stored.encoded(np.ascontiguousarray(one.transpose(order))) for one in (keys, values)]
    if case.interleaved:
        return {"key_cache": np.stack(caches, axis=1)}
    return {"key_cache": caches[0], "value_cache": caches[1]}


def _pointers(case: Case, arrays: Mapping[str, Array]) -> dict[str, str]:
    both = {"value_cache": "key_cache"} if case.interleaved else {}
    return {name: name for name in arrays} | both


def _launches(variant: Variant, case: Case, arrays: dict[str, Array], num_blocks: int) -> tuple[Launch, ...]:
    """Launches of the variant, and of merge where requests are split; adds the plan and its results to ``arrays``."""
    heads, head_dim = case.num_kv_heads * case.group, variant.head_dim
    by_token = case.layout == "NHD"
    row = case.num_kv_heads * head_dim if by_token else head_dim
    rows_per_block = case.block_size * (1 if by_token else case.num_kv_heads) * (2 if case.interleaved else 1)
    first_block = -(-_FAR_ROWS // rows_per_block) if case.far else 0
    if case.far:
        arrays["block_table"] = np.where(
            arrays["block_table"] < 0, _NONSENSE_ID, arrays["block_table"] + first_block
        ).astype(np.int32)
    arguments = PagedAttentionParams(
        query_stride_request=arrays["query"].shape[1] * head_dim,
        query_stride_head=head_dim,
        cache_stride_row=row,
        cache_stride_head=head_dim if by_token else case.block_size * head_dim,
        cache_rows_per_block=rows_per_block,
        block_table_stride=arrays["block_table"].shape[1],
        num_heads=heads,
        num_kv_heads=case.num_kv_heads,
        num_blocks=first_block + num_blocks,
        block_size_log2=case.block_size.bit_length() - 1,
        scale_stride=int(case.scales == "head"),
        window=case.window,
        scale=head_dim**-0.5,
        soft_cap=_SOFT_CAP if variant.soft_cap else 0.0,
    )
    requests, threads = len(case.context_lens), (THREADS, 1, 1)
    row_bytes = row * number_format(variant.kv_cache_dtype).bytes
    back = first_block * rows_per_block * row_bytes
    before = {"key_cache": back, "value_cache": back}
    if case.interleaved:  # one array has both
        before["value_cache"] -= rows_per_block // 2 * row_bytes
    if variant.kernel == "naive":
        grid, shared = (heads, requests, 1), variant.shared_bytes(max(case.context_lens))
        pointers = _pointers(case, arrays)
        return (Launch(variant.name, grid, threads, shared, arguments, pointers, before),)
    work = plan(
        arrays["context_lens"],
        num_heads=heads,
        num_kv_heads=case.num_kv_heads,
        head_tile=variant.head_tile,
        concurrent_blocks=16,
        window=case.window,
        chunk_tokens=case.chunk_tokens,
    )
    arrays["work_items"] = work.work_items
    if work.num_partials:
        arrays["merge_items"] = work.merge_items
        arrays["partial_output"] = np.full((work.num_partials, head_dim), np.nan, dtype=np.float32)
        arrays["partial_lse"] = np.full(work.num_partials, np.nan, dtype=np.float32)
    pointers = _pointers(case, arrays)
    grid = (len(work.work_items), 1, 1)
    first = Launch(variant.name, grid, threads, variant.shared_bytes(), arguments, pointers, before)
    if not work.num_partials:
        return (first,)
    merge = merge_variant(variant)
    grid = (heads, len(work.merge_items), 1)
    return (first, Launch(merge.name, grid, threads, merge.shared_bytes(), arguments, pointers, before))
