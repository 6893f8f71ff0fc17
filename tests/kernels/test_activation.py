"""Activations on a CPU: as exact as torch, and an element the same in any company."""

from typing import get_args

import pytest
import torch

from holdfast.kernels.activation import (
    REFERENCES,
    GateForm,
    activate,
    activate_reference,
    gate_up_product,
    gate_up_product_reference,
    silu_mul,
    silu_mul_reference,
)
from holdfast.models.spec import Activation
from kernels.exactness import assert_as_exact_as_torch, companies, island, num_threads, random, same_bits

pytestmark = pytest.mark.usefixtures("native")

KINDS = pytest.mark.parametrize("kind", REFERENCES)
SIZES = (1, 3, 5, 63, 64, 100, 577)


def test_activation_references_cover_every_activation():
    assert set(REFERENCES) == set(get_args(Activation))


@KINDS
def test_activate_is_as_exact_as_torch(kind):
    x = torch.cat([random(3, 577), random(3, 577, scale=30), torch.linspace(-20, 20, 3 * 577).view(3, 577)])
    exact = activate_reference(x.double(), kind)
    unit = exact.abs() * 2**-23 + 2**-24 * x.abs().clamp(max=1) + 2**-149
    error = ((activate(x, kind).double() - exact).abs() / unit).max()
    torch_error = ((activate_reference(x, kind).double() - exact).abs() / unit).max()
    assert float(error) <= 4 * float(torch_error) + 2


@pytest.mark.each_value
@KINDS
@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"I{size}")
def test_activate_is_batch_invariant(kind, size):
    """Torch's own silu and gelu are not: what a vector does not fill, and what a thread ends with, is rounded otherwise."""
    x = random(129, size, scale=3)
    alone = torch.cat([activate(x[row : row + 1], kind) for row in range(129)])
    for threads in (1, 2):
        with num_threads(threads):
            for rows in companies(129):
                assert same_bits(activate(x[rows], kind), alone[rows]), f"{threads=} {rows=}"


@KINDS
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_activate_nonfinite_value_stays_in_its_element(kind, bad):
    x = random(3, 7)
    clean = activate(x, kind)
    x[1, 6] = bad
    y = activate(x, kind)
    assert not y[1, 6].isfinite()
    y[1, 6] = clean[1, 6]
    assert same_bits(y, clean)


@pytest.mark.parametrize("kind", [0, 1, 2])
@pytest.mark.parametrize("size", SIZES)
def test_native_activate_stays_within_its_buffer(native, guarded_host, kind, size):
    x = guarded_host(size)
    x.copy_(random(size))
    native.holdfast_activate(x.data_ptr(), size, kind)
    assert x.isfinite().all()


@KINDS
def test_activate_accepts_strided_rows(kind):
    x = random(9, 10, scale=3)
    before = x.clone()
    y = activate(x[:, 3:8], kind)
    assert y.is_contiguous()
    assert same_bits(y, activate(x[:, 3:8].contiguous(), kind))
    assert same_bits(x, before)


@KINDS
def test_activate_half_types_use_torch(kind):
    x = random(4, 10).half()
    assert same_bits(activate(x, kind), activate_reference(x, kind))


@KINDS
def test_activate_without_rows_is_empty(kind):
    assert activate(torch.empty(0, 5), kind).shape == (0, 5)


@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["C", "torch"])
@pytest.mark.parametrize("num_rows", [1, 5])
def test_activate_out_holds_the_same_result(guarded_host, kind, dtype, num_rows):
    x = random(num_rows, 37, scale=3).to(dtype)
    expected = activate(x, kind)
    out = guarded_host(num_rows, 37, dtype=dtype).fill_(float("nan"))
    assert activate(x, kind, out) is out
    assert same_bits(out, expected)
    wide = torch.full((2, num_rows, 41), float("nan"), dtype=dtype)
    gate, gated = wide[:, :, 2:39]
    gate.copy_(x)
    apart = expected if dtype == torch.float32 else activate_reference(gate, kind)  # torch cares how rows lie
    activate(gate, kind, gated)
    assert same_bits(gated, apart)
    assert wide[1, :, :2].isnan().all()
    assert wide[1, :, 39:].isnan().all()
    assert activate(gate, kind, gate) is gate
    assert same_bits(gate, apart)
    assert activate(x, kind, x) is x
    assert same_bits(x, expected)


SIZES_SILU_MUL = (1, 2, 3, 4, 5, 7, 8, 9, 63, 64, 100, 577, 1536)


def exact_gate(gate_up):
    gate, up = gate_up.double().chunk(2, -1)
    return gate * torch.sigmoid(gate) * up


@pytest.mark.parametrize("scale", [1e-20, 1e-3, 1.0, 20.0])
@pytest.mark.parametrize("size", SIZES_SILU_MUL, ids=lambda size: f"I{size}")
def test_silu_mul_is_as_exact_as_torch(size, scale):
    for num_rows in (1, 2, 9, 17, 63):
        gate_up = random(num_rows, 2 * size, scale=scale)
        assert_as_exact_as_torch(silu_mul(gate_up), silu_mul_reference(gate_up), exact_gate(gate_up))


def test_silu_mul_is_exact_to_a_few_ulps_over_its_range():
    gate = torch.cat([torch.linspace(-79.9, 200, 200_001), torch.tensor([0.0, -0.0, 1e-40, -1e-40, 1e38])])
    y = silu_mul(torch.cat([gate, torch.ones_like(gate)]).unsqueeze(0)).squeeze(0).double()
    exact = gate.double() * torch.sigmoid(gate.double())
    error = (y - exact).abs() / (exact.abs() * 2**-23 + 2**-149)
    assert float(error.max()) < 3.5, f"{float(error.max())} units in the last place at {float(gate[error.argmax()])}"


