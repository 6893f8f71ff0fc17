"""NativeLayers: the layers of a decoder on a CPU that run as one call of C each, in steps that want all rows.

Such a layer has grouped attention over plain float32 pages, RMSNorms before its two blocks, and an MLP gated by silu, on
one rank.
"""

from collections.abc import Sequence
from typing import Any

from holdfast.attention.backend import Batch, StepPlan
from holdfast.families.grouped.layer import GroupedAttentionLayer, GroupedBuffers
from holdfast.families.grouped.native_backend import NativePagedAttention
from holdfast.kernels.native_layer import (
    GroupPlaces,
    NativeLayer,
    NativeStep,
    NormWeights,
    Products,
    unsupported,
)
from holdfast.layers.mlp import GatedMLP, Linear, MLPBuffers, RMSNorm
from holdfast.models.decoder_layer import DecoderLayer
from holdfast.models.model import Stream
from holdfast.quant.packed_weight import PackedWeight


class NativeLayers:
    """One call for each layer; `begin` collects the addresses of a step once for all layers."""

    def __init__(self, layers: Sequence[DecoderLayer[Any]]) -> None:
        """Take layers for which `declined` returns None."""
        attentions = [layer.attention for layer in layers]
        self._backend: NativePagedAttention = attentions[0].backend
        self._layers = [NativeLayer(*_operands(layer, index)) for index, layer in enumerate(layers)]
        weights = [product.weight_NK for layer in layers for product in (*layer.attention.products, layer.mlp.down)]
        self._room = next((one.room for one in weights if isinstance(one, PackedWeight)), None)

    @property
    def is_watched(self) -> bool:
        """True if the projections of a step are measured between products."""
        return self._backend.on_write is not None

    def begin(
        self, stream: Stream, batch: Batch, plan: StepPlan, attention: GroupedBuffers, mlp: MLPBuffers
    ) -> NativeStep:
        """Collect the buffers of a step whose layers run with all rows."""
        groups, _ = plan.rows(wanted_only=False)
        places = [
            GroupPlaces(batch.slots_GT[group], rows.pages_P, rows.sequences_N4) for group, rows in enumerate(groups)
        ]
        buffers = *stream[:3], attention.qkv_TX, attention.q_THD, attention.attended_TX, mlp.wide_TX, mlp.active_TI
        return NativeStep(batch.num_rows, buffers, places, self._room)

    def run(self, index: int, stream: Stream, step: NativeStep) -> Stream:
        """Run a layer."""
        self._layers[index](step, stream.has_delta)
        return Stream(*stream[:3], has_delta=True)


def declined(layers: Sequence[DecoderLayer[Any]]) -> str | None:
    """Return None, or why the layers run part by part."""
    for index, layer in enumerate(layers):
        attention, mlp = layer.attention, layer.mlp
        if not isinstance(attention, GroupedAttentionLayer) or not isinstance(attention.backend, NativePagedAttention):
            return "attention is not over plain pages in C"
        if attention.has_output_gate:
            return "outputs of attention are gated"
        if layer.attn_out_norm is not None or layer.mlp_out_norm is not None:
            return "outputs of blocks are normed"
        if not isinstance(layer.attn_norm, RMSNorm) or not isinstance(layer.mlp_norm, RMSNorm):
            return "norms are no RMSNorms"
        if not isinstance(mlp, GatedMLP) or mlp.activation != "silu" or mlp.limit is not None:
            return "the MLP is not gated by silu alone"
        if any(type(product) is not Linear for product in (*attention.products, mlp.gate_up, mlp.down)):
            return "ranks share products"
        if (why := unsupported(*_operands(layer, index))) is not None:
            return why
    return None if layers else "there are no layers"


def _operands(layer: DecoderLayer[Any], index: int) -> tuple[Any, Products, Any]:
    attention, mlp = layer.attention, layer.mlp
    norms = tuple(NormWeights(one.weight_H, one.eps, one.offset) for one in (layer.attn_norm, layer.mlp_norm))
    products = (*attention.products, mlp.gate_up, mlp.down)
    heads = attention.backend.places(index, attention.head_norm, attention.rotary)
    return norms, Products(*((one.weight_NK, one.bias_N) for one in products)), heads
