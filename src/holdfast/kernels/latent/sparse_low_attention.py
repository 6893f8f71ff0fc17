"""Latent attention (MLA) to selected tokens (DSA) on Hopper for tiles of at most 32 heads, over any pages: two kernels in Gluon.

T rows, N query heads, L latent, R rotated elements, K places of a list, C split-KV partials

Lists, splits and partials are those of latent_attention.py. In both kernels tokens are the rows of products, as in
latent_low_tiles.py.

one tile     latent_low_tiles.py computes a block of tokens. A list is read three blocks ahead of the products, pages two and
             latents one.
turns        At most 16 heads. Eight warps gather rows and decode codes (sparse_gather.py) into a ring of two blocks of 64 tokens.
             Each block of the ring has its own warpgroup, so the blocks of a split alternate between the two, and each writes its
             own partial.
"""

from torch import Tensor

from holdfast.kernels.attention.quantized_planes import LEAST_LOG2, P_ONE
from holdfast.kernels.attention.split_kv import LOG2_E
from holdfast.kernels.attention.warpgroup_tiles import launch_dependents, wait_for_kernels_before
from holdfast.kernels.latent.gathered_attention import gathered_memory
from holdfast.kernels.latent.latent_geometry import low_splits, tile_height
from holdfast.kernels.latent.latent_low_tiles import (
    CODED_R8_PAGES,
    FP8_PAGES,
    PLAIN_PAGES,
    allocate,
    attend_block,
    fast_exp2,
    fast_log2,
    load_rope,
    load_scales,
    load_slabs,
    plane_kind,
    plane_pointers,
    row_pointers,
    store_queries,
    store_tile,
    word_layout,
)
from holdfast.kernels.latent.latent_planes import LatentCall, SparseRows
from holdfast.kernels.latent.latent_tiles import ListSplits
from holdfast.kernels.latent.latent_warpgroups import LATENT, ROPE
from holdfast.kernels.latent.sparse_gather import gather_rows, load_pages, load_places
from holdfast.kernels.operation import pdl_flags
from holdfast.kernels.triton_compat import constexpr, gl, gluon_jit, gluon_jit_counting, hopper, kernel_constant

NUM_WARPS = 8
BLOCK_TOKENS = 16 * NUM_WARPS
TURN_KINDS = {"fp8_ds_mla", "plain"}
"""Kinds of pages for which alternating warpgroups are faster."""
HEADS = 16
TURNS = 2
"""Number of warpgroups, and of blocks of the ring."""
HEIGHT, TOKENS, RING = kernel_constant(HEADS), kernel_constant(64), kernel_constant(TURNS)
GATHER_WARPS = kernel_constant(8)
TURN_REGISTERS, GATHER_REGISTERS = kernel_constant(152), kernel_constant(104)
"""Registers per thread of both kinds of warps: together all of an SM."""


def attend_low_lists(call: LatentCall, rows: SparseRows, tokens_TK: Tensor) -> int:
    """Launch all lists of a step, without the merge; return the number of partials of a row."""
    if call.planes.kind in TURN_KINDS and takes_turns(call, tokens_TK.shape[1]):
        return attend_turns(call, rows, tokens_TK)
    (num_rows, num_heads, _), num_places = call.q_TNX.shape, tokens_TK.shape[1]
    wanted = low_splits(num_rows, num_heads, num_places, call.num_sms, BLOCK_TOKENS)
    splits = ListSplits.of(call, num_places, BLOCK_TOKENS, wanted)
    _attend_kernel[(num_rows, splits.num_splits)](
        call.q_TNX, *plane_pointers(call.planes), call.out_TNL, *call.partials, call.page_table_NP, *rows, tokens_TK,
        call.page_table_NP.stride(0), tokens_TK.stride(0), num_places, call.scale * LOG2_E, splits.places,
        KIND=plane_kind(call.planes), NUM_HEADS=num_heads, PAGE_TOKENS=call.planes.page_tokens,
        BLOCK_M=tile_height(num_heads, large=False), WARPS=NUM_WARPS, num_warps=NUM_WARPS, **pdl_flags(call.q_TNX),
    )  # fmt: skip
    return splits.num_splits


def takes_turns(call: LatentCall, num_places: int) -> bool:
    """Return True if this kernel supports a step of low tiles: few heads, and two partials for every split."""
    num_rows, num_heads, _ = call.q_TNX.shape
    num_splits = low_splits(num_rows, num_heads, num_places, call.num_sms, TURNS * 64)
    return num_heads <= HEADS and TURNS * num_splits * num_rows * num_heads <= call.partial_lse_CH.numel()


