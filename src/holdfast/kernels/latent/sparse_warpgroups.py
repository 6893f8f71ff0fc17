"""Absorbed latent attention (MLA) to chosen tokens (DSA) for tiles of up to 64 heads on a Hopper: warps gather, warpgroups multiply, in Gluon.

T rows, N query heads, L latent, R rotated elements, K tokens that a row attends to at the most, C split-KV partials

A program has one row, one block of heads and one split of the row's list. Four of its warps gather rows and take codes apart
(sparse_gather.py), two blocks of 64 tokens ahead at the most; two warpgroups multiply (gathered_tiles.py).
"""

import torch

from holdfast.kernels.attention.split_kv import LOG2_E
from holdfast.kernels.geometry import BLOCK_TOKENS
from holdfast.kernels.latent.gathered_tiles import (
    GATHER_REGISTERS,
    GATHER_WARPS,
    RING,
    attend_gathered,
    gathered_memory,
    takes_gathering,
)
from holdfast.kernels.latent.latent_geometry import LARGE_HEIGHT, head_blocks, tile_height
from holdfast.kernels.latent.latent_planes import LatentPlanes, SparseRows
from holdfast.kernels.latent.latent_warpgroups import HEIGHT, LATENT, LAUNCH_DEPENDENTS, ROPE, TOKENS, WAIT
from holdfast.kernels.latent.sparse_gather import gather_codes, gather_plain
from holdfast.kernels.latent.sparse_tiles import ListSplits, merge_lists
from holdfast.kernels.triton_compat import (
    constexpr,
    gl,
    gluon_jit,
    gluon_jit_counting,
    hopper,
    pdl_launch,
    supports_pdl,
)

# ruff: noqa: ANN001, ANN202 the arguments of kernels have no types


def takes_warpgroups(planes: LatentPlanes, q_TNX: torch.Tensor) -> bool:
    """Whether these queries are taken here: tiles of 64 heads, where such tiles are gathered."""
    return tile_height(q_TNX.shape[1], large=False) == LARGE_HEIGHT and takes_gathering(planes, q_TNX)


def sparse_warpgroup_attention(
    q_TNX: torch.Tensor,
    planes: LatentPlanes,
    page_table_NP: torch.Tensor,
    rows: SparseRows,
    tokens_TK: torch.Tensor,
    scale: float,
    partial_out_CX: torch.Tensor,
    partial_lse_CH: torch.Tensor,
    out_TNL: torch.Tensor,
    num_sms: int,
) -> torch.Tensor:
    """[T, N, L] of the rows that choose, as `sparse_attention`; outputs over TurboQuant's pages are in the rotated space."""
    num_rows, num_heads, _ = q_TNX.shape
    num_blocks, group = head_blocks(num_heads)
    splits = ListSplits.of(q_TNX, tokens_TK, partial_lse_CH, num_sms, BLOCK_TOKENS)
    pdl = supports_pdl(q_TNX)
    codes, scales, rope = gathered_memory(planes)
    _attend_kernel[(num_rows * num_blocks, splits.num_splits)](
        q_TNX,
        codes,
        scales,
        rope,
        out_TNL,
        partial_out_CX,
        partial_lse_CH,
        page_table_NP,
        rows.table_rows_T,
        rows.num_tokens_T,
        tokens_TK,
        page_table_NP.stride(0),
        tokens_TK.stride(0),
        tokens_TK.shape[1],
        scale * LOG2_E,
        splits.places,
        PLAIN_ROWS=planes.kind == "plain",
        FP8=planes.kind == "fp8_ds_mla",
        SMALL_ROPE=planes.has_small_rope,
        NUM_HEADS=num_heads,
        NUM_BLOCKS=num_blocks,
        GROUP=group,
        PAGE_TOKENS=planes.page_tokens,
        PDL=pdl,
        num_warps=8,
        **pdl_launch(pdl),
    )
    if splits.num_splits > 1:
        merge_lists(rows, splits.num_splits, partial_out_CX, partial_lse_CH, out_TNL)
    return out_TNL


@gluon_jit
def _list_of(p_num_tokens, i_row, num_places, places):
    """The first place of this split, the end of it, and how many tokens the row sees."""
    num_tokens = gl.load(p_num_tokens + i_row)
    low = gl.program_id(1) * places
    return low, gl.minimum(low + places, gl.minimum(num_tokens, num_places)), num_tokens


