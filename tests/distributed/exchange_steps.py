"""Steps of an exchange for tests: every call that a model and a runner make, with numbers that differ by rank, call and row."""

import torch

from holdfast.distributed.exchange import Exchange
from holdfast.distributed.exchange_plan import ExchangeNeeds
from holdfast.distributed.mesh import Mesh
from holdfast.kernels.exchange.add_rows import DeferredStream

ROWS, HIDDEN, VOCAB = 5, 24, 13
NEEDS = ExchangeNeeds(
    room_bytes=ROWS * HIDDEN * 4, num_logit_rows=ROWS, vocab_size=VOCAB, hidden_bytes=ROWS * HIDDEN * 4
)


def all_calls(
    mesh: Mesh,
    exchange: Exchange,
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16),
    seed: int = 0,
) -> list[torch.Tensor]:
    """One step, an odd number of calls; sums are in each of `dtypes`. The second step asks for no logits."""
    chance = torch.Generator().manual_seed(100 * seed + mesh.rank)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=chance)

    found: list[torch.Tensor] = []
    ids = torch.arange(ROWS) + 100 * mesh.rank
    exchange.share_tokens(ids)
    found.append(ids)
    x_TH = numbers(ROWS, HIDDEN)
    if not mesh.is_first_stage:
        exchange.receive_rows(x_TH)
    if exchange.size > 1:
        for dtype in dtypes:
            room = exchange.room(ROWS, HIDDEN, dtype).copy_(x_TH * (mesh.tensor_rank + 1) + numbers(ROWS, HIDDEN))
            found.append(exchange.sum_rows(room, torch.empty(ROWS, HIDDEN, dtype=dtype)))
            room = exchange.room(ROWS, 6, dtype).copy_(numbers(ROWS, 6))
            found.append(exchange.gather_columns(room, torch.empty(ROWS, 6 * exchange.size, dtype=dtype)))
        found += _added(exchange.room(2, HIDDEN, torch.float32).copy_(numbers(2, HIDDEN)), exchange)
        room = exchange.room(ROWS, HIDDEN, torch.bfloat16).copy_(numbers(ROWS, HIDDEN))
        x_TH = exchange.sum_rows(room, torch.empty(ROWS, HIDDEN))
        room = exchange.room(ROWS, 2, torch.float32).copy_(numbers(ROWS, 2))
        found.append(exchange.gather_columns(room, torch.empty(ROWS, 2 * exchange.size)))
    found.append(x_TH.clone())
    if not mesh.is_last_stage:
        exchange.send_rows(x_TH)
        x_TH.fill_(float("nan"))
    if seed != 1 and (mesh.is_last_stage or mesh.rank == 0):
        found += _head(mesh, exchange, numbers)
    exchange.end_step()
    return found


def _added(part_TH: torch.Tensor, exchange: Exchange) -> list[torch.Tensor]:
    """x, and its next norm deferred; squares summed over their blocks."""
    x_TH = torch.linspace(-1, 1, part_TH.numel()).view(part_TH.shape)
    norm_H, scaled_TH = torch.linspace(0.5, 2, part_TH.shape[1]), torch.empty_like(x_TH)
    squares, amax = torch.zeros(2, 64)
    num_blocks = exchange.add_rows(part_TH, DeferredStream(x_TH, norm_H, scaled_TH, squares, amax))
    used = squares[: len(x_TH) * num_blocks].view(len(x_TH), num_blocks).sum(-1)
    torch.testing.assert_close(used, x_TH.square().sum(-1))
    assert torch.equal(amax[: len(x_TH) * num_blocks].view(len(x_TH), -1).amax(-1), scaled_TH.abs().amax(-1))
    return [x_TH, scaled_TH]


def _head(mesh: Mesh, exchange: Exchange, numbers) -> list[torch.Tensor]:
    """Whole logits on rank 0, from parts whose rows lie apart, and a few numbers of every share."""
    found, share = [], NEEDS.vocab_share(mesh)
    width = max(0, min(share, VOCAB - mesh.tensor_rank * share))
    part = numbers(ROWS, width + 3)[:, :width] if mesh.is_last_stage else None
    whole = exchange.whole_logits(ROWS) if mesh.rank == 0 else None
    exchange.gather_logits(part, whole)
    if whole is not None:
        found.append(whole.clone())
    small = numbers(ROWS, 2) if mesh.is_last_stage else None
    found.append(exchange.gather_small(small, torch.empty(exchange.size, ROWS, 2)))
    return found


def some_steps(mesh: Mesh, exchange: Exchange, count: int = 2, **options: object) -> list[torch.Tensor]:
    """Several steps, each with numbers of its own, that begin with the same room: a graph has its address."""
    found, first_rooms = [], set()
    for step in range(count):
        if exchange.size > 1:
            first_rooms.add(exchange.room(1, 1, torch.float32).data_ptr())
        found += all_calls(mesh, exchange, seed=step, **options)  # type: ignore[arg-type]
    assert len(first_rooms) <= 1, "a step begins with another room"
    return found
