from array import array

import pytest

from holdfast.engine.admission import ParsedPrompt, parse_prompt, salt_bytes
from holdfast.errors import PromptError, RequestError


@pytest.mark.parametrize(
    ("prompt", "parsed"),
    [
        ("text", ParsedPrompt("text", None)),
        ({"prompt": "text"}, ParsedPrompt("text", None)),
        ({"prompt_token_ids": [1, 2]}, ParsedPrompt(None, [1, 2])),
        ({"prompt_token_ids": (1, 2), "prompt": "label"}, ParsedPrompt("label", [1, 2])),
        ({"prompt": "text", "cache_salt": "mine"}, ParsedPrompt("text", None, "mine")),
        ({"prompt": "text", "prompt_token_ids": None}, ParsedPrompt("text", None)),
    ],
    ids=str,
)
def test_kinds_of_prompts(prompt, parsed):
    assert parse_prompt(prompt) == parsed


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        None,
        5,
        b"bytes",
        ["text"],
        [1, 2, 3],
        {},
        {"prompt": ""},
        {"prompt": None},
        {"prompt": 5},
        {"prompt": b"bytes"},
        {"text": "x"},
        {"prompt": "x", "images": []},
        {5: "x"},
        {"prompt_token_ids": []},
        {"prompt_token_ids": "123"},
        {"prompt_token_ids": 5},
        {"prompt_token_ids": array("i", [1])},
        {"prompt_token_ids": [1, "2"]},
        {"prompt_token_ids": [1, None]},
        {"prompt_token_ids": [1.0]},
        {"prompt_token_ids": [True]},
        {"prompt_token_ids": [[1]]},
        {"cache_salt": "x"},
    ],
    ids=repr,
)
def test_everything_else_is_refused_in_one_short_line(prompt):
    with pytest.raises(PromptError) as caught:
        parse_prompt(prompt)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_ids_are_copied():
    ids = [1, 2]
    parsed = parse_prompt({"prompt_token_ids": ids})
    ids.append(3)
    assert parsed.token_ids == [1, 2]


def test_salts():
    assert salt_bytes(None) == b""
    assert salt_bytes("é") == "é".encode()
    for salt in ("", "x" * 257, "\ud800", 5, b"x"):
        with pytest.raises(RequestError, match="cache_salt="):
            salt_bytes(salt)
        with pytest.raises(RequestError, match="cache_salt="):
            parse_prompt({"prompt": "x", "cache_salt": salt})


def test_a_huge_wrong_value_does_not_flood_the_message():
    with pytest.raises(PromptError) as caught:
        parse_prompt({"k" * 10**6: 1, **{f"key{n}": 1 for n in range(1000)}})
    assert len(str(caught.value)) < 300
    with pytest.raises(RequestError) as caught:
        salt_bytes("x" * 10**6)
    assert len(str(caught.value)) < 300
