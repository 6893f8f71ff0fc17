"""Sizes of the top-k selection of tokens (DSA), shared by kernels and plans: blocks, samples, lists, scratch; no torch."""

from math import isqrt
from typing import NamedTuple

from holdfast.memory.workspace_plan import TensorSpec

BLOCK_ITEMS = 8192
"""Scores that a program holds in registers and selects from: all of a short row, the nearest of a long row."""
CHUNK_TOKENS = 4096
"""Tokens of a row per program that filters it."""
SAMPLE_TOKENS = 2048
"""Sampled tokens of a long row: one in 64 of 131072."""
MAX_STRIDE = 64
"""Most tokens per sampled token: longer rows have more samples."""
MAX_CHUNKS = 1024
"""Most chunks of a row: the shared memory of a program holds no more."""
MAX_TOP_K = 4096
"""Largest K. A block is at least four times as large, and a larger one would exceed a program's registers."""


class TopKForm(NamedTuple):
    """Sizes of the selection, all powers of two."""

    block_items: int = BLOCK_ITEMS
    """Least items of a block; it is also at least four times K."""
    chunk_tokens: int = CHUNK_TOKENS
    sample_tokens: int = SAMPLE_TOKENS

    def block(self, k: int) -> int:
        """Return the items of a row's program: the longest row without a sample, and the length of a list."""
        return max(self.block_items, _power_of_two(4 * k))

    def sample(self, max_context: int) -> int:
        """Return the sampled tokens of a long row."""
        return max(self.sample_tokens, _power_of_two(-(-max_context // MAX_STRIDE)))

    def wanted(self, k: int) -> int:
        """Return the rank of the key that a sample estimates: the geometric mean of K and a full list.

        If one token in 64 is sampled and K is 2048, the estimate takes 64 sampled tokens; 32 are expected among the K best and
        128 in a full list. Either is more than five standard deviations away.
        """
        block = self.block(k)
        return max(isqrt(k * block), k + block // 16)


TOP_K_FORM = TopKForm()


def num_warps(num_items: int) -> int:
    """Return the warps of a program with this many items: 16 items per thread, if there are enough."""
    return max(1, min(16, num_items // 512), min(4, num_items // 128))


def top_k_specs(max_rows: int, max_context: int, k: int, form: TopKForm = TOP_K_FORM) -> tuple[TensorSpec, ...]:
    """Return the scratch of `top_k_tokens`. Nothing in it outlives a call."""
    block = form.block(k)
    rows, num_chunks = max_rows if max_context > block else 0, -(-max_context // form.chunk_tokens)
    return (
        TensorSpec("near limits", (rows, 2), "int32"),
        TensorSpec("near chunks", (rows, 2, num_chunks), "int32"),
        TensorSpec("near keys", (rows, block), "int32"),
        TensorSpec("near tokens", (rows, block), "int32"),
    )


def unsupported_top_k(k: int, max_context: int) -> str | None:
    """Return why no kernel selects K tokens from this context, or None."""
    if k >= max_context:
        return None
    if k > MAX_TOP_K:
        return f"a row may choose up to {MAX_TOP_K} tokens, not {k}"
    most = MAX_CHUNKS * CHUNK_TOKENS
    return f"a row may choose among up to {most} tokens, not {max_context}" if max_context > most else None


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
