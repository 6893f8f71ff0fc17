"""Latent attention (MLA) over paged latents in plain torch, on any device and in any format, in the absorbed form.

T rows of the step, N query heads, D = P + R elements of a query head, L latent, V value elements, C stored tokens at a time,
n rows of a block

Rows of a sequence are taken in blocks, tokens in blocks too, with an online softmax: memory grows neither with the context nor
with the step. A sequence is computed by itself, whatever else is in the batch.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch

from holdfast.attention.backend import Batch, LayerStep, RowsPlan, SequenceRows
from holdfast.attention.declarations import BLOCK_TOKENS, head_block_rows
from holdfast.cache.storage import PageStorage
from holdfast.families.latent.pages import LatentBackend
from holdfast.families.latent.spec import LatentAttentionSpec
from holdfast.kernels.latent.latent_planes import LatentPlanes, read_latents
from holdfast.kernels.latent.latent_projection import absorb_queries, project_values


@dataclass(frozen=True, slots=True)
class SequenceSlots:
    """One sequence's rows of a step, and the slots of all tokens that they see."""

    rows: SequenceRows
    slots_L: torch.Tensor


class RowBlock(NamedTuple):
    """Neighbouring rows of a sequence, from `position` on, and the slots of all tokens up to the last of them."""

    first_row: int
    num_rows: int
    position: int
    slots_L: torch.Tensor


TorchLatentPlan = RowsPlan[tuple[SequenceSlots, ...]]


class TorchLatentAttention(LatentBackend):
    """The backend."""

    name: ClassVar[str] = "torch_latent"

    def __init__(self, specs: Sequence[LatentAttentionSpec], storage: PageStorage) -> None:
        super().__init__(specs, storage)
        self._page_tokens = storage.spec.page_tokens
        self._block_rows = head_block_rows(specs[0].num_heads)

    def plan(self, batch: Batch, captured: bool = False) -> TorchLatentPlan:
        return TorchLatentPlan.of(batch, lambda sequences: tuple(map(self._locate, sequences)))

    def attend(
        self, q_TND: torch.Tensor, kv_b_NXL: torch.Tensor, step: LayerStep, out_TX: torch.Tensor, wanted_only: bool
    ) -> torch.Tensor:
        layer, plan, _ = step
        sequences, rows_R = plan.rows(wanted_only)
        q_RND = q_TND if rows_R is None else q_TND.index_select(0, rows_R)
        planes, scale = self.planes[layer], self._specs[layer].scale

        def attend_block(q_nNX: torch.Tensor, block: RowBlock) -> torch.Tensor:
            return attend_latents(q_nNX, planes, block.slots_L, block.position, scale)

        return self._attend_blocks(q_RND, kv_b_NXL, sequences, layer, attend_block, out_TX)

    def _attend_blocks(
        self,
        q_TND: torch.Tensor,
        kv_b_NXL: torch.Tensor,
        sequences: Sequence[SequenceSlots],
        layer: int,
        attend_block: Callable[[torch.Tensor, RowBlock], torch.Tensor],
        out_TX: torch.Tensor,
    ) -> torch.Tensor:
        """Absorb the queries of each block, let `attend_block` compute [n, N, L] in float32, and project that to values."""
        num_rows, num_heads, _ = q_TND.shape
        out_TNV = out_TX[:num_rows].unflatten(1, (num_heads, -1))
        num_done = 0
        for block in self._blocks(sequences):
            num_done = block.first_row + block.num_rows
            place = slice(block.first_row, num_done)
            q_nND = q_TND[place]
            absorbed_nNX = q_nND.new_empty(block.num_rows, num_heads, self._specs[layer].cache.head_dim)
            absorb_queries(q_nND, kv_b_NXL, absorbed_nNX)
            latent_nNL = attend_block(absorbed_nNX, block)
            project_values(latent_nNL.to(q_nND.dtype), kv_b_NXL, out_TNV[place])
        out_TNV[num_done:].zero_()
        return out_TX[:num_rows]

    def _blocks(self, sequences: Sequence[SequenceSlots]) -> Iterator[RowBlock]:
        for sequence in sequences:
            rows = sequence.rows
            for first in range(0, rows.num_rows, self._block_rows):
                count = min(self._block_rows, rows.num_rows - first)
                position = rows.start + first
                yield RowBlock(rows.row_start + first, count, position, sequence.slots_L[: position + count])

    def _locate(self, rows: SequenceRows) -> SequenceSlots:
        num_pages = -(-rows.end // self._page_tokens)
        pages_P = torch.tensor(list(rows.tables[0][:num_pages]), dtype=torch.int64)
        slots_PB = pages_P.unsqueeze(1) * self._page_tokens + torch.arange(self._page_tokens)
        return SequenceSlots(rows, slots_PB.flatten()[: rows.end].to(self._device))


def attend_latents(
    q_nNX: torch.Tensor, planes: LatentPlanes, slots_L: torch.Tensor, position: int, scale: float
) -> torch.Tensor:
    """Run an online softmax over blocks of tokens: [n, N, L] in float32."""
    num_rows, num_heads, row_dim = q_nNX.shape
    q_MX = q_nNX.reshape(num_rows * num_heads, row_dim).float()
    acc_ML = q_MX.new_zeros(len(q_MX), planes.latent_dim)
    m_M1 = q_MX.new_full((len(q_MX), 1), -torch.inf)
    l_M1 = torch.zeros_like(m_M1)
    own_M1 = (position + torch.arange(num_rows, device=q_MX.device)).repeat_interleave(num_heads).unsqueeze(1)
    for first in range(0, len(slots_L), BLOCK_TOKENS):
        rows_CX = read_latents(planes, slots_L[first : first + BLOCK_TOKENS], torch.float32)
        scores_MC = (q_MX @ rows_CX.T).mul_(scale)
        if first + len(rows_CX) > position + 1:
            token_C = torch.arange(first, first + len(rows_CX), device=q_MX.device)
            scores_MC.masked_fill_(token_C > own_M1, -torch.inf)
        m_new_M1 = torch.maximum(m_M1, scores_MC.amax(dim=1, keepdim=True))
        p_MC = scores_MC.sub_(m_new_M1).exp_()
        alpha_M1 = (m_M1 - m_new_M1).exp_()
        l_M1 = l_M1 * alpha_M1 + p_MC.sum(dim=1, keepdim=True)
        acc_ML = acc_ML.mul_(alpha_M1).addmm_(p_MC, rows_CX[:, : planes.latent_dim])
        m_M1 = m_new_M1
    return acc_ML.div_(l_M1).view(num_rows, num_heads, planes.latent_dim)
