"""Parts of all ranks added onto a stream with the next norm deferred, in one process: the kernel against plain torch, signals left out."""

import pytest
import torch

from holdfast.kernels.exchange.add_rows import (
    DeferredStream,
    add_rows,
    add_rows_reference,
    add_rows_triton,
    column_tiles,
    row_form,
)
from holdfast.kernels.exchange.signals import MAX_BLOCKS
from holdfast.kernels.exchange.sum_rows import BLOCKS, Ranks, Tiles, sum_rows_reference
from holdfast.kernels.gemm.deferred_rms_norm import (
    AmaxScratch,
    ResidualStream,
    SmallBatchScratch,
    defer_rms_norm_reference,
)
from holdfast.kernels.geometry import FUSED_DECODE_ROWS, GEMV_MIN_BLOCK_N, SMALL_BATCH_BLOCK_N
from kernels.triton_cases import DTYPES

NAN = float("nan")


def operands(guarded, size: int, rows: int, width: int, dtype: torch.dtype):
    """Rooms that are larger than the parts, with NaN behind them; x, and the weight of the next norm."""
    chance = torch.Generator().manual_seed(size * rows * width)
    rooms = []
    for _ in range(size):
        room = guarded(rows * width + 64, dtype=dtype).fill_(NAN)
        room[: rows * width] = torch.randn(rows * width, generator=chance).to(dtype)
        rooms.append(room)
    x, norm_weight = guarded(rows, width, dtype=dtype), guarded(width, dtype=dtype)
    x.copy_(torch.randn(rows, width, generator=chance).to(dtype))
    norm_weight.copy_(1 + 0.3 * torch.randn(width, generator=chance).to(dtype))
    return rooms, x, norm_weight


@pytest.mark.each_value
@DTYPES
@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize("has_amax", [False, True])
@pytest.mark.parametrize("width", [72, 256])
def test_add_rows_matches_torch_with_deferred_norm(guarded, device, dtype, size, rows, has_amax, width):
    rooms, x, norm_weight = operands(guarded, size, rows, width, dtype)
    parts = [room[: rows * width].view(rows, width) for room in rooms]
    wanted, right, wanted_squares, wanted_amax = x.clone(), torch.empty_like(x), *torch.empty(2, rows, device=device)
    assert add_rows_reference(parts, DeferredStream(wanted, norm_weight, right, wanted_squares, wanted_amax)) == 1
    num_blocks = -(-width // 128)
    scaled = guarded(rows, width, dtype=dtype)
    squares, amax = (guarded(rows * num_blocks, dtype=torch.float32).fill_(NAN) for _ in range(2))
    ranks = Ranks(0, size, None, max_blocks=2)
    onto = DeferredStream(x, norm_weight, scaled, squares, amax if has_amax else None)
    assert add_rows_triton(rooms, onto, ranks, Tiles(128, 4)) == num_blocks
    assert torch.equal(x, wanted)
    assert torch.equal(scaled, right)
    torch.testing.assert_close(squares.view(rows, -1).sum(-1), wanted_squares, rtol=1e-6, atol=0)
    if has_amax:
        assert torch.equal(amax.view(rows, -1).amax(-1), wanted_amax)
    else:
        assert amax.isnan().all(), "it was not requested"


def test_add_rows_equals_sum_then_deferred_norm(guarded, device):
    """What two launches would leave: `sum_rows`, and `defer_rms_norm` with the sum."""
    rooms, x, norm_weight = operands(guarded, 3, 5, 96, torch.float32)
    parts, apart, scaled = (
        [room[: 5 * 96].view(5, 96) for room in rooms],
        x.clone(),
        [torch.empty_like(x) for _ in "12"],
    )
    squares, amax = torch.empty(2, 2, 5, device=device).unbind(1)
    delta = sum_rows_reference(parts, torch.empty_like(x))
    empty = torch.empty(0, device=device)
    scratch = SmallBatchScratch(squares[0], empty, empty, AmaxScratch(amax[0], empty, empty))
    defer_rms_norm_reference(ResidualStream(apart, norm_weight, 1e-5, scaled[0], scratch), delta)
    add_rows(parts, DeferredStream(x, norm_weight, scaled[1], squares[1], amax[1]))
    assert torch.equal(x, apart)
    assert torch.equal(*scaled)
    torch.testing.assert_close(squares[0], squares[1], rtol=1e-6, atol=0)
    assert torch.equal(amax[0], amax[1])


@pytest.mark.parametrize("max_blocks", [2, 8, 16, 33, 64])
@pytest.mark.parametrize("size", [64, 2048, 5120, 7168, 16384])
def test_add_rows_tiles_fit_squares_into_their_buffer(size, max_blocks):
    """Room is what `fused_decode_request` has for squares."""
    room = max(FUSED_DECODE_ROWS * -(-size // SMALL_BATCH_BLOCK_N), -(-size // GEMV_MIN_BLOCK_N))
    found = {rows: column_tiles(rows, size, max_blocks) for rows in range(1, FUSED_DECODE_ROWS + 1)}
    assert len({tiles for rows, tiles in found.items() if not row_form(rows)}) == 1
    assert all(tiles.block in (*BLOCKS, 8192) for tiles in found.values())
    assert max_blocks < MAX_BLOCKS or all(rows * -(-size // tiles.block) <= max_blocks for rows, tiles in found.items())
    assert all(rows * -(-size // tiles.block) <= room for rows, tiles in found.items())
    assert found[1].block <= found[2].block


@pytest.mark.parametrize("max_blocks", [3, 64])
def test_add_rows_is_batch_invariant_from_two_rows(guarded, device, max_blocks):
    width, rows = 2100, 5
    rooms, x, norm_weight = operands(guarded, 2, rows, width, torch.float32)
    parts = torch.stack([room[: rows * width].view(rows, width) for room in rooms])

    def run(some: list[int]) -> list[torch.Tensor]:
        own, scaled = x[some].clone(), torch.full((len(some), width), NAN, device=device)
        squares, amax = torch.full((2, len(some) * 4), NAN, device=device)
        given = [part.reshape(-1) for part in parts[:, some]]
        ranks = Ranks(0, 2, None, max_blocks=max_blocks)
        num_blocks = add_rows_triton(given, DeferredStream(own, norm_weight, scaled, squares, amax), ranks)
        found = (one[: len(some) * num_blocks].view(len(some), -1) for one in (squares, amax))
        return [own, scaled, *found]

    whole = run(list(range(rows)))
    for some in ([0, 1], [4, 2, 0]):
        assert all(torch.equal(own, of_all[some]) for own, of_all in zip(run(some), whole, strict=True))


def test_add_rows_without_rows_launches_nothing(guarded, device):
    empty = guarded(0, 64, dtype=torch.float32)
    assert add_rows_triton([empty], DeferredStream(empty, empty, empty, empty), Ranks(0, 1, None)) == 1
