import pytest
import torch
import torch.nn.functional as F

from holdfast.kernels.gemm.quantize_activations import CodedRows
from holdfast.layers.mlp import GatedMLP, Linear, MLPBuffers, PlainMLP
from kernels.exactness import companies, num_threads, random, require_native, same_bits

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


def make(kind, size, activation):
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
def test_gated(activation, size):
    gate, up, down = weights(size)
    x = random(7, HIDDEN, seed=20)
    expected = F.linear(ACTIVATIONS[activation](F.linear(x, *gate)) * F.linear(x, *up), *down)
    torch.testing.assert_close(run(make("gated", size, activation), x, size), expected, rtol=1e-5, atol=1e-4)


@EACH
@pytest.mark.parametrize("size", [1, 5, 64])
def test_plain(activation, size):
    _, up, down = weights(size)
    x = random(7, HIDDEN, seed=20)
    expected = F.linear(ACTIVATIONS[activation](F.linear(x, *up)), *down)
    torch.testing.assert_close(run(make("plain", size, activation), x, size), expected, rtol=1e-5, atol=1e-4)


@EACH
@pytest.mark.parametrize("kind", ["gated", "plain"])
@pytest.mark.parametrize("size", [1, 5, 64, 100, 577], ids=lambda size: f"I{size}")
def test_a_row_is_the_same_to_the_bit_in_any_company(activation, kind, size):
    require_native()
    mlp, x = make(kind, size, activation), random(65, HIDDEN, seed=20, scale=2)
    alone = torch.cat([run(mlp, x[row : row + 1], size) for row in range(65)])
    for threads in (1, 2):
        with num_threads(threads):
            for rows in companies(65):
                assert same_bits(run(mlp, x[rows], size), alone[rows]), f"{threads=} {rows=}"


@EACH
@pytest.mark.parametrize("kind", ["gated", "plain"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types(activation, kind, dtype):
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


def test_one_set_of_buffers_serves_layers_one_after_the_other():
    """What a layer left in them does not reach the next."""
    x = random(7, HIDDEN, seed=20)
    buffers = MLPBuffers(torch.full((7, 10), float("nan")), torch.full((7, 5), float("nan")))
    gated = make("gated", 5, "silu")
    expected = run(gated, x, 5)
    for _ in range(2):
        assert same_bits(gated(x, buffers, torch.empty(7, HIDDEN)), expected)


@pytest.mark.parametrize("kind", ["gated", "plain"])
@pytest.mark.parametrize("activation", ["silu", "relu"])
def test_both_products_get_the_room_for_codes(kind, activation):
    mlp, x, seen = make(kind, 5, activation), random(2, HIDDEN), []
    room = CodedRows(torch.empty(2, 64).to(torch.float8_e4m3fn), torch.empty(2, 1))

    class Watched(Linear):
        def __call__(self, x_TK, out_TN, coded=None):
            seen.append(coded)
            return super().__call__(x_TK, out_TN, coded)

    first, second = ("gate_up", "down") if kind == "gated" else ("_up", "_down")
    for name in (first, second):
        product = getattr(mlp, name)
        setattr(mlp, name, Watched(product.weight_NK, product.bias_N))
    wide, active = torch.empty(2, 10 if kind == "gated" else 5), torch.empty(2, 5)
    mlp(x, MLPBuffers(wide, active, room), torch.empty(2, HIDDEN))
    assert seen == [room, room]


def test_the_gated_weights_are_within_reach():
    """Steps of few rows compute these products themselves."""
    mlp = make("gated", 5, "silu")
    assert mlp.gate_up.weight_NK.shape == (10, HIDDEN)
    assert mlp.down.weight_NK.shape == (HIDDEN, 5)