def attend_turns(call: LatentCall, rows: SparseRows, tokens_TK: Tensor) -> int:
    """Launch all lists of a step, without the merge; return the number of partials of a row, two for each split."""
    (num_rows, num_heads, _), num_places = call.q_TNX.shape, tokens_TK.shape[1]
    planes, wanted = call.planes, low_splits(num_rows, num_heads, num_places, call.num_sms, TURNS * 64)
    splits = ListSplits.of(call, num_places, TURNS * 64, wanted)
    _turns_kernel[(num_rows, splits.num_splits)](
        call.q_TNX, *gathered_memory(planes), *call.partials, call.page_table_NP, *rows, tokens_TK,
        call.page_table_NP.stride(0), tokens_TK.stride(0), num_places, call.scale * LOG2_E, splits.places,
        KIND=plane_kind(planes), NUM_HEADS=num_heads, PAGE_TOKENS=planes.page_tokens, num_warps=4,
        **pdl_flags(call.q_TNX),
    )  # fmt: skip
    return TURNS * splits.num_splits


@gluon_jit_counting("places")
def _attend_kernel(
    p_q, p_rows, p_rope, p_scales, p_out, p_partial_out, p_partial_lse, p_pages, p_table_rows, p_num_tokens, p_tokens,
    table_stride, tokens_stride, num_places, scale_log2, places,
    KIND: constexpr, NUM_HEADS: constexpr, PAGE_TOKENS: constexpr, BLOCK_M: constexpr, WARPS: constexpr, PDL: constexpr,
):  # fmt: skip
    BLOCK_N: constexpr = 16 * WARPS
    code_layout: constexpr = word_layout(32 if KIND == PLAIN_PAGES else 16, WARPS)
    rope_layout: constexpr = word_layout(16 if KIND == CODED_R8_PAGES else 32, WARPS)
    token_layout: constexpr = gl.SliceLayout(1, code_layout)
    score_layout: constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_M, 16])
    query_layout: constexpr = gl.BlockedLayout([1, 4], [2, 16], [WARPS, 1], [1, 0])
    s_q, s_q_rope, s_vs, s_ps = allocate(p_q.dtype.element_ty, BLOCK_N, BLOCK_M, KIND)
    i_row = gl.program_id(0).to(gl.int64)
    i_split = gl.program_id(1)
    if PDL:
        wait_for_kernels_before()  # earlier kernels write lists and queries
    # Places are loaded before the length of the row is known, and masked after.
    o_n = gl.arange(0, BLOCK_N, token_layout)
    low = i_split * places
    end = gl.minimum(low + places, num_places)
    p_row_tokens = p_tokens + i_row * tokens_stride
    b_first = load_places(p_row_tokens, low + o_n, end, False)
    b_second = load_places(p_row_tokens, low + BLOCK_N + o_n, end, False)
    b_ahead = load_places(p_row_tokens, low + 2 * BLOCK_N + o_n, end, False)
    num_tokens = gl.load(p_num_tokens + i_row)
    table_row = gl.load(p_table_rows + i_row)
    if num_tokens <= 0:
        return
    # Load these before latents, which would delay them.
    o_m = gl.arange(0, BLOCK_M, gl.SliceLayout(1, query_layout))
    p_q_m = p_q + ((i_row * NUM_HEADS + o_m) * (LATENT + ROPE))[:, None]
    store_queries(p_q_m, (o_m < NUM_HEADS)[:, None], s_q, s_q_rope, query_layout, KIND)
    high = gl.minimum(end, num_tokens)
    p_row_pages = p_pages + table_row.to(gl.int64) * table_stride
    b_token = _seen_tokens(b_first, low + o_n, high, num_tokens)
    b_next_token = _seen_tokens(b_second, low + BLOCK_N + o_n, high, num_tokens)
    b_page = load_pages(p_row_pages, b_token, PAGE_TOKENS)
    b_next_page = load_pages(p_row_pages, b_next_token, PAGE_TOKENS)
    o_slot = _slots(b_page, b_token, PAGE_TOKENS)
    p_row, p_row_rope, p_row_scales = row_pointers(
        p_rows, p_rope, p_scales, gl.maximum(o_slot, 0), code_layout, rope_layout, KIND
    )
    b_slabs = load_slabs(p_row, o_slot >= 0, KIND)
    b_rope = load_rope(p_row_rope, o_slot >= 0)
    b_scales = load_scales(p_row_scales, o_slot >= 0, KIND)
    b_m = gl.full([BLOCK_M], -float("inf"), gl.float32, gl.SliceLayout(0, score_layout))
    b_l = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, score_layout)
    b_zero = gl.zeros([128, BLOCK_M], gl.float32, score_layout)
    b_accs = (b_zero, b_zero, b_zero, b_zero)
    for n in range(low, high, BLOCK_N):
        m_seen = gl.convert_layout(o_slot, gl.SliceLayout(1, score_layout), assert_trivial=True) >= 0
        o_slot = _slots(b_next_page, b_next_token, PAGE_TOKENS)
        p_row, p_row_rope, p_row_scales = row_pointers(
            p_rows, p_rope, p_scales, gl.maximum(o_slot, 0), code_layout, rope_layout, KIND
        )
        b_next_token = _seen_tokens(b_ahead, n + 2 * BLOCK_N + o_n, high, num_tokens)
        b_next_page = load_pages(p_row_pages, b_next_token, PAGE_TOKENS)
        b_ahead = load_places(p_row_tokens, n + 3 * BLOCK_N + o_n, end, False)
        b_slabs, b_rope, b_scales, b_m, b_l, b_accs = attend_block(
            b_slabs, b_rope, b_scales, p_row, p_row_rope, p_row_scales, o_slot >= 0, m_seen[:, None], b_m, b_l, b_accs,
            s_q, s_q_rope, s_vs, s_ps, scale_log2, score_layout, KIND,
        )  # fmt: skip
    # A split without tokens is neutral: zeros, with -inf as lse.
    b_sum = gl.sum(b_l, axis=0)
    b_whole = b_sum if KIND == PLAIN_PAGES else b_sum * P_ONE
    b_share = 1.0 / gl.where(b_sum > 0, b_whole, 1.0)
    o_head = gl.arange(0, BLOCK_M, gl.SliceLayout(0, score_layout))
    m_head = o_head < NUM_HEADS
    num_splits = gl.num_programs(1)
    if num_splits == 1:
        store_tile(b_accs, b_share, p_out + (i_row * NUM_HEADS + o_head) * LATENT, m_head, score_layout, KIND)
    else:
        o_partial = (i_row * num_splits + i_split) * NUM_HEADS + o_head
        store_tile(b_accs, b_share, p_partial_out + o_partial * LATENT, m_head, score_layout, KIND)
        gl.store(p_partial_lse + o_partial, b_m + gl.log2(b_sum), mask=m_head)
    if PDL:
        launch_dependents()  # release late: programs of the next kernel would run beside these


