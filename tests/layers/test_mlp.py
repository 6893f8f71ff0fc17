import pytest
import torch
import torch.nn.functional as F

from holdfast.layers.linear import Linear
from holdfast.layers.mlp import GateBuffers, GatedMLP, PlainMLP
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
        buffers = GateBuffers(torch.full((65, 2 * size), float("nan")), torch.full((65, size), float("nan")))
        gate_up = Linear(torch.cat([gate, up]), torch.cat([gate_bias, up_bias]))
        return GatedMLP(gate_up, Linear(*down), activation, buffers)
    return PlainMLP(Linear(up, up_bias), Linear(*down), activation)


@EACH
@pytest.mark.parametrize("size", [1, 5, 64])
def test_gated(activation, size):
    gate, up, down = weights(size)
    x = random(7, HIDDEN, seed=20)
    expected = F.linear(ACTIVATIONS[activation](F.linear(x, *gate)) * F.linear(x, *up), *down)
    torch.testing.assert_close(make("gated", size, activation)(x), expected, rtol=1e-5, atol=1e-4)


@EACH
@pytest.mark.parametrize("size", [1, 5, 64])
def test_plain(activation, size):
    _, up, down = weights(size)
    x = random(7, HIDDEN, seed=20)
    expected = F.linear(ACTIVATIONS[activation](F.linear(x, *up)), *down)
    torch.testing.assert_close(make("plain", size, activation)(x), expected, rtol=1e-5, atol=1e-4)


@EACH
@pytest.mark.parametrize("kind", ["gated", "plain"])
@pytest.mark.parametrize("size", [1, 5, 64, 100, 577], ids=lambda size: f"I{size}")
def test_a_row_is_the_same_to_the_bit_in_any_company(activation, kind, size):
    require_native()
    mlp, x = make(kind, size, activation), random(65, HIDDEN, seed=20, scale=2)
    alone = torch.cat([mlp(x[row : row + 1]) for row in range(65)])
    for threads in (1, 2):
        with num_threads(threads):
            for rows in companies(65):
                assert same_bits(mlp(x[rows]), alone[rows]), f"{threads=} {rows=}"


@EACH
@pytest.mark.parametrize("kind", ["gated", "plain"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types(activation, kind, dtype):
    (gate, gate_bias), (up, up_bias), (down, down_bias) = weights(16)
    fused = [tensor.to(dtype) for tensor in (torch.cat([gate, up]), torch.cat([gate_bias, up_bias]))]
    first = Linear(*fused) if kind == "gated" else Linear(up.to(dtype), up_bias.to(dtype))
    second = Linear(down.to(dtype), down_bias.to(dtype))
    buffers = GateBuffers(torch.empty(3, 32, dtype=dtype), torch.empty(3, 16, dtype=dtype))
    mlp = GatedMLP(first, second, activation, buffers) if kind == "gated" else PlainMLP(first, second, activation)
    x = random(3, HIDDEN, seed=20)
    y = mlp(x.to(dtype))
    assert y.dtype == dtype
    torch.testing.assert_close(y.float(), make(kind, 16, activation)(x), rtol=0.1, atol=0.3)
