"""KV cache writes of a step: keys and values from a fused projection into plain pages, and pages into the block table.

T rows, H query heads, K key/value heads, D head dim, P pairs that RoPE turns, X = (s H + 2 K) D, S slots, R rows that are
not padding, U updates, each (place in the flat block table, page id), N rows of the table, P pages of a row

Query heads of a row lie s = `query_step` heads apart: 1, or 2 if the gate of each follows it. RoPE turns elements i and i + P
of a head, the first 2 P; the others stay as they are.

`write_kv` norms and rotates heads and returns the queries; `scatter_pages` updates single places of the table.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast.kernels.native_library import native_for
from holdfast.kernels.norm import rms_norm_reference
from holdfast.kernels.operation import DECLINED, operation, pdl_flags
from holdfast.kernels.triton_compat import constexpr, jit, next_power_of_two, release_then_wait, tl

# Kernels bind a name and read it under the same constexpr condition.
# pyright: reportPossiblyUnboundVariable=false


ELEMENTS_PER_PROGRAM = 2048
"""Elements of whole heads per program: with 4 warps a thread holds 16 bytes of each half of a head. Independent of the number
of rows, so a row's sums have one order."""
NUM_WARPS = 4


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """RMS norms over head_dim for query and key heads; weights of any type."""

    q_weight_D: Tensor
    k_weight_D: Tensor
    eps: float
    offset: float = 0.0
    """Added to the weights, in float32."""


@dataclass(frozen=True, slots=True)
class Rotary:
    """cos and sin of a step's rows, a column per pair of elements. There may be more rows than the step has; padding is arbitrary."""

    cos_TP: Tensor
    sin_TP: Tensor

    @property
    def dim(self) -> int:
        """Number of elements that RoPE rotates."""
        return 2 * self.cos_TP.shape[1]

    def at(self, rows_R: Tensor | list[int] | slice) -> "Rotary":
        return Rotary(self.cos_TP[rows_R], self.sin_TP[rows_R])

    def back(self) -> "Rotary":
        """Return the inverse rotation."""
        return Rotary(self.cos_TP, -self.sin_TP)

    def check_layout(self) -> None:
        """Assert the strides that kernels rely on."""
        cos_TP, sin_TP = self.cos_TP, self.sin_TP
        assert cos_TP.stride() == sin_TP.stride(), f"{cos_TP.stride()=} and {sin_TP.stride()=} differ"
        assert cos_TP.stride(1) == 1, f"{cos_TP.stride()=}: the columns of a row must lie side by side"


def _write_kv_native(
    qkv_TX: Tensor,
    slots_T: Tensor,
    k_plane_SKD: Tensor,
    v_plane_SKD: Tensor,
    head_norm: HeadNorm | None,
    rotary: Rotary | None,
    out_THD: Tensor | None = None,
    query_step: int = 1,
) -> Tensor:
    """Like `write_kv`, in C, for float32."""
    norms = (head_norm.q_weight_D, head_norm.k_weight_D) if head_norm else (None, None)
    tables = (rotary.cos_TP, rotary.sin_TP) if rotary else (None, None)
    out = None if out_THD is None else out_THD[:0]
    library = native_for(qkv_TX[:0], k_plane_SKD, v_plane_SKD, *norms, *tables, out)
    if library is None:
        return DECLINED
    _, num_kv_heads, head_dim = k_plane_SKD.shape
    num_rows, num_heads = len(qkv_TX), num_query_heads(qkv_TX, num_kv_heads, head_dim, query_step)
    shape, num_pairs = (num_rows, num_heads, head_dim), 0 if rotary is None else num_turned_pairs(rotary, head_dim)
    q_THD = out_THD if out_THD is not None and out_THD.is_contiguous() else qkv_TX.new_empty(shape)
    rows_TX = qkv_TX.contiguous()  # a single row always is contiguous, and several must give the same bits
    pointers = [0 if tensor is None else tensor.data_ptr() for tensor in (*tables, *norms)]
    library.holdfast_write_heads(
        rows_TX.data_ptr(), slots_T.data_ptr(), *pointers, head_norm.eps if head_norm else 0.0,
        head_norm.offset if head_norm else 0.0, q_THD.data_ptr(), k_plane_SKD.data_ptr(), v_plane_SKD.data_ptr(),
        *(num_rows, num_heads, num_kv_heads, head_dim, num_pairs, query_step),
    )  # fmt: skip
    return q_THD if out_THD is None or q_THD is out_THD else out_THD.copy_(q_THD)


