"""Bodies of requests: read with bounds on bytes and time, parsed as strict JSON, checked against a model; no torch.

Every fault becomes an ApiError that names the field. Nothing here costs more than the bytes that came.
"""

import asyncio
import difflib
import json
import re
import time
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.requests import ClientDisconnect, Request

from holdfast.errors import shown
from holdfast.server.errors import UNAVAILABLE, ApiError
from holdfast.server.service import ServerLimits

MAX_INTEGER = 2**63
SMALL_BODY_BYTES = 2**16
PATIENCE = 10
"""A whole body may take as many times the limit on one pause."""
ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89abcdefABCDEF]")
MAX_NAMES = 4096
"""Of one object: each one that is not known would be a fault of its own, and faults cost far more than names."""
MEANT = {
    "max_tokens": ("max_output_tokens",),
    "max_completion_tokens": ("max_tokens", "max_output_tokens"),
    "max_output_tokens": ("max_completion_tokens", "max_tokens"),
    "max_new_tokens": ("max_completion_tokens", "max_tokens", "max_output_tokens"),
    "messages": ("input", "prompt"),
    "input": ("messages", "prompt"),
    "prompt": ("messages", "input"),
    "text": ("prompt", "response_format"),
    "response_format": ("text",),
    "stop_sequences": ("stop",),
}
"""What a field of one endpoint, or of another maker's API, is called elsewhere."""
MAX_MISSPELT = 32
"""Unknown names of an object that are compared with those of its fields: each costs more than its bytes."""
NEARLY = 0.8
MAX_ALTERNATIVES = 3
"""Of what a field may be, told in one message."""


class Body(BaseModel):
    """The base of every model of a request: unknown fields are told, and nothing is made out of another type."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class OpenBody(Body):
    """A body of an API whose clients send fields that mean nothing here: unknown fields are passed over, misspelt ones told."""

    model_config = ConfigDict(extra="ignore")


BodyModel = TypeVar("BodyModel", bound=BaseModel)
_Made = TypeVar("_Made")


async def read_model(request: Request, model_class: type[BodyModel], limits: ServerLimits) -> BodyModel:
    """What a request carries, as a model."""
    return await _read(request, limits, lambda body: parse(model_class, parse_json(body, limits)))


async def read_json(request: Request, limits: ServerLimits) -> dict[str, object]:
    """The JSON object that a request carries."""
    return await _read(request, limits, lambda body: parse_json(body, limits))


async def _read(request: Request, limits: ServerLimits, make: Callable[[bytes], _Made]) -> _Made:
    """What is made of a body; of a large one beside the event loop."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        told = f"has Content-Type {shown(media_type)}" if media_type else "has no Content-Type"
        # Also why a form on a stranger's page cannot ask for anything: browsers ask first before they send JSON.
        raise ApiError(415, f"a JSON body was expected; this one {told}; send Content-Type: application/json")
    if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise ApiError(415, "a JSON body was expected; this one is compressed; send it as it is")
    app = request.scope.get("app")
    room = BodyRoom(limits) if app is None else app.state.body_room
    with room.share() as share:
        body = await read_body(request, limits, share)
        if len(body) <= SMALL_BODY_BYTES:
            return make(body)
        # Seconds of work on a slow machine: others, and /health, are answered meanwhile.
        return await asyncio.get_running_loop().run_in_executor(None, make, body)


class BodyRoom:
    """Bytes of all bodies that are being read, bounded together: thousands of connections may each send one slowly."""

    def __init__(self, limits: ServerLimits) -> None:
        self._limit_bytes = limits.max_held_body_bytes
        self.held_bytes = 0

    @contextmanager
    def share(self) -> Iterator[Callable[[int], None]]:
        """Take bytes of one body; they are given back at its end, when it is a value."""
        own_bytes = 0

        def take(num_bytes: int) -> None:
            nonlocal own_bytes
            own_bytes += num_bytes
            self.held_bytes += num_bytes
            if own_bytes > SMALL_BODY_BYTES and self.held_bytes > self._limit_bytes:
                words = "a large body was sent; the server is reading as many as it can hold; send it again in a while"
                raise ApiError(
                    503, words, UNAVAILABLE, code="bodies_full", headers={"Retry-After": "5", "Connection": "close"}
                )

        try:
            yield take
        finally:
            self.held_bytes -= own_bytes


