"""How torch's allocator rounds a request on a GPU: what memory_allocated() counts for it."""

MIB = 2**20
BLOCK_BYTES = 512
"""Blocks are multiples of this."""
SEGMENT_BYTES = 2 * MIB
"""Segments of large requests are multiples of this."""
CARVED_BYTES = 10 * MIB
"""Requests below this share segments of 2 or 20 MiB; from here on each has a segment of its own."""
MIN_REST_BYTES = MIB
"""What is left of a large request's segment stays with its block unless it is more than this."""


def block_bytes(num_bytes: int) -> int:
    """Size of the block that one request takes if the allocator caches no block of about that size."""
    block = -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES
    if block < CARVED_BYTES:
        return block
    segment = -(-block // SEGMENT_BYTES) * SEGMENT_BYTES
    return block if segment - block > MIN_REST_BYTES else segment
