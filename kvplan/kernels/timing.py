"""Times on a GPU: launches between events, with a cold L2 cache; and the rate of a plain copy to compare with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvplan.kernels.device import Device

WARMUPS, REPEATS = 20, 100
#: What is read before each launch, in L2 caches: nothing that was there is left, and the GPU is busy with it for so
#: long (some 100 microseconds) that the launches are queued when it is done, so that no time of the CPU is measured.
_COLD_CACHES = 8
_COPY_BYTES = 4 << 30
#: Of the free memory, what a copy may take: it has two sides.
_COPY_SHARE = 4


class Timer:
    """Times what is queued on CuPy's current stream; keeps a buffer to read between repeats."""

    def __init__(self, device: Device) -> None:
        """Allocates eight times the L2 cache. Raises CuPy's ``OutOfMemoryError``."""
        import cupy

        self._other = cupy.zeros(_COLD_CACHES * device.l2_cache_bytes // 4, dtype=cupy.float32)

    def seconds(
        self, calls: Sequence[Callable[[], object]], *, warmups: int = WARMUPS, repeats: int = REPEATS
    ) -> list[float]:
        """Seconds of each repeat, sorted. Calls take turns, so that each finds other data than the one before."""
        from cupy.cuda import Event, get_elapsed_time

        events: list[tuple[Any, Any]] = []
        for number in range(warmups + repeats):
            start, end = Event(), Event()
            self._other.sum()
            start.record()
            calls[number % len(calls)]()
            end.record()
            events.append((start, end))
        events[-1][1].synchronize()
        return sorted(float(get_elapsed_time(start, end)) / 1000 for start, end in events[warmups:])

    def copy_bytes_per_s(self) -> float:
        """Of a copy within the GPU's memory, up to 4 GiB; bytes read and bytes written both count. The median of 20."""
        import cupy

        free, _ = cupy.cuda.runtime.memGetInfo()
        size = min(_COPY_BYTES, free // _COPY_SHARE) // 4
        source, target = (cupy.zeros(size, dtype=cupy.float32) for _ in range(2))

        def copy() -> None:
            target.data.copy_from_device_async(source.data, source.nbytes, cupy.cuda.get_current_stream())

        median = float(np.median(self.seconds([copy], warmups=3, repeats=20)))
        return 2 * int(source.nbytes) / median
