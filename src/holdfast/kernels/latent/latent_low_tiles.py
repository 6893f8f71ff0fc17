"""Tiles of at most 32 rows times heads over paged latents (MLA) on Hopper, in Gluon: tokens are the rows of both wgmma.

N tokens of a block, M rows of a tile times heads, R rotated elements

wgmma takes 64 rows at once. Heads are too few for that, so tokens are the rows: scores [N, M] = K q^T, outputs
[L, M] += V^T p. A thread loads sixteen adjacent columns of codes, which go from registers straight into the first product. The
order of columns inside a product is free, and queries are stored in the order of the codes (`_product_order`). Converted values
are written to shared memory once, for the second product, which reads them transposed. Only queries, p and values pass shared
memory, and nothing is converted twice.

A slab is 64 columns of a page's row: e4m3 codes become one part of 64 elements, 16-bit words of TurboQuant four of them. The
registers of a slab take the next block's codes as soon as they are converted, so these are in flight during the computation.

In fp8_ds_mla a group is 128 elements that share a scale. It multiplies their scores, and each group has its own p.
"""

import torch
from torch import Tensor

from holdfast.kernels.attention.dequantize import EXP2_ASM, LATENTS_4_ASM, LOG2_ASM
from holdfast.kernels.attention.quantized_planes import LEAST_LOG2, P_ONE
from holdfast.kernels.latent.gathered_attention import gathered_memory, takes_gathering
from holdfast.kernels.latent.latent_planes import LatentCall, LatentPlanes
from holdfast.kernels.latent.latent_warpgroups import LATENT, LATENT_DIM, ROPE, ROPE_DIM
from holdfast.kernels.triton_compat import constexpr, gl, gluon_jit, hopper, kernel_constant, kernel_value

# Triton resolves branches on constants at compile time, so both sides must stand in an if and an else.
# Triton cannot unpack into a tuple, but adds tuples.

SLAB, CHUNK, NUM_CHUNKS = kernel_constant(64), kernel_constant(128), kernel_constant(4)
FP8_BYTES = kernel_constant(LATENT_DIM + 4 * 4 + 2 * ROPE_DIM)
"""Bytes of an fp8_ds_mla row: codes, four scales, rotated elements in bfloat16."""
HALVES_ASM = kernel_constant("mov.b32 {$0, $1}, $2;")
FP8_ASM = kernel_constant(
    """{
.reg .b32 x, y;
.reg .b16 p, q;
mov.b32 {p, q}, $4;
cvt.rn.f16x2.e4m3x2 x, p;
cvt.rn.f16x2.e4m3x2 y, q;
mov.b32 {$0, $1}, x;
mov.b32 {$2, $3}, y;
}"""
)
PLAIN_PAGES, FP8_PAGES, CODED_PAGES, CODED_R8_PAGES = (kernel_constant(i) for i in range(4))
"""KIND of a kernel: plain, fp8_ds_mla, TurboQuant with rotated elements in bfloat16 or in e4m3."""
LOW_HEIGHT = 32
"""Most rows times heads of a tile."""


def takes_low(call: LatentCall) -> bool:
    """Return True if these kernels support a step over lists: few heads, and all that `takes_gathering` requires."""
    return call.q_TNX.shape[1] <= LOW_HEIGHT and takes_gathering(call)


def plane_kind(planes: LatentPlanes) -> int:
    """Return the KIND of these pages."""
    if planes.kind == "turboquant":
        return 3 if planes.has_small_rope else 2
    return 0 if planes.kind == "plain" else 1


