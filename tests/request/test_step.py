"""Steps as frames: every step comes back as it was; anything else raises MessageError."""

from contextlib import suppress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from error_codes import raises_code
from holdfast.errors import MessageError
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.step import MAX_TOKEN_ID, NO_STEP, Admitted, Step, StepItem
from holdfast.request.wire import HEADER_BYTES
from request.frames import STEP_KIND, decode_step, encode_step, sealed

TOKENS = st.integers(0, MAX_TOKEN_ID)
ID_LISTS = st.lists(TOKENS, min_size=1, max_size=6).map(tuple)
WORDS = st.lists(ID_LISTS, max_size=3).map(tuple)
PARAMS = st.builds(
    SamplingParams,
    n=st.integers(1, 4),
    temperature=st.floats(0, 100),
    top_k=st.integers(-1, 100),
    top_p=st.floats(0.01, 1),
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(0.5, 2),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    logit_bias=st.none() | st.dictionaries(TOKENS, st.floats(-100, 100), max_size=4),
    allowed_token_ids=st.none() | ID_LISTS,
    bad_words=st.lists(st.text(min_size=1, max_size=5), max_size=3),
    seed=st.none() | st.integers(0, 2**64 - 1),
    stop=st.lists(st.text(min_size=1, max_size=5), max_size=3),
    stop_token_ids=st.lists(TOKENS, max_size=3),
    ignore_eos=st.booleans(),
    max_tokens=st.none() | st.integers(50, 1000),
    min_tokens=st.integers(0, 50),
    logprobs=st.none() | st.integers(0, 20),
    prompt_logprobs=st.none() | st.integers(0, 20),
    skip_special_tokens=st.booleans(),
    include_stop_str_in_output=st.booleans(),
    truncate_prompt_tokens=st.none() | st.integers(1, 9),
    skip_reading_prefix_cache=st.booleans(),
)


@st.composite
def admissions(draw: st.DrawFn) -> Admitted:
    token_ids = draw(ID_LISTS)
    return Admitted(
        slot=draw(TOKENS),
        sequence_id=draw(st.integers(0, 2**62)),
        token_ids=token_ids,
        num_prompt_tokens=draw(st.integers(1, len(token_ids))),
        params=draw(PARAMS),
        seed=draw(st.integers(0, 2**64 - 1)),
        bad_word_ids=draw(WORDS),
        is_pooled=draw(st.booleans()),
        state_from=draw(st.just(-1) | TOKENS),
    )


PAGES = st.lists(st.lists(st.integers(-1, MAX_TOKEN_ID - 1), max_size=4).map(tuple), min_size=1, max_size=4).map(tuple)
ITEMS = st.builds(
    StepItem,
    slot=TOKENS,
    start=TOKENS,
    num_new_tokens=st.just(1) | TOKENS,
    samples=st.just(True) | st.booleans(),
    pages=st.just(()) | PAGES,
    proposals=st.lists(TOKENS, max_size=4).map(tuple),
    state_to=st.just(-1) | TOKENS,
)
STEPS = st.builds(
    Step,
    number=st.integers(1, 2**63 - 1),
    released=st.lists(TOKENS, max_size=5).map(tuple),
    admitted=st.lists(admissions(), max_size=2).map(tuple),
    items=st.lists(ITEMS, max_size=5).map(tuple),
)
EXAMPLE = Step(
    3,
    released=(1, 4),
    admitted=(
        Admitted(1, 77, (5, 6, 7), 2, SamplingParams(stop=("x",), logit_bias={3: 1.5}), 2**64 - 1, ((1, 2), (3,)), 2),
    ),
    items=(
        StepItem(1, 0, 3, True, ((0, 1), (-1, 2))),
        StepItem(0, 9, 1, True),
        StepItem(2, 4, 3, True, (), (8, 9)),
    ),
)


@given(STEPS)
def test_step_round_trip(step: Step) -> None:
    found = decode_step(encode_step(step))
    assert found == step
    assert all(type(item.samples) is bool for item in found.items)
    assert encode_step(found) == encode_step(step)


def test_step_of_256_decoding_sequences_is_small() -> None:
    items = tuple(StepItem(slot, 1000 + slot, 1, True, ((slot,),) if slot % 16 == 0 else ()) for slot in range(256))
    assert len(encode_step(Step(9, items=items))) < 2.75 * 1024


def test_step_cut_at_any_byte_is_refused() -> None:
    frame = encode_step(EXAMPLE)
    body = frame[HEADER_BYTES:]
    assert decode_step(frame) == EXAMPLE
    for length in range(len(frame)):
        with pytest.raises(MessageError):
            decode_step(frame[:length])
    for length in range(len(body)):  # and with the right checksum
        with pytest.raises(MessageError):
            decode_step(sealed(body[:length], kind=STEP_KIND))
    for more in (frame, b"\0", b"\0" * 8):
        with pytest.raises(MessageError):
            decode_step(frame + more)
        with pytest.raises(MessageError):
            decode_step(sealed(body + more, kind=STEP_KIND))


