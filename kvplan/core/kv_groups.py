"""How vLLM shares one pool of blocks among layers that keep different things.

Layers are put into groups; each group has a block table of its own, and a block of the pool is as large as
the widest group needs. The rules are those of vLLM 0.33.0, v1/core/kv_cache_planning.py, which are tried in
this order: all layers alike; all of one type, whatever their widths; packed side by side (DeepSeek-V4); pages
made equal and layers dealt into groups of equal size.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from fractions import Fraction
from typing import NamedTuple

from kvplan.core.kv_cache import (
    HEADS,
    STATES,
    WHOLE,
    Cache,
    CacheFormat,
    ChunkedLocal,
    CompressorState,
    CrossAttention,
    FullAttention,
    LatentAttention,
    LatentWindow,
    LayerCache,
    Reservation,
    SlidingWindow,
)
from kvplan.errors import InputError


class Page(NamedTuple):
    """A cache as it is stored: one layer's share of a block, padding included."""

    layer: int
    cache: Cache
    block_size: int
    page_bytes: int

    @property
    def type(self) -> tuple[object, ...]:
        """What must be equal for layers to share a group; windows of full allocations do not matter."""
        cache = self.cache._replace(window=None) if isinstance(self.cache, FullAttention) else self.cache
        return (cache.kind, cache, self.block_size, self.page_bytes)


class PageGroup(NamedTuple):
    """Layers that share a block table. ``padded_layers`` counts the layers that a block has room for."""

    pages: tuple[Page, ...]
    padded_layers: int

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self.pages[0].block_size

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of its layers, each once."""
        return tuple(dict.fromkeys(page.cache.kind for page in self.pages))

    @property
    def page_bytes(self) -> int | None:
        """Bytes of a block of one layer; None where layers differ."""
        sizes = {page.page_bytes for page in self.pages}
        return sizes.pop() if len(sizes) == 1 else None

    def bytes_per_block(self, layers: Collection[int] | None = None) -> int:
        """Bytes of a block in all its layers, or in those of one stage."""
        return sum(page.page_bytes for page in self.pages if layers is None or page.layer in layers)

    def blocks(self, need: Reservation, form: CacheFormat) -> int:
        """Blocks that one sequence is given at most."""
        caches = {page.type: page.cache for page in self.pages}.values()
        return max(cache.blocks(self.block_size, need, form) for cache in caches)


class GroupRules(NamedTuple):
    """What a version of vLLM does when it forms groups."""

    #: Where no type has so many times the layers of the smallest, groups are as large as the largest type.
    uneven: Fraction | None = Fraction(3, 2)
    #: Off: windows and chunks keep all tokens (``--disable-hybrid-kv-cache-manager``).
    hybrid_manager: bool = True
    #: Whether a page that does not divide the largest may be padded; else such a model is refused.
    pads_pages: bool = True


def hybrid_block_size(
    layers: Sequence[LayerCache], form: CacheFormat, block_size: int, *, multiples: Sequence[int] = ()
) -> int:
    """The block size of a model with states beside attention: so large that a block holds a state.

    platforms/interface.py ``_align_hybrid_block_size``: a multiple of ``block_size`` or, where that is larger, of
    the first of ``multiples``, and of the others. Without states, or without attention, it is ``block_size``.
    """
    states = [item.cache for item in layers if isinstance(item.cache, STATES)]
    attention = [item.cache for item in layers if isinstance(item.cache, (FullAttention, LatentAttention))]
    if not states or not attention:
        return block_size
    least = math.lcm(max([block_size, *multiples[:1]]), *multiples[1:])
    per_token = attention[0].page_bytes(1, form)
    largest_state = max(state.page_bytes(1, form) for state in states)
    return max(block_size, least * -(-largest_state // (least * per_token)))


def make_pages(layers: Sequence[LayerCache], form: CacheFormat, block_size: int) -> list[Page]:
    """The pages of all caches at one block size, with states padded to the page of attention beside them."""
    attention = [item.cache for item in layers if isinstance(item.cache, (FullAttention, LatentAttention))]
    padded_state = attention[0].page_bytes(block_size, form) if attention else 0
    pages = []
    for layer, cache in layers:
        if isinstance(cache, (LatentWindow, CompressorState)):
            own = cache.own_block_size
            pages.append(Page(layer, cache, own, cache.page_bytes(own, form)))
            continue
        size = cache.page_bytes(block_size, form)
        if isinstance(cache, STATES):
            size = max(size, padded_state)
        pages.append(Page(layer, cache, block_size, size))
    return pages


def form_groups(pages: Sequence[Page], form: CacheFormat, rules: GroupRules) -> tuple[PageGroup, ...]:
    """The groups of a model, listed by the first layer of their type. Raises `InputError` where vLLM cannot."""
    pages = list(pages)
    if not rules.hybrid_manager:
        pages = _keep_all_tokens(pages, form)
    if not pages:
        return ()
    if _is_one_type(pages):
        return (PageGroup(tuple(pages), len(pages)),)
    if any(isinstance(page.cache, LatentWindow) for page in pages):
        return _packed_groups(pages)
    equal = _equal_pages(pages, rules)
    if equal is None:
        whole = _keep_all_tokens(pages, form)
        return (PageGroup(tuple(whole), len(whole)),)
    return _dealt_groups(equal, rules)


def bytes_per_block(groups: Sequence[PageGroup], layers: Collection[int] | None = None) -> int:
    """Bytes of one block of the pool: of the widest group, in all layers or in those of one stage."""
    return max((group.bytes_per_block(layers) for group in groups), default=0)


def blocks_per_sequence(groups: Sequence[PageGroup], need: Reservation, form: CacheFormat) -> int:
    """Blocks that one sequence takes from the pool at most: every group takes its own."""
    return sum(group.blocks(need, form) for group in groups)


def scheduler_block_size(groups: Sequence[PageGroup]) -> int:
    """Tokens that a prefix hit is a multiple of: the least common multiple of the groups' blocks."""
    return math.lcm(*(group.block_size for group in groups)) if groups else 1


