"""CodeReader: coded heads as numbers in plain torch, fast: bits that belong together become an index, and a table gives the rest.

X any leading dimensions, D head dim, B bytes of a head's codes, C columns (quant/head_codes.py has the order of bits)

The numbers are those of quant/head_codes.py to the bit. A table's entry holds 2 or 4 coordinates as one element, since torch
copies single elements much faster than short rows. Coordinates stay in the order in which they are stored: attention does not
mind as long as queries follow the keys, and what comes out, which is little, is put in order.
"""

from itertools import product

import torch

from holdfast.quant.codebooks import KEY_CODEBOOKS, VALUE_CODEBOOKS
from holdfast.quant.head_codes import KEY_PARTS, VALUE_PARTS, CodedHeads, part_dims


class CodeReader:
    """Reads the keys and values of one format and head dim."""

    def __init__(self, key_bits: int, value_bits: int, head_dim: int, device: torch.device) -> None:
        self._key_bits = key_bits
        self._value_bits = value_bits
        key_tables = {4: _key_pairs_of_4_bits, 3: _key_quads_of_3_bits}
        value_tables = {4: _value_pairs_of_4_bits, 3: _value_quads_of_3_bits}
        self._key_table = key_tables[key_bits]().to(device) if key_bits < 8 else None
        self._value_table = value_tables[value_bits]().to(device) if value_bits < 8 else None
        self.key_order_D = _key_order(key_bits, head_dim).to(device)
        """The coordinate that each place of a key has."""
        order_D = part_dims(VALUE_PARTS[value_bits], head_dim).T.reshape(-1)
        self.value_places_D = order_D.argsort().to(device)
        """The place that each coordinate of a value has."""

    @property
    def num_bytes(self) -> int:
        """Of its tables and orders."""
        held = (self._key_table, self._value_table, self.key_order_D, self.value_places_D)
        return sum(tensor.nbytes for tensor in held if tensor is not None)

    def keys(self, heads: CodedHeads) -> torch.Tensor:
        """float32 [X, D], rotated as they were coded, in the order of `key_order_D`."""
        if self._key_table is None:
            numbers_XD = heads.codes_XB.view(torch.float8_e4m3fn).float()
        elif self._key_bits == 4:
            numbers_XD = _looked_up(_key_index_of_4_bits(heads.codes_XB), self._key_table)
        else:
            assert heads.signs_XS is not None, "keys of 3 bits have sign bits"
            numbers_XD = _looked_up(_key_index_of_3_bits(heads.codes_XB, heads.signs_XS), self._key_table)
        return numbers_XD.mul_(heads.scale_X.float().unsqueeze(-1))

    def values(self, heads: CodedHeads) -> torch.Tensor:
        """float32 [X, D], rotated as they were coded, each coordinate at its place in `value_places_D`."""
        if self._value_table is None:
            numbers_XD = heads.codes_XB.view(torch.float8_e4m3fn).float()
        elif self._value_bits == 4:
            numbers_XD = _looked_up(heads.codes_XB.int(), self._value_table)
        else:
            assert heads.signs_XS is not None, "values of 3 bits have sign bits"
            numbers_XD = _looked_up(_value_index_of_3_bits(heads.codes_XB, heads.signs_XS), self._value_table)
        return numbers_XD.mul_(heads.scale_X.float().unsqueeze(-1))


def _key_order(bits: int, head_dim: int) -> torch.Tensor:
    dims_PC = part_dims(KEY_PARTS[bits], head_dim)
    if bits == 4:  # a word has 4 columns of one part, then 4 of the other
        return dims_PC.unflatten(-1, (-1, 4)).transpose(0, 1).reshape(-1)
    return dims_PC.T.reshape(-1)


def _looked_up(index_XC: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    numbers = table.index_select(0, index_XC.reshape(-1)).view(torch.float32)
    return numbers.view(*index_XC.shape[:-1], index_XC.shape[-1] * table.element_size() // numbers.element_size())


def _key_index_of_4_bits(codes_XB: torch.Tensor) -> torch.Tensor:
    """Two coordinates a byte, each a magnitude below its sign. Signs lie 8 bits apart, so they move to the magnitudes' 4."""
    words_XW = codes_XB.contiguous().view(torch.int32)
    first_XW = _closer_signs(words_XW >> 4)
    second_XW = _closer_signs(words_XW) << 16
    return (words_XW & 0x77777777 | first_XW | second_XW).view(torch.uint8).int()


def _closer_signs(words_XW: torch.Tensor) -> torch.Tensor:
    """Bits 3, 11, 19 and 27 to bits 3, 7, 11 and 15; no others."""
    signs_XW = words_XW & 0x08080808
    signs_XW = (signs_XW | signs_XW >> 4) & 0x00880088
    return (signs_XW | signs_XW >> 8) & 0x8888


def _key_index_of_3_bits(codes_XB: torch.Tensor, signs_XS: torch.Tensor) -> torch.Tensor:
    """[X, C]: the magnitudes of parts 0, 2, 1 and 3 of a column, two bits each, then the signs of all."""
    shifts_4 = 4 * torch.arange(4, dtype=torch.int32, device=codes_XB.device)
    words_XW4 = codes_XB.contiguous().view(torch.int32).unsqueeze(-1) >> shifts_4
    magnitudes_XC = (words_XW4 & 15 | words_XW4 >> 12 & 240).flatten(-2)
    signs_XC = torch.cat((signs_XS & 15, signs_XS >> 4), dim=-1)
    return magnitudes_XC | signs_XC.int() << 8


def _value_index_of_3_bits(codes_XB: torch.Tensor, signs_XS: torch.Tensor) -> torch.Tensor:
    """[X, B]: the lower bits of 4 codes, then their highest bits, which lie 2 bits apart and move together."""
    highest_XB = torch.cat((signs_XS, signs_XS >> 1), dim=-1) & 0x55
    highest_XB = (highest_XB | highest_XB >> 1) & 0x33
    highest_XB = (highest_XB | highest_XB >> 2) & 0x0F
    return codes_XB.int() | highest_XB.int() << 8


def _elements(rows: list[tuple[float, ...]]) -> torch.Tensor:
    """Each row as one element of 8 or 16 bytes."""
    return torch.tensor(rows, dtype=torch.float32).view(torch.int64 if len(rows[0]) == 2 else torch.complex128).view(-1)


def _signed_magnitudes(bits: int) -> list[float]:
    """By sign and magnitude, the sign above."""
    magnitudes = KEY_CODEBOOKS[bits].magnitudes
    return [*magnitudes, *(-magnitude for magnitude in magnitudes)]


def _key_pairs_of_4_bits() -> torch.Tensor:
    return _elements([(first, second) for second, first in product(_signed_magnitudes(4), repeat=2)])


def _key_quads_of_3_bits() -> torch.Tensor:
    numbers = _signed_magnitudes(3)
    rows = []
    for signs, odd, even in product(range(16), repeat=3):
        magnitudes = (even & 3, odd & 3, even >> 2, odd >> 2)
        rows.append(tuple(numbers[magnitude | (signs >> j & 1) << 2] for j, magnitude in enumerate(magnitudes)))
    return _elements(rows)


def _value_pairs_of_4_bits() -> torch.Tensor:
    return _elements([(first, second) for second, first in product(VALUE_CODEBOOKS[4].values, repeat=2)])


def _value_quads_of_3_bits() -> torch.Tensor:
    values = VALUE_CODEBOOKS[3].values
    return _elements(
        [
            tuple(values[lower >> 2 * j & 3 | (highest >> j & 1) << 2] for j in range(4))
            for highest, lower in product(range(16), range(256))
        ]
    )
