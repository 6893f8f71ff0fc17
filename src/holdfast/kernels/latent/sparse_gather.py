"""Gathering of selected tokens (DSA), or of tokens in order, into shared memory as wgmma operands on Hopper, in Gluon.

N tokens of a block or of a step, L latent, R rotated elements

Warps that gather do nothing else. A place of a list gives a token, the page table its page, and the page its row. None
of the three loads waits for another, because places are read three steps ahead, pages two and rows one. A step is the
tokens that the warps take at once.

    plain         copied by cp.async, unchanged
    fp8_ds_mla    codes times the share of their group's scale in the largest of their token, at most one; half precision
    TurboQuant    the numbers of the codebook; half precision

The product applies one factor per token, negative if there is no token; such rows are finite. Rotated elements are in the type
of queries, or half precision with their scale if pages hold them as bytes.

Blocks form a ring in shared memory. The barrier `filled` flips when a block is loaded, `freed` when it has been used.
"""

from holdfast.kernels.attention.dequantize import LATENTS_4_ASM
from holdfast.kernels.triton_compat import constexpr, gl, gluon_jit, hopper, kernel_constant

# Triton cannot unpack into a tuple, but adds tuples.

PANEL = kernel_constant(64)
"""Columns of half precision in 128 bytes of shared memory."""
PANEL_WORDS = kernel_constant(32)
NO_TOKEN = kernel_constant(-1.0)
TWICE_ASM = kernel_constant("cvt.rn.f16x2.f32 $0, $1, $1;")
SCALED_8_ASM = kernel_constant("""{
.reg .b16 p, q;
.reg .b32 x, y;
mov.b32 {p, q}, $2;
cvt.rn.f16x2.e4m3x2 x, p;
cvt.rn.f16x2.e4m3x2 y, q;
mul.rn.f16x2 $0, x, $3;
mul.rn.f16x2 $1, y, $3;
}""")
"""Multiply four e4m3 numbers by one in half precision."""
CUT_ASM = kernel_constant("""{
.reg .b32 x, y;
mov.b32 x, 0x7BFF7BFF;
mov.b32 y, 0xFBFFFBFF;
min.f16x2 x, x, $1;
max.f16x2 $0, x, y;
}""")
"""Clamp two half-precision numbers to finite ones."""
HALF_ASM = kernel_constant("""{
.reg .b32 x, y;
shl.b32 x, $1, 16;
and.b32 y, $1, 0xFFFF0000;
cvt.rn.f16x2.f32 $0, y, x;
}""")
"""Convert two bfloat16 numbers to half precision."""


@gluon_jit
def load_places(p_row_tokens, o_place, end, IN_ORDER: constexpr):
    """Load these places of a list, or return the places themselves if IN_ORDER; -1 past the end."""
    if IN_ORDER:
        return gl.where(o_place < end, o_place, -1)
    else:
        return gl.load(p_row_tokens + o_place, mask=o_place < end, other=-1)


@gluon_jit
def seen_tokens(b_place, num_tokens):
    """Return places that are tokens of the sequence; -1 for any other number."""
    return gl.where((b_place >= 0) & (b_place < num_tokens), b_place, -1)


