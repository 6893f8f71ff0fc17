"""Attention of rows to quantized keys and values over pages, straight from the codes: nothing is dequantized into memory.

T rows, H query heads, K key/value heads, G = H / K, D head dim, N rows of the page table, P pages of a row,
C split-KV partials

The work is the same list of tiles that plain pages take (tiled_attention.py). Small tiles go to quantized_decode.py, large
ones to quantized_prefill.py, and splits are merged here. Queries come in the space of the keys, rotated where these are;
outputs leave in the space of the model.
"""

from typing import NamedTuple

import torch

from holdfast.kernels.attention.key_bias import KeyBias, KeyTurns, key_bias_rows
from holdfast.kernels.attention.quantized_decode import decode_kernel
from holdfast.kernels.attention.quantized_planes import QuantizedPlanes
from holdfast.kernels.attention.quantized_prefill import prefill_kernel
from holdfast.kernels.attention.split_kv import (
    LOG2_E,
    MERGE_BY_HEAD_ROWS,
    MERGED_HEADS,
    MERGED_SPLITS,
    merge_head,
    merge_heads,
)
from holdfast.kernels.attention.tiled_attention import TileWork
from holdfast.kernels.geometry import BLOCK_TOKENS, QUANTIZED_LARGE_TILE, TileGeometry, pair_columns
from holdfast.kernels.triton_compat import constexpr, is_interpreted, jit, pdl_launch, supports_pdl, tl
from holdfast.kernels.triton_compat import next_power_of_two as pow2
from holdfast.quant.kv_quantize import (
    KEY_PARTS,
    VALUE_PARTS,
    dequantize_keys,
    dequantize_values,
    hadamard_block,
    rotate_heads,
)

# ruff: noqa: ANN001, ANN202 the arguments of kernels have no types

SMALL_COLUMNS = 8
"""Rows times heads of a small tile: what one tensor-core instruction has beside sixteen tokens."""
SMALL_PROGRAMS_PER_SM = 8
SMALL_REGISTERS = 232
"""Of a thread: so many that a multiprocessor has room for just the programs it is to get, and none gets more than another."""


class LargeShape(NamedTuple):
    """How large tiles are run."""

    rows: int
    """Of queries times heads."""
    warps: int
    stages: int
    programs_per_sm: int


def large_shape(key_bits: int) -> LargeShape:
    """Keys of 8 bits fill two programs of a multiprocessor; more to compute for each key wants more rows to share it."""
    return LargeShape(QUANTIZED_LARGE_TILE, 4, 2, 2) if key_bits == 8 else LargeShape(128, 8, 1, 1)


