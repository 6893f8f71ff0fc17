import pytest
import torch

from holdfast.layers.mlp import LayerNorm, RMSNorm
from kernels.exactness import companies, num_threads, random, require_native, same_bits

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
def test_it_is_what_torch_says(kind, eps):
    x = random(7, 20, scale=3) + 5
    module, norm = make(kind, 20, eps)
    before, out = x.clone(), torch.full((7, 20), NAN)
    assert norm(x, None, out) is out
    torch.testing.assert_close(out, module(x).detach())
    assert same_bits(x, before), "nothing is added where there is nothing"


@KINDS
def test_what_is_to_be_added_comes_first_and_stays(kind):
    x, delta = random(7, 20), random(7, 20, seed=5)
    module, norm = make(kind, 20)
    summed, out = x + delta, torch.full((7, 20), NAN)
    assert norm(x, delta, out) is out
    assert same_bits(x, summed), "the sum goes on with the stream"
    torch.testing.assert_close(out, module(summed).detach())


@KINDS
def test_the_result_may_take_the_place_of_the_stream(kind):
    """As where norms come last."""
    x, delta = random(7, 20), random(7, 20, seed=5)
    module, norm = make(kind, 20)
    expected = module(x + delta).detach()
    assert norm(x, delta, x) is x
    torch.testing.assert_close(x, expected)


@KINDS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_types(kind, dtype):
    x, delta = random(7, 20).to(dtype), random(7, 20, seed=5).to(dtype)
    weight, bias = random(20, seed=1).to(dtype), random(20, seed=2).to(dtype)
    norm = RMSNorm(weight, 1e-5) if kind == "rms" else LayerNorm(weight, bias, 1e-5)
    _, exact = make(kind, 20)
    expected = exact((x + delta).float(), None, torch.empty(7, 20))
    out = norm(x, delta, torch.empty_like(x))
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), expected, rtol=0.02, atol=0.05)


def test_the_rms_norm_s_weight_is_within_reach():
    """Steps of few rows do this norm inside their products."""
    weight = random(20)
    norm = RMSNorm(weight, 0.5)
    assert norm.weight_H is weight
    assert norm.eps == 0.5


@KINDS
@pytest.mark.parametrize("with_delta", [False, True], ids=["alone", "added"])
@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"H{size}")
def test_a_row_is_the_same_to_the_bit_in_any_company(kind, size, with_delta):
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
