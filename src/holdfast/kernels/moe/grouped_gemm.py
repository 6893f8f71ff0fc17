"""Grouped GEMM: blocks of rows by the weight of their expert, in tensor-core tiles.

P pairs of token and expert, M rows of a block, N outputs, K inputs

The weight is the first operand of wgmma and the rows are the second: a small block wastes little, and the first operand
may come from registers, where codes are dequantized. Blocks come from the sorted pairs (kernels/moe/routing.py). A batch
that fits into one block is not sorted: each pair has a program, and the first pair of an expert takes all its rows.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.kernels.activation import gated_numbers
from holdfast.kernels.fp8 import loaded_numbers
from holdfast.kernels.gemm.e2m1 import e2m1_parts, e2m1_wide_parts, e8m0_numbers
from holdfast.kernels.gemm.packed_tiles import RowBlocks, packed_product, takes_packed_tiles
from holdfast.kernels.gemm.quantized_tiles import E2M1_GROUPS, FP8_BLOCKS, FP8_ROWS, INT8_ROWS, OperandKind, operands_of
from holdfast.kernels.moe.deep_gemv import weight_rows
from holdfast.kernels.moe.routing import ExpertProduct
from holdfast.kernels.operation import pdl_flags
from holdfast.kernels.triton_compat import constexpr, is_interpreted, jit, jit_counting, next_power_of_two, tl
from holdfast.quant.quantized_weight import QuantizedWeight

# Kernels bind a name and read it under the same constexpr condition.
# pyright: reportPossiblyUnboundVariable=false


HALF_WORD_COLUMNS = 64
"""Columns whose two exponents fill half a word."""


class Tile(NamedTuple):
    """Outputs and inputs per program, pipeline stages over K, and warps."""

    block_n: int
    block_k: int
    num_stages: int
    num_warps: int
    is_joint: bool = False
    """If True, half of a gated tile is gates and half their ups: one product, half as many outputs."""

    def num_outputs(self, gated: bool) -> int:
        return self.block_n // 2 if gated and self.is_joint else self.block_n


def tile_for(block_rows: int, gated: bool, kind: OperandKind, element_bytes: int) -> Tile:
    """Return the tile of a program that does not spill registers, as measured on an H200 (docs/log.md).

    Small blocks are bound by memory: a few programs per SM with deep pipelines. Large ones are bound by tensor
    cores: as many outputs as registers hold.
    """
    if element_bytes == 4:
        return Tile(32, 32, 2, 4)
    is_plain = kind == OperandKind.PLAIN
    if block_rows <= 32:
        if element_bytes == 1 and not gated:
            return Tile(128, 128, 3, 8)
        if kind == OperandKind.FP8_ROWS:
            return Tile(128, 128, 5, 8, is_joint=True)
        return Tile(64, 128, 3 if is_plain and gated else 5, 4)
    block_k = 64 if is_plain else 128
    if block_rows == 64:
        return Tile(64 if gated else 128, block_k, 4, 4)
    return Tile(128 if is_plain or not gated else 64, block_k, 4, 8)


def grouped_gemm(product: ExpertProduct) -> Tensor:
    """Multiply each block's rows by its expert's weight. `product.quantized` holds the codes of x."""
    x_XK, weight, order, out_PN, gated, quantized, bias_EN, form = product
    num_pairs, size_n = out_PN.shape
    if not num_pairs:
        return out_PN
    if isinstance(weight, QuantizedWeight) and takes_packed_tiles(x_XK, weight):
        packed_product(x_XK, weight, bias_EN, _blocks_of(product), out_PN, form.flags(gated))
        return out_PN
    size_k = x_XK.shape[1]
    operands = operands_of(x_XK, weight, quantized)
    tile = tile_for(order.block_rows, gated, operands.kind, operands.tensors[0].element_size())
    assert operands.group in (0, tile.block_k), f"scales for {operands.group} columns, and tiles of {tile.block_k}"
    num_outputs = tile.num_outputs(gated)
    grid = (-(-size_n // num_outputs), order.num_blocks)
    bias = out_PN if bias_EN is None else bias_EN
    blocks = (order.pairs_BR, order.block_experts_B) if order.is_sorted else (order.expert_ids_TS, order.expert_ids_TS)
    arguments = (*operands.tensors, bias, *blocks, out_PN, len(order.expert_ids_TS), size_n, size_k)
    flags = {
        "HAS_BIAS": bias_EN is not None, "IS_SORTED": order.is_sorted, "TOP_K": order.top_k,
        "BLOCK_S": next_power_of_two(order.top_k), "PAIRS_PER_ROW": num_pairs // len(x_XK),
        "EVEN_N": size_n % num_outputs == 0, "EVEN_K": size_k % tile.block_k == 0,
        "BLOCK_M": order.block_rows, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k, "NUM_STAGES": tile.num_stages,
        "PLAIN": is_interpreted(), "num_warps": tile.num_warps, **form.flags(gated), **pdl_flags(x_XK),
    }  # fmt: skip
    # The fast path of packed codes loads exponents of a block of K as words; bfloat16 holds all products of codes and scales.
    is_in_words = size_k % HALF_WORD_COLUMNS == 0 and operands.tensors[3].numel() % 4 == 0
    by_hand = is_interpreted() or x_XK.dtype != torch.bfloat16 or not is_in_words
    _grouped_gemm_kernel[grid](
        *arguments, operands.scale_columns,
        KIND=int(operands.kind), BLOCK_ROWS=operands.block_rows, IS_JOINT=gated and tile.is_joint,
        BY_HAND=by_hand and operands.kind == OperandKind.E2M1_GROUPS, **flags,
    )  # fmt: skip
    return out_PN


def _blocks_of(product: ExpertProduct) -> RowBlocks:
    """Return the blocks of packed tiles."""
    order, ids_TS = product.order, product.order.expert_ids_TS
    tensors = (order.pairs_BR, order.block_experts_B) if order.is_sorted else (ids_TS, ids_TS)
    pairs_per_row = order.num_pairs // len(product.x_XK)
    return RowBlocks(
        *tensors, order.num_blocks, order.block_rows, len(ids_TS), order.top_k, pairs_per_row, order.is_sorted
    )


@jit_counting("num_rows")
def _grouped_gemm_kernel(
    p_x, p_x_scales, p_weight, p_scales, p_bias, p_pairs, p_block_experts, p_out,
    num_rows, size_n, size_k, scale_columns,
    KIND: constexpr, BLOCK_ROWS: constexpr, IS_JOINT: constexpr, BY_HAND: constexpr, GATED: constexpr,
    INTERLEAVED: constexpr, LIMIT: constexpr, IS_SCALED: constexpr, HAS_BIAS: constexpr, IS_SORTED: constexpr, TOP_K: constexpr,
    BLOCK_S: constexpr, PAIRS_PER_ROW: constexpr, EVEN_N: constexpr, EVEN_K: constexpr, BLOCK_M: constexpr,
    BLOCK_N: constexpr, BLOCK_K: constexpr, NUM_STAGES: constexpr, PLAIN: constexpr, PDL: constexpr,
):  # fmt: skip
    i_n = tl.program_id(0)
    i_block = tl.program_id(1)
    NUM_OUTPUTS: constexpr = BLOCK_N // 2 if IS_JOINT else BLOCK_N
    o_t = tl.arange(0, BLOCK_N)
    o_n = i_n * NUM_OUTPUTS + o_t % NUM_OUTPUTS
    o_k = tl.arange(0, BLOCK_K)
    m_n = o_n < size_n
    if PDL:
        tl.extra.cuda.gdc_wait()
    expert, b_pairs = _block_pairs(p_pairs, p_block_experts, i_block, num_rows, IS_SORTED, TOP_K, BLOCK_S, BLOCK_M)
    if expert < 0:
        return
    b_rows = (tl.maximum(b_pairs, 0) // PAIRS_PER_ROW).to(tl.int64)
    first_row = expert * size_n * (2 if GATED else 1)
    b_weight_rows, up_rows = weight_rows(first_row, o_n, size_n, INTERLEAVED)
    if IS_JOINT:
        b_weight_rows += o_t // NUM_OUTPUTS * up_rows
    if KIND == E2M1_GROUPS:
        b_y, b_up_y = _packed_sums(
            p_x, p_weight, p_scales, b_rows, b_weight_rows, up_rows, m_n, size_k,
            GATED, EVEN_N, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K, NUM_STAGES, BY_HAND, PLAIN,
        )  # fmt: skip
    else:
        b_y, b_up_y = _sums(
            p_x, p_x_scales, p_weight, p_scales, b_rows, b_weight_rows, up_rows, first_row, o_k, m_n, i_n, size_n,
            size_k, scale_columns, KIND, BLOCK_ROWS, IS_JOINT, GATED, INTERLEAVED, EVEN_N, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K,
            NUM_STAGES, PLAIN,
        )  # fmt: skip
    if PDL:
        # Release late: programs of the next kernel would take occupancy from this one.
        tl.extra.cuda.gdc_launch_dependents()
    if KIND == FP8_ROWS or KIND == INT8_ROWS:
        if KIND == FP8_ROWS:
            b_x_s = tl.load(p_x_scales + b_rows)[None, :]
            b_y *= b_x_s
            b_up_y *= b_x_s
        b_y *= tl.load(p_scales + b_weight_rows, mask=m_n, other=0.0)[:, None]
        if GATED and not IS_JOINT:
            b_up_y *= tl.load(p_scales + b_weight_rows + up_rows, mask=m_n, other=0.0)[:, None]
    if HAS_BIAS:
        b_y += tl.load(p_bias + b_weight_rows, mask=m_n, other=0.0).to(tl.float32)[:, None]
        if GATED and not IS_JOINT:
            b_up_y += tl.load(p_bias + b_weight_rows + up_rows, mask=m_n, other=0.0).to(tl.float32)[:, None]
    if IS_JOINT:
        b_y, b_up_y = tl.split(tl.permute(tl.reshape(b_y, (2, NUM_OUTPUTS, BLOCK_M)), (1, 2, 0)))
        o_n = i_n * NUM_OUTPUTS + tl.arange(0, NUM_OUTPUTS)
        m_n = o_n < size_n
    _store_outputs(p_out, b_y, b_up_y, b_pairs, o_n, m_n, size_n, GATED, LIMIT, IS_SCALED)


@jit
def _sums(
    p_x, p_x_scales, p_weight, p_scales, b_rows, b_weight_rows, up_rows, first_row, o_k, m_n, i_n, size_n,
    size_k, scale_columns, KIND: constexpr, BLOCK_ROWS: constexpr, IS_JOINT: constexpr, GATED: constexpr,
    INTERLEAVED: constexpr, EVEN_N: constexpr, EVEN_K: constexpr, BLOCK_M: constexpr, BLOCK_N: constexpr,
    BLOCK_K: constexpr, NUM_STAGES: constexpr, PLAIN: constexpr,
):  # fmt: skip
    """Return the products of a block's rows and a tile of gates or outputs, and of its ups, before scales of rows."""
    up_offset = up_rows * size_k
    p_w = p_weight + b_weight_rows[:, None] * size_k + o_k[None, :]
    p_rows = p_x + b_rows[None, :] * size_k + o_k[:, None]
    b_y = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    b_up_y = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    if KIND == FP8_BLOCKS:
        p_x_s = p_x_scales + b_rows * scale_columns
        p_s = p_scales + first_row // BLOCK_ROWS * scale_columns
        p_up_s = p_s + up_rows // BLOCK_ROWS * scale_columns  # if interleaved, the offset is 0: both share a block
    for k in tl.range(0, size_k, BLOCK_K, num_stages=NUM_STAGES):
        m_w = None
        m_x = None
        if not EVEN_N:
            m_w = m_n[:, None]
        if not EVEN_K:
            m_x = (k + o_k < size_k)[:, None]
            m_w = m_n[:, None] & (k + o_k < size_k)[None, :]
        b_x = _loaded(p_rows + k, m_x, KIND, PLAIN)
        b_w = _loaded(p_w + k, m_w, KIND, PLAIN)
        if GATED and not IS_JOINT:
            b_up = _loaded(p_w + up_offset + k, m_w, KIND, PLAIN)
        if KIND == FP8_BLOCKS:
            i_k = k // BLOCK_K
            b_x_s = tl.load(p_x_s + i_k)[None, :]
            b_s = _block_scales(p_s + i_k, i_n, scale_columns, size_n, INTERLEAVED, BLOCK_ROWS, BLOCK_N)
            b_y += tl.dot(b_w, b_x) * (b_s * b_x_s)
            if GATED:
                b_s = _block_scales(p_up_s + i_k, i_n, scale_columns, size_n, INTERLEAVED, BLOCK_ROWS, BLOCK_N)
                b_up_y += tl.dot(b_up, b_x) * (b_s * b_x_s)
        elif KIND == FP8_ROWS:
            b_y = tl.dot(b_w, b_x, b_y, max_num_imprecise_acc=BLOCK_K)
            if GATED and not IS_JOINT:
                b_up_y = tl.dot(b_up, b_x, b_up_y, max_num_imprecise_acc=BLOCK_K)
        else:
            b_y = tl.dot(b_w.to(b_x.dtype), b_x, b_y, input_precision="ieee")
            if GATED and not IS_JOINT:
                b_up_y = tl.dot(b_up.to(b_x.dtype), b_x, b_up_y, input_precision="ieee")
    return b_y, b_up_y


