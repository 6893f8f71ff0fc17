"""The state that entries are made from (DeepSeek-V4), for kernels, caches and plans: its shape and bytes; no torch.

A state is float32 [K, 3, D]. For each of D channels it holds the largest gate m so far, the sum l of exp(gate - m), and
acc, the sum of exp(gate - m) * x, over the pooled tokens. Their entry is acc / l. Tokens themselves are not kept.
"""

from holdfast.quant.formats import bytes_for

NUM_PARTS = 3
"""m, l, acc."""
STATE_DTYPE = "float32"


def num_sums(is_overlapped: bool) -> int:
    """Return K: one for the current entry; if entries overlap, one more for this window's share of the next."""
    return 2 if is_overlapped else 1


def pooled_width(dim: int, is_overlapped: bool) -> int:
    """Return the columns of pooled vectors, as many as of gates; with overlap, the next entry's come first."""
    return dim * num_sums(is_overlapped)


def state_shape(dim: int, is_overlapped: bool) -> tuple[int, int, int]:
    """Return a sequence's shape [K, 3, D], in one layer or its index."""
    return num_sums(is_overlapped), NUM_PARTS, dim


def state_bytes(dim: int, is_overlapped: bool) -> int:
    """Return the bytes of a sequence's state, in one layer or its index."""
    return bytes_for(STATE_DTYPE, state_shape(dim, is_overlapped))
