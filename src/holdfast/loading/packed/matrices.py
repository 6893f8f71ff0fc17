"""PackedMatrix: a packed matrix found in a checkpoint's headers, its tensors checked against the settings, and its scheme; no torch."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from holdfast.errors import HoldfastError, ModelFormatError, UnsupportedModelError, shown
from holdfast.loading.packed.layout import FLOATS, PackedLayout
from holdfast.loading.packed.settings import TABLES, PackedSettings
from holdfast.loading.sources.source import TensorEntry
from holdfast.models.parameters import Parameter
from holdfast.quant.packed_schemes import PackedScheme, fp8_scheme, integer_scheme, mxfp4_scheme, nvfp4_scheme

WEIGHT, BIAS, SHAPE = ".weight", ".bias", ".weight_shape"
CODE_SUFFIXES = (".qweight", ".weight_packed")
BYTE_DTYPES = ("int8", "uint8", "float8_e4m3fn")
"""Types of a tensor X.weight that holds codes."""
INDEX_DTYPES = ("int32", "int64")
LEFTOVERS = (".scales", ".qzeros", ".g_idx", ".weight_scale", ".weight_scale_inv", ".weight_scale_2", ".weight_shape")
LEFTOVERS += (".weight_zero_point", ".weight_g_idx", ".weight_global_scale")
"""Suffixes of a packed module's tensors, whether its layout needs them or not."""


