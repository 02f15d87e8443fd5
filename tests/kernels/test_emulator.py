"""The emulator on kernels of a few lines: what they compute, and what it says of faulty ones."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvplan.kernels.emulation import build
from kvplan.kernels.emulation.build import (
    BuildFailed,
    NoCompiler,
    Sanitizer,
    Source,
    executable,
    find_compiler,
)
from kvplan.kernels.emulation.emulate import Launch, Order, Outcome, run

pytestmark = pytest.mark.usefixtures("compiler")

HEAD = "struct P { const unsigned* in; unsigned* out; };\n"
#: Each kernel is one warp of 32 words in, 32 words out, unless its test says otherwise.
SMALL = (
    HEAD
    + r"""
#define KERNEL(name, expression) \
    extern "C" __global__ void name(P p) { \
        const unsigned i = threadIdx.x, v = ldg(p.in + i); \
        stg(p.out + i, (unsigned)(expression)); \
    }
KERNEL(shfl, __shfl_sync(~0u, v, 5))
KERNEL(shfl_wraps, __shfl_sync(~0u, v, 13, 8))
KERNEL(shfl_xor, __shfl_xor_sync(~0u, v, 9))
KERNEL(shfl_xor_16, __shfl_xor_sync(~0u, v, 24, 16))
KERNEL(shfl_up, __shfl_up_sync(~0u, v, 3, 8))
KERNEL(shfl_down, __shfl_down_sync(~0u, v, 3, 16))
KERNEL(half_warps, i < 16 ? __shfl_xor_sync(0xffffu, v, 1) : __shfl_xor_sync(0xffff0000u, v, 2))
KERNEL(ballot, __ballot_sync(~0u, v % 3 == 0))
KERNEL(any, __any_sync(~0u, v == 7) + 2 * __any_sync(~0u, v == 99))
KERNEL(all, 4 * __all_sync(~0u, v < 99) + 8 * __all_sync(~0u, v))
KERNEL(prmt, __byte_perm(0x83020100u, 0x07060504u, i == 0 ? 0x7531u : i == 1 ? 0x3b12u : 0x0u))
KERNEL(place, threadIdx.x + 100 * threadIdx.y + 1000 * blockDim.y)

