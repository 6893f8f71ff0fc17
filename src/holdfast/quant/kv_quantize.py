"""KV heads quantized (TurboQuant): rotation, codebooks, codes and scales in plain torch, and the order of bits in a page.

A head that is rotated and divided by its norm has nearly Gaussian coordinates, so one codebook serves all heads.
No instruction computes the values of the best codebook (Lloyd-Max) cheaply. These are cheap, and lose almost nothing:

    mean squared error of N(0, 1)             5 bits             4 bits             3 bits
    Lloyd-Max                                 0.002505           0.009501           0.034548
    keys: values that are e4m3 numbers        0.002627 (+4.9 %)  0.009569 (+0.7 %)  0.034589 (+0.1 %)  looked up by bytes
    values: t + beta t^3 in half precision                       0.009685 (+1.9 %)  0.034618 (+0.2 %)  multiplied in pairs

X any leading dimensions, D head dim (a multiple of 16), B bytes of a head's codes, S bytes of its sign bits

A quantized head is scale * codebook[code]. Keys and values of less than 8 bits are quantized in the rotated space;
8 bits are e4m3 numbers of the unrotated head, with a scale that maps its largest to e4m3's largest.

Words are little-endian. Kernels take a word's codes apart into parts: tensors that hold the coordinates at the same place
of every word. With P parts, part j at column c is coordinate (j // p) * D / 2 + p * c + j % p, where p = max(1, P / 2).

    keys 8     a byte a coordinate, in order                                                               1 part
    keys 5     words of parts 0 and 1, then as many of parts 2 and 3; word m, columns c = 4 m + k:         4 parts
               magnitude of part j in the four bits from 4 k + 16 (j % 2), signs as in keys 3:
               the upper bit of a magnitude makes a byte permutation of the lower eight give zero
    keys 4     32-bit word m, columns c = 4 m + k (k < 4): magnitude of part 0 in bits 4 k to 4 k + 2,     2 parts
               of part 1 in bits 16 + 4 k to 16 + 4 k + 2; sign of part 0 in bit 8 k + 7, of part 1 in 8 k + 3:
               the magnitudes are the selectors of a byte permutation, and the signs lie where e4m3 has them
    keys 3     32-bit word m, columns c = 4 m + k: magnitude of part j in the two bits from                4 parts
               4 k + 16 (j % 2) + 2 (j // 2); sign in byte c % (D / 8) of the sign bits, bit j + 4 (c // (D / 8))
    values 8   16-bit word c: part j is byte j                                                             2 parts
    values 4   16-bit word c: part j is bits 4 j to 4 j + 3, the rising code                               4 parts
    values 3   16-bit word c: part j is bits 2 j and 2 j + 1, the lower bits of the rising code;           8 parts
               its highest bit is bit 2 j + c // (D / 16) of 16-bit word c % (D / 16) of the sign bits
"""

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch

from holdfast.quant.formats import BITS_WITH_SIGNS


def hadamard_block(head_dim: int) -> int:
    """Return the side of a block: the largest power of two that divides the head."""
    return head_dim & -head_dim


