"""Linear, norms and MLPs: the sums that they say they are, in tensors that are given, a row the same in any company."""

import pytest
import torch
import torch.nn.functional as F

from holdfast.kernels.gemm import linear as linear_module
from holdfast.kernels.gemm.quantize_activations import (
    QuantizedRows,
    TileScratch,
    quantize_rows,
    quantize_rows_reference,
)
from holdfast.layers.mlp import GatedMLP, LayerNorm, Linear, MLPBuffers, PlainMLP, RMSNorm
from holdfast.quant.quantized_weight import QuantizedWeight
from holdfast.quant.weight_schemes import FP8, INT8
from kernels.exactness import companies, num_threads, random, require_native, same_bits
from kernels.quantized_cases import codable_rows, exact_rows, exact_weight, random_weight, weight_on
from kernels.triton_cases import QUIET
from quant.whole_weights import quantize


@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "no bias"])
def test_linear_multiplies_rows_and_adds_bias(with_bias):
    weight, bias, x = random(5, 7), random(5, seed=1), random(3, 7, seed=2)
    layer = Linear(weight, bias) if with_bias else Linear(weight)
    out = torch.full((3, 5), float("nan"))
    assert layer(x, out) is out
    torch.testing.assert_close(out, x @ weight.T + (bias if with_bias else 0))


def test_linear_holds_the_weight_without_a_copy():
    weight, x = torch.zeros(2, 3), torch.ones(1, 3)
    layer = Linear(weight)
    assert layer.weight_NK is weight
    assert layer.bias_N is None
    weight.fill_(2)
    assert layer(x, torch.empty(1, 2)).tolist() == [[6, 6]]


def test_linear_writes_only_its_part_of_a_buffer():
    weight, x, buffer = random(5, 7), random(2, 7, seed=1), torch.full((4, 5), float("nan"))
    layer = Linear(weight)
    torch.testing.assert_close(layer(x, buffer[:2]), x @ weight.T)
    assert buffer[2:].isnan().all()


def test_linear_accepts_a_quantized_weight():
    """Rows are quantized in the room that is given, and nothing else is."""
    values, x = random(6, 40), random(3, 40, seed=1)
    for scheme in (FP8, INT8):
        weight = QuantizedWeight(scheme, (6, 40), *quantize(values, scheme))
        room = QuantizedRows(torch.zeros(4, 50).to(torch.float8_e4m3fn), torch.zeros(4, 1))
        layer = Linear(weight, torch.ones(6))
        y = layer(x, torch.full((3, 6), float("nan")), room)
        expected = exact_rows(x, scheme) @ exact_weight(weight).T + 1
        torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
        assert bool(room.scales_TB[:3].all()) == scheme.quantizes_activations
    with pytest.raises(AssertionError, match="fp8 needs buffers for the codes of 3 rows"):
        Linear(QuantizedWeight(FP8, (6, 40), *quantize(values, FP8)))(x, torch.empty(3, 6))


SIZES = (1, 3, 5, 63, 64, 100, 577)
KINDS = pytest.mark.parametrize("kind", ["rms", "layer"])
NAN = float("nan")


def make(kind, size, eps=1e-5):
    weight, bias = random(size, seed=1), random(size, seed=2)
    if kind == "rms":
        module, norm = torch.nn.RMSNorm(size, eps), RMSNorm(weight, eps)
    else:
        module, norm = torch.nn.LayerNorm(size, eps), LayerNorm(weight, bias, eps)
        module.bias.data = bias
    module.weight.data = weight
    return module, norm


@KINDS
@pytest.mark.parametrize("eps", [1e-5, 0.1])
def test_norm_layer_matches_torch(kind, eps):
    x = random(7, 20, scale=3) + 5
    module, norm = make(kind, 20, eps)
    before, out = x.clone(), torch.full((7, 20), NAN)
    assert norm(x, None, out) is out
    torch.testing.assert_close(out, module(x).detach())
    assert same_bits(x, before), "nothing is added where there is nothing"


@KINDS
def test_norm_layer_adds_delta_first_and_keeps_the_sum(kind):
    x, delta = random(7, 20), random(7, 20, seed=5)
    module, norm = make(kind, 20)
    summed, out = x + delta, torch.full((7, 20), NAN)
    assert norm(x, delta, out) is out
    assert same_bits(x, summed), "the sum goes on with the stream"
    torch.testing.assert_close(out, module(summed).detach())


