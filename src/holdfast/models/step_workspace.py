"""StepWorkspace: the way of every decoder to the tensors of its workspace, and to its head.

R rows whose logits are wanted, H hidden, V vocabulary
"""

from collections.abc import Callable

import torch

from holdfast.kernels.gemm.quantize_activations import QuantizedRows, TileScratch
from holdfast.memory.workspace import Workspace
from holdfast.models import activations
from holdfast.models.activations import Request
from holdfast.models.spec import ModelSpec
from holdfast.quant.weight_schemes import WeightRecipe

MAX_CACHED_SIZES = 128
"""Numbers of rows whose requests are kept, the latest: steps have thousands of sizes, and come to nearly all of them in time."""


class StepWorkspace:
    """What decoders of all kinds have in common; `dtype` is that of activations, `recipe` how the weights were quantized."""

    def __init__(self, spec: ModelSpec, workspace: Workspace, dtype: str, recipe: WeightRecipe) -> None:
        self._spec = spec
        self.workspace = workspace
        self._dtype = dtype
        self._recipe = recipe
        self._tile_scratch = self._make_tile_scratch()
        self.before_layer: Callable[[], None] | None = None
        """Called before every layer on a CPU; it may raise, and then the step is left as it is."""

    def _make_tile_scratch(self) -> TileScratch | None:
        """What products of middle batches share, where the plan has it; counters begin at zero."""
        request = activations.row_scaled_request(self._spec, self._recipe)
        if request.lane not in self.workspace.lanes:
            return None
        held = self._acquire(request)
        return TileScratch(held["parts"], held["arrived"].zero_(), held["row_amax"])

    def _head_buffers(self, num_rows: int) -> tuple[dict[str, torch.Tensor], QuantizedRows | None]:
        """Where logits of so many rows go, and room for the head's inputs as codes."""
        head = self._acquire(activations.head_request(self._spec, num_rows, self._dtype))
        return head, self._quantized(activations.quantized_rows_request(self._spec, 0, num_rows, self._recipe))

    def _quantized(self, request: Request) -> QuantizedRows | None:
        """Room for inputs of products as codes, until the next product; None where no weight wants any."""
        if not request.specs:
            return None
        held = self._acquire(request)
        return QuantizedRows(held["codes"], held["scales"], self._tile_scratch)

    def _acquire(self, request: Request) -> dict[str, torch.Tensor]:
        return self.workspace.acquire_named(request.owner, request.specs, request.lane)


def norm_dtype(weight_H: torch.Tensor) -> str:
    """The type of activations, where nobody says another: that of norms."""
    return str(weight_H.dtype).removeprefix("torch.")
