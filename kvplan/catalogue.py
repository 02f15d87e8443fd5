"""Catalogues in YAML: named entries with the lines they stand in.

A catalogue is a mapping from name to entry. Only the entry that is asked for becomes Python values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from kvplan.core.gpu import Gpu, Kernels
from kvplan.errors import InputError, unknown_name
from kvplan.safe_yaml import Node, parse_yaml, read_yaml


class Entry(NamedTuple):
    """One named entry of a catalogue, not yet turned into values."""

    name: str
    file: str
    line: int
    node: Node

    def values(self) -> dict[str, object]:
        """The entry's fields; raises `InputError` at the first that cannot be read."""
        return {name: node.value() for name, node in self.node.mapping(self.name).items()}

    def lines(self) -> dict[str, int]:
        """The line of each field, those of a nested ``text_config`` included; under "" that of the entry."""
        return {"": self.line, **dict(_field_lines(self.node))}

    def texts(self, field: str) -> list[str]:
        """The plain texts under a field: one, several in a list, or none."""
        return self.node.texts_under(field)


def read_catalogue(path: Path) -> tuple[Entry, ...]:
    """The entries of a YAML catalogue, in order. Raises `InputError` naming file and line."""
    return _entries(read_yaml(path, name=path.name), path)


def search_catalogue(path: Path, name: str) -> Entry | None:
    """The entry that `find_entry` would find in a shipped catalogue, of which only few entries are parsed.

    Entries start at the lines that are not indented; one that does not hold the name cannot be meant.
    """
    wanted = name.casefold()
    sections: list[Entry] = []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    starts = [i for i, line in enumerate(lines) if line[:1].strip() not in ("", "#")]
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        text = "".join(lines[start:end])
        if wanted in text.casefold():
            sections += _entries(parse_yaml("\n" * start + text, path.name), path)
    return find_entry(name, sections)


def _entries(root: Node, path: Path) -> tuple[Entry, ...]:
    entries = []
    seen: dict[str, int] = {}
    for name, node in root.mapping("the catalogue").items():
        line = node.key_place.line
        if name.casefold() in seen:
            raise InputError(
                f'duplicate entry "{name}"',
                where=f"{path.name}:{line}",
                hint=f"line {seen[name.casefold()]} has it already",
            )
        seen[name.casefold()] = line
        if not node.is_mapping:
            raise InputError(
                f'entry "{name}" is no mapping of fields',
                where=f"{path.name}:{line}",
                hint="write it as name: {field: value, ...}",
            )
        entries.append(Entry(name, path.name, line, node))
    return tuple(entries)


def _field_lines(node: Node) -> Iterator[tuple[str, int]]:
    for name, value in node.mapping("the entry").items():
        if name == "text_config" and value.is_mapping:
            yield from _field_lines(value)
        yield name, value.key_place.line


def check_fields(
    values: Mapping[str, object], known: frozenset[str], origin: str, lines: Mapping[str, int]
) -> None:
    """Refuses a field that no reader looks at: it would be a misspelling without effect."""
    for name in values:
        if name not in known:
            file = origin.partition(":")[0]
            raise unknown_name(
                "field",
                name,
                known,
                where=f"{file}:{lines[name]}" if name in lines else origin,
                listing="the header of the shipped catalogue",
            )


#: Fields of a GPU entry: whole numbers above 0, texts, and lists of texts. All but ``vendor``,
#: ``architecture`` and ``source`` may be null or absent.
_GPU_NUMBERS = (
    "memory_bytes",
    "marketed_gb",
    "bandwidth_bytes_per_s",
    "flops_fp16",
    "flops_fp8",
    "interconnect_bytes_per_s",
    "num_sms",
    "tdp_w",
)
_GPU_TEXTS = ("vendor", "architecture", "memory_source", "compute_capability", "source", "kernels_like")
_GPU_LISTS = ("aliases", "unverified")
_GPU_FIELDS = frozenset((*_GPU_NUMBERS, *_GPU_TEXTS, *_GPU_LISTS, "kernels"))
_MAX_GPU_NUMBER = 10**18


