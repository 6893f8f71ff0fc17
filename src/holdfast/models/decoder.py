"""The one decoder that every family configures: embed, layers, norm, logits, all in tensors of one workspace.

T rows of the step, R rows whose logits are wanted, H hidden, V vocabulary, X any other width

The residual stream is x, and what the last product computed is added to it by the norm that follows: one pass over memory
for both. Steps of few rows on a GPU have products that do this themselves (kernels/skinny_linear.py).
"""

from collections.abc import Mapping
from functools import cache, partial
from typing import Any

import torch

from holdfast.attention.backend import AttentionBackend
from holdfast.attention.batch import Batch
from holdfast.kernels.begin_rows import NormedRows, SkinnyScratch, begin_rows
from holdfast.kernels.linear import linear_float32
from holdfast.kernels.skinny_linear import linear_add, normed_linear
from holdfast.kernels.write_heads import HeadNorm, Rotary
from holdfast.layers.attention import AttentionBuffers, AttentionLayer
from holdfast.layers.linear import Linear
from holdfast.layers.mlp import GatedMLP, MLPBuffers, PlainMLP
from holdfast.layers.norm import LayerNorm, RMSNorm
from holdfast.memory.tensor_spec import TensorSpec
from holdfast.memory.workspace import Workspace
from holdfast.models import activations
from holdfast.models.activations import Request
from holdfast.models.spec import ModelSpec

Weights = Mapping[str, torch.Tensor]
Norm = RMSNorm | LayerNorm


class DecoderLayer:
    """Attention and MLP around a residual stream."""

    def __init__(self, attn_norm: Norm, attention: AttentionLayer, mlp_norm: Norm, mlp: GatedMLP | PlainMLP) -> None:
        self.attn_norm = attn_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp


