"""ToolParser: transcripts of each format, broken ones, and the same result at the same cost however the text is cut."""

import json
import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from counted_work import num_lines
from error_codes import raises_code
from for_each import for_each
from holdfast.errors import RequestError
from holdfast.text import tag_calls
from holdfast.text.answer_deltas import MAX_HELD_SPACE_CHARS, ContentDelta, ToolCallDelta
from holdfast.text.tag_calls import MAX_VALUE_CHARS
from holdfast.text.tool_calls import MAX_CALLS, MAX_HELD_CHARS, MAX_PROBLEMS, ToolFormat
from holdfast.text.tool_formats import (
    DEEPSEEK_V3,
    DEEPSEEK_V4,
    DEEPSEEK_V31,
    DEEPSEEK_V32,
    FORMATS,
    GLM,
    HARMONY,
    HERMES,
    KIMI_K2,
    LLAMA3_JSON,
    QWEN3_CODER,
    choose_tool_parser,
)
from holdfast.text.tools import parse_tools
from text.answer_cases import CUTS, TOOLS, calls_of, content_of, cut, in_short, read
from text.call_transcripts import GOLDEN_FORMATS, GOLDEN_HARMONY, KIMI_BEGIN, KIMI_END, kimi
from text.template_cases import CHAT_TEMPLATES

LOOK = '{"name": "look", "arguments": {"city": "Rome"}}'
ROME = ("look", '{"city": "Rome"}')

