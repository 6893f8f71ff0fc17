"""The write of the index into every kind of page, and its queries as codes: kernels against references, and that nothing else is touched."""

from dataclasses import dataclass, replace

import pytest
import torch

from for_each import for_each
from holdfast.kernels.attention.write_kv import Rotary
from holdfast.kernels.latent.index_scores import read_index
from holdfast.kernels.latent.latent_planes import IndexPlanes
from holdfast.kernels.latent.write_index import (
    IndexNorm,
    quantize_index_queries,
    quantize_index_queries_reference,
    quantize_index_queries_triton,
    write_index,
    write_index_reference,
    write_index_triton,
)
from kernels.index_cases import POISON_BYTE, amid_bytes, make_index_planes, planes_to
from kernels.latent_page_cases import MAX_POSITION, rotary_rows
from kernels.triton_cases import DTYPES, QUIET, amid_poison, assert_allocates_nothing
from red_zones import RedZones

pytestmark = QUIET

SHAPES = pytest.mark.parametrize(
    ("dim", "rope_dim", "num_heads"), [(128, 64, 64), (128, 64, 32), (64, 64, 3), (48, 24, 5), (16, 2, 1)]
)
KINDS = ["float32", "float16", "fp8", pytest.param("bfloat16", marks=pytest.mark.gpu)]
NUM_PAGES, PAGE_TOKENS = 3, 4


@dataclass
class IndexCase:
    """A step of rows: arguments of `write_index` on the CPU."""

    k: torch.Tensor
    q: torch.Tensor
    slots: torch.Tensor
    norm: IndexNorm
    rotary: Rotary
    by_neighbours: bool = False


