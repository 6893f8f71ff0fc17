"""The write of tokens (DeepSeek-V4) and their query heads, and outputs rotated back: the kernels against their references."""

from dataclasses import dataclass, replace

import pytest
import torch

from for_each import for_each
from holdfast.kernels.attention.write_kv import Rotary
from holdfast.kernels.latent import write_window as write_window_module
from holdfast.kernels.latent.latent_planes import LatentPlanes, read_latents
from holdfast.kernels.latent.write_latent import LatentNorm
from holdfast.kernels.latent.write_window import (
    rotate_back,
    rotate_back_reference,
    rotate_back_triton,
    write_window,
    write_window_reference,
    write_window_triton,
)
from holdfast.quant.kv_quantize import rotate_heads
from holdfast.quant.latent_quantize import pack_exponent_rows
from kernels.latent_page_cases import (
    MAX_POSITION,
    POISON_BYTE,
    assert_same_latents,
    make_latent_planes,
    on_device,
    rotary_rows,
    tensors_of,
)
from kernels.triton_cases import DTYPES, QUIET, amid_poison, assert_allocates_nothing
from red_zones import RedZones

pytestmark = QUIET

NUM_PAGES, PAGE_TOKENS = 3, 4
Q_EPS = 0.2
"""As large as what is normed, so that its place shows."""
NAMES = ["float32", "fp8_ds_v4"]


@dataclass
class WindowCase:
    """A step of rows: inputs of `write_window` on the CPU."""

    kv: torch.Tensor
    q: torch.Tensor
    slots: torch.Tensor
    states: torch.Tensor
    norm: LatentNorm
    rotary: Rotary


def make_case(num_rows: int, num_heads: int, latent_dim: int, rope_dim: int, dtype=torch.float32) -> WindowCase:
    """Rows of different size; row 1 is padding, whose position is none; row 2 has no slot."""
    generator = torch.Generator().manual_seed(0)
    dim, size_T1 = latent_dim + rope_dim, torch.linspace(-2, 2, num_rows).exp().unsqueeze(1)
    slots = torch.randperm(NUM_PAGES * PAGE_TOKENS, generator=generator)[:num_rows]
    positions, states = torch.randint(MAX_POSITION, (num_rows,), generator=generator), torch.arange(num_rows)
    kv = (torch.randn(num_rows, dim, generator=generator) * size_T1).to(dtype)
    q = (torch.randn(num_rows, num_heads, dim, generator=generator) * size_T1.unsqueeze(2)).to(dtype)
    kv[1:2], q[1:2], positions[1:2], slots[1:3], states[1:2] = torch.nan, torch.nan, 10**9, -1, -1
    slots[1:2] = 3
    norm = LatentNorm((0.5 + torch.rand(dim, generator=generator)).to(dtype), 1e-6)
    return WindowCase(kv, q, slots, states, norm, rotary_rows(positions, rope_dim, dtype))


def written(function, case: WindowCase, name: str, device="cpu", is_rotated=False) -> tuple[LatentPlanes, torch.Tensor]:
    """Rows apart amid poison, planes of poison between red zones; what was left behind, on the CPU."""
    zones, rope_dim = RedZones(torch.device(device)), case.rotary.dim
    planes = make_latent_planes(name, case.kv.shape[1] - rope_dim, rope_dim, PAGE_TOKENS, NUM_PAGES, zones)
    q = amid_poison(case.q.flatten(1), device).view(case.q.shape)

    def alone(values):
        return amid_poison(values.reshape(1, -1), device).view(values.shape)

    function(
        amid_poison(case.kv, device),
        q,
        case.slots.to(device),
        case.states.to(device),
        LatentNorm(alone(case.norm.weight_L), case.norm.eps),
        Q_EPS,
        Rotary(alone(case.rotary.cos_TP), alone(case.rotary.sin_TP)),
        planes,
        is_rotated,
    )
    zones.check()
    planes = on_device(planes, "cpu")
    unused = torch.ones(len(planes.rows_SX), dtype=torch.bool)
    unused[used_slots(case)] = False
    for plane in tensors_of(planes):
        assert bool((plane[unused] == POISON_BYTE).all()), "a slot was written that no row has"
    return planes, q.cpu()


def used_slots(case: WindowCase) -> torch.Tensor:
    return case.slots[(case.slots >= 0) & (case.states >= 0)]


