"""CUDA sources built for the CPU: finds a C++ compiler, keeps what it made under a hash of all that went in."""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path

from kvplan.errors import KvplanError

_FOLDER = Path(__file__).resolve().parent
#: Gives the words of a command from the file to make and a scratch folder.
_Command = Callable[[str, Path], list[str]]
_COMPILERS = ("g++", "clang++", "c++")
#: No contraction to fused multiply-adds that the source does not ask for: results are the same on every machine.
_FLAGS = ("-std=c++17", "-O2", "-ffp-contract=off", "-w")


class NoCompiler(KvplanError):
    """There is no C++ compiler, or it cannot build what is asked."""

    exit_code = 3


class BuildFailed(KvplanError):
    """The compiler refused the source; the message has its first lines."""


class Sanitizer(Enum):
    """What watches the run beside the emulator's own checks."""

    NONE = "none"
    ADDRESS = "address"  # AddressSanitizer and UndefinedBehaviorSanitizer
    THREAD = "thread"  # ThreadSanitizer

    @property
    def flags(self) -> tuple[str, ...]:
        """What the compiler and the linker are given."""
        match self:
            case Sanitizer.NONE:
                return ()
            case Sanitizer.ADDRESS:
                return ("-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
            case Sanitizer.THREAD:
                return ("-g1", "-fsanitize=thread")


@dataclass(frozen=True)
class Source:
    """A CUDA source and what to build of it.

    ``name`` is what messages call it (``paged_attention.cu``), ``defines`` are macros, ``kernels`` the functions that
    can be launched. The source includes nothing.
    """

    name: str
    text: str
    kernels: tuple[str, ...]
    defines: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler: the words that start its command, and what it says it is."""

    command: tuple[str, ...]
    version: str


@cache
def find_compiler() -> Compiler:
    """The compiler named by ``CXX``, else the first of g++, clang++ and c++ on the path.

    Raises ``NoCompiler`` where there is none.
    """
    named = os.environ.get("CXX")
    for command in [shlex.split(named)] if named else [[one] for one in _COMPILERS]:
        if command and shutil.which(command[0]) is not None:
            answer = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False)
            if answer.returncode == 0:
                return Compiler(tuple(command), answer.stdout)
    raise NoCompiler(
        "no C++ compiler, which the emulation of kernels needs",
        where=f"CXX={named}" if named else "looked for g++, clang++ and c++ on the path",
        hint="install one (Debian: apt install g++), or name it in CXX",
    )


def cache_folder() -> Path:
    """Where builds are kept: ``kvplan/emulation`` in the user's cache folder."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "kvplan" / "emulation"


def executable(sources: Sequence[Source], sanitizer: Sanitizer = Sanitizer.NONE) -> Path:
    """A program that runs the kernels of ``sources``, built unless it is there already.

    Raises ``NoCompiler`` and ``BuildFailed``.
    """
    compiler = find_compiler()
    objects = [_runtime(compiler, sanitizer), *(_object(compiler, one, sanitizer) for one in sources)]
    names = "\n".join(path.name for path in objects)
    return _kept(
        _hash(names, *compiler.command, *sanitizer.flags),
        lambda path, _: [*compiler.command, *sanitizer.flags, *map(str, objects), "-o", path],
    )


def _runtime(compiler: Compiler, sanitizer: Sanitizer) -> Path:
    """The runtime as an object. No sanitizer instruments it: only kernels are watched."""
    text = (_FOLDER / "runtime.cpp").read_text(encoding="utf-8")
    flags = [*_FLAGS, f"-DKV_SANITIZER_{sanitizer.name}"]
    return _kept(
        _hash(text, _shim(), compiler.version, *compiler.command, *flags),
        lambda path, _: [*compiler.command, *flags, "-c", str(_FOLDER / "runtime.cpp"), "-o", path],
    )


def _object(compiler: Compiler, source: Source, sanitizer: Sanitizer) -> Path:
    flags = [*_FLAGS, *(f"-D{name}={value}" for name, value in source.defines), *sanitizer.flags]
    registered = "".join(f"KV_EMULATION_KERNEL({name})\n" for name in source.kernels)

    def command(path: str, scratch: Path) -> list[str]:
        (scratch / source.name).write_text(source.text, encoding="utf-8")
        unit = scratch / "unit.cpp"
        unit.write_text(f'#include "shim.hpp"\n#include "{source.name}"\n{registered}', encoding="utf-8")
        return [*compiler.command, *flags, f"-I{_FOLDER}", "-c", str(unit), "-o", path]

    return _kept(
        _hash(source.name, source.text, registered, _shim(), compiler.version, *compiler.command, *flags),
        command,
    )


def _shim() -> str:
    return (_FOLDER / "shim.hpp").read_text(encoding="utf-8")


def _hash(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:40]


def _kept(key: str, command: _Command) -> Path:
    """The file that the command makes, from the cache or made now and moved there whole."""
    folder = cache_folder()
    path = folder / key
    if path.exists():
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix="build-") as scratch:
            made = Path(scratch) / "made"
            words = command(str(made), Path(scratch))
            answer = subprocess.run(words, capture_output=True, text=True, check=False, cwd=scratch)
            if answer.returncode != 0:
                raise _refusal(answer.stderr, words)
            made.replace(path)
    except OSError as error:
        raise BuildFailed(
            f"cannot write a build: {error.strerror or error}",
            where=str(folder),
            hint="name a folder that can be written in XDG_CACHE_HOME",
        ) from error
    return path


def _refusal(text: str, words: Sequence[str]) -> KvplanError:
    if "-lasan" in text or "-ltsan" in text or "libclang_rt" in text:
        return NoCompiler(
            f"{words[0]} has no libraries for {' '.join(w for w in words if w.startswith('-fsanitize='))}",
            hint="install them with the compiler (Debian: libgcc-N-dev, libclang-rt-N-dev)",
        )
    lines = [line for line in text.splitlines() if "error" in line] or text.splitlines()
    return BuildFailed(
        f"{words[0]} refuses the kernel: {' | '.join(lines[:3])[:600]}",
        hint="try another compiler: CXX=clang++",
    )
