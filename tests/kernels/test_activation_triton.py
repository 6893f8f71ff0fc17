"""Activations as Triton kernels: as exact as torch amid poison, and an element the same in any company."""

import pytest
import torch

from holdfast.kernels.activation import (
    REFERENCES,
    activate,
    activate_reference,
    activate_triton,
    gate_mul,
    gate_mul_reference,
    gate_mul_triton,
    silu_mul,
    silu_mul_reference,
    silu_mul_triton,
)
from kernels.exactness import assert_as_exact_as_torch, companies, random, same_bits
from kernels.triton_cases import DTYPES, QUIET, amid_poison, assert_allocates_nothing

pytestmark = QUIET

KINDS = pytest.mark.parametrize("kind", REFERENCES)
SIZES = (1, 7, 63, 577, 2048, 2049)
POISON = float("nan")


def assert_exact(y, x, kind):
    """Within four times torch's error, and two units in the last place, of each element."""
    step = torch.finfo(x.dtype).eps
    exact = activate_reference(x.double(), kind)
    unit = exact.abs() * step + 2**-24 * x.double().abs().clamp(max=1) + torch.finfo(x.dtype).smallest_normal * step
    error = ((y.double() - exact).abs() / unit).max()
    torch_error = ((activate_reference(x, kind).double() - exact).abs() / unit).max()
    assert float(error) <= 4 * float(torch_error) + 2


@pytest.mark.each_value
@DTYPES
@KINDS
@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"I{size}")
def test_activate_triton_is_as_exact_as_torch_amid_poison(device, guarded, size, kind, dtype):
    for num_rows in (1, 3):
        x = random(num_rows, size, scale=4).to(dtype)
        out = guarded(num_rows, size, dtype=dtype).fill_(POISON)
        assert activate_triton(amid_poison(x, device), kind, out) is out
        assert_exact(out.cpu(), x, kind)


@DTYPES
@KINDS
def test_activate_triton_is_exact_over_the_whole_range(device, kind, dtype):
    x = torch.linspace(-20, 20, 4001).to(dtype).unsqueeze(0)
    assert_exact(activate_triton(x.to(device), kind).cpu(), x, kind)


@KINDS
def test_activate_triton_closes_and_opens_at_the_ends(device, kind):
    x = torch.tensor([[-1e30, -1e6, -200.0, -0.0, 0.0, 200.0, 1e6, 1e30]])
    y = activate_triton(x.to(device), kind).cpu()
    assert float(y[0, :3].abs().max()) < 1e-30
    assert torch.equal(y[0, 3:], x[0, 3:])


@DTYPES
@KINDS
def test_activate_triton_out_holds_the_same_result(device, poison, kind, dtype):
    x = random(5, 100, scale=3).to(device, dtype)
    alone = activate_triton(x, kind)
    wide = torch.full((5, 132), POISON, dtype=dtype, device=device)
    activate_triton(x, kind, wide[:, 16:116])
    assert same_bits(wide[:, 16:116], alone)
    assert wide[:, :16].isnan().all()
    assert wide[:, 116:].isnan().all()
    assert activate_triton(x, kind, x) is x
    assert same_bits(x, alone)


@pytest.mark.each_value
@DTYPES
@KINDS
def test_activate_triton_is_batch_invariant(device, kind, dtype):
    x = random(9, 65, scale=3).to(device, dtype)
    alone = torch.cat([activate_triton(x[row : row + 1], kind) for row in range(9)])
    for rows in companies(9):
        assert same_bits(activate_triton(x[rows], kind), alone[rows]), f"{rows=}"


@KINDS
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_activate_triton_nonfinite_stays_in_its_element(device, kind, bad):
    x = random(3, 7).to(device)
    clean = activate_triton(x, kind)
    x[1, 6] = bad
    y = activate_triton(x, kind)
    assert not y[1, 6].isfinite()
    y[1, 6] = clean[1, 6]
    assert same_bits(y, clean)


def test_activate_triton_refuses_unknown_kind_and_strided_rows(device):
    with pytest.raises(AssertionError, match="mish"):
        activate_triton(torch.ones(2, 2, device=device), "mish")
    with pytest.raises(AssertionError, match="columns lie apart"):
        activate_triton(torch.ones(8, 4, device=device).T, "relu")


@KINDS
def test_activate_triton_without_rows_is_empty(device, kind):
    assert activate_triton(torch.empty(0, 5, device=device), kind).shape == (0, 5)


@pytest.mark.gpu
@KINDS
def test_activate_triton_allocates_nothing(device, kind):
    gate_up, out = random(3, 1024).to(device, torch.bfloat16), random(3, 512).to(device, torch.bfloat16)
    assert_allocates_nothing(lambda: activate(gate_up[:, :512], kind, out))
    assert_allocates_nothing(lambda: activate(out, kind, out))


SIZES_SILU_MUL_TRITON = (1, 7, 8, 63, 577, 2047, 2048, 2049, 4864)


