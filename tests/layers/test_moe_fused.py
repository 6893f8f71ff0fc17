"""The expert layer on the fused decode path: kernels beside their references, against the ordinary way, and what is launched.

Kernels run on a GPU or in the interpreter; the references and the ordinary way run in plain torch.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from holdfast.kernels import operation
from holdfast.kernels.activation import SILU_HALVES, GateForm
from holdfast.kernels.gemm.deferred_rms_norm import (
    AmaxScratch,
    ResidualStream,
    SmallBatchScratch,
    defer_rms_norm_reference,
)
from holdfast.kernels.gemm.quantize_activations import QuantizedRows
from holdfast.kernels.geometry import FUSED_DECODE_ROWS, NUM_GATE_AMAX, SPLIT_K_COLUMNS, order_specs
from holdfast.kernels.moe.routing import Routing
from holdfast.layers.mlp import RMSNorm
from holdfast.layers.moe import ExpertBiases, ExpertBuffers, ExpertLayer
from holdfast.quant.quantized_weight import QuantizedWeight
from kernels.exactness import random, same_bits
from kernels.expert_cases import CPU, quantized
from kernels.quantized_cases import weight_on, widest_on
from kernels.tiled_cases import NAN
from kernels.triton_cases import QUIET

pytestmark = [QUIET, pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")]

HIDDEN, INNER, NUM_EXPERTS, TOP_K, EPS = 64, 32, 4, 2, 1e-5
GPT_OSS = GateForm(is_interleaved=True, limit=1.5)
SCHEMES = pytest.mark.parametrize("scheme", [None, "fp8", "int8", "mxfp4", "fp8_block"], ids=str)
ROWS = pytest.mark.parametrize("num_rows", [1, 3, 6], ids=lambda count: f"{count} rows")


@contextmanager
def kernels_everywhere() -> Iterator[None]:
    """Kernels are launched wherever tensors lie: on a CPU the interpreter runs them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operation, "can_run", lambda tensor: True)
        yield


def make_layer(scheme: str | None, dtype: torch.dtype, device: torch.device, form: GateForm = SILU_HALVES):
    """The layer, with biases where it is that of gpt-oss, and the norm that follows."""
    sizes = ((NUM_EXPERTS, 2 * INNER, HIDDEN), (NUM_EXPERTS, HIDDEN, INNER))
    weights = [random(*size, seed=index, scale=size[2] ** -0.5).to(dtype) for index, size in enumerate(sizes)]
    stored: list[torch.Tensor | QuantizedWeight] = [weight.to(device) for weight in weights]
    if scheme is not None:
        parts = (2 * INNER if form.is_interleaved else INNER, HIDDEN)
        made = [quantized(weight, scheme, part) for weight, part in zip(weights, parts, strict=True)]
        stored = [weight_on(weight, device) for weight in made]
    shapes = ((NUM_EXPERTS,), (NUM_EXPERTS, 2 * INNER), (NUM_EXPERTS, HIDDEN))
    biases = [random(*shape, seed=5 + index).to(device, dtype) for index, shape in enumerate(shapes)]
    router = random(NUM_EXPERTS, HIDDEN, seed=3, scale=3 * HIDDEN**-0.5).to(device, dtype)
    given = ExpertBiases(*biases) if form is GPT_OSS else ExpertBiases()
    norm = RMSNorm((1 + 0.3 * random(HIDDEN, seed=9)).to(device, dtype), EPS)
    return ExpertLayer(router, *stored, Routing(True), None, given, form), norm