def make_case(num_rows: int, num_heads: int, dim: int, rope_dim: int, dtype: torch.dtype = torch.float32) -> IndexCase:
    """Rows of different size, none of mean 0; row 1 is padding, whose position is none."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    size_T1 = torch.linspace(-2, 2, num_rows).exp().unsqueeze(1)
    slots_T = torch.randperm(NUM_PAGES * PAGE_TOKENS, generator=generator)[:num_rows]
    positions_T = torch.randint(MAX_POSITION, (num_rows,), generator=generator)
    if num_rows > 1:
        slots_T[1], positions_T[1] = -1, 10**9
    return IndexCase(
        ((normal(num_rows, dim) + 0.3) * size_T1).to(dtype),
        normal(num_rows, num_heads, dim).to(dtype),
        slots_T,
        IndexNorm((0.5 + normal(dim).abs()).to(dtype), normal(dim).to(dtype), 0.1),
        rotary_rows(positions_T, rope_dim),
    )


def written(function, case: IndexCase, name: str, device="cpu") -> tuple[IndexPlanes, torch.Tensor]:
    """Rows apart amid poison, planes of poison between red zones; what was left behind, on the CPU."""
    zones = RedZones(torch.device(device))
    planes = make_index_planes(name, case.k.shape[1], PAGE_TOKENS, NUM_PAGES, zones)
    q = amid_poison(case.q.flatten(1), device).view(case.q.shape)

    def alone(values):
        return amid_poison(values.reshape(1, -1), device).view(values.shape)

    function(
        amid_poison(case.k, device),
        q,
        case.slots.to(device),
        IndexNorm(alone(case.norm.weight_D), alone(case.norm.bias_D), case.norm.eps),
        Rotary(alone(case.rotary.cos_TP), alone(case.rotary.sin_TP)),
        planes,
        case.by_neighbours,
    )
    zones.check()
    planes = planes_to(planes, "cpu")
    unused = torch.ones(NUM_PAGES * PAGE_TOKENS, dtype=torch.bool)
    unused[case.slots[case.slots >= 0]] = False
    for plane in (planes.rows_SD, planes.scales_S1):
        if plane is not None:
            assert bool((plane.view(torch.uint8)[unused] == POISON_BYTE).all()), "a slot was written that no row has"
    return planes, q.cpu()


def keys_of(planes: IndexPlanes, slots: torch.Tensor) -> torch.Tensor:
    """float32, of the slots that rows have."""
    return read_index(planes, torch.arange(NUM_PAGES), 0, NUM_PAGES * PAGE_TOKENS)[slots[slots >= 0]]


def plain_keys(case: IndexCase) -> torch.Tensor:
    """By the words of the model, element by element in float64: LayerNorm, then element i with i + R / 2, or 2 i with 2 i + 1, by frequency i."""
    half = case.rotary.dim // 2
    rows = case.slots >= 0
    x = case.k[rows].double()
    x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + case.norm.eps).sqrt()
    x = x * case.norm.weight_D.double() + case.norm.bias_D.double()
    cos, sin = (table.double()[rows] for table in (case.rotary.cos_TP, case.rotary.sin_TP))
    if case.by_neighbours:
        left, right, rest = x[:, : 2 * half : 2], x[:, 1 : 2 * half : 2], x[:, 2 * half :]
        turned = torch.stack((left * cos - right * sin, right * cos + left * sin), dim=-1).flatten(1)
        return torch.cat((turned, rest), dim=-1).float()
    left, right, rest = x[:, :half], x[:, half : 2 * half], x[:, 2 * half :]
    return torch.cat((left * cos - right * sin, right * cos + left * sin, rest), dim=-1).float()


def judge(case: IndexCase, name: str, device) -> None:
    mine, my_q = written(write_index_triton, case, name, device)
    theirs, their_q = written(write_index_reference, case, name)
    eps, rope_dim = torch.finfo(case.q.dtype).eps, case.rotary.dim
    torch.testing.assert_close(my_q, their_q, rtol=2 * eps, atol=2 * eps)
    assert torch.equal(my_q[..., rope_dim:], case.q[..., rope_dim:]), "an element was changed that is not rotated"
    my_XD, their_XD = keys_of(mine, case.slots), keys_of(theirs, case.slots)
    if mine.scales_S1 is None:
        step = 2 * torch.finfo(mine.rows_SD.dtype).eps + 2**-20
        torch.testing.assert_close(my_XD, their_XD, rtol=step, atol=step)
        return
    # A sum has no order, so that a number that lies half way between two codes may have either.
    assert theirs.scales_S1 is not None
    used = case.slots[case.slots >= 0]
    assert torch.equal(mine.scales_S1[used], theirs.scales_S1[used])
    torch.testing.assert_close(my_XD, their_XD, rtol=2**-3, atol=1e-4)
    assert int((my_XD != their_XD).sum()) <= 0.02 * my_XD.numel()


@pytest.mark.each_value
@SHAPES
@pytest.mark.parametrize("name", KINDS)
def test_write_index_matches_reference_for_every_shape(device, name, dim, rope_dim, num_heads) -> None:
    judge(make_case(5, num_heads, dim, rope_dim), name, device)


@pytest.mark.each_value
@DTYPES
@pytest.mark.parametrize("name", ["float32", "fp8"])
def test_write_index_matches_reference_for_every_dtype(device, dtype, name) -> None:
    judge(make_case(4, 4, 128, 64, dtype), name, device)


@pytest.mark.parametrize("name", ["float32", "fp8", pytest.param("bfloat16", marks=pytest.mark.gpu)])
def test_write_index_by_neighbours_matches_reference(device, name) -> None:
    judge(replace(make_case(5, 32, 128, 64), by_neighbours=True), name, device)


@pytest.mark.each_pair
@SHAPES
@pytest.mark.parametrize("by_neighbours", [False, True], ids=["halves", "neighbours"])
@pytest.mark.parametrize("function", [write_index_triton, write_index_reference])
def test_write_index_norms_a_key_before_rotation(device, function, by_neighbours, dim, rope_dim, num_heads) -> None:
    case = replace(make_case(4, num_heads, dim, rope_dim), by_neighbours=by_neighbours)
    where = "cpu" if function is write_index_reference else device
    planes, _ = written(function, case, "float32", where)
    torch.testing.assert_close(keys_of(planes, case.slots), plain_keys(case), rtol=1e-4, atol=1e-4)
    # Queries take the same turn and no norm: as keys that are of mean 0 and variance 1 already.
    heads_ID = case.q[0, : NUM_PAGES * PAGE_TOKENS]
    heads_ID = (heads_ID - heads_ID.mean(-1, keepdim=True)) / heads_ID.std(-1, correction=0, keepdim=True)
    rotary, slots = case.rotary.at([0] * len(heads_ID)), torch.arange(len(heads_ID))
    identity = IndexNorm(torch.ones(dim), torch.zeros(dim), 0.0)
    rows = IndexCase(heads_ID, heads_ID.unsqueeze(1), slots, identity, rotary, by_neighbours)
    _, turned = written(function, rows, "float32", where)
    torch.testing.assert_close(turned.squeeze(1), plain_keys(rows), rtol=1e-4, atol=1e-4)


@for_each("function", [write_index_triton, write_index_reference])
def test_write_index_codes_are_near_the_key(device, function) -> None:
    case = make_case(6, 2, 128, 64)
    planes, _ = written(function, case, "fp8", "cpu" if function is write_index_reference else device)
    assert planes.scales_S1 is not None
    keys_XD, scales_X1 = plain_keys(case), planes.scales_S1[case.slots[case.slots >= 0]]
    assert torch.equal(scales_X1.frexp().mantissa, torch.full_like(scales_X1, 0.5)), "a scale is no power of two"
    amax_X1 = keys_XD.abs().amax(-1, keepdim=True)
    assert bool(((amax_X1 <= 448 * scales_X1) & (amax_X1 > 224 * scales_X1)).all())
    torch.testing.assert_close(keys_of(planes, case.slots), keys_XD, rtol=2**-4, atol=1e-3)


@pytest.mark.each_value
@pytest.mark.parametrize("name", KINDS)
def test_write_index_is_batch_invariant(device, name) -> None:
    case = make_case(5, 4, 128, 64)
    together, _ = written(write_index_triton, case, name, device)
    for row in (0, 3):
        only = slice(row, row + 1)
        alone = IndexCase(case.k[only], case.q[only], case.slots[only], case.norm, case.rotary.at(only))
        planes, _ = written(write_index_triton, alone, name, device)
        assert torch.equal(keys_of(planes, alone.slots), keys_of(together, alone.slots))


def test_write_index_padding_writes_nothing(device) -> None:
    for num_rows in (0, 2):
        case = make_case(num_rows, 2, 64, 16)
        case.slots.fill_(-1)
        written(write_index_triton, case, "fp8", device)


@for_each("name", ["float32", "fp8"])
def test_write_index_constant_row_is_the_bias(device, name) -> None:
    case = make_case(2, 2, 32, 16)
    case.k.fill_(3.0)
    case.rotary = rotary_rows(torch.zeros(2), 16)
    planes, _ = written(write_index_triton, case, name, device)
    step = 2**-4 if name == "fp8" else 1e-6
    torch.testing.assert_close(keys_of(planes, case.slots)[0], case.norm.bias_D, rtol=step, atol=1e-3)


def test_write_index_scale_of_small_keys_is_bounded(device) -> None:
    case = make_case(3, 2, 32, 16)
    case.norm.weight_D.zero_()
    case.norm.bias_D.mul_(1e-7)
    planes, _ = written(write_index_triton, case, "fp8", device)
    assert planes.scales_S1 is not None
    assert planes.scales_S1[case.slots[[0, 2]], 0].tolist() == [2.0**-22, 2.0**-22]
    judge(case, "fp8", device)


def coded(function, q_TID: torch.Tensor, weights_TI: torch.Tensor, device="cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """Codes as bytes, and weights that were written in their own place, amid poison."""
    weights = amid_poison(weights_TI, device)
    codes = amid_bytes(torch.zeros(q_TID.flatten(1).shape, dtype=torch.float8_e4m3fn), device).view(q_TID.shape)
    function(amid_poison(q_TID.flatten(1), device).view(q_TID.shape), weights, codes, weights)
    return codes.view(torch.uint8).cpu(), weights.cpu()


@pytest.mark.each_value
@SHAPES
@DTYPES
def test_quantize_index_queries_matches_reference(device, dtype, dim, rope_dim, num_heads) -> None:
    """To the bit: there is no sum in them."""
    generator = torch.Generator().manual_seed(0)
    q_TID = torch.randn(3, num_heads, dim, generator=generator).mul(torch.tensor([1e-3, 1.0, 30.0])[:, None, None])
    weights_TI = torch.randn(3, num_heads, generator=generator)
    mine = coded(quantize_index_queries_triton, q_TID.to(dtype), weights_TI, device)
    theirs = coded(quantize_index_queries_reference, q_TID.to(dtype), weights_TI)
    assert torch.equal(mine[0], theirs[0])
    assert torch.equal(mine[1], theirs[1])


@for_each("function", [quantize_index_queries_triton, quantize_index_queries_reference])
def test_quantize_index_queries_scales_are_exact_at_their_edges(device, function) -> None:
    """A power of two takes amax to 448 exactly; one step above it takes the next. Beneath 1e-10 there is no smaller scale."""
    where = "cpu" if function is quantize_index_queries_reference else device
    above = torch.nextafter(torch.tensor(448.0), torch.tensor(1000.0)).item()
    sizes = [448.0, above, 448.0 * 2**-30, above * 2**20, 1.0, 0.0, 1e-30]
    wanted = [1.0, 2.0, 2.0**-30, 2.0**21, 2.0**-8, 2.0**-42, 2.0**-42]
    q_TID = torch.zeros(1, len(sizes), 16)
    q_TID[0, :, 3] = torch.tensor(sizes)
    q_TID[0, :, 7] = -torch.tensor(sizes) / 2
    codes, weights = coded(function, q_TID, torch.full((1, len(sizes)), 3.0), where)
    assert weights[0].tolist() == [3.0 * scale for scale in wanted]
    numbers = codes.view(torch.float8_e4m3fn).float()[0]
    torch.testing.assert_close(numbers[:, 3] * torch.tensor(wanted), torch.tensor(sizes), rtol=2**-4, atol=1e-15)
    torch.testing.assert_close(numbers[:, 7], -numbers[:, 3] / 2)


@for_each("function", [quantize_index_queries_triton, quantize_index_queries_reference])
def test_quantize_index_queries_nan_stays_in_its_head(device, function) -> None:
    q_TID = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(0))
    q_TID[0, 1, 5] = torch.nan
    where = "cpu" if function is quantize_index_queries_reference else device
    codes, weights = coded(function, q_TID, torch.ones(2, 3), where)
    assert weights.isnan().nonzero().tolist() == [[0, 1]]
    assert bool(codes.view(torch.float8_e4m3fn).float()[0, 1].isnan().all())
    assert bool(codes.view(torch.float8_e4m3fn).float()[1].isfinite().all())


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["bfloat16", "fp8"])
def test_write_index_allocates_nothing(device, name) -> None:
    case = make_case(4, 64, 128, 64, torch.bfloat16)
    planes = make_index_planes(name, 128, PAGE_TOKENS, NUM_PAGES, RedZones(device))
    norm = IndexNorm(case.norm.weight_D.to(device), case.norm.bias_D.to(device), case.norm.eps)
    rotary = Rotary(case.rotary.cos_TP.to(device), case.rotary.sin_TP.to(device))
    k, q, slots = (tensor.to(device) for tensor in (case.k, case.q, case.slots))
    codes, weights = torch.empty(q.shape, dtype=torch.float8_e4m3fn, device=device), torch.ones(4, 64, device=device)
    assert_allocates_nothing(lambda: write_index(k, q, slots, norm, rotary, planes))
    assert_allocates_nothing(lambda: quantize_index_queries(q, weights, codes, weights))
