"""Edits of single logits, from a list, and masks of forbidden tokens, in copies of their rows.

S rows of a step, R rows of a block, F fields, V vocabulary, E edits, each (place in the flat block, bits of a float32),
W words of 32 bits: bit t % 32 of word t // 32 is 1 if token t is allowed

The raw logits do not change: log-probabilities are computed from them.
"""

from enum import IntEnum

import torch
from torch import Tensor

from holdfast.kernels.geometry import CHUNK_TOKENS, EDITS_PER_PROGRAM, NUM_FIELDS, num_chunks
from holdfast.kernels.native_library import native_for
from holdfast.kernels.operation import DECLINED, operation
from holdfast.kernels.triton_compat import check_dense, constexpr, jit, tl

PADDING = (-1, 0x3F800000)
"""No-op edit: place -1, and the bits of 1.0."""
WORD_BITS = 32


class EditKind(IntEnum):
    """Operation of an edit; kinds run in this order."""

    REPETITION = 0
    """Divide a positive logit by the number; multiply any other."""
    SUBTRACT = 1
    ADD = 2
    REPLACE = 3


def copy_rows_reference(logits_SV: Tensor, rows_RF: Tensor, block_RV: Tensor) -> None:
    """block[i] = logits[target] for row i of the table; all -inf if the row is blank."""
    block_RV.copy_(logits_SV.index_select(0, rows_RF[:, 1].to(torch.int64)))
    block_RV.masked_fill_(rows_RF[:, NUM_FIELDS - 1 :].to(block_RV.device) != 0, -torch.inf)


def copy_rows_triton(logits_SV: Tensor, rows_RF: Tensor, block_RV: Tensor) -> None:
    num_rows, vocab_size = block_RV.shape
    assert rows_RF.shape[0] == num_rows, f"{rows_RF.shape=} must name a row for each of {num_rows}"
    assert logits_SV.stride(1) == 1, f"{logits_SV.stride()=}: the logits of a row must lie side by side"
    check_dense(rows_RF, block_RV)
    if num_rows:
        grid = (num_rows, num_chunks(vocab_size))
        strides = logits_SV.stride(0), vocab_size
        _copy_kernel[grid](logits_SV, rows_RF, block_RV, *strides, FIELDS=NUM_FIELDS, CHUNK=CHUNK_TOKENS, num_warps=8)


copy_rows = operation(reference=copy_rows_reference, triton=copy_rows_triton)


def restore_logits_reference(logits_SV: Tensor, rows_RF: Tensor, block_RV: Tensor, edits_E2: Tensor) -> None:
    """block.flat[place] = the raw logit there, for each edit, whose number is ignored: undoes the -inf of `copy_rows`."""
    place_E = edits_E2[edits_E2[:, 0] != PADDING[0], 0].to(torch.int64)
    row_E, token_E = place_E // block_RV.shape[1], place_E % block_RV.shape[1]
    block_RV[row_E, token_E] = logits_SV[rows_RF[:, 1].to(torch.int64)[row_E], token_E]


def restore_logits_triton(logits_SV: Tensor, rows_RF: Tensor, block_RV: Tensor, edits_E2: Tensor) -> None:
    grid = _grid(block_RV, edits_E2)
    assert logits_SV.stride(1) == 1, f"{logits_SV.stride()=}: the logits of a row must lie side by side"
    if grid[0]:
        strides = logits_SV.stride(0), block_RV.shape[1]
        sizes = {"FIELDS": NUM_FIELDS, "EDITS": EDITS_PER_PROGRAM}
        _restore_kernel[grid](logits_SV, rows_RF, block_RV, edits_E2, *strides, **sizes, num_warps=4)


restore_logits = operation(reference=restore_logits_reference, triton=restore_logits_triton)


def edit_logits_reference(block_RV: Tensor, edits_E2: Tensor, kind: EditKind) -> None:
    """Apply each edit to block.flat[place]; no place may occur twice."""
    edits_E2 = edits_E2[edits_E2[:, 0] != PADDING[0]]
    place_E, number_E = edits_E2[:, 0].to(torch.int64), edits_E2[:, 1].contiguous().view(torch.float32)
    logits_E = block_RV.view(-1)[place_E]
    if kind is EditKind.REPETITION:
        number_E = torch.where(logits_E > 0, logits_E / number_E, logits_E * number_E)
    elif kind is EditKind.SUBTRACT:
        number_E = logits_E - number_E
    elif kind is EditKind.ADD:
        number_E = logits_E + number_E
    block_RV.view(-1)[place_E] = number_E


def edit_logits_triton(block_RV: Tensor, edits_E2: Tensor, kind: EditKind) -> None:
    grid = _grid(block_RV, edits_E2)
    if grid[0]:
        _edit_kernel[grid](block_RV, edits_E2, KIND=int(kind), EDITS=EDITS_PER_PROGRAM, num_warps=4)


edit_logits = operation(reference=edit_logits_reference, triton=edit_logits_triton)


