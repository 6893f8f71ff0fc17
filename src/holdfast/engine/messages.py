"""Messages between front and core: values, and the frames that carry them from one process to the other; no torch.

    front -> core   Start        once: the settings of the engine
                    Submit       the sequences of one request, all or none
                    Abort, ResetPrefixCache, StatsRequest, MapRequest, Shutdown
    core -> front   LoadingProgress, then Ready: what admission needs, and the memory of each owner
                    CoreOutputs  the outputs of one step, with the core's stats
                    CoreStats    the stats alone: requested, or because the core is idle
                    CoreMap      the pages of every sequence, requested
                    Refused      a request that cannot run, or a model that cannot be opened
                    Heartbeat    the process lives, and how long its step has run
                    Died         the core stopped, and why

In one process the same values are passed by call, and nothing is encoded.

Each side numbers its messages from 1 without a gap. A frame that is truncated, corrupt, repeated, out of order or of
another version raises MessageError before any state changes.
"""

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from holdfast.config import EngineConfig, Limits
from holdfast.engine.admission import describe
from holdfast.engine.memory_map import CoreMap
from holdfast.errors import HoldfastError, MessageError
from holdfast.memory.report import MemoryReport
from holdfast.observability.preparing import Preparing
from holdfast.request.outputs import FinishReason
from holdfast.request.sequence import TokenLogprobs
from holdfast.request.step import Params
from holdfast.request.wire import AnyError, Codec, Count, Numbering, Pooled, Positive, TokenId, TokenIds, made_by

__all__ = ["Numbering", "decode_message", "encode_message"]
FLOAT32_BYTES = 4
if TYPE_CHECKING:
    Config: TypeAlias = EngineConfig
else:
    Config = made_by(lambda plain: _config(plain))


class CoreRequest(NamedTuple):
    """One sequence, as the core sees it: token ids, no text."""

    sequence_id: Count
    """Larger than that of any sequence before it."""
    token_ids: TokenIds
    params: Params
    seed: Count
    max_tokens: Positive
    cache_salt: bytes = b""
    use_prefix_cache: bool = True
    bad_word_ids: tuple[TokenIds, ...] = ()
    is_pooled: bool = False
    """Return the final hidden state of the prompt's last row instead of a token."""


class Ending(NamedTuple):
    """Why a completion ended."""

    finish_reason: FinishReason
    stop_reason: int | str | None = None
    error: str | None = None


