"""Model: what a runner needs of a model: embedding, a range of layers, and head, and the Stream between layers.

T rows of the step, R rows whose logits are wanted, H hidden, V vocabulary

A model's memory (parameters, caches, scratch) is declared without torch. That declaration is the only source for plan,
load and run.
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
    """The last layer's output that is not added to x yet, or a buffer for it."""
    has_delta: bool


class Model(Protocol):
    """One computation over final weights, pages and a workspace; its attention backend makes `plan` from the batch."""

    before_layer: Callable[[], None] | None
    """Called before every layer, if set; it may raise, which abandons the step."""

    @property
    def num_layers(self) -> int: ...

    def embed(self, batch: Batch) -> Stream:
        """Compute the embeddings of a step's rows."""
        ...

    def run_layers(self, stream: Stream, batch: Batch, plan: StepPlan, layers: range) -> Stream:
        """Run consecutive layers; after the last one only rows whose logits are wanted are left."""
        ...

    def finish(self, stream: Stream) -> torch.Tensor:
        """Compute the final hidden states of the remaining rows: [R, H]."""
        ...

    def logits(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        """Compute float32 logits [R, V], valid until the workspace is used again."""
        ...

    def hidden(self, batch: Batch, plan: StepPlan) -> torch.Tensor:
        """Embed and run all layers: [R, H]."""
        ...

    def step_logits(self, batch: Batch, plan: StepPlan) -> torch.Tensor:
        """Run the whole step, by its fastest path: [R, V]."""
        ...
