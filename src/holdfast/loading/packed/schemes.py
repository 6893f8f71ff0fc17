"""The packed scheme of a matrix: its planes if it stays as stored; no torch."""

from holdfast.loading.packed.matrices import PackedMatrix
from holdfast.quant.packed_schemes import PackedScheme, fp8_scheme, integer_scheme, mxfp4_scheme, nvfp4_scheme


def scheme_of(matrix: PackedMatrix, scale_dtype: str) -> PackedScheme:
    """Return the scheme; scales keep their type, and a scale for several rows is kept by row."""
    layout, form = matrix.layout, matrix.layout.format
    group = 0 if matrix.scale_columns == matrix.num_columns else matrix.scale_columns
    if form.numbers == "e2m1":
        return mxfp4_scheme(layout.title) if not form.second else nvfp4_scheme(layout.title, form.divides)
    if form.numbers == "e4m3":
        return fp8_scheme(layout.title, group, scale_dtype)
    is_signed = form.numbers == "signed"
    zero_dtype = "" if not matrix.zeros or layout.zeros == "middle" else "int8" if is_signed else "uint8"
    bits = 8 if is_signed else layout.bits
    scheme = integer_scheme(layout.title, bits, group, scale_dtype, zero_dtype, is_signed)
    return scheme.ordered(matrix.num_groups) if matrix.groups and layout.has_order else scheme
