"""Quantize and dequantize weights in every scheme, in plain torch: the bitwise reference of the kernels.

R rows, K columns, I blocks of rows, J blocks of columns

Scales multiply codes: w is about code * scale. Quotients are true divisions, rounded once to float32, then to the
code, ties to even. Zeros have a scale too, and zero codes. Numbers that are not finite do not affect a scale: an
infinity becomes the largest code of its sign, a NaN e4m3's NaN (0x7F), or zero if codes have no NaN.
"""

import torch
import torch.nn.functional as F

from holdfast.quant.quantized_weight import QuantizedWeight
from holdfast.quant.weight_schemes import WeightScheme

E4M3_MAX = 448.0
E4M3_NAN = 0x7F
LEAST_E4M3_SCALE = 1.0 / (448.0 * 512.0)
"""Least scale of e4m3 codes, so that zeros have one."""
INT8_MAX = 127.0
LEAST_INT8_SCALE = 2.0**-126
"""The least normal number: below it division is slow or, on some hardware, wrong."""
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of codes 0 to 7; codes 8 to 15 are their negatives."""
E2M1_LIMITS = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))
"""Midpoints of neighbouring values, and True if a number there rounds up: ties go to the even code."""
E8M0_NAN = 255
E8M0_MOST = 252
"""Six times this scale is still finite; only numbers from 2.55e38 on would need more."""


def find_scales(values_RK: torch.Tensor, scheme: WeightScheme, amax: torch.Tensor | None = None) -> torch.Tensor:
    """Return scales [R] or [I, J] of float32 rows; `amax` [1] is the tensor's amax, for a scheme that needs it."""
    if scheme.is_whole_tensor:
        assert amax is not None, f"{scheme.name}: a scale needs the amax of the whole tensor"
        return _scales_of(amax.expand(values_RK.shape[0]), scheme)
    if scheme.block_columns == 0:
        return _scales_of(largest_finite(values_RK), scheme)
    return _scales_of(largest_finite(_in_blocks(values_RK, scheme)), scheme)


def largest_finite(values: torch.Tensor) -> torch.Tensor:
    """Return the largest finite magnitude along the last dimension; 0 if there is none."""
    if values.shape[-1] == 0:
        return values.new_zeros(values.shape[:-1])
    least, most = values.aminmax(dim=-1)
    amax = torch.maximum(-least, most)
    if not bool(amax.isfinite().all()):
        amax = torch.nan_to_num(values, 0.0, 0.0, 0.0).abs_().amax(-1)
    return amax.abs_()  # not -0


def encode(values_RK: torch.Tensor, scales: torch.Tensor, scheme: WeightScheme) -> torch.Tensor:
    """Return the codes of float32 rows under given scales: [R, K / codes_per_byte]."""
    if scheme.scale_is_power_of_two:
        # Multiplying by 2^(127 - e) is exact, and gives a normal number for every scale in use.
        factors = ((254 - scales.to(torch.int32)) << 23).view(torch.float32)
        return _e2m1_codes(values_RK * _by_column(factors, scheme, values_RK.shape))
    quotients = values_RK / _by_column(scales, scheme, values_RK.shape)
    if scheme.code_dtype == "int8":
        quotients.round_().clamp_(-INT8_MAX, INT8_MAX)
        return torch.nan_to_num(quotients, 0.0).to(torch.int8)
    is_nan = quotients.isnan()
    # Beyond 464 some versions of torch cast to NaN.
    codes = quotients.clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    codes.view(torch.uint8).masked_fill_(is_nan, E4M3_NAN)
    return codes


