"""Messages between front and core: values, and the frames that carry them from one process to the other; no torch.

    front -> core   Start        once: the settings of the engine
                    Submit       the sequences of one request, all or none
                    Abort, ResetPrefixCache, StatsRequest, MapRequest, Shutdown
    core -> front   LoadingProgress, then Ready: what admission has to know, and who holds how many bytes
                    CoreOutputs  what one step brought, with a look at the core
                    CoreStats    the same look, asked for, or because the core has nothing to do
                    CoreMap      who holds which pages, asked for
                    Refused      a request that cannot run, or a model that cannot be opened
                    Heartbeat    the process lives, and how long its step has run
                    Died         the core stopped, and why

In one process the same values are passed by call, and nothing is encoded.

Each side numbers what it sends from 1 without a gap. A frame that is cut short, altered, repeated, out of order or of
another version is refused with a sentence before anything has changed (`MessageError`).
"""

import json
import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from typing import Any, NamedTuple

from holdfast import errors
from holdfast.config import EngineConfig, Limits
from holdfast.engine.memory_map import CoreMap, GroupPages, SequencePages
from holdfast.errors import HoldfastError, MemoryPlanError, MessageError, PlanChange, PlanRow, PlanTable
from holdfast.memory.ledger import Entry
from holdfast.memory.on_disk import DiskAccount, OnDisk, StoredType
from holdfast.memory.report import GroupAccount, MemoryReport, MemoryRow, RankMemory
from holdfast.observability.preparing import Preparing
from holdfast.request.outputs import FinishReason
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.sequence import TokenLogprobs
from holdfast.request.step import MAX_TOKEN_ID, read_params, read_words, write_params, write_words
from holdfast.request.wire import Reader, Writer, open_frame, refuse

_WORD = 2**63
FLOAT32_BYTES = 4
MAX_POOLED_BYTES = FLOAT32_BYTES * 2**20
"""Of one hidden state: far more than any model has."""
_REASONS: tuple[FinishReason, ...] = ("stop", "length", "abort", "error")


@dataclass(frozen=True, slots=True)
class CoreRequest:
    """One sequence, as the core sees it: token ids, no text."""

    sequence_id: int
    """Larger than that of any sequence before it."""
    token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    max_tokens: int
    cache_salt: bytes = b""
    use_prefix_cache: bool = True
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    is_pooled: bool = False
    """The final hidden state of its prompt's last row comes back in place of a token."""


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a completion is over."""

    finish_reason: FinishReason
    stop_reason: int | str | None = None
    error: str | None = None


class SequenceOutput(NamedTuple):
    """What one step brought to one sequence. Made for every token, and therefore a tuple."""

    sequence_id: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Of each of these, where the request asked."""
    ending: Ending | None = None
    """Where the last of them was the last of all."""
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    queue_seconds: float = 0.0
    """From its submission to the first step that it was in."""
    prompt_start: int = 0
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Of prompt positions prompt_start + 1, prompt_start + 2, ..., where the request asked."""
    pooled: bytes = b""
    """Of a pooled sequence that ends: its final hidden state as float32, little-endian."""


@dataclass(frozen=True, slots=True)
class CoreStats:
    """One look at a core. What became of its tokens only the front knows."""

    num_running: int = 0
    num_waiting: int = 0
    num_prefix_query_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    num_prompt_tokens: int = 0
    num_preemptions: int = 0
    num_steps: int = 0
    num_submitted: int = 0
    """Sequences that it has taken or refused."""
    num_proposed_tokens: int = 0
    num_accepted_tokens: int = 0
    kv_usage: float = 0.0


@dataclass(frozen=True, slots=True)
class CoreOutputs:
    """What one step brought."""

    outputs: tuple[SequenceOutput, ...] = ()
    stats: CoreStats = CoreStats()


@dataclass(frozen=True, slots=True)
class CoreFacts:
    """What a front has to know of its core."""

    limits: Limits
    longest: int
    """Tokens of the longest sequence that it can hold."""
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_queue: int


@dataclass(frozen=True, slots=True)
class Start:
    """The first message: what a core process is to open."""

    config: EngineConfig


@dataclass(frozen=True, slots=True)
class Submit:
    """The sequences of one request."""

    requests: tuple[CoreRequest, ...]


@dataclass(frozen=True, slots=True)
class Abort:
    """Sequences that nobody waits for any more."""

    sequence_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ResetPrefixCache:
    """Forget every cached prefix."""


@dataclass(frozen=True, slots=True)
class StatsRequest:
    """A look at the core, as soon as it can."""


@dataclass(frozen=True, slots=True)
class MapRequest:
    """Who holds which pages, as soon as it can."""


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Let go of the model and end."""


