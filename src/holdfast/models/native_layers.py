"""NativeLayers: the layers of a decoder on a CPU that run as one call of C each, in steps that want all rows.

Such a layer has grouped attention over plain float32 pages, RMSNorms before its two blocks, and an MLP gated by silu, on
one rank.
"""

from collections.abc import Sequence
from itertools import count
from typing import Any, NamedTuple

from holdfast.attention.backend import Batch, StepPlan
from holdfast.families.grouped.layer import GroupedAttentionLayer, GroupedBuffers
from holdfast.families.grouped.native_backend import NativePagedAttention
from holdfast.families.grouped.native_layer import (
    GroupPlaces,
    HeadPlaces,
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


class Operands(NamedTuple):
    """What a layer computes with."""

    norms: tuple[NormWeights, NormWeights]
    products: Products
    heads: HeadPlaces
    backend: NativePagedAttention


class NativeLayers:
    """One call for each layer; `begin` collects the addresses of a step once for all layers."""

    def __init__(self, operands: Sequence[Operands]) -> None:
        self._backend = operands[0].backend
        self._layers = [NativeLayer(one.norms, one.products, one.heads) for one in operands]
        weights = [weight for one in operands for weight, _ in one.products]
        self._room = next((weight.room for weight in weights if isinstance(weight, PackedWeight)), None)

    @property
    def is_watched(self) -> bool:
        """True if a step runs part by part: projections are measured, or the backend has another `attend` in its place."""
        return self._backend.on_write is not None or "attend" in vars(self._backend)

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
    return next((one for one in map(_operands, count(), layers) if isinstance(one, str)), None)


def native_layers(layers: Sequence[DecoderLayer[Any]]) -> NativeLayers | None:
    """Return the layers as calls of C; None if one of them cannot be one."""
    operands = [one for one in map(_operands, count(), layers) if isinstance(one, Operands)]
    return NativeLayers(operands) if operands and len(operands) == len(layers) else None


def _operands(index: int, layer: DecoderLayer[Any]) -> Operands | str:
    """Return the operands of a layer, or why it is not one call."""
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
    products = (attention.qkv, attention.o, mlp.gate_up, mlp.down)
    if any(type(product) is not Linear for product in products):
        return "ranks share products"
    operands = Operands(
        (NormWeights.of(layer.attn_norm), NormWeights.of(layer.mlp_norm)),
        Products(*((product.weight_NK, product.bias_N) for product in products)),
        attention.backend.places(index, attention.head_norm, attention.rotary),
        attention.backend,
    )
    return unsupported(*operands[:3]) or operands
