"""Layer with a state (gated delta net): fused projections, convolution, delta rule, gated norm, output projection.

T rows of the step, C channels of the convolution, V columns of all values, X = C + V, H value heads, K/D elements of a
key and of a value, P places, W taps
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch

from holdfast.attention.backend import Batch, StepPlan
from holdfast.families.state.backend import HybridAttention, LayerStates
from holdfast.families.state.spec import SCRATCH, StateSpec
from holdfast.kernels.gemm.deferred_rms_norm import NormedRows, SmallBatchScratch
from holdfast.kernels.gemm.quantize_activations import QuantizedRows
from holdfast.kernels.gemm.small_batch import SideProduct, normed_linear
from holdfast.kernels.state.causal_conv import causal_conv
from holdfast.kernels.state.delta_chunks import delta_chunks
from holdfast.kernels.state.delta_drafts import delta_drafts
from holdfast.kernels.state.delta_inputs import DeltaInputs
from holdfast.kernels.state.delta_step import delta_step
from holdfast.kernels.state.gated_norm import gated_norm
from holdfast.kernels.state.kept_drafts import KeptDrafts
from holdfast.kernels.state.state_geometry import ACCEPTED
from holdfast.kernels.state.state_rows import StateRows
from holdfast.layers.mlp import Linear
from holdfast.layers.parts import LayerParts

OWN = ("projected", "gate_inputs", "mixed", "attended")


class StateBuffers(NamedTuple):
    """One layer's tensors, one set for all layers."""

    projected_TX: torch.Tensor
    gate_inputs_TX: torch.Tensor
    """float32 [T, 2 H]: of beta, then of the decay."""
    mixed_TC: torch.Tensor
    attended_TV: torch.Tensor
    scratch: Mapping[str, torch.Tensor]
    """Scratch of the chunk kernels, by name."""
    quantized: QuantizedRows | None = None
    """Holds the quantized rows of either product; None if no weight takes them."""

    @classmethod
    def of(cls, held: Mapping[str, torch.Tensor], quantized: QuantizedRows | None) -> "StateBuffers":
        """Take the tensors that `StateSpec.tensors` declares; the others are the backend's scratch."""
        scratch = {name.removeprefix(SCRATCH): tensor for name, tensor in held.items() if name not in OWN}
        return cls(*(held[name] for name in OWN), scratch=scratch, quantized=quantized)


class StateWeights(NamedTuple):
    """Weights between the two products."""

    in_gates_NK: torch.Tensor
    conv_CW: torch.Tensor
    A_log_H: torch.Tensor
    dt_bias_H: torch.Tensor
    norm_D: torch.Tensor
    eps: float


