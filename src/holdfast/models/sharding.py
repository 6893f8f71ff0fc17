"""Sharding: which layers, rows, columns and experts of every parameter each rank holds and reads; no torch.

layers    those of its stage, counted from 0; the first stage has the embedding, the last one final norm and head
rows      a rank holds its share of every part (q, k, v; gate, up; of each expert), one after the other
columns   a rank holds its share of columns of all rows; if outputs are gathered (Mesh.is_exact), its share of rows
outputs   biases of those: each rank has all of it, or its own elements if outputs are gathered
experts   whole ones in order of ranks, unless they are split by rows and columns

Nothing is padded. Query heads, inner widths and experts must divide by the ranks. Ranks share key and value heads if
there are fewer heads than ranks. If a vocabulary does not divide, the last rank holds fewer rows.
"""

from collections.abc import Iterable
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

from holdfast.distributed.mesh import Mesh
from holdfast.errors import UnsupportedModelError
from holdfast.families.state.spec import StateSpec
from holdfast.models.parameters import Parameter, Part
from holdfast.models.settings import MAX_LAYERS

QKV_NAMES = (".qkv.weight", ".qkv.bias")
"""Suffixes of parameters whose three parts are split by heads."""
LATENT_HEAD_NAMES = (".q.weight", ".q_b.weight", ".kv_b.weight")
"""Suffixes of latent attention's parameters that consist of query heads."""
GROUP_NAME = ".o_a.weight"
"""Suffix of the parameter whose rows are groups of heads."""
BEFORE_LAYERS = ("embed", "positions", "embed_in")
"""First components of the names of parameters in the first stage."""


def shard_parameters(
    parameters: Iterable[Parameter],
    mesh: Mesh,
    num_heads: int,
    num_kv_heads: int,
    num_groups: int = 1,
    state: StateSpec | None = None,
) -> tuple[Parameter, ...]:
    """Return one rank's parameters. Each refers to the whole one, so that all ranks find the same errors and blocks.

    Heads go through an output projection in two steps in `num_groups` groups (`CompressedSpec.num_output_groups`).
    Layers with a `state` are split by its key heads, each with its value heads.
    """
    units = _Units(num_heads, num_kv_heads, num_groups, state)
    staged = (_staged(parameter, mesh) for parameter in parameters)
    return tuple(_share(parameter, mesh, units) for parameter in staged if parameter is not None)


def _staged(parameter: Parameter, mesh: Mesh) -> Parameter | None:
    """Return the parameter as a stage names it; None if another stage has it."""
    if mesh.num_stages == 1 and mesh.layers is None:
        return parameter
    first, _, rest = parameter.name.partition(".")
    if first != "layers":
        is_tied = first == "embed" and parameter.kind == "head"
        is_first = first in BEFORE_LAYERS and mesh.is_first_stage
        is_last = (is_tied or first not in BEFORE_LAYERS) and mesh.is_last_stage
        return parameter if is_first or is_last else None
    number, _, module = rest.partition(".")
    start, end = mesh.layers or (0, MAX_LAYERS)
    if not start <= int(number) < end:
        return None
    if start == 0:
        return parameter
    return replace(parameter, name=f"layers.{int(number) - start}.{module}", whole=parameter.whole or parameter)


class _Units(NamedTuple):
    """Units that ranks must not cut."""

    num_heads: int
    num_kv_heads: int
    num_groups: int
    state: StateSpec | None

    def runs(self, parameter: Parameter) -> list[int]:
        """Return the rows at which runs of units begin, and the end."""
        sizes = () if self.state is None else self.state.runs(parameter.name)
        return list(accumulate(sizes, initial=0)) if sizes else _seams(parameter)

    def of(self, name: str) -> tuple[int, ...]:
        """Return the units in each part of a parameter; empty if its rows are independent."""
        if name.endswith(QKV_NAMES):
            return self.num_heads, self.num_kv_heads, self.num_kv_heads
        if name.endswith(LATENT_HEAD_NAMES):
            return (self.num_heads,)
        if self.state is not None and (runs := self.state.runs(name)):
            return (self.state.key_heads,) * len(runs)
        return (self.num_groups,) if name.endswith(GROUP_NAME) else ()


