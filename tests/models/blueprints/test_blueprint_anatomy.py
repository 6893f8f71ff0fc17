"""What all kinds of models share in a plan."""

from fractions import Fraction

import pytest

from holdfast.errors import ModelFormatError
from holdfast.models.blueprints.anatomy import CacheRows, needed, split
from holdfast.models.settings import Settings


def test_a_row_may_stand_for_many_tokens() -> None:
    assert CacheRows("latent", 61, 1152).bytes_per_token == 70_272
    assert CacheRows("compressed by 128", 20, 584, 128).bytes_per_token == Fraction(365, 4)


def test_what_divides_has_no_reason() -> None:
    assert split(32, 8, "query heads") is None
    assert split(32, 3, "query heads") == "32 query heads do not divide into 3 equal parts"
    assert split(0, 3, "columns of the shared experts") is None


def test_what_is_needed_is_not_guessed() -> None:
    assert needed(Settings({"head_dim": 7}, "config.json"), "head_dim", 10) == 7
    for values in ({}, {"head_dim": None}):
        with pytest.raises(ModelFormatError, match=r"config.json has no head_dim; a plan would be a guess without it"):
            needed(Settings(values, "config.json"), "head_dim", 10)
    for value in (0, 11, "7", True, 7.0):
        with pytest.raises(ModelFormatError, match="a whole number from 1 to 10 is needed there"):
            needed(Settings({"head_dim": value}, "config.json"), "head_dim", 10)
