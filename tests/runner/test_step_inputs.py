""""""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.cache.chunks import ChunkShape
from holdfast.cache.groups import HOLE, CacheGroup
from holdfast.config import Limits
from holdfast.engine.scheduler import Scheduler
from holdfast.memory.arena import MirroredTensor
from holdfast.memory.ledger import Ledger
from holdfast.planning.terms import LISTED_PAGES, batch_terms
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.sequence import LiveStep, ScheduledSequence, Sequence
from holdfast.runner.step_inputs import MAX_GAP_BYTES, MAX_SINGLE_COPIES, BatchBuffers, GroupTable, PageTable

CPU = torch.device("cpu")
NEVER_SENT = -99


def table_of(max_num_seqs=4, max_num_pages=64, device=CPU):
    return PageTable(Limits(max_num_seqs, 64, max_num_pages * 4, 4), device, Ledger())


def sequence(sequence_id, pages=()):
    return Sequence(sequence_id, [1], 1, SamplingParams(), seed=0, max_tokens=8, tables=[list(pages)])


def preempt(victim):
    victim.tables = [[]]
    victim.num_preemptions += 1


def run(table, sequences):
    """rows(), and everything that must hold after it, seen from outside too."""
    rows = table.rows(sequences)
    table.check(sequences)
    assert len(set(rows)) == len(rows) == len(sequences)
    held = table.tables[0].tolist()
    for row, own in zip(rows, sequences, strict=True):
        assert held[row][: len(own.tables[0])] == own.tables[0]
    return rows


@settings(max_examples=40)
@given(data=st.data())
def test_page_table_matches_plain_lists_over_any_steps(data):
    max_num_seqs, max_num_pages = data.draw(st.integers(1, 7)), data.draw(st.sampled_from([1, 5, 40]))
    table = table_of(max_num_seqs, max_num_pages)
    people = [sequence(index) for index in range(max_num_seqs + 4)]
    page = 0
    for _ in range(data.draw(st.integers(1, 12))):
        chosen = data.draw(st.lists(st.sampled_from(people), unique=True, max_size=max_num_seqs))
        for own in chosen:
            if data.draw(st.integers(0, 5)) == 0:
                preempt(own)
            least = 0 if own.tables[0] else 1
            num_new = data.draw(st.sampled_from([0, 1, 2, LISTED_PAGES, LISTED_PAGES + 1, max_num_pages]))
            num_new = min(max(least, num_new), max_num_pages - len(own.tables[0]))
            own.tables[0] += range(page, page + num_new)
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
    while scheduler.num_waiting or scheduler.num_running:
        step = scheduler.schedule()
        run(table, [item.sequence for item in step.scheduled])
        scheduler.complete(step, [(dice.randrange(9),) if item.samples else () for item in step.scheduled])
        for item in step.scheduled:
            if item.sequence.num_output_tokens == item.sequence.max_tokens or dice.random() < 0.01:
                scheduler.finish(item.sequence)
    assert scheduler.num_preemptions > 0
    assert scheduler.num_prefix_hit_tokens > 0


SIZES = (1, 2, LISTED_PAGES - 1, LISTED_PAGES, LISTED_PAGES + 1, 60)


@pytest.mark.parametrize("num_grown", [1, MAX_SINGLE_COPIES, MAX_SINGLE_COPIES + 1, 9])
@pytest.mark.parametrize("size", SIZES)
def test_page_table_sends_only_new_pages(num_grown, size):
    table = table_of(9, 100)
    everybody = [sequence(index, range(100 * index, 100 * index + 20 + index)) for index in range(9)]
    rows = run(table, everybody)
    table.tables[0].fill_(NEVER_SENT)
    known = [len(own.tables[0]) for own in everybody]
    for own in everybody[:num_grown]:
        own.tables[0] += range(5000, 5000 + size)
    assert table.rows(everybody) == rows
    for row, own, num_known in zip(rows, everybody, known, strict=True):
        rest = 100 - len(own.tables[0])
        expected = [NEVER_SENT] * num_known + own.tables[0][num_known:] + [NEVER_SENT] * rest
        assert table.tables[0][row].tolist() == expected


@pytest.mark.parametrize("sizes", [SIZES, SIZES * 4, (1,) * 30 + (64,), (LISTED_PAGES,) * 40], ids=str)
def test_long_and_short_ones_together_fill_every_row(sizes):
    table = table_of(len(sizes), 64)
    ids = iter(range(10**6))
    everybody = [sequence(index, [next(ids) for _ in range(size)]) for index, size in enumerate(sizes)]
    run(table, everybody)
    random.Random(0).shuffle(everybody)
    run(table, everybody)


def test_page_table_reuses_least_recently_used_row():
    table = table_of(3)
    a, b, c, d = (sequence(index, [10 * index, 10 * index + 1]) for index in range(4))
    row_a, row_b, row_c = run(table, [a, b, c])
    run(table, [a])
    run(table, [b])
    table.tables[0][[row_a, row_b]] = NEVER_SENT
    assert table.rows([d]) == [row_c]
    assert table.rows([b, a]) == [row_b, row_a]
    assert table.tables[0][row_a, 0] == table.tables[0][row_b, 0] == NEVER_SENT
    assert run(table, [c]) == [row_c]  # d is the longest unused now, and c is sent again


