"""A CuPy whose GPU is the emulator: as much of CuPy as kvplan uses, and no more lenient than CuPy is.

Device memory is memory of this process; kernels are built for the CPU and run on copies of what their pointers lead to.
What is queued is done at once. The clock is made up: each launch takes `TICK_S` and a copy its bytes at `BYTES_PER_S`;
so times are the same in every run and say nothing about a GPU.
"""

from __future__ import annotations

import ctypes
import hashlib
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvplan.kernels import device, launch
from kvplan.kernels.emulation.build import Source, executable
from kvplan.kernels.emulation.emulate import Launch, run
from kvplan.kernels.nvrtc import compiler_version
from kvplan.kernels.params import CopyBlocksParams, PagedAttentionParams, ReshapeAndCacheParams

TICK_S = 2.0**-20
BYTES_PER_S = 2.0**30
ALIGNMENT = 512  # of CuPy's allocations
_STRUCTS = {"reshape_and_cache": ReshapeAndCacheParams, "copy_blocks": CopyBlocksParams}
H200 = {
    "name": b"NVIDIA H200",
    "major": 9,
    "minor": 0,
    "multiProcessorCount": 4,
    "totalGlobalMem": 150_109_945_856,
    "l2CacheSize": 1 << 14,
    "sharedMemPerBlock": 49152,
    "sharedMemPerBlockOptin": 232_448,
    "memoryBusWidth": 6144,
}


#: What launches changed, by all that went into them.
_DONE: dict[tuple[Any, ...], dict[int, np.ndarray]] = {}


def _digest(arrays: Iterable[np.ndarray]) -> bytes:
    found = hashlib.blake2b()
    for array in arrays:
        found.update(array.nbytes.to_bytes(8, "little") + array.tobytes())
    return found.digest()


class CUDARuntimeError(RuntimeError):
    """As `cupy.cuda.runtime.CUDARuntimeError`."""


class CUDADriverError(RuntimeError):
    """As `cupy.cuda.driver.CUDADriverError`."""


class OutOfMemoryError(MemoryError):
    """As `cupy.cuda.memory.OutOfMemoryError`."""


class Array(np.ndarray):
    """An array in device memory: it is copied to be read, and its memory has an address."""

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.ctypes.data, copy_from_device_async=self._copy)

    def get(self) -> np.ndarray:
        return np.array(self)

    def _copy(self, source: Any, size: int, stream: Any) -> None:
        ctypes.memmove(self.ctypes.data, source.ptr, size)
        self.gpu.seconds += 2 * size / BYTES_PER_S

    def fill(self, value: Any) -> None:
        self[...] = value

    def __array_finalize__(self, source: Any) -> None:
        self.gpu = getattr(source, "gpu", None)


