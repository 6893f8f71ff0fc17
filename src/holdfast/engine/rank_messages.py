"""Messages between rank 0 and the other ranks: the handshake of a start, then a frame a step; no torch.

    rank 0 -> rank   RankStart     once: the settings of the engine, and which rank this is
                     RankPlanned   pages, context, layers of each stage, and the digest that this rank's own plan must have
                     RankConnect   where ranks meet, once all have loaded
                     RankFrame     results of the steps that were collected since the last frame, and the next step
                     RankLookRequest, Shutdown
    rank -> rank 0   RankReported  what this rank has: free memory, versions, a digest of the model's headers
                     RankLoaded    weights are in place
                     RankReady     everything stands: what it planned and holds
                     RankLook      counters of its allocator, asked for between two steps
                     Refused, Died, Heartbeat

Each direction is numbered from 1 without a gap; frames have numbers of their own, so that the bytes of one frame serve all
ranks. What is cut short, altered, repeated or foreign is refused with a sentence (`MessageError`).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from operator import itemgetter
from typing import Any

from holdfast.config import EngineConfig
from holdfast.engine.messages import Died, Heartbeat, Message, Refused, Shutdown, decode_message, encode_message
from holdfast.errors import HoldfastError, MessageError
from holdfast.memory.report import RankMemory
from holdfast.request.sequence import NO_TOKEN, SequenceResult, StepResult
from holdfast.request.step import MAX_TOKEN_ID, Admitted, Step, read_step, step_numbers, write_admitted
from holdfast.request.wire import Reader, Writer, body_length, open_frame, pack_lists, refuse, seal


@dataclass(frozen=True, slots=True)
class RankStart:
    """The first message: what to open, and which rank this is."""

    config: EngineConfig
    rank: int
    owns_parent: bool = False
    """Rank 0 is a process of ours, which other ranks may end where it is silent; not a caller's own."""


@dataclass(frozen=True, slots=True)
class RankReported:
    """What a rank has, as numbers and texts by name; planning/ranks.py says which."""

    told: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RankPlanned:
    """What all ranks are to have, by name; planning/ranks.py says which."""

    told: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RankLoaded:
    """Weights are in place."""

    row_sizes: tuple[int, ...] = ()
    """Numbers of rows that its products round alike in; none where any number will do."""


@dataclass(frozen=True, slots=True)
class RankConnect:
    """All have loaded: meet there."""

    address: str
    secret: str = ""
    """By which ranks know each other there."""
    row_sizes: tuple[int, ...] = ()
    """Those that are left on every rank."""


@dataclass(frozen=True, slots=True)
class RankReady:
    """Everything stands."""

    memory: RankMemory


@dataclass(frozen=True, slots=True)
class RankFrame:
    """What a rank has to know to run one more step."""

    results: tuple[tuple[tuple[int, ...], ...], ...]
    """Of each step that was collected since the last frame: the tokens of each of its items."""
    step: Step


@dataclass(frozen=True, slots=True)
class RankLookRequest:
    """How a rank is, as soon as it can tell."""


@dataclass(frozen=True, slots=True)
class RankLook:
    """Numbers by name."""

    told: dict[str, int] = field(default_factory=dict)


RankMessage = (
    RankStart
    | RankReported
    | RankPlanned
    | RankLoaded
    | RankConnect
    | RankReady
    | RankFrame
    | RankLookRequest
    | RankLook
    | Message
)
_FRAME_KIND = 51
_KINDS: dict[type, int] = {
    RankStart: 48,
    RankPlanned: 49,
    RankConnect: 50,
    RankFrame: _FRAME_KIND,
    RankReported: 56,
    RankLoaded: 57,
    RankReady: 58,
    RankLookRequest: 52,
    RankLook: 59,
}
_OTHERS = (Shutdown, Refused, Died, Heartbeat)
_token_ids: Callable[[SequenceResult], tuple[int, ...]] = itemgetter(SequenceResult._fields.index("token_ids"))


def encode_frame(results: Sequence[StepResult], step: Step, number: int) -> bytes:
    """A RankFrame as bytes, which are the same for every rank."""
    numbers: list[int] = []
    for result in results:
        try:
            # One token each, as in nearly every step: then nobody is told how many each has.
            flat = [token_id for (token_id,) in map(_token_ids, result.results)]
            numbers += (2 * len(flat) + 1, *flat)
        except ValueError:
            tokens = list(map(_token_ids, result.results))
            numbers += (2 * len(tokens), *map(len, tokens), *chain.from_iterable(tokens))
    body = pack_lists(number, numbers, step.number, step_numbers(step))
    if step.admitted:
        writer = Writer()
        write_admitted(writer, step)
        body += writer.body()
    return seal(_FRAME_KIND, body)


