"""Attention over any pages in plain torch: every format, head and window."""

from dataclasses import replace

import pytest
import torch

from attention.steps import Geometry, make_batch, run_layer, run_steps, steps_of, texts
from holdfast.attention.declarations import StepBounds
from holdfast.families.grouped.declarations import TorchPagedDeclaration
from holdfast.families.grouped.pages import PagedRows
from holdfast.families.grouped.torch_backend import MASK_ALIGNMENT, TorchPagedAttention, aligned_mask
from holdfast.quant.formats import KV_FORMATS
from holdfast.quant.kv_quantize import rotate_heads
from kernels.exactness import random, same_bits

LENGTHS = [1, 7, 64, 65, 130]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 6e-3, torch.bfloat16: 5e-2}


def check(geometry, consecutive=True, chunk=40, layer=0, head_norm=None, rotary=None, seed=0):
    made, num_pages = texts(geometry, LENGTHS, consecutive, seed)
    backend = TorchPagedAttention(geometry.specs, geometry.storage(num_pages))
    outputs = run_steps(backend, geometry, made, steps_of(made, chunk, seed), head_norm, rotary, layer)
    for text, out in zip(made, outputs, strict=True):
        exact = text.exact(geometry.windows[layer], head_norm, rotary, layer)
        tolerance = TOLERANCE[geometry.dtype]
        torch.testing.assert_close(out.double(), exact, rtol=tolerance, atol=tolerance)


@pytest.mark.each_pair
@pytest.mark.parametrize("consecutive", [True, False], ids=["in a row", "scattered"])
@pytest.mark.parametrize("kv_dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("chunk", [1, 5, 200])
def test_torch_paged_every_plain_format_is_exact(kv_dtype, consecutive, chunk):
    check(Geometry(kv_dtype=kv_dtype), consecutive, chunk)


QUANTIZED = tuple(name for name, kv_format in KV_FORMATS.items() if kv_format.is_quantized)
EVERY_QUANTIZED = pytest.mark.parametrize("kv_dtype", QUANTIZED)


@pytest.mark.each_value
@EVERY_QUANTIZED
@pytest.mark.parametrize("consecutive", [True, False], ids=["in a row", "scattered"])
@pytest.mark.parametrize(("chunk", "page_tokens"), [(5, 1), (40, 16), (200, 64)])
def test_torch_paged_every_quantized_format_is_exact(kv_dtype, consecutive, chunk, page_tokens):
    check(Geometry(kv_dtype=kv_dtype, page_tokens=page_tokens), consecutive, chunk)


@pytest.mark.each_value
@EVERY_QUANTIZED
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"), [(2, 2, 64), (14, 2, 80), (8, 1, 128), (7, 1, 96), (3, 1, 16)]
)
def test_heads_of_quantized_formats(kv_dtype, num_heads, num_kv_heads, head_dim):
    geometry = Geometry(num_heads, num_kv_heads, head_dim, page_tokens=16, kv_dtype=kv_dtype)
    check(geometry, consecutive=False, head_norm=geometry.head_norm(), rotary=geometry.rotary())


@pytest.mark.each_value
@EVERY_QUANTIZED
@pytest.mark.parametrize("window", [1, 5, 64, 1000])
def test_windows_of_quantized_formats(kv_dtype, window):
    check(Geometry(kv_dtype=kv_dtype, windows=(window,), page_tokens=16), consecutive=False, chunk=20)


@pytest.mark.parametrize("layer", range(4))
def test_layers_of_different_formats(layer):
    check(
        Geometry(
            windows=(None, 5, None, 64), kv_dtype="bfloat16 turboquant_3bit_nc fp8 turboquant_k8v4", page_tokens=16
        ),
        consecutive=False,
        layer=layer,
    )


@pytest.mark.each_value
@pytest.mark.parametrize("kv_dtype", ["float32", *QUANTIZED])
@pytest.mark.parametrize("window", [None, 70])
def test_chunks_and_pages_change_no_bit_of_codes(kv_dtype, window):
    """A block sees the same codes, however they came there."""
    geometry = Geometry(kv_dtype=kv_dtype, windows=(window,), page_tokens=16)
    for lengths in ([300], [30, 130, 2]):
        runs = []
        for chunk, consecutive, page_tokens in ((128, True, 16), (128, False, 1), (256, False, 64)):
            paged = replace(geometry, page_tokens=page_tokens, max_model_len=512)
            made, num_pages = texts(paged, lengths, consecutive)
            backend = TorchPagedAttention(paged.specs, paged.storage(num_pages))
            steps = [
                [(text, start, min(start + chunk, len(text.qkv))) for text in made if start < len(text.qkv)]
                for start in range(0, max(lengths), chunk)
            ]
            runs.append(run_steps(backend, paged, made, steps))
        for other in runs[1:]:
            assert all(same_bits(mine, theirs) for mine, theirs in zip(runs[0], other, strict=True))


