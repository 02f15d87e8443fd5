"""Rounding to the kernels' formats: against NumPy's float16, against the definition, and at the edges."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from kvplan.errors import InputError
from kvplan.kernels.number_formats import FORMATS, NumberFormat, number_format

E4M3, BF16, FP16 = FORMATS["fp8_e4m3"], FORMATS["bfloat16"], FORMATS["float16"]
RNG = np.random.default_rng(5)
WIDE = np.concatenate([RNG.standard_normal(4000) * 10.0 ** RNG.integers(-9, 6, 4000), [0.0, -0.0]])
#: All finite numbers of the format from 0 up, in order.
POSITIVE = {
    "float16": np.arange(0x7C00, dtype=np.uint16).view(np.float16),
    "bfloat16": np.arange(0x7F80, dtype=np.uint16),
    "fp8_e4m3": np.arange(0x7F, dtype=np.uint8),
}


def test_float16_is_numpys() -> None:
    with np.errstate(over="ignore"):
        expected = WIDE.astype(np.float16)
    assert np.array_equal(FP16.encoded(WIDE).view(np.uint16), expected.view(np.uint16))
    assert np.array_equal(FP16.rounded(WIDE), expected.astype(np.float64))


@pytest.mark.parametrize("form", FORMATS.values(), ids=lambda form: form.name)
def test_what_is_rounded_survives_the_cache(form: NumberFormat) -> None:
    near = form.rounded(WIDE)
    assert np.array_equal(form.decoded(form.encoded(WIDE)), near)
    assert np.array_equal(form.rounded(near), near)
    assert form.encoded(WIDE).itemsize == form.bytes


@pytest.mark.parametrize("form", [E4M3, BF16, FP16], ids=lambda form: form.name)
def test_halfway_between_neighbours_goes_to_the_even_code(form: NumberFormat) -> None:
    numbers = form.decoded(POSITIVE[form.name])
    assert np.all(np.diff(numbers) > 0)
    middles = (numbers[:-1] + numbers[1:]) / 2
    even = np.where(np.arange(len(middles)) % 2 == 0, numbers[:-1], numbers[1:])
    assert np.array_equal(form.rounded(middles), even)
    assert np.array_equal(form.rounded(np.nextafter(middles, 0)), numbers[:-1])
    assert np.array_equal(form.rounded(np.nextafter(middles, np.inf)), numbers[1:])
    assert np.array_equal(form.rounded(-middles), -even)


def test_beyond_the_largest_number() -> None:
    assert E4M3.rounded(np.array([448.0, 463.9, 1e30, np.inf, -np.inf])).tolist() == [448] * 4 + [-448]
    assert E4M3.encoded(np.array([1e9, -1e9])).tolist() == [0x7E, 0xFE]
    assert FP16.rounded(np.array([65519.9, 65520.0])).tolist() == [65504.0, np.inf]
    assert np.isinf(BF16.rounded(np.array([3.4e38])))[0]


@pytest.mark.parametrize("form", FORMATS.values(), ids=lambda form: form.name)
def test_a_nan_stays_one(form: NumberFormat) -> None:
    stored = form.encoded(np.array([np.nan, 1.0]))
    assert np.isnan(form.decoded(stored)).tolist() == [True, False]


def test_the_codes_of_e4m3_are_those_of_its_definition() -> None:
    for code in range(0x7F):
        exponent, mantissa = code >> 3, code & 7
        value = (
            Fraction(mantissa, 512)
            if exponent == 0
            else Fraction(8 + mantissa, 8) * Fraction(2) ** (exponent - 7)
        )
        assert Fraction(float(E4M3.decoded(np.array([code], dtype=np.uint8))[0])) == value


def test_the_unit_roundoff_is_reached_and_not_passed() -> None:
    for form in FORMATS.values():
        above_one = 1 + form.unit_roundoff
        assert form.rounded(np.array([above_one]))[0] == 1.0
        assert form.rounded(np.array([np.nextafter(above_one, 2)]))[0] > 1.0


def test_an_unknown_format_is_said() -> None:
    with pytest.raises(InputError, match="unknown number format"):
        number_format("bfloat")
