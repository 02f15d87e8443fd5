"""Where input comes from: a file, or standard input for ``-``."""

from __future__ import annotations

import sys
from io import BufferedReader
from pathlib import Path
from typing import cast

from kvplan.errors import InputError


def open_input(source: str) -> BufferedReader:
    """A file in bytes, or standard input for ``-``, which can be read once.

    Raises `InputError` if standard input is closed, and `OSError` where a file cannot be opened.
    """
    if source != "-":
        return Path(source).open("rb")
    if sys.stdin is None:  # closed by whoever started this
        raise InputError("standard input is closed", where="-", hint="give a file, or open standard input")
    if sys.stdin.buffer.closed:
        raise InputError("standard input was read already", where="-", hint="give one of the two as a file")
    return cast("BufferedReader", sys.stdin.buffer)
