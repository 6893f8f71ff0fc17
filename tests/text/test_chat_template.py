"""ChatTemplate: messages to prompts as transformers writes them; what is no conversation is refused in one line."""

import json
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counted_work import num_lines
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


@pytest.mark.parametrize("messages", CHATS.values(), ids=CHATS)
@pytest.mark.parametrize("source", CHAT_TEMPLATES.values(), ids=CHAT_TEMPLATES)
def test_templates_of_models_render_as_in_transformers(source, messages):
    for options in (
        {"tools": None},
        {"tools": TOOLS, "add_generation_prompt": False},
        {"tools": TOOLS, "enable_thinking": False, "date_string": "1 Jan 2030"},
    ):
        agree(source, messages=messages, **options)


@pytest.mark.parametrize("source", CHAT_TEMPLATES.values(), ids=CHAT_TEMPLATES)
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


def test_the_generation_prompt_is_asked_for_by_default():
    template = ChatTemplate("{{ add_generation_prompt }}", "x", {})
    assert template.render([{"role": "user", "content": "hi"}]) == "True"
    assert template.render([{"role": "user", "content": "hi"}], add_generation_prompt=False) == "False"


def test_text_parts_are_joined():
    template = ChatTemplate("{{ messages[0].content }}", "x", {})
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert template.render([{"role": "user", "content": parts}]) == "a\nb"


def test_messages_are_checked_before_the_template_runs():
    template = ChatTemplate("{{ raise_exception('ran') }}", "x", {})
    with pytest.raises(PromptError, match="role"):
        template.render([{"content": "hi"}])
    with pytest.raises(PromptError, match="strings, finite numbers"):
        template.render([{"role": "user", "content": "hi"}], tools=[object()])


def test_the_caller_s_messages_are_not_touched():
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}], "reasoning": "r"}]
    before = json.dumps(messages)
    ChatTemplate("{{ messages }}", "x", {}).render(messages)
    assert json.dumps(messages) == before


ERRORS = {
    "refusal": ("{{ raise_exception('no system role\\nhere') }}", "it refuses these messages: no system role here"),
    "refusal with data": ("{{ raise_exception(messages) }}", "it refuses these messages"),
    "syntax": ("a\n{% if %}", "line 2 is no Jinja"),
    "unclosed": ("{% for x in y %}", "line 1 is no Jinja"),
    "unknown filter": ("{{ 'a'|nope }}", "No filter named 'nope'"),
    "undefined": ("{{ a.b.c }}", "'a' is undefined"),
    "type error": ("{{ 'a' + 1 }}", "TypeError"),
    "escape": ("{{ ''.__class__ }}", "it leaves its sandbox"),
    "steps": ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "steps"),
    "memory": ("{{ 'a' * 10**9 }}", "builds more than"),
    "output": ("{% for a in range(99999) %}" + "x" * 1000 + "{% endfor %}", "writes more than"),
    "nesting": ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "nested too deeply"),
    "length": ("x" * (MAX_TEMPLATE_CHARS + 1), "characters"),
}


@pytest.mark.parametrize(("source", "words"), ERRORS.values(), ids=ERRORS)
def test_failures_are_one_line_that_names_the_file_and_says_what_to_do(source, words):
    template = ChatTemplate(source, "model.gguf", {})
    for _ in range(2):
        with pytest.raises(TemplateError) as caught:
            template.render([{"role": "user", "content": "hi"}])
        assert words in str(caught.value)
        assert "model.gguf" in caught.value.asked
        assert caught.value.do
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 600


def test_a_broken_template_is_found_at_its_first_use_or_on_request():
    template = ChatTemplate("{% if %}", "x", {})
    with pytest.raises(TemplateError, match="no Jinja"):
        template.check()
    ChatTemplate("{{ messages }}", "x", {}).check()


def test_compiling_happens_once_even_when_it_fails(monkeypatch):
    compiled = []
    compile_template = ChatSandbox.compile_template
    monkeypatch.setattr(
        ChatSandbox, "compile_template", lambda *args: compiled.append(args[1]) or compile_template(*args)
    )
    sound, broken = ChatTemplate("{{ messages[0].content }}", "x", {}), ChatTemplate("{% if %}", "x", {})
    for _ in range(3):
        assert sound.render([{"role": "user", "content": "hi"}]) == "hi"
        with pytest.raises(TemplateError, match="no Jinja"):
            broken.render([{"role": "user", "content": "hi"}])
    assert compiled == [sound.source, broken.source]


