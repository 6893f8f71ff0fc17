"""Which kernel a public function runs: Triton if it can, else plain torch, with every argument under its own name."""

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import holdfast.kernels
from holdfast.kernels import activation, operation
from holdfast.kernels.exchange import add_rows, sum_rows
from holdfast.kernels.exchange.add_rows import DeferredStream
from holdfast.kernels.gemm import linear, quantize_activations
from holdfast.kernels.geometry import order_specs
from holdfast.kernels.load import place_rows
from holdfast.kernels.load.place_kernels import UNSEEN, Findings
from holdfast.kernels.moe import expert_linear, routing
from holdfast.kernels.operation import Operation
from holdfast.quant.weight_schemes import FP8, FP8_BLOCK, FP8_TENSOR, INT8, MXFP4
from kernels.exactness import random, same_bits
from kernels.expert_cases import SCHEMES, expert_case, in_torch, order_of, room_for
from kernels.gemm_references import quantized_linear_reference
from kernels.quantized_cases import random_weight, room_amid, scheme_id
from kernels.triton_cases import QUIET
from red_zones import RedZones

pytestmark = QUIET


def operations() -> Iterator[tuple[str, Operation[..., Any]]]:
    """Find the operations of all kernels."""
    for found in pkgutil.walk_packages(holdfast.kernels.__path__, "holdfast.kernels."):
        for name, item in vars(importlib.import_module(found.name)).items():
            if isinstance(item, Operation) and item.__module__ == found.name:
                yield name, item


def test_operation_implementations_share_a_signature():
    found = list(operations())
    assert len(found) >= 35
    for name, item in found:
        parameters = inspect.signature(item).parameters
        for implementation in filter(None, (item.triton, item.native, item.place)):
            own = inspect.signature(implementation).parameters
            assert own.keys() == parameters.keys(), f"{name}: {implementation.__name__}"
            for parameter, value in own.items():
                assert value.default == parameters[parameter].default, (
                    f"{name}: {parameter} of {implementation.__name__}"
                )


@pytest.fixture
def on_triton(monkeypatch, device) -> None:
    """Functions choose kernels in Triton, which the interpreter runs on a CPU; on a GPU they do in every test."""
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled here")
    for module in (operation, add_rows, sum_rows, linear, place_rows):
        monkeypatch.setattr(module, "can_run", lambda tensor: True)


