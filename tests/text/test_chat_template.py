"""ChatTemplate: messages to prompts as transformers writes them; what is no conversation is refused in one line."""

import json
import threading

from hypothesis import given
from hypothesis import strategies as st

from counted_work import num_lines
from error_codes import raises_code
from for_each import for_each
from holdfast.errors import ModelFormatError, PromptError, TemplateError
from holdfast.text.chat_messages import MAX_CHAT_CHARS, MAX_DEPTH, MAX_MESSAGES, PlainData, plain_messages
from holdfast.text.chat_template import (
    MAX_TEMPLATE_CHARS,
    ChatTemplate,
    chat_template_from_directory,
    chat_template_from_gguf,
)
from holdfast.text.jinja_sandbox import ChatSandbox
from text.template_cases import CHAT_TEMPLATES, MESSAGES, agree
from text.tokenizer_cases import NASTY_TEXTS

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "lookup",
            "description": 'Says "é" & <b>',
            "parameters": {
                "type": "object",
                "properties": {
                    "tags": {"type": "array", "items": {"type": "string"}},
                    "mode": {"enum": ["fast", "slow"]},
                    "inner": {"type": "object", "properties": {"n": {"type": "number"}}},
                },
            },
        },
    }
]
CHATS = {
    "one question": [{"role": "user", "content": "Hi"}],
    "system and turns": [
        {"role": "system", "content": " Be brief.\n"},
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "Two"},
    ],
    "tools and thoughts": MESSAGES,
    "reasoning by another name": [
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": "So.", "reasoning": "let me see"},
    ],
    "wrong order": [{"role": "assistant", "content": "I begin"}, {"role": "assistant", "content": "and go on"}],
    "nasty": [
        {"role": role, "content": text}
        for pair in zip(NASTY_TEXTS.values(), reversed(NASTY_TEXTS.values()), strict=True)
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ],
    "many": [{"role": ("user", "assistant")[index % 2], "content": f"turn {index}"} for index in range(300)],
}


@for_each("messages", CHATS.values())
@for_each("source", CHAT_TEMPLATES.values())
def test_templates_of_models_render_as_in_transformers(source, messages):
    for options in (
        {"tools": None},
        {"tools": TOOLS, "add_generation_prompt": False},
        {"tools": TOOLS, "enable_thinking": False, "date_string": "1 Jan 2030"},
    ):
        agree(source, messages=messages, **options)


@for_each("source", CHAT_TEMPLATES.values())
def test_templates_of_models_do_not_refuse_ordinary_chats(source):
    assert agree(source, messages=CHATS["system and turns"], tools=TOOLS)


def test_special_tokens_are_known_to_templates():
    template = ChatTemplate(
        "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}{{ unk_token }}",
        "x",
        {"bos_token": "<s>", "eos_token": "</s>"},
    )
    assert template.render([{"role": "user", "content": "hi"}]) == "<s>hi</s>"
    assert template.render([{"role": "user", "content": "hi"}], bos_token="<other>") == "<other>hi</s>"


def test_render_adds_the_generation_prompt_by_default():
    template = ChatTemplate("{{ add_generation_prompt }}", "x", {})
    assert template.render([{"role": "user", "content": "hi"}]) == "True"
    assert template.render([{"role": "user", "content": "hi"}], add_generation_prompt=False) == "False"


def test_render_joins_text_parts():
    template = ChatTemplate("{{ messages[0].content }}", "x", {})
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert template.render([{"role": "user", "content": parts}]) == "a\nb"


def test_render_checks_messages_before_the_template_runs():
    template = ChatTemplate("{{ raise_exception('ran') }}", "x", {})
    with raises_code("template.bad_message", PromptError):
        template.render([{"content": "hi"}])
    with raises_code("template.bad_value", PromptError):
        template.render([{"role": "user", "content": "hi"}], tools=[object()])


def test_render_does_not_change_the_messages():
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}], "reasoning": "r"}]
    before = json.dumps(messages)
    ChatTemplate("{{ messages }}", "x", {}).render(messages)
    assert json.dumps(messages) == before


