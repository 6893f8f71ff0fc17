"""Near pages beside quantized ones: every row sees its own block and the first tokens exact, and all else as codes."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from attention.near_steps import (
    BOUNDS,
    NAN,
    NearGeometry,
    exact_near,
    near_batch,
    run_near_layer,
    run_near_steps,
    store_all,
    texts_of,
)
from attention.steps import QUIET, TOLERANCE, on_triton, steps_of
from attention.work_lists import dummy_batch
from for_each import for_each
from holdfast.attention.backend import LayerStep
from holdfast.families.grouped.declarations import TorchPagedDeclaration, TritonPagedDeclaration
from holdfast.families.grouped.torch_backend import TorchPagedAttention
from holdfast.families.grouped.triton_backend import TritonPagedAttention
from holdfast.quant.formats import KV_FORMATS
from kernels.exactness import same_bits
from kernels.triton_cases import assert_allocates_nothing

pytestmark = QUIET

QUANTIZED = [name for name, kv_format in KV_FORMATS.items() if kv_format.is_quantized]
EVERY_FORMAT = pytest.mark.parametrize("kv_dtype", QUANTIZED)
LENGTHS = [1, 64, 65, 200]
SMALL = NearGeometry(kv_dtype="turboquant_4bit_nc", max_model_len=512)
LARGE = NearGeometry(num_heads=4, num_kv_heads=1, head_dim=64, page_tokens=16, max_model_len=1024)
TORCH, TRITON = TorchPagedAttention, TritonPagedAttention


def check_texts(geometry: NearGeometry, backend_type, chunk: int, lengths=LENGTHS, with_norm: bool = False) -> None:
    """Whole texts in steps, every row against float64."""
    made, storage = texts_of(geometry, lengths)
    norm, rotary = geometry.head_norm() if with_norm else None, geometry.rotary()
    backend = geometry.build(backend_type, storage)
    outputs = run_near_steps(backend, geometry, storage, made, steps_of(made, chunk), norm, rotary)
    for layer, found in enumerate(outputs):
        for text, out in zip(made, found, strict=True):
            tolerance = TOLERANCE[geometry.dtype] * (5 if geometry.dtype == torch.float32 else 1)
            exact = exact_near(text, layer, norm, rotary)
            torch.testing.assert_close(out.double(), exact, rtol=tolerance, atol=tolerance)


def check_last_rows(geometry: NearGeometry, lengths: list[int], num_rows: list[int], padding: int = 0, **options):
    """The last rows of each text in one step, on Triton, in every layer; the plan's work."""
    made, storage = texts_of(geometry, lengths)
    norm, rotary = geometry.head_norm(), geometry.rotary()
    backend = geometry.build(TRITON, storage, **options)
    store_all(geometry, storage, backend, made, norm, rotary)
    parts = [(text, len(text.qkv) - count, len(text.qkv)) for text, count in zip(made, num_rows, strict=True)]
    for text, start, _ in parts:
        storage.give_back(text, start)
    batch, qkv = near_batch(geometry, storage, parts, sum(num_rows) + padding)
    for layer in range(len(geometry.windows)):
        out = run_near_layer(geometry, storage, backend, batch, qkv, norm, rotary, layer).cpu().double()
        tolerance = TOLERANCE[geometry.dtype]
        for text, rows in zip(made, out[: sum(num_rows)].split(num_rows), strict=True):
            exact = exact_near(text, layer, norm, rotary)[-len(rows) :]
            torch.testing.assert_close(rows, exact, rtol=tolerance, atol=tolerance)
        assert not out[sum(num_rows) :].any(), "padding is zeros"
    return next(iter(backend.plan(batch).work.values()))


@pytest.mark.each_value
@pytest.mark.parametrize("chunk", [1, 50, 200])
@EVERY_FORMAT
def test_torch_paged_near_texts_are_exact(kv_dtype, chunk):
    lengths = [66] if chunk == 1 else LENGTHS
    check_texts(replace(SMALL, kv_dtype=kv_dtype), TORCH, chunk, lengths)


@pytest.mark.each_pair
@pytest.mark.parametrize("softcap", [None, 2.0], ids=["no cap", "capped"])
@pytest.mark.parametrize("has_sinks", [True, False], ids=["sinks", "none"])
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "whole"])
@pytest.mark.parametrize("has_mean", [True, False], ids=["mean", "as they are"])
def test_torch_paged_near_options_are_exact(softcap, has_sinks, has_bias, has_mean):
    geometry = replace(SMALL, softcap=softcap, has_sinks=has_sinks, has_bias=has_bias, has_mean=has_mean)
    check_texts(replace(geometry, windows=(None, 40)), TORCH, 90, [70, 210], with_norm=not has_bias)


