"""Raw shared memory for kernels, addressed by word: any thread may count, put or get.

Triton converts layouts for a histogram, a scan or a scatter, which can cost more than the rest of a small kernel. These
functions work on each element where it is.

Callers place barriers before other threads read a word. The interpreter has no assembler and uses a global buffer instead.
"""

import torch

from holdfast.kernels.triton_compat import constexpr, is_interpreted, jit, kernel_constant, tl

# Triton resolves branches on constants at compile time, so both sides must stand in an if and an else.

MAX_WORDS = 8704
"""Words per program: 34 KiB. Triton's own use must be at most 14 KiB or over 48 KiB, when it requests large shared
memory."""
WORDS = kernel_constant(MAX_WORDS)
WORDS_ASM = kernel_constant(f".shared .align 16 .b32 holdfast_words[{MAX_WORDS}]; mov.u32 $0, holdfast_words;")
GET_ASM = kernel_constant("ld.shared.b32 $0, [$1];")
CLEAR_ASM = kernel_constant("st.shared.v4.b32 [$1], {0, 0, 0, 0}; mov.b32 $0, 0;")
PUT_ASM = kernel_constant("st.shared.b32 [$1], $2; mov.b32 $0, 0;")
COUNT_ASM = kernel_constant("{ .reg .pred p; setp.ne.b32 p, $2, 0; @p red.shared.add.u32 [$1], 1; mov.b32 $0, 0; }")
SCATTER_ASM = kernel_constant(
    "{ .reg .pred p; .reg .b64 a; setp.ne.b32 p, $4, 0; mad.wide.s32 a, $2, 4, $1; @p st.global.b32 [a], $3; mov.b32 $0, 0; }"
)

GATHER_ASM = kernel_constant(
    "{ .reg .pred p; .reg .b64 a; setp.ne.b32 p, $3, 0; mad.wide.s32 a, $2, 4, $1; mov.b32 $0, 0; @p ld.global.b32 $0, [a]; }"
)


def interpreter_buffer(num_programs: int, like: torch.Tensor) -> torch.Tensor | None:
    """Return the interpreter's buffer for `num_programs`; None if there is real shared memory."""
    if not is_interpreted():
        return None
    return torch.empty(num_programs * MAX_WORDS, dtype=torch.int32, device=like.device)


@jit
def shared_words(p_buffer):
    """Return the address of this program's words, uninitialized. Call once per kernel, outside of loops."""
    if p_buffer is None:
        return tl.inline_asm_elementwise(WORDS_ASM, "=r", [], tl.int32, is_pure=False, pack=1)
    else:
        i_program = tl.program_id(0) + tl.num_programs(0) * tl.program_id(1)
        return p_buffer + i_program * WORDS


@jit
def clear_words(words, o_four):
    """Zero words `4 * o_four` and the three after each."""
    if words.dtype.is_ptr():
        for i in tl.static_range(4):
            tl.store(words + o_four * 4 + i, o_four * 0)
    else:
        tl.inline_asm_elementwise(CLEAR_ASM, "=r,r", [words + o_four * 16], tl.int32, is_pure=False, pack=1)


@jit
def get_words(words, o_word):
    """Load int32 words."""
    if words.dtype.is_ptr():
        return tl.load(words + o_word)
    else:
        return tl.inline_asm_elementwise(GET_ASM, "=r,r", [words + o_word * 4], tl.int32, is_pure=False, pack=1)


@jit
def put_words(words, o_word, b_value):
    """Store int32 words."""
    if words.dtype.is_ptr():
        tl.store(words + o_word, b_value)
    else:
        arguments = [words + o_word * 4, b_value]
        tl.inline_asm_elementwise(PUT_ASM, "=r,r,r", arguments, tl.int32, is_pure=False, pack=1)


@jit
def count_words(words, o_word, m_counted):
    """Add one per element. A block needs at least as many elements as the program has threads, else some count twice."""
    if words.dtype.is_ptr():
        tl.atomic_add(words + o_word, 1, mask=m_counted, sem="relaxed")
    else:
        arguments = [words + o_word * 4, m_counted.to(tl.int32)]
        tl.inline_asm_elementwise(COUNT_ASM, "=r,r,r", arguments, tl.int32, is_pure=False, pack=1)


@jit
def scatter(p_out, o_out, b_value, m_out, PLAIN: constexpr):
    """Like tl.store of 32 bits, without a layout conversion."""
    if PLAIN:
        tl.store(p_out + o_out, b_value, mask=m_out)
    else:
        arguments = [p_out.to(tl.int64), o_out, b_value, m_out.to(tl.int32)]
        tl.inline_asm_elementwise(SCATTER_ASM, "=r,l,r,r,r", arguments, tl.int32, is_pure=False, pack=1)


@jit
def gather(p_x, o_x, m_x, PLAIN: constexpr):
    """Like tl.load of int32, without a layout conversion; 0 if masked."""
    if PLAIN:
        return tl.load(p_x + o_x, mask=m_x, other=0.0).to(tl.int32, bitcast=True)
    else:
        arguments = [p_x.to(tl.int64), o_x, m_x.to(tl.int32)]
        return tl.inline_asm_elementwise(GATHER_ASM, "=r,l,r,r", arguments, tl.int32, is_pure=False, pack=1)
