"""A step's work as tiles: planned in host memory here, whatever runs it; and run, in the interpreter or on a GPU."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from attention.steps import Geometry, build, make_batch, on_triton, run_layer, scratch_for, texts
from attention.work_lists import Ranges, check_work, made_up_batch, planner
from holdfast.attention.declarations import SPLIT_ROWS, TritonPagedDeclaration, split_rows
from holdfast.attention.spec import StepBounds
from holdfast.attention.triton_paged import TritonPagedAttention
from holdfast.kernels.tiled_attention import TileWork, small_programs, tile_rows
from kernels.exactness import same_bits
from kernels.triton_cases import assert_allocates_nothing

MILLION = 2**20
BIG = Geometry(num_heads=64, num_kv_heads=8, head_dim=8, page_tokens=16, max_model_len=MILLION)
BOUNDS = StepBounds(max_num_seqs=64, max_num_rows=2048, page_tokens=16)


@st.composite
def plans(draw):
    """A geometry, bounds, and a step within them: up to 64 sequences of up to a million tokens, decoding and not."""
    group = draw(st.sampled_from([1, 2, 4, 7, 8, 16, 71, 128]))
    num_kv_heads = draw(st.sampled_from([1, 2, 8]))
    max_model_len = draw(st.sampled_from([16, 256, 257, 1000, 40960, MILLION]))
    windows = draw(st.sampled_from([(None,), (1,), (5, None), (1024,), (4096, None, 4096)]))
    bounds = StepBounds(draw(st.integers(1, 64)), draw(st.integers(1, 2048)), 16)
    geometry = Geometry(group * num_kv_heads, num_kv_heads, 8, 16, windows, max_model_len=max_model_len)
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
    return geometry, bounds, rows, draw(st.integers(0, min(left, 8)))


@hypothesis_settings(max_examples=150)
@given(plan=plans(), num_sms=st.sampled_from([1, 2, 40, 132]), batch_invariant=st.booleans(), captured=st.booleans())
def test_every_token_that_a_row_may_see_is_in_one_tile(plan, num_sms, batch_invariant, captured):
    geometry, bounds, rows, num_padding = plan
    batch = made_up_batch(rows, num_padding)
    backend = planner(geometry, bounds, num_sms, batch_invariant)
    made = backend.plan(batch, captured)
    assert made.work.keys() == set(geometry.windows)
    for window, work in made.work.items():
        check_work(geometry, bounds, batch, work, window, captured)


@hypothesis_settings(max_examples=60)
@given(plan=plans(), num_sms=st.sampled_from([1, 132]))
def test_a_batch_invariant_row_is_split_by_its_own_length_alone(plan, num_sms):
    geometry, bounds, rows, num_padding = plan

    def ranges_of(some: list[tuple[int, int]], padding: int, sms: int) -> dict[int | None, Ranges]:
        batch = made_up_batch(some, padding)
        works = planner(geometry, bounds, sms, batch_invariant=True).plan(batch).work
        return {window: check_work(geometry, bounds, batch, work, window) for window, work in works.items()}

    together = ranges_of(rows, num_padding, num_sms)
    row = 0
    for start, count in rows[:12]:
        alone = ranges_of([(start, count)], 0, 40)
        for window, ranges in together.items():
            assert [ranges[row + i] for i in range(count)] == [alone[window][i] for i in range(count)]
        row += count


def splits_of(
    rows: list[tuple[int, int]], geometry=BIG, bounds=BOUNDS, num_sms=132, batch_invariant=False
) -> list[int]:
    """Splits of the first row of each sequence."""
    batch = made_up_batch(rows)
    (work,) = planner(geometry, bounds, num_sms, batch_invariant).plan(batch).work.values()
    ranges = check_work(geometry, bounds, batch, work, geometry.windows[0])
    return [len(ranges[sequence.row_start]) for sequence in batch.sequences]


@pytest.mark.parametrize("num_seqs", [1, 2, 7, 32, 64])
@pytest.mark.parametrize("num_tokens", [1, 64, 65, 1000, 40960, MILLION])
@pytest.mark.parametrize("batch_invariant", [True, False], ids=["invariant", "balanced"])
def test_partial_results_keep_to_their_cap(num_seqs, num_tokens, batch_invariant):
    splits = splits_of(num_seqs * [(num_tokens - 1, 1)], batch_invariant=batch_invariant)
    assert sum(count for count in splits if count > 1) <= SPLIT_ROWS


@pytest.mark.parametrize("group", [1, 2, 8])
@pytest.mark.parametrize("num_seqs", [1, 30, 64])
@pytest.mark.parametrize("batch_invariant", [True, False], ids=["invariant", "balanced"])
def test_several_rows_of_a_sequence_count_each(group, num_seqs, batch_invariant):
    """As many rows as a small tile takes, each with partial results of its own: fewer splits, not more memory."""
    geometry = replace(BIG, num_heads=group, num_kv_heads=1)
    count = tile_rows(group, 1, large=False)
    splits = splits_of(num_seqs * [(MILLION - count, count)], geometry, batch_invariant=batch_invariant)
    assert count * sum(number for number in splits if number > 1) <= SPLIT_ROWS


def test_a_lone_long_context_keeps_the_whole_machine_busy():
    (splits,) = splits_of([(40959, 1)])
    most = 132 * small_programs(1)[0] / BIG.num_kv_heads
    assert 0.9 * most <= splits <= most
    assert splits_of([(MILLION - 1, 1)], num_sms=1) == [1]


def test_a_full_machine_splits_nothing():
    assert splits_of(64 * [(0, 1)]) == 64 * [1]
    assert splits_of(16 * [(40959, 1)] + 48 * [(63, 1)], num_sms=8)[16:] == 48 * [1]


def test_long_prompts_alone_are_split_too():
    """Two tiles of 16 rows for 264 programs: so each is cut, unless rows must not depend on it."""
    (splits,) = splits_of([(40000, 32)])
    assert splits > 8
    assert splits_of([(40000, 32)], batch_invariant=True) == [1]
    assert splits_of([(0, 1024)]) == [1]


def test_short_models_are_never_split():
    geometry = replace(BIG, max_model_len=256)
    assert split_rows(256, BOUNDS) == 0
    assert splits_of([(255, 1), (200, 56), (0, 1)], geometry) == [1, 1, 1]


def test_the_longest_large_tiles_come_first():
    batch = made_up_batch([(0, 64), (5000, 64), (100, 64)])
    (work,) = planner(BIG, BOUNDS).plan(batch).work.values()
    num_small, num_large = work.tiles_X8[0, :2].tolist()
    assert num_small == 0
    used = work.tiles_X8[1 : 1 + num_large]
    sizes = (used[:, 5] - used[:, 4]).tolist()
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize(
    ("rows", "captured", "expected"),
    [
        ([(9, 1), (300, 1)], False, (True, False, False)),
        ([(9, 1), (300, 1)], True, (True, False, True)),
        ([], True, (True, False, True)),
        ([(0, 100)], False, (False, True, False)),
        ([(0, 100)], True, (True, True, True)),
        ([(0, 2)], True, (True, True, True)),
        ([(0, 2), (0, 100)], False, (True, True, False)),
    ],
)
def test_which_kernels_a_step_takes(rows, captured, expected):
    """What is captured must not depend on lengths: one kind of graph for decoding, one for everything else."""
    (work,) = planner(BIG, BOUNDS, num_sms=1).plan(made_up_batch(rows), captured).work.values()
    assert (work.has_small, work.has_large, work.has_merge) == expected


def test_padding_alone_is_merged_into_zeros():
    batch = made_up_batch([(9, 1)], num_padding=3)
    (work,) = planner(BIG, BOUNDS, num_sms=1).plan(batch).work.values()
    assert work.has_merge
    assert work.rows_T2[:4, 1].tolist() == [1, 0, 0, 0]


def test_plans_lie_where_the_first_one_lay():
    """A graph has read these addresses for good; nothing of a larger step stays behind in what counts."""
    backend = planner(BIG, BOUNDS)
    places = None
    for rows in ([(40000, 1)] * 30, [(0, 1)], [(700, 300), (3, 1)], []):
        batch = made_up_batch(rows, num_padding=2)
        (work,) = backend.plan(batch).work.values()
        check_work(BIG, BOUNDS, batch, work, None)
        places = places or (work.tiles_X8.data_ptr(), work.rows_T2.data_ptr())
        assert places == (work.tiles_X8.data_ptr(), work.rows_T2.data_ptr())


def test_layers_with_different_windows_have_lists_of_their_own():
    geometry = replace(BIG, windows=(None, 5, None))
    batch = made_up_batch([(40000, 1)])
    works = planner(geometry, BOUNDS).plan(batch).work
    assert list(works) == [None, 5]
    assert works[5].tiles_X8.data_ptr() != works[None].tiles_X8.data_ptr()
    assert check_work(geometry, BOUNDS, batch, works[5], 5) == {0: [(39996, 40001)]}


@pytest.mark.parametrize("windows", [(None,), (None, 5, None), (1024, 4096)], ids=str)
@pytest.mark.parametrize("max_model_len", [200, 40960])
def test_what_it_holds_is_what_it_said(windows, max_model_len):
    geometry = replace(BIG, windows=windows, max_model_len=max_model_len)
    works = planner(geometry, BOUNDS).plan(made_up_batch([(0, 1)])).work.values()
    held = sum(work.tiles_X8.nbytes + work.rows_T2.nbytes for work in works)
    assert held == sum(term.num_bytes for term in TritonPagedDeclaration().terms(geometry.specs, BOUNDS))


def test_a_step_without_a_page_table_is_refused():
    batch = replace(made_up_batch([(0, 1)]), page_table_NP=None)
    with pytest.raises(AssertionError, match="no page table"):
        planner(BIG, BOUNDS).plan(batch)


LONG = Geometry(num_heads=4, num_kv_heads=1, head_dim=16, page_tokens=16, max_model_len=2048)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 6e-3, torch.bfloat16: 5e-2}


def check_rows(geometry: Geometry, lengths: list[int], num_rows: list[int], **options) -> TileWork:
    """The last rows of each text, in one step behind all that is stored; the work of that step."""
    made, num_pages = texts(geometry, lengths, consecutive=False)
    head_norm, rotary = geometry.head_norm(), geometry.rotary()
    backend = build(TritonPagedAttention, geometry, geometry.storage(num_pages), **options)
    store(geometry, backend, made, head_norm, rotary)
    parts = [(text, len(text.qkv) - count, len(text.qkv)) for text, count in zip(made, num_rows, strict=True)]
    batch, qkv = make_batch(geometry, parts)
    out = run_layer(geometry, backend, qkv, batch, head_norm, rotary).cpu().double()
    tolerance = TOLERANCE[geometry.dtype]
    for text, rows in zip(made, out.split(num_rows), strict=True):
        exact = text.exact(geometry.windows[0], head_norm, rotary)[-len(rows) :]
        torch.testing.assert_close(rows, exact, rtol=tolerance, atol=tolerance)
    return backend.plan(batch).work[geometry.windows[0]]


def store(geometry, backend, made, head_norm=None, rotary=None) -> None:
    """All keys and values, without attending to any."""
    batch, qkv = make_batch(geometry, [(text, 0, len(text.qkv)) for text in made])
    unused = qkv.new_empty(batch.num_rows, geometry.num_heads, geometry.head_dim)
    backend.write(qkv, batch, head_norm, rotary, 0, unused)


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("batch_invariant", [True, False], ids=["invariant", "balanced"])
def test_split_contexts_are_exact(device, window, batch_invariant):
    geometry = on_triton(replace(LONG, windows=(window,)), device)
    work = check_rows(geometry, [1000, 3, 600, 70], [1, 1, 3, 70], num_sms=2, batch_invariant=batch_invariant)
    assert (work.rows_T2[:5, 1] > 1).any(), "nothing was split"


def test_split_prompts_are_exact(device):
    geometry = on_triton(LONG, device)
    work = check_rows(geometry, [1040, 3], [40, 1], num_sms=2)
    assert (work.rows_T2[:40, 1] > 1).all(), "nothing was split"


def test_an_invariant_row_has_the_same_bits_in_any_company(device):
    geometry = on_triton(LONG, device)
    made, num_pages = texts(geometry, [700, 3, 400], consecutive=False)
    backend = build(TritonPagedAttention, geometry, geometry.storage(num_pages), batch_invariant=True)
    store(geometry, backend, made)
    parts = [(text, len(text.qkv) - 2, len(text.qkv) - 1) for text in made]
    alone = []
    for part in parts:
        batch, qkv = make_batch(geometry, [part], num_rows=16)  # few rows take kernels of another shape
        alone.append(run_layer(geometry, backend, qkv, batch)[:1])
    batch, qkv = make_batch(geometry, [parts[2], parts[0], parts[1]], num_rows=20)
    out = run_layer(geometry, backend, qkv, batch)
    assert same_bits(out[:3], torch.cat([alone[2], alone[0], alone[1]]))
    assert same_bits(out[3:], torch.zeros_like(out[3:])), "padding is zeros"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"), [(64, 8, 128), (14, 2, 64), (8, 8, 80), (8, 1, 256)]
)
def test_half_precision_on_a_gpu(device, dtype, num_heads, num_kv_heads, head_dim):
    kv_dtype = str(dtype).removeprefix("torch.")
    geometry = Geometry(num_heads, num_kv_heads, head_dim, 16, (None,), kv_dtype, dtype, 4096, device)
    check_rows(geometry, [1, 65, 700, 400, 520], [1, 65, 1, 200, 2], num_sms=132)


@pytest.mark.gpu
def test_a_captured_step_serves_others(device):
    """Captured on padding alone, replayed at any length, and each time what runs without a graph gives."""
    geometry = replace(on_triton(LONG, device), head_dim=64)
    made, num_pages = texts(geometry, [2000, 300, 1, 64], consecutive=False)
    backend = build(TritonPagedAttention, geometry, geometry.storage(num_pages))
    store(geometry, backend, made)
    table = torch.zeros(8, 200, dtype=torch.int32, device=device)
    q, out, eager = (torch.randn(4, 4 * 64, device=device).half() for _ in range(3))
    scratch = scratch_for(geometry)

    def attend(plan, out_TX):
        backend.attend(q.view(4, 4, 64), 0, plan, scratch, out_TX, False)

    nobody = replace(made_up_batch([], num_padding=4), page_table_NP=table)
    plan = backend.plan(nobody, captured=True)
    attend(plan, out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend(plan, out)
    for chosen in ([0, 1, 2, 3], [2], [3, 0], [1, 1, 1, 1], []):
        parts = [(made[index], len(made[index].qkv) - 1, len(made[index].qkv)) for index in chosen]
        batch = nobody
        if parts:
            batch, _ = make_batch(geometry, parts, num_rows=4)
            table[: len(parts) + 1, : batch.page_table_NP.shape[1]] = batch.page_table_NP
            batch = replace(batch, page_table_NP=table)
        out.fill_(float("nan"))
        eager.fill_(float("nan"))
        attend(backend.plan(batch), eager)
        backend.plan(batch, captured=True)
        graph.replay()
        assert same_bits(out, eager), f"{chosen=}"
        assert not out[len(chosen) :].any()


@pytest.mark.gpu
def test_a_step_allocates_nothing(device):
    geometry = on_triton(LONG, device)
    made, num_pages = texts(geometry, [700, 40], consecutive=False)
    backend = build(TritonPagedAttention, geometry, geometry.storage(num_pages))
    batch, qkv = make_batch(geometry, [(made[0], 0, 600), (made[1], 39, 40)], num_rows=608)
    q, out = qkv.new_empty(608, 4, 16), qkv.new_empty(608, 64)
    scratch = scratch_for(geometry)

    def step():
        plan = backend.plan(batch)
        backend.write(qkv, batch, None, None, 0, q)
        backend.attend(q, 0, plan, scratch, out, False)

    assert_allocates_nothing(step)
