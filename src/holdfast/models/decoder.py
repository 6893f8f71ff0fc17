"""The one decoder that every family configures: embed, layers, norm, logits.

T rows of the step, R rows whose logits are wanted, H hidden, V vocabulary
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from holdfast.attention.backend import AttentionBackend
from holdfast.attention.batch import Batch
from holdfast.kernels.write_heads import HeadNorm, Rotary
from holdfast.layers.attention import AttentionLayer
from holdfast.layers.linear import Linear
from holdfast.layers.mlp import GateBuffers, GatedMLP, PlainMLP
from holdfast.layers.norm import LayerNorm, RMSNorm
from holdfast.models.spec import ModelSpec

Weights = Mapping[str, torch.Tensor]


class DecoderLayer:
    """Attention and MLP around a residual stream."""

    def __init__(self, attn_norm: RMSNorm | LayerNorm, attention: AttentionLayer, mlp_norm: RMSNorm | LayerNorm, mlp: GatedMLP | PlainMLP, norm_first: bool) -> None:  # fmt: skip
        self._attn_norm = attn_norm
        self._attention = attention
        self._mlp_norm = mlp_norm
        self._mlp = mlp
        self._norm_first = norm_first

    def attend(
        self,
        x_TH: torch.Tensor,
        batch: Batch,
        plan: Any,  # noqa: ANN401 the backend's own type
        rows_R: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x plus attention, for all rows or for those of `rows_R`."""
        inputs_TH = self._attn_norm(x_TH) if self._norm_first else x_TH
        x_RH = x_TH if rows_R is None else x_TH.index_select(0, rows_R)
        sum_RH = self._attention(inputs_TH, batch, plan, rows_R).add_(x_RH)
        return sum_RH if self._norm_first else self._attn_norm(sum_RH)

    def feed_forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        """x plus MLP."""
        if self._norm_first:
            return self._mlp(self._mlp_norm(x_TH)).add_(x_TH)
        return self._mlp_norm(self._mlp(x_TH).add_(x_TH))


class Decoder:
    """A whole model over final weights. It holds references to them and no state of its own."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        backend: AttentionBackend[Any],
        rotary: Rotary | None,
        gate_buffers: GateBuffers | None,
    ) -> None:
        self._spec = spec
        self._backend = backend
        self._embed_VE = weights["embed.weight"]
        self._positions_PH = weights.get("positions.weight")
        self._embed_in = Linear(weights["embed_in.weight"]) if "embed_in.weight" in weights else None
        self._embed_out = Linear(weights["embed_out.weight"]) if "embed_out.weight" in weights else None
        builder = _LayerBuilder(spec, weights, backend, rotary, gate_buffers)
        self._layers = [builder.layer(index) for index in range(spec.num_layers)]
        self._final_norm = builder.norm("final_norm") if spec.has_final_norm else None
        self._lm_head = Linear(weights["lm_head.weight" if not spec.tied_embeddings else "embed.weight"])

    def hidden(self, batch: Batch) -> torch.Tensor:
        """Final hidden states of the rows whose logits are wanted: [R, H]."""
        plan = self._backend.plan(batch.sequences)
        x_TH = self._embed(batch)
        for layer in self._layers[:-1]:
            x_TH = layer.feed_forward(layer.attend(x_TH, batch, plan))
        last = self._layers[-1]
        if batch.logits is None:
            x_RH = last.attend(x_TH, batch, plan)
        else:
            x_RH = last.attend(x_TH, batch, self._backend.plan(batch.logits.sequences), batch.logits.rows_R)
        x_RH = last.feed_forward(x_RH)
        if self._final_norm is not None:
            x_RH = self._final_norm(x_RH)
        return x_RH

    def logits(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        """float32 logits [R, V]."""
        if self._embed_out is not None:
            hidden_RH = self._embed_out(hidden_RH)
        return self._lm_head(hidden_RH).float()

    def _embed(self, batch: Batch) -> torch.Tensor:
        x_TE = F.embedding(batch.token_ids_T, self._embed_VE)
        x_TH = x_TE if self._embed_in is None else self._embed_in(x_TE)
        if self._positions_PH is not None:
            x_TH = x_TH + F.embedding(batch.positions_T + self._spec.position_offset, self._positions_PH)
        return x_TH


class _LayerBuilder:
    """Puts layers together from the spec's values and the weights' names."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        backend: AttentionBackend[Any],
        rotary: Rotary | None,
        gate_buffers: GateBuffers | None,
    ) -> None:
        self._spec = spec
        self._weights = weights
        self._backend = backend
        self._rotary = rotary
        self._gate_buffers = gate_buffers

    def layer(self, index: int) -> DecoderLayer:
        prefix = f"layers.{index}"
        return DecoderLayer(
            self.norm(f"{prefix}.attn_norm"),
            self._attention(index, prefix),
            self.norm(f"{prefix}.mlp_norm"),
            self._mlp(prefix),
            self._spec.norm_first,
        )

    def norm(self, name: str) -> RMSNorm | LayerNorm:
        weight_H, eps = self._weights[f"{name}.weight"], self._spec.norm_eps
        return (
            RMSNorm(weight_H, eps)
            if self._spec.norm == "rms"
            else LayerNorm(weight_H, self._weights[f"{name}.bias"], eps)
        )

    def _linear(self, name: str) -> Linear:
        return Linear(self._weights[f"{name}.weight"], self._weights.get(f"{name}.bias"))

    def _attention(self, index: int, prefix: str) -> AttentionLayer:
        spec, head_norm = self._spec, None
        if spec.qk_norm:
            q_weight_D, k_weight_D = self._weights[f"{prefix}.q_norm.weight"], self._weights[f"{prefix}.k_norm.weight"]
            head_norm = HeadNorm(q_weight_D, k_weight_D, spec.norm_eps)
        qkv, o = self._linear(f"{prefix}.qkv"), self._linear(f"{prefix}.o")
        return AttentionLayer(index, qkv, o, head_norm, self._rotary, self._backend)

    def _mlp(self, prefix: str) -> GatedMLP | PlainMLP:
        down = self._linear(f"{prefix}.down")
        if self._spec.gated_mlp:
            assert self._gate_buffers is not None, f"{prefix}: a gated MLP needs its buffers"
            return GatedMLP(self._linear(f"{prefix}.gate_up"), down, self._spec.activation, self._gate_buffers)
        return PlainMLP(self._linear(f"{prefix}.up"), down, self._spec.activation)
