"""float32 values to GGUF blocks, rounded to nearest: Q4_0, Q5_0, Q8_0, Q4_K and Q6_K.

The inverse of loading/gguf/dequantize.py. Q4_0, Q5_0 and Q8_0 equal the `gguf` package's to the bit. Blocks do not depend
on each other, so results do not depend on how rows are cut into steps. C and torch give the same bits.

N blocks, S sub-blocks in a block, E elements in a block or sub-block, T sub-blocks of a step
"""

from collections.abc import Callable

import torch

from holdfast.kernels.native_library import native_for

BLOCK_SIZES = {"Q4_0": (32, 18), "Q5_0": (32, 22), "Q8_0": (32, 34), "Q4_K": (256, 144), "Q6_K": (256, 210)}
"""Elements and bytes of a block of each type, in the order of native/quantize_blocks.c."""
STEP_ELEMENTS = 2**18
"""Elements per step: about 1 MiB for each intermediate tensor, of which the widest step holds a dozen."""
SUB_ELEMENTS_4, SUB_ELEMENTS_6 = 32, 16
"""Elements of a sub-block of Q4_K and of Q6_K."""
LARGEST_4, LARGEST_6BIT, MIDDLE_6 = 15, 63, 32
"""The largest code of four bits, and of the six bits of a sub-scale; the code of six bits that stands for 0."""
STRETCHES = tuple(step / 4 for step in range(-4, 5))
"""Trial ranges of a sub-block: its codes span 15 (of Q6_K, 32 to the extreme value) plus a stretch."""
LEAST_SPREAD = 1e-5
"""Codes that differ less, relative to their squares, are equal up to rounding: they determine no minimum."""


def quantize_blocks(values: torch.Tensor, kind: str) -> torch.Tensor:
    """Like the reference, in C if there is a compiler."""
    values = values.contiguous()
    library = native_for(values)
    if library is None:
        return quantize_blocks_reference(values, kind)
    blocks = _empty_blocks(values, kind)
    library.holdfast_quantize_blocks(values.data_ptr(), blocks.data_ptr(), list(BLOCK_SIZES).index(kind), len(blocks))
    return blocks


def quantize_blocks_reference(values: torch.Tensor, kind: str) -> torch.Tensor:
    """Return the blocks of finite float32 rows as bytes [N, B]; every row has whole blocks."""
    blocks = _empty_blocks(values, kind)
    block_elements = BLOCK_SIZES[kind][0]
    values_NE, step = values.reshape(-1, block_elements), STEP_ELEMENTS // block_elements
    for start in range(0, values_NE.shape[0], step):
        _FILLS[kind](values_NE[start : start + step], blocks[start : start + step])
    return blocks


