"""Index keys of sparse latents (DSA) in every format, amid red zones and full of poison, and steps that score them."""

from dataclasses import dataclass

import torch

from holdfast.kernels.latent.latent_planes import IndexPlanes, SparseRows
from holdfast.kernels.latent.write_index import LEAST_KEY, quantize_index, quantize_index_queries_reference
from holdfast.quant.formats import index_planes
from kernels.exactness import MOAT
from red_zones import RedZones

POISON_BYTE = 0xFF
"""NaN in every type that a plane has."""


def make_index_planes(name: str, dim: int, page_tokens: int, num_pages: int, zones: RedZones) -> IndexPlanes:
    """Between red zones, every byte poison."""
    planes = {}
    for plane in index_planes(name, dim):
        shape = (num_pages * page_tokens, *plane.token_shape)
        planes[plane.name] = zones.allocate(*shape, dtype=getattr(torch, plane.dtype))
        planes[plane.name].view(torch.uint8).fill_(POISON_BYTE)
    return IndexPlanes.of(planes, page_tokens)


def planes_to(planes: IndexPlanes, device: torch.device | str) -> IndexPlanes:
    """Copy to a device."""
    scales = planes.scales_S1
    return planes._replace(rows_SD=planes.rows_SD.to(device), scales_S1=None if scales is None else scales.to(device))


def amid_bytes(codes_TX: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """`amid_poison` for e4m3 codes."""
    num_rows, width = codes_TX.shape
    buffer = torch.full((num_rows + 2, width + 2 * MOAT), POISON_BYTE, dtype=torch.uint8, device=device)
    rows = buffer[1:-1, MOAT : MOAT + width]
    rows.copy_(codes_TX.view(torch.uint8))
    return rows.view(torch.float8_e4m3fn)


@dataclass
class ScoreCase:
    """Arguments of `index_scores` on the CPU, and the width of its output: queries are codes where the planes are."""

    q: torch.Tensor
    weights: torch.Tensor
    planes: IndexPlanes
    pages: torch.Tensor
    rows: SparseRows
    num_columns: int


def make_score_case(
    rows: list[tuple[int, int]],
    num_heads: int,
    dim: int,
    name: str,
    page_tokens: int = 16,
    dtype: torch.dtype = torch.float32,
) -> ScoreCase:
    """Rows of (row of the page table, tokens).

    What no row sees is NaN: slots, page 0, which has no owner, and queries and weights of rows without tokens.
    Pages that a sequence does not have are -1.
    """
    generator = torch.Generator().manual_seed(0)
    num_sequences, num_columns = 1 + max(row for row, _ in rows), 3 + max(0, *(count for _, count in rows), 0)
    num_pages = -(-num_columns // page_tokens)
    pages_NP = 1 + torch.randperm(num_sequences * num_pages, generator=generator).view(num_sequences, num_pages).int()
    num_tokens_T = torch.tensor([count for _, count in rows], dtype=torch.int32)
    q_TID = torch.randn(len(rows), num_heads, dim, generator=generator).to(dtype)
    weights_TI = torch.randn(len(rows), num_heads, generator=generator) * (dim * num_heads) ** -0.5
    q_TID[num_tokens_T <= 0] = torch.nan
    weights_TI[num_tokens_T <= 0] = torch.nan
    planes = make_index_planes(name, dim, page_tokens, 1 + num_sequences * num_pages, RedZones(torch.device("cpu")))
    table_rows_T = torch.tensor([row for row, _ in rows], dtype=torch.int32)
    case = ScoreCase(q_TID, weights_TI, planes, pages_NP, SparseRows(table_rows_T, num_tokens_T), num_columns)
    for i in range(num_sequences):
        length = max(0, *(count for row, count in rows if row == i), 0)
        store_keys(planes, slots_of(case, i, length), torch.randn(length, dim, generator=generator))
        pages_NP[i, -(-length // page_tokens) :] = -1
    if name == "fp8":
        case.q = torch.empty(q_TID.shape, dtype=torch.float8_e4m3fn)
        quantize_index_queries_reference(q_TID, weights_TI, case.q, weights_TI)
    return case


def slots_of(case: ScoreCase, i_table: int, num_tokens: int) -> torch.Tensor:
    """Index keys of the first tokens of a sequence."""
    token_S, page_tokens = torch.arange(num_tokens), case.planes.page_tokens
    return case.pages[i_table, token_S // page_tokens].long() * page_tokens + token_S % page_tokens


def store_keys(planes: IndexPlanes, slots_X: torch.Tensor, keys_XD: torch.Tensor) -> None:
    """Finished keys into some slots, in plain torch."""
    if planes.scales_S1 is None:
        planes.rows_SD[slots_X] = keys_XD.to(planes.rows_SD.dtype)
    else:
        codes_XD, planes.scales_S1[slots_X] = quantize_index(keys_XD, LEAST_KEY)
        planes.rows_SD.view(torch.uint8)[slots_X] = codes_XD.view(torch.uint8)
