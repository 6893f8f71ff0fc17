"""LatentPlanes, IndexPlanes and LatentCall: views of latent (MLA), entry (DeepSeek-V4) and index (DSA) pages.

S slots, L latent, R rotated elements, X bytes or elements of a row, D elements of an index key

plain         rows_SX [S, L + R] in the type of the engine: latent, then rotated elements
fp8_ds_mla    rows_SX uint8 [S, L + 4 * ceil(L / 128) + 2 R]: L e4m3 numbers in tiles of 128, a float32 scale a tile, R bfloat16
fp8_ds_v4     rows_SX uint8 [S, L + 2 R]: L e4m3 numbers in tiles of 64, R bfloat16; scales_SC uint8 [S, 8]: an exponent a tile
turboquant    rows_SX uint8 [S, L / 2]: 4-bit codes of the rotated latent; scales_SC float16 [S, 1] or [S, 2]; rope_SR bfloat16, or
              e4m3 with the second scale
index         rows_SD [S, D], plain, or e4m3 with scales_S1

A token or entry of DeepSeek-V4 is one vector whose last R elements are rotated; latent_dim counts the elements before them.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from holdfast.quant.formats import KVFormat
from holdfast.quant.kv_quantize import rotate_heads
from holdfast.quant.latent_quantize import (
    QuantizedLatents,
    dequantize_latents,
    pack_exponent_rows,
    pack_fp8_rows,
    quantize_latents,
    unpack_exponent_rows,
    unpack_fp8_rows,
)

LatentKind = Literal["plain", "fp8_ds_mla", "fp8_ds_v4", "turboquant"]


class LatentPlanes(NamedTuple):
    """One layer's planes, [num_slots, ...] each: slot s is token s % page_tokens of page s // page_tokens."""

    kind: LatentKind
    latent_dim: int
    rope_dim: int
    page_tokens: int
    rows_SX: Tensor
    scales_SC: Tensor | None = None
    rope_SR: Tensor | None = None

    @classmethod
    def of(
        cls, planes: Mapping[str, Tensor], kv_format: KVFormat, latent_dim: int, rope_dim: int, page_tokens: int
    ) -> "LatentPlanes":
        """Take the storage's planes of a layer by name (`KVFormat.planes`)."""
        shape = latent_dim, rope_dim, page_tokens
        if not kv_format.is_quantized:
            return cls("plain", *shape, planes["latent"])
        if kv_format.has_exponents:
            return cls("fp8_ds_v4", *shape, planes["latent"], planes["latent_scale"])
        if kv_format.key_bits == 8:
            return cls("fp8_ds_mla", *shape, planes["latent"])
        return cls("turboquant", *shape, planes["latent_codes"], planes["latent_scale"], planes["rope"])

    @property
    def has_small_rope(self) -> bool:
        """True if rotated elements are e4m3 with their own scale."""
        return self.rope_SR is not None and self.rope_SR.dtype == torch.float8_e4m3fn


class IndexPlanes(NamedTuple):
    """One layer's index, with the slots of its latents."""

    page_tokens: int
    rows_SD: Tensor
    """Keys; float8_e4m3fn codes if there are `scales_S1`."""
    scales_S1: Tensor | None = None
    """float32, powers of two: 2 ** ceil(log2(max(amax, 1e-4) / 448)). A key is its codes times its scale."""

    @classmethod
    def of(cls, planes: Mapping[str, Tensor], page_tokens: int) -> "IndexPlanes":
        """Take the storage's planes of a layer by name (`index_planes` of quant/formats.py)."""
        return cls(page_tokens, planes["index"], planes.get("index_scale"))

    @property
    def is_quantized(self) -> bool:
        return self.scales_S1 is not None


class LatentCall(NamedTuple):
    """Operands of one attention launch over latents, besides its source of tokens."""

    q_TNX: Tensor
    planes: LatentPlanes
    page_table_NP: Tensor
    scale: float
    partial_out_CX: Tensor
    partial_lse_CH: Tensor
    out_TNL: Tensor
    num_sms: int

    @property
    def partials(self) -> tuple[Tensor, Tensor]:
        return self.partial_out_CX, self.partial_lse_CH


class SparseRows(NamedTuple):
    """Rows of a step that select tokens, on the device, at fixed addresses."""

    table_rows_T: Tensor
    """int32: the page table row of each row's sequence."""
    num_tokens_T: Tensor
    """int32 tokens that a row sees, its own included; 0: it selects none (short context, or padding)."""


def bits_of_rope(planes: LatentPlanes) -> Tensor | None:
    """View the plane of rotated elements as bits of bfloat16, if there is one."""
    return None if planes.rope_SR is None else planes.rope_SR.view(torch.int16)


def read_latents(planes: LatentPlanes, slots_L: Tensor, dtype: torch.dtype) -> Tensor:
    """Read slots as [L, latent_dim + rope_dim] in plain torch; TurboQuant latents stay in the rotated space."""
    rows_LX = planes.rows_SX[slots_L]
    if planes.kind == "plain":
        return rows_LX.to(dtype)
    if planes.kind == "fp8_ds_mla":
        return unpack_fp8_rows(rows_LX, planes.latent_dim, planes.rope_dim).to(dtype)
    if planes.kind == "fp8_ds_v4":
        assert planes.scales_SC is not None, "fp8_ds_v4 has a plane of exponents"
        exponents_LC = planes.scales_SC[slots_L]
        return unpack_exponent_rows(rows_LX, exponents_LC, planes.latent_dim, planes.rope_dim).to(dtype)
    assert planes.scales_SC is not None, "TurboQuant has a plane of scales"
    assert planes.rope_SR is not None, "TurboQuant has a plane of rotated elements"
    rope_LR = planes.rope_SR.view(torch.uint8)[slots_L].view(planes.rope_SR.dtype)
    return dequantize_latents(QuantizedLatents(rows_LX, planes.scales_SC[slots_L], rope_LR)).to(dtype)


def read_tokens(planes: LatentPlanes, pages_P: Tensor, token_S: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Like `read_latents`, for tokens or entries of a sequence with these pages."""
    slot_S = pages_P[token_S // planes.page_tokens].long() * planes.page_tokens + token_S % planes.page_tokens
    return read_latents(planes, slot_S, dtype)


def store_latents(planes: LatentPlanes, slots_L: Tensor, latent_LX: Tensor, rope_LR: Tensor) -> None:
    """Store normed latents and rotated elements in some slots, in plain torch."""
    if planes.kind == "plain":
        rows_LX = torch.cat((latent_LX.float(), rope_LR.float()), dim=-1)
        planes.rows_SX[slots_L] = rows_LX.to(planes.rows_SX.dtype)
    elif planes.kind == "fp8_ds_mla":
        planes.rows_SX[slots_L] = pack_fp8_rows(latent_LX, rope_LR)
    elif planes.kind == "fp8_ds_v4":
        assert planes.scales_SC is not None, "fp8_ds_v4 has a plane of exponents"
        planes.rows_SX[slots_L], planes.scales_SC[slots_L] = pack_exponent_rows(latent_LX, rope_LR)
    else:
        assert planes.scales_SC is not None, "TurboQuant has a plane of scales"
        assert planes.rope_SR is not None, "TurboQuant has a plane of rotated elements"
        latents = quantize_latents(rotate_heads(latent_LX), rope_LR, planes.rope_SR.dtype)
        planes.rows_SX[slots_L], planes.scales_SC[slots_L] = latents.codes_XB, latents.scales_XC
        planes.rope_SR.view(torch.uint8)[slots_L] = latents.rope_XR.view(torch.uint8)