def dequantize(weight: QuantizedWeight, rows: tuple[int, int] | None = None) -> torch.Tensor:
    """Return rows [start, end) of a weight as float32 [R, K], leading dimensions counted as rows; None: all."""
    num_columns = weight.shape[-1]
    codes_RB = weight.codes.view(-1, weight.codes.shape[-1])
    start, end = rows or (0, codes_RB.shape[0])
    scheme = weight.scheme
    values_RK = _numbers_of(codes_RB[start:end], scheme)
    if scheme.block_columns == 0:
        return values_RK.mul_(weight.scales.view(-1)[start:end, None])
    block_start, block_end = start // scheme.block_rows, -(-end // scheme.block_rows)
    scales_IJ = weight.scales.view(-1, weight.scales.shape[-1])[block_start:block_end]
    if scheme.scale_is_power_of_two:
        scales_IJ = e8m0_values(scales_IJ)
    skipped = start - block_start * scheme.block_rows
    scales_RK = _by_column(scales_IJ, scheme, (skipped + end - start, num_columns))
    return values_RK.mul_(scales_RK[skipped:])


def e8m0_values(scales: torch.Tensor) -> torch.Tensor:
    """Convert exponent bytes to powers of two: 2^(e - 127), and NaN for 255."""
    exponents = scales.to(torch.int32)
    bits = torch.where(exponents == 0, 1 << 22, exponents << 23)  # 2^-127 is below the normal numbers
    return bits.masked_fill_(exponents == E8M0_NAN, 0x7FC00000).view(torch.float32)


def _scales_of(amax: torch.Tensor, scheme: WeightScheme) -> torch.Tensor:
    if scheme.code_dtype == "int8":
        return (amax / INT8_MAX).clamp_min_(LEAST_INT8_SCALE)
    if not scheme.scale_is_power_of_two:
        return (amax / E4M3_MAX).clamp_min_(LEAST_E4M3_SCALE)
    # The power of two below the amax, or from 1.75 times that on the one above: few numbers exceed 6, the largest code.
    exponents = (amax.view(torch.int32) + (1 << 21)) >> 23
    return (exponents - 2).clamp_(0, E8M0_MOST).to(torch.uint8)


def _in_blocks(values_RK: torch.Tensor, scheme: WeightScheme) -> torch.Tensor:
    """Return [I, J, block_rows * block_columns], padded with zeros after the last rows and columns."""
    num_rows, num_columns = values_RK.shape
    width, height = scheme.block_columns, scheme.block_rows
    x = F.pad(values_RK, (0, -num_columns % width, 0, -num_rows % height))
    num_row_blocks, num_column_blocks = x.shape[0] // height, x.shape[1] // width
    x = x.view(num_row_blocks, height, num_column_blocks, width).transpose(1, 2)
    return x.reshape(num_row_blocks, num_column_blocks, height * width)


def _by_column(scales: torch.Tensor, scheme: WeightScheme, shape: tuple[int, ...] | torch.Size) -> torch.Tensor:
    """Expand scales to rows and columns of values: [R, 1] or [R, K]."""
    num_rows, num_columns = shape
    if scheme.block_columns == 0:
        return scales[:, None]
    scales_RJ = scales if scheme.block_rows == 1 else scales.repeat_interleave(scheme.block_rows, dim=0)[:num_rows]
    return scales_RJ.repeat_interleave(scheme.block_columns, dim=1)[:, :num_columns]


def _e2m1_codes(values_RK: torch.Tensor) -> torch.Tensor:
    """Return codes, two to a byte, the even column in the low half; a zero has no sign."""
    sizes = values_RK.abs()
    codes = torch.zeros(values_RK.shape, dtype=torch.uint8, device=values_RK.device)
    for limit, is_upper in E2M1_LIMITS:
        codes += sizes >= limit if is_upper else sizes > limit
    codes += 8 * ((codes > 0) & (values_RK < 0)).to(torch.uint8)
    return codes[:, 0::2] | codes[:, 1::2] << 4


def _numbers_of(codes_RB: torch.Tensor, scheme: WeightScheme) -> torch.Tensor:
    """Return codes as float32 without their scales: [R, K]."""
    if scheme.codes_per_byte == 1:
        return codes_RB.to(torch.float32)
    values = torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES)], device=codes_RB.device)
    pairs = torch.stack([values.repeat(16), values.repeat_interleave(16)], dim=1)
    return pairs.index_select(0, codes_RB.reshape(-1).to(torch.int32)).view(codes_RB.shape[0], 2 * codes_RB.shape[1])
