"""The state from which entries are made (DeepSeek-V4), as kernels, caches and plans agree on it: its shape and bytes; no torch.

A state is float32 [K, 3, D]: for each of D channels the largest gate m so far, the sum l of exp(gate - m), and acc, the sum of
exp(gate - m) * x, of the tokens that were pooled. The entry of all of them is acc / l. Tokens themselves are not kept.
"""

from holdfast.quant.formats import bytes_for

NUM_PARTS = 3
"""m, l, acc."""
STATE_DTYPE = "float32"


def num_sums(is_overlapped: bool) -> int:
    """K: the entry that is being made; and, where entries overlap, this window's share of the next."""
    return 2 if is_overlapped else 1


def pooled_width(dim: int, is_overlapped: bool) -> int:
    """Columns of what is pooled, and as many of gates: where entries overlap, first those for the next entry."""
    return dim * num_sums(is_overlapped)


def state_shape(dim: int, is_overlapped: bool) -> tuple[int, int, int]:
    """[K, 3, D] of a sequence, in one layer or its index."""
    return num_sums(is_overlapped), NUM_PARTS, dim


def state_bytes(dim: int, is_overlapped: bool) -> int:
    """State of a sequence, in one layer or its index."""
    return bytes_for(STATE_DTYPE, state_shape(dim, is_overlapped))
