"""Absorbed attention to chosen tokens: against float64 and its reference in every format, amid poison and red zones."""

import pytest
import torch

from holdfast.kernels.attention.latent_attention import latent_attention_reference
from holdfast.kernels.attention.sparse_attention import sparse_attention_reference
from holdfast.kernels.attention.sparse_geometry import MAX_SPLITS, sparse_partials, sparse_splits
from holdfast.kernels.attention.tiled_attention import TileWork
from kernels.latent_page_cases import QUANTIZED_LATENTS
from kernels.sparse_cases import SparseCase, run_sparse, sparse_case
from kernels.tiled_cases import NAN

# Numpy, on which the interpreter runs, warns of the logarithm of an empty sum.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered:RuntimeWarning")

FORMATS = pytest.mark.parametrize("name", ["plain", *QUANTIZED_LATENTS])
CONTEXTS = [100, 0, 37, 33, 7, 0]
"""Longer than the lists of 33 places, not choosing, as long, shorter."""


@FORMATS
def test_the_reference_is_plain_attention_to_the_list(name) -> None:
    case = sparse_case(CONTEXTS, 33, name)
    out, exact = run_sparse(case, torch.device("cpu"), function=sparse_attention_reference), case.exact()
    chooses = case.num_tokens_T > 0
    torch.testing.assert_close(out[chooses].double(), exact[chooses], rtol=1e-5, atol=1e-5)
    assert out[~chooses].isnan().all(), "rows that do not choose stay as they are"


@FORMATS
def test_a_list_of_everything_is_dense_attention(name) -> None:
    """To the reference of the dense kernel, over the same pages."""
    case = sparse_case([20, 9], 32, name)
    out = run_sparse(case, torch.device("cpu"), function=sparse_attention_reference)
    torch.testing.assert_close(out, dense(case), rtol=1e-6, atol=1e-6)


def dense(case: SparseCase) -> torch.Tensor:
    tiles = [
        (int(table_row), row, 1, int(context) - 1, 0, int(context), -1, 1)
        for row, (table_row, context) in enumerate(zip(case.table_rows_T, case.num_tokens_T, strict=True))
    ]
    tiles_X8 = torch.tensor([(len(tiles), *7 * [0]), *tiles], dtype=torch.int32)
    work = TileWork(tiles_X8, torch.empty(0, 2, dtype=torch.int32), True, False, has_merge=False)
    out_TNL = torch.full((*case.q_TNX.shape[:2], case.planes.latent_dim), NAN)
    nothing = torch.empty(0)
    return latent_attention_reference(
        case.q_TNX, case.planes, case.table_NP, work, case.scale, nothing, nothing, out_TNL, 1
    )


@pytest.mark.parametrize("num_sms", [1, 20, 132, 160])
@pytest.mark.parametrize("num_heads", [1, 16, 20, 64, 65, 128])
def test_partials_are_planned_for_every_number_of_rows(num_heads, num_sms) -> None:
    most = 0
    for num_rows in range(1, 600):
        splits = sparse_splits(num_rows, num_heads, num_sms)
        assert 1 <= splits <= MAX_SPLITS
        most = max(most, num_rows * splits if splits > 1 else 0)
        assert most <= sparse_partials(num_rows, num_heads)
    assert sparse_partials(600, num_heads) * num_heads <= 4 * 132 * 64


def test_few_rows_fill_the_machine() -> None:
    assert [sparse_splits(num_rows, 16, 132) for num_rows in (1, 16, 32, 64, 264, 265)] == [32, 17, 9, 5, 1, 1]
    assert [sparse_splits(num_rows, 128, 132) for num_rows in (1, 16, 64, 132, 133)] == [32, 9, 3, 1, 1]