GOLDEN_HERMES = {
    "no call": ("Hello there.\n", ["Hello there.\n"]),
    "qwen": (f"<tool_call>\n{LOOK}\n</tool_call>", [ROME]),
    "no line breaks": (f"<tool_call>{LOOK}</tool_call>", [ROME]),
    "text before": (f"I look.\n\n<tool_call>\n{LOOK}\n</tool_call>", ["I look.", ROME]),
    "text behind": (f"<tool_call>\n{LOOK}\n</tool_call>\nDone. ", [ROME, "Done. "]),
    "two": (f"<tool_call>\n{LOOK}\n</tool_call>\n<tool_call>\n{LOOK}\n</tool_call>\n", [ROME, ROME]),
    "two without closing": (f"<tool_call>{LOOK}<tool_call>{LOOK}", [ROME, ROME]),
    "arguments first": (
        '<tool_call>{"arguments": {"city": "Rome"}, "name": "look"}</tool_call>',
        [ROME],
    ),
    "parameters": ('<tool_call>{"name": "look", "parameters": {"city": "Rome"}}</tool_call>', [ROME]),
    "more members": (
        '<tool_call>{"id": [1], "name": "look", "arguments": {}, "x": {"y": 2}}</tool_call>',
        [("look", "{}")],
    ),
    "arguments as text": (r'<tool_call>{"name": "look", "arguments": "{\"city\": \"Rome\"}"}</tool_call>', [ROME]),
    "arguments empty text": ('<tool_call>{"arguments": "", "name": "now"}</tool_call>', [("now", "{}")]),
    "arguments null": ('<tool_call>{"name": "now", "arguments": null}</tool_call>', [("now", "{}")]),
    "no arguments": ('<tool_call>{"name": "now"}</tool_call>', [("now", "{}")]),
    "as it was written": (
        '<tool_call>{"name":"look","arguments":{ "city" :"R\\u00f6m","a":[1,2.50,{}] }}</tool_call>',
        [("look", '{ "city" :"R\\u00f6m","a":[1,2.50,{}] }')],
    ),
    "marker in a string": (
        '<tool_call>{"name": "look", "arguments": {"city": "a</tool_call>b<tool_call>"}}</tool_call>!',
        [("look", '{"city": "a</tool_call>b<tool_call>"}'), "!"],
    ),
    "bare line break": (
        '<tool_call>{"name": "look", "arguments": {"city": "a\nb\tc"}}</tool_call>',
        [("look", '{"city": "a\\nb\\tc"}')],
    ),
    "brace missing": ('<tool_call>{"name": "look", "arguments": {"city": "Rome"}</tool_call>', [ROME]),
    "brace too many": (f"<tool_call>{LOOK}}}\n</tool_call>x", [ROME, "x"]),
    "unknown tool": ('<tool_call>{"name": "lock", "arguments": {}}</tool_call>', [("lock", "{}")]),
    "arguments break": (
        '<tool_call>{"name": "look", "arguments": {"city": Rome}}</tool_call> so',
        [("look", '{"city": Rome}}'), "so"],
    ),
    "arguments cut off": ('<tool_call>{"name": "look", "arguments": {"city": "Ro', [("look", '{"city": "Ro')]),
    "text is no call": ("<tool_call>maybe</tool_call>", ["<tool_call>maybe</tool_call>"]),
    "list is no call": (f"<tool_call>[{LOOK}]</tool_call>", [f"<tool_call>[{LOOK}]</tool_call>"]),
    "no name": ('a <tool_call>{"arguments": {}}</tool_call>', ['a <tool_call>{"arguments": {}}</tool_call>']),
    "name of a wrong type": ('<tool_call>{"name": 5, "arguments": {}}', ['<tool_call>{"name": 5, "arguments": {}}']),
    "name that is none": ('<tool_call>{"name": "a b\\ud800"}', ['<tool_call>{"name": "a b\\ud800"}']),
    "two names": (
        '<tool_call>{"name": "a", "name": "b", "arguments": {}}',
        ['<tool_call>{"name": "a", "name": "b", "arguments": {}}'],
    ),
    "arguments a list": ('<tool_call>{"name": "a", "arguments": []}', ['<tool_call>{"name": "a", "arguments": []}']),
    "arguments lone surrogate": (
        r'<tool_call>{"name": "a", "arguments": "{\"a\": \"\ud800\"}"}',
        [r'<tool_call>{"name": "a", "arguments": "{\"a\": \"\ud800\"}"}'],
    ),
    "call in what was none": (f"<tool_call><tool_call>{LOOK}</tool_call>", ["<tool_call>", ROME]),
    "half a marker": ("a <tool_cal", ["a <tool_cal"]),
    "half a call": ('a <tool_call>{"name": "loo', ['a <tool_call>{"name": "loo']),
    "half a marker behind a call": (f"<tool_call>{LOOK}</tool_call>\n<tool_ca", [ROME]),
    "half a call behind a call": (f'<tool_call>{LOOK}</tool_call>\n<tool_call>{{"na', [ROME]),
    "half a marker behind text": (f"<tool_call>{LOOK}</tool_call>\nSo <tool_ca", [ROME, "So <tool_ca"]),
    "space kept": ("a\n\n<tool_call>no", ["a\n\n<tool_call>no"]),
}
GOLDEN_LLAMA = {
    "no call": ("Hello { } there", ["Hello { } there"]),
    "one": ('{"name": "look", "parameters": {"city": "Rome"}}', [ROME]),
    "space around": ('\n {"name": "look", "parameters": {"city": "Rome"}} \n', [ROME]),
    "type": ('{"type": "function", "name": "look", "parameters": {"city": "Rome"}}', [ROME]),
    "tagged": ('<|python_tag|>{"name": "look", "parameters": {"city": "Rome"}}', [ROME]),
    "tagged behind text": ('So: <|python_tag|>{"name": "now", "parameters": {}}', ["So:", ("now", "{}")]),
    "two": (
        '{"name": "now", "parameters": {}}; {"name": "now", "parameters": {"a": 1}}',
        [("now", "{}"), ("now", '{"a": 1}')],
    ),
    "two tagged": ('<|python_tag|>{"name": "now"};<|python_tag|>{"name": "now"};', [("now", "{}"), ("now", "{}")]),
    "two on lines": (
        '{"name": "now", "parameters": {}}\n{"name": "now", "parameters": {}}',
        [("now", "{}"), ("now", "{}")],
    ),
    "an answer in JSON": ('{"name": "Ann", "parameters": {}}', ['{"name": "Ann", "parameters": {}}']),
    "another answer in JSON": ('{"name": "look", "age": 5}', ['{"name": "look", "age": 5}']),
    "no parameters": ('{"name": "now"}', ['{"name": "now"}']),
    "code": ("<|python_tag|>now.call()", ["<|python_tag|>now.call()"]),
    "text behind": ('{"name": "now", "parameters": {}}; and', [("now", "{}"), "; and"]),
    "cut off": ('{"name": "now", "parameters": {"a', [("now", '{"a')]),
    "broken": ('{"name": "now", "parameters": {a}}; b', [("now", "{a}}; b")]),
}
GOLDEN_QWEN3_CODER = {
    "one": (
        "I look.\n<tool_call>\n<function=look>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>",
        ["I look.", ROME],
    ),
    "on one line": ("<tool_call><function=look><parameter=city>Rome</parameter></function></tool_call>", [ROME]),
    "types": (
        "<tool_call>\n<function=look>\n<parameter=city>\n5\n</parameter>\n<parameter=days>\n5\n</parameter>\n"
        '<parameter=tags>\n["a"]\n</parameter>\n<parameter=x>\n7\n</parameter>\n</function>\n</tool_call>',
        [("look", '{"city": "5", "days": 5, "tags": ["a"], "x": "7"}')],
    ),
    "words of Python": (
        "<tool_call><function=look><parameter=days>None</parameter></function>",
        [("look", '{"days": null}')],
    ),
    "no number": (
        "<tool_call><function=look><parameter=days>two</parameter></function>",
        [("look", '{"days": "two"}')],
    ),
    "lines": (
        '<tool_call><function=look>\n<parameter=city>\n\na "b"\n</para\n\n</parameter>\n</function>',
        [("look", '{"city": "\\na \\"b\\"\\n</para\\n"}')],
    ),
    "nothing": ("<tool_call><function=now>\n</function></tool_call> done", [("now", "{}"), "done"]),
    "two": (
        "<tool_call><function=now></function></tool_call><tool_call><function=now></function></tool_call>",
        [("now", "{}")] * 2,
    ),
    "something else": ("<tool_call><function=now>what</tool_call>", [("now", "{}"), "what</tool_call>"]),
    "half a tag": ("<tool_call><function=now><parameter=a b</function>", [("now", "{}"), "<parameter=a b</function>"]),
    "no function": ("<tool_call><tool=now></tool_call>", ["<tool_call><tool=now></tool_call>"]),
    "name that is none": ("<tool_call><function=a b></tool_call>", ["<tool_call><function=a b></tool_call>"]),
    "json": (f"<tool_call>{LOOK}", [f"<tool_call>{LOOK}"]),
    "cut off": ("<tool_call><function=look><parameter=city>Ro", [("look", '{"city": "Ro')]),
    "half a name": ("<tool_call><function=lo", ["<tool_call><function=lo"]),
}
GOLDEN_CASES = [
    *((HERMES, GOLDEN_HERMES), (LLAMA3_JSON, GOLDEN_LLAMA), (QWEN3_CODER, GOLDEN_QWEN3_CODER)),
    *GOLDEN_FORMATS,
]
GOLDEN = [(form, name, text, expected) for form, cases in GOLDEN_CASES for name, (text, expected) in cases.items()]


