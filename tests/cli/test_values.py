"""Values as people type them."""

import pytest

from holdfast.cli.values import read_biases, read_count, read_counts, read_integers, read_number, read_range, read_share
from holdfast.errors import ConfigError, RequestError


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("8192", 8192),
        ("8k", 8000),
        ("8K", 8192),
        ("1M", 2**20),
        ("1m", 10**6),
        ("2G", 2**31),
        ("25.6k", 25_600),
        ("0.5K", 512),
        (" 16 ", 16),
        ("-1", -1),
        ("auto", None),
        ("AUTO", None),
    ],
)
def test_counts(text: str, count: int | None) -> None:
    assert read_count(text) == count


@pytest.mark.parametrize("text", ["", "k", "8q", "1.5", "8 k", "1e3", "0x10", "٣", "9" * 30, "1_000", "inf"])
def test_what_is_no_count_is_left_to_whoever_asked(text: str) -> None:
    assert read_count(text) == text


def test_numbers_may_be_strange_and_are_refused_elsewhere() -> None:
    assert read_number("0.7") == 0.7
    assert read_number("abc") == "abc"
    assert isinstance(read_number("nan"), float)


@pytest.mark.parametrize(
    ("text", "share"),
    [("0.8", 0.8), ("80%", 0.8), (" 80 % ", 0.8), ("100%", 1.0), ("1", 1.0), ("12.5%", 0.125), ("110", 110.0)],
)
def test_shares_are_numbers_or_percentages(text: str, share: float) -> None:
    assert read_share(text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["110%", "0%", "-5%", "%", "x%", "nan%", "inf%", "half", "", "0.5%%"])
def test_what_is_no_share_is_left_to_whoever_asked(text: str) -> None:
    assert read_share(text) == text


def test_integers_come_alone_or_in_lists() -> None:
    assert read_integers(["1,2", "3"]) == [1, 2, 3]
    assert read_integers(["x"]) == ["x"]


def test_biases_are_pairs() -> None:
    assert read_biases(["42=-100", "7=1.5"]) == {42: -100.0, 7: 1.5}


@pytest.mark.parametrize("text", ["42", "=1", "a=1", "1=b", "-1=2"])
def test_a_broken_bias_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="--logit-bias 42=-100"):
        read_biases([text])


def test_lists_of_counts() -> None:
    assert read_counts("1,8", "--batch") == (1, 8)
    assert read_counts("1K", "--batch") == (1024,)


@pytest.mark.parametrize("text", ["", "0", "1,,2", "-1", "x", "auto", "3G"])
def test_broken_lists_of_counts_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--batch"):
        read_counts(text, "--batch")


def test_ranges() -> None:
    assert read_range("32-512", "--input-len") == (32, 512)
    assert read_range("64", "--input-len") == (64, 64)


@pytest.mark.parametrize("text", ["", "0-4", "9-3", "1-2-3", "a-b", "-5"])
def test_broken_ranges_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--input-len 32-512"):
        read_range(text, "--input-len")
