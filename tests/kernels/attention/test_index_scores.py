"""Scores of the index over every kind of page: the kernel against its reference, and that only what a row sees is read and written."""

import pytest
import torch

from holdfast.kernels.attention.index_planes import SparseRows
from holdfast.kernels.attention.index_scores import (
    index_scores_reference,
    index_scores_triton,
)
from kernels.index_cases import ScoreCase, make_score_case, planes_to
from kernels.triton_cases import QUIET, amid_poison
from red_zones import RedZones

pytestmark = QUIET

FORMATS = ["float32", "float16", "fp8", pytest.param("bfloat16", marks=pytest.mark.gpu)]
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "fp8": torch.float32}
UNTOUCHED = -7.0


def scored(function, case: ScoreCase, device="cpu") -> torch.Tensor:
    """Rows apart amid poison, scores between red zones: what was left behind, on the CPU."""
    zones = RedZones(torch.device(device))
    out_TC = zones.allocate(len(case.q), case.num_columns).fill_(UNTOUCHED)
    as_bytes = case.q.flatten(1).view(torch.uint8)
    q_TID = amid_poison(as_bytes.float(), device).byte() if case.q.element_size() == 1 else None
    q_TID = amid_poison(case.q.flatten(1), device) if q_TID is None else q_TID.view(torch.float8_e4m3fn)
    weights_TI = amid_poison(case.weights, device)
    rows = SparseRows(*(numbers.to(device) for numbers in case.rows))
    planes = planes_to(case.planes, device)
    function(q_TID.view(case.q.shape), weights_TI, planes, case.pages.to(device), rows, out_TC)
    zones.check()
    return out_TC.cpu()


def judge(case: ScoreCase, device) -> torch.Tensor:
    """What tokens have that a row sees, within the rounding of sums; all else stays as it was."""
    mine_TC = scored(index_scores_triton, case, device)
    theirs_TC = scored(index_scores_reference, case)
    seen_TC = torch.arange(case.num_columns) < case.rows.num_tokens_T[:, None]
    assert bool((mine_TC[~seen_TC] == UNTOUCHED).all()), "a score was written that no row has"
    assert bool(mine_TC[seen_TC].isfinite().all()), "poison reached a score"
    # Products of e4m3 numbers are added up with fewer bits on a Hopper.
    step = 2**-11 if case.planes.is_quantized else 2**-18
    torch.testing.assert_close(mine_TC[seen_TC], theirs_TC[seen_TC], rtol=step, atol=step)
    return mine_TC


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("num_heads", "dim"), [(64, 128), (32, 128), (64, 64), (3, 48), (1, 16)], ids=lambda number: str(number)
)
def test_every_shape_is_scored_like_the_reference(device, name, num_heads, dim) -> None:
    case = make_score_case([(0, 70), (1, 1), (2, 0), (2, 131)], num_heads, dim, name, dtype=DTYPES[name])
    judge(case, device)
