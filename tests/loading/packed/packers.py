"""Packed matrices by the publishers' formulas, with the weights that they stand for: loops over bits, no code under test.

Each function draws codes, scales and zero points at random. It returns the tensors of a module by suffix, and the float32
weight [N, K].
"""

from typing import NamedTuple

import numpy as np
import torch

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""AutoAWQ: the nibble i of a word, from the low bits, is column 8c + AWQ_ORDER[i]."""
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32)


class Packed(NamedTuple):
    """Tensors by suffix, and the weight."""

    tensors: dict[str, torch.Tensor]
    weight: torch.Tensor


def words(fields: np.ndarray, bits: int) -> np.ndarray:
    """Pack the last axis into 32-bit words, lowest bits first; missing codes are 0."""
    each = 32 // bits
    num_words = -(-fields.shape[-1] // each)
    packed = np.zeros((*fields.shape[:-1], num_words), dtype=np.uint32)
    for place in range(fields.shape[-1]):
        packed[..., place // each] |= (fields[..., place].astype(np.uint32)) << np.uint32(bits * (place % each))
    return packed


def as_int32(packed: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(packed.ravel().view(np.int32).copy()).reshape(packed.shape)


def scales_of(rng: np.random.Generator, shape: tuple[int, ...], dtype: torch.dtype = torch.float16) -> torch.Tensor:
    """Scales around 1/50, no two alike."""
    return torch.from_numpy(rng.uniform(0.005, 0.04, shape).astype(np.float32)).to(dtype)


def groups_of(num_columns: int, group: int) -> np.ndarray:
    return np.arange(num_columns) // (group if group > 0 else num_columns)


def weight_of(codes_NK: np.ndarray, zeros_NJ: np.ndarray, scales_NJ: torch.Tensor, group_K: np.ndarray) -> torch.Tensor:
    """(code - zero) * scale, each in float32."""
    whole = codes_NK.astype(np.float32) - zeros_NJ.astype(np.float32)[:, group_K]
    return torch.from_numpy(whole * scales_NJ.float().numpy()[:, group_K])


def awq(rng: np.random.Generator, num_rows: int, num_columns: int, group: int = 128) -> Packed:
    """AutoAWQ WQLinear_GEMM: qweight [K, N / 8], qzeros [K / g, N / 8], scales [K / g, N]."""
    group_K = groups_of(num_columns, group)
    num_groups = int(group_K[-1]) + 1
    codes_NK = rng.integers(0, 16, (num_rows, num_columns))
    zeros_NJ = rng.integers(0, 16, (num_rows, num_groups))
    scales_NJ = scales_of(rng, (num_rows, num_groups))

    def interleaved(fields_AN: np.ndarray) -> np.ndarray:
        mixed = np.empty_like(fields_AN)
        for column in range(fields_AN.shape[1]):
            mixed[:, column] = fields_AN[:, column // 8 * 8 + AWQ_ORDER[column % 8]]
        return mixed

    tensors = {
        ".qweight": as_int32(words(interleaved(codes_NK.T), 4)),
        ".qzeros": as_int32(words(interleaved(zeros_NJ.T), 4)),
        ".scales": scales_NJ.T.contiguous(),
    }
    return Packed(tensors, weight_of(codes_NK, zeros_NJ, scales_NJ, group_K))


def gptq(
    rng: np.random.Generator,
    num_rows: int,
    num_columns: int,
    group: int = 128,
    bits: int = 4,
    version: int = 1,
    sym: bool = False,
    order: bool = False,
    written: int | None = None,
) -> Packed:
    """GPTQModel: qweight [K / 8, N], qzeros [K / g, N / 8], one less in v1, scales [K / g, N], g_idx [K].

    `written` is the version that sets what lies in qzeros, if the settings name another.
    """
    group_K = groups_of(num_columns, group)
    num_groups = int(group_K[-1]) + 1
    if order:
        group_K = group_K[rng.permutation(num_columns)]
    codes_NK = rng.integers(0, 2**bits, (num_rows, num_columns))
    zeros_NJ = np.full((num_rows, num_groups), 2 ** (bits - 1))
    if not sym:
        zeros_NJ = rng.integers(0, 2**bits, zeros_NJ.shape)
    scales_NJ = scales_of(rng, (num_rows, num_groups))
    zero_words = words(zeros_NJ.T, bits)
    if (written or version) == 1:
        one_each = sum(1 << (bits * place) for place in range(32 // bits))
        zero_words = (zero_words.astype(np.int64) - one_each).astype(np.uint32)  # whole words: borrows cross codes
    tensors = {
        ".qweight": as_int32(words(codes_NK, bits).T),
        ".qzeros": as_int32(zero_words),
        ".scales": scales_NJ.T.contiguous(),
        ".g_idx": torch.from_numpy(group_K.astype(np.int32)),
    }
    return Packed(tensors, weight_of(codes_NK, zeros_NJ, scales_NJ, group_K))


def packed_int(
    rng: np.random.Generator,
    num_rows: int,
    num_columns: int,
    group: int = 128,
    bits: int = 4,
    sym: bool = True,
    order: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> Packed:
    """compressed-tensors pack-quantized: signed codes and zero points plus 8 (or 128) along K, and along N."""
    group_K = groups_of(num_columns, group)
    num_groups, middle = int(group_K[-1]) + 1, 2 ** (bits - 1)
    if order:
        group_K = group_K[rng.permutation(num_columns)]
    codes_NK = rng.integers(-middle, middle, (num_rows, num_columns))
    zeros_NJ = np.zeros((num_rows, num_groups), dtype=np.int64)
    if not sym:
        zeros_NJ = rng.integers(-middle, middle, zeros_NJ.shape)
    scales_NJ = scales_of(rng, (num_rows, num_groups), dtype)
    tensors = {
        ".weight_packed": as_int32(words(codes_NK + middle, bits)),
        ".weight_scale": scales_NJ,
        ".weight_shape": torch.tensor([num_rows, num_columns]),
    }
    if not sym:
        tensors[".weight_zero_point"] = as_int32(words((zeros_NJ + middle).T, bits).T)
    if order:
        tensors[".weight_g_idx"] = torch.from_numpy(group_K.astype(np.int32))
    return Packed(tensors, weight_of(codes_NK, zeros_NJ, scales_NJ, group_K))


def int8(
    rng: np.random.Generator,
    num_rows: int,
    num_columns: int,
    group: int = -1,
    sym: bool = True,
    shape: tuple[int, ...] | None = None,
) -> Packed:
    """compressed-tensors int-quantized: int8 codes; scales and zero points by group, by row, or one."""
    group_K = groups_of(num_columns, group)
    num_groups = int(group_K[-1]) + 1
    shape = (num_rows, num_groups) if shape is None else shape
    codes_NK = rng.integers(-128, 128, (num_rows, num_columns))
    scales = scales_of(rng, shape, torch.bfloat16)
    zeros = np.zeros(shape, dtype=np.int64) if sym else rng.integers(-20, 20, shape)
    full = (num_rows, num_groups)
    scales_NJ = scales.reshape(-1, num_groups).expand(full)
    zeros_NJ = np.broadcast_to(np.reshape(zeros, (-1, num_groups)), full)
    tensors = {".weight": torch.from_numpy(codes_NK.astype(np.int8)), ".weight_scale": scales}
    if not sym:
        tensors[".weight_zero_point"] = torch.from_numpy(np.asarray(zeros).astype(np.int8))
    return Packed(tensors, weight_of(codes_NK, zeros_NJ, scales_NJ, group_K))


def e4m3_scales(rng: np.random.Generator, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(rng.uniform(1, 400, shape).astype(np.float32)).to(torch.float8_e4m3fn)


def nibbles(codes_NK: np.ndarray) -> torch.Tensor:
    """A byte holds inputs 2k and 2k + 1, the first in the low bits."""
    return torch.from_numpy((codes_NK[:, 0::2] | codes_NK[:, 1::2] << 4).astype(np.uint8))


def nvfp4(rng: np.random.Generator, num_rows: int, num_columns: int, is_modelopt: bool = False) -> Packed:
    """e2m1 codes, e4m3 scales for 16 inputs and one scale of these: ModelOpt multiplies by it, compressed-tensors divides."""
    codes_NK = rng.integers(0, 16, (num_rows, num_columns))
    scales_NJ = e4m3_scales(rng, (num_rows, num_columns // 16))
    small = np.float32(rng.uniform(0.0003, 0.0007))
    second = small if is_modelopt else np.float32(1) / small
    first = scales_NJ.float().numpy()
    both = first * second if is_modelopt else first / second
    weight = E2M1[codes_NK] * both[:, np.arange(num_columns) // 16]
    if is_modelopt:
        tensors = {".weight": nibbles(codes_NK), ".weight_scale": scales_NJ, ".weight_scale_2": torch.tensor(second)}
        tensors[".input_scale"] = torch.tensor(0.5)
    else:
        tensors = {".weight_packed": nibbles(codes_NK), ".weight_scale": scales_NJ}
        tensors |= {".weight_global_scale": torch.tensor([second]), ".input_global_scale": torch.tensor([3.0])}
    return Packed(tensors, torch.from_numpy(weight))


def modelopt_nvfp4(rng: np.random.Generator, num_rows: int, num_columns: int) -> Packed:
    return nvfp4(rng, num_rows, num_columns, is_modelopt=True)


def mxfp4(rng: np.random.Generator, num_rows: int, num_columns: int) -> Packed:
    """e2m1 codes and exponents of two, plus 127, for 32 inputs."""
    codes_NK = rng.integers(0, 16, (num_rows, num_columns))
    exponents_NJ = rng.integers(118, 124, (num_rows, num_columns // 32))
    powers = np.exp2((exponents_NJ - 127).astype(np.float32))
    weight = E2M1[codes_NK] * powers[:, np.arange(num_columns) // 32]
    tensors = {".weight_packed": nibbles(codes_NK), ".weight_scale": torch.from_numpy(exponents_NJ.astype(np.uint8))}
    return Packed(tensors, torch.from_numpy(weight))


def fp8(rng: np.random.Generator, num_rows: int, num_columns: int, by: str = "tensor") -> Packed:
    """e4m3 codes, and scales by tensor, by row, or by blocks of 128 x 128."""
    codes_NK = torch.from_numpy(rng.standard_normal((num_rows, num_columns)).astype(np.float32)).to(torch.float8_e4m3fn)
    shapes = {"tensor": (), "row": (num_rows, 1), "block": (-(-num_rows // 128), -(-num_columns // 128))}
    scales = scales_of(rng, shapes[by], torch.float32)
    full = scales.reshape(scales.shape or (1, 1))
    if by == "block":
        full = full.repeat_interleave(128, 0)[:num_rows].repeat_interleave(128, 1)[:, :num_columns]
    return Packed({".weight": codes_NK, ".weight_scale": scales}, codes_NK.float() * full)
