"""The ladder to a GPU: each rung that is missing has its reason, and the command that mends it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import reduce
from types import SimpleNamespace
from typing import Any

import pytest
from emulated_cupy import H200, CUDARuntimeError, Gpu, emulated_cupy, emulated_gpu, hide_cupy

from kvplan.kernels.device import catalogue_gpu, find_device
from kvplan.kernels.nvrtc import CudaMissing


def missing() -> CudaMissing:
    find_device.cache_clear()
    with pytest.raises(CudaMissing) as caught:
        find_device()
    assert caught.value.exit_code == 3
    return caught.value


def test_without_cupy_that_is_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    hide_cupy(monkeypatch)
    error = missing()
    assert (error.lack, error.what) == ("cupy", "CuPy is not installed")
    assert "pip install 'kvplan[cuda13]'" in str(error.hint)


def raising(error: Exception) -> Callable[..., Any]:
    def fail(*_: object) -> object:
        raise error

    return fail


@pytest.mark.parametrize(
    ("where", "found", "lack", "what", "hint"),
    [
        (
            "nvrtc.getVersion",
            raising(RuntimeError("Failure finding libnvrtc.so")),
            "nvrtc",
            "CuPy finds no NVRTC",
            "pip install 'kvplan[cuda13]'",
        ),
        ("runtime.driverGetVersion", lambda: 0, "driver", "there is no NVIDIA driver", "install the driver"),
        (
            "runtime.driverGetVersion",
            lambda: 12040,
            "cupy",
            "this CuPy is for CUDA 13.0, the driver runs up to CUDA 12.4",
            "pip uninstall cupy-cuda13x, then pip install 'kvplan[cuda12]', or update the driver",
        ),
        (
            "runtime.getDeviceCount",
            raising(CUDARuntimeError("cudaErrorNoDevice: no CUDA-capable device is detected")),
            "device",
            "there is a driver but no GPU: cudaErrorNoDevice",
            "CUDA_VISIBLE_DEVICES",
        ),
        ("runtime.getDeviceCount", lambda: 0, "device", "the driver lists none", "nvidia-smi"),
    ],
)
def test_each_rung_that_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, where: str, found: Any, lack: str, what: str, hint: str
) -> None:
    with emulated_gpu():
        part, _, name = where.partition(".")
        monkeypatch.setattr(getattr(sys.modules["cupy.cuda"], part), name, found)
        error = missing()
    assert error.lack == lack
    assert what in error.what
    assert hint in str(error.hint)


def test_a_driver_runs_a_cupy_of_an_older_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    with emulated_gpu():
        monkeypatch.setattr(sys.modules["cupy.cuda"].runtime, "runtimeGetVersion", lambda: 12090)
        assert find_device().cupy_cuda == "12.9"


def test_what_is_installed_here_is_found_or_named() -> None:
    """With the real CuPy, whatever this machine has."""
    pytest.importorskip("cupy", reason="CuPy is not installed")
    find_device.cache_clear()
    found: object = None
    try:
        found = find_device().arch
    except CudaMissing as error:
        found = error.lack
    assert found in {"nvrtc", "driver", "cupy", "device"} or (isinstance(found, int) and found >= 50)


def test_the_emulated_cupy_has_no_name_that_cupy_lacks() -> None:
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    lacking = []
    for name, module in emulated_cupy(Gpu(0, H200)).items():
        real = reduce(getattr, name.split(".")[1:], cupy)
        for attribute, value in vars(module).items():
            if not hasattr(real, attribute):
                lacking.append(f"{name}.{attribute}")
            elif isinstance(value, SimpleNamespace):
                inner = getattr(real, attribute)
                lacking += [f"{name}.{attribute}.{one}" for one in vars(value) if not hasattr(inner, one)]
    assert lacking == []


def test_a_gpu_that_the_catalogue_does_not_have_is_told_by_its_clock() -> None:
    with emulated_gpu(name=b"NVIDIA Z1", memoryClockRate=1_000_000):
        device = find_device()
    assert device.gpu is None
    assert device.bandwidth_bytes_per_s == 2 * 10**9 * 6144 // 8
    assert device.bandwidth_source == "memory clock and bus width, by the driver"
    with emulated_gpu(name=b"NVIDIA Z1"):  # CUDA 13 does not tell the clock
        device = find_device()
    assert (device.bandwidth_bytes_per_s, device.bandwidth_source) == (None, None)


@pytest.mark.parametrize(
    ("name", "arch", "num_sms", "gigabytes", "found"),
    [
        ("NVIDIA H200", 90, 132, 150.1, "h200"),
        ("NVIDIA H100 80GB HBM3", 90, 132, 85.0, "h100-80gb"),
        ("NVIDIA H100 PCIe", 90, 114, 85.0, "h100-pcie-80gb"),
        ("NVIDIA H100 NVL", 90, 132, 100.0, "h100-nvl"),
        ("NVIDIA A100-SXM4-80GB", 80, 108, 85.0, "a100-80gb"),
        ("NVIDIA A100-PCIE-40GB", 80, 108, 42.4, "a100-pcie-40gb"),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", 80, 42, 42.0, None),
        ("NVIDIA L40S", 89, 142, 47.6, "l40s"),
        ("NVIDIA GeForce RTX 4090", 89, 128, 25.3, "rtx-4090"),
        ("NVIDIA RTX 6000 Ada Generation", 89, 142, 50.9, "rtx-6000-ada"),
        ("Tesla T4", 75, 40, 15.8, "t4"),
        ("NVIDIA H200", 90, 132, 80.0, None),
        ("NVIDIA H200", 80, 132, 150.1, None),
        ("Graphics Device", 90, 132, 150.1, None),
    ],
)
def test_a_driver_names_gpus_of_the_catalogue_in_its_own_way(
    name: str, arch: int, num_sms: int, gigabytes: float, found: str | None
) -> None:
    gpu = catalogue_gpu(name, arch=arch, num_sms=num_sms, memory_bytes=int(gigabytes * 10**9))
    assert (gpu and gpu.name) == found


def test_the_device_is_looked_up_once() -> None:
    with emulated_gpu() as gpu:
        assert isinstance(gpu, Gpu)
        first = find_device()
        sys.modules["cupy.cuda"].runtime = SimpleNamespace()
        assert find_device() is first
    assert first.to_dict()["name"] == H200["name"].decode()