def write_kv_reference(
    qkv_TX: Tensor,
    slots_T: Tensor,
    k_plane_SKD: Tensor,
    v_plane_SKD: Tensor,
    head_norm: HeadNorm | None,
    rotary: Rotary | None,
    out_THD: Tensor | None = None,
    query_step: int = 1,
) -> Tensor:
    """Write keys and values of each row to its slot; return queries as [T, H, D], in `out_THD` if given.

    A row with a negative slot is padding: it stores nothing, and its queries are zeros. `out_THD` may be the query part of
    `qkv_TX`. Rows and slots may be strided.
    """
    _, num_kv_heads, head_dim = k_plane_SKD.shape
    q_THD, k_TKD, v_TKD = turned_heads(qkv_TX, num_kv_heads, head_dim, head_norm, rotary, query_step)
    used_T = slots_T >= 0
    rows_R = used_T.nonzero().squeeze(1)
    slots_R = slots_T[rows_R]
    k_plane_SKD.index_copy_(0, slots_R, k_TKD[rows_R].to(k_plane_SKD.dtype))
    v_plane_SKD.index_copy_(0, slots_R, v_TKD[rows_R].to(v_plane_SKD.dtype))
    q_THD = torch.where(used_T[:, None, None], q_THD, 0)
    return q_THD if out_THD is None else out_THD.copy_(q_THD)


