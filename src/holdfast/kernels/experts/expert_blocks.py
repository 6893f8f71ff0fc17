"""How pairs of token and expert fall into blocks of rows, from their numbers alone: the room that an order takes; no torch."""

from typing import NamedTuple

from holdfast.memory.tensor_spec import TensorSpec

MAX_DIRECT_TOKENS = 4
"""Up to so many tokens hardly share experts: a weight that two of them read comes out of the cache the second time."""
CUT_PAIRS = 2048
"""Pairs that one program looks through: more of them are cut, and counted in a launch of their own."""

FEW_PAIRS, MANY_PAIRS = 256, 1024
"""That are looked at at a time."""


class OrderForm(NamedTuple):
    """What of the launches over pairs follows from the number of tokens."""

    block_rows: int
    """1: pairs are not ordered, and what follows is not looked at."""
    block_pairs: int
    """Pairs that are looked at at a time."""
    block_cuts: int
    """A power of two that the cuts are not more than."""
    is_whole: bool
    """Pairs are a multiple of 16, and ids are loaded four at a time: Triton compiles for it by itself."""


def row_form(num_rows: int, top_k: int, num_experts: int, cut_pairs: int = CUT_PAIRS) -> OrderForm:
    """The form of a step of so many tokens."""
    num_pairs = num_rows * top_k
    num_cuts = -(-num_pairs // cut_pairs)
    return OrderForm(
        block_rows_for(num_rows, top_k, num_experts),
        FEW_PAIRS if num_pairs <= FEW_PAIRS else MANY_PAIRS,
        1 << (num_cuts - 1).bit_length(),
        num_pairs % 16 == 0,
    )


def block_rows_for(num_rows: int, top_k: int, num_experts: int) -> int:
    """Rows of a block: near what an expert gets on average, because a block costs the reading of its expert's weight."""
    if num_rows <= MAX_DIRECT_TOKENS:
        return 1
    pairs_per_expert = num_rows * top_k / num_experts
    return next((rows for rows, most in ((16, 8), (32, 24), (64, 96)) if pairs_per_expert <= most), 128)


def num_blocks_for(num_pairs: int, num_experts: int, block_rows: int) -> int:
    """The most blocks that any choice of experts can take: every expert begins one, and the other pairs fill whole ones."""
    if block_rows == 1:
        return 0
    begun = min(num_pairs, num_experts)
    return begun + (num_pairs - begun) // block_rows


def order_specs(num_rows: int, top_k: int, num_experts: int) -> tuple[TensorSpec, ...]:
    """What `order_experts` needs for so many tokens: pairs, experts of blocks, and counts by cut."""
    block_rows = block_rows_for(num_rows, top_k, num_experts)
    num_pairs = num_rows * top_k
    num_blocks = num_blocks_for(num_pairs, num_experts, block_rows)
    num_cuts = -(-num_pairs // CUT_PAIRS) if block_rows > 1 else 0
    return (
        TensorSpec("expert pairs", (num_blocks, block_rows), "int32"),
        TensorSpec("block experts", (num_blocks,), "int32"),
        TensorSpec("expert counts", (num_cuts if num_cuts > 1 else 0, num_experts), "int32"),
    )
