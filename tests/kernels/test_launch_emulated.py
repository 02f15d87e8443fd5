"""What `kvplan.kernels.launch` makes of arrays, with the kernels in emulation in place of a GPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from emulated_cupy import Array, emulated_gpu

from kvplan.kernels import launch
from kvplan.kernels.cache_cases import copy_problem, reshape_problem
from kvplan.kernels.cases import CASES, Case, problem
from kvplan.kernels.launch import Attention, Cache
from kvplan.kernels.variants import Variant, attention_variant

MMA = attention_variant("mma", head_dim=64, group=8, dtype="bfloat16")
SPLIT = attention_variant("split", head_dim=80, group=4, dtype="float16", alibi=True, soft_cap=True)
NAIVE = attention_variant("naive", head_dim=64, group=1, dtype="float32")
FP8 = attention_variant("mma", head_dim=64, group=8, dtype="float16", kv_cache_dtype="fp8")
#: What differs in shapes, strides and plans; `test_emulated_kernels` has the rest. A cache of which only the far end is
#: there cannot be an array.
NAMES = (
    *("one token", "only empty requests", "blocks of 1", "blocks of 128", "groups of 24", "shared blocks"),
    *(
        "many splits",
        "window and splits",
        "scales for heads",
        "a scale for the tensor",
        "query in a packed row",
    ),
    *("no logarithm of sums", "keys and values in one cache", "keys and values in one cache, heads first"),
    "unknown block",
)
HERE = [case for case in CASES if case.name in NAMES]


@pytest.fixture
def device(compiler: None) -> Iterator[Any]:
    with emulated_gpu():
        yield sys.modules["cupy"]


def guarded(shape: Sequence[int], guard: int) -> tuple[np.ndarray, np.ndarray]:
    """Bytes with guards of so many bytes before and after them, and the whole; all are 0xa5."""
    whole = np.full(int(np.prod(shape)) + 2 * guard, 0xA5, dtype=np.uint8)
    return whole[guard:-guard].reshape(shape), whole


def attend(device: Any, variant: Variant, case: Case, chunk_tokens: int | None) -> bool:
    """Whether the case is solved right, from arrays alone."""
    posed = problem(variant, case)
    arrays = {name: device.asarray(array) for name, array in posed.arrays.items()}
    arguments = posed.launches[0].arguments
    keys = arrays["key_cache"]
    caches = (keys[:, 0], keys[:, 1]) if case.interleaved else (keys, arrays["value_cache"])
    Attention(
        variant,
        arrays["query"][:, : case.num_kv_heads * case.group],
        Cache(*caches, case.layout, arrays.get("key_scale"), arrays.get("value_scale")),
        arrays["block_table"],
        arrays["context_lens"],
        posed.arrays["context_lens"],
        arrays["output"],
        scale=arguments.scale,
        lse=arrays.get("lse"),
        window=case.window,
        soft_cap=arguments.soft_cap,
        alibi_slopes=arrays.get("alibi_slopes"),
        chunk_tokens=chunk_tokens,
    ).run()
    return posed.judge({name: array.get() for name, array in arrays.items()}).valid


@pytest.mark.parametrize("case", HERE, ids=lambda one: one.name)
def test_a_case_from_its_arrays(device: Any, case: Case) -> None:
    assert attend(device, MMA, case, case.chunk_tokens)


@pytest.mark.parametrize("variant", [SPLIT, NAIVE, FP8], ids=lambda one: one.name)
def test_other_kernels_from_arrays(device: Any, variant: Variant) -> None:
    names = {"scales for heads", "window and splits", "keys and values in one cache", "query in a packed row"}
    for case in HERE:
        if case.name in names:
            assert attend(device, variant, case, case.chunk_tokens)


def test_fixed_chunks_make_a_result_independent_of_its_batch(device: Any) -> None:
    """The same request alone and beside others, bit for bit."""
    rows = []
    for others in ((), (300, 70, 500)):
        posed = problem(MMA, Case("alone", (200,), group=4))
        arrays = {name: posed.arrays[name] for name in ("query", "key_cache", "value_cache", "block_table")}
        count = 1 + len(others)
        table = np.zeros((count, 64), dtype=np.int32)
        table[0, : arrays["block_table"].shape[1]] = np.maximum(arrays["block_table"][0], 0)
        query = np.repeat(arrays["query"], count, axis=0)
        contexts = np.array([200, *others], dtype=np.int32)
        cache = Cache(*(device.asarray(arrays[name]) for name in ("key_cache", "value_cache")))
        output = device.asarray(np.zeros_like(query))
        on_device = [device.asarray(array) for array in (query, table, contexts)]
        Attention(
            MMA, on_device[0], cache, *on_device[1:], contexts, output, scale=0.125, chunk_tokens=64
        ).run()
        rows.append(output.get()[0].tobytes())
    assert rows[0] == rows[1]


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_new_keys_and_values_go_into_their_slots(device: Any, layout: launch.Layout) -> None:
    variant = Variant("reshape_and_cache", 64, "float16", "fp8_e4m3")
    posed = reshape_problem(variant, layout=layout, scales="head")
    arrays = {name: device.asarray(array) for name, array in posed.arrays.items() if name != "value"}
    heads = posed.launch.arguments.num_kv_heads
    packed = arrays["key"]
    cache = Cache(
        *(arrays["key_cache"], arrays["value_cache"], layout), arrays["key_scale"], arrays["value_scale"]
    )
    launch.reshape_and_cache(variant, packed[:, :heads], packed[:, heads:], cache, arrays["slot_mapping"])
    assert posed.wrong_bytes({name: array.get() for name, array in arrays.items()}) == 0


def test_blocks_are_copied_in_all_layers(device: Any) -> None:
    posed = copy_problem(Variant("copy_blocks"), num_layers=2)
    arrays = {name: device.asarray(posed.arrays[name]) for name in posed.expected}
    layers = [
        Cache(arrays[f"keys of layer {layer}"], arrays[f"values of layer {layer}"]) for layer in range(2)
    ]
    launch.copy_blocks(layers, [tuple(pair) for pair in posed.arrays["block_pairs"].tolist()])
    assert posed.wrong_bytes({name: array.get() for name, array in arrays.items()}) == 0


def test_blocks_that_are_swapped_are_whole_and_others_untouched(device: Any) -> None:
    """Out to host memory and in again to other places, byte for byte, with guards around both."""
    rng = np.random.default_rng(5)
    shape = (12, 4, 3, 16)
    on_device, around_device = guarded(shape, 4096)
    host, around_host = guarded(shape, 4096)
    on_device[...] = rng.integers(0, 256, shape)
    before_device, before_host = around_device.copy(), around_host.copy()
    out = [(3, 0), (4, 1), (5, 2), (9, 7), (0, 11)]

    launch.swap_out(on_device.view(Array), host, out)
    moved = before_host[4096:-4096].reshape(12, -1)
    for source, target in out:
        moved[target] = before_device[4096:-4096].reshape(12, -1)[source]
    assert np.array_equal(around_host, before_host)
    assert np.array_equal(around_device, before_device)

    back = [(7, 0), (8, 1), (1, 11), (2, 7)]
    launch.swap_in(on_device.view(Array), host, back)
    blocks = before_device[4096:-4096].reshape(12, -1)
    for target, source in back:
        blocks[target] = moved[source]
    assert np.array_equal(around_device, before_device)
    assert np.array_equal(around_host, before_host)


def test_a_group_that_no_other_case_has_goes_through_too(device: Any) -> None:
    assert attend(device, MMA, replace(HERE[0], group=5, num_kv_heads=3), None)
