"""Near pages keep the first tokens and the newest block in the type of the model beside quantized pages; no torch.

A layer with quantized pages also has the planes near_k and near_v, which hold keys and values in the type of the model.
Near planes overlay the planes of codes: a page of the pool has codes of the layers of one group, or near rows of all
quantized layers.

    a page as 64 tokens of codes      [ k_codes of layer 0 | k_codes of layer 1 | ... | v_codes of layer 0 | ... ]
    that page as 16 near tokens       [ near_k of layer 0  | near_v of layer 0  | ... | ...                      ]

A *host* is a column of code planes. All hosts have chunks of equal bytes, so each holds `stride` near chunks: those of
page p have numbers p * stride and following. A near plane begins with one of them, and its chunk of page p is p * stride
chunks further. So kernels read it like any other plane, by a table of chunk numbers that all layers share.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from holdfast.quant.formats import Plane, bytes_for

NEAR = "near"
"""Name of the cache group."""
NEAR_PLANES = "near_k", "near_v"
FIRST_TOKENS = 16
"""First tokens that layers without a window see exact. Token 0 alone is a third of the error; 16 fill one near page in 4 bits."""


class NearRows(NamedTuple):
    """What a near group keeps."""

    block_tokens: int
    """Tokens of a block: a token sees those of its own block, up to itself."""
    page_tokens: int
    """Tokens of a near chunk, which is what a page has of each near plane."""
    first_tokens: int
    """Tokens at the start whose near pages sequences keep; 0 if every layer has a window."""
    dtype: str


class NearPlace(NamedTuple):
    """Where a near plane lies."""

    kind: tuple[Plane, ...]
    plane: Plane
    column: int
    nth: int
    """Number of its chunk among those of a page in this column."""


class NearLayout(NamedTuple):
    """Where the near planes of a model lie."""

    page_tokens: int
    stride: int
    """Near chunks that a page has in a host."""
    places: dict[int, tuple[NearPlace, NearPlace]]
    """Keys and values by layer."""


def row_bytes(num_kv_heads: int, head_dim: int, dtype: str) -> int:
    """Return the bytes of one token in one near plane."""
    return bytes_for(dtype, (num_kv_heads, head_dim))


def can_host(kind: tuple[Plane, ...], page_tokens: int, chunk_bytes: int) -> bool:
    """Return True if near chunks of `chunk_bytes` fill a chunk of one of these planes."""
    sizes = [plane.bytes_per_token * page_tokens for plane in kind]
    return any(size % chunk_bytes == 0 for size in sizes)


def near_stride(
    columns: Mapping[tuple[Plane, ...], int], page_tokens: int, chunk_bytes: int, num_planes: int
) -> int | None:
    """Return the near chunks of `chunk_bytes` in each host if `num_planes` of them fit a page; None if they do not."""
    sizes = {plane.bytes_per_token * page_tokens for kind in columns for plane in kind}
    fitting = (
        size // chunk_bytes
        for size in sorted(sizes)
        if size % chunk_bytes == 0
        and sum(1 for _ in _hosts(columns, page_tokens, size)) * (size // chunk_bytes) >= num_planes
    )
    return next(fitting, None)


def most_near_tokens(
    columns: Mapping[tuple[Plane, ...], int], page_tokens: int, row: int, num_layers: int, block_tokens: int
) -> int:
    """Return the most tokens, a power of two, of a near chunk with `row` bytes per token; 0 if not one token fits."""
    tokens = block_tokens
    while tokens and near_stride(columns, page_tokens, tokens * row, 2 * num_layers) is None:
        tokens //= 2
    return tokens


def place_near(
    columns: Mapping[tuple[Plane, ...], int], page_tokens: int, chunk_tokens: int, row: int, layers: Sequence[int]
) -> NearLayout | None:
    """Return where the near planes of these layers lie; None if they do not fit the columns."""
    stride = near_stride(columns, page_tokens, chunk_tokens * row, 2 * len(layers))
    if stride is None:
        return None
    every = (
        NearPlace(kind, plane, column, nth)
        for kind, plane, column in _hosts(columns, page_tokens, stride * chunk_tokens * row)
        for nth in range(stride)
    )
    return NearLayout(chunk_tokens, stride, {layer: (next(every), next(every)) for layer in layers})


def _hosts(
    columns: Mapping[tuple[Plane, ...], int], page_tokens: int, size: int
) -> Iterator[tuple[tuple[Plane, ...], Plane, int]]:
    """Yield the columns of planes whose chunks have `size` bytes."""
    for kind, num_columns in columns.items():
        for plane in kind:
            if plane.bytes_per_token * page_tokens == size:
                yield from ((kind, plane, column) for column in range(num_columns))
