"""Options that several commands share, and how parsed values become option objects."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, TypeVar

import typer

from kvplan import __version__
from kvplan.options import ServingOptions
from kvplan.text import literal
from kvplan.units import parse_count

Engine = Annotated[
    str | None, typer.Option("--engine", metavar="NAME[@VERSION]", help="Whose rules: vllm or vllm@0.33.")
]
Gpu = Annotated[
    str | None, typer.Option("--gpu", metavar="NAME", help="A GPU of the catalogue, or 8xNAME for eight.")
]
GpuMemory = Annotated[
    str | None, typer.Option("--gpu-memory", metavar="SIZE", help="Memory of each GPU, such as 80GiB.")
]
KvCacheMemoryBytes = Annotated[
    str | None,
    typer.Option(
        "--kv-cache-memory-bytes", metavar="SIZE", help="Memory for KV on each GPU, instead of a budget."
    ),
]
TensorParallelSize = Annotated[
    int | None, typer.Option("--tensor-parallel-size", "-tp", help="Ranks that share each layer.")
]
Dtype = Annotated[
    str | None, typer.Option("--dtype", help="Of weights and activations; auto is the model's own.")
]
KvCacheDtype = Annotated[
    str | None, typer.Option("--kv-cache-dtype", help="Of the KV cache; auto is that of the weights.")
]
BlockSize = Annotated[int | None, typer.Option("--block-size", help="Tokens in a block (16).")]
GpuMemoryUtilization = Annotated[
    float | None,
    typer.Option("--gpu-memory-utilization", help="Share of the memory that the engine may use (0.92)."),
]
NumGpuBlocksOverride = Annotated[
    int | None, typer.Option("--num-gpu-blocks-override", help="Number of blocks, instead of a budget.")
]
MaxModelLen = Annotated[
    str | None,
    typer.Option(
        "--max-model-len", metavar="N|auto", help="Longest sequence served (the model's own maximum)."
    ),
]
MaxNumSeqs = Annotated[int | None, typer.Option("--max-num-seqs", help="Most sequences in a step.")]
MaxNumBatchedTokens = Annotated[
    int | None, typer.Option("--max-num-batched-tokens", help="Most tokens in a step.")
]
EnforceEager = Annotated[
    bool | None, typer.Option("--enforce-eager", help="No CUDA graphs.", show_default=False)
]
Margin = Annotated[
    str | None,
    typer.Option("--margin", help="Which end of the estimated overhead decides: low, mid or high."),
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a field of the model; repeatable."),
]
Models = Annotated[
    str | None,
    typer.Option("--models", metavar="FILE", help="A catalogue instead of the shipped models.yaml."),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
VllmCommand = Annotated[
    str | None,
    typer.Option(
        "--vllm-command", metavar="COMMAND", help='Model and flags of a command such as "vllm serve ...".'
    ),
]
IgnoreFlag = Annotated[
    list[str] | None,
    typer.Option("--ignore-flag", metavar="NAME", help="Leave out this flag of --vllm-command; repeatable."),
]

_Options = TypeVar("_Options", bound=ServingOptions)


def from_params(kind: type[_Options], params: Mapping[str, object]) -> _Options:
    """The option object of a command's parsed values."""
    values = {item.name: params.get(item.name) for item in fields(kind)}
    if isinstance(values["set"], list):
        values["set"] = tuple(values["set"])
    if values["max_model_len"] is not None:
        values["max_model_len"] = _length(str(values["max_model_len"]))
    return kind.of(values)


def _length(text: str) -> int | str:
    return text if text == "auto" else parse_count(text, where="--max-model-len")


def print_json(document: Mapping[str, object]) -> None:
    """The one document that --json prints."""
    body = {"schema_version": 1, "kvplan_version": __version__, **document}
    sys.stdout.write(json.dumps(body, indent=2, allow_nan=False) + "\n")


def warn(text: str) -> None:
    """A warning for the reader, on stderr."""
    sys.stderr.write(f"kvplan: warning: {literal(text)}\n")
