"""Packed weights to float32: for each format, the codes of some rows, and their scales and zero points.

Every value is (code - zero) * scale, the publishers' formula, in float32. Codes and zero points are whole numbers,
so their difference is exact, and a product by a float16 or bfloat16 scale is too. NVFP4 rounds twice: in the product or
quotient of its two scales, then in the product with the code.

R rows (outputs), C columns (inputs), J groups, P codes in a word, W words
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import torch

from holdfast.errors import ModelFormatError
from holdfast.loading.packed.matrices import PackedMatrix
from holdfast.loading.packed.tiles import STEP_ELEMENTS, Span, words_around
from holdfast.quant.weight_quantize import e8m0_values

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
ONE_EACH = 0x11111111, 0x01010101
"""A word of zero points of 1, in 4 and in 8 bits."""


class Reader(Protocol):
    """Reads rows and columns of the checkpoint's tensors, and names their files."""

    def read(self, name: str, rows: tuple[int, int], columns: tuple[int, int] | None = None) -> torch.Tensor:
        """Read these rows; of a vector, elements."""
        ...

    def wrong(self, name: str, problem: str) -> ModelFormatError:
        """Return the error about the values of a tensor."""
        ...


class Scales(NamedTuple):
    """Scales and zero points of some rows, for some groups of columns."""

    scales_RJ: torch.Tensor
    zeros_RJ: torch.Tensor | None
    """Float32, in units of a code; None: `middle` stands for all."""
    middle: int


Codes = Callable[[PackedMatrix, Reader, Span, Span], torch.Tensor]
"""codes(matrix, reader, rows, columns): codes [R, C], as bytes or e4m3 numbers."""
ScalesOf = Callable[[PackedMatrix, Reader, Span, Span], Scales]
"""scales(matrix, reader, rows, groups): scales [R, J] in float32, and zero points."""


