"""GGUF blocks to float32, bit for bit what the `gguf` package computes.

A block holds codes and one or two float16 scales. Scale times code is exact in float32 for every type (11 bits of scale
times at most 13 of sub-scale and code), so the only rounding is the last addition and the order of work is free.

N blocks, S sub-blocks in a block, E elements in a block
"""

from collections.abc import Callable

import torch

from holdfast.loading.gguf.file import GGMLType

CHUNK_ELEMENTS = 2**18
"""Elements at a time: 1 MiB of results, so that each pass finds the one before it in cache."""


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
    """The float16 at this place of every block, as float32 [N, 1]."""
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
    high_bits = blocks[:, 128:192].unflatten(1, (2, 1, 32)) >> torch.arange(0, 8, 2, dtype=torch.uint8).view(1, 1, 4, 1)
    codes = high_bits.bitwise_and_(3).bitwise_left_shift_(4).view(-1, 2, 2, 64)
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
    "Q4_K": _fill_q4_k,
    "Q5_K": _fill_q5_k,
    "Q6_K": _fill_q6_k,
}
