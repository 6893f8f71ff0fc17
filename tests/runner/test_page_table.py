import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.config import Limits
from holdfast.engine.scheduler import Scheduler
from holdfast.memory.arena import MirroredTensor
from holdfast.memory.ledger import Ledger
from holdfast.planning.terms import LISTED_PAGES, batch_terms
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.sequence import Sequence
from holdfast.runner.step_inputs import MAX_SINGLE_COPIES, PageTable

CPU = torch.device("cpu")
NEVER_SENT = -99


def table_of(max_num_seqs=4, max_num_pages=64, device=CPU):
    return PageTable(Limits(max_num_seqs, 64, max_num_pages * 4, 4), device, Ledger())


def sequence(sequence_id, pages=()):
    return Sequence(sequence_id, [1], 1, SamplingParams(), seed=0, max_tokens=8, pages=list(pages))


def preempt(victim):
    victim.pages = []
    victim.num_preemptions += 1


def run(table, sequences):
    """rows(), and everything that must hold after it, seen from outside too."""
    rows = table.rows(sequences)
    table.check(sequences)
    assert len(set(rows)) == len(rows) == len(sequences)
    held = table.table_NP.tolist()
    for row, own in zip(rows, sequences, strict=True):
        assert held[row][: len(own.pages)] == own.pages
    return rows


@settings(max_examples=60)
@given(data=st.data())
def test_any_steps_against_plain_lists(data):
    max_num_seqs, max_num_pages = data.draw(st.integers(1, 7)), data.draw(st.sampled_from([1, 5, 40]))
    table = table_of(max_num_seqs, max_num_pages)
    people = [sequence(index) for index in range(max_num_seqs + 4)]
    page = 0
    for _ in range(data.draw(st.integers(1, 12))):
        chosen = data.draw(st.lists(st.sampled_from(people), unique=True, max_size=max_num_seqs))
        for own in chosen:
            if data.draw(st.integers(0, 5)) == 0:
                preempt(own)
            least = 0 if own.pages else 1
            num_new = data.draw(st.sampled_from([0, 1, 2, LISTED_PAGES, LISTED_PAGES + 1, max_num_pages]))
            num_new = min(max(least, num_new), max_num_pages - len(own.pages))
            own.pages += range(page, page + num_new)
            page += num_new
        run(table, chosen)


@pytest.mark.parametrize("seed", range(4))
def test_sequences_of_a_scheduler_that_preempts_and_shares(seed):
    dice = random.Random(seed)
    limits = Limits(5, 24, 64, 4)
    scheduler = Scheduler(limits, 22, True, 1000)
    table = PageTable(limits, CPU, Ledger())
    prompts = [[dice.randrange(9) for _ in range(length)] for length in (1, 9, 17, 40)]
    for index in range(30):
        ids = list(dice.choice(prompts))
        scheduler.add(Sequence(index, ids, len(ids), SamplingParams(), seed=0, max_tokens=dice.choice([1, 20, 24])))
    while scheduler.has_work:
        step = scheduler.schedule()
        run(table, [item.sequence for item in step.scheduled])
        scheduler.complete(step, [dice.randrange(9) if item.samples else None for item in step.scheduled])
        for item in step.scheduled:
            if item.sequence.num_output_tokens == item.sequence.max_tokens or dice.random() < 0.01:
                scheduler.finish(item.sequence)
    assert scheduler.num_preemptions > 0
    assert scheduler.num_prefix_hit_tokens > 0


SIZES = (1, 2, LISTED_PAGES - 1, LISTED_PAGES, LISTED_PAGES + 1, 60)


@pytest.mark.parametrize("num_grown", [1, MAX_SINGLE_COPIES, MAX_SINGLE_COPIES + 1, 9])
@pytest.mark.parametrize("size", SIZES)
def test_only_what_is_new_is_sent(num_grown, size):
    table = table_of(9, 100)
    everybody = [sequence(index, range(100 * index, 100 * index + 20 + index)) for index in range(9)]
    rows = run(table, everybody)
    table.table_NP.fill_(NEVER_SENT)
    known = [len(own.pages) for own in everybody]
    for own in everybody[:num_grown]:
        own.pages += range(5000, 5000 + size)
    assert table.rows(everybody) == rows
    for row, own, num_known in zip(rows, everybody, known, strict=True):
        rest = 100 - len(own.pages)
        expected = [NEVER_SENT] * num_known + own.pages[num_known:] + [NEVER_SENT] * rest
        assert table.table_NP[row].tolist() == expected


@pytest.mark.parametrize("sizes", [SIZES, SIZES * 4, (1,) * 30 + (64,), (LISTED_PAGES,) * 40], ids=str)
def test_long_and_short_ones_together_fill_every_row(sizes):
    table = table_of(len(sizes), 64)
    ids = iter(range(10**6))
    everybody = [sequence(index, [next(ids) for _ in range(size)]) for index, size in enumerate(sizes)]
    run(table, everybody)
    random.Random(0).shuffle(everybody)
    run(table, everybody)


