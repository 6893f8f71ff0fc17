"""Sums and gathers over the rooms of all ranks, in one process: the kernels against plain torch, signals left out."""

from collections.abc import Callable

import pytest
import torch

from holdfast.distributed.exchange_plan import SIGNAL_BYTES
from holdfast.kernels.exchange.gather_rows import (
    gather_columns_reference,
    gather_columns_triton,
    gather_small_triton,
    share_first_triton,
)
from holdfast.kernels.exchange.links import END_WORD, fetch_end, fetch_rows, offer_end, offer_rows, release_links
from holdfast.kernels.exchange.signals import EPOCHS_WORD, FAR_AHEAD, MAX_BLOCKS, MAX_RANKS, TABLES_WORD, release_waits
from holdfast.kernels.exchange.sum_rows import (
    Ranks,
    Tiles,
    choose_tiles,
    sum_rows_reference,
    sum_rows_triton,
    takes_two_passes,
    tile_forms,
)
from kernels.gemm_references import gather_small_reference

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
Guarded = Callable[..., torch.Tensor]


def ranks_of(rank: int, size: int) -> Ranks:
    return Ranks(rank, size, None, max_blocks=2)


def rooms_of(guarded: Guarded, size: int, num_elements: int, dtype: torch.dtype, slack: int = 64) -> list[torch.Tensor]:
    """Larger than the parts, with NaN behind them."""
    chance = torch.Generator().manual_seed(size * num_elements)
    rooms = []
    for _ in range(size):
        room = guarded(num_elements + slack, dtype=dtype).fill_(float("nan"))
        room[:num_elements] = torch.randn(num_elements, generator=chance).to(dtype)
        rooms.append(room)
    return rooms


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize(
    ("dtype", "out_dtype"),
    [
        (FP32, FP32),
        (FP16, FP16),
        (FP32, FP16),
        (BF16, FP32),
        # The interpreter truncates what it stores as bfloat16; compiled kernels round.
        pytest.param(BF16, BF16, marks=pytest.mark.gpu),
        pytest.param(FP32, BF16, marks=pytest.mark.gpu),
    ],
)
@pytest.mark.each_value
def test_sum_rows_matches_torch(
    size: int, dtype: torch.dtype, out_dtype: torch.dtype, guarded: Guarded, device: torch.device
) -> None:
    rows, width = 5, 72
    rooms = rooms_of(guarded, size, rows * width, dtype)
    out = guarded(rows, width, dtype=out_dtype)
    sum_rows_triton(rooms, out, ranks_of(0, size), Tiles(128, 4), two_passes=False)
    parts = [room[: rows * width].view(rows, width) for room in rooms]
    assert torch.equal(out, sum_rows_reference(parts, torch.empty_like(out)))


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(("rows", "width"), [(5, 72), (1, 16), (40, 33)])
def test_sum_rows_in_two_passes_gives_the_same_bits(
    size: int, rows: int, width: int, guarded: Guarded, device: torch.device
) -> None:
    # In one process ranks run one after the other, so that each finds only its own share added up: the first pass of all.
    num_elements, tiles = rows * width, Tiles(64, 4)
    kept = rooms_of(guarded, size, num_elements, FP32)
    wanted = sum_rows_reference([room[:num_elements] for room in kept], torch.empty(num_elements, device=device))
    share = -(-num_elements // (size * 64)) * 64
    for rank in range(size):
        fresh = [room.clone() for room in kept]
        out = guarded(rows, width, dtype=FP32)
        sum_rows_triton(fresh, out, ranks_of(rank, size), tiles, two_passes=True)
        own = slice(rank * share, min(num_elements, (rank + 1) * share))
        assert torch.equal(out.view(-1)[own], wanted[own])
        assert torch.equal(fresh[rank][own], wanted[own])
        for other in range(size):
            unchanged = torch.ones(num_elements, dtype=torch.bool, device=device)
            if other == rank:
                unchanged[own] = False
            assert torch.equal(fresh[other][:num_elements][unchanged], kept[other][:num_elements][unchanged])


def test_sum_rows_reads_shares_from_their_owners(guarded: Guarded, device: torch.device) -> None:
    # The second pass alone: a rank without a share of its own finds everybody's in their rooms.
    rooms = [guarded(256, dtype=FP32).fill_(float(rank)) for rank in range(3)]
    out = guarded(2, 64, dtype=FP32)
    sum_rows_triton(rooms, out, ranks_of(2, 3), Tiles(64, 4), two_passes=True)
    assert out.tolist() == [[0.0] * 64, [1.0] * 64]


def test_takes_two_passes_and_tiles_follow_the_size() -> None:
    few, many = torch.empty(16, 5120, dtype=BF16), torch.empty(512, 5120, dtype=BF16)
    assert not takes_two_passes(BF16, few, 4)
    assert takes_two_passes(BF16, many, 4)
    assert takes_two_passes(FP32, many, 8)
    assert not takes_two_passes(BF16, many, 2)
    assert not takes_two_passes(BF16, many.float(), 4)  # a bfloat16 room cannot hold float32 sums
    assert choose_tiles(16 * 5120, 64).block == 2048
    assert choose_tiles(5120, 64).block == 1024
    assert choose_tiles(10**7, 33) == Tiles(4096, 16)
    chosen = {choose_tiles(num_elements, 33) for num_elements in range(1, 200_000, 1000)}
    assert chosen == set(tile_forms(pdl=False))


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(("rows", "columns"), [(1, 48), (7, 60), (5, 25), (3, 2), (2, 4200)])
@pytest.mark.each_value
def test_gather_columns_takes_a_narrow_last_share(
    size: int, rows: int, columns: int, guarded: Guarded, device: torch.device
) -> None:
    share = -(-columns // size)
    widths = [max(0, min(share, columns - rank * share)) for rank in range(size)]
    rooms = rooms_of(guarded, size, rows * share, FP32)
    wide = guarded(rows, columns + 3, dtype=FP32).fill_(7.0)
    out = wide[:, :columns]
    gather_columns_triton(rooms, out, rows, columns, ranks_of(0, size))
    assert (wide[:, columns:] == 7.0).all()
    parts = [room[: rows * width].view(rows, width) for room, width in zip(rooms, widths, strict=True)]
    assert torch.equal(out, gather_columns_reference(parts, torch.empty_like(out)))


@pytest.mark.parametrize("dtype", [FP32, torch.int64])
@pytest.mark.parametrize("num_elements", [1, 2500])
def test_exchange_buffer_takes_small_parts_and_tokens(
    dtype: torch.dtype, num_elements: int, guarded: Guarded, device: torch.device
) -> None:
    rooms = [room.to(dtype) for room in rooms_of(guarded, 3, num_elements, FP32, slack=0)]
    part, out = torch.full((num_elements,), 7, dtype=dtype, device=device), guarded(3, num_elements, dtype=dtype)
    gather_small_triton(part, rooms, out, ranks_of(1, 3))
    assert torch.equal(rooms[1], part)
    assert torch.equal(out, gather_small_reference(rooms, torch.empty_like(out)))
    ids = torch.full((num_elements,), 3, dtype=dtype, device=device)
    share_first_triton(ids, rooms, ranks_of(2, 3))
    assert torch.equal(ids, rooms[0])
    assert (rooms[2] == 3).all()


@pytest.mark.parametrize("scratch_size", [7, 64, 1000])
def test_sum_rows_reference_in_pieces_equals_the_whole(scratch_size: int) -> None:
    parts = list(torch.randn(3, 5, 20, generator=torch.Generator().manual_seed(1)).to(BF16))
    whole = sum_rows_reference(parts, torch.empty(5, 20, dtype=BF16))
    assert torch.equal(sum_rows_reference(parts, torch.empty_like(whole), torch.empty(scratch_size)), whole)
    assert torch.equal(whole, ((parts[0].float() + parts[1].float()) + parts[2].float()).to(BF16))
    assert torch.equal(gather_columns_reference(parts, torch.empty(5, 60, dtype=BF16)), torch.cat(parts, dim=1))


@pytest.mark.parametrize(("rows", "width"), [(1, 5), (3, 2100), (40, 16)])
def test_fetch_rows_returns_offered_rows(rows: int, width: int, guarded: Guarded, device: torch.device) -> None:
    apart = torch.arange(rows * (width + 3), device=device, dtype=FP32).view(rows, width + 3)
    slots, out = guarded(2, rows * width, dtype=FP32), guarded(rows, width + 1, dtype=FP32)
    offer_rows(apart[:, :width], slots, None)
    assert torch.equal(slots[0].view(rows, width), apart[:, :width])
    assert not slots[1].any()
    fetch_rows(slots, out[:, :width], None)
    assert torch.equal(out[:, :width], apart[:, :width])
    assert not out[:, width:].any()


def test_link_counters_do_not_overlap() -> None:
    signals = [torch.zeros(SIGNAL_BYTES // 4, dtype=torch.int32) for _ in range(2)]
    number = 0
    for link, source in ((0, 0), *((1, 1 + rank) for rank in range(16))):
        for end in (offer_end(signals[0], signals[1], link, source), fetch_end(signals[1], signals[0], link, source)):
            number += 1
            for words in (end.awaited, end.signaled, end.counted):
                words += number
    assert END_WORD <= SIGNAL_BYTES // 4
    # Each word of the target is written by its own source only; the source has two links.
    assert len(set(signals[1].tolist())) == 1 + 2 * 17
    assert not signals[0][: TABLES_WORD + 64].any()


def test_abandoned_rank_does_not_wait() -> None:
    signals = torch.zeros(SIGNAL_BYTES // 4, dtype=torch.int32)
    epochs = torch.arange(MAX_BLOCKS, dtype=torch.int32) + (2**31 - 40)  # some are about to wrap
    signals[EPOCHS_WORD : EPOCHS_WORD + MAX_BLOCKS] = epochs
    ends = [offer_end(signals, torch.zeros_like(signals), 1, 1), fetch_end(signals, torch.zeros_like(signals), 1, 16)]
    for number, end in enumerate(ends, 5):
        end.counted.fill_(number)
    release_waits(signals)
    release_links(signals)
    flags = signals[:EPOCHS_WORD].view(MAX_BLOCKS, MAX_RANKS)
    assert (flags - epochs.unsqueeze(1) == FAR_AHEAD).all()
    assert torch.equal(signals[EPOCHS_WORD : EPOCHS_WORD + MAX_BLOCKS], epochs)
    assert not signals[TABLES_WORD : TABLES_WORD + 2 * MAX_RANKS].any()
    assert all((end.awaited - end.counted == FAR_AHEAD).all() for end in ends)