class Gpu:
    """Memory, kernels and the clock."""

    def __init__(self, memory_bytes: int, properties: dict[str, Any]) -> None:
        self.memory_bytes, self.properties = memory_bytes, properties
        self.seconds = 0.0
        self.launches: list[str] = []
        #: May change what a kernel leaves: called with its name and the bytes that each of its pointers leads to.
        self.spoil: Callable[[str, dict[str, np.ndarray]], None] | None = None
        self._blocks: dict[int, tuple[Any, int]] = {}
        self._sources: dict[str, str] = {}
        #: The struct of a kernel whose name begins so, after "kvplan_".
        self.structs = dict(_STRUCTS)

    # Memory

    @property
    def free_bytes(self) -> int:
        return self.memory_bytes - sum(size for _, size in self._blocks.values())

    def allocate(self, shape: Any, dtype: Any) -> Array:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        if size > self.free_bytes:
            raise OutOfMemoryError(f"Out of memory allocating {size:,} bytes")
        room = np.zeros(size + ALIGNMENT, dtype=np.uint8)
        start = -room.ctypes.data % ALIGNMENT
        block = room[start : start + size]
        self._blocks[block.ctypes.data] = (weakref.ref(room), size)
        weakref.finalize(room, self._blocks.pop, block.ctypes.data)
        made: Array = block.view(dtype).reshape(shape).view(Array)
        made.gpu = self
        return made

    def block_at(self, address: int) -> tuple[int, np.ndarray] | None:
        """Where the allocation starts that an address lies in, and its bytes."""
        start = max((one for one in self._blocks if one <= address), default=-1)
        room, size = self._blocks.get(start, (None, 0))
        owner = None if room is None else room()
        if owner is None or address >= start + max(size, 1):
            return None
        at = start - owner.ctypes.data
        return start, owner[at : at + size]

    # Kernels

    def load(self, source: str) -> None:
        """Take a source with one kernel at its end."""
        self._sources[source.rpartition('extern "C"')[2].partition("(const")[0].split()[-1]] = source

    def program(self, name: str) -> Path:
        """Built when it is first launched: each alone, so that all tests share what is built."""
        return executable([Source("paged_attention.cu", self._sources[name], (name,))])

    def launch(
        self, name: str, grid: tuple[int, ...], block: tuple[int, ...], data: bytes, shared: int
    ) -> None:
        self.seconds += TICK_S
        self.launches.append(name)
        kind = next((kind for kind in self.structs if name.startswith(f"kvplan_{kind}")), "")
        arguments = self.structs.get(kind, PagedAttentionParams).from_buffer_copy(data)
        arrays: dict[str, np.ndarray] = {}
        pointers, before = {}, {}
        for field, kind_of in arguments._fields_:
            address = getattr(arguments, field)
            if kind_of is not ctypes.c_void_p or not address:
                continue
            found = self.block_at(address) or self._far(arguments, field, address)
            if found is None:
                raise CUDARuntimeError("cudaErrorIllegalAddress: an illegal memory access was encountered")
            start, held = found
            arrays[str(start)] = held
            pointers[field], before[field] = str(start), start - address
        names = list(arrays)
        addresses = {}
        if isinstance(arguments, CopyBlocksParams):
            for field in ("key_caches", "value_caches"):
                targets = [self.block_at(int(one)) for one in arrays[pointers[field]].view(np.uint64)]
                arrays |= {str(start): held for start, held in targets}
                addresses[pointers[field]] = [str(start) for start, _ in targets]
            names = [one for one in arrays if one not in addresses]
        for field in pointers:
            setattr(arguments, field, None)
        # The same launch on the same bytes gives the same bytes, wherever they lie: timed repeats are not emulated.
        places = [names.index(one) if one in names else one in addresses for one in pointers.values()]
        key = name, grid, bytes(arguments), tuple(places), tuple(before.values())
        state = _digest(arrays[one] for one in names)
        if (*key, state) not in _DONE:
            one = Launch(name, grid, block, shared, arguments, pointers, before)
            outcome = run(self.program(name), [one], arrays, names, addresses=addresses)
            if outcome.error is not None:
                raise CUDARuntimeError(f"cudaErrorLaunchFailure: {outcome.error}")
            changed = {
                number: outcome.outputs[one]
                for number, one in enumerate(names)
                if not np.array_equal(outcome.outputs[one], arrays[one])
            }
            _DONE[(*key, state)] = changed
            _DONE[(*key, _digest(outcome.outputs[one] for one in names))] = {}
        for number, array in _DONE[(*key, state)].items():
            arrays[names[number]][...] = array
        if self.spoil is not None:
            self.spoil(name, {field: arrays[start] for field, start in pointers.items()})

    def _far(self, arguments: Any, field: str, address: int) -> tuple[int, np.ndarray] | None:
        """A cache whose pointer lies before its memory: the first block that the table names is in it."""
        if field not in {"key_cache", "value_cache"}:
            return None
        ids = self.block_at(arguments.block_table)[1].view(np.int32)
        elements = int(ids[ids >= 0].min()) * arguments.cache_rows_per_block * arguments.cache_stride_row
        found = (self.block_at((address + elements * size) % (1 << 64)) for size in (1, 2, 4))
        return next((one for one in found if one is not None), None)


class _Function:
    """As `cupy.cuda.function.Function`: it has an address, and no attributes to set."""

    __slots__ = ("_gpu", "_name", "ptr")

    def __init__(self, gpu: Gpu, name: str) -> None:
        self._gpu, self._name, self.ptr = gpu, name, id(name)

    def __call__(self, grid: Any, block: Any, args: Any, shared_mem: int = 0) -> None:
        (packed,) = args
        if not isinstance(packed, np.ndarray) or packed.size != 1:
            raise TypeError(f"Unsupported type {type(packed)}")
        self._gpu.launch(self._name, tuple(grid), tuple(block), packed.tobytes(), shared_mem)