struct M { const unsigned* a; const unsigned* b; float* d; };
template <bool BF16> void product(M m) {
    const int lane = threadIdx.x, g = lane / 4, q = lane % 4;  // a: 16 x 16, b: 16 x 8 by columns, two numbers a word
    const unsigned *row = m.a + g * 8 + q, *column = m.b + g * 8 + q;
    const unsigned a[4] = {ldg(row), ldg(row + 64), ldg(row + 4), ldg(row + 68)};
    const unsigned b[2] = {ldg(column), ldg(column + 4)};
    float d[4] = {1.0f, 1.0f, 1.0f, 1.0f};
    if (BF16) mma_m16n8k16_bf16(d, a, b); else mma_m16n8k16_f16(d, a, b);
    stg(m.d + g * 8 + 2 * q, d[0]);
    stg(m.d + g * 8 + 2 * q + 1, d[1]);
    stg(m.d + (g + 8) * 8 + 2 * q, d[2]);
    stg(m.d + (g + 8) * 8 + 2 * q + 1, d[3]);
}
extern "C" __global__ void mma_bf16(M m) { product<true>(m); }
extern "C" __global__ void mma_f16(M m) { product<false>(m); }
"""
)
SMALL_NAMES = (
    *(
        "shfl",
        "shfl_wraps",
        "shfl_xor",
        "shfl_xor_16",
        "shfl_up",
        "shfl_down",
        "half_warps",
        "ballot",
        "any",
        "all",
    ),
    *("prmt", "place", "mma_bf16", "mma_f16"),
)


class Words(ctypes.Structure):
    _fields_ = (("source", ctypes.c_void_p), ("out", ctypes.c_void_p))


class Matrices(ctypes.Structure):
    _fields_ = (("a", ctypes.c_void_p), ("b", ctypes.c_void_p), ("d", ctypes.c_void_p))


def small(name: str, block: tuple[int, int, int] = (32, 1, 1)) -> np.ndarray[Any, Any]:
    words = np.arange(32, dtype=np.uint32)
    launch = Launch(name, (1, 1, 1), block, 0, Words(), {"source": "in", "out": "out"})
    program = executable([Source("small.cu", SMALL, SMALL_NAMES)])
    outcome = run(program, [launch], {"in": words, "out": np.zeros_like(words)}, ["out"])
    assert outcome.error is None
    return outcome.outputs["out"]


LANES = np.arange(32)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("shfl", np.full(32, 5)),
        ("shfl_wraps", LANES // 8 * 8 + 5),
        ("shfl_xor", LANES ^ 9),
        ("shfl_xor_16", np.where(LANES < 16, LANES, LANES ^ 24)),
        ("shfl_up", np.where(LANES % 8 >= 3, LANES - 3, LANES)),
        ("shfl_down", np.where(LANES % 16 < 13, LANES + 3, LANES)),
        ("half_warps", np.where(LANES < 16, LANES ^ 1, LANES ^ 2)),
        ("ballot", np.full(32, 0x49249249)),
        ("any", np.full(32, 1)),
        ("all", np.full(32, 4)),
    ],
)
def test_collectives_of_a_warp(name: str, expected: np.ndarray[Any, Any]) -> None:
    assert small(name).tolist() == expected.tolist()


def test_a_permutation_of_bytes() -> None:
    # 0x7531 takes bytes 1, 3, 5, 7 from the low end; 0x3b12: bytes 2, 1, the sign of byte 3 (0x83: all set), byte 3.
    assert small("prmt")[:3].tolist() == [0x07058301, 0x83FF0102, 0]


def test_threads_of_a_block_in_two_dimensions() -> None:
    place = small("place", (8, 4, 1))
    assert place[:8].tolist() == [4300 + i for i in range(8)]


def bf16(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


@pytest.mark.parametrize("name", ["mma_bf16", "mma_f16"])
def test_a_product_of_matrices(name: str) -> None:
    """Small whole numbers, which both formats hold exactly, and so is their product."""
    rng = np.random.default_rng(1)
    a, b = rng.integers(-8, 9, (16, 16)), rng.integers(-8, 9, (16, 8))
    as_bits = bf16 if name == "mma_bf16" else lambda x: x.astype(np.float16).view(np.uint16)
    arrays = {
        "a": as_bits(a).view(np.uint32),
        "b": np.ascontiguousarray(as_bits(b).T).view(np.uint32),
        "d": np.zeros((16, 8), np.float32),
    }
    launch = Launch(name, (1, 1, 1), (32, 1, 1), 0, Matrices(), {"a": "a", "b": "b", "d": "d"})
    outcome = run(executable([Source("small.cu", SMALL, SMALL_NAMES)]), [launch], arrays, ["d"])
    assert np.array_equal(outcome.outputs["d"], a @ b + 1)


def test_numbers_of_half_precision_that_are_subnormal_or_not_finite() -> None:
    a = np.zeros((16, 16), np.float16)
    a[0, 0], a[1, 0], a[2, 0] = np.float16(2**-24), np.inf, np.nan
    b = np.zeros((8, 16), np.float16)
    b[:, 0] = 3
    arrays = {"a": a.view(np.uint32), "b": b.view(np.uint32), "d": np.zeros((16, 8), np.float32)}
    launch = Launch("mma_f16", (1, 1, 1), (32, 1, 1), 0, Matrices(), {"a": "a", "b": "b", "d": "d"})
    d = run(executable([Source("small.cu", SMALL, SMALL_NAMES)]), [launch], arrays, ["d"]).outputs["d"]
    assert d[0, 0] == np.float32(1 + 3 * 2**-24)
    assert d[1, 0] == np.inf
    assert np.isnan(d[2, 0])


SHARED = """
extern "C" __global__ void reversed(P p) {
    KV_SHARED(unsigned, s);
    const unsigned i = threadIdx.x, n = blockDim.x, first = blockIdx.x * n;
    s[i] = ldg(p.in + first + i);
    __syncthreads();
    const unsigned v = s[n - 1 - i] + __shfl_xor_sync(~0u, s[i], 1);
    __syncwarp();
    stg(p.out + first + i, v);
}
"""
BARRIER, SYNCWARP, SHUFFLE = "    __syncthreads();", "    __syncwarp();", "__shfl_xor_sync(~0u, s[i], 1)"
IN, OUT, WRITE = "p.in + first + i", "p.out + first + i", "s[i] = ldg"

#: What is changed in ``reversed``, all built together.
CHANGES: dict[str, list[tuple[str, str]]] = {
    "correct": [],
    "some_return": [(BARRIER, "if (i > 5) __syncthreads(); else return;")],
    "two_barriers": [(BARRIER, "if (i > 5) __syncthreads();\n else __syncthreads();")],
    "warps_wait": [(BARRIER, "sync_warps(1, 64);")],
    "each_warp_waits": [(BARRIER, "sync_warps(1 + i / 32, 32);"), ("s[n - 1 - i]", "s[i ^ 1]")],
    "a_warp_returns": [(BARRIER, "if (i > 31) sync_warps(1, 64); else return;")],
    "other_barriers": [(BARRIER, "sync_warps(1 + i / 32, 64);")],
    "part_of_a_warp": [(BARRIER, "sync_warps(1, 40);")],
    "too_few_wait": [(BARRIER, "sync_warps(1 + i / 32, 32);")],
    "lane_returns": [("    const unsigned v", "if (i == 3) return; const unsigned v")],
    "lane_skips": [(SHUFFLE, f"(i == 9 ? 0 : {SHUFFLE})"), (SYNCWARP, "__syncthreads();")],
    "not_in_its_mask": [(SHUFFLE, "__shfl_xor_sync(1u, s[i], 0)")],
    "two_places": [(SYNCWARP, "if (i % 2) __syncwarp();\n else __syncwarp();")],
    "asks_outside": [(SHUFFLE, "(i % 32 ? 0 : __shfl_xor_sync(1u, s[i], 1))")],
    "stores_beyond": [(OUT, "p.out + 1 + first + i")],
    "loads_before": [(IN, "p.in - 1 + first + i")],
    "stores_into_input": [(OUT, "(unsigned*)p.in + i")],
    "unaligned": [("v);", "ldg128(p.in + i).x);")],
    "too_much_shared": [(WRITE, "s[i + 1] = ldg")],
    "writes_raw": [(SYNCWARP, "p.out[256] = 1;")],
    "no_end": [(SYNCWARP, "for (volatile int k = 1; k;);")],
    "nobodys_memory": [(SYNCWARP, "*(volatile int*)8 = 1;")],
    "divides": [(SYNCWARP, "volatile int zero = 0; stg(p.out, n % zero);")],
    "unwritten": [(WRITE, "if (i != 7) s[i] = ldg")],
    "no_barrier": [(BARRIER, "")],
    "blocks_race": [(OUT, "p.out + blockIdx.x / 2 + i")],
    "warp_ordered": [(BARRIER, "__syncwarp();"), ("s[n - 1 - i]", "s[i ^ 1]")],
    "warp_unordered": [(BARRIER, "__shfl_sync(~0u, i, 0);"), ("s[n - 1 - i]", "s[i ^ 1]")],
    "undefined_shift": [("+ __shfl", "+ (1 << (n - 32)) + __shfl")],
    "lanes_apart": [(IN, "p.in + i * 4")],
    "lanes_agree": [(IN, "p.in + i / 8")],
}


def changed(name: str) -> str:
    text = SHARED
    for old, new in [("reversed", name), *CHANGES[name]]:
        assert text.count(old) == 1
        text = text.replace(old, new)
    return f"#line 1{text}"


def shared(
    name: str = "correct",
    sanitizer: Sanitizer = Sanitizer.NONE,
    *,
    blocks: int = 4,
    order: Order = Order.FORWARD,
    traffic: bool = False,
) -> Outcome:
    """``reversed`` with its change, over 4 x 64 words."""
    words = np.arange(256, dtype=np.uint32)
    launch = Launch(name, (blocks, 1, 1), (64, 1, 1), 256, Words(), {"source": "in", "out": "out"})
    program = executable(
        [Source("small.cu", HEAD + "".join(map(changed, CHANGES)), tuple(CHANGES))], sanitizer
    )
    arrays = {"in": words, "out": np.zeros_like(words)}
    return run(program, [launch], arrays, ["out"], order=order, seed=3, traffic=traffic, limit_s=1)


@pytest.mark.parametrize("order", list(Order))
def test_threads_wait_for_each_other_in_any_order(order: Order) -> None:
    words = np.arange(256).reshape(4, 64)
    given = shared(order=order).outputs["out"].reshape(4, 64)
    assert np.array_equal(given, words[:, ::-1] + (words ^ 1))


def test_no_sanitizer_reports_a_correct_kernel(sanitizer: Sanitizer) -> None:
    outcome = shared("correct", sanitizer)
    assert outcome.error is None
    assert outcome.reports == ()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("some_return", "divergent barrier: "),
        ("two_barriers", "mismatched barriers: "),
        ("a_warp_returns", "divergent barrier: "),
        ("other_barriers", "waits at barrier 1, small.cu:5, but"),
        ("part_of_a_warp", "whole warps of the block, not 40 threads"),
        ("lane_returns", "lane 3) has returned"),
        (
            "lane_skips",
            "missing lane: thread (0,0,0) (warp 0, lane 0) waits at __shfl_xor_sync, small.cu:6 for lane 9",
        ),
        ("not_in_its_mask", "is not in the mask 00000001"),
        ("two_places", "lanes of one mask wait at different places"),
        ("asks_outside", "takes the value of lane 1, which is not in the mask 00000001"),
        ("stores_beyond", "a store of 4 bytes at byte 1024 of out, which has 1024, small.cu:8"),
        ("loads_before", "a load of 4 bytes at byte -4 of in, which has 1024, small.cu:4"),
        ("stores_into_input", "a store into in, which is read only"),
        ("unaligned", "a load of 16 bytes at an address that is not a multiple of 16"),
        ("too_much_shared", "more shared memory was written than the 256 bytes"),
        ("writes_raw", "the memory beside out was written"),
        ("no_end", "the time limit is over"),
        ("nobodys_memory", "memory was touched that belongs to nobody"),
        ("divides", "divided by zero"),
    ],
)
def test_what_is_wrong_ends_the_launch_with_a_message(name: str, said: str) -> None:
    error = shared(name).error
    assert error is not None
    assert said in error
    place = error.split(": ")[0]
    assert ", thread (" in place or name in {"too_much_shared", "writes_raw"}


def test_shared_memory_that_was_not_written_holds_nan() -> None:
    out = shared("unwritten").outputs["out"]
    assert out[63 - 7] == (0xFFFFFFFF + (56 ^ 1)) % 2**32


def test_without_a_barrier_the_order_shows() -> None:
    forward, reverse = shared("no_barrier"), shared("no_barrier", order=Order.REVERSE)
    assert not np.array_equal(forward.outputs["out"], reverse.outputs["out"])


@pytest.mark.parametrize("name", ["no_barrier", "blocks_race", "warp_unordered"])
def test_a_race_is_reported_with_its_line(name: str) -> None:
    outcome = shared(name, Sanitizer.THREAD)
    assert {(one.tool, one.kind) for one in outcome.reports} == {("ThreadSanitizer", "data race")}
    assert {line for one in outcome.reports for line in one.lines} <= {4, 6, 8}


def test_a_barrier_of_some_warps_orders_those() -> None:
    words = np.arange(256)
    given = shared("warps_wait", order=Order.REVERSE).outputs["out"].reshape(4, 64)
    assert np.array_equal(given, words.reshape(4, 64)[:, ::-1] + (words.reshape(4, 64) ^ 1))
    assert shared("warps_wait", Sanitizer.THREAD).reports == ()
    assert shared("each_warp_waits", Sanitizer.THREAD).reports == ()
    assert shared("too_few_wait", Sanitizer.THREAD).reports != ()


def test_shuffles_order_no_memory_but_syncwarp_does() -> None:
    """CUDA's guide: only ``__syncwarp`` makes writes of a lane visible to the others of its warp."""
    assert shared("warp_ordered", Sanitizer.THREAD).reports == ()
    assert shared("warp_unordered", Sanitizer.THREAD).reports != ()


