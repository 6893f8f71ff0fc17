"""Which packed schemes a device multiplies by kernels, and how their planes are arranged for them; no torch.

A kernel that lands adds its families here. A start without `packed_weights` keeps what has a kernel and expands the rest.
"""

from collections.abc import Iterable, Mapping

from holdfast.memory.workspace_plan import TensorSpec
from holdfast.quant.packed_schemes import PackedScheme

PACKED_KERNELS: Mapping[str, frozenset[str]] = {"cpu": frozenset(), "cuda": frozenset()}
"""Families of schemes with a kernel, by kind of device."""
ARRANGEMENTS: Mapping[str, Mapping[str, str]] = {"cpu": {}, "cuda": {}}
"""Families that a load arranges for a device, and their names then."""


def has_kernel(scheme: PackedScheme, device_kind: str) -> bool:
    """Return True if a kernel of the device takes the planes; else the reference dequantizes pieces of rows."""
    return scheme.family in PACKED_KERNELS[device_kind]


PIECE_ELEMENTS: Mapping[str, int] = {"cpu": 2**20, "cuda": 2**23}
"""Most elements of a piece of rows that the reference dequantizes, unless one row has more. It holds them in float32, and
in half precision too if that is the type of activations: at most 48 MiB."""
LANE = "packed"
"""Lane of the workspace for such a piece."""


def piece_rows(num_rows: int, num_columns: int, device_kind: str) -> int:
    """Return the rows of a piece."""
    return min(num_rows, max(1, PIECE_ELEMENTS[device_kind] // num_columns))


def piece_specs(shapes: Iterable[tuple[int, ...]], dtype: str, device_kind: str) -> tuple[TensorSpec, ...]:
    """Return the tensors of the largest piece of these weights: values, and values rounded to half precision."""
    sizes = [piece_rows(shape[-2], shape[-1], device_kind) * shape[-1] for shape in shapes]
    if not sizes:
        return ()
    values = TensorSpec("values", (max(sizes),), "float32")
    return (values,) if dtype == "float32" else (values, TensorSpec("rounded", (max(sizes),), dtype))
