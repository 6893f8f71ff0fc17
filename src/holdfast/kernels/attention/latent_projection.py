"""kv_b on both sides of latent attention (MLA): queries into the latent space, and what was attended to out of it; no copy of it is made.

T rows, N query heads, D = P + R elements of a query head, L latent, V value elements of a head, kv_b [N, P + V, L]
"""

import torch


def absorb_queries(q_TND: torch.Tensor, kv_b_NXL: torch.Tensor, out_TNX: torch.Tensor) -> torch.Tensor:
    """[T, N, L + R]: of every head q[:P] @ W_UK, then its rotated elements as they are."""
    return absorb_queries_reference(q_TND, kv_b_NXL, out_TNX)


def absorb_queries_reference(q_TND: torch.Tensor, kv_b_NXL: torch.Tensor, out_TNX: torch.Tensor) -> torch.Tensor:
    """The same in plain torch."""
    latent_dim = kv_b_NXL.shape[-1]
    nope_dim = q_TND.shape[-1] - (out_TNX.shape[-1] - latent_dim)
    absorbed_TNL = torch.einsum("tnp,npl->tnl", q_TND[..., :nope_dim].float(), kv_b_NXL[:, :nope_dim].float())
    out_TNX[..., :latent_dim] = absorbed_TNL.to(out_TNX.dtype)
    out_TNX[..., latent_dim:] = q_TND[..., nope_dim:]
    return out_TNX


def project_values(latent_TNL: torch.Tensor, kv_b_NXL: torch.Tensor, out_TNV: torch.Tensor) -> torch.Tensor:
    """[T, N, V]: of every head what was attended to, by W_UV; rows and heads of `out_TNV` may lie apart."""
    return project_values_reference(latent_TNL, kv_b_NXL, out_TNV)


def project_values_reference(latent_TNL: torch.Tensor, kv_b_NXL: torch.Tensor, out_TNV: torch.Tensor) -> torch.Tensor:
    """The same in plain torch."""
    value_dim = out_TNV.shape[-1]
    w_NVL = kv_b_NXL[:, kv_b_NXL.shape[1] - value_dim :].float()
    return out_TNV.copy_(torch.einsum("tnl,nvl->tnv", latent_TNL.float(), w_NVL).to(out_TNV.dtype))
