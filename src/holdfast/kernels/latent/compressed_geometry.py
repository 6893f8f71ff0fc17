"""Splits of rows of compressed attention (DeepSeek-V4), as kernels and plans agree on them; no torch.

A row's places are its window and its entries. How many there are is known on the device alone, so that the number of splits
follows from the number of rows; rows of few places leave splits empty, which costs next to nothing.
"""

from holdfast.kernels.latent.latent_geometry import PARTIAL_TILES, head_blocks

MAX_SPLITS = 64
"""Of one row."""
TILE_COST, PARTIAL_COST, MERGE_COST = 2.5, 0.011, 0.6
"""In the time of a block of 64 places, about 3 us: begin and end of a tile, a partial of a block of heads, the launch of a merge."""
TYPICAL_BLOCKS = (10, 18, 130)
"""Blocks of rows that splits are chosen for, by what they cost each in relation: a window and 512 or 1,024 entries, or 8,192."""


def compressed_splits(num_rows: int, num_heads: int, num_sms: int) -> int:
    """Splits of every row in a step of so many rows, padding included; one split writes no partials."""
    num_tiles = num_rows * head_blocks(num_heads)[0]
    most = max(1, min(MAX_SPLITS, PARTIAL_TILES // num_tiles))

    def cost(splits: int, blocks: int) -> float:
        num_turns = -(-num_tiles * splits // num_sms)
        merge_cost = MERGE_COST + PARTIAL_COST * num_tiles * min(splits, blocks) if splits > 1 else 0.0
        return num_turns * (-(-blocks // splits) + TILE_COST) + merge_cost

    return min(range(1, most + 1), key=lambda splits: sum(cost(splits, own) / own for own in TYPICAL_BLOCKS))


def compressed_partials(max_rows: int, num_heads: int) -> int:
    """Partial rows, of all heads each, that any step of up to so many rows has at the most, on any GPU."""
    return min(max_rows * MAX_SPLITS, PARTIAL_TILES // head_blocks(num_heads)[0])
