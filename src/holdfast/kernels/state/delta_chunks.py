"""Gated delta rule of sequences with several rows: chunks of C rows, each a product of matrices.

T rows, H value heads (G key heads), K elements of a key, V elements of a value, P places, C rows of a chunk, M chunks

With G the cumulative sum of the logarithm of the decay in a chunk, and D_ij = exp(G_i - G_j) for j <= i:

    A = strictly lower part of beta_i (k_i . k_j) D_ij
    W = (I + A)^-1 beta (v - exp(G) k S)                what the rows write
    out = exp(G) q S + lower part of (q k^T D) W
    S = exp(G_last) S + (exp(G_last - G) k)^T W

Chunks follow each other through S alone, and S is read once a chunk. So a cut between chunks changes no bit.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from holdfast.kernels.operation import operation
from holdfast.kernels.state.delta_inputs import DeltaInputs, delta_gates, normed_heads
from holdfast.kernels.state.state_geometry import BLOCK_ROWS, CHUNK_ROWS
from holdfast.kernels.state.state_rows import StateRows


def delta_chunks_reference(
    inputs: DeltaInputs,
    rows: StateRows,
    state_PHKV: Tensor,
    out_THV: Tensor,
    scratch: Mapping[str, Tensor] | None = None,
) -> None:
    """Advance the states of sequences with several rows and write their outputs; other rows are left alone.

    `scratch` has the tensors of `delta_chunk_specs`; only kernels need it.
    """
    inputs.check(state_PHKV, out_THV)
    for piece in rows.long_pieces():
        state_HKV = state_PHKV[piece.place]
        if piece.start == 0:
            state_HKV.zero_()
        for first in range(piece.row, piece.row + piece.num_rows, CHUNK_ROWS):
            chunk = slice(first, min(first + CHUNK_ROWS, piece.row + piece.num_rows))
            out_HCV = _advance(inputs.at(chunk), state_HKV)
            out_THV[chunk] = out_HCV.transpose(0, 1).to(out_THV.dtype)


def _advance(chunk: DeltaInputs, state_HKV: Tensor) -> Tensor:
    """Advance a state by one chunk in place and return the chunk's outputs."""
    g_CH, _, beta_CH = delta_gates(chunk)
    q_HCK, k_HCK, v_HCV = (x.transpose(0, 1).contiguous() for x in (*normed_heads(chunk), chunk.v_THV.float()))
    beta_HC1 = beta_CH.T.unsqueeze(2)
    # [H, C, 1], or [H, C, K] with gates by channel.
    sum_HCK = (g_CH if chunk.by_channel else g_CH.unsqueeze(2)).transpose(0, 1).cumsum(1)
    decay_HCK, last_HCK = sum_HCK.exp(), sum_HCK[:, -1:]
    system_HCC = (beta_HC1 * _decayed_products(k_HCK, k_HCK, sum_HCK)).tril(-1)
    write_HCV = beta_HC1 * (v_HCV - torch.bmm(k_HCK * decay_HCK, state_HKV))
    write_HCV = torch.linalg.solve_triangular(system_HCC, write_HCV, upper=False, unitriangular=True)
    out_HCV = torch.bmm(q_HCK * decay_HCK, state_HKV)
    out_HCV += torch.bmm(_decayed_products(q_HCK, k_HCK, sum_HCK), write_HCV)
    state_HKV.mul_(last_HCK.exp().mT)
    state_HKV.baddbmm_((k_HCK * (last_HCK - sum_HCK).exp()).mT, write_HCV)
    return out_HCV


def _decayed_products(x_HCK: Tensor, k_HCK: Tensor, sum_HCK: Tensor) -> Tensor:
    """Return the sum over channels of x_i k_j exp(sum_i - sum_j) for j <= i, and zero above the diagonal."""
    if sum_HCK.shape[2] == 1:
        difference_HCC = sum_HCK - sum_HCK.mT
        is_later_CC = torch.ones(difference_HCC.shape[1:], dtype=torch.bool).triu(1)
        return torch.bmm(x_HCK, k_HCK.mT) * difference_HCC.masked_fill_(is_later_CC, -torch.inf).exp_()
    products_HCC = x_HCK.new_zeros((*x_HCK.shape[:2], x_HCK.shape[1]))
    for first in range(0, x_HCK.shape[1], BLOCK_ROWS):
        own = slice(first, first + BLOCK_ROWS)
        # Seen from the first row of a block, both factors of an earlier row's decay are at most 1.
        start_H1K, x_HBK, sum_HBK = sum_HCK[:, first : first + 1], x_HCK[:, own], sum_HCK[:, own]
        k_HEK = k_HCK[:, :first] * (start_H1K - sum_HCK[:, :first]).exp()
        products_HCC[:, own, :first] = torch.bmm(x_HBK * (sum_HBK - start_H1K).exp(), k_HEK.mT)
        decay_HBBK = (sum_HBK.unsqueeze(2) - sum_HBK.unsqueeze(1)).clamp_(max=0).exp_()
        products_HCC[:, own, own] = (decay_HBBK * x_HBK.unsqueeze(2) * k_HCK[:, own].unsqueeze(1)).sum(-1).tril()
    return products_HCC


delta_chunks = operation(
    reference=delta_chunks_reference,
    triton=delta_chunks_reference,
    place=lambda inputs, rows, state_PHKV, out_THV, scratch=None: state_PHKV,
)
