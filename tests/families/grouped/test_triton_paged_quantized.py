"""Attention tile by tile over codes, and over layers of different formats, in the interpreter or on a GPU."""

from dataclasses import replace

import pytest
import torch

from attention.steps import (
    QUIET,
    Geometry,
    build,
    check_rows,
    make_batch,
    on_triton,
    run_layer,
    scratch_for,
    store,
    texts,
)
from attention.work_lists import dummy_batch
from for_each import for_each
from holdfast.attention.backend import LayerStep
from holdfast.families.grouped.declarations import TileKind, least_tile_rows
from holdfast.families.grouped.triton_backend import TritonPagedAttention
from holdfast.kernels.attention.quantized_attention import quantized_geometry
from holdfast.quant.formats import KV_FORMATS
from kernels.exactness import same_bits
from kernels.triton_cases import assert_allocates_nothing

QUANTIZED = [name for name, kv_format in KV_FORMATS.items() if kv_format.is_quantized]
EVERY_FORMAT = pytest.mark.parametrize("kv_dtype", QUANTIZED)
LONG = Geometry(num_heads=4, num_kv_heads=1, head_dim=64, page_tokens=16, max_model_len=2048)
pytestmark = QUIET


@EVERY_FORMAT
def test_rows_and_prompts_are_exact(device, kv_dtype):
    geometry = on_triton(replace(LONG, kv_dtype=kv_dtype), device)
    work = check_rows(geometry, [200, 3, 40], [1, 2, 20])
    assert (work.rows_T2[:23, 1] > 1).any(), "nothing was split"


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "page_tokens"), [(2, 2, 80, 16), (7, 1, 64, 1), (16, 2, 128, 64)]
)
@pytest.mark.parametrize("kv_dtype", ["turboquant_k8v4", "turboquant_3bit_nc"])
def test_heads_and_pages(device, kv_dtype, num_heads, num_kv_heads, head_dim, page_tokens):
    geometry = Geometry(num_heads, num_kv_heads, head_dim, page_tokens, kv_dtype=kv_dtype)
    check_rows(on_triton(geometry, device), [70, 1, 30], [1, 1, 12])


@pytest.mark.parametrize("window", [1, 63, 64, 100])
def test_triton_paged_quantized_windows_are_exact(device, window):
    geometry = replace(LONG, windows=(window,), kv_dtype="turboquant_4bit_nc")
    check_rows(on_triton(geometry, device), [180, 64, 65], [1, 2, 20])


def test_layers_of_different_formats_share_a_step(device):
    geometry = replace(
        LONG, windows=(None, 70, None, 70), kv_dtype="float16 turboquant_4bit_nc fp8 float16", page_tokens=64
    )
    check_rows(on_triton(geometry, device), [130, 2, 20], [1, 1, 12])


def test_batch_invariant_row_has_same_bits_in_any_batch(device):
    geometry = on_triton(replace(LONG, kv_dtype="turboquant_k8v4"), device)
    made, num_pages = texts(geometry, [520, 3], consecutive=False)
    backend = build(TritonPagedAttention, geometry, geometry.storage(num_pages), batch_invariant=True)
    store(geometry, backend, made)
    parts = [(text, len(text.qkv) - 2, len(text.qkv) - 1) for text in made]
    alone = []
    for part in parts:
        batch, qkv = make_batch(geometry, [part], num_rows=16)
        alone.append(run_layer(geometry, backend, qkv, batch)[:1])
    batch, qkv = make_batch(geometry, parts[::-1], num_rows=20)
    out = run_layer(geometry, backend, qkv, batch)
    assert same_bits(out[:2], torch.cat(alone[::-1]))
    assert same_bits(out[2:], torch.zeros_like(out[2:])), "padding is zeros"


@EVERY_FORMAT
@for_each("group", range(1, 129, 9))
@for_each("num_kv_heads", [1, 8])
def test_lists_have_room_for_what_the_kernel_wants(kv_dtype, group, num_kv_heads):
    kv_format = KV_FORMATS[kv_dtype]
    assert kv_format.key_bits is not None
    assert kv_format.value_bits is not None
    geometry = quantized_geometry(group * num_kv_heads, num_kv_heads, kv_format.key_bits, kv_format.value_bits)
    kind = TileKind(group * num_kv_heads, num_kv_heads, kv_format.key_bits, kv_format.value_bits)
    assert geometry.large_rows >= least_tile_rows(kind)
    assert geometry.large_rows >= geometry.small_rows >= 1


ON_GPU = [
    *((name, torch.bfloat16, (64, 8, 128)) for name in QUANTIZED),
    ("turboquant_k8v4", torch.float16, (14, 2, 64)),
    ("turboquant_4bit_nc", torch.float16, (8, 8, 80)),
    ("turboquant_3bit_nc", torch.bfloat16, (8, 1, 256)),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("kv_dtype", "dtype", "heads"), ON_GPU, ids=str)
def test_half_precision_on_a_gpu(device, kv_dtype, dtype, heads):
    """Few kinds of many, since each compiles its kernels anew."""
    geometry = Geometry(*heads, 16, (None,), kv_dtype, dtype, 4096, device)
    check_rows(geometry, [1, 65, 700, 400, 520], [1, 65, 1, 200, 2], num_sms=132)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", ["turboquant_k8v4", "turboquant_3bit_nc"])
def test_captured_attention_graph_replays_other_batches(device, kv_dtype):
    """Captured on padding alone, replayed at any length, and each time what runs without a graph gives."""
    geometry = on_triton(replace(LONG, kv_dtype=kv_dtype), device)
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
    geometry = on_triton(replace(LONG, windows=(None, None), kv_dtype="turboquant_k8v4 float16"), device)
    made, num_pages = texts(geometry, [700, 40], consecutive=False)
    backend = build(TritonPagedAttention, geometry, geometry.storage(num_pages))
    batch, qkv = make_batch(geometry, [(made[0], 0, 600), (made[1], 39, 40)], num_rows=608)
    q, out = qkv.new_empty(608, 4, 64), qkv.new_empty(608, 256)
    scratch = scratch_for(geometry)

    def step():
        plan = backend.plan(batch)
        for layer in range(2):
            backend.write(qkv, batch, None, None, layer, q)
            backend.attend(q, LayerStep(layer, plan, scratch), out, False)

    assert_allocates_nothing(step)
