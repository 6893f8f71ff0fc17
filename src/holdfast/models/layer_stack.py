"""LayerStack: what decoders share: embed, a range of layers, norm and logits in one workspace. Attention is their own.

T rows of the step, R rows whose logits are wanted, H hidden, E embedding, V vocabulary, X any other width

The residual stream is x. The norm that follows a product adds its output to x: one pass over memory
for both.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch

from holdfast.attention.backend import Batch, StepPlan
from holdfast.distributed.exchange import Exchange
from holdfast.families.grouped.layer import GroupedBuffers
from holdfast.families.grouped.native_layer import NativeStep
from holdfast.families.latent.layer import LatentBuffers
from holdfast.families.state.layer import StateBuffers, StateLayer
from holdfast.kernels.attention.rope_rows import fill_rope_rows
from holdfast.kernels.gemm.embedding import lookup_rows, lookup_share
from holdfast.kernels.gemm.linear import linear_float32
from holdfast.kernels.gemm.quantize_activations import QuantizedRows, TileScratch
from holdfast.layers.mlp import MLPBuffers
from holdfast.layers.moe import ExpertBuffers, ExpertLayer
from holdfast.memory.workspace import Workspace
from holdfast.models import activations, fused_decode
from holdfast.models.activations import Request, StepRequests
from holdfast.models.decoder_layer import AnyAttention, DecoderLayer, DecoderParts, LayerBuilder
from holdfast.models.fused_decode import FusedDecode
from holdfast.models.model import Stream
from holdfast.models.native_layers import native_layers
from holdfast.models.spec import ModelSpec
from holdfast.observability.log import get_logger
from holdfast.quant.packed_weight import AnyWeight
from holdfast.quant.weight_schemes import WeightRecipe

log = get_logger(__name__)

MAX_CACHED_SIZES = 128
"""Most row counts whose requests are cached, the latest ones: steps reach thousands of sizes in time."""


class HeadRequests(NamedTuple):
    """Workspace requests of logits for some rows."""

    head: Request
    codes: Request


class StepWorkspace:
    """Gives decoders of all kinds tensors of the workspace, and rows of the embedding; `dtype` is that of activations."""

    def __init__(
        self,
        spec: ModelSpec,
        workspace: Workspace,
        dtype: str,
        recipe: WeightRecipe,
        exchange: Exchange | None = None,
        embed_VE: AnyWeight | None = None,
    ) -> None:
        self._spec = spec
        self._exchange = exchange
        self._embed_VE = embed_VE
        """None in middle stages of a pipeline, and in the last one if the head is another weight."""
        self.workspace = workspace
        self._dtype = dtype
        self._recipe = recipe
        self.tile_scratch = self._make_tile_scratch()
        self._head_requests: Callable[[int], HeadRequests] = lru_cache(MAX_CACHED_SIZES)(
            partial(_head_requests, spec, dtype, recipe)
        )
        self.before_layer: Callable[[], None] | None = None
        """Called before every layer on a CPU; it may raise, which abandons the step."""

    def _make_tile_scratch(self) -> TileScratch | None:
        """Acquire the scratch that medium-batch products share, if the plan has it; counters start at zero."""
        request = activations.row_scaled_request(self._spec, self._recipe)
        if request.lane not in self.workspace.lanes:
            return None
        held = self.acquire(request)
        return TileScratch(held["parts"], held["arrived"].zero_(), held["row_amax"])

    def _head_buffers(self, num_rows: int) -> tuple[dict[str, torch.Tensor], QuantizedRows | None]:
        """Acquire logits of `num_rows` rows, and the buffer for the head's quantized inputs."""
        requests = self._head_requests(num_rows)
        return self.acquire(requests.head), self._quantized(requests.codes)

    def _quantized(self, request: Request) -> QuantizedRows | None:
        """Acquire the buffer for quantized inputs, until the next product; None if no weight takes them."""
        if not request.specs:
            return None
        held = self.acquire(request)
        return QuantizedRows(held["codes"], held["scales"], self.tile_scratch)

    def _lookup(self, ids_T: torch.Tensor, out_TE: torch.Tensor) -> torch.Tensor:
        """Look up rows of the embedding. Each rank has some, takes zeros for other ids, and all-reduces."""
        exchange = self._exchange
        assert self._embed_VE is not None, "the embedding is in another stage"
        if exchange is None or exchange.size == 1:
            return lookup_rows(ids_T, self._embed_VE, out_TE)
        num_rows, size = out_TE.shape
        part_TE = exchange.room(num_rows, size, out_TE.dtype)
        lookup_share(ids_T, self._embed_VE, self._spec.first_token, part_TE)
        return exchange.sum_rows(part_TE, out_TE)

    def acquire(self, request: Request) -> dict[str, torch.Tensor]:
        return self.workspace.acquire_named(request.owner, request.specs, request.lane)


