"""Model: what a runner needs of a model: two ends and a range of layers between them; the Stream that goes from one to the next.

T rows of the step, R rows whose logits are wanted, H hidden, V vocabulary

What a model takes (parameters, caches, scratch) is declared beside it without torch and is the only source for plan, load and
run; this is what is left to do once all of it stands.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from holdfast.attention.backend import Batch


class Stream(NamedTuple):
    """The residual stream between two layers, in tensors of the workspace."""

    x_TH: torch.Tensor
    normed_TH: torch.Tensor
    """Room for a normed copy."""
    delta_TH: torch.Tensor
    """What the last layer computed and has not added yet, or room for it."""
    has_delta: bool


class Model(Protocol):
    """One computation over final weights, pages and a workspace; `plan` is what its attention family made of the batch."""

    before_layer: Callable[[], None] | None
    """Called before every layer, if there is one; it may raise, and then the step is left as it is."""

    @property
    def num_layers(self) -> int: ...

    def embed(self, batch: Batch) -> Stream:
        """The first end: rows of a step as embeddings."""
        ...

    def run_layers(self, stream: Stream, batch: Batch, plan: Any, layers: range) -> Stream:  # noqa: ANN401
        """Some layers in a row; behind the last one of all only rows whose logits are wanted are left."""
        ...

    def finish(self, stream: Stream) -> torch.Tensor:
        """Final hidden states of the rows that are left: [R, H]."""
        ...

    def logits(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        """The other end: float32 logits [R, V], valid until the workspace is used again."""
        ...

    def hidden(self, batch: Batch, plan: Any) -> torch.Tensor:  # noqa: ANN401
        """From the first end through all layers: [R, H]."""
        ...

    def step_logits(self, batch: Batch, plan: Any) -> torch.Tensor:  # noqa: ANN401
        """The whole step, by the fastest way that it can go: [R, V]."""
        ...
