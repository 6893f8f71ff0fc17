"""Gathering of tokens and entries (DeepSeek-V4) into shared memory as wgmma operands on Hopper, in Gluon.

N tokens of a block, D head dim

Warps do nothing else. Places of a row are its entries, then its window (compressed_scopes.py). A place has one number as its
name: e for entry e, -2 - t for token t of the window, -1 for nothing. A step is the places that the warps take at once. Names
are loaded some steps ahead, pages one step later, and rows before their use, so no load waits for another.

    plain        copied by cp.async, as they are
    fp8_ds_v4    codes times the power of two of their tile, in half precision: exact, but for what half precision has no numbers for

Unlike rows of fp8_ds_mla these need no factor in scores: a normed vector is well within half precision. A mask says which rows
hold a token; others are zeros. Blocks form a ring in shared memory, as in sparse_gather.py.
"""

from holdfast.kernels.latent.sparse_gather import CUT_ASM, HALF_ASM, SCALED_8_ASM, TWICE_ASM
from holdfast.kernels.triton_compat import constexpr, gl, gluon_jit, hopper, kernel_constant

# Triton unpacks nothing into a tuple, but adds tuples.
# pyright: reportGeneralTypeIssues=false
# ruff: noqa: ANN001, ANN201, ANN202, RUF005 the arguments of kernels have no types

DEPTH = kernel_constant(1)
"""Steps of codes in flight in registers."""
PANEL = kernel_constant(64)
"""Columns of half precision in 128 bytes of shared memory: one tile of codes."""
PANEL_WORDS = kernel_constant(32)
CODE_WORDS = kernel_constant(16)
"""Words of the codes of a tile."""
NUM_TILES = kernel_constant(7)
ROW_WORDS = kernel_constant(144)
"""Codes, then rotated elements."""
SCALE_WORDS = kernel_constant(2)
MOST_SCALE = kernel_constant(128.0)
"""The largest scale whose product with every code fits half precision."""
EXPONENT = kernel_constant(0x7F800000)


@gluon_jit
def find_names(
    p_listed, o_place, high, num_taken, first, num_entries, num_listed, is_listed, RATIO: constexpr, LISTED: constexpr
):
    """Names of these places; -1 past the end, and if a list names no entry of the row."""
    b_name = gl.where((o_place >= num_taken) & (o_place < high), num_taken - 2 - first - o_place, -1)
    if RATIO > 0:
        b_entry = o_place
        if LISTED:
            # Also without a list: the load does not wait for the row's length.
            b_listed = gl.load(p_listed + o_place, mask=o_place < num_listed, other=-1)
            b_entry = gl.where(is_listed, b_listed, b_entry)
        m_entry = (o_place < gl.minimum(num_taken, high)) & (b_entry >= 0) & (b_entry < num_entries)
        b_name = gl.where(m_entry, b_entry, b_name)
    return b_name


@gluon_jit
def _index_of(b_name):
    """Index of a token or entry in its scope."""
    return gl.where(b_name < 0, gl.maximum(-2 - b_name, 0), b_name)


