"""tool_call_grammar: whatever the grammar lets through, the parser of its format reads as sound calls."""

import json
import random
import re

import numpy as np
import pytest

from error_codes import raises_code
from for_each import for_each
from holdfast.errors import RequestError
from holdfast.text.answer_deltas import ContentDelta
from holdfast.text.answer_grammar import MAX_FORCED_CALLS, tool_call_grammar
from holdfast.text.answer_parser import AnswerParser
from holdfast.text.reasoning import ReasoningParser
from holdfast.text.tool_formats import DEEPSEEK_V32, FORMATS, GLM, HARMONY, HERMES, LLAMA3_JSON, QWEN3_CODER
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
        bits = np.unpackbits(np.asarray(mask[0]).view(np.uint8), bitorder="little")[: BYTES.vocab_size]
        allowed = bits.nonzero()[0].tolist()
        if BYTES.eos_token in allowed and chance.random() < 0.6:
            break
        plain = [token for token in allowed if 32 <= token < 127 or token == 10] or allowed
        closing = [token for token in plain if chr(token) in '"}<>/'] if chance.random() < 0.6 else []
        token = chance.choice(closing or plain)
        assert state.consume_token(token)
        written.append(token)
    return written.decode() if state.is_accepting() else None


@pytest.mark.each_value
@pytest.mark.parametrize("name", [None, "look-é"], ids=["required", "named"])
@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_tool_grammar_answers_parse_as_sound_calls(form, name):
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
    "glm": "<tool_call>now\n</tool_call>",
    "kimi_k2": "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
    "harmony": "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}",
    "deepseek_v3": "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜>",
    "deepseek_v31": "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
    "deepseek_v32": '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>',
    "deepseek_v4": '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>',
}


def calls_in(form, num_calls: int) -> str:
    """An answer of this many calls."""
    line = "\n" if form.section[0].startswith("<｜DSML") else ""
    return form.section[0] + line + form.between.join([ONE[form.name]] * num_calls) + line + form.section[1]


@for_each("form", FORMATS.values())
def test_tool_grammar_allows_one_several_or_the_named_call(form):
    one, most = calls_in(form, 1), 1 if form is HARMONY else MAX_FORCED_CALLS
    several = tool_call_grammar(form, TOOLS, ToolChoice("required"))
    assert takes(several, one)
    assert takes(several, calls_in(form, most))
    assert not takes(several, calls_in(form, most + 1))
    assert not takes(several, "")
    assert not takes(several, f"Well, {one}")
    single = tool_call_grammar(form, TOOLS, ToolChoice("required"), is_parallel=False)
    assert takes(single, one)
    assert not takes(single, calls_in(form, 2))
    assert not takes(tool_call_grammar(form, TOOLS, ToolChoice("required", "look-é")), one)


@for_each("form", [form for form in FORMATS.values() if form is not HARMONY])
def test_tool_grammar_allows_thoughts_before_calls(form):
    one, choice = calls_in(form, 1), ToolChoice("required")
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


def test_tool_grammar_forbids_additional_properties_by_default():
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


def test_tool_grammar_parameter_name_with_bracket_is_refused():
    schema = {"type": "object", "properties": {"a>b": {"type": "string"}}}
    tools = parse_tools([{"type": "function", "function": {"name": "f", "parameters": schema}}])
    with raises_code("tools.bad_parameter_name", RequestError):
        tool_call_grammar(QWEN3_CODER, tools, ToolChoice("required"))
    assert tool_call_grammar(HERMES, tools, ToolChoice("required"))
    with raises_code("tools.bad_parameter_name", RequestError):
        tool_call_grammar(GLM, tools, ToolChoice("required"))
    quoted = {"type": "object", "properties": {'a"b': {"type": "string"}}}
    tools = parse_tools([{"type": "function", "function": {"name": "f", "parameters": quoted}}])
    with raises_code("tools.bad_parameter_name", RequestError):
        tool_call_grammar(DEEPSEEK_V32, tools, ToolChoice("required"))
    assert tool_call_grammar(GLM, tools, ToolChoice("required"))


