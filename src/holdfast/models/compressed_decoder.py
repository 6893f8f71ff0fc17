"""The decoder of DeepSeek-V4: compressed attention and experts between several residual streams, which are mixed around each of them.

T rows of the step, R rows whose logits are wanted, S streams, H hidden, V vocabulary, M = (2 + S) * S shares of a row

A half of a layer takes one row of the streams (collapsed by its shares), and what it gives goes back into all of them. Behind the
last layer streams are collapsed once more.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch

from holdfast.attention.backend import Batch, CompressedAttention
from holdfast.kernels.gemm.embedding import lookup_rows
from holdfast.kernels.gemm.linear import linear_float32
from holdfast.kernels.hyper_connections import HeadMix, MixNumbers, StreamMix
from holdfast.kernels.latent.compress import Compressor
from holdfast.kernels.latent.write_latent import LatentNorm
from holdfast.layers.compressed_attention import (
    CompressedAttentionLayer,
    CompressedBuffers,
    Entries,
    EntryIndex,
    OutputGroups,
)
from holdfast.layers.hyper_connections import HyperConnection, StreamBuffers, StreamHead
from holdfast.layers.mlp import RMSNorm
from holdfast.layers.moe import ExpertBuffers, ExpertLayer
from holdfast.memory.workspace import Workspace
from holdfast.memory.workspace_plan import TensorSpec
from holdfast.models.compressed_activations import WANTED, CompressedRequests, compressed_requests
from holdfast.models.decoder_layer import PartBuilder, Weights
from holdfast.models.model import Stream
from holdfast.models.rope import StepRope
from holdfast.models.spec import CompressedSpec, CompressorSpec, ModelSpec, StreamsSpec
from holdfast.models.step_workspace import MAX_CACHED_SIZES, StepWorkspace, norm_dtype
from holdfast.quant.weight_schemes import AS_STORED, WeightRecipe

MIX_NAMES = ("weight", "bias", "scale")


class StreamedLayer(NamedTuple):
    """Attention and experts, and the streams around each."""

    attention_streams: HyperConnection
    attention: CompressedAttentionLayer
    expert_streams: HyperConnection
    experts: ExpertLayer


class CompressedLayerBuilder(PartBuilder[CompressedAttentionLayer]):
    """Layers with windows and entries, and how their streams are mixed."""

    def __init__(
        self,
        spec: ModelSpec,
        compressed: CompressedSpec,
        streams: StreamsSpec,
        weights: Weights,
        backend: CompressedAttention[Any],
        rope: StepRope,
    ) -> None:
        super().__init__(spec, weights)
        self._compressed = compressed
        self._numbers = MixNumbers(spec.norm_eps, streams.eps, streams.num_iterations)
        self._backend = backend
        self._rope = rope

    def streamed_layer(self, index: int) -> StreamedLayer:
        """All of a layer."""
        layer, prefix = self.layer(index), f"layers.{index}"
        assert isinstance(layer.mlp, ExpertLayer), f"layer {index} has an MLP, and no family with streams has one"
        around = self._streams(f"{prefix}.attn"), self._streams(f"{prefix}.mlp")
        return StreamedLayer(around[0], layer.attention, around[1], layer.mlp)

    def stream_head(self) -> StreamHead:
        """Behind the last layer."""
        mix = HeadMix(*(self.plain(f"head_streams.{name}") for name in MIX_NAMES))
        return StreamHead(mix, self._numbers, self._rms_norm("final_norm"))

    def _streams(self, prefix: str) -> HyperConnection:
        mix = StreamMix(*(self.plain(f"{prefix}_streams.{name}") for name in MIX_NAMES))
        return HyperConnection(mix, self._numbers, self._rms_norm(f"{prefix}_norm"))

    def _rms_norm(self, name: str) -> RMSNorm:
        return RMSNorm(self.plain(f"{name}.weight"), self._spec.norm_eps)

    def attention(self, index: int, prefix: str) -> CompressedAttentionLayer:
        compressed, eps, rotary = self._compressed, self._spec.norm_eps, self._rope.rotaries[index]
        assert rotary is not None, f"layer {index} rotates nothing"
        groups = (compressed.num_output_groups, compressed.output_rank, -1)
        compressor = compressed.compressors[index]
        return CompressedAttentionLayer(
            index,
            self.linear(f"{prefix}.qkv_a"),
            self.linear(f"{prefix}.q_b"),
            OutputGroups(self.plain(f"{prefix}.o_a.weight").view(groups), self.linear(f"{prefix}.o_b")),
            self._rms_norm(f"{prefix}.q_a_norm"),
            LatentNorm(self.plain(f"{prefix}.kv_norm.weight"), eps),
            self.plain(f"{prefix}.sinks"),
            None if compressor is None else self._entries(index, compressor, prefix),
            rotary,
            self._backend,
        )

    def _entries(self, layer: int, compressor: CompressorSpec, prefix: str) -> Entries:
        own, rotary = self._compressor(compressor, f"{prefix}.compressor"), self._rope.entries[layer]
        pool_XH, index = self.plain(f"{prefix}.pool.weight"), self._spec.layer_index(layer)
        assert rotary is not None, f"entries of layer {layer} are not rotated"
        if index is None:
            return Entries(pool_XH, own, rotary, None)
        keys = self._compressor(compressor, f"{prefix}.index")
        return Entries(pool_XH, own, rotary, EntryIndex(self.linear(f"{prefix}.index_q"), keys, index.num_heads))

    def _compressor(self, compressor: CompressorSpec, prefix: str) -> Compressor:
        positions_RX, weight_D = self.plain(f"{prefix}.positions"), self.plain(f"{prefix}.norm.weight")
        return Compressor(compressor.ratio, compressor.is_overlapped, positions_RX, weight_D, self._spec.norm_eps)


class CompressedDecoder(StepWorkspace):
    """The Model of models/model.py with streams. It holds references to its weights and no state of its own."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        backend: CompressedAttention[Any],
        rope: StepRope,
        workspace: Workspace,
        scratch: tuple[TensorSpec, ...],
        dtype: str | None = None,
        recipe: WeightRecipe = AS_STORED,
    ) -> None:
        """`dtype` is that of activations, None for the one of norms; `recipe` is how the weights were quantized."""
        assert spec.compressed is not None, f"{spec.architecture} does not compress"
        assert spec.streams is not None, f"{spec.architecture} has one stream"
        builder = CompressedLayerBuilder(spec, spec.compressed, spec.streams, weights, backend, rope)
        super().__init__(spec, workspace, dtype or norm_dtype(builder.plain("layers.0.attn_norm.weight")), recipe)
        self._rope = rope
        self._embed_VH = weights["embed.weight"]
        self._layers = [builder.streamed_layer(index) for index in range(spec.num_layers)]
        self._head = builder.stream_head()
        self._head_VH = weights["lm_head.weight" if not spec.tied_embeddings else "embed.weight"]
        self._requests: Callable[[int], CompressedRequests] = lru_cache(MAX_CACHED_SIZES)(
            partial(compressed_requests, spec, dtype=self._dtype, scratch=scratch, recipe=recipe)
        )

    @property
    def expert_layers(self) -> list[ExpertLayer]:
        """Sparse layers, from the first to the last: all."""
        return [layer.experts for layer in self._layers]

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    def step_logits(self, batch: Batch, plan: Any) -> torch.Tensor:  # noqa: ANN401 the backend's own type
        """float32 logits of the rows that are wanted: [R, V], valid until the workspace is used again."""
        return self.logits(self.hidden(batch, plan))

    def hidden(self, batch: Batch, plan: Any) -> torch.Tensor:  # noqa: ANN401 the backend's own type
        """Final hidden states of the rows whose logits are wanted: [R, H]."""
        return self.finish(self.run_layers(self.embed(batch), batch, plan, range(self.num_layers)))

    def embed(self, batch: Batch) -> Stream:
        """The first end: token embeddings, the same in every stream, and cos and sin of the step's rows for all layers."""
        self._rope.fill(batch.positions_T)
        held = self._acquire(self._requests(batch.num_rows).stream)
        x_TSH, normed_TH = held["x"], held["normed"]
        x_TSH.copy_(lookup_rows(batch.token_ids_T, self._embed_VH, normed_TH).unsqueeze(1).expand_as(x_TSH))
        return Stream(x_TSH, normed_TH, held["delta"], has_delta=False)

    def run_layers(
        self,
        stream: Stream,
        batch: Batch,
        plan: Any,  # noqa: ANN401 the backend's own type
        layers: range,
    ) -> Stream:
        """Some layers in a row. Behind the last one's attention only rows whose logits are wanted go on, normed for the head."""
        streams = StreamBuffers.of(self._acquire(self._requests(batch.num_rows).stream))
        (x_TSH, normed_TH, delta_TH, _), token_ids_T = stream, batch.token_ids_T
        self._layers[layers.start].attention_streams.begin(x_TSH, streams)
        for index in layers:
            if self.before_layer is not None:
                self.before_layer()
            layer, is_last = self._layers[index], index == self.num_layers - 1
            logits = batch.logits if is_last else None
            layer.attention_streams.enter(x_TSH, streams, normed_TH)
            delta_TH = self._attend(layer, normed_TH, batch, plan, delta_TH, logits is not None)
            num_rows = delta_TH.shape[0]
            if num_rows == 0:
                return Stream(normed_TH[:0], normed_TH[:0], delta_TH, has_delta=False)
            room = self._acquire(self._requests(num_rows).experts)
            if logits is not None:
                wanted = zip((x_TSH, streams.shares_TM, token_ids_T), WANTED, strict=True)
                x_TSH, shares_TM, token_ids_T = (
                    torch.index_select(whole, 0, logits.rows_R, out=room[name]) for whole, name in wanted
                )
                streams, normed_TH = StreamBuffers(shares_TM, streams.parts), normed_TH[:num_rows]
            layer.attention_streams.leave(x_TSH, delta_TH, streams, layer.expert_streams)
            layer.expert_streams.enter(x_TSH, streams, normed_TH)
            layer.experts(normed_TH, self._expert_buffers(room, num_rows), delta_TH, token_ids_T)
            following = self._layers[index + 1].attention_streams if index + 1 < layers.stop else None
            layer.expert_streams.leave(x_TSH, delta_TH, streams, following)
            if is_last:
                x_TSH = self._head(x_TSH, streams, normed_TH)
        return Stream(x_TSH, normed_TH, delta_TH, has_delta=False)

    def finish(self, stream: Stream) -> torch.Tensor:
        """The other end, up to the head: final hidden states of the rows that are left, which the last layer has normed."""
        return stream.x_TH

    def logits(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        """The head: float32 logits [R, V], valid until the workspace is used again."""
        head, quantized = self._head_buffers(hidden_RH.shape[0])
        return linear_float32(hidden_RH, self._head_VH, head["logits"], quantized)

    def _attend(
        self,
        layer: StreamedLayer,
        normed_TH: torch.Tensor,
        batch: Batch,
        plan: Any,  # noqa: ANN401 the backend's own type
        out_TH: torch.Tensor,
        wanted_only: bool,
    ) -> torch.Tensor:
        """What attention gives for all rows, or for those that are wanted."""
        requests = self._requests(batch.num_rows)
        buffers = CompressedBuffers.of(self._acquire(requests.attention), self._quantized(requests.codes))
        return layer.attention(normed_TH, batch, plan, buffers, out_TH, wanted_only)

    def _expert_buffers(self, room: Mapping[str, torch.Tensor], num_rows: int) -> ExpertBuffers:
        own = {name: tensor for name, tensor in room.items() if name not in WANTED}
        return ExpertBuffers.of(own, self._quantized(self._requests(num_rows).codes))