def gpu_from_entry(entry: Entry) -> Gpu:
    """The GPU of a catalogue entry. Raises `InputError` naming file and line."""
    values, lines = entry.values(), entry.lines()
    place = f"{entry.file}:{entry.line}"
    check_fields(values, _GPU_FIELDS, place, lines)

    def whole(name: str) -> int | None:
        value = values.get(name)
        # 1e12 is how a rate is best written, and YAML takes it for a float.
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if value is None or (type(value) is int and 0 < value <= _MAX_GPU_NUMBER):
            return value
        raise wrong(name, "a whole number above 0")

    def text(name: str) -> str | None:
        value = values.get(name)
        if value is None or isinstance(value, str):
            return value
        raise wrong(name, "text in quotes")

    def required(name: str) -> str:
        value = text(name)
        if not value:
            raise InputError(f"{name} is missing", where=place, hint=f"add a line {name}: ...")
        return value

    def texts(name: str) -> tuple[str, ...]:
        value = values.get(name)
        if value is None or (isinstance(value, list) and all(isinstance(item, str) for item in value)):
            return tuple(value or ())
        raise wrong(name, "a list of texts")

    def wrong(name: str, wanted: str) -> InputError:
        return InputError(
            f'{name} is "{values[name]}", not {wanted}',
            where=f'{entry.file}:{lines[name]}, GPU "{entry.name}"',
            hint=f"write {wanted}, or null if it is unknown",
        )

    return Gpu(
        name=entry.name,
        vendor=required("vendor"),
        architecture=required("architecture"),
        memory_bytes=whole("memory_bytes"),
        memory_source=text("memory_source"),
        marketed_gb=whole("marketed_gb"),
        bandwidth_bytes_per_s=whole("bandwidth_bytes_per_s"),
        flops_fp16=whole("flops_fp16"),
        flops_fp8=whole("flops_fp8"),
        interconnect_bytes_per_s=whole("interconnect_bytes_per_s"),
        compute_capability=text("compute_capability"),
        num_sms=whole("num_sms"),
        tdp_w=whole("tdp_w"),
        source=required("source"),
        aliases=texts("aliases"),
        unverified=texts("unverified"),
        kernels=None if values.get("kernels") is None else _kernels(values["kernels"], lines, entry),
        kernels_like=text("kernels_like"),
    )


def _kernels(block: object, lines: Mapping[str, int], entry: Entry) -> Kernels:
    """What kernels reached. Raises `InputError`."""
    place = f'{entry.file}:{lines["kernels"]}, GPU "{entry.name}"'
    if not isinstance(block, dict) or not isinstance(block.get("source"), str):
        raise InputError(
            "kernels is no mapping with a source", where=place, hint="say where the figures are from"
        )
    for name, value in block.items():
        if name not in Kernels._fields:
            raise unknown_name("field of kernels", str(name), Kernels._fields, where=place)
        if name != "source" and (type(value) is not float or not 0 < value <= 2):
            raise InputError(
                f'{name} is "{value}", no share or seconds',
                where=place,
                hint="write a number above 0, such as 0.8 or 4.0e-6",
            )
    return Kernels(**block)


def find_entry(name: str, entries: Sequence[Entry]) -> Entry | None:
    """The entry of a name, an alias or a Hugging Face id, whatever the case."""
    wanted = name.casefold()
    for entry in entries:
        if entry.name.casefold() == wanted:
            return entry
    for entry in entries:
        others = (*entry.texts("aliases"), *entry.texts("hf_id"))
        if any(other.casefold() == wanted for other in others):
            return entry
    return None


def entry_names(entries: Sequence[Entry]) -> list[str]:
    """Every name under which `find_entry` finds something."""
    return [
        name for entry in entries for name in (entry.name, *entry.texts("aliases"), *entry.texts("hf_id"))
    ]
