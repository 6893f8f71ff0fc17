"""Log-probabilities, ranks and most likely tokens from raw logits: numbers on the device, logarithms on the host.

distance   how far a logit lies below the most likely one of its row: 0 or more, inf for a token that cannot be
key        the bits of a distance as int32: they sort as the distances do
weight     exp(-distance / temperature) in units of 2**-40; a vocabulary of 2**22 stays below 2**62

R rows of a block, V vocabulary, K candidates or most likely tokens, X tokens of a row: all of them, or candidates
"""

import math

import torch

from holdfast.kernels.sampling.logprobs import FIXED_COLUMNS
from holdfast.request.sequence import TokenLogprobs

WEIGHT_BITS = 40
_UNIT = 2.0**-WEIGHT_BITS
_LARGEST = torch.finfo(torch.float32).max


def nearest(distance_RV: torch.Tensor, token_ids_V: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the k smallest distances and their token ids, [R, K] each; at equal distances the smaller id is first.

    topk breaks ties arbitrarily, and differently by shape. So a 64-bit key holds the distance in its high half and
    the token's id in the low half: no two keys are equal.
    """
    ids_RV = token_ids_V.expand_as(distance_RV)
    key_RV = torch.stack((ids_RV, distance_RV.view(torch.int32)), dim=-1).view(torch.int64).squeeze(-1)
    key_RK = key_RV.topk(k, dim=1, largest=False).values
    return (key_RK >> 32).to(torch.int32).view(torch.float32), key_RK & 0xFFFFFFFF


def distances_(logits_RV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn logits into distances in place; also return [R, 1]: True if a row has a token that can be chosen.

    A row without one (all -inf, or NaN) is computed like the others, and gives garbage in its own place only.
    A logit of +inf counts as the largest finite number, so that its distance is 0 and not NaN.
    """
    logits_RV.clamp_(max=_LARGEST)
    amax_R1 = logits_RV.amax(dim=1, keepdim=True) + 0.0  # -0.0 - 0.0 would be -0.0, whose bits sort before 0.0
    return torch.sub(amax_R1, logits_RV, out=logits_RV), amax_R1 > -torch.inf


def weights(
    distance_RX: torch.Tensor, negative_temperature_R1: torch.Tensor, min_p_R1: torch.Tensor | None
) -> torch.Tensor:
    """Return the weights of tokens; 0 for those below `min_p` times the most likely one."""
    share_RX = torch.div(distance_RX, negative_temperature_R1).exp_()
    if min_p_R1 is not None:
        share_RX.masked_fill_(share_RX < min_p_R1, 0)
    return share_RX.mul_(2.0**WEIGHT_BITS).to(torch.int64)


def nucleus_weight(total_R1: torch.Tensor, top_p_R1: torch.Tensor) -> torch.Tensor:
    """Return the weight that the nucleus must reach: ceil(top_p * total), or the total if top_p is 1."""
    needed_R1 = (total_R1.to(torch.float64) * top_p_R1).ceil_().to(torch.int64).clamp_(min=1)
    return torch.where(top_p_R1 < 1, torch.minimum(needed_R1, total_R1), total_R1)


def draw_(weight_RX: torch.Tensor, uniform_R1: torch.Tensor) -> torch.Tensor:
    """Return the first index whose running total exceeds uniform * total, [R, 1]; turn weights into running totals.

    The total exceeds the searched value by at least 1, so the index exists. The running total rises there, so its
    weight is not 0: no filtered token, and none beyond the vocabulary, can come out, however close to 1 the
    random number is.
    """
    running_RX = weight_RX.cumsum_(dim=1)
    total_R1 = running_RX[:, -1:]
    looked_for_R1 = (total_R1.to(torch.float64) * uniform_R1).to(torch.int64)
    looked_for_R1 = torch.minimum(looked_for_R1, total_R1 - 1)
    return torch.searchsorted(running_RX, looked_for_R1, right=True).clamp_(max=weight_RX.shape[1] - 1)


def logprob_columns(
    logits_RV: torch.Tensor, token_ids_R1: torch.Tensor, vocabulary_V: torch.Tensor, num_top: int
) -> torch.Tensor:
    """Return all numbers for the host, float64 [R, 4 + 2K], for one copy. Overwrites the logits."""
    distance_RV, choosable_R1 = distances_(logits_RV)
    minus_one_R1 = distance_RV.new_full((distance_RV.shape[0], 1), -1.0)
    total_R1 = weights(distance_RV, minus_one_R1, None).sum(dim=1, keepdim=True)
    distance_R1 = distance_RV.gather(1, token_ids_R1)
    rank_R1 = (distance_RV < distance_R1).sum(dim=1, keepdim=True).add_(1)
    columns = [choosable_R1, total_R1, distance_R1, rank_R1]
    if num_top:
        top_distance_RK, top_ids_RK = nearest(distance_RV, vocabulary_V, num_top)
        columns += [top_ids_RK, top_distance_RK]
    return torch.cat([column.to(torch.float64) for column in columns], dim=1)


def read_logprobs(token_id: int, row: list[float], num_top: int) -> TokenLogprobs:
    """Read one row of `logprob_columns`; a row that nothing can be chosen from has nan, rank 0 and no tops."""
    choosable, total, distance, rank = row[:FIXED_COLUMNS]
    if not choosable:
        return TokenLogprobs(token_id, math.nan, 0, ())
    log_total = math.log(total * _UNIT)
    num_columns = (len(row) - FIXED_COLUMNS) // 2
    ids = row[FIXED_COLUMNS : FIXED_COLUMNS + num_columns]
    distances = row[FIXED_COLUMNS + num_columns :]
    top = tuple((int(ids[i]), 0.0 - distances[i] - log_total) for i in range(min(num_top, num_columns)))
    return TokenLogprobs(token_id, 0.0 - distance - log_total, int(rank), top)