class SequenceOutput(NamedTuple):
    """The output of one step for one sequence. A tuple, because every token makes one."""

    sequence_id: Count
    token_ids: tuple[TokenId, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each of these tokens, if requested."""
    ending: Ending | None = None
    """Set if the last of these tokens ended the sequence."""
    num_cached_tokens: Count = 0
    num_preemptions: Count = 0
    queue_seconds: float = 0.0
    """Time from its submission to its first step."""
    prompt_start: Count = 0
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Logprobs of prompt positions prompt_start + 1, prompt_start + 2, ..., if requested."""
    pooled: Pooled = b""
    """Final hidden state of a pooled sequence that ends, as little-endian float32."""


@dataclass(frozen=True, slots=True)
class CoreStats:
    """State of a core and its counters since the start. `EngineStats` adds those of the front."""

    num_running: Count = 0
    num_waiting: Count = 0
    """Sequences; a request with n completions is n of them."""
    num_prefix_query_tokens: Count = 0
    num_prefix_hit_tokens: Count = 0
    num_prompt_tokens: Count = 0
    """Prompt tokens computed, including those recomputed after a preemption."""
    num_preemptions: Count = 0
    num_steps: Count = 0
    num_submitted: Count = 0
    """Sequences that it accepted or refused."""
    num_proposed_tokens: Count = 0
    """Draft tokens that were verified ..."""
    num_accepted_tokens: Count = 0
    """... and those of them that became part of an answer."""
    kv_usage: float = 0.0
    """Share of the KV pages that sequences hold."""
    num_snapshot_hits: Count = 0
    """Sequences that started with the state of a snapshot."""


@dataclass(frozen=True, slots=True)
class CoreOutputs:
    """The outputs of one step."""

    outputs: tuple[SequenceOutput, ...] = ()
    stats: CoreStats = CoreStats()


@dataclass(frozen=True, slots=True)
class CoreFacts:
    """The facts about a core that its front needs."""

    limits: Limits
    longest: Count
    """Tokens of the longest sequence that it can hold."""
    vocab_size: Count
    eos_token_ids: tuple[TokenId, ...]
    max_queue: Count


@dataclass(frozen=True, slots=True)
class Start:
    """First message to a core process: the settings of its engine."""

    config: Config


@dataclass(frozen=True, slots=True)
class Submit:
    """The sequences of one request."""

    requests: tuple[CoreRequest, ...]


@dataclass(frozen=True, slots=True)
class Abort:
    """End these sequences."""

    sequence_ids: tuple[Count, ...]


@dataclass(frozen=True, slots=True)
class ResetPrefixCache:
    """Forget every cached prefix."""


@dataclass(frozen=True, slots=True)
class StatsRequest:
    """Send CoreStats."""


@dataclass(frozen=True, slots=True)
class MapRequest:
    """Send a CoreMap."""


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Release the model and end."""


@dataclass(frozen=True, slots=True)
class LoadingProgress:
    """Bytes of weights read so far, or another preparation."""

    num_done: Count
    num_total: Count
    preparing: Preparing | None = None


@dataclass(frozen=True, slots=True)
class Ready:
    """The model is open."""

    facts: CoreFacts
    memory: MemoryReport | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    """An error about these sequences, or about the model if there are none."""

    sequence_ids: tuple[Count, ...]
    error: AnyError


@dataclass(frozen=True, slots=True)
class Died:
    """The core stopped for this reason."""

    cause: str


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The process lives."""

    step_seconds: float
    """Age of its step; 0 if none runs."""


Command = Start | Submit | Abort | ResetPrefixCache | StatsRequest | MapRequest | Shutdown
Message = Command | LoadingProgress | Ready | CoreOutputs | CoreStats | CoreMap | Refused | Died | Heartbeat
_COMMANDS = Start, Submit, Abort, ResetPrefixCache, StatsRequest, Shutdown, MapRequest
_ANSWERS = LoadingProgress, Ready, CoreOutputs, CoreStats, Refused, Died, Heartbeat, CoreMap


def _check(message: Message) -> None:
    """Raise MessageError for fields that contradict each other."""
    match message:
        case Submit(requests=()):
            raise MessageError("wire.malformed", reason="a request without sequences")
        case CoreOutputs(outputs) if any(len(output.pooled) % FLOAT32_BYTES for output in outputs):
            raise MessageError("wire.malformed", reason="a hidden state is not float32")
        case CoreMap() if any(len(one.pages) != len(message.groups) for one in message.sequences):
            raise MessageError("wire.malformed", reason="a sequence has pages of other cache groups")
        case Ready(CoreFacts(limits)):
            check_counts(**{field.name: getattr(limits, field.name) for field in fields(limits)})


def check_counts(**counts: int) -> None:
    """Raise MessageError for a negative count of a type that is declared elsewhere."""
    wrong = [name for name, count in counts.items() if count < 0]
    if wrong:
        raise MessageError("wire.malformed", reason=f"{wrong[0]} is negative")


def last_message(error: Exception, *, is_started: bool) -> Refused | Died:
    """Return a process's last message: Refused for an error of a start that is not a bug, else Died."""
    return Died(describe(error)) if is_started or not isinstance(error, HoldfastError) else Refused((), error)


def _config(plain: dict[str, Any]) -> EngineConfig:
    settings: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in plain.items()
    }
    return EngineConfig(**settings)


_CODEC = Codec(dict(enumerate(_COMMANDS, 16)) | dict(enumerate(_ANSWERS, 32)), _check)
encode_message = _CODEC.encode
"""Return a message as one frame, given its number."""
decode_message = _CODEC.decode
"""Return the number and the message of a frame, or raise MessageError."""
