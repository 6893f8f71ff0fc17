"""Logits as whole-number weights: sums of whole numbers are exact, so their order, and with it the batch, cannot matter.

distance   how far a logit lies below the likeliest one of its row: 0 or more, inf for a token that cannot be
key        the bits of a distance as int32: they sort as the distances do
weight     exp(-distance / temperature) in units of 2**-40; a vocabulary of 2**22 stays below 2**62
"""

import torch

# R rows of a block, V vocabulary, X tokens of a row: all of them, or candidates

WEIGHT_BITS = 40
_LARGEST = torch.finfo(torch.float32).max


def distances_(logits_RV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn a block of logits into distances in its own memory; and [R, 1]: has the row a token that can be chosen?

    A row without one, which is all -inf or holds NaN, is worked on to its end like the others, and gives nonsense in
    its own place only. A logit of +inf is taken for the largest finite number, so that its distance is 0 and not NaN.
    """
    logits_RV.clamp_(max=_LARGEST)
    likeliest_R1 = logits_RV.amax(dim=1, keepdim=True) + 0.0  # -0.0 - 0.0 would be -0.0, whose bits sort before 0.0
    return torch.sub(likeliest_R1, logits_RV, out=logits_RV), likeliest_R1 > -torch.inf


def weights(
    distance_RX: torch.Tensor, negative_temperature_R1: torch.Tensor, min_p_R1: torch.Tensor | None
) -> torch.Tensor:
    """Weights of tokens; those below a share `min_p` of the likeliest one weigh nothing."""
    share_RX = torch.div(distance_RX, negative_temperature_R1).exp_()
    if min_p_R1 is not None:
        share_RX.masked_fill_(share_RX < min_p_R1, 0)
    return share_RX.mul_(2.0**WEIGHT_BITS).to(torch.int64)


def nucleus_weight(total_R1: torch.Tensor, top_p_R1: torch.Tensor) -> torch.Tensor:
    """The weight that the likeliest tokens have to reach: ceil(top_p * total), and all of it where top_p is 1."""
    needed_R1 = (total_R1.to(torch.float64) * top_p_R1).ceil_().to(torch.int64).clamp_(min=1)
    return torch.where(top_p_R1 < 1, torch.minimum(needed_R1, total_R1), total_R1)


def draw_(weight_RX: torch.Tensor, uniform_R1: torch.Tensor) -> torch.Tensor:
    """[R, 1]: the first place whose running total exceeds uniform * total. The weights become their running totals.

    The total exceeds what is looked for by at least 1, so the place exists; and the running total rises there, so its
    weight is not zero: neither a filtered token nor one beyond the vocabulary can come out, however close to 1 the
    random number is.
    """
    running_RX = weight_RX.cumsum_(dim=1)
    total_R1 = running_RX[:, -1:]
    looked_for_R1 = (total_R1.to(torch.float64) * uniform_R1).to(torch.int64)
    looked_for_R1 = torch.minimum(looked_for_R1, total_R1 - 1)
    return torch.searchsorted(running_RX, looked_for_R1, right=True).clamp_(max=weight_RX.shape[1] - 1)
