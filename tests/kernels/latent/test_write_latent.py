"""The write of latents into every kind of page: the kernel against its reference, and that nothing else is touched."""

from dataclasses import replace

import pytest
import torch

from for_each import for_each
from holdfast.kernels.attention.write_kv import Rotary
from holdfast.kernels.latent import write_latent as write_latent_module
from holdfast.kernels.latent.latent_planes import LatentPlanes, read_latents
from holdfast.kernels.latent.write_latent import (
    LatentNorm,
    write_latent,
    write_latent_reference,
    write_latent_triton,
)
from holdfast.quant.kv_quantize import rotate_heads
from holdfast.quant.latent_quantize import pack_fp8_rows
from kernels.latent_page_cases import (
    POISON_BYTE,
    QUANTIZED_LATENTS,
    LatentCase,
    make_latent_case,
    make_latent_planes,
    on_device,
    tensors_of,
)
from kernels.triton_cases import DTYPES, QUIET, amid_poison, assert_allocates_nothing
from red_zones import RedZones

pytestmark = QUIET

SHAPES = pytest.mark.parametrize(
    ("latent_dim", "rope_dim", "num_heads"), [(512, 64, 16), (256, 32, 3), (192, 16, 40), (48, 8, 1), (64, 24, 5)]
)
NUM_PAGES, PAGE_TOKENS = 3, 4


def written(function, case: LatentCase, name: str, device="cpu") -> tuple[LatentPlanes, torch.Tensor]:
    """Rows apart amid poison, planes of poison between red zones; what was left behind, on the CPU."""
    zones = RedZones(torch.device(device))
    num_rows, num_heads, head_dim = case.q.shape
    rope_dim = case.rotary.dim
    planes = make_latent_planes(name, case.latent.shape[1] - rope_dim, rope_dim, PAGE_TOKENS, NUM_PAGES, zones)
    q = amid_poison(case.q.flatten(1), device).view(num_rows, num_heads, head_dim)

    def alone(values):
        return amid_poison(values.reshape(1, -1), device).view(values.shape)

    function(
        amid_poison(case.latent, device),
        q,
        case.slots.to(device),
        LatentNorm(alone(case.norm.weight_L), case.norm.eps),
        Rotary(alone(case.rotary.cos_TP), alone(case.rotary.sin_TP)),
        planes,
    )
    zones.check()
    planes = on_device(planes, "cpu")
    unused = torch.ones(len(planes.rows_SX), dtype=torch.bool)
    unused[case.slots[case.slots >= 0]] = False
    for plane in tensors_of(planes):
        assert bool((plane[unused] == POISON_BYTE).all()), "a slot was written that no row has"
    return planes, q.cpu()


def judge(case: LatentCase, name: str, device) -> None:
    mine, my_q = written(write_latent_triton, case, name, device)
    theirs, their_q = written(write_latent_reference, case, name)
    eps = torch.finfo(case.q.dtype).eps
    torch.testing.assert_close(my_q, their_q, rtol=2 * eps, atol=2 * eps)
    used = case.slots[case.slots >= 0]
    my_XY, their_XY = (read_latents(planes, used, torch.float32) for planes in (mine, theirs))
    latent_dim = mine.latent_dim
    rope_step = 2**-3 if mine.has_small_rope else max(2**-7 if mine.kind != "plain" else 0, 2 * eps)
    largest = their_XY[:, latent_dim:].abs().amax(-1, keepdim=True)
    torch.testing.assert_close(
        my_XY[:, latent_dim:] / largest, their_XY[:, latent_dim:] / largest, rtol=rope_step, atol=2 * eps
    )
    if mine.kind == "plain":
        torch.testing.assert_close(my_XY, their_XY, rtol=4 * eps, atol=4 * eps)
        return
    # A sum has no order, so that a number that lies half way between two codes may have either.
    differ_XL = my_XY[:, :latent_dim] != their_XY[:, :latent_dim]
    if mine.kind == "fp8_ds_mla":
        torch.testing.assert_close(my_XY, their_XY, rtol=2**-3, atol=1e-6)
        assert int((mine.rows_SX[used] != theirs.rows_SX[used]).sum()) <= 0.02 * differ_XL.numel()
        return
    assert mine.scales_SC is not None
    assert theirs.scales_SC is not None
    scale, their_scale = mine.scales_SC[used].float(), theirs.scales_SC[used].float()
    torch.testing.assert_close(scale, their_scale, rtol=2**-9, atol=0)
    step = 0.22 * their_scale[:, :1]  # no two neighbours of the codebook are further apart
    assert bool(((my_XY - their_XY)[:, :latent_dim].abs() <= step).all()), "a code more than one away"
    my_codes, their_codes = (planes.rows_SX[used] for planes in (mine, theirs))
    assert int((my_codes != their_codes).sum()) <= 1 + 0.002 * differ_XL.numel()


@pytest.mark.each_value
@SHAPES
@pytest.mark.parametrize("name", QUANTIZED_LATENTS)
def test_write_latent_matches_reference_for_every_shape(device, name, latent_dim, rope_dim, num_heads) -> None:
    judge(make_latent_case(5, num_heads, latent_dim, rope_dim, torch.float32, NUM_PAGES * PAGE_TOKENS), name, device)