def judge(case: WindowCase, name: str, device, is_rotated=False) -> None:
    mine, my_q = written(write_window_triton, case, name, device, is_rotated)
    theirs, their_q = written(write_window_reference, case, name, is_rotated=is_rotated)
    eps = torch.finfo(case.q.dtype).eps
    torch.testing.assert_close(my_q, their_q, rtol=4 * eps, atol=4 * eps, equal_nan=True)
    assert bool(my_q[case.states >= 0].isfinite().all())
    assert_same_latents(mine, theirs, used_slots(case))


@for_each(
    "latent_dim, rope_dim, num_heads, name",
    [(448, 64, 9, "fp8_ds_v4"), (448, 64, 2, "float32"), (64, 8, 3, "fp8_ds_v4"), (24, 8, 5, "float16")],
)
def test_write_window_matches_reference_for_every_shape(device, latent_dim, rope_dim, num_heads, name) -> None:
    judge(make_case(5, num_heads, latent_dim, rope_dim), name, device)


@pytest.mark.each_value
@pytest.mark.parametrize(("latent_dim", "rope_dim"), [(448, 64), (64, 8), (24, 8), (48, 4)])
@pytest.mark.parametrize("name", ["float32", "turboquant_mla_4bit"])
def test_write_window_rotated_vectors_match_reference(device, name, latent_dim, rope_dim) -> None:
    judge(make_case(4, 3, latent_dim, rope_dim), name, device, is_rotated=True)


def test_write_window_heads_and_vectors_share_the_rotated_space() -> None:
    """Rotation keeps products and is its own inverse; TurboQuant windows are always rotated."""
    case = make_case(4, 3, 448, 64)
    plain, q = written(write_window, case, "float32")
    rotated, rotated_q = written(write_window, case, "float32", is_rotated=True)
    used, latent_dim = used_slots(case), plain.latent_dim
    torch.testing.assert_close(rotate_heads(rotated.rows_SX[used, :latent_dim]), plain.rows_SX[used, :latent_dim])
    scores, rotated_scores = q[0] @ plain.rows_SX[used].T, rotated_q[0] @ rotated.rows_SX[used].T
    torch.testing.assert_close(rotated_scores, scores, rtol=1e-4, atol=1e-4)
    codes, coded_q = written(write_window, case, "turboquant_mla_4bit")
    assert torch.equal(coded_q[[0, 2, 3]], rotated_q[[0, 2, 3]])
    error_XD = read_latents(codes, used, torch.float32) - rotated.rows_SX[used]
    assert float((error_XD.norm(dim=-1) / rotated.rows_SX[used].norm(dim=-1)).max()) < 0.11


@pytest.mark.each_value
@DTYPES
@pytest.mark.parametrize("name", NAMES)
def test_write_window_matches_reference_for_every_dtype(device, dtype, name) -> None:
    judge(make_case(4, 4, 128, 32, dtype), name, device)


def test_write_window_stores_bytes_of_the_packed_vector() -> None:
    case = make_case(5, 2, 448, 64)
    planes, _ = written(write_window, case, "fp8_ds_v4")
    plain, _ = written(write_window_reference, case, "float32")
    rows, exponents = pack_exponent_rows(plain.rows_SX[used_slots(case), :448], plain.rows_SX[used_slots(case), 448:])
    assert planes.scales_SC is not None
    assert torch.equal(planes.rows_SX[used_slots(case)], rows)
    assert torch.equal(planes.scales_SC[used_slots(case)], exponents)


@for_each("function", [write_window_triton, write_window_reference])
def test_write_window_norms_heads_without_a_slot(device, function) -> None:
    case = make_case(4, 3, 24, 8)
    case.rotary.cos_TP[2], case.rotary.sin_TP[2] = 1.0, 0.0
    _, q = written(function, case, "float32", "cpu" if function is write_window_reference else device)
    wanted = case.q[2] * (case.q[2].square().mean(-1, keepdim=True) + Q_EPS).rsqrt()
    torch.testing.assert_close(q[2], wanted, rtol=1e-5, atol=1e-6)


