"""A step's work as tiles, made in host memory here, whatever runs it: over plain pages, and over quantized ones."""

from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from attention.work_lists import MILLION, ListCase, Ranges, check_work, dummy_batch
from for_each import for_each
from holdfast.attention import tile_scheduler
from holdfast.attention.backend import SequenceRows
from holdfast.attention.declarations import MAX_PARTIALS, StepBounds, max_partials
from holdfast.attention.tile_scheduler import StepRows
from holdfast.kernels.latent.latent_geometry import head_blocks, latent_geometry
from holdfast.memory.arena import MirroredTensor

PLAIN, QUANTIZED = ListCase(), ListCase(quantized=True)
BOTH = pytest.mark.parametrize("case", [PLAIN, QUANTIZED], ids=["plain", "quantized"])


@st.composite
def cases(draw):
    """Lists, and a step for them: up to 64 sequences of up to a million tokens, decoding and not."""
    group = draw(st.sampled_from([1, 2, 4, 7, 8, 16, 71, 128]))
    num_kv_heads = draw(st.sampled_from([1, 2, 8]))
    max_model_len = draw(st.sampled_from([16, 256, 257, 1000, 40960, MILLION]))
    bounds = StepBounds(draw(st.integers(1, 64)), draw(st.integers(1, 2048)), 16)
    case = ListCase(
        group * num_kv_heads,
        num_kv_heads,
        draw(st.sampled_from([None, 1, 5, 1024, 4096])),
        max_model_len,
        bounds,
        draw(st.sampled_from([1, 2, 40, 132])),
        draw(st.booleans()),
        draw(st.booleans()),
    )
    rows: list[tuple[int, int]] = []
    left = bounds.max_num_rows
    counts = st.one_of(st.just(1), st.just(1), st.integers(1, 20), st.integers(1, 2048))
    for count in draw(st.lists(counts, max_size=bounds.max_num_seqs)):
        count = min(count, left, max_model_len)
        if count == 0:
            break
        longest = max_model_len - count
        rows.append((draw(st.one_of(st.integers(0, longest), st.just(longest), st.just(0))), count))
        left -= count
    return case, rows, draw(st.integers(0, min(left, 8)))


@hypothesis_settings(max_examples=250)
@given(made=cases(), captured=st.booleans())
def test_tile_scheduler_covers_each_visible_token_once(made, captured):
    case, rows, num_padding = made
    batch = dummy_batch(rows, num_padding)
    check_work(case, batch, case.work(batch, captured), captured)


@hypothesis_settings(max_examples=60)
@given(made=cases(), num_sms=st.sampled_from([1, 132]))
def test_tile_scheduler_batch_invariant_split_by_own_length(made, num_sms):
    case, rows, num_padding = made
    case = replace(case, batch_invariant=True, num_sms=num_sms)
    together = case.ranges(rows, num_padding)
    row = 0
    for start, count in rows[:12]:
        alone = replace(case, num_sms=40).ranges([(start, count)])
        assert [together[row + i] for i in range(count)] == [alone[i] for i in range(count)]
        row += count


@hypothesis_settings(max_examples=60)
@given(
    data=st.data(), window=st.sampled_from([None, 1, 40, 128, 1000]), heads=st.sampled_from([(64, 8), (8, 8), (16, 1)])
)
@pytest.mark.parametrize("kind", ["plain", "quantized"])
def test_tile_scheduler_batch_invariant_prompt_ignores_cuts(kind, data, window, heads):
    """Its rows are in large tiles, in one split, whose blocks lie where every row's do; rows behind it are in small ones."""
    case = PLAIN if kind == "plain" else QUANTIZED
    case = replace(case, num_heads=heads[0], num_kv_heads=heads[1], window=window, batch_invariant=True)
    num_tokens, block = data.draw(st.integers(1, 600)), case.geometry.block_tokens
    cuts = sorted({0, num_tokens, *data.draw(st.lists(st.integers(0, num_tokens), max_size=6))})
    for start, end in pairwise(cuts):
        batch = dummy_batch([(start + 5000, 1), (start, end - start, True), (end, 1)])
        work = case.work(batch)
        check_work(case, batch, work)
        num_small, num_large = work.tiles_X8[0, :2].tolist()
        small, large = work.tiles_X8[1 : 1 + num_small], work.tiles_X8[1 + num_small : 1 + num_small + num_large]
        assert set(small[:, 1].tolist()) == {0, 1 + end - start}, "rows behind prompts"
        assert sorted(large[:, 1].tolist()) == list(range(1, 1 + end - start, case.geometry.large_rows))
        assert (large[:, 6] < 0).all(), "a row of a prompt is split"
        assert not (large[:, 4] % block).any(), "blocks of tokens begin elsewhere in other cuts"


