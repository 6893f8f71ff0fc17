"""Latents quantized (MLA, DeepSeek-V4): rows of fp8_ds_mla and fp8_ds_v4, TurboQuant's codes and scales in plain torch, and the order of their bytes.

X any leading dimensions, L latent dim, R rotated elements, B bytes of a row or of its codes, C scales of a row

fp8_ds_mla    one row of bytes: L e4m3 numbers in order; a little-endian float32 scale for every tile of 128 of them, the last of
              which may be shorter; R bfloat16 numbers. A scale takes the largest of its tile to 448, and is at least the smallest
              normal float32. That is how vLLM and FlashMLA lay rows out.
fp8_ds_v4     two rows: L e4m3 numbers in order and R bfloat16 numbers; and an exponent for every tile of 64 of the L, filled up to a
              multiple of 8 bytes. Elements are rounded to bfloat16 first. A scale is the least power of two that takes the largest
              of its tile, which is at least 1e-4, to at most 448; its byte is the exponent + 127, and 255 what is not finite.
TurboQuant    the latent in the rotated space (`rotate_heads` in kv_quantize.py) as codes of 4 bits: little-endian 16-bit word c
              has in bits 4 j to 4 j + 3 the rising code of coordinate j L / 4 + c, j < 4. A float16 scale. The rotated elements
              are bfloat16, or e4m3 numbers with a second scale, which takes their largest to 448.

One latent is key and value at once, so there is one codebook for both: t + t^3 for t = (code - 7.5) * 3 / 32 as half precision
rounds it. Kernels make two numbers of it in four instructions, whichever of two operands they are: 16-bit words of two
coordinates of a token, or of two tokens, are taken apart alike. The mean squared error of N(0, 1) is 0.009688, 2 % above the best.
"""

from typing import NamedTuple

import torch

from holdfast.quant.formats import EXPONENT_TILE, LATENT_TILE, num_exponents
from holdfast.quant.kv_quantize import FP8_MAX, FP16_MAX, Codebook, looked_up, nearest_codes

LATENT_STEP = 3 / 32
"""Step of t from code to code."""
LATENT_PARTS = 4
"""Codes per word."""
LEAST_TILE = 1e-4
"""Smallest amax that sets the scale of a tile of fp8_ds_v4."""
EXPONENT_BIAS = 127
LEAST_FP8_SCALE = torch.finfo(torch.float32).tiny
LATENT_CODEBOOK = Codebook(
    4,
    (
        0.046966552734375,
        0.143310546875,
        0.2471923828125,
        0.36328125,
        0.496826171875,
        0.65234375,
        0.83544921875,
        1.05078125,
    ),
    0.39065,
)
"""Values of the cubic in half-precision arithmetic, to the bit."""


class QuantizedLatents(NamedTuple):
    """Some latents in TurboQuant's planes."""

    codes_XB: torch.Tensor
    """uint8."""
    scales_XC: torch.Tensor
    """float16: one for the latent, and one for the rotated elements if they are e4m3."""
    rope_XR: torch.Tensor
    """bfloat16 or float8_e4m3fn."""


