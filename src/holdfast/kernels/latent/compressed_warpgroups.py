"""Compressed attention (DeepSeek-V4) on Hopper for tiles of up to 64 heads: warps gather, two warpgroups multiply (wgmma), in Gluon.

T rows, N query heads, D head dim, C split-KV partials; M heads of a tile, N tokens of a block

A program has one row, one block of heads and one split of the row's places. Four of its warps gather rows and decode codes,
at most two blocks of 64 tokens ahead. Two warpgroups multiply as in gathered_attention.py: each has half of the tokens of a
block for scores, and half of the columns for outputs. A block is key and value in one.

Places of a row are its entries, then its window (compressed_scopes.py). The name of a place is one number: e for entry
e, -2 - t for token t of the window, -1 for nothing. A step is the places that the gathering warps take at once. Names
are loaded some steps ahead, pages one step later, and rows before their use, so no load waits for another.

    plain        copied by cp.async, unchanged
    fp8_ds_v4    codes times the power of two of their tile, in half precision: exact within the range of half precision

Unlike rows of fp8_ds_mla these need no factor in scores: a normed vector is well within half precision. A mask says which rows
hold a token; others are zeros. Blocks form a ring in shared memory, as in sparse_gather.py.
"""

import torch
from torch import Tensor

from holdfast.kernels.attention.dequantize import EXP2_ASM
from holdfast.kernels.attention.split_kv import PER_NAT
from holdfast.kernels.attention.warpgroup_tiles import launch_dependents, wait_for_kernels_before
from holdfast.kernels.latent.compressed_scopes import CompressedCall
from holdfast.kernels.latent.gathered_attention import GATHER_WARPS, RING, token_sums
from holdfast.kernels.latent.latent_planes import LatentPlanes
from holdfast.kernels.latent.latent_warpgroups import HEIGHT, TOKENS
from holdfast.kernels.latent.sparse_gather import (
    CUT_ASM,
    HALF_ASM,
    PANEL,
    PANEL_WORDS,
    scaled_fp8,
    twice,
)
from holdfast.kernels.operation import pdl_flags
from holdfast.kernels.triton_compat import constexpr, gl, gluon_jit, gluon_jit_counting, hopper, kernel_constant

# Triton cannot unpack into a tuple, but adds tuples.
# pyright: reportGeneralTypeIssues=false

NOPE_DIM, ROPE_DIM = 448, 64
GATHER_REGISTERS = kernel_constant(104)
"""Registers per gathering thread; 200 are left per thread of the warpgroups."""
CODE_WORDS = kernel_constant(16)
"""Words of a tile's codes."""
NUM_TILES = kernel_constant(7)
ROW_WORDS = kernel_constant(144)
"""Words of a row: codes, then rotated elements."""
SCALE_WORDS = kernel_constant(2)
MOST_SCALE = kernel_constant(128.0)
"""Largest scale whose product with any code fits half precision."""
EXPONENT = kernel_constant(0x7F800000)
HEAD_DIM, NOPE, ROPE = kernel_constant(NOPE_DIM + ROPE_DIM), kernel_constant(NOPE_DIM), kernel_constant(ROPE_DIM)


def takes_warpgroups(call: CompressedCall) -> bool:
    """Return True if this kernel supports these queries: Hopper, half precision, the sizes of released models."""
    q_TND, window = call.q_TND, call.scopes.window
    return (
        gl is not None
        and q_TND.dtype in (torch.bfloat16, torch.float16)
        and q_TND.is_cuda
        and torch.cuda.get_device_capability(q_TND.device)[0] == 9
        and all(_takes_planes(planes, window.kind, q_TND.dtype) for planes in (window, call.entries))
    )


def _takes_planes(planes: LatentPlanes, kind: str, dtype: torch.dtype) -> bool:
    return (
        planes.kind == kind != "turboquant"
        and (planes.latent_dim, planes.rope_dim) == (NOPE_DIM, ROPE_DIM)
        and (planes.kind != "plain" or planes.rows_SX.dtype == dtype)
    )


