"""The decoder of families with latent attention (MLA), to all tokens or to those that an index chooses (DSA): the layers of models/layer_stack.py around one latent a token."""

from typing import Any

from holdfast.attention.backend import LatentAttention
from holdfast.distributed.exchange import Exchange
from holdfast.layers.latent_attention import LatentAttentionLayer, LatentBuffers
from holdfast.memory.workspace import Workspace
from holdfast.memory.workspace_plan import TensorSpec
from holdfast.models.decoder_layer import LatentLayerBuilder, Weights
from holdfast.models.layer_stack import LayerStack, output_sharing
from holdfast.models.rope import StepRope
from holdfast.models.spec import ModelSpec
from holdfast.quant.weight_schemes import AS_STORED, WeightRecipe


class LatentDecoder(LayerStack[LatentAttentionLayer]):
    """The Model of models/model.py with latents; layers share the rows of one rotation."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        backend: LatentAttention[Any],
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

        A model with an index takes a `SparseLatentAttention`. With `exchange` spec and weights are those of one rank.
        """
        assert spec.latent is not None, f"{spec.architecture} keeps keys and values by head"
        rotary = rope.rotaries[0]
        assert rotary is not None, f"{spec.architecture} rotates nothing"
        builder = LatentLayerBuilder(
            spec, spec.latent, weights, backend, rotary, output_sharing(exchange, is_exact, workspace)
        )
        super().__init__(spec, weights, builder, rope, workspace, scratch, takes_fused_decode, dtype, recipe, exchange)

    def _attention_buffers(self, num_rows: int) -> LatentBuffers:
        requests = self._requests(num_rows)
        held = self._acquire(requests.attention)
        if requests.chosen.specs:
            held |= self._acquire(requests.chosen)
        return LatentBuffers.of(held, self._quantized(requests.codes))
