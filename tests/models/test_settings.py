import pytest

from holdfast.errors import ModelFormatError
from holdfast.models.settings import Settings


def settings(**values):
    return Settings(values, "config.json")


def test_absent_keys_take_the_default_and_null_means_none_only_where_it_may():
    assert settings().count("n", 3, 10) == 3
    assert settings(n=None).optional_count("n", 3, 10) is None
    assert settings().optional_count("n", 3, 10) == 3
    assert settings().optional_count("n", None, 10) is None
    with pytest.raises(ModelFormatError, match="n = None"):
        settings(n=None).count("n", 3, 10)


@pytest.mark.parametrize("value", [0, 11, True, 1.0, "1", [], 10**40])
def test_counts_have_a_type_and_bounds(value):
    with pytest.raises(ModelFormatError, match=r"config.json says n = .*from 1 to 10"):
        settings(n=value).count("n", 1, 10)


@pytest.mark.parametrize("value", [0, -1.0, float("inf"), float("nan"), True, "2", None, 10**400])
def test_numbers_are_finite_and_positive(value):
    with pytest.raises(ModelFormatError, match=r"config\.json says x"):
        settings(x=value).number("x", 1.0)


def test_nested_objects_are_named_with_their_path():
    part = settings(outer={"inner": "no"}).part("outer")
    assert part is not None
    with pytest.raises(ModelFormatError, match=r"outer\.inner = 'no'"):
        part.count("inner", 1, 2)
    with pytest.raises(ModelFormatError, match=r"no outer\.other"):
        part.number("other")


@pytest.mark.parametrize(
    ("value", "ids"), [(2, (2,)), ([1, 2], (1, 2)), (None, ()), (-1, ()), ([5, -1], (5,)), ([], ())]
)
def test_token_ids_are_a_number_or_a_list(value, ids):
    assert settings(eos=value).token_ids("eos", (7,)) == ids
    assert settings().token_ids("eos", (7,)) == (7,)


@pytest.mark.parametrize("value", ["2", [1, "2"], 1.5, True, 2**31, [[1]]])
def test_other_token_ids_are_refused(value):
    with pytest.raises(ModelFormatError, match="token id"):
        settings(eos=value).token_ids("eos", ())


def test_a_count_that_has_to_be_there() -> None:
    settings = Settings({"a": 3, "b": 0}, "config.json")
    assert settings.required_count("a", 3) == 3
    with pytest.raises(ModelFormatError, match="has no c; a whole number is needed"):
        settings.required_count("c", 3)
    for key, high in (("a", 2), ("b", 9)):
        with pytest.raises(ModelFormatError, match=f"a whole number from 1 to {high}"):
            settings.required_count(key, high)