def turned_heads(
    qkv_TX: Tensor,
    num_kv_heads: int,
    head_dim: int,
    head_norm: HeadNorm | None,
    rotary: Rotary | None,
    query_step: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    """Norm and rotate queries, keys and values of a fused projection in plain torch: [T, H, D] and twice [T, K, D]."""
    heads_TXD = qkv_TX.unflatten(-1, (-1, head_dim))
    num_before = heads_TXD.shape[1] - 2 * num_kv_heads
    q_THD, k_TKD, v_TKD = heads_TXD.split((num_before, num_kv_heads, num_kv_heads), dim=1)
    q_THD = q_THD[:, ::query_step]
    if head_norm is not None:
        q_THD = rms_norm_reference(q_THD, head_norm.q_weight_D, head_norm.eps, offset=head_norm.offset)
        k_TKD = rms_norm_reference(k_TKD, head_norm.k_weight_D, head_norm.eps, offset=head_norm.offset)
    if rotary is not None:
        cos_TP, sin_TP = rotary.cos_TP[: len(qkv_TX)], rotary.sin_TP[: len(qkv_TX)]
        cos_T1Y = torch.cat((cos_TP, cos_TP), dim=-1).unsqueeze(1)
        sin_T1Y = torch.cat((-sin_TP, sin_TP), dim=-1).unsqueeze(1)
        q_THD, k_TKD = _rotate(q_THD, cos_T1Y, sin_T1Y), _rotate(k_TKD, cos_T1Y, sin_T1Y)
    return q_THD, k_TKD, v_TKD


def in_pair_order(x_XD: Tensor, rope_dim: int) -> Tensor:
    """Order elements of heads so that RoPE, which turns the first `rope_dim`, turns places i and i + D / 2.

    The elements that stay become pairs too, which turn by nothing. This is how quantized pages and their tables hold keys.
    """
    pairs, half = rope_dim // 2, x_XD.shape[-1] // 2
    if pairs == half:
        return x_XD
    left = x_XD[..., :pairs], x_XD[..., 2 * pairs : half + pairs]
    return torch.cat((*left, x_XD[..., pairs : 2 * pairs], x_XD[..., half + pairs :]), dim=-1)


def write_kv_triton(
    qkv_TX: Tensor,
    slots_T: Tensor,
    k_plane_SKD: Tensor,
    v_plane_SKD: Tensor,
    head_norm: HeadNorm | None,
    rotary: Rotary | None,
    out_THD: Tensor | None = None,
    query_step: int = 1,
) -> Tensor:
    """Launch one program per block of heads of a row; it rounds where the reference rounds."""
    _, num_kv_heads, head_dim = k_plane_SKD.shape
    num_rows, num_heads = len(qkv_TX), num_query_heads(qkv_TX, num_kv_heads, head_dim, query_step)
    q_THD = qkv_TX.new_empty(num_rows, num_heads, head_dim) if out_THD is None else out_THD
    assert qkv_TX.stride(1) == 1, f"{qkv_TX.stride()=}: the elements of a row must lie side by side"
    for heads in (q_THD, k_plane_SKD, v_plane_SKD):
        assert heads.stride()[1:] == (head_dim, 1), f"{heads.stride()=}: the heads of a row must lie side by side"
    if rotary is not None:
        rotary.check_layout()
    if num_rows:
        half_block = next_power_of_two(-(-head_dim // 2))
        total_heads = num_heads + 2 * num_kv_heads
        heads = min(max(1, ELEMENTS_PER_PROGRAM // (2 * half_block)), next_power_of_two(total_heads))
        _write_kv_kernel[(num_rows * -(-total_heads // heads),)](
            qkv_TX, slots_T, k_plane_SKD, v_plane_SKD, q_THD, head_norm.q_weight_D if head_norm else None,
            head_norm.k_weight_D if head_norm else None, rotary.cos_TP if rotary else None,
            rotary.sin_TP if rotary else None, head_norm.eps if head_norm else 0.0, qkv_TX.stride(0),
            k_plane_SKD.stride(0), v_plane_SKD.stride(0), q_THD.stride(0), rotary.cos_TP.stride(0) if rotary else 0,
            OFFSET=head_norm.offset if head_norm else 0.0, NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim, PAIRS=num_turned_pairs(rotary, head_dim) if rotary else -(-head_dim // 2), QUERY_STEP=query_step,
            HEADS=heads, HALF_BLOCK=half_block, num_warps=NUM_WARPS, **pdl_flags(qkv_TX),
        )  # fmt: skip
    return q_THD


write_kv = operation(reference=write_kv_reference, triton=write_kv_triton, native=_write_kv_native)


@jit
def _write_kv_kernel(
    p_qkv, p_slots, p_k_plane, p_v_plane, p_q, p_q_norm, p_k_norm, p_cosine, p_sine, eps, qkv_stride, k_stride,
    v_stride, q_stride, rotary_stride,
    OFFSET: constexpr, NUM_HEADS: constexpr, NUM_KV_HEADS: constexpr, HEAD_DIM: constexpr, PAIRS: constexpr,
    QUERY_STEP: constexpr, HEADS: constexpr, HALF_BLOCK: constexpr, PDL: constexpr,
):  # fmt: skip
    # A head is two blocks, left and right: RoPE pairs equal indices. Elements that it leaves alone fill up both blocks.
    HALF: constexpr = (HEAD_DIM + 1) // 2
    IS_WHOLE: constexpr = PAIRS == HALF
    NUM_BLOCKS: constexpr = (NUM_HEADS + 2 * NUM_KV_HEADS + HEADS - 1) // HEADS
    i_program = tl.program_id(0)
    i_row = (i_program // NUM_BLOCKS).to(tl.int64)
    i_slot = tl.load(p_slots + i_row).to(tl.int64)
    o_head = (i_program % NUM_BLOCKS) * HEADS + tl.arange(0, HEADS)
    o_d = tl.arange(0, HALF_BLOCK)
    m_left, m_right = o_d < HALF, o_d < HEAD_DIM - HALF
    o_left, o_right, m_turned = 0, HALF, m_right
    if not IS_WHOLE:
        m_turned = o_d < PAIRS
        o_left, o_right = tl.where(m_turned, 0, PAIRS), tl.where(m_turned, PAIRS, HALF)
    m_head = o_head < NUM_HEADS + 2 * NUM_KV_HEADS
    m_query = (o_head < NUM_HEADS)[:, None]
    m_key = ((o_head >= NUM_HEADS) & (o_head < NUM_HEADS + NUM_KV_HEADS))[:, None]
    m_value = (o_head >= NUM_HEADS + NUM_KV_HEADS)[:, None]

    o_x = o_head[:, None] * HEAD_DIM + o_d[None, :]
    m_x_left, m_x_right = m_head[:, None] & m_left[None, :], m_head[:, None] & m_right[None, :]
    p_x = p_qkv + i_row * qkv_stride + o_x
    if QUERY_STEP > 1:
        p_x += ((QUERY_STEP - 1) * HEAD_DIM) * tl.minimum(o_head, NUM_HEADS)[:, None]

    # Constants are loaded before the wait.
    if p_q_norm is not None:
        b_q_left = tl.load(p_q_norm + o_left + o_d, mask=m_left, other=0.0).to(tl.float32)[None, :]
        b_q_right = tl.load(p_q_norm + o_right + o_d, mask=m_right, other=0.0).to(tl.float32)[None, :]
        b_k_left = tl.load(p_k_norm + o_left + o_d, mask=m_left, other=0.0).to(tl.float32)[None, :]
        b_k_right = tl.load(p_k_norm + o_right + o_d, mask=m_right, other=0.0).to(tl.float32)[None, :]
        if OFFSET != 0.0:
            b_q_left, b_q_right = b_q_left + OFFSET, b_q_right + OFFSET
            b_k_left, b_k_right = b_k_left + OFFSET, b_k_right + OFFSET
    release_then_wait(PDL)
    if p_cosine is not None:
        o_table = i_row * rotary_stride + o_d
        b_cos = tl.load(p_cosine + o_table, mask=m_turned, other=0.0).to(tl.float32)[None, :]
        b_sin = tl.load(p_sine + o_table, mask=m_turned, other=0.0).to(tl.float32)[None, :]
    b_left = tl.load(p_x + o_left, mask=m_x_left, other=0.0).to(tl.float32)
    b_right = tl.load(p_x + o_right, mask=m_x_right, other=0.0).to(tl.float32)

    if p_q_norm is not None:
        b_scale = tl.rsqrt(tl.sum(b_left * b_left + b_right * b_right, axis=1) / HEAD_DIM + eps)[:, None]
        b_normed_left = b_left * b_scale * tl.where(m_query, b_q_left, b_k_left)
        b_normed_right = b_right * b_scale * tl.where(m_query, b_q_right, b_k_right)
        b_left = tl.where(m_value, b_left, b_normed_left.to(p_qkv.dtype.element_ty).to(tl.float32))
        b_right = tl.where(m_value, b_right, b_normed_right.to(p_qkv.dtype.element_ty).to(tl.float32))

    if p_cosine is not None:
        b_along_left = (b_left * b_cos).to(p_cosine.dtype.element_ty).to(tl.float32)
        b_along_right = (b_right * b_cos).to(p_cosine.dtype.element_ty).to(tl.float32)
        b_turned_left = (b_along_left - b_right * b_sin).to(p_cosine.dtype.element_ty).to(tl.float32)
        b_turned_right = (b_along_right + b_left * b_sin).to(p_cosine.dtype.element_ty).to(tl.float32)
        m_same = m_value if IS_WHOLE else m_value | (m_turned == 0)[None, :]
        b_left = tl.where(m_same, b_left, b_turned_left)
        b_right = tl.where(m_same, b_right, b_turned_right)

    m_padding = i_slot < 0
    p_y = p_q + i_row * q_stride + o_x
    tl.store(p_y + o_left, tl.where(m_padding, 0.0, b_left).to(p_q.dtype.element_ty), mask=m_x_left & m_query)
    tl.store(p_y + o_right, tl.where(m_padding, 0.0, b_right).to(p_q.dtype.element_ty), mask=m_x_right & m_query)
    p_y = p_k_plane + i_slot * k_stride + (o_x - NUM_HEADS * HEAD_DIM)
    m_key = m_key & (i_slot >= 0)
    tl.store(p_y + o_left, b_left.to(p_k_plane.dtype.element_ty), mask=m_x_left & m_key)
    tl.store(p_y + o_right, b_right.to(p_k_plane.dtype.element_ty), mask=m_x_right & m_key)
    p_y = p_v_plane + i_slot * v_stride + (o_x - (NUM_HEADS + NUM_KV_HEADS) * HEAD_DIM)
    m_value = m_value & (i_slot >= 0)
    tl.store(p_y + o_left, b_left.to(p_v_plane.dtype.element_ty), mask=m_x_left & m_value)
    tl.store(p_y + o_right, b_right.to(p_v_plane.dtype.element_ty), mask=m_x_right & m_value)


def _rotate(x_THD: Tensor, cos_T1Y: Tensor, sin_T1Y: Tensor) -> Tensor:
    """Rotate as many elements as cos and sin have; the others stay."""
    rope_dim = cos_T1Y.shape[-1]
    if rope_dim < x_THD.shape[-1]:
        return torch.cat((_rotate(x_THD[..., :rope_dim], cos_T1Y, sin_T1Y), x_THD[..., rope_dim:]), dim=-1)
    swapped_THD = x_THD.unflatten(-1, (2, -1)).flip(-2).flatten(-2)
    return torch.addcmul(x_THD * cos_T1Y, swapped_THD, sin_T1Y)


def num_query_heads(qkv_TX: Tensor, num_kv_heads: int, head_dim: int, query_step: int) -> int:
    """Return the query heads of a fused projection."""
    num_before = qkv_TX.shape[1] // head_dim - 2 * num_kv_heads
    assert num_before % query_step == 0, f"{num_before} heads before the keys, {query_step} for each query"
    return num_before // query_step


def num_turned_pairs(rotary: Rotary, head_dim: int) -> int:
    """Return the pairs of a head that RoPE turns."""
    assert rotary.dim <= head_dim, f"RoPE of {rotary.dim} elements for {head_dim=}"
    return rotary.dim // 2


PADDING = -1
"""Place of an update that kernels skip."""
BLOCK = 16
"""Updates per program. Lists are padded to whole blocks: a length argument would add specializations."""


def scatter_pages_reference(updates_U2: Tensor, table_NP: Tensor) -> None:
    """Set table.flat[place] = page for each update; places are unique."""
    places_U, pages_U = updates_U2[updates_U2[:, 0] != PADDING].unbind(1)
    table_NP.view(-1)[places_U] = pages_U.to(table_NP.dtype)


def scatter_pages_triton(updates_U2: Tensor, table_NP: Tensor) -> None:
    """Launch one program per block of the list."""
    num_updates = updates_U2.shape[0]
    assert num_updates % BLOCK == 0, f"{num_updates=} is not a multiple of {BLOCK=}"
    assert updates_U2.is_contiguous(), f"{updates_U2.stride()=} is not dense"
    assert table_NP.is_contiguous(), f"{table_NP.stride()=} is not dense"
    if num_updates:
        _scatter_pages_kernel[(num_updates // BLOCK,)](updates_U2, table_NP, PADDING=PADDING, BLOCK=BLOCK, num_warps=1)


scatter_pages = operation(reference=scatter_pages_reference, triton=scatter_pages_triton)


@jit
def _scatter_pages_kernel(p_updates, p_table, PADDING: constexpr, BLOCK: constexpr):
    i_block = tl.program_id(0).to(tl.int64)
    o_update = i_block * BLOCK + tl.arange(0, BLOCK)
    b_place = tl.load(p_updates + 2 * o_update)
    b_page = tl.load(p_updates + 2 * o_update + 1)
    tl.store(p_table + b_place, b_page.to(p_table.dtype.element_ty), mask=b_place != PADDING)
