"""Attention kernels of other libraries, on the same arrays: called as each library documents, for their times alone.

Nothing here judges what they compute. None of this has run yet: it needs a GPU and the libraries.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module, metadata, util
from typing import Any, NamedTuple

from kvplan.errors import KvplanError
from kvplan.kernels.launch import DeviceArray
from kvplan.kernels.timed_batch import TimedBatch

#: Bytes that FlashInfer's documentation gives a decode wrapper to work in.
_WORKSPACE_BYTES = 128 << 20
#: Query heads for each KV head from which FlashInfer's documentation advises tensor cores.
_TENSOR_CORE_GROUP = 4
#: Multiple of tokens that a block of flash-attn's paged cache must have (flash_attn_with_kvcache).
_FLASH_ATTN_BLOCK = 256


class RivalMissing(KvplanError):
    """A library that is not installed, or not made for the shape."""


class Rival(NamedTuple):
    """A launch for each of the batch's tables, and the library's version."""

    version: str
    calls: list[Callable[[], object]]


def rival_calls(name: str, batch: TimedBatch) -> Rival:
    """Launches of a library on the batch: flashinfer, torch, flash-attn or vllm.

    Raises `RivalMissing`, and whatever the library does where it does not take the shape.
    """
    package, make = _RIVALS[name]
    for needed in dict.fromkeys(("torch", package)):
        if util.find_spec(needed) is None:
            raise RivalMissing(f"{needed} is not installed", hint=f"pip install {needed.replace('_', '-')}")
    try:
        import_module(package)
    except ImportError as error:
        raise RivalMissing(f"{package} does not load: {error}") from error
    return Rival(f"{name} {_version(package)}", make(_Tensors(batch)))


class _Tensors:
    """The batch as tensors of torch, over the same memory."""

    def __init__(self, batch: TimedBatch) -> None:
        shape = batch.shape
        self.shape, self.window = shape, batch.window
        self.query = tensor(batch.query, shape.dtype)
        self.output = tensor(batch.output, shape.dtype)
        self.keys = tensor(batch.keys, shape.kv_cache_dtype)
        self.values = tensor(batch.values, shape.kv_cache_dtype)
        self.context_lens = tensor(batch.context_lens)
        self.tables = [tensor(table) for table in batch.tables]

    def refuse(self, library: str, *, fp8: bool = True, window: bool = True) -> None:
        """Raise `RivalMissing` for what an adapter does not ask of the library: fp8 caches, windows, float32."""
        if fp8 and self.shape.kv_cache_dtype == "fp8_e4m3":
            raise RivalMissing(f"not asked of {library}: a cache in fp8")
        if window and self.window:
            raise RivalMissing(f"not asked of {library}: a window")
        if self.shape.dtype == "float32":
            raise RivalMissing(f"{library} has no paged attention in float32")


def tensor(array: DeviceArray, dtype: str | None = None) -> Any:
    """A CuPy array as a tensor over the same memory; bits become the numbers of ``dtype``.

    Bits travel as signed integers, which every version of torch takes by DLPack.
    """
    torch = import_module("torch")
    if array.dtype.kind == "u":
        array = array.view(f"int{8 * array.dtype.itemsize}")
    found = torch.from_dlpack(array)
    views = {"bfloat16": "bfloat16", "fp8_e4m3": "float8_e4m3fn"}
    return found.view(getattr(torch, views[dtype])) if dtype in views else found


def _flashinfer(tensors: _Tensors) -> list[Callable[[], object]]:
    """`BatchDecodeWithPagedKVCacheWrapper` (docs.flashinfer.ai), planned beforehand for each table."""
    tensors.refuse("flashinfer", fp8=False)
    torch, flashinfer, shape = import_module("torch"), import_module("flashinfer"), tensors.shape
    workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=tensors.query.device)
    counts = torch.arange(shape.batch + 1, dtype=torch.int32, device=tensors.query.device) * shape.blocks
    last = torch.full_like(tensors.context_lens, (shape.seq - 1) % shape.block_size + 1)
    calls = []
    for table in tensors.tables:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_tensor_cores=shape.group >= _TENSOR_CORE_GROUP
        )
        wrapper.plan(
            counts,
            table.reshape(-1),
            last,
            shape.heads,
            shape.kv_heads,
            shape.head_dim,
            shape.block_size,
            q_data_type=tensors.query.dtype,
            kv_data_type=tensors.keys.dtype,
        )
        calls.append(_later(wrapper.run, tensors.query, (tensors.keys, tensors.values)))
    return calls


def _torch(tensors: _Tensors) -> list[Callable[[], object]]:
    """`scaled_dot_product_attention` (pytorch.org): keys and values must be contiguous, so they are copied before."""
    tensors.refuse("torch")
    torch, shape = import_module("torch"), tensors.shape
    attention = torch.nn.functional.scaled_dot_product_attention
    query = tensors.query.unsqueeze(2)
    calls = []
    for table in tensors.tables:
        keys, values = (
            cache[table.long()].flatten(1, 2)[:, : shape.seq].transpose(1, 2).contiguous()
            for cache in (tensors.keys, tensors.values)
        )
        calls.append(_later(attention, query, keys, values, enable_gqa=shape.group > 1))
    return calls


def _flash_attn(tensors: _Tensors) -> list[Callable[[], object]]:
    """`flash_attn_with_kvcache` (flash-attn's README)."""
    tensors.refuse("flash-attn")
    if tensors.shape.block_size % _FLASH_ATTN_BLOCK:
        raise RivalMissing(
            f"flash-attn takes blocks of {_FLASH_ATTN_BLOCK} tokens", hint="give --block-size 256"
        )
    attention = import_module("flash_attn").flash_attn_with_kvcache
    query = tensors.query.unsqueeze(1)
    return [
        _later(
            attention,
            query,
            tensors.keys,
            tensors.values,
            cache_seqlens=tensors.context_lens,
            block_table=table,
            causal=True,
        )
        for table in tensors.tables
    ]


def _vllm(tensors: _Tensors) -> list[Callable[[], object]]:
    """`flash_attn_varlen_func` of vllm.vllm_flash_attn, as vLLM 0.33 calls it (v1/attention/backends/flash_attn.py)."""
    tensors.refuse("vllm")
    torch, shape = import_module("torch"), tensors.shape
    attention = import_module("vllm.vllm_flash_attn").flash_attn_varlen_func
    starts = torch.arange(shape.batch + 1, dtype=torch.int32, device=tensors.query.device)
    return [
        _later(
            attention,
            q=tensors.query,
            k=tensors.keys,
            v=tensors.values,
            out=tensors.output,
            cu_seqlens_q=starts,
            max_seqlen_q=1,
            seqused_k=tensors.context_lens,
            max_seqlen_k=shape.seq,
            softmax_scale=shape.head_dim**-0.5,
            causal=True,
            block_table=table,
        )
        for table in tensors.tables
    ]


def _later(function: Callable[..., object], *arguments: object, **named: object) -> Callable[[], object]:
    return lambda: function(*arguments, **named)


def _version(package: str) -> str:
    named = metadata.packages_distributions().get(package, [package])
    try:
        return metadata.version(named[0])
    except metadata.PackageNotFoundError:
        return "of unknown version"


_RIVALS: dict[str, tuple[str, Callable[[_Tensors], list[Callable[[], object]]]]] = {
    "flashinfer": ("flashinfer", _flashinfer),
    "torch": ("torch", _torch),
    "flash-attn": ("flash_attn", _flash_attn),
    "vllm": ("vllm", _vllm),
}
