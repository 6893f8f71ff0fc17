"""Large tiles of paged attention on Hopper: one warp copies keys and values, two warpgroups multiply (wgmma), in Gluon.

T rows, H query heads, K key/value heads, G = H / K, D head dim, S slots; M rows of a tile times heads, N tokens of a block

Work and tiles are those of tiled_attention.py. A warpgroup has 64 of the 128 rows of a tile, so it needs no word from the
other. It computes scores of a block, then adds the values of the block before while it takes exponentials. p stays in registers.

The copying warp runs ahead as far as the ring in shared memory allows, also into the next tile. A TMA copy takes tokens of one
page, 64 columns. Places outside a tile's range are copied from outside the plane, which gives zeros: their pages may be gone.

Blocks begin at multiples of their size. A block that a row does not see leaves its result unchanged, bit for bit. So a row's
result does not depend on its tile (batch_invariant). Masks are set before the one fma that every score takes.

Slots beyond a sequence may hold NaN. A mask replaces their scores. Their values are zeroed in shared memory, by both warpgroups:
they write the same, so neither waits for the other.
"""

import torch
from torch import Tensor

from holdfast.kernels.attention.dequantize import EXP2_ASM, LOG2_ASM
from holdfast.kernels.attention.split_kv import LOG2_E, NUM_TILE_FIELDS, PER_NAT
from holdfast.kernels.attention.tile_work import TileCall
from holdfast.kernels.attention.warpgroup_tiles import (
    first_tile,
    launch_dependents,
    load_tile,
    wait_for_kernels_before,
)
from holdfast.kernels.geometry import LARGE_TILE
from holdfast.kernels.operation import pdl_flags
from holdfast.kernels.triton_compat import (
    TensorDescriptor,
    constexpr,
    gl,
    gluon_jit,
    gluon_jit_counting,
    hopper,
    kernel_constant,
    next_power_of_two,
)

# Triton cannot unpack into a tuple, but adds tuples.
# pyright: reportGeneralTypeIssues=false

