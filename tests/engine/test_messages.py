"""Messages between front and core: every one comes back as it was, and none that is not whole, sound and next."""

import struct
import zlib
from contextlib import suppress
from dataclasses import replace

import pytest

from engine.fake_core import CHANGE, TABLE
from holdfast.config import EngineConfig, Limits
from holdfast.engine.memory_map import CoreMap, GroupPages, SequencePages
from holdfast.engine.messages import (
    MAX_POOLED_BYTES,
    Abort,
    CoreFacts,
    CoreOutputs,
    CoreRequest,
    CoreStats,
    Died,
    Ending,
    Heartbeat,
    LoadingProgress,
    MapRequest,
    Numbering,
    Ready,
    Refused,
    ResetPrefixCache,
    SequenceOutput,
    Shutdown,
    Start,
    StatsRequest,
    Submit,
    decode_message,
    encode_message,
)
from holdfast.errors import MemoryPlanError, MessageError, QueueFullError
from holdfast.memory.ledger import Entry
from holdfast.memory.on_disk import DiskAccount, OnDisk, StoredType
from holdfast.memory.report import GroupAccount, MemoryReport, MemoryRow, RankMemory
from holdfast.observability.preparing import Preparing
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.sequence import TokenLogprobs
from holdfast.request.wire import HEADER_BYTES, VERSION, Writer

