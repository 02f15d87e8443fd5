"""What an engine measured when it started, kept in a small YAML file for later estimates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple, TextIO, get_args, get_type_hints

from kvplan.errors import InputError, unknown_name
from kvplan.safe_yaml import read_yaml

#: The form of the file; another one is refused.
_VERSION = 1
_VERSION_KEY = "kvplan_calibration"
_MAX_NUMBER = 1 << 60


class Calibration(NamedTuple):
    """Memory that one start of an engine measured, in bytes on one GPU, and the settings that it holds for.

    None is unknown. ``overhead_bytes`` is what of the budget (memory x utilization) was neither weights nor KV: the
    sum that decides how much is left, even where its parts are not printed. ``source`` is file and line of the log.
    """

    engine: str
    version: str | None
    model: str
    source: str
    gpu: str | None = None
    gpu_memory_bytes: int | None = None
    gpu_memory_utilization: float | None = None
    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    data_parallel_size: int | None = None
    dtype: str | None = None
    quantization: str | None = None
    kv_cache_dtype: str | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    enforce_eager: bool | None = None
    weights_bytes: int | None = None
    activations_bytes: int | None = None
    cuda_graphs_bytes: int | None = None
    runtime_bytes: int | None = None
    overhead_bytes: int | None = None
    kv_memory_bytes: int | None = None


def save_calibration(file: TextIO, calibration: Calibration) -> None:
    """Write a calibration as YAML, a line each field that is known."""
    file.write(f"{_VERSION_KEY}: {_VERSION}\n")
    for name, value in calibration._asdict().items():
        if value is not None:
            file.write(f"{name}: {json.dumps(value, allow_nan=False)}\n")


def load_calibration(path: Path) -> Calibration:
    """The calibration of a file that `save_calibration` wrote. Raises `InputError` at the first wrong field."""
    fields = read_yaml(path).mapping("the calibration")
    values: dict[str, Any] = {name: node.value() for name, node in fields.items()}
    version = values.pop(_VERSION_KEY, None)
    if version != _VERSION or isinstance(version, bool):
        raise InputError(
            "the file is no calibration" if version is None else f"unknown form of calibration: {version}",
            where=str(fields[_VERSION_KEY].key_place) if version is not None else str(path),
            hint="give a file that kvplan audit LOG --save-calibration FILE wrote",
        )
    hints = get_type_hints(Calibration)
    for name, written in values.items():
        where = str(fields[name].key_place)
        if name not in hints:
            raise unknown_name("field of a calibration", name, hints, where=where)
        kinds = get_args(hints[name]) or (hints[name],)
        value = float(written) if float in kinds and type(written) is int else written
        values[name] = value
        if type(value) not in kinds or (type(value) in (int, float) and not 0 <= value <= _MAX_NUMBER):
            raise InputError(
                f'{name} is "{value}", not {_WANTED[kinds[0]]}', where=where, hint="leave out what is unknown"
            )
    for name in ("engine", "model", "source"):
        if not values.get(name):
            raise InputError(f"{name} is missing", where=str(path), hint=f"add a line {name}: ...")
    return Calibration(**{"version": None, **values})


_WANTED = {str: "a text", int: "a whole number from 0 on", float: "a number from 0 on", bool: "true or false"}
