"""A checkpoint that is headers only: reading a weight fails."""

from math import prod

from holdfast.loading.sources.source import TensorEntry
from holdfast.models.parameters import Parameter, Part

ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


def entry(name, shape, dtype="bfloat16", file="m.safetensors"):
    return TensorEntry(name, dtype, tuple(shape), file, ITEM_BYTES.get(dtype, 1) * prod(shape))


def entries_for(parameters, dtype="bfloat16"):
    """One entry for every tensor of the first layouts, each once."""
    shapes = {part.tensor: part.shape for parameter in parameters for part in parameter.parts}
    return [entry(name, shape, dtype) for name, shape in shapes.items()]


class HeaderSource:
    """Entries in order, and nothing to read."""

    def __init__(self, entries, ignorable=(), scratch_bytes_per_reader=0) -> None:
        self.entries = {item.name: item for item in entries}
        self.ignorable = frozenset(ignorable)
        self.scratch_bytes_per_reader = scratch_bytes_per_reader

    def read_into(self, name, row_start, row_end, out, columns=None):
        raise AssertionError(f"{name} was read while planning")

    def close(self) -> None: ...


def stacked(name, heights, width, kind="linear", split="none", prefix="t"):
    """A parameter of several tensors, one below the other."""
    parts, row = [], 0
    for index, height in enumerate(heights):
        parts.append(Part(f"{prefix}{index}", row, (height, width)))
        row += height
    return Parameter(name, (row, width), tuple(parts), kind, split)


def experts(count, inner, hidden, name="layers.0.experts.gate_up.weight", prefix="experts."):
    """Gate and up of every expert: apart, or together and either way round."""
    apart, row = [], 0
    for expert in range(count):
        for half in ("gate", "up"):
            apart.append(Part(f"{prefix}{expert}.{half}.weight", row, (inner, hidden)))
            row += inner
    fused, across = (
        tuple(
            Part(f"{prefix}gate_up", start, shape, (start, start + inner), is_transposed=is_transposed)
            for start in range(0, row, inner)
        )
        for shape, is_transposed in (((count, 2 * inner, hidden), False), ((count, hidden, 2 * inner), True))
    )
    return Parameter(name, (count, 2 * inner, hidden), tuple(apart), "expert", "rows", (fused, across))