def hash_block_size(groups: Sequence[PageGroup]) -> int:
    """Tokens that one hash covers: the greatest common divisor of the groups' blocks."""
    return math.gcd(*(group.block_size for group in groups)) if groups else 1


def _is_one_type(pages: Sequence[Page]) -> bool:
    """Whether all layers always need the same tokens (``UniformTypeKVCacheSpecs.is_uniform_type``)."""
    if len({page.block_size for page in pages}) > 1:
        return False
    first = pages[0]
    caches = [page.cache for page in pages]
    if isinstance(first.cache, WHOLE):
        return all(isinstance(cache, WHOLE) for cache in caches)
    if isinstance(first.cache, (SlidingWindow, LatentWindow, CompressorState)):
        kind = type(first.cache)
        return all(isinstance(cache, kind) and cache.window == first.cache.window for cache in caches)
    if isinstance(first.cache, ChunkedLocal):
        return all(isinstance(cache, ChunkedLocal) and cache.chunk == first.cache.chunk for cache in caches)
    if isinstance(first.cache, CrossAttention):
        return all(isinstance(cache, CrossAttention) for cache in caches)
    return all(isinstance(page.cache, STATES) and page.page_bytes == first.page_bytes for page in pages)


def _keep_all_tokens(pages: Sequence[Page], form: CacheFormat) -> list[Page]:
    """Windows and chunks beside full attention become full attention (``_promote_local_kv_cache_specs``)."""
    if not pages or _is_one_type(pages) or not any(isinstance(page.cache, WHOLE) for page in pages):
        return list(pages)
    block_sizes = {page.block_size for page in pages if isinstance(page.cache, WHOLE)}
    promoted = []
    for page in pages:
        cache = page.cache
        whole: FullAttention | None = None
        if isinstance(cache, SlidingWindow):
            whole = FullAttention(cache.num_kv_heads, cache.head_dim, cache.value_head_dim, cache.window)
        elif isinstance(cache, ChunkedLocal):
            whole = FullAttention(cache.num_kv_heads, cache.head_dim, window=cache.chunk)
        if whole is not None:
            size = next(iter(block_sizes)) if len(block_sizes) == 1 else page.block_size
            promoted.append(Page(page.layer, whole, size, whole.page_bytes(size, form)))
        else:
            promoted.append(page)
    if not _is_one_type(promoted):
        raise InputError(
            "layers of these kinds cannot share one block table",
            where="--disable-hybrid-kv-cache-manager",
            hint="leave the flag out",
        )
    return promoted