def test_silu_mul_gate_far_below_zero_closes():
    gate = torch.tensor([-80.1, -88.0, -100.0, -1e30])
    y = silu_mul(torch.cat([gate, torch.full_like(gate, 1e3)]).unsqueeze(0))
    assert float(y.abs().max()) < 1e-29


@pytest.mark.parametrize("size", SIZES_SILU_MUL, ids=lambda size: f"I{size}")
def test_silu_mul_is_batch_invariant(size):
    gate_up = random(129, 2 * size, scale=5)
    alone = torch.cat([silu_mul(gate_up[row : row + 1]) for row in range(129)])
    for threads in (1, 2):
        with num_threads(threads):
            for rows in companies(129):
                assert same_bits(silu_mul(gate_up[rows]), alone[rows]), f"{threads=} {rows=}"


@pytest.mark.parametrize("size", SIZES_SILU_MUL, ids=lambda size: f"I{size}")
@pytest.mark.parametrize("num_rows", [1, 3, 17])
def test_native_silu_mul_stays_within_its_buffers(native, guarded_host, num_rows, size):
    gate_up, y = island(random(num_rows, 2 * size)), guarded_host(num_rows, size)
    native.holdfast_silu_mul(gate_up.data_ptr(), y.data_ptr(), num_rows, size)
    assert same_bits(y, silu_mul(gate_up))
    assert y.isfinite().all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("half", ["gate", "up"])
@pytest.mark.parametrize("size", [5, 8])
def test_silu_mul_nonfinite_value_stays_in_its_element(bad, half, size):
    gate_up = random(5, 2 * size)
    clean = silu_mul(gate_up)
    gate_up[2, size - 1 if half == "gate" else 2 * size - 1] = bad
    y = silu_mul(gate_up)
    assert not y[2, size - 1].isfinite()
    y[2, size - 1] = clean[2, size - 1]
    assert same_bits(y, clean)


def test_silu_mul_without_rows_is_empty():
    assert silu_mul(torch.empty(0, 8)).shape == (0, 4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_silu_mul_half_types_use_torch(dtype):
    gate_up = random(3, 10).to(dtype)
    assert same_bits(silu_mul(gate_up), silu_mul_reference(gate_up))


FORM = pytest.mark.parametrize("is_interleaved", [False, True], ids=["halves", "interleaved"])


@FORM
@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"I{size}")
def test_gate_up_product_clamped_is_exact_and_batch_invariant(is_interleaved, size):
    form = GateForm(is_interleaved, 7.0)
    x = torch.cat([random(20, 2 * size), random(20, 2 * size, scale=30), torch.full((1, 2 * size), -300.0)])
    exact = gate_up_product_reference(x.double(), form)
    y = gate_up_product(x, form)
    assert_as_exact_as_torch(y, gate_up_product_reference(x, form), exact, magnitude=10.0)
    for rows in companies(41):
        assert same_bits(gate_up_product(x[rows], form), y[rows]), f"{rows=}"


@FORM
@pytest.mark.parametrize("size", [1, 33, 100], ids=lambda size: f"I{size}")
def test_gate_up_product_limited_is_exact_and_batch_invariant(is_interleaved, size):
    form, x = GateForm(is_interleaved, 10.0, is_silu=True), random(20, 2 * size, scale=9)
    halves = (x[:, ::2], x[:, 1::2]) if is_interleaved else x.chunk(2, dim=-1)
    gate, up = halves[0].double().clamp(max=10), halves[1].double().clamp(-10, 10)
    y = gate_up_product(x, form)
    assert_as_exact_as_torch(y, gate_up_product_reference(x, form), torch.nn.functional.silu(gate) * up)
    for rows in companies(20):
        assert same_bits(gate_up_product(x[rows], form), y[rows]), f"{rows=}"


@FORM
@pytest.mark.parametrize("limit", [None, 7.0])
def test_gate_up_product_reads_gates_by_form(is_interleaved, limit):
    gate, up = torch.tensor([[-50.0, 2.0, 50.0]]), torch.tensor([[0.5, -50.0, 50.0]])
    x = torch.stack((gate, up), dim=-1).view(1, 6) if is_interleaved else torch.cat((gate, up), dim=-1)
    expected = torch.nn.functional.silu(gate) * up
    if limit is not None:
        expected = torch.tensor([[0.0, 2 * 0.967839, 7 * 0.999993]]) * torch.tensor([[1.5, -6.0, 8.0]])
    for product in (gate_up_product, gate_up_product_reference):
        torch.testing.assert_close(product(x, GateForm(is_interleaved, limit)), expected, rtol=1e-4, atol=1e-6)


def test_gate_up_product_nan_passes_the_clamp():
    x = random(2, 8)
    x[0, 2] = x[1, 7] = float("nan")
    y = gate_up_product(x, GateForm(True, 0.5))
    assert y.isnan().tolist() == [[False, True, False, False], [False, False, False, True]]


def test_native_clamped_gate_stays_within_its_buffer(native, guarded_host):
    y = guarded_host(2, 5)
    x = random(2, 10)
    native.holdfast_clamped_gate(x.data_ptr(), y.data_ptr(), 2, 5, 2, 1, 7.0)
    torch.testing.assert_close(y, gate_up_product_reference(x, GateForm(True, 7.0)))
