"""Answers with calls in the formats of GLM, Kimi-K2, DeepSeek and gpt-oss, and what each of them means.

Some are the token strings of vLLM's own tests (tests/tool_parsers, tests/parser; Apache-2.0), with other names and values.
"""

from holdfast.text.tool_calls import ToolFormat
from holdfast.text.tool_formats import DEEPSEEK_V3, DEEPSEEK_V4, DEEPSEEK_V31, DEEPSEEK_V32, GLM, KIMI_K2

Case = tuple[str, list[str | tuple[str, str]]]
ROME = ("look", '{"city": "Rome"}')
CITY = '{"city": "Rome"}'

GLM_CALL = "<tool_call>look<arg_key>city</arg_key><arg_value>Rome</arg_value></tool_call>"
GOLDEN_GLM: dict[str, Case] = {
    "no call": ("This is a plain answer.", ["This is a plain answer."]),
    "one line": (GLM_CALL, [ROME]),
    "lines": (
        "<tool_call>look\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n</tool_call>",
        [ROME],
    ),
    "text around": (f"I look.\n{GLM_CALL}\nDone.", ["I look.", ROME, "Done."]),
    "two": (GLM_CALL * 2, [ROME, ROME]),
    "two on lines": (f"{GLM_CALL}\n{GLM_CALL}\n", [ROME, ROME]),
    "types": (
        "<tool_call>look\n<arg_key>city</arg_key>\n<arg_value>5</arg_value>\n<arg_key>days</arg_key>\n"
        '<arg_value>5</arg_value>\n<arg_key>tags</arg_key>\n<arg_value>["a"]</arg_value>\n</tool_call>',
        [("look", '{"city": "5", "days": 5, "tags": ["a"]}')],
    ),
    "no number": (
        "<tool_call>look<arg_key>days</arg_key><arg_value>two</arg_value></tool_call>",
        [("look", '{"days": "two"}')],
    ),
    "space kept": (
        "<tool_call>look<arg_key>city</arg_key><arg_value>  Rome\n</arg_value></tool_call>",
        [("look", '{"city": "  Rome\\n"}')],
    ),
    "tags in a value": (
        "<tool_call>look<arg_key>city</arg_key><arg_value><b></tool_call></arg></arg_value></tool_call>",
        [("look", '{"city": "<b></tool_call></arg>"}')],
    ),
    "nothing": ("<tool_call>now</tool_call>", [("now", "{}")]),
    "nothing on lines": ("  \n <tool_call>\nnow\n</tool_call>", [("now", "{}")]),
    "unknown with parameters": (
        "<tool_call>lock<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>",
        [("lock", '{"a": "1"}')],
    ),
    "unknown word is no call": ("<tool_call>maybe</tool_call>", ["<tool_call>maybe</tool_call>"]),
    "prose is no call": ("Write <tool_call> here <b>", ["Write <tool_call> here <b>"]),
    "json is no call": ('<tool_call>{"name": "now"}</tool_call>', ['<tool_call>{"name": "now"}</tool_call>']),
    "something else": (
        "<tool_call>look<arg_key>city</arg_key>Rome",
        [("look", "{}"), "<arg_key>city</arg_key>Rome"],
    ),
    "cut off": ("<tool_call>look<arg_key>city</arg_key><arg_value>Ro", [("look", '{"city": "Ro')]),
    "half a name": ("<tool_call>lo", ["<tool_call>lo"]),
    "half an end": ("<tool_call>now</tool_ca", ["<tool_call>now</tool_ca"]),
}

KIMI_BEGIN, KIMI_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"


def kimi(call_id: str, arguments: str) -> str:
    return f"<|tool_call_begin|>{call_id}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


