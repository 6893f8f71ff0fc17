"""Absorbed latent attention (MLA) over quantized pages for tiles of 64 query rows on a Hopper: warps take codes apart, warpgroups multiply, in Gluon.

T rows, N query heads, L latent, R rotated elements, C split-KV partials

The work, the tiles and their letters are those of latent_quantized_attention.py. A program is there for as long as there are tiles:
four of its warps gather the tokens of one after the other and take codes apart (sparse_gather.py), two blocks of 64 tokens ahead
at the most; two warpgroups multiply (gathered_tiles.py).
"""

import torch

from holdfast.kernels.attention.split_kv import LOG2_E
from holdfast.kernels.attention.tiled_attention import TileWork
from holdfast.kernels.latent.gathered_tiles import (
    GATHER_REGISTERS,
    GATHER_WARPS,
    RING,
    attend_gathered,
    gathered_memory,
)
from holdfast.kernels.latent.latent_geometry import head_blocks
from holdfast.kernels.latent.latent_planes import LatentPlanes
from holdfast.kernels.latent.latent_warpgroups import (
    HEIGHT,
    LATENT,
    LAUNCH_DEPENDENTS,
    ROPE,
    TOKENS,
    WAIT,
    load_tile,
)
from holdfast.kernels.latent.sparse_gather import gather_codes
from holdfast.kernels.triton_compat import constexpr, gl, gluon_jit, hopper, pdl_launch, supports_pdl

# ruff: noqa: ANN001, ANN202 the arguments of kernels have no types


