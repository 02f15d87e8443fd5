"""Which modules a list of names means: plain names, wildcards and regular expressions, all from files.

Python's own matcher can be made to hang by an expression, so a small one is run here as a set of states.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvplan.errors import InputError, quoted


class Patterns:
    """Names of modules, plain, with wildcards, or as regular expressions after ``re:``.

    A plain name stands for every module whose path has it as a run of whole parts: ``lm_head``, ``self_attn``,
    ``model.layers.0``. Wildcards and expressions must fit the whole path, an expression only its start, as in
    compressed-tensors. Where a model nests its decoder is left out of account.
    """

    __slots__ = ("_found", "_machines", "_matched", "_plain", "_read")

    def __init__(self, plain: frozenset[str], machines: tuple[_Machine, ...]) -> None:
        self._plain = plain
        self._machines = machines
        #: Paths that were asked before: searches over deployments ask for each many times.
        self._matched: dict[str, bool] = {}
        #: What a machine said of a text, and how many characters were read to know it.
        self._found: dict[tuple[int, str], bool] = {}
        self._read = 0

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
        known = self._matched.get(path)
        if known is None:
            known = self._matched[path] = self._names(path)
        return known

    def _names(self, path: str) -> bool:
        for one in _aliases(path):
            parts = one.split(".")
            if self._plain and any(
                ".".join(parts[i:j]) in self._plain
                for i in range(len(parts))
                for j in range(i + 1, len(parts) + 1)
            ):
                return True
            for i, machine in enumerate(self._machines):
                prefixes = _PREFIXES[:1] if machine.starts_anywhere else _PREFIXES
                if any(self._fits(i, machine, prefix + one) for prefix in prefixes):
                    return True
        return False

    def _fits(self, number: int, machine: _Machine, text: str) -> bool:
        """What a machine says, asked once of texts that it cannot tell apart."""
        key = number, text if machine.names_numbers else text.translate(_NUMBERS_ALIKE)
        if key not in self._found:
            self._read += len(text)
            if self._read > _MAX_READ:
                raise InputError(
                    f"{len(self._machines)} patterns name modules of too many layers",
                    where="quantization_config",
                    hint="name the modules without regular expressions",
                )
            self._found[key] = machine.fits(text)
        return self._found[key]


#: Characters that all expressions of a list may read; those of a model with 61 layers read a tenth of it.
_MAX_READ = 2_000_000
_NUMBERS_ALIKE = {ord(digit): "0" for digit in "123456789"}
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


#: Parts of paths that families call otherwise: what kvplan calls them.
_SAME_PART = {
    "block_sparse_moe": "mlp",
    "feed_forward": "mlp",
    "moe": "mlp",
    "self_attention": "self_attn",
    "shared_expert": "shared_experts",
    "shared_mlp": "shared_experts",
    "w1": "gate_proj",
    "w2": "down_proj",
    "w3": "up_proj",
}
#: The other way, for expressions, which cannot be rewritten; and experts have numbers there.
_OTHER_PARTS = {
    ".experts.": (".experts.0.",),
    ".shared_experts.": (".shared_expert.",),
    ".mlp.": (".feed_forward.", ".block_sparse_moe."),
}


def plain_path(name: str) -> str:
    """A module's path without where its decoder stands, and without the numbers of experts."""
    parts = name.split(".")
    while len(parts) > 1 and parts[0] in _ROOTS:
        parts = parts[1:]
    numbered = (p for i, p in enumerate(parts) if not (p.isdigit() and i and parts[i - 1] == "experts"))
    return ".".join(_SAME_PART.get(p, p) for p in numbered)


def _aliases(path: str) -> Sequence[str]:
    """The path under the names that checkpoints and engines have for it: fused, or of one expert."""
    head, _, last = path.rpartition(".")
    found = [path, *(f"{head}.{other}" for other in _FUSED.get(last, ()))]
    for part, others in _OTHER_PARTS.items():
        found += [one.replace(part, other, 1) for one in found if part in one for other in others]
    return found


_SPECIAL = frozenset("\\^$.|?+()[]{}")
_MAX_EXPRESSION = 500
_MAX_CHOICES = 64