KIMI_CALL = kimi("functions.look:0", CITY)
GOLDEN_KIMI: dict[str, Case] = {
    "no call": ("This is a test", ["This is a test"]),
    "one": (f"I look. {KIMI_BEGIN}{KIMI_CALL}{KIMI_END}", ["I look.", ROME]),
    "two": (f"{KIMI_BEGIN}{KIMI_CALL}{kimi('functions.now:1', '{}')}{KIMI_END}", [ROME, ("now", "{}")]),
    "space": (f"{KIMI_BEGIN}\n{kimi(' functions.look:0 ', f' {CITY} ')}\n{KIMI_CALL}\n{KIMI_END}", [ROME, ROME]),
    "no prefix": (f"{KIMI_BEGIN}{kimi('look:0', CITY)}{KIMI_END}", [ROME]),
    "no number": (f"{KIMI_BEGIN}{kimi('functions.look', CITY)}{KIMI_END}", [ROME]),
    "no section": (f"So: {KIMI_CALL} Done.", ["So:", ROME, "Done."]),
    "no arguments": (f"{KIMI_BEGIN}{kimi('functions.now:0', ' ')}{KIMI_END}", [("now", "{}")]),
    "lines in json": (
        KIMI_BEGIN + kimi("functions.look:0", '{\n  "city": "Rome"\n}') + KIMI_END,
        [("look", '{\n  "city": "Rome"\n}')],
    ),
    "markers in a string": (
        KIMI_BEGIN + kimi("functions.look:0", '{"city": "<|tool_call_end|>"}') + KIMI_END + "!",
        [("look", '{"city": "<|tool_call_end|>"}'), "!"],
    ),
    "brace missing": (
        KIMI_BEGIN + kimi("functions.look:0", '{"city": "Rome"') + KIMI_CALL + KIMI_END,
        [("look", '{"city": "Rome"'), ROME],
    ),
    "arguments are no json": (f"{KIMI_BEGIN}{kimi('functions.look:0', 'Rome')}{KIMI_END}x", [("look", "Rome"), "x"]),
    "no end of a call": (
        f"{KIMI_BEGIN}<|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>{{oops{KIMI_END}x",
        [("look", "{oops"), "x"],
    ),
    "name that is none": (
        f"{KIMI_BEGIN}{kimi('functions.a b:0', '{}')}{KIMI_END}",
        [f"{KIMI_BEGIN}{kimi('functions.a b:0', '{}')}{KIMI_END}"],
    ),
    "second is none": (
        f"{KIMI_BEGIN}{KIMI_CALL}{kimi('', '{}')}{KIMI_END}",
        [ROME, f"{kimi('', '{}')}{KIMI_END}"],
    ),
    "empty section": (f"a {KIMI_BEGIN}{KIMI_END}", [f"a {KIMI_BEGIN}{KIMI_END}"]),
    "text in a section": (f"a {KIMI_BEGIN} b", [f"a {KIMI_BEGIN} b"]),
    "cut off": (
        f'{KIMI_BEGIN}<|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>{{"ci',
        [("look", '{"ci')],
    ),
    "half a head": (
        f"a {KIMI_BEGIN}<|tool_call_begin|>functions.lo",
        [f"a {KIMI_BEGIN}<|tool_call_begin|>functions.lo"],
    ),
    "half a section": (f"a {KIMI_BEGIN}", [f"a {KIMI_BEGIN}"]),
    "half a second": (f"{KIMI_BEGIN}{KIMI_CALL}<|tool_call_begin|>functions.lo", [ROME]),
}

V3_BEGIN, V3_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"


def deepseek_v3(name: str, arguments: str) -> str:
    return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"


def deepseek_v31(name: str, arguments: str) -> str:
    return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"


NO_CALL_BEGIN = f"{V3_BEGIN}function<｜tool▁sep｜>look\n```json\n{CITY}\n```{V3_END}"
GOLDEN_V3: dict[str, Case] = {
    "no call": ("How can I help you?", ["How can I help you?"]),
    "one": (f"{V3_BEGIN}{deepseek_v3('look', CITY)}{V3_END}", [ROME]),
    "two": (
        f"I look.{V3_BEGIN}{deepseek_v3('look', CITY)}\n{deepseek_v3('now', '{}')}{V3_END}",
        ["I look.", ROME, ("now", "{}")],
    ),
    "escapes": (
        V3_BEGIN + deepseek_v3("look", r'{"city": "\"a\" C:\\b\nc"}') + V3_END,
        [("look", r'{"city": "\"a\" C:\\b\nc"}')],
    ),
    "brace missing": (
        V3_BEGIN + deepseek_v3("look", '{"city": "Rome"') + V3_END,
        [("look", '{"city": "Rome"\n```')],
    ),
    "no beginning of a call": (NO_CALL_BEGIN, [NO_CALL_BEGIN]),
    "no fence": (
        f"{V3_BEGIN}{deepseek_v31('look', CITY)}{V3_END}",
        [f"{V3_BEGIN}{deepseek_v31('look', CITY)}{V3_END}"],
    ),
    "cut off": (V3_BEGIN + deepseek_v3("look", CITY).partition("\n```<")[0], [ROME]),
}
GOLDEN_V31: dict[str, Case] = {
    "one": (f"{V3_BEGIN}{deepseek_v31('look', CITY)}{V3_END}", [ROME]),
    "two": (
        V3_BEGIN + deepseek_v31("look", '{"x":1}') + deepseek_v31("now", '{"y":2}') + V3_END + " ok",
        [("look", '{"x":1}'), ("now", '{"y":2}'), "ok"],
    ),
    "unknown": (f"{V3_BEGIN}{deepseek_v31('lock', '{}')}{V3_END}", [("lock", "{}")]),
    "text before": (f"Hm.\n\n{V3_BEGIN}{deepseek_v31('now', '{}')}{V3_END}", ["Hm.", ("now", "{}")]),
    "cut off": (f'{V3_BEGIN}<｜tool▁call▁begin｜>look<｜tool▁sep｜>{{"city": "R', [("look", '{"city": "R')]),
}