@DTYPES
@pytest.mark.parametrize("size", SIZES_SILU_MUL_TRITON, ids=lambda size: f"I{size}")
def test_silu_mul_triton_is_as_exact_as_torch_amid_poison(device, guarded, size, dtype):
    for num_rows in (1, 5):
        gate_up = random(num_rows, 2 * size, scale=4).to(dtype)
        out = guarded(num_rows, size, dtype=dtype).fill_(POISON)
        assert silu_mul_triton(amid_poison(gate_up, device), out) is out
        assert_as_exact_as_torch(out.cpu(), silu_mul_reference(gate_up), silu_mul_reference(gate_up.double()))


def test_silu_mul_triton_is_exact_for_wide_and_narrow_rows(device):
    for shape in ((1, 51200), (300, 6)):
        gate_up = random(*shape, scale=4)
        y = silu_mul_triton(gate_up.to(device)).cpu()
        assert_as_exact_as_torch(y, silu_mul_reference(gate_up), silu_mul_reference(gate_up.double()))


@DTYPES
def test_silu_mul_triton_with_out_gives_the_same_result(device, poison, dtype):
    gate_up = random(5, 200).to(device, dtype)
    alone = silu_mul_triton(gate_up)
    wide = torch.full((5, 132), POISON, dtype=dtype, device=device)
    silu_mul_triton(gate_up, wide[:, 16:116])
    assert same_bits(wide[:, 16:116], alone)
    assert wide[:, :16].isnan().all()
    assert wide[:, 116:].isnan().all()


@DTYPES
def test_silu_mul_triton_is_batch_invariant(device, dtype):
    gate_up = random(9, 2 * 577, scale=4).to(device, dtype)
    alone = torch.cat([silu_mul_triton(gate_up[row : row + 1]) for row in range(9)])
    for rows in companies(9):
        assert same_bits(silu_mul_triton(gate_up[rows]), alone[rows]), f"{rows=}"


def test_silu_mul_triton_closes_and_opens_at_the_ends(device):
    gate = torch.tensor([[-1e30, -200.0, -88.5, -0.0, 0.0, 88.5, 1e30]])
    y = silu_mul_triton(torch.cat([gate, torch.ones_like(gate)], dim=1).to(device)).cpu()
    assert float(y[0, :3].abs().max()) < 1e-30
    torch.testing.assert_close(y[0, 3:], gate[0, 3:])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_silu_mul_triton_nonfinite_stays_in_its_element(device, bad):
    gate_up = random(3, 14).to(device)
    clean = silu_mul_triton(gate_up)
    gate_up[1, 6] = bad
    y = silu_mul_triton(gate_up)
    assert not y[1, 6].isfinite()
    y[1, 6] = clean[1, 6]
    assert same_bits(y, clean)


def test_silu_mul_triton_refuses_strided_columns(device):
    with pytest.raises(AssertionError, match="columns lie apart"):
        silu_mul_triton(torch.ones(8, 4, device=device).T)
    with pytest.raises(AssertionError, match="columns lie apart"):
        silu_mul_triton(torch.ones(4, 8, device=device), torch.ones(4, 8, device=device)[:, ::2])


def test_silu_mul_triton_without_rows_is_empty(device):
    assert silu_mul_triton(torch.empty(0, 8, device=device)).shape == (0, 4)


@pytest.mark.gpu
def test_silu_mul_triton_allocates_nothing(device):
    gate_up, out = random(3, 1024).to(device, torch.bfloat16), random(3, 640).to(device, torch.bfloat16)
    assert_allocates_nothing(lambda: silu_mul(gate_up, out[:, :512]))


@DTYPES
@pytest.mark.parametrize("launch", [gate_mul, gate_mul_triton], ids=["any", "kernel"])
def test_silu_mul_triton_limits_the_gate(device, guarded, dtype, launch):
    for num_rows, size in ((1, 7), (3, 577)):
        gate_up = random(num_rows, 2 * size, scale=4).to(dtype)
        gate_up[0, 3] = POISON
        out = guarded(num_rows, size, dtype=dtype).fill_(1.0)
        assert launch(amid_poison(gate_up, device), "silu", out, 2.5) is out
        assert out[0, 3].isnan()
        gate, up = gate_up.double().chunk(2, dim=-1)
        exact = torch.nn.functional.silu(gate.clamp(max=2.5)) * up.clamp(-2.5, 2.5)
        in_torch = gate_mul_reference(gate_up, "silu", torch.empty(num_rows, size, dtype=dtype), 2.5)
        for y in (exact, in_torch, out):
            y[0, 3] = 0.0
        assert_as_exact_as_torch(out.cpu(), in_torch, exact)


@DTYPES
@pytest.mark.parametrize("kind", [kind for kind in REFERENCES if kind != "silu"])
def test_gate_mul_triton_other_gates_are_as_exact_as_torch(device, guarded, kind, dtype):
    for num_rows, size in ((1, 7), (3, 577), (2, 2049)):
        gate_up = random(num_rows, 2 * size, scale=4).to(dtype)
        out = guarded(num_rows, size, dtype=dtype).fill_(POISON)
        assert gate_mul(amid_poison(gate_up, device), kind, out) is out
        exact = gate_mul_reference(gate_up.double(), kind, torch.empty(num_rows, size, dtype=torch.float64))
        torch_own = gate_mul_reference(gate_up, kind, torch.empty(num_rows, size, dtype=dtype))
        assert_as_exact_as_torch(out.cpu(), torch_own, exact)