@for_each("window", [1, 63, 64, 65, 100, 500])
def test_torch_paged_near_windows_are_exact(window):
    check_texts(replace(SMALL, windows=(window,)), TORCH, 70, [200])


@for_each("block_tokens, near_page, page_tokens", [(64, 1, 4), (64, 64, 1), (128, 16, 16), (128, 2, 64), (64, 8, 256)])
def test_torch_paged_near_page_sizes_are_exact(block_tokens, near_page, page_tokens):
    geometry = replace(SMALL, block_tokens=block_tokens, near_page=near_page, page_tokens=page_tokens)
    check_texts(geometry, TORCH, 100, [270])


FIRST = [
    (64, 1, 16),
    (64, 15, 8),
    (64, 17, 16),
    (64, 63, 16),
    (64, 64, 16),
    (128, 100, 32),
    (128, 64, 4),
    (128, 128, 16),
]


@for_each("block_tokens, first_tokens, near_page", FIRST)
def test_torch_paged_near_first_tokens_are_exact(block_tokens, first_tokens, near_page):
    geometry = replace(SMALL, block_tokens=block_tokens, first_tokens=first_tokens, near_page=near_page)
    check_texts(geometry, TORCH, 90, [40, 200, 300])


@for_each("num_heads, num_kv_heads, head_dim", [(1, 1, 16), (3, 1, 80), (8, 2, 48), (8, 1, 256)])
def test_torch_paged_near_heads_are_exact(num_heads, num_kv_heads, head_dim):
    for kv_dtype in ("turboquant_k3v4_nc", "fp8"):
        geometry = replace(SMALL, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, kv_dtype=kv_dtype)
        check_texts(geometry, TORCH, 80, [135])


def test_torch_paged_near_and_plain_layers_share_a_step():
    names = "turboquant_3bit_nc float32 fp8 turboquant_k8v4 float32"
    check_texts(replace(SMALL, windows=(None, None, 70, None, 70), kv_dtype=names), TORCH, 70, [65, 200])


def test_torch_paged_near_cuts_of_a_prompt_change_little():
    """Whole, and in odd chunks: what a row sees follows from its position."""
    geometry = replace(SMALL, windows=(None, 40), kv_dtype="turboquant_3bit_nc")
    outputs = []
    for chunk in (3, 37, 140):
        (text,), storage = texts_of(geometry, [140])
        backend = geometry.build(TORCH, storage)
        steps = [[(text, start, min(start + chunk, 140))] for start in range(0, 140, chunk)]
        outputs.append(run_near_steps(backend, geometry, storage, [text], steps, None, geometry.rotary()))
    for other in outputs[1:]:
        for (one,), (first,) in zip(other, outputs[0], strict=True):
            torch.testing.assert_close(one, first, rtol=1e-5, atol=1e-5)


def test_torch_paged_near_rows_whose_logits_are_wanted():
    """In any order, some of them in one own block and some in others."""
    geometry = replace(SMALL, windows=(None, 70))
    made, storage = texts_of(geometry, [150, 12])
    wanted = [149, 3, 70, 64, 130, 161, 150]
    backend = geometry.build(TORCH, storage)
    batch, qkv = near_batch(geometry, storage, [(made[0], 0, 150), (made[1], 0, 12)], wanted=wanted)
    for layer in range(2):
        run = (geometry, storage, backend, batch, qkv, None, None, layer)
        every, some = run_near_layer(*run).clone(), run_near_layer(*run, wanted_only=True)
        torch.testing.assert_close(some, every[wanted], rtol=2e-5, atol=2e-5)


@EVERY_FORMAT
def test_triton_paged_near_rows_and_prompts_are_exact(device, kv_dtype):
    """Rows that see no codes, and some that do; a prompt over the end of an own block."""
    geometry = on_triton(replace(LARGE, kv_dtype=kv_dtype, head_dim=32), device)
    check_last_rows(geometry, [200, 3, 129], [1, 2, 12], padding=2)


@pytest.mark.parametrize("has_sinks", [True, False], ids=["sinks", "none"])
def test_triton_paged_near_options_are_exact(device, has_sinks):
    geometry = replace(LARGE, head_dim=32, has_bias=True, has_mean=True, has_sinks=has_sinks, softcap=4.0)
    geometry = on_triton(replace(geometry, kv_dtype="turboquant_4bit_nc"), device)
    made, storage = texts_of(geometry, [200, 66])
    rotary, backend = geometry.rotary(), geometry.build(TRITON, storage)
    store_all(geometry, storage, backend, made, None, rotary)
    for num_rows in ([1, 2], [12, 10]):
        parts = [(text, len(text.qkv) - count, len(text.qkv)) for text, count in zip(made, num_rows, strict=True)]
        batch, qkv = near_batch(geometry, storage, parts)
        out = run_near_layer(geometry, storage, backend, batch, qkv, None, rotary).cpu().double()
        for text, rows in zip(made, out.split(num_rows), strict=True):
            torch.testing.assert_close(rows, exact_near(text, 0, None, rotary)[-len(rows) :], rtol=6e-3, atol=6e-3)


