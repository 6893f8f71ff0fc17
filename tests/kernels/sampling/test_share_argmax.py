"""Argmax by shares of the vocabulary: kernels against their references, and against the argmax of the whole."""

import pytest
import torch

from holdfast.kernels.sampling.argmax import (
    BLOCK,
    argmax_reference,
    argmax_share_reference,
    argmax_share_triton,
    first_largest_reference,
    first_largest_triton,
)
from kernels.logit_cases import INF, NAN, make_scratch
from kernels.triton_cases import QUIET

pytestmark = QUIET
VOCAB_SIZE = 1003


def rows() -> torch.Tensor:
    """Ordinary ones, ties among shares, NaN, and -inf in some shares or all."""
    logits_SW = torch.randn(7, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    logits_SW[1, [3, 700, 1002]] = 9.0
    logits_SW[2, 900] = NAN
    logits_SW[3] = -INF
    logits_SW[4, :800] = -INF
    logits_SW[5, [1, 999]] = INF
    logits_SW[6, 0] = NAN
    return logits_SW


@pytest.mark.parametrize("num_shares", [1, 2, 3, 5])
def test_share_argmax_equals_argmax_of_the_whole(num_shares, guarded):
    logits_SW = rows()
    width = -(-VOCAB_SIZE // num_shares)
    whole_S = torch.zeros(len(logits_SW), dtype=torch.int64)
    argmax_reference(logits_SW, whole_S, None)
    scratch = make_scratch(guarded, len(logits_SW), VOCAB_SIZE, 64, 1)
    for find, join in ((argmax_share_triton, first_largest_triton), (argmax_share_reference, first_largest_reference)):
        all_NSX = guarded(num_shares, len(logits_SW), 2, dtype=torch.float32)
        for share in range(num_shares):
            own_SV = logits_SW[:, share * width : (share + 1) * width].contiguous()
            find(own_SV, share * width, all_NSX[share], scratch)
        out_S = guarded(len(logits_SW), dtype=torch.int64).fill_(-9)
        join(all_NSX, out_S)
        assert out_S.tolist() == whole_S.tolist(), join.__name__


def test_share_argmax_logit_is_the_largest_of_its_share(guarded):
    logits_SV = rows()
    found, expected = (guarded(len(logits_SV), 2, dtype=torch.float32) for _ in range(2))
    scratch = make_scratch(guarded, len(logits_SV), VOCAB_SIZE, 64, 1)
    argmax_share_triton(logits_SV, 40, found, scratch)
    argmax_share_reference(logits_SV, 40, expected, scratch)
    assert torch.equal(found[:, 1].nan_to_num(7.0), expected[:, 1].nan_to_num(7.0))
    ordinary_S = expected[:, 1].isfinite()
    assert torch.equal(found[ordinary_S, 0], expected[ordinary_S, 0])


@pytest.mark.parametrize("num_rows", [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 3])
def test_share_argmax_join_takes_rows_of_every_block(guarded, num_rows):
    all_NSX = guarded(3, num_rows, 2, dtype=torch.float32)
    all_NSX.copy_(torch.randint(0, 4, all_NSX.shape, generator=torch.Generator().manual_seed(num_rows)).float())
    results = []
    for join in (first_largest_triton, first_largest_reference):
        results.append(guarded(num_rows, dtype=torch.int64).fill_(-9))
        join(all_NSX, results[-1])
    assert torch.equal(*results)