@jit
def _block_pairs(
    p_pairs, p_block_experts, i_block, num_rows,
    IS_SORTED: constexpr, TOP_K: constexpr, BLOCK_S: constexpr, BLOCK_M: constexpr,
):  # fmt: skip
    """Return the expert of a block, -1 for none, and its pairs; padding (-1) reads the first row and is not stored.

    If unsorted, a block is a pair and takes all rows of its expert, unless an earlier pair took them. If a row names
    the expert n times, the n-th occurrence belongs to the block of the n-th pair.
    """
    o_m = tl.arange(0, BLOCK_M)
    expert = tl.load(p_block_experts + i_block).to(tl.int64)
    if IS_SORTED:
        b_pairs = tl.load(p_pairs + i_block * BLOCK_M + o_m)
    else:
        o_s = tl.arange(0, BLOCK_S)
        o_p = o_m[:, None] * TOP_K + o_s[None, :]
        m_p = (o_m < num_rows)[:, None] & (o_s < TOP_K)[None, :]
        m_mine = tl.load(p_pairs + o_p, mask=m_p, other=-1) == expert
        # A token may name an expert twice: each occurrence has its own block.
        b_times = tl.cumsum(m_mine.to(tl.int32), axis=1)
        time = tl.max(tl.max(tl.where(o_p == i_block, b_times, 0), axis=1), axis=0)
        b_pairs = tl.max(tl.where(m_mine & (b_times == time), o_p, -1), axis=1)
        first = tl.min(tl.where(b_pairs >= 0, b_pairs, TOP_K * BLOCK_M), axis=0)
        expert = tl.where(first == i_block, expert, -1)
    return expert, b_pairs


