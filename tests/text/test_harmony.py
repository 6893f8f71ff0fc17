"""HarmonyParser: messages of gpt-oss in channels, as reasoning, content and calls, however they are cut."""

import pytest

from for_each import for_each
from holdfast.text.answer_parser import AnswerFormat
from holdfast.text.harmony import HARMONY, MAX_HEADER_CHARS, TOKENS, HarmonyParser
from holdfast.text.reasoning import HARMONY as HARMONY_REASONING
from holdfast.text.tool_calls import MAX_CALLS
from text.answer_cases import TOOLS, in_short, read
from text.call_transcripts import ANALYSIS, CITY, GOLDEN_HARMONY, HEAD

CALL = f"<|channel|>commentary to=functions.look<|message|>{CITY}<|call|>"


@for_each("text, expected", GOLDEN_HARMONY.values())
def test_harmony_transcripts_read_alike_however_cut(text, expected):
    whole = HarmonyParser(TOOLS)
    assert in_short(read(whole, [text])) == expected
    for pieces in (list(text), *([text[:place], text[place:]] for place in range(len(text)))):
        parser = HarmonyParser(TOOLS)
        assert in_short(read(parser, pieces)) == expected
        assert (parser.problems, parser.num_calls) == (whole.problems, whole.num_calls)


@for_each(
    "prompt, text, expected",
    [
        (f"a{HEAD}", "<|channel|>final<|message|>Yes", ["Yes"]),
        (f"a{HEAD}<|channel|>final<|message|>Well, ", "yes<|return|>", ["yes"]),
        (f"a{HEAD}<|channel|>analysis<|message|>So", " it is<|end|>", ["? it is"]),
        (f"a{HEAD}<|channel|>fi", "nal<|message|>Yes", ["Yes"]),
        (f"a{HEAD}<|channel|>fi", "", []),
        ("a", "<|channel|>final<|message|>Yes", ["Yes"]),
    ],
)
def test_harmony_prompt_end_sets_the_first_state(prompt, text, expected):
    for pieces in ([text], list(text)):
        assert in_short(read(HarmonyParser(TOOLS, prompt=prompt), pieces)) == expected


def test_harmony_switched_off_parts_become_content():
    text = f"{ANALYSIS}{HEAD}{CALL}"
    assert in_short(read(HarmonyParser(None), [text])) == ["?hm", CITY]
    assert in_short(read(HarmonyParser(TOOLS, reads_reasoning=False), [text])) == ["hm", ("look", CITY)]
    assert in_short(read(HarmonyParser(None, reads_reasoning=False), [text])) == [f"hm\n{CITY}"]


@pytest.mark.parametrize("size", [7, 10**9])
def test_harmony_endless_header_is_content(size):
    text = f"<|channel|>{'x' * MAX_HEADER_CHARS}<|channel|>final<|message|>Yes"
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    assert in_short(read(HarmonyParser(TOOLS), pieces)) == [f"<|channel|>{'x' * MAX_HEADER_CHARS}\nYes"]


def test_harmony_calls_above_the_limit_are_content():
    parser = HarmonyParser(TOOLS)
    found = in_short(read(parser, [f"{CALL}{HEAD}" * (MAX_CALLS + 1)]))
    assert parser.num_calls == MAX_CALLS
    assert found[-1] == CITY


def test_harmony_stray_markers_are_hidden_from_content():
    form = AnswerFormat(HARMONY_REASONING, HARMONY, TOOLS)
    text = "<|channel|>final<|message|>a<|constrain|>b<|mess<|message|>age|><|con"
    for pieces in ([text], list(text)):
        assert in_short(read(form.parser(None, TOKENS), pieces)) == ["ab<|message|><|con"]
        assert in_short(read(form.parser(None), pieces)) == [text.partition("<|message|>")[2]]
