"""Latent attention (MLA) to selected tokens (DSA) on Hopper for tiles of at most 32 heads, over any pages, in Gluon.

T rows, N query heads, L latent, R rotated elements, K places of a list, C split-KV partials

latent_low_tiles.py computes a block of tokens; lists, splits and partials are those of latent_attention.py. A list is read
three blocks ahead of the products, pages two and latents one.
"""

from torch import Tensor

from holdfast.kernels.attention.quantized_planes import P_ONE
from holdfast.kernels.attention.split_kv import LOG2_E
from holdfast.kernels.latent.latent_geometry import low_splits, tile_height
from holdfast.kernels.latent.latent_low_tiles import (
    CODED_R8_PAGES,
    PLAIN_PAGES,
    allocate,
    attend_block,
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
from holdfast.kernels.latent.latent_warpgroups import LATENT, ROPE, launch_dependents, wait_for_kernels_before
from holdfast.kernels.latent.sparse_low_warpgroups import attend_turns, takes_turns
from holdfast.kernels.triton_compat import constexpr, gl, gluon_jit, gluon_jit_counting, pdl_launch, supports_pdl

# ruff: noqa: ANN001, ANN202 the arguments of kernels have no types

NUM_WARPS = 8
BLOCK_TOKENS = 16 * NUM_WARPS
TURN_KINDS = {"fp8_ds_mla", "plain"}
"""Kinds of pages for which alternating warpgroups (sparse_low_warpgroups.py) are faster."""


def attend_low_lists(call: LatentCall, rows: SparseRows, tokens_TK: Tensor) -> int:
    """Launch all lists of a step, without the merge; return the number of partials of a row."""
    if call.planes.kind in TURN_KINDS and takes_turns(call, tokens_TK.shape[1]):
        return attend_turns(call, rows, tokens_TK)
    (num_rows, num_heads, _), num_places, pdl = call.q_TNX.shape, tokens_TK.shape[1], supports_pdl(call.q_TNX)
    wanted = low_splits(num_rows, num_heads, num_places, call.num_sms, BLOCK_TOKENS)
    splits = ListSplits.of(call, num_places, BLOCK_TOKENS, wanted)
    _attend_kernel[(num_rows, splits.num_splits)](
        call.q_TNX, *plane_pointers(call.planes), call.out_TNL, *call.partials, call.page_table_NP, *rows, tokens_TK,
        call.page_table_NP.stride(0), tokens_TK.stride(0), num_places, call.scale * LOG2_E, splits.places,
        KIND=plane_kind(call.planes), NUM_HEADS=num_heads, PAGE_TOKENS=call.planes.page_tokens,
        BLOCK_M=tile_height(num_heads, large=False), WARPS=NUM_WARPS, PDL=pdl, num_warps=NUM_WARPS, **pdl_launch(pdl),
    )  # fmt: skip
    return splits.num_splits


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
    b_first = _load_places(p_row_tokens, low + o_n, end)
    b_second = _load_places(p_row_tokens, low + BLOCK_N + o_n, end)
    b_ahead = _load_places(p_row_tokens, low + 2 * BLOCK_N + o_n, end)
    num_tokens = gl.load(p_num_tokens + i_row)
    table_row = gl.load(p_table_rows + i_row)
    if num_tokens <= 0:
        return
    # Before the loads of latents, which would delay them.
    o_m = gl.arange(0, BLOCK_M, gl.SliceLayout(1, query_layout))
    p_q_m = p_q + ((i_row * NUM_HEADS + o_m) * (LATENT + ROPE))[:, None]
    store_queries(p_q_m, (o_m < NUM_HEADS)[:, None], s_q, s_q_rope, query_layout, KIND)
    high = gl.minimum(end, num_tokens)
    p_row_pages = p_pages + table_row.to(gl.int64) * table_stride
    b_token = _seen_tokens(b_first, low + o_n, high, num_tokens)
    b_next_token = _seen_tokens(b_second, low + BLOCK_N + o_n, high, num_tokens)
    b_page = _load_pages(p_row_pages, b_token, PAGE_TOKENS)
    b_next_page = _load_pages(p_row_pages, b_next_token, PAGE_TOKENS)
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
        b_next_page = _load_pages(p_row_pages, b_next_token, PAGE_TOKENS)
        b_ahead = _load_places(p_row_tokens, n + 3 * BLOCK_N + o_n, end)
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
        launch_dependents()  # not sooner: programs of the next kernel would run beside these


@gluon_jit
def _load_places(p_row_tokens, o_place, end):
    """Load these places of a list, as in latent_tiles.py."""
    return gl.load(p_row_tokens + o_place, mask=o_place < end, other=-1)


@gluon_jit
def _seen_tokens(b_place, o_place, high, num_tokens):
    """Positions of the sequence's tokens; -1 for any other number, and past the end of the list."""
    return gl.where((b_place >= 0) & (b_place < num_tokens) & (o_place < high), b_place, -1)


@gluon_jit
def _load_pages(p_row_pages, b_token, PAGE_TOKENS: constexpr):
    """Load the pages of tokens; masked out for -1."""
    return gl.load(p_row_pages + gl.maximum(b_token, 0) // PAGE_TOKENS, mask=b_token >= 0, other=0)


@gluon_jit
def _slots(b_page, b_token, PAGE_TOKENS: constexpr):
    """int64 slots; -1 if there is no token."""
    return gl.where(b_token >= 0, b_page.to(gl.int64) * PAGE_TOKENS + b_token % PAGE_TOKENS, -1)
