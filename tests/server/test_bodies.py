"""Bodies: bytes, time, JSON and fields with bounds; every fault names its field."""

import asyncio
import time
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field
from starlette.requests import ClientDisconnect, Request

from error_codes import raises_code
from for_each import for_each
from holdfast.server.bodies import Body, BodyBudget, parse, parse_json, read_json
from holdfast.server.errors import ApiError
from holdfast.server.service import ServerLimits

LIMITS = ServerLimits(max_body_bytes=1000, body_seconds=0.2)


class Part(Body):
    role: str
    content: str | list[int] = ""


class Load(Body):
    model: str
    temperature: float = Field(1.0, ge=0, le=2)
    messages: list[Part] = Field(default_factory=list)
    stop: str | list[str] | None = None


def fault_of(value: object) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(Load, value)
    return caught.value


FAULTS: list[tuple[object, str | None, str]] = [
    ({"model": 1}, "model", "input should be a valid string (got a number)"),
    ({}, "model", "model is required"),
    ({"modle": "a"}, "modle", "Did you mean model?"),
    ({"model": "a", "temprature": 1}, "temprature", "Did you mean temperature?"),
    ({"model": "a", "zzz": 1}, "zzz", "Remove it"),
    ({"model": "a", "temperature": 3}, "temperature", "less than or equal to 2"),
    ({"model": "a", "temperature": "1"}, "temperature", "got a string"),
    ({"model": "a", "temperature": True}, "temperature", "got a boolean"),
    ({"model": "a", "temperature": None}, "temperature", "got null"),
    ({"model": "a", "temperature": float("nan")}, "temperature", ""),
    ({"model": "a", "messages": [{"role": "u", "contnt": "x"}]}, "messages[0].contnt", "Did you mean content?"),
    ({"model": "a", "messages": [{"role": "u", "content": [1, "x"]}]}, "messages[0].content[1]", "valid integer"),
    ({"model": "a", "messages": [{}]}, "messages[0].role", "is required"),
    ({"model": "a", "messages": {}}, "messages", "got an object"),
    ({"model": "a", "stop": 3}, "stop", "valid string, or input should be a valid list"),
    ({"model": "a", "stop": ["a", 3]}, "stop[1]", "valid string"),
    ({"model": "a", "x" * 5000: 1}, None, "There is no field"),
    ([], None, ""),
]


def test_parse_fault_names_its_field() -> None:
    for value, param, words in FAULTS:
        fault = fault_of(value)
        assert fault.status == 400
        assert words in str(fault)
        assert len(str(fault)) < 400
        if param is not None:
            assert fault.param == param


UNSOUND = [
    b"",
    b"[]",
    b'"a"',
    b"1",
    b"null",
    b"{",
    b'{"a":1}x',
    b'{"a":NaN}',
    b'{"a":Infinity}',
    b'{"a":[-Infinity]}',
    b'{"a":1e999}',
    b'{"a":-1e999}',
    b'{"a":9223372036854775808}',
    b'{"a":-' + b"9" * 5000 + b"}",
    b'{"a":"\\ud800"}',
    b'{"a":["\\udfff\\ud800"]}',
    b'{"\\ud800":1}',
    b'{"a":1,"\\ud800":1}',
    b'{"a":"b","c":"\\ud800"}',
    b'{"a":[1,9223372036854775808]}',
    b'{"a":[[1],[9223372036854775808]]}',
    b'{"a":{"b":1},"c":{"d":' + b"[" * 63 + b"]" * 63 + b"}}",
    b'{"a":1,"a":2}',
    b'{"b":{"a":1,"\\u0061":2}}',
    b"\xff",
    b'{"a":"\xc3"}',
    b"\xef\xbb\xbf{}",
    "{}".encode("utf-16"),
    b'{"a":' * 100 + b"1" + b"}" * 100,
    b'{"a":' + b"[" * 100_000,
    b'{"a":' + b"[" * 64 + b"]" * 64 + b"}",
    b"{'a':1}",
    b'{"a":01}',
    b'{"a":"\x00"}',
]