def plane_pointers(planes: LatentPlanes) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes, rotated elements and scales, as 32-bit words except half-precision scales."""
    if planes.kind == "plain":
        words_SX = planes.rows_SX.view(torch.int32)
        return words_SX, words_SX, words_SX
    words_SX, scales, rope = gathered_memory(planes)
    return words_SX, rope, scales


@kernel_value
def word_layout(words, num_warps):
    """Return the layout [16 * warps, words] of a slab: a warp has the rows of its product; four threads share one."""
    words, num_warps = int(words), int(num_warps)
    columns = [1 << i for i in range((words // 4).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        [*([0, column] for column in columns), [8, 0]],
        [[0, words // 4], [0, words // 2], [1, 0], [2, 0], [4, 0]],
        [[16 << i, 0] for i in range(num_warps.bit_length() - 1)],
        [],
        [16 * num_warps, words],
    )


@gluon_jit
def allocate(dtype: constexpr, BLOCK_N: constexpr, BLOCK_M: constexpr, KIND: constexpr):
    """Allocate shared memory for queries, their rotated elements, values and p; `dtype` is that of queries."""
    layout: constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    operand: constexpr = dtype if KIND == PLAIN_PAGES else gl.float16
    s_q = gl.allocate_shared_memory(operand, [NUM_CHUNKS, BLOCK_M, CHUNK], layout)
    s_q_rope = gl.allocate_shared_memory(gl.float16 if KIND == CODED_R8_PAGES else dtype, [BLOCK_M, ROPE], layout)
    # Separate buffers: the compiler puts a barrier between two stores into the same one.
    s_vs = ()
    for _ in gl.static_range(NUM_CHUNKS):
        s_vs = s_vs + (gl.allocate_shared_memory(operand, [BLOCK_N, CHUNK], layout),)
    s_ps = ()
    for _ in gl.static_range(NUM_CHUNKS if KIND == FP8_PAGES else 1):
        s_ps = s_ps + (gl.allocate_shared_memory(operand, [BLOCK_M, BLOCK_N], layout),)
    return s_q, s_q_rope, s_vs, s_ps


@gluon_jit
def fast_exp2(x):
    return gl.inline_asm_elementwise(EXP2_ASM, "=f,f", [x], gl.float32, True, 1)


@gluon_jit
def fast_log2(x):
    return gl.inline_asm_elementwise(LOG2_ASM, "=f,f", [x], gl.float32, True, 1)


@gluon_jit
def _product_order(b_x):
    """Order columns of slabs as a product takes them: column 16 c + 4 s + 2 h + b becomes 16 s + 8 h + 2 c + b."""
    ROWS: constexpr = b_x.shape[0]
    COLUMNS: constexpr = b_x.shape[1]
    b_x = b_x.reshape((ROWS, COLUMNS // SLAB, 4, 4, 2, 2)).permute((0, 1, 3, 4, 2, 5))
    return b_x.reshape((ROWS, COLUMNS))


@gluon_jit
def _side_by_side(b_first, b_second):
    """Join two slabs to [N, 128]."""
    ROWS: constexpr = b_first.shape[0]
    return gl.join(b_first, b_second).permute((0, 2, 1)).reshape((ROWS, CHUNK))


@gluon_jit
def chunk_columns(o_c, i_chunk, KIND: constexpr):
    """Return the latent elements of a chunk's columns."""
    if KIND >= CODED_PAGES:
        # 32 columns of words: eight elements of one part, then eight of the next, two parts per slab.
        i_part = o_c // SLAB * 2 + o_c // 8 % 2
        return i_part * (LATENT // 4) + i_chunk * 32 + o_c % SLAB // 16 * 8 + o_c % 8
    else:
        return i_chunk * CHUNK + o_c


@gluon_jit
def store_queries(p_q_m, m_m, s_q, s_q_rope, layout: constexpr, KIND: constexpr):
    """Store the queries of a tile in shared memory, chunk by chunk; `p_q_m` points to rows of queries, [M, 1]."""
    for i in gl.static_range(NUM_CHUNKS):
        o_c = chunk_columns(gl.arange(0, CHUNK, gl.SliceLayout(0, layout)), i, KIND)[None, :]
        s_q.index(i).store(_product_order(_halved(gl.load(p_q_m + o_c, mask=m_m, other=0.0), s_q.dtype)))
    o_r = gl.arange(0, ROPE, gl.SliceLayout(0, layout))[None, :]
    s_q_rope.store(_product_order(_halved(gl.load(p_q_m + (LATENT + o_r), mask=m_m, other=0.0), s_q_rope.dtype)))
    hopper.fence_async_shared()


@gluon_jit
def _halved(b_x, dtype: constexpr):
    """Convert to the type of the operand; half precision is clamped to its range."""
    if dtype == gl.float16:
        return gl.minimum(gl.maximum(b_x.to(gl.float32), -65504.0), 65504.0).to(gl.float16)
    else:
        return b_x.to(dtype)


@gluon_jit
def row_pointers(p_rows, p_rope, p_scales, o_slot, code_layout: constexpr, rope_layout: constexpr, KIND: constexpr):
    """Return pointers of slots to words of the first slab, to rotated elements and to scales."""
    CODE_WORDS: constexpr = code_layout.shape[1]
    ROPE_WORDS: constexpr = rope_layout.shape[1]
    o_code = gl.arange(0, CODE_WORDS, gl.SliceLayout(0, code_layout))[None, :]
    o_rope = gl.arange(0, ROPE_WORDS, gl.SliceLayout(0, rope_layout))[None, :]
    o_slot_rope = gl.convert_layout(o_slot, gl.SliceLayout(1, rope_layout), assert_trivial=True)
    if KIND == PLAIN_PAGES:
        ROW: constexpr = (LATENT + ROPE) // 2
        p_row = p_rows + (o_slot * ROW)[:, None] + o_code
        return p_row, p_rope + (o_slot_rope * ROW + LATENT // 2)[:, None] + o_rope, p_scales
    elif KIND == FP8_PAGES:
        p_row = p_rows + (o_slot * (FP8_BYTES // 4))[:, None] + o_code
        p_row_rope = p_rope + (o_slot_rope * (FP8_BYTES // 4) + (FP8_BYTES // 4 - ROPE_WORDS))[:, None] + o_rope
        return p_row, p_row_rope, p_scales + (o_slot * (FP8_BYTES // 4) + LATENT // 4)
    else:
        NUM_SCALES: constexpr = 2 if KIND == CODED_R8_PAGES else 1
        p_row = p_rows + (o_slot * (LATENT // 8))[:, None] + o_code
        return p_row, p_rope + (o_slot_rope * ROPE_WORDS)[:, None] + o_rope, p_scales + o_slot * NUM_SCALES


@gluon_jit
def load_rope(p_row_rope, m_n):
    m_rope = gl.convert_layout(m_n, gl.SliceLayout(1, p_row_rope.type.layout), assert_trivial=True)
    return gl.load(p_row_rope, mask=m_rope[:, None], other=0)


@gluon_jit
def load_slabs(p_row, m_n, KIND: constexpr):
    """Load all slabs of a row's latent, as words."""
    WORDS: constexpr = p_row.shape[1]
    NUM_SLABS: constexpr = (
        LATENT // 2 if KIND == PLAIN_PAGES else (LATENT // 4 if KIND == FP8_PAGES else LATENT // 8)
    ) // WORDS
    b_slabs = ()
    for i in gl.static_range(NUM_SLABS):
        b_slabs = b_slabs + (gl.load(p_row + i * WORDS, mask=m_n[:, None], other=0),)
    return b_slabs


@gluon_jit
def load_scales(p_row_scales, m_n, KIND: constexpr):
    """Load [N] scales of every group, or of a token and its rotated elements; zero without a token."""
    if KIND == PLAIN_PAGES:
        return ()
    elif KIND == FP8_PAGES:
        b_scales = ()
        for g in gl.static_range(NUM_CHUNKS):
            b_scales = b_scales + (gl.load(p_row_scales + g, mask=m_n, other=0.0),)
        return b_scales
    elif KIND == CODED_PAGES:
        return (gl.load(p_row_scales, mask=m_n, other=0.0).to(gl.float32),)
    else:
        b_scale = gl.load(p_row_scales, mask=m_n, other=0.0).to(gl.float32)
        return b_scale, gl.load(p_row_scales + 1, mask=m_n, other=0.0).to(gl.float32)


@gluon_jit
def _halves(b_words, dtype: constexpr):
    """Unpack words of two numbers: [N, W] to [N, 2 W]."""
    ROWS: constexpr = b_words.shape[0]
    b_low, b_high = gl.inline_asm_elementwise(HALVES_ASM, "=h,=h,r", [b_words], (gl.int16, gl.int16), True, 1)
    return gl.join(b_low, b_high).reshape((ROWS, SLAB)).to(dtype, bitcast=True)


@gluon_jit
def _fp8_numbers(b_words):
    """Unpack words of four numbers: [N, W] to [N, 4 W]."""
    ROWS: constexpr = b_words.shape[0]
    b_0, b_1, b_2, b_3 = gl.inline_asm_elementwise(
        FP8_ASM, "=h,=h,=h,=h,r", [b_words], (gl.float16, gl.float16, gl.float16, gl.float16), True, 1
    )
    b_all = gl.join(gl.join(b_0, b_1), gl.join(b_2, b_3))
    return b_all.permute((0, 1, 3, 2)).reshape((ROWS, SLAB))


@gluon_jit
def _eight_by_eight(b_first, b_second, dtype: constexpr):
    """Unpack two parts [N, 16] of words of two numbers to [N, 64], eight numbers of each alternately."""
    ROWS: constexpr = b_first.shape[0]
    b_words = gl.join(b_first, b_second).reshape((ROWS, 4, 4, 2)).permute((0, 1, 3, 2)).reshape((ROWS, SLAB // 2))
    return _halves(b_words, dtype)


@gluon_jit
def _chunk_numbers(b_slabs, dtype: constexpr, i_chunk: constexpr, KIND: constexpr):
    """Decode a chunk to [N, 128] numbers without their scales."""
    if KIND == PLAIN_PAGES:
        return _side_by_side(_halves(b_slabs[2 * i_chunk], dtype), _halves(b_slabs[2 * i_chunk + 1], dtype))
    elif KIND == FP8_PAGES:
        return _side_by_side(_fp8_numbers(b_slabs[2 * i_chunk]), _fp8_numbers(b_slabs[2 * i_chunk + 1]))
    else:
        b_0, b_1, b_2, b_3 = gl.inline_asm_elementwise(
            LATENTS_4_ASM, "=r,=r,=r,=r,r", [b_slabs[i_chunk]], (gl.int32, gl.int32, gl.int32, gl.int32), True, 1
        )
        return _side_by_side(_eight_by_eight(b_0, b_1, dtype), _eight_by_eight(b_2, b_3, dtype))


@gluon_jit
def _row_factors(b_scales, layout: constexpr):
    """Convert scales to the layout of the rows of scores."""
    b_factors = ()
    for i in gl.static_range(len(b_scales)):
        b_factors = b_factors + (gl.convert_layout(b_scales[i], layout, assert_trivial=True),)
    return b_factors


@gluon_jit
def _weigh_values(s_v, s_p, b_acc, b_alpha):
    """Start the second product of a chunk."""
    return hopper.warpgroup_mma(s_v.permute((1, 0)), s_p.permute((1, 0)), b_acc * b_alpha[None, :], is_async=True)


@gluon_jit
def attend_block(
    b_slabs, b_rope, b_scales, p_next, p_next_rope, p_next_scales, m_next, m_seen, b_m, b_l, b_accs, s_q, s_q_rope,
    s_vs, s_ps, scale_log2,
    score_layout: constexpr, KIND: constexpr,
):  # fmt: skip
    """Attend one block of tokens: update maxima, sums and outputs, and load the codes and scales of the next block.

    `m_seen` [N, M] is the mask of scores.
    """
    BLOCK_N: constexpr = b_l.shape[0]
    BLOCK_M: constexpr = b_l.shape[1]
    row_layout: constexpr = gl.SliceLayout(1, score_layout)
    a_layout: constexpr = gl.DotOperandLayout(0, score_layout, 2)
    SLABS: constexpr = len(b_slabs) // 4
    WORDS: constexpr = p_next.shape[1]
    ROPE_DTYPE: constexpr = s_q.dtype if KIND == PLAIN_PAGES else gl.bfloat16
    GROUPED: constexpr = KIND == FP8_PAGES
    b_zero = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, score_layout)
    b_factors = _row_factors(b_scales, row_layout)
    # Rotated elements first: the second product does not take them.
    b_rotated = _fp8_numbers(b_rope) if KIND == CODED_R8_PAGES else _halves(b_rope, ROPE_DTYPE)
    b_a = gl.convert_layout(_product_order(b_rotated.to(s_q_rope.dtype)), a_layout, assert_trivial=True)
    rope_scores = hopper.warpgroup_mma(b_a, s_q_rope.permute((1, 0)), b_zero, use_acc=False, is_async=True)
    b_next_rope = load_rope(p_next_rope, m_next)
    b_next_scales = load_scales(p_next_scales, m_next, KIND)
    b_next = ()
    b_score = b_zero
    scores = rope_scores
    for i in gl.static_range(NUM_CHUNKS):
        b_chunk = _chunk_numbers(b_slabs, s_q.dtype, i, KIND)
        if i > 0:
            # The last chunk was multiplied while this one was converted; its registers are free now.
            scores = hopper.warpgroup_mma_wait(0, deps=[scores])
        if GROUPED and i > 0:
            b_score += scores * b_factors[i - 1][:, None]
        b_a = gl.convert_layout(_product_order(b_chunk), a_layout, assert_trivial=True)
        s_q_t = s_q.index(i).permute((1, 0))
        if GROUPED or (i == 0 and KIND != PLAIN_PAGES):
            scores = hopper.warpgroup_mma(b_a, s_q_t, b_zero, use_acc=False, is_async=True)
        else:
            scores = hopper.warpgroup_mma(b_a, s_q_t, scores, is_async=True)
        s_vs[i].store(b_chunk)
        for j in gl.static_range(SLABS):
            p_slab = p_next + (i * SLABS + j) * WORDS
            b_next = b_next + (gl.load(p_slab, mask=m_next[:, None], other=0),)
    if KIND == PLAIN_PAGES:
        b_score = hopper.warpgroup_mma_wait(0, deps=[scores]) * scale_log2
        b_bound = gl.zeros([BLOCK_N], gl.float32, row_layout)
    else:
        b_group, b_rope_score = hopper.warpgroup_mma_wait(0, deps=[scores, rope_scores])
        if KIND == CODED_R8_PAGES:
            b_rope_score = b_rope_score * b_factors[1][:, None]
        LAST: constexpr = NUM_CHUNKS - 1 if GROUPED else 0
        b_score = (b_score + b_group * b_factors[LAST][:, None] + b_rope_score) * scale_log2
        b_largest = b_factors[0]
        if GROUPED:
            for g in gl.static_range(1, NUM_CHUNKS):
                b_largest = gl.maximum(b_largest, b_factors[g])
        b_bound = gl.maximum(fast_log2(b_largest), LEAST_LOG2)
    b_score = gl.where(m_seen, b_score, -float("inf"))
    b_m_new = gl.maximum(b_m, gl.max(b_score + b_bound[:, None], axis=0))
    b_m_safe = gl.where(b_m_new == -float("inf"), 0.0, b_m_new)
    b_p = fast_exp2(b_score - b_m_safe[None, :])
    b_alpha = fast_exp2(b_m - b_m_safe)
    b_l = b_l * b_alpha[None, :] + b_p
    if KIND == PLAIN_PAGES:
        s_ps[0].permute((1, 0)).store(b_p.to(s_q.dtype))
    else:
        for g in gl.static_range(len(s_ps)):
            s_ps[g].permute((1, 0)).store((b_p * (b_factors[g] * P_ONE)[:, None]).to(gl.float16))
    hopper.fence_async_shared()
    # One p for all groups, or one per group.
    acc_0 = _weigh_values(s_vs[0], s_ps[0], b_accs[0], b_alpha)
    acc_1 = _weigh_values(s_vs[1], s_ps[1 if GROUPED else 0], b_accs[1], b_alpha)
    acc_2 = _weigh_values(s_vs[2], s_ps[2 if GROUPED else 0], b_accs[2], b_alpha)
    acc_3 = _weigh_values(s_vs[3], s_ps[3 if GROUPED else 0], b_accs[3], b_alpha)
    b_accs = hopper.warpgroup_mma_wait(0, deps=[acc_0, acc_1, acc_2, acc_3])
    return b_next, b_next_rope, b_next_scales, b_m_new, b_l, b_accs


@gluon_jit
def store_tile(b_accs, b_share, p_m, m_m, score_layout: constexpr, KIND: constexpr):
    """Store outputs of a tile, [L, M]; `p_m` [M] points to the rows that are written."""
    o_c = gl.arange(0, CHUNK, gl.SliceLayout(1, score_layout))
    for i in gl.static_range(NUM_CHUNKS):
        b_out = (b_accs[i] * b_share[None, :]).to(p_m.dtype.element_ty)
        gl.store(p_m[None, :] + chunk_columns(o_c, i, KIND)[:, None], b_out, mask=m_m[None, :])
