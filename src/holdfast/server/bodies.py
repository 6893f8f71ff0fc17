"""Bodies of requests: read with bounds on bytes and time, parsed as strict JSON, validated by a model; no torch.

Every fault becomes an ApiError that names the field. The work is proportional to the bytes that arrived.
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
from holdfast.server.errors import ApiError
from holdfast.server.service import ServerLimits
from holdfast.server.tables import data_table

MAX_INTEGER = 2**63
SMALL_BODY_BYTES = 2**16
PATIENCE = 10
"""Time limit of a whole body, as a multiple of the limit on one pause."""
ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89abcdefABCDEF]")
MAX_NAMES = 4096
"""Maximum names per object: every unknown name adds a fault, which costs far more than a name."""
MAX_MISSPELT = 32
"""Unknown names per object that are compared with the field names: a comparison costs more than its bytes."""
NEARLY = 0.8
MAX_ALTERNATIVES = 3
"""Accepted types of a field that one message lists."""
_KINDS = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
BodyModel = TypeVar("BodyModel", bound=BaseModel)
_Made = TypeVar("_Made")


class Body(BaseModel):
    """Base of every request model: rejects unknown fields and converts no types."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class OpenBody(Body):
    """Body of an API whose clients send fields unknown here: ignores unknown fields, rejects misspelt ones."""

    model_config = ConfigDict(extra="ignore")


async def read_model(request: Request, model_class: type[BodyModel], limits: ServerLimits) -> BodyModel:
    """Read the body of a request as a model."""
    return await _read(request, limits, lambda body: parse(model_class, parse_json(body, limits)))


async def read_json(request: Request, limits: ServerLimits) -> dict[str, object]:
    """Read the body of a request as a JSON object."""
    return await _read(request, limits, lambda body: parse_json(body, limits))


async def _read(request: Request, limits: ServerLimits, make: Callable[[bytes], _Made]) -> _Made:
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        # This also blocks forms on other sites: browsers send a preflight before JSON.
        raise ApiError("http.content_type", value=media_type)
    if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise ApiError("http.compressed_body")
    app = request.scope.get("app")
    budget = BodyBudget(limits) if app is None else app.state.body_budget
    with budget.share() as share:
        body = await read_body(request, limits, share)
        if len(body) <= SMALL_BODY_BYTES:
            return make(body)
        # In a thread: parsing may take seconds, and the event loop must answer /health.
        return await asyncio.get_running_loop().run_in_executor(None, make, body)


class BodyBudget:
    """Bounds the total bytes of bodies in flight, since thousands of clients may send slowly."""

    def __init__(self, limits: ServerLimits) -> None:
        self._limit_bytes = limits.max_held_body_bytes
        self.held_bytes = 0

    @contextmanager
    def share(self) -> Iterator[Callable[[int], None]]:
        """Yield a function that reserves bytes for one body; release them after parsing."""
        own_bytes = 0

        def take(num_bytes: int) -> None:
            nonlocal own_bytes
            own_bytes += num_bytes
            self.held_bytes += num_bytes
            if own_bytes > SMALL_BODY_BYTES and self.held_bytes > self._limit_bytes:
                raise ApiError("http.bodies_full", headers={"Retry-After": "5", "Connection": "close"})

        try:
            yield take
        finally:
            self.held_bytes -= own_bytes


