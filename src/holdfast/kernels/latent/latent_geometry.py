"""Tile sizes of kernels over paged latents (MLA), shared with plans: blocks of heads, heights, splits of lists and scopes; no torch.

A block of heads shares the rows of a tile, so a loaded latent serves all of them. Small tiles take as many heads as a
block may have, because a decoded row has nothing else that could share its latents. Large ones take a few heads of many
rows. A kernel may get some of a layer's heads and derives its blocks from those. Rows of tiles come from the geometry
of all heads, and fit.

Lists of selected tokens (DSA) are equally long for all rows, so the number of rows decides how many splits keep a GPU busy.
The plan knows no GPU: partials are capped, and a GPU larger than the cap gets fewer splits. For a window and entries
(DeepSeek-V4) only the device knows how many places a row has. Splits follow from the number of rows there too; those of short
rows stay empty, which costs almost nothing.
"""

from holdfast.kernels.geometry import BLOCK_TOKENS, TileGeometry

SMALL_HEIGHT = 16
"""Least rows times heads of a tensor-core tile: with few heads, a small tile takes more rows."""
LARGE_HEIGHT = 64
"""Rows times heads of a large tile, and most heads of a block. Sums of twice as many would take all registers."""
LARGE_HEADS = 8
"""Most heads of a block in large tiles."""
PLAIN_PROGRAMS_PER_SM = 1
"""Programs per SM over plain pages: one with large blocks in flight reads faster than two with small ones."""
PLAIN_TILE_COST = 192
"""Cost of a change of tile in tokens that such a program could read: about 6 us on an H200 (docs/log.md)."""


