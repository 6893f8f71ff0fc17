"""Prompts through the lane in whole steps of a backend: every format, near pages, windows, company, and what it holds."""

from dataclasses import replace

import pytest
import torch

from attention.near_steps import NearGeometry
from attention.steps import (
    CPU,
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
from families.grouped.test_near_pages import check_texts
from for_each import for_each
from holdfast.attention.backend import EagerStep, LayerStep
from holdfast.attention.declarations import StepBounds
from holdfast.families.grouped.declarations import TritonPagedDeclaration, declined_lane, lane_bytes, lane_terms
from holdfast.families.grouped.triton_backend import TritonPagedAttention
from holdfast.kernels.geometry import LANE_BYTES, MOST_LANE_BYTES
from holdfast.quant.formats import KV_FORMATS
from kernels.exactness import same_bits
from kernels.triton_cases import assert_allocates_nothing

pytestmark = QUIET
TRITON = TritonPagedAttention
SMALL = Geometry(4, 2, 64, 16, kv_dtype="turboquant_4bit_nc", max_model_len=1024, has_lane=True)
NEAR = NearGeometry(4, 2, 64, 16, kv_dtype="turboquant_4bit_nc", max_model_len=512, has_lane=True)


@for_each("kv_dtype", [name for name, kv_format in KV_FORMATS.items() if kv_format.is_quantized])
def test_lane_step_of_a_backend_is_exact(kv_dtype):
    """Prompts after contexts beside a row that is no prompt's."""
    work = check_rows(on_triton(replace(SMALL, kv_dtype=kv_dtype), CPU), [200, 3, 90], [80, 1, 90])
    assert work.lane is not None
    assert work.has_small
    assert not work.has_large


@pytest.mark.parametrize("window", [1, 70])
def test_lane_step_with_a_window_is_exact(window):
    geometry = on_triton(replace(SMALL, windows=(window,), kv_dtype="turboquant_k8v4"), CPU)
    assert check_rows(geometry, [180, 64], [100, 64]).lane is not None


def test_layers_with_lane_and_without_share_a_step():
    geometry = replace(SMALL, windows=(None, 70, None), kv_dtype="float16 turboquant_3bit_nc fp8")
    check_rows(on_triton(geometry, CPU), [130, 20], [90, 12])


@pytest.mark.parametrize("windows", [(None,), (100,), (None, 70)])
def test_lane_near_texts_are_exact(windows):
    """Whole texts in steps: near pages come and go, and what no row may see is NaN."""
    check_texts(on_triton(replace(NEAR, windows=windows), CPU), TRITON, 200, [65, 200, 130])


def test_lane_prompt_in_other_steps_gives_near_results():
    """Kernels over codes take what the lane leaves: the same tokens to their tolerance."""
    geometry = on_triton(SMALL, CPU)
    made, num_pages = texts(geometry, [260], consecutive=False)
    outs = []
    for has_lane in (True, False):
        other = replace(geometry, has_lane=has_lane)
        backend = build(TRITON, other, other.storage(num_pages))
        store(other, backend, made)
        batch, qkv = make_batch(other, [(made[0], 0, 260)], num_prompt=260)
        assert (backend.plan(batch).work[backend._keys[0]].lane is not None) == has_lane
        outs.append(run_layer(other, backend, qkv, batch).float())
    torch.testing.assert_close(*outs, rtol=5e-3, atol=5e-3)


def test_captured_and_invariant_steps_do_without_the_lane():
    geometry = on_triton(SMALL, CPU)
    made, num_pages = texts(geometry, [300], consecutive=False)
    batch, _ = make_batch(geometry, [(made[0], 0, 300)])
    for batch_invariant, captured in ((True, False), (False, True), (False, False)):
        backend = build(TRITON, geometry, geometry.storage(num_pages), batch_invariant=batch_invariant)
        lane = next(iter(backend.plan(batch, captured).work.values())).lane
        assert (lane is None) == (batch_invariant or captured)


def test_warm_step_reads_the_lane():
    geometry = on_triton(SMALL, CPU)
    made, num_pages = texts(geometry, [1000], consecutive=False)
    for num_sms in (1, 12, 100):
        backend = build(TRITON, geometry, geometry.storage(num_pages), num_sms)
        (step,) = backend.eager_steps() or (EagerStep(0, 0),)
        assert step == EagerStep(0, {1: 64, 12: 384, 100: 0}[num_sms])
        for num_rows in {step.num_rows, 1000} - {0}:
            batch, _ = make_batch(geometry, [(made[0], 0, num_rows)])
            lane = next(iter(backend.plan(batch).work.values())).lane
            assert (lane is not None) == (num_sms < 100)
        batch, _ = make_batch(geometry, [(made[0], 0, max(1, step.num_rows // 2 - 64))])
        assert step.num_rows < 65 or next(iter(backend.plan(batch).work.values())).lane is None


@for_each("windows", [(None,), (None, 70, None)])
@for_each("near", [False, True])
def test_lane_line_of_the_plan_is_what_the_backend_holds(windows, near):
    geometry = on_triton(replace(NEAR if near else SMALL, windows=windows), CPU)
    bounds = StepBounds(8, 320, 16)
    declared = {term.owner: term.num_bytes for term in TritonPagedDeclaration().terms(geometry.specs, bounds)}
    held = TritonPagedAttention(geometry.specs, StoredNear(geometry), bounds, 1).held_bytes()
    assert held == {name: num_bytes for name, num_bytes in declared.items() if name in held}
    assert held["attention/lane"] == declared["attention/lane"] > 0
    assert "attention/lane" not in dict(declared_without_lane(geometry, bounds))


class StoredNear:
    """Planes of a storage, and near planes without pages."""

    def __init__(self, geometry: Geometry) -> None:
        self._codes = geometry.storage(4)
        self.spec = self._codes.spec

    def plane(self, layer: int, name: str) -> torch.Tensor:
        return self._codes.plane(layer, "k_scale").half() if name.startswith("near") else self._codes.plane(layer, name)


def declared_without_lane(geometry: Geometry, bounds: StepBounds) -> list[tuple[str, int]]:
    terms = TritonPagedDeclaration().terms(replace(geometry, has_lane=False).specs, bounds)
    return [(term.owner, term.num_bytes) for term in terms]


@pytest.mark.parametrize("num_layers", [1, 80])
@pytest.mark.parametrize(
    ("length", "num_bytes"),
    [(1024, LANE_BYTES), (65536 - 64, LANE_BYTES), (131072, 2**26 + 2**15), (2**20, MOST_LANE_BYTES)],
)
def test_lane_is_bounded_for_any_context_and_layers(num_layers: int, length: int, num_bytes: int):
    bounds = StepBounds(256, 8192, 64)
    sizes = {"num_heads": 64, "num_kv_heads": 8, "head_dim": 128, "max_model_len": length}
    specs = replace(SMALL, **sizes, windows=(None,) * num_layers).specs
    assert lane_bytes(specs, bounds) == num_bytes
    (term,) = lane_terms(specs, bounds)
    assert num_bytes < term.num_bytes < num_bytes + 2**20
    assert lane_terms(replace(SMALL, has_lane=False).specs, bounds) == ()


@pytest.mark.parametrize(
    ("change", "capability", "batch_invariant", "word"),
    [
        ({}, (9, 0), False, None),
        ({}, (8, 9), False, "capability"),
        ({}, None, False, "capability"),
        ({}, (9, 0), True, "graphs"),
        ({"head_dim": 48}, (9, 0), False, "head_dim"),
        ({"kv_dtype": "float16"}, (9, 0), False, "plain"),
        ({"dtype": torch.float32}, (9, 0), False, "half precision"),
        ({"num_heads": 512}, (9, 0), False, "query heads"),
    ],
)
def test_declined_lane_names_its_reason(change, capability, batch_invariant, word):
    geometry = replace(SMALL, **({"dtype": torch.float16} | change))
    reason = declined_lane(geometry.specs[0], capability, batch_invariant)
    assert (reason is None) if word is None else (reason is not None and word in reason)


def test_declined_lane_names_a_key_bias():
    spec = replace(replace(SMALL, dtype=torch.float16).specs[0], has_key_bias=True)
    assert "bias" in (declined_lane(spec, (9, 0), False) or "")


@pytest.mark.gpu
def test_lane_near_texts_on_a_gpu(device):
    """Two layers, one with a window, in steps of up to 300 rows; the merge, small tiles and the lane in one step."""
    geometry = on_triton(replace(NEAR, windows=(None, 100)), device)
    check_texts(geometry, TRITON, 300, [300, 65, 310])


@pytest.mark.gpu
def test_lane_allocates_nothing_and_repeats_its_bits(device):
    geometry = on_triton(replace(SMALL, max_model_len=4096), device)
    made, num_pages = texts(geometry, [2000, 700, 30], consecutive=False)
    backend = build(TRITON, geometry, geometry.storage(num_pages), num_sms=20)
    store(geometry, backend, made)
    batch, qkv = make_batch(geometry, [(made[0], 1200, 2000), (made[1], 0, 700), (made[2], 29, 30)])
    expected = run_layer(geometry, backend, qkv, batch)
    q = qkv.view(-1)[: batch.num_rows * 256].view(batch.num_rows, 4, 64).contiguous()
    out, plan, scratch = torch.empty_like(q).view(batch.num_rows, 256), backend.plan(batch), scratch_for(geometry)
    assert next(iter(plan.work.values())).lane is not None
    assert_allocates_nothing(lambda: backend.attend(q, LayerStep(0, plan, scratch), out, False))
    assert same_bits(run_layer(geometry, backend, qkv, batch), expected)
