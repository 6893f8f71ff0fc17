"""Attention over paged keys and values in plain torch, on any device and in any mix of formats.

    T rows of the step, H query heads, K key/value heads, G = H / K, D head dim, L stored tokens, n rows of a block

Rows of a sequence form blocks aligned to absolute positions. A block sees stored tokens [low, high), so one call of
torch's fused attention with one slice of a mask template suffices, whatever the chunking. A single row folds its G
heads into the row dimension instead and needs no mask. Quantized tokens are dequantized only while attended to.

Torch's attention supports neither sinks nor soft-capping. Blocks of layers with them are computed here, in float32, one
key head at a time. A block begins with the first token that its first row sees, so nothing before a window is read.
Tokens that later rows do not see are still the sequence's own: what a whole step sees decides which pages are freed.

With near pages (families/grouped/spec.py) rows attend one own block after the other, over one copy of all tokens. It holds
near rows from the first of these blocks on. When a block is done, codes replace its near rows.
"""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import groupby
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from holdfast.attention.backend import Batch, LayerStep, RowsPlan, SequenceRows
from holdfast.cache.storage import PageStorage
from holdfast.families.grouped.declarations import mask_rows
from holdfast.families.grouped.pages import (
    GroupedBackend,
    KeyBiases,
    KeyMeans,
    PagedRows,
    PairScales,
    QuantizedPages,
    Sinks,
)
from holdfast.families.grouped.spec import GroupedAttentionSpec, NearSpec

GPU_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Torch kernels that pass on what they do not support. cuDNN's is excluded: torch tries it first, and it fails."""
MASK_ALIGNMENT = 8
"""Elements. Fused kernels load a mask in vectors: its start and its row stride must be multiples of this."""


@dataclass(frozen=True, slots=True)
class Block:
    """Rows [row, row + num_rows) of the step against tokens [low, high), counted from the first located token."""

    row: int
    num_rows: int
    low: int
    high: int
    mask_nL: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class SequencePlan:
    """The location of one sequence's tokens, and the blocks of its rows."""

    rows: PagedRows
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class NearPlan:
    """The location of one sequence's tokens on both kinds of pages, and the blocks of its rows by their own block."""

    first: int
    """Position of the first token that a row sees; blocks count from it."""
    end: int
    codes: PagedRows | None
    """Tokens that some row sees as codes."""
    near: tuple[PagedRows, ...]
    """Near rows from the first row's own block on; and those of the first tokens, if they lie before."""
    own_blocks: tuple[tuple[int, tuple[Block, ...]], ...]
    """Position of an own block, and the blocks of rows in it; ascending."""


WindowPlans = dict[tuple[int | None, int, NearSpec | None], tuple[SequencePlan | NearPlan, ...]]
"""Plans of some rows of a step, by window, the cache group that has it, and near pages."""


TorchPlan = RowsPlan[WindowPlans]


