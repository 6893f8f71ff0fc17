"""One template through both renderers: ours, and the one of transformers that it must agree with."""

from contextlib import suppress
from typing import Any

from holdfast.errors import TemplateError
from holdfast.text.chat_template import ChatTemplate

MESSAGES = [
    {"role": "system", "content": "You are  helpful.\n"},
    {"role": "user", "content": "What is 2 < 3 & 'x'?\nSecond line"},
    {
        "role": "assistant",
        "content": "<think>hm</think>Yes é中😀",
        "tool_calls": [{"name": "f", "arguments": {"b": 1, "a": [1.5, None, True]}}],
    },
    {"role": "tool", "content": "result", "name": "f"},
    {"role": "user", "content": "thanks"},
]
VARIABLES: dict[str, Any] = {
    "tools": [
        {
            "type": "function",
            "function": {"name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "int"}}}},
        }
    ],
    "documents": None,
    "bos_token": "<s>",
    "eos_token": "</s>",
    "numbers": [3, 1, 2, 2],
    "words": ["b", "A", "c", "a"],
    "rows": [{"k": "x", "n": 2}, {"k": "y", "n": 1}, {"k": "x", "n": 0}],
    "text": "The quick  brown\n\tfox <b>&</b> 'q' \"r\" É",
    "table": {"b": 2, "a": 1, "C": 3},
    "nothing": None,
    "yes": True,
    "number": 7,
    "real": 2.5,
}


def ours(source: str, messages: Any = MESSAGES, add_generation_prompt: bool = True, **more: Any) -> str:
    extra = {**VARIABLES, **more}
    return ChatTemplate(source, "test", {}).render(messages, add_generation_prompt=add_generation_prompt, **extra)


def theirs(source: str, messages: Any = MESSAGES, add_generation_prompt: bool = True, **more: Any) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    extra = {**VARIABLES, **more}
    texts, _ = render_jinja_template(
        [messages], chat_template=source, add_generation_prompt=add_generation_prompt, **extra
    )
    return texts[0]


def agree(source: str, **options: Any) -> str | None:
    """Assert that both write the same or both refuse; the text, or None."""
    expected, text, refusal = None, None, None
    with suppress(Exception):
        expected = theirs(source, **options)
    try:
        text = ours(source, **options)
    except TemplateError as error:
        refusal = error
    assert text == expected, f"ours refuses: {refusal}" if text is None else "the texts differ"
    return text