@for_each("window", [1, 63, 64, 100])
def test_triton_paged_near_windows_are_exact(device, window):
    geometry = replace(LARGE, head_dim=16, windows=(window,), kv_dtype="turboquant_4bit_nc")
    check_last_rows(on_triton(geometry, device), [180, 129], [1, 12])


@for_each(
    "num_heads, num_kv_heads, head_dim, page_tokens, near_page",
    [(2, 2, 80, 16, 4), (3, 1, 16, 1, 64), (8, 1, 256, 64, 1)],
)
def test_triton_paged_near_heads_and_pages_are_exact(device, num_heads, num_kv_heads, head_dim, page_tokens, near_page):
    geometry = NearGeometry(num_heads, num_kv_heads, head_dim, page_tokens, kv_dtype="turboquant_k3v4_nc")
    check_last_rows(on_triton(replace(geometry, near_page=near_page), device), [150], [3])


@for_each("block_tokens, first_tokens, near_page", FIRST)
def test_triton_paged_near_first_tokens_are_exact(device, block_tokens, first_tokens, near_page):
    """Rows before and behind the first tokens, in the first block, in the second, and further on."""
    geometry = replace(LARGE, head_dim=16, block_tokens=block_tokens, first_tokens=first_tokens, near_page=near_page)
    geometry = replace(geometry, num_kv_heads=2, kv_dtype="turboquant_4bit_nc")
    check_last_rows(on_triton(geometry, device), [first_tokens, 40, 150, 270], [1, 20, 12, 1], num_sms=2)


@for_each("num_heads, num_kv_heads, head_dim", [(2, 2, 128), (3, 1, 64), (8, 1, 32)])
@for_each("kv_dtype", ["fp8", "turboquant_3bit_nc"])
def test_triton_paged_near_heads_behind_first_tokens_are_exact(device, num_heads, num_kv_heads, head_dim, kv_dtype):
    geometry = NearGeometry(num_heads, num_kv_heads, head_dim, 64, kv_dtype=kv_dtype)
    check_last_rows(on_triton(geometry, device), [100, 200], [1, 30])


def test_triton_paged_near_contexts_are_split_over_codes(device):
    geometry = on_triton(replace(LARGE, head_dim=16, block_tokens=128, kv_dtype="turboquant_k8v4"), device)
    work = check_last_rows(geometry, [700, 3], [1, 1], num_sms=2)
    assert work.rows_T2[:2, 1].tolist()[0] > 3, "codes were not split"
    assert work.rows_T2[:2, 1].tolist()[1] == 1, "a row of the first block sees no codes to split"


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 100])
@EVERY_FORMAT
def test_triton_paged_near_texts_are_exact(device, kv_dtype, window):
    geometry = on_triton(replace(LARGE, head_dim=32, windows=(window,), kv_dtype=kv_dtype), device)
    check_texts(geometry, TRITON, 45, [1, 64, 65, 210])


def assert_cuts_change_nothing(geometry: NearGeometry, num_prompt: int, cuts: tuple[int, ...]) -> None:
    """The end of a prompt in one piece and in these, beside another sequence, gives the same bits."""
    results = []
    for bounds in ((cuts[0], num_prompt), cuts):
        (text, other), storage = texts_of(geometry, [num_prompt, 190])
        backend = geometry.build(TRITON, storage, batch_invariant=True)
        store_all(geometry, storage, backend, [text, other])
        rows = []
        for start, end in pairwise(bounds):
            parts = [(text, start, end), (other, 189, 190)]
            padded = max(16, end - start + 1)
            batch, qkv = near_batch(geometry, storage, parts, padded, num_prompt=num_prompt)
            rows.append(run_near_layer(geometry, storage, backend, batch, qkv)[: end - start])
            storage.give_back(text, end)
        results.append(torch.cat(rows))
    assert same_bits(*results)


@pytest.mark.parametrize("window", [None, 40])
def test_near_invariant_prompt_cuts_change_no_bit(device, window):
    geometry = replace(LARGE, head_dim=16, windows=(window,), kv_dtype="turboquant_4bit_nc")
    assert_cuts_change_nothing(on_triton(geometry, device), 142, (120, 121, 127, 131, 142))


