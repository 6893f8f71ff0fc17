"""Step inputs and slots where rows of pages stand for several tokens: slots, states, page tables, and where sequences may begin."""

from dataclasses import replace
from random import Random

import pytest
import torch

from holdfast.cache.chunks import ChunkShape, chunk_shapes
from holdfast.cache.compressed import compressed_cache
from holdfast.config import Limits
from holdfast.errors import MessageError
from holdfast.kernels.state.state_rows import DRAFT
from holdfast.memory.ledger import Ledger
from holdfast.planning.terms import batch_terms
from holdfast.quant.formats import KV_FORMATS
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.sequence import LiveStep, ScheduledSequence, Sequence
from holdfast.request.step import Admitted, Step, StepItem
from holdfast.runner.slots import Slots
from holdfast.runner.step_inputs import BatchBuffers
from request.frames import decode_step, encode_step

CPU = torch.device("cpu")
LIMITS = Limits(max_num_seqs=4, max_num_batched_tokens=40, max_model_len=160, page_tokens=2)
RATIOS = (0, 4, 8)
CACHE = compressed_cache((KV_FORMATS["float32"],) * 3, 16, 8, 6, RATIOS, frozenset({1}), 8, LIMITS.page_tokens)
NUM_PAGES = 400
GROUPS = CACHE.cache_groups()
SHAPES = chunk_shapes(CACHE, NUM_PAGES)
BLOCK = max(group.page_tokens for group in GROUPS)
BOTH = pytest.mark.parametrize("is_shared", [True, False], ids=["shared", "mirrored"])


def sequence_of(number: int, num_tokens: int, num_stored: int = 0) -> Sequence:
    pages = Random(number).sample(range(NUM_PAGES), NUM_PAGES)
    tables = [[pages.pop() for _ in range(group.pages_for(num_tokens))] for group in GROUPS]
    tokens = list(range(num_tokens))
    return Sequence(
        number,
        tokens,
        num_tokens,
        SamplingParams(),
        seed=0,
        max_tokens=1,
        slot=3 - number,
        tables=tables,
        num_stored=num_stored,
    )


def slot_of(shape: ChunkShape, pages: list[int], position: int, num_stored: int) -> int:
    """Where a row goes, from the picture in cache/spec.py."""
    if (position + 1) % shape.tokens_per_row or position < num_stored:
        return -1
    chunk, offset = divmod(position // shape.tokens_per_row, LIMITS.page_tokens)
    page = pages[chunk // shape.chunks_per_page]
    return ((chunk % shape.chunks_per_page) * NUM_PAGES + page) * LIMITS.page_tokens + offset


@BOTH
@pytest.mark.parametrize(
    "case", [((0, 1),), ((7, 1), (0, 9)), ((2, 12), (15, 1), (30, 1)), ((BLOCK - 4, 3), (BLOCK - 1, 20))]
)
def test_batch_buffers_last_token_of_row_has_its_slot(is_shared: bool, case: tuple[tuple[int, int], ...]) -> None:
    buffers = BatchBuffers(LIMITS, CPU, Ledger(), is_shared=is_shared, shapes=SHAPES, has_states=True)
    items = []
    for number, (start, num_rows) in enumerate(case):
        stored = BLOCK if start in (BLOCK - 4, BLOCK - 1) else 0
        items.append(ScheduledSequence.of(sequence_of(number, 130, stored), start, num_rows))
    num_rows = sum(item.num_new_tokens for item in items)
    batch = buffers.fill(LiveStep(tuple(items)), [num_rows - 1], num_padded_rows=num_rows + 2)
    rows = [(item.sequence, item.start + nth) for item in items for nth in range(item.num_new_tokens)]
    for group, shape in enumerate(SHAPES):
        expected = [slot_of(shape, own.tables[group], position, own.num_stored) for own, position in rows]
        assert batch.slots_GT[group].tolist() == [*expected, -1, -1]
        assert group == 0 or -1 in expected
    assert batch.states_T is not None
    assert batch.states_T.tolist() == [*(own.slot for own, _ in rows), -1, -1]
    assert batch.positions_T.tolist() == [*(position for _, position in rows), 0, 0]
    for rows_of, item in zip(batch.sequences, items, strict=True):
        for shape, table, pages in zip(SHAPES, rows_of.tables, item.sequence.tables, strict=True):
            assert list(table) == shape.numbers(pages).tolist()
    if batch.page_tables is not None:
        for table_NP, group in zip(batch.page_tables, GROUPS, strict=True):
            rows_of_page = group.page_tokens // group.tokens_per_row
            num_chunks = group.pages_for(LIMITS.max_model_len) * rows_of_page // LIMITS.page_tokens
            assert table_NP.shape == (LIMITS.max_num_seqs, num_chunks)


@BOTH
def test_buffers_hold_what_was_planned(is_shared: bool) -> None:
    ledger = Ledger()
    BatchBuffers(LIMITS, CPU, ledger, is_shared=is_shared, shapes=SHAPES, has_states=True)
    chunks, ratios = (tuple(shape[part] for shape in SHAPES) for part in (0, 2))
    terms = batch_terms(LIMITS, "cpu" if is_shared else "cuda", chunks, ratios, has_states=True)
    assert {entry.owner: entry.num_bytes for entry in ledger} == {term.owner: term.num_bytes for term in terms}
    assert "inputs/states" in {term.owner for term in terms}


def test_batch_buffers_state_without_slot_is_refused() -> None:
    buffers = BatchBuffers(LIMITS, CPU, Ledger(), is_shared=True, shapes=SHAPES, has_states=True)
    sequence = sequence_of(0, 9)
    sequence.slot = -1
    with pytest.raises(AssertionError, match="a state needs a place"):
        buffers.fill(LiveStep((ScheduledSequence.of(sequence, 0, 9),)), [8])
    plain = BatchBuffers(LIMITS, CPU, Ledger(), is_shared=True, shapes=SHAPES[:1])
    sequence.tables = sequence.tables[:1]
    assert plain.fill(LiveStep((ScheduledSequence.of(sequence, 0, 9),)), [8]).states_T is None


def step_of(num_stored: int, start: int, num_tokens: int = 70, **changes: int) -> Step:
    own = Admitted(1, 9, (5,) * num_tokens, num_tokens, SamplingParams(), 0, (), num_stored)
    pages = tuple(tuple(range(100 * nth, 100 * nth + group.pages_for(num_tokens))) for nth, group in enumerate(GROUPS))
    item = StepItem(1, start, num_new_tokens=20, samples=False, pages=pages)
    return Step(1, (), (own._replace(**changes),), (item,))


def test_slots_accept_sequence_with_stored_tokens_before_block() -> None:
    slots = Slots(LIMITS, GROUPS, NUM_PAGES, 50)
    reported = step_of(BLOCK, BLOCK - 4)
    assert decode_step(encode_step(reported)) == reported
    (item,) = slots.accept(reported).scheduled
    assert (item.start, item.sequence.num_stored) == (BLOCK - 4, BLOCK)


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (step_of(BLOCK, BLOCK), f"begins at position {BLOCK} with {BLOCK} tokens stored, where its state is not known"),
        (step_of(BLOCK, 0), f"begins at position 0 with {BLOCK} tokens stored"),
        (step_of(0, BLOCK), f"begins at position {BLOCK} with 0 tokens stored"),
        (step_of(0, 3), "begins at position 3 with 0 tokens stored"),
        (step_of(BLOCK + 4, BLOCK), f"has {BLOCK + 4} of 70 tokens stored, which cannot be"),
        (step_of(5 * BLOCK, 5 * BLOCK - 4), f"has {5 * BLOCK} of 70 tokens stored, which cannot be"),
    ],
)
def test_other_beginnings_are_refused(step: Step, words: str) -> None:
    slots = Slots(LIMITS, GROUPS, NUM_PAGES, 50)
    with pytest.raises(MessageError, match=words):
        slots.accept(step)
    slots.accept(Step(1))


