"""Scenario files: an engine's settings and step-numbered requests in one JSON object; described in docs/traces.md."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import cast

from kvplan.core.drafts import METHODS, Drafting
from kvplan.core.engine import GroupKind, GroupSpec, SchedulerConfig, StateMode, quoted
from kvplan.core.request import Request
from kvplan.errors import InputError
from kvplan.trace_rows import (
    MAX_TOKENS,
    BadLine,
    content_of,
    id_stands_twice,
    json_object,
    request_id,
    shown,
    token_count,
    whole_number,
)

#: Beyond these a number is a mistake, not a setting.
_MAX_BLOCKS = 10**8
_MAX_GROUPS = 1024
_MAX_DRAFTS = 10**4
_MAX_STAGES = 10**4


def read_scenario(text: str, name: str) -> tuple[SchedulerConfig, list[Request]]:
    """The settings and the requests of a scenario, in its order; raises `InputError` at ``name``."""
    try:
        document = json_object(text)
        config = _settings(document.get("config"))
    except BadLine as bad:
        raise InputError(str(bad), where=name, hint=bad.hint) from bad
    rows = document.get("requests")
    if not isinstance(rows, list):
        raise InputError("requests is missing or no list", where=name, hint="give a list of requests")
    requests = []
    ids: set[str] = set()
    for place, row in enumerate(rows):
        try:
            request = _request(row)
        except BadLine as bad:
            raise InputError(str(bad), where=f"{name}, requests[{place}]", hint=bad.hint) from bad
        if request.id in ids:
            twice = id_stands_twice(request.id)
            raise InputError(str(twice), where=f"{name}, requests[{place}]", hint=twice.hint)
        ids.add(request.id)
        requests.append(request)
    return config, requests


_IGNORED = frozenset({"model_runner"})  # V1 and V2 plan the same where both can


def _settings(config: object) -> SchedulerConfig:
    if not isinstance(config, dict):
        raise BadLine("config is missing or no object", "give the settings of the engine")
    settings = dict(config)
    for key in _IGNORED:
        settings.pop(key, None)
    known = set(SchedulerConfig.__dataclass_fields__)
    for key in settings.keys() - known:
        near = difflib.get_close_matches(key, known, n=1)
        raise BadLine(
            f"unknown setting {quoted(key)}", f"did you mean {near[0]}?" if near else "leave it out"
        )
    for key, kind in _TYPES.items():
        if key in settings and (
            not isinstance(settings[key], kind) or (isinstance(settings[key], bool) and kind is not bool)
        ):
            raise BadLine(f"config.{key} is {shown(settings[key])}", "write a value of the right kind")
    if "groups" in settings:
        settings["groups"] = _groups(settings["groups"])
    if "speculative" in settings:
        settings["speculative"] = _drafting(settings["speculative"])
    try:
        parsed = SchedulerConfig(**settings)
    except TypeError as error:
        missing = ", ".join(re.findall(r"'(\w+)'", str(error)))
        raise BadLine(f"config lacks {missing}", "give every setting of the engine") from error
    for key in ("num_gpu_blocks", "block_size", "max_num_batched_tokens", "max_num_seqs", "max_model_len"):
        if not 0 < getattr(parsed, key) <= (_MAX_BLOCKS if key == "num_gpu_blocks" else MAX_TOKENS):
            raise BadLine(f"config.{key} is {getattr(parsed, key)}", "write a number above 0")
    if parsed.num_gpu_blocks < 2:
        raise BadLine(
            "config.num_gpu_blocks is 1", "write 2 or more: block 0 is the null block and never used"
        )
    if not 0 <= parsed.watermark < 1:
        raise BadLine(f"config.watermark is {parsed.watermark}", "write a share from 0 to below 1")
    if parsed.long_prefill_token_threshold < 0:
        raise BadLine(
            f"config.long_prefill_token_threshold is {parsed.long_prefill_token_threshold}", "write 0 or more"
        )
    if parsed.max_num_active_seqs is not None and parsed.max_num_active_seqs < 1:
        raise BadLine(
            f"config.max_num_active_seqs is {parsed.max_num_active_seqs}", "write null or 1 and more"
        )
    if not 0 < parsed.pipeline_parallel_size <= _MAX_STAGES:
        raise BadLine(
            f"config.pipeline_parallel_size is {parsed.pipeline_parallel_size}",
            f"write a number from 1 to {_MAX_STAGES:,}",
        )
    if parsed.policy not in ("fcfs", "priority"):
        raise BadLine(f"config.policy is {quoted(str(parsed.policy))}", "use fcfs or priority")
    return parsed


_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "num_gpu_blocks": int,
    "block_size": int,
    "max_num_batched_tokens": int,
    "max_num_seqs": int,
    "max_model_len": int,
    "enable_prefix_caching": bool,
    "enable_chunked_prefill": bool,
    "long_prefill_token_threshold": int,
    "long_prefill_token_threshold_adaptive": bool,
    "policy": str,
    "watermark": (int, float),
    "scheduler_reserve_full_isl": bool,
    "max_num_active_seqs": (int, type(None)),
    "groups": list,
    "async_scheduling": bool,
    "pipeline_parallel_size": int,
    "speculative": (dict, type(None)),
}


def _groups(rows: list[object]) -> tuple[GroupSpec, ...]:
    """The groups of a scenario: each a kind with what that kind has."""
    if not 0 < len(rows) <= _MAX_GROUPS:
        raise BadLine(f"config.groups has {len(rows)} entries", f"give 1 to {_MAX_GROUPS}")
    return tuple(map(_group, rows))


def _group(row: object) -> GroupSpec:
    kind = row.get("kind") if isinstance(row, dict) else None
    if not isinstance(row, dict) or not isinstance(kind, str) or kind not in _GROUP_KEYS:
        raise BadLine(f"config.groups holds {shown(row)}", f"kinds are {', '.join(_GROUP_KEYS)}")
    required, optional = _GROUP_KEYS[kind]
    if not required <= row.keys() <= {"kind", *required, *optional}:
        takes = ", ".join(sorted({*required, *optional}))
        raise BadLine(f"config.groups holds {shown(row)}", f"{kind} takes {takes}")

    def number(key: str) -> int | None:
        value = row.get(key)
        if value is not None and not 0 < whole_number(value, key) <= MAX_TOKENS:
            raise BadLine(f"config.groups: {key} is {value}", "write a number above 0")
        return value

    block_size, window, chunk = number("block_size"), number("window") or 0, number("chunk") or 0
    if window == 1:
        raise BadLine("config.groups: window is 1", "a window has 2 tokens or more")
    if kind != "mamba":
        return GroupSpec(cast("GroupKind", kind), block_size, window, chunk)
    mode = row["mode"]
    if mode not in ("none", "align"):
        raise BadLine(f"config.groups: mode is {shown(mode)}", "use none or align")
    return GroupSpec("state", block_size, mode=cast("StateMode", mode), checkpoint=number("checkpoint"))


#: By kind of group: the keys that it must have, and those it may have.
_GROUP_KEYS: Mapping[str, tuple[frozenset[str], frozenset[str]]] = {
    "full": (frozenset(), frozenset({"block_size"})),
    "sliding": (frozenset({"window"}), frozenset({"block_size"})),
    "chunked": (frozenset({"chunk"}), frozenset({"block_size"})),
    "mamba": (frozenset({"mode"}), frozenset({"block_size", "checkpoint"})),
}


def _drafting(row: dict[str, object] | None) -> Drafting | None:
    if row is None:
        return None
    method, count = row.get("method"), whole_number(row.get("k"), "config.speculative.k")
    if not isinstance(method, str) or method not in METHODS or row.keys() != {"method", "k"}:
        raise BadLine(f"config.speculative is {shown(row)}", f"give k and a method: {', '.join(METHODS)}")
    if not 0 < count <= _MAX_DRAFTS:
        raise BadLine(f"config.speculative.k is {count}", f"write a number from 1 to {_MAX_DRAFTS:,}")
    return Drafting(method, count)


_REQUEST_KEYS = frozenset(
    {"id", "arrival_step", "prompt_tokens", "output_tokens", "priority", "content", "abort_step", "abort_mid"}
)


def _request(row: object) -> Request:
    if not isinstance(row, dict):
        raise BadLine(f"a request is {shown(row)}, not an object")
    for key in row.keys() - _REQUEST_KEYS:
        raise BadLine(f"not yet supported: {key}", f"known: {', '.join(sorted(_REQUEST_KEYS))}")
    prompt = whole_number(row.get("prompt_tokens"), "prompt_tokens")
    if not 0 <= prompt <= MAX_TOKENS:
        raise BadLine(f"prompt_tokens is {prompt}")
    arrival = whole_number(row.get("arrival_step"), "arrival_step")
    if not 0 <= arrival <= MAX_TOKENS:
        raise BadLine(f"arrival_step is {arrival}")
    request = Request(
        request_id(row.get("id")),
        arrival,
        prompt,
        token_count(row.get("output_tokens"), "output_tokens"),
        whole_number(row.get("priority", 0), "priority"),
    )
    if "abort_step" in row:
        abort = whole_number(row["abort_step"], "abort_step")
        if not arrival <= abort <= MAX_TOKENS:
            raise BadLine(f"abort_step is {abort}", "write a step from arrival_step on")
        request = request._replace(abort=abort, abort_mid=_flag(row.get("abort_mid", False), "abort_mid"))
    elif "abort_mid" in row:
        raise BadLine("abort_mid without abort_step", "say in which step")
    if "content" in row:
        return request._replace(content=content_of(row["content"], prompt))
    return request


def _flag(value: object, field: str) -> bool:
    if not isinstance(value, bool):
        raise BadLine(f"{field} is {shown(value)}, not true or false")
    return value
