"""Steps as bytes: every step comes back as it was; whatever else arrives is a MessageError and nothing more."""

import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import MessageError
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.step import (
    MAX_TOKEN_ID,
    NO_STEP,
    STEP_KIND,
    Admitted,
    Step,
    StepItem,
    decode_step,
    encode_step,
    read_params,
    read_words,
    write_params,
    write_words,
)
from holdfast.request.wire import Writer, open_frame
from request.frames import sealed

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
def test_every_step_comes_back_as_it_was(step: Step) -> None:
    found = decode_step(encode_step(step))
    assert found == step
    assert all(type(item.samples) is bool for item in found.items)
    assert encode_step(found) == encode_step(step)


def test_a_step_of_256_decoding_sequences_is_a_few_kib() -> None:
    items = tuple(StepItem(slot, 1000 + slot, 1, True, ((slot,),) if slot % 16 == 0 else ()) for slot in range(256))
    assert len(encode_step(Step(9, items=items))) < 2.5 * 1024


def test_of_decoding_sequences_only_slots_and_positions_are_told() -> None:
    decoding = tuple(StepItem(slot, 1000 + slot, 1, True) for slot in range(256))
    others = ((*decoding[:-1], StepItem(255, 7, 2, True)), (*decoding[:-1], StepItem(255, 7, 1, False)))
    frames = [encode_step(Step(9, items=items)) for items in (decoding, *others)]
    assert [len(frame) - len(frames[0]) for frame in frames] == [0, 2 * 4 * 256, 2 * 4 * 256]
    assert [decode_step(frame).items for frame in frames] == [decoding, *others]


@given(PARAMS)
def test_params_come_back_as_they_were_and_defaults_are_not_told(params: SamplingParams) -> None:
    writer = Writer()
    write_params(writer, params)
    write_params(writer, SamplingParams())
    frame = writer.frame(1)
    _, reader = open_frame(frame)
    assert read_params(reader) == params
    assert reader.text() == "{}"


@given(WORDS)
def test_words_come_back_as_they_were(words: tuple[tuple[int, ...], ...]) -> None:
    writer = Writer()
    write_words(writer, words)
    _, reader = open_frame(writer.frame(1))
    assert read_words(reader) == words


def test_a_step_cut_short_at_every_byte_is_refused() -> None:
    frame = encode_step(EXAMPLE)
    body = frame[16:]
    assert decode_step(frame) == EXAMPLE
    for length in range(len(frame)):
        with pytest.raises(MessageError):
            decode_step(frame[:length])
    for length in range(len(body)):  # and with a checksum that is right
        with pytest.raises(MessageError):
            decode_step(sealed(body[:length], kind=STEP_KIND))
    for more in (frame, b"\0", b"\0" * 8):
        with pytest.raises(MessageError):
            decode_step(frame + more)
        with pytest.raises(MessageError):
            decode_step(sealed(body + more, kind=STEP_KIND))


def test_every_flipped_bit_is_refused() -> None:
    frame = encode_step(EXAMPLE)
    for place in range(8 * len(frame)):
        broken = bytearray(frame)
        broken[place // 8] ^= 1 << place % 8
        with pytest.raises(MessageError):
            decode_step(bytes(broken))


def test_every_flipped_bit_under_a_right_checksum_is_refused_or_is_a_step() -> None:
    body = encode_step(EXAMPLE)[16:]
    num_refused = 0
    for place in range(8 * len(body)):
        broken = bytearray(body)
        broken[place // 8] ^= 1 << place % 8
        try:
            found = decode_step(sealed(bytes(broken), kind=STEP_KIND))
        except MessageError:
            num_refused += 1
            continue
        assert found != EXAMPLE
        assert decode_step(encode_step(found)) == found
    assert num_refused > 4 * len(body)


@given(STEPS, st.data())
def test_changed_bytes_under_a_right_checksum_are_refused_or_are_a_step(step: Step, data: st.DataObject) -> None:
    body = bytearray(encode_step(step)[16:])
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(body) - 1))
        body[place] = data.draw(st.integers(0, 255))
    try:
        found = decode_step(sealed(bytes(body), kind=STEP_KIND))
    except MessageError:
        return
    assert decode_step(encode_step(found)) == found


@given(st.binary(max_size=200))
def test_any_body_is_refused_or_is_a_step(body: bytes) -> None:
    with suppress(MessageError):
        decode_step(sealed(body, kind=STEP_KIND))


def test_another_kind_and_another_version_are_named() -> None:
    body = encode_step(EXAMPLE)[16:]
    with pytest.raises(MessageError, match="it is of kind 2, and a step is of kind 1"):
        decode_step(sealed(body, kind=2))
    with pytest.raises(MessageError, match="version 9 came"):
        decode_step(sealed(body, kind=STEP_KIND, version=9))


def test_a_step_without_a_number_does_not_travel() -> None:
    with pytest.raises(MessageError, match="it holds 0 where 1 to"):
        decode_step(encode_step(NO_STEP))


