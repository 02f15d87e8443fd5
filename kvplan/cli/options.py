"""Options that several commands share, and how parsed values become option objects."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from kvplan import __version__
from kvplan.options import ServingOptions, read_option
from kvplan.text import literal

Engine = Annotated[
    str | None,
    typer.Option(
        "--engine", metavar="NAME[@VERSION]", help="Whose rules, such as vllm@0.24 (the newest vllm)."
    ),
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
    str | None,
    typer.Option("--tensor-parallel-size", "-tp", metavar="N", help="Ranks that share each layer."),
]
PipelineParallelSize = Annotated[
    str | None,
    typer.Option("--pipeline-parallel-size", "-pp", metavar="N", help="Stages that share out the layers."),
]
DataParallelSize = Annotated[
    str | None,
    typer.Option("--data-parallel-size", "-dp", metavar="N", help="Replicas; they share out routed experts."),
]
DecodeContextParallelSize = Annotated[
    str | None,
    typer.Option(
        "--decode-context-parallel-size",
        "-dcp",
        metavar="N",
        help="Ranks that share out the tokens of a sequence.",
    ),
]
EnableExpertParallel = Annotated[
    bool | None,
    typer.Option("--enable-expert-parallel", help="Whole experts on each rank.", show_default=False),
]
Quantization = Annotated[
    str | None,
    typer.Option("--quantization", "-q", metavar="METHOD", help="How weights are quantized (the model's)."),
]
MambaCacheDtype = Annotated[
    str | None, typer.Option("--mamba-cache-dtype", help="Of the states of hybrid models (auto).")
]
MambaSsmCacheDtype = Annotated[
    str | None, typer.Option("--mamba-ssm-cache-dtype", help="Of their recurrent part (auto).")
]
EnablePrefixCaching = Annotated[
    bool | None,
    typer.Option("--enable-prefix-caching/--no-enable-prefix-caching", help="Reuse equal prefixes (on)."),
]
DisableHybridKvCacheManager = Annotated[
    bool | None,
    typer.Option(
        "--disable-hybrid-kv-cache-manager/--no-disable-hybrid-kv-cache-manager",
        help="Keep all tokens of windows too (off).",
    ),
]
AsyncScheduling = Annotated[
    bool | None,
    typer.Option("--async-scheduling/--no-async-scheduling", help="Two batches in flight (the engine's)."),
]
NumSpeculativeTokens = Annotated[
    str | None,
    typer.Option("--num-speculative-tokens", metavar="N", help="Tokens that a draft proposes (none)."),
]
SpeculativeMethod = Annotated[
    str | None,
    typer.Option("--speculative-method", metavar="NAME", help="How: mtp, eagle3, draft_model, ngram, ..."),
]
SpeculativeModel = Annotated[
    str | None, typer.Option("--speculative-model", metavar="MODEL", help="The draft model.")
]
EnableLora = Annotated[
    bool | None, typer.Option("--enable-lora", help="Keep slots for LoRA adapters.", show_default=False)
]
MaxLoras = Annotated[str | None, typer.Option("--max-loras", metavar="N", help="Adapters in a batch (1).")]
MaxLoraRank = Annotated[str | None, typer.Option("--max-lora-rank", metavar="N", help="Their rank (16).")]
Dtype = Annotated[
    str | None, typer.Option("--dtype", help="Of weights and activations; auto is the model's own.")
]
KvCacheDtype = Annotated[
    str | None, typer.Option("--kv-cache-dtype", help="Of the KV cache; auto is that of the weights.")
]
BlockSize = Annotated[str | None, typer.Option("--block-size", metavar="N", help="Tokens in a block (16).")]
GpuMemoryUtilization = Annotated[
    str | None,
    typer.Option(
        "--gpu-memory-utilization",
        metavar="SHARE",
        help="Share of the memory that the engine may use (0.92).",
    ),
]
NumGpuBlocksOverride = Annotated[
    str | None,
    typer.Option("--num-gpu-blocks-override", metavar="N", help="Number of blocks, instead of a budget."),
]
MaxModelLen = Annotated[
    str | None,
    typer.Option(
        "--max-model-len", metavar="N|auto", help="Longest sequence served (the model's own maximum)."
    ),
]
MaxNumSeqs = Annotated[
    str | None, typer.Option("--max-num-seqs", metavar="N", help="Most sequences in a step.")
]
MaxNumBatchedTokens = Annotated[
    str | None, typer.Option("--max-num-batched-tokens", metavar="N", help="Most tokens in a step.")
]
EnforceEager = Annotated[
    bool | None, typer.Option("--enforce-eager", help="No CUDA graphs.", show_default=False)
]
Margin = Annotated[
    str | None,
    typer.Option("--margin", help="Which end of the estimated overhead decides: low, mid or high."),
]
Calibration = Annotated[
    str | None,
    typer.Option(
        "--calibration",
        metavar="FILE",
        help="What was measured, kept by kvplan audit or kvplan calibrate, instead of the estimate.",
    ),
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
From = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="FILE[#NAME]",
        help="Model and flags of a script, compose file, manifest or vLLM config; - is standard input.",
    ),
]
IgnoreFlag = Annotated[
    list[str] | None,
    typer.Option(
        "--ignore-flag", metavar="NAME", help="Leave out this flag of the vLLM command; repeatable."
    ),
]

_Options = TypeVar("_Options", bound=ServingOptions)


class LightCommand(TyperCommand):
    """A command whose options cost nothing unless there is something to be read.

    Typer validates each value with pydantic, which takes as long to import as the rest of Typer. Options that were
    left out and plain texts need none of it; numbers are read by `from_params`.
    """

    def get_params(self, ctx: Any) -> list[Any]:
        """The parameters, those that Typer adds included."""
        return _made_light(super().get_params(ctx))


class LightGroup(TyperGroup):
    """The application itself, with options as light."""

    def get_params(self, ctx: Any) -> list[Any]:
        """The parameters, those that Typer adds included."""
        return _made_light(super().get_params(ctx))


def _made_light(parameters: list[Any]) -> list[Any]:
    for parameter in parameters:
        if type(parameter) is TyperOption:
            parameter.__class__ = _LightOption
        elif type(parameter) is TyperArgument:
            parameter.__class__ = _LightArgument
    return parameters


def _is_text(parameter: Any, value: Any) -> bool:
    """Whether ``value`` is what the parameter asks for as it is; never where Typer does not say what that is."""
    kind = getattr(getattr(parameter, "type_descriptor", None), "annotation", None)
    many = parameter.multiple or parameter.nargs == -1
    if many:
        return kind == list[str] and bool(value) and all(isinstance(item, str) for item in value)
    return kind is str and isinstance(value, str)


class _LightOption(TyperOption):
    def process_value(self, ctx: Any, value: Any) -> Any:
        """An option that was left out, or is a text, needs no reading."""
        if value is None and self.default is None and not self.required:
            return None
        return value if _is_text(self, value) and not self.callback else super().process_value(ctx, value)


class _LightArgument(TyperArgument):
    def process_value(self, ctx: Any, value: Any) -> Any:
        """An argument that is a text needs no reading."""
        return value if _is_text(self, value) and not self.callback else super().process_value(ctx, value)


def from_params(kind: type[_Options], params: Mapping[str, object]) -> _Options:
    """The option object of a command's parsed values; numbers come as text and are read here."""
    values: dict[str, object] = {}
    for item in fields(kind):
        value = params.get(item.name)
        if isinstance(value, str):
            value = read_option(kind, item.name, value)
        values[item.name] = tuple(value) if isinstance(value, list) else value
    return kind.of(values)


def print_json(document: Mapping[str, object]) -> None:
    """The one document that --json prints."""
    body = {"schema_version": 1, "kvplan_version": __version__, **document}
    sys.stdout.write(json.dumps(body, indent=2, allow_nan=False) + "\n")


def warn(text: str) -> None:
    """A warning for the reader, on stderr."""
    sys.stderr.write(f"kvplan: warning: {literal(text)}\n")