def test_parse_json_invalid_body_is_refused() -> None:
    for body in UNSOUND:
        with raises_code("http.invalid_json", ApiError) as caught:
            parse_json(body, LIMITS)
        assert (caught.value.status, caught.value.public_code) == (400, "invalid_json"), body
        caught.value.to_json()


@for_each(
    "body, value",
    [
        (b"{}", {}),
        (b' {"a" : [1, -2.5e3, "\\ud83d\\ude00", null]}\n', {"a": [1, -2500.0, "\U0001f600", None]}),
        (b'{"a":9223372036854775807}', {"a": 2**63 - 1}),
        (b'{"a":"\\\\ud800"}', {"a": "\\ud800"}),
        (b'{"a":' + b"[" * 63 + b"]" * 63 + b"}", None),
    ],
)
def test_parse_json_valid_body_is_accepted(body: bytes, value: object) -> None:
    parsed = parse_json(body, LIMITS)
    assert value is None or parsed == value


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60))
def test_parse_json_any_bytes_are_an_object_or_refused(body: bytes) -> None:
    for text in (body, b'{"a":' + body + b"}"):
        with suppress(ApiError):
            assert isinstance(parse_json(text, LIMITS), dict)


def test_parse_json_400k_token_ids_take_under_a_second() -> None:
    ids = b'{"prompt":[' + b"1," * 400_000 + b"1]}"
    started = time.process_time()
    parse_json(ids, ServerLimits())
    assert time.process_time() - started < 1


def request_of(pieces: list[bytes | float], headers: dict[bytes, bytes] | None = None) -> Request:
    """A request whose body comes in pieces, with pauses in seconds; its client goes at their end."""
    waiting = list(pieces)

    async def receive() -> dict[str, object]:
        while waiting and isinstance(waiting[0], float):
            await asyncio.sleep(waiting.pop(0))  # type: ignore[arg-type]
        if not waiting:
            return {"type": "http.disconnect"}
        piece = waiting.pop(0)
        return {"type": "http.request", "body": piece, "more_body": bool(waiting)}

    all_headers = {b"content-type": b"application/json; charset=utf-8", **(headers or {})}
    return Request({"type": "http", "headers": list(all_headers.items()), "method": "POST", "path": "/"}, receive)


@for_each(
    "pieces, headers, status",
    [
        ([b"{", b'"a"', b":1}"], {}, None),
        ([b"{", 0.05, b'"a"', 0.05, b":1}"], {}, None),
        ([b"{", 1.0, b"}"], {}, 408),
        ([b" " * 600, b" " * 600], {}, 413),
        ([b" " * 993 + b'{"a":', b"1}"], {}, None),
        ([b" " * 993 + b'{"a":', b"1} "], {}, 413),
        ([b"{}"], {b"content-length": b"1001"}, 413),
        ([b"{}"], {b"content-length": b"9" * 400}, 413),
        ([b"{}"], {b"content-type": b"text/json"}, 415),
        ([b"{}"], {b"content-encoding": b"gzip"}, 415),
    ],
)
def test_read_json_bounds_bytes_and_time(
    pieces: list[bytes | float], headers: dict[bytes, bytes], status: int | None
) -> None:
    if status is None:
        assert asyncio.run(read_json(request_of(pieces, headers), LIMITS)) == {"a": 1}
        return
    with pytest.raises(ApiError) as caught:
        asyncio.run(read_json(request_of(pieces, headers), LIMITS))
    assert caught.value.status == status


def test_read_json_client_disconnect_is_raised() -> None:
    with pytest.raises(ClientDisconnect):
        asyncio.run(read_json(request_of([b"{", 0.01]), LIMITS))


def test_body_budget_bounds_all_large_bodies_together() -> None:
    """Large ones beyond the limit are refused, small ones never; what was held is given back."""
    room = BodyBudget(ServerLimits(max_held_body_bytes=300_000))
    with room.share() as first:
        first(250_000)
        with room.share() as small:
            small(60_000)
        with room.share() as second, pytest.raises(ApiError) as caught:
            second(70_000)
        assert (caught.value.status, caught.value.public_code) == (503, "bodies_full")
        assert room.held_bytes == 250_000
    assert room.held_bytes == 0
