"""Up-projected latent attention (MLA) as sizes: when it is less work than the absorbed form, and how it stays within its room; no torch.

N query heads, P + R elements of a query head, L latent, V value elements of a head, W tokens of a chunk, G heads of a group

Keys and values of every head are made of the latents of W tokens for G heads at a time, attended to, and forgotten.
"""

from typing import NamedTuple

from holdfast.memory.workspace_plan import TensorSpec
from holdfast.quant.formats import DTYPE_BYTES

UP_PROJECTED_BYTES = 96 * 2**20
"""All that one sequence's rows take at a time, whatever their number, the heads and the context."""
STATE_BYTES = UP_PROJECTED_BYTES // 3
"""Of that, what rows have attended to so far; the rest is for latents, keys and values of a chunk."""
CHUNK_STEP = 128
"""Chunks are multiples of so many tokens."""
TILE_ROWS = 128
"""Rows of a program."""
NUM_PROGRAMS = 132
"""The multiprocessors of a large GPU: with fewer programs some of them idle, so the tokens of a chunk are split."""
SPLIT_TOKENS = 512
"""Fewest tokens of a split."""
LEAST_ROWS = 128
"""With fewer rows a program's tile is not full."""
KV_B_COST, ATTENTION_COST = 0.6, 0.7
"""Time of a product here beside one of absorbed attention, as measured on an H200 (TFLOPS): 516 in kv_b and 460 in attention beside 312."""
LAUNCHES_COST = 5 * 10**9
"""In products of absorbed attention, 32 us of an H200, for a group of heads: its launches take a host 150 us, which a step of
thousands of rows hides in part behind its other work; with half as many, prompts of 512 rows would wait for them."""
MANY_ROWS = 4096
"""From so many rows on half as many heads fill a GPU, and chunks may be longer."""


class UpProjection(NamedTuple):
    """The sizes of a layer."""

    num_heads: int
    latent_dim: int
    rope_dim: int
    nope_dim: int
    value_dim: int

    @property
    def expanded_dim(self) -> int:
        """Rows of kv_b for a head."""
        return self.nope_dim + self.value_dim

    def group_heads(self, num_rows: int) -> int:
        """Heads that are taken at a time, by so many rows; groups are as equal as can be."""
        most = 8 if num_rows >= MANY_ROWS else 16
        return -(-self.num_heads // -(-self.num_heads // most))

    def token_elements(self, num_heads: int) -> int:
        """That a token of a chunk takes: its latent row, and keys and values of a group of heads."""
        return self.latent_dim + self.rope_dim + num_heads * self.expanded_dim

    def chunk_tokens(self, num_heads: int, num_elements: int) -> int:
        """Tokens of a chunk for a group of so many heads, in room for so many elements."""
        tokens = num_elements // self.token_elements(num_heads)
        assert tokens >= CHUNK_STEP, f"room for {tokens} tokens, and a chunk is {CHUNK_STEP} at the least"
        return tokens // CHUNK_STEP * CHUNK_STEP

    def state_rows(self, num_floats: int) -> int:
        """Rows of one head whose state fits into so many float32 numbers: an output and the logarithm of a sum."""
        return num_floats // (self.value_dim + 1)


def num_splits(num_rows: int, num_heads: int, num_tokens: int, state_rows: int) -> int:
    """Splits of a chunk of so many tokens: enough programs where rows and heads are few, in room for so many rows of a head."""
    programs = -(-num_rows // TILE_ROWS) * num_heads
    return max(1, min(NUM_PROGRAMS // programs, num_tokens // SPLIT_TOKENS, state_rows // (num_rows * num_heads)))


def takes_up_projection(num_rows: int, start: int, shape: UpProjection) -> bool:
    """Whether rows of a sequence behind `start` tokens take less time with keys and values of every head.

    Absorbed, a row and token of a head cost 2 L + R products and a row L (P + V) more on both sides of kv_b; up-projected, a row and
    token cost P + R + V, and every token L (P + V). What a prompt's own tokens cost in kv_b is the same either way, so what
    decides is the context before it: by products alone more than L (P + V) / (2 L - P - V) rows, if it is long, 171 for 512, 128
    and 128; by their speeds more than 91. What is saved has to be worth the launches, which are by sequence here: of 16 heads a
    prompt of its own has 800 rows at the least.
    """
    pairs = num_rows * start + num_rows * (num_rows + 1) // 2
    by_kv_b = shape.latent_dim * shape.expanded_dim
    absorbed = pairs * (2 * shape.latent_dim + shape.rope_dim) + num_rows * by_kv_b
    expanded = pairs * (shape.expanded_dim + shape.rope_dim) * ATTENTION_COST + (start + num_rows) * by_kv_b * KV_B_COST
    num_groups = -(-shape.num_heads // shape.group_heads(num_rows))
    return num_rows >= LEAST_ROWS and (absorbed - expanded) * shape.num_heads >= LAUNCHES_COST * num_groups


def warm_steps(shape: UpProjection, max_rows: int, max_context: int) -> tuple[tuple[int, int], ...]:
    """Starts and rows of sequences that launch every kernel together: as many rows as can be, and some whose context is split.

    Empty where no rows of a sequence are up-projected, whatever its context.
    """
    most = min(max_rows, max_context)
    steps = [step for step in ((0, most), (max_context - most, most)) if takes_up_projection(step[1], step[0], shape)]
    # The most rows that leave half of a GPU idle: where these are not split, or not taken, no rows are both.
    rows = min(most, TILE_ROWS * max(1, NUM_PROGRAMS // 2 // shape.group_heads(TILE_ROWS)))
    start, deepest = max(0, 2 * SPLIT_TOKENS - rows), max_context - rows
    while start < deepest and not takes_up_projection(rows, start, shape):
        start = min(2 * start + SPLIT_TOKENS, deepest)
    if start <= deepest and takes_up_projection(rows, start, shape):
        steps.append((start, rows))
    return tuple(dict.fromkeys(steps))


def expanded_specs(shape: UpProjection, dtype: str, max_rows: int, max_context: int) -> tuple[TensorSpec, ...]:
    """The room for any rows up to `max_rows` of a sequence of up to `max_context` tokens, at most UP_PROJECTED_BYTES.

    The first tensor is for a chunk, the second for what was attended to: more tokens or rows than fit come one after another.
    """
    num_heads = max(shape.group_heads(num_rows) for num_rows in (1, MANY_ROWS))
    context = -(-max_context // CHUNK_STEP) * CHUNK_STEP
    most_elements = (UP_PROJECTED_BYTES - STATE_BYTES) // DTYPE_BYTES[dtype]
    num_elements = min(most_elements, context * shape.token_elements(num_heads))
    # One head of one chunk fits always: its tokens are a few hundred bytes each.
    most_floats = STATE_BYTES // 4
    splits = max(1, min(NUM_PROGRAMS, max_context // SPLIT_TOKENS))
    num_floats = min(most_floats, splits * max_rows * num_heads * (shape.value_dim + 1))
    chunk = TensorSpec("up_projected", (num_elements,), dtype)
    return chunk, TensorSpec("up_projected_state", (num_floats,), "float32")
