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
    RowAmax,
    SmallBatchScratch,
    defer_rms_norm_reference,
)
from holdfast.kernels.gemm.quantize_activations import QuantizedRows
from holdfast.kernels.geometry import FUSED_DECODE_ROWS, NUM_GATE_AMAX, SPLIT_K_COLUMNS, order_specs
from holdfast.kernels.moe.routing import Routing
from holdfast.layers.mlp import GatedMLP, Linear, MLPBuffers, RMSNorm
from holdfast.layers.moe import ExpertBiases, ExpertBuffers, ExpertLayer, SharedExpert
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


def make_shared(scheme: str | None, dtype: torch.dtype, device: torch.device, inner: int, is_gated: bool):
    """A shared expert of this width."""
    products = []
    for seed, size in ((30, (2 * inner, HIDDEN)), (31, (HIDDEN, inner))):
        weight = random(*size, seed=seed, scale=size[1] ** -0.5).to(dtype)
        if scheme is None:
            products.append(Linear(weight.to(device)))
            continue
        made = quantized(weight[None], scheme, size[0])
        made = QuantizedWeight(made.scheme, size, made.codes[0], made.scales[0])
        products.append(Linear(weight_on(made, device)))
    gate_1H = random(1, HIDDEN, seed=32, scale=HIDDEN**-0.5).to(device, dtype) if is_gated else None
    return SharedExpert(GatedMLP(*products, "silu"), gate_1H)


def make_layer(
    scheme: str | None,
    dtype: torch.dtype,
    device: torch.device,
    form: GateForm = SILU_HALVES,
    shared: tuple[int, bool] | None = None,
):
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
    own = None if shared is None else make_shared(scheme, dtype, device, *shared)
    return ExpertLayer(router, *stored, Routing(True), own, given, form), norm


