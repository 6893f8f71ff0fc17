"""Slots believe no step: whatever does not follow from the steps before is refused in a sentence, and nothing has changed."""

import copy
import subprocess
import sys
from dataclasses import fields
from random import Random

import pytest

from holdfast.cache.groups import HOLE, CacheGroup
from holdfast.config import Limits
from holdfast.errors import MessageError
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.sequence import NO_TOKEN, LiveStep, SequenceResult, StepResult
from holdfast.request.step import Admitted, Step, StepItem
from holdfast.runner.slots import Slots
from request.frames import decode_step, encode_step

LIMITS = Limits(max_num_seqs=4, max_num_batched_tokens=20, max_model_len=40, page_tokens=4, max_sampled_rows=6)
GROUPS = (CacheGroup("whole", 4), CacheGroup("window", 4, window=8))
NUM_PAGES, VOCAB = 50, 100
GREEDY = SamplingParams(temperature=0.0)


def admitted(slot: int, number: int, num_tokens: int = 6, params: SamplingParams = GREEDY, **changes) -> Admitted:
    own = Admitted(slot, number, tuple(range(10, 10 + num_tokens)), num_tokens, params, seed=number)
    return own._replace(**changes)


def places(count: int, first: int = 0) -> tuple[tuple[int, ...], ...]:
    """So many pages of each group."""
    return tuple(range(first, first + count)), tuple(range(20 + first, 20 + first + count))


def tokens(*chosen: int | tuple[int, ...] | None) -> StepResult:
    own = [() if one is None else (one,) if isinstance(one, int) else one for one in chosen]
    return StepResult(tuple(SequenceResult(token_ids) for token_ids in own))


def state(slots: Slots) -> object:
    """Everything that they know, by value."""
    seats = {
        slot: (
            [copy.deepcopy(getattr(seat.sequence, field.name)) for field in fields(seat.sequence)],
            id(seat.sequence),
            (seat.num_tokens, seat.next_start, seat.num_computed, seat.is_open, seat.room),
        )
        for slot, seat in slots.seats.items()
    }
    return slots.number, seats


@pytest.fixture
def slots() -> Slots:
    """After three steps. In slot 0 a decoding sequence of 8 tokens; in 1 one amid its prompt of 12; in 2 one with penalties,
    one token of which is coming; slot 3 is free."""
    made = Slots(LIMITS, GROUPS, NUM_PAGES, VOCAB)
    penalties = SamplingParams(temperature=0.0, presence_penalty=0.5)
    first = Step(
        1,
        admitted=(admitted(0, 7), admitted(2, 9, params=penalties)),
        items=(StepItem(0, 0, 6, True, places(2)), StepItem(2, 0, 6, True, places(2, 2))),
    )
    made.book(made.accept(first), tokens(30, 31))
    second = Step(
        2,
        admitted=(admitted(1, 8, 12),),
        items=(StepItem(1, 0, 5, False, places(2, 4)), StepItem(0, 6, 1, True), StepItem(2, 6, 1, True)),
    )
    made.book(made.accept(second), tokens(None, 40, 41))
    made.accept(Step(3, items=(StepItem(2, 7, 1, True),)))
    return made


def decode(**changes) -> StepItem:
    """The sound next item of slot 0."""
    return StepItem(0, 7, 1, True)._replace(**changes)


