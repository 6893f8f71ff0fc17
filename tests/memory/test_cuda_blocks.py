"""The rule by which tests tell rounding from a term that is missing."""

import pytest
import torch

from cuda_blocks import MIB, block_bytes

SAMPLING_BYTES = 35_483_136
"""Bytes for 40 rows and a vocabulary of 151,936: what was once planned while 34 MiB were held."""


@pytest.mark.parametrize(
    ("requested", "counted"),
    [
        (1, 512),
        (MIB + 1, MIB + 512),
        (10 * MIB - 512, 10 * MIB - 512),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 10 * MIB + 512),
        (11 * MIB - 512, 11 * MIB - 512),
        (11 * MIB, 12 * MIB),
        (SAMPLING_BYTES, 34 * MIB),
    ],
)
def test_block_bytes_splits_segment_with_large_rest(requested, counted):
    assert block_bytes(requested) == counted


@pytest.mark.gpu
@pytest.mark.own_process
def test_block_bytes_match_torch_allocator():
    """In a process whose allocator has nothing in store."""
    for requested in (1, 5 * MIB + 1, 11 * MIB - 512, 11 * MIB, SAMPLING_BYTES, 100 * MIB + 1):
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        held = torch.empty(requested, dtype=torch.uint8, device="cuda")
        assert torch.cuda.memory_allocated() - before == block_bytes(held.nbytes)
        del held
