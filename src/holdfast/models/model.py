"""Model: what a runner needs of a model: two ends and a range of layers between them; its workspace, and the Stream between layers.

T rows of the step, R rows whose logits are wanted, H hidden, V vocabulary

What a model takes (parameters, caches, scratch) is declared without torch. That declaration is the only source for plan, load
and run.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple, Protocol

import torch

from holdfast.attention.backend import Batch, StepPlan
from holdfast.kernels.gemm.quantize_activations import QuantizedRows, TileScratch
from holdfast.memory.workspace import Workspace
from holdfast.models import activations
from holdfast.models.activations import Request
from holdfast.models.spec import ModelSpec
from holdfast.quant.weight_schemes import WeightRecipe

MAX_CACHED_SIZES = 128
"""Row counts whose requests are kept, the latest: steps have thousands of sizes, and reach nearly all of them in time."""


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


class HeadRequests(NamedTuple):
    """What logits of some rows need of the workspace."""

    head: Request
    codes: Request


class StepWorkspace:
    """How decoders of all kinds get tensors of the workspace; `dtype` is that of activations."""

    def __init__(self, spec: ModelSpec, workspace: Workspace, dtype: str, recipe: WeightRecipe) -> None:
        self._spec = spec
        self.workspace = workspace
        self._dtype = dtype
        self._recipe = recipe
        self._tile_scratch = self._make_tile_scratch()
        self._head_requests: Callable[[int], HeadRequests] = lru_cache(MAX_CACHED_SIZES)(
            partial(_head_requests, spec, dtype, recipe)
        )
        self.before_layer: Callable[[], None] | None = None
        """Called before every layer on a CPU; it may raise, which abandons the step."""

    def _make_tile_scratch(self) -> TileScratch | None:
        """Acquire what products of middle batches share, if the plan has it; counters begin at zero."""
        request = activations.row_scaled_request(self._spec, self._recipe)
        if request.lane not in self.workspace.lanes:
            return None
        held = self._acquire(request)
        return TileScratch(held["parts"], held["arrived"].zero_(), held["row_amax"])

    def _head_buffers(self, num_rows: int) -> tuple[dict[str, torch.Tensor], QuantizedRows | None]:
        """Acquire the logits of so many rows, and the buffer for the head's quantized inputs."""
        requests = self._head_requests(num_rows)
        return self._acquire(requests.head), self._quantized(requests.codes)

    def _quantized(self, request: Request) -> QuantizedRows | None:
        """Acquire the buffer for quantized inputs, until the next product; None if no weight takes them."""
        if not request.specs:
            return None
        held = self._acquire(request)
        return QuantizedRows(held["codes"], held["scales"], self._tile_scratch)

    def _acquire(self, request: Request) -> dict[str, torch.Tensor]:
        return self.workspace.acquire_named(request.owner, request.specs, request.lane)


def _head_requests(spec: ModelSpec, dtype: str, recipe: WeightRecipe, num_rows: int) -> HeadRequests:
    head = activations.head_request(spec, num_rows, dtype)
    return HeadRequests(head, activations.quantized_rows_request(spec, 0, num_rows, recipe))


def norm_dtype(weight_H: torch.Tensor) -> str:
    """Return the default type of activations: that of norms."""
    return str(weight_H.dtype).removeprefix("torch.")