@gluon_jit
def load_pages(p_row_pages, b_token, PAGE_TOKENS: constexpr):
    """Load the pages of tokens; masked out for -1."""
    return gl.load(p_row_pages + gl.maximum(b_token, 0) // PAGE_TOKENS, mask=b_token >= 0, other=0)


@gluon_jit
def find_slots(b_page, b_token, PAGE_TOKENS: constexpr):
    """Return int64 slots; 0 without a token."""
    o_slot = b_page.to(gl.int64) * PAGE_TOKENS + b_token % PAGE_TOKENS
    return gl.where(b_token >= 0, o_slot, 0)


@gluon_jit
def gather_plain(
    p_rows, p_row_tokens, p_row_pages, low, high, num_tokens, s_latents, s_ropes, s_factors, filled, freed, count,
    PAGE_TOKENS: constexpr,
):  # fmt: skip
    """Gather plain rows of places `low` to `high` of a list, after `count` blocks of the ring."""
    TOKENS: constexpr = s_latents.shape[1]
    LATENT: constexpr = s_latents.shape[2]
    ROPE: constexpr = s_ropes.shape[2]
    RING: constexpr = s_latents.shape[0]
    # Eight threads per 128 bytes of a row: a line of global memory, and all banks of shared memory.
    layout: constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    o_n = gl.arange(0, TOKENS, gl.SliceLayout(1, layout))
    o_c = gl.arange(0, PANEL, gl.SliceLayout(0, layout))
    b_token = seen_tokens(load_places(p_row_tokens, low + o_n, high, False), num_tokens)
    b_next = seen_tokens(load_places(p_row_tokens, low + TOKENS + o_n, high, False), num_tokens)
    b_ahead = load_places(p_row_tokens, low + 2 * TOKENS + o_n, high, False)
    o_slot = find_slots(load_pages(p_row_pages, b_token, PAGE_TOKENS), b_token, PAGE_TOKENS)
    b_page = load_pages(p_row_pages, b_next, PAGE_TOKENS)
    for i_loop in range((high - low + TOKENS - 1) // TOKENS):
        n = low + i_loop * TOKENS
        i_ring = (count + i_loop) % RING
        hopper.mbarrier.wait(freed.index(i_ring), ((count + i_loop) // RING & 1) ^ 1)
        s_latent = s_latents.index(i_ring)
        m_n = (b_token >= 0)[:, None]
        p_n = p_rows + (o_slot * (LATENT + ROPE))[:, None] + o_c[None, :]
        for i_panel in gl.static_range(LATENT // PANEL):
            s_panel = s_latent.slice(i_panel * PANEL, PANEL, dim=1)
            hopper.async_copy.async_copy_global_to_shared(s_panel, p_n + i_panel * PANEL, mask=m_n)
        hopper.async_copy.async_copy_global_to_shared(s_ropes.index(i_ring), p_n + LATENT, mask=m_n)
        hopper.async_copy.commit_group()
        s_factors.index(i_ring).store(gl.where(b_token >= 0, 1.0, NO_TOKEN))
        o_slot = find_slots(b_page, b_next, PAGE_TOKENS)
        b_token = b_next
        b_next = seen_tokens(b_ahead, num_tokens)
        b_page = load_pages(p_row_pages, b_next, PAGE_TOKENS)
        b_ahead = load_places(p_row_tokens, n + 3 * TOKENS + o_n, high, False)
        hopper.async_copy.wait_group(0)
        hopper.fence_async_shared()
        hopper.mbarrier.arrive(filled.index(i_ring), count=1)


@gluon_jit
def _load_words(p_words, o_first, m_n, WORDS: constexpr, layout: constexpr):
    """Load [N, words] of rows from `o_first` on."""
    o_c = gl.arange(0, WORDS, gl.SliceLayout(0, layout))
    return gl.load(p_words + o_first[:, None] + o_c[None, :], mask=m_n[:, None], other=0)


@gluon_jit
def _load_scales(p_scales, o_first, m_n, NUM_SCALES: constexpr):
    b_scales = ()
    for i in gl.static_range(NUM_SCALES):
        b_scales = b_scales + (gl.load(p_scales + o_first + i, mask=m_n, other=0.0).to(gl.float32),)
    return b_scales


@gluon_jit
def twice(b_scale):
    """Pack a scale twice in half precision, as a word."""
    return gl.inline_asm_elementwise(TWICE_ASM, "=r,f", [b_scale], gl.int32, True, 1)


@gluon_jit
def scaled_fp8(b_words, b_scale):
    """Multiply words of four e4m3 numbers by the scale of their token, given twice: words of two in half precision, in order."""
    b_scale = gl.expand_dims(b_scale, 1).broadcast_to(b_words.shape)
    b_lower, b_upper = gl.inline_asm_elementwise(
        SCALED_8_ASM, "=r,=r,r,r", [b_words, b_scale], (gl.int32, gl.int32), True, 1
    )
    return gl.join(b_lower, b_upper).reshape([b_words.shape[0], 2 * b_words.shape[1]])


@gluon_jit
def _store_panel(s_rows, b_words, b_scales, b_share, i_panel, FP8: constexpr):
    """Decode a panel of codes into its columns."""
    if FP8:
        b_numbers = scaled_fp8(b_words, twice(b_scales[i_panel // 2] * b_share))
        s_rows.slice(i_panel * PANEL_WORDS, PANEL_WORDS, dim=1).store(b_numbers)
    else:
        b_parts = gl.inline_asm_elementwise(
            LATENTS_4_ASM, "=r,=r,=r,=r,r", [b_words], (gl.int32, gl.int32, gl.int32, gl.int32), True, 1
        )
        for j in gl.static_range(4):
            s_part = s_rows.slice(j * (s_rows.shape[1] // 4) + i_panel * PANEL_WORDS, PANEL_WORDS, dim=1)
            s_part.store(b_parts[j])


@gluon_jit
def gather_codes(
    p_words, p_scales, p_rope, p_row_tokens, p_row_pages, low, high, num_tokens, s_latents, s_ropes, s_factors, filled,
    freed, count,
    FP8: constexpr, SMALL_ROPE: constexpr, IN_ORDER: constexpr, PAGE_TOKENS: constexpr,
):  # fmt: skip
    """Like `gather_plain` for quantized rows, as words of 4 bytes: narrower numbers would take a register each.

    A panel of the next step is loaded into the registers of this step's, once that is decoded.
    """
    RING: constexpr = s_latents.shape[0]
    TOKENS: constexpr = s_latents.shape[1]
    LATENT: constexpr = s_latents.shape[2]
    ROPE: constexpr = s_ropes.shape[2]
    STEP: constexpr = 8 * gl.num_warps()
    # 16 bytes of codes per thread. Stores of 8 threads, 16 bytes each of one or two rows, hit different banks.
    layout: constexpr = gl.BlockedLayout([1, 4], [8, 4] if FP8 else [4, 8], [gl.num_warps(), 1], [1, 0])
    ROPE_WORDS: constexpr = ROPE // 4 if SMALL_ROPE else ROPE // 2
    # A row of fp8_ds_mla: codes, four scales of 4 bytes, rotated elements.
    ROW_WORDS: constexpr = LATENT // 4 + 4 + ROPE_WORDS if FP8 else LATENT // 8
    CODE_WORDS: constexpr = 16 if FP8 else 32
    NUM_PANELS: constexpr = LATENT // PANEL if FP8 else LATENT // 4 // PANEL
    NUM_SCALES: constexpr = 4 if FP8 else (2 if SMALL_ROPE else 1)
    SCALE_STRIDE: constexpr = ROW_WORDS if FP8 else NUM_SCALES
    FIRST_SCALE: constexpr = LATENT // 4 if FP8 else 0
    ROPE_STRIDE: constexpr = ROW_WORDS if FP8 else ROPE_WORDS
    FIRST_ROPE: constexpr = LATENT // 4 + 4 if FP8 else 0
    words: constexpr = gl.NVMMASharedLayout(128, 32, rank=2)
    s_latents = s_latents._reinterpret(gl.int32, [RING, TOKENS, LATENT // 2], words)
    rope_dtype: constexpr = s_ropes.dtype
    s_ropes = s_ropes._reinterpret(gl.int32, [RING, TOKENS, ROPE // 2], words)
    o_n = gl.arange(0, STEP, gl.SliceLayout(1, layout))
    b_token = seen_tokens(load_places(p_row_tokens, low + o_n, high, IN_ORDER), num_tokens)
    b_next = seen_tokens(load_places(p_row_tokens, low + STEP + o_n, high, IN_ORDER), num_tokens)
    b_ahead = load_places(p_row_tokens, low + 2 * STEP + o_n, high, IN_ORDER)
    o_slot = find_slots(load_pages(p_row_pages, b_token, PAGE_TOKENS), b_token, PAGE_TOKENS)
    b_page = load_pages(p_row_pages, b_next, PAGE_TOKENS)
    m_n = b_token >= 0
    b_codes = ()
    for i_panel in gl.static_range(NUM_PANELS):
        o_first = o_slot * ROW_WORDS + i_panel * CODE_WORDS
        b_codes = b_codes + (_load_words(p_words, o_first, m_n, CODE_WORDS, layout),)
    b_scales = _load_scales(p_scales, o_slot * SCALE_STRIDE + FIRST_SCALE, m_n, NUM_SCALES)
    b_rope = _load_words(p_rope, o_slot * ROPE_STRIDE + FIRST_ROPE, m_n, ROPE_WORDS, layout)
    for i_loop in range((high - low + TOKENS - 1) // TOKENS):
        n = low + i_loop * TOKENS
        i_ring = (count + i_loop) % RING
        hopper.mbarrier.wait(freed.index(i_ring), ((count + i_loop) // RING & 1) ^ 1)
        for i_step in gl.static_range(TOKENS // STEP):
            s_rows = s_latents.index(i_ring).slice(i_step * STEP, STEP, dim=0)
            s_rope = s_ropes.index(i_ring).slice(i_step * STEP, STEP, dim=0)
            s_factor = s_factors.index(i_ring).slice(i_step * STEP, STEP, dim=0)
            b_factor = b_scales[0]
            b_share = b_factor
            if FP8:
                for i in gl.static_range(1, NUM_SCALES):
                    b_factor = gl.maximum(b_factor, b_scales[i])
                b_share = 1.0 / gl.where(b_factor > 0, b_factor, 1.0)
            s_factor.store(gl.where(b_token >= 0, b_factor, NO_TOKEN))
            if SMALL_ROPE:
                b_numbers = scaled_fp8(b_rope, twice(b_scales[1]))
                s_rope.store(gl.inline_asm_elementwise(CUT_ASM, "=r,r", [b_numbers], gl.int32, True, 1))
            elif rope_dtype == gl.bfloat16:
                s_rope.store(b_rope)
            else:
                s_rope.store(gl.inline_asm_elementwise(HALF_ASM, "=r,r", [b_rope], gl.int32, True, 1))
            b_token = b_next
            m_n = b_token >= 0
            o_slot = find_slots(b_page, b_token, PAGE_TOKENS)
            b_next = seen_tokens(b_ahead, num_tokens)
            b_page = load_pages(p_row_pages, b_next, PAGE_TOKENS)
            b_ahead = load_places(p_row_tokens, n + (i_step + 3) * STEP + o_n, high, IN_ORDER)
            b_new = ()
            for i_panel in gl.static_range(NUM_PANELS):
                _store_panel(s_rows, b_codes[i_panel], b_scales, b_share, i_panel, FP8)
                o_first = o_slot * ROW_WORDS + i_panel * CODE_WORDS
                b_new = b_new + (_load_words(p_words, o_first, m_n, CODE_WORDS, layout),)
            b_codes = b_new
            b_scales = _load_scales(p_scales, o_slot * SCALE_STRIDE + FIRST_SCALE, m_n, NUM_SCALES)
            b_rope = _load_words(p_rope, o_slot * ROPE_STRIDE + FIRST_ROPE, m_n, ROPE_WORDS, layout)
        hopper.fence_async_shared()
        hopper.mbarrier.arrive(filled.index(i_ring), count=1)


@gluon_jit
def gather_rows(
    p_codes, p_scales, p_rope, p_row_tokens, p_row_pages, low, high, num_tokens, s_latents, s_ropes, s_factors, filled,
    freed, count,
    PLAIN_ROWS: constexpr, FP8: constexpr, SMALL_ROPE: constexpr, IN_ORDER: constexpr, PAGE_TOKENS: constexpr,
):  # fmt: skip
    """Gather rows of any pages; plain ones only by a list."""
    if PLAIN_ROWS:
        gather_plain(
            p_codes, p_row_tokens, p_row_pages, low, high, num_tokens, s_latents, s_ropes, s_factors, filled, freed,
            count, PAGE_TOKENS,
        )  # fmt: skip
    else:
        gather_codes(
            p_codes, p_scales, p_rope, p_row_tokens, p_row_pages, low, high, num_tokens, s_latents, s_ropes, s_factors,
            filled, freed, count, FP8, SMALL_ROPE, IN_ORDER, PAGE_TOKENS,
        )  # fmt: skip
