"""Values of GGUF blocks from their planes, bit for bit what the `gguf` package computes from the stored blocks.

Scale times code is exact in float32 for every type (11 bits of scale times at most 13 of sub-scale and code), so the
only rounding is the last addition and the order of work is free. Only MXFP4 may leave float32's range; there one product
rounds. The value of each type is a row of the table in quant/packed_schemes.py.

N blocks, S sub-blocks in a block, E elements in a block, H bytes of two codes each
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache

import torch
from torch import Tensor

from holdfast.quant.packed_grids import fill_grid

BlockFill = Callable[[Sequence[Tensor], Tensor], None]
"""fill(planes, out_NE): planes are [N, elements of a block], in the order of the scheme's."""
NONLINEAR_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
E2M1_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the values of e2m1; its negative zero is a plain one here."""


def _halves(codes_NH: Tensor, run: int, out_NE: Tensor) -> None:
    """Write low halves of each run of bytes before its high halves, as numbers."""
    codes = codes_NH.unflatten(1, (-1, run))
    out = out_NE.view(-1, codes.shape[1], 2, run)
    out[:, :, 0].copy_(codes & 0x0F)
    out[:, :, 1].copy_(codes >> 4)


def _fill_q4_0(planes: Sequence[Tensor], out_NE: Tensor) -> None:
    codes, scales = planes
    out_NE[:, :16].copy_((codes & 0x0F).sub_(8).view(torch.int8))
    out_NE[:, 16:].copy_((codes >> 4).sub_(8).view(torch.int8))
    out_NE.mul_(scales.float())


def _fill_q4_1(planes: Sequence[Tensor], out_NE: Tensor) -> None:
    codes, scales, mins = planes
    _halves(codes, 16, out_NE)
    out_NE.mul_(scales.float()).add_(mins.float())


@cache
def _spread_bits(device: torch.device) -> Tensor:
    """Return 16 or 0 for each bit of each byte, eight bytes as one integer [256]."""
    bits = (torch.arange(256).unsqueeze(1) >> torch.arange(8) & 1) << 4
    return bits.to(torch.uint8).view(torch.int64).view(-1).to(device)


def _five_bit_codes(codes: Tensor, fifth: Tensor) -> Tensor:
    """Return codes [N, 32] from 0 to 31; bit i of the four bytes is the fifth bit of element i."""
    spread = _spread_bits(codes.device).index_select(0, fifth.reshape(-1).to(torch.int32))
    codes_NE = spread.view(torch.uint8).view(-1, 32)
    codes_NE[:, :16].bitwise_or_(codes & 0x0F)
    codes_NE[:, 16:].bitwise_or_(codes >> 4)
    return codes_NE


def _fill_q5_0(planes: Sequence[Tensor], out_NE: Tensor) -> None:
    codes, fifth, scales = planes
    out_NE.copy_(_five_bit_codes(codes, fifth).sub_(16).view(torch.int8))
    out_NE.mul_(scales.float())


def _fill_q5_1(planes: Sequence[Tensor], out_NE: Tensor) -> None:
    codes, fifth, scales, mins = planes
    out_NE.copy_(_five_bit_codes(codes, fifth))
    out_NE.mul_(scales.float()).add_(mins.float())


def _fill_q8_0(planes: Sequence[Tensor], out_NE: Tensor) -> None:
    codes, scales = planes
    out_NE.copy_(codes)
    out_NE.mul_(scales.float())


@cache
def _pairs(values: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the table's values of low and high half of each byte, as one integer [256]."""
    table = torch.tensor(values, dtype=torch.int8)
    pairs = torch.stack((table.repeat(16), table.repeat_interleave(16)), dim=1)
    return pairs.view(torch.int16).view(-1).to(device)


