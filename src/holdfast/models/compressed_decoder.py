"""The decoder of DeepSeek-V4: compressed attention and experts, with several residual streams mixed around each.

T rows of the step, R rows whose logits are wanted, S streams, H hidden, V vocabulary, M = (2 + S) * S shares of a row

A half of a layer takes one row (the streams collapsed by its shares), and its output is mixed back into all of them.
After the last layer the streams are collapsed once more.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import NamedTuple

import torch

from holdfast.attention.backend import Batch, StepPlan
from holdfast.families.compressed.layer import CompressedAttentionLayer, CompressedBuffers, CompressedWeights
from holdfast.kernels.attention.rope_rows import fill_rope_rows
from holdfast.kernels.gemm.linear import linear_float32
from holdfast.kernels.hyper_connections import HeadMix, MixNumbers, StreamMix
from holdfast.layers.hyper_connections import HyperConnection, StreamBuffers, StreamHead
from holdfast.layers.moe import ExpertBuffers, ExpertLayer
from holdfast.models.compressed_activations import WANTED, CompressedRequests, compressed_requests
from holdfast.models.decoder_layer import DecoderParts, LayerBuilder
from holdfast.models.layer_stack import MAX_CACHED_SIZES, StepWorkspace, norm_dtype
from holdfast.models.model import Stream
from holdfast.models.spec import CompressedSpec, StreamsSpec

MIX_NAMES = ("weight", "bias", "scale")


class StreamedLayer(NamedTuple):
    """Attention and experts, and the streams around each."""

    attention_streams: HyperConnection
    attention: CompressedAttentionLayer
    expert_streams: HyperConnection
    experts: ExpertLayer


class StreamedBuilder(LayerBuilder):
    """Builds layers with windows and entries, and the mixing of their streams."""

    def __init__(self, parts: DecoderParts, compressed: CompressedSpec, streams: StreamsSpec) -> None:
        super().__init__(parts)
        self._compressed = compressed
        self._numbers = MixNumbers(parts.spec.norm_eps, streams.eps, streams.num_iterations)

    def streamed_layer(self, index: int) -> StreamedLayer:
        eps, rope, prefix = self._spec.norm_eps, self._rope, f"layers.{index}"
        weights = CompressedWeights.of(self, index, self._compressed, eps, rope.entries[index])
        rotary = rope.rotaries[index]
        assert rotary is not None, f"layer {index} rotates nothing"
        layer = self.layer(index, CompressedAttentionLayer(index, weights, rotary, self._backend))
        assert isinstance(layer.mlp, ExpertLayer), f"layer {index} has an MLP, and no family with streams has one"
        around = self._streams(f"{prefix}.attn"), self._streams(f"{prefix}.mlp")
        return StreamedLayer(around[0], layer.attention, around[1], layer.mlp)

    def stream_head(self) -> StreamHead:
        """Build what follows the last layer."""
        mix = HeadMix(*(self.plain(f"head_streams.{name}") for name in MIX_NAMES))
        return StreamHead(mix, self._numbers, self.rms_norm("final_norm", self._spec.norm_eps))

    def _streams(self, prefix: str) -> HyperConnection:
        mix = StreamMix(*(self.plain(f"{prefix}_streams.{name}") for name in MIX_NAMES))
        return HyperConnection(mix, self._numbers, self.rms_norm(f"{prefix}_norm", self._spec.norm_eps))


class CompressedDecoder(StepWorkspace):
    """The Model of models/model.py with streams. It has no state of its own."""

    def __init__(self, parts: DecoderParts) -> None:
        spec, weights = parts.spec, parts.weights
        assert spec.compressed is not None, f"{spec.architecture} does not compress"
        assert spec.streams is not None, f"{spec.architecture} has one stream"
        builder = StreamedBuilder(parts, spec.compressed, spec.streams)
        dtype = parts.dtype or norm_dtype(builder.plain("layers.0.attn_norm.weight"))
        super().__init__(spec, parts.workspace, dtype, parts.recipe, parts.exchange, weights.get("embed.weight"))
        self._rope = parts.rope.rows
        self.layers = [builder.streamed_layer(index) for index in range(spec.num_layers)]
        self._head = builder.stream_head() if spec.is_last_stage else None
        head = "embed.weight" if spec.tied_embeddings else "lm_head.weight"
        self._head_VH = weights[head] if spec.is_last_stage else None
        self.requests: Callable[[int], CompressedRequests] = lru_cache(MAX_CACHED_SIZES)(
            partial(compressed_requests, spec, dtype=dtype, scratch=parts.scratch, recipe=parts.recipe)
        )

    @property
    def expert_layers(self) -> list[ExpertLayer]:
        """Sparse layers, first to last: every layer."""
        return [layer.experts for layer in self.layers]

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def step_logits(self, batch: Batch, plan: StepPlan) -> torch.Tensor:
        """Compute float32 logits [R, V] of the wanted rows, valid until the workspace is used again; none before the last stage.

        V: a rank's share of the vocabulary.
        """
        hidden_RH = self.hidden(batch, plan)
        return self.logits(hidden_RH) if self._spec.is_last_stage else hidden_RH

    def hidden(self, batch: Batch, plan: StepPlan) -> torch.Tensor:
        """Compute final hidden states [R, H] of the rows whose logits are wanted.

        A stage before the last sends all streams of all its rows to the next one and returns [0, H].
        """
        stream = self.run_layers(self.embed(batch), batch, plan, range(self.num_layers))
        return self.finish(stream) if self._spec.is_last_stage else self._send(stream)

    def embed(self, batch: Batch) -> Stream:
        """Copy token embeddings into every stream, or receive the previous stage's streams.

        Every stage first computes cos and sin of the step's rows, for all its layers.
        """
        if self._rope is not None:
            fill_rope_rows(batch.positions_T, self._rope)
        held = self.acquire(self.requests(batch.num_rows).stream)
        x_TSH, normed_TH = held["x"], held["normed"]
        if self._spec.is_first_stage:
            x_TSH.copy_(self._lookup(batch.token_ids_T, normed_TH).unsqueeze(1).expand_as(x_TSH))
        else:
            assert self._exchange is not None, "a pipeline stage has no exchange to receive by"
            self._exchange.receive_rows(x_TSH.flatten(1))
        return Stream(x_TSH, normed_TH, held["delta"], has_delta=False)

    def _send(self, stream: Stream) -> torch.Tensor:
        """Send all streams to the next stage, which sums the products of its first mix from them."""
        assert self._exchange is not None, "a pipeline stage has no exchange to send by"
        self._exchange.send_rows(stream.x_TH.flatten(1))
        return stream.normed_TH[:0]

    def run_layers(
        self,
        stream: Stream,
        batch: Batch,
        plan: StepPlan,
        layers: range,
    ) -> Stream:
        """Run consecutive layers. After the model's last attention only wanted rows go on, normed for the head."""
        streams = StreamBuffers.of(self.acquire(self.requests(batch.num_rows).stream))
        (x_TSH, normed_TH, delta_TH, _), token_ids_T = stream, batch.token_ids_T
        self.layers[layers.start].attention_streams.begin(x_TSH, streams)
        for index in layers:
            if self.before_layer is not None:
                self.before_layer()
            layer, is_last = self.layers[index], self._spec.is_last_stage and index == self.num_layers - 1
            logits = batch.logits if is_last else None
            requests = self.requests(batch.num_rows)
            buffers = CompressedBuffers.of(self.acquire(requests.attention), self._quantized(requests.codes))
            codes = layer.attention.qkv_a.room_for_codes(buffers.quantized, batch.num_rows)
            layer.attention_streams.enter(x_TSH, streams, normed_TH, codes)
            wanted_only, is_coded = logits is not None, codes is not None
            delta_TH = layer.attention(normed_TH, batch, plan, buffers, delta_TH, wanted_only, is_coded)
            num_rows = delta_TH.shape[0]
            if num_rows == 0:
                return Stream(normed_TH[:0], normed_TH[:0], delta_TH, has_delta=False)
            room = self.acquire(self.requests(num_rows).experts)
            if logits is not None:
                wanted = zip((x_TSH, streams.shares_TM, token_ids_T), WANTED, strict=True)
                x_TSH, shares_TM, token_ids_T = (
                    torch.index_select(whole, 0, logits.rows_R, out=room[name]) for whole, name in wanted
                )
                streams, normed_TH = StreamBuffers(shares_TM, streams.parts), normed_TH[:num_rows]
            layer.attention_streams.leave(x_TSH, delta_TH, streams, layer.expert_streams)
            own = self._expert_buffers(room, num_rows)
            codes = layer.experts.room_for_codes(own, normed_TH)
            layer.expert_streams.enter(x_TSH, streams, normed_TH, codes)
            layer.experts(normed_TH, own, delta_TH, token_ids_T, codes is not None)
            following = self.layers[index + 1].attention_streams if index + 1 < layers.stop else None
            layer.expert_streams.leave(x_TSH, delta_TH, streams, following)
            if is_last:
                assert self._head is not None, "the head is in another stage"
                x_TSH = self._head(x_TSH, streams, normed_TH)
        return Stream(x_TSH, normed_TH, delta_TH, has_delta=False)

    def finish(self, stream: Stream) -> torch.Tensor:
        """Return final hidden states of the remaining rows, which the last layer has normed."""
        return stream.x_TH

    def logits(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        """Run the head: float32 logits [R, V], valid until the workspace is used again."""
        assert self._head_VH is not None, "the head is in another stage"
        head, quantized = self._head_buffers(hidden_RH.shape[0])
        return linear_float32(hidden_RH, self._head_VH, head["logits"], quantized)

    def _expert_buffers(self, room: Mapping[str, torch.Tensor], num_rows: int) -> ExpertBuffers:
        own = {name: tensor for name, tensor in room.items() if name not in WANTED}
        return ExpertBuffers.of(own, self._quantized(self.requests(num_rows).codes))
