"""FORMATS: how each family of models writes calls of tools, from data/tool_formats.json, and which one a chat template teaches; no torch."""

import json
import re
from collections.abc import Mapping
from importlib import resources
from typing import Any

from holdfast.errors import RequestError
from holdfast.text.call_readers import HeadSyntax, JsonSyntax
from holdfast.text.harmony import HARMONY
from holdfast.text.tag_calls import TagPattern, TagSyntax
from holdfast.text.tool_calls import ToolFormat

AUTO, NONE = "auto", "none"


def _format(name: str, row: dict[str, Any]) -> ToolFormat:
    """Make a format of its row: markers, and the syntax of a call as `json`, `head` or `tags`."""
    syntax: JsonSyntax | HeadSyntax | TagSyntax
    if "json" in row:
        syntax = JsonSyntax(**row.pop("json"))
    elif "head" in row:
        head = row.pop("head")
        syntax = HeadSyntax(**{**head, "head": re.compile(head["head"])})
    else:
        tags = row.pop("tags")
        heads = tuple(TagPattern(*parts) for parts in tags["heads"])
        syntax = TagSyntax(**{**tags, "heads": heads, "parameter": TagPattern(*tags["parameter"])})
    lists = {key: tuple(row.pop(key)) for key in ("section", "tokens", "heads_in_thoughts") if key in row}
    return ToolFormat(name, syntax=syntax, slack=re.compile(row.pop("slack", "")), **lists, **row)


_TABLES = json.loads(resources.files("holdfast").joinpath("data", "tool_formats.json").read_text(encoding="utf-8"))
FORMATS: Mapping[str, ToolFormat] = {name: _format(name, row) for name, row in _TABLES["formats"].items()} | {
    HARMONY.name: HARMONY
}
HERMES, LLAMA3_JSON, QWEN3_CODER, GLM, KIMI_K2 = (
    FORMATS[name] for name in ("hermes", "llama3_json", "qwen3_coder", "glm", "kimi_k2")
)
DEEPSEEK_V3, DEEPSEEK_V31, DEEPSEEK_V32, DEEPSEEK_V4 = (FORMATS[f"deepseek_v{n}"] for n in (3, 31, 32, 4))


def choose_tool_parser(template: str | None, name: str = AUTO) -> ToolFormat | None:
    """Return the format with this name, or the one that a chat template teaches; None if it is none of these.

    A template that knows no tools gets them as text, which teaches the format of Hermes.
    """
    if name == NONE:
        return None
    if name != AUTO:
        form = FORMATS.get(_TABLES["other_names"].get(name, name))
        if form is None:
            raise RequestError("value.not_one_of", name="tool_parser", accepted=(*FORMATS, AUTO, NONE), value=name)
        return form
    return None if template is None else _taught(template)


def _taught(template: str) -> ToolFormat | None:
    for form in (DEEPSEEK_V32, DEEPSEEK_V4):
        if form.section[0][1:-1] in template:
            return form
    if re.search(r"\btools\b", template) is None:
        return HERMES
    signs = {
        "<|channel|>": HARMONY,
        KIMI_K2.section[0]: KIMI_K2,
        DEEPSEEK_V3.section[0]: DEEPSEEK_V3 if "```json" in template else DEEPSEEK_V31,
        "<arg_key>": GLM,
        "<function=": QWEN3_CODER,
        HERMES.opening: HERMES,
        LLAMA3_JSON.opening: LLAMA3_JSON,
    }
    taught = next((form for sign, form in signs.items() if sign in template), None)
    is_llama = re.search(r'"parameters"\s*:', template.replace("\\", "")) is not None
    return LLAMA3_JSON if taught is None and is_llama else taught
