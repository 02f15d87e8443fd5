"""YAML as plain values with their places. Nothing in a file can build an object.

A file is parsed into nodes once; a node becomes Python values only when asked. Values are what JSON has, and
numbers are decimal: any other tag, a duplicate key or an alias that contains itself is refused with file:line.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import yaml

from kvplan.errors import InputError, unreadable

# The C parser is some ten times faster; PyYAML may be built without it.
_Loader: type = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

#: No file that kvplan reads as YAML is that large, and each MiB may take a second and 120 MiB of memory.
_MAX_BYTES = 2 << 20

#: Values that one entry may hold.
_MAX_VALUES = 100_000

_TAG = "tag:yaml.org,2002:"
_WHOLE_NUMBER = re.compile(r"[-+]?(?:0|[1-9][0-9_]{0,30})\Z")
_TRUTH = {"true": True, "false": False, "yes": True, "no": False, "on": True, "off": False}


class Place(NamedTuple):
    """Where something stands in a file; line and column count from 1."""

    file: str
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


class Node(NamedTuple):
    """A value in a file, not yet turned into Python values, and the place of its key if it has one."""

    place: Place
    key_place: Place
    raw: yaml.Node

    def value(self) -> object:
        """The whole value; raises `InputError` at the first part that cannot be read."""
        try:
            return _Reader(self.place.file).value(self.raw, ())
        except RecursionError as error:
            raise InputError(
                "the value is nested too deeply", where=str(self.place), hint="write it flatter"
            ) from error

    def mapping(self, what: str) -> dict[str, Node]:
        """The fields of a mapping; ``what`` names it in the error if it is none."""
        if not isinstance(self.raw, yaml.MappingNode):
            raise InputError(
                f"{what} is no mapping", where=str(self.place), hint="write it as key: value lines"
            )
        if self.raw.tag != f"{_TAG}map":
            raise _bad_tag(self.raw, str(self.place))
        file = self.place.file
        fields: dict[str, Node] = {}
        for key_node, value_node in self.raw.value:
            key = _key(key_node, file)
            if key in fields:
                raise InputError(
                    f'duplicate key "{key[:60]}"',
                    where=str(_place(key_node, file)),
                    hint="keep one of the two",
                )
            fields[key] = Node(_place(value_node, file), _place(key_node, file), value_node)
        return fields

    def sequence(self, what: str) -> list[Node]:
        """The items of a list; ``what`` names it in the error if it is none."""
        if isinstance(self.raw, yaml.SequenceNode) and self.raw.tag != f"{_TAG}seq":
            raise _bad_tag(self.raw, str(self.place))
        if not isinstance(self.raw, yaml.SequenceNode):
            raise InputError(f"{what} is no list", where=str(self.place), hint="write its items as - lines")
        file = self.place.file
        return [Node(_place(item, file), _place(item, file), item) for item in self.raw.value]

    def texts_under(self, field: str) -> list[str]:
        """The plain texts under a field of a mapping: one, several in a list, or none.

        Unlike `mapping` this looks no further and refuses nothing: it is for searching many entries.
        """
        if isinstance(self.raw, yaml.MappingNode):
            for key, value in self.raw.value:
                if isinstance(key, yaml.ScalarNode) and key.value == field:
                    items = value.value if isinstance(value, yaml.SequenceNode) else [value]
                    return [item.value for item in items if isinstance(item, yaml.ScalarNode)]
        return []

    @property
    def is_mapping(self) -> bool:
        """Whether the value has fields."""
        return isinstance(self.raw, yaml.MappingNode)

    @property
    def is_sequence(self) -> bool:
        """Whether the value is a list."""
        return isinstance(self.raw, yaml.SequenceNode)

    @property
    def text(self) -> str | None:
        """A plain value as it is written, whatever it would be read as; None for lists and mappings."""
        return str(self.raw.value) if isinstance(self.raw, yaml.ScalarNode) else None

    def locate(self, lines: Sequence[str]) -> Callable[[int], Place]:
        """Places of offsets in `text`; ``lines`` are those of the file.

        Text and file are walked side by side: they differ in blanks, quotes and escapes only, in every style.
        """
        offsets, places = [0], [self.place]
        at_start = True
        source = _written(self.raw, lines)
        for offset, char in enumerate(self.text or ""):
            if char.isspace():
                at_start = True
                continue
            written, line, column = next(source, ("", 0, 0))
            if written != char:
                break
            if at_start:
                offsets.append(offset)
                places.append(Place(self.place.file, line + 1, column + 1))
                at_start = False

        def locate(offset: int) -> Place:
            return places[bisect_right(offsets, offset) - 1]

        return locate


def read_yaml(path: Path, *, name: str | None = None) -> Node:
    """The one document of a file, called ``name`` in errors. Raises `InputError` naming file and line."""
    file = name or str(path)
    try:
        if not path.is_file() and not path.is_dir() and path.exists():  # would be read for ever
            raise InputError(
                "it is a pipe or a device, no file", where=file, hint="write it to a file, and give that"
            )
        if path.stat().st_size > _MAX_BYTES:
            raise InputError(f"the file is larger than {_MAX_BYTES >> 20} MiB", where=file, hint="split it")
        raw = path.read_bytes()
    except OSError as error:
        raise unreadable(error, where=file) from error
    return parse_yaml(decode(raw, file), file)


def parse_yaml(text: str, file: str) -> Node:
    """The one document of a text, whose file is called ``file`` in errors; raises `InputError` naming its line."""
    root = _compose(text, file)
    if root is None:
        raise InputError("the file is empty", where=file, hint="write at least one entry")
    place = _place(root, file)
    return Node(place, place, root)


def parse_documents(text: str, file: str) -> list[Node]:
    """The documents of a text that ``---`` separates, empty ones left out; raises `InputError` naming file and line."""
    nodes: list[Node] = []
    with _yaml_errors(file):
        for root in yaml.compose_all(text, Loader=_Loader):
            place = _place(root, file) if root is not None else Place(file, 1, 1)
            if root is not None and not (isinstance(root, yaml.ScalarNode) and root.tag == f"{_TAG}null"):
                nodes.append(Node(place, place, root))
    return nodes


def decode(raw: bytes, file: str) -> str:
    """The text of a file; raises `InputError` naming the line that is not UTF-8."""
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise InputError(
            f"not UTF-8: byte 0x{raw[error.start]:02x}", where=f"{file}:{line}", hint="save the file as UTF-8"
        ) from error


def parse_scalar(text: str, *, where: str) -> object:
    """The value of a YAML scalar such as ``8``, ``true``, ``null`` or a word."""
    try:
        node = _compose(text, where) if text.strip() else None
    except InputError:
        node = None  # what YAML finds wrong with it says less than what was asked for
    if not isinstance(node, yaml.ScalarNode):
        raise InputError(
            f'"{text[:60]}" is no single value', where=where, hint="write a number, a word or true"
        )
    return _scalar(node, where)


def parse_value(text: str, *, where: str) -> object:
    """The value of YAML on one line: a scalar, as `parse_scalar` reads it, or what stands in braces or brackets."""
    if not text.lstrip().startswith(("{", "[")):
        return parse_scalar(text, where=where)
    try:
        root = _compose(text, where)
    except InputError as error:
        raise InputError(f'"{text}" is no value', where=where, hint="close the brackets") from error
    assert root is not None, "the text is not empty"
    place = Place(where, 1, 1)
    return Node(place, place, root).value()


def _compose(text: str, file: str) -> yaml.Node | None:
    with _yaml_errors(file):
        node: yaml.Node | None = yaml.compose(text, Loader=_Loader)
    return node


@contextmanager
def _yaml_errors(file: str) -> Iterator[None]:
    """Turn what PyYAML finds wrong into our own errors."""
    try:
        yield
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{file}:{mark.line + 1}:{mark.column + 1}" if mark else file
        problem = getattr(error, "problem", None) or str(error)
        raise InputError(
            f"not YAML: {problem}", where=where, hint="mend the line, or the one before it"
        ) from error
    except RecursionError as error:
        raise InputError("the file is nested too deeply", where=file, hint="write it flatter") from error


def _written(node: yaml.Node, lines: Sequence[str]) -> Iterator[tuple[str, int, int]]:
    """Each character of a scalar that is no blank, as the file has it, with line and column from 0."""
    style = node.style if isinstance(node, yaml.ScalarNode) else None
    first, column = node.start_mark.line, node.start_mark.column
    if style in ("|", ">"):  # what stands beside the sign is no content
        first, column = first + 1, 0
    elif style in ("'", '"'):
        column += 1
    for number in range(first, min(node.end_mark.line + 1, len(lines))):
        line = lines[number]
        while column < len(line):
            char = line[column]
            if style == '"' and char == "\\":
                column += 1
                char = line[column : column + 1]
                char = "" if char in "abefnrtv0" else char
            elif style == "'" and line.startswith("''", column):
                column += 1
            if char and not char.isspace():
                yield char, number, column
            column += 1
        column = 0


class _Reader:
    """Turns nodes into values, up to a number of them: aliases of aliases can stand for billions."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._left = _MAX_VALUES

    def value(self, node: yaml.Node, outer: tuple[yaml.Node, ...]) -> object:
        """The value of a node that stands inside the nodes ``outer``."""
        where = str(_place(node, self._file))
        self._left -= 1
        if any(node is one for one in outer):
            raise InputError("an alias contains itself", where=where, hint="write the value out")
        if self._left < 0:
            raise InputError(
                f"the entry holds more than {_MAX_VALUES:,} values", where=where, hint="use fewer aliases"
            )
        if isinstance(node, yaml.ScalarNode):
            return _scalar(node, where)
        if isinstance(node, yaml.SequenceNode) and node.tag == f"{_TAG}seq":
            return [self.value(item, (*outer, node)) for item in node.value]
        if isinstance(node, yaml.MappingNode):
            here = _place(node, self._file)
            fields = Node(here, here, node).mapping("the value")
            return {key: self.value(field.raw, (*outer, node)) for key, field in fields.items()}
        raise _bad_tag(node, where)