def _fill_from_table(codes: Tensor, values: tuple[int, ...], out: Tensor) -> None:
    """Bytes of codes -> values of a table: those of low halves first. `codes` is [..., H] and `out` [..., 2 * H]."""
    pairs = _pairs(values, codes.device)
    found = pairs.index_select(0, codes.reshape(-1).to(torch.int32)).view(torch.int8).view(*codes.shape, 2)
    out[..., : codes.shape[-1]].copy_(found[..., 0])
    out[..., codes.shape[-1] :].copy_(found[..., 1])


def _fill_iq4_nl(planes: Sequence[Tensor], out_NE: Tensor) -> None:
    codes, scales = planes
    _fill_from_table(codes, NONLINEAR_VALUES, out_NE)
    out_NE.mul_(scales.float())


def _fill_mxfp4(planes: Sequence[Tensor], out_NE: Tensor) -> None:
    """value = 2^(exponent - 128) * twice the code's number."""
    codes, scales = planes
    _fill_from_table(codes, E2M1_VALUES, out_NE)
    exponents = scales.to(torch.int32)
    # The two smallest scales are subnormal: a bit of the mantissa in place of an exponent.
    bits = torch.where(exponents < 2, 0x200000 << exponents, exponents.sub(1) << 23)
    out_NE.mul_(bits.view(torch.float32))


def _fill_nvfp4(planes: Sequence[Tensor], out_NE: Tensor) -> None:
    """value = scale / 2 * twice the code's number, by 16; a scale is ue4m3, of which 0x7F is zero."""
    codes, scale_bytes = planes
    _fill_from_table(codes.unflatten(1, (4, 8)), E2M1_VALUES, out_NE.view(-1, 4, 16))
    scales_NS = (scale_bytes & 0x7F).view(torch.float8_e4m3fn).float().mul_(0.5)
    # In e4m3fn 0x7F is NaN. With the top bit set, the unsigned type has a value there: 480.
    scales_NS.masked_fill_(scale_bytes == 0x7F, 0).masked_fill_(scale_bytes == 0xFF, 240)
    out_NE.view(-1, 4, 16).mul_(scales_NS.unsqueeze(2))


def _shifts(count: int, step: int, device: torch.device) -> Tensor:
    return torch.arange(0, count * step, step, dtype=torch.uint8, device=device)


def _two_bit_codes(codes: Tensor) -> Tensor:
    """64 bytes, 32 for each half of a block: bits 2j, 2j+1 belong to elements 32j to 32j+31; codes [N, 2, 4, 32]."""
    shifts = _shifts(4, 2, codes.device).view(1, 1, 4, 1)
    return (codes.unflatten(1, (2, 1, 32)) >> shifts).bitwise_and_(3)


def _fill_q2_k(planes: Sequence[Tensor], out_NE: Tensor) -> None:
    """Low halves of sub are sub-scales, high halves minima; by 16 elements."""
    codes, sub, d, dmin = planes
    out_NE.copy_(_two_bit_codes(codes).view(-1, 256))
    scales_NS = (sub & 0x0F).float().mul_(d.float())
    minima_NS = (sub >> 4).float().mul_(dmin.float())
    out_NE.view(-1, 16, 16).mul_(scales_NS.unsqueeze(2)).sub_(minima_NS.unsqueeze(2))


def _fill_q3_k(planes: Sequence[Tensor], out_NE: Tensor) -> None:
    """Bit s of byte i of third is the third bit of element 32s + i; by 16 elements.

    The low four bits of sub-scales are in the halves of eight bytes, and their high two bits in the quarters of the next
    four bytes.
    """
    codes, third, sub, d = planes
    third_bits = third.unsqueeze(1) >> _shifts(8, 1, third.device).view(1, 8, 1)
    values = third_bits.bitwise_and_(1).bitwise_left_shift_(2).view(-1, 2, 4, 32).bitwise_or_(_two_bit_codes(codes))
    out_NE.copy_(values.sub_(4).view(torch.int8).view(-1, 256))
    low, high = sub[:, :8], sub[:, 8:]
    low_NS = torch.cat((low & 0x0F, low >> 4), dim=1)
    high_NS = (high.unsqueeze(1) >> _shifts(4, 2, high.device).view(1, 4, 1)).bitwise_and_(3).flatten(1)
    scales_NS = (low_NS | high_NS << 4).sub_(32).view(torch.int8).float().mul_(d.float())
    out_NE.view(-1, 16, 16).mul_(scales_NS.unsqueeze(2))


