"""LogitScratch: the fixed memory in which kernels over rows of logits leave numbers for one another."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from holdfast.kernels.logits.logit_chunks import CHUNK_TOKENS

# S rows of a step, R rows that are worked on together, P chunks of a vocabulary, B buckets, C candidates


@dataclass(frozen=True, slots=True)
class LogitScratch:
    """Shapes and types as `scratch_specs` says. Nothing in it outlives a call."""

    chunk_tokens: int
    """A power of two."""
    chunk_largest_SP: torch.Tensor
    chunk_likeliest_SP: torch.Tensor
    chunk_weights_RP: torch.Tensor
    chunk_nearer_RP: torch.Tensor
    chunk_counts_RPB: torch.Tensor
    num_listed_R: torch.Tensor
    listed_logits_RC: torch.Tensor
    listed_ids_RC: torch.Tensor

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor], chunk_tokens: int = CHUNK_TOKENS) -> "LogitScratch":
        """From tensors by the names of their specs."""
        return cls(
            chunk_tokens,
            tensors["chunk_largest"],
            tensors["chunk_argmax"],
            tensors["chunk_weights"],
            tensors["chunk_nearer"],
            tensors["chunk_counts"],
            tensors["num_listed"],
            tensors["listed_logits"],
            tensors["listed_ids"],
        )
