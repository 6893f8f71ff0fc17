"""GGUF blocks to float32, bit for bit what the `gguf` package computes: the types of 32 elements, and the way to all.

A block holds codes and one or two float16 scales. Scale times code is exact in float32 for every type (11 bits of scale
times at most 13 of sub-scale and code), so the only rounding is the last addition and the order of work is free.
"""

# N blocks, E elements in a block

from collections.abc import Callable

import torch

from holdfast.loading.gguf.gguf_dequant_k import dequantize_q4_k, dequantize_q5_k, dequantize_q6_k
from holdfast.loading.gguf.gguf_file import GGMLType

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


_FILLS: dict[str, Callable[[torch.Tensor, torch.Tensor], None]] = {
    "Q4_0": _fill_q4_0,
    "Q4_1": _fill_q4_1,
    "Q5_0": _fill_q5_0,
    "Q5_1": _fill_q5_1,
    "Q8_0": _fill_q8_0,
    "Q4_K": dequantize_q4_k,
    "Q5_K": dequantize_q5_k,
    "Q6_K": dequantize_q6_k,
}
