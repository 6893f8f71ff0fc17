"""IQ2, IQ3 and NVFP4 blocks: every index, sign, sub-scale and fp8 scale; sizes of blocks; types that are refused."""

import json
import struct
from importlib import resources

import gguf
import numpy as np
import pytest
import torch

from for_each import for_each
from holdfast.errors import UnsupportedModelError
from holdfast.loading.gguf.dequantize import dequantize
from holdfast.loading.gguf.file import OTHER_TYPES, TYPES, read_gguf
from loading.block_files import GRID_TYPES
from loading.quantized_blocks import assert_same_bits

BY_NAME = {known.name: known for known in TYPES.values()}
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def test_read_gguf_block_sizes_are_those_of_gguf_package():
    theirs = {int(kind): (kind.name, *sizes) for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    for number, known in TYPES.items():
        assert (known.name, known.block_elements, known.block_bytes) == theirs[number]
    named = theirs.keys() & OTHER_TYPES.keys()
    assert {number: OTHER_TYPES[number] for number in named} == {number: theirs[number][0] for number in named}
    assert theirs.keys() <= TYPES.keys() | OTHER_TYPES.keys()


def test_grids_file_holds_grids_of_gguf_package():
    held = json.loads(resources.files("holdfast").joinpath("data", "ggml_grids.json").read_text(encoding="utf-8"))
    assert "llama.cpp" in held["source"]
    assert held["licence"].startswith("MIT")
    assert held["grids"].keys() == set(GRID_TYPES)
    for name, grid in held["grids"].items():
        kind = getattr(gguf.quants, name)
        kind.init_grid()
        digits = [int(digit) for digit in "".join(grid["rows"])]
        rows = np.array(grid["values"], dtype=np.float32)[digits].reshape(-1, grid["width"])
        np.testing.assert_array_equal(rows, kind.grid.reshape(kind.grid_shape))


def blocks_with(scale: int, *fields: tuple[int, np.ndarray]) -> np.ndarray:
    """Blocks of a scale and of fields [N, bytes], which lie at these places."""
    num_bytes = max(place + field.shape[1] for place, field in fields)
    raw = np.zeros((len(fields[0][1]), num_bytes), np.uint8)
    raw[:, :2] = np.array([scale], "<u2").view(np.uint8)
    for place, field in fields:
        raw[:, place : place + field.shape[1]] = field
    return raw


def repeated(numbers: np.ndarray, dtype: str, count: int) -> np.ndarray:
    """Each number `count` times, as bytes of a block."""
    return np.tile(numbers.astype(dtype)[:, None], (1, count)).view(np.uint8)


def sign_words(numbers: np.ndarray) -> np.ndarray:
    """Four unlike fields of seven signs, and a sub-scale above them."""
    words = numbers % 16 << 28
    for field in range(4):
        words = words | (numbers + 37 * field) % 128 << 7 * field
    return words


def every_code(name: str) -> np.ndarray:
    """Blocks in which each index, field of signs and sub-scale of a type occurs."""
    numbers = np.arange(1024, dtype=np.int64)
    byte = {count: repeated(numbers % 256, "u1", count) for count in (4, 8, 32, 64)}
    words = sign_words(numbers)
    if name == "IQ2_XXS":
        pairs = np.stack((numbers % 256 * 0x01010101, words), axis=1)
        return blocks_with(0x2E66, (2, np.tile(pairs, (1, 8)).astype("<u4").view(np.uint8)))
    if name == "IQ3_XXS":
        return blocks_with(0x2E66, (2, byte[64]), (66, repeated(words, "<u4", 8)))
    if name == "IQ2_XS":
        halfwords = np.arange(65536, dtype="<u2").reshape(2048, 32)
        return blocks_with(0x2E66, (2, halfwords.view(np.uint8)), (66, repeated(np.arange(2048) % 256, "u1", 8)))
    signs = repeated(numbers * 7 % 256, "u1", 32)
    if name == "IQ2_S":
        high_bits = repeated((numbers >> 8) * 0x55, "u1", 8)
        return blocks_with(0x2E66, (2, byte[32]), (34, signs), (66, high_bits), (74, byte[8]))
    ninth_bits = repeated((numbers >> 8) % 2 * 0xFF, "u1", 8)
    return blocks_with(0x2E66, (2, byte[64]), (66, ninth_bits), (74, signs), (106, byte[4]))


@for_each("name", GRID_TYPES)
def test_dequantize_each_index_sign_and_sub_scale_matches_gguf_package(name):
    raw = every_code(name)
    assert_same_bits(raw, BY_NAME[name])
    values = dequantize(torch.from_numpy(raw), BY_NAME[name], torch.empty(len(raw), 256))
    scale = np.array([0x2E66], np.uint16).view(np.float16).astype(np.float32)[0]
    # The extremes are products of a smallest or largest magnitude and sub-scale.
    smallest, largest = {
        "IQ2": (8 * 0.125, 43 * 31 * 0.125),
        "IQ3_X": (4 * 0.25, 62 * 31 * 0.25),
        "IQ3_S": (1, 15 * 31),
    }[name[:5] if name.startswith("IQ3") else "IQ2"]
    assert float(values.abs().min()) == scale * np.float32(smallest)
    assert float(values.abs().max()) == scale * np.float32(largest)


@for_each("name", [*GRID_TYPES, "NVFP4"])
def test_dequantize_any_number_of_blocks_matches_gguf_package(name):
    known = BY_NAME[name]
    for num_rows, row_blocks in ((1, 1), (1, 2), (3, 1), (2, 5), (1, 1025)):
        shape = (num_rows, row_blocks * known.block_bytes)
        raw = np.random.default_rng(row_blocks).integers(0, 256, shape, dtype=np.uint8)
        assert_same_bits(raw, known)
    assert dequantize(torch.empty(0, dtype=torch.uint8), known, torch.empty(0, known.block_elements)).numel() == 0


def ue4m3(byte: int) -> float:
    """The unsigned type of llama.cpp: four bits of exponent (bias 7) over three of mantissa; the top bit is unused."""
    exponent, mantissa = byte >> 3 & 15, byte & 7
    if byte == 0x7F:
        return 0.0
    return mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def test_dequantize_nvfp4_each_scale_with_each_code_is_its_formula():
    """All 256 scale bytes by 16 codes, against a plain loop."""
    raw = np.zeros((256, 36), np.uint8)
    raw[:, :4] = (np.arange(256)[:, None] + [0, 1, 127, 128]) % 256
    raw[:, 4:] = np.random.default_rng(1).integers(0, 256, (256, 32))
    raw[:, 4:20] = np.arange(256).reshape(16, 16).repeat(16, axis=0)
    ours = dequantize(torch.from_numpy(raw), BY_NAME["NVFP4"], torch.empty(256, 64)).numpy()
    expected = np.empty((256, 64))
    for block in range(256):
        for element in range(64):
            part, place = divmod(element, 16)
            byte = raw[block, 4 + 8 * part + place % 8]
            code = int(byte >> 4 if place >= 8 else byte & 15)
            expected[block, element] = ue4m3(int(raw[block, part])) * E2M1[code & 7] * (-1 if code & 8 else 1)
    np.testing.assert_array_equal(ours, expected)
    assert_same_bits(raw, BY_NAME["NVFP4"])


@pytest.mark.parametrize(
    ("number", "name"),
    [(19, "IQ1_S"), (29, "IQ1_M"), (34, "TQ1_0"), (35, "TQ2_0"), (41, "Q1_0"), (42, "Q2_0"), (77, "type number 77")],
)
def test_read_gguf_refused_type_says_what_to_use_instead(tmp_path, number, name):
    path = tmp_path / "model.gguf"
    tensor = struct.pack("<Q3sIQIQ", 3, b"odd", 1, 256, number, 0)
    path.write_bytes((struct.pack("<4sIQQ", b"GGUF", 3, 1, 0) + tensor).ljust(1024, b"\0"))
    with pytest.raises(UnsupportedModelError) as caught:
        read_gguf(path)
    assert caught.value.code == "gguf.unsupported_type"
    message = str(caught.value)
    assert f"tensor 'odd' is stored as {name}." in message
    assert all(known in message for known in ("IQ2_XXS", "IQ3_S", "NVFP4", "such as Q4_K_M, IQ4_XS or Q8_0"))
