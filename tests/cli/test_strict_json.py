"""JSON that every parser takes."""

import json
import math

from holdfast.cli.strict_json import dumps


def refuse(word: str) -> None:
    raise AssertionError(f"{word} is no JSON")


def test_numbers_that_are_not_finite_become_null() -> None:
    value = {"a": [1.5, math.nan, -math.inf], 7: (math.inf, {"b": True}), "text": "\ud800 é"}
    read = json.loads(dumps(value), parse_constant=refuse)
    assert read == {"a": [1.5, None, None], "7": [None, {"b": True}], "text": "\ud800 é"}


def test_it_is_plain_ascii_on_one_line() -> None:
    assert dumps({"text": "é\n"}).isascii()
    assert "\n" not in dumps({"text": "é\n"})
