"""Sizes of hyper-connections (mHC) for kernels and plans: shares, splits of a mix along its inputs, scratch buffers; no torch.

T rows, S streams, H hidden, M = (2 + S) S shares of a row, C splits, P columns of a split's sums
"""

from holdfast.memory.workspace_plan import TensorSpec

MAX_STREAMS = 4
STREAM_COLUMNS = 32
"""Columns of a stream per loop iteration: 128 bytes of a row of the weights."""
LONE_ROWS = 2
"""Most rows that get their own programs, without shared memory. If there are two, the second reads the weight from the
cache. On an H200 with 4096 columns a launch takes 1.5 us for one row (blocks of 16 take 2.4) and 2.6 for four."""
FEW_ROWS, FEW_ROWS_BLOCK, MANY_ROWS_BLOCK = 64, 16, 64
"""Rows per program: 16 for at most FEW_ROWS rows, else 64."""
MAX_SPLITS = 128
"""About the SMs of a large GPU."""
SPLIT_PROGRAMS = 512
"""Most programs before splits decrease, so that partial sums do not grow with the rows."""


def num_shares(num_streams: int) -> int:
    """Return the number of shares of a row: before a block, after it, and from every stream to every stream."""
    return (2 + num_streams) * num_streams


def sum_columns(num_sums: int) -> int:
    """Return the columns of a split's sums with the sum of squares: a power of two that a product takes."""
    return max(16, 1 << num_sums.bit_length())


def row_block(num_rows: int) -> int:
    """Return the rows of a program."""
    if num_rows <= LONE_ROWS:
        return 1
    return FEW_ROWS_BLOCK if num_rows <= FEW_ROWS else MANY_ROWS_BLOCK


def chunks_of_split(num_rows: int, hidden_size: int) -> int:
    """Return the chunks of columns that a program takes."""
    num_chunks, num_blocks = -(-hidden_size // STREAM_COLUMNS), -(-num_rows // row_block(num_rows))
    return -(-num_chunks // max(1, min(MAX_SPLITS, SPLIT_PROGRAMS // max(1, num_blocks))))


def num_splits(num_rows: int, hidden_size: int) -> int:
    """Return the splits of a mix along its inputs."""
    return -(-hidden_size // (STREAM_COLUMNS * chunks_of_split(num_rows, hidden_size)))


def stream_parts_spec(num_rows: int, num_streams: int) -> TensorSpec:
    """Return the scratch buffer for the sums of all splits: a vector that never shrinks with more rows."""
    bound = max(num_rows, min(num_rows * MAX_SPLITS, MANY_ROWS_BLOCK * SPLIT_PROGRAMS))
    return TensorSpec("stream_parts", (bound * sum_columns(num_shares(num_streams)),), "float32")


def stream_specs(num_rows: int, num_streams: int) -> tuple[TensorSpec, ...]:
    """Return the buffers of hyper-connections beside the streams: shares and sums."""
    shares = TensorSpec("stream_shares", (num_rows, num_shares(num_streams)), "float32")
    return shares, stream_parts_spec(num_rows, num_streams)