def dsml(name: str, *parameters: tuple[str, str, str]) -> str:
    lines = [
        f'<｜DSML｜parameter name="{key}" string="{is_text}">{value}</｜DSML｜parameter>\n'
        for key, is_text, value in parameters
    ]
    return f'<｜DSML｜invoke name="{name}">\n{"".join(lines)}</｜DSML｜invoke>'


def dsml_cases(section: str) -> dict[str, Case]:
    """V3.2 and V4 differ in the name of the section."""
    begin, end = f"<｜DSML｜{section}>", f"</｜DSML｜{section}>"
    rome = dsml("look", ("city", "true", "Rome"))
    other = begin.replace(section, "other")
    return {
        "no call": ("Nothing | here <｜DSML｜", ["Nothing | here <｜DSML｜"]),
        "one": (f"So.\n\n{begin}\n{rome}\n{end}", ["So.", ROME]),
        "two": (f"{begin}\n{rome}\n{dsml('now')}\n{end}", [ROME, ("now", "{}")]),
        "types by tag": (
            f"{begin}\n{dsml('look', ('city', 'true', '5'), ('days', 'false', '5'), ('x', 'false', '[1, {}]'))}\n{end}",
            [("look", '{"city": "5", "days": 5, "x": [1, {}]}')],
        ),
        "no json": (
            f"{begin}\n{dsml('look', ('days', 'false', 'two'))}\n{end}",
            [("look", '{"days": "two"}')],
        ),
        "lines and tags": (
            begin + "\n" + dsml("look", ("city", "true", '\n<b> "x"</｜DSML｜\n')) + "\n" + end,
            [("look", '{"city": "\\n<b> \\"x\\"</｜DSML｜\\n"}')],
        ),
        "no end of a call": (f"{begin}\n{rome.removesuffix('</｜DSML｜invoke>')}{end}ok", [ROME, "ok"]),
        "no section": (f"{rome}", [ROME]),
        "another section": (f"{other}\nno", [f"{other}\nno"]),
        "cut off": (begin + rome.partition("</｜DSML｜parameter>")[0], [("look", '{"city": "Rome')]),
        "half a name": (f'{begin}\n<｜DSML｜invoke name="lo', [f'{begin}\n<｜DSML｜invoke name="lo']),
    }


GOLDEN_FORMATS: list[tuple[ToolFormat, dict[str, Case]]] = [
    (GLM, GOLDEN_GLM),
    (KIMI_K2, GOLDEN_KIMI),
    (DEEPSEEK_V3, GOLDEN_V3),
    (DEEPSEEK_V31, GOLDEN_V31),
    (DEEPSEEK_V32, dsml_cases("function_calls")),
    (DEEPSEEK_V4, dsml_cases("tool_calls")),
]

