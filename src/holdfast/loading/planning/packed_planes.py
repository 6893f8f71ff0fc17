"""Moves of weights that stay packed: every row goes into the planes of its part; no torch."""

from collections.abc import Iterable, Iterator, Mapping

from holdfast.errors import UnsupportedModelError
from holdfast.loading.planning.moves import BYTES, EMBEDDING, HEAD, Choice, Move, PlannedWeight, choose_all, part_name
from holdfast.loading.sources.source import TensorEntry
from holdfast.models.packed_rows import PackedForm, Schemes, cut_group, packed_form
from holdfast.models.parameters import Parameter, Part
from holdfast.quant.packed_schemes import GROUPS, PackedScheme
from holdfast.quant.weight_schemes import WeightRecipe

TURNED = "its rows have another order in the checkpoint"
TIED_APART = "the head is tied to the embedding and stored in another way"


def part_schemes(choice: Choice, entries: Mapping[str, TensorEntry]) -> Schemes | str:
    """Return the scheme of each part of one matrix, empty if nothing packs it; or why the parameter cannot stay packed.

    Stacked experts stay packed if all of them are stored alike. So does an embedding beside a copy of itself.
    """
    parameter, parts = choice.parameter.whole or choice.parameter, choice.whole_parts
    found = [None if part.tensor not in entries else entries[part.tensor].packed for part in parts]
    if len(parameter.shape) < 2 or not any(found):
        return ()
    num_rows = parameter.shape[-2]
    wanted: dict[int, tuple[int, PackedScheme | None]] = {}
    for part, scheme in zip(parts, found, strict=True):
        own = part.num_rows, scheme
        if part.is_transposed or part.joined_rows > 1 or part.repeats > 1 or part.num_rows > num_rows:
            return TURNED
        if wanted.setdefault(part.row_start % num_rows, own) != own:
            titles = dict.fromkeys("plain" if one is None else one.title for one in found)
            return f"its experts are stored in different ways: {', '.join(titles)}"
    schemes = tuple(scheme for _, (_, scheme) in sorted(wanted.items()))
    if (
        parameter.name == EMBEDDING
        and parameter.kind == "head"
        and HEAD in entries
        and choice.whole_parts[0].tensor != HEAD
    ):
        return schemes if entries[HEAD].packed == schemes[0] else TIED_APART
    return schemes


def packed_weights(parameters: Iterable[Parameter], entries: Mapping[str, TensorEntry]) -> dict[str, Schemes | str]:
    """Return the schemes of the parts of every weight that a checkpoint packs, or why a weight cannot stay packed."""
    if all(entry.packed is None for entry in entries.values()):
        return {}
    fills = choose_all(tuple(parameters), entries).fills
    found = {choice.parameter.name: part_schemes(choice, entries) for choice in fills}
    return {name: schemes for name, schemes in found.items() if schemes}


def form_of(choice: Choice, entries: Mapping[str, TensorEntry], dtype: str, recipe: WeightRecipe) -> PackedForm | None:
    """Return how a weight is held; None if it is not packed. Raise if a rank's share cuts its groups."""
    schemes, parameter = part_schemes(choice, entries), choice.parameter
    if not schemes:
        return None
    num_rows = parameter.shape[-2]
    part_rows = [part.num_rows for part in choice.parts if part.row_start < num_rows]
    form = packed_form(parameter.kind, parameter.shape, part_rows, schemes, parameter.dtype or dtype, recipe)
    if form is not None and form.rows:
        _refuse_cut(parameter, form)
    return form


def _refuse_cut(parameter: Parameter, form: PackedForm) -> None:
    whole = parameter.whole or parameter
    reason = cut_group(form.rows, parameter.shape[-1], whole.shape[-1])
    if reason is None:
        return
    name, shape, title = parameter.name, list(parameter.shape), " and ".join({rows.scheme.title for rows in form.rows})
    fix = "Take fewer ranks, or packed_weights=expanded"
    raise UnsupportedModelError(
        "weights.unsupported_scheme",
        weight=name,
        shape=shape,
        scheme=title,
        reason=f"in a rank's share, {reason}",
        fix=fix,
    )


def packed_moves(weight: PlannedWeight, choice: Choice, entries: Mapping[str, TensorEntry]) -> Iterator[Move]:
    """Yield a move for each checkpoint tensor, and one for the group of each column if it has such a plane."""
    for part in choice.parts:
        entry = entries[part.tensor]
        index, own, matrix = _place(weight, part)
        rows = weight.packed[index]
        target, read = part_name(weight, index), part._replace(row_start=own)
        if rows.scheme.family == "plain":
            yield Move(part.tensor, entry.dtype, f"{target}.values", read, None, _share_bytes(part, entry))
            continue
        yield Move(part.tensor, BYTES, target, read, None, _share_bytes(part, entry), rows.scheme)
        if rows.scheme.order_groups:
            order = entries[entry.order]
            first, last = part.column_range
            place = Part(entry.order, matrix * (last - first), order.shape, (first, last))
            yield Move(entry.order, order.dtype, f"{target}.{GROUPS}", place, None, order.num_bytes)


def _place(weight: PlannedWeight, part: Part) -> tuple[int, int, int]:
    """Return the packed part that a part's rows go to, their first row there, and the matrix."""
    matrix, row = divmod(part.row_start, weight.shape[-2])
    for index, rows in enumerate(weight.packed):
        if rows.row_start <= row < rows.row_end:
            assert row + part.num_rows <= rows.row_end, f"{weight.name}: {part} reaches beyond {rows}"
            return index, matrix * rows.num_rows + row - rows.row_start, matrix
    raise AssertionError(f"{weight.name}: no packed part has row {row}")


def _share_bytes(part: Part, entry: TensorEntry) -> int:
    num_taken = (part.row_range[1] - part.row_range[0]) * part.num_columns
    return entry.num_bytes * num_taken // (part.source_rows * part.source_columns)