def for_followers(step: Step) -> Step:
    """The step as ranks that choose nothing need it: of tokens that are allowed one stands for all, which may be a million for
    each of its sequences; that there are some decides which exchanges a choice takes."""
    if not any(len(admitted.params.allowed_token_ids or ()) > 1 for admitted in step.admitted):
        return step
    return replace(step, admitted=tuple(map(_for_follower, step.admitted)))


def _for_follower(admitted: Admitted) -> Admitted:
    allowed = admitted.params.allowed_token_ids
    if allowed is None:
        return admitted
    return replace(admitted, params=replace(admitted.params, allowed_token_ids=allowed[:1]))


def encode_rank_message(message: RankMessage, number: int) -> bytes:
    """Any message but a frame as one frame of the channel."""
    kind = _KINDS.get(type(message))
    if kind is None:
        return encode_message(message, number)  # type: ignore[arg-type]
    assert kind != _FRAME_KIND, "frames are made once for all ranks: encode_frame"
    writer = Writer()
    writer.int(number)
    writer.text(json.dumps(_told(message), separators=(",", ":")))
    return writer.frame(kind)


def decode_rank_message(frame: bytes) -> tuple[int, RankMessage]:
    """The number of a message and the message, or MessageError."""
    kind, _ = body_length(frame)
    if kind not in _KINDS.values():
        number, message = decode_message(frame)
        if not isinstance(message, _OTHERS):
            refuse(f"it is {type(message).__name__}, which no rank sends")
        return number, message
    _, reader = open_frame(frame)
    number = reader.int(1)
    if kind == _FRAME_KIND:
        return number, _read_frame(reader)
    try:
        message = _read(kind, json.loads(reader.text()))
    except MessageError:
        raise
    except (HoldfastError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise MessageError("a message came", f"what it says is not sound ({error})", "send it again") from error
    reader.end()
    return number, message


def _told(message: RankMessage) -> Mapping[str, object]:
    match message:
        case RankStart(config, rank, owns_parent):
            settings = {one.name: getattr(config, one.name) for one in fields(config)}
            return {"config": settings, "rank": rank, "owns_parent": owns_parent}
        case RankReported(told) | RankPlanned(told) | RankLook(told):
            return told
        case RankLoaded(row_sizes):
            return {"row_sizes": row_sizes}
        case RankConnect(address, secret, row_sizes):
            return {"address": address, "secret": secret, "row_sizes": row_sizes}
        case RankReady(memory):
            return memory._asdict()
        case _:
            return {}


def _read(kind: int, told: dict[str, Any]) -> RankMessage:
    if not isinstance(told, dict):
        refuse("it holds no object where one is due")
    if kind == _KINDS[RankStart]:
        settings = told["config"]
        settings |= {name: tuple(value) for name, value in settings.items() if isinstance(value, list)}
        return RankStart(EngineConfig(**settings), _count(told["rank"]), bool(told["owns_parent"]))
    if kind == _KINDS[RankConnect]:
        return RankConnect(str(told["address"]), str(told["secret"]), _counts(told["row_sizes"]))
    if kind == _KINDS[RankReady]:
        memory = RankMemory(**told)
        for number in (memory.rank, memory.planned_bytes, memory.held_bytes, memory.measured_bytes or 0):
            _count(number)
        return RankReady(memory)
    if kind == _KINDS[RankLook]:
        return RankLook({str(name): _count(number) for name, number in told.items()})
    if kind == _KINDS[RankLoaded]:
        return RankLoaded(_counts(told["row_sizes"]))
    if kind == _KINDS[RankLookRequest]:
        return RankLookRequest()
    return RankReported(told) if kind == _KINDS[RankReported] else RankPlanned(told)


def _count(number: object) -> int:
    if type(number) is not int or number < 0:
        refuse(f"{number!r:.40} is no count")
    return number


def _counts(numbers: object) -> tuple[int, ...]:
    if not isinstance(numbers, list):
        refuse(f"{numbers!r:.40} is no list of counts")
    return tuple(map(_count, numbers))


def _read_frame(reader: Reader) -> RankFrame:
    numbers, step = reader.ints(NO_TOKEN, MAX_TOKEN_ID), read_step(reader)
    reader.end()
    results, place = [], 0
    while place < len(numbers):
        num_items, is_plain = divmod(numbers[place], 2)
        place += 1
        if is_plain:
            tokens = zip(numbers[place : place + num_items])
            place += num_items
        else:
            counts = numbers[place : place + num_items]
            place += num_items
            if min(counts, default=0) < 0:
                refuse("its results have fewer tokens than none")
            tokens = []
            for count in counts:
                tokens.append(numbers[place : place + count])
                place += count
        if place > len(numbers) or num_items < 0:
            refuse("its results end before what they announce")
        results.append(tuple(tokens))
    return RankFrame(tuple(results), step)