@for_each("form, name, text, expected", GOLDEN)
def test_tool_parser_transcripts_read_alike_however_cut(form, name, text, expected):
    whole = form.parser(TOOLS)
    assert in_short(read(whole, [text])) == expected
    pieces = [[text[i : i + size] for i in range(0, len(text), size)] for size in (1, 7)]
    for one in [*pieces, *([text[:place], text[place:]] for place in range(1, len(text)))]:
        parser = form.parser(TOOLS)
        assert in_short(read(parser, one)) == expected
        assert parser.problems == whole.problems


@for_each("form, name, text, expected", GOLDEN)
def test_tool_parser_reports_problems(form, name, text, expected):
    parser = form.parser(TOOLS)
    deltas = read(parser, [text])
    for name, arguments in calls_of(deltas):
        is_sound = name in ("look", "now")
        try:
            json.loads(arguments)
        except ValueError:
            is_sound = False
        assert is_sound or parser.problems
    if not calls_of(deltas):
        assert content_of(deltas) == text


ALL_GOLDEN: list[tuple[ToolFormat, str]] = [
    (form, text) for form, cases in (*GOLDEN_CASES, (HARMONY, GOLDEN_HARMONY)) for text, _ in cases.values()
]


def streamed_and_whole(form, text, cuts):
    """Read an answer in pieces and at once; return the deltas and problems."""
    parser, whole = form.parser(TOOLS), form.parser(TOOLS)
    first, second = read(parser, cuts), read(whole, [text])
    return (first, parser.problems, parser.num_calls), (second, whole.problems, whole.num_calls)


