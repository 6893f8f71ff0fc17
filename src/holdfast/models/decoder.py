"""The one decoder that every family with keys and values by head configures; small batches on a GPU take the fused decode path.

T rows of the step, R rows whose logits are wanted, H hidden, V vocabulary

Products of the fused decode path add to the residual stream in their epilogue (fused_decode.py).
"""

from collections.abc import Sequence
from typing import Any

import torch

from holdfast.attention.backend import Batch, GroupedAttention
from holdfast.kernels.attention.write_kv import Rotary
from holdfast.layers.attention import AttentionBuffers, AttentionLayer
from holdfast.memory.workspace import Workspace
from holdfast.memory.workspace_plan import TensorSpec
from holdfast.models import activations, fused_decode
from holdfast.models.decoder_layer import LayerBuilder, Weights
from holdfast.models.fused_decode import FusedDecode
from holdfast.models.layer_stack import LayerStack
from holdfast.models.spec import ModelSpec
from holdfast.observability.log import get_logger
from holdfast.quant.weight_schemes import AS_STORED, WeightRecipe

log = get_logger(__name__)


class Decoder(LayerStack[AttentionLayer]):
    """The Model of models/model.py with keys and values by head."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        backend: GroupedAttention[Any],
        rotaries: Sequence[Rotary | None],
        workspace: Workspace,
        scratch: tuple[TensorSpec, ...],
        takes_fused_decode: bool = False,
        dtype: str | None = None,
        recipe: WeightRecipe = AS_STORED,
    ) -> None:
        """`rotaries` has an entry a layer; `dtype` is that of activations, None for the one of norms; `recipe` is how the weights were quantized."""
        builder = LayerBuilder(spec, weights, backend, rotaries)
        super().__init__(spec, weights, builder, workspace, scratch, dtype, recipe)
        self.fused = self._fused_decode() if takes_fused_decode else None
        """The fused decode path; None where no step takes it."""

    def step_logits(self, batch: Batch, plan: Any) -> torch.Tensor:  # noqa: ANN401 the backend's own type
        """float32 logits of the rows that are wanted: [R, V], valid until the workspace is used again."""
        if self.fused is not None and batch.logits is None and activations.fits_fused_decode(batch.num_rows):
            return self._fused_logits(batch, plan, self.fused)
        return super().step_logits(batch, plan)

    def _fused_logits(self, batch: Batch, plan: Any, fused: FusedDecode) -> torch.Tensor:  # noqa: ANN401
        """The same on the fused decode path."""
        return fused.logits(
            batch,
            plan,
            self.embed(batch),
            self._attention_buffers,
            self._mlp_buffers,
            self._expert_buffers,
            lambda num_rows: self._acquire(activations.head_request(self._spec, num_rows, self._dtype))["logits"],
        )

    def fused_decode_declined(self) -> str | None:
        """None, or why what was loaded cannot take the fused decode path, in words."""
        return fused_decode.declined(self._layers, self._head_VE)

    def _fused_decode(self) -> FusedDecode | None:
        """The fused decode path, unless what was loaded cannot take it."""
        reason = self.fused_decode_declined()
        if reason is not None:
            log.info("small batches do not take the fused decode path because %s", reason)
            return None
        scratch = fused_decode.make_scratch(self._acquire(activations.fused_decode_request(self._spec, self._recipe)))
        return FusedDecode(self._layers, self._final_norm, self._head_VE, scratch)

    def _attention_buffers(self, num_rows: int) -> AttentionBuffers:
        requests = self._requests(num_rows)
        return AttentionBuffers.of(self._acquire(requests.attention), self._quantized(requests.codes))
