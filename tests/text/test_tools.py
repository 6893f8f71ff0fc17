"""Tools and tool_choice of a request: what is sound is taken as it is, what is not is refused by the name of its field."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import RequestError
from holdfast.text.tools import MAX_TOOLS, Tool, ToolChoice, parse_tool_choice, parse_tools
from text.answer_cases import TOOLS


def function(**fields):
    return [{"type": "function", "function": {"name": "f", **fields}}]


def test_tools_are_taken_and_listed_as_templates_know_them():
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    (tool,) = parse_tools(function(description="Does.", parameters=schema, strict=True))
    assert tool == Tool("f", "Does.", schema, is_strict=True)
    assert tool.listed() == {
        "type": "function",
        "function": {"name": "f", "description": "Does.", "parameters": schema},
    }
    (bare,) = parse_tools(function(description=None, parameters=None, strict=None))
    assert bare.listed()["function"] == {"name": "f", "parameters": {"type": "object", "properties": {}}}
    assert parse_tools(None) == parse_tools([]) == ()


BAD = {
    "no list": ({"type": "function"}, "tools="),
    "no object": (["f"], r"tools\[0\] is 'f'"),
    "another type": ([{"type": "web_search"}], r"tools\[0\] has the type 'web_search'"),
    "no function": ([{"type": "function"}], r"tools\[0\].function is None"),
    "no name": ([{"type": "function", "function": {}}], r"tools\[0\].function.name is None"),
    "name of a wrong type": (function(name=5), r"tools\[0\].function.name is 5"),
    "name with a space": (function(name="a b"), "letters, digits"),
    "name that ends a tag": (function(name="a>"), "letters, digits"),
    "long name": (function(name="a" * 129), "letters, digits"),
    "lone surrogate": (function(name="\ud800"), "letters, digits"),
    "description": (function(description=5), "description is 5"),
    "strict": (function(strict="yes"), "strict is 'yes'"),
    "parameters": (function(parameters=[]), "parameters is"),
    "parameters of another type": (function(parameters={"type": "array"}), "type object works"),
    "properties": (function(parameters={"type": "object", "properties": []}), "properties is"),
    "unknown field": (function(arguments={}), "has the field 'arguments'"),
    "twice": (function() * 2, r"tools\[1\] is called 'f'"),
    "twice, with another between": (function() + function(name="g") + function(), r"tools\[2\] is called 'f'"),
    "too many": ([{"type": "function", "function": {"name": f"f{i}"}} for i in range(MAX_TOOLS + 1)], "129 tools"),
    "too deep": (function(parameters={"type": "object", "x": json.loads("[" * 40 + "]" * 40)}), "deep"),
    "too large": (function(description="x" * 2**20), "characters were given"),
    "not a number": (function(parameters={"type": "object", "default": float("nan")}), "nan"),
}


@pytest.mark.parametrize(("value", "words"), BAD.values(), ids=BAD)
def test_bad_tools_are_refused_in_one_short_line(value, words):
    with pytest.raises(RequestError, match=words) as caught:
        parse_tools(value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


@given(
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["type", "function", "name", "parameters", "properties", "strict", "x"]),
                inner,
                max_size=4,
            )
        ),
        max_leaves=10,
    )
)
def test_whatever_is_given_there_are_tools_or_a_request_error(value):
    for given_value in (value, [value], [{"type": "function", "function": value}], function(parameters=value)):
        try:
            tools = parse_tools(given_value)
        except RequestError:
            continue
        assert all(isinstance(tool.listed(), dict) for tool in tools)
    try:
        choice = parse_tool_choice(value, TOOLS)
    except RequestError:
        return
    assert choice.mode in ("none", "auto", "required")


def test_choices():
    assert parse_tool_choice(None, TOOLS) == parse_tool_choice("auto", TOOLS) == ToolChoice("auto")
    assert (
        parse_tool_choice(None, ())
        == parse_tool_choice("none", TOOLS)
        == parse_tool_choice("auto", ())
        == ToolChoice("none")
    )
    assert parse_tool_choice("required", TOOLS) == ToolChoice("required")
    named = ToolChoice("required", "now")
    assert parse_tool_choice({"type": "function", "function": {"name": "now"}}, TOOLS) == named
    assert parse_tool_choice({"type": "function", "name": "now"}, TOOLS) == named
    assert [tool.name for tool in named.allowed(TOOLS)] == ["now"]
    assert ToolChoice("required").allowed(TOOLS) == TOOLS


@pytest.mark.parametrize(
    ("value", "tools", "words"),
    [
        ("always", TOOLS, "tool_choice='always'"),
        (5, TOOLS, "tool_choice=5"),
        ({"type": "function"}, TOOLS, "tool_choice="),
        ({"type": "custom", "name": "now"}, TOOLS, "tool_choice="),
        ("required", (), "has no tools"),
        ({"type": "function", "function": {"name": "then"}}, TOOLS, "names 'then'; the tools are"),
    ],
)
def test_bad_choices_are_refused(value, tools, words):
    with pytest.raises(RequestError, match=words):
        parse_tool_choice(value, tools)
