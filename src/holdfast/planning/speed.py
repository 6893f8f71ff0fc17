"""Speed of a plan: tokens/s of one stream and of a batch, time to the first token, from bytes, FLOPs and the device; no torch."""

from typing import NamedTuple

from holdfast.planning.fit import Fit, PlanRequest


class Range(NamedTuple):
    """Two bounds of an estimate."""

    low: float
    high: float

    @property
    def middle(self) -> float:
        """Geometric mean: as far from both bounds, as a ratio."""
        return (self.low * self.high) ** 0.5


class SpeedEstimate(NamedTuple):
    """Speed of one engine on one device, or on the ranks of a config."""

    one_stream: Range
    """Tokens/s of one sequence."""
    batch_size: int
    """Sequences that fit at the assumption's context, at most max_num_seqs."""
    batch: Range
    """Tokens/s of all of them together."""
    first_token_seconds: Range
    """Seconds from a prompt of 2,048 tokens, or of the longest context, to its first token."""
    assumption: str
    """One sentence: contexts, and which bandwidth and FLOP/s the estimate takes."""


def estimate_speed(request: PlanRequest, fit: Fit) -> SpeedEstimate | None:
    """Estimate a plan that fits; None if the device's bandwidth or FLOP/s are unknown."""
    return None