async def read_body(request: Request, limits: ServerLimits, take: Callable[[int], None]) -> bytes:
    """All bytes of a body; a larger one is refused before it is held, a slow one after a while."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and (len(declared) > 18 or int(declared) > limits.max_body_bytes):
        _refuse_size(limits, f"{declared[:20]} bytes")
    pieces: list[bytes] = []
    num_bytes = 0
    deadline = time.monotonic() + PATIENCE * limits.body_seconds
    while True:
        try:
            async with asyncio.timeout(min(limits.body_seconds, deadline - time.monotonic())):
                message = await request.receive()
        except TimeoutError:
            raise ApiError(
                408,
                f"a body was expected; {num_bytes} bytes came and no more for a while; send it without pauses",
                headers={"Connection": "close"},
            ) from None
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        piece = message.get("body", b"")
        if piece:
            num_bytes += len(piece)
            if num_bytes > limits.max_body_bytes:
                pieces.clear()
                _refuse_size(limits, "more")
            take(len(piece))
            pieces.append(piece)
        if not message.get("more_body", False):
            return b"".join(pieces)


def _refuse_size(limits: ServerLimits, has: str) -> NoReturn:
    raise ApiError(
        413,
        f"a body of at most {limits.max_body_bytes} bytes is read; this one has {has}; send less at once",
        code="body_too_large",
        headers={"Connection": "close"},
    )


def parse_json(body: bytes, limits: ServerLimits) -> dict[str, object]:
    """A JSON object of bytes: no NaN, no numbers beyond the usual types, no half characters, no name twice."""
    if not body:
        _refuse("it is empty")
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        _refuse(f"byte {error.start} is not UTF-8")
    if text.startswith("\ufeff"):
        _refuse("it begins with a byte order mark")
    try:
        value = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        _refuse(f"{error.msg} at line {error.lineno}, column {error.colno}")
    except RecursionError:
        _refuse_depth(limits)
    except ValueError:  # more digits than Python reads
        _refuse("an integer in it has thousands of digits")
    _check_values(value, limits, may_have_surrogates=ESCAPED_SURROGATE.search(body) is not None)
    if not isinstance(value, dict):
        _refuse(f"it is {_kind(value)}, and an object is needed")
    return value


def _refuse(has: str) -> NoReturn:
    raise ApiError(400, f"a JSON body was expected; {has}; send a JSON object", code="invalid_json")


def _refuse_depth(limits: ServerLimits) -> NoReturn:
    _refuse(f"it is nested deeper than {limits.max_json_depth} levels")


def _refuse_constant(name: str) -> NoReturn:
    _refuse(f"{name} is no JSON number")


def _finite(digits: str) -> float:
    number = float(digits)
    if number in (float("inf"), float("-inf")):
        _refuse(f"the number {shown(digits)[1:-1]} is too large")
    return number


def _distinct(pairs: list[tuple[str, object]]) -> dict[str, object]:
    value = dict(pairs)
    if len(value) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        _refuse(f"the name {shown(twice)} is there twice in one object")
    return value


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite, object_pairs_hook=_distinct)


def _check_values(value: object, limits: ServerLimits, *, may_have_surrogates: bool) -> None:
    """Depth, integers and characters, level by level; by sets of types, since a prompt may be a million token ids."""
    level: list[object] = [value]
    depth = 0
    while level:
        depth += 1
        if depth > limits.max_json_depth:
            _refuse_depth(limits)
        below: list[object] = []
        for container in level:
            if isinstance(container, dict):
                if len(container) > MAX_NAMES:
                    _refuse(f"an object in it has more than {MAX_NAMES} names")
                inside: Sequence[object] = (
                    [*container.values(), *container] if may_have_surrogates else [*container.values()]
                )
            elif isinstance(container, list):
                inside = container
            else:
                inside = [container]
            kinds = set(map(type, inside))
            if int in kinds:
                _check_integers(number for number in inside if type(number) is int)
            if may_have_surrogates and str in kinds:
                _check_characters(text for text in inside if isinstance(text, str))
            if isinstance(container, dict | list) and (dict in kinds or list in kinds):
                below += [part for part in inside if isinstance(part, dict | list)]
        level = below


def _check_integers(numbers: Iterable[int]) -> None:
    if max(map(abs, numbers)) >= MAX_INTEGER:
        _refuse("an integer in it does not fit 64 bits")


def _check_characters(texts: Iterable[str]) -> None:
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            _refuse(f"\\u{ord(text[error.start]):04x} in it is half a character, without its other half")


def _kind(value: object) -> str:
    names = {
        dict: "an object",
        list: "an array",
        str: "a string",
        bool: "a boolean",
        int: "a number",
        float: "a number",
    }
    return names.get(type(value), "null")


def parse(model_class: type[BodyModel], value: object) -> BodyModel:
    """The model of a value; the first fault is told with the path of its field."""
    if isinstance(value, dict):
        unknown = (
            misspelt(model_class, value) if issubclass(model_class, OpenBody) else _first_unknown(model_class, value)
        )
        if unknown is not None:
            raise _unknown(model_class, unknown, _written([unknown]))
    try:
        return model_class.model_validate(value)
    except ValidationError as error:
        raise _told(model_class, value, error) from None


def _first_unknown(model_class: type[BaseModel], value: Mapping[str, object]) -> str | None:
    names = _names(model_class, False)
    return next((name for name in value if name not in names), None)


def misspelt(model_class: type[BaseModel], value: Mapping[str, object]) -> str | None:
    """The first unknown name that is nearly the name of a field."""
    names = _names(model_class, False)
    unknown = [name for name in value if name not in names][:MAX_MISSPELT]
    return next((name for name in unknown if difflib.get_close_matches(name, names, n=1, cutoff=NEARLY)), None)


def _told(model_class: type[BaseModel], value: object, error: ValidationError) -> ApiError:
    """One fault of one field: where a field may be several things, the one that came nearest; else all of them."""
    faults = [
        (_true_path(value, fault["loc"], is_missing=fault["type"] == "missing"), fault)
        for fault in error.errors(include_url=False, include_input=False)
    ]
    field = faults[0][0][:1]
    of_field = [(path, fault) for path, fault in faults if path[:1] == field]
    deepest = max(len(path) for path, _ in of_field)
    path, fault = next((path, fault) for path, fault in of_field if len(path) == deepest)
    if fault["type"].startswith("union_tag"):
        path = (*path, fault.get("ctx", {}).get("discriminator", "type").strip("'"))
    param = _written(path) or None
    if fault["type"] == "extra_forbidden":
        return _unknown(model_class, str(path[-1]), param, is_below=len(path) > 1)
    if fault["type"] == "union_tag_invalid":
        context = fault.get("ctx", {})
        words = f"{param} is {shown(context.get('tag'), 64)}; {context.get('expected_tags')} work; change it"
        return ApiError(400, words, param=param, code="invalid_value")
    told = dict.fromkeys(_words(fault["msg"]) for at, fault in of_field if at == path)
    if fault["type"] in ("missing", "union_tag_not_found"):
        return ApiError(400, f"{param} is needed; it was not given; add it", param=param, code="missing_field")
    has = _kind(_at(value, path))
    expected = ", or ".join(list(told)[:MAX_ALTERNATIVES])
    return ApiError(
        400, f"{param or 'the body'} was given as {has}; {expected}; change it", param=param, code="invalid_value"
    )


def _unknown(model_class: type[BaseModel], name: str, param: str | None, *, is_below: bool = False) -> ApiError:
    """A field that there is not, with the one that was meant: what another endpoint calls the same, or the nearest name."""
    names = _names(model_class, is_below)
    near = [other for other in MEANT.get(name, ()) if other in names] or difflib.get_close_matches(name, names, n=1)
    meant = f"did you mean {near[0]}?" if near else "leave it out"
    return ApiError(400, f"{param} was given; there is no such field; {meant}", param=param, code="unknown_field")


def _words(message: str) -> str:
    """pydantic's sentence, with a small letter and without what our own validators repeat."""
    text = message.removeprefix("Value error, ").removeprefix("Assertion failed, ")
    return text[:1].lower() + text[1:] if text[1:2].islower() else text