@gluon_jit
def _gather(
    p_codes,
    p_scales,
    p_rope,
    p_pages,
    p_table_rows,
    p_num_tokens,
    p_tokens,
    table_stride,
    tokens_stride,
    num_places,
    places,
    s_latents,
    s_ropes,
    s_factors,
    filled,
    freed,
    PLAIN_ROWS: constexpr,
    FP8: constexpr,
    SMALL_ROPE: constexpr,
    NUM_BLOCKS: constexpr,
    PAGE_TOKENS: constexpr,
):
    i_row = (gl.program_id(0) // NUM_BLOCKS).to(gl.int64)
    low, high, num_tokens = _list_of(p_num_tokens, i_row, num_places, places)
    p_row_tokens = p_tokens + i_row * tokens_stride
    p_row_pages = p_pages + gl.load(p_table_rows + i_row).to(gl.int64) * table_stride
    if PLAIN_ROWS:
        gather_plain(
            p_codes,
            p_row_tokens,
            p_row_pages,
            low,
            high,
            num_tokens,
            s_latents,
            s_ropes,
            s_factors,
            filled,
            freed,
            0,
            PAGE_TOKENS,
        )
    else:
        gather_codes(
            p_codes,
            p_scales,
            p_rope,
            p_row_tokens,
            p_row_pages,
            low,
            high,
            num_tokens,
            s_latents,
            s_ropes,
            s_factors,
            filled,
            freed,
            0,
            FP8,
            SMALL_ROPE,
            False,
            PAGE_TOKENS,
        )


@gluon_jit
def _attend(
    p_q,
    p_out,
    p_partial_out,
    p_partial_lse,
    p_num_tokens,
    num_places,
    scale_log2,
    places,
    s_q,
    s_q_rope,
    s_latents,
    s_ropes,
    s_factors,
    s_p,
    filled,
    freed,
    PLAIN_ROWS: constexpr,
    NUM_HEADS: constexpr,
    NUM_BLOCKS: constexpr,
    GROUP: constexpr,
):
    i_row = gl.program_id(0) // NUM_BLOCKS
    low, high, num_tokens = _list_of(p_num_tokens, i_row, num_places, places)
    num_splits = gl.num_programs(1)
    attend_gathered(
        p_q,
        p_out,
        p_partial_out,
        p_partial_lse,
        i_row,
        gl.where(num_tokens > 0, 1, 0),  # of a row that does not choose nothing is written
        gl.program_id(0) % NUM_BLOCKS * GROUP,
        0,
        low,
        high,
        gl.where(num_splits > 1, i_row * num_splits + gl.program_id(1), -1),
        num_splits,
        scale_log2,
        s_q,
        s_q_rope,
        s_latents,
        s_ropes,
        s_factors,
        s_p,
        filled,
        freed,
        0,
        PLAIN_ROWS,
        False,
        NUM_HEADS,
        GROUP,
    )


@gluon_jit_counting("places")
def _attend_kernel(
    p_q,
    p_codes,
    p_scales,
    p_rope,
    p_out,
    p_partial_out,
    p_partial_lse,
    p_pages,
    p_table_rows,
    p_num_tokens,
    p_tokens,
    table_stride,
    tokens_stride,
    num_places,
    scale_log2,
    places,
    PLAIN_ROWS: constexpr,
    FP8: constexpr,
    SMALL_ROPE: constexpr,
    NUM_HEADS: constexpr,
    NUM_BLOCKS: constexpr,
    GROUP: constexpr,
    PAGE_TOKENS: constexpr,
    PDL: constexpr,
):
    q_dtype: constexpr = p_q.dtype.element_ty
    dtype: constexpr = q_dtype if PLAIN_ROWS else gl.float16
    rope_dtype: constexpr = gl.float16 if SMALL_ROPE else q_dtype
    shared: constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    flat: constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    s_latents = gl.allocate_shared_memory(dtype, [RING, TOKENS, LATENT], shared)
    s_ropes = gl.allocate_shared_memory(rope_dtype, [RING, TOKENS, ROPE], shared)
    s_q = gl.allocate_shared_memory(dtype, [HEIGHT, LATENT], shared)
    s_q_rope = gl.allocate_shared_memory(rope_dtype, [HEIGHT, ROPE], shared)
    s_p = gl.allocate_shared_memory(dtype, [HEIGHT, TOKENS], shared)
    s_factors = gl.allocate_shared_memory(gl.float32, [RING, TOKENS], flat)
    filled = gl.allocate_shared_memory(gl.int64, [RING, 1], hopper.mbarrier.MBarrierLayout())
    freed = gl.allocate_shared_memory(gl.int64, [RING, 1], hopper.mbarrier.MBarrierLayout())
    for i in gl.static_range(RING):
        hopper.mbarrier.init(filled.index(i), count=1)
        hopper.mbarrier.init(freed.index(i), count=1)
    if PDL:
        gl.inline_asm_elementwise(WAIT, "=r", [], gl.int32, False, 1)  # lists and queries come from kernels before
    # Blocks of heads of a row come one after the other, so that all but the first find its latents in the cache.
    gl.warp_specialize(
        [
            (
                _attend,
                (
                    p_q,
                    p_out,
                    p_partial_out,
                    p_partial_lse,
                    p_num_tokens,
                    num_places,
                    scale_log2,
                    places,
                    s_q,
                    s_q_rope,
                    s_latents,
                    s_ropes,
                    s_factors,
                    s_p,
                    filled,
                    freed,
                    PLAIN_ROWS,
                    NUM_HEADS,
                    NUM_BLOCKS,
                    GROUP,
                ),
            ),
            (
                _gather,
                (
                    p_codes,
                    p_scales,
                    p_rope,
                    p_pages,
                    p_table_rows,
                    p_num_tokens,
                    p_tokens,
                    table_stride,
                    tokens_stride,
                    num_places,
                    places,
                    s_latents,
                    s_ropes,
                    s_factors,
                    filled,
                    freed,
                    PLAIN_ROWS,
                    FP8,
                    SMALL_ROPE,
                    NUM_BLOCKS,
                    PAGE_TOKENS,
                ),
            ),
        ],
        [GATHER_WARPS],
        [GATHER_REGISTERS],
    )
    for i in gl.static_range(RING):
        hopper.mbarrier.invalidate(filled.index(i))
        hopper.mbarrier.invalidate(freed.index(i))
    if PDL:
        # Not sooner: programs of the next kernel would take places beside these.
        gl.inline_asm_elementwise(LAUNCH_DEPENDENTS, "=r", [], gl.int32, False, 1)