def test_harmony_grammar_allows_analysis_before_the_call():
    lark = tool_call_grammar(HARMONY, TOOLS, ToolChoice("required"), thoughts="channels")
    analysis = "<|channel|>analysis<|message|>hm < <|e<|end|><|start|>assistant"
    assert takes(lark, ONE["harmony"])
    assert takes(lark, analysis + ONE["harmony"])
    assert not takes(lark, "<|channel|>final<|message|>Hi")
    found = in_short(read(HARMONY.parser(TOOLS), [analysis + ONE["harmony"]]))
    assert found == ["?hm < <|e", ("now", "{}")]


def test_glm_grammar_takes_calls_with_and_without_lines():
    schema = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}}
    tools = parse_tools([{"type": "function", "function": {"name": "f", "parameters": schema}}])
    lark = tool_call_grammar(GLM, tools, ToolChoice("required"))
    pairs = [("a", "x\n<b>"), ("b", "5")]
    for line in ("", "\n"):
        tags = [f"<arg_key>{key}</arg_key>{line}<arg_value>{value}</arg_value>{line}" for key, value in pairs]
        text = f"<tool_call>f{line}{''.join(tags)}</tool_call>"
        assert takes(lark, text)
        assert calls_of(read(GLM.parser(tools), [text])) == [("f", '{"a": "x\\n<b>", "b": 5}')]


class MarkerVocabulary:
    """Bytes, an end token, and one special token for each marker."""

    def __init__(self, markers) -> None:
        self.ids = {marker: 257 + number for number, marker in enumerate(markers)}
        self.tokens = [bytes([byte]) for byte in range(256)] + [b"</s>", *(marker.encode() for marker in self.ids)]
        self.special_token_ids = list(range(256, len(self.tokens)))
        self.eos_token_id, self.bos_token_id = 256, None

    def __call__(self, text: str) -> list[int]:
        """Tokens of a text, with markers as special tokens."""
        parts = re.split(f"({'|'.join(map(re.escape, self.ids))})", text)
        return [token for part in parts for token in ([self.ids[part]] if part in self.ids else part.encode())]

    def takes(self, lark: str, tokens: list[int]) -> bool:
        """Whether the grammar takes these tokens, and nothing is missing then."""
        wrapped = llguidance.TokenizerWrapper(self)
        vocabulary = llguidance.LLTokenizer(wrapped, n_vocab=len(self.tokens), eos_token=[256])
        state = llguidance.LLMatcher(vocabulary, llguidance.LLMatcher.grammar_from_lark(lark), log_level=0)
        return all(state.consume_token(token) for token in tokens) and state.is_accepting()


FULL = {
    "hermes": '<tool_call>\n{"name": "look-é", "arguments": {"city": "a", "unit": "c"}}\n</tool_call>',
    "glm": '<tool_call>look-é\n<arg_key>city</arg_key>\n<arg_value>"a"</arg_value>\n<arg_key>unit</arg_key>'
    "<arg_value>c</arg_value><arg_key>note</arg_key><arg_value>x < </arg y</arg_value></tool_call>",
    "deepseek_v32": '<｜DSML｜invoke name="look-é">\n<｜DSML｜parameter name="city" string="false">"a"'
    '</｜DSML｜parameter>\n<｜DSML｜parameter name="unit" string="true">c</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="note" string="true">x </ y</｜DSML｜parameter>\n</｜DSML｜invoke>',
}


@for_each("form", [form for form in FORMATS.values() if not form.is_bare])
def test_tool_call_grammar_special_markers_are_named_by_id(form):
    vocabulary = MarkerVocabulary([*form.tokens, "</think>"])
    thoughts = "channels" if form is HARMONY else "open"
    lark = tool_call_grammar(form, TOOLS, ToolChoice("required"), True, thoughts, vocabulary.ids)
    head = "" if form is HARMONY else "hm < </think>\n"
    texts = [head + calls_in(form, 1)]
    if form.name in FULL:
        texts.append(texts[0].replace(ONE[form.name], FULL[form.name]))
    for text in texts:
        assert vocabulary.takes(lark, vocabulary(text)), text
        # Spelled out in bytes a marker is text, and no marker.
        assert not vocabulary.takes(lark, list(text.encode()))
