"""Tasks: what counts as valid, where two answers differ, and whether the tasks themselves hold together."""

import json

import pytest

from holdfast.eval.tasks import JsonTask, first_object, is_valid, read_tasks, same_tokens

PLAIN = JsonTask((), ("city", "country"))
CALL = JsonTask((), ("city",), "get_weather")


@pytest.mark.parametrize(
    ("answer", "valid"),
    [
        ('{"city": "Rome", "country": "Italy"}', True),
        ('Here it is:\n```json\n{"country": 1, "city": null}\n```', True),
        ('{"city": "Rome"}', False),
        ('{"city": "Rome", "country": "Italy", "more": 1}', False),
        ('{"city": "Rome", "country": "Italy",}', False),
        ('{"city": "Rome", "country": "It', False),
        ("[1, 2]", False),
        ("", False),
    ],
)
def test_is_valid_object_needs_exactly_its_keys(answer: str, valid: bool) -> None:
    assert is_valid(PLAIN, answer) is valid


@pytest.mark.parametrize(
    ("answer", "valid"),
    [
        ('{"name": "get_weather", "arguments": {"city": "Oslo"}}', True),
        ('{"name": "get_time", "arguments": {"city": "Oslo"}}', False),
        ('{"name": "get_weather", "arguments": {"town": "Oslo"}}', False),
        ('{"name": "get_weather", "arguments": "Oslo"}', False),
        ('{"city": "Oslo"}', False),
        ("no call", False),
    ],
)
def test_is_valid_call_needs_function_and_arguments(answer: str, valid: bool) -> None:
    assert is_valid(CALL, answer) is valid


def test_first_object_deep_nesting_is_none() -> None:
    assert first_object("{" + '"a":{' * 100_000) is None


@pytest.mark.parametrize(
    ("reference", "answer", "count"),
    [((1, 2, 3), (1, 2, 3), 3), ((1, 2, 3), (1, 9, 3), 1), ((1,), (2,), 0), ((), (), 0)],
)
def test_same_tokens_counts_until_first_difference(
    reference: tuple[int, ...], answer: tuple[int, ...], count: int
) -> None:
    assert same_tokens(reference, answer) == count


def test_read_tasks_worked_call_is_valid_itself() -> None:
    tasks = read_tasks()
    for task in tasks.tools:
        assert task.name
        assert is_valid(task, task.conversation[1]["content"]), "the example shows the form that is judged"
    assert all(json.dumps(list(task.keys)) and not task.name for task in tasks.json)
    assert len(set(tasks.recall.keys)) == len(tasks.recall.keys)
    assert len(set(tasks.recall.words)) == len(tasks.recall.words)


def test_tasks_first_takes_few_of_each_kind() -> None:
    few = read_tasks().first(2, 1)
    assert (len(few.continuations), len(few.json), len(few.tools)) == (2, 1, 1)
