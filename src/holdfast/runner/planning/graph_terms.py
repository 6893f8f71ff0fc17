"""Which graphs are captured, and what they take of the device; no torch."""

from holdfast.memory.planner import PAGE_PHASES, Term

MAX_GRAPH_ROWS = 1024
"""Sequences in the largest captured step; a larger one runs without a graph, where launches no longer count."""
TOKEN_BUCKETS = (64, 128, 256, 512)
PRESENT_BYTES = 4 * 2**20
"""Of what the driver keeps for graphs, so much lies in memory that the context has already; measured on an H200."""
LEAST_BYTES = 2 * 2**20
"""The driver takes memory in pieces of this size. The graphs' own pool stays empty: steps work in the workspace."""
GRAPH_BYTES_PER_LAYER = 38_800
"""What the driver keeps on the device for one layer's kernels in one graph; measured on an H200."""


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Batch sizes of decode steps that are captured: close together where a padded row costs most."""
    largest = min(max_num_seqs, MAX_GRAPH_ROWS)
    ladder = (1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, MAX_GRAPH_ROWS + 1, 32))
    sizes = [size for size in ladder if size <= largest]
    return tuple(sizes) if sizes[-1] == largest else (*sizes, largest)


def mixed_sizes(max_num_batched_tokens: int) -> tuple[int, ...]:
    """Rows of the captured steps that mix prompts and decoding."""
    return tuple(size for size in TOKEN_BUCKETS if size <= max_num_batched_tokens)


def graph_bytes(num_layers: int, num_graphs: int) -> int:
    """What so many graphs take together."""
    return max(LEAST_BYTES, num_graphs * num_layers * GRAPH_BYTES_PER_LAYER - PRESENT_BYTES)


def graph_term(num_layers: int, max_num_seqs: int, max_num_batched_tokens: int) -> Term:
    """The line of the plan."""
    num_decode = len(graph_sizes(min(max_num_seqs, max_num_batched_tokens)))
    num_mixed = len(mixed_sizes(max_num_batched_tokens))
    reason = f"{num_decode} decode and {num_mixed} mixed sizes of {num_layers} layers, one pool"
    return Term("cuda graphs", graph_bytes(num_layers, num_decode + num_mixed), reason, PAGE_PHASES)
