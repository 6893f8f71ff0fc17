"""Blocks of quantized bytes with hostile scales, held bit for bit against the `gguf` package."""

import gguf
import numpy as np
import torch

from holdfast.loading.gguf.dequantize import dequantize
from holdfast.loading.gguf.file import GGMLType

SPECIAL_SCALES = np.array(
    [0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x0400, 0x3C00, 0xBC00, 0x3555, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00],
    dtype=np.uint16,
)
"""Zeros, the smallest and largest subnormals and normals, ordinary ones, infinities and NaN."""


def assert_same_bits(raw: np.ndarray, ggml_type: GGMLType) -> None:
    with np.errstate(all="ignore"):
        theirs = gguf.quants.dequantize(raw, getattr(gguf.GGMLQuantizationType, ggml_type.name))
    ours = dequantize(torch.from_numpy(raw), ggml_type, torch.full(theirs.shape, 7.0)).numpy()
    is_nan = np.isnan(theirs)
    # Where scale and minimum are both NaN, which of the two survives is the processor's choice.
    np.testing.assert_array_equal(np.isnan(ours), is_nan)
    np.testing.assert_array_equal(ours.view(np.uint32)[~is_nan], theirs.view(np.uint32)[~is_nan])


def extreme_blocks(ggml_type: GGMLType, scale_places: tuple[int, ...], codes: str) -> np.ndarray:
    """A block for every pair of special scales, which lie at these bytes of it."""
    num_blocks = len(SPECIAL_SCALES) ** 2
    rng = np.random.default_rng(2)
    raw = {
        "zeros": np.zeros((num_blocks, ggml_type.block_bytes), np.uint8),
        "ones": np.full((num_blocks, ggml_type.block_bytes), 0xFF, np.uint8),
        "random": rng.integers(0, 256, (num_blocks, ggml_type.block_bytes), dtype=np.uint8),
    }[codes]
    pairs = np.stack(np.meshgrid(SPECIAL_SCALES, SPECIAL_SCALES), -1).reshape(num_blocks, 2)
    for column, place in enumerate(scale_places):
        raw[:, place : place + 2] = pairs[:, column : column + 1].view(np.uint8)
    return raw
