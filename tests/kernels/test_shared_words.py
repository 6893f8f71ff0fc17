"""Words of shared memory that threads count in, put and get; and loads and stores that lie anywhere."""

import pytest
import torch

from holdfast.kernels.shared_words import (
    clear_words,
    count_words,
    gather,
    get_words,
    interpreter_buffer,
    put_words,
    scatter,
    shared_words,
)
from holdfast.kernels.triton_compat import constexpr, is_interpreted, jit, tl
from kernels.exactness import random


@jit
def _histogram_kernel(p_x, p_out, p_words, SIZE: constexpr, BINS: constexpr):
    """How many elements are below 0.9 in each bin; and counts in the opposite order, twice as large, by way of other words."""
    words = shared_words(p_words)
    o_x, o_bin = tl.arange(0, SIZE), tl.arange(0, BINS)
    clear_words(words, tl.arange(0, BINS // 4))
    tl.debug_barrier()
    b_x = tl.load(p_x + tl.program_id(0) * SIZE + o_x)
    count_words(words, (b_x * BINS).to(tl.int32), b_x < 0.9)
    tl.debug_barrier()
    b_count = get_words(words, o_bin)
    put_words(words, o_bin + BINS, 2 * b_count)
    tl.debug_barrier()
    p_out += tl.program_id(0) * 2 * BINS
    tl.store(p_out + o_bin, b_count)
    tl.store(p_out + BINS + o_bin, get_words(words, BINS - 1 - o_bin + BINS))


@jit
def _permute_kernel(p_x, p_order, p_out, SIZE: constexpr, PLAIN: constexpr):
    """Masked elements gather zeros and scatter nothing."""
    o_x = tl.arange(0, SIZE // 32)[:, None] * 32 + tl.arange(0, 32)[None, :]
    o_from = tl.load(p_order + o_x)
    b_x = gather(p_x, o_from, o_from % 3 != 0, PLAIN)
    scatter(p_out, SIZE - 1 - o_from, b_x, o_from % 2 == 0, PLAIN)


@pytest.mark.parametrize("num_warps", [1, 4, 8])
def test_shared_words_programs_count_separately(device, guarded, num_warps):
    x = random(3, 512, seed=1).abs().clamp(max=0.999).to(device)
    out = guarded(3, 2, 64, dtype=torch.int32)
    _histogram_kernel[(3,)](x, out, interpreter_buffer(3, x), SIZE=512, BINS=64, num_warps=num_warps)
    for row in range(3):
        counts = torch.bincount((x[row][x[row] < 0.9] * 64).int(), minlength=64)
        assert out[row].tolist() == [counts.tolist(), (2 * counts.flip(0)).tolist()]


def test_shared_words_load_and_store_scattered_elements(device, guarded):
    order = torch.randperm(256, generator=torch.Generator().manual_seed(0)).int().to(device)
    x, out = torch.arange(1000, 1256, dtype=torch.int32, device=device), guarded(256, dtype=torch.int32).fill_(-1)
    _permute_kernel[(1,)](x, order, out, SIZE=256, PLAIN=is_interpreted(), num_warps=4)
    assert out.tolist() == [
        -1 if place % 2 else 0 if place % 3 == 0 else 1000 + place for place in reversed(range(256))
    ]
