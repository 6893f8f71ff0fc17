import numpy as np
import pytest
import torch

from holdfast.loading.gguf_dequant import CHUNK_ELEMENTS, dequantize
from holdfast.loading.gguf_file import TYPES, GGMLType

gguf = pytest.importorskip("gguf")

SCALE_PLACES = {"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,)}
"""Bytes at which a block keeps its float16 scales."""
CASES = {known.name: known for known in TYPES.values() if known.name in SCALE_PLACES}
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


@pytest.mark.parametrize("name", CASES)
def test_random_bytes(name):
    ggml_type = CASES[name]
    raw = np.random.default_rng(1).integers(0, 256, (64, 9 * ggml_type.block_bytes), dtype=np.uint8)
    assert_same_bits(raw, ggml_type)


@pytest.mark.parametrize("codes", ["zeros", "ones", "random"])
@pytest.mark.parametrize("name", CASES)
def test_extreme_scales(name, codes):
    ggml_type = CASES[name]
    num_blocks = len(SPECIAL_SCALES) ** 2
    rng = np.random.default_rng(2)
    raw = {
        "zeros": np.zeros((num_blocks, ggml_type.block_bytes), np.uint8),
        "ones": np.full((num_blocks, ggml_type.block_bytes), 0xFF, np.uint8),
        "random": rng.integers(0, 256, (num_blocks, ggml_type.block_bytes), dtype=np.uint8),
    }[codes]
    pairs = np.stack(np.meshgrid(SPECIAL_SCALES, SPECIAL_SCALES), -1).reshape(num_blocks, 2)
    for column, place in enumerate(SCALE_PLACES[name]):
        raw[:, place : place + 2] = pairs[:, column : column + 1].view(np.uint8)
    assert_same_bits(raw, ggml_type)


@pytest.mark.parametrize("name", CASES)
def test_quantized_numbers(name):
    numbers = np.random.default_rng(3).standard_normal((40, 320), dtype=np.float32) * 0.02
    raw = gguf.quants.quantize(numbers, getattr(gguf.GGMLQuantizationType, name))
    assert_same_bits(raw, CASES[name])


@pytest.mark.parametrize("num_extra_blocks", [-1, 0, 1])
@pytest.mark.parametrize("name", ["Q4_1", "Q5_0", "Q8_0"])
def test_more_blocks_than_one_chunk(name, num_extra_blocks):
    ggml_type = CASES[name]
    num_blocks = CHUNK_ELEMENTS // ggml_type.block_elements + num_extra_blocks
    raw = np.random.default_rng(4).integers(0, 256, (num_blocks, ggml_type.block_bytes), dtype=np.uint8)
    assert_same_bits(raw, ggml_type)


def test_bytes_and_values_must_fit():
    with pytest.raises(AssertionError, match="2 blocks do not fill"):
        dequantize(torch.zeros(36, dtype=torch.uint8), CASES["Q4_0"], torch.empty(96))
