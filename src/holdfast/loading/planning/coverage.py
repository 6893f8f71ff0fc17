"""Coverage: every row of every final tensor is filled by exactly one move, proved over intervals; no torch."""

from collections.abc import Iterable, Sequence
from math import prod
from typing import NamedTuple

from holdfast.loading.planning.move import Move
from holdfast.loading.planning.planned_weight import PlannedWeight
from holdfast.memory.tensor_spec import TensorSpec
from holdfast.models.settings import plain
from holdfast.quant.weight_schemes import SCALE_SUFFIX


class Filled(NamedTuple):
    """The rows [start, end) of a tensor, and what fills them."""

    start: int
    end: int
    by: str


def uncovered(filled: Iterable[Filled], num_rows: int) -> str | None:
    """None, or which rows are filled by none or by two, in words."""
    row, last = 0, ""
    for start, end, by in sorted(filled):
        if end <= start:
            return f"{plain(by)} fills rows {start} to {end}, which are none"
        if start > row:
            return f"rows {row} to {start - 1} are filled by nothing"
        if start < row:
            return f"rows {start} to {min(row, end) - 1} are filled by {plain(last)} and by {plain(by)}"
        row, last = end, by
    if row < num_rows:
        return f"rows {row} to {num_rows - 1} are filled by nothing"
    return f"{plain(last)} fills rows up to {row - 1} of {num_rows}" if row > num_rows else None


def check_coverage(weights: Iterable[PlannedWeight], moves: Iterable[Move]) -> None:
    """The moves fill every row of every plane once, in full width, and nothing else."""
    filled: dict[str, list[Filled]] = {}
    widths: dict[str, set[int]] = {}
    for move in moves:
        start, end = move.part.row_start, move.part.row_start + move.part.num_rows
        num_columns = move.part.num_columns
        if move.scheme is not None:
            rows, columns = move.scheme.block_rows, move.scheme.block_columns or num_columns
            scales = Filled(start // rows, -(-end // rows), move.tensor)
            assert start % rows == 0, (
                f"{move.target}: {move.tensor} begins at row {start}, within {rows} that share a scale"
            )
            filled.setdefault(move.target + SCALE_SUFFIX, []).append(scales)
            widths.setdefault(move.target + SCALE_SUFFIX, set()).add(-(-num_columns // columns))
            num_columns //= move.scheme.codes_per_byte
        filled.setdefault(move.target, []).append(Filled(start, end, move.tensor))
        widths.setdefault(move.target, set()).add(num_columns)
    for spec in (spec for weight in weights for spec in weight.specs):
        _check_plane(spec, filled.pop(spec.name, []), widths.get(spec.name, set()))
    assert not filled, f"moves fill what is no weight: {', '.join(filled)}"


def check_sources(moves: Iterable[Move], shared: frozenset[str]) -> None:
    """No element of a checkpoint tensor is taken twice; `shared` names targets that may: scales for several blocks."""
    taken: dict[str, list[Move]] = {}
    for move in moves:
        if move.target not in shared:
            taken.setdefault(move.tensor, []).append(move)
    for tensor, takers in taken.items():
        if len(takers) == 1:
            continue
        reaching: list[Move] = []
        for move in sorted(takers, key=lambda move: move.part.row_range):
            start, (left, right) = move.part.row_range[0], move.part.column_range
            reaching = [other for other in reaching if start < other.part.row_range[1]]
            for other in reaching:
                other_left, other_right = other.part.column_range
                is_apart = right <= other_left or other_right <= left
                assert is_apart, f"{tensor} is a part of {other.target} and of {move.target}"
            reaching.append(move)


def _check_plane(spec: TensorSpec, filled: Sequence[Filled], widths: set[int]) -> None:
    """Rows are as wide as what fills them; the tensor is so many of them."""
    assert len(widths) == 1, f"{spec}: filled by rows of {sorted(widths) or 'no'} elements"
    (width,) = widths
    num_elements = prod(spec.shape)
    assert num_elements % width == 0, f"{spec}: is not made of rows of {width} elements"
    assert width in (1, spec.shape[-1]), f"{spec}: filled by rows of {width} elements"
    problem = uncovered(filled, num_elements // width)
    assert problem is None, f"{spec}: {problem}"
