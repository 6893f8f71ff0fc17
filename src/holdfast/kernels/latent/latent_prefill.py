"""Up-projected latent attention (MLA) of one prompt's rows: chunks of its latents become keys and values of every head.

T rows, N query heads, D = P + R elements of a query head, L latent, V value elements of a head, W tokens of a chunk, G heads of
a group, X elements of a latent row, of a head's rows of kv_b, C splits of a chunk

The latents of a chunk are gathered from their pages and multiplied by kv_b, one product for a group of heads. Rows attend to
the result and keep a normalized output with the logarithm of its sum, from which the next chunk continues. So a context of any
length takes the same scratch (kernels/up_projection.py). All heads share the rotated part of keys, which stays in the latent
rows. The host launches these kernels: such steps are in no graph.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.kernels.attention.split_kv import LOG2_E, clear_end, finite_max
from holdfast.kernels.fp8 import as_kernels_read, e4m3_value, float32_of
from holdfast.kernels.latent.latent_planes import LatentPlanes, read_tokens
from holdfast.kernels.operation import operation
from holdfast.kernels.triton_compat import constexpr, jit_counting, next_power_of_two, shared_bytes, tl
from holdfast.kernels.up_projection import TILE_ROWS, UpProjection, num_splits
from holdfast.quant.formats import LATENT_TILE
from holdfast.quant.latent_quantize import LATENT_CODEBOOK

# Kernels bind a name and read it under the same constexpr condition.
# pyright: reportPossiblyUnboundVariable=false

GATHERED_TOKENS = 8
"""Tokens per program that gathers latents."""
MERGED_ROWS = 16
"""Rows per program that merges splits."""


def attend_up_projected_reference(
    q_TND: Tensor,
    kv_b_NXL: Tensor,
    planes: LatentPlanes,
    page_row_P: Tensor,
    start: int,
    scale: float,
    scratch: Mapping[str, Tensor],
    out_TNV: Tensor,
) -> Tensor:
    """Attend rows of one sequence, the first at position `start`, to all tokens up to their own; both may be strided.

    Queries are rotated, and the rows' own latents are in their pages. `scratch` holds the tensors of `expanded_specs`.
    """
    del scratch
    (num_rows, _, query_dim), latent_dim = q_TND.shape, planes.latent_dim
    nope_dim = query_dim - planes.rope_dim
    num_tokens = start + num_rows
    rows_SX = q_TND.new_empty(num_tokens, latent_dim + planes.rope_dim, dtype=torch.float32)
    gather_latents_reference(planes, page_row_P, 0, num_tokens, rows_SX)
    token_S = torch.arange(num_tokens, device=q_TND.device)
    expanded_SNX = torch.einsum("sl,nxl->snx", rows_SX[:, :latent_dim], kv_b_NXL.float())
    scores_NTS = torch.einsum("tnp,snp->nts", q_TND[..., :nope_dim].float(), expanded_SNX[..., :nope_dim])
    scores_NTS += torch.einsum("tnr,sr->nts", q_TND[..., nope_dim:].float(), rows_SX[:, latent_dim:])
    is_seen_TS = token_S[start:].unsqueeze(1) >= token_S
    weights_NTS = (scores_NTS * scale).masked_fill(~is_seen_TS, -torch.inf).softmax(dim=-1)
    return out_TNV.copy_(torch.einsum("nts,snv->tnv", weights_NTS, expanded_SNX[..., nope_dim:]).to(out_TNV.dtype))


class _Chunk(NamedTuple):
    """Chunk of tokens, up-projected for a group of heads."""

    first: int
    rows_WX: Tensor
    expanded_WX: Tensor
    """[W, G * (P + V)]."""


def attend_up_projected_triton(
    q_TND: Tensor,
    kv_b_NXL: Tensor,
    planes: LatentPlanes,
    page_row_P: Tensor,
    start: int,
    scale: float,
    scratch: Mapping[str, Tensor],
    out_TNV: Tensor,
) -> Tensor:
    """Launch Triton kernels around one product per chunk and group of heads."""
    shape = _shape_of(q_TND, kv_b_NXL, planes, out_TNV)
    room, state = scratch["up_projected"], scratch["up_projected_state"]
    assert room.dtype == q_TND.dtype == kv_b_NXL.dtype, f"{room.dtype=} {q_TND.dtype=} {kv_b_NXL.dtype=}"
    group = shape.group_heads(len(q_TND))
    tokens, state_rows = shape.chunk_tokens(group, room.numel()), shape.state_rows(state.numel())
    at_once = len(q_TND)
    if start + len(q_TND) > tokens:
        # Rows over several chunks need a state: process equal batches that fit into it.
        at_once = -(-len(q_TND) // -(-len(q_TND) // max(1, state_rows // group)))
    gathered: tuple[int, int] | None = None
    for row in range(0, len(q_TND), at_once):
        rows = slice(row, min(row + at_once, len(q_TND)))
        end = start + rows.stop
        splits = num_splits(rows.stop - row, group, min(tokens, end), state_rows)
        for head in range(0, shape.num_heads, group):
            heads = slice(head, min(head + group, shape.num_heads))
            weight_XL, q_TGD, out_TGV = kv_b_NXL[heads].flatten(0, 1), q_TND[rows, heads], out_TNV[rows, heads]
            for first in range(0, end, tokens):
                count = min(tokens, end - first)
                chunk = _chunk(room, tokens, first, count, shape, len(weight_XL))
                if gathered != (first, count):
                    gather_latents_triton(planes, page_row_P, first, count, chunk.rows_WX)
                    gathered = first, count
                torch.mm(chunk.rows_WX[:, : shape.latent_dim], weight_XL.t(), out=chunk.expanded_WX)
                is_last = first + count == end
                _attend_chunk(q_TGD, chunk, start + row, scale, shape, splits, is_last, state, out_TGV)
            if splits > 1:
                _merge(state, splits, shape, out_TGV)
    return out_TNV


attend_up_projected = operation(reference=attend_up_projected_reference, triton=attend_up_projected_triton)


def _shape_of(q_TND: Tensor, kv_b_NXL: Tensor, planes: LatentPlanes, out_TNV: Tensor) -> UpProjection:
    num_heads, expanded_dim, latent_dim = kv_b_NXL.shape
    value_dim, nope_dim = out_TNV.shape[-1], q_TND.shape[-1] - planes.rope_dim
    assert latent_dim == planes.latent_dim, f"{kv_b_NXL.shape=} for latents of {planes.latent_dim}"
    assert expanded_dim == nope_dim + value_dim, f"{kv_b_NXL.shape=} {q_TND.shape=} {out_TNV.shape=}"
    assert q_TND.shape[:2] == out_TNV.shape[:2], f"{q_TND.shape=} {out_TNV.shape=}"
    assert q_TND.shape[1] == num_heads, f"{q_TND.shape=} by the weights of {num_heads} heads"
    assert kv_b_NXL.is_contiguous(), f"{kv_b_NXL.shape} with strides {kv_b_NXL.stride()}"
    for tensor in (q_TND, out_TNV):
        assert tensor.stride(2) == 1, f"{tensor.shape} with strides {tensor.stride()}"
    return UpProjection(num_heads, latent_dim, planes.rope_dim, nope_dim, value_dim)


def _chunk(room: Tensor, tokens: int, first: int, count: int, shape: UpProjection, num_outputs: int) -> _Chunk:
    """Return views. Latent rows of all chunks are at the same place, so they stay for the next group of heads."""
    row_dim = shape.latent_dim + shape.rope_dim
    rows_WX = room[: count * row_dim].view(count, row_dim)
    expanded_WX = room[tokens * row_dim :][: count * num_outputs].view(count, num_outputs)
    return _Chunk(first, rows_WX, expanded_WX)


def gather_latents_reference(
    planes: LatentPlanes, page_row_P: Tensor, first: int, count: int, out_WX: Tensor
) -> Tensor:
    """Dequantize `count` tokens of a sequence from `first` on: [W, L + R]; TurboQuant latents stay in the rotated space."""
    token_W = torch.arange(first, first + count, device=out_WX.device)
    return out_WX.copy_(read_tokens(planes, page_row_P, token_W, out_WX.dtype))


def gather_latents_triton(planes: LatentPlanes, page_row_P: Tensor, first: int, count: int, out_WX: Tensor) -> Tensor:
    """Launch one program per GATHERED_TOKENS tokens."""
    assert out_WX.shape == (count, planes.latent_dim + planes.rope_dim), f"{out_WX.shape=} for {count} of {planes}"
    assert out_WX.is_contiguous(), f"{out_WX.shape} with strides {out_WX.stride()}"
    rows = planes.rows_SX if planes.kind == "plain" else planes.rows_SX.view(torch.int16)
    scales, rope = planes.scales_SC, planes.rope_SR
    if planes.kind == "fp8_ds_mla":
        scales, rope = planes.rows_SX.view(torch.float32), planes.rows_SX.view(torch.int16)
        rows = planes.rows_SX
    rope = rows if rope is None else as_kernels_read(rope)
    scales = rows if scales is None else scales
    _gather_kernel[(-(-count // GATHERED_TOKENS),)](
        rows, scales, rope, page_row_P, out_WX, first, count, rows.stride(0), scales.stride(0), rope.stride(0),
        KIND=planes.kind, LATENT=planes.latent_dim, ROPE=planes.rope_dim, PAGE_TOKENS=planes.page_tokens,
        SCALE_TILE=LATENT_TILE, MAGNITUDES=LATENT_CODEBOOK.magnitudes, SMALL_ROPE=planes.has_small_rope,
        BLOCK_W=GATHERED_TOKENS, BLOCK_L=next_power_of_two(planes.latent_dim),
        BLOCK_R=next_power_of_two(max(1, planes.rope_dim)), num_warps=4,
    )  # fmt: skip
    return out_WX


@jit_counting("p_pages", "first", "count")
def _gather_kernel(
    p_rows, p_scales, p_rope, p_pages, p_out, first, count, row_stride, scale_stride, rope_stride,
    KIND: constexpr, LATENT: constexpr, ROPE: constexpr, PAGE_TOKENS: constexpr, SCALE_TILE: constexpr,
    MAGNITUDES: constexpr, SMALL_ROPE: constexpr, BLOCK_W: constexpr, BLOCK_L: constexpr, BLOCK_R: constexpr,
):  # fmt: skip
    o_w = tl.program_id(0) * BLOCK_W + tl.arange(0, BLOCK_W)
    m_w = o_w < count
    b_page = tl.load(p_pages + (first + o_w) // PAGE_TOKENS, mask=m_w, other=0).to(tl.int64)
    o_slot = (b_page * PAGE_TOKENS + (first + o_w) % PAGE_TOKENS)[:, None]
    m_w = m_w[:, None]
    o_l = tl.arange(0, BLOCK_L)[None, :]
    o_r = tl.arange(0, BLOCK_R)[None, :]
    m_l = m_w & (o_l < LATENT)
    m_r = m_w & (o_r < ROPE)
    if KIND == "plain":
        b_latent = tl.load(p_rows + o_slot * row_stride + o_l, mask=m_l, other=0.0)
        b_rope = tl.load(p_rows + o_slot * row_stride + LATENT + o_r, mask=m_r, other=0.0)
    elif KIND == "fp8_ds_mla":
        NUM_TILES: constexpr = (LATENT + SCALE_TILE - 1) // SCALE_TILE
        b_codes = tl.load(p_rows + o_slot * row_stride + o_l, mask=m_l, other=0)
        b_scale = tl.load(p_scales + o_slot * scale_stride + LATENT // 4 + o_l // SCALE_TILE, mask=m_l, other=0.0)
        b_latent = e4m3_value(b_codes.to(tl.int32)) * b_scale
        o_rope = (LATENT + 4 * NUM_TILES) // 2 + o_r
        b_rope = float32_of(tl.load(p_rope + o_slot * rope_stride + o_rope, mask=m_r, other=0))
    else:
        # A 16-bit word holds codes of coordinates that are a quarter of the latent apart.
        QUARTER: constexpr = LATENT // 4
        b_words = tl.load(p_rows + o_slot * row_stride + o_l % QUARTER, mask=m_l, other=0).to(tl.int32)
        b_code = b_words >> 4 * (o_l // QUARTER) & 15
        b_number = tl.where(b_code < 8, 7 - b_code, b_code - 8)
        b_size = tl.full(b_code.shape, MAGNITUDES[0], tl.float32)
        for i in tl.static_range(1, 8):
            b_size = tl.where(b_number == i, MAGNITUDES[i], b_size)
        b_scale = tl.load(p_scales + o_slot * scale_stride, mask=m_w, other=0.0).to(tl.float32)
        b_latent = tl.where(b_code < 8, -b_size, b_size) * b_scale
        b_rope = tl.load(p_rope + o_slot * rope_stride + o_r, mask=m_r, other=0)
        if SMALL_ROPE:
            b_scale = tl.load(p_scales + o_slot * scale_stride + 1, mask=m_w, other=0.0).to(tl.float32)
            b_rope = e4m3_value(b_rope.to(tl.int32)) * b_scale
        else:
            b_rope = float32_of(b_rope)
    p_y = p_out + o_w.to(tl.int64)[:, None] * (LATENT + ROPE)
    tl.store(p_y + o_l, b_latent.to(p_out.dtype.element_ty), mask=m_l)
    tl.store(p_y + LATENT + o_r, b_rope.to(p_out.dtype.element_ty), mask=m_r)


class _Blocks(NamedTuple):
    """Block sizes of a head: the part of a key without RoPE is one power of two, or the sum of two."""

    nope: int
    more_nope: int
    rope: int
    value: int

    @classmethod
    def of(cls, shape: UpProjection) -> "_Blocks":
        nope = 1 << shape.nope_dim.bit_length() - 1
        more = next_power_of_two(shape.nope_dim - nope) if shape.nope_dim > nope else 0
        return cls(nope, more, next_power_of_two(shape.rope_dim), next_power_of_two(shape.value_dim))

    @property
    def key(self) -> int:
        return self.nope + self.more_nope + self.rope


class _Tile(NamedTuple):
    """Blocks and pipeline stages of a program's loads."""

    tokens: int
    num_stages: int
    num_warps: int


