"""Packed weights to planes: codes of AWQ, GPTQ and compressed-tensors in one order, beside their scales and zero points.

Every layout becomes the planes of one scheme (quant/packed_schemes.py). Words of consecutive inputs are those planes
already; words of consecutive outputs (AWQ) are exchanged by nibbles. Scales keep their type; zero points become bytes.

R rows (outputs), C columns (inputs), J groups, W words, B bytes
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from holdfast.loading.packed.dequantize import FUNCTIONS, Reader, Scales
from holdfast.loading.packed.matrices import PackedMatrix
from holdfast.loading.packed.tiles import Span, row_tiles, words_around
from holdfast.quant.packed_schemes import PackedScheme
from holdfast.quant.packed_weight import plane_bytes

STEP_BYTES = 2**18
"""Bytes of codes per step."""


def repack(
    matrix: PackedMatrix, reader: Reader, scheme: PackedScheme, rows: Span, columns: Span, out: memoryview
) -> None:
    """Fill `out` with rows of every plane, one plane after another; `columns` are whole units of the scheme."""
    bytes_X = torch.frombuffer(out, dtype=torch.uint8)
    names = [plane.name for plane in scheme.planes if not plane.is_shared]
    views = dict(zip(names, plane_bytes(scheme, rows[1] - rows[0], columns[1] - columns[0], bytes_X), strict=True))
    for some, step in _code_steps(matrix, rows, columns):
        own = slice(some[0] - rows[0], some[1] - rows[0])
        codes_RB = _code_bytes(matrix, reader, scheme.bits, some, step)
        first = (step[0] - columns[0]) * scheme.bits // 8
        views["codes"][own, first : first + codes_RB.shape[1]].copy_(codes_RB)
    groups = columns[0] // matrix.scale_columns, -(-columns[1] // matrix.scale_columns)
    if scheme.order_groups:
        groups = 0, matrix.num_groups
    for some in row_tiles(matrix, rows, groups[1] - groups[0]):
        own = slice(some[0] - rows[0], some[1] - rows[0])
        for name, values in _beside_codes(matrix, reader, scheme, some, groups).items():
            views[name][own].copy_(values.clone(memory_format=torch.contiguous_format).view(torch.uint8))


def _code_steps(matrix: PackedMatrix, rows: Span, columns: Span) -> Iterator[tuple[Span, Span]]:
    """Cut codes into steps: of rows, or of columns if inputs are rows of the file; words stay whole if possible."""
    codes = 8 * STEP_BYTES // matrix.layout.bits
    if not matrix.layout.format.is_input_major:
        size = max(1, codes // (columns[1] - columns[0]))
        yield from (((start, min(start + size, rows[1])), columns) for start in range(*rows, size))
        return
    each = 8 * matrix.layout.codes_per_word
    size = max(each, codes // (rows[1] - rows[0]) // each * each)
    yield from ((rows, (start, min(start + size, columns[1]))) for start in range(*columns, size))


def _code_bytes(matrix: PackedMatrix, reader: Reader, bits: int, rows: Span, columns: Span) -> torch.Tensor:
    """Return the bytes of codes [R, B], neighbouring inputs in a byte, the first in its low half."""
    form, each = matrix.layout.format, matrix.layout.codes_per_word
    if form.fields and columns[0] % 2 == 0:
        return _exchanged(matrix, reader, rows, columns)
    if each == 1 or not form.packs_inputs or columns[0] % each:
        return _packed(FUNCTIONS[form.name].codes(matrix, reader, rows, columns), bits)
    words, _ = words_around(columns, each)
    words_RW = (
        reader.read(matrix.codes, words, rows).T if form.is_input_major else reader.read(matrix.codes, rows, words)
    )
    num_codes = columns[1] - columns[0]
    bytes_RB = words_RW.clone(memory_format=torch.contiguous_format).view(torch.uint8)[:, : -(-num_codes * bits // 8)]
    if num_codes * bits % 8:
        bytes_RB[:, -1].bitwise_and_(0x0F)
    return bytes_RB


def _exchanged(matrix: PackedMatrix, reader: Reader, rows: Span, columns: Span) -> torch.Tensor:
    """Exchange nibbles of AWQ: words of 8 outputs for each input become bytes of 2 inputs for each output."""
    words, (first, last) = words_around(rows, matrix.layout.codes_per_word)
    words_CW = reader.read(matrix.codes, columns, words)
    if len(words_CW) % 2:
        words_CW = torch.nn.functional.pad(words_CW, (0, 0, 0, 1))
    bytes_CWF = words_CW.clone(memory_format=torch.contiguous_format).view(torch.uint8).unflatten(1, (-1, 4))
    even, odd = bytes_CWF[0::2], bytes_CWF[1::2]
    halves = (even & 0x0F) | odd << 4, even >> 4 | (odd & 0xF0)
    found_WPB = torch.empty(words_CW.shape[1], len(matrix.layout.format.fields), len(even), dtype=torch.uint8)
    for place, field in enumerate(matrix.layout.format.fields):
        found_WPB[:, place].copy_(halves[field % 2][..., field // 2].T)
    return found_WPB.flatten(0, 1)[first:last]


def _packed(codes_RC: torch.Tensor, bits: int) -> torch.Tensor:
    """Return bytes of two codes, the first in the low half; bytes of one code stay."""
    if bits == 8:
        return codes_RC.view(torch.uint8)
    low, high = codes_RC[:, 0::2], codes_RC[:, 1::2]
    if high.shape[1] < low.shape[1]:
        high = torch.nn.functional.pad(high, (0, 1))
    return low | high << 4


def _beside_codes(
    matrix: PackedMatrix, reader: Reader, scheme: PackedScheme, rows: Span, groups: Span
) -> dict[str, torch.Tensor]:
    """Return scales, zero points and second scales of some rows, in the types of their planes."""
    form = matrix.layout.format
    if form.numbers == "e2m1":
        found = {"scales": reader.read(matrix.scales, rows, groups)}
        if form.second:
            second = reader.read(matrix.second, (0, 1)).float().view(1, 1)
            found["second"] = second.expand(rows[1] - rows[0], 1)
        return found
    scales: Scales = FUNCTIONS[form.name].scales(matrix, reader, rows, groups)
    found = {"scales": scales.scales_RJ}
    if scales.zeros_RJ is not None:
        found["zeros"] = scales.zeros_RJ
    elif scheme.has("zeros"):
        found["zeros"] = torch.full_like(scales.scales_RJ, scales.middle)
    return {name: values.to(getattr(torch, scheme.plane(name).dtype)) for name, values in found.items()}