class _Module:
    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu

    def load(self, cubin: bytes) -> None:
        self._gpu.load(cubin.rstrip(b"\0").decode())

    def get_function(self, name: str) -> _Function:
        return _Function(self._gpu, name)


class _Event:
    """Happens at once."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu, self.seconds = gpu, 0.0

    def record(self) -> None:
        self.seconds = self._gpu.seconds

    def synchronize(self) -> None:
        pass


def _nvrtc() -> ModuleType:
    """Keeps a source in place of its machine code."""
    module = ModuleType("cupy.cuda.nvrtc")
    log = "Used 32 registers, 0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"
    vars(module).update(
        NVRTCError=CUDADriverError,
        getVersion=lambda: (99, 0),
        getSupportedArchs=lambda: [75, 80, 90],
        createProgram=lambda source, name, headers, names: source,
        compileProgram=lambda program, options: None,
        getCUBIN=lambda program: program.encode(),
        getProgramLog=lambda program: log,
        destroyProgram=lambda program: None,
    )
    return module


def emulated_cupy(gpu: Gpu) -> dict[str, ModuleType]:
    """The modules, by name."""

    def asarray(values: Any, dtype: Any = None) -> Array:
        values = np.asarray(values, dtype=dtype)
        made = gpu.allocate(values.shape, values.dtype)
        made[...] = values
        return made

    def full(shape: Any, value: Any, dtype: Any = np.float32) -> Array:
        made = gpu.allocate(shape, dtype)
        made[...] = value
        return made

    cupy, cuda, nvrtc, driver = (
        ModuleType(f"cupy{name}") for name in ("", ".cuda", ".cuda.nvrtc", ".cuda.driver")
    )
    nvrtc = _nvrtc()
    vars(driver).update(
        CUDADriverError=CUDADriverError,
        CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8,
        funcSetAttribute=lambda function, attribute, value: None,
    )
    runtime = SimpleNamespace(
        CUDARuntimeError=CUDARuntimeError,
        driverGetVersion=lambda: 13000,
        runtimeGetVersion=lambda: 13000,
        getDeviceCount=lambda: 1,
        getDevice=lambda: 0,
        getDeviceProperties=lambda number: gpu.properties,
        memGetInfo=lambda: (gpu.free_bytes, gpu.memory_bytes),
        deviceSynchronize=lambda: None,
        memcpyDeviceToHost=2,
        memcpyHostToDevice=1,
        memcpyAsync=lambda target, source, size, kind, stream: ctypes.memmove(target, source, size),
    )
    vars(cuda).update(
        nvrtc=nvrtc,
        driver=driver,
        runtime=runtime,
        function=SimpleNamespace(Module=lambda: _Module(gpu)),
        memory=SimpleNamespace(OutOfMemoryError=OutOfMemoryError),
        is_available=lambda: True,
        get_current_stream=lambda: SimpleNamespace(ptr=0, synchronize=lambda: None),
        Event=lambda: _Event(gpu),
        get_elapsed_time=lambda start, end: 1000 * (end.seconds - start.seconds),
    )
    vars(cupy).update(
        __version__="99.0",
        cuda=cuda,
        asarray=asarray,
        full=full,
        empty=lambda shape, dtype=np.float32: full(shape, 0, dtype),
        zeros=lambda shape, dtype=np.float32: full(shape, 0, dtype),
        get_default_memory_pool=lambda: SimpleNamespace(free_bytes=lambda: 0, free_all_blocks=lambda: None),
        **{name: getattr(np, name) for name in ("float32", "int32", "int64", "uint8", "uint32", "uint64")},
    )
    return {module.__name__: module for module in (cupy, cuda, nvrtc, driver)}


@contextmanager
def emulated_gpu(memory_bytes: int = 1 << 26, **properties: Any) -> Iterator[Gpu]:
    """A GPU that `import cupy` finds inside of the block: named like an H200, with little memory."""
    gpu = Gpu(memory_bytes, H200 | properties)
    modules = emulated_cupy(gpu)
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    _forget()
    try:
        yield gpu
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
        _forget()


def hide_cupy(patch: pytest.MonkeyPatch) -> None:
    """Let CuPy not be installed, though it may be and may have been imported."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "cupy"]:
        patch.delitem(sys.modules, name)
    patch.setitem(sys.modules, "cupy", None)
    _forget()


def _forget() -> None:
    for found in (device.find_device, launch.load_function, compiler_version):
        found.cache_clear()
