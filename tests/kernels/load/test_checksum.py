"""Checksums of saved weights: one number however the bytes are cut and wherever they lie, which damage changes."""

import random
from itertools import pairwise

import pytest
import torch

from holdfast.kernels import native_library as native_library_file
from holdfast.kernels.load import checksum
from holdfast.kernels.load.checksum import (
    BLOCK_BYTES,
    BLOCK_WORDS,
    add_checksum,
    add_checksum_reference,
    add_checksum_triton,
    as_unsigned,
    block_key,
)
from kernels.triton_cases import QUIET

pytestmark = QUIET
IMPLEMENTATIONS = {
    "whichever runs here": add_checksum,
    "reference": add_checksum_reference,
    "triton": add_checksum_triton,
}


def some_bytes(num_bytes: int, seed: int = 0) -> torch.Tensor:
    return torch.tensor(list(random.Random(seed).randbytes(num_bytes)), dtype=torch.uint8)


def by_hand(data: bytes) -> int:
    """The definition, word by word in Python's numbers."""
    total = 0
    for start in range(0, len(data), 4):
        word, place = int.from_bytes(data[start : start + 4], "little"), start % BLOCK_BYTES // 4
        total += block_key(start // BLOCK_BYTES) * mixed(place + 1) * word
    return total % 2**64


def mixed(value: int) -> int:
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        value = (value ^ value >> shift) * factor % 2**32
    return value


def summed(data: torch.Tensor, cuts: list[int], add=add_checksum) -> int:
    sum_1 = torch.zeros(1, dtype=torch.int64, device=data.device)
    for start, end in pairwise(cuts):
        add(data[start:end], start, sum_1)
    return as_unsigned(int(sum_1))


@pytest.mark.each_value
@pytest.mark.parametrize("add", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
@pytest.mark.parametrize("num_bytes", [0, 1, 3, 4, 5, BLOCK_BYTES - 1, BLOCK_BYTES, 2 * BLOCK_BYTES + 7])
def test_checksum_does_not_depend_on_cuts(device, add, num_bytes):
    data = some_bytes(num_bytes)
    expected = by_hand(data.numpy().tobytes())
    inner = [1, 2, 3, 4097, BLOCK_BYTES - 2, BLOCK_BYTES + 1, BLOCK_BYTES + 6]
    for cuts in ([0, num_bytes], [0, *(cut for cut in inner if cut < num_bytes), num_bytes]):
        assert summed(data.to(device), cuts, add) == expected


@pytest.mark.parametrize("add", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
def test_checksum_keys_differ_far_into_a_plane(device, add):
    data = some_bytes(40_000, 1).to(device)
    first_byte = (2**33 + 5) * BLOCK_BYTES + 77  # the index of the block is no longer one of 32 bits
    sums = []
    for one in (add, add_checksum_reference):
        sum_1 = torch.zeros(1, dtype=torch.int64, device=device)
        one(data, first_byte, sum_1)
        sums.append(sum_1.item())
    assert sums[0] == sums[1] != summed(data, [0, len(data)])


def test_checksum_without_compiler_is_unchanged(monkeypatch):
    data = some_bytes(70_001, 2)
    expected = summed(data, [0, len(data)])
    monkeypatch.setattr(checksum, "native_library", lambda: None)
    assert summed(data, [0, len(data)]) == expected
    assert native_library_file.SIGNATURES["holdfast_add_checksum"]


def test_checksum_changes_with_changed_or_swapped_data():
    data = some_bytes(4 * BLOCK_BYTES, 3)
    whole = [0, len(data)]
    right = summed(data, whole)
    draw = random.Random(4)
    for _ in range(200):
        wrong = data.clone()
        wrong[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        assert summed(wrong, whole) != right
    words, blocks = data.view(torch.int32), data.view(4, BLOCK_BYTES)
    swapped = words.clone()
    swapped[[5, BLOCK_WORDS + 5]] = swapped[[BLOCK_WORDS + 5, 5]]
    assert summed(swapped.view(torch.uint8), whole) != right
    assert summed(blocks[[1, 0, 2, 3]].flatten(), whole) != right
    assert summed(torch.zeros_like(data), whole) == 0 != summed(torch.ones_like(data), whole)
