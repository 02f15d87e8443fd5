"""The GPU that kernels run on, found rung by rung: each rung that is missing has its own reason and remedy."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, NamedTuple, NoReturn

from kvplan.config import list_gpus
from kvplan.core.gpu import Gpu, capability
from kvplan.kernels.nvrtc import CudaMissing, load_nvrtc

#: CUDA's version numbers: 12040 is 12.4 (cudaDriverGetVersion).
_PER_MAJOR, _PER_MINOR = 1000, 10
#: Words of a catalogue's name that tell forms of one family apart.
_FORMS = {"pcie", "nvl"}


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU as its driver describes it.

    ``arch`` is the compute capability times ten. ``gpu`` is its name in the catalogue, whose bandwidth is the
    datasheet's; for others it is two transfers a clock over the whole bus, where the driver tells the clock (CUDA 13 no
    longer does). ``bandwidth_source`` says which.
    """

    name: str
    arch: int
    num_sms: int
    memory_bytes: int
    l2_cache_bytes: int
    shared_memory_per_block_bytes: int
    gpu: str | None
    bandwidth_bytes_per_s: int | None
    bandwidth_source: str | None
    driver_cuda: str
    cupy_cuda: str
    cupy: str

    def to_dict(self) -> dict[str, object]:
        """The ``device`` block of the JSON contract."""
        return asdict(self)


@cache
def find_device() -> Device:
    """The current GPU, looked up once. Raises `CudaMissing` that names the first rung that is missing.

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
    name = name.decode() if isinstance(name, bytes) else str(name)
    arch = 10 * properties["major"] + properties["minor"]
    sms, memory = properties["multiProcessorCount"], properties["totalGlobalMem"]
    known = catalogue_gpu(name, arch=arch, num_sms=sms, memory_bytes=memory)
    bandwidth = _bandwidth(known, properties.get("memoryClockRate", 0), properties.get("memoryBusWidth", 0))
    return Device(
        name=name,
        arch=arch,
        num_sms=sms,
        memory_bytes=memory,
        l2_cache_bytes=properties["l2CacheSize"],
        shared_memory_per_block_bytes=properties.get("sharedMemPerBlockOptin")
        or properties["sharedMemPerBlock"],
        gpu=None if known is None else known.name,
        bandwidth_bytes_per_s=bandwidth.bytes_per_s,
        bandwidth_source=bandwidth.source,
        driver_cuda=_version(driver),
        cupy_cuda=_version(built_for),
        cupy=str(cupy.__version__),
    )


class _Bandwidth(NamedTuple):
    bytes_per_s: int | None
    source: str | None


def _bandwidth(known: Gpu | None, clock_khz: int, bus_bits: int) -> _Bandwidth:
    if known is not None and known.bandwidth_bytes_per_s is not None:
        return _Bandwidth(known.bandwidth_bytes_per_s, f"datasheet of {known.name}")
    if clock_khz and bus_bits:
        return _Bandwidth(2 * clock_khz * 1000 * bus_bits // 8, "memory clock and bus width, by the driver")
    return _Bandwidth(None, None)


def catalogue_gpu(name: str, *, arch: int, num_sms: int, memory_bytes: int) -> Gpu | None:
    """The entry of the catalogue that a driver's description means; None where none or several may be meant.

    Its family must stand in the driver's name, compute capability and (to a twentieth) memory must agree; then the
    number of multiprocessors and the form (PCIe, NVL) decide. A part of a GPU (MIG) is none.
    """
    words = set(re.findall(r"[a-z0-9]+", name.lower()))
    if "mig" in words:
        return None
    near: list[tuple[tuple[bool, bool], Gpu]] = []
    for gpu in list_gpus():
        parts = [part for part in gpu.name.split("-") if not re.fullmatch(r"[0-9]+gb", part)]
        form = _FORMS & set(parts)
        if capability(gpu.compute_capability) != divmod(arch, 10) or gpu.memory_bytes is None:
            continue
        if not set(parts) - _FORMS <= words or 20 * abs(gpu.memory_bytes - memory_bytes) > gpu.memory_bytes:
            continue
        near.append(((gpu.num_sms != num_sms, form != _FORMS & words), gpu))
    if not near:
        return None
    best = min(rank for rank, _ in near)
    found = [gpu for rank, gpu in near if rank == best]
    return found[0] if len(found) == 1 else None


def _version(number: int) -> str:
    return f"{number // _PER_MAJOR}.{number % _PER_MAJOR // _PER_MINOR}"
