import pytest
import torch

from holdfast.kernels.fp8 import as_kernels_read
from holdfast.kernels.load.place_kernels import numbers_at, report_rows, tile_place
from holdfast.kernels.load.place_rows import UNSEEN
from holdfast.kernels.triton_compat import constexpr, jit, tl
from kernels.exactness import random
from kernels.triton_cases import amid_poison

ROWS, BLOCK = 4, 16


@jit
def _tiles_kernel(
    p_x,
    p_out,
    p_finding,
    num_rows,
    num_columns,
    row_stride,
    column_stride,
    reported,
    ROWS: constexpr,
    BLOCK: constexpr,
):
    """Tiles as they lie, one behind the other in the output; rows from `reported` on are reported."""
    i_row, i_start = tile_place(num_columns, ROWS, BLOCK)
    p_rows = p_x + i_row.to(tl.int64)[:, None] * row_stride
    b_x = numbers_at(p_rows, i_start + tl.arange(0, BLOCK), i_row < num_rows, num_columns, column_stride)
    o_x = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    tl.store(p_out + o_x, b_x)
    report_rows(p_finding, 100 + i_row, (i_row >= reported) & (i_row < num_rows))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("num_rows", "num_columns"), [(4, 16), (5, 33), (1, 1)])
@pytest.mark.parametrize("is_tall", [False, True], ids=["rows", "columns"])
def test_tiles_cover_rows_and_columns_and_nothing_beside_them(device, dtype, num_rows, num_columns, is_tall):
    values = random(num_rows, num_columns).to(dtype)
    x = amid_poison(values.t(), device).t() if is_tall else amid_poison(values, device)
    down, across = -(-num_rows // ROWS), -(-num_columns // BLOCK)
    out = torch.empty(down * across, ROWS, BLOCK, device=device)
    finding = torch.full((1,), UNSEEN, dtype=torch.int32, device=device)
    sizes = (num_rows, num_columns, *x.stride(), num_rows - 1)
    _tiles_kernel[(down * across,)](as_kernels_read(x), out, finding, *sizes, ROWS=ROWS, BLOCK=BLOCK)
    expected = torch.zeros(down * ROWS, across * BLOCK)
    expected[:num_rows, :num_columns] = values.float()
    tiles = expected.view(down, ROWS, across, BLOCK).transpose(1, 2).reshape(down * across, ROWS, BLOCK)
    assert torch.equal(out.cpu(), tiles)
    assert finding.item() == 100 + num_rows - 1


def test_a_finding_is_the_lowest_row_that_was_reported(device):
    x, out = torch.zeros(9, 16, device=device), torch.empty(3, ROWS, BLOCK, device=device)
    finding = torch.full((1,), 106, dtype=torch.int32, device=device)
    for reported, expected in ((9, 106), (7, 106), (5, 105), (8, 105), (0, 100)):
        _tiles_kernel[(3,)](x, out, finding, 9, 16, 16, 1, reported, ROWS=ROWS, BLOCK=BLOCK)
        assert finding.item() == expected
