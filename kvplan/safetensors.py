"""What a model's weight files hold, read from their headers alone.

Format (https://github.com/huggingface/safetensors, README): 8 bytes, little-endian, the length N of
the header; N bytes of JSON that maps each tensor name to its dtype, shape and byte range
``data_offsets``; then the data. ``model.safetensors.index.json`` maps the tensors of a sharded model
to their files.
"""

from __future__ import annotations

import json
import math
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, TypeGuard

from kvplan.errors import InputError

INDEX_NAME = "model.safetensors.index.json"

#: The format's own limit (safetensors/src/tensor.rs, MAX_HEADER_SIZE).
_MAX_HEADER_BYTES = 100_000_000
#: An index holds one line a tensor; the largest published ones have some tens of megabytes.
_MAX_INDEX_BYTES = 500_000_000

#: Bits of one element (safetensors/src/tensor.rs, Dtype::bitsize).
_DTYPE_BITS = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
    "C64": 64,
}
_MODEL_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class StoredWeights(NamedTuple):
    """What the files of one model hold together.

    ``dtype`` is the one most elements have, None where that is no dtype of a model. ``draft_bytes`` are those of
    layers that only draft tokens (multi-token prediction), which the engine loads for speculative decoding alone:
    neither ``parameters`` nor ``stored_bytes`` has them.
    """

    parameters: int
    stored_bytes: int
    dtype: str | None
    draft_bytes: int = 0
    source: Literal["safetensors", "gguf"] = "safetensors"


class _Tensor(NamedTuple):
    name: str
    dtype: str
    elements: int
    stored_bytes: int


def read_stored_weights(folder: Path) -> StoredWeights | None:
    """Totals over a model folder's ``*.safetensors``; None where there are none.

    Only headers are read. Raises `InputError` naming the file that is wrong.
    """
    files = _weight_files(folder)
    if not files:
        return None
    owner: dict[str, str] = {}
    elements: Counter[str] = Counter()
    stored_bytes = 0
    for file in files:
        for tensor in read_header(file):
            if tensor.name in owner:
                raise InputError(
                    f'tensor "{tensor.name}" is in two files, {owner[tensor.name]} and {file.name}',
                    where=str(folder),
                    hint="keep one set of weight files in the folder",
                )
            owner[tensor.name] = file.name
            elements[tensor.dtype] += tensor.elements
            stored_bytes += tensor.stored_bytes
    if not owner:
        return None
    most = elements.most_common(1)[0][0]
    return StoredWeights(
        parameters=elements.total(), stored_bytes=stored_bytes, dtype=_MODEL_DTYPES.get(most)
    )


def read_header(path: Path) -> list[_Tensor]:
    """The tensors of one file. Raises `InputError` if it is no whole safetensors file."""
    try:
        file_bytes = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            if len(prefix) < 8:
                raise _broken(path, f"the file has {file_bytes} bytes, too few for a header")
            (header_bytes,) = struct.unpack("<Q", prefix)
            if header_bytes > min(_MAX_HEADER_BYTES, file_bytes - 8):
                raise _broken(path, f"its header claims {header_bytes} bytes of the file's {file_bytes}")
            text = file.read(header_bytes)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}", where=str(path)) from None
    header = _parse_json(text, path)
    tensors = [_read_tensor(name, entry, path) for name, entry in header.items() if name != "__metadata__"]
    data_bytes = file_bytes - 8 - header_bytes
    held = sum(tensor.stored_bytes for tensor in tensors)
    if held != data_bytes:
        raise _broken(path, f"its tensors need {held} bytes of data, the file has {data_bytes}")
    return tensors


def _weight_files(folder: Path) -> Sequence[Path]:
    """The files of the model, by its index if it has one."""
    index = folder / INDEX_NAME
    if index.is_file():
        return _indexed_files(index)
    files = sorted(file for file in folder.glob("*.safetensors") if file.is_file())
    # Mistral's repositories hold the weights a second time in their own format, which is ignored by
    # vLLM unless it is asked for (model_executor/model_loader/default_loader.py).
    others = [file for file in files if not file.name.startswith("consolidated")]
    return others or files


def _indexed_files(index: Path) -> Sequence[Path]:
    try:
        if index.stat().st_size > _MAX_INDEX_BYTES:
            raise _broken(index, "it is larger than any index")
        text = index.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {index}: {error.strerror}", where=str(index)) from None
    weight_map = _parse_json(text, index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise _broken(index, "it has no weight_map")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        # The name alone is judged: in the Hugging Face cache the files themselves are links elsewhere.
        if name != Path(name).name or "\\" in name or name in ("", ".", ".."):
            raise InputError(
                f'the index points to "{name}", outside its folder',
                where=str(index),
                hint="an index names files beside it",
            )
        if not (index.parent / name).is_file():
            raise InputError(
                f'the index names "{name}", which is missing',
                where=str(index),
                hint="download the model again, or remove the weight files to size from config.json alone",
            )
    return [index.parent / name for name in names]


def _parse_json(text: bytes, path: Path) -> dict[str, object]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        part = "its header" if path.suffix == ".safetensors" else "it"
        raise _broken(path, f"{part} is no JSON") from None
    if not isinstance(value, dict):
        raise _broken(path, "it holds no JSON object")
    return value


def _read_tensor(name: str, entry: object, path: Path) -> _Tensor:
    if not isinstance(entry, Mapping):
        raise _broken(path, f'tensor "{name}" is "{entry}"')
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _DTYPE_BITS:
        raise _broken(path, f'tensor "{name}" has the unknown dtype "{dtype}"')
    if not _are_whole_numbers(shape) or not _are_whole_numbers(offsets) or len(offsets) != 2:
        raise _broken(path, f'tensor "{name}" has shape "{shape}" and data_offsets "{offsets}"')
    elements = math.prod(shape)
    stored_bytes = offsets[1] - offsets[0]
    if elements * _DTYPE_BITS[dtype] != stored_bytes * 8:
        raise _broken(
            path, f'tensor "{name}" has {elements} elements of {dtype}, but {stored_bytes} bytes of data'
        )
    return _Tensor(name, dtype, elements, stored_bytes)


def _are_whole_numbers(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _broken(path: Path, why: str) -> InputError:
    return InputError(
        f"{path.name} is no whole safetensors file: {why}"
        if path.suffix == ".safetensors"
        else f"{path.name} cannot be used: {why}",
        where=str(path),
        hint="download it again, or remove the weight files to size from config.json alone",
    )
