"""Damaged model files: whatever bytes a file has, it is read or refused, and what is read fits the file."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from model_files import ARRAY, I32, U16, Tensor, gguf_header

from kvplan.config import load_model
from kvplan.errors import InputError
from kvplan.gguf import read_gguf
from kvplan.safetensors import read_header

TENSORS: list[Tensor] = [("token_embd.weight", "F16", [64, 4]), ("blk.0.ffn_up.weight", "Q8_0", [64, 2])]
METADATA = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 128,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 2,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": (ARRAY, I32, [2, 2]),
    "tokenizer.ggml.tokens": ["a", "b", "c", "d"],
    "x": (U16, 3),
}


def gguf_file(order: str) -> bytes:
    header, data_bytes = gguf_header(METADATA, TENSORS, order=order)
    return header + bytes(data_bytes)


def safetensors_file() -> bytes:
    text = json.dumps(
        {
            "__metadata__": {"format": "pt"},
            "a": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]},
            "b": {"dtype": "I8", "shape": [4], "data_offsets": [12, 16]},
        }
    ).encode()
    return struct.pack("<Q", len(text)) + text + bytes(16)


GGUF = {order: gguf_file(order) for order in "<>"}
SAFETENSORS = safetensors_file()

#: Changes to a file: at a place, some bytes instead of some number of others.
changes = st.lists(
    st.tuples(
        st.integers(0, 1000),
        st.integers(0, 8),
        st.binary(max_size=8) | st.integers(0, 2**64 - 1).map(lambda value: struct.pack("<Q", value)),
    ),
    min_size=1,
    max_size=4,
)


def damaged(whole: bytes, changes: list[tuple[int, int, bytes]]) -> bytes:
    for place, gone, come in changes:
        at = place % (len(whole) + 1)
        whole = whole[:at] + come + whole[at + gone :]
    return whole


@pytest.mark.parametrize("order", GGUF)
@given(changes=changes)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_gguf_file_is_read_or_refused(
    tmp_path: Path, order: str, changes: list[tuple[int, int, bytes]]
) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(damaged(GGUF[order], changes))
    try:
        model = read_gguf(path)
    except InputError:
        return
    assert 0 <= sum(tensor.stored_bytes for tensor in model.tensors) <= path.stat().st_size
    try:
        spec = load_model(str(path))
    except InputError:
        return
    assert spec.num_layers >= 1


@given(changes=changes)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_safetensors_file_is_read_or_refused(
    tmp_path: Path, changes: list[tuple[int, int, bytes]]
) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(damaged(SAFETENSORS, changes))
    try:
        tensors = read_header(path)
    except InputError:
        return
    (header_bytes,) = struct.unpack("<Q", path.read_bytes()[:8])
    assert sum(tensor.stored_bytes for tensor in tensors) == path.stat().st_size - 8 - header_bytes


def test_the_files_are_whole_before_they_are_damaged(tmp_path: Path) -> None:
    for order, content in GGUF.items():
        path = tmp_path / f"{'little' if order == '<' else 'big'}.gguf"
        path.write_bytes(content)
        model = load_model(str(path))
        assert (model.num_layers, model.num_kv_heads, model.vocab_size) == (2, 2, 4)
    path = tmp_path / "m.safetensors"
    path.write_bytes(SAFETENSORS)
    assert [tensor.stored_bytes for tensor in read_header(path)] == [12, 4]
