"""How vLLM shares one pool of blocks among layers that keep different things.

Layers are put into groups; each group has a block table of its own, and a block of the pool is as large as
the widest group needs. The rules are those of vLLM 0.33.0, v1/core/kv_cache_planning.py (v1/core/kv_cache_utils.py
before), which are tried in this order: all layers alike; all of one type, whatever their widths; packed side by
side (DeepSeek-V4); pages made equal and layers dealt into groups of equal size. `GroupRules` says what differs
between versions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from fractions import Fraction
from typing import Literal, NamedTuple

from kvplan.core.kv_cache import (
    HEADS,
    STATES,
    WHOLE,
    WINDOWS,
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
    SparseIndexer,
    kv_heads_per_rank,
)
from kvplan.errors import InputError


class Page(NamedTuple):
    """A cache as it is stored: one layer's share of a block, padding included. ``heads`` are those of the rank."""

    layer: int
    cache: Cache
    block_size: int
    page_bytes: int
    heads: int = 0

    @property
    def type(self) -> tuple[object, ...]:
        """What must be equal for layers to share a group; windows of full allocations do not matter."""
        cache = self.cache
        if isinstance(cache, (FullAttention, SlidingWindow)):
            cache = cache._replace(num_kv_heads=self.heads, value_head_dim=cache.value_size)
        elif isinstance(cache, (ChunkedLocal, CrossAttention)):
            cache = cache._replace(num_kv_heads=self.heads)
        if isinstance(cache, FullAttention):
            cache = cache._replace(window=None)
        return (cache.kind, cache, self.block_size, self.page_bytes)


class PageGroup(NamedTuple):
    """Layers that share a block table. ``padded_layers`` counts the layers that a block has room for.

    ``caches`` are those of the pages, equal ones once: searches ask for the blocks of many lengths.
    """

    pages: tuple[Page, ...]
    padded_layers: int
    caches: tuple[Cache, ...]

    @classmethod
    def of(cls, pages: Iterable[Page], padded_layers: int) -> PageGroup:
        """The group of these pages."""
        pages = tuple(pages)
        return cls(pages, padded_layers, tuple({page.type: page.cache for page in pages}.values()))

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
        size = self.block_size
        return max(cache.blocks(size, need, form) for cache in self.caches)


#: How many bytes a block has: as many as the widest group; a slot for each page of a size that any group has; or
#: as many times one page of each size of latents as any group has of one size.
Packing = Literal["widest", "slots", "tuples"]


class GroupRules(NamedTuple):
    """What a version of vLLM does when it forms groups."""

    #: Where no type has so many times the layers of the smallest, groups are as large as the largest type.
    uneven: Fraction | None = Fraction(3, 2)
    #: Off: windows and chunks keep all tokens (``--disable-hybrid-kv-cache-manager``).
    hybrid_manager: bool = True
    #: Whether a page that divides the largest may get a larger block.
    scales_blocks: bool = True
    #: Kinds whose pages may be padded to the largest.
    padded_kinds: tuple[type, ...] = (*HEADS, *STATES)
    #: Whether windows beside latents keep all tokens where pages cannot be made equal.
    falls_back: bool = True
    #: Whether states of several sizes are one type.
    mixed_states: bool = False
    #: Whether a stage of a pipeline counts only its own layers where layers of one type have several widths.
    divides_widths: bool = True
    #: How DeepSeek-V4's pages of several sizes stand in a block. Not "widest": latents in one group, listed first.
    packing: Packing = "widest"
    #: Whether pages are padded rather than refused: for a view of the whole model, which no rank holds.
    refuses: bool = True


