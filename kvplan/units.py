"""Sizes, counts and shares as text: parsing what users write, printing what they read."""

from __future__ import annotations

import re
from decimal import Decimal

from kvplan.errors import InputError

_BINARY = {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_DECIMAL = {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS = {"": 1, "b": 1, **_BINARY, **_DECIMAL}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*\Z")
# The widest number that is still a plausible size: beyond it the input is a mistake, and arithmetic
# on it would only waste memory.
_MAX_BYTES = 1 << 60


def parse_size(text: str, *, where: str) -> int:
    """Bytes of a size such as ``80GiB``, ``80GB`` or ``85899345920``.

    A bare ``80G`` is refused: it is read as 10^9 by some and as 2^30 by others. Raises `InputError`.
    """
    match = _SIZE.match(text)
    if not match:
        raise InputError(
            f'"{text}" is not a size', where=where, hint="write a size such as 80GiB, 80GB or plain bytes"
        )
    number, unit = match.group(1), match.group(2).lower()
    if unit in {"k", "m", "g", "t"}:
        letter = unit.upper()
        raise InputError(
            f'"{text}" is ambiguous',
            where=where,
            hint=f"write {number}{letter}iB (2^{10 * ('KMGT'.index(letter) + 1)} bytes each) "
            f"or {number}{letter}B (10^{3 * ('KMGT'.index(letter) + 1)} bytes each)",
        )
    if unit not in _UNITS:
        raise InputError(
            f'unknown unit "{match.group(2)}" in "{text}"',
            where=where,
            hint="units are KiB, MiB, GiB, TiB (binary) and KB, MB, GB, TB (decimal)",
        )
    size = int(Decimal(number) * _UNITS[unit])
    if not 0 < size <= _MAX_BYTES:
        raise InputError(
            f'"{text}" is no plausible size',
            where=where,
            hint="write a size above 0 and at most 1,048,576 TiB",
        )
    return size


_COUNT_SCALES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_count(text: str, *, where: str) -> int:
    """A whole number, as vLLM reads lengths: ``32k`` is 32,000 and ``32K`` 32,768. Raises `InputError`."""
    match = re.fullmatch(r"(-?[0-9]{1,20}(?:\.[0-9]{1,6})?)([kKmMgG]?)", text.strip())
    value = Decimal(match.group(1)) * _COUNT_SCALES[match.group(2)] if match else Decimal("0.5")
    if value != value.to_integral_value():
        raise InputError(
            f'"{text}" is not a whole number',
            where=where,
            hint="write a number such as 4096, 32k (1,000s) or 32K (1,024s)",
        )
    return int(value)


def format_bytes(size: int | None) -> str:
    """A size in binary units that says so: ``12.5 GiB``; ``unknown`` for None.

    >>> format_bytes(3355443200)
    '3.125 GiB'
    """
    if size is None:
        return "unknown"
    sign, size = ("-", -size) if size < 0 else ("", size)
    for unit, factor in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor:
            value = f"{size / factor:.3f}".rstrip("0").rstrip(".")
            return f"{sign}{value} {unit}"
    return f"{sign}{size} B"


def format_count(value: float | None) -> str:
    """A count with thousands separators; ``-`` for None.

    >>> format_count(819200)
    '819,200'
    """
    if value is None:
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.2f}"


def counted(count: int, noun: str) -> str:
    """``1 request``, ``2 requests``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def format_share(share: float | None) -> str:
    """A share of 0..1 as a percentage; ``-`` for None.

    >>> format_share(0.0394)
    '3.9 %'
    """
    return "-" if share is None else f"{100 * share:.1f} %"


def format_seconds(seconds: float | None) -> str:
    """A time in three digits with a unit that suits its size; ``-`` for None.

    >>> format_seconds(0.01234)
    '12.3 ms'
    """
    if seconds is None:
        return "-"
    for limit, factor, unit in (
        (0.9995e-3, 1e6, "µs"),
        (0.9995, 1e3, "ms"),
    ):  # what rounds up is the next unit
        if 0 < abs(seconds) < limit:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s" if abs(seconds) < 99.95 else f"{seconds:,.0f} s"
