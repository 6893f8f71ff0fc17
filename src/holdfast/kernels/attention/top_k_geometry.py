"""Sizes of the selection of tokens by score (DSA), as kernels and plans agree on them: groups, lists, scratch; no torch.

A row of many scores is cut into groups of neighbours. The K tokens that are wanted lie in the K groups with the largest
maxima, whatever the scores are, so that a program looks through the maxima and through K groups, and not through the row.
"""

from typing import NamedTuple

from holdfast.memory.workspace_plan import TensorSpec

DIRECT_TOKENS = 16384
"""Up to so many tokens one program looks through a row itself: maxima would cost a launch more than they save."""
CHUNK_TOKENS = 4096
"""Of a program that finds maxima."""
BLOCK_ITEMS, SMALL_BLOCK_ITEMS = 4096, 2048
"""Scores or maxima that the program of a row looks at at a time, and those of a sample or of a list of tokens."""


class TopKForm(NamedTuple):
    """How a row is worked on. All are powers of two."""

    group_tokens: int
    """1: without groups."""
    chunk_tokens: int = CHUNK_TOKENS
    block_items: int = BLOCK_ITEMS
    small_block_items: int = SMALL_BLOCK_ITEMS


def top_k_form(context: int, k: int) -> TopKForm:
    """Of rows of so many scores: groups such that their maxima are about as many as the tokens of the K that are taken."""
    group_tokens = 1
    if context > DIRECT_TOKENS:
        group_tokens = 2
        while 2 * k * group_tokens**2 < context:
            group_tokens *= 2
    return TopKForm(group_tokens)


def most_taken_groups(k: int) -> int:
    """Room for groups. There is so much to spare that a limit which a sample tells misses it in one of some thousand rows."""
    return k + max(k // 2, 768)


def most_near_tokens(k: int) -> int:
    """Room for the tokens among which the K are then found exactly."""
    return 2 * k + 64


def top_k_specs(max_rows: int, max_context: int, k: int) -> tuple[TensorSpec, ...]:
    """What `top_k_tokens` works in for up to so many rows of up to so many scores. Nothing in it outlives a call."""
    group_tokens = top_k_form(max_context, k).group_tokens
    # Rows of fewer scores may have groups half as large, and then more of them.
    num_groups = max(-(-max_context // group_tokens), k * group_tokens)
    has_groups = group_tokens > 1
    return (
        TensorSpec("group keys", (max_rows if has_groups else 0, num_groups), "int32"),
        TensorSpec("taken groups", (max_rows if has_groups else 0, most_taken_groups(k)), "int32"),
        TensorSpec("near tokens", (max_rows, most_near_tokens(k)), "int32"),
    )