def hadamard_signs(head_dim: int) -> torch.Tensor:
    """Return symmetric [D, D]: +1 and -1 inside blocks, 0 outside. Divided by the root of the side, it rotates."""
    block = hadamard_block(head_dim)
    signs = torch.ones(1, 1)
    while signs.shape[0] < block:
        signs = torch.cat((torch.cat((signs, signs), dim=1), torch.cat((signs, -signs), dim=1)))
    return torch.block_diag(*(signs for _ in range(head_dim // block)))


def rotation_table(head_dim: int, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """Return the table that kernels read, [D + 1, D]: the signs, then a row of -1 for columns from D / 16 on, else 0.

    For 3-bit values the last row separates words of a head's upper half from the lower ones
    (kernels/attention/dequantize.py).
    """
    upper_1D = torch.where(torch.arange(head_dim) >= head_dim // 16, -1.0, 0.0).unsqueeze(0)
    return torch.cat((hadamard_signs(head_dim), upper_1D)).to(device, dtype)


def rotate_heads(x_XD: torch.Tensor) -> torch.Tensor:
    """Rotate the last dimension in float32; rotating twice gives x back."""
    head_dim = x_XD.shape[-1]
    signs_DD = hadamard_signs(head_dim).to(x_XD.device)
    return x_XD.float() @ signs_DD * hadamard_block(head_dim) ** -0.5


CUBIC_4_BITS = 0.00907135009765625
CUBIC_3_BITS = 0.024566650390625
"""beta of the cubic codebooks in float16: a code n stands for t + beta t^3, t = n - (number of codes - 1) / 2."""
FP8_MAX = 448.0
"""The largest e4m3 number."""
FP16_MAX = 65504.0


@dataclass(frozen=True, slots=True)
class Codebook:
    """A symmetric codebook. Codes rise with their values: 0 is the most negative."""

    bits: int
    magnitudes: tuple[float, ...]
    """The positive values, rising; the negative ones are their mirror."""
    gain: float
    """Factor from a standard normal number to the codebook's scale."""

    @property
    def values(self) -> tuple[float, ...]:
        """Values in order of code."""
        return (*(-value for value in reversed(self.magnitudes)), *self.magnitudes)

    @property
    def boundaries(self) -> tuple[float, ...]:
        """Midpoints between neighbours: a number above i of them has code i."""
        values = self.values
        return tuple((low + high) / 2 for low, high in pairwise(values))

    def code(self, number: float) -> int:
        """Return the code of one number on the codebook's scale."""
        return bisect_left(self.boundaries, number)


KEY_CODEBOOKS: dict[int, Codebook] = {
    5: Codebook(
        5,
        (0.0859375, 0.25, 0.4375, 0.625, 0.8125, 1.0, 1.25, 1.5, 1.75, 2.0, 2.25, 2.5, 2.75, 3.25, 3.75, 4.5),
        1.39319,
    ),
    4: Codebook(4, (0.140625, 0.40625, 0.6875, 1.0, 1.375, 1.75, 2.25, 3.0), 1.08555),
    3: Codebook(3, (0.1875, 0.5625, 1.0, 1.625), 0.752226),
}
"""e4m3 numbers, by bits."""
VALUE_CODEBOOKS: dict[int, Codebook] = {
    4: Codebook(4, (0.5009765625, 1.53125, 2.640625, 3.890625, 5.328125, 7.0078125, 8.984375, 11.328125), 4.2098),
    3: Codebook(3, (0.5029296875, 1.583984375, 2.8828125, 4.5546875), 2.12107),
}
"""Values of the cubic in half-precision arithmetic, to the bit, keyed by bits."""


KEY_PARTS = {8: 1, 5: 4, 4: 2, 3: 4}
KEY_PARTS_OF_WORD = {5: 2, 4: 2, 3: 4}
"""Parts of keys that share a 32-bit word."""
VALUE_PARTS = {8: 2, 4: 4, 3: 8}


class QuantizedHeads(NamedTuple):
    """Some heads in their page layout."""

    codes_XB: torch.Tensor
    """uint8."""
    signs_XS: torch.Tensor | None
    """uint8: the odd bits, which do not fit in `codes_XB`; None unless 3 or 5 bits."""
    scale_X: torch.Tensor
    """float16."""


def quantize_keys(y_XD: torch.Tensor, bits: int) -> QuantizedHeads:
    """Quantize keys, already rotated if `bits` < 8. The quantized head has the length of the true one."""
    if bits == 8:
        return _quantize_fp8(y_XD, parts=KEY_PARTS[8])
    rising_XD, values_XD = nearest_codes(y_XD, KEY_CODEBOOKS[bits])
    norm_X = y_XD.float().norm(dim=-1)
    scale_X = (norm_X / values_XD.norm(dim=-1)).clamp(max=FP16_MAX).half()
    return QuantizedHeads(*_pack_keys(rising_XD, bits), scale_X)


def quantize_values(y_XD: torch.Tensor, bits: int) -> QuantizedHeads:
    """Quantize values, already rotated if `bits` < 8. The quantized head is the nearest to the true one."""
    if bits == 8:
        return _quantize_fp8(y_XD, parts=VALUE_PARTS[8])
    rising_XD, values_XD = nearest_codes(y_XD, VALUE_CODEBOOKS[bits])
    scale_X = (y_XD.float() * values_XD).sum(-1) / values_XD.square().sum(-1)
    return QuantizedHeads(*_pack_values(rising_XD, bits), scale_X.clamp(-FP16_MAX, FP16_MAX).half())


def dequantize_keys(heads: QuantizedHeads, bits: int, head_dim: int) -> torch.Tensor:
    """Return float32 [X, D], in the rotation of the quantized keys."""
    if bits == 8:
        return _dequantize_fp8(heads, parts=KEY_PARTS[8])
    magnitudes = KEY_CODEBOOKS[bits].magnitudes
    by_code = (*magnitudes, *(-magnitude for magnitude in magnitudes))
    return looked_up(_unpack_keys(heads, bits), by_code) * heads.scale_X.float().unsqueeze(-1)


def dequantize_values(heads: QuantizedHeads, bits: int, head_dim: int) -> torch.Tensor:
    """Return float32 [X, D], in the rotation of the quantized values."""
    if bits == 8:
        return _dequantize_fp8(heads, parts=VALUE_PARTS[8])
    values_XD = looked_up(_unpack_values(heads, bits), VALUE_CODEBOOKS[bits].values)
    return values_XD * heads.scale_X.float().unsqueeze(-1)


def part_dims(num_parts: int, head_dim: int) -> torch.Tensor:
    """Return [parts, columns]: the coordinate of each part and column."""
    per_half = max(1, num_parts // 2)
    part_P1, column_C = torch.arange(num_parts).unsqueeze(1), torch.arange(head_dim // num_parts)
    return part_P1 // per_half * (head_dim // 2) + per_half * column_C + part_P1 % per_half


def nearest_codes(y_XD: torch.Tensor, codebook: Codebook) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes (int32) and their values (float32). A head of zeros has equal codes, a head of NaN has zeros."""
    y_XD = y_XD.float()
    norm_X1 = y_XD.norm(dim=-1, keepdim=True)
    factor_X1 = codebook.gain * y_XD.shape[-1] ** 0.5 / torch.where(norm_X1 > 0, norm_X1, 1.0)
    boundaries = torch.tensor(codebook.boundaries, device=y_XD.device)
    scaled_XD = (y_XD * factor_X1).nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)
    rising_XD = torch.bucketize(scaled_XD, boundaries, out_int32=True)
    return rising_XD, looked_up(rising_XD, codebook.values)


def looked_up(codes_XD: torch.Tensor, numbers: tuple[float, ...]) -> torch.Tensor:
    """Return the float32 number that each int32 code stands for."""
    table = torch.tensor(numbers, device=codes_XD.device)
    return table.index_select(0, codes_XD.reshape(-1)).view(codes_XD.shape)


def _quantize_fp8(y_XD: torch.Tensor, parts: int) -> QuantizedHeads:
    scale_X = (y_XD.float().abs().amax(dim=-1) / FP8_MAX).clamp(max=FP16_MAX).half()
    factor_X1 = torch.where(scale_X == 0, 0.0, 1.0 / scale_X.float()).unsqueeze(-1)
    scaled_XD = (y_XD.float() * factor_X1).clamp(-FP8_MAX, FP8_MAX)
    codes_XPC = _by_part(scaled_XD.to(torch.float8_e4m3fn).view(torch.uint8), parts)
    return QuantizedHeads(codes_XPC.transpose(-1, -2).flatten(-2), None, scale_X)


def _dequantize_fp8(heads: QuantizedHeads, parts: int) -> torch.Tensor:
    codes_XPC = heads.codes_XB.unflatten(-1, (-1, parts)).transpose(-1, -2)
    numbers_XD = _from_parts(codes_XPC).view(torch.float8_e4m3fn).float()
    return numbers_XD * heads.scale_X.float().unsqueeze(-1)


def _by_part(x_XD: torch.Tensor, num_parts: int) -> torch.Tensor:
    """Return [X, parts, columns], ordered as `part_dims`; a view if possible."""
    halves, per_half = min(num_parts, 2), max(1, num_parts // 2)
    return x_XD.unflatten(-1, (halves, -1, per_half)).transpose(-1, -2).flatten(-3, -2)


def _from_parts(x_XPC: torch.Tensor) -> torch.Tensor:
    """Invert `_by_part`: [X, D]."""
    num_parts = x_XPC.shape[-2]
    halves, per_half = min(num_parts, 2), max(1, num_parts // 2)
    return x_XPC.unflatten(-2, (halves, per_half)).transpose(-1, -2).flatten(-3)


def _bytes_of(words_XW: torch.Tensor) -> torch.Tensor:
    """View words as uint8, little-endian."""
    return words_XW.contiguous().view(torch.uint8)


def _words_of(bytes_XB: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Read words as int32; the bits above a word repeat its highest bit, and are not used."""
    return bytes_XB.contiguous().view(dtype).int()


def _magnitude_bit(part: int, column: int) -> int:
    """Return the lowest bit of a key's magnitude in its word; `part` and `column` count within the word."""
    return 4 * column + 16 * (part % 2) + 2 * (part // 2)


def _sign_bit(part: int, column: int) -> int:
    """Return the bit of a 4-bit key's sign in its word."""
    return 8 * column + 7 - 4 * part


def _key_shifts(bit: Callable[[int, int], int], bits: int, device: torch.device) -> torch.Tensor:
    """Return [parts, 1, 4] to shift words by part, word and column."""
    of_word = KEY_PARTS_OF_WORD[bits]
    shifts = [[[bit(part % of_word, column) for column in range(4)]] for part in range(KEY_PARTS[bits])]
    return torch.tensor(shifts, dtype=torch.int32, device=device)


def _part_numbers(num_parts: int, device: torch.device) -> torch.Tensor:
    return torch.arange(num_parts, dtype=torch.int32, device=device).unsqueeze(1)


def _joined(fields: torch.Tensor, dim: int | tuple[int, ...]) -> torch.Tensor:
    """Join fields that share no bit into one int32; a sum above 31 bits wraps as intended."""
    return fields.sum(dim, dtype=torch.int32)


def _pack_keys(rising_XD: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    half = 2 ** (bits - 1)
    is_negative_XD = rising_XD < half
    magnitude_XD = torch.where(is_negative_XD, half - 1 - rising_XD, rising_XD - half)
    magnitude_XPW4 = _by_part(magnitude_XD, KEY_PARTS[bits]).unflatten(-1, (-1, 4))
    sign_XPC = _by_part(is_negative_XD.int(), KEY_PARTS[bits])
    fields_XPW4 = magnitude_XPW4 << _key_shifts(_magnitude_bit, bits, rising_XD.device)
    if bits == 4:
        fields_XPW4 |= sign_XPC.unflatten(-1, (-1, 4)) << _key_shifts(_sign_bit, bits, rising_XD.device)
    words_XW = _joined(fields_XPW4.unflatten(-3, (-1, KEY_PARTS_OF_WORD[bits])), (-3, -1)).flatten(-2)
    if bits not in BITS_WITH_SIGNS:
        return _bytes_of(words_XW), None
    nibble_XC = _joined(sign_XPC << _part_numbers(KEY_PARTS[bits], rising_XD.device), -2)
    low_XS, high_XS = nibble_XC.chunk(2, dim=-1)
    return _bytes_of(words_XW), (low_XS | high_XS << 4).to(torch.uint8)


def _unpack_keys(heads: QuantizedHeads, bits: int) -> torch.Tensor:
    """Return [X, D]: magnitudes with the sign above. Shifts run in turn: broadcast, they take three times as long."""
    num_parts, of_word, half = KEY_PARTS[bits], KEY_PARTS_OF_WORD[bits], 2 ** (bits - 1)
    pieces = _words_of(heads.codes_XB, torch.int32).chunk(num_parts // of_word, dim=-1)

    def field(part: int, column: int) -> torch.Tensor:
        words_XW = pieces[part // of_word]
        magnitude_XW = words_XW >> _magnitude_bit(part % of_word, column) & half - 1
        return magnitude_XW | (words_XW >> _sign_bit(part, column) & 1) * half if bits == 4 else magnitude_XW

    parts = [torch.stack([field(part, column) for column in range(4)], -1).flatten(-2) for part in range(num_parts)]
    if bits in BITS_WITH_SIGNS:
        assert heads.signs_XS is not None, f"keys of {bits} bits have sign bits"
        signs_XS = heads.signs_XS.int()
        nibble_XC = torch.cat((signs_XS, signs_XS >> 4), dim=-1)
        parts = [part_XC | (nibble_XC >> part & 1) * half for part, part_XC in enumerate(parts)]
    return _from_parts(torch.stack(parts, dim=-2))


def _pack_values(rising_XD: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    codes_XPC = _by_part(rising_XD, VALUE_PARTS[bits])
    part_P1 = _part_numbers(VALUE_PARTS[bits], rising_XD.device)
    if bits == 4:
        return _bytes_of(_joined(codes_XPC << 4 * part_P1, -2).to(torch.int16)), None
    words_XC = _joined((codes_XPC & 3) << 2 * part_P1, -2)
    even_XS, odd_XS = _joined(codes_XPC >> 2 << 2 * part_P1, -2).chunk(2, dim=-1)
    return _bytes_of(words_XC.to(torch.int16)), _bytes_of((even_XS | odd_XS << 1).to(torch.int16))


def _unpack_values(heads: QuantizedHeads, bits: int) -> torch.Tensor:
    """Return [X, D]: codes in rising order of value."""
    words_XC = _words_of(heads.codes_XB, torch.int16)
    if bits == 4:
        return _from_parts(torch.stack([words_XC >> 4 * part & 15 for part in range(VALUE_PARTS[4])], dim=-2))
    assert heads.signs_XS is not None, "values of 3 bits have sign bits"
    signs_XS = _words_of(heads.signs_XS, torch.int16)
    high_XC = torch.cat((signs_XS, signs_XS >> 1), dim=-1)
    parts = [words_XC >> 2 * part & 3 | (high_XC >> 2 * part & 1) * 4 for part in range(VALUE_PARTS[3])]
    return _from_parts(torch.stack(parts, dim=-2))