@gluon_jit
def _seen_tokens(b_place, o_place, high, num_tokens):
    """Return places that are tokens of the sequence; -1 for any other number and past the end of the list."""
    return gl.where((b_place >= 0) & (b_place < num_tokens) & (o_place < high), b_place, -1)


@gluon_jit
def _slots(b_page, b_token, PAGE_TOKENS: constexpr):
    """Return int64 slots; -1 without a token."""
    return gl.where(b_token >= 0, b_page.to(gl.int64) * PAGE_TOKENS + b_token % PAGE_TOKENS, -1)


@gluon_jit
def _load_queries(p_q, s_q, o_first, num_heads, layout: constexpr):
    """Store some columns of a tile's queries in shared memory: zeros without a head, clamped to half precision."""
    o_m = gl.arange(0, HEIGHT, gl.SliceLayout(1, layout))
    o_x = gl.arange(0, s_q.shape[1], gl.SliceLayout(0, layout))
    o_q = (o_first + o_m) * (LATENT + ROPE)
    b_q = gl.load(p_q + o_q[:, None] + o_x[None, :], mask=(o_m < num_heads)[:, None], other=0.0)
    if s_q.dtype != b_q.dtype:
        b_q = gl.minimum(gl.maximum(b_q.to(gl.float32), -65504.0), 65504.0).to(s_q.dtype)
    s_q.store(b_q)


