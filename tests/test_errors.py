"""The exception tree, and messages that read as one line."""

import inspect
import pickle

import pytest

from holdfast import errors

CLASSES = [value for value in vars(errors).values() if inspect.isclass(value) and issubclass(value, Exception)]


@pytest.mark.parametrize("error_class", CLASSES, ids=lambda cls: cls.__name__)
def test_every_error_is_three_clauses_on_one_line(error_class: type[errors.HoldfastError]) -> None:
    error = error_class("20 pages were asked", "3 are free", "wait or ask for fewer")
    assert isinstance(error, errors.HoldfastError)
    assert str(error) == "20 pages were asked; 3 are free; wait or ask for fewer"
    assert (error.asked, error.has, error.do) == ("20 pages were asked", "3 are free", "wait or ask for fewer")


@pytest.mark.parametrize("error_class", CLASSES, ids=lambda cls: cls.__name__)
def test_errors_survive_the_way_between_processes(error_class: type[errors.HoldfastError]) -> None:
    error = pickle.loads(pickle.dumps(error_class("a", "b", "c")))
    assert type(error) is error_class
    assert (error.asked, error.has, error.do) == ("a", "b", "c")


def test_a_refused_plan_takes_its_table_along() -> None:
    table = errors.PlanTable("load", (errors.PlanRow("weights", 30, "bfloat16"),), 30, 20, "memory_limit")
    error = pickle.loads(pickle.dumps(errors.MemoryPlanError("a", "b", "c", table)))
    assert error.table == table
    assert error.table.short_bytes == 10
    assert str(error) == "a; b; c"
    assert errors.MemoryPlanError("a", "b", "c").table is None


def test_an_empty_clause_leaves_no_trace() -> None:
    assert (
        str(errors.EngineDeadError("a step was asked", "", "make a new engine"))
        == "a step was asked; make a new engine"
    )


@pytest.mark.parametrize("error_class", [errors.ConfigError, errors.RequestError, errors.PromptError])
def test_wrong_values_can_be_caught_as_value_errors(error_class: type[errors.HoldfastError]) -> None:
    with pytest.raises(ValueError, match="asked"):
        raise error_class("asked", "has", "do")


def test_a_request_error_is_never_an_engine_error() -> None:
    for error_class in (errors.PromptError, errors.TemplateError, errors.QueueFullError):
        assert issubclass(error_class, errors.RequestError)
        assert not issubclass(error_class, errors.EngineDeadError | errors.ConfigError | errors.ModelError)


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    drawn = {word for word in (errors.__doc__ or "").split() if word.endswith("Error") and word[0].isupper()}
    assert drawn == {cls.__name__ for cls in CLASSES}


@pytest.mark.parametrize(
    "value",
    [10**5000, [10**5000], "x" * 10**6, "line\nbreak", "\ud800", [["deep"] * 100] * 100, {1: 2}, None, b"\xff" * 999],
    ids=lambda value: type(value).__name__,
)
def test_any_value_can_be_shown_on_a_short_line(value: object) -> None:
    text = errors.shown(value)
    assert 0 < len(text) <= 80
    assert text.isascii()
    assert "\n" not in text


def test_a_value_that_refuses_to_be_shown_is_named_by_its_type() -> None:
    class Secret:
        def __repr__(self) -> str:
            raise RuntimeError("no")

    assert errors.shown(Secret()) == "a Secret"
    assert errors.shown("short") == "'short'"
    assert errors.shown(7) == "7"
