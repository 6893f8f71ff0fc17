"""FusedDecode: the fused decode path of small batches. A layer is four products with the norm as prologue and gate or
residual as epilogue.

T rows, H hidden, X any other width

Ranks that share layers add their parts onto the stream with the next norm deferred, so x has the same bits on every
rank. A pipeline stage begins with the stream that it received, and ends with the one that it sends.

`takes_fused_decode` (models/activations.py) decides by model, `declined` by weights, and
`fits_fused_decode` by step.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from holdfast.attention.backend import Batch, StepPlan
from holdfast.kernels.gemm.deferred_rms_norm import (
    AmaxScratch,
    NormedRows,
    RowAmax,
    SmallBatchScratch,
    defer_rms_norm,
    row_amax,
)
from holdfast.kernels.gemm.packed_small_batch import unsupported
from holdfast.kernels.gemm.small_batch import linear_add, normed_linear, small_batch_linear, takes_weight
from holdfast.kernels.geometry import NUM_GATE_AMAX
from holdfast.layers.mlp import GatedMLP, Linear, MLPBuffers, RMSNorm
from holdfast.layers.moe import ExpertBuffers, ExpertLayer
from holdfast.layers.shared_linear import GatheredLinear, SummedLinear, add_part
from holdfast.models.decoder_layer import AnyAttention, DecoderLayer, Norm
from holdfast.models.model import Stream
from holdfast.quant.packed_weight import AnyWeight, PackedWeight
from holdfast.quant.quantized_weight import QuantizedWeight


def declined(layers: Sequence[DecoderLayer[Any]], head: AnyWeight | None, has_amax: bool = True) -> str | None:
    """Return None, or why these weights cannot: all must be plain or packed, or all must have eight bits and row scales.

    `head` is None if another stage has it. `has_amax`: the plan has scratch for the amax of quantized rows.
    """
    blocks = [layer.mlp for layer in layers]
    if any(isinstance(block, ExpertLayer) and block.has_table for block in blocks):
        return "experts of some layer come from a table by token id, and this path has no token ids"
    if any(isinstance(block, GatedMLP) and block.limit is not None for block in blocks):
        return "the MLP of some layer has a limit on its gate, and this path has none"
    if any(isinstance(layer.attention.o, GatheredLinear) for layer in layers):
        return (
            "ranks gather (exact), so that every number is computed as one rank alone computes it on the ordinary way"
        )
    weights = [weight for layer in layers for weight in _products(layer)]
    if any(isinstance(weight, PackedWeight) for weight in (*weights, head)):
        return _packed_declined(layers, weights, head)
    if not has_amax and any(isinstance(weight, QuantizedWeight) for weight in weights):
        return "weights are quantized as the checkpoint stores them, and the plan has no scratch for their amax"
    plain = sum(isinstance(weight, torch.Tensor) for weight in weights)
    code_dtypes = {weight.scheme.code_dtype for weight in weights if isinstance(weight, QuantizedWeight)}
    if isinstance(head, QuantizedWeight) and (plain == len(weights) or not takes_weight(head)):
        return f"the head is in {head.scheme.name} and layers are not"
    if len(code_dtypes) > 1:
        return f"weights have codes of different kinds, {' and '.join(sorted(code_dtypes))}"
    if plain in (0, len(weights)) and all(
        isinstance(weight, torch.Tensor) or takes_weight(weight) for weight in weights
    ):
        return None
    return f"{plain} of {len(weights)} weights are plain, and the others are not all of eight bits with scales by row"


def _packed_declined(
    layers: Sequence[DecoderLayer[Any]], weights: Sequence[AnyWeight], head: AnyWeight | None
) -> str | None:
    """Return None, or why weights that are packed in part cannot."""
    if any(isinstance(weight, QuantizedWeight) for weight in (*weights, head)):
        return "some weights are packed and others quantized"
    mlps = (layer.mlp for layer in layers if isinstance(layer.mlp, GatedMLP))
    gated_or_added = [
        *(layer.attention.o for layer in layers),
        *(one for mlp in mlps for one in (mlp.gate_up, mlp.down)),
    ]
    whole = {id(product.weight_NK) for product in gated_or_added}
    packed = (weight for weight in (*weights, head) if isinstance(weight, PackedWeight))
    reasons = (unsupported(weight, takes_parts=id(weight) not in whole) for weight in packed)
    return next((reason for reason in reasons if reason is not None), None)


def _products(layer: DecoderLayer[Any]) -> list[AnyWeight]:
    products = [*layer.attention.products]
    if isinstance(layer.mlp, GatedMLP):
        products += [layer.mlp.gate_up, layer.mlp.down]
    return [product.weight_NK for product in products]


class FusedDecode:
    """A decoder's layers for small batches: GEMVs or small-batch GEMMs, with only attention or experts between them."""

    def __init__(
        self,
        layers: Sequence[DecoderLayer[Any]],
        final_norm: Norm | None,
        head: AnyWeight | None,
        scratch: SmallBatchScratch,
    ) -> None:
        """Norm and head are None if another stage has them."""
        self._layers = layers
        # After the last layer of a stage the deferred norm is unused: the stream alone continues.
        self._norms = [*(layer.attn_norm for layer in layers[1:]), final_norm or layers[-1].mlp_norm]
        self._head = head
        self.scratch = scratch

    def logits(self, rows: NormedRows, logits_TV: torch.Tensor) -> torch.Tensor:
        """Compute float32 logits of every row after the last layer into `logits_TV`."""
        assert self._head is not None, "the head is in another stage"
        return normed_linear(rows, self._head, None, False, logits_TV, self.scratch)

    def run_layers(
        self,
        batch: Batch,
        plan: StepPlan,
        stream: Stream,
        attention_buffers: Callable[[AnyAttention, int], Any],
        mlp_buffers: Callable[[int], MLPBuffers],
        expert_buffers: Callable[[int], ExpertBuffers],
    ) -> NormedRows:
        """Run this stage's layers: return x of the stream that `embed` left, with its norm deferred."""
        x_TH, scaled_TH, delta_TH, _ = stream
        scratch, num_rows = self.scratch, batch.num_rows
        rows = defer_rms_norm(_rms(self._layers[0].attn_norm).defer(x_TH, scaled_TH, scratch))
        for layer, next_norm in zip(self._layers, self._norms, strict=True):
            attention, mlp, after = layer.attention, layer.mlp, _rms(next_norm)
            buffers = attention_buffers(attention, num_rows)
            attended_TX = attention.attend_normed(rows, batch, plan, buffers, scratch)
            amax = self._input_amax(attended_TX, attention.o)
            rows = self._add(attended_TX, attention.o, stream, _rms(layer.mlp_norm), amax)
            if isinstance(mlp, GatedMLP):
                active_TI = mlp_buffers(num_rows).active_TI
                normed_linear(rows, mlp.gate_up.weight_NK, mlp.gate_up.bias_N, True, active_TI, scratch)
                rows = self._add(active_TI, mlp.down, stream, after, self._gate_amax())
            else:
                assert isinstance(mlp, ExpertLayer), f"{mlp} is neither gated nor experts"
                routing, onto = expert_buffers(num_rows), after.defer(x_TH, scaled_TH, scratch)
                cleared = None if amax is None else self._gate_amax()
                rows = mlp.add_normed(rows, routing, delta_TH, onto, cleared)
        return rows

    def _gate_amax(self) -> RowAmax | None:
        """Return the amax that gated products raise; None if no weight is quantized."""
        return None if self.scratch.amax is None else RowAmax(self.scratch.amax.gated, NUM_GATE_AMAX)

    def _input_amax(self, a_TX: torch.Tensor, product: Linear) -> RowAmax | None:
        """Return the amax of a residual product's input; clear those of the next gate on the way."""
        amax, weight = self.scratch.amax, product.weight_NK
        if amax is None or not isinstance(weight, QuantizedWeight) or not weight.scheme.quantizes_activations:
            return None
        return row_amax(a_TX, amax.inputs, amax.gated[: a_TX.shape[0] * NUM_GATE_AMAX])

    def _add(
        self, a_TX: torch.Tensor, product: Linear, stream: Stream, norm: RMSNorm, amax: RowAmax | None
    ) -> NormedRows:
        """Add the product to x with the next norm deferred; all-reduce it first if ranks share it."""
        weight, bias_N, (x_TH, scaled_TH, _, _) = product.weight_NK, product.bias_N, stream
        onto = norm.defer(x_TH, scaled_TH, self.scratch)
        if not isinstance(product, SummedLinear):
            return linear_add(a_TX, weight, bias_N, onto, amax)
        part_TH = product.exchange.room(x_TH.shape[0], x_TH.shape[1], x_TH.dtype)
        small_batch_linear(a_TX, weight, bias_N, part_TH, self.scratch, amax)
        return add_part(product.exchange, part_TH, onto)


def make_scratch(held: Mapping[str, torch.Tensor]) -> SmallBatchScratch:
    """Build scratch from the tensors of `fused_decode_request`, by name; counters and amax start at zero."""
    squares, partials, arrived = held["squares"], held["parts"], held["arrived"].zero_()
    if "amax" not in held:
        return SmallBatchScratch(squares, partials, arrived)
    amax = AmaxScratch(held["amax"], held["input_amax"], held["gate_amax"].zero_())
    return SmallBatchScratch(squares, partials, arrived, amax)


def _rms(norm: Norm | None) -> RMSNorm:
    assert isinstance(norm, RMSNorm), f"{norm} is no rms norm"
    return norm