ERRORS = {
    "refusal": ("{{ raise_exception('no system role\\nhere') }}", "template.refused"),
    "refusal with data": ("{{ raise_exception(messages) }}", "template.refused"),
    "syntax": ("a\n{% if %}", "template.syntax"),
    "unclosed": ("{% for x in y %}", "template.syntax"),
    "unknown filter": ("{{ 'a'|nope }}", "template.syntax"),
    "undefined": ("{{ a.b.c }}", "template.failed"),
    "type error": ("{{ 'a' + 1 }}", "template.failed"),
    "escape": ("{{ ''.__class__ }}", "template.unsafe"),
    "steps": ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "template.over_budget"),
    "memory": ("{{ 'a' * 10**9 }}", "template.over_budget"),
    "output": ("{% for a in range(99999) %}" + "x" * 1000 + "{% endfor %}", "template.over_budget"),
    "nesting": ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "template.over_budget"),
    "length": ("x" * (MAX_TEMPLATE_CHARS + 1), "template.over_budget"),
}


@for_each("source, code", ERRORS.values())
def test_render_failure_is_one_line_that_names_the_file(source, code):
    template = ChatTemplate(source, "model.gguf", {})
    for _ in range(2):
        with raises_code(code, TemplateError, origin="model.gguf") as caught:
            template.render([{"role": "user", "content": "hi"}])
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 600


def test_template_check_refuses_broken_syntax():
    template = ChatTemplate("{% if %}", "x", {})
    with raises_code("template.syntax", TemplateError):
        template.check()
    ChatTemplate("{{ messages }}", "x", {}).check()


def test_chat_template_compiles_once_even_if_it_fails(monkeypatch):
    compiled = []
    compile_template = ChatSandbox.compile_template
    monkeypatch.setattr(
        ChatSandbox, "compile_template", lambda *args: compiled.append(args[1]) or compile_template(*args)
    )
    sound, broken = ChatTemplate("{{ messages[0].content }}", "x", {}), ChatTemplate("{% if %}", "x", {})
    for _ in range(3):
        assert sound.render([{"role": "user", "content": "hi"}]) == "hi"
        with raises_code("template.syntax", TemplateError):
            broken.render([{"role": "user", "content": "hi"}])
    assert compiled == [sound.source, broken.source]


def test_render_is_thread_safe():
    template = ChatTemplate("{% for i in range(200) %}{{ messages[0].content }}{% endfor %}", "x", {})
    results: dict[int, str] = {}

    def work(number: int) -> None:
        for _ in range(5):
            results[number] = template.render([{"role": "user", "content": f"<{number}>"}])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: f"<{number}>" * 200 for number in range(8)}


def test_render_hostile_template_is_stopped_in_other_threads():
    outcome: list[str] = []

    def work() -> None:
        try:
            ChatTemplate(ERRORS["steps"][0], "x", {}).render([{"role": "user", "content": "hi"}])
        except TemplateError as error:
            outcome.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(30)
    assert outcome
    assert "steps" in outcome[0]


def test_render_work_grows_in_proportion_to_the_conversation():
    source = CHAT_TEMPLATES["thinking"]
    template = ChatTemplate(source, "x", {})

    def lines(count: int) -> int:
        messages = [{"role": ("user", "assistant")[index % 2], "content": "word " * 50} for index in range(count)]
        return num_lines(lambda: template.render(messages))

    lines(10)
    assert lines(300) < 3.2 * lines(100)


def test_render_large_conversation_stays_within_budget():
    messages = [{"role": ("user", "assistant")[index % 2], "content": "é" * 4000} for index in range(1000)]
    for name, source in CHAT_TEMPLATES.items():
        assert len(ChatTemplate(source, name, {"bos_token": "<s>", "eos_token": "</s>"}).render(messages)) > 100_000


def test_chat_template_file_wins_over_tokenizer_config(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "config", "bos_token": "<s>"}))
    template = chat_template_from_directory(tmp_path)
    assert (template.source, template.origin) == ("config", "tokenizer_config.json")
    (tmp_path / "chat_template.jinja").write_text("file {{ bos_token }}\n", encoding="utf-8")
    template = chat_template_from_directory(tmp_path)
    assert template.origin == "chat_template.jinja"
    assert template.render([{"role": "user", "content": "hi"}]) == "file <s>"


def test_chat_template_default_of_several_is_taken(tmp_path):
    config = tmp_path / "tokenizer_config.json"
    several = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    config.write_text(json.dumps({"chat_template": several}))
    assert chat_template_from_directory(tmp_path).source == "plain"
    config.write_text(json.dumps({"chat_template": several[:1]}))
    assert chat_template_from_directory(tmp_path).source == "tools"
    config.write_text(json.dumps({"chat_template": [several[0], {"name": "rag", "template": "rag"}]}))
    assert chat_template_from_directory(tmp_path) is None


