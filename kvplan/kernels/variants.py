"""Variants of the kernels: for which shapes each is made, its instance of the source, what a launch of it takes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib import resources
from itertools import product

from kvplan.errors import InputError
from kvplan.kernels.number_formats import number_format
from kvplan.kernels.params import CopyBlocksParams, PagedAttentionParams, ReshapeAndCacheParams

THREADS = 128
HEAD_DIMS = (64, 80, 96, 128, 192, 256)
BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
DTYPES = ("float32", "float16", "bfloat16")
#: Compute capability x 10 of what the kernels are compiled for; 70 by NVRTC 12 only.
ARCHITECTURES = (70, 75, 80, 86, 89, 90, 100, 120)

_STORAGE = {"float32": "float", "float16": "Half", "bfloat16": "BFloat16", "fp8_e4m3": "E4m3"}
_ATTENTION = ("naive", "split", "mma")
_MMA_HEAD_DIMS = (64, 128, 192, 256)
_WARPS = THREADS // 32
_PAGED, _RESHAPE, _COPY = (
    one.__name__ for one in (PagedAttentionParams, ReshapeAndCacheParams, CopyBlocksParams)
)
#: 32-bit registers of a multiprocessor; a warp's are given out in units of 8 a thread.
_REGISTERS = 65536
_MOST_REGISTERS = 255


@dataclass(frozen=True)
class Variant:
    """One instance of one kernel.

    ``kernel`` is naive, split, mma, merge, reshape_and_cache or copy_blocks. ``dtype`` is the format of queries and
    output, ``kv_cache_dtype`` that of the cache: the same, or fp8_e4m3. ``head_tile`` is how many query heads a block
    of threads takes (split and mma).
    """

    kernel: str
    head_dim: int = 0
    dtype: str = ""
    kv_cache_dtype: str = ""
    head_tile: int = 1
    alibi: bool = False
    soft_cap: bool = False

    @property
    def name(self) -> str:
        """The entry's name; two variants never share one."""
        if self.kernel == "copy_blocks":
            return "kvplan_copy_blocks"
        parts = ["kvplan", self.kernel, f"d{self.head_dim}", self.dtype]
        if self.kernel != "merge" and self.kv_cache_dtype != self.dtype:
            parts.append(self.kv_cache_dtype)
        if self.kernel in {"split", "mma"}:
            parts.append(f"h{self.head_tile}")
        return "_".join(parts + ["alibi"] * self.alibi + ["soft_cap"] * self.soft_cap)

    @property
    def instance(self) -> str:
        """The ``extern "C"`` function that makes this variant of the source's template."""
        storage, stored = _STORAGE.get(self.dtype), _STORAGE.get(self.kv_cache_dtype)
        options = f"Options<{str(self.alibi).lower()}, {str(self.soft_cap).lower()}>"
        struct, body = {
            "naive": (_PAGED, f"naive_attention<{storage}, {stored}, {self.head_dim}, {options}>"),
            "split": (
                _PAGED,
                f"split_attention<{storage}, {stored}, {self.head_dim}, {self.head_tile}, {options}>",
            ),
            "mma": (
                _PAGED,
                f"mma_attention<{storage}, {stored}, {self.head_dim}, {self.head_tile}, {options}>",
            ),
            "merge": (_PAGED, f"merge_partials<{storage}, {self.head_dim}>"),
            "reshape_and_cache": (_RESHAPE, f"reshape_and_cache<{storage}, {stored}, {self.head_dim}>"),
            "copy_blocks": (_COPY, "copy_blocks"),
        }[self.kernel]
        bounds = f"__launch_bounds__(THREADS, {self.blocks_per_sm})"
        return f'extern "C" __global__ void {bounds} {self.name}(const {struct} p) {{ {body}(p); }}\n'

    @property
    def source(self) -> str:
        """The whole text to compile."""
        return f"{kernel_source()}\n{self.instance}"

    @property
    def digest(self) -> str:
        """A hash of the text, for caches."""
        return hashlib.sha256(self.source.encode()).hexdigest()

    def shared_bytes(self, longest_context: int = 0) -> int:
        """Dynamic shared memory of a block of threads; that of naive grows with the longest context."""
        if self.kernel == "naive":
            return 4 * (THREADS + longest_context)
        if self.kernel in {"split", "mma"}:
            return 4 * self._parts * self.head_tile * (self.head_dim + 2)
        return 0

    @property
    def _parts(self) -> int:
        """Parts of a block that share no tokens: its warps, or pairs that have the halves of long rows."""
        paired = self.kernel == "mma" and self.head_tile == 16 and self.head_dim > 128
        return _WARPS // 2 if paired else _WARPS

    @property
    def blocks_per_sm(self) -> int:
        """How many blocks of threads must fit on a multiprocessor together; registers are bounded so that they do."""
        if self.kernel == "mma":
            return 2
        if self.kernel == "split":
            wide = self.kv_cache_dtype == "fp8_e4m3"  # a lane holds 16 elements of each head
            return {1: 6 - 2 * wide, 2: 4 - wide, 4: 3 - wide, 8: 2}[self.head_tile]
        return 8 if self.kernel == "copy_blocks" else 4

    @property
    def register_budget(self) -> int:
        """The most registers a thread may have so that ``blocks_per_sm`` blocks fit."""
        return min(_REGISTERS // (THREADS * self.blocks_per_sm) // 8 * 8, _MOST_REGISTERS)

    def runs_on(self, architecture: int) -> bool:
        """Whether it can be compiled for a compute capability (x 10)."""
        return architecture >= (80 if self.kernel == "mma" else 70)


@cache
def kernel_source() -> str:
    """``paged_attention.cu``."""
    return resources.files("kvplan.kernels").joinpath("paged_attention.cu").read_text(encoding="utf-8")


def attention_variant(
    kernel: str,
    *,
    head_dim: int,
    group: int,
    dtype: str,
    kv_cache_dtype: str = "auto",
    alibi: bool = False,
    soft_cap: bool = False,
    architecture: int = 80,
) -> Variant:
    """The variant for a shape; ``group`` is query heads for each KV head.

    ``kernel`` is naive, split or mma, or auto: mma where it applies (fp16 and bf16, head sizes 64, 128, 192 and 256,
    sm_80 and newer), else split. Raises ``InputError`` for a shape that the kernel does not have.
    """
    stored = dtype if kv_cache_dtype == "auto" else "fp8_e4m3" if kv_cache_dtype == "fp8" else kv_cache_dtype
    _check_shape(head_dim, group, dtype, stored)
    if kernel not in {*_ATTENTION, "auto"}:
        raise InputError(f'unknown kernel "{kernel}"', hint=f"known: auto, {', '.join(_ATTENTION)}")
    lack = _mma_lacks(head_dim, dtype, architecture)
    if kernel == "auto":
        kernel = "split" if lack else "mma"
    if kernel == "mma" and lack:
        raise InputError(f"the mma kernel is not made for {lack}", hint="use split")
    if kernel == "naive":
        tile = 1
    elif kernel == "mma":
        tile = 8 if group <= 8 else 16
    else:
        tile = next(n for n in (1, 2, 4, 8) if n >= min(group, 4 if stored == "fp8_e4m3" else 8))
    return Variant(kernel, head_dim, dtype, stored, tile, alibi, soft_cap)


def _check_shape(head_dim: int, group: int, dtype: str, stored: str) -> None:
    if head_dim not in HEAD_DIMS:
        raise InputError(
            f"no kernel has head size {head_dim}", hint=f"there are {', '.join(map(str, HEAD_DIMS))}"
        )
    if group < 1:
        raise InputError(f"{group} query heads for a KV head are none")
    number_format(dtype)
    number_format(stored)
    if dtype not in DTYPES or stored not in {dtype, "fp8_e4m3"}:
        raise InputError(
            f"no kernel reads a {stored} cache with {dtype} queries",
            hint="a cache has the queries' dtype, or fp8_e4m3",
        )


def _mma_lacks(head_dim: int, dtype: str, architecture: int) -> str | None:
    if dtype == "float32":
        return "float32"
    if head_dim not in _MMA_HEAD_DIMS:
        return f"head size {head_dim}"
    if architecture < 80:
        return f"sm_{architecture}"
    return None


def merge_variant(variant: Variant) -> Variant:
    """What puts the partial results of a variant together."""
    return Variant("merge", variant.head_dim, variant.dtype)


def with_merges(variants: Iterable[Variant]) -> tuple[Variant, ...]:
    """The variants and the merges that split and mma need, each once."""
    given = tuple(variants)
    merges = (merge_variant(one) for one in given if one.kernel in {"split", "mma"})
    return tuple(dict.fromkeys((*given, *merges)))


def all_variants() -> tuple[Variant, ...]:
    """Every instance that the launch can ask for, options left out."""
    found: dict[Variant, None] = {}
    for head_dim, dtype, stored in product(HEAD_DIMS, DTYPES, ("auto", "fp8")):
        for kernel, group in (
            *(("split", n) for n in (1, 2, 4, 8)),
            ("mma", 8),
            ("mma", 16),
            ("naive", 1),
        ):
            if kernel != "mma" or _mma_lacks(head_dim, dtype, 80) is None:
                variant = attention_variant(
                    kernel, head_dim=head_dim, group=group, dtype=dtype, kv_cache_dtype=stored
                )
                found[variant] = None
                found[merge_variant(variant)] = None
                found[Variant("reshape_and_cache", head_dim, dtype, variant.kv_cache_dtype)] = None
    found[Variant("copy_blocks")] = None
    return tuple(found)


def default_variants() -> tuple[Variant, ...]:
    """Those that common models use: head sizes 64, 128 and 256 on tensor cores, and one of each other kind."""
    mma = [
        attention_variant("mma", head_dim=head_dim, group=group, dtype="bfloat16", kv_cache_dtype=stored)
        for head_dim, group, stored in product((64, 128, 256), (8, 16), ("auto", "fp8"))
    ]
    split = [
        attention_variant("split", head_dim=head_dim, group=group, dtype=dtype, kv_cache_dtype=stored)
        for head_dim, group, dtype, stored in (
            (128, 1, "float32", "auto"),
            (128, 8, "float32", "auto"),
            (128, 4, "float16", "auto"),
            (128, 1, "bfloat16", "auto"),
            (128, 8, "bfloat16", "auto"),
            (128, 4, "bfloat16", "fp8"),
            (80, 1, "bfloat16", "auto"),
            (96, 1, "bfloat16", "auto"),
            (192, 4, "bfloat16", "auto"),
        )
    ]
    return (
        *mma,
        attention_variant("mma", head_dim=128, group=8, dtype="float16"),
        *split,
        attention_variant("naive", head_dim=128, group=1, dtype="bfloat16"),
        Variant("merge", 128, "bfloat16"),
        Variant("reshape_and_cache", 128, "bfloat16", "bfloat16"),
        Variant("reshape_and_cache", 128, "bfloat16", "fp8_e4m3"),
        Variant("copy_blocks"),
    )
