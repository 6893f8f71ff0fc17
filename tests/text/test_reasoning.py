"""ReasoningParser: thoughts separated from the answer, however it is cut; and both parsers together."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from error_codes import raises_code
from for_each import for_each
from holdfast.errors import RequestError
from holdfast.text.answer_deltas import MAX_HELD_SPACE_CHARS, ContentDelta, ReasoningDelta
from holdfast.text.answer_parser import AnswerParser
from holdfast.text.reasoning import DEEPSEEK_R1, HARMONY, QWEN3, ReasoningParser, choose_reasoning_parser
from holdfast.text.tool_formats import HERMES
from text.answer_cases import CUTS, TOOLS, content_of, cut, in_short, read

CASES = {
    "none": ("Yes.\n", ["Yes.\n"], ["?Yes."]),
    "thoughts": ("<think>\nhm\n</think>\n\nYes. ", ["?hm", "Yes. "], ["?hm", "Yes. "]),
    "no line breaks": ("<think>hm</think>Yes", ["?hm", "Yes"], ["?hm", "Yes"]),
    "space before": ("\n <think>hm</think>Yes", ["?hm", "Yes"], ["?hm", "Yes"]),
    "nothing thought": ("<think>\n\n</think>\n\nYes", ["Yes"], ["Yes"]),
    "only the end": ("hm\n</think>\nYes", ["hm\n</think>\nYes"], ["?hm", "Yes"]),
    "never ends": ("<think>hm\n\nhm", ["?hm\n\nhm"], ["?hm\n\nhm"]),
    "half an end": ("<think>hm </thin", ["?hm </thin"], ["?hm </thin"]),
    "half a beginning": (" <thin", [" <thin"], ["?<thin"]),
    "thoughts later": ("So <think>hm</think>", ["So <think>hm</think>"], ["?So <think>hm"]),
    "twice": ("<think>a</think>b<think>c</think>", ["?a", "b<think>c</think>"], ["?a", "b<think>c</think>"]),
    "nothing": ("", [], []),
    "space": (" \n", [" \n"], []),
    "answer of space": ("<think>a</think>\n\n", ["?a"], ["?a"]),
}


@for_each("text, closed, opened", CASES.values())
def test_reasoning_parser_splits_thoughts_from_the_answer(text, closed, opened):
    for pieces in ([text], list(text)):
        assert in_short(read(ReasoningParser(is_open=False), pieces)) == closed
        assert in_short(read(ReasoningParser(is_open=True), pieces)) == opened


TEXTS = st.lists(st.sampled_from(["<think>", "</think>", "<th", "</", "<", ">", "\n", " ", "a", "b c"]), max_size=12)


@given(parts=TEXTS, cuts=CUTS, is_open=st.booleans())
def test_reasoning_parser_result_is_the_same_however_cut(parts, cuts, is_open):
    text = "".join(parts)
    assert read(ReasoningParser(is_open), cut(text, cuts)) == read(ReasoningParser(is_open), [text])


@given(parts=TEXTS)
def test_reasoning_parser_passes_text_without_thoughts_unchanged(parts):
    text = "".join(parts)
    deltas = read(ReasoningParser(), list(text))
    if not text.lstrip().startswith("<think>"):
        assert content_of(deltas) == text


def test_reasoning_parser_emits_thoughts_at_once():
    parser = ReasoningParser(is_open=True)
    assert parser.feed("So") == [ReasoningDelta("So")]
    assert parser.feed(" on\n</th") == [ReasoningDelta(" on")]
    assert parser.feed("ink>\nYes") == [ContentDelta("Yes")]


@pytest.mark.parametrize("size", [100, 10**9])
def test_reasoning_parser_emits_long_runs_of_space(size):
    space = " " * (MAX_HELD_SPACE_CHARS + 200)
    text = f"<think>a{space}</think>b"
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    assert in_short(read(ReasoningParser(), pieces)) == [f"?a{space}", "b"]
    text = f"{space}b"
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    assert in_short(read(ReasoningParser(), pieces)) == [text]


def test_reasoning_format_tells_from_prompt_if_thoughts_began():
    assert QWEN3.thoughts("<|im_start|>assistant\n") == "may"
    assert QWEN3.thoughts(None) == "may"
    assert QWEN3.thoughts("<|im_start|>assistant\n<think>\n") == "open"
    assert QWEN3.thoughts("<|im_start|>assistant\n<think>\n\n</think>\n\n") == "none"
    assert DEEPSEEK_R1.thoughts("<|Assistant|>") == "open"
    assert DEEPSEEK_R1.thoughts("<|Assistant|></think>") == "none"
    assert in_short(read(DEEPSEEK_R1.parser(), ["a</think>b"])) == ["?a", "b"]
    assert in_short(read(QWEN3.parser("x<think>"), ["a</think>b"])) == ["?a", "b"]


def test_choose_reasoning_parser_by_name_or_template():
    assert choose_reasoning_parser("{{ '<think>' }}") is QWEN3
    assert choose_reasoning_parser("{{ messages }}") is None
    assert choose_reasoning_parser(None) is None
    assert choose_reasoning_parser("<think>", "none") is None
    assert choose_reasoning_parser(None, "deepseek_r1") is DEEPSEEK_R1
    with raises_code("value.not_one_of", RequestError):
        choose_reasoning_parser(None, "r2")


def test_choose_reasoning_parser_channels_are_harmony():
    assert choose_reasoning_parser("{{ '<|start|>assistant<|channel|>analysis<|message|>' }}") is HARMONY
    assert choose_reasoning_parser("an encoder of <｜DSML｜tool_calls> and <think>") is QWEN3


def test_choose_reasoning_parser_names_of_vllm_are_taken():
    for name in ("deepseek_v3", "deepseek_v31", "deepseek_v32", "deepseek_v4", "glm45", "glm47", "kimi_k2"):
        assert choose_reasoning_parser(None, name) is QWEN3
    assert choose_reasoning_parser(None, "openai_gptoss") is choose_reasoning_parser(None, "openai") is HARMONY


@for_each(
    "prompt, thoughts",
    [
        ("<｜User｜>Hi<｜Assistant｜><think>", "open"),
        ("<｜User｜>Hi<｜Assistant｜></think>", "none"),
        ("<|user|>\nHi<|assistant|>", "may"),
        ("<|user|>\nHi<|assistant|>\n<think></think>", "none"),
        ("<|im_assistant|>assistant<|im_middle|>", "may"),
    ],
)
def test_reasoning_format_prompt_of_each_family_is_known(prompt, thoughts):
    form = choose_reasoning_parser("<think>")
    assert form is not None
    assert form.thoughts(prompt) == thoughts


def test_harmony_reasoning_prompt_end_decides_the_grammar():
    assert HARMONY.thoughts("<|start|>user<|message|>Hi<|end|><|start|>assistant") == "channels"
    assert HARMONY.thoughts("<|start|>assistant<|channel|>final<|message|>So") == "none"


@pytest.mark.parametrize("text", ["<think>hm\n<|begin|>a", "<think>hm</think><|begin|>a", "<think>hm</th<|begin|>a"])
def test_reasoning_parser_marker_of_calls_ends_thoughts(text):
    thoughts = "hm</th" if "</th<" in text else "hm"
    for pieces in ([text], list(text)):
        parser = ReasoningParser(False, ["<|begin|>"])
        assert in_short(read(parser, pieces)) == [f"?{thoughts}", "<|begin|>a"]


CALL = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'


@for_each(
    "thinks, calls, expected",
    [
        (True, True, [f"?{CALL}", "Well", ("now", "{}")]),
        (True, False, [f"?{CALL}", f"Well {CALL}"]),
        (False, True, ["<think>", ("now", "{}"), "</think>\nWell", ("now", "{}")]),
        (False, False, [f"<think>{CALL}</think>\nWell {CALL}"]),
    ],
)
def test_answer_parser_calls_in_thoughts_are_no_tool_calls(thinks, calls, expected):
    text = f"<think>{CALL}</think>\nWell {CALL}"
    for pieces in ([text], list(text)):
        parser = AnswerParser(ReasoningParser() if thinks else None, HERMES.parser(TOOLS) if calls else None)
        assert in_short(read(parser, pieces)) == expected
        assert parser.num_calls == sum(isinstance(part, tuple) for part in expected)
        assert parser.problems == ()
