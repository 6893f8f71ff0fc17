"""Where a sorted row would be cut, found without sorting it: top_k and top_p over a whole vocabulary.

Tokens stand in one order: the smaller distance first, and the smaller id among equals. Three histograms of a key's
bits, each inside the bucket that the one before has found, give the key at which the weights reach what is needed.
All shapes are fixed, all sums are of whole numbers, and the memory is what the plan says; a sort's is not.
"""

import torch

from holdfast.runner.planning.sampling_terms import NUM_BUCKETS

# R rows of a block, V vocabulary, B buckets and one on each side for keys outside of them

_SHIFTS = (20, 9, 0)
"""A key has 31 bits: 11, 11 and 9 of them."""


def cut(key_RV: torch.Tensor, weight_RV: torch.Tensor, needed_R1: torch.Tensor) -> torch.Tensor:
    """Booleans: which tokens fall away when the first ones whose weights reach `needed` are kept."""
    last_key_R1, before_R1 = _last_key(key_RV, weight_RV, needed_R1)
    tie_RV = key_RV == last_key_R1
    tie_weight_RV = torch.where(tie_RV, weight_RV, 0).cumsum_(dim=1).sub_(weight_RV)
    late_tie_RV = tie_RV.logical_and_(tie_weight_RV >= needed_R1 - before_R1)
    return late_tie_RV.logical_or_(key_RV > last_key_R1)


def _last_key(
    key_RV: torch.Tensor, weight_RV: torch.Tensor, needed_R1: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """[R, 1] each: the key with which the weights of all keys up to it reach `needed`, and the weight before it."""
    start_R1 = key_RV.new_zeros((key_RV.shape[0], 1))
    before_R1 = torch.zeros_like(needed_R1)
    for shift in _SHIFTS:
        running_RB = _histogram(key_RV, weight_RV, start_R1, shift).cumsum_(dim=1)
        bucket_R1 = torch.searchsorted(running_RB, needed_R1).clamp_(1, NUM_BUCKETS)
        before_R1 = running_RB.gather(1, bucket_R1 - 1)
        start_R1 = start_R1 + ((bucket_R1 - 1) << shift).to(torch.int32)
    return start_R1, before_R1


def _histogram(key_RV: torch.Tensor, weight_RV: torch.Tensor, start_R1: torch.Tensor, shift: int) -> torch.Tensor:
    """Weights by bucket of 2**shift keys from `start` on; the first bucket is for keys before, the last for later ones."""
    bucket_RV = (key_RV - start_R1).bitwise_right_shift_(shift).clamp_(-1, NUM_BUCKETS).add_(1).to(torch.int64)
    histogram_RB = weight_RV.new_zeros((key_RV.shape[0], NUM_BUCKETS + 2))
    return histogram_RB.scatter_add_(1, bucket_RV, weight_RV)
