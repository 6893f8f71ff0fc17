"""The embedding: rows by token id, from a plain table or from a quantized one with a scale for every row; whole, or a rank's share.

T tokens, V rows of the table, K columns
"""

import torch
from torch import Tensor

from holdfast.kernels.fp8 import as_bits, e4m3_value, narrowed_bits
from holdfast.kernels.triton_compat import can_run, constexpr, jit, tl
from holdfast.quant.quantized_weight import QuantizedWeight

# ruff: noqa: ANN001, ANN202 the arguments of kernels have no types


COLUMNS_PER_PROGRAM = 1024
PIECE_ELEMENTS = 2**20
"""Elements that plain torch dequantizes at a time."""


def lookup_rows(ids_T: Tensor, table: Tensor | QuantizedWeight, out_TK: Tensor) -> Tensor:
    """Row ids_T[t] of the table into row t of `out_TK`; codes are dequantized in float32 and rounded once to its type.

    Ids are rows of the table: others are an error on a CPU, and are not looked for on a GPU.
    """
    if isinstance(table, Tensor):
        return torch.index_select(table, 0, ids_T, out=out_TK)
    _check(ids_T, table, out_TK)
    if can_run(out_TK):
        return lookup_rows_triton(ids_T, table, out_TK)
    return lookup_rows_reference(ids_T, table, out_TK)


