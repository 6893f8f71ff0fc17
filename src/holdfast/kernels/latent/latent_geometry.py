"""Tiles of kernels over paged latents (MLA), as kernels and plans agree on them: blocks of heads, heights, the geometry; splits of lists of chosen tokens, and of windows with entries; no torch.

A block of heads stands side by side with the rows of a tile, so that a latent that was read serves all of them. Small tiles
take as many heads as a block may have, because a decoded row has nothing else that could share its latents; large ones take a
few heads of many rows. Every kernel over latents finds its blocks from the heads that it is given, which may be some of a
layer's: the rows of tiles are those of the geometry of all heads, and fit.

Lists of chosen tokens (DSA) are as long for every row, so that the number of rows alone says how many splits keep a GPU busy. The
plan knows no GPU: partials are capped, and on a larger one than the cap is for, splits are fewer. Of a window and entries
(DeepSeek-V4) the device alone knows how many places a row has: splits follow from the number of rows all the same, and those of
short rows stay empty, which costs next to nothing.
"""

from holdfast.kernels.geometry import BLOCK_TOKENS, TileGeometry

SMALL_HEIGHT = 16
"""Rows times heads that tensor cores take at the least: what a small tile of few heads is filled up to with rows."""
LARGE_HEIGHT = 64
"""Rows times heads of a large tile, and most heads of a block: the sums of twice as many would be all registers of a multiprocessor."""
LARGE_HEADS = 8
"""Most heads of a block in large tiles."""
PLAIN_PROGRAMS_PER_SM = 1
"""Over plain pages: one program with large blocks of latents under way reads faster than two with small ones."""
PLAIN_TILE_COST = 192
"""Tokens that such a program reads while one tile ends and the next begins: about 6 us on an H200 (docs/log.md)."""


def head_blocks(num_heads: int, large: bool = False) -> tuple[int, int]:
    """Blocks of heads, and heads of a block; the last block may have fewer."""
    most = LARGE_HEADS if large else LARGE_HEIGHT
    num_blocks = -(-num_heads // most)
    return num_blocks, min(num_heads, LARGE_HEADS) if large else -(-num_heads // num_blocks)


def tile_height(num_heads: int, large: bool) -> int:
    """Rows times heads of a tile in a kernel: a power of two."""
    return LARGE_HEIGHT if large else max(SMALL_HEIGHT, 1 << (head_blocks(num_heads)[1] - 1).bit_length())


def tile_rows(num_heads: int, large: bool) -> int:
    """Rows that a tile takes beside the heads of a block, at least one."""
    return max(1, (LARGE_HEIGHT if large else SMALL_HEIGHT) // head_blocks(num_heads, large)[1])


def latent_geometry(num_heads: int, is_quantized: bool = False) -> TileGeometry:
    """Of kernels over the latents of a layer with so many query heads; ranges of tokens begin at multiples of its blocks."""
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
    """Programs a multiprocessor over quantized pages, by the height of their tiles: what has room for latents, queries, sums."""
    return 2 if height < LARGE_HEIGHT else 1


MAX_SPLITS = 32
"""Of one list: 64 tokens of 2,048 each, a block of a kernel."""
PROGRAMS_PER_SM = 2
"""Low tiles of a row and a block of heads that a step is split into at the least, if it can be."""
PARTIAL_TILES = 2 * PROGRAMS_PER_SM * 132
"""Partials of blocks of heads: where rows are a few more than half of the programs, rounding up doubles them."""
TILE_COST = 2
"""Blocks of tokens of a list that the begin and the end of a high tile cost as much as."""
PARTIAL_COST = 1 / 40
"""Blocks that a partial of 64 heads costs, to be written and to be merged; a merge costs one."""


def sparse_splits(num_rows: int, num_heads: int, num_sms: int) -> int:
    """Splits of every row's list in a step of so many rows, padding included; one split writes no partials."""
    num_tiles = num_rows * head_blocks(num_heads)[0]
    most = max(1, min(MAX_SPLITS, PARTIAL_TILES // num_tiles))
    if tile_height(num_heads, large=False) < LARGE_HEIGHT:
        return min(-(-PROGRAMS_PER_SM * num_sms // num_tiles), most)
    return min(range(1, most + 1), key=lambda splits: _turns_cost(num_tiles, splits, num_sms))


def _turns_cost(num_tiles: int, splits: int, num_sms: int) -> float:
    """Blocks of tokens that a multiprocessor which has one high tile at a time goes through, and what partials cost."""
    num_turns = -(-num_tiles * splits // num_sms)
    merge_cost = 1 + PARTIAL_COST * num_tiles * splits if splits > 1 else 0
    return num_turns * (-(-MAX_SPLITS // splits) + TILE_COST) + merge_cost


def sparse_partials(max_rows: int, num_heads: int) -> int:
    """Partial rows, of all heads each, that any step of up to so many rows has at the most, on any GPU."""
    return min(max_rows * MAX_SPLITS, PARTIAL_TILES // head_blocks(num_heads)[0])


LOW_PROGRAM_COST, LOW_MERGE_COST = 128, 128
"""Tokens that a program of low tiles goes through while another begins and ends, and while splits are merged."""


def low_splits(num_rows: int, num_heads: int, num_places: int, num_sms: int, block_tokens: int) -> int:
    """Splits of lists so long where a program has a multiprocessor for itself: the fewest turns of all of them, within
    `sparse_splits`."""

    def cost(splits: int) -> int:
        num_turns = -(-num_rows * splits // num_sms)
        places = -(-num_places // (splits * block_tokens)) * block_tokens
        return num_turns * (places + LOW_PROGRAM_COST) + (LOW_MERGE_COST if splits > 1 else 0)

    return min(range(1, sparse_splits(num_rows, num_heads, num_sms) + 1), key=cost)


ENTRY_SPLITS = 64
"""Most splits of a row of compressed attention."""
ENTRY_TILE_COST, ENTRY_PARTIAL_COST, ENTRY_MERGE_COST = 2.5, 0.011, 0.6
"""In the time of a block of 64 places, about 3 us: begin and end of a tile, a partial of a block of heads, the launch of a merge."""
ENTRY_TYPICAL_BLOCKS = (10, 18, 130)
"""Blocks of rows that splits are chosen for, by what they cost each in relation: a window and 512 or 1,024 entries, or 8,192."""


def compressed_splits(num_rows: int, num_heads: int, num_sms: int) -> int:
    """Splits of every row in a step of so many rows, padding included; one split writes no partials."""
    num_tiles = num_rows * head_blocks(num_heads)[0]
    most = max(1, min(ENTRY_SPLITS, PARTIAL_TILES // num_tiles))

    def cost(splits: int, blocks: int) -> float:
        num_turns = -(-num_tiles * splits // num_sms)
        merge_cost = ENTRY_MERGE_COST + ENTRY_PARTIAL_COST * num_tiles * min(splits, blocks) if splits > 1 else 0.0
        return num_turns * (-(-blocks // splits) + ENTRY_TILE_COST) + merge_cost

    return min(range(1, most + 1), key=lambda splits: sum(cost(splits, own) / own for own in ENTRY_TYPICAL_BLOCKS))


def compressed_partials(max_rows: int, num_heads: int) -> int:
    """Partial rows, of all heads each, that any step of up to so many rows has at the most, on any GPU."""
    return min(max_rows * ENTRY_SPLITS, PARTIAL_TILES // head_blocks(num_heads)[0])
