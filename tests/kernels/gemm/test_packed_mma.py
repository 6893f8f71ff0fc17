"""Tiles of packed weights: every scheme as exact as float32 sums are, odd shapes, any rows alike, and what is taken."""

from collections.abc import Iterator

import pytest
import torch

from for_each import for_each
from holdfast.kernels.activation import SILU_HALVES, GateForm, gate_up_product
from holdfast.kernels.gemm import packed_mma as kernels
from holdfast.kernels.gemm import packed_tiles
from holdfast.kernels.gemm.packed_codes import CODE_ROWS, EVEN_ODD_ASM, decode_lines
from holdfast.kernels.packed_kernels import ARRIVED_BYTES, PARTIAL_BYTES, code_key, has_tiles, packed_splits
from holdfast.quant.packed_schemes import PackedScheme, integer_scheme
from holdfast.quant.packed_values import dequantize_rows
from holdfast.quant.packed_weight import PackedPart
from kernels.exactness import same_bits
from kernels.gemm.test_packed_linear import SCHEMES, random_part
from kernels.gluon_tiles import modelled_tiles
from red_zones import RedZones

pytestmark = pytest.mark.any_device

TILED: dict[str, PackedScheme] = {name: scheme for name, scheme in SCHEMES.items() if has_tiles(scheme, 256)}
TILED |= {
    "int4 of 128": integer_scheme("int4", 4, 128, "bfloat16"),
    "int4 of 128 with zero points": integer_scheme("int4", 4, 128, "float16", "uint8"),
}
NAN = float("nan")


def e4m3(b_code: torch.Tensor) -> torch.Tensor:
    return b_code.to(torch.uint8).view(torch.float8_e4m3fn).float()


def gated(b_gate: torch.Tensor, b_up: torch.Tensor, limit: float, is_scaled: bool) -> torch.Tensor:
    """As the epilogue computes it."""
    halves = torch.cat((b_gate.flatten()[None], b_up.flatten()[None]), 1)
    form = GateForm(limit=limit or None, is_silu=not is_scaled)
    return gate_up_product(halves, form).view(b_gate.shape)


@pytest.fixture(autouse=True)
def _model(device: torch.device) -> Iterator[None]:
    """Without a GPU the source runs in torch."""
    if device.type == "cuda":
        yield
        return
    names = {"column_texts": (EVEN_ODD_ASM,), "e4m3_value": e4m3, "gated_numbers": gated}
    with modelled_tiles(kernels, "packed_mma_kernel", packed_tiles, **names):
        yield


def run(x_TK: torch.Tensor, part: PackedPart, bias_N: torch.Tensor | None, device: torch.device, matrix: int = 0):
    """Amid poison, in float32; counters are zero again."""
    zones = RedZones(device)
    out = zones.allocate(len(x_TK), part.num_rows + 5, dtype=torch.float32).fill_(NAN)
    room = torch.full((ARRIVED_BYTES + PARTIAL_BYTES,), 0xFF, dtype=torch.uint8, device=device)
    room[:ARRIVED_BYTES] = 0
    planes = tuple(plane.to(device) for plane in part.planes)
    own = PackedPart(part.scheme, 0, part.shape, planes)
    bias = None if bias_N is None else bias_N.to(device)
    kernels.packed_mma(x_TK.to(device), own, bias, out[:, 3:-2], room, matrix)
    zones.check()
    assert bool((room[:ARRIVED_BYTES] == 0).all())
    out = out.cpu()
    assert bool(out[:, :3].isnan().all())
    assert bool(out[:, -2:].isnan().all())
    return out[:, 3:-2]


def judge(
    y_TN: torch.Tensor, x_TK: torch.Tensor, part: PackedPart, bias_N: torch.Tensor | None, matrix: int = 0
) -> None:
    """Sums in float32 of exact products: far below what rounded weights would differ by."""
    values = dequantize_rows(part, matrix, (0, part.num_rows), torch.empty(part.shape[-2:])).double()
    exact = x_TK.double() @ values.T
    exact = exact if bias_N is None else exact + bias_N.double()
    size = x_TK.double().abs() @ values.abs().T + 1e-6
    assert bool(y_TN.isfinite().all())
    assert float(((y_TN.double() - exact).abs() / size).max()) < 2e-5


def test_every_family_has_a_row() -> None:
    assert {code_key(scheme) for scheme in TILED.values()} == set(CODE_ROWS)


