"""Attention tile by tile, in the interpreter or on a GPU; and its plans, made in host memory here, whatever runs them."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from attention.steps import Geometry, build, check_rows, make_batch, on_triton, run_layer, scratch_for, store, texts
from attention.work_lists import dummy_batch
from holdfast.attention.backend import LayerStep
from holdfast.attention.declarations import StepBounds
from holdfast.families.grouped.declarations import TritonPagedDeclaration
from holdfast.families.grouped.triton_backend import TritonPagedAttention
from holdfast.quant.formats import KV_FORMATS
from kernels.exactness import same_bits
from kernels.triton_cases import assert_allocates_nothing

BIG = Geometry(num_heads=64, num_kv_heads=8, head_dim=16, page_tokens=16, max_model_len=2**20)
BOUNDS = StepBounds(max_num_seqs=64, max_num_rows=2048, page_tokens=16)
QUANTIZED = [name for name, kv_format in KV_FORMATS.items() if kv_format.is_quantized]


def planner(geometry: Geometry, **options) -> TritonPagedAttention:
    """A backend that only plans: in host memory, over a single page."""
    return TritonPagedAttention(geometry.specs, geometry.storage(1), BOUNDS, num_sms=132, **options)


def test_layers_with_different_windows_have_lists_of_their_own():
    geometry = replace(BIG, windows=(None, 5, None))
    works = planner(geometry).plan(dummy_batch([(40000, 1)])).work
    assert [window for _, window in works] == [None, 5]
    every, near = works.values()
    assert near.tiles_X8.data_ptr() != every.tiles_X8.data_ptr()
    assert every.rows_T2[0, 1] > 8
    assert near.tiles_X8[1].tolist() == [0, 0, 1, 40000, 39996, 40001, -1, 1]


def test_layers_of_different_formats_have_lists_of_their_own():
    """As their kernels want them: over codes ranges begin with whole blocks."""
    geometry = replace(BIG, windows=(5, 5, 5, None), kv_dtype="float32 turboquant_k8v4 float32 turboquant_k8v4")
    works = planner(geometry).plan(dummy_batch([(40000, 1)])).work
    assert [(kind.key_bits, window) for kind, window in works] == [(None, 5), (8, 5), (8, None)]
    plain, quantized, _ = works.values()
    assert plain.tiles_X8[1, 4] == 39996
    assert quantized.tiles_X8[1, 4] == 39936


def test_plans_lie_where_the_first_one_lay():
    backend = planner(replace(BIG, windows=(None, 7)))
    first, second = (backend.plan(dummy_batch([(start, 1)])).work.values() for start in (40000, 3))
    assert [work.tiles_X8.data_ptr() for work in first] == [work.tiles_X8.data_ptr() for work in second]


@pytest.mark.parametrize("windows", [(None,), (None, 5, None), (1024, 4096)], ids=str)
@pytest.mark.parametrize("max_model_len", [200, 40960])
@pytest.mark.parametrize("kv_dtype", ["float16", *QUANTIZED])
def test_backend_holds_bytes_of_its_declared_terms(windows, max_model_len, kv_dtype):
    geometry = replace(BIG, windows=windows, max_model_len=max_model_len, kv_dtype=kv_dtype, dtype=torch.float16)
    terms = TritonPagedDeclaration().terms(geometry.specs, BOUNDS)
    assert planner(geometry).held_bytes() == {term.owner: term.num_bytes for term in terms}


def test_formats_may_change_places_between_plan_and_start():
    """Which layers are protected is known when the weights are: nothing that is held may depend on it."""
    names = ["float16", "float16", *(4 * ["turboquant_4bit_nc"])]
    held = []
    for order in (names, names[::-1], names[2:4] + names[:2] + names[4:]):
        geometry = replace(BIG, windows=(None, 5, None, 5, None, 5), kv_dtype=" ".join(order), dtype=torch.float16)
        held.append(planner(geometry).held_bytes())
        terms = TritonPagedDeclaration().terms(geometry.specs, BOUNDS)
        assert held[-1] == {term.owner: term.num_bytes for term in terms}
    assert held[0] == held[1] == held[2]


def test_triton_paged_plan_without_page_table_is_refused():
    batch = replace(dummy_batch([(0, 1)]), page_tables=None)
    with pytest.raises(AssertionError, match="no page table"):
        planner(BIG).plan(batch)


LONG = Geometry(num_heads=4, num_kv_heads=1, head_dim=16, page_tokens=16, max_model_len=2048)


@pytest.mark.each_value
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


def test_batch_invariant_row_has_same_bits_in_any_batch(device):
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


def assert_cuts_change_nothing(geometry: Geometry, num_prompt: int, cuts: tuple[int, ...]) -> None:
    """A prompt in one piece and in these, beside another sequence; pages behind a window are another's by then."""
    (text, other), num_pages = texts(geometry, [num_prompt, 300], consecutive=False)
    backend = build(TritonPagedAttention, geometry, geometry.storage(num_pages), batch_invariant=True)
    store(geometry, backend, [text, other])
    batch, qkv = make_batch(geometry, [(text, 0, num_prompt)], num_prompt=num_prompt)
    whole = run_layer(geometry, backend, qkv, batch)
    for start, end in pairwise(cuts):
        own, others = (text, start, end), (other, 299, 300)
        batch, qkv = make_batch(geometry, [own, others], num_rows=max(16, end - start + 1), num_prompt=num_prompt)
        pieces = run_layer(geometry, backend, qkv, batch)
        assert same_bits(pieces[: end - start], whole[start:end]), f"rows {start} to {end}"


