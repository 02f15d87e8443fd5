"""Sizes as they are written, numbers as they are read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplan.errors import InputError
from kvplan.units import format_bytes, format_count, format_seconds, format_share, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("80GiB", 80 * 2**30),
        ("80GB", 80 * 10**9),
        ("80 gib", 80 * 2**30),
        ("1.5MiB", 3 * 2**19),
        ("0.1KB", 100),
        ("85899345920", 85899345920),
        ("7B", 7),
        ("2TiB", 2 * 2**40),
        ("3TB", 3 * 10**12),
        ("  9KiB  ", 9 * 1024),
    ],
)
def test_a_size_is_read_in_the_unit_that_it_names(text: str, size: int) -> None:
    assert parse_size(text, where="--x") == size


@pytest.mark.parametrize("text", ["80G", "80g", "5M", "1.5T", "9k"])
def test_a_bare_letter_is_refused_with_both_readings(text: str) -> None:
    with pytest.raises(InputError, match="ambiguous") as error:
        parse_size(text, where="--gpu-memory")
    assert error.value.where == "--gpu-memory"
    assert error.value.hint is not None
    assert "(2^" in error.value.hint
    assert "(10^" in error.value.hint


def test_both_readings_of_a_letter_say_their_powers() -> None:
    with pytest.raises(InputError) as error:
        parse_size("80G", where="--x")
    assert error.value.hint == "write 80GiB (2^30 bytes each) or 80GB (10^9 bytes each)"


@pytest.mark.parametrize("text", ["80XB", "1PiB", "4GiBs"])
def test_an_unknown_unit_is_named(text: str) -> None:
    with pytest.raises(InputError, match="unknown unit"):
        parse_size(text, where="--x")


@pytest.mark.parametrize(
    "text", ["", "GiB", "-5GiB", "1e9", "1,000", "0x10", "nan", "80GiB 3", "1.GiB", "٣GiB"]
)
def test_what_is_no_size_is_refused_and_quoted(text: str) -> None:
    with pytest.raises(InputError, match="is not a size") as error:
        parse_size(text, where="--x")
    assert f'"{text}"' in error.value.what


@pytest.mark.parametrize("text", ["0", "0GiB", "0.4B", "9999999TiB", "9" * 400])
def test_a_size_that_cannot_be_meant_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="no plausible size"):
        parse_size(text, where="--x")


@given(st.integers(1, 2**60))
def test_plain_bytes_are_read_as_they_stand(size: int) -> None:
    assert parse_size(str(size), where="--x") == size


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (None, "unknown"),
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (819200, "800 KiB"),
        (3355443200, "3.125 GiB"),
        (2**40, "1 TiB"),
        (-(2**30), "-1 GiB"),
        (-5, "-5 B"),
    ],
)
def test_bytes_are_printed_in_binary_units(size: int | None, text: str) -> None:
    assert format_bytes(size) == text


@pytest.mark.parametrize(
    ("value", "text"), [(None, "-"), (819200, "819,200"), (0, "0"), (1234.5, "1,234.50"), (2.0, "2.00")]
)
def test_counts_are_printed_with_thousands_apart(value: float | None, text: str) -> None:
    assert format_count(value) == text


@pytest.mark.parametrize(
    ("share", "text"), [(None, "-"), (0.0394, "3.9 %"), (0.0, "0.0 %"), (1.0, "100.0 %")]
)
def test_shares_are_printed_as_percentages(share: float | None, text: str) -> None:
    assert format_share(share) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (0.0, "0 s"),
        (0.01234, "12.3 ms"),
        (0.0000123, "12.3 µs"),
        (1.0, "1 s"),
        (12.345, "12.3 s"),
        (123.4, "123 s"),
        (12345.6, "12,346 s"),
    ],
)
def test_times_are_printed_in_a_unit_that_suits_them(seconds: float | None, text: str) -> None:
    assert format_seconds(seconds) == text


@given(st.floats(1e-6, 1e6))
def test_no_time_is_printed_with_an_exponent(seconds: float) -> None:
    """0.9996 s rounds up to 1000 ms, which three digits would write as 1e+03 ms."""
    assert "e" not in format_seconds(seconds)


@pytest.mark.parametrize(("seconds", "text"), [(0.9996, "1 s"), (0.0009996, "1 ms"), (0.9994, "999 ms")])
def test_a_time_that_rounds_up_to_the_next_unit_is_printed_in_it(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
