"""Depthwise causal convolution of a step's rows with silu; each sequence keeps its newest inputs.

T rows, C channels, W taps, P places, N sequences

A row's output has the taps of its own input and of the W-1 before it. Those before a piece come from the sequence's
state, or are zeros before position 0. A state holds the newest W-1 inputs, the newest last.

With draft tokens (kernels/state/kept_drafts.py) a step convolves the accepted ones of the last step again: outputs go to
scratch, for the recurrence. The state then holds the inputs up to the one row of the sequence, and the slot keeps those
of its draft tokens.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.kernels.operation import operation, pdl_flags
from holdfast.kernels.state.kept_drafts import KeptDrafts
from holdfast.kernels.state.state_geometry import CHUNK_ROWS, MAX_CONV_WIDTH, MIN_CONV_WIDTH
from holdfast.kernels.state.state_rows import (
    CLEARED_ROWS,
    Piece,
    StateRows,
    by_whole_vectors,
    clear_padded_rows,
    draft_counts,
    single_row,
)
from holdfast.kernels.triton_compat import constexpr, jit, jit_counting, next_power_of_two, release_then_wait, tl

ROW_CHANNELS = 256
"""Channels per program of single rows."""
TILE_ROWS, TILE_CHANNELS = 32, 128
"""Rows and channels that a program of a chunk computes at once."""


def causal_conv_reference(
    x_TC: Tensor,
    rows: StateRows,
    weight_CW: Tensor,
    conv_PCW: Tensor,
    out_TC: Tensor,
    bias_C: Tensor | None = None,
    kept: KeptDrafts | None = None,
) -> None:
    """out = silu(conv(x)), rounded once; states in `conv_PCW` [P, C, W-1] advance. Padding becomes zeros.

    `out_TC` must not overlap x, because programs read inputs of other rows. Rows of x and out may lie apart.
    `kept`: what the slots keep of draft tokens, if steps have any.
    """
    _check_layout(x_TC, rows, weight_CW, conv_PCW, out_TC, kept)
    weights, singles = (weight_CW, bias_C), rows.single_rows()
    counts = rows.draft_counts(singles) if kept is not None else []
    for piece, (num_accepted, _) in zip(singles, counts, strict=False):
        if kept is not None and num_accepted:
            x_DC, out_DC = kept.x_SDC[piece.place, :num_accepted], kept.accepted_SDC[piece.place, :num_accepted]
            out_DC.copy_(_convolve_rows(x_DC, conv_PCW[piece.place], *weights))
    if singles:
        _convolve_singles(x_TC, singles, weight_CW, conv_PCW, out_TC, bias_C)
    for piece, (_, num_drafts) in zip(singles, counts, strict=False):
        if kept is not None and num_drafts:
            own = slice(piece.row + 1, piece.row + 1 + num_drafts)
            out_TC[own] = _convolve_rows(x_TC[own], conv_PCW[piece.place].clone(), *weights)
            kept.x_SDC[piece.place, :num_drafts] = x_TC[own]
    for piece in rows.long_pieces():
        _convolve_piece(x_TC, piece, weight_CW, conv_PCW, out_TC, bias_C)
    rows.clear_padding(out_TC)


def _convolve_singles(
    x_TC: Tensor, pieces: list[Piece], weight_CW: Tensor, conv_PCW: Tensor, out_TC: Tensor, bias_C: Tensor | None
) -> None:
    rows_N, _, places_N, starts_N = torch.tensor(pieces).unbind(1)
    x_NC, before_NCW = x_TC[rows_N], conv_PCW[places_N]
    before_NCW[starts_N == 0] = 0
    out_TC[rows_N] = _silu_of_taps([*before_NCW.unbind(2), x_NC], weight_CW, bias_C).to(out_TC.dtype)
    conv_PCW[places_N] = torch.cat((before_NCW[:, :, 1:], x_NC.unsqueeze(2)), dim=2)


def _convolve_rows(x_NC: Tensor, conv_CW: Tensor, weight_CW: Tensor, bias_C: Tensor | None) -> Tensor:
    """Return outputs of rows that come one by one; the state of their sequence advances."""
    width = weight_CW.shape[1]
    inputs_NC = torch.cat((conv_CW.T, x_NC))
    conv_CW.copy_(inputs_NC[len(x_NC) :].T)
    taps = [inputs_NC[tap : tap + len(x_NC)] for tap in range(width)]
    return _silu_of_taps(taps, weight_CW, bias_C).to(x_NC.dtype)


def _convolve_piece(
    x_TC: Tensor, piece: Piece, weight_CW: Tensor, conv_PCW: Tensor, out_TC: Tensor, bias_C: Tensor | None
) -> None:
    row, num_rows, place, start = piece
    width = weight_CW.shape[1]
    before_WC = conv_PCW[place].T if start else x_TC.new_zeros((width - 1, x_TC.shape[1]))
    x_NC = torch.cat((before_WC, x_TC[row : row + num_rows]))
    for first in range(0, num_rows, CHUNK_ROWS):
        size = min(CHUNK_ROWS, num_rows - first)
        taps = [x_NC[first + tap : first + tap + size] for tap in range(width)]
        out_TC[row + first : row + first + size] = _silu_of_taps(taps, weight_CW, bias_C).to(out_TC.dtype)
    conv_PCW[place] = x_NC[num_rows:].T


def _silu_of_taps(inputs: list[Tensor], weight_CW: Tensor, bias_C: Tensor | None) -> Tensor:
    """Return silu of the sum over taps in float32, the oldest input first."""
    weight_WC = weight_CW.float().T.contiguous()
    y = inputs[0].float() * weight_WC[0]
    for tap in range(1, len(inputs)):
        y += inputs[tap].float() * weight_WC[tap]
    return by_whole_vectors(F.silu, y if bias_C is None else y.add_(bias_C.float()))


def _check_layout(
    x_TC: Tensor, rows: StateRows, weight_CW: Tensor, conv_PCW: Tensor, out_TC: Tensor, kept: KeptDrafts | None
) -> None:
    num_channels, width = weight_CW.shape
    if kept is not None:
        assert rows.drafts_T is not None, "draft tokens are kept, and rows do not say which they are"
        assert kept.x_SDC.dtype == x_TC.dtype, f"{kept.x_SDC.dtype=} for inputs in {x_TC.dtype}"
        kept.check(num_channels)
    assert MIN_CONV_WIDTH <= width <= MAX_CONV_WIDTH, f"{width} taps"
    assert x_TC.shape == out_TC.shape, f"{out_TC.shape=} for {x_TC.shape=}"
    assert x_TC.shape[1] == num_channels, f"{x_TC.shape=} for {num_channels} channels"
    assert conv_PCW.shape[1:] == (num_channels, width - 1), f"{conv_PCW.shape=} for {weight_CW.shape=}"
    assert conv_PCW.dtype == x_TC.dtype, f"states in {conv_PCW.dtype} for inputs in {x_TC.dtype}"
    assert x_TC.stride(1) == out_TC.stride(1) == 1, "the channels of a row must lie side by side"
    assert conv_PCW[:1].is_contiguous(), f"{conv_PCW.stride()=}: a state must be dense"
    assert weight_CW.is_contiguous(), f"{weight_CW.stride()=}"


def causal_conv_triton(
    x_TC: Tensor,
    rows: StateRows,
    weight_CW: Tensor,
    conv_PCW: Tensor,
    out_TC: Tensor,
    bias_C: Tensor | None = None,
    kept: KeptDrafts | None = None,
) -> None:
    """Launch programs over single rows, and over chunks if there are any, by block of channels.

    The program of a piece's first chunk reads the state and writes the next one; no other program of the piece does.
    """
    _check_layout(x_TC, rows, weight_CW, conv_PCW, out_TC, kept)
    num_rows, num_channels = x_TC.shape
    x_SDC, accepted_SDC = (None, None) if kept is None else (kept.x_SDC, kept.accepted_SDC)
    max_drafts = 0 if kept is None else kept.num_drafts
    strides = x_TC.stride(0), out_TC.stride(0), conv_PCW.stride(0)
    flags = pdl_flags(x_TC)
    if num_rows == 0:
        return
    num_seqs = num_rows if rows.sequences_N4 is None else len(rows.sequences_N4)
    num_tails = 0 if rows.sequences_N4 is None else -(-num_rows // CLEARED_ROWS)
    _conv_row_kernel[(num_seqs + num_tails, -(-num_channels // ROW_CHANNELS))](
        x_TC, rows.places_T, rows.positions_T, rows.sequences_N4, rows.drafts_T if max_drafts else None, weight_CW,
        bias_C, conv_PCW, out_TC, x_SDC, accepted_SDC, *strides, num_seqs, num_rows, NUM_CHANNELS=num_channels,
        WIDTH=weight_CW.shape[1], MAX_DRAFTS=max_drafts, BLOCK_D=next_power_of_two(max(max_drafts, 1)),
        BLOCK_C=ROW_CHANNELS, TILE=CLEARED_ROWS, num_warps=4, **flags,
    )  # fmt: skip
    if rows.chunks_M4 is None:
        return
    assert rows.sequences_N4 is not None, "a step with chunks lists its sequences"
    _conv_chunk_kernel[(len(rows.chunks_M4), -(-num_channels // TILE_CHANNELS))](
        x_TC, rows.sequences_N4, rows.chunks_M4, weight_CW, bias_C, conv_PCW, out_TC, *strides,
        NUM_CHANNELS=num_channels, WIDTH=weight_CW.shape[1], BLOCK_C=TILE_CHANNELS, TILE=TILE_ROWS,
        CHUNK=CHUNK_ROWS, num_warps=4, **flags,
    )  # fmt: skip


causal_conv = operation(reference=causal_conv_reference, triton=causal_conv_triton)


@jit_counting("num_seqs", "num_rows")
def _conv_row_kernel(
    p_x, p_places, p_positions, p_sequences, p_drafts, p_weight, p_bias, p_conv, p_out, p_kept, p_accepted,
    x_stride, out_stride, conv_stride, num_seqs, num_rows,
    NUM_CHANNELS: constexpr, WIDTH: constexpr, MAX_DRAFTS: constexpr, BLOCK_D: constexpr, BLOCK_C: constexpr,
    TILE: constexpr, PDL: constexpr,
):  # fmt: skip
    release_then_wait(PDL)
    i_seq = tl.program_id(0)
    o_c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    m_c = o_c < NUM_CHANNELS
    if i_seq >= num_seqs:
        clear_padded_rows(p_out, out_stride, p_places, (i_seq - num_seqs) * TILE, num_rows, o_c, m_c, TILE)
    else:
        i_row, is_single, i_place, start = single_row(p_places, p_positions, p_sequences, i_seq)
        if is_single:
            if i_place < 0:
                tl.store(p_out + i_row * out_stride + o_c, tl.zeros([BLOCK_C], p_out.dtype.element_ty), mask=m_c)
            elif p_drafts is None:
                b_x = tl.load(p_x + i_row * x_stride + o_c, mask=m_c, other=0.0)
                p_state = p_conv + i_place * conv_stride + o_c * (WIDTH - 1)
                m_state = m_c & (start > 0)
                b_y = tl.zeros([BLOCK_C], tl.float32)
                for tap in tl.static_range(WIDTH - 1):
                    b_before = tl.load(p_state + tap, mask=m_state, other=0.0)
                    b_weight = tl.load(p_weight + o_c * WIDTH + tap, mask=m_c, other=0.0).to(tl.float32)
                    b_y += b_before.to(tl.float32) * b_weight
                    if tap > 0:
                        tl.store(p_state + tap - 1, b_before, mask=m_c)
                tl.store(p_state + WIDTH - 2, b_x, mask=m_c)
                b_weight = tl.load(p_weight + o_c * WIDTH + WIDTH - 1, mask=m_c, other=0.0).to(tl.float32)
                b_y += b_x.to(tl.float32) * b_weight
                store_silu(p_out + i_row * out_stride + o_c, b_y, p_bias, o_c, m_c, m_c)
            else:
                num_accepted, num_drafts = draft_counts(p_drafts, i_row, num_rows, MAX_DRAFTS, BLOCK_D)
                p_own = p_x + i_row * x_stride + o_c
                p_state = p_conv + i_place * conv_stride + o_c * (WIDTH - 1)
                o_slot = i_place * MAX_DRAFTS * NUM_CHANNELS + o_c
                m_state = (start > 0) & m_c
                for i_step in range(-num_accepted, num_drafts + 1):
                    b_y = tl.zeros([BLOCK_C], tl.float32)
                    for tap in tl.static_range(WIDTH):
                        b_input = conv_input(
                            p_own, p_kept + o_slot, p_state, i_step + tap - (WIDTH - 1), num_accepted, x_stride, m_c,
                            m_state, NUM_CHANNELS, WIDTH,
                        )  # fmt: skip
                        b_weight = tl.load(p_weight + o_c * WIDTH + tap, mask=m_c, other=0.0).to(tl.float32)
                        b_y += b_input.to(tl.float32) * b_weight
                    if i_step < 0:
                        p_again = p_accepted + o_slot + (num_accepted + i_step) * NUM_CHANNELS
                        store_silu(p_again, b_y, p_bias, o_c, m_c, m_c)
                    else:
                        store_silu(p_out + (i_row + i_step) * out_stride + o_c, b_y, p_bias, o_c, m_c, m_c)
                for tap in tl.static_range(WIDTH - 1):
                    b_input = conv_input(
                        p_own, p_kept + o_slot, p_state, tap - (WIDTH - 2), num_accepted, x_stride, m_c, m_state,
                        NUM_CHANNELS, WIDTH,
                    )  # fmt: skip
                    tl.debug_barrier()  # other threads may have read what is written now
                    tl.store(p_state + tap, b_input, mask=m_c)
                for i_draft in range(num_drafts):
                    b_x = tl.load(p_own + (i_draft + 1) * x_stride, mask=m_c, other=0.0)
                    tl.store(p_kept + o_slot + i_draft * NUM_CHANNELS, b_x, mask=m_c)


@jit
def conv_input(
    p_own, p_kept, p_state, i_input, num_accepted, x_stride, m_c, m_state, NUM_CHANNELS: constexpr, WIDTH: constexpr
):  # fmt: skip
    """Return an input, counted from the row of the step: its own rows, before them accepted draft tokens, then the state."""
    i_kept = i_input + num_accepted
    b_own = tl.load(p_own + i_input * x_stride, mask=m_c & (i_input >= 0), other=0.0)
    b_kept = tl.load(p_kept + i_kept * NUM_CHANNELS, mask=m_c & (i_input < 0) & (i_kept >= 0), other=0.0)
    b_state = tl.load(p_state + (i_kept + WIDTH - 1), mask=m_state & (i_kept < 0), other=0.0)
    return tl.where(i_input >= 0, b_own, tl.where(i_kept >= 0, b_kept, b_state))


@jit
def _conv_chunk_kernel(
    p_x, p_sequences, p_chunks, p_weight, p_bias, p_conv, p_out, x_stride, out_stride, conv_stride,
    NUM_CHANNELS: constexpr, WIDTH: constexpr, BLOCK_C: constexpr, TILE: constexpr, CHUNK: constexpr, PDL: constexpr,
):  # fmt: skip
    release_then_wait(PDL)
    p_chunk = p_chunks + tl.program_id(0) * 4
    i_seq = tl.load(p_chunk)
    size = tl.load(p_chunk + 2)
    if size > 0:
        i_chunk = tl.load(p_chunk + 3)
        piece_rows = tl.load(p_sequences + i_seq * 4 + 1)
        i_place = tl.load(p_sequences + i_seq * 4 + 2).to(tl.int64)
        has_before = tl.load(p_sequences + i_seq * 4 + 3) > 0
        o_c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
        m_c = o_c < NUM_CHANNELS
        p_state = p_conv + i_place * conv_stride + o_c * (WIDTH - 1)
        p_piece = p_x + tl.load(p_sequences + i_seq * 4).to(tl.int64) * x_stride + o_c
        p_rows = p_out + tl.load(p_chunk + 1).to(tl.int64) * out_stride + o_c
        for first in range(0, size, TILE):
            o_row = first + tl.arange(0, TILE)
            m_tile = (o_row < size)[:, None] & m_c[None, :]
            b_y = tl.zeros([TILE, BLOCK_C], tl.float32)
            for tap in tl.static_range(WIDTH):
                o_input = (i_chunk * CHUNK + o_row + (tap - WIDTH + 1)).to(tl.int64)
                m_own = m_tile & (o_input >= 0)[:, None]
                b_input = tl.load(p_piece[None, :] + o_input[:, None] * x_stride, mask=m_own, other=0.0)
                if i_chunk + first == 0:
                    m_state = m_tile & (o_input < 0)[:, None] & has_before
                    b_before = tl.load(p_state[None, :] + (o_input + WIDTH - 1)[:, None], mask=m_state, other=0.0)
                    b_input = tl.where(m_own, b_input, b_before)
                b_weight = tl.load(p_weight + o_c * WIDTH + tap, mask=m_c, other=0.0).to(tl.float32)
                b_y += b_input.to(tl.float32) * b_weight[None, :]
            p_tile = p_rows[None, :] + o_row[:, None].to(tl.int64) * out_stride
            store_silu(p_tile, b_y, p_bias, o_c[None, :], m_c[None, :], m_tile)
        if i_chunk == 0:
            tl.debug_barrier()  # every warp has read the state
            for place in tl.static_range(WIDTH - 1):
                i_input = (piece_rows + (place - WIDTH + 1)).to(tl.int64)
                is_own = i_input >= 0
                m_state = m_c & (i_input < 0) & has_before
                b_own = tl.load(p_piece + i_input * x_stride, mask=m_c & is_own, other=0.0)
                b_before = tl.load(p_state + i_input + WIDTH - 1, mask=m_state, other=0.0)
                tl.store(p_state + place, tl.where(is_own, b_own, b_before), mask=m_c)


@jit
def store_silu(p_out, b_y, p_bias, o_c, m_c, m_out):
    """Add the bias, if any, and store silu."""
    if p_bias is not None:
        b_y += tl.load(p_bias + o_c, mask=m_c, other=0.0).to(tl.float32)
    tl.store(p_out, (b_y / (1.0 + tl.exp(-b_y))).to(p_out.dtype.element_ty), mask=m_out)
