import pytest
import torch

from holdfast.kernels.fp8 import e4m3_code, quarters, store_keys, store_values
from holdfast.kernels.triton_compat import constexpr, jit, tl
from holdfast.quant.kv_quantize import KEY_CODEBOOKS, VALUE_CODEBOOKS, encode_keys, encode_values
from kernels.coded_cases import HEAD_DIMS, make_planes
from kernels.exactness import random
from kernels.triton_cases import QUIET

pytestmark = QUIET


@jit
def _e4m3_kernel(p_x, p_code, BLOCK: constexpr):
    o_x = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(p_code + o_x, e4m3_code(tl.load(p_x + o_x)).to(tl.uint8))


@jit
def _store_kernel(p_x, p_codes, p_signs, p_scale, IS_KEY: constexpr, HEAD_DIM: constexpr, BITS: constexpr, BLOCK: constexpr, GAIN: constexpr, MAGNITUDES: constexpr):  # fmt: skip
    """Three heads, coded in the order 2, 0, 1; a fourth is not there."""
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


def test_e4m3_is_what_torch_makes_of_every_number(device):
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


@pytest.mark.parametrize("what", ["keys", "values"])
@pytest.mark.parametrize("bits", [8, 4, 3])
@pytest.mark.parametrize("head_dim", HEAD_DIMS, ids=lambda size: f"D{size}")
def test_words_are_those_of_the_format(device, head_dim, bits, what):
    x = random(3, head_dim, seed=head_dim)
    x[1] *= 100
    encode, codebooks, first = (
        (encode_keys, KEY_CODEBOOKS, "k") if what == "keys" else (encode_values, VALUE_CODEBOOKS, "v")
    )
    expected = encode(x, bits)
    planes = make_planes(bits, bits, 1, head_dim, 3, 1, torch.float32, device)
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
    for plane, coded in zip((codes, signs, scale), expected, strict=True):
        assert (plane is None) == (coded is None)
        if plane is not None and coded is not None:
            assert torch.equal(plane[0, 0].cpu().roll(1, 0), coded)
