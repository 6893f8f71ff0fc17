"""Bytes of everything that sampling holds, from shapes; no torch.

On a CPU these are temporaries of a step, in blocks of rows, so that they do not grow with the number of sequences. On a GPU
they are buffers that are taken once: kernels leave no temporaries, and only rows whose logits are edited are copied, a
block at a time.
"""

from holdfast.kernels.logits.logit_chunks import EDITS_PER_PROGRAM, MAX_ROWS, NUM_FIELDS, scratch_specs
from holdfast.memory.planner import PAGE_PHASES, Term
from holdfast.memory.tensor_spec import TensorSpec
from holdfast.request.sampling_params import MAX_LOGPROBS

BLOCK_ELEMENTS = 2**22
"""Most logits in a block of rows on a CPU; a row that is longer is a block of its own."""
EDIT_ENTRIES = 2**16
"""Most single logits that are penalised, biased or banned at once on a CPU."""
NUM_BUCKETS = 2048
"""Histogram buckets of one round of the search for a cutoff on a CPU."""
MAX_NARROW_TOP_K = 256
"""Up to this top_k a row is sampled from its sorted candidates on a CPU, beyond it from the whole vocabulary."""
EDITED_ELEMENTS = 2**23
"""Most logits in a block of edited rows on a GPU: every block costs a dozen launches."""
LISTED_EDITS = 2**20
"""Most edits that are on their way to a GPU at once. More go in rounds, between which the host waits."""
PROMPT_ROWS = 64
"""Rows of a prompt whose log-probabilities a GPU computes at once, however few sequences there are."""
NUM_COLUMNS = 4 + 2 * MAX_LOGPROBS
"""Of one row's log-probabilities."""

_FLOAT32 = 4
_INT32 = 4
_INT64 = 8
_FLOAT64 = 8
_BOOL = 1

_REASONS = {
    "argmax": "argmax of each row",
    "chosen": "the chosen token of each row",
    "block_argmax": "the same for a block of rows",
    "rows": "parameters of each row",
    "columns": "log-probabilities of each row",
    "block": "edited rows, a block at a time",
    "edits": "penalised, biased and banned logits",
    "chunk_largest": "argmax by chunk of the vocabulary",
    "chunk_argmax": "argmax by chunk of the vocabulary",
    "chunk_weights": "sums by chunk of the vocabulary",
    "chunk_nearer": "sums by chunk of the vocabulary",
    "chunk_counts": "tokens by chunk and distance",
    "num_listed": "candidates of each row",
    "listed_logits": "candidates of each row",
    "listed_ids": "candidates of each row",
}


def rows_per_block(vocab_size: int, max_rows: int) -> int:
    """Rows that are worked on together on a CPU."""
    return min(max_rows, max(1, BLOCK_ELEMENTS // vocab_size))


def edited_rows_per_block(vocab_size: int, max_rows: int) -> int:
    """Rows whose edited logits are held at once on a GPU."""
    return min(max_rows, MAX_ROWS, max(1, EDITED_ELEMENTS // vocab_size))


def sampling_terms(max_num_seqs: int, vocab_size: int, device_kind: str) -> tuple[Term, ...]:
    """What a step of `max_num_seqs` sequences needs at its largest; `device_kind` is cpu or cuda."""
    if device_kind != "cpu":
        return tuple(
            Term(f"sampling/{spec.name}", spec.aligned_bytes, _REASONS[spec.name], PAGE_PHASES)
            for spec in device_specs(max_num_seqs, vocab_size)
        )
    rows = rows_per_block(vocab_size, max_num_seqs)
    return (
        Term("sampling/block", rows * _row_bytes(vocab_size), f"temporaries of {rows} rows at a time"),
        Term(
            "sampling/edits",
            min(rows * vocab_size, EDIT_ENTRIES) * _edit_entry_bytes(),
            "penalised, biased and banned logits",
        ),
        Term(
            "sampling/results",
            vocab_size * _INT32 + max_num_seqs * _result_bytes(),
            "token ids, parameters and log-probabilities",
        ),
    )


def device_specs(max_rows: int, vocab_size: int) -> tuple[TensorSpec, ...]:
    """The buffers on a GPU."""
    rows = max(max_rows, PROMPT_ROWS)
    return (
        TensorSpec("argmax", (rows,), "int64"),
        TensorSpec("block_argmax", (min(rows, MAX_ROWS),), "int64"),
        *host_specs(max_rows, vocab_size),
        TensorSpec("block", (edited_rows_per_block(vocab_size, max_rows), vocab_size), "float32"),
        *scratch_specs(rows, vocab_size),
    )


def host_specs(max_rows: int, vocab_size: int) -> tuple[TensorSpec, ...]:
    """Buffers that have a double in pinned memory of the host, through which their numbers come and go."""
    rows = max(max_rows, PROMPT_ROWS)
    most_edits = 4 * edited_rows_per_block(vocab_size, max_rows) * vocab_size
    num_edits = (4 + min(most_edits, LISTED_EDITS) // EDITS_PER_PROGRAM) * EDITS_PER_PROGRAM  # kinds begin apart
    return (
        TensorSpec("chosen", (rows,), "int64"),
        TensorSpec("rows", (2 * rows, NUM_FIELDS), "float64"),
        TensorSpec("columns", (rows, NUM_COLUMNS), "float64"),
        TensorSpec("edits", (num_edits, 2), "int32"),
    )


def _row_bytes(vocab_size: int) -> int:
    """The most that lives at once for one row, which is while the buckets of a nucleus are filled."""
    whole_vocabulary = (
        _FLOAT32  # distances below the likeliest, read as int32 keys
        + _INT64  # weights
        + _INT32  # bucket numbers
        + _INT64  # the same, as scatter_add wants them
    )
    buckets = 2 * (NUM_BUCKETS + 2) * _INT64  # histogram and running total
    candidates = MAX_NARROW_TOP_K * (8 * _INT64 + 2 * _FLOAT32 + 2 * _BOOL)  # keys, ids, orders, weights, totals
    return vocab_size * whole_vocabulary + buckets + candidates


def _edit_entry_bytes() -> int:
    """One penalised logit: where it is, its penalty, its value, whether it is positive, and what it could become."""
    return _INT64 + _FLOAT32 + _FLOAT32 + _BOOL + 3 * _FLOAT32


def _result_bytes() -> int:
    """Of one row: seven parameters in two forms, and ids with log-probabilities while they are put together."""
    parameters = 2 * 7 * _FLOAT64
    logprobs = 3 * NUM_COLUMNS * _FLOAT64
    return parameters + logprobs + 8 * _INT64