@pytest.mark.parametrize(
    ("name", "tool", "kind", "line"),
    [
        ("stores_beyond", "AddressSanitizer", "heap-buffer-overflow", 8),
        ("too_much_shared", "AddressSanitizer", "heap-buffer-overflow", 4),
        (
            *("undefined_shift", "UndefinedBehaviorSanitizer"),
            *("shift exponent 32 is too large for 32-bit type 'int'", 6),
        ),
    ],
)
def test_faults_of_memory_and_arithmetic_are_reported(name: str, tool: str, kind: str, line: int) -> None:
    outcome = shared(name, Sanitizer.ADDRESS)
    assert [(one.tool, one.kind, one.lines[0]) for one in outcome.reports] == [(tool, kind, line)]
    assert outcome.error == kind


def test_traffic_of_a_coalesced_kernel() -> None:
    traffic = shared(traffic=True).traffic
    assert traffic is not None
    assert traffic.sector_efficiency(["in"]) == 1.0
    assert traffic.distinct(["in"]) == traffic.requested_bytes(["in"]) == 1024
    assert [row.requests for row in traffic.rows] == [8, 8]
    assert traffic.distinct(["out"], store=True) == 1024


def test_traffic_of_a_kernel_whose_lanes_are_apart() -> None:
    """Lanes 16 bytes apart and 4 blocks over the same words: a request takes 32 x 4 bytes of 16 sectors of 32."""
    traffic = shared("lanes_apart", traffic=True).traffic
    assert traffic is not None
    assert traffic.sector_efficiency(["in"]) == 0.25
    assert traffic.distinct(["in"]) == 1024
    assert traffic.requested_bytes(["in"]) == 4 * 1024


