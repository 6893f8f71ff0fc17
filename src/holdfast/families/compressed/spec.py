"""Compressed attention (DeepSeek-V4): to a window of tokens, and to entries that stand for several tokens each; no torch.

A token, and an entry, is one vector that is key and value of all heads. RoPE turns its last elements, neighbours together, an
entry's by the position of its first token. Outputs are rotated back.
"""

from dataclasses import dataclass

from holdfast.attention.declarations import AttentionSpec
from holdfast.cache.spec import LayerCache
from holdfast.families.latent.spec import IndexSpec
from holdfast.memory.workspace_plan import TensorSpec
from holdfast.quant.entry_state import pooled_width


@dataclass(frozen=True, slots=True)
class CompressedAttentionSpec(AttentionSpec):
    """One layer that keeps a window, and perhaps entries."""

    entries: LayerCache | None = None
    """The entries that a row attends to beside its window, with their index; None: the window only."""
    entries_group: int = -1
    """Cache group of the entries."""
    entries_index: int = -1
    """Place of the entries in its storage."""
    ratio: int = 0
    """Tokens that an entry stands for; 0: there are none."""
    is_overlapped: bool = False
    """An entry also covers as many tokens before its own, and an index chooses the entries of a row."""
    index_heads: int = 0
    index_top_k: int = 0
    form_heads: int = 0
    """`ModelSpec.form_heads`, so that exact ranks round like one; 0: the heads that are here."""

    @property
    def most_entries(self) -> int:
        """Entries of the longest context."""
        return self.max_model_len // self.ratio if self.ratio else 0

    @property
    def can_choose(self) -> bool:
        """True if some context has more entries than a row attends to."""
        return self.is_overlapped and self.most_entries > self.index_top_k

    @property
    def first_choosing(self) -> int:
        """The first position that sees more entries than its layer attends to; max_model_len if no row chooses."""
        return self.ratio * (self.index_top_k + 1) - 1 if self.is_overlapped else self.max_model_len


@dataclass(frozen=True, slots=True)
class CompressorSpec:
    """How a layer makes one entry of `ratio` tokens: a softmax over them, channel by channel, of their projections.

    If `is_overlapped`, an entry is made of its own tokens' last columns and of the first columns of the `ratio` tokens before
    them, and an index chooses the entries of a row. Else a row attends to all entries.
    """

    ratio: int
    is_overlapped: bool


@dataclass(frozen=True, slots=True)
class CompressedSpec:
    """Compressed attention of a model."""

    q_rank: int
    """Width of the queries' own latent, which has a norm; query heads have another norm, without a weight."""
    rope_dim: int
    window: int
    """How many of the newest tokens, the current one included, a token sees in every layer."""
    compressors: tuple[CompressorSpec | None, ...]
    """By layer; None: the layer has its window only."""
    num_output_groups: int
    """Number of groups of neighbouring heads in the output projection."""
    output_rank: int
    """Width of each group's latent. The latents together are projected to the residual stream."""
    index: IndexSpec | None
    """The index of layers with overlapped entries, if there are any. RoPE turns the last elements of its heads."""

    @property
    def modules(self) -> tuple[str, ...]:
        own = ("qkv_a", "q_b", "o_b")
        return own if self.index is None else (*own, "index_q")

    def products(self, hidden: int, num_heads: int, head_dim: int) -> tuple[tuple[int, int], ...]:
        """List outputs and inputs of the weights that may be quantized; o_a never is."""
        q_rank, groups = self.q_rank, self.num_output_groups * self.output_rank
        products = ((q_rank + head_dim, hidden), (num_heads * head_dim, q_rank), (hidden, groups))
        index = self.index
        return products if index is None else (*products, (index.num_heads * index.head_dim, q_rank))

    def layer_index(self, layer: int) -> IndexSpec | None:
        compressor = self.compressors[layer]
        return self.index if compressor is not None and compressor.is_overlapped else None

    def pooled_width(self, layer: int, head_dim: int) -> int:
        """Columns that a layer pools entries from: vectors and gates of its own and of its index, then index head weights."""
        compressor, index = self.compressors[layer], self.layer_index(layer)
        if compressor is None:
            return 0
        own = 2 * pooled_width(head_dim, compressor.is_overlapped)
        return own if index is None else own + 2 * pooled_width(index.head_dim, True) + index.num_heads

    def tensors(self, num_heads: int, head_dim: int, num_rows: int, dtype: str) -> tuple[TensorSpec, ...]:
        """Declare the tensors of `CompressedBuffers`."""
        index = self.index
        specs = [
            TensorSpec("qkv_a", (num_rows, self.q_rank + head_dim), dtype),
            TensorSpec("q_normed", (num_rows, self.q_rank), dtype),
            TensorSpec("q", (num_rows, num_heads * head_dim), dtype),
            TensorSpec("attended", (num_rows, num_heads * head_dim), dtype),
            TensorSpec("grouped", (num_rows, self.num_output_groups * self.output_rank), dtype),
        ]
        if widest := max(self.pooled_width(layer, head_dim) for layer in range(len(self.compressors))):
            # A vector, of which a layer takes its part.
            specs.append(TensorSpec("pooled", (num_rows * widest,), "float32"))
        if index is not None:
            specs.append(TensorSpec("index_q", (num_rows, index.num_heads * index.head_dim), dtype))
            specs.append(TensorSpec("index_weights", (num_rows, index.num_heads), "float32"))
        return tuple(specs)