def attend_quantized_warpgroups(
    q_TNX: torch.Tensor,
    planes: LatentPlanes,
    page_table_NP: torch.Tensor,
    work: TileWork,
    large: bool,
    scale: float,
    partial_out_CX: torch.Tensor,
    partial_lse_CH: torch.Tensor,
    out_TNL: torch.Tensor,
    num_sms: int,
) -> None:
    """All small or all large tiles of a step, without the merge of their partials."""
    num_heads = q_TNX.shape[1]
    num_blocks, group = head_blocks(num_heads, large)
    pdl = supports_pdl(q_TNX)
    codes, scales, rope = gathered_memory(planes)
    _attend_kernel[(num_sms,)](
        q_TNX,
        codes,
        scales,
        rope,
        out_TNL,
        partial_out_CX,
        partial_lse_CH,
        page_table_NP,
        work.tiles_X8,
        page_table_NP.stride(0),
        scale * LOG2_E,
        LARGE=large,
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


@gluon_jit
def _tiles_of(p_tiles, LARGE: constexpr):
    """The first of a step's small or large tiles, and how many there are."""
    num_small = gl.load(p_tiles)
    num_tiles = num_small
    first_tile = 1
    if LARGE:
        num_tiles = gl.load(p_tiles + 1)
        first_tile = 1 + num_small
    return first_tile, num_tiles


@gluon_jit
def _gather(
    p_codes,
    p_scales,
    p_rope,
    p_pages,
    p_tiles,
    table_stride,
    s_latents,
    s_ropes,
    s_factors,
    filled,
    freed,
    LARGE: constexpr,
    FP8: constexpr,
    SMALL_ROPE: constexpr,
    NUM_BLOCKS: constexpr,
    PAGE_TOKENS: constexpr,
):
    first_tile, num_tiles = _tiles_of(p_tiles, LARGE)
    count = 0  # of all blocks until now
    for i_item in range(gl.program_id(0), num_tiles * NUM_BLOCKS, gl.num_programs(0)):
        table_row, _, _, _, low, high, _, _ = load_tile(p_tiles, first_tile + i_item // NUM_BLOCKS)
        gather_codes(
            p_codes,
            p_scales,
            p_rope,
            p_tiles,
            p_pages + table_row.to(gl.int64) * table_stride,
            low,
            high,
            high,
            s_latents,
            s_ropes,
            s_factors,
            filled,
            freed,
            count,
            FP8,
            SMALL_ROPE,
            True,
            PAGE_TOKENS,
        )
        count += gl.maximum(high - low + TOKENS - 1, 0) // TOKENS


@gluon_jit
def _attend(
    p_q,
    p_out,
    p_partial_out,
    p_partial_lse,
    p_tiles,
    scale_log2,
    s_q,
    s_q_rope,
    s_latents,
    s_ropes,
    s_factors,
    s_p,
    filled,
    freed,
    LARGE: constexpr,
    NUM_HEADS: constexpr,
    NUM_BLOCKS: constexpr,
    GROUP: constexpr,
):
    first_tile, num_tiles = _tiles_of(p_tiles, LARGE)
    count = 0
    for i_item in range(gl.program_id(0), num_tiles * NUM_BLOCKS, gl.num_programs(0)):
        _, row, num_rows, position, low, high, first_partial, num_splits = load_tile(
            p_tiles, first_tile + i_item // NUM_BLOCKS
        )
        attend_gathered(
            p_q,
            p_out,
            p_partial_out,
            p_partial_lse,
            row,
            num_rows,
            i_item % NUM_BLOCKS * GROUP,
            position,
            low,
            high,
            first_partial,
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
            count,
            False,
            True,
            NUM_HEADS,
            GROUP,
        )
        count += gl.maximum(high - low + TOKENS - 1, 0) // TOKENS


@gluon_jit
def _attend_kernel(
    p_q,
    p_codes,
    p_scales,
    p_rope,
    p_out,
    p_partial_out,
    p_partial_lse,
    p_pages,
    p_tiles,
    table_stride,
    scale_log2,
    LARGE: constexpr,
    FP8: constexpr,
    SMALL_ROPE: constexpr,
    NUM_HEADS: constexpr,
    NUM_BLOCKS: constexpr,
    GROUP: constexpr,
    PAGE_TOKENS: constexpr,
    PDL: constexpr,
):
    rope_dtype: constexpr = gl.float16 if SMALL_ROPE else p_q.dtype.element_ty
    shared: constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    flat: constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    s_latents = gl.allocate_shared_memory(gl.float16, [RING, TOKENS, LATENT], shared)
    s_ropes = gl.allocate_shared_memory(rope_dtype, [RING, TOKENS, ROPE], shared)
    s_q = gl.allocate_shared_memory(gl.float16, [HEIGHT, LATENT], shared)
    s_q_rope = gl.allocate_shared_memory(rope_dtype, [HEIGHT, ROPE], shared)
    s_p = gl.allocate_shared_memory(gl.float16, [HEIGHT, TOKENS], shared)
    s_factors = gl.allocate_shared_memory(gl.float32, [RING, TOKENS], flat)
    filled = gl.allocate_shared_memory(gl.int64, [RING, 1], hopper.mbarrier.MBarrierLayout())
    freed = gl.allocate_shared_memory(gl.int64, [RING, 1], hopper.mbarrier.MBarrierLayout())
    for i in gl.static_range(RING):
        hopper.mbarrier.init(filled.index(i), count=1)
        hopper.mbarrier.init(freed.index(i), count=1)
    if PDL:
        gl.inline_asm_elementwise(
            WAIT, "=r", [], gl.int32, False, 1
        )  # queries and new latents come from the last kernel
    # Blocks of heads of a tile come one after the other, so that all but the first find its codes in the cache.
    gl.warp_specialize(
        [
            (
                _attend,
                (
                    p_q,
                    p_out,
                    p_partial_out,
                    p_partial_lse,
                    p_tiles,
                    scale_log2,
                    s_q,
                    s_q_rope,
                    s_latents,
                    s_ropes,
                    s_factors,
                    s_p,
                    filled,
                    freed,
                    LARGE,
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
                    p_tiles,
                    table_stride,
                    s_latents,
                    s_ropes,
                    s_factors,
                    filled,
                    freed,
                    LARGE,
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
        # Not sooner: programs of the next kernel would take places beside these, more of them here than there.
        gl.inline_asm_elementwise(LAUNCH_DEPENDENTS, "=r", [], gl.int32, False, 1)
