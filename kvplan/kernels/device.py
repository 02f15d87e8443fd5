"""The GPU that kernels run on, found rung by rung: each rung that is missing has its own reason and remedy."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from kvplan.kernels.nvrtc import CudaMissing, load_nvrtc

#: CUDA's version numbers: 12040 is 12.4 (cudaDriverGetVersion).
_PER_MAJOR, _PER_MINOR = 1000, 10


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU as its driver describes it.

    ``arch`` is the compute capability times ten. ``memory_clock_bandwidth_bytes_per_s`` is two transfers a clock over
    the whole bus; CUDA 13 no longer tells the clock.
    """

    name: str
    arch: int
    num_sms: int
    memory_bytes: int
    l2_cache_bytes: int
    shared_memory_per_block_bytes: int
    memory_clock_bandwidth_bytes_per_s: int | None
    driver_cuda: str
    cupy_cuda: str
    cupy: str

    def to_dict(self) -> dict[str, object]:
        """The ``device`` block of the JSON contract."""
        return asdict(self)


def find_device() -> Device:
    """The current GPU. Raises `CudaMissing` that names the first rung that is missing.

    In order: CuPy and NVRTC, a driver, a CuPy that this driver runs, a device.
    """
    load_nvrtc()
    import cupy

    runtime: Any = cupy.cuda.runtime
    driver, built_for = int(runtime.driverGetVersion()), int(runtime.runtimeGetVersion())
    if driver == 0:
        raise CudaMissing(
            "driver",
            "there is no NVIDIA driver",
            hint="install the driver of your GPU (nvidia-smi shows it); --emulate and --compile-only need none",
        )
    check_versions(driver, built_for)
    try:
        count = int(runtime.getDeviceCount())
    except runtime.CUDARuntimeError as error:
        _no_device(str(error))
    if count == 0:
        _no_device("the driver lists none")
    return _described(cupy, driver, built_for)


def check_versions(driver: int, built_for: int) -> None:
    """CuPy's CUDA must be of a major version that the driver runs; raises `CudaMissing`.

    A driver runs programs of newer minor versions of its own major version (CUDA compatibility guide).
    """
    if built_for // _PER_MAJOR > driver // _PER_MAJOR:
        raise CudaMissing(
            "cupy",
            f"this CuPy is for CUDA {_version(built_for)}, the driver runs up to CUDA {_version(driver)}",
            hint=f"pip uninstall cupy-cuda{built_for // _PER_MAJOR}x, then pip install "
            f"'kvplan[cuda{max(12, driver // _PER_MAJOR)}]', or update the driver",
        )


def _no_device(reason: str) -> NoReturn:
    raise CudaMissing(
        "device",
        f"there is a driver but no GPU: {reason}",
        hint="see what nvidia-smi lists, and what CUDA_VISIBLE_DEVICES hides; --emulate and --compile-only need none",
    )


def _described(cupy: Any, driver: int, built_for: int) -> Device:
    runtime = cupy.cuda.runtime
    properties = runtime.getDeviceProperties(runtime.getDevice())
    name = properties["name"]
    clock_khz, bus_bits = properties.get("memoryClockRate", 0), properties.get("memoryBusWidth", 0)
    return Device(
        name=name.decode() if isinstance(name, bytes) else str(name),
        arch=10 * properties["major"] + properties["minor"],
        num_sms=properties["multiProcessorCount"],
        memory_bytes=properties["totalGlobalMem"],
        l2_cache_bytes=properties["l2CacheSize"],
        shared_memory_per_block_bytes=properties.get("sharedMemPerBlockOptin") or properties["sharedMemPerBlock"],
        memory_clock_bandwidth_bytes_per_s=2 * clock_khz * 1000 * bus_bits // 8 or None,
        driver_cuda=_version(driver),
        cupy_cuda=_version(built_for),
        cupy=str(cupy.__version__),
    )


def _version(number: int) -> str:
    return f"{number // _PER_MAJOR}.{number % _PER_MAJOR // _PER_MINOR}"
