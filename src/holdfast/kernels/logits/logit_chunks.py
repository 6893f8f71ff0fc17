"""How kernels work on rows of logits: the chunks of a vocabulary, a table of rows, and the scratch; no torch.

S rows of a step, R rows that are worked on together, V vocabulary, P chunks of it, B buckets of distances, C candidates
"""

from typing import NamedTuple

from holdfast.memory.tensor_spec import TensorSpec

CHUNK_TOKENS = 8192
"""Tokens of one program: a lone row still fills a good part of a GPU."""
NUM_BUCKETS = 128
"""Of distances below the likeliest token: sixteen to an octave from 1/4 to 61, the first and the last open."""
MAX_CANDIDATES = 4096
"""Most tokens of a row that are listed by themselves; a row that keeps more is worked on as a whole."""
MAX_ROWS = 128
"""Most rows that are worked on together: enough to fill a GPU, and what they take does not grow with the sequences."""
EDITS_PER_PROGRAM = 256
"""A list of edits comes in whole programs: as an argument its length would be compiled for in several ways."""
NO_TOKEN = -1
"""In place of a token id: the row holds NaN, or rules every token out."""


class LogitRow(NamedTuple):
    """One row of a table, in float64: whole numbers of this size are exact in it."""

    source: int = 0
    """The row of the logits."""
    target: int = 0
    """The row of the result."""
    negative_temperature: float = 0.0
    """0 takes the likeliest token."""
    min_p: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps all."""
    uniform: float = 0.0
    """The random number."""
    unused: float = 0.0
    """A row is 64 bytes, so that a table may begin at any of them."""


NUM_FIELDS = len(LogitRow._fields)


def num_chunks(vocab_size: int, chunk_tokens: int = CHUNK_TOKENS) -> int:
    """Chunks of a row, the last of which may be short."""
    return -(-vocab_size // chunk_tokens)


def scratch_specs(max_rows: int, vocab_size: int) -> tuple[TensorSpec, ...]:
    """What `LogitScratch` holds: the first two for every row of a step, the others for rows that are worked on together."""
    rows, chunks = min(max_rows, MAX_ROWS), num_chunks(vocab_size)
    candidates = min(vocab_size, MAX_CANDIDATES)
    return (
        TensorSpec("chunk_largest", (max_rows, chunks), "float32"),
        TensorSpec("chunk_argmax", (max_rows, chunks), "int32"),
        TensorSpec("chunk_weights", (rows, chunks), "int64"),
        TensorSpec("chunk_nearer", (rows, chunks), "int32"),
        TensorSpec("chunk_counts", (rows, chunks, NUM_BUCKETS), "int32"),
        TensorSpec("num_listed", (rows,), "int32"),
        TensorSpec("listed_logits", (rows, candidates), "float32"),
        TensorSpec("listed_ids", (rows, candidates), "int32"),
    )
