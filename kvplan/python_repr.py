"""Reading what Python printed of a configuration, such as ``ServerArgs(model_path='m', tp_size=2)``.

Nothing is evaluated: the text is walked once and becomes plain values. What has no plain value stays text, so
``torch.bfloat16`` and ``<CompilationMode.NONE: 0>`` are read too.
"""

from __future__ import annotations

import re
from ast import literal_eval

#: No engine nests its configuration deeper; what does is left where it is.
_MAX_DEPTH = 32
#: No configuration printed in one line has more values.
_MAX_VALUES = 20_000

_SPACE = re.compile(r"[\s,]*")
_STRING = re.compile(r"""[rRbBuU]{0,2}(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")""", re.DOTALL)
_WORD = re.compile(r"""[^\s,=:(){}\[\]<>'"]+""")
_AFTER_KEY = re.compile(r"\s*([=:])\s*")
_INTEGER = re.compile(r"[-+]?\d{1,25}\Z")
_NUMBER = re.compile(r"[-+]?(?:\d{1,25}\.\d{0,25}|\.\d{1,25}|\d{1,25})(?:[eE][-+]?\d{1,3})?\Z")
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_CONSTANTS = {"None": None, "True": True, "False": False, "null": None, "true": True, "false": False}


def read_fields(text: str) -> dict[str, object]:
    """The fields of ``a=1, b='x'``, ``{'a': 1}``, ``Name(a=1)`` or ``a=1 b='x'``, as far as the text can be read.

    Values are None, truth values, numbers, texts, lists, and dicts for whatever has fields of its own. A text
    that ends in the middle, as a line cut by a logger does, gives the fields before. Takes time linear in the text.

    >>> read_fields("model='m', dtype=torch.bfloat16, mode=<Mode.FAST: 3>, spec=Spec(method='mtp', n=2)")
    {'model': 'm', 'dtype': 'torch.bfloat16', 'mode': 'Mode.FAST', 'spec': {'method': 'mtp', 'n': 2}}
    """
    fields, values = _Walk(text).items("", 0)
    if not fields and len(values) == 1 and isinstance(values[0], dict):
        return values[0]
    return fields


class _Walk:
    """One pass over a text; ``_at`` never goes back."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._left = _MAX_VALUES

    def items(self, closing: str, depth: int) -> tuple[dict[str, object], list[object]]:
        """What stands before ``closing``: the items with a key, and those without."""
        fields: dict[str, object] = {}
        values: list[object] = []
        while self._skip() and self._left > 0:
            character = self._text[self._at]
            if character == closing:
                self._at += 1
                break
            value, is_name = self._value(depth)
            after = _AFTER_KEY.match(self._text, self._at) if is_name else None
            if after is None:
                values.append(value)
                continue
            self._at = after.end()
            key = str(value)
            if self._at < len(self._text):
                fields[key] = self._value(depth)[0]
        return fields, values

    def _skip(self) -> bool:
        match = _SPACE.match(self._text, self._at)
        assert match is not None, "the pattern takes nothing too"
        self._at = match.end()
        return self._at < len(self._text)

    def _value(self, depth: int) -> tuple[object, bool]:
        """The next value, and whether it may be a key. Takes at least one character."""
        self._left -= 1
        text, at = self._text, self._at
        string = _STRING.match(text, at)
        if string:
            self._at = string.end()
            return _string(string.group()), True
        character = text[at]
        if character in "'\"":  # never closed: the line was cut in it
            self._at = len(text)
            return None, False
        if character in _CLOSING:
            self._at += 1
            return self._inside(character, depth), character == "("  # a tuple may be a key, and is skipped
        if character == "<":
            return self._angle(), False
        word = _WORD.match(text, at)
        if not word:
            self._at += 1  # a stray mark
            return None, False
        self._at = word.end()
        if text.startswith("(", self._at):
            self._at += 1
            inner = self._inside("(", depth)
            # PosixPath('/m') stands for its one argument.
            return (inner[0] if isinstance(inner, list) and len(inner) == 1 else inner), False
        return _word(word.group()), True

    def _inside(self, opening: str, depth: int) -> object:
        if depth >= _MAX_DEPTH:
            self._at = len(self._text)
            return None
        fields, values = self.items(_CLOSING[opening], depth + 1)
        return fields if fields or (opening == "{" and not values) else values

    def _angle(self) -> str:
        """What stands in ``<...>``: ``Mode.FAST`` of ``<Mode.FAST: 3>``."""
        start, depth = self._at + 1, 0
        for mark in re.compile(r"[<>]").finditer(self._text, self._at):
            depth += 1 if mark.group() == "<" else -1
            if depth == 0:
                self._at = mark.end()
                return self._text[start : mark.start()].partition(":")[0]
        self._at = len(self._text)
        return self._text[start:]


def _string(text: str) -> str:
    try:
        value = literal_eval(text)
    except (SyntaxError, ValueError):  # an escape that Python does not know
        return text[1:-1]
    return value if isinstance(value, str) else repr(value)


def _word(text: str) -> object:
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if _INTEGER.match(text):
        return int(text)
    return float(text) if _NUMBER.match(text) else text