@EVERY_QUANTIZED
def test_torch_paged_k_mean_removes_constant_key_bias(kv_dtype):
    """A constant part of all keys, far larger than the rest, costs nothing where it is known."""
    geometry = Geometry(kv_dtype=kv_dtype, head_dim=64, page_tokens=16)
    bias = random(2, 64, seed=9, scale=30.0)
    rotated = rotate_heads(bias) if geometry.formats[0].key_bits < 8 else bias
    made, num_pages = texts(geometry, [70, 9], consecutive=False)
    plain = [text.exact(None) for text in made]
    for text in made:
        text.qkv[:, 6 * 64 : 8 * 64] += bias.flatten()
    centered = TorchPagedAttention(geometry.specs, geometry.storage(num_pages), [rotated])
    for text, out, unbiased in zip(made, run_steps(centered, geometry, made, steps_of(made, 24)), plain, strict=True):
        torch.testing.assert_close(out.double(), text.exact(None, k_mean=rotated), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(out.double(), unbiased, rtol=0.02, atol=0.05)


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@EVERY_QUANTIZED
def test_half_computation_over_codes(dtype, kv_dtype):
    geometry = Geometry(head_dim=64, dtype=getattr(torch, dtype), kv_dtype=kv_dtype)
    made, num_pages = texts(geometry, LENGTHS, consecutive=False)
    backend = TorchPagedAttention(geometry.specs, geometry.storage(num_pages))
    for text, out in zip(made, run_steps(backend, geometry, made, steps_of(made, 40)), strict=True):
        # Keys, weights and sums are rounded to the type of the queries, which codes of 8 bits do not need.
        tolerance = 4 * TOLERANCE[geometry.dtype]
        torch.testing.assert_close(out.double(), text.exact(None), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("num_rows", "start", "end"), [(1, 0, 8), (3, 1, 20), (128, 255, 300), (2, 13, 14)])
def test_aligned_mask_start_and_rows_are_aligned(dtype, num_rows, start, end):
    """Whichever slice of the template it is, and whatever the template's width."""
    for width in (300, 304):
        template = random(128, width, seed=width).to(dtype)
        mask = aligned_mask(template[:num_rows, start:end])
        assert same_bits(mask, template[:num_rows, start:end])
        assert mask.data_ptr() % (MASK_ALIGNMENT * mask.element_size()) == 0
        assert mask.stride(0) % MASK_ALIGNMENT == 0
        assert mask.stride(1) == 1


@pytest.mark.gpu
@pytest.mark.own_process
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_torch_paged_mixed_formats_on_gpu_are_exact(device, dtype):
    """Where no kernel takes the mix, since a layer's pages are wider than its queries."""
    names = f"float32 {' '.join(QUANTIZED)}"
    windows = len(names.split()) * (None,)
    geometry = Geometry(head_dim=64, page_tokens=16, windows=windows, kv_dtype=names, dtype=dtype, device=device)
    made, num_pages = texts(geometry, LENGTHS, consecutive=False)
    backend = TorchPagedAttention(geometry.specs, geometry.storage(num_pages))
    for layer in range(len(windows)):
        outputs = run_steps(backend, geometry, made, steps_of(made, 40), geometry.head_norm(), geometry.rotary(), layer)
        for text, out in zip(made, outputs, strict=True):
            exact = text.exact(None, geometry.head_norm(), geometry.rotary(), layer)
            tolerance = 4 * TOLERANCE[dtype]
            torch.testing.assert_close(out.double(), exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kv_dtype", ["float32", "turboquant_4bit_nc"])
def test_rows_of_a_sequence_are_read_once(monkeypatch, kv_dtype):
    """However many of them are wanted, and in any order among those of others."""
    geometry = Geometry(kv_dtype=kv_dtype, windows=(None, 5))
    made, num_pages = texts(geometry, [40, 12], consecutive=False)
    backend = TorchPagedAttention(geometry.specs, geometry.storage(num_pages))
    batch, qkv = make_batch(geometry, [(made[0], 0, 40), (made[1], 0, 12)], wanted=[3, 39, 17, 40, 51])
    located, locate = [], PagedRows.locate
    monkeypatch.setattr(PagedRows, "locate", lambda *args: located.append(args) or locate(*args))
    plan = backend.plan(batch)
    assert len(located) == 2 * 2 * 2, "two sequences, all rows and the wanted ones, two windows"
    for layer in range(2):
        every = run_layer(geometry, backend, qkv, batch, layer=layer, plan=plan).clone()
        some = run_layer(geometry, backend, qkv, batch, layer=layer, plan=plan, wanted_only=True)
        torch.testing.assert_close(some, every[[3, 39, 17, 40, 51]], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("consecutive", [True, False], ids=["in a row", "scattered"])
def test_torch_paged_half_precision_is_exact(dtype, consecutive):
    check(Geometry(dtype=getattr(torch, dtype), kv_dtype=dtype), consecutive)


@pytest.mark.each_value
@pytest.mark.parametrize("consecutive", [True, False], ids=["in a row", "scattered"])
@pytest.mark.parametrize("window", [1, 5, 64, 100, 1000])
@pytest.mark.parametrize("chunk", [1, 3, 50, 200])
def test_torch_paged_windows_are_exact(window, consecutive, chunk):
    check(Geometry(windows=(window,)), consecutive, chunk)


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_layers_with_different_windows_share_a_plan(layer):
    check(Geometry(windows=(None, 5, 64)), layer=layer)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"), [(1, 1, 64), (4, 4, 24), (14, 2, 80), (71, 1, 16), (3, 1, 128)]
)
@pytest.mark.parametrize("consecutive", [True, False], ids=["in a row", "scattered"])
def test_torch_paged_head_counts_are_exact(num_heads, num_kv_heads, head_dim, consecutive):
    check(Geometry(num_heads, num_kv_heads, head_dim), consecutive)


@pytest.mark.parametrize("page_tokens", [1, 16, 256])
def test_torch_paged_page_sizes_are_exact(page_tokens):
    check(Geometry(page_tokens=page_tokens), consecutive=False)


@pytest.mark.parametrize("with_norm", [True, False], ids=["norm", "no norm"])
@pytest.mark.parametrize("with_rope", [True, False], ids=["rope", "no rope"])
def test_norm_and_rotation(with_norm, with_rope):
    geometry = Geometry()
    check(
        geometry,
        head_norm=geometry.head_norm() if with_norm else None,
        rotary=geometry.rotary() if with_rope else None,
    )


def test_torch_paged_context_at_max_model_len_is_exact():
    """The mask template ends exactly there."""
    for window in (None, 7):
        check(replace(Geometry(windows=(window,)), max_model_len=max(LENGTHS)), chunk=200)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kv_dtype", ["float32", *QUANTIZED, "fp8 float32 fp8", "float16 turboquant_3bit_nc fp8"])
def test_backend_holds_bytes_of_its_declared_terms(dtype, kv_dtype):
    geometry = Geometry(windows=(None, 5, None), max_model_len=70, dtype=dtype, kv_dtype=kv_dtype)
    backend = TorchPagedAttention(geometry.specs, geometry.storage(4))
    terms = TorchPagedDeclaration().terms(geometry.specs, StepBounds(8, 64, 4))
    assert backend.held_bytes() == {term.owner: term.num_bytes for term in terms}


def test_attention_plan_is_reusable_across_layers_and_steps():
    """Nothing of a step stays behind in the backend."""
    geometry = Geometry()
    made, num_pages = texts(geometry, [12, 30], consecutive=False)
    backend = TorchPagedAttention(geometry.specs, geometry.storage(num_pages))
    first, qkv = make_batch(geometry, [(made[0], 0, 12)])
    plan = backend.plan(first)
    expected = run_layer(geometry, backend, qkv, first, plan=plan)
    other, other_qkv = make_batch(geometry, [(made[1], 0, 30)])
    run_layer(geometry, backend, other_qkv, other)
    assert torch.equal(run_layer(geometry, backend, qkv, first, plan=plan), expected)
