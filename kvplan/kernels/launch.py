"""The kernels on a GPU, through CuPy: arrays in, arrays out, nothing allocated that the caller does not see.

Nothing here has run on a GPU yet; the kernels themselves have, in emulation. Caches are CuPy arrays with the
dimensions ``[blocks, block_size, kv_heads, head_dim]`` (layout NHD) or ``[blocks, kv_heads, block_size, head_dim]``
(HND), whatever their strides; bfloat16 and e4m3 are held as bits (``uint16``, ``uint8``).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kvplan.errors import InputError
from kvplan.kernels.device import Device, find_device
from kvplan.kernels.number_formats import number_format
from kvplan.kernels.nvrtc import compile_variant
from kvplan.kernels.params import CopyBlocksParams, PagedAttentionParams, ReshapeAndCacheParams
from kvplan.kernels.plan import WorkPlan, plan
from kvplan.kernels.variants import BLOCK_SIZES, THREADS, Variant, merge_variant

Layout = Literal["NHD", "HND"]
#: A CuPy array; CuPy has no types that mypy reads.
DeviceArray = Any
_VECTOR_BYTES = 16
#: Shared memory of a block of threads that needs no permission (CUDA programming guide).
_SHARED_WITHOUT_ASKING = 48 * 1024
#: CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES (cuda.h).
_MOST_DYNAMIC_SHARED = 8
_MOST_ROWS = 1 << 32
_MOST_GRID_ROWS = 65535


@dataclass(frozen=True)
class Cache:
    """The keys and values of one layer. Scales are float32 arrays of one number, or of one for each KV head."""

    keys: DeviceArray
    values: DeviceArray
    layout: Layout = "NHD"
    key_scale: DeviceArray | None = None
    value_scale: DeviceArray | None = None


@dataclass
class Attention:
    """One decode step's attention for a batch, ready to run as often as wanted.

    ``query`` is ``[requests, heads, head_dim]`` (rows contiguous), ``output`` the same and contiguous, ``lse``
    ``[requests, heads]`` float32 or ``None``; ``block_table`` int32 ``[requests, blocks]``, ``context_lens`` int32
    ``[requests]``. The plan is made on the CPU from ``host_context_lens``; it is copied, and room for partial results
    is allocated, when the object is made, and ``run`` allocates nothing. ``chunk_tokens`` fixes the chunks, which makes
    a request's result independent of its batch. Raises ``InputError`` for shapes and strides that kernels do not take.
    """

    variant: Variant
    query: DeviceArray
    cache: Cache
    block_table: DeviceArray
    context_lens: DeviceArray
    host_context_lens: NDArray[np.integer[Any]]
    output: DeviceArray
    scale: float
    lse: DeviceArray | None = None
    window: int = 0
    soft_cap: float = 0.0
    alibi_slopes: DeviceArray | None = None
    chunk_tokens: int | None = None

    def __post_init__(self) -> None:
        device = find_device()
        requests, heads, head_dim = self.query.shape
        kv_heads, block_size, geometry = _geometry(self.cache, self.variant)
        if head_dim != self.variant.head_dim:
            raise InputError(f"{self.variant.name} is not for head size {head_dim}")
        if self.query.strides[2] != self.query.itemsize or any(
            s % _VECTOR_BYTES for s in self.query.strides[:2]
        ):
            raise InputError("rows of the query must be contiguous and aligned to 16 bytes")
        if requests > _MOST_GRID_ROWS:
            raise InputError(
                f"{requests} requests are too many for one launch", hint=f"at most {_MOST_GRID_ROWS}"
            )
        self._longest = int(np.max(self.host_context_lens, initial=0))
        if self.block_table.shape[1] * block_size < self._longest:
            raise InputError(
                f"a block table of {self.block_table.shape[1]} does not hold {self._longest} tokens"
            )
        self._arguments = PagedAttentionParams(
            query=self.query.data.ptr,
            key_cache=self.cache.keys.data.ptr,
            value_cache=self.cache.values.data.ptr,
            output=self.output.data.ptr,
            lse=_address(self.lse),
            block_table=self.block_table.data.ptr,
            context_lens=self.context_lens.data.ptr,
            alibi_slopes=_address(self.alibi_slopes),
            key_scale=_address(self.cache.key_scale),
            value_scale=_address(self.cache.value_scale),
            query_stride_request=self.query.strides[0] // self.query.itemsize,
            query_stride_head=self.query.strides[1] // self.query.itemsize,
            block_table_stride=self.block_table.strides[0] // 4,
            num_heads=heads,
            num_kv_heads=kv_heads,
            num_blocks=self.cache.keys.shape[0],
            block_size_log2=block_size.bit_length() - 1,
            scale_stride=_scale_stride(self.cache),
            window=self.window,
            scale=self.scale,
            soft_cap=self.soft_cap,
            **geometry,
        )
        self._attend = load_function(self.variant, device.arch)
        self._requests, self._heads = requests, heads
        self.work: WorkPlan | None = None
        if self.variant.kernel == "naive":
            allow_shared(self._attend, self.variant.shared_bytes(self._longest), device)
        else:
            self._add_plan(device, kv_heads)

    def _add_plan(self, device: Device, kv_heads: int) -> None:
        import cupy

        allow_shared(self._attend, self.variant.shared_bytes(), device)
        self.work = plan(
            self.host_context_lens,
            num_heads=self._heads,
            num_kv_heads=kv_heads,
            head_tile=self.variant.head_tile,
            concurrent_blocks=device.num_sms * self.variant.blocks_per_sm,
            window=self.window,
            chunk_tokens=self.chunk_tokens,
        )
        partials = max(self.work.num_partials, 1)
        self._kept = (
            cupy.asarray(self.work.work_items),
            cupy.asarray(self.work.merge_items),
            cupy.empty((partials, self.variant.head_dim), dtype=cupy.float32),
            cupy.empty(partials, dtype=cupy.float32),
        )
        names = ("work_items", "merge_items", "partial_output", "partial_lse")
        for name, array in zip(names, self._kept, strict=True):
            setattr(self._arguments, name, array.data.ptr)
        self._merge = load_function(merge_variant(self.variant), device.arch)

    def run(self) -> None:
        """Queue the launches on CuPy's current stream: attention, and the merge if requests are split."""
        if self.work is None:
            grid = (self._heads, self._requests)
            launch(self._attend, grid, self._arguments, self.variant.shared_bytes(self._longest))
            return
        launch(self._attend, (len(self.work.work_items), 1), self._arguments, self.variant.shared_bytes())
        if self.work.num_partials:
            launch(self._merge, (self._heads, len(self.work.merge_items)), self._arguments, 0)


