from dataclasses import replace

import pytest
import torch

from attention.steps import Geometry, make_batch, run_layer, run_steps, steps_of, texts
from holdfast.attention.torch_paged import MASK_ELEMENTS, MAX_BLOCK_ROWS, TorchPagedAttention, block_rows

LENGTHS = [1, 7, 64, 65, 130]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 6e-3, torch.bfloat16: 5e-2}


def check(geometry, consecutive=True, chunk=40, layer=0, head_norm=None, rotary=None, seed=0):
    made, num_pages = texts(geometry, LENGTHS, consecutive, seed)
    backend = TorchPagedAttention(geometry.specs, geometry.storage(num_pages))
    outputs = run_steps(backend, geometry, made, steps_of(made, chunk, seed), head_norm, rotary, layer)
    for text, out in zip(made, outputs, strict=True):
        exact = text.exact(geometry.windows[layer], head_norm, rotary)
        tolerance = TOLERANCE[geometry.dtype]
        torch.testing.assert_close(out.double(), exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("consecutive", [True, False], ids=["in a row", "scattered"])
@pytest.mark.parametrize("kv_dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("chunk", [1, 5, 200])
def test_every_page_format(kv_dtype, consecutive, chunk):
    check(Geometry(kv_dtype=kv_dtype), consecutive, chunk)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("consecutive", [True, False], ids=["in a row", "scattered"])
def test_half_computation(dtype, consecutive):
    check(Geometry(dtype=getattr(torch, dtype), kv_dtype=dtype), consecutive)


@pytest.mark.parametrize("consecutive", [True, False], ids=["in a row", "scattered"])
@pytest.mark.parametrize("window", [1, 5, 64, 100, 1000])
@pytest.mark.parametrize("chunk", [1, 3, 50, 200])
def test_windows(window, consecutive, chunk):
    check(Geometry(windows=(window,)), consecutive, chunk)


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_layers_with_different_windows_share_a_plan(layer):
    check(Geometry(windows=(None, 5, 64)), layer=layer)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"), [(1, 1, 64), (4, 4, 24), (14, 2, 80), (71, 1, 16), (3, 1, 128)]
)
@pytest.mark.parametrize("consecutive", [True, False], ids=["in a row", "scattered"])
def test_heads(num_heads, num_kv_heads, head_dim, consecutive):
    check(Geometry(num_heads, num_kv_heads, head_dim), consecutive)


@pytest.mark.parametrize("page_tokens", [1, 16, 256])
def test_page_sizes(page_tokens):
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


def test_a_context_as_long_as_allowed():
    """The mask template ends exactly there."""
    for window in (None, 7):
        check(replace(Geometry(windows=(window,)), max_model_len=max(LENGTHS)), chunk=200)


def test_unused_pages_are_neither_read_nor_written():
    geometry = Geometry()
    made, num_pages = texts(geometry, [30, 9], consecutive=False)
    storage = geometry.storage(num_pages)
    backend = TorchPagedAttention(geometry.specs, storage)
    run_steps(backend, geometry, made, steps_of(made, 8))
    used = {text.pages[i // 4] * 4 + i % 4 for text in made for i in range(len(text.qkv))}
    for name in ("k", "v"):
        plane = storage.plane(0, name)
        assert plane[sorted(used)].isfinite().all()
        assert plane[[slot for slot in range(len(plane)) if slot not in used]].isnan().all()


def test_one_sequence_cannot_hurt_another():
    geometry = Geometry()
    made, num_pages = texts(geometry, [20, 20], consecutive=False)
    made[1].qkv[3] = float("nan")
    backend = TorchPagedAttention(geometry.specs, geometry.storage(num_pages))
    healthy, hurt = run_steps(backend, geometry, made, [[(made[0], 0, 20), (made[1], 0, 20)]])
    torch.testing.assert_close(healthy.double(), made[0].exact(None), rtol=2e-5, atol=2e-5)
    assert hurt[3:].isnan().any()


@pytest.mark.parametrize("max_model_len", [1, 64, 2048, 32768, 131072, 10**7])
@pytest.mark.parametrize("windows", [(None,), (None, 4096), (5, 5, 5)])
def test_masks_are_bounded(max_model_len, windows):
    geometry = Geometry(windows=windows, max_model_len=max_model_len)
    (term,) = TorchPagedAttention.terms(geometry.specs)
    rows = block_rows(max_model_len)
    assert 16 <= rows <= MAX_BLOCK_ROWS
    num_windows = len(set(windows))
    assert term.num_bytes == 4 * num_windows * rows * (max_model_len + rows)
    if max_model_len <= MASK_ELEMENTS // 16:
        assert term.num_bytes <= 4 * num_windows * (MASK_ELEMENTS + rows * rows)


def test_what_it_holds_is_what_it_said(monkeypatch):
    geometry = Geometry(windows=(None, 5, None), max_model_len=70)
    held = []
    template = TorchPagedAttention._mask_template
    monkeypatch.setattr(
        TorchPagedAttention, "_mask_template", lambda self, window: held.append(template(self, window)) or held[-1]
    )
    TorchPagedAttention(geometry.specs, geometry.storage(4))
    assert sum(mask.nbytes for mask in held) == sum(
        term.num_bytes for term in TorchPagedAttention.terms(geometry.specs)
    )


def test_declines_in_words():
    geometry = Geometry(num_heads=7, num_kv_heads=2)
    assert TorchPagedAttention.unsupported(geometry.specs[0]) == "7 query heads do not divide into 2 key heads"
    assert TorchPagedAttention.unsupported(Geometry().specs[0]) is None


def test_a_plan_serves_every_layer_and_step():
    """Nothing of a step stays behind in the backend."""
    geometry = Geometry()
    made, num_pages = texts(geometry, [12, 30], consecutive=False)
    backend = TorchPagedAttention(geometry.specs, geometry.storage(num_pages))
    first, qkv = make_batch(geometry, [(made[0], 0, 12)])
    plan = backend.plan(first.sequences)
    expected = backend.attend(backend.write(qkv, first, None, None, 0), 0, plan)
    other, other_qkv = make_batch(geometry, [(made[1], 0, 30)])
    run_layer(backend, other_qkv, other)
    assert torch.equal(backend.attend(backend.write(qkv, first, None, None, 0), 0, plan), expected)
