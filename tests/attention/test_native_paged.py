from dataclasses import replace

import pytest
import torch

from attention.steps import Geometry, make_batch, run_layer, run_steps, steps_of, texts
from holdfast.attention.native_paged import NativePagedAttention
from holdfast.attention.torch_paged import TorchPagedAttention
from kernels.exactness import require_native, same_bits

LENGTHS = [1, 7, 64, 65, 130]


@pytest.fixture(autouse=True)
def native():
    return require_native()


def outputs(geometry, consecutive=False, chunk=40, seed=0, backend_type=NativePagedAttention, norm_and_rope=True):
    made, num_pages = texts(geometry, LENGTHS, consecutive)
    backend = backend_type(geometry.specs, geometry.storage(num_pages))
    head_norm, rotary = (geometry.head_norm(), geometry.rotary()) if norm_and_rope else (None, None)
    steps = steps_of(made, chunk, seed)
    return [
        run_steps(backend, geometry, made, steps, head_norm, rotary, layer) for layer in range(len(geometry.windows))
    ]


@pytest.mark.parametrize(
    "geometry",
    [
        Geometry(),
        Geometry(num_heads=4, num_kv_heads=4, head_dim=24),
        Geometry(num_heads=14, head_dim=80, page_tokens=16),
        Geometry(num_heads=71, num_kv_heads=1, page_tokens=1),
        Geometry(windows=(None, 5, 64, 100), page_tokens=256),
        Geometry(windows=(1, None), head_dim=2),
    ],
    ids=["grouped", "one query a key", "D80", "71 queries a key", "windows", "D2"],
)
@pytest.mark.parametrize("consecutive", [True, False], ids=["in a row", "scattered"])
@pytest.mark.parametrize("norm_and_rope", [True, False], ids=["norm and rope", "plain"])
def test_as_exact_as_torch(geometry, consecutive, norm_and_rope):
    made, _ = texts(geometry, LENGTHS, consecutive)
    native = outputs(geometry, consecutive, norm_and_rope=norm_and_rope)
    in_torch = outputs(geometry, consecutive, backend_type=TorchPagedAttention, norm_and_rope=norm_and_rope)
    head_norm, rotary = (geometry.head_norm(), geometry.rotary()) if norm_and_rope else (None, None)
    for layer, window in enumerate(geometry.windows):
        for index, text in enumerate(made):
            exact = text.exact(window, head_norm, rotary)
            error = float((native[layer][index].double() - exact).abs().max())
            torch_error = float((in_torch[layer][index].double() - exact).abs().max())
            assert error <= 4 * torch_error + 2e-6, f"{window=} {len(text.qkv)} tokens: {error=} {torch_error=}"


@pytest.mark.parametrize("windows", [(None,), (5,), (64,)], ids=str)
def test_chunks_company_and_pages_change_no_bit(windows):
    geometry = Geometry(windows=windows)
    (expected,) = outputs(geometry, consecutive=True, chunk=1000)
    for chunk in (1, 2, 3, 17, 64, 100):
        for page_tokens in (1, 16):
            (others,) = outputs(replace(geometry, page_tokens=page_tokens), chunk=chunk, seed=chunk)
            assert all(same_bits(mine, theirs) for mine, theirs in zip(expected, others, strict=True)), f"{chunk=}"


def test_unused_pages_are_neither_read_nor_written():
    geometry = Geometry()
    made, num_pages = texts(geometry, [30, 9], consecutive=False)
    storage = geometry.storage(num_pages)
    run_steps(NativePagedAttention(geometry.specs, storage), geometry, made, steps_of(made, 8))
    used = {text.pages[i // 4] * 4 + i % 4 for text in made for i in range(len(text.qkv))}
    for name in ("k", "v"):
        plane = storage.plane(0, name)
        assert plane[sorted(used)].isfinite().all()
        assert plane[[slot for slot in range(len(plane)) if slot not in used]].isnan().all()


def test_pages_that_are_not_needed_yet_may_be_listed():
    """A sequence holds pages for its next tokens before it writes them."""
    geometry = Geometry()
    made, num_pages = texts(geometry, [30], consecutive=False)
    backend = NativePagedAttention(geometry.specs, geometry.storage(num_pages))
    batch, qkv = make_batch(geometry, [(made[0], 0, 9)])
    out = run_layer(backend, qkv, batch)
    torch.testing.assert_close(out.double(), made[0].exact(None)[:9], rtol=2e-5, atol=2e-5)


def test_it_holds_nothing():
    assert NativePagedAttention.terms(Geometry().specs) == ()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"kv_dtype": "float16"}, "float32 over float32 pages only"),
        ({"kv_dtype": "bfloat16"}, "float32 over float32 pages only"),
        ({"dtype": torch.bfloat16, "kv_dtype": "bfloat16"}, "float32 over float32 pages only"),
    ],
)
def test_declines_in_words(change, reason):
    assert reason in str(NativePagedAttention.unsupported(replace(Geometry(), **change).specs[0]))


def test_declines_another_device():
    spec = replace(Geometry().specs[0], device=torch.device("cuda", 0))
    assert NativePagedAttention.unsupported(spec) == "it runs on CPU only, not on cuda"


def test_declines_without_a_compiler(monkeypatch):
    monkeypatch.setattr("holdfast.kernels.paged_attention.native_library", lambda: None)
    assert NativePagedAttention.unsupported(Geometry().specs[0]) == "it needs a C compiler"
