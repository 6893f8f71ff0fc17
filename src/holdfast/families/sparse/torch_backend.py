"""Sparse latent attention (DSA) over paged latents in plain torch, on any device and in any format.

T rows of the step, N query heads, I index heads of D elements, K tokens that a row attends to at most, C stored tokens at a
time, n rows of a block

    score[t, s] = sum over heads of weight[t, h] * relu(q[t, h] . k[s])

Rows that see up to K tokens attend to all of them, as without an index. If a CPU has the C kernels, products and sums of scores
have an order that neither other rows nor the length of the context changes. So the choice of a row follows from its own numbers.
"""

from typing import ClassVar

import torch

from holdfast.attention.backend import LayerStep
from holdfast.attention.declarations import BLOCK_TOKENS, index_block_rows
from holdfast.families.latent.torch_backend import RowBlock, TorchLatentAttention, attend_latents
from holdfast.families.sparse.pages import SparseBackend
from holdfast.kernels.gemm.linear import plain_linear
from holdfast.kernels.latent.latent_planes import IndexPlanes
from holdfast.kernels.latent.write_index import quantize_index_queries


class TorchSparseLatentAttention(TorchLatentAttention, SparseBackend):
    """The backend."""

    name: ClassVar[str] = "torch_sparse"

    def select(self, q_TID: torch.Tensor, weights_TI: torch.Tensor, step: LayerStep) -> None:
        """Write positions in rising order into `selected`; rows that see up to K tokens have none there."""
        layer, plan, scratch = step
        planes, top_k, num_heads = self.indexes[layer], self.top_k, q_TID.shape[1]
        for sequence in plan.every:
            rows, first = sequence.rows, max(0, top_k - sequence.rows.start)
            while first < rows.num_rows:
                position = rows.start + first
                count = min(index_block_rows(num_heads, position + 1), rows.num_rows - first)
                place = slice(rows.row_start + first, rows.row_start + first + count)
                slots_L = sequence.slots_L[: position + count]
                num_seen_n = position + 1 + torch.arange(count, device=q_TID.device)
                scores_nC = score_keys(q_TID[place], weights_TI[place], planes, slots_L, num_seen_n)
                self._selected(scratch, len(q_TID))[place] = largest_tokens(scores_nC, top_k)
                first += count

    def attend(
        self, q_TND: torch.Tensor, kv_b_NXL: torch.Tensor, step: LayerStep, out_TX: torch.Tensor, wanted_only: bool
    ) -> torch.Tensor:
        layer, plan, scratch = step
        sequences, rows_R = plan.rows(wanted_only)
        q_RND = q_TND if rows_R is None else q_TND.index_select(0, rows_R)
        planes, scale, top_k = self.planes[layer], self._specs[layer].scale, self.top_k
        tokens_RK: torch.Tensor | None = None
        if any(sequence.rows.end > top_k for sequence in sequences):
            tokens_RK = self._selected(scratch, len(q_TND))
            tokens_RK = tokens_RK if rows_R is None else tokens_RK.index_select(0, rows_R)

        def attend_block(q_nNX: torch.Tensor, block: RowBlock) -> torch.Tensor:
            num_whole = min(max(0, top_k - block.position), block.num_rows)
            parts = []
            if num_whole:
                slots_L = block.slots_L[: block.position + num_whole]
                parts.append(attend_latents(q_nNX[:num_whole], planes, slots_L, block.position, scale))
            for row in range(num_whole, block.num_rows):
                assert tokens_RK is not None, f"row {row} sees more than {top_k} tokens"
                slots_K = block.slots_L[tokens_RK[block.first_row + row].long()]
                parts.append(attend_latents(q_nNX[row : row + 1], planes, slots_K, top_k - 1, scale))
            return torch.cat(parts)

        return self._attend_blocks(q_RND, kv_b_NXL, sequences, layer, attend_block, out_TX)


def score_keys(
    q_nID: torch.Tensor, weights_nI: torch.Tensor, planes: IndexPlanes, slots_C: torch.Tensor, num_seen_n: torch.Tensor
) -> torch.Tensor:
    """Score the keys in these slots, float32 [n, C]; -inf after the last key that a row sees, and instead of NaN."""
    num_rows, num_heads, dim = q_nID.shape
    if planes.is_quantized:
        codes_nID, scaled_nI = q_nID.new_empty(q_nID.shape, dtype=torch.float8_e4m3fn), torch.empty_like(weights_nI)
        quantize_index_queries(q_nID, weights_nI, codes_nID, scaled_nI)
        q_nID, weights_nI = codes_nID, scaled_nI
    q_MD = q_nID.float().reshape(num_rows * num_heads, dim)
    scores_nC = q_MD.new_empty(num_rows, len(slots_C))
    for first in range(0, len(slots_C), BLOCK_TOKENS):
        keys_CD = index_keys(planes, slots_C[first : first + BLOCK_TOKENS])
        by_head = plain_linear(q_MD, keys_CD, None).view(num_rows, num_heads, -1)
        by_head.relu_().mul_(weights_nI.unsqueeze(2))
        sums_nC = scores_nC[:, first : first + len(keys_CD)].copy_(by_head[:, 0])
        for head in range(1, num_heads):
            sums_nC.add_(by_head[:, head])
    is_hidden_nC = torch.arange(len(slots_C), device=q_MD.device) >= num_seen_n.unsqueeze(1)
    return scores_nC.masked_fill_(is_hidden_nC | scores_nC.isnan(), -torch.inf)


def index_keys(planes: IndexPlanes, slots_C: torch.Tensor) -> torch.Tensor:
    """Read the index keys in some slots, float32 [C, D]."""
    if planes.scales_S1 is None:
        return planes.rows_SD[slots_C].float()
    codes_CD = planes.rows_SD.view(torch.uint8)[slots_C].view(planes.rows_SD.dtype)
    return codes_CD.float() * planes.scales_S1[slots_C]


def largest_tokens(scores_nC: torch.Tensor, top_k: int) -> torch.Tensor:
    """Return positions of the largest scores of each row, [n, K], rising; the first of equal ones win."""
    least_n1 = scores_nC.topk(top_k, dim=1).values[:, -1:]
    is_larger_nC, is_equal_nC = scores_nC > least_n1, scores_nC == least_n1
    num_equal_n1 = top_k - is_larger_nC.sum(dim=1, keepdim=True)
    is_taken_nC = is_larger_nC | (is_equal_nC & (is_equal_nC.cumsum(dim=1) <= num_equal_n1))
    return is_taken_nC.nonzero()[:, 1].view(len(scores_nC), top_k)
