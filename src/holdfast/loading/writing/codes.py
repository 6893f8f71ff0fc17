"""float32 rows to the codes and scales of compressed-tensors, rounded to nearest: int4 by group, and NVFP4.

The inverse of loading/packed/dequantize.py. R rows, K columns, J groups of columns, W words
"""

import torch

INT4_GROUP, NVFP4_GROUP = 128, 16
LARGEST_INT4 = 7
SPAN_INT4 = 15 / 2
"""The publisher's scale is amax over half the span of codes, -8 to 7."""
LARGEST_E2M1, LARGEST_E4M3 = 6.0, 448.0
SECOND_SPAN = LARGEST_E2M1 * LARGEST_E4M3
MIDPOINTS_E2M1 = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Between the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4 and 6."""
TIES_UP_E2M1 = (False, True, False, True, False, True, False)
"""Whether a midpoint rounds up: ties go to the even code."""


def pack_int4(values_RK: torch.Tensor, scale_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return words [R, K / 8] of eight codes, the first in the low bits, and scales [R, J].

    value = (code - 8) * scale; codes follow from the scale as stored.
    """
    grouped_RJG = values_RK.view(values_RK.shape[0], -1, INT4_GROUP)
    scales_RJ = (grouped_RJG.abs().amax(dim=2) / SPAN_INT4).to(scale_dtype)
    stored_RJ1 = scales_RJ.float().unsqueeze(2)
    codes_RJG = (grouped_RJG / stored_RJ1.masked_fill(stored_RJ1 == 0, 1.0)).round_().clamp_(-8, LARGEST_INT4)
    codes_RK = codes_RJG.add_(8).to(torch.uint8).view(values_RK.shape)
    return _nibbles(codes_RK).view(torch.int32), scales_RJ


def second_scale(amax: float) -> float:
    """Return the factor on scales of NVFP4, as stored (readers divide by it); 1 for a matrix of zeros."""
    return float(torch.tensor(SECOND_SPAN) / torch.tensor(amax)) if amax > 0 else 1.0


def pack_nvfp4(values_RK: torch.Tensor, second: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return bytes [R, K / 2] of two e2m1 codes, the first in the low bits, and e4m3 scales [R, J].

    value = code * scale / second; codes follow from the scales as stored.
    """
    grouped_RJG = values_RK.view(values_RK.shape[0], -1, NVFP4_GROUP)
    wanted_RJ = (grouped_RJG.abs().amax(dim=2) / LARGEST_E2M1 * second).clamp_(max=LARGEST_E4M3)
    scales_RJ = wanted_RJ.to(torch.float8_e4m3fn)
    stored_RJ1 = (scales_RJ.float() / second).unsqueeze(2)
    scaled_RJG = grouped_RJG / stored_RJ1.masked_fill(stored_RJ1 == 0, 1.0)
    codes_RK = _e2m1_codes(scaled_RJG.masked_fill_(stored_RJ1 == 0, 0.0)).view(values_RK.shape)
    return _nibbles(codes_RK), scales_RJ


def _e2m1_codes(values: torch.Tensor) -> torch.Tensor:
    """Round to the nearest e2m1 number, ties to even codes; bit 3 is the sign. A zero has no sign."""
    magnitudes, codes = values.abs(), torch.zeros(values.shape, dtype=torch.uint8)
    for midpoint, ties_up in zip(MIDPOINTS_E2M1, TIES_UP_E2M1, strict=True):
        codes += magnitudes >= midpoint if ties_up else magnitudes > midpoint
    return codes | ((values < 0) & (codes > 0)).to(torch.uint8) << 3


def _nibbles(codes_RK: torch.Tensor) -> torch.Tensor:
    """Put two codes into each byte, the first into the low half."""
    return codes_RK[:, 0::2] | codes_RK[:, 1::2] << 4
