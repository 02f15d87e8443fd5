"""Which modules a list of names means: plain names, wildcards and regular expressions, all from files.

Python's own matcher can be made to hang by an expression, so a small one is run here as a set of states.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvplan.errors import InputError


class Patterns:
    """Names of modules, plain, with wildcards, or as regular expressions after ``re:``.

    A plain name stands for every module whose path has it as a run of whole parts: ``lm_head``, ``self_attn``,
    ``model.layers.0``. Wildcards and expressions must fit the whole path, an expression only its start, as in
    compressed-tensors. Where a model nests its decoder is left out of account.
    """

    __slots__ = ("_machines", "_plain")

    def __init__(self, plain: frozenset[str], machines: tuple[_Machine, ...]) -> None:
        self._plain = plain
        self._machines = machines

    @classmethod
    def of(cls, names: Iterable[str]) -> Patterns:
        """Raises `InputError` for an expression that is beyond what is understood."""
        plain: set[str] = set()
        machines: list[_Machine] = []
        for name in names:
            if name.startswith("re:"):
                machines.append(_Machine(name[3:], is_prefix=True))
            elif "*" in name:
                escaped = "".join(".*" if c == "*" else f"\\{c}" if c in _SPECIAL else c for c in name)
                machines.append(_Machine(escaped, is_prefix=False))
            else:
                plain.add(plain_path(name))
        return cls(frozenset(plain), tuple(machines))

    def match(self, path: str) -> bool:
        """Whether a path, as `plain_path` gives it, is among them."""
        for one in _aliases(path):
            parts = one.split(".")
            if self._plain and any(
                ".".join(parts[i:j]) in self._plain
                for i in range(len(parts))
                for j in range(i + 1, len(parts) + 1)
            ):
                return True
            for machine in self._machines:
                if any(machine.fits(prefix + one) for prefix in _PREFIXES):
                    return True
        return False


#: Where a decoder may stand in a model.
_PREFIXES = ("model.", "", "model.language_model.", "language_model.model.", "backbone.")
_ROOTS = {"model", "language_model", "backbone", "transformer"}
#: Matrices that checkpoints or engines store as one.
_FUSED = {
    "q_proj": ("qkv_proj",),
    "k_proj": ("qkv_proj",),
    "v_proj": ("qkv_proj",),
    "gate_proj": ("gate_up_proj",),
    "up_proj": ("gate_up_proj",),
    "in_proj_qkvz": ("in_proj_qkv",),
    "q_a_proj": ("fused_qkv_a_proj",),
    "kv_a_proj_with_mqa": ("fused_qkv_a_proj",),
}


def plain_path(name: str) -> str:
    """A module's path without where its decoder stands, and without the numbers of experts."""
    parts = name.split(".")
    while len(parts) > 1 and parts[0] in _ROOTS:
        parts = parts[1:]
    after = "experts"
    return ".".join(p for i, p in enumerate(parts) if not (p.isdigit() and i and parts[i - 1] == after))


def _aliases(path: str) -> Sequence[str]:
    head, _, last = path.rpartition(".")
    return (path, *(f"{head}.{other}" for other in _FUSED.get(last, ())))


_SPECIAL = frozenset("\\^$.|?+()[]{}")
_MAX_EXPRESSION = 500
_MAX_CHOICES = 64


class _Machine:
    """A regular expression of literals, ``.``, digits, sets, ``*``, ``+``, ``?`` and alternatives.

    It is run as a set of states, in time of path x expression: an expression comes from a file that is not to
    be trusted, and Python's own matcher can be made to hang.
    """

    __slots__ = ("_choices", "_is_prefix")

    def __init__(self, expression: str, *, is_prefix: bool) -> None:
        self._is_prefix = is_prefix
        self._choices = [_steps(choice, expression) for choice in _alternatives(expression)]

    def fits(self, text: str) -> bool:
        """Whether it matches the text, or its start."""
        return any(self._run(steps, text) for steps in self._choices)

    def _run(self, steps: Sequence[_Step], text: str) -> bool:
        ends = steps and steps[-1].wanted == "$"
        steps = steps[:-1] if ends else steps
        states = _skip({0}, steps)
        for character in text:
            if len(steps) in states and self._is_prefix and not ends:
                return True
            following = set()
            for state in states:
                if state < len(steps) and steps[state].takes(character):
                    following.add(state if steps[state].repeats else state + 1)
                    following.add(state + 1)
            states = _skip(following, steps)
            if not states:
                return False
        return len(steps) in states


class _Step(NamedTuple):
    """One character of an expression: which it may be (empty: any), whether it may repeat or be missing."""

    wanted: str
    is_negated: bool = False
    repeats: bool = False
    may_lack: bool = False

    def takes(self, character: str) -> bool:
        return not self.wanted or (character in self.wanted) != self.is_negated


