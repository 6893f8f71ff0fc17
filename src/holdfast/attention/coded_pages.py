"""CodedPages: one layer's compressed keys and values: how they are written, attended to tile by tile, and read in plain torch."""

import torch

from holdfast.attention.batch import Batch
from holdfast.attention.code_reader import CodeReader
from holdfast.attention.paged_rows import PagedRows
from holdfast.kernels.pages.coded_attention import coded_attention, coded_geometry
from holdfast.kernels.pages.coded_planes import CodedPlanes
from holdfast.kernels.pages.tile_geometry import TileGeometry
from holdfast.kernels.pages.tiled_attention import TileWork
from holdfast.kernels.pages.write_codes import write_codes
from holdfast.kernels.pages.write_heads import HeadNorm, Rotary
from holdfast.quant.head_codes import CodedHeads
from holdfast.quant.rotation import hadamard_block


class CodedPages:
    """The planes of one layer; all tokens are attended to as they are stored, also those of the step itself."""

    def __init__(self, planes: CodedPlanes, reader: CodeReader | None = None) -> None:
        self.planes = planes
        self._reader = reader

    def write(
        self,
        qkv_TX: torch.Tensor,
        batch: Batch,
        head_norm: HeadNorm | None,
        rotary: Rotary | None,
        out_THD: torch.Tensor,
    ) -> None:
        """Coded keys and values to their slots, queries to `out_THD`, rotated as the keys are."""
        write_codes(qkv_TX, batch.positions_T, batch.slots_T, self.planes, head_norm, rotary, out_THD)

    def tile_geometry(self, num_heads: int) -> TileGeometry:
        """How the kernel of `attend_tiles` wants its tiles."""
        planes = self.planes
        return coded_geometry(num_heads, planes.num_kv_heads, planes.key_bits, planes.value_bits)

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
        coded_attention(q_THD, self.planes, page_table_NP, work, scale, window, *partials, out_TX, num_sms)

    def queries(self, q_THD: torch.Tensor) -> torch.Tensor:
        """Queries in the form that what is `read` takes: their coordinates in the order of the keys'."""
        return q_THD if self.planes.key_bits == 8 else q_THD.index_select(-1, self._readable.key_order_D)

    def read(self, rows: PagedRows, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of these rows, each [K, L, D], with their coordinates in the order in which they are stored."""
        planes, reader = self.planes, self._readable
        k_KLD = reader.keys(_heads(rows, planes.k_codes_PKtB, planes.k_signs_PKtS, planes.k_scale_PKt))
        v_KLD = reader.values(_heads(rows, planes.v_codes_PKtB, planes.v_signs_PKtS, planes.v_scale_PKt))
        return k_KLD.to(dtype), v_KLD.to(dtype)

    def finish(self, out_TX: torch.Tensor) -> None:
        """Bring sums of values, weighted by attention, into the form of outputs: in order, and rotated back."""
        out_XD = out_TX.view(-1, self.planes.head_dim)
        ordered_XD = out_XD.index_select(-1, self._readable.value_places_D)
        if self.planes.rotates_values:
            ordered_XD = ordered_XD.float() @ self.planes.rotation_DD[: self.planes.head_dim].float()
            ordered_XD *= hadamard_block(self.planes.head_dim) ** -0.5
        out_XD.copy_(ordered_XD)

    @property
    def _readable(self) -> CodeReader:
        assert self._reader is not None, "these pages were made for kernels, not for reading"
        return self._reader


def _heads(
    rows: PagedRows, codes_PKtB: torch.Tensor, signs_PKtS: torch.Tensor | None, scale_PKt: torch.Tensor
) -> CodedHeads:
    signs_KLS = None if signs_PKtS is None else rows.read_by_head(signs_PKtS)
    return CodedHeads(rows.read_by_head(codes_PKtB), signs_KLS, rows.read_by_head(scale_PKt))
