"""Chats of Qwen3.5 and 3.6: thoughts and calls in tags, as a template writes them and as answers hold them."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given

from holdfast.text.answer_parser import AnswerFormat
from holdfast.text.chat_template import ChatTemplate
from holdfast.text.reasoning import QWEN3, choose_reasoning_parser
from holdfast.text.tool_formats import FORMATS, QWEN3_CODER, choose_tool_parser
from text.answer_cases import CUTS, TOOLS, calls_of, content_of, cut, in_short, read
from text.template_cases import CHAT_TEMPLATES

SOURCE = CHAT_TEMPLATES["calls in tags"]
LISTED = [tool.listed() for tool in TOOLS]
QUESTION = {"role": "user", "content": "How is Rome?"}
CALL = "<tool_call>\n<function=look>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>"
ROME = ("look", '{"city": "Rome", "days": 2}')
NOW = "<tool_call>\n<function=now>\n</function>\n</tool_call>"


def rendered(messages: Sequence[Mapping[str, object]], **values: Any) -> str:
    return ChatTemplate(SOURCE, "fake", {}).render(messages, tools=LISTED, **values)


def form_of(source: str = SOURCE) -> AnswerFormat:
    return AnswerFormat(choose_reasoning_parser(source), choose_tool_parser(source), TOOLS)


def test_template_of_tags_chooses_both_parsers() -> None:
    assert form_of() == AnswerFormat(QWEN3, QWEN3_CODER, TOOLS)


@pytest.mark.parametrize(
    ("values", "end", "thoughts"),
    [
        ({}, "<|im_start|>assistant\n<think>\n", "open"),
        ({"enable_thinking": True}, "<|im_start|>assistant\n<think>\n", "open"),
        ({"enable_thinking": False}, "<|im_start|>assistant\n<think>\n\n</think>\n\n", "none"),
    ],
)
def test_template_of_tags_prompt_shows_if_thoughts_are_open(values: dict[str, object], end: str, thoughts: str) -> None:
    prompt = rendered([QUESTION], **values)
    assert prompt.endswith(end)
    assert form_of().thoughts(prompt) == thoughts


@given(CUTS)
def test_answer_in_tags_splits_into_thoughts_content_and_calls(places: list[int]) -> None:
    text = f"I need the weather.\n</think>\n\nI look.\n\n{CALL}\n{NOW}"
    deltas = read(form_of().parser(rendered([QUESTION])), cut(text, places))
    assert in_short(deltas) == ["?I need the weather.", "I look.", ROME, ("now", "{}")]


@given(CUTS)
def test_call_in_open_thoughts_ends_them(places: list[int]) -> None:
    for call in (CALL, CALL.replace("\n<function", "<function", 1)):
        deltas = read(form_of().parser(rendered([QUESTION])), cut(f"I look.\n{call}\n{NOW}", places))
        assert in_short(deltas) == ["?I look.", ROME, ("now", "{}")]


QUOTED = (
    "The format is <tool_call>\n<function=a_name>\n<parameter=a_key>.",
    "A <tool_call> comes last.",
    "<tool_call>\n<function=looking>",
    "<tool_call>\n<function=look",
    '<tool_call>{"name": "look"}</tool_call>',
)


@pytest.mark.parametrize("thought", QUOTED)
def test_quoted_call_in_thoughts_stays_a_thought(thought: str) -> None:
    for pieces in ([thought, "\n</think>\n\nDone."], [*thought, *"\n</think>\n\nDone."]):
        deltas = read(form_of().parser(rendered([QUESTION])), pieces)
        assert in_short(deltas) == [f"?{thought}", "Done."]


def test_call_in_thoughts_without_tools_stays_a_thought() -> None:
    deltas = read(AnswerFormat(QWEN3).parser(rendered([QUESTION])), [CALL])
    assert in_short(deltas) == [f"?{CALL}"]


def test_thoughts_of_other_formats_do_not_end_at_calls() -> None:
    form = AnswerFormat(QWEN3, FORMATS["hermes"], TOOLS)
    text = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    assert in_short(read(form.parser("<think>\n"), [f"{text}</think>a"])) == [f"?{text}", "a"]


def test_skipped_thoughts_leave_content_and_calls() -> None:
    prompt = rendered([QUESTION], enable_thinking=False)
    assert in_short(read(form_of().parser(prompt), [f"I look.\n\n{CALL}"])) == ["I look.", ROME]


ANSWERS = {
    "call": f"I need it.\n</think>\n\n{CALL}",
    "words and a call": f"I need it.\n</think>\n\nI look.\n\n{CALL}",
    "two calls": f"Both.\n</think>\n\n{CALL}\n{NOW}",
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
@pytest.mark.parametrize("values", [{}, {"preserve_thinking": True}], ids=["default", "preserved"])
def test_next_prompt_begins_with_prompt_and_answer(answer: str, values: dict[str, object]) -> None:
    """A turn of an agent goes on from cached pages."""
    prompt = rendered([QUESTION], **values)
    deltas = read(form_of().parser(prompt), [answer])
    calls = [
        {"id": f"call_{place}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for place, (name, arguments) in enumerate(calls_of(deltas))
    ]
    thoughts = "".join(part[1:] for part in in_short(deltas) if isinstance(part, str) and part.startswith("?"))
    said = {"role": "assistant", "content": content_of(deltas).strip(), "reasoning_content": thoughts}
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "wet"} for call in calls]
    following = rendered([QUESTION, said | {"tool_calls": calls}, *results], **values)
    assert following.startswith(f"{prompt}{answer}<|im_end|>\n<|im_start|>user\n<tool_response>\nwet")


def test_earlier_thoughts_leave_the_prompt_unless_preserved() -> None:
    chat = [QUESTION, {"role": "assistant", "content": "Wet.", "reasoning_content": "It rains."}, QUESTION]
    assert "It rains." not in rendered(chat)
    assert "<think>\nIt rains.\n</think>\n\nWet." in rendered(chat, preserve_thinking=True)
