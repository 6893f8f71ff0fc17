"""The one decoder that every family configures: embed, layers, norm, logits, all in tensors of one workspace.

T rows of the step, R rows whose logits are wanted, H hidden, V vocabulary, X any other width

The residual stream is x, and what the last product computed is added to it by the norm that follows: one pass over memory
for both. Small batches on a GPU take the fused decode path, whose products do this in their epilogue (fused_decode.py).
"""

from functools import cache, partial
from typing import Any, NamedTuple

import torch

from holdfast.attention.backend import AttentionBackend, Batch
from holdfast.kernels.attention.write_kv import Rotary
from holdfast.kernels.gemm.embedding import lookup_rows
from holdfast.kernels.gemm.linear import linear_float32
from holdfast.kernels.gemm.quantize_activations import QuantizedRows
from holdfast.layers.attention import AttentionBuffers
from holdfast.layers.mlp import MLPBuffers
from holdfast.layers.moe import ExpertBuffers, ExpertLayer
from holdfast.memory.workspace import Workspace
from holdfast.memory.workspace_plan import TensorSpec
from holdfast.models import activations, fused_decode
from holdfast.models.activations import Request
from holdfast.models.decoder_layer import DecoderLayer, LayerBuilder, Weights
from holdfast.models.fused_decode import FusedDecode
from holdfast.models.spec import ModelSpec
from holdfast.observability.log import get_logger
from holdfast.quant.weight_schemes import AS_STORED, WeightRecipe

log = get_logger(__name__)


