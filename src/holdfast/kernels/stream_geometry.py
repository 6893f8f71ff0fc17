"""Sizes of hyper-connections (mHC), as kernels and plans agree on them: columns of shares, splits of a mix along its inputs, scratch; no torch.

T rows, S streams, H hidden, M = (2 + S) S shares of a row, C splits, P columns of a split's sums
"""

from holdfast.memory.workspace_plan import TensorSpec

MAX_STREAMS = 4
"""That kernels take."""
STREAM_COLUMNS = 32
"""Of every stream, that a program takes at a time: 128 bytes of a row of the weights."""
LONE_ROWS = 2
"""Up to so many rows each has programs of its own, which multiply where they load: a weight that two rows read comes out of the
cache the second time. On an H200 and for 4096 columns a launch takes 1.5 us of one row, where blocks of 16 take 2.4; of four, 2.6."""
FEW_ROWS, FEW_ROWS_BLOCK, MANY_ROWS_BLOCK = 64, 16, 64
"""Up to so many rows programs take 16 of them at a time, and beyond it 64."""
MAX_SPLITS = 128
"""About as many as a large GPU has multiprocessors."""
SPLIT_PROGRAMS = 512
"""So that the sums of splits do not grow with the rows, there are fewer splits where many rows make as many programs."""


def num_shares(num_streams: int) -> int:
    """What a row mixes its streams by: before a block, behind it, and from every stream to every one."""
    return (2 + num_streams) * num_streams


def sum_columns(num_sums: int) -> int:
    """Columns of a split's sums, with the sum of squares behind the last: a power of two that a product takes."""
    return max(16, 1 << num_sums.bit_length())


def row_block(num_rows: int) -> int:
    """Rows of a program."""
    if num_rows <= LONE_ROWS:
        return 1
    return FEW_ROWS_BLOCK if num_rows <= FEW_ROWS else MANY_ROWS_BLOCK


def chunks_of_split(num_rows: int, hidden_size: int) -> int:
    """How many times the columns of a chunk a program takes."""
    num_chunks, num_blocks = -(-hidden_size // STREAM_COLUMNS), -(-num_rows // row_block(num_rows))
    return -(-num_chunks // max(1, min(MAX_SPLITS, SPLIT_PROGRAMS // max(1, num_blocks))))


def num_splits(num_rows: int, hidden_size: int) -> int:
    """Splits of a mix along its inputs; each leaves its sums."""
    return -(-hidden_size // (STREAM_COLUMNS * chunks_of_split(num_rows, hidden_size)))


def stream_parts_spec(num_rows: int, num_streams: int) -> TensorSpec:
    """Room for the sums of all splits, which never shrinks with more rows: one vector, from whose start a step takes its own."""
    bound = max(num_rows, min(num_rows * MAX_SPLITS, MANY_ROWS_BLOCK * SPLIT_PROGRAMS))
    return TensorSpec("stream_parts", (bound * sum_columns(num_shares(num_streams)),), "float32")


def stream_specs(num_rows: int, num_streams: int) -> tuple[TensorSpec, ...]:
    """What hyper-connections need beside the streams themselves: shares of a row, and room for sums."""
    shares = TensorSpec("stream_shares", (num_rows, num_shares(num_streams)), "float32")
    return shares, stream_parts_spec(num_rows, num_streams)