def _fill_iq4_xs(planes: Sequence[Tensor], out_NE: Tensor) -> None:
    codes, scales, d = planes
    _fill_from_table(codes.unflatten(1, (8, 16)), NONLINEAR_VALUES, out_NE.view(-1, 8, 32))
    out_NE.view(-1, 8, 32).mul_(scales.float().mul_(d.float()).unsqueeze(2))


def _scale_and_shift(scales: Tensor, mins: Tensor, d: Tensor, dmin: Tensor, out_NE: Tensor) -> None:
    """codes -> scale * code - minimum, by 32 elements."""
    scales_NS, minima_NS = scales.float().mul_(d.float()), mins.float().mul_(dmin.float())
    out_NE.view(-1, 8, 32).mul_(scales_NS.unsqueeze(2)).sub_(minima_NS.unsqueeze(2))


def _fill_q4_k(planes: Sequence[Tensor], out_NE: Tensor) -> None:
    """Each run of 32 bytes has two sub-blocks: the low halves, then the high halves."""
    codes, scales, mins, d, dmin = planes
    _halves(codes, 32, out_NE)
    _scale_and_shift(scales, mins, d, dmin, out_NE)


def _fill_q5_k(planes: Sequence[Tensor], out_NE: Tensor) -> None:
    """Bit s of byte i of fifth is the fifth bit of element i of sub-block s."""
    low_bits, fifth, scales, mins, d, dmin = planes
    fifth_bits = fifth.unsqueeze(1) >> _shifts(8, 1, fifth.device).view(1, 8, 1)
    codes = fifth_bits.bitwise_and_(1).bitwise_left_shift_(4).view(-1, 4, 2, 32)
    low_bits = low_bits.unflatten(1, (4, 32))
    codes[:, :, 0].bitwise_or_(low_bits & 0x0F)
    codes[:, :, 1].bitwise_or_(low_bits >> 4)
    out_NE.copy_(codes.view(-1, 256))
    _scale_and_shift(scales, mins, d, dmin, out_NE)


def _fill_q6_k(planes: Sequence[Tensor], out_NE: Tensor) -> None:
    """In each half of a block, 64 bytes give elements 0-63 in their low and 64-127 in their high halves; by 16."""
    low_bits, high, scales, d = planes
    codes = _two_bit_codes(high).bitwise_left_shift_(4).view(-1, 2, 2, 64)
    low_bits = low_bits.unflatten(1, (2, 64))
    codes[:, :, 0].bitwise_or_(low_bits & 0x0F)
    codes[:, :, 1].bitwise_or_(low_bits >> 4)
    out_NE.copy_(codes.sub_(32).view(torch.int8).view(-1, 256))
    out_NE.view(-1, 16, 16).mul_(scales.float().mul_(d.float()).unsqueeze(2))


BLOCK_FILLS: Mapping[str, BlockFill] = {
    "Q4_0": _fill_q4_0,
    "Q4_1": _fill_q4_1,
    "Q5_0": _fill_q5_0,
    "Q5_1": _fill_q5_1,
    "Q8_0": _fill_q8_0,
    "Q2_K": _fill_q2_k,
    "Q3_K": _fill_q3_k,
    "Q4_K": _fill_q4_k,
    "Q5_K": _fill_q5_k,
    "Q6_K": _fill_q6_k,
    "IQ4_NL": _fill_iq4_nl,
    "IQ4_XS": _fill_iq4_xs,
    "MXFP4": _fill_mxfp4,
    "NVFP4": _fill_nvfp4,
    **{name: fill_grid(name) for name in ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")},
}
"""By the name of the block type (`PackedScheme.title`)."""