@dataclass(frozen=True, slots=True)
class LoadingProgress:
    """Bytes of weights that were read, or something else that is made before a model can answer."""

    num_done: int
    num_total: int
    preparing: Preparing | None = None


@dataclass(frozen=True, slots=True)
class Ready:
    """The model is open."""

    facts: CoreFacts
    memory: MemoryReport | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    """No: the sequences that will not run (none where it is the model that cannot be opened), and the error."""

    sequence_ids: tuple[int, ...]
    error: HoldfastError


@dataclass(frozen=True, slots=True)
class Died:
    """The core stopped at this."""

    cause: str


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The process lives; its step has run for so long, 0 where there is none."""

    step_seconds: float


Message = (
    Start
    | Submit
    | Abort
    | ResetPrefixCache
    | StatsRequest
    | MapRequest
    | Shutdown
    | LoadingProgress
    | Ready
    | CoreOutputs
    | CoreStats
    | CoreMap
    | Refused
    | Died
    | Heartbeat
)


def encode_message(message: Message, number: int) -> bytes:
    """A message as one frame."""
    kind, write, _ = _FORMS[type(message)]
    writer = Writer()
    writer.int(number)
    write(writer, message)
    return writer.frame(kind)


def decode_message(frame: bytes) -> tuple[int, Message]:
    """The number of a message and the same message, or MessageError."""
    kind, reader = open_frame(frame)
    read = _READERS.get(kind)
    if read is None:
        refuse(f"it is of kind {kind}, which nobody sends here")
    number = reader.int(1)
    try:
        message = read(reader)
    except MessageError:
        raise
    except (HoldfastError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise MessageError("a message came", f"what it says is not sound ({error})", "send it again") from error
    reader.end()
    return number, message


class Numbering:
    """The numbers of one direction: each message comes once, in order."""

    def __init__(self) -> None:
        self.last = 0

    def next(self) -> int:
        """That of one more message to send."""
        self.last += 1
        return self.last

    def accept(self, number: int) -> None:
        """One more has come; refuses any but the next."""
        if number != self.last + 1:
            refuse(f"it is number {number}, and number {self.last + 1} is the next")
        self.last = number


# Submit, Abort


def _write_submit(writer: Writer, message: Submit) -> None:
    writer.int(len(message.requests))
    for request in message.requests:
        writer.int(request.sequence_id)
        writer.ints(request.token_ids)
        write_params(writer, request.params)
        writer.int(request.seed - _WORD)
        writer.int(request.max_tokens)
        writer.bytes(request.cache_salt)
        writer.int(request.use_prefix_cache + 2 * request.is_pooled)
        write_words(writer, request.bad_word_ids)


def _read_submit(reader: Reader) -> Submit:
    return Submit(tuple(_read_request(reader) for _ in range(reader.int(1, MAX_TOKEN_ID))))


def _read_request(reader: Reader) -> CoreRequest:
    sequence_id, token_ids = reader.int(0), reader.ints(0, MAX_TOKEN_ID)
    if not token_ids:
        refuse(f"sequence {sequence_id} has no tokens")
    params, seed = read_params(reader), reader.int() + _WORD
    max_tokens, salt = reader.int(1, MAX_TOKEN_ID), reader.bytes()
    is_pooled, use_prefix_cache = map(bool, divmod(reader.int(0, 3), 2))
    others = use_prefix_cache, read_words(reader), is_pooled
    return CoreRequest(sequence_id, token_ids, params, seed, max_tokens, salt, *others)


def _write_abort(writer: Writer, message: Abort) -> None:
    writer.ints(message.sequence_ids)


def _read_abort(reader: Reader) -> Abort:
    return Abort(reader.ints(0))


# CoreOutputs, CoreStats, CoreMap


def _stats_counts(stats: CoreStats) -> list[int]:
    return [
        stats.num_running,
        stats.num_waiting,
        stats.num_prefix_query_tokens,
        stats.num_prefix_hit_tokens,
        stats.num_prompt_tokens,
        stats.num_preemptions,
        stats.num_steps,
        stats.num_submitted,
        stats.num_proposed_tokens,
        stats.num_accepted_tokens,
    ]


NUM_COUNTS = len(_stats_counts(CoreStats()))


def _write_stats(writer: Writer, stats: CoreStats) -> None:
    writer.ints(_stats_counts(stats))
    writer.float(stats.kv_usage)


def _read_stats(reader: Reader) -> CoreStats:
    counts = reader.ints(0)
    if len(counts) != NUM_COUNTS:
        refuse(f"it counts {len(counts)} things, and there are {NUM_COUNTS}")
    return CoreStats(*counts, kv_usage=reader.float())


def _write_map(writer: Writer, message: CoreMap) -> None:
    groups, sequences = message.groups, message.sequences
    _write_json(writer, [group.name for group in groups])
    numbers = [message.num_pages, message.num_free, message.num_waiting, message.num_steps]
    for group in groups:
        numbers += group[1:]
    writer.ints(numbers)
    # All fields of a sequence but the last two are numbers, and its pages follow them.
    writer.ints([number for sequence in sequences for number in (*sequence[:-2], *sequence.pages)])
    _write_floats(writer, [sequence.age_seconds for sequence in sequences])


def _read_map(reader: Reader) -> CoreMap:
    names = json.loads(reader.text())
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        refuse("its cache groups have no names")
    counts, numbers, ages = reader.ints(0), reader.ints(), _read_floats(reader)
    num_fields = len(SequencePages._fields) - 2 + len(names)
    if len(counts) != 4 + 3 * len(names) or len(numbers) != num_fields * len(ages):
        refuse(f"{len(counts)} and {len(numbers)} numbers are no map of {len(names)} groups, {len(ages)} sequences")
    groups = tuple(GroupPages(name, *counts[4 + 3 * place : 7 + 3 * place]) for place, name in enumerate(names))
    rows = (numbers[begin : begin + num_fields] for begin in range(0, len(numbers), num_fields))
    sequences = tuple(_sequence_pages(row, len(names), age) for row, age in zip(rows, ages, strict=True))
    num_pages, num_free, num_waiting, num_steps = counts[:4]
    return CoreMap(num_pages, num_free, groups, sequences, num_waiting, num_steps)


def _sequence_pages(row: tuple[int, ...], num_groups: int, age_seconds: float) -> SequencePages:
    num_facts = len(row) - num_groups
    sequence_id, is_running, prompt, output, computed, cached, preemptions, priority = row[:num_facts]
    pages = row[num_facts:]
    if is_running not in (0, 1) or min(sequence_id, prompt, output, computed, cached, preemptions, *pages) < 0:
        refuse(f"sequence {sequence_id} has numbers that are no counts")
    return SequencePages(
        *(sequence_id, bool(is_running), prompt, output, computed, cached, preemptions, priority, pages, age_seconds)
    )


def _write_outputs(writer: Writer, message: CoreOutputs) -> None:
    """Nearly all of it in one list, since a message comes with every token of a batch of one."""
    outputs = message.outputs
    # Few sequences of a step end or bring log-probabilities, so these are listed by the place of their sequence.
    ended = [place for place, output in enumerate(outputs) if output.ending is not None]
    measured = [place for place, output in enumerate(outputs) if output.logprobs]
    prompts = [place for place, output in enumerate(outputs) if output.prompt_logprobs]
    numbers = _stats_counts(message.stats)
    pooled = [place for place, output in enumerate(outputs) if output.pooled]
    counts = len(ended), len(measured), len(prompts), len(pooled)
    numbers += (len(outputs), *counts, *ended, *measured, *prompts, *pooled)
    for output in outputs:
        numbers += (output.sequence_id, output.num_cached_tokens, output.num_preemptions, len(output.token_ids))
        numbers += output.token_ids
    writer.ints(numbers)
    _write_floats(writer, [message.stats.kv_usage, *(output.queue_seconds for output in outputs)])
    for place in ended:
        ending = outputs[place].ending
        assert ending is not None, "only those that end are listed"
        writer.text(json.dumps([ending.finish_reason, ending.stop_reason, ending.error]))
    for place in measured:
        _write_logprobs(writer, outputs[place].logprobs)
    for place in prompts:
        writer.int(outputs[place].prompt_start)
        _write_logprobs(writer, outputs[place].prompt_logprobs)
    for place in pooled:
        writer.bytes(outputs[place].pooled)


def _read_outputs(reader: Reader) -> CoreOutputs:
    numbers, seconds = reader.ints(0), _read_floats(reader)
    begin = NUM_COUNTS + 5
    if len(numbers) < begin:
        refuse(f"{len(numbers)} numbers are too few for any outputs")
    num_outputs, *counts = numbers[NUM_COUNTS:begin]
    if len(seconds) != 1 + num_outputs:
        refuse(f"{len(seconds)} times do not belong to {num_outputs} sequences")
    places = []
    for count in counts:
        places.append(_checked_places(numbers[begin : begin + count], count, num_outputs))
        begin += count
    endings = {place: _read_ending(reader) for place in places[0]}
    logprobs = {place: _read_logprobs(reader) for place in places[1]}
    prompts = {place: (reader.int(0, MAX_TOKEN_ID), _read_logprobs(reader)) for place in places[2]}
    pooled = {place: _read_pooled(reader) for place in places[3]}
    outputs = []
    for place in range(num_outputs):
        sequence_id, num_cached, num_preemptions, num_tokens = _quadruple(numbers, begin)
        end = begin + 4 + num_tokens
        start, prompt = prompts.get(place, (0, ()))
        outputs.append(
            SequenceOutput(
                sequence_id,
                numbers[begin + 4 : end],
                logprobs.get(place, ()),
                endings.get(place),
                num_cached,
                num_preemptions,
                seconds[1 + place],
                start,
                prompt,
                pooled.get(place, b""),
            )
        )
        begin = end
    if begin != len(numbers):
        refuse(f"{len(numbers)} numbers do not describe {num_outputs} sequences")
    return CoreOutputs(tuple(outputs), CoreStats(*numbers[:NUM_COUNTS], kv_usage=seconds[0]))


def _read_pooled(reader: Reader) -> bytes:
    data = reader.bytes()
    if not data or len(data) % FLOAT32_BYTES or len(data) > MAX_POOLED_BYTES:
        refuse(f"{len(data)} bytes are no hidden state of float32")
    return data


def _quadruple(numbers: tuple[int, ...], begin: int) -> tuple[int, ...]:
    found = numbers[begin : begin + 4]
    if len(found) < 4:
        refuse(f"{len(numbers)} numbers end before what they describe")
    return found


def _checked_places(places: tuple[int, ...], count: int, num_outputs: int) -> tuple[int, ...]:
    """Some of the outputs, in order and each once."""
    is_sound = len(places) == count and (not places or places[-1] < num_outputs)
    if not is_sound or any(one >= other for one, other in pairwise(places)):
        refuse(f"it lists places {list(places)[:8]} of {num_outputs} sequences out of order")
    return places


def _read_ending(reader: Reader) -> Ending:
    reason, stop_reason, error = json.loads(reader.text())
    is_sound = reason in _REASONS and isinstance(error, str | None) and type(stop_reason) in (int, str, type(None))
    if not is_sound:
        refuse(f"a sequence ends with {errors.shown(reason)}, {errors.shown(stop_reason)}")
    return Ending(reason, stop_reason, error)


def _write_logprobs(writer: Writer, measured: tuple[TokenLogprobs, ...]) -> None:
    writer.ints([number for entry in measured for number in (entry.token_id, entry.rank, len(entry.top))])
    writer.ints([token_id for entry in measured for token_id, _ in entry.top])
    _write_floats(writer, [entry.logprob for entry in measured])
    _write_floats(writer, [logprob for entry in measured for _, logprob in entry.top])


def _read_logprobs(reader: Reader) -> tuple[TokenLogprobs, ...]:
    numbers, top_ids = reader.ints(0), reader.ints(0, MAX_TOKEN_ID)
    logprobs, top_logprobs = _read_floats(reader), _read_floats(reader)
    is_sound = len(numbers) == 3 * len(logprobs) and sum(numbers[2::3]) == len(top_ids) == len(top_logprobs)
    if not is_sound:
        refuse(f"{len(numbers)} numbers do not describe {len(logprobs)} log-probabilities and {len(top_ids)} others")
    found, begin = [], 0
    for place, logprob in enumerate(logprobs):
        token_id, rank, num_top = numbers[3 * place : 3 * place + 3]
        end = begin + num_top
        top = tuple(zip(top_ids[begin:end], top_logprobs[begin:end], strict=True))
        found.append(TokenLogprobs(token_id, logprob, rank, top))
        begin = end
    return tuple(found)


def _write_floats(writer: Writer, numbers: Sequence[float]) -> None:
    packed = array("d", numbers)
    if sys.byteorder == "big":
        packed.byteswap()
    writer.bytes(packed.tobytes())


def _read_floats(reader: Reader) -> tuple[float, ...]:
    packed = array("d")
    data = reader.bytes()
    if len(data) % packed.itemsize:
        refuse(f"{len(data)} bytes are no whole number of floats")
    packed.frombytes(data)
    if sys.byteorder == "big":
        packed.byteswap()
    return tuple(packed)


# Start, Ready, errors: told once, as JSON


def _write_json(writer: Writer, value: object) -> None:
    writer.text(json.dumps(value, separators=(",", ":")))


def _read_object(reader: Reader) -> dict[str, Any]:
    value = json.loads(reader.text())
    if not isinstance(value, dict):
        refuse("it holds no object where one is due")
    return value


def _write_start(writer: Writer, message: Start) -> None:
    _write_json(writer, {field.name: getattr(message.config, field.name) for field in fields(message.config)})


def _read_start(reader: Reader) -> Start:
    told = _read_object(reader)
    told |= {name: tuple(value) for name, value in told.items() if isinstance(value, list)}
    return Start(EngineConfig(**told))


def _write_ready(writer: Writer, message: Ready) -> None:
    memory = None if message.memory is None else asdict(message.memory)
    _write_json(writer, {"facts": asdict(message.facts), "memory": memory})


def _read_ready(reader: Reader) -> Ready:
    told = _read_object(reader)
    facts = told["facts"]
    limits = facts.pop("limits")
    _check_counts({**facts, **limits}, "eos_token_ids")
    facts["eos_token_ids"] = tuple(facts["eos_token_ids"])
    memory = told["memory"]
    return Ready(CoreFacts(Limits(**limits), **facts), None if memory is None else _report(memory))


def _check_counts(told: dict[str, Any], *others: str) -> None:
    wrong = [name for name, value in told.items() if name not in others and (type(value) is not int or value < 0)]
    if wrong:
        refuse(f"{wrong[0]}={errors.shown(told[wrong[0]])} is no count")


def _report(told: dict[str, Any]) -> MemoryReport:
    """The table as it was, from what `asdict` made of it."""
    rows = tuple(MemoryRow(**{**row, "phases": tuple(row["phases"])}) for row in told.pop("rows"))
    entries = tuple(Entry(**entry) for entry in told.pop("entries"))
    groups = tuple(GroupAccount(**group) for group in told.pop("kv_groups"))
    ranks = tuple(RankMemory(*rank) for rank in told.pop("ranks"))
    disk = told.pop("disk")
    if disk is not None:
        on_disk, *others = disk
        num_files, num_bytes, types, *more = on_disk
        disk = DiskAccount(OnDisk(num_files, num_bytes, tuple(StoredType(*one) for one in types), *more), *others)
    return MemoryReport(rows=rows, entries=entries, kv_groups=groups, disk=disk, ranks=ranks, **told)


def _write_progress(writer: Writer, message: LoadingProgress) -> None:
    preparing = None if message.preparing is None else list(message.preparing)
    _write_json(writer, {"num_done": message.num_done, "num_total": message.num_total, "preparing": preparing})


def _read_progress(reader: Reader) -> LoadingProgress:
    told = _read_object(reader)
    preparing = told.pop("preparing")
    _check_counts(told)
    return LoadingProgress(**told, preparing=None if preparing is None else Preparing(*preparing))


def _write_refused(writer: Writer, message: Refused) -> None:
    writer.ints(message.sequence_ids)
    error = message.error
    told: dict[str, object] = {"kind": type(error).__name__, "clauses": [error.asked, error.has, error.do]}
    if isinstance(error, MemoryPlanError):
        told |= {"table": None if error.table is None else asdict(error.table), "changes": error.changes}
    _write_json(writer, told)


def _read_refused(reader: Reader) -> Refused:
    sequence_ids = reader.ints(0)
    told = _read_object(reader)
    kind = getattr(errors, str(told["kind"]), None)
    asked, has, do = (str(clause) for clause in told["clauses"])
    if not (isinstance(kind, type) and issubclass(kind, HoldfastError)):
        kind = HoldfastError
    error = kind(asked, has, do)
    if isinstance(error, MemoryPlanError):
        table = told["table"]
        if table is not None:
            rows = tuple(PlanRow(*row) for row in table.pop("rows"))
            error.table = PlanTable(rows=rows, **table)
        error.changes = tuple(PlanChange(*change) for change in told["changes"])
    return Refused(sequence_ids, error)


def _write_nothing(writer: Writer, message: Message) -> None:
    assert not fields(message), f"{type(message).__name__} says something"


_FORMS: dict[type, tuple[int, Callable[..., None], Callable[[Reader], Message]]] = {
    Start: (16, _write_start, _read_start),
    Submit: (17, _write_submit, _read_submit),
    Abort: (18, _write_abort, _read_abort),
    ResetPrefixCache: (19, _write_nothing, lambda reader: ResetPrefixCache()),
    StatsRequest: (20, _write_nothing, lambda reader: StatsRequest()),
    Shutdown: (21, _write_nothing, lambda reader: Shutdown()),
    MapRequest: (22, _write_nothing, lambda reader: MapRequest()),
    LoadingProgress: (32, _write_progress, _read_progress),
    Ready: (33, _write_ready, _read_ready),
    CoreOutputs: (34, _write_outputs, _read_outputs),
    CoreStats: (35, _write_stats, _read_stats),
    Refused: (36, _write_refused, _read_refused),
    Died: (37, lambda writer, message: writer.text(message.cause), lambda reader: Died(reader.text())),
    Heartbeat: (
        38,
        lambda writer, message: writer.float(message.step_seconds),
        lambda reader: Heartbeat(reader.float()),
    ),
    CoreMap: (39, _write_map, _read_map),
}
_READERS = {kind: read for kind, _, read in _FORMS.values()}
