"""Pieces of kernels that work on bits: every e4m3 number, rounding to bf16 and fp8, and words of quantized heads."""

import pytest
import torch

from holdfast.kernels.fp8 import (
    EXPONENT_BITS,
    as_bits,
    as_kernels_read,
    bfloat16_bits,
    e2m1_of,
    e4m3_code,
    e4m3_of,
    e4m3_value,
    finite_bits,
    float32_of,
    int8_of,
    kernel_codes,
    loaded_numbers,
    narrowed_bits,
    quantized_numbers,
    quarters,
    store_keys,
    store_values,
)
from holdfast.kernels.triton_compat import constexpr, is_interpreted, jit, tl
from holdfast.quant.kv_quantize import KEY_CODEBOOKS, VALUE_CODEBOOKS, quantize_keys, quantize_values
from kernels.exactness import random, same_bits
from kernels.quantized_kv_cases import HEAD_DIMS, make_planes
from kernels.triton_cases import QUIET

pytestmark = QUIET


@jit
def _e4m3_kernel(p_x, p_code, BLOCK: constexpr):
    o_x = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(p_code + o_x, e4m3_code(tl.load(p_x + o_x)).to(tl.uint8))


@jit
def _store_kernel(p_x, p_codes, p_signs, p_scale, IS_KEY: constexpr, HEAD_DIM: constexpr, BITS: constexpr, BLOCK: constexpr, GAIN: constexpr, MAGNITUDES: constexpr):  # fmt: skip
    """Three heads, quantized in the order 2, 0, 1; a fourth is not there."""
    o_head = tl.arange(0, 4)
    o_d = tl.arange(0, BLOCK)[None, :]
    m_head = o_head < 3
    b_x = quarters(p_x + o_head[:, None] * HEAD_DIM + o_d, m_head[:, None] & (o_d < HEAD_DIM // 4), HEAD_DIM)
    i_place = (o_head + 2) % 3
    if IS_KEY:
        b_scale = store_keys(p_codes, p_signs, i_place, m_head, b_x, HEAD_DIM, BITS, GAIN, MAGNITUDES)
    else:
        b_scale = store_values(p_codes, p_signs, i_place, m_head, b_x, HEAD_DIM, BITS, GAIN, MAGNITUDES)
    tl.store(p_scale + i_place, b_scale, mask=m_head)


def e4m3(x: torch.Tensor, device) -> torch.Tensor:
    codes = torch.empty(x.shape, dtype=torch.uint8, device=device)
    _e4m3_kernel[(len(x) // 16384,)](x.to(device), codes, BLOCK=16384)
    return codes.cpu()


def test_e4m3_of_every_number_matches_torch(device):
    """Every upper half of a float32, with lower halves that lie below, at and above what decides."""
    upper = torch.arange(2**16).sub(2**15) << 16
    for lower in (0, 1, 0x7FFF, 0x8000, 0xFFFF):
        x = (upper | lower).int().view(torch.float32)
        expected = x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
        codes = e4m3(x, device)
        numbers = ~x.isnan()
        assert torch.equal(codes[numbers], expected[numbers])
        assert (codes[~numbers] & 0x7F == 0x7F).all(), "NaN stays NaN"


def test_e4m3_keeps_its_own_numbers_and_rounds_halves_to_even(device):
    own = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).float()
    own = own[~own.isnan()]
    between = (own.sort().values[1:] + own.sort().values[:-1]) / 2
    x = torch.zeros(16384)
    x[: len(own)], x[len(own) : len(own) + len(between)] = own, between
    codes = e4m3(x, device)
    assert torch.equal(codes, x.to(torch.float8_e4m3fn).view(torch.uint8))
    halves = codes[len(own) : len(own) + len(between)]
    assert (halves[between != 0] % 2 == 0).all()


@pytest.mark.each_pair
@pytest.mark.parametrize(
    ("what", "bits"), [("keys", 8), ("keys", 5), ("keys", 4), ("keys", 3), ("values", 8), ("values", 4), ("values", 3)]
)
@pytest.mark.parametrize("head_dim", HEAD_DIMS, ids=lambda size: f"D{size}")
def test_packed_head_words_match_the_format(device, head_dim, bits, what):
    x = random(3, head_dim, seed=head_dim)
    x[1] *= 100
    encode, codebooks, first = (
        (quantize_keys, KEY_CODEBOOKS, "k") if what == "keys" else (quantize_values, VALUE_CODEBOOKS, "v")
    )
    expected = encode(x, bits)
    planes = make_planes(bits, min(bits, 4) if what == "keys" else bits, 1, head_dim, 3, 1, torch.float32, device)
    codes, signs, scale = (getattr(planes, f"{first}_{name}") for name in ("codes_PKtB", "signs_PKtS", "scale_PKt"))
    codebook = codebooks.get(bits)
    wide = torch.int16 if what == "values" else torch.int32 if bits == 4 else torch.uint8
    _store_kernel[(1,)](
        x.to(device),
        codes.view(wide),
        None if signs is None else signs.view(torch.int16 if what == "values" else torch.uint8),
        scale,
        IS_KEY=what == "keys",
        HEAD_DIM=head_dim,
        BITS=bits,
        BLOCK=max(4, 1 << (head_dim // 4 - 1).bit_length()),
        GAIN=codebook.gain * head_dim**0.5 if codebook else 0.0,
        MAGNITUDES=codebook.magnitudes if codebook else (),
    )
    for plane, quantized in zip((codes, signs, scale), expected, strict=True):
        assert (plane is None) == (quantized is None)
        if plane is not None and quantized is not None:
            assert torch.equal(plane[0, 0].cpu().roll(1, 0), quantized)


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
def operand_kernel(p_x, p_out, size, BLOCK: constexpr, PLAIN: constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b_x = tl.load(p_x + o, mask=o < size, other=0.0)
    tl.store(p_out + o, quantized_numbers(b_x, PLAIN).to(tl.float32), mask=o < size)


@jit
def loaded_kernel(p_codes, p_out, BLOCK: constexpr, PLAIN: constexpr):
    o = tl.arange(0, BLOCK)
    tl.store(p_out + o, loaded_numbers(tl.load(p_codes + o), PLAIN).to(tl.float32))


def bits_of(values: torch.Tensor, device) -> torch.Tensor:
    x = values.to(device)
    out = torch.zeros(len(x), dtype=torch.uint8, device=device)
    bits_kernel[(-(-len(x) // 4096),)](x, out, len(x), BLOCK=4096)
    return out.cpu()


def quantized(values: torch.Tensor, device) -> torch.Tensor:
    x = values.to(device)
    out = torch.zeros(len(x), device=device)
    operand_kernel[(-(-len(x) // 4096),)](x, out, len(x), BLOCK=4096, PLAIN=is_interpreted())
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


def test_e4m3_bits_of_every_half_match_torch(device):
    values = every_half()
    bits = bits_of(values, device)
    is_nan = values.isnan()
    assert is_nan.sum() == 2046
    assert torch.equal(bits[~is_nan], torch_bits(values[~is_nan]))
    assert (bits[is_nan] & 0x7F == 0x7F).all()


def test_e4m3_bits_of_every_magnitude_match_torch(device):
    values = torch.cat([random(20000, seed=size) * 4.0**size for size in range(-7, 6)])
    assert torch.equal(bits_of(values, device), torch_bits(values))


def test_e4m3_bits_of_any_float32_match_torch(device):
    generator = torch.Generator().manual_seed(3)
    values = torch.randint(-(2**31), 2**31, (2**15,), generator=generator).to(torch.int32).view(torch.float32)
    is_nan = values.isnan()
    bits = bits_of(values, device)
    assert torch.equal(bits[~is_nan], torch_bits(values[~is_nan]))
    assert (bits[is_nan] & 0x7F == 0x7F).all()


def test_e4m3_bits_of_ties_take_the_even_code(device):
    sizes = NUMBERS[:127]
    ties = (sizes[1:] + sizes[:-1]) / 2
    bits = bits_of(ties, device)
    lower = torch.arange(126, dtype=torch.uint8)
    assert torch.equal(bits, lower + lower % 2)
    assert torch.equal(bits_of(neighbours(ties), device), torch_bits(neighbours(ties)))


def test_e4m3_bits_of_every_e4m3_number_are_kept(device):
    finite = CODES[NUMBERS.isfinite()]
    assert torch.equal(bits_of(finite.view(E4M3).float(), device), finite)
    beside = neighbours(NUMBERS[:127])
    assert torch.equal(bits_of(beside, device), torch_bits(beside))


def test_e4m3_bits_keep_zero_signs_and_flush_tiny_numbers(device):
    least = torch.finfo(torch.float32).tiny
    values = torch.tensor([0.0, -0.0, 1e-45, -1e-45, least, -least, 2.0**-10, -(2.0**-10)])
    assert bits_of(values, device).tolist() == [0, 0x80] * 4
    above = torch.tensor([2.0**-10]).nextafter(torch.tensor(1.0))
    assert bits_of(above, device).tolist() == [1]


def test_e4m3_bits_saturate_at_448_and_keep_nan(device):
    values = torch.tensor([448.0, 464.0, 480.0, 1e30, float("inf")])
    assert bits_of(values, device).tolist() == [0x7E] * 5
    assert bits_of(-values, device).tolist() == [0xFE] * 5
    assert bits_of(torch.tensor([float("nan")]), device).tolist()[0] & 0x7F == 0x7F


def test_e4m3_code_decodes_as_in_torch(device):
    out = torch.zeros(256, dtype=torch.float16, device=device)
    numbers_kernel[(1,)](CODES.to(device), out, BLOCK=256)
    is_nan = NUMBERS.isnan()
    assert is_nan.sum() == 2
    assert same_bits(out.cpu()[~is_nan], NUMBERS.half()[~is_nan])
    assert out.cpu()[is_nan].isnan().all()


@pytest.mark.parametrize("values", [every_half(), random(20000) * 100, torch.tensor(NOT_FINITE)], ids=len)
def test_e4m3_rounding_before_a_product_matches_torch(device, values):
    """By hand in the interpreter, by instruction on a GPU: the same numbers."""
    is_nan = values.isnan()
    numbers = quantized(values, device)
    assert same_bits(numbers[~is_nan], torch_bits(values[~is_nan]).view(E4M3).float())
    assert numbers[is_nan].isnan().all()


def test_e4m3_codes_loaded_into_a_product_keep_their_values(device):
    codes = CODES.view(E4M3).to(device)
    out = torch.zeros(256, device=device)
    loaded_kernel[(1,)](kernel_codes(codes), out, BLOCK=256, PLAIN=is_interpreted())
    is_nan = NUMBERS.isnan()
    assert same_bits(out.cpu()[~is_nan], NUMBERS[~is_nan])
    assert out.cpu()[is_nan].isnan().all()


def test_kernel_codes_views_codes_in_place_only(device):
    codes = CODES.view(E4M3).to(device)
    taken = kernel_codes(codes)
    assert taken.data_ptr() == codes.data_ptr()
    assert taken.dtype == (torch.uint8 if is_interpreted() else E4M3)
    for dtype in (torch.int8, torch.uint8):
        others = torch.zeros(3, dtype=dtype, device=device)
        assert kernel_codes(others) is others


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


def test_e4m3_code_survives_a_round_trip(device):
    codes = torch.arange(256, dtype=torch.uint8)
    values = applied("value", codes, torch.float32, device)
    expected = codes.view(torch.float8_e4m3fn).float()
    number = ~expected.isnan()
    assert same_bits(values[number], expected[number])
    assert values[~number].isnan().all()
    assert torch.equal(applied("e4m3", values[number], torch.uint8, device), codes[number])


def test_e8m0_exponent_is_its_power_of_two(device):
    exponents = torch.arange(256, dtype=torch.uint8)
    values = applied("to_float32", exponents, torch.int32, device).view(torch.float32)
    assert same_bits(values[:255], torch.tensor(2.0, dtype=torch.float64).pow(torch.arange(255) - 127).float())
    assert values[255].isnan()
    assert same_bits(values[:255], exponents.view(torch.float8_e8m0fnu).float()[:255])


def test_int8_rounding_ties_to_even(device):
    x = awkward()
    expected = x.round().clamp(-127, 127).nan_to_num(0).to(torch.int8).view(torch.uint8)
    assert torch.equal(applied("int8", x, torch.uint8, device), expected)


def test_e2m1_rounding_ties_to_even(device):
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


def test_nonfinite_value_has_size_zero(device):
    x = awkward()
    expected = torch.where(x.isfinite(), x.abs().view(torch.int32), 0)
    assert torch.equal(applied("finite", x, torch.int32, device), expected)


@pytest.mark.parametrize("target", [torch.float16, torch.bfloat16])
def test_float64_rounding_beside_a_tie_happens_once(device, target):
    narrow = random(1000).to(target)
    above = (narrow.view(torch.int16) + 1).view(target).double()
    tie = (narrow.double() + above) / 2
    for outward in (2.0**-45, -(2.0**-45)):
        x = tie * (1 + outward)
        bits = applied("to_" + str(target)[6:], x, torch.int16, device)
        assert torch.equal(bits.view(target).double(), above if outward > 0 else narrow.double())


@pytest.mark.parametrize("dtype", EXPONENT_BITS, ids=str)
def test_as_bits_finds_nonfinite_values(dtype):
    size = torch.empty((), dtype=dtype).element_size()
    noise = torch.randint(0, 256, (4096 * size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    numbers = noise.view(dtype)
    mask = EXPONENT_BITS[dtype]
    assert torch.equal(as_bits(numbers) & mask == mask, ~numbers.double().isfinite())
    assert as_bits(numbers).data_ptr() == numbers.data_ptr()


def test_as_kernels_read_views_bfloat16_and_e4m3_only():
    kept = (torch.float16, torch.float32, torch.float64, torch.uint8)
    assert all(as_kernels_read(torch.empty(2, dtype=dtype)).dtype == dtype for dtype in kept)
    assert as_kernels_read(torch.empty(2, dtype=torch.bfloat16)).dtype == torch.int16
    assert as_kernels_read(torch.empty(2, dtype=torch.float8_e4m3fn)).dtype == torch.uint8
