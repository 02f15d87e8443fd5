"""Machine code read back: what the main loop of a compiled kernel is made of.

``nvdisasm`` comes with the package ``nvidia-cuda-nvdisasm`` or with CUDA; without it nothing here works, and nothing
else needs it.
"""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from kvplan.errors import KvplanError
from kvplan.kernels.nvrtc import Compiled

_LABEL = re.compile(r"^(\.L_x_\d+):")
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,5}\*/\s+(.*?)\s*;")
_TARGET = re.compile(r"BRA.*`\((\.L_x_\d+)\)")
_LOAD = re.compile(r"\bLDG\.E((?:\.\w+)*)")
_REGISTER = re.compile(r"\bR(\d+)\b")
_PREDICATE = re.compile(r"^@!?U?P\w+\s+")
#: Registers that an operand of a tensor-core instruction spans: result, first, second, added matrix.
_MMA_SPANS = (4, 4, 2, 4)


class NoDisassembler(KvplanError):
    """``nvdisasm`` is missing or does not know the code."""

    exit_code = 3


@dataclass(frozen=True)
class MainLoop:
    """The loop with the most loads of keys and values.

    ``instructions`` counts those of the way usually taken; ``rare`` those of blocks beside it that are branched over
    and neither load nor multiply (masking the last tokens, scaling after a new maximum). ``loaded_bytes`` is what a
    lane reads of keys and values in a turn, ``bytes_under_way`` the most that it has asked for and not used
    at any point. ``local_accesses`` are loads and stores of spilled registers in the whole kernel.
    """

    instructions: int
    rare: int
    mma: int
    loads_128: int
    loaded_bytes: int
    bytes_under_way: int
    local_accesses: int


@cache
def find_nvdisasm() -> str:
    """The disassembler of the pip package, else the one on the path. Raises ``NoDisassembler``."""
    try:
        files = importlib.metadata.files("nvidia-cuda-nvdisasm") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    named = [str(file.locate()) for file in files if file.name in {"nvdisasm", "nvdisasm.exe"}]
    found = next((one for one in named if Path(one).exists()), None) or shutil.which("nvdisasm")
    if found is None:
        raise NoDisassembler("nvdisasm is not installed", hint="pip install nvidia-cuda-nvdisasm")
    return found


def main_loop(compiled: Compiled) -> MainLoop:
    """The figures of a compiled variant's main loop. Raises ``NoDisassembler``."""
    return _figures(*_parsed(_disassembled(compiled)))


def _disassembled(compiled: Compiled) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(compiled.cubin)
        answer = subprocess.run([find_nvdisasm(), "-c", path], capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        raise NoDisassembler(
            f"nvdisasm does not read {compiled.variant.name} for sm_{compiled.architecture}: "
            f"{answer.stderr.strip()[:200]}",
            hint="pip install --upgrade nvidia-cuda-nvdisasm",
        )
    return answer.stdout


def _parsed(text: str) -> tuple[list[str], dict[str, int]]:
    """Instructions in order, and which of them each label stands before."""
    code: list[str] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(code)
        elif instruction := _INSTRUCTION.match(line):
            code.append(instruction[1])
    return code, labels


def _figures(code: list[str], labels: dict[str, int]) -> MainLoop:
    first, last = _widest_loop(code, labels)
    loop = code[first : last + 1]
    rare = _rarely_run(code, labels, first, last)
    sizes = [_loaded_bytes(line) for line in loop]
    return MainLoop(
        instructions=len(loop) - rare,
        rare=rare,
        mma=sum("HMMA" in line for line in loop),
        loads_128=sizes.count(16),
        loaded_bytes=sum(sizes),
        bytes_under_way=_bytes_under_way(loop),
        local_accesses=sum(bool(re.search(r"\b(LDL|STL)\b", line)) for line in code),
    )


def _widest_loop(code: list[str], labels: dict[str, int]) -> tuple[int, int]:
    """Between a backward branch and its target; ways back from beyond the kernel's end are no loops."""
    best = (0, 0, 0)
    for at, line in enumerate(code):
        found = _TARGET.search(line)
        start = labels.get(found[1], len(code)) if found else len(code)
        if start > at or ".DIV" in line or any("EXIT" in one for one in code[start:at]):
            continue
        loads = sum(_loaded_bytes(one) > 0 for one in code[start : at + 1])
        best = max(best, (loads, start, at), key=lambda one: one[0])
    return best[1], best[2]


def _rarely_run(code: list[str], labels: dict[str, int], first: int, last: int) -> int:
    skipped: set[int] = set()
    for at in range(first, last):
        found = _TARGET.search(code[at])
        if not found or not _PREDICATE.match(code[at]) or ".DIV" in code[at]:
            continue
        end = labels[found[1]]
        block = code[at + 1 : end]
        if at < end <= last and not any("HMMA" in line or "LDG" in line for line in block):
            skipped.update(range(at + 1, end))
    return len(skipped)


def _bytes_under_way(loop: list[str]) -> int:
    """Walks the loop twice, so that what is asked for in one turn and used in the next counts."""
    waiting: dict[int, tuple[range, int]] = {}
    most = 0
    for line in [*loop, *loop]:
        touched = _touched(line)
        waiting = {r: one for r, one in waiting.items() if touched.isdisjoint(one[0])}
        if size := _loaded_bytes(line):
            register = int(_REGISTER.findall(line)[0])
            waiting[register] = (range(register, register + size // 4), size)
            most = max(most, sum(size for _, size in waiting.values()))
    return most


def _loaded_bytes(line: str) -> int:
    """Of keys or values, which are read by loads of 8 or 16 bytes, or of 4 that say that nobody writes there."""
    found = _LOAD.search(line)
    kinds = found[1].split(".") if found else []
    return 16 if "128" in kinds else 8 if "64" in kinds else 4 if "CONSTANT" in kinds else 0


def _touched(line: str) -> set[int]:
    registers = [int(one) for one in _REGISTER.findall(_PREDICATE.sub("", line))]
    if "HMMA" in line:
        return {r + i for r, span in zip(registers, _MMA_SPANS, strict=False) for i in range(span)}
    return set(registers)