@jit
def _store_outputs(
    p_out, b_y, b_up_y, b_pairs, o_n, m_n, size_n, GATED: constexpr, LIMIT: constexpr, IS_SCALED: constexpr
):
    """Store products [N, M], gated if GATED, to the rows of their pairs."""
    if GATED:
        b_y = gated_numbers(b_y, b_up_y, LIMIT, IS_SCALED)
    o_y = b_pairs[None, :].to(tl.int64) * size_n + o_n[:, None]
    tl.store(p_out + o_y, b_y.to(p_out.dtype.element_ty), mask=m_n[:, None] & (b_pairs >= 0)[None, :])


@jit
def _loaded(p_numbers, m_numbers, KIND: constexpr, PLAIN: constexpr):
    """Load an operand; the interpreter converts e4m3 to half precision."""
    if m_numbers is None:
        b_numbers = tl.load(p_numbers)
    else:
        b_numbers = tl.load(p_numbers, mask=m_numbers, other=0.0)
    if (KIND == FP8_ROWS or KIND == FP8_BLOCKS) and PLAIN:
        b_numbers = loaded_numbers(b_numbers, PLAIN)
    return b_numbers


@jit
def _block_scales(p_s, i_n, scale_columns, size_n, INTERLEAVED: constexpr, BLOCK_ROWS: constexpr, BLOCK_N: constexpr):
    """Load the scales of a tile's outputs for one block of columns: one if the tile lies within a block of rows."""
    STEP: constexpr = 2 if INTERLEAVED else 1
    if BLOCK_ROWS % (STEP * BLOCK_N) == 0:
        return tl.load(p_s + i_n * (STEP * BLOCK_N) // BLOCK_ROWS * scale_columns)
    else:
        o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
        return tl.load(p_s + STEP * o_n // BLOCK_ROWS * scale_columns, mask=o_n < size_n, other=0.0)[:, None]


@jit
def _packed_sums(
    p_x, p_weight, p_scales, b_rows, b_weight_rows, up_rows, m_n, size_k,
    GATED: constexpr, EVEN_N: constexpr, EVEN_K: constexpr, BLOCK_M: constexpr, BLOCK_N: constexpr,
    BLOCK_K: constexpr, NUM_STAGES: constexpr, BY_HAND: constexpr, PLAIN: constexpr,
):  # fmt: skip
    """Like `_sums`, for codes of four bits with a power of two for every 32 columns."""
    p_rows = p_x + b_rows[None, :] * size_k
    row_bytes = tl.multiple_of(size_k // 2, 16)
    row_groups = size_k // 32
    p_w = p_weight + b_weight_rows[:, None] * row_bytes
    p_s = p_scales + b_weight_rows[:, None] * row_groups
    p_up = p_w + up_rows * row_bytes
    p_up_s = p_s + up_rows * row_groups
    b_y = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    b_up_y = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    o_k = tl.arange(0, BLOCK_K)
    o_b = tl.arange(0, BLOCK_K // 2)
    p_words = (p_scales + b_weight_rows * row_groups).to(tl.pointer_type(tl.int32))
    up_words = up_rows * (row_groups // 4)
    b_first_groups = b_weight_rows * row_groups
    for k in tl.range(0, size_k, BLOCK_K, num_stages=NUM_STAGES):
        if BY_HAND:
            o_k_b = k // 2 + o_b
            m_b = (o_k_b < row_bytes)[:, None]
            b_even = tl.load(p_rows + 2 * o_k_b[:, None], mask=m_b, other=0.0)
            b_odd = tl.load(p_rows + 2 * o_k_b[:, None] + 1, mask=m_b, other=0.0)
            b_y = _dot_halves(p_w, p_s, m_n, o_k_b, row_bytes, b_even, b_odd, b_y, PLAIN)
            if GATED:
                b_up_y = _dot_halves(p_up, p_up_s, m_n, o_k_b, row_bytes, b_even, b_odd, b_up_y, PLAIN)
        else:
            m_w = None if EVEN_N else m_n[:, None]
            m_s = None if EVEN_N else m_n
            if EVEN_K:
                b_x = tl.load(p_rows + o_k[:, None] + k)
                b_codes = tl.load(p_w + o_b[None, :] + k // 2, mask=m_w)
                b_exponents = tl.load(p_words + k // BLOCK_K, mask=m_s)
            else:
                m_b = m_n[:, None] & (k // 2 + o_b < row_bytes)[None, :]
                b_x = tl.load(p_rows + o_k[:, None] + k, mask=(k + o_k < size_k)[:, None], other=0.0)
                b_codes = tl.load(p_w + o_b[None, :] + k // 2, mask=m_b, other=0)
                b_exponents = _word_of_halves(p_scales, b_first_groups, k, m_n, size_k)
            b_y = tl.dot(_decoded(b_codes, b_exponents, BLOCK_N), b_x, b_y)
            if GATED:
                if EVEN_K:
                    b_codes = tl.load(p_up + o_b[None, :] + k // 2, mask=m_w)
                    b_exponents = tl.load(p_words + up_words + k // BLOCK_K, mask=m_s)
                else:
                    b_codes = tl.load(p_up + o_b[None, :] + k // 2, mask=m_b, other=0)
                    b_exponents = _word_of_halves(p_scales, b_first_groups + up_rows * row_groups, k, m_n, size_k)
                b_up_y = tl.dot(_decoded(b_codes, b_exponents, BLOCK_N), b_x, b_up_y)
    return b_y, b_up_y


@jit
def _dot_halves(p_w, p_s, m_n, o_b, row_bytes, b_even, b_odd, b_y, PLAIN: constexpr):
    """Multiply low nibbles by even inputs and high nibbles by odd ones."""
    m_w = m_n[:, None] & (o_b < row_bytes)[None, :]
    b_codes = tl.load(p_w + o_b[None, :], mask=m_w, other=0)
    b_factors = e8m0_numbers(tl.load(p_s + o_b[None, :] // 16, mask=m_w, other=0))
    b_low, b_high = e2m1_parts(b_codes, PLAIN)
    b_y = tl.dot((b_low.to(tl.float32) * b_factors).to(b_even.dtype), b_even, b_y, input_precision="ieee")
    return tl.dot((b_high.to(tl.float32) * b_factors).to(b_odd.dtype), b_odd, b_y, input_precision="ieee")


@jit
def _word_of_halves(p_scales, b_first, k, m_n, size_k):
    """Load four exponents of each row from column k on, 0 after the last; a row may begin in the middle of a word.

    Loads are whole words: Triton does not pipeline shorter ones.
    """
    p_words = p_scales.to(tl.pointer_type(tl.int32)) + (b_first // 4 + k // 128)
    m_high = k + 64 < size_k
    b_word = tl.load(p_words, mask=m_n, other=0)
    b_next = tl.load(p_words + 1, mask=m_n & m_high, other=0)
    b_shifted = (b_word >> 16 & 65535) | (b_next << 16)
    b_word = tl.where(b_first % 4 == 0, b_word, b_shifted)
    return tl.where(m_high, b_word, b_word & 65535)


@jit
def _decoded(b_codes, b_words, BLOCK_N: constexpr):
    """Decode bytes of codes [N, 64] and words of four exponents [N] to bfloat16 [N, 128], which holds them exactly."""
    b_low, b_high = e2m1_wide_parts(b_codes)
    b_w = tl.reshape(tl.join(b_low, b_high), (BLOCK_N, 4, 32))
    b_exponents = b_words[:, None] >> (8 * tl.arange(0, 4))[None, :] & 255
    b_factors = (b_exponents << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return tl.reshape(b_w * b_factors[:, :, None], (BLOCK_N, 128))
