"""Variants compiled by NVRTC, which needs neither a driver nor a GPU, one at a time and kept on disk.

NVRTC is reached through CuPy (``cupy.cuda.nvrtc``); its own helpers ask for a device even where the architecture is
given. CuPy takes a second to import, so it is imported when something is compiled that is not kept already.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from kvplan.errors import InputError, KvplanError
from kvplan.kernels.variants import Variant


class CudaMissing(KvplanError):
    """What a GPU needs is missing. ``lack`` says what: cupy, nvrtc, driver or device."""

    exit_code = 3

    def __init__(self, lack: str, what: str, *, where: str | None = None, hint: str | None = None) -> None:
        super().__init__(what, where=where, hint=hint)
        self.lack = lack


class CompilationFailed(KvplanError):
    """NVRTC refused a variant for an architecture; the message has its first lines."""


@dataclass(frozen=True)
class Compiled:
    """A variant for an architecture (compute capability x 10), with what ptxas says it takes.

    ``registers`` for each thread; ``spill_bytes`` are stores and loads of registers that did not fit, together, and
    ``stack_bytes`` the frame, for each thread; ``static_shared_bytes`` for each block of threads.
    """

    variant: Variant
    architecture: int
    compiler: str
    registers: int
    spill_bytes: int
    stack_bytes: int
    static_shared_bytes: int
    cubin: bytes


def load_nvrtc() -> ModuleType:
    """``cupy.cuda.nvrtc``, found to work. Raises ``CudaMissing``."""
    try:
        from cupy.cuda import nvrtc, runtime
    except ImportError as error:
        raise CudaMissing(
            "cupy",
            "CuPy is not installed"
            if (error.name or "").partition(".")[0] == "cupy"
            else f"CuPy does not load: {error}",
            hint="pip install 'kvplan[cuda13]' (or cuda12, for drivers older than 580)",
        ) from error
    try:
        nvrtc.getVersion()
    except RuntimeError as error:  # cuda.pathfinder's DynamicLibNotFoundError
        raise CudaMissing(
            "nvrtc",
            "CuPy finds no NVRTC, the compiler of CUDA sources",
            hint=f"pip install 'kvplan[cuda{runtime.runtimeGetVersion() // 1000}]'",
        ) from error
    module: ModuleType = nvrtc
    return module


@cache
def compiler_version() -> tuple[int, int]:
    """Of NVRTC: major, minor. Raises ``CudaMissing``."""
    major, minor = load_nvrtc().getVersion()
    return int(major), int(minor)


def architectures() -> tuple[int, ...]:
    """The architectures that the kernels are for and that this NVRTC knows; CUDA 13 dropped sm_70."""
    known = {int(one) for one in load_nvrtc().getSupportedArchs()}
    return tuple(one for one in (70, 75, 80, 86, 89, 90, 100, 120) if one in known)


def cache_folder() -> Path:
    """Where compiled kernels are kept: ``kvplan/kernels`` in the user's cache folder."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "kvplan" / "kernels"


def compile_variant(variant: Variant, architecture: int) -> Compiled:
    """The variant for an architecture, from the cache or compiled now.

    Raises ``CudaMissing``, ``CompilationFailed``, and ``InputError`` where the kernel is not made for the architecture.
    """
    if not variant.runs_on(architecture):
        raise InputError(f"{variant.name} is not made for sm_{architecture}", hint="use the split kernel")
    options = ("--std=c++17", f"--gpu-architecture=sm_{architecture}", "--ptxas-options=-v")
    version = ".".join(map(str, compiler_version()))
    key = hashlib.sha256("\0".join([variant.source, version, *options]).encode()).hexdigest()[:40]
    path = cache_folder() / f"{variant.name}-sm_{architecture}-{key}.cubin"
    if path.exists():
        head, _, cubin = path.read_bytes().partition(b"\n")
        figures = json.loads(head)
    else:
        cubin, log = _compiled(variant, options)
        figures = _figures(log)
        _keep(path, json.dumps(figures).encode() + b"\n" + cubin)
    return Compiled(variant, architecture, f"NVRTC {version}", cubin=cubin, **figures)


def _compiled(variant: Variant, options: tuple[str, ...]) -> tuple[bytes, str]:
    nvrtc: Any = load_nvrtc()
    program = nvrtc.createProgram(variant.source, "paged_attention.cu", [], [])
    try:
        nvrtc.compileProgram(program, list(options))
        # CuPy cuts off the last byte, a zero, as if the cubin were a text.
        return bytes(nvrtc.getCUBIN(program)) + b"\0", str(nvrtc.getProgramLog(program))
    except nvrtc.NVRTCError as error:
        said = [line for line in nvrtc.getProgramLog(program).splitlines() if "error" in line]
        raise CompilationFailed(
            f"{variant.name} does not compile: {' | '.join(said[:3]) or error}", where=" ".join(options)
        ) from error
    finally:
        nvrtc.destroyProgram(program)


def _figures(log: str) -> dict[str, int]:
    """What ``ptxas -v`` says: one entry function, so one line of each kind."""

    def number(pattern: str, *, absent: int | None = None) -> int:
        found = re.search(pattern, log)
        if found is None and absent is None:
            raise CompilationFailed(f"ptxas does not say what the kernel takes: {log[:300]!r}")
        return absent or 0 if found is None else int(found[1])

    return {
        "registers": number(r"Used (\d+) registers"),
        "spill_bytes": number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
        "stack_bytes": number(r"(\d+) bytes stack frame"),
        "static_shared_bytes": number(r"(\d+) bytes smem", absent=0),
    }


def _keep(path: Path, data: bytes) -> None:
    """Written beside its place and moved there, so that nobody ever reads half of it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(data)
        Path(file.name).replace(path)
    except OSError as error:
        raise InputError(
            f"cannot keep a compiled kernel: {error.strerror or error}",
            where=str(path.parent),
            hint="name a folder that can be written in XDG_CACHE_HOME",
        ) from error
