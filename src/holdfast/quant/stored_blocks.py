"""GGUF blocks as stored, to planes: where each block holds its codes, bits, scales and minimums, in plain torch.

`split` only moves bytes: most planes are views of the blocks. Six-bit scales of Q4_K, Q5_K and IQ4_XS become bytes.
packed_blocks.py has the arithmetic.

N blocks
"""

from collections.abc import Callable

import torch
from torch import Tensor


def split(blocks: Tensor, name: str) -> tuple[Tensor, ...]:
    """Return the planes of whole blocks [N, bytes], each [N, elements of a block], in the order of the scheme's."""
    return _SPLITS[name](blocks)


def _half(blocks: Tensor, index: int) -> Tensor:
    """Return the float16 at this place of every block [N, 1]."""
    return blocks.view(torch.float16)[:, index : index + 1]


def _q4_0(blocks: Tensor) -> tuple[Tensor, ...]:
    return blocks[:, 2:], _half(blocks, 0)


def _q4_1(blocks: Tensor) -> tuple[Tensor, ...]:
    return blocks[:, 4:], _half(blocks, 0), _half(blocks, 1)


def _q5_0(blocks: Tensor) -> tuple[Tensor, ...]:
    return blocks[:, 6:], blocks[:, 2:6], _half(blocks, 0)


def _q5_1(blocks: Tensor) -> tuple[Tensor, ...]:
    return blocks[:, 8:], blocks[:, 4:8], _half(blocks, 0), _half(blocks, 1)


def _q8_0(blocks: Tensor) -> tuple[Tensor, ...]:
    return blocks.view(torch.int8)[:, 2:], _half(blocks, 0)


def _q2_k(blocks: Tensor) -> tuple[Tensor, ...]:
    return blocks[:, 16:80], blocks[:, :16], _half(blocks, 40), _half(blocks, 41)


def _q3_k(blocks: Tensor) -> tuple[Tensor, ...]:
    return blocks[:, 32:96], blocks[:, :32], blocks[:, 96:108], _half(blocks, 54)


def _sub_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return eight six-bit scales and minima, packed in bytes 4 to 15, as bytes.

    Of three groups of four bytes, the low six bits of the first two are scales and minima 0-3. Scales and minima 4-7 have
    their low four bits in the halves of the third group and their high two bits on top of the first two.
    """
    first, second, third = blocks[:, 4:16].unflatten(1, (3, 4)).unbind(1)
    scales = torch.cat((first & 0x3F, (third & 0x0F) | (first >> 2 & 0x30)), dim=1)
    return scales, torch.cat((second & 0x3F, (third >> 4) | (second >> 2 & 0x30)), dim=1)


def _q4_k(blocks: Tensor) -> tuple[Tensor, ...]:
    return blocks[:, 16:], *_sub_scales(blocks), _half(blocks, 0), _half(blocks, 1)


def _q5_k(blocks: Tensor) -> tuple[Tensor, ...]:
    return blocks[:, 48:], blocks[:, 16:48], *_sub_scales(blocks), _half(blocks, 0), _half(blocks, 1)


def _q6_k(blocks: Tensor) -> tuple[Tensor, ...]:
    return blocks[:, :128], blocks[:, 128:192], blocks.view(torch.int8)[:, 192:208], _half(blocks, 104)


def _iq4_nl(blocks: Tensor) -> tuple[Tensor, ...]:
    return blocks[:, 2:], _half(blocks, 0)


def _iq4_xs(blocks: Tensor) -> tuple[Tensor, ...]:
    """Halves of four bytes are the low four bits of a sub-scale, pairs of 16 bits the high two; 32 is subtracted."""
    low = torch.stack((blocks[:, 4:8] & 0x0F, blocks[:, 4:8] >> 4), dim=2).flatten(1)
    high = blocks.view(torch.int16)[:, 1:2].to(torch.int32) >> torch.arange(0, 16, 2, dtype=torch.int32) & 3
    return blocks[:, 8:], (low | high << 4).sub_(32).to(torch.int8), _half(blocks, 0)


def _mxfp4(blocks: Tensor) -> tuple[Tensor, ...]:
    return blocks[:, 1:], blocks[:, :1]


def _nvfp4(blocks: Tensor) -> tuple[Tensor, ...]:
    return blocks[:, 4:], blocks[:, :4]


def _whole(blocks: Tensor) -> tuple[Tensor, ...]:
    return (blocks,)


_SPLITS: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
    "NVFP4": _nvfp4,
    **dict.fromkeys(("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"), _whole),
}
