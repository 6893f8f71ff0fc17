"""Latents scattered over pages, with poison in all other slots, and tiles over them: from the scheduler, or cut by hand."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from holdfast.attention.backend import SequenceRows
from holdfast.attention.tile_scheduler import ListRoom, Machine, StepRows, TileScheduler
from holdfast.kernels.attention.tile_work import TileWork
from holdfast.kernels.latent.latent_attention import latent_attention
from holdfast.kernels.latent.latent_geometry import head_blocks, latent_geometry, tile_rows
from holdfast.kernels.latent.latent_planes import LatentCall, LatentPlanes
from kernels.exactness import random
from kernels.tiled_cases import BEYOND, NAN, amid
from red_zones import RedZones

# T rows, N query heads, L latent, R rotated elements, S slots

LatentFunction = Callable[..., torch.Tensor]


@dataclass
class LatentCase:
    """Sequences of a step over one plane of latents; those of sequence i are also kept as tokens[i]."""

    rows: list[tuple[int, int]]
    """(position of the first row, number of rows) of each sequence."""
    q_TNX: torch.Tensor
    plane_SX: torch.Tensor
    pages: list[list[int]]
    tokens: list[torch.Tensor]
    latent_dim: int
    page_tokens: int
    scale: float

    @property
    def row_starts(self) -> list[int]:
        counts = [count for _, count in self.rows]
        return [sum(counts[:index]) for index in range(len(counts))]

    @property
    def num_heads(self) -> int:
        return self.q_TNX.shape[1]

    def rounded(self, dtype: torch.dtype) -> "LatentCase":
        """Round everything to `dtype`."""
        tokens = [token_SX.to(dtype) for token_SX in self.tokens]
        return replace(self, q_TNX=self.q_TNX.to(dtype), plane_SX=self.plane_SX.to(dtype), tokens=tokens)

    def exact(self) -> torch.Tensor:
        """[T, N, L] in float64, from the tokens themselves: no page is looked at."""
        out_TNL = torch.empty(*self.q_TNX.shape[:2], self.latent_dim, dtype=torch.float64)
        for (start, count), row, rows_SX in zip(self.rows, self.row_starts, self.tokens, strict=True):
            for i in range(count):
                seen_SX = rows_SX[: start + i + 1].double()
                weights_NS = (self.q_TNX[row + i].double() @ seen_SX.T * self.scale).softmax(-1)
                out_TNL[row + i] = weights_NS @ seen_SX[:, : self.latent_dim]
        return out_TNL

    def page_table(self) -> torch.Tensor:
        """Rows in reverse; places after a sequence's pages name pages that no kernel may read."""
        longest = max(len(pages) for pages in self.pages)
        table_NP = torch.full((len(self.pages), longest + 3), BEYOND, dtype=torch.int32)
        for index, pages in enumerate(self.pages):
            table_NP[len(self.pages) - 1 - index, : len(pages)] = torch.tensor(pages)
        return table_NP