def test_write_window_nonfinite_value_stays_in_its_row(device) -> None:
    case = make_case(4, 2, 64, 8)
    case.kv[0, 3], case.q[3, 1, 2] = torch.inf, torch.nan
    planes, q = written(write_window_triton, case, "fp8_ds_v4", device)
    rows_XD = read_latents(planes, case.slots[[0, 3]], torch.float32)
    assert not bool(rows_XD[0].isfinite().all())
    assert bool(rows_XD[1].isfinite().all())
    assert bool(q[3, 1].isnan().all())
    assert bool(q[3, 0].isfinite().all())


@pytest.mark.each_value
@DTYPES
@pytest.mark.parametrize(("dim", "rope_dim", "num_heads"), [(512, 64, 5), (40, 8, 40)])
def test_rotate_back_matches_reference(device, dtype, dim, rope_dim, num_heads) -> None:
    case = make_case(4, num_heads, dim - rope_dim, rope_dim, dtype)
    case.q[1] = 0  # padding
    mine, theirs = amid_poison(case.q.flatten(1), device).view(case.q.shape), case.q.clone()
    rotary = Rotary(case.rotary.cos_TP.to(device), case.rotary.sin_TP.to(device))
    rotate_back_triton(mine, rotary)
    rotate_back_reference(theirs, case.rotary)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(mine.cpu(), theirs, rtol=2 * eps, atol=2 * eps)
    assert not bool(mine[1].any())


def test_rotate_back_inverts_write_window() -> None:
    case = make_case(4, 3, 24, 8)
    case.q[1], case.states[1] = 1.0, 1
    _, q = written(write_window, case, "float32")
    rotate_back(q, case.rotary)
    wanted = case.q * (case.q.square().mean(-1, keepdim=True) + Q_EPS).rsqrt()
    torch.testing.assert_close(q, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["float32", "turboquant_mla_4bit"])
def test_write_window_heads_of_several_programs_match_reference(device, monkeypatch, name) -> None:
    """Two heads go to a program, and eps is as large as what is normed."""
    monkeypatch.setattr(write_window_module, "ELEMENTS_PER_PROGRAM", 64)
    case = make_case(4, 5, 24, 8)
    judge(replace(case, norm=case.norm._replace(eps=0.7)), name, device)
    rotary = Rotary(case.rotary.cos_TP.to(device), case.rotary.sin_TP.to(device))
    case.q[1] = 0
    monkeypatch.setattr(write_window_module, "ELEMENTS_PER_PROGRAM", 16)
    mine, theirs = amid_poison(case.q.flatten(1), device).view(case.q.shape), case.q.clone()
    rotate_back_triton(mine, rotary)
    rotate_back_reference(theirs, case.rotary)
    torch.testing.assert_close(mine.cpu(), theirs, rtol=1e-6, atol=1e-6)


def test_write_window_norms_a_vector_with_its_own_eps() -> None:
    """Neither without it nor with that of query heads."""
    case = make_case(4, 2, 24, 8)
    case.rotary.cos_TP.fill_(1.0), case.rotary.sin_TP.fill_(0.0)
    planes, _ = written(write_window, replace(case, norm=case.norm._replace(eps=0.7)), "float32")
    used = case.states >= 0
    used[2] = False
    kv_XD = case.kv[used].double()
    wanted = kv_XD * (kv_XD.square().mean(-1, keepdim=True) + 0.7).rsqrt() * case.norm.weight_L.double()
    torch.testing.assert_close(planes.rows_SX[case.slots[used]].double(), wanted, rtol=1e-5, atol=1e-6)


def test_write_window_without_rows_launches_nothing(device) -> None:
    case = make_case(0, 2, 24, 8)
    written(write_window_triton, case, "float32", device)
    rotate_back_triton(case.q.to(device), case.rotary)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["bfloat16", "fp8_ds_v4"])
def test_write_window_allocates_nothing(device, name) -> None:
    case = make_case(4, 64, 448, 64, torch.bfloat16)
    planes = make_latent_planes(name, 448, 64, PAGE_TOKENS, NUM_PAGES, RedZones(device))
    norm = LatentNorm(case.norm.weight_L.to(device), case.norm.eps)
    rotary = Rotary(case.rotary.cos_TP.to(device), case.rotary.sin_TP.to(device))
    kv, q, *step = (tensor.to(device) for tensor in (case.kv, case.q, case.slots, case.states))
    assert_allocates_nothing(lambda: write_window(kv, q, *step, norm, Q_EPS, rotary, planes))
    assert_allocates_nothing(lambda: rotate_back(q, rotary))
