import pytest
import torch

from holdfast.layers.norm import LayerNorm, RMSNorm
from kernels.exactness import companies, num_threads, random, require_native, same_bits

SIZES = (1, 3, 5, 63, 64, 100, 577)


@pytest.mark.parametrize("eps", [1e-5, 0.1])
def test_rms_norm_is_what_torch_says(eps):
    x, weight = random(7, 20, scale=3), random(20, seed=1)
    module = torch.nn.RMSNorm(20, eps)
    module.weight.data = weight
    torch.testing.assert_close(RMSNorm(weight, eps)(x), module(x).detach())


@pytest.mark.parametrize("eps", [1e-5, 0.1])
def test_layer_norm_is_what_torch_says(eps):
    x, weight, bias = random(7, 20, scale=3) + 5, random(20, seed=1), random(20, seed=2)
    module = torch.nn.LayerNorm(20, eps)
    module.weight.data, module.bias.data = weight, bias
    torch.testing.assert_close(LayerNorm(weight, bias, eps)(x), module(x).detach())


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"H{size}")
def test_a_row_is_the_same_to_the_bit_in_any_company(kind, size):
    require_native()
    x, weight, bias = random(129, size), random(size, seed=1), random(size, seed=2)
    norm = RMSNorm(weight, 1e-5) if kind == "rms" else LayerNorm(weight, bias, 1e-5)
    alone = torch.cat([norm(x[row : row + 1]) for row in range(129)])
    for threads in (1, 2):
        with num_threads(threads):
            for rows in companies(129):
                assert same_bits(norm(x[rows]), alone[rows]), f"{threads=} {rows=}"
