"""What a model's weight files hold, read from their headers alone.

Format (https://github.com/huggingface/safetensors, README): 8 bytes, little-endian, the length N of
the header; N bytes of JSON that maps each tensor name to its dtype, shape and byte range
``data_offsets``; then the data. ``model.safetensors.index.json`` maps the tensors of a sharded model
to their files.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, TypeGuard

from kvplan.errors import InputError, unreadable

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_PART = re.compile(r"(.*)-\d{5}-of-(\d{5})\.safetensors\Z", re.DOTALL)

#: Below the format's own limit of 100 MB (safetensors/src/tensor.rs, MAX_HEADER_SIZE), since parsed JSON takes ten
#: times as much memory: 100,000 tensors in one file need 15 MB, and an index of as many 10 MB.
_MAX_HEADER_BYTES = 50_000_000
MAX_INDEX_BYTES = 50_000_000
#: An entry has three brackets and at least this many bytes for each. More brackets are no header, and empty lists
#: would take twenty times their text.
_BYTES_PER_BRACKET = 8
#: Sizes are unsigned 64-bit numbers (safetensors/src/tensor.rs); no model has tensors of as many dimensions.
_MAX_SIZE = 2**64
_MAX_DIMENSIONS = 64

#: Ends of the names of tensors that vLLM 0.33 leaves out (model_executor/models/utils.py, AutoWeightsLoader):
#: rotary embeddings are computed.
_UNUSED = (
    "rotary_pos_emb.inv_freq",
    "rotary_emb.inv_freq",
    "rotary_emb.cos_cached",
    "rotary_emb.sin_cached",
)
#: Starts of the names of layers for multi-token prediction where they have their own (vLLM 0.33:
#: model_executor/models/qwen3_next.py and others; mimo.py).
_DRAFTS = ("mtp.", "model.mtp_layers.")
#: Layers of the language model by number, as vLLM 0.33 names them when it looks for those that draft
#: (model_executor/models/utils.py, get_spec_layer_idx_from_weight_name).
_LAYER = re.compile(r"(?:model\.(?:language_model\.)?)?layers\.(\d{1,9})\.")

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


class Tensor(NamedTuple):
    """What a header says of one tensor, but for its shape and place."""

    name: str
    dtype: str
    elements: int
    stored_bytes: int


def read_stored_weights(
    folder: Path, *, draft_layers: range = range(0), may_lack_files: bool = False
) -> StoredWeights | None:
    """Totals over a model folder's ``*.safetensors``; None where there are none.

    Only headers are read. ``draft_layers`` are the numbers of layers that only draft tokens, such as the 62nd of
    DeepSeek-V3. A folder that lacks some of the files is refused, or counts as one without any where it
    ``may_lack_files``. Raises `InputError` naming the file that is wrong.
    """
    try:
        files = _weight_files(folder)
    except _MissingFileError:
        if not may_lack_files:
            raise
        return None
    return total_weights(
        ((file.name, read_header(file)) for file in files), where=str(folder), draft_layers=draft_layers
    )


def total_weights(
    files: Iterable[tuple[str, Iterable[Tensor]]], *, where: str, draft_layers: range = range(0)
) -> StoredWeights | None:
    """Totals over the files of a model, each with its name; None where they hold no tensor."""
    owner: dict[str, str] = {}
    elements: Counter[str] = Counter()
    stored_bytes = draft_bytes = 0
    for file, tensors in files:
        for name, dtype, number, size in tensors:
            if name in owner:
                raise InputError(
                    f'tensor "{name}" is in two files, {owner[name]} and {file}',
                    where=where,
                    hint="keep one set of weight files in the folder",
                )
            owner[name] = file
            if name.endswith(_UNUSED):
                continue
            if name.startswith(_DRAFTS) or (draft_layers and _layer(name) in draft_layers):
                draft_bytes += size
                continue
            elements[dtype] += number
            stored_bytes += size
    if not elements:
        return None
    most = elements.most_common(1)[0][0]
    return StoredWeights(elements.total(), stored_bytes, _MODEL_DTYPES.get(most), draft_bytes)


def _layer(name: str) -> int:
    found = _LAYER.match(name)
    return int(found[1]) if found else -1


def read_header(path: Path) -> list[Tensor]:
    """The tensors of one file. Raises `InputError` if it is no whole safetensors file."""
    try:
        with path.open("rb") as file:

            def read(start: int, count: int) -> bytes:
                file.seek(start)
                return file.read(count)

            return header_tensors(path, path.stat().st_size, read)
    except OSError as error:
        raise unreadable(error, where=str(path)) from None


def header_tensors(path: Path, file_bytes: int, read: Callable[[int, int], bytes]) -> list[Tensor]:
    """The tensors of a file of which ``read(start, count)`` gives some bytes; ``path`` names it in errors."""
    prefix = read(0, 8)
    if len(prefix) < 8:
        raise _broken(path, f"the file has {file_bytes} bytes, too few for a header")
    (header_bytes,) = struct.unpack("<Q", prefix)
    if header_bytes > min(_MAX_HEADER_BYTES, file_bytes - 8):
        raise _broken(path, f"its header claims {header_bytes} bytes of the file's {file_bytes}")
    text = read(8, header_bytes)
    if _BYTES_PER_BRACKET * (text.count(b"[") + text.count(b"{")) > header_bytes + 100:
        raise _broken(path, "its header holds other things than tensors")
    header = _parse_json(text, path)
    header.pop("__metadata__", None)
    places: list[tuple[int, int]] = []
    tensors = [_read_tensor(name, entry, path, places) for name, entry in header.items()]
    end = 0
    for start, stop in sorted(places):
        if start != end:
            wrong = "overlap" if start < end else "leave a gap"
            raise _broken(path, f"its tensors {wrong} at byte {min(start, end)} of the data")
        end = stop
    data_bytes = file_bytes - 8 - header_bytes
    if end != data_bytes:
        raise _broken(path, f"its tensors need {end} bytes of data, the file has {data_bytes}")
    return tensors


def _weight_files(folder: Path) -> Sequence[Path]:
    """The files of the model, by its index if it has one."""
    index = folder / INDEX_NAME
    if index.is_file():
        return _indexed_files(index)
    files = sorted(file for file in folder.glob("*.safetensors") if file.is_file())
    # All parts must be there: half of a model would pass for a whole one.
    for start, count in sorted({match.groups() for file in files if (match := _PART.match(file.name))}):
        for number in range(1, int(count) + 1):
            name = f"{start}-{number:05}-of-{count}.safetensors"
            if not (folder / name).is_file():
                raise _MissingFileError(folder, name)
    # Mistral's repositories hold the weights a second time in their own format, which is ignored by
    # vLLM unless it is asked for (model_executor/model_loader/default_loader.py).
    others = [file for file in files if not file.name.startswith("consolidated")]
    return others or files


def _indexed_files(index: Path) -> Sequence[Path]:
    try:
        if index.stat().st_size > MAX_INDEX_BYTES:
            raise _broken(index, "it is larger than any index")
        text = index.read_bytes()
    except OSError as error:
        raise unreadable(error, where=str(index)) from None
    names = files_of_index(text, index)
    for name in names:
        if not (index.parent / name).is_file():
            raise _MissingFileError(index, name)
    return [index.parent / name for name in names]


def files_of_index(text: bytes, index: Path) -> list[str]:
    """The names of the files that an index lists, in order; ``index`` names it in errors."""
    weight_map = _parse_json(text, index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise _broken(index, "it has no weight_map")
    names = set(weight_map.values()) if all(isinstance(one, str) for one in weight_map.values()) else {""}
    for name in sorted(names):
        # The name alone is judged: in the Hugging Face cache the files themselves are links elsewhere.
        if name != Path(name).name or "\\" in name or name in ("", ".", ".."):
            raise InputError(
                f'the index points to "{name[:60]}", outside its folder',
                where=str(index),
                hint="an index names files beside it",
            )
    return sorted(names)


class _MissingFileError(InputError):
    """One of a model's files is missing."""

    def __init__(self, place: Path, name: str) -> None:
        super().__init__(
            f'"{name[:60]}" is missing, one of the model\'s files',
            where=str(place),
            hint="download the model again, or remove the weight files to size from config.json alone",
        )


