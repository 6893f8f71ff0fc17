"""Blocks of GGUF files: bits of the `gguf` package, nearest codes, values that every reader agrees on."""

import gguf
import numpy as np
import torch

from for_each import for_each
from holdfast.kernels.load.quantize_blocks import STEP_ELEMENTS, quantize_blocks, quantize_blocks_reference
from holdfast.loading.gguf.dequantize import dequantize
from holdfast.loading.writing.gguf_plan import TYPES_BY_NAME

KINDS = ("Q4_0", "Q5_0", "Q8_0", "Q4_K", "Q6_K")
SAME_AS_PACKAGE = ("Q4_0", "Q5_0", "Q8_0")
WIDTH = 512


def rows(name: str) -> torch.Tensor:
    """Eight rows of a kind on which quantizers go wrong."""
    generator = torch.Generator().manual_seed(7)
    normal = torch.randn(8, WIDTH, generator=generator)
    lone = torch.zeros(8, WIDTH)
    lone[:, 77] = -3.5
    return {
        "normal": normal * 0.05,
        "heavy tails": normal**5,
        "zeros": torch.zeros(8, WIDTH),
        "equal": torch.full((8, WIDTH), 0.37),
        "equal and negative": torch.full((8, WIDTH), -0.37),
        "far from zero": 1 + 0.01 * normal,
        "far below zero": -1 + 0.01 * normal,
        "one of many": lone,
        "an outlier": torch.cat((normal[:, 1:] * 1e-3, torch.full((8, 1), 5.0)), dim=1),
        "whole and half steps": torch.arange(-8 * WIDTH // 2, 8 * WIDTH // 2).view(8, WIDTH) * 0.5,
        "large": normal * 6e3,
        "below float16": normal * 1e-9,
        "subnormal": normal * 1e-39,
        "ties of magnitude": normal.sign() * 2.0,
        "ties of codes": torch.cat((torch.full((16, 1), 127.0), torch.arange(255).repeat(16, 1) % 126 + 0.5), 1).view(
            8, -1
        ),
        "almost equal": 1 + 1e-5 * normal,
    }[name]


CASES = ("normal", "heavy tails", "zeros", "equal", "equal and negative", "far from zero", "far below zero")
CASES += (
    "one of many",
    "an outlier",
    "whole and half steps",
    "large",
    "below float16",
    "ties of magnitude",
    "ties of codes",
)
CASES += ("almost equal",)


def package_type(kind: str) -> gguf.GGMLQuantizationType:
    return getattr(gguf.GGMLQuantizationType, kind)


def decoded(blocks: torch.Tensor, kind: str) -> torch.Tensor:
    """The values of blocks, on which our reader and the package agree to the bit."""
    ours = torch.empty(len(blocks) * TYPES_BY_NAME[kind].block_elements)
    dequantize(blocks.reshape(-1), TYPES_BY_NAME[kind], ours)
    theirs = gguf.quants.dequantize(blocks.numpy().reshape(1, -1), package_type(kind)).reshape(-1)
    np.testing.assert_array_equal(ours.numpy(), theirs)
    return ours.view(-1, WIDTH)


@for_each("kind", SAME_AS_PACKAGE)
@for_each("case", CASES)
def test_quantize_equals_the_package_to_the_bit(kind, case):
    values = rows(case)
    theirs = gguf.quants.quantize(values.numpy(), package_type(kind))
    np.testing.assert_array_equal(quantize_blocks(values, kind).numpy().reshape(theirs.shape), theirs)


@for_each("kind", KINDS)
@for_each("case", [*CASES, "subnormal"])
def test_quantize_blocks_equals_the_reference_to_the_bit(kind, case, native):
    """Also a last company of blocks that fills no vector, and zeros of both signs."""
    values = rows(case)
    for some in (values, values[:1, :256], values[:, :256].contiguous(), values * -1.0):
        assert torch.equal(quantize_blocks(some, kind), quantize_blocks_reference(some, kind)), f"{kind} {case}"


def test_quantize_blocks_of_many_normal_weights_equal_the_reference(native):
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(512, 2048, generator=generator) * torch.rand(512, 1, generator=generator).pow(8)
    for kind in KINDS:
        assert torch.equal(quantize_blocks(values, kind), quantize_blocks_reference(values, kind)), kind


@for_each("kind", KINDS)
@for_each("case", [*CASES, "subnormal"])
def test_quantize_values_are_finite_and_read_alike(kind, case):
    assert bool(decoded(quantize_blocks(rows(case), kind), kind).isfinite().all())


WORST = {"Q4_0": 1 / 8, "Q5_0": 1 / 16, "Q8_0": 1 / 250, "Q4_K": 1 / 12, "Q6_K": 1 / 25}
"""Largest error of a value over the largest magnitude of its block."""
SUBNORMAL = 3e-5
"""What the steps of the smallest float16 scales come to, times sub-scale and code."""


@for_each("kind", KINDS)
@for_each("case", [case for case in CASES if case != "below float16"])
def test_quantize_error_is_bounded_by_the_largest_of_a_block(kind, case):
    values = rows(case)
    size = 32 if TYPES_BY_NAME[kind].block_elements == 32 else 256
    errors = (decoded(quantize_blocks(values, kind), kind) - values).view(-1, size).abs().amax(1)
    largest = values.reshape(-1, size).abs().amax(1)
    assert bool((errors <= largest * (WORST[kind] + 1e-3) + SUBNORMAL).all())


def q4_k_fields(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scales and minima by 32 elements, and codes, by the formula of the format: d * s * q - dmin * m."""
    halves = blocks[:, :4].copy().view(np.float16).astype(np.float32)
    packed = blocks[:, 4:16].astype(np.int32)
    scales, minima = np.zeros((len(blocks), 8), np.float32), np.zeros((len(blocks), 8), np.float32)
    for j in range(8):
        if j < 4:
            scale, least = packed[:, j] & 63, packed[:, j + 4] & 63
        else:
            scale = packed[:, j + 4] & 15 | packed[:, j - 4] >> 6 << 4
            least = packed[:, j + 4] >> 4 | packed[:, j] >> 6 << 4
        scales[:, j], minima[:, j] = scale * halves[:, 0], least * halves[:, 1]
    pairs = blocks[:, 16:].reshape(-1, 4, 1, 32)
    codes = np.concatenate((pairs & 15, pairs >> 4), axis=2).reshape(-1, 8, 32)
    return scales, minima, codes


def q6_k_fields(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scales by 16 elements and codes from -32, by the formula of the format: d * s * (q - 32)."""
    low, high = blocks[:, :128].reshape(-1, 2, 64), blocks[:, 128:192].reshape(-1, 2, 32)
    codes = np.zeros((len(blocks), 2, 4, 32), np.int32)
    for quarter in range(4):
        start = quarter % 2 * 32
        codes[:, :, quarter] = low[:, :, start : start + 32] >> quarter // 2 * 4 & 15
        codes[:, :, quarter] |= (high >> 2 * quarter & 3).astype(np.int32) << 4
    steps = blocks[:, 192:208].copy().view(np.int8).astype(np.float32)
    steps *= blocks[:, 208:210].copy().view(np.float16).astype(np.float32)
    return steps, codes.reshape(-1, 16, 16) - 32


@for_each("case", ["normal", "heavy tails", "far from zero", "an outlier", "one of many"])
def test_quantize_q4_k_codes_are_the_nearest_for_their_scales(case):
    values = rows(case).numpy().reshape(-1, 8, 32)
    scales, minima, codes = q4_k_fields(quantize_blocks(rows(case), "Q4_K").numpy())
    choices = scales[..., None, None] * np.arange(16, dtype=np.float32) - minima[..., None, None]
    errors = np.abs(choices - values[..., None])
    taken = np.take_along_axis(errors, codes[..., None].astype(np.int64), axis=-1)[..., 0]
    assert (taken <= errors.min(axis=-1) * (1 + 1e-5) + 1e-7).all()


@for_each("case", ["normal", "heavy tails", "far from zero", "an outlier", "one of many"])
def test_quantize_q6_k_codes_are_the_nearest_for_their_scales(case):
    values = rows(case).numpy().reshape(-1, 16, 16)
    steps, codes = q6_k_fields(quantize_blocks(rows(case), "Q6_K").numpy())
    errors = np.abs(steps[..., None, None] * np.arange(-32, 32, dtype=np.float32) - values[..., None])
    taken = np.take_along_axis(errors, (codes[..., None] + 32).astype(np.int64), axis=-1)[..., 0]
    assert (taken <= errors.min(axis=-1) * (1 + 1e-5) + 1e-7).all()


def test_quantize_q4_k_is_nearer_than_even_steps_between_extremes():
    """Plain rounding: scale and minimum by 32 elements, in float32, from the smallest to the largest value."""
    values = rows("normal")
    subs = values.view(-1, 32)
    low, high = subs.amin(1, keepdim=True).clamp(max=0), subs.amax(1, keepdim=True)
    step = (high - low) / 15
    plain = ((subs - low) / step).round() * step + low
    ours = decoded(quantize_blocks(values, "Q4_K"), "Q4_K").view(-1, 32)
    assert float((ours - subs).norm()) < 0.97 * float((plain - subs).norm())


RELATIVE = {"Q4_0": 0.09, "Q5_0": 0.045, "Q8_0": 0.006, "Q4_K": 0.075, "Q6_K": 0.02}


@for_each("kind, most", RELATIVE.items())
def test_quantize_normal_weights_lose_as_little_as_measured(kind, most):
    values = rows("normal")
    error = decoded(quantize_blocks(values, kind), kind) - values
    assert 0.8 * most < float(error.norm() / values.norm()) < most


@for_each("kind", KINDS)
def test_quantize_blocks_do_not_depend_on_others(kind):
    """Rows alone and together, over the seams of steps; a single block."""
    num_rows = 2 * STEP_ELEMENTS // WIDTH + 3
    values = torch.randn(num_rows, WIDTH, generator=torch.Generator().manual_seed(1))
    together = quantize_blocks(values, kind).view(num_rows, -1)
    for row in (0, 1, STEP_ELEMENTS // WIDTH - 1, STEP_ELEMENTS // WIDTH, num_rows - 1):
        alone = quantize_blocks(values[row : row + 1], kind).view(-1)
        assert torch.equal(alone, together[row]), row
    size = TYPES_BY_NAME[kind].block_elements
    assert torch.equal(quantize_blocks(values[0, :size], kind)[0], together[0, : TYPES_BY_NAME[kind].block_bytes])


def test_quantize_blocks_of_weights_on_a_grid_equal_the_reference(native):
    """Weights that were quantized before tie several trial ranges, so a last bit of any sum would choose another one."""
    generator = torch.Generator().manual_seed(0)
    codes = (torch.randn(2048, 8, 32, generator=generator) * 3 + 7.5).round().clamp(0, 15)
    scales = (torch.rand(2048, 8, 1, generator=generator) * 0.05 + 0.01).half().float()
    minima = (-7.5 * scales * (1 + 0.1 * torch.randn(2048, 8, 1, generator=generator))).half().float()
    values = (codes * scales + minima).view(2048, 256)
    for kind in ("Q4_K", "Q6_K"):
        assert torch.equal(quantize_blocks(values, kind), quantize_blocks_reference(values, kind)), kind