def test_lanes_that_want_the_same_bytes_ask_for_them_once() -> None:
    traffic = shared("lanes_agree", traffic=True, blocks=1).traffic
    assert traffic is not None
    row = traffic.rows[0]
    assert (row.lane_bytes, row.useful_bytes, row.sectors) == (256, 32, 2)


def test_launches_of_a_program_share_their_arrays() -> None:
    words = np.arange(32, dtype=np.uint32)
    launches = [
        Launch("shfl_xor", (1, 1, 1), (32, 1, 1), 0, Words(), {"source": "a", "out": "b"}),
        Launch("shfl_up", (1, 1, 1), (32, 1, 1), 0, Words(), {"source": "b", "out": "c"}),
    ]
    zeros = np.zeros_like(words)
    program = executable([Source("small.cu", SMALL, SMALL_NAMES)])
    out = run(program, launches, {"a": words, "b": zeros, "c": zeros}, ["b", "c"]).outputs
    expected = np.where(LANES % 8 >= 3, (LANES - 3) ^ 9, LANES ^ 9)
    assert out["c"].tolist() == expected.tolist()


TABLE = """
struct P { unsigned long long* table; };
extern "C" __global__ void copy(P p) {
    const unsigned* from = (const unsigned*)ldg(p.table);
    unsigned* to = (unsigned*)ldg(p.table + 1);
    stg(to + threadIdx.x, ldg(from + threadIdx.x));
}
"""