def test_the_longest_unused_row_is_given_away():
    table = table_of(3)
    a, b, c, d = (sequence(index, [10 * index, 10 * index + 1]) for index in range(4))
    row_a, row_b, row_c = run(table, [a, b, c])
    run(table, [a])
    run(table, [b])
    table.table_NP[[row_a, row_b]] = NEVER_SENT
    assert table.rows([d]) == [row_c]
    assert table.rows([b, a]) == [row_b, row_a]
    assert table.table_NP[row_a, 0] == table.table_NP[row_b, 0] == NEVER_SENT
    assert run(table, [c]) == [row_c]  # d is the longest unused now, and c is sent again


def test_nobody_in_a_step_loses_its_row_to_another():
    table = table_of(3)
    old = [sequence(index, [index]) for index in range(3)]
    run(table, old)
    new = [sequence(index, [index]) for index in range(3, 5)]
    run(table, [*new, old[0]])  # the longest unused of all comes last
    run(table, [old[1], old[0], old[2]])


def test_preempted_and_back_with_as_many_pages():
    table = table_of()
    own = sequence(0, [1, 2, 3])
    (row,) = run(table, [own])
    preempt(own)
    own.pages = [4, 5, 6]
    assert run(table, [own]) == [row]
    preempt(own)
    own.pages = [7]
    assert run(table, [own]) == [row]


def test_a_step_of_nobody():
    assert table_of().rows([]) == []


@pytest.mark.parametrize("num_grown", [1, MAX_SINGLE_COPIES + 1])
def test_what_was_interrupted_is_sent_again(monkeypatch, num_grown):
    table = table_of(8)
    everybody = [sequence(index, [index]) for index in range(num_grown)]
    run(table, everybody)
    for own in everybody:
        own.pages.append(100 + own.sequence_id)

    def interrupt(self, ranges):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(MirroredTensor, "send", interrupt)
        with pytest.raises(KeyboardInterrupt):
            table.rows(everybody)
    run(table, everybody)


def test_more_sequences_than_rows_is_a_mistake():
    with pytest.raises(AssertionError, match="3 sequences, 2 rows"):
        table_of(2).rows([sequence(index, [index]) for index in range(3)])


def test_more_pages_than_the_longest_context_has_is_a_mistake():
    with pytest.raises(AssertionError, match="from 0 pages to 9"):
        table_of(2, 8).rows([sequence(0, range(9))])


def test_pages_that_become_fewer_are_a_mistake():
    table = table_of()
    own = sequence(0, [1, 2, 3])
    run(table, [own])
    own.pages.pop()
    with pytest.raises(AssertionError, match="from 3 pages to 2"):
        table.rows([own])


@pytest.mark.parametrize("side", ["mirror", "table"])
def test_check_finds_a_wrong_page(side):
    table = table_of()
    own = sequence(0, [1, 2, 3])
    (row,) = run(table, [own])
    (table.table_NP if side == "table" else table._table.host)[row, 1] = 7
    with pytest.raises(AssertionError, match=side):
        table.check([own])


def test_what_is_held_is_what_was_planned():
    limits, ledger = Limits(3, 64, 1000, 16), Ledger()
    table = PageTable(limits, CPU, ledger)
    planned = {term.owner: term.num_bytes for term in batch_terms(limits, "cuda") if "page" in term.owner}
    assert {entry.owner: entry.num_bytes for entry in ledger} == planned
    assert table.table_NP.dtype == torch.int32
    assert table.table_NP.shape == (3, 63)
    assert table.table_NP.nbytes + table._updates.tensor.nbytes == sum(planned.values())


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_no_allocation_and_no_synchronization_on_a_gpu(device):
    table = table_of(64, 300, device)
    dice = random.Random(0)
    people = [sequence(index, [dice.randrange(10**6)]) for index in range(100)]
    address = table.table_NP.data_ptr()
    run(table, people[:64])
    torch.cuda.synchronize()
    num_allocations = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(200):
            chosen = dice.sample(people, dice.choice([1, 2, 8, 64]))
            for own in chosen:
                if len(own.pages) > 200 or dice.random() < 0.05:
                    preempt(own)
                num_new = dice.choice([0, 0, 1, 1, 20, 60]) or (not own.pages)
                own.pages += [dice.randrange(10**6) for _ in range(num_new)]
            table.rows(chosen)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == num_allocations
    table.check(chosen)
    assert table.table_NP.data_ptr() == address
    run(table, people[:64])


@pytest.mark.gpu
def test_a_host_far_ahead_of_the_device_spoils_nothing(device):
    table = table_of(16, 64, device)
    people = [sequence(index, [1000 * index]) for index in range(40)]
    run(table, people[:16])
    seen, expected = [], []
    dice = random.Random(0)
    for step in range(12):
        torch.cuda._sleep(10_000_000)
        chosen = dice.sample(people, 16)
        for own in chosen:
            own.pages += [1000 * own.sequence_id + step + 1] * dice.choice([0, 1, 3])
        rows = table.rows(chosen)
        seen.append(table.table_NP.clone())
        expected.append([(row, list(own.pages)) for row, own in zip(rows, chosen, strict=True)])
    for copy, step in zip(seen, expected, strict=True):
        held = copy.tolist()
        assert all(held[row][: len(pages)] == pages for row, pages in step)