def make_buffers(num_rows: int, dtype: torch.dtype, device: torch.device) -> ExpertBuffers:
    specs, num_pairs = order_specs(num_rows, TOP_K, NUM_EXPERTS), num_rows * TOP_K
    codes = torch.full((num_pairs * HIDDEN,), 0x7F, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    return ExpertBuffers(
        torch.full((num_rows, NUM_EXPERTS), NAN, device=device),
        torch.full((num_rows, TOP_K), -7, dtype=torch.int32, device=device),
        torch.full((num_rows, TOP_K), NAN, device=device),
        torch.full((num_pairs, INNER), NAN, dtype=dtype, device=device),
        torch.full((num_pairs, HIDDEN), NAN, dtype=dtype, device=device),
        tuple(torch.full(spec.shape, -7, dtype=torch.int32, device=device) for spec in specs),
        quantized=QuantizedRows(codes, torch.full((2 * num_pairs,), NAN, device=device)),
    )


def make_scratch(device: torch.device, has_amax: bool) -> SmallBatchScratch:
    places = FUSED_DECODE_ROWS * HIDDEN // 2
    squares, amax, parts = (
        torch.full((count,), NAN, device=device) for count in (places, places, 16 * SPLIT_K_COLUMNS)
    )
    gated = torch.zeros(FUSED_DECODE_ROWS * NUM_GATE_AMAX, dtype=torch.int32, device=device)
    arrived = torch.zeros(64, dtype=torch.int32, device=device)
    return SmallBatchScratch(squares, parts, arrived, AmaxScratch(amax, amax, gated) if has_amax else None)


def run(x_TH: torch.Tensor, scheme: str | None, device: torch.device, form: GateForm = SILU_HALVES):
    """x and the norm of it behind the layer."""
    layer, norm = make_layer(scheme, x_TH.dtype, device, form)
    x, scratch = x_TH.to(device, copy=True), make_scratch(device, has_amax=scheme in ("fp8", "int8"))
    scaled, finished = torch.full_like(x, NAN), torch.full_like(x, NAN)
    ones = torch.ones(HIDDEN, dtype=x.dtype, device=device)
    rows = defer_rms_norm_reference(ResidualStream(x, ones, EPS, scaled, scratch))
    rows = layer.add_normed(rows, make_buffers(len(x), x.dtype, device), finished, norm.defer(x, scaled, scratch))
    squares = scratch.squares[: len(x) * rows.num_squares].view(len(x), rows.num_squares)
    assert not scratch.arrived.any(), "counters are zeros between launches"
    normed = rows.scaled_MK.float() * (squares.sum(-1, keepdim=True) / HIDDEN + rows.eps).rsqrt()
    return x.cpu(), normed.cpu()


def inputs(num_rows: int, dtype: torch.dtype) -> torch.Tensor:
    return random(num_rows, HIDDEN, seed=20).to(dtype)


@pytest.mark.each_value
@SCHEMES
@ROWS
@pytest.mark.parametrize("form", [SILU_HALVES, GPT_OSS], ids=["halves", "gpt-oss"])
def test_fused_experts_kernels_match_references(device, scheme, num_rows, form):
    x = inputs(num_rows, widest_on(device))
    expected = run(x, scheme, CPU, form)
    with kernels_everywhere():
        found = run(x, scheme, device, form)
    # A number between two codes may go to either: one step of e4m3 in one of the inputs.
    tolerance = {"cpu": 1e-4, "cuda": 3e-2}[device.type] if scheme not in ("fp8", "fp8_block") else 3e-2
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.isfinite().all()
        torch.testing.assert_close(mine.float(), theirs.float(), rtol=tolerance, atol=tolerance)


@SCHEMES
@ROWS
def test_fused_experts_match_norm_layer_and_sum(scheme, num_rows):
    """The norm, the layer, and the sum with the residual, one after the other."""
    x = inputs(num_rows, torch.float32)
    found, _ = run(x, scheme, CPU)
    layer, _ = make_layer(scheme, x.dtype, CPU)
    normed = x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt()
    out = layer(normed, make_buffers(num_rows, x.dtype, CPU), torch.full_like(x, NAN))
    torch.testing.assert_close(found, x + out, rtol=1e-2 if scheme and "fp8" in scheme else 1e-4, atol=1e-2)


@pytest.mark.each_value
@pytest.mark.parametrize("scheme", [None, "fp8", "int8"], ids=str)
@pytest.mark.parametrize("num_rows", [4, 7], ids=["deep GEMVs", "unsorted blocks"])
def test_fused_experts_are_batch_invariant(device, scheme, num_rows):
    """For as many rows as take the same kernels."""
    x = inputs(num_rows, widest_on(device))
    with kernels_everywhere():
        whole = run(x, scheme, device)
        fewer = [1, 2] if num_rows == 4 else [6, 2, 3, 0, 1]
        for rows in ([*range(num_rows)][::-1], fewer):
            for mine, theirs in zip(run(x[rows], scheme, device), whole, strict=True):
                assert same_bits(mine, theirs[rows]), f"{rows=}"


def test_fused_decode_declines_experts_from_a_table():
    from holdfast.models.decoder_layer import DecoderLayer
    from holdfast.models.fused_decode import declined

    layer, norm = make_layer(None, torch.float32, CPU)[:2]
    table = torch.zeros(9, TOP_K, dtype=torch.int32)
    by_table = ExpertLayer(layer.router_EH, layer.gate_up, layer.down, Routing(), None, table_VS=table)
    parts = DecoderLayer(norm, None, norm, by_table)  # type: ignore[type-var] attention is not looked at
    assert "from a table by token id" in str(declined([parts], torch.empty(1)))
    with pytest.raises(AssertionError, match="has no token ids"):
        by_table.add_normed(None, None, None, None)