def _empty_blocks(values: torch.Tensor, kind: str) -> torch.Tensor:
    assert values.dtype == torch.float32, f"{values.dtype=} is not float32"
    block_elements, block_bytes = BLOCK_SIZES[kind]
    assert values.shape[-1] % block_elements == 0, f"{values.shape=} has rows that no blocks of {block_elements} fill"
    return torch.empty(values.numel() // block_elements, block_bytes, dtype=torch.uint8)


def _halves(values_N: torch.Tensor) -> torch.Tensor:
    """Return the bytes of float16 numbers, [N, 2]."""
    return values_N.to(torch.float16).view(-1, 1).view(torch.uint8)


def _inverse(scales: torch.Tensor) -> torch.Tensor:
    """Return 1 / scale; 0 if the scale is 0, or so small that float32 has no inverse."""
    inverse = scales.reciprocal()
    return inverse.masked_fill_(inverse.isinf(), 0.0)


def _extremes(values_NE: torch.Tensor) -> torch.Tensor:
    """Return the value with the largest magnitude of each row, with its sign, [N, 1]."""
    return values_NE.gather(1, values_NE.abs().argmax(dim=1, keepdim=True))


def _pairs(codes_NE: torch.Tensor) -> torch.Tensor:
    """Put the first half of the codes of each row into low halves of bytes, and the second half into high ones."""
    half = codes_NE.shape[-1] // 2
    return codes_NE[..., :half] | codes_NE[..., half:] << 4


def _signed_codes(values_NE: torch.Tensor, middle: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales [N, 1] and codes from 0 to 2 middle - 1; the value of the largest magnitude gets code 0."""
    scales_N1 = _extremes(values_NE).div_(-middle)
    codes_NE = (values_NE * _inverse(scales_N1)).add_(middle + 0.5).to(torch.uint8)
    return scales_N1, codes_NE.clamp_(max=2 * middle - 1)


def _fill_q4_0(values_NE: torch.Tensor, blocks: torch.Tensor) -> None:
    """value = scale * (code - 8), with the scale of the extreme value over -8."""
    scales_N1, codes_NE = _signed_codes(values_NE, 8)
    blocks[:, :2] = _halves(scales_N1)
    blocks[:, 2:] = _pairs(codes_NE)


def _fill_q5_0(values_NE: torch.Tensor, blocks: torch.Tensor) -> None:
    """value = scale * (code - 16); bit i of four bytes is the fifth bit of element i."""
    scales_N1, codes_NE = _signed_codes(values_NE, 16)
    bits = torch.arange(8, dtype=torch.uint8)
    blocks[:, :2] = _halves(scales_N1)
    blocks[:, 2:6] = ((codes_NE >> 4).view(-1, 4, 8) << bits).sum(dim=2)
    blocks[:, 6:] = _pairs(codes_NE & 0x0F)


def _fill_q8_0(values_NE: torch.Tensor, blocks: torch.Tensor) -> None:
    """value = scale * code, with the scale of the amax over 127; halves round away from zero."""
    scales_N1 = values_NE.abs().amax(dim=1, keepdim=True).div_(127)
    scaled_NE = values_NE * _inverse(scales_N1)
    magnitudes_NE = scaled_NE.abs()
    floors_NE = magnitudes_NE.floor()
    rounded_NE = floors_NE + (magnitudes_NE - floors_NE >= 0.5)
    blocks[:, :2] = _halves(scales_N1)
    blocks[:, 2:] = rounded_NE.copysign_(scaled_NE).to(torch.int8).view(torch.uint8)


def _sums(values_ET: torch.Tensor) -> torch.Tensor:
    """Add all elements of each column, by halves, so that the order does not depend on the number of columns."""
    while values_ET.shape[0] > 1:
        half = values_ET.shape[0] // 2
        values_ET = values_ET[:half] + values_ET[half:]
    return values_ET[0]


def _fit_lines(values_ET: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scale and minimum of each column: value = scale * code - minimum, codes from 0 to 15, minimum >= 0.

    For codes of each trial range, scale and minimum are least squares. Large values weigh more: rms + magnitude.
    """
    low_T, high_T = values_ET.amin(dim=0), values_ET.amax(dim=0).clamp_(min=0)
    low_T = torch.where(low_T < 0, low_T, 0.0)  # a zero without sign: the minimum's bits follow from it
    mean_T = _sums(values_ET.square()) / values_ET.shape[0]
    # In float64, since torch's float32 root is off by a bit at times.
    weights_ET = values_ET.abs() + mean_T.double().sqrt().float()
    weighted_ET = weights_ET * values_ET
    sum_w, sum_x = _sums(weights_ET), _sums(weighted_ET)
    above_ET = values_ET - low_T
    ranges_T = _inverse(high_T - low_T)
    best_T = torch.full_like(low_T, torch.inf)
    scales_T, minima_T = torch.zeros_like(low_T), -low_T
    for stretch in STRETCHES:
        codes_ET = (above_ET * (ranges_T * (LARGEST_4 + stretch))).round_().clamp_(0, LARGEST_4)
        coded_ET = weights_ET * codes_ET
        sum_l, sum_ll, sum_xl = _sums(coded_ET), _sums(coded_ET.mul_(codes_ET)), _sums(codes_ET.mul_(weighted_ET))
        spread_T = sum_w * sum_ll - sum_l * sum_l
        inverse_T = _inverse(spread_T).masked_fill_(spread_T < LEAST_SPREAD * sum_w * sum_ll, 0.0)
        shift_T = (sum_ll * sum_x - sum_l * sum_xl).mul_(inverse_T)
        has_shift = shift_T < 0
        scale_T = torch.where(has_shift, (sum_w * sum_xl - sum_x * sum_l) * inverse_T, sum_xl * _inverse(sum_ll))
        shift_T = torch.where(has_shift, shift_T, 0.0)
        # The squared error less that of zeros, which is the same for every range.
        error_T = scale_T * (scale_T * sum_ll + 2 * (shift_T * sum_l - sum_xl)) + shift_T * (
            shift_T * sum_w - 2 * sum_x
        )
        is_better = (error_T < best_T) & (scale_T > 0)
        best_T = torch.where(is_better, error_T, best_T)
        scales_T = torch.where(is_better, scale_T, scales_T)
        minima_T = torch.where(is_better, -shift_T, minima_T)
    return scales_T, minima_T


def _fit_scales(values_ET: torch.Tensor) -> torch.Tensor:
    """Return the scale of each column for codes from -32 to 31, with the least squared error of the trial ranges."""
    extremes_T = _extremes(values_ET.t()).view(-1)
    inverse_T = _inverse(-extremes_T)
    best_T = torch.zeros_like(extremes_T)
    scales_T = extremes_T / -MIDDLE_6
    for stretch in STRETCHES:
        codes_ET = (values_ET * (inverse_T * (MIDDLE_6 + stretch))).round_().clamp_(-MIDDLE_6, MIDDLE_6 - 1)
        sum_xl, sum_ll = _sums(values_ET * codes_ET), _sums(codes_ET.square_())
        scale_T = sum_xl * _inverse(sum_ll)
        # What the codes take off the squared error of zeros.
        gain_T = scale_T * sum_xl
        is_better = gain_T > best_T
        best_T = torch.where(is_better, gain_T, best_T)
        scales_T = torch.where(is_better, scale_T, scales_T)
    return scales_T


def _six_bits(values_NS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the float16 scale of each block's numbers, all >= 0, and their codes from 0 to 63."""
    largest_N1 = values_NS.amax(dim=1, keepdim=True)
    codes_NS = (values_NS * (_inverse(largest_N1) * LARGEST_6BIT)).round_().clamp_(0, LARGEST_6BIT)
    return (largest_N1 / LARGEST_6BIT).to(torch.float16), codes_NS.to(torch.uint8)


def _fill_q4_k(values_NE: torch.Tensor, blocks: torch.Tensor) -> None:
    """value = scale * code - minimum by 32 elements; scales and minima are six-bit codes of two float16 scales."""
    subs_NSE = values_NE.view(values_NE.shape[0], -1, SUB_ELEMENTS_4)
    scales_T, minima_T = _fit_lines(subs_NSE.flatten(0, 1).t().contiguous())
    steps_N1, scales_NS = _six_bits(scales_T.view(subs_NSE.shape[:2]))
    shifts_N1, minima_NS = _six_bits(minima_T.view(subs_NSE.shape[:2]))
    # Codes follow from the scales and minima as stored.
    stored_NS, shift_NS = scales_NS * steps_N1.float(), minima_NS * shifts_N1.float()
    codes_NSE = (subs_NSE + shift_NS.unsqueeze(2)).mul_(_inverse(stored_NS).unsqueeze(2))
    codes_NSE = codes_NSE.round_().clamp_(0, LARGEST_4).to(torch.uint8)
    blocks[:, 0:2], blocks[:, 2:4] = _halves(steps_N1), _halves(shifts_N1)
    blocks[:, 4:8] = scales_NS[:, :4] | scales_NS[:, 4:] >> 4 << 6
    blocks[:, 8:12] = minima_NS[:, :4] | minima_NS[:, 4:] >> 4 << 6
    blocks[:, 12:16] = scales_NS[:, 4:] & 0x0F | minima_NS[:, 4:] << 4
    blocks[:, 16:] = _pairs(codes_NSE.view(-1, 4, 2 * SUB_ELEMENTS_4)).flatten(1)


def _fill_q6_k(values_NE: torch.Tensor, blocks: torch.Tensor) -> None:
    """value = scale * sub-scale * (code - 32) by 16 elements; the extreme sub-scale is -128."""
    subs_NSE = values_NE.view(values_NE.shape[0], -1, SUB_ELEMENTS_6)
    wanted_NS = _fit_scales(subs_NSE.flatten(0, 1).t().contiguous()).view(subs_NSE.shape[:2])
    scales_N1 = _extremes(wanted_NS).div_(-128)
    subs_NS = (wanted_NS * _inverse(scales_N1)).round_().clamp_(-128, 127)
    scales_N1 = scales_N1.to(torch.float16)
    steps_NS = _inverse(subs_NS * scales_N1.float())
    codes_NSE = (subs_NSE * steps_NS.unsqueeze(2)).round_()
    codes_NSE = codes_NSE.clamp_(-MIDDLE_6, MIDDLE_6 - 1).add_(MIDDLE_6).to(torch.uint8)
    codes = codes_NSE.view(-1, 2, 4, 32)
    blocks[:, :128] = _pairs((codes & 0x0F).view(-1, 2, 128)).flatten(1)
    high = codes >> 4
    blocks[:, 128:192] = (high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6).flatten(1)
    blocks[:, 192:208] = subs_NS.to(torch.int8).view(torch.uint8)
    blocks[:, 208:] = _halves(scales_N1)


_FILLS: dict[str, Callable[[torch.Tensor, torch.Tensor], None]] = {
    "Q4_0": _fill_q4_0,
    "Q5_0": _fill_q5_0,
    "Q8_0": _fill_q8_0,
    "Q4_K": _fill_q4_k,
    "Q6_K": _fill_q6_k,
}
