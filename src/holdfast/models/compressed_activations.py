"""The tensors that a step of a decoder with compressed attention and streams passes through, as workspace requests; no torch.

stream       lives through all layers:   S streams, the row that a half layer takes, what it gives, and how streams are mixed
layers       takes turns:                attention of a layer, then its experts, and after the last layer logits

T rows, S streams, H hidden; rows whose logits are wanted have their streams beside the last layer's experts, which need less
than attention does.
"""

from typing import NamedTuple

from holdfast.kernels.stream_geometry import num_shares, stream_specs
from holdfast.memory.workspace_plan import TensorSpec
from holdfast.models.activations import STREAM, Request, attention_request, experts_request, quantized_rows_request
from holdfast.models.spec import ModelSpec, StreamsSpec
from holdfast.quant.weight_schemes import WeightRecipe

WANTED = ("wanted", "wanted_shares", "wanted_ids")
"""Streams, shares and token ids of the rows that go on behind the last attention."""


class CompressedRequests(NamedTuple):
    """What a step of some rows asks of the workspace."""

    stream: Request
    attention: Request
    experts: Request
    codes: Request


def compressed_requests(
    spec: ModelSpec, num_rows: int, dtype: str, scratch: tuple[TensorSpec, ...], recipe: WeightRecipe
) -> CompressedRequests:
    """All of them: a plan reserves those of the largest step, and every step acquires its own by the same names."""
    assert spec.streams is not None, f"{spec.architecture} has one stream"
    return CompressedRequests(
        streams_request(spec.streams, spec.hidden_size, num_rows, dtype),
        attention_request(spec, num_rows, dtype, scratch),
        streamed_experts_request(spec, spec.streams, num_rows, dtype),
        quantized_rows_request(spec, num_rows, 0, recipe),
    )


def streams_request(streams: StreamsSpec, hidden_size: int, num_rows: int, dtype: str) -> Request:
    """The residual streams, two rows beside them, the shares of one half of a layer and what they are made of."""
    specs = (
        TensorSpec("x", (num_rows, streams.num_streams, hidden_size), dtype),
        TensorSpec("normed", (num_rows, hidden_size), dtype),
        TensorSpec("delta", (num_rows, hidden_size), dtype),
        *stream_specs(num_rows, streams.num_streams),
    )
    return Request(STREAM, "stream", specs)


def streamed_experts_request(spec: ModelSpec, streams: StreamsSpec, num_rows: int, dtype: str) -> Request:
    """One layer's experts, and what is kept of the rows that are left behind the last attention."""
    assert spec.experts is not None, f"{spec.architecture} has no experts"
    wanted = (
        TensorSpec(WANTED[0], (num_rows, streams.num_streams, spec.hidden_size), dtype),
        TensorSpec(WANTED[1], (num_rows, num_shares(streams.num_streams)), "float32"),
        TensorSpec(WANTED[2], (num_rows,), "int64"),
    )
    own = experts_request(spec.experts, spec.hidden_size, num_rows, dtype)
    return Request(own.lane, own.owner, (*wanted, *own.specs))