def fields_of(words_AW: torch.Tensor, bits: int, order: tuple[int, ...] = ()) -> torch.Tensor:
    """Unpack words to codes, as bytes [A, W, P], from the low bits or in the given order of fields."""
    num_rows, num_words = words_AW.shape
    whole_AW = words_AW.clone(memory_format=torch.contiguous_format)  # a single word has any stride
    bytes_AWB = whole_AW.view(torch.uint8).view(num_rows, num_words, -1)
    if bits == 8:
        return bytes_AWB
    each = 2 * bytes_AWB.shape[2]
    if not order:
        fields_AWP = torch.empty(num_rows, num_words, each, dtype=torch.uint8)
        torch.bitwise_and(bytes_AWB, 0x0F, out=fields_AWP[..., 0::2])
        torch.bitwise_right_shift(bytes_AWB, 4, out=fields_AWP[..., 1::2])
        return fields_AWP
    fields_APW = torch.empty(num_rows, each, num_words, dtype=torch.uint8)
    for place, field in enumerate(order):
        half = torch.bitwise_right_shift if field % 2 else torch.bitwise_and
        half(bytes_AWB[..., field // 2], 4 if field % 2 else 0x0F, out=fields_APW[:, place])
    return fields_APW.transpose(1, 2)


def along_rows(fields_AWP: torch.Tensor) -> torch.Tensor:
    """Words hold codes of consecutive columns: [A, W, P] is [A, W * P]."""
    return fields_AWP.reshape(fields_AWP.shape[0], -1)


def across_rows(fields_AWP: torch.Tensor) -> torch.Tensor:
    """Words hold codes of consecutive rows: [A, W, P] is [A * P, W]."""
    num_rows, num_columns, each = fields_AWP.shape
    return fields_AWP.permute(0, 2, 1).reshape(num_rows * each, num_columns)


def _awq_codes(matrix: PackedMatrix, reader: Reader, rows: Span, columns: Span) -> torch.Tensor:
    words, (first, last) = words_around(rows, matrix.layout.codes_per_word)
    # Words move to their rows before they are unpacked: they are an eighth of the codes.
    words_WC = reader.read(matrix.codes, columns, words).T
    fields = fields_of(words_WC, matrix.layout.bits, matrix.layout.format.fields)
    return across_rows(fields)[first:last]


def _gptq_codes(matrix: PackedMatrix, reader: Reader, rows: Span, columns: Span) -> torch.Tensor:
    words, (first, last) = words_around(columns, matrix.layout.codes_per_word)
    words_RW = reader.read(matrix.codes, words, rows).T
    return along_rows(fields_of(words_RW, matrix.layout.bits))[:, first:last]


def _input_codes(matrix: PackedMatrix, reader: Reader, rows: Span, columns: Span) -> torch.Tensor:
    """Rows of words or bytes that hold codes of consecutive inputs."""
    words, (first, last) = words_around(columns, matrix.layout.codes_per_word)
    return along_rows(fields_of(reader.read(matrix.codes, rows, words), matrix.layout.bits))[:, first:last]


def _byte_codes(matrix: PackedMatrix, reader: Reader, rows: Span, columns: Span) -> torch.Tensor:
    codes_RC = reader.read(matrix.codes, rows, columns)
    if matrix.layout.bits == 4 and codes_RC.numel() and not -8 <= codes_RC.min() <= codes_RC.max() <= 7:
        raise reader.wrong(matrix.codes, "holds codes beyond 4 bits, from -8 to 7")
    return codes_RC


def _output_scales(matrix: PackedMatrix, reader: Reader, rows: Span, groups: Span) -> Scales:
    """Scales [J, N] and zero points packed along N (AWQ, GPTQ)."""
    layout = matrix.layout
    scales_RJ = reader.read(matrix.scales, groups, rows).T.float()
    if not matrix.zeros:
        return Scales(scales_RJ, None, layout.middle)
    words, (first, last) = words_around(rows, layout.codes_per_word)
    words_JW = reader.read(matrix.zeros, groups, words)
    if layout.zeros == "middle":
        _check_middle(matrix, reader, along_rows(fields_of(words_JW, layout.bits))[:, first:last])
        return Scales(scales_RJ, None, layout.middle)
    if layout.zeros == "words_less_one":
        # The encoder subtracts 1 from whole words, so borrows cross codes; the sum of words takes them back.
        words_JW = words_JW + ONE_EACH[layout.bits == 8]
    fields = fields_of(words_JW, layout.bits, layout.format.fields)
    return Scales(scales_RJ, along_rows(fields)[:, first:last].T.float(), 0)


def _check_middle(matrix: PackedMatrix, reader: Reader, zeros_JR: torch.Tensor) -> None:
    """Check that symmetric zero points are the middle code, or one less (v1), in all codes alike."""
    if not _are_middle(matrix, zeros_JR):
        middle = matrix.layout.middle
        problem = f"has zero points other than {middle - 1} or {middle}, and the settings say sym"
        raise reader.wrong(matrix.zeros, problem)


def _are_middle(matrix: PackedMatrix, zeros_JR: torch.Tensor) -> bool:
    return any(bool((zeros_JR == value).all()) for value in (matrix.layout.middle - 1, matrix.layout.middle))


def is_symmetric(matrix: PackedMatrix, reader: Reader) -> bool:
    """Return True if all zero points of a matrix are the middle code, or all are one less (v1)."""
    words = 0, -(-matrix.num_rows // matrix.layout.codes_per_word)
    step = max(1, STEP_ELEMENTS // matrix.num_rows)
    firsts: set[int] = set()
    for start in range(0, matrix.num_groups, step):
        words_JW = reader.read(matrix.zeros, (start, min(start + step, matrix.num_groups)), words)
        zeros_JR = along_rows(fields_of(words_JW, matrix.layout.bits))[:, : matrix.num_rows]
        firsts.add(int(zeros_JR[0, 0]))
        if len(firsts) > 1 or not _are_middle(matrix, zeros_JR):
            return False
    return True


def _input_scales(matrix: PackedMatrix, reader: Reader, rows: Span, groups: Span) -> Scales:
    """Scales [N, J] and zero points packed along N (pack-quantized)."""
    layout, scales_RJ = matrix.layout, reader.read(matrix.scales, rows, groups).float()
    if not matrix.zeros:
        return Scales(scales_RJ, None, layout.middle)
    words, (first, last) = words_around(rows, layout.codes_per_word)
    fields = fields_of(reader.read(matrix.zeros, words, groups), layout.bits)
    return Scales(scales_RJ, across_rows(fields)[first:last].float(), 0)


def _row_scales(matrix: PackedMatrix, reader: Reader, rows: Span, groups: Span) -> Scales:
    """Scales by group, by row, by block of rows, or one; zero points alike (int-quantized, fp8)."""
    scales_RJ = _by_row(matrix, reader, matrix.scales, rows, groups)
    zeros_RJ = _by_row(matrix, reader, matrix.zeros, rows, groups) if matrix.zeros else None
    if zeros_RJ is not None and matrix.layout.bits == 4 and bool((zeros_RJ.abs() > 8).any() | (zeros_RJ == 8).any()):
        raise reader.wrong(matrix.zeros, "holds zero points beyond 4 bits, from -8 to 7")
    return Scales(scales_RJ, zeros_RJ, 0)


def _by_row(matrix: PackedMatrix, reader: Reader, name: str, rows: Span, groups: Span) -> torch.Tensor:
    each = matrix.scale_rows
    first, last = rows[0] // each, -(-rows[1] // each)
    values = reader.read(name, (first, last), groups).float().reshape(last - first, groups[1] - groups[0])
    if each == 1:
        return values
    return values.index_select(0, torch.arange(*rows) // each - first)


def _nvfp4_scales(matrix: PackedMatrix, reader: Reader, rows: Span, groups: Span) -> Scales:
    second = reader.read(matrix.second, (0, 1)).float().view(())
    scales_RJ = reader.read(matrix.scales, rows, groups).float()
    return Scales(scales_RJ.div_(second) if matrix.layout.format.divides else scales_RJ.mul_(second), None, 0)


def _mxfp4_scales(matrix: PackedMatrix, reader: Reader, rows: Span, groups: Span) -> Scales:
    return Scales(e8m0_values(reader.read(matrix.scales, rows, groups)), None, 0)


class Functions(NamedTuple):
    """The two functions that read a format."""

    codes: Codes
    scales: ScalesOf


FUNCTIONS: Mapping[str, Functions] = {
    "awq": Functions(_awq_codes, _output_scales),
    "gptq": Functions(_gptq_codes, _output_scales),
    "packed_int": Functions(_input_codes, _input_scales),
    "int8": Functions(_byte_codes, _row_scales),
    "nvfp4": Functions(_input_codes, _nvfp4_scales),
    "mxfp4": Functions(_input_codes, _mxfp4_scales),
    "fp8": Functions(_byte_codes, _row_scales),
}
"""By `PackedFormat.name`."""


def group_index(matrix: PackedMatrix, reader: Reader) -> torch.Tensor | None:
    """Return the group of each column if groups are no runs of columns; None if they are."""
    if not matrix.groups:
        return None
    index_K = reader.read(matrix.groups, (0, matrix.num_columns)).to(torch.int64)
    runs_K = torch.arange(matrix.num_columns) // matrix.scale_columns
    if torch.equal(index_K, runs_K):
        return None
    least, most, num_groups = int(index_K.min()), int(index_K.max()), matrix.num_groups
    is_gptq = matrix.layout.format.is_input_major
    if least == most == (0 if is_gptq else -1) and not (is_gptq and matrix.layout.has_order):
        return None  # never filled in
    if least < 0 or most >= num_groups:
        raise reader.wrong(matrix.groups, f"names the groups {least} to {most}, and there are {num_groups}")
    if most == least:
        raise reader.wrong(matrix.groups, f"puts every input into the group {most} of {num_groups}")
    counts_J, sizes_J = torch.bincount(index_K, minlength=num_groups), torch.bincount(runs_K)
    if not torch.equal(counts_J, sizes_J):
        group = int((counts_J != sizes_J).nonzero()[0])
        problem = f"puts {counts_J[group]} inputs into the group {group}, which has {sizes_J[group]}"
        raise reader.wrong(matrix.groups, problem)
    return index_K


def expand(
    matrix: PackedMatrix, codes_RC: torch.Tensor, scales: Scales, places_C: torch.Tensor | int, out_RC: torch.Tensor
) -> None:
    """Fill `out_RC` with (code - zero) * scale.

    `places_C` has the group of each column, counted in `scales`. An integer says that whole groups of so many columns
    follow each other from the first group of `scales` on.
    """
    if matrix.layout.format.numbers == "e2m1":
        positive = torch.tensor(E2M1_VALUES)
        values = torch.cat((positive, -positive)).index_select(0, codes_RC.reshape(-1).to(torch.int32))
        out_RC.copy_(values.view(out_RC.shape))
    else:
        out_RC.copy_(codes_RC)
    if isinstance(places_C, int):
        shape = -1, places_C
        grouped = out_RC.unflatten(1, shape)
        if scales.zeros_RJ is not None:
            grouped.sub_(scales.zeros_RJ.unsqueeze(2))
        elif scales.middle:
            grouped.sub_(scales.middle)
        grouped.mul_(scales.scales_RJ.unsqueeze(2))
        return
    if scales.zeros_RJ is not None:
        out_RC.sub_(scales.zeros_RJ.index_select(1, places_C))
    elif scales.middle:
        out_RC.sub_(scales.middle)
    out_RC.mul_(scales.scales_RJ.index_select(1, places_C))
