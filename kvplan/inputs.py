"""Where input comes from: a file, or standard input for ``-``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import BinaryIO

from kvplan.errors import InputError


def open_input(source: str) -> BinaryIO:
    """A file in bytes, or standard input for ``-``. Raises `InputError` if that is closed, else `OSError`."""
    if source != "-":
        return Path(source).open("rb")
    if sys.stdin is None:  # closed by whoever started this
        raise InputError("standard input is closed", where="-", hint="give a file, or open standard input")
    return sys.stdin.buffer