PREFILL_PROGRAMS_PER_SM = 1
"""Shared memory and registers of one program fill a multiprocessor."""
MIN_PAGE_TOKENS = 16
STAGES = kernel_constant(2)
"""Blocks of keys, and of values, in shared memory."""
REGISTERS, COPY_REGISTERS = kernel_constant(232), kernel_constant(40)
"""Registers of a multiplying thread, and of a copying one."""
HEIGHT = kernel_constant(LARGE_TILE // 2)
"""Rows of a tile times heads that one warpgroup has."""
PANEL = kernel_constant(64)
"""Columns of a TMA copy: 128 bytes, the widest that is swizzled."""
ZEROED_ROWS = kernel_constant(16)
COPY_WARPS = kernel_constant(1)
# Named barriers of the turns of the first and second warpgroup. Triton uses the lowest numbers.
AWAIT_FIRST, GIVE_FIRST = kernel_constant("bar.sync 8, 256; // $0"), kernel_constant("bar.arrive 8, 256; // $0")
AWAIT_SECOND, GIVE_SECOND = kernel_constant("bar.sync 9, 256; // $0"), kernel_constant("bar.arrive 9, 256; // $0")

INVERSE_ASM = kernel_constant("rcp.approx.ftz.f32 $0, $1;")
STOP_ASM = kernel_constant("""{
.reg .pred again;
stop: mov.u32 $0, %clock;
setp.eq.u32 again, $0, 0xffffffff;
@again bra.uni stop;
}""")
"""A branch that ptxas cannot remove. Without it exponentials move behind the next wait for a product."""


def prefill_block_tokens(head_dim: int) -> int:
    """Return the tokens of a block: as many as shared memory and registers allow. It decides how a row is rounded."""
    return 64 if head_dim > 128 else 128


def declined_prefill(k_plane_SKD: Tensor, page_tokens: int, num_heads: int, scale: float) -> str | None:
    """Return why the kernel does not take a layer's large tiles, or None: its heads, its pages, the device.

    Queries and outputs have the type of the pages.
    """
    _, num_kv_heads, head_dim = k_plane_SKD.shape
    if gl is None or not k_plane_SKD.is_cuda or torch.cuda.get_device_capability(k_plane_SKD.device)[0] != 9:
        return "it runs on Hopper GPUs with Gluon only"
    if k_plane_SKD.dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in half precision, not in {k_plane_SKD.dtype}"
    if not 64 <= head_dim <= 256 or head_dim % 8:
        return f"head_dim is {head_dim}, and a multiple of 8 from 64 to 256 is computed"
    if num_heads // num_kv_heads > LARGE_TILE:
        return f"{num_heads // num_kv_heads} query heads share a key head, {LARGE_TILE} may"
    if page_tokens % MIN_PAGE_TOKENS:
        return f"pages have {page_tokens} tokens, and a multiple of {MIN_PAGE_TOKENS} is copied"
    return None if scale > 0 else f"the scale of scores is {scale}, and maxima are taken before it"


def attend_prefill(call: TileCall, k_plane_SKD: Tensor, v_plane_SKD: Tensor, page_tokens: int) -> None:
    """Launch all large tiles of a step, without the merge."""
    (_, num_heads, head_dim), num_kv_heads = call.q_THD.shape, k_plane_SKD.shape[1]
    scale, window, sinks_H, softcap = call.scoring
    tokens = prefill_block_tokens(head_dim)
    box_tokens = min(tokens, page_tokens & -page_tokens)
    planes = [_describe(plane_SKD, box_tokens) for plane_SKD in (k_plane_SKD, v_plane_SKD)]
    # A capped score is softcap * tanh(inner * product), and exponentials have base 2.
    inner, outer = (0.0, scale) if softcap is None else (scale / softcap, softcap)
    _attend_kernel[(call.num_sms * PREFILL_PROGRAMS_PER_SM,)](
        call.q_THD, *planes, call.out_TX, *call.partials, call.page_table_NP, call.work.tiles_X8,
        call.page_table_NP.stride(0), sinks_H, inner, outer * LOG2_E, window or 0,
        NUM_KV_HEADS=num_kv_heads, GROUP=num_heads // num_kv_heads, HEAD_DIM=head_dim, BLOCK_D=_block_d(head_dim),
        PAGE_TOKENS=page_tokens, HAS_WINDOW=window is not None, HAS_SINKS=sinks_H is not None,
        HAS_CAP=softcap is not None, TOKENS=tokens, BOX=box_tokens, num_warps=4, **pdl_flags(call.q_THD),
    )  # fmt: skip


def _block_d(head_dim: int) -> int:
    """Return the columns of a head in shared memory: 64, 128 or 256."""
    return max(64, next_power_of_two(head_dim))


def _describe(plane_SKD: Tensor, box_tokens: int) -> object:
    """Describe boxes of tokens x 64 columns of one head. Columns beyond the head dim are copied as zeros."""
    if plane_SKD.shape[2] == _block_d(plane_SKD.shape[2]):
        layout = gl.NVMMASharedLayout(128, 16, rank=2)
        return TensorDescriptor.from_tensor(plane_SKD.view(len(plane_SKD), -1), [box_tokens, 64], layout)
    layout = gl.NVMMASharedLayout(128, 16, rank=3)
    return TensorDescriptor.from_tensor(plane_SKD, [box_tokens, 1, 64], layout)


@gluon_jit
def _await_turn(HALF: constexpr):
    if HALF == 0:
        gl.inline_asm_elementwise(AWAIT_FIRST, "=r", [], gl.int32, False, 1)
    else:
        gl.inline_asm_elementwise(AWAIT_SECOND, "=r", [], gl.int32, False, 1)


@gluon_jit
def _give_turn(HALF: constexpr):
    """Let the other warpgroup issue."""
    if HALF == 0:
        gl.inline_asm_elementwise(GIVE_SECOND, "=r", [], gl.int32, False, 1)
    else:
        gl.inline_asm_elementwise(GIVE_FIRST, "=r", [], gl.int32, False, 1)


@gluon_jit
def _exp2(b_x):
    return gl.inline_asm_elementwise(EXP2_ASM, "=f,f", [b_x], gl.float32, True, 1)


@gluon_jit
def _count_items(p_tiles, NUM_KV_HEADS: constexpr):
    """Return the index of the first large tile, and this program's number of items."""
    first, num_tiles = first_tile(p_tiles, True)
    num_items = num_tiles * NUM_KV_HEADS
    num_programs = gl.num_programs(0)
    num_rounds = num_items // num_programs
    num_rounds += gl.where(_item_of(num_rounds) < num_items, 1, 0)
    return first, num_rounds


@gluon_jit
def _item_of(i_round):
    """Return this program's item of a round. Every other round is reversed: tiles come longest first."""
    i_program = gl.program_id(0)
    num_programs = gl.num_programs(0)
    return i_round * num_programs + gl.where(i_round % 2 == 0, i_program, num_programs - 1 - i_program)


@gluon_jit
def _blocks_of(low, high, position, window, HAS_WINDOW: constexpr, TOKENS: constexpr):
    """Return the first token that a row sees, the begin of its block, and the number of blocks, at least one."""
    seen = low
    if HAS_WINDOW:
        seen = gl.maximum(low, position - window + 1)
    begin = seen // TOKENS * TOKENS
    return seen, begin, gl.maximum((high - begin + TOKENS - 1) // TOKENS, 1)


@gluon_jit
def _place_of(count):
    """Return the place of a block in the ring of two, and the phase of the barriers there."""
    return count & 1, count >> 1 & 1


@gluon_jit
def _load_pages(p_row_pages, n, seen, high, PAGE_TOKENS: constexpr, TOKENS: constexpr, BOX: constexpr):
    """Return the page of each copy of a block; -1: no row sees its tokens."""
    pages = ()
    for i_box in gl.static_range(TOKENS // BOX):
        first = n + i_box * BOX
        is_wanted = (first < high) & (first + BOX > seen)
        pages = pages + (gl.load(p_row_pages + first // PAGE_TOKENS, mask=is_wanted, other=-1),)
    return pages


@gluon_jit
def _copy_block(
    plane, pages, n, i_head, bar, s_boxes, first_box, HEAD_DIM: constexpr, BLOCK_D: constexpr, PAGE_TOKENS: constexpr
):  # fmt: skip
    """Start the copies of a block of keys or values; their arrival flips the barrier. Page -1 gives zeros."""
    BOX: constexpr = plane.block_shape[0]
    NUM_BOXES: constexpr = len(pages)
    NUM_PANELS: constexpr = BLOCK_D // PANEL
    hopper.mbarrier.expect(bar, NUM_BOXES * NUM_PANELS * plane.block_type.nbytes)
    for i_box in gl.static_range(NUM_BOXES):
        slot = pages[i_box] * PAGE_TOKENS + (n + i_box * BOX) % PAGE_TOKENS
        for i_panel in gl.static_range(NUM_PANELS):
            s_box = s_boxes.index(first_box + i_panel * NUM_BOXES + i_box)
            if HEAD_DIM == BLOCK_D:
                coordinate = [slot, i_head * HEAD_DIM + i_panel * PANEL]
            else:
                coordinate = [slot, i_head, i_panel * PANEL]
            hopper.tma.async_copy_global_to_shared(plane, coordinate, bar, s_box)


@gluon_jit
def _copy(
    k_plane, v_plane, p_pages, p_tiles, table_stride, window, s_k, s_v, k_filled, k_freed, v_filled, v_freed,
    NUM_KV_HEADS: constexpr, HEAD_DIM: constexpr, PAGE_TOKENS: constexpr, HAS_WINDOW: constexpr,
):  # fmt: skip
    """Copy the blocks of all of this program's tiles."""
    TOKENS: constexpr = s_k.shape[1]
    BLOCK_D: constexpr = s_k.shape[2]
    BOX: constexpr = k_plane.block_shape[0]
    NUM_BOXES: constexpr = BLOCK_D // PANEL * (TOKENS // BOX)
    if HEAD_DIM == BLOCK_D:
        s_k_boxes = s_k._reinterpret(s_k.dtype, [STAGES * NUM_BOXES, BOX, PANEL], k_plane.layout)
        s_v_boxes = s_v._reinterpret(s_v.dtype, [STAGES * NUM_BOXES, BOX, PANEL], k_plane.layout)
    else:
        s_k_boxes = s_k._reinterpret(s_k.dtype, [STAGES * NUM_BOXES, BOX, 1, PANEL], k_plane.layout)
        s_v_boxes = s_v._reinterpret(s_v.dtype, [STAGES * NUM_BOXES, BOX, 1, PANEL], k_plane.layout)
    first, num_rounds = _count_items(p_tiles, NUM_KV_HEADS)
    count = 0  # blocks so far
    for i_round in range(num_rounds):
        i_item = _item_of(i_round)
        i_head = i_item % NUM_KV_HEADS
        table_row, _, _, position, low, high, _, _ = load_tile(p_tiles, first + i_item // NUM_KV_HEADS)
        seen, begin, num_blocks = _blocks_of(low, high, position, window, HAS_WINDOW, TOKENS)
        p_row_pages = p_pages + table_row.to(gl.int64) * table_stride
        pages = _load_pages(p_row_pages, begin, seen, high, PAGE_TOKENS, TOKENS, BOX)
        for i_block in range(num_blocks):
            n = begin + i_block * TOKENS
            # Page ids are loaded a block ahead.
            next_pages = _load_pages(p_row_pages, n + TOKENS, seen, high, PAGE_TOKENS, TOKENS, BOX)
            place, phase = _place_of(count + i_block)
            hopper.mbarrier.wait(k_freed.index(place), phase ^ 1)
            _copy_block(
                k_plane, pages, n, i_head, k_filled.index(place), s_k_boxes, place * NUM_BOXES,
                HEAD_DIM, BLOCK_D, PAGE_TOKENS,
            )  # fmt: skip
            hopper.mbarrier.wait(v_freed.index(place), phase ^ 1)
            _copy_block(
                v_plane, pages, n, i_head, v_filled.index(place), s_v_boxes, place * NUM_BOXES,
                HEAD_DIM, BLOCK_D, PAGE_TOKENS,
            )  # fmt: skip
            pages = next_pages
        count += num_blocks


@gluon_jit
def _zero_unseen(s_v, place, n, seen, high, BOX: constexpr):
    """Zero the rows of a block of values outside a tile's range, except copies that gave zeros already."""
    NUM_CHUNKS: constexpr = s_v.shape[1] // ZEROED_ROWS
    NUM_PANELS: constexpr = s_v.shape[2] // PANEL
    layout: constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    shape: constexpr = [s_v.shape[0] * NUM_PANELS * NUM_CHUNKS, ZEROED_ROWS, PANEL]
    s_chunks = s_v._reinterpret(s_v.dtype, shape, s_v.layout)
    for i_chunk in range(NUM_CHUNKS):
        first = n + i_chunk * ZEROED_ROWS
        is_unseen = (first < seen) | (first + ZEROED_ROWS > high)
        if BOX == ZEROED_ROWS:
            is_unseen = is_unseen & (first < high) & (first + ZEROED_ROWS > seen)
        if is_unseen:
            o_n = first + gl.arange(0, ZEROED_ROWS, gl.SliceLayout(1, layout))
            m_n = (o_n >= seen) & (o_n < high)
            for i_panel in gl.static_range(NUM_PANELS):
                s_chunk = s_chunks.index((place * NUM_PANELS + i_panel) * NUM_CHUNKS + i_chunk)
                b_chunk = s_chunk.load(layout)
                s_chunk.store(gl.where(m_n[:, None], b_chunk, gl.zeros_like(b_chunk)))
    hopper.fence_async_shared()


@gluon_jit
def _load_next(p_tiles, first, i_round, num_rounds, NUM_KV_HEADS: constexpr):
    """Return the fields of a round's tile that a multiplying warp uses, and its KV head; no rows after the last round."""
    exists = i_round < num_rounds
    i_item = gl.where(exists, _item_of(i_round), 0)
    p_tile = p_tiles + (first + i_item // NUM_KV_HEADS) * NUM_TILE_FIELDS
    row, num_rows = gl.load(p_tile + 1, mask=exists, other=0), gl.load(p_tile + 2, mask=exists, other=0)
    position, low = gl.load(p_tile + 3, mask=exists, other=0), gl.load(p_tile + 4, mask=exists, other=0)
    high, first_partial = gl.load(p_tile + 5, mask=exists, other=0), gl.load(p_tile + 6, mask=exists, other=0)
    num_splits = gl.load(p_tile + 7, mask=exists, other=0)
    return row, num_rows, position, low, high, first_partial, num_splits, i_item % NUM_KV_HEADS


@gluon_jit
def _elements_of(
    row, num_rows, first_head, HALF: constexpr, NUM_HEADS: constexpr, GROUP: constexpr, HEAD_DIM: constexpr,
    layout: constexpr,
):  # fmt: skip
    """Return offsets of the elements of half a tile in [T, H * D], and which of them exist."""
    BLOCK_D: constexpr = layout.size_per_thread[1] * layout.threads_per_warp[1]
    o_m = HALF * HEIGHT + gl.arange(0, HEIGHT, gl.SliceLayout(1, layout))
    o_d = gl.arange(0, BLOCK_D, gl.SliceLayout(0, layout))
    o_row = ((row + o_m // GROUP).to(gl.int64) * NUM_HEADS + first_head + o_m % GROUP) * HEAD_DIM
    return o_row[:, None] + o_d[None, :], (o_m // GROUP < num_rows)[:, None] & (o_d < HEAD_DIM)[None, :]


@gluon_jit
def _load_queries(
    p_q, tile, HALF: constexpr, NUM_HEADS: constexpr, GROUP: constexpr, HEAD_DIM: constexpr, layout: constexpr
):  # fmt: skip
    """Load half of the queries of a tile; zeros without a row."""
    o_x, m_x = _elements_of(tile[0], tile[1], tile[7] * GROUP, HALF, NUM_HEADS, GROUP, HEAD_DIM, layout)
    return gl.load(p_q + o_x, mask=m_x, other=0.0)


@gluon_jit
def _tanh(b_x):
    """Return tanh with an absolute error near 2 ** -23: scores need no relative exactness near zero."""
    b_e = _exp2(b_x * (2.0 * PER_NAT))
    return 1.0 - 2.0 * gl.inline_asm_elementwise(INVERSE_ASM, "=f,f", [1.0 + b_e], gl.float32, True, 1)


@gluon_jit
def _seen_scores(
    b_score, n, o_row, seen, first_clear, high, clear, position, window, inner, HAS_WINDOW: constexpr, HAS_CAP: constexpr
):  # fmt: skip
    """Return the scores of a block, capped, and -inf where a row does not see a token."""
    TOKENS: constexpr = b_score.shape[1]
    if HAS_CAP:
        b_score = _tanh(b_score * inner)
    if (n < first_clear) | (n + TOKENS > clear):
        o_n = n + gl.arange(0, TOKENS, gl.SliceLayout(0, b_score.type.layout))
        distance = (position + o_row)[:, None] - o_n[None, :]
        m_seen = (distance >= 0) & ((o_n >= seen) & (o_n < high))[None, :]
        if HAS_WINDOW:
            m_seen = m_seen & (distance < window)
        b_score = gl.where(m_seen, b_score, -float("inf"))
    return b_score


@gluon_jit
def _sum_tokens(b_p):
    """Sum the numbers of a row that one thread holds, without a word between threads."""
    # Axes of the tokens: parts of an instruction, four threads, pair.
    b_p = b_p.reshape([b_p.shape[0], b_p.shape[1] // 8, 4, 2])
    return gl.sum(gl.sum(b_p, axis=3), axis=1)


@gluon_jit
def _soften(b_score, b_m, b_l, outer):
    """Return p, the factor of earlier sums, the new maximum and the new sums of threads."""
    b_m_new = gl.maximum(b_m, gl.max(b_score, axis=1) * outer)
    b_m_safe = gl.where(b_m_new == -float("inf"), 0.0, b_m_new)
    b_outer = gl.full([b_score.shape[0], b_score.shape[1]], 0.0, gl.float32, b_score.type.layout) + outer
    b_p = _exp2(gl.fma(b_score, b_outer, gl.expand_dims(-b_m_safe, 1) + gl.zeros_like(b_outer)))
    b_alpha = _exp2(b_m - b_m_safe)
    b_factor = gl.expand_dims(gl.convert_layout(b_alpha, gl.SliceLayout(1, b_l.type.layout)), 1)
    return b_p, b_alpha, b_m_new, b_l * b_factor + _sum_tokens(b_p)


@gluon_jit
def _attend(
    p_q, p_out, p_partial_out, p_partial_lse, p_tiles, p_sinks, inner, outer, window, s_q, s_k, s_v,
    k_filled, k_freed, v_filled, v_freed,
    HALF: constexpr, NUM_KV_HEADS: constexpr, GROUP: constexpr, HEAD_DIM: constexpr, HAS_WINDOW: constexpr,
    HAS_SINKS: constexpr, HAS_CAP: constexpr, BOX: constexpr,
):  # fmt: skip
    """Attend 64 rows times heads of all of this program's tiles: the first or second half of each."""
    TOKENS: constexpr = s_k.shape[1]
    BLOCK_D: constexpr = s_k.shape[2]
    NUM_HEADS: constexpr = NUM_KV_HEADS * GROUP
    dtype: constexpr = s_k.dtype
    score_layout: constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    out_layout: constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    p_layout: constexpr = gl.DotOperandLayout(0, out_layout, 2)
    wide_layout: constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_D, BLOCK_D // 8], [4, 1], [1, 0])
    row_layout: constexpr = gl.SliceLayout(1, score_layout)
    s_rows = s_q.index(HALF)
    o_m = HALF * HEIGHT + gl.arange(0, HEIGHT, row_layout)
    b_none = gl.zeros([HEIGHT, TOKENS], gl.float32, score_layout)
    first, num_rounds = _count_items(p_tiles, NUM_KV_HEADS)
    # Queries of a tile are loaded while the last product of the tile before runs.
    tile = _load_next(p_tiles, first, 0, num_rounds, NUM_KV_HEADS)
    b_q = _load_queries(p_q, tile, HALF, NUM_HEADS, GROUP, HEAD_DIM, wide_layout)
    count = 0  # blocks so far: select places of the ring
    if HALF == 1:
        _give_turn(HALF)
    for i_round in range(num_rounds):
        row, num_rows, position, low, high, first_partial, num_splits, i_head = tile
        first_head = i_head * GROUP
        next_tile = _load_next(p_tiles, first, i_round + 1, num_rounds, NUM_KV_HEADS)
        seen, begin, num_blocks = _blocks_of(low, high, position, window, HAS_WINDOW, TOKENS)
        # All rows see the tokens of a block from first_clear to clear.
        clear = gl.minimum(high, position + 1)
        first_clear = seen
        if HAS_WINDOW:
            first_clear = gl.maximum(seen, position + num_rows - window)
        s_rows.store(b_q)
        hopper.fence_async_shared()
        b_acc = gl.zeros([HEIGHT, BLOCK_D], gl.float32, out_layout)
        b_m = gl.full([HEIGHT], -float("inf"), gl.float32, row_layout)
        b_l = _sum_tokens(b_none)
        place, phase = _place_of(count)
        hopper.mbarrier.wait(k_filled.index(place), phase)
        score = hopper.warpgroup_mma(s_rows, s_k.index(place).permute((1, 0)), b_none, use_acc=False, is_async=True)
        b_score = hopper.warpgroup_mma_wait(0, deps=[score])
        hopper.mbarrier.arrive(k_freed.index(place), count=1)
        b_score = _seen_scores(
            b_score, begin, o_m // GROUP, seen, first_clear, high, clear, position, window, inner, HAS_WINDOW, HAS_CAP
        )
        b_soft, _, b_m, b_l = _soften(b_score, b_m, b_l, outer)
        b_p = gl.convert_layout(b_soft.to(dtype), p_layout)
        if begin < seen:
            hopper.mbarrier.wait(v_filled.index(place), phase)
            _zero_unseen(s_v, place, begin, seen, high, BOX)
        for i_block in range(1, num_blocks):
            v_place, v_phase = _place_of(count + i_block - 1)
            place, phase = _place_of(count + i_block)
            hopper.mbarrier.wait(k_filled.index(place), phase)
            _await_turn(HALF)
            score = hopper.warpgroup_mma(s_rows, s_k.index(place).permute((1, 0)), b_none, use_acc=False, is_async=True)
            hopper.mbarrier.wait(v_filled.index(v_place), v_phase)
            acc = hopper.warpgroup_mma(b_p, s_v.index(v_place), b_acc, is_async=True)
            _give_turn(HALF)
            b_score = hopper.warpgroup_mma_wait(1, deps=[score])
            hopper.mbarrier.arrive(k_freed.index(place), count=1)
            b_score = _seen_scores(
                b_score, begin + i_block * TOKENS, o_m // GROUP, seen, first_clear, high, clear, position, window, inner,
                HAS_WINDOW, HAS_CAP,
            )  # fmt: skip
            b_soft, b_alpha, b_m, b_l = _soften(b_score, b_m, b_l, outer)
            gl.inline_asm_elementwise(STOP_ASM, "=r", [], gl.int32, False, 1)
            # Wait before the loop's end: ptxas serializes all wgmma if one is still in flight there.
            b_acc, b_soft = hopper.warpgroup_mma_wait(0, deps=[acc, b_soft])
            hopper.mbarrier.arrive(v_freed.index(v_place), count=1)
            b_acc = b_acc * gl.convert_layout(b_alpha, gl.SliceLayout(1, out_layout))[:, None]
            b_p = gl.convert_layout(b_soft.to(dtype), p_layout)
        count += num_blocks
        v_place, v_phase = _place_of(count - 1)
        last = begin + (num_blocks - 1) * TOKENS
        hopper.mbarrier.wait(v_filled.index(v_place), v_phase)
        if last + TOKENS > high:
            _zero_unseen(s_v, v_place, last, seen, high, BOX)
        acc = hopper.warpgroup_mma(b_p, s_v.index(v_place), b_acc, is_async=True)
        if BLOCK_D <= 128:
            b_q = _load_queries(p_q, next_tile, HALF, NUM_HEADS, GROUP, HEAD_DIM, wide_layout)
        b_acc = hopper.warpgroup_mma_wait(0, deps=[acc])
        hopper.mbarrier.arrive(v_freed.index(v_place), count=1)
        b_sum = gl.convert_layout(gl.sum(b_l, axis=1), row_layout)
        o_head = first_head + o_m % GROUP
        m_m = o_m // GROUP < num_rows
        b_whole = b_sum
        if HAS_SINKS:
            b_sink = gl.load(p_sinks + o_head, mask=m_m & (first_partial < 0), other=-float("inf")) * PER_NAT
            b_whole = b_sum + _exp2(b_sink - gl.where(b_m == -float("inf"), 0.0, b_m))
        # If a row sees nothing of a split, its partial is neutral: zeros, with -inf as lse.
        b_share = 1.0 / gl.where(b_whole > 0, b_whole, 1.0)
        b_out = b_acc * gl.convert_layout(b_share, gl.SliceLayout(1, out_layout))[:, None]
        if first_partial < 0:
            # Through shared memory, so threads write whole lines.
            s_rows.store(b_out.to(dtype))
            o_x, m_x = _elements_of(row, num_rows, first_head, HALF, NUM_HEADS, GROUP, HEAD_DIM, wide_layout)
            gl.store(p_out + o_x, s_rows.load(wide_layout), mask=m_x)
        else:
            o_m_out = HALF * HEIGHT + gl.arange(0, HEIGHT, gl.SliceLayout(1, out_layout))
            o_d_out = gl.arange(0, BLOCK_D, gl.SliceLayout(0, out_layout))
            o_out = (first_partial + o_m_out // GROUP * num_splits).to(gl.int64) * NUM_HEADS
            o_out += first_head + o_m_out % GROUP
            m_out = (o_m_out // GROUP < num_rows)[:, None] & (o_d_out < HEAD_DIM)[None, :]
            gl.store(p_partial_out + (o_out * HEAD_DIM)[:, None] + o_d_out[None, :], b_out, mask=m_out)
            o_lse = (first_partial + o_m // GROUP * num_splits).to(gl.int64) * NUM_HEADS + o_head
            b_log = gl.inline_asm_elementwise(LOG2_ASM, "=f,f", [b_sum], gl.float32, True, 1)
            gl.store(p_partial_lse + o_lse, b_m + b_log, mask=m_m)
        if BLOCK_D > 128:  # no registers are left earlier
            b_q = _load_queries(p_q, next_tile, HALF, NUM_HEADS, GROUP, HEAD_DIM, wide_layout)
        tile = next_tile
    if HALF == 0:
        _await_turn(HALF)


@gluon_jit_counting("table_stride", "window")
def _attend_kernel(
    p_q, k_plane, v_plane, p_out, p_partial_out, p_partial_lse, p_pages, p_tiles, table_stride, p_sinks, inner, outer,
    window,
    NUM_KV_HEADS: constexpr, GROUP: constexpr, HEAD_DIM: constexpr, BLOCK_D: constexpr, PAGE_TOKENS: constexpr,
    HAS_WINDOW: constexpr, HAS_SINKS: constexpr, HAS_CAP: constexpr, TOKENS: constexpr, BOX: constexpr,
    PDL: constexpr,
):  # fmt: skip
    dtype: constexpr = p_q.dtype.element_ty
    shared: constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    s_q = gl.allocate_shared_memory(dtype, [2, HEIGHT, BLOCK_D], shared)
    s_k = gl.allocate_shared_memory(dtype, [STAGES, TOKENS, BLOCK_D], shared)
    s_v = gl.allocate_shared_memory(dtype, [STAGES, TOKENS, BLOCK_D], shared)
    k_filled = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    k_freed = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    v_filled = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    v_freed = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        hopper.mbarrier.init(k_filled.index(i), count=1)
        hopper.mbarrier.init(v_filled.index(i), count=1)
        hopper.mbarrier.init(k_freed.index(i), count=2)
        hopper.mbarrier.init(v_freed.index(i), count=2)
    if PDL:
        wait_for_kernels_before()  # earlier kernels write queries, and new keys and values
    # Heads of a tile run one after the other. Triton 3.6 keeps constants in these tuples only if they are written here.
    gl.warp_specialize([(_attend, (
        p_q, p_out, p_partial_out, p_partial_lse, p_tiles, p_sinks, inner, outer, window, s_q, s_k, s_v,
        k_filled, k_freed, v_filled, v_freed,
        0, NUM_KV_HEADS, GROUP, HEAD_DIM, HAS_WINDOW, HAS_SINKS, HAS_CAP, BOX,
    )), (_attend, (
        p_q, p_out, p_partial_out, p_partial_lse, p_tiles, p_sinks, inner, outer, window, s_q, s_k, s_v,
        k_filled, k_freed, v_filled, v_freed,
        1, NUM_KV_HEADS, GROUP, HEAD_DIM, HAS_WINDOW, HAS_SINKS, HAS_CAP, BOX,
    )), (_copy, (
        k_plane, v_plane, p_pages, p_tiles, table_stride, window, s_k, s_v, k_filled, k_freed, v_filled, v_freed,
        NUM_KV_HEADS, HEAD_DIM, PAGE_TOKENS, HAS_WINDOW,
    ))], [4, COPY_WARPS], [REGISTERS, COPY_REGISTERS])  # fmt: skip
    for i in gl.static_range(STAGES):
        hopper.mbarrier.invalidate(k_filled.index(i))
        hopper.mbarrier.invalidate(v_filled.index(i))
        hopper.mbarrier.invalidate(k_freed.index(i))
        hopper.mbarrier.invalidate(v_freed.index(i))
    if PDL:
        launch_dependents()  # release late: programs of the next kernel would share the multiprocessors unevenly
