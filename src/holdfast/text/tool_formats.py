"""FORMATS: how each family of models writes calls of tools, as rows of data, and which of them a chat template teaches; no torch."""

import re
from collections.abc import Mapping

from holdfast.errors import RequestError, shown
from holdfast.text.call_readers import HeadSyntax, JsonSyntax
from holdfast.text.harmony import HARMONY
from holdfast.text.tag_calls import TagPattern, TagSyntax
from holdfast.text.tool_calls import ToolFormat

AUTO, NONE = "auto", "none"

_BRACES = re.compile(r"[\s}]{0,64}")
_BRACES_AND_FENCE = re.compile(r"[\s}`]{0,64}")
_TAG_NAME = r"([^<>\n]{1,256})"

HERMES = ToolFormat(
    "hermes",
    "<tool_call>",
    "</tool_call>",
    JsonSyntax("arguments"),
    slack=_BRACES,
    breaks_lines=True,
    tokens=("<tool_call>", "</tool_call>"),
)
LLAMA3_JSON = ToolFormat(
    "llama3_json",
    "<|python_tag|>",
    "",
    JsonSyntax("parameters"),
    is_bare=True,
    between="; ",
    tokens=("<|python_tag|>",),
)
QWEN3_CODER = ToolFormat(
    "qwen3_coder",
    "<tool_call>",
    "</tool_call>",
    TagSyntax(
        heads=(TagPattern("<function=", _TAG_NAME, ">"),),
        parameter=TagPattern("<parameter=", _TAG_NAME, ">"),
        value_end="</parameter>",
        call_end="</function>",
        written_head="<function={name}>",
        written_parameter="<parameter={key}>\n",
        written_line="\n",
        trims_lines=True,
    ),
    slack=_BRACES,
    breaks_lines=True,
    tokens=("<tool_call>", "</tool_call>"),
)
GLM = ToolFormat(
    "glm",
    "<tool_call>",
    "",
    TagSyntax(
        heads=(
            TagPattern("", r"([^<>\s]{1,256})", "", r"\s{0,64}", "<arg_key>"),
            TagPattern("", r"([^<>\s]{1,256})", "", r"\s{0,64}", "</tool_call>"),
        ),
        parameter=TagPattern("<arg_key>", _TAG_NAME, "</arg_key>", r"\s{0,64}", "<arg_value>"),
        value_end="</arg_value>",
        call_end="</tool_call>",
        written_head="{name}",
        written_parameter="<arg_key>{key}</arg_key>\n<arg_value>",
        written_line="\n",
        are_lines_optional=True,
        is_name_bare=True,
    ),
    tokens=("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)


def _deepseek(name: str, syntax: HeadSyntax, slack: re.Pattern[str]) -> ToolFormat:
    section = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    opening, closing = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
    tokens = (*section, opening, closing, "<｜tool▁sep｜>")
    return ToolFormat(name, opening, closing, syntax, section, slack=slack, between="", tokens=tokens)


DEEPSEEK_V3 = _deepseek(
    "deepseek_v3",
    HeadSyntax(
        head=re.compile(r"\s*\w*<｜tool▁sep｜>\s*(?P<name>[^<>\s]+)\s*"),
        separator="```json",
        closing="<｜tool▁call▁end｜>",
        written_head="function<｜tool▁sep｜>{name}\n```json\n",
        written_end="\n```",
    ),
    _BRACES_AND_FENCE,
)
DEEPSEEK_V31 = _deepseek(
    "deepseek_v31",
    HeadSyntax(
        head=re.compile(r"\s*(?P<name>[^<>\s]+)\s*"),
        separator="<｜tool▁sep｜>",
        closing="<｜tool▁call▁end｜>",
        written_head="{name}<｜tool▁sep｜>",
    ),
    _BRACES,
)
KIMI_K2 = ToolFormat(
    "kimi_k2",
    "<|tool_call_begin|>",
    "<|tool_call_end|>",
    HeadSyntax(
        head=re.compile(r"\s*(?P<id>(?:functions\.)?(?P<name>[^<>\s]+?)(?::[0-9]{1,9})?)\s*"),
        separator="<|tool_call_argument_begin|>",
        closing="<|tool_call_end|>",
        written_head="functions.{name}:{number}<|tool_call_argument_begin|>",
    ),
    ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    slack=_BRACES,
    between="",
    tokens=(
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        "<|tool_call_begin|>",
        "<|tool_call_end|>",
        "<|tool_call_argument_begin|>",
    ),
)
"""The text before the arguments is the id of the call, which the template of the next turn repeats."""
DSML = "｜DSML｜"


def _dsml(name: str, section: str) -> ToolFormat:
    syntax = TagSyntax(
        heads=(TagPattern("", r'([^"<>\n]{1,256})', '">'),),
        parameter=TagPattern(
            *(f"<{DSML}parameter", r"\s{1,8}", 'name="', r'([^"<>\n]{1,256})', '"'),
            *(r"\s{1,8}", 'string="', "([a-z]{1,8})", '">'),
        ),
        value_end=f"</{DSML}parameter>",
        call_end=f"</{DSML}invoke>",
        written_head='{name}">',
        written_parameter=f'<{DSML}parameter name="{{key}}" string="{{is_text}}">',
        written_line="\n",
    )
    markers = (f"<{DSML}{section}>", f"</{DSML}{section}>")
    return ToolFormat(name, f'<{DSML}invoke name="', "", syntax, markers, breaks_lines=True, tokens=(DSML,))


DEEPSEEK_V32 = _dsml("deepseek_v32", "function_calls")
DEEPSEEK_V4 = _dsml("deepseek_v4", "tool_calls")

FORMATS: Mapping[str, ToolFormat] = {
    form.name: form
    for form in (
        *(HERMES, LLAMA3_JSON, QWEN3_CODER, GLM, KIMI_K2, HARMONY),
        *(DEEPSEEK_V3, DEEPSEEK_V31, DEEPSEEK_V32, DEEPSEEK_V4),
    )
}
_OTHER_NAMES = {
    **dict.fromkeys(("qwen", "qwen3", "qwen25"), HERMES),
    **dict.fromkeys(("llama", "llama4_json"), LLAMA3_JSON),
    "qwen3_xml": QWEN3_CODER,
    **dict.fromkeys(("glm45", "glm47"), GLM),
    **dict.fromkeys(("openai", "openai_gptoss"), HARMONY),
}
"""As vLLM and others call them."""


def choose_tool_parser(template: str | None, name: str = AUTO) -> ToolFormat | None:
    """The format with this name, or the one that a chat template teaches; None where it is none of these.

    A template that knows no tools is given them in words, which teach the format of Hermes.
    """
    if name == NONE:
        return None
    if name != AUTO:
        form = FORMATS.get(name) or _OTHER_NAMES.get(name)
        if form is None:
            raise RequestError(
                f"{shown(name)} is no tool parser",
                f"there are {', '.join(FORMATS)}",
                f"use one, {AUTO} or {NONE}",
            )
        return form
    return None if template is None else _taught(template)


def _taught(template: str) -> ToolFormat | None:
    for form in (DEEPSEEK_V32, DEEPSEEK_V4):
        if form.section[0][1:-1] in template:
            return form
    if re.search(r"\btools\b", template) is None:
        return HERMES
    if "<|channel|>" in template:
        return HARMONY
    if KIMI_K2.section[0] in template:
        return KIMI_K2
    if DEEPSEEK_V3.section[0] in template:
        return DEEPSEEK_V3 if "```json" in template else DEEPSEEK_V31
    if "<arg_key>" in template:
        return GLM
    if "<function=" in template:
        return QWEN3_CODER
    if HERMES.opening in template:
        return HERMES
    if LLAMA3_JSON.opening in template or re.search(r'"parameters"\s*:', template.replace("\\", "")) is not None:
        return LLAMA3_JSON
    return None
