"""tool_call_grammar: whatever the grammar lets through, the parser of its format reads as sound calls."""

import json
import random

import pytest

from holdfast.errors import RequestError
from holdfast.text.answer_deltas import ContentDelta
from holdfast.text.answer_parser import AnswerParser
from holdfast.text.reasoning import ReasoningParser
from holdfast.text.tool_formats import FORMATS, HERMES, LLAMA3_JSON, QWEN3_CODER
from holdfast.text.tool_grammar import MAX_FORCED_CALLS, tool_call_grammar
from holdfast.text.tools import ToolChoice, parse_tools
from text.answer_cases import calls_of, in_short, read

llguidance = pytest.importorskip("llguidance")
llguidance_numpy = pytest.importorskip("llguidance.numpy")

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"$ref": "#/$defs/short"},
        "unit": {"type": "string", "enum": ["c", "f"]},
        "days": {"type": "integer"},
        "note": {"type": "string"},
    },
    "required": ["city", "unit"],
    "$defs": {"short": {"type": "string", "maxLength": 4}},
}
TOOLS = parse_tools(
    [
        {"type": "function", "function": {"name": "look-é", "parameters": SCHEMA}},
        {"type": "function", "function": {"name": "now"}},
    ]
)
BYTES = llguidance.LLTokenizer("byte")


def matcher(lark: str):
    grammar = llguidance.LLMatcher.grammar_from_lark(lark)
    assert not llguidance.LLMatcher.validate_grammar(grammar, BYTES)
    return llguidance.LLMatcher(BYTES, grammar)


def takes(lark: str, text: str) -> bool:
    state = matcher(lark)
    return all(state.consume_token(byte) for byte in text.encode()) and state.is_accepting()


def random_answer(lark: str, chance: random.Random, max_bytes: int = 500) -> str | None:
    """What a model without sense writes under the grammar; None where it found no end."""
    state, written = matcher(lark), bytearray()
    mask = llguidance_numpy.allocate_token_bitmask(1, BYTES.vocab_size)
    while len(written) < max_bytes and not state.is_stopped():
        llguidance_numpy.fill_next_token_bitmask(state, mask)
        allowed = [token for token in range(BYTES.vocab_size) if mask[0][token // 32] >> (token % 32) & 1]
        if BYTES.eos_token in allowed and chance.random() < 0.6:
            break
        plain = [token for token in allowed if 32 <= token < 127 or token == 10] or allowed
        closing = [token for token in plain if chr(token) in '"}<>/'] if chance.random() < 0.6 else []
        token = chance.choice(closing or plain)
        assert state.consume_token(token)
        written.append(token)
    return written.decode() if state.is_accepting() else None


@pytest.mark.parametrize("name", [None, "look-é"], ids=["required", "named"])
@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_whatever_is_let_through_is_read_as_sound_calls(form, name):
    lark = tool_call_grammar(form, TOOLS, ToolChoice("required", name))
    chance = random.Random(5)
    answers = [text for text in (random_answer(lark, chance) for _ in range(12)) if text is not None]
    assert len(answers) >= 6
    for text in answers:
        parser = form.parser(TOOLS)
        deltas = read(parser, [text])
        calls = calls_of(deltas)
        assert not parser.problems, text
        assert not any(isinstance(delta, ContentDelta) for delta in deltas), text
        assert 1 <= len(calls) <= (1 if name else MAX_FORCED_CALLS)
        for called, arguments in calls:
            values = json.loads(arguments)
            assert called == "now" or {"city", "unit"} <= values.keys() <= SCHEMA["properties"].keys()
            assert called == "now" or (len(values["city"]) <= 4 and values["unit"] in ("c", "f"))
            assert called != "now" or (values == {} and name is None)


ONE = {
    "hermes": '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "llama3_json": '{"name": "now", "parameters": {}}',
    "qwen3_coder": "<tool_call>\n<function=now>\n</function>\n</tool_call>",
}


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_one_call_several_or_the_one_that_was_named(form):
    one, between = ONE[form.name], "; " if form is LLAMA3_JSON else "\n"
    several = tool_call_grammar(form, TOOLS, ToolChoice("required"))
    assert takes(several, one)
    assert takes(several, between.join([one] * MAX_FORCED_CALLS))
    assert not takes(several, between.join([one] * (MAX_FORCED_CALLS + 1)))
    assert not takes(several, "")
    assert not takes(several, f"Well, {one}")
    single = tool_call_grammar(form, TOOLS, ToolChoice("required"), is_parallel=False)
    assert takes(single, one)
    assert not takes(single, between.join([one] * 2))
    assert not takes(tool_call_grammar(form, TOOLS, ToolChoice("required", "look-é")), one)


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_thoughts_come_before_calls_where_the_model_has_them(form):
    one, choice = ONE[form.name], ToolChoice("required")
    may = tool_call_grammar(form, TOOLS, choice, thoughts="may")
    is_open = tool_call_grammar(form, TOOLS, choice, thoughts="open")
    assert takes(may, one)
    assert takes(may, f"<think>\nhm < </t\n</think>\n\n{one}")
    assert not takes(may, f"hm</think>{one}")
    assert takes(is_open, f"hm\n</think>\n\n{one}")
    assert not takes(is_open, one)
    for is_opened, text in ((False, f"<think>hm</think>\n{one}"), (True, f"hm</think>\n{one}")):
        parser = AnswerParser(ReasoningParser(is_opened), form.parser(TOOLS))
        assert in_short(read(parser, [text])) == ["?hm", ("now", "{}")]


def test_properties_that_a_schema_does_not_name_are_left_out_unless_it_speaks_of_them():
    open_schema = {"type": "object", "properties": {}, "additionalProperties": True}
    tools = parse_tools(
        [
            {"type": "function", "function": {"name": "a", "parameters": {"type": "object", "properties": {}}}},
            {"type": "function", "function": {"name": "b", "parameters": open_schema}},
        ]
    )
    lark = tool_call_grammar(LLAMA3_JSON, tools, ToolChoice("required"))
    assert not takes(lark, '{"name": "a", "parameters": {"x": 1}}')
    assert takes(lark, '{"name": "b", "parameters": {"x": 1}}')


def test_tags_hold_no_names_with_brackets():
    schema = {"type": "object", "properties": {"a>b": {"type": "string"}}}
    tools = parse_tools([{"type": "function", "function": {"name": "f", "parameters": schema}}])
    with pytest.raises(RequestError, match="in tags"):
        tool_call_grammar(QWEN3_CODER, tools, ToolChoice("required"))
    assert tool_call_grammar(HERMES, tools, ToolChoice("required"))
