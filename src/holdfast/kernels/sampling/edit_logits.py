"""Changes to single logits, from a list, in copies of the rows that they belong to.

S rows of a step, R rows of a block, F fields, V vocabulary, E edits, each (place in the flat block, bits of a float32)

The raw logits stay: log-probabilities are of them, whatever is done to a row before a token is chosen.
"""

from enum import IntEnum

import torch
from torch import Tensor

from holdfast.kernels.geometry import CHUNK_TOKENS, EDITS_PER_PROGRAM, NUM_FIELDS, num_chunks
from holdfast.kernels.triton_compat import can_run, constexpr, jit, tl

# ruff: noqa: ANN001, ANN202 the arguments of kernels have no types

PADDING = (-1, 0x3F800000)
"""An edit that is skipped: no place, and the bits of 1.0."""


class EditKind(IntEnum):
    """What an edit does with its number; kinds are applied in this order."""

    REPETITION = 0
    """Divide a positive logit, multiply another."""
    SUBTRACT = 1
    ADD = 2
    REPLACE = 3


def copy_rows(logits_SV: Tensor, rows_RF: Tensor, block_RV: Tensor) -> None:
    """block[i] = logits[target] for row i of the table, or -inf everywhere where the row is blank."""
    if can_run(logits_SV):
        copy_rows_triton(logits_SV, rows_RF, block_RV)
    else:
        copy_rows_reference(logits_SV, rows_RF, block_RV)


def copy_rows_reference(logits_SV: Tensor, rows_RF: Tensor, block_RV: Tensor) -> None:
    """The same in plain torch."""
    block_RV.copy_(logits_SV.index_select(0, rows_RF[:, 1].to(torch.int64)))
    block_RV.masked_fill_(rows_RF[:, NUM_FIELDS - 1 :].to(block_RV.device) != 0, -torch.inf)


def copy_rows_triton(logits_SV: Tensor, rows_RF: Tensor, block_RV: Tensor) -> None:
    """The same as a Triton kernel, a program a chunk of a row."""
    num_rows, vocab_size = block_RV.shape
    assert rows_RF.shape[0] == num_rows, f"{rows_RF.shape=} must name a row for each of {num_rows}"
    assert logits_SV.stride(1) == 1, f"{logits_SV.stride()=}: the logits of a row must lie side by side"
    assert rows_RF.is_contiguous(), f"{rows_RF.stride()=}: a table must be dense"
    assert block_RV.is_contiguous(), f"{block_RV.stride()=}: a block must be dense"
    if num_rows:
        grid = (num_rows, num_chunks(vocab_size))
        strides = logits_SV.stride(0), vocab_size
        _copy_kernel[grid](logits_SV, rows_RF, block_RV, *strides, FIELDS=NUM_FIELDS, CHUNK=CHUNK_TOKENS, num_warps=8)


def restore_logits(logits_SV: Tensor, rows_RF: Tensor, block_RV: Tensor, edits_E2: Tensor) -> None:
    """block.flat[place] = the raw logit that `copy_rows` left out there, for each edit; the edits' numbers do not matter."""
    if can_run(logits_SV):
        restore_logits_triton(logits_SV, rows_RF, block_RV, edits_E2)
    else:
        restore_logits_reference(logits_SV, rows_RF, block_RV, edits_E2)


def restore_logits_reference(logits_SV: Tensor, rows_RF: Tensor, block_RV: Tensor, edits_E2: Tensor) -> None:
    """The same in plain torch."""
    place_E = edits_E2[edits_E2[:, 0] != PADDING[0], 0].to(torch.int64)
    row_E, token_E = place_E // block_RV.shape[1], place_E % block_RV.shape[1]
    block_RV[row_E, token_E] = logits_SV[rows_RF[:, 1].to(torch.int64)[row_E], token_E]


def restore_logits_triton(logits_SV: Tensor, rows_RF: Tensor, block_RV: Tensor, edits_E2: Tensor) -> None:
    """The same as a Triton kernel."""
    num_edits = edits_E2.shape[0]
    assert num_edits % EDITS_PER_PROGRAM == 0, f"{num_edits=} is not a multiple of {EDITS_PER_PROGRAM}"
    assert edits_E2.is_contiguous(), f"{edits_E2.stride()=}: edits must be dense"
    assert block_RV.is_contiguous(), f"{block_RV.stride()=}: a block must be dense"
    assert logits_SV.stride(1) == 1, f"{logits_SV.stride()=}: the logits of a row must lie side by side"
    if num_edits:
        strides = logits_SV.stride(0), block_RV.shape[1]
        sizes = {"FIELDS": NUM_FIELDS, "EDITS": EDITS_PER_PROGRAM}
        _restore_kernel[(num_edits // EDITS_PER_PROGRAM,)](
            logits_SV, rows_RF, block_RV, edits_E2, *strides, **sizes, num_warps=4
        )


def edit_logits(block_RV: Tensor, edits_E2: Tensor, kind: EditKind) -> None:
    """block.flat[place] = what the kind makes of it and the number, for each edit; no place may occur twice."""
    if can_run(block_RV):
        edit_logits_triton(block_RV, edits_E2, kind)
    else:
        edit_logits_reference(block_RV, edits_E2, kind)


def edit_logits_reference(block_RV: Tensor, edits_E2: Tensor, kind: EditKind) -> None:
    """The same in plain torch."""
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
    """The same as a Triton kernel."""
    num_edits = edits_E2.shape[0]
    assert num_edits % EDITS_PER_PROGRAM == 0, f"{num_edits=} is not a multiple of {EDITS_PER_PROGRAM}"
    assert edits_E2.is_contiguous(), f"{edits_E2.stride()=}: edits must be dense"
    assert block_RV.is_contiguous(), f"{block_RV.stride()=}: a block must be dense"
    if num_edits:
        grid = (num_edits // EDITS_PER_PROGRAM,)
        _edit_kernel[grid](block_RV, edits_E2, KIND=int(kind), EDITS=EDITS_PER_PROGRAM, num_warps=4)


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