def test_chat_template_folder_without_template_is_none(tmp_path):
    assert chat_template_from_directory(tmp_path) is None
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert chat_template_from_directory(tmp_path) is None


@for_each("value", [5, [5], [{"name": "default"}], {"default": 3}])
def test_templates_of_a_wrong_type_are_refused(tmp_path, value):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": value}))
    with raises_code("template.wrong_setting", ModelFormatError):
        chat_template_from_directory(tmp_path)


def test_chat_template_file_not_utf8_or_too_large_is_refused(tmp_path):
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with raises_code("template.not_utf8", ModelFormatError):
        chat_template_from_directory(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"x" * 10**6)
    with raises_code("file.too_large", ModelFormatError):
        chat_template_from_directory(tmp_path)


def test_chat_template_from_gguf_knows_its_special_tokens():
    metadata = {
        "tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}",
        "tokenizer.ggml.tokens": ["<s>", "</s>"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.padding_token_id": 99,
    }
    template = chat_template_from_gguf(metadata, "a.gguf")
    assert template.render([{"role": "user", "content": "hi"}]) == "<s>hi</s>"
    assert chat_template_from_gguf({}, "a.gguf") is None
    with raises_code("template.wrong_setting", ModelFormatError):
        chat_template_from_gguf({"tokenizer.chat_template": 5}, "a.gguf")


def plain(*messages):
    return plain_messages(list(messages), PlainData())


class Text(str):
    def evil(self):
        return "evil"


class Dict(dict):
    def evil(self):
        return "evil"


BAD = {
    "not a list": ("hello", "template.bad_message"),
    "a dict": ({"role": "user", "content": "a"}, "template.bad_message"),
    "nothing": (None, "template.bad_message"),
    "no messages": ([], "value.empty"),
    "too many": ([{"role": "user", "content": "a"}] * (MAX_MESSAGES + 1), "template.too_large"),
    "message of a wrong type": (["hello"], "template.bad_message"),
    "no role": ([{"content": "a"}], "template.bad_message"),
    "empty role": ([{"role": "", "content": "a"}], "template.bad_message"),
    "role of a wrong type": ([{"role": 5, "content": "a"}], "template.bad_message"),
    "no content": ([{"role": "user"}], "template.bad_message"),
    "nothing as content": ([{"role": "user", "content": None}], "template.bad_message"),
    "content of a wrong type": ([{"role": "user", "content": 5}], "template.bad_message"),
    "content as dict": ([{"role": "user", "content": {"text": "a"}}], "template.bad_message"),
    "no parts": ([{"role": "user", "content": []}], "template.bad_message"),
    "image part": (
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}],
        "template.bad_message",
    ),
    "part without text": ([{"role": "user", "content": [{"type": "text"}]}], "template.bad_message"),
    "part of a wrong type": ([{"role": "user", "content": [5]}], "template.bad_message"),
    "key of a wrong type": ([{"role": "user", "content": "a", 5: "b"}], "value.not_string"),
    "bytes": ([{"role": "user", "content": "a", "x": b"b"}], "template.bad_value"),
    "object": ([{"role": "user", "content": "a", "x": object()}], "template.bad_value"),
    "set": ([{"role": "user", "content": "a", "x": {1}}], "template.bad_value"),
    "not a number": ([{"role": "user", "content": "a", "x": float("nan")}], "template.bad_value"),
    "infinite": ([{"role": "user", "content": "a", "x": float("inf")}], "template.bad_value"),
    "huge integer": ([{"role": "user", "content": "a", "x": 10**5000}], "template.bad_value"),
    "too deep": (
        [{"role": "user", "content": "a", "x": json.loads("[" * (MAX_DEPTH + 2) + "]" * (MAX_DEPTH + 2))}],
        "template.too_large",
    ),
    "too long": (
        [{"role": "user", "content": "a" * (MAX_CHAT_CHARS + 1)}],
        "template.too_large",
    ),
    "too long together": (
        [{"role": "user", "content": "a" * 2**20}] * 17,
        "template.too_large",
    ),
    "too many values": (
        [{"role": "user", "content": "a", "x": [0] * 300_000}],
        "template.too_large",
    ),
}


