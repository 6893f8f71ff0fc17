"""Sizes of the selection of tokens by score (DSA), as kernels and plans agree on them: chunks, samples, lists, scratch; no torch."""

from typing import NamedTuple

from holdfast.memory.workspace_plan import TensorSpec

DIRECT_TOKENS = 16384
"""Up to so many tokens one program looks through a row itself: more programs would cost two launches more than they save."""
CHUNK_TOKENS = 4096
"""Of a program that looks through a part of a row."""
BLOCK_ITEMS = 4096
"""Scores that the program of a row looks at at a time."""
SAMPLE_TOKENS = 4096
"""About as many are sampled of a row."""
MAX_STRIDE = 64
"""From one sampled token to the next, at the most: of a very long row more are sampled."""


SPARE_TOKENS = 1536
"""A key that a sample tells has a rank that is about right. The one that is asked for lies so far beyond K, or nearly as far as
K itself: with one token in 40 that is more than four standard deviations, so that hardly ever fewer than K are from it on. Of a
K of 2048 it leaves tokens for one block."""


class TopKForm(NamedTuple):
    """How rows are worked on."""

    direct_tokens: int = DIRECT_TOKENS
    chunk_tokens: int = CHUNK_TOKENS
    """A power of two, as is the next."""
    block_items: int = BLOCK_ITEMS
    sample_tokens: int = SAMPLE_TOKENS
    spare_tokens: int = SPARE_TOKENS

    def wanted_tokens(self, k: int) -> int:
        """The rank of the key that a sample is asked for."""
        return k + max(k * 7 // 8, self.spare_tokens)

    def room(self, k: int) -> int:
        """Most tokens from that key on, among which the K are then found exactly."""
        return 2 * self.wanted_tokens(k)


TOP_K_FORM = TopKForm()


def top_k_specs(max_rows: int, max_context: int, k: int, form: TopKForm = TOP_K_FORM) -> tuple[TensorSpec, ...]:
    """What `top_k_tokens` works in for up to so many rows of up to so many scores. Nothing in it outlives a call."""
    is_long = max_context > form.direct_tokens
    rows, num_chunks = max_rows if is_long else 0, -(-max_context // form.chunk_tokens)
    return (
        TensorSpec("near limits", (rows, 4), "int32"),
        TensorSpec("near chunks", (rows, 2, num_chunks), "int32"),
        TensorSpec("unsorted tokens", (rows, form.room(k)), "int32"),
        TensorSpec("near tokens", (max_rows, form.room(k)), "int32"),
    )