@for_each("form", FORMATS.values())
def test_parser_answer_cut_anywhere_is_stable(form):
    longest = sorted((text for one, text in ALL_GOLDEN if one is form), key=len)[-2:]
    for text in longest:
        for end in range(len(text)):
            streamed, whole = streamed_and_whole(form, text[:end], [text[: end // 2], text[end // 2 : end]])
            assert streamed == whole, (form.name, text[:end])


MARKERS = sorted({marker for form in FORMATS.values() for marker in (*form.tokens, form.opening, *form.section)} - {""})


def mutated(text: str, chance: random.Random) -> str:
    """A text with parts left out, swapped, doubled, cut off, or with a marker where none belongs."""
    for _ in range(chance.randint(1, 4)):
        start = chance.randrange(len(text) + 1)
        end = min(len(text), start + chance.randint(1, 24))
        head, part, tail = text[:start], text[start:end], text[end:]
        text = chance.choice(
            [head + tail, head + part[::-1] + tail, head + part + part + tail, tail + part + head, head]
            + [head + chance.choice(MARKERS) + part + tail] * 2
        )
    return text


def check_mutations(form, num_texts: int) -> None:
    chance = random.Random(7)
    texts = [text for one, text in ALL_GOLDEN if one is form]
    for _ in range(num_texts):
        text = mutated(chance.choice(texts), chance)
        size = chance.choice([1, 2, 5, 20])
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        streamed, whole = streamed_and_whole(form, text, pieces)
        assert streamed == whole, (form.name, text)


@for_each("form", FORMATS.values())
def test_parser_mutated_answers_read_alike_in_pieces(form):
    check_mutations(form, 200)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_parser_many_mutated_answers_read_alike(form):
    check_mutations(form, 2000)


FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "<|python_tag|>", "<tool_c", "</", "<", "<function=look>", "<parameter=city>"),
    *("</parameter>", "</function>", "<parameter=days>", "<parameter=", "\n", "  ", "word", "é", "7", "5", "\x01"),
    *('{"name": "look", "arguments": {', '{"name": "now", "parameters": {', '"city": "Rome"', "}", "}}", "{", ","),
    *(
        '"name": "now"',
        '"arguments": "{}"',
        '"',
        "\\",
        "\\u00e9",
        "[",
        "]",
        "null",
        "; ",
        LOOK,
        f"<tool_call>{LOOK}</tool_call>",
    ),
]
ANSWERS = st.lists(st.sampled_from(FRAGMENTS), max_size=16).map("".join)
SECTION_FRAGMENTS = [
    *MARKERS,
    *(
        'look">',
        "look",
        "functions.look:0",
        "function",
        "\n```json\n",
        "```",
        '{"city": "Rome"}',
        "{}",
        "{x",
        " ",
        "\n",
    ),
    *("<arg_key>city</arg_key>", "<arg_value>Rome</arg_value>", "analysis", "final", " to=functions.now", "assistant"),
    *('<｜DSML｜parameter name="city" string="true">', "</｜DSML｜parameter>", "</｜DSML｜invoke>", "Well", "<", "｜"),
]
SECTION_ANSWERS = st.lists(st.sampled_from(SECTION_FRAGMENTS), max_size=16).map("".join)


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@given(text=st.one_of(ANSWERS, SECTION_ANSWERS), cuts=CUTS)
@example(text=f" \n <tool_call>{LOOK}</tool_call> \n ", cuts=[1, 2, 3, 5, 70, 71])
def test_tool_parser_result_is_the_same_however_cut(form, text, cuts):
    parser, whole = form.parser(TOOLS), form.parser(TOOLS)
    assert read(parser, cut(text, cuts)) == read(whole, [text])
    assert parser.problems == whole.problems
    assert parser.num_calls == whole.num_calls


@pytest.mark.parametrize("form", [form for form in FORMATS.values() if form is not HARMONY], ids=lambda form: form.name)
@given(text=st.one_of(ANSWERS, SECTION_ANSWERS, st.text(max_size=40)))
def test_tool_parser_text_without_calls_is_unchanged(form, text):
    parser = form.parser(TOOLS)
    deltas = read(parser, list(text))
    if not parser.num_calls:
        assert content_of(deltas) == text
    assert [delta.index for delta in deltas if isinstance(delta, ToolCallDelta) and delta.name] == list(
        range(parser.num_calls)
    )


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.parametrize("form", [HERMES, LLAMA3_JSON], ids=lambda form: form.name)
@given(calls=st.lists(st.dictionaries(st.text(max_size=6), VALUES, max_size=4), min_size=1, max_size=3), cuts=CUTS)
def test_tool_parser_arguments_keep_their_json_text(form, calls, cuts):
    written = [json.dumps(arguments, ensure_ascii=False) for arguments in calls]
    texts = [f'{{"name": "look", "{form.syntax.arguments_key}": {arguments}}}' for arguments in written]
    text = "; ".join(texts) if form is LLAMA3_JSON else "".join(f"<tool_call>\n{one}\n</tool_call>\n" for one in texts)
    parser = form.parser(TOOLS)
    assert in_short(read(parser, cut(text, cuts))) == [("look", arguments) for arguments in written]
    assert not parser.problems


@given(city=st.text(max_size=30).filter(lambda text: "</parameter>" not in text), days=st.integers(), cuts=CUTS)
def test_tool_parser_tagged_parameters_become_json(city, days, cuts):
    text = (
        f"<tool_call>\n<function=look>\n<parameter=city>\n{city}\n</parameter>\n<parameter=days>\n{days}\n</parameter>"
        "\n</function>\n</tool_call>"
    )
    ((name, arguments),) = calls_of(read(QWEN3_CODER.parser(TOOLS), cut(text, cuts)))
    assert (name, json.loads(arguments)) == ("look", {"city": city, "days": days})


def test_tool_parser_streams_the_name_then_the_arguments():
    parser = HERMES.parser(TOOLS)
    assert parser.feed('Ok <tool_call>{"name": "look", "arguments": ') == [ContentDelta("Ok")]
    assert parser.feed('{"ci') == [ToolCallDelta(0, "look"), ToolCallDelta(0, None, '{"ci')]
    assert parser.feed('ty": "R') == [ToolCallDelta(0, None, 'ty": "R')]
    assert parser.feed('"}') == [ToolCallDelta(0, None, '"}')]
    assert parser.feed("}</tool_call>") == []
    assert parser.finish() == []


def test_tool_parser_holds_only_a_possible_marker():
    parser = HERMES.parser(TOOLS)
    assert parser.feed("a <") == [ContentDelta("a")]
    assert parser.feed("b> <tool") == [ContentDelta(" <b>")]
    assert parser.feed("s> x") == [ContentDelta(" <tools> x")]


@for_each(
    "form, head, unit",
    [
        (HERMES, "", "<tool_call>"),
        (HERMES, "", '<tool_call>{"name'),
        (HERMES, "", "<tool_call>{"),
        (HERMES, "", f"<tool_call>{LOOK}</tool_call>"),
        (HERMES, '<tool_call>{"name": "look", "arguments": {"city": "', "\n"),
        (HERMES, '<tool_call>{"name": "look", "arguments": {"a": ', "[{"),
        (HERMES, '<tool_call>{"name": "look", "arguments": {}', " }"),
        (HERMES, '<tool_call>{"name": "look", "arguments": {x', "</tool_cal"),
        (HERMES, "", " \n"),
        (LLAMA3_JSON, "", "{"),
        (LLAMA3_JSON, "", '{"name": "now", "parameters": {}};'),
        (LLAMA3_JSON, "", "<|python_tag|>"),
        (QWEN3_CODER, "", "<tool_call><function="),
        (QWEN3_CODER, "<tool_call><function=look>", "<parameter=city>x</parameter>"),
        (QWEN3_CODER, "<tool_call><function=look><parameter=days>", "1"),
        (QWEN3_CODER, "<tool_call><function=look>", " "),
        (QWEN3_CODER, "<tool_call><function=look><parameter=", "a "),
        (GLM, "", "<tool_call>look"),
        (GLM, "<tool_call>look", "<arg_key>city</arg_key><arg_value>x</arg_value>"),
        (KIMI_K2, "", "<|tool_calls_section_begin|>"),
        (KIMI_K2, "", "<|tool_call_begin|>"),
        (KIMI_K2, "", f"{KIMI_BEGIN}{kimi('functions.now:0', '{}')}{KIMI_END}"),
        (KIMI_K2, KIMI_BEGIN, kimi("functions.now:0", "x")),
        (KIMI_K2, f"{KIMI_BEGIN}<|tool_call_begin|>now<|tool_call_argument_begin|>", " "),
        (DEEPSEEK_V3, "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "function<｜tool▁sep｜>"),
        (DEEPSEEK_V4, "", '<｜DSML｜tool_calls><｜DSML｜invoke name="'),
        (HARMONY, "", "<|channel|>"),
        (HARMONY, "", "<|start|>assistant<|channel|>final<|message|>a<|end|> "),
        (HARMONY, "", " "),
        (HARMONY, "", "<|channel|>commentary to=functions.now<|message|>{}<|call|>"),
        (HARMONY, "<|channel|>analysis<|message|>", "<|cha"),
    ],
)
def test_tool_parser_work_is_linear_in_the_text(form, head, unit):
    def cost(num_units: int, size: int) -> int:
        text = head + unit * num_units
        parser = form.parser(TOOLS)
        return num_lines(lambda: read(parser, [text[i : i + size] for i in range(0, len(text), size)]))

    # Whole calls are repeated less often than MAX_CALLS: beyond it they cost what text costs.
    num_units = 30 if len(unit) > 40 else 160
    for size in (3, 10**9):
        assert cost(2 * num_units, size) <= 2.3 * cost(num_units, size) + 2000


@pytest.mark.parametrize("size", [1000, 10**9])
def test_tool_parser_bounds_held_text_however_cut(size):
    long = "x" * (MAX_HELD_CHARS + 100)
    for text in (f'<tool_call>{{"arguments": {{"a": "{long}"}}, "name": "now"}}', f'<tool_call>{{"x": "{long}'):
        parser = HERMES.parser(TOOLS)
        assert in_short(read(parser, [text[i : i + size] for i in range(0, len(text), size)])) == [text]
    space = " " * (MAX_HELD_SPACE_CHARS + 500)
    parser = HERMES.parser(TOOLS)
    text = f"a{space}<tool_call>{LOOK}"
    assert in_short(read(parser, [text[i : i + size] for i in range(0, len(text), size)])) == [f"a{space}", ROME]
    digits = "1" * (MAX_VALUE_CHARS + 50)
    text = f"<tool_call><function=look><parameter=days>{digits}</parameter></function>"
    parser = QWEN3_CODER.parser(TOOLS)
    ((_, arguments),) = calls_of(read(parser, [text[i : i + size] for i in range(0, len(text), size)]))
    assert json.loads(arguments) == {"days": digits}


NUMBERS = parse_tools(
    [
        {
            "type": "function",
            "function": {
                "name": "add",
                "parameters": {"type": "object", "properties": {key: {"type": "integer"} for key in "abcd"}},
            },
        }
    ]
)
TAGGED = {
    QWEN3_CODER: ("<tool_call><function=add>", "<parameter={}>{}</parameter>", "</function></tool_call>"),
    GLM: ("<tool_call>add", "<arg_key>{}</arg_key><arg_value>{}</arg_value>", "</tool_call>"),
    DEEPSEEK_V4: (
        '<｜DSML｜tool_calls><｜DSML｜invoke name="add">',
        '<｜DSML｜parameter name="{}" string="false">{}</｜DSML｜parameter>',
        "</｜DSML｜invoke></｜DSML｜tool_calls>",
    ),
}


@for_each("form", TAGGED)
@for_each("size", [1, 7, 10**9])
def test_tool_parser_value_bound_applies_to_each_value(form, size, monkeypatch):
    """Two that are too long together are numbers; one that is too long alone is a text, and the next a number again."""
    monkeypatch.setattr(tag_calls, "MAX_VALUE_CHARS", 40)
    head, parameter, end = TAGGED[form]
    values = {"a": "1" * 35, "b": "2" * 40, "c": "3" * 41, "d": "4" * 40}
    text = (head + "".join(parameter.format(key, value) for key, value in values.items()) + end) * 2
    calls = calls_of(read(form.parser(NUMBERS), [text[i : i + size] for i in range(0, len(text), size)]))
    written = {key: json.dumps(value) if key == "c" else value for key, value in values.items()}
    assert calls == [("add", "{" + ", ".join(f'"{key}": {value}' for key, value in written.items()) + "}")] * 2


@pytest.mark.parametrize("form", TAGGED, ids=lambda form: form.name)
def test_tool_parser_repeated_parameter_is_reported(form):
    """Also with another between the two."""
    head, parameter, end = TAGGED[form]
    for keys, is_reported in (("ab", False), ("aa", True), ("aba", True), ("abcb", True)):
        parser = form.parser(NUMBERS)
        read(parser, [head + "".join(parameter.format(key, 1) for key in keys) + end])
        assert any("twice" in problem for problem in parser.problems) == is_reported, keys


def test_tool_parser_bounds_calls_and_problems():
    parser = HERMES.parser(TOOLS)
    deltas = read(parser, [f"<tool_call>{LOOK}</tool_call>" * (MAX_CALLS + 5)])
    assert parser.num_calls == MAX_CALLS == len(calls_of(deltas))
    assert content_of(deltas) == f"<tool_call>{LOOK}</tool_call>" * 5
    assert any("more than" in problem for problem in parser.problems)
    parser = HERMES.parser(TOOLS)
    read(parser, ["<tool_call>no " * 100])
    assert len(parser.problems) == MAX_PROBLEMS


def test_tool_parser_without_tools_takes_any_name():
    assert calls_of(read(LLAMA3_JSON.parser(), ['{"name": "any", "parameters": {}}'])) == [("any", "{}")]


def test_choose_tool_parser_by_name_or_template():
    qwen = "{% if tools %}<tool_call>{{ tools }}{% endif %}"
    assert choose_tool_parser(qwen) is HERMES
    assert choose_tool_parser(f"{qwen}<function=x>") is QWEN3_CODER
    assert choose_tool_parser("{{ tools }} {{ '<|python_tag|>' }}") is LLAMA3_JSON
    assert choose_tool_parser('{{ tools }} {{ \'{"name": n, "parameters": p}\' }}') is LLAMA3_JSON
    assert choose_tool_parser("{{ tools }}") is None
    assert choose_tool_parser("{{ messages }}") is HERMES
    assert choose_tool_parser(None) is None
    assert choose_tool_parser(qwen, "none") is None
    assert choose_tool_parser(None, "llama3_json") is LLAMA3_JSON
    with raises_code("value.not_one_of", RequestError):
        choose_tool_parser(qwen, "hermit")
    for source in CHAT_TEMPLATES.values():
        choose_tool_parser(source)


@for_each(
    "source, form",
    [
        ("{% for t in tools %}{% endfor %}<tool_call>f<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>", GLM),
        ("{{ tools }}<|tool_calls_section_begin|><|tool_call_begin|>{{ call.id }}", KIMI_K2),
        ("{{ tools }}{{ '<|start|>assistant<|channel|>analysis<|message|>' }}", HARMONY),
        ("{{ tools }}<｜tool▁calls▁begin｜>{{ '<｜tool▁sep｜>' + name + '\\n' + '```json' }}", DEEPSEEK_V3),
        ("{{ tools }}<｜tool▁calls▁begin｜>{{ name + '<｜tool▁sep｜>' + arguments }}", DEEPSEEK_V31),
        ("{{ '<｜tool▁calls▁begin｜>' }} knows calls, lists none", HERMES),
        ("an encoder, which writes <｜DSML｜function_calls> and <think>", DEEPSEEK_V32),
        ("an encoder, which writes <｜DSML｜tool_calls> and <think>", DEEPSEEK_V4),
    ],
)
def test_choose_tool_parser_template_markers_name_the_format(source, form):
    assert choose_tool_parser(source) is form


def test_choose_tool_parser_names_of_vllm_are_taken():
    names = {"glm45": GLM, "glm47": GLM, "openai": HARMONY, "kimi_k2": KIMI_K2, "deepseek_v3": DEEPSEEK_V3}
    names |= {"deepseek_v31": DEEPSEEK_V31, "deepseek_v32": DEEPSEEK_V32, "deepseek_v4": DEEPSEEK_V4}
    for name, form in names.items():
        assert choose_tool_parser(None, name) is form


def test_kimi_k2_ids_are_the_models_own_once_each():
    section = "".join(kimi(name, "{}") for name in ("functions.now:7", "look:8", "functions.now:7"))
    deltas = read(KIMI_K2.parser(TOOLS), [KIMI_BEGIN + section + KIMI_END])
    found = [(delta.name, delta.id) for delta in deltas if isinstance(delta, ToolCallDelta) and delta.name]
    assert found == [("now", "functions.now:7"), ("look", "look:8"), ("now", None)]


@pytest.mark.parametrize("size", [100, 10**9])
def test_tool_parser_section_without_a_call_name_is_content(size):
    text = f"{KIMI_BEGIN}<|tool_call_begin|>{'x' * 2000}"
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    assert in_short(read(KIMI_K2.parser(TOOLS), pieces)) == [text]


def test_tool_parser_section_calls_above_the_limit_are_content():
    parser = KIMI_K2.parser(TOOLS)
    call = kimi("functions.now:0", "{}")
    deltas = read(parser, [KIMI_BEGIN + call * (MAX_CALLS + 2) + KIMI_END])
    assert parser.num_calls == MAX_CALLS
    assert content_of(deltas) == call * 2 + KIMI_END
