"""Tensor-core tiles of packed 4-bit weights on Hopper, decoded in registers, in Gluon.

M rows of a block, N outputs, K inputs

The weight is the first operand, in registers, and each of its bytes is loaded once. Four threads share a row: each takes 16
bytes, which are 32 inputs with one scale. The order of K inside a product is free, so words stay as stored: nibbles p and
p + 4 make a pair, and rows of x are put into that order.

Blocks of few rows take mma.sync, because wgmma costs as much for 8 rows as for 64. Their codes go straight to registers.
Larger blocks take wgmma, with codes and rows in shared memory. kernels/moe/grouped_gemm.py launches these tiles, and has
tiles of its own for other GPUs and types.

`_decoded` knows the scheme, MXFP4: its codes, and GROUP inputs to a scale. `_store` applies the rest of the factor.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from holdfast.kernels.activation import gated_numbers
from holdfast.kernels.gemm.e2m1 import E2M1_PAIRS_ASM
from holdfast.kernels.operation import pdl_flags
from holdfast.kernels.triton_compat import (
    constexpr,
    gl,
    gluon_jit,
    gluon_jit_counting,
    hopper,
    kernel_constant,
    kernel_value,
)
from holdfast.quant.packed_weight import AnyWeight
from holdfast.quant.quantized_weight import QuantizedWeight
from holdfast.quant.weight_schemes import MXFP4

# Kernels bind a name and read it under the same constexpr condition.
# pyright: reportPossiblyUnboundVariable=false


CHUNK = kernel_constant(128)
"""Inputs of a row that four threads take at once."""
GROUP = kernel_constant(32)
"""Inputs of a thread in a chunk, which share a scale."""
LARGEST_EXPONENT = 188
"""Largest exponent of a scale: 2^61. Scales of trained weights are near 2^-10."""
MAX_EXPONENT = kernel_constant(LARGEST_EXPONENT)
WAIT = kernel_constant("griddepcontrol.wait; // $0")
LAUNCH_DEPENDENTS = kernel_constant("griddepcontrol.launch_dependents; // $0")


FEW_ROWS = 16
"""Most rows of a block that take mma.sync."""


class PackedTile(NamedTuple):
    """Rows of the weight per program, pipeline stages over K, and warps."""

    block_n: int
    num_stages: int
    num_warps: int


def takes_packed_tiles(x_XK: Tensor, weight: AnyWeight) -> bool:
    """Return True for MXFP4 weights and rows in bfloat16 on Hopper."""
    return (
        gl is not None
        and isinstance(weight, QuantizedWeight)
        and weight.scheme.name == MXFP4.name
        and x_XK.dtype == torch.bfloat16
        and x_XK.is_cuda
        and torch.cuda.get_device_capability(x_XK.device)[0] == 9
    )


def packed_tile(block_rows: int) -> PackedTile:
    """Return the fastest tile on an H200 (docs/log.md)."""
    if block_rows <= FEW_ROWS:
        return PackedTile(128, 3, 4)
    return PackedTile(64, 8, 4) if block_rows <= 32 else PackedTile(256, 3, 8)


class RowBlocks(NamedTuple):
    """The rows of each block of a launch, and the expert whose weight multiplies them."""

    pairs: Tensor
    experts: Tensor
    num_blocks: int
    block_rows: int
    num_rows: int
    """Tokens, each of which has `top_k` pairs."""
    top_k: int
    pairs_per_row: int
    is_sorted: bool
    """If False, a block is a pair and takes all rows of its expert (kernels/moe/grouped_gemm.py)."""


def packed_product(
    x_XK: Tensor, weight: QuantizedWeight, bias: Tensor | None, blocks: RowBlocks, out_PN: Tensor, form: dict[str, Any]
) -> None:
    """Multiply each block's rows by its expert's weight, which `takes_packed_tiles` accepts; `form` has the flags of the gate."""
    size_n, size_k = out_PN.shape[1], x_XK.shape[1]
    assert weight.shape[-2:] == (size_n * (2 if form["GATED"] else 1), size_k), (
        f"{weight.shape=} {x_XK.shape=} {out_PN.shape=}"
    )
    tile = packed_tile(blocks.block_rows)
    num_outputs = tile.block_n // 2 if form["GATED"] else tile.block_n
    packed_tile_kernel[(-(-size_n // num_outputs), blocks.num_blocks)](
        x_XK, weight.codes.view(torch.int32), weight.scales, out_PN if bias is None else bias, blocks.pairs,
        blocks.experts, out_PN, blocks.num_rows, size_n,
        SIZE_K=size_k, HAS_BIAS=bias is not None, IS_SORTED=blocks.is_sorted, TOP_K=blocks.top_k,
        PAIRS_PER_ROW=blocks.pairs_per_row, BLOCK_M=blocks.block_rows, BLOCK_N=tile.block_n,
        NUM_STAGES=tile.num_stages, FEW=blocks.block_rows <= FEW_ROWS, num_warps=tile.num_warps,
        **form, **pdl_flags(x_XK),
    )  # fmt: skip


@kernel_value
def group_layout(block_n, num_warps):
    """Return the layout [N, 4, 4] of a chunk's words: a thread has rows r and r + 8 of a warp's 16, and one group of each."""
    block_n, num_bits = int(block_n), int(num_warps).bit_length() - 1
    rows = [[row, 0, 0] for row in (16, 32, 64, 128) if row < block_n]
    return gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [8, 0, 0], *rows[num_bits:]],
        [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        rows[:num_bits],
        [],
        [block_n, 4, 4],
    )


@kernel_value
def word_layout(block_n, num_warps):
    """Return the layout [N, 16] that joins the last two axes of `group_layout`."""
    layout = group_layout(block_n, num_warps)
    bases = (
        [[row, 4 * group + word] for row, group, word in bases]
        for bases in (layout.reg_bases, layout.lane_bases, layout.warp_bases)
    )
    return gl.DistributedLinearLayout(*bases, [], [int(block_n), 16])


@kernel_value
def row_layout(block_m, num_warps):
    """Return the layout [M, 4, 4, 8] of a chunk of rows: a thread loads 8 inputs at once, of several groups if it must."""
    block_m, num_bits = int(block_m), int(num_warps).bit_length() - 1
    rows = [[row, 0, 0, 0] for row in (8, 16, 32, 64) if row < block_m]
    groups = [[0, 1, 0, 0], [0, 2, 0, 0]]
    warps = (rows + groups)[:num_bits]
    return gl.DistributedLinearLayout(
        [
            [0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 0, 4],
            *groups[max(0, len(warps) - len(rows)) :], *rows[len(warps) :],
        ],
        [[0, 0, 1, 0], [0, 0, 2, 0], [1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]],
        warps + [[0, 0, 0, 0]] * (num_bits - len(warps)),
        [],
        [block_m, 4, 4, 8],
    )  # fmt: skip


@gluon_jit
def _block_pairs(
    p_pairs, p_experts, i_block, num_rows, o_m, IS_SORTED: constexpr, TOP_K: constexpr, BLOCK_M: constexpr
):
    """Like `_block_pairs` of kernels/moe/grouped_gemm.py, with padding last."""
    expert = gl.load(p_experts + i_block)
    if IS_SORTED:
        b_pairs = gl.load(p_pairs + i_block * BLOCK_M + o_m)
    else:
        i_row = i_block // TOP_K
        time = 0
        b_times = gl.full_like(o_m, 0)
        b_pairs = gl.full_like(o_m, -1)
        for s in gl.static_range(TOP_K):
            is_mine = (gl.load(p_pairs + i_row * TOP_K + s) == expert) & (i_row * TOP_K + s <= i_block)
            time += is_mine.to(gl.int32)
        for s in gl.static_range(TOP_K):
            m_mine = gl.load(p_pairs + o_m * TOP_K + s, mask=o_m < num_rows, other=-1) == expert
            b_times += m_mine.to(gl.int32)
            b_pairs = gl.where(m_mine & (b_times == time), o_m * TOP_K + s, b_pairs)
        first = gl.min(gl.where(b_pairs >= 0, b_pairs, TOP_K * BLOCK_M), axis=0)
        expert = gl.where(first == i_block, expert, -1)
        b_pairs = _padding_last(b_pairs)
    return expert, b_pairs


@gluon_jit
def _padding_last(b_pairs):
    """Move pairs to the front."""
    BLOCK_M: constexpr = b_pairs.shape[0]
    square: constexpr = gl.BlockedLayout([1, BLOCK_M], [BLOCK_M, 32 // BLOCK_M], [1, gl.num_warps()], [1, 0])
    o_row = gl.arange(0, BLOCK_M, gl.SliceLayout(1, square))[:, None]
    o_column = gl.arange(0, BLOCK_M, gl.SliceLayout(0, square))[None, :]
    b_all = gl.convert_layout(b_pairs, gl.SliceLayout(0, square))[None, :]
    b_place = gl.sum(((b_all >= 0) & (o_column < o_row)).to(gl.int32), axis=1)
    b_place = gl.convert_layout(b_place, gl.SliceLayout(0, square))[None, :]
    b_moved = gl.max(gl.where((b_place == o_row) & (b_all >= 0), b_all, -1), axis=1)
    return gl.convert_layout(b_moved, b_pairs.type.layout)


@gluon_jit
def _weight_rows(o_t, size_n, GATED: constexpr, INTERLEAVED: constexpr):
    """Return rows of the weight of a tile's rows, at most the last. If gated, of 16 rows eight are gates and eight their ups."""
    BLOCK_N: constexpr = o_t.shape[0]
    if GATED:
        o_n = gl.minimum(gl.program_id(0) * (BLOCK_N // 2) + o_t // 16 * 8 + o_t % 8, size_n - 1)
        if INTERLEAVED:
            b_rows = 2 * o_n + o_t // 8 % 2
        else:
            b_rows = o_n + o_t // 8 % 2 * size_n
    else:
        b_rows = gl.minimum(gl.program_id(0) * BLOCK_N + o_t, size_n - 1)
    return b_rows


@gluon_jit
def _decoded(b_words, b_scales, layout: constexpr):
    """Decode words [N, 16] with scales [N, 4] to two operands in bfloat16 [N, 64]: pairs 0 and 1 of each word, and 2 and 3."""
    BLOCK_N: constexpr = b_words.shape[0]
    # 2^(e - 61) in bfloat16, twice. `_store` applies 2^60 of the 2^126 that codes lack, because a factor must be finite.
    b_factors = ((gl.minimum(b_scales.to(gl.int32), MAX_EXPONENT) + 66) << 7) * 65537
    zeros = gl.zeros((BLOCK_N, 4, 4), gl.int32, group_layout(BLOCK_N, gl.num_warps()))
    b_factors, _ = gl.broadcast(gl.expand_dims(b_factors, 2), zeros)
    b_factors = gl.convert_layout(b_factors.reshape((BLOCK_N, 16)), b_words.type.layout, assert_trivial=True)
    b_0, b_1, b_2, b_3, b_4, b_5, b_6, b_7 = gl.inline_asm_elementwise(
        E2M1_PAIRS_ASM, "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r", [b_words, b_factors], (gl.bfloat16,) * 8, True, 2
    )
    return _operand(b_0, b_4, b_1, b_5, layout), _operand(b_2, b_6, b_3, b_7, layout)


@gluon_jit
def _operand(b_0, b_1, b_2, b_3, layout: constexpr):
    """Join pairs as the product takes them: pair 2 h + v, element 4 c + 2 u + i, is column 32 u + 16 v + 8 h + 2 c + i."""
    BLOCK_N: constexpr = b_0.shape[0]
    b_w = gl.join(gl.join(b_0, b_1), gl.join(b_2, b_3)).reshape((BLOCK_N, 4, 2, 2, 2, 2))
    b_w = b_w.permute((0, 2, 4, 5, 1, 3)).reshape((BLOCK_N, 64))
    return gl.convert_layout(b_w, layout, assert_trivial=True)


@gluon_jit
def _store_rows(b_x, s_x):
    """Store a chunk of rows in the order of the weight: input 32 c + 8 w + 4 i + 2 s + h to 64 s + 16 w + 8 h + 2 c + i."""
    BLOCK_M: constexpr = b_x.shape[0]
    b_x = b_x.reshape((BLOCK_M, 4, 4, 2, 2, 2)).permute((0, 4, 2, 5, 1, 3))
    s_x.store(b_x.reshape((BLOCK_M, 128)))


@gluon_jit_counting("num_rows")
def packed_tile_kernel(
    p_x, p_codes, p_scales, p_bias, p_pairs, p_experts, p_out, num_rows, size_n,
    SIZE_K: constexpr, GATED: constexpr, INTERLEAVED: constexpr, LIMIT: constexpr, IS_SCALED: constexpr,
    HAS_BIAS: constexpr, IS_SORTED: constexpr, TOP_K: constexpr, PAIRS_PER_ROW: constexpr, BLOCK_M: constexpr,
    BLOCK_N: constexpr, NUM_STAGES: constexpr, FEW: constexpr, PDL: constexpr,
):  # fmt: skip
    if PDL:
        gl.inline_asm_elementwise(WAIT, "=r", [], gl.int32, False, 1)
    i_block = gl.program_id(1)
    o_m = gl.arange(0, BLOCK_M, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    expert, b_pairs = _block_pairs(p_pairs, p_experts, i_block, num_rows, o_m, IS_SORTED, TOP_K, BLOCK_M)
    if expert < 0:
        return
    if FEW and gl.sum((b_pairs >= 0).to(gl.int32), axis=0) <= 8:
        halves: constexpr = gl.BlockedLayout([1, 2], [32, 1], [gl.num_warps(), 1], [1, 0])
        b_first, _ = gl.split(gl.convert_layout(b_pairs.reshape((2, 8)).permute((1, 0)), halves))
        _multiply_block(
            p_x, p_codes, p_scales, p_bias, p_out, expert, b_first, size_n, SIZE_K, GATED, INTERLEAVED, LIMIT,
            IS_SCALED, HAS_BIAS, PAIRS_PER_ROW, BLOCK_N, NUM_STAGES, FEW, PDL,
        )  # fmt: skip
    else:
        _multiply_block(
            p_x, p_codes, p_scales, p_bias, p_out, expert, b_pairs, size_n, SIZE_K, GATED, INTERLEAVED, LIMIT,
            IS_SCALED, HAS_BIAS, PAIRS_PER_ROW, BLOCK_N, NUM_STAGES, FEW, PDL,
        )  # fmt: skip


@gluon_jit
def _multiply_block(
    p_x, p_codes, p_scales, p_bias, p_out, expert, b_pairs, size_n,
    SIZE_K: constexpr, GATED: constexpr, INTERLEAVED: constexpr, LIMIT: constexpr, IS_SCALED: constexpr,
    HAS_BIAS: constexpr, PAIRS_PER_ROW: constexpr, BLOCK_N: constexpr, NUM_STAGES: constexpr, FEW: constexpr,
    PDL: constexpr,
):  # fmt: skip
    if FEW:
        b_y = _sum_few(
            p_x, p_codes, p_scales, expert, b_pairs, size_n,
            SIZE_K, GATED, INTERLEAVED, PAIRS_PER_ROW, BLOCK_N, NUM_STAGES,
        )  # fmt: skip
    else:
        b_y = _sum_many(
            p_x, p_codes, p_scales, expert, b_pairs, size_n,
            SIZE_K, GATED, INTERLEAVED, PAIRS_PER_ROW, BLOCK_N, NUM_STAGES,
        )  # fmt: skip
    _store(p_bias, p_out, b_y, expert, b_pairs, size_n, GATED, INTERLEAVED, LIMIT, IS_SCALED, HAS_BIAS, PDL)


@gluon_jit
def _weight_pointers(
    p_codes, p_scales, expert, size_n, SIZE_K: constexpr, GATED: constexpr, INTERLEAVED: constexpr, BLOCK_N: constexpr
):
    """Return pointers to a tile's words [N, 16] and scales [N, 4]. Rows after the last output read the last again."""
    words: constexpr = word_layout(BLOCK_N, gl.num_warps())
    groups: constexpr = gl.SliceLayout(2, group_layout(BLOCK_N, gl.num_warps()))
    first_row = expert.to(gl.int64) * (size_n * (2 if GATED else 1))
    b_rows = _weight_rows(gl.arange(0, BLOCK_N, gl.SliceLayout(1, words)), size_n, GATED, INTERLEAVED)
    p_w = p_codes + (first_row + b_rows)[:, None] * (SIZE_K // 8) + gl.arange(0, 16, gl.SliceLayout(0, words))[None, :]
    b_rows = _weight_rows(gl.arange(0, BLOCK_N, gl.SliceLayout(1, groups)), size_n, GATED, INTERLEAVED)
    p_s = p_scales + (first_row + b_rows)[:, None] * (SIZE_K // GROUP)
    return p_w, p_s + gl.arange(0, 4, gl.SliceLayout(0, groups))[None, :]


@gluon_jit
def _load_weight(p_w, p_s, i_chunk, REST: constexpr):
    """Load a chunk's words and scales; the last one has REST inputs if that is not 0."""
    if REST:
        o_w = gl.arange(0, 16, gl.SliceLayout(0, p_w.type.layout))[None, :]
        o_g = gl.arange(0, 4, gl.SliceLayout(0, p_s.type.layout))[None, :]
        b_words = gl.load(p_w + i_chunk * 16, mask=o_w < REST // 8, other=0)
        b_scales = gl.load(p_s + i_chunk * 4, mask=o_g < REST // GROUP, other=0)
    else:
        b_words = gl.load(p_w + i_chunk * 16)
        b_scales = gl.load(p_s + i_chunk * 4)
    return b_words, b_scales


@kernel_value
def few_row_layout(block_m, num_warps):
    """Return the layout [2 M, 64] of halves of rows: a thread has one group of a row, and each warp has all rows."""
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], *([row, 0] for row in (16,) if row < 2 * int(block_m))],
        [[0, 32], [1, 0], [2, 0], [4, 0], [8, 0]],
        [[0, 0]] * (int(num_warps).bit_length() - 1),
        [],
        [2 * int(block_m), 64],
    )


@gluon_jit
def _multiply_few(b_words, b_scales, s_x, b_y):
    """Add the products of a chunk, by mma.sync."""
    BLOCK_M: constexpr = b_y.shape[1]
    weight: constexpr = gl.DotOperandLayout(0, b_y.type.layout, 2)
    rows: constexpr = gl.DotOperandLayout(1, b_y.type.layout, 2)
    b_x = s_x.load(few_row_layout(BLOCK_M, gl.num_warps()))
    # Input 32 c + 8 w + 4 i + 2 s + h is input 16 w + 8 h + 2 c + i of product s.
    b_x = b_x.reshape((BLOCK_M, 4, 4, 2, 2, 2)).permute((2, 5, 1, 3, 0, 4))
    b_first_x, b_second_x = gl.split(b_x)
    b_first_x = gl.convert_layout(b_first_x.reshape((64, BLOCK_M)), rows, assert_trivial=True)
    b_second_x = gl.convert_layout(b_second_x.reshape((64, BLOCK_M)), rows, assert_trivial=True)
    b_first, b_second = _decoded(b_words, b_scales, weight)
    b_y = hopper.mma_v2(b_first, b_first_x, b_y)
    return hopper.mma_v2(b_second, b_second_x, b_y)


@gluon_jit
def _begin_few_rows(p_rows, m_rows, s_x, slot, i_step, SIZE_K: constexpr):
    """Start to copy two chunks of a block's rows into a slot of shared memory: zeros for padding and after the last input."""
    HALVES: constexpr = p_rows.shape[0]
    layout: constexpr = p_rows.type.layout
    o_k = gl.arange(0, HALVES, gl.SliceLayout(1, layout))[:, None] % 2 * 64
    o_k = o_k + gl.arange(0, 64, gl.SliceLayout(0, layout))[None, :]
    for i in gl.static_range(2):
        first = i_step * (2 * CHUNK) + i * CHUNK
        hopper.async_copy.async_copy_global_to_shared(
            s_x.index(2 * slot + i), p_rows + first, mask=m_rows & (o_k + first < SIZE_K)
        )
    hopper.async_copy.commit_group()


@gluon_jit
def _sum_few(
    p_x, p_codes, p_scales, expert, b_pairs, size_n,
    SIZE_K: constexpr, GATED: constexpr, INTERLEAVED: constexpr, PAIRS_PER_ROW: constexpr, BLOCK_N: constexpr,
    NUM_STAGES: constexpr,
):  # fmt: skip
    """Multiply a tile by at most 16 rows. Two chunks of codes are in flight to registers, and rows to shared memory."""
    BLOCK_M: constexpr = b_pairs.shape[0]
    FULL: constexpr = SIZE_K // CHUNK
    REST: constexpr = SIZE_K % CHUNK
    PAIRS: constexpr = FULL // 2
    LEFT: constexpr = FULL % 2
    mma: constexpr = gl.NVMMADistributedLayout([2, 0], [gl.num_warps(), 1], [16, 8])
    copy: constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    p_w, p_s = _weight_pointers(p_codes, p_scales, expert, size_n, SIZE_K, GATED, INTERLEAVED, BLOCK_N)
    b_w, b_s = _load_weight(p_w, p_s, 0, 0 if FULL > 0 else REST)
    if FULL > 1 or (FULL == 1 and REST > 0):
        b_next_w, b_next_s = _load_weight(p_w, p_s, 1, 0 if FULL > 1 else REST)
    b_halves = gl.convert_layout(gl.join(b_pairs, b_pairs).reshape((2 * BLOCK_M,)), gl.SliceLayout(1, copy))
    m_rows = (b_halves >= 0)[:, None]
    b_rows = (gl.maximum(b_halves, 0) // PAIRS_PER_ROW).to(gl.int64)
    o_half = gl.arange(0, 2 * BLOCK_M, gl.SliceLayout(1, copy)) % 2 * 64
    p_rows = p_x + (b_rows * SIZE_K + o_half)[:, None] + gl.arange(0, 64, gl.SliceLayout(0, copy))[None, :]
    s_x = gl.allocate_shared_memory(
        gl.bfloat16, [2 * NUM_STAGES, 2 * BLOCK_M, 64], gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    )
    for i_step in gl.static_range(NUM_STAGES - 1):
        _begin_few_rows(p_rows, m_rows, s_x, i_step, i_step, SIZE_K)
    b_y = gl.zeros((BLOCK_N, BLOCK_M), gl.float32, mma)
    slot = 0
    free_slot = NUM_STAGES - 1
    if PAIRS > 1:
        for i_step in range(PAIRS - 1):
            hopper.async_copy.wait_group(NUM_STAGES - 2)
            _begin_few_rows(p_rows, m_rows, s_x, free_slot, i_step + NUM_STAGES - 1, SIZE_K)
            b_y = _multiply_few(b_w, b_s, s_x.index(2 * slot), b_y)
            b_w, b_s = _load_weight(p_w, p_s, 2 * i_step + 2, 0)
            b_y = _multiply_few(b_next_w, b_next_s, s_x.index(2 * slot + 1), b_y)
            b_next_w, b_next_s = _load_weight(p_w, p_s, 2 * i_step + 3, 0)
            slot = gl.where(slot == NUM_STAGES - 1, 0, slot + 1)
            free_slot = gl.where(free_slot == NUM_STAGES - 1, 0, free_slot + 1)
    hopper.async_copy.wait_group(0)
    # The last pair of chunks, then at most one full and one other.
    b_y = _multiply_few(b_w, b_s, s_x.index(2 * slot), b_y)
    if PAIRS > 0:
        if LEFT or REST > 0:
            b_w, b_s = _load_weight(p_w, p_s, 2 * PAIRS, 0 if LEFT else REST)
        b_y = _multiply_few(b_next_w, b_next_s, s_x.index(2 * slot + 1), b_y)
        if LEFT or REST > 0:
            slot = gl.where(slot == NUM_STAGES - 1, 0, slot + 1)
            if LEFT and REST > 0:
                b_next_w, b_next_s = _load_weight(p_w, p_s, 2 * PAIRS + 1, REST)
            b_y = _multiply_few(b_w, b_s, s_x.index(2 * slot), b_y)
    if LEFT and REST > 0:
        b_y = _multiply_few(b_next_w, b_next_s, s_x.index(2 * slot + 1), b_y)
    return b_y


@gluon_jit
def _begin_weight(p_w, s_words, slot, i_chunk, SIZE_K: constexpr):
    """Start to copy a chunk of words into a slot of shared memory: zeros after the last input."""
    o_w = gl.arange(0, 16, gl.SliceLayout(0, p_w.type.layout))
    m_w = (i_chunk * 16 + o_w < SIZE_K // 8)[None, :]
    hopper.async_copy.async_copy_global_to_shared(s_words.index(slot), p_w + i_chunk * 16, mask=m_w)
    hopper.async_copy.commit_group()


@gluon_jit
def _sum_many(
    p_x, p_codes, p_scales, expert, b_pairs, size_n,
    SIZE_K: constexpr, GATED: constexpr, INTERLEAVED: constexpr, PAIRS_PER_ROW: constexpr, BLOCK_N: constexpr,
    NUM_STAGES: constexpr,
):  # fmt: skip
    """Multiply a tile by a block's rows. Chunks of codes are in flight to shared memory, one of rows and scales to registers."""
    BLOCK_M: constexpr = b_pairs.shape[0]
    mma: constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BLOCK_M, 16])
    operand: constexpr = gl.DotOperandLayout(0, mma, 2)
    p_w, p_s = _weight_pointers(p_codes, p_scales, expert, size_n, SIZE_K, GATED, INTERLEAVED, BLOCK_N)
    p_rows, o_x, m_x = _rows(p_x, b_pairs, SIZE_K, PAIRS_PER_ROW, row_layout(BLOCK_M, gl.num_warps()))
    o_g = gl.arange(0, 4, gl.SliceLayout(0, p_s.type.layout))[None, :]
    s_words = gl.allocate_shared_memory(gl.int32, [NUM_STAGES, BLOCK_N, 16], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    s_x = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_M, CHUNK], gl.NVMMASharedLayout(128, 16, rank=2))
    for i_stage in gl.static_range(NUM_STAGES - 1):
        _begin_weight(p_w, s_words, i_stage, i_stage, SIZE_K)
    b_y = gl.zeros((BLOCK_N, BLOCK_M), gl.float32, mma)
    b_x = gl.load(p_rows, mask=m_x & (o_x < SIZE_K), other=0.0)
    b_s = gl.load(p_s, mask=o_g < SIZE_K // GROUP, other=0)
    slot = 0
    free_slot = NUM_STAGES - 1
    for i_chunk in range((SIZE_K + CHUNK - 1) // CHUNK):
        hopper.async_copy.wait_group(NUM_STAGES - 2)
        _store_rows(b_x, s_x)
        hopper.fence_async_shared()
        _begin_weight(p_w, s_words, free_slot, i_chunk + NUM_STAGES - 1, SIZE_K)
        b_scales = b_s
        i_k = (i_chunk + 1) * CHUNK
        b_x = gl.load(p_rows + i_k, mask=m_x & (o_x + i_k < SIZE_K), other=0.0)
        b_s = gl.load(p_s + i_k // GROUP, mask=o_g + i_k // GROUP < SIZE_K // GROUP, other=0)
        b_first, b_second = _decoded(s_words.index(slot).load(p_w.type.layout), b_scales, operand)
        b_y = hopper.warpgroup_mma(b_first, s_x.slice(0, 64, dim=1).permute((1, 0)), b_y, is_async=True)
        b_y = hopper.warpgroup_mma(b_second, s_x.slice(64, 64, dim=1).permute((1, 0)), b_y, is_async=True)
        b_y, b_first, b_second = hopper.warpgroup_mma_wait(0, [b_y, b_first, b_second])
        slot = gl.where(slot == NUM_STAGES - 1, 0, slot + 1)
        free_slot = gl.where(free_slot == NUM_STAGES - 1, 0, free_slot + 1)
    hopper.async_copy.wait_group(0)
    return b_y


@gluon_jit
def _store(
    p_bias, p_out, b_y, expert, b_pairs, size_n, GATED: constexpr, INTERLEAVED: constexpr, LIMIT: constexpr,
    IS_SCALED: constexpr, HAS_BIAS: constexpr, PDL: constexpr,
):  # fmt: skip
    """Add biases to sums, gate them, and store them to the rows of their pairs."""
    BLOCK_N: constexpr = b_y.shape[0]
    BLOCK_M: constexpr = b_y.shape[1]
    NUM_OUTPUTS: constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    if PDL:
        # Release late: programs of the next kernel would take occupancy from this one.
        gl.inline_asm_elementwise(LAUNCH_DEPENDENTS, "=r", [], gl.int32, False, 1)
    b_y *= 1152921504606846976.0  # 2^60
    if HAS_BIAS:
        o_t = gl.arange(0, BLOCK_N, gl.SliceLayout(1, b_y.type.layout))
        p_bias += expert.to(gl.int64) * (size_n * (2 if GATED else 1))
        b_y += gl.load(p_bias + _weight_rows(o_t, size_n, GATED, INTERLEAVED)).to(gl.float32)[:, None]
    if GATED:
        b_gate, b_up = gl.split(b_y.reshape((BLOCK_N // 16, 2, 8, BLOCK_M)).permute((0, 2, 3, 1)))
        b_y = gated_numbers(b_gate, b_up, LIMIT, IS_SCALED).reshape((NUM_OUTPUTS, BLOCK_M))
    layout: constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, gl.num_warps()], [0, 1])
    b_y = gl.convert_layout(b_y.to(p_out.dtype.element_ty), layout)
    o_n = gl.program_id(0) * NUM_OUTPUTS + gl.arange(0, NUM_OUTPUTS, gl.SliceLayout(1, layout))
    b_pairs = gl.convert_layout(b_pairs, gl.SliceLayout(0, layout))[None, :]
    m_y = (o_n < size_n)[:, None] & (b_pairs >= 0)
    gl.store(p_out + b_pairs.to(gl.int64) * size_n + o_n[:, None], b_y, mask=m_y)


@gluon_jit
def _rows(p_x, b_pairs, size_k, PAIRS_PER_ROW: constexpr, layout: constexpr):
    """Return pointers to a block's rows [M, 1, 1, 1], columns of a chunk [1, 4, 4, 8], and a mask of rows."""
    row: constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, layout)))
    group: constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, layout)))
    word: constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, layout)))
    nibble: constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    o_group = gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.arange(0, 4, group), 0), 2), 3)
    o_word = gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.arange(0, 4, word), 0), 1), 3)
    o_nibble = gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.arange(0, 8, nibble), 0), 1), 2)
    b_pairs = gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.convert_layout(b_pairs, row), 1), 2), 3)
    o_x = o_group * GROUP + o_word * 8 + o_nibble
    b_rows = (gl.maximum(b_pairs, 0) // PAIRS_PER_ROW).to(gl.int64)
    return p_x + b_rows * size_k + o_x, o_x, b_pairs >= 0
