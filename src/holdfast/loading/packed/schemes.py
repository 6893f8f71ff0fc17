"""The packed scheme of a matrix: its planes if it stays as stored; no torch."""

from collections.abc import Mapping

from holdfast.loading.packed.matrices import PackedMatrix
from holdfast.loading.sources.source import TensorEntry
from holdfast.quant.packed_schemes import PackedScheme, fp8_scheme, integer_scheme, mxfp4_scheme, nvfp4_scheme


def scheme_of(matrix: PackedMatrix, entries: Mapping[str, TensorEntry]) -> PackedScheme:
    """Return the scheme; scales keep their type, and a scale for several rows is kept by row."""
    layout, form, scale_dtype = matrix.layout, matrix.layout.format, entries[matrix.scales].dtype
    group = 0 if matrix.scale_columns == matrix.num_columns else matrix.scale_columns
    if form.numbers == "e2m1":
        return mxfp4_scheme(layout.title) if not form.second else nvfp4_scheme(layout.title, form.divides)
    if form.numbers == "e4m3":
        return fp8_scheme(layout.title, group, scale_dtype)
    is_signed = form.numbers == "signed"
    zero_dtype = "" if not matrix.zeros or layout.zeros == "middle" else "int8" if is_signed else "uint8"
    bits = 8 if is_signed else layout.bits
    scheme = integer_scheme(layout.title, bits, group, scale_dtype, zero_dtype, is_signed)
    if not is_ordered(matrix):
        return scheme
    return scheme.ordered(matrix.num_groups, entries[matrix.groups].dtype)


def is_ordered(matrix: PackedMatrix) -> bool:
    """Return True if the settings declare act-order, and a tensor has the group of each input."""
    return bool(matrix.groups) and matrix.layout.has_order
