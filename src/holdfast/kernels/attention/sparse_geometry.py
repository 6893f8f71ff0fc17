"""Splits of lists of chosen tokens (DSA) and the partials that they need, as kernels and plans agree on them; no torch.

A list is as long for every row, so that the number of rows alone says how many splits keep a GPU busy. The plan knows no GPU:
partials are capped, and on a larger one than the cap is for, splits are fewer.
"""

from holdfast.kernels.attention.latent_geometry import head_blocks

MAX_SPLITS = 32
"""Of one list: 64 tokens of 2,048 each, a block of a kernel."""
PROGRAMS_PER_SM = 2
"""Tiles of a row and a block of heads that a step is split into at the least, if it can be."""
PARTIAL_TILES = 2 * PROGRAMS_PER_SM * 132
"""Partials of blocks of heads: where rows are a few more than half of the programs, rounding up doubles them."""


def sparse_splits(num_rows: int, num_heads: int, num_sms: int) -> int:
    """Splits of every row's list in a step of so many rows, padding included; one split writes no partials."""
    num_tiles = num_rows * head_blocks(num_heads)[0]
    wanted = -(-PROGRAMS_PER_SM * num_sms // num_tiles)
    return max(1, min(wanted, MAX_SPLITS, PARTIAL_TILES // num_tiles))


def sparse_partials(max_rows: int, num_heads: int) -> int:
    """Partial rows, of all heads each, that any step of up to so many rows has at the most, on any GPU."""
    return min(max_rows * MAX_SPLITS, PARTIAL_TILES // head_blocks(num_heads)[0])