def test_near_invariant_row_has_same_bits_in_any_batch(device):
    geometry = on_triton(replace(LARGE, head_dim=16, kv_dtype="turboquant_k8v4"), device)
    made, storage = texts_of(geometry, [520, 3, 130])
    backend = geometry.build(TRITON, storage, batch_invariant=True)
    store_all(geometry, storage, backend, made)
    parts = [(text, len(text.qkv) - 1, len(text.qkv)) for text in made]
    alone = []
    for part in parts:
        batch, qkv = near_batch(geometry, storage, [part], 16)
        alone.append(run_near_layer(geometry, storage, backend, batch, qkv)[:1])
    batch, qkv = near_batch(geometry, storage, parts[::-1], 20)
    out = run_near_layer(geometry, storage, backend, batch, qkv)
    assert same_bits(out[:3], torch.cat(alone[::-1]))
    assert same_bits(out[3:], torch.zeros_like(out[3:])), "padding is zeros"


@for_each("windows", [(None,), (None, 5, None), (70, 5)])
@for_each("max_model_len", [200, 1024])
def test_near_backend_holds_bytes_of_its_declared_terms(windows, max_model_len):
    names = " ".join(["turboquant_k8v4", "float16", "turboquant_k8v4"][: len(windows)])
    geometry = replace(LARGE, windows=windows, max_model_len=max_model_len, kv_dtype=names, dtype=torch.float16)
    for backend_type, declaration in ((TRITON, TritonPagedDeclaration()), (TORCH, TorchPagedDeclaration())):
        _, storage = texts_of(geometry, [1])
        terms = declaration.terms(geometry.specs, BOUNDS)
        assert geometry.build(backend_type, storage).held_bytes() == {term.owner: term.num_bytes for term in terms}


ON_GPU = [
    *((name, torch.bfloat16, (64, 8, 128)) for name in QUANTIZED),
    ("turboquant_k8v4", torch.float16, (14, 2, 64)),
    ("turboquant_3bit_nc", torch.bfloat16, (8, 1, 256)),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("kv_dtype", "dtype", "heads"), ON_GPU, ids=str)
def test_near_half_precision_on_a_gpu(device, kv_dtype, dtype, heads):
    geometry = NearGeometry(*heads, 16, (None, 100), kv_dtype, dtype, 2048, device)
    check_last_rows(geometry, [1, 65, 1000, 400, 520], [1, 65, 1, 120, 2], padding=3, num_sms=132)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 100])
@EVERY_FORMAT
def test_near_invariant_prompt_cuts_at_real_shapes_change_no_bit(device, kv_dtype, window):
    geometry = NearGeometry(64, 8, 128, 16, (window,), kv_dtype, max_model_len=2048)
    cuts = (30, 31, 63, 64, 126, 190, 256, 300)
    assert_cuts_change_nothing(on_triton(geometry, device), 300, cuts)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", ["turboquant_k8v4", "turboquant_3bit_nc"])
def test_near_captured_graph_replays_other_batches(device, kv_dtype):
    """Captured on padding alone, replayed at any length, and each time what runs without a graph gives."""
    geometry = on_triton(replace(LARGE, kv_dtype=kv_dtype), device)
    made, storage = texts_of(geometry, [900, 300, 1, 64])
    backend = geometry.build(TRITON, storage)
    store_all(geometry, storage, backend, made)
    tables = tuple(torch.zeros(8, 80, dtype=torch.int32, device=device) for _ in range(2))
    q, out, eager = (torch.randn(4, 4 * 64, device=device).half() for _ in range(3))
    scratch = geometry.scratch()

    def attend(plan, out_TX):
        backend.attend(q.view(4, 4, 64), LayerStep(0, plan, scratch), out_TX, False)

    empty = replace(dummy_batch([], num_padding=4), page_tables=tables)
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
            batch, _ = near_batch(geometry, storage, parts, num_rows=4)
            for table, own in zip(tables, batch.page_tables, strict=True):
                table[: len(parts) + 1, : own.shape[1]] = own
            batch = replace(batch, page_tables=tables)
        out.fill_(NAN)
        eager.fill_(NAN)
        attend(backend.plan(batch), eager)
        backend.plan(batch, captured=True)
        graph.replay()
        assert same_bits(out, eager), f"{chosen=}"
        assert not out[len(chosen) :].any()


@pytest.mark.gpu
def test_near_step_allocates_nothing(device):
    geometry = on_triton(replace(LARGE, windows=(None, None), kv_dtype="turboquant_k8v4 float16"), device)
    made, storage = texts_of(geometry, [300, 40])
    backend = geometry.build(TRITON, storage)
    store_all(geometry, storage, backend, made)
    batch, qkv = near_batch(geometry, storage, [(made[0], 0, 250), (made[1], 39, 40)], 256)
    q, out, scratch = qkv.new_empty(256, 4, 64), qkv.new_empty(256, 256), geometry.scratch()

    def step():
        plan = backend.plan(batch)
        for layer in range(2):
            backend.write(qkv, batch, None, None, layer, q)
            backend.attend(q, LayerStep(layer, plan, scratch), out, False)

    assert_allocates_nothing(step)
