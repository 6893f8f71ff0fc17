"""GGUF K-quants to float32: blocks of 256 elements whose sub-blocks have small integer scales of their own."""

# N blocks, S sub-blocks in a block, E elements in a block

import torch


def dequantize_q4_k(blocks: torch.Tensor, out_NE: torch.Tensor) -> None:
    """Two float16 scales, 12 bytes of sub-scales, 128 bytes of codes; value = scale * code - minimum, by 32 elements.

    Each run of 32 bytes has two sub-blocks: the low halves, then the high halves.
    """
    codes = blocks[:, 16:].unflatten(1, (4, 32))
    out = out_NE.view(-1, 4, 2, 32)
    out[:, :, 0].copy_(codes & 0x0F)
    out[:, :, 1].copy_(codes >> 4)
    _scale_and_shift(blocks, out_NE)


def dequantize_q5_k(blocks: torch.Tensor, out_NE: torch.Tensor) -> None:
    """As Q4_K, with 32 bytes before the codes: bit s of byte i is the fifth bit of element i of sub-block s."""
    fifth_bits = blocks[:, 16:48].unsqueeze(1) >> torch.arange(8, dtype=torch.uint8).view(1, 8, 1)
    codes = fifth_bits.bitwise_and_(1).bitwise_left_shift_(4).view(-1, 4, 2, 32)
    low_bits = blocks[:, 48:].unflatten(1, (4, 32))
    codes[:, :, 0].bitwise_or_(low_bits & 0x0F)
    codes[:, :, 1].bitwise_or_(low_bits >> 4)
    out_NE.copy_(codes.view(-1, 256))
    _scale_and_shift(blocks, out_NE)


def dequantize_q6_k(blocks: torch.Tensor, out_NE: torch.Tensor) -> None:
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
