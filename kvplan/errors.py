"""What can go wrong, for people.

    KvplanError            what is wrong, where, and what would mend it
    ├── InputError         wrong input or usage (exit code 2)
    ├── DoesNotFit         a true "no": the engine would not start (exit code 1)
    └── of kvplan.kernels  what a kernel needs is missing (exit code 3), or a compiler refuses it (2)

Any other exception is a bug in kvplan and keeps its traceback.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable, Mapping


class KvplanError(Exception):
    """An error that a user can act on.

    ``what`` says what is wrong and quotes the value, ``where`` names the place (file:line, field or
    flag), ``hint`` says what would mend it.
    """

    exit_code = 2

    def __init__(self, what: str, *, where: str | None = None, hint: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.what} ({self.where})" if self.where else self.what

    def to_dict(self) -> dict[str, str | None]:
        """The error as the JSON contract prints it, under the key ``error``."""
        return {"message": self.what, "where": self.where, "hint": self.hint}


class InputError(KvplanError):
    """Wrong input or usage: a file, a flag, a name."""


class DoesNotFit(KvplanError):
    """Not a mistake but an answer: the engine would refuse to start with these settings."""

    exit_code = 1


def unreadable(
    error: Exception,
    *,
    where: str,
    what: str = "the file",
    hint: str = "give a file that exists and can be read",
) -> InputError:
    """The error for a file that the system does not give; ``error`` is what it says."""
    return InputError(
        f"cannot read {what}: {getattr(error, 'strerror', None) or error}", where=where, hint=hint
    )


def quoted(value: object) -> str:
    """A wrong value for a message, cut where it is long; what is nested deeply in it is left out."""
    text = _BRIEF.repr(value) if isinstance(value, list | Mapping) else str(value)
    return f'"{text[:60]}..."' if len(text) > 60 else f'"{text}"'


_BRIEF = reprlib.Repr()
_BRIEF.maxlevel, _BRIEF.maxlist, _BRIEF.maxdict = 3, 30, 10

#: Names are quoted up to this length: a path may be long, a hostile name has no end.
_LONGEST_NAME = 200


def unknown_name(
    kind: str, name: str, known: Iterable[str], *, where: str | None = None, listing: str | None = None
) -> InputError:
    """The error for a name that is not known, with the nearest names that are.

    ``listing`` is the command or place that lists all of them; without it the hint does.
    """
    names = sorted(set(known))
    by_fold = {n.casefold(): n for n in names}
    name = name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}..."
    near = [by_fold[n] for n in difflib.get_close_matches(name.casefold(), by_fold, n=3, cutoff=0.5)]
    hints = [f"did you mean {' or '.join(near)}?"] if near else []
    if listing is not None:
        hints.append(f"{listing} lists all")
    elif not near:
        hints.append(f"known: {', '.join(names)}")
    return InputError(f'unknown {kind} "{name}"', where=where, hint=" ".join(hints))
