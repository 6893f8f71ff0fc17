"""Absorbed latent attention (MLA) over plain pages on Hopper for tiles of 64 query rows: two warpgroups (wgmma), in Gluon.

T rows, N query heads, L latent, R rotated elements, S slots, C split-KV partials

Work and tiles are those of latent_attention.py, for the sizes of released models only. A block of tokens takes two products
with the softmax between them. Triton gives the scores of both warpgroups to each of them, because their rows are too few for
two, and so computes them twice. Here each warpgroup takes half of the tokens for scores, and half of the latent's columns for
outputs. They exchange p through shared memory, which is full: two blocks of latents, the queries, and p.

One TMA copy loads a block of latents, and all warps wait for its barrier. The copy starts as soon as the block before the last
one has been used. It has no mask: rows after a sequence's end may hold NaN and are zeroed in shared memory.
"""

import torch

from holdfast.kernels.attention.split_kv import LOG2_E
from holdfast.kernels.attention.tile_work import TileWork
from holdfast.kernels.attention.warpgroup_tiles import (
    first_tile,
    launch_dependents,
    load_tile,
    wait_for_kernels_before,
)
from holdfast.kernels.geometry import BLOCK_TOKENS
from holdfast.kernels.latent.latent_geometry import LARGE_HEIGHT, head_blocks
from holdfast.kernels.latent.latent_planes import LatentCall, LatentPlanes
from holdfast.kernels.operation import pdl_flags
from holdfast.kernels.triton_compat import TensorDescriptor, constexpr, gl, gluon_jit, hopper, kernel_constant

LATENT_DIM, ROPE_DIM = 512, 64
HEIGHT, TOKENS = kernel_constant(LARGE_HEIGHT), kernel_constant(BLOCK_TOKENS)
LATENT, ROPE = kernel_constant(LATENT_DIM), kernel_constant(ROPE_DIM)
ZEROED_COLUMNS = kernel_constant(64)
"""Columns zeroed at once after a sequence's end: few registers are left for it."""


def takes_warpgroups(planes: LatentPlanes) -> bool:
    """Return True if this kernel supports tiles of 64 rows: Hopper, half precision, sizes, whole blocks in a page."""
    rows_SX = planes.rows_SX
    return (
        gl is not None
        and planes.kind == "plain"
        and (planes.latent_dim, planes.rope_dim) == (LATENT_DIM, ROPE_DIM)
        and planes.page_tokens % BLOCK_TOKENS == 0
        and rows_SX.dtype in (torch.bfloat16, torch.float16)
        and rows_SX.is_cuda
        and torch.cuda.get_device_capability(rows_SX.device)[0] == 9
    )


def attend_warpgroups(call: LatentCall, work: TileWork, large: bool) -> None:
    """Launch all small or all large tiles of a step, without the merge."""
    num_heads, rows_SX = call.q_TNX.shape[1], call.planes.rows_SX
    num_blocks, group = head_blocks(num_heads, large)
    layout = gl.NVMMASharedLayout(128, 16, rank=2)
    _attend_kernel[(call.num_sms,)](
        call.q_TNX, TensorDescriptor.from_tensor(rows_SX, [BLOCK_TOKENS, LATENT_DIM], layout),
        TensorDescriptor.from_tensor(rows_SX, [BLOCK_TOKENS, ROPE_DIM], layout), call.out_TNL, *call.partials,
        call.page_table_NP, work.tiles_X8, call.page_table_NP.stride(0), call.scale * LOG2_E,
        LARGE=large, NUM_HEADS=num_heads, NUM_BLOCKS=num_blocks, GROUP=group, PAGE_TOKENS=call.planes.page_tokens,
        num_warps=8, **pdl_flags(call.q_TNX),
    )  # fmt: skip


@gluon_jit
def _begin_load(latents, rope, slot, bar, s_k, s_k_rope, is_wanted):
    """Start the copy of a block of latents into shared memory; its arrival flips the barrier."""
    hopper.mbarrier.expect(bar, latents.block_type.nbytes + rope.block_type.nbytes, pred=is_wanted)
    hopper.tma.async_copy_global_to_shared(latents, [slot, 0], bar, s_k, pred=is_wanted)
    hopper.tma.async_copy_global_to_shared(rope, [slot, LATENT], bar, s_k_rope, pred=is_wanted)


