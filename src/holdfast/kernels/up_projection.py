"""Sizes of up-projected latent attention (MLA): when it is less work than absorbed attention, and its scratch; no torch.

N query heads, P + R elements of a query head, L latent, V value elements of a head, W tokens of a chunk, G heads of a group

Latents of W tokens become keys and values of G heads at a time. Rows attend to each once.
"""

from typing import NamedTuple

from holdfast.memory.workspace_plan import TensorSpec
from holdfast.quant.formats import DTYPE_BYTES

UP_PROJECTED_BYTES = 96 * 2**20
"""Scratch bytes for one sequence's rows, whatever the number of rows, heads and tokens."""
STATE_BYTES = UP_PROJECTED_BYTES // 3
"""Scratch bytes for outputs so far; the rest holds latents, keys and values of a chunk."""
CHUNK_STEP = 128
"""Divisor of the tokens of a chunk."""
TILE_ROWS = 128
"""Rows of a program."""
NUM_PROGRAMS = 132
"""SMs of a large GPU. If fewer programs would run, the tokens of a chunk are split."""
SPLIT_TOKENS = 512
"""Fewest tokens of a split."""
LEAST_ROWS = 128
"""Fewest rows that fill a program's tile."""
KV_B_COST, ATTENTION_COST = 0.6, 0.7
"""Time of a product relative to absorbed attention on an H200 (TFLOPS): 516 in kv_b and 460 in attention, 312 absorbed."""
LAUNCHES_COST = 5 * 10**9
"""Cost of a head group's launches, in products of absorbed attention: 32 us of an H200. The host takes 150 us, which a
step of thousands of rows partly hides. At half this cost, prompts of 512 rows would wait for launches."""
MANY_ROWS = 4096
"""Fewest rows for which half as many heads fill a GPU, so chunks may be longer."""


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
        """Return the heads of a group; groups are as equal as possible."""
        most = 8 if num_rows >= MANY_ROWS else 16
        return -(-self.num_heads // -(-self.num_heads // most))

    def token_elements(self, num_heads: int) -> int:
        """Return a token's elements in a chunk: its latent row, and keys and values of a group of heads."""
        return self.latent_dim + self.rope_dim + num_heads * self.expanded_dim

    def chunk_tokens(self, num_heads: int, num_elements: int) -> int:
        """Return the tokens of a chunk that fit into `num_elements` of scratch for a group of heads."""
        tokens = num_elements // self.token_elements(num_heads)
        assert tokens >= CHUNK_STEP, f"room for {tokens} tokens; a chunk has at least {CHUNK_STEP}"
        return tokens // CHUNK_STEP * CHUNK_STEP

    def state_rows(self, num_floats: int) -> int:
        """Return the rows of one head whose state, an output and an lse, fits into `num_floats`."""
        return num_floats // (self.value_dim + 1)


def num_splits(num_rows: int, num_heads: int, num_tokens: int, state_rows: int) -> int:
    """Return the splits of a chunk: enough programs if rows and heads are few, and at most what the state holds."""
    programs = -(-num_rows // TILE_ROWS) * num_heads
    return max(1, min(NUM_PROGRAMS // programs, num_tokens // SPLIT_TOKENS, state_rows // (num_rows * num_heads)))


def takes_up_projection(num_rows: int, start: int, shape: UpProjection) -> bool:
    """Return True if up-projection is faster for these rows of a sequence after `start` tokens.

    Absorbed, a row and token of a head cost 2 L + R products, and a row L (P + V) more in kv_b. Up-projected, a row and token
    cost P + R + V, and every token L (P + V). A prompt's own tokens cost the same in kv_b either way, so the context decides.
    By products a long one takes more than L (P + V) / (2 L - P - V) rows (171 for 512, 128 and 128), by speeds more than 91.
    The gain must also exceed the launches per sequence: with 16 heads a prompt without context has at least 800 rows.
    """
    pairs = num_rows * start + num_rows * (num_rows + 1) // 2
    by_kv_b = shape.latent_dim * shape.expanded_dim
    absorbed = pairs * (2 * shape.latent_dim + shape.rope_dim) + num_rows * by_kv_b
    expanded = pairs * (shape.expanded_dim + shape.rope_dim) * ATTENTION_COST + (start + num_rows) * by_kv_b * KV_B_COST
    num_groups = -(-shape.num_heads // shape.group_heads(num_rows))
    return num_rows >= LEAST_ROWS and (absorbed - expanded) * shape.num_heads >= LAUNCHES_COST * num_groups


def warm_steps(shape: UpProjection, max_rows: int, max_context: int) -> tuple[tuple[int, int], ...]:
    """Return (start, rows) of warm-up sequences that launch every kernel: the most rows, and some with a split context.

    Empty if no rows are ever up-projected.
    """
    most = min(max_rows, max_context)
    steps = [step for step in ((0, most), (max_context - most, most)) if takes_up_projection(step[1], step[0], shape)]
    # The most rows that leave half of a GPU idle: if these are not split or not taken, no rows are both.
    rows = min(most, TILE_ROWS * max(1, NUM_PROGRAMS // 2 // shape.group_heads(TILE_ROWS)))
    start, deepest = max(0, 2 * SPLIT_TOKENS - rows), max_context - rows
    while start < deepest and not takes_up_projection(rows, start, shape):
        start = min(2 * start + SPLIT_TOKENS, deepest)
    if start <= deepest and takes_up_projection(rows, start, shape):
        steps.append((start, rows))
    return tuple(dict.fromkeys(steps))


def expanded_specs(shape: UpProjection, dtype: str, max_rows: int, max_context: int) -> tuple[TensorSpec, ...]:
    """Return the scratch for at most `max_rows` rows and `max_context` tokens, at most UP_PROJECTED_BYTES.

    One tensor is for a chunk, one for outputs so far: tokens and rows that do not fit follow in turn.
    """
    num_heads = max(shape.group_heads(num_rows) for num_rows in (1, MANY_ROWS))
    context = -(-max_context // CHUNK_STEP) * CHUNK_STEP
    most_elements = (UP_PROJECTED_BYTES - STATE_BYTES) // DTYPE_BYTES[dtype]
    num_elements = min(most_elements, context * shape.token_elements(num_heads))
    # One head of one chunk always fits: its tokens take a few hundred bytes each.
    most_floats = STATE_BYTES // 4
    splits = max(1, min(NUM_PROGRAMS, max_context // SPLIT_TOKENS))
    num_floats = min(most_floats, splits * max_rows * num_heads * (shape.value_dim + 1))
    chunk = TensorSpec("up_projected", (num_elements,), dtype)
    return chunk, TensorSpec("up_projected_state", (num_floats,), "float32")
