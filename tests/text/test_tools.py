"""Tools and tool_choice of a request: what is sound is taken as it is, what is not is refused by the name of its field."""

import json

from hypothesis import given
from hypothesis import strategies as st

from error_codes import raises_code
from for_each import for_each
from holdfast.errors import RequestError
from holdfast.text.tools import MAX_TOOLS, Tool, ToolChoice, parse_tool_choice, parse_tools
from text.answer_cases import TOOLS


def function(**fields):
    return [{"type": "function", "function": {"name": "f", **fields}}]


def test_parse_tools_gives_tools_as_templates_list_them():
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
    "no list": ({"type": "function"}, "tools.invalid"),
    "no object": (["f"], "tools.invalid"),
    "another type": ([{"type": "web_search"}], "tools.invalid"),
    "no function": ([{"type": "function"}], "tools.invalid"),
    "no name": ([{"type": "function", "function": {}}], "tools.invalid"),
    "name of a wrong type": (function(name=5), "tools.invalid"),
    "name with a space": (function(name="a b"), "tools.invalid"),
    "name that ends a tag": (function(name="a>"), "tools.invalid"),
    "long name": (function(name="a" * 129), "tools.invalid"),
    "lone surrogate": (function(name="\ud800"), "tools.invalid"),
    "description": (function(description=5), "value.not_string"),
    "strict": (function(strict="yes"), "value.not_bool"),
    "parameters": (function(parameters=[]), "tools.invalid"),
    "parameters of another type": (function(parameters={"type": "array"}), "tools.invalid"),
    "properties": (function(parameters={"type": "object", "properties": []}), "tools.invalid"),
    "unknown field": (function(arguments={}), "tools.unknown_field"),
    "twice": (function() * 2, "tools.duplicate"),
    "twice, with another between": (function() + function(name="g") + function(), "tools.duplicate"),
    "too many": ([{"type": "function", "function": {"name": f"f{i}"}} for i in range(MAX_TOOLS + 1)], "tools.too_many"),
    "too deep": (function(parameters={"type": "object", "x": json.loads("[" * 40 + "]" * 40)}), "template.too_large"),
    "too large": (function(description="x" * 2**20), "tools.too_large"),
    "not a number": (function(parameters={"type": "object", "default": float("nan")}), "template.bad_value"),
}


@for_each("value, code", BAD.values())
def test_parse_tools_bad_tools_are_refused_in_one_line(value, code):
    with raises_code(code, RequestError) as caught:
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
def test_parse_tools_any_input_is_tools_or_a_request_error(value):
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


def test_parse_tool_choice_reads_each_mode():
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


@for_each(
    "value, tools, code",
    [
        ("always", TOOLS, "tools.invalid"),
        (5, TOOLS, "tools.invalid"),
        ({"type": "function"}, TOOLS, "tools.invalid"),
        ({"type": "custom", "name": "now"}, TOOLS, "tools.invalid"),
        ("required", (), "tools.none_given"),
        ({"type": "function", "function": {"name": "then"}}, TOOLS, "tools.unknown_choice"),
    ],
)
def test_parse_tool_choice_bad_choice_is_refused(value, tools, code):
    with raises_code(code, RequestError):
        parse_tool_choice(value, tools)
