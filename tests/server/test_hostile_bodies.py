"""What costs a client one body costs the server little: others are answered meanwhile, and faults are not collected."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel, model_validator
from starlette.requests import Request
from tokenizers import Tokenizer, models, pre_tokenizers

from for_each import for_each
from holdfast.server import conversations
from holdfast.server.anthropic_messages import conversation_of
from holdfast.server.anthropic_schemas import MessageRequest
from holdfast.server.bodies import MAX_NAMES, SMALL_BODY_BYTES, Body, parse, parse_json, read_model
from holdfast.server.embedding_schemas import EmbeddingRequest, OllamaEmbedRequest, RerankRequest, ScoreRequest
from holdfast.server.errors import ApiError
from holdfast.server.ollama_schemas import OllamaChatRequest, OllamaGenerateRequest, OllamaShowRequest
from holdfast.server.schemas import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, ResponseRequest
from holdfast.server.service import ServerLimits
from holdfast.text.control_tokens import LARGE_TEXT_CHARS, encode_ids
from server.served import app_client, said, user

MANY = 500_000
CPU_SECONDS = 1.0
"""Before, each of these took 4 to 40 seconds of the event loop for a body of 8 MiB, and /health waited as long."""
HUGE = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": list(range(5000))}}}
MESSAGE = {"role": "user", "content": "x"}


def fault_of(model: type[BaseModel], value: dict[str, Any]) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(model, value)
    return caught.value


@for_each(
    "model, make_value, param",
    [
        (CompletionRequest, lambda: {"prompt": [1, *(["a"] * MANY)]}, "prompt[1]"),
        (CompletionRequest, lambda: {"prompt": [[1], *([[1.5]] * MANY)]}, "prompt[1][0]"),
        (CompletionRequest, lambda: {"prompt": [-1] * MANY}, "prompt[0]"),
        (CompletionRequest, lambda: {"prompt": "a", "allowed_token_ids": ["x"] * MANY}, "allowed_token_ids[0]"),
        (DetokenizeRequest, lambda: {"tokens": [None] * MANY}, "tokens[0]"),
        (ChatCompletionRequest, lambda: {"messages": [{**MESSAGE, "content": [{"type": "text"}] * 50}] * 4000}, None),
        (
            ChatCompletionRequest,
            lambda: {"messages": [MESSAGE], **{f"unknown{at}": 1 for at in range(MANY)}},
            "unknown0",
        ),
        (ResponseRequest, lambda: {"input": [{"role": "user"}] * 4000}, "input[0].content"),
        (MessageRequest, lambda: {"messages": [{"role": "user", "content": [{"type": "image"}] * 50}] * 4000}, None),
        (MessageRequest, lambda: {"messages": [MESSAGE], **{f"max_token{at}": 1 for at in range(MANY)}}, "max_token0"),
        (OllamaChatRequest, lambda: {"messages": [{"role": "alien"}] * 4000}, "messages[0].role"),
        (
            OllamaChatRequest,
            lambda: {"messages": [], "options": {f"top_kk{at}": 1 for at in range(MANY)}, "think": 1},
            None,
        ),
        (EmbeddingRequest, lambda: {"input": [1, *(["a"] * MANY)]}, "input[1]"),
        (EmbeddingRequest, lambda: {"input": [[1], *([[1.5]] * 2000)]}, "input[1][0]"),
        (EmbeddingRequest, lambda: {"input": ["a"] * MANY}, "input"),
        (RerankRequest, lambda: {"query": "a", "documents": [{"text": 5}] * 2000}, "documents[0].text"),
        (RerankRequest, lambda: {"query": "a", "documents": [None] * MANY}, None),
        (ScoreRequest, lambda: {"text_1": "a", "text_2": [1] * MANY}, None),
        (OllamaEmbedRequest, lambda: {"model": "m", "input": [1] * MANY}, None),
    ],
)
def test_fault_of_a_body_with_many_faults_is_fast(model, make_value, param) -> None:
    value = make_value()
    started = time.process_time()
    found = fault_of(model, value)
    assert time.process_time() - started < CPU_SECONDS
    assert found.status == 400
    assert param is None or found.param == param


def test_parse_json_object_with_too_many_names_is_refused() -> None:
    names = ",".join(f'"u{at}":1' for at in range(MAX_NAMES + 1))
    with pytest.raises(ApiError, match=f"more than {MAX_NAMES} names"):
        parse_json(f'{{"messages":[{{"role":"user",{names}}}]}}'.encode(), ServerLimits())


def test_parse_a_million_token_ids_is_fast() -> None:
    ids = list(range(1_000_000))
    started = time.process_time()
    assert parse(CompletionRequest, {"prompt": ids}).prompt == ids
    assert time.process_time() - started < CPU_SECONDS


@for_each(
    "prompt, param, words",
    [
        (["a", ""], "prompt[1]", "at least 1 character"),
        (["a"] * 257, "prompt", "at most 256"),
        (["a", [1]], "prompt[1]", "valid string"),
        ([[1], []], "prompt[1]", "at least 1 item"),
        ([1, True], "prompt[1]", "got a boolean"),
    ],
)
def test_parse_fault_in_a_prompt_names_its_place(prompt, param, words) -> None:
    found = fault_of(CompletionRequest, {"prompt": prompt})
    assert found.param == param
    assert words in str(found)


class Where(Body):
    """Tells which thread made it."""

    text: str
    thread: int = 0

    @model_validator(mode="after")
    def _note(self) -> "Where":
        self.thread = threading.get_ident()
        return self


@for_each("is_large", [False, True])
def test_read_model_parses_large_bodies_in_a_thread(is_large) -> None:
    body = b'{"text":"%s"}' % (b"x" * (SMALL_BODY_BYTES if is_large else 10))

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": body, "more_body": False}

    scope = {"type": "http", "headers": [(b"content-type", b"application/json")], "method": "POST", "path": "/"}
    given = asyncio.run(read_model(Request(scope, receive), Where, ServerLimits()))
    assert (given.thread != threading.get_ident()) == is_large


def test_tokenizer_encode_of_large_text_lets_threads_run() -> None:
    backend = Tokenizer(models.BPE({chr(code): code for code in range(33, 127)} | {"\u0120": 0}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    text = "some words " * (6 * LARGE_TEXT_CHARS // 11)
    num_ticks, is_over = 0, threading.Event()

    def tick() -> None:
        nonlocal num_ticks
        while not is_over.wait(0.002):
            num_ticks += 1

    ticking = threading.Thread(target=tick)
    ticking.start()
    started = time.monotonic()
    ids = encode_ids(backend, text, False)
    seconds, num_seen = time.monotonic() - started, num_ticks
    is_over.set()
    ticking.join()
    assert num_seen >= min(20, seconds / 0.1), "the interpreter's lock was held"
    assert ids == backend.encode(text, add_special_tokens=False).ids


@pytest.fixture(scope="module")
def client():
    with app_client() as made:
        yield made


@for_each(
    "path, body, param, words",
    [
        ("chat/completions", {"messages": [{"role": "alien", "content": "x"}]}, "messages[0].role", "'system'"),
        ("chat/completions", {"messages": [{"content": "x"}]}, "messages[0].role", "is required"),
        ("chat/completions", {"response_format": {"type": "xml"}}, "response_format.type", "'json_object'"),
        ("chat/completions", {"logit_bias": {"999999": 1}}, "logit_bias", "request.token_outside_vocabulary"),
        ("chat/completions", {"stop_token_ids": [999999]}, "stop_token_ids", "request.token_outside_vocabulary"),
        ("chat/completions", {"min_tokens": 9, "max_tokens": 5}, "min_tokens", "request.min_above_max"),
        ("chat/completions", {"stream_options": {"include_usage": True}}, "stream_options", "http.stream_options"),
        ("chat/completions", {"response_format": HUGE}, "response_format", "request.schema_too_large"),
        ("chat/completions", {"prompt": "x"}, "prompt", "Did you mean messages?"),
        ("completions", {"messages": []}, "messages", "Did you mean prompt?"),
        ("responses", {"max_tokens": 5}, "max_tokens", "Did you mean max_output_tokens?"),
        ("responses", {"response_format": {}}, "response_format", "Did you mean text?"),
        ("responses", {"input": [{"type": "web_search_call", "id": "x"}]}, "input[0].type", "function_call_output"),
    ],
)
def test_parse_unknown_field_names_the_likely_one(client, path, body, param, words) -> None:
    own = {"chat/completions": {"messages": user("x")}, "completions": {"prompt": "x"}, "responses": {"input": "x"}}
    answer = client.post(f"/v1/{path}", json={**own[path], **body})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert words == error["code"] or words in error["message"]


SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
CALLED = {"id": "a", "function": {"name": "look", "arguments": {"a": 1}}}
RICH = {
    "/v1/messages": {
        "model": "fake",
        "max_tokens": 2,
        "system": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            MESSAGE,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "x", "signature": "x"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "tool_use", "id": "a", "name": "look", "input": {"a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "a", "content": "x", "is_error": True}],
            },
        ],
        "tools": [{"name": "look", "description": "x", "input_schema": SCHEMA}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 1},
        "output_config": {"effort": "low"},
        "stop_sequences": ["x"],
        "temperature": 1,
        "top_k": 1,
        "top_p": 1,
        "metadata": {"user_id": "x"},
    },
    "/api/chat": {
        "model": "fake",
        "stream": False,
        "messages": [MESSAGE, {"role": "assistant", "tool_calls": [CALLED]}, {"role": "tool", "tool_name": "look"}],
        "tools": [{"type": "function", "function": {"name": "look", "description": "x", "parameters": SCHEMA}}],
        "options": {"temperature": 1, "seed": 1, "num_predict": 2, "num_ctx": 9, "stop": ["x"], "repeat_penalty": 1},
        "think": True,
        "keep_alive": "5m",
    },
    "/api/generate": {"prompt": "x", "system": "x", "raw": False, "stream": False, "options": {"num_predict": 2}},
    "/api/show": {"model": "fake", "verbose": True},
}
RICH["/v1/messages/count_tokens"] = RICH["/v1/messages"]
MODELS = {
    "/v1/messages": MessageRequest,
    "/api/chat": OllamaChatRequest,
    "/api/generate": OllamaGenerateRequest,
    "/api/show": OllamaShowRequest,
}
HOSTILE = (True, None, -1, 1e300, 2**62, "\x00\u202e" * 3, [], {}, [[{"type": []}]], {"type": {"a": "b"}}, [None])


def spoiled(value: Any, bad: object) -> Iterator[Any]:
    """The value with each part of it, at every depth, in turn replaced."""
    if isinstance(value, dict):
        parts: Any = value.items()
    else:
        parts = enumerate(value) if isinstance(value, list) else ()
    for name, part in parts:
        for other in (bad, *spoiled(part, bad)):
            if isinstance(value, dict):
                yield {**value, name: other}
            else:
                yield [*value[:name], other, *value[name + 1 :]]


@for_each("path", [path for path in RICH if path in MODELS])
def test_parse_hostile_value_in_any_field_is_taken_or_refused(path) -> None:
    for bad in HOSTILE:
        for body in spoiled(RICH[path], bad):
            with contextlib.suppress(ApiError):
                given = parse(MODELS[path], body)
                if isinstance(given, MessageRequest):
                    conversation_of(given)


SAMPLED: dict[str, tuple[tuple[float, float], tuple[float, float]]] = {
    "temperature": ((0, 100), (-0.01, 100.01)),
    "top_p": ((0, 1), (-0.01, 1.01)),
    "min_p": ((0, 1), (-0.01, 1.01)),
    "presence_penalty": ((-2, 2), (-2.01, 2.01)),
    "frequency_penalty": ((-2, 2), (-2.01, 2.01)),
    "repetition_penalty": ((0.01, 100), (0, 100.01)),
    "top_k": ((-1, 2**31 - 1), (-2, 2**31)),
    "seed": ((-(2**63), 2**63 - 1), (-(2**63) - 1, 2**63)),
    "n": ((1, 128), (0, 129)),
    "min_tokens": ((0, 2**31 - 1), (-1, 2**31)),
    "truncate_prompt_tokens": ((-1, 2**31 - 1), (-2, 2**31)),
}
BOUNDED: list[tuple[Any, dict[str, Any], dict[str, tuple[tuple[float, float], tuple[float, float]]]]] = [
    (CompletionRequest, {"prompt": "x"}, {**SAMPLED, "logprobs": ((0, 20), (-1, 21))}),
    (
        ChatCompletionRequest,
        {"messages": user("x")},
        {**SAMPLED, "top_logprobs": ((0, 20), (-1, 21)), "max_tokens": ((1, 2**31 - 1), (0, 2**31))},
    ),
    (ResponseRequest, {"input": "x"}, {**SAMPLED, "n": ((1, 1), (0, 2)), "top_logprobs": ((0, 20), (-1, 21))}),
    (
        MessageRequest,
        {"messages": user("x"), "max_tokens": 1},
        {"temperature": SAMPLED["temperature"], "top_p": SAMPLED["top_p"], "top_k": ((0, 2**31 - 1), (-1, 2**31))},
    ),
]


@for_each("model, body, bounds", BOUNDED)
def test_parse_number_is_accepted_up_to_its_bound(model, body, bounds) -> None:
    for name, (sound, wrong) in bounds.items():
        for value in sound:
            assert getattr(parse(model, {**body, name: value}), name) == value
        for value in wrong:
            with pytest.raises(ApiError) as caught:
                parse(model, {**body, name: value})
            assert caught.value.param == name, (name, value)


@for_each(
    "model, body, name, taken, refused",
    [
        (ResponseRequest, {"input": "x"}, "service_tier", ("auto", "default", None), ("flex", "", 1)),
        (ResponseRequest, {"input": "x"}, "truncation", ("disabled", None), ("auto",)),
        (ResponseRequest, {"input": "x"}, "background", (False, None), (True, 0)),
        (CompletionRequest, {"prompt": "x"}, "length_penalty", (1, 1.0, None), (2, True, "1")),
        (CompletionRequest, {"prompt": "x"}, "use_beam_search", (False, None), (True, 0)),
    ],
)
def test_parse_field_without_effect_takes_neutral_values(model, body, name, taken, refused) -> None:
    for value in taken:
        parse(model, {**body, name: value})
    for value in refused:
        with pytest.raises(ApiError) as caught:
            parse(model, {**body, name: value})
        assert caught.value.param == name


@pytest.mark.slow
@pytest.mark.parametrize("path", RICH)
@pytest.mark.parametrize("bad", HOSTILE, ids=map(str, range(len(HOSTILE))))
def test_post_wrong_value_in_any_field_is_answered(client, path, bad) -> None:
    assert client.post(path, json=RICH[path]).status_code == 200
    for body in spoiled(RICH[path], bad):
        answer = client.post(path, json=body)
        assert answer.status_code in (200, 400, 404), (answer.status_code, body)
        assert answer.status_code == 200 or "error" in answer.json()


@for_each("path", ["/v1/messages", "/api/chat"])
@for_each(
    "body, words",
    [
        (b'{"messages": ' + b"[" * 100 + b"]" * 100 + b"}", "nested deeper"),
        (b'{"max_tokens": NaN}', "not a JSON number"),
        (b'{"max_tokens": 1e999}', "too large"),
        (b'{"max_tokens": 99999999999999999999}', "64 bits"),
        (b'{"system": "\\ud800"}', "surrogate pair"),
        (b"[]", "it is an array"),
        (b"", "empty"),
    ],
)
def test_post_body_that_is_no_plain_json_is_refused(client, path, body, words) -> None:
    answer = client.post(path, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert words in (error if isinstance(error, str) else error["message"])


def test_detokenize_unknown_token_names_its_field(client) -> None:
    error = client.post("/detokenize", json={"tokens": [1, 999999]}).json()["error"]
    assert error["param"] == "tokens"


def test_tokenize_adds_special_tokens_by_default(client, monkeypatch) -> None:
    from holdfast.api.chat_tokenizer import ChatTokenizer

    seen = []
    monkeypatch.setattr(
        ChatTokenizer, "encode", lambda own, text, add_special_tokens: seen.append(add_special_tokens) or [1]
    )
    for more in ({}, {"add_special_tokens": None}, {"add_special_tokens": True}, {"add_special_tokens": False}):
        assert client.post("/tokenize", json={"prompt": "a", **more}).json()["count"] == 1
    assert seen == [True, True, True, False]


def test_tokenize_unrenderable_tools_name_their_field(client) -> None:
    twice = [{"type": "function", "function": {"name": "look"}}] * 2
    error = client.post("/tokenize", json={"messages": user("x"), "tools": twice}).json()["error"]
    assert error["param"] == "tools"


def test_health_and_ready_answer_head_requests(client) -> None:
    for path in ("/health", "/ready"):
        answer = client.head(path)
        assert answer.status_code == 200
        assert not answer.content


def test_chat_tools_are_parsed_in_a_thread(client, monkeypatch) -> None:
    threads = []
    seen = conversations.parse_tools
    monkeypatch.setattr(conversations, "parse_tools", lambda tools: threads.append(_thread()) or seen(tools))
    tools = [{"type": "function", "function": {"name": "look"}}]
    body = {"messages": user(said("Hi")), "tools": tools}
    assert client.post("/v1/chat/completions", json=body).status_code == 200
    assert [name.partition("_")[0] for name in threads] == ["asyncio"]


def _thread() -> str:
    return threading.current_thread().name
