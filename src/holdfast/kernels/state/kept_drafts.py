"""KeptDrafts: what a layer keeps of draft tokens, by slot, until the next step knows which were accepted.

S slots, D draft tokens, M = 2 D + 1, C channels of the convolution, H value heads

A state cannot drop a token. So a step writes the state after its first row alone, and keeps inputs of the rows after it.
From the inputs of the convolution everything follows but the gates: replaying them takes the least memory.
"""

from typing import NamedTuple

from torch import Tensor

from holdfast.kernels.state.state_geometry import draft_ring


class KeptDrafts(NamedTuple):
    """Draft tokens of one layer."""

    x_SDC: Tensor
    """Inputs of the convolution, the first draft token first."""
    a_SMH: Tensor
    """float32: inputs of the decay, by position modulo M; [S, M, H, K] with gates by channel."""
    b_SMH: Tensor
    """float32: inputs of the write strength, alike."""
    accepted_SDC: Tensor
    """Scratch of a step: outputs of the convolution for accepted draft tokens."""

    @property
    def num_drafts(self) -> int:
        """Most draft tokens of a sequence."""
        return self.x_SDC.shape[1]

    def check(self, num_channels: int) -> None:
        """Assert that shapes agree and that kernels may address these tensors."""
        num_slots, num_drafts, own = self.x_SDC.shape
        ring = (num_slots, draft_ring(num_drafts))
        assert own == num_channels, f"{self.x_SDC.shape=} for {num_channels} channels"
        assert self.a_SMH.shape[:3] == self.b_SMH.shape, f"{self.a_SMH.shape=} {self.b_SMH.shape=}"
        assert self.b_SMH.shape[:2] == ring, f"{self.b_SMH.shape=} for rings of {ring}"
        assert self.accepted_SDC.shape == self.x_SDC.shape, f"{self.accepted_SDC.shape=} for {self.x_SDC.shape=}"
        assert self.accepted_SDC.dtype == self.x_SDC.dtype, f"{self.accepted_SDC.dtype=} for {self.x_SDC.dtype=}"
        for x in self:
            assert x[:1].is_contiguous(), f"{x.stride()=}: a slot must be dense"
