"""What a GGUF file says of its model, read from its header alone.

Format (llama.cpp, ggml/include/gguf.h, read as in ggml/src/gguf.cpp): the magic ``GGUF``, a version, the numbers
of tensors and of metadata entries; the entries, each a key, a type and a value; for each tensor its name, shape,
type and place; then the data, aligned. Version 3 may be big-endian, which shows in the version's bytes
(gguf-py/gguf/gguf_reader.py). A large model is split over files ``NAME-00001-of-00003.gguf``; the first of them
has all the metadata (tools/gguf-split).

The header is walked over with a bounded buffer: long arrays, such as a tokenizer's, are counted and never built.
"""

from __future__ import annotations

import math
import re
import struct
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO, NamedTuple

from kvplan.errors import InputError, unreadable

#: Elements of a block and bytes of a block, by the number that a file has for the type (gguf 0.19.0,
#: gguf/constants.py GGML_QUANT_SIZES and GGMLQuantizationType).
_TENSOR_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}

#: Names of ``general.file_type``, what most tensors are (gguf 0.19.0, gguf/constants.py LlamaFileType).
_FILE_TYPES = {
    **{0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S"},
    **{12: "Q3_K_M", 13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K"},
    **{19: "IQ2_XXS", 20: "IQ2_XS", 21: "Q2_K_S", 22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL"},
    **{26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S", 29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16"},
    **{36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4_MOE", 39: "NVFP4", 40: "Q1_0"},
}
#: A bit of ``general.file_type`` that says that the type was guessed (include/llama.h).
_GUESSED = 1024

#: Metadata types: the code of `struct` by the number in the file; 8 is a string, 9 an array.
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

#: Limits far beyond any published file, so that a damaged or hostile one is refused before it costs time or
#: memory: the largest vocabularies have 262,144 tokens and twice as many merges, headers some 30 MB.
_MAX_HEADER_BYTES = 256 << 20
_MAX_STRINGS = 10_000_000
_MAX_ENTRIES = 10_000
_MAX_TENSORS = 200_000
_MAX_TEXT = 4096
#: Arrays with at most this many numbers are kept: one value for each layer.
_MAX_KEPT = 1_000
#: llama.cpp's own limits (ggml/include/ggml.h GGML_MAX_DIMS; ggml/src/gguf.cpp on the number of elements).
_MAX_DIMENSIONS = 4
_MAX_ELEMENTS = 2**63 - 1

_BUFFER_BYTES = 1 << 20
_SPLIT_NAME = re.compile(r"(.*)-\d{5}-of-\d{5}\.gguf\Z", re.IGNORECASE | re.DOTALL)


class LongArray(NamedTuple):
    """An array that was counted, not kept."""

    length: int


class GgufTensor(NamedTuple):
    """One tensor: its name, the name of its type, and what it holds. ``shape`` is innermost first."""

    name: str
    type: str
    shape: tuple[int, ...]
    elements: int
    stored_bytes: int


class GgufModel(NamedTuple):
    """A model's header, that of all its files together.

    ``metadata`` has numbers, texts and short arrays under their keys; other arrays are `LongArray`.
    """

    metadata: Mapping[str, object]
    tensors: tuple[GgufTensor, ...]

    @property
    def quantization(self) -> str:
        """What most weights are held as, such as ``Q4_K_M``: the file's word, else the commonest type."""
        written = self.metadata.get("general.file_type")
        if isinstance(written, int) and written & ~_GUESSED in _FILE_TYPES:
            return _FILE_TYPES[written & ~_GUESSED]
        held: Counter[str] = Counter()
        for tensor in self.tensors:
            held[tensor.type] += tensor.elements
        return held.most_common(1)[0][0]


def read_gguf(path: Path) -> GgufModel:
    """The header of a GGUF model: one file, or the first of a split one and then the others beside it.

    Raises `InputError` naming the file that is wrong.
    """
    first = _read_file(path)
    count = _number(first, "split.count", 1)
    tensors = list(first.tensors)
    if count > 1:
        others = _other_files(path, first, count)
        for number, other in enumerate(others, start=1):
            part = _read_file(other)
            if _number(part, "split.no", -1) != number or _number(part, "split.count", 1) != count:
                raise _broken(other, f"it is not file {number + 1} of {count}")
            tensors += part.tensors
        expected = _number(first, "split.tensors.count", len(tensors))
        if expected != len(tensors):
            raise _broken(path, f"its {count} files have {len(tensors)} tensors, not {expected}")
    if len({tensor.name for tensor in tensors}) != len(tensors):
        twice = next(name for name, times in Counter(t.name for t in tensors).items() if times > 1)
        raise _broken(path, f'tensor "{twice}" is in it twice')
    if not tensors:
        raise _broken(path, "it has no tensors")
    return GgufModel(first.metadata, tuple(tensors))


def split_name(path: Path) -> str | None:
    """What the names of a split model's files start with; None where a name is none that gguf-split gives."""
    name = _SPLIT_NAME.match(path.name)
    return name[1] if name else None


def _other_files(path: Path, first: GgufModel, count: int) -> list[Path]:
    """The further files of a split model."""
    name = split_name(path)
    if name is None:
        raise InputError(
            f"{path.name} is one of {count} files, but is not named so",
            where=str(path),
            hint=f"name the files NAME-00001-of-{count:05}.gguf and so on",
        )
    if count > _MAX_KEPT:
        raise _broken(path, f"it says that it is one of {count} files")
    names = [f"{name}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]
    if _number(first, "split.no", 0) != 0:
        raise InputError(
            f"{path.name} is not the first of {count} files",
            where=str(path),
            hint=f"give {names[0]}, which has the model's metadata",
        )
    others = [path.parent / other for other in names[1:]]
    for other in others:
        if not other.is_file():
            raise InputError(
                f"{other.name} is missing, one of {count} files of the model",
                where=str(path),
                hint="download all files of the model into one folder",
            )
    return others


def _read_file(path: Path) -> GgufModel:
    try:
        if not path.is_file():  # a pipe or a device would be read for ever
            raise InputError(f"{path.name} is no file", where=str(path), hint="give a .gguf file")
        with path.open("rb") as file:
            return _read_header(_Header(file, path, path.stat().st_size))
    except OSError as error:
        raise unreadable(error, where=str(path)) from None


def _read_header(header: _Header) -> GgufModel:
    if header.take(4) != b"GGUF":
        raise _broken(header.path, "it does not start with GGUF")
    version = header.number("I")
    if version & 0xFFFF == 0:
        header.order = ">"
        (version,) = struct.unpack(">I", struct.pack("<I", version))
    if version not in (2, 3):
        raise _broken(header.path, f"it has version {version}, known are 2 and 3")
    num_tensors, num_entries = header.number("Q"), header.number("Q")
    if num_tensors > _MAX_TENSORS or num_entries > _MAX_ENTRIES:
        raise _broken(header.path, f"it claims {num_tensors} tensors and {num_entries} metadata entries")
    metadata: dict[str, object] = {}
    for _ in range(num_entries):
        key = header.text()
        if key in metadata:
            raise _broken(header.path, f'the key "{key[:60]}" is in it twice')
        metadata[key] = _read_value(header, key)
    tensors = [_read_tensor(header) for _ in range(num_tensors)]
    _check_places(header, metadata, tensors)
    return GgufModel(metadata, tuple(tensor for tensor, _ in tensors))


def _read_value(header: _Header, key: str) -> object:
    kind = header.number("I")
    if kind in _NUMBERS:
        return header.one(_NUMBERS[kind])
    if kind == _STRING:
        return header.text(longest=_MAX_TEXT)
    if kind != _ARRAY:
        raise _broken(header.path, f'the key "{key[:60]}" has the unknown type {kind}')
    item, length = header.number("I"), header.number("Q")
    if item == _STRING:
        header.skip_texts(length)
        return LongArray(length)
    if item not in _NUMBERS:
        raise _broken(header.path, f'the key "{key[:60]}" is an array of the unknown type {item}')
    code = _NUMBERS[item]
    if length > _MAX_KEPT:
        header.skip(length * struct.calcsize(f"<{code}"))
        return LongArray(length)
    return list(header.several(code, length))


def _read_tensor(header: _Header) -> tuple[GgufTensor, int]:
    """The next tensor, and where its data starts within the data of the file."""
    name = header.text()
    dimensions = header.number("I")
    if dimensions > _MAX_DIMENSIONS:
        raise _broken(header.path, f'tensor "{name[:60]}" has {dimensions} dimensions')
    shape = header.several("Q", dimensions)
    number = header.number("I")
    start = header.number("Q")
    if number not in _TENSOR_TYPES:
        raise _broken(header.path, f'tensor "{name[:60]}" has the unknown type {number}')
    kind, block_elements, block_bytes = _TENSOR_TYPES[number]
    elements = math.prod(shape)
    if elements > _MAX_ELEMENTS or (shape[0] if shape else 1) % block_elements:
        raise _broken(header.path, f'tensor "{name[:60]}" of {kind} has the shape {list(shape)}')
    return GgufTensor(name, kind, shape, elements, elements // block_elements * block_bytes), start


def _check_places(
    header: _Header, metadata: Mapping[str, object], tensors: list[tuple[GgufTensor, int]]
) -> None:
    """Tensors must follow each other without a gap or an overlap, and all of them must be in the file."""
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise _broken(header.path, f"its alignment {alignment} is no power of 2")
    data = _padded(header.position, alignment)
    end = expected = 0
    for tensor, start in tensors:
        if start != expected:
            raise _broken(header.path, f'tensor "{tensor.name[:60]}" starts at {start}, not at {expected}')
        end = start + tensor.stored_bytes
        expected = _padded(end, alignment)
    if tensors and data + end > header.file_bytes:
        raise _broken(header.path, f"its tensors need {data + end} bytes, the file has {header.file_bytes}")


def _padded(value: int, alignment: int) -> int:
    return -(-value // alignment) * alignment


class _Header:
    """A file's header, read onwards from its start through a buffer of bounded size."""

    def __init__(self, file: BinaryIO, path: Path, file_bytes: int) -> None:
        self.path = path
        self.file_bytes = file_bytes
        self.order = "<"
        self._file = file
        self._buffer = b""
        self._start = 0  # where the buffer starts in the file
        self._at = 0  # how far the buffer has been read
        self._strings_left = _MAX_STRINGS

    @property
    def position(self) -> int:
        """How far the file has been read, in bytes."""
        return self._start + self._at

    def take(self, count: int) -> bytes:
        """The next bytes."""
        self._need(count)
        taken = self._buffer[self._at : self._at + count]
        self._at += count
        return taken

    def skip(self, count: int) -> None:
        """Leaves out the next bytes, without reading those that the buffer does not have."""
        self._check(count)
        if self._at + count <= len(self._buffer):
            self._at += count
            return
        self._start += self._at + count
        self._file.seek(self._start)
        self._buffer, self._at = b"", 0

    def one(self, code: str) -> object:
        """The next number, in a code of `struct`."""
        return self.several(code, 1)[0]

    def number(self, code: str) -> int:
        """The next whole number, in a code of `struct`."""
        (value,) = self.several(code, 1)
        return int(value)

    def several(self, code: str, count: int) -> tuple[int, ...]:
        """The next numbers of one kind."""
        layout = f"{self.order}{count}{code}"
        return struct.unpack(layout, self.take(struct.calcsize(layout)))

    def text(self, longest: int = 1024) -> str:
        """The next text; of one that is longer than any name, only the start."""
        length = self.number("Q")
        self._check(length)
        kept = self.take(min(length, longest))
        self.skip(length - len(kept))
        return kept.decode("utf-8", errors="replace")

    def skip_texts(self, count: int) -> None:
        """Leaves out the next texts."""
        self._strings_left -= count
        if self._strings_left < 0:
            raise _broken(self.path, f"it claims an array of {count} texts")
        self._check(8 * count)
        length_at = struct.Struct(f"{self.order}Q").unpack_from
        while count:
            buffer, at = self._buffer, self._at
            last = len(buffer) - 8
            while count and at <= last:
                at += 8 + length_at(buffer, at)[0]
                count -= 1
            if at > len(buffer):  # the last of them ends beyond the buffer
                self._at = len(buffer)
                self.skip(at - len(buffer))
            else:
                self._at = at
            if count:
                self._need(8)

    def _need(self, count: int) -> None:
        """Fills the buffer so that it has the next bytes."""
        self._check(count)
        if self._at + count <= len(self._buffer):
            return
        left = self._buffer[self._at :]
        self._start += self._at
        more = self._file.read(max(count, _BUFFER_BYTES) - len(left))
        self._buffer, self._at = left + more, 0
        if len(self._buffer) < count:
            raise _broken(self.path, "it ends within its header")

    def _check(self, count: int) -> None:
        """The next bytes must be in the file, and still in what a header may have."""
        if self.position + count > self.file_bytes:
            raise _broken(self.path, f"it ends within its header: the file has {self.file_bytes} bytes")
        if self.position + count > _MAX_HEADER_BYTES:
            raise _broken(self.path, f"its header is larger than {_MAX_HEADER_BYTES >> 20} MiB")


def _number(model: GgufModel, key: str, default: int) -> int:
    value = model.metadata.get(key, default)
    return value if isinstance(value, int) else default


def _broken(path: Path, why: str) -> InputError:
    return InputError(
        f"{path.name} is no whole GGUF file: {why}",
        where=str(path),
        hint="download it again, or give the config.json of the model that it was made from",
    )
