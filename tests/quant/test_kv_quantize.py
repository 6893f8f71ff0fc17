"""Heads as codes and scales: bit by bit against a scalar version of the docstring, and on heads that want to break it."""

import dataclasses
import itertools
import math
import re
from collections.abc import Callable
from statistics import NormalDist

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.quant import kv_quantize
from holdfast.quant.kv_quantize import (
    CUBIC_3_BITS,
    CUBIC_4_BITS,
    FP8_MAX,
    FP16_MAX,
    KEY_CODEBOOKS,
    KEY_PARTS,
    VALUE_CODEBOOKS,
    VALUE_PARTS,
    Codebook,
    QuantizedHeads,
    dequantize_keys,
    dequantize_values,
    hadamard_block,
    hadamard_signs,
    part_dims,
    quantize_keys,
    quantize_values,
    rotate_heads,
)

BLOCKS = {16: 16, 32: 32, 48: 16, 64: 64, 80: 16, 96: 32, 112: 16, 128: 128, 160: 32, 192: 64, 208: 16, 256: 256}


def written_out(head_dim: int) -> torch.Tensor:
    """From the definition: within a block the sign is the parity of the bits that row and column share."""
    block = BLOCKS[head_dim]
    signs = [
        [(-1.0) ** ((i & j) % block).bit_count() if i // block == j // block else 0.0 for j in range(head_dim)]
        for i in range(head_dim)
    ]
    return torch.tensor(signs)


@pytest.mark.parametrize(("head_dim", "block"), BLOCKS.items())
def test_hadamard_block_is_the_largest_power_of_two_factor(head_dim: int, block: int) -> None:
    assert hadamard_block(head_dim) == block


@pytest.mark.parametrize("head_dim", BLOCKS)
def test_hadamard_signs_match_the_definition(head_dim: int) -> None:
    assert torch.equal(hadamard_signs(head_dim), written_out(head_dim))


@pytest.mark.parametrize("head_dim", BLOCKS)
def test_hadamard_signs_are_symmetric_and_orthonormal(head_dim: int) -> None:
    signs_DD = hadamard_signs(head_dim)
    assert torch.equal(signs_DD, signs_DD.T)
    assert torch.equal(signs_DD @ signs_DD, BLOCKS[head_dim] * torch.eye(head_dim))


@pytest.mark.parametrize("head_dim", [80, 96, 112, 192])
def test_rotate_heads_stays_within_each_block(head_dim: int) -> None:
    block = BLOCKS[head_dim]
    outside = ~torch.block_diag(*[torch.ones(block, block, dtype=torch.bool)] * (head_dim // block))
    assert not hadamard_signs(head_dim)[outside].any()
    x_XD = torch.zeros(3, head_dim)
    x_XD[:, block : 2 * block] = torch.randn(3, block, generator=torch.Generator().manual_seed(1))
    y_XD = rotate_heads(x_XD)
    assert not y_XD[:, :block].any()
    assert not y_XD[:, 2 * block :].any()


@pytest.mark.parametrize("head_dim", BLOCKS)
def test_rotate_heads_twice_is_identity_and_keeps_lengths(head_dim: int) -> None:
    x_XD = torch.randn(7, head_dim, generator=torch.Generator().manual_seed(head_dim))
    y_XD = rotate_heads(x_XD)
    # Processors add in orders of their own: errors of D products go with the root of D.
    rounding = torch.finfo(torch.float32).eps * head_dim**0.5 * float(x_XD.abs().max())
    torch.testing.assert_close(rotate_heads(y_XD), x_XD, rtol=0, atol=rounding)
    torch.testing.assert_close(y_XD.norm(dim=-1), x_XD.norm(dim=-1), rtol=1e-6, atol=0)
    q_XD = torch.randn(7, head_dim, generator=torch.Generator().manual_seed(5))
    torch.testing.assert_close((rotate_heads(q_XD) * y_XD).sum(-1), (q_XD * x_XD).sum(-1), rtol=0, atol=3e-5)


def test_rotate_heads_spreads_an_outlier_over_its_block() -> None:
    x_D = torch.zeros(96)
    x_D[40] = 8.0
    y_D = rotate_heads(x_D)
    assert y_D[32:64].abs().unique().tolist() == pytest.approx([8 / 32**0.5])
    assert not y_D[:32].any()
    assert not y_D[64:].any()


@pytest.mark.parametrize("leading", [(), (5,), (2, 3), (0,)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_rotate_heads_keeps_shape_and_returns_float32(leading: tuple[int, ...], dtype: torch.dtype) -> None:
    x_XD = torch.randn(*leading, 80, generator=torch.Generator().manual_seed(2)).to(dtype)
    y_XD = rotate_heads(x_XD)
    assert y_XD.dtype == torch.float32
    assert y_XD.shape == x_XD.shape
    torch.testing.assert_close(y_XD, x_XD.float() @ written_out(80) / 4, rtol=0, atol=2e-6)


def test_rotate_heads_nonfinite_head_spoils_no_other() -> None:
    x_XD = torch.randn(3, 64, generator=torch.Generator().manual_seed(3))
    alone = rotate_heads(x_XD[2])
    x_XD[1, 5] = torch.nan
    y_XD = rotate_heads(x_XD)
    assert y_XD[1].isnan().all()
    torch.testing.assert_close(y_XD[2], alone)
    assert y_XD[0].isfinite().all()


BOOKS = [*KEY_CODEBOOKS.values(), *VALUE_CODEBOOKS.values()]
NAMES = ["keys 5", "keys 4", "keys 3", "values 4", "values 3"]
NAMED = list(zip(BOOKS, NAMES, strict=True))
LLOYD_MAX = {5: 0.002505, 4: 0.009501, 3: 0.034548}
STATED = {"keys 5": 0.002627, "keys 4": 0.009569, "keys 3": 0.034589, "values 4": 0.009685, "values 3": 0.034618}


def density(x: float) -> float:
    return 0.0 if math.isinf(x) else math.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def below(x: float) -> float:
    return (1 + math.erf(x / math.sqrt(2))) / 2


def moment(x: float) -> float:
    return 0.0 if math.isinf(x) else x * density(x)


def normal_mse(values: list[float]) -> float:
    """Mean squared error of N(0, 1) where each number becomes the nearest value: closed form, cell by cell."""
    edges = [-math.inf, *((low + high) / 2 for low, high in itertools.pairwise(values)), math.inf]
    total = 0.0
    for value, low, high in zip(values, edges, edges[1:], strict=False):
        weight = below(high) - below(low)
        total += weight * (1 + value**2) - (moment(high) - moment(low)) + 2 * value * (density(high) - density(low))
    return total


def book_mse(book: Codebook, gain: float) -> float:
    return normal_mse([value / gain for value in book.values])


def lloyd_max(num_values: int) -> list[float]:
    """Nearest cells and their centroids in turn, until nothing moves."""
    wide = NormalDist(sigma=math.sqrt(3))  # as dense as many values at their best
    values = [wide.inv_cdf((index + 0.5) / num_values) for index in range(num_values)]
    for _ in range(4000):
        edges = [-math.inf, *((low + high) / 2 for low, high in itertools.pairwise(values)), math.inf]
        new = [(density(low) - density(high)) / (below(high) - below(low)) for low, high in itertools.pairwise(edges)]
        moved = max(abs(a - b) for a, b in zip(values, new, strict=True))
        values = new
        if moved < 1e-13:
            break
    return values


def best_gain(book: Codebook) -> float:
    """By thirds, in an interval that holds one minimum."""
    low, high = book.gain * 0.8, book.gain * 1.25
    for _ in range(120):
        third = (high - low) / 3
        if book_mse(book, low + third) < book_mse(book, high - third):
            high -= third
        else:
            low += third
    return (low + high) / 2


def test_codebooks_have_a_value_for_every_code() -> None:
    assert {bits: len(book.values) for bits, book in KEY_CODEBOOKS.items()} == {5: 32, 4: 16, 3: 8}
    assert {bits: len(book.values) for bits, book in VALUE_CODEBOOKS.items()} == {4: 16, 3: 8}
    assert all(book.bits == bits for books in (KEY_CODEBOOKS, VALUE_CODEBOOKS) for bits, book in books.items())


@pytest.mark.parametrize("book", BOOKS, ids=NAMES)
def test_codebook_values_rise_and_mirror(book: Codebook) -> None:
    assert list(book.values) == sorted(set(book.values))
    assert [-value for value in reversed(book.values)] == list(book.values)
    assert book.values[len(book.magnitudes) :] == book.magnitudes
    assert min(book.magnitudes) > 0


@pytest.mark.parametrize("book", KEY_CODEBOOKS.values(), ids=NAMES[: len(KEY_CODEBOOKS)])
def test_key_codebook_values_are_e4m3(book: Codebook) -> None:
    values = torch.tensor(book.values)
    assert torch.equal(values.to(torch.float8_e4m3fn).float(), values)


@pytest.mark.parametrize(("bits", "beta"), [(4, CUBIC_4_BITS), (3, CUBIC_3_BITS)])
def test_value_codebook_is_the_cubic_in_half_precision(bits: int, beta: float) -> None:
    assert float(np.float16(beta)) == beta
    made = []
    for code in range(2**bits):
        t = np.float16(code - (2**bits - 1) / 2)
        square = np.float16(t * t)
        # A fused multiplication and addition rounds once; every product here is exact in float64.
        slope = np.float16(float(square) * beta + 1.0)
        made.append(float(np.float16(float(slope) * float(t))))
    assert tuple(made) == VALUE_CODEBOOKS[bits].values


@pytest.mark.parametrize("book", BOOKS, ids=NAMES)
def test_codebook_gain_is_optimal_to_a_thousandth(book: Codebook) -> None:
    best = best_gain(book)
    assert book.gain == pytest.approx(best, rel=0.01)
    assert book_mse(book, best) <= book_mse(book, book.gain) < 1.001 * book_mse(book, best)
    assert book_mse(book, 0.97 * best) > 1.002 * book_mse(book, best), "the measure would not see a wrong gain"


@pytest.mark.parametrize(("book", "name"), NAMED, ids=NAMES)
def test_codebook_errors_match_the_docstring(book: Codebook, name: str) -> None:
    mse = book_mse(book, book.gain)
    assert mse == pytest.approx(STATED[name], abs=5e-7)
    assert f"{STATED[name]:.6f} (+{100 * (mse / LLOYD_MAX[book.bits] - 1):.1f} %)" in str(kv_quantize.__doc__)


@pytest.mark.parametrize(("book", "name"), NAMED, ids=NAMES)
def test_book_mse_agrees_with_a_fine_grid(book: Codebook, name: str) -> None:
    step = 1e-4
    x = np.arange(-8, 8, step) + step / 2
    values = np.array(book.values) / book.gain
    nearest = values[np.abs(x[:, None] - values).argmin(axis=1)]
    mse = (np.exp(-x * x / 2) * (x - nearest) ** 2).sum() * step / math.sqrt(2 * math.pi)
    assert mse == pytest.approx(STATED[name], rel=1e-3)


@pytest.mark.parametrize("bits", LLOYD_MAX)
def test_lloyd_max_bound_matches_the_docstring(bits: int) -> None:
    values = lloyd_max(2**bits)
    mse = normal_mse(values)
    assert mse == pytest.approx(LLOYD_MAX[bits], abs=5e-7)
    assert f"{LLOYD_MAX[bits]:.6f}" in str(kv_quantize.__doc__)
    for books in (KEY_CODEBOOKS, VALUE_CODEBOOKS):
        if bits in books:  # e4m3 has few numbers for 5 bits
            assert mse < book_mse(books[bits], books[bits].gain) < (1.06 if bits == 5 else 1.02) * mse


def test_kv_quantize_docstring_states_only_measured_errors() -> None:
    stated = {float(number) for number in re.findall(r"0\.0\d{5}", str(kv_quantize.__doc__))}
    assert stated == {*LLOYD_MAX.values(), *STATED.values()}


@pytest.mark.parametrize("book", BOOKS, ids=NAMES)
def test_codebook_code_is_that_of_the_nearest_value(book: Codebook) -> None:
    for code, value in enumerate(book.values):
        assert book.code(value) == code
    for number in np.linspace(-1.2 * book.values[-1], 1.2 * book.values[-1], 1001).tolist():
        distances = [abs(number - value) for value in book.values]
        assert distances[book.code(number)] == min(distances)
    assert book.code(-math.inf) == book.code(-1e30) == 0
    assert book.code(math.inf) == book.code(1e30) == len(book.values) - 1


@pytest.mark.parametrize("book", BOOKS, ids=NAMES)
def test_codebook_boundary_belongs_to_the_lower_code(book: Codebook) -> None:
    assert len(book.boundaries) == len(book.values) - 1
    for code, boundary in enumerate(book.boundaries):
        assert book.code(boundary) == code
        assert book.code(math.nextafter(boundary, math.inf)) == code + 1


@pytest.mark.parametrize("book", BOOKS, ids=NAMES)
def test_codebook_boundaries_are_exact_in_float32(book: Codebook) -> None:
    assert [float(np.float32(boundary)) for boundary in book.boundaries] == list(book.boundaries)


def test_fp8_max_and_fp16_max_match_torch() -> None:
    assert torch.finfo(torch.float8_e4m3fn).max == FP8_MAX
    assert torch.finfo(torch.float16).max == FP16_MAX


def test_codebook_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        KEY_CODEBOOKS[4].gain = 1.0  # type: ignore[misc]


SIDES = ["keys", "values"]
KINDS = [("keys", 8), ("keys", 5), ("keys", 4), ("keys", 3), ("values", 8), ("values", 4), ("values", 3)]
"""Every side with its bits."""
HEAD_DIMS = range(16, 257, 16)
ENCODE: dict[str, Callable[[torch.Tensor, int], QuantizedHeads]] = {"keys": quantize_keys, "values": quantize_values}
DEQUANTIZE: dict[str, Callable[[QuantizedHeads, int, int], torch.Tensor]] = {
    "keys": dequantize_keys,
    "values": dequantize_values,
}
BOOKS_HEAD_CODES = {"keys": KEY_CODEBOOKS, "values": VALUE_CODEBOOKS}
ERRORS = {8: 0.0007, 5: 0.0026, 4: 0.0095, 3: 0.034}
"""Mean squared error over mean square, for Gaussian heads."""

every_side = pytest.mark.parametrize("side", SIDES)
every_kind = pytest.mark.parametrize(("side", "bits"), KINDS)
every_packed_kind = pytest.mark.parametrize(("side", "bits"), [kind for kind in KINDS if kind[1] < 8])


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def round_trip(y_XD: torch.Tensor, side: str, bits: int) -> torch.Tensor:
    return DEQUANTIZE[side](ENCODE[side](y_XD, bits), bits, y_XD.shape[-1])


def assert_same_bits(ours: QuantizedHeads, theirs: QuantizedHeads) -> None:
    """NaN scales too."""
    assert torch.equal(ours.codes_XB, theirs.codes_XB)
    assert torch.equal(ours.scale_X.view(torch.int16), theirs.scale_X.view(torch.int16))
    assert (ours.signs_XS is None) == (theirs.signs_XS is None)
    if ours.signs_XS is not None and theirs.signs_XS is not None:
        assert torch.equal(ours.signs_XS, theirs.signs_XS)


def head(heads: QuantizedHeads, *index: int) -> QuantizedHeads:
    signs = None if heads.signs_XS is None else heads.signs_XS[index]
    return QuantizedHeads(heads.codes_XB[index], signs, heads.scale_X[index])


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
    packed, signs = bytearray(head_dim * {5: 4, 4: 4, 3: 2}[bits] // 8), bytearray(head_dim // 8)
    num_parts = {5: 4, 4: 2, 3: 4}[bits]
    for j in range(num_parts):
        for c in range(head_dim // num_parts):
            code = codes[coordinate(num_parts, j, c, head_dim)]
            is_negative, magnitude = int(code < half), half - 1 - code if code < half else code - half
            m, k = divmod(c, 4)
            if bits == 4:
                set_bits(packed, 4 * m, 4 * k if j == 0 else 16 + 4 * k, magnitude)
                set_bits(packed, 4 * m, 8 * k + 7 if j == 0 else 8 * k + 3, is_negative)
            else:
                if bits == 5:
                    set_bits(packed, 4 * m + (head_dim // 4 if j > 1 else 0), 4 * k + 16 * (j % 2), magnitude)
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
    book = BOOKS_HEAD_CODES[side][bits]
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
@every_packed_kind
def test_quantize_heads_packs_bits_as_documented(side: str, bits: int, head_dim: int) -> None:
    y_XD = gaussian(2, head_dim, seed=head_dim + 1)
    heads = ENCODE[side](y_XD, bits)
    for row in range(2):
        codes = scalar_codes(y_XD[row].double().tolist(), side, bits)
        packed, signs = (scalar_keys if side == "keys" else scalar_values)(codes, bits)
        assert bytes(heads.codes_XB[row].tolist()) == packed
        assert (b"" if heads.signs_XS is None else bytes(heads.signs_XS[row].tolist())) == signs
        dequantized = DEQUANTIZE[side](head(heads, row), bits, head_dim)
        numbers = torch.tensor([BOOKS_HEAD_CODES[side][bits].values[code] for code in codes])
        assert torch.equal(dequantized, numbers * heads.scale_X[row].float())


@pytest.mark.parametrize("head_dim", [16, 80, 128])
@every_side
def test_quantize_heads_8_bits_packs_bytes_as_documented(side: str, head_dim: int) -> None:
    y_D = gaussian(head_dim, seed=3)
    heads = ENCODE[side](y_D, 8)
    wanted = [scalar_e4m3(number / heads.scale_X.item()) for number in y_D.double().tolist()]
    if side == "values":
        wanted = [wanted[coordinate(2, j, c, head_dim)] for c in range(head_dim // 2) for j in range(2)]
    assert heads.codes_XB.tolist() == wanted
    assert heads.signs_XS is None


@every_packed_kind
def test_dequantize_heads_reads_every_code_in_every_place(side: str, bits: int) -> None:
    for shift in range(2**bits):
        codes = [(place + shift) % 2**bits for place in range(48)]
        packed, signs = (scalar_keys if side == "keys" else scalar_values)(codes, bits)
        heads = QuantizedHeads(
            torch.tensor(list(packed), dtype=torch.uint8),
            torch.tensor(list(signs), dtype=torch.uint8) if signs else None,
            torch.tensor(1.0, dtype=torch.float16),
        )
        values = BOOKS_HEAD_CODES[side][bits].values
        assert DEQUANTIZE[side](heads, bits, 48).tolist() == [values[code] for code in codes]


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@every_kind
def test_quantize_heads_bytes_and_error_hold_for_every_head_dim(side: str, bits: int, head_dim: int) -> None:
    y_XD = gaussian(4096 // head_dim, head_dim)
    heads = ENCODE[side](y_XD, bits)
    sign_bytes = 0 if heads.signs_XS is None else heads.signs_XS.shape[-1]
    assert heads.codes_XB.shape[-1] + sign_bytes == head_dim * bits // 8
    assert (sign_bytes > 0) == (bits in (3, 5))
    assert heads.codes_XB.dtype == torch.uint8
    assert heads.scale_X.dtype == torch.float16
    dequantized_XD = DEQUANTIZE[side](heads, bits, head_dim)
    assert dequantized_XD.dtype == torch.float32
    assert ((dequantized_XD - y_XD).square().mean() / y_XD.square().mean()).item() < 1.3 * ERRORS[bits]


@every_kind
def test_quantize_heads_error_of_gaussian_heads_is_known(side: str, bits: int) -> None:
    y_XD = gaussian(1000, 128)
    error = ((round_trip(y_XD, side, bits) - y_XD).square().mean() / y_XD.square().mean()).item()
    assert error == pytest.approx(ERRORS[bits], rel=0.08)


@pytest.mark.parametrize("leading", [(), (5,), (2, 3), (0,), (1, 1, 1)], ids=str)
@every_kind
def test_quantize_heads_keeps_leading_dimensions(side: str, bits: int, leading: tuple[int, ...]) -> None:
    y_XD = gaussian(*leading, 96)
    heads = ENCODE[side](y_XD, bits)
    assert heads.codes_XB.shape[:-1] == heads.scale_X.shape == leading
    assert heads.signs_XS is None or heads.signs_XS.shape[:-1] == leading
    assert DEQUANTIZE[side](heads, bits, 96).shape == y_XD.shape


@every_kind
def test_quantize_heads_treats_each_head_alone(side: str, bits: int) -> None:
    y_XD = gaussian(2, 3, 112)
    heads = ENCODE[side](y_XD, bits)
    for index in [(0, 0), (1, 2)]:
        assert_same_bits(head(heads, *index), ENCODE[side](y_XD[index], bits))


@every_kind
def test_dequantize_heads_slice_matches_the_whole(side: str, bits: int) -> None:
    y_XD = gaussian(4, 9, 64)
    heads = ENCODE[side](y_XD, bits)
    part = QuantizedHeads(*(None if plane is None else plane[1:3, 2:7] for plane in heads))  # type: ignore[arg-type]
    assert torch.equal(DEQUANTIZE[side](part, bits, 64), DEQUANTIZE[side](heads, bits, 64)[1:3, 2:7])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@every_kind
def test_quantize_heads_half_precision_equals_float32(side: str, bits: int, dtype: torch.dtype) -> None:
    y_XD = gaussian(6, 64).to(dtype)
    assert_same_bits(ENCODE[side](y_XD, bits), ENCODE[side](y_XD.float(), bits))


@pytest.mark.parametrize("bits", [5, 4, 3])
def test_quantize_keys_keeps_the_length_of_a_key(bits: int) -> None:
    y_XD = gaussian(200, 64) * torch.logspace(-2, 3, 200).unsqueeze(1)
    lengths_X = dequantize_keys(quantize_keys(y_XD, bits), bits, 64).norm(dim=-1)
    torch.testing.assert_close(lengths_X, y_XD.norm(dim=-1), rtol=2**-11, atol=0)


@pytest.mark.parametrize("bits", [4, 3])
def test_quantize_values_chooses_the_nearest_scale(bits: int) -> None:
    y_XD = gaussian(200, 64) * torch.logspace(-2, 3, 200).unsqueeze(1)
    dequantized_XD = round_trip(y_XD, "values", bits)
    lengths_X = y_XD.norm(dim=-1)
    for factor in (0.997, 1.003):
        assert ((factor * dequantized_XD - y_XD).norm(dim=-1) > (dequantized_XD - y_XD).norm(dim=-1)).all()
    along_X = ((y_XD - dequantized_XD) * dequantized_XD).sum(-1) / lengths_X**2
    assert along_X.abs().max() < 2**-10


@every_side
def test_quantize_heads_8_bits_maps_largest_to_largest(side: str) -> None:
    y_XD = gaussian(300, 64) * torch.logspace(-1, 4, 300).unsqueeze(1)
    heads = ENCODE[side](y_XD, 8)
    largest_X = y_XD.abs().amax(-1)
    torch.testing.assert_close(heads.scale_X.float() * 448, largest_X, rtol=2**-11, atol=0)
    torch.testing.assert_close(round_trip(y_XD, side, 8).abs().amax(-1), largest_X, rtol=2**-11, atol=0)
    assert not heads.codes_XB.bitwise_and(127).eq(127).any(), "a NaN among the codes"


@every_kind
def test_quantize_heads_zeros_stay_zeros(side: str, bits: int) -> None:
    y_XD = gaussian(3, 64)
    y_XD[1] = 0
    heads = ENCODE[side](y_XD, bits)
    assert heads.scale_X[1] == 0
    assert not DEQUANTIZE[side](heads, bits, 64)[1].any()
    assert not DEQUANTIZE[side](ENCODE[side](-torch.zeros(2, 64), bits), bits, 64).any()


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf], ids=str)
@every_kind
def test_quantize_heads_nonfinite_head_spoils_no_other(side: str, bits: int, poison: float) -> None:
    y_XD = gaussian(3, 5, 64)
    sound = ENCODE[side](y_XD, bits)
    y_XD[1, 2, 7] = poison
    heads = ENCODE[side](y_XD, bits)
    for index in [(1, 1), (1, 3), (0, 2), (2, 2)]:
        assert_same_bits(head(heads, *index), head(sound, *index))
    dequantized_D = DEQUANTIZE[side](head(heads, 1, 2), bits, 64)
    assert not math.isnan(poison) or dequantized_D.isnan().all(), "a head that is no number has to stay one"


@pytest.mark.parametrize("poison", [math.inf, -math.inf], ids=str)
@every_kind
def test_quantize_heads_infinity_gives_no_nan(side: str, bits: int, poison: float) -> None:
    y_XD = gaussian(2, 64)
    y_XD[0, 9] = poison
    assert round_trip(y_XD, side, bits).isfinite().all()


@pytest.mark.parametrize("size", [1e30, 1e18, 1e9, 1e-9, 1e-30, 1e-44], ids=str)
@every_kind
def test_quantize_heads_huge_and_tiny_heads_give_no_nan(side: str, bits: int, size: float) -> None:
    y_XD = gaussian(4, 80)
    y_XD[1] *= size
    y_XD[2, 40] *= size
    heads = ENCODE[side](y_XD, bits)
    assert heads.scale_X.isfinite().all(), "a scale has to stay within float16"
    dequantized_XD = DEQUANTIZE[side](heads, bits, 80)
    assert dequantized_XD.isfinite().all()
    if size < 1e-8:
        assert dequantized_XD[1].abs().max() < 1e-6
    for row in (0, 3):
        assert (dequantized_XD[row] - y_XD[row]).norm() < 0.3 * y_XD[row].norm()


@every_kind
def test_quantize_heads_clamps_scale_to_float16(side: str, bits: int) -> None:
    y_XD = 1e9 * gaussian(2, 64).sign()
    assert ENCODE[side](y_XD, bits).scale_X.tolist() == [FP16_MAX] * 2
    assert torch.equal(round_trip(y_XD, side, bits).sign(), y_XD.sign())


@every_kind
def test_quantize_heads_of_dequantized_heads_repeats_codes(side: str, bits: int) -> None:
    """Where scales are not so small that float16 has few digits left for them."""
    y_XD = gaussian(500, 128) * torch.logspace(0, 3, 500).unsqueeze(1)
    first = ENCODE[side](y_XD, bits)
    second = ENCODE[side](DEQUANTIZE[side](first, bits, 128), bits)
    assert torch.equal(first.codes_XB, second.codes_XB)
    assert first.signs_XS is None or torch.equal(first.signs_XS, second.signs_XS)  # type: ignore[arg-type]
    torch.testing.assert_close(first.scale_X, second.scale_X, rtol=2**-10, atol=0)


@pytest.mark.parametrize(("num_parts", "head_dim"), [(1, 16), (2, 80), (4, 112), (8, 64), (8, 16), (4, 256)])
def test_part_dims_hold_every_coordinate_once(num_parts: int, head_dim: int) -> None:
    dims_PC = part_dims(num_parts, head_dim)
    assert dims_PC.shape == (num_parts, head_dim // num_parts)
    assert sorted(dims_PC.flatten().tolist()) == list(range(head_dim))
    for part, column in [(0, 0), (num_parts - 1, 0), (num_parts - 1, head_dim // num_parts - 1), (num_parts // 2, 1)]:
        assert dims_PC[part, column] == coordinate(num_parts, part, column, head_dim)


def test_key_and_value_parts_are_as_documented() -> None:
    assert KEY_PARTS == {8: 1, 5: 4, 4: 2, 3: 4}
    assert VALUE_PARTS == {8: 2, 4: 4, 3: 8}


@pytest.mark.parametrize(("side", "bits"), [("keys", 5), ("keys", 3), ("values", 3)])
def test_dequantize_heads_without_signs_is_refused(side: str, bits: int) -> None:
    heads = ENCODE[side](gaussian(2, 32), bits)
    with pytest.raises(AssertionError, match=f"of {bits} bits have sign bits"):
        DEQUANTIZE[side](heads._replace(signs_XS=None), bits, 32)


@given(
    numbers=st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=16, max_size=16),
    kind=st.sampled_from(KINDS),
)
def test_quantize_heads_finite_head_gives_no_nan(numbers: list[float], kind: tuple[str, int]) -> None:
    side, bits = kind
    y_D = torch.tensor(numbers)
    dequantized_D = round_trip(y_D, side, bits)
    assert dequantized_D.isfinite().all()
    if 1e-2 < y_D.norm() < 1e4:
        assert (dequantized_D - y_D).norm() < {8: 0.06, 5: 0.8, 4: 0.9, 3: 1.1}[bits] * y_D.norm()
