"""Reading a ``vllm serve`` command line as options of kvplan. Nothing of it is executed."""

from __future__ import annotations

import difflib
import re
import shlex
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import NamedTuple

from kvplan.errors import InputError
from kvplan.options import ServingOptions
from kvplan.units import parse_count


class VllmCommand(NamedTuple):
    """Model and options of a command, and what was left out of it on purpose."""

    model: str
    values: Mapping[str, object]
    ignored: tuple[str, ...]

    def fill(self, options: ServingOptions, origins: dict[str, str] | None = None) -> dict[str, str]:
        """Set every option that is not given yet; returns where each came from.

        A flag that the job does not have (scheduling, in ``size``) changes nothing there and is passed over.
        """
        origins = {} if origins is None else origins
        known = {item.name for item in fields(options)}
        for name, value in self.values.items():
            if name in known and getattr(options, name) is None:
                options.set_option(name, value)
                origins[name] = "vllm command"
        return origins


def read_command(text: str, *, ignored_flags: Sequence[str] = ()) -> VllmCommand:
    """Model and options of a command such as ``vllm serve MODEL --tensor-parallel-size 2``.

    A flag that may change memory and that kvplan does not handle raises `InputError`, unless it is in
    ``ignored_flags``; harmless ones are listed in ``ignored``.
    """
    words = deque(_split(text))
    ignore = {_canonical(name) for name in ignored_flags}
    model: str | None = None
    values: dict[str, object] = {}
    ignored: list[str] = []
    while words:
        word = words.popleft()
        if not word.startswith("-") or word == "-":
            model = _one_model(model, word)
            continue
        name, equals, inline = word.partition("=")
        flag = _canonical(name)
        if flag in _SWITCHES or flag in _HARMLESS_SWITCHES:
            if equals:
                raise InputError(f"{name} takes no value", where="--vllm-command", hint=f"write {name} alone")
            if flag in _SWITCHES and flag not in ignore:
                option, on = _SWITCHES[flag]
                values[option] = on
            else:
                ignored.append(name)
            continue
        known = flag in _VALUES or flag in _HARMLESS_VALUES or flag in _ONLY_ONE or flag == "--model"
        if not known and flag not in ignore:
            raise _unhandled(name, flag)
        value = inline if equals else _next_value(words, name, required=known, model_follows=model is None)
        if flag in ignore or flag in _HARMLESS_VALUES:
            ignored.append(name)
            while flag in _MANY_VALUES and model is not None and words and not words[0].startswith("-"):
                words.popleft()
        elif flag in _VALUES:
            option, convert = _VALUES[flag]
            values[option] = convert(value, name)
        elif flag == "--model":
            model = _one_model(model, value)
        elif value == "1":
            ignored.append(f"{name} 1")
        else:
            raise _unhandled(name, flag)
    if model is None:
        raise InputError(
            "the command names no model", where="--vllm-command", hint='write "vllm serve MODEL ..."'
        )
    return VllmCommand(model, values, tuple(ignored))


def _one_model(model: str | None, word: str) -> str:
    if model is not None:
        raise InputError(
            f'"{word}" is a second model', where="--vllm-command", hint="quote values with spaces"
        )
    return word


def _next_value(words: deque[str], name: str, *, required: bool, model_follows: bool) -> str:
    """The value of a flag; of an unknown one, whether it has one is told from what follows."""
    is_flag = [word.startswith("-") for word in words]
    if not required:
        # A word before the next flag is its value, unless it is the only one left to be the model.
        if not words or is_flag[0] or (model_follows and (len(words) < 2 or is_flag[1])):
            return ""
    elif not words:
        raise InputError(f"{name} has no value", where="--vllm-command", hint=f"write {name} VALUE")
    return words.popleft()


def _split(text: str) -> list[str]:
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise InputError(
            f"the command cannot be read: {error}", where="--vllm-command", hint="close the quotes"
        ) from error
    while words and re.match(r"[A-Za-z_][A-Za-z0-9_]*=", words[0]):  # environment before the command
        words.pop(0)
    if words[:2] == ["vllm", "serve"]:
        return words[2:]
    if words[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]:
        return words[3:]
    raise InputError(
        f'"{text.strip()[:60]}" is no vllm command',
        where="--vllm-command",
        hint='write "vllm serve MODEL ..."',
    )


def _canonical(name: str) -> str:
    name = _SHORT.get(name, name)
    return "--" + name.lstrip("-").replace("_", "-")