@KINDS
def test_norm_layer_may_overwrite_the_stream(kind):
    """As where norms come last."""
    x, delta = random(7, 20), random(7, 20, seed=5)
    module, norm = make(kind, 20)
    expected = module(x + delta).detach()
    assert norm(x, delta, x) is x
    torch.testing.assert_close(x, expected)


@KINDS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_norm_layer_half_types_match_torch(kind, dtype):
    x, delta = random(7, 20).to(dtype), random(7, 20, seed=5).to(dtype)
    weight, bias = random(20, seed=1).to(dtype), random(20, seed=2).to(dtype)
    norm = RMSNorm(weight, 1e-5) if kind == "rms" else LayerNorm(weight, bias, 1e-5)
    _, exact = make(kind, 20)
    expected = exact((x + delta).float(), None, torch.empty(7, 20))
    out = norm(x, delta, torch.empty_like(x))
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), expected, rtol=0.02, atol=0.05)


def test_rms_norm_layer_exposes_weight_and_eps():
    """The fused decode path does this norm in the prologue of its products."""
    weight = random(20)
    norm = RMSNorm(weight, 0.5)
    assert norm.weight_H is weight
    assert norm.eps == 0.5


@pytest.mark.each_pair
@KINDS
@pytest.mark.parametrize("with_delta", [False, True], ids=["alone", "added"])
@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"H{size}")
def test_norm_layer_is_batch_invariant(kind, size, with_delta):
    require_native()
    x, delta = random(129, size), random(129, size, seed=5)
    _, norm = make(kind, size)

    def run(rows):
        return norm(x[rows].clone(), delta[rows] if with_delta else None, torch.empty(len(rows), size))

    alone = torch.cat([run([row]) for row in range(129)])
    for threads in (1, 2):
        with num_threads(threads):
            for rows in companies(129):
                assert same_bits(run(rows), alone[rows]), f"{threads=} {rows=}"


ACTIVATIONS = {
    "silu": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}
EACH = pytest.mark.parametrize("activation", ACTIVATIONS)
HIDDEN = 12


def weights(size):
    """gate, up and down, with a bias for each."""
    return [
        (random(rows, columns, seed=seed), random(rows, seed=seed + 9))
        for seed, (rows, columns) in enumerate([(size, HIDDEN), (size, HIDDEN), (HIDDEN, size)])
    ]


def make_mlp(kind, size, activation):
    (gate, gate_bias), (up, up_bias), down = weights(size)
    if kind == "gated":
        gate_up = Linear(torch.cat([gate, up]), torch.cat([gate_bias, up_bias]))
        return GatedMLP(gate_up, Linear(*down), activation)
    return PlainMLP(Linear(up, up_bias), Linear(*down), activation)


def run(mlp, x, size):
    """In memory that is NaN before it, as wide as the kind needs it."""
    num_rows, widths = len(x), (size * (2 if isinstance(mlp, GatedMLP) else 1), size, HIDDEN)
    wide, active, out = (x.new_full((num_rows, width), float("nan")) for width in widths)
    before = x.clone()
    assert mlp(x, MLPBuffers(wide, active), out) is out
    assert same_bits(x, before), "the input stays as it was"
    return out


@EACH
@pytest.mark.parametrize("size", [1, 5, 64])
def test_gated_mlp_matches_torch(activation, size):
    gate, up, down = weights(size)
    x = random(7, HIDDEN, seed=20)
    expected = F.linear(ACTIVATIONS[activation](F.linear(x, *gate)) * F.linear(x, *up), *down)
    torch.testing.assert_close(run(make_mlp("gated", size, activation), x, size), expected, rtol=1e-5, atol=1e-4)


