"""Rows of fp8_ds_mla and of fp8_ds_v4 byte for byte, and TurboQuant's codes, scales and rotated elements of latents."""

import math
import struct

import pytest
import torch

from holdfast.quant.formats import COMPRESSED_FORMATS, MLA_FORMATS
from holdfast.quant.kv_quantize import rotate_heads
from holdfast.quant.latent_quantize import (
    LATENT_CODEBOOK,
    LATENT_STEP,
    QuantizedLatents,
    dequantize_latents,
    pack_exponent_rows,
    pack_fp8_rows,
    quantize_latents,
    unpack_exponent_rows,
    unpack_fp8_rows,
)

SHAPES = pytest.mark.parametrize(("latent_dim", "rope_dim"), [(512, 64), (256, 32), (192, 16), (48, 16)])


def latents(latent_dim: int, rope_dim: int, rows: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(latent_dim)
    spread_L = torch.linspace(-1, 1, latent_dim).exp()
    latent_XL = torch.randn(rows, latent_dim, generator=generator) * spread_L
    return latent_XL, torch.randn(rows, rope_dim, generator=generator) * 3


def fp8_value(code: int) -> float:
    """An e4m3 number from its fields."""
    exponent, mantissa = code >> 3 & 15, code & 7
    size = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    return -size if code & 0x80 else size


FP8_SIZES = [fp8_value(code) for code in range(127)]


def fp8_code(number: float) -> int:
    """The nearest e4m3 number by looking at all; of two the even one."""
    size = abs(number)
    code = min(range(127), key=lambda code: (abs(FP8_SIZES[code] - size), code & 1))
    return code | (0x80 if number < 0 else 0)


def plain_row(latent: list[float], rope_R: torch.Tensor) -> bytes:
    """The row as the layout is described: numbers, scales, rotated elements."""
    codes, scales = b"", b""
    for first in range(0, len(latent), 128):
        tile = latent[first : first + 128]
        largest = torch.tensor(max(abs(number) for number in tile))
        scale = max(float(largest / torch.tensor(448.0)), 2.0**-126)
        codes += bytes(fp8_code(float(torch.tensor(number) / torch.tensor(scale))) for number in tile)
        scales += struct.pack("<f", scale)
    rope = b"".join(struct.pack("<f", float(number.bfloat16()))[2:] for number in rope_R)
    return codes + scales + rope


@SHAPES
def test_fp8_mla_rows_follow_the_layout_to_the_byte(latent_dim: int, rope_dim: int) -> None:
    latent_XL, rope_XR = latents(latent_dim, rope_dim, rows=3)
    latent_XL[1] *= 1e-3
    latent_XL[2, :64] = 0
    rows_XB = pack_fp8_rows(latent_XL, rope_XR)
    assert rows_XB.shape[1] == MLA_FORMATS["fp8_ds_mla"].bytes_per_token(1, latent_dim + rope_dim, rope_dim)
    for row_B, latent_L, rope_R in zip(rows_XB, latent_XL, rope_XR, strict=True):
        assert bytes(row_B.tolist()) == plain_row(latent_L.tolist(), rope_R)


def test_fp8_mla_row_has_656_bytes_with_scales_then_rope() -> None:
    latent_XL, rope_XR = torch.zeros(1, 512), torch.zeros(1, 64)
    latent_XL[0, 130], rope_XR[0, 0] = -7.0, 1.0
    row = bytes(pack_fp8_rows(latent_XL, rope_XR)[0].tolist())
    assert len(row) == 656
    assert row[130] == 0xFE
    assert struct.unpack("<4f", row[512:528]) == (2.0**-126, 0.015625, 2.0**-126, 2.0**-126)
    assert row[528:530] == b"\x80\x3f"
    assert sum(row[:512]) == 0xFE
    assert not any(row[530:])


@SHAPES
def test_fp8_mla_rows_are_read_back(latent_dim: int, rope_dim: int) -> None:
    latent_XL, rope_XR = latents(latent_dim, rope_dim)
    read_XY = unpack_fp8_rows(pack_fp8_rows(latent_XL, rope_XR), latent_dim, rope_dim)
    torch.testing.assert_close(read_XY[:, latent_dim:], rope_XR.bfloat16().float(), rtol=0, atol=0)
    largest_X1 = latent_XL.abs().amax(-1, keepdim=True)
    error_XL = (read_XY[:, :latent_dim] - latent_XL).abs()
    assert bool((error_XL <= torch.maximum(latent_XL.abs() / 16, largest_X1 * 2**-18)).all())


def exponent_rows(latent_L: torch.Tensor, rope_R: torch.Tensor) -> tuple[bytes, bytes]:
    """The two rows of fp8_ds_v4 as the layout is described."""
    codes, exponents = b"", b""
    numbers = latent_L.bfloat16().tolist()
    for first in range(0, len(numbers), 64):
        tile = numbers[first : first + 64]
        exponent = math.ceil(math.log2(max(max(abs(number) for number in tile), 1e-4) / 448))
        codes += bytes(fp8_code(number * 2.0**-exponent) for number in tile)
        exponents += bytes([exponent + 127])
    rope = b"".join(struct.pack("<f", float(number.bfloat16()))[2:] for number in rope_R)
    return codes + rope, exponents + bytes(-len(exponents) % 8)


@pytest.mark.parametrize(("latent_dim", "rope_dim"), [(448, 64), (64, 8), (576, 32)])
def test_fp8_v4_rows_follow_the_layout_to_the_byte(latent_dim: int, rope_dim: int) -> None:
    latent_XL, rope_XR = latents(latent_dim, rope_dim, rows=4)
    latent_XL[1] *= 1e-3
    latent_XL[2, :64] = 0
    latent_XL[3] *= 1e20
    rows_XB, exponents_XC = pack_exponent_rows(latent_XL, rope_XR)
    num_bytes = COMPRESSED_FORMATS["fp8_ds_v4"].bytes_per_token(1, latent_dim + rope_dim, rope_dim)
    assert rows_XB.shape[1] + exponents_XC.shape[1] == num_bytes
    for i in range(4):
        row, exponents = exponent_rows(latent_XL[i], rope_XR[i])
        assert bytes(exponents_XC[i].tolist()) == exponents
        assert bytes(rows_XB[i].tolist()) == row
    read_XY = unpack_exponent_rows(rows_XB, exponents_XC, latent_dim, rope_dim)
    torch.testing.assert_close(read_XY[:, latent_dim:], rope_XR.bfloat16().float(), rtol=0, atol=0)
    tiles_XCE, read_XCE = (x[:, :latent_dim].unflatten(1, (-1, 64)) for x in (latent_XL, read_XY))
    largest_XC1 = tiles_XCE.abs().amax(-1, keepdim=True)
    error_XCE = (read_XCE - tiles_XCE).abs()
    assert bool((error_XCE <= torch.maximum(tiles_XCE.abs() / 15, largest_XC1 * 2**-17)).all())


def test_fp8_v4_row_has_584_bytes_and_scales_have_edges() -> None:
    """A power of two takes 448 exactly; one step above it takes the next. Beneath 1e-4 there is no smaller one."""
    latent_XL, rope_XR = torch.zeros(1, 448), torch.zeros(1, 64)
    latent_XL[0, 3], latent_XL[0, 64], latent_XL[0, 128], rope_XR[0, 0] = 448.0, -450.0, 1e-9, 1.0
    latent_XL[0, 192], latent_XL[0, 256] = torch.inf, torch.nan
    rows_XB, exponents_XC = pack_exponent_rows(latent_XL, rope_XR)
    assert (rows_XB.shape[1], exponents_XC.shape[1]) == (576, 8)
    assert exponents_XC[0].tolist() == [127, 128, 105, 255, 255, 105, 105, 0]
    assert rows_XB[0, [3, 64]].tolist() == [0x7E, 0x80 | 0x76]
    assert rows_XB[0, 448:450].tolist() == [0x80, 0x3F]
    read_XCE = unpack_exponent_rows(rows_XB, exponents_XC, 448, 64)[:, :448].unflatten(1, (-1, 64))
    assert read_XCE.isnan().all(-1).tolist() == [[False, False, False, True, True, False, False]]


def test_latent_codebook_is_the_cubic_in_half_precision() -> None:
    t = ((torch.arange(16) - 7.5) * LATENT_STEP).half()
    u = (t.float() * t.float() + 1).half()
    assert tuple((u * t).tolist()) == LATENT_CODEBOOK.values


@SHAPES
@pytest.mark.parametrize("rope_dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=["bf16_rope", "fp8_rope"])
def test_turboquant_latents_are_read_back_within_error(latent_dim: int, rope_dim: int, rope_dtype: torch.dtype) -> None:
    latent_XL, rope_XR = latents(latent_dim, rope_dim)
    rotated_XL = rotate_heads(latent_XL)
    quantized = quantize_latents(rotated_XL, rope_XR, rope_dtype)
    assert quantized.codes_XB.shape == (5, latent_dim // 2)
    assert quantized.scales_XC.shape == (5, 2 if rope_dtype == torch.float8_e4m3fn else 1)
    read_XY = dequantize_latents(quantized)
    error_X = (read_XY[:, :latent_dim] - rotated_XL).norm(dim=-1) / rotated_XL.norm(dim=-1)
    assert float(error_X.max()) < 0.2
    rope_error_X = (read_XY[:, latent_dim:] - rope_XR).norm(dim=-1) / rope_XR.norm(dim=-1)
    assert float(rope_error_X.max()) < (0.04 if rope_dtype == torch.float8_e4m3fn else 0.004)


def test_dequantize_latents_reads_codes_of_a_word_in_order() -> None:
    words = [0x3210, 0x7654, -0x4568, -0x0124]
    codes_1B = torch.tensor([words], dtype=torch.int16).view(torch.uint8)
    one_11, rope_1R = torch.ones(1, 1, dtype=torch.float16), torch.zeros(1, 4, dtype=torch.bfloat16)
    read_L = dequantize_latents(QuantizedLatents(codes_1B, one_11, rope_1R))[0, :16].tolist()
    for column, word in enumerate(words):
        for part in range(4):
            assert read_L[4 * part + column] == LATENT_CODEBOOK.values[word >> 4 * part & 15]


def test_quantize_latents_keeps_the_length_of_a_latent() -> None:
    latent_XL, rope_XR = latents(512, 64)
    read_XL = dequantize_latents(quantize_latents(rotate_heads(latent_XL), rope_XR, torch.bfloat16))[:, :512]
    torch.testing.assert_close(read_XL.norm(dim=-1), latent_XL.norm(dim=-1), rtol=1e-3, atol=0)


def test_quantize_latents_zeros_stay_zeros_and_nan_spreads() -> None:
    latent_XL = torch.zeros(2, 64)
    latent_XL[1, 3] = float("nan")
    quantized = quantize_latents(latent_XL, torch.zeros(2, 16), torch.float8_e4m3fn)
    read_XY = dequantize_latents(quantized)
    assert not read_XY[0].any()
    assert bool(read_XY[1, :64].isnan().all())
    rows_XB = pack_fp8_rows(latent_XL, torch.zeros(2, 16))
    assert not unpack_fp8_rows(rows_XB, 64, 16)[0].any()
    assert bool(unpack_fp8_rows(rows_XB, 64, 16)[1, :64].isnan().all())
