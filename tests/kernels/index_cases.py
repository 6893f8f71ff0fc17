"""Index keys of sparse latents (DSA) in every format, amid red zones and full of poison, and steps that score them."""

from dataclasses import dataclass

import torch

from holdfast.kernels.attention.index_planes import IndexPlanes, SparseRows
from holdfast.kernels.attention.write_index import LEAST_KEY, quantize_index, quantize_index_queries_reference
from holdfast.quant.formats import index_planes
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
    """A copy."""
    scales = planes.scales_S1
    return planes._replace(rows_SD=planes.rows_SD.to(device), scales_S1=None if scales is None else scales.to(device))


@dataclass
class ScoreCase:
    """Arguments of `index_scores` but for its output, on the CPU: queries are codes where the planes are."""

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
    seed: int = 0,
) -> ScoreCase:
    """Rows of (row of the page table, tokens): slots and pages that no row sees are NaN, and so is what a row without tokens has."""
    generator = torch.Generator().manual_seed(seed)
    num_sequences, num_columns = 1 + max(row for row, _ in rows), max(max(count for _, count in rows), 1) + 3
    lengths = [max([0, *(count for row, count in rows if row == i)]) for i in range(num_sequences)]
    num_pages = -(-num_columns // page_tokens)
    # Page 0 is nobody's: it is what masked loads read.
    pages_NP = 1 + torch.randperm(num_sequences * num_pages, generator=generator).view(num_sequences, num_pages)
    planes = make_index_planes(name, dim, page_tokens, 1 + num_sequences * num_pages, RedZones(torch.device("cpu")))
    for i in range(num_sequences):
        token_S = torch.arange(lengths[i])
        slot_S = pages_NP[i, token_S // page_tokens] * page_tokens + token_S % page_tokens
        store_keys(planes, slot_S, torch.randn(lengths[i], dim, generator=generator))
        pages_NP[i, -(-lengths[i] // page_tokens) :] = -1
    num_tokens_T = torch.tensor([count for _, count in rows], dtype=torch.int32)
    q_TID = torch.randn(len(rows), num_heads, dim, generator=generator).to(dtype)
    weights_TI = torch.randn(len(rows), num_heads, generator=generator) * (dim * num_heads) ** -0.5
    q_TID[num_tokens_T <= 0] = torch.nan
    weights_TI[num_tokens_T <= 0] = torch.nan
    if name == "fp8":
        codes_TID = torch.empty(q_TID.shape, dtype=torch.float8_e4m3fn)
        quantize_index_queries_reference(q_TID, weights_TI, codes_TID, weights_TI)
        q_TID = codes_TID
    table_rows_T = torch.tensor([row for row, _ in rows], dtype=torch.int32)
    return ScoreCase(q_TID, weights_TI, planes, pages_NP.int(), SparseRows(table_rows_T, num_tokens_T), num_columns)


def store_keys(planes: IndexPlanes, slots_X: torch.Tensor, keys_XD: torch.Tensor) -> None:
    """Finished keys into some slots, in plain torch."""
    if planes.scales_S1 is None:
        planes.rows_SD[slots_X] = keys_XD.to(planes.rows_SD.dtype)
    else:
        codes_XD, planes.scales_S1[slots_X] = quantize_index(keys_XD, LEAST_KEY)
        planes.rows_SD.view(torch.uint8)[slots_X] = codes_XD.view(torch.uint8)
