"""Planes of latents in every format, amid red zones and full of poison; steps that write them."""

from dataclasses import dataclass

import torch

from holdfast.kernels.attention.tile_work import TileWork
from holdfast.kernels.attention.write_kv import Rotary
from holdfast.kernels.latent.latent_attention import sparse_attention_reference
from holdfast.kernels.latent.latent_planes import LatentCall, LatentPlanes, SparseRows, read_latents
from holdfast.kernels.latent.write_latent import LatentNorm
from holdfast.quant.formats import ALL_KV_FORMATS
from red_zones import RedZones

QUANTIZED_LATENTS = ("fp8_ds_mla", "turboquant_mla_4bit", "turboquant_mla_4bit_r8")
POISON_BYTE = 0xFF
"""NaN in every type that a plane has."""
MAX_POSITION = 64


def make_latent_planes(
    name: str, latent_dim: int, rope_dim: int, page_tokens: int, num_pages: int, zones: RedZones
) -> LatentPlanes:
    """Between red zones, every byte poison."""
    kv_format, num_slots = ALL_KV_FORMATS[name], num_pages * page_tokens
    planes = {}
    for plane in kv_format.planes(1, latent_dim + rope_dim, rope_dim):
        planes[plane.name] = zones.allocate(num_slots, *plane.token_shape, dtype=getattr(torch, plane.dtype))
        planes[plane.name].view(torch.uint8).fill_(POISON_BYTE)
    return LatentPlanes.of(planes, kv_format, latent_dim, rope_dim, page_tokens)


def tensors_of(planes: LatentPlanes) -> tuple[torch.Tensor, ...]:
    """The planes that there are, as bytes [S, B]."""
    tensors = (planes.rows_SX, planes.scales_SC, planes.rope_SR)
    return tuple(tensor.view(torch.uint8) for tensor in tensors if tensor is not None)


def on_device(planes: LatentPlanes, device: torch.device | str) -> LatentPlanes:
    """A copy."""
    return planes._replace(
        rows_SX=planes.rows_SX.to(device),
        scales_SC=None if planes.scales_SC is None else planes.scales_SC.to(device),
        rope_SR=None if planes.rope_SR is None else planes.rope_SR.to(device),
    )


def assert_same_latents(mine: LatentPlanes, theirs: LatentPlanes, slots_X: torch.Tensor) -> None:
    """What some slots hold, on the CPU. A sum has no order, so that a number half way between two codes may have either."""
    my_XD, their_XD = (read_latents(planes, slots_X, torch.float32) for planes in (mine, theirs))
    if mine.kind == "plain":
        step = 4 * max(torch.finfo(mine.rows_SX.dtype).eps, 1e-6)
        torch.testing.assert_close(my_XD, their_XD, rtol=step, atol=step)
        return
    assert mine.scales_SC is not None
    assert theirs.scales_SC is not None
    my_scales, their_scales = mine.scales_SC[slots_X].float(), theirs.scales_SC[slots_X].float()
    if mine.kind == "fp8_ds_v4":
        assert torch.equal(my_scales, their_scales)
        torch.testing.assert_close(my_XD, their_XD, rtol=2**-3, atol=1e-6)
    else:
        torch.testing.assert_close(my_scales, their_scales, rtol=2**-9, atol=0)
        step = 0.22 * their_scales  # no two neighbours of the codebook are further apart
        latent_dim = mine.latent_dim
        assert bool(((my_XD - their_XD)[:, :latent_dim].abs() <= step).all()), "a code more than one away"
        torch.testing.assert_close(my_XD[:, latent_dim:], their_XD[:, latent_dim:], rtol=2**-7, atol=1e-5)
    my_rows, their_rows = mine.rows_SX[slots_X], theirs.rows_SX[slots_X]
    assert int((my_rows != their_rows).sum()) <= 1 + 0.02 * my_rows.numel()


def rotary_rows(positions_T: torch.Tensor, rope_dim: int, dtype: torch.dtype = torch.float32) -> Rotary:
    """Rows at these positions, frequency i in column i."""
    frequency_P = 100.0 ** -(torch.arange(rope_dim // 2) / (rope_dim // 2))
    angle_TP = positions_T.unsqueeze(1) * frequency_P
    return Rotary(angle_TP.cos().to(dtype), angle_TP.sin().to(dtype))


@dataclass
class LatentCase:
    """A step of rows: inputs of `write_latent` on the CPU."""

    latent: torch.Tensor
    q: torch.Tensor
    slots: torch.Tensor
    norm: LatentNorm
    rotary: Rotary


def make_latent_case(
    num_rows: int, num_heads: int, latent_dim: int, rope_dim: int, dtype: torch.dtype, num_slots: int, seed: int = 0
) -> LatentCase:
    """Rows of different size; row 1 is padding, whose position is none."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    size_T1 = torch.linspace(-2, 2, num_rows).exp().unsqueeze(1)
    slots_T = torch.randperm(num_slots, generator=generator)[:num_rows]
    positions_T = torch.randint(MAX_POSITION, (num_rows,), generator=generator)
    if num_rows > 1:
        slots_T[1], positions_T[1] = -1, 10**9
    return LatentCase(
        (normal(num_rows, latent_dim + rope_dim) * size_T1).to(dtype),
        normal(num_rows, num_heads, 16 + rope_dim).to(dtype),
        slots_T,
        LatentNorm((0.5 + normal(latent_dim).abs()).to(dtype), 1e-6),
        rotary_rows(positions_T, rope_dim, dtype),
    )


def unsplit_attention(call: LatentCall, work: TileWork) -> torch.Tensor:
    """Attend the rows of all tiles by lists of all tokens up to their own: no tiles and no splits."""
    num_small, num_large = work.tiles_X8[0, :2].tolist()
    num_tiles = num_small * work.has_small + num_large * work.has_large
    num_rows, num_tokens = len(call.q_TNX), call.page_table_NP.shape[1] * call.planes.page_tokens
    table_rows_T = torch.zeros(num_rows, dtype=torch.int32)
    num_tokens_T = torch.zeros(num_rows, dtype=torch.int32)
    for table_row, row, count, position, *_ in work.tiles_X8[1 : 1 + num_tiles].tolist():
        table_rows_T[row : row + count] = table_row
        num_tokens_T[row : row + count] = torch.arange(position + 1, position + count + 1)
    tokens_TK = torch.arange(num_tokens, device=call.q_TNX.device).expand(num_rows, -1)
    sparse_attention_reference(call, SparseRows(table_rows_T, num_tokens_T), tokens_TK)
    if work.has_merge:
        call.out_TNL[work.rows_T2[:num_rows, 1] == 0] = 0
    return call.out_TNL
