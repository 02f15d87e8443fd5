"""The number formats of queries and caches: rounding to them, their bits and back, exactly.

NumPy has neither bfloat16 nor e4m3, so arrays in those are held as bits (``uint16``, ``uint8``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvplan.errors import unknown_name

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class NumberFormat:
    """A binary floating-point format.

    ``precision`` counts the bits of the significand, the hidden one included; ``min_exponent`` is that of the smallest
    normal number 2^e; beyond ``largest`` a number becomes infinite, or ``largest`` where the format ``saturates``.
    """

    name: str
    bytes: int
    precision: int
    min_exponent: int
    largest: float
    saturates: bool
    storage: str  # the NumPy type that holds its values, or their bits

    @property
    def unit_roundoff(self) -> float:
        """The largest relative error of rounding a number in the normal range to nearest: 2^-precision."""
        return 2.0**-self.precision

    def rounded(self, values: NDArray[Any]) -> Floats:
        """The nearest numbers of the format, ties to even, as float64. Subnormal numbers are kept, a NaN stays one."""
        exact = np.asarray(values, dtype=np.float64)
        _, exponents = np.frexp(exact)  # |x| = m 2^e with m in [1/2, 1)
        quanta = np.ldexp(1.0, np.maximum(exponents - 1, self.min_exponent) - (self.precision - 1))
        with np.errstate(invalid="ignore"):  # infinity stays infinite
            near = np.where(np.isfinite(exact), np.rint(exact / quanta) * quanta, exact)
        beyond = self.largest if self.saturates else np.inf
        bounded: Floats = np.where(np.abs(near) > self.largest, np.copysign(beyond, near), near)
        return bounded

    def encoded(self, values: NDArray[Any]) -> NDArray[Any]:
        """The numbers rounded, as the cache holds them: values of a NumPy type, or bits."""
        near = self.rounded(values)
        if self.name == "bfloat16":
            return (near.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        if self.name == "fp8_e4m3":
            return _e4m3_codes(near)
        return near.astype(self.storage)

    def decoded(self, stored: NDArray[Any]) -> Floats:
        """What ``encoded`` gave, as float64; exact."""
        if self.name == "bfloat16":
            return (stored.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        if self.name == "fp8_e4m3":
            return np.asarray(_E4M3_VALUES[stored], dtype=np.float64)
        return stored.astype(np.float64)


def _e4m3_codes(near: Floats) -> NDArray[np.uint8]:
    """Sign, 4 bits of exponent with bias 7, 3 of mantissa; no infinities; 0x7f and 0xff are NaN."""
    size = np.where(np.isnan(near), 0.0, np.abs(near))
    mantissas, exponents = np.frexp(size)
    normal = ((exponents + 6) * 8 + (2 * mantissas - 1) * 8).astype(np.int64)
    codes = np.where(size < 2.0**-6, size * 2.0**9, normal)
    codes = np.where(np.isnan(near), 0x7F, codes) + 0x80 * np.signbit(near)
    return np.asarray(codes, dtype=np.uint8)


def _e4m3_values() -> Floats:
    codes = np.arange(128)
    exponents, mantissas = codes >> 3, codes & 7
    values = np.where(
        exponents == 0, mantissas * 2.0**-9, np.ldexp(1 + mantissas / 8, np.maximum(exponents, 1) - 7)
    )
    values[127] = np.nan
    return np.concatenate([values, -values])


_E4M3_VALUES = _e4m3_values()

FORMATS = {
    one.name: one
    for one in (
        NumberFormat("float32", 4, 24, -126, float(np.finfo(np.float32).max), False, "float32"),
        NumberFormat("float16", 2, 11, -14, 65504.0, False, "float16"),
        NumberFormat("bfloat16", 2, 8, -126, 255 * 2.0**120, False, "uint16"),
        NumberFormat("fp8_e4m3", 1, 4, -6, 448.0, True, "uint8"),
    )
}


def number_format(name: str) -> NumberFormat:
    """The format of that name, which is vLLM's. Raises ``InputError``."""
    if name not in FORMATS:
        raise unknown_name("number format", name, FORMATS)
    return FORMATS[name]