def _head_requests(spec: ModelSpec, dtype: str, recipe: WeightRecipe, num_rows: int) -> HeadRequests:
    head = activations.head_request(spec, num_rows, dtype)
    return HeadRequests(head, activations.quantized_rows_request(spec, 0, num_rows, recipe))


def norm_dtype(weight_H: torch.Tensor) -> str:
    """Return the default type of activations: that of norms."""
    return str(weight_H.dtype).removeprefix("torch.")


class LayerStack(StepWorkspace):
    """A decoder with one residual stream over final weights (the Model of models/model.py). It has no state of its own."""

    def __init__(self, parts: DecoderParts) -> None:
        spec, weights, builder = parts.spec, parts.weights, LayerBuilder(parts)
        dtype = parts.dtype or norm_dtype(builder.plain("layers.0.attn_norm.weight"))
        super().__init__(spec, parts.workspace, dtype, parts.recipe, parts.exchange, weights.get("embed.weight"))
        self._rope = parts.rope.rows
        self._make_buffers = GroupedBuffers.of if spec.latent is None else LatentBuffers.of
        self._embed_scale = _rounded(spec.embedding_scale, self._dtype)
        self._positions_PH = weights.get("positions.weight")
        self._embed_in = builder.linear("embed_in") if "embed_in.weight" in weights else None
        self._embed_out = builder.linear("embed_out") if "embed_out.weight" in weights else None
        self.layers = [builder.layer(index, builder.attention(index)) for index in range(spec.num_layers)]
        self._final_norm = builder.norm("final_norm") if spec.has_final_norm and spec.is_last_stage else None
        head = "embed.weight" if spec.tied_embeddings else "lm_head.weight"
        self._head_VE = weights[head] if spec.is_last_stage else None
        self.requests: Callable[[int], StepRequests] = lru_cache(MAX_CACHED_SIZES)(
            partial(activations.step_requests, spec, dtype=dtype, scratch=parts.scratch, recipe=parts.recipe)
        )
        self.fused = self._fused_decode() if parts.takes_fused_decode else None
        """The fused decode path; None if no step takes it."""
        self.native = native_layers(self.layers)
        """Layers as one call of C each; None if some layer is not of this kind."""

    @property
    def expert_layers(self) -> list[ExpertLayer]:
        """Sparse layers, first to last."""
        return [layer.mlp for layer in self.layers if isinstance(layer.mlp, ExpertLayer)]

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def step_logits(self, batch: Batch, plan: StepPlan) -> torch.Tensor:
        """Compute float32 logits [R, V], valid until the workspace is used again; none before the last stage."""
        if self.fused is not None and batch.logits is None and self._fits_fused_decode(len(batch.token_ids_T)):
            return self.fused_logits(batch, plan, self.fused)
        hidden_RH = self.hidden(batch, plan)
        return self.logits(hidden_RH) if self._spec.is_last_stage else hidden_RH

    def fused_logits(self, batch: Batch, plan: StepPlan, fused: FusedDecode) -> torch.Tensor:
        """Compute logits on the fused decode path. Stages need not agree on it: they exchange the residual stream."""
        stream, buffers = self.embed(batch), (self._buffers_of, self._mlp_buffers, self._expert_buffers)
        rows = fused.run_layers(batch, plan, stream, *buffers)
        if not self._spec.is_last_stage:
            return self._send(stream)
        head = self.acquire(activations.head_request(self._spec, len(batch.token_ids_T), self._dtype))
        return fused.logits(rows, head["logits"])

    def _fits_fused_decode(self, num_rows: int) -> bool:
        return activations.fits_fused_decode(num_rows, self._spec, self._recipe)

    def fused_decode_declined(self) -> str | None:
        """Return None, or why the loaded weights cannot take the fused decode path."""
        has_amax = activations.layer_scheme(self._spec, self._recipe) is not None
        return fused_decode.declined(self.layers, self._head_VE, has_amax)

    def _fused_decode(self) -> FusedDecode | None:
        """Build the fused decode path, unless the loaded weights cannot take it."""
        reason = self.fused_decode_declined()
        if reason is not None:
            log.info("small batches do not take the fused decode path because %s", reason)
            return None
        scratch = fused_decode.make_scratch(self.acquire(activations.fused_decode_request(self._spec, self._recipe)))
        return FusedDecode(self.layers, self._final_norm, self._head_VE, scratch)

    def hidden(self, batch: Batch, plan: StepPlan) -> torch.Tensor:
        """Compute final hidden states of the rows whose logits are wanted: [R, H], in the stream.

        A stage before the last sends all its rows to the next one and returns [0, H].
        """
        stream = self.run_layers(self.embed(batch), batch, plan, range(self.num_layers))
        return self.finish(stream) if self._spec.is_last_stage else self._send(stream)

    def embed(self, batch: Batch) -> Stream:
        """Embed tokens and learned positions, if any; or receive the previous stage's rows.

        Every stage first computes cos and sin of the step's rows, for all its layers.
        """
        if self._rope is not None:
            fill_rope_rows(batch.positions_T, self._rope)
        requests = self.requests(len(batch.token_ids_T))
        stream = self.acquire(requests.stream)
        x_TH = stream["x"]
        if not self._spec.is_first_stage:
            assert self._exchange is not None, "a pipeline stage has no exchange to receive by"
            self._exchange.receive_rows(x_TH)
            return Stream(x_TH, stream["normed"], stream["delta"], has_delta=False)
        buffers = self.acquire(requests.embed) if requests.embed.specs else {}
        if self._embed_in is None:
            self._lookup(batch.token_ids_T, x_TH)
        else:
            tokens_TE = self._lookup(batch.token_ids_T, buffers["tokens"])
            self._embed_in(tokens_TE, x_TH, self._quantized(requests.codes))
        if self._embed_scale is not None:
            x_TH.mul_(self._embed_scale)
        if self._positions_PH is not None:
            ids_T = torch.add(batch.positions_T, self._spec.position_offset, out=buffers["position_ids"])
            x_TH.add_(lookup_rows(ids_T, self._positions_PH, buffers["positions"]))
        return Stream(x_TH, stream["normed"], stream["delta"], has_delta=False)

    def _send(self, stream: Stream) -> torch.Tensor:
        """Send the stream and its pending output to the next stage: the next norm rounds the same sum (norm.py)."""
        assert self._exchange is not None, "a pipeline stage has no exchange to send by"
        if stream.has_delta:
            stream.x_TH.add_(stream.delta_TH)
        self._exchange.send_rows(stream.x_TH)
        return stream.x_TH[:0]

    def run_layers(
        self,
        stream: Stream,
        batch: Batch,
        plan: StepPlan,
        layers: range,
    ) -> Stream:
        """Run consecutive layers. After the attention of the last one only rows whose logits are wanted go on."""
        last = self.num_layers - 1 if self._spec.is_last_stage and batch.logits is not None else None
        step = self._native_step(stream, batch, plan)
        for index in layers:
            if self.before_layer is not None:
                self.before_layer()
            if self.native is not None and step is not None and index != last:
                stream = self.native.run(index, stream, step)
                continue
            layer, wanted_only = self.layers[index], index == last
            x_TH, normed_TH, delta_TH, has_delta = stream
            inputs_TH, codes, buffers = x_TH, None, self._buffers_of(layer.attention, len(batch.token_ids_T))
            if self._spec.norm_first:
                codes = layer.attention.room_for_codes(buffers.quantized, len(batch.token_ids_T))
                delta = delta_TH if has_delta else None
                if codes is not None and layer.attention.reads_codes_alone:
                    inputs_TH = layer.attn_norm.encode(x_TH, delta, normed_TH, codes)
                else:
                    inputs_TH = layer.attn_norm(x_TH, delta, normed_TH, codes)
            is_coded = codes is not None
            delta_RH = layer.attention(inputs_TH, batch, plan, buffers, delta_TH, wanted_only, is_coded)
            if wanted_only and batch.logits is not None:
                num_rows = len(batch.logits.rows_R)
                if num_rows == 0:
                    return Stream(x_TH[:0], normed_TH[:0], delta_TH[:0], has_delta=False)
                # The two tensors swap roles.
                x_TH = torch.index_select(x_TH, 0, batch.logits.rows_R, out=normed_TH[:num_rows])
                normed_TH = stream.x_TH[:num_rows]
            self.feed_forward(layer, x_TH, normed_TH, delta_RH)
            stream = Stream(x_TH, normed_TH, delta_RH, has_delta=self._spec.norm_first)
        return stream

    def _native_step(self, stream: Stream, batch: Batch, plan: StepPlan) -> NativeStep | None:
        """Collect the buffers of layers that run as one call of C; None if they run part by part."""
        if self.native is None or self.native.is_watched or not self._spec.norm_first:
            return None
        num_rows = batch.num_rows
        return self.native.begin(stream, batch, plan, self._attention_buffers(num_rows), self._mlp_buffers(num_rows))

    def finish(self, stream: Stream) -> torch.Tensor:
        """Return final hidden states of the remaining rows, the head's input."""
        x_RH, normed_RH, delta_RH, has_delta = stream
        if x_RH.shape[0] == 0 or not has_delta:
            return x_RH
        if self._final_norm is None:
            return x_RH.add_(delta_RH)
        return self._final_norm(x_RH, delta_RH, normed_RH)

    def logits(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        """Run the head: float32 logits [R, V], valid until the workspace is used again."""
        assert self._head_VE is not None, "the head is in another stage"
        head, quantized = self._head_buffers(hidden_RH.shape[0])
        if self._embed_out is not None:
            hidden_RH = self._embed_out(hidden_RH, head["embedded"], quantized)
        logits_RV = linear_float32(hidden_RH, self._head_VE, head["logits"], quantized)
        cap = self._spec.logit_softcap
        return logits_RV if cap is None else logits_RV.div_(cap).tanh_().mul_(cap)

    def feed_forward(
        self, layer: DecoderLayer[Any], x_RH: torch.Tensor, normed_RH: torch.Tensor, delta_RH: torch.Tensor
    ) -> None:
        """Compute x += delta, and delta = MLP of it; if norms come last, finish x instead."""
        if self._spec.norm_first:
            if layer.attn_out_norm is not None:
                layer.attn_out_norm(delta_RH, None, delta_RH)
            self._run_normed_mlp(layer, x_RH, normed_RH, delta_RH)
            if layer.mlp_out_norm is not None:
                layer.mlp_out_norm(delta_RH, None, delta_RH)
            return
        layer.attn_norm(x_RH, delta_RH, x_RH)
        if isinstance(layer.mlp, ExpertLayer):
            layer.mlp(x_RH, self._expert_buffers(x_RH.shape[0]), delta_RH)
        else:
            layer.mlp(x_RH, self._mlp_buffers(x_RH.shape[0]), delta_RH)
        layer.mlp_norm(x_RH, delta_RH, x_RH)

    def _run_normed_mlp(
        self, layer: DecoderLayer[Any], x_RH: torch.Tensor, normed_RH: torch.Tensor, delta_RH: torch.Tensor
    ) -> None:
        """Compute x += delta, and delta = MLP of the normed x. The norm quantizes x if products take codes: an MLP reads these alone."""
        num_rows = x_RH.shape[0]
        if isinstance(layer.mlp, ExpertLayer):
            room = self._expert_buffers(num_rows)
            codes = layer.mlp.room_for_codes(room, x_RH)
            layer.mlp(layer.mlp_norm(x_RH, delta_RH, normed_RH, codes), room, delta_RH, is_coded=codes is not None)
            return
        buffers = self._mlp_buffers(num_rows)
        codes = layer.mlp.first.room_for_codes(buffers.quantized, num_rows)
        norm = layer.mlp_norm
        inputs_RH = norm(x_RH, delta_RH, normed_RH) if codes is None else norm.encode(x_RH, delta_RH, normed_RH, codes)
        layer.mlp(inputs_RH, buffers, delta_RH, is_coded=codes is not None)

    def _attention_buffers(self, num_rows: int) -> Any:  # noqa: ANN401 each family's own type
        requests = self.requests(num_rows)
        held = self.acquire(requests.attention)
        if requests.chosen.specs:
            held |= self.acquire(requests.chosen)
        return self._make_buffers(held, self._quantized(requests.codes))

    def _buffers_of(self, attention: AnyAttention, num_rows: int) -> Any:  # noqa: ANN401 each family's own type
        return (self._state_buffers if isinstance(attention, StateLayer) else self._attention_buffers)(num_rows)

    def _state_buffers(self, num_rows: int) -> StateBuffers:
        requests = self.requests(num_rows)
        return StateBuffers.of(self.acquire(requests.state), self._quantized(requests.codes))

    def _mlp_buffers(self, num_rows: int) -> MLPBuffers:
        requests = self.requests(num_rows)
        return MLPBuffers.of(self.acquire(requests.mlp), self._quantized(requests.codes))

    def _expert_buffers(self, num_rows: int) -> ExpertBuffers:
        requests = self.requests(num_rows)
        assert requests.experts is not None, f"{self._spec.architecture} has no experts"
        return ExpertBuffers.of(self.acquire(requests.experts), self._quantized(requests.codes))


def _rounded(number: float | None, dtype: str) -> float | None:
    """Round a number to that type."""
    return None if number is None else torch.tensor(number, dtype=getattr(torch, dtype)).item()