BAD_STEPS = {
    "repeated": (Step(3, items=(StepItem(2, 7, 1, True),)), "Step 3 arrived, but step 4 is the next"),
    "of long ago": (Step(1), "step 4 is the next"),
    "out of order": (Step(5), "Step 5 arrived, but step 4 is the next"),
    "releases a free slot": (Step(4, released=(3,)), "releases slot 3, which is free"),
    "releases a slot twice": (Step(4, released=(1, 1)), "releases slot 1, which is free"),
    "releases a slot that never was": (Step(4, released=(9,)), "releases slot 9, which is free"),
    "a slot that is taken": (Step(4, admitted=(admitted(1, 20),)), "gives slot 1 to sequence 20, and it is taken"),
    "a slot given twice": (
        Step(4, admitted=(admitted(3, 20), admitted(3, 21))),
        "slot 3 to sequence 21, and it is taken",
    ),
    "a slot that there is not": (Step(4, admitted=(admitted(4, 20),)), "gives slot 4, and there are 4"),
    "a sequence in two slots": (Step(4, admitted=(admitted(3, 7),)), "sequence 7, which has one already"),
    "a sequence that comes twice": (
        Step(4, released=(0,), admitted=(admitted(3, 20), admitted(0, 20))),
        "gives slot 0 to sequence 20, which has one already",
    ),
    "a prompt too long": (Step(4, admitted=(admitted(3, 20, 41),)), "has 41 tokens, and 1 to 40 are possible"),
    "no tokens": (Step(4, admitted=(admitted(3, 20, token_ids=()),)), "has 0 tokens"),
    "a prompt beyond its tokens": (
        Step(4, admitted=(admitted(3, 20, num_prompt_tokens=7),)),
        "a prompt of 7 among 6 tokens",
    ),
    "a token outside the vocabulary": (
        Step(4, admitted=(admitted(3, 20, token_ids=(1, 100), num_prompt_tokens=2),)),
        "has token 100, and there are 100",
    ),
    "a negative token": (Step(4, admitted=(admitted(3, 20, token_ids=(-1, 5), num_prompt_tokens=2),)), "has token -1"),
    "an unknown slot": (Step(4, items=(StepItem(3, 0, 1, False),)), "runs slot 3, which is free"),
    "a slot that it releases": (Step(4, released=(0,), items=(decode(),)), "runs slot 0, which is free"),
    "a slot twice": (Step(4, items=(decode(), decode(start=8))), "runs slot 0 twice"),
    "no tokens at all": (Step(4, items=(decode(num_new_tokens=0),)), "runs 0 tokens from position 7"),
    "a negative number": (Step(4, items=(decode(num_new_tokens=-1),)), "runs -1 tokens"),
    "a start before the end": (
        Step(4, items=(decode(start=6, num_new_tokens=2),)),
        "goes on at position 7, and not at 6",
    ),
    "a start beyond the end": (Step(4, items=(decode(start=8),)), "goes on at position 7, and not at 8"),
    "a start that ignores what is in flight": (
        Step(4, items=(StepItem(2, 7, 1, True),)),
        "goes on at position 8, and not at 7",
    ),
    "more tokens than there are": (
        Step(4, items=(decode(num_new_tokens=2, pages=places(1, 8)),)),
        "runs to position 9, and has 8 tokens",
    ),
    "more tokens than a context has": (
        Step(4, admitted=(admitted(3, 20, 40),), items=(StepItem(3, 39, 2, False, places(11, 8)),)),
        "runs to position 41, and at most 40",
    ),
    "a choice before the end": (
        Step(4, items=(StepItem(1, 5, 2, True),)),
        "does not reach its last token, and chooses one",
    ),
    "no choice at the end": (Step(4, items=(decode(samples=False),)), "reaches its last token, and chooses none"),
    "a page beyond the pool": (Step(4, items=(decode(pages=((50,), (3,))),)), "gets page 50, and there are 50"),
    "a page below the pool": (Step(4, items=(decode(pages=((3,), (-2,))),)), "gets page -2, and there are 50"),
    "pages of too few groups": (Step(4, items=(decode(pages=((3,),)),)), "pages for 1 cache groups, and there are 2"),
    "pages of too many groups": (Step(4, items=(decode(pages=((3,), (4,), (5,))),)), "pages for 3 cache groups"),
    "more pages than a context has": (Step(4, items=(decode(pages=places(9, 8)),)), "has 11 pages of cache group 0"),
    "missing pages": (
        Step(4, items=(StepItem(1, 5, 7, True),)),
        "has 2 pages of cache group 0, and needs 3 to position 12",
    ),
    "missing pages of one group": (
        Step(4, items=(StepItem(1, 5, 7, True, ((8,), ())),)),
        "has 2 pages of cache group 1, and needs 3 to position 12",
    ),
    "missing pages of a newcomer": (
        Step(4, admitted=(admitted(3, 20),), items=(StepItem(3, 5, 1, True),)),
        "has 0 pages of cache group 0, and needs 2 to position 6",
    ),
    "a hole where something is read": (
        Step(4, admitted=(admitted(3, 20),), items=(StepItem(3, 0, 6, True, ((8, 9), (HOLE, 10))),)),
        "has no page where cache group 1 is read",
    ),
    "a hole behind a page": (
        Step(4, items=(StepItem(1, 5, 7, True, ((8,), (HOLE,))),)),
        "has no page where cache group 1 is read",
    ),
    "a hole in a whole context": (
        Step(4, admitted=(admitted(3, 20, 20),), items=(StepItem(3, 16, 4, True, ((HOLE, 8, 9, 10, 11), (12,) * 5)),)),
        "has no page where cache group 0 is read",
    ),
    "too many tokens": (
        Step(
            4,
            admitted=(admitted(3, 20, 21),),
            items=(StepItem(3, 0, 20, False, places(6, 8)), decode()),
        ),
        "runs 21 tokens, and at most 20 fit",
    ),
    "proposals among others": (
        Step(4, items=(decode(num_new_tokens=3, pages=places(1, 8), proposals=(5, 6, 7)),)),
        "has 3 proposals among 3 tokens",
    ),
    "proposals without room for them": (Step(4, items=(decode(proposals=(5,)),)), "has 1 proposals among 1 tokens"),
    "proposals amid a prompt": (
        Step(4, items=(StepItem(1, 5, 3, False, places(1, 8), (5, 6)),)),
        "has proposals, and chooses none",
    ),
    "proposals behind a token that is coming": (
        Step(4, items=(StepItem(2, 8, 2, True, places(1, 8), (5,)),)),
        "what follows a token that is not known yet",
    ),
    "proposals that begin before the last token": (
        Step(4, items=(StepItem(1, 5, 3, True, places(1, 8), (5, 6)),)),
        "does not reach its last token, and chooses one",
    ),
    "proposals outside the vocabulary": (
        Step(4, items=(decode(num_new_tokens=2, pages=places(1, 8), proposals=(100,)),)),
        "has token 100",
    ),
    "too many proposals": (
        Step(4, items=(decode(num_new_tokens=8, pages=places(2, 8), proposals=(5,) * 7),)),
        "chooses from 8 rows, and at most 6 fit",
    ),
    "proposals without pages": (
        Step(4, items=(decode(num_new_tokens=3, proposals=(5, 6)),)),
        "has 2 pages of cache group 0, and needs 3 to position 10",
    ),
}