class Decoder:
    """A whole model over final weights. It holds references to them and no state of its own."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        backend: AttentionBackend[Any],
        rotary: Rotary | None,
        workspace: Workspace,
        scratch: tuple[TensorSpec, ...],
        takes_few: bool = False,
    ) -> None:
        self._spec = spec
        self._workspace = workspace
        self._embed_VE = weights["embed.weight"]
        self._dtype = str(self._embed_VE.dtype).removeprefix("torch.")
        self._positions_PH = weights.get("positions.weight")
        self._embed_in = Linear(weights["embed_in.weight"]) if "embed_in.weight" in weights else None
        self._embed_out = Linear(weights["embed_out.weight"]) if "embed_out.weight" in weights else None
        builder = _LayerBuilder(spec, weights, backend, rotary)
        self._layers = [builder.layer(index) for index in range(spec.num_layers)]
        self._final_norm = builder.norm("final_norm") if spec.has_final_norm else None
        self._head_VE = weights["lm_head.weight" if not spec.tied_embeddings else "embed.weight"]
        self._few = self._few_scratch() if takes_few else None
        self._requests = cache(partial(_make_requests, spec, self._dtype, scratch))

    def step_logits(self, batch: Batch, plan: Any) -> torch.Tensor:  # noqa: ANN401 the backend's own type
        """float32 logits of the rows that are wanted: [R, V], valid until the workspace is used again."""
        if self._few is not None and batch.logits is None and batch.num_rows <= activations.FEW_ROWS:
            return self._few_logits(batch, plan, self._few)
        return self.logits(self.hidden(batch, plan))

    def hidden(self, batch: Batch, plan: Any) -> torch.Tensor:  # noqa: ANN401 the backend's own type
        """Final hidden states of the rows whose logits are wanted: [R, H], in the stream."""
        x_TH, normed_TH, delta_TH = self._acquire(self._stream(batch.num_rows))
        self._embed(batch, x_TH)
        pending = None
        for layer in self._layers[:-1]:
            pending = self._run(layer, batch, plan, x_TH, normed_TH, delta_TH, pending)
        last, rows_R = self._layers[-1], batch.logits.rows_R if batch.logits is not None else None
        x_RH, delta_RH = self._attend(last, batch, plan, x_TH, normed_TH, delta_TH, pending, rows_R is not None)
        if rows_R is not None:
            # Beyond the last layer's attention only these rows matter; the two tensors change their parts.
            num_rows = len(rows_R)
            x_RH = torch.index_select(x_TH, 0, rows_R, out=normed_TH[:num_rows])
            normed_TH = x_TH[:num_rows]
        self._feed_forward(last, x_RH, normed_TH, delta_RH)
        if not self._spec.norm_first:
            return x_RH
        if self._final_norm is None:
            return x_RH.add_(delta_RH)
        return self._final_norm(x_RH, delta_RH, normed_TH)

    def logits(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        """float32 logits [R, V], valid until the workspace is used again."""
        head = activations.head_request(self._spec, hidden_RH.shape[0], self._dtype)
        embedded_RE, logits_RV = self._acquire(head)
        if self._embed_out is not None:
            hidden_RH = self._embed_out(hidden_RH, embedded_RE)
        return linear_float32(hidden_RH, self._head_VE, logits_RV)

    def _run(
        self,
        layer: DecoderLayer,
        batch: Batch,
        plan: Any,  # noqa: ANN401 the backend's own type
        x_TH: torch.Tensor,
        normed_TH: torch.Tensor,
        delta_TH: torch.Tensor,
        pending_TH: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """One layer; what is still to be added to x afterwards."""
        self._attend(layer, batch, plan, x_TH, normed_TH, delta_TH, pending_TH, False)
        self._feed_forward(layer, x_TH, normed_TH, delta_TH)
        return delta_TH if self._spec.norm_first else None

    def _attend(
        self,
        layer: DecoderLayer,
        batch: Batch,
        plan: Any,  # noqa: ANN401 the backend's own type
        x_TH: torch.Tensor,
        normed_TH: torch.Tensor,
        delta_TH: torch.Tensor,
        pending_TH: torch.Tensor | None,
        wanted_only: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        inputs_TH = layer.attn_norm(x_TH, pending_TH, normed_TH) if self._spec.norm_first else x_TH
        buffers = self._attention_buffers(batch.num_rows)
        return x_TH, layer.attention(inputs_TH, batch, plan, buffers, delta_TH, wanted_only)

    def _feed_forward(
        self, layer: DecoderLayer, x_RH: torch.Tensor, normed_RH: torch.Tensor, delta_RH: torch.Tensor
    ) -> None:
        """x += delta, and delta = MLP of it; where norms come last, x is finished instead."""
        buffers = MLPBuffers(*self._acquire(self._mlp(x_RH.shape[0])))
        if self._spec.norm_first:
            layer.mlp(layer.mlp_norm(x_RH, delta_RH, normed_RH), buffers, delta_RH)
            return
        layer.attn_norm(x_RH, delta_RH, x_RH)
        layer.mlp(x_RH, buffers, delta_RH)
        layer.mlp_norm(x_RH, delta_RH, x_RH)

    def _few_logits(self, batch: Batch, plan: Any, scratch: SkinnyScratch) -> torch.Tensor:  # noqa: ANN401
        """The same for a step of few rows: four products a layer, and nothing between them but attention."""
        x_TH, scaled_TH, _ = self._acquire(self._stream(batch.num_rows))
        self._embed(batch, x_TH)
        norms = [*(layer.attn_norm for layer in self._layers[1:]), self._final_norm]
        rows = self._begin(x_TH, self._layers[0].attn_norm, scaled_TH, scratch)
        for layer, next_norm in zip(self._layers, norms, strict=True):
            assert isinstance(layer.mlp, GatedMLP), f"{layer.mlp} is not gated"
            attention, mlp = layer.attention, layer.mlp
            buffers = self._attention_buffers(batch.num_rows)
            normed_linear(rows, attention.qkv.weight_NK, attention.qkv.bias_N, False, buffers.qkv_TX, scratch)
            attended_TX = attention.attend(batch, plan, buffers)
            rows = self._add(attended_TX, attention.o, x_TH, layer.mlp_norm, scaled_TH, scratch)
            _, active_TI = self._acquire(self._mlp(batch.num_rows))
            normed_linear(rows, mlp.gate_up.weight_NK, mlp.gate_up.bias_N, True, active_TI, scratch)
            rows = self._add(active_TI, mlp.down, x_TH, next_norm, scaled_TH, scratch)
        _, logits_RV = self._acquire(activations.head_request(self._spec, batch.num_rows, self._dtype))
        return normed_linear(rows, self._head_VE, None, False, logits_RV, scratch)

    @staticmethod
    def _begin(x_TH: torch.Tensor, norm: Norm, scaled_TH: torch.Tensor, scratch: SkinnyScratch) -> NormedRows:
        assert isinstance(norm, RMSNorm), f"{norm} is no rms norm"
        return begin_rows(x_TH, norm.weight_H, norm.eps, scaled_TH, scratch)

    @staticmethod
    def _add(
        a_TX: torch.Tensor,
        product: Linear,
        x_TH: torch.Tensor,
        norm: Norm | None,
        scaled_TH: torch.Tensor,
        scratch: SkinnyScratch,
    ) -> NormedRows:
        assert isinstance(norm, RMSNorm), f"{norm} is no rms norm"
        weight_NK, bias_N = product.weight_NK, product.bias_N
        return linear_add(a_TX, weight_NK, bias_N, x_TH, norm.weight_H, norm.eps, scaled_TH, scratch)

    def _embed(self, batch: Batch, x_TH: torch.Tensor) -> None:
        request = self._requests(batch.num_rows)[3]
        buffers = iter(self._acquire(request) if request.specs else ())
        if self._embed_in is None:
            torch.index_select(self._embed_VE, 0, batch.token_ids_T, out=x_TH)
        else:
            tokens_TE = torch.index_select(self._embed_VE, 0, batch.token_ids_T, out=next(buffers))
            self._embed_in(tokens_TE, x_TH)
        if self._positions_PH is not None:
            ids_T = torch.add(batch.positions_T, self._spec.position_offset, out=next(buffers))
            x_TH.add_(torch.index_select(self._positions_PH, 0, ids_T, out=next(buffers)))

    def _few_scratch(self) -> SkinnyScratch:
        squares, parts, arrived = self._acquire(activations.few_request(self._spec))
        return SkinnyScratch(squares, parts, arrived.zero_())

    def _attention_buffers(self, num_rows: int) -> AttentionBuffers:
        qkv_TX, q_THD, attended_TX, *scratch = self._acquire(self._requests(num_rows)[1])
        return AttentionBuffers(qkv_TX, q_THD, attended_TX, tuple(scratch))

    def _stream(self, num_rows: int) -> Request:
        return self._requests(num_rows)[0]

    def _mlp(self, num_rows: int) -> Request:
        return self._requests(num_rows)[2]

    def _acquire(self, request: Request) -> tuple[torch.Tensor, ...]:
        return self._workspace.acquire(request.owner, request.specs, request.lane)


def _make_requests(
    spec: ModelSpec, dtype: str, scratch: tuple[TensorSpec, ...], num_rows: int
) -> tuple[Request, Request, Request, Request]:
    return (
        activations.stream_request(spec, num_rows, dtype),
        activations.attention_request(spec, num_rows, dtype, scratch),
        activations.mlp_request(spec, num_rows, dtype),
        activations.embed_request(spec, num_rows, dtype),
    )


class _LayerBuilder:
    """Puts layers together from the spec's values and the weights' names."""

    def __init__(
        self, spec: ModelSpec, weights: Weights, backend: AttentionBackend[Any], rotary: Rotary | None
    ) -> None:
        self._spec = spec
        self._weights = weights
        self._backend = backend
        self._rotary = rotary

    def layer(self, index: int) -> DecoderLayer:
        prefix = f"layers.{index}"
        return DecoderLayer(
            self.norm(f"{prefix}.attn_norm"),
            self._attention(index, prefix),
            self.norm(f"{prefix}.mlp_norm"),
            self._mlp(prefix),
        )

    def norm(self, name: str) -> Norm:
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
            return GatedMLP(self._linear(f"{prefix}.gate_up"), down, self._spec.activation)
        return PlainMLP(self._linear(f"{prefix}.up"), down, self._spec.activation)
