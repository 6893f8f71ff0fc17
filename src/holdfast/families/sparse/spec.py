"""Sparse latent attention (DSA): latent attention to the tokens that an index chooses; no torch."""

from dataclasses import dataclass

from holdfast.families.latent.spec import LatentAttentionSpec


@dataclass(frozen=True, slots=True)
class SparseAttentionSpec(LatentAttentionSpec):
    """One layer whose rows attend to at most `index_top_k` tokens. Without an index in its cache it takes an earlier layer's choice."""

    index_heads: int = 0
    index_top_k: int = 0
    index_turns_neighbours: bool = False
    """RoPE turns neighbouring elements of the index, not halves."""

    @property
    def can_choose(self) -> bool:
        """True if some context has more tokens than a row attends to."""
        return self.index_top_k < self.max_model_len