@pytest.mark.usefixtures("on_triton")
@pytest.mark.parametrize("limit", [None, 0.5])
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_gate_mul_triton_matches_reference(device, kind, limit):
    gate_up = random(3, 2 * 70, scale=2.0)
    gate, up = (gate_up if limit is None else activation.clamped_halves(gate_up, limit)).chunk(2, dim=1)
    expected = activation.REFERENCES[kind](gate) * up
    out = torch.empty(3, 70, device=device)
    assert activation.gate_mul(gate_up.to(device), kind, out, limit) is out
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("on_triton")
def test_sum_rows_and_add_rows_triton_match_reference(device):
    parts = [random(3, 40, seed=seed).to(device) for seed in range(3)]
    wanted = sum_rows.sum_rows_reference([part.cpu() for part in parts], torch.empty(3, 40))
    assert same_bits(sum_rows.add_parts(parts, torch.empty(3, 40, device=device), parts[0]).cpu(), wanted)
    x, norm = random(3, 40, seed=7), random(40, seed=8)
    results = []
    for run, where in ((add_rows.add_rows, device), (add_rows.add_rows_reference, torch.device("cpu"))):
        amax = torch.empty(64, device=where)
        own, weight, scaled = (one.to(where, copy=True) for one in (x, norm, torch.empty(3, 40)))
        stream = DeferredStream(own, weight, scaled, torch.empty(64, device=where), amax)
        num_blocks = run([part.to(where) for part in parts], stream)
        results.append([one.cpu() for one in (own, weight, scaled, amax[: 3 * num_blocks].view(3, -1).amax(-1))])
    assert all(same_bits(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.usefixtures("on_triton")
@pytest.mark.parametrize("scheme", [FP8, FP8_BLOCK, FP8_TENSOR, INT8, MXFP4], ids=scheme_id)
def test_place_quantized_triton_columns_match_reference(monkeypatch, device, scheme):
    rows, columns = random(5, 512, scale=3.0), (128, 384)
    results = []
    for where, is_chosen in ((device, True), (torch.device("cpu"), False)):
        monkeypatch.setattr(place_rows, "can_run", lambda tensor, is_chosen=is_chosen: is_chosen)
        findings = Findings(*torch.full((2, 1), UNSEEN, dtype=torch.int32, device=where))
        amax = torch.zeros(1, device=where)
        place_rows.find_amax(rows.to(where), amax)
        planes = [
            torch.zeros(one.shape, dtype=getattr(torch, one.dtype), device=where) for one in scheme.planes((5, 256))
        ]
        whole = amax if scheme.is_whole_tensor else None
        place_rows.place_quantized(rows.to(where), columns, scheme, *planes, whole, 2, findings, False)
        plain = torch.zeros(5, 256, dtype=torch.float16, device=where)
        place_rows.place_plain(rows.to(where), columns, plain, 2, findings, False)
        other = rows.clone()
        other[3, 200] += 1.0
        place_rows.place_plain(other.to(where), columns, plain, 2, findings, True)
        results.append(
            [amax.cpu(), *(plane.view(torch.uint8).cpu() for plane in planes), plain.cpu(), findings.differing.cpu()]
        )
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    assert results[0][-1].tolist() == [5]


@pytest.mark.usefixtures("on_triton")
@pytest.mark.parametrize("num_local", [None, 3])
def test_order_experts_triton_matches_reference(monkeypatch, device, num_local):
    ids = torch.randint(-1 if num_local else 0, num_local or 7, (40, 2), generator=torch.Generator().manual_seed(0))
    results = []
    for launches, where in ((True, device), (False, torch.device("cpu"))):
        monkeypatch.setattr(operation, "can_run", lambda tensor, launches=launches: launches)
        specs = order_specs(40, 2, 7, num_local)
        tensors = [torch.full(spec.shape, 77, dtype=torch.int32, device=where) for spec in specs]
        order = routing.order_experts(ids.to(where, torch.int32), 7, tensors, num_local)
        used = order.block_experts_B.cpu() >= 0
        results.append((order.block_experts_B.cpu(), order.pairs_BR.cpu()[used], order.num_experts))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert results[0][2] == results[1][2]


@pytest.mark.usefixtures("on_triton")
@pytest.mark.parametrize(
    ("scheme", "is_coded"),
    [(FP8, False), (FP8, True), (FP8_BLOCK, False), (FP8_BLOCK, True), (INT8, False), (MXFP4, False)],
    ids=lambda value: ("rows", "codes")[value] if isinstance(value, bool) else scheme_id(value),
)
@pytest.mark.parametrize("num_rows", [1, 3, 70])
def test_quantized_linear_triton_matches_reference(monkeypatch, device, scheme, num_rows, is_coded):
    """Codes that lie there already count, whatever the rows are."""
    x, weight, bias = random(num_rows, 160), random_weight(40, 160, scheme), random(40, seed=3)
    room = room_amid(RedZones(device), num_rows, weight)
    out, given = torch.full((num_rows, 40), torch.nan, device=device), x
    if is_coded:
        view = linear.quantized_view(room, weight, num_rows)
        assert view is not None, f"{scheme.name} takes rows as they are"
        quantize_activations.quantize_rows(x.to(device), view)
        given = torch.full_like(x, torch.nan)
    linear.quantized_linear(given.to(device), weight, bias.to(device), out, room, is_coded)
    monkeypatch.setattr(operation, "can_run", lambda tensor: False)
    expected = quantized_linear_reference(
        x, weight, bias, torch.empty(num_rows, 40), room_amid(RedZones(torch.device("cpu")), num_rows, weight)
    )
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("on_triton")
@pytest.mark.parametrize("num_rows", [2, 20])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_expert_linear_triton_matches_reference(device, scheme, num_rows):
    case = expert_case((num_rows, 2, 3, 9, 64), True, scheme, has_bias=True)
    out = torch.full((2 * num_rows, 9), torch.nan, device=device)
    operands = [case.x_XK.to(device), case.weight, order_of(case), out, True, room_for(case), case.bias_EN, case.form]
    assert expert_linear.expert_linear(routing.ExpertProduct(*operands)) is out
    torch.testing.assert_close(out.cpu(), in_torch(case), rtol=1e-4, atol=1e-4)