@gluon_jit
def _take_turns(
    p_q, p_partial_out, p_partial_lse, o_first, o_partial, num_heads, num_loops, scale_log2, s_q, s_q_rope, s_latents,
    s_ropes, s_factors, s_p, filled, freed,
    TURN: constexpr, KIND: constexpr,
):  # fmt: skip
    """Attend every second block of a split and write its partial: the work of one warpgroup."""
    score_layout: constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEIGHT, 16])
    row_layout: constexpr = gl.SliceLayout(1, score_layout)
    wide_layout: constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    narrow_layout: constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    _load_queries(p_q, s_q, o_first, num_heads, wide_layout)
    _load_queries(p_q + LATENT, s_q_rope, o_first, num_heads, narrow_layout)
    hopper.fence_async_shared()
    b_acc = gl.zeros([LATENT, HEIGHT], gl.float32, score_layout)
    b_m = gl.full([HEIGHT], -float("inf"), gl.float32, gl.SliceLayout(0, score_layout))
    b_l = gl.zeros([TOKENS, HEIGHT], gl.float32, score_layout)
    s_k = s_latents.index(TURN)
    s_k_rope = s_ropes.index(TURN)
    for i_loop in range(TURN, num_loops, RING):
        hopper.mbarrier.wait(filled.index(TURN), i_loop // RING & 1)
        b_zero = gl.zeros([TOKENS, HEIGHT], gl.float32, score_layout)
        b_factor = s_factors.index(TURN).load(row_layout)
        score = hopper.warpgroup_mma(s_k, s_q.permute((1, 0)), b_zero, use_acc=False, is_async=True)
        if KIND == PLAIN_PAGES:
            score = hopper.warpgroup_mma(s_k_rope, s_q_rope.permute((1, 0)), score, is_async=True)
            b_score = hopper.warpgroup_mma_wait(0, deps=[score]) * scale_log2
            b_bound = gl.zeros([TOKENS], gl.float32, row_layout)
        else:
            rope = hopper.warpgroup_mma(s_k_rope, s_q_rope.permute((1, 0)), b_zero, use_acc=False, is_async=True)
            b_score, b_rope = hopper.warpgroup_mma_wait(0, deps=[score, rope])
            b_score = b_score * (b_factor * scale_log2)[:, None] + b_rope * scale_log2
            b_bound = gl.maximum(fast_log2(gl.maximum(b_factor, 0.0)), LEAST_LOG2)
        b_score = gl.where((b_factor >= 0)[:, None], b_score, -float("inf"))
        b_m_new = gl.maximum(b_m, gl.max(b_score + b_bound[:, None], axis=0))
        b_m_safe = gl.where(b_m_new == -float("inf"), 0.0, b_m_new)
        b_p = fast_exp2(b_score - b_m_safe[None, :])
        b_alpha = fast_exp2(b_m - b_m_safe)
        b_l = b_l * b_alpha[None, :] + b_p
        b_m = b_m_new
        if KIND == PLAIN_PAGES:
            s_p.permute((1, 0)).store(b_p.to(s_p.dtype))
        else:
            b_weight = b_p * (gl.maximum(b_factor, 0.0) * P_ONE)[:, None]
            s_p.permute((1, 0)).store(b_weight.to(gl.float16))
        hopper.fence_async_shared()
        acc = hopper.warpgroup_mma(s_k.permute((1, 0)), s_p.permute((1, 0)), b_acc * b_alpha[None, :], is_async=True)
        b_acc = hopper.warpgroup_mma_wait(0, deps=[acc])
        hopper.mbarrier.arrive(freed.index(TURN), count=1)
    # A partial without tokens is neutral: zeros, with -inf as lse.
    b_sum = gl.sum(b_l, axis=0)
    b_whole = b_sum if KIND == PLAIN_PAGES else b_sum * P_ONE
    b_share = 1.0 / gl.where(b_sum > 0, b_whole, 1.0)
    o_m = gl.arange(0, HEIGHT, gl.SliceLayout(0, score_layout))
    o_l = gl.arange(0, LATENT, row_layout)
    m_m = o_m < num_heads
    p_m = p_partial_out + (o_partial + o_m) * LATENT
    gl.store(p_m[None, :] + o_l[:, None], b_acc * b_share[None, :], mask=m_m[None, :])
    gl.store(p_partial_lse + o_partial + o_m, b_m + gl.log2(b_sum), mask=m_m)


@gluon_jit
def _gather(
    p_codes, p_scales, p_rope, p_row_tokens, p_row_pages, low, high, num_tokens, s_latents, s_ropes, s_factors, filled,
    freed, PAGE_TOKENS: constexpr, KIND: constexpr,
):  # fmt: skip
    gather_rows(
        p_codes, p_scales, p_rope, p_row_tokens, p_row_pages, low, high, num_tokens, s_latents, s_ropes, s_factors, filled,
        freed, 0, KIND == PLAIN_PAGES, KIND == FP8_PAGES, KIND == CODED_R8_PAGES, False, PAGE_TOKENS,
    )  # fmt: skip


@gluon_jit_counting("places")
def _turns_kernel(
    p_q, p_codes, p_scales, p_rope, p_partial_out, p_partial_lse, p_pages, p_table_rows, p_num_tokens, p_tokens,
    table_stride, tokens_stride, num_places, scale_log2, places,
    KIND: constexpr, NUM_HEADS: constexpr, PAGE_TOKENS: constexpr, PDL: constexpr,
):  # fmt: skip
    q_dtype: constexpr = p_q.dtype.element_ty
    dtype: constexpr = q_dtype if KIND == PLAIN_PAGES else gl.float16
    rope_dtype: constexpr = gl.float16 if KIND == CODED_R8_PAGES else q_dtype
    shared: constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    flat: constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    s_latents = gl.allocate_shared_memory(dtype, [RING, TOKENS, LATENT], shared)
    s_ropes = gl.allocate_shared_memory(rope_dtype, [RING, TOKENS, ROPE], shared)
    s_factors = gl.allocate_shared_memory(gl.float32, [RING, TOKENS], flat)
    # Each warpgroup has its own queries, so neither waits for the other.
    s_q_0 = gl.allocate_shared_memory(dtype, [HEIGHT, LATENT], shared)
    s_q_1 = gl.allocate_shared_memory(dtype, [HEIGHT, LATENT], shared)
    s_q_rope_0 = gl.allocate_shared_memory(rope_dtype, [HEIGHT, ROPE], shared)
    s_q_rope_1 = gl.allocate_shared_memory(rope_dtype, [HEIGHT, ROPE], shared)
    s_p_0 = gl.allocate_shared_memory(dtype, [HEIGHT, TOKENS], shared)
    s_p_1 = gl.allocate_shared_memory(dtype, [HEIGHT, TOKENS], shared)
    filled = gl.allocate_shared_memory(gl.int64, [RING, 1], hopper.mbarrier.MBarrierLayout())
    freed = gl.allocate_shared_memory(gl.int64, [RING, 1], hopper.mbarrier.MBarrierLayout())
    for i in gl.static_range(RING):
        hopper.mbarrier.init(filled.index(i), count=1)
        hopper.mbarrier.init(freed.index(i), count=1)
    i_row = gl.program_id(0).to(gl.int64)
    i_split = gl.program_id(1)
    if PDL:
        wait_for_kernels_before()  # earlier kernels write lists and queries
    num_tokens = gl.load(p_num_tokens + i_row)
    table_row = gl.load(p_table_rows + i_row)
    low = i_split * places
    high = gl.minimum(low + places, gl.minimum(num_tokens, num_places))
    num_loops = gl.maximum(high - low + TOKENS - 1, 0) // TOKENS
    p_row_tokens = p_tokens + i_row * tokens_stride
    p_row_pages = p_pages + table_row.to(gl.int64) * table_stride
    # Rows that select no tokens have no heads: nothing is written for them.
    num_heads = gl.where(num_tokens > 0, NUM_HEADS, 0)
    o_first = i_row * NUM_HEADS
    o_partial = (i_row * gl.num_programs(1) + i_split) * (RING * NUM_HEADS)
    # Triton 3.6 keeps constants in these tuples only if they are written inside the call.
    gl.warp_specialize([(_take_turns, (
        p_q, p_partial_out, p_partial_lse, o_first, o_partial, num_heads, num_loops, scale_log2, s_q_0, s_q_rope_0,
        s_latents, s_ropes, s_factors, s_p_0, filled, freed, 0, KIND,
    )), (_take_turns, (
        p_q, p_partial_out, p_partial_lse, o_first, o_partial + NUM_HEADS, num_heads, num_loops, scale_log2, s_q_1,
        s_q_rope_1, s_latents, s_ropes, s_factors, s_p_1, filled, freed, 1, KIND,
    )), (_gather, (
        p_codes, p_scales, p_rope, p_row_tokens, p_row_pages, low, high, num_tokens, s_latents, s_ropes, s_factors, filled,
        freed, PAGE_TOKENS, KIND,
    ))], [4, GATHER_WARPS], [TURN_REGISTERS, GATHER_REGISTERS])  # fmt: skip
    for i in gl.static_range(RING):
        hopper.mbarrier.invalidate(filled.index(i))
        hopper.mbarrier.invalidate(freed.index(i))
    if PDL:
        launch_dependents()  # release late: programs of the next kernel would run beside these
