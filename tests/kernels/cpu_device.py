"""A GPU for `kvplan.kernels.launch` that is not there: its memory are NumPy arrays, its kernels run in emulation.

It stands in for the few parts of CuPy that `launch` uses, so that what `launch` makes of shapes and strides is what the
kernels get.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvplan.kernels import launch
from kvplan.kernels.emulation.emulate import Launch, run
from kvplan.kernels.emulation.validate import Emulator
from kvplan.kernels.variants import THREADS, Variant

Array = np.ndarray[Any, Any]


class DeviceArray:
    """A view of an array in the device's memory, with what CuPy's arrays say of themselves."""

    def __init__(self, view: Array) -> None:
        self.view = view
        self.data = SimpleNamespace(ptr=view.ctypes.data)
        self.shape, self.strides, self.ndim = view.shape, view.strides, view.ndim
        self.itemsize, self.size, self.flags = view.itemsize, view.size, view.flags

    def __len__(self) -> int:
        return len(self.view)

    def __getitem__(self, place: Any) -> DeviceArray:
        return DeviceArray(self.view[place])


class CpuDevice:
    """The device: arrays that were put on it, and launches of kernels over them."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._memory: dict[str, Array] = {}
        runtime = SimpleNamespace(memcpyAsync=_copy, memcpyDeviceToHost=2, memcpyHostToDevice=1)
        stream = SimpleNamespace(ptr=0)
        cuda = SimpleNamespace(runtime=runtime, get_current_stream=lambda: stream)
        cupy = SimpleNamespace(asarray=self.put, empty=self._empty, float32=np.float32, cuda=cuda)
        patch.setitem(sys.modules, "cupy", cupy)
        patch.setattr(launch, "current_device", lambda: launch.Device("emulated", 90, 4, 227 * 1024))
        patch.setattr(launch, "_function", lambda variant, _: variant)
        patch.setattr(launch, "_launch", self._launch)

    def put(self, array: Array) -> DeviceArray:
        """A copy of an array on the device."""
        kept = self._memory[f"array {len(self._memory)}"] = np.array(array, order="C")
        return DeviceArray(kept)

    def _empty(self, shape: Any, dtype: Any) -> DeviceArray:
        return self.put(np.full(shape, np.nan, dtype=dtype))

    def _find(self, address: int) -> tuple[str, int]:
        """The array that holds an address, and how far in it lies."""
        for name, array in self._memory.items():
            offset = address - array.ctypes.data
            if 0 <= offset < array.nbytes:
                return name, offset
        raise AssertionError(f"nothing lies at {address:#x}")

    def _launch(
        self, variant: Variant, grid: tuple[int, int], arguments: ctypes.Structure, shared_bytes: int
    ) -> None:
        fields = [name for name, kind in arguments._fields_ if kind is ctypes.c_void_p]
        found = {
            name: self._find(getattr(arguments, name))
            for name in fields
            if getattr(arguments, name) and self._is_something(getattr(arguments, name))
        }
        empty = type(arguments).from_buffer_copy(arguments)
        for name in fields:
            setattr(empty, name, None)
        tables = {
            found[name][0]: [self._find(int(one))[0] for one in self._memory[found[name][0]]]
            for name in ("key_caches", "value_caches")
            if name in found
        }
        launched = Launch(
            *(variant.name, (*grid, 1), (THREADS, 1, 1), shared_bytes, empty),
            pointers={name: array for name, (array, _) in found.items()},
            before={name: -offset for name, (_, offset) in found.items()},
        )
        program = Emulator().build([variant])
        outcome = run(program, [launched], self._memory, list(self._memory), addresses=tables)
        assert outcome.error is None
        for name, array in outcome.outputs.items():
            if name not in tables:
                self._memory[name][...] = array

    def _is_something(self, address: int) -> bool:
        """Whether an address is not that of an array without elements, which no kernel reads."""
        return not any(array.nbytes == 0 and array.ctypes.data == address for array in self._memory.values())


def _copy(target: int, source: int, size: int, kind: int, stream: int) -> None:
    assert kind in {1, 2}
    assert stream == 0
    ctypes.memmove(target, source, size)


def guarded(shape: Sequence[int], dtype: Any, guard: int) -> tuple[Array, Array]:
    """An array with guards of so many bytes before and after it, and the whole; bytes are 0xa5."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    whole = np.full(size + 2 * guard, 0xA5, dtype=np.uint8)
    return whole[guard : guard + size].view(dtype).reshape(shape), whole
