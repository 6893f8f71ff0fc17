"""Token masks, one bit a token: logits of the tokens that a grammar forbids become -inf.

R rows of a block, V vocabulary, W words of 32 bits: bit t % 32 of word t // 32 is 1 if token t is allowed
"""

import torch
from torch import Tensor

from holdfast.kernels.geometry import CHUNK_TOKENS, num_chunks
from holdfast.kernels.native_library import native_for
from holdfast.kernels.operation import DECLINED, operation
from holdfast.kernels.triton_compat import check_dense, constexpr, jit, tl

# ruff: noqa: ANN001, ANN202 the arguments of kernels have no types

WORD_BITS = 32


def mask_logits_reference(block_RV: Tensor, masks_RW: Tensor) -> None:
    """block[i, t] = -inf if bit t of masks[i] is 0; other logits keep their bits."""
    # Through bytes: all supported machines are little-endian.
    bytes_RB1 = masks_RW.contiguous().view(torch.uint8).unsqueeze(-1)
    places_8 = torch.arange(8, dtype=torch.uint8, device=block_RV.device)
    allowed_RX = bytes_RB1.bitwise_right_shift(places_8).bitwise_and_(1).flatten(1)
    block_RV.masked_fill_(allowed_RX[:, : block_RV.shape[1]] == 0, -torch.inf)


def mask_logits_triton(block_RV: Tensor, masks_RW: Tensor) -> None:
    """Launch one program a chunk of a row. It reads no logits and writes only -inf."""
    num_rows, vocab_size = block_RV.shape
    _check(block_RV, masks_RW)
    if num_rows:
        grid = (num_rows, num_chunks(vocab_size))
        sizes = {"BITS": WORD_BITS, "CHUNK": CHUNK_TOKENS}
        _mask_kernel[grid](block_RV, masks_RW, vocab_size, masks_RW.shape[1], **sizes, num_warps=8)


def mask_logits_native(block_RV: Tensor, masks_RW: Tensor) -> None:
    library = native_for(block_RV)
    if library is None:
        return DECLINED
    _check(block_RV, masks_RW)
    return library.holdfast_mask_logits(block_RV.data_ptr(), masks_RW.data_ptr(), *block_RV.shape)


mask_logits = operation(reference=mask_logits_reference, triton=mask_logits_triton, native=mask_logits_native)


def _check(block_RV: Tensor, masks_RW: Tensor) -> None:
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
