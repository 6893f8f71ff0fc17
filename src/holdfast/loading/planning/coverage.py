"""Proves that moves fill every row once, and refuses wrong checkpoints from their headers; no torch."""

from collections.abc import Iterable, Mapping, Sequence, Set
from math import prod
from typing import NamedTuple

from holdfast.errors import ModelFormatError, UnsupportedModelError, shown
from holdfast.loading.planning.moves import BYTES, SIGNED_BYTES, Choice, Move, PlannedWeight
from holdfast.loading.sources.source import TensorEntry
from holdfast.memory.workspace_plan import TensorSpec
from holdfast.models.parameters import Parameter, Part
from holdfast.models.settings import listed, plain
from holdfast.quant.weight_schemes import FP8, SCALE_SUFFIX, WeightScheme


class Filled(NamedTuple):
    """Rows [start, end) of a tensor, and the tensor that fills them."""

    start: int
    end: int
    by: str


def uncovered(filled: Iterable[Filled], num_rows: int) -> str | None:
    """Describe rows that are not filled, or filled twice; None if there are none."""
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
    """Check that the moves fill every row of every plane exactly once, at full width."""
    filled: dict[str, list[Filled]] = {}
    widths: dict[str, set[int]] = {}
    for move in moves:
        start, end = move.part.row_start, move.part.row_start + move.part.num_rows
        if move.packed is not None:
            group = move.packed.row_group
            assert start % group == end % group == 0, f"{move.target}: rows {start} to {end} of groups of {group}"
            for name, width in move.planes:
                filled.setdefault(name, []).append(Filled(start // group, end // group, move.tensor))
                widths.setdefault(name, set()).add(width)
            continue
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
    """Check that no element of a checkpoint tensor is used twice, except for `shared`: scales for several blocks."""
    by_tensor: dict[str, list[Move]] = {}
    for move in moves:
        if move.target not in shared:
            by_tensor.setdefault(move.tensor, []).append(move)
    for tensor, users in by_tensor.items():
        reaching: list[Move] = []
        for move in sorted(users, key=lambda move: move.part.row_range) if len(users) > 1 else ():
            start, (left, right) = move.part.row_range[0], move.part.column_range
            reaching = [other for other in reaching if start < other.part.row_range[1]]
            for other in reaching:
                other_left, other_right = other.part.column_range
                is_apart = right <= other_left or other_right <= left
                assert is_apart, f"{tensor} is a part of {other.target} and of {move.target}"
            reaching.append(move)


def _check_plane(spec: TensorSpec, filled: Sequence[Filled], widths: set[int]) -> None:
    """Check that the tensor's rows are as wide as the rows that fill it."""
    assert len(widths) == 1, f"{spec}: filled by rows of {sorted(widths) or 'no'} elements"
    (width,) = widths
    num_elements = prod(spec.shape)
    assert num_elements % width == 0, f"{spec}: is not made of rows of {width} elements"
    assert width in (1, spec.shape[-1]), f"{spec}: filled by rows of {width} elements"
    problem = uncovered(filled, num_elements // width)
    assert problem is None, f"{spec}: {problem}"


FLOAT_DTYPES = ("float64", "float32", "float16", "bfloat16")
"""Types of checkpoint tensors that are converted on load."""
EXPONENT_DTYPE = BYTES
"""Type of e8m0 scales (exponents of two): they stay, or become float32."""


def refuse_missing(choices: Iterable[Choice], entries: Mapping[str, TensorEntry]) -> None:
    """Refuse a checkpoint that lacks a tensor of the chosen layouts."""
    wanted = dict.fromkeys(part.tensor for choice in choices for part in choice.whole_parts)
    missing = [name for name in wanted if name not in entries]
    if missing:
        file, names = _files(entry.file for entry in entries.values()), listed(missing)
        count, needed = len(missing), len(wanted)
        raise ModelFormatError("weights.missing_tensors", file=file, count=count, needed=needed, tensors=names)


def refuse_unexpected(choices: Iterable[Choice], ignorable: Set[str], entries: Mapping[str, TensorEntry]) -> None:
    """Refuse a tensor that no rank uses, unless it has no elements (no shared experts)."""
    placed = {part.tensor for choice in choices for part in choice.whole_parts} | ignorable
    unexpected = [entry for name, entry in entries.items() if name not in placed and prod(entry.shape)]
    if unexpected:
        file, names = _files(entry.file for entry in unexpected), listed([entry.name for entry in unexpected])
        raise ModelFormatError("weights.unexpected_tensors", file=file, count=len(unexpected), tensors=names)


def refuse_wrong_tensors(
    choices: Iterable[Choice],
    dtype: str,
    entries: Mapping[str, TensorEntry],
    scale_names: Set[str] = frozenset(),
) -> None:
    """Refuse the first tensor of a wrong shape or type, in the order of the source.

    `scale_names` are the parameters that hold stored scales.
    """
    wanted = {part.tensor: (choice, part) for choice in choices for part in choice.whole_parts}
    for name, entry in entries.items():
        if name in wanted:
            choice, part = wanted[name]
            _refuse_shape(entry, part, choice.parameter)
            _refuse_dtype(entry, choice.parameter.dtype or dtype, choice.parameter.name in scale_names)


def refuse_scheme(parameter: Parameter, parts: Iterable[Part], scheme: WeightScheme) -> None:
    """Refuse a scheme that cannot store a weight of this shape, or a rank's share of it."""
    whole = parameter.whole or parameter
    reason = scheme.unsupported(whole.shape) or scheme.unsupported(parameter.shape)
    if reason is not None:
        raise _wrong_scheme(parameter, scheme, reason)
    for part in parts:
        if part.whole_rows is None and part.columns is None:
            continue  # this rank has no rows of it
        first, last = part.whole_range
        if any(row not in (first, last) and (row - first) % scheme.block_rows for row in part.row_range):
            start, end = part.row_range
            why = f"a rank's share of {shown(part.tensor)} is the rows {start} to {end - 1}"
            raise _wrong_scheme(parameter, scheme, f"{why}, and {scheme.block_rows} rows share a scale")
        columns = part.column_range
        if scheme.block_columns and any(
            column != part.source_columns and column % scheme.block_columns for column in columns
        ):
            why = f"a rank's share of it is the columns {columns[0]} to {columns[1] - 1}"
            raise _wrong_scheme(parameter, scheme, f"{why}, and {scheme.block_columns} columns share a scale")


def _wrong_scheme(parameter: Parameter, scheme: WeightScheme, reason: str) -> UnsupportedModelError:
    fewer = "fewer ranks, " if parameter.whole is not None else ""
    fix = f"Take {fewer}quantization={FP8.name}, or quantization_ignore={parameter.name} to leave it as it is"
    name, shape = parameter.name, list(parameter.shape)
    return UnsupportedModelError(
        "weights.unsupported_scheme", weight=name, shape=shape, scheme=scheme.name, reason=reason, fix=fix
    )


def _refuse_shape(entry: TensorEntry, part: Part, parameter: Parameter) -> None:
    if entry.shape == part.shape:
        return
    whole = parameter.whole or parameter
    layouts = (whole.parts, *whole.layouts)
    shapes = dict.fromkeys(
        str(list(other.shape)) for parts in layouts for other in parts if other.tensor == part.tensor
    )
    needed = " or ".join(shapes) or str(list(part.shape))  # no layout has the name of a tied head
    raise ModelFormatError(
        "weights.wrong_shape", file=entry.file, tensor=entry.name, shape=list(entry.shape), expected=needed
    )


def _refuse_dtype(entry: TensorEntry, dtype: str, is_scale: bool) -> None:
    wanted = FLOAT_DTYPES if dtype in FLOAT_DTYPES else (dtype,)
    if dtype == BYTES and not is_scale:
        wanted = (*wanted, SIGNED_BYTES)
    if is_scale and dtype == "float32":
        wanted = (*wanted, EXPONENT_DTYPE)
    if entry.dtype not in wanted:
        reason = f"{'scales' if is_scale else 'weights'} are read from {', '.join(wanted)}"
        raise UnsupportedModelError(
            "weights.unsupported_dtype", file=entry.file, tensor=entry.name, dtype=entry.dtype, reason=reason
        )


def _files(names: Iterable[str]) -> str:
    files = list(dict.fromkeys(names))
    if not files:
        return "the checkpoint"
    return files[0] if len(files) == 1 else f"{files[0]} (with {len(files) - 1} more files)"
