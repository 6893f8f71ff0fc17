"""GGUF blocks to float32, bit for bit what the `gguf` package computes.

A block holds codes and one or two float16 scales, a power of two, or fp8 scales. Scale times code is exact in float32 for every type
(11 bits of scale times at most 13 of sub-scale and code), so the only rounding is the last addition and the order of work
is free. Only MXFP4 may leave float32's range; there one product rounds.

N blocks, S sub-blocks in a block, E elements in a block, H bytes of two codes each
"""

from collections.abc import Callable

import torch

from holdfast.loading.gguf.file import GGMLType
from holdfast.loading.gguf.grids import GRID_FILLS

CHUNK_ELEMENTS = 2**18
"""Elements per chunk: 1 MiB of results, so each pass finds the previous pass's results in cache."""


def dequantize(raw: torch.Tensor, ggml_type: GGMLType, out: torch.Tensor) -> torch.Tensor:
    """Fill `out` (float32, contiguous) from the bytes of whole blocks, and return it."""
    assert raw.dtype == torch.uint8, f"{raw.dtype=} is not bytes"
    blocks = raw.view(-1, ggml_type.block_bytes)
    out_NE = out.view(-1, ggml_type.block_elements)
    assert blocks.shape[0] == out_NE.shape[0], f"{blocks.shape[0]} blocks do not fill {tuple(out.shape)}"
    fill = _FILLS[ggml_type.name]
    chunk_blocks = CHUNK_ELEMENTS // ggml_type.block_elements
    for start in range(0, blocks.shape[0], chunk_blocks):
        fill(blocks[start : start + chunk_blocks], out_NE[start : start + chunk_blocks])
    return out


def _scale(blocks: torch.Tensor, index: int) -> torch.Tensor:
    """Return the float16 at this place of every block, as float32 [N, 1]."""
    return blocks.view(torch.float16)[:, index : index + 1].float()


def _fill_q4_0(blocks: torch.Tensor, out_NE: torch.Tensor) -> None:
    """float16 scale, 16 bytes of codes: low halves are elements 0-15, high halves 16-31; value = scale * (code - 8)."""
    out_NE[:, :16].copy_((blocks & 0x0F).sub_(8).view(torch.int8)[:, 2:])
    out_NE[:, 16:].copy_((blocks >> 4).sub_(8).view(torch.int8)[:, 2:])
    out_NE.mul_(_scale(blocks, 0))


def _fill_q4_1(blocks: torch.Tensor, out_NE: torch.Tensor) -> None:
    """float16 scale, float16 minimum, 16 bytes of codes; value = scale * code + minimum."""
    out_NE[:, :16].copy_((blocks & 0x0F)[:, 4:])
    out_NE[:, 16:].copy_((blocks >> 4)[:, 4:])
    out_NE.mul_(_scale(blocks, 0)).add_(_scale(blocks, 1))


def _five_bit_codes(blocks: torch.Tensor, first_byte: int) -> torch.Tensor:
    """Four bytes with bit 4 of elements 0-31, then 16 bytes with the rest: codes [N, 32] from 0 to 31."""
    spread = ((torch.arange(256).unsqueeze(1) >> torch.arange(8) & 1) << 4).to(torch.uint8)
    eight_bits = blocks[:, first_byte : first_byte + 4].reshape(-1).to(torch.int32)
    codes_NE = spread.view(torch.int64).view(-1).index_select(0, eight_bits).view(torch.uint8).view(-1, 32)
    codes_NE[:, :16].bitwise_or_((blocks & 0x0F)[:, first_byte + 4 :])
    codes_NE[:, 16:].bitwise_or_((blocks >> 4)[:, first_byte + 4 :])
    return codes_NE


def _fill_q5_0(blocks: torch.Tensor, out_NE: torch.Tensor) -> None:
    """float16 scale, then five-bit codes; value = scale * (code - 16)."""
    out_NE.copy_(_five_bit_codes(blocks, 2).sub_(16).view(torch.int8))
    out_NE.mul_(_scale(blocks, 0))


def _fill_q5_1(blocks: torch.Tensor, out_NE: torch.Tensor) -> None:
    """float16 scale, float16 minimum, then five-bit codes; value = scale * code + minimum."""
    out_NE.copy_(_five_bit_codes(blocks, 4))
    out_NE.mul_(_scale(blocks, 0)).add_(_scale(blocks, 1))


def _fill_q8_0(blocks: torch.Tensor, out_NE: torch.Tensor) -> None:
    """float16 scale, 32 signed bytes; value = scale * code."""
    out_NE.copy_(blocks.view(torch.int8)[:, 2:])
    out_NE.mul_(_scale(blocks, 0))


