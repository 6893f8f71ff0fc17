"""Attention over float32 pages on the CPU with the C kernel."""

from dataclasses import replace

import pytest
import torch

from attention.steps import Geometry, make_batch, run_steps, steps_of, texts
from holdfast.attention.backend import Batch, LayerStep
from holdfast.families.grouped.native_backend import NativePagedAttention
from holdfast.families.grouped.torch_backend import TorchPagedAttention
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


@pytest.mark.each_pair
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
def test_native_paged_is_as_exact_as_torch(geometry, consecutive, norm_and_rope):
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
def test_native_paged_same_bits_in_any_chunks_batch_and_pages(windows):
    geometry = Geometry(windows=windows)
    (expected,) = outputs(geometry, consecutive=True, chunk=1000)
    for chunk in (1, 2, 3, 17, 64, 100):
        for page_tokens in (1, 16):
            (others,) = outputs(replace(geometry, page_tokens=page_tokens), chunk=chunk, seed=chunk)
            assert all(same_bits(mine, theirs) for mine, theirs in zip(expected, others, strict=True)), f"{chunk=}"


def test_native_paged_plan_lists_pages_and_sequences():
    geometry = Geometry()
    made, num_pages = texts(geometry, [30, 9], consecutive=False)
    backend = NativePagedAttention(geometry.specs, geometry.storage(num_pages))
    parts = [(made[0], 20, 30), (made[1], 8, 9)]
    batch, _ = make_batch(geometry, parts)
    plan = backend.plan(batch)
    assert plan.every[0].pages_P.dtype == torch.int32
    assert plan.every[0].pages_P.tolist() == made[0].pages + made[1].pages
    assert plan.every[0].sequences_N4.tolist() == [[0, 10, 20, 0], [10, 1, 8, 8]]
    assert plan.wanted is plan.wanted_rows_R is None
    batch, _ = make_batch(geometry, parts, wanted=[3, 10])
    plan = backend.plan(batch, captured=True)
    assert plan.wanted is not None
    assert plan.wanted[0].sequences_N4.tolist() == [[0, 1, 23, 0], [1, 1, 8, 8]]
    assert plan.wanted_rows_R is not None
    assert plan.wanted_rows_R.tolist() == [3, 10]


def test_native_paged_empty_step_gives_empty_output():
    geometry = Geometry()
    backend = NativePagedAttention(geometry.specs, geometry.storage(1))
    nothing = torch.zeros(0, dtype=torch.int64)
    batch = Batch(nothing, nothing, nothing.unsqueeze(0), (), None)
    plan = backend.plan(batch)
    assert plan.every[0].sequences_N4.shape == (0, 4)
    assert backend.attend(torch.empty(0, 6, 16), LayerStep(0, plan, {}), torch.empty(0, 96), False).shape == (0, 96)