def reshape_and_cache(
    variant: Variant, key: DeviceArray, value: DeviceArray, cache: Cache, slot_mapping: DeviceArray
) -> None:
    """Write new keys and values ``[tokens, kv_heads, head_dim]`` into their slots (int64; below 0 skips a token)."""
    kv_heads, block_size, geometry = _geometry(cache, variant)
    for array in (key, value):
        row = variant.head_dim * array.itemsize
        if array.shape[1:] != (kv_heads, variant.head_dim) or array.strides[1:] != (row, array.itemsize):
            raise InputError(
                f"new keys and values must be [tokens, {kv_heads}, {variant.head_dim}], rows contiguous"
            )
        if array.strides[0] % _VECTOR_BYTES:
            raise InputError("tokens of new keys and values must be aligned to 16 bytes")
    arguments = ReshapeAndCacheParams(
        key=key.data.ptr,
        value=value.data.ptr,
        key_cache=cache.keys.data.ptr,
        value_cache=cache.values.data.ptr,
        slot_mapping=slot_mapping.data.ptr,
        key_scale=_address(cache.key_scale),
        value_scale=_address(cache.value_scale),
        key_stride_token=key.strides[0] // key.itemsize,
        value_stride_token=value.strides[0] // value.itemsize,
        num_slots=cache.keys.shape[0] * block_size,
        num_kv_heads=kv_heads,
        block_size_log2=block_size.bit_length() - 1,
        scale_stride=_scale_stride(cache),
        **geometry,
    )
    if len(key):
        launch(load_function(variant, find_device().arch), (len(key), 1), arguments, 0)


