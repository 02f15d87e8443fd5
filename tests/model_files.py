"""Model files written by hand, byte by byte: headers as the formats describe them, data as holes."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

#: A metadata value with the number of its type; an array also has that of its items.
Typed = tuple[int, object] | tuple[int, int, Sequence[object]]

U8, I8, U16, I16, U32, I32, F32, BOOL, TEXT, ARRAY, U64, I64, F64 = range(13)
_CODES = dict(zip((U8, I8, U16, I16, U32, I32, F32, BOOL, U64, I64, F64), "BbHhIif?Qqd", strict=True))

#: Number, block elements and block bytes of the tensor types that tests use (ggml/include/ggml.h).
TYPES = {
    "F32": (0, 1, 4),
    "F16": (1, 1, 2),
    "Q4_0": (2, 32, 18),
    "Q8_0": (8, 32, 34),
    "Q4_K": (12, 256, 144),
    "Q6_K": (14, 256, 210),
    "BF16": (30, 1, 2),
    "MXFP4": (39, 32, 17),
}

#: Name, type and shape, innermost first.
Tensor = tuple[str, str, Sequence[int]]


def typed(value: object) -> Typed:
    """A value with the type that a converter would give it."""
    if isinstance(value, tuple):
        return value
    if isinstance(value, bool):
        return BOOL, value
    if isinstance(value, int):
        return U32, value
    if isinstance(value, float):
        return F32, value
    if isinstance(value, str):
        return TEXT, value
    assert isinstance(value, list)
    return ARRAY, typed(value[0])[0] if value else TEXT, value


def gguf_header(
    metadata: Mapping[str, object],
    tensors: Iterable[Tensor] = (),
    *,
    version: int = 3,
    order: str = "<",
    num_tensors: int | None = None,
    num_entries: int | None = None,
    starts: Mapping[str, int] | None = None,
    alignment: int = 32,
) -> tuple[bytes, int]:
    """A header, and how many bytes its tensors need behind it; numbers that it claims may be others."""

    def text(value: str) -> bytes:
        raw = value.encode()
        return struct.pack(f"{order}Q", len(raw)) + raw

    def one(kind: int, value: object) -> bytes:
        return text(str(value)) if kind == TEXT else struct.pack(f"{order}{_CODES[kind]}", value)

    tensors = list(tensors)
    parts = [b"GGUF", struct.pack(f"{order}I", version)]
    counts = (num_tensors, len(tensors)), (num_entries, len(metadata))
    parts += [struct.pack(f"{order}Q", true if claimed is None else claimed) for claimed, true in counts]
    for key, value in metadata.items():
        kind, *rest = typed(value)
        parts += [text(key), struct.pack(f"{order}I", kind)]
        if kind == ARRAY:
            item, values = rest
            assert isinstance(item, int)
            assert isinstance(values, list)
            parts += [struct.pack(f"{order}IQ", item, len(values)), *(one(item, v) for v in values)]
        else:
            parts.append(one(kind, rest[0]))
    place = end = 0
    for name, kind_name, shape in tensors:
        number, block_elements, block_bytes = TYPES.get(kind_name, (99, 1, 1))
        parts += [text(name), struct.pack(f"{order}I{len(shape)}Q", len(shape), *shape)]
        start = (starts or {}).get(name, place)
        parts.append(struct.pack(f"{order}IQ", number, start))
        end = place + math.prod(shape) // block_elements * block_bytes
        place = -(-end // alignment) * alignment
    header = b"".join(parts)
    padding = -len(header) % alignment if tensors else 0
    return header + bytes(padding), end


def write_gguf(
    path: Path, metadata: Mapping[str, object], tensors: Iterable[Tensor] = (), **how: Any
) -> Path:
    """A whole GGUF file whose data is a hole."""
    header, data_bytes = gguf_header(metadata, tensors, **how)
    return write_holed(path, header, data_bytes)


def write_holed(path: Path, start: bytes, hole_bytes: int) -> Path:
    """A file that starts with some bytes and then has a hole, which takes no room on the disk."""
    with path.open("wb") as file:
        file.write(start)
        file.truncate(len(start) + hole_bytes)
    return path