@for_each("messages, code", BAD.values())
def test_plain_messages_bad_message_is_refused_in_one_line(messages, code):
    with raises_code(code, PromptError) as caught:
        plain_messages(messages, PlainData())
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_plain_cyclic_message_is_refused():
    message = {"role": "user", "content": "a"}
    message["self"] = message
    with raises_code("template.too_large", PromptError):
        plain(message)


def test_plain_joins_content_parts_to_one_string():
    assert plain({"role": "user", "content": "a"}) == [{"role": "user", "content": "a"}]
    parts = [{"type": "text", "text": "a"}, "b", {"text": "c"}]
    assert plain({"role": "user", "content": parts})[0]["content"] == "a\nb\nc"
    assert plain({"role": "user", "content": ({"type": "text", "text": "a"},)})[0]["content"] == "a"


def test_plain_tool_calls_need_no_content():
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    assert plain(call) == [call]
    assert plain({**call, "content": None})[0]["content"] is None


def test_reasoning_is_known_by_the_names_that_templates_read():
    for name in ("reasoning_content", "thinking", "reasoning"):
        message = plain({"role": "assistant", "content": "a", name: "because"})[0]
        assert message["reasoning_content"] == message["thinking"] == "because"
    assert "thinking" not in plain({"role": "assistant", "content": "a"})[0]


def test_plain_converts_subclasses_to_built_in_types():
    message = Dict(role=Text("user"), content=Text("a"), more=[Dict(x=Text("y")), (True, 1, 2.5, None)])
    copied = plain(message)[0]
    assert copied == {"role": "user", "content": "a", "more": [{"x": "y"}, [True, 1, 2.5, None]]}
    assert {type(value) for value in (copied, copied["role"], copied["content"])} == {dict, str}
    assert type(copied["more"][0]) is dict


def test_plain_data_counts_characters():
    data = PlainData()
    plain_messages([{"role": "user", "content": "abc"}], data)
    assert data.num_chars == len("roleusercontentabc")


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**64), 2**64)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(value=JSON)
def test_plain_data_copy_of_json_is_equal(value):
    assert PlainData().copy(value, "x") == value


@given(messages=st.one_of(JSON, st.lists(st.dictionaries(st.sampled_from(["role", "content", "x"]), JSON))))
def test_plain_messages_any_input_is_copied_or_refused(messages):
    try:
        copied = plain_messages(messages, PlainData())
    except PromptError:
        return
    assert all(isinstance(message["role"], str) for message in copied)


CALL = {"name": "look", "arguments": {"city": "Köln", "days": 2}}
TYPED = {
    "type": "object",
    "required": ["city"],
    "properties": {
        "city": {"type": "string"},
        "unit": {"type": "string", "enum": ["c", "f"]},
        "tags": {"type": "array", "items": {"type": "string"}, "nullable": True},
        "rows": {"type": "array", "items": {"type": "object", "properties": {"x": {"type": "number"}}}},
        "one": {"oneOf": [{"type": "string"}, {"type": "integer"}]},
        "two": {"type": ["string", "null"]},
    },
}


def test_render_gpt_oss_channels():
    """Schemas by a macro that calls itself, a thought that is kept until an answer follows it, and who may speak."""
    template = ChatTemplate(CHAT_TEMPLATES["channels"], "x", {})
    user, answer = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "3", "thinking": "so"}
    call = {"role": "assistant", "thinking": "hm", "tool_calls": [{"type": "function", "function": CALL}]}
    result = {"role": "tool", "content": "3 degrees"}
    tools = [{"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": TYPED}}]
    text = template.render([user, call, result], tools=tools, reasoning_effort="much", builtin_tools=["browser"])
    assert "effort much.\nIt browses.\n<|end|>" in text
    kinds = 'city: string, unit?: "c" or "f", tags?: string[] or null, rows?: {x?: number}[]'
    assert f"look({{{kinds}, one?: string or integer, two?: string or null}})" in text
    called = (
        'to=look json<|message|>{"city": "Köln", "days": 2}<|call|><|start|>look to=assistant<|message|>"3 degrees"'
    )
    assert text.endswith(f"analysis<|message|>hm<|end|><|start|>assistant {called}<|end|><|start|>assistant")
    later = template.render([user, call, result, answer, user])
    assert "analysis" not in later
    assert "final<|message|>3<|end|><|start|>user" in later
    assert template.render([user, answer], add_generation_prompt=False).endswith(
        "so<|end|><|start|>assistant<|channel|>final<|message|>3<|return|>"
    )
    with raises_code("template.refused", TemplateError):
        template.render([user, result])