def lookup_rows_reference(ids_T: Tensor, table: QuantizedWeight, out_TK: Tensor) -> Tensor:
    """The same for codes in plain torch."""
    codes_VK = table.codes.view(torch.uint8)
    step = max(1, PIECE_ELEMENTS // out_TK.shape[1])
    for start in range(0, ids_T.shape[0], step):
        ids = ids_T[start : start + step]
        codes = codes_VK.index_select(0, ids).view(table.codes.dtype)
        values = codes.to(torch.float32).mul_(table.scales.index_select(0, ids)[:, None])
        out_TK[start : start + step].copy_(values)
    return out_TK


def lookup_rows_triton(ids_T: Tensor, table: QuantizedWeight, out_TK: Tensor) -> Tensor:
    """The same for codes as a Triton kernel, a program for some columns of a token."""
    num_tokens, num_columns = out_TK.shape
    assert out_TK.stride(1) == 1, f"{out_TK.stride()=}: columns lie apart"
    if num_tokens:
        _lookup_rows_kernel[(num_tokens, -(-num_columns // COLUMNS_PER_PROGRAM))](
            ids_T, as_bits(table.codes), table.scales, as_bits(out_TK), num_columns, out_TK.stride(0),
            TARGET=str(out_TK.dtype).removeprefix("torch."), IS_INT8=table.scheme.code_dtype == "int8",
            BLOCK=COLUMNS_PER_PROGRAM, num_warps=4,
        )  # fmt: skip
    return out_TK


def lookup_share(ids_T: Tensor, table: Tensor | QuantizedWeight, first_row: int, out_TK: Tensor) -> Tensor:
    """The same from the rows of a whole table that begin at `first_row`; zeros for ids that other ranks have the rows of.

    So what all ranks find, added up, is what the whole table has.
    """
    if isinstance(table, QuantizedWeight):
        _check(ids_T, table, out_TK)
    else:
        assert table.dtype == out_TK.dtype, f"rows of {table.dtype} into {out_TK.dtype}"
    if can_run(out_TK):
        return lookup_share_triton(ids_T, table, first_row, out_TK)
    return lookup_share_reference(ids_T, table, first_row, out_TK)


def lookup_share_reference(ids_T: Tensor, table: Tensor | QuantizedWeight, first_row: int, out_TK: Tensor) -> Tensor:
    """The same in plain torch."""
    rows_T = ids_T - first_row
    is_other_T = (rows_T < 0) | (rows_T >= table.shape[0])
    rows_T = rows_T.masked_fill(is_other_T, 0)
    if isinstance(table, Tensor):
        torch.index_select(table, 0, rows_T, out=out_TK)
    else:
        lookup_rows_reference(rows_T, table, out_TK)
    return out_TK.masked_fill_(is_other_T[:, None], 0.0)


def lookup_share_triton(ids_T: Tensor, table: Tensor | QuantizedWeight, first_row: int, out_TK: Tensor) -> Tensor:
    """The same as a Triton kernel, a program for some columns of a token."""
    num_tokens, num_columns = out_TK.shape
    assert out_TK.stride(1) == 1, f"{out_TK.stride()=}: columns lie apart"
    is_plain = isinstance(table, Tensor)
    codes, scales = (table, ids_T) if isinstance(table, Tensor) else (table.codes, table.scales)
    assert codes.is_contiguous(), f"{codes.shape} with strides {codes.stride()}"
    if num_tokens:
        _lookup_share_kernel[(num_tokens, -(-num_columns // COLUMNS_PER_PROGRAM))](
            ids_T, as_bits(codes), scales, as_bits(out_TK), first_row, table.shape[0], num_columns, out_TK.stride(0),
            TARGET=str(out_TK.dtype).removeprefix("torch."), IS_PLAIN=is_plain,
            IS_INT8=not isinstance(table, Tensor) and table.scheme.code_dtype == "int8",
            BLOCK=COLUMNS_PER_PROGRAM, num_warps=4,
        )  # fmt: skip
    return out_TK


def _check(ids_T: Tensor, table: QuantizedWeight, out_TK: Tensor) -> None:
    scheme = table.scheme
    assert scheme.block_columns == 0, f"{scheme.name}: a row cannot be looked up by itself"
    assert scheme.codes_per_byte == 1, f"{scheme.name}: a row cannot be looked up by itself"
    assert out_TK.shape == (ids_T.shape[0], table.shape[1]), f"{ids_T.shape=} {table.shape=} {out_TK.shape=}"


@jit
def _lookup_rows_kernel(
    p_ids, p_codes, p_scales, p_y, num_columns, y_stride, TARGET: constexpr, IS_INT8: constexpr, BLOCK: constexpr
):
    i_token = tl.program_id(0).to(tl.int64)
    i_column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_column = i_column < num_columns
    i_row = tl.load(p_ids + i_token).to(tl.int64)
    b_code = tl.load(p_codes + i_row * num_columns + i_column, mask=m_column, other=0).to(tl.int32)
    b_value = (b_code << 24 >> 24).to(tl.float32) if IS_INT8 else e4m3_value(b_code)
    b_bits = narrowed_bits(b_value * tl.load(p_scales + i_row), TARGET)
    tl.store(p_y + i_token * y_stride + i_column, b_bits, mask=m_column)


@jit
def _lookup_share_kernel(
    p_ids, p_codes, p_scales, p_y, first_row, num_rows, num_columns, y_stride,
    TARGET: constexpr, IS_PLAIN: constexpr, IS_INT8: constexpr, BLOCK: constexpr,
):  # fmt: skip
    i_token = tl.program_id(0).to(tl.int64)
    i_column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_column = i_column < num_columns
    i_row = tl.load(p_ids + i_token).to(tl.int64) - first_row
    is_mine = (i_row >= 0) & (i_row < num_rows)
    b_code = tl.load(p_codes + i_row * num_columns + i_column, mask=m_column & is_mine, other=0)
    if IS_PLAIN:
        b_bits = b_code
    else:
        b_code = b_code.to(tl.int32)
        b_value = (b_code << 24 >> 24).to(tl.float32) if IS_INT8 else e4m3_value(b_code)
        b_bits = narrowed_bits(b_value * tl.load(p_scales + i_row, mask=is_mine, other=0.0), TARGET)
    tl.store(p_y + i_token * y_stride + i_column, b_bits, mask=m_column)
