"""Placement of checkpoint rows: converted or quantized into their final tensors, and checked for values that are not finite.

R rows of the checkpoint, C all of their columns, K the columns that this rank keeps

Values that are not finite are reported and still stored: a copy keeps their bits, a conversion keeps infinities and NaN,
and codes follow quant/quantized_weight.py.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from holdfast.kernels.load.place_kernels import Findings, find_amax_triton, place_plain_triton, place_quantized_triton
from holdfast.kernels.triton_compat import can_run
from holdfast.quant.weight_quantize import E8M0_NAN, e8m0_values, encode, find_scales, largest_finite
from holdfast.quant.weight_schemes import WeightScheme

PIECE_ELEMENTS = 2**20
"""Elements per pass of the references, which then need less than 32 MiB."""
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""Types that convert to each other. Bytes convert to float32 as exponents; all other types are only copied."""
E8M0 = torch.float8_e8m0fnu
"""Type of exponents of two that are copied; only 255 is not finite."""
EXPONENTS = (torch.uint8, torch.float32)
"""Source and target types of scales stored as exponents of two."""


def place_plain(
    rows_RC: Tensor, columns: tuple[int, int], out_RK: Tensor, first_row: int, findings: Findings, verify: bool
) -> None:
    """Convert rows to the type of `out_RK` and write them there; if `verify`, compare instead.

    `rows_RC` may have any strides. `first_row` is the number of row 0 in the findings. Rounding is to nearest even, in one
    step. uint8 to float32 reads bytes as exponents of two (e8m0), exactly; 255 is NaN. Exponents that are only copied come
    as float8_e8m0fnu, so that NaN can be found.
    """
    kept_RK = rows_RC[:, columns[0] : columns[1]]
    assert kept_RK.shape == out_RK.shape, f"{rows_RC.shape=} {columns=} into {out_RK.shape=}"
    assert is_placeable(rows_RC.dtype, out_RK.dtype), f"{rows_RC.dtype=} into {out_RK.dtype=}"
    place = place_plain_triton if can_run(rows_RC) else place_plain_reference
    place(kept_RK, out_RK, first_row, findings, verify)


def place_quantized(
    rows_RC: Tensor,
    columns: tuple[int, int],
    scheme: WeightScheme,
    codes: Tensor,
    scales: Tensor,
    amax: Tensor | None,
    first_row: int,
    findings: Findings,
    verify: bool,
) -> None:
    """Quantize rows into their codes and scales (views of exactly these rows); if `verify`, compare instead.

    A scale by row depends on all C columns. `amax` [1] float32 is the largest magnitude of the whole tensor, if the scheme
    needs it. R is a multiple of the scheme's block_rows, except for the last rows of a weight. If the scheme has blocks of
    columns, the kept ones begin with a block or lie in one; scales depend on whole blocks.
    """
    seen = seen_columns(rows_RC.shape[1], columns, scheme)
    kept = columns[0] - seen[0], columns[1] - seen[0]
    seen_RC = rows_RC[:, seen[0] : seen[1]]
    shapes = tuple(plane.shape for plane in scheme.planes((rows_RC.shape[0], columns[1] - columns[0])))
    assert (codes.shape, scales.shape) == shapes, f"{rows_RC.shape=} {columns=} {codes.shape=} {scales.shape=}"
    assert rows_RC.dtype in FLOATS, f"{rows_RC.dtype=} is not quantized"
    assert scheme.is_whole_tensor == (amax is not None), f"{scheme.name}: {amax=}"
    place = place_quantized_triton if can_run(rows_RC) else place_quantized_reference
    place(seen_RC, kept, scheme, codes, scales, amax, first_row, findings, verify)


def find_amax(rows_RC: Tensor, amax: Tensor) -> None:
    """Raise `amax` [1] float32 to the largest finite magnitude of these rows."""
    assert rows_RC.dtype in FLOATS, f"{rows_RC.dtype=} has no amax"
    find = find_amax_triton if can_run(rows_RC) else find_amax_reference
    find(rows_RC, amax)


def place_plain_reference(rows_RK: Tensor, out_RK: Tensor, first_row: int, findings: Findings, verify: bool) -> None:
    """Like `place_plain`, for the kept columns, in plain torch."""
    for start, end in _pieces(rows_RK.shape[0], rows_RK.shape[1]):
        rows, out = _once_rounded(rows_RK[start:end], out_RK.dtype), out_RK[start:end]
        if verify:
            rows = rows.to(out.dtype)
            _report(findings.differing, _differing_rows(rows, out), first_row + start)
        else:
            rows = out.copy_(rows)
        _report(findings.nonfinite, _nonfinite_rows(rows), first_row + start)


