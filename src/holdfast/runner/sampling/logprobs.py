"""Log-probabilities, ranks and likeliest tokens from raw logits: numbers on the device, logarithms on the host."""

import math

import torch

from holdfast.kernels.logits.logprob_rows import FIXED_COLUMNS
from holdfast.runner.sampling.candidates import nearest
from holdfast.runner.sampling.result import TokenLogprobs
from holdfast.runner.sampling.token_weights import WEIGHT_BITS, distances_, weights

# R rows of a block, V vocabulary, K likeliest tokens

_UNIT = 2.0**-WEIGHT_BITS


def logprob_columns(
    logits_RV: torch.Tensor, token_ids_R1: torch.Tensor, vocabulary_V: torch.Tensor, num_top: int
) -> torch.Tensor:
    """float64 [R, 4 + 2K]: all that the host needs, ready for one copy. The logits are used up."""
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
    """One row of `logprob_columns` in words; a row that nothing can be chosen from has nan, rank 0 and no tops."""
    choosable, total, distance, rank = row[:FIXED_COLUMNS]
    if not choosable:
        return TokenLogprobs(token_id, math.nan, 0, ())
    log_total = math.log(total * _UNIT)
    num_columns = (len(row) - FIXED_COLUMNS) // 2
    ids = row[FIXED_COLUMNS : FIXED_COLUMNS + num_columns]
    distances = row[FIXED_COLUMNS + num_columns :]
    top = tuple((int(ids[i]), 0.0 - distances[i] - log_total) for i in range(min(num_top, num_columns)))
    return TokenLogprobs(token_id, 0.0 - distance - log_total, int(rank), top)
