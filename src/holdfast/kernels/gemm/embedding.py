"""Embedding lookup: rows by token id, from a plain table or one quantized by row; whole, or a rank's share.

T tokens, V rows of the table, K columns
"""

import torch
from torch import Tensor

from holdfast.kernels.fp8 import as_bits, e4m3_value, narrowed_bits
from holdfast.kernels.gemm.packed_linear import lookup_packed
from holdfast.kernels.operation import operation
from holdfast.kernels.triton_compat import check_dense, constexpr, jit, tl
from holdfast.quant.packed_weight import AnyWeight, PackedWeight
from holdfast.quant.quantized_weight import QuantizedWeight

COLUMNS_PER_PROGRAM = 1024
PIECE_ELEMENTS = 2**20
"""Elements that the reference dequantizes at a time."""


def lookup_rows(ids_T: Tensor, table: AnyWeight, out_TK: Tensor) -> Tensor:
    """Copy row ids_T[t] of the table to row t of `out_TK`; codes are dequantized in float32 and rounded once.

    An id outside the table raises on a CPU and is unchecked on a GPU.
    """
    if isinstance(table, Tensor):
        return torch.index_select(table, 0, ids_T, out=out_TK)
    if isinstance(table, PackedWeight):
        return lookup_packed(ids_T, table, out_TK)
    return lookup_codes(ids_T, table, out_TK)


def lookup_codes_reference(ids_T: Tensor, table: QuantizedWeight, out_TK: Tensor) -> Tensor:
    """Like `lookup_rows`, from a quantized table."""
    _check(ids_T, table, out_TK)
    codes_VK = table.codes.view(torch.uint8)
    step = max(1, PIECE_ELEMENTS // out_TK.shape[1])
    for start in range(0, ids_T.shape[0], step):
        ids = ids_T[start : start + step]
        codes = codes_VK.index_select(0, ids).view(table.codes.dtype)
        values = codes.to(torch.float32).mul_(table.scales.index_select(0, ids)[:, None])
        out_TK[start : start + step].copy_(values)
    return out_TK


def lookup_codes_triton(ids_T: Tensor, table: QuantizedWeight, out_TK: Tensor) -> Tensor:
    return _launch(ids_T, table, None, out_TK)


lookup_codes = operation(reference=lookup_codes_reference, triton=lookup_codes_triton)


def lookup_share_reference(ids_T: Tensor, table: AnyWeight, first_row: int, out_TK: Tensor) -> Tensor:
    """Like `lookup_rows` from a rank's share of a table, which begins at `first_row`; zeros for rows of other ranks.

    An all-reduce of the results gives the rows of the whole table.
    """
    _check(ids_T, table, out_TK)
    rows_T = ids_T - first_row
    is_other_T = (rows_T < 0) | (rows_T >= table.shape[0])
    rows_T = rows_T.masked_fill(is_other_T, 0)
    if isinstance(table, Tensor):
        torch.index_select(table, 0, rows_T, out=out_TK)
    elif isinstance(table, PackedWeight):
        lookup_packed(rows_T, table, out_TK)
    else:
        lookup_codes_reference(rows_T, table, out_TK)
    return out_TK.masked_fill_(is_other_T[:, None], 0.0)


def lookup_share_triton(ids_T: Tensor, table: AnyWeight, first_row: int, out_TK: Tensor) -> Tensor:
    if isinstance(table, PackedWeight):
        return lookup_share_reference(ids_T, table, first_row, out_TK)
    return _launch(ids_T, table, first_row, out_TK)


def _launch(ids_T: Tensor, table: Tensor | QuantizedWeight, first_row: int | None, out_TK: Tensor) -> Tensor:
    """Launch one program for some columns of a token; with `first_row` the table is a rank's share."""
    _check(ids_T, table, out_TK)
    num_tokens, num_columns = out_TK.shape
    assert out_TK.stride(1) == 1, f"{out_TK.stride()=}: columns lie apart"
    is_plain = isinstance(table, Tensor)
    codes, scales = (table, ids_T) if isinstance(table, Tensor) else (table.codes, table.scales)
    check_dense(codes)
    if num_tokens:
        _lookup_kernel[(num_tokens, -(-num_columns // COLUMNS_PER_PROGRAM))](
            ids_T, as_bits(codes), scales, as_bits(out_TK), first_row, None if first_row is None else table.shape[0],
            num_columns, out_TK.stride(0),
            TARGET=str(out_TK.dtype).removeprefix("torch."), IS_PLAIN=is_plain, IS_INT8=codes.dtype == torch.int8,
            BLOCK=COLUMNS_PER_PROGRAM, num_warps=4,
        )  # fmt: skip
    return out_TK


lookup_share = operation(reference=lookup_share_reference, triton=lookup_share_triton)


def _check(ids_T: Tensor, table: AnyWeight, out_TK: Tensor) -> None:
    if isinstance(table, PackedWeight):
        return
    if isinstance(table, Tensor):
        assert table.dtype == out_TK.dtype, f"rows of {table.dtype} into {out_TK.dtype}"
        return
    is_by_row = table.scheme.block_columns == 0 and table.scheme.codes_per_byte == 1
    assert is_by_row, f"{table.scheme.name}: a row cannot be looked up by itself"
    assert out_TK.shape == (ids_T.shape[0], table.shape[1]), f"{ids_T.shape=} {table.shape=} {out_TK.shape=}"


@jit
def _lookup_kernel(
    p_ids, p_codes, p_scales, p_y, first_row, num_rows, num_columns, y_stride,
    TARGET: constexpr, IS_PLAIN: constexpr, IS_INT8: constexpr, BLOCK: constexpr,
):  # fmt: skip
    i_token = tl.program_id(0).to(tl.int64)
    i_column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_column = i_column < num_columns
    i_row = tl.load(p_ids + i_token).to(tl.int64)
    is_mine = None
    if first_row is not None:
        i_row -= first_row
        is_mine = (i_row >= 0) & (i_row < num_rows)
        m_column = m_column & is_mine
    b_code = tl.load(p_codes + i_row * num_columns + i_column, mask=m_column, other=0)
    if IS_PLAIN:
        b_bits = b_code
    else:
        b_code = b_code.to(tl.int32)
        b_value = (b_code << 24 >> 24).to(tl.float32) if IS_INT8 else e4m3_value(b_code)
        if is_mine is None:
            b_scale = tl.load(p_scales + i_row)
        else:
            b_scale = tl.load(p_scales + i_row, mask=is_mine, other=0.0)
        b_bits = narrowed_bits(b_value * b_scale, TARGET)
    tl.store(p_y + i_token * y_stride + i_column, b_bits, mask=i_column < num_columns)
