from dataclasses import replace

import pytest
import torch

from attention.steps import Geometry, make_batch, run_layer, run_steps, steps_of, texts
from holdfast.attention.declarations import TorchPagedDeclaration
from holdfast.attention.spec import StepBounds
from holdfast.attention.torch_paged import TorchPagedAttention

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_it_holds_is_what_it_said(monkeypatch, dtype):
    geometry = Geometry(windows=(None, 5, None), max_model_len=70, dtype=dtype)
    held = []
    template = TorchPagedAttention._mask_template
    monkeypatch.setattr(
        TorchPagedAttention, "_mask_template", lambda self, window: held.append(template(self, window)) or held[-1]
    )
    TorchPagedAttention(geometry.specs, geometry.storage(4))
    terms = TorchPagedDeclaration().terms(geometry.specs, StepBounds(8, 64, 4))
    assert sum(mask.nbytes for mask in held) == sum(term.num_bytes for term in terms)


def test_a_plan_serves_every_layer_and_step():
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
