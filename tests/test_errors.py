"""The exception tree, codes, and the message table."""

import inspect
import pickle
import re

import pytest

from error_codes import PACKAGE, message_table, placeholders, raise_sites
from holdfast import errors

CLASSES = [value for value in vars(errors).values() if inspect.isclass(value) and issubclass(value, Exception)]


@pytest.mark.parametrize("error_class", CLASSES, ids=lambda cls: cls.__name__)
def test_error_with_code_and_values_renders_its_message(error_class: type[errors.HoldfastError]) -> None:
    error = error_class("transfer.not_allowed", what="LLM")
    assert isinstance(error, errors.HoldfastError)
    assert (error.code, error.values) == ("transfer.not_allowed", {"what": "LLM"})
    assert str(error).startswith("LLM cannot be pickled or copied: ")


@pytest.mark.parametrize("error_class", CLASSES, ids=lambda cls: cls.__name__)
def test_error_sent_to_another_process_stays_whole(error_class: type[errors.HoldfastError]) -> None:
    error = error_class("transfer.not_allowed", what="LLM").within("prompt 3").hinting("Retry.")
    for copy in (pickle.loads(pickle.dumps(error)), errors.HoldfastError.from_plain(error.to_plain())):
        assert type(copy) is error_class
        assert (copy.code, copy.values, str(copy)) == (error.code, error.values, str(error))


def test_error_of_an_unknown_class_is_restored_as_the_base() -> None:
    plain = errors.TransferError("transfer.not_allowed", what="LLM").to_plain()
    assert type(errors.HoldfastError.from_plain({**plain, "kind": "dict"})) is errors.HoldfastError


def test_memory_plan_error_pickled_keeps_its_table() -> None:
    table = errors.PlanTable("load", (errors.PlanRow("weights", 30, "bfloat16"),), 30, 20, "memory_limit")
    error = pickle.loads(pickle.dumps(errors.MemoryPlanError("transfer.not_allowed", table=table, what="x")))
    assert error.table == table
    assert error.table.short_bytes == 10
    assert errors.MemoryPlanError("transfer.not_allowed", what="x").table is None


def test_error_within_contexts_names_the_outermost_first() -> None:
    error = errors.PromptError("transfer.not_allowed", what="x").within("prompt 3").within("rank 1").within("rank 1")
    assert str(error).startswith("rank 1: prompt 3: x cannot")


def test_message_template_shows_values_safely_and_joins_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "messages_of", lambda area: {"a": "{x!r} of {xs!l}; {n:,}"})
    assert errors.message_of("z.a", {"x": "\ud800", "xs": ("p", "q"), "n": 4096}) == "'\\ud800' of p, q; 4,096"


def test_raise_sites_all_have_a_message_with_their_values() -> None:
    table = message_table()
    wrong = []
    for site in raise_sites():
        if site.code not in table:
            wrong.append(f"{site.place}: {site.code} is not in messages/")
            continue
        missing = placeholders(table[site.code]) - site.values
        if missing and not site.is_open:
            wrong.append(f"{site.place}: {site.code} needs {sorted(missing)}")
    assert not wrong, "\n".join(wrong)


def test_message_table_has_lower_case_codes_that_the_source_uses() -> None:
    raisers = [*PACKAGE.rglob("*.py"), *(PACKAGE / "data").glob("*.json")]
    source = "\n".join(path.read_text(encoding="utf-8") for path in raisers)
    for code, text in message_table().items():
        assert re.fullmatch(r"[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)+", code), code
        assert f'"{code}"' in source, f"{code} is never raised"
        assert text == text.strip(), code
        assert text.endswith((".", "?", "}")), f"{code}: a message is whole sentences"


@pytest.mark.parametrize("error_class", [errors.ConfigError, errors.RequestError, errors.PromptError])
def test_wrong_values_can_be_caught_as_value_errors(error_class: type[errors.HoldfastError]) -> None:
    with pytest.raises(ValueError, match="cannot be pickled"):
        raise error_class("transfer.not_allowed", what="x")


def test_request_errors_are_never_engine_errors() -> None:
    for error_class in (errors.PromptError, errors.TemplateError, errors.QueueFullError):
        assert issubclass(error_class, errors.RequestError)
        assert not issubclass(error_class, errors.EngineDeadError | errors.ConfigError | errors.ModelError)


def test_errors_docstring_tree_matches_classes() -> None:
    drawn = {word for word in (errors.__doc__ or "").split() if word.endswith("Error") and word[0].isupper()}
    assert drawn == {cls.__name__ for cls in CLASSES}


@pytest.mark.parametrize(
    "value",
    [10**5000, [10**5000], "x" * 10**6, "line\nbreak", "\ud800", [["deep"] * 100] * 100, {1: 2}, None, b"\xff" * 999],
    ids=lambda value: type(value).__name__,
)
def test_shown_puts_any_value_on_short_line(value: object) -> None:
    text = errors.shown(value)
    assert 0 < len(text) <= 80
    assert text.isascii()
    assert "\n" not in text


def test_shown_names_type_when_repr_fails() -> None:
    class Secret:
        def __repr__(self) -> str:
            raise RuntimeError("no")

    assert errors.shown(Secret()) == "a Secret"
    assert errors.shown("short") == "'short'"
    assert errors.shown(7) == "7"
