"""Latent attention (MLA) over paged latents on a GPU: absorbed over lists of tiles, and up-projected for long prompts.

T rows of the step, N query heads, D = P + R elements of a query head, L latent, V value elements

A step goes in parts of at most ROWS_AT_ONCE rows, each with lists of its own: queries and outputs in the latent space are several
times as wide as elsewhere, and this bounds them. Steps that a graph holds have one part. Rows of a sequence that brings many
take the up-projected form, from the host, one sequence after the other; the tiles leave them alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch

from holdfast.attention.backend import Batch, EagerStep, LayerStep, SequenceRows, wanted_rows
from holdfast.attention.declarations import ROWS_AT_ONCE, StepBounds
from holdfast.attention.tile_scheduler import ListRoom, Machine, StepRows, TileScheduler
from holdfast.cache.storage import PageStorage
from holdfast.families.latent.declarations import latent_heads_at_once, latent_partials, latent_parts, max_latent_tiles
from holdfast.families.latent.pages import LatentBackend
from holdfast.families.latent.spec import LatentAttentionSpec
from holdfast.kernels.attention.tile_work import TileWork
from holdfast.kernels.latent.latent_attention import latent_attention
from holdfast.kernels.latent.latent_geometry import head_blocks, latent_geometry
from holdfast.kernels.latent.latent_planes import LatentCall
from holdfast.kernels.latent.latent_prefill import attend_up_projected
from holdfast.kernels.latent.latent_projection import absorb_queries, project_values
from holdfast.kernels.up_projection import takes_up_projection, warm_steps


class LatentPart(NamedTuple):
    """Some rows of a step that are in the latent space together."""

    first_row: int
    num_rows: int
    work: TileWork
    has_chosen: bool = False
    """True if some rows may attend to tokens that an index chose (families/sparse/triton_backend.py)."""


@dataclass(frozen=True, slots=True)
class TritonLatentPlan:
    """One step's work."""

    parts: tuple[LatentPart, ...]
    """Parts that run absorbed; rows outside their tiles come out as zeros."""
    up_projected: tuple[SequenceRows, ...]
    """Sequences that run up-projected after the parts, one at a time."""
    page_table_NP: torch.Tensor
    wanted_rows_R: torch.Tensor | None