def test_many_threads_may_render_at_once():
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


def test_hostile_templates_are_stopped_in_other_threads_too():
    outcome: list[str] = []

    def work() -> None:
        try:
            ChatTemplate(ERRORS["steps"][0], "x", {}).render([{"role": "user", "content": "hi"}])
        except TemplateError as error:
            outcome.append(error.has)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(30)
    assert outcome
    assert "steps" in outcome[0]


def test_work_grows_with_the_conversation_and_no_faster():
    source = CHAT_TEMPLATES["thinking"]
    template = ChatTemplate(source, "x", {})

    def lines(count: int) -> int:
        messages = [{"role": ("user", "assistant")[index % 2], "content": "word " * 50} for index in range(count)]
        return num_lines(lambda: template.render(messages))

    lines(10)
    assert lines(300) < 3.2 * lines(100)


def test_a_large_conversation_is_within_the_budget():
    messages = [{"role": ("user", "assistant")[index % 2], "content": "é" * 4000} for index in range(1000)]
    for name, source in CHAT_TEMPLATES.items():
        assert len(ChatTemplate(source, name, {"bos_token": "<s>", "eos_token": "</s>"}).render(messages)) > 100_000


def test_a_file_of_its_own_comes_before_the_config(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "config", "bos_token": "<s>"}))
    template = chat_template_from_directory(tmp_path)
    assert (template.source, template.origin) == ("config", "tokenizer_config.json")
    (tmp_path / "chat_template.jinja").write_text("file {{ bos_token }}\n", encoding="utf-8")
    template = chat_template_from_directory(tmp_path)
    assert template.origin == "chat_template.jinja"
    assert template.render([{"role": "user", "content": "hi"}]) == "file <s>"


def test_the_default_of_several_templates_is_taken(tmp_path):
    config = tmp_path / "tokenizer_config.json"
    several = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    config.write_text(json.dumps({"chat_template": several}))
    assert chat_template_from_directory(tmp_path).source == "plain"
    config.write_text(json.dumps({"chat_template": several[:1]}))
    assert chat_template_from_directory(tmp_path).source == "tools"
    config.write_text(json.dumps({"chat_template": [several[0], {"name": "rag", "template": "rag"}]}))
    assert chat_template_from_directory(tmp_path) is None


def test_a_folder_without_a_template_has_none(tmp_path):
    assert chat_template_from_directory(tmp_path) is None
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert chat_template_from_directory(tmp_path) is None


@pytest.mark.parametrize("value", [5, [5], [{"name": "default"}], {"default": 3}], ids=str)
def test_templates_of_a_wrong_type_are_refused(tmp_path, value):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": value}))
    with pytest.raises(ModelFormatError, match=r"tokenizer_config\.json"):
        chat_template_from_directory(tmp_path)


def test_a_template_file_that_is_not_text_is_refused(tmp_path):
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelFormatError, match=r"chat_template\.jinja is not UTF-8"):
        chat_template_from_directory(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"x" * 10**6)
    with pytest.raises(ModelFormatError, match=r"chat_template\.jinja has 1000000 bytes"):
        chat_template_from_directory(tmp_path)