@EACH
@pytest.mark.parametrize("size", [1, 5, 64])
def test_plain_mlp_matches_torch(activation, size):
    _, up, down = weights(size)
    x = random(7, HIDDEN, seed=20)
    expected = F.linear(ACTIVATIONS[activation](F.linear(x, *up)), *down)
    torch.testing.assert_close(run(make_mlp("plain", size, activation), x, size), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.each_pair
@EACH
@pytest.mark.parametrize("kind", ["gated", "plain"])
@pytest.mark.parametrize("size", [1, 5, 64, 100, 577], ids=lambda size: f"I{size}")
def test_mlp_is_batch_invariant(activation, kind, size):
    require_native()
    mlp, x = make_mlp(kind, size, activation), random(65, HIDDEN, seed=20, scale=2)
    alone = torch.cat([run(mlp, x[row : row + 1], size) for row in range(65)])
    for threads in (1, 2):
        with num_threads(threads):
            for rows in companies(65):
                assert same_bits(run(mlp, x[rows], size), alone[rows]), f"{threads=} {rows=}"


@EACH
@pytest.mark.parametrize("kind", ["gated", "plain"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_mlp_half_types_are_exact(activation, kind, dtype):
    (gate, gate_bias), (up, up_bias), (down, down_bias) = weights(16)
    fused = [tensor.to(dtype) for tensor in (torch.cat([gate, up]), torch.cat([gate_bias, up_bias]))]
    first = Linear(*fused) if kind == "gated" else Linear(up.to(dtype), up_bias.to(dtype))
    second = Linear(down.to(dtype), down_bias.to(dtype))
    mlp = GatedMLP(first, second, activation) if kind == "gated" else PlainMLP(first, second, activation)
    x = random(3, HIDDEN, seed=20).to(dtype)
    y = run(mlp, x, 16)
    assert y.dtype == dtype

    def product(rows, layer):
        return (rows.double() @ layer.weight_NK.double().T + layer.bias_N.double()).to(dtype)

    wide = product(x, first).double()
    active = ACTIVATIONS[activation](wide[:, :16]) * (wide[:, 16:] if kind == "gated" else 1)
    expected = product(active.to(dtype), second).double()
    # Every number between is rounded to the type, and may be rounded the other way: by a unit in its last place.
    reach = active.abs() @ second.weight_NK.double().abs().T + expected.abs()
    assert ((y.double() - expected).abs() <= torch.finfo(dtype).eps * reach).all()


def test_mlp_buffers_serve_successive_layers():
    """What a layer left in them does not reach the next."""
    x = random(7, HIDDEN, seed=20)
    buffers = MLPBuffers(torch.full((7, 10), float("nan")), torch.full((7, 5), float("nan")))
    gated = make_mlp("gated", 5, "silu")
    expected = run(gated, x, 5)
    for _ in range(2):
        assert same_bits(gated(x, buffers, torch.empty(7, HIDDEN)), expected)


@pytest.mark.parametrize("kind", ["gated", "plain"])
@pytest.mark.parametrize("activation", ["silu", "relu"])
def test_mlp_gives_code_buffers_to_both_products(kind, activation):
    mlp, x, seen = make_mlp(kind, 5, activation), random(2, HIDDEN), []
    room = QuantizedRows(torch.empty(2, 64).to(torch.float8_e4m3fn), torch.empty(2, 1))

    class Watched(Linear):
        def __call__(self, x_TK, out_TN, quantized=None, is_coded=False):
            seen.append((quantized, is_coded))
            return super().__call__(x_TK, out_TN, quantized, is_coded)

    first, second = ("gate_up", "down") if kind == "gated" else ("first", "_down")
    for name in (first, second):
        product = getattr(mlp, name)
        setattr(mlp, name, Watched(product.weight_NK, product.bias_N))
    wide, active = torch.empty(2, 10 if kind == "gated" else 5), torch.empty(2, 5)
    mlp(x, MLPBuffers(wide, active, room), torch.empty(2, HIDDEN))
    mlp(x, MLPBuffers(wide, active, room), torch.empty(2, HIDDEN), is_coded=True)
    assert seen == [(room, False), (room, False), (room, True), (room, False)]


def test_gated_mlp_exposes_its_weights():
    """The fused decode path computes these products itself."""
    mlp = make_mlp("gated", 5, "silu")
    assert mlp.gate_up.weight_NK.shape == (10, HIDDEN)
    assert mlp.down.weight_NK.shape == (HIDDEN, 5)


@KINDS
@pytest.mark.parametrize("has_delta", [False, True], ids=["x", "x and delta"])
def test_norm_layer_leaves_codes_of_stored_rows(kind, has_delta):
    x, delta, weight, bias = random(5, 96), random(5, 96, seed=1), random(96, seed=2), random(96, seed=3)
    norm = RMSNorm(weight, 1e-5, offset=1.0) if kind == "rms" else LayerNorm(weight, bias, 1e-5)
    room, host = (QuantizedRows(torch.zeros(5, 96).to(torch.float8_e4m3fn), torch.full((5, 1), NAN)) for _ in range(2))
    out = torch.full((5, 96), NAN)
    assert norm(x.clone(), delta if has_delta else None, out, room) is out
    assert same_bits(out, norm(x.clone(), delta if has_delta else None, torch.empty(5, 96)))
    quantize_rows_reference(out, host)
    assert torch.equal(room.codes_TK.view(torch.uint8), host.codes_TK.view(torch.uint8))
    assert same_bits(room.scales_TB, host.scales_TB)


def fp8_mlp(activation, device, dtype, limit: float | None = None) -> GatedMLP:
    """For 200 columns inside and 96 outside, with biases."""
    linears = []
    for index, (size_n, size_k) in enumerate(((400, 96), (96, 200))):
        weight = random_weight(size_n, size_k, FP8, seed=index)
        linears.append(Linear(weight_on(weight, device), random(size_n, seed=index + 5).to(device, dtype)))
    return GatedMLP(*linears, activation, limit)


@pytest.mark.parametrize("limit", [None, 0.3])
def test_gated_mlp_codes_are_of_the_bounded_gate(limit):
    mlp = fp8_mlp("silu", torch.device("cpu"), torch.float32, limit)
    x, room = random(5, 96), QuantizedRows(torch.zeros(1000).to(torch.float8_e4m3fn), torch.zeros(5))
    buffers = MLPBuffers(torch.empty(5, 400), torch.empty(5, 200), room)
    found = mlp(x, buffers, torch.empty(5, 96))
    gate, up = mlp.gate_up(x, torch.empty(5, 400), room).chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    expected = mlp.down(F.silu(gate) * up, torch.empty(5, 96), room)
    assert (found - expected).norm() < 0.01 * expected.norm()


@pytest.mark.each_value
@QUIET
@pytest.mark.parametrize("is_coded", [False, True])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated_mlp_epilogue_gate_matches_separate_gate(device, monkeypatch, activation, is_coded):
    """Up to 64 rows if there is scratch and no limit; what stands between is then never written."""
    monkeypatch.setattr(linear_module, "can_run", lambda tensor: True)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    cases = [(1, True, None), (20, True, None), (64, True, None), (65, True, None), (20, False, None), (20, True, 0.5)]
    for num_rows, has_scratch, limit in cases:
        mlp, on_cpu = (fp8_mlp(activation, place, dtype, limit) for place in (device, torch.device("cpu")))
        x = codable_rows(num_rows, 96).to(dtype)
        codes = torch.zeros(num_rows * 200, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
        arrived, amax = (torch.zeros(count, dtype=torch.int32, device=device) for count in (8, 64 * 4))
        scratch = TileScratch(torch.zeros(128 * 4096, device=device), arrived, amax) if has_scratch else None
        room = QuantizedRows(codes, torch.zeros(num_rows, device=device), scratch)
        wide, active = (torch.full((num_rows, width), NAN, device=device, dtype=dtype) for width in (400, 200))
        if is_coded:
            quantize_rows(x.to(device), mlp.first.room_for_codes(room, num_rows))
        out = torch.full((num_rows, 96), NAN, device=device, dtype=dtype)
        assert mlp(x.to(device), MLPBuffers(wide, active, room), out, is_coded) is out
        assert bool(wide.isnan().all()) == (has_scratch and num_rows <= 64 and limit is None)
        with monkeypatch.context() as patch:
            patch.setattr(linear_module, "can_run", lambda tensor: False)
            host = QuantizedRows(torch.zeros(num_rows * 200).to(torch.float8_e4m3fn), torch.zeros(num_rows))
            buffers = MLPBuffers(torch.empty(num_rows, 400, dtype=dtype), torch.empty(num_rows, 200, dtype=dtype), host)
            expected = on_cpu(x, buffers, torch.empty(num_rows, 96, dtype=dtype)).float()
        error = (out.cpu().float() - expected).norm() / expected.norm()
        assert error < 0.02, f"{num_rows} rows: {error}"
