"""GGUF blocks to float32, by way of their planes: quant/stored_blocks.py splits them, quant/packed_blocks.py has the arithmetic.

N blocks, E elements in a block
"""

import torch
from torch import Tensor

from holdfast.loading.gguf.file import GGMLType
from holdfast.quant.packed_blocks import BLOCK_FILLS
from holdfast.quant.stored_blocks import split

CHUNK_ELEMENTS = 2**18
"""Elements per chunk: 1 MiB of results, so each pass finds the previous pass's results in cache."""


def dequantize(raw: Tensor, ggml_type: GGMLType, out: Tensor) -> Tensor:
    """Fill `out` (float32, contiguous) from the bytes of whole blocks, and return it."""
    assert raw.dtype == torch.uint8, f"{raw.dtype=} is not bytes"
    blocks = raw.view(-1, ggml_type.block_bytes)
    out_NE = out.view(-1, ggml_type.block_elements)
    assert blocks.shape[0] == out_NE.shape[0], f"{blocks.shape[0]} blocks do not fill {tuple(out.shape)}"
    fill = BLOCK_FILLS[ggml_type.name]
    chunk_blocks = CHUNK_ELEMENTS // ggml_type.block_elements
    for start in range(0, blocks.shape[0], chunk_blocks):
        end = start + chunk_blocks
        fill(split(blocks[start:end], ggml_type.name), out_NE[start:end])
    return out