def latent_case(
    rows: list[tuple[int, int]],
    num_heads: int = 4,
    latent_dim: int = 32,
    rope_dim: int = 16,
    page_tokens: int = 64,
    seed: int = 0,
    q_scale: float = 3.0,
) -> LatentCase:
    """Pages in random order among unused ones; slots that hold no token of a sequence are NaN."""
    counts = [-(-(start + count) // page_tokens) for start, count in rows]
    order = torch.randperm(sum(counts) + 3, generator=torch.Generator().manual_seed(seed)).tolist()
    width = latent_dim + rope_dim
    plane_SX = torch.full((len(order) * page_tokens, width), NAN)
    pages, tokens = [], []
    for index, ((start, count), num_pages) in enumerate(zip(rows, counts, strict=True)):
        own = [order.pop() for _ in range(num_pages)]
        token_SX = random(start + count, width, seed=seed + 100 + index)
        position = torch.arange(start + count)
        plane_SX[torch.tensor(own)[position // page_tokens] * page_tokens + position % page_tokens] = token_SX
        pages.append(own)
        tokens.append(token_SX)
    q_TNX = random(sum(count for _, count in rows), num_heads, width, seed=seed + 1, scale=q_scale)
    return LatentCase(rows, q_TNX, plane_SX, pages, tokens, latent_dim, page_tokens, width**-0.5)


class Scheduling:
    """How the real scheduler cuts a step."""

    def __init__(
        self, num_sms: int = 1, max_partials: int = 64, batch_invariant: bool = False, captured: bool = False
    ) -> None:
        self.num_sms = num_sms
        self.max_partials = max_partials
        self.batch_invariant = batch_invariant
        self.captured = captured

    def work(self, case: LatentCase, num_rows: int, device: torch.device) -> TileWork:
        """The lists of a step of this case, padded to so many rows."""
        room = ListRoom(512, num_rows, len(case.rows), self.max_partials)
        machine = Machine(self.num_sms, self.batch_invariant, device)
        geometry = latent_geometry(case.num_heads)
        scheduler = TileScheduler(geometry, head_blocks(case.num_heads)[0], None, room, machine)
        sequences = [
            SequenceRows(row, count, start, (), len(case.rows) - 1 - index)
            for index, ((start, count), row) in enumerate(zip(case.rows, case.row_starts, strict=True))
        ]
        return scheduler.fill(StepRows.of(sequences, num_rows), self.captured)


def cut_work(
    case: LatentCase, splits: int, large: bool, num_rows: int, device: torch.device, block_tokens: int = 64
) -> tuple[TileWork, int]:
    """Every sequence in so many splits, the last of them empty where it is short; and the partials of all."""
    most, tiles, row_list, num_partials = tile_rows(case.num_heads, large), [], [], 0
    for index, ((start, count), row) in enumerate(zip(case.rows, case.row_starts, strict=True)):
        for offset in range(0, count, most):
            rows, position = min(most, count - offset), start + offset
            high = position + rows
            size = -(-high // (splits * block_tokens)) * block_tokens
            for split in range(splits):
                partial = num_partials + split if splits > 1 else -1
                low = split * size if split * size < high else 0
                end = min(high, low + size) if split * size < high else 0
                fields = (len(case.rows) - 1 - index, row + offset, rows, position, low, end, partial, splits)
                tiles.append(fields)
            row_list += [(num_partials + i * splits, splits) for i in range(rows)]
            num_partials += rows * splits if splits > 1 else 0
    row_list += (num_rows - len(row_list)) * [(0, 0)]
    heads = (0, len(tiles), *6 * [0]) if large else (len(tiles), *7 * [0])
    beyond = 4 * [(0, 0, 1, 0, 0, 1, BEYOND, 1)]  # tiles of a step before this one
    listed = torch.tensor([heads, *tiles, *beyond], dtype=torch.int32, device=device)
    row_list_T2 = torch.tensor([*row_list, *4 * [(BEYOND, 3)]], dtype=torch.int32, device=device)
    has_merge = splits > 1 or len(case.q_TNX) < num_rows
    return TileWork(listed, row_list_T2, not large, large, has_merge), num_partials


def run_latents(
    case: LatentCase,
    work: TileWork,
    num_rows: int,
    max_partials: int,
    device: torch.device,
    function: LatentFunction = latent_attention,
    num_sms: int = 1,
) -> torch.Tensor:
    """The kernel on the device, everything it reads amid NaN, everything it writes NaN before and between red zones."""
    zones = RedZones(device)
    num_heads, latent_dim, dtype = case.num_heads, case.latent_dim, case.q_TNX.dtype
    out_TNL = zones.allocate(num_rows, num_heads, latent_dim, dtype=dtype).fill_(NAN)
    partial_out_CX = zones.allocate(max_partials, num_heads * latent_dim).fill_(NAN)
    partial_lse_CH = zones.allocate(max_partials, num_heads).fill_(NAN)
    padding = torch.full((num_rows - len(case.q_TNX), *case.q_TNX.shape[1:]), NAN, dtype=dtype)
    rope_dim = case.plane_SX.shape[1] - latent_dim
    planes = LatentPlanes("plain", latent_dim, rope_dim, case.page_tokens, amid(case.plane_SX, device))
    q_TNX = amid(torch.cat((case.q_TNX, padding)), device)
    table_NP = case.page_table().to(device)
    call = LatentCall(q_TNX, planes, table_NP, case.scale, partial_out_CX, partial_lse_CH, out_TNL, num_sms)
    result = function(call, work)
    assert result is out_TNL, "the output is the one that was given"
    zones.check()
    return out_TNL.cpu()