@SHAPES
def test_write_latent_plain_pages_match_reference(device, latent_dim, rope_dim, num_heads) -> None:
    case = make_latent_case(5, num_heads, latent_dim, rope_dim, torch.float32, NUM_PAGES * PAGE_TOKENS)
    judge(case, "float32", device)


@pytest.mark.parametrize("name", ["float32", *QUANTIZED_LATENTS])
def test_write_latent_heads_of_several_programs_match_reference(device, monkeypatch, name) -> None:
    """Two heads go to a program, and eps is as large as what is normed."""
    monkeypatch.setattr(write_latent_module, "ELEMENTS_PER_PROGRAM", 16)
    for latent_dim in (48, 256):
        case = make_latent_case(4, 5, latent_dim, 8, torch.float32, NUM_PAGES * PAGE_TOKENS)
        judge(replace(case, norm=case.norm._replace(eps=0.7)), name, device)


def test_write_latent_norms_a_latent_with_its_eps() -> None:
    case = make_latent_case(4, 2, 48, 8, torch.float32, NUM_PAGES * PAGE_TOKENS)
    planes, _ = written(write_latent, replace(case, norm=case.norm._replace(eps=0.7)), "float32")
    used = case.slots >= 0
    latent_XL = case.latent[used, :48].double()
    wanted = latent_XL * (latent_XL.square().mean(-1, keepdim=True) + 0.7).rsqrt() * case.norm.weight_L.double()
    torch.testing.assert_close(planes.rows_SX[case.slots[used], :48].double(), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.each_value
@DTYPES
@pytest.mark.parametrize("name", ["float16", *QUANTIZED_LATENTS])
def test_write_latent_matches_reference_for_every_dtype(device, dtype, name) -> None:
    judge(make_latent_case(4, 4, 256, 32, dtype, NUM_PAGES * PAGE_TOKENS, seed=1), name, device)


@for_each("name", QUANTIZED_LATENTS)
def test_write_latent_rows_are_normed_and_rotated(name) -> None:
    case = make_latent_case(4, 2, 512, 64, torch.float32, NUM_PAGES * PAGE_TOKENS)
    planes, _ = written(write_latent, case, name)
    plain, _ = written(write_latent_reference, case, "float32")
    used = case.slots[case.slots >= 0]
    read_XY, wanted_XY = read_latents(planes, used, torch.float32), read_latents(plain, used, torch.float32)
    if planes.kind == "turboquant":
        wanted_XY[:, :512] = rotate_heads(wanted_XY[:, :512])
    else:
        assert torch.equal(planes.rows_SX[used], pack_fp8_rows(wanted_XY[:, :512], wanted_XY[:, 512:]))
    for read, wanted in ((read_XY[:, :512], wanted_XY[:, :512]), (read_XY[:, 512:], wanted_XY[:, 512:])):
        assert float(((read - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max()) < 0.11


def test_write_latent_is_batch_invariant(device) -> None:
    case = make_latent_case(5, 4, 512, 64, torch.float32, NUM_PAGES * PAGE_TOKENS)
    together, _ = written(write_latent_triton, case, "turboquant_mla_4bit", device)
    for row in (0, 3):
        only = slice(row, row + 1)
        alone = LatentCase(case.latent[only], case.q[only], case.slots[only], case.norm, case.rotary.at(only))
        planes, _ = written(write_latent_triton, alone, "turboquant_mla_4bit", device)
        slot = case.slots[row]
        for mine, theirs in zip(tensors_of(planes), tensors_of(together), strict=True):
            assert torch.equal(mine[slot], theirs[slot])


def test_write_latent_padding_writes_nothing(device) -> None:
    for num_rows in (0, 2):
        case = make_latent_case(num_rows, 2, 64, 16, torch.float32, NUM_PAGES * PAGE_TOKENS)
        case.slots.fill_(-1)
        written(write_latent_triton, case, "fp8_ds_mla", device)


@for_each("name", QUANTIZED_LATENTS)
def test_write_latent_zeros_stay_zeros(device, name) -> None:
    case = make_latent_case(2, 2, 256, 32, torch.float32, NUM_PAGES * PAGE_TOKENS)
    case.latent.zero_()
    planes, _ = written(write_latent_triton, case, name, device)
    assert not read_latents(planes, case.slots[:1], torch.float32).any()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["bfloat16", *QUANTIZED_LATENTS])
def test_write_latent_allocates_nothing(device, name) -> None:
    case = make_latent_case(4, 16, 512, 64, torch.bfloat16, NUM_PAGES * PAGE_TOKENS)
    planes = make_latent_planes(name, 512, 64, PAGE_TOKENS, NUM_PAGES, RedZones(device))
    norm = LatentNorm(case.norm.weight_L.to(device), case.norm.eps)
    rotary = Rotary(case.rotary.cos_TP.to(device), case.rotary.sin_TP.to(device))
    rows = (case.latent.to(device), case.q.to(device), case.slots.to(device))
    assert_allocates_nothing(lambda: write_latent(*rows, norm, rotary, planes))