def _unhandled(name: str, flag: str) -> InputError:
    known = [*_VALUES, *_SWITCHES, *_HARMLESS_VALUES, *_HARMLESS_SWITCHES, "--model"]
    near = difflib.get_close_matches(flag, known, n=1, cutoff=0.8)
    hint = f"pass --ignore-flag {flag.lstrip('-')} if it does not matter here"
    return InputError(
        f"{name} is not handled and may change memory",
        where="--vllm-command",
        hint=f"did you mean {near[0]}? Else {hint}" if near else hint,
    )


def _whole(text: str, name: str) -> int:
    return parse_count(text, where=f"--vllm-command, {name}")


def _length(text: str, name: str) -> int | str:
    return "auto" if text in ("auto", "-1") else _whole(text, name)


def _share(text: str, name: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise InputError(
            f'{name} is "{text}", not a number', where="--vllm-command", hint="write 0.9"
        ) from error


def _text(text: str, _name: str) -> str:
    return text


#: Flags that kvplan handles, by vLLM 0.33's engine/arg_utils.py: option and how its value is read.
_VALUES: Mapping[str, tuple[str, Callable[[str, str], object]]] = {
    "--tensor-parallel-size": ("tensor_parallel_size", _whole),
    "--dtype": ("dtype", _text),
    "--kv-cache-dtype": ("kv_cache_dtype", _text),
    "--block-size": ("block_size", _whole),
    "--gpu-memory-utilization": ("gpu_memory_utilization", _share),
    "--kv-cache-memory-bytes": ("kv_cache_memory_bytes", _whole),
    "--num-gpu-blocks-override": ("num_gpu_blocks_override", _whole),
    "--max-model-len": ("max_model_len", _length),
    "--max-num-seqs": ("max_num_seqs", _whole),
    "--max-num-batched-tokens": ("max_num_batched_tokens", _whole),
    "--long-prefill-token-threshold": ("long_prefill_token_threshold", _whole),
    "--scheduling-policy": ("scheduling_policy", _text),
}
_SWITCHES: Mapping[str, tuple[str, bool]] = {
    "--enforce-eager": ("enforce_eager", True),
    "--no-enforce-eager": ("enforce_eager", False),
    "--enable-prefix-caching": ("enable_prefix_caching", True),
    "--no-enable-prefix-caching": ("enable_prefix_caching", False),
    "--enable-chunked-prefill": ("enable_chunked_prefill", True),
    "--no-enable-chunked-prefill": ("enable_chunked_prefill", False),
}
_SHORT = {"-tp": "--tensor-parallel-size", "-pp": "--pipeline-parallel-size", "-dp": "--data-parallel-size"}
#: Degrees of parallelism that are handled only where they do nothing.
_ONLY_ONE = frozenset({"--pipeline-parallel-size", "--data-parallel-size", "--decode-context-parallel-size"})
#: Flags of the API server and of logging: no effect on memory.
_HARMLESS_VALUES = frozenset(
    {
        "--host",
        "--port",
        "--uvicorn-log-level",
        "--api-key",
        "--served-model-name",
        "--tokenizer",
        "--tokenizer-mode",
        "--revision",
        "--tokenizer-revision",
        "--code-revision",
        "--chat-template",
        "--chat-template-content-format",
        "--response-role",
        "--tool-call-parser",
        "--reasoning-parser",
        "--generation-config",
        "--download-dir",
        "--load-format",
        "--seed",
        "--root-path",
        "--ssl-keyfile",
        "--ssl-certfile",
        "--ssl-ca-certs",
        "--allowed-origins",
        "--allowed-methods",
        "--allowed-headers",
        "--middleware",
        "--max-log-len",
        "--otlp-traces-endpoint",
        "--distributed-executor-backend",
    }
)
#: Of these, flags that take several values.
_MANY_VALUES = frozenset({"--served-model-name", "--middleware"})
_HARMLESS_SWITCHES = frozenset(
    {
        "--trust-remote-code",
        "--disable-log-stats",
        "--disable-log-requests",
        "--enable-log-requests",
        "--disable-uvicorn-access-log",
        "--enable-auto-tool-choice",
        "--enable-request-id-headers",
        "--disable-fastapi-docs",
        "--allow-credentials",
        "--enable-server-load-tracking",
        "--enable-prompt-tokens-details",
        "--return-tokens-as-token-ids",
    }
)
