"""Heads as codes and scales: bit by bit against a scalar version of the docstring, and on heads that want to break it."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.quant.kv_quantize import (
    FP16_MAX,
    KEY_CODEBOOKS,
    KEY_PARTS,
    VALUE_CODEBOOKS,
    VALUE_PARTS,
    CodedHeads,
    decode_keys,
    decode_values,
    encode_keys,
    encode_values,
    part_dims,
)

SIDES = ["keys", "values"]
BITS = [8, 4, 3]
HEAD_DIMS = range(16, 257, 16)
ENCODE: dict[str, Callable[[torch.Tensor, int], CodedHeads]] = {"keys": encode_keys, "values": encode_values}
DECODE: dict[str, Callable[[CodedHeads, int, int], torch.Tensor]] = {"keys": decode_keys, "values": decode_values}
BOOKS = {"keys": KEY_CODEBOOKS, "values": VALUE_CODEBOOKS}
ERRORS = {8: 0.0007, 4: 0.0095, 3: 0.034}
"""Of Gaussian heads, mean squared error over mean square."""

every_side = pytest.mark.parametrize("side", SIDES)
every_bits = pytest.mark.parametrize("bits", BITS)


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def round_trip(y_XD: torch.Tensor, side: str, bits: int) -> torch.Tensor:
    return DECODE[side](ENCODE[side](y_XD, bits), bits, y_XD.shape[-1])


def assert_same_bits(ours: CodedHeads, theirs: CodedHeads) -> None:
    """NaN scales too."""
    assert torch.equal(ours.codes_XB, theirs.codes_XB)
    assert torch.equal(ours.scale_X.view(torch.int16), theirs.scale_X.view(torch.int16))
    assert (ours.signs_XS is None) == (theirs.signs_XS is None)
    if ours.signs_XS is not None and theirs.signs_XS is not None:
        assert torch.equal(ours.signs_XS, theirs.signs_XS)


def head(heads: CodedHeads, *index: int) -> CodedHeads:
    signs = None if heads.signs_XS is None else heads.signs_XS[index]
    return CodedHeads(heads.codes_XB[index], signs, heads.scale_X[index])


# The layout in scalars, from the words of the docstring.


def coordinate(num_parts: int, part: int, column: int, head_dim: int) -> int:
    p = max(1, num_parts // 2)
    return (part // p) * (head_dim // 2) + p * column + part % p


def set_bits(target: bytearray, first_byte: int, bit: int, number: int) -> None:
    """OR a small number into the little-endian word that begins at a byte; no bit may be taken already."""
    while number:
        if number & 1:
            byte, place = first_byte + bit // 8, bit % 8
            assert not target[byte] >> place & 1, "two fields share a bit"
            target[byte] |= 1 << place
        bit, number = bit + 1, number >> 1


def scalar_keys(codes: list[int], bits: int) -> tuple[bytes, bytes]:
    """Rising codes of one head to code bytes and sign bytes."""
    head_dim, half = len(codes), 2 ** (bits - 1)
    packed, signs = bytearray(head_dim * (bits if bits == 4 else 2) // 8), bytearray(head_dim // 8)
    num_parts = {4: 2, 3: 4}[bits]
    for j in range(num_parts):
        for c in range(head_dim // num_parts):
            code = codes[coordinate(num_parts, j, c, head_dim)]
            is_negative, magnitude = int(code < half), half - 1 - code if code < half else code - half
            m, k = divmod(c, 4)
            if bits == 4:
                set_bits(packed, 4 * m, 4 * k if j == 0 else 16 + 4 * k, magnitude)
                set_bits(packed, 4 * m, 8 * k + 7 if j == 0 else 8 * k + 3, is_negative)
            else:
                set_bits(packed, 4 * m, 4 * k + 16 * (j % 2) + 2 * (j // 2), magnitude)
                set_bits(signs, c % (head_dim // 8), j + 4 * (c // (head_dim // 8)), is_negative)
    return bytes(packed), b"" if bits == 4 else bytes(signs)


def scalar_values(codes: list[int], bits: int) -> tuple[bytes, bytes]:
    head_dim = len(codes)
    packed, signs = bytearray(head_dim * (bits if bits == 4 else 2) // 8), bytearray(head_dim // 8)
    num_parts = {4: 4, 3: 8}[bits]
    for j in range(num_parts):
        for c in range(head_dim // num_parts):
            code = codes[coordinate(num_parts, j, c, head_dim)]
            if bits == 4:
                set_bits(packed, 2 * c, 4 * j, code)
            else:
                set_bits(packed, 2 * c, 2 * j, code & 3)
                set_bits(signs, 2 * (c % (head_dim // 16)), 2 * j + c // (head_dim // 16), code >> 2)
    return bytes(packed), b"" if bits == 4 else bytes(signs)


def scalar_codes(numbers: list[float], side: str, bits: int) -> list[int]:
    """Rising codes in float64. Numbers next to a boundary would prove nothing: there are none."""
    book = BOOKS[side][bits]
    factor = book.gain * math.sqrt(len(numbers)) / math.sqrt(math.fsum(number**2 for number in numbers))
    scaled = [number * factor for number in numbers]
    assert min(abs(number - boundary) for number in scaled for boundary in book.boundaries) > 1e-6, "choose a new seed"
    return [book.code(number) for number in scaled]


def scalar_e4m3(number: float) -> int:
    """The byte of the nearest e4m3 number, the even one of two."""
    sign = 128 if math.copysign(1, number) < 0 else 0
    magnitudes = [(1 + m / 8) * 2.0 ** (e - 7) if e else m / 8 * 2.0**-6 for e in range(16) for m in range(8)][:-1]
    nearest = min(range(127), key=lambda byte: (abs(magnitudes[byte] - abs(number)), byte % 2))
    return sign | nearest


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("bits", [4, 3])
@every_side
def test_every_bit_is_where_the_docstring_says(side: str, bits: int, head_dim: int) -> None:
    y_XD = gaussian(2, head_dim, seed=head_dim + 1)
    heads = ENCODE[side](y_XD, bits)
    for row in range(2):
        codes = scalar_codes(y_XD[row].double().tolist(), side, bits)
        packed, signs = (scalar_keys if side == "keys" else scalar_values)(codes, bits)
        assert bytes(heads.codes_XB[row].tolist()) == packed
        assert (b"" if heads.signs_XS is None else bytes(heads.signs_XS[row].tolist())) == signs
        decoded = DECODE[side](head(heads, row), bits, head_dim)
        numbers = torch.tensor([BOOKS[side][bits].values[code] for code in codes])
        assert torch.equal(decoded, numbers * heads.scale_X[row].float())


@pytest.mark.parametrize("head_dim", [16, 80, 128])
@every_side
def test_every_byte_of_8_bits_is_where_the_docstring_says(side: str, head_dim: int) -> None:
    y_D = gaussian(head_dim, seed=3)
    heads = ENCODE[side](y_D, 8)
    wanted = [scalar_e4m3(number / heads.scale_X.item()) for number in y_D.double().tolist()]
    if side == "values":
        wanted = [wanted[coordinate(2, j, c, head_dim)] for c in range(head_dim // 2) for j in range(2)]
    assert heads.codes_XB.tolist() == wanted
    assert heads.signs_XS is None


@pytest.mark.parametrize("bits", [4, 3])
@every_side
def test_every_code_survives_at_every_place(side: str, bits: int) -> None:
    for shift in range(2**bits):
        codes = [(place + shift) % 2**bits for place in range(48)]
        packed, signs = (scalar_keys if side == "keys" else scalar_values)(codes, bits)
        heads = CodedHeads(
            torch.tensor(list(packed), dtype=torch.uint8),
            torch.tensor(list(signs), dtype=torch.uint8) if signs else None,
            torch.tensor(1.0, dtype=torch.float16),
        )
        values = BOOKS[side][bits].values
        assert DECODE[side](heads, bits, 48).tolist() == [values[code] for code in codes]


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@every_bits
@every_side
def test_bytes_and_error_of_every_head_dim(side: str, bits: int, head_dim: int) -> None:
    y_XD = gaussian(4096 // head_dim, head_dim)
    heads = ENCODE[side](y_XD, bits)
    sign_bytes = 0 if heads.signs_XS is None else heads.signs_XS.shape[-1]
    assert heads.codes_XB.shape[-1] + sign_bytes == head_dim * bits // 8
    assert (sign_bytes > 0) == (bits == 3)
    assert heads.codes_XB.dtype == torch.uint8
    assert heads.scale_X.dtype == torch.float16
    decoded_XD = DECODE[side](heads, bits, head_dim)
    assert decoded_XD.dtype == torch.float32
    assert ((decoded_XD - y_XD).square().mean() / y_XD.square().mean()).item() < 1.3 * ERRORS[bits]


@every_bits
@every_side
def test_error_of_gaussian_heads(side: str, bits: int) -> None:
    y_XD = gaussian(1000, 128)
    error = ((round_trip(y_XD, side, bits) - y_XD).square().mean() / y_XD.square().mean()).item()
    assert error == pytest.approx(ERRORS[bits], rel=0.08)


@pytest.mark.parametrize("leading", [(), (5,), (2, 3), (0,), (1, 1, 1)], ids=str)
@every_bits
@every_side
def test_leading_dimensions(side: str, bits: int, leading: tuple[int, ...]) -> None:
    y_XD = gaussian(*leading, 96)
    heads = ENCODE[side](y_XD, bits)
    assert heads.codes_XB.shape[:-1] == heads.scale_X.shape == leading
    assert heads.signs_XS is None or heads.signs_XS.shape[:-1] == leading
    assert DECODE[side](heads, bits, 96).shape == y_XD.shape


@every_bits
@every_side
def test_a_head_is_coded_as_if_it_were_alone(side: str, bits: int) -> None:
    y_XD = gaussian(2, 3, 112)
    heads = ENCODE[side](y_XD, bits)
    for index in [(0, 0), (1, 2)]:
        assert_same_bits(head(heads, *index), ENCODE[side](y_XD[index], bits))


@every_bits
@every_side
def test_slices_of_a_larger_plane_decode_alike(side: str, bits: int) -> None:
    y_XD = gaussian(4, 9, 64)
    heads = ENCODE[side](y_XD, bits)
    part = CodedHeads(*(None if plane is None else plane[1:3, 2:7] for plane in heads))  # type: ignore[arg-type]
    assert torch.equal(DECODE[side](part, bits, 64), DECODE[side](heads, bits, 64)[1:3, 2:7])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@every_bits
@every_side
def test_half_precision_is_coded_as_its_numbers(side: str, bits: int, dtype: torch.dtype) -> None:
    y_XD = gaussian(6, 64).to(dtype)
    assert_same_bits(ENCODE[side](y_XD, bits), ENCODE[side](y_XD.float(), bits))


@pytest.mark.parametrize("bits", [4, 3])
def test_a_coded_key_has_the_length_of_the_true_one(bits: int) -> None:
    y_XD = gaussian(200, 64) * torch.logspace(-2, 3, 200).unsqueeze(1)
    lengths_X = decode_keys(encode_keys(y_XD, bits), bits, 64).norm(dim=-1)
    torch.testing.assert_close(lengths_X, y_XD.norm(dim=-1), rtol=2**-11, atol=0)


@pytest.mark.parametrize("bits", [4, 3])
def test_no_other_scale_of_a_value_is_nearer(bits: int) -> None:
    y_XD = gaussian(200, 64) * torch.logspace(-2, 3, 200).unsqueeze(1)
    decoded_XD = round_trip(y_XD, "values", bits)
    lengths_X = y_XD.norm(dim=-1)
    for factor in (0.997, 1.003):
        assert ((factor * decoded_XD - y_XD).norm(dim=-1) > (decoded_XD - y_XD).norm(dim=-1)).all()
    along_X = ((y_XD - decoded_XD) * decoded_XD).sum(-1) / lengths_X**2
    assert along_X.abs().max() < 2**-10


@every_side
def test_8_bits_take_the_largest_to_the_largest(side: str) -> None:
    y_XD = gaussian(300, 64) * torch.logspace(-1, 4, 300).unsqueeze(1)
    heads = ENCODE[side](y_XD, 8)
    largest_X = y_XD.abs().amax(-1)
    torch.testing.assert_close(heads.scale_X.float() * 448, largest_X, rtol=2**-11, atol=0)
    torch.testing.assert_close(round_trip(y_XD, side, 8).abs().amax(-1), largest_X, rtol=2**-11, atol=0)
    assert not heads.codes_XB.bitwise_and(127).eq(127).any(), "a NaN among the codes"


@every_bits
@every_side
def test_zeros_stay_zeros(side: str, bits: int) -> None:
    y_XD = gaussian(3, 64)
    y_XD[1] = 0
    heads = ENCODE[side](y_XD, bits)
    assert heads.scale_X[1] == 0
    assert not DECODE[side](heads, bits, 64)[1].any()
    assert not DECODE[side](ENCODE[side](-torch.zeros(2, 64), bits), bits, 64).any()


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf], ids=str)
@every_bits
@every_side
def test_a_broken_head_spoils_no_other(side: str, bits: int, poison: float) -> None:
    y_XD = gaussian(3, 5, 64)
    sound = ENCODE[side](y_XD, bits)
    y_XD[1, 2, 7] = poison
    heads = ENCODE[side](y_XD, bits)
    for index in [(1, 1), (1, 3), (0, 2), (2, 2)]:
        assert_same_bits(head(heads, *index), head(sound, *index))
    decoded_D = DECODE[side](head(heads, 1, 2), bits, 64)
    assert not math.isnan(poison) or decoded_D.isnan().all(), "a head that is no number has to stay one"


@pytest.mark.parametrize("poison", [math.inf, -math.inf], ids=str)
@every_bits
@every_side
def test_one_infinity_gives_no_nan(side: str, bits: int, poison: float) -> None:
    y_XD = gaussian(2, 64)
    y_XD[0, 9] = poison
    assert round_trip(y_XD, side, bits).isfinite().all()


@pytest.mark.parametrize("size", [1e30, 1e18, 1e9, 1e-9, 1e-30, 1e-44], ids=str)
@every_bits
@every_side
def test_huge_and_tiny_heads_give_no_nan(side: str, bits: int, size: float) -> None:
    y_XD = gaussian(4, 80)
    y_XD[1] *= size
    y_XD[2, 40] *= size
    heads = ENCODE[side](y_XD, bits)
    assert heads.scale_X.isfinite().all(), "a scale has to stay within float16"
    decoded_XD = DECODE[side](heads, bits, 80)
    assert decoded_XD.isfinite().all()
    if size < 1e-8:
        assert decoded_XD[1].abs().max() < 1e-6
    for row in (0, 3):
        assert (decoded_XD[row] - y_XD[row]).norm() < 0.3 * y_XD[row].norm()


@every_bits
@every_side
def test_a_scale_beyond_float16_is_the_largest(side: str, bits: int) -> None:
    y_XD = 1e9 * gaussian(2, 64).sign()
    assert ENCODE[side](y_XD, bits).scale_X.tolist() == [FP16_MAX] * 2
    assert torch.equal(round_trip(y_XD, side, bits).sign(), y_XD.sign())


@pytest.mark.parametrize("bits", BITS)
@every_side
def test_coding_what_was_decoded_gives_the_same_codes(side: str, bits: int) -> None:
    """Where scales are not so small that float16 has few digits left for them."""
    y_XD = gaussian(500, 128) * torch.logspace(0, 3, 500).unsqueeze(1)
    first = ENCODE[side](y_XD, bits)
    second = ENCODE[side](DECODE[side](first, bits, 128), bits)
    assert torch.equal(first.codes_XB, second.codes_XB)
    assert first.signs_XS is None or torch.equal(first.signs_XS, second.signs_XS)  # type: ignore[arg-type]
    torch.testing.assert_close(first.scale_X, second.scale_X, rtol=2**-10, atol=0)


@pytest.mark.parametrize(("num_parts", "head_dim"), [(1, 16), (2, 80), (4, 112), (8, 64), (8, 16), (4, 256)])
def test_parts_hold_every_coordinate_once(num_parts: int, head_dim: int) -> None:
    dims_PC = part_dims(num_parts, head_dim)
    assert dims_PC.shape == (num_parts, head_dim // num_parts)
    assert sorted(dims_PC.flatten().tolist()) == list(range(head_dim))
    for part, column in [(0, 0), (num_parts - 1, 0), (num_parts - 1, head_dim // num_parts - 1), (num_parts // 2, 1)]:
        assert dims_PC[part, column] == coordinate(num_parts, part, column, head_dim)


def test_the_parts_are_those_of_the_docstring() -> None:
    assert KEY_PARTS == {8: 1, 4: 2, 3: 4}
    assert VALUE_PARTS == {8: 2, 4: 4, 3: 8}


@every_side
def test_3_bits_without_their_sign_bits_are_refused(side: str) -> None:
    heads = ENCODE[side](gaussian(2, 32), 3)
    with pytest.raises(AssertionError, match="of 3 bits have sign bits"):
        DECODE[side](heads._replace(signs_XS=None), 3, 32)


@given(
    numbers=st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=16, max_size=16),
    side=st.sampled_from(SIDES),
    bits=st.sampled_from(BITS),
)
def test_no_finite_head_makes_a_nan(numbers: list[float], side: str, bits: int) -> None:
    y_D = torch.tensor(numbers)
    decoded_D = round_trip(y_D, side, bits)
    assert decoded_D.isfinite().all()
    if 1e-2 < y_D.norm() < 1e4:
        assert (decoded_D - y_D).norm() < {8: 0.06, 4: 0.9, 3: 1.1}[bits] * y_D.norm()