class StateLayer:
    """One layer."""

    reads_codes_alone = False
    """False: two products read the norm of x."""

    def __init__(self, spec: StateSpec, in_proj: Linear, o: Linear, weights: StateWeights, states: LayerStates) -> None:
        self.in_proj, self.o = in_proj, o
        self._spec, self._weights, self._states = spec, weights, states

    def __call__(
        self,
        x_TH: torch.Tensor,
        batch: Batch,
        plan: StepPlan,
        buffers: StateBuffers,
        out_TH: torch.Tensor,
        wanted_only: bool = False,
        is_coded: bool = False,
    ) -> torch.Tensor:
        """Advance the states by all rows; return the outputs of all, or of those whose logits are wanted: [T, H] or [R, H].

        If `is_coded`, x has already been quantized into `buffers.quantized`. The product for the gates reads x itself.
        """
        inputs = x_TH, buffers.projected_TX, self._weights.in_gates_NK, buffers.gate_inputs_TX
        self.in_proj.joint(*inputs, buffers.quantized, is_coded)
        attended_RV = self.o.room_for_inputs(buffers.attended_TV)
        self._attend(plan.states, buffers, attended_RV)
        if wanted_only and batch.logits is not None:
            # The convolution's rows are free, and at least as wide.
            rows_R, width = batch.logits.rows_R, attended_RV.shape[1]
            wanted_RV = buffers.mixed_TC.view(-1)[: len(rows_R) * width].view(len(rows_R), width)
            attended_RV = torch.index_select(attended_RV, 0, rows_R, out=wanted_RV)
        return self.o(attended_RV, out_TH[: attended_RV.shape[0]], buffers.quantized)

    def attend_normed(
        self, rows: NormedRows, batch: Batch, plan: StepPlan, buffers: StateBuffers, scratch: SmallBatchScratch
    ) -> torch.Tensor:
        """Fused decode path, up to the output projection, with rows whose RMSNorm is deferred."""
        gates = SideProduct(self._weights.in_gates_NK, buffers.gate_inputs_TX)
        normed_linear(rows, self.in_proj.weight_NK, self.in_proj.bias_N, False, buffers.projected_TX, scratch, gates)
        attended_TV = self.o.room_for_inputs(buffers.attended_TV)
        self._attend(plan.states, buffers, attended_TV)
        return attended_TV

    def _attend(self, rows: StateRows, buffers: StateBuffers, out_TV: torch.Tensor) -> None:
        """Run what lies between the products: `projected_TX` and `gate_inputs_TX` to `out_TV`."""
        spec, weights, (conv_PCW, recurrent_PHKV, drafts) = self._spec, self._weights, self._states
        kept = KeptDrafts(*drafts, accepted_SDC=buffers.scratch[ACCEPTED]) if drafts else None
        x_TC, z_TV = buffers.projected_TX.split((spec.num_channels, spec.value_size), dim=1)
        b_TH, a_TH = buffers.gate_inputs_TX.chunk(2, dim=1)
        causal_conv(x_TC, rows, weights.conv_CW, conv_PCW, buffers.mixed_TC, kept=kept)
        heads = spec.key_heads, spec.key_dim, spec.value_heads, spec.value_dim
        inputs = DeltaInputs.of(buffers.mixed_TC, *heads, a_TH, b_TH, weights.A_log_H, weights.dt_bias_H)
        # The convolution has read its inputs. In another order, the norm cannot write in place.
        raw_TV = x_TC[:, : spec.value_size] if spec.is_tiled else out_TV
        raw_THV, z_THV, out_THV = (
            x_TV.unflatten(1, (spec.value_heads, spec.value_dim)) for x_TV in (raw_TV, z_TV, out_TV)
        )
        if kept is None:
            delta_step(inputs, rows, recurrent_PHKV, raw_THV)
        else:
            delta_drafts(inputs, rows, recurrent_PHKV, raw_THV, kept)
        if rows.chunks_M4 is not None:
            delta_chunks(inputs, rows, recurrent_PHKV, raw_THV, buffers.scratch)
        for own_heads, places in spec.value_runs:
            own = raw_THV[:, own_heads], z_THV[:, own_heads], weights.norm_D, weights.eps, out_THV[:, places]
            gated_norm(*own, spec.output_gate)

    @property
    def products(self) -> tuple[Linear, ...]:
        return self.in_proj, self.o

    def room_for_codes(self, quantized: QuantizedRows | None, num_rows: int) -> QuantizedRows | None:
        """Return the buffer in which a norm leaves quantized x, beside the rows that the product for the gates reads."""
        return self.in_proj.room_for_codes(quantized, num_rows)


def build_layer(parts: LayerParts, layer: int, spec: StateSpec, eps: float, backend: HybridAttention) -> StateLayer:
    """Build a layer from its weights."""
    prefix = f"layers.{layer}"
    names = "in_gates.weight", "conv.weight", "A_log", "dt_bias", "gated_norm.weight"
    weights = StateWeights(*(parts.plain(f"{prefix}.{name}") for name in names), eps=eps)
    in_proj, o = parts.linear(f"{prefix}.in_proj"), parts.output(f"{prefix}.o")
    return StateLayer(spec, in_proj, o, weights, backend.states.layer(layer))