@pytest.mark.parametrize(("step", "sentence"), BAD_STEPS.values(), ids=BAD_STEPS.keys())
def test_slots_step_out_of_order_refused_and_state_unchanged(slots, step, sentence):
    before = state(slots)
    with pytest.raises(MessageError) as caught:
        slots.accept(step)
    assert sentence in str(caught.value)
    assert caught.value.code in ("runner.bad_step", "runner.step_out_of_order")
    assert "\n" not in str(caught.value)
    assert state(slots) == before
    slots.accept(Step(4, items=(decode(),)))


def test_slots_draft_tokens_with_dependent_choices_refused():
    for params, bad_words in ((SamplingParams(presence_penalty=0.5), ()), (GREEDY, ((5, 6),))):
        slots = Slots(LIMITS, GROUPS, NUM_PAGES, VOCAB)
        slots.accept(
            Step(
                1,
                admitted=(admitted(0, 7, params=params, bad_word_ids=bad_words),),
                items=(StepItem(0, 0, 5, False, places(2)),),
            )
        )
        before = state(slots)
        with pytest.raises(MessageError, match="its choices depend on one another"):
            slots.accept(Step(2, items=(StepItem(0, 5, 2, True, (), (5,)),)))
        assert state(slots) == before


def test_slots_truncated_message_refused_and_state_unchanged(slots):
    """What was decoded at all is checked again; what was not never gets here."""
    frame = encode_step(Step(4, released=(1,), admitted=(admitted(1, 30),), items=(decode(),)))
    before = state(slots)
    for length in range(len(frame)):
        with pytest.raises(MessageError):
            slots.accept(decode_step(frame[:length]))
    assert state(slots) == before
    slots.accept(decode_step(frame))


def test_numbers_changed_at_random_are_refused_or_sound():
    """A step with any number in it changed either follows, or leaves nothing behind: never an error of another kind."""
    dice, num_refused = Random(0), 0
    for _ in range(400):
        slots = Slots(LIMITS, GROUPS, NUM_PAGES, VOCAB)
        slots.accept(Step(1, admitted=(admitted(0, 7),), items=(StepItem(0, 0, 6, True, places(2)),)))
        item = StepItem(0, 6, 1, True)
        name = dice.choice(["slot", "start", "num_new_tokens", "samples", "pages", "proposals", "number"])
        number = dice.choice([-1, 0, 1, 2, 3, 7, 41, 60, 2**40])
        step = Step(2, items=(item,))
        if name == "number":
            step = step._replace(number=number)
        else:
            value = {"pages": ((number,), (number,)), "proposals": (number,), "samples": bool(number % 2)}.get(
                name, number
            )
            step = step._replace(items=(item._replace(**{name: value}),))
        before = state(slots)
        try:
            slots.accept(step)
        except MessageError:
            num_refused += 1
            assert state(slots) == before
    assert 200 < num_refused < 400


