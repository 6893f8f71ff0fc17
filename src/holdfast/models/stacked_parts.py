"""A parameter whose rows are those of whole checkpoint tensors, one after the other; no torch."""

from collections.abc import Sequence

from holdfast.models.parameters import Kind, Parameter, Part, Split


def stack_parts(tensors: Sequence[tuple[str, tuple[int, ...]]]) -> tuple[Part, ...]:
    """One part a tensor, given as name and shape; the rows of a tensor are its first dimension."""
    parts: list[Part] = []
    row = 0
    for tensor, shape in tensors:
        parts.append(Part(tensor, row, shape))
        row += shape[0]
    return tuple(parts)


def stacked(name: str, tensors: Sequence[tuple[str, tuple[int, ...]]], kind: Kind, split: Split) -> Parameter:
    """One parameter that holds all rows of all of them."""
    num_rows = sum(shape[0] for _, shape in tensors)
    return Parameter(name, (num_rows, *tensors[0][1][1:]), stack_parts(tensors), kind, split)
