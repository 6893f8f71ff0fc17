"""PlainPages: one layer's plain keys and values: how they are written, attended to tile by tile, and read in plain torch."""

import torch

from holdfast.attention.batch import Batch
from holdfast.attention.paged_rows import PagedRows
from holdfast.kernels.pages.tile_geometry import TileGeometry
from holdfast.kernels.pages.tiled_attention import (
    FEW_ROWS,
    LARGE_PROGRAMS_PER_SM,
    TileWork,
    small_programs,
    tile_rows,
    tiled_attention,
)
from holdfast.kernels.pages.write_heads import HeadNorm, Rotary, write_heads

BLOCK_TOKENS = 64
"""Splits are multiples of what a kernel takes at once."""


class PlainPages:
    """A plane of keys and one of values, [slots, K, D]."""

    def __init__(self, k_plane_SKD: torch.Tensor, v_plane_SKD: torch.Tensor, page_tokens: int) -> None:
        self.planes = (k_plane_SKD, v_plane_SKD)
        self._page_tokens = page_tokens

    def write(
        self,
        qkv_TX: torch.Tensor,
        batch: Batch,
        head_norm: HeadNorm | None,
        rotary: Rotary | None,
        out_THD: torch.Tensor,
    ) -> None:
        """Keys and values to their slots, queries to `out_THD`, all in one pass."""
        write_heads(qkv_TX, batch.positions_T, batch.slots_T, *self.planes, head_norm, rotary, out_THD)

    def tile_geometry(self, num_heads: int) -> TileGeometry:
        """How the kernel of `attend_tiles` wants its tiles."""
        num_kv_heads = self.planes[0].shape[1]
        return TileGeometry(
            small_rows=tile_rows(num_heads, num_kv_heads, large=False),
            large_rows=tile_rows(num_heads, num_kv_heads, large=True),
            small_programs_per_sm=small_programs(FEW_ROWS + 1)[0],
            large_programs_per_sm=LARGE_PROGRAMS_PER_SM,
            block_tokens=BLOCK_TOKENS,
            few_rows=FEW_ROWS,
            few_programs_per_sm=small_programs(FEW_ROWS)[0],
        )

    def attend_tiles(
        self,
        q_THD: torch.Tensor,
        page_table_NP: torch.Tensor,
        work: TileWork,
        scale: float,
        window: int | None,
        partials: tuple[torch.Tensor, torch.Tensor],
        out_TX: torch.Tensor,
        num_sms: int,
    ) -> None:
        """All rows of a step, on a GPU."""
        tiled_attention(
            q_THD, *self.planes, page_table_NP, work, self._page_tokens, scale, window, *partials, out_TX, num_sms
        )

    def queries(self, q_THD: torch.Tensor) -> torch.Tensor:
        """Queries in the form that what is `read` takes."""
        return q_THD

    def read(self, rows: PagedRows, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of these rows, each [K, L, D]: views of the planes where that is possible."""
        k_plane_SKD, v_plane_SKD = self.planes
        return rows.read(k_plane_SKD, self._page_tokens, dtype), rows.read(v_plane_SKD, self._page_tokens, dtype)

    def finish(self, out_TX: torch.Tensor) -> None:
        """Bring sums of what was `read`, weighted by attention, into the form of outputs: they are."""