def items_and_longest(case: ListCase, ranges: Ranges) -> tuple[int, int]:
    """(tile, key head) items of steps whose sequences have a row each, and the longest of them in blocks."""
    sizes = [-(-(high - low) // 64) for row in ranges.values() for low, high in row]
    return case.num_kv_heads * len(sizes), max(sizes)


LENGTHS = st.lists(st.one_of(st.integers(1, MILLION), st.integers(1, 2000)), min_size=1, max_size=256)


@hypothesis_settings(max_examples=150)
@given(lengths=LENGTHS, num_kv_heads=st.sampled_from([1, 2, 8]), num_sms=st.sampled_from([1, 40, 132]))
@example(lengths=[131072], num_kv_heads=8, num_sms=132)
@example(lengths=32 * [8192], num_kv_heads=8, num_sms=132)
@example(lengths=[131072, *(65 * [64])], num_kv_heads=8, num_sms=132)
@example(lengths=[131072, *(66 * [64])], num_kv_heads=8, num_sms=132)
def test_quantized_steps_take_no_turn_more_than_they_must(lengths, num_kv_heads, num_sms):
    """No more items than programs where that can be; and no smaller share would do it."""
    bounds = StepBounds(256, 256, 16)
    case = replace(
        QUANTIZED,
        num_heads=8 * num_kv_heads,
        num_kv_heads=num_kv_heads,
        num_sms=num_sms,
        bounds=bounds,
        max_model_len=MILLION,
    )
    ranges = case.ranges([(length - 1, 1) for length in lengths])
    programs = num_sms * case.geometry.small_programs(len(lengths))
    turns = -(-len(lengths) * num_kv_heads // programs)
    items, longest = items_and_longest(case, ranges)
    assert items <= turns * programs
    blocks = [-(-length // 64) for length in lengths]
    fair_share = max(1, -(-sum(lengths) * num_kv_heads // (64 * programs)))
    if longest > fair_share:
        cut = [-(-count // (longest - 1)) for count in blocks]
        partials = sum(count for count in cut if count > 1)
        assert sum(cut) * num_kv_heads > turns * programs or partials > case.room.max_partials, (
            "a smaller share would do"
        )


@pytest.mark.parametrize(
    ("num_seqs", "num_tokens", "splits"),
    [(1, 131072, 128), (100, 4096, 1), (132, 4096, 1), (133, 4096, 4), (150, 4096, 4), (200, 1000, 1), (300, 4096, 2)],
)
def test_tile_scheduler_splits_when_tile_cost_pays_off(num_seqs, num_tokens, splits):
    """132 programs: a batch that is a little larger is cut, and none whose last turn is nearly full, or short."""
    case = ListCase(16, 1, bounds=StepBounds(512, 512, 64), given=latent_geometry(16))
    assert case.splits(num_seqs * [(num_tokens - 1, 1)]) == num_seqs * [splits]
    if num_seqs > 1:
        case = replace(case, given=latent_geometry(16)._replace(tile_cost_tokens=0))
        assert case.splits(num_seqs * [(num_tokens - 1, 1)]) == num_seqs * [1]


@hypothesis_settings(max_examples=30)
@given(lengths=LENGTHS, num_heads=st.sampled_from([1, 16, 20, 128]))
def test_tile_scheduler_latent_ranges_fit_their_room(lengths, num_heads):
    num_blocks = head_blocks(num_heads)[0]
    case = ListCase(num_heads, num_blocks, bounds=StepBounds(256, 256, 64), given=latent_geometry(num_heads))
    case.ranges([(length - 1, 1) for length in lengths])


@pytest.mark.parametrize(
    ("num_seqs", "num_tokens", "splits"), [(1, 131072, 64), (8, 8192, 8), (32, 8192, 2), (64, 2048, 1), (4, 262144, 16)]
)
def test_splits_of_quantized_steps_fill_an_h200(num_seqs, num_tokens, splits):
    """528 programs, 8 key heads: 66 tiles at most, in whole blocks."""
    case = replace(QUANTIZED, given=QUANTIZED.geometry._replace(small_programs_per_sm=4, small_batch_rows=0))
    assert case.splits(num_seqs * [(num_tokens - 1, 1)]) == num_seqs * [splits]


@BOTH
@for_each("num_seqs", [1, 2, 7, 32, 64])
@for_each("num_tokens", [1, 64, 65, 1000, 40960, MILLION])
@for_each("batch_invariant", [True, False])
def test_partial_results_keep_to_their_cap(case, num_seqs, num_tokens, batch_invariant):
    splits = replace(case, batch_invariant=batch_invariant).splits(num_seqs * [(num_tokens - 1, 1)])
    assert sum(count for count in splits if count > 1) <= MAX_PARTIALS


@BOTH
@pytest.mark.parametrize("group", [1, 2, 8])
@pytest.mark.parametrize("num_seqs", [1, 30, 64])
@pytest.mark.parametrize("batch_invariant", [True, False], ids=["invariant", "balanced"])
def test_several_rows_of_a_sequence_count_each(case, group, num_seqs, batch_invariant):
    """As many rows as a small tile takes, each with partial results of its own: fewer splits, not more memory."""
    case = replace(case, num_heads=group, num_kv_heads=1, batch_invariant=batch_invariant)
    count = case.geometry.small_rows
    splits = case.splits(num_seqs * [(MILLION - count, count)])
    assert count * sum(number for number in splits if number > 1) <= MAX_PARTIALS


@BOTH
def test_tile_scheduler_lone_long_context_fills_gpu(case):
    (splits,) = case.splits([(40959, 1)])
    most = 132 * case.geometry.small_programs(1) / case.num_kv_heads
    assert 0.9 * most <= splits <= most
    assert replace(case, num_sms=1).splits([(MILLION - 1, 1)]) == [1]


@pytest.mark.parametrize(
    ("lengths", "splits"),
    [([528], [9]), ([2048], [32]), ([100, 528], [2, 9]), ([33, 200, 129], [1, 4, 3]), ([2113], [17])],
)
def test_plain_step_of_few_blocks_gives_each_its_program(lengths, splits):
    """264 programs for 8 key heads take 33 blocks of 64 tokens; 34 blocks share programs."""
    assert PLAIN.splits([(length - 1, 1) for length in lengths]) == splits


def test_steps_of_few_rows_have_programs_of_their_own():
    (few,) = QUANTIZED.splits([(MILLION - 1, 1)])
    many, *_ = QUANTIZED.splits([(MILLION - 1, 1), *(3 * [(0, 1)])])
    assert 0.9 * 4 * 132 / 8 <= few <= 4 * 132 / 8 < many <= 5 * 132 / 8


@BOTH
def test_tile_scheduler_full_gpu_splits_nothing(case):
    assert case.splits(64 * [(0, 1)]) == 64 * [1]
    assert replace(case, num_sms=8).splits(16 * [(40959, 1)] + 48 * [(63, 1)])[16:] == 48 * [1]


@BOTH
def test_tile_scheduler_splits_lone_long_prompt(case):
    """A few tiles for 264 programs: so each is cut, unless rows must not depend on it."""
    (splits,) = case.splits([(40000, 32)])
    assert splits > 7
    assert replace(case, batch_invariant=True).splits([(40000, 32)]) == [1]
    assert case.splits([(0, 1024)]) == [1]


@BOTH
@pytest.mark.parametrize(("num_tokens", "splits"), [(1023, 1), (1024, 2), (1535, 2), (1536, 3)])
def test_splits_of_a_prompt_have_512_tokens_and_more(case, num_tokens, splits):
    num_rows = case.geometry.large_rows
    assert case.splits([(num_tokens - num_rows, num_rows)]) == [splits]


IN_WARPGROUPS = replace(PLAIN, given=PLAIN.geometry._replace(large_programs_per_sm=1, large_block_tokens=128))


@pytest.mark.parametrize("case", [PLAIN, QUANTIZED, IN_WARPGROUPS], ids=["plain", "quantized", "warpgroups"])
@for_each("num_sms", [1, 132])
@for_each("num_rows", [16, 100, 256, 257, 300, 528, 529, 600, 2048])
def test_splits_of_a_prompt_take_no_second_wave(case, num_sms, num_rows):
    """More items than programs would: so unsplit tiles stay whole, and splits leave no program more than one."""
    case = replace(case, num_sms=num_sms)
    (splits,) = case.splits([(40000, num_rows)])
    num_items = case.num_kv_heads * -(-num_rows // case.geometry.large_rows)
    programs = num_sms * case.geometry.large_programs_per_sm
    assert splits == 1 or splits * num_items <= programs
    assert (splits + 1) * num_items > programs


@hypothesis_settings(max_examples=30)
@given(start=st.integers(0, 100_000), count=st.integers(20, 300), window=st.sampled_from([None, 3000]))
def test_splits_of_large_tiles_are_whole_blocks_of_their_kernel(start, count, window):
    case = replace(IN_WARPGROUPS, window=window)
    batch = dummy_batch([(start, count)])
    for row in check_work(case, batch, case.work(batch)).values():
        assert not [(low, high) for low, high in row[:-1] if (high - low) % 128]


@BOTH
def test_splits_of_prompts_share_what_room_is_left(case):
    """All tiles get the same, instead of the first ones all of it."""
    case = replace(case, num_heads=8, num_kv_heads=1, num_sms=528)
    batch = dummy_batch([(200000, 64), *(6 * [(3000, 1)])])
    ranges = check_work(case, batch, case.work(batch))
    splits = {len(ranges[row]) for row in range(64)}
    assert len(splits) == 1
    assert splits.pop() > 1


def test_short_models_are_never_split():
    case = replace(PLAIN, max_model_len=256)
    assert max_partials(256, case.bounds) == 0
    assert case.splits([(255, 1), (200, 56), (0, 1)]) == [1, 1, 1]


@BOTH
def test_tile_scheduler_orders_large_tiles_longest_first(case):
    work = case.work(dummy_batch([(0, 64), (5000, 64), (100, 64)]))
    num_small, num_large = work.tiles_X8[0, :2].tolist()
    assert num_small == 0
    used = work.tiles_X8[1 : 1 + num_large]
    sizes = (used[:, 5] - used[:, 4]).tolist()
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize(
    ("window", "plain", "quantized"),
    [(1, (39999, 40001), (39936, 40001)), (5, (39995, 40001), (39936, 40001)), (64, (39936, 40001), (39936, 40001))],
)
def test_tile_scheduler_window_range_starts_at_code_block(window, plain, quantized):
    """The second row sees the last token, the first one `window` of them, and the kernel hides the others."""
    for case, expected in ((PLAIN, plain), (QUANTIZED, quantized)):
        case = replace(case, num_heads=8, num_kv_heads=8, window=window, num_sms=1)
        assert case.ranges([(39999, 2)]) == {0: [expected], 1: [expected]}


@pytest.mark.parametrize(
    ("rows", "captured", "expected"),
    [
        ([(9, 1), (300, 1)], False, (True, False, False)),
        ([(9, 1), (300, 1)], True, (True, False, True)),
        ([], True, (True, False, True)),
        ([(0, 100)], False, (False, True, False)),
        ([(0, 100)], True, (True, True, True)),
        ([(0, 100), (40000, 1)], False, (True, True, True)),
    ],
    ids=str,
)
def test_which_kernels_a_step_takes(rows, captured, expected):
    num_sms = 1 if len(rows) != 2 or rows[0][1] == 1 else 132
    work = replace(PLAIN, num_sms=num_sms).work(dummy_batch(rows), captured)
    assert (work.has_small, work.has_large, work.has_merge) == expected


def test_padding_alone_is_merged_into_zeros():
    work = replace(PLAIN, num_sms=1).work(dummy_batch([(9, 1)], num_padding=3))
    assert work.has_merge
    assert work.rows_T2[:4, 1].tolist() == [1, 0, 0, 0]


@BOTH
@pytest.mark.parametrize("is_shared", [True, False], ids=["shared", "copied"])
def test_lists_lie_where_the_first_ones_lay(monkeypatch, case, is_shared):
    """A graph has read these addresses for good; nothing of a larger step stays behind in what counts.

    Copied: the device has memory of its own, and sees what was sent.
    """
    make = partial(MirroredTensor, is_shared=is_shared)
    monkeypatch.setattr(tile_scheduler, "MirroredTensor", lambda *place, is_shared: make(*place))
    lists = case.lists()
    places = None
    for rows in ([(40000, 1)] * 30, [(0, 1)], [(700, 300), (3, 1)], []):
        batch = dummy_batch(rows, num_padding=2)
        work = lists.fill(StepRows.of(batch.sequences, batch.num_rows), captured=False)
        check_work(case, batch, work)
        places = places or (work.tiles_X8.data_ptr(), work.rows_T2.data_ptr())
        assert places == (work.tiles_X8.data_ptr(), work.rows_T2.data_ptr())
        assert lists.tile_bytes + lists.row_bytes == work.tiles_X8.nbytes + work.rows_T2.nbytes


def test_columns_of_a_step():
    step = StepRows.of([SequenceRows(0, 3, 40, ([1, 2],), 7, True), SequenceRows(3, 1, 9, ([5],), 0)], 6)
    assert step.is_prompt_N.tolist() == [True, False]
    assert step.columns_4N.tolist() == [[7, 0], [0, 3], [3, 1], [40, 9]]
    assert step.num_rows == 6
    assert not step.is_decode
    empty = StepRows.of([], 2)
    assert empty.columns_4N.tolist() == [[], [], [], []]
    assert empty.is_decode
