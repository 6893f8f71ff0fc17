"""check_tied compares the packed head of a tied model with its embedding before memory is taken for weights."""

from collections.abc import Sequence

import torch

from holdfast.errors import ModelFormatError
from holdfast.loading.planning.moves import Move
from holdfast.loading.planning.plan import LoadPlan
from holdfast.loading.sources.source import PackableSource, WeightSource
from holdfast.quant.formats import DTYPE_BYTES
from holdfast.quant.packed_tiles import stored_scheme
from holdfast.quant.packed_weight import plane_bytes

STEP_BYTES = 2**20
"""Bytes of a step of rows of one tensor."""


def check_tied(plan: LoadPlan, source: WeightSource) -> tuple[Move, ...]:
    """Refuse a head that differs from the embedding, if one of them is packed; return the moves still to be compared.

    Plain tensors are compared after the embedding is placed, which reads each of them once.
    """
    left: list[Move] = []
    for move in plan.tied:
        other = _partner(move, plan.moves)
        is_packed = any(source.entries[name].packed is not None for name in (move.tensor, other.tensor))
        if not is_packed or move.scheme is not None:
            left.append(move)
            continue
        row = _first_difference(move, other, source, plan)
        if row is not None:
            file = source.entries[move.tensor].file
            raise ModelFormatError("weights.not_tied", file=file, tensor=move.tensor, row=row)
    return tuple(left)


def _partner(move: Move, moves: Sequence[Move]) -> Move:
    """Return the move that fills the rows with which a tied move is compared."""
    for other in moves:
        if (other.target, other.part.row_start) == (move.target, move.part.row_start):
            return other
    raise AssertionError(f"nothing fills {move.target}")


def _first_difference(move: Move, other: Move, source: WeightSource, plan: LoadPlan) -> int | None:
    dtype = "" if move.packed is not None else {weight.name: weight.dtype for weight in plan.weights}[move.target]
    for start, end in move.row_ranges(STEP_BYTES):
        ours, theirs = (_rows_of(one, start, end, source, dtype) for one in (move, other))
        is_other = (ours != theirs).any(dim=1)
        if bool(is_other.any()):
            return start + int(is_other.to(torch.uint8).argmax())
    return None


def _rows_of(move: Move, row_start: int, row_end: int, source: WeightSource, dtype: str) -> torch.Tensor:
    """Return rows as bytes: of their planes if they stay packed, else of their values in the type of the weight."""
    first, last, columns = move.read(row_start, row_end)
    if move.packed is None:
        num_bytes = (last - first) * move.num_read_columns * DTYPE_BYTES[move.tensor_dtype]
        raw = torch.empty(num_bytes, dtype=torch.uint8)
        source.read_into(move.tensor, first, last, raw.numpy().data, columns)
        values = raw.view(getattr(torch, move.tensor_dtype)).to(getattr(torch, dtype))
        return values.view(last - first, -1).view(torch.uint8)
    scheme, num_columns = stored_scheme(move.packed), move.part.num_columns
    assert isinstance(source, PackableSource), f"{move.tensor} cannot be read packed"
    raw = torch.empty((last - first) * scheme.row_bytes(num_columns), dtype=torch.uint8)
    source.read_packed(move.tensor, scheme, (first, last), raw.numpy().data, columns)
    planes = plane_bytes(scheme, last - first, num_columns, raw)
    return torch.cat(planes, dim=1)
