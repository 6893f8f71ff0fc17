"""What the products of a few rows share: how a weight is cut, parts along K added up, and a residual sum left for the next norm.

M rows, N outputs, K inputs
"""

# ruff: noqa: ANN001, ANN201 the arguments of kernels have no types

from holdfast.kernels.triton_compat import constexpr, jit, tl

MAX_ROWS = 16
"""Beyond it cuBLAS is faster, with the norms, gates and sums as kernels of their own."""
BLOCK_N = 64
"""Outputs of a program, for two rows and more."""
PROGRAMS = 128
"""About as many as a large GPU has multiprocessors: fewer leave some of them idle."""
MAX_PARTS = 8


def row_form(num_rows: int) -> bool:
    """Whether one row is multiplied where it is loaded: what of a launch follows from the number of rows."""
    return num_rows == 1


def num_parts(size_n: int, size_k: int, block_k: int) -> int:
    """Parts along K for a weight of this shape: enough programs, and whole blocks of K in each."""
    parts = 1
    while -(-size_n // BLOCK_N) * parts < PROGRAMS and parts < MAX_PARTS and size_k % (2 * parts * block_k) == 0:
        parts *= 2
    return parts


@jit
def summed_parts(p_part, part_size, m_nm, NUM_PARTS: constexpr):
    """All parts of a block of outputs in their order, as other programs have left them."""
    b_y = tl.load(p_part, mask=m_nm, other=0.0, cache_modifier=".cg")
    for i in tl.static_range(1, NUM_PARTS):
        b_y += tl.load(p_part + i * part_size, mask=m_nm, other=0.0, cache_modifier=".cg")
    return b_y


@jit
def leave_row(b_y, p_y, p_norm_weight, p_scaled, p_squares, i_n, o_n, m_n):
    """One row: x + y, and of it the next norm's half-done input and its squares; x + y and that input come back."""
    b_x = tl.load(p_y + o_n, mask=m_n, other=0.0).to(tl.float32)
    b_y = (b_x + b_y.to(p_y.dtype.element_ty).to(tl.float32)).to(p_y.dtype.element_ty).to(tl.float32)
    b_norm = tl.load(p_norm_weight + o_n, mask=m_n, other=0.0).to(tl.float32)
    b_scaled = (b_y * b_norm).to(p_scaled.dtype.element_ty)
    tl.store(p_scaled + o_n, b_scaled, mask=m_n)
    tl.store(p_squares + i_n, tl.sum(tl.where(m_n, b_y * b_y, 0.0), axis=0))
    return b_y, b_scaled


@jit
def leave_rows(b_y, p_y, p_norm_weight, p_scaled, p_squares, i_n, o_n, o_m, o_y, m_n, m_m):
    """The same for a block of outputs of all rows, as [N, M]."""
    m_nm = m_n[:, None] & m_m[None, :]
    b_old = tl.load(p_y + o_y, mask=m_nm, other=0.0).to(tl.float32)
    b_y = (b_old + b_y.to(p_y.dtype.element_ty).to(tl.float32)).to(p_y.dtype.element_ty).to(tl.float32)
    b_norm = tl.load(p_norm_weight + o_n, mask=m_n, other=0.0).to(tl.float32)
    b_scaled = (b_y * b_norm[:, None]).to(p_scaled.dtype.element_ty)
    tl.store(p_scaled + o_y, b_scaled, mask=m_nm)
    b_squares = tl.sum(tl.where(m_n[:, None], b_y * b_y, 0.0), axis=0)
    tl.store(p_squares + o_m * tl.num_programs(0) + i_n, b_squares, mask=m_m)
    return b_y, b_scaled