def head_blocks(num_heads: int, large: bool = False) -> tuple[int, int]:
    """Return the number of head blocks and the heads of a block; the last may have fewer."""
    most = LARGE_HEADS if large else LARGE_HEIGHT
    num_blocks = -(-num_heads // most)
    return num_blocks, min(num_heads, LARGE_HEADS) if large else -(-num_heads // num_blocks)


def tile_height(num_heads: int, large: bool) -> int:
    """Return rows times heads of a kernel's tile: a power of two."""
    return LARGE_HEIGHT if large else max(SMALL_HEIGHT, 1 << (head_blocks(num_heads)[1] - 1).bit_length())


def tile_rows(num_heads: int, large: bool) -> int:
    """Return the rows of a tile for the heads of a block, at least one."""
    return max(1, (LARGE_HEIGHT if large else SMALL_HEIGHT) // head_blocks(num_heads, large)[1])


def latent_geometry(num_heads: int, is_quantized: bool = False) -> TileGeometry:
    """Return the tile geometry of a layer; ranges of tokens begin at multiples of its blocks."""
    small_programs = programs_per_sm(tile_height(num_heads, large=False)) if is_quantized else PLAIN_PROGRAMS_PER_SM
    return TileGeometry(
        small_rows=tile_rows(num_heads, large=False),
        large_rows=tile_rows(num_heads, large=True),
        small_programs_per_sm=small_programs,
        large_programs_per_sm=programs_per_sm(LARGE_HEIGHT),
        block_tokens=BLOCK_TOKENS,
        takes_whole_turns=True,
        tile_cost_tokens=0 if is_quantized else PLAIN_TILE_COST,
    )


def programs_per_sm(height: int) -> int:
    """Return programs per SM over quantized pages: as many as fit with latents, queries and sums."""
    return 2 if height < LARGE_HEIGHT else 1


MAX_SPLITS = 32
"""Most splits of one list: each is 64 of 2,048 tokens, one block of a kernel."""
PROGRAMS_PER_SM = 2
"""Least low tiles per SM that a step is split into, if possible."""
PARTIAL_TILES = 2 * PROGRAMS_PER_SM * 132
"""Most partials of head blocks: rounding up doubles them if rows are slightly more than half of the programs."""
TILE_COST = 2
"""Cost to start and end a high tile, in blocks of a list's tokens."""
PARTIAL_COST = 1 / 40
"""Cost to write and merge a partial of 64 heads, in blocks; a merge costs one block."""


def sparse_splits(num_rows: int, num_heads: int, num_sms: int) -> int:
    """Return the splits of every row's list; rows include padding. One split writes no partials."""
    num_tiles = num_rows * head_blocks(num_heads)[0]
    most = max(1, min(MAX_SPLITS, PARTIAL_TILES // num_tiles))
    if tile_height(num_heads, large=False) < LARGE_HEIGHT:
        return min(-(-PROGRAMS_PER_SM * num_sms // num_tiles), most)
    return min(range(1, most + 1), key=lambda splits: _waves_cost(num_tiles, splits, num_sms))


def _waves_cost(num_tiles: int, splits: int, num_sms: int) -> float:
    """Return the cost in blocks of tokens per SM, one high tile at a time, plus the cost of partials."""
    num_waves = -(-num_tiles * splits // num_sms)
    merge_cost = 1 + PARTIAL_COST * num_tiles * splits if splits > 1 else 0
    return num_waves * (-(-MAX_SPLITS // splits) + TILE_COST) + merge_cost


def sparse_partials(max_rows: int, num_heads: int) -> int:
    """Return the most partial rows (all heads each) of any step of at most `max_rows` rows, on any GPU."""
    return min(max_rows * MAX_SPLITS, PARTIAL_TILES // head_blocks(num_heads)[0])


LOW_PROGRAM_COST, LOW_MERGE_COST = 128, 128
"""Cost to start and end a low tile, and cost of a merge, in tokens."""


def low_splits(num_rows: int, num_heads: int, num_places: int, num_sms: int, block_tokens: int) -> int:
    """Return the splits with the fewest waves if a program has a multiprocessor to itself; at most `sparse_splits`."""

    def cost(splits: int) -> int:
        num_waves = -(-num_rows * splits // num_sms)
        places = -(-num_places // (splits * block_tokens)) * block_tokens
        return num_waves * (places + LOW_PROGRAM_COST) + (LOW_MERGE_COST if splits > 1 else 0)

    return min(range(1, sparse_splits(num_rows, num_heads, num_sms) + 1), key=cost)


ENTRY_SPLITS = 64
"""Most splits of a row of compressed attention."""
ENTRY_TILE_COST, ENTRY_PARTIAL_COST, ENTRY_MERGE_COST = 2.5, 0.011, 0.6
"""Costs of a tile's start and end, a head block's partial, and a merge, in blocks of 64 places (about 3 us each)."""
ENTRY_TYPICAL_BLOCKS = (10, 18, 130)
"""Blocks per row for which splits minimize the relative cost: a window and 512, 1,024 or 8,192 entries."""


def compressed_splits(num_rows: int, num_heads: int, num_sms: int) -> int:
    """Return the splits of every row; rows include padding. One split writes no partials."""
    num_tiles = num_rows * head_blocks(num_heads)[0]
    most = max(1, min(ENTRY_SPLITS, PARTIAL_TILES // num_tiles))

    def cost(splits: int, blocks: int) -> float:
        num_waves = -(-num_tiles * splits // num_sms)
        merge_cost = ENTRY_MERGE_COST + ENTRY_PARTIAL_COST * num_tiles * min(splits, blocks) if splits > 1 else 0.0
        return num_waves * (-(-blocks // splits) + ENTRY_TILE_COST) + merge_cost

    return min(range(1, most + 1), key=lambda splits: sum(cost(splits, own) / own for own in ENTRY_TYPICAL_BLOCKS))


def compressed_partials(max_rows: int, num_heads: int) -> int:
    """Like `sparse_partials` for compressed attention."""
    return min(max_rows * ENTRY_SPLITS, PARTIAL_TILES // head_blocks(num_heads)[0])