async def read_body(request: Request, limits: ServerLimits, take: Callable[[int], None]) -> bytes:
    """Read a body. Refuse one that is too large before buffering it, and one that is too slow."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and (len(declared) > 18 or int(declared) > limits.max_body_bytes):
        _refuse_size(limits, declared[:20])
    pieces: list[bytes] = []
    num_bytes = 0
    deadline = time.monotonic() + PATIENCE * limits.body_seconds
    while True:
        try:
            async with asyncio.timeout(min(limits.body_seconds, deadline - time.monotonic())):
                message = await request.receive()
        except TimeoutError:
            raise ApiError("http.body_timeout", num_bytes=num_bytes, headers={"Connection": "close"}) from None
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
    raise ApiError("http.body_too_large", maximum=limits.max_body_bytes, has=has, headers={"Connection": "close"})


def parse_json(body: bytes, limits: ServerLimits) -> dict[str, object]:
    """Parse a JSON object: no NaN, no numbers beyond 64 bits, no lone surrogates, no duplicate names."""
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
        _refuse("it has an integer of thousands of digits")
    _check_values(value, limits, may_have_surrogates=ESCAPED_SURROGATE.search(body) is not None)
    if not isinstance(value, dict):
        _refuse(f"it is {_kind(value)}")
    return value


def _refuse(reason: str) -> NoReturn:
    raise ApiError("http.invalid_json", reason=reason)


def _refuse_depth(limits: ServerLimits) -> NoReturn:
    _refuse(f"it is nested deeper than {limits.max_json_depth} levels")


def _refuse_constant(name: str) -> NoReturn:
    _refuse(f"{name} is not a JSON number")


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
        _refuse(f"an object has the name {shown(twice)} twice")
    return value


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite, object_pairs_hook=_distinct)


def _check_values(value: object, limits: ServerLimits, *, may_have_surrogates: bool) -> None:
    """Check depth, integers and characters level by level. Type sets make a prompt of a million token ids fast."""
    level: list[object] = [value]
    depth = 0
    while level:
        depth += 1
        if depth > limits.max_json_depth:
            _refuse_depth(limits)
        below: list[object] = []
        for container in level:
            inside: Sequence[object] = container if isinstance(container, list) else [container]
            if isinstance(container, dict):
                if len(container) > MAX_NAMES:
                    _refuse(f"an object in it has more than {MAX_NAMES} names")
                inside = [*container.values(), *(container if may_have_surrogates else ())]
            kinds = set(map(type, inside))
            if int in kinds and max(abs(number) for number in inside if type(number) is int) >= MAX_INTEGER:
                _refuse("an integer in it does not fit 64 bits")
            if may_have_surrogates and str in kinds:
                _check_characters(text for text in inside if isinstance(text, str))
            if isinstance(container, dict | list) and (dict in kinds or list in kinds):
                below += [part for part in inside if isinstance(part, dict | list)]
        level = below


def _check_characters(texts: Iterable[str]) -> None:
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            _refuse(f"\\u{ord(text[error.start]):04x} in it is half of a surrogate pair")


def _kind(value: object) -> str:
    return _KINDS.get(type(value), "null")


def parse(model_class: type[BodyModel], value: object) -> BodyModel:
    """Validate a value as a model; the ApiError names the path of the first faulty field."""
    if isinstance(value, dict):
        names = _names(model_class, False)
        is_open = issubclass(model_class, OpenBody)
        unknown = misspelt(model_class, value) if is_open else next((n for n in value if n not in names), None)
        if unknown is not None:
            raise _unknown(model_class, unknown, _written([unknown]))
    try:
        return model_class.model_validate(value)
    except ValidationError as error:
        raise _fault_of(model_class, value, error) from None


def misspelt(model_class: type[BaseModel], value: Mapping[str, object]) -> str | None:
    """Return the first unknown name that is close to the name of a field."""
    names = _names(model_class, False)
    unknown = [name for name in value if name not in names][:MAX_MISSPELT]
    return next((name for name in unknown if difflib.get_close_matches(name, names, n=1, cutoff=NEARLY)), None)


def _fault_of(model_class: type[BaseModel], value: object, error: ValidationError) -> ApiError:
    """Convert the first fault to an ApiError. For a union, report the closest alternative."""
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
        tag, tags = shown(context.get("tag"), 64), context.get("expected_tags")
        return ApiError("http.invalid_tag", param=param, name=param, tag=tag, accepted=tags)
    if fault["type"] in ("missing", "union_tag_not_found"):
        return ApiError("http.missing_field", param=param, name=param)
    reasons = list(dict.fromkeys(_sentence(fault["msg"]) for at, fault in of_field if at == path))
    expected = ", or ".join(reasons[:MAX_ALTERNATIVES])
    return ApiError(
        "http.invalid_value", param=param, name=param or "the body", has=_kind(_at(value, path)), expected=expected
    )


def _unknown(model_class: type[BaseModel], name: str, param: str | None, *, is_below: bool = False) -> ApiError:
    """Report an unknown field and suggest another endpoint's name for it, or the nearest name."""
    names = _names(model_class, is_below)
    near = [other for other in data_table("other_names.toml").get(name, ()) if other in names]
    near = near or difflib.get_close_matches(name, names, n=1)
    hint = f"Did you mean {near[0]}?" if near else "Remove it."
    return ApiError("http.unknown_field", param=param, name=param).hinting(hint)


def _sentence(message: str) -> str:
    """Lower the first letter of pydantic's message and drop its prefix."""
    text = message.removeprefix("Value error, ").removeprefix("Assertion failed, ")
    return text[:1].lower() + text[1:] if text[1:2].islower() else text


def _true_path(value: object, location: Sequence[int | str], *, is_missing: bool) -> tuple[int | str, ...]:
    """Drop the parts of a location that name union alternatives; keep a missing last part."""
    path: list[int | str] = []
    for index, part in enumerate(location):
        is_index = isinstance(value, list) and isinstance(part, int) and part < len(value)
        if is_index or (isinstance(value, dict) and part in value):
            value = value[part]  # type: ignore[index]
        elif index < len(location) - 1 or not is_missing:
            continue
        path.append(part)
    return tuple(path)


def _at(value: object, path: Sequence[int | str]) -> object:
    for part in path:
        value = value[part]  # type: ignore[index]
    return value


def _written(path: Sequence[int | str]) -> str:
    """Format a path as messages[0].content; shorten names that the client chose."""
    written = ""
    for part in path:
        name = part if isinstance(part, str) and part.isidentifier() and len(part) <= 64 else shown(part, 64)
        written += f"[{part}]" if isinstance(part, int) else f".{name}" if written else str(name)
    return written


@cache
def _names(model_class: type[BaseModel], below: bool) -> tuple[str, ...]:
    """List the field names of a model, or those of the models inside it."""
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
    is_generic = isinstance(annotation, types.GenericAlias)
    if isinstance(annotation, type) and not is_generic and issubclass(annotation, BaseModel):
        yield annotation
    for part in typing.get_args(annotation):
        yield from _models_of(part)
