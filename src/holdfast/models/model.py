"""Model: what a runner needs of a model: two ends and a range of layers between them, and the Stream between layers.

T rows of the step, R rows whose logits are wanted, H hidden, V vocabulary

What a model takes (parameters, caches, scratch) is declared without torch. That declaration is the only source for plan, load
and run.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from holdfast.attention.backend import Batch, StepPlan


class Stream(NamedTuple):
    """The residual stream between two layers, in tensors of the workspace."""

    x_TH: torch.Tensor
    normed_TH: torch.Tensor
    """Buffer for a normed copy."""
    delta_TH: torch.Tensor
    """The last layer's output that is not added yet, or a buffer for it."""
    has_delta: bool


class Model(Protocol):
    """One computation over final weights, pages and a workspace; `plan` is what its attention backend made of the batch."""

    before_layer: Callable[[], None] | None
    """Called before every layer, if set; it may raise, which abandons the step."""

    @property
    def num_layers(self) -> int: ...

    def embed(self, batch: Batch) -> Stream:
        """Compute the embeddings of a step's rows."""
        ...

    def run_layers(self, stream: Stream, batch: Batch, plan: StepPlan, layers: range) -> Stream:
        """Run some layers in a row; after the last of all only rows whose logits are wanted are left."""
        ...

    def finish(self, stream: Stream) -> torch.Tensor:
        """Compute the final hidden states of the rows that are left: [R, H]."""
        ...

    def logits(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        """Compute float32 logits [R, V], valid until the workspace is used again."""
        ...

    def hidden(self, batch: Batch, plan: StepPlan) -> torch.Tensor:
        """Embed and run all layers: [R, H]."""
        ...

    def step_logits(self, batch: Batch, plan: StepPlan) -> torch.Tensor:
        """Run the whole step, by the fastest path that it can take: [R, V]."""
        ...
