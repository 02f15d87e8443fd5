"""A figure that is printed as an engine prints it and read back lies between what its text allows."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplan.errors import InputError
from kvplan.python_repr import read_fields
from kvplan.startup_log import Figure, read_log

GIB, MIB = 1 << 30, 1 << 20
SIZES = st.integers(0, 1 << 42)


def only(line: str, name: str) -> Figure:
    log = read_log([line + "\n"], "log")
    (figure,) = log.all(name)
    return figure


def format_gib(size: int) -> str:
    """vLLM's utils/mem_utils.py since 0.12."""
    return f"{round(size / GIB, 2)}"


@pytest.mark.parametrize(
    ("name", "printed"),
    [
        ("kv_memory", lambda size: f"Available KV cache memory: {format_gib(size)} GiB"),
        ("kv_memory", lambda size: f"Available KV cache memory: {size / GIB:.2f} GiB"),
        ("weights", lambda size: f"Model loading took {size / GIB:.4f} GiB and 9.118230 seconds"),
        ("weights", lambda size: f"Loading model weights took {size / GIB:.4f} GB"),
        ("cuda_graphs", lambda size: f"Graph capturing finished in 7 secs, took {size / GIB:.2f} GiB"),
        ("kv_memory", lambda size: f"KV Cache is allocated. #tokens: 5, KV size: {size / GIB:.2f} GB"),
        ("kv_memory", lambda size: f"Allocated {size / GIB:0.2f} GiB for max tokens in paged KV cache (5)."),
        ("weights", lambda size: f"Loaded engine size: {size >> 20} MiB"),
        ("kv_buffer", lambda size: f"llama_kv_cache: {'CUDA0':>10} KV buffer size = {size / 1024.0 / 1024.0:8.2f} MiB"),
    ],
    ids=range(9),
)  # fmt: skip
@given(size=SIZES)
def test_a_printed_size_brackets_its_bytes(name: str, printed: Callable[[int], str], size: int) -> None:
    figure = only(printed(size), name)
    assert figure.low <= size <= figure.high
    assert figure.low <= figure.value <= figure.high
    assert figure.allows(size)


@given(k=SIZES, v=SIZES)
def test_sizes_that_llama_cpp_holds_in_short_floats(k: int, v: int) -> None:
    from ctypes import c_float

    def mib(size: int) -> float:
        return c_float(c_float(size).value / MIB).value

    line = (
        f"llama_kv_cache: size = {mib(k + v):7.2f} MiB ({8192:6d} cells, {36:3d} layers, {1:2d}/1 seqs), "
        f"K (f16): {mib(k):7.2f} MiB, V (f16): {mib(v):7.2f} MiB"
    )
    assert only(line, "kv_memory").allows(k + v)
    assert only(line, "kv_k").allows(k)
    assert only(line, "kv_v").allows(v)


@given(blocks=st.integers(1, 10**7), needed=st.integers(1, 10**5))
def test_a_printed_concurrency_brackets_its_ratio(blocks: int, needed: int) -> None:
    line = f"Maximum concurrency for {16 * needed:,} tokens per request: {blocks / needed:.2f}x"
    figure = only(line, "max_concurrency")
    assert figure.low - 1e-9 <= blocks / needed <= figure.high + 1e-9


@given(st.integers(0, 10**12))
def test_counts_are_exact(tokens: int) -> None:
    figure = only(f"GPU KV cache size: {tokens:,} tokens", "kv_cache_tokens")
    assert (figure.value, figure.low, figure.high) == (tokens, tokens, tokens)


NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | NUMBERS | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(min_size=1), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@given(st.dictionaries(st.from_regex(r"[a-z_]{1,12}", fullmatch=True), PLAIN, min_size=1, max_size=5))
def test_a_printed_dict_is_read_back(values: dict[str, object]) -> None:
    assert read_fields(repr(values)) == values
    constants = {"None", "True", "False", "null", "true", "false"}
    if not constants & values.keys():
        assert read_fields(", ".join(f"{name}={value!r}" for name, value in values.items())) == values


@given(st.lists(st.text(max_size=200), max_size=20), st.binary(max_size=200))
def test_any_text_is_read_or_refused(lines: list[str], noise: bytes) -> None:
    parts = [
        "non-default args: ",
        "server_args=",
        "print_info: n = ",
        "size = 1.00 MiB (",
        "Available KV cache memory: ",
    ]
    text = [f"{part}{line}{noise.decode('latin-1')}" for part, line in zip(parts * 4, lines, strict=False)]
    with suppress(InputError):
        read_log([*lines, *text], "log")