def _parse_json(text: bytes, path: Path) -> dict[str, object]:
    part = "its header" if path.suffix == ".safetensors" else "it"
    try:
        value = json.loads(text, object_pairs_hook=without_duplicates)
    except DuplicateKeyError as error:
        raise _broken(path, f'{part} has "{str(error)[:60]}" twice') from None
    except (ValueError, RecursionError):
        raise _broken(path, f"{part} is no JSON") from None
    if not isinstance(value, dict):
        raise _broken(path, "it holds no JSON object")
    return value


class DuplicateKeyError(Exception):
    """A key that an object has twice; the parser knows no file that could be named."""


def without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """The object of these keys and values, as a hook for `json.loads`. Raises `DuplicateKeyError`."""
    values = dict(pairs)
    if len(values) != len(pairs):
        raise DuplicateKeyError(next(key for key, times in Counter(k for k, _ in pairs).items() if times > 1))
    return values


def _read_tensor(name: str, entry: object, path: Path, places: list[tuple[int, int]]) -> Tensor:
    """One tensor of a header; its place is added to the list."""
    if not isinstance(entry, dict):
        raise _broken(path, f'tensor "{name[:60]}" is "{_cut(entry)}"')
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _DTYPE_BITS:
        raise _broken(path, f'tensor "{name[:60]}" has the unknown dtype "{_cut(dtype)}"')
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2 or len(shape) > _MAX_DIMENSIONS:
        raise _broken(
            path, f'tensor "{name[:60]}" has shape "{_cut(shape)}" and data_offsets "{_cut(offsets)}"'
        )
    elements = math.prod(shape)
    start, end = offsets
    if elements * _DTYPE_BITS[dtype] != (end - start) * 8:
        raise _broken(
            path, f'tensor "{name[:60]}" has {elements} elements of {dtype}, but {end - start} bytes of data'
        )
    places.append((start, end))
    return Tensor(name, dtype, elements, end - start)


def _are_sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < _MAX_SIZE for item in value)


def _cut(value: object) -> str:
    """The start of a wrong value, for a message; what is nested in it is left out."""
    if isinstance(value, list):
        items = ["..." if isinstance(item, list | dict) else str(item)[:20] for item in value[:8]]
        return f"[{', '.join(items + ['...'] * (len(value) > 8))}]"
    return "an object" if isinstance(value, dict) else str(value)[:60]


def _broken(path: Path, why: str) -> InputError:
    return InputError(
        f"{path.name} is no whole safetensors file: {why}"
        if path.suffix == ".safetensors"
        else f"{path.name} cannot be used: {why}",
        where=str(path),
        hint="download it again, or remove the weight files to size from config.json alone",
    )