def make_buffers(num_rows: int, dtype: torch.dtype, device: torch.device, shared: int = 0) -> ExpertBuffers:
    specs, num_pairs = order_specs(num_rows, TOP_K, NUM_EXPERTS), num_rows * TOP_K
    sizes = (2 * shared, shared, HIDDEN)
    wide, active, own = (torch.full((num_rows, size), NAN, dtype=dtype, device=device) for size in sizes)
    codes = torch.full((num_pairs * HIDDEN,), 0x7F, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    return ExpertBuffers(
        torch.full((num_rows, NUM_EXPERTS), NAN, device=device),
        torch.full((num_rows, TOP_K), -7, dtype=torch.int32, device=device),
        torch.full((num_rows, TOP_K), NAN, device=device),
        torch.full((num_pairs, INNER), NAN, dtype=dtype, device=device),
        torch.full((num_pairs, HIDDEN), NAN, dtype=dtype, device=device),
        tuple(torch.full(spec.shape, -7, dtype=torch.int32, device=device) for spec in specs),
        MLPBuffers(wide, active) if shared else None,
        own if shared else None,
        torch.full((num_rows, 1), NAN, device=device) if shared else None,
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


def run(
    x_TH: torch.Tensor,
    scheme: str | None,
    device: torch.device,
    form: GateForm = SILU_HALVES,
    shared: tuple[int, bool] | None = None,
):
    """x and the norm of it behind the layer."""
    layer, norm = make_layer(scheme, x_TH.dtype, device, form, shared)
    x, scratch = x_TH.to(device, copy=True), make_scratch(device, has_amax=scheme in ("fp8", "int8"))
    scaled, finished = torch.full_like(x, NAN), torch.full_like(x, NAN)
    ones = torch.ones(HIDDEN, dtype=x.dtype, device=device)
    rows = defer_rms_norm_reference(ResidualStream(x, ones, EPS, scaled, scratch))
    buffers = make_buffers(len(x), x.dtype, device, shared[0] if shared else 0)
    amax = None if scratch.amax is None else RowAmax(scratch.amax.gated, NUM_GATE_AMAX)
    rows = layer.add_normed(rows, buffers, finished, norm.defer(x, scaled, scratch), amax)
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


SHARED = pytest.mark.parametrize(
    "shared", [(INNER, True), (INNER, False), (48, True)], ids=["as wide", "as wide, no gate", "wider"]
)


@SHARED
@pytest.mark.parametrize("scheme", [None, "fp8", "int8"], ids=str)
@pytest.mark.parametrize("num_rows", [1, 3], ids=lambda count: f"{count} rows")
def test_fused_experts_with_shared_expert_match_norm_and_layer(device, scheme, num_rows, shared):
    """One row takes a shared expert as wide as others in their launches. Kernels match plain torch of the whole layer."""
    x = inputs(num_rows, torch.float32 if device.type == "cpu" else torch.bfloat16)
    with kernels_everywhere():
        found, after = run(x, scheme, device, shared=shared)
    x = x.float()
    layer, norm = make_layer(scheme, x.dtype, CPU, shared=shared)
    normed = x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt()
    buffers = make_buffers(num_rows, x.dtype, CPU, shared[0])
    own = MLPBuffers(buffers.shared.wide_TX, buffers.shared.active_TI, buffers.quantized)
    wanted = x + layer(normed, buffers._replace(shared=own), torch.full_like(x, NAN))
    tolerance = 5e-2 if device.type == "cuda" else 1e-2 if scheme == "fp8" else 1e-4
    torch.testing.assert_close(found.float(), wanted, rtol=tolerance, atol=tolerance)
    expected = torch.full_like(wanted, NAN)
    norm(wanted, None, expected)
    torch.testing.assert_close(after.float(), expected, rtol=tolerance, atol=2 * tolerance)
    without, _ = run(x.to(found.dtype), scheme, CPU)
    assert (without.float() - wanted).abs().max() > 0.1, "the shared expert adds nothing"


def test_fused_experts_shared_expert_needs_cleared_amax():
    """An e4m3 gate raises amax; int8 has none. A limit on the gate is not what these products compute."""
    cleared = RowAmax(torch.zeros(NUM_GATE_AMAX, dtype=torch.int32), NUM_GATE_AMAX)
    with_amax, without = (make_scratch(CPU, has_amax) for has_amax in (True, False))
    for scheme, wanted in ((None, (True,) * 3), ("int8", (True, True, False)), ("fp8", (True, False, False))):
        shared = make_shared(scheme, torch.float32, CPU, INNER, True)
        given = ((with_amax, cleared), (with_amax, None), (without, None))
        assert tuple(shared.takes_normed(*one) for one in given) == wanted, scheme
        shared.mlp.limit = 7.0
        assert not shared.takes_normed(with_amax, cleared)
    for scheme in ("mxfp4", "fp8_block"):
        assert not make_shared(scheme, torch.float32, CPU, INNER, True).takes_normed(with_amax, cleared)
    mixed = make_shared("fp8", torch.float32, CPU, INNER, True)
    mixed.mlp.down = make_shared("int8", torch.float32, CPU, INNER, True).mlp.down
    assert not mixed.takes_normed(with_amax, cleared), "codes of two kinds"


def test_fused_experts_shared_expert_joins_the_others_in_one_row(device, monkeypatch):
    """One product of nine pairs, in place of products of its own."""
    from holdfast.layers import moe

    launched = []
    for name in ("expert_row_linear", "expert_linear", "normed_linear"):
        own = getattr(moe, name)
        monkeypatch.setattr(moe, name, lambda *given, own=own, name=name: launched.append(name) or own(*given))
    with kernels_everywhere():
        for num_rows, width in ((1, INNER), (3, INNER), (1, 48)):
            run(inputs(num_rows, torch.float32), None, device, shared=(width, True))
    apart = ["normed_linear", "expert_linear", "expert_linear"]
    assert launched == ["expert_row_linear", *apart, *apart]


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
