"""Tokens that may not be chosen ruled out of rows of logits, by one bit a token.

R rows of a block, V vocabulary, W words of 32 bits: bit t % 32 of word t // 32 is 1 where token t may be chosen
"""

import torch
from torch import Tensor

from holdfast.kernels.geometry import CHUNK_TOKENS, num_chunks
from holdfast.kernels.native_library import native_for
from holdfast.kernels.triton_compat import can_run, constexpr, jit, tl

# ruff: noqa: ANN001, ANN202 the arguments of kernels have no types

WORD_BITS = 32


def mask_logits(block_RV: Tensor, masks_RW: Tensor) -> None:
    """block[i, t] = -inf wherever bit t of masks[i] is 0; all other logits stay as they are, to the bit."""
    if can_run(block_RV):
        mask_logits_triton(block_RV, masks_RW)
        return
    library = native_for(block_RV)
    if library is None:
        mask_logits_reference(block_RV, masks_RW)
        return
    num_rows, vocab_size = block_RV.shape
    _check(block_RV, masks_RW)
    library.holdfast_mask_logits(block_RV.data_ptr(), masks_RW.data_ptr(), num_rows, vocab_size)


def mask_logits_reference(block_RV: Tensor, masks_RW: Tensor) -> None:
    """The same in plain torch, through bytes, which lie in order on every machine that runs this."""
    bytes_RB1 = masks_RW.contiguous().view(torch.uint8).unsqueeze(-1)
    places_8 = torch.arange(8, dtype=torch.uint8, device=block_RV.device)
    allowed_RX = bytes_RB1.bitwise_right_shift(places_8).bitwise_and_(1).flatten(1)
    block_RV.masked_fill_(allowed_RX[:, : block_RV.shape[1]] == 0, -torch.inf)


def mask_logits_triton(block_RV: Tensor, masks_RW: Tensor) -> None:
    """The same as a Triton kernel, a program a chunk of a row. Nothing is read but bits, and only -inf is written."""
    num_rows, vocab_size = block_RV.shape
    _check(block_RV, masks_RW)
    if num_rows:
        grid = (num_rows, num_chunks(vocab_size))
        sizes = {"BITS": WORD_BITS, "CHUNK": CHUNK_TOKENS}
        _mask_kernel[grid](block_RV, masks_RW, vocab_size, masks_RW.shape[1], **sizes, num_warps=8)


def _check(block_RV: Tensor, masks_RW: Tensor) -> None:
    num_rows, num_words = block_RV.shape[0], -(-block_RV.shape[1] // WORD_BITS)
    assert masks_RW.shape == (num_rows, num_words), f"{masks_RW.shape=} must be {num_words} words a row of {num_rows}"
    assert masks_RW.dtype == torch.int32, f"{masks_RW.dtype=} must be int32"
    assert masks_RW.is_contiguous(), f"{masks_RW.stride()=}: masks must be dense"
    assert block_RV.is_contiguous(), f"{block_RV.stride()=}: a block must be dense"


@jit
def _mask_kernel(p_block, p_masks, vocab_size, num_words, BITS: constexpr, CHUNK: constexpr):
    i_row = tl.program_id(0).to(tl.int64)
    o_token = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    m_token = o_token < vocab_size
    b_word = tl.load(p_masks + i_row * num_words + o_token // BITS, mask=m_token, other=0)
    is_ruled_out = ((b_word >> (o_token % BITS)) & 1) == 0
    b_nothing = tl.full([CHUNK], float("-inf"), tl.float32)
    tl.store(p_block + i_row * vocab_size + o_token, b_nothing, mask=m_token & is_ruled_out)
