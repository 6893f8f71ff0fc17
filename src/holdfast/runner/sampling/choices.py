"""One random token a row: of the whole vocabulary, of a few candidates, or of a nucleus of any size.

All three follow one rule and so agree to the bit wherever two of them apply; they differ in what they cost. Filters
keep the first tokens of one order, the likelier first and the smaller id among equals, as far as top_k tokens or a
weight of top_p of the total; then the random number picks a place in the kept weights, in the vocabulary's order.
"""

import torch

from holdfast.runner.planning.sampling_terms import MAX_NARROW_TOP_K
from holdfast.runner.sampling.candidates import nearest
from holdfast.runner.sampling.cutoffs import cut
from holdfast.runner.sampling.sampling_batch import RowParameters
from holdfast.runner.sampling.token_weights import draw_, nucleus_weight, weights

# R rows of a block, V vocabulary, K candidates, X either


def choose_unfiltered(distance_RV: torch.Tensor, params: RowParameters, vocabulary_V: torch.Tensor) -> torch.Tensor:
    """[R, 1]: token ids; of tokens that min_p leaves, where it is used."""
    return draw_(_weights(distance_RV, params), params.uniform)


def choose_narrow(distance_RV: torch.Tensor, params: RowParameters, vocabulary_V: torch.Tensor) -> torch.Tensor:
    """[R, 1]: token ids; every row has a top_k of at most MAX_NARROW_TOP_K."""
    distance_RK, ids_RK = nearest(distance_RV, vocabulary_V, params.max_top_k)
    weight_RK = _weights(distance_RK, params)
    weight_RK.masked_fill_(vocabulary_V[: params.max_top_k] >= params.top_k, 0)
    if params.any_top_p:
        running_RK = weight_RK.cumsum(dim=1)
        needed_R1 = nucleus_weight(running_RK[:, -1:], params.top_p)
        weight_RK.masked_fill_(running_RK.sub_(weight_RK) >= needed_R1, 0)
    return _draw_candidate(ids_RK, weight_RK, params.uniform)


def choose_wide(distance_RV: torch.Tensor, params: RowParameters, vocabulary_V: torch.Tensor) -> torch.Tensor:
    """[R, 1]: token ids; any top_k and top_p."""
    key_RV = distance_RV.view(torch.int32)
    weight_RV = _weights(distance_RV, params)
    if params.max_top_k:
        one_RV = weight_RV.new_ones(()).expand_as(weight_RV)
        weight_RV.masked_fill_(cut(key_RV, one_RV, params.top_k), 0)
    if not params.any_top_p:
        return draw_(weight_RV, params.uniform)
    needed_R1 = nucleus_weight(weight_RV.sum(dim=1, keepdim=True), params.top_p)
    return _choose_looking(distance_RV, weight_RV, needed_R1, params.uniform, vocabulary_V)


def _choose_nucleus(
    key_RV: torch.Tensor, weight_RV: torch.Tensor, needed_R1: torch.Tensor, uniform_R1: torch.Tensor
) -> torch.Tensor:
    weight_RV.masked_fill_(cut(key_RV, weight_RV, needed_R1), 0)
    return draw_(weight_RV, uniform_R1)


def _choose_looking(
    distance_RV: torch.Tensor,
    weight_RV: torch.Tensor,
    needed_R1: torch.Tensor,
    uniform_R1: torch.Tensor,
    vocabulary_V: torch.Tensor,
) -> torch.Tensor:
    """The same choice by a look at the numbers: most nuclei are small, and then candidates do."""
    _, ids_RK = nearest(distance_RV, vocabulary_V, min(MAX_NARROW_TOP_K, len(vocabulary_V)))
    weight_RK = weight_RV.gather(1, ids_RK)
    running_RK = weight_RK.cumsum(dim=1)
    large_R = running_RK[:, -1] < needed_R1[:, 0]
    weight_RK.masked_fill_(running_RK.sub_(weight_RK) >= needed_R1, 0)
    chosen_R1 = _draw_candidate(ids_RK, weight_RK, uniform_R1)
    for row in large_R.nonzero()[:, 0].tolist():
        one = slice(row, row + 1)
        key_1V = distance_RV[one].view(torch.int32)
        chosen_R1[one] = _choose_nucleus(key_1V, weight_RV[one], needed_R1[one], uniform_R1[one])
    return chosen_R1


def _draw_candidate(ids_RK: torch.Tensor, weight_RK: torch.Tensor, uniform_R1: torch.Tensor) -> torch.Tensor:
    ids_RK, order_RK = ids_RK.sort(dim=1)
    return ids_RK.gather(1, draw_(weight_RK.gather(1, order_RK), uniform_R1))


def _weights(distance_RX: torch.Tensor, params: RowParameters) -> torch.Tensor:
    return weights(distance_RX, params.negative_temperature, params.min_p if params.any_min_p else None)
