"""Codebooks: the few values that a coordinate of a rotated head may take; no torch.

A head that was rotated and divided by its norm has coordinates that are nearly Gaussian, so one codebook serves all heads.
The best one (Lloyd-Max) has values that no instruction makes cheaply. These have, and lose next to nothing by it:

                mean squared error of N(0, 1)      4 bits             3 bits
    Lloyd-Max                                      0.009501           0.034548
    keys: values that are e4m3 numbers             0.009569 (+0.7 %)  0.034589 (+0.1 %)     looked up by byte permutation
    values: t + beta t^3 in half precision         0.009685 (+1.9 %)  0.034618 (+0.2 %)     three packed multiplications
"""

from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise

CUBIC_4_BITS = 0.00907135009765625
CUBIC_3_BITS = 0.024566650390625
"""beta of the cubic codebooks, as float16 has them: a code n stands for t + beta t^3, t = n - (number of codes - 1) / 2."""
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
    """A standard normal number times this is on the codebook's scale."""

    @property
    def values(self) -> tuple[float, ...]:
        """By rising code."""
        return (*(-value for value in reversed(self.magnitudes)), *self.magnitudes)

    @property
    def boundaries(self) -> tuple[float, ...]:
        """Half way between neighbours: a number above i of them has code i."""
        values = self.values
        return tuple((low + high) / 2 for low, high in pairwise(values))

    def code(self, number: float) -> int:
        """The code of one number on the codebook's scale."""
        return bisect_left(self.boundaries, number)


KEY_CODEBOOKS: dict[int, Codebook] = {
    4: Codebook(4, (0.140625, 0.40625, 0.6875, 1.0, 1.375, 1.75, 2.25, 3.0), 1.08555),
    3: Codebook(3, (0.1875, 0.5625, 1.0, 1.625), 0.752226),
}
"""e4m3 numbers, by bits."""
VALUE_CODEBOOKS: dict[int, Codebook] = {
    4: Codebook(4, (0.5009765625, 1.53125, 2.640625, 3.890625, 5.328125, 7.0078125, 8.984375, 11.328125), 4.2098),
    3: Codebook(3, (0.5029296875, 1.583984375, 2.8828125, 4.5546875), 2.12107),
}
"""What half-precision arithmetic makes of the cubic, to the bit, by bits."""