def test_none_in_a_step_loses_its_row_to_another():
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
    own.tables[0] = [4, 5, 6]
    assert run(table, [own]) == [row]
    preempt(own)
    own.tables[0] = [7]
    assert run(table, [own]) == [row]


def test_page_table_step_without_sequences_has_no_rows():
    assert table_of().rows([]) == []


@pytest.mark.parametrize("num_grown", [1, MAX_SINGLE_COPIES + 1])
def test_page_table_interrupted_send_is_repeated(monkeypatch, num_grown):
    table = table_of(8)
    everybody = [sequence(index, [index]) for index in range(num_grown)]
    run(table, everybody)
    for own in everybody:
        own.tables[0].append(100 + own.sequence_id)

    def interrupt(self, ranges):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(MirroredTensor, "send", interrupt)
        with pytest.raises(KeyboardInterrupt):
            table.rows(everybody)
    run(table, everybody)


def test_page_table_more_sequences_than_rows_raises():
    with pytest.raises(AssertionError, match="3 sequences, 2 rows"):
        table_of(2).rows([sequence(index, [index]) for index in range(3)])


def test_page_table_more_pages_than_longest_context_raises():
    with pytest.raises(AssertionError, match="from 0 pages to 9"):
        table_of(2, 8).rows([sequence(0, range(9))])


def test_pages_that_become_fewer_are_a_mistake():
    table = table_of()
    own = sequence(0, [1, 2, 3])
    run(table, [own])
    own.tables[0].pop()
    with pytest.raises(AssertionError, match="from 3 pages to 2"):
        table.rows([own])


@pytest.mark.parametrize("side", ["mirror", "table"])
def test_check_finds_a_wrong_page(side):
    table = table_of()
    own = sequence(0, [1, 2, 3])
    (row,) = run(table, [own])
    (table.tables[0] if side == "table" else table.groups[0].table.host)[row, 1] = 7
    with pytest.raises(AssertionError, match=side):
        table.check([own])


def test_page_table_holds_planned_bytes():
    limits, ledger = Limits(3, 64, 1000, 16), Ledger()
    table = PageTable(limits, CPU, ledger)
    planned = {term.owner: term.num_bytes for term in batch_terms(limits, "cuda") if "page" in term.owner}
    assert {entry.owner: entry.num_bytes for entry in ledger} == planned
    assert table.tables[0].dtype == torch.int32
    assert table.tables[0].shape == (3, 63)
    assert table.tables[0].nbytes + table.groups[0].updates.tensor.nbytes == sum(planned.values())


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_page_table_growth_on_gpu_neither_allocates_nor_waits(device):
    table = table_of(64, 300, device)
    dice = random.Random(0)
    people = [sequence(index, [dice.randrange(10**6)]) for index in range(100)]
    address = table.tables[0].data_ptr()
    run(table, people[:64])
    torch.cuda.synchronize()
    num_allocations = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(200):
            chosen = dice.sample(people, dice.choice([1, 2, 8, 64]))
            for own in chosen:
                if len(own.tables[0]) > 200 or dice.random() < 0.05:
                    preempt(own)
                num_new = dice.choice([0, 0, 1, 1, 20, 60]) or (not own.tables[0])
                own.tables[0] += [dice.randrange(10**6) for _ in range(num_new)]
            table.rows(chosen)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == num_allocations
    table.check(chosen)
    assert table.tables[0].data_ptr() == address
    run(table, people[:64])


@pytest.mark.gpu
def test_page_table_host_far_ahead_keeps_device_rows(device):
    table = table_of(16, 64, device)
    people = [sequence(index, [1000 * index]) for index in range(40)]
    run(table, people[:16])
    seen, expected = [], []
    dice = random.Random(0)
    for step in range(12):
        torch.cuda._sleep(10_000_000)
        chosen = dice.sample(people, 16)
        for own in chosen:
            own.tables[0] += [1000 * own.sequence_id + step + 1] * dice.choice([0, 1, 3])
        rows = table.rows(chosen)
        seen.append(table.tables[0].clone())
        expected.append([(row, list(own.tables[0])) for row, own in zip(rows, chosen, strict=True)])
    for copy, step in zip(seen, expected, strict=True):
        held = copy.tolist()
        assert all(held[row][: len(pages)] == pages for row, pages in step)


BOTH = pytest.mark.parametrize("is_shared", [True, False], ids=["shared", "mirrored"])


def limits(max_num_batched_tokens=64, page_tokens=4):
    return Limits(8, max_num_batched_tokens, 128, page_tokens)


def buffers_of(is_shared, max_num_batched_tokens=64, page_tokens=4, device=CPU):
    return BatchBuffers(limits(max_num_batched_tokens, page_tokens), device, Ledger(), is_shared=is_shared)


