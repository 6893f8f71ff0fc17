"""Output gates: in C, in torch and in Triton, against float64, amid poison."""

import pytest
import torch

from for_each import for_each
from holdfast.kernels.attention.output_gate import (
    gate_outputs,
    gate_outputs_native,
    gate_outputs_reference,
    gate_outputs_triton,
    gates_of,
)
from holdfast.kernels.operation import DECLINED
from kernels.exactness import assert_as_exact_as_torch, companies, num_threads, random, same_bits
from kernels.triton_cases import DTYPES, QUIET, amid_poison, assert_allocates_nothing
from red_zones import RedZones

pytestmark = QUIET

NAN = float("nan")
SHAPES = [(1, 2), (3, 16), (2, 24), (5, 80), (1, 256), (9, 256), (7, 1)]
"""Query heads, and elements of each."""


def projection(num_rows: int, num_heads: int, head_dim: int, scale: float = 4.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of a fused projection in which only gates are numbers, and these gates: [T, H, D]."""
    gates = random(num_rows, num_heads, head_dim, seed=1, scale=scale)
    rows = torch.full((num_rows, num_heads + 3, 2, head_dim), NAN)
    rows[:, :num_heads, 1] = gates
    return rows.flatten(1), gates


def judge(function, num_heads: int, head_dim: int, dtype=torch.float32, device="cpu", rows=None) -> None:
    num_rows = 6
    qkv, gates = projection(num_rows, num_heads, head_dim)
    gates, rows_R = gates.to(dtype), None if rows is None else torch.tensor(rows, dtype=torch.int64)
    zones = RedZones(torch.device(device))
    x = random(num_rows if rows is None else len(rows), num_heads * head_dim, seed=2).to(dtype)
    out = zones.allocate(*x.shape, dtype=dtype).copy_(x)
    own = gates_of(amid_poison(qkv.to(dtype), device), num_heads, head_dim)
    assert function(out, own, None if rows_R is None else rows_R.to(device)) is out
    zones.check()
    wanted_gates = gates if rows_R is None else gates[rows_R]
    exact = x.double() * wanted_gates.double().flatten(1).sigmoid()
    assert_as_exact_as_torch(out.cpu(), x * wanted_gates.flatten(1).sigmoid(), exact)


@for_each("num_heads, head_dim", SHAPES)
@for_each("rows", [None, [5], [0, 2, 3, 5], [4, 4], []])
def test_gate_outputs_multiplies_by_sigmoid_of_own_gate(native, num_heads, head_dim, rows):
    for function in (gate_outputs_native, gate_outputs_reference):
        judge(function, num_heads, head_dim, rows=rows)


@DTYPES
@pytest.mark.parametrize("rows", [None, [0, 2, 5]], ids=["all rows", "some rows"])
def test_gate_outputs_triton_multiplies_by_sigmoid_of_own_gate(device, rows, dtype):
    for num_heads, head_dim in SHAPES:
        judge(gate_outputs_triton, num_heads, head_dim, dtype, device, rows)


@for_each("function", [gate_outputs, gate_outputs_reference, gate_outputs_triton])
def test_gate_outputs_extreme_gates_open_and_close(device, function):
    place = device if function is gate_outputs_triton else "cpu"
    gates = torch.tensor([-1e30, -90.0, -80.0, -1.0, 0.0, 1.0, 30.0, 90.0, 1e30, float("inf"), float("-inf"), NAN])
    qkv = torch.stack((torch.full_like(gates, NAN), gates)).view(1, -1).to(place)
    x = torch.full((1, 12), 3.0, device=place)
    function(x, gates_of(qkv, 1, 12))
    torch.testing.assert_close(x[0, :11].cpu().double(), 3.0 * gates[:11].double().sigmoid(), rtol=1e-6, atol=1e-30)
    assert x[0, 11].isnan()


@for_each("function", [gate_outputs, gate_outputs_reference, gate_outputs_triton])
def test_gate_outputs_padding_stays_zero_and_nan_stays_nan(device, function):
    """A padded row's attention is zeros, and its gates may be anything."""
    place = device if function is gate_outputs_triton else "cpu"
    qkv, _ = projection(3, 2, 24)
    qkv[1] = NAN
    x = random(3, 48, seed=3)
    x[1], x[2, 5], qkv[2].view(5, 2, 24)[0, 1, 5] = 0.0, NAN, -500.0
    out = x.to(place)
    function(out, gates_of(qkv.to(place), 2, 24))
    assert not out[1].any()
    assert out[2, 5].isnan()
    assert out[0].isfinite().all()


def test_gate_outputs_is_batch_invariant(native):
    qkv, _ = projection(33, 3, 24)
    x = random(33, 72, seed=2)
    whole = gate_outputs(x.clone(), gates_of(qkv, 3, 24))
    for threads in (1, 2):
        with num_threads(threads):
            for rows in [[row] for row in range(33)] + list(companies(33)):
                mine = gate_outputs(x[rows].contiguous(), gates_of(qkv, 3, 24), torch.tensor(rows))
                assert same_bits(mine, whole[rows]), f"{threads=} {rows=}"


def test_gates_of_takes_second_half_of_each_query_head():
    heads = torch.arange(2 * 10 * 4.0).view(2, 10, 4)
    assert same_bits(gates_of(heads.flatten(1), 3, 4), heads[:, [1, 3, 5]])


def test_gate_outputs_declines_and_refuses_wrong_arguments(native, device):
    qkv, _ = projection(3, 2, 24)
    gates = gates_of(qkv, 2, 24)
    assert gate_outputs_native(torch.zeros(3, 48, dtype=torch.float16), gates.half()) is DECLINED
    for function in (gate_outputs_native, gate_outputs_triton):
        with pytest.raises(AssertionError, match="beside"):
            function(torch.zeros(3, 24), gates)
        with pytest.raises(AssertionError, match="2 rows for 3 outputs"):
            function(torch.zeros(3, 48), gates, torch.tensor([1, 2]))
        with pytest.raises(AssertionError, match="4 rows of outputs"):
            function(torch.zeros(4, 48), gates)


@pytest.mark.gpu
def test_gate_outputs_allocates_nothing(device):
    qkv = torch.randn(5, 2 * 6 * 256 + 1024, device=device).bfloat16()
    x = torch.randn(5, 6 * 256, device=device).bfloat16()
    rows = torch.arange(5, device=device)
    assert_allocates_nothing(lambda: gate_outputs(x, gates_of(qkv, 6, 256), rows))
