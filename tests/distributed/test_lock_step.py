"""Ranks in lock-step threads: sums in the order of ranks, gathers, stages; and every difference among ranks is an error."""

import time

import pytest
import torch

from distributed.lock_step import LockStep, LockStepError, ThreadExchange
from for_each import for_each
from holdfast.distributed.exchange import Exchange
from holdfast.distributed.exchange_plan import ExchangeNeeds
from holdfast.distributed.mesh import Mesh, meshes


def sum_ones(mesh: Mesh, exchange: Exchange) -> torch.Tensor:
    room = exchange.room(2, 3, torch.bfloat16)
    assert room.isnan().all()
    room.fill_(1.0 if mesh.tensor_rank else 256.0)
    return exchange.sum_rows(room, torch.empty(2, 3, dtype=torch.bfloat16))


@for_each("is_serial", [False, True])
def test_lock_step_sums_are_wide_and_rounded_once(is_serial: bool) -> None:
    # One after the other in bfloat16 each 1 would be lost: 256 + 1 is 256 there.
    for total in LockStep(4, is_serial=is_serial).run(sum_ones):
        assert torch.equal(total, torch.full((2, 3), 260.0, dtype=torch.bfloat16))


@for_each("is_serial", [False, True])
def test_lock_step_many_sums_reuse_two_buffers(is_serial: bool) -> None:
    def work(mesh: Mesh, exchange: Exchange) -> list[float]:
        totals, out = [], torch.empty(1, 8)
        for i in range(50):
            room = exchange.room(1, 8, torch.float32)
            room.fill_(i * 10 + mesh.rank)
            if mesh.rank == i % 3:
                time.sleep(0.0005)
            totals.append(exchange.sum_rows(room, out)[0, 0].item())
        exchange.end_step()
        return totals

    assert LockStep(3, is_serial=is_serial).run(work) == [[i * 30 + 3.0 for i in range(50)]] * 3


def test_lock_step_gathers_columns_logits_and_tokens() -> None:
    needs = ExchangeNeeds(room_bytes=64, num_logit_rows=2, vocab_size=5, hidden_bytes=0)

    def work(mesh: Mesh, exchange: ThreadExchange) -> tuple[torch.Tensor, ...]:
        room = exchange.room(2, 2, torch.float32).fill_(mesh.rank)
        columns = exchange.gather_columns(room, torch.empty(2, 4))
        whole = exchange.whole_logits(2) if mesh.rank == 0 else None
        exchange.gather_logits(torch.full((2, 3 if mesh.rank == 0 else 2), float(mesh.rank)), whole)
        small = exchange.gather_small(torch.tensor([[mesh.rank, 7]]), torch.empty(2, 1, 2, dtype=torch.int64))
        ids = torch.tensor([3, 4]) + 10 * mesh.rank
        exchange.share_tokens(ids)
        return columns, small, ids, torch.empty(0) if whole is None else whole

    found = LockStep(2, needs).run(work)
    for columns, small, ids, _ in found:
        assert columns.tolist() == [[0, 0, 1, 1]] * 2
        assert small.tolist() == [[[0, 7]], [[1, 7]]]
        assert ids.tolist() == [3, 4]
    assert found[0][3].tolist() == [[0, 0, 0, 1, 1]] * 2


def test_lock_step_sends_rows_by_stage_and_logits_back() -> None:
    def work(mesh: Mesh, exchange: Exchange) -> list[float]:
        x = torch.full((1, 2), float(mesh.tensor_rank + 1))
        if not mesh.is_first_stage:
            exchange.receive_rows(x)
        room = exchange.room(1, 2, torch.float32).copy_(x)
        x = exchange.sum_rows(room, torch.empty(1, 2))
        if not mesh.is_last_stage:
            exchange.send_rows(x)
        exchange.end_step()
        out = torch.empty(1, 4) if mesh.rank == 0 else None
        if mesh.is_last_stage or mesh.rank == 0:
            exchange.gather_logits(x if mesh.is_last_stage else None, out)
            small = exchange.gather_small(x[:, :1] if mesh.is_last_stage else None, torch.empty(2, 1, 1))
            assert small.flatten().tolist() == [12, 12]
        return [] if out is None else out.flatten().tolist()

    assert LockStep(meshes(2, [(0, 1), (1, 2), (2, 3)])).run(work) == [[12.0] * 4, [], [], [], [], []]


def other_shape(mesh: Mesh, exchange: Exchange) -> None:
    exchange.sum_rows(exchange.room(1 + mesh.rank, 2, torch.float32), torch.empty(1 + mesh.rank, 2))


def other_call(mesh: Mesh, exchange: Exchange) -> None:
    room = exchange.room(1, 2, torch.float32)
    if mesh.rank:
        exchange.gather_columns(room, torch.empty(1, 4))
    else:
        exchange.sum_rows(room, torch.empty(1, 2))


def not_the_room(mesh: Mesh, exchange: Exchange) -> None:
    room = exchange.room(1, 2, torch.float32)
    exchange.sum_rows(torch.empty(1, 2) if mesh.rank else room, torch.empty(1, 2))


def into_a_room(mesh: Mesh, exchange: Exchange) -> None:
    room = exchange.room(1, 2, torch.float32)
    exchange.sum_rows(room, room if mesh.rank else torch.empty(1, 2))


def ends_early(mesh: Mesh, exchange: Exchange) -> None:
    if mesh.rank == 0:
        exchange.share_tokens(torch.zeros(1, dtype=torch.int64))


@for_each(
    "work, words",
    [
        (other_shape, r"rank \d calls sum_rows of \[\d, 2\] .*, rank \d calls sum_rows of \[\d, 2\]"),
        (other_call, "calls gather_columns of|calls sum_rows of"),
        (not_the_room, "rank 1: .* is not the last room"),
        (into_a_room, "rank 1: the output of sum_rows lies in a room"),
        (ends_early, "rank 0 waits in share_tokens of .*; rank 1 has ended without"),
    ],
)
def test_lock_step_names_differences_among_ranks(work: object, words: str) -> None:
    with pytest.raises(LockStepError, match=words):
        LockStep(2).run(work)  # type: ignore[arg-type]


def test_lock_step_failure_stops_all_ranks_and_keeps_its_type() -> None:
    def work(mesh: Mesh, exchange: Exchange) -> None:
        if mesh.rank == 1:
            raise ValueError("no such layer")
        sum_ones(mesh, exchange)

    steps = LockStep(3)
    with pytest.raises(ValueError, match="no such layer") as caught:
        steps.run(work)
    assert caught.value.__notes__ == ["on rank 1 of 3"]
    assert [total[0, 0].item() for total in steps.run(sum_ones)] == [258.0] * 3


def test_lock_step_names_missing_ranks() -> None:
    def work(mesh: Mesh, exchange: Exchange) -> None:
        if mesh.rank == 1:
            time.sleep(0.6)
        else:
            sum_ones(mesh, exchange)

    with pytest.raises(LockStepError, match=r"ranks \[1\] did not come within 0.1 s"):
        LockStep(2, timeout_s=0.1).run(work)
