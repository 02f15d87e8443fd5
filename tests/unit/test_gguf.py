"""Headers of GGUF files: what they hold, how they are split, and every way a file can be broken."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
from model_files import ARRAY, F64, I8, I64, TEXT, U16, U64, Tensor, gguf_header, write_gguf, write_holed

from kvplan.errors import InputError
from kvplan.gguf import LongArray, read_gguf

SMALL: list[Tensor] = [("a.weight", "Q4_K", [512, 3]), ("b.weight", "F32", [5]), ("c.bias", "F16", [])]


def test_metadata_of_every_type_is_read(tmp_path: Path) -> None:
    written = {
        "general.architecture": "llama",
        "one": (I8, -3),
        "two": (U16, 65535),
        "three": (I64, -(2**63)),
        "four": (U64, 2**64 - 1),
        "five": (F64, 0.1),
        "six": True,
        "seven": [1, 2, 3],
        "eight": (ARRAY, I8, [-1, 1]),
        "nine": ["a", "b", "c"],
        "ten": list(range(5000)),
        "eleven": "x" * 5000,
        "twelve": (ARRAY, TEXT, []),
    }
    model = read_gguf(write_gguf(tmp_path / "a.gguf", written, SMALL))
    assert model.metadata == {
        "general.architecture": "llama",
        "one": -3,
        "two": 65535,
        "three": -(2**63),
        "four": 2**64 - 1,
        "five": 0.1,
        "six": True,
        "seven": [1, 2, 3],
        "eight": [-1, 1],
        "nine": LongArray(3),
        "ten": LongArray(5000),
        "eleven": "x" * 4096,
        "twelve": LongArray(0),
    }


def test_bytes_of_tensors_follow_from_their_blocks(tmp_path: Path) -> None:
    model = read_gguf(write_gguf(tmp_path / "a.gguf", {}, SMALL))
    # Q4_K has blocks of 256 elements in 144 bytes: 1536 / 256 x 144.
    assert [(t.name, t.type, t.elements, t.stored_bytes) for t in model.tensors] == [
        ("a.weight", "Q4_K", 1536, 864),
        ("b.weight", "F32", 5, 20),
        ("c.bias", "F16", 1, 2),
    ]


@pytest.mark.parametrize(("version", "order"), [(2, "<"), (3, "<"), (3, ">")])
def test_versions_and_byte_orders_hold_the_same(tmp_path: Path, version: int, order: str) -> None:
    metadata = {"n": 7, "tokens": ["hello", "", "world"], "heads": [1, 2], "x": 0.5}
    path = write_gguf(tmp_path / "a.gguf", metadata, SMALL, version=version, order=order)
    model = read_gguf(path)
    assert model.metadata == {"n": 7, "tokens": LongArray(3), "heads": [1, 2], "x": 0.5}
    assert sum(tensor.stored_bytes for tensor in model.tensors) == 864 + 20 + 2


def test_texts_longer_than_the_buffer_are_skipped(tmp_path: Path) -> None:
    tokens = ["a" * length for length in (1 << 19, 0, 3 << 20, 5, 1 << 20, (1 << 20) - 8)]
    path = write_gguf(tmp_path / "a.gguf", {"tokens": tokens, "after": 9}, SMALL)
    assert read_gguf(path).metadata == {"tokens": LongArray(6), "after": 9}


def test_the_alignment_can_be_another(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf", {"general.alignment": 64}, SMALL, alignment=64)
    assert len(read_gguf(path).tensors) == 3


@pytest.mark.parametrize(
    ("metadata", "name"),
    [({"general.file_type": 15}, "Q4_K_M"), ({"general.file_type": 1024 + 7}, "Q8_0"), ({}, "Q4_K")],
)
def test_the_quantization_is_the_files_word_or_the_commonest_type(
    tmp_path: Path, metadata: dict[str, object], name: str
) -> None:
    assert read_gguf(write_gguf(tmp_path / "a.gguf", metadata, SMALL)).quantization == name


def split(folder: Path, **changes: Any) -> Path:
    """A model in two files; changes are to the metadata of the second."""
    tensors: list[list[Tensor]] = [[("a", "F32", [8])], [("b", "F16", [3]), ("c", "F32", [1])]]
    for number in range(2):
        metadata: dict[str, object] = {"split.no": (U16, number), "split.count": (U16, 2)}
        if number == 0:
            metadata |= {"split.tensors.count": 3, "general.architecture": "llama"}
        else:
            metadata |= changes
        write_gguf(folder / f"m-0000{number + 1}-of-00002.gguf", metadata, tensors[number])
    return folder / "m-00001-of-00002.gguf"


def test_a_split_model_is_read_whole(tmp_path: Path) -> None:
    model = read_gguf(split(tmp_path))
    assert [tensor.name for tensor in model.tensors] == ["a", "b", "c"]
    assert model.metadata["general.architecture"] == "llama"


def refused(path: Path) -> InputError:
    with pytest.raises(InputError) as caught:
        read_gguf(path)
    assert caught.value.where == str(path)
    assert caught.value.hint
    return caught.value


def test_another_part_than_the_first_is_refused(tmp_path: Path) -> None:
    split(tmp_path)
    error = refused(tmp_path / "m-00002-of-00002.gguf")
    assert error.what == "m-00002-of-00002.gguf is not the first of 2 files"
    assert error.hint == "give m-00001-of-00002.gguf, which has the model's metadata"


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    first = split(tmp_path)
    (tmp_path / "m-00002-of-00002.gguf").unlink()
    assert refused(first).what == "m-00002-of-00002.gguf is missing, one of 2 files of the model"


def test_a_renamed_part_is_refused(tmp_path: Path) -> None:
    error = refused(split(tmp_path).rename(tmp_path / "m.gguf"))
    assert error.what == "m.gguf is one of 2 files, but is not named so"


@pytest.mark.parametrize("changes", [{"split.no": (U16, 2)}, {"split.count": (U16, 3)}, {"split.no": "x"}])
def test_parts_of_different_models_are_refused(tmp_path: Path, changes: dict[str, object]) -> None:
    first = split(tmp_path, **changes)
    with pytest.raises(
        InputError, match=r"m-00002-of-00002\.gguf is no whole GGUF file: it is not file 2 of 2"
    ):
        read_gguf(first)


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"version": 1}, "it has version 1, known are 2 and 3"),
        ({"version": 4}, "it has version 4, known are 2 and 3"),
        ({"num_tensors": 2**60}, "it claims 1152921504606846976 tensors and 0 metadata entries"),
        ({"num_entries": 2**64 - 1}, "metadata entries"),
        ({"num_tensors": 4}, 'tensor "" starts at 0, not at 928'),
        ({"starts": {"b.weight": 0}}, 'tensor "b.weight" starts at 0, not at 864'),
        ({"starts": {"b.weight": 2**63}}, 'tensor "b.weight" starts at 9223372036854775808, not at 864'),
        ({"starts": {"a.weight": 32}}, 'tensor "a.weight" starts at 32, not at 0'),
    ],
)
def test_a_wrong_header_is_refused(tmp_path: Path, how: dict[str, Any], why: str) -> None:
    error = refused(write_gguf(tmp_path / "a.gguf", {}, SMALL, **how))
    assert error.what.startswith("a.gguf is no whole GGUF file: ")
    assert why in error.what


@pytest.mark.parametrize(
    ("tensors", "why"),
    [
        ([("x", "F32", [2]), ("x", "F32", [2])], 'tensor "x" is in it twice'),
        ([("x", "Q4_K", [100])], 'tensor "x" of Q4_K has the shape [100]'),
        ([("x", "Q4_K", [])], 'tensor "x" of Q4_K has the shape []'),
        ([("x", "none", [2])], 'tensor "x" has the unknown type 99'),
        ([("x", "F32", [1, 1, 1, 1, 1])], 'tensor "x" has 5 dimensions'),
        ([], "it has no tensors"),
    ],
)
def test_a_wrong_tensor_is_refused(tmp_path: Path, tensors: list[Tensor], why: str) -> None:
    assert why in refused(write_gguf(tmp_path / "a.gguf", {}, tensors)).what


@pytest.mark.parametrize("shape", [[2**62], [2**40, 2**40], [2**63], [2**64 - 1, 2, 2, 2]])
def test_a_tensor_beyond_any_file_is_refused(tmp_path: Path, shape: list[int]) -> None:
    header, _ = gguf_header({}, [("x", "F16", shape)])
    error = refused(write_holed(tmp_path / "a.gguf", header, 10))
    assert "has the shape" in error.what or "its tensors need" in error.what


@pytest.mark.parametrize("alignment", [0, 3, "x", (I64, -32), True])
def test_a_wrong_alignment_is_refused(tmp_path: Path, alignment: object) -> None:
    path = write_gguf(tmp_path / "a.gguf", {"general.alignment": alignment}, SMALL)
    assert "is no power of 2" in refused(path).what


def entry(key: bytes, kind: int, rest: bytes) -> bytes:
    """A file of one metadata entry."""
    return (
        b"GGUF"
        + struct.pack("<IQQ", 3, 0, 1)
        + struct.pack("<Q", len(key))
        + key
        + struct.pack("<I", kind)
        + rest
    )


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"", "it ends within its header"),
        (b"GG", "it ends within its header"),
        (b"GGUF", "it ends within its header"),
        (b"GGML" + bytes(40), "it does not start with GGUF"),
        (b"{}" + bytes(40), "it does not start with GGUF"),
        (entry(b"k", 4, b""), "it ends within its header"),
        (entry(b"k", 13, bytes(8)), 'the key "k" has the unknown type 13'),
        (entry(b"k", 9, struct.pack("<IQ", 9, 1) + bytes(80)), "is an array of the unknown type 9"),
        (entry(b"k", 9, struct.pack("<IQ", 5, 2**61)), "it ends within its header"),
        (entry(b"k", 9, struct.pack("<IQ", 8, 2**61)), "it claims an array of 2305843009213693952 texts"),
        (entry(b"k", 9, struct.pack("<IQ", 8, 10**6)), "it ends within its header"),
        (entry(b"k", 9, struct.pack("<IQQ", 8, 1, 2**63)), "it ends within its header"),
        (entry(b"k", 8, struct.pack("<Q", 2**63)), "it ends within its header"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**62), "it ends within its header"),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + 2 * (struct.pack("<Q", 1) + b"k\x00\x00\x00\x00\x00"),
            "twice",
        ),
    ],
)
def test_a_hostile_start_is_refused(tmp_path: Path, text: bytes, why: str) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(text)
    assert why in refused(path).what


def test_a_vast_hole_is_refused_before_it_is_walked(tmp_path: Path) -> None:
    text = entry(b"k", 9, struct.pack("<IQ", 8, 9_000_000))
    error = refused(write_holed(tmp_path / "a.gguf", text, 1 << 40))
    assert "ends within" not in error.what
    long = entry(b"k", 9, struct.pack("<IQ", 10, 2**35))
    assert (
        "its header is larger than 256 MiB" in refused(write_holed(tmp_path / "b.gguf", long, 1 << 40)).what
    )


@pytest.mark.parametrize("cut", [1, 100, 864])
def test_a_truncated_file_is_refused(tmp_path: Path, cut: int) -> None:
    path = write_gguf(tmp_path / "a.gguf", {}, SMALL)
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(size - cut)
    assert refused(path).what == (
        f"a.gguf is no whole GGUF file: its tensors need {size} bytes, the file has {size - cut}"
    )


def test_every_shorter_file_is_refused(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "a.gguf", {"tokens": ["a", "b"], "heads": [1, 2]}, SMALL).read_bytes()
    for size in range(len(whole)):
        path = tmp_path / "cut.gguf"
        path.write_bytes(whole[:size])
        refused(path)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    assert refused(tmp_path).what == f"{tmp_path.name} is no file"
    assert "is no file" in refused(tmp_path / "none.gguf").what
