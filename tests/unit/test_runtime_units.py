"""Quantities with units: what they mean and what is refused."""

import math

import pytest

from transport.errors import ConfigError
from transport.runtime.units import (
    parse_bytes,
    parse_duration_s,
    parse_rate_bits_per_s,
    ranges_text,
)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("180ms", 0.18),
        ("250us", 0.00025),
        ("1.5 s", 1.5),
        ("10min", 600),
        ("2h", 7200),
        ("1d", 86400),
        ("0s", 0),
        (" 3s ", 3),
        ("1e-3s", 0.001),
        ("1_000ms", 1),
        ("12", 12),
        (12, 12),
        (0.25, 0.25),
    ],
)
def test_durations(text: str | float, seconds: float) -> None:
    assert parse_duration_s(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("64MiB", 64 << 20),
        ("1.5GB", 1_500_000_000),
        ("2.3kB", 2300),
        ("4KiB", 4096),
        ("7 B", 7),
        ("2TiB", 2 << 40),
        ("12", 12),
        (12, 12),
    ],
)
def test_sizes(text: str | float, size: int) -> None:
    assert parse_bytes(text) == size
    assert isinstance(parse_bytes(text), int)


@pytest.mark.parametrize(
    ("text", "bits_per_s"),
    [
        ("50Mbit/s", 50e6),
        ("1.5 Gbit/s", 1.5e9),
        ("9600bit/s", 9600),
        ("64kbit/s", 64e3),
        ("6MB/s", 48e6),
        ("1MiB/s", 8 << 20),
        ("unlimited", 0),
        (0, 0),
    ],
)
def test_rates(text: str | float, bits_per_s: float) -> None:
    assert parse_rate_bits_per_s(text) == bits_per_s


@pytest.mark.parametrize(
    ("parse", "value", "says"),
    [
        (parse_duration_s, "180 msec", "unknown unit 'msec'"),
        (parse_duration_s, "10MS", "unknown unit 'MS'"),
        (parse_duration_s, "-3s", "not a number with a unit"),
        (parse_duration_s, "", "not a number with a unit"),
        (parse_duration_s, "ms", "not a number with a unit"),
        (parse_duration_s, "1__0s", "not a number with a unit"),
        (parse_duration_s, "٣s", "not a number with a unit"),
        (parse_duration_s, "9" * 10_000, "not a number with a unit"),
        (parse_duration_s, "1e999s", "finite"),
        (parse_duration_s, math.nan, "finite"),
        (parse_duration_s, -1, "zero or more"),
        (parse_duration_s, 10**400, "finite"),
        (parse_duration_s, True, "bool"),
        (parse_duration_s, ["1s"], "list"),
        (parse_bytes, "1.5B", "whole number of bytes"),
        (parse_bytes, 0.5, "whole number of bytes"),
        (parse_bytes, "64mb", "unknown unit 'mb'"),
        (parse_rate_bits_per_s, "50", "no unit"),
        (parse_rate_bits_per_s, 50, "bits and bytes differ"),
        (parse_rate_bits_per_s, "50MB", "unknown unit 'MB'"),
        (parse_rate_bits_per_s, "50Mbps", "unknown unit 'Mbps'"),
    ],
)
def test_what_could_be_misread_is_refused_with_the_setting_named(
    parse: object, value: object, says: str
) -> None:
    with pytest.raises(ConfigError, match=r"^links\.paris\.rtt") as refusal:
        parse(value, "links.paris.rtt")  # type: ignore[operator]
    assert says in str(refusal.value)
    assert len(str(refusal.value)) < 500


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([], "none"),
        ([4], "4"),
        ([4, 2, 1, 0], "0-2, 4"),
        ([0, *range(224, 314)], "0, 224-313"),
        (range(0, 16, 2), "0, 2, 4, 6, 8, 10, 12, 14"),
        (range(0, 18, 2), "0, (2 between), 6, 8, 10, 12, 14, 16"),
        (range(0, 2000, 2), "0, (993 between), 1988, 1990, 1992, 1994, 1996, 1998"),
    ],
)
def test_many_numbers_are_few_ranges(numbers: list[int], text: str) -> None:
    assert ranges_text(numbers) == text