PARAMS = SamplingParams(
    n=2,
    temperature=0.5,
    stop=["END", "é"],
    stop_token_ids=[4],
    logit_bias={3: -1.5},
    allowed_token_ids=[1, 2, 3],
    logprobs=2,
    prompt_logprobs=1,
    seed=2**64 - 1,
    min_tokens=1,
)
REQUEST = CoreRequest(7, (1, 2, 2**31 - 1), PARAMS, 2**64 - 1, 9, b"salt", False, ((1, 2), (3,)))
LOGPROBS = (TokenLogprobs(5, -0.25, 3, ((6, -0.125), (7, -float("inf")))), TokenLogprobs(6, -1e-300, 1, ()))
STATS = CoreStats(1, 2, 3, 4, 5, 6, 7, 2**40, 9, 10, 0.125)
REPORT = MemoryReport(
    rows=(MemoryRow("weights", 5, None, "why", ("load", "serve"), 9), MemoryRow("kv pages", 4, 4, "so")),
    budget_bytes=2**40,
    budget_reason="a limit",
    kv_bytes_per_token=3,
    kv_tokens=4,
    max_model_len=5,
    phase_bytes={"serve": 9},
    measured_bytes=11,
    entries=(Entry("weights/a", 5, "why", 9),),
    disk=DiskAccount(OnDisk(2, 99, (StoredType("F16", 3, 9),), True, "Q4_K"), 12, "bfloat16", None, "fp8", 6),
    context_note="short",
    kv_note="é",
    kv_groups=(GroupAccount("window", 3, 16, 4, 2, 8, 0.5),),
)
FACTS = CoreFacts(Limits(4, 32, 128, 16, 6), 100, 264, (2, 5), 64)
CORE_MAP = CoreMap(
    num_pages=2**33,
    num_free=5,
    groups=(GroupPages("whole context", 16, 7, 3), GroupPages("state", 0, 2, 0)),
    sequences=(
        SequencePages(2**40, True, 9, 4, 12, 8, 1, -(2**31) + 1, (3, 2), 0.25),
        SequencePages(3, False, 9, 0, 0, 0, 0, 7, (0, 0), 1.5),
    ),
    num_waiting=90,
    num_steps=2**40,
)
MESSAGES = [
    Start(EngineConfig(model="a/b", quantization="fp8", quantization_ignore=("x", "re:y"), memory_limit="3GiB")),
    Submit((REQUEST, CoreRequest(8, (0,), SamplingParams(), 0, 1))),
    Submit((CoreRequest(9, (4, 5), SamplingParams(), 0, 1, is_pooled=True),)),
    Abort((1, 2, 2**40)),
    Abort(()),
    ResetPrefixCache(),
    StatsRequest(),
    Shutdown(),
    LoadingProgress(2**40, 2**41),
    LoadingProgress(0, 0, Preparing("Compiling", 1, 4, "kept in é")),
    Ready(FACTS, REPORT),
    Ready(
        FACTS, MemoryReport((), 0, "none", 1, 1, 1, ranks=(RankMemory(1, "cpu", 3, 2), RankMemory(2, "cpu", 3, 2, 4)))
    ),
    Ready(FACTS),
    CoreOutputs((), STATS),
    CoreOutputs(
        (
            SequenceOutput(3, (5, 6), LOGPROBS, Ending("stop", 6), 16, 2, 0.75),
            SequenceOutput(2**40, (1,)),
            SequenceOutput(9, prompt_start=4, prompt_logprobs=LOGPROBS),
            SequenceOutput(10, ending=Ending("error", error="not finite")),
            SequenceOutput(11, (8,), ending=Ending("length")),
            SequenceOutput(12, ending=Ending("length"), pooled=struct.pack("<3f", 1.5, -2.0, 0.0)),
        ),
        STATS,
    ),
    STATS,
    Died("OSError: device lost"),
    Heartbeat(1.5),
    MapRequest(),
    CORE_MAP,
    CoreMap(4, 4, (GroupPages("é", 16, 0, 0),), (), 0, 0),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_every_message_comes_back_as_it_was(message):
    assert decode_message(encode_message(message, 5)) == (5, message)


@pytest.mark.parametrize(
    "wrong",
    [
        replace(CORE_MAP, sequences=(CORE_MAP.sequences[1]._replace(num_output_tokens=-1),)),
        replace(CORE_MAP, sequences=(CORE_MAP.sequences[1]._replace(is_running=2),)),
        replace(CORE_MAP, sequences=(CORE_MAP.sequences[1]._replace(pages=(1, -1)),)),
        replace(CORE_MAP, sequences=(CORE_MAP.sequences[1]._replace(pages=(1,)),)),
        replace(CORE_MAP, num_free=-1),
    ],
    ids=["count", "flag", "pages", "groups", "free"],
)
def test_a_map_that_cannot_be_is_refused(wrong):
    with pytest.raises(MessageError):
        decode_message(encode_message(wrong, 1))


def test_phases_of_a_sequence():
    running, waiting = CORE_MAP.sequences
    assert (running.phase, waiting.phase) == ("decode", "waiting")
    assert running._replace(num_computed_tokens=8).phase == "prefill"


def test_an_error_comes_back_in_its_own_class_and_words():
    number, refused = decode_message(encode_message(Refused((3, 4), QueueFullError("a", "b", "c")), 9))
    assert (number, refused.sequence_ids, type(refused.error)) == (9, (3, 4), QueueFullError)
    assert str(refused.error) == "a; b; c"
    error = MemoryPlanError("a", "b", "c", table=TABLE)
    error.changes = (CHANGE,)
    _, refused = decode_message(encode_message(Refused((), error), 1))
    assert (type(refused.error), refused.error.table, refused.error.changes) == (MemoryPlanError, TABLE, (CHANGE,))
    _, refused = decode_message(encode_message(Refused((), MemoryPlanError("a", "b", "c")), 1))
    assert (refused.error.table, refused.error.changes) == (None, ())


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_what_is_cut_short_or_altered_is_refused(message):
    frame = encode_message(message, 5)
    step = max(len(frame) // 40, 1)
    for length in range(0, len(frame), step):
        with pytest.raises(MessageError):
            decode_message(frame[:length])
    for place in range(0, len(frame), step):
        broken = bytearray(frame)
        broken[place] ^= 0x55
        with pytest.raises(MessageError):
            decode_message(bytes(broken))
    with pytest.raises(MessageError):
        decode_message(frame + b"x")


def test_another_version_is_refused_in_words():
    frame = bytearray(encode_message(Shutdown(), 1))
    struct.pack_into("<H", frame, 4, VERSION + 1)
    with pytest.raises(MessageError, match=f"version {VERSION + 1} came; version {VERSION} is spoken here"):
        decode_message(bytes(frame))


def resealed(frame: bytes, body: bytes) -> bytes:
    """A frame whose body was altered by somebody who can count."""
    return frame[:8] + struct.pack("<II", len(body), zlib.crc32(body)) + body


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_sound_frames_of_unsound_bodies_are_refused_or_make_a_message(message):
    """Whatever the bytes say, nothing but MessageError comes out."""
    frame = encode_message(message, 5)
    body = frame[HEADER_BYTES:]
    for place in range(0, len(body), max(len(body) // 60, 1)):
        for flip in (1, 0x80, 0xFF):
            broken = bytearray(body)
            broken[place] ^= flip
            with suppress(MessageError):
                decode_message(resealed(frame, bytes(broken)))
        with pytest.raises(MessageError):
            decode_message(resealed(frame, body[:place]))


@pytest.mark.parametrize(
    ("kind", "write", "words"),
    [
        (99, lambda writer: None, "kind 99"),
        (1, lambda writer: None, "kind 1"),
        (17, lambda writer: writer.int(0), "it holds 0"),
        (16, lambda writer: writer.text('{"model": 5}'), "not sound"),
        (16, lambda writer: writer.text('{"modell": "x"}'), "not sound"),
        (16, lambda writer: writer.text("[]"), "no object"),
        (16, lambda writer: writer.text("[" * 100_000), "not sound"),
        (33, lambda writer: writer.text('{"facts": {}, "memory": null}'), "not sound"),
        (35, lambda writer: (writer.ints([1, 2]), writer.float(0.0)), "counts 2 things"),
        (36, lambda writer: (writer.ints([]), writer.text('{"kind": "int", "clauses": ["a"]}')), "not sound"),
    ],
    ids=lambda value: "" if callable(value) else str(value),
)
def test_what_nobody_sends_is_refused(kind, write, words):
    writer = Writer()
    writer.int(1)
    write(writer)
    with pytest.raises(MessageError, match=words):
        decode_message(writer.frame(kind))


@pytest.mark.parametrize("pooled", [b"123", b"\0" * (MAX_POOLED_BYTES + 4)], ids=["odd", "large"])
def test_pooled_output_of_wrong_length_is_refused(pooled):
    message = CoreOutputs((SequenceOutput(1, ending=Ending("length"), pooled=pooled),), STATS)
    with pytest.raises(MessageError, match="no hidden state"):
        decode_message(encode_message(message, 1))


def test_an_error_of_no_kind_of_ours_is_one_in_general():
    writer = Writer()
    writer.int(1)
    writer.ints([])
    writer.text('{"kind": "dataclass", "clauses": ["a", "b", "c"]}')
    _, refused = decode_message(writer.frame(36))
    assert str(refused.error) == "a; b; c"


def test_numbers_go_up_by_one():
    sender, receiver = Numbering(), Numbering()
    receiver.accept(sender.next())
    for wrong in (1, 0, 3, -1):
        with pytest.raises(MessageError, match=f"it is number {wrong}, and number 2 is the next"):
            receiver.accept(wrong)
    receiver.accept(sender.next())
    assert receiver.last == 2
