import pytest
import torch

from holdfast.kernels.norm import (
    add_rms_norm,
    add_rms_norm_reference,
    add_rms_norm_triton,
    rms_norm,
    rms_norm_reference,
    rms_norm_triton,
)
from kernels.exactness import assert_as_exact_as_torch, companies, island, random, same_bits
from kernels.triton_cases import DTYPES, amid_poison, assert_allocates_nothing

SIZES = (1, 3, 64, 100, 577, 1000, 5120)
EPS = 1e-5
POISON = float("nan")


def inputs(num_rows, size, dtype=torch.float32):
    return random(num_rows, size).to(dtype), random(num_rows, size, seed=1).to(dtype), random(size, seed=2).to(dtype)


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"D{size}")
@pytest.mark.parametrize("num_rows", [0, 1, 3, 17])
def test_in_c_it_is_the_sum_and_then_the_norm_to_the_bit(native, guarded_host, num_rows, size):
    x, delta, weight = inputs(num_rows, size)
    summed = x + delta
    stream, out = island(x), guarded_host(num_rows, size).fill_(POISON)
    assert add_rms_norm(stream, island(delta), island(weight), EPS, out) is out
    assert same_bits(stream, summed)
    assert same_bits(out, rms_norm(summed, weight, EPS))


@pytest.mark.usefixtures("native")
def test_in_c_the_result_may_take_the_place_of_what_was_added():
    x, delta, weight = inputs(5, 100)
    expected = rms_norm(x + delta, weight, EPS)
    assert same_bits(add_rms_norm(x, delta, weight, EPS, delta), expected)
    assert same_bits(delta, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_run_in_torch(dtype):
    x, delta, weight = inputs(5, 100, dtype)
    summed, out = x + delta, torch.empty_like(x)
    add_rms_norm(x, delta, weight, EPS, out)
    assert same_bits(x, summed)
    assert same_bits(out, rms_norm_reference(summed, weight, EPS))


@DTYPES
@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"D{size}")
def test_as_exact_as_torch_amid_poison(device, guarded, size, dtype):
    for num_rows in (1, 7):
        x, delta, weight = inputs(num_rows, size, dtype)
        stream, out = guarded(num_rows, size, dtype=dtype), guarded(num_rows, size, dtype=dtype).fill_(POISON)
        stream.copy_(x)
        weight_amid_poison = amid_poison(weight[None], device)[0]
        assert add_rms_norm_triton(stream, amid_poison(delta, device), weight_amid_poison, EPS, out) is out
        in_torch = torch.empty_like(x)
        add_rms_norm_reference(x, delta, weight, EPS, in_torch)
        assert same_bits(stream.cpu(), x), "the sum is rounded as torch rounds it"
        assert_as_exact_as_torch(out.cpu(), in_torch, rms_norm_reference(x.double(), weight.double(), EPS))


@DTYPES
def test_it_is_the_norm_of_what_is_stored_to_the_bit(device, dtype):
    """Not of the sum before it was rounded: a step that starts from the stored stream gives the same."""
    x, delta, weight = (tensor.to(device) for tensor in inputs(7, 100, dtype))
    out = torch.empty_like(x)
    add_rms_norm_triton(x, delta, weight, EPS, out)
    assert same_bits(out, rms_norm_triton(x, weight, EPS))


@DTYPES
def test_rows_may_lie_apart_and_the_result_may_take_the_place_of_what_was_added(device, dtype):
    x, delta, weight = (tensor.to(device) for tensor in inputs(5, 100, dtype))
    wide = [torch.full((5, 148), POISON, dtype=dtype, device=device) for _ in range(2)]
    stream, added = (tensor[:, 16:116] for tensor in wide)
    stream.copy_(x)
    added.copy_(delta)
    expected = torch.empty_like(x)
    add_rms_norm_triton(x, delta, weight, EPS, expected)
    add_rms_norm_triton(stream, added, weight, EPS, added)
    assert same_bits(stream, x)
    assert same_bits(added, expected)
    for tensor in wide:
        assert tensor[:, :16].isnan().all()
        assert tensor[:, 116:].isnan().all()


@DTYPES
@pytest.mark.parametrize("size", [63, 128, 1000], ids=lambda size: f"D{size}")
def test_a_row_is_the_same_to_the_bit_in_any_company(device, size, dtype):
    x, delta, weight = (tensor.to(device) for tensor in inputs(9, size, dtype))

    def run(rows):
        stream, out = x[rows], torch.empty_like(x[rows])
        add_rms_norm_triton(stream, delta[rows], weight, EPS, out)
        return stream, out

    alone = [torch.cat(parts) for parts in zip(*(run([row]) for row in range(9)), strict=True)]
    for rows in companies(9):
        for mine, theirs in zip(run(rows), alone, strict=True):
            assert same_bits(mine, theirs[rows]), f"{rows=}"


def test_what_is_not_finite_stays_in_its_row(device):
    x, delta, weight = (tensor.to(device) for tensor in inputs(4, 37))
    clean, soiled = torch.empty_like(x), torch.empty_like(x)
    delta[2, 36] = POISON
    add_rms_norm_triton(x.clone(), delta.nan_to_num(0), weight, EPS, clean)
    add_rms_norm_triton(x, delta, weight, EPS, soiled)
    assert soiled[2].isnan().all()
    assert same_bits(soiled[[0, 1, 3]], clean[[0, 1, 3]])


def test_no_rows_change_nothing(device):
    x, delta, out = torch.empty(3, 0, 8, device=device)
    assert add_rms_norm_triton(x, delta, torch.ones(8, device=device), EPS, out) is out


@pytest.mark.gpu
def test_nothing_is_allocated(device):
    x, delta, weight = (tensor.to(device) for tensor in inputs(3, 512, torch.bfloat16))
    assert_allocates_nothing(lambda: add_rms_norm(x, delta, weight, EPS, delta))