def num_fp8_tiles(latent_dim: int) -> int:
    """Count the scales of a row of fp8_ds_mla."""
    return -(-latent_dim // LATENT_TILE)


def pack_fp8_rows(latent_XL: torch.Tensor, rope_XR: torch.Tensor) -> torch.Tensor:
    """Pack rows of fp8_ds_mla, uint8 [X, B]."""
    tiles = latent_XL.float().split(LATENT_TILE, dim=-1)
    scales = [(tile_XE.abs().amax(-1, keepdim=True) / FP8_MAX).clamp(min=LEAST_FP8_SCALE) for tile_XE in tiles]
    codes = [_e4m3(tile_XE / scale_X1) for tile_XE, scale_X1 in zip(tiles, scales, strict=True)]
    pieces = [*codes, torch.cat(scales, dim=-1), rope_XR.bfloat16()]
    return torch.cat([piece.contiguous().view(torch.uint8) for piece in pieces], dim=-1)


def unpack_fp8_rows(rows_XB: torch.Tensor, latent_dim: int, rope_dim: int) -> torch.Tensor:
    """Unpack rows of fp8_ds_mla to float32 [X, L + R]."""
    num_tiles = num_fp8_tiles(latent_dim)
    codes_XL, scales_XB, rope_XB = rows_XB.split((latent_dim, 4 * num_tiles, 2 * rope_dim), dim=-1)
    scales_XC = scales_XB.contiguous().view(torch.float32)
    scales_XL = scales_XC.repeat_interleave(LATENT_TILE, dim=-1)[..., :latent_dim]
    latent_XL = codes_XL.contiguous().view(torch.float8_e4m3fn).float() * scales_XL
    return torch.cat((latent_XL, rope_XB.contiguous().view(torch.bfloat16).float()), dim=-1)


def pack_exponent_rows(latent_XL: torch.Tensor, rope_XR: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Pack rows of fp8_ds_v4: uint8 [X, L + 2 R], and exponents, uint8 [X, num_exponents(L)], padded with zeros."""
    latent_dim = latent_XL.shape[-1]
    assert latent_dim % EXPONENT_TILE == 0, f"{latent_dim} elements are no tiles of {EXPONENT_TILE}"
    tiles_XCE = latent_XL.bfloat16().float().unflatten(-1, (-1, EXPONENT_TILE))
    amax_XC = tiles_XCE.abs().amax(-1).clamp(min=LEAST_TILE)
    mantissa_XC, exponent_XC = torch.frexp(amax_XC / FP8_MAX)
    exponent_XC = torch.where(mantissa_XC == 0.5, exponent_XC - 1, exponent_XC)  # type: ignore[operator]
    bytes_XC = torch.where(amax_XC.isfinite(), exponent_XC + EXPONENT_BIAS, 255)
    codes_XL = _e4m3((tiles_XCE / _scales_of(bytes_XC).unsqueeze(-1)).flatten(-2))
    rows_XB = torch.cat([piece.contiguous().view(torch.uint8) for piece in (codes_XL, rope_XR.bfloat16())], dim=-1)
    exponents_XC = rows_XB.new_zeros((*rows_XB.shape[:-1], num_exponents(latent_dim)))
    exponents_XC[..., : bytes_XC.shape[-1]] = bytes_XC.to(torch.uint8)
    return rows_XB, exponents_XC


def unpack_exponent_rows(
    rows_XB: torch.Tensor, exponents_XC: torch.Tensor, latent_dim: int, rope_dim: int
) -> torch.Tensor:
    """Unpack rows of fp8_ds_v4 and their exponents to float32 [X, L + R]."""
    codes_XL, rope_XB = rows_XB.split((latent_dim, 2 * rope_dim), dim=-1)
    scales_XC = _scales_of(exponents_XC[..., : latent_dim // EXPONENT_TILE].int())
    tiles_XCE = codes_XL.contiguous().view(torch.float8_e4m3fn).float().unflatten(-1, (-1, EXPONENT_TILE))
    latent_XL = (tiles_XCE * scales_XC.unsqueeze(-1)).flatten(-2)
    return torch.cat((latent_XL, rope_XB.contiguous().view(torch.bfloat16).float()), dim=-1)


def _scales_of(bytes_XC: torch.Tensor) -> torch.Tensor:
    """Return float32 powers of two; NaN for 255."""
    powers_XC = torch.ldexp(torch.ones_like(bytes_XC, dtype=torch.float32), bytes_XC - EXPONENT_BIAS)
    return torch.where(bytes_XC == 255, torch.nan, powers_XC)


def quantize_latents(rotated_XL: torch.Tensor, rope_XR: torch.Tensor, rope_dtype: torch.dtype) -> QuantizedLatents:
    """Quantize rotated latents for TurboQuant's planes. A quantized latent has the length of the true one.

    The nearest one would be 1 % shorter for every token: a bias that a long context does not average out.
    """
    rising_XL, values_XL = nearest_codes(rotated_XL, LATENT_CODEBOOK)
    norm_X1 = rotated_XL.float().norm(dim=-1, keepdim=True)
    scale_X1 = (norm_X1 / values_XL.norm(dim=-1, keepdim=True)).clamp(max=FP16_MAX).half()
    part_P1 = 4 * torch.arange(LATENT_PARTS, dtype=torch.int32, device=rising_XL.device).unsqueeze(1)
    words_XW = (rising_XL.unflatten(-1, (LATENT_PARTS, -1)) << part_P1).sum(-2, dtype=torch.int32)
    codes_XB = words_XW.to(torch.int16).view(torch.uint8)
    if rope_dtype != torch.float8_e4m3fn:
        return QuantizedLatents(codes_XB, scale_X1, rope_XR.to(rope_dtype))
    rope_scale_X1 = (rope_XR.float().abs().amax(-1, keepdim=True) / FP8_MAX).clamp(max=FP16_MAX).half()
    factor_X1 = torch.where(rope_scale_X1 == 0, 0.0, 1.0 / rope_scale_X1.float())
    rope_codes_XR = _e4m3(rope_XR.float() * factor_X1)
    return QuantizedLatents(codes_XB, torch.cat((scale_X1, rope_scale_X1), dim=-1), rope_codes_XR)


def dequantize_latents(latents: QuantizedLatents) -> torch.Tensor:
    """Return float32 [X, L + R]; the latent stays in the rotated space."""
    words_XW = latents.codes_XB.contiguous().view(torch.int16).int()
    rising_XL = torch.cat([words_XW >> 4 * part & 15 for part in range(LATENT_PARTS)], dim=-1)
    scales_XC = latents.scales_XC.float()
    latent_XL = looked_up(rising_XL, LATENT_CODEBOOK.values) * scales_XC[..., :1]
    rope_XR = latents.rope_XR.float()
    if latents.rope_XR.dtype == torch.float8_e4m3fn:
        rope_XR = rope_XR * scales_XC[..., 1:]
    return torch.cat((latent_XL, rope_XR), dim=-1)


def _e4m3(x_XD: torch.Tensor) -> torch.Tensor:
    return x_XD.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