HEAD = "<|start|>assistant"
CALL_HEADERS = {
    "in the channel": "<|channel|>commentary to=functions.look <|constrain|>json<|message|>",
    "without constrain": "<|channel|>commentary to=functions.look json<|message|>",
    "in the role": " to=functions.look<|channel|>commentary <|constrain|>json<|message|>",
    "in the role, tight": " to=functions.look<|channel|>commentary<|constrain|>json<|message|>",
    "in analysis": " to=functions.look<|channel|>analysis<|message|>",
    "a bare name": "<|channel|>commentary to=look<|message|>",
}
ANALYSIS = "<|channel|>analysis<|message|>hm<|end|>"
GOLDEN_HARMONY: dict[str, Case] = {
    "final": ("<|channel|>final<|message|>Yes.<|return|>", ["Yes."]),
    "final that is cut": ("<|channel|>final<|message|>Yes. <|en", ["Yes. <|en"]),
    "analysis": ("<|channel|>analysis<|message|>hm <b>", ["?hm <b>"]),
    "both": (f"{ANALYSIS}{HEAD}<|channel|>final<|message|>Yes.", ["?hm", "Yes."]),
    "json": ('<|channel|>final <|constrain|>json<|message|>{"a":1}<|end|>', ['{"a":1}']),
    "preamble": (
        f"<|channel|>commentary<|message|>I look.<|end|>{HEAD}<|channel|>final<|message|>Yes.<|end|>",
        ["I look.\nYes."],
    ),
    "preamble and call": (
        f"<|channel|>commentary<|message|>I look.<|end|>{HEAD} to=functions.look<|channel|>commentary<|message|>{CITY}<|end|>",
        ["I look.", ROME],
    ),
    "thoughts twice": (f"{ANALYSIS}{HEAD}{ANALYSIS}{HEAD}<|channel|>final<|message|>Yes.", ["?hm\nhm", "Yes."]),
    **{name: (f"{ANALYSIS}{HEAD}{header}{CITY}<|call|>", ["?hm", ROME]) for name, header in CALL_HEADERS.items()},
    "call at once": (f"{CALL_HEADERS['in the role']}{CITY}", [ROME]),
    "two calls": (
        f"{CALL_HEADERS['in the role']}{CITY}<|call|>{HEAD}{CALL_HEADERS['in the channel']} {{}} <|call|>"
        f"{HEAD}<|channel|>final<|message|>Done",
        [ROME, ("look", "{}"), "Done"],
    ),
    "white space after a call": (
        f"{CALL_HEADERS['in the role']}{CITY}<|call|>{HEAD}<|channel|>final<|message|>  Done",
        [ROME, "  Done"],
    ),
    "no arguments": ("<|channel|>commentary to=functions.now<|message|><|call|>", [("now", "{}")]),
    "unknown function": ("<|channel|>commentary to=functions.lock<|message|>{}<|call|>", [("lock", "{}")]),
    "no function": ("<|channel|>commentary to=browser.open<|message|>{}<|call|>", ["{}"]),
    "thoughts to python": ("<|channel|>analysis to=python code<|message|>1 + 1<|call|>", ["?1 + 1"]),
    "arguments are no json": (
        f"{CALL_HEADERS['in the role']}city=Rome<|call|>{HEAD}<|channel|>final<|message|>ok",
        [("look", "city=Rome"), "ok"],
    ),
    "arguments break": (f"{CALL_HEADERS['in the role']}{{a}}<|call|>", [("look", "{a}")]),
    "arguments cut off": (f'{CALL_HEADERS["in the role"]}{{"city": "R', [("look", '{"city": "R')]),
    "markers in a string": (
        f'{CALL_HEADERS["in the role"]}{{"city": "<|call|>"}}<|call|>',
        [("look", '{"city": "<|call|>"}')],
    ),
    "text after arguments": (f"{CALL_HEADERS['in the role']}{CITY} so<|call|>", [ROME, "so"]),
    "no end": (f"<|channel|>analysis<|message|>hm{HEAD}<|channel|>final<|message|>Yes", ["?hm", "Yes"]),
    "no end and no role": ("<|channel|>analysis<|message|>hm<|channel|>final<|message|>Yes", ["?hm", "Yes"]),
    "other role": (f"{ANALYSIS}<|start|>user<|message|>Hi<|end|>{HEAD}<|channel|>final<|message|>Yes", ["?hm", "Yes"]),
    "no channel": ("<|message|>Yes<|return|>", ["Yes"]),
    "plain text": ("Yes, to=x <b>.", ["Yes, to=x <b>."]),
    "space": (" \n", [" \n"]),
    "nothing": ("", []),
    "text between": (f"{ANALYSIS}\n so<|channel|>final<|message|>Yes", ["?hm", "so\nYes"]),
    "header cut off": (f"{ANALYSIS}{HEAD}<|channel|>fin", ["?hm"]),
    "call cut off before arguments": (f"{ANALYSIS}{HEAD}{CALL_HEADERS['in the channel']} ", ["?hm"]),
    "header without message": (
        '<|channel|>final {"answer": "hi"}<|return|>',
        ['<|channel|>final {"answer": "hi"}'],
    ),
}