class _Machine:
    """A regular expression of literals, ``.``, digits, sets, ``*``, ``+``, ``?`` and alternatives.

    It is run as a set of states, in time of path x expression: an expression comes from a file that is not to
    be trusted, and Python's own matcher can be made to hang.
    """

    __slots__ = ("_ways", "names_numbers", "starts_anywhere")

    def __init__(self, expression: str, *, is_prefix: bool) -> None:
        ways = [_steps(way, expression) for way in _alternatives(expression)]
        self._ways = [_Automaton(steps, is_prefix=is_prefix) for steps in ways]
        self.starts_anywhere = all(steps and steps[0] == _ANYTHING for steps in ways)
        # What takes all digits or none cannot tell them apart.
        digits = (_DIGITS & set(step.wanted) for steps in ways for step in steps)
        self.names_numbers = any(one and one != _DIGITS for one in digits)

    def fits(self, text: str) -> bool:
        """Whether it matches the text, or its start."""
        return any(way.fits(text) for way in self._ways)


class _Step(NamedTuple):
    """One character of an expression: which it may be (empty: any), whether it may repeat or be missing."""

    wanted: str
    is_negated: bool = False
    repeats: bool = False
    may_lack: bool = False

    def takes(self, character: str) -> bool:
        return not self.wanted or (character in self.wanted) != self.is_negated


_ANYTHING = _Step("", repeats=True, may_lack=True)
_DIGITS = frozenset("0123456789")


class _Automaton:
    """One way through an expression. Bit i of its states says that the steps before the i-th may be behind it."""

    __slots__ = ("_end", "_is_prefix", "_lacks", "_repeats", "_start", "_steps", "_takers")

    def __init__(self, steps: Sequence[_Step], *, is_prefix: bool) -> None:
        if steps and steps[-1].wanted == "$":
            steps, is_prefix = steps[:-1], False
        self._steps = steps
        self._is_prefix = is_prefix
        self._repeats = sum(1 << i for i, step in enumerate(steps) if step.repeats)
        self._lacks = sum(1 << i for i, step in enumerate(steps) if step.may_lack)
        self._start = _skip(1, self._lacks)
        self._end = 1 << len(steps)
        #: The steps that take a character.
        self._takers: dict[str, int] = {}

    def fits(self, text: str) -> bool:
        """Whether it matches the text, or its start."""
        states = self._start
        for character in text:
            if states & self._end and self._is_prefix:
                return True
            takers = self._takers.get(character)
            if takers is None:
                takers = sum(1 << i for i, step in enumerate(self._steps) if step.takes(character))
                self._takers[character] = takers
            taken = states & takers
            states = _skip(taken << 1 | taken & self._repeats, self._lacks)
            if not states:
                return False
        return bool(states & self._end)


def _skip(states: int, lacks: int) -> int:
    """The states and those that are reached by leaving out steps that may lack."""
    while (further := states | (states & lacks) << 1) != states:
        states = further
    return states


def _alternatives(expression: str) -> list[str]:
    """The expression without its groups: one for each way through its alternatives."""
    if len(expression) > _MAX_EXPRESSION:
        raise InputError(f"the pattern {quoted(expression)} is longer than {_MAX_EXPRESSION} characters")
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
                raise InputError(f"the pattern {quoted(expression)} repeats a group")
            body = one[start + 1 : end].removeprefix("?:")
            if body.startswith("?"):
                raise InputError(f"the pattern {quoted(expression)} looks ahead or names a group")
            rest, ways = one[end + 1 :], _split(body, _first_group(body, only_bars=True)[2])
            if rest.startswith("?"):
                rest, ways = rest[1:], [*ways, ""]
            pending.extend(one[:start] + way + rest for way in ways)
        if len(pending) + len(done) > _MAX_CHOICES:
            raise InputError(f"the pattern {quoted(expression)} has more than {_MAX_CHOICES} alternatives")
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
        raise InputError(f"the pattern {quoted(text)} has an open bracket")
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
                raise InputError(f"the pattern {quoted(whole)} has an open bracket")
            step = _set(text[i + 1 : end])
            i = end
        elif character == "$" and i == len(text) - 1:
            return [*steps, _Step("$")]
        elif character in _SPECIAL or character == "*":
            raise InputError(
                f"the pattern {quoted(whole)} is beyond what is understood, at {quoted(character)}"
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