def checked_pairs(pairs: Sequence[tuple[int, int]], num_blocks: int) -> NDArray[np.int64]:
    """Pairs (source, destination) that may be copied at once, in any order: ``[pairs, 2]``.

    Raises ``InputError`` where a destination is also a source or is named twice, or a block does not exist.
    """
    table = np.asarray(pairs, dtype=np.int64).reshape(-1, 2)
    sources, targets = table[:, 0], table[:, 1]
    if np.any((table < 0) | (table >= num_blocks)):
        raise InputError(f"a block to copy does not exist: ids are 0 to {num_blocks - 1}")
    if len(np.unique(targets)) < len(targets):
        raise InputError("a block is the destination of two copies")
    if np.isin(targets, sources).any():
        raise InputError("a block is copied and written at once", hint="copy in two steps")
    return table


def copy_blocks(caches: Sequence[Cache], pairs: Sequence[tuple[int, int]]) -> None:
    """Copy blocks to others in all layers, in one launch; blocks must be contiguous."""
    import cupy

    table = checked_pairs(pairs, min(layer.keys.shape[0] for layer in caches))
    block_bytes = caches[0].keys.strides[0]
    for array in (array for layer in caches for array in (layer.keys, layer.values)):
        if array.strides[0] != block_bytes or not array[0].flags.c_contiguous or block_bytes % _VECTOR_BYTES:
            raise InputError("blocks to copy must be contiguous, of one size, and a multiple of 16 bytes")
    if not len(table):
        return
    on_device = [
        cupy.asarray(np.array([layer.keys.data.ptr for layer in caches], dtype=np.uint64)),
        cupy.asarray(np.array([layer.values.data.ptr for layer in caches], dtype=np.uint64)),
        cupy.asarray(table),
    ]
    arguments = CopyBlocksParams(*(array.data.ptr for array in on_device), block_bytes=block_bytes)
    function = load_function(Variant("copy_blocks"), find_device().arch)
    launch(function, (len(table), len(caches)), arguments, 0)


def runs_of_blocks(pairs: NDArray[np.int64]) -> list[tuple[int, int, int]]:
    """Copies (source, destination, blocks) that do the same as the pairs, adjacent blocks merged."""
    ordered = pairs[np.lexsort((pairs[:, 1], pairs[:, 0]))]
    breaks = np.flatnonzero(np.any(np.diff(ordered, axis=0) != 1, axis=1)) + 1
    return [(int(run[0, 0]), int(run[0, 1]), len(run)) for run in np.split(ordered, breaks) if len(run)]


def swap_out(device: DeviceArray, host: NDArray[Any], pairs: Sequence[tuple[int, int]]) -> None:
    """Copy blocks (on the device, on the host) of one cache to pinned memory, on CuPy's current stream.

    ``host`` is an array over memory of ``cupyx.empty_pinned``; first dimension blocks, both contiguous and of equal
    blocks. The copies are queued: synchronise the stream before reading.
    """
    _swap(device, host, pairs, out=True)


def swap_in(device: DeviceArray, host: NDArray[Any], pairs: Sequence[tuple[int, int]]) -> None:
    """Copy blocks (on the device, on the host) back from pinned memory; as ``swap_out``."""
    _swap(device, host, pairs, out=False)


def _swap(device: DeviceArray, host: NDArray[Any], pairs: Sequence[tuple[int, int]], *, out: bool) -> None:
    import cupy

    if device.shape[1:] != host.shape[1:] or device.itemsize != host.itemsize:
        raise InputError("blocks on the host must be as those on the device")
    if not device.flags.c_contiguous or not host.flags.c_contiguous:
        raise InputError("caches to swap must be contiguous")
    table = np.asarray(pairs, dtype=np.int64).reshape(-1, 2)
    if np.any((table < 0) | (table >= [device.shape[0], host.shape[0]])):
        raise InputError("a block to swap does not exist")
    if len(np.unique(table[:, int(out)])) < len(table):
        raise InputError("a block is the destination of two copies")
    block_bytes, stream = device.strides[0], cupy.cuda.get_current_stream()
    kind = cupy.cuda.runtime.memcpyDeviceToHost if out else cupy.cuda.runtime.memcpyHostToDevice
    for on_device, on_host, blocks in runs_of_blocks(table):
        gpu = device.data.ptr + on_device * block_bytes
        cpu = host.ctypes.data + on_host * block_bytes
        target, source = (cpu, gpu) if out else (gpu, cpu)
        cupy.cuda.runtime.memcpyAsync(target, source, blocks * block_bytes, kind, stream.ptr)