def attend_warpgroups(call: CompressedCall, num_splits: int) -> None:
    """Launch all tiles of a step without the merge. Partials are float16: float32 would take a third of the time."""
    assert call.partial_out_CX.dtype == torch.float16, f"partials are float16, not {call.partial_out_CX.dtype}"
    constants = call.constants()
    _attend_kernel[(len(call.q_TND) * constants["NUM_BLOCKS"], num_splits)](
        call.q_TND, *_words_of(call.scopes.window), *_words_of(call.entries), *call.arguments(), **constants,
        PLAIN_ROWS=call.scopes.window.kind == "plain", num_warps=8, **pdl_flags(call.q_TND),
    )  # fmt: skip


def _words_of(planes: LatentPlanes) -> tuple[Tensor, Tensor]:
    """Return rows and scales, as 32-bit words if they are codes."""
    if planes.kind == "plain":
        return planes.rows_SX, planes.rows_SX
    assert planes.scales_SC is not None, "fp8_ds_v4 has a plane of exponents"
    return planes.rows_SX.view(torch.int32), planes.scales_SC.view(torch.int32)


@gluon_jit
def _row_of(position, num_listed, WINDOW: constexpr, RATIO: constexpr, LISTED: constexpr):
    """`row_places` of compressed_scopes.py, with the places of entries and those of this split."""
    num_window = gl.maximum(gl.minimum(position + 1, WINDOW), 0)
    num_entries = num_window * 0
    num_taken = num_entries
    if RATIO > 0:
        num_entries = gl.maximum(position + 1, 0) // RATIO
        num_taken = num_entries
        if LISTED:
            num_taken = gl.minimum(num_entries, num_listed)
    num_places = num_window + num_taken
    num_splits = gl.num_programs(1)
    size = ((num_places + num_splits - 1) // num_splits + TOKENS - 1) // TOKENS * TOKENS
    low = gl.program_id(1) * size
    return num_window, num_entries, num_taken, low, gl.minimum(low + size, num_places)


@gluon_jit
def _find_names(
    p_listed, o_place, high, num_taken, first, num_entries, num_listed, is_listed, RATIO: constexpr, LISTED: constexpr
):
    """Return names of these places; -1 past the end, or if the list names no entry of the row."""
    b_name = gl.where((o_place >= num_taken) & (o_place < high), num_taken - 2 - first - o_place, -1)
    if RATIO > 0:
        b_entry = o_place
        if LISTED:
            # Load even without a list: the load does not wait for the row's length.
            b_listed = gl.load(p_listed + o_place, mask=o_place < num_listed, other=-1)
            b_entry = gl.where(is_listed, b_listed, b_entry)
        m_entry = (o_place < gl.minimum(num_taken, high)) & (b_entry >= 0) & (b_entry < num_entries)
        b_name = gl.where(m_entry, b_entry, b_name)
    return b_name


@gluon_jit
def _index_of(b_name):
    """Return the index of a token or entry in its scope."""
    return gl.where(b_name < 0, gl.maximum(-2 - b_name, 0), b_name)


@gluon_jit
def _load_pages(p_window_row, p_entries_row, b_name, RATIO: constexpr, WINDOW_PAGE: constexpr, ENTRIES_PAGE: constexpr):
    """Load the pages of names; masked out for -1."""
    b_index = _index_of(b_name)
    p_page = p_window_row + b_index // WINDOW_PAGE
    if RATIO > 0:
        p_page = gl.where(b_name < 0, p_page, p_entries_row + b_index // ENTRIES_PAGE)
    return gl.load(p_page, mask=b_name != -1, other=0)


@gluon_jit
def _find_rows(
    p_window, p_entries, b_page, b_name, width,
    RATIO: constexpr, WINDOW_PAGE: constexpr, ENTRIES_PAGE: constexpr,
):  # fmt: skip
    """Return pointers to rows of `width` words; to the first row for -1."""
    b_index = _index_of(b_name)
    o_page = gl.maximum(b_page, 0).to(gl.int64)
    p_row = p_window + (o_page * WINDOW_PAGE + b_index % WINDOW_PAGE) * width
    if RATIO > 0:
        p_row = gl.where(b_name < 0, p_row, p_entries + (o_page * ENTRIES_PAGE + b_index % ENTRIES_PAGE) * width)
    return p_row


@gluon_jit
def _gather_plain(
    p_window, p_entries, p_window_row, p_entries_row, p_listed, low, high, num_taken, first, num_entries, num_listed,
    is_listed, s_rows, s_seen, filled, freed,
    RATIO: constexpr, LISTED: constexpr, WINDOW_PAGE: constexpr, ENTRIES_PAGE: constexpr,
):  # fmt: skip
    """Gather plain rows of places `low` to `high`."""
    RING: constexpr = s_rows.shape[0]
    TOKENS: constexpr = s_rows.shape[1]
    # Eight threads per 128 bytes of a row: a line of global memory, and all banks of shared memory.
    layout: constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    o_n = low + gl.arange(0, TOKENS, gl.SliceLayout(1, layout))
    o_c = gl.arange(0, PANEL, gl.SliceLayout(0, layout))
    b_name = _find_names(p_listed, o_n, high, num_taken, first, num_entries, num_listed, is_listed, RATIO, LISTED)
    b_next = _find_names(
        p_listed, o_n + TOKENS, high, num_taken, first, num_entries, num_listed, is_listed, RATIO, LISTED
    )
    b_page = _load_pages(p_window_row, p_entries_row, b_name, RATIO, WINDOW_PAGE, ENTRIES_PAGE)
    for i_loop in range((high - low + TOKENS - 1) // TOKENS):
        i_ring = i_loop % RING
        p_row = _find_rows(p_window, p_entries, b_page, b_name, HEAD_DIM, RATIO, WINDOW_PAGE, ENTRIES_PAGE)
        m_n = b_name != -1
        b_page = _load_pages(p_window_row, p_entries_row, b_next, RATIO, WINDOW_PAGE, ENTRIES_PAGE)
        b_name = b_next
        o_ahead = o_n + (i_loop + 2) * TOKENS
        b_next = _find_names(
            p_listed, o_ahead, high, num_taken, first, num_entries, num_listed, is_listed, RATIO, LISTED
        )
        hopper.mbarrier.wait(freed.index(i_ring), (i_loop // RING & 1) ^ 1)
        s_block = s_rows.index(i_ring)
        p_n = p_row[:, None] + o_c[None, :]
        for i_panel in gl.static_range(HEAD_DIM // PANEL):
            s_panel = s_block.slice(i_panel * PANEL, PANEL, dim=1)
            hopper.async_copy.async_copy_global_to_shared(s_panel, p_n + i_panel * PANEL, mask=m_n[:, None])
        hopper.async_copy.commit_group()
        s_seen.index(i_ring).store(gl.where(m_n, 1.0, 0.0))
        hopper.async_copy.wait_group(0)
        hopper.fence_async_shared()
        hopper.mbarrier.arrive(filled.index(i_ring), count=1)


@gluon_jit
def _load_words(p_row, m_n, FIRST: constexpr, WORDS: constexpr, layout: constexpr):
    """Load [N, words]: rows from word FIRST on."""
    o_c = FIRST + gl.arange(0, WORDS, gl.SliceLayout(0, layout))
    return gl.load(p_row[:, None] + o_c[None, :], mask=m_n[:, None], other=0)


@gluon_jit
def _tile_scale(b_word, i_tile: constexpr):
    """Return the scale of a tile, twice in half precision, from the word with its exponent."""
    PLACE: constexpr = i_tile % 4
    b_bits = b_word >> 1 if PLACE == 3 else b_word << (23 - 8 * PLACE)
    b_scale = gl.minimum((b_bits & EXPONENT).to(gl.float32, bitcast=True), MOST_SCALE)
    return twice(b_scale)


@gluon_jit
def _gather_codes(
    p_window, p_window_scales, p_entries, p_entries_scales, p_window_row, p_entries_row, p_listed, low, high, num_taken,
    first, num_entries, num_listed, is_listed, s_rows, s_seen, filled, freed,
    RATIO: constexpr, LISTED: constexpr, WINDOW_PAGE: constexpr, ENTRIES_PAGE: constexpr,
):  # fmt: skip
    """Like `gather_plain` for rows of fp8_ds_v4, as words of 4 bytes: narrower numbers would take a register each.

    A panel of the next step is loaded into the registers of this step's, once that is decoded.
    """
    RING: constexpr = s_rows.shape[0]
    TOKENS: constexpr = s_rows.shape[1]
    STEP: constexpr = 8 * gl.num_warps()
    # 16 bytes of codes per thread. Stores of 8 threads, 16 bytes each of two rows, hit different banks.
    layout: constexpr = gl.BlockedLayout([1, 4], [8, 4], [gl.num_warps(), 1], [1, 0])
    words: constexpr = gl.NVMMASharedLayout(128, 32, rank=2)
    s_rows = s_rows._reinterpret(gl.int32, [RING, TOKENS, HEAD_DIM // 2], words)
    o_n = low + gl.arange(0, STEP, gl.SliceLayout(1, layout))
    b_name = _find_names(p_listed, o_n, high, num_taken, first, num_entries, num_listed, is_listed, RATIO, LISTED)
    b_page = _load_pages(p_window_row, p_entries_row, b_name, RATIO, WINDOW_PAGE, ENTRIES_PAGE)
    p_row = _find_rows(p_window, p_entries, b_page, b_name, ROW_WORDS, RATIO, WINDOW_PAGE, ENTRIES_PAGE)
    p_scale = _find_rows(
        p_window_scales, p_entries_scales, b_page, b_name, SCALE_WORDS, RATIO, WINDOW_PAGE, ENTRIES_PAGE
    )
    m_n = b_name != -1
    b_codes = ()
    for i_tile in gl.static_range(NUM_TILES):
        b_codes = b_codes + (_load_words(p_row, m_n, i_tile * CODE_WORDS, CODE_WORDS, layout),)
    b_scales = (gl.load(p_scale, mask=m_n, other=0), gl.load(p_scale + 1, mask=m_n, other=0))
    b_rope = _load_words(p_row, m_n, NUM_TILES * CODE_WORDS, PANEL_WORDS, layout)
    b_seen = gl.where(m_n, 1.0, 0.0)
    b_name = _find_names(
        p_listed, o_n + STEP, high, num_taken, first, num_entries, num_listed, is_listed, RATIO, LISTED
    )
    b_next = _find_names(
        p_listed, o_n + 2 * STEP, high, num_taken, first, num_entries, num_listed, is_listed, RATIO, LISTED
    )
    b_page = _load_pages(p_window_row, p_entries_row, b_name, RATIO, WINDOW_PAGE, ENTRIES_PAGE)
    for i_loop in range((high - low + TOKENS - 1) // TOKENS):
        i_ring = i_loop % RING
        hopper.mbarrier.wait(freed.index(i_ring), (i_loop // RING & 1) ^ 1)
        for i_step in gl.static_range(TOKENS // STEP):
            s_step = s_rows.index(i_ring).slice(i_step * STEP, STEP, dim=0)
            s_seen.index(i_ring).slice(i_step * STEP, STEP, dim=0).store(b_seen)
            m_n = b_name != -1
            p_row = _find_rows(p_window, p_entries, b_page, b_name, ROW_WORDS, RATIO, WINDOW_PAGE, ENTRIES_PAGE)
            p_scale = _find_rows(
                p_window_scales, p_entries_scales, b_page, b_name, SCALE_WORDS, RATIO, WINDOW_PAGE, ENTRIES_PAGE
            )
            b_page = _load_pages(p_window_row, p_entries_row, b_next, RATIO, WINDOW_PAGE, ENTRIES_PAGE)
            b_name = b_next
            o_ahead = o_n + i_loop * TOKENS + (i_step + 3) * STEP
            b_next = _find_names(
                p_listed, o_ahead, high, num_taken, first, num_entries, num_listed, is_listed, RATIO, LISTED
            )
            b_new = ()
            for i_tile in gl.static_range(NUM_TILES):
                b_numbers = scaled_fp8(b_codes[i_tile], _tile_scale(b_scales[i_tile // 4], i_tile))
                s_step.slice(i_tile * PANEL_WORDS, PANEL_WORDS, dim=1).store(b_numbers)
                b_new = b_new + (_load_words(p_row, m_n, i_tile * CODE_WORDS, CODE_WORDS, layout),)
            b_codes = b_new
            b_half = gl.inline_asm_elementwise(HALF_ASM, "=r,r", [b_rope], gl.int32, True, 1)
            b_half = gl.inline_asm_elementwise(CUT_ASM, "=r,r", [b_half], gl.int32, True, 1)
            s_step.slice(NUM_TILES * PANEL_WORDS, PANEL_WORDS, dim=1).store(b_half)
            b_rope = _load_words(p_row, m_n, NUM_TILES * CODE_WORDS, PANEL_WORDS, layout)
            b_scales = (gl.load(p_scale, mask=m_n, other=0), gl.load(p_scale + 1, mask=m_n, other=0))
            b_seen = gl.where(m_n, 1.0, 0.0)
        hopper.fence_async_shared()
        hopper.mbarrier.arrive(filled.index(i_ring), count=1)


@gluon_jit
def _gather(
    p_window, p_window_scales, p_entries, p_entries_scales, p_window_row, p_entries_row, p_listed, low, high, num_taken,
    first, num_entries, num_listed, s_rows, s_seen, filled, freed,
    PLAIN_ROWS: constexpr, RATIO: constexpr, LISTED: constexpr, WINDOW_PAGE: constexpr, ENTRIES_PAGE: constexpr,
):  # fmt: skip
    is_listed = num_entries > num_listed
    if PLAIN_ROWS:
        _gather_plain(
            p_window, p_entries, p_window_row, p_entries_row, p_listed, low, high, num_taken, first, num_entries,
            num_listed, is_listed, s_rows, s_seen, filled, freed, RATIO, LISTED, WINDOW_PAGE, ENTRIES_PAGE,
        )  # fmt: skip
    else:
        _gather_codes(
            p_window, p_window_scales, p_entries, p_entries_scales, p_window_row, p_entries_row, p_listed, low, high,
            num_taken, first, num_entries, num_listed, is_listed, s_rows, s_seen, filled, freed, RATIO, LISTED,
            WINDOW_PAGE, ENTRIES_PAGE,
        )  # fmt: skip


@gluon_jit
def _load_turns(p_cos, p_sin, s_turns, is_used):
    """Store cos and sin of a row for every pair of a head in shared memory; 1 and 0 for pairs without rotation."""
    layout: constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    o_pair = gl.arange(0, HEAD_DIM // 2, layout) - NOPE // 2
    m_pair = (o_pair >= 0) & is_used
    s_turns.index(0).store(gl.load(p_cos + o_pair, mask=m_pair, other=1.0).to(gl.float32))
    s_turns.index(1).store(gl.load(p_sin + o_pair, mask=m_pair, other=0.0).to(gl.float32))


@gluon_jit
def _rotate_back(b_x, s_turns):
    """Rotate the last elements of heads back, by pairs of neighbours; a thread has both of a pair."""
    b_even, b_odd = gl.split(b_x.reshape([HEIGHT, HEAD_DIM // 2, 2]))
    layout: constexpr = gl.SliceLayout(0, b_even.type.layout)
    b_cos = s_turns.index(0).load(layout)[None, :]
    b_sin = s_turns.index(1).load(layout)[None, :]
    b_pairs = gl.join(b_even * b_cos + b_odd * b_sin, b_odd * b_cos - b_even * b_sin)
    return gl.convert_layout(b_pairs.reshape([HEIGHT, HEAD_DIM]), b_x.type.layout)


@gluon_jit
def _store_rows(b_rows, s_q, p_rows, num_rows):
    """Store contiguous rows through the buffer of the queries, so threads write whole lines."""
    layout: constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    s_rows = s_q._reinterpret(b_rows.dtype, [HEIGHT, HEAD_DIM], gl.NVMMASharedLayout(128, 16, rank=2))
    s_rows.store(b_rows)
    o_m = gl.arange(0, HEIGHT, gl.SliceLayout(1, layout))
    o_d = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, layout))
    p_row = p_rows + (o_m * HEAD_DIM)[:, None] + o_d[None, :]
    gl.store(p_row, s_rows.load(layout), mask=(o_m < num_rows)[:, None])


@gluon_jit
def _attend(
    p_q, p_sinks, p_cos, p_sin, p_out, p_partial_out, p_partial_lse, i_row, low, high, scale_log2, s_q, s_rows, s_seen,
    s_p, s_turns, filled, freed,
    NUM_HEADS: constexpr, NUM_BLOCKS: constexpr, GROUP: constexpr,
):  # fmt: skip
    # Four warps per 64 rows: a warpgroup has half of the tokens of scores, and half of the columns of outputs.
    score_layout: constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, TOKENS // 2, 16])
    out_layout: constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, HEAD_DIM // 2, 16])
    wide_layout: constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    row_layout: constexpr = gl.SliceLayout(1, score_layout)
    num_splits = gl.num_programs(1)
    is_used = low < high
    first_head = gl.program_id(0) % NUM_BLOCKS * GROUP
    o_m = gl.arange(0, HEIGHT, gl.SliceLayout(1, wide_layout))
    o_d = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, wide_layout))
    m_m = (o_m < GROUP) & (first_head + o_m < NUM_HEADS) & is_used
    o_q = (i_row * NUM_HEADS + first_head + o_m) * HEAD_DIM
    b_q = gl.load(p_q + o_q[:, None] + o_d[None, :], mask=m_m[:, None], other=0.0)
    if s_q.dtype != b_q.dtype:
        b_q = gl.minimum(gl.maximum(b_q.to(gl.float32), -65504.0), 65504.0).to(s_q.dtype)
    s_q.store(b_q)
    _load_turns(p_cos, p_sin, s_turns, is_used)
    hopper.fence_async_shared()
    b_acc = gl.zeros([HEIGHT, HEAD_DIM], gl.float32, out_layout)
    b_m = gl.full([HEIGHT], -float("inf"), gl.float32, row_layout)
    b_l = token_sums(gl.zeros([HEIGHT, TOKENS], gl.float32, score_layout))
    sum_layout: constexpr = gl.SliceLayout(1, gl.SliceLayout(2, b_l.type.layout))
    for i_loop in range((high - low + TOKENS - 1) // TOKENS):
        i_ring = i_loop % RING
        s_k = s_rows.index(i_ring)
        hopper.mbarrier.wait(filled.index(i_ring), i_loop // RING & 1)
        b_score = gl.zeros([HEIGHT, TOKENS], gl.float32, score_layout)
        score = hopper.warpgroup_mma(s_q, s_k.permute((1, 0)), b_score, use_acc=False, is_async=True)
        b_seen = s_seen.index(i_ring).load(gl.SliceLayout(0, score_layout))
        b_score = hopper.warpgroup_mma_wait(0, deps=[score]) * scale_log2
        b_score = gl.where((b_seen > 0)[None, :], b_score, -float("inf"))
        b_m_new = gl.maximum(b_m, gl.max(b_score, axis=1))
        b_m_safe = gl.where(b_m_new == -float("inf"), 0.0, b_m_new)
        b_p = gl.inline_asm_elementwise(EXP2_ASM, "=f,f", [b_score - b_m_safe[:, None]], gl.float32, True, 1)
        b_alpha = gl.inline_asm_elementwise(EXP2_ASM, "=f,f", [b_m - b_m_safe], gl.float32, True, 1)
        b_m = b_m_new
        s_p.store(b_p.to(s_p.dtype))
        hopper.fence_async_shared()
        b_l = b_l * gl.convert_layout(b_alpha, sum_layout)[:, None, None] + token_sums(b_p)
        b_acc = b_acc * gl.convert_layout(b_alpha, gl.SliceLayout(1, out_layout))[:, None]
        # Wait at once: ptxas serializes all wgmma if one is still in flight at the end of a loop.
        acc = hopper.warpgroup_mma(s_p, s_k, b_acc, is_async=True)
        b_acc = hopper.warpgroup_mma_wait(0, deps=[acc])
        hopper.mbarrier.arrive(freed.index(i_ring), count=1)
    b_sum = gl.convert_layout(gl.sum(gl.sum(b_l, axis=2), axis=1), row_layout)
    o_m_row = gl.arange(0, HEIGHT, row_layout)
    o_head = first_head + o_m_row
    m_head = (o_m_row < GROUP) & (o_head < NUM_HEADS)
    b_whole = b_sum
    if num_splits == 1:
        b_sink = gl.load(p_sinks + o_head, mask=m_head, other=-float("inf")) * PER_NAT
        b_whole = b_sum + gl.exp2(b_sink - gl.where(b_m == -float("inf"), 0.0, b_m))
    # Padding, or no place of the split names anything: zeros, with -inf as lse.
    b_share = gl.where(b_sum > 0, 1.0 / b_whole, 0.0)
    b_out = b_acc * gl.convert_layout(b_share, gl.SliceLayout(1, out_layout))[:, None]
    b_out = _rotate_back(b_out, s_turns)
    num_heads = gl.minimum(NUM_HEADS - first_head, GROUP)
    if num_splits == 1:
        p_rows = p_out + (i_row * NUM_HEADS + first_head) * HEAD_DIM
        _store_rows(b_out.to(p_out.dtype.element_ty), s_q, p_rows, num_heads)
    else:
        # Splits after the last place write nothing: the merge computes how many there are.
        o_partial = (i_row * num_splits + gl.program_id(1)) * NUM_HEADS + first_head
        b_half = gl.minimum(gl.maximum(b_out, -65504.0), 65504.0).to(p_partial_out.dtype.element_ty)
        _store_rows(b_half, s_q, p_partial_out + o_partial * HEAD_DIM, gl.where(is_used, num_heads, 0))
        gl.store(p_partial_lse + o_partial + o_m_row, b_m + gl.log2(b_sum), mask=m_head & is_used)


@gluon_jit_counting("num_listed")
def _attend_kernel(
    p_q, p_window, p_window_scales, p_entries, p_entries_scales, p_window_pages, p_entries_pages, p_selected,
    p_table_rows, p_positions, p_sinks, p_cos, p_sin, p_out, p_partial_out, p_partial_lse, window_stride,
    entries_stride, selected_stride, rotary_stride, num_listed, scale_log2,
    PLAIN_ROWS: constexpr, WINDOW: constexpr, RATIO: constexpr, LISTED: constexpr, NUM_HEADS: constexpr,
    NUM_BLOCKS: constexpr, GROUP: constexpr, WINDOW_PAGE: constexpr, ENTRIES_PAGE: constexpr, PDL: constexpr,
):  # fmt: skip
    dtype: constexpr = p_q.dtype.element_ty if PLAIN_ROWS else gl.float16
    shared: constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    flat: constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    s_rows = gl.allocate_shared_memory(dtype, [RING, TOKENS, HEAD_DIM], shared)
    s_q = gl.allocate_shared_memory(dtype, [HEIGHT, HEAD_DIM], shared)
    s_p = gl.allocate_shared_memory(dtype, [HEIGHT, TOKENS], shared)
    s_seen = gl.allocate_shared_memory(gl.float32, [RING, TOKENS], flat)
    s_turns = gl.allocate_shared_memory(gl.float32, [2, HEAD_DIM // 2], flat)
    filled = gl.allocate_shared_memory(gl.int64, [RING, 1], hopper.mbarrier.MBarrierLayout())
    freed = gl.allocate_shared_memory(gl.int64, [RING, 1], hopper.mbarrier.MBarrierLayout())
    for i in gl.static_range(RING):
        hopper.mbarrier.init(filled.index(i), count=1)
        hopper.mbarrier.init(freed.index(i), count=1)
    # The host wrote rows and positions before the step.
    i_row = (gl.program_id(0) // NUM_BLOCKS).to(gl.int64)
    position = gl.load(p_positions + i_row)
    table_row = gl.load(p_table_rows + i_row).to(gl.int64)
    num_window, num_entries, num_taken, low, high = _row_of(position, num_listed, WINDOW, RATIO, LISTED)
    o_rotary = i_row * rotary_stride
    if PDL:
        wait_for_kernels_before()  # earlier kernels write lists, queries and rows
    # Blocks of heads of a row run one after the other, so all but the first find its rows in the cache.
    # Triton 3.6 keeps constants in these tuples only if they are written inside the call.
    gl.warp_specialize([(_attend, (
        p_q, p_sinks, p_cos + o_rotary, p_sin + o_rotary, p_out, p_partial_out, p_partial_lse, i_row, low, high, scale_log2,
        s_q, s_rows, s_seen, s_p, s_turns, filled, freed, NUM_HEADS, NUM_BLOCKS, GROUP,
    )), (_gather, (
        p_window, p_window_scales, p_entries, p_entries_scales, p_window_pages + table_row * window_stride,
        p_entries_pages + table_row * entries_stride, p_selected + i_row * selected_stride, low, high, num_taken,
        position + 1 - num_window, num_entries, num_listed, s_rows, s_seen, filled, freed,
        PLAIN_ROWS, RATIO, LISTED, WINDOW_PAGE, ENTRIES_PAGE,
    ))], [GATHER_WARPS], [GATHER_REGISTERS])  # fmt: skip
    for i in gl.static_range(RING):
        hopper.mbarrier.invalidate(filled.index(i))
        hopper.mbarrier.invalidate(freed.index(i))
    if PDL:
        launch_dependents()  # release late: programs of the next kernel would share the multiprocessors unevenly