def test_rows_that_do_not_overlap_begin_with_a_block() -> None:
    groups = tuple(replace(group, tokens_again=0) for group in GROUPS)
    Slots(LIMITS, groups, NUM_PAGES, 50).accept(step_of(0, BLOCK))
    for step, words in ((step_of(0, 4), "begins at position 4"), (step_of(BLOCK, BLOCK), "stored, which cannot be")):
        with pytest.raises(MessageError, match=words):
            Slots(LIMITS, groups, NUM_PAGES, 50).accept(step)


def test_decode_step_more_stored_than_tokens_is_refused() -> None:
    frame = encode_step(step_of(70, 66))
    with pytest.raises(MessageError):
        decode_step(frame)


def test_drafts_and_what_was_accepted_are_marked() -> None:
    """Padding is neither, and what an earlier step left is overwritten."""
    limits = Limits(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=64, page_tokens=16)
    ledger = Ledger()
    buffers = BatchBuffers(limits, CPU, ledger, is_shared=True, has_states=True, has_drafts=True)
    assert {"inputs/states", "inputs/drafts"} <= {entry.owner for entry in ledger}
    terms = batch_terms(limits, has_states=True, has_drafts=True)
    assert {entry.owner: entry.num_bytes for entry in ledger} == {term.owner: term.num_bytes for term in terms}
    buffers.inputs.host[:] = 77
    sequences = [Sequence(n, [1] * 20, 8, SamplingParams(), 0, 40, slot=n, tables=[[n]]) for n in range(4)]
    items = (
        ScheduledSequence(sequences[2], 19, 3, True, (5, 6), None, 4),
        ScheduledSequence(sequences[0], 0, 4, False),
        ScheduledSequence(sequences[1], 19, 1, True, (), None, 1),
        ScheduledSequence(sequences[3], 19, 2, True, (7,)),
    )
    for one in sequences:
        one.tables = [[one.slot, one.slot + 4]]
    batch = buffers.fill(LiveStep(items), [0], num_padded_rows=12)
    assert batch.drafts_T is not None
    assert batch.drafts_T.tolist() == [4, DRAFT, DRAFT, 0, 0, 0, 0, 1, 0, DRAFT, -1, -1]
    assert [own.num_drafts for own in batch.sequences] == [2, 0, 0, 1]
