"""Bytes of logits and of everything that sampling holds, from shapes; no torch.

Sampling works on blocks of rows, so that what it needs beside the logits does not grow with the number of sequences.
"""

from holdfast.memory.planner import Term
from holdfast.request.sampling_params import MAX_LOGPROBS

BLOCK_ELEMENTS = 2**22
"""Most logits in a block of rows; a row that is longer is a block of its own."""
EDIT_ENTRIES = 2**16
"""Most single logits that are penalised, biased or banned at once."""
NUM_BUCKETS = 2048
"""Histogram buckets of one round of the search for a cutoff."""
MAX_NARROW_TOP_K = 256
"""Up to this top_k a row is sampled from its sorted candidates, beyond it from the whole vocabulary."""

_FLOAT32 = 4
_INT32 = 4
_INT64 = 8
_FLOAT64 = 8
_BOOL = 1


def rows_per_block(vocab_size: int) -> int:
    """Rows that are worked on together."""
    return max(1, BLOCK_ELEMENTS // vocab_size)


def sampling_terms(max_num_seqs: int, vocab_size: int) -> tuple[Term, ...]:
    """What a step of `max_num_seqs` sequences needs at its largest."""
    rows = min(max_num_seqs, rows_per_block(vocab_size))
    return (
        Term("logits", max_num_seqs * vocab_size * _FLOAT32, f"float32 [{max_num_seqs}, {vocab_size}]"),
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
    logprobs = 3 * (4 + 2 * MAX_LOGPROBS) * _FLOAT64
    return parameters + logprobs + 8 * _INT64
