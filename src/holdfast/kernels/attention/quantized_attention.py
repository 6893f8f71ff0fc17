"""Attention of rows to quantized keys and values over pages, straight from the codes: nothing is dequantized into memory.

T rows, H query heads, K key/value heads, G = H / K, D head dim, C split-KV partials

The work is the list of tiles of tiled_attention.py. Small tiles run quantized_decode.py, large ones quantized_prefill.py.
Queries come in the space of the keys, rotated if these are; outputs leave in the space of the model.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.kernels.attention.key_bias import KeyBias, KeyTurns, key_bias_rows
from holdfast.kernels.attention.quantized_decode import decode_kernel
from holdfast.kernels.attention.quantized_planes import QuantizedPlanes
from holdfast.kernels.attention.quantized_prefill import prefill_kernel
from holdfast.kernels.attention.split_kv import LOG2_E, MERGE_BY_HEAD_ROWS, MERGED_HEADS, MergeShape, merge_tiles
from holdfast.kernels.attention.tiled_attention import TileCall
from holdfast.kernels.geometry import BLOCK_TOKENS, QUANTIZED_LARGE_TILE, TileGeometry, pair_columns
from holdfast.kernels.triton_compat import is_interpreted, pdl_launch, supports_pdl
from holdfast.kernels.triton_compat import next_power_of_two as pow2
from holdfast.quant.kv_quantize import (
    KEY_PARTS,
    VALUE_PARTS,
    dequantize_keys,
    dequantize_values,
    hadamard_block,
    rotate_heads,
)

SMALL_COLUMNS = 8
"""Rows times heads of a small tile: one tensor-core instruction takes them with sixteen tokens."""
SMALL_PROGRAMS_PER_SM = 8
SMALL_REGISTERS = 232
"""Registers per thread: a multiprocessor then holds exactly SMALL_PROGRAMS_PER_SM programs."""


class LargeShape(NamedTuple):
    """The launch of large tiles."""

    rows: int
    """Rows times heads."""
    warps: int
    stages: int
    programs_per_sm: int


def large_shape(key_bits: int) -> LargeShape:
    """Two programs per multiprocessor for 8-bit keys; keys that cost more to decode are shared by more rows."""
    return LargeShape(QUANTIZED_LARGE_TILE, 4, 2, 2) if key_bits == 8 else LargeShape(128, 8, 1, 1)


def quantized_geometry(num_heads: int, num_kv_heads: int, key_bits: int, value_bits: int) -> TileGeometry:
    """Return the tile sizes; measured on an H200 (docs/log.md)."""
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
    """Heads per program of the merge: the part of a launch that depends on the number of rows."""
    return 1 if num_rows <= MERGE_BY_HEAD_ROWS else MERGED_HEADS


def quantized_attention(call: TileCall, planes: QuantizedPlanes) -> Tensor:
    """Like `tiled_attention` over quantized pages: [T, H * D]. The soft cap applies to scores with the bias of the keys."""
    _, num_heads, head_dim = call.q_THD.shape
    group, pdl, plain = num_heads // planes.num_kv_heads, supports_pdl(call.q_THD), is_interpreted()
    scale, window, sinks_H, softcap = call.scoring
    rotation_scale = hadamard_block(head_dim) ** -0.5
    arguments = (
        call.q_THD, planes.k_codes_PKtB, planes.k_signs_PKtS, planes.k_scale_PKt,
        planes.v_codes_PKtB.view(torch.int16),
        None if planes.v_signs_PKtS is None else planes.v_signs_PKtS.view(torch.int16), planes.v_scale_PKt,
        planes.rotation_DD, call.out_TX, *call.partials, call.page_table_NP, call.work.tiles_X8,
        *_key_bias_tables(planes.key_bias), sinks_H, call.page_table_NP.stride(0), scale * LOG2_E,
        None if softcap is None else softcap * LOG2_E, rotation_scale, window or 0,
    )  # fmt: skip
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
    } | pdl_launch(pdl)
    if call.work.has_small:
        limited = {} if plain else {"maxnreg": SMALL_REGISTERS}
        decode_kernel[(call.num_sms * SMALL_PROGRAMS_PER_SM,)](
            *arguments, **constants, BLOCK_G=max(SMALL_COLUMNS, pow2(group)), BLOCK_D=max(16, pow2(head_dim)),
            KEY_COLUMNS=max(16, pow2(head_dim // key_parts)),
            NUM_STAGES=2 if planes.key_bits == planes.value_bits == 8 else 3, num_warps=1, **limited,
        )  # fmt: skip
    if call.work.has_large:
        large = large_shape(planes.key_bits)
        prefill_kernel[(call.num_sms * large.programs_per_sm,)](
            *arguments, **constants, BLOCK_M=max(large.rows, pow2(group)),
            BLOCK_D=VALUE_PARTS[planes.value_bits] * constants["VALUE_COLUMNS"],
            KEY_COLUMNS=max(16, pow2(head_dim // KEY_PARTS[planes.key_bits])),
            NUM_STAGES=large.stages, num_warps=large.warps,
        )  # fmt: skip
    if call.work.has_merge:
        heads = row_form(len(call.q_THD))
        out_THD, shape = call.out_TX.view(call.q_THD.shape), MergeShape(heads, head_dim, heads == 1)
        rotation = (planes.rotation_DD if planes.rotates_values else None, rotation_scale)
        merge_tiles(call.work.rows_T2, call.partials, out_THD, shape, sinks_H=sinks_H, rotation=rotation)
    return call.out_TX


def quantized_attention_reference(call: TileCall, planes: QuantizedPlanes) -> Tensor:
    """Like `quantized_attention` in plain torch, one row at a time over all its tokens, without splits."""
    (num_rows, num_heads, head_dim), q_THD, work = call.q_THD.shape, call.q_THD, call.work
    scale, window, sinks_H, softcap = call.scoring
    out_THD = call.out_TX.view(q_THD.shape)
    group, page_tokens = num_heads // planes.num_kv_heads, planes.page_tokens
    num_small, num_large = work.tiles_X8[0, :2].tolist()
    num_tiles = num_small * work.has_small + num_large * work.has_large
    rows: dict[int, tuple[int, int]] = {}
    for table_row, row, count, position, *_ in work.tiles_X8[1 : 1 + num_tiles].tolist():
        rows |= {row + i: (table_row, position + i) for i in range(count)}
    for row, (table_row, position) in rows.items():
        first = 0 if window is None else max(0, position - window + 1)
        token_L = torch.arange(first, position + 1, device=q_THD.device)
        page_L, offset_L = call.page_table_NP[table_row, token_L // page_tokens].long(), token_L % page_tokens
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
        out_THD[row] = (rotate_heads(out_HD) if planes.rotates_values else out_HD).to(out_THD.dtype)
    if work.has_merge:
        out_THD[work.rows_T2[:num_rows, 1] == 0] = 0
    return call.out_TX


def _key_bias_tables(key_bias: KeyBias | None) -> tuple[Tensor | None, ...]:
    """Return the tables in the order of the kernels' arguments."""
    if key_bias is None:
        return (None,) * (1 + len(KeyTurns._fields))
    assert key_bias.turns.fragments_F is not None, f"{key_bias.turns.near_2NC.dtype=}: these tables are not for kernels"
    for table in (key_bias.bias_KD, *key_bias.turns):
        assert table is not None and table.is_contiguous(), "the rows of a table must lie side by side"  # noqa: PT018
    return key_bias.bias_KD, *key_bias.turns
