"""The seeded problems solved on a GPU: their arrays copied to it, their launches run, their results copied back."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvplan.errors import InputError
from kvplan.kernels.cache_cases import CacheProblem
from kvplan.kernels.cases import OUTPUTS, Problem
from kvplan.kernels.device import Device
from kvplan.kernels.emulation.emulate import Launch, Order, Outcome
from kvplan.kernels.launch import DeviceArray, allow_shared, launch, load_function
from kvplan.kernels.variants import Variant, merge_variant

Array = NDArray[Any]
_Functions = Mapping[str, Any]


def cuda_errors() -> tuple[type[Exception], ...]:
    """What CuPy raises where a launch or a copy failed; after some, such as a wild address, all that follow fail."""
    import cupy

    return cupy.cuda.runtime.CUDARuntimeError, cupy.cuda.driver.CUDADriverError


@dataclass(frozen=True)
class GpuSolver:
    """Runs each problem twice, from the same arrays: a difference in a single bit is an error.

    Its outputs start as NaN or as a pattern, and what a cache holds beyond its tokens is NaN (`cases`, `cache_cases`).
    """

    device: Device
    seed: int = 0

    def build(self, variants: Sequence[Variant]) -> _Functions:
        """The variants and their merges, compiled for this GPU. Raises ``CudaMissing`` and ``CompilationFailed``."""
        merges = [merge_variant(one) for one in variants if one.kernel in {"split", "mma"}]
        return {one.name: load_function(one, self.device.arch) for one in dict.fromkeys([*variants, *merges])}

    def attend(self, program: _Functions, posed: Problem, *, order: Order) -> Outcome:
        """Solve a problem of attention; a GPU's threads have no ``order``."""
        outputs = [name for name in OUTPUTS if name in posed.arrays]
        return self._twice(program, posed.launches, posed.arrays, outputs, {})

    def write(self, program: _Functions, posed: CacheProblem, *, order: Order) -> Outcome:
        """Solve a problem of writing the cache."""
        return self._twice(program, [posed.launch], posed.arrays, list(posed.expected), posed.addresses)

    def _twice(
        self,
        functions: _Functions,
        launches: Sequence[Launch],
        arrays: Mapping[str, Array],
        outputs: Sequence[str],
        addresses: Mapping[str, Sequence[str]],
    ) -> Outcome:
        try:
            first, second = (self._run(functions, launches, arrays, outputs, addresses) for _ in range(2))
        except InputError as error:
            return Outcome(error=error.what)
        except cuda_errors() as error:
            return Outcome(error=str(error))
        differing = [name for name in outputs if first[name].tobytes() != second[name].tobytes()]
        if differing:
            return Outcome(error=f"two runs differ in {', '.join(differing)}")
        return Outcome(first)

    def _run(
        self,
        functions: _Functions,
        launches: Sequence[Launch],
        arrays: Mapping[str, Array],
        outputs: Sequence[str],
        addresses: Mapping[str, Sequence[str]],
    ) -> dict[str, Array]:
        import cupy

        there: dict[str, DeviceArray] = {
            name: cupy.asarray(array) for name, array in arrays.items() if name not in addresses
        }
        for table, targets in addresses.items():
            there[table] = cupy.asarray(np.array([there[name].data.ptr for name in targets], dtype=np.uint64))
        for one in launches:
            function = functions[one.kernel]
            allow_shared(function, one.shared_bytes, self.device)
            launch(function, one.grid[:2], _with_pointers(one, there), one.shared_bytes)
        return {name: there[name].get() for name in outputs}


def _with_pointers(one: Launch, there: Mapping[str, DeviceArray]) -> ctypes.Structure:
    arguments = type(one.arguments).from_buffer_copy(one.arguments)
    for pointer, name in one.pointers.items():
        address = there[name].data.ptr - one.before.get(pointer, 0)
        setattr(arguments, pointer, address % (1 << 64))
    return arguments
