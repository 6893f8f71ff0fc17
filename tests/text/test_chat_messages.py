import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import PromptError
from holdfast.text.chat_template import MAX_CHAT_CHARS, MAX_DEPTH, MAX_MESSAGES, PlainData, plain_messages


def plain(*messages):
    return plain_messages(list(messages), PlainData())


class Text(str):
    def evil(self):
        return "evil"


class Dict(dict):
    def evil(self):
        return "evil"


BAD = {
    "not a list": "hello",
    "a dict": {"role": "user", "content": "a"},
    "nothing": None,
    "no messages": [],
    "too many": [{"role": "user", "content": "a"}] * (MAX_MESSAGES + 1),
    "message of a wrong type": ["hello"],
    "no role": [{"content": "a"}],
    "empty role": [{"role": "", "content": "a"}],
    "role of a wrong type": [{"role": 5, "content": "a"}],
    "no content": [{"role": "user"}],
    "nothing as content": [{"role": "user", "content": None}],
    "content of a wrong type": [{"role": "user", "content": 5}],
    "content as dict": [{"role": "user", "content": {"text": "a"}}],
    "no parts": [{"role": "user", "content": []}],
    "image part": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}],
    "part without text": [{"role": "user", "content": [{"type": "text"}]}],
    "part of a wrong type": [{"role": "user", "content": [5]}],
    "key of a wrong type": [{"role": "user", "content": "a", 5: "b"}],
    "bytes": [{"role": "user", "content": "a", "x": b"b"}],
    "object": [{"role": "user", "content": "a", "x": object()}],
    "set": [{"role": "user", "content": "a", "x": {1}}],
    "not a number": [{"role": "user", "content": "a", "x": float("nan")}],
    "infinite": [{"role": "user", "content": "a", "x": float("inf")}],
    "huge integer": [{"role": "user", "content": "a", "x": 10**5000}],
    "too deep": [{"role": "user", "content": "a", "x": json.loads("[" * (MAX_DEPTH + 2) + "]" * (MAX_DEPTH + 2))}],
    "too long": [{"role": "user", "content": "a" * (MAX_CHAT_CHARS + 1)}],
    "too long together": [{"role": "user", "content": "a" * 2**20}] * 17,
    "too many values": [{"role": "user", "content": "a", "x": [0] * 300_000}],
}


@pytest.mark.parametrize("messages", BAD.values(), ids=BAD)
def test_bad_messages_are_refused_in_one_short_line(messages):
    with pytest.raises(PromptError) as caught:
        plain_messages(messages, PlainData())
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_a_message_that_holds_itself_is_refused():
    message = {"role": "user", "content": "a"}
    message["self"] = message
    with pytest.raises(PromptError, match="deep"):
        plain(message)


def test_content_becomes_one_string():
    assert plain({"role": "user", "content": "a"}) == [{"role": "user", "content": "a"}]
    parts = [{"type": "text", "text": "a"}, "b", {"text": "c"}]
    assert plain({"role": "user", "content": parts})[0]["content"] == "a\nb\nc"
    assert plain({"role": "user", "content": ({"type": "text", "text": "a"},)})[0]["content"] == "a"


def test_calls_of_tools_need_no_content():
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    assert plain(call) == [call]
    assert plain({**call, "content": None})[0]["content"] is None


def test_reasoning_is_known_by_the_names_that_templates_read():
    for name in ("reasoning_content", "thinking", "reasoning"):
        message = plain({"role": "assistant", "content": "a", name: "because"})[0]
        assert message["reasoning_content"] == message["thinking"] == "because"
    assert "thinking" not in plain({"role": "assistant", "content": "a"})[0]


def test_only_built_in_types_come_out():
    message = Dict(role=Text("user"), content=Text("a"), more=[Dict(x=Text("y")), (True, 1, 2.5, None)])
    copied = plain(message)[0]
    assert copied == {"role": "user", "content": "a", "more": [{"x": "y"}, [True, 1, 2.5, None]]}
    assert {type(value) for value in (copied, copied["role"], copied["content"])} == {dict, str}
    assert type(copied["more"][0]) is dict


def test_characters_are_counted():
    data = PlainData()
    plain_messages([{"role": "user", "content": "abc"}], data)
    assert data.num_chars == len("roleusercontentabc")


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**64), 2**64)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(value=JSON)
def test_json_comes_out_as_it_went_in(value):
    assert PlainData().copy(value, "x") == value


@given(messages=st.one_of(JSON, st.lists(st.dictionaries(st.sampled_from(["role", "content", "x"]), JSON))))
def test_whatever_is_given_there_is_a_copy_or_a_prompt_error(messages):
    try:
        copied = plain_messages(messages, PlainData())
    except PromptError:
        return
    assert all(isinstance(message["role"], str) for message in copied)
