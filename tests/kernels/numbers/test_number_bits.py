import pytest
import torch

from holdfast.kernels.fp8 import (
    EXPONENT_BITS,
    as_bits,
    as_kernels_read,
    bfloat16_bits,
    e2m1_of,
    e4m3_of,
    e4m3_value,
    finite_bits,
    float32_of,
    int8_of,
    narrowed_bits,
)
from holdfast.kernels.triton_compat import constexpr, jit, tl
from kernels.exactness import random, same_bits
from kernels.triton_cases import QUIET

pytestmark = QUIET


@jit
def _apply_kernel(p_x, p_y, WHAT: constexpr, BLOCK: constexpr):
    o_x = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b_x = tl.load(p_x + o_x)
    if WHAT == "e4m3":
        b_y = e4m3_of(float32_of(b_x))
    elif WHAT == "int8":
        b_y = int8_of(float32_of(b_x))
    elif WHAT == "e2m1":
        b_y = e2m1_of(float32_of(b_x))
    elif WHAT == "bfloat16":
        b_y = bfloat16_bits(float32_of(b_x))
    elif WHAT == "finite":
        b_y = finite_bits(float32_of(b_x))
    elif WHAT == "value":
        b_y = e4m3_value(b_x.to(tl.int32))
    elif WHAT == "float32":
        b_y = float32_of(b_x)
    else:
        b_y = narrowed_bits(b_x, WHAT[3:])
    tl.store(p_y + o_x, b_y.to(p_y.dtype.element_ty))


BLOCK = 1024


def applied(what, x, dtype, device):
    size = x.numel()
    padded = torch.zeros(-(-size // BLOCK) * BLOCK, dtype=x.dtype)
    padded[:size] = x
    y = torch.empty(padded.shape, dtype=dtype, device=device)
    _apply_kernel[(padded.numel() // BLOCK,)](padded.to(device), y, WHAT=what, BLOCK=BLOCK)
    return y[:size].cpu()


def awkward():
    """Float32 numbers at and beside every tie of small formats, of every magnitude, and what is no number."""
    steps = torch.arange(-(2**13), 2**13) * 2.0**-4
    tiny = torch.arange(-128, 128) * 2.0**-12
    exact = torch.cat([steps, tiny])
    beside = torch.cat([(exact.view(torch.int32) + step).view(torch.float32) for step in (-1, 1)])
    magnitudes = random(4096) * 10.0 ** torch.linspace(-45, 38, 4096).double()
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, -torch.nan, 3.4e38, 1e-45])
    return torch.cat([exact, beside[beside.isfinite()], magnitudes.float(), special])


def test_e4m3_codes_are_those_of_torch(device):
    x = awkward()
    expected = x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(applied("e4m3", x, torch.uint8, device), torch.where(x.isnan(), 0x7F, expected))


def test_every_e4m3_code_comes_back(device):
    codes = torch.arange(256, dtype=torch.uint8)
    values = applied("value", codes, torch.float32, device)
    expected = codes.view(torch.float8_e4m3fn).float()
    number = ~expected.isnan()
    assert same_bits(values[number], expected[number])
    assert values[~number].isnan().all()
    assert torch.equal(applied("e4m3", values[number], torch.uint8, device), codes[number])


def test_every_exponent_is_its_power_of_two(device):
    exponents = torch.arange(256, dtype=torch.uint8)
    values = applied("to_float32", exponents, torch.int32, device).view(torch.float32)
    assert same_bits(values[:255], torch.tensor(2.0, dtype=torch.float64).pow(torch.arange(255) - 127).float())
    assert values[255].isnan()
    assert same_bits(values[:255], exponents.view(torch.float8_e8m0fnu).float()[:255])


def test_integers_tie_to_even(device):
    x = awkward()
    expected = x.round().clamp(-127, 127).nan_to_num(0).to(torch.int8).view(torch.uint8)
    assert torch.equal(applied("int8", x, torch.uint8, device), expected)


def test_four_bits_tie_to_even(device):
    x = awkward()
    values = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    distance = (x.double().abs().clamp_max(100).nan_to_num(0)[:, None] - values).abs()
    best = distance == distance.amin(1, keepdim=True)
    code = (best * 2 + (best & (torch.arange(8) % 2 == 0))).to(torch.int32).argmax(1)
    code = torch.where((x < 0) & (code > 0), code + 8, code)
    assert torch.equal(applied("e2m1", x, torch.int32, device), code.int())


def test_bfloat16_rounds_like_torch_and_is_read_exactly(device):
    x = awkward()
    bits = applied("bfloat16", x, torch.int16, device)
    assert same_bits(bits[~x.isnan()], x.bfloat16()[~x.isnan()].view(torch.int16))
    assert bits.view(torch.bfloat16)[x.isnan()].isnan().all()
    every = torch.arange(-(2**15), 2**15).to(torch.int16)
    back = applied("float32", every, torch.float32, device)
    number = ~back.isnan()
    assert same_bits(back[number], every.view(torch.bfloat16).float()[number])
    assert torch.equal(number, ~every.view(torch.bfloat16).isnan())


def test_what_is_not_finite_has_no_size(device):
    x = awkward()
    expected = torch.where(x.isfinite(), x.abs().view(torch.int32), 0)
    assert torch.equal(applied("finite", x, torch.int32, device), expected)


@pytest.mark.parametrize("target", [torch.float16, torch.bfloat16])
def test_float64_beside_a_tie_of_the_narrow_type_is_not_rounded_twice(device, target):
    narrow = random(1000).to(target)
    above = (narrow.view(torch.int16) + 1).view(target).double()
    tie = (narrow.double() + above) / 2
    for outward in (2.0**-45, -(2.0**-45)):
        x = tie * (1 + outward)
        bits = applied("to_" + str(target)[6:], x, torch.int16, device)
        assert torch.equal(bits.view(target).double(), above if outward > 0 else narrow.double())


@pytest.mark.parametrize("dtype", EXPONENT_BITS, ids=str)
def test_bits_of_what_is_not_finite(dtype):
    size = torch.empty((), dtype=dtype).element_size()
    noise = torch.randint(0, 256, (4096 * size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    numbers = noise.view(dtype)
    mask = EXPONENT_BITS[dtype]
    assert torch.equal(as_bits(numbers) & mask == mask, ~numbers.double().isfinite())
    assert as_bits(numbers).data_ptr() == numbers.data_ptr()


def test_only_types_that_the_interpreter_has_wrong_are_read_as_integers():
    kept = (torch.float16, torch.float32, torch.float64, torch.uint8)
    assert all(as_kernels_read(torch.empty(2, dtype=dtype)).dtype == dtype for dtype in kept)
    assert as_kernels_read(torch.empty(2, dtype=torch.bfloat16)).dtype == torch.int16
    assert as_kernels_read(torch.empty(2, dtype=torch.float8_e4m3fn)).dtype == torch.uint8