class TorchPagedAttention(GroupedBackend):
    """The backend."""

    name: ClassVar[str] = "torch_paged"

    def __init__(
        self,
        specs: Sequence[GroupedAttentionSpec],
        storage: PageStorage,
        k_means: KeyMeans | None = None,
        key_biases: KeyBiases | None = None,
        sinks: Sinks | None = None,
        pair_scales: PairScales | None = None,
    ) -> None:
        super().__init__(specs, storage, k_means, True, key_biases, sinks, pair_scales)
        self._dtype: torch.dtype = getattr(torch, specs[0].dtype)
        self._page_tokens = storage.spec.page_tokens
        self._max_model_len = specs[0].max_model_len
        self._block_rows = mask_rows(self._max_model_len)
        self._windows = tuple(dict.fromkeys((spec.window, spec.group, spec.near) for spec in specs))
        self._masks = {window: self._mask_template(window) for window in dict.fromkeys(spec.window for spec in specs)}

    def held_bytes(self) -> dict[str, int]:
        mask_bytes = sum(mask_nX.nbytes for mask_nX in self._masks.values())
        return {"attention/masks": mask_bytes, **super().held_bytes()}

    def plan(self, batch: Batch, captured: bool = False) -> TorchPlan:
        return TorchPlan.of(batch, self._plan_rows)

    def attend(self, q_THD: torch.Tensor, step: LayerStep, out_TX: torch.Tensor, wanted_only: bool) -> torch.Tensor:
        layer, plan, _ = step
        spec, pages, (rows, rows_R) = self._specs[layer], self.pages[layer], plan.rows(wanted_only)
        q_THD = q_THD if rows_R is None else q_THD.index_select(0, rows_R)
        num_rows, num_heads, head_dim = q_THD.shape
        num_kv_heads = spec.cache.num_kv_heads
        q_TKGD = pages.queries(q_THD).view(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
        out_TKGD = out_TX[:num_rows].view_as(q_TKGD)
        # On a CPU torch has no kernel to choose wrongly.
        with sdpa_kernel(GPU_KERNELS) if self._device.type == "cuda" else nullcontext():
            for sequence in rows[spec.window, spec.group, spec.near]:
                for k_KLD, v_KLD, blocks in self._tokens(layer, sequence):
                    for block in blocks:
                        if spec.is_plain_softmax:
                            self._attend(q_TKGD, k_KLD, v_KLD, out_TKGD, block, spec.scale)
                        else:
                            attend_block(q_TKGD, k_KLD, v_KLD, out_TKGD, block, spec, self._sinks[layer])
        pages.finish(out_TX[:num_rows])
        return out_TX[:num_rows]

    def _plan_rows(self, sequences: Sequence[SequenceRows]) -> WindowPlans:
        parts = [tuple(part) for _, part in groupby(sequences, key=lambda rows: id(rows.tables))]
        return {
            (window, group, near): tuple(
                self._plan_sequence(part, window, group) if near is None else self._plan_near(part, window, group, near)
                for part in parts
            )
            for window, group, near in self._windows
        }

    def _tokens(
        self, layer: int, sequence: SequencePlan | NearPlan
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, tuple[Block, ...]]]:
        """Yield keys and values, each [K, L, D], and the blocks of rows that attend to them."""
        pages = self.pages[layer]
        if isinstance(sequence, SequencePlan):
            yield *pages.read(sequence.rows, self._dtype), sequence.blocks
            return
        assert isinstance(pages, QuantizedPages), f"{pages=} beside near pages"
        cache = self._specs[layer].cache
        shape = cache.num_kv_heads, sequence.end - sequence.first, cache.head_dim
        k_KLD, v_KLD = (torch.empty(shape, dtype=self._dtype, device=self._device) for _ in range(2))
        for rows in sequence.near:
            k_KlD, v_KlD = pages.read_near(rows, self._dtype)
            k_KLD.narrow(1, rows.first - sequence.first, rows.num_tokens).copy_(k_KlD)
            v_KLD.narrow(1, rows.first - sequence.first, rows.num_tokens).copy_(v_KlD)
        codes, num_copied = sequence.codes, 0
        code_k_KlD, code_v_KlD = (k_KLD, v_KLD) if codes is None else pages.read(codes, self._dtype)
        for own, blocks in sequence.own_blocks:
            if codes is not None and own > codes.first + num_copied:
                more = own - codes.first - num_copied
                place = codes.first - sequence.first + num_copied
                k_KLD.narrow(1, place, more).copy_(code_k_KlD.narrow(1, num_copied, more))
                v_KLD.narrow(1, place, more).copy_(code_v_KlD.narrow(1, num_copied, more))
                num_copied += more
            yield k_KLD, v_KLD, blocks

    def _attend(
        self,
        q_TKGD: torch.Tensor,
        k_KLD: torch.Tensor,
        v_KLD: torch.Tensor,
        out_TKGD: torch.Tensor,
        block: Block,
        scale: float,
    ) -> None:
        rows, tokens = slice(block.row, block.row + block.num_rows), slice(block.low, block.high)
        k_KlD, v_KlD = k_KLD[:, tokens], v_KLD[:, tokens]
        if block.mask_nL is None:
            out_TKGD[rows] = F.scaled_dot_product_attention(
                q_TKGD[rows], k_KlD.unsqueeze(0), v_KlD.unsqueeze(0), scale=scale
            )
            return
        out_KGnD = F.scaled_dot_product_attention(
            q_TKGD[rows].permute(1, 2, 0, 3),
            self._per_query_head(k_KlD, q_TKGD.shape[2]),
            self._per_query_head(v_KlD, q_TKGD.shape[2]),
            attn_mask=block.mask_nL,
            scale=scale,
        )
        out_TKGD[rows] = out_KGnD.permute(2, 0, 1, 3)

    @staticmethod
    def _per_query_head(x_KlD: torch.Tensor, num_groups: int) -> torch.Tensor:
        num_kv_heads, num_tokens, head_dim = x_KlD.shape
        return x_KlD.unsqueeze(1).expand(num_kv_heads, num_groups, num_tokens, head_dim)

    def _plan_sequence(self, parts: Sequence[SequenceRows], window: int | None, group: int) -> SequencePlan:
        """Plan some or all rows of one sequence. The tokens that they see are located and read once."""
        first = 0 if window is None else max(0, min(rows.start for rows in parts) - window + 1)
        end = max(rows.end for rows in parts)
        located = PagedRows.locate(parts[0].tables[group], first, end, self._page_tokens, self._device)
        return SequencePlan(located, tuple(block for rows in parts for _, block in self._blocks(rows, window, first)))

    def _plan_near(self, parts: Sequence[SequenceRows], window: int | None, group: int, near: NearSpec) -> NearPlan:
        """Plan some or all rows of one sequence whose own blocks, and perhaps whose first tokens, are exact."""
        size, start = near.block_tokens, min(rows.start for rows in parts)
        first = 0 if window is None else max(0, start - window + 1)
        end = max(rows.end for rows in parts)
        own, last_own = start // size * size, (end - 1) // size * size
        located = [self._locate_near(parts[0], max(first, own), end, near)]
        if near.first_tokens and own > 0:
            located.append(self._locate_near(parts[0], 0, near.first_tokens, near))
        codes, first_code = None, near.first_tokens or first
        if first_code < last_own:
            codes = PagedRows.locate(parts[0].tables[group], first_code, last_own, self._page_tokens, self._device)
        found = [one for rows in parts for one in self._blocks(rows, window, first, size)]
        found.sort(key=lambda one: one[0] // size)
        by_own = groupby(found, key=lambda one: one[0] // size * size)
        own_blocks = tuple((own, tuple(block for _, block in some)) for own, some in by_own)
        return NearPlan(first, end, codes, tuple(located), own_blocks)

    def _locate_near(self, rows: SequenceRows, first: int, end: int, near: NearSpec) -> PagedRows:
        return PagedRows.locate(rows.tables[near.group], first, end, near.page_tokens, self._device)

    def _blocks(
        self, rows: SequenceRows, window: int | None, first: int, own_tokens: int = 0
    ) -> list[tuple[int, Block]]:
        """Cut rows into blocks, each with the position of its first; also where a block of `own_tokens` ends, if any."""
        blocks, position = [], rows.start
        while position < rows.end:
            block_end = min(rows.end, (position // self._block_rows + 1) * self._block_rows)
            if own_tokens:
                block_end = min(block_end, (position // own_tokens + 1) * own_tokens)
            low = 0 if window is None else max(0, position - window + 1)
            mask_nL = None if rows.num_rows == 1 else self._mask(window, position, block_end, low)
            row = rows.row_start + position - rows.start
            blocks.append((position, Block(row, block_end - position, low - first, block_end - first, mask_nL)))
            position = block_end
        return blocks

    def _mask_template(self, window: int | None) -> torch.Tensor:
        """Build the template: 0 if row i sees column x (its own position is column max_model_len + i), else -inf."""
        row_n1 = torch.arange(self._block_rows).unsqueeze(1)
        distance_nX = self._max_model_len + row_n1 - torch.arange(self._max_model_len + self._block_rows)
        seen_nX = distance_nX >= 0 if window is None else (distance_nX >= 0) & (distance_nX < window)
        return torch.where(seen_nX, 0.0, float("-inf")).to(self._device, self._dtype)

    def _mask(self, window: int | None, position: int, end: int, low: int) -> torch.Tensor:
        """Return the slice for rows at positions [position, end) and tokens from `low` on."""
        shift = self._max_model_len - position
        mask_nL = self._masks[window][: end - position, shift + low : shift + end]
        return aligned_mask(mask_nL) if self._device.type == "cuda" else mask_nL


def attend_block(
    q_TKGD: torch.Tensor,
    k_KLD: torch.Tensor,
    v_KLD: torch.Tensor,
    out_TKGD: torch.Tensor,
    block: Block,
    spec: GroupedAttentionSpec,
    sinks_H: torch.Tensor | None,
) -> None:
    """Attend with one block that has capped scores or sinks. Only one key head's scores are in memory at a time."""
    rows, tokens = slice(block.row, block.row + block.num_rows), slice(block.low, block.high)
    sinks_KG11 = None if sinks_H is None else sinks_H.view(*q_TKGD.shape[1:3], 1, 1)
    for head, (k_LD, v_LD) in enumerate(zip(k_KLD[:, tokens].float(), v_KLD[:, tokens].float(), strict=True)):
        q_GnD = q_TKGD[rows, head].transpose(0, 1).float()
        scores_GnL = q_GnD @ k_LD.T * spec.scale
        if spec.softcap is not None:
            scores_GnL = torch.tanh(scores_GnL.div_(spec.softcap)).mul_(spec.softcap)
        if block.mask_nL is not None:
            scores_GnL += block.mask_nL
        sum_Gn1 = scores_GnL.logsumexp(-1, keepdim=True)
        if sinks_KG11 is not None:
            sum_Gn1 = torch.logaddexp(sum_Gn1, sinks_KG11[head])
        out_TKGD[rows, head] = ((scores_GnL - sum_Gn1).exp_() @ v_LD).transpose(0, 1).to(out_TKGD.dtype)


def aligned_mask(mask_nL: torch.Tensor) -> torch.Tensor:
    """Copy a mask so that fused kernels can load it: torch checks its strides but not its start."""
    num_rows, num_tokens = mask_nL.shape
    padded_nX = mask_nL.new_zeros(num_rows, num_tokens + -num_tokens % MASK_ALIGNMENT)
    padded_nX[:, :num_tokens] = mask_nL
    return padded_nX[:, :num_tokens]