def _equal_pages(pages: Sequence[Page], rules: GroupRules) -> list[Page] | None:
    """Pages of one size: smaller ones get larger blocks, or padding where sizes do not divide.

    A latent cannot be padded: None, and the caller keeps all tokens of all layers
    (``unify_kv_cache_spec_page_size``).
    """
    largest = max(page.page_bytes for page in pages)
    equal = []
    for page in pages:
        ratio, rest = divmod(largest, page.page_bytes)
        if page.page_bytes == largest:
            equal.append(page)
        elif isinstance(page.cache, STATES) or (rest and isinstance(page.cache, HEADS)):
            if not rules.pads_pages:
                raise InputError(
                    f"pages of {page.page_bytes:,} and {largest:,} bytes cannot be made equal",
                    where="--engine",
                    hint="vLLM pads them from 0.24 on",
                )
            equal.append(page._replace(page_bytes=largest))
        elif rest:
            return None
        else:
            equal.append(page._replace(block_size=page.block_size * ratio, page_bytes=largest))
    return equal


def _dealt_groups(pages: Sequence[Page], rules: GroupRules) -> tuple[PageGroup, ...]:
    """Layers of each type dealt into groups of one size (``_get_kv_cache_groups_uniform_page_size``)."""
    types: dict[tuple[object, ...], list[Page]] = {}
    for page in pages:
        types.setdefault(page.type, []).append(page)
    fewest = min(len(members) for members in types.values())
    most = max(len(members) for members in types.values())
    size = most if rules.uneven is not None and most < rules.uneven * fewest else fewest
    groups = []
    for members in types.values():
        count = -(-len(members) // size)
        # Every count-th layer, so that each stage of a pipeline has its part of every group.
        groups += [PageGroup(tuple(members[i::count]), size) for i in range(count)]
    return tuple(groups)


def _packed_groups(pages: Sequence[Page]) -> tuple[PageGroup, ...]:
    """Pages of several sizes side by side in a block (``_get_packed_kv_cache_groups``).

    Layers that always need the same tokens form a bucket. A bucket with as many layers of each page size repeats
    a pattern, and such buckets are split into groups of about equally many repeats; a bucket of windows is split
    until it fits into the block that the others need.
    """
    buckets: list[list[Page]] = []
    for page in pages:
        for bucket in buckets:
            if _is_one_type([*bucket, page]):
                bucket.append(page)
                break
        else:
            buckets.append([page])
    sized = [_Bucket(bucket) for bucket in buckets]
    mixed = [bucket.repeats for bucket in sized if bucket.balanced and len(bucket.by_size) > 1]
    repeats = None
    if mixed:
        repeats = _least_padding([bucket.repeats for bucket in sized if bucket.balanced], max(mixed))
    counts = [
        -(-bucket.repeats // repeats) if bucket.balanced and repeats is not None else 1 for bucket in sized
    ]
    divisible = [repeats is None and isinstance(b.pages[0].cache, SlidingWindow) for b in sized]
    needed = max(
        bucket.widest(len(bucket.pages) if split else count)
        for bucket, count, split in zip(sized, counts, divisible, strict=True)
    )
    groups = []
    for one, count, split in zip(sized, counts, divisible, strict=True):
        room = max(needed // one.pages[0].page_bytes, 1)
        groups += one.groups(max(count, -(-len(one.pages) // room)) if split else count)
    return tuple(groups)


class _Bucket:
    """Layers that always need the same tokens, with pages of one or several sizes."""

    def __init__(self, pages: Sequence[Page]) -> None:
        self.pages = tuple(pages)
        self.by_size: dict[int, list[Page]] = {}
        for page in pages:
            self.by_size.setdefault(page.page_bytes, []).append(page)
        counts = {len(members) for members in self.by_size.values()}
        self.balanced = len(counts) == 1
        self.repeats = max(counts)

    def widest(self, count: int) -> int:
        """Bytes of the largest of ``count`` groups."""
        return sum(-(-len(members) // count) * size for size, members in self.by_size.items())

    def groups(self, count: int) -> list[PageGroup]:
        """The bucket in ``count`` parts, each with whole repeats of its pattern."""
        if count == 1:
            return [PageGroup(self.pages, len(self.pages))]
        pattern = list(zip(*self.by_size.values(), strict=True))
        parts = [[page for repeat in pattern[i::count] for page in repeat] for i in range(count)]
        widest = max(len(part) for part in parts)
        return [PageGroup(tuple(part), widest) for part in parts]


def _least_padding(counts: Sequence[int], least: int) -> int:
    """The group size from ``least`` on that pads ``counts`` least; the larger of equals (``_approximate_gcd``)."""
    most = max(counts)
    return min(
        range(least, max(most, least) + 1),
        key=lambda size: (sum(-count % size for count in counts), -size),
    )
