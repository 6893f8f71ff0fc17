import pytest
import torch

from holdfast.kernels.fp8 import coded_numbers, e4m3_code, e4m3_value, kernel_codes, loaded_numbers
from holdfast.kernels.triton_compat import constexpr, is_interpreted, jit, tl
from kernels.exactness import random, same_bits
from kernels.triton_cases import QUIET

pytestmark = QUIET

E4M3 = torch.float8_e4m3fn
CODES = torch.arange(256, dtype=torch.uint8)
NUMBERS = CODES.view(E4M3).float()
"""What torch takes each code for."""
NOT_FINITE = (float("inf"), -float("inf"), float("nan"))


@jit
def bits_kernel(p_x, p_out, size, BLOCK: constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b_x = tl.load(p_x + o, mask=o < size, other=0.0)
    tl.store(p_out + o, e4m3_code(b_x).to(tl.uint8), mask=o < size)


@jit
def numbers_kernel(p_codes, p_out, BLOCK: constexpr):
    o = tl.arange(0, BLOCK)
    tl.store(p_out + o, e4m3_value(tl.load(p_codes + o).to(tl.int32)).to(tl.float16))


@jit
def coded_kernel(p_x, p_out, size, BLOCK: constexpr, PLAIN: constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b_x = tl.load(p_x + o, mask=o < size, other=0.0)
    tl.store(p_out + o, coded_numbers(b_x, PLAIN).to(tl.float32), mask=o < size)


@jit
def loaded_kernel(p_codes, p_out, BLOCK: constexpr, PLAIN: constexpr):
    o = tl.arange(0, BLOCK)
    tl.store(p_out + o, loaded_numbers(tl.load(p_codes + o), PLAIN).to(tl.float32))


def bits_of(values: torch.Tensor, device) -> torch.Tensor:
    x = values.to(device)
    out = torch.zeros(len(x), dtype=torch.uint8, device=device)
    bits_kernel[(-(-len(x) // 4096),)](x, out, len(x), BLOCK=4096)
    return out.cpu()


def coded(values: torch.Tensor, device) -> torch.Tensor:
    x = values.to(device)
    out = torch.zeros(len(x), device=device)
    coded_kernel[(-(-len(x) // 4096),)](x, out, len(x), BLOCK=4096, PLAIN=is_interpreted())
    return out.cpu()


def torch_bits(values: torch.Tensor) -> torch.Tensor:
    """Torch's own cast, of numbers that it does not take for too large."""
    return values.clamp(-448.0, 448.0).to(E4M3).view(torch.uint8)


def every_half() -> torch.Tensor:
    """Every number of half precision, infinities and every NaN among them."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.float16).float()


def neighbours(values: torch.Tensor) -> torch.Tensor:
    """Numbers with the next of float32 on both sides, of both signs."""
    infinity = torch.tensor(float("inf"))
    beside = torch.cat([values, values.nextafter(infinity), values.nextafter(-infinity)])
    return torch.cat([beside, -beside])


def test_every_number_of_half_precision_becomes_the_code_that_torch_gives_it(device):
    values = every_half()
    bits = bits_of(values, device)
    is_nan = values.isnan()
    assert is_nan.sum() == 2046
    assert torch.equal(bits[~is_nan], torch_bits(values[~is_nan]))
    assert (bits[is_nan] & 0x7F == 0x7F).all()


def test_numbers_of_every_size_become_the_code_that_torch_gives_them(device):
    values = torch.cat([random(20000, seed=size) * 4.0**size for size in range(-7, 6)])
    assert torch.equal(bits_of(values, device), torch_bits(values))


def test_any_bits_of_float32(device):
    generator = torch.Generator().manual_seed(3)
    values = torch.randint(-(2**31), 2**31, (2**15,), generator=generator).to(torch.int32).view(torch.float32)
    is_nan = values.isnan()
    bits = bits_of(values, device)
    assert torch.equal(bits[~is_nan], torch_bits(values[~is_nan]))
    assert (bits[is_nan] & 0x7F == 0x7F).all()


def test_half_way_between_two_codes_the_even_one_is_taken(device):
    sizes = NUMBERS[:127]
    ties = (sizes[1:] + sizes[:-1]) / 2
    bits = bits_of(ties, device)
    lower = torch.arange(126, dtype=torch.uint8)
    assert torch.equal(bits, lower + lower % 2)
    assert torch.equal(bits_of(neighbours(ties), device), torch_bits(neighbours(ties)))


def test_every_number_of_e4m3_is_its_own_code_and_so_is_what_lies_beside_it(device):
    finite = CODES[NUMBERS.isfinite()]
    assert torch.equal(bits_of(finite.view(E4M3).float(), device), finite)
    beside = neighbours(NUMBERS[:127])
    assert torch.equal(bits_of(beside, device), torch_bits(beside))


def test_zeros_keep_their_sign_and_what_is_too_small_is_zero(device):
    least = torch.finfo(torch.float32).tiny
    values = torch.tensor([0.0, -0.0, 1e-45, -1e-45, least, -least, 2.0**-10, -(2.0**-10)])
    assert bits_of(values, device).tolist() == [0, 0x80] * 4
    above = torch.tensor([2.0**-10]).nextafter(torch.tensor(1.0))
    assert bits_of(above, device).tolist() == [1]


def test_what_is_too_large_is_448_and_nan_is_nan(device):
    values = torch.tensor([448.0, 464.0, 480.0, 1e30, float("inf")])
    assert bits_of(values, device).tolist() == [0x7E] * 5
    assert bits_of(-values, device).tolist() == [0xFE] * 5
    assert bits_of(torch.tensor([float("nan")]), device).tolist()[0] & 0x7F == 0x7F


def test_every_code_is_the_number_that_torch_takes_it_for(device):
    out = torch.zeros(256, dtype=torch.float16, device=device)
    numbers_kernel[(1,)](CODES.to(device), out, BLOCK=256)
    is_nan = NUMBERS.isnan()
    assert is_nan.sum() == 2
    assert same_bits(out.cpu()[~is_nan], NUMBERS.half()[~is_nan])
    assert out.cpu()[is_nan].isnan().all()


@pytest.mark.parametrize("values", [every_half(), random(20000) * 100, torch.tensor(NOT_FINITE)], ids=len)
def test_numbers_that_are_coded_on_their_way_into_a_product(device, values):
    """By hand in the interpreter, by instruction on a GPU: the same numbers."""
    is_nan = values.isnan()
    numbers = coded(values, device)
    assert same_bits(numbers[~is_nan], torch_bits(values[~is_nan]).view(E4M3).float())
    assert numbers[is_nan].isnan().all()


def test_codes_that_are_loaded_into_a_product(device):
    codes = CODES.view(E4M3).to(device)
    out = torch.zeros(256, device=device)
    loaded_kernel[(1,)](kernel_codes(codes), out, BLOCK=256, PLAIN=is_interpreted())
    is_nan = NUMBERS.isnan()
    assert same_bits(out.cpu()[~is_nan], NUMBERS[~is_nan])
    assert out.cpu()[is_nan].isnan().all()


def test_kernels_get_codes_in_place_and_nothing_else_is_touched(device):
    codes = CODES.view(E4M3).to(device)
    taken = kernel_codes(codes)
    assert taken.data_ptr() == codes.data_ptr()
    assert taken.dtype == (torch.uint8 if is_interpreted() else E4M3)
    for dtype in (torch.int8, torch.uint8):
        others = torch.zeros(3, dtype=dtype, device=device)
        assert kernel_codes(others) is others