def vocabulary_rows(num_rows: int, mesh: Mesh) -> tuple[int, int]:
    """Return the rows of an embedding or head that a rank holds: equal numbers, but the last rank may have fewer."""
    most = -(-num_rows // mesh.tensor_size)
    start, end = (min(num_rows, rank * most) for rank in (mesh.tensor_rank, mesh.tensor_rank + 1))
    if num_rows <= most * (mesh.tensor_size - 1):
        values = {"num_rows": num_rows, "num_ranks": mesh.tensor_size, "most": most}
        raise UnsupportedModelError("architecture.vocabulary_too_small", **values)
    return start, end


def _share(parameter: Parameter, mesh: Mesh, units: _Units) -> Parameter:
    if _is_by_expert(parameter) and mesh.expert_size > 1:
        shared = _expert_share(parameter, mesh)
    elif mesh.tensor_size == 1:
        return parameter
    else:
        shared = _tensor_share(parameter, mesh, units)
    return shared if shared is parameter else replace(shared, whole=parameter.whole or parameter)


def _tensor_share(parameter: Parameter, mesh: Mesh, units: _Units) -> Parameter:
    split = parameter.split
    if split == "outputs":  # those of experts are a row each
        split = ("rows" if len(parameter.shape) == 1 else "columns") if mesh.is_exact else "none"
    elif split == "columns" and mesh.is_exact and parameter.kind != "bias":
        split = "rows"
    if split == "rows":
        return _row_share(parameter, mesh, units)
    return _column_share(parameter, mesh) if split == "columns" else parameter


def _is_by_expert(parameter: Parameter) -> bool:
    """Return True if each expert has some of it: weights, and biases, which have their names."""
    return parameter.kind == "expert" or (parameter.kind == "bias" and ".experts." in parameter.name)


def _expert_share(parameter: Parameter, mesh: Mesh) -> Parameter:
    num_experts, num_rows = parameter.shape[0], parameter.num_rows // parameter.shape[0]
    if num_experts % mesh.expert_size:
        raise _indivisible(parameter, f"it has {num_experts} experts", mesh.expert_size)
    count = num_experts // mesh.expert_size
    first, last = mesh.expert_rank * count * num_rows, (mesh.expert_rank + 1) * count * num_rows
    return _rebuilt(parameter, [(first, last)], (count, *parameter.shape[1:]))


def _row_share(parameter: Parameter, mesh: Mesh, units: _Units) -> Parameter:
    seams = units.runs(parameter)
    if parameter.kind in ("embedding", "head"):
        rows = [vocabulary_rows(parameter.num_rows, mesh)]
    else:
        counts = units.of(parameter.name) or (None,) * (len(seams) - 1)
        assert len(counts) == len(seams) - 1, f"{parameter.name} has {len(seams) - 1} parts, and {counts} units of them"
        rows = [
            _rows_of(parameter, start, end, count, mesh, is_shareable=place > 0 and count is not None)
            for place, (start, end, count) in enumerate(zip(seams, seams[1:], counts, strict=False))
        ]
    num_rows = sum(end - start for start, end in rows)
    if len(parameter.shape) == 1:
        return _rebuilt(parameter, rows, (num_rows,))
    leading = parameter.shape[:-2]
    num_matrices = parameter.num_rows // parameter.shape[-2]
    return _rebuilt(parameter, rows, (*leading, num_rows // num_matrices, parameter.shape[-1]))


def _rows_of(
    parameter: Parameter, start: int, end: int, num_units: int | None, mesh: Mesh, is_shareable: bool
) -> tuple[int, int]:
    """Return a rank's share of rows [start, end) that form `num_heads` heads, or of single rows without heads."""
    what = (
        f"rows {start} to {end - 1} of it are {num_units} heads"
        if num_units
        else f"{end - start} of its rows belong together"
    )
    num_units = num_units or end - start
    unit_rows = (end - start) // num_units
    size = mesh.tensor_size
    if num_units % size == 0:
        count = num_units // size
        first = mesh.tensor_rank * count
    elif is_shareable and size % num_units == 0:
        count, first = 1, mesh.tensor_rank * num_units // size
    else:
        raise _indivisible(parameter, what, size)
    return start + first * unit_rows, start + (first + count) * unit_rows


def _column_share(parameter: Parameter, mesh: Mesh) -> Parameter:
    num_columns, size = parameter.shape[-1], mesh.tensor_size
    if num_columns % size:
        raise _indivisible(parameter, f"it has {num_columns} columns", size)
    count = num_columns // size
    parts, *layouts = (
        tuple(_narrowed(part, mesh.tensor_rank * count, count) for part in parts)
        for parts in (parameter.parts, *parameter.layouts)
    )
    return replace(parameter, shape=(*parameter.shape[:-1], count), parts=parts, layouts=tuple(layouts))


def _narrowed(part: Part, column_start: int, num_columns: int) -> Part:
    start = part.column_range[0] + column_start
    return part._replace(columns=(start, start + num_columns))


def _seams(parameter: Parameter) -> list[int]:
    """Return the first rows of parts or stacked matrices, and the end; the first layout stands for all."""
    matrix_rows = parameter.shape[-2] if len(parameter.shape) > 2 else parameter.num_rows
    starts = {part.row_start for part in parameter.parts}
    return sorted(starts | set(range(0, parameter.num_rows + 1, matrix_rows)))


def _rebuilt(parameter: Parameter, rows: list[tuple[int, int]], shape: tuple[int, ...]) -> Parameter:
    """Return the parameter restricted to these rows, in every layout."""
    parts, *layouts = (_taken(parts, rows) for parts in (parameter.parts, *parameter.layouts))
    return replace(parameter, shape=shape, parts=parts, layouts=tuple(layouts))


def _taken(parts: tuple[Part, ...], ranges: list[tuple[int, int]]) -> tuple[Part, ...]:
    """Cut parts to some of the rows that they fill; both are in order."""
    taken: list[Part] = []
    row = place = 0
    for part in parts:
        assert part.repeats == 1, f"{part.tensor}: scales are shared out with their codes"
        begin, end = part.row_start, part.row_start + part.num_rows
        offset = part.row_range[0] - begin
        while place < len(ranges) and ranges[place][0] < end:
            first, last = max(ranges[place][0], begin), min(ranges[place][1], end)
            if (first, last) == (begin, end):
                taken.append(part._replace(row_start=row))
            elif first < last:
                rows = (first + offset, last + offset)
                taken.append(part._replace(row_start=row, rows=rows, whole_rows=part.whole_range))
            row += max(0, last - first)
            if ranges[place][1] > end:  # goes on in the next part
                break
            place += 1
    return tuple(taken)


def _indivisible(parameter: Parameter, has: str, num_ranks: int) -> UnsupportedModelError:
    values = {"name": parameter.name, "shape": list(parameter.shape), "num_ranks": num_ranks}
    return UnsupportedModelError("architecture.not_divisible", **values, reason=has)