@pytest.mark.parametrize("window", [None, 40])
def test_how_an_invariant_prompt_is_cut_changes_no_bit(device, window):
    geometry = on_triton(replace(LONG, windows=(window,)), device)
    assert_cuts_change_nothing(geometry, 200, (0, 1, 3, 67, 68, 131, 199, 200))


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("kv_dtype", ["float16", *QUANTIZED])
def test_batch_invariant_cuts_at_real_shapes_change_no_bit(device, kv_dtype, window):
    """Where a tile begins decides which of its blocks need no mask: both kinds must round alike (docs/log.md)."""
    shape = Geometry(64, 8, 128, page_tokens=16, max_model_len=2048, kv_dtype=kv_dtype, windows=(window,))
    assert_cuts_change_nothing(on_triton(shape, device), 700, (0, 2, 63, 64, 126, 190, 256, 511, 513, 640, 699, 700))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "dtype"),
    [(64, 8, 128, torch.bfloat16), (14, 2, 64, torch.float16), (8, 8, 80, torch.bfloat16), (8, 1, 256, torch.float16)],
    ids=str,
)
def test_half_precision_on_a_gpu(device, num_heads, num_kv_heads, head_dim, dtype):
    kv_dtype = str(dtype).removeprefix("torch.")
    geometry = Geometry(num_heads, num_kv_heads, head_dim, 16, (None,), kv_dtype, dtype, 4096, device)
    check_rows(geometry, [1, 65, 700, 400, 520], [1, 65, 1, 200, 2], num_sms=132)


@pytest.mark.gpu
def test_captured_attention_graph_replays_other_batches(device):
    """Captured on padding alone, replayed at any length, and each time what runs without a graph gives."""
    geometry = replace(on_triton(LONG, device), head_dim=64)
    made, num_pages = texts(geometry, [2000, 300, 1, 64], consecutive=False)
    backend = build(TritonPagedAttention, geometry, geometry.storage(num_pages))
    store(geometry, backend, made)
    table = torch.zeros(8, 200, dtype=torch.int32, device=device)
    q, out, eager = (torch.randn(4, 4 * 64, device=device).half() for _ in range(3))
    scratch = scratch_for(geometry)

    def attend(plan, out_TX):
        backend.attend(q.view(4, 4, 64), LayerStep(0, plan, scratch), out_TX, False)

    empty = replace(dummy_batch([], num_padding=4), page_tables=(table,))
    plan = backend.plan(empty, captured=True)
    attend(plan, out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend(plan, out)
    for chosen in ([0, 1, 2, 3], [2], [3, 0], [1, 1, 1, 1], []):
        parts = [(made[index], len(made[index].qkv) - 1, len(made[index].qkv)) for index in chosen]
        batch = empty
        if parts:
            batch, _ = make_batch(geometry, parts, num_rows=4)
            table[: len(parts) + 1, : batch.page_tables[0].shape[1]] = batch.page_tables[0]
            batch = replace(batch, page_tables=(table,))
        out.fill_(float("nan"))
        eager.fill_(float("nan"))
        attend(backend.plan(batch), eager)
        backend.plan(batch, captured=True)
        graph.replay()
        assert same_bits(out, eager), f"{chosen=}"
        assert not out[len(chosen) :].any()


@pytest.mark.gpu
def test_attention_step_allocates_nothing(device):
    geometry = on_triton(LONG, device)
    made, num_pages = texts(geometry, [700, 40], consecutive=False)
    backend = build(TritonPagedAttention, geometry, geometry.storage(num_pages))
    batch, qkv = make_batch(geometry, [(made[0], 0, 600), (made[1], 39, 40)], num_rows=608)
    q, out = qkv.new_empty(608, 4, 16), qkv.new_empty(608, 64)
    scratch = scratch_for(geometry)

    def step():
        plan = backend.plan(batch)
        backend.write(qkv, batch, None, None, 0, q)
        backend.attend(q, LayerStep(0, plan, scratch), out, False)

    assert_allocates_nothing(step)