class PackedMatrix(NamedTuple):
    """A matrix X.weight [N, K] and the tensors that hold it; an empty name stands for none."""

    tensor: str
    """Its name in a plain checkpoint."""
    layout: PackedLayout
    num_rows: int
    num_columns: int
    codes: str
    scales: str
    scale_rows: int
    """Rows that share a scale."""
    scale_columns: int
    zeros: str
    second: str
    groups: str
    """The group of each input."""
    shape: str
    """A tensor that states the shape."""
    zero_bias: str
    """A bias that the model does not have, so it must be zero."""
    zero_points: str
    """Zero points that the codes do not need, so they must be zero."""
    used: frozenset[str]
    """Every tensor of the module that no parameter names."""

    @property
    def num_groups(self) -> int:
        return -(-self.num_columns // self.scale_columns)


def find_matrices(
    entries: Mapping[str, TensorEntry],
    unread: Collection[str],
    settings: PackedSettings,
    parameters: Iterable[Parameter],
) -> dict[str, PackedMatrix]:
    """Return every packed matrix by the name of its codes; refuse tensors that the settings do not declare."""
    refuse_declined(entries, unread)
    shapes = {
        part.tensor: part.shape
        for parameter in parameters
        for parts in ((parameter.whole or parameter).parts, *(parameter.whole or parameter).layouts)
        for part in parts
    }
    found: dict[str, PackedMatrix] = {}
    for name, entry in entries.items():
        if name in unread or not is_code(entry):
            continue
        found[name] = _find(entry, entries, settings, shapes)
    if not found:
        problem = f"it declares {settings.titles}, and no tensor is stored so"
        raise ModelFormatError("model.mismatch", file=settings.file, problem=problem)
    return found


def is_code(entry: TensorEntry) -> bool:
    """Return True if the tensor holds codes, by its name and type."""
    return entry.name.endswith(CODE_SUFFIXES) or (entry.name.endswith(WEIGHT) and entry.dtype in BYTE_DTYPES)


def has_codes(entries: Mapping[str, TensorEntry], unread: Collection[str]) -> bool:
    """Return True if a tensor that the model reads holds codes."""
    return any(is_code(entry) for name, entry in entries.items() if name not in unread)


def refuse_undeclared(entries: Mapping[str, TensorEntry], unread: Collection[str], file: str) -> None:
    """Refuse packed tensors of a checkpoint whose settings declare none."""
    refuse_declined(entries, unread)
    endings = tuple(TABLES["packed_endings"])
    name = next((name for name in entries if name not in unread and name.endswith(endings)), None)
    if name is not None:
        problem = f"it declares no packed weights, and {entries[name].file} holds {shown(name)}"
        raise ModelFormatError("model.mismatch", file=file, problem=problem)


def refuse_declined(entries: Mapping[str, TensorEntry], unread: Collection[str]) -> None:
    """Refuse tensors of a format that is not read, by name."""
    endings: Mapping[str, str] = TABLES["declined_endings"]
    for name, entry in entries.items():
        if name in unread or not name.endswith(tuple(endings)):
            continue
        reason = next(reason for ending, reason in endings.items() if name.endswith(ending))
        raise UnsupportedModelError("weights.packed_format", file=entry.file, tensor=name, reason=reason)


def _find(
    codes: TensorEntry,
    entries: Mapping[str, TensorEntry],
    settings: PackedSettings,
    shapes: Mapping[str, tuple[int, ...]],
) -> PackedMatrix:
    """Return the matrix in the first declared layout that its tensors fit; else raise the first layout's error."""
    problems: list[HoldfastError] = []
    for layout in settings.layouts:
        suffix = layout.format.codes
        if not codes.name.endswith(suffix) or codes.dtype != layout.format.code_dtype:
            continue
        module = codes.name.removesuffix(suffix)
        try:
            return _settle(module, layout, entries, shapes)
        except (ModelFormatError, UnsupportedModelError) as error:
            problems.append(error)
    if problems:
        raise problems[0]
    problem = f"it declares {settings.titles}, and {codes.file} stores {shown(codes.name)} as {codes.dtype}"
    raise ModelFormatError("model.mismatch", file=settings.file, problem=problem)


def _settle(
    module: str, layout: PackedLayout, entries: Mapping[str, TensorEntry], shapes: Mapping[str, tuple[int, ...]]
) -> PackedMatrix:
    """Check every tensor of a module against a layout."""
    form, codes = layout.format, entries[module + layout.format.codes]
    wanted = shapes.get(module + WEIGHT)
    if len(codes.shape) != 2 or 0 in codes.shape:
        raise _wrong_shape(codes, "a matrix of words")
    num_rows, num_columns = wanted if wanted is not None and len(wanted) == 2 else layout.matrix_shape(codes.shape)
    if (reason := layout.indivisible(num_rows, num_columns)) is not None:
        raise UnsupportedModelError(
            "weights.packed_format",
            file=codes.file,
            tensor=codes.name,
            reason=f"as {layout.title}, {reason}; take a checkpoint with other groups",
        )
    _check_shape(codes, (layout.code_shape(num_rows, num_columns),))
    scales = _beside(module, form.scales, codes, entries)
    accepted = layout.scale_shapes(num_rows, num_columns)
    _check_shape(scales, accepted)
    _check_dtype(scales, form.scale_dtypes)
    layout, zeros, zero_points = _find_zeros(module, layout, scales, (num_rows, num_columns), entries)
    second, groups = module + form.second, module + form.groups
    if form.second:
        found = _beside(module, (form.second,), codes, entries)
        _check_shape(found, ((), (1,), (1, 1)))
        _check_dtype(found, FLOATS)
    if form.groups and (layout.has_order or groups in entries) and (form.has_short_group or groups in entries):
        found = _beside(module, (form.groups,), codes, entries)
        _check_shape(found, ((num_columns,),))
        _check_dtype(found, INDEX_DTYPES)
    else:
        groups = ""
    scale_rows, scale_columns = accepted[scales.shape]
    bias, shape = module + BIAS, module + SHAPE
    has_zero_bias = bias in entries and bias not in shapes
    if has_zero_bias:
        _check_shape(entries[bias], ((num_rows,),))
    if shape in entries:
        _check_shape(entries[shape], ((2,),))
        _check_dtype(entries[shape], INDEX_DTYPES)
    others = {module + ending for ending in LEFTOVERS} & entries.keys()
    return PackedMatrix(
        tensor=module + WEIGHT,
        layout=layout,
        num_rows=num_rows,
        num_columns=num_columns,
        codes=codes.name,
        scales=scales.name,
        scale_rows=scale_rows,
        scale_columns=scale_columns,
        zeros=zeros,
        second=second if form.second else "",
        groups=groups,
        shape=shape if shape in entries else "",
        zero_bias=bias if has_zero_bias else "",
        zero_points=zero_points,
        used=frozenset(others | {bias} if has_zero_bias else others),
    )


def _find_zeros(
    module: str,
    layout: PackedLayout,
    scales: TensorEntry,
    matrix_shape: tuple[int, int],
    entries: Mapping[str, TensorEntry],
) -> tuple[PackedLayout, str, str]:
    """Return the layout with its zero points, their tensor, and a tensor of zero points that must be zero.

    Settings that say "symmetric" do not drop zero points that are there.
    """
    form, codes, zeros = layout.format, entries[module + layout.format.codes], module + layout.format.zeros
    if layout.zeros == "none" and form.zeros and zeros in entries:
        if form.numbers == "unsigned" and entries[zeros].dtype == "int8":
            _check_shape(entries[zeros], (scales.shape,))
            return layout, "", zeros
        layout = replace(layout, zeros="plain" if form.numbers == "signed" else "words")
    if layout.may_be_middle and zeros not in entries:
        layout = replace(layout, zeros="middle")
    if layout.zeros == "none" or (layout.zeros == "middle" and zeros not in entries):
        return layout, "", ""
    found = _beside(module, (form.zeros,), codes, entries)
    _check_dtype(found, ("int8",) if layout.zeros == "plain" else (form.code_dtype,))
    _check_shape(found, (layout.zero_shape(*matrix_shape, scales.shape),))
    return layout, zeros, ""


def _beside(
    module: str, suffixes: Collection[str], codes: TensorEntry, entries: Mapping[str, TensorEntry]
) -> TensorEntry:
    names = [module + suffix for suffix in suffixes]
    found = next((entries[name] for name in names if name in entries), None)
    if found is None:
        raise ModelFormatError("weights.packed_missing", file=codes.file, tensor=codes.name, missing=names[0])
    return found


def _check_shape(entry: TensorEntry, accepted: Iterable[tuple[int, ...]]) -> None:
    accepted = tuple(accepted)
    if entry.shape not in accepted:
        raise _wrong_shape(entry, " or ".join(dict.fromkeys(str(list(shape)) for shape in accepted)))


def _wrong_shape(entry: TensorEntry, expected: str) -> ModelFormatError:
    shape = list(entry.shape)
    return ModelFormatError("weights.wrong_shape", file=entry.file, tensor=entry.name, shape=shape, expected=expected)


def _check_dtype(entry: TensorEntry, accepted: Collection[str]) -> None:
    if entry.dtype not in accepted:
        reason = f"beside packed weights it is read from {', '.join(accepted)}"
        raise UnsupportedModelError(
            "weights.unsupported_dtype", file=entry.file, tensor=entry.name, dtype=entry.dtype, reason=reason
        )


def packed_bytes(matrix: PackedMatrix, entries: Mapping[str, TensorEntry]) -> int:
    """Return the bytes on disk of a matrix and what is beside it."""
    return sum(entries[name].num_bytes for name in matrix.used | {matrix.codes})


def scheme_of(matrix: PackedMatrix, entries: Mapping[str, TensorEntry]) -> PackedScheme:
    """Return the scheme; scales keep their type, and a scale for several rows is kept by row."""
    group = 0 if matrix.scale_columns == matrix.num_columns else matrix.scale_columns
    scheme = layout_scheme(matrix.layout, group, entries[matrix.scales].dtype, has_zeros=bool(matrix.zeros))
    if not is_ordered(matrix):
        return scheme
    return scheme.ordered(matrix.num_groups, entries[matrix.groups].dtype)


def layout_scheme(layout: PackedLayout, group: int, scale_dtype: str, *, has_zeros: bool) -> PackedScheme:
    """Return the scheme of a layout with scales of a type by group, without act-order; 0: by row."""
    form = layout.format
    if form.numbers == "e2m1":
        return mxfp4_scheme(layout.title) if not form.second else nvfp4_scheme(layout.title, form.divides)
    if form.numbers == "e4m3":
        return fp8_scheme(layout.title, group, scale_dtype)
    is_signed = form.numbers == "signed"
    zero_dtype = "" if not has_zeros or layout.zeros == "middle" else "int8" if is_signed else "uint8"
    return integer_scheme(layout.title, 8 if is_signed else layout.bits, group, scale_dtype, zero_dtype, is_signed)


def is_ordered(matrix: PackedMatrix) -> bool:
    """Return True if the settings declare act-order, and a tensor has the group of each input."""
    return bool(matrix.groups) and matrix.layout.has_order