def test_gguf_metadata_gives_the_template_and_its_tokens():
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
    with pytest.raises(ModelFormatError, match=r"a\.gguf"):
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
    "not a list": ("hello", "messages are"),
    "a dict": ({"role": "user", "content": "a"}, "messages are"),
    "nothing": (None, "messages are"),
    "no messages": ([], "a chat without messages"),
    "too many": ([{"role": "user", "content": "a"}] * (MAX_MESSAGES + 1), "10001 messages were given"),
    "message of a wrong type": (["hello"], r"messages\[0\] is 'hello'"),
    "no role": ([{"content": "a"}], "has the role None"),
    "empty role": ([{"role": "", "content": "a"}], "has the role ''"),
    "role of a wrong type": ([{"role": 5, "content": "a"}], "has the role 5"),
    "no content": ([{"role": "user"}], "has the content None"),
    "nothing as content": ([{"role": "user", "content": None}], "has the content None"),
    "content of a wrong type": ([{"role": "user", "content": 5}], "has the content 5"),
    "content as dict": ([{"role": "user", "content": {"text": "a"}}], "has the content {"),
    "no parts": ([{"role": "user", "content": []}], r"has the content \[\]"),
    "image part": (
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}],
        "a part of type 'image_url'",
    ),
    "part without text": ([{"role": "user", "content": [{"type": "text"}]}], "a part of type 'text'"),
    "part of a wrong type": ([{"role": "user", "content": [5]}], "a part of type 5"),
    "key of a wrong type": ([{"role": "user", "content": "a", 5: "b"}], "has the key 5"),
    "bytes": ([{"role": "user", "content": "a", "x": b"b"}], r"messages\[0\]\['x'\] is b'b'"),
    "object": ([{"role": "user", "content": "a", "x": object()}], r"messages\[0\]\['x'\] is <object"),
    "set": ([{"role": "user", "content": "a", "x": {1}}], r"messages\[0\]\['x'\] is \{1\}"),
    "not a number": ([{"role": "user", "content": "a", "x": float("nan")}], r"messages\[0\]\['x'\] is nan"),
    "infinite": ([{"role": "user", "content": "a", "x": float("inf")}], r"messages\[0\]\['x'\] is inf"),
    "huge integer": ([{"role": "user", "content": "a", "x": 10**5000}], r"messages\[0\]\['x'\] is "),
    "too deep": (
        [{"role": "user", "content": "a", "x": json.loads("[" * (MAX_DEPTH + 2) + "]" * (MAX_DEPTH + 2))}],
        "nested more than 24 deep",
    ),
    "too long": (
        [{"role": "user", "content": "a" * (MAX_CHAT_CHARS + 1)}],
        "ends a chat of more than 16777216 characters",
    ),
    "too long together": (
        [{"role": "user", "content": "a" * 2**20}] * 17,
        r"messages\[15\].* ends a chat of more than 16777216 characters",
    ),
    "too many values": (
        [{"role": "user", "content": "a", "x": [0] * 300_000}],
        "ends a chat of more than 200000 values",
    ),
}


@pytest.mark.parametrize(("messages", "words"), BAD.values(), ids=BAD)
def test_bad_messages_are_refused_in_one_short_line_that_says_what_is_wrong(messages, words):
    with pytest.raises(PromptError, match=words) as caught:
        plain_messages(messages, PlainData())
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_a_message_that_holds_itself_is_refused():
    message = {"role": "user", "content": "a"}
    message["self"] = message
    with pytest.raises(PromptError, match="deep"):
        plain(message)


def test_content_becomes_one_string():
    assert plain({"role": "user", "content": "a"}) == [{"role": "user", "content": "a"}]
    parts = [{"type": "text", "text": "a"}, "b", {"text": "c"}]
    assert plain({"role": "user", "content": parts})[0]["content"] == "a\nb\nc"
    assert plain({"role": "user", "content": ({"type": "text", "text": "a"},)})[0]["content"] == "a"


def test_calls_of_tools_need_no_content():
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    assert plain(call) == [call]
    assert plain({**call, "content": None})[0]["content"] is None


def test_reasoning_is_known_by_the_names_that_templates_read():
    for name in ("reasoning_content", "thinking", "reasoning"):
        message = plain({"role": "assistant", "content": "a", name: "because"})[0]
        assert message["reasoning_content"] == message["thinking"] == "because"
    assert "thinking" not in plain({"role": "assistant", "content": "a"})[0]


def test_only_built_in_types_come_out():
    message = Dict(role=Text("user"), content=Text("a"), more=[Dict(x=Text("y")), (True, 1, 2.5, None)])
    copied = plain(message)[0]
    assert copied == {"role": "user", "content": "a", "more": [{"x": "y"}, [True, 1, 2.5, None]]}
    assert {type(value) for value in (copied, copied["role"], copied["content"])} == {dict, str}
    assert type(copied["more"][0]) is dict


def test_characters_are_counted():
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
def test_json_comes_out_as_it_went_in(value):
    assert PlainData().copy(value, "x") == value


@given(messages=st.one_of(JSON, st.lists(st.dictionaries(st.sampled_from(["role", "content", "x"]), JSON))))
def test_whatever_is_given_there_is_a_copy_or_a_prompt_error(messages):
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


def test_channels_of_gpt_oss():
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
    with pytest.raises(TemplateError, match="nobody has called a tool"):
        template.render([user, result])
