"""Sizes of gated delta nets that kernels and plans share: chunks, lists of a step, scratch; no torch.

T rows of a step, N sequences of a step, M chunks, H value heads, C rows of a chunk, D key elements
"""

from holdfast.memory.workspace_plan import TensorSpec

CHUNK_ROWS = 64
"""Rows of a chunk. Prompts are cut at multiples of it: then a cut changes no bit."""
BLOCK_ROWS = 16
"""Rows of a block of a chunk: diagonal blocks are inverted row by row."""
MIN_CONV_WIDTH, MAX_CONV_WIDTH = 2, 8
"""Taps of a causal convolution that kernels accept."""
MAX_HEAD_DIM = 256
"""Most elements of a key or a value."""
ACCEPTED = "accepted"
"""Scratch for accepted draft tokens."""
COEFFICIENTS = 4
"""Numbers for each row of a chunk (see `chunk_systems_kernel`)."""


def unsupported_state(key_heads: int, value_heads: int, key_dim: int, value_dim: int, conv_width: int) -> str | None:
    """Return why no kernel takes a state of this shape, or None."""
    if min(key_heads, value_heads) < 1 or value_heads % key_heads:
        return f"{value_heads} value heads are no multiple of {key_heads} key heads"
    if not 1 <= key_dim <= MAX_HEAD_DIM or not 1 <= value_dim <= MAX_HEAD_DIM:
        return f"heads have up to {MAX_HEAD_DIM} elements, not {max(key_dim, value_dim)}"
    if not MIN_CONV_WIDTH <= conv_width <= MAX_CONV_WIDTH:
        return f"a convolution has {MIN_CONV_WIDTH} to {MAX_CONV_WIDTH} taps, not {conv_width}"
    return None


def num_chunks(max_rows: int, max_num_seqs: int) -> int:
    """Return the most chunks of a step: each sequence may end in a short one."""
    return max_rows // CHUNK_ROWS + max_num_seqs


def state_list_specs(max_rows: int, max_num_seqs: int) -> tuple[TensorSpec, ...]:
    """Return the lists of `StateRows`, which a plan holds for life."""
    return (
        TensorSpec("state sequences", (max_num_seqs, 4), "int32"),
        TensorSpec("state chunks", (num_chunks(max_rows, max_num_seqs), 4), "int32"),
    )


def draft_ring(num_drafts: int) -> int:
    """Return the gates that a slot keeps, by position modulo their number.

    A step reads those of accepted draft tokens before its first row, and writes those of its own after it: up to
    `num_drafts` each. So no program of a step reads what another one writes.
    """
    return 2 * num_drafts + 1


def draft_specs(
    num_layers: int,
    max_num_seqs: int,
    num_drafts: int,
    num_channels: int,
    gate_shape: tuple[int, ...],
    dtype: str,
) -> tuple[TensorSpec, ...]:
    """Return what slots keep of draft tokens for the next step (see `KeptDrafts`), which a plan holds for life.

    `gate_shape` is that of a row's decays: value heads, and elements of a key with gates by channel.
    """
    ring = num_layers, max_num_seqs, draft_ring(num_drafts)
    return (
        TensorSpec("draft inputs", (num_layers, max_num_seqs, num_drafts, num_channels), dtype),
        TensorSpec("draft decays", (*ring, *gate_shape), "float32"),
        TensorSpec("draft betas", (*ring, gate_shape[0]), "float32"),
    )


def delta_chunk_specs(
    max_rows: int, max_num_seqs: int, value_heads: int, key_dim: int, dtype: str, gate: str = "head"
) -> tuple[TensorSpec, ...]:
    """Return the scratch of `delta_chunks` on a GPU. `gate` is "head", or "channel" (KDA)."""
    assert gate in ("head", "channel"), f"{gate=}"
    slots = num_chunks(max_rows, max_num_seqs)
    square = (slots, value_heads, CHUNK_ROWS, CHUNK_ROWS)
    sums = (slots, value_heads, CHUNK_ROWS, key_dim) if gate == "channel" else (0, value_heads, CHUNK_ROWS, key_dim)
    return (
        TensorSpec("chunk systems", square, "float32"),
        TensorSpec("chunk scores", square, dtype),
        TensorSpec("chunk coefficients", (slots, value_heads, COEFFICIENTS, CHUNK_ROWS), "float32"),
        TensorSpec("chunk decays", sums, "float32"),
    )
