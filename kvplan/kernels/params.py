"""The arguments of the kernels: the structs of ``paged_attention.cu``, field by field, for ctypes.

Pointers are addresses as integers (0 is null), of a GPU or, in emulation, of this process. Strides count elements.
What each field means is said in the source beside the structs.
"""

from __future__ import annotations

import ctypes

#: Columns of the plan's ``work_items``, ``WorkItem`` in the source: int32, one row for each block of threads.
WORK_ITEM_FIELDS = ("request", "first_head", "num_heads", "begin", "end", "partial")
#: Columns of the plan's ``merge_items``, ``MergeItem`` in the source: int32, one row for each split request.
MERGE_ITEM_FIELDS = ("request", "first_partial", "num_splits")


class PagedAttentionParams(ctypes.Structure):
    """Of ``naive``, ``split``, ``mma`` and ``merge``."""

    _fields_ = (
        ("query", ctypes.c_void_p),
        ("key_cache", ctypes.c_void_p),
        ("value_cache", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("lse", ctypes.c_void_p),
        ("partial_output", ctypes.c_void_p),
        ("partial_lse", ctypes.c_void_p),
        ("block_table", ctypes.c_void_p),
        ("context_lens", ctypes.c_void_p),
        ("work_items", ctypes.c_void_p),
        ("merge_items", ctypes.c_void_p),
        ("alibi_slopes", ctypes.c_void_p),
        ("key_scale", ctypes.c_void_p),
        ("value_scale", ctypes.c_void_p),
        ("query_stride_request", ctypes.c_longlong),
        ("query_stride_head", ctypes.c_longlong),
        ("cache_stride_row", ctypes.c_longlong),
        ("cache_stride_head", ctypes.c_longlong),
        ("cache_rows_per_block", ctypes.c_int),
        ("block_table_stride", ctypes.c_int),
        ("num_heads", ctypes.c_int),
        ("num_kv_heads", ctypes.c_int),
        ("num_blocks", ctypes.c_int),
        ("block_size_log2", ctypes.c_int),
        ("scale_stride", ctypes.c_int),
        ("window", ctypes.c_int),
        ("scale", ctypes.c_float),
        ("soft_cap", ctypes.c_float),
    )


class ReshapeAndCacheParams(ctypes.Structure):
    """Of ``reshape_and_cache``."""

    _fields_ = (
        ("key", ctypes.c_void_p),
        ("value", ctypes.c_void_p),
        ("key_cache", ctypes.c_void_p),
        ("value_cache", ctypes.c_void_p),
        ("slot_mapping", ctypes.c_void_p),
        ("key_scale", ctypes.c_void_p),
        ("value_scale", ctypes.c_void_p),
        ("key_stride_token", ctypes.c_longlong),
        ("value_stride_token", ctypes.c_longlong),
        ("cache_stride_row", ctypes.c_longlong),
        ("cache_stride_head", ctypes.c_longlong),
        ("num_slots", ctypes.c_longlong),
        ("cache_rows_per_block", ctypes.c_int),
        ("num_kv_heads", ctypes.c_int),
        ("block_size_log2", ctypes.c_int),
        ("scale_stride", ctypes.c_int),
    )


class CopyBlocksParams(ctypes.Structure):
    """Of ``copy_blocks``."""

    _fields_ = (
        ("key_caches", ctypes.c_void_p),
        ("value_caches", ctypes.c_void_p),
        ("block_pairs", ctypes.c_void_p),
        ("block_bytes", ctypes.c_longlong),
    )