def _grid(block_RV: Tensor, edits_E2: Tensor) -> tuple[int]:
    num_edits = edits_E2.shape[0]
    assert num_edits % EDITS_PER_PROGRAM == 0, f"{num_edits=} is not a multiple of {EDITS_PER_PROGRAM}"
    check_dense(edits_E2, block_RV)
    return (num_edits // EDITS_PER_PROGRAM,)


@jit
def _copy_kernel(p_logits, p_rows, p_block, row_stride, vocab_size, FIELDS: constexpr, CHUNK: constexpr):
    i_row = tl.program_id(0).to(tl.int64)
    o_token = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    m_token = o_token < vocab_size
    target = tl.load(p_rows + i_row * FIELDS + 1).to(tl.int64)
    is_blank = tl.load(p_rows + i_row * FIELDS + FIELDS - 1) != 0
    b_logits = tl.load(p_logits + target * row_stride + o_token, mask=m_token, other=0.0)
    b_logits = tl.where(is_blank, float("-inf"), b_logits)
    tl.store(p_block + i_row * vocab_size + o_token, b_logits, mask=m_token)


@jit
def _restore_kernel(p_logits, p_rows, p_block, p_edits, row_stride, vocab_size, FIELDS: constexpr, EDITS: constexpr):
    o_edit = tl.program_id(0).to(tl.int64) * EDITS + tl.arange(0, EDITS)
    b_place = tl.load(p_edits + 2 * o_edit).to(tl.int64)
    m_edit = b_place >= 0
    b_place = tl.where(m_edit, b_place, 0)
    b_row = b_place // vocab_size
    b_target = tl.load(p_rows + b_row * FIELDS + 1, mask=m_edit, other=0.0).to(tl.int64)
    b_logits = tl.load(p_logits + b_target * row_stride + b_place % vocab_size, mask=m_edit, other=0.0)
    tl.store(p_block + b_place, b_logits, mask=m_edit)


@jit
def _edit_kernel(p_block, p_edits, KIND: constexpr, EDITS: constexpr):
    o_edit = tl.program_id(0).to(tl.int64) * EDITS + tl.arange(0, EDITS)
    b_place = tl.load(p_edits + 2 * o_edit)
    b_number = tl.load(p_edits + 2 * o_edit + 1).to(tl.float32, bitcast=True)
    m_edit = b_place >= 0
    b_logits = tl.load(p_block + b_place, mask=m_edit, other=0.0)
    if KIND == 0:
        b_number = tl.where(b_logits > 0, tl.div_rn(b_logits, b_number), b_logits * b_number)
    elif KIND == 1:
        b_number = b_logits - b_number
    elif KIND == 2:
        b_number = b_logits + b_number
    tl.store(p_block + b_place, b_number, mask=m_edit)


def mask_logits_reference(block_RV: Tensor, masks_RW: Tensor) -> None:
    """block[i, t] = -inf if bit t of masks[i] is 0; other logits keep their bits."""
    # View words as bytes: all supported machines are little-endian.
    bytes_RB1 = masks_RW.contiguous().view(torch.uint8).unsqueeze(-1)
    places_8 = torch.arange(8, dtype=torch.uint8, device=block_RV.device)
    allowed_RX = bytes_RB1.bitwise_right_shift(places_8).bitwise_and_(1).flatten(1)
    block_RV.masked_fill_(allowed_RX[:, : block_RV.shape[1]] == 0, -torch.inf)


def mask_logits_triton(block_RV: Tensor, masks_RW: Tensor) -> None:
    """Launch one program per chunk of a row. It reads no logits and writes only -inf."""
    num_rows, vocab_size = block_RV.shape
    _check_masks(block_RV, masks_RW)
    if num_rows:
        grid = (num_rows, num_chunks(vocab_size))
        sizes = {"BITS": WORD_BITS, "CHUNK": CHUNK_TOKENS}
        _mask_kernel[grid](block_RV, masks_RW, vocab_size, masks_RW.shape[1], **sizes, num_warps=8)


def mask_logits_native(block_RV: Tensor, masks_RW: Tensor) -> None:
    library = native_for(block_RV)
    if library is None:
        return DECLINED
    _check_masks(block_RV, masks_RW)
    return library.holdfast_mask_logits(block_RV.data_ptr(), masks_RW.data_ptr(), *block_RV.shape)


mask_logits = operation(reference=mask_logits_reference, triton=mask_logits_triton, native=mask_logits_native)


def _check_masks(block_RV: Tensor, masks_RW: Tensor) -> None:
    num_rows, num_words = block_RV.shape[0], -(-block_RV.shape[1] // WORD_BITS)
    assert masks_RW.shape == (num_rows, num_words), f"{masks_RW.shape=} must be {num_words} words a row of {num_rows}"
    assert masks_RW.dtype == torch.int32, f"{masks_RW.dtype=} must be int32"
    check_dense(masks_RW, block_RV)


@jit
def _mask_kernel(p_block, p_masks, vocab_size, num_words, BITS: constexpr, CHUNK: constexpr):
    i_row = tl.program_id(0).to(tl.int64)
    o_token = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    m_token = o_token < vocab_size
    b_word = tl.load(p_masks + i_row * num_words + o_token // BITS, mask=m_token, other=0)
    is_ruled_out = ((b_word >> (o_token % BITS)) & 1) == 0
    b_nothing = tl.full([CHUNK], float("-inf"), tl.float32)
    tl.store(p_block + i_row * vocab_size + o_token, b_nothing, mask=m_token & is_ruled_out)