@for_each("name", TILED)
def test_packed_mma_multiplies_the_values(name: str, device: torch.device) -> None:
    """A second matrix, rows and columns that end within tiles, a bias."""
    part = random_part(TILED[name], (2, 131, 512))
    for dtype, num_rows in ((torch.bfloat16, 1), (torch.float16, 11)):
        x, bias = torch.randn(num_rows, 512).to(dtype), torch.randn(131).to(dtype)
        judge(run(x, part, bias, device, 1), x, part, bias, 1)


@pytest.mark.parametrize("size_k", [32, 96, 544, 2880])
def test_packed_mma_takes_every_width(size_k: int, device: torch.device) -> None:
    for name in ("Q4_0", "Q5_1", "Q8_0", "int4", "MXFP4"):
        part = random_part(TILED[name], (9, size_k))
        x = torch.randn(2, size_k).to(torch.bfloat16)
        judge(run(x, part, None, device), x, part, None)


@for_each("name", ("Q4_K", "Q6_K", "int4 with zero points"))
def test_packed_mma_rows_are_alike_in_any_batch(name: str, device: torch.device) -> None:
    """One row alone and among others, in shared parts and in parts that one program adds."""
    part = random_part(TILED[name], (40, 2304))
    x = torch.randn(70 if device.type == "cpu" else 300, 2304).to(torch.bfloat16)
    whole = run(x, part, None, device)
    judge(whole, x, part, None)
    for rows in (slice(3, 4), slice(2, 10), slice(1, 14), slice(0, 30), slice(0, 64)):
        found = run(x[rows], part, None, device)
        if device.type == "cuda":
            assert same_bits(found, whole[rows]), f"{name}: {rows}"
        else:  # torch's product rounds by the number of rows
            assert torch.allclose(found, whole[rows], rtol=0, atol=1e-3), f"{name}: {rows}"


@pytest.mark.parametrize("form", [SILU_HALVES, GateForm(True, 7.0), GateForm(limit=10.0, is_silu=True)], ids=str)
def test_packed_mma_gates_in_its_epilogue(form: GateForm, device: torch.device) -> None:
    """Outputs that end within a tile; parts that programs share."""
    part = random_part(TILED["Q4_0"], (2 * 75, 2048))
    x, bias = torch.randn(3, 2048).to(torch.bfloat16), torch.randn(150)
    room = torch.zeros(ARRIVED_BYTES + PARTIAL_BYTES, dtype=torch.uint8, device=device)
    out = torch.full((3, 75), NAN, device=device)
    planes = tuple(plane.to(device) for plane in part.planes)
    own = PackedPart(part.scheme, 0, part.shape, planes)
    assert packed_splits(150, 2048) == 2
    kernels.packed_mma(x.to(device), own, bias.to(device), out, room, 0, True, form)
    values = dequantize_rows(part, 0, (0, 150), torch.empty(150, 2048))
    expected = gate_up_product(x.float() @ values.T + bias, form)
    assert torch.allclose(out.cpu(), expected, rtol=1e-3, atol=1e-3)


def test_packed_mma_nan_stays_in_its_row(device: torch.device) -> None:
    part = random_part(TILED["Q4_1"], (20, 288))
    x = torch.randn(9, 288).to(torch.bfloat16)
    clean = run(x, part, None, device)
    x[8, 287] = NAN
    y = run(x, part, None, device)
    assert bool(y[8].isnan().all())
    assert torch.equal(y[:8], clean[:8])


def test_row_form_and_splits_follow_the_shapes() -> None:
    assert [kernels.block_rows(rows) for rows in (1, 8, 9, 17, 33, 64, 65, 513)] == [8, 8, 16, 32, 64, 64, 64, 64]
    assert len({kernels.row_form(rows) for rows in range(1, 2000)}) == 6
    shapes = ((51200, 5120), (10240, 5120), (5120, 8192), (5120, 25600), (8192, 28672), (512, 1024))
    assert [packed_splits(*shape) for shape in shapes] == [4, 4, 8, 9, 6, 1]
    for block_m in (8, 16, 32, 64):
        assert 2 <= kernels.num_stages(block_m, 192, 16384) <= 4
    assert kernels.num_stages(8, 128, 8192) == 3


def test_takes_declines_a_host_and_other_types() -> None:
    assert not kernels.takes(torch.empty(1, 256, dtype=torch.bfloat16), TILED["Q4_0"])
    assert not has_tiles(SCHEMES["int4 in order"], 256)
    assert not has_tiles(SCHEMES["Q4_K"], 288)
    assert not has_tiles(SCHEMES["Q2_K"], 256)


@for_each("key", tuple(CODE_ROWS))
def test_decode_lines_have_no_name_of_another_type(key: str) -> None:
    for is_bfloat16 in (False, True):
        assert ("bf16" in decode_lines(key, is_bfloat16, 0)) <= is_bfloat16