@gluon_jit
def _zero_rows(s_block, first):
    """Zero the rows of a block in shared memory from `first` on."""
    layout: constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    o_n = gl.arange(0, TOKENS, gl.SliceLayout(1, layout))
    for i_part in gl.static_range(s_block.shape[1] // ZEROED_COLUMNS):
        s_part = s_block.slice(i_part * ZEROED_COLUMNS, ZEROED_COLUMNS, dim=1)
        b_part = s_part.load(layout)
        s_part.store(gl.where((o_n < first)[:, None], b_part, gl.zeros_like(b_part)))


@gluon_jit
def store_queries(p_q, s_q, row, num_rows, first_head, layout: constexpr, NUM_HEADS: constexpr, GROUP: constexpr):
    """Store some columns of a tile's queries in shared memory: zeros without a row or head, clamped to half precision."""
    o_m = gl.arange(0, HEIGHT, gl.SliceLayout(1, layout))
    o_x = gl.arange(0, s_q.shape[1], gl.SliceLayout(0, layout))
    o_head = first_head + o_m % GROUP
    m_m = (o_m // GROUP < num_rows) & (o_head < NUM_HEADS)
    o_q = ((row + o_m // GROUP).to(gl.int64) * NUM_HEADS + o_head) * (LATENT + ROPE)
    b_q = gl.load(p_q + o_q[:, None] + o_x[None, :], mask=m_m[:, None], other=0.0)
    if s_q.dtype != b_q.dtype:
        b_q = gl.minimum(gl.maximum(b_q.to(gl.float32), -65504.0), 65504.0).to(s_q.dtype)
    s_q.store(b_q)


@gluon_jit
def _attend_kernel(
    p_q, latents, rope, p_out, p_partial_out, p_partial_lse, p_pages, p_tiles, table_stride, scale_log2,
    LARGE: constexpr, NUM_HEADS: constexpr, NUM_BLOCKS: constexpr, GROUP: constexpr, PAGE_TOKENS: constexpr,
    PDL: constexpr,
):  # fmt: skip
    dtype: constexpr = latents.dtype
    # Four warps per 64 rows: a warpgroup has half of the tokens of scores, and half of the columns of outputs.
    score_layout: constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, TOKENS // 2, 16])
    out_layout: constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, LATENT // 2, 16])
    wide_layout: constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    narrow_layout: constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    s_latents = gl.allocate_shared_memory(dtype, [2, TOKENS, LATENT], latents.layout)
    s_ropes = gl.allocate_shared_memory(dtype, [2, TOKENS, ROPE], rope.layout)
    s_q = gl.allocate_shared_memory(dtype, [HEIGHT, LATENT], latents.layout)
    s_q_rope = gl.allocate_shared_memory(dtype, [HEIGHT, ROPE], rope.layout)
    s_p = gl.allocate_shared_memory(dtype, [HEIGHT, TOKENS], rope.layout)
    bars = gl.allocate_shared_memory(gl.int64, [2, 1], hopper.mbarrier.MBarrierLayout())
    for i_bar in gl.static_range(2):
        hopper.mbarrier.init(bars.index(i_bar), count=1)
    first, num_tiles = first_tile(p_tiles, LARGE)
    o_m = gl.arange(0, HEIGHT, gl.SliceLayout(1, score_layout))
    o_n = gl.arange(0, TOKENS, gl.SliceLayout(0, score_layout))
    o_m_out = gl.arange(0, HEIGHT, gl.SliceLayout(1, out_layout))
    o_l = gl.arange(0, LATENT, gl.SliceLayout(0, out_layout))
    count = 0  # blocks so far: selects the next buffer and the phase of its barrier
    for i_item in range(gl.program_id(0), num_tiles * NUM_BLOCKS, gl.num_programs(0)):
        table_row, row, num_rows, position, low, high, first_partial, num_splits = load_tile(
            p_tiles, first + i_item // NUM_BLOCKS
        )
        first_head = i_item % NUM_BLOCKS * GROUP
        num_loops = (high - low + TOKENS - 1) // TOKENS
        # Page ids are loaded a block ahead.
        p_row_pages = p_pages + table_row.to(gl.int64) * table_stride
        page_0 = gl.load(p_row_pages + low // PAGE_TOKENS, mask=num_loops > 0, other=0)
        page_1 = gl.load(p_row_pages + (low + TOKENS) // PAGE_TOKENS, mask=num_loops > 1, other=0)
        next_page = gl.load(p_row_pages + (low + 2 * TOKENS) // PAGE_TOKENS, mask=num_loops > 2, other=0)
        if PDL:
            wait_for_kernels_before()  # tiles and pages are older; queries and new latents come from the last kernel
        slot_0 = page_0 * PAGE_TOKENS + low % PAGE_TOKENS
        slot_1 = page_1 * PAGE_TOKENS + (low + TOKENS) % PAGE_TOKENS
        i_0 = count & 1
        i_1 = 1 - i_0
        _begin_load(latents, rope, slot_0, bars.index(i_0), s_latents.index(i_0), s_ropes.index(i_0), num_loops > 0)
        _begin_load(latents, rope, slot_1, bars.index(i_1), s_latents.index(i_1), s_ropes.index(i_1), num_loops > 1)
        store_queries(p_q, s_q, row, num_rows, first_head, wide_layout, NUM_HEADS, GROUP)
        store_queries(p_q + LATENT, s_q_rope, row, num_rows, first_head, narrow_layout, NUM_HEADS, GROUP)
        hopper.fence_async_shared()
        b_acc = gl.zeros([HEIGHT, LATENT], gl.float32, out_layout)
        b_m = gl.full([HEIGHT], -float("inf"), gl.float32, gl.SliceLayout(1, score_layout))
        b_l = gl.zeros([HEIGHT, TOKENS], gl.float32, score_layout)  # summed at the end, so no warp waits for another
        clear = gl.minimum(high, position + 1)  # all rows see the tokens up to the first row's own
        for i_loop in range(num_loops):
            n = low + i_loop * TOKENS
            i_place = count & 1
            bar = bars.index(i_place)
            s_k = s_latents.index(i_place)
            s_k_rope = s_ropes.index(i_place)
            hopper.mbarrier.wait(bar, (count >> 1) & 1)
            if n + TOKENS > high:
                _zero_rows(s_k, high - n)
                _zero_rows(s_k_rope, high - n)
                hopper.fence_async_shared()
            b_score = gl.zeros([HEIGHT, TOKENS], gl.float32, score_layout)
            score = hopper.warpgroup_mma(s_q, s_k.permute((1, 0)), b_score, use_acc=False, is_async=True)
            score = hopper.warpgroup_mma(s_q_rope, s_k_rope.permute((1, 0)), score, is_async=True)
            b_score = hopper.warpgroup_mma_wait(0, deps=[score])
            if n + TOKENS > clear:
                m_seen = (position + o_m // GROUP)[:, None] >= (n + o_n)[None, :]
                b_score = gl.where(m_seen & (n + o_n < high)[None, :], b_score, -float("inf"))
            b_m_new = gl.maximum(b_m, gl.max(b_score, axis=1) * scale_log2)
            b_m_safe = gl.where(b_m_new == -float("inf"), 0.0, b_m_new)
            b_p = gl.exp2(b_score * scale_log2 - b_m_safe[:, None])
            b_alpha = gl.exp2(b_m - b_m_safe)
            b_l = b_l * b_alpha[:, None] + b_p
            b_m = b_m_new
            s_p.store(b_p.to(dtype))
            hopper.fence_async_shared()
            b_acc = b_acc * gl.convert_layout(b_alpha, gl.SliceLayout(1, out_layout))[:, None]
            # Wait at once: ptxas serializes all wgmma if one is still in flight at the end of a loop.
            acc = hopper.warpgroup_mma(s_p, s_k, b_acc, is_async=True)
            b_acc = hopper.warpgroup_mma_wait(0, deps=[acc])
            slot = next_page * PAGE_TOKENS + (n + 2 * TOKENS) % PAGE_TOKENS
            _begin_load(latents, rope, slot, bar, s_k, s_k_rope, i_loop + 2 < num_loops)
            p_page = p_row_pages + (n + 3 * TOKENS) // PAGE_TOKENS
            next_page = gl.load(p_page, mask=i_loop + 3 < num_loops, other=0)
            count += 1
        # If a row sees nothing of a split, its partial is neutral: zeros, with -inf as lse.
        b_sum = gl.sum(b_l, axis=1)
        b_whole = gl.convert_layout(gl.where(b_sum > 0, b_sum, 1.0), gl.SliceLayout(1, out_layout))
        b_out = b_acc / b_whole[:, None]
        o_head = first_head + o_m_out % GROUP
        m_out = (o_m_out // GROUP < num_rows) & (o_head < NUM_HEADS)
        if first_partial < 0:
            o_out = ((row + o_m_out // GROUP).to(gl.int64) * NUM_HEADS + o_head) * LATENT
            gl.store(p_out + o_out[:, None] + o_l[None, :], b_out.to(dtype), mask=m_out[:, None])
        else:
            o_out = (first_partial + o_m_out // GROUP * num_splits).to(gl.int64) * NUM_HEADS + o_head
            gl.store(p_partial_out + (o_out * LATENT)[:, None] + o_l[None, :], b_out, mask=m_out[:, None])
            o_lse_head = first_head + o_m % GROUP
            m_lse = (o_m // GROUP < num_rows) & (o_lse_head < NUM_HEADS)
            o_lse = (first_partial + o_m // GROUP * num_splits).to(gl.int64) * NUM_HEADS + o_lse_head
            gl.store(p_partial_lse + o_lse, b_m + gl.log2(b_sum), mask=m_lse)
    for i_bar in gl.static_range(2):
        hopper.mbarrier.invalidate(bars.index(i_bar))
    if PDL:
        launch_dependents()  # release late: programs of the next kernel would share the multiprocessors unevenly
        wait_for_kernels_before()  # wait even without a tile
