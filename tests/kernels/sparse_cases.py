"""Lists of chosen tokens over paged latents in every format; whatever no list names is poison, pages that no list needs do not exist."""

from dataclasses import dataclass

import torch

from holdfast.kernels.latent.latent_attention import sparse_attention
from holdfast.kernels.latent.latent_geometry import sparse_splits
from holdfast.kernels.latent.latent_planes import LatentCall, LatentPlanes, SparseRows, read_latents, store_latents
from kernels.exactness import random
from kernels.latent_page_cases import make_latent_planes, on_device
from kernels.tiled_cases import BEYOND, NAN, amid
from red_zones import RedZones

# T rows, N query heads, L latent, S slots, P pages, K places of a list

BEFORE = 7.0
"""What stands in the output before: neither a result nor what poison would leave."""


@dataclass
class SparseCase:
    """Rows of a step, each with a list of its own; `latents` are what the pages hold of row t's sequence, NaN where nothing."""

    q_TNX: torch.Tensor
    planes: LatentPlanes
    table_NP: torch.Tensor
    table_rows_T: torch.Tensor
    num_tokens_T: torch.Tensor
    tokens_TK: torch.Tensor
    latents: list[torch.Tensor]
    scale: float

    def exact(self) -> torch.Tensor:
        """[T, N, L] in float64 from the latents themselves; NaN in rows that do not choose."""
        out_TNL = torch.full((*self.q_TNX.shape[:2], self.planes.latent_dim), NAN, dtype=torch.float64)
        for row, (token_K, latents_SX) in enumerate(zip(self.tokens_TK, self.latents, strict=True)):
            if self.num_tokens_T[row] == 0:
                continue
            seen_SX = latents_SX[token_K[token_K >= 0].long()].double()
            weights_NS = (self.q_TNX[row].double() @ seen_SX.T * self.scale).softmax(-1)
            out_TNL[row] = weights_NS @ seen_SX[:, : self.planes.latent_dim]
        return out_TNL

    def rows_on(self, device: torch.device) -> SparseRows:
        """In buffers that are longer than the step."""
        beyond = torch.full((3,), BEYOND, dtype=torch.int32)
        table_rows_T, num_tokens_T = (
            torch.cat((held, beyond)).to(device) for held in (self.table_rows_T, self.num_tokens_T)
        )
        return SparseRows(table_rows_T, num_tokens_T)


def sparse_case(
    contexts: list[int],
    top_k: int,
    name: str = "plain",
    num_heads: int = 4,
    latent_dim: int = 32,
    rope_dim: int = 16,
    page_tokens: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    q_scale: float = 3.0,
) -> SparseCase:
    """A row for each context, 0 where it does not choose: as many of its tokens as there are up to `top_k`, drawn and sorted."""
    generator = torch.Generator().manual_seed(seed)
    tokens_TK = torch.full((len(contexts), top_k), -1, dtype=torch.int32)
    counts = [-(-context // page_tokens) for context in contexts]
    order = (
        torch.randperm(sum(counts) + 1, generator=generator) + 1
    ).tolist()  # page 0 belongs to no sequence and is all poison
    table_NP = torch.full((len(contexts), max(counts) + 3), BEYOND, dtype=torch.int32)
    planes = _planes(name, latent_dim, rope_dim, page_tokens, len(order) + 1, dtype)
    latents = []
    for row, context in enumerate(contexts):
        drawn_S = torch.randperm(context, generator=generator)[:top_k].sort().values
        tokens_TK[row, : len(drawn_S)] = drawn_S
        wanted_SX = random(len(drawn_S), latent_dim + rope_dim, seed=seed + 100 + row)
        for page in (drawn_S // page_tokens).unique().tolist():
            table_NP[len(contexts) - 1 - row, page] = order.pop()
        slot_S = table_NP[len(contexts) - 1 - row, drawn_S // page_tokens].long() * page_tokens + drawn_S % page_tokens
        store_latents(planes, slot_S, wanted_SX[:, :latent_dim], wanted_SX[:, latent_dim:])
        held_SX = torch.full((context, latent_dim + rope_dim), NAN)
        held_SX[drawn_S] = read_latents(planes, slot_S, torch.float32)
        latents.append(held_SX)
    q_TNX = random(len(contexts), num_heads, latent_dim + rope_dim, seed=seed + 1, scale=q_scale).to(dtype)
    table_rows_T = torch.arange(len(contexts) - 1, -1, -1, dtype=torch.int32)
    num_tokens_T = torch.tensor(contexts, dtype=torch.int32)
    scale = (latent_dim + rope_dim) ** -0.5
    for row, context in enumerate(contexts):
        if context == 0:  # nothing of such a row may be followed
            q_TNX[row], tokens_TK[row], table_rows_T[row] = NAN, BEYOND, BEYOND
    return SparseCase(q_TNX, planes, table_NP, table_rows_T, num_tokens_T, tokens_TK, latents, scale)


def _planes(
    name: str, latent_dim: int, rope_dim: int, page_tokens: int, num_pages: int, dtype: torch.dtype
) -> LatentPlanes:
    zones = RedZones(torch.device("cpu"))
    if name != "plain":
        return make_latent_planes(name, latent_dim, rope_dim, page_tokens, num_pages, zones)
    rows_SX = torch.full((num_pages * page_tokens, latent_dim + rope_dim), NAN, dtype=dtype)
    return LatentPlanes("plain", latent_dim, rope_dim, page_tokens, rows_SX)


def run_sparse(case: SparseCase, device: torch.device, num_sms: int = 1, function=sparse_attention) -> torch.Tensor:
    """The kernel on the device; what it writes lies between red zones, and there is no partial more than it asks for."""
    zones = RedZones(device)
    num_rows, num_heads, _ = case.q_TNX.shape
    latent_dim, dtype = case.planes.latent_dim, case.q_TNX.dtype
    splits = sparse_splits(num_rows, num_heads, num_sms)
    num_partials = num_rows * splits if splits > 1 else 0
    out_TNL = zones.allocate(num_rows, num_heads, latent_dim, dtype=dtype).fill_(BEFORE)
    partial_out_CX = zones.allocate(num_partials, num_heads * latent_dim).fill_(NAN)
    partial_lse_CH = zones.allocate(num_partials, num_heads).fill_(NAN)
    planes = case.planes
    if planes.kind == "plain":
        planes = planes._replace(rows_SX=amid(planes.rows_SX, device))
    call = LatentCall(
        amid(case.q_TNX, device),
        on_device(planes, device),
        case.table_NP.to(device),
        case.scale,
        partial_out_CX,
        partial_lse_CH,
        out_TNL,
        num_sms,
    )
    result = function(call, case.rows_on(device), case.tokens_TK.to(device))
    assert result is out_TNL, "the output is the one that was given"
    zones.check()
    return out_TNL.cpu()