def _true_path(value: object, location: Sequence[int | str], *, is_missing: bool) -> tuple[int | str, ...]:
    """The parts of a location that are in the value, and the last where it is missing: others name alternatives of a type."""
    path: list[int | str] = []
    for index, part in enumerate(location):
        if _is_inside(value, part):
            value = value[part]  # type: ignore[index]
        elif index < len(location) - 1 or not is_missing:
            continue
        path.append(part)
    return tuple(path)


def _is_inside(value: object, part: int | str) -> bool:
    if isinstance(value, dict):
        return part in value
    return isinstance(value, list) and isinstance(part, int) and part < len(value)


def _at(value: object, path: Sequence[int | str]) -> object:
    for part in path:
        value = value[part]  # type: ignore[index]
    return value


def _written(path: Sequence[int | str]) -> str:
    """A path as people write it: messages[0].content; a stranger's name is shown as a short one."""
    written = ""
    for part in path:
        name = part if isinstance(part, str) and part.isidentifier() and len(part) <= 64 else shown(part, 64)
        written += f"[{part}]" if isinstance(part, int) else f".{name}" if written else str(name)
    return written


@cache
def _names(model_class: type[BaseModel], below: bool) -> tuple[str, ...]:
    """Names of a model's fields, or those of the models inside it."""
    if not below:
        return tuple(field.alias or name for name, field in model_class.model_fields.items())
    seen: list[type[BaseModel]] = []
    waiting = list(_models_in(model_class))
    while waiting:
        inner = waiting.pop()
        if inner not in seen:
            seen.append(inner)
            waiting += _models_in(inner)
    return tuple(sorted({name for inner in seen for name in _names(inner, False)}))


def _models_in(model_class: type[BaseModel]) -> Iterable[type[BaseModel]]:
    for field in model_class.model_fields.values():
        yield from _models_of(field.annotation)


def _models_of(annotation: object) -> Iterable[type[BaseModel]]:
    if (
        isinstance(annotation, type)
        and not isinstance(annotation, types.GenericAlias)
        and issubclass(annotation, BaseModel)
    ):
        yield annotation
    for part in typing.get_args(annotation):
        yield from _models_of(part)
