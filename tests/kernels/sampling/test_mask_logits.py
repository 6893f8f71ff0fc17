"""Masks of single bits over rows of logits against torch, to the bit, and nowhere else."""

import numpy as np
import pytest
import torch

from holdfast.kernels.sampling.edit_logits import mask_logits, mask_logits_reference, mask_logits_triton
from kernels.exactness import random, same_bits
from kernels.logit_cases import INF, NAN
from kernels.triton_cases import QUIET, assert_allocates_nothing

pytestmark = QUIET


def make_masks(num_rows: int, vocab_size: int, share: float = 0.5, seed: int = 0) -> tuple[torch.Tensor, np.ndarray]:
    """int32 words, and the same as booleans; bits behind the vocabulary are zeros in every other row, else ones."""
    allowed = np.random.default_rng(seed).random((num_rows, vocab_size)) < share
    bits = np.ones((num_rows, -(-vocab_size // 32) * 32), dtype=bool)
    bits[::2] = False
    bits[:, :vocab_size] = allowed
    words = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    return torch.from_numpy(np.ascontiguousarray(words)), allowed


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 1.0])
@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 100, 8192, 8193, 9001])
def test_mask_logits_matches_torch_to_the_bit(device, guarded, vocab_size, share):
    masks, allowed = make_masks(3, vocab_size, share, vocab_size)
    raw = random(3, vocab_size, scale=5)
    raw[1, vocab_size // 2], raw[2, 0], raw[0, -1] = NAN, INF, -INF
    block, expected = guarded(3, vocab_size).copy_(raw), raw.clone()
    mask_logits_triton(block, masks.to(device))
    mask_logits_reference(expected, masks)
    assert same_bits(block.cpu(), expected)
    assert same_bits(expected, torch.where(torch.from_numpy(allowed), raw, -INF))
    in_c = guarded(3, vocab_size).copy_(raw) if device.type == "cpu" else raw.clone()
    mask_logits(in_c, masks)
    assert same_bits(in_c, expected)


def test_mask_logits_sign_bit_masks_its_token(device):
    for place in (30, 31, 32, 63):
        bits = np.zeros((1, 64), dtype=bool)
        bits[0, place] = True
        masks = torch.from_numpy(np.packbits(bits, axis=1, bitorder="little").view(np.int32))
        block = torch.zeros(1, 64, device=device)
        mask_logits_triton(block, masks.to(device))
        assert (block.cpu() == 0).nonzero().tolist() == [[0, place]]


def test_mask_logits_accepts_no_rows_and_refuses_wrong_shapes(device):
    mask_logits(torch.zeros(0, 40, device=device), torch.zeros(0, 2, dtype=torch.int32, device=device))
    mask_logits_triton(torch.zeros(0, 40, device=device), torch.zeros(0, 2, dtype=torch.int32, device=device))
    with pytest.raises(AssertionError, match="must be 2 words a row of 1"):
        mask_logits_triton(torch.zeros(1, 40), torch.zeros(1, 1, dtype=torch.int32))
    with pytest.raises(AssertionError, match="must be int32"):
        mask_logits_triton(torch.zeros(1, 40), torch.zeros(1, 2, dtype=torch.int64))


@pytest.mark.gpu
@pytest.mark.parametrize("vocab_size", [49152, 151936, 262144])
def test_mask_logits_on_gpu_matches_reference_at_full_size(device, vocab_size):
    masks, _ = make_masks(64, vocab_size, 0.3)
    raw = random(64, vocab_size, scale=5)
    block, expected = raw.to(device), raw.clone()
    mask_logits(block, masks.to(device))
    mask_logits_reference(expected, masks)
    assert same_bits(block.cpu(), expected)


@pytest.mark.gpu
def test_mask_logits_allocates_nothing(device):
    block, (masks, _) = random(3, 151936).to(device), make_masks(3, 151936)
    masks = masks.to(device)
    assert_allocates_nothing(lambda: mask_logits(block, masks))
