"""Checksums of saved weights, summed piece by piece on the device of the bytes.

A plane's checksum is a sum over its bytes, so its pieces may come in any order and begin anywhere:

    sum over blocks of B(block) * (sum over the block's words of W(place in the block) * word)      modulo 2^64

A word is 4 little-endian bytes; a block has 16 KiB; W has 32 bits and B is an odd number of 64, both mixed from their
index. It always finds one wrong word, and words or blocks that changed places. It misses other damage about once in
2^32 times. It guards against damage, not attacks: an attacker who can write the weights can write the manifest too.
"""

from functools import cache

import torch
from torch import Tensor

from holdfast.kernels.native_library import native_library
from holdfast.kernels.operation import DECLINED, operation
from holdfast.kernels.triton_compat import constexpr, jit_counting, kernel_constant, tl

BLOCK_BYTES = 2**14
WORD_BYTES = 4
BLOCK_WORDS = BLOCK_BYTES // WORD_BYTES
BLOCKS_AT_ONCE = 64
"""Blocks per pass of the reference, which then needs less than 8 MiB."""
MASK_32, MASK_64 = 2**32 - 1, 2**64 - 1
FIRST_FACTOR, SECOND_FACTOR = kernel_constant(0x85EBCA6B), kernel_constant(0xC2B2AE35)
TILE_BYTES = 4096
"""Bytes of a block per loop iteration of a program."""


def add_checksum_reference(bytes_N: Tensor, first_byte: int, sum_1: Tensor) -> None:
    """Add the checksum of these bytes (uint8), which begin at `first_byte` of their plane, to `sum_1` [1] int64."""
    keys_W = torch.tensor(_word_keys(), dtype=torch.int64, device=bytes_N.device)
    end, start = first_byte + bytes_N.numel(), first_byte
    while start < end:
        block = start // BLOCK_BYTES
        stop = min(end, (block + BLOCKS_AT_ONCE) * BLOCK_BYTES)
        num_blocks = -(-stop // BLOCK_BYTES) - block
        padded = bytes_N.new_zeros(num_blocks * BLOCK_BYTES)
        inside = slice(start - block * BLOCK_BYTES, stop - block * BLOCK_BYTES)
        padded[inside] = bytes_N[start - first_byte : stop - first_byte]
        words_BW = padded.view(torch.int32).view(num_blocks, BLOCK_WORDS).long() & MASK_32
        block_keys = [_signed(block_key(index)) for index in range(block, block + num_blocks)]
        blocks_B = (words_BW * keys_W).sum(dim=1)
        sum_1 += (blocks_B * torch.tensor(block_keys, dtype=torch.int64, device=bytes_N.device)).sum()
        start = stop


def add_checksum_triton(bytes_N: Tensor, first_byte: int, sum_1: Tensor) -> None:
    """Launch one program for each block that the bytes touch."""
    num_bytes = bytes_N.numel()
    if num_bytes:
        first_block, end_block = first_byte // BLOCK_BYTES, -(-(first_byte + num_bytes) // BLOCK_BYTES)
        _checksum_kernel[(end_block - first_block,)](
            bytes_N, sum_1, first_block, first_byte - first_block * BLOCK_BYTES, num_bytes,
            BLOCK=BLOCK_BYTES, TILE=TILE_BYTES, num_warps=4,
        )  # fmt: skip


def add_checksum_native(bytes_N: Tensor, first_byte: int, sum_1: Tensor) -> None:
    library = native_library() if bytes_N.is_cpu and bytes_N.is_contiguous() else None
    if library is None:
        return DECLINED
    return library.holdfast_add_checksum(bytes_N.data_ptr(), bytes_N.numel(), first_byte, sum_1.data_ptr())


add_checksum = operation(reference=add_checksum_reference, triton=add_checksum_triton, native=add_checksum_native)


def block_key(index: int) -> int:
    """Return the factor of a block: odd, so that no bit is lost."""
    return _mixed(2 * index + 1) << 32 | _mixed(2 * index + 2) | 1


@cache
def _word_keys() -> list[int]:
    """Return the factors of a block's words; none is 0."""
    return [_mixed(index + 1) for index in range(BLOCK_WORDS)]


def _mixed(value: int) -> int:
    """Mix 32 bits one to one (the finalizer of MurmurHash3); only 0 gives 0."""
    value &= MASK_32
    value = (value ^ value >> 16) * 0x85EBCA6B & MASK_32
    value = (value ^ value >> 13) * 0xC2B2AE35 & MASK_32
    return value ^ value >> 16


def _signed(value: int) -> int:
    return value - (value >> 63 << 64)


def as_unsigned(value: int) -> int:
    """Convert a sum from a tensor to an unsigned 64-bit number."""
    return value & MASK_64


@jit_counting("first_block", "first_byte", "num_bytes")
def _checksum_kernel(p_bytes, p_sum, first_block, first_byte, num_bytes, BLOCK: constexpr, TILE: constexpr):
    """Sum one block; `first_byte` counts from the start of `first_block`."""
    i_block = tl.program_id(0).to(tl.int64)
    total = tl.zeros((TILE,), dtype=tl.int64)
    for tile in range(BLOCK // TILE):
        o_byte = tile * TILE + tl.arange(0, TILE)
        at = i_block * BLOCK + o_byte - first_byte
        b_byte = tl.load(p_bytes + at, mask=(at >= 0) & (at < num_bytes), other=0).to(tl.int64)
        b_key = _mix((o_byte // 4 + 1).to(tl.uint32)).to(tl.int64)
        total += (b_byte << ((o_byte % 4) * 8).to(tl.int64)) * b_key
    index = ((first_block + i_block) * 2).to(tl.uint32)
    key = _mix(index + 1).to(tl.int64) << 32 | _mix(index + 2).to(tl.int64) | 1
    tl.atomic_add(p_sum, tl.sum(total, axis=0) * key)


@jit_counting()
def _mix(value):
    """Like `_mixed`."""
    value = (value ^ (value >> 16)) * FIRST_FACTOR
    value = (value ^ (value >> 13)) * SECOND_FACTOR
    return value ^ (value >> 16)