def _skip(states: set[int], steps: Sequence[_Step]) -> set[int]:
    """The states and those that are reached by leaving out steps that may lack."""
    reached: set[int] = set()
    for state in states:
        last = state
        while last < len(steps) and steps[last].may_lack:
            last += 1
        reached.update(range(state, last + 1))
    return reached


def _alternatives(expression: str) -> list[str]:
    """The expression without its groups: one for each way through its alternatives."""
    if len(expression) > _MAX_EXPRESSION:
        raise InputError(f"the pattern {_quoted(expression)} is longer than {_MAX_EXPRESSION} characters")
    done, pending = [], [expression]
    while pending:
        one = pending.pop()
        start, end, bars = _first_group(one)
        if start < 0 and not bars:
            done.append(one)
        elif start < 0:
            pending.extend(_split(one, bars))
        else:
            if one[end + 1 : end + 2] in ("*", "+", "{"):
                raise InputError(f"the pattern {_quoted(expression)} repeats a group")
            body = one[start + 1 : end].removeprefix("?:")
            if body.startswith("?"):
                raise InputError(f"the pattern {_quoted(expression)} looks ahead or names a group")
            rest, ways = one[end + 1 :], _split(body, _first_group(body, only_bars=True)[2])
            if rest.startswith("?"):
                rest, ways = rest[1:], [*ways, ""]
            pending.extend(one[:start] + way + rest for way in ways)
        if len(pending) + len(done) > _MAX_CHOICES:
            raise InputError(f"the pattern {_quoted(expression)} has more than {_MAX_CHOICES} alternatives")
    return done


def _first_group(text: str, *, only_bars: bool = False) -> tuple[int, int, list[int]]:
    """Where the first group starts and ends (-1: there is none), and the bars outside of groups."""
    depth, start, end, i = 0, -1, -1, 0
    bars = []
    while i < len(text):
        character = text[i]
        if character == "\\":
            i += 1
        elif character == "(":
            if depth == 0 and start < 0:
                start = i
            depth += 1
        elif character == ")":
            depth -= 1
            if depth == 0 and end < 0:
                end = i
        elif character == "|" and depth == 0:
            bars.append(i)
        i += 1
    if depth or (start >= 0) != (end >= 0):
        raise InputError(f"the pattern {_quoted(text)} has an open bracket")
    # Bars outside of groups bind least: they are split first.
    return (-1, -1, bars) if bars or only_bars else (start, end, bars)


def _split(text: str, bars: Sequence[int]) -> list[str]:
    edges = [-1, *bars, len(text)]
    return [text[edges[i] + 1 : edges[i + 1]] for i in range(len(edges) - 1)]


_CLASSES = {
    "d": "0123456789",
    "w": "0123456789_abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ",
}


def _steps(choice: str, whole: str) -> list[_Step]:
    """The steps of an expression without groups."""
    steps: list[_Step] = []
    text = choice.removeprefix("^")
    i = 0
    while i < len(text):
        character = text[i]
        step = _Step(character)
        if character == "\\":
            i += 1
            step = _Step(_CLASSES.get(text[i : i + 1], text[i : i + 1]))
        elif character == ".":
            step = _Step("")
        elif character == "[":
            end = text.find("]", i + 2)
            if end < 0:
                raise InputError(f"the pattern {_quoted(whole)} has an open bracket")
            step = _set(text[i + 1 : end])
            i = end
        elif character == "$" and i == len(text) - 1:
            return [*steps, _Step("$")]
        elif character in _SPECIAL or character == "*":
            raise InputError(
                f"the pattern {_quoted(whole)} is beyond what is understood, at {_quoted(character)}"
            )
        i += 1
        if i < len(text) and text[i] in "*+?":
            if text[i] == "+":
                steps.append(step)
            step = step._replace(repeats=text[i] != "?", may_lack=True)
            i += 1
            if i < len(text) and text[i] == "?":  # as few as possible: the same texts
                i += 1
        steps.append(step)
    return steps


def _set(body: str) -> _Step:
    is_negated = body.startswith("^")
    body = body[1:] if is_negated else body
    characters, i = "", 0
    while i < len(body):
        if body[i] == "\\":
            characters += _CLASSES.get(body[i + 1 : i + 2], body[i + 1 : i + 2])
            i += 2
        elif body[i + 1 : i + 2] == "-" and i + 2 < len(body) and ord(body[i + 2]) < 128:
            characters += "".join(chr(code) for code in range(ord(body[i]), ord(body[i + 2]) + 1))
            i += 3
        else:
            characters += body[i]
            i += 1
    return _Step(characters or "\0", is_negated)


def _quoted(value: object) -> str:
    text = str(value)
    return f'"{text[:60]}..."' if len(text) > 60 else f'"{text}"'
