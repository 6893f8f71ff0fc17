"""Messages between rank 0 and the other ranks: the handshake of a start, then one frame a step; no torch.

    rank 0 -> rank   RankStart     once: the settings of the engine, and the number of this rank
                     RankPlanned   pages, context, layers of each stage, and the digest that this rank's own plan must
                     have RankConnect   the address of the rendezvous, once all have loaded RankFrame     results of the
                     steps collected since the last frame, and the next step RankLookRequest, Shutdown
    rank -> rank 0   RankReported  what this rank has: free memory, versions, a digest of the model's headers
                     RankLoaded    weights are in place
                     RankReady     everything is built: planned and held memory
                     RankLook      counters of its allocator, requested between two steps
                     Refused, Died, Heartbeat

Each direction is numbered from 1 without a gap. Frames have their own numbers, so that one encoded frame serves all
ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from holdfast.engine.messages import Config, Died, Heartbeat, Refused, Shutdown, check_counts
from holdfast.memory.report import RankMemory
from holdfast.request.sequence import StepResult
from holdfast.request.step import Admitted, Step, check_step
from holdfast.request.wire import Codec, Count, TokenIdOrNone


@dataclass(frozen=True, slots=True)
class RankStart:
    """First message to a rank."""

    config: Config
    rank: Count
    owns_parent: bool = False
    """Rank 0 is a process of this engine, so other ranks may kill it if it hangs; a caller's own process is not."""


@dataclass(frozen=True, slots=True)
class RankReported:
    """A rank's RankReport by name; planning/ranks.py defines the names."""

    report: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RankPlanned:
    """The Agreement of all ranks by name; planning/ranks.py defines the names."""

    agreement: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RankLoaded:
    """Weights are in place."""

    row_sizes: tuple[Count, ...] = ()
    """Row counts for which its products round alike; empty if any will do."""


@dataclass(frozen=True, slots=True)
class RankConnect:
    """All ranks have loaded: connect to this address."""

    address: str
    secret: str = ""
    """Ranks authenticate with it."""
    row_sizes: tuple[Count, ...] = ()
    """Row counts that every rank allows."""


@dataclass(frozen=True, slots=True)
class RankReady:
    """Everything is built."""

    memory: RankMemory


@dataclass(frozen=True, slots=True)
class RankFrame:
    """Results and a step, sent to every rank."""

    results: tuple[tuple[tuple[TokenIdOrNone, ...], ...], ...]
    """Tokens of each item of each step collected since the last frame."""
    step: Step


@dataclass(frozen=True, slots=True)
class RankLookRequest:
    """Send a RankLook."""


@dataclass(frozen=True, slots=True)
class RankLook:
    """Counters by name."""

    counters: dict[str, Count] = field(default_factory=dict)


Handshake = RankStart | RankReported | RankPlanned | RankLoaded | RankConnect | RankReady
RankMessage = Handshake | RankFrame | RankLookRequest | RankLook | Shutdown | Refused | Died | Heartbeat
_SHARED = {21: Shutdown, 36: Refused, 37: Died, 38: Heartbeat}
_SENT = RankStart, RankPlanned, RankConnect, RankFrame, RankLookRequest
_RECEIVED = RankReported, RankLoaded, RankReady, RankLook


def _check(message: RankMessage) -> None:
    """Raise MessageError for fields that contradict each other."""
    if isinstance(message, RankFrame):
        check_step(message.step)
    elif isinstance(message, RankReady):
        memory = message.memory
        check_counts(rank=memory.rank, planned_bytes=memory.planned_bytes, held_bytes=memory.held_bytes)
        check_counts(measured_bytes=memory.measured_bytes or 0)


_CODEC = Codec(_SHARED | dict(enumerate(_SENT, 48)) | dict(enumerate(_RECEIVED, 56)), _check)
encode_rank_message = _CODEC.encode
"""Return a message as one frame of the channel, given its number."""
decode_rank_message = _CODEC.decode
"""Return the number and the message of a frame, or raise MessageError."""


def encode_frame(results: Sequence[StepResult], step: Step, number: int) -> bytes:
    """Return a RankFrame as bytes, which are the same for every rank."""
    tokens = tuple(tuple([item.token_ids for item in result.results]) for result in results)
    return _CODEC.encode(RankFrame(tokens, step), number)


def for_followers(step: Step) -> Step:
    """Return the step for ranks that do not sample: one allowed token per sequence stands for up to a million.

    Having any decides which collectives sampling uses.
    """
    if not any(len(one.params.allowed_token_ids or ()) > 1 for one in step.admitted):
        return step
    return step._replace(admitted=tuple(map(_for_follower, step.admitted)))


def _for_follower(admitted: Admitted) -> Admitted:
    allowed = admitted.params.allowed_token_ids
    if allowed is None:
        return admitted
    return admitted._replace(params=replace(admitted.params, allowed_token_ids=allowed[:1]))
