"""int4 and NVFP4 of compressed-tensors: codes and scales by the publisher's formulas, re-derived here in numpy."""

import numpy as np
import torch

from for_each import for_each
from holdfast.loading.writing.codes import pack_int4, pack_nvfp4, second_scale

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float32)
WIDTH = 256


def rows(name: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    normal = torch.randn(6, WIDTH, generator=generator)
    mixed = normal * 0.02
    mixed[1] = 0
    mixed[2, :128] = 0
    mixed[3, 5] = 40.0
    return {"normal": normal * 0.05, "mixed": mixed, "zeros": torch.zeros(6, WIDTH), "tiny": normal * 1e-6}[name]


CASES = ("normal", "mixed", "zeros", "tiny")


def nibbles(packed: torch.Tensor) -> np.ndarray:
    """Four-bit fields of words or bytes, the lowest first."""
    raw = packed.numpy().view(np.uint8)
    return np.stack((raw & 15, raw >> 4), axis=-1).reshape(raw.shape[0], -1)


@for_each("dtype", [torch.bfloat16, torch.float16, torch.float32])
@for_each("case", CASES)
def test_pack_int4_codes_are_the_nearest_for_the_scale(dtype, case):
    values = rows(case)
    words, scales = pack_int4(values, dtype)
    assert (words.dtype, words.shape) == (torch.int32, (6, WIDTH // 8))
    assert (scales.dtype, scales.shape) == (dtype, (6, WIDTH // 128))
    grouped = values.numpy().reshape(6, -1, 128)
    wanted = torch.from_numpy(np.abs(grouped).max(-1) / np.float32(7.5)).to(dtype)
    assert torch.equal(scales, wanted)
    codes = nibbles(words).astype(np.float32).reshape(grouped.shape) - 8
    stored = scales.float().numpy()[..., None]
    errors = np.abs(grouped[..., None] - np.arange(-8, 8, dtype=np.float32) * stored[..., None])
    taken = np.abs(grouped - codes * stored)
    assert (taken <= errors.min(-1) * (1 + 1e-5) + 1e-6 * stored).all()


def test_pack_int4_first_code_is_in_the_low_bits():
    values = torch.zeros(1, 128)
    values[0, :8] = torch.tensor([-7.5, -7.0, -6.0, -5.0, -4.0, -3.0, -2.0, -1.0])
    words, scales = pack_int4(values, torch.float32)
    assert float(scales[0, 0]) == 1.0
    assert words[0, 0].item() == 0x76543210


@for_each("case", CASES)
def test_pack_nvfp4_codes_are_the_nearest_for_the_scales(case):
    values = rows(case)
    amax = float(values.abs().max())
    second = second_scale(amax)
    packed, scales = pack_nvfp4(values, second)
    assert (packed.dtype, packed.shape) == (torch.uint8, (6, WIDTH // 2))
    assert (scales.dtype, scales.shape) == (torch.float8_e4m3fn, (6, WIDTH // 16))
    if amax:
        assert second == np.float32(448 * 6) / np.float32(amax)
    grouped = values.numpy().reshape(6, -1, 16)
    wanted = np.minimum(np.abs(grouped).max(-1) / np.float32(6) * np.float32(second), np.float32(448))
    assert torch.equal(scales.view(torch.uint8), torch.from_numpy(wanted).to(torch.float8_e4m3fn).view(torch.uint8))
    stored = scales.float().numpy()[..., None] / np.float32(second)
    codes = nibbles(packed).reshape(grouped.shape)
    value = np.where(codes >= 8, -1, 1) * E2M1[codes & 7] * stored
    choices = np.concatenate((E2M1, -E2M1)) * stored[..., None]
    errors = np.abs(grouped[..., None] - choices)
    assert (np.abs(grouped - value) <= errors.min(-1) * (1 + 1e-5) + 1e-6 * stored).all()
    assert not ((codes == 8).any()), "a negative zero"


def test_pack_nvfp4_ties_go_to_even_codes_and_low_halves_come_first():
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5.0, -6.0]
    packed, scales = pack_nvfp4(torch.tensor([ties]), 1.0)
    assert float(scales[0, 0].float()) == 1.0
    assert nibbles(packed)[0].tolist() == [0, 2, 2, 4, 4, 6, 6, 7, 0, 10, 10, 12, 12, 14, 14, 15]
    assert packed[0, 0].item() == 0x20


def test_second_scale_of_zeros_divides_by_one():
    assert second_scale(0.0) == 1.0
    assert second_scale(2688.0) == 1.0