def scheduled(start, num_new_tokens, pages, num_tokens=None, first_token=100, sequence_id=None):
    token_ids = list(range(first_token, first_token + (num_tokens or start + num_new_tokens)))
    sequence_id = hash((start, tuple(pages))) if sequence_id is None else sequence_id
    sequence = Sequence(sequence_id, token_ids, len(token_ids), SamplingParams(), seed=0, max_tokens=8, tables=[pages])
    return ScheduledSequence.of(sequence, start, num_new_tokens)


def tensors(batch):
    return batch.token_ids_T, batch.positions_T, batch.slots_GT[0]


def plain(step, page_tokens=4):
    """(ids, positions, slots) of the rows of a step, one by one."""
    rows = [(item.sequence, i) for item in step.scheduled for i in range(item.start, item.start + item.num_new_tokens)]
    ids = [sequence.token_ids[i] for sequence, i in rows]
    slots = [sequence.tables[0][i // page_tokens] * page_tokens + i % page_tokens for sequence, i in rows]
    return ids, [i for _, i in rows], slots


@BOTH
def test_batch_buffers_lay_rows_sequence_by_sequence(is_shared):
    buffers = buffers_of(is_shared)
    step = LiveStep((scheduled(0, 6, [9, 2]), scheduled(9, 1, [5, 1, 7], first_token=300), scheduled(3, 2, [0, 4])))
    batch = buffers.fill(step, [5, 6, 8])
    assert batch.token_ids_T.tolist() == [100, 101, 102, 103, 104, 105, 309, 103, 104]
    assert batch.positions_T.tolist() == [0, 1, 2, 3, 4, 5, 9, 3, 4]
    assert batch.slots_GT[0].tolist() == [36, 37, 38, 39, 8, 9, 29, 3, 16]
    assert batch.logits is not None
    assert batch.logits.rows_R.tolist() == [5, 6, 8]
    assert [(rows.row_start, rows.num_rows, rows.start, rows.tables[0]) for rows in batch.logits.sequences] == [
        (0, 1, 5, [9, 2]),
        (1, 1, 9, [5, 1, 7]),
        (2, 1, 4, [0, 4]),
    ]
    assert [(rows.row_start, rows.num_rows, rows.start, rows.end) for rows in batch.sequences] == [
        (0, 6, 0, 6),
        (6, 1, 9, 10),
        (7, 2, 3, 5),
    ]
    assert batch.sequences[1].tables[0] is step.scheduled[1].sequence.tables[0]
    assert batch.num_rows == 9


@pytest.mark.parametrize("page_tokens", [1, 4, 16, 256])
@pytest.mark.parametrize("seed", range(10))
def test_slots_of_any_part_of_any_sequence(page_tokens, seed):
    dice = random.Random(seed)
    buffers = buffers_of(seed % 2 == 0, 200, page_tokens)
    items, expected = [], []
    for _ in range(3):
        start, count = dice.choice([0, 3, 4, 50]), dice.choice([1, 2, 4, 5, 50])
        num_pages = min(-(-(start + count) // page_tokens) + 2, -(-128 // page_tokens))
        pages = dice.sample(range(1000), num_pages)
        items.append(scheduled(start, count, pages))
        expected += [pages[i // page_tokens] * page_tokens + i % page_tokens for i in range(start, start + count)]
    batch = buffers.fill(LiveStep(tuple(items)), [0])
    assert batch.slots_GT[0].tolist() == expected


@BOTH
def test_batch_buffers_all_rows_wanted_need_no_list(is_shared):
    buffers = buffers_of(is_shared)
    assert buffers.fill(LiveStep((scheduled(0, 3, [0]),)), [0, 1, 2]).logits is None
    assert buffers.fill(LiveStep((scheduled(7, 1, [0, 1]), scheduled(0, 1, [2]))), [0, 1]).logits is None
    batch = buffers.fill(LiveStep((scheduled(0, 3, [0]),)), [0, 1, 2], num_padded_rows=8, num_padded_logit_rows=4)
    assert batch.logits is None
    assert batch.num_rows == 8


@BOTH
def test_batch_buffers_no_row_wanted_gives_empty_list(is_shared):
    buffers, step = buffers_of(is_shared), LiveStep((scheduled(0, 3, [0], num_tokens=9),))
    batch = buffers.fill(step, [])
    assert batch.logits is not None
    assert batch.logits.rows_R.tolist() == []
    padded = buffers.fill(step, [], 4, 2)
    assert padded.logits is not None
    assert padded.logits.rows_R.tolist() == [0, 0]
    assert padded.logits.sequences == ()


@BOTH
def test_batch_buffers_padding_only_has_no_sequences(is_shared):
    batch = buffers_of(is_shared).fill(LiveStep(()), [], num_padded_rows=5)
    assert [tensor.tolist() for tensor in tensors(batch)] == [[0] * 5, [0] * 5, [-1] * 5]
    assert batch.sequences == ()


@BOTH
def test_padding_hides_what_a_larger_step_left(is_shared):
    buffers = buffers_of(is_shared)
    buffers.fill(LiveStep((scheduled(0, 64, list(range(16))),)), list(range(1, 64)))
    step = LiveStep((scheduled(0, 6, [9, 2]), scheduled(9, 1, [5, 1, 7])))
    batch = buffers.fill(step, [5, 6], num_padded_rows=16, num_padded_logit_rows=4)
    ids, positions, slots = plain(step)
    assert batch.token_ids_T.tolist() == ids + [0] * 9
    assert batch.positions_T.tolist() == positions + [0] * 9
    assert batch.slots_GT[0].tolist() == slots + [-1] * 9
    assert batch.logits is not None
    assert batch.logits.rows_R.tolist() == [5, 6, 0, 0]
    assert [rows.row_start for rows in batch.logits.sequences] == [0, 1]
    assert [rows.num_rows for rows in batch.sequences] == [6, 1]


@pytest.mark.parametrize(("num_padded_rows", "num_padded_logit_rows"), [(6, 2), (65, 2), (8, 1), (8, 65)])
def test_batch_buffers_invalid_padding_raises(num_padded_rows, num_padded_logit_rows):
    step = LiveStep((scheduled(0, 7, [9, 2]),))
    with pytest.raises(AssertionError, match="num_rows"):
        buffers_of(is_shared=True).fill(step, [5, 6], num_padded_rows, num_padded_logit_rows)


@BOTH
@given(data=st.data())
def test_batch_buffers_any_consecutive_steps_match_plain_lists(is_shared, data):
    max_rows, page_tokens = data.draw(st.sampled_from([(40, 4), (64, 1), (33, 16)]))
    buffers = buffers_of(is_shared, max_rows, page_tokens)
    addresses = set()
    everybody = [(index, list(range(100 * index, 100 * index + 128 // page_tokens))) for index in range(11)]
    for _ in range(data.draw(st.integers(1, 6))):
        items, num_rows = [], 0
        for index, pages in data.draw(st.lists(st.sampled_from(everybody), unique_by=lambda own: own[0], max_size=8)):
            count = data.draw(st.sampled_from([1, 1, 1, 2, 7, 30]))
            if num_rows + count > max_rows:
                break
            start = data.draw(st.integers(0, 128 - count))
            items.append(scheduled(start, count, pages, 128, sequence_id=index, first_token=1000 * index))
            num_rows += count
        step = LiveStep(tuple(items))
        wanted = [row for row in range(num_rows) if data.draw(st.booleans())]
        padded = data.draw(st.none() | st.integers(num_rows, max_rows))
        padded_wanted = data.draw(st.none() | st.integers(len(wanted), max_rows))
        batch = buffers.fill(step, wanted, padded, padded_wanted)
        num_padding = (num_rows if padded is None else padded) - num_rows
        expected = plain(step, page_tokens)
        for tensor, own, padding in zip(tensors(batch), expected, (0, 0, -1), strict=True):
            assert tensor.tolist() == own + [padding] * num_padding
        owners = [rows for rows in batch.sequences for _ in range(rows.num_rows)]
        assert (batch.logits is None) == (len(wanted) == num_rows)
        if batch.logits is not None:
            assert batch.logits.rows_R.tolist() == wanted + [0] * ((padded_wanted or len(wanted)) - len(wanted))
            singles = batch.logits.sequences
            assert [(own.row_start, own.num_rows) for own in singles] == [(index, 1) for index in range(len(wanted))]
            assert [own.start for own in singles] == [expected[1][row] for row in wanted]
            assert [own.tables[0] for own in singles] == [owners[row].tables[0] for row in wanted]
            assert [own.table_row for own in singles] == [owners[row].table_row for row in wanted]
        for own in batch.sequences:
            if not is_shared:
                assert batch.page_tables[0][own.table_row, : len(own.tables[0])].tolist() == own.tables[0]
            else:
                assert (batch.page_tables, own.table_row) == (None, -1)
        addresses.add(tuple(tensor.data_ptr() for tensor in tensors(batch)) if batch.num_rows else ())
    assert len(addresses - {()}) <= 1


@BOTH
def test_batch_buffers_keep_addresses_and_clear_last_step(is_shared):
    buffers = buffers_of(is_shared)
    addresses = set()
    dice = random.Random(0)
    for _ in range(50):
        count = dice.choice([1, 2, 17, 64])
        step = LiveStep((scheduled(0, count, list(range(16)), num_tokens=70),))
        batch = buffers.fill(step, [0] if count > 1 else [], dice.choice([None, 64]), dice.choice([None, 5]))
        assert batch.logits is not None
        pointers = [tensor.data_ptr() for tensor in (*tensors(batch), batch.logits.rows_R) if tensor.numel()]
        addresses.add(tuple(pointers) if len(pointers) == 4 else (*pointers, buffers.inputs.tensor[-1].data_ptr()))
        assert batch.positions_T.tolist() == [*range(count)] + [0] * (batch.num_rows - count)
    assert len(addresses) == 1


@BOTH
def test_batch_buffers_largest_step_fits(is_shared):
    buffers = buffers_of(is_shared)
    batch = buffers.fill(LiveStep((scheduled(0, 64, list(range(16))),)), list(range(63)))
    assert batch.num_rows == 64
    assert batch.logits is not None
    assert batch.logits.rows_R.tolist() == list(range(63))


@pytest.mark.parametrize("max_num_batched_tokens", [1, 64, 100, 2048])
def test_buffers_hold_what_was_planned(max_num_batched_tokens):
    for is_shared in (True, False):
        ledger = Ledger()
        bounds = limits(max_num_batched_tokens)
        buffers = BatchBuffers(bounds, CPU, ledger, is_shared=is_shared)
        planned = {term.owner: term.num_bytes for term in batch_terms(bounds, "cpu" if is_shared else "cuda")}
        assert {entry.owner: entry.num_bytes for entry in ledger} == planned
        held = buffers.inputs.tensor.untyped_storage().nbytes()
        assert held == sum(num_bytes for owner, num_bytes in planned.items() if "page" not in owner)
        num_buffers = 4 if is_shared else 5
        assert num_buffers * 8 * max_num_batched_tokens <= held < num_buffers * (8 * max_num_batched_tokens + 256)
        address = buffers.inputs.host.__array_interface__["data"][0]
        assert (address == buffers.inputs.tensor.data_ptr()) is is_shared
        assert all(
            (buffer.data_ptr() - buffers.inputs.tensor.data_ptr()) % 256 == 0 for buffer in buffers.inputs.tensor
        )


def test_batch_buffers_batch_ignores_later_host_writes():
    buffers = buffers_of(is_shared=False)
    step = LiveStep((scheduled(0, 6, [9, 2]),))
    batch = buffers.fill(step, [5])
    buffers.inputs.host[:] = 77
    assert [tensor.tolist() for tensor in tensors(batch)] == list(plain(step))
    assert batch.logits is not None
    assert batch.logits.rows_R.tolist() == [5]


def sent_ranges(buffers, step, *arguments):
    """Places of the packed memory that a step brought to the device, as [start, end) of each run."""
    buffers.inputs.tensor.fill_(NEVER_SENT)
    buffers.fill(step, *arguments)
    was_sent = [False, *(buffers.inputs.tensor.view(-1) != NEVER_SENT).tolist(), False]
    edges = [place for place in range(1, len(was_sent)) if was_sent[place] != was_sent[place - 1]]
    return [(start - 1, end - 1) for start, end in zip(edges[::2], edges[1::2], strict=True)]


def test_batch_buffers_narrow_gaps_send_one_copy():
    step = LiveStep((scheduled(0, 2, [3]), scheduled(5, 1, [0, 1])))
    assert sent_ranges(buffers_of(False, 8192), step, [0, 1, 2]) == [(0, 3 * 8192 + 3)]
    assert sent_ranges(buffers_of(False, 8192), step, [1, 2], 16, 4) == [(0, 4 * 8192 + 4)]


def test_batch_buffers_wide_gaps_send_separate_copies():
    n = MAX_GAP_BYTES // 2 // 8 + 32
    step = LiveStep((scheduled(0, 2, [3]), scheduled(5, 1, [0, 1])))
    rows = [(start, start + 16) for start in (0, n, 2 * n)]
    assert sent_ranges(buffers_of(False, n), step, [0, 1, 2], 16) == [*rows, (3 * n, 3 * n + 16)]
    assert sent_ranges(buffers_of(False, n), step, [1, 2], 16, 4) == [*rows, (3 * n, 3 * n + 4), (4 * n, 4 * n + 4)]


def coming(slot: int, num_known: int, pages: list[int], sequence_id: int = 0) -> ScheduledSequence:
    """The token behind the known ones, which a step in flight is choosing."""
    sequence = scheduled(num_known - 1, 1, pages, sequence_id=sequence_id).sequence
    sequence.slot = slot
    return ScheduledSequence(sequence, num_known, 1, samples=True)


def test_batch_buffers_token_in_flight_is_named_by_slot():
    buffers = buffers_of(is_shared=False)
    known = scheduled(9, 1, [5, 1, 7], sequence_id=1)
    batch = buffers.fill(LiveStep((coming(3, 6, [9, 2]), known, coming(0, 4, [8, 6], 2))), [0, 1, 2], 4)
    assert batch.token_ids_T.tolist() == [-4, known.sequence.token_ids[9], -1, 0]
    assert batch.positions_T.tolist() == [6, 9, 4, 0]


def test_proposals_are_the_last_of_the_rows():
    sequence = scheduled(6, 1, [9, 2, 4]).sequence
    step = LiveStep((ScheduledSequence(sequence, 6, 4, samples=True, proposals=(50, 51, 52)),))
    for is_shared in (True, False):
        batch = buffers_of(is_shared).fill(step, [0, 1, 2, 3])
        assert batch.token_ids_T.tolist() == [sequence.token_ids[6], 50, 51, 52]
        assert batch.positions_T.tolist() == [6, 7, 8, 9]
        assert batch.slots_GT[0].tolist() == [10, 11, 16, 17]


def test_batch_buffers_invalid_token_in_flight_raises():
    buffers = buffers_of(is_shared=False)
    far, homeless = coming(1, 6, [9, 2]), coming(-1, 6, [9, 2])
    with pytest.raises(AssertionError, match="runs coming=7 of 6 tokens"):
        buffers.fill(LiveStep((ScheduledSequence(far.sequence, 7, 1, samples=True),)), [0])
    with pytest.raises(AssertionError, match="has no slot"):
        buffers.fill(LiveStep((homeless,)), [0])


def test_slots_that_keep_tokens_are_those_of_wanted_rows():
    buffers = buffers_of(is_shared=False)
    step = LiveStep((scheduled(0, 6, [9, 2]), scheduled(9, 1, [5, 1, 7], sequence_id=1)))
    assert buffers.keep_slots_T is not None
    buffers.keep_slots_T.fill_(77)
    buffers.fill(step, [5, 6], 16, 4, [2, 0])
    assert buffers.keep_slots_T[:4].tolist() == [2, 0, -1, -1]
    decode = LiveStep((scheduled(9, 1, [5, 1, 7], sequence_id=1),))
    buffers.fill(decode, [0], 4, 4, [3])
    assert buffers.keep_slots_T[:4].tolist() == [3, -1, -1, -1]
    buffers.fill(step, [5, 6], 16, 4)
    assert buffers.keep_slots_T[:4].tolist() == [-1] * 4
    assert buffers_of(is_shared=True).keep_slots_T is None


@BOTH
def test_batch_buffers_is_listed_lists_all_wanted_rows(is_shared):
    """A graph that lists wanted rows takes steps of which all are."""
    batch = buffers_of(is_shared).fill(LiveStep((scheduled(0, 3, [0]),)), [0, 1, 2], 8, 4, is_listed=True)
    assert batch.logits is not None
    assert batch.logits.rows_R.tolist() == [0, 1, 2, 0]


def growing(dice, num_sequences):
    """Sequences that decode from somewhere on, with the pages they have so far."""
    for index in range(num_sequences):
        num_tokens = dice.randrange(1, 60)
        yield scheduled(
            num_tokens - 1, 1, [dice.randrange(10**6) for _ in range(-(-num_tokens // 4))], sequence_id=index
        )


def one_token_more(item):
    sequence = item.sequence
    sequence.token_ids.append(len(sequence.token_ids))
    if len(sequence.tables[0]) * 4 < len(sequence.token_ids):
        sequence.tables[0].append(7 * len(sequence.token_ids))
    return ScheduledSequence.of(sequence, len(sequence.token_ids) - 1, 1)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_batch_buffers_fill_on_gpu_neither_allocates_nor_waits(device):
    buffers, dice = buffers_of(is_shared=False, device=device), random.Random(0)
    items = list(growing(dice, 20))
    addresses = set()
    buffers.fill(LiveStep((scheduled(0, 6, [9, 2]),)), [5], 8, 4)
    torch.cuda.synchronize()
    num_allocations = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(60):
            chosen = dice.sample(range(20), dice.randrange(1, 9))
            for index in chosen:
                items[index] = one_token_more(items[index])
            chunk = scheduled(0, 20, list(range(5)), num_tokens=21)
            step = LiveStep(tuple(items[index] for index in chosen[:7]) + (chunk,) * dice.randrange(2))
            num_rows = step.num_tokens
            wanted = list(range(min(num_rows, 7)))
            batch = buffers.fill(step, wanted, dice.choice([None, 32]), dice.choice([None, 8]))
            assert batch.page_tables is not None
            addresses.add(tuple(tensor.data_ptr() for tensor in (*tensors(batch), *batch.page_tables)))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == num_allocations
    assert len(addresses) == 1
    assert [tensor.tolist()[:num_rows] for tensor in tensors(batch)] == list(plain(step))


@pytest.mark.gpu
def test_batch_buffers_captured_graph_reads_later_steps(device):
    buffers, dice = buffers_of(is_shared=False, device=device), random.Random(0)
    items = list(growing(dice, 8))
    first = buffers.fill(LiveStep(tuple(items)), list(range(8)), num_padded_rows=8)
    out = torch.zeros(3, 8, dtype=torch.int64, device=device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for row, tensor in enumerate(tensors(first)):
            out[row].copy_(tensor)
    for num_rows in (8, 3, 1, 7):
        items = [one_token_more(item) for item in items]
        step = LiveStep(tuple(items[:num_rows]))
        buffers.fill(step, list(range(num_rows)), num_padded_rows=8)
        graph.replay()
        padding = 8 - num_rows
        expected = [own + [value] * padding for own, value in zip(plain(step), (0, 0, -1), strict=True)]
        assert out.tolist() == expected


@pytest.mark.gpu
def test_batch_buffers_host_far_ahead_keeps_device_batch(device):
    buffers, dice = buffers_of(is_shared=False, device=device), random.Random(0)
    items = list(growing(dice, 8))
    seen, expected = [], []
    for _ in range(10):
        torch.cuda._sleep(10_000_000)
        items = [one_token_more(item) for item in items]
        step = LiveStep(tuple(items))
        batch = buffers.fill(step, list(range(8)))
        seen.append([tensor.clone() for tensor in tensors(batch)])
        expected.append(list(plain(step)))
    assert [[tensor.tolist() for tensor in step] for step in seen] == expected


SHAPES = (ChunkShape(1, 50), ChunkShape(3, 50), ChunkShape(20, 50))
"""For three groups: a page of 1, 3 and 20 chunks."""


def grouped_sequence(sequence_id, *tables):
    return Sequence(sequence_id, [1] * 100, 100, SamplingParams(), seed=0, max_tokens=8, tables=[*map(list, tables)])


def chunks_of(shape, pages):
    numbers = [
        HOLE if page == HOLE else nth * shape.num_pages + page for page in pages for nth in range(shape.chunks_per_page)
    ]
    return dict(enumerate(numbers))


def check_groups(table, sequences, rows):
    table.check(sequences)
    for group, shape in enumerate(SHAPES):
        held = table.tables[group].tolist()
        assert all(0 <= number < shape.chunks_per_page * 50 for row in held for number in row)
        for row, own in zip(rows, sequences, strict=True):
            for chunk, number in chunks_of(shape, own.tables[group]).items():
                assert number == HOLE or held[row][chunk] == number


@settings(max_examples=24)
@given(data=st.data())
def test_tables_of_groups_hold_every_page_and_no_hole(data):
    table = PageTable(Limits(5, 64, 480, 4), CPU, Ledger(), SHAPES)
    people = [grouped_sequence(index, (), (), ()) for index in range(8)]
    for _ in range(data.draw(st.integers(1, 10))):
        chosen = data.draw(st.lists(st.sampled_from(people), unique_by=id, max_size=5))
        for own in chosen:
            if data.draw(st.integers(0, 4)) == 0:
                own.tables = [[], [], []]
                own.num_preemptions += 1
            for group, most in enumerate((120, 40, 6)):
                pages = own.tables[group]
                is_new = not pages
                num_new = data.draw(st.sampled_from([0, 1, 2, most])) or (1 if is_new else 0)
                pages += data.draw(
                    st.lists(st.integers(0, 49), min_size=min(num_new, most - len(pages)), max_size=num_new)
                )[: most - len(pages)]
                # Behind a window pages are holes: in front, and never the newest one.
                if group and data.draw(st.booleans()):
                    for place in range(data.draw(st.integers(0, len(pages) - 1))):
                        pages[place] = HOLE
        check_groups(table, chosen, table.rows(chosen))


def test_page_table_hole_sends_nothing_and_keeps_stale_chunk():
    table = PageTable(Limits(2, 64, 480, 4), CPU, Ledger(), SHAPES)
    own = grouped_sequence(0, [4, 5], [7], [2])
    (row,) = table.rows([own])
    own.tables = [[HOLE, 6, 8], [HOLE, 9], [HOLE, 3]]
    own.num_preemptions += 1
    assert table.rows([own]) == [row]
    assert table.tables[0][row, :3].tolist() == [4, 6, 8]
    assert table.tables[1][row, :6].tolist() == [7, 57, 107, 9, 59, 109]
    with pytest.raises(AssertionError, match="has a hole behind a page"):
        table.rows([grouped_sequence(1, [4, HOLE], [7], [2])])


NEAR_SHAPES = (ChunkShape(1, 50), ChunkShape(1, 50, near_tokens=2, stride=3))


def test_page_table_sends_kept_pages_and_those_behind_their_holes():
    table = PageTable(Limits(2, 64, 480, 4), CPU, Ledger(), NEAR_SHAPES)
    assert [one.shape[1] for one in table.tables] == [120, 240], "a chunk of the near group has 2 tokens"
    own = grouped_sequence(0, [4, 5, 6], [7, 8, HOLE, HOLE, 9])
    (row,) = table.rows([own])
    table.check([own])
    near = table.tables[1][row]
    assert near[[0, 1, 4]].tolist() == [21, 24, 27]
    own.tables[1] += [11, 12]
    table.rows([own])
    table.check([own])
    assert near[:7].tolist() == [21, 24, near[2], near[3], 27, 33, 36]
    only_kept = grouped_sequence(1, [4], [3, 2])
    (other,) = table.rows([only_kept])
    assert table.tables[1][other, :2].tolist() == [9, 6]


@BOTH
def test_rows_of_near_pages_have_their_own_slots(is_shared):
    bounds = limits()
    buffers = BatchBuffers(bounds, CPU, Ledger(), is_shared=is_shared, shapes=NEAR_SHAPES)
    first = grouped_sequence(0, [4, 5, 6], [7, 8, HOLE, HOLE, 9, 10])
    last = grouped_sequence(1, [1, 2], [11, 12, 13])
    step = LiveStep((ScheduledSequence(first, 8, 3, False), ScheduledSequence(last, 4, 1, False)))
    batch = buffers.fill(step, [0])
    assert batch.slots_GT.tolist() == [[24, 25, 26, 8], [27 * 2, 27 * 2 + 1, 30 * 2, 39 * 2]]
    tables = [own.tables for own in batch.sequences]
    assert [list(own[1]) for own in tables] == [[21, 24, HOLE, HOLE, 27, 30], [33, 36, 39]]
    assert [list(own[0]) for own in tables] == [[4, 5, 6], [1, 2]]


def test_tables_of_groups_interrupted_between_two_are_sent_again(monkeypatch):
    table = PageTable(Limits(2, 64, 480, 4), CPU, Ledger(), SHAPES)
    own = grouped_sequence(0, [4], [7], [2])
    table.rows([own])
    own.tables = [[1, 2], [3, 4], [5]]
    own.num_preemptions += 1
    sends = []

    def interrupt(self, growths):
        sends.append(growths)
        if len(sends) == 2:
            raise KeyboardInterrupt
        sent(self, growths)

    sent = GroupTable.send
    with monkeypatch.context() as patch:
        patch.setattr(GroupTable, "send", interrupt)
        with pytest.raises(KeyboardInterrupt):
            table.rows([own])
    check_groups(table, [own], table.rows([own]))


@BOTH
def test_rows_of_a_step_have_a_slot_in_every_group(is_shared):
    bounds = limits()
    buffers = BatchBuffers(bounds, CPU, Ledger(), is_shared=is_shared, shapes=SHAPES)
    first = grouped_sequence(0, [HOLE, HOLE, 9, 2, 6], [HOLE, 5], [7])
    second = grouped_sequence(1, [3], [4], [8])
    step = LiveStep((ScheduledSequence.of(first, 13, 7), ScheduledSequence.of(second, 2, 1)))
    batch = buffers.fill(step, [6], num_padded_rows=9)
    rows = [(first, position) for position in range(13, 20)] + [(second, 2)]
    for group, shape in enumerate(SHAPES):
        expected = [4 * chunks_of(shape, own.tables[group])[i // 4] + i % 4 for own, i in rows]
        assert batch.slots_GT[group].tolist() == [*expected, -1]
        for sequence, own in zip(batch.sequences, (first, second), strict=True):
            assert list(sequence.tables[group]) == [*chunks_of(shape, own.tables[group]).values()]
    assert batch.logits is not None
    assert batch.logits.rows_R.tolist() == [6]
    assert batch.logits.sequences[0].tables is batch.sequences[0].tables
    assert batch.sequences[0].tables[0] is first.tables[0], "a list that needs no work is not copied"
    assert (batch.page_tables is None) is is_shared
    if batch.page_tables is not None:
        assert len(batch.page_tables) == 3


@pytest.mark.parametrize("is_shared", [True, False])
def test_buffers_of_groups_hold_what_was_planned(is_shared):
    ledger, bounds = Ledger(), limits(100)
    chunks = tuple(shape.chunks_per_page for shape in SHAPES)
    buffers = BatchBuffers(bounds, CPU, ledger, is_shared=is_shared, shapes=SHAPES)
    terms = batch_terms(bounds, "cpu" if is_shared else "cuda", chunks)
    assert {entry.owner: entry.num_bytes for entry in ledger} == {term.owner: term.num_bytes for term in terms}
    held = [buffers.inputs.tensor.nbytes]
    if buffers.page_table is not None:
        for group in buffers.page_table.groups:
            held += [group.table_NP.nbytes, group.updates.tensor.nbytes]
    assert sum(held) == ledger.total_bytes
    one = {term.owner: term for term in batch_terms(bounds, "cuda")}
    for term in terms:
        if term.owner in one and "page" not in term.owner:
            assert term == one[term.owner], "the first group is as if it were alone"


def test_slots_of_all_groups_go_in_one_copy():
    buffers = BatchBuffers(limits(8192), CPU, Ledger(), is_shared=False, shapes=SHAPES)
    step = LiveStep((ScheduledSequence.of(grouped_sequence(0, [3, 4], [1], [2]), 0, 5),))
    assert sent_ranges(buffers, step, [4], 8, 1) == [(0, 6 * 8192 + 1)]


def test_page_table_restart_without_preemption_has_new_pages():
    """A step that was never completed may have moved a state on: its sequences get other pages, as many as before."""
    limits = Limits(4, 64, 64, 4)
    groups = (CacheGroup("whole context", 4), CacheGroup("state", 0, state_pages=1))
    scheduler = Scheduler(limits, 30, False, 8, groups=groups)
    table = PageTable(limits, CPU, Ledger(), (ChunkShape(), ChunkShape()))
    people = [Sequence(index, [1] * 8, 8, SamplingParams(), seed=0, max_tokens=8) for index in range(2)]
    for own in people:
        scheduler.add(own)
    scheduler.complete(scheduler.schedule(), [(5,), (6,)])
    table.rows(people)
    gone, own = people
    before = own.tables
    scheduler.schedule()  # and never completed
    scheduler.finish(gone)
    scheduler.forget_steps()
    scheduler.schedule()
    assert own.num_preemptions == 0
    assert own.tables[0][:2] != before[0][:2]
    table.rows([own])
    table.check([own])
