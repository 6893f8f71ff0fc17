"""Dequantizing, bit for bit what the `gguf` package computes: random and extreme blocks of every type."""

import gguf
import numpy as np
import pytest
import torch

from for_each import for_each
from holdfast.loading.gguf.dequantize import CHUNK_ELEMENTS, dequantize
from holdfast.loading.gguf.file import TYPES
from loading.quantized_blocks import assert_same_bits, extreme_blocks

SCALE_PLACES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "MXFP4": (),
    "NVFP4": (),
    "IQ2_XXS": (0,),
    "IQ2_XS": (0,),
    "IQ2_S": (0,),
    "IQ3_XXS": (0,),
    "IQ3_S": (0,),
}
"""Bytes at which a block keeps its float16 scales; MXFP4 has an exponent in place of them, NVFP4 four fp8 scales."""
CASES = {known.name: known for known in TYPES.values() if known.block_elements > 1}
WITH_QUANTIZER = [name for name in CASES if not name.endswith("_K") and not name.startswith(("IQ", "NV"))]
"""Types that the `gguf` package can quantize to."""


def test_dequantize_cases_cover_each_type():
    assert CASES.keys() == SCALE_PLACES.keys()


@for_each("name", CASES)
def test_random_bytes(name):
    ggml_type = CASES[name]
    raw = np.random.default_rng(1).integers(0, 256, (64, 9 * ggml_type.block_bytes), dtype=np.uint8)
    assert_same_bits(raw, ggml_type)


@for_each("codes", ["zeros", "ones", "random"])
@for_each("name", CASES)
def test_dequantize_extreme_scales_match_gguf_package(name, codes):
    ggml_type = CASES[name]
    assert_same_bits(extreme_blocks(ggml_type, SCALE_PLACES[name], codes), ggml_type)


@for_each("name", WITH_QUANTIZER)
def test_dequantize_quantized_numbers_match_gguf_package(name):
    numbers = np.random.default_rng(3).standard_normal((40, 320), dtype=np.float32) * 0.02
    raw = gguf.quants.quantize(numbers, getattr(gguf.GGMLQuantizationType, name))
    assert_same_bits(raw, CASES[name])


@for_each("name", CASES)
def test_dequantize_each_flipped_bit_matches_gguf_package(name):
    """One block for each bit of a block, with that bit alone changed."""
    ggml_type = CASES[name]
    num_bits = 8 * ggml_type.block_bytes
    base = np.random.default_rng(3).integers(0, 256, ggml_type.block_bytes, dtype=np.uint8)
    for place in SCALE_PLACES[name]:
        base[place : place + 2] = np.array([0x2E66], dtype=np.uint16).view(np.uint8)
    bits = np.unpackbits(np.tile(base, (num_bits, 1)), axis=1)
    bits[np.arange(num_bits), np.arange(num_bits)] ^= 1
    assert_same_bits(np.packbits(bits, axis=1), ggml_type)


def test_dequantize_mxfp4_each_code_with_each_exponent():
    """MXFP4: 256 exponents, of which the smallest two are subnormal and the largest leave float32's range, by 16 codes."""
    codes = np.arange(16, dtype=np.uint8)
    raw = np.empty((256, 17), np.uint8)
    raw[:, 0] = np.arange(256)
    raw[:, 1:] = codes | codes[::-1] << 4
    assert_same_bits(raw, CASES["MXFP4"])


@for_each("name", ["Q2_K", "Q3_K", *(name for name in CASES if name.startswith(("IQ", "NV")))])
def test_dequantize_each_sub_scale_byte_matches_gguf_package(name):
    """Blocks whose bytes outside of the scales are all alike, for each value of a byte."""
    ggml_type = CASES[name]
    raw = np.repeat(np.arange(256, dtype=np.uint8), ggml_type.block_bytes).reshape(256, -1)
    for place in SCALE_PLACES[name]:
        raw[:, place : place + 2] = np.array([0x2E66], dtype=np.uint16).view(np.uint8)
    assert_same_bits(raw, ggml_type)


@pytest.mark.each_value
@pytest.mark.parametrize("num_extra_blocks", [-1, 0, 1])
@pytest.mark.parametrize(
    "name", ["Q4_1", "Q5_0", "Q8_0", *(name for name in CASES if name[-1] != "0" and name != "Q4_1")]
)
def test_dequantize_blocks_around_one_chunk_match_gguf_package(name, num_extra_blocks):
    ggml_type = CASES[name]
    num_blocks = CHUNK_ELEMENTS // ggml_type.block_elements + num_extra_blocks
    raw = np.random.default_rng(4).integers(0, 256, (num_blocks, ggml_type.block_bytes), dtype=np.uint8)
    assert_same_bits(raw, ggml_type)


def test_dequantize_wrong_size_is_an_assertion():
    with pytest.raises(AssertionError, match="2 blocks do not fill"):
        dequantize(torch.zeros(36, dtype=torch.uint8), CASES["Q4_0"], torch.empty(96))
