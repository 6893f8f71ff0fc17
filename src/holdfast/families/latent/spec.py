"""Latent attention (MLA): one latent per token that all query heads share, with an optional index (DSA); no torch.

A query head is [nope_dim | rope_dim]; a latent row is [kv_rank | rope_dim], where all heads share the rotated part. RoPE turns
neighbours: elements 2 i and 2 i + 1 by frequency i.
"""

from dataclasses import dataclass

from holdfast.attention.declarations import AttentionSpec
from holdfast.kernels.up_projection import UpProjection
from holdfast.memory.workspace_plan import TensorSpec


@dataclass(frozen=True, slots=True)
class LatentAttentionSpec(AttentionSpec):
    """One layer that keeps latents."""

    nope_dim: int = 0
    """Elements of a query head that meet the latent through kv_b, beside the cache's rope_dim."""
    value_dim: int = 0
    """Elements of a head's output."""

    @property
    def up_projection(self) -> UpProjection:
        """Sizes of a layer that computes keys and values of every head from its latents."""
        cache = self.cache
        return UpProjection(self.num_heads, cache.latent_dim, cache.rope_dim, self.nope_dim, self.value_dim)


@dataclass(frozen=True, slots=True)
class IndexSpec:
    """The index of sparse latent attention (DSA): short keys by which a layer chooses the tokens that a row attends to.

    A row's score of a token is the sum over heads of weight * relu(q . k); the `top_k` best are attended to. Queries come from
    the queries' latent, keys and weights from the layer's input. Keys have a LayerNorm with a bias. RoPE turns the first
    `LatentSpec.rope_dim` elements of both, by halves (element i with element i + rope_dim / 2) or by neighbours.
    """

    num_heads: int
    head_dim: int
    top_k: int
    norm_eps: float = 1e-6
    turns_neighbours: bool = False
    """RoPE turns elements 2 i and 2 i + 1 by frequency i, as that of latents does."""
    shared_layers: frozenset[int] = frozenset()
    """Layers without an index. They take the choice of the last layer before them that has one; never the first layer."""


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Latent attention of a model: keys and values of all heads are projections of the latent, which is all that is kept."""

    q_rank: int | None
    """Width of the queries' own latent, which has a norm; None: queries are projected in one step."""
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    norm_eps: float = 1e-6
    """Epsilon of the norms of both latents."""
    index: IndexSpec | None = None
    """None: rows attend to all tokens."""

    @property
    def row_dim(self) -> int:
        """Elements stored per token."""
        return self.kv_rank + self.rope_dim

    @property
    def query_dim(self) -> int:
        """Elements of a query head."""
        return self.nope_dim + self.rope_dim

    @property
    def expanded_dim(self) -> int:
        """Rows of kv_b for a head: keys without positions, then values."""
        return self.nope_dim + self.value_dim

    @property
    def modules(self) -> tuple[str, ...]:
        queries = ("q", "qkv_a") if self.q_rank is None else ("qkv_a", "q_b")
        return (*queries, "o") if self.index is None else (*queries, "o", "index_q", "index_k")

    def products(self, hidden: int, num_heads: int, head_dim: int) -> tuple[tuple[int, int], ...]:
        """List outputs and inputs of the weights. kv_b is not among them: attention itself multiplies by it."""
        queries, values = num_heads * self.query_dim, num_heads * self.value_dim
        if self.q_rank is None:
            return (queries, hidden), (self.row_dim, hidden), (hidden, values)
        products = ((self.q_rank + self.row_dim, hidden), (queries, self.q_rank), (hidden, values))
        if self.index is None:
            return products
        dim = self.index.head_dim
        return (*products, (self.index.num_heads * dim, self.q_rank), (dim, hidden))

    def tensors(self, num_heads: int, head_dim: int, num_rows: int, dtype: str) -> tuple[TensorSpec, ...]:
        """Declare the tensors of `LatentBuffers`."""
        q_rank, index = self.q_rank or 0, self.index
        normed = (TensorSpec("q_normed", (num_rows, q_rank), dtype),) if q_rank else ()
        own = (
            TensorSpec("qkv_a", (num_rows, q_rank + self.row_dim), dtype),
            *normed,
            TensorSpec("q", (num_rows, num_heads * self.query_dim), dtype),
            TensorSpec("attended", (num_rows, num_heads * self.value_dim), dtype),
        )
        if index is None:
            return own
        return (
            *own,
            TensorSpec("index_q", (num_rows, index.num_heads * index.head_dim), dtype),
            TensorSpec("index_k", (num_rows, index.head_dim), dtype),
            TensorSpec("index_weights", (num_rows, index.num_heads), "float32"),
        )