def test_step_with_a_flipped_bit_is_refused() -> None:
    frame = encode_step(EXAMPLE)
    for place in range(8 * len(frame)):
        broken = bytearray(frame)
        broken[place // 8] ^= 1 << place % 8
        with pytest.raises(MessageError):
            decode_step(bytes(broken))


def test_flipped_bit_under_right_checksum_changes_the_step() -> None:
    frame = encode_step(EXAMPLE)
    body = frame[HEADER_BYTES:]
    params = msgspec.msgpack.encode(EXAMPLE.admitted[0].params)
    # Two values of a parameter may mean the same, and the number of the message is not part of the step.
    start = body.index(params)
    may_be_equal = {1, *range(start, start + len(params))}
    num_refused = 0
    for place in range(8 * len(body)):
        broken = bytearray(body)
        broken[place // 8] ^= 1 << place % 8
        try:
            found = decode_step(sealed(bytes(broken), kind=STEP_KIND))
        except MessageError:
            num_refused += 1
            continue
        assert found != EXAMPLE or place // 8 in may_be_equal
        assert decode_step(encode_step(found)) == found
    assert num_refused > 4 * len(body)


@given(STEPS, st.data())
def test_changed_bytes_are_refused_or_are_a_step(step: Step, data: st.DataObject) -> None:
    body = bytearray(encode_step(step)[HEADER_BYTES:])
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(body) - 1))
        body[place] = data.draw(st.integers(0, 255))
    try:
        found = decode_step(sealed(bytes(body), kind=STEP_KIND))
    except MessageError:
        return
    assert decode_step(encode_step(found)) == found


@given(st.binary(max_size=200))
def test_decode_step_any_body_is_step_or_refused(body: bytes) -> None:
    with suppress(MessageError):
        decode_step(sealed(body, kind=STEP_KIND))


def test_step_without_a_number_is_refused() -> None:
    with raises_code("wire.malformed", MessageError):
        decode_step(encode_step(NO_STEP))


def test_step_out_of_bounds_is_refused() -> None:
    item, admitted = EXAMPLE.items[0], EXAMPLE.admitted[0]
    wrong_items = (
        *({"slot": -1}, {"start": -1}, {"num_new_tokens": 2**31}, {"samples": 2}, {"pages": ((-2,),)}),
        *({"pages": ((),) * 65}, {"pages": (3,)}, {"proposals": (-1,)}, {"proposals": (2**31,)}),
        *({"state_to": -2}, {"state_to": 2**31}, {"state_to": True}),
    )
    wrong_admitted = (
        *({"slot": -1}, {"token_ids": ()}, {"token_ids": (-1,)}, {"num_prompt_tokens": 0}, {"num_prompt_tokens": 4}),
        *({"seed": -1}, {"bad_word_ids": ((),)}, {"num_stored": 3}, {"num_stored": -1}, {"fork_of": -2}),
        *({"state_from": -2}, {"state_from": 2**31}, {"fork_of": 1, "state_from": 0}),
    )
    steps = [EXAMPLE._replace(items=(item._replace(**wrong),)) for wrong in wrong_items]
    steps += [EXAMPLE._replace(admitted=(admitted._replace(**wrong),)) for wrong in wrong_admitted]
    for step in (*steps, EXAMPLE._replace(released=(-1,))):
        with raises_code("wire.malformed", MessageError):
            decode_step(encode_step(step))


def admitted_with(params: object) -> bytes:
    """A frame with one admitted sequence of these sampling parameters."""
    return sealed(msgspec.msgpack.encode((1, [1, [], [[0, 5, [3], 1, params, 0]], []])), kind=STEP_KIND)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=4).filter(str.isprintable),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", max_size=4), inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from([*SamplingParams.__dataclass_fields__, "best_of", "use_beam_search", "self", "_is_sound", "x"])


@given(st.dictionaries(NAMES, VALUES, min_size=1, max_size=3))
def test_params_of_any_values_are_refused_or_are_params(fields: dict[str, object]) -> None:
    try:
        step = decode_step(admitted_with(fields))
    except MessageError:
        return
    assert isinstance(step.admitted[0].params, SamplingParams)


def test_malformed_params_are_refused() -> None:
    assert decode_step(admitted_with({})).admitted == (Admitted(0, 5, (3,), 1, SamplingParams(), 0),)
    nan, wrong_key = float("nan"), {"logit_bias": {"a": 1}}
    for params in (None, [], [1], "n", 7, {"n": 0}, {"logit_bias": 3}, {"n": 2**63}, {"temperature": nan}, wrong_key):
        with raises_code("wire.malformed", MessageError):
            decode_step(admitted_with(params))


def test_announced_items_that_are_missing_are_refused() -> None:
    for body in (b"\x92\x01\x94\x01\xdd\x7f\xff\xff\xff", b"\x92\x01\x94\x01\x90\x90\xdd\x7f\xff\xff\xff"):
        with raises_code("wire.malformed", MessageError):
            decode_step(sealed(body, kind=STEP_KIND))
