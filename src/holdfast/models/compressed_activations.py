"""Workspace requests for the tensors of a step with compressed attention and residual streams; no torch.

stream       lives through all layers:   S streams, the input row of a half layer, its output, and mixing coefficients
layers       takes turns:                attention of a layer, then its experts, and after the last layer logits

T rows, S streams, H hidden. Streams of rows whose logits are wanted live beside the last layer's experts, which need
less than attention does.
"""

from dataclasses import replace
from typing import NamedTuple

from holdfast.kernels.stream_geometry import num_shares, stream_specs
from holdfast.memory.workspace_plan import TensorSpec
from holdfast.models.activations import STREAM, Request, attention_request, experts_request, quantized_rows_request
from holdfast.models.spec import ModelSpec
from holdfast.quant.weight_schemes import WeightRecipe

WANTED = ("wanted", "wanted_shares", "wanted_ids")
"""Streams, shares and token ids of the rows that continue after the last attention."""


class CompressedRequests(NamedTuple):
    """Workspace requests of a step."""

    stream: Request
    attention: Request
    experts: Request
    codes: Request


def compressed_requests(
    spec: ModelSpec, num_rows: int, dtype: str, scratch: tuple[TensorSpec, ...], recipe: WeightRecipe
) -> CompressedRequests:
    """List all requests. A plan reserves those of the largest step; every step acquires its own by the same names."""
    streams, experts, hidden_size = spec.streams, spec.experts, spec.hidden_size
    assert streams is not None, f"{spec.architecture} has one stream"
    assert experts is not None, f"{spec.architecture} has no experts"
    streams_shape = num_rows, streams.num_streams, hidden_size
    stream = (
        TensorSpec("x", streams_shape, dtype),
        TensorSpec("normed", (num_rows, hidden_size), dtype),
        TensorSpec("delta", (num_rows, hidden_size), dtype),
        *stream_specs(num_rows, streams.num_streams),
    )
    wanted = (
        TensorSpec(WANTED[0], streams_shape, dtype),
        TensorSpec(WANTED[1], (num_rows, num_shares(streams.num_streams)), "float32"),
        TensorSpec(WANTED[2], (num_rows,), "int64"),
    )
    own = experts_request(experts, hidden_size, num_rows, dtype)
    return CompressedRequests(
        Request(STREAM, "stream", stream),
        attention_request(spec, num_rows, dtype, scratch),
        replace(own, specs=(*wanted, *own.specs)),
        quantized_rows_request(spec, num_rows, 0, recipe),
    )
