"""Tools over HTTP: forced calls of a real model, what answers are held to behind thoughts, templates that know no tools."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from holdfast.text.detokenizer import byte_alphabet
from server.served import app_client, open_tiny_engine, user

SCHEMA = {
    "type": "object",
    "properties": {
        "unit": {"type": "string", "enum": ["c", "f"]},
        "days": {"type": "integer", "maximum": 9, "minimum": 0},
    },
    "required": ["unit"],
}
TOOLS = [
    {"type": "function", "function": {"name": "look", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]
NAMED = {"type": "function", "function": {"name": "look"}}


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A tiny random model, which says nothing of sense unless it must."""
    with app_client(open_tiny_engine(tmp_path_factory.mktemp("tiny"))) as client:
        yield client


def asked(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    body = {"messages": user("Hi"), "seed": 3, "max_tokens": 400, **fields}
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_model_that_must_call_calls(real, choice):
    # Nothing ends a random model's thoughts.
    done = asked(real, tools=TOOLS, tool_choice=choice, logit_bias={str(byte_alphabet_id("<th")): -100})
    assert done["finish_reason"] == "tool_calls"
    assert done["message"]["content"] is None
    for call in done["message"]["tool_calls"]:
        name, values = call["function"]["name"], json.loads(call["function"]["arguments"])
        assert name == "look" or choice == "required"
        assert values == {} if name == "now" else values["unit"] in ("c", "f")


def byte_alphabet_id(text: str) -> int:
    """The token that tells <think> from <tool_call>."""
    return byte_alphabet()[text[-1]]
