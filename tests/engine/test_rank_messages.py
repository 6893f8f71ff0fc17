"""Frames between ranks: every step and its results come back as they were; anything else raises MessageError."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from error_codes import raises_code
from holdfast.engine.rank_messages import (
    RankConnect,
    RankFrame,
    RankLoaded,
    RankLook,
    RankReady,
    decode_rank_message,
    encode_frame,
    encode_rank_message,
    for_followers,
)
from holdfast.errors import MessageError
from holdfast.memory.report import RankMemory
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.sequence import NO_TOKEN, SequenceResult, StepResult
from holdfast.request.step import MAX_TOKEN_ID, Admitted, Step, StepItem
from holdfast.request.wire import HEADER_BYTES, body_length
from request.frames import sealed
from request.test_step import STEPS

CHOSEN = st.integers(NO_TOKEN, MAX_TOKEN_ID)
TOKENS = st.tuples(CHOSEN) | st.lists(CHOSEN, max_size=3).map(tuple)
RESULTS = st.lists(st.lists(st.tuples(CHOSEN) | TOKENS, max_size=6).map(tuple), max_size=3).map(tuple)
DECODING = Step(
    8, items=tuple(StepItem(slot, 40 + slot, 1, True, ((slot,),) if slot == 2 else ()) for slot in range(4))
)
EXAMPLES = [
    ((((5,), (6,), (7,), (8,)),), DECODING),
    ((((5,), (), (1, NO_TOKEN)),), Step(7, (1,), (), (StepItem(0, 3, 1, True), StepItem(2, 8, 3, True, (), (4, 5))))),
]


def framed(results: tuple[tuple[tuple[int, ...], ...], ...], step: Step, number: int = 3) -> bytes:
    """Encode a frame like rank 0."""
    return encode_frame([StepResult(tuple(map(SequenceResult, tokens))) for tokens in results], step, number)


@given(RESULTS, STEPS, st.integers(1, 2**62))
def test_rank_frame_round_trip(results, step, number) -> None:
    frame = framed(results, step, number)
    assert decode_rank_message(frame) == (number, RankFrame(results, step))


def test_cut_or_longer_body_under_right_checksum_is_refused() -> None:
    for results, step in EXAMPLES:
        frame = framed(results, step)
        kind, body = body_length(frame)[0], frame[HEADER_BYTES:]
        for changed in (*(body[:length] for length in range(len(body))), body + b"\0", body + body):
            with pytest.raises(MessageError):
                decode_rank_message(sealed(changed, kind=kind))


def test_flipped_bit_under_right_checksum_changes_the_frame() -> None:
    for results, step in EXAMPLES:
        frame = framed(results, step)
        kind, body = body_length(frame)[0], frame[HEADER_BYTES:]
        num_refused = 0
        for place in range(8 * len(body)):
            broken = bytearray(body)
            broken[place // 8] ^= 1 << place % 8
            try:
                number, found = decode_rank_message(sealed(bytes(broken), kind=kind))
            except MessageError:
                num_refused += 1
                continue
            assert isinstance(found, RankFrame)
            assert (number, found) != (3, RankFrame(results, step))
            assert decode_rank_message(framed(found.results, found.step, number)) == (number, found)
        assert num_refused > 2 * len(body)


def test_row_sizes_round_trip_and_are_counts() -> None:
    for row_sizes in ((), (16,), (16, 64, 8192)):
        for message in (RankLoaded(row_sizes), RankConnect("[::1]:9", "secret", row_sizes)):
            assert decode_rank_message(encode_rank_message(message, 4)) == (4, message)
    for row_sizes in ("16", {"16": 1}, [16, -1], [16.0], [True], None):
        for message in (RankLoaded(row_sizes), RankConnect("[::1]:9", "secret", row_sizes)):  # type: ignore[arg-type]
            with raises_code("wire.malformed", MessageError):
                decode_rank_message(encode_rank_message(message, 4))


def test_negative_counts_of_a_rank_are_refused() -> None:
    for memory in (RankMemory(-1, "cpu", 1, 1), RankMemory(1, "cpu", -1, 1), RankMemory(1, "cpu", 1, 1, -1)):
        with raises_code("wire.malformed", MessageError):
            decode_rank_message(encode_rank_message(RankReady(memory), 4))
    for counters in ({"a": -1}, {"a": 1.5}, {1: 1}):
        with raises_code("wire.malformed", MessageError):
            decode_rank_message(encode_rank_message(RankLook(counters), 4))  # type: ignore[arg-type]


@pytest.mark.slow
def test_largest_steps_fit_a_frame() -> None:
    """Prompts whose beginnings are all on pages arrive in one step, however long they are."""
    prompt = tuple(range(2**20))
    step = Step(
        1, admitted=tuple(Admitted(slot, slot + 1, prompt, len(prompt), SamplingParams(), 0) for slot in range(17))
    )
    assert decode_rank_message(framed((), step)) == (3, RankFrame((), step))


def test_followers_get_one_of_a_million_allowed_tokens() -> None:
    """The sequences of one request: with all tokens their frame would exceed the largest."""
    params = SamplingParams(allowed_token_ids=tuple(range(2**20)), temperature=0.5, top_k=3)
    step = Step(1, admitted=tuple(Admitted(slot, slot + 1, (1,), 1, params, slot) for slot in range(128)))
    own = for_followers(step)
    assert len(framed((), own)) < 2**17
    assert {admitted.params for admitted in own.admitted} == {replace(params, allowed_token_ids=(0,))}
    assert [admitted._replace(params=params) for admitted in own.admitted] == list(step.admitted)
    assert for_followers(own) is own
