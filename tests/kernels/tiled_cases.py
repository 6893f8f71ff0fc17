"""Work for the tiled kernel, cut by hand: any tiles, any splits, empty ones too, amid poison and red zones."""

from dataclasses import dataclass, field, replace

import torch

from holdfast.kernels.attention.paged_attention import Scoring
from holdfast.kernels.attention.tile_work import TileCall, TileWork
from holdfast.kernels.attention.tiled_attention import choose_large_kernel, tile_rows, tiled_attention
from holdfast.kernels.geometry import BLOCK_TOKENS
from kernels.exactness import MOAT
from kernels.paged_cases import PagedCase
from scratch_memory import Memory

BEYOND = 2**30
"""Page ids that no kernel may read."""
NAN = float("nan")


def rounded(case: PagedCase, dtype: torch.dtype) -> PagedCase:
    """Round everything to `dtype`."""
    tokens = [(k.to(dtype), v.to(dtype)) for k, v in case.tokens]
    planes = case.k_plane.to(dtype), case.v_plane.to(dtype)
    return replace(case, q=case.q.to(dtype), k_plane=planes[0], v_plane=planes[1], tokens=tokens)


@dataclass
class Cut:
    """How a case becomes tiles: `splits` equal ranges, or `bounds` between them, for every tile of a sequence."""

    large: bool = False
    splits: int = 1
    bounds: list[int] | None = None
    """Ends of the ranges; the first begins with what is seen first, and the last ends behind the last row."""
    is_aligned: bool = False
    """The first range begins with a block, before what the first row sees, as batch_invariant has it."""


@dataclass
class Tiles:
    """Lists as the kernel reads them."""

    small: list[tuple[int, ...]] = field(default_factory=list)
    large: list[tuple[int, ...]] = field(default_factory=list)
    rows: list[tuple[int, int]] = field(default_factory=list)
    num_partials: int = 0


def cut_tiles(case: PagedCase, cuts: list[Cut], num_padding: int = 0) -> Tiles:
    """Tiles of every sequence, each cut in its own way; table rows are in reverse."""
    num_heads, num_kv_heads = case.q.shape[1], case.k_plane.shape[1]
    made = Tiles()
    for index, ((start, count), row_start, cut) in enumerate(zip(case.rows, case.row_starts, cuts, strict=True)):
        most = tile_rows(num_heads, num_kv_heads, cut.large)
        for offset in range(0, count, most):
            rows, position = min(most, count - offset), start + offset
            low = 0 if case.window is None else max(0, position - case.window + 1)
            low = low // BLOCK_TOKENS * BLOCK_TOKENS if cut.is_aligned else low
            high = position + rows
            ends = _ends(cut, low, high)
            for split, (first, end) in enumerate(zip([low, *ends], ends, strict=False)):
                partial = made.num_partials + split if len(ends) > 1 else -1
                tile = (len(case.rows) - 1 - index, row_start + offset, rows, position, first, end, partial, len(ends))
                (made.large if cut.large else made.small).append(tile)
            made.rows += [(made.num_partials + i * len(ends), len(ends)) for i in range(rows)]
            made.num_partials += rows * len(ends) if len(ends) > 1 else 0
    made.rows += num_padding * [(0, 0)]
    return made


def _ends(cut: Cut, low: int, high: int) -> list[int]:
    if cut.bounds is not None:
        return [min(high, max(low, end)) for end in cut.bounds] + [high]
    size = -(-(high - low) // cut.splits)
    return [min(high, low + (split + 1) * size) for split in range(cut.splits)]


def run_tiles(
    case: PagedCase,
    tiles: Tiles,
    device: torch.device,
    function=tiled_attention,
    num_sms: int = 1,
    out_dtype: torch.dtype | None = None,
    memory: Memory | None = None,
) -> torch.Tensor:
    """The kernel on the device, everything it reads amid NaN, everything it writes in `memory`, between red zones."""
    memory = memory or Memory(device)
    num_rows, num_heads, head_dim = len(tiles.rows), *case.q.shape[1:]
    out = memory.take("out", num_rows, num_heads * head_dim, dtype=out_dtype or case.q.dtype)
    partial_out = memory.take("partial_out", tiles.num_partials, num_heads * head_dim)
    partial_lse = memory.take("partial_lse", tiles.num_partials, num_heads)
    padding = torch.full((num_rows - len(case.q), num_heads, head_dim), NAN, dtype=case.q.dtype)
    longest = max(len(pages) for pages in case.pages)
    page_table = torch.full((len(case.pages), longest + 3), BEYOND, dtype=torch.int32)
    for index, pages in enumerate(case.pages):
        page_table[len(case.pages) - 1 - index, : len(pages)] = torch.tensor(pages)
    heads = (len(tiles.small), len(tiles.large), 0, 0, 0, 0, 0, 0)
    beyond = 4 * [(0, 0, 1, 0, 0, 1, BEYOND, 1)]  # tiles of a step before this one
    listed = torch.tensor([heads, *tiles.small, *tiles.large, *beyond], dtype=torch.int32, device=device)
    row_list = torch.tensor([*tiles.rows, *(4 * [(BEYOND, 3)])], dtype=torch.int32, device=device)
    has_merge = any(splits != 1 for _, splits in tiles.rows)
    work = TileWork(listed, row_list, bool(tiles.small), bool(tiles.large), has_merge)
    q, k_plane, v_plane = (
        amid(values, device) for values in (torch.cat((case.q, padding)), case.k_plane, case.v_plane)
    )
    sinks = None if case.sinks is None else amid(case.sinks, device)
    scoring = Scoring(case.scale, case.window, sinks, case.softcap)
    call = TileCall(q, page_table.to(device), work, scoring, partial_out, partial_lse, out, num_sms)
    result = function(call, k_plane, v_plane, case.page_tokens)
    assert result is out
    memory.check()
    return out.cpu()


def in_warpgroups(call: TileCall, k_plane: torch.Tensor, v_plane: torch.Tensor, page_tokens: int) -> torch.Tensor:
    """`tiled_attention` as a layer on a Hopper GPU has it."""
    large = choose_large_kernel(k_plane, page_tokens, call.q_THD.shape[1], call.scoring.scale)
    assert large.name == "warpgroups", large.reason
    return tiled_attention(call, k_plane, v_plane, page_tokens, large)


def amid(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy values to the device, with NaN before and after them."""
    buffer = torch.full((values.numel() + 2 * MOAT,), NAN, dtype=values.dtype, device=device)
    body = buffer[MOAT : MOAT + values.numel()].view(values.shape)
    body.copy_(values)
    return body