def _key(node: yaml.Node, file: str) -> str:
    if not isinstance(node, yaml.ScalarNode):
        raise InputError("a key is no plain word", where=str(_place(node, file)), hint="write key: value")
    return str(node.value)


def _scalar(node: yaml.ScalarNode, where: str) -> object:
    text = str(node.value)
    if node.tag in (f"{_TAG}str", f"{_TAG}timestamp"):
        return text
    if node.tag == f"{_TAG}null":
        return None
    if node.tag == f"{_TAG}bool" and text.lower() in _TRUTH:
        return _TRUTH[text.lower()]
    if node.tag == f"{_TAG}int":
        if not _WHOLE_NUMBER.match(text):
            raise InputError(
                f'"{text[:60]}" is no plain decimal number', where=where, hint="write it in decimal digits"
            )
        return int(text.replace("_", ""))
    if node.tag == f"{_TAG}float":
        try:
            return float(text.replace("_", ""))
        except ValueError as error:  # .inf and sexagesimal forms among them
            raise InputError(
                f'"{text[:60]}" is no plain number', where=where, hint="write it in digits"
            ) from error
    raise _bad_tag(node, where)


def _bad_tag(node: yaml.Node, where: str) -> InputError:
    return InputError(
        f'the tag "{str(node.tag).removeprefix(_TAG)[:60]}" is not allowed here',
        where=where,
        hint="write plain text, numbers, lists and mappings",
    )


def _place(node: yaml.Node, file: str) -> Place:
    return Place(file, node.start_mark.line + 1, node.start_mark.column + 1)
