"""Which variant a shape takes, and what every variant says of itself."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import pytest

from kvplan.errors import InputError
from kvplan.kernels.params import MERGE_ITEM_FIELDS, WORK_ITEM_FIELDS, PagedAttentionParams
from kvplan.kernels.variants import (
    HEAD_DIMS,
    THREADS,
    Variant,
    all_variants,
    attention_variant,
    default_variants,
    kernel_source,
    merge_variant,
)

OPTIONS = [{}, {"alibi": True}, {"soft_cap": True}, {"alibi": True, "soft_cap": True}]


def test_names_are_identifiers_and_no_two_are_equal() -> None:
    attention = [one for one in all_variants() if one.kernel in {"naive", "split", "mma"}]
    others = [one for one in all_variants() if one not in attention]
    names = [replace(one, **option).name for one in attention for option in OPTIONS] + [
        one.name for one in others
    ]
    assert len(set(names)) == len(names)
    assert all(name.isidentifier() and name.startswith("kvplan_") for name in names)


def test_the_defaults_are_among_all() -> None:
    assert set(default_variants()) < set(all_variants())
    assert {one.kernel for one in default_variants()} == {one.kernel for one in all_variants()}


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ({"head_dim": 128, "group": 1, "dtype": "bfloat16"}, ("mma", 8, "bfloat16")),
        ({"head_dim": 128, "group": 8, "dtype": "float16"}, ("mma", 8, "float16")),
        ({"head_dim": 256, "group": 9, "dtype": "bfloat16"}, ("mma", 16, "bfloat16")),
        ({"head_dim": 64, "group": 71, "dtype": "bfloat16"}, ("mma", 16, "bfloat16")),
        ({"head_dim": 128, "group": 4, "dtype": "bfloat16", "kv_cache_dtype": "fp8"}, ("mma", 8, "fp8_e4m3")),
        ({"head_dim": 128, "group": 3, "dtype": "float32"}, ("split", 4, "float32")),
        ({"head_dim": 80, "group": 1, "dtype": "float16"}, ("split", 1, "float16")),
        ({"head_dim": 96, "group": 12, "dtype": "bfloat16"}, ("split", 8, "bfloat16")),
        (
            {"head_dim": 80, "group": 12, "dtype": "bfloat16", "kv_cache_dtype": "fp8"},
            ("split", 4, "fp8_e4m3"),
        ),
        ({"head_dim": 128, "group": 8, "dtype": "bfloat16", "architecture": 75}, ("split", 8, "bfloat16")),
    ],
)
def test_auto_takes_tensor_cores_where_they_apply(shape: dict, expected: tuple) -> None:
    chosen = attention_variant("auto", **shape)
    assert (chosen.kernel, chosen.head_tile, chosen.kv_cache_dtype) == expected


@pytest.mark.parametrize(
    ("kernel", "shape", "said"),
    [
        ("mma", {"head_dim": 80, "group": 1, "dtype": "bfloat16"}, "not made for head size 80"),
        ("mma", {"head_dim": 128, "group": 1, "dtype": "float32"}, "not made for float32"),
        ("mma", {"head_dim": 128, "group": 1, "dtype": "float16", "architecture": 75}, "not made for sm_75"),
        ("auto", {"head_dim": 112, "group": 1, "dtype": "float16"}, "no kernel has head size 112"),
        ("auto", {"head_dim": 128, "group": 0, "dtype": "float16"}, "0 query heads"),
        ("auto", {"head_dim": 128, "group": 1, "dtype": "fp8_e4m3"}, "no kernel reads"),
        (
            "auto",
            {"head_dim": 128, "group": 1, "dtype": "float16", "kv_cache_dtype": "bfloat16"},
            "no kernel reads",
        ),
        ("auto", {"head_dim": 128, "group": 1, "dtype": "half"}, "unknown number format"),
        ("flash", {"head_dim": 128, "group": 1, "dtype": "float16"}, 'unknown kernel "flash"'),
    ],
)
def test_shapes_that_no_kernel_has_are_refused(kernel: str, shape: dict, said: str) -> None:
    with pytest.raises(InputError, match=said):
        attention_variant(kernel, **shape)


def test_every_shape_has_a_kernel() -> None:
    for head_dim in HEAD_DIMS:
        for group in range(1, 33):
            for stored in ("auto", "fp8"):
                variant = attention_variant(
                    "auto", head_dim=head_dim, group=group, dtype="bfloat16", kv_cache_dtype=stored
                )
                assert variant in all_variants()
                assert merge_variant(variant) in all_variants()


def test_an_instance_names_its_template() -> None:
    variant = Variant("mma", 128, "bfloat16", "fp8_e4m3", 16, alibi=True)
    assert "mma_attention<BFloat16, E4m3, 128, 16, Options<true, false>>" in variant.instance
    assert variant.source == f"{kernel_source()}\n{variant.instance}"
    assert variant.digest != replace(variant, alibi=False).digest


def test_shared_memory() -> None:
    assert Variant("naive", 64, "float32", "float32").shared_bytes(1000) == 4 * (THREADS + 1000)
    assert Variant("split", 128, "float16", "float16", 8).shared_bytes() == 4 * 4 * 8 * (128 + 2)
    assert Variant("mma", 128, "float16", "float16", 16).shared_bytes() == 4 * 4 * 16 * (128 + 2)
    assert Variant("mma", 256, "float16", "float16", 16).shared_bytes() == 4 * 2 * 16 * (256 + 2)
    assert max(one.shared_bytes() for one in all_variants()) <= 48 * 1024


def test_registers_leave_room_for_the_blocks_that_the_plan_counts_on() -> None:
    for variant in all_variants():
        assert variant.register_budget * THREADS * variant.blocks_per_sm <= 65536
        assert variant.register_budget >= 64


def test_the_source_includes_nothing() -> None:
    assert "#include" not in kernel_source()


def test_arguments_are_in_the_order_of_the_source() -> None:
    source = kernel_source()
    for name, fields in (
        ("PagedAttentionParams", [one[0] for one in PagedAttentionParams._fields_]),
        ("WorkItem", list(WORK_ITEM_FIELDS)),
        ("MergeItem", list(MERGE_ITEM_FIELDS)),
    ):
        body = source[source.index(f"struct {name} {{") :].partition("};")[0]
        written = [
            line.partition(";")[0].split()[-1] for line in body.splitlines() if ";" in line.partition("//")[0]
        ]
        assert written == fields
    assert ctypes.sizeof(PagedAttentionParams) % 8 == 0