class TritonLatentAttention(LatentBackend):
    """The backend."""

    name: ClassVar[str] = "triton_latent"

    def __init__(
        self, specs: Sequence[LatentAttentionSpec], storage: PageStorage, bounds: StepBounds, num_sms: int
    ) -> None:
        super().__init__(specs, storage)
        self._num_sms = num_sms
        spec = specs[0]
        self._up_projection = spec.up_projection
        self._most_rows = min(bounds.max_num_rows, spec.max_model_len)
        self._max_model_len = spec.max_model_len
        is_quantized = any(one.cache.format.is_quantized for one in specs)
        geometry, (num_blocks, _) = latent_geometry(spec.num_heads, is_quantized), head_blocks(spec.num_heads)
        machine = Machine(num_sms, False, self._device)
        self._lists = tuple(
            TileScheduler(
                geometry,
                num_blocks,  # each block of heads reads the same latents
                None,
                ListRoom(
                    max_latent_tiles(spec, part), part.max_num_rows, part.max_num_seqs, latent_partials(spec, part)
                ),
                machine,
            )
            for part in latent_parts(bounds)
        )

    def held_bytes(self) -> dict[str, int]:
        return {
            "attention/tiles": sum(one.tile_bytes for one in self._lists),
            "attention/rows": sum(one.row_bytes for one in self._lists),
        }

    def eager_steps(self) -> tuple[EagerStep, ...]:
        """List up-projected steps: as many rows as possible, and some after a context that is split."""
        steps = warm_steps(self._up_projection, self._most_rows, self._max_model_len)
        return tuple(EagerStep(start, num_rows) for start, num_rows in steps)

    def plan(self, batch: Batch, captured: bool = False) -> TritonLatentPlan:
        assert batch.page_tables is not None, "the batch has no page tables on the device"
        up_projected = () if captured else tuple(filter(self._is_up_projected, batch.sequences))
        absorbed = [rows for rows in batch.sequences if rows not in up_projected] if up_projected else batch.sequences
        parts = []
        for index, first_row in enumerate(range(0, batch.num_rows, ROWS_AT_ONCE)):
            num_rows = min(ROWS_AT_ONCE, batch.num_rows - first_row)
            if _covers(up_projected, first_row, first_row + num_rows):
                continue
            step = StepRows.of(rows_between(absorbed, first_row, first_row + num_rows), num_rows)
            parts.append(LatentPart(first_row, num_rows, self._lists[index].fill(step, captured)))
        page_table_NP = batch.page_tables[self._specs[0].group]
        wanted_rows_R = batch.logits.rows_R if batch.logits is not None else None
        return TritonLatentPlan(tuple(parts), up_projected, page_table_NP, wanted_rows_R)

    def _is_up_projected(self, rows: SequenceRows) -> bool:
        return takes_up_projection(rows.num_rows, rows.start, self._up_projection)

    def attend(
        self, q_TND: torch.Tensor, kv_b_NXL: torch.Tensor, step: LayerStep, out_TX: torch.Tensor, wanted_only: bool
    ) -> torch.Tensor:
        layer, plan, scratch = step
        num_rows, num_heads, _ = q_TND.shape
        out_TNV = out_TX.view(num_rows, num_heads, -1)
        for part in plan.parts:
            rows = slice(part.first_row, part.first_row + part.num_rows)
            self._attend_part(q_TND[rows], kv_b_NXL, step, part, out_TNV[rows])
        for sequence in plan.up_projected:
            rows = slice(sequence.row_start, sequence.row_start + sequence.num_rows)
            attend_up_projected(
                q_TND[rows],
                kv_b_NXL,
                self.planes[layer],
                plan.page_table_NP[sequence.table_row],
                sequence.start,
                self._specs[layer].scale,
                scratch,
                out_TNV[rows],
            )
        return wanted_rows(q_TND, out_TX, plan.wanted_rows_R if wanted_only else None)

    def _attend_part(
        self, q_TND: torch.Tensor, kv_b_NXL: torch.Tensor, step: LayerStep, part: LatentPart, out_TNV: torch.Tensor
    ) -> None:
        """Attend absorbed with some rows, one group of heads at a time."""
        layer, plan, scratch = step
        spec, (num_rows, num_heads, _) = self._specs[layer], q_TND.shape
        at_once = latent_heads_at_once(num_heads, num_rows)
        for first in range(0, num_heads, at_once):
            heads = slice(first, min(first + at_once, num_heads))
            count = heads.stop - heads.start
            absorbed_TNX = _cut(scratch["absorbed"], num_rows, count, spec.cache.head_dim)
            latent_TNL = _cut(scratch["attended_latent"], num_rows, count, spec.cache.latent_dim)
            partials = (scratch.get("partial_out", latent_TNL), scratch.get("partial_lse", latent_TNL))
            absorb_queries(q_TND[:, heads], kv_b_NXL[heads], absorbed_TNX)
            pages = self.planes[layer], plan.page_table_NP
            call = LatentCall(absorbed_TNX, *pages, spec.scale, *partials, latent_TNL, self._num_sms)
            latent_attention(call, part.work)
            self._attend_chosen(absorbed_TNX, step, part, latent_TNL)
            project_values(latent_TNL, kv_b_NXL[heads], out_TNV[:, heads])

    def _attend_chosen(
        self, absorbed_TNX: torch.Tensor, step: LayerStep, part: LatentPart, latent_TNL: torch.Tensor
    ) -> None:
        """Hook of sparse attention for rows that are in no tile. Here every row attends to all tokens."""


def rows_between(sequences: Sequence[SequenceRows], first_row: int, end_row: int) -> tuple[SequenceRows, ...]:
    """Cut each sequence to these rows of a step, numbered from the first of them."""
    cut = []
    for rows in sequences:
        first, end = max(rows.row_start, first_row), min(rows.row_start + rows.num_rows, end_row)
        if first < end:
            shift = first - rows.row_start
            cut.append(rows._replace(row_start=first - first_row, num_rows=end - first, start=rows.start + shift))
    return tuple(cut)


def _covers(sequences: Sequence[SequenceRows], first_row: int, end_row: int) -> bool:
    """True if all of these rows belong to these sequences."""
    return sum(rows.num_rows for rows in rows_between(sequences, first_row, end_row)) == end_row - first_row


def _cut(vector: torch.Tensor, *shape: int) -> torch.Tensor:
    """View the beginning of a workspace vector in this shape."""
    num_rows, count, width = shape
    return vector[: num_rows * count * width].view(num_rows, count, width)
