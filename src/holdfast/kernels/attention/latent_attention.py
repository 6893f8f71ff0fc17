"""Absorbed latent attention (MLA) over paged latents, tile by tile, with long contexts split and merged; plain pages.

T rows, N query heads, L latent, R rotated elements, S slots, C split-KV partials

Multi-query attention whose one key is [L | R] wide and whose value is the first L elements of the same row, read once. Tiles,
partials and their letters are those of tiled_attention.py: the heads of a block stand side by side with the rows, and where
there are several blocks of heads each is an item of its own, as key heads are there.
"""

import torch

from holdfast.kernels.attention.latent_planes import LatentPlanes
from holdfast.kernels.attention.tiled_attention import TileWork


def latent_attention(
    q_TNX: torch.Tensor,
    planes: LatentPlanes,
    page_table_NP: torch.Tensor,
    work: TileWork,
    scale: float,
    partial_out_CX: torch.Tensor,
    partial_lse_CH: torch.Tensor,
    out_TNL: torch.Tensor,
    num_sms: int,
) -> torch.Tensor:
    """Each row sees its sequence's tokens up to its own position: [T, N, L]; padded rows become zeros."""
    return latent_attention_reference(
        q_TNX, planes, page_table_NP, work, scale, partial_out_CX, partial_lse_CH, out_TNL, num_sms
    )


def latent_attention_reference(
    q_TNX: torch.Tensor,
    planes: LatentPlanes,
    page_table_NP: torch.Tensor,
    work: TileWork,
    scale: float,
    partial_out_CX: torch.Tensor,
    partial_lse_CH: torch.Tensor,
    out_TNL: torch.Tensor,
    num_sms: int,
) -> torch.Tensor:
    """The same in plain torch."""
    raise NotImplementedError("a contract, until its kernel stands")