def test_addresses_of_arrays_in_an_array() -> None:
    class Table(ctypes.Structure):
        _fields_ = (("table", ctypes.c_void_p),)

    words = np.arange(32, dtype=np.uint32)
    arrays = {"a": words, "b": np.zeros_like(words), "table": np.zeros(2, np.uint64)}
    launch = Launch("copy", (1, 1, 1), (32, 1, 1), 0, Table(), {"table": "table"})
    program = executable([Source("table.cu", TABLE, ("copy",))])
    outcome = run(program, [launch], arrays, ["b"], addresses={"table": ["a", "b"]})
    assert np.array_equal(outcome.outputs["b"], words)


def test_a_launch_that_does_not_fit_the_source() -> None:
    program = executable([Source("small.cu", SMALL, SMALL_NAMES)])
    arguments = Launch("shfl", (1, 1, 1), (32, 1, 1), 0, Matrices(), {})
    assert run(program, [arguments], {}, []).error == (
        "shfl, block (0,0,0): the kernel takes 16 bytes of arguments, not 24"
    )
    name = Launch("shuffle", (1, 1, 1), (32, 1, 1), 0, Words(), {})
    assert "there is no kernel of this name" in (run(program, [name], {}, []).error or "")
    size = Launch("shfl", (1, 1, 1), (1025, 1, 1), 0, Words(), {})
    assert "a block has 1 to 1024 threads, not 1025" in (run(program, [size], {}, []).error or "")