def hybrid_block_size(
    layers: Sequence[LayerCache], form: CacheFormat, block_size: int, *, multiple: int = 1
) -> int:
    """The block size of a model with states beside attention: so large that a block holds a state.

    platforms/interface.py ``_align_hybrid_block_size``: the least multiple of ``multiple`` that does, unless
    ``block_size`` is larger. Without states, or without attention, it is ``block_size``.
    """
    states = [item.cache for item in layers if isinstance(item.cache, STATES)]
    attention = [item.cache for item in layers if isinstance(item.cache, (FullAttention, LatentAttention))]
    if not states or not attention:
        return block_size
    per_token = attention[0].page_bytes(1, form)
    largest_state = max(state.page_bytes(1, form) for state in states)
    return max(block_size, multiple * -(-largest_state // (multiple * per_token)))


def make_pages(
    layers: Sequence[LayerCache],
    form: CacheFormat,
    block_size: int,
    *,
    state_block_size: int | None = None,
    drafts: Sequence[LayerCache] = (),
) -> list[Page]:
    """The pages of all caches at one block size, with states padded to the page of attention beside them.

    ``state_block_size``: tokens that one state stands for; None: as many as a block of attention. ``drafts`` are
    the caches of a draft, whose attention pads nothing.
    """
    attention = [item.cache for item in layers if isinstance(item.cache, (FullAttention, LatentAttention))]
    padded_state = attention[0].page_bytes(block_size, form) if attention else 0
    pages = []
    for layer, cache in (*layers, *drafts):
        if isinstance(cache, (LatentWindow, CompressorState)):
            own = cache.own_block_size
            pages.append(Page(layer, cache, own, cache.page_bytes(own, form)))
        elif isinstance(cache, STATES):
            size = max(cache.page_bytes(block_size, form), padded_state)
            pages.append(Page(layer, cache, state_block_size or block_size, size))
        else:
            heads = (
                kv_heads_per_rank(cache.num_kv_heads, form.tensor_parallel_size)
                if isinstance(cache, HEADS)
                else 0
            )
            pages.append(Page(layer, cache, block_size, cache.page_bytes(block_size, form), heads))
    return pages


def form_groups(pages: Sequence[Page], form: CacheFormat, rules: GroupRules) -> tuple[PageGroup, ...]:
    """The groups of a model, listed by the first layer of their type. Raises `InputError` where vLLM cannot."""
    pages = list(pages)
    if not rules.hybrid_manager:
        pages = _without_windows(pages, form, rules)
    if not pages:
        return ()
    if _is_one_type(pages, rules):
        return (PageGroup.of(pages, len(pages)),)
    if any(isinstance(page.cache, LatentWindow) for page in pages):
        return _packed_groups(pages, rules) if rules.packing == "widest" else _latents_first_groups(pages)
    equal = _equal_pages(pages, rules, rules.padded_kinds)
    if equal is None and rules.falls_back:
        whole = _latents_and_windows(pages, form, rules)
        if whole is not None:
            return (PageGroup.of(whole, len(whole)),)
    if equal is None and not rules.refuses:
        equal = _equal_pages(pages, rules, (object,))
    if equal is None:
        sizes = ", ".join(f"{size:,}" for size in sorted({page.page_bytes for page in pages}))
        raise InputError(
            f"the engine cannot make pages of {sizes} bytes equal",
            where="the layers' caches",
            hint="try a newer version (--engine), or another tensor parallel size or KV cache dtype",
        )
    return _dealt_groups(equal, rules)


def bytes_per_block(
    groups: Sequence[PageGroup], rules: GroupRules, layers: Collection[int] | None = None
) -> int:
    """Bytes of one block of the pool, in all layers or in those of one stage."""
    if not rules.divides_widths and len(groups) == 1 and len({page.type for page in groups[0].pages}) > 1:
        layers = None
    if len(groups) == 1 or rules.packing == "widest":
        return max((group.bytes_per_block(layers) for group in groups), default=0)
    counts = [_pages_by_size(group, layers) for group in groups]
    if rules.packing == "tuples" and len({group.page_bytes for group in groups}) > 1:
        # A group without a layer in the stage keeps the sizes it has in the whole model.
        first = counts[0] or _pages_by_size(groups[0], None)
        return sum(first) * max((count for by_size in counts for count in by_size.values()), default=0)
    sizes = {size for by_size in counts for size in by_size}
    return sum(size * max(by_size.get(size, 0) for by_size in counts) for size in sizes)


def tuple_bytes(groups: Sequence[PageGroup], layers: Collection[int] | None = None) -> int:
    """The block that the check at the start takes DeepSeek-V4 to have (``_max_memory_usage_bytes_from_groups``).

    One page of each size in the first group, as many times as any group has pages of one size; a group without a
    layer in the stage counts as in the whole model.
    """
    counts = [_pages_by_size(group, layers) or _pages_by_size(group, None) for group in groups]
    return sum(counts[0]) * max((count for by_size in counts for count in by_size.values()), default=0)


def _pages_by_size(group: PageGroup, layers: Collection[int] | None) -> Counter[int]:
    return Counter(page.page_bytes for page in group.pages if layers is None or page.layer in layers)


def blocks_per_sequence(groups: Sequence[PageGroup], need: Reservation, form: CacheFormat) -> int:
    """Blocks that one sequence takes from the pool at most: every group takes its own."""
    return sum(group.blocks(need, form) for group in groups)


def _is_one_type(pages: Sequence[Page], rules: GroupRules) -> bool:
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
    return all(
        isinstance(page.cache, STATES) and (rules.mixed_states or page.page_bytes == first.page_bytes)
        for page in pages
    )


def _without_windows(pages: Sequence[Page], form: CacheFormat, rules: GroupRules) -> list[Page]:
    """Pages without the hybrid manager; raises `InputError` where they cannot share one block table."""
    if not pages or _is_one_type(pages, rules):
        return list(pages)
    whole = _keep_all_tokens(pages, form)
    windows = {page.cache.window for page in pages if isinstance(page.cache, SlidingWindow)}
    chunks = {page.cache.chunk for page in pages if isinstance(page.cache, ChunkedLocal)}
    plain = not any(isinstance(page.cache, (LatentAttention, SparseIndexer)) for page in pages)
    # vLLM merges the specs first, and merging fails on a second window before widths are looked at.
    if not _is_one_type(whole, rules) or (plain and max(len(windows), len(chunks)) > 1):
        raise InputError(
            "layers of these kinds cannot share one block table",
            where="--disable-hybrid-kv-cache-manager",
            hint="leave the flag out",
        )
    return whole


def _keep_all_tokens(pages: Sequence[Page], form: CacheFormat) -> list[Page]:
    """Windows and chunks beside full attention become full attention (``_promote_local_kv_cache_specs``)."""
    block_sizes = {page.block_size for page in pages if isinstance(page.cache, WHOLE)}
    promoted = []
    for page in pages:
        cache = page.cache
        whole: FullAttention | None = None
        if isinstance(cache, SlidingWindow):
            whole = FullAttention(cache.num_kv_heads, cache.head_dim, cache.value_head_dim, cache.window)
        elif isinstance(cache, ChunkedLocal):
            whole = FullAttention(cache.num_kv_heads, cache.head_dim, window=cache.chunk)
        if whole is not None and block_sizes:
            size = next(iter(block_sizes)) if len(block_sizes) == 1 else page.block_size
            promoted.append(Page(page.layer, whole, size, whole.page_bytes(size, form), page.heads))
        else:
            promoted.append(page)
    return promoted


def _latents_and_windows(pages: Sequence[Page], form: CacheFormat, rules: GroupRules) -> list[Page] | None:
    """Latents and windows, all keeping all tokens (``_try_get_full_allocation_fallback_groups``); else None."""
    caches = [page.cache for page in pages]
    latents = any(isinstance(cache, (LatentAttention, SparseIndexer)) for cache in caches)
    windows = any(isinstance(cache, SlidingWindow) for cache in caches)
    if not (latents and windows) or any(isinstance(cache, ChunkedLocal) for cache in caches):
        return None
    whole = _keep_all_tokens(pages, form)
    return whole if _is_one_type(whole, rules) else None


def _equal_pages(
    pages: Sequence[Page], rules: GroupRules, padded_kinds: tuple[type, ...]
) -> list[Page] | None:
    """Pages of one size (``unify_kv_cache_spec_page_size``); None where a page can neither grow nor be padded.

    Smaller pages get larger blocks, or padding where sizes do not divide; a state has only padding.
    """
    largest = max(page.page_bytes for page in pages)
    equal = []
    for page in pages:
        ratio, rest = divmod(largest, page.page_bytes)
        if ratio == 1 and not rest:
            equal.append(page)
        elif rules.scales_blocks and not rest and not isinstance(page.cache, STATES):
            equal.append(page._replace(block_size=page.block_size * ratio, page_bytes=largest))
        elif isinstance(page.cache, padded_kinds):
            equal.append(page._replace(page_bytes=largest))
        else:
            return None
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
        groups += [PageGroup.of(members[i::count], size) for i in range(count)]
    return tuple(groups)


def _packed_groups(pages: Sequence[Page], rules: GroupRules) -> tuple[PageGroup, ...]:
    """Pages of several sizes side by side in a block (``_get_packed_kv_cache_groups``).

    Layers that always need the same tokens form a bucket. A bucket with as many layers of each page size repeats
    a pattern, and such buckets are split into groups of about equally many repeats; a bucket of windows is split
    until it fits into the block that the others need.
    """
    buckets: list[list[Page]] = []
    for page in pages:
        for bucket in buckets:
            if _is_one_type([*bucket, page], rules):
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
    splits = [
        isinstance(bucket.pages[0].cache, STATES)
        or (repeats is None and isinstance(bucket.pages[0].cache, WINDOWS))
        for bucket in sized
    ]
    needed = max(
        bucket.widest(len(bucket.pages) if split else count)
        for bucket, count, split in zip(sized, counts, splits, strict=True)
    )
    groups = []
    for one, count, split in zip(sized, counts, splits, strict=True):
        room = max(needed // one.pages[0].page_bytes, 1)
        groups += one.groups(max(count, -(-len(one.pages) // room)) if split else count)
    return tuple(groups)


def _latents_first_groups(pages: Sequence[Page]) -> tuple[PageGroup, ...]:
    """All latents in one group; windows padded to their page sizes and split (0.21 to 0.32).

    v1/core/kv_cache_utils.py ``_get_kv_cache_groups_uniform_groups``. A group of windows has as many pages of each
    size as pads all of them least, but at least as many as the latents have of one size.
    """
    latents = _Bucket([page for page in pages if isinstance(page.cache, WHOLE)])
    by_window: dict[tuple[int, int], list[Page]] = {}
    for page in pages:
        if isinstance(page.cache, (LatentWindow, CompressorState)):
            by_window.setdefault((page.block_size, page.cache.window), []).append(page)
    # Counted before padding, which may make pages of two sizes equal.
    counts = [latents.repeats, *(_Bucket(members).repeats for members in by_window.values())]
    repeats = _least_padding(counts, latents.repeats)
    groups = [PageGroup.of(latents.pages, len(latents.pages))]
    for members in by_window.values():
        bucket = _Bucket([_padded_to(page, latents.by_size) for page in members])
        groups += bucket.groups(-(-bucket.repeats // repeats))
    return tuple(groups)


def _padded_to(page: Page, sizes: Collection[int]) -> Page:
    """The page at the next of these sizes."""
    fitting = [size for size in sizes if size >= page.page_bytes]
    if not fitting:
        raise InputError(
            f"a window's page of {page.page_bytes:,} bytes is larger than any of the latents",
            where="the layers' caches",
            hint="use a larger --block-size, or a newer version (--engine)",
        )
    return page._replace(page_bytes=min(fitting))


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
            return [PageGroup.of(self.pages, len(self.pages))]
        if not self.balanced:
            raise InputError(
                "there are not as many pages of each size to share out among groups",
                where="the layers' caches",
                hint="the model's layers do not repeat a pattern",
            )
        pattern = list(zip(*self.by_size.values(), strict=True))
        parts = [[page for repeat in pattern[i::count] for page in repeat] for i in range(count)]
        widest = max(len(part) for part in parts)
        return [PageGroup.of(part, widest) for part in parts]


def _least_padding(counts: Sequence[int], least: int) -> int:
    """The group size from ``least`` on that pads ``counts`` least; the larger of equals (``_approximate_gcd``)."""
    most = max(counts)
    return min(
        range(least, max(most, least) + 1),
        key=lambda size: (sum(-count % size for count in counts), -size),
    )
