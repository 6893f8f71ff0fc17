"""Sizes of the selection of tokens by score (DSA), as kernels and plans agree on them: blocks, samples, lists, scratch; no torch."""

from math import isqrt
from typing import NamedTuple

from holdfast.memory.workspace_plan import TensorSpec

BLOCK_ITEMS = 8192
"""Scores that a program holds in its registers, and among which it selects: of a short row all, of a long one those that are near."""
CHUNK_TOKENS = 4096
"""Of a program that looks through a part of a row."""
SAMPLE_TOKENS = 2048
"""Of a long row; of one of 131072 tokens one in 64."""
MAX_STRIDE = 64
"""From one sampled token to the next: of longer rows more are sampled."""
MAX_CHUNKS = 1024
"""Of a row, as a program has words of shared memory for them."""
MAX_TOP_K = 4096
"""A block is four times as large or more, and a program has no registers for a larger one."""


class TopKForm(NamedTuple):
    """How rows are worked on. All are powers of two."""

    block_items: int = BLOCK_ITEMS
    """At the least: no less than four times K."""
    chunk_tokens: int = CHUNK_TOKENS
    sample_tokens: int = SAMPLE_TOKENS

    def block(self, k: int) -> int:
        """Items of the program of a row, and so the longest row that needs no sample, and the room of a list."""
        return max(self.block_items, _power_of_two(4 * k))

    def sample(self, max_context: int) -> int:
        """Tokens that are sampled of a long row."""
        return max(self.sample_tokens, _power_of_two(-(-max_context // MAX_STRIDE)))

    def wanted(self, k: int) -> int:
        """The rank of the key that a sample is asked for: as far from K as from a full list, in relation.

        With one token in 64 of a row sampled and a K of 2048: 64 sampled tokens are asked for, where 32 are expected among the K best
        and 128 in a full list. Either is beyond five standard deviations.
        """
        block = self.block(k)
        return max(isqrt(k * block), k + block // 16)


TOP_K_FORM = TopKForm()


def num_warps(num_items: int) -> int:
    """Of a program that holds so many: 16 a thread, where there are enough. A kernel that runs once is as fast as it is short."""
    return max(1, min(16, num_items // 512), min(4, num_items // 128))


def top_k_specs(max_rows: int, max_context: int, k: int, form: TopKForm = TOP_K_FORM) -> tuple[TensorSpec, ...]:
    """What `top_k_tokens` works in for up to so many rows of up to so many scores. Nothing in it outlives a call."""
    block = form.block(k)
    rows, num_chunks = max_rows if max_context > block else 0, -(-max_context // form.chunk_tokens)
    return (
        TensorSpec("near limits", (rows, 2), "int32"),
        TensorSpec("near chunks", (rows, 2, num_chunks), "int32"),
        TensorSpec("near keys", (rows, block), "int32"),
        TensorSpec("near tokens", (rows, block), "int32"),
    )


def unsupported_top_k(k: int, max_context: int) -> str | None:
    """Why no kernel takes this choice of K tokens out of a context, in words."""
    if k >= max_context:
        return None
    if k > MAX_TOP_K:
        return f"a row may choose up to {MAX_TOP_K} tokens, not {k}"
    most = MAX_CHUNKS * CHUNK_TOKENS
    return f"a row may choose among up to {most} tokens, not {max_context}" if max_context > most else None


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
