"""Headers of weight files: totals, sharding, and every way a file can be broken."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import pytest
from model_files import write_holed

from kvplan.errors import InputError
from kvplan.safetensors import INDEX_NAME, read_header, read_stored_weights

BITS = {"F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "I64": 64, "F4": 4}


def tensors(**shapes: tuple[str, list[int]]) -> dict[str, object]:
    """A header for tensors that lie one behind the other."""
    header: dict[str, object] = {}
    end = 0
    for name, (dtype, shape) in shapes.items():
        elements = 1
        for size in shape:
            elements *= size
        start, end = end, end + elements * BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    return header


def write(path: Path, header: object, *, data_bytes: int | None = None, claim: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    if data_bytes is None and isinstance(header, dict):
        data_bytes = max((e["data_offsets"][1] for k, e in header.items() if k != "__metadata__"), default=0)
    length = struct.pack("<Q", len(text) if claim is None else claim)
    path.write_bytes(length + text + bytes(data_bytes or 0))
    return path


def test_one_file_is_summed(tmp_path: Path) -> None:
    header = {"__metadata__": {"format": "pt"}} | tensors(a=("BF16", [3, 4]), b=("F32", [5]), c=("BF16", []))
    write(tmp_path / "model.safetensors", header)
    stored = read_stored_weights(tmp_path)
    assert stored is not None
    assert stored.parameters == 12 + 5 + 1
    assert stored.stored_bytes == 24 + 20 + 2
    assert stored.dtype == "bfloat16"


def test_packed_and_quantized_dtypes_are_summed_in_bytes(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", tensors(a=("F4", [8]), b=("F8_E4M3", [8]), c=("I64", [1])))
    stored = read_stored_weights(tmp_path)
    assert stored is not None
    assert stored.stored_bytes == 4 + 8 + 8
    assert stored.dtype is None


def test_no_files_means_no_answer(tmp_path: Path) -> None:
    assert read_stored_weights(tmp_path) is None
    write(tmp_path / "model.safetensors", {})
    assert read_stored_weights(tmp_path) is None


def test_shards_are_summed_without_an_index(tmp_path: Path) -> None:
    write(tmp_path / "model-00001-of-00002.safetensors", tensors(a=("F16", [2])))
    write(tmp_path / "model-00002-of-00002.safetensors", tensors(b=("F16", [3])))
    stored = read_stored_weights(tmp_path)
    assert stored is not None
    assert (stored.parameters, stored.dtype) == (5, "float16")


def test_the_index_says_which_files_count(tmp_path: Path) -> None:
    write(tmp_path / "one.safetensors", tensors(a=("F16", [2])))
    write(tmp_path / "stray.safetensors", tensors(a=("F16", [2])))
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": {"a": "one.safetensors"}}))
    stored = read_stored_weights(tmp_path)
    assert stored is not None
    assert stored.parameters == 2


def test_a_link_elsewhere_is_followed_as_in_the_hugging_face_cache(tmp_path: Path) -> None:
    blob = write(tmp_path / "blob", tensors(a=("F16", [2])))
    folder = tmp_path / "snapshot"
    folder.mkdir()
    (folder / "one.safetensors").symlink_to(blob)
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": {"a": "one.safetensors"}}))
    stored = read_stored_weights(folder)
    assert stored is not None
    assert stored.parameters == 2


def test_mistrals_second_copy_is_left_out(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", tensors(a=("F16", [2])))
    write(tmp_path / "consolidated.safetensors", tensors(x=("F16", [2])))
    stored = read_stored_weights(tmp_path)
    assert stored is not None
    assert stored.parameters == 2


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.safetensors", tensors(x=("F16", [2])))
    write(tmp_path / "b.safetensors", tensors(x=("F16", [2])))
    with pytest.raises(InputError, match=r'tensor "x" is in two files, a\.safetensors and b\.safetensors'):
        read_stored_weights(tmp_path)


BROKEN_HEADERS: dict[str, tuple[object, str]] = {
    "no JSON": (b"{not json", "its header is no JSON"),
    "no UTF-8": (b'{"\xff": 1}', "its header is no JSON"),
    "a list": ([], "it holds no JSON object"),
    "an entry that is a number": ({"a": 1}, 'tensor "a" is "1"'),
    "an unknown dtype": (
        {"a": {"dtype": "F7", "shape": [1], "data_offsets": [0, 1]}},
        'tensor "a" has the unknown dtype "F7"',
    ),
    "a negative size": ({"a": {"dtype": "F16", "shape": [-1], "data_offsets": [0, 2]}}, r'shape "\[-1\]"'),
    "a boolean size": ({"a": {"dtype": "F16", "shape": [True], "data_offsets": [0, 2]}}, r'shape "\[True\]"'),
    "one offset": ({"a": {"dtype": "F16", "shape": [1], "data_offsets": [0]}}, r'data_offsets "\[0\]"'),
    "offsets of another size": (
        {"a": {"dtype": "F16", "shape": [3], "data_offsets": [0, 2]}},
        "3 elements of F16, but 2 bytes",
    ),
    "a shape that is an object": ({"a": {"dtype": "F16", "shape": {}, "data_offsets": [0, 2]}}, "an object"),
    "a dtype that is a list": ({"a": {"dtype": [1, [2]], "shape": [], "data_offsets": []}}, r"\[1, \.\.\.\]"),
    "a size beyond 64 bits": ({"a": {"dtype": "F16", "shape": [2**64], "data_offsets": [0, 2]}}, "has shape"),
    "too many dimensions": ({"a": {"dtype": "F16", "shape": [1] * 65, "data_offsets": [0, 2]}}, "has shape"),
    "a number of many digits": (b'{"a": ' + b"9" * 5000 + b"}", "its header is no JSON"),
    "infinity": (b'{"a": {"dtype": "F16", "shape": [Infinity], "data_offsets": [0, 2]}}', "has shape"),
    "deep nesting": (b"[" * 20 + b" " * 200, "its header is no JSON"),
    "deeper nesting": (b"[ " * 100_000, "its header holds other things than tensors"),
    "many empty lists": (b'{"a": [' + b"[]," * 1000 + b"[]]}", "its header holds other things than tensors"),
    "the same name twice": (
        b'{"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}, '
        b'"a": {"dtype": "U8", "shape": [1], "data_offsets": [1, 2]}}',
        'its header has "a" twice',
    ),
    "tensors that overlap": (
        {
            "a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]},
            "b": {"dtype": "U8", "shape": [1], "data_offsets": [1, 2]},
        },
        "its tensors overlap at byte 1 of the data",
    ),
    "tensors with a gap": (
        {"a": {"dtype": "U8", "shape": [1], "data_offsets": [1, 2]}},
        "its tensors leave a gap at byte 0 of the data",
    ),
    "offsets that run backwards": (
        {"a": {"dtype": "F16", "shape": [1], "data_offsets": [2, 0]}},
        "-2 bytes of data",
    ),
}


@pytest.mark.parametrize(("header", "message"), BROKEN_HEADERS.values(), ids=BROKEN_HEADERS)
def test_a_broken_header_is_refused_by_file(tmp_path: Path, header: object, message: str) -> None:
    path = write(tmp_path / "model.safetensors", header, data_bytes=2)
    with pytest.raises(InputError, match=message) as caught:
        read_header(path)
    assert caught.value.where == str(path)
    assert caught.value.what.startswith("model.safetensors is no whole safetensors file: ")


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    header = tensors(a=("F16", [8]))
    path = write(tmp_path / "model.safetensors", header, data_bytes=10)
    with pytest.raises(InputError, match="its tensors need 16 bytes of data, the file has 10"):
        read_header(path)
    path.write_bytes(b"1234")
    with pytest.raises(InputError, match="the file has 4 bytes, too few for a header"):
        read_header(path)


@pytest.mark.parametrize("claim", [2**64 - 1, 1 << 60, 200_000_000, 50])
def test_a_header_longer_than_the_file_is_refused_unread(tmp_path: Path, claim: int) -> None:
    path = write(tmp_path / "model.safetensors", b"{}", claim=claim)
    with pytest.raises(InputError, match=f"its header claims {claim} bytes of the file's 10"):
        read_header(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read"):
        read_header(tmp_path / "none.safetensors")


@pytest.mark.parametrize("name", ["../a.safetensors", "/etc/passwd", "x/a.safetensors", "..", "a\\b"])
def test_an_index_must_not_point_outside_its_folder(tmp_path: Path, name: str) -> None:
    index = tmp_path / INDEX_NAME
    index.write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(InputError, match="outside its folder") as caught:
        read_stored_weights(tmp_path)
    assert caught.value.where == str(index)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{"weight_map": {"a": "gone.safetensors"}}',
            '"gone.safetensors" is missing, one of the model.s files',
        ),
        ("{}", "it has no weight_map"),
        ("[]", "it holds no JSON object"),
        ("{", "it is no JSON"),
    ],
)
def test_a_broken_index_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / INDEX_NAME).write_text(text)
    with pytest.raises(InputError, match=message):
        read_stored_weights(tmp_path)


def test_a_pipe_or_a_folder_is_no_weight_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.safetensors")
    (tmp_path / "b.safetensors").mkdir()
    assert read_stored_weights(tmp_path) is None
    (tmp_path / INDEX_NAME).write_text('{"weight_map": {"x": "a.safetensors"}}')
    with pytest.raises(InputError, match=r'"a\.safetensors" is missing'):
        read_stored_weights(tmp_path)


def test_layers_that_only_draft_are_told_apart(tmp_path: Path) -> None:
    names = [
        "model.layers.60.mlp.up_proj.weight",
        "model.layers.61.mlp.up_proj.weight",
        "model.language_model.layers.61.norm.weight",
        "layers.62.norm.weight",
        "vision_tower.layers.61.norm.weight",
        "mtp.fc.weight",
        "model.mtp_layers.0.norm.weight",
        "model.layers.0.self_attn.rotary_emb.inv_freq",
    ]
    shapes: dict[str, tuple[str, list[int]]] = {name: ("F32", [2**i]) for i, name in enumerate(names)}
    write(tmp_path / "model.safetensors", tensors(**shapes))
    stored = read_stored_weights(tmp_path, draft_layers=range(61, 62))
    assert stored is not None
    assert stored.parameters == 1 + 8 + 16
    assert (stored.stored_bytes, stored.draft_bytes) == (4 * 25, 4 * (2 + 4 + 32 + 64))
    whole = read_stored_weights(tmp_path)
    assert whole is not None
    assert (whole.parameters, whole.draft_bytes) == (1 + 2 + 4 + 8 + 16, 4 * (32 + 64))


def test_a_hundred_thousand_tensors_are_read(tmp_path: Path) -> None:
    shapes: dict[str, tuple[str, list[int]]] = {f"model.layers.{i}.w": ("BF16", [3]) for i in range(100_000)}
    header = json.dumps(tensors(**shapes)).encode()
    write_holed(tmp_path / "model.safetensors", struct.pack("<Q", len(header)) + header, 600_000)
    stored = read_stored_weights(tmp_path)
    assert stored is not None
    assert (stored.parameters, stored.stored_bytes) == (300_000, 600_000)


def test_all_parts_of_a_model_must_be_there(tmp_path: Path) -> None:
    write(tmp_path / "model-00002-of-00003.safetensors", tensors(a=("F16", [2])))
    write(tmp_path / "model-00003-of-00003.safetensors", tensors(b=("F16", [2])))
    with pytest.raises(InputError, match=r'"model-00001-of-00003\.safetensors" is missing') as caught:
        read_stored_weights(tmp_path)
    assert caught.value.where == str(tmp_path)
    assert read_stored_weights(tmp_path, may_lack_files=True) is None
