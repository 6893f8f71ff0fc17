"""Tokens chosen by score: the K largest, ties to the lower position, in rising order, whatever else is in the batch."""

import pytest
import torch

from holdfast.kernels.attention.index_planes import SparseRows
from holdfast.kernels.attention.top_k_tokens import top_k_tokens_reference

INF, NAN = float("inf"), float("nan")


def rows_of(num_tokens, device="cpu"):
    lengths = torch.tensor(num_tokens, dtype=torch.int32, device=device)
    return SparseRows(torch.zeros_like(lengths), lengths)


def by_python(scores, num_tokens, k):
    """The definition, a row at a time: NaN after everything, then by score, then by position."""
    taken = []
    for row, length in zip(scores.tolist(), num_tokens, strict=True):
        order = sorted(range(length), key=lambda p: (row[p] != row[p], 0.0 if row[p] != row[p] else -row[p], p))
        chosen = sorted(order[:k])
        taken.append(chosen + [-1] * (k - len(chosen)))
    return taken


SPECIAL = torch.tensor(
    [
        [0.0, -0.0, 0.0, -0.0, 1e-45, -1e-45],
        [NAN, -INF, INF, NAN, -INF, 3.4e38],
        [NAN, NAN, NAN, NAN, NAN, NAN],
        [2.0, 1.0, 2.0, 1.0, 2.0, 1.0],
        [-1.0, -2.0, -1.0, -2.0, -1.0, -2.0],
    ]
)


@pytest.mark.parametrize("k", [1, 2, 3, 5, 6, 9], ids=lambda k: f"K{k}")
@pytest.mark.parametrize("length", [0, 1, 4, 6], ids=lambda length: f"{length} tokens")
def test_reference_is_the_definition(k, length):
    lengths = [length] * len(SPECIAL)
    out = torch.full((len(SPECIAL), k), 77, dtype=torch.int32)
    assert top_k_tokens_reference(SPECIAL, rows_of(lengths), out) is out
    assert out.tolist() == by_python(SPECIAL, lengths, k)