def quantized_geometry(num_heads: int, num_kv_heads: int, key_bits: int, value_bits: int) -> TileGeometry:
    """How tiles are cut; measured on an H200 (docs/log.md)."""
    group = num_heads // num_kv_heads
    return TileGeometry(
        small_rows=max(1, SMALL_COLUMNS // group),
        large_rows=max(1, large_shape(key_bits).rows // group),
        small_programs_per_sm=SMALL_PROGRAMS_PER_SM,
        large_programs_per_sm=large_shape(key_bits).programs_per_sm,
        block_tokens=BLOCK_TOKENS,
        has_aligned_starts=True,
        takes_whole_turns=True,
    )


def row_form(num_rows: int) -> int:
    """Heads of a program that merges: what of a launch follows from the number of rows."""
    return 1 if num_rows <= MERGE_BY_HEAD_ROWS else MERGED_HEADS


def quantized_attention(
    q_THD: torch.Tensor,
    planes: QuantizedPlanes,
    page_table_NP: torch.Tensor,
    work: TileWork,
    scale: float,
    window: int | None,
    partial_out_CX: torch.Tensor,
    partial_lse_CH: torch.Tensor,
    out_TX: torch.Tensor,
    num_sms: int,
    sinks_H: torch.Tensor | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Each row sees its sequence's tokens up to its own position (the newest `window` of them): [T, H * D].

    Sinks and soft-capping are as in tiled_attention.py; a score is capped with what the bias of the keys adds to it.
    """
    _, num_heads, head_dim = q_THD.shape
    group, pdl, plain = num_heads // planes.num_kv_heads, supports_pdl(q_THD), is_interpreted()
    arguments = (
        q_THD,
        planes.k_codes_PKtB,
        planes.k_signs_PKtS,
        planes.k_scale_PKt,
        planes.v_codes_PKtB.view(torch.int16),
        None if planes.v_signs_PKtS is None else planes.v_signs_PKtS.view(torch.int16),
        planes.v_scale_PKt,
        planes.rotation_DD,
        out_TX,
        partial_out_CX,
        partial_lse_CH,
        page_table_NP,
        work.tiles_X8,
        *_key_bias_tables(planes.key_bias),
        sinks_H,
        page_table_NP.stride(0),
        scale * LOG2_E,
        None if softcap is None else softcap * LOG2_E,
        hadamard_block(head_dim) ** -0.5,
        window or 0,
    )
    key_parts = KEY_PARTS[planes.key_bits]
    if planes.key_bits == 3 and head_dim % 32 == 0 and not plain:
        key_parts *= 2  # the kernel takes both halves of a row at once
    constants = {
        "KEY_BITS": planes.key_bits,
        "VALUE_BITS": planes.value_bits,
        "NUM_KV_HEADS": planes.num_kv_heads,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "PAGE_TOKENS": planes.page_tokens,
        "HAS_WINDOW": window is not None,
        "HAS_KEY_BIAS": planes.key_bias is not None,
        "BLOCK_N": BLOCK_TOKENS,
        "VALUE_COLUMNS": max(16, pow2(head_dim // VALUE_PARTS[planes.value_bits])),
        "PAIR_COLUMNS": pair_columns(head_dim),
        "PLAIN": plain,
        "PDL": pdl,
    }
    if work.has_small:
        limited = {} if plain else {"maxnreg": SMALL_REGISTERS}
        decode_kernel[(num_sms * SMALL_PROGRAMS_PER_SM,)](
            *arguments,
            **constants,
            BLOCK_G=max(SMALL_COLUMNS, pow2(group)),
            BLOCK_D=max(16, pow2(head_dim)),
            KEY_COLUMNS=max(16, pow2(head_dim // key_parts)),
            NUM_STAGES=2 if planes.key_bits == planes.value_bits == 8 else 3,
            num_warps=1,
            **limited,
            **pdl_launch(pdl),
        )
    if work.has_large:
        large = large_shape(planes.key_bits)
        prefill_kernel[(num_sms * large.programs_per_sm,)](
            *arguments,
            **constants,
            BLOCK_M=max(large.rows, pow2(group)),
            BLOCK_D=VALUE_PARTS[planes.value_bits] * constants["VALUE_COLUMNS"],
            KEY_COLUMNS=max(16, pow2(head_dim // KEY_PARTS[planes.key_bits])),
            NUM_STAGES=large.stages,
            num_warps=large.warps,
            **pdl_launch(pdl),
        )
    if work.has_merge:
        _merge(planes, work, partial_out_CX, partial_lse_CH, sinks_H, out_TX, q_THD.shape, pdl)
    return out_TX


def quantized_attention_reference(
    q_THD: torch.Tensor,
    planes: QuantizedPlanes,
    page_table_NP: torch.Tensor,
    work: TileWork,
    scale: float,
    window: int | None,
    partial_out_CX: torch.Tensor,
    partial_lse_CH: torch.Tensor,
    out_TX: torch.Tensor,
    num_sms: int,
    sinks_H: torch.Tensor | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """The same in plain torch, a row at a time over all its tokens, without splits."""
    num_rows, num_heads, head_dim = q_THD.shape
    out_THD = out_TX.view(num_rows, num_heads, head_dim)
    group, page_tokens = num_heads // planes.num_kv_heads, planes.page_tokens
    num_small, num_large = work.tiles_X8[0, :2].tolist()
    num_tiles = num_small * work.has_small + num_large * work.has_large
    rows: dict[int, tuple[int, int]] = {}
    for table_row, row, count, position, *_ in work.tiles_X8[1 : 1 + num_tiles].tolist():
        rows |= {row + i: (table_row, position + i) for i in range(count)}
    for row, (table_row, position) in rows.items():
        first = 0 if window is None else max(0, position - window + 1)
        token_L = torch.arange(first, position + 1, device=q_THD.device)
        page_L, offset_L = page_table_NP[table_row, token_L // page_tokens].long(), token_L % page_tokens
        k_LKD = dequantize_keys(planes.keys_at(page_L, offset_L), planes.key_bits, head_dim)
        v_LKD = dequantize_values(planes.values_at(page_L, offset_L), planes.value_bits, head_dim)
        if planes.key_bias is not None:
            bias_LKD = key_bias_rows(planes.key_bias, token_L).transpose(0, 1)
            k_LKD = k_LKD + (rotate_heads(bias_LKD) if planes.rotates_keys else bias_LKD)
        scores_HL = torch.einsum("hd,lhd->hl", q_THD[row].float(), k_LKD.repeat_interleave(group, dim=1)) * scale
        if softcap is not None:
            scores_HL = softcap * torch.tanh(scores_HL / softcap)
        out_HD = torch.einsum("hl,lhd->hd", scores_HL.softmax(-1), v_LKD.repeat_interleave(group, dim=1))
        if sinks_H is not None:
            out_HD = out_HD * torch.sigmoid(scores_HL.logsumexp(-1) - sinks_H).unsqueeze(-1)
        out_THD[row] = (rotate_heads(out_HD) if planes.rotates_values else out_HD).to(out_TX.dtype)
    if work.has_merge:
        out_THD[work.rows_T2[:num_rows, 1] == 0] = 0
    return out_TX


def _key_bias_tables(key_bias: KeyBias | None) -> tuple[torch.Tensor | None, ...]:
    """In the order of the kernels' arguments."""
    if key_bias is None:
        return (None,) * (1 + len(KeyTurns._fields))
    assert key_bias.turns.fragments_F is not None, f"{key_bias.turns.near_2NC.dtype=}: these tables are not for kernels"
    for table in (key_bias.bias_KD, *key_bias.turns):
        assert table is not None and table.is_contiguous(), "the rows of a table must lie side by side"  # noqa: PT018
    return key_bias.bias_KD, *key_bias.turns


def _merge(
    planes: QuantizedPlanes,
    work: TileWork,
    partial_out_CX: torch.Tensor,
    partial_lse_CH: torch.Tensor,
    sinks_H: torch.Tensor | None,
    out_TX: torch.Tensor,
    shape_THD: torch.Size,
    pdl: bool,
) -> None:
    num_rows, num_heads, head_dim = shape_THD
    heads = row_form(num_rows)
    _merge_kernel[(num_rows, -(-num_heads // heads))](
        out_TX,
        partial_out_CX,
        partial_lse_CH,
        sinks_H,
        work.rows_T2,
        planes.rotation_DD,
        hadamard_block(head_dim) ** -0.5,
        NUM_HEADS=num_heads,
        HEADS=heads,
        HEAD_DIM=head_dim,
        ROTATES=planes.rotates_values,
        BLOCK_S=MERGED_SPLITS,
        BLOCK_D=max(16, pow2(head_dim)),
        PDL=pdl,
        num_warps=4,
        **pdl_launch(pdl),
    )


@jit
def _merge_kernel(
    p_out,
    p_partial_out,
    p_partial_lse,
    p_sinks,
    p_rows,
    p_rotation,
    rotation_scale,
    NUM_HEADS: constexpr,
    HEADS: constexpr,
    HEAD_DIM: constexpr,
    ROTATES: constexpr,
    BLOCK_S: constexpr,
    BLOCK_D: constexpr,
    PDL: constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    first_partial = tl.load(p_rows + i_row * 2).to(tl.int64)
    num_splits = tl.load(p_rows + i_row * 2 + 1)
    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < HEAD_DIM
    if ROTATES and num_splits > 1:
        p_table = p_rotation + o_d[:, None] * HEAD_DIM + o_d[None, :]
        b_table = tl.load(p_table, mask=m_d[:, None] & m_d[None, :], other=0.0)
    else:
        b_table = tl.zeros((BLOCK_D, BLOCK_D), dtype=p_rotation.dtype.element_ty)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if num_splits == 1:
        return
    if HEADS == 1:
        i_head = tl.program_id(1)
        b_out = merge_head(
            p_partial_out,
            p_partial_lse,
            p_sinks,
            first_partial,
            num_splits,
            i_head,
            NUM_HEADS,
            HEAD_DIM,
            BLOCK_S,
            BLOCK_D,
        )
        if ROTATES:
            b_out = tl.sum(b_table.to(tl.float32) * b_out[:, None], axis=0) * rotation_scale
        p_y = p_out + (i_row * NUM_HEADS + i_head) * HEAD_DIM + o_d
        tl.store(p_y, b_out.to(p_out.dtype.element_ty), mask=m_d)
    else:
        # Tensor cores rotate eight heads at once: heads stand beside their coordinates.
        o_head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
        b_out = merge_heads(
            p_partial_out, p_partial_lse, p_sinks, first_partial, num_splits, o_head, 1, NUM_HEADS, HEAD_DIM, BLOCK_D
        )
        if ROTATES:
            b_out = tl.dot(b_table.to(tl.float16), b_out.to(tl.float16)) * rotation_scale
        p_y = p_out + (i_row * NUM_HEADS + o_head)[None, :] * HEAD_DIM + o_d[:, None]
        tl.store(p_y, b_out.to(p_out.dtype.element_ty), mask=m_d[:, None] & (o_head < NUM_HEADS)[None, :])