def body_of(*values: tuple[str, object]) -> bytes:
    writer = Writer()
    for name, value in values:
        getattr(writer, name)(value)
    return writer.frame(STEP_KIND)


def numbers(*own: int, admitted: int = 0, items: int = 0, plain: int = 0, grown: int = 0, guessed: int = 0):
    """The list of a step by hand: how many of everything, nothing released, and what follows."""
    return "ints", (admitted, 2 * items + plain, grown, guessed, 0, *own)


ONE = (0, 1, 2, 1)
TWO = (0, 1, 1, 2, 2, 2, 1, 1)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([("ints", (0, 0, 0, 0))], "it ends before what it announces"),
        ([numbers(0, 1, 2, items=1)], "it ends before what it announces"),
        ([numbers(*ONE, items=1, plain=1)], "2 numbers follow its end"),
        ([numbers(0, 1, items=1)], "it ends before what it announces"),
        ([numbers(0, 1, 2, 2, items=1)], "its sequence in slot 0 samples 2 times"),
        ([numbers(0, 1, 2, -1, items=1)], "it lists -1 to 2 where 0 to 2147483647 are possible"),
        ([numbers(0, 1, grown=1)], "it lists places [0] of 0 sequences out of order"),
        ([numbers(0, 1, guessed=1)], "it lists places [0] of 0 sequences out of order"),
        ([numbers(*ONE, 1, 1, items=1, grown=1)], "it lists places [1] of 1 sequences out of order"),
        ([numbers(*TWO, 1, 0, 1, 1, items=2, guessed=2)], "it lists places [1, 0] of 2 sequences out of order"),
        ([numbers(*TWO, 1, 1, 1, 1, items=2, grown=2)], "it lists places [1, 1] of 2 sequences out of order"),
        ([numbers(*ONE, 0, 0, items=1, grown=1)], "its pages are of 0 to 0 cache groups where 1 to 64 are possible"),
        ([numbers(*TWO, 0, 1, 1, 65, items=2, grown=2)], "its pages are of 1 to 65 cache groups where 1 to 64 are"),
        ([numbers(*ONE, 0, 1, 1, -1, items=1, grown=1)], "it lists -1 to 2 where 0 to"),
        ([numbers(*ONE, 0, 1, 1, items=1, grown=1)], "it ends before what it announces"),
        ([numbers(*ONE, 0, 1, 1, 3, 4, items=1, grown=1)], "1 numbers follow its end"),
        ([numbers(*ONE, 0, 2, 1, items=1, grown=1)], "it ends before what it announces"),
        ([numbers(*ONE, 0, 9, items=1, guessed=1)], "it ends before what it announces"),
    ],
)
def test_what_no_step_can_be_is_refused_in_words(values: list[tuple[str, object]], words: str) -> None:
    with pytest.raises(MessageError) as caught:
        decode_step(body_of(("int", 1), *values))
    assert caught.value.has.startswith(words)


def admitted_with(params: str) -> bytes:
    return body_of(
        *(("int", 1), numbers(admitted=1)),
        *(("int", 0), ("int", 5), ("ints", (3,)), ("int", 1), ("text", params), ("int", 0), ("ints", ()), ("ints", ())),
        *(("int", 0), ("int", -1), ("int", 0)),
    )


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from([*SamplingParams.__dataclass_fields__, "best_of", "use_beam_search", "self", "_is_sound", "x"])


def test_the_frame_of_these_tests_is_sound() -> None:
    assert decode_step(admitted_with("{}")).admitted == (Admitted(0, 5, (3,), 1, SamplingParams(), 2**63),)


@given(st.dictionaries(NAMES, JSON, min_size=1, max_size=3))
def test_params_of_any_values_are_refused_or_are_params(told: dict[str, object]) -> None:
    try:
        step = decode_step(admitted_with(json.dumps(told)))
    except MessageError:
        return
    assert isinstance(step.admitted[0].params, SamplingParams)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "null",
        "[]",
        "[1]",
        '"n"',
        "7",
        '{"n": 0}',
        '{"logit_bias": 3}',
        '{"logit_bias": [[[], 1]]}',
        "[" * 10**5,
        '{"n": ' + "9" * 5000 + "}",
        '{"temperature": NaN}',
        '{"seed": 1e999}',
        '{"logit_bias": [["a", 1]]}',
        '{"n": 1} x',
    ],
    ids=lambda text: text[:12],
)
def test_params_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(MessageError, match="its sampling parameters are not sound"):
        decode_step(admitted_with(text))


def test_many_announced_sequences_that_are_not_there_are_refused_at_once() -> None:
    with pytest.raises(MessageError, match="it ends before what it announces"):
        decode_step(body_of(("int", 1), numbers(admitted=MAX_TOKEN_ID)))
    with pytest.raises(MessageError, match="it ends before what it announces"):
        decode_step(body_of(("int", 1), numbers(items=MAX_TOKEN_ID // 2, plain=1)))
    with pytest.raises(MessageError, match="has no tokens"):
        decode_step(body_of(("int", 1), numbers(admitted=1), ("int", 0), ("int", 5), ("ints", ()), ("int", 1)))
