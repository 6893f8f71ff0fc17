"""Sizes as text, both ways."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from holdfast.errors import ConfigError
from holdfast.memory.sizes import UNITS, format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("20GiB", 20 * 1024**3),
        ("20 gib", 20 * 1024**3),
        ("1.5GiB", 3 * 1024**3 // 2),
        ("20GB", 20 * 1000**3),
        ("20G", 20 * 1024**3),
        (" 512 MB ", 512 * 1000**2),
        ("64k", 65536),
        ("2TiB", 2 * 1024**4),
        ("4096", 4096),
        ("4096B", 4096),
        (4096, 4096),
    ],
)
def test_sizes_that_people_write(text: str | int, num_bytes: int) -> None:
    assert parse_bytes(text, "memory_limit") == num_bytes


@pytest.mark.parametrize(
    "text",
    ["", "GiB", "-1GiB", "1e9", "20 GiB of memory", "20XiB", "1,5GiB", "٢GiB", "0", "0.0GiB", 0, -5, True, None, 1.5, "9" * 400, "nan", "inf", 2**63, 10**400, "999999999999TiB"],
)  # fmt: skip
def test_parse_bytes_of_anything_else_names_the_option(text: object) -> None:
    with pytest.raises(ConfigError, match="memory_limit must be ") as caught:
        parse_bytes(text, "memory_limit")  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


@given(st.integers(1, 10**9), st.sampled_from(sorted(UNITS)))
def test_whole_numbers_of_every_unit_are_exact(count: int, unit: str) -> None:
    if count * UNITS[unit] < 2**53:
        assert parse_bytes(f"{count}{unit}", "x") == count * UNITS[unit]


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (64 * 1024**2, "64.00 MiB"),
        (1024**3, "1.00 GiB"),
        (2000 * 1024**3, "2000.00 GiB"),
        (-5 * 1024**2, "-5.00 MiB"),
    ],
)
def test_sizes_as_people_read_them(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


@given(st.integers(1, 2**50))
@example(1111)
def test_parse_bytes_inverts_format_bytes(num_bytes: int) -> None:
    # Shown to a hundredth of its unit, and cut off to whole bytes when it is read.
    assert abs(parse_bytes(format_bytes(num_bytes), "x") - num_bytes) <= 0.005 * num_bytes + 1