def test_slots_step_releases_admits_and_grows_tables(slots):
    """Released and given again in one step; tables grow by what is new; pages given back stay named."""
    step = Step(
        4,
        released=(1, 2),
        admitted=(admitted(2, 30, 18, num_prompt_tokens=10, bad_word_ids=((3, 4),)),),
        items=(decode(), StepItem(2, 16, 2, True, ((1, 2, 3, 4, 5), (HOLE, HOLE, 6, 7, 8)))),
    )
    live = slots.accept(step)
    assert live.step is step
    first, second = live.scheduled
    assert first.sequence.token_ids == [10, 11, 12, 13, 14, 15, 30, 40]
    assert first.sequence.tables == [[0, 1], [20, 21]]
    own = second.sequence
    assert (own.sequence_id, own.slot, own.seed, own.num_prompt_tokens) == (30, 2, 30, 10)
    assert own.bad_word_ids == ((3, 4),)
    assert own.tables == [[1, 2, 3, 4, 5], [HOLE, HOLE, 6, 7, 8]]
    assert (second.start, second.num_new_tokens, second.num_tokens, second.samples) == (16, 2, 18, True)
    slots.book(live, tokens(50, 51))
    assert own.token_ids[-2:] == [27, 51]
    live = slots.accept(Step(5, items=(StepItem(2, 18, 1, True),)))
    assert live.scheduled[0].sequence is own


def test_slots_book_is_idempotent(slots):
    live = slots.accept(Step(4, items=(decode(num_new_tokens=3, pages=places(1, 8), proposals=(5, 6)),)))
    slots.book(live, tokens((5, 77)))
    before = state(slots)
    slots.book(live, tokens((5, 77)))
    assert state(slots) == before


@pytest.mark.parametrize("chosen", [(9,), (5, 9), (5, 6, 9), (5, NO_TOKEN)], ids=str)
def test_slots_sequence_continues_after_accepted_draft_tokens(slots, chosen):
    live = slots.accept(Step(4, items=(decode(num_new_tokens=3, pages=places(1, 8), proposals=(5, 6)),)))
    before = state(slots)
    with pytest.raises(MessageError, match="has proposals in flight"):
        slots.accept(Step(5, items=(decode(start=10),)))
    assert state(slots) == before
    slots.book(live, tokens(chosen))
    start = 7 + len(chosen)
    (item,) = slots.accept(Step(5, items=(decode(start=start),))).scheduled
    assert item.sequence.token_ids[8:] == [max(token_id, 0) for token_id in chosen]


def test_slots_drop_surplus_tokens_of_released_sequence(slots):
    """It ended while a step of it was in flight; by then another has its slot."""
    surplus = slots.accept(Step(4, items=(decode(),)))
    newcomer = slots.accept(
        Step(5, released=(0,), admitted=(admitted(0, 30),), items=(StepItem(0, 0, 6, True, places(2, 8)),))
    )
    before = state(slots)
    slots.book(surplus, tokens(50))
    assert state(slots) == before
    slots.book(newcomer, tokens(60))
    assert newcomer.scheduled[0].sequence.token_ids[-1] == 60


def test_slots_failed_sequence_continues_with_placeholder_token(slots):
    first = slots.accept(Step(4, items=(decode(),)))
    slots.accept(Step(5, items=(decode(start=8, pages=places(1, 8)),)))
    slots.book(first, tokens(NO_TOKEN))
    assert first.scheduled[0].sequence.token_ids[8:] == [0]


def test_slots_dropped_steps_restart_after_last_booked_step(slots):
    slots.accept(
        Step(4, released=(1,), admitted=(admitted(1, 30),), items=(decode(), StepItem(1, 4, 2, True, places(2, 8))))
    )
    slots.accept(Step(5, items=(decode(start=8, pages=places(1, 12)), StepItem(1, 6, 1, True))))
    slots.forget_flights()
    live = slots.accept(Step(6, items=(decode(), StepItem(2, 7, 1, True), StepItem(1, 0, 6, True))))
    assert [item.sequence.num_tokens for item in live.scheduled] == [8, 8, 6], "a newcomer begins wherever it may"
    assert live.scheduled[0].sequence.tables[0] == [0, 1, 12], "pages that were reported stay reported"


