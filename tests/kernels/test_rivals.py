"""Other libraries beside the kernels: stand-ins record how they are called. The libraries themselves have not run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from emulated_cupy import TICK_S, Gpu, emulated_gpu

from kvplan.jobs.kernel_bench import KernelBenchOptions, KernelBenchResult, shapes_of
from kvplan.kernels.gpu_bench import bench_on_gpu
from kvplan.kernels.rivals import tensor
from kvplan.kernels.timing import REPEATS, WARMUPS

pytestmark = pytest.mark.usefixtures("compiler")

Call = tuple[tuple[Any, ...], dict[str, Any]]


class Tensor:
    """A tensor that knows its numbers as NumPy has them, and what they are taken for."""

    device = "cuda:0"

    def __init__(self, array: np.ndarray, dtype: str = "") -> None:
        self.array, self.dtype = np.asarray(array), dtype or str(array.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def view(self, dtype: str) -> Tensor:
        return Tensor(self.array, dtype)

    def reshape(self, *shape: int) -> Tensor:
        return Tensor(self.array.reshape(*shape), self.dtype)

    def unsqueeze(self, axis: int) -> Tensor:
        return Tensor(np.expand_dims(self.array, axis), self.dtype)

    def transpose(self, one: int, other: int) -> Tensor:
        return Tensor(self.array.swapaxes(one, other), self.dtype)

    def flatten(self, first: int, last: int) -> Tensor:
        shape = self.array.shape
        return Tensor(self.array.reshape(*shape[:first], -1, *shape[last + 1 :]), self.dtype)

    def contiguous(self) -> Tensor:
        return Tensor(np.ascontiguousarray(self.array), self.dtype)

    def long(self) -> Tensor:
        return Tensor(self.array.astype(np.int64))

    def __getitem__(self, key: Any) -> Tensor:
        return Tensor(self.array[key.array if isinstance(key, Tensor) else key], self.dtype)

    def __mul__(self, factor: int) -> Tensor:
        return Tensor(self.array * factor)


def from_dlpack(array: Any) -> Tensor:
    assert array.dtype.kind in "fi", "older versions of torch take no unsigned numbers"
    return Tensor(array)


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    with emulated_gpu(memory_bytes=1 << 27) as found:
        yield found


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, gpu: Gpu) -> dict[str, list[Call]]:
    """Torch and the three libraries, and how they were called."""
    seen: dict[str, list[Call]] = {}

    def recording(name: str) -> Any:
        seen[name] = []

        def call(*arguments: object, **named: object) -> None:
            gpu.seconds += TICK_S
            seen[name].append((arguments, named))

        return call

    def module(name: str, **content: Any) -> None:
        made = ModuleType(name)
        made.__spec__ = ModuleSpec(name, None)
        vars(made).update(content)
        monkeypatch.setitem(sys.modules, name, made)

    module(
        "torch",
        from_dlpack=from_dlpack,
        bfloat16="bfloat16",
        float8_e4m3fn="float8_e4m3fn",
        int32="int32",
        uint8="uint8",
        zeros=lambda size, dtype, device: Tensor(np.zeros(size // (1 << 20), dtype=dtype)),
        arange=lambda count, dtype, device: Tensor(np.arange(count)),
        full_like=lambda like, value: Tensor(np.full_like(like.array, value)),
        nn=SimpleNamespace(functional=SimpleNamespace(scaled_dot_product_attention=recording("torch"))),
    )

    class Wrapper:
        def __init__(self, workspace: Tensor, layout: str, **named: Any) -> None:
            seen.setdefault("made", []).append(((layout,), named))

        plan = staticmethod(recording("plan"))
        run = staticmethod(recording("flashinfer"))

    module("flashinfer", BatchDecodeWithPagedKVCacheWrapper=Wrapper)
    module("flash_attn", flash_attn_with_kvcache=recording("flash-attn"))
    module("vllm")
    module("vllm.vllm_flash_attn", flash_attn_varlen_func=recording("vllm"))
    return seen


def bench(**options: Any) -> KernelBenchResult:
    shape: dict[str, Any] = {"batch": (3,), "seq": (300,), "heads": (8,), "kv_heads": (2,), "head_dim": (64,)}
    chosen = KernelBenchOptions(**shape | {"block_size": (256,), "kernel": ("mma",)} | options)
    return bench_on_gpu(chosen, shapes_of(chosen), cases=())


def test_rivals_run_as_often_and_are_not_judged(calls: dict[str, list[Call]], gpu: Gpu) -> None:
    result = bench(against=("flashinfer", "torch", "flash-attn", "vllm"))
    assert result.skipped == ()
    assert [row.kernel for row in result.results] == ["mma", "flashinfer", "torch", "flash-attn", "vllm"]
    for row in result.results[1:]:
        assert (row.valid, row.max_abs_error, row.tolerance) == (None, None, None)
        assert row.time_s is not None
        assert len(calls[row.kernel]) == WARMUPS + REPEATS
        assert row.variant == f"{row.kernel} of unknown version"
    assert result.is_good


def test_flashinfer_gets_each_table_flat_with_its_last_block_counted(
    calls: dict[str, list[Call]], gpu: Gpu
) -> None:
    bench(against=("flashinfer",))
    assert calls["made"][0] == (("NHD",), {"use_tensor_cores": True})
    assert len(calls["plan"]) == len(calls["made"]) == 2
    (counts, table, last, *sizes), named = calls["plan"][0]
    assert counts.array.tolist() == [0, 2, 4, 6]
    assert table.shape == (6,)
    assert last.array.tolist() == [44, 44, 44]
    assert sizes == [8, 2, 64, 256]
    assert named == {"q_data_type": "bfloat16", "kv_data_type": "bfloat16"}
    ((query, (keys, values)), _) = calls["flashinfer"][0]
    assert (query.shape, keys.shape, values.shape) == ((3, 8, 64), (12, 256, 2, 64), (12, 256, 2, 64))


def test_torch_gets_the_tokens_side_by_side(calls: dict[str, list[Call]], gpu: Gpu) -> None:
    bench(against=("torch",), batch=(1,))
    (query, keys, values), named = calls["torch"][0]
    assert (query.shape, keys.shape, values.shape) == ((1, 8, 1, 64), (1, 2, 300, 64), (1, 2, 300, 64))
    assert keys.array.flags.c_contiguous
    assert named == {"enable_gqa": True}
    assert not np.array_equal(keys.array, calls["torch"][1][0][1].array), "tables take turns"


def test_flash_attention_gets_the_same_cache_and_table(calls: dict[str, list[Call]], gpu: Gpu) -> None:
    bench(against=("flash-attn", "vllm"))
    (query, keys, values), named = calls["flash-attn"][0]
    assert (query.shape, keys.shape, values.shape) == ((3, 1, 8, 64), (12, 256, 2, 64), (12, 256, 2, 64))
    assert named["cache_seqlens"].array.tolist() == [300, 300, 300]
    assert named["block_table"].shape == (3, 2)
    _, named = calls["vllm"][0]
    assert named["cu_seqlens_q"].array.tolist() == [0, 1, 2, 3]
    assert (named["max_seqlen_k"], named["softmax_scale"]) == (300, 0.125)
    assert named["block_table"].shape == (3, 2)


@pytest.mark.parametrize(
    ("options", "name", "reason"),
    [
        ({"block_size": (16,)}, "flash-attn", "flash-attn takes blocks of 256 tokens"),
        ({"kv_cache_dtype": ("fp8",)}, "torch", "not asked of torch: a cache in fp8"),
        ({"dtype": ("float32",), "kernel": ("naive",)}, "vllm", "vllm has no paged attention in float32"),
    ],
)
def test_what_a_rival_is_not_asked_for_is_left_out(
    calls: dict[str, list[Call]], gpu: Gpu, options: dict[str, Any], name: str, reason: str
) -> None:
    result = bench(against=(name,), batch=(1,), seq=(20,), **options)
    assert [(one.what.partition(",")[0], one.reason) for one in result.skipped] == [(name, reason)]
    assert len(result.results) == 1


def test_what_is_not_installed_is_left_out(monkeypatch: pytest.MonkeyPatch, gpu: Gpu) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    result = bench(against=("flashinfer",), batch=(1,), seq=(20,))
    assert [one.reason for one in result.skipped] == ["torch is not installed"]


def test_a_rival_that_fails_in_its_own_way_is_left_out(
    calls: dict[str, list[Call]], gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("head_dim 64 is not supported\nand a page more")

    monkeypatch.setattr(sys.modules["flash_attn"], "flash_attn_with_kvcache", refuse)
    result = bench(against=("flash-attn",), batch=(1,), seq=(20,))
    assert [one.reason for one in result.skipped] == ["RuntimeError: head_dim 64 is not supported"]


def test_bits_are_seen_as_the_numbers_that_they_are(calls: dict[str, list[Call]], gpu: Gpu) -> None:
    cupy = sys.modules["cupy"]
    assert tensor(cupy.zeros(4, dtype=np.uint16), "bfloat16").dtype == "bfloat16"
    assert tensor(cupy.zeros(4, dtype=np.uint8), "fp8_e4m3").dtype == "float8_e4m3fn"
    assert tensor(cupy.zeros(4, dtype=np.int32)).dtype == "int32"
