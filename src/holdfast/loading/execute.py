"""Carries out a load plan: final tensors are allocated once, and row chunks stream from the source straight into them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import TYPE_CHECKING

from holdfast.errors import MemoryPlanError, ModelFormatError, shown
from holdfast.loading.plan import LoadPlan, Move
from holdfast.loading.source import WeightSource
from holdfast.memory.ledger import Ledger
from holdfast.memory.sizes import format_bytes
from holdfast.quant.formats import DTYPE_BYTES

if TYPE_CHECKING:
    import torch

CHUNK_BYTES = 16 * 2**20
"""Most bytes of a source's rows that exist beside the final tensors; a single row may have more."""


def load_weights(
    plan: LoadPlan,
    source: WeightSource,
    device: str,
    ledger: Ledger,
    on_progress: Callable[[int, int], None],
) -> dict[str, torch.Tensor]:
    """Every parameter by name, on the device, in the plan's dtype; each is in the ledger as weights/NAME.

    `on_progress` gets the bytes read so far and in all. Whatever stops a load leaves no entry and no tensor behind.
    """
    weights: dict[str, torch.Tensor] = {}
    try:
        _allocate(plan, device, ledger, weights)
        num_done = 0
        on_progress(0, plan.read_bytes)
        for move in plan.moves:
            for row_start, row_end, chunk in _chunks(move, source):
                _rows(weights, move, row_start, row_end).copy_(chunk)
                on_progress(num_done + move.num_bytes * row_end // move.shape[0], plan.read_bytes)
            num_done += move.num_bytes
        for twin in plan.twins:
            for row_start, row_end, chunk in _chunks(twin, source):
                _check_twin(twin, row_start, _rows(weights, twin, row_start, row_end), chunk, source)
                on_progress(num_done + twin.num_bytes * row_end // twin.shape[0], plan.read_bytes)
            num_done += twin.num_bytes
    except BaseException:
        recorded = {entry.owner for entry in ledger}
        for name in weights:
            if f"weights/{name}" in recorded:
                ledger.release(f"weights/{name}")
        weights.clear()
        raise
    return weights


def _allocate(plan: LoadPlan, device: str, ledger: Ledger, weights: dict[str, torch.Tensor]) -> None:
    import torch

    dtype = getattr(torch, plan.dtype)
    for parameter in plan.parameters:
        num_bytes = plan.parameter_bytes[parameter.name]
        try:
            tensor = torch.empty(parameter.shape, dtype=dtype, device=device)
        except RuntimeError as error:
            if not isinstance(error, torch.OutOfMemoryError) and "alloc" not in str(error):
                raise
            raise MemoryPlanError(
                f"the weights need {format_bytes(plan.final_bytes)} on {device}",
                f"{parameter.name} with {format_bytes(num_bytes)} could not be allocated",
                "free some memory, or take a smaller model or dtype",
            ) from error
        # In this order an interrupt between the two leaves nothing in the ledger that would not be released.
        weights[parameter.name] = tensor
        ledger.record(f"weights/{parameter.name}", num_bytes, f"{plan.dtype} as the model computes with them")


def _chunks(move: Move, source: WeightSource) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Row ranges of a tensor and their rows, each valid until the next."""
    entry = source.entries[move.tensor]
    row_bytes = prod(entry.shape[1:]) * DTYPE_BYTES[entry.dtype]
    rows_per_chunk = max(1, CHUNK_BYTES // row_bytes)
    for row_start in range(0, move.shape[0], rows_per_chunk):
        row_end = min(row_start + rows_per_chunk, move.shape[0])
        chunk = source.read_rows(move.tensor, row_start, row_end)
        assert chunk.shape == (row_end - row_start, *move.shape[1:]), f"{move.tensor}: {chunk.shape=} {row_start=}"
        yield row_start, row_end, chunk


def _rows(weights: dict[str, torch.Tensor], move: Move, row_start: int, row_end: int) -> torch.Tensor:
    return weights[move.parameter][move.row_start + row_start : move.row_start + row_end]


def _check_twin(twin: Move, row_start: int, loaded: torch.Tensor, chunk: torch.Tensor, source: WeightSource) -> None:
    """Bits are compared, in the final dtype: a difference that rounding removes changes no result."""
    import torch

    bits = torch.int16 if loaded.element_size() == 2 else torch.int32
    differs = (loaded.view(bits) != chunk.to(loaded.device, loaded.dtype).view(bits)).flatten(1).any(dim=1)
    if bool(differs.any()):
        raise ModelFormatError(
            f"{source.entries[twin.tensor].file}: {shown(twin.tensor)} differs from the embedding "
            f"in row {row_start + int(differs.nonzero()[0])}",
            "the model's settings say that they are one tensor (tie_word_embeddings)",
            "set tie_word_embeddings to false, or use the model's own weights",
        )
