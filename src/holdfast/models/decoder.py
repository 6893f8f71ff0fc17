"""The one decoder that every family with keys and values by head configures; small batches on a GPU take the fused decode path.

T rows of the step, R rows whose logits are wanted, H hidden, V vocabulary

Products of the fused decode path add to the residual stream in their epilogue (fused_decode.py).
"""

from typing import Any

from holdfast.attention.backend import GroupedAttention
from holdfast.distributed.exchange import Exchange
from holdfast.layers.attention import AttentionBuffers, AttentionLayer
from holdfast.memory.workspace import Workspace
from holdfast.memory.workspace_plan import TensorSpec
from holdfast.models.decoder_layer import LayerBuilder, Weights
from holdfast.models.layer_stack import LayerStack, output_sharing
from holdfast.models.rope import StepRope
from holdfast.models.spec import ModelSpec
from holdfast.quant.weight_schemes import AS_STORED, WeightRecipe


class Decoder(LayerStack[AttentionLayer]):
    """The Model of models/model.py with keys and values by head."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        backend: GroupedAttention[Any],
        rope: StepRope,
        workspace: Workspace,
        scratch: tuple[TensorSpec, ...],
        takes_fused_decode: bool = False,
        dtype: str | None = None,
        recipe: WeightRecipe = AS_STORED,
        exchange: Exchange | None = None,
        is_exact: bool = False,
    ) -> None:
        """`dtype` is that of activations, None for the one of norms; `recipe` is how the weights were quantized.

        With `exchange` spec and weights are those of one rank; `is_exact` as in its Mesh.
        """
        builder = LayerBuilder(spec, weights, backend, rope.rotaries, output_sharing(exchange, is_exact, workspace))
        super().__init__(spec, weights, builder, rope, workspace, scratch, takes_fused_decode, dtype, recipe, exchange)

    def _attention_buffers(self, num_rows: int) -> AttentionBuffers:
        requests = self._requests(num_rows)
        return AttentionBuffers.of(self._acquire(requests.attention), self._quantized(requests.codes))
