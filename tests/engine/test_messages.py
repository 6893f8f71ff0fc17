"""Messages between front and core: every one comes back as it was; corrupt and malformed ones raise MessageError."""

import struct
from contextlib import suppress
from dataclasses import replace

import msgspec
import pytest

from engine.fake_core import CHANGE, TABLE
from error_codes import raises_code
from holdfast.config import EngineConfig, Limits
from holdfast.engine.memory_map import CoreMap, GroupPages, SequencePages, phase_of
from holdfast.engine.messages import (
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
from holdfast.request.wire import HEADER_BYTES, MAX_POOLED_BYTES, body_length
from request.frames import sealed

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
STATS = CoreStats(1, 2, 3, 4, 5, 6, 7, 2**40, 9, 10, 0.125, 11)
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
        SequencePages("decode", 9, 4, 12, 8, 1, -(2**31) + 1, (3, 2), 0.25, 2**40),
        SequencePages("waiting", 9, 0, 0, 0, 0, 7, (0, 0), 1.5, 3),
    ),
    num_waiting=90,
    num_steps=2**40,
    num_snapshots=12,
    num_snapshots_held=11,
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
    CoreMap(4, 4, (GroupPages("é", 16, 0, 0),), 0, 0, 0, 0, ()),
]


def test_message_codec_round_trips_every_message():
    for message in MESSAGES:
        assert decode_message(encode_message(message, 5)) == (5, message)


def test_contradicting_messages_are_refused():
    waiting = CORE_MAP.sequences[1]
    limits = replace(FACTS.limits, max_model_len=-1)
    for message in (
        *(
            replace(CORE_MAP, sequences=(replace(waiting, **wrong),))
            for wrong in ({"num_output_tokens": -1}, {"phase": "idle"})
        ),
        *(replace(CORE_MAP, sequences=(replace(waiting, pages=pages),)) for pages in ((1, -1), (1,), (1, 2, 3))),
        replace(CORE_MAP, num_free=-1),
        Submit(()),
        Submit((REQUEST._replace(token_ids=()),)),
        Submit((REQUEST._replace(max_tokens=0),)),
        Abort((-1,)),
        replace(STATS, num_steps=-1),
        Ready(replace(FACTS, limits=limits)),
        Ready(replace(FACTS, vocab_size=-1)),
        LoadingProgress(-1, 2),
        *(CoreOutputs((SequenceOutput(1, (token,)),)) for token in (-1, 2**31, 1.5)),
        *(CoreOutputs((SequenceOutput(1, pooled=pooled),)) for pooled in (b"123", b"\0" * (MAX_POOLED_BYTES + 4))),
        CoreOutputs((SequenceOutput(1, ending=Ending("done")),)),
        CoreOutputs((SequenceOutput(1, logprobs=(LOGPROBS[0]._replace(rank=-1),)),)),
    ):
        with raises_code("wire.malformed", MessageError):
            decode_message(encode_message(message, 1))


def test_phases_of_a_sequence():
    assert [phase_of(True, 9, 9), phase_of(True, 8, 9), phase_of(False, 9, 9)] == ["decode", "prefill", "waiting"]


def test_error_keeps_its_class_table_and_changes():
    full = QueueFullError("value.empty", name="a")
    number, refused = decode_message(encode_message(Refused((3, 4), full), 9))
    assert (number, refused.sequence_ids, type(refused.error)) == (9, (3, 4), QueueFullError)
    assert (str(refused.error), refused.error.code, refused.error.values) == (str(full), "value.empty", {"name": "a"})
    error = MemoryPlanError("value.empty", name="a", table=TABLE)
    error.changes = (CHANGE,)
    _, refused = decode_message(encode_message(Refused((), error), 1))
    assert (type(refused.error), refused.error.table, refused.error.changes) == (MemoryPlanError, TABLE, (CHANGE,))
    _, refused = decode_message(encode_message(Refused((), MemoryPlanError("value.empty", name="a")), 1))
    assert (refused.error.table, refused.error.changes) == (None, ())


def test_truncated_and_altered_messages_are_refused():
    for message in MESSAGES:
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


def test_malformed_bodies_are_refused_or_make_a_message():
    """Whatever the bytes are, nothing but MessageError is raised."""
    for message in MESSAGES:
        frame = encode_message(message, 5)
        kind, body = body_length(frame)[0], frame[HEADER_BYTES:]
        for place in range(0, len(body), max(len(body) // 60, 1)):
            for flip in (1, 0x80, 0xFF):
                broken = bytearray(body)
                broken[place] ^= flip
                with suppress(MessageError):
                    decode_message(sealed(bytes(broken), kind=kind))
            with pytest.raises(MessageError):
                decode_message(sealed(body[:place], kind=kind))


def test_bodies_that_no_front_or_core_sends_are_refused():
    for kind in (99, 1):
        with raises_code("wire.unknown_kind", MessageError, found=kind):
            decode_message(sealed(b"", kind=kind))
    plain = {"facts": {}, "memory": None}
    for kind, body in (
        *(
            (17, {}),
            (17, []),
            (16, {"config": {"model": 5}}),
            (16, {"config": {"modell": "x"}}),
            (16, []),
            (16, {"config": []}),
        ),
        *((33, plain), (35, {"num_running": -1}), (35, []), (36, {"sequence_ids": [], "error": {"kind": "int"}})),
    ):
        with raises_code("wire.malformed", MessageError):
            decode_message(sealed(msgspec.msgpack.encode((1, body)), kind=kind))
