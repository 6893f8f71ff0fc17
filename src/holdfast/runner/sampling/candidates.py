"""The k likeliest tokens of each row, in the one order that makes them unique."""

import torch

# R rows of a block, V vocabulary, K candidates


def nearest(distance_RV: torch.Tensor, token_ids_V: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k smallest distances and their token ids, [R, K] each; among equal distances the smaller id comes first.

    topk alone takes any of the equals, and not the same ones for every shape. So a token's id stands in the low half
    of a 64-bit key whose high half is its distance: no two keys are equal.
    """
    ids_RV = token_ids_V.expand_as(distance_RV)
    key_RV = torch.stack((ids_RV, distance_RV.view(torch.int32)), dim=-1).view(torch.int64).squeeze(-1)
    key_RK = key_RV.topk(k, dim=1, largest=False).values
    return (key_RK >> 32).to(torch.int32).view(torch.float32), key_RK & 0xFFFFFFFF