class StepRequests(NamedTuple):
    """What a step of some rows asks of the workspace; those that a model does without are empty."""

    stream: Request
    embed: Request
    attention: Request
    mlp: Request
    experts: Request | None
    codes: Request


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
        takes_fused_decode: bool = False,
        dtype: str | None = None,
        recipe: WeightRecipe = AS_STORED,
    ) -> None:
        """`dtype` is that of activations, None for the one of norms; `recipe` is how the weights were quantized."""
        builder = LayerBuilder(spec, weights, backend, rotary)
        self._spec = spec
        self.workspace = workspace
        self._dtype = dtype or str(builder.plain("layers.0.attn_norm.weight").dtype).removeprefix("torch.")
        self._recipe = recipe
        self._embed_VE = weights["embed.weight"]
        self._positions_PH = weights.get("positions.weight")
        self._embed_in = builder.linear("embed_in") if "embed_in.weight" in weights else None
        self._embed_out = builder.linear("embed_out") if "embed_out.weight" in weights else None
        self._layers = [builder.layer(index) for index in range(spec.num_layers)]
        self._final_norm = builder.norm("final_norm") if spec.has_final_norm else None
        self._head_VE = weights["lm_head.weight" if not spec.tied_embeddings else "embed.weight"]
        self.fused = self._fused_decode() if takes_fused_decode else None
        """The fused decode path; None where no step takes it."""
        self._requests = cache(partial(_make_requests, spec, self._dtype, scratch, recipe))

    def step_logits(self, batch: Batch, plan: Any) -> torch.Tensor:  # noqa: ANN401 the backend's own type
        """float32 logits of the rows that are wanted: [R, V], valid until the workspace is used again."""
        if self.fused is not None and batch.logits is None and activations.fits_fused_decode(batch.num_rows):
            return self._fused_logits(batch, plan, self.fused)
        return self.logits(self.hidden(batch, plan))

    def hidden(self, batch: Batch, plan: Any) -> torch.Tensor:  # noqa: ANN401 the backend's own type
        """Final hidden states of the rows whose logits are wanted: [R, H], in the stream."""
        x_TH, normed_TH, delta_TH = self._acquire(self._requests(batch.num_rows).stream)
        self._embed(batch, x_TH)
        pending = None
        for layer in self._layers[:-1]:
            pending = self._run(layer, batch, plan, x_TH, normed_TH, delta_TH, pending)
        last, rows_R = self._layers[-1], batch.logits.rows_R if batch.logits is not None else None
        x_RH, delta_RH = self._attend(last, batch, plan, x_TH, normed_TH, delta_TH, pending, rows_R is not None)
        if rows_R is not None:
            # Beyond the last layer's attention only these rows matter; the two tensors change their parts.
            num_rows = len(rows_R)
            if num_rows == 0:
                return x_TH[:0]
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
        quantized = self._quantized(activations.quantized_rows_request(self._spec, 0, hidden_RH.shape[0], self._recipe))
        if self._embed_out is not None:
            hidden_RH = self._embed_out(hidden_RH, embedded_RE, quantized)
        return linear_float32(hidden_RH, self._head_VE, logits_RV, quantized)

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
        if self._spec.norm_first:
            self._run_mlp(layer, layer.mlp_norm(x_RH, delta_RH, normed_RH), delta_RH)
            return
        layer.attn_norm(x_RH, delta_RH, x_RH)
        self._run_mlp(layer, x_RH, delta_RH)
        layer.mlp_norm(x_RH, delta_RH, x_RH)

    def _run_mlp(self, layer: DecoderLayer, x_RH: torch.Tensor, out_RH: torch.Tensor) -> None:
        num_rows = x_RH.shape[0]
        if isinstance(layer.mlp, ExpertLayer):
            layer.mlp(x_RH, self._expert_buffers(num_rows), out_RH)
        else:
            layer.mlp(x_RH, self._mlp_buffers(num_rows), out_RH)

    def _fused_logits(self, batch: Batch, plan: Any, fused: FusedDecode) -> torch.Tensor:  # noqa: ANN401
        """The same on the fused decode path."""
        stream = self._acquire(self._requests(batch.num_rows).stream)
        self._embed(batch, stream[0])
        return fused.logits(
            batch,
            plan,
            stream,
            self._attention_buffers,
            self._mlp_buffers,
            self._expert_buffers,
            lambda num_rows: self._acquire(activations.head_request(self._spec, num_rows, self._dtype))[1],
        )

    def _embed(self, batch: Batch, x_TH: torch.Tensor) -> None:
        requests = self._requests(batch.num_rows)
        buffers = iter(self._acquire(requests.embed) if requests.embed.specs else ())
        if self._embed_in is None:
            lookup_rows(batch.token_ids_T, self._embed_VE, x_TH)
        else:
            tokens_TE = lookup_rows(batch.token_ids_T, self._embed_VE, next(buffers))
            self._embed_in(tokens_TE, x_TH, self._quantized(requests.codes))
        if self._positions_PH is not None:
            ids_T = torch.add(batch.positions_T, self._spec.position_offset, out=next(buffers))
            x_TH.add_(lookup_rows(ids_T, self._positions_PH, next(buffers)))

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
        qkv_TX, q_THD, attended_TX, *scratch = self._acquire(requests.attention)
        return AttentionBuffers(qkv_TX, q_THD, attended_TX, tuple(scratch), self._quantized(requests.codes))

    def _mlp_buffers(self, num_rows: int) -> MLPBuffers:
        requests = self._requests(num_rows)
        wide_TX, active_TI = self._acquire(requests.mlp)
        return MLPBuffers(wide_TX, active_TI, self._quantized(requests.codes))

    def _expert_buffers(self, num_rows: int) -> ExpertBuffers:
        requests = self._requests(num_rows)
        assert requests.experts is not None, f"{self._spec.architecture} has no experts"
        quantized, experts = self._quantized(requests.codes), self._spec.experts
        logits_TE, ids_TS, shares_TS, active_PI, routed_PH, *more = self._acquire(requests.experts)
        shared, shared_TH, logit_T1 = None, None, None
        if experts is not None and experts.shared_size:
            wide_TX, active_TI, shared_TH, *more = more
            shared = MLPBuffers(wide_TX, active_TI, quantized)
        if experts is not None and experts.has_shared_gate:
            logit_T1, *more = more
        routing = logits_TE, ids_TS, shares_TS, active_PI, routed_PH, tuple(more)
        return ExpertBuffers(*routing, shared, shared_TH, logit_T1, quantized)

    def _quantized(self, request: Request) -> QuantizedRows | None:
        """Room for inputs of products as codes, until the next product; None where no weight wants any."""
        return QuantizedRows(*self._acquire(request)) if request.specs else None

    def _acquire(self, request: Request) -> tuple[torch.Tensor, ...]:
        return self.workspace.acquire(request.owner, request.specs, request.lane)


def _make_requests(
    spec: ModelSpec, dtype: str, scratch: tuple[TensorSpec, ...], recipe: WeightRecipe, num_rows: int
) -> StepRequests:
    experts = spec.experts
    return StepRequests(
        activations.stream_request(spec, num_rows, dtype),
        activations.embed_request(spec, num_rows, dtype),
        activations.attention_request(spec, num_rows, dtype, scratch),
        activations.mlp_request(spec, num_rows, dtype),
        None if experts is None else activations.experts_request(experts, spec.hidden_size, num_rows, dtype),
        activations.quantized_rows_request(spec, num_rows, 0, recipe),
    )