def test_a_build_is_kept_and_made_anew_when_anything_changes() -> None:
    source = Source("kept.cu", HEAD + "void kept(P) {}", ("kept",))
    first = executable([source])
    made = first.stat().st_mtime_ns
    assert executable([source]) == first
    assert first.stat().st_mtime_ns == made
    others = [
        Source("kept.cu", HEAD + "void kept(P) { }", ("kept",)),
        Source("other.cu", source.text, ("kept",)),
        Source("kept.cu", source.text, ("kept",), (("X", "1"),)),
    ]
    assert len({first, *(executable([one]) for one in others)}) == 4
    assert not list(build.cache_folder().glob("build-*"))


def test_a_source_that_does_not_compile() -> None:
    with pytest.raises(BuildFailed, match=r"refuses the kernel: .*nowhere"):
        executable([Source("bad.cu", HEAD + "void bad(P) { nowhere(); }", ("bad",))])
    assert not list(build.cache_folder().glob("build-*"))


def test_no_compiler_is_said_with_what_mends_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    build.find_compiler.cache_clear()
    try:
        with pytest.raises(NoCompiler) as caught:
            executable([Source("none.cu", "", ())])
        assert caught.value.exit_code == 3
        assert "apt install g++" in (caught.value.hint or "")
    finally:
        monkeypatch.undo()
        build.find_compiler.cache_clear()


def test_fibers_without_assembly(monkeypatch: pytest.MonkeyPatch) -> None:
    """What machines get for which there is no switch of stacks of our own."""
    command = " ".join(find_compiler().command)
    monkeypatch.setenv("CXX", f"{command} -DKV_UCONTEXT")
    find_compiler.cache_clear()
    try:
        program = executable([Source("small.cu", HEAD + changed("correct"), ("correct",))])
    finally:
        find_compiler.cache_clear()
    words = np.arange(256, dtype=np.uint32)
    launch = Launch("correct", (4, 1, 1), (64, 1, 1), 256, Words(), {"source": "in", "out": "out"})
    given = run(program, [launch], {"in": words, "out": np.zeros_like(words)}, ["out"]).outputs["out"]
    rows = words.reshape(4, 64)
    assert np.array_equal(given.reshape(4, 64), rows[:, ::-1] + (rows ^ 1))


def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(BuildFailed, match="cannot write a build"):
        executable([Source("kept.cu", HEAD + "void kept(P) {}", ("kept",))])


def test_a_build_that_cannot_be_started(tmp_path: Path) -> None:
    (tmp_path / "built").touch(mode=0o600)
    with pytest.raises(BuildFailed, match="cannot start what was built"):
        run(tmp_path / "built", [], {}, [])
