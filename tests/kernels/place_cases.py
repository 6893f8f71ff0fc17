"""Rows of checkpoints as tests place them: hostile values, any strides, amid poison and between red zones."""

from dataclasses import dataclass

import pytest
import torch

from holdfast.kernels.load.place_kernels import (
    UNSEEN,
    Findings,
    find_amax_triton,
    place_plain_triton,
    place_quantized_triton,
)
from holdfast.kernels.load.place_rows import (
    find_amax_reference,
    place_plain_reference,
    place_quantized_reference,
)
from holdfast.quant.weight_schemes import WEIGHT_SCHEMES, WeightScheme
from kernels.exactness import random
from kernels.triton_cases import amid_poison
from red_zones import RedZones

SCHEMES = pytest.mark.parametrize("scheme", WEIGHT_SCHEMES.values(), ids=WEIGHT_SCHEMES)
# Kernels take bfloat16 as integers, which the interpreter gets right.
FLOAT_TYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=lambda dtype: str(dtype)[6:]
)
LAYOUTS = pytest.mark.parametrize("layout", ["dense", "transposed", "apart"])


@dataclass
class Placed:
    """What lies in the place afterwards, and what was found; all on the CPU."""

    planes: tuple[torch.Tensor, ...]
    nonfinite: int
    differing: int

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Placed), f"{other!r} was not placed"
        same = all(torch.equal(mine, theirs) for mine, theirs in zip(self.planes, other.planes, strict=True))
        return same and (self.nonfinite, self.differing) == (other.nonfinite, other.differing)


def new_findings(device: torch.device) -> Findings:
    pair = torch.full((2, 1), UNSEEN, dtype=torch.int32, device=device)
    return Findings(pair[0], pair[1])


def laid_out(rows: torch.Tensor, layout: str, device: torch.device) -> torch.Tensor:
    """Put rows amid NaN: one behind the other, transposed, or with columns apart."""
    if layout == "transposed":
        return amid_poison(rows.t().contiguous(), device).t()
    if layout == "apart":
        return amid_poison(rows.repeat_interleave(2, dim=1), device)[:, ::2]
    return amid_poison(rows, device)


def hostile_rows(num_columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros of both signs, numbers below the normal ones, the largest ones, one far above the rest, ties, normal ones."""
    info = torch.finfo(dtype)
    rows = random(9, num_columns, seed=num_columns).double()
    rows[0] = 0
    rows[1, ::2], rows[1, 1::2] = 0, -0.0
    rows[2] *= info.smallest_normal / 8
    rows[3] = rows[3].sign() * info.max * torch.linspace(0.1, 1, num_columns).double()
    rows[4] *= 1e-3
    rows[4, num_columns // 2] = -3e4
    rows[5] = torch.arange(num_columns).double() % 1024 / 16 - 32
    rows[6] = torch.arange(num_columns).double() % 256 - 127.5
    rows[7] *= 1e-7
    return rows.to(dtype)


def place_codes(
    rows: torch.Tensor,
    scheme: WeightScheme,
    device: torch.device | None = None,
    kept: tuple[int, int] | None = None,
    first_row: int = 0,
    verify: tuple[torch.Tensor, ...] | None = None,
    amax: torch.Tensor | None = None,
) -> Placed:
    """Through the kernel on a device, or through the reference; verified against planes where these are given."""
    where = torch.device("cpu") if device is None else device
    zones, findings, kept = RedZones(where), new_findings(where), kept or (0, rows.shape[1])
    if scheme.is_whole_tensor and amax is None:
        amax = torch.zeros(1, device=where)
        find_amax_reference(rows, amax) if device is None else find_amax_triton(rows, amax)
    planes = [
        zones.allocate(*plane.shape, dtype=getattr(torch, plane.dtype))
        for plane in scheme.planes((rows.shape[0], kept[1] - kept[0]))
    ]
    for i, plane in enumerate(planes):
        plane.view(torch.uint8).fill_(0x7F) if verify is None else plane.view(torch.uint8).copy_(verify[i])
    if device is None:
        place_quantized_reference(rows, kept, scheme, *planes, amax, first_row, findings, verify is not None)
    else:
        place_quantized_triton(rows, kept, scheme, *planes, amax, first_row, findings, verify is not None)
    zones.check()
    return _placed(planes, findings)


def place(
    rows: torch.Tensor,
    dtype: torch.dtype,
    device: torch.device | None = None,
    first_row: int = 0,
    verify: torch.Tensor | None = None,
) -> Placed:
    """Like the one above, for rows that are converted or copied."""
    where = torch.device("cpu") if device is None else device
    zones, findings = RedZones(where), new_findings(where)
    out = zones.allocate(*rows.shape, dtype=dtype)
    out.view(torch.uint8).fill_(0x7F) if verify is None else out.view(torch.uint8).copy_(verify)
    if device is None:
        place_plain_reference(rows, out, first_row, findings, verify is not None)
    else:
        place_plain_triton(rows, out, first_row, findings, verify is not None)
    zones.check()
    return _placed([out], findings)


def _placed(planes: list[torch.Tensor], findings: Findings) -> Placed:
    tensors = tuple(plane.cpu().view(torch.uint8) for plane in planes)
    return Placed(tensors, int(findings.nonfinite), int(findings.differing))
