"""The GPU that kernels run on, found rung by rung: each rung that is missing has its own reason and remedy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

from kvplan.errors import GpuMissing

#: Of an NVIDIA driver, the newest CUDA that it runs is this number: 12040 is 12.4 (cudaDriverGetVersion).
_PER_MAJOR, _PER_MINOR = 1000, 10


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU as its driver describes it. ``arch`` is the compute capability, 90 for 9.0."""

    name: str
    arch: int
    num_sms: int
    memory_bytes: int
    l2_cache_bytes: int
    shared_memory_per_block_bytes: int
    bandwidth_bytes_per_s: int | None
    driver_version: str
    runtime_version: str
    cupy_version: str

    def to_dict(self) -> dict[str, object]:
        """The ``device`` block of the JSON contract."""
        return {name: getattr(self, name) for name in self.__slots__}


def load_cupy() -> Any:
    """CuPy; raises `GpuMissing` where it is not installed or does not load."""
    try:
        import cupy
    except ModuleNotFoundError as error:
        if error.name != "cupy":
            _broken_cupy(error)
        raise GpuMissing(
            "CuPy is not installed",
            where="kernels",
            hint='install it with: pip install "kvplan[cuda13]" (driver 580 or newer) or "kvplan[cuda12]"',
        ) from None
    except ImportError as error:
        _broken_cupy(error)
    return cupy


def _broken_cupy(error: ImportError) -> NoReturn:
    raise GpuMissing(
        f"CuPy is installed but does not load: {str(error).splitlines()[0] if str(error) else 'no reason given'}",
        where="kernels",
        hint='keep one CuPy only: pip uninstall cupy cupy-cuda12x cupy-cuda13x, then pip install "kvplan[cuda13]" or '
        '"kvplan[cuda12]"',
    ) from error


def find_device() -> Device:
    """The current GPU. Raises `GpuMissing` that names the first rung that is missing.

    In order: CuPy, a driver, a CuPy that this driver runs, NVRTC, a device.
    """
    cupy = load_cupy()
    runtime = cupy.cuda.runtime
    driver = runtime.driverGetVersion()
    if driver == 0:
        raise GpuMissing(
            "there is no NVIDIA driver",
            where="kernels",
            hint="install the driver of your GPU (nvidia-smi shows it); --emulate and --compile-only need none",
        )
    _check_versions(driver, runtime.runtimeGetVersion())
    check_nvrtc(cupy)
    try:
        count = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        _no_device(str(error))
    if count == 0:
        _no_device("the driver lists none")
    return _describe(cupy, driver)


def _check_versions(driver: int, built_for: int) -> None:
    """CuPy's CUDA must be of a major version that the driver runs: newer minors run on older drivers of it."""
    if built_for // _PER_MAJOR > driver // _PER_MAJOR:
        extra = f"cuda{max(12, driver // _PER_MAJOR)}"
        raise GpuMissing(
            f"this CuPy is for CUDA {_version(built_for)}, the driver runs up to CUDA {_version(driver)}",
            where="kernels",
            hint=f'pip uninstall cupy-cuda{built_for // _PER_MAJOR}x, then pip install "kvplan[{extra}]", or update the '
            "driver",
        )


def check_nvrtc(cupy: Any) -> None:
    """Raise `GpuMissing` where the compiler that comes with CUDA cannot be loaded."""
    try:
        cupy.cuda.nvrtc.getVersion()
    except (ImportError, RuntimeError, OSError) as error:  # which of them depends on CuPy's version
        package = "nvidia-cuda-nvrtc-cu12" if _cuda_major(cupy) < 13 else "nvidia-cuda-nvrtc"
        raise GpuMissing(
            f"NVRTC, the compiler of CUDA, is not there: {type(error).__name__}",
            where="kernels",
            hint=f"install it with: pip install {package}",
        ) from error


def _cuda_major(cupy: Any) -> int:
    return int(cupy.cuda.runtime.runtimeGetVersion()) // _PER_MAJOR


def _no_device(reason: str) -> NoReturn:
    raise GpuMissing(
        f"there is a driver but no GPU: {reason}",
        where="kernels",
        hint="see what nvidia-smi lists, and what CUDA_VISIBLE_DEVICES hides",
    )


def _describe(cupy: Any, driver: int) -> Device:
    properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())
    name = properties["name"]
    clock_khz, bus_bits = properties.get("memoryClockRate", 0), properties.get("memoryBusWidth", 0)
    return Device(
        name=name.decode() if isinstance(name, bytes) else str(name),
        arch=10 * properties["major"] + properties["minor"],
        num_sms=properties["multiProcessorCount"],
        memory_bytes=properties["totalGlobalMem"],
        l2_cache_bytes=properties["l2CacheSize"],
        shared_memory_per_block_bytes=properties.get("sharedMemPerBlockOptin", properties["sharedMemPerBlock"]),
        # Two transfers a clock; 0 where the driver no longer says.
        bandwidth_bytes_per_s=2 * clock_khz * 1000 * bus_bits // 8 or None,
        driver_version=_version(driver),
        runtime_version=_version(cupy.cuda.runtime.runtimeGetVersion()),
        cupy_version=str(cupy.__version__),
    )


def _version(number: int) -> str:
    return f"{number // _PER_MAJOR}.{number % _PER_MAJOR // _PER_MINOR}"