@gluon_jit
def load_pages(p_window_row, p_entries_row, b_name, RATIO: constexpr, WINDOW_PAGE: constexpr, ENTRIES_PAGE: constexpr):
    """Load the pages of names; masked out for -1."""
    b_index = _index_of(b_name)
    p_page = p_window_row + b_index // WINDOW_PAGE
    if RATIO > 0:
        p_page = gl.where(b_name < 0, p_page, p_entries_row + b_index // ENTRIES_PAGE)
    return gl.load(p_page, mask=b_name != -1, other=0)


@gluon_jit
def find_rows(
    p_window, p_entries, b_page, b_name, width,
    RATIO: constexpr, WINDOW_PAGE: constexpr, ENTRIES_PAGE: constexpr,
):  # fmt: skip
    """Pointers to rows of `width` words; to the first row for -1."""
    b_index = _index_of(b_name)
    o_page = gl.maximum(b_page, 0).to(gl.int64)
    p_row = p_window + (o_page * WINDOW_PAGE + b_index % WINDOW_PAGE) * width
    if RATIO > 0:
        p_row = gl.where(b_name < 0, p_row, p_entries + (o_page * ENTRIES_PAGE + b_index % ENTRIES_PAGE) * width)
    return p_row


@gluon_jit
def _without_first(b_values):
    """All but the first of a tuple."""
    b_others = ()
    for i in gl.static_range(1, len(b_values)):
        b_others = b_others + (b_values[i],)
    return b_others


@gluon_jit
def gather_plain(
    p_window, p_entries, p_window_row, p_entries_row, p_listed, low, high, num_taken, first, num_entries, num_listed,
    is_listed, s_rows, s_seen, filled, freed,
    RATIO: constexpr, LISTED: constexpr, WINDOW_PAGE: constexpr, ENTRIES_PAGE: constexpr,
):  # fmt: skip
    """Gather plain rows of places `low` to `high`."""
    RING: constexpr = s_rows.shape[0]
    TOKENS: constexpr = s_rows.shape[1]
    HEAD_DIM: constexpr = s_rows.shape[2]
    # Eight threads per 128 bytes of a row: a line of global memory, and all banks of shared memory.
    layout: constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    o_n = low + gl.arange(0, TOKENS, gl.SliceLayout(1, layout))
    o_c = gl.arange(0, PANEL, gl.SliceLayout(0, layout))
    b_name = find_names(p_listed, o_n, high, num_taken, first, num_entries, num_listed, is_listed, RATIO, LISTED)
    b_next = find_names(
        p_listed, o_n + TOKENS, high, num_taken, first, num_entries, num_listed, is_listed, RATIO, LISTED
    )
    b_page = load_pages(p_window_row, p_entries_row, b_name, RATIO, WINDOW_PAGE, ENTRIES_PAGE)
    for i_loop in range((high - low + TOKENS - 1) // TOKENS):
        i_ring = i_loop % RING
        p_row = find_rows(p_window, p_entries, b_page, b_name, HEAD_DIM, RATIO, WINDOW_PAGE, ENTRIES_PAGE)
        m_n = b_name != -1
        b_page = load_pages(p_window_row, p_entries_row, b_next, RATIO, WINDOW_PAGE, ENTRIES_PAGE)
        b_name = b_next
        o_ahead = o_n + (i_loop + 2) * TOKENS
        b_next = find_names(
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
    """[N, words]: load rows from a word on."""
    o_c = FIRST + gl.arange(0, WORDS, gl.SliceLayout(0, layout))
    return gl.load(p_row[:, None] + o_c[None, :], mask=m_n[:, None], other=0)


@gluon_jit
def _tile_scale(b_word, i_tile: constexpr):
    """The scale of a tile, twice in half precision, from the word with its exponent."""
    PLACE: constexpr = i_tile % 4
    b_bits = b_word >> 1 if PLACE == 3 else b_word << (23 - 8 * PLACE)
    b_scale = gl.minimum((b_bits & EXPONENT).to(gl.float32, bitcast=True), MOST_SCALE)
    return gl.inline_asm_elementwise(TWICE_ASM, "=r,f", [b_scale], gl.int32, True, 1)


@gluon_jit
def _scaled_codes(b_words, b_scale):
    """Multiply words of four e4m3 numbers by the scale of their token: words of two in half precision, in order."""
    b_scale = gl.expand_dims(b_scale, 1).broadcast_to(b_words.shape)
    b_lower, b_upper = gl.inline_asm_elementwise(
        SCALED_8_ASM, "=r,=r,r,r", [b_words, b_scale], (gl.int32, gl.int32), True, 1
    )
    return gl.join(b_lower, b_upper).reshape([b_words.shape[0], 2 * b_words.shape[1]])


@gluon_jit
def gather_codes(
    p_window, p_window_scales, p_entries, p_entries_scales, p_window_row, p_entries_row, p_listed, low, high, num_taken,
    first, num_entries, num_listed, is_listed, s_rows, s_seen, filled, freed,
    RATIO: constexpr, LISTED: constexpr, WINDOW_PAGE: constexpr, ENTRIES_PAGE: constexpr,
):  # fmt: skip
    """Like `gather_plain` for rows of fp8_ds_v4, as words of 4 bytes: narrower numbers would take a register each.

    A panel of the next step is loaded into the registers of this step's, once that is decoded.
    """
    RING: constexpr = s_rows.shape[0]
    TOKENS: constexpr = s_rows.shape[1]
    HEAD_DIM: constexpr = s_rows.shape[2]
    STEP: constexpr = 8 * gl.num_warps()
    # 16 bytes of codes per thread. Stores of 8 threads, 16 bytes each of two rows, hit different banks.
    layout: constexpr = gl.BlockedLayout([1, 4], [8, 4], [gl.num_warps(), 1], [1, 0])
    words: constexpr = gl.NVMMASharedLayout(128, 32, rank=2)
    s_rows = s_rows._reinterpret(gl.int32, [RING, TOKENS, HEAD_DIM // 2], words)
    o_n = low + gl.arange(0, STEP, gl.SliceLayout(1, layout))
    b_codes = ()
    b_scales = ()
    b_ropes = ()
    b_seen = ()
    for i in gl.static_range(DEPTH):
        b_name = find_names(
            p_listed, o_n + i * STEP, high, num_taken, first, num_entries, num_listed, is_listed, RATIO, LISTED
        )
        b_page = load_pages(p_window_row, p_entries_row, b_name, RATIO, WINDOW_PAGE, ENTRIES_PAGE)
        p_row = find_rows(p_window, p_entries, b_page, b_name, ROW_WORDS, RATIO, WINDOW_PAGE, ENTRIES_PAGE)
        p_scale = find_rows(
            p_window_scales, p_entries_scales, b_page, b_name, SCALE_WORDS, RATIO, WINDOW_PAGE, ENTRIES_PAGE
        )
        m_n = b_name != -1
        for i_tile in gl.static_range(NUM_TILES):
            b_codes = b_codes + (_load_words(p_row, m_n, i_tile * CODE_WORDS, CODE_WORDS, layout),)
        b_scales = b_scales + (gl.load(p_scale, mask=m_n, other=0), gl.load(p_scale + 1, mask=m_n, other=0))
        b_ropes = b_ropes + (_load_words(p_row, m_n, NUM_TILES * CODE_WORDS, PANEL_WORDS, layout),)
        b_seen = b_seen + (gl.where(m_n, 1.0, 0.0),)
    b_name = find_names(
        p_listed, o_n + DEPTH * STEP, high, num_taken, first, num_entries, num_listed, is_listed, RATIO, LISTED
    )
    b_next = find_names(
        p_listed, o_n + (DEPTH + 1) * STEP, high, num_taken, first, num_entries, num_listed, is_listed, RATIO, LISTED
    )
    b_page = load_pages(p_window_row, p_entries_row, b_name, RATIO, WINDOW_PAGE, ENTRIES_PAGE)
    for i_loop in range((high - low + TOKENS - 1) // TOKENS):
        i_ring = i_loop % RING
        hopper.mbarrier.wait(freed.index(i_ring), (i_loop // RING & 1) ^ 1)
        for i_step in gl.static_range(TOKENS // STEP):
            s_step = s_rows.index(i_ring).slice(i_step * STEP, STEP, dim=0)
            s_seen.index(i_ring).slice(i_step * STEP, STEP, dim=0).store(b_seen[0])
            m_n = b_name != -1
            p_row = find_rows(p_window, p_entries, b_page, b_name, ROW_WORDS, RATIO, WINDOW_PAGE, ENTRIES_PAGE)
            p_scale = find_rows(
                p_window_scales, p_entries_scales, b_page, b_name, SCALE_WORDS, RATIO, WINDOW_PAGE, ENTRIES_PAGE
            )
            b_page = load_pages(p_window_row, p_entries_row, b_next, RATIO, WINDOW_PAGE, ENTRIES_PAGE)
            b_name = b_next
            o_ahead = o_n + i_loop * TOKENS + (i_step + DEPTH + 2) * STEP
            b_next = find_names(
                p_listed, o_ahead, high, num_taken, first, num_entries, num_listed, is_listed, RATIO, LISTED
            )
            for i_tile in gl.static_range(NUM_TILES):
                b_numbers = _scaled_codes(b_codes[0], _tile_scale(b_scales[i_tile // 4], i_tile))
                s_step.slice(i_tile * PANEL_WORDS, PANEL_WORDS, dim=1).store(b_numbers)
                b_new = _load_words(p_row, m_n, i_tile * CODE_WORDS, CODE_WORDS, layout)
                b_codes = _without_first(b_codes) + (b_new,)
            b_half = gl.inline_asm_elementwise(HALF_ASM, "=r,r", [b_ropes[0]], gl.int32, True, 1)
            b_half = gl.inline_asm_elementwise(CUT_ASM, "=r,r", [b_half], gl.int32, True, 1)
            s_step.slice(NUM_TILES * PANEL_WORDS, PANEL_WORDS, dim=1).store(b_half)
            b_new = _load_words(p_row, m_n, NUM_TILES * CODE_WORDS, PANEL_WORDS, layout)
            b_ropes = _without_first(b_ropes) + (b_new,)
            b_scales = _without_first(_without_first(b_scales))
            b_scales = b_scales + (gl.load(p_scale, mask=m_n, other=0), gl.load(p_scale + 1, mask=m_n, other=0))
            b_seen = _without_first(b_seen) + (gl.where(m_n, 1.0, 0.0),)
        hopper.fence_async_shared()
        hopper.mbarrier.arrive(filled.index(i_ring), count=1)