TILES = (_Tile(64, 3, 8), _Tile(64, 2, 8), _Tile(32, 2, 8), _Tile(16, 2, 8))
"""Choices of tiles, the fastest on an H200 first."""


def _tile_of(blocks: _Blocks, element_bytes: int, shared_bytes: int) -> _Tile:
    """Return the fastest tile whose queries, and keys and values of all stages, fit into shared memory."""
    held, of_token = TILE_ROWS * blocks.key * element_bytes, (blocks.key + blocks.value) * element_bytes
    fitting = (tile for tile in TILES if held + tile.tokens * tile.num_stages * of_token <= shared_bytes)
    return next(fitting, TILES[-1])


def _attend_chunk(
    q_TGD: Tensor,
    chunk: _Chunk,
    position: int,
    scale: float,
    shape: UpProjection,
    splits: int,
    is_last: bool,
    state: Tensor,
    out_TGV: Tensor,
) -> None:
    """Attend rows from `position` on to a chunk; write the output if it is the last and not split."""
    (num_rows, num_heads, _), count = q_TGD.shape, len(chunk.rows_WX)
    blocks = _Blocks.of(shape)
    tile = _tile_of(blocks, q_TGD.element_size(), shared_bytes(q_TGD))
    _attend_kernel[(-(-num_rows // TILE_ROWS) * splits, num_heads)](
        q_TGD, chunk.expanded_WX, chunk.rows_WX, out_TGV, state,
        state[splits * num_rows * num_heads * shape.value_dim :], num_rows, position, chunk.first, count, splits,
        int(is_last and splits == 1), scale * LOG2_E, *q_TGD.stride()[:2], *out_TGV.stride()[:2],
        chunk.expanded_WX.stride(0),
        LATENT=shape.latent_dim, NOPE=shape.nope_dim, ROPE=shape.rope_dim, VALUE=shape.value_dim, BLOCK_M=TILE_ROWS,
        BLOCK_N=tile.tokens, BLOCK_P=blocks.nope, BLOCK_P2=blocks.more_nope, BLOCK_R=blocks.rope, BLOCK_V=blocks.value,
        NUM_STAGES=tile.num_stages, num_warps=tile.num_warps,
    )  # fmt: skip


@jit_counting("num_rows", "position", "first", "count", "splits", "to_output")
def _attend_kernel(
    p_q, p_expanded, p_latents, p_out, p_state, p_lse, num_rows, position, first, count, splits, to_output, scale_log2,
    q_row, q_head, out_row, out_head, expanded_row,
    LATENT: constexpr, NOPE: constexpr, ROPE: constexpr, VALUE: constexpr, BLOCK_M: constexpr, BLOCK_N: constexpr,
    BLOCK_P: constexpr, BLOCK_P2: constexpr, BLOCK_R: constexpr, BLOCK_V: constexpr, NUM_STAGES: constexpr,
):  # fmt: skip
    i_head = tl.program_id(1)
    i_split = tl.program_id(0) % splits
    # The last rows see most tokens, so they start first.
    i_tile = tl.num_programs(0) // splits - 1 - tl.program_id(0) // splits
    o_m = i_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    m_m = o_m < num_rows
    o_n = tl.arange(0, BLOCK_N)
    o_p = tl.arange(0, BLOCK_P)
    o_r = tl.arange(0, BLOCK_R)
    o_v = tl.arange(0, BLOCK_V)
    m_r = o_r < ROPE
    m_v = o_v < VALUE
    # Tokens count from the first of the chunk; a split has whole blocks of the tokens that some row sees.
    row_position = position - first + o_m
    seen = tl.minimum(count, position - first + tl.minimum((i_tile + 1) * BLOCK_M, num_rows))
    piece = tl.cdiv(tl.cdiv(seen, splits), BLOCK_N) * BLOCK_N
    low = tl.minimum(i_split * piece, seen)
    high = tl.minimum(low + piece, seen)
    p_rows = p_q + o_m.to(tl.int64)[:, None] * q_row + i_head * q_head
    b_q = tl.load(p_rows + o_p[None, :], mask=m_m[:, None], other=0.0)
    b_q_rope = tl.load(p_rows + NOPE + o_r[None, :], mask=m_m[:, None] & m_r[None, :], other=0.0)
    if BLOCK_P2:
        o_p2 = BLOCK_P + tl.arange(0, BLOCK_P2)
        m_p2 = o_p2 < NOPE
        b_q2 = tl.load(p_rows + o_p2[None, :], mask=m_m[:, None] & m_p2[None, :], other=0.0)
    o_state = (i_split * num_rows + o_m).to(tl.int64) * tl.num_programs(1) + i_head
    m_state = m_m[:, None] & m_v[None, :]
    # State of earlier chunks. A runtime condition, so one specialization takes every chunk.
    is_next = first > 0
    b_acc = tl.load(p_state + o_state[:, None] * VALUE + o_v[None, :], mask=m_state & is_next, other=0.0)
    b_m = tl.load(p_lse + o_state, mask=m_m & is_next, other=-float("inf"))
    b_l = tl.where(b_m == -float("inf"), 0.0, 1.0)
    p_keys = p_expanded + i_head * (NOPE + VALUE)
    clear = clear_end(low, high, position - first + i_tile * BLOCK_M, False, BLOCK_N)
    for MASKED in tl.static_range(2):
        begin = clear if MASKED else low
        end = high if MASKED else clear
        for n in tl.range(begin, end, BLOCK_N, num_stages=NUM_STAGES):
            o_token = n + o_n
            m_n = o_token < high
            o_key = o_token.to(tl.int64) * expanded_row
            o_latent = o_token.to(tl.int64) * (LATENT + ROPE) + LATENT
            p_k = p_keys + o_key[None, :]
            if MASKED:
                b_k = tl.load(p_k + o_p[:, None], mask=m_n[None, :], other=0.0)
            else:
                b_k = tl.load(p_k + o_p[:, None])
            m_k_rope = m_r[:, None] & m_n[None, :] if MASKED else m_r[:, None]
            b_k_rope = tl.load(p_latents + o_latent[None, :] + o_r[:, None], mask=m_k_rope, other=0.0)
            b_score = tl.dot(b_q, b_k)
            b_score = tl.dot(b_q_rope, b_k_rope, b_score)
            if BLOCK_P2:
                m_k2 = m_p2[:, None] & m_n[None, :] if MASKED else m_p2[:, None]
                b_k2 = tl.load(p_k + o_p2[:, None], mask=m_k2, other=0.0)
                b_score = tl.dot(b_q2, b_k2, b_score)
            if MASKED:
                m_seen = (row_position[:, None] >= o_token[None, :]) & m_n[None, :]
                b_score = tl.where(m_seen, b_score, -float("inf"))
            b_m_new = tl.maximum(b_m, tl.max(b_score, axis=1) * scale_log2)
            b_m_safe = finite_max(b_m_new) if MASKED else b_m_new
            b_p = tl.exp2(b_score * scale_log2 - b_m_safe[:, None])
            b_alpha = tl.exp2(b_m - b_m_safe)
            b_l = b_l * b_alpha + tl.sum(b_p, axis=1)
            m_value = m_v[None, :] & m_n[:, None] if MASKED else m_v[None, :]
            b_v = tl.load(p_keys + o_key[:, None] + NOPE + o_v[None, :], mask=m_value, other=0.0)
            b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * b_alpha[:, None])
            b_m = b_m_new
    # If a row sees nothing of a split, its partial is neutral: zeros, with -inf as lse.
    b_acc = b_acc / tl.where(b_l > 0, b_l, 1.0)[:, None]
    if to_output:
        p_y = p_out + o_m.to(tl.int64)[:, None] * out_row + i_head * out_head + o_v[None, :]
        tl.store(p_y, b_acc.to(p_out.dtype.element_ty), mask=m_state)
    else:
        tl.store(p_state + o_state[:, None] * VALUE + o_v[None, :], b_acc, mask=m_state)
        tl.store(p_lse + o_state, b_m + tl.log2(b_l), mask=m_m)


def _merge(state: Tensor, splits: int, shape: UpProjection, out_TGV: Tensor) -> None:
    """Merge splits into the output."""
    num_rows, num_heads, value_dim = out_TGV.shape
    _merge_kernel[(-(-num_rows // MERGED_ROWS), num_heads)](
        state, state[splits * num_rows * num_heads * value_dim :], out_TGV, num_rows, splits, *out_TGV.stride()[:2],
        VALUE=shape.value_dim, BLOCK_M=MERGED_ROWS, BLOCK_V=next_power_of_two(shape.value_dim), num_warps=4,
    )  # fmt: skip


@jit_counting("num_rows", "splits")
def _merge_kernel(
    p_state, p_lse, p_out, num_rows, splits, out_row, out_head, VALUE: constexpr, BLOCK_M: constexpr, BLOCK_V: constexpr
):
    i_head = tl.program_id(1)
    o_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_v = tl.arange(0, BLOCK_V)
    m_m = o_m < num_rows
    m_mv = m_m[:, None] & (o_v < VALUE)[None, :]
    b_acc = tl.zeros((BLOCK_M, BLOCK_V), dtype=tl.float32)
    b_m = tl.full((BLOCK_M,), -float("inf"), dtype=tl.float32)
    b_l = tl.zeros((BLOCK_M,), dtype=tl.float32)
    for split in range(splits):
        o_state = (split * num_rows + o_m).to(tl.int64) * tl.num_programs(1) + i_head
        b_lse = tl.load(p_lse + o_state, mask=m_m, other=-float("inf"))
        b_part = tl.load(p_state + o_state[:, None] * VALUE + o_v[None, :], mask=m_mv, other=0.0)
        b_m_new = tl.maximum(b_m, b_lse)
        b_m_safe = finite_max(b_m_new)
        b_alpha = tl.exp2(b_m - b_m_safe)
        b_p = tl.exp2(b_lse - b_m_safe)
        b_acc = b_acc * b_alpha[:, None] + b_part * b_p[:, None]
        b_l = b_l * b_alpha + b_p
        b_m = b_m_new
    b_acc = b_acc / tl.where(b_l > 0, b_l, 1.0)[:, None]
    p_y = p_out + o_m.to(tl.int64)[:, None] * out_row + i_head * out_head + o_v[None, :]
    tl.store(p_y, b_acc.to(p_out.dtype.element_ty), mask=m_mv)