def _geometry(cache: Cache, variant: Variant) -> tuple[int, int, dict[str, int]]:
    """KV heads, block size, and the strides as arguments, in elements."""
    keys, values = cache.keys, cache.values
    if keys.ndim != 4 or keys.shape != values.shape or keys.strides != values.strides:
        raise InputError(
            "caches of keys and values must have 4 dimensions, the same sizes and the same strides"
        )
    slot, head = (1, 2) if cache.layout == "NHD" else (2, 1)
    block_size, kv_heads = keys.shape[slot], keys.shape[head]
    size = number_format(variant.kv_cache_dtype).bytes
    if keys.shape[3] != variant.head_dim or keys.itemsize != size or keys.strides[3] != size:
        raise InputError(f"rows of the cache must be {variant.head_dim} contiguous {variant.kv_cache_dtype}")
    if block_size not in BLOCK_SIZES:
        raise InputError(f"{block_size} is no block size", hint="powers of two from 1 to 256")
    if any(stride % _VECTOR_BYTES for stride in keys.strides[:3]) or keys.data.ptr % _VECTOR_BYTES:
        raise InputError("rows of the cache must be aligned to 16 bytes")
    row_stride, block_stride = keys.strides[slot], keys.strides[0]
    rows_per_block, rest = divmod(block_stride, row_stride)
    if rest or keys.shape[0] * rows_per_block >= _MOST_ROWS or row_stride >= _MOST_ROWS:
        raise InputError("blocks must lie a whole number of rows apart, at most 2^32 rows in all")
    return (
        kv_heads,
        block_size,
        {
            "cache_stride_row": row_stride // size,
            "cache_stride_head": keys.strides[head] // size,
            "cache_rows_per_block": rows_per_block,
        },
    )


def _scale_stride(cache: Cache) -> int:
    sizes = {scale.size for scale in (cache.key_scale, cache.value_scale) if scale is not None}
    if len(sizes) > 1:
        raise InputError("keys and values must both have one scale, or one for each KV head")
    return int(sizes not in (set(), {1}))


def _address(array: DeviceArray | None) -> int:
    return 0 if array is None else int(array.data.ptr)


@cache
def load_function(variant: Variant, architecture: int) -> Any:
    """The variant loaded for the device's architecture; kept as long as the process."""
    import cupy

    module = cupy.cuda.function.Module()
    module.load(compile_variant(variant, architecture).cubin)
    return module.get_function(variant.name)


def allow_shared(function: Any, shared_bytes: int, device: Device) -> None:
    """Let a function have so much dynamic shared memory. Raises ``InputError`` where the device has less."""
    if shared_bytes > device.shared_memory_per_block_bytes:
        raise InputError(
            f"the kernel needs {shared_bytes} bytes of shared memory, {device.name} has "
            f"{device.shared_memory_per_block_bytes}",
            hint="the naive kernel keeps a score for each token there: use split or mma",
        )
    if shared_bytes > _SHARED_WITHOUT_ASKING:
        from cupy.cuda import driver

        driver.funcSetAttribute(function.ptr, _MOST_DYNAMIC_SHARED, shared_bytes)


def launch(function: Any, grid: tuple[int, int], arguments: ctypes.Structure, shared_bytes: int) -> None:
    """Queue a kernel on CuPy's current stream."""
    # CuPy passes a NumPy array of one element by value, whatever the element.
    packed = np.frombuffer(bytes(arguments), dtype=np.dtype((np.void, ctypes.sizeof(arguments)))).copy()
    function((*grid, 1), (THREADS, 1, 1), (packed,), shared_mem=shared_bytes)