def place_quantized_reference(
    rows_RC: Tensor,
    kept: tuple[int, int],
    scheme: WeightScheme,
    codes: Tensor,
    scales: Tensor,
    amax: Tensor | None,
    first_row: int,
    findings: Findings,
    verify: bool,
) -> None:
    """Like `place_quantized` in plain torch; rows have all columns that their scales depend on, `kept` counts in these."""
    width = scheme.block_columns
    for start, end in _pieces(rows_RC.shape[0], rows_RC.shape[1], scheme.block_rows):
        # A row of blocks may be too large for one piece: take some blocks of columns at a time.
        for left, right in _column_pieces(end - start, rows_RC.shape[1], width):
            values = rows_RC[start:end, left:right].to(torch.float32)
            _report(findings.nonfinite, _nonfinite_rows(values), first_row + start)
            new_scales = find_scales(values, scheme, amax)
            into = slice(max(kept[0], left) - kept[0], min(kept[1], right) - kept[0])
            if width:
                new_codes = encode(values, new_scales, scheme)
                new_codes = _kept_codes(new_codes, (max(kept[0], left) - left, min(kept[1], right) - left), scheme)
            else:
                new_codes = encode(values[:, kept[0] : kept[1]], new_scales, scheme)
            per_byte = scheme.codes_per_byte
            codes_there = codes[start:end, into.start // per_byte : into.stop // per_byte]
            rows = slice(start // scheme.block_rows, -(-end // scheme.block_rows))
            scales_there = scales[rows, left // width : -(-right // width)] if width else scales[rows]
            if verify:
                _report(findings.differing, _differing_rows(new_codes, codes_there), first_row + start)
                blocks = _differing_rows(new_scales, scales_there)
                _report(findings.differing, blocks, first_row + start, scheme.block_rows)
            else:
                codes_there.copy_(new_codes)
                scales_there.copy_(new_scales)


def find_amax_reference(rows_RC: Tensor, amax: Tensor) -> None:
    """Like `find_amax`, in plain torch."""
    for start, end in _pieces(rows_RC.shape[0], rows_RC.shape[1]):
        for left, right in _column_pieces(end - start, rows_RC.shape[1], 1):
            values = rows_RC[start:end, left:right].to(torch.float32)
            torch.maximum(amax, largest_finite(values).amax(0, keepdim=True), out=amax)


def is_placeable(source: torch.dtype, target: torch.dtype) -> bool:
    """Return True if `place_plain` converts `source` to `target`."""
    return source == target or (source in FLOATS and target in FLOATS) or (source, target) == EXPONENTS


def seen_columns(num_columns: int, columns: tuple[int, int], scheme: WeightScheme) -> tuple[int, int]:
    """Return the columns that the scales of the kept ones depend on."""
    start, end = columns
    width = scheme.block_columns
    if width == 0:
        return columns if scheme.is_whole_tensor else (0, num_columns)
    assert start % width == 0 or start // width == (end - 1) // width, f"{scheme.name}: {columns=} cut two blocks"
    return start // width * width, min(num_columns, -(-end // width) * width)


def _pieces(num_rows: int, num_columns: int, block_rows: int = 1) -> Iterator[tuple[int, int]]:
    """Yield ranges of rows in whole blocks, of at most PIECE_ELEMENTS or one block."""
    step = max(1, PIECE_ELEMENTS // max(1, num_columns * block_rows)) * block_rows
    for start in range(0, num_rows, step):
        yield start, min(start + step, num_rows)


def _column_pieces(num_rows: int, num_columns: int, block_columns: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of columns in whole blocks; all at once if a scale depends on all."""
    step = num_columns
    if block_columns:
        step = max(1, PIECE_ELEMENTS // (num_rows * block_columns)) * block_columns
    for start in range(0, num_columns, max(1, step)):
        yield start, min(start + step, num_columns)


def _kept_codes(codes: Tensor, kept: tuple[int, int], scheme: WeightScheme) -> Tensor:
    return codes[:, kept[0] // scheme.codes_per_byte : kept[1] // scheme.codes_per_byte]


def _once_rounded(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Prepare rows so that torch converts them with one rounding: from float64 it rounds to float32 first.

    Exponents become powers of two: torch would read bytes as integers.
    """
    if (rows.dtype, dtype) == EXPONENTS:
        return e8m0_values(rows)
    if rows.dtype != torch.float64 or dtype not in (torch.float16, torch.bfloat16):
        return rows
    near = rows.to(torch.float32)
    bits, back = near.view(torch.int32), near.to(torch.float64)
    # Round to odd: the last bit tells the next rounding on which side of a tie the number is.
    outward = (back.abs() < rows.abs()).to(torch.int32) * 2 - 1
    is_cut = (back != rows) & (rows == rows) & (bits & 1 == 0)
    return torch.where(is_cut, bits + outward, bits).view(torch.float32)


def _nonfinite_rows(rows: Tensor) -> Tensor | None:
    """Return a mask of rows with a value that is not finite; None if there is none."""
    if rows.dtype == torch.float8_e4m3fn:
        is_bad = rows.view(torch.uint8) & 0x7F == 0x7F
        return is_bad.any(dim=1)
    if rows.dtype == E8M0:
        return (rows.view(torch.uint8) == E8M0_NAN).any(dim=1)
    if not rows.is_floating_point() or rows.numel() == 0:
        return None
    least, most = rows.aminmax()
    if bool(least.isfinite() & most.isfinite()):
        return None
    return ~rows.isfinite().all(dim=1)


def _differing_rows(new: Tensor, there: Tensor) -> Tensor:
    """Compare bytes, so that NaN equals itself and -0 differs from 0."""
    return (_bytes_of(new) != _bytes_of(there)).any(dim=1)


def _bytes_of(rows: Tensor) -> Tensor:
    rows = rows if rows.dim() > 1 else rows[:, None]
    return rows.contiguous().view(torch.uint8)


def _report(finding: Tensor, rows: Tensor | None, first_row: int, rows_per_entry: int = 1) -> None:
    """Lower a finding to the first row marked True."""
    if rows is None or not bool(rows.any()):
        return
    row = first_row + int(rows.to(torch.uint8).argmax()) * rows_per_entry
    finding.clamp_max_(row)
