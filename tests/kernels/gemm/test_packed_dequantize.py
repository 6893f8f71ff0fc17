"""Rows dequantized by the kernel: equal to quant/packed_values.py to the bit, for every scheme, odd rows and shares."""

import pytest
import torch

from for_each import for_each
from holdfast.kernels.gemm.packed_dequantize import dequantize_ids, dequantize_piece, takes
from holdfast.quant.packed_values import dequantize_rows
from holdfast.quant.packed_weight import PackedPart
from kernels.exactness import same_bits
from kernels.gemm.test_packed_linear import SCHEMES, random_part
from kernels.triton_cases import QUIET
from red_zones import RedZones

pytestmark = [QUIET, pytest.mark.any_device]
NAMES = tuple(name for name, scheme in SCHEMES.items() if takes(scheme))


def on(part: PackedPart, device: torch.device) -> PackedPart:
    return PackedPart(part.scheme, part.row_start, part.shape, tuple(plane.to(device) for plane in part.planes))


def test_takes_follows_the_scheme() -> None:
    assert not any(takes(scheme) for name, scheme in SCHEMES.items() if name.startswith(("IQ2", "IQ3")))
    assert not takes(SCHEMES["int4 in order"])
    assert not takes(SCHEMES["plain"])
    assert len(NAMES) == 25


@for_each("name", NAMES)
def test_dequantize_piece_equals_the_values(name: str, device: torch.device) -> None:
    """Rows from the middle of the second matrix, in all types, between red zones."""
    part = random_part(SCHEMES[name], (2, 7, 512))
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        zones = RedZones(device)
        out = zones.allocate(5, 512, dtype=dtype).fill_(float("nan"))
        assert dequantize_piece(on(part, device), 1, (1, 6), out) is out
        zones.check()
        expected = dequantize_rows(part, 1, (1, 6), torch.empty(5, 512))
        assert same_bits(out.cpu(), expected.to(dtype)), f"{name} in {dtype}"


@for_each("name", NAMES)
def test_dequantize_ids_looks_up_rows(name: str, device: torch.device) -> None:
    part = random_part(SCHEMES[name], (9, 256))
    ids = torch.tensor([8, 0, 3, 3, 5])
    values = dequantize_rows(part, 0, (0, 9), torch.empty(9, 256))
    out = torch.full((5, 256), float("nan"), device=device)
    assert same_bits(dequantize_ids(ids.to(device), on(part, device), out).cpu(), values[ids])
    share = torch.full((5, 256), float("nan"), device=device)
    dequantize_ids(ids.to(device) + 2, on(part, device), share, first_row=5)
    assert same_bits(share.cpu(), torch.where((ids[:, None] >= 3), values[(ids - 3).clamp(0)], 0.0))


@pytest.mark.parametrize("size_k", [32, 96, 544])
def test_dequantize_piece_takes_every_width(size_k: int, device: torch.device) -> None:
    for name in ("Q4_0", "Q5_1", "Q8_0", "int4", "int4 by row", "nvfp4", "mxfp4"):
        part = random_part(SCHEMES[name], (3, size_k))
        out = torch.empty(3, size_k, device=device)
        expected = dequantize_rows(part, 0, (0, 3), torch.empty(3, size_k))
        assert same_bits(dequantize_piece(on(part, device), 0, (0, 3), out).cpu(), expected), name