def test_slots_dropped_proposals_do_not_keep_their_sequence(slots):
    guess = Step(4, items=(decode(num_new_tokens=3, proposals=(5, 6), pages=places(1, 8)),))
    slots.accept(guess)
    slots.forget_flights()
    again = slots.accept(Step(5, items=(decode(),)))
    assert (again.scheduled[0].start, again.scheduled[0].samples) == (7, True)


@pytest.mark.parametrize("short", [0, 1])
def test_slots_room_is_that_of_the_smallest_group(short):
    """One group's pages hold more tokens than the other's; a step without pages ends where the first is full."""
    sizes = [8, 8]
    sizes[short] = 4
    made = Slots(LIMITS, [CacheGroup(f"group {size}", size) for size in sizes], NUM_PAGES, VOCAB)
    first = Step(1, admitted=(admitted(0, 7, 4),), items=(StepItem(0, 0, 4, True, ((1,), (2,))),))
    made.book(made.accept(first), tokens(30))
    with pytest.raises(MessageError, match=f"has 1 pages of cache group {short}, and needs 2 to position 5"):
        made.accept(Step(2, items=(StepItem(0, 4, 1, True),)))
    grown = [(), ()]
    grown[short] = (3,)
    made.accept(Step(2, items=(StepItem(0, 4, 1, True, tuple(grown)),)))


def test_slots_forks_take_no_rows_of_a_step():
    """The prompt alone has as many tokens as a step may; each fork chooses from its last row."""
    made = Slots(LIMITS, GROUPS, NUM_PAGES, VOCAB)
    forks = [admitted(slot, 10 + slot, 20, fork_of=0) for slot in (1, 2, 3)]
    items = [StepItem(own.slot, 19, 1, True, places(5, 6 * own.slot)) for own in forks]
    step = Step(1, admitted=(admitted(0, 1, 20), *forks), items=(StepItem(0, 0, 20, True, places(5)), *items))
    live = made.accept(step)
    assert [item.source is live.scheduled[0].sequence for item in live.scheduled] == [False, True, True, True]
    made.book(live, tokens(30, 31, 32, 33))
    again = made.accept(Step(2, items=(StepItem(3, 20, 1, True, places(1, 28)),)))
    assert again.scheduled[0].sequence.token_ids[-1] == 33
    assert again.scheduled[0].source is None, "it forks once"


NEAR = (CacheGroup("whole", 4), CacheGroup("near", 2, window=4, is_blocked=True, kept_pages=2))


@pytest.mark.parametrize(
    ("near", "is_sound"),
    [
        ((20, 21, HOLE, HOLE, 24), True),
        ((20, 21, 22, 23, 24), True),
        ((HOLE, 21, HOLE, HOLE, 24), False),
        ((20, HOLE, HOLE, HOLE, 24), False),
        ((20, 21, 22, HOLE, 24), False),
        ((20, 21, HOLE, HOLE, HOLE), False),
    ],
)
def test_slots_near_pages_are_kept_ones_and_those_of_the_own_block(near, is_sound):
    """A sequence that begins behind a hit of 8 tokens: its first block is there, and the block that it continues."""
    slots = Slots(LIMITS, NEAR, NUM_PAGES, VOCAB)
    step = Step(1, admitted=(admitted(0, 7, 10),), items=(StepItem(0, 8, 2, True, ((1, 2, 3), near)),))
    if is_sound:
        assert slots.accept(step).scheduled[0].sequence.tables == [[1, 2, 3], list(near)]
        # Later pages come one by one, as in every group.
        more = Step(2, items=(StepItem(0, 10, 1, True, ((), (25,))),))
        assert slots.accept(more).scheduled[0].sequence.tables[1] == [*near, 25]
        return
    with pytest.raises(MessageError, match="has no page where cache group 1 is read"):
        slots.accept(step)


def test_slots_module_imports_no_torch():
    code = "import sys, holdfast.runner.slots; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_slots_accept_step_of_releases_only(slots):
    assert slots.accept(Step(4, released=(0, 1, 2))) == LiveStep((), Step(4, released=(0, 1, 2)))