NONLINEAR_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
E2M1_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the values of e2m1; its negative zero is a plain one here."""


def _fill_from_table(codes: torch.Tensor, values: tuple[int, ...], out: torch.Tensor) -> None:
    """Bytes of codes -> values of a table: those of low halves first. `codes` is [..., H] and `out` [..., 2 * H]."""
    table = torch.tensor(values, dtype=torch.int8)
    pairs = torch.stack((table.repeat(16), table.repeat_interleave(16)), dim=1).view(torch.int16).view(-1)
    found = pairs.index_select(0, codes.reshape(-1).to(torch.int32)).view(torch.int8).view(*codes.shape, 2)
    out[..., : codes.shape[-1]].copy_(found[..., 0])
    out[..., codes.shape[-1] :].copy_(found[..., 1])


def _fill_iq4_nl(blocks: torch.Tensor, out_NE: torch.Tensor) -> None:
    """float16 scale, 16 bytes of codes as in Q4_0; value = scale * table[code]."""
    _fill_from_table(blocks[:, 2:], NONLINEAR_VALUES, out_NE)
    out_NE.mul_(_scale(blocks, 0))


def _fill_mxfp4(blocks: torch.Tensor, out_NE: torch.Tensor) -> None:
    """A byte with the exponent of a scale, 16 bytes of codes as in Q4_0; value = 2^(exponent - 128) * table[code]."""
    _fill_from_table(blocks[:, 1:], E2M1_VALUES, out_NE)
    exponents = blocks[:, :1].to(torch.int32)
    # The two smallest scales are subnormal: a bit of the mantissa in place of an exponent.
    bits = torch.where(exponents < 2, 0x200000 << exponents, exponents.sub(1) << 23)
    out_NE.mul_(bits.view(torch.float32))


def _fill_nvfp4(blocks: torch.Tensor, out_NE: torch.Tensor) -> None:
    """Four ue4m3 scales, then eight bytes of codes for each 16 elements: low halves are 0-7, high halves 8-15.

    value = scale / 2 * table[code]. Scale byte 0x7F is zero, and the top bit is unused. A tensor's own scale multiplies the
    values afterwards (loading/gguf/source.py).
    """
    _fill_from_table(blocks[:, 4:].unflatten(1, (4, 8)), E2M1_VALUES, out_NE.view(-1, 4, 16))
    scale_bytes = blocks[:, :4]
    scales_NS = (scale_bytes & 0x7F).view(torch.float8_e4m3fn).float().mul_(0.5)
    # In e4m3fn 0x7F is NaN. With the top bit set, the unsigned type has a value there: 480.
    scales_NS.masked_fill_(scale_bytes == 0x7F, 0).masked_fill_(scale_bytes == 0xFF, 240)
    out_NE.view(-1, 4, 16).mul_(scales_NS.unsqueeze(2))


def _two_bit_codes(blocks: torch.Tensor, first_byte: int) -> torch.Tensor:
    """64 bytes, 32 for each half of a block: bits 2j, 2j+1 belong to elements 32j to 32j+31; codes [N, 2, 4, 32]."""
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8).view(1, 1, 4, 1)
    return (blocks[:, first_byte : first_byte + 64].unflatten(1, (2, 1, 32)) >> shifts).bitwise_and_(3)


def _fill_q2_k(blocks: torch.Tensor, out_NE: torch.Tensor) -> None:
    """16 bytes of sub-scales (low halves) and minima (high halves), two-bit codes, two float16 scales; by 16 elements.

    value = scale * sub-scale * code - scale of minima * minimum
    """
    out_NE.copy_(_two_bit_codes(blocks, 16).view(-1, 256))
    scales_NS = (blocks[:, :16] & 0x0F).float().mul_(_scale(blocks, 40))
    minima_NS = (blocks[:, :16] >> 4).float().mul_(_scale(blocks, 41))
    out_NE.view(-1, 16, 16).mul_(scales_NS.unsqueeze(2)).sub_(minima_NS.unsqueeze(2))


def _fill_q3_k(blocks: torch.Tensor, out_NE: torch.Tensor) -> None:
    """32 bytes of third bits, two-bit codes, 12 bytes of sub-scales, a float16 scale; by 16 elements.

    Bit s of byte i is the third bit of element 32s + i; value = scale * (sub-scale - 32) * (code - 4). The low four bits
    of sub-scales are in the halves of eight bytes, and their high two bits in the quarters of the next four bytes.
    """
    third_bits = blocks[:, :32].unsqueeze(1) >> torch.arange(8, dtype=torch.uint8).view(1, 8, 1)
    codes = third_bits.bitwise_and_(1).bitwise_left_shift_(2).view(-1, 2, 4, 32).bitwise_or_(_two_bit_codes(blocks, 32))
    out_NE.copy_(codes.sub_(4).view(torch.int8).view(-1, 256))
    low, high = blocks[:, 96:104], blocks[:, 104:108]
    low_NS = torch.cat((low & 0x0F, low >> 4), dim=1)
    high_NS = (high.unsqueeze(1) >> torch.arange(0, 8, 2, dtype=torch.uint8).view(1, 4, 1)).bitwise_and_(3).flatten(1)
    scales_NS = (low_NS | high_NS << 4).sub_(32).view(torch.int8).float().mul_(_scale(blocks, 54))
    out_NE.view(-1, 16, 16).mul_(scales_NS.unsqueeze(2))


def _fill_iq4_xs(blocks: torch.Tensor, out_NE: torch.Tensor) -> None:
    """float16 scale, 16 bits and 4 bytes of sub-scales, 128 bytes of codes; by 32 elements, each as in IQ4_NL.

    Halves of the bytes are the low four bits of a sub-scale, pairs of the 16 bits the high two;
    value = scale * (sub-scale - 32) * table[code].
    """
    _fill_from_table(blocks[:, 8:].unflatten(1, (8, 16)), NONLINEAR_VALUES, out_NE.view(-1, 8, 32))
    low_NS = torch.stack((blocks[:, 4:8] & 0x0F, blocks[:, 4:8] >> 4), dim=2).flatten(1)
    high_NS = blocks.view(torch.int16)[:, 1:2].to(torch.int32) >> torch.arange(0, 16, 2, dtype=torch.int32) & 3
    scales_NS = (low_NS | high_NS << 4).sub_(32).float().mul_(_scale(blocks, 0))
    out_NE.view(-1, 8, 32).mul_(scales_NS.unsqueeze(2))


def _fill_q4_k(blocks: torch.Tensor, out_NE: torch.Tensor) -> None:
    """Two float16 scales, 12 bytes of sub-scales, 128 bytes of codes; value = scale * code - minimum, by 32 elements.

    Each run of 32 bytes has two sub-blocks: the low halves, then the high halves.
    """
    codes = blocks[:, 16:].unflatten(1, (4, 32))
    out = out_NE.view(-1, 4, 2, 32)
    out[:, :, 0].copy_(codes & 0x0F)
    out[:, :, 1].copy_(codes >> 4)
    _scale_and_shift(blocks, out_NE)


def _fill_q5_k(blocks: torch.Tensor, out_NE: torch.Tensor) -> None:
    """As Q4_K, with 32 bytes before the codes: bit s of byte i is the fifth bit of element i of sub-block s."""
    fifth_bits = blocks[:, 16:48].unsqueeze(1) >> torch.arange(8, dtype=torch.uint8).view(1, 8, 1)
    codes = fifth_bits.bitwise_and_(1).bitwise_left_shift_(4).view(-1, 4, 2, 32)
    low_bits = blocks[:, 48:].unflatten(1, (4, 32))
    codes[:, :, 0].bitwise_or_(low_bits & 0x0F)
    codes[:, :, 1].bitwise_or_(low_bits >> 4)
    out_NE.copy_(codes.view(-1, 256))
    _scale_and_shift(blocks, out_NE)


def _fill_q6_k(blocks: torch.Tensor, out_NE: torch.Tensor) -> None:
    """128 bytes of low halves, 64 of high pairs of bits, 16 signed sub-scales, a float16 scale; by 16 elements.

    In each half of a block, 64 bytes give elements 0-63 in their low and 64-127 in their high halves, and bits 2j, 2j+1 of
    32 bytes belong to elements 32j to 32j+31; value = scale * sub-scale * (code - 32).
    """
    codes = _two_bit_codes(blocks, 128).bitwise_left_shift_(4).view(-1, 2, 2, 64)
    low_bits = blocks[:, :128].unflatten(1, (2, 64))
    codes[:, :, 0].bitwise_or_(low_bits & 0x0F)
    codes[:, :, 1].bitwise_or_(low_bits >> 4)
    out_NE.copy_(codes.sub_(32).view(torch.int8).view(-1, 256))
    scales_NS = blocks.view(torch.int8)[:, 192:208].float().mul_(blocks.view(torch.float16)[:, 104:].float())
    out_NE.view(-1, 16, 16).mul_(scales_NS.unsqueeze(2))


def _scale_and_shift(blocks: torch.Tensor, out_NE: torch.Tensor) -> None:
    """codes -> scale * code - minimum, with eight six-bit scales and minima packed in bytes 4 to 15.

    Of three groups of four bytes, the low six bits of the first two are scales and minima 0-3. Scales and minima 4-7 have
    their low four bits in the halves of the third group and their high two bits on top of the first two.
    """
    first, second, third = blocks[:, 4:16].unflatten(1, (3, 4)).unbind(1)
    scales_NS = torch.cat((first & 0x3F, (third & 0x0F) | (first >> 2 & 0x30)), dim=1).float()
    minima_NS = torch.cat((second & 0x3F, (third >> 4) | (second >> 2 & 0x30)), dim=1).float()
    block_scales = blocks.view(torch.float16)[:, :2].float()
    scales_NS.mul_(block_scales[:, :1])
    minima_NS.mul_(block_scales[:, 1:])
    out_NE.view(-1, 8, 32).mul_(scales_NS.unsqueeze(2)).sub_(minima_NS.unsqueeze(2))


_FILLS: dict[str, Callable[[torch.Tensor, torch.Tensor], None]] = {
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
    **GRID_FILLS,
}
